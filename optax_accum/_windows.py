"""The windows of other accumulators and of other settings, as those of an `accumulate`."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_accum import _accumulator as acc
from optax_accum import _checks
from optax_accum._call import Settings
from optax_accum._fits import promoted
from optax_accum._shardings import refold
from optax_accum._state import AccumulateState


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A leaf of the state that `tx.init` makes; in the result, one that is taken from there."""

    number: int
    like: Any


class Given(NamedTuple):
    use_grad_mean: bool | None
    weight: float | None
    update_step: int | None
    cast: bool
    settings: Settings | None  # of the accumulate to which a window goes, where they are known
    outside: Any = None  # the state around, as it was given
    # What a window around weighs that counted as 1, in windows of ours and of MultiSteps.
    factor: float | None = 1.0  # None where it is not known
    each: float | None = 1.0


def converted(given: Given, at: str, want: Any, state: Any) -> tuple[str, AccumulateState]:
    """Whatever `state` is, as the state of an `accumulate`, and where its optimizer's was found.

    The optimizer's state in it is still the one that was given.
    """
    if isinstance(state, optax.MultiStepsState):
        at_inner, ours = f"{at}.inner_opt_state", _from_multi_steps(given, at, want, state)
    elif isinstance(state, AccumulateState):
        at_inner, ours = f"{at}.inner_state", _from_ours(given, at, want, state)
    else:
        at_inner, ours = at, _around(given, at, want, state)
    k = ours.k
    if isinstance(k, Wanted) and given.settings and not isinstance(ours.update_step, Wanted):
        k = given.settings.read_k(jnp.asarray(ours.update_step))
        if not isinstance(ours.micro_step, Wanted):  # of MultiSteps, whose k is not in its state
            k = jnp.maximum(k, ours.micro_step + 1)
    return at_inner, ours._replace(k=k)


def inside(given: Given, state: Any) -> Given:
    """What is given for the windows inside of that one, which get its weight from now on."""
    factor, each = given.factor, 1.0 if given.weight is None else float(given.weight)
    if isinstance(state, optax.MultiStepsState):
        k = None if given.settings is None or callable(given.settings.k) else given.settings.k
        factor = each = _window_weight(given, k)
    elif isinstance(state, AccumulateState):
        each = _window_weight(given, _most(state.k))
    return given._replace(settings=None, outside=state, factor=factor, each=each)


def _window_weight(given: Given, k: int | None) -> float | None:
    """What inner gets as the weight of a window of k micro-steps; None where it is not known."""
    if given.settings is None or k is None:
        return None
    if given.settings.loss_reduction == "sum":
        return 1.0
    if given.weight is None and given.settings.loss_reduction == "sum_over_weight":
        return None
    return k * (1.0 if given.weight is None else float(given.weight))


def _known(at: str, factor: float | None) -> float:
    if factor is None:
        raise ValueError(
            f"{at} has an open window inside another, in which optax.MultiSteps let each of those "
            "count as 1, and what one weighs in tx is not known: its k is a schedule, it stands in "
            "a chain, or weight= is missing; run the old one until the window inside is empty."
        )
    return factor


def _around(given: Given, at: str, want: Any, inner_state: Any) -> AccumulateState:
    """An empty window around a plain optimizer's state."""
    outside = given.outside
    is_window = isinstance(outside, (AccumulateState, optax.MultiStepsState))
    if is_window and _is_open(at, _taken(outside)):
        raise ValueError(
            f"the window around {at} is open, {_most(_taken(outside))} micro-steps in it, and tx "
            f"has one more inside, of which that one may be a part or not; {_closing(outside)}."
        )
    scheduled = given.settings is not None and callable(given.settings.k)
    if scheduled and given.update_step is None:
        raise ValueError(
            "the state has no window, and k is a schedule of updates, of which a plain optimizer's "
            "state does not tell; type update_step=the number of updates made so far."
        )
    ours = want._replace(inner_state=inner_state)
    if given.update_step is not None:
        ours = ours._replace(update_step=jnp.full([], given.update_step, jnp.int32))
    return ours


def _from_ours(given: Given, at: str, want: Any, state: AccumulateState) -> AccumulateState:
    rows = len(want.weight_sum.like.shape)
    if state.has_rows != bool(rows):
        window: Any = refold(state._replace(inner_state=()), 1 if rows else None)
        state = window._replace(inner_state=state.inner_state)
    if _is_open(at, state.micro_step):
        _require_buffer(at, want, state)
        if given.factor != 1:
            state = _scaled(state, _known(at, given.factor))
        sums = _sums(f"{at}.grad_sum", want.grad_sum, state.grad_sum, _checked_sum(given), rows)
        return state._replace(grad_sum=sums)
    kept = {name: getattr(state, name) for name in ("update_step", "updated", "skipped")}
    if want.grad_sum is None:
        return _reset(want, state)._replace(**kept, grad_sum=None)
    if state.grad_sum is None:
        return _reset(want, state)._replace(**kept, grad_sum=want.grad_sum)
    sums = _sums(f"{at}.grad_sum", want.grad_sum, state.grad_sum, _emptied_sum, rows)
    return _reset(want, state)._replace(**kept, grad_sum=sums)


