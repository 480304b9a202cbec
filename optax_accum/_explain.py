"""One screen for a configured run."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from optax_accum import _batch_arithmetic, _checks, _fits, _held, _units
from optax_accum._call import Settings, settings_of
from optax_accum._state import outermost_states
from optax_accum._traffic import traffic

GRADIENT = {
    "mean": "sum(w g) / sum(w)",
    "sum": "sum(g)",
    "sum_over_weight": "sum(g) / sum(w)",
}


class Explanation(NamedTuple):
    """What a run does with its batches; printed, it is one screen."""

    batch: _batch_arithmetic.Batch
    k_is_scheduled: bool  # k, and what follows from it, are then those of update 0
    gradient: str | None  # of a window; None without tx
    window: int | None  # bytes on a device; None without params
    window_dtype: str | None
    reduction: str | None  # how replicas combine their gradients; None without params
    reduction_bytes: int | None  # that a device sends in a window

    def __str__(self) -> str:
        return _units.columns(rows(self))


def rows(found: Explanation) -> list[tuple[str, str]]:
    """Names and values, as a screen shows them."""
    shown = _batch_arithmetic.rows(found.batch)
    if found.k_is_scheduled:
        shown.append(("k", f"a schedule; {found.batch.k} at update 0, which is shown"))
    if found.gradient is not None:
        shown.append(("gradient", found.gradient))
    if found.window is not None:
        held = f"{_units.show(found.window)} a device, {found.window_dtype}"
        shown.append(("window", held if found.window else "none: k=1 holds no sums"))
    if found.reduction is not None:
        sent = f", {_units.show(found.reduction_bytes or 0)} sent a device and window"
        alone = found.batch.replicas == 1
        shown.append(("reduction", found.reduction + ("" if alone else sent)))
    return shown


def explain(
    tx: optax.GradientTransformation | None = None,
    params: optax.Params | None = None,
    *,
    global_batch: int | None = None,
    micro_batch: int | None = None,
    k: int | None = None,
    replicas: int | None = 1,
    examples: int | None = None,
    epochs: int = 1,
    drop_tail: bool = False,
    activation_per_sample: int | float | str | None = None,
    accumulator_dtype: Any = None,
    reduction: str | None = None,
) -> Explanation:
    """One screen for a configured run: its batches, its window, and what its replicas exchange.

    ::

        batch(...)                              # k from tx, if tx knows it
        window = bytes of the sums in jax.eval_shape(tx.init, params)
        reduction_bytes = what traffic(params, k, replicas) says of the scheme

    Args:
      tx: from `accumulate`; None for the space driver.
      params: arrays or `jax.ShapeDtypeStruct`s; None leaves out what needs them.
      global_batch: this and what follows as in :func:`batch`.
      micro_batch: as in :func:`batch`.
      k: as in :func:`batch`; None: that of `tx`.
      replicas: as in :func:`batch`.
      examples: as in :func:`batch`.
      epochs: as in :func:`batch`.
      drop_tail: as in :func:`batch`.
      activation_per_sample: as in :func:`batch`.
      accumulator_dtype: of the space driver's window; that of `tx` goes first.
      reduction: a scheme that :func:`traffic` lists. None: "one reduction a window" where `tx` has
        an `axis_name`, else "a reduction a micro-batch", as plain `jit` does.

    Returns:
      An :class:`Explanation`.

    Raises:
      ValueError: where the batch is not determined, k is not the one of `tx`, or the scheme is
        unknown.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import optax_accum as oa
      >>> tx = oa.accumulate(optax.adamw(1e-3), k=8, axis_name="data")
      >>> params = jax.ShapeDtypeStruct((1_000_000,), jnp.float32)
      >>> print(oa.planning.explain(tx, params, micro_batch=4, replicas=4, examples=10_000))
      global batch  128 = micro-batch 4 x k 8 x 4 replicas
      an epoch      79 updates, 625 micro-steps on each replica
      tail          16 examples, 1 micro-step, an update of their own (last=True)
      schedule      79 updates (1 epoch)
      gradient      sum(w g) / sum(w) (loss_reduction='mean')
      window        4 MB a device, float32
      reduction     one reduction a window, 6 MB sent a device and window
    """
    settings = settings_of(tx)
    k, scheduled = _k(settings, k)
    batch = _batch_arithmetic.batch(
        global_batch=global_batch,
        micro_batch=micro_batch,
        k=k,
        replicas=replicas,
        examples=examples,
        epochs=epochs,
        drop_tail=drop_tail,
        activation_per_sample=activation_per_sample,
    )
    gradient = None
    if settings is not None:
        accumulator_dtype = settings.accumulator_dtype
        name = settings.loss_reduction
        gradient = f"{GRADIENT[name]} (loss_reduction={name!r})"
    found = Explanation(batch, scheduled, gradient, None, None, None, None)
    if params is None:
        return found
    window, dtype = _window(tx, params, batch.k, accumulator_dtype)
    scheme, sent = _reduction(settings, params, batch, accumulator_dtype, reduction)
    return found._replace(window=window, window_dtype=dtype, reduction=scheme, reduction_bytes=sent)


def _k(settings: Settings | None, k: int | None) -> tuple[int | None, bool]:
    if settings is None:
        return k, False
    if callable(settings.k):
        return k or int(settings.read_k(jnp.zeros([], jnp.int32))), k is None
    if k is not None and k != settings.k:
        raise ValueError(
            f"k is {k}, but tx accumulates k={settings.k} micro-steps; drop k=, or type "
            f"accumulate(inner, k={k})."
        )
    return settings.k, False


def _window(tx: Any, params: Any, k: int, accumulator_dtype: Any) -> tuple[int, str]:
    if tx is not None:
        sums = [each.grad_sum for each in outermost_states(_held.counted_state(tx, params))]
        if sums:
            return _held.on_a_device(sums), _held.describe_dtypes(sums)
    dtype = _checks.accumulator_dtype(accumulator_dtype)
    shapes = [x for x in _held.shapes_of(params) if jnp.issubdtype(x.dtype, jnp.inexact)]
    held = [(x, jnp.dtype(_fits.window_dtype(x.dtype, dtype))) for x in shapes]
    names = " and ".join(sorted({dtype.name for _, dtype in held}))
    size = sum(math.prod(x.shape) * dtype.itemsize for x, dtype in held)
    return (size, names) if k > 1 else (0, names)


def _reduction(
    settings: Settings | None,
    params: Any,
    batch: _batch_arithmetic.Batch,
    accumulator_dtype: Any,
    name: str | None,
) -> tuple[str, int]:
    known = traffic(params, batch.k, batch.replicas, accumulator_dtype=accumulator_dtype)
    schemes = {row.scheme: row for row in known}
    if name is None:
        once = settings is not None and settings.axis_name is not None
        name = "one reduction a window" if once else "a reduction a micro-batch"
    elif name not in schemes:
        listed = ", ".join(f"reduction={scheme!r}" for scheme in schemes)
        raise ValueError(f"reduction is {name!r}; expected one of: {listed}.")
    if batch.replicas == 1:
        return "none: one replica", 0
    return name, schemes[name].traffic
