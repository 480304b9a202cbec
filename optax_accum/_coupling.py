"""What the examples of a batch have to do with each other: experiments on a loss, by jax alone."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum import _checks, _oracle
from optax_accum._oracle import Case, Leaves, Trial


def by_place(trial: Trial) -> bool:
    """Whether the batch reversed or permuted has another loss."""
    once, reverse = _oracle.changed(trial), _oracle.changed(trial, lambda leaf: leaf[::-1])
    batches = [_oracle.examples(_oracle.permuted(trial.case, seed)) for seed in (1, 2)]
    other = [trial.run(batch)[0] for batch in batches]
    return not all(_oracle.fits(trial, found, once) for found in (reverse, *other))


def holds_of_others(trial: Trial, shares: Any, repeats: bool = True) -> bool:
    """Whether these shares of micro-batches also make up batches of other selections of them."""
    blocks, places = _oracle.micro_batches(trial.case), _oracle.places(trial.case)
    if not idle(trial, shares):
        return False
    for at in _selections(len(blocks), repeats):
        counted = np.asarray(shares)[at]
        near = _oracle.nearby(trial.case, np.random.default_rng(at[0]), 0.3)
        order = np.concatenate([places[i] for i in at])
        joined = jax.tree.map(lambda x, at=order: x[at], _oracle.examples(trial.case))
        if _oracle.not_finite(right := trial.run(joined, swapped=near)[0]):
            near, right = {}, trial.run(joined)[0]
        if counted.sum() <= 0:
            if _oracle.not_finite(right) or not any(map(_oracle.largest, right.values())):
                continue  # nothing counts, and nothing is what the loss makes of it
            return False
        rows = [trial.run(block, swapped=near)[0] for block in blocks]
        found = _oracle.combined([rows[i] for i in at], (counted / counted.sum()).tolist())
        if not _oracle.fits(trial._replace(rows=rows), found, right):
            return False
    return True


def idle(trial: Trial, shares: Any) -> bool:
    """Whether micro-batches without a share say nothing, and with another one's x the same."""
    batches = _oracle.micro_batches(trial.case)
    for i in (i for i, share in enumerate(shares) if share <= 0):
        row = trial.rows[i]
        if _oracle.not_finite(row) or not any(map(_oracle.largest, row.values())):
            continue
        other = batches[i - 1] if i else batches[1]
        mixed = jax.tree.map(_mixed, batches[i], other)
        if not _oracle.fits(trial, trial.run(mixed)[0], row):
            return False
    return True


def _mixed(x: Any, y: Any) -> Any:
    return x if not _checks.is_array(x) or _oracle.is_discrete(np.asarray(x)) else y[: len(x)]


def _selections(k: int, repeats: bool) -> list[list[int]]:
    """Of k micro-batches: 2k, of which one is often there or missing; or all but one."""
    numbers, few = list(range(k)), range(min(k, 4))
    without = [[i for i in numbers if i != j] for j in few]
    if k > 2 and not repeats:
        return without
    often = [numbers + k * [i] for i in few]
    return often + [rest + (k + 1) * rest[:1] for rest in without]


def copies_differ(trial: Trial) -> bool:
    """Whether one example repeated has another loss in a micro-batch than in the whole batch."""
    coarse = trial._replace(tolerance=trial.tolerance._replace(rtol=1e-3))
    batches = (_oracle.micro_batches(trial.case)[0], _oracle.examples(trial.case))
    few, many = (len(jax.tree.leaves(batch)[0]) for batch in batches)
    for i in range(min(many, 8)):  # one of them has a loss
        small, large = (
            _oracle.changed(trial, lambda leaf, n=n, i=i: leaf[np.full(n, i)]) for n in (few, many)
        )
        # Not the gradients: a normalisation without variance magnifies their rounding.
        small, large = {"loss": small["loss"]}, {"loss": large["loss"]}
        if not _oracle.not_finite(small | large):
            summed = _oracle.combined([small], [many / few])
            return not any(_oracle.fits(coarse, large, right) for right in (small, summed))
    return False


def _doubled(leaf: Any) -> Any:
    return leaf[np.tile(np.arange(len(leaf)), 2)]


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
    if not all(_oracle.fits(trial, found, right) for found, (_, right) in fit):
        return None
    in_use = np.allclose(shares, _oracle.shares_of(trial.case), rtol=1e-3, atol=0)
    return None if in_use or not holds_of_others(trial, shares) else shares


