"""What went wrong elsewhere, through both drivers: one table, every way to fill a window.

A loss is a mean of `mask * w * x` over the examples that count, so that the gradient is chosen by
`x` alone and a window's gradient is known beforehand. Inner notes what it is given.
"""

from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_accum as oa

NAN = float("nan")


class Seen(NamedTuple):
    gradient: Any
    value: Any
    updates: Any  # how many inner made


def witness() -> optax.GradientTransformationExtraArgs:
    """Descends nothing and notes what it was given."""

    def init(params):
        return Seen(jax.tree.map(jnp.zeros_like, params), jnp.zeros([]), jnp.zeros([], jnp.int32))

    def update(updates, state, params=None, *, value, **extra):
        del params, extra
        return jax.tree.map(jnp.zeros_like, updates), Seen(updates, value, state.updates + 1)

    return optax.GradientTransformationExtraArgs(init, update)


def token_mean(w, batch):
    return jnp.sum(batch["mask"] * w * batch["x"]) / jnp.sum(batch["mask"])


def token_sum(w, batch):
    return jnp.sum(batch["mask"] * w * batch["x"])


def tokens(batch):
    return jnp.sum(batch["mask"])


class Case(NamedTuple):
    """Windows of micro-batches, each a list of (x, mask), and the gradients that inner must see."""

    windows: Any
    right: list[Any]  # a window's gradient; None where it makes no update
    loss: Any = token_mean
    weight: Any = tokens
    w: Any = 1.0
    dtype: Any = jnp.float32
    keywords: Any = MappingProxyType({})
    tolerance: float = 1e-6
    value_tolerance: float = 1e-6  # of a loss that a narrow dtype has rounded


def full(*numbers):
    """Micro-batches of two examples that all count."""
    return [([x, x], [1, 1]) for x in numbers]


CASES = {
    "a mean of means over unequal token counts": Case(
        [[([-20] + [0] * 8, [1] + [0] * 8), ([0] * 9, [1] * 9)]], [-2.0]
    ),
    "summed where a mean is meant": Case([full(*[1.0] * 8)], [1.0]),
    "the same without weights": Case([full(*[1.0] * 8)], [1.0], weight=None),
    "a sum divided by k": Case(
        [full(1, 2, 3, 4)], [20.0], loss=token_sum, weight=None, keywords={"loss_reduction": "sum"}
    ),
    "a sum divided by all its tokens": Case(
        [[([4, 0], [1, 0]), ([1, 3], [1, 1])]],
        [8 / 3],
        loss=token_sum,
        keywords={"loss_reduction": "sum_over_weight"},
    ),
    "a NaN dropped, its weight kept": Case(
        [full(1, NAN, 1, 1)], [1.0], keywords={"nonfinite": "skip_micro_step"}
    ),
    "an infinity dropped, its weight kept": Case(
        [full(1, 1, float("inf"), 4)],
        [2.0],
        weight=None,
        keywords={"nonfinite": "skip_micro_step"},
    ),
    "a micro-batch without tokens": Case([[*full(1), ([NAN, 5], [0, 0]), *full(2)]], [1.5]),
    "two real micro-batches of four": Case([[*full(1, 3), *([([0, 0], [0, 0])] * 2)]], [2.0]),
    "a window without tokens": Case(
        [[([1, 2], [0, 0])] * 2, full(1, 2)], [None, 1.5], keywords={"nonfinite": "propagate"}
    ),
    "poison kept by a reset": Case([full(1, NAN), full(1, 1), full(2, 4)], [NAN, 1.0, 3.0]),
    "float16 sums past 65504": Case(
        [full(*[2e4] * 8)], [2e4], dtype=jnp.float16, weight=None, value_tolerance=4e-3
    ),
    "a weight that is none": Case(
        [[([1], [3]), ([5], [-1])], [([1], [1]), ([3], [1])]], [NAN, 2.0]
    ),
    "a weight that is none, dropped": Case(
        [[([1], [3]), ([5], [-1])]], [1.0], keywords={"nonfinite": "skip_micro_step"}
    ),
    "bfloat16 sums that stagnate": Case(
        [full(*[1.0] * 1023, 1e-3)],
        [(1023 + 1e-3) / 1024],
        dtype=jnp.bfloat16,
        weight=None,
        tolerance=4e-3,
        value_tolerance=4e-3,
    ),
    "windows of one": Case([full(1), full(2)], [1.0, 2.0]),
}


def micro_batches(case: Case, window: Any) -> list[Any]:
    return [
        {"x": jnp.asarray(x, case.dtype), "mask": jnp.asarray(m, case.dtype)} for x, m in window
    ]


def stacked(case: Case, window: Any) -> Any:
    longest = max(len(x) for x, _ in window)
    assert all(len(x) == longest for x, _ in window)
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *micro_batches(case, window))


