"""BatchNorm under accumulation: handwritten digits in Flax NNX, the whole batch in one call.

python examples/digits_batchnorm.py

BatchNorm normalises what it sees, and under accumulation that is a micro-batch. So one big batch is
*not* what 8 micro-batches equal, whatever the library: normalisation is per micro-batch ("ghost"
BatchNorm). LayerNorm and GroupNorm know no batch, and match. What can be right is right here:

* The gradient is that of one big batch whose normalisation is per micro-batch. A twin computes just
  that in one piece, by a vmap over the micro-batches: the weights must agree to rounding.
* The running statistics are those of the whole batch, not of the last micro-batch, and they move
  once an update. The first layer's must equal those of a big batch, to rounding; the second layer
  sees activations that were normalised per micro-batch, and comes near.

A call makes a whole update, so no window is open between calls: checkpoints after updates suffice.
"""

import jax
import numpy as np
import optax
from _common import Run, arguments, prove
from flax import nnx
from sklearn.datasets import load_digits

import optax_accum as oa

EXAMPLES, K, MOMENTUM = 256, 8, 0.9  # in a batch; micro-batches in it; of the running statistics
IMAGES, LABELS = load_digits(return_X_y=True)
IMAGES = np.float32(IMAGES / 16).reshape(-1, 8, 8, 1)
TRAIN, HELD_OUT = slice(0, 1400), slice(1400, None)
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


class Classifier(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.first_norm = nnx.BatchNorm(8, momentum=MOMENTUM, rngs=rngs)
        self.second = nnx.Conv(8, 16, (3, 3), strides=2, rngs=rngs)
        self.second_norm = nnx.BatchNorm(16, momentum=MOMENTUM, rngs=rngs)
        self.head = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, images):
        x = nnx.relu(self.first_norm(self.first(images)))
        x = nnx.relu(self.second_norm(self.second(x)))
        return self.head(x.reshape(len(x), -1))


def loss_fn(model, images, labels):
    return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()


def batch_of(call):
    rows = np.random.default_rng(call).choice(1400, EXAMPLES, replace=False)
    return IMAGES[TRAIN][rows], LABELS[TRAIN][rows]


accumulated = oa.nnx.value_and_grad(loss_fn, K, batch_argnums=(1, 2))


@nnx.jit(donate_argnums=(0, 1))
def update(model, optimizer, images, labels):
    loss, grads = accumulated(model, images, labels)
    optimizer.update(model, grads)
    return loss


def twin(updates):
    """Without a loop: all micro-batches side by side, and the statistics of the whole batch."""
    graphdef, params, stats = nnx.split(Classifier(nnx.Rngs(0)), nnx.Param, nnx.BatchStat)

    def ghost_loss(params, images, labels):
        def one(images, labels):
            return loss_fn(nnx.merge(graphdef, params, stats, copy=True), images, labels)

        # Example j is in micro-batch j mod K, as in value_and_grad's default layout.
        cut = lambda x: x.reshape(-1, K, *x.shape[1:]).swapaxes(0, 1)  # noqa: E731
        return jax.vmap(one)(cut(images), cut(labels)).mean()

    @jax.jit
    def update(params, stats, state, images, labels):
        model = nnx.merge(graphdef, params, stats, copy=True)
        model(images)  # moves the statistics
        updates, state = OPTIMIZER.update(jax.grad(ghost_loss)(params, images, labels), state)
        return optax.apply_updates(params, updates), nnx.state(model, nnx.BatchStat), state

    state = OPTIMIZER.init(params)
    for call in range(updates):
        params, stats, state = update(params, stats, state, *batch_of(call))
    return params, stats


def main():
    parsed = arguments(__doc__, updates=30).parse_args()
    model = Classifier(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)
    with Run(parsed) as run:
        nnx.update((model, optimizer), run.resumed(nnx.state((model, optimizer))))
        while run.goes_on:
            loss = update(model, optimizer, *batch_of(run.call))
            run.made(nnx.state((model, optimizer)), loss)
    twin_params, twin_stats = twin(parsed.updates)
    for name in ("first_norm", "second_norm"):
        ours = np.asarray(getattr(model, name).var[...])
        whole = np.asarray(twin_stats[name]["var"][...])
        apart = np.abs(ours / whole - 1).max()
        print(f"{name}: running variance apart from the whole batch's by {apart:.1e} of itself")
        assert apart < {"first_norm": 1e-5, "second_norm": 0.1}[name]
    model.eval()
    right = np.mean(np.argmax(model(IMAGES[HELD_OUT]), axis=-1) == LABELS[HELD_OUT])
    print(
        f"by its running statistics it reads {right:.1%} of {len(IMAGES[HELD_OUT])} digits unseen"
    )
    prove(run.losses, nnx.state(model, nnx.Param), twin_params, tolerance=1e-5)


if __name__ == "__main__":
    main()
