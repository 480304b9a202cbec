"""Does a gradient fit its window? Structures, shapes and dtypes, before anything is added."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_accum import _axis, _checks


def is_none(x: Any) -> bool:
    return x is None


def promoted(*dtypes: Any) -> Any:
    """Their common dtype, whatever promotion mode the user has set."""
    with jax.numpy_dtype_promotion("standard"):
        try:
            return functools.reduce(jnp.promote_types, dtypes)
        except ValueError:  # an 8-bit float promotes with nothing but itself
            wide = [jnp.float32 if jnp.dtype(dtype).itemsize == 1 else dtype for dtype in dtypes]
            return functools.reduce(jnp.promote_types, wide)


def window_dtype(dtype: Any, accumulator_dtype: Any) -> Any:
    """The dtype in which gradients of `dtype` are summed."""
    if accumulator_dtype is None:
        return promoted(dtype, jnp.float32)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return accumulator_dtype
    return real(accumulator_dtype)


def real(dtype: Any) -> Any:
    return jnp.finfo(dtype).dtype


def check_gradients(grad_sum: Any, grads: optax.Updates, accumulator_dtype: Any) -> None:
    """Raise unless `grads` have the window's structure and shapes, and dtypes it can hold."""
    sums = aligned(grads, grad_sum)
    paths = jax.tree_util.tree_leaves_with_path(grads, is_leaf=is_none)
    for (path, grad), total in zip(paths, sums, strict=True):
        if grad is None or getattr(grad, "dtype", None) == jax.dtypes.float0:
            continue
        if not _checks.is_array(grad):
            if _checks.is_array(total):
                raise TypeError(
                    f"a gradient{at(path)} is {_checks.described(grad)}, expected an array or None."
                )
            continue
        if not _checks.is_array(total):
            raise ValueError(
                f"a gradient{at(path)} meets no sum in the window: its parameter was None or no "
                "array; call tx.init with the tree that is differentiated."
            )
        if jnp.shape(grad) != total.shape:
            raise ValueError(_shape_message(path, jnp.shape(grad), total.shape))
        _check_sum(path, total.dtype, accumulator_dtype)
        check_kept(path, "gradient", jnp.result_type(grad), total.dtype, accumulator_dtype)


def _check_sum(path: Any, dtype: Any, accumulator_dtype: Any) -> None:
    """Raise for a sum whose dtype this window would not have: a checkpoint was cast, say."""
    wanted = jnp.dtype(window_dtype(dtype, accumulator_dtype))
    if dtype != wanted:
        raise TypeError(
            f"the state's grad_sum{at(path)} is {dtype.name}, expected {wanted.name} with "
            f"accumulator_dtype={accumulator_dtype and jnp.dtype(accumulator_dtype).name}; restore "
            "a checkpoint in the dtypes it was saved in, give accumulate the accumulator_dtype of "
            "before, or type state = oa.convert_state(state, tx, params, cast=True)."
        )


def aligned(grads: optax.Updates, other: Any) -> list[Any]:
    """What `other` holds at each gradient, None ones included."""
    treedef = jax.tree.structure(grads, is_leaf=is_none)
    try:
        return treedef.flatten_up_to(other)
    except (ValueError, TypeError, KeyError) as error:
        got, expected = _checks.structures(grads, other)
        raise ValueError(
            f"the gradients' structure is {got}, expected that of the parameters, {expected}; "
            "differentiate the same tree that tx.init and tx.update get, or call tx.init again. "
            "(Of NNX give plain trees: nnx.as_pure(...) of gradients, parameters and state, or "
            "use oa.nnx.Optimizer.)"
        ) from error


