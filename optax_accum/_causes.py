"""Why a loss differs when it is accumulated, found by trying."""

import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum import _checks, _coupling, _oracle
from optax_accum._loop import value_and_grad
from optax_accum._oracle import Case, Difference, Leaves, Tolerance, Trial

PARAMETERS = inspect.signature(value_and_grad).parameters
OPTIONS = {name: given.default for name, given in PARAMETERS.items() if name != "loss_fn"}


def trials(case: Case, tolerance: Tolerance) -> Iterator[Trial]:
    """What has to agree: where there are keys, first with one random number for all examples."""
    try:
        trial = _trial(case, tolerance)
    except Exception as error:
        if (better := refused(case, error)) is error:
            raise
        raise better from error
    state = case.options["state_argnum"]
    places = _keys(
        case, [*_oracle.indices(case, "rng_argnums"), *([] if state is None else [state])]
    )
    frozen = _attempt(lambda: _trial(_oracle.frozen(case, places), tolerance)) if places else trial
    if isinstance(frozen, Trial) and _same(frozen.right, trial.right):
        yield trial
        return
    if isinstance(frozen, Trial) and not _oracle.not_finite(frozen.right):
        yield frozen
    rows = _oracle.rows_of(case, trial.run)
    right = _oracle.combined(rows, _oracle.shares_of(case))
    yield trial._replace(right=right, rows=rows, folded=True)


def with_rows(trial: Trial) -> Trial:
    return trial._replace(rows=trial.rows or _oracle.rows_of(trial.case, trial.run))


def with_noise(trial: Trial) -> Trial:
    return trial._replace(tolerance=trial.tolerance._replace(noise=_oracle.noise(trial)))


def explained(trial: Trial) -> str:
    """The likely cause and its remedy, or what was tried in vain."""
    tolerance = trial.tolerance._replace(rounding=_rounding(trial))
    if tolerance.rtol is not None:  # no experiment is more exact than the dtype
        eps = max(float(jnp.finfo(leaf.dtype).eps) for leaf in trial.right.values())
        tolerance = tolerance._replace(rtol=max(tolerance.rtol, eps ** (2 / 3)))
    trial, vain = trial._replace(tolerance=tolerance), []
    for what, cause in CAUSES[:1] if trial.folded else CAUSES:
        text = _attempt(lambda cause=cause: cause(trial))
        if isinstance(text, str):
            return f"Likely cause: {text}"
        vain.append(what if text is None else f"{what} (could not: {type(text).__name__})")
    return f"Likely cause: none of what was tried explains it. Tried: {'; '.join(vain)}."


def _trial(case: Case, tolerance: Tolerance) -> Trial:
    found, run = _accumulated(case), _oracle.alone(case)
    return Trial(case, run, found, _oracle.whole(case, run), [], tolerance)


def _accumulated(case: Case) -> Leaves:
    with warnings.catch_warnings():  # what it warns of shows in the numbers, if it matters
        warnings.simplefilter("ignore", UserWarning)
        value, grads = value_and_grad(case.loss_fn, **case.options)(*case.args)
    return _oracle.named(value[0] if isinstance(value, tuple) else value, grads)


def _attempt(experiment: Callable[[], Any]) -> Any:
    """Its result, or its exception: a loss need not take every batch and every key."""
    try:
        return experiment()
    except Exception as error:
        return error


def _agrees(trial: Trial, case: Case | None = None, **options: Any) -> bool:
    """Whether accumulated and whole agree in another case, and not by coincidence.

    What costs no compilation comes first: put together by jax alone, and of other arrangements of
    the examples.
    """
    case = case or trial.case._replace(options=trial.case.options | options)
    same = case.options["batch_argnums"] == trial.case.options["batch_argnums"]
    run = trial.run if same else _oracle.alone(case)
    rows, right = _oracle.rows_of(case, run), _oracle.whole(case, run)
    tried = trial._replace(case=case, run=run, rows=rows, right=right)
    if not _better(trial, tried, _oracle.combined(rows, _oracle.shares_of(case))):
        return False
    if case.options["batch_layout"] != trial.case.options["batch_layout"]:
        if not _coupling.holds_of_others(tried, [1 / len(rows)] * len(rows), repeats=False):
            return False
    elif not all(_oracle.fits(x, x.found, x.right) for x in _oracle.elsewhere(tried)):
        return False
    return _better(trial, tried, _accumulated(case))


def _better(trial: Trial, tried: Trial, found: Leaves) -> bool:
    """Whether it fits, and by far better than what is in use."""
    after = _oracle.excess(_oracle.difference(found, tried.right, trial.tolerance, trial.rows))
    return after <= min(1.0, _oracle.excess(_oracle.worst(trial)) / 4)


def _one_by_one(trial: Trial) -> Leaves:
    """What accumulation comes to, by jax alone."""
    return _oracle.combined(with_rows(trial).rows, _oracle.shares_of(trial.case))


def _same(left: Leaves, right: Leaves) -> bool:
    return all(np.array_equal(_oracle.wide(x), _oracle.wide(right[n])) for n, x in left.items())


