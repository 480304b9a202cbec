"""Validators that several rooms share. Every message says: got, expected, what to type."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

LOSS_REDUCTIONS = ("mean", "sum", "sum_over_weight")
NONFINITE_POLICIES = ("propagate", "skip_micro_step", "skip_window")
_INT32_MAX = 2**31 - 1
LARGEST_WEIGHT = 2.0**100  # the reciprocal of a window's weight must stay a normal float32


def is_traced(x: Any) -> bool:
    """Whether the value of `x` is unknown while the program is being built."""
    return isinstance(x, jax.core.Tracer)


def is_array(x: Any) -> bool:
    """Whether a leaf can hold a gradient: no function, string, key or float0."""
    if isinstance(x, (bool, int, float, complex)):
        return True
    dtype = getattr(x, "dtype", None)
    if dtype is None or dtype == jax.dtypes.float0:
        return False
    return not jnp.issubdtype(dtype, jax.dtypes.extended)


def is_key(x: Any) -> bool:
    """Whether a leaf is an array of typed PRNG keys."""
    return jnp.issubdtype(getattr(x, "dtype", np.void), jax.dtypes.extended)


def is_vmapped(x: Any) -> bool:
    """Whether `x` is being mapped by `jax.vmap` right here; jax has no public test for it."""
    if not is_traced(x):
        return False
    parts = [getattr(x, name, None) for name in ("primal", "tangent")]  # differentiated, too
    return type(x).__name__ == "BatchTracer" or any(map(is_vmapped, parts))


def is_transformed(x: Any) -> bool:
    """Whether `x` is being mapped or differentiated right here, and not only compiled."""
    return is_traced(x) and type(x).__name__ not in ("DynamicJaxprTracer", "ShardMapTracer")


def described(x: Any) -> str:
    """For messages: the dtype and shape of an array, the type of anything else."""
    return f"{jnp.result_type(x)}{list(jnp.shape(x))}" if is_array(x) else type(x).__name__


def divisors(number: int) -> list[int]:
    """All of a number's, in order: for messages that name what would fit."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def structures(got: Any, wanted: Any, most: int = 150) -> tuple[str, str]:
    """For messages: the structures of two trees, cut down to where they differ first."""
    a, b = (str(jax.tree.structure(t))[len("PyTreeDef(") : -1] for t in (got, wanted))
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), 0)
    start = max(same - most // 2, 0)

    def cut(text: str) -> str:
        end = "..." if len(text) > start + most else ""
        return ("..." if start else "") + text[start : start + most] + end

    return cut(a), cut(b)


def is_scalar(x: Any, kind: Any) -> bool:
    """Whether `x` is a scalar array or number of a kind of dtype."""
    return is_array(x) and jnp.shape(x) == () and jnp.issubdtype(jnp.result_type(x), kind)


def choice(name: str, got: Any, allowed: tuple[str, ...]) -> None:
    if not isinstance(got, str) or got not in allowed:
        listed = ", ".join(f"{name}={option!r}" for option in allowed)
        raise ValueError(f"{name} is {got!r}; expected one of: {listed}.")


def integer_k(k: Any) -> int:
    """A Python integer from a static k of 1 or more."""
    if is_traced(k):
        raise TypeError(
            "k is a traced value, expected a Python integer or a schedule; "
            "for a k known only at run time pass a schedule, k=lambda update_step: value, "
            "and under optax.inject_hyperparams list it in static_args=('k',)."
        )
    try:
        number = None if is_scalar(k, jnp.bool_) else operator.index(k)
    except TypeError:
        number = None
    if number is None or not 1 <= number <= _INT32_MAX:
        raise ValueError(
            f"k is {k!r} ({type(k).__name__}), expected an integer from 1 to {_INT32_MAX} or a "
            "schedule update_step -> int; for eight micro-steps a window type k=8."
        )
    return number


def whole(name: str, number: Any) -> int:
    """A Python integer of 1 or more, for what cannot be a schedule."""
    try:
        found = (
            None if is_traced(number) or is_scalar(number, jnp.bool_) else operator.index(number)
        )
    except TypeError:
        found = None
    if found is None or found < 1:
        raise ValueError(
            f"{name} is {number!r} ({type(number).__name__}), expected an integer of 1 or more, "
            f"known before compilation; type {name}=8."
        )
    return found


def function(name: str, thing: Any) -> None:
    if thing is not None and not callable(thing):
        raise TypeError(f"{name} is {described(thing)}, expected a function.")


def scheduled_k(schedule: Callable[[Any], Any], update_step: jax.Array) -> jax.Array:
    """What the schedule says for this update, as int32; below 1 counts as 1."""
    k = schedule(update_step)
    if not is_scalar(k, jnp.integer):
        raise TypeError(
            f"the schedule of k returned {described(k)}, expected an integer scalar; "
            "round it yourself: k=lambda update_step: jnp.int32(your_schedule(update_step))."
        )
    if not isinstance(k, jax.Array):
        return jnp.full([], min(max(operator.index(k), 1), _INT32_MAX), jnp.int32)
    if jnp.iinfo(k.dtype).max > _INT32_MAX:
        k = jnp.minimum(k, _INT32_MAX)
    return jnp.maximum(k.astype(jnp.int32), 1)


def accumulator_dtype(dtype: Any) -> Any:
    """None, or a dtype that a window may have."""
    if dtype is None:
        return None
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.inexact):
        raise TypeError(
            f"accumulator_dtype is {dtype!r}, expected a floating or complex dtype; "
            "type accumulator_dtype=jnp.float32, jnp.bfloat16, or None for the default."
        )
    if jnp.finfo(found).maxexp < jnp.finfo(jnp.bfloat16).maxexp:
        raise TypeError(
            f"accumulator_dtype is {found.name}, whose sums overflow past "
            f"{float(jnp.finfo(found).max):g}; type accumulator_dtype=jnp.bfloat16 (the range of "
            "float32, rounded stochastically) or None for the default."
        )
    if jax.dtypes.canonicalize_dtype(found) != found:
        raise TypeError(
            f"accumulator_dtype is {found.name}, which jax narrows to "
            f"{jax.dtypes.canonicalize_dtype(found).name} here; type "
            'jax.config.update("jax_enable_x64", True) first.'
        )
    return found


