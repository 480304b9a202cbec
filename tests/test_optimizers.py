"""Every optimizer under `accumulate` against itself, fed the mean gradient of each window.

The means are NumPy's in float64, cast to the dtype that a whole batch's gradient would have.
"""

import fnmatch
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from optimizers import LINKS, NOT_IN_A_TABLE, OPTIMIZERS, Feed, Optimizer, loss_value

import optax_accum as oa

K, WINDOWS = 4, 3
SHAPES = {"b": (3,), "w": (4, 3)}

# Where XLA fuses, it would keep more digits than a narrow dtype has, and it fuses less in plain
# Optax: excess precision off. Compiling is what these tests cost: optimizations off.
COMPILER_OPTIONS = {
    "xla_allow_excess_precision": False,
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
jit = functools.partial(jax.jit, compiler_options=COMPILER_OPTIONS)


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


def initial_params(optimizer: Optimizer, pair: Pair, lane: int) -> Any:
    rng = np.random.default_rng(100 + lane)
    draw = lambda shape: away_from_zero(rng, shape, pair.param)  # noqa: E731
    params = {name: jnp.asarray(draw(shape), pair.param) for name, shape in SHAPES.items()}
    return optimizer.wrap(params)


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


@functools.lru_cache(maxsize=4)
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


@functools.lru_cache(maxsize=4)
def plain(optimizer: Optimizer, pair: Pair, lane: int, scheduled: bool) -> Record:
    update = plain_update(optimizer, pair, scheduled)
    params = initial_params(optimizer, pair, lane)
    state = strong(optimizer.make(rate_of(optimizer, scheduled)).init(params))
    records = []
    for i in range(WINDOWS):
        params, state, updates = update(params, state, at(feeds(pair, lane)[1], i))
        records.append(Record(params, state, updates, jnp.asarray(True)))
    if not all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params)):
        raise FloatingPointError("its parameters are no longer finite")
    return stack(records)


def expected(optimizer: Optimizer, pair: Pair, lane: int = 0, scheduled: bool = False) -> Record:
    """Plain Optax's run, or a skip where it has none for this pair of dtypes."""
    try:
        return plain(optimizer, pair, lane, scheduled)
    except Exception as error:
        if pair == SINGLE:
            raise
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
    """A body for `lax.scan`; it checks what scan forgives, a weak type."""
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(types))

    def micro_step(carry: Any, feed: Feed) -> Any:
        params, state = carry
        params, state, updates = path(tx, feed, state, params, **optimizer.extra(params, feed))
        assert jax.tree.map(jax.typeof, (params, state)) == types
        return (params, state), Record(params, state.inner_state, updates, state.updated)

    return micro_step


def in_scan(micro_step: Any, carry: Any, feed: Feed) -> Record:
    return jit(lambda carry, feed: jax.lax.scan(micro_step, carry, feed)[1])(carry, feed)


def in_jit(micro_step: Any, carry: Any, feed: Feed) -> Record:
    compiled, records = jit(micro_step), []
    for i in range(K * WINDOWS):
        carry, record = compiled(carry, at(feed, i))
        records.append(record)
    return stack(records)


def in_vmap(micro_step: Any, carries: list[Any], feeds: list[Feed]) -> list[Record]:
    """Each carry with its feed, side by side."""
    run = jax.vmap(lambda carry, feed: jax.lax.scan(micro_step, carry, feed)[1])
    records = jit(run)(stack(carries), stack(feeds))
    return [at(records, lane) for lane in range(len(carries))]


def numbers(leaf: Any) -> np.ndarray:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def assert_close(got: Any, want: Any, atol_of: Callable[[np.ndarray], float]) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True)
    for (path, a), b in pairs:
        where = jax.tree_util.keystr(path)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), where
        if jnp.issubdtype(a.dtype, jnp.inexact):
            a, b = a.astype(np.complex128), b.astype(np.complex128)
            np.testing.assert_allclose(a, b, rtol=0, atol=atol_of(b), err_msg=where)
        else:
            np.testing.assert_array_equal(a, b, err_msg=where)


def assert_still_inside_windows(got: Record, initial: Any) -> None:
    """Between two updates parameters and inner's state keep every bit, and updates are zeros."""
    leaves = jax.tree.leaves((got.params, got.inner_state))
    for after, before in zip(leaves, jax.tree.leaves(initial), strict=True):
        held = np.concatenate([before[None], after[K - 1 :: K]])[:WINDOWS]
        for i in range(K - 1):
            assert after[i::K].tobytes() == held.tobytes()
    for update in jax.tree.leaves(got.updates):
        assert not update.reshape(WINDOWS, K, -1)[:, :-1].any()


