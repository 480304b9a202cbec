"""Every optimizer under `accumulate` against itself, fed the mean gradient of each window.

The means are NumPy's in float64, cast to the dtype that a whole batch's gradient would have.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizers import OPTIMIZERS, Feed, Optimizer

import optax_accum as oa

K, WINDOWS = 4, 3
SHAPES = {"b": (3,), "w": (4, 3)}

# Where XLA fuses, it would keep more digits than a narrow dtype has; it fuses less in plain Optax.
jit = functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})


class Pair(NamedTuple):
    param: str
    grad: str

    @property
    def promoted(self) -> Any:
        return jnp.promote_types(self.param, self.grad)

    @property
    def eps(self) -> float:
        return max(float(jnp.finfo(dtype).eps) for dtype in self)

    def x64(self) -> Any:
        return jax.enable_x64(self.param == "float64")


class Record(NamedTuple):
    """What a run left behind, each leaf stacked along time."""

    params: Any
    inner_state: Any
    updates: Any  # None where the run makes none
    updated: Any


SINGLE = Pair("float32", "float32")
MIXED = Pair("bfloat16", "float32")
PAIRS = (
    SINGLE,
    MIXED,
    Pair("bfloat16", "bfloat16"),
    Pair("float32", "bfloat16"),
    Pair("float16", "float16"),
    Pair("float64", "float64"),
    Pair("complex64", "complex64"),
)


def away_from_zero(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Numbers of size 0.5 to 1.5, so that rounding turns no sign."""
    draw = lambda: rng.choice([-1.0, 1.0], shape) * rng.uniform(0.5, 1.5, shape)  # noqa: E731
    return draw() + 1j * draw() if jnp.issubdtype(dtype, jnp.complexfloating) else draw()


def initial_params(pair: Pair, lane: int) -> Any:
    rng = np.random.default_rng(100 + lane)
    draw = lambda shape: away_from_zero(rng, shape, pair.param)  # noqa: E731
    return {name: draw(shape).astype(jnp.dtype(pair.param)) for name, shape in SHAPES.items()}


def micro_gradients(pair: Pair, lane: int) -> Any:
    """Shape (WINDOWS, K, ...): signs turn inside a window, its mean stays away from zero."""
    rng = np.random.default_rng(lane)

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        means = away_from_zero(rng, (WINDOWS, 1, *shape), pair.grad)
        noise = 2 * away_from_zero(rng, (WINDOWS, K, *shape), pair.grad)
        return (means + noise - noise.mean(1, keepdims=True)).astype(jnp.dtype(pair.grad))

    return {name: draw(shape) for name, shape in SHAPES.items()}


def feeds(pair: Pair, lane: int) -> tuple[Feed, Feed]:
    """For the micro-steps, time leading; and for plain inner, windows leading."""
    grads = micro_gradients(pair, lane)
    wide = np.result_type(np.float64, 1j if pair.grad == "complex64" else 1.0)
    means = {n: g.astype(wide).mean(1).astype(pair.promoted) for n, g in grads.items()}
    values = np.random.default_rng(lane).integers(8, 32, (WINDOWS, K)) / np.float32(8)
    losses = values.mean(1, dtype=np.float32)
    every = Feed(
        jax.tree.map(np.concatenate, grads),
        values.reshape(-1),
        jax.tree.map(lambda mean: mean.repeat(K, axis=0), means),
        losses.repeat(K),
    )
    return every, Feed(means, losses, means, losses)


def halving(count: Any) -> Any:
    return 0.1 * 0.5**count


def rate_of(optimizer: Optimizer, scheduled: bool) -> Any:
    return halving if scheduled and optimizer.scheduled else 0.1


def strong(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.lax.convert_element_type(x, jnp.result_type(x)), tree)


def stack(records: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *records)


def at(tree: Any, i: int) -> Any:
    return jax.tree.map(lambda x: x[i], tree)


@functools.cache
def plain_update(optimizer: Optimizer, pair: Pair, scheduled: bool) -> Callable[..., Any]:
    """One update without accumulation; inner's state keeps the dtypes of its init."""
    del pair
    inner = optax.with_extra_args_support(optimizer.make(rate_of(optimizer, scheduled)))

    def update(params: Any, state: Any, feed: Feed) -> tuple[Any, Any, Any]:
        extra = optimizer.extra(params, feed)
        updates, new = inner.update(feed.grads, state, params, **extra)
        new = jax.tree.map(lambda x, old: jnp.asarray(x, jnp.result_type(old)), new, state)
        return optax.apply_updates(params, updates), new, updates

    return jit(update)


@functools.cache
def plain(optimizer: Optimizer, pair: Pair, lane: int, scheduled: bool) -> Record:
    update = plain_update(optimizer, pair, scheduled)
    params = jax.tree.map(jnp.asarray, initial_params(pair, lane))
    state = strong(optimizer.make(rate_of(optimizer, scheduled)).init(params))
    records = []
    for i in range(WINDOWS):
        params, state, updates = update(params, state, at(feeds(pair, lane)[1], i))
        records.append(Record(params, state, updates, jnp.asarray(True)))
    return stack(records)


