"""assert_equivalent: what is equivalent passes, and what is not is told its own cause."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from optax_accum.verify import Difference, assert_equivalent

B, T, D = 16, 5, 3
CAUSES = {
    "sum": "a summed loss taken as a mean",
    "mean": "a mean loss taken as a sum",
    "weights": "missing weights",
    "wrong": "wrong weights",
    "denominators": "terms with different denominators",
    "key": "one RNG key for all micro-batches",
    "batchnorm": "BatchNorm, or another statistic of the batch",
    "contrastive": "a contrastive loss",
    "precision": "low precision",
    "layout": "examples that belong together",
    "order": "a loss that goes by the order of the examples",
    "state": "model state handed from micro-step to micro-step",
    "penalty": "a summed loss with a term that is not summed",
    "uncut": "an argument that holds the batch's examples and is not cut",
    "scaled": "a sum scaled by the batch size",
    "none": "none of what was tried explains it",
}
RNG = np.random.default_rng(0)
PARAMS = {
    "in": jnp.asarray(RNG.normal(size=(D, 4)), jnp.float32),
    "out": {"w": jnp.asarray(RNG.normal(size=(4, 2)), jnp.float32), "b": jnp.zeros(2)},
}
LENGTHS = np.array([5, 1, 2, 4, 3, 1, 1, 2, 5, 1, 4, 3, 2, 1, 5, 2])
KEEP = np.arange(T) < LENGTHS[:, None]
LABELS = RNG.integers(0, 2, (B, T))
BATCH = {
    "x": jnp.asarray(RNG.normal(size=(B, D)), jnp.float32),
    "y": jnp.asarray(RNG.normal(size=(B, 2)), jnp.float32),
}
TOKENS = {"x": jnp.asarray(RNG.normal(size=(B, T, D)), jnp.float32)}
KEY = jax.random.key(1)


def logits(params, x):
    return jnp.tanh(x @ params["in"]) @ params["out"]["w"] + params["out"]["b"]


def errors(params, batch):
    return ((logits(params, batch["x"]) - batch["y"]) ** 2).sum(-1)


def mean(params, batch):
    return errors(params, batch).mean()


def total(params, batch):
    return errors(params, batch).sum()


def normalised(params, batch, axis, ddof=0):
    h = batch["x"] @ params["in"]
    h = (h - h.mean(axis, keepdims=True)) / jnp.sqrt(h.var(axis, keepdims=True, ddof=ddof) + 1e-5)
    return ((jnp.tanh(h) @ params["out"]["w"] - batch["y"]) ** 2).mean()


batch_norm = functools.partial(normalised, axis=0)
layer_norm = functools.partial(normalised, axis=1)


def norm_of_state(params, state, batch):
    h = batch["x"] @ params["in"]
    value = batch_norm(params, batch)
    return value, {"mean": 0.9 * state["mean"] + 0.1 * h.mean(0)}


def embeddings(params, batch):
    a, b = batch["x"] @ params["in"], batch["y"] @ params["out"]["w"].T
    return a / jnp.linalg.norm(a, axis=1)[:, None], b / jnp.linalg.norm(b, axis=1)[:, None]


def info_nce(params, batch):
    a, b = embeddings(params, batch)
    return -jnp.diag(jax.nn.log_softmax(5 * a @ b.T)).mean()


def sigmoid_pairs(params, batch):
    a, b = embeddings(params, batch)
    pairs = -jax.nn.log_sigmoid((2 * jnp.eye(len(a)) - 1) * (5 * a @ b.T - 1))
    return pairs.sum() / len(a)


def token_losses(params, batch):
    labels = batch["labels"] if "labels" in batch else jnp.asarray(LABELS[: len(batch["x"])])
    logp = jax.nn.log_softmax(logits(params, batch["x"]))
    return -jnp.take_along_axis(logp, jnp.maximum(labels, 0)[..., None], -1)[..., 0]


def masked(params, batch):
    keep = batch["mask"].astype(jnp.float32)
    return (token_losses(params, batch) * keep).sum() / keep.sum()


def padding(params, batch):
    return masked(params, batch | {"mask": ~batch["padding"]})


def ignored(params, batch, at=-100):
    return masked(params, batch | {"mask": batch["labels"] != at})


def shifted(params, batch):
    """Of each token but the first."""
    keep = (batch["labels"] != -100).at[:, 0].set(False)
    return masked(params, batch | {"mask": keep})


def of_lengths(params, batch):
    return masked(params, batch | {"mask": jnp.arange(T) < batch["lengths"][:, None]})


def two_terms(params, batch):
    return masked(params, batch) + (logits(params, batch["x"]) ** 2).mean()


def hidden_counts(params, batch):
    """What it divides by is no sum over any leaf."""
    keep = jnp.exp(batch["noise"])
    return (token_losses(params, batch) * keep).sum() / keep.sum()


def dropout(params, batch, key, loss=errors, reduce=jnp.mean):
    keep = jax.random.bernoulli(key, 0.6, batch["x"].shape)
    return reduce(loss(params, batch | {"x": jnp.where(keep, batch["x"] / 0.6, 0)}))


def closed_over_key(params, batch):
    return dropout(params, batch, KEY)


def noise_of_numpy(params, batch):
    return mean(params, batch | {"x": batch["x"] * np.random.uniform(size=batch["x"].shape)})


def half(params, batch, dtype=jnp.bfloat16):
    low = jax.tree.map(lambda leaf: leaf.astype(dtype), (params, batch["x"]))
    return ((logits(*low) - batch["y"].astype(dtype)) ** 2).mean().astype(jnp.float32)


def pairs(params, batch):
    scores = logits(params, batch["x"])[:, 0]
    return -jax.nn.log_sigmoid(scores[::2] - scores[1::2]).mean()


def neighbours(params, batch):
    scores = logits(params, batch["x"])[:, 0]
    return ((scores[1:] - 2 * scores[:-1]) ** 2).mean()


def baseline(params, state, batch):
    return ((errors(params, batch) - state) ** 2).mean(), 0.5 * state + batch["y"].mean()


def summed_with_penalty(params, batch):
    return total(params, batch) + sum((leaf**2).sum() for leaf in jax.tree.leaves(params))


def by_batch_size(params, batch):
    return mean(params, batch) * (1.1 if len(batch["x"]) < B else 1.0)


def only_small_batches(params, batch):
    return mean(params, batch) + (len(batch["x"]) < B) * 0.5 * params["out"]["b"].sum()


def by_root(params, batch):
    return total(params, batch) / len(batch["x"]) ** 0.5


def scores(params, batch):
    return logits(params, batch["x"])[:, 0]


def load_balancing(params, batch):
    """A small product of statistics."""
    return mean(params, batch) + 1e-3 * scores(params, batch).mean() ** 2


def experts(params, batch):
    chances = jax.nn.softmax(batch["x"] @ params["in"])
    chosen = jax.nn.one_hot(chances.argmax(-1), 4)
    hidden = jnp.tanh(batch["x"] @ params["in"]) * chances * chosen
    balance = 4 * (chosen.mean(0) * chances.mean(0)).sum()
    return ((hidden @ params["out"]["w"] - batch["y"]) ** 2).mean() + 1e-3 * balance


def clipped(params, batch, at):
    return jnp.clip(mean(params, batch), 0, at)


def hardest(params, batch):
    return jax.lax.top_k(errors(params, batch), len(batch["x"]) // 2)[0].mean()


def palindrome(params, batch):
    """Unchanged by reversal."""
    found = scores(params, batch)
    return ((found + found[::-1]) ** 2).mean()


def steps(params, batch):
    return (jnp.diff(scores(params, batch)) ** 2).mean()


def positions(params, batch):
    return ((scores(params, batch) + 0.1 * jnp.arange(len(batch["x"]))) ** 2).mean()


def labelled(params, x, y):
    return mean(params, {"x": x, "y": y})


def drawn(seed):
    """Another batch."""
    rng = np.random.default_rng(seed)
    return {n: jnp.asarray(rng.normal(size=(B, d)), jnp.float32) for n, d in (("x", D), ("y", 2))}


def key_an_example(params, batch, key):
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.6, (D,)))
    keys = jax.random.split(key, len(batch["x"]))
    return mean(params, batch | {"x": jnp.where(keep(keys), batch["x"], 0)})


def poisson(params, batch, key):
    return mean(params, batch | {"x": batch["x"] * jax.random.poisson(key, 3.0, (D,))})


def normalised_noise(params, batch, key):
    noise = jax.random.normal(key, batch["x"].shape)
    return mean(params, batch | {"x": batch["x"] + noise / noise.std(1, keepdims=True)})


def key_in_state(params, state, batch):
    state, key = jax.random.split(state)
    return dropout(params, batch, key), state


class Model(nnx.Module):
    def __init__(self, norm):
        self.dense, self.out = (
            nnx.Linear(D, 4, rngs=nnx.Rngs(0)),
            nnx.Linear(4, 2, rngs=nnx.Rngs(1)),
        )
        self.norm = norm(4, rngs=nnx.Rngs(2))

    def __call__(self, x):
        return self.out(jnp.tanh(self.norm(self.dense(x))))


def of_nnx(norm):
    """A loss, its parameters and its model state."""
    graph, params, rest = nnx.split(Model(norm), nnx.Param, ...)

    def loss_fn(params, rest, batch):
        model = nnx.merge(graph, params, rest, copy=True)
        loss = ((model(batch["x"]) - batch["y"]) ** 2).mean()
        return loss, nnx.split(model, nnx.Param, ...)[2]

    return loss_fn, params, rest


def tokens_with(**leaves):
    return TOKENS | {name: jnp.asarray(leaf) for name, leaf in leaves.items()}


MASKED = tokens_with(labels=LABELS, mask=KEEP)
STATE = {"batch_argnums": 2, "state_argnum": 1}

# (cause, what the message says of the remedy, loss, arguments after params, keywords)
BROKEN = {
    "summed": ("sum", "Type loss_reduction='sum'", total, (BATCH,), {}),
    "mean as sum": (
        "mean",
        "Type loss_reduction='mean'",
        mean,
        (BATCH,),
        {"loss_reduction": "sum"},
    ),
    "mean over weight": (
        "mean",
        "Type loss_reduction='mean'",
        masked,
        (MASKED,),
        {"loss_reduction": "sum_over_weight", "weight": lambda b: b["mask"].sum()},
    ),
    "boolean mask": ("weights", "weight=lambda batch: batch['mask'].sum()", masked, (MASKED,), {}),
    "floating mask": (
        "weights",
        "weight=lambda batch: batch['mask'].sum()",
        masked,
        (MASKED | {"mask": KEEP * jnp.float32(1)},),
        {"batch_layout": "contiguous"},
    ),
    "padding mask": (
        "weights",
        "weight=lambda batch: (batch['padding'] != 1).sum()",
        padding,
        (tokens_with(labels=LABELS, padding=~KEEP),),
        {},
    ),
    "ignore index": (
        "weights",
        "weight=lambda batch: (batch['labels'] >= 0).sum()",
        ignored,
        (tokens_with(labels=np.where(KEEP, LABELS, -100)),),
        {},
    ),
    "pad token": (
        "weights",
        "weight=lambda batch: (batch['labels'] != 7).sum()",
        functools.partial(ignored, at=7),
        (tokens_with(labels=np.where(KEEP, LABELS, 7)),),
        {"micro_batch_size": 4, "k": None},
    ),
    "shifted labels": (
        "weights",
        "weight=lambda batch: (batch['labels'][:, 1:] >= 0).sum()",
        shifted,
        (tokens_with(labels=np.where(np.arange(T) < LENGTHS[:, None] + 1, LABELS, -100)),),
        {},
    ),
    "lengths": (
        "weights",
        "weight=lambda batch: batch['lengths'].sum()",
        of_lengths,
        (tokens_with(labels=LABELS, lengths=LENGTHS),),
        {},
    ),
    "another argument": (
        "weights",
        "weight=lambda batch_1, batch_2: batch_2.sum()",
        lambda params, batch, mask: masked(params, batch | {"mask": mask}),
        (tokens_with(labels=LABELS), jnp.asarray(KEEP)),
        {"batch_argnums": (1, 2)},
    ),
    "wrong weights": (
        "wrong",
        "weight=lambda batch: batch['mask'].sum()",
        masked,
        (MASKED,),
        {"weight": lambda batch: batch["labels"].sum()},
    ),
    "empty micro-batch": (
        "weights",
        "not finite, where the whole batch's is",
        masked,
        (MASKED | {"mask": jnp.asarray(KEEP).at[1::4].set(False)},),
        {},
    ),
    "counts of no leaf": (
        "weights",
        "no leaf of it counts that",
        hidden_counts,
        (tokens_with(labels=LABELS, noise=RNG.normal(size=(B, T))),),
        {},
    ),
    "two terms": ("denominators", "batch['mask']", two_terms, (MASKED | {"mask": KEEP},), {}),
    "key passed on": ("key", "Type rng_argnums=2", dropout, (BATCH, KEY), {}),
    "legacy key": ("key", "Type rng_argnums=2", dropout, (BATCH, jax.random.PRNGKey(1)), {}),
    "key and sum": (
        "key",
        "Type rng_argnums=2",
        functools.partial(dropout, reduce=jnp.sum),
        (BATCH, KEY),
        {},
    ),
    "key closed over": ("key", "and type rng_argnums=2", closed_over_key, (BATCH,), {}),
    "numpy's numbers": ("key", "traced twice", noise_of_numpy, (BATCH,), {}),
    "summed, with keys": (
        "sum",
        "Type loss_reduction='sum'",
        functools.partial(dropout, reduce=jnp.sum),
        (BATCH, KEY),
        {"rng_argnums": 2},
    ),
    "mask, with keys": (
        "weights",
        "weight=lambda batch: batch['mask'].sum()",
        lambda params, batch, key: dropout(params, batch, key, masked, lambda x: x),
        (MASKED, KEY),
        {"rng_argnums": 2},
    ),
    "BatchNorm": ("batchnorm", "LayerNorm", batch_norm, (BATCH,), {}),
    "BatchNorm, unbiased": (
        "batchnorm",
        "LayerNorm",
        functools.partial(batch_norm, ddof=1),
        (BATCH,),
        {},
    ),
    "BatchNorm with state": (
        "batchnorm",
        "use_running_average",
        norm_of_state,
        ({"mean": jnp.zeros(4)}, BATCH),
        STATE,
    ),
    "BatchNorm, summed": (
        "batchnorm",
        "LayerNorm",
        lambda params, batch: B * batch_norm(params, batch) * len(batch["x"]) / B,
        (BATCH,),
        {"loss_reduction": "sum"},
    ),
    "stacked BatchNorm": (
        "batchnorm",
        "LayerNorm",
        batch_norm,
        (jax.tree.map(lambda leaf: leaf.reshape(4, 4, -1), BATCH),),
        {"batch_layout": "stacked"},
    ),
    "InfoNCE": ("contrastive", "micro_batch_size=", info_nce, (BATCH,), {}),
    "sigmoid of pairs": ("contrastive", "micro_batch_size=", sigmoid_pairs, (BATCH,), {}),
    "computed in bfloat16": ("precision", "jnp.float32", half, (BATCH,), {}),
    "computed in float16": (
        "precision",
        "jnp.float32",
        functools.partial(half, dtype=jnp.float16),
        (BATCH,),
        {},
    ),
    "cancellation": (
        "precision",
        "in float64 the difference is gone",
        lambda params, batch: (errors(params, batch) + 3e4).mean() - 3e4,
        (BATCH,),
        {},
    ),
    "bfloat16 window": (
        "precision",
        "accumulator_dtype=None",
        mean,
        (BATCH,),
        {"accumulator_dtype": jnp.bfloat16},
    ),
    "stricter than float32": ("precision", "rtol=", mean, (BATCH,), {"rtol": 1e-12}),
    "pairs": ("layout", "Type batch_layout='contiguous'", pairs, (BATCH,), {}),
    "neighbours": ("order", "leaves of shape (pairs, 2, ...)", neighbours, (BATCH,), {}),
    "baseline in the state": ("state", "merge_state=", baseline, (jnp.float32(1), BATCH), STATE),
    "sum and a penalty": ("penalty", "number of examples", summed_with_penalty, (BATCH,), {}),
    "sum and a penalty, as sum": (
        "penalty",
        "number of examples",
        summed_with_penalty,
        (BATCH,),
        {"loss_reduction": "sum"},
    ),
    "another factor for small batches": ("scaled", "0.2273 times", by_batch_size, (BATCH,), {}),
    "sum over a root": ("scaled", "0.5 times", by_root, (BATCH,), {}),
    "another loss for small batches": (
        "none",
        "the batch in other orders",
        only_small_batches,
        (BATCH,),
        {},
    ),
    **{
        f"load balancing {i}": ("batchnorm", "statistic", load_balancing, (drawn(i),), {})
        for i in (*range(10), 11)  # of drawn(10) the difference is within the tolerance
    },
    **{f"experts {i}": ("batchnorm", "statistic", experts, (drawn(i),), {}) for i in range(6)},
    **{
        f"clipped mean {at}": (
            "batchnorm",
            "statistic",
            functools.partial(clipped, at=at),
            (BATCH,),
            {},
        )
        for at in (8, 10, 9)
    },
    "hardest half": ("batchnorm", "statistic", hardest, (BATCH,), {}),
    "maximum": ("batchnorm", "a maximum", lambda *args: errors(*args).max(), (BATCH,), {}),
    "maximum of two": (
        "batchnorm",
        "a maximum",
        lambda *args: errors(*args).max(),
        (BATCH,),
        {"k": 2},
    ),
    "palindrome": ("order", "leaves of shape (pairs, 2, ...)", palindrome, (BATCH,), {}),
    "steps": ("order", "leaves of shape (pairs, 2, ...)", steps, (BATCH,), {}),
    "positions": ("order", "jnp.arange(examples)", positions, (BATCH,), {}),
    "labels not cut": (
        "uncut",
        "type batch_argnums=(1, 2)",
        labelled,
        (BATCH["x"], BATCH["y"]),
        {"k": B},
    ),
    "labels by keyword": (
        "uncut",
        "give it as argument 2 of the loss and type batch_argnums=(1, 2)",
        functools.partial(labelled, y=BATCH["y"]),
        (BATCH["x"],),
        {"k": B},
    ),
}
# What the others show already.
MORE = {
    "mean over weight",
    "padding mask",
    "pad token",
    "lengths",
    "legacy key",
    "key and sum",
    "mask, with keys",
    "BatchNorm, unbiased",
    "BatchNorm, summed",
    "sigmoid of pairs",
    "computed in float16",
    "sum and a penalty, as sum",
    "another factor for small batches",
    *(f"load balancing {i}" for i in (*range(3, 10), 11)),
    *(f"experts {i}" for i in range(1, 6)),
    "labels by keyword",
    "floating mask",
    "another argument",
    "numpy's numbers",
    "boolean mask",
    "counts of no leaf",
    "experts 0",
    "shifted labels",
    "summed, with keys",
    "wrong weights",
    "stacked BatchNorm",
    "load balancing 2",
    "a key an example",
    "keys that must vary",
    "one micro-batch of BatchNorm",
    "clipped mean 10",
    "clipped mean 9",
    "maximum of two",
    "steps",
    "refs",
    "micro_batch_size",
    "weights",
    "keys and weights",
    "keys of one kind",
    "key in the state",
}


def table(names):
    return [pytest.param(x, marks=[pytest.mark.full] if x in MORE else []) for x in names]


@pytest.fixture(autouse=True, scope="module")
def compiled_fast():
    """Hundreds of programs, each run a few times."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def failure(loss_fn, args, keywords):
    with pytest.raises(AssertionError) as caught:
        assert_equivalent(loss_fn, PARAMS, *args, **({"k": 4} | keywords))
    return str(caught.value)


