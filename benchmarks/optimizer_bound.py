"""What accumulating costs beside the optimizer: the gradients are given, so nothing hides it.

python -m benchmarks.optimizer_bound

Floor: k in-place additions and one update with `apply_updates`, each a jitted call that is given
no more than it needs. P is the parameters' bytes. All methods run in one process, interleaved, on
the same gradients; their parameters are compared before any time is taken.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

import optax_accum as oa
from benchmarks import _measure, _peers, _report

Tree = Any
CASE = "optimizer"
BY_HAND = "hand-written cond"  # the floor's work in one call a micro-step, as ours
IN_ONE_CALL = "oa.apply_gradients, scanned"


class Size(NamedTuple):
    """Parameters, and how they are trained."""

    leaves: int
    shape: tuple[int, ...]
    k: int
    optimizer: str = "adamw"

    def inner(self) -> optax.GradientTransformation:
        return optax.adamw(**_measure.ADAMW) if self.optimizer == "adamw" else optax.sgd(0.1)

    def fields(self) -> _measure.Row:
        shape = "x".join(map(str, self.shape))
        given = {"leaves": self.leaves, "shape": shape, "k": self.k, "optimizer": self.optimizer}
        setting = f"{self.leaves} leaves of {shape}, {self.optimizer}, k={self.k}"
        return given | {"setting": setting}


BOTH = [Size(16, (1024, 1024), 4), Size(200, (256, 256), 4)]
SIZES = {
    "tiny": [Size(2, (8, 8), 2), Size(2, (8, 8), 2, "sgd")],
    "quick": [*BOTH, Size(16, (1024, 1024), 4, "sgd")],
    "full": [*BOTH, Size(16, (1024, 1024), 4, "sgd")]
    + [Size(leaves, (1024, 1024), k) for leaves in (2, 16, 64) for k in (2, 16)],
}
SECONDS = {"tiny": 0.0, "quick": 7.0, "full": 30.0}  # of timing, a size


class Grads(NamedTuple):
    """The micro-gradients of a window."""

    each: list[Tree]
    stacked: Tree  # with a leading axis of length k


class Window(NamedTuple):
    """A method: a window, the state it starts from, and the program of a micro-step if it has."""

    run: Callable[[Tree, Any, Grads], tuple[Tree, Any]]  # params and state are donated
    state: Any
    program: Any = None


def floor(params: Tree, size: Size) -> Window:
    """k in-place additions (the first starts from nothing), then one update and apply."""
    optimizer = size.inner()
    add = jax.jit(lambda total, grad: jax.tree.map(jnp.add, total, grad), donate_argnums=0)
    start = jax.jit(
        lambda total, grad: jax.tree.map(lambda t, g: (t - t) + g, total, grad), donate_argnums=0
    )
    closing = jax.jit(functools.partial(_close, optimizer, size.k), donate_argnums=(0, 1))

    def run(params: Tree, state: Any, grads: Grads) -> tuple[Tree, Any]:
        state, total = state
        total = start(total, grads.each[0])
        for grad in grads.each[1:]:
            total = add(total, grad)
        params, state = closing(params, state, total)
        return params, (state, total)

    return Window(run, (optimizer.init(params), jax.tree.map(jnp.zeros_like, params)))


def _close(optimizer: Any, k: int, params: Tree, state: Any, total: Tree) -> tuple[Tree, Any]:
    mean = jax.tree.map(lambda x: x * (1 / k), total)
    updates, state = optimizer.update(mean, state, params)
    return optax.apply_updates(params, updates), state


def by_hand(params: Tree, size: Size) -> Window:
    """The same in one jitted function, called once a micro-step, with a `cond`."""
    optimizer = size.inner()

    def micro_step(params: Tree, state: Any, grads: Tree) -> tuple[Tree, Any]:
        state, total, i = state
        total = jax.tree.map(lambda t, g: jnp.where(i == 0, g, t + g), total, grads)
        full = i + 1 == size.k
        close = lambda: _close(optimizer, size.k, params, state, total)  # noqa: E731
        params, state = lax.cond(full, close, lambda: (params, state))
        return params, (state, total, jnp.where(full, 0, i + 1))

    zeros = jax.tree.map(jnp.zeros_like, params)
    return stepped(micro_step, params, (optimizer.init(params), zeros, jnp.zeros([], jnp.int32)))


def stepped(micro_step: Callable[..., tuple[Tree, Any]], params: Tree, state: Any) -> Window:
    """One compiled call a micro-step, parameters and state donated."""
    program = jax.jit(micro_step, donate_argnums=(0, 1)).lower(params, state, params).compile()

    def run(params: Tree, state: Any, grads: Grads) -> tuple[Tree, Any]:
        for grad in grads.each:
            params, state = program(params, state, grad)
        return params, state

    return Window(run, state, program)


def applied(tx: optax.GradientTransformation, params: Tree, size: Size) -> Window:
    """`tx.update`, then `optax.apply_updates`."""
    del size

    def micro_step(params: Tree, state: Any, grads: Tree) -> tuple[Tree, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return stepped(micro_step, params, tx.init(params))


def in_place(params: Tree, size: Size) -> Window:
    """`oa.apply_gradients`, called once a micro-step."""
    tx = oa.accumulate(size.inner(), size.k)
    micro_step = lambda params, state, grads: oa.apply_gradients(tx, grads, state, params)  # noqa: E731
    return stepped(micro_step, params, tx.init(params))


def in_one_call(params: Tree, size: Size) -> Window:
    """`oa.apply_gradients` in a `lax.scan` over the window's micro-gradients."""
    tx = oa.accumulate(size.inner(), size.k)

    def window(params: Tree, state: Any, stacked: Tree) -> tuple[Tree, Any]:
        def micro_step(carry: tuple[Tree, Any], grads: Tree) -> tuple[Any, None]:
            params, state = carry
            return oa.apply_gradients(tx, grads, state, params), None

        return lax.scan(micro_step, (params, state), stacked)[0]

    state = tx.init(params)
    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((size.k, *x.shape), x.dtype), params)
    program = jax.jit(window, donate_argnums=(0, 1)).lower(params, state, stacked).compile()
    return Window(lambda p, s, grads: program(p, s, grads.stacked), state, program)


