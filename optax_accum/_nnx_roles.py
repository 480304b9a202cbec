"""What the micro-steps do with each Variable of the arguments: hand it on, merge it, leave it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from optax_accum._batch_stats import merge_batch_stats
from optax_accum._nnx_graph import Item


class Roles(NamedTuple):
    """By the numbers of the Items; what is in none of these is left alone."""

    counts: list[int]  # of random streams on replicas: each micro-step counts from the same
    handed: list[int]  # from micro-step to micro-step
    stats: list[tuple[int, int]]  # mean and variance of a layer, merged
    momenta: list[Any]  # of those layers
    keys: list[int]  # on replicas: folded with the micro-step and the replica


def roles(
    items: Sequence[Item],
    changed: set[int],
    statistics: dict[int, tuple[int, str, Any]],
    mapped: bool,
) -> Roles:
    """`changed` are the Items that the forward pass writes to, `mapped` whether on replicas.

    Statistics of momentum 1 are written to, and stay as they were.
    """
    changed = {i for i in changed if not _is_frozen(statistics.get(id(items[i].value)))}
    layers: dict[int, dict[str, int]] = {}
    for i in changed:
        if (known := statistics.get(id(items[i].value))) is not None:
            layers.setdefault(known[0], {})[known[1]] = i
    pairs = sorted((pair["mean"], pair["var"]) for pair in layers.values() if len(pair) == 2)
    momenta = [statistics[id(items[mean].value)][2] for mean, _ in pairs]
    others = sorted(changed - {i for pair in pairs for i in pair})
    if not mapped:
        return Roles([], others, pairs, momenta, [])
    counts = [i for i in others if isinstance(items[i].value, nnx.RngCount)]
    if left := [str(items[i]) for i in others if i not in counts]:
        raise ValueError(
            f"loss_fn writes to {', '.join(left)} of its objects: on several replicas there is no "
            "order in which such a state could be handed on. Statistics of BatchNorm and counts of "
            "random streams can be merged; return what else is wanted as aux, with a reducer "
            "(aux='last', aux='sum', ...), or leave out mesh= and axis_name=."
        )
    keys = [i for i, item in enumerate(items) if isinstance(item.value, nnx.RngKey)]
    return Roles(counts, [], pairs, momenta, keys)


def _is_frozen(statistic: tuple[int, str, Any] | None) -> bool:
    return statistic is not None and isinstance(statistic[2], (int, float)) and statistic[2] == 1


def state_of(roles: Roles, values: Sequence[Any]) -> dict[str, Any]:
    """The state that goes through the micro-steps."""
    state = {
        "counts": [values[i] for i in roles.counts],
        "handed": [values[i] for i in roles.handed],
        "stats": [{"mean": values[i], "var": values[j]} for i, j in roles.stats],
    }
    return {name: part for name, part in state.items() if part}


def merge_of(roles: Roles, state: dict[str, Any]) -> dict[str, Any]:
    """How each part of the state is merged."""

    def latest(initial: Any, stacked: Any, weights: jax.Array) -> Any:
        del initial, weights
        return jax.tree.map(lambda rows: jnp.max(rows, axis=0), stacked)

    merged_stats = merge_batch_stats(lambda path: roles.momenta[path[0]])
    merge = {"counts": latest, "handed": None, "stats": merged_stats}
    return {name: merge[name] for name in state}


def numbered(roles: Roles, state: dict[str, Any]) -> dict[int, Any]:
    """The values of a state, by the numbers of their Items."""
    found = dict(zip(roles.counts, state.get("counts", ()), strict=True))
    found |= dict(zip(roles.handed, state.get("handed", ()), strict=True))
    for (mean, var), pair in zip(roles.stats, state.get("stats", ()), strict=True):
        found |= {mean: pair["mean"], var: pair["var"]}
    return found


# Keys of random streams. One may be an array of keys, of layers that are scanned over.


def keys_of(roles: Roles, items: Sequence[Item]) -> list[list[jax.Array]]:
    keys = [items[i].value.get_raw_value() for i in roles.keys]
    return [[key] if key.ndim == 0 else list(key.reshape(-1)) for key in keys]


def with_keys(roles: Roles, items: Sequence[Item], keys: list[list[jax.Array]]) -> dict[int, Any]:
    """The Variables of the keys, with others in them."""
    found = {}
    for i, parts in zip(roles.keys, keys, strict=True):
        variable = items[i].value
        found[i] = variable.replace(jnp.stack(parts).reshape(variable.get_raw_value().shape))
    return found
