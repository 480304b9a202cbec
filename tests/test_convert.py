"""States that stop under one transformation and go on under another."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_same_bits
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_accum as oa

PARAMS = {"w": jnp.arange(6.0).reshape(3, 2) / 7, "b": jnp.ones(2)}
ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))


def gradient(seed, params=PARAMS):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params)


@functools.cache
def compiled(tx):
    return jax.jit(tx.update)


def run(tx, state, params, seeds, jit=False):
    """Eager calls of `accumulate` compile nothing; those of MultiSteps do, each time."""
    update = compiled(tx) if jit or isinstance(tx, optax.MultiSteps) else tx.update
    for seed in seeds:
        updates, state = update(gradient(seed, params), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def close(a, b, rtol=2e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-7), a, b)


def like_init(state, tx, params=PARAMS):
    """Structure, shapes and strong dtypes are those of `init`, and all can be donated."""
    want = tx.init(params)
    assert jax.tree.structure(state) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)
    buffers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((state, params))]
    assert len(set(buffers)) == len(buffers)


# From optax.MultiSteps.

MOMENTUM = optax.sgd(0.1, momentum=0.9)
OLD = {mean: optax.MultiSteps(MOMENTUM, 4, use_grad_mean=mean) for mean in (True, False)}


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("stop", [5, 7])
def test_a_run_of_multi_steps_goes_on_in_mid_window(mean, stop):
    inner, old = MOMENTUM, OLD[mean]
    tx = oa.accumulate(inner, 4, loss_reduction="mean" if mean else "sum")
    want, _ = run(old, old.init(PARAMS), PARAMS, range(12))
    params, state = run(old, old.init(PARAMS), PARAMS, range(stop))
    state = oa.convert_state(state, tx, params, use_grad_mean=mean)
    assert int(state.update_step) == 1 and int(state.micro_step) == stop - 4
    params, state = run(tx, state, params, range(stop, 12))
    close(params, want)
    assert int(state.update_step) == 3
    like_init(state, tx)


def test_multi_steps_with_a_schedule():
    schedule = lambda update_step: update_step + 1  # noqa: E731
    old, tx = optax.MultiSteps(ADAM, schedule), oa.accumulate(ADAM, schedule)
    want, _ = run(old, old.init(PARAMS), PARAMS, range(10))
    params, state = run(old, old.init(PARAMS), PARAMS, range(5))  # 1 + 2 and two of three
    state = oa.convert_state(state, tx, params, use_grad_mean=True)
    assert (int(state.k), int(state.micro_step), int(state.update_step)) == (3, 2, 2)
    params, _ = run(tx, state, params, range(5, 10))
    close(params, want)


@pytest.mark.parametrize(
    ("mean", "reduction", "weight"),
    [(True, "mean", 3.0), (False, "mean", 3.0), (True, "sum_over_weight", 3.0)],
)
def test_weights_of_micro_steps_that_multi_steps_took(mean, reduction, weight):
    """Going on with weights: each micro-step so far counted 3, the last one counts 5."""
    old = optax.MultiSteps(optax.sgd(1.0), 4, use_grad_mean=mean)
    tx = oa.accumulate(optax.sgd(1.0), 4, loss_reduction=reduction)
    _, state = run(old, old.init(PARAMS), PARAMS, range(3))
    state = oa.convert_state(state, tx, PARAMS, use_grad_mean=mean, weight=weight)
    updates, _ = tx.update(gradient(3), state, PARAMS, weight=5.0)
    factors = [3, 3, 3, 5] if reduction == "mean" else [1, 1, 1, 1]

    def window(*leaves):
        total = sum(f * np.float64(x) for f, x in zip(factors, leaves, strict=True))
        return -total / (3 * weight + 5)

    close(updates, jax.tree.map(window, *map(gradient, range(4))))


@pytest.mark.parametrize("mean", [True, False])
def test_a_closed_window_of_multi_steps_needs_no_word_and_leaves_its_poison(mean):
    """MultiSteps resets by multiplying with 0: NaN stays in its sums for ever."""
    old = optax.MultiSteps(optax.sgd(1.0), 1, use_grad_mean=mean)
    state = old.init(PARAMS)
    bad = jax.tree.map(lambda g: g * np.nan, gradient(0))
    _, state = old.update(bad, state, PARAMS)
    assert np.isnan(state.acc_grads["w"]).all()
    tx = oa.accumulate(optax.sgd(1.0), 2)
    state = oa.convert_state(state, tx, PARAMS)
    params, _ = run(tx, state, PARAMS, range(2))
    means = jax.tree.map(lambda p, a, b: p - (a + b) / 2, PARAMS, gradient(0), gradient(1))
    close(params, means)


def test_multi_steps_inside_a_chain_and_beside_other_labels():
    def make(wrap):
        labels = {"w": "a", "b": "b"}
        inner = optax.partition({"a": wrap(optax.sgd(0.5)), "b": optax.adam(0.1)}, labels)
        return optax.chain(optax.clip(1.0), inner)

    old = make(lambda tx: optax.MultiSteps(tx, 3).gradient_transformation())
    new = make(lambda tx: oa.accumulate(tx, 3))
    want, _ = run(old, old.init(PARAMS), PARAMS, range(6), jit=True)
    params, state = run(old, old.init(PARAMS), PARAMS, range(2), jit=True)
    state = oa.convert_state(state, new, params, use_grad_mean=True)
    params, state = run(new, state, params, range(2, 6))
    close(params, want)
    like_init(state, new)


def test_the_sums_of_multi_steps_are_widened():
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    old = optax.MultiSteps(optax.sgd(1.0), 4, accumulator_dtype=jnp.bfloat16)
    _, state = old.update(gradient(0, params), old.init(params), params)
    tx = oa.accumulate(optax.sgd(1.0), 4)
    got = oa.convert_state(state, tx, params, use_grad_mean=True)
    assert got.grad_sum["w"].dtype == jnp.float32
    close(got.grad_sum, jax.tree.map(lambda x: x.astype("f4"), gradient(0, params)))
    narrow = oa.accumulate(optax.sgd(1.0), 4, accumulator_dtype=jnp.bfloat16)
    wide = optax.MultiSteps(optax.sgd(1.0), 4)
    _, state = wide.update(gradient(0), wide.init(PARAMS), PARAMS)
    with pytest.raises(TypeError, match=r"acc_grads\['b'\] is float32, expected bfloat16.*cast"):
        oa.convert_state(state, narrow, PARAMS, use_grad_mean=True)
    got = oa.convert_state(state, narrow, PARAMS, use_grad_mean=True, cast=True)
    assert got.grad_sum["w"].dtype == jnp.bfloat16


def test_the_state_of_an_nnx_optimizer():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    multi = optax.MultiSteps(optax.sgd(0.5), 2).gradient_transformation()
    old = nnx.Optimizer(model, multi, wrt=nnx.Param)
    params = nnx.state(model, nnx.Param)
    old.update(model, jax.tree.map(jnp.ones_like, params))
    tx = oa.accumulate(optax.sgd(0.5), 2)
    state = oa.convert_state(old.opt_state, tx, params, use_grad_mean=True)
    new = nnx.Optimizer(model, tx, wrt=nnx.Param)
    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    jax.tree.map(lambda v, x: v.set_value(x), new.opt_state, state, is_leaf=is_variable)
    kernel = np.asarray(model.kernel[...])
    new.update(model, jax.tree.map(lambda x: 3 * jnp.ones_like(x), params))
    np.testing.assert_allclose(model.kernel[...], kernel - 0.5 * 2, rtol=1e-6)
    assert oa.has_updated(new.opt_state)


# Another k.


@pytest.mark.parametrize("k", [2, 6, lambda update_step: 2])
def test_an_open_window_keeps_its_k(k):
    """[0, 1, 2 | 3] at the old k of 4, then windows of the new one."""
    tx = oa.accumulate(optax.sgd(1.0), k)
    old = oa.accumulate(optax.sgd(1.0), 4)
    params, state = run(old, old.init(PARAMS), PARAMS, range(3))
    state = oa.convert_state(state, tx, params)
    assert int(state.k) == 4 and int(state.micro_step) == 3
    params, state = run(tx, state, params, [3])
    assert oa.has_updated(state) and int(state.k) == (k if isinstance(k, int) else 2)
    mean = jax.tree.map(lambda *g: np.mean(np.float64(g), 0), *map(gradient, range(4)))
    close(params, jax.tree.map(lambda p, g: p - g, PARAMS, mean))


def test_an_empty_window_shows_the_new_k():
    old = oa.accumulate(ADAM, 2)
    params, state = run(old, old.init(PARAMS), PARAMS, range(4))
    for k, want in ((5, 5), (lambda update_step: 10 * update_step, 20)):
        got = oa.convert_state(state, oa.accumulate(ADAM, k), params)
        assert (int(got.k), int(got.update_step), int(got.micro_step)) == (want, 2, 0)
        assert_same_bits(got.inner_state, state.inner_state)


@pytest.mark.parametrize("k", [3, lambda update_step: 3])
def test_to_a_constant_k_of_1_and_back(k):
    one, tx = oa.accumulate(ADAM, 1), oa.accumulate(ADAM, k)
    params, state = run(tx, tx.init(PARAMS), PARAMS, range(3))
    state = oa.convert_state(state, one, params)
    assert state.grad_sum is None and int(state.update_step) == 1 and bool(state.updated)
    like_init(state, one)
    params, state = run(one, state, params, range(3, 5))
    state = oa.convert_state(state, tx, params)
    assert int(state.update_step) == 3
    like_init(state, tx)
    params, state = run(tx, state, params, range(5, 8))

    want, inner = PARAMS, ADAM.init(PARAMS)
    for window in ((0, 1, 2), (3,), (4,), (5, 6, 7)):
        mean = jax.tree.map(lambda *g: sum(g) / len(g), *map(gradient, window))
        updates, inner = ADAM.update(mean, inner, want)
        want = optax.apply_updates(want, updates)
    close(params, want)


def test_what_is_counted_stays():
    tx = oa.accumulate(optax.sgd(1.0), 2, nonfinite="skip_micro_step")
    bad = jax.tree.map(lambda g: g * np.nan, gradient(0))
    _, state = tx.update(bad, tx.init(PARAMS), PARAMS)
    _, state = tx.update(gradient(1), state, PARAMS, value=7.0)
    got = oa.convert_state(state, oa.accumulate(optax.sgd(1.0), 1), PARAMS)
    assert int(got.skipped) == 1 and bool(got.updated) and int(got.update_step) == 1


# Plain optimizers.


def test_around_a_plain_state_and_out_of_a_window():
    tx = oa.accumulate(ADAM, 2)
    params, state = run(ADAM, ADAM.init(PARAMS), PARAMS, range(2))
    state = oa.convert_state(state, tx, params, update_step=2)
    assert int(state.update_step) == 2
    like_init(state, tx)
    params, state = run(tx, state, params, [2, 2, 3, 3])
    state = oa.convert_state(state, ADAM, params)
    params, state = run(ADAM, state, params, [4])
    want, wanted = run(ADAM, ADAM.init(PARAMS), PARAMS, range(5))
    close(params, want)
    close(state, wanted)


def test_an_array_that_occurs_twice_becomes_two():
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    state = (optax.adam(0.1).init(PARAMS)[0]._replace(mu=zeros, nu=zeros), optax.EmptyState())
    like_init(oa.convert_state(state, TX, PARAMS), TX)


def test_a_chain_moves_inside():
    """chain(clip, accumulate(adam)), then accumulate(chain(clip, adam)), as advised."""
    outside = optax.chain(optax.clip(1.0), oa.accumulate(optax.adam(0.1), 2))
    inside = oa.accumulate(optax.chain(optax.clip(1.0), optax.adam(0.1)), 2)
    params, state = run(outside, outside.init(PARAMS), PARAMS, range(2))
    got = oa.convert_state(state, inside, params)
    assert_same_bits(got.inner_state[1], state[1].inner_state)
    like_init(got, inside)


def test_nested_windows():
    nested = oa.accumulate(oa.accumulate(optax.adam(0.1), 2), 3)
    once = oa.accumulate(optax.adam(0.1), 3)
    params, state = run(once, once.init(PARAMS), PARAMS, range(3))
    got = oa.convert_state(state, nested, params)
    assert (int(got.k), int(got.inner_state.k), int(got.update_step)) == (3, 2, 1)
    like_init(got, nested)
    assert_same_bits(oa.convert_state(got, nested, params), got)  # each keeps a k of its own
    assert_same_bits(oa.convert_state(got, once, params).inner_state, state.inner_state)


NEST = optax.sgd(1.0)


@pytest.mark.parametrize("wrap", [optax.MultiSteps, oa.accumulate])
@pytest.mark.parametrize("given", [{}, {"weight": 3.0}])
def test_an_open_window_inside_multi_steps_counts_like_the_next_one(wrap, given):
    """MultiSteps handed its windows on as 1 each, accumulate hands them on as k each."""
    inner = wrap(NEST, 2)
    inner = getattr(inner, "gradient_transformation", lambda: inner)()
    old = optax.MultiSteps(inner, 2)
    tx = oa.accumulate(oa.accumulate(NEST, 2), 2)
    _, state = run(old, old.init(PARAMS), PARAMS, range(3))
    state = oa.convert_state(state, tx, PARAMS, use_grad_mean=True, **given)
    each = given.get("weight", 1.0)
    assert float(state.inner_state.weight_sum) == 2 * each
    assert float(state.weight_sum) == each
    updates, state = tx.update(gradient(3), state, PARAMS, value=0.0, weight=each)
    close(updates, jax.tree.map(lambda *g: -sum(g) / 4, *map(gradient, range(4))))
    assert int(state.inner_state.update_step) == 1


def test_an_open_window_of_multi_steps_inside_ours():
    old = oa.accumulate(optax.MultiSteps(NEST, 2).gradient_transformation(), 3)
    tx = oa.accumulate(oa.accumulate(NEST, 2), 3)
    state = old.init(PARAMS)
    _, state = run(old, state, PARAMS, range(4), jit=True)
    state = oa.convert_state(state, tx, PARAMS, use_grad_mean=True)
    assert (float(state.weight_sum), float(state.inner_state.weight_sum)) == (1, 3)
    updates, _ = run(tx, state, jax.tree.map(jnp.zeros_like, PARAMS), (4, 5))
    close(updates, jax.tree.map(lambda *g: -sum(g) / 6, *map(gradient, range(6))))


def test_a_chain_inside_ours_keeps_what_its_micro_steps_weigh():
    old = optax.chain(oa.accumulate(NEST, 3))
    tx = oa.accumulate(optax.chain(oa.accumulate(NEST, 3)), 2)
    _, state = run(old, old.init(PARAMS), PARAMS, range(2))
    state = oa.convert_state(state, tx, PARAMS)
    params, state = run(tx, state, jax.tree.map(jnp.zeros_like, PARAMS), (2, 3))
    close(params, jax.tree.map(lambda *g: -sum(g) / 4, *map(gradient, range(4))))


def test_a_window_of_multi_steps_that_is_full_at_the_new_k():
    old, tx = optax.MultiSteps(NEST, 4), oa.accumulate(NEST, 2)
    _, state = run(old, old.init(PARAMS), PARAMS, range(3))
    state = oa.convert_state(state, tx, PARAMS, use_grad_mean=True)
    assert (int(state.micro_step), int(state.k)) == (3, 4)
    updates, state = tx.update(gradient(3), state, PARAMS)
    assert oa.has_updated(state) and int(state.k) == 2
    close(updates, jax.tree.map(lambda *g: -sum(g) / 4, *map(gradient, range(4))))


@pytest.mark.parametrize("params", [{}, ()])
def test_no_parameters(params):
    for old in (optax.adam(0.1), optax.MultiSteps(optax.adam(0.1), 4)):
        state = oa.convert_state(old.init(params), TX, params)
        assert jax.tree.structure(state) == jax.tree.structure(TX.init(params))


# Replicas, meshes.


def test_rows_of_replicas_are_summed_and_made():
    with_rows, tx = (oa.accumulate(optax.sgd(1.0), 4, axis_name=a) for a in ("data", None))
    _, state = run(tx, tx.init(PARAMS), PARAMS, range(3))
    rows = oa.convert_state(state, with_rows, PARAMS)
    assert rows.grad_sum["w"].shape == (1, 3, 2) and rows.weight_sum.shape == (1,)
    like_init(rows, with_rows)
    assert_same_bits(oa.convert_state(oa.refold(rows, 8), tx, PARAMS), state)
    _, multi = run(MULTI, MULTI.init(PARAMS), PARAMS, range(3))
    adam = oa.accumulate(optax.adam(0.1), 4, axis_name="data")
    multi = oa.convert_state(multi, adam, PARAMS, use_grad_mean=True)
    close(multi.grad_sum, rows.grad_sum)
    assert multi.kept.tolist() == [3]
    eight = oa.refold(rows, 8)
    assert_same_bits(oa.convert_state(eight, with_rows, PARAMS), eight)


@pytest.mark.parametrize("auto", [True, False])
def test_new_windows_lie_as_the_parameters_do(auto):
    kinds = jax.sharding.AxisType
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kinds.Auto if auto else kinds.Explicit,))
    place = NamedSharding(mesh, P("data"))
    params = {"w": jax.device_put(jnp.ones((16, 2)), place)}
    inner = optax.adam(0.1)
    init = jax.jit(inner.init, out_shardings=oa.state_shardings(inner, params))
    tx = oa.accumulate(inner, 4)
    state = oa.convert_state(init(params), tx, params)
    for leaf in (state.grad_sum["w"], state.inner_state[0].mu["w"]):
        assert leaf.sharding.is_equivalent_to(place, 2)
    assert state.weight_sum.sharding.is_fully_replicated


# Errors.


def other(**changes):
    tx = oa.accumulate(optax.adam(0.1), 4)
    _, state = tx.update(gradient(0), tx.init(PARAMS), PARAMS)
    return state._replace(**changes)


def after(tx, micro_steps):
    return run(tx, tx.init(PARAMS), PARAMS, range(micro_steps))[1]


MULTI = optax.MultiSteps(optax.adam(0.1), 4)
TX = oa.accumulate(optax.adam(0.1), 4)
BF16 = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
ERRORS = {
    "mean or sum": (
        lambda: oa.convert_state(after(MULTI, 2), TX, PARAMS),
        r"state holds a window of optax.MultiSteps after 2 micro-steps.*use_grad_mean=True",
    ),
    "no buffer": (
        lambda: oa.convert_state(after(TX, 2), oa.accumulate(optax.adam(0.1), 1), PARAMS),
        r"state has an open window, 2 micro-steps.*k=1.*oa\.flush",
    ),
    "no buffer for MultiSteps": (
        lambda: oa.convert_state(after(MULTI, 2), oa.accumulate(optax.adam(0.1), 1), PARAMS),
        r"state has an open window, 2 micro-steps.*run optax\.MultiSteps to the end of its window",
    ),
    "no window": (
        lambda: oa.convert_state(after(TX, 2), optax.adam(0.1), PARAMS),
        r"state has an open window, 2 micro-steps.*oa\.flush",
    ),
    "no window, MultiSteps": (
        lambda: oa.convert_state(after(MULTI, 3), optax.adam(0.1), PARAMS),
        r"state has an open window, 3 micro-steps.*run optax\.MultiSteps to the end of its window",
    ),
    "other optimizer": (
        lambda: oa.convert_state(after(TX, 1), oa.accumulate(optax.sgd(0.1, 0.9), 4), PARAMS),
        r"state\.inner_state\[0\] is a ScaleByAdamState, expected a TraceState",
    ),
    "other chain": (
        lambda: oa.convert_state(optax.adam(0.1).init(PARAMS), oa.accumulate(ADAM, 4), PARAMS),
        r"state\[0\] is a ScaleByAdamState, expected a EmptyState",
    ),
    "longer chain": (
        lambda: oa.convert_state((optax.EmptyState(),) * 3, optax.chain(ADAM, ADAM), PARAMS),
        r"state is a tuple of 3, expected a tuple of 2",
    ),
    "other parameters": (
        lambda: oa.convert_state(after(TX, 1), TX, {"w": PARAMS["w"]}),
        r"state\.grad_sum has the structure",
    ),
    "other shapes": (
        lambda: oa.convert_state(after(TX, 1), TX, PARAMS | {"b": jnp.ones(3)}),
        r"state\.grad_sum\['b'\] is float32\[2\], expected the shape \(3,\) of its parameter",
    ),
    "other shapes, empty": (
        lambda: oa.convert_state(after(TX, 4), TX, PARAMS | {"b": jnp.ones(3)}),
        r"state\.grad_sum\['b'\]",
    ),
    "other shapes inside": (
        lambda: oa.convert_state(optax.adam(0.1).init(PARAMS), TX, PARAMS | {"b": jnp.ones(3)}),
        r"state\[0\]\.mu\['b'\] has shape \(2,\), expected \(3,\)",
    ),
    "another window dtype": (
        lambda: oa.convert_state(
            after(TX, 1), oa.accumulate(optax.adam(0.1), 4, accumulator_dtype="bfloat16"), PARAMS
        ),
        r"state\.grad_sum\['b'\] is float32, expected bfloat16.*cast=True",
    ),
    "another dtype inside": (
        lambda: oa.convert_state(optax.adam(0.1).init(PARAMS), TX, BF16),
        r"state\[0\]\.mu\['b'\] is float32, expected bfloat16.*cast=True",
    ),
    "a kind of numbers": (
        lambda: oa.convert_state(
            (optax.adam(0.1).init(PARAMS)[0]._replace(count=jnp.float32(3)), optax.EmptyState()),
            TX,
            PARAMS,
            cast=True,
        ),
        r"state\[0\]\.count is float32, expected int32",
    ),
    "no array": (
        lambda: oa.convert_state(
            (optax.adam(0.1).init(PARAMS)[0]._replace(count="3"), optax.EmptyState()), TX, PARAMS
        ),
        r"state\[0\]\.count is a str, expected int32\[\]",
    ),
    "updates of a schedule": (
        lambda: oa.convert_state(
            optax.adam(0.1).init(PARAMS), oa.accumulate(optax.adam(0.1), lambda n: 2), PARAMS
        ),
        r"k is a schedule.*update_step=",
    ),
    "weight missing": (
        lambda: oa.convert_state(
            after(MULTI, 2),
            oa.accumulate(optax.adam(0.1), 4, loss_reduction="sum_over_weight"),
            PARAMS,
            use_grad_mean=True,
        ),
        r"weight is missing",
    ),
    "weight of sums": (
        lambda: oa.convert_state(
            after(MULTI, 2),
            oa.accumulate(optax.adam(0.1), 4, loss_reduction="sum"),
            PARAMS,
            use_grad_mean=True,
            weight=2.0,
        ),
        r"weight was given",
    ),
    "compiled": (
        lambda: jax.jit(lambda s: oa.convert_state(s, TX, PARAMS))(after(TX, 1)),
        r"traced.*outside of jax\.jit",
    ),
    "nested around an open window": (
        lambda: oa.convert_state(after(TX, 2), oa.accumulate(TX, 2), PARAMS),
        r"the window around state\.inner_state is open, 2 micro-steps.*oa\.flush",
    ),
    "nested around an open window of MultiSteps": (
        lambda: oa.convert_state(after(MULTI, 2), oa.accumulate(TX, 2), PARAMS, use_grad_mean=True),
        r"the window around state\.inner_opt_state is open, 2 micro-steps.*run optax\.MultiSteps",
    ),
    "a schedule around an open window": (
        lambda: oa.convert_state(
            after(optax.MultiSteps(TX, 2), 2), oa.accumulate(TX, lambda n: 2), PARAMS
        ),
        r"state\.inner_opt_state has an open window inside another.*k is a schedule",
    ),
    "swapped": (
        lambda: oa.convert_state(TX, TX.init(PARAMS), PARAMS),
        r"tx is a AccumulateState.*given as the state; type oa\.convert_state\(state, tx, params\)",
    ),
    "updates below 0": (
        lambda: oa.convert_state(optax.adam(0.1).init(PARAMS), TX, PARAMS, update_step=-1),
        r"update_step is -1, expected",
    ),
    "updates, not whole": (
        lambda: oa.convert_state(optax.adam(0.1).init(PARAMS), TX, PARAMS, update_step=2.0),
        r"update_step is 2\.0, expected",
    ),
    "weight of nothing": (
        lambda: oa.convert_state(after(TX, 2), TX, PARAMS, weight=2.0),
        r"weight was given, and the state holds no window of optax\.MultiSteps",
    ),
    "NNX, without a target": (
        lambda: oa.convert_state(
            TX.init(PARAMS)._replace(grad_sum={"w": {"value": PARAMS["w"]}, "b": {"value": 1.0}}),
            TX,
            PARAMS,
        ),
        r"grad_sum.*without a target; restore it with nnx\.state\(old_optimizer\)",
    ),
    "MultiSteps, not converted": (
        lambda: oa.apply_gradients(TX, gradient(0), MULTI.init(PARAMS), PARAMS),
        r"is a MultiStepsState.*oa\.convert_state",
    ),
    "MultiSteps, asked": (
        lambda: oa.has_updated(MULTI.init(PARAMS)),
        r"is a MultiStepsState.*oa\.convert_state",
    ),
    "used without conversion": (
        lambda: TX.update(gradient(0), oa.accumulate(optax.adam(0.1), 1).init(PARAMS), PARAMS),
        r"holds no window.*oa\.convert_state\(state, tx, params\)",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_field(name):
    call, message = ERRORS[name]
    with pytest.raises((ValueError, TypeError), match=message):
        call()
