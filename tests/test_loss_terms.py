"""Loss terms with different denominators: a mean over tokens beside means over examples, experts.

    loss = sum(token losses) / tokens + 0.1 sum(router's losses) / examples

of the whole batch, where tokens of a micro-batch differ and its examples do not. Each test is one
way to write it that is exact; the last one shows what is not.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_accum as oa

B, T, D, EXPERTS, K = 12, 5, 4, 3, 4
ROUTER = 0.1


def make(kind):
    """Parameters, and a batch whose masks are ragged; strided, micro-batch i has examples i::K."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, T + 1, (B, 1))
    if kind == "an example without tokens":
        lengths[2] = 0
    elif kind == "a micro-batch without tokens":
        lengths[1::K] = 0
    params = {
        "router": jnp.asarray(rng.normal(size=(D, EXPERTS))),
        "experts": jnp.asarray(rng.normal(size=(EXPERTS, D, D)) / 2),
        "head": jnp.asarray(rng.normal(size=(D, D))),
    }
    x = jnp.asarray(rng.normal(size=(B, T, D)))
    y = jnp.asarray(rng.normal(size=(B, T, D)))
    return params, {"x": x, "y": y, "mask": jnp.asarray((np.arange(T) < lengths) * 1.0)}


KINDS = ["an example without tokens", "a micro-batch without tokens"]


def sums(params, batch):
    """(sum of the token losses, sum over examples of the router's)."""
    gates = jax.nn.softmax(batch["x"] @ params["router"])

    each = jnp.tanh(jnp.einsum("btd,ndf->btnf", batch["x"], params["experts"]))
    h = jnp.einsum("btn,btnf->btf", gates, each)
    losses = jnp.square(h @ params["head"] - batch["y"]).sum(-1)
    balance = jnp.square(gates.mean(1) - 1 / EXPERTS).sum(-1)  # an example each
    return (losses * batch["mask"]).sum(), EXPERTS * balance.sum()


def tokens(batch):
    return batch["mask"].sum()


def run(f, *args):
    """Compiled without LLVM's optimizations, which cost more than they save here."""
    return jax.jit(f).lower(*args).compile({"xla_backend_optimization_level": 0})(*args)


def whole(params, batch):
    """What a trainer with room for the whole batch computes."""
    token_losses, balance = sums(params, batch)
    return token_losses / tokens(batch) + ROUTER * balance / B


@functools.cache
def truth(kind):
    with jax.enable_x64(True):
        return run(jax.value_and_grad(whole), *make(kind))


def assert_close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ["carry", "refs"])
def test_sums_over_denominators_of_the_whole_batch(x64, engine, kind):
    """Every term divided by its own count before the call, and summed: exact for any mask."""

    def loss(params, batch, all_tokens, examples):
        token_losses, balance = sums(params, batch)
        return token_losses / all_tokens + ROUTER * balance / examples

    params, batch = make(kind)
    grad_fn = oa.value_and_grad(loss, K, loss_reduction="sum", engine=engine)
    got = run(grad_fn, params, batch, tokens(batch), float(B))
    assert_close(got, truth(kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ["carry", "refs"])
def test_one_denominator_and_the_other_terms_rescaled_to_it(x64, engine, kind):
    """The docstring's: sum(w l) over the tokens, the router's sum times tokens / examples.

    A micro-batch without tokens is not computed, its router loss neither: one has to give it a
    weight that is not zero, or write the loss as sums.
    """

    def loss(params, batch, all_tokens):
        token_losses, balance = sums(params, batch)
        return token_losses + ROUTER * balance * all_tokens / B

    params, batch = make(kind)
    grad_fn = oa.value_and_grad(
        loss, K, weight=tokens, loss_reduction="sum_over_weight", engine=engine
    )
    got = run(grad_fn, params, batch, tokens(batch))
    if kind != "a micro-batch without tokens":
        assert_close(got, truth(kind))
        return
    kept = jax.tree.map(lambda x: x.reshape(-1, K, *x.shape[1:])[:, jnp.array([0, 2, 3])], batch)
    kept = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), kept)
    token_losses, kept = run(sums, params, kept)
    np.testing.assert_allclose(got[0], token_losses / tokens(batch) + ROUTER * kept / B, rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ["carry", "refs"])
def test_a_mean_with_the_other_term_rescaled_in_each_micro_batch(x64, engine, kind):
    """As users write it, a mean over the micro-batch's own tokens. The factor is
    (all tokens / all examples) / the micro-batch's tokens, which needs tokens in each."""

    def loss(params, batch, all_tokens):
        token_losses, balance = sums(params, batch)
        return (token_losses + ROUTER * balance * all_tokens / B) / tokens(batch)

    params, batch = make(kind)
    grad_fn = oa.value_and_grad(loss, K, weight=tokens, engine=engine)
    got = run(grad_fn, params, batch, tokens(batch))
    if kind != "a micro-batch without tokens":
        assert_close(got, truth(kind))
    else:
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(got))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ["carry", "refs"])
def test_one_call_a_term(x64, engine, kind):
    """The docstring's other way: exact for any mask, at twice the forward passes."""
    params, batch = make(kind)
    token_mean = lambda p, b: sums(p, b)[0] / tokens(b)  # noqa: E731
    router_mean = lambda p, b: ROUTER * sums(p, b)[1] / len(b["x"])  # noqa: E731

    def both(params, batch):
        terms = [
            oa.value_and_grad(token_mean, K, weight=tokens, engine=engine)(params, batch),
            oa.value_and_grad(router_mean, K, engine=engine)(params, batch),
        ]
        return jax.tree.map(jnp.add, *terms)

    assert_close(run(both, params, batch), truth(kind))


@pytest.mark.parametrize("engine", ["carry", "refs"])
def test_three_denominators_and_a_remainder(x64, engine):
    """Tokens, examples, and the experts' parameters (a term of no example): 12 examples by 5."""

    def loss(params, batch, all_tokens, micro_steps):
        token_losses, balance = sums(params, batch)
        decay = jnp.mean(jnp.square(params["experts"]))
        return token_losses / all_tokens + ROUTER * balance / B + decay / micro_steps

    params, batch = make(KINDS[0])
    want_value, want = run(jax.value_and_grad(loss), params, batch, tokens(batch), 1.0)
    grad_fn = oa.value_and_grad(
        loss, micro_batch_size=5, loss_reduction="sum", remainder="exact", engine=engine
    )
    assert_close(run(grad_fn, params, batch, tokens(batch), 3.0), (want_value, want))


def test_without_a_recipe_the_router_is_weighted_by_tokens(x64):
    """So that the tests above are seen to tell: both terms as means, weighted by tokens."""

    def loss(params, batch):
        token_losses, balance = sums(params, batch)
        return token_losses / tokens(batch) + ROUTER * balance / len(batch["x"])

    params, batch = make(KINDS[0])
    value, _ = run(oa.value_and_grad(loss, K, weight=tokens), params, batch)
    assert abs(value / truth(KINDS[0])[0] - 1) > 1e-6
