"""What would help where even the smallest micro-batch does not fit, each estimated."""

from typing import Any, NamedTuple

import optax

from optax_accum import _held, _units
from optax_accum._compiled_memory import Compiled

SMALLER_OPTIMIZERS = (
    ("optax.lion(1e-4)", optax.lion(1e-4)),
    ("optax.adafactor(1e-3)", optax.adafactor(1e-3)),
    ("optax.sgd(1e-2)", optax.sgd(1e-2)),
)
MOST_DEVICES = 4096
SOME_DEVICES = 8  # of the estimate where no number is enough
LEAST = 0.01  # of the total: what saves less is not worth a line


class Remedy(NamedTuple):
    """One thing that would help, by itself."""

    what: str
    how: str  # what to type, or where from the estimate is
    saves: int  # bytes on a device, estimated
    total: int  # what would then be needed
    fits: bool  # by itself


def remedies(
    arguments: tuple[Any, ...],
    memory: Compiled,
    budget: int,
    activations: int | None,
    per_call: bool,
) -> list[Remedy]:
    """What would help, the most first.

    Args:
      arguments: shapes of parameters, optimizer state and batch, in this order.
      memory: of the smallest size.
      budget: bytes.
      activations: what one more example takes times the smallest size; None if unknown.
      per_call: whether a call takes a whole window, so that the window is among the temporaries.
    """
    found = [_donation(memory)]
    if activations:
        how = "jax.checkpoint around each layer; at best, it keeps the layers' inputs"
        found.append(("rematerialisation", how, min(activations, memory.temporaries)))
    if len(arguments) > 1:
        params, state = arguments[:2]
        found += _of_state(params, state, memory, per_call)
        found.append(_sharding(params, state, memory, budget))
    return sorted(
        (
            Remedy(what, how, saves, memory.total - saves, memory.total - saves <= budget)
            for what, how, saves in found
            if saves > 0
        ),
        key=lambda remedy: -remedy.saves,
    )


def _donation(memory: Compiled) -> tuple[str, str, int]:
    saves = min(memory.outputs, memory.arguments) if memory.aliased == 0 else 0
    return "donation", "jax.jit(update, donate_argnums=(0, 1))", saves


def _of_state(
    params: Any, state: Any, memory: Compiled, per_call: bool
) -> list[tuple[str, str, int]]:
    weights, held = _held.on_a_device(params), _held.split_state(state)
    window = held.window or (weights if per_call else 0)
    micro_gradient = min(weights, memory.temporaries - (window if per_call else 0))
    refs = "engine='refs': no micro-gradient beside the window, if it is not in use yet"
    found = [
        ("refs", refs, micro_gradient),
        ("a bfloat16 window", "accumulator_dtype=jnp.bfloat16, if it is float32", window // 2),
    ]
    shard = weights / max(_held.in_all(params), 1)
    for name, tx in SMALLER_OPTIMIZERS:
        counted = round(_held.in_all(_held.counted_state(tx, params)) * shard)
        now, then = _units.show(held.optimizer), _units.show(counted)
        how = f"{name}: a state of {then}, not {now} (counted)"
        if held.optimizer - counted >= LEAST * memory.total:
            found.append(("a smaller optimizer", how, held.optimizer - counted))
    return found


def _sharding(params: Any, state: Any, memory: Compiled, budget: int) -> tuple[str, str, int]:
    """Parameters and state in shards over the smallest power of two of devices that is enough."""
    whole, devices = _held.on_a_device(params) + _held.on_a_device(state), 2
    while memory.total - whole + whole // devices > budget and devices < MOST_DEVICES:
        devices *= 2
    devices = devices if devices < MOST_DEVICES else SOME_DEVICES
    how = f"parameters and optimizer state in shards over {devices} times the devices (FSDP)"
    return "sharding", how, whole - whole // devices
