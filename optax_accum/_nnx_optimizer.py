"""Flax NNX: an optimizer that works in place."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from optax_accum._convert import WINDOWS, convert_state
from optax_accum._state import AccumulateState, outermost_states, the_state
from optax_accum._transform import apply_gradients, flush


class Optimizer(nnx.Optimizer):
    """`nnx.Optimizer` for :func:`optax_accum.accumulate`: parameters in place, updates counted.

    Between updates `update` does not touch the parameters, and at an update it writes them in
    place (:func:`optax_accum.apply_gradients`) where they are donated,
    `nnx.jit(donate_argnums=(0, 1))`: no parameter-sized temporary, where `nnx.Optimizer` needs one.

    Everything it holds is a Variable of fixed shape, so it may be saved after any micro-step, by
    `nnx.state(optimizer)`, and goes through `nnx.jit`, `nnx.split` and `nnx.merge`.

    Args:
      model: an NNX object.
      tx: from :func:`optax_accum.accumulate`. Any other transformation works as in
        `nnx.Optimizer`.
      wrt: which of its Variables are trained; the filter that the gradients were taken by.
      graph: as in `nnx.Optimizer`.

    Attributes:
      step: an `nnx.OptState` Variable, the number of *updates* made (of calls, if `tx` holds no
        `accumulate`, or several side by side). Of nested ones it counts the outermost's, as
        `micro_step` and `updated` speak of its window.
      opt_state: the state of `tx`, in Variables; :func:`optax_accum.has_updated` and
        `oa.diagnostics.window` read it.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from flax import nnx
      >>> import optax_accum as oa
      >>> model = nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0))
      >>> model.kernel[...] = jnp.zeros((1, 1))
      >>> optimizer = oa.nnx.Optimizer(model, oa.accumulate(optax.sgd(1.0), k=2))
      >>> loss_fn = lambda model, x: jnp.mean(model(x))
      >>> for x, weight in ((1.0, 1), (2.0, 3)):
      ...     grads = nnx.grad(loss_fn)(model, jnp.full((1, 1), x))
      ...     optimizer.update(model, grads, weight=weight)
      >>> model.kernel[...].item(), int(optimizer.step[...]), bool(optimizer.updated)
      (-1.75, 1, True)

      A run of `nnx.Optimizer` goes on, in mid-window too:

      >>> multi = optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation()
      >>> old = nnx.Optimizer(model, multi, wrt=nnx.Param)
      >>> _ = old.update(model, grads)
      >>> new = oa.nnx.Optimizer.convert(old, model, optimizer.tx, use_grad_mean=True)
      >>> new.flush(model)
      >>> model.kernel[...].item(), int(new.step[...])
      (-3.75, 1)
    """

    def __init__(
        self,
        model: Any,
        tx: optax.GradientTransformation,
        *,
        wrt: Any = nnx.Param,
        graph: bool | None = None,
    ):
        super().__init__(model, tx, wrt=wrt, graph=graph)

    def update(  # pyright: ignore[reportIncompatibleMethodOverride] (there is no tree of updates)
        self,
        model: Any,
        grads: Any,
        /,
        *,
        weight: Any = None,
        last: Any = False,
        **extra: Any,
    ) -> None:
        """Take one micro-gradient in, and update the model where that fills the window.

        Args:
          model: the object whose parameters are trained.
          grads: its micro-gradient, from `nnx.grad`.
          weight: how much this micro-batch counts, as in :func:`optax_accum.accumulate`.
          last: True closes the window with this micro-batch.
          **extra: what inner's update takes; `value` (the micro-batch's loss) reaches it as the
            window's.
        """
        params = self._params(model)
        grads = nnx.as_pure(nnx.state(grads, self.wrt, graph=self.graph))
        extra = nnx.as_pure({"weight": weight, "last": last, **extra})
        before = nnx.as_pure(self.opt_state)
        self._write(model, *apply_gradients(self.tx, grads, before, params, **extra))

    def flush(self, model: Any, /, **extra: Any) -> None:
        """Close a partial window when no micro-batch is left (:func:`optax_accum.flush`).

        Args:
          model: the object whose parameters are trained.
          **extra: what inner's update takes.

        Raises:
          ValueError: if `tx` holds no `accumulate`.
        """
        params, extra = self._params(model), nnx.as_pure(extra)
        count = self.step[...]
        updates, state = flush(self.tx, nnx.as_pure(self.opt_state), params, **extra)
        self._write(model, optax.apply_updates(params, updates), state)
        if len(outermost_states(state)) > 1:
            self.step[...] = count  # which counts calls there, and a flush is none

    @classmethod
    def convert(
        cls,
        old: Any,
        model: Any,
        tx: optax.GradientTransformation,
        *,
        wrt: Any = nnx.Param,
        graph: bool | None = None,
        **options: Any,
    ) -> "Optimizer":
        """An optimizer for `tx` that goes on where another one stopped.

        :func:`optax_accum.convert_state` of its state, in Variables again: from `nnx.Optimizer` of
        `optax.MultiSteps` (its window open or not) or of a plain optimizer, and from this class
        with another k.

        Args:
          old: the optimizer, or its `opt_state`. It stays as it is, and shares arrays with the new
            one until either is donated.
          model: the object whose parameters both train.
          tx: the transformation that goes on.
          wrt: as for the class.
          graph: as for the class.
          **options: `use_grad_mean`, `weight`, `update_step` and `cast`, as in
            :func:`optax_accum.convert_state`. `update_step` is the `step` of an old optimizer
            without a window.

        Returns:
          A new optimizer, to be used instead of the old one.

        Raises:
          ValueError, TypeError: for a state that does not fit. The message names the field.
        """
        whole = isinstance(old, nnx.Optimizer)
        state = nnx.as_pure(old.opt_state) if whole else old
        made = _updates_of(state)
        if made is None and whole:
            made = old.step[...]
            if not _windows_of(state):
                options = {"update_step": int(made), **options}
        new = cls(model, tx, wrt=wrt, graph=graph)
        state = convert_state(state, tx, new._params(model), **options)
        nnx.update(new.opt_state, nnx.state(state, graph=graph))
        made = made if (count := _updates_of(state)) is None else count
        if made is not None:
            new.step[...] = jnp.asarray(made).astype(new.step[...].dtype)
        return new

    def _params(self, model: Any) -> Any:
        return nnx.as_pure(nnx.state(model, self.wrt, graph=self.graph))

    def _write(self, model: Any, params: Any, state: Any) -> None:
        """New parameters and a new state, in place, and the count of updates."""
        nnx.update(model, params)
        nnx.update(self.opt_state, nnx.state(state, graph=self.graph))
        windows = outermost_states(state)
        updates = windows[0].update_step if len(windows) == 1 else self.step[...] + 1
        self.step[...] = updates.astype(self.step[...].dtype)

    @property
    def micro_step(self) -> jax.Array:
        """Micro-steps taken in the open window: an int32 scalar."""
        return self._window.micro_step

    @property
    def updated(self) -> jax.Array:
        """Whether the last call of `update` ran inner: a bool scalar."""
        return self._window.updated

    @property
    def _window(self) -> AccumulateState:
        return the_state(nnx.as_pure(self.opt_state))


def _windows_of(state: Any) -> list[Any]:
    """The outermost windows of a state, ours or those of `optax.MultiSteps`."""
    leaves = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, WINDOWS))
    return [leaf for leaf in leaves if isinstance(leaf, WINDOWS)]


def _updates_of(state: Any) -> Any:
    """The updates that a state's one window has counted, or None."""
    windows = _windows_of(state)
    if len(windows) != 1:
        return None
    ours = isinstance(windows[0], AccumulateState)
    return windows[0].update_step if ours else windows[0].gradient_step
