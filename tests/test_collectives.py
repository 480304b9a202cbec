"""Collectives of compiled programs: real ones on eight CPU devices, and texts of other backends."""

import functools
import itertools
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from optax_accum import verify
from optax_accum.verify import Collective, assert_reduced_once, collectives

K = 4
ALL = tuple(range(8))
COLUMNS = {frozenset((0, 2, 4, 6)), frozenset((1, 3, 5, 7))}  # along data of a 4 x 2 mesh
PAIRS = {frozenset((i, i + 1)) for i in range(0, 8, 2)}  # along model
W, B = (16, 24), (24,)
BYTES = 4 * (16 * 24 + 24)
GRADS = {"w": jax.ShapeDtypeStruct(W, jnp.float32), "b": jax.ShapeDtypeStruct(B, jnp.float32)}
REPLICATED, ROWS = P(), P("data")
SPECS = (REPLICATED, ROWS)  # of parameters and a batch
FIXTURES = pathlib.Path(__file__).parent / "fixtures"


@functools.cache
def mesh_of(*axes):
    sizes, names = tuple(size for _, size in axes), tuple(name for name, _ in axes)
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(axes))


def line():
    return mesh_of(("data", 8))


def grid():
    return mesh_of(("data", 4), ("model", 2))


def of(shape, mesh=None, spec=REPLICATED, dtype=jnp.float32):
    mesh = mesh or line()
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def params(mesh=None, w=REPLICATED, b=REPLICATED, dtype=jnp.float32):
    return {"w": of(W, mesh, w, dtype), "b": of(B, mesh, b, dtype)}


def batch(mesh=None, spec=ROWS):
    return of((64, 16), mesh, spec)


def compiled(f, *arguments):
    return jax.jit(f).lower(*arguments).compile()


def mapped(f, mesh=None, in_specs=ROWS, out_specs=REPLICATED, **options):
    return jax.shard_map(f, mesh=mesh or line(), in_specs=in_specs, out_specs=out_specs, **options)


def loss(params, x):
    return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]) ** 2)


def window(params, x, k=K, unroll=1, each=lambda value, grads: (value, grads)):
    """The sum of k micro-gradients; `each` sees the loss and the gradient of a micro-batch."""
    micro_batches = x.reshape(-1, k, *x.shape[1:]).swapaxes(0, 1)

    def add(sums, micro_batch):
        found = each(*jax.value_and_grad(loss)(params, micro_batch))
        return jax.tree.map(jnp.add, sums, found), None

    start = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    return jax.lax.scan(add, start, micro_batches, unroll=unroll)[0]


def gradients(params, x, loss=loss):
    """The sum of K micro-gradients, without the losses."""
    micro_batches = x.reshape(-1, K, *x.shape[1:]).swapaxes(0, 1)

    def add(sums, micro_batch):
        return jax.tree.map(jnp.add, sums, jax.grad(loss)(params, micro_batch)), None

    return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), micro_batches)[0]


def psum(tree, axes="data"):
    return jax.lax.psum(tree, axes)


def deferred(params, x):
    """Sums stay on the device; one reduction when the window is full."""
    return psum(window(params, x))


def varying(params, x):
    params = jax.tree.map(lambda leaf: jax.lax.pcast(leaf, "data", to="varying"), params)
    return psum(gradients(params, x))


def each_micro_batch(params, x):
    return window(params, x, each=lambda value, grads: psum((value, grads)))


def losses_in_the_loop(params, x):
    value, grads = window(params, x, each=lambda value, grads: (psum(value), grads))
    return value, psum(grads)


def scattered(params, x):
    return jax.tree.map(
        lambda leaf: jax.lax.psum_scatter(leaf, "data", tiled=True), gradients(params, x)
    )


def gathered(params, x):
    """Micro-batches are gathered in the loop, and what was reduced to shards after it."""

    def gather(leaf):
        return jax.lax.all_gather(leaf, "data", tiled=True)

    def whole(params, x):
        return loss(params, jax.lax.dynamic_slice_in_dim(gather(x), 0, 8))

    sums = gradients(params, x, whole)
    shards = jax.tree.map(lambda leaf: jax.lax.psum_scatter(leaf, "data", tiled=True), sums)
    return jax.tree.map(gather, shards)


def not_reduced(params, x):
    return jax.tree.map(lambda leaf: leaf[None], gradients(params, x))


def one_leaf(params, x):
    return psum(gradients(params, x)["w"])


def closing_branch(params, x, last):
    """What the time driver does: one micro-gradient a call, reduced where the window closes."""
    return jax.lax.cond(last, psum, lambda sums: sums, jax.grad(loss)(params, x))


