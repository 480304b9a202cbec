"""The space driver over the breadth of what people differentiate, against the whole batch."""

import dataclasses
import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import optax_accum as oa

B, T, D = 8, 3, 4  # examples, positions, width
OLD = jax.__version_info__ < (0, 11)


class Case(NamedTuple):
    """A loss, what it is called with, and what `oa.value_and_grad` is told about it."""

    loss: Any
    args: tuple[Any, ...]
    keywords: dict[str, Any] = {}  # noqa: RUF012 (never written to)
    extra: dict[str, Any] = {}  # noqa: RUF012 (the same): keyword arguments of the loss


def normal(rng, *shape):
    """Numbers that float32 holds, in the default float, so that one truth serves both widths."""
    return jnp.asarray(rng.normal(size=shape).astype(np.float32), float)


def weights(rng, *shape):
    return normal(rng, *shape) / 2


def mean_square(h, y):
    return jnp.mean(jnp.square(h - y))


# The table. Each builds its case from a random generator; each loss is a mean over examples.


def dense(rng):
    def loss(p, b):
        return mean_square(jnp.tanh(b["x"] @ p["a"] + p["c"]) @ p["w"], b["y"])

    p = {"a": weights(rng, D, 5), "c": weights(rng, 5), "w": weights(rng, 5, 2)}
    return Case(loss, (p, {"x": normal(rng, B, D), "y": normal(rng, B, 2)}))


def layers(rng, layer, depth=3):
    """A loss of `layer`s in a row, not scanned."""

    def loss(p, b):
        h = b["x"]
        for w in p:
            h = layer(h, w)
        return mean_square(h, b["y"])

    p = [weights(rng, D, D) for _ in range(depth)]
    return Case(loss, (p, {"x": normal(rng, B, D), "y": normal(rng, B, D)}))


def checkpointed(rng):
    return layers(rng, jax.checkpoint(lambda h, w: jnp.sin(jnp.tanh(h @ w))))


def checkpointed_with_a_policy(rng):
    return layers(
        rng,
        jax.checkpoint(
            lambda h, w: jnp.sin(jnp.tanh(h @ w)), policy=jax.checkpoint_policies.dots_saveable
        ),
    )


def checkpointed_by_name(rng):
    policy = jax.checkpoint_policies.save_only_these_names("kept")
    return layers(
        rng,
        jax.checkpoint(
            lambda h, w: jnp.sin(checkpoint_name(jnp.tanh(h @ w), "kept")), policy=policy
        ),
    )


def scanned(rng, wrap=lambda body: body):
    def loss(p, b):
        def body(h, w):
            return h + jnp.tanh(h @ w["a"]) @ w["b"] * w["scale"], None

        return mean_square(lax.scan(wrap(body), b["x"], p)[0], b["y"])

    p = {"a": weights(rng, 3, D, D), "b": weights(rng, 3, D, D), "scale": normal(rng, 3)}
    return Case(loss, (p, {"x": normal(rng, B, D), "y": normal(rng, B, D)}))


def scanned_and_checkpointed(rng):
    return scanned(rng, jax.checkpoint)


def scanned_and_checkpointed_with_a_policy(rng):
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return scanned(rng, functools.partial(jax.checkpoint, policy=policy, prevent_cse=False))


def scanned_twice_over_the_same_layers(rng):
    def loss(p, b):
        body = lambda h, w: (jnp.tanh(h @ w), None)  # noqa: E731
        h, _ = lax.scan(body, b["x"], p)
        h, _ = lax.scan(body, h, p, reverse=True, unroll=2)
        return mean_square(h, b["y"])

    batch = {"x": normal(rng, B, D), "y": normal(rng, B, D)}
    return Case(loss, (weights(rng, 3, D, D), batch))


def recurrent(rng):
    def loss(p, b):
        def body(h, x):
            return jnp.tanh(h @ p["h"] + x @ p["x"]), h.sum(-1)

        h, sums = lax.scan(body, jnp.zeros_like(b[:, 0]), jnp.swapaxes(b, 0, 1))
        return jnp.mean(jnp.square(h)) + jnp.mean(sums)

    return Case(loss, ({"h": weights(rng, D, D), "x": weights(rng, D, D)}, normal(rng, B, T, D)))


