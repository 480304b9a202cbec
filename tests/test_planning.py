"""The arithmetic of planning against compiled programs and numbers by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_accum as oa

K, N = 4, 8
PARAMS = {"a": jax.ShapeDtypeStruct((16, 16), jnp.float32)}
SIZE = 16 * 16 * 4


def loss(params, x):
    return jnp.mean(jnp.tanh(x @ params["a"]) ** 2)


def sent(method, spec=P()):  # noqa: B008 (immutable)
    """Bytes a device sends by a ring, from the bytes in the compiled program; scalars left out."""
    mesh = jax.make_mesh((N,), ("data",), axis_types=(AxisType.Auto,))
    place = NamedSharding(mesh, spec)
    params = {"a": jax.ShapeDtypeStruct((16, 16), jnp.float32, sharding=place)}
    x = jax.ShapeDtypeStruct((K * N, 16), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    compiled = jax.jit(method(mesh)).lower(params, x).compile()
    times = {"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1}
    found = [c for c in oa.verify.collectives(compiled) if c.bytes > 64]
    assert all(c.runs for c in found)
    return sum(times[c.kind] * c.bytes * (c.runs or 0) for c in found) * (N - 1) / N


@pytest.mark.parametrize(
    "scheme, method",
    [
        ("a reduction a micro-batch", lambda mesh: oa.value_and_grad(loss, K)),
        ("one reduction a window", lambda mesh: oa.value_and_grad(loss, K, mesh=mesh)),
    ],
)
def test_traffic_is_what_compiled_programs_send(scheme, method):
    rows = {row.scheme: row for row in oa.planning.traffic(PARAMS, K, N)}
    scalar = 2 * 4 * (N - 1) / N  # the loss may go with the gradient in one operation
    assert abs(sent(method) - rows[scheme].traffic) <= 4 * scalar
    assert rows[scheme].window == rows[scheme].weights == SIZE


def test_traffic_to_shards_is_half():
    specs = {"a": P("data")}
    got = sent(lambda mesh: oa.value_and_grad(loss, K, mesh=mesh, grad_specs=specs))
    rows = {row.scheme: row for row in oa.planning.traffic(PARAMS, K, N)}
    assert got == SIZE * 7 / 8
    assert rows["one a window, to shards (ZeRO-1)"].traffic == 2 * got  # and the weights back


@pytest.mark.parametrize("gather, scheme", [("window", "once"), ("micro_batch", "a micro-batch")])
def test_traffic_of_parameters_in_shards(gather, scheme):
    specs = {"a": P("data")}
    got = sent(
        lambda mesh: oa.value_and_grad(loss, K, mesh=mesh, grad_specs=specs, gather=gather),
        P("data"),
    )
    rows = {row.scheme: row for row in oa.planning.traffic(PARAMS, K, N)}
    assert got == rows[f"FSDP, gathered {scheme}"].traffic


def test_a_narrow_window_is_reduced_in_float32():
    method = lambda mesh: oa.value_and_grad(  # noqa: E731
        loss, K, mesh=mesh, accumulator_dtype=jnp.bfloat16
    )
    once = oa.planning.traffic(PARAMS, K, N, accumulator_dtype=jnp.bfloat16)[1]
    assert abs(sent(method) - once.traffic) <= 32
    assert once.window == SIZE / 2


def test_traffic_by_hand():
    """1e6 bfloat16 weights, 2 replicas: f = 1/2, W = 2 MB, G = 4 MB of float32."""
    params = jax.ShapeDtypeStruct((1_000_000,), jnp.bfloat16)
    rows = oa.planning.traffic(params, 8, 2)
    megabytes = [(row.traffic / 1e6, row.window / 1e6, row.weights / 1e6) for row in rows]
    assert megabytes == [
        (16, 4, 2),
        (4, 4, 2),
        (3, 4, 2),
        (9, 2, 2),
        (24, 2, 1),
        (10, 4, 2),
        (3, 4, 2),
    ]
    assert {row.traffic for row in oa.planning.traffic(params, 8, 1)} == {0}


def test_traffic_of_what_cannot_be_meant():
    with pytest.raises(TypeError, match=r"jax.ShapeDtypeStruct\(\(1000,\), jnp.float32\)"):
        oa.planning.traffic(1000, 4, 8)
    for k, replicas, shown in ((0, 2, "k is 0"), (2, 0, "replicas is 0"), (2, 1.5, "replicas is")):
        with pytest.raises(ValueError, match=shown):
            oa.planning.traffic(PARAMS, k, replicas)