MAPPED = {  # by hand, over one axis: the function, its out_specs
    "deferred": (deferred, REPLICATED),
    "each micro-batch": (each_micro_batch, REPLICATED),
    "losses in the loop": (losses_in_the_loop, REPLICATED),
    "scattered": (scattered, ROWS),
    "gathered": (gathered, REPLICATED),
    "not reduced": (not_reduced, ROWS),
    "one leaf": (one_leaf, REPLICATED),
}
CHECKED = {"varying": varying, "forgot varying": gradients}  # with check_vma=True
PLAIN = {"plain jit": window, "unrolled": functools.partial(window, unroll=True)}


@functools.cache
def program(name):
    if name in PLAIN:
        return compiled(PLAIN[name], params(), batch())
    if name in CHECKED:
        return compiled(mapped(CHECKED[name], in_specs=SPECS), params(), batch())
    if name == "closing branch":
        f = mapped(closing_branch, in_specs=(*SPECS, REPLICATED), check_vma=False)
        return compiled(f, params(), batch(), of((), dtype=jnp.bool_))
    f, out_specs = MAPPED[name]
    f = mapped(f, in_specs=SPECS, out_specs=out_specs, check_vma=False)
    return compiled(f, params(), batch())


def as_sets(groups):
    return {frozenset(group) for group in groups}


def large(found):
    return [each for each in found if each.bytes > 8]


def assert_fails(compiled, *arguments, match, **options):
    with pytest.raises(AssertionError, match=match) as caught:
        assert_reduced_once(compiled, *arguments, **options)
    return str(caught.value)


# What is found


def test_plain_jit_reduces_in_the_loop():
    found = large(collectives(program("plain jit")))
    assert sum(each.bytes for each in found) in (BYTES, BYTES + 4)  # the loss may be merged in
    for each in found:
        assert isinstance(each, Collective)
        assert each.kind == "all-reduce"
        assert as_sets(each.groups) == {frozenset(ALL)}
        assert (each.in_loop, each.in_conditional, each.runs) == (True, False, K)


def test_a_reduction_after_the_loop():
    found = collectives(program("deferred"))
    assert sum(each.bytes * each.runs for each in found) == BYTES + 4
    assert not any(each.in_loop or each.in_conditional for each in found)


def test_several_arrays_in_one_operation_are_summed():
    def f(x):
        return psum((x[0], x.sum(1), x.astype(jnp.int8)))

    found = collectives(compiled(mapped(f, check_vma=False), batch()))
    assert sum(each.bytes for each in found) in (4 * (16 + 8) + n * 8 * 16 for n in (1, 4))
    assert {each.kind for each in found} == {"all-reduce"}


@pytest.mark.parametrize("inner, outer", [(3, 5), (2, 7)])
def test_runs_of_nested_loops_multiply(inner, outer):
    def f(x):
        def once(_, x):
            return jax.lax.fori_loop(0, inner, lambda _, x: psum(x) * 0.1, x) + 1

        return jax.lax.fori_loop(0, outer, once, x)

    (found,) = collectives(compiled(mapped(f, out_specs=P("data"), check_vma=False), batch()))
    assert (found.in_loop, found.in_conditional, found.runs) == (True, False, inner * outer)


def test_a_conditional_in_a_loop():
    def f(x):
        return jax.lax.fori_loop(0, 5, lambda i, x: jax.lax.cond(i == 2, psum, jnp.sin, x), x)

    (found,) = collectives(compiled(mapped(f, out_specs=P("data"), check_vma=False), batch()))
    assert (found.in_loop, found.in_conditional, found.runs) == (True, True, 5)


def test_a_conditional_of_several_branches():
    def f(x, i):
        return jax.lax.switch(i, [psum, jnp.sin, jnp.cos], x)

    f = mapped(f, in_specs=(P("data"), P()), out_specs=P("data"), check_vma=False)
    (found,) = collectives(compiled(f, batch(), of((), dtype=jnp.int32)))
    assert (found.in_loop, found.in_conditional, found.runs) == (False, True, 1)


def test_a_loop_of_unknown_length():
    def f(x):
        return jax.lax.while_loop(lambda x: x.sum() < 1e3, lambda x: psum(x), x)

    (found,) = collectives(compiled(mapped(f, out_specs=P("data"), check_vma=False), batch()))
    assert (found.in_loop, found.runs) == (True, None)


def test_a_condition_runs_once_more_than_its_body():
    def f(x):
        def again(state):
            return (state[0] < 5) & (psum(state[1].sum()) < 1e9)

        return jax.lax.while_loop(again, lambda state: (state[0] + 1, psum(state[1])), (0, x))[1]

    text = compiled(mapped(f, out_specs=P("data"), check_vma=False), batch()).as_text()
    assert [each.runs for each in collectives(text)] == [None, None]
    text = re.sub(
        r"(= [^=]* while\(.*)", r'\1, backend_config={"known_trip_count":{"n":"5"}}', text
    )
    assert {(each.bytes, each.runs) for each in collectives(text)} == {(4, 6), (512, 5)}


