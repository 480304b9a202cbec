"""The time driver with the loss at hand: one micro-step, its gradient straight into the window."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_accum import _accumulator as acc
from optax_accum import _axis, _checks, _engines, _fits, _program, _rows
from optax_accum._advance import PARAMS, advance, settle
from optax_accum._call import Call, Settings, checked_call, settings_of
from optax_accum._cond import cond, result_shapes
from optax_accum._state import AccumulateState, differentiated


def micro_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    *,
    has_aux: bool = False,
    weight: Callable[..., Any] | None = None,
    engine: str = "auto",
    rng_argnums: int | Sequence[int] = (),
) -> Callable[..., Any]:
    """One whole micro-step: the loss, its gradient into the window, and the update that is due.

    ::

        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        params, state = apply_gradients(tx, grads, state, params, weight=weight(*batch), value=loss)

    With the refs engine there are no `grads`: the backward pass adds each layer's into the window,
    in place where `params` and `state` are donated. Between updates the parameters are not touched.

    Args:
      loss_fn: `loss_fn(params, *batch)` returns a real floating scalar, or `(loss, aux)` with
        `has_aux`.
      tx: what :func:`accumulate` returned. Links around it in a chain belong into its inner.
      has_aux: whether `loss_fn` returns auxiliary outputs; they are given back as they are.
      weight: how much a micro-batch counts, a function of its batch (without keys); None is 1. At
        0 nothing is computed, and loss and auxiliary outputs are zeros (where the loss communicates
        between replicas, only if none has weight; else its gradient is left out). With refs it
        starts the backward pass: keep weights near 1 (`tokens / expected_tokens`) if that runs in
        float16.
      engine: `"carry"` adds the gradient to the window, `"refs"` lets the backward pass add into
        it, `"auto"` takes refs where it can: where the window has the parameters' dtype and nothing
        looks at a single micro-gradient.
      rng_argnums: arguments of `loss_fn` that hold PRNG keys. Each is folded with
        `update_step`, `skipped` and `micro_step` of the state, and under `axis_name` with the
        replica's number, so one key serves a whole run.

    Returns:
      `f(params, state, *batch, last=False, **extra) -> (value, params, state)`, where the value is
      what `loss_fn` returned; under `axis_name` this replica's own. `last=True` closes the window
      with this micro-batch; `extra` is what inner's update takes. An inner that takes `value` and
      `grad` gets the window's.

    Raises:
      TypeError, ValueError: for a `tx` that is not from :func:`accumulate`, an engine that cannot
        be used here (says why), a loss that is no scalar, and as `update` of :func:`accumulate`.

    Example:
      >>> import functools, jax, jax.numpy as jnp, optax
      >>> import optax_accum as oa
      >>> tx = oa.accumulate(optax.sgd(0.5), k=2)
      >>> loss_fn = lambda w, x: jnp.mean((x - w) ** 2)
      >>> micro_step = jax.jit(oa.micro_step(loss_fn, tx, weight=len), donate_argnums=(0, 1))
      >>> w = jnp.zeros([])
      >>> state = tx.init(w)
      >>> loss, w, state = micro_step(w, state, jnp.array([1.0, 3.0]))
      >>> loss, w, state = micro_step(w, state, jnp.array([5.0, 7.0, 9.0, 11.0]))
      >>> float(w), bool(oa.has_updated(state))  # the mean of all six
      (6.0, True)
    """
    settings = settings_of(tx)
    if settings is None:
        raise TypeError(
            "tx does not come from accumulate, expected accumulate(inner, k) itself; put the links "
            "of a chain inside, accumulate(optax.chain(...), k), or use value_and_grad for a plain "
            "optimizer."
        )
    _checks.function("loss_fn", loss_fn)
    _checks.choice("engine", engine, _engines.ENGINES)
    _checks.weight_function(weight, settings.loss_reduction)
    keys = _checks.indices("rng_argnums", rng_argnums)
    if any(index < 1 for index in keys):
        raise ValueError(
            f"rng_argnums is {rng_argnums!r}, expected 1 or more: argument 0 of loss_fn holds the "
            "parameters; type rng_argnums=2 for loss_fn(params, batch, key)."
        )

    def micro_step_fn(
        params: Any, state: Any, *batch: Any, last: Any = False, **extra: Any
    ) -> tuple[Any, Any, Any]:
        state = _rows.without(settings.axis_name, state)
        if given := {"value", "grad", "weight"} & extra.keys():
            raise TypeError(
                f"micro_step was called with {sorted(given)}, expected none of them: it computes "
                "loss and gradient itself, and weighs by micro_step(..., weight=a_function)."
            )
        args = _with_folded_keys(batch, keys, state, settings.axis_name)

        def loss(params: Any, *args: Any) -> tuple[Any, Any]:
            value, (_, aux) = _program.unpacked(loss_fn(params, *args), has_aux)
            _fits.check_own_loss(value, settings.axis_name)
            return value, aux

        how_much = None
        if weight is not None:
            how_much = weight(*(arg for i, arg in enumerate(batch, 1) if i not in keys))
        # Refs make gradients of the parameters' dtypes.
        like = _axis.own(differentiated(params), settings.axis_name)
        _fits.check_differentiable("params", like)
        call = checked_call(
            settings, like, state, params, weight=how_much, last=last, offered=True, **extra
        )
        shapes = jax.eval_shape(loss, like, *args)
        _program.check_loss(shapes[0])
        work = Work(settings, loss, call, state, args, shapes[0].dtype.itemsize < 4, False)
        work = work._replace(together=_together(work, shapes[0]))
        take = _into_refs if _with_refs(work, engine) else _carried
        value, aux, params, state = take(work)
        return (value, aux) if has_aux else value, params, _rows.restored(settings.axis_name, state)

    return micro_step_fn


def _with_folded_keys(
    batch: tuple[Any, ...],
    keys: tuple[int, ...],
    state: AccumulateState,
    axis_name: _axis.AxisName | None,
) -> tuple[Any, ...]:
    if max(keys, default=0) > len(batch):
        raise TypeError(
            f"micro_step was called with {len(batch)} arguments after params and state, expected "
            f"at least {max(keys)} with rng_argnums={keys}; pass the keys by position."
        )

    def folded(key: jax.Array) -> jax.Array:
        # A window that was dropped leaves update_step as it was, and is counted in skipped.
        for clock in (state.update_step, state.skipped):
            key = jax.random.fold_in(key, clock)
        return _axis.folded_key(jax.random.fold_in(key, state.micro_step), axis_name)

    return tuple(jax.tree.map(folded, arg) if i in keys else arg for i, arg in enumerate(batch, 1))


class Work(NamedTuple):
    """One micro-step, its choices made."""

    settings: Settings
    loss: Callable[..., Any]  # (params, *args) -> (loss, aux)
    call: Call  # its grads are the parameters, for their structure and dtypes
    state: AccumulateState
    args: tuple[Any, ...]
    narrow: bool  # the loss is narrower than float32
    together: bool  # the loss communicates, so all replicas compute or none

    def loss_of(self, params: Any) -> tuple[Any, Any]:
        return self.loss(params, *self.args)


def _together(work: Work, value: Any) -> bool:
    """Whether no replica may leave its micro-batch out by itself."""
    if work.call.known_weight is not None:
        return False
    axis_name, given = work.settings.axis_name, (work.call.grads, work.args)

    def gradient(params: Any, args: Any) -> Any:
        return _engines.micro_gradient(lambda p: work.loss(p, *args), (params,), 1.0)

    mean = work.settings.loss_reduction == "mean"
    if mean and work.narrow and _axis.mixes(gradient, axis_name, *given):
        _fits.check_wide(value)
    return _axis.communicates(gradient, axis_name, *given)


def _with_refs(work: Work, engine: str) -> bool:
    settings, call, state = work.settings, work.call, work.state
    sums = None if state.grad_sum is None else (state.grad_sum,)
    weighed = call.weight is not None and settings.loss_reduction == "mean"

    def why_not() -> str | None:
        if work.together:
            return _engines.TOGETHER
        return _engines.obstacle(
            lambda args, params: work.loss(params, *args),
            work.args,
            (call.grads,),
            sums,
            settings.nonfinite,
            weighed and work.narrow,
        )

    return _engines.chosen(engine, (call.params, state, work.args), why_not) == "refs"


def _computed(work: Work) -> Any:
    """Whether the micro-batch is computed at all; a plain bool where its weight is known."""
    if work.call.known_weight is not None:
        return work.call.known_weight != 0
    present = jnp.asarray(work.call.weight) != 0
    if not work.together:
        return present
    if work.settings.axis_name is None:
        return True  # the replicas' axes are unknown here
    return _axis.anywhere(present, work.settings.axis_name)


def _carried(work: Work) -> tuple[Any, Any, Any, AccumulateState]:
    """The gradient, then what `apply_gradients` does with it."""
    settings, call = work.settings, work.call
    # Where gradients cross replicas, each loss must weigh what it weighs before they do.
    mixed = work.together and settings.axis_name is not None and not work.narrow
    seeded = mixed and settings.loss_reduction == "mean"
    seed: Any = call.weight if seeded else 1.0

    def gradient() -> Any:
        return _engines.micro_gradient(work.loss_of, (call.grads,), seed)

    def nothing() -> Any:
        return _zeros(result_shapes(gradient))

    value, aux, (grads,) = cond(_computed(work), gradient, nothing)
    call = call._replace(grads=grads, value=value.astype(jnp.float32) * seed)
    if seeded:
        call = call._replace(loss_reduction="sum_over_weight")
    return value, aux, *advance(settings, PARAMS, work.state, call)


def _into_refs(work: Work) -> tuple[Any, Any, Any, AccumulateState]:
    """The gradient added inside the backward pass, which the weight starts."""
    settings, call, window = work.settings, work.call, work.state.window
    part = acc.judge(
        None, call.weight, call.known_weight, call.loss_reduction, settings.nonfinite
    )._replace(keep=True)

    def added() -> Any:
        opened = window if settings.axis_name else acc.emptied(window)
        seed = 1.0 if part.scale is None else part.scale
        value, aux, (sums,) = _engines.into_refs(
            work.loss_of, (call.grads,), seed, (opened.grad_sum,)
        )
        summed = acc.add_scalars(opened, part, value.astype(jnp.float32))
        return value, aux, summed._replace(grad_sum=sums)

    def left_out() -> Any:
        value, aux = result_shapes(lambda: added()[:2])
        return *_zeros((value, aux)), window

    value, aux, window = cond(_computed(work), added, left_out)
    call = call._replace(value=value.astype(jnp.float32))
    return value, aux, *settle(settings, PARAMS, work.state, call, window, False)


def _zeros(shapes: Any) -> Any:
    def zero(leaf: Any) -> Any:
        return jnp.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf

    return jax.tree.map(zero, shapes)