def tokens(rng, vocabulary=7):
    return jnp.asarray(rng.integers(0, vocabulary, (B, T)))


def nll(logits, targets):
    picked = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def tied_weights(rng):
    """The embedding is the head too."""

    def loss(p, b):
        h = jnp.tanh(p["embedding"][b["tokens"]] @ p["w"])
        return nll(h @ p["embedding"].T, b["targets"])

    p = {"embedding": weights(rng, 7, D), "w": weights(rng, D, D)}
    return Case(loss, (p, {"tokens": tokens(rng), "targets": tokens(rng)}))


def embeddings(rng):
    def loss(p, b):
        table, positions = p
        return jnp.mean(jnp.square(table[b] + positions[jnp.arange(T)]).sum(-1))

    return Case(loss, ((weights(rng, 7, D), weights(rng, 5, D)), tokens(rng)))


def attention(rng):
    def loss(p, b):
        q, k, v = (jnp.einsum("btd,dhe->bhte", b["x"], p[name]) for name in "qkv")
        logits = jnp.where(jnp.tri(T, dtype=bool), jnp.einsum("bhte,bhse->bhts", q, k), -1e9)
        h = jnp.einsum("bhts,bhse,hed->btd", jax.nn.softmax(logits), v, p["o"])
        h = h * lax.rsqrt(jnp.mean(jnp.square(h), -1, keepdims=True) + 1e-3) * p["norm"]
        return mean_square(jax.nn.gelu(h), b["x"])

    p = {name: weights(rng, D, 2, 2) for name in "qkv"}
    p |= {"o": weights(rng, 2, 2, D), "norm": normal(rng, D)}
    return Case(loss, (p, {"x": normal(rng, B, T, D)}))


