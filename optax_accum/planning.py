"""Before training: the arithmetic of batches, memory, the micro-batch that fits, traffic.

When not to accumulate: where the big batch fits; on one device, where a small batch with its own
beta (:func:`scale_beta`) trains as well; and never with micro-batches smaller than memory asks for,
which waste the machine (`fit(..., time=True)`).
"""

from optax_accum._batch_arithmetic import Batch as Batch
from optax_accum._batch_arithmetic import activations as activations
from optax_accum._batch_arithmetic import batch as batch
from optax_accum._explain import Explanation as Explanation
from optax_accum._explain import explain as explain
from optax_accum._fit import fit as fit
from optax_accum._hyperparameters import AdamHyperparameters as AdamHyperparameters
from optax_accum._hyperparameters import half_life as half_life
from optax_accum._hyperparameters import scale_adam as scale_adam
from optax_accum._hyperparameters import scale_beta as scale_beta
from optax_accum._hyperparameters import scale_linear as scale_linear
from optax_accum._hyperparameters import scale_square_root as scale_square_root
from optax_accum._memory import Memory as Memory
from optax_accum._memory import Part as Part
from optax_accum._memory import memory as memory
from optax_accum._plan import Plan as Plan
from optax_accum._plan import Size as Size
from optax_accum._remedies import Remedy as Remedy
from optax_accum._traffic import Traffic as Traffic
from optax_accum._traffic import traffic as traffic

for _public in (
    AdamHyperparameters,
    Batch,
    Explanation,
    Memory,
    Part,
    Plan,
    Remedy,
    Size,
    Traffic,
    activations,
    batch,
    explain,
    fit,
    half_life,
    memory,
    scale_adam,
    scale_beta,
    scale_linear,
    scale_square_root,
    traffic,
):
    _public.__module__ = __name__  # where users find them: tracebacks, help() and pickles say so
del _public
