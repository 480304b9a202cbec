"""The space driver under jax's transformations: vmap, jvp, vjp and what is made of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import optax_accum as oa

K, B = 4, 8
ENGINES = ["carry", "refs", "auto"]


def flat(w, b):
    """A mean over weighted examples; 0/0 where none has a weight."""
    h = (jnp.tanh(b["x"][:, None] * w) * w).sum(-1)
    return jnp.sum(b["m"] * jnp.square(h)) / jnp.sum(b["m"])


def scanned(w, b):
    """The same with a loop over the parameters, whose window jax cannot map by refs."""
    h, _ = lax.scan(lambda h, layer: (jnp.tanh(h * layer) + 0.1 * h, None), b["x"], w)
    return jnp.sum(b["m"] * jnp.square(h)) / jnp.sum(b["m"])


LOSSES = {"flat": flat, "scanned": scanned}


def amount(b):
    return b["m"].sum()


def params_of(lanes=None):
    shape = (3,) if lanes is None else (lanes, 3)
    return jnp.asarray(np.random.default_rng(0).normal(size=shape))


def batch_of(lanes=None, empty=False, examples=B):
    """Examples with weights; `empty` takes those of micro-batch 1 from the first lane alone."""
    rng = np.random.default_rng(1)
    shape = (examples,) if lanes is None else (lanes, examples)
    x, m = rng.normal(size=shape), rng.integers(1, 4, shape) * 1.0
    if empty:
        m[0, 1::K] = 0
    return {"x": jnp.asarray(x), "m": jnp.asarray(m)}


def driver(loss, engine, k=K, **keywords):
    return oa.value_and_grad(loss, k, engine=engine, **({"weight": amount} | keywords))


def run(f, *args):
    """Compiled without LLVM's optimizations, which cost more than they save here."""
    return jax.jit(f).lower(*args).compile({"xla_backend_optimization_level": 0})(*args)


def assert_close(got, want, tolerance=1e-12):
    got_leaves, want_leaves = jax.tree.leaves(got), jax.tree.leaves(want)
    for a, b in zip(got_leaves, want_leaves, strict=True):
        assert np.shape(a) == np.shape(b)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def full(*values):
    return pytest.param(*values, marks=pytest.mark.full)


def same_or_refused(engine, compute, want, visible):
    """The right value. Refs, asked for by name, may be refused, but are never wrong.

    A transformation is `visible` to our code where its arguments show it. There `auto` avoids
    refs, and by name they are an error of ours, which says what to type. Under what was traced
    before (jit, scan, checkpoint) nothing shows, and the error is whatever jax says.
    """
    try:
        got = compute()
    except Exception as error:
        assert engine == "refs" or not (visible or engine == "carry"), f"{engine}: {error}"
        assert not visible or "engine='carry'" in str(error), f"a raw error of jax: {error!r}"
        return
    assert_close(got, want)


# vmap.


@functools.cache
def lanes_of(name, axes):
    """(arguments, what jax.value_and_grad gives for them)."""
    with jax.enable_x64(True):
        args = tuple(
            make(None if axis is None else 2)
            for make, axis in zip((params_of, batch_of), axes, strict=True)
        )
        return args, run(jax.vmap(jax.value_and_grad(LOSSES[name]), axes), *args)


@pytest.mark.parametrize("axes", [(0, None), (None, 0), full((0, 0))])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", LOSSES)
def test_vmap_over_parameters_and_over_batches(x64, name, engine, axes):
    f = driver(LOSSES[name], engine)
    args, want = lanes_of(name, axes)
    same_or_refused(engine, lambda: run(jax.vmap(f, axes), *args), want, visible=True)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", LOSSES)
def test_vmap_of_a_jitted_call(x64, name, engine):
    """Inside, nothing shows that it is mapped."""
    f = jax.jit(driver(LOSSES[name], engine))
    args, want = lanes_of(name, (None, 0))
    same_or_refused(engine, lambda: jax.vmap(f, (None, 0))(*args), want, visible=False)