def _scaled(state: AccumulateState, factor: float) -> AccumulateState:
    """An open window, each micro-step of which weighs `factor` times as much."""

    def one(total: Any) -> jax.Array:
        total = jnp.asarray(total)
        wide = promoted(total.dtype, jnp.float32)
        return (total.astype(wide) * factor).astype(total.dtype)

    names = ("weight_sum", "grad_sum", "value_sum", "value_weight")
    sums = {name: jax.tree.map(one, getattr(state, name)) for name in names}
    return state._replace(**sums)


def _reset(want: Any, state: AccumulateState) -> AccumulateState:
    """Its window and its clocks of an open one as they are in an empty one."""
    fresh = {
        name: jax.tree.map(jnp.zeros_like, getattr(state, name))
        for name in ("micro_step", *acc.Window._fields[1:])
    }
    return state._replace(k=want.k, **fresh)


def _from_multi_steps(given: Given, at: str, want: Any, state: Any) -> AccumulateState:
    """A window of n micro-steps that weigh the same; of a mean, or of a sum."""
    ours = want._replace(
        update_step=jnp.asarray(state.gradient_step, jnp.int32), inner_state=state.inner_opt_state
    )
    if not _is_open(f"{at}.mini_step", state.mini_step):
        return ours
    _require_buffer(at, want, state)
    if given.use_grad_mean is None:
        raise ValueError(
            f"{at} holds a window of optax.MultiSteps after {int(state.mini_step)} micro-steps, "
            "and its state does not say whether it is their mean or their sum; type "
            "use_grad_mean=True (the default of optax.MultiSteps) or use_grad_mean=False."
        )
    micro_steps = int(state.mini_step)
    reduction = given.settings and given.settings.loss_reduction
    if given.outside is None:
        _check_weight(given.weight, reduction)
    each = 1.0 if given.weight is None else float(given.weight)
    factor = micro_steps if given.use_grad_mean else 1
    factor *= each if reduction == "mean" else 1
    if given.outside is not None:
        each = _known(at, given.each)
        factor *= each

    def summed(at: str, like: Any, total: Any) -> jax.Array:
        wide = promoted(jnp.result_type(total), jnp.float32)
        total = jnp.asarray(total)
        widened = total.astype(promoted(total.dtype, like.dtype))
        widened = in_dtype(given, at, like.dtype, widened)
        return (widened.astype(wide) * factor).astype(like.dtype)

    rows = want.weight_sum.like.shape
    sums = jax.tree.map(lambda x: jnp.reshape(x, rows + jnp.shape(x)), state.acc_grads)
    ours = ours._replace(
        micro_step=jnp.full([], micro_steps, jnp.int32),
        grad_sum=_sums(f"{at}.acc_grads", want.grad_sum, sums, summed),
    )
    return ours._replace(
        weight_sum=jnp.full(rows, micro_steps * each, jnp.float32),
        kept=jnp.full(rows, micro_steps, jnp.int32),
    )


def _check_weight(weight: float | None, loss_reduction: str | None) -> None:
    """Raise where the weight of a micro-step of MultiSteps is needed or has no meaning."""
    if weight is None and loss_reduction == "sum_over_weight":
        raise ValueError(
            "weight is missing, expected with loss_reduction='sum_over_weight': type weight=the "
            "tokens of each micro-step in the open window of optax.MultiSteps."
        )
    if weight is not None and loss_reduction in (None, "sum"):
        raise ValueError(
            "weight was given, expected only where tx is accumulate(...) itself and weighs its "
            "micro-steps; leave it out, or put the links of a chain inside accumulate."
        )
    if weight is not None and not _checks.known_weight(weight):
        raise ValueError("weight is 0, expected what each micro-step in the window weighs.")


def _sums(
    at: str, want: Any, sums: Any, one: Callable[[str, Any, Any], Any], first: int = 0
) -> Any:
    """The sums of a window, leaf by leaf; their shapes as wanted, but for the `first` axes."""
    wanted, treedef = jax.tree_util.tree_flatten_with_path(want)
    try:
        found = treedef.flatten_up_to(sums)
    except (ValueError, TypeError, KeyError) as error:
        got, expected = _checks.structures(sums, want)
        raise ValueError(
            f"{at} has the structure {got}, expected that of the parameters, {expected}; "
            f"{remedy(sums)}."
        ) from error
    out = []
    for (path, wish), total in zip(wanted, found, strict=True):
        name, like = at + jax.tree_util.keystr(path), wish.like
        if not _checks.is_array(total) or jnp.shape(total)[first:] != like.shape[first:]:
            of = "give convert_state the parameters that the window was made for"
            raise ValueError(
                f"{name} is {shown(total)}, expected the shape {like.shape} of its parameter; "
                f"{remedy(total) if isinstance(total, Mapping) else of}."
            )
        out.append(one(name, like, total))
    return treedef.unflatten(out)


