"""A language model in Flax NNX, a micro-batch a call: weighted by tokens, resumable in mid-window.

python examples/language_model.py
python examples/language_model.py --checkpoint-dir runs/lm --logdir runs/lm   # Ctrl-C, and again

A small transformer learns Python's own documentation, character by character. A window is 4
micro-batches of 16 pieces of text, each with its own number of counted tokens. Clipping, warm-up
and weight decay stand inside `accumulate`: they count updates. Checkpoints by Orbax are taken every
3 micro-steps, so most of them inside a window; a run that is killed and started again ends on the
same bits. TensorBoard files hold what `oa.diagnostics` says of each update. At the end a twin takes
the same updates as one big batch each: the weights must agree to rounding.
"""

import contextlib
import pathlib
import pydoc_data.topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import Run, arguments, prove
from flax import nnx
from tensorboardX import SummaryWriter

import optax_accum as oa

PIECES, LENGTH, K = 16, 32, 4  # in a micro-batch; characters in a piece; micro-batches in a window
WIDTH, HEADS, LAYERS = 32, 4, 2
TEXT = "".join(pydoc_data.topics.topics.values())
CHARACTERS = sorted(set(TEXT))
TOKENS = np.searchsorted(CHARACTERS, list(TEXT)).astype(np.int32)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norms[0](x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Transformer(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(len(CHARACTERS), WIDTH, rngs=rngs)
        self.position = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, len(CHARACTERS), rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.position(jnp.arange(LENGTH))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def micro_batch(call):
    """Pieces of the text, each counted up to a length of its own; the same for the same call."""
    rng = np.random.default_rng(call)
    starts = rng.integers(len(TOKENS) - LENGTH, size=(PIECES, 1))
    pieces = TOKENS[starts + np.arange(LENGTH + 1)]
    counted = np.arange(LENGTH) < rng.integers(1, LENGTH + 1, size=(PIECES, 1))
    return {"tokens": pieces[:, :-1], "targets": pieces[:, 1:], "counted": np.float32(counted)}


def loss_fn(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(
        model(batch["tokens"]), batch["targets"]
    )
    return jnp.sum(losses * batch["counted"]) / jnp.sum(batch["counted"])


def inner_optimizer(updates):
    rate = optax.warmup_cosine_decay_schedule(0.0, 2e-2, max(1, updates // 5), updates)
    return optax.chain(
        oa.diagnostics.record(),  # first: it keeps the norm before clipping
        optax.clip_by_global_norm(1.0),
        # A larger eps than 1e-8 keeps AdamW from magnifying the rounding of tiny gradients.
        optax.adamw(rate, eps=1e-3),
    )


@nnx.jit(donate_argnums=(0, 1))
def micro_step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads, weight=batch["counted"].sum(), value=loss)
    return oa.diagnostics.last_update(optimizer.opt_state)


def big_batch_twin(updates):
    model = Transformer(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, inner_optimizer(updates), wrt=nnx.Param)

    @nnx.jit
    def update(model, optimizer, batch):
        optimizer.update(model, nnx.grad(loss_fn)(model, batch))

    for calls in np.arange(updates * K).reshape(updates, K):
        parts = [micro_batch(call) for call in calls]
        update(model, optimizer, jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts))
    return nnx.state(model, nnx.Param)


def main():
    parser = arguments(__doc__, updates=30)
    parser.add_argument("--logdir", type=pathlib.Path, help="write TensorBoard files here")
    parsed = parser.parse_args()
    model = Transformer(nnx.Rngs(0))
    optimizer = oa.nnx.Optimizer(model, oa.accumulate(inner_optimizer(parsed.updates), k=K))
    with contextlib.ExitStack() as stack:
        logdir = str(parsed.logdir) if parsed.logdir else None
        writer = stack.enter_context(SummaryWriter(logdir, write_to_disk=logdir is not None))
        run = stack.enter_context(Run(parsed, calls_an_update=K))
        nnx.update((model, optimizer), run.resumed(nnx.state((model, optimizer))))
        while run.goes_on:
            log = micro_step(model, optimizer, micro_batch(run.call))
            if log.pop("updated"):
                for name, number in log.items():
                    writer.add_scalar(f"update/{name}", float(number), int(log["update_step"]))
            run.made(nnx.state((model, optimizer)), log["loss"] if optimizer.updated else np.nan)
    weights = nnx.state(model, nnx.Param)
    prove(run.losses, weights, big_batch_twin(parsed.updates), tolerance=1e-5)


if __name__ == "__main__":
    main()
