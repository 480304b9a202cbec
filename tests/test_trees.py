"""Odd trees and dtypes: what plain Optax accepts, `accumulate` accepts, with the same numbers.

Each tree is first given to plain inner, so the table holds nothing that Optax itself refuses.
"""

import dataclasses
import re
from typing import Any, NamedTuple

import chex
import flax.struct
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import optax_accum as oa

RATE = 0.5


class Pair(NamedTuple):
    w: Any
    b: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    w: Any
    b: Any
    name: str = dataclasses.field(default="layer", metadata={"static": True})


@flax.struct.dataclass
class Struct:
    w: Any
    b: Any


@chex.dataclass
class Chexed:
    w: Any
    b: Any


def ramp(shape, dtype=np.float32, start=1.0):
    """Numbers that every dtype of the tables holds exactly, as do their means over 3."""
    return (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 3 + start).astype(dtype)


def pair(make, *arrays):
    return make(w=arrays[0], b=arrays[1])


# name: (params, gradient). The window's i-th micro-gradient is the gradient times (0, 1, 2)[i],
# whose mean is the gradient itself.
TREES = {
    "single array": (ramp((2, 3)), ramp((2, 3))),
    "scalar": (jnp.float32(1), jnp.float32(2)),
    "Python float": (1.0, 2.0),
    "Python floats": ({"w": 1.0, "b": [2.0]}, {"w": 4.0, "b": [6.0]}),
    "Python int parameter": (3, 2.0),
    "tuple": ((ramp(3), ramp(2)), (ramp(3), ramp(2))),
    "list": ([ramp(3), [ramp(2)]], [ramp(3), [ramp(2)]]),
    "NamedTuple": (Pair(ramp(3), ramp(2)), Pair(ramp(3), ramp(2))),
    "dataclass": (Layer(ramp(3), ramp(2)), Layer(ramp(3), ramp(2))),
    "flax.struct": (Struct(ramp(3), ramp(2)), Struct(ramp(3), ramp(2))),
    "chex.dataclass": (pair(Chexed, ramp(3), ramp(2)), pair(Chexed, ramp(3), ramp(2))),
    "zero-size": ({"w": np.zeros((0, 3)), "b": ramp(2)}, {"w": np.zeros((0, 3)), "b": ramp(2)}),
    "only zero-size": (np.zeros((3, 0), np.float32), np.zeros((3, 0), np.float32)),
    "None leaf": ({"w": ramp(3), "b": None}, {"w": ramp(3), "b": None}),
    "None gradient": ({"w": ramp(3), "b": ramp(2)}, {"w": ramp(3), "b": None}),
    "only None": ({"w": None}, {"w": None}),
    "None": (None, None),
    "dict, empty": ({}, {}),
    "tuple, empty": ((), ()),
    "nested, empty": ({"a": {}, "b": [()]}, {"a": {}, "b": [()]}),
    "function leaf": ({"w": ramp(3), "act": jnp.tanh}, {"w": ramp(3), "act": None}),
    "string leaf": ({"w": ramp(3), "act": "tanh"}, {"w": ramp(3), "act": None}),
    "key": ({"w": ramp(3), "key": jax.random.key(0)}, {"w": ramp(3), "key": None}),
    "legacy key": ({"w": ramp(3), "key": jax.random.PRNGKey(0)}, {"w": ramp(3), "key": None}),
    "integer parameter": ({"w": ramp(3), "n": np.arange(3)}, {"w": ramp(3), "n": None}),
    "integer gradient": (ramp(3), ramp(3, np.int32)),
    "integers": (ramp(3, np.int32), ramp(3, np.int32)),
    "bool parameter": ({"w": ramp(3), "mask": np.ones(2, bool)}, {"w": ramp(3), "mask": None}),
    "NumPy float64": (ramp(3, np.float64), ramp(3, np.float64)),
    "NumPy scalar": (np.float32(1), np.float32(2)),
    "jax arrays": ({"w": jnp.asarray(ramp(3))}, {"w": jnp.asarray(ramp(3))}),
    "rank 5": (ramp((1, 2, 1, 2, 1)), ramp((1, 2, 1, 2, 1))),
}


