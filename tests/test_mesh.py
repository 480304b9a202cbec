"""Many devices in global view: `mesh=`, the compiled programs of both drivers, where states lie.

Numbers are compared with one device; traffic is read from the compiled programs.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optimizers import LINKS, OPTIMIZERS

import optax_accum as oa

K, B = 4, 64
KINDS = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit}
ENGINES = ("carry", "refs")


def mesh_of(kind, devices=8):
    return jax.make_mesh(
        (devices,), ("data",), axis_types=(KINDS[kind],), devices=jax.devices()[:devices]
    )


def grid():
    """4 x 2: data, and a tensor axis that is left to the compiler."""
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def put(mesh, tree, specs):
    full = jax.tree.broadcast(specs, tree, is_leaf=lambda x: isinstance(x, P))
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, full)


def close(got, want, rtol=2e-5, atol=2e-6):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=rtol, atol=atol)


def size(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def reductions(found):
    return [c for c in found if c.kind in ("all-reduce", "reduce-scatter")]


# Models.


class Model(NamedTuple):
    params: Any
    batch: Any
    loss: Any
    weight: Any
    specs: Any  # tensor parallel, over "model"


def normal(rng, *shape):
    return (rng.normal(size=shape) / shape[-2] ** 0.5).astype(np.float32)


def mlp():
    rng, d = np.random.default_rng(0), 16
    params = {"layers": normal(rng, 8, d, d), "head": normal(rng, d, 8)}
    batch = {"x": normal(rng, B, d), "y": normal(rng, B, 8)}

    def loss(params, batch):
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch["x"], params["layers"])
        return jnp.mean(jnp.square(h @ params["head"] - batch["y"]))

    return Model(params, batch, loss, None, {"layers": P(None, None, "model"), "head": P("model")})


V, D, H, T, LAYERS = 32, 16, 32, 6, 2


def transformer():
    rng = np.random.default_rng(1)
    params = {
        "tokens": normal(rng, V, D),
        "positions": normal(rng, T, D),
        "blocks": {
            "qkv": normal(rng, LAYERS, D, 3 * D),
            "out": normal(rng, LAYERS, D, D),
            "up": normal(rng, LAYERS, D, H),
            "down": normal(rng, LAYERS, H, D),
        },
        "head": normal(rng, D, V),
    }
    specs = {
        "tokens": P(None, "model"),
        "positions": P(None, "model"),
        "blocks": {
            "qkv": P(None, None, "model"),
            "out": P(None, "model"),
            "up": P(None, None, "model"),
            "down": P(None, "model"),
        },
        "head": P(None, "model"),
    }
    batch = {
        "x": rng.integers(0, V, (B, T)).astype(np.int32),
        "y": rng.integers(0, V, (B, T)).astype(np.int32),
        "mask": rng.random((B, T)) < 0.7,
    }
    batch["mask"][: B // 4] = False  # the first of four replicas has no weight at all
    batch["mask"][B // 4 : B // 2 : K] = False  # and one micro-batch of the second
    return Model(params, batch, language_loss, lambda b: b["mask"].sum(), specs)


def normed(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def block(h, w):
    q, k, v = jnp.split(normed(h) @ w["qkv"], 3, -1)
    scores = q @ k.swapaxes(-1, -2) / D**0.5
    causal = jnp.tril(jnp.ones((T, T), bool))
    h = h + jax.nn.softmax(jnp.where(causal, scores, -1e9)) @ v @ w["out"]
    return h + jax.nn.gelu(normed(h) @ w["up"]) @ w["down"], None


def language_loss(params, batch):
    h = params["tokens"][batch["x"]] + params["positions"]
    h, _ = jax.lax.scan(block, h, params["blocks"])
    likely = jax.nn.log_softmax(normed(h) @ params["head"])
    each = jnp.take_along_axis(likely, batch["y"][..., None], -1)[..., 0]
    return -jnp.sum(each * batch["mask"]) / jnp.sum(batch["mask"])


MODELS = {"mlp": mlp, "transformer": transformer}


# The space driver's compiled programs.


def compiled(f, *args):
    return jax.jit(f).lower(*args).compile()


FULL = pytest.mark.full
ON_MESHES = [
    *(("mlp", engine, kind) for engine in ENGINES for kind in KINDS),
    ("transformer", "refs", "explicit"),
    *(
        pytest.param("transformer", *way, marks=FULL)
        for way in [("carry", "explicit"), ("carry", "automatic"), ("refs", "automatic")]
    ),
]


@pytest.mark.parametrize("model, engine, kind", ON_MESHES)
def test_the_space_driver_reduces_once(model, engine, kind):
    params, batch, loss, weight, _ = MODELS[model]()
    mesh = mesh_of(kind)
    args = put(mesh, params, P()), put(mesh, batch, P("data"))
    program = compiled(oa.value_and_grad(loss, K, mesh=mesh, engine=engine, weight=weight), *args)
    found = oa.verify.assert_reduced_once(program, params)
    # The whole weight before the loop; loss and stats with the gradient after it.
    assert size(params) <= sum(c.bytes for c in found) <= size(params) + 20
    assert {c.kind for c in found} == {"all-reduce"}
    assert not any(c.in_loop for c in found)
    close(program(*args), jax.jit(jax.value_and_grad(loss))(params, batch))


@pytest.mark.parametrize("driver", ["plain jit", "microbatch"])
def test_others_reduce_once_a_micro_batch(driver):
    params, batch, loss, *_ = mlp()
    mesh = mesh_of("automatic")
    args = put(mesh, params, P()), put(mesh, batch, P("data"))
    if driver == "plain jit":
        grad_fn = oa.value_and_grad(loss, K)
    else:
        grad_fn = optax.microbatching.microbatch(
            jax.value_and_grad(loss),
            argnums=1,
            microbatch_size=B // K,
            accumulator=optax.microbatching.AccumulationType.MEAN,
        )
    program = compiled(grad_fn, *args)
    found = reductions(oa.verify.collectives(program))
    assert all(c.in_loop for c in found)
    assert sum(c.bytes * c.runs for c in found if c.bytes > 4) == pytest.approx(
        K * size(params), rel=0.01
    )
    with pytest.raises(AssertionError, match="reduced"):
        oa.verify.assert_reduced_once(program, params)
    close(program(*args), jax.jit(jax.value_and_grad(loss))(params, batch))


@pytest.mark.parametrize(
    "engine, weighted",
    [
        ("auto", True),
        ("refs", True),
        pytest.param("carry", True, marks=FULL),
        pytest.param("refs", False, marks=FULL),
        pytest.param("carry", False, marks=FULL),
    ],
)
def test_beside_a_tensor_axis(engine, weighted):
    """The compiler's collectives stay; a replica without weight does not stop them."""
    params, batch, loss, weight, specs = transformer()
    if weighted and engine == "refs":
        mesh = grid()
        grad_fn = oa.value_and_grad(loss, K, mesh=mesh, engine=engine, weight=weight)
        with pytest.raises(ValueError, match="type engine='carry'"):
            jax.jit(grad_fn).lower(params, batch)
        return
    if not weighted:
        batch["mask"][:], weight = True, None
    mesh = grid()
    args = put(mesh, params, specs), put(mesh, batch, P("data"))
    grad_fn = oa.value_and_grad(
        loss, K, mesh=mesh, engine=engine, weight=weight, grad_specs=specs
    )  # or the window of an embedding is whole on every device, where the compiler likes that
    program = compiled(grad_fn, *args)
    agreed = (4 * K,) if weighted else ()  # which micro-batches have weight somewhere
    found = oa.verify.assert_reduced_once(program, args[0], mesh=mesh, exempt=agreed)
    tensor = [c for c in found if c.in_loop]
    assert tensor
    pairs = {(r, r + 1) for r in range(0, 8, 2)}  # along "model", no others
    assert {tuple(sorted(group)) for c in tensor for group in c.groups} == pairs
    on_a_device = [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(args[0])]
    out = program(*args)[1]
    assert on_a_device == [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(out)]
    close(program(*args), jax.jit(jax.value_and_grad(loss))(params, batch))