def _checked_sum(given: Given) -> Callable[[str, Any, Any], Any]:
    return lambda at, like, total: in_dtype(given, at, like.dtype, total)


def _emptied_sum(at: str, like: Any, total: Any) -> Any:
    """The buffer of a window that holds nothing; what is left over in it is overwritten."""
    del at
    return total if total.dtype == like.dtype else jnp.zeros_like(total, like.dtype)


def _is_open(at: str, micro_step: Any) -> bool:
    if _checks.is_traced(micro_step):
        raise TypeError(
            f"{at} is traced, expected values: what becomes of a window depends on whether it is "
            "open; call convert_state outside of jax.jit."
        )
    return bool(np.any(np.asarray(micro_step)))


def emptied(at: str, state: Any) -> tuple[str, Any]:
    """The name and the state of the optimizer inside an empty window."""
    ours = isinstance(state, AccumulateState)
    if _is_open(at, _taken(state)):
        raise ValueError(
            f"{at} has an open window, {_most(_taken(state))} micro-steps in it, for which tx has "
            f"no place; {_closing(state)}."
        )
    return (
        ("inner_state", state.inner_state) if ours else ("inner_opt_state", state.inner_opt_state)
    )


def _require_buffer(at: str, want: Any, state: Any) -> None:
    if want.grad_sum is None:
        raise ValueError(
            f"{at} has an open window, {_most(_taken(state))} micro-steps in it, and "
            f"accumulate(inner, k=1) holds none; {_closing(state)}, or type k=lambda update_step: "
            "1, which keeps a buffer."
        )


def _taken(state: Any) -> Any:
    return state.micro_step if isinstance(state, AccumulateState) else state.mini_step


def _most(micro_step: Any) -> int:
    return int(np.max(np.asarray(micro_step)))


def _closing(state: Any) -> str:
    """How an open window is closed, for messages."""
    if isinstance(state, AccumulateState):
        return (
            "close it first by its own transformation, updates, state = oa.flush(old_tx, state, "
            "params), or stop after an update"
        )
    return (
        "run optax.MultiSteps to the end of its window first, or convert to accumulate(inner, k) "
        "with its k and close that by oa.flush(accumulated, state, params)"
    )


def remedy(state: Any) -> str:
    """What to type where a state does not have the structure of that of `tx`."""
    if isinstance(state, Mapping) and (all(str(key).isdigit() for key in state) or _boxed(state)):
        return (
            "it looks like nnx.state(optimizer), or like that restored without a target; restore "
            "it with nnx.state(old_optimizer) as the target, nnx.update(old_optimizer, restored), "
            "and type oa.nnx.Optimizer.convert(old_optimizer, model, tx)"
        )
    return (
        "the state of another optimizer, or of other parameters; give convert_state the optimizer "
        "that made it (inside accumulate) and the parameters of its tree"
    )


def _boxed(node: Any) -> bool:
    """Whether NNX's Variables are dicts in there."""
    if not isinstance(node, Mapping):
        return False
    return set(node) in ({"value"}, {"opt_state", "step"}) or any(map(_boxed, node.values()))


def in_dtype(given: Given, at: str, dtype: Any, leaf: Any) -> Any:
    have = leaf.dtype if _checks.is_key(leaf) else jnp.result_type(leaf)
    if have == dtype:
        return leaf
    if jnp.issubdtype(have, jnp.floating) and jnp.issubdtype(dtype, jnp.floating):
        if given.cast:
            return jnp.asarray(leaf).astype(dtype)
        raise TypeError(
            f"{at} is {have}, expected {jnp.dtype(dtype).name}, which tx.init(params) gives; type "
            "cast=True to have it cast, or give tx the dtypes of before (accumulator_dtype, the "
            "optimizer's own, the parameters')."
        )
    raise TypeError(f"{at} is {have}, expected {dtype}, which tx.init(params) gives.")


def shown(node: Any) -> str:
    if isinstance(node, Wanted):
        return shown(node.like)
    if isinstance(node, Mapping):
        return f"a {type(node).__name__} of {sorted(map(str, node))}"
    if isinstance(node, (tuple, list)) and not hasattr(node, "_fields"):
        return f"a {type(node).__name__} of {len(node)}"
    return _checks.described(node) if _checks.is_array(node) else f"a {type(node).__name__}"
