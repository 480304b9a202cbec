"""Gradient accumulation for JAX and Optax.

The arithmetic of one big batch, in the memory of one micro-batch.
"""

from optax_accum import diagnostics as diagnostics
from optax_accum import planning as planning
from optax_accum import verify as verify
from optax_accum._loop import value_and_grad as value_and_grad
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

for _public in (
    AccumulateState,
    Stats,
    value_and_grad,
    accumulate,
    apply_gradients,
    flush,
    has_updated,
    mark_last,
    micro_step,
    refold,
    state_shardings,
    state_specs,
):
    _public.__module__ = __name__  # where users find them: tracebacks, help() and pickles say so
del _public
