"""One branch of two, decided before compilation where it can be."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_accum import _axis, _checks

Branch = Callable[[], Any]


def cond(pred: Any, if_true: Branch, if_false: Branch) -> Any:
    """`lax.cond` whose results may hold leaves that are no arrays (float0, functions).

    A predicate whose value is known picks its branch in Python, so eager calls compile nothing
    and a static flag leaves no conditional in the program.
    """
    if not _checks.is_traced(pred):
        return if_true() if pred else if_false()
    joint = _ArraysOnly()
    branches = [joint.of(if_true), joint.of(if_false)]
    if _axis.inside_manual_axes():
        branches = _equally_varying(*branches)
    return joint.rebuild(lax.cond(pred, *branches))


def result_shapes(make: Branch) -> Any:
    """What `make` returns, each array replaced by its shape and dtype; nothing is computed."""
    joint = _ArraysOnly()
    return joint.rebuild(jax.eval_shape(joint.of(make)))


def strong(leaf: Any) -> jax.Array:
    """The array without a weak type."""
    return leaf if _checks.is_key(leaf) else lax.convert_element_type(leaf, jnp.result_type(leaf))


class _ArraysOnly:
    """Takes the arrays out of results while they are traced, and puts them back afterwards."""

    treedef: Any
    fixed: list[Any]

    def of(self, make: Branch) -> Callable[[], list[jax.Array]]:
        def arrays() -> list[jax.Array]:
            leaves, treedef = jax.tree.flatten(make())
            if getattr(self, "treedef", treedef) != treedef:
                raise TypeError(
                    f"inner returned a tree of structure {treedef} where its other branch has "
                    f"{self.treedef}; expected one structure from every update."
                )
            self.treedef = treedef
            is_data = [_checks.is_array(leaf) or _checks.is_key(leaf) for leaf in leaves]
            pairs = list(zip(leaves, is_data, strict=True))
            self.fixed = [None if data else leaf for leaf, data in pairs]
            return [strong(leaf) for leaf, data in pairs if data]

        return arrays

    def rebuild(self, arrays: list[Any]) -> Any:
        rest = iter(arrays)
        return self.treedef.unflatten([next(rest) if leaf is None else leaf for leaf in self.fixed])


def _equally_varying(*branches: Callable[[], list[jax.Array]]) -> list[Branch]:
    """The branches, each result varying along the mapped axes along which any branch's does."""
    axes: list[list[frozenset[str]]] = []

    def note(branch: Callable[[], list[jax.Array]]) -> list[jax.Array]:
        arrays = branch()
        axes.append([_axis.varying(array) for array in arrays])
        return arrays

    for branch in branches:
        jax.eval_shape(lambda branch=branch: note(branch))
    union = [frozenset.union(*each) for each in zip(*axes, strict=True)]

    def cast(branch: Callable[[], list[jax.Array]]) -> Branch:
        return lambda: [_axis.as_varying(x, to) for x, to in zip(branch(), union, strict=True)]

    return [cast(branch) for branch in branches]