def convolutions(rng):
    def loss(p, images):
        h = lax.conv_general_dilated(
            images, p["a"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        h = lax.reduce_window(jnp.tanh(h), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        h = lax.conv_general_dilated(
            h,
            p["depthwise"],
            (1, 1),
            "VALID",
            feature_group_count=3,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return jnp.mean(jnp.square(h))

    p = {"a": weights(rng, 3, 3, 2, 3), "depthwise": weights(rng, 2, 2, 1, 3)}
    return Case(loss, (p, normal(rng, B, 4, 4, 2)))


def unused_parameters(rng):
    case = dense(rng)
    unused = {"unused": normal(rng, 3), "deep": [normal(rng, 2, 2), ()]}
    return case._replace(args=(case.args[0] | unused, case.args[1]))


def parameters_without_effect(rng):
    def loss(p, b):
        h = b["x"] @ (p["w"] * lax.stop_gradient(p["scale"])) + 0 * p["zero"]
        return mean_square(h, b["y"])

    p = {"w": weights(rng, D, 2), "scale": normal(rng, 2), "zero": normal(rng, 2)}
    return Case(loss, (p, {"x": normal(rng, B, D), "y": normal(rng, B, 2)}))


def sliced_parameters(rng):
    def loss(w, b):
        return mean_square(jnp.tanh(b["x"] @ w[:D]) @ w[D:].T, b["x"])

    return Case(loss, (weights(rng, 2 * D, 5), {"x": normal(rng, B, D)}))


def parameters_cut_and_joined(rng):
    """The shapes that packed weights take: split, transposed, reshaped, concatenated."""

    def loss(p, x):
        a, b = jnp.split(p["packed"], 2, axis=1)
        joined = jnp.concatenate([a.T, b.reshape(3, D)], 0)
        return jnp.mean(jnp.square(x @ joined.T + jnp.pad(p["bias"], (1, 2))))

    return Case(loss, ({"packed": weights(rng, D, 6), "bias": weights(rng, 3)}, normal(rng, B, D)))


def custom_vjp(rng):
    @jax.custom_vjp
    def act(x, scale):
        return jnp.sin(x) * scale

    def forward(x, scale):
        return act(x, scale), (x, scale)

    def backward(saved, cotangent):  # of another function, so that it is seen to be used
        x, scale = saved
        return 2 * cotangent * jnp.cos(x) * scale, jnp.sum(cotangent * jnp.sin(x), 0)

    act.defvjp(forward, backward)

    def loss(p, b):
        return jnp.mean(jnp.square(act(b @ p["w"], p["scale"])))

    return Case(loss, ({"w": weights(rng, D, 5), "scale": normal(rng, 5)}, normal(rng, B, D)))


def custom_jvp(rng):
    @jax.custom_jvp
    def safe_log(x):
        return jnp.log(jnp.maximum(x, 1e-3))

    @safe_log.defjvp
    def _(primals, tangents):
        return safe_log(*primals), 3 * tangents[0] / jnp.maximum(primals[0], 1e-3)

    def loss(w, x):
        return jnp.mean(safe_log(jnp.square(x @ w)))

    return Case(loss, (weights(rng, D, 2), normal(rng, B, D)))


def conditional(rng):
    def loss(p, b):
        def example(x):
            return lax.cond(x.sum() > 0, lambda: jnp.tanh(x @ p["a"]), lambda: x @ p["b"])

        h = lax.map(example, b)  # one at a time, so the branch is a branch
        h = lax.switch(p["a"].shape[0] % 3, [jnp.sin, jnp.cos, jnp.tanh], h)
        return jnp.mean(jnp.square(h))

    return Case(loss, ({"a": weights(rng, D, 2), "b": weights(rng, D, 2)}, normal(rng, B, D)))


def while_loop(rng):
    """A loop of unknown length finds a constant; one of known length is differentiated."""

    def loss(w, x):
        def halved(n):
            return lax.while_loop(lambda n: jnp.abs(n) > 1, lambda n: n / 2, n)

        scale = lax.stop_gradient(jax.vmap(halved)(x[:, 0]))
        h = lax.fori_loop(0, 3, lambda _, h: jnp.tanh(h @ w), x)
        return jnp.mean(jnp.square(h) * scale[:, None])

    return Case(loss, (weights(rng, D, D), 3 * normal(rng, B, D)))


def associative_operations(rng):
    def loss(p, x):
        decay = jax.nn.sigmoid(x @ p["decay"])
        pair = lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1])  # noqa: E731
        _, h = lax.associative_scan(pair, (decay, x @ p["w"]), axis=1)
        return jnp.mean(jnp.cumsum(jnp.square(h), 1)) + jnp.mean(jnp.sort(h, axis=1)[:, 0])

    return Case(
        loss, ({"decay": weights(rng, D, D), "w": weights(rng, D, D)}, normal(rng, B, T, D))
    )


def mapped(rng):
    """One example at a time through vmap, and a stack of heads through another one."""

    def loss(p, b):
        def example(x, y):
            heads = jax.vmap(lambda head: jnp.tanh(x @ head))(p["heads"])
            return mean_square(heads.mean(0) + p["bias"], y)

        return jnp.mean(jax.vmap(example)(b["x"], b["y"]))

    p = {"heads": weights(rng, 3, D, 2), "bias": normal(rng, 2)}
    return Case(loss, (p, {"x": normal(rng, B, D), "y": normal(rng, B, 2)}))


def jitted_and_rolled(rng):
    """Functions of its own that are compiled, and a gradient inside the loss."""

    def loss(p, b):
        energy = jax.jit(lambda x: jnp.sum(jnp.tanh(x @ p["w"]) @ p["v"]))
        force = jax.vmap(jax.grad(energy))(b["x"])
        return mean_square(force, b["y"]) + jnp.mean(jax.vmap(energy)(b["x"]))

    p = {"w": weights(rng, D, 5), "v": weights(rng, 5)}
    return Case(loss, (p, {"x": normal(rng, B, D), "y": normal(rng, B, D)}))


def mixture_of_experts(rng):
    def loss(p, x):
        gates = jax.nn.softmax(x @ p["router"])
        top, chosen = lax.top_k(gates, 2)
        h = jnp.einsum("bk,bd,bkde->be", top, x, p["experts"][chosen])
        return jnp.mean(jnp.square(h))

    return Case(
        loss, ({"router": weights(rng, D, 3), "experts": weights(rng, 3, D, 2)}, normal(rng, B, D))
    )


def linear_algebra(rng):
    def loss(p, x):
        factor = jnp.linalg.cholesky(p @ p.T + 2 * jnp.eye(D, dtype=p.dtype))
        solved = jax.scipy.linalg.solve_triangular(factor, x.T, lower=True)
        return jnp.mean(jnp.square(solved).sum(0)) + jnp.log(jnp.diagonal(factor)).sum()

    return Case(loss, (weights(rng, D, D), normal(rng, B, D)))


def complex_parameters(rng):
    def loss(p, x):
        spectrum = jnp.fft.fft(x) * p["filter"] + p["bias"]
        return jnp.mean(jnp.square(jnp.abs(spectrum))) + jnp.mean(jnp.fft.ifft(spectrum).real)

    p = {"filter": lax.complex(normal(rng, D), normal(rng, D)), "bias": normal(rng, D)}
    return Case(loss, (p, normal(rng, B, D)))


def mixed_dtypes(rng):
    """float32 beside the default float, where that is float64."""

    def loss(p, x):
        return jnp.mean(jnp.square(x @ p["w"] + p["narrow"].astype(x.dtype)))

    return Case(
        loss,
        (
            {"w": weights(rng, D, 2), "narrow": jnp.float32(rng.integers(1, 4, 2)) / 4},
            jnp.round(normal(rng, B, D) * 4) / 4,  # products and sums of these are exact
        ),
    )


def none_leaves(rng):
    def loss(p, b):
        assert p["none"] is None and b["none"] is None
        return mean_square(b["x"] @ p["w"], b["y"])

    p = {"w": weights(rng, D, 2), "none": None}
    return Case(loss, (p, {"x": normal(rng, B, D), "y": normal(rng, B, 2), "none": None}))


def no_parameters(rng):
    return Case(lambda p, b: jnp.mean(jnp.square(b)), ({}, normal(rng, B)))


def a_scalar_and_an_empty_parameter(rng):
    loss = lambda p, b: jnp.mean(jnp.square(b - p[0] - p[1].sum()))  # noqa: E731
    return Case(loss, ((normal(rng), normal(rng, 0, 3)), normal(rng, B)))


def host_arrays(rng):
    """NumPy arrays and Python numbers, never on a device."""
    x = rng.normal(size=(B, D)).astype(jnp.zeros([]).dtype)
    p = {"w": np.full((D, 2), 0.25, x.dtype), "bias": 0.5}
    return Case(lambda p, x: jnp.mean(jnp.square(x @ p["w"] + p["bias"])), (p, x))


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["w", "bias"], meta_fields=["activation"]
)
@dataclasses.dataclass
class Linear:
    w: Any
    bias: Any
    activation: str = "tanh"

    def __call__(self, x):
        return getattr(jnp, self.activation)(x @ self.w + self.bias)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["x", "y"], meta_fields=[])