@pytest.mark.parametrize(
    "name, engine",
    [("flat", "refs"), ("flat", "auto"), ("scanned", "carry"), ("scanned", "refs")],
)
def test_a_micro_batch_of_weight_zero_in_one_lane_only(x64, name, engine):
    """Its 0/0 reaches neither its own lane nor the other one; nor do derivatives of it."""
    params, batch = params_of(), batch_of(2, empty=True)
    f, loss = driver(LOSSES[name], engine), LOSSES[name]
    want = run(jax.vmap(jax.value_and_grad(loss), (None, 0)), params, batch)
    lanes = lambda w: jax.vmap(f, (None, 0))(w, batch)  # noqa: E731
    same_or_refused(engine, lambda: run(lanes, params), want, visible=True)
    outer = lambda w: lanes(w)[0].sum()  # noqa: E731
    same_or_refused(engine, lambda: run(jax.grad(outer), params), want[1].sum(0), visible=True)


@pytest.mark.parametrize("engine", ["carry", "auto"])
def test_vmap_of_a_remainder_of_state_and_of_aux(x64, engine):
    """Ten examples by four: micro-batches of three, and one. Every reducer, a state threaded."""

    def loss(w, state, b):
        value, rows = flat(w, b), b["x"] * w.sum()
        aux = {"mean": value, "max": rows.max(), "min": rows.min(), "sum": b["m"].sum()}
        aux |= {"last": rows[0], "stack": value, "concat": rows}
        return value, (0.5 * state + rows.sum(), aux)

    reducers = ["mean", "max", "min", "sum", "last", "stack", "concat"]
    f = driver(
        loss,
        engine,
        batch_argnums=2,
        state_argnum=1,
        has_aux=True,
        remainder="exact",
        aux={name: name for name in reducers},
        has_stats=True,
    )
    params, batch, state = params_of(2), batch_of(2, examples=10), jnp.asarray([0.0, 2.0])
    got = run(jax.vmap(f), params, state, batch)
    for lane in range(2):
        w, s, b = jax.tree.map(lambda x: x[lane], (params, state, batch))  # noqa: B023
        value, grad = jax.value_and_grad(flat)(w, b)
        parts = [jax.tree.map(lambda x, i=i: x[:9][i::3], b) for i in range(3)]
        parts.append(jax.tree.map(lambda x: x[9:], b))
        rows = [part["x"] * w.sum() for part in parts]
        for row in rows:
            s = 0.5 * s + row.sum()
        values = jnp.stack([flat(w, part) for part in parts])
        aux = {"mean": value, "max": (b["x"] * w.sum()).max(), "min": (b["x"] * w.sum()).min()}
        aux |= {
            "sum": b["m"].sum(),
            "last": rows[-1][0],
            "stack": values,
            "concat": b["x"] * w.sum(),
        }
        mine = jax.tree.map(lambda x: x[lane], got)  # noqa: B023
        ((loss_value, (new_state, new_aux), stats), new_grad) = mine
        assert_close((loss_value, new_grad, new_state), (value, grad, s))
        assert_close([new_aux[name] for name in reducers], [aux[name] for name in reducers])
        assert float(stats.weight) == float(b["m"].sum())


# Derivatives of a call.


def hessian_vector(f):
    """Forward over the gradient that f computes."""
    return lambda w: jax.jvp(lambda w: f(w)[1], (w,), (jnp.cos(w),))[1]