def check(optimizer: Optimizer, pair: Pair, got: Record, want: Record, carry: Any) -> None:
    """`got` moves where windows close, there like `want`, and nowhere else."""
    got, want = jax.tree.map(numbers, (got, want))
    params, state = carry
    np.testing.assert_array_equal(got.updated, ([False] * (K - 1) + [True]) * WINDOWS)
    assert_still_inside_windows(got, jax.tree.map(numbers, (params, state.inner_state)))
    if got.updates is None:
        want = want._replace(updates=None)
    unit = optimizer.ulps * pair.eps
    size = lambda want: np.abs(want[np.isfinite(want)]).max(initial=0)  # noqa: E731
    assert_close(jax.tree.map(lambda x: x[K - 1 :: K], got), want, lambda want: unit * size(want))


def run(optimizer: Optimizer, pair: Pair, path: Any, driver: Any, scheduled: bool = False) -> None:
    """One run over all micro-steps against plain Optax; inner runs once a window."""
    want = expected(optimizer, pair, scheduled=scheduled)
    calls: list[None] = []
    tx = oa.accumulate(counted(optimizer.make(rate_of(optimizer, scheduled)), calls), K)
    params = initial_params(optimizer, pair, lane=0)
    carry = params, tx.init(params)
    body = micro_step_of(tx, optimizer, path, jax.tree.map(jax.typeof, carry))
    got = driver(body, carry, feeds(pair, lane=0)[0])
    jax.effects_barrier()
    check(optimizer, pair, got, want, carry)
    assert len(calls) == WINDOWS


def run_batch(optimizer: Optimizer, pair: Pair, lanes: tuple[int, ...] = (0, 1)) -> None:
    """Two runs side by side under vmap, each against its own plain one."""
    wants = [expected(optimizer, pair, lane) for lane in lanes]
    tx = oa.accumulate(optimizer.make(rate_of(optimizer, scheduled=False)), K)
    params = [initial_params(optimizer, pair, lane) for lane in lanes]
    carries = [(each, tx.init(each)) for each in params]
    body = micro_step_of(tx, optimizer, by_update, jax.tree.map(jax.typeof, carries[0]))
    given = [feeds(pair, lane)[0] for lane in lanes]
    try:
        gots = in_vmap(body, carries, given)
    except jax.errors.JaxRuntimeError as error:
        if "Clamp unimplemented for C64" not in str(error):
            raise
        pytest.skip("XLA on CPU makes a clamp of complex numbers here, and cannot compile it")
    for got, want, carry in zip(gots, wants, carries, strict=True):
        check(optimizer, pair, got, want, carry)


TRANSFORMATIONS = {
    "jit": lambda optimizer, pair: run(optimizer, pair, by_update, in_jit),
    "scan": lambda optimizer, pair: run(optimizer, pair, by_update, in_scan),
    "apply_gradients": lambda optimizer, pair: run(optimizer, pair, by_apply_gradients, in_scan),
    "vmap": run_batch,
}
each_optimizer, each_link, each_that_wants_a_value = (
    pytest.mark.parametrize("optimizer", rows, ids=lambda row: row.id)
    for rows in (OPTIMIZERS, LINKS, [row for row in OPTIMIZERS if row.extra is loss_value])
)


@each_optimizer
def test_update_in_scan_with_a_schedule(optimizer):
    run(optimizer, SINGLE, by_update, in_scan, scheduled=True)


COMMON = {"adafactor", "adam", "adamw", "lamb", "lion", "rmsprop", "sgd", "sm3"}


@pytest.mark.parametrize(
    "optimizer",
    [row for row in OPTIMIZERS if row.id in COMMON],  # of the others in the product below
    ids=lambda row: row.id,
)
def test_apply_gradients_in_scan_of_mixed_dtypes(optimizer):
    run(optimizer, MIXED, by_apply_gradients, in_scan)


# Scans, by both ways to update, of every pair; the other transformations of what differs there.
PRODUCT = [
    pytest.param(pair, transformation, id=f"{'-'.join(pair)}-{transformation}")
    for pair in PAIRS
    for transformation in TRANSFORMATIONS  # varies fastest: one plain run
    if transformation in ("scan", "apply_gradients")
    or "-".join(pair)
    in {
        "jit": ["float32-float32", "float64-float64"],
        "vmap": ["float32-float32", "bfloat16-bfloat16", "complex64-complex64"],
    }[transformation]
]


@pytest.mark.full
@pytest.mark.parametrize("pair, transformation", PRODUCT)
@each_optimizer
def test_product(optimizer, pair, transformation):
    with pair.x64():
        TRANSFORMATIONS[transformation](optimizer, pair)


@pytest.mark.full
@each_link
def test_link_in_jit_with_a_schedule(optimizer):
    run(optimizer, SINGLE, by_update, in_jit, scheduled=True)


@pytest.mark.full
@each_link
def test_link_in_scan_of_mixed_dtypes(optimizer):
    run(optimizer, MIXED, by_apply_gradients, in_scan)


@pytest.mark.parametrize("driver", [in_jit, in_scan])
def test_inner_runs_once_a_window(driver):
    adamw = next(row for row in OPTIMIZERS if row.id == "adamw")
    run(adamw, SINGLE, by_update, driver)