LOCAL = 8 * 16 * 4  # a device's rows of the batch
MOVES = {
    "reduce-scatter": (lambda x: jax.lax.psum_scatter(x, "data", tiled=True), LOCAL),
    "all-gather": (lambda x: jax.lax.all_gather(x, "data", tiled=True), 8 * LOCAL),
    "all-to-all": (lambda x: jax.lax.all_to_all(x, "data", 0, 0, tiled=True), LOCAL),
    "collective-permute": (
        lambda x: jax.lax.ppermute(x, "data", [(i, (i + 1) % 8) for i in range(8)]),
        LOCAL,
    ),
}


@pytest.mark.parametrize("kind", MOVES)
def test_kinds_and_their_bytes(kind):
    f, size = MOVES[kind]
    (found,) = collectives(compiled(mapped(f, out_specs=P("data"), check_vma=False), batch()))
    groups = tuple((i, (i + 1) % 8) for i in ALL) if kind == "collective-permute" else (ALL,)
    assert found == Collective(kind, size, groups, False, False, 1)


CUBE = (("r", 2), ("d", 2), ("m", 2))


@pytest.mark.parametrize(
    "axes", [axes for n in (1, 2, 3) for axes in itertools.combinations("rdm", n)]
)
def test_groups_along_the_axes_of_a_mesh(axes):
    f = mapped(lambda x: psum(x, axes), mesh_of(*CUBE), P("d"), P("d"), check_vma=False)
    (found,) = collectives(compiled(f, batch(mesh_of(*CUBE), P("d"))))
    expected = {}
    for device, coordinates in enumerate(itertools.product(range(2), repeat=3)):
        key = tuple(c for c, name in zip(coordinates, "rdm", strict=True) if name not in axes)
        expected.setdefault(key, set()).add(device)
    assert as_sets(found.groups) == as_sets(expected.values())


def test_groups_are_positions_whatever_the_devices_are_called():
    devices = np.array(jax.devices())[[3, 1, 0, 2, 7, 5, 6, 4]].reshape(4, 2)
    mesh = Mesh(devices, ("data", "model"))
    f = mapped(lambda x: psum(x), mesh, ROWS, P(), check_vma=False)
    (found,) = collectives(compiled(f, batch(mesh)))
    assert as_sets(found.groups) == COLUMNS


def test_groups_along_a_factor_of_an_axis():
    found = collectives(compiled(lambda x: x.reshape(4, 2, 16).sum(0), of((8, 16), spec=P("data"))))
    groups = {each.kind: as_sets(each.groups) for each in found}
    assert groups["all-reduce"] == COLUMNS
    assert groups.get("all-gather", PAIRS) == PAIRS


# Spelled by hand, for what CPU does not write

SPELLINGS = {
    "{{0,1},{2,3}}": ((0, 1), (2, 3)),
    "{}": ((0, 1, 2, 3, 4, 5, 6, 7),),
    "[2,4]<=[8]": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "[2,4]<=[4,2]T(1,0)": ((0, 2, 4, 6), (1, 3, 5, 7)),
    "[4,2]<=[2,2,2]T(1,0,2)": ((0, 1), (4, 5), (2, 3), (6, 7)),
    "mesh['data'=4,'model'=2] {'data'}": ((0, 2, 4, 6), (1, 3, 5, 7)),
    "mesh['data'=8] {'data':(1)4}": ((0, 2, 4, 6), (1, 3, 5, 7)),
    "mesh['data'=8] {'data':(2)2}": ((0, 2), (1, 3), (4, 6), (5, 7)),
    "mesh['data'=8] {'data':(1)2,'data':(4)2}": ((0, 1, 4, 5), (2, 3, 6, 7)),
    "mesh[a=2,b=4] {b}": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}": ((0, 1), (2, 3), (4, 5), (6, 7)),
    "mesh['a'=2,'b'=4], device_ids=(7,6,5,4,3,2,1,0) {'b'}": ((7, 6, 5, 4), (3, 2, 1, 0)),
}


def written(groups, header="num_partitions=8", operands=("f32[256]",), kind="all-reduce"):
    """A program of one collective."""
    names = [f"%p.{i}" for i in range(len(operands))]
    lines = [
        f"  {n} = {shape} parameter({i})"
        for i, (n, shape) in enumerate(zip(names, operands, strict=True))
    ]
    call = f"({', '.join(operands)}) {kind}({', '.join(names)}), {groups}, to_apply=%sum"
    return "\n".join(
        [f"HloModule m, {header}", "ENTRY %main {", *lines, f"  ROOT %r = {call}", "}"]
    )