OUTER = {
    "jvp": lambda f: lambda w: jax.jvp(f, (w,), (jnp.cos(w),)),
    "linearize": lambda f: lambda w: jax.linearize(f, w)[1](jnp.cos(w)),
    "hessian-vector": hessian_vector,
    "gradient of the value": lambda f: jax.grad(lambda w: f(w)[0]),
    "gradient of the gradient": lambda f: jax.grad(lambda w: jnp.sum(jnp.square(f(w)[1]))),
    "vjp": lambda f: lambda w: jax.vjp(f, w)[1]((1.0, jnp.sin(w))),
    "hessian": lambda f: jax.hessian(lambda w: f(w)[0]),
    "jacfwd": lambda f: jax.jacfwd(lambda w: f(w)[1]),
    "jacrev": lambda f: jax.jacrev(lambda w: f(w)[1]),
    "third derivatives": lambda f: jax.grad(
        lambda w: jnp.sum(jax.grad(lambda w: jnp.sum(f(w)[1]))(w))
    ),
}
WITHOUT_VMAP = ["jvp", "hessian-vector", "gradient of the value", "gradient of the gradient"]
LONGER = ["linearize", "vjp", "third derivatives"]


@functools.cache
def outer_of(name, outer, empty):
    """(batch, a derivative of what jax.value_and_grad gives for it)."""
    with jax.enable_x64(True):
        batch = jax.tree.map(lambda x: x[0], batch_of(2, empty=empty))
        whole = lambda w: jax.value_and_grad(LOSSES[name])(w, batch)  # noqa: E731
        return batch, run(OUTER[outer](whole), params_of())


@pytest.mark.parametrize("engine", ["carry", "refs"])
@pytest.mark.parametrize("outer", [*WITHOUT_VMAP, *(full(name) for name in LONGER)])
def test_derivatives_of_a_call(x64, outer, engine):
    """With weights, one of them zero: of the micro-batch whose loss is 0/0."""
    batch, want = outer_of("scanned", outer, True)
    f = driver(scanned, engine)
    assert_close(run(OUTER[outer](lambda w: f(w, batch)), params_of()), want, 1e-11)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "name, outer",
    [
        ("flat", "jacfwd"),
        ("scanned", "hessian"),
        ("scanned", "jacrev"),
        full("flat", "hessian"),
        full("flat", "jacrev"),
        full("scanned", "jacfwd"),
    ],
)
def test_derivatives_that_map_over_directions(x64, outer, engine, name):
    batch, want = outer_of(name, outer, False)
    f = driver(LOSSES[name], engine)
    compute = lambda: run(OUTER[outer](lambda w: f(w, batch)), params_of())  # noqa: E731
    same_or_refused(engine, compute, want, visible=outer != "jacrev")


@pytest.mark.parametrize("engine", ENGINES)
def test_derivatives_by_the_batch_through_the_gradient(x64, engine):
    """Which examples moved the gradient: by the data and by the weights of the examples."""
    batch, w = batch_of(), params_of()

    def moved(grad_fn):
        return jax.grad(lambda b: jnp.sum(jnp.cos(grad_fn(w, b)[1])))

    got = run(moved(driver(flat, engine)), batch)
    want = run(moved(jax.value_and_grad(flat)), batch)
    assert_close(got["x"], want["x"], 1e-11)
    assert_close(got["m"], want["m"], 1e-6)  # through the weights, which are float32


AROUND = {
    "scan": lambda update, w: lax.scan(lambda w, _: (update(w), None), w, None, length=3)[0],
    "fori_loop": lambda update, w: lax.fori_loop(0, 3, lambda _, w: update(w), w),
    "checkpoint": lambda update, w: jax.checkpoint(lambda w: update(update(w)))(w),
    "cond": lambda update, w: lax.cond(w[0] > -9, update, lambda w: w, update(w)),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["scan", "checkpoint", full("fori_loop"), full("cond")])
def test_derivatives_through_updates_under_control_flow(x64, name, engine):
    """The derivative by the learning rate of what some updates in one program reach."""
    batch, w = batch_of(), params_of()

    def reached(grad_fn, rate):
        update = lambda w: w - rate * grad_fn(w, batch)[1]  # noqa: E731
        return jnp.sum(jnp.square(AROUND[name](update, w)))

    whole = functools.partial(reached, jax.value_and_grad(flat))
    want = run(jax.value_and_grad(whole), 0.1)
    f = functools.partial(reached, driver(flat, engine))
    same_or_refused(engine, lambda: run(jax.value_and_grad(f), 0.1), want, visible=False)
