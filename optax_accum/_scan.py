"""The space driver: a whole batch in one call, micro-batch by micro-batch."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_accum import _accumulator as acc
from optax_accum import _aux, _axis, _engines, _fits, _merging, _program, _shares, _split
from optax_accum._cond import cond
from optax_accum._program import MicroBatch, Program, Settings
from optax_accum._state import with_dtypes_of


class Stats(NamedTuple):
    """What a call of the space driver took in, beside its value and gradients."""

    weight: jax.Array  # shape=(), dtype=jnp.float32: of the micro-batches that were kept
    skipped: jax.Array  # shape=(), dtype=jnp.int32: micro-batches dropped as not finite


class Carry(NamedTuple):
    """What goes from one micro-step to the next."""

    window: acc.Window
    state: Any  # the model's
    totals: list[Any]  # of the auxiliary outputs
    skipped: jax.Array


class Rows(NamedTuple):
    """What is given back micro-step by micro-step."""

    aux: list[Any]
    state: list[Any]  # the parts that are merged
    weight: jax.Array  # that was kept


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
    loss = _program.normalized(settings, args, kwargs)
    given = tuple(args[i] for i in settings.argnums)
    for index, primal in zip(settings.argnums, given, strict=True):
        _fits.check_differentiable(f"argument {index}", primal)
    primals = _axis.own(given, settings.axis_name)
    if settings.gather:
        primals = jax.eval_shape(lambda p: _axis.from_shards(p, (), settings.scattered)[0], primals)
    state = None if settings.state_argnum is None else args[settings.state_argnum]
    one = jax.eval_shape(lambda b: _split.take(b, 0, layout), stacked) if into.k else rest
    whole_args = _program.uncut(settings, args, kwargs, into)
    shapes = _program.shapes(loss, primals, one, state, whole_args)
    together = _program.together(settings, loss, primals, one, state, shapes[0])
    plan, last, whole = _program.weighed(settings, stacked, rest, into, shapes[0].dtype, together)
    at = lambda row: row._replace(batch=_split.take(stacked, row.number, layout))  # noqa: E731
    count = into.k + (rest is not None)
    program = Program(settings, loss, primals, state, shapes, [], "alone", together, given)
    program = program._replace(how=_aux.reducers(settings.aux, shapes[1][1]))
    _aux.check_rows(program.how, shapes[1][1], into.m if into.k else into.r, layout)
    if count > 1:
        program = program._replace(engine=_program.engine_of(program, one, args))
    carry, rows, tail = _opened(program), None, None
    take = functools.partial(_micro_step, program)
    if count == 1 and into.k:
        carry, row = take(carry, at(jax.tree.map(lambda x: x[0], plan)))
        rows = jax.tree.map(lambda x: x[None], row)
    elif into.k:
        with jax.named_scope("optax_accum.micro_steps"):
            carry, rows = lax.scan(lambda carry, row: take(carry, at(row)), carry, plan)
    if last is not None:
        smaller = program._replace(shapes=_program.shapes(loss, primals, rest, state, whole_args))
        if count > 1:
            _aux.check_remainder(program.how, shapes[1][1], smaller.shapes[1][1])
        with jax.named_scope("optax_accum.remainder"):
            carry, tail = _micro_step(smaller, carry, last)
    return _finished(program, carry, rows, tail, whole)


def _opened(program: Program) -> Carry:
    if program.engine == "alone":
        window = acc.fresh(None)
    else:
        window = acc.open_window(program.primals, program.settings.accumulator_dtype)
        window = window._replace(grad_sum=_axis.laid_out(window.grad_sum, program.settings.layout))
    wide = _fits.promoted(program.shapes[0].dtype, jnp.float32)
    zeros = {name: jnp.zeros([], wide) for name in ("value_sum", "weight_sum", "value_weight")}
    window = window._replace(**zeros)
    totals = _aux.initial(program.how, program.shapes[1][1])
    opened = window, totals, jnp.zeros([], jnp.int32)
    window, totals, skipped = _axis.own(opened, program.settings.axis_name)
    return Carry(window, program.state, totals, skipped)


# A micro-step.


def _micro_step(program: Program, carry: Carry, micro_batch: MicroBatch) -> tuple[Carry, Rows]:
    """Take one micro-batch in; one of weight zero is not computed at all."""
    if program.settings.gather:  # by all replicas, whatever they then leave out
        primals, batch = _axis.from_shards(
            program.shards, micro_batch.batch, program.settings.scattered
        )
        program = program._replace(primals=primals)
        micro_batch = micro_batch._replace(batch=batch)
    if program.settings.weight is None:
        return _taken(program, carry, micro_batch)
    return cond(
        micro_batch.computed,
        lambda: _taken(program, carry, micro_batch),
        lambda: _left_out(program, carry),
    )


def _taken(program: Program, carry: Carry, micro_batch: MicroBatch) -> tuple[Carry, Rows]:
    settings = program.settings
    primals = program.primals
    loss = lambda *primals: program.loss(primals, micro_batch, carry.state)  # noqa: E731
    narrow = program.shapes[0].dtype.itemsize < 4
    seed = jnp.ones_like(micro_batch.seed) if narrow else micro_batch.seed
    sums: Any = carry.window.grad_sum
    grads: Any = None  # with refs there is none
    if program.engine == "refs":
        value, (state, aux), sums = _engines.into_refs(loss, primals, seed, sums)
    else:
        value, (state, aux), grads = _engines.micro_gradient(loss, primals, seed)
    known = 1.0 if settings.weight is None else None
    shards = _axis.beside(settings.axis_name)
    part = acc.judge(grads, micro_batch.weight, known, "sum", settings.nonfinite, shards)
    part = part._replace(scale=micro_batch.seed if narrow else None)
    value = value.astype(seed.dtype) * (1 if narrow else seed)
    window = acc.add_scalars(carry.window, part, value)
    if program.engine == "carry":
        replica = _axis.replica(settings.axis_name)
        salt = lax.bitcast_convert_type(value.astype(jnp.float32), jnp.uint32)
        sums = acc.add_sums(sums, part, grads, False, (micro_batch.number, salt, replica))
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
    merge = settings.merge_state
    rows = Rows(aux_rows, _merging.rows(merge, state), _shares.counted(part))
    skipped = carry.skipped + jnp.asarray(part.dropped).astype(jnp.int32)
    state = _merging.handed_on(merge, carry.state, state)
    return Carry(window._replace(grad_sum=sums), state, totals, skipped), rows


def _left_out(program: Program, carry: Carry) -> tuple[Carry, Rows]:
    """A micro-batch of weight zero: nothing but its place in the rows."""
    aux = [jnp.zeros_like(leaf) for leaf in _aux.rows(program.how, program.shapes[1][1])]
    state = _merging.rows(program.settings.merge_state, carry.state)
    if program.engine == "alone":
        zeros = jax.tree.map(jnp.zeros_like, program.primals)
        carry = carry._replace(window=carry.window._replace(grad_sum=zeros))
    return carry, Rows(aux, state, jnp.zeros_like(carry.window.weight_sum))


def _kept(keep: Any, new: Any, old: Any) -> Any:
    return new if keep is True else jax.tree.map(lambda n, o: jnp.where(keep, n, o), new, old)


# After the loop.


def _finished(
    program: Program,
    carry: Carry,
    rows: Rows | None,
    tail: Rows | None,
    whole: jax.Array,
) -> Outcome:
    settings = program.settings
    carry = _reduced(program, carry)
    window = carry.window
    correct = _shares.correction(
        window.weight_sum, whole, settings.loss_reduction, settings.nonfinite
    )
    like_primals = jax.tree.map(lambda x: jnp.result_type(x), program.primals)
    grads = jax.tree.map(
        lambda total, dtype: correct(total).astype(dtype), window.grad_sum, like_primals
    )
    loss = correct(window.value_sum).astype(program.shapes[0].dtype)
    state = carry.state
    if any(_merging.functions(settings.merge_state)):
        stacked = _appended(rows and rows.state, tail and tail.state)
        weights = _appended(rows and rows.weight, tail and tail.weight)
        stacked, weights = _axis.gathered((stacked, weights), settings.axis_name)
        weights = weights.astype(jnp.float32)
        state = _merging.merged(settings.merge_state, program.state, state, stacked, weights)
        state = with_dtypes_of(state, program.state, "what merge_state returned")

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
    stats = Stats(window.weight_sum.astype(jnp.float32), carry.skipped)
    return Outcome(loss, state, aux, grads, stats)


def _reduced(program: Program, carry: Carry) -> Carry:
    """What the replicas have together: the one place where the space driver communicates much."""
    settings, axis_name = program.settings, program.settings.axis_name
    if axis_name is None:
        return carry
    window, scattered = carry.window, settings.scattered
    scalars = window.value_sum, window.weight_sum, carry.skipped
    wide = lambda x: x.astype(_fits.promoted(x.dtype, jnp.float32))  # noqa: E731 (one line)
    sums = jax.tree.map(wide, window.grad_sum)
    added = _aux.added(program.how, carry.totals)
    with jax.named_scope("optax_accum.reduction"):
        sums, (value, weight, skipped, added) = _axis.reduced(
            sums, program.shards, scattered, (*scalars, added), axis_name
        )
    kept_any = carry.window.weight_sum != 0
    totals = _aux.agreed(program.how, carry.totals, added, kept_any, axis_name)
    window = window._replace(grad_sum=sums, value_sum=value, weight_sum=weight)
    return carry._replace(window=window, totals=totals, skipped=skipped)


def _appended(head: Any, last: Any) -> Any:
    """Rows with one more."""
    if head is None:
        return jax.tree.map(lambda x: x[None], last)
    if last is None:
        return head
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y[None]]), head, last)
