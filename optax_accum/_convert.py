"""States from other accumulators and for other settings: one tree walked beside the other."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_accum import _checks, _windows
from optax_accum._call import settings_of
from optax_accum._cond import strong
from optax_accum._shardings import state_shapes, state_shardings
from optax_accum._state import AccumulateState, outermost_states
from optax_accum._windows import Given, Wanted

WINDOWS = (AccumulateState, optax.MultiStepsState)


def convert_state(
    state: optax.OptState,
    tx: optax.GradientTransformation,
    params: optax.Params,
    *,
    use_grad_mean: bool | None = None,
    weight: float | None = None,
    update_step: int | None = None,
    cast: bool = False,
) -> optax.OptState:
    """The state for `tx` that goes on where a state of another transformation stopped.

    From and to, wherever they stand in a chain:

    * `accumulate` with another k: a window that is open keeps its own k, as it would without this
      function; an empty one shows the new k.
    * `accumulate` with a constant k=1, which holds no buffer: gets one, or gives it up.
    * `optax.MultiSteps`, its window open or not: what was accumulated becomes the sums here. Its
      window closes at the k of `tx`, at the next micro-step if it holds as many already, and gives
      inner the mean `value` of the calls from now on.
    * windows inside windows: each keeps its micro-steps, and those that an `optax.MultiSteps`
      around handed on, as 1 each, weigh what a window of `tx` weighs.
    * a plain optimizer: its state gets an empty window around it, or is taken out of one.
    * another `accumulator_dtype`, with `cast=True` if a window is open.
    * rows of replicas to or from a state without (then see :func:`refold`).
    * a checkpoint that Orbax restored without a target: nested dicts and lists, in the dtypes in
      which it was saved. Given a target, Orbax casts silently.

    An open window holds sums, whatever their `loss_reduction`: another one reads them in its own
    way from then on, so change it after an update.

    Everything else in the two states has to be the same: structure, shapes and dtypes. A window
    that `tx` has no place for must be empty: call :func:`flush` with its own transformation first.
    For an `nnx.Optimizer` there is `oa.nnx.Optimizer.convert`.

    Args:
      state: of any transformation, with values (outside of `jax.jit`).
      tx: the transformation that goes on.
      params: the parameters, as for `tx.init`.
      use_grad_mean: what `optax.MultiSteps` was given (there True by default), if its window is
        open: its state does not say whether it holds a mean or a sum.
      weight: of each micro-step in an open window of `optax.MultiSteps`; None is 1. Give it if you
        go on with weights: examples, or tokens.
      update_step: updates made by a plain optimizer so far; required where k is a schedule.
      cast: True casts floating leaves that have other dtypes, where otherwise an error names them.

    Returns:
      A state like `tx.init(params)`. Leaves that stay the same are not copied. What Flax's NNX
      keeps in Variables (`optimizer.opt_state`, `nnx.state(model, nnx.Param)`) comes without them.

    Raises:
      ValueError, TypeError: for a state that does not fit. The message names the field.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import optax_accum as oa
      >>> params = jnp.zeros(2)
      >>> old = optax.MultiSteps(optax.sgd(1.0), every_k_schedule=4)
      >>> _, state = old.update(jnp.array([4.0, 0.0]), old.init(params), params)
      >>> tx = oa.accumulate(optax.sgd(1.0), k=4)
      >>> state = oa.convert_state(state, tx, params, use_grad_mean=True)
      >>> for _ in range(3):
      ...     updates, state = tx.update(jnp.array([0.0, 4.0]), state, params)
      >>> updates.tolist()
      [-1.0, -3.0]
    """
    _check_arguments(state, tx, weight, update_step)
    state, params = _pure(state), _pure(params)
    shapes, treedef = jax.tree.flatten(state_shapes(tx, params))
    want = treedef.unflatten(Wanted(i, leaf) for i, leaf in enumerate(shapes))
    given = Given(use_grad_mean, weight, update_step, cast, settings_of(tx))
    leaves = treedef.flatten_up_to(_converted(given, "state", want, state))
    return treedef.unflatten(_own(_filled(leaves, tx, params)))


def _check_arguments(state: Any, tx: Any, weight: Any, update_step: Any) -> None:
    if not callable(getattr(tx, "init", None)):
        given = callable(getattr(state, "init", None))
        raise TypeError(
            f"tx is a {type(tx).__name__}, expected an optax.GradientTransformation"
            f"{', which was given as the state' if given else ''}; type "
            "oa.convert_state(state, tx, params)."
        )
    if update_step is not None:
        whole = _checks.is_scalar(update_step, jnp.integer) and not _checks.is_traced(update_step)
        if not whole or int(update_step) < 0:
            raise ValueError(
                f"update_step is {update_step!r}, expected the number of updates made so far, an "
                "integer of 0 or more."
            )
    fields = set(optax.MultiStepsState._fields)

    def is_multi(node: Any) -> bool:
        keys = node if isinstance(node, Mapping) else getattr(node, "_fields", ())
        return set(keys) == fields

    if weight is not None and not any(map(is_multi, jax.tree.leaves(state, is_leaf=is_multi))):
        raise ValueError(
            "weight was given, and the state holds no window of optax.MultiSteps; leave it out: "
            "the windows of accumulate know what they weigh."
        )


def _pure(tree: Any) -> Any:
    """The tree with what NNX's Variables hold."""

    def is_variable(node: Any) -> bool:
        return hasattr(type(node), "get_value") and hasattr(type(node), "set_value")

    return jax.tree.map(lambda x: x.get_value() if is_variable(x) else x, tree, is_leaf=is_variable)


