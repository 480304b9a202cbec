"""Every way in which accumulation went wrong elsewhere, with the right value.

SGD with learning rate 1 throughout: Adam hides a wrong scale.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import count_inner, feed, moves, sgd_window, updated

import optax_accum as oa

REDUCTIONS = ("mean", "sum", "sum_over_weight")
NAN = float("nan")


def sgd(k, **keywords):
    return oa.accumulate(optax.sgd(1.0), k, **keywords)


# --- a wrong denominator


def test_mean_of_means_over_unequal_token_counts():
    labels = jnp.array([10.0] + [0.0] * 8), jnp.zeros(10)
    masks = jnp.array([1.0] + [0.0] * 8), jnp.array([1.0] * 9 + [0.0])
    w = jnp.zeros([])

    def loss(w, labels, mask):
        return jnp.sum(mask * (w - labels) ** 2) / mask.sum()

    steps = [
        (jax.grad(loss)(w, y, mask), {"weight": mask.sum()})
        for y, mask in zip(labels, masks, strict=True)
    ]
    whole = jax.grad(loss)(w, jnp.concatenate(labels), jnp.concatenate(masks))
    emitted, _, _ = feed(sgd(2), w, steps)
    assert float(whole) == -2.0
    assert moves(emitted) == [0.0, -2.0]


@pytest.mark.parametrize("loss_reduction", REDUCTIONS)
@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_reductions_against_numpy(loss_reduction, k):
    rng = np.random.default_rng(k)
    weights = rng.integers(1, 100, (2, k)).astype(float)
    grads = rng.normal(size=(2, k, 5))
    tx = sgd(k, loss_reduction=loss_reduction)
    given = loss_reduction != "sum"
    steps = [
        (grad, {"weight": jnp.float32(weight)} if given else {})
        for grad, weight in zip(grads.reshape(-1, 5), weights.ravel(), strict=True)
    ]
    emitted, _, _ = feed(tx, jnp.zeros(5), [(jnp.float32(g), kw) for g, kw in steps])
    for window in range(2):
        right = sgd_window(loss_reduction, np.float32(grads[window]), weights[window])
        np.testing.assert_allclose(-np.asarray(emitted[k * window + k - 1]), right, rtol=2e-6)
        for idle in emitted[k * window : k * window + k - 1]:
            np.testing.assert_array_equal(idle, 0)


def test_reductions_in_float64(x64):
    rng = np.random.default_rng(0)
    weights, grads = rng.integers(1, 4000, 7), rng.normal(size=(7, 11))
    for loss_reduction in REDUCTIONS:
        given = loss_reduction != "sum"
        steps = [
            (grad, {"weight": int(weight)} if given else {})
            for grad, weight in zip(grads, weights, strict=True)
        ]
        emitted, _, _ = feed(
            sgd(7, loss_reduction=loss_reduction), jnp.zeros(11, jnp.float64), steps
        )
        right = sgd_window(loss_reduction, grads, weights)
        np.testing.assert_allclose(-np.asarray(emitted[-1]), right, rtol=1e-12, atol=1e-12)


def test_partial_last_window_is_divided_by_what_was_added():
    tx = sgd(4)
    emitted, params, state = feed(tx, jnp.zeros([]), [1.0] * 6)
    updates, state = oa.flush(tx, state, params)
    assert moves(emitted) == [0, 0, 0, 1, 0, 0]
    assert float(updates) == -1.0
    assert updated(state) and int(state.update_step) == 2 and int(state.micro_step) == 0


def test_tail_neither_leaks_nor_is_lost():
    tx = sgd(4)
    _, params, state = feed(tx, jnp.zeros([]), [1.0, 2.0, 6.0])
    tail, state = oa.flush(tx, state, params)
    updates = None
    for grad in [10.0, 20.0, 30.0, 40.0]:
        updates, state = tx.update(jnp.float32(grad), state, params)
    assert (float(tail), float(updates)) == (-3.0, -25.0)
    assert int(state.update_step) == 2


@pytest.mark.parametrize("traced", [False, True])
def test_last_closes_a_short_window(traced):
    flags = [False, False, True, False, False, False, True]
    keyed = [(g, {"last": jnp.asarray(f) if traced else f}) for g, f in enumerate(flags, 1)]
    if traced:
        tx = sgd(4)
        update, state, emitted = jax.jit(tx.update), tx.init(jnp.zeros([])), []
        for grad, keywords in keyed:
            updates, state = update(jnp.float32(grad), state, jnp.zeros([]), **keywords)
            emitted.append(updates)
    else:
        emitted, _, state = feed(sgd(4), jnp.zeros([]), [(float(g), kw) for g, kw in keyed])
    assert moves(emitted) == [0, 0, 2, 0, 0, 0, 5.5]
    assert int(state.update_step) == 2


@pytest.mark.parametrize("k", [1, 2, 8, 64])
def test_mean_is_not_a_sum(k):
    emitted, _, _ = feed(sgd(k), jnp.zeros([]), [1.0] * k)
    assert moves(emitted)[-1] == 1.0


def test_nothing_else_divides_by_k():
    emitted, _, _ = feed(sgd(4, loss_reduction="sum"), jnp.zeros([]), [0.25] * 4)
    assert moves(emitted)[-1] == 1.0


def test_dropped_micro_step_loses_its_weight_too():
    emitted, _, state = feed(
        sgd(4, nonfinite="skip_micro_step"), jnp.zeros([]), [1.0, NAN, 1.0, 1.0]
    )
    assert moves(emitted) == [0, 0, 0, 1]
    assert int(state.skipped) == 1


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("nonfinite", ["propagate", "skip_micro_step", "skip_window"])
def test_micro_batch_without_tokens_is_ignored(k, traced, nonfinite):
    zero = jnp.zeros([]) if traced else 0
    tx = sgd(k, nonfinite=nonfinite)
    update = jax.jit(tx.update) if traced else tx.update
    state, descended = tx.init(jnp.zeros([])), []
    for grad, weight in [
        (NAN, zero),
        (3.0, 2.0),
        (NAN, zero),
        (NAN, zero),
        (5.0, 1.0),
        (NAN, zero),
    ]:
        updates, state = update(jnp.float32(grad), state, jnp.zeros([]), weight=weight)
        descended.append(-float(updates))
    right = [0, 3, 0, 0, 5, 0] if k == 1 else [0, 3, 0, 0, 0, 5]
    assert descended == right
    assert int(state.update_step) == 2 and int(state.skipped) == 0


@pytest.mark.parametrize("nonfinite", ["propagate", "skip_micro_step", "skip_window"])
def test_window_without_tokens_changes_nothing(nonfinite):
    tx = oa.accumulate(optax.adam(1.0), 3, nonfinite=nonfinite)
    params = jnp.ones(4)
    update = jax.jit(tx.update)
    state = before = tx.init(params)
    for _ in range(3):
        updates, state = update(jnp.full(4, NAN), state, params, weight=jnp.zeros([]))
        np.testing.assert_array_equal(updates, 0)
    assert not updated(state)
    for name in ("micro_step", "update_step", "weight_sum", "skipped", "k"):
        assert int(getattr(state, name)) == int(getattr(before, name)), name
    jax.tree.map(np.testing.assert_array_equal, before.inner_state, state.inner_state)


# --- a wrong clock


def test_learning_rate_schedule_counts_updates():
    schedule = optax.linear_schedule(1.0, 0.0, 8)
    _, params, _ = feed(oa.accumulate(optax.sgd(schedule), 4), jnp.zeros([]), [1.0] * 32)
    assert float(params) == -4.5


def test_weight_decay_and_moments_rest_between_updates():
    tx = oa.accumulate(optax.adamw(0.1, weight_decay=0.1), 4)
    _, params, _ = feed(tx, jnp.ones([]), [1.0] * 12)
    w = 1.0
    for _ in range(3):  # constant gradient: Adam's direction is 1
        w -= 0.1 * (1.0 / (1.0 + 1e-8) + 0.1 * w)
    assert abs(w - 0.673) < 1e-3
    assert abs(float(params) - w) < 5e-6  # float32 bias corrections


def test_clipping_sees_the_window():
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    emitted, _, _ = feed(
        oa.accumulate(inner, 2), jnp.zeros(2), [jnp.array([2.0, 0]), jnp.array([0, 2.0])]
    )
    np.testing.assert_allclose(-np.asarray(emitted[-1]), [0.5**0.5] * 2, rtol=1e-6)


def test_ema_moves_once_a_window():
    inner = optax.chain(optax.sgd(1.0), optax.ema(0.5, debias=False))
    emitted, _, _ = feed(oa.accumulate(inner, 4), jnp.zeros([]), [1.0] * 8)
    assert moves(emitted) == [0, 0, 0, 0.5, 0, 0, 0, 0.75]


def test_noise_is_drawn_once_a_window():
    inner = optax.chain(optax.add_noise(1.0, 0.0, jax.random.key(0)), optax.sgd(1.0))
    emitted, _, _ = feed(oa.accumulate(inner, 4), jnp.zeros(4000), [jnp.zeros(4000)] * 4)
    assert abs(float(jnp.std(emitted[-1])) - 1.0) < 0.05


def test_inner_runs_once_a_window():
    counter = [0]
    inner = optax.chain(count_inner(counter), optax.sgd(1.0))
    _, _, state = feed(oa.accumulate(inner, 4), jnp.zeros([]), [1.0] * 8)
    jax.block_until_ready(state)
    jax.effects_barrier()
    assert counter == [2]


# --- a wrong boundary


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("jit", [False, True])
def test_first_update_after_exactly_k(k, jit):
    tx = sgd(k)
    update = jax.jit(tx.update) if jit else tx.update
    state, fired = tx.init(jnp.zeros([])), []
    for _ in range(3 * k):
        _, state = update(jnp.ones([]), state, jnp.zeros([]))
        fired.append(updated(state))
    assert fired == ([False] * (k - 1) + [True]) * 3


def test_k_does_not_change_inside_a_window():
    tx = sgd(lambda update_step: jnp.where(update_step == 0, 2, 3))
    _, _, state = feed(tx, jnp.zeros([]), [1.0] * 2)
    fired = []
    for _ in range(6):
        _, state = tx.update(jnp.ones([]), state, jnp.zeros([]))
        fired.append(updated(state))
    assert fired == [False, False, True] * 2


@pytest.mark.parametrize("new_k", [1, 2, 3, 8])
def test_resumed_with_another_k(new_k):
    _, params, state = feed(sgd(4), jnp.zeros([]), [4.0, 8.0])
    tx, fired = sgd(new_k), []
    for grad in [1.0, 7.0] + [1.0] * 8:
        updates, state = tx.update(jnp.float32(grad), state, params)
        fired.append(-float(updates))
    assert fired[:2] == [0.0, 5.0]  # the open window keeps its k of 4
    assert [i for i, move in enumerate(fired[2:], 1) if move] == list(range(new_k, 9, new_k))


@pytest.mark.parametrize("nonfinite", ["propagate", "skip_window"])
def test_saved_after_any_micro_step(nonfinite):
    tx = oa.accumulate(optax.adam(0.1), 3, nonfinite=nonfinite)
    update = jax.jit(tx.update)
    grads = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)

    def run(save_after):
        params, state = jnp.ones(4), tx.init(jnp.ones(4))
        for i, grad in enumerate(grads):
            if i == save_after:  # through host memory and back
                params, state = jax.tree.map(np.asarray, (params, state))
                params, state = jax.tree.map(jnp.asarray, (params, state))
            updates, state = update(jnp.asarray(grad), state, params)
            params = optax.apply_updates(params, updates)
        return np.asarray(params).tobytes()

    assert {run(save_after) for save_after in range(10)} == {run(None)}


def test_epoch_shorter_than_k_and_flush_of_nothing():
    tx = sgd(8)
    _, params, state = feed(tx, jnp.zeros([]), [3.0])
    updates, state = oa.flush(tx, state, params)
    assert float(updates) == -3.0 and updated(state)
    again, same = oa.flush(tx, state, params)
    assert float(again) == 0.0 and not updated(same)
    for name in set(state._fields) - {"updated"}:
        jax.tree.map(np.testing.assert_array_equal, getattr(state, name), getattr(same, name))


@pytest.mark.parametrize("k", [1, 3])
def test_dropped_window_is_no_update(k):
    tx = sgd(k, nonfinite="skip_window")
    emitted, _, state = feed(tx, jnp.zeros([]), [1.0, NAN, 1.0][:k] if k > 1 else [NAN])
    assert moves(emitted)[-1] == 0.0
    assert not updated(state) and int(state.update_step) == 0 and int(state.skipped) == k
    updates = None
    for grad in [2.0, 4.0, 6.0] if k > 1 else [4.0]:
        updates, state = tx.update(jnp.float32(grad), state, jnp.zeros([]))
    assert float(updates) == -4.0 and int(state.update_step) == 1


def test_skipped_micro_steps_keep_the_windows_aligned():
    grads = [1.0, NAN, 3.0, 5.0, NAN, NAN, NAN, NAN, 7.0, 9.0, 11.0, 13.0]
    emitted, _, state = feed(sgd(4, nonfinite="skip_micro_step"), jnp.zeros([]), grads)
    assert moves(emitted) == [0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 10]
    assert int(state.update_step) == 2 and int(state.skipped) == 5


# --- poison


@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf")])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_after_a_nan_the_next_window_is_clean(bad, k):
    grads = [1.0] * (k - 1) + [bad] + [1.0] * (2 * k)
    emitted, _, _ = feed(sgd(k), jnp.zeros([]), grads)
    assert not np.isfinite(moves(emitted)[k - 1])
    assert moves(emitted)[k:] == ([0.0] * (k - 1) + [1.0]) * 2


def test_zeros_until_the_window_is_full_whatever_inner_makes_of_zero():
    normalize = optax.GradientTransformation(
        lambda params: optax.EmptyState(),
        lambda updates, state, params=None: (updates / jnp.linalg.norm(updates), state),
    )
    grads = [jnp.zeros(2), jnp.array([3.0, 4.0])]
    emitted, _, _ = feed(oa.accumulate(normalize, 2), jnp.zeros(2), grads)
    np.testing.assert_array_equal(emitted[0], 0)
    np.testing.assert_allclose(emitted[1], [0.6, 0.8], rtol=1e-6)


def test_float16_sums_do_not_overflow():
    params = jnp.zeros(3, jnp.float16)
    emitted, _, _ = feed(sgd(8), params, [jnp.full(3, 2e4, jnp.float16)] * 8)
    np.testing.assert_array_equal(-emitted[-1], np.float16(2e4))
    assert emitted[-1].dtype == jnp.float16


def test_loss_scale_changed_inside_a_window():
    """Each micro-gradient is unscaled by its own scale, before it is added."""
    scales = [1024.0, 1024.0, 512.0, 512.0]
    scaled = [jax.grad(lambda w, s=scale: s * w)(jnp.zeros([])) for scale in scales]
    emitted, _, _ = feed(sgd(4), jnp.zeros([]), scaled)
    assert moves(emitted)[-1] / scales[-1] == 1.5  # what unscaling the window gives
    unscaled = [grad / scale for grad, scale in zip(scaled, scales, strict=True)]
    emitted, _, _ = feed(sgd(4), jnp.zeros([]), unscaled)
    assert moves(emitted)[-1] == 1.0


@pytest.mark.parametrize("bad", [NAN, float("inf"), -1.0])
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("loss_reduction", ["mean", "sum_over_weight"])
def test_traced_weight_that_is_none(bad, k, loss_reduction):
    """Counts as a micro-gradient that is not finite, under every policy."""
    right = {"propagate": [NAN, 1.0], "skip_window": [0.0, 1.0]}
    right["skip_micro_step"] = [0.0, 1.0] if k == 1 else [2.0, 1.0]
    for nonfinite, (first, second) in right.items():
        tx = sgd(k, nonfinite=nonfinite, loss_reduction=loss_reduction)
        update = jax.jit(tx.update)
        state, fired = tx.init(jnp.zeros([])), []
        good = [(2.0, 1.0)] * (k - 1)
        for grad, weight in itertools.chain(good, [(5.0, bad)], [(1.0, 1.0)] * k):
            updates, state = update(
                jnp.float32(grad), state, jnp.zeros([]), weight=jnp.float32(weight)
            )
            fired.append(-float(updates))
        np.testing.assert_array_equal(fired[k - 1 :: k], [first, second])
        skipped = {"propagate": 0, "skip_window": k, "skip_micro_step": 1}[nonfinite]
        assert int(state.skipped) == skipped


# --- numbers


def test_value_reaches_inner_as_the_windows_mean():
    seen = []

    def update(updates, state, params=None, *, value, **extra):
        jax.debug.callback(lambda v: seen.append(float(v)), value)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    steps = [
        (1.0, {"value": jnp.float32(1), "weight": jnp.float32(1)}),
        (1.0, {"value": jnp.float32(3), "weight": jnp.float32(3)}),
    ]
    feed(oa.accumulate(inner, 2), jnp.zeros([]), steps)
    jax.effects_barrier()
    assert seen == [2.5]


def test_value_of_a_dropped_micro_step_is_not_counted():
    seen = []

    def update(updates, state, params=None, *, value, **extra):
        jax.debug.callback(lambda v: seen.append(float(v)), value)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    tx = oa.accumulate(inner, 3, nonfinite="skip_micro_step")
    steps = [(g, {"value": jnp.float32(v)}) for g, v in [(1.0, 1.0), (NAN, NAN), (1.0, 3.0)]]
    feed(tx, jnp.zeros([]), steps)
    jax.effects_barrier()
    assert seen == [2.0]


def test_bfloat16_sums_do_not_stagnate():
    params = jnp.zeros(64, jnp.bfloat16)
    small = jnp.full(64, 1e-3, jnp.bfloat16)
    tx = sgd(1024, loss_reduction="sum")
    state, _ = jax.lax.scan(
        lambda state, _: (tx.update(small, state, params)[1], None),
        tx.init(params),
        length=1023,
    )
    np.testing.assert_allclose(state.grad_sum, 1023 * np.float64(small[0]), rtol=1e-5)


@pytest.mark.parametrize(
    "loss_reduction",
    [
        "mean",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("sum", "sum_over_weight")),
    ],
)
def test_our_arithmetic_promotes_nothing_silently(strict, loss_reduction):
    for nonfinite in ("propagate", "skip_micro_step", "skip_window"):
        for k in (1, 2):
            for dtype in (jnp.float32, jnp.bfloat16, jnp.complex64):
                tx = oa.accumulate(
                    optax.identity(), k, loss_reduction=loss_reduction, nonfinite=nonfinite
                )
                params = {"w": jnp.ones((2, 3), dtype)}
                keywords = {} if loss_reduction == "sum" else {"weight": jnp.float32(2)}
                update = jax.jit(tx.update)
                state = tx.init(params)
                for _ in range(k):
                    updates, state = update(params, state, params, value=1.0, **keywords)
                scale = {"mean": 1, "sum": k, "sum_over_weight": 0.5}[loss_reduction]
                np.testing.assert_array_equal(updates["w"], np.full((2, 3), scale, dtype))


@pytest.mark.parametrize("k", [1, 2])
def test_a_contribution_that_overflows_is_not_finite(k):
    tx = sgd(k, nonfinite="skip_micro_step")
    steps = [(jnp.array([1e35, 1.0]), {"weight": 1e6})] + [(jnp.ones(2), {"weight": 1.0})] * (k - 1)
    emitted, _, state = feed(tx, jnp.zeros(2), steps)
    np.testing.assert_array_equal(-emitted[-1], np.ones(2) if k == 2 else np.zeros(2))
    assert int(state.skipped) == 1


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("number", [2**40, 3, 1e30, True])
def test_values_and_weights_keep_their_size(k, number):
    seen = []

    def update(updates, state, params=None, *, value, **extra):
        jax.debug.callback(lambda v: seen.append(float(v)), value)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    tx = oa.accumulate(inner, k)
    state = tx.init(jnp.zeros([]))
    for _ in range(k):
        _, state = tx.update(jnp.ones([]), state, value=number, weight=1024.0)
    jax.effects_barrier()
    assert seen == [np.float32(number)]
    _, state = oa.accumulate(inner, 9).update(
        jnp.ones([]), oa.accumulate(inner, 9).init(jnp.zeros([])), value=1.0, weight=number
    )
    assert float(state.weight_sum) == np.float32(number)


@pytest.mark.parametrize("leftover", [100.0, NAN])
def test_a_gradient_of_none_keeps_nothing_of_the_window_before(leftover):
    tx, params = sgd(2), {"a": jnp.zeros([]), "b": jnp.zeros([])}
    state, updates = tx.init(params), None
    for a in (leftover, leftover, None, 1.0):
        grads = {"a": None if a is None else jnp.float32(a), "b": jnp.ones([])}
        updates, state = tx.update(grads, state, params)
    assert (float(updates["a"]), float(updates["b"])) == (-0.5, -1.0)


@pytest.mark.parametrize("nonfinite", ["propagate", "skip_micro_step", "skip_window"])
def test_derivatives_by_the_weights_stay_finite_where_a_micro_step_is_left_out(nonfinite):
    tx = sgd(2, nonfinite=nonfinite)
    bad = 0.0 if nonfinite == "propagate" else 2.0

    def descended(weights):
        state, total = tx.init(jnp.zeros([])), 0.0
        for grad, weight in zip([1.0, NAN], weights, strict=True):
            updates, state = tx.update(jnp.float32(grad), state, jnp.zeros([]), weight=weight)
            total += updates
        return total

    np.testing.assert_array_equal(jax.grad(descended)(jnp.array([1.0, bad])), 0)
