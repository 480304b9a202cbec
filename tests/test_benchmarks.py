"""The benchmarks run, say what they ran, and time nothing that computes something else."""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

import optax_accum as oa
from benchmarks import (
    __main__,
    _measure,
    _peers,
    _report,
    collectives,
    compile_time,
    growth,
    memory,
    optimizer_bound,
    precision,
    transformer,
)

ROOT = pathlib.Path(__file__).parent.parent
MODULES = {
    "optimizer": optimizer_bound,
    "memory": memory,
    "transformer": transformer,
    "collectives": collectives,
    "compile": compile_time,
    "growth": growth,
    "precision": precision,
}
IN_ONE_CALL = {_peers.BIG, _peers.SCAN, _peers.MICROBATCH, _peers.CARRY, _peers.REFS}
IN_K_CALLS = {_peers.MULTI_STEPS, _peers.APPLY, _peers.MICRO_STEP}
METHODS = {  # each case names at least these
    "optimizer": {_measure.FLOOR, _peers.APPLY, _peers.UPDATE, _peers.MULTI_STEPS}
    | {_peers.APPLY_EVERY, optimizer_bound.BY_HAND, optimizer_bound.IN_ONE_CALL},
    "memory": IN_ONE_CALL | IN_K_CALLS | {_peers.UPDATE, _peers.APPLY_EVERY},
    "transformer": IN_ONE_CALL | IN_K_CALLS | {_peers.APPLY_EVERY, _peers.TORCH},
    "collectives": {_peers.BIG, _peers.SCAN, _peers.MICROBATCH, "oa.value_and_grad, mesh"},
    "compile": IN_ONE_CALL - {_peers.BIG},
    "growth": {_measure.FLOOR, _peers.APPLY, _peers.MULTI_STEPS},
    "precision": {"oa.accumulate, bfloat16", "oa.value_and_grad, float32"}
    | {"optax.MultiSteps, bfloat16", "optax.apply_every, float32", "optax.microbatch, float32"},
}
SMALL = optimizer_bound.Size(1, (3,), 2, "sgd")


def stand_in(case):
    """What a case would return, for tests of the command alone."""
    row = _measure.row(case, "oa.apply_gradients", 1.0, "s/window", 1.0)
    return [row | {"setting": "none", "floor": "floor"}]


@pytest.fixture
def no_measuring(monkeypatch):
    """Every case returns at once; what scale each was asked for."""
    asked = {}

    def instead(case):
        return lambda scale: asked.update({case: scale}) or stand_in(case)

    for case, module in MODULES.items():
        monkeypatch.setattr(module, "rows", instead(case))
    return asked


@pytest.mark.parametrize(
    ("argv", "cases", "scale"),
    [
        ([], list(MODULES), "full"),
        (["--quick"], list(MODULES), "quick"),
        (["memory", "optimizer", "--quick"], ["memory", "optimizer"], "quick"),
    ],
)
def test_cases_by_name(no_measuring, capsys, argv, cases, scale):
    assert __main__.main([*argv, "--json"]) == 0
    assert no_measuring == {case: scale for case in cases}
    rows = json.loads(capsys.readouterr().out)
    assert [row["case"] for row in rows] == [*cases, "peers"]


def test_a_wrong_case_is_told_the_right_ones(capsys):
    with pytest.raises(SystemExit):
        __main__.main(["speed"])
    error = capsys.readouterr().err
    assert "no case 'speed'" in error
    assert all(case in error for case in MODULES)


def test_every_case_has_a_module():
    assert {case: f"benchmarks.{name}" for case, name in __main__.CASES.items()} == {
        case: module.__name__ for case, module in MODULES.items()
    }


@pytest.mark.parametrize("installed", [True, False])
def test_it_says_which_peers_were_missing(no_measuring, monkeypatch, capsys, installed):
    found = importlib.util.find_spec
    spec = found("json") if installed else None
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: spec if name == "torch" else found(name)
    )
    monkeypatch.setattr(_peers.importlib.metadata, "version", lambda name: "1")
    assert __main__.main(["optimizer", "--json"]) == 0
    last = json.loads(capsys.readouterr().out)[-1]
    assert last["value"] == len(last["missing_peers"]) == (0 if installed else 1)
    assert installed or "pip install torch" in last["missing_peers"]["PyTorch"]
    size = transformer.SIZES["tiny"][0]
    left_out = {row["method"]: row for row in transformer.left_out(transformer.make(size, 2))}
    assert (_peers.TORCH in left_out) is not installed
    assert installed or "pip install torch" in left_out[_peers.TORCH]["missing"]
    assert __main__.main(["optimizer"]) == 0
    assert ("missing peer: PyTorch" in capsys.readouterr().out) is not installed


def test_a_row_has_what_scripts_read():
    rows = optimizer_bound.measure(SMALL, 0.0, 2)
    assert {row["method"] for row in rows} == METHODS["optimizer"]
    for row in rows:
        assert row["case"] == "optimizer" and row["unit"] == "s/window"
        assert row["value"] > 0 and row["ratio_to_floor"] > 0 and row["rounds"] == 2
        assert (row["leaves"], row["shape"], row["k"]) == (1, "3", 2)
    json.dumps(rows)


