"""Each driver and engine is lowered for TPU and CUDA, and what is lowered for CPU agrees."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import optax_accum as oa

ELSEWHERE = ("tpu", "cuda")
LAYERS, D, B, T, VOCABULARY = 2, 4, 4, 3, 7
needs_micro_step = pytest.mark.skipif(not hasattr(oa, "micro_step"), reason="no oa.micro_step yet")


def init_params():
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape) / 2, jnp.float32)  # noqa: E731
    layers = {name: normal(LAYERS, D, D) for name in "qkvo"}
    layers |= {"up": normal(LAYERS, D, 2 * D), "down": normal(LAYERS, 2 * D, D)}
    return {"embedding": normal(VOCABULARY, D), "layers": layers}


def make_batch():
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, VOCABULARY, (2, B, T))
    mask = (np.arange(T) < rng.integers(1, T + 1, (B, 1))).astype(np.float32)
    return {"tokens": jnp.asarray(tokens[0]), "targets": jnp.asarray(tokens[1]), "mask": mask}


def norm(h):
    return h * lax.rsqrt(jnp.mean(jnp.square(h), -1, keepdims=True) + 1e-3)


def layer(h, w):
    q, k, v = (norm(h) @ w[name] for name in "qkv")
    logits = jnp.where(jnp.tri(T, dtype=bool), jnp.einsum("btd,bsd->bts", q, k), -1e9)
    h = h + jnp.einsum("bts,bsd->btd", jax.nn.softmax(logits), v) @ w["o"]
    return h + jax.nn.gelu(norm(h) @ w["up"]) @ w["down"], None


def loss_fn(params, batch):
    """A transformer that scans over checkpointed layers, its head tied; a mean over tokens."""
    h, _ = lax.scan(jax.checkpoint(layer), params["embedding"][batch["tokens"]], params["layers"])
    logits = norm(h) @ params["embedding"].T
    picked = jnp.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
    losses = (jax.nn.logsumexp(logits, -1) - picked) * batch["mask"]
    return losses.sum() / batch["mask"].sum()


def tokens(batch):
    return batch["mask"].sum()


def shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)


def exported(f, *args, platforms=ELSEWHERE):
    return jax.export.export(jax.jit(f), platforms=platforms)(*shapes(args))


def assert_lowers_elsewhere(f, *args):
    module = exported(f, *args)
    assert module.platforms == ELSEWHERE
    assert not module.ordered_effects and not module.unordered_effects  # no callbacks to a host
    assert jax.tree.structure(jax.eval_shape(f, *args)) == module.out_tree


@functools.cache
def truth():
    return jax.jit(jax.value_and_grad(loss_fn))(init_params(), make_batch())


def run_exported(f, *args):
    return exported(f, *args, platforms=("cpu",)).call(*args)


def assert_close(got, want, **tolerance):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.float64(a), np.float64(b), **tolerance)


# The space driver.

SPACE = {
    "carry": {"engine": "carry"},
    "carry, weights": {"engine": "carry", "weight": tokens},
    "carry, bfloat16 window, weights": {
        "engine": "carry",
        "weight": tokens,
        "accumulator_dtype": jnp.bfloat16,
    },
    "carry, skipping": {"engine": "carry", "weight": tokens, "nonfinite": "skip_micro_step"},
    "refs": {"engine": "refs"},
    "refs, weights": {"engine": "refs", "weight": tokens},
    "auto, stacked": {"engine": "auto", "batch_layout": "stacked"},
}


def split(keywords, batch, k=2):
    if keywords.get("batch_layout") != "stacked":
        return batch
    return jax.tree.map(lambda x: x.reshape(k, B // k, *x.shape[1:]), batch)


@pytest.mark.parametrize("name", SPACE)
def test_the_space_driver_lowers_for_tpu_and_cuda(name):
    params, batch = init_params(), split(SPACE[name], make_batch())
    assert_lowers_elsewhere(oa.value_and_grad(loss_fn, 2, **SPACE[name]), params, batch)


@pytest.mark.parametrize(
    "name",
    ["refs, weights", pytest.param("carry, bfloat16 window, weights", marks=pytest.mark.full)],
)
def test_the_space_driver_runs_as_exported(name):
    params, batch = init_params(), make_batch()
    got = run_exported(oa.value_and_grad(loss_fn, 2, **SPACE[name]), params, batch)
    want = truth()
    tolerance = {"atol": 0.02} if "bfloat16" in name else {"rtol": 1e-4, "atol": 1e-5}
    assert_close(got, want, **tolerance)


def test_keys_state_aux_and_remainder_lower_for_tpu_and_cuda():
    def loss(params, batch, key, state):
        keep = jax.random.bernoulli(key, 0.9, batch["mask"].shape)
        value = loss_fn(params, batch | {"mask": batch["mask"] * keep})
        return value, (0.9 * state + 0.1 * value, {"rows": batch["mask"], "most": value})

    grad_fn = oa.value_and_grad(
        loss,
        3,
        has_aux=True,
        rng_argnums=2,
        state_argnum=3,
        aux={"rows": "concat", "most": "max"},
        remainder="exact",
        has_stats=True,
    )
    batch = jax.tree.map(lambda x: jnp.concatenate([x, x])[: 2 * B - 1], make_batch())
    module = jax.export.export(jax.jit(grad_fn), platforms=ELSEWHERE)(
        *shapes((init_params(), batch)),
        jax.eval_shape(lambda: jax.random.PRNGKey(0)),
        jax.ShapeDtypeStruct((), jnp.float32),
    )
    assert module.platforms == ELSEWHERE


# The time driver.

TIME = {
    "mean": {},
    "scheduled k": {"k": lambda update: 2 + update % 2},
    "bfloat16 window": {"accumulator_dtype": jnp.bfloat16},
    "skip_micro_step": {"nonfinite": "skip_micro_step"},
    "skip_window": {"nonfinite": "skip_window"},
    "sum_over_weight": {"loss_reduction": "sum_over_weight"},
}


def update(tx, in_place, grads, state, params, weight, last):
    if in_place:
        return oa.apply_gradients(tx, grads, state, params, weight=weight, last=last)
    updates, state = tx.update(grads, state, params, weight=weight, last=last)
    return optax.apply_updates(params, updates), state


def time_driver(inner=None, k=2, **keywords):
    return oa.accumulate(optax.adamw(0.1) if inner is None else inner, k, **keywords)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", TIME)
def test_the_time_driver_lowers_for_tpu_and_cuda(name, in_place):
    tx, params = time_driver(**TIME[name]), init_params()
    f = functools.partial(update, tx, in_place)
    args = params, tx.init(params), params, jnp.float32(2), jnp.asarray(False)
    assert_lowers_elsewhere(f, *args)


def test_init_and_flush_lower_for_tpu_and_cuda():
    tx, params = time_driver(), init_params()
    assert_lowers_elsewhere(tx.init, params)
    assert_lowers_elsewhere(functools.partial(oa.flush, tx), tx.init(params), params)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_the_time_driver_runs_as_exported(in_place, dtype):
    """A window of two weighted micro-gradients, one program for both calls."""
    params = {"w": jnp.float32([1, 2, -3])}
    tx = time_driver(optax.sgd(1.0), accumulator_dtype=dtype)
    grads = [{"w": jnp.float32([0.1, 0.2, -0.4])}, {"w": jnp.float32([1, -1, 0.5])}]
    state = tx.init(params)
    call = exported(
        functools.partial(update, tx, in_place),
        *(params, state, params, jnp.float32(1), jnp.asarray(False)),
        platforms=("cpu",),
    ).call
    for grad, weight in zip(grads, (1.0, 3.0), strict=True):
        params, state = call(grad, state, params, jnp.float32(weight), jnp.asarray(False))
    mean = (np.float64(grads[0]["w"]) + 3 * np.float64(grads[1]["w"])) / 4
    tolerance = 1e-6 if dtype is None else 0.02
    np.testing.assert_allclose(params["w"], [1, 2, -3] - mean, atol=tolerance)
    assert bool(oa.has_updated(state))


# The time driver with the loss at hand.

MICRO = {
    "carry": ({}, {"engine": "carry"}),
    "carry, weights": ({}, {"engine": "carry", "weight": tokens}),
    "carry, bfloat16 window": (
        {"accumulator_dtype": jnp.bfloat16},
        {"engine": "carry", "weight": tokens},
    ),
    "refs": ({}, {"engine": "refs"}),
    "refs, weights": ({}, {"engine": "refs", "weight": tokens}),
    "refs, skip_window": ({"nonfinite": "skip_window"}, {"engine": "refs", "weight": tokens}),
}


def micro_step(name, inner=None):
    settings, keywords = MICRO[name]
    tx = time_driver(inner, **settings)
    return tx, oa.micro_step(loss_fn, tx, **keywords)


@needs_micro_step
@pytest.mark.parametrize("name", MICRO)
def test_a_micro_step_lowers_for_tpu_and_cuda(name):
    tx, f = micro_step(name)
    params = init_params()
    last = lambda params, state, batch, last: f(params, state, batch, last=last)  # noqa: E731
    assert_lowers_elsewhere(last, params, tx.init(params), make_batch(), jnp.asarray(False))


@needs_micro_step
@pytest.mark.parametrize(
    "name", ["refs, weights", pytest.param("carry, bfloat16 window", marks=pytest.mark.full)]
)
def test_a_micro_step_runs_as_exported(name):
    """Two halves of a batch, weighted by their tokens, are one update on all of it."""
    tx, f = micro_step(name, optax.sgd(1.0))
    params, batch = init_params(), make_batch()
    halves = [jax.tree.map(lambda x, i=i: x[i::2], batch) for i in range(2)]
    state, new = tx.init(params), params
    call = exported(f, params, state, halves[0], platforms=("cpu",)).call
    for half in halves:
        _, new, state = call(new, state, half)
    _, grads = truth()
    want = jax.tree.map(lambda p, g: p - g, params, grads)
    tolerance = {"atol": 0.02} if "bfloat16" in name else {"rtol": 1e-4, "atol": 1e-5}
    assert_close(new, want, **tolerance)
