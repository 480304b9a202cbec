"""One of several processes that train together, started by `test_several_hosts.py`.

python tests/host.py TASK FOLDER PORT PROCESSES PROCESS

Each has `DEVICES` devices on CPU, talks over loopback and ends by itself. What comes out goes into
FOLDER. The training itself is here too, so that one process with all devices can run it as well.
"""

import argparse
import functools
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_accum as oa

DEVICES = 4  # of one process
UPDATES, K, EXAMPLES, D = 3, 4, 64, 5
EARLY, LATE = 2, K + 2  # micro-steps before a checkpoint: inside the first window, the second
PATIENCE = 60  # seconds without a sign of life after which a process counts as dead
LITTLE_PATIENCE = 8  # the same where one will die
INNER = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.3, momentum=0.9))


def join(port, processes, process, patience=PATIENCE):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(
        address,
        processes,
        process,
        coordinator_bind_address=address,  # jax's own choice are all interfaces
        initialization_timeout=PATIENCE,
        heartbeat_timeout_seconds=patience,
        shutdown_timeout_seconds=patience,
    )
    assert jax.process_count() == processes and jax.local_device_count() == DEVICES


# The problem: what counts is how much of each example is masked.


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["in"])
    errors = ((hidden @ params["out"])[:, 0] - batch["y"]) ** 2
    return (batch["mask"] * errors).sum() / weight_fn(batch)


def weight_fn(batch):
    return batch["mask"].sum()


def problem():
    """Parameters, and a batch for each update."""
    rng = np.random.default_rng(0)
    params = {"in": rng.normal(size=(D, 8)), "out": rng.normal(size=(8, 1)) / 3}
    batches = []
    for _ in range(UPDATES):
        x, mask = rng.normal(size=(EXAMPLES, D)), rng.uniform(size=EXAMPLES)
        batches.append({"x": x, "y": np.sin(x.sum(1)), "mask": mask})
    return jax.tree.map(np.float32, (params, batches))


def line(devices=None):
    return jax.make_mesh((devices or jax.device_count(),), ("data",))


def everywhere(tree, mesh):
    return jax.device_put(tree, NamedSharding(mesh, P()))


def shared_out(batch, mesh):
    """A batch over the devices of all processes, of which each process holds its own part only."""

    def one(x):
        mine = np.split(x, jax.process_count())[jax.process_index()]
        sharding = NamedSharding(mesh, P("data"))
        return jax.make_array_from_process_local_data(sharding, mine, x.shape)

    return jax.tree.map(one, batch)


# The drivers.


def space_driver(mesh):
    """Losses of the updates, and parameters after them."""
    params, batches = problem()
    grad_fn = oa.value_and_grad(loss_fn, K, weight=weight_fn, mesh=mesh)

    @jax.jit
    def update(params, state, batch):
        loss, grads = grad_fn(params, batch)
        updates, state = INNER.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = everywhere(params, mesh)
    state, losses = everywhere(INNER.init(params), mesh), []
    batches = [shared_out(batch, mesh) for batch in batches]
    compiled = update.lower(params, state, batches[0]).compile()
    oa.verify.assert_reduced_once(compiled, params, mesh=mesh)
    for batch in batches:
        params, state, loss = compiled(params, state, batch)
        losses.append(loss)
    return losses, params


def eager_call(mesh):
    """Outside `jit`: a batch that no process has whole, a typed key, parameters from NumPy."""
    params, batches = problem()

    def noisy(params, batch, key):
        return loss_fn(params, batch | {"y": batch["y"] + jax.random.normal(key)})

    grad_fn = oa.value_and_grad(noisy, K, weight=weight_fn, rng_argnums=2, mesh=mesh)
    return grad_fn(params, shared_out(batches[0], mesh), jax.random.key(0))


def micro_batches():
    """Every example j of a batch in its micro-batch j mod K, as the space driver cuts it."""
    _, batches = problem()
    return [jax.tree.map(lambda x, i=i: x[i::K], batch) for batch in batches for i in range(K)]