@pytest.mark.parametrize("name", table(BROKEN))
def test_each_has_its_own_cause_and_no_other(name):
    cause, remedy, loss_fn, args, keywords = BROKEN[name]
    text = failure(loss_fn, args, keywords)
    assert [found for found in CAUSES if f"Likely cause: {CAUSES[found]}" in text] == [cause], text
    assert remedy in text, text
    assert " step" not in text and text.startswith("accumulated over ")


def test_models_of_nnx():
    loss_fn, params, rest = of_nnx(nnx.LayerNorm)
    assert_equivalent(loss_fn, params, rest, BATCH, k=4, **STATE)
    loss_fn, params, rest = of_nnx(nnx.BatchNorm)
    with pytest.raises(AssertionError) as caught:
        assert_equivalent(loss_fn, params, rest, BATCH, k=4, **STATE)
    assert f"Likely cause: {CAUSES['batchnorm']}" in str(caught.value)
    assert "['dense'].kernel" in str(caught.value) or "['dense']['kernel']" in str(caught.value)


def tokens(batch):
    return batch["mask"].sum()


def masked_sum(params, batch):
    return (token_losses(params, batch) * batch["mask"]).sum()


def with_aux(params, batch, offset):
    losses = ((logits(params, batch["x"]) + offset - batch["y"]) ** 2).sum(-1)
    return losses.mean(), {"losses": losses}


