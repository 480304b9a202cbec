"""The memory formula against counted bytes of real states: `eval_shape`d, or in shards."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_accum as oa

SHAPES = {"a": (1024, 1024), "b": (1024, 2048), "c": (1024,)}
N = 1024 * 1024 * 3 + 1024


def params(dtype):
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in SHAPES.items()}


def nbytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


REAL = {
    "adam": optax.adamw(1e-3),
    "lion": optax.lion(1e-3),
    "momentum": optax.sgd(1e-3, momentum=0.9),
    "sgd": optax.sgd(1e-3),
    "adafactor": optax.adafactor(1e-3),
}


def mixed_state(tx, weights):
    """bfloat16 weights and gradients, float32 master weights and optimizer state."""
    master = jax.tree.map(lambda w: w.astype(jnp.float32), weights)
    return {"weights": weights, "gradients": weights, "master": master, "state": tx.init(master)}


@pytest.mark.parametrize("optimizer", REAL)
@pytest.mark.parametrize("precision", ["mixed", "float32"])
def test_a_number_of_parameters_against_counted_states(optimizer, precision):
    tx = REAL[optimizer]
    found = oa.planning.memory(N, optimizer=optimizer, precision=precision)
    if precision == "mixed":
        held = jax.eval_shape(lambda w: mixed_state(tx, w), params(jnp.bfloat16))
    else:
        held = jax.eval_shape(lambda w: {"w": w, "g": w, "s": tx.init(w)}, params(jnp.float32))
    assert found.total == pytest.approx(nbytes(held), rel=1e-3)
    assert found.window == 0 and found.total == sum(part.bytes for part in found.parts)


def test_sixteen_bytes_a_parameter():
    assert oa.planning.memory(N).total == 16 * N
    assert oa.planning.memory(N, precision="float32").total == 16 * N
    assert oa.planning.memory("7B").total == 112 * 10**9
    refs = oa.planning.memory(N, k=8, engine="refs", accumulator_dtype=jnp.bfloat16)
    assert refs.total == 16 * N and refs.window == 2 * N
    assert oa.planning.memory(N, k=8).total == 20 * N  # and a float32 window
    for part in oa.planning.memory(N, k=8).parts:
        assert part.assumption and part.source


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_against_shards_on_eight_devices(stage):
    """Everything that a stage shares is placed in shards, and what one device holds is summed."""
    mesh = jax.make_mesh((8,), ("data",))
    whole, shards = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    weights = {"a": jnp.zeros((64, 16), jnp.bfloat16), "b": jnp.zeros((8,), jnp.bfloat16)}
    held = mixed_state(optax.scale_by_adam(), weights)
    held["state"] = (held["state"].mu, held["state"].nu)
    held["window"] = held["master"]
    since = {"weights": 3, "gradients": 2, "window": 2, "master": 1, "state": 1}
    first = mesh.devices.flat[0]
    local = {
        name: sum(
            shard.data.nbytes
            for leaf in jax.tree.leaves(
                jax.device_put(tree, shards if stage >= since[name] else whole)
            )
            for shard in leaf.addressable_shards
            if shard.device == first
        )
        for name, tree in held.items()
    }
    n = 64 * 16 + 8
    found = oa.planning.memory(n, k=4, zero=stage, devices=8 if stage else 1)
    assert found.parameters == local["weights"]
    assert found.gradients == local["gradients"]
    assert found.window == local["window"]
    assert found.optimizer == local["master"] + local["state"]
    assert found.total == sum(local.values())


def test_zero_that_reduces_once_a_window_holds_it_whole():
    for stage, weights in ((2, 2), (3, 2 + 2 / 8)):
        found = oa.planning.memory(8000, k=4, zero=stage, devices=8, reduction="window")
        assert found.window == 4 * 8000 and found.parameters == weights * 8000
        assert found.optimizer == 12 * 1000
    rows = {row.scheme: row for row in oa.planning.traffic(params(jnp.float32), 4, 8)}
    each = oa.planning.memory(params(jnp.float32), k=4, zero=3, devices=8)
    once = oa.planning.memory(params(jnp.float32), k=4, zero=3, devices=8, reduction="window")
    assert each.window == rows["FSDP, a micro-batch (ZeRO-3)"].window
    assert each.parameters == rows["FSDP, a micro-batch (ZeRO-3)"].weights
    assert once.window == rows["FSDP, gathered once"].window


def test_adapters_against_a_masked_state():
    """Rank 8 on two frozen matrices: the frozen ones have neither gradients nor state."""
    frozen = {"a": (1024, 1024), "b": (1024, 1024)}
    adapters = {
        f"{name}_{side}": s
        for name in frozen
        for side, s in (("in", (1024, 8)), ("out", (8, 1024)))
    }
    tree = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in (frozen | adapters).items()}
    labels = {name: "frozen" if name in frozen else "trained" for name in tree}
    tx = optax.multi_transform({"frozen": optax.set_to_zero(), "trained": optax.adam(1e-3)}, labels)
    trained = 4 * 8 * 1024
    n = trained + 2 * 1024 * 1024
    state = nbytes(jax.eval_shape(tx.init, tree))
    for found in (
        oa.planning.memory(n, precision="float32", trainable=trained / n),
        oa.planning.memory(tree, trainable=trained / n),
        oa.planning.memory(tree, tx=tx, trainable=trained / n),
    ):
        assert found.optimizer == pytest.approx(state, abs=16)
        assert found.gradients == pytest.approx(4 * trained, abs=16)
        assert found.parameters == 4 * n
    mixed = oa.planning.memory(n, trainable=trained / n, k=8)
    assert mixed.total == pytest.approx(2 * n + (2 + 12 + 4) * trained, abs=16)


@pytest.mark.parametrize("dtype, width", [(None, 4), (jnp.bfloat16, 2)])
def test_a_state_at_hand_is_counted(dtype, width):
    tx = oa.accumulate(optax.adamw(1e-3), 8, accumulator_dtype=dtype)
    state = jax.eval_shape(tx.init, params(jnp.bfloat16))
    found = oa.planning.memory(params(jnp.bfloat16), tx=tx)
    assert found.window == nbytes(state.grad_sum) == width * N
    assert found.window + found.optimizer == nbytes(state)
    assert found.parameters == found.gradients == 2 * N
    plain = oa.planning.memory(
        params(jnp.bfloat16), tx=optax.adamw(1e-3), k=8, accumulator_dtype=dtype
    )
    assert plain.window == width * N
    assert oa.planning.memory(params(jnp.bfloat16), tx=oa.accumulate(optax.sgd(1.0), 1)).window == 0
    chain = optax.chain(optax.clip(1.0), oa.accumulate(optax.sgd(1.0), 8))
    assert oa.planning.memory(params(jnp.float32), tx=chain, k=8).window == 4 * N


@pytest.mark.parametrize("optimizer", REAL)
def test_a_tree_with_a_name_is_counted_too(optimizer):
    found = oa.planning.memory(params(jnp.float32), optimizer=optimizer)
    assert found.optimizer == nbytes(jax.eval_shape(REAL[optimizer].init, params(jnp.float32)))


def test_activations_are_those_of_a_micro_batch():
    for k in (1, 8):
        found = oa.planning.memory("1M", k=k, micro_batch=4, activation_per_sample="0.5GB")
        assert found.activations == oa.planning.activations(4, "0.5GB") == 2 * 10**9
    assert "micro-batch 4 x 500 MB a sample, whatever k is" in str(found)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"params": "7X"}, "params is '7X', expected a count; type 7B"),
        ({"params": 0}, "type '7B'"),
        ({"optimizer": "adamax"}, "expected one of: optimizer='adam'"),
        ({"precision": "fp16"}, "expected one of: precision='mixed'"),
        ({"zero": 4}, "expected 0, 1, 2 or 3"),
        ({"zero": 1}, "type devices=8 or zero=0"),
        ({"trainable": 0}, "trainable is 0, expected a share"),
        ({"tx": optax.sgd(0.1)}, "expected their tree"),
        ({"reduction": "never"}, "expected one of: reduction='micro_batch'"),
    ],
)
def test_what_cannot_be_meant(given, message):
    with pytest.raises(ValueError) as caught:
        oa.planning.memory(**({"params": "7B"} | given))
    assert message in str(caught.value)
