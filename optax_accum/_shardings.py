"""Where a state lies: specs for `shard_map`, shardings for `jit`, rows for other replicas."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as Spec

from optax_accum import _accumulator as acc
from optax_accum import _axis, _checks, _fits
from optax_accum._cond import result_shapes
from optax_accum._state import (
    AccumulateState,
    differentiated,
    require_states,
)


def state_specs(
    tx: optax.GradientTransformation,
    params: optax.Params,
    axis_name: str | tuple[str, ...],
    *,
    param_specs: Any = Spec(),  # noqa: B008 (immutable)
) -> Any:
    """The `PartitionSpec`s of a state that goes into and out of a `shard_map`.

    Under `accumulate(..., axis_name=...)` the sums of a window are each replica's own: a row for
    each, `P(axis_name)`. Everything else is the same on all replicas, `P()`.

    Args:
      tx: from :func:`accumulate`, or a chain that contains it.
      params: arrays or `jax.ShapeDtypeStruct`s.
      axis_name: the mapped axis or axes.
      param_specs: for parameters that are themselves in shards of other manual axes: a tree prefix
        of their `PartitionSpec`s. State that is shaped like them, by path and shape, follows.

    Returns:
      A tree like `tx.init(params)`, for `in_specs` and `out_specs`.

    Raises:
      ValueError: if the state holds no :class:`AccumulateState`.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jax.sharding import PartitionSpec as P
      >>> import optax_accum as oa
      >>> tx = oa.accumulate(optax.sgd(0.1), k=4, axis_name="data")
      >>> specs = oa.state_specs(tx, {"w": jnp.zeros(3)}, "data")
      >>> specs.grad_sum, specs.update_step
      ({'w': P('data',)}, P())
    """
    axes = _axis.names(_checks.axis_name(axis_name))
    full = jax.tree.broadcast(param_specs, params, is_leaf=_is_spec)
    specs = jax.tree.leaves(full, is_leaf=_is_spec)

    def row(spec: Spec) -> Spec:
        return Spec(axes if len(axes) != 1 else axes[0], *spec)

    state = state_shapes(tx, params)
    require_states(state)
    return _like_params(state, params, specs, Spec(), row)


def state_shardings(
    tx: optax.GradientTransformation,
    params: optax.Params,
    *,
    axis_name: str | tuple[str, ...] | None = None,
) -> Any:
    """The shardings of a state: like the parameters where it is shaped like them.

    A leaf of the state whose path ends with a parameter's path, and which has its shape, lies as
    the parameter does; every other one is replicated. For `jax.jit(tx.init, out_shardings=...)`
    and for restoring checkpoints: a jitted `init` alone replicates on an automatic mesh.

    Args:
      tx: any Optax transformation.
      params: arrays with shardings, or `jax.ShapeDtypeStruct`s with them.
      axis_name: the mesh axes of the replicas, if `tx` accumulates over some.

    Returns:
      A tree like `tx.init(params)`.

    Raises:
      ValueError: if a parameter has no sharding, or `axis_name` is missing.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jax.sharding import NamedSharding, PartitionSpec as P
      >>> import optax_accum as oa
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> w = jax.ShapeDtypeStruct((64, 3), jnp.float32, sharding=NamedSharding(mesh, P("data")))
      >>> tx = oa.accumulate(optax.adam(0.1), k=4)
      >>> shardings = oa.state_shardings(tx, {"w": w})
      >>> shardings.grad_sum["w"].spec, shardings.inner_state[0].mu["w"].spec
      (P('data', None), P('data', None))
      >>> shardings.inner_state[0].count.spec
      P()
    """
    shardings = []
    for path, param in jax.tree_util.tree_leaves_with_path(params):
        sharding = getattr(param, "sharding", None)
        if sharding is None:
            raise ValueError(
                f"the parameter{_fits.at(path)} has no sharding, expected arrays on devices or "
                "jax.ShapeDtypeStruct(shape, dtype, sharding=...)."
            )
        shardings.append(sharding)
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    replicated = NamedSharding(meshes[0], Spec()) if meshes else (shardings or [None])[0]

    def row(sharding: Any) -> Any:
        if axis_name is None or not isinstance(sharding, NamedSharding):
            raise ValueError(
                "the state has a row for every replica, expected the mesh axes of the replicas and "
                "parameters on a mesh; type state_shardings(tx, params, axis_name=...)."
            )
        names = _axis.names(_checks.axis_name(axis_name))
        if not set(names).isdisjoint(jax.tree.leaves(tuple(sharding.spec))):
            raise ValueError(
                f"a parameter is in shards over {names}, {sharding.spec}, along which accumulate "
                "has a row of it on every replica; replicate it over them, or take value_and_grad("
                "mesh=...) and an accumulate without axis_name."
            )
        return NamedSharding(sharding.mesh, Spec(names, *sharding.spec))

    shapes = state_shapes(tx, params)
    return jax.tree.map(
        _as_result, _like_params(shapes, params, shardings, replicated, row), shapes
    )


def refold(state: optax.OptState, replicas: int | None) -> optax.OptState:
    """A state for another number of replicas: the rows of its window, summed into that many.

    Sums are sums wherever they stand, so a window that was saved by 8 replicas goes on, in its
    middle, on 2: to rounding what it would have been. The parameters and all else are the same on
    all replicas and stay as they are.

    Args:
      state: of `accumulate(..., axis_name=...)`, or of a chain that contains it; outside the mapped
        axis. One without rows, as `tx.init` makes it there, gets them.
      replicas: how many rows; None for none, to go on without `axis_name`.

    Returns:
      The state. It lies where jax puts it: place it by :func:`state_shardings`, or compile this
      function with `out_shardings`.

    Raises:
      ValueError: for fewer than one replica, or a state without an :class:`AccumulateState`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import optax_accum as oa
      >>> tx = oa.accumulate(optax.sgd(0.1), k=4, axis_name="data")
      >>> state = oa.refold(tx.init(jnp.zeros(3)), 8)
      >>> state.grad_sum.shape, state.update_step.shape
      ((8, 3), ())
    """
    if replicas is not None and (not isinstance(replicas, (int, np.integer)) or replicas < 1):
        raise ValueError(f"replicas is {replicas!r}, expected an integer of 1 or more, or None.")
    ours = require_states(state)
    only_rows = any(each.has_rows for each in ours)

    def one(node: Any) -> Any:
        if not _is_ours(node) or (only_rows and not node.has_rows):
            return node
        window = jax.tree.map(jnp.asarray, node.window)
        if not node.has_rows:
            window = jax.tree.map(lambda x: x[None], window)
        window = acc.folded(window, replicas or 1)
        if replicas is None:
            window = jax.tree.map(lambda x: x[0], window)
        inner = node.inner_state
        if any(
            each.has_rows for each in jax.tree.leaves(inner, is_leaf=_is_ours) if _is_ours(each)
        ):
            inner = refold(inner, replicas)
        return node._replace(inner_state=inner, **window._asdict())

    return jax.tree.map(one, state, is_leaf=_is_ours)


def _as_result(sharding: Any, leaf: Any) -> Any:
    """The same sharding, spelled as jit spells that of its results: it tells P() from P(None).

    Otherwise the second call of a jitted update would be compiled anew.
    """
    if not isinstance(sharding, NamedSharding):
        return sharding
    entries = list(sharding.spec)
    while entries and entries[-1] is None:
        entries.pop()
    if AxisType.Explicit in sharding.mesh.axis_types:
        entries += [None] * (np.ndim(leaf) - len(entries))
    return NamedSharding(sharding.mesh, Spec(*entries))


def _is_ours(node: Any) -> bool:
    return isinstance(node, AccumulateState)


def _is_spec(node: Any) -> bool:
    return isinstance(node, Spec)


def state_shapes(tx: optax.GradientTransformation, params: Any) -> Any:
    """What `tx.init(params)` returns, each array replaced by its shape and dtype."""
    leaves, treedef = jax.tree.flatten(params)
    arrays = [leaf for leaf in leaves if _checks.is_array(leaf)]

    def init(arrays: list[Any]) -> Any:
        rest = iter(arrays)
        return tx.init(
            treedef.unflatten(next(rest) if _checks.is_array(leaf) else leaf for leaf in leaves)
        )

    shapes: list[Any] = []
    jax.eval_shape(lambda arrays: shapes.append(result_shapes(lambda: init(arrays))), arrays)
    return shapes[0]


def _like_params(
    state: Any, params: Any, places: list[Any], elsewhere: Any, row: Callable[[Any], Any]
) -> Any:
    """For each leaf of a state the place of the parameter that it is shaped like."""
    known: dict[Any, tuple[Any, Any]] = {}
    for tree in (params, differentiated(params)):
        paths = jax.tree_util.tree_leaves_with_path(tree)
        for (path, leaf), place in zip(paths, places, strict=False):
            if _checks.is_array(leaf):
                known.setdefault(path, (jnp.shape(leaf), place))

    def place(path: Any, shape: Any) -> Any:
        for start in range(len(path) + 1):
            if path[start:] in known and known[path[start:]][0] == shape:
                return known[path[start:]][1]
        return elsewhere

    def node(path: Any, leaf: Any) -> Any:
        return ours(leaf) if _is_ours(leaf) else place(path, jnp.shape(leaf))

    def ours(state: AccumulateState) -> AccumulateState:
        def summed(path: Any, leaf: Any) -> Any:
            return row(place(path, leaf.shape[1:])) if rows else place(path, leaf.shape)

        rows = state.has_rows
        scalars: dict[str, Any] = dict.fromkeys(state._fields, elsewhere)
        scalars |= dict.fromkeys(acc.Window._fields, row(elsewhere) if rows else elsewhere)
        scalars["grad_sum"] = jax.tree_util.tree_map_with_path(summed, state.grad_sum)
        scalars["inner_state"] = whole(state.inner_state)
        return AccumulateState(**scalars)

    def whole(state: Any) -> Any:
        return jax.tree_util.tree_map_with_path(node, state, is_leaf=_is_ours)

    return whole(state)
