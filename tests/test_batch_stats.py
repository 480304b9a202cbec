"""Running statistics of a window, against one big batch and NumPy in float64."""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import optax_accum as oa

NAN = float("nan")


class Stats(NamedTuple):
    mean: Any
    var: Any


def moved(x, stats, momentum=0.9):
    """What a BatchNorm layer does with a micro-batch, by hand; the loss is its own."""
    mean, var = x.mean(0), x.var(0)
    new = jax.tree.map(
        lambda old, new: momentum * old + (1 - momentum) * new, stats, type(stats)(mean, var)
    )
    return new


def loss_fn(w, x, stats):
    return jnp.mean(w * x), moved(x, stats)


def wanted(x, stats, momentum=0.9):
    x = np.asarray(x, np.float64)
    return [
        momentum * np.asarray(old, np.float64) + (1 - momentum) * new
        for old, new in zip(stats, (x.mean(0), x.var(0)), strict=True)
    ]


def before(features=3):
    rng = np.random.default_rng(7)
    return Stats(
        jnp.asarray(rng.normal(size=features), jnp.float32),
        jnp.asarray(1 + rng.random(features), jnp.float32),
    )


def data(rows=24, features=3, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(rows, features)) * 2 + np.arange(features), jnp.float32)


def test_the_variance_of_two_far_micro_batches():
    """[0, 2] and [10, 12]: the mean of their variances would be 1."""
    x = jnp.array([[0.0], [2.0], [10.0], [12.0]])

    def loss_fn(w, x, stats):
        return jnp.mean(w * x), moved(x, stats, 0.0)

    grad_fn = oa.value_and_grad(
        loss_fn,
        2,
        state_argnum=2,
        merge_state=oa.merge_batch_stats(0.0),
        batch_layout="contiguous",
    )
    (_, stats), _ = grad_fn(jnp.float32(1), x, Stats(jnp.zeros(1), jnp.ones(1)))
    assert stats.mean.tolist() == [6.0] and stats.var.tolist() == [26.0]


