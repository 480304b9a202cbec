"""`fit` against what the compiler says of the same update, compiled apart from it."""

import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
import transformer_shapes as transformer
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_accum as oa
from optax_accum import _compiled_memory, _remedies
from optax_accum._size_search import predicted

WIDTH = 64
W = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
PARAMETER_BYTES = WIDTH * WIDTH * 4


def loss(w, x):
    return jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)


def small(driver, inner=optax.sgd(0.1), sharding=None, donate=(0, 1), calls=None):  # noqa: B008
    """A small model by either driver; `calls` notes the sizes that were asked for."""

    def make_update(micro_batch, k):
        if calls is not None:
            calls.append((micro_batch, k))
        if driver == "time":
            update = oa.micro_step(loss, oa.accumulate(inner, k))
        else:

            def update(w, state, x):
                value, grads = oa.value_and_grad(loss, k)(w, x)
                updates, state = inner.update(grads, state, w)
                return value, optax.apply_updates(w, updates), state

        return jax.jit(update, donate_argnums=donate, compiler_options=transformer.FAST)

    def shapes(micro_batch, k):
        tx = oa.accumulate(inner, k) if driver == "time" else inner
        examples = micro_batch * (1 if driver == "time" else k)
        x = jax.ShapeDtypeStruct((examples, WIDTH), jnp.float32, sharding=sharding)
        return W, jax.eval_shape(tx.init, W), x

    return make_update, shapes


def checked(plan, budget):
    """What holds of every plan."""
    assert all(row.micro_batch * row.k * plan.replicas == plan.global_batch for row in plan.sizes)
    seen = [row for row in plan.sizes if row.compiled is not None]
    assert len(seen) == plan.compilations <= 5
    assert plan.budget == budget
    assert all(row.fits == (row.compiled <= budget) for row in seen)
    if plan.micro_batch is None:
        assert not any(row.fits for row in seen)
    else:
        assert plan.largest == max(row.micro_batch for row in seen if row.fits)
        chosen = next(row for row in plan.sizes if row.micro_batch == plan.micro_batch)
        assert (chosen.k, chosen.compiled) == (plan.k, plan.verified)
    return plan


