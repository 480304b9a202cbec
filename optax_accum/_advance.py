"""One call of the time driver: a micro-gradient goes in, and the full window runs inner."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_accum import _accumulator as acc
from optax_accum import _checks, _fits
from optax_accum._cond import cond, result_shapes
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
    like = (fitting or [shapes])[0]

    def zeros(shape: Any, like: Any) -> Any:
        if not isinstance(shape, jax.ShapeDtypeStruct):
            return shape
        return jnp.zeros_like(like if jnp.shape(like) == shape.shape else shape, dtype=shape.dtype)

    return jax.tree.map(zeros, shapes, like)


def _applied(updates: optax.Updates, params: optax.Params) -> optax.Params:
    """`optax.apply_updates`, leaving alone what has no update."""

    def new(update: Any, param: Any) -> Any:
        if update is None or not _checks.is_array(update):
            return param
        return optax.apply_updates(param, update)

    return jax.tree.map(new, updates, params, is_leaf=_fits.is_none)


UPDATES = Emit(updated=lambda updates, params: updates, idle=_zero_updates)
PARAMS = Emit(updated=_applied, idle=lambda make, params, sums: params)


HIDDEN = (
    "a wrapper that takes no extra arguments stands around accumulate, so weight= and last= would "
    "not reach its window; put the wrapper inside, accumulate(wrapper(inner), k)."
)


class Settings(NamedTuple):
    """What `accumulate` was given, checked."""

    inner: optax.GradientTransformationExtraArgs
    takes_extra: bool  # whether inner takes extra arguments by itself
    k: int | Callable[[Any], Any]
    loss_reduction: str
    accumulator_dtype: Any
    nonfinite: str

    def read_k(self, update_step: jax.Array) -> jax.Array:
        if callable(self.k):
            return _checks.scheduled_k(self.k, update_step)
        return jnp.full([], self.k, jnp.int32)


class Call(NamedTuple):
    """One call's arguments, checked."""

    grads: optax.Updates
    params: optax.Params | None
    weight: jax.Array | None  # shape=(), dtype=jnp.float32
    known_weight: float | None  # its value, 1 for None, or None while it is traced
    last: Any
    value: jax.Array | None  # shape=(), dtype=jnp.float32
    loss_reduction: str
    extra: dict[str, Any]


def check_settings(
    inner: Any, k: Any, loss_reduction: str, accumulator_dtype: Any, nonfinite: str
) -> Settings:
    if hasattr(inner, "gradient_transformation"):  # optax.MultiSteps
        raise TypeError(
            f"inner is an object of class {type(inner).__name__}, expected an "
            "optax.GradientTransformation; type inner.gradient_transformation()."
        )
    if not callable(getattr(inner, "init", None)) or not callable(getattr(inner, "update", None)):
        raise TypeError(
            f"inner is a {type(inner).__name__}, expected an optax.GradientTransformation; "
            "type accumulate(optax.adamw(1e-3), k=8)."
        )
    _checks.choice("loss_reduction", loss_reduction, _checks.LOSS_REDUCTIONS)
    _checks.choice("nonfinite", nonfinite, _checks.NONFINITE_POLICIES)
    return Settings(
        optax.with_extra_args_support(inner),
        isinstance(inner, optax.GradientTransformationExtraArgs),
        k if callable(k) else _checks.integer_k(k),
        loss_reduction,
        _checks.accumulator_dtype(accumulator_dtype),
        nonfinite,
    )


def init(settings: Settings, params: optax.Params) -> AccumulateState:
    inner_state = settings.inner.init(params)
    if outermost_states(inner_state) and not settings.takes_extra:
        raise TypeError(HIDDEN)
    window = acc.open_window(differentiated(params), settings.accumulator_dtype)
    if settings.k == 1:
        window = window._replace(grad_sum=None)
    return AccumulateState(
        micro_step=jnp.zeros([], jnp.int32),
        k=settings.read_k(jnp.zeros([], jnp.int32)),
        update_step=jnp.zeros([], jnp.int32),
        inner_state=own_buffers(inner_state),
        updated=jnp.zeros([], bool),
        skipped=jnp.zeros([], jnp.int32),
        **window._asdict(),
    )