# The walk.


def _converted(given: Given, at: str, want: Any, state: Any) -> Any:
    """`state` in the structure of `want`; `at` says where it was found."""
    state = _named(state, want)
    if isinstance(want, AccumulateState):
        at_inner, ours = _windows.converted(given, at, want, state)
        inside = _windows.inside(given, state)
        inner_state = _converted(inside, at_inner, want.inner_state, ours.inner_state)
        return ours._replace(inner_state=inner_state)
    if isinstance(state, WINDOWS) and type(state) is not type(want):
        name, inner_state = _windows.emptied(at, state)
        return _converted(given, f"{at}.{name}", want, inner_state)
    if isinstance(want, Wanted):
        return _leaf(given, at, want.like, state)
    children, treedef = _one_level(want)
    others, other_treedef = _one_level(state)
    if treedef != other_treedef or [k for k, _ in children] != [k for k, _ in others]:
        raise ValueError(
            f"{at} is {_windows.shown(state)}, expected {_windows.shown(want)}: "
            f"{_windows.remedy(state)}."
        )
    pairs = zip(children, others, strict=True)
    return treedef.unflatten(
        _converted(given, at + jax.tree_util.keystr((key,)), a, b) for (key, a), (_, b) in pairs
    )


def _one_level(node: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """The children of a node with their keys, and what holds them."""
    children, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    return [(path[0] if path else None, child) for path, child in children], treedef


def _named(state: Any, want: Any) -> Any:
    """What Orbax restores without a target, dicts and lists, as the NamedTuples and tuples."""
    if isinstance(state, Mapping):
        for kind in (type(want), *WINDOWS):
            if state.keys() == set(getattr(kind, "_fields", ())) != set():
                return kind(**state)
    if isinstance(want, tuple):
        if state is None and not jax.tree.leaves(want):
            return want
        if isinstance(state, list) and not hasattr(want, "_fields"):
            return tuple(state)
    return state


def _leaf(given: Given, at: str, like: Any, leaf: Any) -> Any:
    """A leaf that has to be as it is in `tx.init(params)`."""
    if not isinstance(like, jax.ShapeDtypeStruct):
        return like  # a function, a string
    if not (_checks.is_array(leaf) or _checks.is_key(leaf)):
        raise TypeError(f"{at} is {_windows.shown(leaf)}, expected {_windows.shown(like)}.")
    if jnp.shape(leaf) != like.shape:
        raise ValueError(
            f"{at} has shape {jnp.shape(leaf)}, expected {like.shape}; give the parameters and the "
            "optimizer that made the state."
        )
    return _windows.in_dtype(given, at, like.dtype, leaf)


# What `tx.init` has to make, and buffers.


def _filled(leaves: list[Any], tx: optax.GradientTransformation, params: Any) -> list[Any]:
    """The leaves, wanted ones made by a `tx.init` of which nothing else is computed."""
    numbers = [leaf.number for leaf in leaves if isinstance(leaf, Wanted)]
    if not numbers:
        return leaves
    given, treedef = jax.tree.flatten(params)

    def made(arrays: list[Any]) -> list[Any]:
        rest = iter(arrays)
        whole = [next(rest) if _checks.is_array(leaf) else leaf for leaf in given]
        fresh = jax.tree.leaves(tx.init(treedef.unflatten(whole)))
        return [strong(fresh[number]) for number in numbers]

    arrays = [leaf for leaf in given if _checks.is_array(leaf)]
    fresh = iter(jax.jit(made, out_shardings=_places(tx, params, numbers))(arrays))
    return [next(fresh) if isinstance(leaf, Wanted) else leaf for leaf in leaves]


def _places(tx: optax.GradientTransformation, params: Any, numbers: list[int]) -> Any:
    """Where leaves lie beside the parameters; None where jax may choose."""
    rows = any(each.has_rows for each in outermost_states(state_shapes(tx, params)))
    leaves = jax.tree.leaves(params)
    if rows or not leaves or not all(isinstance(leaf, jax.Array) for leaf in leaves):
        return None
    shardings = jax.tree.leaves(state_shardings(tx, params))
    return [shardings[number] for number in numbers]


def _own(leaves: list[Any]) -> list[Any]:
    """Strongly typed arrays, none of which occurs twice, so that all can be donated."""
    seen: set[int] = set()
    out = []
    for leaf in leaves:
        if _checks.is_array(leaf) or _checks.is_key(leaf):
            leaf = jnp.copy(leaf) if id(leaf) in seen else leaf
            seen.add(id(leaf))
            leaf = leaf if _checks.is_key(leaf) else strong(jnp.asarray(leaf))
        out.append(leaf)
    return out