def _keys(case: Case, places: Iterable[int]) -> list[int]:
    """Which of these arguments hold keys."""
    return [i for i in places if any(map(_oracle.is_key, jax.tree.leaves(case.args[i])))]


# Low precision.


def _rounding(trial: Trial) -> dict[str, float]:
    """How far each leaf moves by rounding alone, relative to its scale."""
    once = _oracle.changed(trial)
    scales = _oracle.scales(once, trial.rows)
    moved = {name: off / (scales[name] or 1.0) for name, off in _oracle.rounding(trial).items()}
    losses = [leaves["loss"] for leaves in (once, *trial.rows)]
    with np.errstate(over="ignore"):
        short = [d for d in (jnp.bfloat16, jnp.float16) if all(x.astype(d) == x for x in losses)]
    moved["loss"] = max((float(jnp.finfo(dtype).eps) for dtype in short), default=0.0)
    return moved


def low_precision(trial: Trial) -> str | None:
    relative = _relative(trial)
    if math.isinf(relative):
        return None
    if _oracle.fits(trial, trial.found, trial.right):
        how = "backward passes that start from 1/3, 1/5 and 1/7 differ as much, by rounding alone"
    elif not trial.folded and _gone_in_float64(trial, relative):
        how = "with parameters and batch in float64 the difference is gone"
    elif trial.case.options["accumulator_dtype"] and _agrees(trial, accumulator_dtype=None):
        how = "with accumulator_dtype=None the two agree"
    else:
        return None
    allowed = f"rtol={2 * relative:.0e}"
    if relative > 0.1:  # all but cancelled: no share of what is left is small
        allowed = f"atol={2 * max(off.absolute for off in _off(trial)):.0e}"
    return (
        f"low precision: {how}. Type {allowed} here to allow for it, or compare in "
        "float32: cast parameters and batch, x.astype(jnp.float32), and let the model compute in "
        "it (dtype=jnp.float32), with accumulator_dtype=None."
    )


def _gone_in_float64(trial: Trial, relative: float) -> bool:
    """Whether all that floats, as wide as can be, leaves a hundredth of the difference."""

    def widen(x: Any) -> Any:
        floats = _checks.is_array(x) and jnp.issubdtype(jnp.result_type(x), jnp.floating)
        return jnp.asarray(x, jnp.float64) if floats and not isinstance(x, float) else x

    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        args = jax.tree.map(widen, trial.case.args)
        case = Case(trial.case.loss_fn, args, trial.case.options | {"accumulator_dtype": None})
        right = _oracle.whole(case, _oracle.alone(case))
        if _relative(trial._replace(found=right)) < relative / 100:
            return False  # the whole batch's rounding is too small to matter
        wider = trial._replace(found=_accumulated(case), right=right)
        return _relative(wider) < relative / 100


def _relative(trial: Trial) -> float:
    """The least rtol with which the two agree."""
    return max((off.absolute / off.scale if off.scale else math.inf) for off in _off(trial))


def _off(trial: Trial) -> list[Difference]:
    """The leaves that no tolerance of their dtype allows, or all."""
    dtypes = Tolerance(None, noise=trial.tolerance.noise)
    judged = _oracle.differences(trial.found, trial.right, dtypes, trial.rows)
    return [off for off in judged if _oracle.excess(off) > 1] or judged


# Keywords that say something else than the loss does.


def not_cut(trial: Trial) -> str | None:
    for what, case in _coupling.uncut(trial.case):
        if _agrees(trial, case):
            return f"{_not_cut(what, case)}; with these the two agree."
    return None


def _not_cut(what: str, case: Case) -> str:
    cut = tuple(_oracle.indices(case, "batch_argnums"))
    given = "" if "argument" in what else f"give it as argument {cut[-1]} of the loss and "
    return (
        f"an argument that holds the batch's examples and is not cut: {what}, as the batch "
        f"has, and each micro-batch meets them all. To cut it too, {given}type batch_argnums={cut}"
    )


def refused(case: Case, error: Exception) -> Exception:
    """The error of a loss that takes the whole batch and no micro-batch, or the one there was."""
    candidates = _attempt(lambda: list(_coupling.uncut(case)))
    for what, recut in candidates if isinstance(candidates, list) else []:
        if not isinstance(_attempt(lambda case=recut: _accumulated(case)), Exception):
            return ValueError(f"{_not_cut(what, recut)}.")
    cut = _attempt(lambda: _oracle.alone(case)(_oracle.micro_batches(case)[0]))
    whole = _attempt(lambda: _oracle.whole(case, _oracle.alone(case)))
    if isinstance(cut, Exception) and not isinstance(whole, Exception):
        error.add_note(
            "The loss takes the whole batch, but no micro-batch. An array of the batch's length "
            "that it closes over is not cut: give it as an argument of the loss and type "
            "batch_argnums=(1, 2)."
        )
    return error


