"""Flax Linen; and one model in Linen and in NNX, by both drivers, against one big batch."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from flax.core import freeze
from flax.training import train_state
from helpers import assert_same_bits
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_accum as oa

RNG = np.random.default_rng(0)
X, Y = (jnp.asarray(RNG.normal(size=(16, n)), jnp.float32) for n in (4, 1))
A, B = (jnp.asarray(RNG.normal(size=shape) / 2, jnp.float32) for shape in ((4, 8), (8, 1)))


def close(left, right, tolerance=2e-6):
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


# One model, four ways.


def big_batch(inner, updates):
    """jax and Optax alone."""
    loss = lambda w: jnp.mean((jnp.tanh(X @ w[0]) @ w[1] - Y) ** 2)  # noqa: E731
    weights = [A, B]
    state = inner.init(weights)
    for _ in range(updates):
        moves, state = inner.update(jax.grad(loss)(weights), state, weights)
        weights = optax.apply_updates(weights, moves)
    return weights


class NNX(nnx.Module):
    def __init__(self):
        self.a = nnx.Linear(4, 8, use_bias=False, rngs=nnx.Rngs(0))
        self.b = nnx.Linear(8, 1, use_bias=False, rngs=nnx.Rngs(0))
        self.a.kernel[...], self.b.kernel[...] = jnp.copy(A), jnp.copy(B)

    def __call__(self, x):
        return self.b(jnp.tanh(self.a(x)))


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.Dense(8, use_bias=False, name="a")(x))
        return nn.Dense(1, use_bias=False, name="b")(x)


def nnx_loss(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def linen_loss(params, x, y):
    return jnp.mean((Linen().apply({"params": params}, x) - y) ** 2)


def nnx_space(inner, updates):
    model = NNX()
    optimizer = nnx.Optimizer(model, inner, wrt=nnx.Param)
    grad_fn = oa.nnx.value_and_grad(nnx_loss, 4, batch_argnums=(1, 2))
    update = nnx.jit(lambda model, optimizer: optimizer.update(model, grad_fn(model, X, Y)[1]))
    for _ in range(updates):
        update(model, optimizer)
    return model.a.kernel[...], model.b.kernel[...]


def nnx_time(inner, updates):
    model = NNX()
    optimizer = oa.nnx.Optimizer(model, oa.accumulate(inner, 4))

    @functools.partial(nnx.jit, donate_argnums=(0, 1))
    def micro_step(model, optimizer, x, y):
        optimizer.update(model, nnx.grad(nnx_loss)(model, x, y))

    for i in range(4 * updates):
        micro_step(model, optimizer, X[i % 4 :: 4], Y[i % 4 :: 4])
    assert optimizer.step[...] == updates
    return model.a.kernel[...], model.b.kernel[...]


def params_of_linen():
    return {"a": {"kernel": jnp.copy(A)}, "b": {"kernel": jnp.copy(B)}}


def linen_space(inner, updates):
    state = train_state.TrainState.create(apply_fn=None, params=params_of_linen(), tx=inner)
    grad_fn = oa.value_and_grad(linen_loss, 4, batch_argnums=(1, 2))
    update = jax.jit(lambda s: s.apply_gradients(grads=grad_fn(s.params, X, Y)[1]))
    for _ in range(updates):
        state = update(state)
    return state.params["a"]["kernel"], state.params["b"]["kernel"]


def linen_time(inner, updates):
    tx = oa.accumulate(inner, 4)
    state = oa.linen.TrainState.create(apply_fn=Linen().apply, params=params_of_linen(), tx=tx)

    @functools.partial(jax.jit, donate_argnums=0)
    def micro_step(state, x, y):
        return state.apply_gradients(grads=jax.grad(linen_loss)(state.params, x, y))

    for i in range(4 * updates):
        state = micro_step(state, X[i % 4 :: 4], Y[i % 4 :: 4])
    assert state.step == updates
    return state.params["a"]["kernel"], state.params["b"]["kernel"]


INNER = {
    "sgd": optax.sgd(0.1),
    "adamw": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-3)),
}


@pytest.mark.parametrize("way", [nnx_space, nnx_time, linen_space, linen_time])
@pytest.mark.parametrize("inner", INNER)
def test_as_one_big_batch(inner, way):
    """After 5 updates of 4 micro-batches."""
    close(list(way(INNER[inner], 5)), big_batch(INNER[inner], 5))


# TrainState.


class WithStats(oa.linen.TrainState):
    batch_stats: Any = None


def state_of(tx, params=None, **fields):
    params = {"w": jnp.zeros(2)} if params is None else params
    return WithStats.create(apply_fn=None, params=params, tx=tx, **fields)


def grads_of(value):
    return {"w": jnp.full(2, value)}


def test_updates_are_counted_and_weights_are_exact():
    state = state_of(oa.accumulate(optax.sgd(1.0), 3), batch_stats=0)
    seen = []
    for value, weight, last in ((1, 1, False), (2, 3, False), (5, 0, False), (4, 2, True)):
        state = state.apply_gradients(
            grads=grads_of(float(value)), weight=weight, last=last, batch_stats=value
        )
        seen.append((int(state.step), int(state.micro_step), bool(state.updated)))
        assert state.batch_stats == value
    assert seen == [(0, 1, False), (0, 2, False), (1, 0, True), (2, 0, True)]
    close(state.params["w"], jnp.full(2, -1.75 - 4))
    assert oa.has_updated(state)
    with pytest.raises(TypeError, match="batch_stat"):
        state.apply_gradients(grads=grads_of(1.0), batch_stat=1)


def test_what_inner_takes_reaches_it():
    def update(updates, state, params=None, *, value, scale):
        del state, params
        return jax.tree.map(jnp.zeros_like, updates), (value, scale)

    init = lambda params: (jnp.zeros([]), jnp.zeros([]))  # noqa: E731
    state = state_of(oa.accumulate(optax.GradientTransformationExtraArgs(init, update), 2))
    for value in (1.0, 3.0):
        extra = {"scale": jnp.float32(value)}
        state = state.apply_gradients(grads=grads_of(0.0), value=jnp.float32(value), extra=extra)
    close(state.opt_state.inner_state, (2.0, 3.0))


def test_other_transformations_count_calls():
    ours = state_of(optax.adam(0.1)).apply_gradients(grads=grads_of(1.0))
    theirs = train_state.TrainState.create(
        apply_fn=None, params={"w": jnp.zeros(2)}, tx=optax.adam(0.1)
    ).apply_gradients(grads=grads_of(1.0))
    assert ours.step == theirs.step == 1
    close((ours.params, ours.opt_state), (theirs.params, theirs.opt_state))


def test_the_state_keeps_its_types():
    """Or every call would compile anew, and a restored one would not fit."""
    state = state_of(oa.accumulate(optax.adam(0.1), 2))
    shapes = lambda state: jax.tree.map(jax.typeof, state)  # noqa: E731
    before = shapes(state)
    for _ in range(2):
        state = jax.jit(lambda s: s.apply_gradients(grads=grads_of(1.0), weight=2))(state)
        assert shapes(state) == before
    restored = serialization.from_bytes(state, serialization.to_bytes(state))
    assert_same_bits(restored, state)


def test_scales_of_fp8_are_handed_on():
    """As Flax does: those gradients are the new values."""
    params = {"params": {"w": jnp.zeros(2)}, "_overwrite_with_gradient": {"scale": jnp.ones([])}}
    state = state_of(oa.accumulate(optax.sgd(1.0), 2), params)
    for value in (1.0, 3.0):
        owned = {"_overwrite_with_gradient": {"scale": jnp.float32(value)}}
        state = state.apply_gradients(grads={"params": grads_of(value)} | owned)
        assert state.params["_overwrite_with_gradient"]["scale"] == value
    close(state.params["params"]["w"], jnp.full(2, -2.0))


@pytest.mark.parametrize("policy", ["skip_micro_step", "skip_window"])
@pytest.mark.parametrize("jit", [False, True])
def test_scales_of_fp8_of_a_lost_micro_step(policy, jit):
    params = {"params": {"w": jnp.zeros(2)}, "_overwrite_with_gradient": {"scale": jnp.ones([])}}
    state = state_of(oa.accumulate(optax.sgd(1.0), 4, nonfinite=policy), params)

    def call(state, gradient, scale, weight):
        owned = {"_overwrite_with_gradient": {"scale": scale}}
        grads = {"params": {"w": jnp.full(2, gradient)}} | owned
        return state.apply_gradients(grads=grads, weight=weight)

    call, seen = jax.jit(call) if jit else call, []
    for gradient, weight in ((1.0, 1.0), (jnp.nan, 1.0), (1.0, 0.0), (2.0, 3.0)):
        state = call(state, gradient, jnp.float32(5 + len(seen)), weight)
        seen.append(float(state.params["_overwrite_with_gradient"]["scale"]))
    assert seen == [5.0, 5.0, 5.0, 8.0 if policy == "skip_micro_step" else 5.0]


@pytest.mark.parametrize("name", ["updated", "micro_step"])
def test_a_plain_optimizer_has_no_micro_steps(name):
    with pytest.raises(ValueError, match=r"type tx=oa\.accumulate\(optimizer, k\)"):
        getattr(state_of(optax.sgd(1.0)), name)


def test_no_parameter_sized_temporary():
    """Where Flax's needs one. Gradients are given, the state is donated."""
    params = {str(i): jnp.ones((128, 128)) for i in range(4)}
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(params))

    def temporaries(cls):
        tx = oa.accumulate(optax.adamw(1e-3), 4)
        state = cls.create(apply_fn=None, params=params, tx=tx)
        update = jax.jit(lambda s, grads: s.apply_gradients(grads=grads), donate_argnums=0)
        compiled = update.lower(state, params).compile()
        return compiled.memory_analysis().temp_size_in_bytes / whole

    assert temporaries(oa.linen.TrainState) < 0.2
    assert temporaries(train_state.TrainState) > 0.9


