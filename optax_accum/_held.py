"""What trees of arrays or shapes hold on a device, and what of an optimizer's state is a window."""

import math
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from optax_accum import _checks
from optax_accum._state import outermost_states


class StateBytes(NamedTuple):
    """Bytes of an optimizer's state on a device."""

    window: int  # the sums of `accumulate`
    optimizer: int  # all else


def shapes_of(tree: Any) -> list[Any]:
    """The leaves that take memory, as shapes with dtypes; numbers are arrays."""
    return [
        leaf if _has_shape(leaf) else jax.eval_shape(np.asarray, leaf)
        for leaf in jax.tree.leaves(tree)
        if _has_shape(leaf) or isinstance(leaf, (bool, int, float, complex))
    ]


def on_a_device(tree: Any) -> int:
    """Bytes of the leaves, or of a device's shards of them where they have a sharding."""
    return sum(math.prod(_shard(leaf)) * leaf.dtype.itemsize for leaf in shapes_of(tree))


def in_all(tree: Any) -> int:
    """Bytes of the leaves, once each."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in shapes_of(tree))


def elements(tree: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in shapes_of(tree))


def split_state(state: Any) -> StateBytes:
    """The windows of a state apart from the optimizer's own part."""
    window = sum(on_a_device(each.grad_sum) for each in outermost_states(state))
    return StateBytes(window, on_a_device(state) - window)


def counted_state(tx: optax.GradientTransformation, params: optax.Params) -> Any:
    """The shapes of `tx.init(params)`, for which nothing is allocated."""
    return jax.eval_shape(tx.init, params)


def describe_dtypes(tree: Any) -> str:
    """float32, or float32 and bfloat16."""
    names = sorted({np.dtype(leaf.dtype).name for leaf in shapes_of(tree)})
    return " and ".join(names) or "none"


def _has_shape(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and (_checks.is_array(leaf) or _checks.is_key(leaf))


def _shard(leaf: Any) -> tuple[int, ...]:
    sharding = getattr(leaf, "sharding", None)
    return leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
