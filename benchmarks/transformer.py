"""A transformer's time for an update, over k at a fixed global batch.

A causal transformer and AdamW, donated parameters and state. Every method takes the same global
batch: in one call, or in k calls of a micro-batch each; each is compared with the hand-written
scan after an update, before any time is taken. The floor is the fastest peer that accumulates over
the same micro-batches. FLOP/s are the model's, counted from its shape, not what a method ran.
"""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from benchmarks import _measure, _peers, _transformer

Tree = Any
CASE = "transformer"
FLOORS = (_peers.SCAN, _peers.MICROBATCH, _peers.MULTI_STEPS, _peers.TORCH)


class Size(NamedTuple):
    """A model, a global batch and the ways to cut it."""

    shape: _transformer.Shape
    sequences: int  # of a global batch
    ks: tuple[int, ...]
    seconds: float  # of timing, each k

    def fields(self, k: int) -> _measure.Row:
        shape, m = self.shape, self.sequences // k
        layers = "unrolled" if shape.unrolled else "scanned"
        dtype = "bfloat16" if shape.bfloat16 else "float32"
        model = f"{shape.layers} {layers} layers of width {shape.width}, {dtype}"
        batch = f"{self.sequences} sequences of {shape.length} tokens"
        given = {"k": k, "micro_batch": m, "sequences": self.sequences, "length": shape.length}
        return given | {
            "layers": shape.layers,
            "width": shape.width,
            "setting": f"{model}, {batch}, k={k}, micro-batch {m}",
        }


def model(layers: int, width: int, length: int, bfloat16: bool = False) -> _transformer.Shape:
    return _transformer.Shape(layers, width, 4, length, 256, False, bfloat16)


SIZES = {
    "tiny": [Size(model(1, 8, 4), 4, (2,), 0.0)],
    "quick": [Size(model(2, 128, 32), 32, (4, 32), 5.0)],
    "full": [Size(model(2, 128, 32), 64, (1, 2, 8, 64), 30.0)],
    "accelerator": [
        Size(model(12, 1024, 512, True), 128, (2, 8, 32), 30.0),
        Size(model(12, 256, 128), 128, (2, 8, 32), 30.0),
    ],
}


class Case(NamedTuple):
    """What an update starts from."""

    size: Size
    k: int
    params: Tree
    tokens: jax.Array

    def methods(self) -> dict[str, _peers.Method]:
        loss = functools.partial(_transformer.loss, self.size.shape)
        inner = optax.adamw(**_measure.ADAMW)
        found = _peers.methods(loss, self.k, self.size.sequences // self.k, inner)
        del found[_peers.UPDATE]  # the case optimizer has it
        return found


def make(size: Size, k: int) -> Case:
    shape = size.shape
    sizes = (size.sequences, shape.length + 1)
    tokens = jax.random.randint(jax.random.key(1), sizes, 0, shape.vocabulary)
    return Case(size, k, _transformer.init(shape, jax.random.key(0)), tokens)


class Jax:
    """A compiled method that goes on from update to update."""

    def __init__(self, compiled: _peers.Compiled, case: Case):
        self.compiled = compiled
        self.parts = _peers.parts_of(case.tokens, compiled.method.calls)
        self.carry = _peers.started(compiled.method, case.params)

    def update(self) -> tuple[jax.Array, Tree]:
        """(loss, new parameters)"""
        loss, *self.carry = self.compiled.update(*self.carry, self.parts)
        return loss, self.carry[0]

    def after(self) -> Tree:
        return jax.device_get(self.carry[0])


def runners(case: Case) -> dict[str, Any]:
    """Each method, ready for its first update."""
    found: dict[str, Any] = {
        name: Jax(_peers.compiled(method, case.params, case.tokens), case)
        for name, method in case.methods().items()
    }
    if not _peers.torch_missing() and not _measure.on_accelerator():
        from benchmarks import _torch

        found[_peers.TORCH] = Torch(_torch, case)
    return found


class Torch:
    """The same of PyTorch."""

    def __init__(self, module: Any, case: Case):
        self.parts = module.tensors(_peers.parts_of(case.tokens, case.k))
        self.trainer = module.Trainer(case.size.shape, case.params)

    def update(self) -> float:
        return self.trainer.update(self.parts)

    def after(self) -> Tree:
        return self.trainer.tree()


def check(case: Case, found: dict[str, Any]) -> None:
    """The first update of each method ends in the same loss and parameters."""
    after = {}
    for name, runner in found.items():
        loss = jax.tree.leaves(runner.update())[0]
        after[name] = {"loss": np.float32(loss)} | runner.after()
    relative = 3e-2 if case.size.shape.bfloat16 else 1e-4
    _measure.check_equal(after, _peers.SCAN, {"loss": np.float32(0)} | case.params, relative)


def measure(case: Case) -> list[_measure.Row]:
    """A row a method: seconds of an update."""
    found = runners(case)
    check(case, found)

    def call(runner: Any) -> _measure.Sample:
        return _measure.clocked(runner.update)[0]

    calls = {name: functools.partial(call, runner) for name, runner in found.items()}
    times = _measure.timed(calls, case.size.seconds)
    floor = _measure.fastest(times, [name for name in FLOORS if name in times])
    flops = model_flops(case.size, case.params)
    rows = []
    for name, runner in found.items():
        row = _measure.paired_row(CASE, name, times, floor, "s/update") | case.size.fields(case.k)
        row["model_flops_per_s"] = flops / row["value"]
        program = getattr(runner, "compiled", None)
        rows.append(row | (_measure.memory_in_p(program.program, case.params) if program else {}))
    return rows + left_out(case)


def left_out(case: Case) -> list[_measure.Row]:
    why = {_peers.APPLY_EVERY: _peers.OTHER_RESULT, **_peers.missing()}
    if _measure.on_accelerator():
        why[_peers.TORCH] = "compared on CPU alone"
    fields = case.size.fields(case.k)
    return [_measure.missing_row(CASE, name, text) | fields for name, text in why.items()]


def model_flops(size: Size, params: Tree) -> float:
    """Of an update: 6 a parameter and token, and attention's 12 x layers x width x length a token.

    As in PaLM (arXiv 2204.02311, appendix B), without the embeddings, which multiply nothing.
    """
    shape = size.shape
    counted = {name: leaf for name, leaf in params.items() if name not in ("tokens", "positions")}
    weights = sum(leaf.size for leaf in jax.tree.leaves(counted))
    tokens = size.sequences * shape.length
    return tokens * (6 * weights + 12 * shape.layers * shape.width * shape.length)


def rows(scale: str) -> list[_measure.Row]:
    """The case, by scale."""
    if scale == "full" and _measure.on_accelerator():
        scale = "accelerator"
    return [row for size in SIZES[scale] for k in size.ks for row in measure(make(size, k))]