# Collections.


class Normed(nn.Module):
    """BatchNorm, a counter, a constant, dropout and a rematerialised layer."""

    rate: float = 0.0

    @nn.compact
    def __call__(self, x):
        x = nn.remat(nn.Dense)(3, name="dense")(x)
        x = nn.BatchNorm(use_running_average=False, momentum=0.9, name="norm")(x)
        x = nn.Dropout(self.rate, deterministic=False)(x)
        count = self.variable("count", "n", lambda: jnp.zeros([], jnp.int32))
        count.value = 2 * count.value + 1
        scale = self.variable("constants", "scale", lambda: jnp.full([], 2.0))
        return x.sum(-1, keepdims=True) * scale.value


def normed_loss(rate=0.0):
    def loss(params, variables, x, y, key):
        model, variables = Normed(rate), {"params": params, **variables}
        mutable = ["batch_stats", "count"]
        output, new = model.apply(variables, x, mutable=mutable, rngs={"dropout": key})
        return jnp.mean((output - y) ** 2), new

    return loss


def normed():
    variables = Normed().init(jax.random.key(0), X)
    params = variables.pop("params")
    return params, variables | {"count": {"n": jnp.zeros([], jnp.int32)}}


CUT = {"batch_argnums": (2, 3), "rng_argnums": 4}


