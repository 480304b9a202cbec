"""The space driver before its loop: the user's loss, the weights, the engine."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum import _accumulator as acc
from optax_accum import _axis, _checks, _engines, _fits, _shares, _split


class Settings(NamedTuple):
    loss_fn: Callable[..., Any]
    k: int | None
    micro_batch_size: int | None
    argnums: tuple[int, ...]
    has_aux: bool
    batch_argnums: tuple[int, ...]
    rng_argnums: tuple[int, ...]
    state_argnum: int | None
    merge_state: Any
    weight: Callable[..., Any] | None
    loss_reduction: str
    aux: Any
    nonfinite: str
    accumulator_dtype: Any
    engine: str
    batch_layout: str
    remainder: str
    axis_name: _axis.AxisName | None = None
    scattered: Any = None  # for each leaf of the gradients {axes: dimension} left in shards
    layout: Any = None  # for each leaf a PartitionSpec over the axes left to the compiler
    gather: bool = False  # the parameters come in such shards, and each micro-step gathers them


class Whole(NamedTuple):
    """An argument that is known to be no part of the batch, whatever its length."""

    tree: Any


class MicroBatch(NamedTuple):
    """What differs between the micro-steps of one call; stacked, all of them."""

    number: jax.Array  # dtype=jnp.int32
    batch: tuple[Any, ...]
    weight: jax.Array  # dtype of the loss, float32 or wider; so are the next two
    fraction: jax.Array  # of the whole weight
    seed: jax.Array  # what the backward pass starts from
    computed: jax.Array  # whether it is computed at all


class Program(NamedTuple):
    """One call, its choices made."""

    settings: Settings
    loss: Callable[..., tuple[jax.Array, tuple[Any, Any]]]  # (primals, micro_batch, state)
    primals: tuple[Any, ...]
    state: Any
    shapes: Any  # (loss, (state, aux)) of a micro-batch
    how: list[str]  # a reducer a leaf of aux
    engine: str  # "carry", "refs" or, for one micro-batch, "alone"
    together: bool  # the loss communicates between replicas, so all compute or none
    shards: tuple[Any, ...]  # the primals as they were given


def normalized(settings: Settings, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The loss as (primals, micro_batch, state) -> (loss, (new state, aux))."""

    def fold(key: jax.Array, number: jax.Array) -> jax.Array:
        return _axis.folded_key(jax.random.fold_in(key, number), settings.axis_name)

    def loss(primals: tuple[Any, ...], micro_batch: MicroBatch, state: Any) -> Any:
        full = jax.tree.map(
            lambda leaf: leaf, list(args)
        )  # Flax's variables: new ones, to write to
        for i, leaf in zip(settings.batch_argnums, micro_batch.batch, strict=True):
            full[i] = leaf
        for i in settings.rng_argnums:
            full[i] = jax.tree.map(lambda key: fold(key, micro_batch.number), args[i])
        if settings.state_argnum is not None:
            full[settings.state_argnum] = jax.tree.map(lambda leaf: leaf, state)
        for i, primal in zip(settings.argnums, primals, strict=True):
            full[i] = primal
        out = settings.loss_fn(*full, **kwargs)
        value, rest = unpacked(out, settings.has_aux, settings.state_argnum)
        _fits.check_own_loss(value, settings.axis_name)
        return value, rest

    return loss


def unpacked(
    out: Any, has_aux: bool, state_argnum: int | None = None
) -> tuple[Any, tuple[Any, Any]]:
    """What a loss function returned, as (loss, (new state, aux))."""
    threaded = state_argnum is not None
    if not (threaded or has_aux):
        return _number(out), (None, None)
    try:
        loss, rest = out
        state, aux = rest if threaded and has_aux else (rest, rest)
    except (TypeError, ValueError):
        expected = {
            (True, False): "(loss, new_state)",
            (False, True): "(loss, aux)",
            (True, True): "(loss, (new_state, aux))",
        }[threaded, has_aux]
        raise TypeError(
            f"loss_fn returned {_checks.described(out)}, expected {expected} with "
            f"has_aux={has_aux}, state_argnum={state_argnum}."
        ) from None
    return _number(loss), (state if threaded else None, aux if has_aux else None)


