"""A loss and its gradients by jax alone, which accumulated ones are judged against."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np

from optax_accum import _checks, _split

Leaves = dict[str, np.ndarray]  # a loss and the leaves of its gradients, by name
Run = Callable[..., tuple[Leaves, Any]]  # `alone`
ROUNDINGS = 8  # how often its measured rounding a leaf may be off by


class Case(NamedTuple):
    """A loss, the arguments of a whole batch, and how it is accumulated."""

    loss_fn: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any]  # every keyword of value_and_grad


class Tolerance(NamedTuple):
    rtol: float | None  # of a leaf's scale; None: eps ** (2 / 3) of its dtype
    atol: float = 0.0
    rounding: Any = None  # by leaf, as measured: relative to its scale
    noise: Any = None  # by leaf, as measured: absolute


class Difference(NamedTuple):
    """The leaf in which accumulated and whole differ most, measured in its tolerance."""

    leaf: str  # "loss", or as "gradient['w']"
    absolute: float  # the largest difference of two entries
    scale: float  # the largest entry, of the whole batch or a micro-batch
    tolerance: float  # the absolute difference that is allowed


class Trial(NamedTuple):
    """Accumulated and whole, to compare and to explain."""

    case: Case
    run: Run
    found: Leaves  # accumulated
    right: Leaves  # what it should be
    rows: list[Leaves]  # of the micro-batches
    tolerance: Tolerance
    folded: bool = False  # whether `right` is put together from the rows, each with its own key


# Of any examples, of the whole batch, of each micro-batch.


def alone(case: Case) -> Run:
    """`jax.value_and_grad(loss_fn)` of any examples, and the model state after them."""
    options, place = case.options, case.options["state_argnum"]
    given = {i: case.args[i] for role in ("argnums", "rng_argnums") for i in indices(case, role)}
    if place is not None:
        given[place] = case.args[place]

    @jax.jit
    def evaluate(given: dict[int, Any], number: Any, seed: Any) -> Any:
        args = [given.get(i, arg) for i, arg in enumerate(case.args)]
        for i in indices(case, "rng_argnums"):
            args[i] = jax.tree.map(lambda key: jax.random.fold_in(key, number), args[i])
        seeded = functools.partial(_seeded, case, seed)
        return jax.value_and_grad(seeded, options["argnums"], has_aux=True)(*args)

    def run(batch: Any, number: int = 0, seed: float = 1.0, swapped: Any = None) -> Any:
        cut = dict(zip(indices(case, "batch_argnums"), batch, strict=True))
        (loss, state), grads = evaluate(given | cut | (swapped or {}), number, seed)
        return named(loss, grads), state

    return run


def _seeded(case: Case, seed: Any, *args: Any) -> tuple[Any, Any]:
    """The loss, its backward pass started from `seed`, and the new model state or None."""
    out, has_aux = case.loss_fn(*args), case.options["has_aux"]
    if case.options["state_argnum"] is None:
        return seed * (out[0] if has_aux else out), None
    return seed * out[0], out[1][0] if has_aux else out[1]


def whole(case: Case, run: Run, swapped: Any = None) -> Leaves:
    batch = examples(case)
    found, _ = run(batch, swapped=swapped)
    if case.options["loss_reduction"] != "sum_over_weight":
        return found
    weight = float(case.options["weight"](*jax.tree.map(jnp.asarray, batch)))
    return {name: (wide(leaf) / weight).astype(leaf.dtype) for name, leaf in found.items()}


def changed(trial: Trial, change: Callable[[Any], Any] = lambda leaf: leaf) -> Leaves:
    """Of the whole batch, after a change of its leaves."""
    return trial.run(jax.tree.map(change, examples(trial.case)))[0]


def rows_of(case: Case, run: Run, swapped: Any = None) -> list[Leaves]:
    """Each micro-batch by itself, with its own key, the model state handed on."""
    rows, place, given = [], case.options["state_argnum"], dict(swapped or {})
    for number, batch in enumerate(micro_batches(case)):
        row, state = run(batch, number, swapped=given)
        rows.append(row)
        if place is not None and case.options["merge_state"] is None:
            given[place] = state
    return rows


def examples(case: Case) -> tuple[Any, ...]:
    """The whole batch, its examples along one axis."""
    batch = tuple(case.args[i] for i in indices(case, "batch_argnums"))
    stacked = case.options["batch_layout"] == "stacked"
    # NumPy's: nothing is compiled to index it.
    batch = jax.tree.map(lambda x: np.asarray(x) if _checks.is_array(x) else x, batch)
    return jax.tree.map(lambda x: x.reshape((-1, *x.shape[2:])) if stacked else x, batch)


def micro_batches(case: Case) -> list[tuple[Any, ...]]:
    return [jax.tree.map(lambda x, at=at: x[at], examples(case)) for at in places(case)]


def places(case: Case) -> list[np.ndarray]:
    """Which examples each micro-batch has."""
    batch = tuple(case.args[i] for i in indices(case, "batch_argnums"))
    names = ("k", "micro_batch_size", "batch_layout", "remainder")
    k, m, r = _split.sizes(batch, *(case.options[name] for name in names))
    strided = case.options["batch_layout"] == "strided"
    order = np.arange(k * m)
    found = [order[i::k] if strided else order[i * m : i * m + m] for i in range(k)]
    return [*found, np.arange(k * m, k * m + r)] if r else found


def combined(rows: Sequence[Leaves], shares: Sequence[float]) -> Leaves:
    """sum(share * row); a row without a share may hold anything."""
    kept = [(share, row) for share, row in zip(shares, rows, strict=True) if share != 0]
    return {
        name: np.sum([share * wide(row[name]) for share, row in kept], axis=0).astype(leaf.dtype)
        for name, leaf in rows[0].items()
    }


def shares_of(case: Case) -> list[float]:
    """What each micro-batch counts for in the accumulated gradient."""
    weight = case.options["weight"]
    batches = jax.tree.map(lambda x: jnp.asarray(x) if weight else x, micro_batches(case))
    if weight is None:
        weights = [float(len(jax.tree.leaves(batch)[0])) for batch in batches]
    else:
        weights = [float(weight(*batch)) for batch in batches]
    total = sum(weights) or 1.0
    if case.options["loss_reduction"] == "mean":
        return [weight / total for weight in weights]
    one = 1.0 if case.options["loss_reduction"] == "sum" else 1 / total
    return [one if weight else 0.0 for weight in weights]


# How far apart.


def difference(
    found: Leaves, right: Leaves, tolerance: Tolerance, rows: Sequence[Leaves] = ()
) -> Difference:
    """The worst leaf. One that is nothing but noise may be off by all of it."""
    return max(differences(found, right, tolerance, rows), key=excess)


def differences(
    found: Leaves, right: Leaves, tolerance: Tolerance, rows: Sequence[Leaves] = ()
) -> list[Difference]:
    """Of every leaf."""
    sizes, judged = scales(right, rows), []
    top = max((size for name, size in sizes.items() if name != "loss"), default=0.0)
    for name, leaf in right.items():
        scale = sizes[name]
        off = float(np.max(np.abs(wide(found[name]) - wide(leaf)), initial=0))
        off = off if math.isfinite(off) else math.inf
        eps = max(float(jnp.finfo(x.dtype).eps) for x in (found[name], leaf))
        rtol = eps ** (2 / 3) if tolerance.rtol is None else tolerance.rtol
        most = 0.0 if name == "loss" else rtol * top * min(0.1, 8 * eps ** (1 / 3))
        noise = (tolerance.noise or {}).get(name, 0.0)
        floor = ROUNDINGS * noise if scale <= 4 * noise else min(ROUNDINGS * noise, most)
        rtol = max(rtol, ROUNDINGS * (tolerance.rounding or {}).get(name, 0.0))
        judged.append(Difference(name, off, scale, tolerance.atol + max(rtol * scale, floor)))
    return judged


def scales(right: Leaves, rows: Sequence[Leaves]) -> dict[str, float]:
    """What is large in a leaf: micro-gradients may cancel."""
    return {name: max(largest(leaves[name]) for leaves in (right, *rows)) for name in right}


def rounding(trial: Trial) -> dict[str, float]:
    """How far each gradient moves by rounding alone.

    A backward pass is linear in the number that it starts from, but for rounding.
    """
    once, batch = changed(trial), examples(trial.case)
    seeded = {seed: trial.run(batch, 0, seed)[0] for seed in (1 / 3, 1 / 5, 1 / 7)}
    return {
        name: max(largest(wide(row[name]) / seed - wide(leaf)) for seed, row in seeded.items())
        for name, leaf in once.items()
        if name != "loss"
    }


def noise(trial: Trial) -> dict[str, float]:
    """The same, and how far all move when the last bit of the parameters does."""
    once, moved = changed(trial), rounding(trial)
    for seed in (0, 1):
        near = nearby(trial.case, np.random.default_rng(seed), 0.0)
        for name, leaf in trial.run(examples(trial.case), swapped=near)[0].items():
            moved[name] = max(moved.get(name, 0.0), largest(wide(leaf) - wide(once[name])))
    return moved


def excess(difference: Difference) -> float:
    """A difference in tolerances: above 1 it fails."""
    if difference.tolerance == 0:
        return math.inf if difference.absolute else 0.0
    return difference.absolute / difference.tolerance


def worst(trial: Trial) -> Difference:
    return difference(trial.found, trial.right, trial.tolerance, trial.rows)


def fits(trial: Trial, found: Leaves, right: Leaves) -> bool:
    return excess(difference(found, right, trial.tolerance, trial.rows)) <= 1


# Other arrangements of the same examples.


def nearby(case: Case, rng: np.random.Generator, far: float) -> dict[int, Any]:
    """The parameters moved by `far` times their size, and by their last bit."""

    def move(leaf: Any) -> Any:
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            return leaf
        wider = wide(np.asarray(leaf))
        size = float(np.sqrt(np.mean(np.abs(wider) ** 2))) if wider.size else 1.0
        last_bit = float(jnp.finfo(jnp.result_type(leaf)).eps) * rng.choice((-1, 1), wider.shape)
        moved = wider * (1 + last_bit) + far * (size or 1.0) * rng.normal(size=wider.shape)
        return moved.astype(jnp.result_type(leaf))

    return {i: jax.tree.map(move, case.args[i]) for i in indices(case, "argnums")}


def permuted(case: Case, seed: int) -> Case:
    """The same examples in another order, and so in other micro-batches."""
    args, batch = list(case.args), examples(case)
    order = np.random.default_rng(seed).permutation(len(jax.tree.leaves(batch)[0]))
    for i, flat in zip(indices(case, "batch_argnums"), batch, strict=True):
        args[i] = jax.tree.map(lambda x, old: x[order].reshape(jnp.shape(old)), flat, args[i])
    return case._replace(args=tuple(args))


def elsewhere(trial: Trial) -> Iterator[Trial]:
    """The examples permuted, twice, at other parameters where the loss takes them."""
    for seed in (1, 2):
        case, near = (
            permuted(trial.case, seed),
            nearby(trial.case, np.random.default_rng(seed), 0.3),
        )
        if not_finite(right := whole(case, trial.run, near)):
            near, right = {}, whole(case, trial.run)
        rows = rows_of(case, trial.run, near)
        found = combined(rows, shares_of(case))
        yield trial._replace(case=case, found=found, right=right, rows=rows)


def not_finite(leaves: Leaves) -> list[str]:
    return [name for name, x in leaves.items() if not np.isfinite(wide(x)).all()]


def named(loss: Any, grads: Any) -> Leaves:
    paths = jax.tree_util.tree_leaves_with_path(grads)
    gradients = {f"gradient{jax.tree_util.keystr(path)}": leaf for path, leaf in paths}
    arrays = {name: np.asarray(leaf) for name, leaf in ({"loss": loss} | gradients).items()}
    return {name: x for name, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.inexact)}


def indices(case: Case, role: str) -> list[int]:
    return np.atleast_1d(np.asarray(case.options[role], int)).tolist()


def is_discrete(leaf: np.ndarray) -> bool:
    """Whether a leaf can count: integers, booleans, masks in floating point."""
    return leaf.dtype.kind in "biu" or bool(np.isin(wide(leaf), (0, 1)).all())


def wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def largest(x: np.ndarray) -> float:
    """Of what is finite."""
    x = np.abs(wide(x))
    return float(np.max(x, where=np.isfinite(x), initial=0))


# Keys that give one number to all places of an array.


def frozen(case: Case, places: Sequence[int]) -> Case:
    """The same loss, its random numbers the same for every example: whole and parts agree."""

    def freeze(x: Any) -> Any:
        if not is_key(x):
            return x
        key = jax.random.key(0, impl=_one_number())
        return jnp.broadcast_to(key, jnp.shape(x)) if _checks.is_key(x) else key

    chosen = [jax.tree.map(freeze, arg) if i in places else arg for i, arg in enumerate(case.args)]
    return case._replace(args=tuple(chosen))


def is_key(x: Any) -> bool:
    legacy = getattr(x, "dtype", None) == jnp.uint32 and jnp.shape(x) in ((2,), (4,))
    return _checks.is_key(x) or legacy


@functools.cache
def _one_number() -> Any:
    def following(key: Any) -> Any:
        return key * jnp.uint32(747796405) + jnp.uint32(2891336453)

    def random_bits(key: Any, width: int, shape: tuple[int, ...]) -> Any:
        # Uniform, 0.10 to 0.14: dropout keeps it, and a mask of 15% takes it.
        word = jnp.uint32(0x1A000000) + key[0] % jnp.uint32(0x0A000000)
        word = word.astype(jnp.uint64) << 32 if width > 32 else word >> (32 - width)
        return jnp.broadcast_to(word.astype(f"uint{width}"), shape)

    return jax.extend.random.define_prng_impl(
        key_shape=(1,),
        seed=lambda seed: jnp.zeros((1,), jnp.uint32),
        split=lambda key, shape: jnp.broadcast_to(following(key), (*shape, 1)),
        random_bits=random_bits,
        fold_in=lambda key, data: following(key),
        name="optax_accum_one_number",
        tag="one",
    )
