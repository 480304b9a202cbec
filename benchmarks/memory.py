"""Compiled memory of every method and engine, and what the device held where it tells.

A model that scans over its layers makes a whole second gradient in the backward pass, unless that
adds into the window's own buffers; unrolled layers do not. In P, the parameters' bytes; AdamW,
everything donated. The floor is parameters, AdamW's state and one window: 4 P. What a device held
is its peak while a method ran, over what was held before; known where that peak is a new one, so
the methods run from small to large.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from benchmarks import _measure, _peers

CASE = "memory"
EXAMPLES = 16  # of a micro-batch
FLOOR_IN_P = 4


class Size(NamedTuple):
    """A stack of layers and a cut."""

    layers: int
    side: int
    k: int
    unrolled: bool

    def fields(self) -> _measure.Row:
        kind = "unrolled" if self.unrolled else "scanned"
        given = {"k": self.k, "layers": self.layers, "side": self.side, "unrolled": self.unrolled}
        side = f"{self.side}x{self.side}"
        return given | {"setting": f"{self.layers} {kind} layers of {side}, adamw, k={self.k}"}

    def params(self) -> Any:
        """Shapes alone: nothing of the real size is made until a device tells what it held."""
        if self.unrolled:
            one = jax.ShapeDtypeStruct((self.side, self.side), jnp.float32)
            return [one] * self.layers
        return jax.ShapeDtypeStruct((self.layers, self.side, self.side), jnp.float32)

    def batch(self) -> Any:
        return jax.ShapeDtypeStruct((self.k * EXAMPLES, self.side), jnp.float32)

    def loss(self) -> Callable[..., jax.Array]:
        return _unrolled if self.unrolled else _scanned

    def methods(self) -> dict[str, _peers.Method]:
        inner = optax.adamw(**_measure.ADAMW)
        return _peers.methods(self.loss(), self.k, EXAMPLES, inner)


def _layer(x: jax.Array, layer: jax.Array) -> jax.Array:
    return jnp.tanh(x @ layer)


def _scanned(params: jax.Array, x: jax.Array) -> jax.Array:
    x, _ = lax.scan(lambda x, layer: (_layer(x, layer), None), x, params)
    return jnp.mean(jnp.square(x))


def _unrolled(params: list[jax.Array], x: jax.Array) -> jax.Array:
    for layer in params:
        x = _layer(x, layer)
    return jnp.mean(jnp.square(x))


def sizes(layers: int, side: int, ks: tuple[int, ...]) -> list[Size]:
    return [Size(layers, side, k, unrolled) for unrolled in (False, True) for k in ks]


SIZES = {
    "tiny": [Size(2, 8, 2, False)],
    "quick": [Size(8, 1024, 4, False), Size(8, 1024, 16, False), Size(8, 1024, 4, True)],
    "full": sizes(8, 1024, (2, 4, 16, 64)),
    "accelerator": sizes(8, 4096, (2, 4, 16, 64)),
}


def read(method: _peers.Method, params: Any, batch: Any) -> _peers.Compiled:
    lowered = _peers.lowered(method, params, batch)
    return _peers.Compiled(_measure.compiled_to_be_read(lowered), method)


def check(size: Size) -> None:
    """The methods end in the same parameters, at a side that takes no time."""
    small = size._replace(side=min(size.side, 16))
    keys = iter(jax.random.split(jax.random.key(0), size.layers + 1))
    normal = lambda x: jax.random.normal(next(keys), x.shape) * small.side**-0.5  # noqa: E731
    params, batch = jax.tree.map(normal, small.params()), normal(small.batch())
    after = {}
    for name, method in small.methods().items():
        compiled = read(method, params, batch)
        start = _peers.started(method, params)
        _, after[name], _ = compiled.update(*start, _peers.parts_of(batch, method.calls))
    _measure.check_equal(after, _peers.SCAN, params, 1e-4)


def measure(size: Size) -> list[_measure.Row]:
    """A row a method, in P; none on a backend that does not analyse memory."""
    check(size)
    params, rows, programs = size.params(), [], {}
    for name, method in size.methods().items():
        programs[name] = read(method, params, size.batch())
        used = _measure.memory_in_p(programs[name].program, params)
        total = used["total_in_P"]
        row = _measure.row(CASE, name, total, "P", total and total / FLOOR_IN_P)
        rows.append(row | used | size.fields())
    held = held_in_p(size, programs, jax.devices()[0])
    rows = [row | {"held_in_P": held.get(row["method"])} for row in rows]
    left_out = _measure.missing_row(CASE, _peers.APPLY_EVERY, _peers.OTHER_RESULT)
    return [*rows, left_out | size.fields()]


def held_in_p(size: Size, programs: dict[str, _peers.Compiled], device: Any) -> dict[str, float]:
    """By method: the device's peak while it ran; nothing where a device does not tell."""
    if not (device.memory_stats() or {}).get("peak_bytes_in_use"):
        return {}

    def total(name: str) -> int:
        known = _measure.memory(programs[name].program)
        return known.total if known else 0

    found = {}
    for name in sorted(programs, key=total):
        before = device.memory_stats()
        _run_once(size, programs[name])
        peak = device.memory_stats()["peak_bytes_in_use"]
        if peak > before["peak_bytes_in_use"]:
            extra = peak - before["bytes_in_use"]
            found[name] = extra / _measure.tree_bytes(size.params())
    return found


def _run_once(size: Size, compiled: _peers.Compiled) -> None:
    zeros = lambda x: jnp.zeros(x.shape, x.dtype)  # noqa: E731
    params = jax.tree.map(zeros, size.params())
    state = jax.jit(compiled.method.tx.init)(params)
    part = zeros(size.batch())[: size.k * EXAMPLES // compiled.method.calls]
    jax.block_until_ready(compiled.update(params, state, [part] * compiled.method.calls))


def rows(scale: str) -> list[_measure.Row]:
    """The case, by scale."""
    if scale == "full" and _measure.on_accelerator():
        scale = "accelerator"
    return [row for size in SIZES[scale] for row in measure(size)]