def _number(loss: Any) -> Any:
    return jnp.asarray(loss) if isinstance(loss, (bool, int, float, complex)) else loss


def shapes(loss: Any, primals: Any, batch: Any, state: Any, whole: str) -> Any:
    """What the loss of a micro-batch returns. `whole` tells of uncut arguments, if there are."""
    try:
        shapes = jax.eval_shape(lambda p, b: loss(p, any_micro_batch(b), state), primals, batch)
    except Exception as error:
        if type(error).__name__ == "ShardingTypeError":  # a loss for which jax has no such rule
            error.add_note(
                "optax_accum: with value_and_grad(mesh=...) the batch axes are mapped by hand, and "
                "the loss needs no out_sharding."
            )
        if whole:
            error.add_note(f"optax_accum: {whole}")
        raise
    check_loss(shapes[0])
    return shapes


def uncut(
    settings: Settings, args: tuple[Any, ...], kwargs: dict[str, Any], into: _split.Sizes
) -> str:
    """Of arguments that look like parts of the batch, and are given whole to every micro-step.

    With micro-batches of one example they would be broadcast against it, silently. So would masks
    of a key that all micro-steps are given be the same.
    """
    roles = (*settings.argnums, *settings.batch_argnums, *settings.rng_argnums)
    roles += () if settings.state_argnum is None else (settings.state_argnum,)
    others = {i: arg for i, arg in enumerate(args) if i not in roles} | kwargs
    others = {name: arg for name, arg in others.items() if not isinstance(arg, Whole)}
    examples = into.k * into.m + into.r
    found = [
        name
        for name, arg in others.items()
        if examples > 1 and any(np.shape(x)[:1] == (examples,) for x in jax.tree.leaves(arg))
    ]
    told = ""
    if found:
        what = "as long as the batch, is not cut into micro-batches"
        for_all = "for all arguments that hold the batch"
        told = _retyped("batch_argnums", settings.batch_argnums, found, what, for_all)
    if found and max(into.m, into.r) == 1:
        warnings.warn(told, stacklevel=4)
    keys = [name for name, arg in others.items() if name not in found and _holds_keys(arg)]
    if keys and into.k + bool(into.r) > 1:
        what = "a PRNG key, is the same in all micro-steps, so that masks repeat"
        each = "and each gets a key of its own"
        told_keys = _retyped("rng_argnums", settings.rng_argnums, keys, what, each)
        warnings.warn(told_keys, stacklevel=4)
    return told


def _holds_keys(arg: Any) -> bool:
    """Whether it is a typed key, or a tree of nothing else."""
    leaves = jax.tree.leaves(arg)
    return bool(leaves) and all(map(_checks.is_key, leaves))


def _retyped(keyword: str, known: tuple[int, ...], found: list[Any], what: str, why: str) -> str:
    """What some arguments are, numbers or names, and the keyword to type."""
    numbers = sorted({*known, *(name for name in found if isinstance(name, int))})
    typed = str(numbers[0]) if len(numbers) == 1 else str(tuple(numbers))
    named = [f"argument {name}" if isinstance(name, int) else name for name in found]
    by_name = [name for name in found if not isinstance(name, int)]
    more = f", and pass {' and '.join(by_name)} by position" if by_name else ""
    choice = f"{keyword}={typed}" if numbers else f"{keyword}="
    return f"{' and '.join(named)} of loss_fn, {what}; type {choice} {why}{more}."


def any_micro_batch(batch: Any) -> MicroBatch:
    """For shapes, where the numbers do not matter."""
    zero = jnp.zeros([], jnp.float32)
    return MicroBatch(jnp.zeros([], jnp.int32), batch, zero, zero, zero, jnp.ones([], bool))


def check_loss(loss: Any) -> None:
    if not _checks.is_scalar(loss, jnp.floating):
        raise TypeError(
            f"loss_fn returned {_checks.described(loss)}, expected a real floating scalar; "
            "type has_aux=True if it returns (loss, aux), or average the loss over the examples."
        )