def reduction(trial: Trial) -> str | None:
    given = trial.case.options["loss_reduction"]
    if given != "sum" and _agrees(trial, loss_reduction="sum", weight=None):
        return (
            "a summed loss taken as a mean: with loss_reduction='sum' the two agree. Type "
            "loss_reduction='sum', or let the loss average over its examples."
        )
    if given != "mean" and _agrees(trial, loss_reduction="mean"):
        return (
            "a mean loss taken as a sum: with loss_reduction='mean' the two agree. Type "
            "loss_reduction='mean', or let the loss sum over its examples."
        )
    return None


def layout(trial: Trial) -> str | None:
    given = trial.case.options["batch_layout"]
    other = {"strided": "contiguous", "contiguous": "strided"}.get(given)
    if other is None or not _agrees(trial, batch_layout=other):
        return None
    return (
        f"examples that belong together, cut apart by batch_layout={given!r}: with "
        f"batch_layout={other!r} the two agree. Type batch_layout={other!r}."
    )


def held_state(trial: Trial) -> str | None:
    hold, options = lambda initial, stacked, weights: initial, trial.case.options
    if options["state_argnum"] is None or options["merge_state"] is not None:
        return None
    if not _agrees(trial, merge_state=hold):
        return None
    return (
        "model state handed from micro-step to micro-step, where the next loss reads it: with "
        "every micro-step started from the same state the two agree. Type merge_state=lambda "
        "initial, stacked, weights: ..., which makes the new state from all of theirs."
    )


# Micro-batches that count unequally.


def missing_weights(trial: Trial) -> str | None:
    numbers = lambda leaf: np.asarray(leaf) if _checks.is_array(leaf) else leaf  # noqa: E731
    batches = jax.tree.map(numbers, _oracle.micro_batches(trial.case))
    seen: set[tuple[float, ...]] = set()
    for typed, weight in _coupling.counts(trial.case):
        counts = np.array([float(weight(*batch)) for batch in batches])
        if not (np.isfinite(counts).all() and 0 <= counts.min() and 0 < counts.sum()):
            continue
        shares = counts / counts.sum()
        if (known := tuple(shares.round(6))) in seen:
            continue
        seen.add(known)
        fits = _better(trial, trial, _oracle.combined(trial.rows, shares.tolist()))
        if fits and _coupling.idle(trial, shares):
            if _agrees(trial, weight=weight, loss_reduction="mean"):
                return _coupling.missing(
                    trial, f"with weight={typed} the two agree. Type weight={typed}"
                )
    return None


# Random numbers.


def shared_key(trial: Trial) -> str | None:
    case, held = trial.case, _keys_held_alike(trial.case)
    if held:
        frozen = _attempt(lambda: _trial(_oracle.frozen(case, held), trial.tolerance))
        if isinstance(frozen, Trial) and _better(trial, frozen, frozen.found):
            return _one_key(case, held, "with one random number for all examples the two agree")
    if not _oracle.fits(trial, trial.found, _one_by_one(trial)):
        again, _ = _oracle.alone(case)(_oracle.examples(case))
        if not _oracle.fits(trial, again, _oracle.changed(trial)):
            return _one_key(case, held, "traced twice, the loss of the same batch differs")
    if _draws(case) and _coupling.by_place(trial) and _coupling.copies_differ(trial):
        return _one_key(case, held, "an example has another loss in another place of the batch")
    return None


def _draws(case: Case) -> bool:
    """Whether the loss makes random numbers of its own, as jax shows them."""
    shown = str(jax.make_jaxpr(case.loss_fn)(*case.args))
    return bool(re.search(r"= (random_bits|threefry2x32|rng_\w+)\b", shown))


def _keys_held_alike(case: Case) -> list[int]:
    roles = ("argnums", "batch_argnums", "rng_argnums", "state_argnum")
    used = [_oracle.indices(case, role) for role in roles if case.options[role] is not None]
    return [i for i in _keys(case, range(len(case.args))) if not any(i in role for role in used)]


def _one_key(case: Case, held: list[int], evidence: str) -> str:
    draw = "Type" if held else "Draw from a key that is an argument of the loss and type"
    rng = sorted({*_oracle.indices(case, "rng_argnums"), *(held or [len(case.args)])})
    return (
        f"one RNG key for all micro-batches, so that masks repeat: {evidence}. {draw} "
        f"rng_argnums={rng[0] if len(rng) == 1 else tuple(rng)}; each micro-step then folds its "
        "index into the key."
    )


CAUSES: tuple[tuple[str, Callable[[Trial], str | None]], ...] = (
    ("rounding, by other seeds and in float64", low_precision),
    ("every argument of the batch's length cut", not_cut),
    ("other loss_reduction=", reduction),
    ("other batch_layout=", layout),
    ("model state held", held_state),
    ("weight= from each leaf of the batch", missing_weights),
    ("random numbers the same for all examples", shared_key),
    ("the batch in other orders", _coupling.order),
    ("a term that is not summed", _coupling.penalty),
    ("a sum times a number", _coupling.scaled),
    ("any weights, and the same counts everywhere", _coupling.unequal_counts),
    ("the batch twice over, and copies of one example", _coupling.coupled),
)
