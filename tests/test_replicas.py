"""Both drivers inside a mapped axis: eight replicas give what one device gives, and agree.

The oracle is NumPy in float64: every micro-gradient of every replica by a closed form, a window's
gradient by `sgd_window`, SGD with momentum by hand.
"""

import functools
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import sgd_window
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_accum as oa

R = 8  # replicas
KINDS = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit}
RATE, MOMENTUM = 0.1, 0.9
NAN = float("nan")


def mesh_of(kind, axes=("data",)):
    shape = (R,) if len(axes) == 1 else (4, 2)
    return jax.make_mesh(shape, axes, axis_types=(KINDS[kind],) * len(axes))


def momentum_sgd():
    return optax.sgd(RATE, momentum=MOMENTUM)


# A problem whose gradients are known: half the squared error of a linear model.


def params_of(dtype=np.float64):
    rng = np.random.default_rng(0)
    return {"w": rng.normal(size=(3, 2)).astype(dtype), "b": rng.normal(size=2).astype(dtype)}


def batches(micro_steps, m=2, seed=1, dtype=np.float64):
    """Leaves (micro_steps, R, m, ...)."""
    rng = np.random.default_rng(seed)
    shape = (micro_steps, R, m)
    return {
        "x": rng.normal(size=(*shape, 3)).astype(dtype),
        "y": rng.normal(size=(*shape, 2)).astype(dtype),
    }


def loss_mean(params, batch):
    error = batch["x"] @ params["w"] + params["b"] - batch["y"]
    return 0.5 * jnp.mean(jnp.sum(error**2, -1))


def loss_sum(params, batch):
    error = batch["x"] @ params["w"] + params["b"] - batch["y"]
    return 0.5 * jnp.sum(error**2)


def by_hand(params, batch, mean):
    """(loss, gradient) by NumPy."""
    error = batch["x"] @ params["w"] + params["b"] - batch["y"]
    share = 1 / len(error) if mean else 1.0
    grads = {"w": share * batch["x"].T @ error, "b": share * error.sum(0)}
    return 0.5 * share * (error**2).sum(), grads


class Case(NamedTuple):
    """A run of the time driver."""

    k: Any = 3
    schedule: Any = None  # the same, as NumPy reads it
    weights: Any = None  # (micro_steps, R)
    last: Any = ()  # micro-steps that close their window
    micro_steps: int = 7
    keywords: Any = MappingProxyType({})

    @property
    def reduction(self):
        return self.keywords.get("loss_reduction", "mean")


def ragged_weights(micro_steps=7):
    """Of 0 to 4, one micro-step of zeros throughout, one replica that never has any."""
    weights = np.random.default_rng(3).integers(0, 5, size=(micro_steps, R)).astype(np.float32)
    weights[2] = 0
    weights[:, 5] = 0
    return weights


def empty_window(micro_steps=7):
    weights = np.ones((micro_steps, R), np.float32)
    weights[:3] = 0
    return weights


CASES = {
    "means": Case(),
    "weights": Case(weights=ragged_weights()),
    "sums": Case(keywords={"loss_reduction": "sum"}),
    "sums over weights": Case(
        weights=ragged_weights(), keywords={"loss_reduction": "sum_over_weight"}
    ),
    "last": Case(last=(1, 2, 6), weights=ragged_weights()),
    "a schedule": Case(
        k=lambda step: jnp.where(step < 1, 2, 3), schedule=lambda step: 2 if step < 1 else 3
    ),
    "a window without weight": Case(weights=empty_window()),
    "k = 1": Case(k=1, weights=np.delete(ragged_weights(8), 2, 0)),
    "k = 1, sums": Case(k=1, micro_steps=3, keywords={"loss_reduction": "sum"}),
    "k = 1, empty": Case(k=1, weights=ragged_weights(), last=(2,)),
    "skipping": Case(weights=ragged_weights(), keywords={"nonfinite": "skip_micro_step"}),
    "skipping windows": Case(weights=ragged_weights(), keywords={"nonfinite": "skip_window"}),
}


class Run(NamedTuple):
    params: Any
    updates: int  # made
    means: list[float]  # the values that inner must see


def expected(case: Case, data: Any) -> Run:
    """The run by NumPy, on one device."""
    params = params_of()
    velocity = jax.tree.map(np.zeros_like, params)
    window, updates, means, opened = [], 0, [], None
    for i in range(case.micro_steps):
        opened = opened or (case.schedule(updates) if case.schedule else case.k)
        for r in range(R):
            one = jax.tree.map(lambda x, i=i, r=r: x[i, r], data)
            weight = 1.0 if case.weights is None else float(case.weights[i, r])
            window.append((*by_hand(params, one, case.reduction == "mean"), weight))
        if len(window) < opened * R and i not in case.last:
            continue
        weights = [weight for *_, weight in window]
        if sum(weights):
            combine = functools.partial(over_window, case.reduction, weights)
            leaves = zip(*(jax.tree.leaves(grads) for _, grads, _ in window), strict=True)
            grads = jax.tree.unflatten(jax.tree.structure(params), [combine(g) for g in leaves])
            means.append(float(combine([loss for loss, *_ in window])))
            velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
            params = jax.tree.map(lambda p, v: p - RATE * v, params, velocity)
            updates += 1
        window, opened = [], None
    return Run(params, updates, means)


def over_window(reduction, weights, gradients):
    """Without weight a micro-batch is none, however its loss is reduced."""
    kept = [i for i, weight in enumerate(weights) if weight]
    return sgd_window(reduction, [gradients[i] for i in kept], [weights[i] for i in kept])


# Entries: how a micro-step is taken.


def by_update(tx, loss, axes, weighted):
    def one(params, state, batch, weight, last):
        value, grads = jax.value_and_grad(loss)(own(params, axes), batch)
        extra = {"weight": weight} if weighted else {}
        updates, state = tx.update(grads, state, params, last=last, value=value, **extra)
        return optax.apply_updates(params, updates), state

    return one


