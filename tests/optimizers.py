"""Every optimizer of Optax and optax.contrib, each with the extra arguments that it asks for.

A row is one way to build it; what it covers is the name before the first hyphen.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import contrib


class Feed(NamedTuple):
    """What one call is given: a micro-step its own gradient and loss, plain inner the means."""

    grads: Any
    value: Any
    slope: Any  # the mean gradient of the window, whichever micro-step of it asks
    offset: Any  # and its mean loss


def nothing(params: Any, feed: Feed) -> dict[str, Any]:
    del params, feed
    return {}


def loss_value(params: Any, feed: Feed) -> dict[str, Any]:
    del params
    return {"value": feed.value}


def line_search(params: Any, feed: Feed) -> dict[str, Any]:
    """A paraboloid whose value and gradient at `params` are the window's."""

    def value_fn(at: Any) -> jax.Array:
        move = optax.tree.sub(at, params)
        rise = optax.tree.vdot(feed.slope, move).real + optax.tree.norm(move, squared=True) / 2
        return (feed.offset + rise).astype(jnp.float32)

    return {"value": feed.value, "grad": feed.grads, "value_fn": value_fn}


def hessian(params: Any, feed: Feed) -> dict[str, Any]:
    del params, feed
    return {"obj_fn": lambda at: optax.tree.norm(at, squared=True) ** 2}


def adversary(params: Any, feed: Feed) -> dict[str, Any]:
    def grad_fn(at: Any, index: int) -> Any:
        del index
        return jax.tree.map(lambda s, p, q: s + 2 * (p - q), feed.slope, at, params)

    return {"grad_fn": grad_fn}


class Optimizer(NamedTuple):
    id: str
    make: Callable[[Any], optax.GradientTransformation]  # of a learning rate or a schedule
    extra: Callable[[Any, Feed], dict[str, Any]] = nothing
    scheduled: bool = True  # does `make` take a schedule?
    wrap: Callable[[Any], Any] = lambda params: params  # what it wants as parameters
    ulps: float = 8  # how far rounding may carry a leaf, relative to its largest number


# In ulps, where rounding grows: nearly equal numbers are subtracted, or a matrix is iterated.
SENSITIVE = 64


def with_rate(make: Callable[..., Any], **options: Any) -> Callable[[Any], Any]:
    return lambda rate: make(rate, **options)


