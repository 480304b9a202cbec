"""The time driver: a window that stays open across calls, in the optimizer's state."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax

from optax_accum import _checks
from optax_accum._advance import PARAMS, UPDATES, init, run
from optax_accum._call import HIDDEN, check_settings, settings_of
from optax_accum._state import (
    AccumulateState,
    differentiated,
    outermost_states,
    require_states,
    the_state,
)

Batch = TypeVar("Batch")


def accumulate(
    inner: optax.GradientTransformation,
    k: int | Callable[[Any], Any],
    *,
    loss_reduction: str = "mean",
    accumulator_dtype: Any = None,
    nonfinite: str = "propagate",
    axis_name: str | tuple[str, ...] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """An Optax transformation that runs `inner` once every `k` micro-steps, on their mean gradient.

    Each call adds one micro-gradient to a window held in the state and returns zero updates; the
    call that fills the window closes it and returns inner's updates::

        for i in range(k):
            window += weight[i] * grads[i]
            total += weight[i]
        gradient = window / total
        updates, inner_state = inner.update(gradient, inner_state, params)

    Put everything that should count updates (schedules, weight decay, clipping, EMA, noise) into
    `inner`, as an `optax.chain`. What stands before `accumulate` in a chain sees every
    micro-gradient; what stands after it sees the zeros.

    The returned `update` takes, besides what inner takes:

    * `weight`: a real scalar, how much this micro-batch counts (its tokens, say); None is 1. At 0
      the micro-batch is left out before anything looks at its gradients. A traced weight below 0
      or not finite makes the micro-gradient count as not finite.
    * `last`: a bool; True closes the window with this micro-batch, full or not.
    * `value`: the micro-batch's loss, given in every call or in none; inner gets the window's,
      combined like the gradients. A `grad` is replaced by the window's gradient. Every other extra
      argument reaches inner as the closing call gave it.

    A leaf's gradients are None in every micro-step of a window or in none: what inner sees follows
    the closing call.

    Under `jax.vmap` over states the branch becomes a select: the values are right, and inner's
    cost is paid at every micro-step.

    Args:
      inner: the optimizer, any `optax.GradientTransformation`.
      k: micro-steps in a window: an integer of 1 or more, or a schedule `update_step -> int`, read
        when a window opens, so that k never changes inside one (a value below 1 counts as 1). An
        integer 1 holds no buffer.
      loss_reduction: how the loss of a micro-batch was reduced. `"mean"`: the window's gradient is
        `sum(w g) / sum(w)`. `"sum"`: it is `sum(g)`, and no weight is taken.
        `"sum_over_weight"`: it is `sum(g) / sum(w)`, and a weight is required.
      accumulator_dtype: dtype of the sums. None: `promote_types(parameter, float32)`. bfloat16
        halves the window and is rounded stochastically, so small terms are not lost.
      nonfinite: what a NaN or an infinity does. `"propagate"`: it reaches inner, once.
        `"skip_micro_step"`: that micro-gradient is dropped with its weight. `"skip_window"`: the
        whole window is dropped when it closes. Dropped micro-steps still count toward k, so windows
        stay aligned with the data.
      axis_name: for use inside `jax.shard_map` or `jax.pmap`: the mapped axis (or axes) over which
        replicas share the batch. Each sums its own gradients, and the call that closes a window
        reduces them, once; until then nothing is communicated, but for 4 bytes a micro-step under
        `"skip_micro_step"`, by which all replicas drop together. `last` and k are the same on all
        replicas, weights and gradients each one's own. The state's sums have a row a replica: pass
        it by :func:`state_specs`. With `check_vma=True` differentiate with respect to
        `jax.lax.pcast(params, axis_name, to="varying")`, or autodiff reduces each micro-gradient.
        A loss that communicates itself and has unequal weights needs :func:`micro_step`, which
        weighs it before its gradients cross replicas.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state is an :class:`AccumulateState`.

    Raises:
      ValueError, TypeError: for a k, a name or a dtype that cannot be meant; and from `update` for
        weights, gradients and states that do not fit. The message says what to type.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import optax_accum as oa
      >>> tx = oa.accumulate(optax.sgd(1.0), k=2)
      >>> params = jnp.array([1.0, 2.0])
      >>> state = tx.init(params)
      >>> updates, state = tx.update(jnp.array([1.0, 0.0]), state, params, weight=1)
      >>> updates.tolist(), bool(oa.has_updated(state))
      ([0.0, 0.0], False)
      >>> updates, state = tx.update(jnp.array([0.0, 1.0]), state, params, weight=3)
      >>> updates.tolist(), bool(oa.has_updated(state))
      ([-0.25, -0.75], True)
    """
    settings = check_settings(inner, k, loss_reduction, accumulator_dtype, nonfinite, axis_name)

    def init_fn(params: optax.Params) -> AccumulateState:
        return init(settings, params)

    def update_fn(updates: Any, state: Any, params: Any = None, **arguments: Any) -> Any:
        return run(settings, UPDATES, updates, state, params, **arguments)

    # How apply_gradients and micro_step know it.
    update_fn.settings = settings  # pyright: ignore[reportFunctionMemberAccess]
    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


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
    """`update` and `optax.apply_updates` in one, without making the zero updates.

    The same arithmetic, but between updates the parameters are not touched at all, and at an
    update they are written in place when `params` and `state` are donated: no parameter-sized
    temporary, where `update` needs one. Let the jitted function take and return them in this order,
    params before state: jax pairs donated arguments with results by shape, in order, and paired
    crosswise everything is copied.

    Args:
      tx: what :func:`accumulate` returned. Any other transformation, a chain around `accumulate`
        included, is run as those two calls; to gain from this function put the chain inside.
      grads: the micro-gradient, a tree like the parameters.
      state: from `tx.init(params)` or the last call.
      params: the parameters.
      weight: how much this micro-batch counts, as in :func:`accumulate`.
      last: True closes the window with this micro-batch.
      **extra: what inner's update takes.

    Returns:
      `(params, state)`.

    Raises:
      ValueError, TypeError: as `update` of :func:`accumulate`; and for `weight` or `last` with a
        transformation that takes no extra arguments.

    Example:
      >>> import functools, jax, jax.numpy as jnp, optax
      >>> import optax_accum as oa
      >>> tx = oa.accumulate(optax.sgd(1.0), k=2)
      >>> @functools.partial(jax.jit, donate_argnums=(0, 1))
      ... def micro_step(params, state, grads):
      ...     return oa.apply_gradients(tx, grads, state, params)
      >>> params = jnp.array([1.0, 2.0])
      >>> state = tx.init(params)
      >>> params, state = micro_step(params, state, jnp.array([1.0, 0.0]))
      >>> params, state = micro_step(params, state, jnp.array([0.0, 1.0]))
      >>> params.tolist()
      [0.5, 1.5]
    """
    settings = settings_of(tx)
    if settings is not None:
        return run(settings, PARAMS, grads, state, params, weight=weight, last=last, **extra)
    if weight is not None:
        extra["weight"] = weight
    if last is not False:
        extra["last"] = last
    tx = _taking_extra(tx) if "weight" in extra or "last" in extra else tx
    tx = optax.with_extra_args_support(tx)
    updates, state = tx.update(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state


def flush(
    tx: optax.GradientTransformation,
    state: optax.OptState,
    params: optax.Params,
    **extra: Any,
) -> tuple[optax.Updates, optax.OptState]:
    """Close a partial window when no micro-batch is left.

    Its gradient is divided by what was really added, so the tail of an epoch is one exact update.
    On an empty window: zeros, and nothing changes but `updated`, which is False. Works through
    chains, since `weight` and `last` travel as extra arguments; what stands before or beside
    `accumulate` there (another label's optimizer) sees one micro-step of zero gradients. With
    :func:`mark_last` a flush is not needed.

    Args:
      tx: from :func:`accumulate`, or a chain that contains it.
      state: its state.
      params: the parameters.
      **extra: what inner's update takes; the window's `value` is passed by itself. A parameter
        whose gradients are None has a gradient of zero here: where inner decays weights and some
        are frozen in this way, close the window by `last=True` instead.

    Returns:
      `(updates, state)`, to be applied like those of `tx.update`.

    Raises:
      ValueError: if the state holds no :class:`AccumulateState`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import optax_accum as oa
      >>> tx = oa.accumulate(optax.sgd(1.0), k=4)
      >>> params = jnp.zeros(2)
      >>> state = tx.init(params)
      >>> for _ in range(3):
      ...     updates, state = tx.update(jnp.ones(2), state, params)
      >>> updates, state = oa.flush(tx, state, params)
      >>> updates.tolist()
      [-1.0, -1.0]
    """
    require_states(state)
    if {"weight", "last"} & extra.keys():
        raise TypeError(
            f"flush got {sorted({'weight', 'last'} & extra.keys())}, expected neither: it adds "
            "nothing and always closes; for one more micro-batch type tx.update(..., last=True)."
        )

    if params is None and jax.tree.leaves([each.grad_sum for each in require_states(state)]):
        raise ValueError("flush got params=None, expected the parameters that tx.init got.")

    def zeros(param: Any) -> Any:
        if not _checks.is_array(param):
            return None
        return jnp.zeros_like(param, dtype=jnp.result_type(param))

    grads = jax.tree.map(zeros, differentiated(params))
    updates, state = _taking_extra(tx).update(grads, state, params, weight=0.0, last=True, **extra)
    for left in outermost_states(state):
        if not _checks.is_traced(left.micro_step) and jnp.any(jnp.asarray(left.micro_step)):
            raise TypeError(HIDDEN)
    return updates, state


def has_updated(state: optax.OptState) -> jax.Array:
    """Did the last call run inner? A bool array, of shape () unless the state was vmapped.

    False also after a window that closed empty or dropped.

    Args:
      state: an :class:`AccumulateState`, or any tree that holds one: the state of a chain, a
        `TrainState`, an `nnx.Optimizer`'s `opt_state`. Of nested ones the outermost speaks.

    Returns:
      A bool array.

    Raises:
      ValueError: if there is none, or several side by side (`optax.multi_transform`).

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import optax_accum as oa
      >>> tx = optax.chain(oa.accumulate(optax.sgd(1.0), k=1))
      >>> state = tx.init(jnp.zeros(2))
      >>> bool(oa.has_updated(state))
      False
      >>> _, state = tx.update(jnp.ones(2), state)
      >>> bool(oa.has_updated(state))
      True
    """
    return jnp.asarray(the_state(state).updated)


def mark_last(loader: Iterable[Batch]) -> Iterator[tuple[Batch, bool]]:
    """Pairs `(batch, last)`, where `last` is True for the final batch only.

    Looks one batch ahead. Pass `last` to `update`, and the tail of an epoch is neither lost nor
    mixed into the next one.

    Args:
      loader: any iterable of batches. If it fails, the batch it gave before is still handed out.

    Returns:
      An iterator of `(batch, last)`.

    Raises:
      TypeError: if `loader` cannot be iterated over; and whatever the loader raises.

    Example:
      >>> import optax_accum as oa
      >>> list(oa.mark_last(["a", "b", "c"]))
      [('a', False), ('b', False), ('c', True)]
    """
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
            except Exception:
                yield batch, False  # what the loader gave before it failed is not lost
                raise
            yield batch, False
            batch = following

    return marked()


def _taking_extra(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    if not isinstance(tx, optax.GradientTransformationExtraArgs):
        raise TypeError(HIDDEN)
    return tx