GLOBAL = "channel_id=1, use_global_device_ids=true"


@pytest.mark.parametrize("spelled", SPELLINGS)
def test_spellings_of_groups(spelled):
    (found,) = collectives(written(f"replica_groups={spelled}, {GLOBAL}"))
    assert found.groups == SPELLINGS[spelled]
    assert found.bytes == 1024


@pytest.mark.parametrize(
    "kind, attributes, expected",
    [
        ("all-reduce", "replica_groups={{0,1}}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("all-reduce", "replica_groups={}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("all-reduce", "channel_id=1, replica_groups={{0},{1}}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("all-reduce", "channel_id=1", (ALL,)),
        (
            "all-to-all",
            "channel_id=1, replica_groups={{0,1},{2,3}}",
            ((0, 1), (2, 3), (4, 5), (6, 7)),
        ),
    ],
)
def test_groups_of_replicas_and_of_partitions(kind, attributes, expected):
    """Two replicas of four partitions: what the numbers mean depends on what stands beside them."""
    header = "replica_count=2, num_partitions=4"
    (found,) = collectives(written(attributes, header, kind=kind))
    assert found.groups == expected


def test_a_spelling_of_groups_that_is_not_known():
    with pytest.raises(ValueError, match="not known here"):
        collectives(written(f"replica_groups=everyone, {GLOBAL}"))


@pytest.mark.parametrize(
    "shape, size",
    [
        ("f32[]", 4),
        ("pred[3]{0}", 3),
        ("s4[3]{0:E(4)}", 2),
        ("u2[5]", 2),
        ("bf16[8,128]{1,0:T(8,128)(2,1)S(1)}", 2048),
        ("f8e4m3fn[10]", 10),
        ("f4e2m1fn[4]", 2),
        ("c64[3]", 24),
        ("c128[3]", 48),
        ("f32[<=4,2]", 32),
        ("f32[0,3]", 0),
        ("(f32[2]{0}, (u8[3]{0}, token[]))", 11),
    ],
)
def test_bytes_of_a_shape(shape, size):
    (found,) = collectives(written(GLOBAL, operands=(shape, "f32[1]")))
    assert found.bytes == size + 4


def fixture(name):
    return (FIXTURES / f"{name}.txt").read_text()


EVENS_AND_ODDS = ((0, 2, 4, 6), (1, 3, 5, 7))
FOUND = {
    "async_pairs": [
        Collective("all-reduce", 64 * 32 * 4 + 100 * 2, (ALL,), True, False, 6),
        Collective("all-gather", 512 * 32 * 4, (ALL,), False, False, 1),
        Collective("all-gather", 256 * 32 * 4 + 400 * 2, EVENS_AND_ODDS, False, False, 1),
        Collective("collective-permute", 64 * 32 * 4, ((0, 1), (1, 0)), False, False, 1),
        Collective("reduce-scatter", 64 * 32 * 4, (ALL,), False, False, 1),
    ],
    "async_wrapped": [  # the wrapped reduce-scatter is called from two places
        Collective("reduce-scatter", 64 * 32 * 4, (ALL,), False, False, 1),
        Collective("reduce-scatter", 64 * 32 * 4, (ALL,), False, False, 1),
        Collective("all-to-all", 1024, ((0, 1), (2, 3), (4, 5), (6, 7)), False, False, 1),
    ],
    "spellings": [
        Collective("all-reduce", 10 + 3 + 7 + 20 + 2048 + 10 + 80 + 4, (ALL[:4],), False, False, 1),
        Collective("all-reduce", 10 * 8 + 10 * 16, ((0, 1), (2, 3)), False, True, 1),
        Collective("collective-broadcast", 8 * 3 * 4, (ALL[:4],), True, False, 3),
        Collective("all-reduce", 1, (ALL[:4],), True, False, 4),  # in the loop's condition
        Collective("ragged-all-to-all", 8 * 128 * 2, (ALL[:4],), False, False, 1),
        Collective("all-reduce", 1024 * 1024 * 4, (ALL[:4],), False, False, 1),  # in a fusion
    ],
    "branches": 2 * [Collective("all-reduce", 1024, (ALL[:4],), False, True, 1)],
}


@pytest.mark.parametrize("name", FOUND)
def test_texts_of_other_backends(name):
    assert collectives(fixture(name)) == FOUND[name]


@pytest.mark.parametrize(
    "change, runs",
    [
        ({}, 6),
        ({"constant(0)": "constant(2)"}, 4),
        ({"constant(1)": "constant(4)"}, 2),
        ({"direction=LT": "direction=LE"}, 7),
        ({"constant(6)": "constant(-1)"}, 0),
        ({"direction=LT": "direction=NE"}, None),
        ({"s32[]": "f32[]"}, None),
        ({"constant(1)": "constant(0)"}, None),
        ({"s32[] add(%round, %one)": "s32[] multiply(%round, %one)"}, None),
        (
            {"%limit = s32[] constant(6)": "%limit = s32[] get-tuple-element(%state.1), index=0"},
            None,
        ),
    ],
)
def test_a_trip_count_that_the_compiler_did_not_write(change, runs):
    text = fixture("async_pairs").replace('"known_trip_count":{"n":"6"},', "")
    for old, new in change.items():
        assert old in text
        text = text.replace(old, new)
    assert collectives(text)[0].runs == runs


@pytest.mark.parametrize("name", ["plain jit", "each micro-batch"])
def test_a_trip_count_that_cpu_did_not_write(name):
    text = program(name).as_text()
    without = re.sub(r',"known_trip_count":{"n":"\d+"}', "", text)
    assert without != text
    assert collectives(without) == collectives(text)


# What is asserted


@pytest.mark.parametrize(
    "name", ["deferred", "varying", "losses in the loop", "scattered", "closing branch"]
)
@pytest.mark.parametrize("mesh", [None, line])
def test_reduced_once(name, mesh):
    found = assert_reduced_once(program(name), GRADS, mesh=mesh and mesh())
    assert found == collectives(program(name))
    assert sum(each.bytes for each in large(found)) in (BYTES, BYTES + 4)


def test_losses_in_the_loop_are_listed():
    found = assert_reduced_once(program("losses in the loop"), GRADS)
    assert [each.bytes for each in found if each.in_loop] == [4]
    message = assert_fails(program("losses in the loop"), {"w": GRADS["w"]}, match="is reduced")
    assert re.search(rf"all-reduce +4 +{K} +yes +scalar", message)


def test_what_is_gathered_is_not_reduced():
    found = assert_reduced_once(program("gathered"), GRADS)
    gathered = [each for each in found if each.kind == "all-gather"]
    assert {each.in_loop for each in gathered} == {True, False}
    message = assert_fails(program("gathered"), {"w": GRADS["w"]}, match="is reduced 1.06")
    assert message.count("no reduction") == len(gathered)


def test_a_reduction_to_shards_takes_in_the_whole_gradient():
    sharded = params(w=P("data"), b=P("data"))
    found = assert_reduced_once(program("scattered"), sharded, mesh=line())
    assert {each.kind for each in found} == {"reduce-scatter"}


@pytest.mark.parametrize("name", ["plain jit", "each micro-batch", "forgot varying"])
def test_fails_where_each_micro_batch_is_reduced(name):
    message = assert_fails(program(name), GRADS, match="inside a loop")
    assert f"{K} times" in message
    assert "mesh=mesh" in message and "psum once after it" in message  # the remedy
    assert "REDUCED IN A LOOP" in message


def test_fails_where_a_loop_of_unknown_length_reduces():
    def f(x):
        return jax.lax.while_loop(lambda x: x.sum() < 1e3, lambda x: psum(x), x)

    text = compiled(mapped(f, out_specs=P("data"), check_vma=False), batch())
    grads = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    message = assert_fails(text, grads, match="an unknown number of times")
    assert re.search(r"all-reduce +512 +\? +yes", message)


def test_fails_where_a_loop_over_layers_reduces():
    def f(layers, x):
        return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)[0] ** 2)

    layers = of((3, 16, 16))
    message = assert_fails(compiled(jax.grad(f), layers, batch()), layers, match="inside a loop")
    assert "1,024 bytes 3 times" in message and "layers of the model" in message


