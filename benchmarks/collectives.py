"""How many bytes each way to accumulate reduces and gathers in a window, and where.

python -m benchmarks.collectives

Read from the compiled programs, on the devices there are, or on 8 virtual ones where there is only
a CPU. Nothing is run but one window of each method, whose gradients must be the big batch's.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from optax import microbatching

import optax_accum as oa
from benchmarks import _transformer

K, SEQUENCES = 4, 8  # micro-batches; sequences of a micro-batch on each device
SHAPE = _transformer.Shape(
    layers=4, width=128, heads=4, length=32, vocabulary=256, unrolled=False, bfloat16=False
)
Tree = Any


def loss(params: Tree, tokens: jax.Array) -> jax.Array:
    return _transformer.loss(SHAPE, params, tokens)


def loss_fsdp(mesh: Mesh) -> Callable[[Tree, jax.Array], jax.Array]:
    """The same, activations held to the batch's shards, or the compiler would shard them likewise
    to the weights."""
    rows = NamedSharding(mesh, P("data"))

    def constrained(params: Tree, tokens: jax.Array) -> jax.Array:
        between = lambda x: jax.lax.with_sharding_constraint(x, rows)  # noqa: E731
        return _transformer.loss(SHAPE, params, tokens, between)

    return constrained


def methods(mesh: Mesh, specs: Tree) -> dict[str, tuple[bool, Callable[..., Any]]]:
    """By name: are the parameters in shards (FSDP), and (params, tokens) -> (loss, grads)."""
    split = microbatching.microbatch(
        jax.value_and_grad(loss),
        argnums=1,
        microbatch_size=SEQUENCES * mesh.size,
        accumulator=microbatching.AccumulationType.MEAN,
    )
    once = oa.value_and_grad(loss, K, mesh=mesh)
    to_shards = oa.value_and_grad(loss, K, mesh=mesh, grad_specs=specs)
    return {
        "one big batch": (False, jax.value_and_grad(loss)),
        "optax.microbatch": (False, split),
        "value_and_grad": (False, oa.value_and_grad(loss, K)),
        "value_and_grad, mesh": (False, once),
        "value_and_grad, mesh, grad_specs": (False, to_shards),
        "FSDP: one big batch": (True, jax.value_and_grad(loss_fsdp(mesh))),
        "FSDP: value_and_grad": (True, oa.value_and_grad(loss_fsdp(mesh), K)),
        "FSDP: value_and_grad, mesh": (True, to_shards),
        "FSDP: the same, gather a micro-batch": (
            True,
            oa.value_and_grad(loss, K, mesh=mesh, grad_specs=specs, gather="micro_batch"),
        ),
    }


def by_calls(mesh: Mesh, params: Tree, tokens: jax.Array) -> tuple[Any, Tree]:
    """(one compiled micro-step of the time driver, what K calls of it come to)."""
    tx = oa.accumulate(optax.sgd(-1.0), K, axis_name="data")  # what it adds is the gradient
    one = oa.micro_step(loss, tx)

    def micro_step(params: Tree, state: Any, tokens: jax.Array) -> tuple[Any, Tree, Any]:
        value, params, state = one(params, state, tokens)
        return value[None], params, state

    specs = oa.state_specs(tx, params, "data")
    mapped = jax.shard_map(
        micro_step,
        mesh=mesh,
        in_specs=(P(), specs, P("data")),
        out_specs=(P("data"), P(), specs),
        check_vma=False,
    )
    state = oa.refold(tx.init(params), mesh.size)
    state = jax.device_put(state, oa.state_shardings(tx, params, axis_name="data"))
    parts = [place(part, mesh, P("data")) for part in jnp.split(jax.device_get(tokens), K)]
    compiled = jax.jit(mapped).lower(params, state, parts[0]).compile()
    start, values = params, []
    for part in parts:
        value, params, state = compiled(params, state, part)
        values.append(value.mean())
    return compiled, (jnp.stack(values).mean(), optax.tree.sub(params, start))


def by_plain_calls(mesh: Mesh, params: Tree, tokens: jax.Array) -> tuple[Any, Tree]:
    """The same of `optax.MultiSteps`, whose every micro-gradient the compiler reduces."""
    tx = optax.MultiSteps(optax.sgd(-1.0), K).gradient_transformation()

    def micro_step(params: Tree, state: Any, tokens: jax.Array) -> tuple[Any, Tree, Any]:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = tx.update(grads, state, params)
        return value, optax.apply_updates(params, updates), state

    state = place(tx.init(params), mesh, P())
    parts = [place(part, mesh, P("data")) for part in jnp.split(jax.device_get(tokens), K)]
    compiled = jax.jit(micro_step).lower(params, state, parts[0]).compile()
    start, values = params, []
    for part in parts:
        value, params, state = compiled(params, state, part)
        values.append(value)
    return compiled, (jnp.stack(values).mean(), optax.tree.sub(params, start))


def shard_specs(params: Tree, devices: int) -> Tree:
    """Every leaf in shards along its last axis that splits, as FSDP lays it."""

    def spec(leaf: Any) -> P:
        for axis in reversed(range(leaf.ndim)):
            if leaf.shape[axis] % devices == 0:
                return P(*[None] * axis, "data")
        return P()

    return jax.tree.map(spec, params)


def place(tree: Tree, mesh: Mesh, specs: Tree) -> Tree:
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P)
    )
    return jax.device_put(tree, shardings)


def measure() -> list[dict[str, Any]]:
    """A row a method: bytes of each kind in a window, in P, and how much of it in a loop."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    params = _transformer.init(SHAPE, jax.random.key(0))
    specs = shard_specs(params, mesh.size)
    batch = K * SEQUENCES * mesh.size
    tokens = jax.random.randint(jax.random.key(1), (batch, SHAPE.length + 1), 0, SHAPE.vocabulary)
    spread = jax.device_put(tokens, NamedSharding(mesh, P("data")))
    right = jax.jit(jax.value_and_grad(loss))(params, tokens)
    whole, shards = place(params, mesh, P()), place(params, mesh, specs)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    rows = []
    for name, (fsdp, method) in methods(mesh, specs).items():
        given = shards if fsdp else whole
        out = None
        if fsdp:
            grads = jax.tree.map(lambda leaf: leaf.sharding, shards)
            out = (NamedSharding(mesh, P()), grads)
        compiled = jax.jit(method, out_shardings=out).lower(given, spread).compile()
        check_equal(name, compiled(given, spread), right)
        rows.append(row(name, compiled, size, mesh.size))
    for name, calls in (
        ("accumulate, axis_name", by_calls),
        ("optax.MultiSteps, plain jit", by_plain_calls),
    ):
        compiled, got = calls(mesh, whole, tokens)
        check_equal(name, got, right)
        rows.append(row(f"K calls: {name}", compiled, size, mesh.size, calls=K))
    return rows