@pytest.mark.parametrize("frozen", [False, True], ids=["dict", "FrozenDict"])
def test_collections(frozen):
    """Statistics of the window by NumPy, a counter in order, a constant as it was."""
    params, variables = normed()
    given = freeze(variables) if frozen else variables
    f = oa.linen.value_and_grad(normed_loss(), 4, momentum=0.9, **CUT)
    (_, new), grads = jax.jit(f)(params, given, X, Y, jax.random.key(1))
    rows = np.asarray(X, np.float64) @ np.asarray(params["dense"]["kernel"], np.float64)
    close(new["batch_stats"]["norm"], {"mean": 0.1 * rows.mean(0), "var": 0.9 + 0.1 * rows.var(0)})
    assert new["count"]["n"] == 15 and new["constants"]["scale"] == 2.0
    assert jax.tree.structure((new, grads)) == jax.tree.structure((given, params))


def test_collections_on_replicas():
    """Merged over all of them; a collection without order has to be merged too."""
    params, variables = normed()
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    f = functools.partial(oa.linen.value_and_grad, normed_loss(), 2, momentum=0.9, mesh=mesh, **CUT)
    last = lambda initial, stacked, weights: jax.tree.map(lambda x: x[-1], stacked)  # noqa: E731
    merge = {"count": last, "constants": last}
    (_, new), _ = jax.jit(f(merge=merge))(params, variables, X, Y, jax.random.key(1))
    rows = np.asarray(X @ params["dense"]["kernel"])
    close(new["batch_stats"]["norm"], {"mean": 0.1 * rows.mean(0), "var": 0.9 + 0.1 * rows.var(0)})
    assert new["count"]["n"] == 1
    with pytest.raises(ValueError, match=r"'constants', 'count'.*no such order.*merge="):
        f()(params, variables, X, Y, jax.random.key(1))


def test_dropout_differs_and_comes_again():
    params, variables = normed()
    f = jax.jit(oa.linen.value_and_grad(normed_loss(0.5), 2, momentum=0.9, **CUT))
    runs = [f(params, variables, X, Y, jax.random.key(i)) for i in (1, 1, 2)]
    assert_same_bits(runs[0], runs[1])
    assert runs[0][0][0] != runs[2][0][0]


def test_aux_and_stats():
    def loss(params, variables, x):
        output, new = nn.BatchNorm(use_running_average=False).apply(
            {"params": params, **variables}, x, mutable=["batch_stats"]
        )
        return jnp.mean(output), (new, output)

    variables = nn.BatchNorm(use_running_average=False).init(jax.random.key(0), X)
    params = variables.pop("params")
    f = oa.linen.value_and_grad(loss, 4, momentum=0.99, has_aux=True, aux="concat", has_stats=True)
    (_, (new, output), stats), _ = f(params, variables, X)
    assert output.shape == X.shape and stats.weight == 16
    close(new["batch_stats"]["mean"], 0.01 * X.mean(0))


P_, V_ = {"w": jnp.zeros(1)}, {"batch_stats": {"mean": jnp.zeros(1), "var": jnp.ones(1)}}


