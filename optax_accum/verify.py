"""For users' own tests: equivalence with one big batch, and what a compiled program communicates.

Whether a loss may be accumulated shows in its numbers. Whether a window is reduced over the devices
once, or once a micro-batch, does not: both give the same gradient, one with k times the traffic. It
shows in the compiled program.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any

import jax
import numpy as np
import optax

from optax_accum import _causes, _hlo, _oracle
from optax_accum._oracle import Difference
from optax_accum._reductions import (
    Collective,
    batch_groups,
    fault,
    gradient_size,
    judged,
    public,
    table,
)

for _public in (Collective, Difference):
    _public.__module__ = __name__  # where users find them: tracebacks, help() and pickles say so
del _public


def assert_equivalent(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    *args: Any,
    k: int | None = None,
    rtol: float | None = None,
    atol: float = 0.0,
    **keywords: Any,
) -> Difference:
    """Asserts that a loss and its gradients, accumulated, are those of the whole batch.

    ::

        accumulated = value_and_grad(loss_fn, k, **keywords)(params, batch, *args)
        whole = jax.value_and_grad(loss_fn)(params, batch, *args)
        for a, b in zip(accumulated, whole):
            assert max(abs(a - b)) <= atol + rtol * scale

    The scale of a leaf is its largest entry, in the whole batch or in a micro-batch (they may
    cancel). Where a leaf is off by more, its rounding is measured, by backward passes that start
    from other numbers and by the last bit of the parameters: 8 times that is allowed in a leaf that
    is nothing but rounding, such as a gradient that cancels to 0, and in others up to
    `8 * eps ** (1/3) * rtol` of the largest gradient, which is 8 eps of it by default. With
    `loss_reduction="sum_over_weight"` the whole is divided by the weight of the whole batch.
    Auxiliary outputs and model state are not compared.

    Random numbers are drawn example by example, so that with `rng_argnums` no whole batch has the
    ones of its micro-batches. A loss that depends on its keys is judged twice: with keys that give
    every example the same numbers, against the whole batch; then with the given ones, against
    the micro-batches taken one by one through `jax.value_and_grad`, each with the key folded with
    its index. The first is left out where the loss asks for one kind of key, or is not finite with
    such numbers. Keys inside the argument of `state_argnum` are trusted to be advanced by the loss.

    On a difference, the likely cause is found by trying: other precision, other keywords, weights
    counted from every leaf of the batch, the batch in other orders, repeated, reweighted. What then
    agrees has to agree with the examples permuted and other parameters, too, before it is named.
    Keep the batch small; some 20 programs are compiled then.

    Args:
      loss_fn: as `value_and_grad` takes it; its own keywords by `functools.partial`.
      params: its first argument.
      batch: its second argument: a whole batch, in its `batch_layout`.
      *args: its other arguments, in its order, whatever the keywords say of them.
      k: micro-batches in the batch; or give `micro_batch_size`.
      rtol: relative to a leaf's scale. None: `eps ** (2/3)` of its dtype, which is 4e-11 in
        float64, 2e-5 in float32, 1e-2 in float16 and 4e-2 in bfloat16.
      atol: absolute, added to it.
      **keywords: of `value_and_grad`, as in training.

    Returns:
      The :class:`Difference` of the leaf that comes closest to its tolerance.

    Raises:
      AssertionError: where a leaf differs by more, with the leaf, how far it is off, the likely
        cause and what to type; where the whole batch's own loss or gradients are not finite.
      ValueError, TypeError: for arguments that do not fit, as from `value_and_grad`; for an
        argument as long as the batch that is not cut, where no micro-batch can be computed.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_accum as oa
      >>> def loss_fn(w, batch):
      ...     return jnp.sum(batch["mask"] * (batch["x"] - w) ** 2) / jnp.sum(batch["mask"])
      >>> w, x = jnp.zeros([]), jnp.arange(8.0)
      >>> batch = {"x": x, "mask": x < 5}
      >>> tokens = lambda batch: batch["mask"].sum()
      >>> oa.verify.assert_equivalent(loss_fn, w, batch, k=2, weight=tokens).leaf
      'loss'
      >>> try:
      ...     oa.verify.assert_equivalent(loss_fn, w, batch, k=2)
      ... except AssertionError as error:
      ...     print(str(error).splitlines()[-1][:66])
      Likely cause: missing weights, a mean of means over unequal counts
    """
    for name, number in (("rtol", rtol), ("atol", atol)):
        if number is not None and not (isinstance(number, Real) and number >= 0):
            raise ValueError(f"{name} is {number!r}, expected a number from 0; type {name}=1e-5.")
    for name in keywords:
        if name not in _causes.OPTIONS:
            raise TypeError(
                f"assert_equivalent() got an unexpected keyword argument {name!r}, expected those "
                "of value_and_grad. Give an argument of the loss by its position after the batch; "
                "if it holds the batch's examples, type batch_argnums=(1, 2). Other keywords of "
                f"the loss: functools.partial(loss_fn, {name}=...)."
            )
    case = _oracle.Case(loss_fn, (params, batch, *args), _causes.OPTIONS | keywords | {"k": k})
    found = []
    for trial in _causes.trials(case, _oracle.Tolerance(rtol, atol)):
        if _oracle.excess(_oracle.worst(trial)) > 1:  # most calls need no micro-batches
            trial = _causes.with_rows(trial)
        if _oracle.excess(_oracle.worst(trial)) > 1:
            trial = _causes.with_noise(trial)
        if _oracle.excess(_oracle.worst(trial)) > 1:
            raise AssertionError(_failure(trial))
        found.append(_oracle.worst(trial))
    return max(found, key=_oracle.excess)


def _failure(trial: _oracle.Trial) -> str:
    """The leaf that is off, how far, and why."""
    off, found, right = _oracle.worst(trial), trial.found, trial.right
    if names := _oracle.not_finite(right):
        return (
            f"{names[0]} of the whole batch is not finite, with no accumulation at all; find out "
            'where: jax.config.update("jax_debug_nans", True).'
        )
    relative = off.absolute / off.scale if off.scale else math.inf
    far = f"off by {off.absolute:.3g}, which is {relative:.2g} of its scale {off.scale:.3g}"
    if math.isinf(off.absolute):
        far = "not finite, where the whole batch's is"
    against = "the same micro-batches one by one" if trial.folded else "the whole batch"
    return (
        f"accumulated over {len(trial.rows)} micro-batches, {off.leaf} is {far} and "
        f"{_oracle.excess(off):.3g} times the tolerance {off.tolerance:.3g}.\n"
        f"loss: accumulated {found['loss']:.9g}, of {against} {right['loss']:.9g}.\n"
        f"{_causes.explained(trial)}"
    )


def collectives(compiled: jax.stages.Compiled | str) -> list[Collective]:
    """Every collective of a compiled program.

    Compare bytes times runs, never the number of operations: the compiler combines several into
    one, splits them, and merges those of an unrolled loop.

    Args:
      compiled: what `jax.jit(f).lower(*arguments).compile()` gives, or its text. Each backend has
        its own: compile for the devices that you ask about.

    Returns:
      One :class:`Collective` for each place that runs one, in the order of the program.

    Raises:
      TypeError: for anything else, such as a function or a lowered program.
      ValueError: where the backend gives no text, or the text is no compiled program.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import NamedSharding, PartitionSpec as P
      >>> import optax_accum as oa
      >>> n = jax.device_count()
      >>> mesh = jax.make_mesh((n,), ("data",))
      >>> f = jax.shard_map(
      ...     lambda x: jax.lax.psum(x.sum(0), "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
      ... )
      >>> x = jax.ShapeDtypeStruct((n, 16), jnp.float32, sharding=NamedSharding(mesh, P("data")))
      >>> compiled = jax.jit(f).lower(x).compile()
      >>> found = oa.verify.collectives(compiled)
      >>> [(c.kind, c.bytes, c.in_loop, c.runs) for c in found]
      [('all-reduce', 64, False, 1)]
    """
    return [public(operation) for operation in _hlo.read(_text(compiled)).operations]


def assert_reduced_once(
    compiled: jax.stages.Compiled | str,
    grads: optax.Updates,
    *,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None,
    batch_axes: str | Sequence[str] = "data",
    exempt: Sequence[int] | Callable[[Collective], bool] = (),
) -> list[Collective]:
    """Asserts that a compiled program reduces each byte of the gradient over the batch axes once.

    For one call that makes a whole window's gradient, or closes a window::

        sum(c.bytes * c.runs for c in reductions over the batch axes) == bytes of grads

    and nothing larger than a scalar is reduced over them inside a loop. A reduction is an
    all-reduce or a reduce-scatter whose groups hold all devices that differ along the batch axes;
    one over only some of them is not counted, and not allowed in a loop either. Of the branches of
    a conditional the one that reduces most counts. Leaves may be reduced in a wider dtype than
    their own (bfloat16 in float32), not in a narrower one.

    Scalars (losses, weights, norms), whatever is reduced over other axes (tensor parallelism) and
    what `exempt` declares are listed and not judged.

    Args:
      compiled: what `jax.jit(f).lower(*arguments).compile()` gives, or its text.
      grads: a pytree of arrays or `jax.ShapeDtypeStruct`, shaped like the gradient. A leaf with a
        `NamedSharding` counts as its shard along the axes that are not batch axes; along batch axes
        it counts whole, since that is what a reduction to shards takes in.
      mesh: the mesh whose devices, in its order, the program runs on. None: all devices of the
        program share the batch.
      batch_axes: the mesh axes that share the batch; without a mesh they are not looked at.
      exempt: other reductions over the batch axes that you know of, such as synchronised batch
        statistics: the bytes of an operation or of an array in it, or a predicate on a
        :class:`Collective`.

    Returns:
      All collectives of the program, as :func:`collectives` lists them.

    Raises:
      AssertionError: where the gradient is reduced more or less than once or in a loop; with the
        likely cause, the remedy and a table of the collectives.
      TypeError, ValueError: for arguments that check nothing: no gradient, one device, other
        devices than the program's, axes that the mesh has not.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import optax_accum as oa
      >>> text = '''HloModule window, num_partitions=2
      ... ENTRY main {
      ...   gradient = f32[256] parameter(0)
      ...   ROOT mean = f32[256] all-reduce(gradient), channel_id=1, replica_groups={{0,1}},\
 use_global_device_ids=true
      ... }'''
      >>> (found,) = oa.verify.assert_reduced_once(text, jax.ShapeDtypeStruct((256,), jnp.float32))
      >>> found.kind, found.bytes, found.groups
      ('all-reduce', 1024, ((0, 1),))
      >>> try:
      ...     oa.verify.assert_reduced_once(text, jax.ShapeDtypeStruct((64,), jnp.float32))
      ... except AssertionError as error:
      ...     print(str(error).splitlines()[0])
      the gradient is reduced 4 times: 1,024 bytes over the batch axes, expected 256 bytes.
    """
    program = _hlo.read(_text(compiled))
    axes = (batch_axes,) if isinstance(batch_axes, str) else tuple(batch_axes)
    groups = batch_groups(mesh, axes, program.devices)
    expected = gradient_size(grads, None if mesh is None else axes)
    declared = _declared(exempt)
    rows = [judged(operation, groups, declared) for operation in program.operations]
    if problem := fault(rows, expected):
        raise AssertionError(f"{problem}\n\n{table(rows)}")
    return [row.collective for row in rows]


def _text(compiled: Any) -> str:
    if isinstance(compiled, str):
        return compiled
    if not isinstance(compiled, jax.stages.Compiled):
        raise TypeError(
            f"compiled is a {type(compiled).__name__}, expected a compiled program; "
            "type jax.jit(f).lower(*arguments).compile()."
        )
    if (text := compiled.as_text()) is None:
        raise ValueError("this backend gives no text of its programs; compile for another one.")
    return text


def _declared(exempt: Any) -> Callable[[Collective, _hlo.Part], bool]:
    """Whether the user exempts an array of a collective."""
    if callable(exempt):
        return lambda collective, part: bool(exempt(collective))
    sizes = frozenset(exempt if isinstance(exempt, Iterable) else [None])
    if not all(isinstance(size, (int, np.integer)) for size in sizes):
        raise TypeError(
            f"exempt is {exempt!r}, expected sizes in bytes, exempt=(64, 128), or a predicate, "
            "exempt=lambda collective: ..."
        )
    return lambda collective, part: not sizes.isdisjoint((collective.bytes, part.bytes))
