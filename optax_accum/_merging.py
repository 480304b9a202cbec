"""The model's state over the micro-steps: handed on from one to the next, or merged after all."""

from collections.abc import Callable
from typing import Any

import jax

from optax_accum import _checks

# What users give: a function for the whole state, None, or a tree prefix of functions and Nones.
Merge = Any


def _is_leaf(thing: Any) -> bool:
    return thing is None or callable(thing)


def check(merge: Merge) -> None:
    for path, function in jax.tree_util.tree_leaves_with_path(merge, is_leaf=_is_leaf):
        _checks.function(f"merge_state{jax.tree_util.keystr(path)}", function)


def functions(merge: Merge) -> list[Callable[..., Any] | None]:
    """One for each part of the state; None where it is handed on."""
    return jax.tree.leaves(merge, is_leaf=_is_leaf)


def parts(merge: Merge, state: Any) -> list[Any]:
    try:
        return jax.tree.structure(merge, is_leaf=_is_leaf).flatten_up_to(state)
    except ValueError as error:
        raise ValueError(
            f"merge_state is {merge!r}, expected a function, or a tree prefix of the model's state "
            f"with a function or None for each part of it; its structure is "
            f"{jax.tree.structure(state)}."
        ) from error


def handed_on(merge: Merge, start: Any, new: Any) -> Any:
    """What the next micro-step starts from, after one that started from `start`."""
    given = zip(functions(merge), parts(merge, start), parts(merge, new), strict=True)
    chosen = [new if function is None else start for function, start, new in given]
    return jax.tree.structure(merge, is_leaf=_is_leaf).unflatten(chosen)


def rows(merge: Merge, new: Any) -> list[Any]:
    """The parts that are kept micro-step by micro-step."""
    given = zip(functions(merge), parts(merge, new), strict=True)
    return [part for function, part in given if function is not None]


def merged(merge: Merge, start: Any, end: Any, stacked: list[Any], weights: jax.Array) -> Any:
    """The state after all: of the handed on parts the last, of the others what is made of rows."""
    left = iter(stacked)
    given = zip(functions(merge), parts(merge, start), parts(merge, end), strict=True)
    made = [
        end if function is None else function(start, next(left), weights)
        for function, start, end in given
    ]
    return jax.tree.structure(merge, is_leaf=_is_leaf).unflatten(made)