@dataclasses.dataclass
class Pairs:
    x: Any
    y: Any


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["mean", "errors", "top"], meta_fields=["name"]
)
@dataclasses.dataclass
class Report:
    mean: Any
    errors: Any
    top: Any
    name: str = "report"


class Named(NamedTuple):
    x: Any
    y: Any


def dataclasses_everywhere(rng):
    def loss(model, b):
        errors = jnp.square(model(b.x) - b.y).sum(-1)
        return errors.mean(), Report(errors.mean(), errors, {"error": errors.max()})

    return Case(
        loss,
        (
            Linear(weights(rng, D, 2), normal(rng, 2)),
            Pairs(normal(rng, B, D), normal(rng, B, 2)),
        ),
        {"has_aux": True, "aux": Report("mean", "concat", "max")},
    )


def tuples(rng):
    def loss(p, b):
        (x, named), _ = b
        return mean_square(x @ p[0], named.y) + jnp.mean(jnp.square(named.x @ p[1].y))

    batch = ((normal(rng, B, D), Named(normal(rng, B, 3), normal(rng, B, 2))), ())
    return Case(loss, ((weights(rng, D, 2), Named(None, weights(rng, 3))), batch))


def several_batch_arguments(rng):
    def loss(p, x, scale, y, flags):
        return mean_square((x * scale) @ p, y * flags["keep"][:, None])

    args = (weights(rng, D, 2), normal(rng, B, D), normal(rng), normal(rng, B, 2))
    flags = {"keep": jnp.asarray(rng.integers(0, 2, B), bool)}
    return Case(loss, (*args, flags), {"batch_argnums": (1, 3, 4)})