def _points(trial: Trial) -> list[tuple[list[Leaves], Leaves]]:
    """Micro-batches and the whole batch at the parameters, and near them until numbers suffice."""
    case, rng = trial.case, np.random.default_rng(0)
    batch, size = _oracle.examples(case), sum(leaf.size for leaf in trial.right.values())
    points = [(trial.rows, _oracle.changed(trial))]
    for _ in range(min(16, -(-4 * len(trial.rows) // size))):
        near = _oracle.nearby(case, rng, 0.1)
        right, _ = trial.run(batch, swapped=near)
        if not _oracle.not_finite(right):
            points.append((_oracle.rows_of(case, trial.run, near), right))
    return points


def _flat(leaves: Leaves) -> np.ndarray:
    """All real numbers; a row that is no number has no share."""
    flat = np.concatenate([_oracle.wide(leaf).ravel() for leaf in leaves.values()])
    flat = np.concatenate([np.real(flat), np.imag(flat)]) if np.iscomplexobj(flat) else flat
    return flat if np.isfinite(flat).all() else np.zeros_like(flat)


def _leaf_of_the_counts(trial: Trial) -> str | None:
    """The leaf that, the same in all micro-batches, makes a mean of means right."""
    batch = _oracle.examples(trial.case)
    for j, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(batch)):
        if not (_checks.is_array(leaf) and _oracle.is_discrete(np.asarray(leaf))):
            continue
        if _alike(trial, j) and all(_alike(other, j) for other in _oracle.elsewhere(trial)):
            return "batch" + jax.tree_util.keystr(path[1:])
    return None


def _alike(trial: Trial, j: int) -> bool:
    """Whether a mean of means is right with leaf j the same in all micro-batches."""
    batches = _oracle.micro_batches(trial.case)
    finite = [i for i, row in enumerate(trial.rows) if not _oracle.not_finite(row)]
    first, treedef = jax.tree.flatten(batches[finite[0]])
    equal = [leaves for leaves in map(jax.tree.leaves, batches) if len(leaves[0]) == len(first[0])]
    alike = [[*leaves[:j], first[j], *leaves[j + 1 :]] for leaves in equal]
    rows = [trial.run(treedef.unflatten(leaves))[0] for leaves in alike]
    joined = treedef.unflatten([jnp.concatenate(x) for x in zip(*alike, strict=True)])
    mean = _oracle.combined(rows, [1 / len(rows)] * len(rows))
    return _oracle.fits(trial, mean, trial.run(joined)[0])


def _by_company(trial: Trial) -> bool:
    """Whether it matters which examples share a micro-batch, if any do."""
    cases = [_oracle.permuted(trial.case, seed) for seed in range(4)]
    rows = [trial.rows, *(_oracle.rows_of(case, trial.run) for case in cases)]
    first, *others = (_oracle.combined(row, _oracle.shares_of(trial.case)) for row in rows)
    alone = max(map(len, _oracle.places(trial.case))) == 1
    return alone or not all(_oracle.fits(trial, other, first) for other in others)


def _kind(trial: Trial) -> str | None:
    """Coupled by a statistic, which copies leave as it is, or by comparing each with each."""
    once, twice = _oracle.changed(trial), _oracle.changed(trial, _doubled)
    summed = _oracle.combined([once], [2.0])
    if not copies_differ(trial):
        return "statistic"
    if _oracle.fits(trial, twice, once) or _oracle.fits(trial, twice, summed):
        return None
    return "contrastive"


# Arguments that hold the batch's examples and are not cut.


def uncut(case: Case) -> Iterator[tuple[str, Case]]:
    """Each such argument, and the case in which all of them up to it are cut."""
    count = len(jax.tree.leaves(_oracle.examples(case))[0])
    stacked = case.options["batch_layout"] == "stacked"
    lead = jnp.shape(jax.tree.leaves(case.args[_cut(case)[0]])[0])[: 2 if stacked else 1]

    def is_batch(arg: Any) -> bool:
        leaves = jax.tree.leaves(arg)
        return bool(leaves) and all(jnp.shape(x)[: len(lead)] == lead for x in leaves)

    roles = ("argnums", "batch_argnums", "rng_argnums", "state_argnum")
    used = {i for r in roles if case.options[r] is not None for i in _oracle.indices(case, r)}
    for i in sorted(set(range(len(case.args))) - used):
        if is_batch(case.args[i]):
            case = case._replace(options=case.options | {"batch_argnums": (*_cut(case), i)})
            yield f"argument {i} has {count} examples", case
    given = case.loss_fn.keywords if isinstance(case.loss_fn, functools.partial) else {}
    for name in (name for name, value in given.items() if is_batch(value)):
        options = case.options | {"batch_argnums": (*_cut(case), len(case.args))}
        rest = {key: value for key, value in given.items() if key != name}
        case = Case(_by_position(case.loss_fn, name, rest), (*case.args, given[name]), options)
        yield f"{name}= of functools.partial has {count} examples", case


def _cut(case: Case) -> list[int]:
    return _oracle.indices(case, "batch_argnums")


def _by_position(loss_fn: Any, name: str, rest: dict[str, Any]) -> Callable[..., Any]:
    """A partial's keyword as the last argument."""
    base = functools.partial(getattr(loss_fn, "func", loss_fn), *getattr(loss_fn, "args", ()))
    return lambda *args: base(*args[:-1], **rest, **{name: args[-1]})


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
    if copies_differ(trial):
        return (
            "a loss that goes by the order of the examples: what it makes of an example depends on "
            "the place. Give what goes by place as a leaf of the batch, such as "
            "jnp.arange(examples), so that it is cut with the examples."
        )
    return (
        "a loss that goes by the order of the examples: the batch in another order has another "
        "loss. Make one example of what belongs together, by leaves of shape (pairs, 2, ...)."
    )


def scaled(trial: Trial) -> str | None:
    """loss = c(examples) * sum: neither a mean nor a sum."""
    sizes = {len(jax.tree.leaves(batch)[0]) for batch in _oracle.micro_batches(trial.case)}
    total = _oracle.combined(trial.rows, [1.0] * len(trial.rows))
    parts, whole = _flat(total), _flat(trial.right)
    if len(sizes) > 1 or not parts @ parts:
        return None
    factor = float(parts @ whole / (parts @ parts))

    def fits(tried: Trial) -> bool:
        found = _oracle.combined(tried.rows, [factor] * len(tried.rows))
        return _oracle.fits(tried, found, tried.right)

    known = any(abs(factor / share - 1) < 1e-3 for share in (1, 1 / len(trial.rows)))
    if known or factor <= 0 or not (fits(trial) and all(map(fits, _oracle.elsewhere(trial)))):
        return None
    return (
        f"a sum scaled by the batch size: the whole batch has {factor:.4g} times the sum of its "
        f"{len(trial.rows)} micro-batches, in whichever order the examples are. Let the loss "
        "divide the sum by its number of examples, or by nothing with loss_reduction='sum', and "
        "multiply loss and gradients by what else depends on the size, such as "
        "sqrt(examples), afterwards."
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
    for seed in (1, 2):
        rows = _oracle.rows_of(_oracle.permuted(trial.case, seed), trial.run)
        if not _oracle.fits(trial, _oracle.combined([*rows, constant], shares), once):
            return None
    return (
        "a summed loss with a term that is not summed, such as a penalty on the parameters, which "
        "each micro-batch adds again. Divide the sum by the number of examples, or add the "
        "penalty's gradient once, after value_and_grad(..., loss_reduction='sum')."
    )


def coupled(trial: Trial) -> str | None:
    kind = _kind(trial) if _by_company(trial) else None
    if kind == "contrastive":
        return (
            "a contrastive loss, or another that compares the examples of a batch: a batch twice "
            "over has another loss, since each example meets more of the others. A micro-batch "
            "holds fewer negatives, whatever the weights. Type a larger micro_batch_size=, or give "
            "the embeddings of the whole batch as an argument that is not in batch_argnums."
        )
    return kind and (
        "BatchNorm, or another statistic of the batch (a load-balancing term, a maximum, a clipped "
        "mean): no weights combine the micro-batches, and copies of one example have one loss, "
        "however many they are. Each micro-batch has a statistic of its own. Normalise within an "
        "example (LayerNorm, GroupNorm), or by running statistics (use_running_average=True); give "
        "another statistic of the whole batch as an argument that is not cut, or allow for a small "
        "one by rtol=."
    )


def missing(trial: Trial, remedy: str) -> str:
    options = trial.case.options
    given = "missing" if options["weight"] is None else "wrong"
    mean = "" if options["loss_reduction"] == "mean" else " and loss_reduction='mean'"
    return (
        f"{given} weights, a mean of means over unequal counts: {remedy}{mean}. The weight of a "
        "micro-batch is what its loss divides by."
    )
