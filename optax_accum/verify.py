"""For users' own tests: what a compiled program communicates.

Whether a window is reduced over the devices once, or once a micro-batch, does not show in numbers:
both give the same gradient, one with k times the traffic. It shows in the compiled program.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
import optax

from optax_accum import _hlo
from optax_accum._reductions import (
    Collective,
    batch_groups,
    fault,
    gradient_size,
    judged,
    public,
    table,
)

Collective.__module__ = __name__  # where users find it: tracebacks, help() and pickles say so


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
