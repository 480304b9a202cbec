"""The demo: five runs of one small language model over the same batches, compared.

Every run takes each update on the same sequences from the same weights, so what differs at the
end is the arithmetic alone. The sequences have unequal numbers of counted tokens: a mean over
micro-batches that forgets their weights is then not the mean over the global batch.
"""

import json
import pydoc_data.topics
import time
from collections.abc import Callable, Iterable, Iterator
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
from rich.progress import BarColumn, MofNCompleteColumn, Progress
from rich.table import Table

import optax_accum as oa
from optax_accum.cli import interrupts

TEXT = "".join(pydoc_data.topics.topics.values())
CHARACTERS = sorted(set(TEXT))
LENGTH, WIDTH, HEADS, LAYERS = 64, 64, 4, 2
# Adam divides by sqrt(v) + eps: a larger eps than 1e-8 keeps the quotient of two rounding errors
# out of parameters whose gradient is nearly zero, so that parameters can be compared.
LEARNING_RATE, EPS = 3e-3, 1e-3

# Of each update, of each run: loss, seconds, calls of inner, largest difference of parameters.
History = list[list[tuple[float, float, int, float]]]
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


class Run(NamedTuple):
    name: str
    tx: optax.GradientTransformation
    k: int = 1
    weighted: bool = False
    order: Any = slice(None)  # of the sequences in a global batch
    micro_step: Any = None  # compiled
    params: Any = None
    state: Any = None


