"""Windows saved open by Orbax, and what the run does after they are restored."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from helpers import assert_same_bits
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_accum as oa

PARAMS = {"w": jnp.arange(32.0).reshape(16, 2) / 7, "b": jnp.ones(2, jnp.bfloat16)}
INNER = optax.chain(
    optax.clip_by_global_norm(1.0), optax.masked(optax.adam(0.1), {"w": True, "b": False})
)
TX = {
    "float32": oa.accumulate(INNER, 4, nonfinite="skip_micro_step"),
    "bfloat16": oa.accumulate(INNER, 4, accumulator_dtype=jnp.bfloat16),
    "in a chain": optax.chain(optax.clip(1.0), oa.accumulate(optax.adam(0.1), lambda n: 2 + n)),
}


def gradient(seed):
    rng = np.random.default_rng(seed)
    bad = np.nan if seed == 1 else 1.0
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape) * bad, p.dtype), PARAMS)


@functools.cache
def call(name):
    return jax.jit(functools.partial(oa.apply_gradients, TX[name]))


def run(name, params, state, seeds):
    for seed in seeds:
        grads = jax.tree.map(lambda g, p: jax.device_put(g, p.sharding), gradient(seed), params)
        params, state = call(name)(grads, state, params, weight=jnp.float32(1 + seed))
    return params, state


def saved(path, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


def restored(path, *target):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, *target)


@pytest.mark.parametrize(("name", "stop"), [("float32", 3), ("bfloat16", 6), ("in a chain", 4)])
def test_a_window_saved_open_goes_on_bit_for_bit(tmp_path, name, stop):
    whole = run(name, PARAMS, TX[name].init(PARAMS), range(9))
    params, state = run(name, PARAMS, TX[name].init(PARAMS), range(stop))
    assert int(optax.tree.get(state, "micro_step")) not in (0, 4)
    saved(tmp_path / "it", (params, state))
    target = PARAMS, jax.eval_shape(TX[name].init, PARAMS)
    again = restored(tmp_path / "it", target)
    assert_same_bits(again, (params, state))
    assert_same_bits(run(name, *again, range(stop, 9)), whole)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_sharded_window_goes_on_bit_for_bit(tmp_path, kind):
    """On 8 devices, the parameters and all that is shaped like them in shards."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    specs = {"w": P("data"), "b": P()}
    params = {
        name: jax.device_put(PARAMS[name], NamedSharding(mesh, specs[name])) for name in specs
    }
    places = oa.state_shardings(TX["float32"], params)
    init = jax.jit(TX["float32"].init, out_shardings=places)
    whole = run("float32", params, init(params), range(9))
    params, state = run("float32", params, init(params), range(6))
    saved(tmp_path / "it", (params, state))

    def at(leaf, place):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    shapes = jax.eval_shape(TX["float32"].init, params)
    target = params, jax.tree.map(at, shapes, places)
    again = restored(tmp_path / "it", target)
    assert again[1].grad_sum["w"].sharding.spec[0] == "data"
    assert_same_bits(again, (params, state))
    again = run("float32", *again, range(6, 9))
    assert_same_bits(again, whole)
    assert again[1].grad_sum["w"].sharding.spec[0] == "data"


@pytest.mark.parametrize("name", TX)
def test_restored_without_a_target(tmp_path, name):
    """Orbax gives nested dicts and lists then, in the dtypes that were saved."""
    whole = run(name, PARAMS, TX[name].init(PARAMS), range(7))
    params, state = run(name, PARAMS, TX[name].init(PARAMS), range(3))
    saved(tmp_path / "it", state)
    again = oa.convert_state(restored(tmp_path / "it"), TX[name], PARAMS)
    assert_same_bits(again, state)
    assert_same_bits(run(name, params, again, range(3, 7)), whole)


def test_multi_steps_restored_without_a_target(tmp_path):
    inner = optax.sgd(0.5, momentum=0.9)
    old, tx = optax.MultiSteps(inner, 4), oa.accumulate(inner, 4)
    _, state = jax.jit(old.update)(gradient(0), old.init(PARAMS), PARAMS)
    saved(tmp_path / "it", state)
    got = oa.convert_state(restored(tmp_path / "it"), tx, PARAMS, use_grad_mean=True)
    assert_same_bits(got, oa.convert_state(state, tx, PARAMS, use_grad_mean=True))


# Another dtype: Orbax casts to that of the target, without a word.


def half_a_window(tmp_path, name):
    _, state = run(name, PARAMS, TX[name].init(PARAMS), [0, 2])
    saved(tmp_path / "it", state)


@pytest.mark.parametrize(("had", "has"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_restored_under_another_dtype_than_the_window_has(tmp_path, had, has):
    """The target was made with another accumulator_dtype than the transformation."""
    half_a_window(tmp_path, had)
    state = restored(tmp_path / "it", jax.eval_shape(TX[has].init, PARAMS))
    assert state.grad_sum["w"].dtype == has  # cast
    with pytest.raises(
        TypeError, match=rf"grad_sum at \['b'\] is {has}, expected {had}.*cast=True"
    ):
        TX[had].update(gradient(3), state, PARAMS, weight=1.0)
    with pytest.raises(TypeError, match=rf"state\.grad_sum\['b'\] is {has}, expected {had}"):
        oa.convert_state(state, TX[had], PARAMS)
    state = oa.convert_state(state, TX[had], PARAMS, cast=True)
    TX[had].update(gradient(3), state, PARAMS, weight=1.0)


@pytest.mark.parametrize(("had", "has"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_checkpoint_of_another_dtype_is_noticed_before_it_is_cast(tmp_path, had, has):
    """Without a target nothing is cast, so that `convert_state` sees what was saved."""
    half_a_window(tmp_path, had)
    with pytest.raises(TypeError, match=rf"state\.grad_sum\['b'\] is {had}, expected {has}"):
        oa.convert_state(restored(tmp_path / "it"), TX[has], PARAMS)


def test_a_checkpoint_of_another_optimizer_is_noticed(tmp_path):
    half_a_window(tmp_path, "float32")
    other = oa.accumulate(optax.sgd(0.1, momentum=0.9), 4)
    with pytest.raises(ValueError, match=r"state\.inner_state\["):
        oa.convert_state(restored(tmp_path / "it"), other, PARAMS)
