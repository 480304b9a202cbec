"""float16: a loss scale inside each backward pass, and gone again before anything is added."""

import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_accum import _checks
from optax_accum._fits import at

_LARGEST = 2.0**126  # whose reciprocal is a normal float32


def with_loss_scale(
    loss_fn: Callable[..., Any], scale: Any, *, argnums: int | Sequence[int] = 0
) -> Callable[..., Any]:
    """The same loss, whose backward pass runs scaled: for float16, in both drivers.

    Small gradients underflow in float16. Here the backward pass starts from `scale` times what it
    would start from, and each micro-gradient is divided by it where it leaves the loss::

        gradient(with_loss_scale(loss_fn, scale)) = gradient(scale * loss_fn) / scale

    So what is added to a window is never scaled: the scale may change inside a window, a weight
    counts as it should, and an overflow is a micro-gradient that is not finite, of which
    `nonfinite` says what happens. Values and auxiliary outputs are untouched. Scale and division
    are exact if the scale is a power of two.

    Objects of Flax NNX may be among the arguments: what the loss writes to them stays written.

    Args:
      loss_fn: returns a loss of float32 or wider, `return loss.astype(jnp.float32)`, or a tuple
        that begins with it.
      scale: a real scalar, or an object that has one as `scale` (`flax.training.dynamic_scale`) or
        `loss_scale` (`jmp`): above 0 and finite; gradients are NaN for a traced one that is not.
        With the space driver the backward pass of a micro-batch starts from
        its share of the whole weight besides, about `scale / k`.
      argnums: the arguments to be differentiated, of float32 or wider: cast them to float16 inside.
        Differentiating another one is an error. What the loss encloses cannot be seen: gradients
        with respect to it come `scale` times as large, so pass it as an argument.

    Returns:
      A function of the same arguments; those at `argnums` are given by position.

    Raises:
      TypeError: for a loss or a differentiated leaf of float16, for a scale that is no number, for
        an argument that is differentiated and not among `argnums`, or is not given by position.
      ValueError: for a scale that is not above 0 and finite.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_accum as oa
      >>> def loss_fn(w, x):  # in float16 its gradient, 1e-8, is 0
      ...     half = w.astype(jnp.float16) * x.astype(jnp.float16)
      ...     return half.astype(jnp.float32).mean() * 1e-8
      >>> w, x = jnp.ones([]), jnp.ones(8)
      >>> _, plain = oa.value_and_grad(loss_fn, k=4)(w, x)
      >>> _, scaled = oa.value_and_grad(oa.with_loss_scale(loss_fn, 2.0**15), k=4)(w, x)
      >>> float(plain), f"{float(scaled):.3g}"
      (0.0, '1e-08')
    """
    _checks.function("loss_fn", loss_fn)
    indices = _checks.indices("argnums", argnums)
    scale = _scale_of(scale)

    @functools.wraps(loss_fn)
    def scaled(*args: Any, **kwargs: Any) -> Any:
        chosen = [_position(i, len(args)) for i in indices]
        full, named, held = list(args), dict(kwargs), {}
        for i in chosen:
            full[i] = _changed(args[i], functools.partial(_unscaled, i, scale=scale), held)
        for i in set(range(len(args))) - set(chosen):
            full[i] = _changed(args[i], functools.partial(_guarded, f"argument {i}"), held)
        for name, arg in kwargs.items():
            named[name] = _changed(arg, functools.partial(_guarded, name), held)
        try:
            out = loss_fn(*full, **named)
        finally:
            _restore(held)
        if isinstance(out, tuple):
            return (_started(out[0], scale), *out[1:])
        return _started(out, scale)

    return scaled


def adjust_loss_scale(dynamic_scale: Any, finite: Any) -> Any:
    """The dynamic loss scale after gradients that were finite, or were not.

    For gradients that `dynamic_scale.value_and_grad` has not computed itself: it shrinks after an
    overflow, and grows after `growth_interval` calls without one.

    Args:
      dynamic_scale: a `flax.training.dynamic_scale.DynamicScale`.
      finite: a bool scalar; `stats.skipped == 0` after `value_and_grad(..., has_stats=True,
        nonfinite="skip_micro_step")`.

    Returns:
      A `DynamicScale` of its settings.

    Raises:
      TypeError: for what is no `DynamicScale` (`jmp`'s has `adjust` itself).

    Example:
      >>> from flax.training.dynamic_scale import DynamicScale
      >>> import optax_accum as oa
      >>> float(oa.adjust_loss_scale(DynamicScale(scale=1024.0), False).scale)
      512.0
    """
    if not callable(getattr(dynamic_scale, "value_and_grad", None)):
        raise TypeError(
            f"dynamic_scale is a {type(dynamic_scale).__name__}, expected a flax.training."
            "dynamic_scale.DynamicScale; of other kinds call their own method, "
            "loss_scale.adjust(finite) for jmp."
        )
    flag = jnp.where(_checks.scalar_flag("finite", finite), jnp.float32(1), jnp.nan)
    # Flax adjusts a scale only while it differentiates: here, one number that is NaN or is not.
    return dynamic_scale.value_and_grad(lambda one: one * flag)(jnp.float32(1)).dynamic_scale