@pytest.mark.parametrize(("k", "layout"), [(1, "strided"), (3, "strided"), (3, "contiguous")])
def test_the_window_moves_the_statistics_once(k, layout):
    x, stats = data(12), before()
    grad_fn = oa.value_and_grad(
        loss_fn, k, state_argnum=2, merge_state=oa.merge_batch_stats(0.9), batch_layout=layout
    )
    (_, got), _ = jax.jit(grad_fn)(jnp.float32(1), x, stats)
    for a, b in zip(got, wanted(x, stats), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_an_uneven_remainder_counts_by_its_examples():
    x, stats = data(11), before()
    grad_fn = oa.value_and_grad(
        loss_fn, 3, state_argnum=2, merge_state=oa.merge_batch_stats(0.9), remainder="exact"
    )
    (_, got), _ = grad_fn(jnp.float32(1), x, stats)
    for a, b in zip(got, wanted(x, stats), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize("poison", ["a padding micro-batch", "a micro-batch that is not finite"])
def test_rows_without_weight_are_left_out(poison):
    x, stats = data(12), before()
    bad = x.at[8:].set(NAN)
    skipped = poison != "a padding micro-batch"
    real = lambda x: jnp.where(jnp.isnan(x).any(), 0.0, len(x))  # noqa: E731
    grad_fn = oa.value_and_grad(
        loss_fn,
        3,
        state_argnum=2,
        merge_state=oa.merge_batch_stats(0.9),
        batch_layout="contiguous",
        weight=None if skipped else real,
        nonfinite="skip_micro_step" if skipped else "propagate",
    )
    (_, got), _ = grad_fn(jnp.float32(1), bad, stats)
    for a, b in zip(got, wanted(x[:8], stats), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_rows_of_weight_zero_may_hold_anything():
    merge = oa.merge_batch_stats(0.5)
    rows = Stats(jnp.array([1.0, NAN, 3.0, np.inf]), jnp.array([2.0, NAN, 4.0, -np.inf]))
    got = merge(Stats(jnp.float32(0), jnp.float32(0)), rows, jnp.array([1.0, 0, 3.0, 0]))
    assert float(got.mean) == 2.5 and float(got.var) == 3.5 + (2.25 + 3 * 0.25) / 4 / 0.5


def test_without_any_weight_the_state_stays():
    merge, stats = oa.merge_batch_stats(0.9), before()
    rows = jax.tree.map(lambda x: jnp.full((4, *x.shape), NAN), stats)
    got = jax.jit(merge)(stats, rows, jnp.zeros(4))
    assert jax.tree.all(jax.tree.map(np.array_equal, got, stats))


def test_a_weight_that_is_none_is_not_hidden():
    rows = jax.tree.map(lambda x: jnp.stack([x, x]), before())
    got = oa.merge_batch_stats(0.9)(before(), rows, jnp.array([1.0, NAN]))
    assert np.isnan(got.mean).all() and np.isnan(got.var).all()


REPLICAS = {
    "equal rows": [1.0] * 16,
    "unequal rows": [2.0, 1, 0, 3] * 4,
    "a replica of padding": [1.0] * 4 + [0.0] * 2 + [1.0] * 10,
}


@functools.cache
def on_replicas(way):
    """8 of them, two micro-batches each."""

    def loss_fn(w, batch, stats):
        return jnp.mean(w * batch[0]), moved(batch[0], stats)

    options = {
        "state_argnum": 2,
        "merge_state": oa.merge_batch_stats(0.9),
        "batch_layout": "contiguous",
        "weight": lambda batch: batch[1].mean(),
    }
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    if way == "mesh":
        grad_fn = oa.value_and_grad(loss_fn, 2, mesh=mesh, **options)
    else:
        grad_fn = jax.shard_map(
            oa.value_and_grad(loss_fn, 2, axis_name="data", **options),
            mesh=mesh,
            in_specs=(P(), P("data"), P()),
            out_specs=P(),
        )
    return jax.jit(grad_fn)


@pytest.mark.parametrize("weights", REPLICAS)
@pytest.mark.parametrize("way", ["axis_name", "mesh"])
def test_rows_of_all_replicas(way, weights):
    """8 replicas, 2 micro-batches each, whose weights are in the batch and whose padding is NaN."""
    each = np.asarray(REPLICAS[weights])
    rng = np.random.default_rng(0)
    x, stats = jnp.asarray(rng.normal(size=(16, 3, 2)) + each[:, None, None], "f4"), before(2)
    x = jnp.where((each == 0)[:, None, None], NAN, x)
    batch = (x.reshape(48, 2), jnp.repeat(jnp.asarray(each, "f4"), 3))

    (_, got), _ = on_replicas(way)(jnp.float32(1), batch, stats)
    w, real = each / each.sum(), np.where((each == 0)[:, None, None], 0, np.float64(x))
    mean = (w[:, None] * real.mean(1)).sum(0)
    var = (w[:, None] * (real.var(1) + (real.mean(1) - mean) ** 2)).sum(0)
    for a, old, new in zip(got, stats, (mean, var), strict=True):
        np.testing.assert_allclose(a, 0.9 * np.float64(old) + 0.1 * new, rtol=2e-5)


# Flax.


class Linen(nn.Module):
    depth: int = 1
    momentum: float = 0.9
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        for i in range(self.depth):
            x = nn.Conv(3, (3, 3), param_dtype=self.dtype, name=f"conv{i}")(x) if i else x
            norm = nn.BatchNorm(
                use_running_average=False,
                momentum=self.momentum,
                param_dtype=self.dtype,
                use_fast_variance=False,
                name=f"norm{i}",
            )
            x = nn.relu(norm(x))
        return x


def linen_loss(model):
    def loss_fn(params, x, stats):
        out, new = model.apply({"params": params, **stats}, x, mutable=["batch_stats"])
        return jnp.mean(out**2), new

    return loss_fn


def linen_case(model, x):
    variables = jax.jit(model.init)(jax.random.key(0), x[:2])
    return variables["params"], {"batch_stats": variables["batch_stats"]}


def test_linen_first_layer_is_exact(x64):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(24, 4, 4, 3)) * 3 + 5)
    model = Linen(dtype=jnp.float64)
    params, stats = linen_case(model, x)
    stats = jax.tree.map(lambda x: x.astype(jnp.float64), stats)  # Flax makes them float32
    loss_fn = linen_loss(model)
    grad_fn = oa.value_and_grad(
        loss_fn, 6, state_argnum=2, merge_state=oa.merge_batch_stats(model.momentum)
    )
    (_, got), _ = jax.jit(grad_fn)(params, x, stats)
    _, want = loss_fn(params, x, stats)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == jnp.float64
        np.testing.assert_allclose(a, b, rtol=2e-15)


def test_nnx_first_layer_is_exact(x64):
    x = jnp.asarray(np.random.default_rng(1).normal(size=(24, 3)) * 3 + 5)
    norm = nnx.BatchNorm(
        3, momentum=0.99, param_dtype=jnp.float64, use_fast_variance=False, rngs=nnx.Rngs(0)
    )
    graphdef, params, state = nnx.split(norm, nnx.Param, ...)
    state = jax.tree.map(lambda x: x.astype(jnp.float64), state)

    def loss_fn(params, x, state):
        norm = nnx.merge(graphdef, params, state)
        loss = jnp.mean(norm(x, use_running_average=False) ** 2)
        return loss, nnx.state(norm, nnx.BatchStat)

    grad_fn = oa.value_and_grad(loss_fn, 6, state_argnum=2, merge_state=oa.merge_batch_stats(0.99))
    (_, got), _ = grad_fn(params, x, state)
    _, want = loss_fn(params, x, state)
    assert isinstance(got, nnx.State)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == jnp.float64
        np.testing.assert_allclose(a, b, rtol=2e-15)


def test_eight_layers_within_a_percent():
    """Deeper layers see what was normalised per micro-batch; shuffled data, the window's own."""
    x = jnp.asarray(np.random.default_rng(2).normal(size=(128, 6, 6, 3)), jnp.float32)
    model = Linen(depth=8, momentum=0.0)
    params, stats = linen_case(model, x)

    def loss_fn(scale, x, stats):  # the statistics are what matters, and a backward pass is slow
        loss, stats = linen_loss(model)(params, x, stats)
        return scale * loss, stats

    grad_fn = oa.value_and_grad(loss_fn, 4, state_argnum=2, merge_state=oa.merge_batch_stats(0.0))
    (_, got), _ = jax.jit(grad_fn)(1.0, x, stats)
    _, want = jax.jit(loss_fn)(1.0, x, stats)
    for name, layer in want["batch_stats"].items():
        mine = got["batch_stats"][name]
        np.testing.assert_allclose(mine["var"], layer["var"], rtol=0.01, err_msg=name)
        apart = np.abs(mine["mean"] - layer["mean"]) / np.sqrt(layer["var"])
        assert apart.max() < 0.01, name


def test_statistics_that_are_frozen():
    """By `momentum=1.0`, which no row could be told from: as they were, beside one that moves."""
    rngs = nnx.Rngs(0)
    frozen, model = (nnx.BatchNorm(3, momentum=m, rngs=rngs) for m in (1.0, 0.9))
    before = nnx.state(frozen, nnx.BatchStat)
    loss = lambda models, x: jnp.mean(models[0](models[1](x)) ** 2)  # noqa: E731
    oa.nnx.value_and_grad(loss, 3)([frozen, model], data(12))
    assert jax.tree.all(jax.tree.map(np.array_equal, nnx.state(frozen, nnx.BatchStat), before))
    np.testing.assert_allclose(model.mean[...], 0.1 * data(12).mean(0), rtol=1e-5)


@pytest.mark.parametrize("rows, other, count", [((2, 3), (2, 1), 2), ((2, 3), (2, 3), 3)])
def test_rows_that_would_broadcast(rows, other, count):
    merge = oa.merge_batch_stats(0.9)
    before = Stats(jnp.zeros(rows[1:]), jnp.ones(other[1:]))
    with pytest.raises(
        ValueError, match=r"rows of mean and variance of the layer.*one row a weight"
    ):
        merge(before, Stats(jnp.ones(rows), jnp.ones(other)), jnp.ones(count))


# Which leaves, which momentum.

LAYERS = {"stem": Stats(1.0, 1.0), "head": [{"mean": 1.0, "var": 1.0}]}
MOMENTA = {
    "one number": (0.5, 0.5, 0.5),
    "nested dicts": ({"stem": 0.9, "head": {0: 0.75}}, 0.9, 0.75),
    "dicts down to some layer": ({"stem": 0.9, "head": 0.75}, 0.9, 0.75),
    "a function of the path": (lambda path: {"stem": 0.9, "head": 0.75}[path[0]], 0.9, 0.75),
}


@pytest.mark.parametrize("name", MOMENTA)
def test_momentum_of_each_layer(name):
    momentum, stem, head = MOMENTA[name]
    rows = jax.tree.map(lambda _: jnp.array([1.0, 3.0]), LAYERS)
    got = oa.merge_batch_stats(momentum)(jax.tree.map(jnp.float32, LAYERS), rows, jnp.ones(2))
    np.testing.assert_allclose(got["stem"], (2.0, 2.0 + 1 / (1 - stem)), rtol=1e-6)
    np.testing.assert_allclose(got["head"][0]["var"], 2.0 + 1 / (1 - head), rtol=1e-6)


def test_a_function_of_the_path_of_an_nnx_model():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.norms = nnx.List([nnx.BatchNorm(2, momentum=m, rngs=rngs) for m in (0.9, 0.5)])

    model, seen = Model(nnx.Rngs(0)), []

    def momentum(path):
        seen.append(path)
        return model.norms[path[1]].momentum

    state = nnx.state(model, nnx.BatchStat)
    rows = jax.tree.map(lambda x: jnp.stack([x, x + 2]), state)
    got = oa.merge_batch_stats(momentum)(state, rows, jnp.ones(2))
    assert set(seen) == {("norms", 0), ("norms", 1)}
    np.testing.assert_allclose(got["norms"][0]["var"][...], 2 + 1 / 0.1, rtol=1e-6)
    np.testing.assert_allclose(got["norms"][1]["var"][...], 2 + 1 / 0.5, rtol=1e-6)


def test_counters_flags_and_keys_come_from_the_last_row():
    keys = jax.random.split(jax.random.key(0), 3)
    initial = {"calls": jnp.int32(4), "seen": jnp.array(False), "key": jax.random.key(9)}
    rows = {"calls": jnp.array([5, 6, 99]), "seen": jnp.array([False, True, False]), "key": keys}
    merge = oa.merge_batch_stats(0.9)
    got = merge(initial, rows, jnp.array([1.0, 1.0, 0.0]))
    assert int(got["calls"]) == 6 and bool(got["seen"])
    assert jax.random.key_data(got["key"]).tolist() == jax.random.key_data(keys[1]).tolist()
    got = merge(initial, rows, jnp.zeros(3))
    assert int(got["calls"]) == 4 and not bool(got["seen"])


@pytest.mark.parametrize(("others", "want"), [("mean", 2.5), ("max", 3.0), ("last", 3.0)])
def test_other_floating_leaves(others, want):
    initial = {"norm": {"mean": jnp.zeros([]), "var": jnp.ones([])}, "amax": jnp.zeros([])}
    rows = {
        "norm": {"mean": jnp.array([0.0, 2, NAN]), "var": jnp.array([1.0, 1, NAN])},
        "amax": jnp.array([1.0, 3, NAN]),
    }
    merge = oa.merge_batch_stats(0.0, others=others)
    got = merge(initial, rows, jnp.array([1.0, 3.0, 0.0]))
    assert float(got["amax"]) == want
    assert (float(got["norm"]["mean"]), float(got["norm"]["var"])) == (1.5, 1.75)


def test_other_names():
    initial = {"running_mean": jnp.zeros([]), "running_var": jnp.ones([])}
    rows = {"running_mean": jnp.array([1.0, 11]), "running_var": jnp.array([1.0, 1])}
    merge = oa.merge_batch_stats(0.0, names=("running_mean", "running_var"))
    assert float(merge(initial, rows, jnp.ones(2))["running_var"]) == 26.0


def test_narrow_statistics_are_merged_in_float32():
    initial = Stats(jnp.zeros([], jnp.bfloat16), jnp.zeros([], jnp.bfloat16))
    rows = Stats(jnp.ones(257, jnp.bfloat16), jnp.full(257, 2, jnp.bfloat16))
    got = oa.merge_batch_stats(0.9)(initial, rows, jnp.ones(257))
    assert got.mean.dtype == got.var.dtype == jnp.bfloat16
    assert float(got.mean) == 1.0 and float(got.var) == 2.0


ERRORS = [
    (lambda: oa.merge_batch_stats(1.0), r"momentum is 1.0, expected .* below 1"),
    (lambda: oa.merge_batch_stats(-0.1), r"momentum is -0.1"),
    (lambda: oa.merge_batch_stats("0.9"), r"momentum is '0.9', expected a number"),
    (lambda: oa.merge_batch_stats(None), r"momentum is None"),
    (lambda: oa.merge_batch_stats(0.9, others="sum"), r"others is 'sum'"),
    (lambda: oa.merge_batch_stats(0.9, names="mean"), r"names is 'mean', expected two"),
    (lambda: merge_one({"u": 1.0}, 0.9), r"\['u'\] is neither of two leaves 'mean' and 'var'"),
    (lambda: merge_one({"mean": 1.0}, 0.9), r"\['mean'\] is neither"),
    (lambda: merge_one([1.0, 2.0], 0.9), r"\[0\] is neither .* names="),
    (lambda: merge_one({"a": Stats(1.0, 1.0)}, {"b": 0.9}), r"nothing of the layer at \('a',\)"),
    (lambda: merge_one({"a": Stats(1.0, 1.0)}, {"a": {}}), r"of the layer at \('a',\) is \{\}"),
    (lambda: merge_one({"a": Stats(1.0, 1.0)}, lambda path: 2.0), r"\('a',\) is 2.0, expected"),
]


def merge_one(state, momentum):
    state = jax.tree.map(jnp.float32, state)
    rows = jax.tree.map(lambda x: x[None], state)
    return oa.merge_batch_stats(momentum)(state, rows, jnp.ones(1))


@pytest.mark.parametrize(("call", "message"), ERRORS, ids=[message for _, message in ERRORS])
def test_errors_say_what_to_type(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()