def by_apply_gradients(tx, loss, axes, weighted):
    def one(params, state, batch, weight, last):
        value, grads = jax.value_and_grad(loss)(own(params, axes), batch)
        extra = {"weight": weight} if weighted else {}
        return oa.apply_gradients(tx, grads, state, params, last=last, value=value, **extra)[:2]

    return one


def by_micro_step(engine):
    def make(tx, loss, axes, weighted):
        del axes
        how = {"weight": lambda b: b["weight"]} if weighted else {}
        take = oa.micro_step(lambda p, b: loss(p, b), tx, engine=engine, **how)

        def one(params, state, batch, weight, last):
            _, params, state = take(params, state, batch | {"weight": weight}, last=last)
            return params, state

        return one

    return make


ENTRIES = {
    "update": by_update,
    "apply_gradients": by_apply_gradients,
    "micro_step, carry": by_micro_step("carry"),
    "micro_step, refs": by_micro_step("refs"),
    "micro_step": by_micro_step("auto"),
}


def own(params, axes):
    """As users must where jax checks what varies."""
    if not jax.typeof(jax.lax.axis_index(axes)).manual_axis_type.varying:
        return params
    return jax.tree.map(lambda x: jax.lax.pcast(x, axes, to="varying"), params)


class Witnessed(NamedTuple):
    values: Any
    count: Any
    inner: Any


def witness(inner):
    """Notes the values that inner is given."""

    def init(params):
        return Witnessed(jnp.zeros(8), jnp.zeros([], jnp.int32), inner.init(params))

    def update(updates, state, params=None, *, value=None, **extra):
        del extra
        updates, inner_state = inner.update(updates, state.inner, params)
        values = state.values.at[state.count].set(0 if value is None else value)
        return updates, Witnessed(values, state.count + 1, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def drive(tx, one, mesh, check_vma, data, case, init=None):
    """All micro-steps in one program; (params, state, each replica's copy of both)."""
    axes = mesh.axis_names
    params = params_of()
    weights = np.ones((case.micro_steps, R), np.float32) if case.weights is None else case.weights
    last = np.isin(np.arange(case.micro_steps), case.last)

    def whole(params, data, weights):
        state = tx.init(params)

        def step(carry, given):
            batch, weight, last = given
            batch, weight = jax.tree.map(lambda x: x[0], (batch, weight))
            return one(*carry, batch, weight, last), ()

        (params, state), _ = jax.lax.scan(step, (params, state), (data, weights, last))
        copies = jax.tree.map(lambda x: jnp.asarray(x)[None], (params, state))
        return params, state, copies

    per_replica = P(None, axes)
    specs = oa.state_specs(tx, params, axes)
    mapped = jax.shard_map(
        whole,
        mesh=mesh,
        in_specs=(P(), per_replica, per_replica),
        out_specs=(P(), specs, P(axes)),
        check_vma=check_vma,
    )
    placed = jax.device_put((data, weights), NamedSharding(mesh, per_replica))
    return jax.jit(mapped)(params, *placed)


ROWS = ("grad_sum", "weight_sum", "value_sum", "value_weight", "kept")


def assert_agreed(copies):
    """Every replica's parameters and state, but for the rows, to the last bit."""
    params, state = copies
    state = jax.tree.map(
        lambda s: s._replace(**dict.fromkeys(ROWS)) if s.weight_sum.ndim > 1 else s,
        state,
        is_leaf=lambda s: isinstance(s, oa.AccumulateState),
    )
    for leaf in jax.tree.leaves((params, state)):
        rows = np.asarray(leaf)
        assert len({row.tobytes() for row in rows}) == 1, rows


def close(got, want, **tolerance):
    tolerance = tolerance or {"rtol": 1e-12, "atol": 1e-13}
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), **tolerance)


def refs_cannot(entry, case):
    if not entry.endswith("refs"):
        return False
    return case.k == 1 or case.keywords.get("nonfinite") == "skip_micro_step"


def run(name, entry, kind, check_vma, axes=("data",)):
    case, mesh = CASES[name], mesh_of(kind, axes)
    data = batches(case.micro_steps)
    loss = loss_mean if case.reduction == "mean" else loss_sum
    tx = oa.accumulate(witness(momentum_sgd()), case.k, axis_name=axes, **case.keywords)
    one = ENTRIES[entry](tx, loss, axes, case.weights is not None)
    if refs_cannot(entry, case):
        with pytest.raises(ValueError, match="engine='refs' cannot be used here"):
            drive(tx, one, mesh, check_vma, data, case)
        return
    params, state, copies = drive(tx, one, mesh, check_vma, data, case)
    want = expected(case, data)
    close(params, want.params)
    assert want.updates > 0
    assert int(state.update_step) == want.updates
    assert int(state.skipped) == 0
    np.testing.assert_allclose(
        state.inner_state.values[: want.updates], want.means, rtol=3e-6, atol=1e-6
    )
    assert_agreed(copies)