@functools.cache
def time_driver(mesh):
    """A transformation, its compiled micro-step on a mesh, and where its state lies there."""
    tx = oa.accumulate(INNER, K, axis_name="data")
    params = everywhere(problem()[0], mesh)
    specs = oa.state_specs(tx, params, "data")
    shardings = oa.state_shardings(tx, params, axis_name="data")

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs, P())
    )
    def micro_step(params, state, batch):
        own = jax.lax.pcast(params, "data", to="varying")
        loss, grads = jax.value_and_grad(loss_fn)(own, batch)
        weight = weight_fn(batch)
        params, state = oa.apply_gradients(tx, grads, state, params, weight=weight)
        loss, weight = jax.lax.psum((loss * weight, weight), "data")
        return params, state, loss / weight

    state = jax.jit(lambda params: oa.refold(tx.init(params), mesh.size), out_shardings=shardings)
    first = params, state(params), shared_out(micro_batches()[0], mesh)
    compiled = micro_step.lower(*first).compile()
    if mesh.size > 1:
        oa.verify.assert_reduced_once(compiled, params, mesh=mesh)
    return tx, compiled, first[:2], shardings


def run(mesh, start, stop, at=None):
    """Losses of some micro-steps, and `(params, state)` after them."""
    _, micro_step, first, _ = time_driver(mesh)
    (params, state), losses = at or first, []
    for micro_batch in micro_batches()[start:stop]:
        params, state, loss = micro_step(params, state, shared_out(micro_batch, mesh))
        losses.append(loss)
    return losses, (params, state)


def looked_into(state):
    """What is read of an open window outside `jit`, its rows being on all processes."""
    return oa.has_updated(state), oa.diagnostics.window(state), oa.refold(state, 2).grad_sum


# Checkpoints in the middle of a window.


def save(path, at):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, at)


def restore(path, mesh, rows):
    """What so many replicas saved, for the devices of a mesh."""
    tx, _, (params, _), shardings = time_driver(mesh)
    state = jax.eval_shape(lambda params: oa.refold(tx.init(params), rows), params)
    places = jax.tree.map(lambda x: x.sharding, params), shardings
    described = lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)  # noqa: E731
    with ocp.StandardCheckpointer() as checkpointer:
        at = checkpointer.restore(path, jax.tree.map(described, (params, state), places))
    refold = jax.jit(oa.refold, static_argnums=1, out_shardings=shardings)
    return at[0], refold(at[1], mesh.size)


# The tasks.


def drivers(folder):
    mesh = line()
    write(folder, space=space_driver(mesh), eager=eager_call(mesh))
    first, late = run(mesh, 0, LATE)
    write(folder, open=looked_into(late[1]))
    rest, (params, _) = run(mesh, LATE, UPDATES * K, late)
    write(folder, time=(first + rest, params))


def checkpoint(folder):
    mesh = line()
    _, early = run(mesh, 0, EARLY)
    save(folder / "early", early)
    _, late = run(mesh, EARLY, LATE, early)
    save(folder / "late", late)
    _, never_stopped = run(mesh, LATE, UPDATES * K, late)
    _, resumed = run(mesh, LATE, UPDATES * K, restore(folder / "late", mesh, mesh.size))
    write(folder, never_stopped=never_stopped[0], resumed=resumed[0])


def crash(folder):
    """Process 1 dies in the middle of a window."""
    die_in_a_window(1)


def crash_of_the_coordinator(folder):
    die_in_a_window(0)


def die_in_a_window(process):
    mesh = line()
    _, at = run(mesh, 0, LATE)
    jax.block_until_ready(at)
    if jax.process_index() == process:
        os._exit(3)
    jax.block_until_ready(run(mesh, LATE, UPDATES * K, at))


def write(folder, **trees):
    for name, tree in trees.items():
        arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
        if jax.process_index() == 0:
            np.savez(folder / f"{name}.npz", *arrays)


TASKS = {task.__name__: task for task in (drivers, checkpoint, crash, crash_of_the_coordinator)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("numbers", type=int, nargs=3, metavar="PORT PROCESSES PROCESS")
    arguments = parser.parse_args()
    join(*arguments.numbers, LITTLE_PATIENCE if "crash" in arguments.task else PATIENCE)
    TASKS[arguments.task](arguments.folder)
    jax.distributed.shutdown()
