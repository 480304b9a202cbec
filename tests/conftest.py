"""Eight CPU devices for every test, set before jax makes its first array."""

import jax
import pytest

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
