"""Running statistics of a window, by the law of total variance."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_accum import _checks
from optax_accum._fits import at, promoted

OTHERS = ("error", "mean", "max", "last")
Path = tuple[Any, ...]  # names and numbers, from the root of the state


def merge_batch_stats(
    momentum: float | Mapping[Any, Any] | Callable[[Path], float],
    *,
    names: tuple[str, str] = ("mean", "var"),
    others: str = "error",
) -> Callable[[Any, Any, jax.Array], Any]:
    """The running statistics of a window, for `value_and_grad(state_argnum=..., merge_state=...)`.

    BatchNorm normalises each micro-batch by its own mean and variance. What the running statistics
    move towards is the mean and variance of the whole window, by the law of total variance, and
    they move once::

        mean = sum(w * mean_i) / sum(w)
        var = sum(w * var_i) / sum(w) + sum(w * (mean_i - mean) ** 2) / sum(w)
        running = momentum * running + (1 - momentum) * (mean, var)

    Every micro-step starts from the same running statistics and returns them moved by its own
    micro-batch; those rows are what is merged. Rows of weight 0 are left out, whatever they hold,
    and without any weight the state stays as it was. Under `axis_name` and `mesh` the rows of all
    replicas are merged.

    A mean and its variance are found by their names: two leaves `mean` and `var` side by side, in
    dicts, NamedTuples, Flax's `batch_stats`, an `nnx.State`. Whole numbers, flags and keys (a
    counter of calls, say) are taken from the last row. For other leaves say so by `others`.

    The statistics are exact for the first layer. Deeper layers see activations that are normalised
    per micro-batch, and differ from one big batch's (by less than 1 % where the data are shuffled).
    A layer called c times in one forward pass moves c times: give `momentum ** c` for it, as a row
    is then off by `1 - momentum ** c`; by `momentum` the variance between micro-batches would be
    overstated, about c times.

    Args:
      momentum: how much the old statistics count, `0 <= momentum < 1`, as in Flax: 0.99 there by
        default (PyTorch's is 1 minus that). One number for all layers; or nested dicts of numbers
        by the names on the way, `{"stem": 0.9, "head": {"norm": 0.99}}`; or a function of the
        layer's path, `lambda path: 0.9 if path[0] == "stem" else 0.99`, given `("head", "norm")`.
      names: what the two leaves are called.
      others: what happens to other floating leaves: `"error"`; or `"mean"` (weighted), `"max"`
        (histories of FP8 scales), `"last"` (the last row with a weight).

    Returns:
      `f(initial, stacked, weights) -> state`: `stacked` has a row a micro-step in front of each
      leaf of `initial`, `weights` are those of the rows, shape `(rows,)`.

    Raises:
      ValueError, TypeError: for a momentum that is no number from 0 to below 1, and, when f is
        called, for a leaf that is no statistic and one whose momentum is not said. They name it.

    Source: the law of total variance; Flax's BatchNorm for `momentum` and the biased variance.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_accum as oa
      >>> merge = oa.merge_batch_stats(momentum=0.0)
      >>> before = {"mean": jnp.zeros(1), "var": jnp.ones(1)}
      >>> rows = {"mean": jnp.array([[1.0], [11.0]]), "var": jnp.array([[1.0], [1.0]])}
      >>> after = merge(before, rows, jnp.array([2.0, 2.0]))  # of [0, 2] and [10, 12]
      >>> after["mean"].tolist(), after["var"].tolist()
      ([6.0], [26.0])
    """
    if not callable(momentum) and not isinstance(momentum, Mapping):
        _checked_momentum(momentum, ())
    if len(names) != 2 or isinstance(names, str):
        raise ValueError(f"names is {names!r}, expected two; type names=('mean', 'var').")
    _checks.choice("others", others, OTHERS)

    def merge(initial: Any, stacked: Any, weights: jax.Array) -> Any:
        return _merged(_Choices(momentum, tuple(names), others), initial, stacked, weights)

    return merge


class _Choices(NamedTuple):
    momentum: Any
    names: tuple[Any, ...]
    others: str


def _merged(choices: _Choices, initial: Any, stacked: Any, weights: jax.Array) -> Any:
    leaves, treedef = jax.tree_util.tree_flatten_with_path(initial)
    rows = treedef.flatten_up_to(stacked)
    paths = [_names(path) for path, _ in leaves]
    found = dict(zip(paths, rows, strict=True))
    present = jnp.any(weights != 0)

    def merged(path: Path, shown: Any, old: Any, row: Any) -> Any:
        mean, var = ((*path[:-1], name) for name in choices.names)
        if path in (mean, var) and mean in found and var in found:
            momentum = _momentum(choices.momentum, path[:-1])
            _check_rows(path[:-1], found[mean], found[var], weights)
            new = _statistic(found[mean], row if path == var else None, weights, momentum)
        else:
            new = _other(choices, shown, row, weights)
        return jnp.where(present, new if _checks.is_key(row) else new.astype(row.dtype), old)

    return treedef.unflatten(
        merged(path, shown, old, row)
        for path, (shown, old), row in zip(paths, leaves, rows, strict=True)
    )


def _check_rows(path: Path, means: Any, variances: Any, weights: jax.Array) -> None:
    """Of a layer: shapes that would broadcast."""
    shapes = jnp.shape(means), jnp.shape(variances)
    if shapes[0] != shapes[1] or shapes[0][:1] != jnp.shape(weights):
        raise ValueError(
            f"the rows of mean and variance of the layer at {path} have the shapes {shapes[0]} and "
            f"{shapes[1]} for weights of shape {jnp.shape(weights)}, expected the same two, with "
            "one row a weight."
        )


def _names(path: Any) -> Path:
    """What stands on the way to a leaf; Flax's boxes around it are no part of that."""
    keys = [key.name if hasattr(key, "name") else getattr(key, "key", None) for key in path]
    keys = [getattr(k, "idx", None) if n is None else n for k, n in zip(path, keys, strict=True)]
    boxed = len(keys) > 1 and isinstance(path[-1], jax.tree_util.GetAttrKey) and keys[-1] == "value"
    return tuple(keys[:-1] if boxed else keys)


def _statistic(means: Any, variances: Any, weights: jax.Array, momentum: float) -> jax.Array:
    """The running mean, or where there are variances the running variance.

    A running mean is off the window's by (1 - momentum) times as much as the micro-batch's is, and
    the running variance takes (1 - momentum) of the square.
    """
    mean = _mean(means, weights)
    if variances is None:
        return mean
    apart = jnp.square(means.astype(mean.dtype) - mean)
    return _mean(variances, weights) + _mean(apart, weights) / (1 - momentum)


def _mean(rows: jax.Array, weights: jax.Array) -> jax.Array:
    """Weighted, over the rows; those of weight 0 are not looked at."""
    wide = promoted(rows.dtype, jnp.float32)
    weights = weights.astype(wide).reshape(-1, *(1,) * (rows.ndim - 1))
    whole = jnp.sum(weights)
    shares = weights / jnp.where(whole == 0, 1, whole)
    return jnp.sum(jnp.where(weights == 0, 0, rows.astype(wide)) * shares, axis=0)


def _other(choices: _Choices, path: Any, rows: Any, weights: jax.Array) -> jax.Array:
    """A leaf that is neither a mean nor a variance."""
    present = weights != 0
    floating = not _checks.is_key(rows) and jnp.issubdtype(rows.dtype, jnp.inexact)
    if not floating or choices.others == "last":
        return rows[jnp.max(jnp.where(present, jnp.arange(len(weights)), 0))]
    if choices.others == "mean":
        return _mean(rows, weights)
    if choices.others == "max":
        present = present.reshape(-1, *(1,) * (rows.ndim - 1))
        return jnp.max(jnp.where(present, rows, -jnp.inf), axis=0)
    mean, var = choices.names
    raise ValueError(
        f"the model's state{at(path)} is neither of two leaves {mean!r} and {var!r} side by side; "
        "type others='mean', 'max' or 'last' for leaves that are no statistics of BatchNorm, or "
        "names=('your_mean', 'your_var'), or leave it out of the argument at state_argnum."
    )


def _momentum(momentum: Any, path: Path) -> float:
    """Of the layer at a path."""
    if callable(momentum):
        return _checked_momentum(momentum(path), path)
    for name in path:
        if not isinstance(momentum, Mapping):
            break
        if name not in momentum:
            raise ValueError(
                f"momentum says nothing of the layer at {path}: {name!r} is not among "
                f"{list(momentum)}; type a number for it, or momentum=lambda path: 0.99."
            )
        momentum = momentum[name]
    return _checked_momentum(momentum, path)


def _checked_momentum(momentum: Any, path: Path) -> float:
    where = f" of the layer at {path}" if path else ""
    if not _checks.is_scalar(momentum, jnp.floating) and momentum not in (0,):
        raise TypeError(
            f"momentum{where} is {momentum!r}, expected a number from 0 to below 1; type the "
            "momentum of the model's BatchNorm, 0.99 in Flax by default."
        )
    if not _checks.is_traced(momentum) and not 0 <= float(momentum) < 1:
        raise ValueError(
            f"momentum{where} is {momentum!r}, expected a number from 0 to below 1: the part of "
            "the old statistics that is kept, 0.99 in Flax by default."
        )
    return momentum