def of(returned, variables=V_, momentum=0.9, **keywords):
    f = oa.linen.value_and_grad(lambda p, v, x: returned(v), 2, momentum=momentum, **keywords)
    return lambda: f(P_, variables, X)


ZERO = jnp.zeros([])
WRONG = {
    "momentum": (of(lambda v: (ZERO, v), momentum=None), "momentum is missing.*momentum=0.99"),
    "loss alone": (of(lambda v: ZERO), "expected \\(loss, new\\)"),
    "no aux": (of(lambda v: (ZERO, v, 1), has_aux=True), "expected \\(loss, \\(new, aux\\)\\)"),
    "sown": (of(lambda v: (ZERO, v | {"intermediates": {}})), "'intermediates'.*has_aux=True"),
    "statistics alone": (
        of(lambda v: (ZERO, v), variables={"norm": V_["batch_stats"]}),
        r"argument 1 holds statistics of layers, \['norm'\].*\{'batch_stats': state.batch_stats\}",
    ),
    "no collections": (of(lambda v: (ZERO, v), variables=X), "argument 1 holds no collections"),
    "state_argnum": (
        lambda: oa.linen.value_and_grad(linen_loss, 2, state_argnum=1),
        "variables_argnum=",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_say_what_to_type(name):
    call, message = WRONG[name]
    with pytest.raises((ValueError, TypeError), match="(?s)" + message):
        call()


@pytest.mark.parametrize(
    "merge_state, message",
    [
        ({"batch_stats": 1}, r"merge_state\['batch_stats'\] is .*, expected a function"),
        ({"other": None}, "expected a function, or a tree prefix of the model's state"),
    ],
)
def test_a_prefix_of_merges_that_does_not_fit(merge_state, message):
    with pytest.raises((ValueError, TypeError), match=message):
        oa.value_and_grad(
            lambda p, v, x: (ZERO, v), 2, batch_argnums=2, state_argnum=1, merge_state=merge_state
        )(P_, V_, X)


# Parameters in boxes, tied and frozen.


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_partitioned_parameters(kind):
    """`nn.with_partitioning`: boxes stay, shards stay, values as by one big batch."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "tensor"))
            return nn.Dense(8, use_bias=False, kernel_init=init)(x)

    def loss(params, x):
        return jnp.mean(Model().apply(params, x) ** 2)

    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        kernel = jax.device_put(A, NamedSharding(mesh, P(None, "tensor")))
        box = nn.Partitioned(kernel, (None, "tensor"))  # explicit axes: Flax's init fails there
        params = {"params": {"Dense_0": {"kernel": box}}}
        x = jax.device_put(X, NamedSharding(mesh, P("data")))
        whole = jax.jit(jax.grad(loss))(params, x)
        _, grads = jax.jit(oa.value_and_grad(loss, 2))(params, x)
        state = oa.linen.TrainState.create(
            apply_fn=None, params=params, tx=oa.accumulate(optax.sgd(1.0), 2)
        )
        update = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
        state = update(update(state, grads), grads)
    close(grads, whole)
    close(jax.device_get(state.params), jax.device_get(jax.tree.map(jnp.subtract, params, whole)))
    for tree in (state.params, state.opt_state.grad_sum, grads):
        box = tree["params"]["Dense_0"]["kernel"]
        assert isinstance(box, nn.Partitioned)
        assert box.value.sharding.spec == P(None, "tensor")


def test_tied_and_frozen_parameters():
    """An embedding that is the head too, beside a layer that `multi_transform` freezes."""

    class Tied(nn.Module):
        def setup(self):
            self.embed = nn.Embed(5, 4)
            self.frozen = nn.Dense(4)

        def __call__(self, tokens):
            return self.embed.attend(jnp.tanh(self.frozen(self.embed(tokens))))

    tokens = jnp.asarray(RNG.integers(0, 5, (8, 3)))
    params = Tied().init(jax.random.key(0), tokens)["params"]

    def loss(params, tokens):
        logits = Tied().apply({"params": params}, tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    labels = {"embed": "train", "frozen": "freeze"}
    inner = optax.multi_transform({"train": optax.sgd(0.5), "freeze": optax.set_to_zero()}, labels)
    state = oa.linen.TrainState.create(apply_fn=None, params=params, tx=oa.accumulate(inner, 4))
    grad = jax.jit(jax.grad(loss))
    for i in range(4):
        state = state.apply_gradients(grads=grad(state.params, tokens[2 * i : 2 * i + 2]))
    expected = optax.apply_updates(
        params["embed"], jax.tree.map(lambda g: -0.5 * g, grad(params, tokens)["embed"])
    )
    close(state.params["embed"], expected)
    assert_same_bits(state.params["frozen"], params["frozen"])
