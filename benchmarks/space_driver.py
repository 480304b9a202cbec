"""What a whole batch costs, cut into micro-batches inside one call: time, compiling, memory.

python -m benchmarks.space_driver

A causal transformer and AdamW, one jitted update with donated parameters and state. All methods
cut the batch in the same way; each is compared with the hand-written scan and with one big batch,
after an update, before any time is taken. P is the parameters' bytes.

time: an update, in one process, in turn; ratios are medians of each round's pair, with the better
of `optax.microbatch` and the hand-written scan as the floor.
compile: tracing and lowering, then compiling, nothing cached; the floor is the hand-written scan.
memory: compiled only, never run; the floor is parameters, Adam's state and one window, 4 P.
"""

import argparse
import functools
import gc
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

import optax_accum as oa
from benchmarks import _measure, _memory_case, _transformer

Tree = Any
Loss = Callable[[Tree, jax.Array], jax.Array]
GradFn = Callable[[Tree, jax.Array], tuple[jax.Array, Tree]]

PARTS = ("time", "compile", "memory")
LOWER = ("value", "ratio_to_floor")  # what is told of tracing and lowering alone
BIG, SCAN, MICROBATCH = "big batch", "hand-written scan", "optax.microbatch"
# With this eps an update is nearly proportional to the gradient: a wrong scale shows.
OPTIMIZER = optax.adamw(0.1, eps=1.0)


def hand_written_scan(loss: Loss, k: int) -> GradFn:
    """The best a good engineer writes: a strided cut, float32 sums, one division at the end."""

    def grad_fn(params: Tree, tokens: jax.Array) -> tuple[jax.Array, Tree]:
        micro_batches = tokens.reshape(-1, k, tokens.shape[1]).swapaxes(0, 1)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)

        def micro_step(sums: Tree, micro_batch: jax.Array) -> tuple[Tree, None]:
            return jax.tree.map(jnp.add, sums, jax.value_and_grad(loss)(params, micro_batch)), None

        sums, _ = lax.scan(micro_step, (jnp.zeros([]), zeros), micro_batches)
        return jax.tree.map(lambda x: x / k, sums)

    return grad_fn


def methods(loss: Loss, k: int, m: int) -> dict[str, GradFn]:
    """Each way to the loss and gradient of k micro-batches of m sequences."""
    mean = optax.microbatching.AccumulationType.MEAN
    ours = {
        f"oa {engine}": oa.value_and_grad(loss, k, engine=engine)
        for engine in ("carry", "refs", "auto")
    }
    return {
        BIG: jax.value_and_grad(loss),
        SCAN: hand_written_scan(loss, k),
        MICROBATCH: optax.microbatching.microbatch(jax.value_and_grad(loss), 1, m, mean),
        **ours,
    }


def jitted(grad_fn: GradFn) -> Any:
    """One update: gradient, AdamW, apply; parameters and state donated."""

    def update(params: Tree, state: Any, tokens: jax.Array) -> tuple[jax.Array, Tree, Any]:
        loss, grads = grad_fn(params, tokens)
        updates, state = OPTIMIZER.update(grads, state, params)
        return loss, optax.apply_updates(params, updates), state

    return jax.jit(update, donate_argnums=(0, 1))


class Case(NamedTuple):
    """A model and a split, with what an update starts from."""

    shape: _transformer.Shape
    k: int
    m: int
    params: Tree
    state: Any
    tokens: jax.Array

    def title(self, what: str) -> str:
        layers = "unrolled" if self.shape.unrolled else "scanned"
        dtype = "bfloat16" if self.shape.bfloat16 else "float32"
        return (
            f"{what}, {self.shape.layers} {layers} layers of width {self.shape.width}, {dtype}, "
            f"k={self.k}, micro-batch {self.m} x {self.shape.length} tokens"
        )

    def methods(self) -> dict[str, GradFn]:
        return methods(functools.partial(_transformer.loss, self.shape), self.k, self.m)


def make_case(shape: _transformer.Shape, k: int, m: int) -> Case:
    params = _transformer.init(shape, jax.random.key(0))
    sizes = (k * m, shape.length + 1)
    tokens = jax.random.randint(jax.random.key(1), sizes, 0, shape.vocabulary)
    return Case(shape, k, m, params, OPTIMIZER.init(params), tokens)


# Equal first.


def check_equal(case: Case, after: dict[str, tuple[jax.Array, Tree]]) -> None:
    """(loss, parameters) of each method's first update, within rounding of the two references."""
    relative = 3e-2 if case.shape.bfloat16 else 1e-4
    epsilon = float(jnp.finfo(jnp.float32).eps)

    def bound(new: jax.Array, old: jax.Array) -> float:
        moved, size = jnp.max(jnp.abs(new - old)), jnp.max(jnp.abs(new))
        return float(relative * moved + 4 * epsilon * size)

    for reference in (SCAN, BIG):
        loss, params = after[reference]
        bounds = [bound(loss, jnp.zeros([]))]
        bounds += map(bound, jax.tree.leaves(params), jax.tree.leaves(case.params))
        _measure.assert_equal(after, reference, bounds)


# Time.


