"""The time driver's state: what it holds, found in other states, kept fixed, ready to donate."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_accum import _accumulator as acc
from optax_accum import _checks, _fits
from optax_accum._cond import strong


class AccumulateState(NamedTuple):
    """State of :func:`optax_accum.accumulate`: two clocks, the open window, inner's state.

    Shapes, dtypes and shardings never change, and the sums are sums (no running mean), so the
    state may be saved after any micro-step and resumed with another `k`.

    Under `accumulate(axis_name=...)` every replica has sums of its own: these five fields then have
    a leading axis of replicas, of length 1 inside the mapped axis.
    """

    micro_step: jax.Array  # shape=(), dtype=jnp.int32: taken in the open window
    k: jax.Array  # shape=(), dtype=jnp.int32: micro-steps of the open window
    update_step: jax.Array  # shape=(), dtype=jnp.int32: updates made
    weight_sum: jax.Array  # shape=(), dtype=jnp.float32: of the kept micro-steps
    grad_sum: Any  # like the parameters; None for a static k=1
    inner_state: optax.OptState
    updated: jax.Array  # shape=(), dtype=jnp.bool_: did the last call run inner?
    skipped: jax.Array  # shape=(), dtype=jnp.int32: micro-steps thrown away so far
    value_sum: jax.Array  # shape=(), dtype=jnp.float32
    value_weight: jax.Array  # shape=(), dtype=jnp.float32
    kept: jax.Array  # shape=(), dtype=jnp.int32: micro-steps in the sums

    @property
    def window(self) -> acc.Window:
        """The sums of the open window."""
        return acc.Window(*(getattr(self, name) for name in acc.Window._fields))

    @property
    def has_rows(self) -> bool:
        """Whether the window has a leading axis of replicas."""
        return jnp.ndim(self.weight_sum) > jnp.ndim(self.micro_step)


def outermost_states(state: Any) -> list[AccumulateState]:
    """The AccumulateStates of a state that are inside no other."""
    is_ours = lambda node: isinstance(node, AccumulateState)  # noqa: E731
    return [leaf for leaf in jax.tree.leaves(state, is_leaf=is_ours) if is_ours(leaf)]


def of_multi_steps(state: Any) -> str:
    """For messages: what to type where `optax.MultiSteps` made the state."""
    is_multi = lambda node: isinstance(node, optax.MultiStepsState)  # noqa: E731
    if not any(map(is_multi, jax.tree.leaves(state, is_leaf=is_multi))):
        return ""
    return "; type state = oa.convert_state(state, tx, params, use_grad_mean=True)"


def require_states(state: Any) -> list[AccumulateState]:
    """`outermost_states`, or an error where there is none."""
    ours = outermost_states(state)
    if not ours:
        raise ValueError(
            f"the state is a {type(state).__name__} without an AccumulateState; expected the state "
            f"of accumulate(inner, k), or of a chain that contains it{of_multi_steps(state)}."
        )
    return ours


def the_state(state: Any) -> AccumulateState:
    """The one AccumulateState of a state."""
    ours = require_states(state)
    if len(ours) > 1:
        raise ValueError(
            f"the state holds {len(ours)} AccumulateStates side by side, expected one; ask each "
            "by itself: has_updated(state.inner_states['label']) for optax.multi_transform."
        )
    return ours[0]


def differentiated(params: Any) -> Any:
    """The tree that gradients are shaped like."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def own_buffers(inner_state: optax.OptState) -> optax.OptState:
    """Every leaf a strongly typed buffer of its own, so that state and params can be donated.

    Copies all: two arrays may share a buffer, and inner may have enclosed the one it returns.
    """

    def own(leaf: Any) -> Any:
        return jnp.copy(strong(leaf)) if _checks.is_array(leaf) or _checks.is_key(leaf) else leaf

    return jax.tree.map(own, inner_state)


def with_dtypes_of(new: Any, old: Any, what: str = "inner's state") -> Any:
    """A new state with the dtypes of the old one."""

    def cast(path: Any, old: Any, new: Any) -> Any:
        if not _checks.is_array(old):
            return new
        if not _checks.is_array(new):
            raise TypeError(
                f"{what}{_fits.at(path)} is {_checks.described(new)} after the update, expected "
                f"{_checks.described(old)} as before."
            )
        if jnp.shape(new) != jnp.shape(old):
            raise ValueError(
                f"{what}{_fits.at(path)} went from shape {jnp.shape(old)} to {jnp.shape(new)} "
                "in its update; expected a state whose shapes are fixed by init."
            )
        kinds = (jnp.complexfloating, jnp.floating, jnp.integer, jnp.bool_)
        rank = [
            next((i for i, kind in enumerate(kinds) if jnp.issubdtype(dtype, kind)), len(kinds))
            for dtype in (jnp.result_type(old), jnp.result_type(new))
        ]
        if rank[1] < rank[0]:
            raise TypeError(
                f"{what}{_fits.at(path)} went from {jnp.result_type(old)} to "
                f"{jnp.result_type(new)} in its update, which would lose what it holds; expected a "
                "state whose kinds of numbers are fixed by init."
            )
        return jnp.asarray(new).astype(jnp.result_type(old))

    try:
        return jax.tree_util.tree_map_with_path(cast, old, new)
    except (ValueError, TypeError) as error:
        if jax.tree.structure(new) == jax.tree.structure(old):
            raise
        got, expected = _checks.structures(new, old)
        raise ValueError(
            f"{what} has the structure {got} after the update, expected that of before, "
            f"{expected}; return the tree that was given, or make the "
            "first one from the tree that is differentiated. (Of NNX give plain trees: "
            "nnx.as_pure(...) of gradients, parameters and state.)"
        ) from error