def quiet(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, **options: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return make(*args, **options)

    return made


def only_matrices(params: Any) -> Any:
    return jax.tree.map(lambda p: jnp.ndim(p) > 1, params)


def _sam(rate: Any, **options: Any) -> optax.GradientTransformation:
    adversarial = optax.chain(contrib.normalize(), optax.sgd(0.05))
    return contrib.sam(optax.sgd(rate, momentum=0.9), adversarial, **options)


ALIASES = (
    Optimizer("adabelief", with_rate(optax.adabelief)),
    Optimizer("adadelta", with_rate(optax.adadelta, weight_decay=0.01)),
    Optimizer("adafactor", with_rate(optax.adafactor)),
    Optimizer(
        "adafactor-factored",
        with_rate(optax.adafactor, min_dim_size_to_factor=2, momentum=0.9),
    ),
    Optimizer("adagrad", with_rate(optax.adagrad)),
    Optimizer("adam", with_rate(optax.adam)),
    Optimizer("adam-nesterov", with_rate(optax.adam, nesterov=True, eps_root=1e-8)),
    Optimizer("adam-mu_dtype", with_rate(optax.adam, mu_dtype=jnp.bfloat16)),
    Optimizer("adamax", with_rate(optax.adamax)),
    Optimizer("adamaxw", with_rate(optax.adamaxw)),
    Optimizer("adamw", with_rate(optax.adamw, weight_decay=0.1)),
    Optimizer("adamw-mask", with_rate(optax.adamw, weight_decay=0.1, mask=only_matrices)),
    Optimizer("adan", with_rate(optax.adan, weight_decay=0.1)),
    Optimizer("amsgrad", with_rate(optax.amsgrad)),
    Optimizer("fromage", with_rate(optax.fromage)),
    Optimizer("lamb", with_rate(optax.lamb, weight_decay=0.1)),
    Optimizer("lars", with_rate(optax.lars, weight_decay=0.1, trust_coefficient=0.1)),
    Optimizer(
        "lbfgs",
        lambda rate: optax.lbfgs(memory_size=2),
        line_search,
        scheduled=False,
        ulps=SENSITIVE,
    ),
    Optimizer(
        "lbfgs-fixed", with_rate(optax.lbfgs, memory_size=2, linesearch=None), ulps=SENSITIVE
    ),
    Optimizer("lion", with_rate(optax.lion, weight_decay=0.1)),
    Optimizer("nadam", with_rate(optax.nadam)),
    Optimizer("nadamw", with_rate(optax.nadamw, weight_decay=0.1)),
    Optimizer("noisy_sgd", with_rate(optax.noisy_sgd, key=7)),
    Optimizer("novograd", with_rate(optax.novograd, weight_decay=0.1)),
    Optimizer("optimistic_adam", with_rate(quiet(optax.optimistic_adam)), scheduled=False),
    Optimizer("optimistic_adam_v2", with_rate(optax.optimistic_adam_v2)),
    Optimizer("optimistic_gradient_descent", with_rate(optax.optimistic_gradient_descent)),
    Optimizer(
        "polyak_sgd",
        lambda rate: optax.polyak_sgd(max_learning_rate=0.5, scaling=rate),
        loss_value,
    ),
    Optimizer("radam", with_rate(optax.radam)),
    Optimizer("rmsprop", with_rate(optax.rmsprop)),
    Optimizer("rmsprop-momentum", with_rate(optax.rmsprop, momentum=0.9, nesterov=True)),
    Optimizer("rmsprop-centered", with_rate(optax.rmsprop, centered=True, initial_scale=4.0)),
    Optimizer("rprop", with_rate(optax.rprop), scheduled=False),
    Optimizer("sgd", with_rate(optax.sgd)),
    Optimizer("sgd-momentum", with_rate(optax.sgd, momentum=0.9)),
    Optimizer("sgd-nesterov", with_rate(optax.sgd, momentum=0.9, nesterov=True)),
    Optimizer(
        "sgd-backtracking",
        lambda rate: optax.chain(
            optax.sgd(rate), optax.scale_by_backtracking_linesearch(5, store_grad=True)
        ),
        line_search,
    ),
    Optimizer("sign_sgd", with_rate(optax.sign_sgd)),
    Optimizer("signum", with_rate(optax.signum)),
    Optimizer("sm3", with_rate(optax.sm3), scheduled=False),
    Optimizer("yogi", with_rate(optax.yogi)),
)

CONTRIB = (
    Optimizer("acprop", with_rate(contrib.acprop)),
    Optimizer("ademamix", with_rate(contrib.ademamix)),
    Optimizer("adopt", with_rate(contrib.adopt)),
    Optimizer("cocob", with_rate(contrib.cocob, alpha=1.0, weight_decay=0.1), ulps=SENSITIVE),
    Optimizer("dadapt_adamw", with_rate(contrib.dadapt_adamw, estim_lr0=0.1), ulps=SENSITIVE),
    Optimizer("dog", with_rate(contrib.dog, init_step=("distance", 0.5)), ulps=SENSITIVE),
    Optimizer("dowg", with_rate(contrib.dowg, init_estim_sq_dist=0.5), ulps=SENSITIVE),
    Optimizer("galore", with_rate(contrib.galore, rank=2, update_proj_gap=2)),
    Optimizer("madgrad", with_rate(contrib.madgrad), ulps=SENSITIVE),  # new - old parameters
    Optimizer(
        "mechanize", lambda rate: contrib.mechanize(optax.sgd(rate), s_init=0.1), ulps=SENSITIVE
    ),
    Optimizer("momo", with_rate(contrib.momo), loss_value),
    Optimizer("momo_adam", with_rate(contrib.momo_adam), loss_value),
    Optimizer("muon", with_rate(contrib.muon), ulps=SENSITIVE),
    Optimizer("normalize", lambda rate: optax.chain(contrib.normalize(), optax.sgd(rate))),
    Optimizer("prodigy", with_rate(contrib.prodigy, estim_lr0=0.1), ulps=SENSITIVE),
    Optimizer(
        "reduce_on_plateau",
        lambda rate: optax.chain(optax.sgd(rate), contrib.reduce_on_plateau(patience=1)),
        loss_value,
    ),
    Optimizer("sam", _sam, ulps=SENSITIVE),
    Optimizer("sam-opaque", lambda rate: _sam(rate, opaque_mode=True), adversary, ulps=SENSITIVE),
    Optimizer(
        "schedule_free",
        lambda rate: contrib.schedule_free(optax.adam(rate, b1=0.0), rate, b1=0.9),
        ulps=SENSITIVE,
    ),
    Optimizer(
        "schedule_free_adamw",
        with_rate(contrib.schedule_free_adamw),
        scheduled=False,
        ulps=SENSITIVE,
    ),
    Optimizer(
        "schedule_free_sgd", with_rate(contrib.schedule_free_sgd), scheduled=False, ulps=SENSITIVE
    ),
    Optimizer("simplified_ademamix", with_rate(contrib.simplified_ademamix), ulps=SENSITIVE),
    Optimizer("sophia", with_rate(contrib.sophia, update_interval=2), hessian),
    Optimizer(
        "split_real_and_imaginary",
        lambda rate: contrib.split_real_and_imaginary(optax.adam(rate)),
    ),
)

OPTIMIZERS = ALIASES + CONTRIB


def before_sgd(make: Callable[..., Any], *args: Any, **options: Any) -> Callable[[Any], Any]:
    return lambda rate: optax.chain(make(*args, **options), optax.sgd(rate))


def around_adam(make: Callable[..., Any], *args: Any, **options: Any) -> Callable[[Any], Any]:
    return lambda rate: make(optax.adam(rate), *args, **options)


def every_other(count: Any, **extra: Any) -> Any:
    del extra
    return count % 2 == 0


def by_rank(params: Any) -> Any:
    return jax.tree.map(lambda p: "matrix" if jnp.ndim(p) > 1 else "rest", params)


FROZEN = {"b": True, "w": False}


def _two_groups(combine: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda rate: combine({"matrix": optax.adam(rate), "rest": optax.sgd(rate)}, by_rank)


# What is no optimizer by itself but may stand in one, with a state or a view of its own.
LINKS = (
    Optimizer("adaptive_grad_clip", before_sgd(optax.adaptive_grad_clip, 0.1)),
    Optimizer("add_decayed_weights", before_sgd(optax.add_decayed_weights, 0.1)),
    Optimizer("add_noise", before_sgd(optax.add_noise, 0.1, 0.55, 3)),
    Optimizer("apply_every", before_sgd(optax.apply_every, 2)),
    Optimizer("apply_if_finite", around_adam(optax.apply_if_finite, 3)),
    Optimizer("centralize", before_sgd(optax.centralize)),
    Optimizer("clip", before_sgd(optax.clip, 0.7)),
    Optimizer("clip_by_block_rms", before_sgd(optax.clip_by_block_rms, 0.7)),
    Optimizer("clip_by_global_norm", before_sgd(optax.clip_by_global_norm, 0.7)),
    Optimizer("conditionally_mask", around_adam(optax.conditionally_mask, every_other)),
    Optimizer("conditionally_transform", around_adam(optax.conditionally_transform, every_other)),
    Optimizer("ema", before_sgd(optax.ema, 0.9)),
    Optimizer("flatten", around_adam(optax.flatten)),
    Optimizer("freeze", before_sgd(optax.freeze, FROZEN)),
    Optimizer(
        "inject_hyperparams",
        lambda rate: optax.inject_hyperparams(optax.adam)(learning_rate=rate),
    ),
    Optimizer(
        "inject_stateful_hyperparams",
        lambda rate: quiet(optax.inject_stateful_hyperparams)(optax.adam)(learning_rate=rate),
    ),
    Optimizer(
        "keep_params_nonnegative",
        lambda rate: optax.chain(optax.sgd(rate), optax.keep_params_nonnegative()),
        wrap=lambda params: jax.tree.map(jnp.abs, params),
    ),
    Optimizer(
        "lookahead",
        lambda rate: optax.lookahead(optax.adam(rate), sync_period=2, slow_step_size=0.5),
        wrap=optax.LookaheadParams.init_synced,
    ),
    Optimizer("masked", around_adam(optax.masked, only_matrices)),
    Optimizer("multi_transform", _two_groups(optax.multi_transform)),
    Optimizer(
        "named_chain",
        lambda rate: optax.named_chain(("clip", optax.clip(0.7)), ("adam", optax.adam(rate))),
    ),
    Optimizer("normalize_by_update_norm", before_sgd(optax.normalize_by_update_norm)),
    Optimizer("partition", _two_groups(optax.partition)),
    Optimizer("selective_transform", around_adam(optax.selective_transform, freeze_mask=FROZEN)),
    Optimizer("snapshot", before_sgd(optax.snapshot, "gradient", lambda updates: updates)),
    Optimizer("trace", before_sgd(optax.trace, 0.9)),
    Optimizer("zero_nans", before_sgd(optax.zero_nans)),
)

# Public names (or patterns of them) that make a transformation and stand in no table.
NOT_IN_A_TABLE = {
    "scale_by_*": "the body of an alias",
    "chain": "stands in many rows",
    "differentially_private_aggregate": "its gradients are per example: tested by itself",
    "dpsgd": "its gradients are per example: tested by itself",
    "hutchinson_estimator_diag_hessian": "the curvature in sophia's row",
    "identity": "has no state and changes nothing",
    "measure_with_ema": "a part of monitor",
    "monitor": "its state grows in the first update: tested by itself",
    "scale": "has no state",
    "set_to_zero": "has no state",
    "stateless": "has no state",
    "stateless_with_tree_map": "has no state",
    "with_extra_args_support": "changes the signature only",
    "MultiSteps": "accumulates itself",
    "WrappedSchedule": "a schedule with a state",
}