def _scale_of(scale: Any) -> Any:
    for name in ("scale", "loss_scale"):
        scale = getattr(scale, name, scale)
    if not any(_checks.is_scalar(scale, kind) for kind in (jnp.integer, jnp.floating)):
        raise TypeError(
            f"scale is {_checks.described(scale)}, expected a real scalar or a DynamicScale; type "
            "with_loss_scale(loss_fn, 2.0**15)."
        )
    if not _checks.is_traced(scale) and not (math.isfinite(scale) and scale > 0):
        raise ValueError(
            f"scale is {float(scale)!r}, expected a number above 0 and finite; type "
            "with_loss_scale(loss_fn, 2.0**15)."
        )
    wide = jnp.asarray(scale, jnp.float32)
    clipped = jnp.clip(wide, 1 / _LARGEST, _LARGEST)
    return lax.stop_gradient(jnp.where((wide > 0) & jnp.isfinite(wide), clipped, jnp.nan))


def _position(index: int, count: int) -> int:
    if not -count <= index < count:
        raise TypeError(
            f"argnums has {index}, but loss_fn was called with {count} positional arguments; "
            "expected what is differentiated among them: pass it by position, or type argnums=0."
        )
    return index % count


def _started(loss: Any, scale: jax.Array) -> Any:
    if jnp.result_type(loss) == jnp.float16:
        raise TypeError(
            "the loss is float16, in which its backward pass would start from a scale that "
            "overflows; return loss.astype(jnp.float32)."
        )
    return _times_backwards(jnp.asarray(loss), scale)


def _is_inexact(leaf: Any) -> bool:
    return _checks.is_array(leaf) and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def _unscaled(index: int, path: Any, leaf: Any, scale: jax.Array) -> Any:
    if not _is_inexact(leaf):
        return leaf
    if jnp.result_type(leaf) == jnp.float16:
        raise TypeError(
            f"argument {index}{at(path)} is float16, in which its gradient would underflow once it "
            "is not scaled any more; keep float32 parameters and cast them inside loss_fn."
        )
    return _times_backwards(jnp.asarray(leaf), 1 / scale)


def _guarded(name: str, path: Any, leaf: Any) -> Any:
    """The leaf, which must not be differentiated."""
    if not (_checks.is_traced(leaf) and _is_inexact(leaf)):
        return leaf  # a number that is known has no derivative
    return _not_differentiated(leaf, f"{name}{at(path)}")


# Objects of NNX: their Variables hold other values for as long as the loss runs.


class _Held(NamedTuple):
    variable: Any
    before: Any
    during: Any


def _changed(tree: Any, change: Callable[[Any, Any], Any], held: dict[int, _Held]) -> Any:
    """The tree with its leaves changed, but with the same NNX objects, changed in place."""
    if "flax.nnx" not in sys.modules:
        return jax.tree_util.tree_map_with_path(change, tree)
    from optax_accum._nnx_graph import is_node

    def one(path: Any, leaf: Any) -> Any:
        return _changed_node(leaf, change, held) if is_node(leaf) else change(path, leaf)

    return jax.tree_util.tree_map_with_path(one, tree, is_leaf=is_node)


def _changed_node(node: Any, change: Callable[[Any, Any], Any], held: dict[int, _Held]) -> Any:
    from flax import nnx

    key = jax.tree_util.GetAttrKey
    change_all = jax.tree_util.tree_map_with_path
    found = [((), node)] if isinstance(node, nnx.Variable) else nnx.iter_graph(node, graph=True)
    found = [([key(str(name)) for name in path], x) for path, x in found]
    variables = [(path, x) for path, x in found if isinstance(x, nnx.Variable)]
    for path, x in found:
        if _is_inexact(x) and _checks.is_transformed(x) and not _checks.is_vmapped(x):
            raise TypeError(
                f"{type(node).__name__}{at(path)} is a plain array, whose gradient would come out "
                "`scale` times as large; put it in an nnx.Param."
            )
    if not all(variable._can_update for _, variable in variables):  # nor can the loss write to it
        if isinstance(node, nnx.Variable):
            return change_all(change, node)
        graphdef, state = nnx.split(node)
        return nnx.merge(graphdef, change_all(change, state))
    for path, variable in variables:
        if id(variable) in held:
            continue
        before = variable.get_raw_value()
        during = change_all(lambda end, leaf, path=path: change([*path, *end], leaf), before)
        held[id(variable)] = _Held(variable, before, during)
        variable.set_raw_value(during)
    return node


def _restore(held: dict[int, _Held]) -> None:
    """All that the loss has not written to."""
    for variable, before, during in held.values():
        if variable.get_raw_value() is during:
            variable.set_raw_value(before)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _not_differentiated(x: jax.Array, name: str) -> jax.Array:
    del name
    return x


@_not_differentiated.defjvp
def _not_differentiated_jvp(name: str, primals: Any, tangents: Any) -> Any:
    del primals, tangents
    raise TypeError(
        f"{name} is differentiated, and argnums of with_loss_scale leaves it out, so that its "
        "gradient would come out `scale` times as large; type with_loss_scale(..., argnums=(0, 1)) "
        "with the numbers of all arguments that are differentiated."
    )


@jax.custom_jvp
def _times_backwards(x: jax.Array, factor: jax.Array) -> jax.Array:
    """`x`, whose derivative is `factor` and not 1."""
    del factor
    return x


@_times_backwards.defjvp
def _times_backwards_jvp(primals: Any, tangents: Any) -> Any:
    x, factor = primals
    return x, tangents[0] * factor.astype(x.dtype)