def is_number(leaf):
    if isinstance(leaf, (int, float)):
        return True
    return hasattr(leaf, "dtype") and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)


def times(factor, gradient):
    """The gradient times an integer, in the gradient's own types."""
    return jax.tree.map(
        lambda g: g * float(factor) if isinstance(g, float) else g * np.asarray(factor, g.dtype),
        gradient,
    )


def assert_like(got, want):
    """Same structure, dtypes, shapes and numbers; what is no array is the same object."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if not is_number(b):
            assert a is b
            continue
        assert jnp.result_type(a) == jnp.result_type(b)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("name", TREES)
def test_a_window_gives_what_plain_sgd_gives_for_its_mean(name, k):
    params, gradient = TREES[name]
    plain = optax.sgd(RATE)
    want, _ = plain.update(gradient, plain.init(params), params)
    tx = oa.accumulate(optax.sgd(RATE), k)
    state = tx.init(params)
    for _ in range(2):
        for i in range(k):
            micro = gradient if k == 1 else times(i, gradient)
            updates, state = tx.update(micro, state, params)
            assert bool(oa.has_updated(state)) == (i == k - 1)
            if i < k - 1:
                zeros = jax.tree.map(lambda u: jnp.zeros(jnp.shape(u), jnp.result_type(u)), want)
                assert_like(updates, zeros)
        assert_like(updates, want)
    assert int(state.update_step) == 2


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("name", TREES)
def test_without_params(name, k):
    params, gradient = TREES[name]
    plain = optax.sgd(RATE)
    want, _ = plain.update(gradient, plain.init(params))
    tx = oa.accumulate(optax.sgd(RATE), k)
    state = tx.init(params)
    for i in range(k):
        updates, state = tx.update(gradient if k == 1 else times(i, gradient), state)
    assert_like(updates, want)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("name", TREES)
def test_weights_skips_and_flush(name, k):
    params, gradient = TREES[name]
    plain = optax.sgd(RATE)
    want, _ = plain.update(gradient, plain.init(params), params)
    tx = oa.accumulate(optax.sgd(RATE), k, nonfinite="skip_micro_step")
    state = tx.init(params)
    updates, state = tx.update(gradient, state, params, weight=2.0)
    if k > 1:
        updates, state = oa.flush(tx, state, params)
        want = flushed(params, gradient, want)
    numbers = [u for u in jax.tree.leaves(updates) if is_number(u)]
    expected = [u for u in jax.tree.leaves(want) if is_number(u)]
    for got, right in zip(numbers, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(right))
    assert bool(oa.has_updated(state)) and int(state.skipped) == 0
    updates, state = oa.flush(tx, state, params)
    assert not oa.has_updated(state)
    assert all(not np.any(u) for u in jax.tree.leaves(updates) if is_number(u))


def flushed(params, gradient, want):
    """flush has no gradient: a parameter that is an array and got none has an update of zero."""
    is_none = lambda x: x is None  # noqa: E731
    fill = lambda p, g, u: np.zeros(np.shape(p)) if g is None and is_number(p) else u  # noqa: E731
    return jax.tree.map(fill, params, gradient, want, is_leaf=is_none)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("name", TREES)
def test_apply_gradients_touches_only_what_has_a_gradient(name, k):
    params, gradient = TREES[name]
    tx = oa.accumulate(optax.sgd(RATE), k)
    state, new = tx.init(params), params
    for i in range(k):
        new, state = oa.apply_gradients(tx, gradient if k == 1 else times(i, gradient), state, new)
    assert jax.tree.structure(new) == jax.tree.structure(params)
    none = lambda x: x is None  # noqa: E731
    grads = jax.tree.leaves(gradient, is_leaf=none)
    before = jax.tree.leaves(params, is_leaf=none)
    for p, g, q in zip(before, grads, jax.tree.leaves(new, is_leaf=none), strict=True):
        if g is None:
            assert q is p
        else:
            right = (np.asarray(p) - RATE * np.asarray(g)).astype(jnp.result_type(p))
            np.testing.assert_array_equal(np.asarray(q), right)
            assert jnp.result_type(q) == jnp.result_type(p)


@pytest.mark.parametrize("name", ["None leaf", "NamedTuple", "dataclass", "zero-size", "None"])
def test_the_same_under_jit(name):
    params, gradient = TREES[name]
    plain = optax.adam(RATE)
    want, _ = plain.update(gradient, plain.init(params), params)
    tx = oa.accumulate(optax.adam(RATE), 2)
    state, update = jax.jit(tx.init)(params), jax.jit(tx.update)
    for _ in range(2):
        updates, state = update(gradient, state, params)
    assert jax.tree.structure(updates) == jax.tree.structure(want)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), updates, want)


def squares(tree):
    return (tree["w"] ** 2).sum()


FLOAT0 = {
    "integers": {"w": ramp(3), "n": np.arange(3)},
    "bools": {"w": ramp(3), "n": np.ones(2, bool)},
    "key": {"w": ramp(3), "n": jax.random.key(0)},
    "keys": {"w": ramp(3), "n": jax.random.split(jax.random.key(0), 2)},
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("name", FLOAT0)
def test_float0_gradients_pass_through(name, k, jit):
    params = FLOAT0[name]
    inner = optax.masked(optax.sgd(RATE), {"w": True, "n": False})
    gradient = jax.grad(squares, allow_int=True)(params)
    want, _ = inner.update(gradient, inner.init(params), params)
    tx = oa.accumulate(inner, k)

    def micro_step(state, params):
        return tx.update(jax.grad(squares, allow_int=True)(params), state, params)

    micro_step = jax.jit(micro_step) if jit else micro_step
    state = tx.init(params)
    for _ in range(k):
        updates, state = micro_step(state, params)
        assert updates["n"].dtype == jax.dtypes.float0
    np.testing.assert_array_equal(updates["w"], want["w"])
    new, _ = oa.apply_gradients(tx, gradient, state, params, last=True)
    assert new["n"] is params["n"]
    np.testing.assert_allclose(new["w"], params["w"] - RATE * 2 * params["w"], rtol=1e-6)


@pytest.mark.parametrize("jit", [False, True])
def test_a_typed_key_in_the_state_of_inner_moves_on(jit):
    params = np.zeros(3, np.float32)
    plain = optax.add_noise(1.0, 0.0, jax.random.key(1))
    tx = oa.accumulate(plain, 2)
    want_state, state = plain.init(params), tx.init(params)
    update = jax.jit(tx.update) if jit else tx.update
    drawn = []
    for _ in range(3):
        want, want_state = plain.update(params, want_state, params)
        for _ in range(2):
            updates, state = update(params, state, params)
        np.testing.assert_allclose(updates, want, rtol=1e-6)
        drawn.append(float(updates[0]))
    assert len(set(drawn)) == 3


DTYPES = [
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
    ml_dtypes.bfloat16,
    np.float16,
    np.float32,
    np.complex64,
]


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("grad_dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("param_dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_dtypes(param_dtype, grad_dtype, k):
    """The window's gradient is exact and inner sees it in promote_types(parameter, gradient)."""
    params, gradient = jnp.asarray(ramp(4), param_dtype), jnp.asarray(ramp(4), grad_dtype)
    seen = []
    inner = spy(seen)
    tx = oa.accumulate(inner, k)
    state = tx.init(params)
    if np.issubdtype(grad_dtype, np.complexfloating) > np.issubdtype(
        param_dtype, np.complexfloating
    ):
        if k > 1:
            with pytest.raises(TypeError, match="cannot hold"):
                tx.update(gradient, state, params)
            return
    for i in range(k):
        updates, state = tx.update(gradient if k == 1 else gradient * i, state, params)
    np.testing.assert_array_equal(np.asarray(updates, np.complex64), ramp(4))
    expected = grad_dtype if k == 1 else common(param_dtype, grad_dtype)
    assert updates.dtype == seen[-1] == expected