def advance(settings: Settings, emit: Emit, state: AccumulateState, call: Call) -> Any:
    """Add one micro-gradient; where that fills the window, close it and run inner."""
    part = acc.judge(
        call.grads,
        call.weight,
        call.known_weight,
        call.loss_reduction,
        settings.nonfinite,
    )
    if state.grad_sum is None and settings.k == 1:
        return _bufferless(settings, emit, state, call, part)
    k = jnp.where(state.micro_step == 0, settings.read_k(state.update_step), state.k)
    full = True if call.last is True else (state.micro_step + 1 >= k) | call.last
    clocks = (state.update_step, state.micro_step)
    window = acc.add(state.window, part, call.grads, call.value, clocks)

    def close() -> Any:
        params = differentiated(call.params)
        return acc.close(window, call.grads, params, call.loss_reduction)

    run, idle, empty = _branches(settings, emit, state, call, window, close)

    def boundary() -> Any:
        ok, lost = acc.may_update(window, call.known_weight, settings.nonfinite)
        return *cond(ok, run, empty), lost

    def inside() -> Any:
        return *idle(), jnp.zeros([], jnp.int32)

    result, inner_state, updated, lost = cond(full, boundary, inside)
    state = state._replace(
        micro_step=jnp.where(full, 0, state.micro_step + 1),
        k=k,
        inner_state=inner_state,
        skipped=state.skipped + jnp.asarray(part.dropped).astype(jnp.int32) + lost,
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

    def update(gradient: optax.Updates, extra: dict[str, Any]) -> tuple[Any, Any]:
        updates, inner_state = inner.update(gradient, state.inner_state, params, **extra)
        return emit.updated(updates, params), with_dtypes_of(inner_state, state.inner_state)

    def run() -> Any:
        gradient = close()
        extra = dict(call.extra)
        if nested:
            extra["last"] = call.last
            if call.loss_reduction != "sum":
                extra.update(weight=window.weight_sum, from_outer_mean=True)
        if "grad" in extra:
            extra["grad"] = gradient
        missing = call.value is None and call.known_weight == 0
        if call.value is not None or (missing and needs_value(lambda: update(gradient, extra))):
            extra["value"] = acc.mean_value(window, call.loss_reduction)
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


def needs_value(update: Callable[[], Any]) -> bool:
    """Whether inner cannot run without a `value`: a flush has none of its own to give."""
    try:
        result_shapes(update)
    except TypeError as error:
        return "'value'" in str(error)
    return False


def checked_call(
    settings: Settings,
    grads: optax.Updates,
    state: Any,
    params: optax.Params | None,
    weight: Any = None,
    last: Any = False,
    value: Any = None,
    from_outer_mean: bool = False,  # said by an outer accumulate, whose gradients are means
    **extra: Any,
) -> Call:
    if not isinstance(state, AccumulateState):
        raise TypeError(
            f"state is a {type(state).__name__}, expected the AccumulateState that tx.init(params) "
            "returned; restore checkpoints into that structure: target=tx.init(params)."
        )
    if state.grad_sum is not None:
        _fits.check_gradients(state.grad_sum, grads, settings.accumulator_dtype)
    elif settings.k != 1 and jax.tree.leaves(grads):
        raise ValueError(
            f"the state holds no window, being made by accumulate(inner, k=1), and k is now "
            f"{settings.k}; type tx.init(params)._replace(inner_state=state.inner_state, "
            "update_step=state.update_step)."
        )
    known = 1.0
    if weight is not None:
        checked = _checks.real_scalar("weight", weight)
        known = None if from_outer_mean else _checks.known_weight(weight)
        weight = checked
    if settings.loss_reduction == "sum" and known != (1.0 if weight is None else 0):
        raise ValueError(
            "weight was given with loss_reduction='sum', whose gradients are summed as they are; "
            "drop weight=, or type loss_reduction='sum_over_weight' to divide by it. (Nested: an "
            "outer accumulate passes its window's weight on; give both 'sum', or the inner 'mean'.)"
        )
    if settings.loss_reduction == "sum_over_weight" and weight is None:
        raise ValueError(
            "weight is missing, expected with loss_reduction='sum_over_weight'; type "
            "tx.update(grads, state, params, weight=tokens_in_this_micro_batch)."
        )
    if value is not None:
        value = _checks.real_scalar("value", value)
    last = _checks.scalar_flag("last", last)
    reduction = "mean" if from_outer_mean else settings.loss_reduction
    return Call(grads, params, weight, known, last, value, reduction, extra)