def check_equal(name: str, got: Tree, right: Tree) -> None:
    """A method that computes something else is not listed."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(right), strict=True):
        off = float(jnp.max(jnp.abs(jax.device_get(a) - jax.device_get(b))))
        if not off <= 1e-3 * float(jnp.max(jnp.abs(b))):
            raise AssertionError(f"{name} differs from the big batch by {off:g}")


def row(name: str, compiled: Any, size: int, devices: int, calls: int = 1) -> dict[str, Any]:
    """Of a window in that many calls; what stands in a conditional runs in the one that closes."""
    found = oa.verify.collectives(compiled)
    moved = {"all-reduce": 0, "reduce-scatter": 0, "all-gather": 0, "other": 0}
    in_loops = 0
    for one in found:
        kind = one.kind if one.kind in moved else "other"
        if one.runs is None:
            raise ValueError(f"{name} has a loop whose trip count is unknown")
        total = one.bytes * one.runs * (1 if one.in_conditional else calls)
        moved[kind] += total
        in_loops += total if one.in_loop else 0
    ring = 2 * moved["all-reduce"] + moved["reduce-scatter"] + moved["all-gather"]
    memory = compiled.memory_analysis()
    return {
        "case": f"collectives, {devices} devices, k={K}",
        "method": name,
        "value": ring * (devices - 1) // devices,
        "unit": "bytes sent by a device in a window (ring)",
        "in_P": {kind: bytes_ / size for kind, bytes_ in moved.items()},
        "in_loops_in_P": in_loops / size,
        "temporaries_in_P": memory.temp_size_in_bytes / size if memory else None,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collectives", description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    if jax.default_backend() == "cpu" and jax.device_count() == 1:
        parser.error("one device communicates nothing; type JAX_NUM_CPU_DEVICES=8 before it")
    rows = measure()
    if options.json:
        json.dump(rows, sys.stdout, indent=1)
        return 0
    print(rows[0]["case"], "on", jax.devices()[0].device_kind)
    print("P is the parameters' bytes; a row is the big batch's gradient, a window of it")
    kinds = list(rows[0]["in_P"])
    print(f"{'':38}" + "".join(f"{kind:>16}" for kind in [*kinds, "in loops", "temporaries"]))
    for one in rows:
        numbers = [*one["in_P"].values(), one["in_loops_in_P"], one["temporaries_in_P"] or 0]
        print(f"{one['method']:38}" + "".join(f"{number:14.2f} P" for number in numbers))
    return 0


if __name__ == "__main__":
    if jax.config.jax_platforms == "cpu" or not jax.config.jax_platforms:
        jax.config.update("jax_num_cpu_devices", 8)
    sys.exit(main())
