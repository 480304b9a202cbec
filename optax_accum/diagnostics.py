"""During training: what people log of a window."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_accum import _accumulator as acc
from optax_accum import _checks
from optax_accum._record import Recorded, records
from optax_accum._shardings import refold
from optax_accum._state import AccumulateState, outermost_states, the_state


def window(state: optax.OptState) -> dict[str, jax.Array]:
    """What people log of the open window, as a plain dict of scalars.

    Args:
      state: an `AccumulateState`, or any state that holds one. With rows of replicas, outside of
        the mapped axis: their sum is shown.

    Returns:
      * `micro_step`: micro-steps taken in the open window
      * `k`: micro-steps it takes to fill it
      * `update_step`: updates made so far
      * `weight_sum`: weight in the window so far (tokens, or micro-steps where none was given)
      * `skipped`: micro-steps thrown away so far, in all windows
      * `grad_norm`: norm of the mean gradient so far, `||grad_sum|| / weight_sum`, whatever the
        loss reduction; 0 for an empty window and for a static k=1, which holds none

    Raises:
      ValueError: if the state holds no `AccumulateState`, or several side by side.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import optax_accum as oa
      >>> tx = oa.accumulate(optax.sgd(1.0), k=4)
      >>> params = jnp.zeros(2)
      >>> _, state = tx.update(jnp.array([3.0, 4.0]), tx.init(params), params, weight=10)
      >>> log = oa.diagnostics.window(state)
      >>> int(log["micro_step"]), int(log["k"]), float(log["weight_sum"]), float(log["grad_norm"])
      (1, 4, 10.0, 5.0)
    """
    ours = the_state(state)
    if ours.has_rows:
        ours = the_state(refold(ours, None))
    log = _log
    for _ in range(jnp.ndim(jnp.asarray(ours.weight_sum))):  # a vmapped state: lane by lane
        log = jax.vmap(log)
    return log(ours)


def record() -> optax.GradientTransformationExtraArgs:
    """A link that keeps what :func:`last_update` logs, and passes gradients through as they are.

    When a window closes it is emptied, so what it held can only be kept by its update. Put this
    first into the optimizer inside `accumulate`, before clipping::

        tx = accumulate(optax.chain(record(), optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), k)

    It runs once an update and costs one norm there; nothing between updates. With the space driver
    it stands in a plain optimizer's chain, which is told the rest::

        (loss, stats), grads = value_and_grad(loss_fn, k, has_stats=True)(params, batch)
        tx.update(grads, state, params, value=loss, weight=stats.weight, skipped=stats.skipped)

    Args:
      None. Its `update` takes `value`, `weight` and `skipped`, each a scalar; `accumulate` gives
        the window's `value`, if it gets one itself, and the window's weight.

    Returns:
      An `optax.GradientTransformationExtraArgs`.

    Raises:
      TypeError: from `update`, for a `value` or a `weight` that is no real scalar.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import optax_accum as oa
      >>> tx = optax.chain(oa.diagnostics.record(), optax.sgd(0.1))
      >>> params = jnp.zeros(2)
      >>> grads = jnp.array([3.0, 4.0])
      >>> _, state = tx.update(grads, tx.init(params), params, value=0.7, weight=20)
      >>> log = oa.diagnostics.last_update(state)
      >>> f"{log['loss']:.1f}", float(log["grad_norm"]), float(log["weight"])
      ('0.7', 5.0, 20.0)
    """

    def init_fn(params: optax.Params) -> Recorded:
        del params
        none = lambda: jnp.zeros([], jnp.float32)  # noqa: E731 (two words, three buffers)
        return Recorded(jnp.zeros([], jnp.int32), none(), none(), none(), jnp.zeros([], jnp.int32))

    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: Any = None,
        *,
        value: Any = None,
        weight: Any = None,
        skipped: Any = 0,
        **extra: Any,
    ) -> tuple[optax.Updates, Recorded]:
        del params, extra
        return updates, Recorded(
            jnp.asarray(optax.safe_increment(state.updates)),
            _scalar("value", value),
            _norm(updates),
            _scalar("weight", weight),
            state.skipped + jnp.asarray(skipped, jnp.int32),
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def last_update(state: optax.OptState) -> dict[str, jax.Array]:
    """What people log of an update, as a plain dict of scalars; inside `jax.jit` too.

    Log it where `updated` is True: between updates it still shows the last one. Where one
    `accumulate` is inside another, the record counts the updates of the innermost around it, and
    `updated` says whether all of those around it made one.

    Args:
      state: one that holds a state of :func:`record`: of `accumulate`, of a chain, of a plain
        optimizer with the space driver.

    Returns:
      * `update_step`: updates made so far
      * `updated`: whether the last call made one (always, for a plain optimizer that has run)
      * `loss`: the window's `value`, its weighted mean; NaN if no call gave one, and before the
        first update
      * `grad_norm`: the norm of the window's gradient where `record` stands: first, before clipping
      * `weight`: of the window: tokens or examples, or micro-steps where no weight was given
      * `skipped`: micro-steps thrown away so far, in all windows

    Raises:
      ValueError: if the state holds no record, or several, or one beside `accumulate` and not
        inside it, where each micro-step is recorded as if it were an update.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import optax_accum as oa
      >>> inner = optax.chain(oa.diagnostics.record(), optax.clip(1.0), optax.sgd(0.1))
      >>> tx = oa.accumulate(inner, k=2)
      >>> params = jnp.zeros(2)
      >>> state = tx.init(params)
      >>> for tokens, loss in ((10, 1.0), (30, 3.0)):
      ...     grads = jnp.array([3.0, 4.0])
      ...     _, state = tx.update(grads, state, params, weight=tokens, value=loss)
      >>> log = oa.diagnostics.last_update(state)
      >>> float(log["loss"]), float(log["grad_norm"]), float(log["weight"])
      (2.5, 5.0, 40.0)
    """
    found = records(state)
    if len(found) != 1:
        raise ValueError(
            f"the state holds {len(found)} records, expected one; put the link in the optimizer, "
            "accumulate(optax.chain(oa.diagnostics.record(), optax.adamw(1e-3)), k), and of "
            "several ask each by itself."
        )
    around = _around(state)
    if not around and outermost_states(state):
        raise ValueError(
            "the record stands beside accumulate, where it sees each micro-step; put the link "
            "inside, accumulate(optax.chain(oa.diagnostics.record(), optax.adamw(1e-3)), k), or "
            "of optax.multi_transform ask its part: last_update(state.inner_states['label'])."
        )
    kept = Recorded(*map(jnp.asarray, found[0]))  # Variables of a framework unwrapped
    log = {
        "update_step": kept.updates,
        "updated": kept.updates > 0,
        "loss": jnp.where(kept.updates > 0, kept.loss, jnp.nan),
        "grad_norm": kept.grad_norm,
        "weight": kept.weight,
        "skipped": kept.skipped,
    }
    for each in around:
        log |= {name: jnp.asarray(getattr(each, name)) for name in ("update_step", "skipped")}
        log["updated"] = log["updated"] & jnp.asarray(each.updated)
    return log


def _around(state: optax.OptState) -> list[AccumulateState]:
    """The AccumulateStates around the record, from the outermost to the innermost."""
    here = [each for each in outermost_states(state) if records(each)]
    return here + _around(here[0].inner_state) if here else []


def _norm(grads: optax.Updates) -> jax.Array:
    arrays = [leaf for leaf in jax.tree.leaves(grads) if _checks.is_array(leaf)]
    one = acc.fresh(arrays)._replace(kept=jnp.int32(1), weight_sum=jnp.float32(1))
    return acc.mean_norm(one).astype(jnp.float32)


def _scalar(name: str, number: Any) -> jax.Array:
    if number is None:
        return jnp.full([], jnp.nan, jnp.float32)
    return _checks.real_scalar(name, number)


def _log(ours: AccumulateState) -> dict[str, jax.Array]:
    return {
        "micro_step": jnp.asarray(ours.micro_step),
        "k": jnp.asarray(ours.k),
        "update_step": jnp.asarray(ours.update_step),
        "weight_sum": jnp.asarray(ours.weight_sum),
        "skipped": jnp.asarray(ours.skipped),
        "grad_norm": acc.mean_norm(acc.Window(ours.grad_sum, *map(jnp.asarray, ours.window[1:]))),
    }