SHARDS = {"layers": P(None, "data"), "head": P("data")}


def scattered(found):
    """The bytes of the reduce-scatters; nothing larger than a scalar is all-reduced."""
    assert all(c.bytes <= 8 for c in found if c.kind == "all-reduce")
    return sum(c.bytes * c.runs for c in found if c.kind == "reduce-scatter")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_to_shards(kind, engine):
    """ZeRO-1 and 2: a reduce-scatter, of replicated parameters."""
    params, batch, loss, *_ = mlp()
    mesh = mesh_of(kind)
    args = put(mesh, params, P()), put(mesh, batch, P("data"))
    grad_fn = oa.value_and_grad(loss, K, mesh=mesh, engine=engine, grad_specs=SHARDS)
    program = compiled(grad_fn, *args)
    found = oa.verify.assert_reduced_once(program, params)
    assert scattered(found) == size(params)
    assert {c.kind for c in found} == {"all-reduce", "reduce-scatter"}
    value, grads = program(*args)
    close((value, grads), jax.jit(jax.value_and_grad(loss))(params, batch))
    for name, spec in SHARDS.items():
        assert grads[name].sharding.is_equivalent_to(NamedSharding(mesh, spec), grads[name].ndim)


@pytest.mark.parametrize("gather", ["window", "micro_batch"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_in_shards(kind, engine, gather):
    """FSDP: gathered once a window, or once a micro-batch; reduced to shards once."""
    params, batch, loss, *_ = mlp()
    mesh = mesh_of(kind)
    args = put(mesh, params, SHARDS), put(mesh, batch, P("data"))
    specs = None if kind == "explicit" and engine == "carry" else SHARDS  # the types show them
    grad_fn = oa.value_and_grad(loss, K, mesh=mesh, engine=engine, grad_specs=specs, gather=gather)
    program = compiled(grad_fn, *args)
    found = oa.verify.assert_reduced_once(program, params)
    assert scattered(found) == size(params)
    gathers = [c for c in found if c.kind == "all-gather"]
    times = 1 if gather == "window" else K
    assert sum(c.bytes * c.runs for c in gathers) == times * size(params)
    assert all(c.in_loop == (gather == "micro_batch") for c in gathers)
    value, grads = program(*args)
    close((value, grads), jax.jit(jax.value_and_grad(loss))(params, batch))
    for name, spec in SHARDS.items():
        assert grads[name].sharding.is_equivalent_to(NamedSharding(mesh, spec), grads[name].ndim)


TWO = {
    "both on one axis": P(("data", "fsdp")),
    "both, the other way round": P(("fsdp", "data")),
    "one each": P("fsdp", "data"),
    "one alone": P(None, "fsdp"),
}


@pytest.mark.parametrize("gather", ["window", "micro_batch"])
@pytest.mark.parametrize("name", TWO)
def test_shards_over_two_batch_axes(name, gather):
    """Each leaf comes back in its place, whatever the order of the axes."""
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    rng = np.random.default_rng(2)
    w, x = normal(rng, 8, 16), normal(rng, B, 8)
    loss = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)  # noqa: E731
    grad_fn = oa.value_and_grad(
        loss, K, mesh=mesh, batch_axes=("data", "fsdp"), grad_specs=TWO[name], gather=gather
    )
    got = jax.jit(grad_fn)(put(mesh, w, TWO[name]), x)
    close(got, jax.value_and_grad(loss)(w, x))
    assert got[1].sharding.is_equivalent_to(NamedSharding(mesh, TWO[name]), 2)


# The time driver in global view: one manual axis, the rest as it is.


def recipe(mesh, model, engine, args, weight=None, **keywords):
    """(a compiled micro-step, its arguments), as the docs write it down."""
    tx = oa.accumulate(optax.sgd(0.5, momentum=0.9), K, axis_name="data", **keywords)
    take = oa.micro_step(model.loss, tx, engine=engine, weight=weight)
    params, batch = args
    state_specs = oa.state_specs(tx, params, "data")
    replicas = mesh.shape["data"]
    state = jax.jit(
        lambda params: oa.refold(tx.init(params), replicas),
        out_shardings=oa.state_shardings(tx, params, axis_name="data"),
    )(params)

    def one(params, state, batch):
        loss, params, state = take(params, state, batch)
        return loss[None], params, state

    mapped = jax.shard_map(
        one,
        mesh=mesh,
        in_specs=(P(), state_specs, P("data")),
        out_specs=(P("data"), P(), state_specs),
        axis_names={"data"},
        check_vma=len(mesh.axis_names) == 1,
    )
    return jax.jit(mapped), (params, state, batch)


@pytest.mark.parametrize("model, engine, kind", ON_MESHES)
def test_the_time_driver_reduces_once_where_it_closes(model, engine, kind):
    made, mesh = MODELS[model](), mesh_of(kind)
    args = put(mesh, made.params, P()), put(mesh, made.batch, P("data"))
    step, args = recipe(mesh, made, engine, args, weight=made.weight)
    found = oa.verify.assert_reduced_once(step.lower(*args).compile(), made.params)
    assert all(c.in_conditional for c in found)  # a micro-step communicates nothing
    assert size(made.params) <= sum(c.bytes for c in found) <= size(made.params) + 20


@pytest.mark.parametrize("policy, inside", [("skip_micro_step", 4), ("skip_window", 0)])
def test_what_a_micro_step_communicates(policy, inside):
    made, mesh = mlp(), mesh_of("explicit")
    args = put(mesh, made.params, P()), put(mesh, made.batch, P("data"))
    step, args = recipe(mesh, made, "auto", args, nonfinite=policy)
    found = oa.verify.assert_reduced_once(step.lower(*args).compile(), made.params)
    assert sum(c.bytes for c in found if not c.in_conditional) == inside


@pytest.mark.parametrize(
    "model, weighted", [("mlp", False), pytest.param("transformer", True, marks=FULL)]
)
def test_the_recipe_beside_a_tensor_axis(model, weighted):
    """Reduced once, sharded throughout, and equal to one device over two windows."""
    made, mesh = MODELS[model](), grid()
    placed = put(mesh, made.params, made.specs), put(mesh, made.batch, P("data"))
    step, (params, state, _) = recipe(
        mesh, made, "auto", placed, weight=made.weight if weighted else None
    )
    program = step.lower(params, state, placed[1]).compile()
    oa.verify.assert_reduced_once(program, params, mesh=mesh)
    window = jax.tree.map(lambda x: x.sharding, state.grad_sum)
    rows = [np.arange(B).reshape(4, -1)[:, i::K].ravel() for i in range(K)]
    want, velocity = made.params, jax.tree.map(np.zeros_like, made.params)
    for _ in range(2):
        for part in rows:
            batch = jax.tree.map(lambda x, part=part: x[part], made.batch)
            _, params, state = step(params, state, put(mesh, batch, P("data")))
        grads = jax.grad(made.loss)(want, made.batch)
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, grads)
        want = jax.tree.map(lambda p, v: p - 0.5 * v, want, velocity)
    close(params, want, rtol=1e-4, atol=1e-5)
    assert int(state.update_step) == 2
    for leaf, sharding in zip(
        jax.tree.leaves(state.grad_sum), jax.tree.leaves(window), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


# Arguments, wherever they lie and whatever they are.


def simple(w, batch):
    return jnp.mean(jnp.square(jnp.tanh(batch["x"] @ w)))


def simple_args():
    rng = np.random.default_rng(3)
    return normal(rng, 16, 4), {"x": normal(rng, B, 16)}


def on(spec_of_w, spec_of_x):
    return lambda mesh, w, b: (put(mesh, w, spec_of_w), put(mesh, b, spec_of_x))


def elsewhere(mesh, w, b):
    kind = "explicit" if mesh.axis_types[0] == AxisType.Auto else "automatic"
    return on(P("data"), P("data"))(mesh_of(kind), w, b)


PLACES = {
    "on the host": lambda mesh, w, b: (w, b),
    "uncommitted": lambda mesh, w, b: jax.tree.map(jnp.asarray, (w, b)),
    "whole": on(P(), P()),
    "the batch over its examples": on(P(), P("data")),
    "the batch over its features": on(P(), P(None, "data")),
    "parameters in shards": on(P("data"), P("data")),
    "on a mesh of the other kind": elsewhere,
    "on one device": lambda mesh, w, b: jax.device_put((w, b), jax.devices()[3]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_wherever_the_arguments_lie(place, kind):
    turn = list(PLACES).index(place) + list(KINDS).index(kind)
    check_place(kind, place, jit=bool(turn % 2))


@pytest.mark.full
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_wherever_the_arguments_lie_jitted_or_not(place, kind, jit):
    check_place(kind, place, jit)


def check_place(kind, place, jit):
    w, batch = simple_args()
    mesh = jax.make_mesh((8,), ("data",)) if kind == "explicit" else mesh_of(kind)
    args = PLACES[place](mesh, w, batch)
    grad_fn = oa.value_and_grad(simple, K, mesh=mesh)
    if jit and place == "on one device":  # as any function of jax that spans devices
        with pytest.raises(ValueError, match="incompatible devices"):
            jax.jit(grad_fn)(*args)
        return
    if jit and kind == "automatic" and place == "on a mesh of the other kind":
        with pytest.raises(ValueError, match="type mesh=True, or mesh= the one"):
            jax.jit(grad_fn)(*args)
        return
    close((jax.jit(grad_fn) if jit else grad_fn)(*args), jax.value_and_grad(simple)(w, batch))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("how", ["types", "set_mesh", "set_mesh, on the host"])
def test_the_mesh_of_the_arguments(how, jit):
    w, batch = simple_args()
    mesh = jax.make_mesh((8,), ("data",))
    args = (w, batch) if "host" in how else (put(mesh, w, P()), put(mesh, batch, P("data")))
    grad_fn = oa.value_and_grad(simple, K, mesh=True)
    grad_fn = jax.jit(grad_fn) if jit else grad_fn
    if how == "types":
        got = grad_fn(*args)
    else:
        with jax.set_mesh(mesh):
            got = grad_fn(*args)
    close(got, jax.value_and_grad(simple)(w, batch))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Batch:
    x: Any
    on: Any  # bool
    count: Any  # int
    keys: Any  # typed, one an example


def many_arguments(w, batch, scale, act, nothing, train, times, *, shift, power=1.0):
    assert nothing is None
    h = act(batch.x @ w + shift) * scale
    if train:  # Python's own, or this raises
        h = h + 0.1 * jax.vmap(lambda key: jax.random.normal(key, (4,)))(batch.keys)
    for _ in range(times):
        h = h * 0.5
    each = jnp.sum(jnp.abs(h) ** power, -1)
    return jnp.mean(jnp.where(batch.on, each, 0.0) * batch.count)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_arguments_of_every_kind(kind, jit):
    """Arrays, functions, None, Python's numbers, keywords; integers, flags and keys in a batch."""
    w, batch = simple_args()
    batch = Batch(
        batch["x"],
        np.arange(B) % 3 > 0,
        np.arange(B, dtype=np.int32),
        jax.random.split(jax.random.key(1), B),
    )
    scale, shift = np.float32(2), np.ones(4, np.float32)
    call = lambda f, w, batch, scale, shift: f(  # noqa: E731
        w, batch, scale, jnp.tanh, None, True, 2, shift=shift, power=2.0
    )
    want = call(jax.value_and_grad(many_arguments), w, batch, scale, shift)
    grad_fn = oa.value_and_grad(many_arguments, K, mesh=mesh_of(kind))
    whole = lambda *args: call(grad_fn, *args)  # noqa: E731
    close((jax.jit(whole) if jit else whole)(w, batch, scale, shift), want)


@pytest.mark.parametrize("typed", [False, True])
def test_keys_in_global_view(typed):
    """Folded with micro-step and replica: no two masks are equal."""
    key = jax.random.key(0) if typed else jax.random.PRNGKey(0)

    def loss(w, x, key):
        return jnp.mean(x * w), jax.random.normal(key, (2,))

    grad_fn = oa.value_and_grad(
        loss, K, rng_argnums=2, has_aux=True, aux="stack", mesh=mesh_of("explicit")
    )
    (_, masks), _ = grad_fn(jnp.float32(1), np.ones(B, np.float32), key)
    assert masks.shape == (8 * K, 2)
    assert len({mask.tobytes() for mask in np.asarray(masks)}) == 8 * K


def test_per_example_results_are_in_the_batch_s_order():
    grad_fn = oa.value_and_grad(
        lambda w, b: (simple(w, b), b["x"][:, 0]), K, has_aux=True, aux="concat",
        mesh=mesh_of("explicit"),
    )  # fmt: skip
    w, batch = simple_args()
    (_, first), _ = jax.jit(grad_fn)(w, batch)
    np.testing.assert_array_equal(first, batch["x"][:, 0])


def test_an_embedding_needs_the_mesh_on_explicit_axes():
    """What jax says of the lookup without `mesh=` is its own; with it the lookup is local."""
    rng, mesh = np.random.default_rng(4), jax.make_mesh((8,), ("data",))
    table, tokens = normal(rng, V, D), rng.integers(0, V, (B, T)).astype(np.int32)
    loss = lambda table, tokens: jnp.mean(jnp.square(table[tokens]))  # noqa: E731
    args = put(mesh, table, P()), put(mesh, tokens, P("data"))
    for plain in (jax.value_and_grad(loss), oa.value_and_grad(loss, K)):
        with pytest.raises(Exception, match="out_sharding"):
            jax.jit(plain)(*args)
    got = jax.jit(oa.value_and_grad(loss, K, mesh=True))(*args)
    close(got, jax.value_and_grad(loss)(table, tokens))


# Where a state lies.


def rows_of(optimizers):
    return [pytest.param(each, id=each.id) for each in optimizers]


CHOSEN = (
    "adam",
    "adafactor-factored",
    "lbfgs-fixed",
    "sm3",
    "muon",
    "schedule_free_adamw",
    "lookahead",
    "masked",
    "multi_transform",
    "inject_hyperparams",
)


def shaped(kind):
    mesh = mesh_of(kind)
    rng = np.random.default_rng(5)
    params = {"w": normal(rng, 16, 24), "b": normal(rng, 1, 24)[0]}
    return mesh, params, {"w": P("data"), "b": P()}


def check_state(optimizer, kind):
    """Jitted with its shardings, a state lies as the parameters do, and goes on so."""
    mesh, params, specs = shaped(kind)
    if optimizer.id == "flatten" and kind == "explicit":
        pytest.skip("optax.flatten joins differently sharded leaves, which jax refuses there")
    tx = oa.accumulate(optimizer.make(0.1), 2)
    params = optimizer.wrap(put(mesh, params, specs))
    state = jax.jit(tx.init, out_shardings=oa.state_shardings(tx, params))(params)
    alike = [leaf for leaf in jax.tree.leaves(state) if jnp.shape(leaf) == (16, 24)]
    assert alike  # the window at least
    for leaf in alike:
        assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 2)
    for leaf in jax.tree.leaves(state):
        assert len(leaf.sharding.device_set) == 8
    return tx, params, state


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", rows_of(OPTIMIZERS + LINKS))
def test_every_state_lies_like_its_parameters(optimizer, kind):
    check_state(optimizer, kind)


@pytest.mark.parametrize("optimizer", rows_of(o for o in OPTIMIZERS + LINKS if o.id in CHOSEN))
def test_a_state_lies_like_its_parameters(optimizer):
    kind = list(KINDS)[CHOSEN.index(optimizer.id) % 2]
    check_state(optimizer, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis_name", [None, "data"])
def test_the_first_update_compiles_once(kind, axis_name):
    """The state that comes out is, to jit, the one that went in."""
    mesh = mesh_of(kind)
    params = {"w": np.ones((16, 24), np.float32), "b": np.ones(24, np.float32)}
    specs = {"w": P() if axis_name else P("data"), "b": P()}
    if kind == "explicit":  # as jit spells its results: in full there, elsewhere in short
        specs = {"w": P(*specs["w"], *[None] * (2 - len(specs["w"]))), "b": P(None)}
    params = put(mesh, params, specs)
    tx = oa.accumulate(optax.adamw(0.1), 2, axis_name=axis_name)
    shardings = oa.state_shardings(tx, params, axis_name=axis_name)
    made = (lambda p: oa.refold(tx.init(p), 8)) if axis_name else tx.init
    state = jax.jit(made, out_shardings=shardings)(params)
    update = lambda params, state: oa.apply_gradients(tx, params, state, params)  # noqa: E731
    if axis_name:
        state_specs = oa.state_specs(tx, params, "data")
        update = jax.shard_map(
            update,
            mesh=mesh,
            in_specs=(P(), state_specs),
            out_specs=(P(), state_specs),
            check_vma=False,
        )
    update = jax.jit(update)
    first, state = update(params, state)
    update(first, state)
    assert update._cache_size() == 1


def test_specs_of_parameters_in_shards():
    """State shaped like a parameter follows it; rows come before what its window has."""
    params = {"w": jnp.zeros((4, 6)), "b": jnp.zeros(6), "frozen": None, "act": jnp.tanh}
    param_specs = {"w": P("model"), "b": P(), "frozen": P(), "act": P()}
    tx = oa.accumulate(optax.masked(optax.sgd(0.1, momentum=0.9), {"w": True, "b": False,
                       "frozen": False, "act": False}), 2, axis_name=("data", "fsdp"))  # fmt: skip
    specs = oa.state_specs(tx, params, ("data", "fsdp"), param_specs=param_specs)
    assert specs.grad_sum["w"] == P(("data", "fsdp"), "model")
    assert specs.grad_sum["b"] == P(("data", "fsdp"))
    assert specs.weight_sum == specs.kept == P(("data", "fsdp"))
    assert specs.micro_step == specs.skipped == P()
    assert specs.inner_state.inner_state[0].trace["w"] == P("model")


# Rows for another number of replicas.


class Fold(NamedTuple):
    make: Any  # axis_name -> transformation
    k: int = 4
    tolerance: float = 1e-6
    window: Any = lambda state: state


FOLDS = {
    "alone": Fold(lambda axis: oa.accumulate(optax.sgd(1.0), 4, axis_name=axis)),
    "in a chain": Fold(
        lambda axis: optax.chain(
            optax.identity(), oa.accumulate(optax.sgd(1.0), 4, axis_name=axis)
        ),
        window=lambda state: state[1],
    ),
    "nested": Fold(
        lambda axis: oa.accumulate(oa.accumulate(optax.sgd(1.0), 2), 4, axis_name=axis), k=8
    ),
    "bfloat16": Fold(
        lambda axis: oa.accumulate(
            optax.sgd(1.0), 4, axis_name=axis, accumulator_dtype=jnp.bfloat16
        ),
        tolerance=2e-2,
    ),
}


def on_replicas(fold, replicas):
    """A micro-step of 8 gradients, shared by some replicas, each taking its weighted mean."""
    tx = fold.make(None if replicas is None else "data")

    def one(w, state, gradients, weights):
        total = weights.sum()
        mean = weights @ gradients / jnp.where(total == 0, 1, total)
        updates, state = tx.update(mean, state, w, weight=total)
        return w + updates, state

    if replicas is None:
        return lambda *args: jax.device_get(jax.jit(one)(*args))
    mesh, w = mesh_of("automatic", replicas), jnp.zeros(3)
    specs = P(), oa.state_specs(tx, w, "data"), P("data"), P("data")
    mapped = jax.jit(
        jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=specs[:2], check_vma=False)
    )
    return lambda *args: jax.device_get(mapped(*args))


@pytest.mark.parametrize(
    "name",
    ["alone", "nested", *(pytest.param(name, marks=FULL) for name in ("in a chain", "bfloat16"))],
)
def test_a_window_goes_on_with_other_replicas(name):
    """8 -> 2 -> 1 -> None -> 4 -> 8, one micro-step each and in the middle of a window."""
    fold, rng = FOLDS[name], np.random.default_rng(6)
    path = [8, 2, 1, None, 4, 8, 8, 8]
    gradients = rng.normal(size=(8, 8, 3)).astype(np.float32)
    weights = rng.integers(0, 4, size=(8, 8)).astype(np.float32)
    w = np.zeros(3, np.float32)
    state = fold.make("data").init(w)
    one = {replicas: on_replicas(fold, replicas) for replicas in dict.fromkeys(path)}
    for replicas, gradient, weight in zip(path, gradients, weights, strict=True):
        state = jax.device_get(oa.refold(state, replicas))
        assert fold.window(state).grad_sum.shape == ((replicas, 3) if replicas else (3,))
        w, state = one[replicas](w, state, gradient, weight)
    means = [
        np.average(g.reshape(-1, 3), axis=0, weights=m.ravel())
        for g, m in zip(
            gradients.reshape(-1, fold.k, 8, 3), weights.reshape(-1, fold.k, 8), strict=True
        )
    ]
    np.testing.assert_allclose(w, -sum(means), rtol=fold.tolerance, atol=fold.tolerance)
    assert int(fold.window(state).update_step) == 2


@pytest.mark.parametrize(
    "replicas, kind",
    [(3, "automatic"), (3, "explicit"), (16, "explicit"), (1, "automatic"), (None, "explicit")],
)
def test_rows_that_do_not_divide(replicas, kind):
    """Sums are kept, wherever they go; a row that is left over from the window before is none."""
    tx = oa.accumulate(optax.sgd(1.0), 4, axis_name="data")
    rows = np.arange(24, dtype=np.float32).reshape(8, 3)
    rows[2] = np.nan
    state = oa.refold(tx.init(jnp.zeros(3)), 8)._replace(
        grad_sum=rows,
        weight_sum=np.arange(8, dtype=np.float32),
        kept=np.array([1, 2, 0, 3, 1, 1, 1, 1], np.int32),
    )
    mesh = mesh_of(kind)
    specs = oa.state_specs(tx, jnp.zeros(3), "data")
    state = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), state, specs)
    folded = oa.refold(state, replicas)
    assert jnp.shape(folded.weight_sum) == (() if replicas is None else (replicas,))
    live = np.arange(8) != 2
    np.testing.assert_allclose(np.asarray(folded.grad_sum).reshape(-1, 3).sum(0), rows[live].sum(0))
    np.testing.assert_allclose(np.sum(folded.weight_sum), np.arange(8)[live].sum())
    assert np.max(folded.kept) == 3
    assert jax.tree.map(jnp.result_type, folded) == jax.tree.map(jnp.result_type, state)


