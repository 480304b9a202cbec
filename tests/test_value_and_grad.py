"""The space driver gives what jax.value_and_grad gives for the whole batch."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_accum as oa

B, T = 24, 6


def batch_of(rng, examples=B):
    lengths = rng.integers(1, T + 1, (examples, 1))
    lengths[::5] = 0
    return {
        "tokens": jnp.asarray(rng.integers(0, 7, (examples, T))),
        "targets": jnp.asarray(rng.normal(size=(examples, T, 3))),
        "mask": jnp.asarray((np.arange(T) < lengths) * 1.0),
    }


def params_of(rng):
    return {"w": jnp.asarray(rng.normal(size=(5, 3))), "e": jnp.asarray(rng.normal(size=(7, 5)))}


def loss_fn(params, batch):
    h = jnp.tanh(params["e"][batch["tokens"]]) @ params["w"]
    losses = ((h - batch["targets"]) ** 2).sum(-1)
    mean = (losses * batch["mask"]).sum() / batch["mask"].sum()
    return mean, {"losses": losses.sum(-1), "tokens": batch["mask"].sum(), "largest": losses.max()}


AUX = {"losses": "concat", "tokens": "sum", "largest": "max"}


def tokens(batch):
    return batch["mask"].sum()


def assert_close(got, want, tolerance=1e-12):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("k", [1, 2, 3, 8])
@pytest.mark.parametrize("engine", ["carry", "refs", "auto"])
@pytest.mark.parametrize("layout", ["strided", "contiguous", "stacked"])
def test_ragged_masks_in_float64(x64, k, engine, layout):
    rng = np.random.default_rng(k)
    params, batch = params_of(rng), batch_of(rng)
    want = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
    if layout == "stacked":
        batch = jax.tree.map(lambda x: x.reshape(k, B // k, *x.shape[1:]), batch)
    grad_fn = oa.value_and_grad(
        loss_fn, k, has_aux=True, weight=tokens, engine=engine, batch_layout=layout, aux=AUX
    )
    assert_close(jax.jit(grad_fn)(params, batch), want)
    if k == 2:
        assert_close(grad_fn(params, batch), want)


@pytest.mark.parametrize("examples, k", [(10, 4), (24, 7), (5, 8), (9, 2), (1, 3)])
@pytest.mark.parametrize("layout", ["strided", "contiguous"])
def test_any_size_with_an_exact_remainder(x64, examples, k, layout):
    rng = np.random.default_rng(0)
    params, batch = params_of(rng), batch_of(rng, examples)
    batch["mask"] = jnp.ones_like(batch["mask"])
    want = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
    for engine, weight in itertools.product(("carry", "refs"), (None, tokens)):
        grad_fn = oa.value_and_grad(
            loss_fn,
            k,
            has_aux=True,
            engine=engine,
            weight=weight,
            aux=AUX,
            batch_layout=layout,
            remainder="exact",
        )
        assert_close(jax.jit(grad_fn)(params, batch), want)
