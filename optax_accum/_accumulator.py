"""The window: open, add, close. The only place where values combine.

    window = open_window(params)
    for i in range(k):
        window = add(window, judge(grads[i], weights[i]), grads[i], values[i])
    gradient = close(window)

Sums are kept, never a running mean, so a window may be closed after any number of micro-steps.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_accum import _axis, _checks
from optax_accum._cond import cond
from optax_accum._fits import aligned, check_kept, is_none, promoted, real, window_dtype
from optax_accum._rounding import round_to


class Window(NamedTuple):
    """A weighted sum of micro-gradients, open for more.

    With kept == 0 the sums of gradients are left over from the window before: the first
    micro-gradient overwrites them, which costs nothing, where zeroing would cost a pass.
    """

    grad_sum: optax.Updates | None  # the parameters' tree; dtype from window_dtype
    weight_sum: jax.Array  # shape=(), dtype=jnp.float32
    value_sum: jax.Array  # shape=(), dtype=jnp.float32
    value_weight: jax.Array  # shape=(), dtype=jnp.float32: weight of those that gave a value
    kept: jax.Array  # shape=(), dtype=jnp.int32: micro-steps in the sums


class Contribution(NamedTuple):
    """How one micro-gradient enters a window. A plain bool is known before compilation."""

    scale: jax.Array | None  # factor of its gradient and value; None is 1
    weight: jax.Array  # what it adds to weight_sum; NaN where it was not a weight
    keep: bool | jax.Array  # False: neither it nor its weight is looked at
    dropped: bool | jax.Array  # True: kept out because it was not finite


def open_window(params: optax.Params, accumulator_dtype: Any) -> Window:
    """An empty window: zeros of the parameters' shapes and shardings."""

    def zeros(path: Any, param: Any) -> jax.Array | None:
        if not _checks.is_array(param):
            return None
        dtype = jnp.result_type(param)
        wide = window_dtype(dtype, accumulator_dtype)
        check_kept(path, "parameter", dtype, wide, accumulator_dtype)
        return _axis.sharded_like(jnp.zeros_like(param, dtype=wide), param)

    return fresh(jax.tree_util.tree_map_with_path(zeros, params))


def fresh(grad_sum: optax.Updates | None) -> Window:
    """A window around sums that are zero already. Each scalar is a buffer of its own."""
    zero = lambda: jnp.zeros([], jnp.float32)  # noqa: E731 (four words, four buffers)
    return Window(grad_sum, zero(), zero(), zero(), jnp.zeros([], jnp.int32))


def emptied(window: Window) -> Window:
    """The window, what is left over in it overwritten by zeros: for additions that cannot do so."""
    zeros = lambda: jax.tree.map(jnp.zeros_like, window.grad_sum)  # noqa: E731 (a branch)
    return window._replace(grad_sum=cond(window.kept == 0, zeros, lambda: window.grad_sum))


def reduced(window: Window, axis_name: _axis.AxisName | None) -> Window:
    """The window of all replicas, from each one's own, `emptied`; in float32 or wider."""
    if axis_name is None:
        return window
    sums = jax.tree.map(lambda x: x.astype(promoted(x.dtype, jnp.float32)), window.grad_sum)
    kept = _axis.largest(window.kept, axis_name)
    sums, weight, value, value_weight = _axis.total((sums, *window[1:4]), axis_name)
    return Window(sums, weight, value, value_weight, kept)


def folded(window: Window, replicas: int) -> Window:
    """The rows of a window's replicas, summed into another number of rows."""

    def rows(x: jax.Array, kept: jax.Array) -> jax.Array:
        wide = x.astype(promoted(x.dtype, jnp.float32))
        kept = kept.reshape(-1, *(1,) * (x.ndim - 1))
        wide = jnp.where(kept == 0, jnp.zeros([], wide.dtype), wide)
        padding = -len(wide) % replicas
        wide = jnp.pad(wide, [(0, padding)] + [(0, 0)] * (x.ndim - 1))
        return wide.reshape(-1, replicas, *x.shape[1:]).sum(0).astype(x.dtype)

    def most(kept: jax.Array) -> jax.Array:
        return jnp.pad(kept, (0, -len(kept) % replicas)).reshape(-1, replicas).max(0)

    sums = jax.tree.map(
        lambda x: _axis.by_compiler(rows, x, window.kept, rows=replicas),
        window._replace(kept=None),
    )
    return sums._replace(kept=_axis.by_compiler(most, window.kept, rows=replicas))


