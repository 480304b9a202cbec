"""What the time driver is given: settings once, a call's arguments every time; both checked."""

import difflib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_accum import _axis, _checks, _fits

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
    axis_name: _axis.AxisName | None

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
    offered: bool  # value and grad go to inner only if inner takes them
    loss_reduction: str
    reduced_over: tuple[str, ...]  # the replicas that a closed window is the sum of
    extra: dict[str, Any]


def check_settings(
    inner: Any,
    k: Any,
    loss_reduction: str,
    accumulator_dtype: Any,
    nonfinite: str,
    axis_name: Any,
) -> Settings:
    if hasattr(inner, "gradient_transformation"):  # optax.MultiSteps
        raise TypeError(
            f"inner is an object of class {type(inner).__name__}, expected an "
            "optax.GradientTransformation; give accumulate the optimizer inside of it, which it "
            "replaces, accumulate(optax.adamw(1e-3), k=8), or to have both windows type "
            "inner.gradient_transformation()."
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
        _checks.axis_name(axis_name),
    )


def settings_of(tx: Any) -> Settings | None:
    """What `accumulate` was given; None of any other transformation."""
    return getattr(getattr(tx, "update", None), "settings", None)


def _check_names(extra: dict[str, Any]) -> None:
    """Raise for an argument that is nearly one of ours: Optax hands it on, and nobody reads it."""
    for name in extra:
        for ours in difflib.get_close_matches(name, ("weight", "last", "value"), n=1, cutoff=0.8):
            raise TypeError(f"got an argument {name!r}, expected {ours!r}; type {ours}=.")


def checked_call(
    settings: Settings,
    grads: optax.Updates,
    state: Any,
    params: optax.Params | None,
    weight: Any = None,
    last: Any = False,
    value: Any = None,
    offered: bool = False,
    from_outer_mean: bool = False,  # said by an outer accumulate, whose gradients are means
    reduced_over: tuple[str, ...] = (),  # said by an outer accumulate: its replicas
    **extra: Any,
) -> Call:
    if state.grad_sum is not None:
        _fits.check_gradients(state.grad_sum, grads, settings.accumulator_dtype)
    elif settings.k != 1 and jax.tree.leaves(grads):
        raise ValueError(
            f"the state holds no window, being made by accumulate(inner, k=1), and k is now "
            f"{settings.k}; type state = oa.convert_state(state, tx, params)."
        )
    _check_names(extra)
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
    if settings.axis_name is not None and _axis.checked(settings.axis_name) & _axis.varying(last):
        raise ValueError(
            f"last varies along {settings.axis_name!r}, expected the same on all replicas, which "
            "close their windows together; type last=jax.lax.psum(last.astype(int), "
            f"{settings.axis_name!r}) > 0."
        )
    axes = _axis.names(settings.axis_name)
    if again := [name for name in axes if name in reduced_over]:
        raise ValueError(
            f"a nested accumulate has axis_name={settings.axis_name!r}, but the outer one has "
            f"reduced over {again} already; type axis_name= on the outer one alone."
        )
    if settings.axis_name is not None and known != 0:
        _fits.check_shared(params, settings.axis_name)
        _fits.check_unreduced(grads, settings.axis_name)
    reduction = "mean" if from_outer_mean else settings.loss_reduction
    over = (*axes, *reduced_over)
    return Call(grads, params, weight, known, last, value, offered, reduction, over, extra)