@pytest.mark.parametrize("name", CASES)
def test_the_time_driver_is_one_device(x64, name):
    """Entries, kinds of meshes and of checking take turns; all of them under `full`."""
    turn = list(CASES).index(name)
    check_vma = bool(turn // len(ENTRIES) % 2)
    run(name, list(ENTRIES)[turn % len(ENTRIES)], list(KINDS)[turn % 2], check_vma)


@pytest.mark.full
@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", CASES)
def test_the_time_driver_is_one_device_everywhere(x64, name, entry, kind, check_vma):
    run(name, entry, kind, check_vma)


@pytest.mark.parametrize(
    "name, entry, check_vma",
    [
        ("last", "update", True),
        ("weights", "micro_step, refs", False),
        ("weights", "micro_step, refs", True),
        ("k = 1", "micro_step", True),
    ],
)
def test_two_axes_at_once(x64, name, entry, check_vma):
    run(name, entry, "explicit" if check_vma else "automatic", check_vma, ("data", "fsdp"))


SPECS = (P(), P("data"))


def per_replica(f, *, mesh=None, check_vma=False, specs=SPECS):
    """`f` on all replicas; every leaf of its result as each of them has it, (R, ...)."""
    mesh = mesh or mesh_of("automatic")

    def rows(*args):
        return jax.tree.map(lambda x: jnp.asarray(x)[None], f(*args))

    mapped = jax.shard_map(
        rows, mesh=mesh, in_specs=specs, out_specs=P(mesh.axis_names), check_vma=check_vma
    )
    return jax.jit(mapped)


def test_pmap(x64):
    case = CASES["weights"]
    data = batches(case.micro_steps)
    tx = oa.accumulate(witness(momentum_sgd()), case.k, axis_name="data")
    one = by_micro_step("auto")(tx, loss_mean, None, True)
    copies = jax.tree.map(lambda x: np.stack([x] * R), params_of())
    state = jax.pmap(tx.init, axis_name="data")(copies)
    take = jax.pmap(one, axis_name="data", in_axes=(0, 0, 0, 0, None))
    for i in range(case.micro_steps):
        batch = jax.tree.map(lambda x, i=i: x[i], data)
        copies, state = take(copies, state, batch, case.weights[i], False)
    want = expected(case, data)
    close(jax.tree.map(lambda x: x[-1], copies), want.params)
    assert np.asarray(state.update_step).tolist() == [want.updates] * R
    assert_agreed((copies, state))
    once = jax.tree.map(lambda x: x[0], data)
    grad_fn = oa.value_and_grad(loss_mean, 2, axis_name="data")
    value, grads = jax.pmap(grad_fn, axis_name="data", in_axes=(None, 0))(params_of(), once)
    whole = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), once)
    for r in (0, R - 1):
        close(jax.tree.map(lambda x, r=r: x[r], (value, grads)), by_hand(params_of(), whole, True))


@pytest.mark.parametrize("check_vma", [False, True])
def test_a_flush_on_replicas(x64, check_vma):
    """A partial window whose replicas have different weights; then an empty one."""
    tx = oa.accumulate(momentum_sgd(), 4, axis_name="data")
    data = batches(2)
    weights = ragged_weights()[:2]

    def f(params, data, weights):
        state = tx.init(params)
        for i in range(2):
            batch = jax.tree.map(lambda x, i=i: x[i, 0], data)
            grads = jax.grad(loss_mean)(own(params, "data"), batch)
            _, state = tx.update(grads, state, params, weight=weights[i, 0])
        updates, state = oa.flush(tx, state, params)
        again, state_after = oa.flush(tx, state, params)
        flags = state.updated, state_after.updated, state_after.update_step
        return optax.apply_updates(params, updates), again, flags

    specs = (P(), P(None, "data"), P(None, "data"))
    params, again, flags = per_replica(f, check_vma=check_vma, specs=specs)(
        params_of(), data, weights
    )
    want = expected(Case(k=2, weights=weights, micro_steps=2), data)
    for r in range(R):
        close(jax.tree.map(lambda x, r=r: x[r], params), want.params)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(again))
    assert [np.unique(flag).tolist() for flag in flags] == [[True], [False], [1]]


@pytest.mark.parametrize("check_vma", [False, True])
def test_nested_and_chained(x64, check_vma):
    """The outer window is over replicas, the inner one over outer windows, which all share."""
    inner = oa.accumulate(optax.chain(optax.clip(0.5), momentum_sgd()), 2)
    tx = optax.chain(optax.identity(), oa.accumulate(inner, 3, axis_name="data"))
    case = Case(k=6, micro_steps=12, weights=np.ones((12, R), np.float32))
    data = batches(12)

    def one(params, state, batch, weight, last):
        grads = jax.grad(loss_mean)(own(params, "data"), batch)
        updates, state = tx.update(grads, state, params, weight=weight, last=last)
        return optax.apply_updates(params, updates), state

    params, state, copies = drive(tx, one, mesh_of("automatic"), check_vma, data, case)
    want, velocity = params_of(), jax.tree.map(np.zeros_like, params_of())
    for window in range(2):
        whole = jax.tree.map(
            lambda x, w=window: x[6 * w : 6 * w + 6].reshape(-1, x.shape[-1]), data
        )
        grads = jax.tree.map(lambda g: np.clip(g, -0.5, 0.5), by_hand(want, whole, True)[1])
        velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
        want = jax.tree.map(lambda p, v: p - RATE * v, want, velocity)
    close(params, want)
    assert int(state[1].inner_state.update_step) == 2
    assert_agreed(copies)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_nested_over_the_same_axis_is_an_error(reduction):
    """It would be reduced twice: eight times the sum."""
    inner = oa.accumulate(optax.sgd(1.0), 2, loss_reduction=reduction, axis_name="data")
    tx = oa.accumulate(inner, 2, loss_reduction=reduction, axis_name="data")
    f = per_replica(lambda w, g: tx.update(g[0], tx.init(w), w)[0])
    with pytest.raises(ValueError, match="type axis_name= on the outer one alone"):
        f(jnp.zeros([]), jnp.ones(R))
    with pytest.raises(ValueError, match="type axis_name= on the outer one alone"):
        oa.accumulate(inner, 2).init(jnp.zeros([]))


