"""How one micro-gradient gets into the window: after the backward pass, or inside it.

    carry: window = add(window, gradient(loss, params) * seed)
    refs:  the backward pass adds each layer's cotangent into the window's buffer, in place

With refs no micro-gradient ever exists. All young jax API of this package stands here.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum import _axis, _checks, _fits

ENGINES = ("auto", "carry", "refs")
TOGETHER = (
    "the loss communicates between devices (replicas, or those of a tensor axis), so a replica "
    "whose micro-batch has no weight computes it with the others, and its gradient is selected out "
    "afterwards; type engine='carry'"
)
VMAPPED = "jax.vmap cannot map references that a loop writes; type engine='carry'"
Loss = Callable[..., tuple[jax.Array, Any]]  # differentiated arguments -> (loss, aux)


def micro_gradient(loss: Loss, primals: tuple[Any, ...], seed: Any) -> tuple[Any, Any, Any]:
    """(loss, aux, gradients), the backward pass started from `seed`."""
    value, backward, aux = jax.vjp(loss, *primals, has_aux=True)
    return value, aux, backward(_start(seed, value))


def into_refs(
    loss: Loss, primals: tuple[Any, ...], seed: Any, sums: tuple[Any, ...]
) -> tuple[Any, Any, Any]:
    """(loss, aux, sums with the micro-gradient added), the sums written in place."""
    refs = jax.tree.map(jax.new_ref, sums)
    value, backward, aux = jax.vjp(loss, *primals, has_aux=True)
    backward: Any  # jax annotates a plain function, which has no with_refs
    backward.with_refs(*refs)(_start(seed, value))
    return value, aux, jax.tree.map(jax.freeze, refs)


def _start(seed: Any, value: jax.Array) -> jax.Array:
    return _axis.as_varying(jnp.asarray(seed).astype(value.dtype), _axis.varying(value))


def obstacle(
    trial: Loss,
    batch: Any,
    primals: tuple[Any, ...],
    sums: Any,
    nonfinite: str,
    narrow_seed: bool,
) -> str | None:
    """Why refs cannot be used here, or None where they can. `trial` is the loss of (batch, *p)."""
    if nonfinite == "skip_micro_step":
        return (
            "nonfinite='skip_micro_step' looks at each micro-gradient, and with refs there is "
            "none; type nonfinite='skip_window', or engine='carry'"
        )
    if sums is None:
        return "a static k=1 holds no window to add into; type engine='auto'"
    for (path, total), primal in zip(
        jax.tree_util.tree_leaves_with_path(sums), jax.tree.leaves(primals), strict=True
    ):
        if total.dtype != jnp.result_type(primal):
            return (
                f"the window{_fits.at(path)} is {total.dtype.name} and its parameter "
                f"{jnp.result_type(primal).name}, and refs add in the parameter's dtype; keep "
                "float32 parameters and cast them inside the layers, or type engine='carry'"
            )
    if any(total.dtype.itemsize < 4 for total in jax.tree.leaves(sums)):
        return (
            "a window narrower than float32 is rounded stochastically after each addition, and "
            "refs add inside the backward pass; type accumulator_dtype=None, or engine='carry'"
        )
    if narrow_seed:
        return (
            "the loss is narrower than float32, so its weight cannot start the backward pass; "
            "return loss.astype(jnp.float32), or type engine='carry'"
        )
    try:
        jax.eval_shape(
            lambda b, p, s: into_refs(lambda *p: trial(b, *p), p, 1.0, s), batch, primals, sums
        )
    except Exception as error:  # whatever this jax cannot do with refs in this loss
        return (
            f"jax {jax.__version__} cannot: {type(error).__name__}: {str(error)[:300]}; type "
            "engine='carry'"
        )
    return None


def chosen(engine: str, arguments: Any, why_not: Callable[[], str | None]) -> str:
    """The engine to use; an error where refs are asked for and cannot be used.

    Where an argument is being mapped or differentiated from outside, carry is right for every loss.
    """
    leaves = jax.tree.leaves(arguments)
    if engine == "carry" or (engine == "auto" and any(map(_checks.is_transformed, leaves))):
        return "carry"
    mapped = any(map(_checks.is_vmapped, leaves))
    reason = VMAPPED if mapped else why_not()
    if reason is None:
        return "refs"
    if engine == "refs":
        raise ValueError(f"engine='refs' cannot be used here: {reason}.")
    return "carry"