def common(a, b):
    """jax's promotion; an 8-bit float promotes with nothing else, so as a float32 there."""
    if a == b:
        return np.dtype(a)
    wide = [np.float32 if np.dtype(d).itemsize == 1 else d for d in (a, b)]
    return jnp.promote_types(*wide)


def spy(seen):
    def update(grads, state, params=None):
        seen.append(jax.tree.leaves(grads)[0].dtype)
        return grads, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


POISON = [np.nan, np.inf, -np.inf]


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_poison_is_seen_in_every_dtype(dtype, poison, k):
    params = jnp.zeros(3, dtype)
    good, bad = jnp.ones(3, dtype), jnp.ones(3, dtype).at[1].set(poison)
    tx = oa.accumulate(optax.sgd(1.0), k, nonfinite="skip_micro_step")
    state = tx.init(params)
    updates, state = tx.update(bad, state, params)
    assert int(state.skipped) == 1 and not oa.has_updated(state)
    updates, state = tx.update(good, state, params)
    np.testing.assert_array_equal(np.asarray(updates, np.complex64), -np.ones(3))
    assert oa.has_updated(state)


def test_imaginary_poison():
    params = jnp.zeros(2, jnp.complex64)
    tx = oa.accumulate(optax.sgd(1.0), 2, nonfinite="skip_micro_step")
    state = tx.init(params)
    _, state = tx.update(jnp.asarray([1, 1 + 1j * np.nan], jnp.complex64), state, params)
    assert int(state.skipped) == 1