WIDE = jax.tree.map(lambda leaf: leaf.reshape(4, 4, *leaf.shape[1:]), BATCH)
SOUND = {
    "mean": (mean, (BATCH,), {}),
    "refs": (mean, (BATCH,), {"engine": "refs"}),
    "remainder": (mean, (BATCH,), {"k": 5, "remainder": "exact"}),
    "micro_batch_size": (mean, (BATCH,), {"k": None, "micro_batch_size": 8}),
    "stacked": (mean, (WIDE,), {"batch_layout": "stacked", "k": None}),
    "one micro-batch of BatchNorm": (batch_norm, (BATCH,), {"k": 1}),
    "sum": (total, (BATCH,), {"loss_reduction": "sum"}),
    "weights": (masked, (MASKED,), {"weight": tokens}),
    "empty micro-batch": (
        masked,
        (MASKED | {"mask": jnp.asarray(KEEP).at[1::4].set(False)},),
        {"weight": tokens},
    ),
    "sum over weight": (
        masked_sum,
        (MASKED,),
        {"weight": tokens, "loss_reduction": "sum_over_weight", "batch_layout": "contiguous"},
    ),
    "LayerNorm": (layer_norm, (BATCH,), {}),
    "several argnums and aux": (
        with_aux,
        (BATCH, jnp.ones(2)),
        {"argnums": (0, 2), "has_aux": True, "aux": "concat", "has_stats": True},
    ),
    "keys": (dropout, (BATCH, KEY), {"rng_argnums": 2}),
    "a key an example": (key_an_example, (BATCH, KEY), {"rng_argnums": 2}),
    "keys of one kind": (poisson, (BATCH, KEY), {"rng_argnums": 2}),
    "keys that must vary": (normalised_noise, (BATCH, KEY), {"rng_argnums": 2}),
    "keys and weights": (
        functools.partial(dropout, loss=masked, reduce=lambda x: x),
        (MASKED, KEY),
        {"rng_argnums": 2, "weight": tokens, "remainder": "exact", "k": 3},
    ),
    "key unused": (lambda params, batch, key: mean(params, batch), (BATCH, KEY), {}),
    "key in the state": (key_in_state, (KEY, BATCH), STATE),
    "pairs": (pairs, (BATCH,), {"batch_layout": "contiguous"}),
    "state held": (
        baseline,
        (jnp.float32(1), BATCH),
        STATE | {"merge_state": lambda initial, stacked, weights: stacked.mean()},
    ),
    "computed in bfloat16, allowed for": (half, (BATCH,), {"rtol": 0.02}),
}