def test_bfloat16_windows_round_differently_on_each_replica():
    """The same gradient everywhere, between two bfloat16 numbers: rounded both ways."""
    tx = oa.accumulate(optax.sgd(1.0), 2, axis_name="data", accumulator_dtype=jnp.bfloat16)
    gradient = np.float32(1 + 2.0**-9)  # a quarter of the way from 1 to the next

    def f(w, x):
        _, state = tx.update(jnp.full(64, gradient) + 0 * x[0], tx.init(w), w)
        updates, _ = tx.update(jnp.full(64, gradient) + 0 * x[0], state, w)
        return state.grad_sum[0].astype(jnp.float32), updates

    sums, updates = per_replica(f)(jnp.zeros(64), jnp.ones(R))
    assert set(np.unique(sums)) == {1.0, 1 + 2.0**-7}
    assert len({row.tobytes() for row in np.asarray(sums)}) == R
    assert len({row.tobytes() for row in np.asarray(updates)}) == 1
    # The sum of 16 roundings is unbiased: 8 and 4 roundings of a spacing of 2**-7 and 2**-6.
    np.testing.assert_allclose(-np.asarray(updates)[0].mean(), gradient, atol=2e-3)


# The space driver.


def many(k, m=2, dtype=np.float64):
    """A batch of R shares, k micro-batches of m each, with masks; replica 5's weigh nothing."""
    rng = np.random.default_rng(5)
    n = R * k * m
    mask = rng.integers(0, 2, size=n)
    mask[5 * k * m : 6 * k * m] = 0
    mask[:: k * m] = 1
    mask[5 * k * m] = 0
    return {
        "x": rng.normal(size=(n, 3)).astype(dtype),
        "y": rng.normal(size=(n, 2)).astype(dtype),
        "mask": mask.astype(dtype),
    }


def each_loss(params, batch):
    error = jnp.tanh(batch["x"] @ params["w"] + params["b"]) - batch["y"]
    return jnp.sum(error**2, -1) * batch["mask"]


def token_mean(params, batch):
    each = each_loss(params, batch)
    return each.sum() / batch["mask"].sum()


def token_sum(params, batch):
    return each_loss(params, batch).sum()


def example_mean(params, batch):
    return each_loss(params, batch).mean()


def tokens(batch):
    return batch["mask"].sum()


class Way(NamedTuple):
    """A call of the space driver, and the loss of the whole batch on one device."""

    loss: Any
    whole: Any
    keywords: Any
    k: int = 3


WAYS = {
    "means": Way(example_mean, example_mean, {}),
    "tokens": Way(token_mean, token_mean, {"weight": tokens}),
    "sums": Way(token_sum, token_sum, {"loss_reduction": "sum"}),
    "sums over tokens": Way(
        token_sum, token_mean, {"loss_reduction": "sum_over_weight", "weight": tokens}
    ),
    "k = 1": Way(token_mean, token_mean, {"weight": tokens}, k=1),
    "skipping": Way(token_mean, token_mean, {"weight": tokens, "nonfinite": "skip_micro_step"}),
}


def space(way, engine, kind, check_vma, axes=("data",), **more):
    mesh, batch = mesh_of(kind, axes), many(way.k)
    grad_fn = oa.value_and_grad(
        way.loss, way.k, axis_name=axes, engine=engine, has_stats=True, **way.keywords, **more
    )
    f = per_replica(grad_fn, mesh=mesh, check_vma=check_vma, specs=(P(), P(axes)))
    got = f(params_of(), jax.device_put(batch, NamedSharding(mesh, P(axes))))
    (value, stats), grads = got = jax.tree.map(np.asarray, got)
    want = jax.value_and_grad(way.whole)(params_of(), batch)
    close(jax.tree.map(lambda x: x[0], (value, grads)), want)
    for leaf in jax.tree.leaves(got):
        assert len({row.tobytes() for row in np.asarray(leaf)}) == 1
    weight = batch["mask"].sum() if "weight" in way.keywords else len(batch["mask"])
    assert np.asarray(stats.weight)[0] == weight


