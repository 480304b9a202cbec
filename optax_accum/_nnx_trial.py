"""Which Variables a forward pass writes to: found by tracing it on one micro-batch."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum import _checks, _forwarding, _mesh
from optax_accum._nnx_graph import Apart, Item, check_same, put_together, take_apart

_CONSTANT = -1  # in place of the number of an input


def written(loss_fn: Any, k: Any, chosen: Any, options: Any, apart: Any) -> set[int] | Exception:
    """The Items that the forward pass of a micro-batch writes to."""

    def forward(arguments: list[Any]) -> None:
        loss_fn(*arguments[:-1], **arguments[-1])

    try:
        cut = functools.partial(_micro_batch, k, options)
        trees = [
            jax.tree.map(cut, tree) if i in options["batch_argnums"] else tree
            for i, tree in enumerate(apart.trees)
        ]
        axes = _mesh.axis_sizes(options, apart.trees)
        touched, written = _tried(forward, chosen, apart._replace(trees=trees), axes)
    except Exception as error:  # the loss will fail again, where more is known of what it was given
        return error
    if touched:
        raise ValueError(
            f"loss_fn writes to what is differentiated of argument {touched[0]}, whose gradients "
            "would then be those of other parameters; keep it in a Variable that wrt= leaves out."
        )
    return written


def _micro_batch(k: Any, options: Any, x: Any) -> Any:
    """The shape of a leaf's part."""
    shape = jnp.shape(x)
    if options.get("batch_layout") == "stacked":
        shape = shape[1:]
    else:
        shape = (options.get("micro_batch_size") or -(-shape[0] // k), *shape[1:])
    return jax.ShapeDtypeStruct(shape, x.dtype if _checks.is_key(x) else jnp.result_type(x))


def _tried(
    forward: Callable[[list[Any]], None],
    wrt: dict[int, Any],
    apart: Apart,
    axes: Sequence[tuple[str, int]],
) -> tuple[list[int], set[int]]:
    """The arguments whose differentiated part `forward` writes to, and the Items that it writes."""
    values = [item.value for item in apart.items]
    leaves, treedef = jax.tree.flatten((list(apart.trees), values))
    inner = jax.tree.structure(values).num_leaves  # Python's numbers among these may change
    traced = [
        (_checks.is_array(leaf) or _checks.is_key(leaf))
        and (i >= len(leaves) - inner or not isinstance(leaf, (bool, int, float, complex)))
        for i, leaf in enumerate(leaves)
    ]

    def after(arrays: list[Any]) -> Any:
        left = iter(arrays)
        full = [next(left) if t else leaf for leaf, t in zip(leaves, traced, strict=True)]
        trees, values = treedef.unflatten(full)
        arguments = put_together(apart.frame, trees, values)
        forward(arguments)
        frame, trees, items = take_apart(arguments, wrt)
        check_same(apart.frame, frame, values, items)
        return [trees[i] for i in wrt], [item.value for item in items]

    arrays = [leaf for leaf, t in zip(leaves, traced, strict=True) if t]
    jaxpr = jax.make_jaxpr(after, axis_env=list(axes))(arrays).jaxpr
    found = iter(_forwarding.forwarded(jaxpr))
    number = itertools.count()
    trees, numbers = treedef.unflatten([next(number) if t else _CONSTANT for t in traced])

    def moved(tree: Any) -> bool:
        return any([next(found) != at and at != _CONSTANT for at in jax.tree.leaves(tree)])

    return [i for i in wrt if moved(trees[i])], {i for i, at in enumerate(numbers) if moved(at)}


def check_untouched(values: Sequence[Any], items: Sequence[Item], error: Exception) -> None:
    """Raise where a forward pass, that could not be tried before, writes to its objects."""
    for value, item in zip(values, items, strict=True):
        pairs = zip(jax.tree.leaves(value), jax.tree.leaves(item.value), strict=True)
        if any(before is not after for before, after in pairs):
            raise ValueError(
                f"loss_fn writes to {item}, and could not be tried beforehand on one micro-batch, "
                f"which raised: {error}. Type oa.value_and_grad and nnx.split the objects yourself."
            ) from error