def mirror() -> optax.GradientTransformationExtraArgs:
    """Its updates are what it was given."""

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return {"gradient": updates, "params": params, **extra}, state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_inner_is_given_what_a_whole_batch_gives(pair):
    """And no argument more. In the last place NumPy's mean and the window's may differ."""
    with pair.x64():
        tx, params = oa.accumulate(mirror(), K), initial_params(OPTIMIZERS[0], pair, lane=0)
        state, (every, whole) = tx.init(params), feeds(pair, lane=0)
        for i in range(K):
            feed = at(every, i)
            extra = {"value": feed.value, "grad": feed.grads, "other": np.int32(i)}
            got, state = jit(tx.update)(feed.grads, state, params, **extra)
    mean, value = at(whole.grads, 0), whole.value[0]
    want = {"gradient": mean, "grad": mean, "value": value, "other": np.int32(K - 1)}
    want["params"] = params
    eps = float(jnp.finfo(pair.promoted).eps)
    assert_close(*jax.tree.map(numbers, (got, want)), lambda want: 2 * eps * np.abs(want).max())


# Of gradients of 1 these descend by their learning rate alone.
BARE_RATE = {
    "adam": lambda rate: optax.adam(rate, b1=0, b2=0, eps=0),
    "lion": lambda rate: optax.lion(rate, weight_decay=0),
    "normalize": lambda rate: optax.chain(optax.contrib.normalize(), optax.sgd(rate)),
    "sgd": optax.sgd,
    "sign_sgd": optax.sign_sgd,
    "signum": optax.signum,
}


@pytest.mark.parametrize("name", BARE_RATE)
def test_a_schedule_counts_updates(name):
    tx = oa.accumulate(BARE_RATE[name](optax.linear_schedule(1.0, 0.0, 8)), K)

    def micro_step(carry, grad):
        updates, state = tx.update(grad, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), None

    start = jnp.zeros(()), tx.init(jnp.zeros(()))
    (end, _), _ = jit(lambda grads: jax.lax.scan(micro_step, start, grads))(jnp.ones(8 * K))
    np.testing.assert_allclose(end, -sum(1 - i / 8 for i in range(8)), rtol=1e-6)


@each_that_wants_a_value
def test_a_missing_value_is_missed_as_by_plain_inner(optimizer):
    params = jnp.ones(2)
    tx = oa.accumulate(optimizer.make(0.1), K)
    with pytest.raises(TypeError, match="value"):
        jax.eval_shape(tx.update, params, tx.init(params), params)


@pytest.mark.parametrize("name", ["dpsgd", "differentially_private_aggregate"])
def test_gradients_per_example_meet_an_error_that_says_where(name):
    options = {"l2_norm_clip": 1.0, "noise_multiplier": 0.1}
    make = {"dpsgd": functools.partial(contrib.dpsgd, 0.1, seed=0)}.get(
        name, functools.partial(contrib.differentially_private_aggregate, key=0)
    )
    tx = oa.accumulate(make(**options), K)
    params, grads = jnp.ones(2), jnp.ones((5, 2))
    with pytest.raises(ValueError, match=r"per-example .* optax\.chain\("):
        tx.update(grads, tx.init(params), params)


def test_a_state_that_grows_meets_an_error_as_in_scan():
    tx = oa.accumulate(optax.monitor({"norm": optax.tree.norm}), K)
    params = jnp.ones(2)
    with pytest.raises(ValueError, match=r"inner's state has the structure"):
        jax.eval_shape(tx.update, params, tx.init(params), params)


def makes_a_transformation(thing: Any) -> bool:
    """By its annotation; where it has none, by its source. A class counts by its methods."""
    if inspect.isclass(thing):
        is_pair = issubclass(thing, optax.GradientTransformation)
        return hasattr(thing, "init") and hasattr(thing, "update") and not is_pair
    if not (inspect.isfunction(thing) or isinstance(thing, functools.partial)):
        return False
    returned = inspect.signature(thing).return_annotation
    if returned is not inspect.Signature.empty:
        return "GradientTransformation" in str(returned)
    source = inspect.getsource(thing)
    return "GradientTransformation" in source or "chain(" in source


def public_transformations() -> set[str]:
    things = {**vars(optax), **vars(contrib)}
    return {
        name
        for name, thing in things.items()
        if not name.startswith("_") and makes_a_transformation(thing)
    }


def left_out(name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in NOT_IN_A_TABLE)


IN_A_TABLE = {row.id.split("-")[0] for row in OPTIMIZERS + LINKS}


def test_every_public_optimizer_stands_in_a_table():
    missing = {name for name in public_transformations() - IN_A_TABLE if not left_out(name)}
    assert not missing, f"{sorted(missing)}: give each a row in tests/optimizers.py"


def test_the_tables_name_nothing_else():
    assert public_transformations() >= IN_A_TABLE
    assert not any(map(left_out, IN_A_TABLE))
    for pattern in NOT_IN_A_TABLE:
        assert fnmatch.filter(public_transformations(), pattern), pattern


def test_rows_have_names_of_their_own():
    names = [row.id for row in OPTIMIZERS + LINKS]
    assert len(set(names)) == len(names)
