"""One branch of two, decided before compilation where it can be."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_accum import _checks


def cond(pred: Any, if_true: Callable[[], Any], if_false: Callable[[], Any]) -> Any:
    """`lax.cond` whose results may hold leaves that are no arrays (float0, functions).

    A predicate whose value is known picks its branch in Python, so eager calls compile nothing
    and a static flag leaves no conditional in the program.
    """
    if not _checks.is_traced(pred):
        return if_true() if pred else if_false()
    joint = _ArraysOnly()
    return joint.rebuild(lax.cond(pred, joint.of(if_true), joint.of(if_false)))


def result_shapes(make: Callable[[], Any]) -> Any:
    """What `make` returns, each array replaced by its shape and dtype; nothing is computed."""
    joint = _ArraysOnly()
    return joint.rebuild(jax.eval_shape(joint.of(make)))


def strong(leaf: Any) -> jax.Array:
    """The array without a weak type."""
    return lax.convert_element_type(leaf, jnp.result_type(leaf))


class _ArraysOnly:
    """Takes the arrays out of results while they are traced, and puts them back afterwards."""

    treedef: Any
    fixed: list[Any]

    def of(self, make: Callable[[], Any]) -> Callable[[], list[jax.Array]]:
        def arrays() -> list[jax.Array]:
            leaves, self.treedef = jax.tree.flatten(make())
            self.fixed = [None if _checks.is_array(leaf) else leaf for leaf in leaves]
            return [strong(leaf) for leaf in leaves if _checks.is_array(leaf)]

        return arrays

    def rebuild(self, arrays: list[Any]) -> Any:
        rest = iter(arrays)
        return self.treedef.unflatten([next(rest) if leaf is None else leaf for leaf in self.fixed])
