"""Two processes with four devices each, on loopback, against one process with all eight."""

import contextlib
import os
import pathlib
import random
import socket
import subprocess
import sys
import time

import host
import jax
import numpy as np
import optax
import pytest
from conftest import FAST

PROCESSES = 2
SECONDS = 120  # for a pair on a busy machine; on a quiet one it needs about 6
ROUNDING = 1e-6  # float32, sums in another order; measured: 2e-7
TESTS = pathlib.Path(__file__).parent
EXAMPLE = TESTS.parent / "examples" / "several_hosts.py"


def free_port():
    """Below those that the system hands out by itself, so that nobody gets it meanwhile."""
    for port in random.SystemRandom().sample(range(20_000, 32_768), 100):
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port
    raise OSError("100 ports were in use")


def task(name, folder):
    """The command of each process of a task of `host.py`."""
    script, port = TESTS / "host.py", free_port()
    return [[script, name, folder, port, PROCESSES, i] for i in range(PROCESSES)]


@contextlib.contextmanager
def started(commands, folder):
    """The processes, which are no more afterwards."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FAST}  # the same bits as here
    processes = []
    try:
        for i, command in enumerate(commands):
            with (folder / f"log-{i}").open("w") as log:
                command = [sys.executable, *map(str, command)]
                processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=env))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def logs(folder):
    return "\n".join(f"{path}:\n{path.read_text()[-4000:]}" for path in folder.glob("log-*"))


def wait_for(commands, folder):
    """Runs them to their ends; the first that fails ends the others."""
    with started(commands, folder) as processes:
        deadline = time.monotonic() + SECONDS
        codes = [None] * PROCESSES
        while None in codes and not any(codes) and time.monotonic() < deadline:
            time.sleep(0.05)
            codes = [process.poll() for process in processes]
    assert codes == [0] * PROCESSES, logs(folder)


def written(folder, name):
    with np.load(folder / f"{name}.npz") as arrays:
        return list(arrays.values())


def assert_same(got, want, tolerance=0.0):
    """Up to so much of a leaf's largest number; 0: the same bits."""
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    for a, b in zip(map(np.asarray, got), map(np.asarray, want), strict=True):
        if tolerance:
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())
        else:
            assert a.dtype == b.dtype and a.tobytes() == b.tobytes()


def one_big_batch():
    """Losses and parameters without accumulation, in float64."""
    with jax.enable_x64(True):
        params, batches = jax.tree.map(np.float64, host.problem())
        state, losses = host.INNER.init(params), []
        for batch in batches:
            loss, grads = jax.value_and_grad(host.loss_fn)(params, batch)
            updates, state = host.INNER.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            losses.append(loss)
        return jax.tree.map(np.asarray, (losses, params))


def test_two_processes_train_as_one(tmp_path):
    """Each of the two asserts for itself that the gradient is reduced once a window."""
    wait_for(task("drivers", tmp_path), tmp_path)
    mesh = host.line(8)
    space = written(tmp_path, "space")
    assert_same(space, host.space_driver(mesh), ROUNDING)
    assert_same(space, one_big_batch(), ROUNDING)
    assert_same(written(tmp_path, "eager"), host.eager_call(mesh), ROUNDING)

    first, late = host.run(mesh, 0, host.LATE)
    assert_same(written(tmp_path, "open"), host.looked_into(late[1]), ROUNDING)
    rest, (params, _) = host.run(mesh, host.LATE, host.UPDATES * host.K, late)
    assert_same(written(tmp_path, "time"), (first + rest, params), ROUNDING)
    assert_same(params, one_big_batch()[1], ROUNDING)


def test_a_checkpoint_of_an_open_window_goes_on_on_other_devices(tmp_path):
    """Two processes save after 2 and 6 micro-steps of windows of 4.

    They go on to the same bits as if they had not stopped. From the early one, made before
    anything was reduced, one process with eight devices does too; from the late one it does not,
    nor do fewer devices: they sum in another order than two processes, and the rest is rounding.
    """
    wait_for(task("checkpoint", tmp_path), tmp_path)
    want, end = written(tmp_path, "never_stopped"), host.UPDATES * host.K
    assert_same(written(tmp_path, "resumed"), want)

    mesh = host.line(8)
    _, (never_stopped, _) = host.run(mesh, 0, end)
    early = host.restore(tmp_path / "early", mesh, rows=8)
    assert_same(early, host.run(mesh, 0, host.EARLY)[1])
    _, (params, _) = host.run(mesh, host.EARLY, end, early)
    assert_same(params, never_stopped)

    for devices in (8, 2, 1):
        mesh = host.line(devices)
        late = host.restore(tmp_path / "late", mesh, rows=8)
        assert late[1].weight_sum.shape == (devices,) and int(late[1].micro_step) == 2
        _, (params, _) = host.run(mesh, host.LATE, end, late)
        assert_same(params, want, ROUNDING)
        assert_same(params, one_big_batch()[1], ROUNDING)


DIES = {"crash": 1, "crash_of_the_coordinator": 0}


@pytest.mark.parametrize(
    "name", ["crash", pytest.param("crash_of_the_coordinator", marks=pytest.mark.full)]
)
def test_where_one_process_dies_the_other_does_not_wait_for_ever(name, tmp_path):
    """In the middle of a window, its last micro-steps being on the way."""
    with started(task(name, tmp_path), tmp_path) as processes:
        assert processes[DIES[name]].wait(SECONDS) == 3, logs(tmp_path)
        assert processes[1 - DIES[name]].wait(SECONDS) != 0, logs(tmp_path)


def test_the_example(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    shared = [EXAMPLE, "--coordinator", address, "--processes", PROCESSES, "--process"]
    wait_for([[*shared, i] for i in range(PROCESSES)], tmp_path)
    assert "weights apart by" in (tmp_path / "log-0").read_text()
