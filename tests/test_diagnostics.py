"""What people log of a window, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optax_accum as oa

PARAMS = {
    "w": jnp.zeros((3, 2)),
    "b": jnp.zeros(2, jnp.bfloat16),
    "c": jnp.zeros([], jnp.complex64),
}
NAN = float("nan")


def gradient(seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), PARAMS)


def mean_norm(grads, weights):
    leaves = [[np.asarray(x, np.complex128).ravel() for x in jax.tree.leaves(g)] for g in grads]
    flat = np.array([np.concatenate(g) for g in leaves])
    return np.linalg.norm(np.average(flat, axis=0, weights=weights))


def run(tx, grads, weights):
    update, state = jax.jit(tx.update), tx.init(PARAMS)
    for grad, weight in zip(grads, weights, strict=True):
        _, state = update(grad, state, PARAMS, weight=jnp.float32(weight))
    return state


@pytest.mark.parametrize("jit", [False, True])
def test_window_of_a_real_tree(jit):
    grads, weights = [gradient(i) for i in range(3)], [2.0, 5.0, 1.0]
    state = run(oa.accumulate(optax.adam(0.1), 4), grads, weights)
    log = (jax.jit(oa.diagnostics.window) if jit else oa.diagnostics.window)(state)
    counts = {name: int(log[name]) for name in ("micro_step", "k", "update_step", "skipped")}
    assert counts == {"micro_step": 3, "k": 4, "update_step": 0, "skipped": 0}
    assert float(log["weight_sum"]) == 8.0
    np.testing.assert_allclose(log["grad_norm"], mean_norm(grads, weights), rtol=1e-5)


def test_dropped_micro_steps_are_counted_and_left_out():
    grads = [gradient(0), jax.tree.map(lambda g: g * NAN, gradient(1)), gradient(2)]
    state = run(oa.accumulate(optax.sgd(1.0), 4, nonfinite="skip_micro_step"), grads, [1, 1, 3])
    log = oa.diagnostics.window(state)
    assert int(log["skipped"]) == 1 and float(log["weight_sum"]) == 4.0
    np.testing.assert_allclose(log["grad_norm"], mean_norm(grads[::2], [1, 3]), rtol=1e-5)


@pytest.mark.parametrize("k", [1, 2])
def test_a_window_just_closed_is_empty(k):
    log = oa.diagnostics.window(run(oa.accumulate(optax.sgd(1.0), k), [gradient(0)] * 2, [1, 1]))
    assert float(log["grad_norm"]) == 0.0 and int(log["micro_step"]) == 0
    assert int(log["update_step"]) == 2 // k


def test_lane_by_lane_of_a_vmapped_state():
    tx = oa.accumulate(optax.sgd(1.0), 4)
    params = jnp.zeros((3, 2))
    grads = jnp.array([[3.0, 4.0], [0.0, 0.0], [6.0, 8.0]])
    _, state = jax.vmap(tx.update)(grads, jax.vmap(tx.init)(params), params)
    np.testing.assert_allclose(oa.diagnostics.window(state)["grad_norm"], [5.0, 0.0, 10.0])


# What an update was made of.

RECORDED = optax.chain(oa.diagnostics.record(), optax.clip_by_global_norm(0.1), optax.sgd(1.0))
LOSSES, TOKENS = [4.0, 1.0, NAN, 2.0], [2.0, 5.0, 3.0, 1.0]


def rtol(name):
    """What inner sees of a bfloat16 parameter's gradient is bfloat16."""
    return 1e-3 if name == "grad_norm" else 1e-5


def expected(keep):
    """The norm of the window's gradient, its loss and its weight, in NumPy."""
    weights = [TOKENS[i] for i in keep]
    loss = np.average([LOSSES[i] for i in keep], weights=weights)
    return {
        "grad_norm": mean_norm([gradient(i) for i in keep], weights),
        "loss": loss,
        "weight": sum(weights),
    }


