"""A small causal transformer in plain JAX, its layers scanned or unrolled."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Params = dict[str, Any]


class Shape(NamedTuple):
    """The sizes of a model, and how it is run."""

    layers: int
    width: int
    heads: int
    length: int  # tokens of a sequence
    vocabulary: int
    unrolled: bool  # layers as a list, not stacked under one scan
    bfloat16: bool  # compute in bfloat16; parameters, LayerNorm and loss stay float32


def init(shape: Shape, key: jax.Array) -> Params:
    """Float32 parameters; those of the layers stacked, or in a list."""
    width, keys = shape.width, iter(jax.random.split(key, shape.layers + 3))
    layers = [_init_layer(width, next(keys)) for _ in range(shape.layers)]
    if not shape.unrolled:
        layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    return {
        "tokens": _normal(next(keys), shape.vocabulary, width),
        "positions": _normal(next(keys), shape.length, width),
        "layers": layers,
        "norm": _init_norm(width),
        "head": _normal(next(keys), width, shape.vocabulary),
    }


def _init_layer(width: int, key: jax.Array) -> Params:
    keys = jax.random.split(key, 4)
    return {
        "attention_norm": _init_norm(width),
        "attention_in": _normal(keys[0], width, 3 * width),
        "attention_out": _normal(keys[1], width, width),
        "mlp_norm": _init_norm(width),
        "mlp_in": _normal(keys[2], width, 4 * width),
        "mlp_out": _normal(keys[3], 4 * width, width),
    }


def _init_norm(width: int) -> Params:
    return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}


def _normal(key: jax.Array, rows: int, columns: int) -> jax.Array:
    return jax.random.normal(key, (rows, columns)) * rows**-0.5


def loss(
    shape: Shape,
    params: Params,
    tokens: jax.Array,
    between: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> jax.Array:
    """The mean cross-entropy of the next token; tokens are (sequences, length + 1).

    `between` is applied to the activations before every layer and after the last one.
    """
    dtype = jnp.bfloat16 if shape.bfloat16 else jnp.float32
    x = (params["tokens"][tokens[:, :-1]] + params["positions"]).astype(dtype)
    layer = functools.partial(_layer, shape.heads)
    if shape.unrolled:
        for one in params["layers"]:
            x = layer(between(x), one)
    else:
        x, _ = lax.scan(lambda x, one: (layer(between(x), one), None), x, params["layers"])
    x = between(x)
    logits = _norm(x, params["norm"]) @ params["head"].astype(dtype)
    picked = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(picked, tokens[:, 1:, None], axis=-1))


def _layer(heads: int, x: jax.Array, layer: Params) -> jax.Array:
    x = x + _attention(heads, _norm(x, layer["attention_norm"]), layer)
    hidden = _norm(x, layer["mlp_norm"]) @ layer["mlp_in"].astype(x.dtype)
    return x + jax.nn.gelu(hidden) @ layer["mlp_out"].astype(x.dtype)


def _attention(heads: int, x: jax.Array, layer: Params) -> jax.Array:
    mixed = (x @ layer["attention_in"].astype(x.dtype)).reshape(*x.shape[:2], 3, heads, -1)
    query, key, value = (mixed[:, :, i] for i in range(3))
    attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    return attended.reshape(x.shape) @ layer["attention_out"].astype(x.dtype)


def _norm(x: jax.Array, norm: Params) -> jax.Array:
    wide = x.astype(jnp.float32)
    centered = wide - jnp.mean(wide, axis=-1, keepdims=True)
    unit = centered * lax.rsqrt(jnp.mean(jnp.square(centered), axis=-1, keepdims=True) + 1e-5)
    return (unit * norm["scale"] + norm["bias"]).astype(x.dtype)
