"""The space driver: a whole batch in one call, micro-batch by micro-batch."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_accum import _accumulator as acc
from optax_accum import _aux, _checks, _engines, _shares, _split
from optax_accum._cond import cond
from optax_accum._state import with_dtypes_of


class Stats(NamedTuple):
    """What a call of the space driver took in, beside its value and gradients."""

    weight: jax.Array  # shape=(), dtype=jnp.float32: of the micro-batches that were kept
    skipped: jax.Array  # shape=(), dtype=jnp.int32: micro-batches dropped as not finite


class Settings(NamedTuple):
    loss_fn: Callable[..., Any]
    k: int | None
    micro_batch_size: int | None
    argnums: tuple[int, ...]
    has_aux: bool
    batch_argnums: tuple[int, ...]
    rng_argnums: tuple[int, ...]
    state_argnum: int | None
    merge_state: Callable[..., Any] | None
    weight: Callable[..., Any] | None
    loss_reduction: str
    aux: Any
    nonfinite: str
    accumulator_dtype: Any
    engine: str
    batch_layout: str
    remainder: str


class MicroBatch(NamedTuple):
    """What differs between the micro-steps of one call; stacked, all of them."""

    index: jax.Array  # dtype=jnp.int32
    batch: tuple[Any, ...]
    weight: jax.Array  # dtype=jnp.float32
    fraction: jax.Array  # of the whole weight
    seed: jax.Array  # what the backward pass starts from


class Carry(NamedTuple):
    """What goes from one micro-step to the next."""

    window: acc.Window
    state: Any  # the model's
    totals: list[Any]  # of the auxiliary outputs
    skipped: jax.Array


class Rows(NamedTuple):
    """What is given back micro-step by micro-step."""

    aux: list[Any]
    state: Any  # None unless states are merged
    weight: jax.Array  # that was kept


class Program(NamedTuple):
    """One call, its choices made."""

    settings: Settings
    loss: Callable[..., tuple[jax.Array, tuple[Any, Any]]]  # (primals, micro_batch, state)
    primals: tuple[Any, ...]
    state: Any
    shapes: Any  # (loss, (state, aux)) of a micro-batch
    how: list[str]  # a reducer a leaf of aux
    engine: str  # "carry", "refs" or, for one micro-batch, "alone"


class Outcome(NamedTuple):
    """Of a whole batch."""

    loss: jax.Array
    state: Any
    aux: Any
    grads: tuple[Any, ...]
    stats: Stats


def evaluate(settings: Settings, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outcome:
    """The loss of a whole batch, and its gradients."""
    batch = tuple(args[i] for i in settings.batch_argnums)
    layout = settings.batch_layout
    into = _split.sizes(batch, settings.k, settings.micro_batch_size, layout, settings.remainder)
    stacked, rest = _split.cut(batch, into, layout)
    loss = _normalized(settings, args, kwargs)
    primals = tuple(args[i] for i in settings.argnums)
    state = None if settings.state_argnum is None else args[settings.state_argnum]
    one = jax.eval_shape(lambda b: _split.take(b, 0, layout), stacked) if into.k else rest
    shapes = _shapes(loss, primals, one, state)
    plan, last, whole = _weighed(settings, stacked, rest, into, shapes[0].dtype)
    at = lambda row: row._replace(batch=_split.take(stacked, row.index, layout))  # noqa: E731
    count = into.k + (rest is not None)
    program = Program(settings, loss, primals, state, shapes, [], "alone")
    program = program._replace(how=_aux.reducers(settings.aux, shapes[1][1]))
    if count > 1:
        program = program._replace(engine=_engine(program, one))
    carry, rows, tail = _opened(program), None, None
    step = functools.partial(_micro_step, program)
    if count == 1:
        only = last if into.k == 0 else at(jax.tree.map(lambda x: x[0], plan))
        carry, tail = step(carry, only)
        rows = None if into.k == 0 else jax.tree.map(lambda x: x[None], tail)
        tail = None if into.k else tail
    else:
        with jax.named_scope("optax_accum.micro_steps"):
            carry, rows = lax.scan(lambda carry, row: step(carry, at(row)), carry, plan)
        if last is not None:
            smaller = program._replace(shapes=_shapes(loss, primals, rest, state))
            with jax.named_scope("optax_accum.remainder"):
                carry, tail = _micro_step(smaller, carry, last)
    return _finished(program, carry, rows, tail, whole)


# Before the loop.


def _normalized(settings: Settings, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The loss as (primals, micro_batch, state) -> (loss, (new state, aux))."""

    def loss(primals: tuple[Any, ...], micro_batch: MicroBatch, state: Any) -> Any:
        full = list(args)
        for i, leaf in zip(settings.batch_argnums, micro_batch.batch, strict=True):
            full[i] = leaf
        for i in settings.rng_argnums:
            full[i] = jax.tree.map(lambda key: jax.random.fold_in(key, micro_batch.index), args[i])
        if settings.state_argnum is not None:
            full[settings.state_argnum] = state
        for i, primal in zip(settings.argnums, primals, strict=True):
            full[i] = primal
        return _unpacked(settings, settings.loss_fn(*full, **kwargs))

    return loss


