"""Flax Linen: a `TrainState` that knows updates from micro-steps, and mutable collections."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

try:
    from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
    from flax.training import train_state
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "optax_accum.linen needs Flax, which is not installed; type "
        'pip install "optax-accum[flax]".'
    ) from error

from optax_accum import _accumulator as acc
from optax_accum import _checks, _loop
from optax_accum._batch_stats import merge_batch_stats
from optax_accum._state import AccumulateState, outermost_states, the_state
from optax_accum._transform import apply_gradients


class TrainState(train_state.TrainState):
    """`flax.training.train_state.TrainState` for :func:`optax_accum.accumulate`.

    `apply_gradients` takes one micro-gradient in. Between updates it does not touch the parameters,
    and at an update it writes them in place where the state is donated,
    `jax.jit(..., donate_argnums=0)`: no parameter-sized temporary, where Flax's needs one.

    Subclass it for more fields, as Flax's: `batch_stats: Any`, say.

    Args:
      step: the number of *updates* made (of calls, if `tx` holds no `accumulate`, or several).
      apply_fn: usually `model.apply`.
      params: the parameters.
      tx: from :func:`optax_accum.accumulate`. Any other transformation works as in Flax.
      opt_state: the state of `tx`.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import flax.linen as nn
      >>> import optax_accum as oa
      >>> model = nn.Dense(1, use_bias=False, kernel_init=nn.initializers.zeros)
      >>> params = model.init(jax.random.key(0), jnp.ones((1, 1)))
      >>> tx = oa.accumulate(optax.sgd(1.0), k=2)
      >>> state = oa.linen.TrainState.create(apply_fn=model.apply, params=params, tx=tx)
      >>> loss_fn = lambda params, x: jnp.mean(state.apply_fn(params, x))
      >>> for x, weight in ((1.0, 1), (2.0, 3)):
      ...     grads = jax.grad(loss_fn)(state.params, jnp.full((1, 1), x))
      ...     state = state.apply_gradients(grads=grads, weight=weight)
      >>> state.params["params"]["kernel"].item(), int(state.step), bool(state.updated)
      (-1.75, 1, True)
    """

    def apply_gradients(
        self,
        *,
        grads: Any,
        weight: Any = None,
        last: Any = False,
        value: Any = None,
        extra: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """The state with one micro-gradient more, and updated where that fills the window.

        Args:
          grads: a tree like `params`. What Flax overwrites with its gradient, the scales of FP8, is
            handed on at each micro-step, save one of weight 0 or whose gradient is not finite.
          weight: how much this micro-batch counts, as in :func:`optax_accum.accumulate`.
          last: True closes the window with this micro-batch.
          value: the micro-batch's loss, if inner takes it: it gets the window's.
          extra: what else inner's update takes.
          **kwargs: other fields to replace, `batch_stats=new_batch_stats` say.
        """
        owned = OVERWRITE_WITH_GRADIENT in grads
        trained, grad = (self.params["params"], grads["params"]) if owned else (self.params, grads)
        arguments = {"weight": weight, "last": last, **(extra or {})}
        if value is not None:
            arguments["value"] = value
        params, opt_state = apply_gradients(self.tx, grad, self.opt_state, trained, **arguments)
        if owned:
            params = {
                "params": params,
                OVERWRITE_WITH_GRADIENT: self._overwritten(grads, weight, opt_state),
            }
        windows = outermost_states(opt_state)
        step = jnp.copy(windows[0].update_step) if len(windows) == 1 else self.step + 1
        return self.replace(step=step, params=params, opt_state=opt_state, **kwargs)

    def _overwritten(self, grads: Any, weight: Any, opt_state: Any) -> Any:
        """The scales of FP8: handed on as Flax does, not averaged, but by no lost micro-step."""
        new, old = grads[OVERWRITE_WITH_GRADIENT], self.params[OVERWRITE_WITH_GRADIENT]
        windows = list(map(outermost_states, (self.opt_state, opt_state)))
        if not windows[0]:
            return new
        counts = acc.all_finite(grads["params"])
        for before, after in zip(*windows, strict=True):
            counts &= after.skipped == before.skipped
        if weight is not None:
            counts &= acc.is_weight(weight) & (jnp.asarray(weight) != 0)
        return jax.tree.map(lambda new, old: jnp.where(counts, new, old), new, old)

    @classmethod
    def create(
        cls, *, apply_fn: Any, params: Any, tx: optax.GradientTransformation, **kwargs: Any
    ) -> Any:
        """A new state, with `tx.init(params)` and `step=0`, and other fields as given."""
        state = super().create(apply_fn=apply_fn, params=params, tx=tx, **kwargs)
        return state.replace(step=jnp.zeros([], jnp.int32))

    @property
    def micro_step(self) -> jax.Array:
        """Micro-steps taken in the open window: an int32 scalar."""
        return self._window.micro_step

    @property
    def updated(self) -> jax.Array:
        """Whether the last call of `apply_gradients` ran inner: a bool scalar."""
        return self._window.updated

    @property
    def _window(self) -> AccumulateState:
        if not outermost_states(self.opt_state):
            raise ValueError(
                "tx holds no accumulate, so that every call is an update and there are no "
                "micro-steps to ask for; type tx=oa.accumulate(optimizer, k)."
            )
        return the_state(self.opt_state)


def value_and_grad(
    loss_fn: Callable[..., Any],
    k: int | None = None,
    *,
    momentum: Any = None,
    merge: Mapping[str, Callable[..., Any]] | None = None,
    variables_argnum: int = 1,
    batch_argnums: int | Sequence[int] = 2,
    has_aux: bool = False,
    **options: Any,
) -> Callable[..., Any]:
    """:func:`optax_accum.value_and_grad` of a model with mutable collections.

    ::

        def loss_fn(params, variables, batch):
            outputs, new = model.apply(
                {"params": params, **variables}, batch, mutable=["batch_stats"]
            )
            return loss(outputs), new

    The collection `batch_stats` becomes that of the window and moves once
    (:func:`optax_accum.merge_batch_stats`); every other collection that `loss_fn` returns is handed
    on from micro-step to micro-step; those that it does not return stay as they are.

    Without mutable collections :func:`optax_accum.value_and_grad` is all that is needed.

    Args:
      loss_fn: returns `(loss, new)`, or `(loss, (new, aux))` with `has_aux`; `new` holds the
        collections that have changed, as `model.apply(..., mutable=...)` returns them.
      k: micro-batches in the batch.
      momentum: of the model's BatchNorm, 0.99 in Flax by default; for several, and for a layer
        that is called twice in one forward pass, see :func:`optax_accum.merge_batch_stats`.
      merge: how other collections are merged, `{"name": f}`, each micro-step then starting from
        the same: `f(initial, stacked, weights)`, as in `merge_state` of
        :func:`optax_accum.value_and_grad`. On replicas (`mesh`, `axis_name`) all must be merged.
      variables_argnum: the argument that holds the collections, a dict of them.
      batch_argnums: the arguments that are cut, every leaf along its leading axis.
      has_aux: whether `loss_fn` returns auxiliary outputs.
      **options: all else that :func:`optax_accum.value_and_grad` takes: `rng_argnums=3` for the
        keys of dropout, `weight`, `aux`, `mesh`, ...

    Returns:
      A function of the same arguments that returns `((loss, variables), gradients)`, or
      `((loss, (variables, aux)), gradients)`, with all collections in `variables`.

    Raises:
      ValueError, TypeError: for arguments that do not fit; the message says what to type.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import flax.linen as nn
      >>> import optax_accum as oa
      >>> model = nn.BatchNorm(use_running_average=False, momentum=0.0)
      >>> x = jnp.array([[0.0], [10.0], [2.0], [12.0]])  # micro-batches (0, 2) and (10, 12)
      >>> variables = model.init(jax.random.key(0), x)
      >>> params = variables.pop("params")
      >>> def loss_fn(params, variables, x):
      ...     y, new = model.apply({"params": params, **variables}, x, mutable=["batch_stats"])
      ...     return jnp.mean(y + x), new
      >>> grad_fn = oa.linen.value_and_grad(loss_fn, k=2, momentum=0.0)
      >>> (loss, variables), grads = grad_fn(params, variables, x)
      >>> float(loss), variables["batch_stats"]["var"].tolist()
      (6.0, [26.0])
    """
    if reserved := {"state_argnum", "merge_state"} & options.keys():
        raise TypeError(
            f"oa.linen.value_and_grad got {sorted(reserved)}, expected variables_argnum= and "
            "momentum= or merge={'collection': f}."
        )
    (place,) = _checks.indices("variables_argnum", variables_argnum)
    mapped = bool(options.get("mesh")) or options.get("axis_name") is not None
    options |= {"batch_argnums": batch_argnums, "has_aux": has_aux, "state_argnum": place}
    known = dict(merge or {})
    if momentum is not None:
        known["batch_stats"] = merge_batch_stats(momentum)
    _loop.value_and_grad(loss_fn, k, merge_state=merge_batch_stats(0.0), **options)  # checks them

    @functools.wraps(loss_fn)
    def loss_of_all(*args: Any, **kwargs: Any) -> Any:
        out = loss_fn(*args, **kwargs)
        loss, new, aux = _unpacked(out, has_aux)
        given = args[place]
        _check_collections(given, new)
        new = type(given)({**given, **new})
        return loss, ((new, aux) if has_aux else new)

    @functools.wraps(loss_fn)
    def value_and_grad_fn(*args: Any, **kwargs: Any) -> Any:
        if place < len(args) and _looks_like_statistics(args[place]):
            raise TypeError(
                f"argument {place} holds statistics of layers, {sorted(args[place])}, expected a "
                "dict of collections: pass {'batch_stats': state.batch_stats}, and unpack it in "
                "loss_fn, {'params': params, **variables}."
            )
        if place >= len(args) or not isinstance(args[place], Mapping):
            raise TypeError(
                f"argument {place} holds no collections, expected a dict of them, "
                "{'batch_stats': ...}, by position; type variables_argnum= for where it is, or "
                "oa.value_and_grad for a model without mutable collections."
            )
        _check_merged(args[place], known, mapped)
        merge_state = type(args[place])({name: known.get(name) for name in args[place]})
        accumulated = _loop.value_and_grad(loss_of_all, k, merge_state=merge_state, **options)
        return accumulated(*args, **kwargs)

    return value_and_grad_fn


def _looks_like_statistics(given: Any) -> bool:
    """The content of a collection `batch_stats` in place of a dict of collections."""
    if not isinstance(given, Mapping) or "batch_stats" in given or not given:
        return False
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(given)[0]]
    return all(getattr(path[-1], "key", None) in ("mean", "var") for path in paths)


def _unpacked(out: Any, has_aux: bool) -> tuple[Any, Any, Any]:
    """What a loss function returned, as loss, collections, auxiliary outputs."""
    loss, new, aux = None, None, None
    with contextlib.suppress(TypeError, ValueError):
        loss, rest = out
        new, aux = rest if has_aux else (rest, None)
    if not isinstance(new, Mapping):
        expected = "(loss, (new, aux))" if has_aux else "(loss, new)"
        raise TypeError(
            f"loss_fn returned {_checks.described(out)}, expected {expected} with has_aux="
            f"{has_aux}, where new is the dict that model.apply(..., mutable=[...]) returns."
        )
    return loss, new, aux


def _check_collections(given: Any, new: Any) -> None:
    if created := sorted(set(new) - set(given)):
        raise ValueError(
            f"loss_fn returned the collections {created}, which are not among those given, "
            f"{sorted(given)}: the micro-steps are one compiled loop, whose state is fixed. What "
            "is sown: return it as aux, with has_aux=True; a cache: create it before the call."
        )


def _check_merged(given: Any, known: Mapping[str, Any], mapped: bool) -> None:
    if "batch_stats" in given and "batch_stats" not in known:
        raise ValueError(
            "momentum is missing, expected that of the model's BatchNorm, whose statistics are "
            "merged over the window; type momentum=0.99, which is Flax's default."
        )
    if mapped and (left := sorted(set(given) - set(known))):
        raise ValueError(
            f"the collections {left} would be handed on from micro-step to micro-step, and on "
            "several replicas there is no such order; type merge={'name': f}, with f(initial, "
            "stacked, weights), or pass collections that do not change as another argument."
        )
