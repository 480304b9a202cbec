"""Flax NNX: `value_and_grad` with objects as arguments, and an optimizer that works in place."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

try:
    from flax import nnx
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'optax_accum.nnx needs Flax, which is not installed; type pip install "optax-accum[flax]".'
    ) from error

from optax_accum import _axis, _checks, _loop, _nnx_graph, _nnx_roles, _nnx_trial
from optax_accum._nnx_optimizer import Optimizer
from optax_accum._program import Whole


def value_and_grad(
    loss_fn: Callable[..., Any],
    k: int | None = None,
    *,
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    wrt: Any = nnx.Param,
    has_aux: bool = False,
    batch_argnums: int | Sequence[int] = 1,
    rng_argnums: int | Sequence[int] = (),
    has_stats: bool = False,
    **options: Any,
) -> Callable[..., Any]:
    """`flax.nnx.value_and_grad(loss_fn)` of a whole batch, computed micro-batch by micro-batch.

    ::

        for i in range(k):
            loss[i], gradient[i] = nnx.value_and_grad(loss_fn)(model, micro_batch[i])
        loss = sum(w * loss) / sum(w)
        gradient = sum(w * gradient) / sum(w)

    in one compiled loop, by :func:`optax_accum.value_and_grad`. What the forward pass writes into
    the objects among the arguments is there after the call, as after that loop:

    * Random streams (`nnx.Rngs`, dropout) count on from micro-step to micro-step, so that all masks
      differ. On replicas (`mesh`, `axis_name`) each micro-step has keys folded with its number and
      the replica's, and a call moves the counts as far as one micro-step does.
    * Running statistics of BatchNorm, and of any layer with `mean`, `var` (`nnx.BatchStat`) and
      `momentum`, become those of the window by the law of total variance, and move once
      (:func:`optax_accum.merge_batch_stats`). Normalisation itself is per micro-batch. A layer that
      is called twice in one forward pass moves twice: the variance between micro-batches is then
      overstated, about twice; give each call a layer of its own.
    * Every other Variable is handed on in order; on replicas, which have no order, that is an
      error.
    * What is not written to is not copied: frozen parameters cost nothing.

    Variables that come into being in the forward pass (`sow`, a cache) are an error, since a
    compiled loop has a fixed state.

    Args:
      loss_fn: takes objects and arrays, `(model, batch)` say, and returns a real floating scalar,
        or `(loss, aux)` with `has_aux`.
      k: micro-batches in the batch. Give it or `micro_batch_size`; neither if stacked.
      argnums: the arguments to differentiate; `nnx.DiffState(0, filter)` has its own `wrt`. An
        argument may hold several objects, and arrays, which are differentiated themselves.
      wrt: the filter of what is differentiated: `nnx.Param`, `nnx.LoRAParam`, any NNX filter.
      has_aux: whether `loss_fn` returns auxiliary outputs.
      batch_argnums: the arguments that are cut, every leaf along its leading axis.
      rng_argnums: arguments of plain PRNG keys. Streams inside objects need no mention.
      has_stats: adds `Stats(weight, skipped)` to the value.
      **options: `micro_batch_size`, `weight`, `loss_reduction`, `aux`, `nonfinite`,
        `accumulator_dtype`, `engine`, `batch_layout`, `remainder`, `axis_name`, `mesh`,
        `batch_axes`, `grad_specs` and `gather`, as in :func:`optax_accum.value_and_grad`. A
        micro-batch that is dropped or has no weight leaves the objects as they were.

    Returns:
      A function of the same arguments that returns `(value, gradients)` like
      `nnx.value_and_grad`: of an object an `nnx.State` of what `wrt` selects.

    Raises:
      ValueError, TypeError: for arguments that do not fit, and for a forward pass that changes
        objects in a way that no loop could; the message says what to type.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import optax_accum as oa
      >>> model = nnx.BatchNorm(1, momentum=0.0, use_bias=True, rngs=nnx.Rngs(0))
      >>> loss_fn = lambda model, x: jnp.mean(model(x) + x)
      >>> x = jnp.array([[0.0], [10.0], [2.0], [12.0]])  # micro-batches (0, 2) and (10, 12)
      >>> loss, grads = oa.nnx.value_and_grad(loss_fn, k=2)(model, x)
      >>> float(loss), grads["bias"][...].tolist(), model.var[...].tolist()
      (6.0, [1.0], [26.0])
    """
    _check_loss_fn(loss_fn, options)
    chosen = _chosen(argnums, wrt)
    batch = _checks.indices("batch_argnums", batch_argnums)
    rngs = _checks.indices("rng_argnums", rng_argnums)
    numbers = tuple(chosen) if isinstance(argnums, Sequence) else next(iter(chosen))
    options |= {"argnums": numbers, "batch_argnums": batch}
    options |= {"has_aux": has_aux, "has_stats": has_stats}
    _loop.value_and_grad(loss_fn, k, rng_argnums=rngs, **options)  # checks them

    @functools.wraps(loss_fn)
    def value_and_grad_fn(*args: Any, **kwargs: Any) -> Any:
        _check_arguments(args, (*chosen, *batch, *rngs), (*batch, *rngs))
        arguments = [*args, kwargs]
        _nnx_graph.check_shared(arguments, chosen)
        apart = _nnx_graph.take_apart(arguments, chosen)
        written = _nnx_trial.written(loss_fn, k, chosen, options, apart)
        changed = set() if isinstance(written, Exception) else written
        statistics = _nnx_graph.running_statistics(arguments)
        roles = _nnx_roles.roles(apart.items, changed, statistics, _mapped(options))
        pure = _loss_of_trees(loss_fn, has_aux, chosen, apart, roles, written)
        values = [item.value for item in apart.items]
        state, keys = _nnx_roles.state_of(roles, values), _nnx_roles.keys_of(roles, apart.items)
        moving = _nnx_roles.numbered(roles, state)
        fixed = Whole([None if i in moving else value for i, value in enumerate(values)])
        accumulated = _loop.value_and_grad(
            pure,
            k,
            rng_argnums=(*rngs, len(args) + 1) if keys else rngs,
            state_argnum=len(args),
            merge_state=_nnx_roles.merge_of(roles, state),
            **options,
        )
        (loss, state, *stats), grads = accumulated(
            *apart.trees[:-1], state, keys, fixed, **apart.trees[-1]
        )
        state, *aux = state if has_aux else (state,)
        _nnx_graph.write_back(arguments, apart.frame, _nnx_roles.numbered(roles, state))
        value = (loss, *aux, *stats)
        return (value if len(value) > 1 else loss), grads

    return value_and_grad_fn


def _loss_of_trees(
    loss_fn: Any, has_aux: bool, chosen: Any, apart: Any, roles: Any, written: Any
) -> Callable[..., Any]:
    """The loss as a function of trees, the state, the keys, and all that stays the same."""

    @functools.wraps(loss_fn)
    def loss_of_trees(*full: Any, **kwargs: Any) -> Any:
        *trees, before, keys, fixed = full
        new = _nnx_roles.numbered(roles, before) | _nnx_roles.with_keys(roles, apart.items, keys)
        values = [new.get(i, value) for i, value in enumerate(fixed.tree)]
        arguments = _nnx_graph.put_together(apart.frame, [*trees, kwargs], values)
        out = loss_fn(*arguments[:-1], **arguments[-1])
        frame, _, items = _nnx_graph.take_apart(arguments, chosen)
        _nnx_graph.check_same(apart.frame, frame, values, items)
        if isinstance(written, Exception):
            _nnx_trial.check_untouched(values, items, written)
        state = _nnx_roles.state_of(roles, [item.value for item in items])
        state = jax.tree.map(_laid_out_like, state, before)
        if not has_aux:
            return out, state
        try:
            loss, aux = out
        except (TypeError, ValueError):
            raise TypeError(
                f"loss_fn returned {_checks.described(out)}, expected (loss, aux) with has_aux."
            ) from None
        return loss, (state, aux)

    return loss_of_trees


def _laid_out_like(new: Any, old: Any) -> Any:
    """Flax lays running statistics out like the activations, as soon as they first move."""
    return _axis.sharded_like(new, old) if jnp.shape(new) == jnp.shape(old) else new


def _mapped(options: dict[str, Any]) -> bool:
    return bool(options.get("mesh")) or options.get("axis_name") is not None


def _chosen(argnums: Any, wrt: Any) -> dict[int, Any]:
    """What is differentiated of each argument: a filter by its number."""
    each = argnums if isinstance(argnums, Sequence) else (argnums,)
    pairs = [(a.argnum, a.filter) if isinstance(a, nnx.DiffState) else (a, wrt) for a in each]
    numbers = _checks.indices("argnums", [number for number, _ in pairs])
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(f"argnums is {argnums!r}, expected one or more different arguments.")
    return dict(zip(numbers, [chosen for _, chosen in pairs], strict=True))


def _check_loss_fn(loss_fn: Any, options: dict[str, Any]) -> None:
    if reserved := {"state_argnum", "merge_state"} & options.keys():
        raise TypeError(
            f"oa.nnx.value_and_grad got {sorted(reserved)}, expected neither: the state of objects "
            "is found, and written back, by itself."
        )
    if inspect.ismethod(loss_fn) and _nnx_graph.is_node(loss_fn.__self__):
        raise TypeError(
            f"loss_fn is a method bound to a {type(loss_fn.__self__).__name__}, which would be no "
            "argument of it; type lambda model, batch: model.loss(batch)."
        )


def _check_arguments(args: Any, wanted: Any, plain: Any) -> None:
    if max(wanted) >= len(args):
        raise TypeError(
            f"loss_fn was called with {len(args)} positional arguments, expected at least "
            f"{max(wanted) + 1}; pass the model, the batch and keys by position, or type argnums=, "
            "batch_argnums=, rng_argnums= for where they are."
        )
    for i in plain:
        if any(map(_nnx_graph.is_node, jax.tree.leaves(args[i], is_leaf=_nnx_graph.is_node))):
            raise TypeError(
                f"argument {i} holds an NNX object, expected arrays: the batch is cut and keys are "
                "folded, while objects keep random streams of their own; type batch_argnums= for "
                "the arguments that hold the batch."
            )


Optimizer.__module__ = __name__  # where users find it: tracebacks, help() and pickles say so