def test_float16_sums_do_not_overflow():
    params, gradient = jnp.zeros(4, jnp.float16), jnp.full(4, 2e4, jnp.float16)
    tx = oa.accumulate(optax.sgd(1.0), 8)
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(8):
        updates, state = update(gradient, state, params)
    assert updates.dtype == jnp.float16
    np.testing.assert_array_equal(updates, -np.full(4, 2e4, np.float16))


def test_float16_gradients_of_large_weights_do_not_overflow():
    """A weight counts tokens: weight times gradient leaves float16's range at once."""
    params, gradient = jnp.zeros(2, jnp.float16), jnp.full(2, 2e4, jnp.float16)
    tx = oa.accumulate(optax.sgd(1.0), 2)
    state = tx.init(params)
    for weight in (4096.0, 8192.0):
        updates, state = tx.update(gradient, state, params, weight=weight)
    np.testing.assert_array_equal(updates, -np.full(2, 2e4, np.float16))


def test_complex_gradients_are_kept():
    params = jnp.zeros(2, jnp.complex64)
    tx = oa.accumulate(optax.sgd(1.0), 2)
    state = tx.init(params)
    for grad, weight in (([1 + 2j, 3], 1.0), ([-2j, 1j], 3.0)):
        updates, state = tx.update(
            jnp.asarray(grad, jnp.complex64), state, params, weight=jnp.float32(weight)
        )
    np.testing.assert_allclose(updates, [-(1 - 4j) / 4, -(3 + 3j) / 4], rtol=1e-6)
    assert updates.dtype == jnp.complex64


def test_complex128_and_float64_to_their_last_digits(x64):
    rng = np.random.default_rng(0)
    real, imaginary = rng.normal(size=(2, 5, 3))
    weights = np.float64([1, 4097, 3, 1000, 17])
    grads = {"c": real + 1j * imaginary, "f": real}
    params = jax.tree.map(lambda g: jnp.zeros(3, g.dtype), grads)
    tx = oa.accumulate(optax.sgd(1.0), 5)
    state = tx.init(params)
    assert state.grad_sum["c"].dtype == jnp.complex128
    assert state.grad_sum["f"].dtype == jnp.float64
    for i, weight in enumerate(weights):
        micro = jax.tree.map(lambda g, i=i: jnp.asarray(g[i]), grads)
        updates, state = tx.update(micro, state, params, weight=weight)
    for name in grads:
        right = -(weights[:, None] * grads[name]).sum(0) / weights.sum()
        np.testing.assert_allclose(updates[name], right, rtol=1e-12)


