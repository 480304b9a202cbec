"""A small transformer as shapes only, and its update by either driver: nothing of it is run."""

import jax
import jax.numpy as jnp
import optax

import optax_accum as oa

LAYERS, WIDTH, LENGTH, VOCABULARY = 3, 32, 16, 32
# Buffers are assigned before code is optimised: the same bytes, compiled in a third of the time.
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
INNER = optax.adam(1e-3)


def _weights(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


PARAMS = {
    "embedding": _weights(VOCABULARY, WIDTH),
    "layers": {
        "qkv": _weights(LAYERS, WIDTH, 3 * WIDTH),
        "out": _weights(LAYERS, WIDTH, WIDTH),
        "up": _weights(LAYERS, WIDTH, 4 * WIDTH),
        "down": _weights(LAYERS, 4 * WIDTH, WIDTH),
    },
}


def _norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)


def _layer(x, layer):
    q, k, v = jnp.split(_norm(x) @ layer["qkv"], 3, -1)
    mask = jnp.triu(jnp.full((LENGTH, LENGTH), -1e9), 1)
    x = x + jax.nn.softmax(q @ k.swapaxes(1, 2) + mask) @ v @ layer["out"]
    return x + jnp.maximum(_norm(x) @ layer["up"], 0) @ layer["down"]


def loss_fn(remat):
    layer = jax.checkpoint(_layer) if remat else _layer

    def loss(params, tokens):
        x = params["embedding"][tokens[:, :-1]]
        x, _ = jax.lax.scan(lambda x, one: (layer(x, one), None), x, params["layers"])
        logs = jax.nn.log_softmax(_norm(x) @ params["embedding"].T)
        return -jnp.mean(jnp.take_along_axis(logs, tokens[:, 1:, None], -1))

    return loss


def tokens(examples, sharding=None):
    return jax.ShapeDtypeStruct((examples, LENGTH + 1), jnp.int32, sharding=sharding)


def time_driver(remat=False, inner=INNER):
    """`make_update` and `shapes`: a call takes a micro-batch."""

    def make_update(micro_batch, k):
        micro_step = oa.micro_step(loss_fn(remat), oa.accumulate(inner, k))
        return jax.jit(micro_step, donate_argnums=(0, 1), compiler_options=FAST)

    def shapes(micro_batch, k):
        state = jax.eval_shape(oa.accumulate(inner, k).init, PARAMS)
        return PARAMS, state, tokens(micro_batch)

    return make_update, shapes


def space_driver(remat=False, inner=INNER):
    """`make_update` and `shapes`: a call takes a global batch."""

    def make_update(micro_batch, k):
        grad_fn = oa.value_and_grad(loss_fn(remat), k)

        def update(params, state, batch):
            loss, grads = grad_fn(params, batch)
            updates, state = inner.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        return jax.jit(update, donate_argnums=(0, 1), compiler_options=FAST)

    def shapes(micro_batch, k):
        return PARAMS, jax.eval_shape(inner.init, PARAMS), tokens(micro_batch * k)

    return make_update, shapes


def total(driver, micro_batch, k):
    """Bytes by the compiler, without the code under test."""
    make_update, shapes = driver
    found = make_update(micro_batch, k).lower(*shapes(micro_batch, k)).compile().memory_analysis()
    return (
        found.argument_size_in_bytes
        + found.output_size_in_bytes
        - found.alias_size_in_bytes
        + found.temp_size_in_bytes
    )
