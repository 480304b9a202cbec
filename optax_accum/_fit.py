"""The micro-batch that fits, from the compiler: nothing is allocated, nothing is run."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from optax_accum import _checks, _held, _units
from optax_accum import _compiled_memory as cm
from optax_accum._plan import Plan, Size
from optax_accum._remedies import Remedy, remedies
from optax_accum._size_search import Search, predicted, search

LEAST = 0.01  # of the total: what donation would save, to be worth a line
SHARE = 0.95  # of what a device reports: the rest is for what the compiler does not account for


def fit(
    make_update: Callable[[int, int], Any],
    shapes: Callable[[int, int], tuple[Any, ...]],
    budget: int | float | str | None = None,
    *,
    global_batch: int,
    replicas: int = 1,
    compilations: int = 5,
    time: bool = False,
    on_compile: Callable[[int, int], object] | None = None,
) -> Plan:
    """The largest micro-batch within a budget of memory, by compiling your own update.

    ::

        for a few micro_batch that divide global_batch / replicas:
            update = make_update(micro_batch, k)
            compiled = update.lower(*shapes(micro_batch, k)).compile()
            total = arguments + outputs - aliased + temporaries        # on a device
        a piecewise line through the totals tells the largest that fits; it is compiled, too

    Nothing is allocated and nothing is run. Only sizes with micro_batch * k * replicas ==
    global_batch are considered. In the normal case four compilations at most make the line and one
    verifies; where that misses, what is left of them goes to the next best size, and the largest
    *verified* one is reported. Without `jax.checkpoint` memory is nearly affine in the size; with
    it the peak moves, so that the line bends. k=1 has neither window nor loop and lies on no line:
    its prediction is an upper bound.

    The plan holds for the platform it names, and for its compiler: plan on the device you train on.
    What other programs and other buffers on the device take is not in it.

    Args:
      make_update: `make_update(micro_batch, k)` returns the jitted update, as you run it (donated).
        Space driver: one call takes a global batch, `oa.value_and_grad(loss_fn, k)` inside. Time
        driver: one call takes a micro-batch, `oa.micro_step(loss_fn, oa.accumulate(inner, k))`.
      shapes: `shapes(micro_batch, k)` returns the tuple of its arguments as
        `jax.ShapeDtypeStruct`s, with shardings on a mesh: parameters, optimizer state
        (`jax.eval_shape(tx.init, params)`), then the batch: of global_batch examples in the space
        driver, of micro_batch * replicas in the time driver.
      budget: bytes on a device, a number or a text ("16GiB"); None: what the device reports, less
        5%.
      global_batch: examples of an update.
      replicas: how many share it: micro_batch and k are each replica's.
      compilations: at most.
      time: whether to run a few of the sizes that fit, and recommend the fastest of them for an
        example: a tiny micro-batch wastes the machine, and the largest is not always the fastest.
        Arguments after the second are filled with ones.
      on_compile: called with micro_batch and k before each compilation.

    Returns:
      A :class:`Plan`. Where even the smallest size does not fit, its `micro_batch` is None and
      `remedies` says what would help, each estimated by itself.

    Raises:
      ValueError, TypeError: for a budget that is missing on a device that reports none or lacks its
        unit (16), a global batch that the replicas do not divide, an update that is not jitted,
        shapes that are not those of its arguments, and a backend that does not tell its memory.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import optax_accum as oa
      >>> inner = optax.adam(1e-3)
      >>> loss_fn = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
      >>> w = jax.ShapeDtypeStruct((256, 256), jnp.float32)
      >>> def make_update(micro_batch, k):
      ...     micro_step = oa.micro_step(loss_fn, oa.accumulate(inner, k))
      ...     return jax.jit(micro_step, donate_argnums=(0, 1))
      >>> def shapes(micro_batch, k):
      ...     state = jax.eval_shape(oa.accumulate(inner, k).init, w)
      ...     return w, state, jax.ShapeDtypeStruct((micro_batch, 256), jnp.float32)
      >>> plan = oa.planning.fit(make_update, shapes, "1.5MB", global_batch=512)
      >>> plan.micro_batch * plan.k, plan.verified <= plan.budget, plan.compilations <= 5
      (512, True, True)
    """
    asked = _Asked(
        make_update,
        shapes,
        on_compile or (lambda micro_batch, k: None),
        *_split(global_batch, replicas),
    )
    sizes, executables = _checks.divisors(asked.examples), {}
    device = cm.device_of(asked.arguments(sizes[0]))
    limit = cm.available(device, SHARE) if budget is None else _units.parse_large("budget", budget)

    def needs(size: int) -> float:
        executables[size] = asked.compiled(size)
        return math.inf if executables[size] is None else cm.memory_of(executables[size]).total

    on_line, whole = (sizes[:-1], sizes[-1]) if len(sizes) > 1 else (sizes, None)
    most = _checks.whole("compilations", compilations)
    window = _held.on_a_device(asked.arguments(sizes[0])[:1])  # as large as the parameters
    found = search(on_line, whole, needs, limit, most, window)
    fitting = [size for size, needed in found.seen.items() if time and needed <= limit]
    speeds = {size: asked.seconds(size, executables[size]) for size in fitting}
    plan = _plan(_rows(found, sizes, whole, limit, speeds), asked, limit)._replace(
        compilations=len(found.seen), platform=f"{device.platform} ({device.device_kind})"
    )
    plan = plan._replace(notes=tuple(_notes(plan, found, executables, asked)))
    if plan.micro_batch is None:
        return plan._replace(remedies=_helping(found, executables, asked, limit))
    return plan


class _Asked(NamedTuple):
    """What the user asks for: an update and its arguments, at any size."""

    make_update: Callable[[int, int], Any]
    shapes: Callable[[int, int], Any]
    on_compile: Callable[[int, int], object]
    examples: int  # of an update, on each replica
    replicas: int

    def arguments(self, size: int) -> tuple[Any, ...]:
        found = self.shapes(size, self.examples // size)
        if not isinstance(found, (tuple, list)):
            raise TypeError(
                f"shapes returned {_checks.described(found)}, expected the tuple of the update's "
                "arguments; type return params, state, batch."
            )
        return tuple(found)

    def compiled(self, size: int) -> Any:
        k = self.examples // size
        self.on_compile(size, k)
        named = f"micro_batch={size}, k={k}"
        return cm.compiled(self.make_update(size, k), self.arguments(size), named)

    def takes_all(self) -> bool:
        """Whether one call takes a global batch: what it is given then is the same at any size."""
        smallest, largest = (_held.elements(self.arguments(b)[2:]) for b in (1, self.examples))
        return smallest == largest

    def seconds(self, size: int, executable: Any) -> float:
        """Of an example."""
        examples = (self.examples if self.takes_all() else size) * self.replicas
        return cm.seconds(executable, self.arguments(size)) / examples


def _split(global_batch: int, replicas: int) -> tuple[int, int]:
    """Examples of an update on each replica, and the replicas."""
    total, n = _checks.whole("global_batch", global_batch), _checks.whole("replicas", replicas)
    if total % n:
        near = {total // n * n or n, total // n * n + n}
        raise ValueError(
            f"global_batch={total} does not split over replicas={n}; type "
            f"{' or '.join(f'global_batch={fit}' for fit in sorted(near))}."
        )
    return total // n, n


def _notes(plan: Plan, found: Search, executables: dict[int, Any], asked: _Asked) -> list[str]:
    """What is likely a mistake, though it compiles."""
    notes = []
    many = [needed for size, needed in found.seen.items() if size < asked.examples]
    if asked.takes_all() and len(many) > 1 and len(set(many)) == 1:
        notes.append("every size needs the same: do make_update and shapes use micro_batch and k?")
    if plan.micro_batch is None:  # donation is among the remedies
        return notes
    arguments = asked.arguments(plan.micro_batch)
    memory = cm.memory_of(executables[plan.micro_batch])
    which = (0, 1) if len(arguments) > 2 else 0
    saves = min(memory.outputs, _held.on_a_device(arguments[:2] if which else arguments[:1]))
    if memory.aliased == 0 and saves >= LEAST * memory.total:
        how = f"donate_argnums={which} would save about {_units.show(saves)}"
        notes.append(f"the update donates nothing: {how}")
    return notes


def _rows(
    found: Search, sizes: list[int], whole: int | None, budget: int, speeds: dict[int, float]
) -> tuple[Size, ...]:
    line = {size: needed for size, needed in found.seen.items() if size != whole}

    def row(size: int) -> Size:
        seen = found.seen.get(size)
        expected = predicted(line, size) if seen is None else found.expected[size]
        needed = expected if seen is None else seen
        over = any(at < size and n > budget for at, n in found.seen.items())
        return Size(
            micro_batch=size,
            k=sizes[-1] // size,
            predicted=None if expected is None else round(expected),
            compiled=None if seen is None or math.isinf(seen) else round(seen),
            fits=(False if over else None) if needed is None else needed <= budget,
            seconds=speeds.get(size),
        )

    return tuple(map(row, sizes))


def _plan(rows: tuple[Size, ...], asked: _Asked, budget: int) -> Plan:
    verified = [row for row in rows if row.fits and row.compiled is not None]
    largest = verified[-1] if verified else None
    best = min(verified[::-1], key=lambda row: row.seconds or 0, default=None)
    return Plan(
        micro_batch=best and best.micro_batch,
        k=best and best.k,
        global_batch=asked.examples * asked.replicas,
        replicas=asked.replicas,
        largest=largest and largest.micro_batch,
        predicted=best and best.predicted,
        verified=best and best.compiled,
        budget=budget,
        sizes=tuple(_shown(row, best) for row in rows),
        compilations=0,
        calls=best and (1 if asked.takes_all() else best.k),
        platform="",
        remedies=(),
    )


def _shown(row: Size, best: Size | None) -> Size:
    """Without what had been expected of a point of the line: the line is another now."""
    return row if row == best or row.compiled is None else row._replace(predicted=None)


def _helping(
    found: Search, executables: dict[int, Any], asked: _Asked, budget: int
) -> tuple[Remedy, ...]:
    first, *more = found.seen
    if executables[first] is None:
        return ()
    activations = None
    if more and math.isfinite(found.seen[more[0]]):
        slope = (found.seen[more[0]] - found.seen[first]) / (more[0] - first)
        activations = round(slope * first)
    memory, arguments = cm.memory_of(executables[first]), asked.arguments(first)
    return tuple(remedies(arguments, memory, budget, activations, asked.takes_all()))