def together(
    settings: Settings, loss: Any, primals: Any, batch: Any, state: Any, value: Any
) -> bool:
    """Whether no replica may leave a micro-batch out by itself."""
    if settings.weight is None:
        return False

    def one(primals: Any, batch: Any, state: Any) -> Any:
        loss_of = lambda *p: loss(p, any_micro_batch(batch), state)  # noqa: E731
        return _engines.micro_gradient(loss_of, primals, 1.0)

    narrow = value.dtype.itemsize < 4 and settings.loss_reduction == "mean"
    if narrow and _axis.mixes(one, settings.axis_name, primals, batch, state):
        _fits.check_wide(value)
    return _axis.communicates(one, settings.axis_name, primals, batch, state)


def weighed(
    settings: Settings, stacked: Any, rest: Any, into: _split.Sizes, dtype: Any, together: bool
) -> tuple[MicroBatch, MicroBatch | None, jax.Array]:
    """What goes with each of the k micro-batches; the last one; the whole weight."""
    wide = _fits.promoted(dtype, jnp.float32)
    weights = _weights(settings, stacked, (into.k,), into.m, wide)
    tail = _weights(settings, rest, (), into.r, wide) if into.r else jnp.zeros([], wide)
    counted = _counted(settings, jnp.append(weights, tail))
    whole = _axis.total(jnp.sum(counted), settings.axis_name)
    alone = into.k + (rest is not None) == 1 and settings.axis_name is None
    share = _shares.shares(settings.loss_reduction, whole, wide, alone)

    def computed(weights: jax.Array) -> jax.Array:
        if together and settings.axis_name is None:
            return jnp.ones_like(weights, bool)  # the replicas' axes are unknown here
        return _axis.anywhere(weights != 0, settings.axis_name if together else None)

    numbers = jnp.arange(into.k, dtype=jnp.int32)
    plan = MicroBatch(numbers, (), weights, *share(weights), computed(weights))
    if rest is None:
        return plan, None, whole
    number = jnp.full([], into.k, jnp.int32)
    return plan, MicroBatch(number, rest, tail, *share(tail), computed(tail)), whole


def _counted(settings: Settings, weights: jax.Array) -> jax.Array:
    """What is no weight is a micro-batch that is not finite: to be dropped, or NaN."""
    otherwise = 0 if settings.nonfinite == "skip_micro_step" else jnp.nan
    return jnp.where(acc.is_weight(weights), weights, otherwise)


def _weights(
    settings: Settings, batch: Any, shape: tuple[int, ...], examples: int, dtype: Any
) -> jax.Array:
    """Evaluated before the loop, so that each backward pass starts from its share."""
    weight = settings.weight
    if weight is None:
        return jnp.full(shape, examples, dtype)

    def weigh(micro_batch: tuple[Any, ...], weight: Callable[..., Any] = weight) -> jax.Array:
        return _checks.real_scalar("what weight returned", weight(*micro_batch), dtype)

    axis = _split.axis_of(settings.batch_layout)
    weights = jax.vmap(weigh, in_axes=axis)(batch) if shape else weigh(batch)
    if not _checks.is_traced(weights):
        for weight in weights.ravel().tolist():
            _checks.known_weight(weight)
    return weights


def engine_of(program: Program, one: Any, args: Any) -> str:
    """The engine for these arguments."""
    settings, primals = program.settings, program.primals

    def trial(batch: Any, *primals: Any) -> Any:
        return program.loss(primals, any_micro_batch(batch), program.state)

    def why_not() -> str | None:
        if program.together:
            return _engines.TOGETHER
        sums = acc.open_window(primals, settings.accumulator_dtype).grad_sum
        sums = _axis.own(sums, settings.axis_name)
        narrow = program.shapes[0].dtype.itemsize < 4
        return _engines.obstacle(trial, one, primals, sums, settings.nonfinite, narrow)

    return _engines.chosen(settings.engine, args, why_not)
