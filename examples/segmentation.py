"""Segmentation of large images in Flax Linen: 2 fit, 32 are wanted.

python examples/segmentation.py
python examples/segmentation.py --size 256

A small U-Net marks the discs in images that also hold bars and noise. A call sees 2 images; a
window of k=16 makes one update of 32. GroupNorm knows no batch, so that accumulating is exact. The
program prints what XLA's own accounts say that a call needs: of 2 images, and of all 32 at once. A
twin takes 32 at once: the weights must agree to rounding.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import Run, arguments, prove
from flax import linen

import optax_accum as oa

IMAGES, K = 2, 16  # images that fit; micro-batches of them in a window
# A larger eps than 1e-8 keeps AdamW from magnifying the rounding of tiny gradients.
INNER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-3))


def block(x, features):
    x = linen.Conv(features, (3, 3), use_bias=False)(x)
    return linen.relu(linen.GroupNorm(num_groups=4)(x))


class UNet(linen.Module):
    @linen.compact
    def __call__(self, images):
        wide = block(images, 8)
        deep = block(linen.max_pool(wide, (2, 2), (2, 2)), 16)
        up = linen.ConvTranspose(8, (2, 2), strides=(2, 2))(deep)
        return linen.Conv(1, (1, 1))(block(jnp.concatenate([wide, up], axis=-1), 8))[..., 0]


def micro_batch(call, size):
    """Images with a disc to be found, a bar to be left, and noise; and where the discs are."""
    rng = np.random.default_rng(call)
    y, x = np.mgrid[:size, :size] / size
    centre = rng.uniform(0.2, 0.8, (2, IMAGES, 1, 1))
    disc = (x - centre[0]) ** 2 + (y - centre[1]) ** 2 < rng.uniform(0.1, 0.3, (IMAGES, 1, 1)) ** 2
    bar = np.abs(x - rng.uniform(size=(IMAGES, 1, 1))) < 0.04
    image = np.where(disc | bar, 1.0, 0.0) + rng.normal(0, 0.2, (IMAGES, size, size))
    return image[..., None].astype(np.float32), disc.astype(np.float32)


def loss_fn(params, images, discs):
    logits = UNet().apply({"params": params}, images)
    return optax.sigmoid_binary_cross_entropy(logits, discs).mean()


@functools.partial(jax.jit, donate_argnums=0)
def call(state, images, discs):
    """A micro-step under accumulate, an update without."""
    loss, grads = jax.value_and_grad(loss_fn)(state.params, images, discs)
    return state.apply_gradients(grads=grads), loss


def program(tx, params, batch):
    """A fresh state, the compiled call for it, and the bytes it needs; donated ones count once."""
    params = jax.tree.map(jnp.copy, params)
    state = oa.linen.TrainState.create(apply_fn=UNet().apply, params=params, tx=tx)
    compiled = call.lower(state, *batch).compile()
    found = compiled.memory_analysis()
    assert found is not None, "this backend does not say what a program needs"
    new = found.output_size_in_bytes - found.alias_size_in_bytes
    return state, compiled, found.argument_size_in_bytes + new + found.temp_size_in_bytes


def big_batch(update, size):
    parts = [micro_batch(call, size) for call in range(update * K, (update + 1) * K)]
    return map(np.concatenate, zip(*parts, strict=True))


def main():
    parser = arguments(__doc__, updates=15)
    parser.add_argument("--size", type=int, default=32, help="side of an image (%(default)s)")
    parsed = parser.parse_args()
    key = jax.random.key(0, impl="rbg")  # compiles in less time than the default's
    images = jnp.zeros((1, parsed.size, parsed.size, 1))
    params = jax.jit(UNet().init)(key, images)["params"]
    state, micro_step, few = program(oa.accumulate(INNER, k=K), params, micro_batch(0, parsed.size))
    twin, update, many = program(INNER, params, big_batch(0, parsed.size))
    print(f"compiled for {IMAGES} images and k={K}: {few / 1e6:.1f} MB; for 32 at once: ", end="")
    print(f"{many / 1e6:.1f} MB")
    assert few < many / 4
    with Run(parsed, calls_an_update=K) as run:
        state = run.resumed(state)
        while run.goes_on:
            state, loss = micro_step(state, *micro_batch(run.call, parsed.size))
            run.made(state, loss)
    assert int(state.step) == parsed.updates  # updates, not micro-steps
    for i in range(parsed.updates):
        twin, _ = update(twin, *big_batch(i, parsed.size))
    prove(run.losses, state.params, twin.params, tolerance=1e-4)


if __name__ == "__main__":
    main()
