"""Several hosts, the whole batch in one call: every device of every process trains on its share.

On one machine, in two terminals, each process with four devices on CPU:

    python examples/several_hosts.py --coordinator 127.0.0.1:29500 --processes 2 --process 0
    python examples/several_hosts.py --coordinator 127.0.0.1:29500 --processes 2 --process 1

On several machines the coordinator is an address of the first that the others reach. Without
arguments: one process.

Every update takes 256 examples. Each process loads its own part of them, each device takes its
share in 8 micro-batches, and the gradient is reduced over all devices once. Process 0 also trains a
twin, alone on one device, on the big batch: the weights must agree to rounding, the loss must fall.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_accum as oa

UPDATES, EXAMPLES, K = 40, 256, 8
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.05, momentum=0.9))


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["in"] + params["bias"])
    errors = ((hidden @ params["out"])[:, 0] - batch["y"]) ** 2
    return (batch["mask"] * errors).sum() / batch["mask"].sum()


def first_params():
    rng = np.random.default_rng(0)
    params = {"in": rng.normal(size=(1, 32)), "bias": np.zeros(32), "out": rng.normal(size=(32, 1))}
    return jax.tree.map(np.float32, params | {"out": params["out"] / 6})


def load(update, process, processes):
    """The part of a batch that one process reads."""
    rng = np.random.default_rng((1, update))  # here instead of a file
    x, mask = rng.uniform(-3, 3, (EXAMPLES, 1)), rng.uniform(size=EXAMPLES) < 0.6
    batch = jax.tree.map(np.float32, {"x": x, "y": np.sin(x[:, 0]), "mask": mask})
    return jax.tree.map(lambda x: np.split(x, processes)[process], batch)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def update(grad_fn, params, state, batch):
    loss, grads = grad_fn(params, batch)
    updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def train(one_update, params, state, batches):
    losses = []
    for batch in batches:
        params, state, loss = one_update(params, state, batch)
        losses.append(float(loss))
    return jax.device_get(params), losses


def train_together():
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    params = jax.device_put(first_params(), NamedSharding(mesh, P()))
    shardings = oa.state_shardings(OPTIMIZER, params)
    state = jax.jit(OPTIMIZER.init, out_shardings=shardings)(params)

    def whole(part):
        """The batch of all processes, of which this one holds its part."""
        shape = (EXAMPLES, *part.shape[1:])
        return jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), part, shape)

    here = jax.process_index(), jax.process_count()
    batches = [jax.tree.map(whole, load(i, *here)) for i in range(UPDATES)]
    grad_fn = oa.value_and_grad(loss_fn, K, weight=lambda batch: batch["mask"].sum(), mesh=mesh)
    compiled = update.lower(grad_fn, params, state, batches[0]).compile()
    found = oa.verify.assert_reduced_once(compiled, params, mesh=mesh)
    reduced = sum(c.bytes * c.runs for c in found if c.runs)
    gradient = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    print(
        f"process {here[0]} of {here[1]}, {jax.local_device_count()} of {mesh.size} devices: "
        f"{reduced} bytes reduced a window, {gradient} of them the gradient"
    )
    return train(compiled, params, state, batches)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens")
    parser.add_argument("--processes", type=int, default=1, help="how many there are")
    parser.add_argument("--process", type=int, default=0, help="which of them this is, from 0")
    arguments = parser.parse_args()
    if (arguments.coordinator is None) != (arguments.processes == 1):
        parser.error("type --coordinator, --processes and --process together, or none of them")
    jax.config.update("jax_num_cpu_devices", 4)  # these two matter on CPU only
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if arguments.coordinator:
        jax.distributed.initialize(
            arguments.coordinator,
            arguments.processes,
            arguments.process,
            coordinator_bind_address=arguments.coordinator,
            initialization_timeout=60,
            heartbeat_timeout_seconds=30,  # when one process dies, the others end so much later
        )
    params, losses = train_together()
    if jax.process_index() == 0:
        alone = functools.partial(update, jax.value_and_grad(loss_fn))
        state = OPTIMIZER.init(first_params())
        twin, _ = train(alone, first_params(), state, (load(i, 0, 1) for i in range(UPDATES)))
        apart = max(jax.tree.leaves(jax.tree.map(lambda a, b: np.abs(a - b).max(), params, twin)))
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, weights apart by {apart:.1e}")
        assert losses[-1] < 0.7 * losses[0]
        assert apart < 1e-5


if __name__ == "__main__":
    main()