@pytest.mark.parametrize("k", [1, 4])
def test_float64_means_without_weights_to_1e_12(k, x64):
    grads = np.random.default_rng(0).normal(size=(k, 7)) + 1e3
    params = jnp.zeros(7)
    tx = oa.accumulate(optax.sgd(1.0), k)
    state = tx.init(params)
    for grad in grads:
        updates, state = tx.update(grad, state, params)
    assert updates.dtype == jnp.float64
    np.testing.assert_allclose(updates, -grads.mean(0), rtol=1e-12)


REFUSED = {
    "complex into float32": (np.float32, np.complex64),
    "complex into bfloat16": (ml_dtypes.bfloat16, np.complex64),
    "float64 into float32": (np.float32, np.float64),
    "float64 into float16": (np.float16, np.float64),
    "complex128 into complex64": (np.complex64, np.complex128),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_a_window_that_would_lose_digits_refuses_and_says_what_to_type(name, jit, x64):
    param_dtype, grad_dtype = REFUSED[name]
    params = {"layer": jnp.zeros(2, param_dtype)}
    grads = {"layer": jnp.ones(2, grad_dtype)}
    tx = oa.accumulate(optax.sgd(1.0), 2)
    update = jax.jit(tx.update) if jit else tx.update
    with pytest.raises(TypeError, match="cannot hold") as error:
        update(grads, tx.init(params), params)
    assert "['layer']" in str(error.value)
    remedy = re.search(r"accumulator_dtype=jnp\.(\w+)", str(error.value))
    assert remedy or name.startswith("complex into")
    if remedy:  # then it works
        tx = oa.accumulate(optax.sgd(1.0), 2, accumulator_dtype=getattr(jnp, remedy[1]))
        state = tx.init(params)
        for _ in range(2):
            updates, state = tx.update(grads, state, params)
        np.testing.assert_array_equal(updates["layer"], -np.ones(2))


def test_an_explicit_float32_window_takes_float64_gradients(x64):
    params, grads = jnp.zeros(2), jnp.asarray([1.0, 1e-3])
    tx = oa.accumulate(optax.sgd(1.0), 2, accumulator_dtype=jnp.float32)
    state = tx.init(params)
    assert state.grad_sum.dtype == jnp.float32
    for _ in range(2):
        updates, state = tx.update(grads, state, params)
    assert updates.dtype == jnp.float64
    np.testing.assert_allclose(updates, -np.asarray(grads), rtol=1e-7)


def test_an_explicit_window_never_takes_complex_gradients_apart():
    tx = oa.accumulate(optax.sgd(1.0), 2, accumulator_dtype=jnp.float32)
    with pytest.raises(TypeError, match=r"accumulator_dtype=jnp\.complex64"):
        tx.init({"z": jnp.zeros(2, jnp.complex64)})


def test_stochastic_rounding_keeps_the_mean():
    """1024 x bfloat16(1e-3): a bfloat16 sum that rounds to nearest stops at 0.5."""
    size = 4096
    params = jnp.zeros(size, jnp.bfloat16)
    gradient = jnp.full(size, 1e-3, jnp.bfloat16)
    exact = 1024 * float(gradient[0])
    tx = oa.accumulate(optax.sgd(1.0), 1024, accumulator_dtype=jnp.bfloat16, loss_reduction="sum")

    @jax.jit
    def window(state):
        state, _ = jax.lax.scan(
            lambda state, _: (tx.update(gradient, state, params)[1], None), state, None, 1023
        )
        return state

    state = window(tx.init(params))
    assert state.grad_sum.dtype == jnp.bfloat16
    sums = np.asarray(state.grad_sum, np.float64)
    right = exact * 1023 / 1024
    spread = sums.std()
    assert 0.004 < spread < 0.08  # random, at the scale of sqrt(1024) roundings
    assert abs(sums.mean() - right) < 4 * spread / np.sqrt(size)
    # neighbouring elements draw independent bits
    centred = (sums - sums.mean()) / spread
    assert abs((centred[:-1] * centred[1:]).mean()) < 4 / np.sqrt(size)


def test_stochastic_rounding_is_unbiased_for_both_signs_and_the_first_micro_gradient():
    size = 8192
    values = np.float32([1 + 1 / 512, -(1 + 1 / 512), 3e-39, -1.7, 300.3])
    params = jnp.zeros((len(values), size), jnp.bfloat16)
    grads = jnp.broadcast_to(values[:, None], params.shape)
    tx = oa.accumulate(optax.sgd(1.0), 4, accumulator_dtype=jnp.bfloat16)
    _, state = tx.update(grads, tx.init(params), params)
    sums = np.asarray(state.grad_sum, np.float64)
    for row, value in zip(sums, values.astype(np.float64), strict=True):
        distinct = np.unique(row)
        assert len(distinct) <= 2 and distinct[0] <= value <= distinct[-1]
        assert abs(row.mean() - value) <= 4 * row.std() / np.sqrt(size) + 1e-12 * abs(value)


def test_bfloat16_windows_carry_poison_and_zero():
    grads = jnp.asarray([np.nan, np.inf, -np.inf, 0.0, 3.38e38], jnp.float32)
    params = jnp.zeros(5)
    tx = oa.accumulate(optax.sgd(1.0), 2, accumulator_dtype=jnp.bfloat16, loss_reduction="sum")
    _, state = tx.update(grads, tx.init(params), params)
    got = np.asarray(state.grad_sum, np.float32)
    np.testing.assert_array_equal(got[:4], np.float32([np.nan, np.inf, -np.inf, 0]))
    np.testing.assert_allclose(got[4], 3.38e38, rtol=2**-7)


def test_bfloat16_windows_of_many_kinds():
    """Complex and float8 leaves beside float ones, each summed in a dtype that holds it."""
    params = {
        "z": jnp.zeros(2, jnp.complex64),
        "e": jnp.zeros(2, jnp.float8_e4m3fn),
        "w": jnp.zeros(2),
    }
    grads = jax.tree.map(lambda p: jnp.ones(2, p.dtype), params)
    with pytest.raises(TypeError, match="complex64"):
        oa.accumulate(optax.sgd(1.0), 2, accumulator_dtype=jnp.bfloat16).init(params)
    del params["z"], grads["z"]
    tx = oa.accumulate(optax.sgd(1.0), 2, accumulator_dtype=jnp.bfloat16)
    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update(grads, state, params)
    assert {str(u.dtype) for u in jax.tree.leaves(updates)} == {"float32", "float8_e4m3fn"}
    jax.tree.map(lambda u: np.testing.assert_array_equal(u.astype("f4"), -np.ones(2)), updates)


def test_a_static_k_of_1_holds_no_buffer_and_is_the_identity():
    params = {"w": jnp.ones((2, 3), jnp.bfloat16), "b": jnp.ones(3)}
    rng = np.random.default_rng(0)
    plain, tx = optax.adam(0.1), oa.accumulate(optax.adam(0.1), 1)
    want_state, state = plain.init(params), tx.init(params)
    assert state.grad_sum is None
    for _ in range(3):
        grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params)
        want, want_state = plain.update(grads, want_state, params)
        updates, state = tx.update(grads, state, params)
        assert_like(updates, want)
        assert state.grad_sum is None and oa.has_updated(state)
    assert_like(state.inner_state, want_state)
    assert int(state.update_step) == 3


