"""The floors of the layout: imports point to a lower floor only, and nobody imports a framework."""

import ast
import inspect
import pathlib

import pytest

import optax_accum

ROOT = pathlib.Path(optax_accum.__file__).parent
FLOORS = [
    {"_axis", "_checks", "_device_groups", "_forwarding", "_rounding", "_units"},
    {
        "_arguments",
        "_batch_arithmetic",
        "_compiled_memory",
        "_cond",
        "_fits",
        "_hlo",
        "_hyperparameters",
        "_nnx_graph",
        "_size_search",
        "_split",
        "_target",
    },
    {"_accumulator", "_batch_stats", "_loss_scale", "_oracle", "_reductions", "_traffic"},
    {"_aux", "_coupling", "_engines", "_merging", "_record", "_nnx_roles", "_shares", "_state"},
    {"_call", "_held", "_program", "_rows", "_shardings"},
    {"_advance", "_batch_axes", "_explain", "_memory", "_remedies", "_scan", "_windows"},
    {"_convert", "_mesh", "_plan", "_transform"},
    {"_fit", "_loop", "_micro_step", "_nnx_optimizer", "_nnx_trial", "_report", "diagnostics"},
    {"_causes", "_plan_report", "linen", "nnx", "planning"},
    {"_planning_commands", "verify"},
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
    "_plan_report": {"rich", "matplotlib"},
    "_nnx_graph": {"flax"},
    "_nnx_optimizer": {"flax"},
    "_nnx_roles": {"flax"},
    "linen": {"flax"},
    "nnx": {"flax"},
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
        "adjust_loss_scale",
        "apply_gradients",
        "convert_state",
        "diagnostics",
        "flush",
        "has_updated",
        "mark_last",
        "merge_batch_stats",
        "micro_step",
        "planning",
        "refold",
        "state_shardings",
        "state_specs",
        "Stats",
        "value_and_grad",
        "verify",
        "with_loss_scale",
    } | (names & set(MODULES))
    for name in names - set(MODULES):
        assert getattr(optax_accum, name).__doc__


def test_public_home():
    """Tracebacks, help() and pickles name the package, not its rooms."""
    for name, thing in vars(optax_accum).items():
        if not name.startswith("_") and not inspect.ismodule(thing):
            assert thing.__module__ == "optax_accum", name
