"""What the examples of a batch have to do with each other: experiments on a loss, by jax alone."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum import _checks, _oracle
from optax_accum._oracle import Case, Leaves, Trial


def by_place(trial: Trial) -> bool:
    """Whether the batch reversed has another loss."""
    reverse = _oracle.changed(trial, lambda leaf: leaf[::-1])
    return not _oracle.fits(trial, reverse, _oracle.changed(trial))


def copies_differ(trial: Trial) -> bool:
    """Whether one example repeated has another loss in a micro-batch than in the whole batch."""
    coarse = trial._replace(tolerance=trial.tolerance._replace(rtol=1e-3))
    batches = (_oracle.micro_batches(trial.case)[0], _oracle.examples(trial.case))
    few, many = (len(jax.tree.leaves(batch)[0]) for batch in batches)
    for i in range(min(many, 8)):  # one of them has a loss
        small, large = (
            _oracle.changed(trial, lambda leaf, n=n, i=i: jnp.repeat(leaf[i : i + 1], n, 0))
            for n in (few, many)
        )
        # Not the gradients: a normalisation without variance magnifies their rounding.
        small, large = {"loss": small["loss"]}, {"loss": large["loss"]}
        if not _oracle.not_finite(small | large):
            summed = _oracle.combined([small], [many / few])
            return not any(_oracle.fits(coarse, large, right) for right in (small, summed))
    return False


def _doubled(leaf: Any) -> Any:
    return jnp.concatenate([leaf, leaf])


def _reweighting(trial: Trial) -> np.ndarray | None:
    """Shares that combine the micro-batches into the whole batch, wherever the parameters are."""
    points = _points(trial)
    matrix = np.concatenate([np.stack([_flat(row) for row in rows], 1) for rows, _ in points])
    wanted = np.concatenate([_flat(right) for _, right in points])
    if len(wanted) < 2 * matrix.shape[1]:
        raise ValueError("too few numbers to tell the shares from")
    shares = np.linalg.lstsq(matrix, wanted)[0]
    shares[np.abs(shares) < 1e-9] = 0
    if shares.min() < -0.01 or abs(shares.sum() - 1) > 0.01:
        return None
    combined = [_oracle.combined(rows, shares.tolist()) for rows, _ in points]
    fit = zip(combined, points, strict=True)
    return shares if all(_oracle.fits(trial, found, right) for found, (_, right) in fit) else None


def _points(trial: Trial) -> list[tuple[list[Leaves], Leaves]]:
    """Micro-batches and the whole batch at the parameters, and near them until numbers suffice."""
    case, rng = trial.case, np.random.default_rng(0)
    batch, size = _oracle.examples(case), sum(leaf.size for leaf in trial.right.values())
    points = [(trial.rows, _oracle.changed(trial))]
    for _ in range(min(16, -(-4 * len(trial.rows) // size))):
        near = {
            i: jax.tree.map(lambda leaf: _near(leaf, rng), case.args[i])
            for i in _oracle.indices(case, "argnums")
        }
        right, _ = trial.run(batch, swapped=near)
        if not _oracle.not_finite(right):
            points.append((_oracle.rows_of(case, trial.run, near), right))
    return points


def _near(leaf: Any, rng: np.random.Generator) -> Any:
    wide = _oracle.wide(np.asarray(leaf))
    size = float(np.sqrt(np.mean(np.abs(wide) ** 2))) or 1.0
    near = wide + 0.1 * size * rng.normal(size=wide.shape)
    return jnp.asarray(near.astype(jnp.result_type(leaf)))


def _flat(leaves: Leaves) -> np.ndarray:
    """All real numbers; a row that is no number has no share."""
    flat = np.concatenate([_oracle.wide(leaf).ravel() for leaf in leaves.values()])
    flat = np.concatenate([np.real(flat), np.imag(flat)]) if np.iscomplexobj(flat) else flat
    return flat if np.isfinite(flat).all() else np.zeros_like(flat)


def _leaf_of_the_counts(trial: Trial) -> str | None:
    """The leaf that, the same in all micro-batches, makes a mean of means right."""
    batches = _oracle.micro_batches(trial.case)
    finite = [i for i, row in enumerate(trial.rows) if not _oracle.not_finite(row)]
    first, treedef = jax.tree.flatten(batches[finite[0]])
    equal = [leaves for leaves in map(jax.tree.leaves, batches) if len(leaves[0]) == len(first[0])]
    for j, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(batches[0])):
        if not (_checks.is_array(leaf) and _oracle.is_discrete(np.asarray(leaf))):
            continue
        alike = [[*leaves[:j], first[j], *leaves[j + 1 :]] for leaves in equal]
        rows = [trial.run(treedef.unflatten(leaves))[0] for leaves in alike]
        joined = treedef.unflatten([jnp.concatenate(x) for x in zip(*alike, strict=True)])
        mean = _oracle.combined(rows, [1 / len(rows)] * len(rows))
        if _oracle.fits(trial, mean, trial.run(joined)[0]):
            return "batch" + jax.tree_util.keystr(path[1:])
    return None


def _kind(trial: Trial) -> str | None:
    """Coupled by a statistic, which copies leave as it is, or by comparing each with each."""
    once, twice = _oracle.changed(trial), _oracle.changed(trial, _doubled)
    summed = _oracle.combined([once], [2.0])
    if not copies_differ(trial):
        return "statistic"
    if _oracle.fits(trial, twice, once) or _oracle.fits(trial, twice, summed):
        return None
    return "contrastive"


# What a loss may divide by.


def counts(case: Case) -> Iterator[tuple[str, Callable[..., Any]]]:
    """What a loss may divide by: as one would type it, and as a function."""
    places, batch = _oracle.indices(case, "batch_argnums"), _oracle.examples(case)
    names = ["batch"] if len(places) == 1 else [f"batch_{i}" for i in places]
    for j, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(batch)):
        name = names[path[0].idx] + jax.tree_util.keystr(path[1:])
        for text, count in _spellings(np.asarray(leaf)) if _checks.is_array(leaf) else ():
            weight = lambda *batch, j=j, count=count: count(jax.tree.leaves(batch)[j])  # noqa: E731
            yield f"lambda {', '.join(names)}: {text.format(name)}", weight


def _spellings(leaf: np.ndarray) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Its sum, how many entries differ from a value, and both without the first or last token."""
    parts: dict[str, Any] = {"{}": ...}
    if leaf.ndim > 1:
        parts |= {"{}[:, 1:]": np.s_[:, 1:], "{}[:, :-1]": np.s_[:, :-1]}
    values = dict.fromkeys((0.0, -100.0))
    if _oracle.is_discrete(leaf):
        found, times = np.unique(leaf, return_counts=True)
        values |= dict.fromkeys(map(float, (found[times.argmax()], found[0], found[-1])))
    for name, part in parts.items():
        yield f"{name}.sum()", lambda x, part=part: x[part].sum()
        yield f"({name} >= 0).sum()", lambda x, part=part: (x[part] >= 0).sum()
        for value in values:
            unlike = lambda x, part=part, value=value: (x[part] != value).sum()  # noqa: E731
            yield f"({name} != {value:g}).sum()", unlike


