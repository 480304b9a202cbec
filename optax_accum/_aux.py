"""Auxiliary outputs of micro-steps: how each leaf is combined over a window."""

from typing import Any

import jax
import jax.numpy as jnp

from optax_accum import _axis, _checks, _fits

REDUCERS = ("mean", "sum", "max", "min", "last", "stack", "concat")
_KEPT = ("stack", "concat")  # every micro-step's own is given back


def reducers(spec: Any, shapes: Any) -> list[str]:
    """One reducer a leaf of the auxiliary output, from a tree prefix of them or None."""
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    if spec is None:
        for path, leaf in leaves:
            if not _checks.is_scalar(leaf, jnp.floating):
                raise ValueError(
                    f"aux{_fits.at(path)} is {_checks.described(leaf)}: only floating scalars are "
                    f"averaged unasked; type aux= one of {', '.join(map(repr, REDUCERS))}, or a "
                    "tree prefix of them."
                )
        return ["mean"] * len(leaves)
    for path, reducer in jax.tree_util.tree_leaves_with_path(spec):
        _checks.choice(f"aux{jax.tree_util.keystr(path)}", reducer, REDUCERS)
    try:
        full = jax.tree.broadcast(spec, shapes)
    except ValueError as error:
        raise ValueError(
            f"aux is {spec!r}, expected a tree prefix of the auxiliary output, whose structure is "
            f"{jax.tree.structure(shapes)}; type one reducer a leaf, or one for all."
        ) from error
    return jax.tree.leaves(full)


def check_rows(how: list[str], shapes: Any, examples: int, layout: str) -> None:
    """Raise where "concat" could not give the batch's order."""
    for r, (path, leaf) in zip(how, jax.tree_util.tree_leaves_with_path(shapes), strict=True):
        rows = leaf.shape[:1]
        if r == "concat" and (not rows or (layout == "strided" and rows != (examples,))):
            raise ValueError(
                f"aux{_fits.at(path)} has shape {leaf.shape}, expected a row for each of the "
                f"{examples} examples with aux='concat'; reshape it inside loss_fn, or type "
                "aux='stack', or batch_layout='contiguous' for several rows an example."
            )


def check_remainder(how: list[str], shapes: Any, smaller: Any) -> None:
    """Raise where the smaller micro-batch's output cannot be combined element by element."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(shapes), jax.tree.leaves(smaller), strict=True)
    for r, ((path, leaf), last) in zip(how, pairs, strict=True):
        if r != "concat" and leaf.shape != last.shape:
            raise ValueError(
                f"aux{_fits.at(path)} has shape {leaf.shape} in a micro-batch and {last.shape} in "
                f"the smaller one at the end, which aux={r!r} would combine element by element; "
                "type aux='concat', or reduce it over the examples inside loss_fn."
            )


def initial(how: list[str], shapes: Any) -> list[Any]:
    """What the reducers start from."""
    return [_initial(r, leaf) for r, leaf in zip(how, jax.tree.leaves(shapes), strict=True)]


def combine(how: list[str], totals: list[Any], aux: Any, fraction: jax.Array) -> list[Any]:
    """The totals with one micro-step more, which is `fraction` of the window's weight."""
    leaves = jax.tree.leaves(aux)
    return [
        _combine(r, total, jnp.asarray(leaf), fraction)
        for r, total, leaf in zip(how, totals, leaves, strict=True)
    ]


def rows(how: list[str], aux: Any) -> list[Any]:
    """The leaves that are given back micro-step by micro-step."""
    return [leaf for r, leaf in zip(how, jax.tree.leaves(aux), strict=True) if r in _KEPT]


def added(how: list[str], totals: list[Any]) -> list[Any]:
    """The totals that replicas add, to go with the gradients in one reduction."""
    return [total for r, total in zip(how, totals, strict=True) if r in ("mean", "sum")]


def agreed(
    how: list[str], totals: list[Any], added: list[Any], kept_any: Any, axis_name: Any
) -> list[Any]:
    """The totals of all replicas; those that are given back row by row stay each one's own."""
    summed = iter(added)
    over_replicas = {
        "max": _axis.largest,
        "min": _axis.smallest,
        "last": lambda total, axis_name: _axis.from_last_replica(total, kept_any, axis_name),
        **dict.fromkeys(("mean", "sum"), lambda total, axis_name: next(summed)),
        **dict.fromkeys(_KEPT, lambda total, axis_name: None),
    }
    return [over_replicas[r](total, axis_name) for r, total in zip(how, totals, strict=True)]


def result(
    how: list[str],
    shapes: Any,
    totals: list[Any],
    rows: list[Any] | None,
    tail: list[Any] | None,
    join: Any,
    correct: Any,
) -> Any:
    """The auxiliary output of the window.

    `join` takes the rows of the micro-steps and of the last one to the batch's own order;
    `correct` takes a mean over all the weight to one over the weight that was kept.
    """
    leaves, treedef = jax.tree.flatten(shapes)
    count = sum(r in _KEPT for r in how)
    kept = zip(rows or [None] * count, tail or [None] * count, strict=True)
    out = []
    for r, shape, total in zip(how, leaves, totals, strict=True):
        if r in _KEPT:
            out.append(join(*next(kept), r))
        elif r == "mean":
            floating = jnp.issubdtype(shape.dtype, jnp.inexact)
            mean = correct(total)
            out.append(mean.astype(shape.dtype) if floating else mean)
        elif r == "sum" and jnp.issubdtype(shape.dtype, jnp.inexact):
            out.append(total.astype(shape.dtype))
        else:
            out.append(total)
    return treedef.unflatten(out)


def _initial(reducer: str, leaf: Any) -> Any:
    dtype = leaf.dtype
    if reducer in _KEPT:
        return None
    if reducer == "mean":
        return jnp.zeros_like(leaf, _fits.promoted(dtype, jnp.float32))
    if reducer in ("max", "min"):
        return jnp.full_like(leaf, _extreme(dtype, reducer == "max"))
    return jnp.zeros_like(leaf, _sum_dtype(dtype) if reducer == "sum" else dtype)


def _sum_dtype(dtype: Any) -> Any:
    """Wide enough that sums neither stagnate nor wrap."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return _fits.promoted(dtype, jnp.float32)
    return _fits.promoted(dtype, jnp.int32)


def _extreme(dtype: Any, lowest: bool) -> Any:
    if dtype == jnp.bool_:
        return not lowest
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return info.min if lowest else info.max
    return -jnp.inf if lowest else jnp.inf


def _combine(reducer: str, total: Any, leaf: jax.Array, fraction: jax.Array) -> Any:
    if reducer in _KEPT:
        return None
    if reducer == "mean":
        return total + leaf.astype(total.dtype) * fraction.astype(total.dtype)
    if reducer == "sum":
        return total + leaf.astype(total.dtype)
    if reducer == "last":
        return leaf
    return jnp.maximum(total, leaf) if reducer == "max" else jnp.minimum(total, leaf)
