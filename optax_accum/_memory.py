"""The memory of a training run from a formula, part by part, each with what it assumes."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from optax_accum import _checks, _fits, _held, _units
from optax_accum._call import settings_of

ZERO = "ZeRO (arXiv 1910.02054)"
SCHEMES = "traffic of a window by scheme (oa.planning.traffic)"
SQUARE = 1024  # the side of the matrices that Adafactor is assumed to factor, of a bare count
OPTIMIZERS = {  # float32 numbers kept for a parameter, and from where
    "adam": (2.0, "first and second moment", "Adam (arXiv 1412.6980)"),
    "lion": (1.0, "one momentum", "Lion (arXiv 2302.06675)"),
    "adafactor": (
        2 / SQUARE,
        f"a row and a column a matrix, {SQUARE} x {SQUARE} each",
        "Adafactor (arXiv 1804.04235)",
    ),
    "momentum": (1.0, "one momentum", "optax.sgd(momentum=0.9)"),
    "sgd": (0.0, "nothing", "optax.sgd"),
}
COUNTED = {
    "adam": optax.adam(1e-3),
    "lion": optax.lion(1e-3),
    "adafactor": optax.adafactor(1e-3),
    "momentum": optax.sgd(1e-3, momentum=0.9),
    "sgd": optax.sgd(1e-3),
}
PRECISIONS = {  # bytes of a weight, of a gradient, and of a master copy
    "mixed": (2, 2, 4),
    "float32": (4, 4, 0),
}


class Part(NamedTuple):
    """One part of the memory of a device."""

    name: str
    bytes: int
    assumption: str
    source: str


class Memory(NamedTuple):
    """Bytes on a device, and what each of them assumes; printed, it is a table."""

    parameters: int
    gradients: int  # of one micro-batch
    window: int
    optimizer: int  # its state, and master weights where there are some
    activations: int
    total: int
    parts: tuple[Part, ...]

    def __str__(self) -> str:
        rows = [(part.name, _units.show(part.bytes), _why(part)) for part in self.parts]
        return _units.columns([*rows, ("total", _units.show(self.total), "")], right=(1,))


class _Sizes(NamedTuple):
    """Bytes of everything on one device without ZeRO, with what was assumed of it."""

    parameters: Part
    gradients: Part
    window: Part
    optimizer: Part


def memory(
    params: int | float | str | optax.Params,
    *,
    tx: optax.GradientTransformation | None = None,
    optimizer: str = "adam",
    precision: str | None = None,
    k: int = 1,
    accumulator_dtype: Any = None,
    engine: str = "carry",
    trainable: float = 1.0,
    zero: int = 0,
    devices: int = 1,
    reduction: str = "micro_batch",
    micro_batch: int = 1,
    activation_per_sample: int | float | str = 0,
) -> Memory:
    """Bytes on a device: parameters, gradients, window, optimizer state, activations.

    ::

                          parameters  gradients  optimizer
        mixed, Adam       2           2          4 + 4 + 4     16 bytes a parameter
        float32, Adam     4           4          4 + 4         16
        ZeRO-1            2           2          12 / N
        ZeRO-2            2           2 / N      12 / N
        ZeRO-3            2 / N       2 / N      12 / N
        window            accumulator_dtype each, for k > 1; 1/N of it where ZeRO-2 or 3 reduces
                          every micro-batch, whole where it reduces once a window
        activations       micro_batch * activation_per_sample, whatever k is

    What a compiler adds (buffers of one layer, workspaces, fragmentation) is not in it: where the
    program can be compiled, :func:`fit` counts instead.

    Args:
      params: how many parameters (7e9, "7B"), or a tree of arrays or `jax.ShapeDtypeStruct`s.
      tx: the optimizer, or what `accumulate` made of it; with a tree of parameters: its state is
        counted, `jax.eval_shape(tx.init, params)`, and the window in it.
      optimizer: without tx: "adam" (AdamW too), "lion", "adafactor", "momentum" or "sgd".
      precision: "mixed" (bfloat16 weights and gradients, float32 master weights and state) or
        "float32"; None: "mixed" for a number of parameters, their own dtypes for a tree.
      k: micro-steps in a window; 1 has none. That of `tx` goes first.
      accumulator_dtype: of the window; None: float32, or wider.
      engine: "carry": one micro-batch's gradient stands beside the window; "refs": none does.
      trainable: the share of the parameters that is trained: of a low-rank adapter
        adapter / (adapter + frozen). The rest has neither gradients nor state.
      zero: 0 to 3, what is in shards over `devices`: the optimizer's state (1), the gradients too
        (2), the parameters too (3).
      devices: N, that share the shards.
      reduction: "micro_batch": ZeRO-2 and 3 reduce every micro-batch to shards. "window": once, so
        that the window, and in ZeRO-3 the gathered weights, are whole.
      micro_batch: examples of one forward and backward pass on a replica.
      activation_per_sample: bytes of activations of one example, a number or a text ("0.5GB").

    Returns:
      A :class:`Memory`, whose parts name their assumptions and sources.

    Raises:
      ValueError: for a name, a share or a number that cannot be meant.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import optax_accum as oa
      >>> oa.planning.memory("7B").total / 7e9
      16.0
      >>> oa.planning.memory("7B", zero=1, devices=8).optimizer / 7e9
      1.5
      >>> w = jax.ShapeDtypeStruct((1000, 1000), jnp.float32)
      >>> found = oa.planning.memory(w, tx=oa.accumulate(optax.sgd(0.1), k=8))
      >>> found.parameters, found.window, found.optimizer < 100
      (4000000, 4000000, True)
    """
    _checks.choice("optimizer", optimizer, tuple(OPTIMIZERS))
    _checks.choice("engine", engine, ("carry", "refs"))
    _checks.choice("reduction", reduction, ("micro_batch", "window"))
    _check_numbers(trainable, zero, devices)
    dtype = _checks.accumulator_dtype(accumulator_dtype)
    n = _count(params)
    if tx is not None and n is not None:
        raise ValueError(
            f"tx was given with the number {params!r} of parameters, expected their tree, so that "
            "its state can be counted; type jax.eval_shape(init, key) for params, or optimizer=."
        )
    k = _k_of(tx, _checks.integer_k(k))
    if n is None and precision is None:
        sizes = _counted(params, tx or COUNTED[optimizer], tx is None, k, dtype, trainable)
    else:
        precision = precision or "mixed"
        _checks.choice("precision", precision, tuple(PRECISIONS))
        n = _held.elements(params) if n is None else n
        sizes = _by_formula(n, optimizer, precision, k, dtype, trainable)
    if engine == "refs" and k > 1:
        beside = "refs engine: added into the window layer by layer"
        sizes = sizes._replace(gradients=Part("gradients", 0, beside, "oa.value_and_grad"))
    held = _sharded(sizes, zero, devices, reduction)
    per_sample = _units.parse_bytes("activation_per_sample", activation_per_sample)
    size = _checks.whole("micro_batch", micro_batch)
    each = f"micro-batch {size} x {_units.show(per_sample)} a sample, whatever k is"
    active = Part(
        "activations", size * per_sample, each if per_sample else "not given", "M = b x A"
    )
    parts = (*held, active)
    amounts = [part.bytes for part in parts]
    return Memory(*amounts, total=sum(amounts), parts=parts)


def _by_formula(
    n: int, optimizer: str, precision: str, k: int, dtype: Any, trainable: float
) -> _Sizes:
    weight, gradient, master = PRECISIONS[precision]
    slots, what, source = OPTIMIZERS[optimizer]
    trained, width = round(n * trainable), 4 if dtype is None else jnp.dtype(dtype).itemsize
    of = f" for {trainable:.3g} of them" if trainable < 1 else ""
    state = f"{what}, float32{of}" if slots else f"{what}{of}"
    if master:
        state = f"master weights, float32; {state}"
    kept = math.ceil(trained * slots * 4) + trained * master
    return _Sizes(
        Part("parameters", n * weight, f"{weight} bytes each", ZERO),
        Part("gradients", trained * gradient, f"{gradient} bytes each{of}", ZERO),
        _window(trained * width, k, of),
        Part("optimizer", kept, state, source if not master else f"{source}, {ZERO}"),
    )


def _counted(params: Any, tx: Any, named: bool, k: int, dtype: Any, trainable: float) -> _Sizes:
    shapes = _held.shapes_of(params)
    weights, state = _held.in_all(params), _held.counted_state(tx, params)
    found = _held.split_state(state)
    widths = [
        math.prod(x.shape) * _fits.window_dtype(x.dtype, dtype).itemsize
        for x in shapes
        if jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    of = f" for {trainable:.3g} of them" if trainable < 1 else ""
    window = found.window or round(sum(widths) * trainable)
    share = trainable if named else 1
    return _Sizes(
        Part("parameters", weights, f"as they are, {_held.describe_dtypes(params)}", "counted"),
        Part("gradients", round(weights * trainable), f"like the parameters{of}", "counted"),
        _window(window, k, of),
        Part("optimizer", round(found.optimizer * share), "tx.init(params)", "jax.eval_shape"),
    )


def _window(size: int, k: int, of: str) -> Part:
    if k == 1:
        return Part("window", 0, "k=1 holds none", "oa.accumulate")
    return Part("window", size, f"sums of the gradients{of}", "oa.accumulate")


def _sharded(sizes: _Sizes, zero: int, devices: int, reduction: str) -> list[Part]:
    def over(part: Part, stage: int) -> Part:
        if zero < stage or not part.bytes:
            return part
        return part._replace(
            bytes=-(-part.bytes // devices),
            assumption=f"{part.assumption}; 1/{devices} of it (ZeRO-{zero})",
            source=part.source if ZERO in part.source else f"{part.source}, {ZERO}",
        )

    parameters, gradients, window, optimizer = sizes
    once = reduction == "window" and zero >= 2
    if not once:
        return [over(parameters, 3), over(gradients, 2), over(window, 2), over(optimizer, 1)]
    if zero == 3:
        gathered = parameters.bytes - (-parameters.bytes // devices)
        text = f"{parameters.assumption}; shards, and all of them gathered once a window"
        parameters = Part("parameters", gathered, text, SCHEMES)
    whole = "; whole: reduced once a window"
    whole_window = window._replace(assumption=window.assumption + whole, source=SCHEMES)
    return [parameters, gradients, whole_window if window.bytes else window, over(optimizer, 1)]


def _count(params: Any) -> int | None:
    """The number of parameters, if it is a number that was given."""
    if not isinstance(params, (int, float, str)) or isinstance(params, bool):
        return None
    n = _units.parse_count("params", params)
    if n < 1:
        raise ValueError(f"params is {params!r}, expected a number of parameters; type '7B'.")
    return n


def _k_of(tx: Any, k: int) -> int:
    settings = settings_of(tx)
    if settings is None:
        return k
    return 2 if callable(settings.k) else settings.k  # a schedule holds a window


def _check_numbers(trainable: float, zero: int, devices: int) -> None:
    if not 0 < trainable <= 1:
        raise ValueError(
            f"trainable is {trainable!r}, expected a share above 0 and up to 1; for adapters type "
            "trainable=adapter_parameters / all_parameters."
        )
    if zero not in (0, 1, 2, 3):
        raise ValueError(f"zero is {zero!r}, expected 0, 1, 2 or 3; type zero=1, devices=8.")
    if _checks.whole("devices", devices) == 1 and zero:
        raise ValueError(
            f"zero={zero} shares among devices=1, expected several; type devices=8 or zero=0."
        )


def _why(part: Part) -> str:
    return f"{part.assumption} [{part.source}]"
