"""How many bytes each way to accumulate reduces and gathers in a window, and where.

python -m benchmarks.collectives

Read from the compiled programs, on the devices there are, or on 8 virtual ones of a CPU where there
is only one. Nothing is run but one window of each method, whose gradients must be the big batch's.
The floor is one reduction of the gradient, or of parameters in shards (FSDP) one gathering and one
reduction: 2 P of bytes sent on a ring, but for the share that a device has.
"""

import functools
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_accum as oa
from benchmarks import _measure, _peers, _report, _transformer

CASE = "collectives"
K, SEQUENCES = 4, 2  # micro-batches; sequences of a micro-batch on each device
SHAPE = _transformer.Shape(
    layers=4, width=128, heads=4, length=32, vocabulary=256, unrolled=False, bfloat16=False
)
UNIT = "bytes sent by a device in a window (ring)"
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
    once = oa.value_and_grad(loss, K, mesh=mesh)
    to_shards = oa.value_and_grad(loss, K, mesh=mesh, grad_specs=specs)
    return {
        _peers.BIG: (False, jax.value_and_grad(loss)),
        _peers.SCAN: (False, _peers.hand_written_scan(loss, K)),
        _peers.MICROBATCH: (False, _peers.microbatch(loss, SEQUENCES * mesh.size)),
        "oa.value_and_grad": (False, oa.value_and_grad(loss, K)),
        "oa.value_and_grad, mesh": (False, once),
        "oa.value_and_grad, mesh, grad_specs": (False, to_shards),
        "FSDP: one big batch": (True, jax.value_and_grad(loss_fsdp(mesh))),
        "FSDP: oa.value_and_grad": (True, oa.value_and_grad(loss_fsdp(mesh), K)),
        "FSDP: oa.value_and_grad, mesh": (True, to_shards),
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
    compiled = _measure.compiled_to_be_read(jax.jit(mapped).lower(params, state, parts[0]))
    start, values = params, []
    for part in parts:
        value, params, state = compiled(params, state, part)
        values.append(value.mean())
    return compiled, (jnp.stack(values).mean(), optax.tree.sub(params, start))


def by_plain_calls(
    tx: optax.GradientTransformation, mesh: Mesh, params: Tree, tokens: jax.Array
) -> tuple[Any, Tree]:
    """The same of a transformation in plain jit: the compiler reduces every micro-gradient."""

    def micro_step(params: Tree, state: Any, tokens: jax.Array) -> tuple[Any, Tree, Any]:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = tx.update(grads, state, params)
        return value, optax.apply_updates(params, updates), state

    state = place(tx.init(params), mesh, P())
    parts = [place(part, mesh, P("data")) for part in jnp.split(jax.device_get(tokens), K)]
    compiled = _measure.compiled_to_be_read(jax.jit(micro_step).lower(params, state, parts[0]))
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
        lowered = jax.jit(method, out_shardings=out).lower(given, spread)
        compiled = _measure.compiled_to_be_read(lowered)
        check_equal(name, compiled(given, spread), right)
        rows.append(row(name, compiled, size, mesh.size))
    multi_steps = optax.MultiSteps(optax.sgd(-1.0), K).gradient_transformation()
    apply_every = optax.chain(optax.sgd(-1.0 / K), optax.apply_every(K))
    for name, calls in (
        ("oa.accumulate, axis_name", by_calls),
        (_peers.MULTI_STEPS, functools.partial(by_plain_calls, multi_steps)),
        (_peers.APPLY_EVERY, functools.partial(by_plain_calls, apply_every)),
    ):
        compiled, got = calls(mesh, whole, tokens)
        check_equal(name, got, right)
        rows.append(row(f"{name}, k calls", compiled, size, mesh.size, calls=K))
    return rows


def check_equal(name: str, got: Tree, right: Tree) -> None:
    """A method that computes something else is not listed."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(right), strict=True):
        off = float(jnp.max(jnp.abs(jax.device_get(a) - jax.device_get(b))))
        if not off <= 1e-3 * float(jnp.max(jnp.abs(b))):
            raise _measure.WrongResult(f"{name} differs from the big batch by {off:g}")


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
    sent = 2 * moved["all-reduce"] + moved["reduce-scatter"] + moved["all-gather"]
    memory = _measure.memory(compiled)
    ring = _measure.row(CASE, name, sent * (devices - 1) // devices, UNIT, sent / (2 * size))
    return ring | {
        "setting": f"{devices} {jax.devices()[0].device_kind} devices, k={K}",
        "k": K,
        "devices": devices,
        "in_P": {kind: bytes_ / size for kind, bytes_ in moved.items()},
        "in_loops_in_P": in_loops / size,
        "temporaries_in_P": memory and memory.temporaries / size,
    }


def rows(scale: str) -> list[_measure.Row]:
    """The case, at any scale; in a process of its own where this one has only one device."""
    del scale
    if jax.device_count() > 1:
        return measure()
    if _measure.on_accelerator():
        print("collectives: one accelerator, so on 8 virtual CPU devices", file=sys.stderr)
    root = pathlib.Path(__file__).parent.parent
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "benchmarks.collectives", "--json"]
    ran = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    if ran.returncode:
        raise _measure.WrongResult(f"collectives: {ran.stderr.strip().splitlines()[-1]}")
    return json.loads(ran.stdout)


def main(argv: Sequence[str] | None = None) -> int:
    parser = _report.parser("collectives", __doc__)
    options = parser.parse_args(argv)
    if jax.default_backend() == "cpu" and jax.device_count() == 1:
        parser.error("one device communicates nothing; type JAX_NUM_CPU_DEVICES=8 before it")
    _report.show(measure(), options.json)
    return 0


if __name__ == "__main__":
    if jax.config.jax_platforms == "cpu" or not jax.config.jax_platforms:
        jax.config.update("jax_num_cpu_devices", 8)
    sys.exit(main())
