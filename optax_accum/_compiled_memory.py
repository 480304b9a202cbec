"""What a compiled update needs on a device, by the compiler's own account."""

import functools
import inspect
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_accum import _checks

RUNS = 3  # timed, after one that is not


class Compiled(NamedTuple):
    """Bytes on a device of one compiled call."""

    arguments: int
    outputs: int
    aliased: int  # outputs that lie where donated arguments lay
    temporaries: int

    @property
    def total(self) -> int:
        """What the call needs at once."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


def compiled(update: Any, arguments: tuple[Any, ...], named: str) -> Any:
    """The executable for arguments of these shapes; None where the compiler has no room for it."""
    if not callable(getattr(update, "lower", None)):
        raise TypeError(
            f"make_update returned {_checks.described(update)}, expected a jitted function, so "
            "that it is compiled as you run it; type jax.jit(update, donate_argnums=(0, 1))."
        )
    _check_number(update, arguments)
    try:
        return update.lower(*arguments).compile()
    except jax.errors.JaxRuntimeError as error:  # a TPU's compiler refuses what cannot fit
        if "RESOURCE_EXHAUSTED" in str(error):
            return None
        raise
    except Exception as error:
        _check_shapes(arguments, error)
        error.add_note(
            f"This came up while the update was compiled for {named}. Its arguments are what "
            f"shapes returned, {_described(arguments)}; expected params, state, batch."
        )
        raise


def _check_number(update: Any, arguments: tuple[Any, ...]) -> None:
    """Whether the update takes so many."""
    try:
        signature = inspect.signature(update)
    except (TypeError, ValueError):  # of what is not written in Python
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise TypeError(
            f"shapes returned {len(arguments)} arguments, {_described(arguments)}, expected those "
            f"of the update, {signature} ({error}); type return params, state, batch."
        ) from None


def _check_shapes(arguments: tuple[Any, ...], error: Exception) -> None:
    """Whether an argument that cannot be used is a shape without a dtype."""
    for i, given in enumerate(arguments):
        if type(given) in (tuple, list) and given and all(map(_is_size, given)):
            raise TypeError(
                f"shapes returned {given} as argument {i}, expected arrays by shape and dtype; "
                f"type jax.ShapeDtypeStruct({tuple(given)}, jnp.float32)."
            ) from error


def _is_size(given: Any) -> bool:
    return isinstance(given, int) and not isinstance(given, bool)


def _described(arguments: tuple[Any, ...]) -> str:
    return ", ".join(map(_checks.described, arguments))


def memory_of(executable: Any) -> Compiled:
    """Its bytes, or an error where the backend does not tell."""
    found = executable.memory_analysis()
    if found is None:
        raise ValueError(
            f"the compiler for {jax.default_backend()} does not tell what a program needs "
            "(memory_analysis() is None), expected one that does, such as CPU, GPU or TPU; "
            "estimate by oa.planning.memory(params, ...) instead."
        )
    return Compiled(
        found.argument_size_in_bytes,
        found.output_size_in_bytes,
        found.alias_size_in_bytes,
        found.temp_size_in_bytes,
    )


def device_of(arguments: tuple[Any, ...]) -> Any:
    """A device of this process that the arguments lie on, or the one that jax would take."""
    for leaf in jax.tree.leaves(arguments):
        sharding = getattr(leaf, "sharding", None)
        if sharding is not None and not isinstance(
            getattr(sharding, "mesh", None), jax.sharding.AbstractMesh
        ):
            return min(sharding.addressable_devices, key=lambda device: device.id)
    return next(iter(jnp.zeros([]).devices()))


def available(device: Any, share: float) -> int:
    """A share of what the device lets jax use."""
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        raise ValueError(
            f"budget is missing and {device.platform} reports no limit of its memory, expected the "
            "bytes of the device to plan for; type budget='16GiB'."
        )
    return int(stats["bytes_limit"] * share)


def seconds(executable: Any, arguments: tuple[Any, ...]) -> float:
    """The median time of a call; parameters and state are zeros, what follows is ones.

    Zeros would be batches of weight 0 to a loss with a mask, which are not computed at all.
    """
    taken = []
    for _ in range(RUNS + 1):
        filled = [
            *(jax.tree.map(functools.partial(_filled, 0), held) for held in arguments[:2]),
            *(jax.tree.map(functools.partial(_filled, 1), batch) for batch in arguments[2:]),
        ]
        jax.block_until_ready(filled)
        start = time.perf_counter()
        jax.block_until_ready(executable(*filled))
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def _filled(value: int, shape: Any) -> Any:
    sharding = getattr(shape, "sharding", None)
    if not _checks.is_key(shape):
        return jnp.full(shape.shape, value, shape.dtype, device=sharding)
    data, impls = jax.eval_shape(jax.random.key_data, shape), []
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), shape)
    made = jax.random.wrap_key_data(jnp.zeros(data.shape, data.dtype), impl=impls[0])
    return made if sharding is None else jax.device_put(made, sharding)