@pytest.mark.parametrize("driver, remat, near", [("time", False, 0.05), ("space", True, 0.10)])
def test_a_transformer(driver, remat, near):
    """The totals of sizes that fit did not compile are as predicted; the chosen one is verified."""
    which = getattr(transformer, f"{driver}_driver")(remat)
    counted = []
    plan = oa.planning.fit(
        *which, "1GB", global_batch=128, on_compile=lambda b, k: counted.append((b, k))
    )
    checked(plan, 10**9)
    assert counted == [(1, 128), (4, 32), (64, 2), (16, 8), (128, 1)]
    assert (plan.micro_batch, plan.k, plan.calls) == (128, 1, 1)
    rows = {row.micro_batch: row for row in plan.sizes}
    for size in (8, 32):
        assert rows[size].compiled is None
        assert abs(rows[size].predicted / transformer.total(which, size, 128 // size) - 1) < near


SIZES = (2, 3, 7, 9, 12, 20, 28, 44, 60)


@pytest.mark.full
@pytest.mark.parametrize("driver, remat, near", [("space", False, 0.05), ("time", True, 0.10)])
def test_a_line_through_1_4_16_and_64(driver, remat, near):
    total = functools.partial(
        transformer.total, getattr(transformer, f"{driver}_driver")(remat), k=4
    )
    line = {size: total(size) for size in (1, 4, 16, 64)}
    errors = {size: predicted(line, size) / total(size) - 1 for size in SIZES}
    assert max(map(abs, errors.values())) < near, errors


@pytest.mark.parametrize("driver", ["time", "space"])
def test_the_largest_that_fits_and_k_with_it(driver):
    """Against every size compiled."""
    totals = {2**i: transformer.total(small(driver), 2**i, 2 ** (6 - i)) for i in range(7)}
    assert totals[8] < totals[16] < totals[32]
    for budget in (totals[8], totals[32] - 1):
        calls = []
        plan = oa.planning.fit(*small(driver, calls=calls), budget, global_batch=64)
        checked(plan, budget)
        # 64 is whole: without a window it may need less than 32, and is tried where looks are left.
        halves = max(size for size in totals if size < 64 and totals[size] <= budget)
        best = 64 if plan.micro_batch == 64 else halves
        assert (plan.micro_batch, plan.k) == (best, 64 // best)
        assert plan.verified == totals[best] and len(calls) == plan.compilations
        assert plan.calls == (1 if driver == "space" else plan.k)
        assert f"micro-batch {best} x k {64 // best} x 1 replica = global batch 64" in str(plan)
        assert "a CPU figure is not a GPU plan" in str(plan)


def test_memory_on_eight_devices_is_that_of_one():
    """Replicas share the batch: a device holds what one device with an eighth of it holds."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    whole = NamedSharding(mesh, P())

    def make_update(micro_batch, k):
        grad_fn = oa.value_and_grad(loss, k, mesh=mesh)

        def update(w, x):
            value, grads = grad_fn(w, x)
            return w - grads, value

        return jax.jit(update, donate_argnums=0, compiler_options=transformer.FAST)

    def shapes(micro_batch, k):
        x = jax.ShapeDtypeStruct((micro_batch * k * 8, WIDTH), jnp.float32)
        return (
            jax.ShapeDtypeStruct(W.shape, W.dtype, sharding=whole),
            x.update(sharding=NamedSharding(mesh, P("data"))),
        )

    budget = 90_000
    plan = oa.planning.fit(make_update, shapes, budget, global_batch=64 * 8, replicas=8)
    checked(plan, budget)
    assert plan.micro_batch is not None and plan.micro_batch < 64

    def alone(w, x):
        value, grads = oa.value_and_grad(loss, plan.k)(w, x)
        return w - grads, value

    x = jax.ShapeDtypeStruct((64, WIDTH), jnp.float32)
    one = lambda b, k: jax.jit(alone, donate_argnums=0)  # noqa: E731
    total = transformer.total((one, lambda b, k: (W, x)), 0, 0)
    # All of the batch would be 8 times 16 kB; the all-reduce may take a buffer of its own.
    assert total - 1024 <= plan.verified <= total + PARAMETER_BYTES + 1024
    assert "x 8 replicas = global batch 512" in str(plan)


def test_nothing_fits():
    budget = int(1.6 * PARAMETER_BYTES)  # weights, window and two moments are 4
    plan = checked(
        oa.planning.fit(*small("time", optax.adam(1e-3)), budget, global_batch=64), budget
    )
    assert (plan.micro_batch, plan.k, plan.largest, plan.verified) == (None,) * 4
    needed = plan.sizes[0].compiled
    assert needed is not None
    found = {}
    for remedy in plan.remedies:
        assert remedy.total == needed - remedy.saves and remedy.fits == (remedy.total <= budget)
        found.setdefault(remedy.how.split(":")[0].split(",")[0], remedy.saves / PARAMETER_BYTES)
    assert found["optax.sgd(1e-2)"] == pytest.approx(2, abs=0.01)  # both moments
    assert found["optax.lion(1e-4)"] == pytest.approx(1, abs=0.01)
    assert "donation" not in {remedy.what for remedy in plan.remedies}
    assert found["accumulator_dtype=jnp.bfloat16"] == 0.5
    shards = next(r for r in plan.remedies if r.what == "sharding")
    n = int(re.search(r"over (\d+) times", shards.how)[1])
    assert shards.saves == pytest.approx(4 * PARAMETER_BYTES * (1 - 1 / n), rel=0.01)
    assert shards.fits and needed - 4 * PARAMETER_BYTES * (1 - 2 / n) > budget  # n/2: too few
    text = str(plan)
    assert "nothing fits" in text and "rematerialisation" in text and "what would help" in text


def test_remedies_of_an_update_that_donates_nothing():
    plan = oa.planning.fit(*small("space", donate=()), 1100, global_batch=8)
    donation = next(r for r in plan.remedies if r.what == "donation")
    assert donation.how == "jax.jit(update, donate_argnums=(0, 1))"
    assert donation.saves == pytest.approx(PARAMETER_BYTES, rel=0.01)


def test_rematerialisation_is_estimated_by_what_an_example_adds():
    memory = _compiled_memory.Compiled(100, 50, 50, 1000)
    for activations, saves in ((400, 400), (4000, 1000)):
        found = _remedies.remedies((W,), memory, 10, activations, False)
        assert [(r.what, r.saves, r.total) for r in found] == [
            ("rematerialisation", saves, 1100 - saves)
        ]


@pytest.mark.parametrize("temporaries, saves", [(500, 100), (1000, 400), (5000, 400)])
def test_refs_save_a_micro_gradient_where_there_is_one(temporaries, saves):
    """100 float32 parameters, their window among the temporaries of a call that takes all."""
    memory = _compiled_memory.Compiled(400, 400, 400, temporaries)
    params = jax.ShapeDtypeStruct((100,), jnp.float32)
    found = {
        (r.what, per_call): r.saves
        for per_call in (False, True)
        for r in _remedies.remedies((params, ()), memory, 10, None, per_call)
    }
    assert found["refs", False] == 400
    assert found["refs", True] == saves


@pytest.mark.parametrize("driver", ["time", "space"])
def test_the_fastest_of_those_that_fit(driver, monkeypatch):
    """Every call takes a second: what an example takes then depends on the driver alone."""
    monkeypatch.setattr(_compiled_memory, "seconds", lambda executable, arguments: 1.0)
    plan = oa.planning.fit(*small(driver), "1MB", global_batch=16, time=True)
    rows = [row for row in plan.sizes if row.seconds]
    examples = {row.micro_batch: row.micro_batch if driver == "time" else 16 for row in rows}
    assert {row.micro_batch: 1 / (row.seconds or 0) for row in rows} == examples
    assert plan.micro_batch == plan.largest == 16  # of equals the larger
    assert "examples/s" in str(plan)


def test_a_smaller_one_may_be_the_fastest(monkeypatch):
    slow = {8: 9.0, 16: 9.0}
    monkeypatch.setattr(
        _compiled_memory, "seconds", lambda executable, args: slow.get(args[2].shape[0], 1.0)
    )
    plan = oa.planning.fit(*small("time"), "1MB", global_batch=16, time=True)
    assert plan.micro_batch == 4 and plan.largest == 16 and plan.k == 4
    assert plan.verified == next(r.compiled for r in plan.sizes if r.micro_batch == 4)
    assert "the fastest for an example; the largest that fits is 16" in str(plan)


def test_timing_runs_what_was_compiled():
    """Donated, with a mask, keys and shardings: batches are ones, so that they have weight."""
    seen = []

    def update(params, state, mask, key):
        jax.debug.callback(lambda *x: seen.append([float(v) for v in x]), params, mask.sum(), state)
        return params + jax.random.uniform(key), state

    place = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    float32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32, sharding=place)
    key = jax.eval_shape(lambda: jax.random.key(0))
    key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=place)
    arguments = float32(()), float32(()), float32((5,)), key
    executable = jax.jit(update, donate_argnums=(0, 1)).lower(*arguments).compile()
    assert _compiled_memory.seconds(executable, arguments) > 0
    jax.effects_barrier()
    assert seen == [[0.0, 5.0, 0.0]] * (_compiled_memory.RUNS + 1)


def test_a_budget_by_the_device():
    class Device:
        platform = "gpu"

        def memory_stats(self):
            return {"bytes_limit": 1000}

    assert _compiled_memory.available(Device(), 0.95) == 950
    with pytest.raises(ValueError, match=r"cpu reports no limit.*type budget='16GiB'"):
        oa.planning.fit(*small("time"), global_batch=8)


def test_a_compiler_that_refuses(monkeypatch):
    class Update:
        def lower(self, *arguments):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: exceeded hbm capacity")

    plan = oa.planning.fit(lambda b, k: Update(), small("time")[1], "1GB", global_batch=8)
    assert plan.micro_batch is None and plan.compilations == 2 and not plan.remedies
    assert "more than the compiler allows" in str(plan)


def explicit(micro_batch, k):
    return jax.jit(lambda w, state, x: (w, state, loss(w, x)))


class Silent:
    """A compiled update of a backend that does not tell its memory."""

    def lower(self, *arguments):
        return self

    def compile(self):
        return self

    def memory_analysis(self):
        return None


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"make_update": lambda b, k: loss}, TypeError, r"jax.jit\(update, donate_argnums"),
        ({"make_update": lambda b, k: Silent()}, ValueError, r"does not tell.*planning.memory"),
        ({"shapes": lambda b, k: W}, TypeError, "return params, state, batch"),
        ({"global_batch": 0}, ValueError, "global_batch is 0"),
        ({"global_batch": 10, "replicas": 4}, ValueError, "global_batch=8 or global_batch=12"),
        ({"global_batch": 3, "replicas": 4}, ValueError, r"type global_batch=4\."),
        ({"budget": "16 gigs"}, ValueError, "type 16GiB"),
        ({"budget": "16"}, ValueError, "expected a unit.*type 16GB, 16GiB"),
        ({"budget": 16}, ValueError, "expected a unit.*type 16GB, 16GiB"),
        (
            {"shapes": lambda b, k: small("time")[1](b, k)[:2], "make_update": explicit},
            TypeError,
            r"shapes returned 2 arguments.*\(w, state, x\).*type return params, state, batch",
        ),
        (
            {"shapes": lambda b, k: (*small("time")[1](b, k)[:2], (b, WIDTH))},
            TypeError,
            r"shapes returned \(1, 64\) as argument 2.*jax.ShapeDtypeStruct\(\(1, 64\)",
        ),
        ({"compilations": 0}, ValueError, "compilations is 0"),
    ],
)
def test_what_cannot_be_meant(keywords, error, message):
    make_update, shapes = small("time")
    given = {"make_update": make_update, "shapes": shapes, "budget": "1GB", "global_batch": 8}
    with pytest.raises(error, match=message):
        oa.planning.fit(**(given | keywords))


def test_an_error_in_the_update_names_the_size():
    make_update = lambda b, k: jax.jit(lambda w, s, x: w @ x)  # noqa: E731
    with pytest.raises(TypeError) as caught:
        oa.planning.fit(make_update, small("time")[1], "1GB", global_batch=8)
    assert "while the update was compiled for micro_batch=1, k=8." in caught.value.__notes__[-1]
    assert "shapes returned" in caught.value.__notes__[-1]