def check_kept(path: Any, what: str, dtype: Any, total: Any, accumulator_dtype: Any) -> None:
    """Raise where a sum of dtype `total` would lose what `dtype` holds, unasked."""
    complex_lost = jnp.issubdtype(dtype, jnp.complexfloating) and not jnp.issubdtype(
        total, jnp.complexfloating
    )
    digits_lost = accumulator_dtype is None and (
        jnp.finfo(promoted(dtype, jnp.float32)).bits > jnp.finfo(total).bits
    )
    if complex_lost or digits_lost:
        remedy = f"type accumulator_dtype=jnp.{promoted(dtype, total).name}, or cast it"
        if complex_lost and what == "gradient":
            remedy = "take its real part, or give it a complex parameter"
        raise TypeError(
            f"a {what}{at(path)} is {jnp.dtype(dtype).name}, which a {jnp.dtype(total).name} "
            f"window cannot hold; {remedy}."
        )


def check_differentiable(what: str, tree: Any) -> None:
    """Raise where jax would not differentiate with respect to a leaf."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not _checks.is_array(leaf) or not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise TypeError(
                f"{what}{at(path)} is {_checks.described(leaf)}, expected floating or complex "
                "numbers, with respect to which jax differentiates; give other leaves in an "
                "argument of their own (of a Flax model: nnx.split(model, nnx.Param, ...))."
            )


def check_unreduced(grads: optax.Updates, axis_name: _axis.AxisName) -> None:
    """Raise where jax knows that a gradient is the same on all replicas: it was reduced already."""
    axes = _axis.checked(axis_name)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        if axes and _checks.is_array(grad) and not axes <= _axis.varying(grad):
            raise ValueError(
                f"the gradient{at(path)} does not vary along {axis_name!r}: it has been reduced "
                "already, as autodiff does for parameters that are the same on all replicas. "
                "Differentiate with respect to parameters that vary, jax.grad(loss)("
                f"jax.lax.pcast(params, {axis_name!r}, to='varying'), batch), or use "
                "oa.micro_step or oa.value_and_grad(axis_name=...), which do so themselves."
            )


def check_wide(loss: Any) -> None:
    """Raise for the loss of replicas that mix: its weight has to start the backward pass."""
    if loss.dtype.itemsize < 4:
        raise TypeError(
            f"the loss is {loss.dtype.name} and communicates between replicas of unequal weights, "
            "which only its backward pass can weigh, in float32; return loss.astype(jnp.float32)."
        )


def check_shared(params: Any, axis_name: _axis.AxisName) -> None:
    """Raise where jax knows that a parameter is a replica's own, its gradient being no one else's.

    Only `value_and_grad` leaves such a gradient as it is.
    """
    axes = _axis.checked(axis_name)
    for path, param in jax.tree_util.tree_leaves_with_path(params):
        if _checks.is_array(param) and axes & _axis.varying(param):
            raise ValueError(
                f"the parameter{at(path)} varies along {axis_name!r}, over which its gradients "
                "would be combined; pass it as it is on all replicas, in_specs=P(), without pcast. "
                "Where each replica has its own (shards), take oa.value_and_grad(axis_name=...) "
                "and an accumulate without axis_name."
            )


def check_own_loss(loss: Any, axis_name: _axis.AxisName | None) -> None:
    """Raise where jax knows that the loss is the same on all replicas: it was reduced inside."""
    axes = _axis.checked(axis_name)
    if axes and _checks.is_array(loss) and not axes <= _axis.varying(loss):
        raise ValueError(
            f"the loss does not vary along {axis_name!r}: it is reduced inside loss_fn, and its "
            "gradient would be reduced again; return this replica's own loss, without psum or "
            "pmean."
        )


def _shape_message(path: Any, got: tuple[int, ...], expected: tuple[int, ...]) -> str:
    message = f"a gradient{at(path)} has shape {got}, expected its parameter's, {expected}; "
    if got[1:] == expected and got:
        return message + (
            "these look like per-example gradients: aggregate them first, "
            "optax.chain(optax.contrib.differentially_private_aggregate(...), "
            "accumulate(inner, k))."
        )
    return message + "differentiate the same tree that tx.init got, or call tx.init again."


def at(path: Any) -> str:
    return f" at {jax.tree_util.keystr(path)}" if path else ""