def in_time(make_micro_step: Any) -> Any:
    """Feed the micro-batches one call at a time; a list of what inner saw a window."""

    def windows(case: Case) -> list[Seen | None]:
        k, w = len(case.windows[0]), jnp.asarray(case.w, case.dtype)
        tx = oa.accumulate(witness(), k, **case.keywords)
        micro_step = jax.jit(make_micro_step(case, tx))
        state, seen = tx.init(w), []
        for window in case.windows:
            for batch in micro_batches(case, window):
                w, state = micro_step(w, state, batch)
            seen.append(state.inner_state if oa.has_updated(state) else None)
        return seen

    return windows


def by_update(case: Case, tx: Any) -> Any:
    def micro_step(w, state, batch):
        loss, grads = jax.value_and_grad(case.loss)(w, batch)
        weight = None if case.weight is None else case.weight(batch)
        updates, state = tx.update(grads, state, w, weight=weight, value=loss)
        return optax.apply_updates(w, updates), state

    return micro_step


def by_apply_gradients(case: Case, tx: Any) -> Any:
    def micro_step(w, state, batch):
        loss, grads = jax.value_and_grad(case.loss)(w, batch)
        weight = None if case.weight is None else case.weight(batch)
        return oa.apply_gradients(tx, grads, state, w, weight=weight, value=loss)

    return micro_step


def by_micro_step(engine: str) -> Any:
    def make(case: Case, tx: Any) -> Any:
        one = oa.micro_step(case.loss, tx, weight=case.weight, engine=engine)
        return lambda w, state, batch: one(w, state, batch)[1:]

    return make


def in_space(engine: str) -> Any:
    def windows(case: Case) -> list[Seen | None]:
        w, inner = jnp.asarray(case.w, case.dtype), witness()
        grad_fn = oa.value_and_grad(
            case.loss,
            len(case.windows[0]),
            weight=case.weight,
            batch_layout="stacked",
            engine=engine,
            has_stats=True,
            **case.keywords,
        )

        @jax.jit
        def update(w, state, batch):
            (loss, stats), grads = grad_fn(w, batch)
            updates, state = inner.update(grads, state, w, value=loss)
            return optax.apply_updates(w, updates), state, stats.weight

        state, seen = inner.init(w), []
        for window in case.windows:
            made = update(w, state, stacked(case, window))
            if made[2]:  # as the time driver, which makes no update of a window without weight
                w, state, _ = made
            seen.append(state if made[2] else None)
        return seen

    return windows


DRIVERS = {
    "update": in_time(by_update),
    "apply_gradients": in_time(by_apply_gradients),
    "micro_step, carry": in_time(by_micro_step("carry")),
    "micro_step, refs": in_time(by_micro_step("refs")),
    "micro_step": in_time(by_micro_step("auto")),
    "value_and_grad, carry": in_space("carry"),
    "value_and_grad, refs": in_space("refs"),
    "value_and_grad": in_space("auto"),
}


def refs_cannot(case: Case, driver: str) -> bool:
    """Where asking for refs is an error that says why: no micro-gradient, no equal window, none."""
    if not driver.endswith("refs"):
        return False
    k = len(case.windows[0])
    if k == 1:
        return driver.startswith("micro_step")
    skips = case.keywords.get("nonfinite") == "skip_micro_step"
    return skips or jnp.dtype(case.dtype).itemsize < 4


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("name", CASES)
def test_what_inner_is_given(name, driver):
    case = CASES[name]
    if refs_cannot(case, driver):
        with pytest.raises(ValueError, match="engine='refs' cannot be used here"):
            DRIVERS[driver](case)
        return
    seen = DRIVERS[driver](case)
    updates = [None if one is None else int(one.updates) for one in seen]
    made = np.cumsum([right is not None for right in case.right])
    assert updates == [
        None if right is None else n for right, n in zip(case.right, made, strict=True)
    ]
    for one, right in zip(seen, case.right, strict=True):
        if one is None:
            continue
        assert one.gradient.dtype == case.dtype
        np.testing.assert_allclose(
            np.float64(one.gradient), right, rtol=case.tolerance, equal_nan=True
        )
        # The loss is w times its gradient, so inner's value must be the gradient where w is 1.
        np.testing.assert_allclose(
            np.float64(one.value), right, rtol=case.value_tolerance, equal_nan=True
        )