@pytest.mark.parametrize("k", [np.int64(1), np.uint8(1), jnp.int32(1)], ids=str)
def test_other_integers_of_1_hold_no_buffer_either(k):
    assert oa.accumulate(optax.sgd(1.0), k).init(jnp.ones(2)).grad_sum is None


def test_a_scheduled_k_of_1_keeps_its_buffer():
    tx = oa.accumulate(optax.sgd(1.0), lambda update_step: 1)
    state = tx.init(jnp.ones(2))
    assert state.grad_sum is not None
    updates, state = tx.update(jnp.full(2, 3.0), state, jnp.ones(2))
    np.testing.assert_array_equal(updates, [-3, -3])


@pytest.mark.parametrize("scheduled", [False, True])
def test_the_largest_k(scheduled):
    k = 2**31 - 1
    tx = oa.accumulate(optax.sgd(1.0), (lambda update_step: k) if scheduled else k)
    params = jnp.zeros(2)
    state, update = tx.init(params), jax.jit(tx.update)
    assert int(state.k) == k
    for grad in (1.0, 3.0):
        updates, state = update(jnp.full(2, grad), state, params)
        assert not oa.has_updated(state) and not np.any(updates)
    late = state._replace(micro_step=jnp.int32(k - 2))
    updates, state = oa.flush(tx, state, params)
    np.testing.assert_array_equal(updates, [-2, -2])
    _, late = update(jnp.full(2, 5.0), late, params)
    assert not oa.has_updated(late) and int(late.micro_step) == k - 1
    updates, late = update(jnp.full(2, 7.0), late, params)
    np.testing.assert_array_equal(updates, [-4, -4])
    assert int(late.micro_step) == 0 and int(late.update_step) == 1


