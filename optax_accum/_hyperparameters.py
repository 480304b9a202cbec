"""Hyperparameters when the global batch grows by kappa: rates, and the betas of Adam."""

import math
from typing import NamedTuple


class AdamHyperparameters(NamedTuple):
    """What Adam takes: `optax.adam(**hyperparameters._asdict())`."""

    learning_rate: float
    b1: float
    b2: float
    eps: float


def scale_linear(learning_rate: float, kappa: float) -> float:
    """The learning rate of SGD for a global batch kappa times as large: the linear rule.

    ::

        learning_rate * kappa

    For SGD, with or without momentum, and while the batch stays below the critical one, past which
    more examples no longer make a better direction; with a warmup (Goyal et al., arXiv
    1706.02677). For Adam take :func:`scale_square_root`.

    Args:
      learning_rate: of the batch it was tuned with.
      kappa: new global batch / old global batch; below 1 where it shrinks.

    Returns:
      The learning rate of the new batch.

    Raises:
      ValueError: for a rate below 0, or a kappa that is not above 0.

    Example:
      >>> import optax_accum as oa
      >>> oa.planning.scale_linear(0.1, kappa=8)
      0.8
    """
    return _rate(learning_rate) * _kappa(kappa)


def scale_square_root(learning_rate: float, kappa: float) -> float:
    """The learning rate of Adam for a global batch kappa times as large: the square-root rule.

    ::

        learning_rate * sqrt(kappa)

    For Adam, RMSprop and their kin, whose updates have the size of the rate whatever the gradient's
    is; it is derived where noise dominates the gradient (arXiv 2205.10287). The rate alone suits a
    small kappa; :func:`scale_adam` is the whole rule.

    Args:
      learning_rate: of the batch it was tuned with.
      kappa: new global batch / old global batch; below 1 where it shrinks.

    Returns:
      The learning rate of the new batch.

    Raises:
      ValueError: for a rate below 0, or a kappa that is not above 0.

    Example:
      >>> import optax_accum as oa
      >>> oa.planning.scale_square_root(0.001, kappa=4)
      0.002
    """
    return _rate(learning_rate) * math.sqrt(_kappa(kappa))


def scale_adam(
    learning_rate: float,
    kappa: float,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
) -> AdamHyperparameters:
    """All of Adam's hyperparameters for a global batch kappa times as large (arXiv 2205.10287).

    ::

        learning_rate * sqrt(kappa)
        1 - kappa * (1 - b1)
        1 - kappa * (1 - b2)
        eps / sqrt(kappa)

    It is derived for small rates and where noise dominates the gradient, and ends where a beta
    would reach 0, at kappa = 1 / (1 - b1): 10 for a b1 of 0.9. The half-life rule
    (:func:`scale_beta`) has no such end, and is the same to first order in kappa (1 - beta).

    Args:
      learning_rate: of the batch it was tuned with.
      kappa: new global batch / old global batch; below 1 where it shrinks.
      b1: decay of the first moment, from 0 to below 1.
      b2: decay of the second moment, from 0 to below 1.
      eps: added to the root of the second moment.

    Returns:
      An :class:`AdamHyperparameters`: `optax.adam(**found._asdict())`.

    Raises:
      ValueError: for a kappa past the rule's end, and for numbers that cannot be meant.

    Example:
      >>> import optax_accum as oa
      >>> found = oa.planning.scale_adam(1e-3, kappa=4, b1=0.9, b2=0.999)
      >>> [round(x, 10) for x in found]
      [0.002, 0.6, 0.996, 5e-09]
    """
    rate, kappa = _rate(learning_rate), _kappa(kappa)
    for name, beta in (("b1", b1), ("b2", b2)):
        if kappa * (1 - _beta(name, beta)) > 1 - 1e-9:  # 10 * (1 - 0.9) is 0.9999999999999998
            raise ValueError(
                f"kappa is {kappa:g} and {name} is {beta}: 1 - {name} would grow to "
                f"{kappa * (1 - beta):.3g}, expected below 1, that is a kappa below "
                f"{1 / (1 - beta):.4g}; type oa.planning.scale_beta({beta}, {kappa:g}), the "
                "half-life rule, which holds for every kappa, and scale_square_root for the rate."
            )
    root = math.sqrt(kappa)
    return AdamHyperparameters(rate * root, 1 - kappa * (1 - b1), 1 - kappa * (1 - b2), eps / root)


def scale_beta(beta: float, kappa: float) -> float:
    """The decay that forgets as fast in tokens with a global batch kappa times as large.

    ::

        beta ** kappa

    One update with the new decay forgets as much as kappa updates with the old one, so the
    half-life in tokens (or examples) stays (arXiv 2507.07101). That work scales the b2 of Adam so
    and finds that, on one device, a small batch with its own b2 trains as well as a large one or
    better: rather than accumulating k micro-batches there, update after each one of them with
    `b2 ** (1 / k)`. The same holds for the decay of an EMA of parameters.

    Args:
      beta: of the batch it was tuned with, from 0 to below 1.
      kappa: new global batch / old global batch; below 1 where it shrinks.

    Returns:
      The decay of the new batch, always from 0 to 1.

    Raises:
      ValueError: for a beta outside of 0 to 1, or a kappa that is not above 0.

    Example:
      >>> import optax_accum as oa
      >>> round(oa.planning.scale_beta(0.95, kappa=1 / 64), 5)
      0.9992
      >>> round(oa.planning.half_life(0.95, 64)), round(oa.planning.half_life(0.95 ** (1 / 64), 1))
      (865, 865)
    """
    return _beta("beta", beta) ** _kappa(kappa)


def half_life(beta: float, per_update: float) -> float:
    """How many tokens (or examples) it takes until a moment has forgotten half of a gradient.

    ::

        beta ** (half_life / per_update) = 1 / 2

    Args:
      beta: decay of the moment, above 0 and below 1.
      per_update: tokens, or examples, of one update: the global batch.

    Returns:
      The half-life, in what `per_update` counts.

    Raises:
      ValueError: for a beta outside of 0 to 1, or nothing per update.

    Example:
      >>> import optax_accum as oa
      >>> round(oa.planning.half_life(0.999, per_update=2048))
      1418856
    """
    if _beta("beta", beta) == 0:
        return 0.0
    if not per_update > 0:
        raise ValueError(f"per_update is {per_update!r}, expected tokens of an update, above 0.")
    return per_update * math.log(0.5) / math.log(beta)


def _rate(learning_rate: float) -> float:
    if not (isinstance(learning_rate, (int, float)) and 0 <= learning_rate < math.inf):
        raise ValueError(
            f"learning_rate is {learning_rate!r}, expected a number of 0 or more; of a schedule "
            "scale what it returns, lambda update_step: scale * schedule(update_step)."
        )
    return learning_rate


def _kappa(kappa: float) -> float:
    if not (isinstance(kappa, (int, float)) and 0 < kappa < math.inf):
        raise ValueError(
            f"kappa is {kappa!r}, expected a number above 0; type kappa=new_global_batch / "
            "old_global_batch."
        )
    return kappa


def _beta(name: str, beta: float) -> float:
    if not (isinstance(beta, (int, float)) and 0 <= beta < 1):
        raise ValueError(f"{name} is {beta!r}, expected a decay from 0 to below 1, such as 0.95.")
    return beta
