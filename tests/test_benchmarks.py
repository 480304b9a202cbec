"""The benchmark of the space driver runs, and times nothing that computes something else."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import optax
import pytest

import optax_accum as oa
from benchmarks import space_driver

ROOT = pathlib.Path(__file__).parent.parent
SHARED = {"case", "method", "value", "unit", "ratio_to_floor"}
PAIRED = SHARED | {"spread", "ratio_spread", "floor", "rounds"}
IN_P = {"total_in_P", "temporaries_in_P"}
KEYS = {  # by the first word of a case
    "time": PAIRED | IN_P,
    "compile": PAIRED | {"lower_value", "lower_ratio_to_floor"},
    "memory": SHARED | IN_P,
}
ONE_CALL = {
    "big batch",
    "hand-written scan",
    "optax.microbatch",
    "oa carry",
    "oa refs",
    "oa auto",
}
METHODS = {
    "time": ONE_CALL,
    "compile": ONE_CALL,
    "memory": {"oa refs", "oa carry", "optax.microbatch", "optax.MultiSteps"},
}


@pytest.mark.full
def test_the_command_prints_a_row_a_method():
    command = [sys.executable, "-m", "benchmarks.space_driver", "--quick", "--json"]
    quickly = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    environment = os.environ | quickly
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    rows = json.loads(ran.stdout)
    for part, methods in METHODS.items():
        found = [row for row in rows if row["case"].startswith(part)]
        assert {row["method"] for row in found} - {"oa.micro_step"} == methods
        for row in found:
            assert set(row) == KEYS[part]
            assert row["value"] > 0 and row["ratio_to_floor"] > 0


@pytest.mark.full
def test_what_computes_something_else_has_no_time(monkeypatch, capsys):
    right = oa.value_and_grad

    def wrong(*args, **keywords):
        grad_fn = right(*args, **keywords)

        def doubled(*args):
            value, grads = grad_fn(*args)
            return value, jax.tree.map(lambda x: 2 * x, grads)

        return doubled

    monkeypatch.setattr(oa, "value_and_grad", wrong)
    monkeypatch.setattr(space_driver, "OPTIMIZER", optax.sgd(0.1))  # compiles in less time
    every = space_driver.methods
    few = ("big batch", "hand-written scan", "oa carry")
    monkeypatch.setattr(
        space_driver, "methods", lambda *split: {name: every(*split)[name] for name in few}
    )
    with pytest.raises(AssertionError, match="oa carry differs from the hand-written scan"):
        space_driver.main(["--quick", "--json", "--parts", "time"])
    assert capsys.readouterr().out == ""
