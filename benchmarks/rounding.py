"""What stochastic rounding costs: additions into a bfloat16 window, beside a float32 one.

python -m benchmarks.rounding

Floor: the plain float32 addition, `total + grad`, in place. Beside it the same addition as the
window makes it: in float32, and in bfloat16 with the sum rounded stochastically. The gradient is
given, much larger than the caches, so that nothing hides the bits. One process, interleaved; what
the windows hold is compared with the floor before any time is taken.
"""

import argparse
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _measure
from optax_accum import _accumulator as acc

FLOOR = "float32 addition"
ALLOWED = 1.2


WHOLE = acc.Contribution(None, jnp.ones([]), True, False)  # a micro-gradient that counts once


def plain(total: jax.Array, grad: jax.Array, number: jax.Array) -> jax.Array:
    del number
    return total + grad


def windowed(total: jax.Array, grad: jax.Array, number: jax.Array) -> jax.Array:
    """As `accumulate` adds; rounded stochastically where the sums are bfloat16."""
    return acc.add_sums(total, WHOLE, grad, False, (jnp.int32(0), number))


METHODS = {
    FLOOR: (jnp.float32, plain),
    "float32 window": (jnp.float32, windowed),
    "bfloat16 window": (jnp.bfloat16, windowed),
}


def measured(size: int, rounds: int, additions: int) -> list[_measure.Row]:
    """A row a method, of `additions` into a window of `size` numbers."""
    grad = jax.random.normal(jax.random.key(0), (size,))
    sums = {name: jnp.zeros(size, dtype) for name, (dtype, _) in METHODS.items()}
    adds = {name: jax.jit(add, donate_argnums=0) for name, (_, add) in METHODS.items()}

    def call(name: str) -> _measure.Sample:
        def all_of_them() -> jax.Array:
            for number in range(additions):
                sums[name] = adds[name](sums[name], grad, jnp.int32(number))
            return sums[name]

        return _measure.clocked(all_of_them)[0]

    for name in METHODS:
        call(name)
    check(sums, additions)
    times = _measure.interleaved({name: lambda name=name: call(name) for name in METHODS}, rounds)
    case = f"{additions} x {size * 4 / 2**20:.0f} MiB of float32 gradients"
    return [_measure.paired_row(case, name, times, FLOOR, "s") for name in METHODS]


def check(sums: dict[str, Any], additions: int) -> None:
    """Each window holds the floor's sums, to one unit of its last place an addition."""
    right = np.asarray(sums[FLOOR])
    for name, total in sums.items():
        off = np.max(np.abs(np.asarray(total.astype(jnp.float32)) - right) / np.abs(right).max())
        if not off <= additions * float(jnp.finfo(total.dtype).eps):
            raise AssertionError(f"{name} differs from the {FLOOR} by {off:g}")


def line(row: _measure.Row) -> str:
    low, high = row["ratio_spread"]
    return (
        f"  {row['method']:18} {1e3 * row['value']:8.2f} ms   {row['ratio_to_floor']:.2f} of the "
        f"floor ({low:.2f} to {high:.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rounding", description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--size", type=int, default=32 * 2**20, help="numbers in the window")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--additions", type=int, default=4, help="in each measurement")
    options = parser.parse_args()
    rows = measured(options.size, options.rounds, options.additions)
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    print(rows[0]["case"], "on", jax.devices()[0].device_kind)
    print("\n".join(map(line, rows)))
    ratio = rows[-1]["ratio_to_floor"]
    print(f"stochastic rounding: {ratio:.2f} of the plain float32 addition (wanted: {ALLOWED})")


if __name__ == "__main__":
    main()
