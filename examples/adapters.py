"""Adapters over a frozen base, a micro-batch a call: the window is as small as what is trained.

python examples/adapters.py

A base network learns scikit-learn's digits. Then they are turned by 90 degrees, the base is
frozen, and low-rank adapters (LoRA, in Flax NNX) learn to read them. `nnx.LoRAParam` is named for
the gradient and for the optimizer: window and Adam's state are of the adapters' size, and the base
is not touched, to the bit. A twin trains the adapters on one big batch an update: the weights must
agree to rounding.
"""

import jax
import numpy as np
import optax
from _common import Run, arguments, prove
from flax import nnx
from sklearn.datasets import load_digits

import optax_accum as oa

EXAMPLES, K, WIDTH, RANK = 32, 8, 128, 4  # in a micro-batch; in a window; of the layers; of LoRA
IMAGES, LABELS = load_digits(return_X_y=True)
IMAGES = np.float32(IMAGES / 16)
TURNED = np.rot90(IMAGES.reshape(-1, 8, 8), axes=(1, 2)).reshape(-1, 64)
BASE = nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))


def adam():
    """A larger eps than 1e-8 keeps Adam from magnifying the rounding of tiny gradients."""
    return optax.adam(3e-2, eps=1e-3)


class Network(nnx.Module):
    def __init__(self, rngs):
        sizes = (64, WIDTH), (WIDTH, WIDTH), (WIDTH, 10)
        layers = [nnx.LoRALinear(*size, lora_rank=RANK, rngs=rngs) for size in sizes]
        self.layers = nnx.List(layers)

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = nnx.relu(layer(x))
        return self.layers[-1](x)


def loss_fn(model, images, labels):
    return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()


def batch_of(images, call, examples):
    rows = np.random.default_rng(call).integers(len(images), size=examples)
    return images[rows], LABELS[rows]


def trained_base():
    """No accumulation here: this is what you would load from a file."""
    model = Network(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=BASE)

    @nnx.jit
    def update(model, optimizer, images, labels):
        grads = nnx.grad(loss_fn, argnums=nnx.DiffState(0, BASE))(model, images, labels)
        optimizer.update(model, grads)

    for call in range(60):
        update(model, optimizer, *batch_of(IMAGES, call, 128))
    return model


@nnx.jit(donate_argnums=(0, 1))
def micro_step(model, optimizer, images, labels):
    adapters = nnx.DiffState(0, nnx.LoRAParam)
    loss, grads = nnx.value_and_grad(loss_fn, argnums=adapters)(model, images, labels)
    optimizer.update(model, grads, value=loss)
    return loss


def micro_batch(call):
    return batch_of(TURNED, call, EXAMPLES)


def big_batch_twin(updates):
    model = trained_base()
    optimizer = nnx.Optimizer(model, adam(), wrt=nnx.LoRAParam)

    @nnx.jit
    def update(model, optimizer, images, labels):
        adapters = nnx.DiffState(0, nnx.LoRAParam)
        optimizer.update(model, nnx.grad(loss_fn, argnums=adapters)(model, images, labels))

    for calls in np.arange(updates * K).reshape(updates, K):
        parts = zip(*map(micro_batch, calls), strict=True)
        update(model, optimizer, *(np.concatenate(part) for part in parts))
    return nnx.state(model, nnx.LoRAParam)


def size(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def main():
    parsed = arguments(__doc__, updates=25).parse_args()
    model = trained_base()
    frozen = jax.device_get(nnx.state(model, BASE))
    optimizer = oa.nnx.Optimizer(model, oa.accumulate(adam(), k=K), wrt=nnx.LoRAParam)
    window = size(optimizer.opt_state.grad_sum)
    print(f"base {size(frozen):,} bytes, adapters and window {window:,} bytes each")
    assert window == size(nnx.state(model, nnx.LoRAParam)) < 0.2 * size(frozen)
    with Run(parsed, calls_an_update=K) as run:
        nnx.update((model, optimizer), run.resumed(nnx.state((model, optimizer))))
        while run.goes_on:
            loss = micro_step(model, optimizer, *micro_batch(run.call))
            run.made(nnx.state((model, optimizer)), loss)
    after = nnx.state(model, BASE)
    jax.tree.map(np.testing.assert_array_equal, frozen, jax.device_get(after))
    print("the base has not changed by one bit")
    weights = nnx.state(model, nnx.LoRAParam)
    prove(run.losses, weights, big_batch_twin(parsed.updates), tolerance=1e-5)


if __name__ == "__main__":
    main()