@pytest.mark.parametrize("way", ["update", "apply_gradients", "jit"])
def test_an_update_of_a_window_with_a_dropped_micro_step(way):
    tx = oa.accumulate(RECORDED, 4, nonfinite="skip_micro_step")
    state, shown = tx.init(PARAMS), []

    def call(state, grads, loss, weight):
        if way == "update":
            _, state = tx.update(grads, state, PARAMS, value=loss, weight=weight)
        else:
            _, state = oa.apply_gradients(tx, grads, state, PARAMS, value=loss, weight=weight)
        return state, oa.diagnostics.last_update(state)

    call = jax.jit(call) if way == "jit" else call
    for i in range(4):
        grads = jax.tree.map(lambda g: g * NAN, gradient(i)) if i == 2 else gradient(i)
        state, log = call(state, grads, jnp.float32(LOSSES[i]), jnp.float32(TOKENS[i]))
        shown.append(bool(log["updated"]))
    assert shown == [False, False, False, True]
    assert (int(log["update_step"]), int(log["skipped"])) == (1, 1)
    for name, want in expected([0, 1, 3]).items():
        assert log[name].shape == () and log[name].dtype == jnp.float32
        np.testing.assert_allclose(log[name], want, rtol=rtol(name), err_msg=name)
    state, log = call(state, gradient(0), jnp.float32(9), jnp.float32(9))  # still the last one
    assert not log["updated"]
    np.testing.assert_allclose(log["weight"], 8.0)


@pytest.mark.parametrize("k", [1, lambda update_step: 1])
def test_an_update_of_one_micro_step(k):
    tx = oa.accumulate(RECORDED, k)
    _, state = tx.update(gradient(1), tx.init(PARAMS), PARAMS, value=1.0, weight=5.0)
    log = oa.diagnostics.last_update(state)
    for name, want in expected([1]).items():
        np.testing.assert_allclose(log[name], want, rtol=rtol(name))


def test_micro_step_gives_the_loss_by_itself():
    tx = oa.accumulate(RECORDED, 2)
    loss_fn = lambda w, x: jnp.mean(jnp.square(w - x))  # noqa: E731
    call = oa.micro_step(loss_fn, tx, weight=len)
    w, x = jnp.zeros([]), jnp.arange(6.0)
    _, _, state = call(w, tx.init(w), x[:4])
    _, _, state = call(w, state, x[4:])
    log = oa.diagnostics.last_update(state)
    want = {"loss": np.mean(np.arange(6.0) ** 2), "grad_norm": 5.0, "weight": 6.0}
    for name, value in want.items():
        np.testing.assert_allclose(log[name], value, rtol=1e-6)


def test_the_space_driver_is_logged_with_the_same_names():
    rows = np.array([1.0, 2, 3, NAN, 5, 6])
    tx, w = RECORDED, jnp.zeros([])

    def loss_fn(w, x):
        return jnp.mean(jnp.square(w - x))

    grad_fn = oa.value_and_grad(loss_fn, 3, nonfinite="skip_micro_step", has_stats=True)
    x = jnp.asarray(rows, jnp.float32)
    (loss, stats), grads = grad_fn(w, x)  # strided: [1, NaN] is dropped
    updates, state = tx.update(
        grads, tx.init(w), w, value=loss, weight=stats.weight, skipped=stats.skipped
    )
    kept = rows[[1, 2, 4, 5]]
    log = oa.diagnostics.last_update(state)
    want = {"loss": np.mean(kept**2), "grad_norm": 2 * kept.mean(), "weight": 4, "skipped": 1}
    for name, value in want.items():
        np.testing.assert_allclose(log[name], value, rtol=1e-6)
    assert int(log["update_step"]) == 1 and log["updated"]
    np.testing.assert_allclose(updates, 0.1, rtol=1e-6)  # clipped afterwards


@pytest.mark.parametrize("reduction", ["sum", "sum_over_weight"])
def test_other_reductions(reduction):
    tx = oa.accumulate(RECORDED, 2, loss_reduction=reduction)
    state, grads = tx.init(PARAMS), [gradient(0), gradient(1)]
    for grad, tokens in zip(grads, TOKENS, strict=False):
        weight = {"weight": tokens} if reduction == "sum_over_weight" else {}
        _, state = tx.update(grad, state, PARAMS, value=tokens, **weight)
    log = oa.diagnostics.last_update(state)
    count = 7.0 if reduction == "sum_over_weight" else 1.0
    np.testing.assert_allclose(log["grad_norm"], mean_norm(grads, [1, 1]) * 2 / count, rtol=1e-3)
    np.testing.assert_allclose(log["loss"], 7.0 / count, rtol=1e-6)
    assert float(log["weight"]) == (7.0 if reduction == "sum_over_weight" else 2.0)


