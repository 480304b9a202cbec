"""A window on replicas: a row for each, outside the mapped axis one after another."""

from typing import Any

import jax
import jax.numpy as jnp

from optax_accum import _accumulator as acc
from optax_accum import _axis
from optax_accum._state import AccumulateState, of_multi_steps, outermost_states


def without(axis_name: _axis.AxisName | None, state: Any) -> AccumulateState:
    """The state as this replica sees it, nothing left over of the window before.

    A replica that keeps nothing of a window overwrites nothing, and is reduced with the others.
    """
    require_own(state)
    if axis_name is None:
        if state.has_rows:
            raise ValueError(
                "the state has a row for every replica, expected none without axis_name; type "
                "accumulate(..., axis_name=...), or oa.refold(state, None) to sum the rows."
            )
        return state
    if not _axis.is_bound(axis_name):
        raise ValueError(
            f"accumulate(axis_name={axis_name!r}) was called where no such axis is mapped; call it "
            "inside jax.shard_map or jax.pmap over that axis, its state passed by "
            "in_specs=oa.state_specs(tx, params, axis_name)."
        )
    rows = jnp.shape(state.weight_sum)[-1] if state.has_rows else "no"
    if rows != 1:
        raise ValueError(
            f"the state's sums have {rows} rows here, expected this replica's own one; pass the "
            "state by in_specs=oa.state_specs(tx, params, axis_name), and make it by tx.init "
            "inside the mapped axis, or by oa.refold(state, replicas)."
        )
    window = acc.emptied(jax.tree.map(lambda x: jnp.squeeze(x, 0), state.window))
    return state._replace(**window._asdict())


def restored(axis_name: _axis.AxisName | None, state: AccumulateState) -> AccumulateState:
    return state._replace(**rows(axis_name, state.window)._asdict())


def rows(axis_name: _axis.AxisName | None, window: acc.Window) -> acc.Window:
    """The window as this replica's row."""
    if axis_name is None:
        return window
    if _axis.is_bound(axis_name):
        window = _axis.own(window, axis_name)
    return jax.tree.map(lambda x: jnp.expand_dims(x, 0), window)


def check_nested(axis_name: _axis.AxisName | None, inner_state: Any) -> None:
    if axis_name is None and any(state.has_rows for state in outermost_states(inner_state)):
        raise ValueError(
            "a nested accumulate has an axis_name and the outer one has none, so that the outer "
            "window would differ between replicas unseen; type axis_name= on the outer one alone."
        )


def require_own(state: Any) -> None:
    if not isinstance(state, AccumulateState):
        raise TypeError(
            f"state is a {type(state).__name__}, expected the AccumulateState that tx.init(params) "
            f"returned{of_multi_steps(state)}; restore checkpoints into that structure: "
            "target=tx.init(params)."
        )
