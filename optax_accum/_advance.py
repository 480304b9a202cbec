"""One call of the time driver: a micro-gradient goes in, and the full window runs inner."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_accum import _accumulator as acc
from optax_accum import _axis, _checks, _fits, _rows
from optax_accum._call import HIDDEN, Call, Settings, checked_call
from optax_accum._cond import cond, result_shapes
from optax_accum._record import records
from optax_accum._state import (
    AccumulateState,
    differentiated,
    outermost_states,
    own_buffers,
    with_dtypes_of,
)


class Emit(NamedTuple):
    """What a call gives back: updates, or new parameters."""

    updated: Callable[[optax.Updates, Any], Any]  # (updates, params) -> result
    idle: Callable[[Callable[[], Any], Any, Any], Any]  # (make updates, params, sums) -> result


def _zero_updates(make: Callable[[], Any], params: Any, grad_sum: Any) -> optax.Updates:
    """Zeros of the shapes and dtypes that inner returns, sharded like the window or params."""
    shapes = result_shapes(make)
    structure = jax.tree.structure(shapes)
    fitting = [tree for tree in (grad_sum, params) if jax.tree.structure(tree) == structure]

    def zeros(shape: Any, *like: Any) -> Any:
        if not isinstance(shape, jax.ShapeDtypeStruct):
            return shape
        for x in (*like, shape):
            # What a replica knows of its own window varies; inner's updates may not.
            if jnp.shape(x) == shape.shape and not _axis.varying(x):
                return jnp.zeros_like(x, dtype=shape.dtype)
        return jnp.zeros(shape.shape, shape.dtype)

    return jax.tree.map(zeros, shapes, *fitting)


def _applied(updates: optax.Updates, params: optax.Params) -> optax.Params:
    """`optax.apply_updates`, leaving alone what has no update."""

    def new(update: Any, param: Any) -> Any:
        if update is None or not _checks.is_array(update):
            return param
        return optax.apply_updates(param, update)

    return jax.tree.map(new, updates, params, is_leaf=_fits.is_none)


UPDATES = Emit(updated=lambda updates, params: updates, idle=_zero_updates)
PARAMS = Emit(updated=_applied, idle=lambda make, params, sums: params)


def init(settings: Settings, params: optax.Params) -> AccumulateState:
    inner_state = settings.inner.init(params)
    if outermost_states(inner_state) and not settings.takes_extra:
        raise TypeError(HIDDEN)
    _rows.check_nested(settings.axis_name, inner_state)
    window = acc.open_window(differentiated(params), settings.accumulator_dtype)
    if settings.k == 1:
        window = window._replace(grad_sum=None)
    window = _rows.rows(settings.axis_name, window)
    return AccumulateState(
        micro_step=jnp.zeros([], jnp.int32),
        k=settings.read_k(jnp.zeros([], jnp.int32)),
        update_step=jnp.zeros([], jnp.int32),
        inner_state=own_buffers(inner_state),
        updated=jnp.zeros([], bool),
        skipped=jnp.zeros([], jnp.int32),
        **window._asdict(),
    )


def run(
    settings: Settings, emit: Emit, grads: Any, state: Any, params: Any, **arguments: Any
) -> Any:
    """One call, from its arguments as they were given."""
    local = _rows.without(settings.axis_name, state)
    call = checked_call(settings, grads, local, params, **arguments)
    result, local = advance(settings, emit, local, call)
    return result, _rows.restored(settings.axis_name, local)


def advance(settings: Settings, emit: Emit, state: AccumulateState, call: Call) -> Any:
    """Add one micro-gradient; where that fills the window, close it and run inner."""
    part = acc.judge(
        call.grads,
        call.weight,
        call.known_weight,
        call.loss_reduction,
        settings.nonfinite,
        (*_axis.names(settings.axis_name), *_axis.beside(settings.axis_name)),
    )
    if state.grad_sum is None and settings.k == 1:
        bufferless = _bufferless if settings.axis_name is None else _bufferless_reduced
        return bufferless(settings, emit, state, call, part)
    clocks = (state.update_step, state.micro_step, _axis.replica(settings.axis_name))
    window = acc.add(state.window, part, call.grads, call.value, clocks)
    return settle(settings, emit, state, call, window, part.dropped)


def settle(
    settings: Settings,
    emit: Emit,
    state: AccumulateState,
    call: Call,
    window: acc.Window,
    dropped: bool | jax.Array,
    always_full: bool = False,
) -> Any:
    """A micro-step has been added to the window: close it and run inner where that fills it.

    Of `call.grads` only the structure and the dtypes are looked at. Whether it is full is decided
    from the clocks and `last`, equal on all replicas; all else is judged after the reduction.
    """
    k = jnp.where(state.micro_step == 0, settings.read_k(state.update_step), state.k)
    full = always_full or call.last is True or (state.micro_step + 1 >= k) | call.last

    def branches(window: acc.Window) -> tuple[Callable[[], Any], ...]:
        def close() -> Any:
            params = differentiated(call.params)
            return acc.close(window, call.grads, params, call.loss_reduction)

        return _branches(settings, emit, state, call, window, close)

    def boundary() -> Any:
        whole = acc.reduced(window, settings.axis_name)
        shards = _axis.beside(settings.axis_name)
        ok, lost = acc.may_update(whole, call.known_weight, settings.nonfinite, shards)
        run, _, empty = branches(whole)
        return *cond(ok, run, empty), lost

    def inside() -> Any:
        _, idle, _ = branches(window)
        return *idle(), jnp.zeros([], jnp.int32)

    result, inner_state, updated, lost = cond(full, boundary, inside)
    state = state._replace(
        micro_step=jnp.where(full, 0, state.micro_step + 1),
        k=k,
        inner_state=inner_state,
        skipped=state.skipped + jnp.asarray(dropped).astype(jnp.int32) + lost,
        **acc.reopen(window, full)._asdict(),
    )
    return result, _clocks(settings, state, full, updated)


def _bufferless(
    settings: Settings,
    emit: Emit,
    state: AccumulateState,
    call: Call,
    part: acc.Contribution,
) -> Any:
    """A static k=1: every micro-step is a window, and its gradient is the window's."""

    def close() -> Any:
        return acc.close_single(part, call.grads, call.loss_reduction)

    one = acc.add_scalars(acc.fresh(call.grads), part, call.value)
    if call.value is not None and call.loss_reduction == "mean":
        one = one._replace(value_sum=call.value, value_weight=jnp.ones([], jnp.float32))
    run, _, empty = _branches(settings, emit, state, call, one, close)
    ok, lost = acc.may_update_single(part, call.grads, settings.nonfinite)
    result, inner_state, updated = cond(ok, run, empty)
    state = state._replace(
        inner_state=inner_state,
        skipped=state.skipped + jnp.asarray(part.dropped).astype(jnp.int32) + lost,
    )
    return result, _clocks(settings, state, True, updated)


