"""float16 with a dynamic loss scale: what overflows is dropped from its window, with its weight.

python examples/float16_loss_scale.py

A small network reads scikit-learn's digits in float16; its parameters and the window are float32.
Flax's DynamicScale multiplies the loss, so that small gradients do not vanish in float16, and
divides each micro-gradient again *before* it is added to the window: the scale may change inside a
window, and it does so here. It starts too high, it is doubled every 20 micro-steps, and one
micro-batch is damaged: these micro-gradients are infinite, and `nonfinite="skip_micro_step"` leaves
them out. A twin takes what is left of each window as one big batch, in float16 at a fixed scale:
the weights must agree to float16's rounding. For the space driver see `oa.with_loss_scale`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import Run, arguments, prove
from flax import linen
from flax.training.dynamic_scale import DynamicScale
from sklearn.datasets import load_digits

import optax_accum as oa

EXAMPLES, K, DAMAGED = 32, 4, 30  # in a micro-batch; in a window; this micro-step's batch
IMAGES, LABELS = load_digits(return_X_y=True)
INNER = optax.sgd(0.1, momentum=0.8)
TX = oa.accumulate(INNER, k=K, nonfinite="skip_micro_step")


class Network(linen.Module):
    @linen.compact
    def __call__(self, images):
        # Smooth, since a unit at the kink of a ReLU would magnify the rounding of float16.
        x = linen.tanh(linen.Dense(64, dtype=jnp.float16)(images))
        return linen.Dense(10, dtype=jnp.float16)(x)


def losses_of(params, images, labels):
    logits = jnp.float32(Network().apply({"params": params}, images))
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def loss_fn(params, images, labels):
    return losses_of(params, images, labels).mean()


def micro_batch(call):
    rows = np.random.default_rng(call).integers(len(IMAGES), size=EXAMPLES)
    images = IMAGES[rows] / 16 * (1e9 if call == DAMAGED else 1)
    return images.astype(np.float32), LABELS[rows]


@functools.partial(jax.jit, donate_argnums=(0, 1))
def micro_step(params, state, scale, images, labels):
    scale, finite, loss, grads = scale.value_and_grad(loss_fn)(params, images, labels)
    params, state = oa.apply_gradients(TX, grads, state, params)
    return params, state, scale, finite, loss


def big_batch_twin(params, kept):
    """Each window's kept examples at once; the loss is scaled by 1024, its gradient by 1/1024."""

    @jax.jit
    def update(params, state, images, labels, counted):
        def scaled(params):
            losses = losses_of(params, jnp.where(counted[:, None], images, 0), labels)
            return 1024 * (losses * counted).sum() / counted.sum()

        grads = optax.tree.scale(1 / 1024, jax.grad(scaled)(params))
        updates, state = INNER.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = INNER.init(params)
    for window in np.arange(kept.size).reshape(-1, K):
        batch = [np.concatenate(parts) for parts in zip(*map(micro_batch, window), strict=True)]
        params, state = update(params, state, *batch, np.repeat(kept[window], EXAMPLES))
    return params


def main():
    parsed = arguments(__doc__, updates=25).parse_args()
    key = jax.random.key(0, impl="rbg")  # compiles in less time than the default's
    params = jax.jit(Network().init)(key, jnp.zeros((1, 64)))["params"]
    first = jax.device_get(params)
    scale = DynamicScale(growth_interval=20, scale=2.0**20)
    history = np.zeros((2, parsed.updates * K), np.float32)  # finite? at what scale?
    with Run(parsed, calls_an_update=K) as run:
        kept = run.resumed((params, TX.init(params), jax.tree.map(jnp.asarray, scale), history))
        params, state, scale, history = kept
        history = np.array(history)
        while run.goes_on:
            at, used = run.call, float(scale.scale)
            params, state, scale, *seen = micro_step(params, state, scale, *micro_batch(at))
            history[:, at] = seen[0], used
            run.made((params, state, scale, history), seen[1] if seen[0] else np.nan)
    finite, scales = history
    high, low = np.log2(scales.max()), np.log2(scales.min())
    changed = np.flatnonzero(np.diff(scales)) + 1
    inside = np.sum(changed % K != 0)
    print(
        f"scale: 2^{low:.0f} to 2^{high:.0f}, changed {len(changed)} times, {inside} in mid-window"
    )
    print(f"dropped micro-steps: {np.flatnonzero(finite == 0).tolist()} of {finite.size}")
    assert int(state.skipped) == (finite == 0).sum() > 0 and not finite[DAMAGED]
    prove(run.losses, params, big_batch_twin(first, finite > 0), tolerance=5e-4)


if __name__ == "__main__":
    main()
