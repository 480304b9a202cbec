"""Gradient accumulation for JAX and Optax.

The arithmetic of one big batch, in the memory of one micro-batch.
"""

import importlib as _importlib
import typing as _typing

from optax_accum import diagnostics as diagnostics
from optax_accum import planning as planning
from optax_accum import verify as verify
from optax_accum._batch_stats import merge_batch_stats as merge_batch_stats
from optax_accum._convert import convert_state as convert_state
from optax_accum._loop import value_and_grad as value_and_grad
from optax_accum._loss_scale import adjust_loss_scale as adjust_loss_scale
from optax_accum._loss_scale import with_loss_scale as with_loss_scale
from optax_accum._micro_step import micro_step as micro_step
from optax_accum._scan import Stats as Stats
from optax_accum._shardings import refold as refold
from optax_accum._shardings import state_shardings as state_shardings
from optax_accum._shardings import state_specs as state_specs
from optax_accum._state import AccumulateState as AccumulateState
from optax_accum._transform import accumulate as accumulate
from optax_accum._transform import apply_gradients as apply_gradients
from optax_accum._transform import flush as flush
from optax_accum._transform import has_updated as has_updated
from optax_accum._transform import mark_last as mark_last

if _typing.TYPE_CHECKING:
    from optax_accum import linen as linen
    from optax_accum import nnx as nnx


def __getattr__(name: str) -> _typing.Any:
    """`oa.nnx` and `oa.linen`, which import Flax, once they are asked for."""
    if name in ("linen", "nnx"):
        return _importlib.import_module(f"optax_accum.{name}")
    raise AttributeError(f"module 'optax_accum' has no attribute {name!r}")


for _public in (
    AccumulateState,
    Stats,
    value_and_grad,
    with_loss_scale,
    accumulate,
    adjust_loss_scale,
    apply_gradients,
    convert_state,
    flush,
    has_updated,
    mark_last,
    merge_batch_stats,
    micro_step,
    refold,
    state_shardings,
    state_specs,
):
    _public.__module__ = __name__  # where users find them: tracebacks, help() and pickles say so
del _public