def time_rows(case: Case, budget: float) -> list[_measure.Row]:
    """Seconds of an update, for about `budget` seconds in all."""
    compiled, carries, after = {}, {}, {}
    for name, grad_fn in case.methods().items():
        compiled[name] = jitted(grad_fn).lower(case.params, case.state, case.tokens).compile()
        carry = jax.tree.map(jnp.copy, (case.params, case.state))
        loss, *carries[name] = compiled[name](*carry, case.tokens)
        after[name] = (loss, jax.tree.map(jnp.copy, carries[name][0]))
    check_equal(case, after)
    times = timed(case, compiled, carries, budget)
    floor = _measure.better(times, SCAN, MICROBATCH)
    return [
        _measure.paired_row(case.title("time"), name, times, floor, "s/update")
        | _measure.memory_in_p(compiled[name], case.params)
        for name in times
    ]


def timed(
    case: Case, compiled: dict[str, Any], carries: dict[str, Any], budget: float
) -> _measure.Times:
    """As many rounds as fit the budget, from 5 to 500, after two that warm up."""

    def call(name: str) -> float:
        seconds, (_, *carries[name]) = _measure.seconds(
            lambda: compiled[name](*carries[name], case.tokens)
        )
        return seconds

    calls = {name: functools.partial(call, name) for name in compiled}
    warm = _measure.interleaved(calls, 2)
    rounds = int(budget / sum(times[-1] for times in warm.values()))
    return _measure.interleaved(calls, min(max(rounds, 5), 500))


# Compile.


def compile_rows(case: Case, repeats: int) -> list[_measure.Row]:
    """Seconds of `lower` and of `compile`, jax's caches cleared before each."""
    found: dict[str, list[tuple[float, float]]] = {}
    arguments = jax.eval_shape(lambda *args: args, case.params, case.state, case.tokens)

    def call(name: str) -> float:
        jax.clear_caches()
        gc.collect()
        lower, lowered = _measure.seconds(lambda: jitted(case.methods()[name]).lower(*arguments))
        compile_, _ = _measure.seconds(lowered.compile)
        found.setdefault(name, []).append((lower, compile_))
        return lower + compile_

    calls = {name: functools.partial(call, name) for name in case.methods()}
    _measure.interleaved({SCAN: calls[SCAN]}, 1)  # imports, first use
    found.clear()
    times = _measure.interleaved(calls, repeats)
    lower = {name: [pair[0] for pair in pairs] for name, pairs in found.items()}
    title = case.title("compile")
    return [
        _measure.paired_row(title, name, times, SCAN, "s")
        | {f"lower_{key}": _measure.paired_row("", name, lower, SCAN, "")[key] for key in LOWER}
        for name in times
    ]


# The command.


def line(row: _measure.Row) -> str:
    """A row for people."""
    if row["unit"] == "P":
        return f"{row['method']:24} {row['value']:8.2f} P, {row['temporaries_in_P']:.2f} temporary"
    low, high = row["ratio_spread"]
    text = (
        f"{row['method']:24} {row['value'] * 1e3:8.1f} ms"
        f"  {row['ratio_to_floor']:6.3f} [{low:.3f} {high:.3f}] of {row['floor']}"
    )
    if "lower_value" in row:
        ratio = row["lower_ratio_to_floor"]
        return f"{text}, of which {row['lower_value'] * 1e3:.1f} ms tracing ({ratio:.2f})"
    if row["total_in_P"] is None:
        return text
    return f"{text}  {row['total_in_P']:.2f} P, {row['temporaries_in_P']:.2f} temporary"


def options_of(argv: list[str] | None) -> argparse.Namespace:
    parser = _measure.parser("space_driver", __doc__)
    parser.add_argument("--k", type=int, nargs="+", default=[2, 8, 64])
    parser.add_argument("--micro-batch", type=int, nargs="+", default=[1, 8], help="sequences")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=32, help="tokens of a sequence")
    parser.add_argument("--unrolled", action="store_true", help="layers in a list, not scanned")
    parser.add_argument("--bfloat16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--seconds", type=float, default=30.0, help="of timing, a case")
    parser.add_argument("--repeats", type=int, default=5, help="of compiling")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--quick", action="store_true", help="a small size, under a minute")
    options = parser.parse_args(argv)
    if options.quick:
        options.layers, options.width, options.length = 2, 32, 8
        options.k, options.micro_batch = [2], [1]
        options.seconds, options.repeats = 0.5, 1
    return options


def main(argv: list[str] | None = None) -> int:
    options = options_of(argv)
    sizes = (options.layers, options.width, 4, options.length, 256)
    shape = _transformer.Shape(*sizes, options.unrolled, options.bfloat16)
    rows: list[_measure.Row] = []
    if "time" in options.parts:
        for m in options.micro_batch:
            for k in options.k:
                rows += time_rows(make_case(shape, k, m), options.seconds)
    if "compile" in options.parts:
        for k in options.k:
            rows += compile_rows(make_case(shape, k, options.micro_batch[0]), options.repeats)
    if "memory" in options.parts:
        rows += _memory_case.rows()
    _measure.show(rows, options.json, line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