def reopen(window: Window, full: Any) -> Window:
    """The window, opened anew where it was full."""
    pairs = zip(fresh(None)[1:], window[1:], strict=True)
    return Window(window.grad_sum, *(jnp.where(full, new, old) for new, old in pairs))


def judge(
    grads: optax.Updates | None,
    weight: Any,
    known: float | None,
    loss_reduction: str,
    nonfinite: str,
    agreed_by: tuple[str, ...] = (),
) -> Contribution:
    """Decide how one micro-gradient enters the window, from its weight and its finiteness.

    `known` is the weight's value where it is known before compilation (1 where no weight was
    given). A traced weight below zero or not finite counts as a micro-gradient that is not. What
    one device along the axes `agreed_by` drops, all drop.
    """
    if known == 0:
        return Contribution(None, jnp.zeros([], jnp.float32), False, False)
    scaled = weight is not None and loss_reduction == "mean"
    if weight is None:
        weight = jnp.ones([], jnp.float32)
    present = True if known is not None else weight != 0
    if nonfinite == "skip_micro_step":
        finite = all_finite(grads, weight if scaled else None) & is_weight(weight)
        dropped = _axis.anywhere(present & ~finite, agreed_by)
        keep = present & ~dropped if agreed_by else present & finite
    else:
        keep, dropped = present, False
        weight = jnp.where(is_weight(weight), weight, jnp.nan)
    return Contribution(weight if scaled else None, weight, keep, dropped)


def add(
    window: Window,
    part: Contribution,
    grads: optax.Updates,
    value: Any,
    clocks: tuple[Any, ...],
) -> Window:
    """The window with one micro-gradient more."""
    if part.keep is False:
        return window
    sums = add_sums(window.grad_sum, part, grads, window.kept == 0, clocks)
    return add_scalars(window, part, value)._replace(grad_sum=sums)


def add_sums(
    grad_sum: Any,
    part: Contribution,
    grads: optax.Updates,
    first: bool | jax.Array,
    clocks: tuple[Any, ...],
) -> Any:
    """The sums with one micro-gradient more; the first one overwrites them."""
    leaves, treedef = jax.tree.flatten(grads, is_leaf=is_none)
    sums = treedef.flatten_up_to(grad_sum)
    return treedef.unflatten(
        _add_leaf(total, grad, part, first, (*clocks, i))
        if grad is not None and _checks.is_array(grad)
        else jax.tree.map(lambda total: _opened(total, part, first), total)
        for i, (total, grad) in enumerate(zip(sums, leaves, strict=True))
    )


def add_scalars(window: Window, part: Contribution, value: Any) -> Window:
    """The window with one micro-step more in its scalars."""
    value_sum, value_weight = window.value_sum, window.value_weight
    if value is not None:
        scaled = value if part.scale is None else value * part.scale
        value_sum = _where(part.keep, value_sum + scaled, value_sum)
        value_weight = _where(part.keep, value_weight + part.weight, value_weight)
    return Window(
        window.grad_sum,
        _where(part.keep, window.weight_sum + part.weight, window.weight_sum),
        value_sum,
        value_weight,
        _where(part.keep, window.kept + 1, window.kept),
    )


def close(window: Window, grads: optax.Updates, params: Any, loss_reduction: str) -> optax.Updates:
    """The window's gradient, in the dtypes that plain inner would have got.

    A product with the reciprocal, since XLA materialises a quotient by a traced scalar.
    """

    def mean(total: Any, grad: Any, param: Any) -> Any:
        if grad is None or not _checks.is_array(grad):
            return grad
        wide = promoted(total.dtype, jnp.float32)
        total = total.astype(wide)
        if loss_reduction != "sum":
            total = total * reciprocal(window.weight_sum, wide)
        return total.astype(promoted(jnp.result_type(grad), jnp.result_type(param)))

    leaves, treedef = jax.tree.flatten(grads, is_leaf=is_none)
    sums = treedef.flatten_up_to(window.grad_sum)
    like = leaves if params is None else aligned(grads, params)
    return treedef.unflatten(map(mean, sums, leaves, like))


def mean_value(window: Window, loss_reduction: str) -> Any:
    """The window's value, combined like its gradients; NaN if no micro-step gave one."""
    value = window.value_sum
    if loss_reduction != "sum":
        weight = window.value_weight if loss_reduction == "mean" else window.weight_sum
        value = value * reciprocal(weight, jnp.float32)
    if _checks.is_traced(window.value_weight):
        return jnp.where(window.value_weight == 0, jnp.nan, value)
    return value if float(window.value_weight) else np.float32(np.nan)  # no array: jax_debug_nans