def test_fails_where_an_unrolled_loop_reduces_k_times():
    found = collectives(program("unrolled"))
    assert not any(each.in_loop for each in found)
    message = assert_fails(program("unrolled"), GRADS, match=f"is reduced {K} times")
    assert f"{K * BYTES:,} bytes" in message and "unrolled" in message


def test_fails_where_nothing_is_reduced():
    message = assert_fails(program("not reduced"), GRADS, match="is reduced 0 times")
    assert "no collectives" in message


def test_fails_where_a_leaf_is_not_reduced():
    assert_fails(program("one leaf"), GRADS, match=r"is reduced 0\.94\d* times")


def test_fails_where_something_else_is_reduced():
    grads = {"w": GRADS["w"]}
    assert_fails(program("deferred"), grads, match="something besides the gradient")


def test_every_collective_is_in_the_table():
    text = fixture("spellings")
    message = assert_fails(text, GRADS, match="is reduced")
    lines = message.split("\n\n")[1].splitlines()
    assert lines[0].split()[:3] == ["kind", "bytes", "runs"]
    assert [line.split()[:2] for line in lines[1:]] == [
        [each.kind, f"{each.bytes:,}"] for each in FOUND["spellings"]
    ]


# Other axes


def two_layers(params, x):
    """Columns of the first layer and rows of the second on each device along model."""
    hidden = jnp.tanh(x @ params["in"])
    return jnp.mean(psum(hidden @ params["out"], "model") ** 2)