@pytest.mark.parametrize("engine", ["carry", "refs"])
@pytest.mark.parametrize("name", WAYS)
def test_the_space_driver_is_one_device(x64, name, engine):
    if name == "skipping" and engine == "refs":
        pytest.skip("skipping looks at each micro-gradient: an error, tested elsewhere")
    turn = list(WAYS).index(name) + (engine == "refs")
    space(WAYS[name], engine, list(KINDS)[turn // 2 % 2], bool(turn % 2))


@pytest.mark.full
@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ["carry", "auto"])
@pytest.mark.parametrize("name", WAYS)
def test_the_space_driver_is_one_device_everywhere(x64, name, engine, kind, check_vma):
    space(WAYS[name], engine, kind, check_vma)


@pytest.mark.parametrize("name", ["means", "tokens"])
def test_the_space_driver_over_two_axes(x64, name):
    space(WAYS[name], "auto", "explicit", name == "means", ("data", "fsdp"))


AUX = {
    "mean": lambda rows, weights: np.average(rows, axis=0, weights=weights),
    "sum": lambda rows, weights: rows[weights > 0].sum(0),
    "max": lambda rows, weights: rows[weights > 0].max(0),
    "min": lambda rows, weights: rows[weights > 0].min(0),
}


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("remainder", [False, True])
def test_auxiliary_outputs_of_all_replicas(x64, check_vma, remainder):
    """A remainder is one smaller micro-batch a replica; replica 5 weighs nothing, nor does 7."""
    k, m, share = 3, 2, 5 if remainder else 6
    batch = jax.tree.map(lambda x: x[: R * share], many(k))
    batch["mask"][:] = 1
    batch["mask"][5 * share : 6 * share] = 0
    batch["mask"][7 * share :] = 0
    batch["id"] = np.arange(R * share)

    def loss(params, b):
        vector = b["x"].sum(0)
        aux = dict.fromkeys([*AUX, "last", "stack"], vector)
        return token_mean(params, b), aux | {"concat": b["id"], "any": (vector > 1).any()}

    spec = {name: name for name in [*AUX, "last", "stack", "concat"]} | {"any": "max"}
    grad_fn = oa.value_and_grad(
        loss,
        micro_batch_size=m,
        has_aux=True,
        aux=spec,
        weight=tokens,
        remainder="exact" if remainder else "error",
        axis_name="data",
    )
    (_, aux), _ = per_replica(grad_fn, check_vma=check_vma)(params_of(), batch)

    def cut(x):  # micro-batches of a replica: strided, and a smaller one of what is left
        whole = share // m
        head = [x[i : whole * m : whole] for i in range(whole)]
        return head + [x[whole * m :]] * (share > whole * m)

    by_replica = [
        jax.tree.map(lambda x, r=r: x[r * share : (r + 1) * share], batch) for r in range(R)
    ]
    rows = np.stack([part.sum(0) for b in by_replica for part in cut(b["x"])])
    weights = np.array([part.sum() for b in by_replica for part in cut(b["mask"])])
    for name, reduce in AUX.items():
        for r in (0, R - 1):
            close(aux[name][r], reduce(rows, weights))
    close(aux["last"][0], rows[np.flatnonzero(weights)[-1]])  # of the last that counts, replica 6
    assert np.asarray(aux["any"]).all() == (rows[weights > 0] > 1).any()
    kept = np.repeat(weights > 0, [len(part) for b in by_replica for part in cut(b["id"])])
    close(np.asarray(aux["stack"]).reshape(-1, 3), rows * (weights > 0)[:, None])
    ids = np.asarray(aux["concat"]).ravel()
    np.testing.assert_array_equal(ids[kept], np.arange(R * share)[kept])
    assert len({row.tobytes() for row in np.asarray(aux["last"])}) == 1


def total_variance(initial, stacked, weights):
    """The law of total variance over all micro-steps of all replicas."""
    del initial
    share = weights.astype(jnp.float64) / weights.sum()
    mean = jnp.tensordot(share, stacked["mean"], 1)
    within = jnp.tensordot(share, stacked["var"], 1)
    between = jnp.tensordot(share, jnp.square(stacked["mean"] - mean), 1)
    return {"mean": mean, "var": within + between}


@pytest.mark.parametrize("check_vma", [False, True])
def test_model_state_is_merged_over_replicas(x64, check_vma):
    def loss(params, batch, state):
        share = batch["mask"] / batch["mask"].sum()
        mean = share @ batch["x"]
        state = {"mean": mean, "var": share @ jnp.square(batch["x"] - mean) + 0 * state["var"]}
        return token_mean(params, batch), state

    batch = many(3)
    state = {"mean": np.zeros(3), "var": np.ones(3)}
    grad_fn = oa.value_and_grad(
        loss, 3, state_argnum=2, merge_state=total_variance, weight=tokens, axis_name="data"
    )
    f = per_replica(grad_fn, check_vma=check_vma, specs=(P(), P("data"), P()))
    (_, merged), _ = f(params_of(), batch, state)
    seen = batch["x"][batch["mask"] > 0]
    for r in (0, 5):
        close(merged["mean"][r], seen.mean(0))
        close(merged["var"][r], seen.var(0))


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("driver", ["space", "time"])
def test_keys_differ_between_replicas_and_micro_steps(driver, typed):
    key = jax.random.key(7) if typed else jax.random.PRNGKey(7)

    def loss(w, batch, key):
        return jnp.mean(w * batch), jax.random.normal(key, (4,))

    if driver == "space":
        grad_fn = oa.value_and_grad(
            loss, 3, has_aux=True, aux="stack", rng_argnums=2, axis_name="data"
        )
        f = lambda w, batch, key: grad_fn(w, batch, key)[0][1]  # noqa: E731
    else:
        tx = oa.accumulate(optax.sgd(1.0), 2, axis_name="data")
        take = oa.micro_step(loss, tx, has_aux=True, rng_argnums=2)

        def f(w, batch, key):
            state, masks = tx.init(w), []
            for _ in range(3):
                (_, mask), w, state = take(w, state, batch, key)
                masks.append(mask)
            return jnp.stack(masks)

    masks = per_replica(f, specs=(P(), P("data"), P()))(jnp.float32(1), jnp.ones(3 * R), key)
    assert len({mask.tobytes() for mask in np.asarray(masks).reshape(-1, 4)}) == 3 * R


@pytest.mark.parametrize("engine", ["carry", "refs"])
def test_several_differentiated_arguments(x64, engine):
    def loss(w, batch, b):
        return example_mean({"w": w, "b": b}, batch)

    params, batch = params_of(), many(2)
    grad_fn = oa.value_and_grad(loss, 2, argnums=(2, 0), axis_name="data", engine=engine)
    f = per_replica(grad_fn, check_vma=True, specs=(P(), P("data"), P()))
    value, (b, w) = f(params["w"], batch, params["b"])
    want = jax.value_and_grad(example_mean)(params, batch)
    close((value[3], {"b": b[3], "w": w[3]}), want)


# Losses that communicate.


def synchronised(params, batch):
    """Centred by the mean over all replicas' tokens; a denominator of zero is guarded."""
    h = batch["x"] @ params["w"]
    count = jax.lax.psum(batch["mask"].sum(), "data")
    mean = jax.lax.psum(batch["mask"] @ h, "data") / jnp.maximum(count, 1)
    each = jnp.sum(jnp.tanh(h - mean + params["b"]) ** 2, -1) * batch["mask"]
    return each.sum() / jnp.maximum(batch["mask"].sum(), 1)


def synchronised_by_hand(params, batch, k, weights):
    """The same on one device: micro-step by micro-step, the replicas' side by side."""
    total = weight = 0.0
    share = len(batch["mask"]) // R
    for i in range(k):
        rows = np.concatenate([np.arange(r * share, (r + 1) * share)[i::k] for r in range(R)])
        x, mask = batch["x"][rows], batch["mask"][rows]
        h = x @ params["w"]
        mean = mask @ h / max(mask.sum(), 1)
        each = jnp.sum(jnp.tanh(h - mean + params["b"]) ** 2, -1) * mask
        counts = mask.reshape(R, -1).sum(1)
        means = each.reshape(R, -1).sum(1) / np.maximum(counts, 1)
        total += (means * (counts if weights else 1)).sum()
        weight += counts.sum() if weights else R
    return total / weight


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("engine, weights", [("carry", True), ("refs", False), ("auto", True)])
def test_synchronised_statistics(x64, engine, weights, check_vma):
    """No replica leaves out what the others wait for: replica 5 has no weight at all."""
    params, batch, k = params_of(), many(3), 3
    batch["mask"][2::6] = batch["mask"][5::6] = 0  # no weight in the last micro-step anywhere
    grad_fn = oa.value_and_grad(
        synchronised, k, engine=engine, weight=tokens if weights else None, axis_name="data"
    )
    value, grads = per_replica(grad_fn, check_vma=check_vma)(params, batch)
    want = jax.value_and_grad(synchronised_by_hand)(params, batch, k, weights)
    for r in (0, 5):
        close(jax.tree.map(lambda x, r=r: x[r], (value, grads)), want)


@pytest.mark.parametrize("check_vma", [False, True])
def test_synchronised_statistics_in_a_micro_step(x64, check_vma):
    params, batch, k = params_of(), many(3), 3
    tx = oa.accumulate(optax.sgd(1.0), k, axis_name="data")
    take = oa.micro_step(synchronised, tx, weight=tokens)

    def f(params, batch):
        state = tx.init(params)
        for i in range(k):
            one = jax.tree.map(lambda x, i=i: x[i::k], batch)
            _, params, state = take(params, state, one)
        return params

    got = per_replica(f, check_vma=check_vma)(params, batch)
    grads = jax.grad(synchronised_by_hand)(params, batch, k, True)
    want = jax.tree.map(lambda p, g: p - g, params, grads)
    for r in (0, 5):
        close(jax.tree.map(lambda x, r=r: x[r], got), want)


@pytest.mark.parametrize("driver", ["space", "time"])
def test_refs_with_weights_and_a_loss_that_communicates(driver):
    if driver == "space":
        grad_fn = oa.value_and_grad(synchronised, 3, engine="refs", weight=tokens, axis_name="data")
    else:
        tx = oa.accumulate(optax.sgd(1.0), 2, axis_name="data")
        take = oa.micro_step(synchronised, tx, engine="refs", weight=tokens)
        grad_fn = lambda params, batch: take(params, tx.init(params), batch)[1]  # noqa: E731
    f = per_replica(grad_fn)
    with pytest.raises(ValueError, match=r"communicates between .* type engine='carry'"):
        f(*jax.tree.map(np.float32, (params_of(), many(3))))


@pytest.mark.parametrize("engine", ["carry", "refs"])
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_of_a_replica_keep_their_own_gradient(x64, kind, engine):
    """One scale a replica, cut over the axis; one matrix that all share."""

    def loss(params, batch):
        each = jnp.square(jnp.tanh(batch["x"] @ params["w"]) * params["scale"] - batch["y"])
        return jnp.mean(each)

    rng, batch, mesh = np.random.default_rng(6), many(2), mesh_of(kind)
    params = {"w": params_of()["w"], "scale": rng.normal(size=R)}
    specs = {"w": P(), "scale": P("data")}
    f = jax.shard_map(
        oa.value_and_grad(loss, 2, axis_name="data", engine=engine),
        mesh=mesh,
        in_specs=(specs, P("data")),
        out_specs=(P(), specs),
    )
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    got = jax.jit(f)(jax.tree.map(put, params, specs), put(batch, P("data")))

    def whole(params):
        shares = jax.tree.map(lambda x: x.reshape(R, -1, *x.shape[1:]), batch)
        own = [{"w": params["w"], "scale": params["scale"][r]} for r in range(R)]
        each = [loss(own[r], jax.tree.map(lambda x, r=r: x[r], shares)) for r in range(R)]
        return sum(each) / R

    close(got, jax.value_and_grad(whole)(params))


# Poison, and denominators.


def gradient_of(x):
    return lambda w, batch: jnp.sum(batch["x"] * w) / jnp.sum(batch["n"])


def test_a_mean_over_replicas_is_no_mean_of_means(x64):
    """Tokens and gradient sums (1, 1) and (9, 0): 0.1, where the mean of means is 0.5."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    batch = {"x": np.array([1.0, 0.0]), "n": np.array([1.0, 9.0])}
    loss = lambda w, b: jnp.sum(b["x"] * w) / jnp.sum(b["n"])  # noqa: E731
    count = lambda b: jnp.sum(b["n"])  # noqa: E731

    def in_time(engine):
        def f(w, batch):
            tx = oa.accumulate(optax.sgd(1.0), 1 if engine == "auto" else 2, axis_name="data")
            take = oa.micro_step(loss, tx, weight=count, engine=engine)
            _, w, _ = take(w, tx.init(w), batch, last=True)
            return -w

        return f

    def in_space(engine):
        grad_fn = oa.value_and_grad(loss, 1, weight=count, axis_name="data", engine=engine)
        return lambda w, batch: grad_fn(w, batch)[1]

    for f in (in_time("carry"), in_time("refs"), in_time("auto"), in_space("carry")):
        np.testing.assert_allclose(per_replica(f, mesh=mesh)(0.0, batch), [0.1, 0.1], rtol=1e-12)


class Poisoned(NamedTuple):
    """What one replica of eight is given in one micro-step of four."""

    gradient: float = 1.0
    weight: float = 1.0


POISON = {
    "a NaN": Poisoned(gradient=NAN),
    "an infinity": Poisoned(gradient=float("inf")),
    "no weight": Poisoned(gradient=NAN, weight=0.0),
    "a NaN as weight": Poisoned(weight=NAN),
    "a negative weight": Poisoned(weight=-1.0),
}


def poisoned(kind, number=2, replica=3):
    """(8, R) gradients and weights of two windows, one number of them poisoned."""
    gradients = np.arange(1.0, 8 * R + 1).reshape(8, R)
    weights = np.ones((8, R), np.float32)
    gradients[number, replica], weights[number, replica] = POISON[kind]
    return gradients, weights


POLICIES = ("propagate", "skip_micro_step", "skip_window")
POISONED_ENTRIES = ("update", "apply_gradients", "micro_step")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", POISON)
def test_poison_on_one_replica_in_time(x64, kind, policy):
    """Entries take turns; all of them under `full`."""
    turn = list(POISON).index(kind) + POLICIES.index(policy)
    poison_in_time(kind, policy, POISONED_ENTRIES[turn % 3])


@pytest.mark.full
@pytest.mark.parametrize("entry", POISONED_ENTRIES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", POISON)
def test_poison_on_one_replica_in_time_everywhere(x64, kind, policy, entry):
    poison_in_time(kind, policy, entry)


def poison_in_time(kind, policy, entry):
    """No hang; all replicas end with the same bits; counted once."""
    tx = oa.accumulate(momentum_sgd(), 4, axis_name="data", nonfinite=policy)
    loss = lambda w, batch: w * batch["x"]  # noqa: E731
    one = ENTRIES[entry](tx, loss, "data", True)

    def f(w, gradients, weights):
        def step(carry, given):
            gradient, weight = given
            return one(*carry, {"x": gradient[0]}, weight[0], False), ()

        carry, _ = jax.lax.scan(step, (w, tx.init(w)), (gradients, weights))
        return carry

    gradients, weights = poisoned(kind)
    spec = P(None, "data")
    w, state = per_replica(f, specs=(P(), spec, spec))(jnp.zeros([]), gradients, weights)
    assert_agreed((w, state))
    bad = kind != "no weight"
    windows = [np.ones((4, R), bool), np.ones((4, R), bool)]
    windows[0][2, 3] = False
    if bad and policy == "skip_micro_step":
        windows[0][2] = False  # all together
    skipped = {"propagate": 0, "skip_micro_step": 1, "skip_window": 4}[policy] if bad else 0
    means = [gradients[:4][windows[0]].mean(), gradients[4:].mean()]
    if bad and policy == "propagate":
        means[0] = gradients[2, 3] if kind == "an infinity" else NAN
    if bad and policy == "skip_window":
        means = means[1:]
    want, velocity = 0.0, 0.0
    for mean in means:
        velocity = MOMENTUM * velocity + mean
        want -= RATE * velocity
    np.testing.assert_allclose(w, [want] * R, rtol=1e-12)
    assert np.unique(state.update_step).tolist() == [len(means)]
    assert np.unique(state.skipped).tolist() == [skipped]


@pytest.mark.parametrize("policy", ["propagate", "skip_micro_step"])
@pytest.mark.parametrize("kind", POISON)
def test_poison_on_one_replica_in_space(x64, kind, policy):
    """Here the replica that has it drops it, and only that."""
    engine = "refs" if policy == "propagate" else "carry"
    loss = lambda w, batch: jnp.sum(w * batch["x"])  # noqa: E731
    grad_fn = oa.value_and_grad(
        loss,
        4,
        weight=lambda batch: batch["weight"].sum(),
        nonfinite=policy,
        has_stats=True,
        axis_name="data",
        engine=engine,
        batch_layout="stacked",
    )
    gradients, weights = poisoned(kind)
    batch = {"x": gradients[:4], "weight": weights[:4]}
    f = per_replica(grad_fn, specs=(P(), P(None, "data")))
    got = f(jnp.ones([]), batch)
    for leaf in jax.tree.leaves(got):
        assert len({row.tobytes() for row in np.asarray(leaf)}) == 1
    (value, stats), grads = jax.tree.map(lambda x: x[0], got)
    good = np.ones((4, R), bool)
    good[2, 3] = False
    bad = kind != "no weight"
    want = gradients[:4][good].mean()
    if bad and policy == "propagate":
        want = gradients[2, 3] if kind == "an infinity" else NAN
    np.testing.assert_allclose([value, grads], [want] * 2, rtol=1e-12)
    assert int(stats.skipped) == (bad and policy == "skip_micro_step")


# Errors that say what to type.


def own_row(tx, w, state=None):
    return tx.init(w) if state is None else state


def reduced_before(w, batch):
    tx = oa.accumulate(optax.sgd(1.0), 2, axis_name="data")
    return tx.update(jax.grad(dot)(w, batch), tx.init(w), w)[0]


def dot(w, batch):
    return jnp.mean(batch @ w)


def pmean_dot(w, batch):
    return jax.lax.pmean(dot(w, batch), "data")


def a_micro_step(loss):
    def f(w, batch):
        tx = oa.accumulate(optax.sgd(1.0), 2, axis_name="data")
        return oa.micro_step(loss, tx)(w, tx.init(w), batch)[1]

    return f


def own_parameters(w, batch):
    tx = oa.accumulate(optax.sgd(1.0), 2, axis_name="data")
    w = jax.lax.pcast(w, "data", to="varying")
    return tx.update(jax.grad(dot)(w, batch), tx.init(w), w)[0]


def last_of_its_own(w, batch):
    tx = oa.accumulate(optax.sgd(1.0), 2, axis_name="data")
    grads = jax.grad(dot)(jax.lax.pcast(w, "data", to="varying"), batch)
    return tx.update(grads, tx.init(w), w, last=jax.lax.axis_index("data") == 0)[0]


CHECKED = {
    "gradients reduced already": (reduced_before, "has been reduced already"),
    "a loss reduced inside, in space": (
        oa.value_and_grad(pmean_dot, 2, axis_name="data"),
        "return this replica's own loss, without psum or pmean",
    ),
    "a loss reduced inside, in time": (
        a_micro_step(pmean_dot),
        "return this replica's own loss, without psum or pmean",
    ),
    "parameters of its own": (own_parameters, "take oa.value_and_grad"),
    "a last of its own": (last_of_its_own, r"type last=jax\.lax\.psum\(last"),
}


@pytest.mark.parametrize("name", CHECKED)
def test_what_jax_checks_is_named(name):
    f, remedy = CHECKED[name]
    with pytest.raises(ValueError, match=remedy):
        per_replica(f, check_vma=True)(jnp.zeros(3), jnp.ones((2 * R, 3)))


OUTSIDE = "call it inside jax.shard_map or jax.pmap"


@pytest.mark.parametrize("jit", [False, True])
def test_an_axis_that_is_not_mapped(jit):
    tx = oa.accumulate(optax.sgd(1.0), 2, axis_name="data")
    w, batch = jnp.zeros(3), jnp.ones((4, 3))
    state = tx.init(w)
    calls = {
        "update": lambda w, batch: tx.update(w, state, w),
        "apply_gradients": lambda w, batch: oa.apply_gradients(tx, w, state, w),
        "micro_step": lambda w, batch: oa.micro_step(dot, tx)(w, state, batch),
        "flush": lambda w, batch: oa.flush(tx, state, w),
        "value_and_grad": oa.value_and_grad(dot, 2, axis_name="data"),
    }
    for call in calls.values():
        with pytest.raises(ValueError, match=OUTSIDE):
            (jax.jit(call) if jit else call)(w, batch)


@pytest.mark.parametrize("rows, got", [(None, "no rows"), (8, "8 rows"), (16, "2 rows")])
def test_states_with_the_wrong_rows(rows, got):
    tx = oa.accumulate(optax.sgd(1.0), 2, axis_name="data")
    w = jnp.zeros(3)
    state = oa.accumulate(optax.sgd(1.0), 2).init(w)
    state = state if rows is None else oa.refold(state, rows)
    spec = oa.state_specs(tx, w, "data") if rows == 16 else P()
    f = jax.shard_map(
        lambda w, state: tx.update(w, state, w)[0],
        mesh=mesh_of("automatic"),
        in_specs=(P(), spec),
        out_specs=P(),
        check_vma=False,
    )
    with pytest.raises(ValueError, match=rf"have {got} here.*in_specs=oa\.state_specs"):
        jax.jit(f)(w, state)


def test_rows_without_an_axis():
    tx = oa.accumulate(optax.sgd(1.0), 2)
    w = jnp.zeros(3)
    with pytest.raises(ValueError, match=r"oa\.refold\(state, None\)"):
        tx.update(w, oa.refold(tx.init(w), 8), w)


@pytest.mark.parametrize("name", [3, (), ("data", 1), b"data"])
def test_names_that_cannot_be_meant(name):
    for make in (
        lambda: oa.accumulate(optax.sgd(1.0), 2, axis_name=name),
        lambda: oa.value_and_grad(dot, 2, axis_name=name),
    ):
        with pytest.raises(TypeError, match='type axis_name="data"'):
            make()


@pytest.mark.parametrize("driver", ["value_and_grad", "micro_step"])
def test_a_narrow_loss_that_communicates_is_asked_to_be_wide(driver):
    """Its weights would come after gradients have crossed replicas: another gradient."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(w, x):
        return jnp.mean((x * w - jax.lax.pmean(jnp.mean(x * w), "data")) ** 2).astype(jnp.bfloat16)

    def one(w, x):
        weight = lambda x: x[0]  # noqa: E731
        if driver == "value_and_grad":
            return oa.value_and_grad(loss, 2, weight=weight, axis_name="data")(w, x)[1]
        tx = oa.accumulate(optax.sgd(1.0), 2, axis_name="data")
        return oa.micro_step(loss, tx, weight=weight)(w, tx.init(w), x)[1]

    mapped = jax.shard_map(
        one,
        mesh=mesh,
        in_specs=(jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("data")),
        out_specs=jax.sharding.PartitionSpec(),
        check_vma=False,
    )
    with pytest.raises(TypeError, match=r"return loss.astype\(jnp.float32\)"):
        jax.jit(mapped)(jnp.float32(1), jnp.arange(32.0) + 1)


def test_the_price_of_a_row_a_replica_is_the_reduced_gradient():
    """Temporaries of a donated call: the all-reduce's result, and nothing else so large."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec, sharding = jax.sharding.PartitionSpec, jax.sharding.NamedSharding

    def placed(tree, place):
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, place
        )

    params = {f"w{i}": jax.ShapeDtypeStruct((64, 64), jnp.float32) for i in range(8)}
    params = placed(params, jax.tree.map(lambda _: sharding(mesh, spec()), params))
    tx = oa.accumulate(optax.adamw(1e-3), 4, axis_name="data")
    specs = oa.state_specs(tx, params, "data")
    state = jax.eval_shape(lambda p: oa.refold(tx.init(p), 8), params)
    state = placed(state, oa.state_shardings(tx, params, axis_name="data"))
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((8, 64, 64), x.dtype), params)
    rows = placed(rows, jax.tree.map(lambda _: sharding(mesh, spec("data")), rows))

    def micro_step(params, state, grads):
        return oa.apply_gradients(tx, jax.tree.map(lambda x: x[0], grads), state, params)

    mapped = jax.shard_map(
        micro_step,
        mesh=mesh,
        in_specs=(spec(), specs, spec("data")),
        out_specs=(spec(), specs),
        check_vma=False,
    )
    compiled = jax.jit(mapped, donate_argnums=(0, 1)).lower(params, state, rows).compile()
    memory, size = compiled.memory_analysis(), 8 * 64 * 64 * 4
    assert memory.alias_size_in_bytes > 3.9 * size
    assert memory.temp_size_in_bytes < 1.1 * size