def test_precision_knows_the_law():
    rows = precision.rows("tiny")
    assert METHODS["precision"] <= {row["method"] for row in rows}
    for row in rows:
        assert 0 < row["value"] < precision.SLACK * row["law"]
    narrow = [row["law"] for row in rows if row["method"] == "oa.accumulate, bfloat16"]
    assert narrow[0] == pytest.approx(1.66e-3 * 2**0.5)


def test_what_computes_something_else_has_no_time(monkeypatch, capsys):
    right = oa.apply_gradients

    def wrong(tx, grads, state, params, **keywords):
        return right(tx, jax.tree.map(lambda x: 2 * x, grads), state, params, **keywords)

    monkeypatch.setattr(oa, "apply_gradients", wrong)
    monkeypatch.setattr(optimizer_bound, "SIZES", {"quick": [SMALL]})
    assert __main__.main(["optimizer", "--quick", "--json"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "error: oa.apply_gradients differs from floor" in said.err


def test_what_is_wrong_has_no_precision(monkeypatch):
    monkeypatch.setattr(precision, "time_driver", lambda dtype, grads: 1.01 * grads.mean(0))
    with pytest.raises(_measure.WrongResult, match=r"oa\.accumulate, float32 is off by"):
        precision.rows("tiny")


@pytest.mark.parametrize("wrong", [1.001, np.nan])
def test_equal_is_relative_to_what_moved(wrong):
    start = {"w": np.full(3, 100.0, np.float32)}
    good = {"w": start["w"] + np.float32(1)}
    moved = {"w": start["w"] + np.float32(wrong)}
    _measure.check_equal({"a": good, "b": good}, "a", start, 1e-4)
    with pytest.raises(_measure.WrongResult, match=r"b differs from a .* in \['w'\]"):
        _measure.check_equal({"a": good, "b": moved}, "a", start, 1e-4)


def test_ratios_are_of_pairs():
    sample = _measure.Sample
    times = {
        "a": [sample(2.0, 1.0), sample(20.0, 1.0), sample(3.0, 1.0)],
        "floor": [sample(1.0, 2.0), sample(10.0, 2.0), sample(1.0, 2.0)],
    }
    row = _measure.paired_row("case", "a", times, "floor", "s")
    assert row["value"] == 3.0 and row["ratio_to_floor"] == 2.0
    assert row["cpu_ratio_to_floor"] == 0.5
    assert _measure.fastest(times, ["a", "floor"]) == "floor"


class Device:
    """A device that tells what it held: two methods, the second of a higher peak."""

    def __init__(self, peaks):
        self.peaks = iter(peaks)

    def memory_stats(self):
        return {"bytes_in_use": 100, "peak_bytes_in_use": next(self.peaks)}


class Program:
    def memory_analysis(self):
        return None


def test_what_the_device_held_is_a_new_peak(monkeypatch):
    size = memory.Size(1, 5, 2, True)
    monkeypatch.setattr(memory, "_run_once", lambda size, compiled: None)
    methods = size.methods()
    few = {name: _peers.Compiled(Program(), methods[name]) for name in (_peers.SCAN, _peers.REFS)}
    told = memory.held_in_p(size, few, Device([300, 300, 300, 300, 1100]))
    assert told == {_peers.REFS: 10.0}  # 1000 bytes over what was there; P is 100 bytes
    assert memory.held_in_p(size, few, jax.devices()[0]) == {}


def test_pictures(tmp_path, no_measuring):
    pytest.importorskip("matplotlib")
    from benchmarks import _pictures

    rows = optimizer_bound.measure(SMALL, 0.0, 2, (_measure.FLOOR, _peers.APPLY))
    _pictures.write([*rows, _report.peers_row({}, {})], str(tmp_path / "new"))
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "benchmarks.png",
        "optimizer.png",
        "rows.json",
    ]


def test_pictures_without_matplotlib(no_measuring, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        __main__.main(["--out", "nowhere"])
    assert "pip install -e '.[benchmarks]'" in capsys.readouterr().err
    assert no_measuring == {}


@pytest.mark.full
@pytest.mark.parametrize("case", MODULES)
def test_every_case_and_peer_is_there(case):
    rows = MODULES[case].rows("tiny")
    assert METHODS[case] <= {row["method"] for row in rows}
    for row in rows:
        assert row["case"] == case
        assert {"method", "value", "unit", "ratio_to_floor", "setting"} <= row.keys()
        assert row.get("missing") or (row["value"] > 0 and row["ratio_to_floor"] is not None)
    json.dumps(rows)


@pytest.mark.full
def test_what_is_not_ours_is_shown_by_programs():
    text = (ROOT / "benchmarks" / "known.md").read_text()
    programs = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(programs) == 4
    for program in programs:
        exec(compile(program, "known.md", "exec"), {"__name__": "known"})


@pytest.mark.full
def test_the_commands_of_the_readme():
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    command = [sys.executable, "-m", "benchmarks.optimizer_bound", "--json"]
    command += ["--leaves", "2", "--side", "8", "--rounds", "2"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert METHODS["optimizer"] - {_peers.APPLY_EVERY} == {
        row["method"] for row in json.loads(ran.stdout)
    }
