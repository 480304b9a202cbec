"""What accumulating costs beside the optimizer: the gradients are given, so nothing hides it.

python -m benchmarks.optimizer_bound

Floor: k in-place additions and one AdamW update with `apply_updates`. P is the parameters' bytes.
All methods run in one
process, interleaved, on the same gradients; their results are compared before any time is taken.
"""

import functools
import statistics
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optax_accum as oa
from benchmarks import _measure

Tree = Any
Window = Callable[[Tree, Any, list[Tree]], tuple[Tree, Any]]  # k micro-steps


def inner() -> optax.GradientTransformation:
    return optax.adamw(1e-3, eps=1e-3)  # this eps, so that rounding is not amplified


def floor(params: Tree, k: int) -> tuple[Window, Any, list[Any]]:
    """k in-place additions (the first starts from nothing), then one update and apply."""
    optimizer = inner()
    add = jax.jit(lambda total, grad: jax.tree.map(jnp.add, total, grad), donate_argnums=0)
    start = jax.jit(
        lambda total, grad: jax.tree.map(lambda t, g: (t - t) + g, total, grad), donate_argnums=0
    )

    def close(params: Tree, state: Any, total: Tree) -> tuple[Tree, Any]:
        mean = jax.tree.map(lambda x: x * (1 / k), total)
        updates, state = optimizer.update(mean, state, params)
        return optax.apply_updates(params, updates), state

    closing = jax.jit(close, donate_argnums=(0, 1))

    def window(params: Tree, state: Any, grads: list[Tree]) -> tuple[Tree, Any]:
        state, total = state
        total = start(total, grads[0])
        for grad in grads[1:]:
            total = add(total, grad)
        params, state = closing(params, state, total)
        return params, (state, total)

    return window, (optimizer.init(params), jax.tree.map(jnp.zeros_like, params)), []


def stepped(
    tx: optax.GradientTransformation, in_place: bool
) -> Callable[[Tree, int], tuple[Window, Any, list[Any]]]:
    """One jitted call a micro-step, parameters and state donated."""

    def micro_step(params: Tree, state: Any, grads: Tree) -> tuple[Tree, Any]:
        if in_place:
            return oa.apply_gradients(tx, grads, state, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def make(params: Tree, k: int) -> tuple[Window, Any, list[Any]]:
        state = tx.init(params)
        compiled = jax.jit(micro_step, donate_argnums=(0, 1)).lower(params, state, params).compile()

        def window(params: Tree, state: Any, grads: list[Tree]) -> tuple[Tree, Any]:
            for grad in grads:
                params, state = compiled(params, state, grad)
            return params, state

        return window, state, [compiled]

    return make


def methods(k: int) -> dict[str, Callable[[Tree, int], tuple[Window, Any, list[Any]]]]:
    multi_steps = optax.MultiSteps(inner(), k).gradient_transformation()
    return {
        "floor": floor,
        "apply_gradients": stepped(oa.accumulate(inner(), k), in_place=True),
        "update + apply_updates": stepped(oa.accumulate(inner(), k), in_place=False),
        "optax.MultiSteps": stepped(multi_steps, in_place=False),
    }


def measure(leaves: int, side: int, k: int, rounds: int) -> list[dict[str, Any]]:
    """A row a method: the median time of a window, its ratio to the floor, its temporaries."""
    keys = jax.random.split(jax.random.key(0), leaves)
    params = {f"w{i}": jax.random.normal(key, (side, side)) for i, key in enumerate(keys)}
    grads = [jax.tree.map(lambda x, s=i: jnp.sin(x * (s + 1)) * 0.1, params) for i in range(k)]
    jax.block_until_ready(grads)
    size = leaves * side * side * 4
    made = {name: make(params, k) for name, make in methods(k).items()}
    times = timed(made, params, grads, rounds)
    base = statistics.median(times["floor"])
    case = f"optimizer-bound, {leaves} leaves of {side}x{side}, k={k}"
    return [row(case, name, times[name], base, made[name][2], size) for name in made]


def timed(
    made: dict[str, tuple[Window, Any, list[Any]]], params: Tree, grads: list[Tree], rounds: int
) -> _measure.Times:
    """Seconds of each window; all parameters are compared after each round."""
    carries = {
        name: (jax.tree.map(jnp.copy, params), state) for name, (_, state, _) in made.items()
    }

    def call(name: str, window: Window) -> float:
        jax.block_until_ready(carries[name])
        seconds, carries[name] = _measure.seconds(lambda: window(*carries[name], grads))
        return seconds

    calls = {name: functools.partial(call, name, window) for name, (window, _, _) in made.items()}
    allowed = [1e-5] * len(params)  # an update has size 1e-3

    def check() -> None:
        new = {name: carry[0] for name, carry in carries.items()}
        _measure.assert_equal(new, "floor", allowed)

    _measure.interleaved(calls, 1, _measure.as_given, check)  # warms up
    return _measure.interleaved(calls, rounds, _measure.as_given, check)


def row(
    case: str, name: str, times: list[float], base: float, compiled: list[Any], size: int
) -> dict[str, Any]:
    low, median, high = _measure.quartiles(times)
    memory = _measure.memory(compiled[0]) if compiled else None
    return {
        "case": case,
        "method": name,
        "value": median,
        "spread": [low, high],
        "unit": "s/window",
        "ratio_to_floor": median / base,
        "temporaries_in_P": memory.temporaries / size if memory else None,
    }


def line(peer: float, row: dict[str, Any]) -> str:
    temporaries = row["temporaries_in_P"]
    shown = "" if temporaries is None else f"temporaries {temporaries:.2f} P"
    return (
        f"{row['method']:24} {row['value'] * 1e3:8.1f} ms/window"
        f"  {row['ratio_to_floor']:6.2f} of the floor"
        f"  {row['value'] / peer:5.2f} of MultiSteps  {shown}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = _measure.parser("optimizer_bound", __doc__)
    parser.add_argument("--leaves", type=int, default=16)
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args(argv)
    rows = measure(options.leaves, options.side, options.k, max(options.rounds, 2))
    peer = next(row["value"] for row in rows if row["method"] == "optax.MultiSteps")
    _measure.show(rows, options.json, functools.partial(line, peer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