def planned(inner: optax.GradientTransformation, k: int, another_order: np.ndarray) -> list[Run]:
    accumulated = oa.accumulate(inner, k)
    return [
        Run("big batch", inner),
        Run("accumulate", accumulated, k, weighted=True),
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

    def micro_step(params: Any, state: Any, batch: Batch) -> tuple[Any, Any, jax.Array]:
        loss_fn = lambda params: token_mean_loss(nnx.merge(graph, params), batch)  # noqa: E731
        loss, grads = jax.value_and_grad(loss_fn)(params)
        weight = jnp.sum(batch.counted) if run.weighted else None
        params, state = oa.apply_gradients(run.tx, grads, state, params, weight=weight)
        return params, state, loss

    part = micro_batches(run, batch)[0]
    # Devices that round the factors of a product to fewer bits would do so differently per shape.
    with jax.default_matmul_precision("highest"):
        lowered = jax.jit(micro_step, donate_argnums=(0, 1)).lower(params, state, part)
    return run._replace(micro_step=lowered.compile(), params=params, state=state)


def micro_batches(run: Run, batch: Batch) -> list[Batch]:
    parts = (np.split(leaf[run.order], run.k) for leaf in batch)
    return [Batch(*leaves) for leaves in zip(*parts, strict=True)]


def update(run: Run, batch: Batch, calls: list[None]) -> tuple[Run, float, float, int]:
    """One update: the run after it, its loss over the global batch, seconds, calls of inner."""
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
    return run._replace(params=params, state=state), float(loss), seconds, len(calls)


@jax.jit
def largest_difference(a: optax.Params, b: optax.Params) -> jax.Array:
    return optax.tree.norm(optax.tree.sub(a, b), ord=np.inf)


def prepare(runs: list[Run], batch: Batch, seed: int, progress: Progress) -> None:
    for i, task in enumerate(progress.task_ids):
        progress.update(task, now="compiling")
        runs[i] = compiled(runs[i], batch, seed)
        progress.update(task, now="compiled")


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


class Result(NamedTuple):
    """What one run comes to: a row of the table, an object of the JSON. Bytes may be unknown."""

    name: str
    loss: float  # at the end
    max_loss_difference: float  # from the big batch's, over all updates; the next one likewise
    max_param_difference: float
    argument_bytes: int | None  # of a compiled micro-step, as the other bytes
    temp_bytes: int | None
    total_bytes: int | None
    time_ratio: float  # median time of an update, relative to the big batch's
    inner_calls: int
    first_loss: float


def compared(runs: list[Run], history: History) -> list[Result]:
    losses, seconds, calls, far = np.array(history).transpose(2, 1, 0)  # each (runs, updates)
    times = np.median(seconds, axis=1)
    return [
        Result(
            run.name,
            losses[i, -1],
            abs(losses[i] - losses[0]).max(),
            far[i].max(),
            *compiled_bytes(run.micro_step),
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


def megabytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 1e6:.{1 if size < 1e8 else 0}f}"


CAPTION = (
    "Δ: largest difference from the big batch at any update. MB: 10⁶ bytes, as compiled for one "
    "micro-step; total = arguments + outputs - aliased + temporaries. Time: median of an update, "
    "relative to the big batch."
)
COLUMNS: tuple[tuple[str, Callable[[Any], str]], ...] = (  # of a Result's first fields
    ("run", str),
    ("loss\nat end", "{:.4f}".format),
    ("Δ loss", "{:.1e}".format),
    ("Δ para-\nmeters", "{:.1e}".format),
    ("args\nMB", megabytes),
    ("temps\nMB", megabytes),
    ("total\nMB", megabytes),
    ("time\nratio", "{:.2f}".format),
    ("inner\ncalls", str),
)


def table(results: list[Result], title: str) -> Table:
    shown = Table(
        title=title, caption=CAPTION, box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False
    )
    for header, _ in COLUMNS:
        shown.add_column(header, justify="left" if header == "run" else "right", no_wrap=True)
    for row in results:
        shown.add_row(*(text(field) for field, (_, text) in zip(row, COLUMNS, strict=False)))
    return shown


# From wide to narrow and bottom to top, so that curves which coincide can all be seen.
LINES: tuple[dict[str, Any], ...] = (
    {"color": "#c8ccd4", "linewidth": 8, "zorder": 1},
    {"color": "#1f5fbf", "linewidth": 2, "zorder": 4},
    {"color": "#f2a33c", "linewidth": 5, "zorder": 2},
    {"color": "#8c1d40", "linewidth": 4, "zorder": 3, "linestyle": (0, (1.5, 1.5))},
    {"color": "#111111", "linewidth": 1.5, "zorder": 5, "linestyle": (0, (1, 3))},
)


def draw(results: list[Result], history: History, title: str, path: str) -> None:
    figure = Figure(figsize=(12, 5.5), layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2, width_ratios=(1.3, 1))
    draw_losses(left, [row.name for row in results], np.array(history)[:, :, 0].T)
    figure.legend(loc="outside lower center", ncols=len(results), frameon=False, handlelength=3)
    draw_memory(right, [row for row in results if row.total_bytes is not None])
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def draw_losses(axes: Axes, names: list[str], losses: np.ndarray) -> None:
    updates = np.arange(1, losses.shape[1] + 1)
    inset = axes.inset_axes((0.4, 0.45, 0.6, 0.45))
    for name, own, style in zip(names, losses, LINES, strict=True):
        axes.plot(updates, own, label=name, marker="o", markersize=2, **style)
        inset.plot(updates, abs(own - losses[0]), marker="o", markersize=2, **style)
    axes.set(xlabel="update", ylabel="loss (nats per counted token)")
    inset.set_yscale("symlog", linthresh=1e-7)
    inset.set_ylim(bottom=0)
    inset.set_title("distance from the big batch (nats)", fontsize="medium")


def draw_memory(axes: Axes, rows: list[Result]) -> None:
    if not rows:
        axes.set(xticks=[], yticks=[], xlabel="this backend tells nothing of its memory")
        return
    names = [row.name for row in rows]
    totals = np.array([row.total_bytes for row in rows]) / 1e6
    temporaries = np.array([row.temp_bytes for row in rows]) / 1e6
    rest = totals - temporaries
    axes.barh(names, rest, color="#8a93a3", label="weights, optimizer, window, batch")
    bars = axes.barh(names, temporaries, left=rest, color="#1f5fbf", label="temporaries")
    axes.bar_label(bars, [f"{total:.1f} MB" for total in totals], padding=4)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 0.99), ncols=2, frameon=False)
    axes.set_xlabel("memory of one micro-step, as compiled (MB, 10⁶ bytes)")
    axes.margins(x=0.2)
    axes.invert_yaxis()


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
