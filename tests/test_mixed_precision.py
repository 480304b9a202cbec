"""bfloat16 and float16: narrow compute, wide windows, loss scales, rematerialisation."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.dynamic_scale import DynamicScale

import optax_accum as oa
from benchmarks import rounding
from optax_accum._rounding import round_to

K = 4


def scale_of(value):
    return DynamicScale(scale=jnp.float32(value), fin_steps=jnp.int32(0))


# bfloat16 compute, a float32 window.


def narrow_loss(params, x):
    """Float32 parameters, cast inside; the gradient of each micro-batch is a bfloat16 number."""
    return jnp.mean((params["w"].astype(jnp.bfloat16) * x).astype(jnp.float32))


def bfloat16_gradients(rows):
    rng = np.random.default_rng(0)
    return jnp.asarray(1e-3 * (1 + rng.random((rows, 1, 8))), jnp.bfloat16)


@pytest.mark.parametrize("params_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("driver", ["time", "space"])
def test_bfloat16_gradients_in_a_float32_window(driver, params_dtype):
    """512 of them; a bfloat16 sum that rounds to nearest would stagnate near 256."""
    k, x = 512, bfloat16_gradients(512)
    params = {"w": jnp.ones(8, params_dtype)}
    want = np.asarray(x, np.float64).mean((0, 1)) / 8
    rtol = 1e-6 if params_dtype == "float32" else 2**-8
    if driver == "space":
        _, grads = jax.jit(oa.value_and_grad(narrow_loss, k))(params, x.reshape(k, 8))
    else:
        tx = oa.accumulate(optax.sgd(1.0), k + 1, loss_reduction="sum")

        def take(state, x):
            return tx.update(jax.grad(narrow_loss)(params, x), state, params)[1], None

        state, _ = jax.jit(functools.partial(jax.lax.scan, take))(tx.init(params), x)
        assert state.grad_sum["w"].dtype == jnp.float32
        np.testing.assert_allclose(state.grad_sum["w"], want * k, rtol=1e-6)  # no digit is lost
        updates, _ = oa.flush(tx, state, params)
        grads = jax.tree.map(lambda u: -u.astype("f4") / k, updates)
    np.testing.assert_allclose(np.asarray(grads["w"], np.float64), want, rtol=rtol)


# bfloat16 windows, rounded stochastically.


@pytest.mark.parametrize("value", [1 + 1 / 512, -(3 + 1 / 64 + 1 / 200), 1e-30, 0.3, 6e4 + 17])
def test_the_law_of_stochastic_rounding(value):
    """Up with probability (x - below) / (above - below), to one of the two neighbours."""
    size = 1 << 16
    x = jnp.full(size, value, jnp.float32)
    got = np.asarray(round_to(x, jnp.bfloat16, (3, 5)), np.float64)
    exact = float(np.float32(value))
    bits = np.float32(value).view(np.uint32) & np.uint32(0xFFFF0000)
    inner = float(bits.view(np.float32))
    outer = float(np.uint32(bits + np.uint32(0x10000)).view(np.float32))
    assert set(np.unique(got)) <= {inner, outer}
    probability = (exact - inner) / (outer - inner)
    spread = np.sqrt(probability * (1 - probability) / size)
    assert abs((got == outer).mean() - probability) <= 4 * spread


def test_bfloat16_numbers_are_not_moved():
    x = jnp.asarray(np.random.default_rng(0).normal(size=4096), jnp.bfloat16)
    got = round_to(x.astype(jnp.float32), jnp.bfloat16, (1, 2))
    np.testing.assert_array_equal(np.asarray(got, "f4"), np.asarray(x, "f4"))


def test_no_bits_are_added_to_what_is_not_finite():
    bits = [0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0x7F800001, 0x7F800000, 0xFF800000]
    x = jnp.asarray(np.uint32(bits).view(np.float32)[:, None].repeat(64, 1))
    got = np.asarray(round_to(x, jnp.bfloat16, (1, 2)), np.float32)
    assert np.isnan(got[:4]).all() and (got[4] == np.inf).all() and (got[5] == -np.inf).all()


def test_roundings_differ_between_clocks_leaves_and_elements():
    x = jnp.full((64, 64), 1 + 1 / 256, jnp.float32)  # half way
    draws = [
        np.asarray(round_to(x, jnp.bfloat16, clocks), "f4") > 1
        for clocks in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0))
    ]
    for i, one in enumerate(draws):
        for other in draws[i + 1 :]:
            assert abs((one == other).mean() - 0.5) < 4 * 0.5 / 64
        for axis in (0, 1):  # neighbours
            assert abs((one == np.roll(one, 1, axis)).mean() - 0.5) < 4 * 0.5 / 64


def test_a_bfloat16_window_is_half_the_bytes_and_has_no_temporaries():
    params = {f"w{i}": jnp.zeros((256, 256)) for i in range(4)}
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    tx = oa.accumulate(optax.sgd(1.0), 4, accumulator_dtype=jnp.bfloat16)
    state = tx.init(params)
    assert sum(x.nbytes for x in jax.tree.leaves(state.grad_sum)) == size // 2
    call = jax.jit(
        lambda params, state, grads: oa.apply_gradients(tx, grads, state, params),
        donate_argnums=(0, 1),
    )
    found = call.lower(params, state, params).compile().memory_analysis()
    assert found.temp_size_in_bytes < 0.01 * size


@pytest.mark.full
def test_the_benchmark_of_rounding_compares_before_it_times(monkeypatch):
    rows = rounding.measured(4096, 2, 2)
    assert [row["method"] for row in rows] == list(rounding.METHODS)
    assert all(row["ratio_to_floor"] > 0 for row in rows)
    wrong = jnp.bfloat16, lambda total, grad, number: total + 2 * grad.astype(total.dtype)
    monkeypatch.setitem(rounding.METHODS, "bfloat16 window", wrong)
    with pytest.raises(AssertionError, match="bfloat16 window differs"):
        rounding.measured(4096, 2, 2)


# float16 with a loss scale. The true gradient of each micro-step is `x`.


def half_loss(w, x):
    return (w.astype(jnp.float16) * x.astype(jnp.float16)).astype(jnp.float32).mean()


def scaled_calls(driver):
    """(w, state, x, scale) -> (w, state), one micro-step of a window of K, float16 inside."""

    def make(nonfinite):
        tx = oa.accumulate(optax.sgd(1.0), K, nonfinite=nonfinite)

        def by_flax(w, state, x, scale):
            _, _, loss, grads = scale_of(scale).value_and_grad(half_loss)(w, x)
            return oa.apply_gradients(tx, grads, state, w, value=loss)

        def by_micro_step(w, state, x, scale):
            loss_fn = oa.with_loss_scale(half_loss, scale)
            _, w, state = oa.micro_step(loss_fn, tx, engine=engine)(w, state, x)
            return w, state

        engine = "auto" if driver == "micro_step" else driver
        return tx, jax.jit(by_flax if driver == "apply_gradients" else by_micro_step)

    return make


TIME = ["apply_gradients", "micro_step"]
SMALL = 2e-9  # float16 ends at 6e-8


@pytest.mark.parametrize("driver", [*TIME, "carry", "refs"])
def test_a_scale_that_changes_inside_a_window_is_harmless(driver):
    """True gradient 1; scales 1024, 1024, 512, 512. Adding scaled ones, and dividing: 1.5."""
    tx, call = scaled_calls(driver)("propagate")
    w, state = jnp.zeros([]), tx.init(jnp.zeros([]))
    for scale in (1024, 1024, 512, 512):
        w, state = call(w, state, jnp.ones(1), jnp.float32(scale))
    assert float(w) == -1.0 and oa.has_updated(state)


@pytest.mark.parametrize("driver", [*TIME, "refs"])
def test_gradients_below_float16_are_kept(driver):
    def tiny(w, x):
        return half_loss(w, x) * SMALL

    tx = oa.accumulate(optax.sgd(1.0), K)
    w, state = jnp.zeros([]), tx.init(jnp.zeros([]))
    scale = jnp.float32(2.0**20)
    for _ in range(K):
        if driver == "apply_gradients":
            _, _, loss, grads = scale_of(scale).value_and_grad(tiny)(w, jnp.ones(1))
            w, state = oa.apply_gradients(tx, grads, state, w, value=loss)
        else:
            engine = "auto" if driver == "micro_step" else driver
            loss_fn = oa.with_loss_scale(tiny, scale)
            _, w, state = oa.micro_step(loss_fn, tx, engine=engine)(w, state, jnp.ones(1))
    np.testing.assert_allclose(w, -SMALL, rtol=1e-3)
    assert float(jax.grad(tiny)(jnp.zeros([]), jnp.ones(1))) == 0.0


POLICIES = {  # (moved in the window with the overflow, skipped, updated)
    "propagate": (None, 0, True),
    "skip_micro_step": (-1.0, 1, True),
    "skip_window": (0.0, K, False),
}


@pytest.mark.parametrize("nonfinite", POLICIES)
@pytest.mark.parametrize("driver", TIME)
def test_an_overflow_in_one_micro_step(driver, nonfinite):
    """1024 * 100 is past 65504."""
    tx, call = scaled_calls(driver)(nonfinite)
    w, state = jnp.zeros([]), tx.init(jnp.zeros([]))
    for x in (1.0, 100.0, 1.0, 1.0):
        w, state = call(w, state, jnp.full(1, x), jnp.float32(1024))
    moved, skipped, updated = POLICIES[nonfinite]
    assert not np.isfinite(w) if moved is None else float(w) == moved
    assert (int(state.skipped), bool(state.updated)) == (skipped, updated)
    w = jnp.zeros([])
    for _ in range(K):  # the next window is clean
        w, state = call(w, state, jnp.ones(1), jnp.float32(1024))
    assert float(w) == -1.0


@pytest.mark.parametrize("nonfinite", ["propagate", "skip_micro_step"])
def test_an_overflow_in_one_micro_step_of_the_space_driver(nonfinite):
    """4096 / 4 * 100 is past 65504."""
    loss_fn = oa.with_loss_scale(half_loss, 4096.0)
    grad_fn = oa.value_and_grad(loss_fn, K, nonfinite=nonfinite, has_stats=True)
    (loss, stats), grad = jax.jit(grad_fn)(jnp.ones([]), jnp.array([1.0, 100.0, 1.0, 1.0]))
    if nonfinite == "propagate":
        assert not np.isfinite(grad) and int(stats.skipped) == 0
    else:
        assert (float(grad), float(loss), int(stats.skipped)) == (1.0, 1.0, 1)


@pytest.mark.parametrize("engine", ["carry", "refs"])
def test_the_space_driver_keeps_what_float16_loses(engine):
    x = jnp.asarray(np.random.default_rng(0).normal(size=16) + 2, jnp.float32)

    def tiny(w, x):
        return half_loss(w, x) * SMALL

    _, plain = oa.value_and_grad(tiny, K)(jnp.ones([]), x)
    loss_fn = oa.with_loss_scale(tiny, 2.0**24)
    loss, grad = jax.jit(oa.value_and_grad(loss_fn, K, engine=engine))(jnp.ones([]), x)
    want = np.float64(x.astype(jnp.float16)).mean() * SMALL
    assert float(plain) == 0.0
    np.testing.assert_allclose(grad, want, rtol=2e-3)
    np.testing.assert_allclose(loss, want, rtol=1e-3)


def test_weights_and_auxiliary_outputs_are_not_scaled():
    def loss_fn(w, batch):
        x, mask = batch
        tokens = mask.sum()
        half = (w.astype(jnp.float16) * x.astype(jnp.float16)).astype(jnp.float32)
        return (half * mask).sum() / tokens, {"tokens": tokens}

    x, mask = jnp.arange(8.0), jnp.array([1.0, 1, 1, 1, 1, 0, 0, 0])
    grad_fn = oa.value_and_grad(
        oa.with_loss_scale(loss_fn, 1024.0),
        2,
        has_aux=True,
        aux="sum",
        weight=lambda batch: batch[1].sum(),
    )
    (loss, aux), grad = grad_fn(jnp.ones([]), (x, mask))
    np.testing.assert_allclose([loss, grad, aux["tokens"]], [2.0, 2.0, 5.0], rtol=1e-3)


def test_a_dynamic_scale_finds_its_way_with_the_space_driver():
    """It halves until nothing overflows, grows again, and is the one that flax would have."""
    x = jnp.array([1.0, 100.0, 1.0, 1.0])

    @jax.jit
    def update(w, scale):
        loss_fn = oa.with_loss_scale(half_loss, scale)
        grad_fn = oa.value_and_grad(loss_fn, K, nonfinite="skip_micro_step", has_stats=True)
        (_, stats), grad = grad_fn(w, x)
        return grad, stats.skipped, oa.adjust_loss_scale(scale, stats.skipped == 0)

    scale, seen = DynamicScale(scale=jnp.float32(2**14), growth_interval=2), []
    scale = scale.replace(fin_steps=jnp.int32(0))
    for _ in range(8):
        grad, skipped, new = update(jnp.ones([]), scale)
        seen.append((float(scale.scale), int(skipped), float(grad)))
        scale = new
    small, large = (1.0, 25.75)
    want = [(2.0**14, 1, small), (2.0**13, 1, small), (2.0**12, 1, small)]
    want += [(2.0**11, 0, large)] * 3 + [(2.0**12, 1, small), (2.0**11, 0, large)]
    assert seen == want


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: oa.with_loss_scale(half_loss, "big"), "scale is str, expected a real scalar"),
        (lambda: oa.with_loss_scale(half_loss, jnp.ones(2)), r"scale is float32\[2\]"),
        (lambda: oa.with_loss_scale(3, 2.0), "loss_fn is int"),
        (
            lambda: oa.with_loss_scale(lambda w, x: w.astype("f2") * x, 2.0)(
                jnp.ones([]), jnp.ones([], "f2")
            ),
            r"the loss is float16.*astype\(jnp\.float32\)",
        ),
        (
            lambda: oa.with_loss_scale(half_loss, 2.0)(jnp.ones([], "f2"), jnp.ones(1)),
            r"argument 0 is float16.*float32 parameters",
        ),
        (
            lambda: oa.with_loss_scale(half_loss, 2.0, argnums=5)(jnp.ones([]), jnp.ones(1)),
            "argnums has 5.*2 positional arguments",
        ),
        (
            lambda: oa.with_loss_scale(half_loss, 2.0)(w=jnp.ones([]), x=jnp.ones(1)),
            "0 positional arguments.*pass it by position",
        ),
        (lambda: oa.adjust_loss_scale(2.0, True), "dynamic_scale is a float"),
        (lambda: oa.adjust_loss_scale(scale_of(2.0), 1.0), "finite is float32"),
    ],
)
def test_loss_scale_errors(call, message):
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize("scale", [0, -2.0, float("inf"), float("nan")])
def test_a_scale_that_is_none(scale):
    with pytest.raises(ValueError, match=r"scale is .*above 0 and finite"):
        oa.with_loss_scale(half_loss, scale)
    gradient = lambda s: jax.grad(oa.with_loss_scale(half_loss, s))(jnp.ones([]), jnp.ones(1))  # noqa: E731
    assert np.isnan(jax.jit(gradient)(jnp.float32(scale)))


def product(v, w, x=None, flag=None, n=2):
    return jnp.sum(v * w["w"]) * (1.0 if x is None else jnp.mean(x)) * n


@pytest.mark.parametrize("jit", [False, True])
def test_what_argnums_leaves_out_is_not_differentiated(jit):
    scaled = oa.with_loss_scale(product, 8.0)
    scaled = jax.jit(scaled) if jit else scaled
    v, w, x = jnp.full(2, 3.0), {"w": jnp.full(2, 5.0)}, jnp.full(4, 7.0)
    with pytest.raises(TypeError, match=r"argument 1.*w.* is differentiated.*argnums=\(0, 1\)"):
        jax.grad(scaled, (0, 1))(v, w, x)
    with pytest.raises(TypeError, match=r"^x is differentiated"):
        jax.jit(jax.grad(lambda x: scaled(v, w, x=x)))(x)
    np.testing.assert_array_equal(jax.jit(jax.grad(scaled))(v, w, x), jnp.full(2, 70.0))
    assert jax.jvp(lambda v: scaled(v, w, x), (v,), (v,))[1] == 420.0
    assert jax.vmap(scaled, (None, None, 0))(v, w, x).shape == (4,)
    both = jax.grad(oa.with_loss_scale(product, 8.0, argnums=(0, 1)), (0, 1))(v, w)
    np.testing.assert_array_equal(both[1]["w"], jnp.full(2, 6.0))


class Written(nnx.Module):
    def __init__(self):
        self.dense = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.dropout(self.norm(self.dense(x)))


@pytest.mark.parametrize(
    "differentiate", [nnx.value_and_grad, lambda f: oa.nnx.value_and_grad(f, 2)]
)
@pytest.mark.parametrize("jit", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_what_an_nnx_model_writes_stays_written(differentiate, jit):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)
    loss_fn = lambda model, x: jnp.mean(model(x) ** 2)  # noqa: E731
    seen, models = [], (Written(), Written())
    for model, loss in zip(models, (loss_fn, oa.with_loss_scale(loss_fn, 1024.0)), strict=True):
        seen.append((jit(differentiate(loss))(model, x), nnx.state(model, nnx.Not(nnx.RngKey))))
    assert models[1].dropout.rngs.count[...] > 0 and jnp.any(models[1].norm.mean[...] != 0)
    for a, b in zip(*map(jax.tree.leaves, seen), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_nnx_objects_that_the_loss_cannot_write_to():
    """Those from outside a transformation; and one that is not differentiated stays as it was."""
    model, head = (nnx.Linear(3, 3, rngs=nnx.Rngs(i)) for i in range(2))
    before = head.kernel.get_raw_value()
    scaled = oa.with_loss_scale(lambda m, h, x: jnp.mean(h(m(x))), 8.0)
    want = jnp.mean(head(model(jnp.ones((2, 3)))))
    np.testing.assert_allclose(jax.jit(lambda x: scaled(model, head, x))(jnp.ones((2, 3))), want)
    nnx.grad(scaled)(model, head, jnp.ones((2, 3)))
    assert head.kernel.get_raw_value() is before
    with pytest.raises(TypeError, match=r"argument 1.* is differentiated"):
        nnx.grad(scaled, argnums=(0, 1))(model, head, jnp.ones((2, 3)))


# Rematerialisation, in both drivers.


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(jnp.tanh(nn.Dense(8)(x)))


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


def linen_block(remat):
    block = (nn.remat(Block) if remat else Block)(name="block")
    params = jax.jit(block.init)(jax.random.key(0), jnp.ones((1, 4)))
    return params, lambda p, x: block.apply(p, x)


def nnx_block(remat):
    call = nnx.remat(NnxBlock.__call__) if remat else NnxBlock.__call__
    graphdef, state = nnx.split(NnxBlock(nnx.Rngs(0)))
    return state, lambda p, x: call(nnx.merge(graphdef, p), x)


def scanned_layers(remat):
    def layers(w, x):
        body = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731
        return jax.lax.scan(jax.checkpoint(body) if remat else body, x, w)[0]

    return jnp.stack([jnp.eye(4) / 2, jnp.ones((4, 4)) / 4]), layers


MODELS = {"nn.remat": linen_block, "nnx.remat": nnx_block, "jax.checkpoint": scanned_layers}


@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        ("nn.remat", "carry"),
        ("nnx.remat", "refs"),
        ("jax.checkpoint", "carry"),
        pytest.param("nn.remat", "refs", marks=pytest.mark.full),
        pytest.param("nnx.remat", "carry", marks=pytest.mark.full),
        pytest.param("jax.checkpoint", "refs", marks=pytest.mark.full),
    ],
)
def test_rematerialisation_in_both_drivers(kind, engine):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32)
    params, apply = MODELS[kind](remat=True)
    _, plain = MODELS[kind](remat=False)
    loss_fn = lambda p, x: jnp.mean(jnp.square(apply(p, x)))  # noqa: E731
    want = jax.jit(jax.grad(lambda p: jnp.mean(jnp.square(plain(p, x)))))(params)

    _, grads = jax.jit(oa.value_and_grad(loss_fn, K, engine=engine))(params, x)
    tx = oa.accumulate(optax.sgd(1.0), K)
    call = jax.jit(oa.micro_step(loss_fn, tx, engine=engine))
    moved, state = params, tx.init(params)
    for i in range(K):
        _, moved, state = call(moved, state, x[i::K])
    by_time = jax.tree.map(jnp.subtract, params, moved)
    for tree in (grads, by_time):
        for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
