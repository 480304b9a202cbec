"""Flax NNX objects as arguments: taken apart into trees, put together again, seen through."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from flax.nnx import extract, graphlib

Path = tuple[Any, ...]


class Node(NamedTuple):
    """One graph node of the arguments."""

    graphdef: Any
    paths: list[Path]  # of what is not differentiated


class Frame(NamedTuple):
    """What stays the same: the structure of each argument, and a Node or None for its leaves."""

    treedefs: list[Any]
    nodes: list[list[Node | None]]


class Item(NamedTuple):
    """A Variable (or an array) that is not differentiated."""

    argument: int
    path: Path
    value: Any

    def __str__(self) -> str:
        return f"{type(self.value).__name__} {'.'.join(map(str, self.path))!r}"


class Apart(NamedTuple):
    """Arguments taken apart."""

    frame: Frame
    trees: list[Any]  # each argument, with the State that is differentiated in place of its nodes
    items: list[Item]  # what is left of the nodes


def is_node(x: Any) -> bool:
    return isinstance(x, nnx.Variable) or graphlib.is_graph_node(x)


def take_apart(arguments: Sequence[Any], wrt: dict[int, Any]) -> Apart:
    """The arguments with the State that `wrt` selects in place of each node, and all that is left.

    A Variable that is reached twice, in one argument or in two, is there once.
    """
    frame, trees, items = Frame([], []), [], []
    with nnx.split_context() as context:
        for i, argument in enumerate(arguments):
            leaves, treedef = jax.tree.flatten(argument, is_leaf=is_node)
            nodes: list[Node | None] = []
            for j, leaf in enumerate(leaves):
                node = None
                if is_node(leaf):
                    chosen = ... if isinstance(leaf, nnx.Variable) and i in wrt else wrt.get(i)
                    graphdef, selected, rest = context.split(leaf, chosen or False, ...)
                    flat = _flat(rest)
                    node = Node(graphdef, [path for path, _ in flat])
                    items += [Item(i, path, value) for path, value in flat]
                    leaves[j] = selected
                nodes.append(node)
            frame.treedefs.append(treedef)
            frame.nodes.append(nodes)
            trees.append(jax.tree.unflatten(treedef, leaves))
    return Apart(frame, trees, items)


def put_together(frame: Frame, trees: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """New arguments, of the values that `take_apart` found."""
    arguments, left = [], iter(values)
    with nnx.merge_context() as context:
        for treedef, nodes, tree in zip(frame.treedefs, frame.nodes, trees, strict=True):
            leaves = treedef.flatten_up_to(tree)
            for j, node in enumerate(nodes):
                if node is not None:
                    rest = _state([(path, next(left)) for path in node.paths])
                    leaves[j] = context.merge(node.graphdef, leaves[j], rest)
            arguments.append(jax.tree.unflatten(treedef, leaves))
    return arguments


def write_back(arguments: Sequence[Any], frame: Frame, new: dict[int, Any]) -> None:
    """Into the caller's objects: new values by the place of their Item."""
    number = 0
    for argument, nodes in zip(arguments, frame.nodes, strict=True):
        leaves = jax.tree.leaves(argument, is_leaf=is_node)
        for leaf, node in zip(leaves, nodes, strict=True):
            paths = () if node is None else node.paths
            flat = [(path, new[number + i]) for i, path in enumerate(paths) if number + i in new]
            number += len(paths)
            if flat:
                nnx.update(leaf, _state(flat))


def _flat(state: Any) -> list[tuple[Path, Any]]:
    if isinstance(state, nnx.Variable):
        return [((), state)]
    return list(nnx.to_flat_state(state))


def _state(flat: list[tuple[Path, Any]]) -> Any:
    return flat[0][1] if flat and flat[0][0] == () else nnx.from_flat_state(flat)


def check_shared(arguments: Sequence[Any], wrt: dict[int, Any]) -> None:
    """Raise for a Variable that is differentiated in one place and not in another."""
    seen: dict[int, Any] = {}
    for i, argument in enumerate(arguments):
        prefix = nnx.DiffState(-1, wrt[i]) if i in wrt else None
        for leaf in filter(is_node, jax.tree.leaves(argument, is_leaf=is_node)):
            extract.check_consistent_aliasing(leaf, prefix, node_prefixes=seen)


def running_statistics(arguments: Sequence[Any]) -> dict[int, tuple[int, str, Any]]:
    """Running statistics of layers like BatchNorm: their ids, as (layer, mean or var, momentum)."""
    found: dict[int, tuple[int, str, Any]] = {}
    for node in filter(is_node, jax.tree.leaves(arguments, is_leaf=is_node)):
        for _, layer in nnx.iter_graph(node, graph=True):
            momentum = getattr(layer, "momentum", None)
            pair = [getattr(layer, name, None) for name in ("mean", "var")]
            if momentum is not None and all(isinstance(x, nnx.BatchStat) for x in pair):
                for name, variable in zip(("mean", "var"), pair, strict=True):
                    found.setdefault(id(variable), (id(layer), name, momentum))
    return found


def check_same(frame: Frame, new: Frame, values: Sequence[Any], items: Sequence[Item]) -> None:
    """Raise where the forward pass changed what the objects are made of."""
    paths = [
        {(i, path) for i, nodes in enumerate(f.nodes) for n in nodes if n for path in n.paths}
        for f in (frame, new)
    ]
    created = [str(item) for item in items if (item.argument, item.path) not in paths[0]]
    if not created and len(items) == len(values):
        created = [
            str(item)
            for item, value in zip(items, values, strict=True)
            if jax.tree.structure(item.value) != jax.tree.structure(value)
        ]
    if created:
        raise ValueError(
            f"loss_fn creates {', '.join(created)} in its forward pass (or makes it grow), but the "
            "micro-steps are one compiled loop, in which Variables are fixed. What is sown: take "
            "it out inside loss_fn, `nnx.pop(model, nnx.Intermediate)`, and return it with "
            "has_aux=True; a cache or a counter: create it before the call."
        )
    if frame.nodes != new.nodes:
        raise ValueError(
            "loss_fn changes its objects in its forward pass: it removes Variables, or sets "
            "attributes that are no arrays. The micro-steps are one compiled loop, in which these "
            "are fixed; keep what changes in an nnx.Variable, and call model.train() or "
            "model.eval() before."
        )