# Errors that say what to type.


def dot(w, x):
    return jnp.mean(x @ w)


W, X = np.ones(3, np.float32), np.ones((32, 3), np.float32)


def call(*args, mesh=None, **keywords):
    keywords.setdefault("k", 4)
    make = mesh if callable(mesh) else lambda: mesh if mesh is not None else mesh_of("automatic")
    return lambda: oa.value_and_grad(dot, mesh=make(), **keywords)(*(args or (W, X)))


def of_types(*types):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=types)


def in_shard_map(of_arguments):
    def made():
        mesh = mesh_of("automatic")
        grad_fn = oa.value_and_grad(dot, 2, mesh=of_arguments or mesh)
        f = jax.shard_map(grad_fn, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
        return jax.jit(f)(W, X)

    return made


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
ERRORS = {
    "k and a share": (call(k=8), "each of 8 replicas.* batch of 4 .* 8 micro-batches; use k=4"),
    "a size and a share": (
        call(k=None, micro_batch_size=3),
        "each of 8 replicas.* micro_batch_size=2 or micro_batch_size=4",
    ),
    "replicas and a batch": (call(W, X[:30]), "batch of 30 .* 8 replicas.* multiple of 8"),
    "no such axis": (call(batch_axes="batch"), r"\('batch',\).* \('data',\); type batch_axes="),
    "one axis twice": (call(batch_axes=("data", "data")), 'type batch_axes="data"'),
    "no axes": (call(batch_axes=()), 'type batch_axes="data"'),
    "no mesh": (call(mesh="data"), "expected a jax.sharding.Mesh, or True"),
    "no mesh in the arguments": (call(mesh=True), "type mesh=your_mesh"),
    "an explicit tensor axis beside automatic ones": (
        call(mesh=lambda: of_types(AUTO, EXPLICIT)),
        r"\['model'\] are explicit .* axis_types=\(AxisType.Auto,\)",
    ),
    "mesh and axis_name": (call(axis_name="data"), "axis_name inside .* mesh outside"),
    "a state that is threaded": (
        call(W, X, W, state_argnum=2),
        "type merge_state=f",
    ),
    "mesh inside a shard_map": (in_shard_map(False), "type axis_name= instead"),
    "mesh=True inside a shard_map": (in_shard_map(True), "type axis_name= instead"),
    "specs of another tree": (call(grad_specs={"w": P()}), "type grad_specs=P"),
    "specs that do not divide": (call(grad_specs=P("data")), r"\(3,\) does not split into 8"),
    "specs of more axes": (call(grad_specs=P(None, "data")), r"\(3,\) does not split into 8"),
    "specs that are none": (call(grad_specs="data"), r"type PartitionSpec\('data'\)"),
    "specs of another mesh": (call(grad_specs=P("batch")), r"type PartitionSpec\('data'\)"),
    "gather of nothing": (call(gather="micro_batch"), "type grad_specs="),
    "gather of what": (call(gather="layer"), "gather='window', gather='micro_batch'"),
    "specs without a mesh": (
        lambda: oa.value_and_grad(dot, 4, grad_specs=P("data")),
        "type mesh=your_mesh",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_with_remedies(name):
    made, remedy = ERRORS[name]
    with pytest.raises((ValueError, TypeError), match=remedy):
        made()


def test_explicit_tensor_axes_are_refused_before_jax_0_12():
    make = lambda: oa.value_and_grad(dot, 4, mesh=of_types(EXPLICIT, EXPLICIT))  # noqa: E731
    if jax.__version_info__ >= (0, 12):
        close(make()(W, X), jax.value_and_grad(dot)(W, X))
        return
    with pytest.raises(ValueError, match=r"make them automatic: jax\.make_mesh"):
        make()


def test_errors_of_states():
    tx = oa.accumulate(optax.sgd(1.0), 2, axis_name="data")
    placed = put(mesh_of("automatic"), W, P())
    with pytest.raises(ValueError, match=r"type state_shardings\(tx, params, axis_name="):
        oa.state_shardings(tx, placed)
    with pytest.raises(ValueError, match="has no sharding"):
        oa.state_shardings(tx, W)
    with pytest.raises(ValueError, match="expected the state of accumulate"):
        oa.state_specs(optax.sgd(1.0), W, "data")
    with pytest.raises(ValueError, match="an integer of 1 or more, or None"):
        oa.refold(tx.init(W), 0)
    with pytest.raises(ValueError, match="expected the state of accumulate"):
        oa.refold(optax.sgd(1.0).init(W), 2)


@pytest.mark.parametrize("argnums", [0, (0,)])
def test_grad_specs_are_a_prefix_of_the_gradients_as_argnums_gives_them(argnums):
    mesh = jax.make_mesh((8,), ("data",))
    spec = jax.sharding.PartitionSpec("data")
    loss = lambda w, x: jnp.mean((x @ w) ** 2)  # noqa: E731
    w, x = jnp.ones((8, 2)), jnp.arange(128.0).reshape(16, 8)
    for given in [spec] if argnums == 0 else [spec, (spec,)]:
        grad_fn = oa.value_and_grad(loss, 2, argnums=argnums, mesh=mesh, grad_specs=given)
        _, grads = jax.jit(grad_fn)(w, x)
        (leaf,) = jax.tree.leaves(grads)
        assert leaf.sharding.spec[0] == "data" and isinstance(grads, tuple) == (argnums != 0)
        want = jax.grad(loss)(w, x)
        np.testing.assert_allclose(np.asarray(leaf), want, rtol=1e-5)
