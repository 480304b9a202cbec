"""The floors of the layout: imports point to a lower floor only, and nobody imports a framework."""

import ast
import inspect
import pathlib

import pytest

import optax_accum

ROOT = pathlib.Path(optax_accum.__file__).parent
FLOORS = [
    {"_axis", "_checks", "_device_groups", "_rounding"},
    {"_cond", "_fits", "_hlo", "_split"},
    {"_accumulator", "_oracle", "_reductions"},
    {"_aux", "_coupling", "_engines", "_shares", "_state"},
    {"_call", "_program", "_rows", "_shardings"},
    {"_advance", "_batch_axes", "_scan"},
    {"_mesh", "_transform"},
    {"_loop", "_micro_step", "_report", "diagnostics", "planning"},
    {"_causes"},
    {"verify"},
    {"demo"},
    {"cli"},
    {"__main__"},
]
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}
MODULES = sorted(path.stem for path in ROOT.glob("*.py") if path.stem != "__init__")
RUNTIME = {"jax", "numpy", "optax", "optax_accum"}  # numpy comes with jax
EXTRAS = {
    "demo": {"flax", "rich"},
    "_report": {"rich", "matplotlib"},
}  # imported inside functions by the others


def imports(module, top_level_only=False):
    tree = ast.parse((ROOT / f"{module}.py").read_text())
    nodes = tree.body if top_level_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            if node.module == "optax_accum":
                yield from (f"optax_accum.{alias.name}" for alias in node.names)
            else:
                yield node.module


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_a_floor(module):
    assert module in FLOOR


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module):
    for name in imports(module):
        assert name != "optax_accum" or module == "demo", "import the room, not the package"
        if name.startswith("optax_accum."):
            below = name.split(".")[1]
            if below in FLOOR:
                assert FLOOR[below] < FLOOR[module], (
                    f"{module} imports {below}, which is on no lower floor"
                )


@pytest.mark.parametrize("module", MODULES)
def test_runtime_dependencies_are_jax_and_optax(module):
    import sys

    outside = {name.split(".")[0] for name in imports(module, top_level_only=True)}
    allowed = RUNTIME | set(sys.stdlib_module_names) | EXTRAS.get(module, set())
    assert outside <= allowed


@pytest.mark.parametrize("module", MODULES)
def test_rooms_stay_small(module):
    assert len((ROOT / f"{module}.py").read_text().splitlines()) <= 350


def test_exports():
    names = {name for name in dir(optax_accum) if not name.startswith("_")}
    assert names == {
        "AccumulateState",
        "accumulate",
        "apply_gradients",
        "diagnostics",
        "flush",
        "has_updated",
        "mark_last",
        "micro_step",
        "planning",
        "refold",
        "state_shardings",
        "state_specs",
        "Stats",
        "value_and_grad",
        "verify",
    } | (names & set(MODULES))
    for name in names - set(MODULES):
        assert getattr(optax_accum, name).__doc__


def test_public_home():
    """Tracebacks, help() and pickles name the package, not its rooms."""
    for name, thing in vars(optax_accum).items():
        if not name.startswith("_") and not inspect.ismodule(thing):
            assert thing.__module__ == "optax_accum", name