@pytest.mark.parametrize("driver", DRIVERS)
def test_imaginary_parts_and_float64_are_kept(x64, driver):
    third = 1 / 3
    case = Case([full(third, 1.0)], [(third + 1) / 2], dtype=jnp.float64, tolerance=1e-15)
    (seen,) = DRIVERS[driver](case)
    np.testing.assert_allclose(seen.gradient, case.right[0], rtol=1e-15)
    loss = lambda w, b: jnp.sum(b["mask"] * (w * b["x"]).real) / jnp.sum(b["mask"])  # noqa: E731
    case = Case([[([1 + 2j] * 2, [1, 1])] * 2], [], loss=loss, dtype=jnp.complex128)
    case = case._replace(weight=lambda batch: jnp.sum(batch["mask"].real))
    case = case._replace(loss=lambda w, b: loss(w, {**b, "mask": b["mask"].real}))
    (seen,) = DRIVERS[driver](case)
    want = jax.grad(case.loss)(jnp.complex128(1), micro_batches(case, case.windows[0])[0])
    np.testing.assert_allclose(seen.gradient, want, rtol=1e-12)
    assert abs(want.imag) > 1


# Clocks: what counts updates inside inner, over whole windows of real training.


def decayed(k):
    del k
    return optax.adamw(0.1, weight_decay=0.1), [1.0] * 3, 1.0


def scheduled(k):
    del k
    return optax.sgd(optax.linear_schedule(1.0, 0.0, 8)), [1.0] * 8, 1.0


def averaged(k):
    del k
    return optax.chain(optax.sgd(0.5), optax.ema(0.9)), [1.0, 2.0, 3.0], 1.0


def clipped(k):
    del k
    return optax.chain(optax.clip(0.25), optax.sgd(1.0)), [1.0, 2.0], 1.0


@pytest.mark.parametrize("driver", ["update", "apply_gradients", "carry", "refs"])
@pytest.mark.parametrize("clocked", [decayed, scheduled, averaged, clipped])
def test_clocks_count_updates(clocked, driver):
    """k = 4 micro-steps a window give what plain inner gives on one gradient a window."""
    k = 4
    inner, gradients, start = clocked(k)
    w, state = jnp.float32(start), inner.init(jnp.float32(start))
    for gradient in gradients:
        updates, state = inner.update(jnp.float32(gradient), state, w)
        w = optax.apply_updates(w, updates)
    tx, case = oa.accumulate(inner, k), Case([], [])
    makes = {
        "update": by_update,
        "apply_gradients": by_apply_gradients,
        "carry": by_micro_step("carry"),
        "refs": by_micro_step("refs"),
    }
    micro_step = jax.jit(makes[driver](case, tx))
    ours, state = jnp.float32(start), tx.init(jnp.float32(start))
    for gradient in gradients:
        for (batch,) in zip(micro_batches(case, full(*[gradient] * k)), strict=True):
            ours, state = micro_step(ours, state, batch)
    np.testing.assert_allclose(ours, w, rtol=1e-6)
    assert abs(float(w) - start) > 1e-3


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("driver", ["micro_step, carry", "micro_step, refs", "carry", "refs"])
def test_masks_of_all_micro_batches_differ(driver, typed):
    key = jax.random.key(7) if typed else jax.random.PRNGKey(7)

    def loss(w, batch, key):
        noise = jax.random.normal(key, (4,))
        return jnp.mean(w * batch), noise

    if "micro_step" in driver:
        tx = oa.accumulate(optax.sgd(1.0), 2)
        one = jax.jit(
            oa.micro_step(loss, tx, has_aux=True, rng_argnums=2, engine=driver.split(", ")[1])
        )
        w, masks = jnp.float32(1), []
        state = tx.init(w)
        for _ in range(4):
            (_, noise), w, state = one(w, state, jnp.ones(2), key)
            masks.append(noise)
    else:
        grad_fn = oa.value_and_grad(
            loss, 4, has_aux=True, rng_argnums=2, engine=driver, aux="stack"
        )
        (_, masks), _ = jax.jit(grad_fn)(jnp.float32(1), jnp.ones(8), key)
    assert len({np.asarray(mask).tobytes() for mask in masks}) == 4


@pytest.mark.parametrize("engine", ["carry", "refs"])
def test_a_window_may_span_calls_of_scans(engine):
    """A call of the space driver is one weighted micro-step of the time driver."""
    tx = oa.accumulate(witness(), 2)
    grad_fn = oa.value_and_grad(
        token_mean, 2, weight=tokens, engine=engine, batch_layout="stacked", has_stats=True
    )
    case = Case([], [])
    calls = [[*full(1), ([3, 0], [1, 0])], [([NAN, 1], [0, 0]), *full(7)]]
    w = jnp.float32(1)
    state = tx.init(w)
    for call in calls:
        (loss, stats), grads = grad_fn(w, stacked(case, call))
        _, state = tx.update(grads, state, w, weight=stats.weight, value=loss)
    np.testing.assert_allclose(state.inner_state.gradient, (1 + 1 + 3 + 7 + 7) / 5, rtol=1e-6)
