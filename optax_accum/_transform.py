"""The time driver: a window that stays open across calls, in the optimizer's state."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax

from optax_accum import _checks
from optax_accum._micro_step import (
    PARAMS,
    UPDATES,
    Emit,
    check_settings,
    checked_call,
    init,
    micro_step,
)
from optax_accum._state import AccumulateState, found, trained

Batch = TypeVar("Batch")


def accumulate(
    inner: optax.GradientTransformation,
    k: int | Callable[[Any], Any],
    *,
    loss_reduction: str = "mean",
    accumulator_dtype: Any = None,
    nonfinite: str = "propagate",
) -> optax.GradientTransformationExtraArgs:
    """TODO"""
    settings = check_settings(inner, k, loss_reduction, accumulator_dtype, nonfinite)

    def init_fn(params: optax.Params) -> AccumulateState:
        return init(settings, params)

    def run(emit: Emit, grads: Any, state: Any, params: Any, **arguments: Any) -> Any:
        call = checked_call(settings, grads, state, params, **arguments)
        return micro_step(settings, emit, state, call)

    def update_fn(grads: Any, state: Any, params: Any = None, **arguments: Any) -> Any:
        return run(UPDATES, grads, state, params, **arguments)

    transformation = _Accumulate(init_fn, update_fn)
    transformation.run = run
    return transformation


def apply_gradients(
    tx: optax.GradientTransformation,
    grads: optax.Updates,
    state: optax.OptState,
    params: optax.Params,
    *,
    weight: Any = None,
    last: Any = False,
    **extra: Any,
) -> tuple[optax.Params, optax.OptState]:
    """TODO"""
    if isinstance(tx, _Accumulate):
        return tx.run(PARAMS, grads, state, params, weight=weight, last=last, **extra)
    if weight is not None:
        extra["weight"] = weight
    if last is not False:
        extra["last"] = last
    tx = optax.with_extra_args_support(tx)
    updates, state = tx.update(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state


def flush(
    tx: optax.GradientTransformation,
    state: optax.OptState,
    params: optax.Params,
    **extra: Any,
) -> tuple[optax.Updates, optax.OptState]:
    """TODO"""
    found(state)

    def zeros(param: Any) -> Any:
        if not _checks.is_array(param):
            return None
        return jnp.zeros_like(param, dtype=jnp.result_type(param))

    grads = jax.tree.map(zeros, trained(params))
    tx = optax.with_extra_args_support(tx)
    return tx.update(grads, state, params, weight=0.0, last=True, **extra)


def has_updated(state: optax.OptState) -> jax.Array:
    """TODO"""
    ours = found(state)
    if len(ours) > 1:
        raise ValueError(
            f"the state holds {len(ours)} AccumulateStates side by side, expected one; ask each "
            "by itself: has_updated(state.inner_states['label']) for optax.multi_transform."
        )
    return jnp.asarray(ours[0].updated)


def mark_last(loader: Iterable[Batch]) -> Iterator[tuple[Batch, bool]]:
    """TODO"""
    batches = iter(loader)

    def marked() -> Iterator[tuple[Batch, bool]]:
        try:
            batch = next(batches)
        except StopIteration:
            return
        while True:
            try:
                following = next(batches)
            except StopIteration:
                yield batch, True
                return
            except BaseException:
                yield batch, False  # what the loader gave before it failed is not lost
                raise
            yield batch, False
            batch = following

    return marked()


class _Accumulate(optax.GradientTransformationExtraArgs):
    """The pair (init, update) that `accumulate` returns; `run` is update with a choice of _Emit."""

    run: Callable[..., tuple[Any, AccumulateState]]