@pytest.mark.parametrize("name", table(SOUND))
def test_what_is_equivalent_passes(name):
    loss_fn, args, keywords = SOUND[name]
    found = assert_equivalent(loss_fn, PARAMS, *args, **({"k": 4} | keywords))
    assert isinstance(found, Difference) and found.absolute <= found.tolerance


@pytest.mark.parametrize("name", ["weights", pytest.param("keys", marks=pytest.mark.full)])
def test_float64_is_held_to_float64(x64, name):
    loss_fn, args, keywords = SOUND[name]
    wide = lambda leaf: leaf.astype(float) if leaf.dtype == jnp.float32 else leaf  # noqa: E731
    params, args = jax.tree.map(wide, (PARAMS, args))
    found = assert_equivalent(loss_fn, params, *args, **({"k": 4} | keywords))
    np.testing.assert_allclose(found.tolerance, np.finfo(float).eps ** (2 / 3) * found.scale)
    with pytest.raises(AssertionError, match="is off by"):
        worse = lambda params, *args: loss_fn(params, *args) * (1 + 1e-9 * len(args[0]["x"]))  # noqa: E731
        assert_equivalent(worse, params, *args, **({"k": 4} | keywords))


def test_bfloat16_parameters_are_held_to_bfloat16():
    params, batch = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (PARAMS, BATCH))
    assert_equivalent(mean, params, batch, k=4)
    with pytest.raises(AssertionError, match="a summed loss taken as a mean"):
        assert_equivalent(total, params, batch, k=4)