def _bufferless_reduced(
    settings: Settings,
    emit: Emit,
    state: AccumulateState,
    call: Call,
    part: acc.Contribution,
) -> Any:
    """A static k=1 on replicas, whose window is the sum over them."""
    window = acc.open_window(call.grads, settings.accumulator_dtype)
    clocks = (state.update_step, state.micro_step, _axis.replica(settings.axis_name))
    window = acc.add(window, part, call.grads, call.value, clocks)
    result, state = settle(settings, emit, state, call, window, part.dropped, always_full=True)
    return result, state._replace(grad_sum=None)


def _clocks(settings: Settings, state: AccumulateState, full: Any, updated: Any) -> AccumulateState:
    update_step = jnp.where(updated, optax.safe_increment(state.update_step), state.update_step)
    return state._replace(
        update_step=update_step,
        k=jnp.where(full, settings.read_k(update_step), state.k),
        updated=jnp.asarray(updated),
    )


def _branches(
    settings: Settings,
    emit: Emit,
    state: AccumulateState,
    call: Call,
    window: acc.Window,
    close: Callable[[], optax.Updates],
) -> tuple[Callable[[], Any], Callable[[], Any], Callable[[], Any]]:
    """What happens to inner: it runs, it rests, or it rests on a window that closed empty.

    Each returns (result, inner_state, updated).
    """
    inner, params = settings.inner, call.params
    nested = bool(outermost_states(state.inner_state))
    recorded = bool(records(state.inner_state))

    def update(gradient: optax.Updates, extra: dict[str, Any]) -> tuple[Any, Any]:
        updates, inner_state = inner.update(gradient, state.inner_state, params, **extra)
        return emit.updated(updates, params), with_dtypes_of(inner_state, state.inner_state)

    def run() -> Any:
        gradient = close()
        extra = dict(call.extra)
        if nested:
            extra.update(last=call.last, reduced_over=call.reduced_over)
            if call.loss_reduction != "sum":
                extra.update(weight=window.weight_sum, from_outer_mean=True)
        elif recorded:
            extra.update(weight=window.weight_sum)
        if "grad" in extra:
            extra["grad"] = gradient
        value = acc.mean_value(window, call.loss_reduction)
        extra |= given(settings, call, value, gradient, lambda more: update(gradient, extra | more))
        return *update(gradient, extra), True

    shapes = functools.cache(lambda: result_shapes(lambda: run()[0]))

    def idle() -> Any:
        return emit.idle(shapes, params, window.grad_sum), state.inner_state, False

    def flush_nested() -> Any:
        inside = [
            jnp.any(jnp.asarray(s.micro_step) > 0) for s in outermost_states(state.inner_state)
        ]
        return cond(functools.reduce(jnp.logical_or, inside), close_nested, idle)

    def close_nested() -> Any:
        zeros = jax.tree.map(jnp.zeros_like, close())
        result, inner_state = update(zeros, {**call.extra, "weight": 0.0, "last": True})
        nested = [jnp.asarray(each.updated) for each in outermost_states(inner_state)]
        return result, inner_state, functools.reduce(jnp.logical_or, nested)

    if not nested or call.last is False:
        return run, idle, idle
    return run, idle, lambda: cond(call.last, flush_nested, idle)


def given(
    settings: Settings,
    call: Call,
    value: Any,
    gradient: Any,
    update: Callable[[dict[str, Any]], Any],
) -> dict[str, Any]:
    """What inner gets of the window besides its gradient, in extra arguments.

    A flush has no value of its own, and passes the window's only where inner cannot run without.
    """
    if call.value is None:
        needed = call.known_weight == 0 and _fails_over(update, {}) == "value"
        return {"value": value} if needed else {}
    if not call.offered:
        return {"value": value}
    offered = {"value": value, "grad": gradient} if settings.takes_extra else {}
    while offered and (refused := _fails_over(update, offered)) in offered:
        del offered[refused]
    return offered


def _fails_over(update: Callable[[dict[str, Any]], Any], extra: dict[str, Any]) -> str | None:
    try:
        result_shapes(lambda: update(extra))
    except TypeError as error:
        return next((name for name in ("value", "grad") if f"'{name}'" in str(error)), None)
    return None
