"""The space driver: a whole batch in one call, in the memory of one micro-batch."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from optax_accum import _axis, _checks, _engines, _merging, _mesh, _scan, _split
from optax_accum._program import Settings


def value_and_grad(
    loss_fn: Callable[..., Any],
    k: int | None = None,
    *,
    micro_batch_size: int | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    batch_argnums: int | Sequence[int] = 1,
    rng_argnums: int | Sequence[int] = (),
    state_argnum: int | None = None,
    merge_state: Any = None,
    weight: Callable[..., Any] | None = None,
    loss_reduction: str = "mean",
    aux: Any = None,
    nonfinite: str = "propagate",
    accumulator_dtype: Any = None,
    engine: str = "auto",
    batch_layout: str = "strided",
    remainder: str = "error",
    has_stats: bool = False,
    axis_name: str | tuple[str, ...] | None = None,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | bool | None = None,
    batch_axes: str | Sequence[str] = "data",
    grad_specs: Any = None,
    gather: str = "window",
) -> Callable[..., Any]:
    """`jax.value_and_grad(loss_fn)` of a whole batch, computed micro-batch by micro-batch.

    ::

        for i in range(k):
            loss[i], gradient[i] = value_and_grad(loss_fn)(params, micro_batch[i])
        loss = sum(w * loss) / sum(w)
        gradient = sum(w * gradient) / sum(w)

    All weights are known before the loop, so each backward pass starts from `w_i / sum(w)` and
    nothing is left to divide. The loop compiles once, whatever k is.

    Loss terms with different denominators (a token mean and a router's mean over examples): take
    each denominator over the whole batch before the call, pass it as an argument that is not cut,
    return `tokens.sum() / all_tokens + c * router.sum() / all_examples`, and type
    `loss_reduction="sum"`, without `weight`. A term of no example, such as a penalty on parameters,
    is divided by the number of micro-steps. Or call once a term, and add the gradients. A product
    of means over the batch is no such sum: it needs its statistics first.

    Args:
      loss_fn: returns a real floating scalar; `(loss, aux)` with `has_aux`; `(loss, new_state)`
        with `state_argnum`; `(loss, (new_state, aux))` with both. Differentiable as by jax.
      k: micro-batches in the batch. Give it or `micro_batch_size`; neither if stacked.
      micro_batch_size: examples in a micro-batch; of one replica, as k is, where there are several.
      argnums: the arguments to differentiate, as in `jax.value_and_grad`.
      has_aux: whether `loss_fn` returns auxiliary outputs.
      batch_argnums: the arguments that are cut, every leaf along its leading axis.
      rng_argnums: arguments of PRNG keys, folded with the index of the micro-step: give every
        call a key of its own.
      state_argnum: one argument of model state, handed from micro-step to micro-step.
      merge_state: every micro-step starts from the same state instead, and
        `merge_state(initial, stacked, weights)` makes the new one. Or a tree prefix of such
        functions, None where the state is handed on.
      weight: how much a micro-batch counts, a function of its `batch_argnums` (default: its
        examples). At 0 it is not computed at all.
      loss_reduction: `"mean"`, `"sum"` or `"sum_over_weight"`, as in `accumulate`.
      aux: how auxiliary outputs combine: `"mean"` (elementwise, weighted), `"sum"`, `"max"`,
        `"min"`, `"last"`, `"stack"` (a row a micro-step) or `"concat"` (per-example results in the
        batch's order), or a tree prefix of these. None: floating scalars by their mean.
      nonfinite: `"propagate"`, or `"skip_micro_step"`: a micro-batch whose gradients are not finite
        is dropped with its weight, loss, aux and model state. Where nothing is kept at all, loss
        and gradients are zeros: `Stats.weight` tells.
      accumulator_dtype: of the sums; None: `promote_types(gradient, float32)`.
      engine: `"carry"` adds each gradient to the window, `"refs"` lets the backward pass add into
        it in place, `"auto"` takes refs where it can. Under `jax.vmap` of a jitted call, and where
        a surrounding `scan` or `jax.checkpoint` is differentiated, type `engine="carry"`: jax does
        not let this be seen from inside, and refs raise there.
      batch_layout: `"strided"` (example j goes to micro-batch j mod k: no data moves where the
        batch is sharded), `"contiguous"` (neighbours stay together), `"stacked"` (leaves are
        `(k, m, ...)` already).
      remainder: `"error"`, or `"exact"`: one smaller micro-batch at the end.
      has_stats: adds `Stats(weight, skipped)` to the value.
      axis_name: inside `jax.shard_map` or `jax.pmap`: the mapped axis (or axes) over which replicas
        share the batch, k micro-batches each. The total of the weights is reduced before the loop,
        everything else once after it. Results are the same on all replicas, except rows of
        `"stack"` and `"concat"`, which stay each one's own. A parameter of which jax knows
        (by `check_vma=True`) that it varies along the axis is that replica's own, and so is its
        gradient; unchecked, all gradients are summed. A loss that communicates itself (BatchNorm's
        `axis_name`) is computed by all replicas or by none, and guards its own denominators against
        a replica without weight. Keys are folded with the replica's number too. What is not finite
        is dropped by the replica that has it.
      mesh: outside of them: the mesh, or True for the arguments'. Every gradient byte is then
        reduced once, after the loop, where plain `jit` reduces once a micro-batch. Only
        `batch_axes` are mapped by hand, other axes (tensor parallelism) are left to the compiler.
        Parameters in shards over the batch axes (FSDP) are gathered once. `"stack"` gives k rows a
        replica. Batches may lie anywhere; in shards over their examples they do not move. On
        several hosts make them by `jax.make_array_from_process_local_data` of each process's part:
        a NumPy array is taken for the whole batch, the same in every process.
      batch_axes: the mesh axes over which the examples are shared, one name or several.
      grad_specs: a tree prefix of `PartitionSpec`s: gradients come in these shards over the batch
        axes, by a reduce-scatter (ZeRO-1 and 2). Automatic axes named in them (tensor parallelism)
        are those of the window, which the compiler else lays out as it likes: a whole embedding on
        every device, in places. None: like the parameters where their types show shards (explicit
        axes), else whole.
      gather: `"window"`, or `"micro_batch"`: the parameters come in the shards of `grad_specs` too,
        and each micro-step gathers them anew, for k times the traffic.

    Returns:
      A function of the same arguments that returns `(value, gradients)`, where the value is what
      `loss_fn` returns, and `(*value, stats)` with `has_stats`.

    Raises:
      ValueError, TypeError: for arguments that do not fit; the message says what to type.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import optax_accum as oa
      >>> loss_fn = lambda w, x: jnp.mean((x - w) ** 2)
      >>> x = jnp.arange(8.0)
      >>> value, grad = oa.value_and_grad(loss_fn, k=4)(jnp.zeros([]), x)
      >>> float(value), float(grad)
      (17.5, -7.0)
    """
    if (k is None) == (micro_batch_size is None) and not (
        batch_layout == "stacked" and k is None and micro_batch_size is None
    ):
        raise ValueError(
            f"k is {k} and micro_batch_size {micro_batch_size}, expected one of them; type "
            "value_and_grad(loss_fn, k=8) or value_and_grad(loss_fn, micro_batch_size=4)."
        )
    _checks.function("loss_fn", loss_fn)
    _merging.check(merge_state)
    _checks.choice("batch_layout", batch_layout, _split.LAYOUTS)
    _checks.choice("remainder", remainder, ("error", "exact"))
    _checks.choice("engine", engine, _engines.ENGINES)
    _checks.choice("loss_reduction", loss_reduction, _checks.LOSS_REDUCTIONS)
    _checks.choice("nonfinite", nonfinite, ("propagate", "skip_micro_step"))
    _checks.weight_function(weight, loss_reduction)
    if merge_state is not None and state_argnum is None:
        raise ValueError(
            "merge_state was given without state_argnum; type state_argnum= for the argument that "
            "holds the model's state."
        )
    settings = Settings(
        loss_fn,
        None if k is None else _checks.whole("k", k),
        None if micro_batch_size is None else _checks.whole("micro_batch_size", micro_batch_size),
        _checks.indices("argnums", argnums),
        has_aux,
        _checks.indices("batch_argnums", batch_argnums),
        _checks.indices("rng_argnums", rng_argnums),
        state_argnum,
        merge_state,
        weight,
        loss_reduction,
        aux,
        nonfinite,
        _checks.accumulator_dtype(accumulator_dtype),
        engine,
        batch_layout,
        remainder,
        _checks.axis_name(axis_name),
    )
    _check_apart(settings)
    _check_replicas(settings, mesh, grad_specs, gather)
    if grad_specs is not None and not isinstance(argnums, (list, tuple)):
        grad_specs = (grad_specs,)
    where = _mesh.across(mesh, batch_axes, grad_specs, gather) if mesh else None

    @functools.wraps(loss_fn)
    def value_and_grad_fn(*args: Any, **kwargs: Any) -> Any:
        _check_count(settings, args)
        if where is None:
            _check_bound(settings)
            outcome = _scan.evaluate(settings, args, kwargs)
        else:
            outcome = _mesh.evaluate(settings, where, args, kwargs)
        grads = outcome.grads
        if not isinstance(argnums, (list, tuple)):
            (grads,) = grads
        value: tuple[Any, ...] = (outcome.loss,)
        if state_argnum is not None and has_aux:
            value += ((outcome.state, outcome.aux),)
        elif state_argnum is not None:
            value += (outcome.state,)
        elif has_aux:
            value += (outcome.aux,)
        if has_stats:
            value += (outcome.stats,)
        return (outcome.loss if len(value) == 1 else value), grads

    return value_and_grad_fn


def _check_apart(settings: Settings) -> None:
    roles = {
        "argnums": settings.argnums,
        "batch_argnums": settings.batch_argnums,
        "rng_argnums": settings.rng_argnums,
        "state_argnum": () if settings.state_argnum is None else (settings.state_argnum,),
    }
    seen: dict[int, str] = {}
    for role, indices in roles.items():
        for index in indices:
            if seen.get(index) == role:
                raise ValueError(f"{role} holds argument {index} twice, expected it once.")
            if index in seen:
                raise ValueError(
                    f"argument {index} is in {seen[index]} and in {role}, expected in one of them; "
                    f"type {role}= for another argument of loss_fn."
                )
            if index < 0:
                raise ValueError(
                    f"{role} holds {index}, expected 0 or more, counted from the left."
                )
            seen[index] = role
    if not settings.batch_argnums:
        raise ValueError("batch_argnums is empty, expected the arguments that hold the batch.")


def _check_count(settings: Settings, args: tuple[Any, ...]) -> None:
    state = () if settings.state_argnum is None else (settings.state_argnum,)
    highest = max(*settings.argnums, *settings.batch_argnums, *settings.rng_argnums, *state, 0)
    if highest >= len(args):
        raise TypeError(
            f"loss_fn was called with {len(args)} positional arguments, expected at least "
            f"{highest + 1}; pass the differentiated, batch, key and state arguments by position, "
            "or type argnums=, batch_argnums=, rng_argnums=, state_argnum= for where they are."
        )


def _check_bound(settings: Settings) -> None:
    if settings.axis_name is not None and not _axis.is_bound(settings.axis_name):
        raise ValueError(
            f"value_and_grad(axis_name={settings.axis_name!r}) was called where no such axis is "
            "mapped; call it inside jax.shard_map or jax.pmap over that axis, or outside of them "
            "type mesh=your_mesh."
        )


def _check_replicas(settings: Settings, mesh: Any, grad_specs: Any, gather: str) -> None:
    if mesh and settings.batch_layout == "stacked" and "concat" in jax.tree.leaves(settings.aux):
        raise ValueError(
            "aux='concat' was given with batch_layout='stacked' and mesh, whose replicas hold "
            "parts of every micro-batch: the batch's order would take moving all of it; type "
            "aux='stack' (the rows of one replica after those of another), or another layout."
        )
    if mesh and settings.axis_name is not None:
        raise ValueError(
            f"axis_name is {settings.axis_name!r} and mesh was given, expected one of them: "
            "axis_name inside a shard_map or pmap, mesh outside of it."
        )
    if not mesh and (grad_specs is not None or gather != "window"):
        raise ValueError(
            "grad_specs or gather was given without mesh; type mesh=your_mesh. (Without mesh the "
            "gradients are sharded like the parameters, by the compiler.)"
        )
    handed_on = None in _merging.functions(settings.merge_state)
    threaded = settings.state_argnum is not None and handed_on
    if threaded and (mesh or settings.axis_name is not None):
        raise ValueError(
            "state_argnum without merge_state hands the state from micro-step to micro-step, which "
            "would differ between replicas; type merge_state=f, where f(initial, stacked, weights) "
            "makes one state of all micro-steps' states."
        )