def _unpacked(settings: Settings, out: Any) -> tuple[Any, tuple[Any, Any]]:
    threaded = settings.state_argnum is not None
    if not (threaded or settings.has_aux):
        return out, (None, None)
    try:
        loss, rest = out
        state, aux = rest if threaded and settings.has_aux else (rest, rest)
    except (TypeError, ValueError):
        expected = {
            (True, False): "(loss, new_state)",
            (False, True): "(loss, aux)",
            (True, True): "(loss, (new_state, aux))",
        }[threaded, settings.has_aux]
        raise TypeError(
            f"loss_fn returned {_checks.described(out)}, expected {expected} with "
            f"has_aux={settings.has_aux}, state_argnum={settings.state_argnum}."
        ) from None
    return loss, (state if threaded else None, aux if settings.has_aux else None)


def _shapes(loss: Any, primals: Any, batch: Any, state: Any) -> Any:
    index, weight = jnp.zeros([], jnp.int32), jnp.zeros([], jnp.float32)
    shapes = jax.eval_shape(
        lambda b: loss(primals, MicroBatch(index, b, weight, weight, weight), state), batch
    )
    if not _checks.is_scalar(shapes[0], jnp.floating):
        raise TypeError(
            f"loss_fn returned {_checks.described(shapes[0])}, expected a real floating scalar; "
            "type has_aux=True if it returns (loss, aux), or average the loss over the examples."
        )
    return shapes


def _weighed(
    settings: Settings, stacked: Any, rest: Any, into: _split.Sizes, dtype: Any
) -> tuple[MicroBatch, MicroBatch | None, jax.Array]:
    """What goes with each of the k micro-batches; the last one; the whole weight."""
    wide = acc.promoted(dtype, jnp.float32)
    weights = _weights(settings, stacked, (into.k,), into.m)
    tail = None if rest is None else _weights(settings, rest, (), into.r)
    whole = jnp.sum(weights) + (0 if tail is None else tail)
    share = _shares.shares(settings.loss_reduction, whole, wide)
    indices = jnp.arange(into.k, dtype=jnp.int32)
    plan = MicroBatch(indices, (), weights, *share(weights))
    if rest is None:
        return plan, None, whole
    index = jnp.full([], into.k, jnp.int32)
    return plan, MicroBatch(index, rest, tail, *share(tail)), whole


def _weights(settings: Settings, batch: Any, shape: tuple[int, ...], examples: int) -> jax.Array:
    """Evaluated before the loop, so that each backward pass starts from its share."""
    if settings.weight is None:
        return jnp.full(shape, examples, jnp.float32)
    weigh = lambda b: _checks.real_scalar("weight(micro_batch)", settings.weight(*b))  # noqa: E731
    axis = _split.axis_of(settings.batch_layout)
    weights = jax.vmap(weigh, in_axes=axis)(batch) if shape else weigh(batch)
    if not _checks.is_traced(weights):
        for weight in weights.ravel().tolist():
            _checks.known_weight(weight)
    return weights


def _engine(program: Program, one: Any) -> str:
    settings, primals = program.settings, program.primals
    if settings.engine == "auto" and any(map(_checks.is_vmapped, jax.tree.leaves(primals))):
        return "carry"
    index, number = jnp.zeros([], jnp.int32), jnp.zeros([], jnp.float32)

    def trial(batch: Any, *primals: Any) -> Any:
        micro_batch = MicroBatch(index, batch, number, number, number)
        return program.loss(primals, micro_batch, program.state)

    def why_not() -> str | None:
        sums = acc.open_window(primals, settings.accumulator_dtype).grad_sum
        narrow = program.shapes[0].dtype.itemsize < 4
        return _engines.obstacle(trial, one, primals, sums, settings.nonfinite, narrow)

    return _engines.chosen(settings.engine, why_not)


def _opened(program: Program) -> Carry:
    if program.engine == "alone":
        window = acc.fresh(None)
    else:
        window = acc.open_window(program.primals, program.settings.accumulator_dtype)
    wide = acc.promoted(program.shapes[0].dtype, jnp.float32)
    window = window._replace(value_sum=jnp.zeros([], wide))
    totals = _aux.initial(program.how, program.shapes[1][1])
    return Carry(window, program.state, totals, jnp.zeros([], jnp.int32))


# A micro-step.


