"""The demo: five runs of one small language model over the same batches, compared.

Every run takes each update on the same sequences from the same weights, so what differs at the
end is the arithmetic alone. The sequences have unequal numbers of counted tokens: a mean over
micro-batches that forgets their weights is then not the mean over the global batch.
"""

import contextlib
import json
import pydoc_data.topics
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

import optax_accum as oa

TEXT = "".join(pydoc_data.topics.topics.values())
CHARACTERS = sorted(set(TEXT))
LENGTH, WIDTH, HEADS, LAYERS = 64, 64, 4, 2
# Adam divides by sqrt(v) + eps: a larger eps than 1e-8 keeps the quotient of two rounding errors
# out of parameters whose gradient is nearly zero, so that parameters can be compared.
LEARNING_RATE, EPS = 3e-3, 1e-3


class Settings(NamedTuple):
    updates: int
    global_batch: int
    k: int
    seed: int
    out: Path


class Batch(NamedTuple):
    tokens: np.ndarray  # shape=(sequences, LENGTH), dtype=np.int32
    targets: np.ndarray  # shape=(sequences, LENGTH), dtype=np.int32: the tokens that follow
    counted: np.ndarray  # shape=(sequences, LENGTH), dtype=np.float32: 1 where the target counts


def batches(settings: Settings) -> Iterator[Batch]:
    """Pieces of Python's own documentation, each with its own number of counted tokens."""
    rng = np.random.default_rng(settings.seed)
    text = np.searchsorted(CHARACTERS, list(TEXT)).astype(np.int32)
    for _ in range(settings.updates):
        starts = rng.integers(len(text) - LENGTH, size=(settings.global_batch, 1))
        pieces = text[starts + np.arange(LENGTH + 1)]
        lengths = rng.integers(1, LENGTH + 1, size=(settings.global_batch, 1))
        counted = (np.arange(LENGTH) < lengths).astype(np.float32)
        yield Batch(pieces[:, :-1], pieces[:, 1:], counted)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attention_norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = self.qkv(self.attention_norm(x)).reshape(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        q, k, v = (heads[:, :, i] for i in range(3))
        x = x + self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))
        return x + self.down(jax.nn.gelu(self.up(self.mlp_norm(x))))


class Transformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(len(CHARACTERS), WIDTH, rngs=rngs)
        self.position = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.Sequential(*(Block(rngs) for _ in range(LAYERS)))
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, len(CHARACTERS), rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.position(jnp.arange(LENGTH))
        return self.head(self.norm(self.blocks(x)))


def token_mean_loss(model: Callable[..., jax.Array], batch: Batch) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch.tokens), batch.targets)
    return jnp.sum(losses * batch.counted) / jnp.sum(batch.counted)


class Run(NamedTuple):
    name: str
    tx: optax.GradientTransformation
    k: int = 1
    weighted: bool = False
    order: Any = slice(None)  # of the sequences in a global batch
    micro_step: Any = None  # compiled
    params: Any = None
    state: Any = None


def planned(settings: Settings, inner: optax.GradientTransformation) -> list[Run]:
    k = settings.k
    accumulated = oa.accumulate(inner, k)
    multi_steps = optax.MultiSteps(inner, k).gradient_transformation()
    another = np.random.default_rng(settings.seed).permutation(settings.global_batch)
    return [
        Run("big batch", inner),
        Run("accumulate", accumulated, k, weighted=True),
        Run("without weights", accumulated, k),
        Run("optax.MultiSteps", multi_steps, k),
        Run("big batch shuffled", inner, order=another),
    ]


def counter(calls: list[None]) -> optax.GradientTransformation:
    """A link of the inner optimizer that notes, at run time, that it was run."""

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        jax.debug.callback(lambda: calls.append(None))
        return updates, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update_fn)


def compiled(run: Run, settings: Settings) -> Run:
    """The run with its program, its weights and its optimizer's state."""
    graph, params = nnx.split(Transformer(nnx.Rngs(settings.seed)))
    state = run.tx.init(params)

    def micro_step(params: Any, state: Any, batch: Batch) -> tuple[Any, Any, jax.Array]:
        loss_fn = lambda params: token_mean_loss(nnx.merge(graph, params), batch)  # noqa: E731
        loss, grads = jax.value_and_grad(loss_fn)(params)
        weight = jnp.sum(batch.counted) if run.weighted else None
        params, state = oa.apply_gradients(run.tx, grads, state, params, weight=weight)
        return params, state, loss

    part = micro_batches(run, next(batches(settings)))[0]
    # Devices that round the factors of a product to fewer bits would do so differently per shape.
    with jax.default_matmul_precision("highest"):
        lowered = jax.jit(micro_step, donate_argnums=(0, 1)).lower(params, state, part)
    return run._replace(micro_step=lowered.compile(), params=params, state=state)


def micro_batches(run: Run, batch: Batch) -> list[Batch]:
    parts = (np.split(leaf[run.order], run.k) for leaf in batch)
    return [Batch(*leaves) for leaves in zip(*parts, strict=True)]


class Record(NamedTuple):
    """One update of one run."""

    loss: float  # token mean over the global batch, before the update
    seconds: float
    inner_calls: int
    param_difference: float = 0.0  # largest, from the big batch's


def update(run: Run, batch: Batch, calls: list[None]) -> tuple[Run, Record]:
    parts, losses = micro_batches(run, batch), []
    params, state = run.params, run.state
    calls.clear()
    started = time.perf_counter()
    for part in parts:
        params, state, loss = run.micro_step(params, state, part)
        losses.append(loss)
    jax.block_until_ready((params, state, losses))
    seconds = time.perf_counter() - started
    jax.effects_barrier()
    loss = np.average(np.asarray(losses, np.float64), weights=[np.sum(p.counted) for p in parts])
    return run._replace(params=params, state=state), Record(float(loss), seconds, len(calls))


@jax.jit
def largest_difference(a: optax.Params, b: optax.Params) -> jax.Array:
    return optax.tree.norm(optax.tree.sub(a, b), ord=np.inf)


@contextlib.contextmanager
def interrupts() -> Iterator[threading.Event]:
    """Ctrl-C as an event, since the exception could strike inside the callback of a program."""
    asked = threading.Event()

    def ask(*_: object) -> None:
        asked.set()
        signal.signal(signal.SIGINT, previous)  # a second one ends the command at once

    previous = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, previous)


def train(settings: Settings, console: Console) -> tuple[list[Run], list[list[Record]]]:
    """Records of the updates that every run has made; fewer than asked for after Ctrl-C."""
    calls, history = [], []
    inner = optax.chain(optax.adamw(LEARNING_RATE, eps=EPS), counter(calls))
    columns = "{task.description}", BarColumn(), MofNCompleteColumn(), "{task.fields[now]}"
    with Progress(*columns, console=console) as progress:
        runs = planned(settings, inner)
        add = progress.add_task
        tasks = [add(run.name, total=settings.updates, now="waiting") for run in runs]
        for i, task in enumerate(tasks):
            progress.update(task, now="compiling")
            runs[i] = compiled(runs[i], settings)
            progress.update(task, now="compiled")
        with interrupts() as asked:
            for batch in batches(settings):
                records = []
                for i, task in enumerate(tasks):
                    if asked.is_set():
                        return runs, history
                    runs[i], record = update(runs[i], batch, calls)
                    far = float(largest_difference(runs[i].params, runs[0].params))
                    records.append(record._replace(param_difference=far))
                    progress.update(task, advance=1, now=f"loss {record.loss:.4f}")
                history.append(records)
    return runs, history