def batch_before_parameters(rng):
    case = several_batch_arguments(rng)
    p, x, scale, y, flags = case.args
    loss = lambda flags, x, y, scale, p: case.loss(p, x, scale, y, flags)  # noqa: E731
    keywords = {"argnums": 4, "batch_argnums": [2, 0, 1]}
    return Case(loss, (flags, x, y, scale, p), keywords)


def several_differentiated_arguments(rng):
    case = several_batch_arguments(rng)
    return case._replace(keywords=case.keywords | {"argnums": (2, 0)})


def one_differentiated_argument_in_a_tuple(rng):
    return dense(rng)._replace(keywords={"argnums": (0,)})


def keyword_arguments(rng):
    def loss(p, x, *, scale, mode="tanh", extra=None):
        return jnp.mean(jnp.square(getattr(jnp, mode)(x @ p) * scale + extra["shift"]))

    extra = {"scale": normal(rng), "mode": "sin", "extra": {"shift": normal(rng, 2)}}
    return Case(loss, (weights(rng, D, 2), normal(rng, B, D)), {}, extra)


def integers_and_flags_in_the_batch(rng):
    def loss(p, b):
        h = p["table"][b["id"]] * b["flag"][:, None] * b["count"][:, None].astype(p["table"].dtype)
        return mean_square(h @ p["w"], jax.nn.one_hot(b["label"], 3, dtype=h.dtype))

    batch = {
        "id": jnp.asarray(rng.integers(0, 5, B), jnp.int32),
        "label": jnp.asarray(rng.integers(0, 3, B), jnp.uint8),
        "count": jnp.asarray(rng.integers(0, 4, B), jnp.int16),
        "flag": jnp.asarray(rng.integers(0, 2, B), bool),
        "unused": np.arange(B),
    }
    return Case(loss, ({"table": weights(rng, 5, D), "w": weights(rng, D, 3)}, batch))


def a_prefix_of_reducers(rng):
    def loss(p, x):
        h = jnp.square(x @ p)
        each = {"first": h[:, 0], "both": (h, {"row": x})}
        total = {"sum": h.sum(0), "count": h.shape[0], "wide": (h > 1).sum()}
        return h.mean(), {"each": each, "total": total, "top": [h.max(), x.max(0)], "none": None}

    aux = {"each": "concat", "total": "sum", "top": ["max", "max"], "none": None}
    return Case(loss, (weights(rng, D, 2), normal(rng, B, D)), {"has_aux": True, "aux": aux})


def aux_by_default(rng):
    def loss(p, x):
        h = jnp.square(x @ p)
        return h.mean(), {"a": h.mean(), "b": [x.mean(), ()]}

    return Case(loss, (weights(rng, D, 2), normal(rng, B, D)), {"has_aux": True})


MODELS = {
    make.__name__: make
    for make in (
        dense,
        checkpointed,
        checkpointed_with_a_policy,
        checkpointed_by_name,
        scanned,
        scanned_and_checkpointed,
        scanned_and_checkpointed_with_a_policy,
        scanned_twice_over_the_same_layers,
        recurrent,
        tied_weights,
        embeddings,
        attention,
        convolutions,
        unused_parameters,
        parameters_without_effect,
        sliced_parameters,
        parameters_cut_and_joined,
        custom_vjp,
        custom_jvp,
        conditional,
        while_loop,
        associative_operations,
        mapped,
        jitted_and_rolled,
        mixture_of_experts,
        linear_algebra,
        complex_parameters,
        mixed_dtypes,
        none_leaves,
        no_parameters,
        a_scalar_and_an_empty_parameter,
        host_arrays,
        dataclasses_everywhere,
        tuples,
        several_batch_arguments,
        batch_before_parameters,
        several_differentiated_arguments,
        one_differentiated_argument_in_a_tuple,
        keyword_arguments,
        integers_and_flags_in_the_batch,
        a_prefix_of_reducers,
        aux_by_default,
    )
}