def expected(optimizer: Optimizer, pair: Pair, lane: int = 0, scheduled: bool = False) -> Record:
    """Plain Optax's run, or a skip where it has none for this pair of dtypes."""
    if pair == SINGLE:
        return plain(optimizer, pair, lane, scheduled)
    try:
        return plain(optimizer, pair, lane, scheduled)
    except Exception as error:
        reason = str(error).splitlines()[0][:90]
        pytest.skip(f"plain Optax fails: {type(error).__name__}: {reason}")


def counted(inner: Any, calls: list[None]) -> optax.GradientTransformationExtraArgs:
    """`inner`, noting at run time that its update ran."""
    inner = optax.with_extra_args_support(inner)

    def update(*args: Any, **extra: Any) -> Any:
        jax.debug.callback(lambda: calls.append(None))
        return inner.update(*args, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def by_update(tx: Any, feed: Feed, state: Any, params: Any, **extra: Any) -> Any:
    updates, state = tx.update(feed.grads, state, params, **extra)
    return optax.apply_updates(params, updates), state, updates


def by_apply_gradients(tx: Any, feed: Feed, state: Any, params: Any, **extra: Any) -> Any:
    return *oa.apply_gradients(tx, feed.grads, state, params, **extra), None


def micro_step_of(tx: Any, optimizer: Optimizer, path: Any, types: Any) -> Callable[..., Any]:
    def micro_step(carry: Any, feed: Feed) -> Any:
        params, state = carry
        params, state, updates = path(tx, feed, state, params, **optimizer.extra(params, feed))
        assert jax.tree.map(jax.typeof, (params, state)) == types
        return (params, state), Record(params, state.inner_state, updates, state.updated)

    return micro_step


def start(tx: Any, pair: Pair, lane: int) -> Any:
    params = jax.tree.map(jnp.asarray, initial_params(pair, lane))
    return params, tx.init(params)


def in_scan(micro_step: Any, carry: Any, feed: Feed) -> Record:
    return jit(lambda carry, feed: jax.lax.scan(micro_step, carry, feed)[1])(carry, feed)


def in_loop(micro_step: Any, carry: Any, feed: Feed) -> Record:
    compiled, records = jit(micro_step), []
    for i in range(K * WINDOWS):
        carry, record = compiled(carry, at(feed, i))
        records.append(record)
    return stack(records)


def accumulated(
    optimizer: Optimizer, pair: Pair, path: Any, driver: Any, scheduled: bool = False
) -> tuple[Record, int]:
    """The run over all micro-steps, and how often inner ran in it."""
    calls: list[None] = []
    tx = oa.accumulate(counted(optimizer.make(rate_of(optimizer, scheduled)), calls), K)
    carry = start(tx, pair, lane=0)
    micro_step = micro_step_of(tx, optimizer, path, jax.tree.map(jax.typeof, carry))
    record = driver(micro_step, carry, feeds(pair, lane=0)[0])
    jax.effects_barrier()
    return record, len(calls)


def numbers(leaf: Any) -> np.ndarray:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def as_numpy(tree: Any) -> Any:
    return jax.tree.map(numbers, tree)


def assert_close(got: Any, want: Any, eps: float, ulps: float) -> None:
    """Equal to a few units in the last place of the largest number of each leaf."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        if not jnp.issubdtype(a.dtype, jnp.inexact):
            np.testing.assert_array_equal(a, b, err_msg=str(path))
            continue
        a, b = a.astype(np.complex128), b.astype(np.complex128)
        size = np.abs(b[np.isfinite(b)]).max(initial=0)
        np.testing.assert_allclose(a, b, rtol=0, atol=ulps * eps * size, err_msg=str(path))


def assert_still_inside_windows(got: Record, initial: Record) -> None:
    """Between two updates parameters and inner's state keep every bit, and updates are zeros."""
    for moving, before in zip(jax.tree.leaves(got[:2]), jax.tree.leaves(initial[:2]), strict=True):
        moving = np.concatenate([before[None], moving])
        for window in range(0, WINDOWS * K, K):
            for i in range(1, K):
                assert moving[window + i].tobytes() == moving[window].tobytes()
    for update in jax.tree.leaves(got.updates):
        update = update.reshape(WINDOWS, K, *update.shape[1:])
        assert not update[:, :-1].any()


def check(got: Record, want: Record, optimizer: Optimizer, pair: Pair) -> None:
    got, want = as_numpy(got), as_numpy(want)
    np.testing.assert_array_equal(got.updated, ([False] * (K - 1) + [True]) * WINDOWS)
    if got.updates is None:
        want = want._replace(updates=None)
    closing = jax.tree.map(lambda x: x[K - 1 :: K], got)
    assert_close(closing, want, pair.eps, optimizer.ulps)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.id)
def test_update_in_scan(optimizer):
    want = expected(optimizer, SINGLE, scheduled=True)
    got, calls = accumulated(optimizer, SINGLE, by_update, in_scan, scheduled=True)
    check(got, want, optimizer, SINGLE)
    assert calls == WINDOWS


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.id)
def test_apply_gradients_in_scan(optimizer):
    want = expected(optimizer, MIXED)
    got, calls = accumulated(optimizer, MIXED, by_apply_gradients, in_scan)
    check(got, want, optimizer, MIXED)
    assert calls == WINDOWS


@pytest.mark.full
@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: "-".join(p))
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.id)
def test_loop(optimizer, pair):
    with pair.x64():
        want = expected(optimizer, pair)
        got, calls = accumulated(optimizer, pair, by_update, in_scan)
        check(got, want, optimizer, pair)
        assert calls == WINDOWS
