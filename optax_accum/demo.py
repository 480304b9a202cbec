"""The demo: six runs of one small language model over the same batches, compared.

Every run takes each update on the same sequences from the same weights, so what differs at the
end is the arithmetic alone. The sequences have unequal numbers of counted tokens: a mean over
micro-batches that forgets their weights is then not the mean over the global batch.
"""

import contextlib
import functools
import json
import pydoc_data.topics
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress

import optax_accum as oa
from optax_accum._report import History, Result, draw, table

TEXT = "".join(pydoc_data.topics.topics.values())
CHARACTERS = sorted(set(TEXT))
LENGTH, WIDTH, HEADS, LAYERS = 64, 64, 4, 2
# Adam divides by sqrt(v) + eps: a larger eps than 1e-8 keeps the quotient of two rounding errors
# out of parameters whose gradient is nearly zero, so that parameters can be compared.
LEARNING_RATE, EPS = 3e-3, 1e-3

PROGRESS = "{task.description}", BarColumn(), MofNCompleteColumn(), "{task.fields[now]}"


class Batch(NamedTuple):
    tokens: np.ndarray  # shape=(sequences, LENGTH), dtype=np.int32
    targets: np.ndarray  # shape=(sequences, LENGTH), dtype=np.int32: the tokens that follow
    counted: np.ndarray  # shape=(sequences, LENGTH), dtype=np.float32: 1 where the target counts


def batches(updates: int, global_batch: int, seed: int) -> Iterator[Batch]:
    """Pieces of Python's own documentation, each with its own number of counted tokens."""
    rng = np.random.default_rng(seed)
    text = np.searchsorted(CHARACTERS, list(TEXT)).astype(np.int32)
    for _ in range(updates):
        starts = rng.integers(len(text) - LENGTH, size=(global_batch, 1))
        pieces = text[starts + np.arange(LENGTH + 1)]
        lengths = rng.integers(1, LENGTH + 1, size=(global_batch, 1))
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


def counted_tokens(batch: Batch) -> jax.Array:
    return jnp.sum(batch.counted)


class Run(NamedTuple):
    name: str
    tx: optax.GradientTransformation
    k: int = 1  # calls of the program an update, each with its part of the global batch
    weighted: bool = False
    order: Any = slice(None)  # of the sequences in a global batch
    value_and_grad: Any = jax.value_and_grad
    program: Any = None  # compiled
    params: Any = None
    state: Any = None


def planned(inner: optax.GradientTransformation, k: int, another_order: np.ndarray) -> list[Run]:
    accumulated = oa.accumulate(inner, k)
    in_one_call = functools.partial(oa.value_and_grad, k=k, weight=counted_tokens)
    return [
        Run("big batch", inner),
        Run("accumulate", accumulated, k, weighted=True),
        Run("value_and_grad", inner, value_and_grad=in_one_call),
        Run("without weights", accumulated, k),
        Run("optax.MultiSteps", optax.MultiSteps(inner, k).gradient_transformation(), k),
        Run("big batch shuffled", inner, order=another_order),
    ]


def counter(calls: list[None]) -> optax.GradientTransformation:
    """A link of the inner optimizer that notes, at run time, that it was run."""

    def noted(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
        del params
        jax.debug.callback(lambda: calls.append(None))
        return updates

    return optax.stateless(noted)


def compiled(run: Run, batch: Batch, seed: int) -> Run:
    """The run with its weights, its optimizer's state, and its program for such batches."""
    graph, params = nnx.split(Transformer(nnx.Rngs(seed)))
    state = run.tx.init(params)

    def loss_fn(params: Any, batch: Batch) -> jax.Array:
        return token_mean_loss(nnx.merge(graph, params), batch)

    def call(params: Any, state: Any, batch: Batch) -> tuple[Any, Any, jax.Array]:
        loss, grads = run.value_and_grad(loss_fn)(params, batch)
        weight = counted_tokens(batch) if run.weighted else None
        params, state = oa.apply_gradients(run.tx, grads, state, params, weight=weight)
        return params, state, loss

    part = parts_of(run, batch)[0]
    # Devices that round the factors of a product to fewer bits would do so differently per shape.
    with jax.default_matmul_precision("highest"):
        lowered = jax.jit(call, donate_argnums=(0, 1)).lower(params, state, part)
    return run._replace(program=lowered.compile(), params=params, state=state)


def parts_of(run: Run, batch: Batch) -> list[Batch]:
    parts = (np.split(leaf[run.order], run.k) for leaf in batch)
    return [Batch(*leaves) for leaves in zip(*parts, strict=True)]


def update(run: Run, batch: Batch, calls: list[None]) -> tuple[Run, float, float, int]:
    """One update: the run after it, its loss over the global batch, seconds, calls of inner."""
    parts, losses = parts_of(run, batch), []
    params, state = run.params, run.state
    calls.clear()
    started = time.perf_counter()
    for part in parts:
        params, state, loss = run.program(params, state, part)
        losses.append(loss)
    jax.block_until_ready((params, state, losses))
    seconds = time.perf_counter() - started
    jax.effects_barrier()
    loss = np.average(np.asarray(losses, np.float64), weights=[np.sum(p.counted) for p in parts])
    return run._replace(params=params, state=state), float(loss), seconds, len(calls)


@jax.jit
def largest_difference(a: optax.Params, b: optax.Params) -> jax.Array:
    return optax.tree.norm(optax.tree.sub(a, b), ord=np.inf)


def prepare(runs: list[Run], batch: Batch, seed: int, progress: Progress) -> None:
    for i, task in enumerate(progress.task_ids):
        progress.update(task, now="compiling")
        runs[i] = compiled(runs[i], batch, seed)
        progress.update(task, now="compiled")


@contextlib.contextmanager
def interrupts() -> Iterator[list[int]]:
    """Ctrl-C as a note, where the exception could strike inside the callback of a program."""
    noted: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: noted.append(number))
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, previous)