@pytest.mark.parametrize("old, new", [(4, 2), (2, 4), (3, 7), (4, 3)])
def test_resumed_with_another_k_an_open_window_closes_at_its_own(old, new):
    grads = np.random.default_rng(0).normal(size=(old + new, 3)).astype(np.float32)
    params = jnp.zeros(3)
    first, second = (oa.accumulate(optax.sgd(1.0), k) for k in (old, new))
    state, tx, closed = first.init(params), first, []
    for i, grad in enumerate(grads):
        updates, state = tx.update(grad, state, params)
        tx = second
        if oa.has_updated(state):
            closed.append((i, np.asarray(updates)))
    assert [i for i, _ in closed] == [old - 1, old + new - 1]
    np.testing.assert_allclose(closed[0][1], -grads[:old].mean(0), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(closed[1][1], -grads[old:].mean(0), rtol=1e-5, atol=1e-7)


def test_resumed_between_two_windows_the_new_k_counts_at_once():
    params, tx = jnp.zeros(2), oa.accumulate(optax.sgd(1.0), 4)
    state = tx.init(params)
    resumed = oa.accumulate(optax.sgd(1.0), 2)
    for i in range(2):
        _, state = resumed.update(jnp.ones(2), state, params)
        assert bool(oa.has_updated(state)) == (i == 1)


WRONG_TREES = {
    "missing leaf": ({"w": jnp.zeros(2), "b": jnp.zeros(1)}, {"w": jnp.ones(2)}),
    "more leaves": ({"w": jnp.zeros(2)}, {"w": jnp.ones(2), "b": jnp.ones(1)}),
    "another container": ({"w": [jnp.zeros(2)]}, {"w": (jnp.ones(2),)}),
    "another shape": ({"w": jnp.zeros(2)}, {"w": jnp.ones(3)}),
    "broadcastable": ({"w": jnp.zeros((2, 3))}, {"w": jnp.ones((1, 3))}),
    "scalar": ({"w": jnp.zeros(2)}, {"w": jnp.ones(())}),
    "gradient of a function": ({"w": jnp.tanh}, {"w": jnp.ones(2)}),
    "gradient of None": ({"w": None}, {"w": jnp.ones(2)}),
}


@pytest.mark.parametrize("name", WRONG_TREES)
def test_gradients_that_do_not_fit_are_an_error_that_says_what_to_do(name):
    params, grads = WRONG_TREES[name]
    tx = oa.accumulate(optax.sgd(1.0), 2)
    state = tx.init(params)
    with pytest.raises(ValueError, match=r"differentiated|differentiate the same tree"):
        tx.update(grads, state, params)
