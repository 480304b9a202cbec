"""The planning commands: what they print, and how they answer mistakes."""

import json
import subprocess
import sys

import pytest

import optax_accum as oa
from optax_accum import cli

TRAIN = """
import jax
import jax.numpy as jnp
import optax
import optax_accum as oa

W = jax.ShapeDtypeStruct((32, 32), jnp.float32)
inner = optax.sgd(1e-3)
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def plan():
    def make_update(micro_batch, k):
        loss_fn = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
        micro_step = oa.micro_step(loss_fn, oa.accumulate(inner, k))
        return jax.jit(micro_step, donate_argnums=(0, 1), compiler_options=FAST)

    def shapes(micro_batch, k):
        state = jax.eval_shape(oa.accumulate(inner, k).init, W)
        return W, state, jax.ShapeDtypeStruct((micro_batch, 32), jnp.float32)

    return make_update, shapes


def wants(size): return size
def alone(): return plan
def broken(): return (lambda b, k: int("mine")), plan()[1]
def not_jitted(): return (lambda b, k: plan), plan()[1]
number = 3
"""


@pytest.fixture
def train(tmp_path, monkeypatch):
    """The name of a module, new for every test, in the working directory."""
    name = f"train_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def run(capsys, *arguments):
    status = cli.main(list(arguments))
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_the_worked_example(capsys):
    example = ["batch", "--micro-batch", "4", "--k", "8", "--activation-per-sample", "0.5GB"]
    for replicas, total in ((1, 32), (4, 128)):
        arguments = [*example, "--replicas", str(replicas)]
        status, out, _ = run(capsys, *arguments)
        assert status == 0 and f"{total} = micro-batch 4 x k 8 x {replicas} replica" in out
        assert "2 GB a device" in out
        status, out, _ = run(capsys, *arguments, "--json")
        found = json.loads(out)
        assert (found["global_batch"], found["activations"]) == (total, 2 * 10**9)


def test_an_epoch(capsys):
    arguments = ["batch", "--global-batch", "64", "--micro-batch", "8", "--examples", "1000"]
    found = json.loads(run(capsys, *arguments, "--epochs", "2", "--json")[1])
    expected = oa.planning.batch(global_batch=64, micro_batch=8, examples=1000, epochs=2)
    assert found == expected._asdict()
    out = run(capsys, *arguments, "--drop-tail")[1]
    assert "15 updates" in out and "40 examples, dropped" in out


def test_memory(capsys):
    arguments = ["memory", "--parameters", "7B", "--zero", "1", "--devices", "8", "--k", "8"]
    found = json.loads(run(capsys, *arguments, "--json")[1])
    expected = oa.planning.memory("7B", zero=1, devices=8, k=8)
    assert found["total"] == expected.total
    assert [part["name"] for part in found["parts"]] == [part.name for part in expected.parts]
    status, out, _ = run(capsys, *arguments, "--accumulator-dtype", "bfloat16")
    assert status == 0 and "1910.02054" in out and "window" in out
    found = json.loads(run(capsys, *arguments, "--accumulator-dtype", "bfloat16", "--json")[1])
    assert found["window"] == 14 * 10**9


def test_plan(train, capsys, tmp_path):
    arguments = ["plan", f"{train}:plan", "--budget", "30kB", "--global-batch", "256"]
    status, out, err = run(capsys, *arguments, "--out", "pictures")
    assert status == 0
    assert "= global batch 256" in out and "within 30 kB" in out and "micro-batch" in out
    assert "compiling micro-batch 1, k 256 (1 of at most 5)" in err
    assert (tmp_path / "pictures" / "plan.png").stat().st_size > 10_000
    status, out, _ = run(capsys, *arguments, "--json", "--compilations", "2")
    found = json.loads(out)
    assert status == 0 and found["micro_batch"] * found["k"] == 256 and found["compilations"] == 2
    assert found["verified"] <= found["budget"] == 30_000
    assert [row["micro_batch"] for row in found["sizes"]] == [2**i for i in range(9)]


def test_plan_tells_what_was_not_tried(train, capsys):
    arguments = ["plan", f"{train}:plan", "--budget", "30kB", "--global-batch", "4"]
    _, out, _ = run(capsys, *arguments, "--compilations", "1", "--json")
    assert [row["fits"] for row in json.loads(out)["sizes"]] == [True, None, None]


@pytest.mark.parametrize("command", ["batch", "memory", "plan"])
def test_usage_is_short_and_all_options_have_help(command, capsys):
    with pytest.raises(SystemExit):
        cli.main([command, "--never"])
    assert len(capsys.readouterr().err.splitlines()) <= 3
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    out = capsys.readouterr().out
    assert all(f"{flag} " in out for flag in ("--json", "-h,"))
    assert command != "memory" or ("micro-gradient" in out and "of gradients over" in out)


