"""What the last update was made of, kept beside inner's state: only an update can write it."""

from typing import Any, NamedTuple

import jax


class Recorded(NamedTuple):
    """State of :func:`optax_accum.diagnostics.record`."""

    updates: jax.Array  # shape=(), dtype=jnp.int32: recorded so far
    loss: jax.Array  # shape=(), dtype=jnp.float32; NaN if none was given
    grad_norm: jax.Array  # shape=(), dtype=jnp.float32
    weight: jax.Array  # shape=(), dtype=jnp.float32; NaN if none was given
    skipped: jax.Array  # shape=(), dtype=jnp.int32: micro-steps thrown away so far, if told


def records(state: Any) -> list[Recorded]:
    """All of a state."""
    is_record = lambda node: isinstance(node, Recorded)  # noqa: E731
    return [leaf for leaf in jax.tree.leaves(state, is_leaf=is_record) if is_record(leaf)]
