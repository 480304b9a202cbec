"""During training: what people log of a window."""

import jax
import jax.numpy as jnp
import optax

from optax_accum import _accumulator as acc
from optax_accum._shardings import refold
from optax_accum._state import AccumulateState, the_state


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


def _log(ours: AccumulateState) -> dict[str, jax.Array]:
    return {
        "micro_step": jnp.asarray(ours.micro_step),
        "k": jnp.asarray(ours.k),
        "update_step": jnp.asarray(ours.update_step),
        "weight_sum": jnp.asarray(ours.weight_sum),
        "skipped": jnp.asarray(ours.skipped),
        "grad_norm": acc.mean_norm(acc.Window(ours.grad_sum, *map(jnp.asarray, ours.window[1:]))),
    }
