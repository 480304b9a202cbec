"""Hyperparameters when the global batch grows: closed forms, limits, and runs that keep them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_accum as oa

KAPPAS = (0.25, 1, 2, 8, 64)


@pytest.mark.parametrize("kappa", KAPPAS)
def test_closed_forms(kappa):
    assert oa.planning.scale_linear(0.1, kappa) == pytest.approx(0.1 * kappa)
    assert oa.planning.scale_square_root(0.1, kappa) == pytest.approx(0.1 * kappa**0.5)
    assert oa.planning.scale_beta(0.95, kappa) == pytest.approx(0.95**kappa)
    found = oa.planning.scale_adam(0.1, kappa, b1=0.99, b2=0.999, eps=1e-8)
    expected = (0.1 * kappa**0.5, 1 - kappa * 0.01, 1 - kappa * 0.001, 1e-8 / kappa**0.5)
    assert found == pytest.approx(expected)
    optax.adam(**found._asdict())


def test_kappas_after_one_another_are_one():
    once = oa.planning.scale_adam(1e-3, 8, b1=0.95)
    first = oa.planning.scale_adam(1e-3, 2, b1=0.95)
    twice = oa.planning.scale_adam(
        first.learning_rate, 4, **dict(zip(("b1", "b2", "eps"), first[1:], strict=True))
    )
    assert twice == pytest.approx(once)
    beta = oa.planning.scale_beta
    assert beta(beta(0.95, 2), 4) == pytest.approx(beta(0.95, 8))


def test_the_full_rule_ends_where_a_beta_would_reach_zero():
    for kappa in (10, 11):
        with pytest.raises(ValueError, match=r"a kappa below 10; type .*scale_beta\(0.9, 1"):
            oa.planning.scale_adam(1e-3, kappa, b1=0.9)
    assert 0 < oa.planning.scale_adam(1e-3, 9.99, b1=0.9).b1 < 0.01
    assert 0 < oa.planning.scale_beta(0.9, 11) < 1  # the half-life rule goes on
    assert oa.planning.scale_beta(0.0, 4) == 0


@pytest.mark.parametrize("beta", [0.9, 0.99, 0.999])
def test_the_two_rules_agree_to_first_order(beta):
    for kappa in (2, 4, 8):
        full = oa.planning.scale_adam(1.0, kappa, b1=beta, b2=beta).b1
        half = oa.planning.scale_beta(beta, kappa)
        assert 0 <= half - full <= (kappa * (1 - beta)) ** 2 / 2


@pytest.mark.parametrize("kappa", KAPPAS)
def test_the_half_life_in_tokens_stays(kappa):
    beta = 0.95
    scaled = oa.planning.scale_beta(beta, kappa)
    before = oa.planning.half_life(beta, 512)
    assert oa.planning.half_life(scaled, 512 * kappa) == pytest.approx(before)
    assert beta ** (before / 512) == pytest.approx(0.5)
    assert oa.planning.half_life(0.0, 512) == 0


@pytest.mark.parametrize("kappa", [4, 16])
def test_a_run_keeps_the_half_life_in_tokens(kappa):
    """Gradient 1 for 64 micro-batches, then 0: Adam's second moment, by tokens seen.

    kappa micro-batches to an update with b2**kappa forget what as many updates with b2 forget;
    with the old b2 the accumulated run would remember kappa times as long.
    """
    b2, micro_steps = 0.9, 128
    gradients = np.where(np.arange(micro_steps) < 64, 1.0, 0.0)

    def second_moments(tx):
        def micro_step(state, gradient):
            _, state = tx.update(gradient, state, jnp.float32(0))
            return state, optax.tree.get(state, "nu")

        return np.asarray(
            jax.lax.scan(micro_step, tx.init(jnp.float32(0)), jnp.float32(gradients))[1]
        )

    every = second_moments(optax.scale_by_adam(b2=b2))
    scaled = optax.scale_by_adam(b2=oa.planning.scale_beta(b2, kappa))
    accumulated = second_moments(oa.accumulate(scaled, kappa))
    ends = np.arange(kappa - 1, micro_steps, kappa)  # where a window closes
    seen = ends + 1
    built = 1 - b2 ** np.minimum(seen, 64)
    closed = built * b2 ** np.maximum(seen - 64, 0)
    np.testing.assert_allclose(every[ends], closed, rtol=1e-4)
    np.testing.assert_allclose(accumulated[ends], closed, rtol=1e-4)
    forgotten = -math.log(accumulated[-1] / accumulated[63]) / 64  # a micro-batch
    assert math.log(2) / forgotten == pytest.approx(oa.planning.half_life(b2, 1), rel=1e-3)
    unscaled = second_moments(oa.accumulate(optax.scale_by_adam(b2=b2), kappa))
    assert unscaled[-1] / unscaled[63] == pytest.approx(b2 ** (64 / kappa), rel=1e-3)


LAYERWISE = {
    "lars": optax.lars(10.0, weight_decay=1e-2, momentum=0.9),
    "lamb": optax.lamb(0.01, weight_decay=1e-2),
}


@pytest.mark.parametrize("name", LAYERWISE)
def test_layerwise_rates_see_the_whole_window(name, x64):
    """LARS and LAMB, whose trust ratios are of a whole gradient: three updates as one big batch
    makes them, by unequal micro-batches in the time driver and equal ones in the space driver.
    """
    inner, k = LAYERWISE[name], 4
    rng = np.random.default_rng(0)
    start = {"a": jnp.asarray(rng.normal(size=(6, 5))), "b": jnp.asarray(rng.normal(size=5))}
    batches = [jnp.asarray(rng.normal(size=(16, 6))) for _ in range(3)]
    loss = lambda p, x: jnp.mean(jnp.tanh(x @ p["a"] + p["b"]) ** 2)  # noqa: E731

    def whole(p, state, x):
        updates, state = inner.update(jax.grad(loss)(p, x), state, p)
        return optax.apply_updates(p, updates), state

    def by_space(p, state, x):
        updates, state = inner.update(oa.value_and_grad(loss, k)(p, x)[1], state, p)
        return optax.apply_updates(p, updates), state

    tx = oa.accumulate(inner, k)

    def by_time(p, state, x):
        for part in jnp.split(x, [1, 6, 9]):
            grads = jax.grad(loss)(p, part)
            p, state = oa.apply_gradients(tx, grads, state, p, weight=len(part))
        return p, state

    def run(update, state):
        p, update = start, jax.jit(update)
        for x in batches:
            p, state = update(p, state, x)
        return p

    expected = run(whole, inner.init(start))
    for got in (run(by_space, inner.init(start)), run(by_time, tx.init(start))):
        for leaf in start:
            np.testing.assert_allclose(got[leaf], expected[leaf], rtol=1e-9)
            assert abs(got[leaf] - start[leaf]).max() > 1e-3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: oa.planning.scale_linear(0.1, 0), "kappa is 0, expected a number above 0"),
        (lambda: oa.planning.scale_square_root(-1, 2), "learning_rate is -1"),
        (
            lambda: oa.planning.scale_linear(optax.linear_schedule(1, 0, 9), 2),
            "of a schedule scale",
        ),
        (lambda: oa.planning.scale_beta(1.0, 2), "beta is 1.0, expected a decay from 0 to below 1"),
        (lambda: oa.planning.scale_adam(0.1, 2, b2=1.5), "b2 is 1.5"),
        (lambda: oa.planning.half_life(0.9, 0), "per_update is 0"),
    ],
)
def test_what_cannot_be_meant(call, message):
    with pytest.raises(ValueError, match=message):
        call()
