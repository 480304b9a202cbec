"""Plain JAX, the whole batch in one call: a small network on noisy sines, with token-like weights.

python examples/plain_jax.py

Every update takes 256 examples in 8 micro-batches. A twin takes them at once: the weights must
agree to rounding, and the loss must fall.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_accum as oa

UPDATES, EXAMPLES, K = 40, 256, 8
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.2))


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["in"] + params["bias"])
    errors = ((hidden @ params["out"])[:, 0] - batch["y"]) ** 2
    return (batch["mask"] * errors).sum() / batch["mask"].sum()


def batches(seed):
    rng = np.random.default_rng(seed)
    for _ in range(UPDATES):
        x = rng.uniform(-3, 3, (EXAMPLES, 1)).astype(np.float32)
        mask = (rng.uniform(size=EXAMPLES) < 0.6).astype(np.float32)
        yield {"x": x, "y": np.sin(x[:, 0]), "mask": mask}


@functools.partial(jax.jit, static_argnames="grad_fn", donate_argnames=("params", "state"))
def update(grad_fn, params, state, batch):
    loss, grads = grad_fn(params, batch)
    updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def train(grad_fn):
    keys = jax.random.split(jax.random.key(0))
    params = {
        "in": jax.random.normal(keys[0], (1, 32)),
        "bias": jnp.zeros(32),
        "out": jax.random.normal(keys[1], (32, 1)) / 6,
    }
    state, losses = OPTIMIZER.init(params), []
    for batch in batches(seed=0):
        params, state, loss = update(grad_fn, params, state, batch)
        losses.append(float(loss))
    return params, losses


def main():
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    accumulated = oa.value_and_grad(loss_fn, K, weight=lambda batch: batch["mask"].sum())
    params, losses = train(accumulated)
    twin, _ = train(jax.value_and_grad(loss_fn))
    apart = optax.tree.norm(optax.tree.sub(params, twin), ord=np.inf)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, weights apart by {float(apart):.1e}")
    assert losses[-1] < 0.7 * losses[0]
    assert float(apart) < 1e-5


if __name__ == "__main__":
    main()