@pytest.mark.parametrize(
    "name",
    [
        "computed in bfloat16",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("computed in float16", "cancellation", "bfloat16 window")
        ),
        "stricter than float32",
    ],
)
def test_the_rtol_to_type_is_enough(name):
    _, _, loss_fn, args, keywords = BROKEN[name]
    wanted = float(failure(loss_fn, args, keywords).split("Type rtol=")[1].split()[0])
    assert_equivalent(loss_fn, PARAMS, *args, **({"k": 4} | keywords | {"rtol": wanted}))
    with pytest.raises(AssertionError):
        assert_equivalent(loss_fn, PARAMS, *args, **({"k": 4} | keywords | {"rtol": wanted / 8}))


NUMBER = r"(\d[\d.e+-]*\d)"


def test_the_worst_leaf_how_far_and_the_tolerance():
    first, losses, _ = failure(only_small_batches, (BATCH,), {}).split("\n")
    shown = re.fullmatch(
        r"accumulated over 4 micro-batches, gradient\['out'\]\['b'\] is off by 0.5, which is "
        rf"{NUMBER} of its scale {NUMBER} and {NUMBER} times the tolerance {NUMBER}\.",
        first,
    )
    assert shown
    relative, scale, times, tolerance = map(float, shown.groups())
    rows = [
        jax.grad(only_small_batches)(PARAMS, {n: x[i::4] for n, x in BATCH.items()})
        for i in range(4)
    ]
    largest = max(float(abs(row["out"]["b"]).max()) for row in rows)
    np.testing.assert_allclose(scale, largest, rtol=0.01)
    np.testing.assert_allclose(tolerance, np.finfo(np.float32).eps ** (2 / 3) * scale, rtol=0.01)
    np.testing.assert_allclose([relative, times], [0.5 / scale, 0.5 / tolerance], rtol=0.05)
    shown = re.fullmatch(rf"loss: accumulated {NUMBER}, of the whole batch {NUMBER}\.", losses)
    wanted = mean(PARAMS, BATCH)
    np.testing.assert_allclose([float(x) for x in shown.groups()], [wanted] * 2, rtol=1e-5)


