"""The examples: help, the loop that they share, runs cut short and gone on with.

That each runs to its end, with its loss falling, is what CI's `python examples/*.py` shows.
"""

import importlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_accum as oa

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("[!_]*.py"))
SECONDS = 240  # for one run on a busy machine; on a quiet one it needs about 10
sys.path.insert(0, str(EXAMPLES))


def run(monkeypatch, name, *arguments):
    """The example's main with these arguments, in this process."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
    importlib.import_module(name).main()


@pytest.mark.parametrize("name", NAMES)
def test_help(monkeypatch, capsys, name):
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, name, "--help")
    assert not ended.value.code
    assert f"python examples/{name}.py" in capsys.readouterr().out
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 170


# The shared loop, on the smallest window there is.

TX = oa.accumulate(optax.sgd(1.0, momentum=0.5), k=4)


def small_run(monkeypatch, *arguments, interrupted_in=None):
    """Weights, and the indices of the calls made, of 3 updates of 4 micro-steps."""
    common = importlib.import_module("_common")
    parsed = common.arguments(None, 3).parse_args(list(map(str, arguments)))
    params, made = jnp.zeros(3), []
    with common.Run(parsed, calls_an_update=4) as loop:
        params, state = loop.resumed((params, TX.init(params)))
        while loop.goes_on:
            made.append(loop.call)
            if loop.call == interrupted_in:
                signal.raise_signal(signal.SIGINT)
            grads = jnp.sin(jnp.arange(3) + loop.call)
            params, state = oa.apply_gradients(TX, grads, state, params)
            loop.made((params, state), loop.call)
    assert loop.losses.tolist() == [1.5, 5.5, 9.5]
    return params, made


@pytest.mark.parametrize("stop", [1, 4, 6, 11])
def test_a_run_goes_on_where_it_stopped(monkeypatch, tmp_path, stop):
    whole, calls = small_run(monkeypatch)
    assert calls == list(range(12))
    arguments = "--checkpoint-dir", tmp_path
    with pytest.raises(SystemExit):
        small_run(monkeypatch, *arguments, "--stop-after", stop)
    rest, calls = small_run(monkeypatch, *arguments)
    assert calls == list(range(stop, 12))
    assert rest.tobytes() == whole.tobytes()


def test_ctrl_c_lets_the_call_end_and_keeps_it(monkeypatch, tmp_path, capsys):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as ended:
        small_run(monkeypatch, "--checkpoint-dir", tmp_path, interrupted_in=6)
    assert ended.value.code == 130 and signal.getsignal(signal.SIGINT) is before
    assert "stopped after call 7 of 12" in capsys.readouterr().out
    _, calls = small_run(monkeypatch, "--checkpoint-dir", tmp_path)
    assert calls == list(range(7, 12))


@pytest.mark.parametrize(
    "arguments", ["--updates 0", "--checkpoint-every 0", "--stop-after x", "--checkpoint-dir FILE"]
)
def test_what_cannot_be_meant(tmp_path, capsys, arguments):
    (tmp_path / "file").write_text("")
    parser = importlib.import_module("_common").arguments(None, 3)
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(arguments.replace("FILE", str(tmp_path / "file")).split())
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 2
    assert "expected an integer of 1 or more" in err or "cannot be made a directory" in err


@pytest.mark.parametrize("name, updates", [("one.py", 2), ("another.py", 3)])
def test_a_directory_belongs_to_one_run(monkeypatch, tmp_path, name, updates):
    common = importlib.import_module("_common")

    def begin(program, number):
        monkeypatch.setattr(sys, "argv", [program])
        given = ["--checkpoint-dir", str(tmp_path), "--updates", str(number)]
        common.Run(common.arguments(None, 3).parse_args(given)).manager.close()

    begin("another.py", 2)
    begin("one.py", 3)  # nothing was kept yet
    (tmp_path / "7").mkdir()
    begin("one.py", 3)
    with pytest.raises(SystemExit, match=f"holds a run of one --updates 3, not of {name[:-3]} --u"):
        begin(name, updates)


def test_an_error_is_not_taken_for_an_end(monkeypatch):
    monkeypatch.setattr(oa, "apply_gradients", lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        small_run(monkeypatch)


@pytest.mark.parametrize("at", [0, 1])
def test_the_proof_can_fail(at):
    prove = importlib.import_module("_common").prove
    leaves = [np.zeros(2), np.zeros(2)]
    prove(np.array([1.0, 0.5]), leaves, leaves, 1e-5)
    for wrong in (np.nan, 1e-3):
        others = [np.zeros(2), np.zeros(2)]
        others[at] = np.array([0.0, wrong])
        with pytest.raises(AssertionError):
            prove(np.array([1.0, 0.5]), leaves, others, 1e-5)
    with pytest.raises(AssertionError):
        prove(np.array([1.0, 0.8]), leaves, leaves, 1e-5)


# Cut short and gone on with: (updates, calls before it is cut); the language model is killed below.

CUTS = {
    "adapters": (2, 11),
    "digits_batchnorm": (3, 2),
    "float16_loss_scale": (3, 6),
    "segmentation": (2, 19),
}
QUICK = {"float16_loss_scale"}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in CUTS]
)
def test_cut_short_and_gone_on_with(monkeypatch, tmp_path, name):
    updates, cut = CUTS[name]
    seen = []
    module = importlib.import_module(name)
    monkeypatch.setattr(module, "prove", lambda *args, tolerance: seen.append((*args, tolerance)))
    if name == "float16_loss_scale":
        monkeypatch.setattr(module, "DAMAGED", 7)
    run(monkeypatch, name, "--updates", updates)
    arguments = "--updates", updates, "--checkpoint-dir", tmp_path
    with pytest.raises(SystemExit):
        run(monkeypatch, name, *arguments, "--stop-after", cut)
    run(monkeypatch, name, *arguments)
    (losses, weights, twin, tolerance), (resumed_losses, resumed, _, _) = seen
    assert losses.tolist() == resumed_losses.tolist()
    for a, b, c in zip(*map(jax.tree.leaves, (weights, resumed, twin)), strict=True):
        a, b, c = map(np.asarray, (a, b, c))
        assert a.tobytes() == b.tobytes()
        np.testing.assert_allclose(a, c, rtol=0, atol=tolerance)


def process(*arguments):
    command = [sys.executable, str(EXAMPLES / "language_model.py"), *map(str, arguments)]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)


def fingerprint(*arguments):
    out, _ = process(*arguments).communicate(timeout=SECONDS)
    return re.search(r"fingerprint of the weights: (\w+)", out)[1], out


@pytest.mark.full
def test_language_model_killed_inside_a_window(tmp_path):
    """SIGKILL once a checkpoint is written, inside a window; the rest ends on the same bits."""
    updates = "--updates", 12, "--checkpoint-every", 7
    whole, _ = fingerprint(*updates)
    killed = process(*updates, "--checkpoint-dir", tmp_path)
    deadline = time.monotonic() + SECONDS
    while not (tmp_path / "7").exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=SECONDS)
    assert killed.returncode == -signal.SIGKILL
    kept = max(int(path.name) for path in tmp_path.iterdir() if path.name.isdigit())
    assert kept % 4  # micro-steps into a window
    resumed, out = fingerprint(*updates, "--checkpoint-dir", tmp_path)
    assert f"went on after call {kept}, {kept % 4} micro-steps into a window" in out
    assert resumed == whole
