"""The arithmetic of batches: global batch = micro-batch x k x replicas, and what an epoch is."""

from typing import Any, NamedTuple

from optax_accum import _checks, _units


class Batch(NamedTuple):
    """How a global batch is cut, and what an epoch of the data set comes to."""

    global_batch: int  # examples of an update
    micro_batch: int  # examples of one forward and backward pass, on each replica
    k: int  # micro-steps of a window, on each replica
    replicas: int  # that share the global batch
    activations: int | None = None  # bytes on a device, whatever k is
    examples: int | None = None  # in the data set; None leaves out what follows
    epochs: int = 1
    micro_steps_per_epoch: int | None = None  # on each replica
    updates_per_epoch: int | None = None  # the one of the tail included, unless it is dropped
    tail: int | None = None  # examples behind the last full window of an epoch
    tail_micro_steps: int | None = None  # of the tail's window; 0 where there is none
    schedule_updates: int | None = None  # length of a schedule over all epochs, in updates

    def __str__(self) -> str:
        return _units.columns(rows(self))


def rows(batch: Batch) -> list[tuple[str, str]]:
    """What a screen shows of it: names and values."""
    cut = f"{batch.micro_batch} x k {batch.k} x {plural(batch.replicas, 'replica')}"
    shown = [("global batch", f"{batch.global_batch} = micro-batch {cut}")]
    if batch.activations is not None:
        each = _units.show(batch.activations / batch.micro_batch)
        text = f"{_units.show(batch.activations)} a device = {batch.micro_batch} x {each}"
        shown.append(("activations", text))
    if batch.examples is None:
        return shown
    steps = f"{batch.micro_steps_per_epoch} micro-steps on each replica"
    return [
        *shown,
        ("an epoch", f"{plural(batch.updates_per_epoch, 'update')}, {steps}"),
        ("tail", _tail(batch)),
        ("schedule", f"{plural(batch.schedule_updates, 'update')} ({_epochs(batch.epochs)})"),
    ]