def test_what_is_returned_and_allowed():
    found = assert_equivalent(only_small_batches, PARAMS, BATCH, k=4, atol=0.6)
    assert found.leaf == "gradient['out']['b']"
    np.testing.assert_allclose(found.absolute, 0.5, rtol=1e-5)
    assert 0.6 < found.tolerance < 0.61
    assert_equivalent(by_batch_size, PARAMS, BATCH, k=4, rtol=0.2)
    with pytest.raises(AssertionError):
        assert_equivalent(by_batch_size, PARAMS, BATCH, k=4, rtol=0.05)


@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_a_gradient_that_cancels_is_no_failure(layout):
    """Its own scale is rounding; contiguous, that of the micro-batches is not."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(B // 2, D)), jnp.float32)
    loss_fn = lambda w, x: jnp.mean(x @ w * 1.1)  # noqa: E731
    found = assert_equivalent(
        loss_fn, jnp.ones(D), jnp.concatenate([x, -x]), k=4, batch_layout=layout
    )
    assert found.tolerance < 1e-4


def test_what_all_but_cancels_is_told_an_atol():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(B // 2, D)), jnp.float32)
    loss_fn = lambda w, x: jnp.mean(100 * x @ w * 1.1) + 1e-5 * jnp.mean(w**2)  # noqa: E731
    given = (loss_fn, jnp.ones(D), jnp.concatenate([x, -x]))
    with pytest.raises(AssertionError, match="Likely cause: low precision") as caught:
        assert_equivalent(*given, k=4)
    atol = float(str(caught.value).split("Type atol=")[1].split()[0])
    assert atol < 1e-3
    assert_equivalent(*given, k=4, atol=atol)


@pytest.mark.parametrize("size", [1e4, 1e6])
def test_a_leaf_is_held_to_its_own_scale(size):
    """However large the others are, as long as its rounding is small."""

    def loss_fn(params, batch, small):
        return size * mean(params["large"], batch) + small(mean(params["small"], batch))

    params = {"large": PARAMS, "small": PARAMS}
    sound, broken = ((lambda *args, f=f: loss_fn(*args, f)) for f in (jnp.positive, jnp.sqrt))
    loose = {"k": 4, "rtol": 1e-5}
    assert_equivalent(sound, params, BATCH, **loose)
    with pytest.raises(AssertionError, match=r"gradient\['small'\]"):
        assert_equivalent(broken, params, BATCH, **loose)


@pytest.mark.parametrize("given", ["argument 2", "y= of functools.partial"])
def test_labels_that_fit_no_micro_batch(given):
    args, loss_fn = (BATCH["x"], BATCH["y"]), labelled
    if "partial" in given:
        args, loss_fn = args[:1], functools.partial(labelled, y=BATCH["y"])
    with pytest.raises(ValueError, match=re.escape(f"{given} has 16 examples")) as caught:
        assert_equivalent(loss_fn, PARAMS, *args, k=4)
    assert "type batch_argnums=(1, 2)" in str(caught.value)
    assert "shape" in str(caught.value.__cause__)


def test_labels_closed_over_fit_no_micro_batch():
    with pytest.raises((TypeError, ValueError), match="shape") as caught:
        assert_equivalent(lambda p, x: labelled(p, x, BATCH["y"]), PARAMS, BATCH["x"], k=4)
    assert "array of the batch's length that it closes over" in caught.value.__notes__[-1]


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_what_is_not_finite_is_said_and_not_compared(value):
    with pytest.raises(AssertionError) as caught:
        assert_equivalent(mean, PARAMS, BATCH | {"x": BATCH["x"].at[0, 0].set(value)}, k=4)
    text = str(caught.value)
    assert "of the whole batch is not finite, with no accumulation at all" in text
    assert "jax_debug_nans" in text and "Likely cause" not in text


@pytest.mark.parametrize(
    ("keywords", "error", "shown"),
    [
        ({}, ValueError, "expected one of them"),
        ({"k": 3}, ValueError, "use k=2, k=4 or k=8, or remainder='exact'"),
        ({"k": 0}, ValueError, "type k=8"),
        ({"k": 4, "loss_reduction": "average"}, ValueError, "loss_reduction='sum'"),
        ({"k": 4, "weight": 1.0}, TypeError, "expected a function of a micro-batch"),
        ({"k": 4, "rng_argnums": 2}, TypeError, "expected at least 3"),
        ({"k": 4, "y": BATCH["y"]}, TypeError, "type batch_argnums=(1, 2)"),
        ({"k": 4, "tolerance": 1.0}, TypeError, "unexpected keyword argument 'tolerance'"),
        ({"k": 4, "rtol": -1.0}, ValueError, "rtol is -1.0, expected a number from 0"),
        ({"k": 4, "atol": "1e-3"}, ValueError, "type atol=1e-5"),
        ({"k": 4, "atol": float("nan")}, ValueError, "atol is nan"),
    ],
)
def test_errors(keywords, error, shown):
    with pytest.raises(error) as caught:
        assert_equivalent(mean, PARAMS, BATCH, **keywords)
    assert shown in str(caught.value)