def methods(size: Size) -> dict[str, Callable[[Tree, Size], Window]]:
    """How each is made from parameters."""
    inner, k = size.inner(), size.k
    multi_steps = optax.MultiSteps(inner, k).gradient_transformation()
    found = {
        _measure.FLOOR: floor,
        BY_HAND: by_hand,
        _peers.APPLY: in_place,
        IN_ONE_CALL: in_one_call,
        _peers.UPDATE: functools.partial(applied, oa.accumulate(inner, k)),
        _peers.MULTI_STEPS: functools.partial(applied, multi_steps),
    }
    if size.optimizer == "sgd":  # otherwise it computes something else
        summed = optax.chain(optax.scale(1 / k), inner, optax.apply_every(k))
        found[_peers.APPLY_EVERY] = functools.partial(applied, summed)
    return found


def measure(
    size: Size, budget: float, fewest: int = 5, only: tuple[str, ...] = ()
) -> list[_measure.Row]:
    """A row a method: the median time of a window, its ratio to the floor, its temporaries."""
    params, grads = random(size)
    chosen = {name: make for name, make in methods(size).items() if not only or name in only}
    made = {name: make(params, size) for name, make in chosen.items()}
    times = timed(made, params, grads, budget, fewest)
    rows = []
    for name, window in made.items():
        row = _measure.paired_row(CASE, name, times, _measure.FLOOR, "s/window") | size.fields()
        if _peers.MULTI_STEPS in times:
            pairs = _measure.paired_ratios(times[name], times[_peers.MULTI_STEPS])
            row["ratio_to_MultiSteps"] = _measure.quartiles(pairs)[1]
        used = _measure.memory_in_p(window.program, params) if window.program else {}
        rows.append(row | used)
    return rows


def random(size: Size) -> tuple[Tree, Grads]:
    """Parameters and the micro-gradients of a window."""
    keys = jax.random.split(jax.random.key(0), size.leaves)
    normal = jax.jit(jax.random.normal, static_argnums=1)
    params = {f"w{i}": normal(key, size.shape) for i, key in enumerate(keys)}
    grad = jax.jit(lambda x, i: jnp.sin(x * (i + 1)) * 0.1)
    each = [jax.tree.map(lambda x, i=i: grad(x, i), params) for i in range(size.k)]
    stack = jax.jit(lambda *leaves: jnp.stack(leaves))
    return params, jax.block_until_ready(Grads(each, jax.tree.map(stack, *each)))


def timed(
    made: dict[str, Window], params: Tree, grads: Grads, budget: float, fewest: int
) -> _measure.Times:
    """Seconds of each window; the first two of each must end in the floor's parameters."""
    carries = {name: (jax.tree.map(jnp.copy, params), made[name].state) for name in made}

    def call(name: str) -> _measure.Sample:
        jax.block_until_ready(carries[name])
        sample, carries[name] = _measure.clocked(lambda: made[name].run(*carries[name], grads))
        return sample

    for _ in range(2):
        for name in made:
            call(name)
        after = {name: carry[0] for name, carry in carries.items()}
        _measure.check_equal(after, _measure.FLOOR, params, 1e-4)
    calls = {name: functools.partial(call, name) for name in made}
    return _measure.timed(calls, budget, fewest)


def rows(scale: str) -> list[_measure.Row]:
    """The case, by scale."""
    return [row for size in SIZES[scale] for row in measure(size, SECONDS[scale])]


def main(argv: list[str] | None = None) -> int:
    parser = _report.parser("optimizer_bound", __doc__)
    parser.add_argument("--leaves", type=int, default=16)
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args(argv)
    size = Size(options.leaves, (options.side, options.side), options.k, options.optimizer)
    _report.show(measure(size, 0.0, max(options.rounds, 2)), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