def real_scalar(name: str, number: Any, dtype: Any = jnp.float32) -> Any:
    """A real scalar, of a dtype."""
    if not any(is_scalar(number, kind) for kind in (jnp.integer, jnp.floating, jnp.bool_)):
        it = f"{name}={name}" if name.isidentifier() else "that"
        raise TypeError(
            f"{name} is {described(number)}, expected one real number for the whole micro-batch; "
            f"for one number an example type {it}.sum() or {it}.mean()."
        )
    if isinstance(number, jax.Array):
        return number.astype(dtype)
    with np.errstate(over="ignore"):
        return jnp.asarray(np.asarray(number).astype(dtype))


def known_weight(weight: Any) -> float | None:
    """The value of a valid weight as the window will hold it, or None while it is traced."""
    if is_traced(weight):
        return None
    with np.errstate(over="ignore"):
        value = float(np.float32(weight))
    if not (float(weight) >= 0 and value <= LARGEST_WEIGHT):
        raise ValueError(
            f"weight is {float(weight)!r}, expected a number from 0 to 2**100; to leave a "
            "micro-batch out type weight=0."
        )
    return value if value >= np.finfo(np.float32).tiny else 0.0  # as compiled code takes it


def scalar_flag(name: str, flag: Any) -> Any:
    """A bool, static or traced."""
    if isinstance(flag, (bool, np.bool_)):
        return bool(flag)
    if not is_scalar(flag, jnp.bool_):
        raise TypeError(
            f"{name} is {described(flag)}, expected a bool scalar; type {name}=True, or "
            f"{name}=jnp.asarray(flag, bool) for a traced one."
        )
    return flag


def indices(name: str, argnums: int | Sequence[int]) -> tuple[int, ...]:
    """Numbers of arguments, one given alone included."""
    try:
        if isinstance(argnums, (list, tuple)):
            return tuple(map(operator.index, argnums))
        return (operator.index(argnums),)  # pyright: ignore[reportArgumentType]
    except TypeError:
        raise TypeError(
            f"{name} is {argnums!r}, expected the number of an argument or a tuple of them; "
            f"type {name}=1 or {name}=(1, 2)."
        ) from None


def weight_function(weight: Any, loss_reduction: str) -> None:
    if weight is not None and not callable(weight):
        raise TypeError(
            f"weight is {described(weight)}, expected a function of a micro-batch; type "
            "weight=lambda batch: batch['mask'].sum()."
        )
    if weight is not None and loss_reduction == "sum":
        raise ValueError(
            "weight was given with loss_reduction='sum', whose losses are summed as they are; drop "
            "weight=, or type loss_reduction='sum_over_weight' to divide by it."
        )
    if weight is None and loss_reduction == "sum_over_weight":
        raise ValueError(
            "weight is missing, expected with loss_reduction='sum_over_weight'; type "
            "weight=lambda batch: batch['mask'].sum()."
        )


def axis_name(name: Any) -> Any:
    """None, the name of a mapped axis, or a tuple of several."""
    if name is None or isinstance(name, str):
        return name
    if isinstance(name, (tuple, list)) and name and all(isinstance(each, str) for each in name):
        return tuple(name)
    raise TypeError(
        f"axis_name is {name!r}, expected the name of a mapped axis or several; type "
        'axis_name="data" or axis_name=("data", "fsdp").'
    )