# Causes.


def order(trial: Trial) -> str | None:
    if not by_place(trial):
        return None
    return (
        "a loss that goes by the order of the examples: the batch reversed has another loss. Make "
        "one example of what belongs together, by leaves of shape (pairs, 2, ...)."
    )


def unequal_counts(trial: Trial) -> str | None:
    shares = _reweighting(trial)
    if shares is not None:
        listed = ", ".join(f"{share:.3g}" for share in shares[:8])
        return missing(
            trial,
            f"micro-batches weighted ({listed}{', ...' if len(shares) > 8 else ''}) are the whole "
            "batch, but no leaf of it counts that. Type weight=, a function of a micro-batch",
        )
    name = _leaf_of_the_counts(trial)
    return name and (
        f"terms with different denominators, of which one counts {name}: with the same {name} in "
        "all micro-batches the mean of means is right, and no one weight makes it so. Multiply "
        "each other term by weight / its own count in the whole batch, and type weight=."
    )


def penalty(trial: Trial) -> str | None:
    """loss = sum + c: the micro-batches' losses add up to the whole batch's and (k - 1) c."""
    once, twice = _oracle.changed(trial), _oracle.changed(trial, _doubled)
    constant = _oracle.combined([once, twice], [2.0, -1.0])
    shares = [1.0] * len(trial.rows) + [1.0 - len(trial.rows)]
    if not _oracle.fits(trial, _oracle.combined([*trial.rows, constant], shares), once):
        return None
    return (
        "a summed loss with a term that is not summed, such as a penalty on the parameters, which "
        "each micro-batch adds again. Divide the sum by the number of examples, or add the "
        "penalty's gradient once, after value_and_grad(..., loss_reduction='sum')."
    )


def coupled(trial: Trial) -> str | None:
    kind = _kind(trial)
    if kind == "contrastive":
        return (
            "a contrastive loss, or another that compares the examples of a batch: a batch twice "
            "over has another loss, since each example meets more of the others. A micro-batch "
            "holds fewer negatives, whatever the weights. Type a larger micro_batch_size=, or give "
            "the embeddings of the whole batch as an argument that is not in batch_argnums."
        )
    return kind and (
        "BatchNorm, or another statistic of the batch: no weights combine the micro-batches, and "
        "copies of one example have one loss, however many they are. Each micro-batch is "
        "normalised by itself. Normalise within an example (LayerNorm, GroupNorm), or by running "
        "statistics (use_running_average=True)."
    )


def missing(trial: Trial, remedy: str) -> str:
    options = trial.case.options
    given = "missing" if options["weight"] is None else "wrong"
    mean = "" if options["loss_reduction"] == "mean" else " and loss_reduction='mean'"
    return (
        f"{given} weights, a mean of means over unequal counts: {remedy}{mean}. The weight of a "
        "micro-batch is what its loss divides by."
    )