def plural(number: int | None, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _epochs(epochs: int) -> str:
    return plural(epochs, "epoch")


def _tail(batch: Batch) -> str:
    if not batch.tail:
        return "none: the windows fill the epoch"
    if not batch.tail_micro_steps:
        return f"{plural(batch.tail, 'example')}, dropped"
    text = f"{plural(batch.tail, 'example')}, {plural(batch.tail_micro_steps, 'micro-step')}"
    text += ", an update of their own (last=True)"
    if batch.tail % (batch.micro_batch * batch.replicas):
        text += "; the last micro-batch is not full: pass weight="
    return text


def batch(
    *,
    global_batch: int | None = None,
    micro_batch: int | None = None,
    k: int | None = None,
    replicas: int | None = 1,
    examples: int | None = None,
    epochs: int = 1,
    drop_tail: bool = False,
    activation_per_sample: int | float | str | None = None,
) -> Batch:
    """The whole of global batch = micro-batch x k x replicas, from any part that determines it.

    ::

        global_batch = micro_batch * k * replicas
        updates_per_epoch = ceil(examples / global_batch)       # floor if the tail is dropped
        schedule_updates = epochs * updates_per_epoch
        activations = micro_batch * activation_per_sample       # on a device, whatever k is

    k is each replica's. Schedules, weight decay and EMA count updates: give them
    `schedule_updates`, not the number of micro-steps.

    Args:
      global_batch: examples of an update.
      micro_batch: examples of one forward and backward pass on a replica.
      k: micro-steps of a window.
      replicas: how many share the global batch; None to have it computed from the other three.
      examples: examples of the data set.
      epochs: how often the data set is gone through.
      drop_tail: whether the examples behind the last full window of an epoch are left out. By
        default they are a window of their own, which `last=True` (`mark_last`) closes.
      activation_per_sample: bytes of activations of one example, a number or a text ("0.5GB").

    Returns:
      A :class:`Batch`; printed, it is a table.

    Raises:
      ValueError: where too little is given, or what is given does not go together; the message
        names the nearest numbers that do.

    Example:
      >>> import optax_accum as oa
      >>> print(oa.planning.batch(micro_batch=4, k=8, activation_per_sample="0.5GB"))
      global batch  32 = micro-batch 4 x k 8 x 1 replica
      activations   2 GB a device = 4 x 500 MB
      >>> found = oa.planning.batch(global_batch=128, micro_batch=4, replicas=4, examples=1000)
      >>> found.k, found.updates_per_epoch, found.micro_steps_per_epoch, found.tail
      (8, 8, 63, 104)
    """
    given = {
        "global_batch": global_batch,
        "micro_batch": micro_batch,
        "k": k,
        "replicas": replicas,
    }
    known = {name: _checks.whole(name, n) for name, n in given.items() if n is not None}
    if len(known) < 3:
        raise ValueError(
            f"{_said(known) or 'nothing'} was given, expected enough to know "
            "global_batch = micro_batch * k * replicas; type two of global_batch=, micro_batch= "
            "and k=, such as global_batch=256, micro_batch=8."
        )
    found = _completed(known)
    cut = Batch(*(found[name] for name in given), epochs=_checks.whole("epochs", epochs))
    if activation_per_sample is not None:
        cut = cut._replace(activations=activations(cut.micro_batch, activation_per_sample))
    if examples is None:
        return cut
    return _with_epochs(cut, _checks.whole("examples", examples), drop_tail)


def activations(micro_batch: int, per_sample: int | float | str) -> int:
    """Peak bytes of activations on a device: M = b x A, whatever k and the replicas are.

    Micro-batches come one after the other, so only one micro-batch's activations are alive.

    Args:
      micro_batch: b, examples of one forward and backward pass on a replica.
      per_sample: A, bytes of activations of one example: a number, or a text such as "0.5GB".

    Returns:
      Bytes.

    Raises:
      ValueError: for a micro-batch below 1, and for bytes that cannot be read.

    Example:
      >>> import optax_accum as oa
      >>> oa.planning.activations(4, "0.5GB")
      2000000000
    """
    per = _units.parse_bytes("activation_per_sample", per_sample)
    return _checks.whole("micro_batch", micro_batch) * per


def _completed(known: dict[str, int]) -> dict[str, int]:
    total = known.get("global_batch")
    parts = {name: n for name, n in known.items() if name != "global_batch"}
    product = 1
    for n in parts.values():
        product *= n
    if total is None:
        return known | {"global_batch": product}
    if len(parts) == 3 and product == total:
        return known
    if len(parts) == 2 and total % product == 0:
        missing = ({"micro_batch", "k", "replicas"} - parts.keys()).pop()
        return known | {missing: total // product}
    raise ValueError(_remedy(total, parts, product))


def _remedy(total: int, parts: dict[str, int], product: int) -> str:
    exact = len(parts) == 3
    wrong = f"{product}, not {total}" if exact else f"{product}, which does not divide {total}"
    fits = [f"global_batch={n}" for n in _around(total, product, exact)]
    for name, n in parts.items():
        rest = product // n
        if exact and total % rest == 0:
            fits.append(f"{name}={total // rest}")
        elif not exact and total % rest == 0:
            fits += [f"{name}={near}" for near in _nearest(_checks.divisors(total // rest), n)]
    made = " * ".join(parts)
    return f"{_said(parts)} make {made} = {wrong}; the nearest that work: {', '.join(fits)}."


def _around(total: int, product: int, exact: bool) -> list[int]:
    if exact:
        return [product]
    below = total // product * product
    return [n for n in (below, below + product) if n]


def _nearest(among: list[int], n: int) -> list[int]:
    return [d for d in among if d < n][-1:] + [d for d in among if d > n][:1]


def _said(known: dict[str, int]) -> str:
    return ", ".join(f"{name}={n}" for name, n in known.items())


def _with_epochs(cut: Batch, examples: int, drop_tail: Any) -> Batch:
    full, tail = divmod(examples, cut.global_batch)
    if drop_tail and not full:
        raise ValueError(
            f"examples={examples} fill no window of {cut.global_batch}, so that nothing is left "
            f"with drop_tail=True; type drop_tail=False, or global_batch={examples} or less."
        )
    tail_micro_steps = 0 if drop_tail else -(-tail // (cut.micro_batch * cut.replicas))
    updates = full + bool(tail_micro_steps)
    return cut._replace(
        examples=examples,
        micro_steps_per_epoch=full * cut.k + tail_micro_steps,
        updates_per_epoch=updates,
        tail=tail,
        tail_micro_steps=tail_micro_steps,
        schedule_updates=cut.epochs * updates,
    )
