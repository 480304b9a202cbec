"""The demo shows what it claims, in numbers; its arguments answer mistakes with the remedy."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import optax_accum
from optax_accum import _report, cli, demo

SMALL = ["--updates", "8", "--global-batch", "16", "--k", "4"]


def check_claims(shown: dict[str, Any]) -> None:
    updates, k = shown["updates"], shown["k"]
    big, accumulated, in_one_call, unweighted, multi_steps, shuffled = shown["runs"]
    for run in shown["runs"]:
        assert run["first_loss"] - run["loss"] >= 1
        assert run["inner_calls"] == updates * (k if run is multi_steps else 1)
    assert big["time_ratio"] == 1
    assert shuffled["max_loss_difference"] < 1e-5
    for exact in accumulated, in_one_call:
        assert exact["max_loss_difference"] < 1e-5
        assert exact["temp_bytes"] <= 0.4 * big["temp_bytes"]
        assert exact["total_bytes"] < big["total_bytes"]
        for difference in "max_loss_difference", "max_param_difference":
            assert unweighted[difference] > 10 * exact[difference]
    assert abs(in_one_call["loss"] - accumulated["loss"]) < 1e-5
    assert in_one_call["argument_bytes"] == big["argument_bytes"]  # the whole batch, no window
    assert Path(shown["picture"]).read_bytes().startswith(b"\x89PNG")


def test_small_run_shows_its_claims(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "LAYERS", 1)
    assert cli.main(["demo", *SMALL, "--json", "--out", str(tmp_path)]) == 0
    check_claims(json.loads(capsys.readouterr().out))


@pytest.mark.full
def test_default_run_shows_its_claims(tmp_path):
    command = [sys.executable, "-m", "optax_accum", "demo", "--json", "--out", str(tmp_path)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert (shown["updates"], shown["global_batch"], shown["k"]) == (60, 64, 8)
    check_claims(shown)


def test_ctrl_c_shows_what_there_is(tmp_path, monkeypatch, capsys):
    planned, update, calls = demo.planned, demo.update, []

    def interrupted_in_the_third_update(*arguments: Any) -> Any:
        calls.append(None)
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return update(*arguments)

    monkeypatch.setattr(demo, "LAYERS", 0)
    monkeypatch.setattr(_report, "LINES", _report.LINES[:2])
    monkeypatch.setattr(demo, "planned", lambda *arguments: planned(*arguments)[:2])
    monkeypatch.setattr(demo, "update", interrupted_in_the_third_update)
    before = signal.getsignal(signal.SIGINT)
    assert cli.main(["demo", *SMALL, "--json", "--out", str(tmp_path)]) == 130
    assert signal.getsignal(signal.SIGINT) is before
    printed = capsys.readouterr()
    shown = json.loads(printed.out)
    assert [run["inner_calls"] for run in shown["runs"]] == [2, 2]
    assert "interrupted after 2 of 8 updates" in printed.err
    assert Path(shown["picture"]).exists()


def test_ctrl_c_before_the_first_update(tmp_path, monkeypatch, capsys):
    def interrupted(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "compiled", interrupted)
    assert cli.main(["demo", *SMALL, "--out", str(tmp_path)]) == 130
    assert not list(tmp_path.iterdir())
    assert "Traceback" not in capsys.readouterr().err


def test_batches_are_the_seed_s_and_count_unequally():
    first, second = demo.batches(2, 64, seed=3)
    again, _ = demo.batches(2, 64, seed=3)
    other, _ = demo.batches(2, 64, seed=4)
    assert all(np.array_equal(*leaves) for leaves in zip(first, again, strict=True))
    assert not np.array_equal(first.tokens, second.tokens)
    assert not np.array_equal(first.tokens, other.tokens)
    assert np.array_equal(first.tokens[:, 1:], first.targets[:, :-1])
    assert set(first.counted.sum(axis=1)) <= set(range(1, demo.LENGTH + 1))
    parts = demo.parts_of(demo.Run("", optax.identity(), 8), first)
    sums = [part.counted.sum() for part in parts]
    assert max(sums) > 1.2 * min(sums)


def test_counter_counts_at_run_time():
    calls: list[None] = []
    counter = demo.counter(calls)
    branch = lambda x: counter.update(x, optax.EmptyState())[0]  # noqa: E731
    program = jax.jit(lambda run, x: jax.lax.cond(run, branch, lambda x: x, x))
    for run in (True, False, True, True):
        program(run, 1.0)
    jax.effects_barrier()
    assert len(calls) == 3


def test_report_without_memory_and_at_width_80(tmp_path):
    names = [run.name for run in demo.planned(optax.sgd(1.0), 2, np.arange(4))]
    row = demo.Result("", 2.0, 1e-6, 1e-7, 10**6, 10**9, 10**9 + 10**6, 0.95, 480, 5.0)
    unknown = {"argument_bytes": None, "temp_bytes": None, "total_bytes": None}
    for known in ({}, unknown):
        rows = [row._replace(name=name, **known) for name in names]
        console = demo.Console(width=80, file=io.StringIO())
        console.print(demo.table(rows, "title"))
        text = console.file.getvalue()
        assert "…" not in text and all(name in text for name in names)
        demo.draw(rows, [[(2.0, 0.1, 1, 0.0)] * len(rows)], "title", str(tmp_path / "picture.png"))


def test_compiled_bytes_of_a_backend_that_does_not_tell():
    class Program:
        def memory_analysis(self) -> None:
            return None

    assert demo.compiled_bytes(Program()) == (None, None, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: command"),
        (["dome"], "invalid choice"),
        (["demo", "--updates", "0"], "--updates: got '0', expected an integer of 1 or more"),
        (["demo", "--updates", "1.5"], "--updates: got '1.5', expected an integer of 1 or more"),
        (["demo", "--k", "-2"], "--k: got '-2', expected an integer of 1 or more"),
        (["demo", "--global-batch", "x"], "--global-batch: got 'x', expected an integer"),
        (["demo", "--seed", "-1"], "--seed: got '-1', expected an integer from 0 to 4294967295"),
        (
            ["demo", "--k", "7"],
            "global batch of 64 does not split into k=7 micro-batches; use --k 4 or --k 8",
        ),
        (["demo", "--k", "100"], "k=100 micro-batches; use --k 64\n"),
        (["demo", "--out", __file__], "cannot be made a directory"),
    ],
)
def test_mistakes_are_answered_with_the_remedy(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(arguments)
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("extra", ["flax", "matplotlib.figure", "rich"])
def test_missing_extras_are_named_with_the_command_to_type(extra, monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "optax_accum.demo")
    monkeypatch.delattr(optax_accum, "demo")
    monkeypatch.delitem(sys.modules, "optax_accum._report")
    monkeypatch.delattr(optax_accum, "_report")
    monkeypatch.setitem(sys.modules, extra, None)
    assert cli.main(["demo"]) == 1
    printed = capsys.readouterr()
    assert 'pip install "optax-accum[demo]"' in printed.err
    assert extra.split(".")[0] in printed.err and not printed.out


def test_command_line_loads_no_extra():
    code = "import sys, optax_accum.cli; print({'flax', 'matplotlib', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