def case_of(name):
    return MODELS[name](np.random.default_rng(len(name)))


# How a case is run.


def whole(case):
    """What jax.value_and_grad gives for the whole batch."""
    keywords = {name: case.keywords[name] for name in ("argnums", "has_aux") & case.keywords.keys()}
    return jax.value_and_grad(functools.partial(case.loss, **case.extra), **keywords)


def driven(case, k, engine, **keywords):
    grad_fn = oa.value_and_grad(case.loss, k, engine=engine, **(case.keywords | keywords))
    return lambda *args: grad_fn(*args, **case.extra)


def run(f, args):
    """Compiled without LLVM's optimizations, which cost more than they save here."""
    compiled = jax.jit(f).lower(*args).compile({"xla_backend_optimization_level": 0})
    return compiled(*args)


@functools.cache
def truth(name):
    """The whole batch in float64, whatever mode the test is in."""
    with jax.enable_x64(True):
        case = case_of(name)
        return run(whole(case), case.args)


def assert_close(got, want, ulps=None):
    """Each leaf to 1e-12, or so many ulps where it is narrower, of its largest element."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    leaves = jax.tree_util.tree_leaves_with_path(want)
    for (path, b), a in zip(leaves, jax.tree.leaves(got), strict=True):
        assert a.shape == b.shape, path
        a, b = np.asarray(a), np.asarray(b)
        if ulps is None:
            assert a.dtype == b.dtype, path
        if not np.issubdtype(b.dtype, np.inexact) or not b.size:
            np.testing.assert_array_equal(a, b, str(path))
            continue
        eps = np.finfo(a.dtype).eps
        tolerance = 1e-12 if eps < 1e-12 else (ulps or 8) * eps
        largest = np.abs(b).max() or 1.0
        np.testing.assert_allclose(a, b, 0, tolerance * largest, err_msg=str(path))


def program(f, args):
    """What is computed, as text, without the zeros that a trial of refs leaves unused."""
    text = str(jax.make_jaxpr(f)(*args))
    return re.sub(r"\n *_:\S+ = broadcast_in_dim 0\.0:.*|0x[0-9a-f]+", "", text)


# What jax at this version cannot do with refs: the model and what the error says.
REFS_CANNOT = {"sliced_parameters": f"jax {jax.__version__} cannot: "} if OLD else {}
# Compiled with the large products only: each is much like another one.
LIKE_OTHERS = [
    "checkpointed_by_name",
    "scanned_and_checkpointed",
    "scanned_twice_over_the_same_layers",
    "jitted_and_rolled",
    "linear_algebra",
    "batch_before_parameters",
]
CHEAP = [*list(MODELS)[-16:], "unused_parameters", "scanned", "custom_vjp"]


@pytest.mark.parametrize("name", [name for name in MODELS if name not in LIKE_OTHERS])
def test_the_gradient_of_the_whole_batch_in_float64(x64, name):
    """Both engines; `auto` is the same program as refs where those can be used, else as carry."""
    case, want = case_of(name), truth(name)
    assert_close(run(driven(case, 4, "carry"), case.args), want)
    automatic = program(driven(case, 4, "auto"), case.args)
    if name in REFS_CANNOT:
        with pytest.raises(ValueError, match="engine='refs' cannot be used here: ") as caught:
            driven(case, 4, "refs")(*case.args)
        assert REFS_CANNOT[name] in str(caught.value)
        assert automatic == program(driven(case, 4, "carry"), case.args)
    else:
        assert_close(run(driven(case, 4, "refs"), case.args), want)
        assert automatic == program(driven(case, 4, "refs"), case.args)


@pytest.mark.parametrize("name", CHEAP)
def test_one_micro_batch(x64, name):
    case = case_of(name)
    assert_close(run(driven(case, 1, "auto"), case.args), truth(name))


@pytest.mark.parametrize("name", CHEAP)
def test_float32_to_a_few_ulp(name):
    case = case_of(name)
    assert_close(run(driven(case, 4, "auto"), case.args), truth(name), ulps=8)


@pytest.mark.full
@pytest.mark.parametrize(
    "k, remainder, layout",
    [(2, "error", "contiguous"), (8, "error", "strided"), (3, "exact", "strided")],
)
@pytest.mark.parametrize("engine", ["carry", "refs"])
@pytest.mark.parametrize("name", MODELS)
def test_every_model_every_way(x64, name, engine, k, remainder, layout):
    if name in REFS_CANNOT and engine == "refs":
        pytest.skip("its error is tested above")
    case = case_of(name)
    f = driven(case, k, engine, remainder=remainder, batch_layout=layout)
    assert_close(run(f, case.args), truth(name))


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_every_model_in_float32(name):
    case = case_of(name)
    assert_close(run(driven(case, 4, "carry"), case.args), truth(name), ulps=8)


# Narrow parameters.


def narrow_case(rng, dtype):
    """Parameters that `dtype` holds, in it; the loss in float32 or wider."""
    case = dense(rng)
    params, batch = jax.tree.map(lambda x: x.astype(dtype), case.args)

    def loss(p, b):
        return case.loss(p, b).astype(jnp.float32)

    return Case(loss, (params, batch))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_parameters_have_a_float32_window(dtype):
    case = narrow_case(np.random.default_rng(1), dtype)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), case.args)
    value, grads = run(whole(case), wide)
    got_value, got = run(driven(case, 4, "auto"), case.args)
    bound = 8 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(got_value, value, rtol=bound)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(grads), strict=True):
        assert a.dtype == dtype
        np.testing.assert_allclose(a.astype(np.float32), b, atol=bound * np.abs(b).max())
    with pytest.raises(
        ValueError, match=r"the window at .* is float32 and its parameter"
    ) as caught:
        driven(case, 4, "refs")(*case.args)
    assert jnp.dtype(dtype).name in str(caught.value)
    assert program(driven(case, 4, "auto"), case.args) == program(
        driven(case, 4, "carry"), case.args
    )


@pytest.mark.parametrize("param", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("window", [None, jnp.bfloat16])
@pytest.mark.parametrize("engine", ["carry", "refs", "auto"])
def test_long_windows_of_small_terms_do_not_stagnate(param, window, engine):
    """1024 terms of 1e-3: a bfloat16 sum that rounds to nearest ends at 0.5."""
    x = jnp.full(1024, 1e-3, param)
    loss = lambda w, x: (w * x).astype(jnp.float32).sum()  # noqa: E731
    grad_fn = oa.value_and_grad(
        loss, 1024, engine=engine, accumulator_dtype=window, loss_reduction="sum"
    )
    if engine == "refs":
        try:
            _, grad = grad_fn(jnp.ones([], param), x)
        except ValueError as error:
            assert "engine='refs' cannot be used here: " in str(error)
            return
    else:
        _, grad = grad_fn(jnp.ones([], param), x)
    want = np.float64(x[0]) * 1024
    np.testing.assert_allclose(float(grad), want, rtol=2e-2 if window is None else 0.12)


def test_narrow_and_wide_parameters_side_by_side():
    """Each leaf in its own dtype, each sum in float32 or wider."""
    rng = np.random.default_rng(2)
    p = {"a": normal(rng, D, 2).astype(jnp.bfloat16), "b": normal(rng, 2), "none": None}
    x = normal(rng, B, D).astype(jnp.bfloat16)

    def loss(p, x):
        return jnp.mean(jnp.square((x @ p["a"]).astype(jnp.float32) + p["b"]))

    case = Case(loss, (p, x))
    _, want = run(whole(case), jax.tree.map(lambda v: v.astype(jnp.float32), case.args))
    _, got = run(driven(case, 4, "auto"), case.args)
    assert (got["a"].dtype, got["b"].dtype, got["none"]) == (jnp.bfloat16, jnp.float32, None)
    for name in "ab":
        largest = np.abs(want[name]).max()
        np.testing.assert_allclose(got[name].astype(np.float32), want[name], atol=2**-6 * largest)


@pytest.mark.parametrize("engine", ["carry", "refs"])
def test_a_bfloat16_state_keeps_its_dtype_from_micro_step_to_micro_step(engine):
    def loss(w, state, x):
        new = {
            "mean": 0.5 * state["mean"].astype(jnp.float32) + 0.5 * x.mean(0),
            "seen": state["seen"] + x.shape[0],
        }
        return jnp.mean(jnp.square(x @ w - state["mean"].astype(jnp.float32))), new

    rng = np.random.default_rng(3)
    w, x = normal(rng, D, D), normal(rng, B, D)
    state = {"mean": jnp.zeros(D, jnp.bfloat16), "seen": jnp.zeros([], jnp.int32)}
    grad_fn = oa.value_and_grad(loss, 4, engine=engine, state_argnum=1, batch_argnums=2)
    (value, after), grad = run(grad_fn, (w, state, x))
    values, grads = [], []
    for i in range(4):
        (one, state), each = jax.value_and_grad(loss, has_aux=True)(w, state, x[i::4])
        state["mean"] = state["mean"].astype(jnp.bfloat16)
        values.append(one)
        grads.append(each)
    assert after["mean"].dtype == jnp.bfloat16 and int(after["seen"]) == B
    np.testing.assert_array_equal(after["mean"], state["mean"])
    np.testing.assert_allclose(value, np.mean(values), rtol=1e-6)
    np.testing.assert_allclose(grad, np.mean(grads, 0), rtol=1e-5, atol=1e-6)


# What jax.value_and_grad takes in, and what it refuses.


@pytest.mark.parametrize("engine", ["carry", "refs", "auto"])
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("constant", [1.0, np.float32(1), jnp.float32(1)])
def test_a_loss_that_depends_on_nothing(constant, k, engine):
    """A Python number is a loss too, as it is for jax."""
    value, grad = oa.value_and_grad(lambda w, x: constant, k, engine=engine)(
        jnp.ones(3), jnp.arange(8.0)
    )
    assert float(value) == 1.0
    np.testing.assert_array_equal(grad, np.zeros(3))


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("engine", ["carry", "refs", "auto"])
@pytest.mark.parametrize(
    "leaf",
    [np.int32(2), np.array([True]), jax.random.key(0)],
    ids=["integer", "bool", "key"],
)
def test_leaves_that_cannot_be_differentiated_are_an_error_that_names_them(leaf, engine, k):
    """jax.value_and_grad refuses them too."""
    params = {"w": jnp.ones([]), "odd": leaf}
    loss = lambda p, x: jnp.mean(p["w"] * x)  # noqa: E731
    with pytest.raises(TypeError):
        jax.value_and_grad(loss)(params, jnp.ones(8))
    with pytest.raises((TypeError, ValueError), match="'odd'"):
        oa.value_and_grad(loss, k, engine=engine)(params, jnp.ones(8))


# Names that a profiler shows.


@pytest.mark.parametrize("engine", ["carry", "refs"])
def test_the_loop_and_the_remainder_have_names_in_the_compiled_program(engine):
    grad_fn = oa.value_and_grad(
        lambda w, x: jnp.mean(jnp.tanh(x @ w)), 4, engine=engine, remainder="exact"
    )

    def names(examples):
        args = jnp.ones((D, D)), jnp.ones((examples, D))
        text = jax.jit(grad_fn).lower(*args).compile().as_text()
        return re.findall(r'op_name="([^"]*)"', text)

    with_rest, without = names(10), names(8)
    for found in (with_rest, without):
        loop = [name for name in found if "optax_accum.micro_steps/" in name]
        assert any("/while/body" in name and "tanh" in name for name in loop)
    assert any("optax_accum.remainder" in n and "tanh" in n for n in with_rest)
    assert not any("optax_accum.remainder" in n for n in without)
    assert not any("while" in n for n in with_rest if "optax_accum.remainder" in n)
