"""What accumulating costs beside the optimizer: the gradients are given, so nothing hides it.

python -m benchmarks.optimizer_bound

Floor: k in-place additions and one AdamW update with `apply_updates`. P is the parameters' bytes.
All methods run in one
process, interleaved, on the same gradients; their results are compared before any time is taken.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optax_accum as oa

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
    carries, times = {}, {name: [] for name in made}
    for name, (_, state, _) in made.items():
        carries[name] = (jax.tree.map(jnp.copy, params), state)
    for round_ in range(rounds + 1):
        for name, (window, _, _) in made.items():
            jax.block_until_ready(carries[name])
            start = time.perf_counter()
            carries[name] = jax.block_until_ready(window(*carries[name], grads))
            if round_:  # the first round warms up
                times[name].append(time.perf_counter() - start)
        check_equal({name: carry[0] for name, carry in carries.items()})
    base = statistics.median(times["floor"])
    rows = []
    for name, (_, _, compiled) in made.items():
        memory = compiled[0].memory_analysis() if compiled else None
        low, median, high = statistics.quantiles(times[name], n=4)
        rows.append(
            {
                "case": f"optimizer-bound, {leaves} leaves of {side}x{side}, k={k}",
                "method": name,
                "value": median,
                "spread": [low, high],
                "unit": "s/window",
                "ratio_to_floor": median / base,
                "temporaries_in_P": memory.temp_size_in_bytes / size if memory else None,
            }
        )
    return rows


def check_equal(params: dict[str, Tree]) -> None:
    """A method that computes something else has no time."""
    for name, tree in params.items():
        for leaf, right in zip(
            jax.tree.leaves(tree), jax.tree.leaves(params["floor"]), strict=True
        ):
            off = float(jnp.max(jnp.abs(leaf - right)))
            if not off <= 1e-5:  # an update has size 1e-3
                raise AssertionError(f"{name} differs from the floor by {off:g}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.optimizer_bound", description=__doc__
    )
    parser.add_argument("--leaves", type=int, default=16)
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    rows = measure(options.leaves, options.side, options.k, max(options.rounds, 2))
    if options.json:
        json.dump(rows, sys.stdout, indent=1)
        return 0
    print(rows[0]["case"], "on", jax.devices()[0].device_kind)
    peer = next(row["value"] for row in rows if row["method"] == "optax.MultiSteps")
    for row in rows:
        temporaries = row["temporaries_in_P"]
        shown = "" if temporaries is None else f"temporaries {temporaries:.2f} P"
        print(
            f"{row['method']:24} {row['value'] * 1e3:8.1f} ms/window"
            f"  {row['ratio_to_floor']:6.2f} of the floor"
            f"  {row['value'] / peer:5.2f} of MultiSteps  {shown}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