def test_a_dropped_window_is_no_update():
    tx = oa.accumulate(RECORDED, 2, nonfinite="skip_window")
    state = run(tx, [gradient(0), gradient(1)], [1, 1])
    bad = jax.tree.map(lambda g: g * NAN, gradient(2))
    for grad in (bad, gradient(3)):
        _, state = tx.update(grad, state, PARAMS)
    log = oa.diagnostics.last_update(state)
    assert (int(log["update_step"]), int(log["skipped"]), bool(log["updated"])) == (1, 2, False)
    assert np.isfinite(log["grad_norm"])


def test_on_replicas_all_see_the_whole_window():
    tx = oa.accumulate(optax.chain(oa.diagnostics.record(), optax.sgd(1.0)), 2, axis_name="data")
    w, x = jnp.zeros([]), jnp.arange(16.0).reshape(8, 2)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def window(x):
        state = tx.init(w)
        for i in range(2):
            weight = 1 + x[0, i]
            _, state = tx.update(x[0, i], state, w, value=x[0, i], weight=weight)
        return oa.diagnostics.last_update(state)

    log = jax.jit(
        jax.shard_map(window, mesh=mesh, in_specs=spec("data"), out_specs=spec(), check_vma=False)
    )(x)
    mean = np.average(np.arange(16.0), weights=1 + np.arange(16.0))
    np.testing.assert_allclose([log["loss"], log["grad_norm"]], mean, rtol=1e-6)
    assert float(log["weight"]) == 136.0 and bool(log["updated"])


def test_a_record_changes_no_update():
    plain = oa.accumulate(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), 2)
    kept = oa.accumulate(
        optax.chain(oa.diagnostics.record(), optax.clip_by_global_norm(1.0), optax.sgd(0.1)), 2
    )
    states = [tx.init(PARAMS) for tx in (plain, kept)]
    for i in range(4):
        (a, states[0]), (b, states[1]) = (
            tx.update(gradient(i), state, PARAMS, weight=1.0 + i)
            for tx, state in zip((plain, kept), states, strict=True)
        )
        assert jax.tree.all(jax.tree.map(np.array_equal, a, b))


def test_one_accumulate_inside_another():
    """The record's updates are those of the innermost: every fourth micro-step here."""
    tx = oa.accumulate(oa.accumulate(RECORDED, 2), 2)
    state, shown = tx.init(PARAMS), []
    for i in range(7):
        _, state = tx.update(gradient(i), state, PARAMS, value=float(i))
        log = oa.diagnostics.last_update(state)
        shown.append((bool(log["updated"]), int(log["update_step"]), float(log["loss"])))
    before, after = (False, 0, NAN), (False, 1, 1.5)
    np.testing.assert_equal(shown, [before] * 3 + [(True, 1, 1.5)] + [after] * 3)


def test_a_record_beside_accumulate():
    tx = optax.chain(oa.diagnostics.record(), oa.accumulate(optax.sgd(1.0), 2))
    with pytest.raises(ValueError, match=r"beside accumulate.*put the link inside"):
        oa.diagnostics.last_update(tx.init(PARAMS))


@pytest.mark.parametrize("links", [0, 2])
def test_no_record_or_several(links):
    inner = optax.chain(*[oa.diagnostics.record()] * links, optax.sgd(1.0))
    with pytest.raises(ValueError, match=rf"holds {links} records, expected one.*record\(\)"):
        oa.diagnostics.last_update(oa.accumulate(inner, 2).init(PARAMS))


def test_the_log_of_a_framework_s_variables():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    tx = oa.accumulate(optax.chain(oa.diagnostics.record(), optax.sgd(0.1)), k=1)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    optimizer.update(model, grads, value=2.0, weight=5)
    log = oa.diagnostics.last_update(optimizer.opt_state)
    assert all(type(leaf) is type(jnp.zeros([])) for leaf in log.values())
    assert (float(log["loss"]), float(log["weight"])) == (2.0, 5.0)
    np.testing.assert_allclose(log["grad_norm"], np.sqrt(3.0), rtol=1e-6)