def may_update(
    window: Window, known: float | None, nonfinite: str, agreed_by: tuple[str, ...] = ()
) -> tuple[Any, Any]:
    """May a full window close with an update, and how many micro-steps are thrown away if not?"""
    none = jnp.zeros([], jnp.int32)
    if nonfinite == "propagate" and known:
        return True, none
    present = window.weight_sum != 0
    if nonfinite != "skip_window":
        return present, none
    finite = ~_axis.anywhere(~all_finite((window.grad_sum, window.weight_sum)), agreed_by)
    return present & finite, jnp.where(finite, none, window.kept)


def may_update_single(part: Contribution, grads: optax.Updates, nonfinite: str) -> tuple[Any, Any]:
    """`may_update` of a window of this one micro-step."""
    if nonfinite != "skip_window" or part.keep is False:
        return part.keep, jnp.zeros([], jnp.int32)
    finite = all_finite((grads, part.weight))
    return part.keep & finite, (part.keep & ~finite).astype(jnp.int32)


def close_single(part: Contribution, grads: optax.Updates, loss_reduction: str) -> optax.Updates:
    """What `close` gives for a window of this one micro-step, without a buffer."""

    def one(grad: Any) -> Any:
        if grad is None or not _checks.is_array(grad):
            return grad
        grad = jnp.asarray(grad)
        if loss_reduction == "sum_over_weight":
            wide = promoted(grad.dtype, jnp.float32)
            return (grad.astype(wide) * reciprocal(part.weight, wide)).astype(grad.dtype)
        if part.scale is None or not _checks.is_traced(part.weight):
            return grad
        if not jnp.issubdtype(grad.dtype, jnp.inexact):
            return grad
        return jnp.where(jnp.isnan(part.weight), jnp.asarray(jnp.nan, grad.dtype), grad)

    return jax.tree.map(one, grads, is_leaf=is_none)


def mean_norm(window: Window) -> jax.Array:
    """Norm of the mean gradient so far, in float32 or wider; 0 for an empty window."""
    squares = [
        jnp.sum(jnp.square(jnp.abs(total.astype(promoted(total.dtype, jnp.float32)))))
        for total in jax.tree.leaves(window.grad_sum)
    ]
    if not squares:
        return jnp.zeros([], jnp.float32)
    wide = promoted(*(square.dtype for square in squares), jnp.float32)
    norm = jnp.sqrt(sum(square.astype(wide) for square in squares))
    return jnp.where(window.kept == 0, 0, norm * reciprocal(window.weight_sum, wide))


def all_finite(tree: Any, scale: jax.Array | None = None) -> jax.Array:
    """Whether every number of a tree is finite, multiplied by `scale` where there is one.

    x - x is 0 where x is finite and NaN elsewhere, and XLA fuses it into the sum; isfinite, then
    all, makes a buffer of flags on CPU, and the maximum loses NaN there.
    """
    arrays = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree) if _checks.is_array(leaf)]
    if scale is not None:
        wide = [x.astype(promoted(x.dtype, jnp.float32)) for x in arrays]
        arrays = [x * scale.astype(x.dtype) for x in wide]
    flags = [jnp.sum(x - x) == 0 for x in arrays if x.size and jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.stack(flags).all() if flags else jnp.ones([], bool)


def _add_leaf(
    total: jax.Array, grad: Any, part: Contribution, first: bool | jax.Array, clocks: Any
) -> jax.Array:
    wide = promoted(total.dtype, jnp.float32)
    term = jnp.asarray(grad).astype(wide)
    if part.scale is not None:
        # Selected before the product too: the derivative of NaN * weight would be NaN.
        term = _where(part.keep, term, jnp.zeros([], wide)) * part.scale.astype(wide)
    term = _axis.sharded_like(term, total)
    new = total.astype(wide) + term
    new = new if first is False else jnp.where(first, term, new)
    return _where(part.keep, round_to(new, total.dtype, clocks), total)


def _opened(total: jax.Array, part: Contribution, first: bool | jax.Array) -> jax.Array:
    """A sum that gets nothing from this micro-step; of the window before it keeps nothing."""
    if first is False:
        return total
    return jnp.where(first & part.keep, jnp.zeros([], total.dtype), total)


def is_weight(weight: jax.Array) -> jax.Array:
    return (weight >= 0) & (weight <= _checks.LARGEST_WEIGHT)


def _where(keep: bool | jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    return new if keep is True else jnp.where(keep, new, old)


def reciprocal(weight: jax.Array, dtype: Any) -> jax.Array:
    weight = jnp.asarray(weight).astype(real(dtype))
    return jnp.where(weight == 0, 0, 1 / jnp.where(weight == 0, 1, weight)).astype(dtype)