@functools.cache
def tensor_parallel_program():
    specs = {"in": P(None, "model"), "out": P("model")}
    f = mapped(
        lambda p, x: psum(gradients(p, x, two_layers)),
        grid(),
        (specs, ROWS),
        specs,
        check_vma=False,
    )
    arguments = {"in": of((16, 32), grid(), specs["in"]), "out": of((32, 16), grid(), specs["out"])}
    return compiled(f, arguments, batch(grid())), arguments


def test_tensor_parallel_reductions_are_listed_and_exempt():
    program, grads = tensor_parallel_program()
    found = assert_reduced_once(program, grads, mesh=grid())
    model = [each for each in found if as_sets(each.groups) == PAIRS]
    data = [each for each in found if as_sets(each.groups) == COLUMNS]
    assert model and all(each.in_loop and each.runs == K and each.bytes > 4 for each in model)
    assert sum(each.bytes for each in data) == 2 * (16 * 32 * 4 // 2)


def test_automatic_tensor_axes_beside_a_manual_batch_axis():
    specs = {"w": P(None, "model"), "b": P("model")}
    f = mapped(deferred, grid(), SPECS, axis_names={"data"}, check_vma=False)
    grads = params(grid(), **specs)
    assert_reduced_once(compiled(f, grads, batch(grid())), grads, mesh=grid())


def test_sharded_leaves_need_their_sharding():
    program, grads = tensor_parallel_program()
    whole = {name: jax.ShapeDtypeStruct(g.shape, g.dtype) for name, g in grads.items()}
    assert_fails(program, whole, mesh=grid(), match=r"is reduced 0\.5 times")


def test_fails_where_a_tensor_parallel_program_reduces_in_the_loop():
    specs = {"w": P(None, "model"), "b": P("model")}
    grads = params(grid(), **specs)
    program = compiled(window, grads, batch(grid()))
    assert_fails(program, grads, mesh=grid(), match="inside a loop")


def test_without_a_mesh_other_axes_are_not_told_apart():
    program, grads = tensor_parallel_program()
    assert_fails(program, grads, match="inside a loop")


CUBE_BATCH = P(("r", "d"))


def test_several_batch_axes():
    mesh = mesh_of(*CUBE)
    f = mapped(
        lambda p, x: psum(gradients(p, x), ("r", "d")), mesh, (P(), CUBE_BATCH), check_vma=False
    )
    program = compiled(f, params(mesh), batch(mesh, CUBE_BATCH))
    assert_reduced_once(program, GRADS, mesh=mesh, batch_axes=("r", "d"))
    assert_reduced_once(program, GRADS, mesh=mesh, batch_axes=("d", "r"))
    assert_reduced_once(program, GRADS, mesh=mesh, batch_axes="d")  # over d too
    assert_fails(program, GRADS, mesh=mesh, batch_axes="m", match="is reduced 0 times")
    assert_fails(program, GRADS, mesh=mesh, batch_axes=("r", "d", "m"), match="is reduced 0 times")


def test_fails_where_a_loop_reduces_over_one_of_two_batch_axes():
    mesh = mesh_of(*CUBE)

    def f(p, x):
        return psum(window(p, x, each=lambda v, g: (v, psum(g, "d")))[1], "r")

    f = mapped(f, mesh, (P(), CUBE_BATCH), check_vma=False)
    program = compiled(f, params(mesh), batch(mesh, CUBE_BATCH))
    message = assert_fails(program, GRADS, mesh=mesh, batch_axes=("r", "d"), match="inside a loop")
    assert "over some of the batch's devices" in message
    assert_reduced_once(program, GRADS, mesh=mesh, batch_axes="r")


def test_a_mesh_whose_devices_are_permuted():
    mesh = Mesh(np.array(jax.devices())[::-1].reshape(4, 2), ("data", "model"))
    f = mapped(deferred, mesh, SPECS, check_vma=False)
    assert_reduced_once(compiled(f, params(mesh), batch(mesh)), GRADS, mesh=mesh)


# Declared reductions


def normalised(p, x):
    """A loss with statistics of the batch across devices."""
    hidden = x @ p["w"] + p["b"]
    mean, square = jax.lax.pmean((hidden.mean(0), (hidden**2).mean(0)), "data")
    return jnp.mean(jnp.tanh((hidden - mean) * jax.lax.rsqrt(square - mean**2 + 1)) ** 2)


@functools.cache
def normalised_program(reduced=True):
    def f(p, x):
        sums = gradients(p, x, normalised)
        return psum(sums) if reduced else sums

    return compiled(mapped(f, in_specs=SPECS, check_vma=False), params(), batch())


STATISTIC = 24 * 4  # as many bytes as the leaf b


@pytest.mark.parametrize(
    "exempt",
    [(STATISTIC,), {STATISTIC, 2 * STATISTIC}, np.array([STATISTIC]), lambda c: c.in_loop],
    ids=["bytes", "set", "array", "predicate"],
)
def test_declared_statistics_are_exempt(exempt):
    found = assert_reduced_once(normalised_program(), GRADS, exempt=exempt)
    assert sum(each.bytes for each in found if each.in_loop) >= 2 * STATISTIC


@pytest.mark.parametrize("exempt", [(), (STATISTIC + 4,), lambda c: not c.in_loop])
def test_fails_where_statistics_are_not_declared(exempt):
    message = assert_fails(
        normalised_program(), GRADS, exempt=exempt, match="once, but more inside"
    )
    sizes = {each.bytes for each in collectives(normalised_program()) if each.in_loop}
    assert f"exempt={tuple(sorted(sizes))}" in message


def test_fails_where_only_statistics_are_reduced():
    program = normalised_program(reduced=False)
    assert_fails(program, GRADS, exempt=(STATISTIC,), match="is reduced 0 times")


@pytest.mark.parametrize("exempt, fails", [((64, 32), False), ((96,), False), ((64,), True)])
def test_an_operation_or_the_arrays_in_it_are_declared(exempt, fails):
    text = fixture("async_pairs").replace("(%matrix, %vector)", "(%a, %b)")
    text = text.replace("  %one =", "  %a = f32[16] iota()\n  %b = f32[8] iota()\n  %one =")
    grads = jax.ShapeDtypeStruct((64, 32), jnp.float32)  # the reduce-scatter
    if fails:
        message = assert_fails(text, grads, exempt=exempt, match="inside a loop: 32 bytes 6 times")
        assert re.search(r"all-reduce +96 +6 +yes +REDUCED", message)
    else:
        assert_reduced_once(text, grads, exempt=exempt)


@pytest.mark.parametrize("exempt", [STATISTIC, "96", (1.5,), None])
def test_exemptions_that_cannot_be_meant(exempt):
    with pytest.raises(TypeError, match=r"exempt=\(64, 128\)"):
        assert_reduced_once(program("deferred"), GRADS, exempt=exempt)


# Dtypes and branches


def leaves(*dtypes):
    return [jax.ShapeDtypeStruct((256,), dtype) for dtype in dtypes]


def reduced_as(*dtypes, copies=1):
    operands = tuple(f"{dtype}[256]" for dtype in dtypes) * copies
    return written(f"replica_groups=[1,8]<=[8], {GLOBAL}", operands=operands)


@pytest.mark.parametrize(
    "grads, text",
    [
        (leaves(jnp.bfloat16), reduced_as("bf16")),
        (leaves(jnp.bfloat16), reduced_as("f32")),
        (leaves(jnp.bfloat16, jnp.float32), reduced_as("f32", "f32")),
        (leaves(jnp.bfloat16, jnp.float32), reduced_as("bf16", "f32")),
        (leaves(jnp.complex64), reduced_as("c64")),
        (leaves(jnp.complex64), reduced_as("f32", "f32")),  # the parts apart
        (leaves(jnp.float32), reduced_as("f64")),
    ],
)
def test_promoted_dtypes_count_once(grads, text):
    assert_reduced_once(text, grads)
    twice = text.replace("ROOT %r =", "%q =").replace("\n}", "\n" + text.splitlines()[-2] + "\n}")
    assert_fails(twice, grads, match="is reduced 2 times")


def test_two_reductions_of_half_the_width_are_two():
    assert_fails(reduced_as("bf16", copies=2), leaves(jnp.bfloat16), match="is reduced 2 times")
    assert_fails(reduced_as("bf16", copies=2), leaves(jnp.float32), match="is reduced 2 times")


def test_fails_where_digits_are_lost():
    assert_fails(reduced_as("bf16"), leaves(jnp.float32), match="in a narrower dtype")


def test_bfloat16_gradients_of_a_real_program():
    arguments = params(dtype=jnp.bfloat16)
    f = mapped(deferred, in_specs=SPECS, check_vma=False)
    x = of((64, 16), spec=P("data"), dtype=jnp.bfloat16)
    assert_reduced_once(compiled(f, arguments, x), arguments)
    assert_fails(compiled(window, arguments, x), arguments, match="inside a loop")


def test_of_the_branches_the_largest_counts():
    grads = leaves(jnp.float32)
    assert_reduced_once(fixture("branches"), grads)
    smaller = fixture("branches").replace("%in.1 = f32[256]", "%in.1 = f32[128]")
    assert_reduced_once(smaller, grads)
    larger = fixture("branches").replace("%in.1 = f32[256]", "%in.1 = f32[512]")
    assert_fails(larger, grads, match="is reduced 2 times")
    twice = fixture("branches").replace(
        "%in.3 = f32[256]{0} parameter(0)",
        "%in.3 = f32[256]{0} parameter(0)\n  %c = f32[256]{0} call(%in.3), to_apply=%warmup\n"
        "  %d = f32[256]{0} call(%in.3), to_apply=%main_phase",
    )
    assert_fails(twice, grads, match="is reduced 2 times")


def test_conditionals_one_after_the_other_add_up():
    text = fixture("branches").replace("%warmup, %main_phase, %nothing", "%warmup, %nothing")
    second = "  %c = f32[256]{0} conditional(%phase), branch_computations={%nothing, %main_phase}"
    text = text.replace("  ROOT %conditional.1", f"{second}\n  ROOT %conditional.1")
    assert_fails(text, leaves(jnp.float32), match="is reduced 2 times")


def test_of_nested_branches_the_largest_counts():
    text = fixture("branches")
    inner = "  %c = f32[256]{0} conditional(), branch_computations={%main_phase, %warmup}"
    nested = text.replace("  ROOT %in.3", f"{inner}\n  ROOT %in.3")
    assert len(collectives(nested)) == 4
    assert_reduced_once(nested, leaves(jnp.float32))
    beside = nested.replace(
        "  ROOT %in.3", "  %d = f32[256] call(%in.3), to_apply=%warmup\n  ROOT %in.3"
    )
    assert_fails(beside, leaves(jnp.float32), match="is reduced 2 times")


# Arguments


def test_what_is_not_a_compiled_program():
    jitted = jax.jit(jnp.sin)
    for wrong in (jnp.sin, jitted, jitted.lower(1.0), None):
        with pytest.raises(TypeError, match=r"\.lower\(\*arguments\)\.compile\(\)"):
            collectives(wrong)
    for wrong in ("", "x = 1", jitted.lower(1.0).as_text()):
        with pytest.raises(ValueError, match=r"compiled\.as_text\(\)"):
            collectives(wrong)


def test_a_text_that_was_cut():
    text = program("deferred").as_text()
    with pytest.raises(ValueError, match="whole compiled text"):
        collectives(re.sub(r"^ *%\S+ = f32\[16,24\].*$", "", text, flags=re.MULTILINE))


def test_a_program_without_collectives():
    assert collectives(jax.jit(jnp.sin).lower(1.0).compile()) == []


@pytest.mark.parametrize(
    "options, match",
    [
        ({"grads": {}}, "no leaf larger than a scalar"),
        ({"grads": {"scale": jnp.zeros(())}}, "no leaf larger than a scalar"),
        ({"mesh": grid, "batch_axes": "model2"}, r"'model2'.*\['data', 'model'\]"),
        ({"mesh": lambda: jax.sharding.AbstractMesh((2, 2), ("data", "m"))}, "8 devices.* 4"),
        ({"mesh": lambda: jax.sharding.AbstractMesh((1, 8), ("data", "m"))}, "jax_num_cpu_devices"),
    ],
)
def test_arguments_that_check_nothing(options, match):
    mesh = options["mesh"]() if "mesh" in options else None
    rest = {key: value for key, value in options.items() if key not in ("mesh", "grads")}
    with pytest.raises(ValueError, match=match):
        assert_reduced_once(program("deferred"), options.get("grads", GRADS), mesh=mesh, **rest)


def test_one_device_checks_nothing():
    one = jax.jit(jax.grad(lambda w: (w**2).sum())).lower(jnp.ones(4)).compile()
    with pytest.raises(ValueError, match="jax_num_cpu_devices"):
        assert_reduced_once(one, jnp.ones(4))


def test_leaves_that_hold_no_gradient_are_passed_over():
    integer = jax.grad(lambda n: 0.0 * n.sum(), allow_int=True)(jnp.arange(3))
    assert_reduced_once(program("deferred"), {**GRADS, "none": None, "int": integer, "scale": 1.0})


def test_public_home():
    assert Collective.__module__ == "optax_accum.verify" == verify.__name__
    assert math.prod(len(f.__doc__ or "") for f in (Collective, collectives, assert_reduced_once))
