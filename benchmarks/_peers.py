"""Ways to an update from k micro-batches: ours and the peers', named once for all cases."""

import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

import optax_accum as oa

Tree = Any
Loss = Callable[[Tree, jax.Array], jax.Array]
GradFn = Callable[[Tree, jax.Array], tuple[jax.Array, Tree]]

BIG, SCAN = "one big batch", "hand-written scan"
MICROBATCH, MULTI_STEPS = "optax.microbatch", "optax.MultiSteps"
APPLY_EVERY, TORCH = "optax.apply_every", "PyTorch"
CARRY, REFS = "oa.value_and_grad, carry", "oa.value_and_grad, refs"
APPLY, UPDATE = "oa.apply_gradients", "oa.accumulate, update + apply_updates"
MICRO_STEP = "oa.micro_step"
PEERS = (BIG, SCAN, MICROBATCH, MULTI_STEPS, APPLY_EVERY, TORCH)

# `apply_every` adds up the updates of an optimizer that has run in every micro-step.
OTHER_RESULT = (
    "runs the optimizer in every micro-step: equal to one big batch for SGD alone (see the case "
    "optimizer), another update with AdamW"
)


def torch_missing() -> str | None:
    """Why PyTorch is not shown; None where it is installed."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed; type pip install torch"
    return None


def missing() -> dict[str, str]:
    """Peers that are not there, and what to type."""
    why = torch_missing()
    return {TORCH: why} if why else {}


def versions() -> dict[str, str]:
    """Of what was compared."""
    names = ("jax", "optax") if torch_missing() else ("jax", "optax", "torch")
    return {name: importlib.metadata.version(name) for name in names}


class Method(NamedTuple):
    """An update from a batch, in one call or in several."""

    call: Callable[..., Any]  # (params, state, tokens) -> (loss, params, state)
    tx: optax.GradientTransformation  # whose state it takes
    calls: int  # of an update: each gets every `calls`-th example


def hand_written_scan(loss: Loss, k: int) -> GradFn:
    """The best a good engineer writes: a strided cut, float32 sums, one division at the end."""

    def grad_fn(params: Tree, batch: jax.Array) -> tuple[jax.Array, Tree]:
        micro_batches = batch.reshape(-1, k, *batch.shape[1:]).swapaxes(0, 1)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)

        def micro_step(sums: Tree, micro_batch: jax.Array) -> tuple[Tree, None]:
            return jax.tree.map(jnp.add, sums, jax.value_and_grad(loss)(params, micro_batch)), None

        sums, _ = lax.scan(micro_step, (jnp.zeros([]), zeros), micro_batches)
        return jax.tree.map(lambda x: x / k, sums)

    return grad_fn


def microbatch(loss: Loss, m: int) -> GradFn:
    """`optax.microbatch` on micro-batches of m examples."""
    mean = optax.microbatching.AccumulationType.MEAN
    return optax.microbatching.microbatch(jax.value_and_grad(loss), 1, m, mean)


def in_one_call(loss: Loss, k: int, m: int) -> dict[str, GradFn]:
    """Each way to the loss and gradient of k micro-batches of m examples, from all of them."""
    return {
        BIG: jax.value_and_grad(loss),
        SCAN: hand_written_scan(loss, k),
        MICROBATCH: microbatch(loss, m),
        CARRY: oa.value_and_grad(loss, k, engine="carry"),
        REFS: oa.value_and_grad(loss, k, engine="refs"),
    }


def methods(loss: Loss, k: int, m: int, inner: optax.GradientTransformation) -> dict[str, Method]:
    """Each way to an update of `inner` from k micro-batches of m examples."""
    found = {
        name: Method(_applied(inner, grad_fn), inner, 1)
        for name, grad_fn in in_one_call(loss, k, m).items()
    }
    multi_steps = optax.MultiSteps(inner, k).gradient_transformation()
    window, grad = oa.accumulate(inner, k), jax.value_and_grad(loss)
    return found | {
        MULTI_STEPS: Method(_applied(multi_steps, grad), multi_steps, k),
        UPDATE: Method(_applied(window, grad), window, k),
        APPLY: Method(_applied_in_place(window, grad), window, k),
        MICRO_STEP: Method(oa.micro_step(loss, window), window, k),
    }


def _applied(tx: optax.GradientTransformation, grad_fn: GradFn) -> Callable[..., Any]:
    def update(params: Tree, state: Any, batch: Any) -> Any:
        value, grads = grad_fn(params, batch)
        updates, state = tx.update(grads, state, params)
        return value, optax.apply_updates(params, updates), state

    return update


def _applied_in_place(tx: optax.GradientTransformation, grad_fn: GradFn) -> Callable[..., Any]:
    def update(params: Tree, state: Any, batch: Any) -> Any:
        value, grads = grad_fn(params, batch)
        return value, *oa.apply_gradients(tx, grads, state, params)

    return update


class Compiled(NamedTuple):
    """A method, compiled; one update is a run of the program for each part of the batch."""

    program: Any
    method: Method

    def update(self, params: Tree, state: Any, parts: list[jax.Array]) -> tuple[Any, Tree, Any]:
        """(mean loss, parameters, state) after one update; params and state are donated."""
        losses = []
        for part in parts:
            loss, params, state = self.program(params, state, part)
            losses.append(loss)
        return sum(losses) / len(losses), params, state


def parts_of(batch: jax.Array, calls: int) -> list[jax.Array]:
    """The micro-batches, strided; a whole batch as it is."""
    return [batch] if calls == 1 else [batch[i::calls] for i in range(calls)]


def lowered(method: Method, params: Tree, batch: Any) -> Any:
    """The program of one call, parameters and state donated."""
    state = jax.eval_shape(method.tx.init, params)
    shape = (batch.shape[0] // method.calls, *batch.shape[1:])
    part = jax.ShapeDtypeStruct(shape, batch.dtype)
    return jax.jit(method.call, donate_argnums=(0, 1)).lower(params, state, part)


def compiled(method: Method, params: Tree, batch: Any) -> Compiled:
    return Compiled(lowered(method, params, batch).compile(), method)


def started(method: Method, params: Tree) -> tuple[Tree, Any]:
    """Copies of what an update starts from, to be donated."""
    return jax.tree.map(jnp.copy, params), method.tx.init(params)
