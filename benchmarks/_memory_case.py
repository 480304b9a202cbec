"""Compiled memory of a model that scans over its layers: compiled only, never run.

The backward pass of such a model makes a whole second gradient, unless it adds into the window's
own buffers. 8 layers of 1024x1024 in float32, AdamW, k=4, everything donated.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

import optax_accum as oa
from benchmarks import _measure

LAYERS, SIDE, K, EXAMPLES = 8, 1024, 4, 16  # examples of a micro-batch
INNER = optax.adamw(1e-3)
Update = Callable[..., Any]  # (params, state, batch) -> (loss, params, state)


def loss(params: jax.Array, x: jax.Array) -> jax.Array:
    x, _ = lax.scan(lambda x, layer: (jnp.tanh(x @ layer), None), x, params)
    return jnp.mean(jnp.square(x))


def whole(grad_fn: Callable[..., Any]) -> Update:
    """An update in one call, from the whole batch."""
    return applied(INNER, grad_fn)


def applied(tx: Any, grad_fn: Callable[..., Any]) -> Update:
    def update(params: Any, state: Any, batch: Any) -> Any:
        value, grads = grad_fn(params, batch)
        updates, state = tx.update(grads, state, params)
        return value, optax.apply_updates(params, updates), state

    return update


def methods() -> dict[str, tuple[Update, Any, int]]:
    """(update, its optimizer, examples of a call)"""
    mean = optax.microbatching.AccumulationType.MEAN
    grad = jax.value_and_grad(loss)
    micro_batched = optax.microbatching.microbatch(grad, 1, EXAMPLES, mean)
    multi_steps = optax.MultiSteps(INNER, K).gradient_transformation()
    window = oa.accumulate(INNER, K)
    found = {
        "oa refs": (whole(oa.value_and_grad(loss, K, engine="refs")), INNER, K * EXAMPLES),
        "oa carry": (whole(oa.value_and_grad(loss, K, engine="carry")), INNER, K * EXAMPLES),
        "optax.microbatch": (whole(micro_batched), INNER, K * EXAMPLES),
        "optax.MultiSteps": (applied(multi_steps, grad), multi_steps, EXAMPLES),
    }
    if hasattr(oa, "micro_step"):
        found["oa.micro_step"] = (oa.micro_step(loss, window), window, EXAMPLES)
    return found


def rows() -> list[_measure.Row]:
    """A row a method: its total in P; none on a backend that does not analyse memory."""
    params = jax.ShapeDtypeStruct((LAYERS, SIDE, SIDE), jnp.float32)
    case = f"memory, {LAYERS} scanned layers of {SIDE}x{SIDE}, AdamW, k={K}"
    found = []
    for name, (update, tx, examples) in methods().items():
        state = jax.eval_shape(tx.init, params)
        batch = jax.ShapeDtypeStruct((examples, SIDE), jnp.float32)
        compiled = jax.jit(update, donate_argnums=(0, 1)).lower(params, state, batch).compile()
        memory = _measure.memory_in_p(compiled, params)
        if memory["total_in_P"] is not None:
            total = memory["total_in_P"]
            row = {"value": total, "unit": "P", "ratio_to_floor": total / 4}
            found.append({"case": case, "method": name, **row, **memory})
    return found
