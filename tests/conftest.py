"""Eight CPU devices for every test, set before jax makes its first array.

Compiling is most of what the tests cost, and the machine code's quality none of what they show.
"""

import os

FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FAST}".strip()

import jax  # noqa: E402 (it reads the flags)
import pytest  # noqa: E402

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture
def strict():
    """Neither dtypes nor ranks are promoted silently: for tests of our own arithmetic."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield
