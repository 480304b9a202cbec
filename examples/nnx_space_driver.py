"""Flax NNX, the whole batch in one call: a small causal transformer on sequences of unequal length.

python examples/nnx_space_driver.py

Every update takes 64 sequences in 8 micro-batches that count by their tokens. A twin takes them at
once: the weights must agree to rounding, with clipping, warm-up and decay, and the loss must fall.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import optax_accum as oa

UPDATES, SEQUENCES, LENGTH, K = 60, 64, 32, 8
TOKENS, WIDTH, HEADS = 16, 32, 4
# A larger eps than 1e-8 keeps AdamW from magnifying the rounding of gradients that are nearly zero.
OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(0.5),
    optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 2e-2, 10, UPDATES), eps=1e-3),
)


class Fixed(nnx.Variable):
    """What the model holds but does not learn."""


class Transformer(nnx.Module):
    def __init__(self, rngs):
        angles = jnp.arange(LENGTH)[:, None] / jnp.logspace(0, 2, WIDTH // 2)
        self.positions = Fixed(jnp.hstack([jnp.sin(angles), jnp.cos(angles)]))
        self.embed = nnx.Embed(TOKENS, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.head = nnx.Linear(4 * WIDTH, TOKENS, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.positions[...]
        x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(tokens))
        return self.head(nnx.gelu(self.up(x)))


def batches(seed):
    """Sequences that count up by 1, 2 or 3, and the tokens that follow; the mask ends each one."""
    rng = np.random.default_rng(seed)
    for _ in range(UPDATES):
        first = rng.integers(TOKENS, size=(SEQUENCES, 1))
        stride = rng.integers(1, 4, size=(SEQUENCES, 1))
        length = rng.integers(1, LENGTH + 1, size=(SEQUENCES, 1))
        tokens = ((first + stride * np.arange(LENGTH + 1)) % TOKENS).astype(np.int32)
        mask = (np.arange(LENGTH) < length).astype(np.float32)
        yield {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": mask}


def counted_tokens(batch):
    return batch["mask"].sum()


def train(value_and_grad):
    graphdef, params, rest = nnx.split(Transformer(nnx.Rngs(0)), nnx.Param, ...)

    def loss_fn(params, batch, rest):
        logits = nnx.merge(graphdef, params, rest)(batch["tokens"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return (batch["mask"] * losses).sum() / counted_tokens(batch)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params, state, batch, rest):
        loss, grads = value_and_grad(loss_fn)(params, batch, rest)
        updates, state = OPTIMIZER.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = OPTIMIZER.init(params), []
    for batch in batches(seed=0):
        params, state, loss = update(params, state, batch, rest)
        losses.append(float(loss))
    return nnx.merge(graphdef, params, rest), losses


def main():
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    model, losses = train(functools.partial(oa.value_and_grad, k=K, weight=counted_tokens))
    twin, _ = train(jax.value_and_grad)
    apart = optax.tree.norm(optax.tree.sub(nnx.state(model), nnx.state(twin)), ord=np.inf)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, weights apart by {float(apart):.1e}")
    assert losses[-1] < 0.7 * losses[0]
    assert float(apart) < 1e-5


if __name__ == "__main__":
    main()