def _micro_step(program: Program, carry: Carry, micro_batch: MicroBatch) -> tuple[Carry, Rows]:
    """Take one micro-batch in; one of weight zero is not computed at all."""
    if program.settings.weight is None:
        return _taken(program, carry, micro_batch)
    return cond(
        micro_batch.weight != 0,
        lambda: _taken(program, carry, micro_batch),
        lambda: _left_out(program, carry),
    )


def _taken(program: Program, carry: Carry, micro_batch: MicroBatch) -> tuple[Carry, Rows]:
    settings = program.settings
    loss = lambda *primals: program.loss(primals, micro_batch, carry.state)  # noqa: E731
    narrow = program.shapes[0].dtype.itemsize < 4
    seed = jnp.ones_like(micro_batch.seed) if narrow else micro_batch.seed
    sums, grads = carry.window.grad_sum, None
    if program.engine == "refs":
        value, (state, aux), sums = _engines.into_refs(loss, program.primals, seed, sums)
    else:
        value, (state, aux), grads = _engines.micro_gradient(loss, program.primals, seed)
    known = 1.0 if settings.weight is None else None
    part = acc.judge(grads, micro_batch.weight, known, "sum", settings.nonfinite)
    part = part._replace(scale=micro_batch.seed if narrow else None)
    value = value.astype(seed.dtype) * (1 if narrow else seed)
    window = acc.add_scalars(carry.window, part, value)
    if program.engine == "carry":
        salt = lax.bitcast_convert_type(value.astype(jnp.float32), jnp.uint32)
        sums = acc.add_sums(sums, part, grads, False, (micro_batch.index, salt))
    elif program.engine == "alone":
        sums = _shares.alone(part, grads)
    aux_rows = _aux.rows(program.how, aux)
    totals = _aux.combine(program.how, carry.totals, aux, micro_batch.fraction)
    totals = _kept(part.keep, totals, carry.totals)
    if program.state is not None:
        state = _kept(
            part.keep, with_dtypes_of(state, carry.state, "the model's state"), carry.state
        )
    if part.keep is not True:
        aux_rows = _kept(part.keep, aux_rows, jax.tree.map(jnp.zeros_like, aux_rows))
    merged = settings.merge_state is not None
    rows = Rows(aux_rows, state if merged else None, _shares.counted(part))
    skipped = carry.skipped + jnp.asarray(part.dropped).astype(jnp.int32)
    return Carry(
        window._replace(grad_sum=sums), carry.state if merged else state, totals, skipped
    ), rows


def _left_out(program: Program, carry: Carry) -> tuple[Carry, Rows]:
    """A micro-batch of weight zero: nothing but its place in the rows."""
    aux = [
        jnp.zeros(leaf.shape, leaf.dtype) for leaf in _aux.rows(program.how, program.shapes[1][1])
    ]
    merged = program.settings.merge_state is not None
    if program.engine == "alone":
        zeros = jax.tree.map(jnp.zeros_like, program.primals)
        carry = carry._replace(window=carry.window._replace(grad_sum=zeros))
    return carry, Rows(aux, carry.state if merged else None, jnp.zeros([], jnp.float32))


def _kept(keep: Any, new: Any, old: Any) -> Any:
    return new if keep is True else jax.tree.map(lambda n, o: jnp.where(keep, n, o), new, old)


# After the loop.


def _finished(
    program: Program, carry: Carry, rows: Rows | None, tail: Rows | None, whole: jax.Array
) -> Outcome:
    settings, window = program.settings, carry.window
    correct = _shares.correction(
        window.weight_sum, whole, settings.loss_reduction, settings.nonfinite
    )
    like_primals = jax.tree.map(lambda x: jnp.result_type(x), program.primals)
    grads = jax.tree.map(
        lambda total, dtype: correct(total).astype(dtype), window.grad_sum, like_primals
    )
    loss = correct(window.value_sum).astype(program.shapes[0].dtype)
    state = carry.state
    if settings.merge_state is not None:
        stacked = _appended(rows and rows.state, tail and tail.state)
        weights = _appended(rows and rows.weight, tail and tail.weight)
        state = settings.merge_state(program.state, stacked, weights)

    def join(head: Any, last: Any, reducer: str) -> Any:
        if reducer == "stack":
            return _appended(head, last)
        return _split.join(head, last, settings.batch_layout)

    aux = _aux.result(
        program.how,
        program.shapes[1][1],
        carry.totals,
        rows and rows.aux,
        tail and tail.aux,
        join,
        _shares.correction(window.weight_sum, whole, "mean", settings.nonfinite),
    )
    return Outcome(loss, state, aux, grads, Stats(window.weight_sum, carry.skipped))


def _appended(head: Any, last: Any) -> Any:
    """Rows with one more."""
    if head is None:
        return jax.tree.map(lambda x: x[None], last)
    if last is None:
        return head
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y[None]]), head, last)