def train(runs: list[Run], data: Iterable[Batch], calls: list[None], progress: Progress) -> History:
    """What the runs measured in the updates that all of them made before Ctrl-C."""
    history = []
    with interrupts() as noted:
        for batch in data:
            measured = []
            for i, task in enumerate(progress.task_ids):
                runs[i], loss, *others = update(runs[i], batch, calls)
                far = largest_difference(runs[i].params, runs[0].params)
                measured.append((loss, *others, float(far)))
                progress.update(task, advance=1, now=f"loss {loss:.4f}")
                if noted:
                    return history
            history.append(measured)
    return history


def compared(runs: list[Run], history: History) -> list[Result]:
    losses, seconds, calls, far = np.array(history).transpose(2, 1, 0)  # each (runs, updates)
    times = np.median(seconds, axis=1)
    return [
        Result(
            run.name,
            losses[i, -1],
            abs(losses[i] - losses[0]).max(),
            far[i].max(),
            *compiled_bytes(run.program),
            times[i] / times[0],
            int(calls[i].sum()),
            losses[i, 0],
        )
        for i, run in enumerate(runs)
    ]


def compiled_bytes(program: Any) -> tuple[int, int, int] | tuple[None, None, None]:
    """Arguments, temporaries, total."""
    found = program.memory_analysis()
    if found is None:  # not every backend tells
        return None, None, None
    arguments, temporaries = found.argument_size_in_bytes, found.temp_size_in_bytes
    new_outputs = found.output_size_in_bytes - found.alias_size_in_bytes
    return arguments, temporaries, arguments + new_outputs + temporaries


def main(*, updates: int, global_batch: int, k: int, seed: int, out: Path, as_json: bool) -> bool:
    """Train, then print the table or the JSON object and draw the picture; False after Ctrl-C."""
    calls: list[None] = []
    inner = optax.chain(optax.adamw(LEARNING_RATE, eps=EPS), counter(calls))
    runs = planned(inner, k, np.random.default_rng(seed).permutation(global_batch))
    log = Console(stderr=True)
    with Progress(*PROGRESS, console=log) as progress:
        for run in runs:
            progress.add_task(run.name, total=updates, now="waiting")
        prepare(runs, next(batches(1, global_batch, seed)), seed, progress)
        history = train(runs, batches(updates, global_batch, seed), calls, progress)
    done = len(history)
    if done < updates:
        log.print(f"interrupted after {done} of {updates} updates")
    results = compared(runs, history) if history else []
    picture = str(out / "demo.png") if history else None
    if picture:
        size = sum(leaf.size for leaf in jax.tree.leaves(runs[0].params))
        title = f"{done} updates of {global_batch} sequences, k={k}, {size:,} parameters"
        (log if as_json else Console()).print(table(results, title))
        draw(results, history, title, picture)
        log.print(f"picture: {picture}", highlight=False, markup=False, soft_wrap=True)
    if as_json:
        settings = {"updates": done, "global_batch": global_batch, "k": k, "seed": seed}
        rows = [row._asdict() for row in results]
        print(json.dumps({**settings, "picture": picture, "runs": rows}, indent=2))
    return done == updates