def test_plan_where_nothing_fits(train, capsys):
    arguments = ["plan", f"{train}:plan", "--budget", "5kB", "--global-batch", "8", "--time"]
    status, out, _ = run(capsys, *arguments, "--out", "pictures")
    assert status == 1 and "nothing fits 5 kB" in out and "sharding" in out
    status, out, _ = run(capsys, *arguments, "--json")
    assert status == 1 and json.loads(out)["micro_batch"] is None
    assert {"sharding", "refs"} <= {row["what"] for row in json.loads(out)["remedies"]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("batch --global-batch 100 --micro-batch 8", "nearest that work: --global-batch 96, "),
        ("batch --global-batch 64", "type two of --global-batch, --micro-batch and --k, such as"),
        ("batch --micro-batch 4 --k x", "--k: got 'x', expected an integer of 1 or more"),
        ("batch --k 4 --micro-batch 4 --activation-per-sample much", "got 'much', expected bytes"),
        (
            "batch --k 4 --micro-batch 4 --examples 9 --drop-tail",
            "nothing is left with --drop-tail; type it without --drop-tail",
        ),
        ("memory", "--parameters"),
        ("memory --parameters 7X", "got '7X', expected a count; type 7B, 125M"),
        ("memory --parameters 7B --zero 4", "got '4', expected an integer from 0 to 3"),
        ("memory --parameters 7B --zero 1", "type --devices 8 or --zero 0"),
        ("memory --parameters 7B --trainable 2", "got '2', expected a share above 0, up to 1"),
        ("memory --parameters 7B --optimizer adamax", "invalid choice: 'adamax'"),
        ("plan TRAIN:plan --budget 16GiB", "--global-batch"),
        ("plan TRAIN:plan --budget 16gigs --global-batch 8", "got '16gigs', expected bytes"),
        ("plan TRAIN:plan --budget 16 --global-batch 8", "got '16', expected a unit"),
        ("batch --k 4 --micro-batch 4 --activation-per-sample 0.5", "type 0.5GB, 0.5GiB"),
        ("plan TRAIN:plan --global-batch 8", "cpu reports no limit of its memory"),
        ("plan TRAIN:plan --global-batch 8", "type --budget '16GiB'"),
        ("plan TRAIN.py:plan --budget 1GB --global-batch 8", "type TRAIN:plan"),
        ("plan TRAIN --budget 1GB --global-batch 8", "expected module:function; type TRAIN:plan"),
        ("plan nowhere:plan --budget 1GB --global-batch 8", "nowhere cannot be imported"),
        ("plan TRAIN:plans --budget 1GB --global-batch 8", "has no function 'plans'"),
        ("plan TRAIN:number --budget 1GB --global-batch 8", "has no function 'number'"),
        ("plan TRAIN:wants --budget 1GB --global-batch 8", "takes 'size', expected no arguments"),
        ("plan TRAIN:alone --budget 1GB --global-batch 8", "type return make_update, shapes"),
        ("plan TRAIN:not_jitted --budget 1GB --global-batch 8", "type jax.jit(update, donate_"),
        ("plan TRAIN:plan --budget 1GB --global-batch 8 --out TRAIN.py", "cannot be made a direct"),
    ],
)
def test_mistakes_are_answered_with_the_remedy(arguments, message, train, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(arguments.replace("TRAIN", train).split())
    assert exit.value.code == 2
    assert message.replace("TRAIN", train) in capsys.readouterr().err


def test_an_error_of_the_users_own_is_shown_as_it_is(train):
    with pytest.raises(ValueError, match="mine"):
        cli.main(["plan", f"{train}:broken", "--budget", "1GB", "--global-batch", "8"])


@pytest.mark.parametrize("extra", ["matplotlib.figure", "rich.table"])
def test_missing_extras_are_named_with_the_command_to_type(extra, monkeypatch, capsys, train):
    monkeypatch.delitem(sys.modules, "optax_accum._plan_report", raising=False)
    monkeypatch.delattr(oa, "_plan_report", raising=False)
    monkeypatch.setitem(sys.modules, extra, None)
    plan = ["plan", f"{train}:plan", "--budget", "1MB", "--global-batch", "8"]
    for arguments in (["batch", "--k", "2", "--micro-batch", "2"], plan):
        status, out, err = run(capsys, *arguments)
        assert status == 1 and not out
        assert 'pip install "optax-accum[cli]"' in err and extra.split(".")[0] in err
        assert "compiling" not in err
    assert run(capsys, "batch", "--k", "2", "--micro-batch", "2", "--json")[0] == 0


def test_json_needs_no_extra(train):
    code = (
        "import sys; sys.modules |= {'rich': None, 'matplotlib': None, 'flax': None}\n"
        "from optax_accum import cli; import jax; jax.config.update('jax_platforms', 'cpu')\n"
        f"sys.exit(cli.main('plan {train}:plan --budget 1MB --global-batch 2 --json'.split()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["micro_batch"] == 2
