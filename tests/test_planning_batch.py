"""Batch arithmetic against loops that count, and the one screen for a configured run."""

import itertools
import math

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_accum as oa
from optax_accum import _units


@pytest.mark.parametrize("micro_batch, k, replicas", [(4, 8, 1), (4, 8, 4), (1, 1, 1), (3, 5, 7)])
def test_any_that_determine_the_rest(micro_batch, k, replicas):
    whole = {"micro_batch": micro_batch, "k": k, "replicas": replicas}
    whole["global_batch"] = math.prod(whole.values())
    for names in itertools.chain(*(itertools.combinations(whole, n) for n in (3, 4))):
        given = {name: whole[name] for name in names}
        found = oa.planning.batch(**({"replicas": None} | given))
        assert {name: getattr(found, name) for name in whole} == whole


def test_the_worked_example():
    one = oa.planning.batch(micro_batch=4, k=8, replicas=1, activation_per_sample="0.5GB")
    four = oa.planning.batch(micro_batch=4, k=8, replicas=4, activation_per_sample=0.5e9)
    assert (one.global_batch, four.global_batch) == (32, 128)
    assert one.activations == four.activations == 2 * 10**9
    assert "2 GB a device" in str(one) and "global batch  32" in str(one)
    for k in (1, 8, 64):
        assert oa.planning.batch(micro_batch=4, k=k, activation_per_sample=5).activations == 20


def counted_epoch(examples, micro_batch, k, replicas, drop_tail):
    """Windows of an epoch, by a loader that hands out micro-batches and a window that counts."""
    left, micro_steps, updates, in_window = examples, 0, 0, 0
    if drop_tail:
        left -= examples % (micro_batch * k * replicas)
    while left:
        left -= min(left, micro_batch * replicas)
        micro_steps += 1
        in_window += 1
        if in_window == k or not left:
            updates, in_window = updates + 1, 0
    return micro_steps, updates


@pytest.mark.parametrize("drop_tail", [False, True])
@pytest.mark.parametrize("examples", [24, 25, 30, 47, 48, 1000])
@pytest.mark.parametrize("micro_batch, k, replicas", [(4, 3, 2), (8, 1, 3), (1, 24, 1)])
def test_an_epoch(examples, micro_batch, k, replicas, drop_tail):
    found = oa.planning.batch(
        micro_batch=micro_batch,
        k=k,
        replicas=replicas,
        examples=examples,
        epochs=3,
        drop_tail=drop_tail,
    )
    counted = counted_epoch(examples, micro_batch, k, replicas, drop_tail)
    assert (found.micro_steps_per_epoch, found.updates_per_epoch) == counted
    assert found.schedule_updates == 3 * counted[1]
    assert found.tail == examples % 24
    assert ("dropped" in str(found)) == (drop_tail and examples % 24 > 0)


def test_an_epoch_is_what_the_time_driver_runs():
    tx = oa.accumulate(optax.sgd(0.1), k=3)
    loader = [jnp.ones(2)] * 10
    state, update = tx.init(jnp.zeros(2)), jax.jit(tx.update)
    for grads, last in oa.mark_last(loader):
        _, state = update(grads, state, last=last)
    found = oa.planning.batch(micro_batch=2, k=3, examples=20)
    assert int(state.update_step) == found.updates_per_epoch == found.schedule_updates == 4
    assert (found.micro_steps_per_epoch, found.tail, found.tail_micro_steps) == (10, 2, 1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"global_batch": 100, "micro_batch": 8},
            "does not divide 100; the nearest that work: global_batch=96, global_batch=104, "
            "micro_batch=5, micro_batch=10.",
        ),
        (
            {"global_batch": 64, "micro_batch": 4, "k": 4},
            "= 16, not 64; the nearest that work: global_batch=16, micro_batch=16, k=16, "
            "replicas=4.",
        ),
        ({"global_batch": 7, "micro_batch": 8}, "global_batch=8, micro_batch=7."),
        ({"global_batch": 64, "micro_batch": 4, "replicas": 5}, "replicas=4, replicas=8."),
        ({"global_batch": 64}, "global_batch=64, replicas=1 was given, expected enough"),
        ({"micro_batch": 4, "k": 8, "replicas": None}, "expected enough to know global_batch"),
        ({"micro_batch": 4, "k": 0}, "k is 0 (int), expected an integer of 1 or more"),
        ({"micro_batch": 4, "k": 2.5}, "k is 2.5"),
        ({"micro_batch": 4, "k": 8, "examples": 31, "drop_tail": True}, "type drop_tail=False"),
        ({"micro_batch": 4, "k": 8, "activation_per_sample": "lots"}, "type 16GiB"),
    ],
)
def test_what_does_not_go_together(given, message):
    with pytest.raises(ValueError) as caught:
        oa.planning.batch(**given)
    assert message in str(caught.value)


@pytest.mark.parametrize("total", [30, 97, 100])
def test_the_nearest_that_work_do_work(total):
    for micro_batch, k, replicas in itertools.product((7, 8, 11), (None, 3), (1, 2, 4)):
        given = {"global_batch": total, "micro_batch": micro_batch, "k": k, "replicas": replicas}
        with pytest.raises(ValueError) as caught:
            oa.planning.batch(**given)
        named = str(caught.value).split("nearest that work: ")[1].rstrip(".").split(", ")
        assert named
        for name, number in (text.split("=") for text in named):
            oa.planning.batch(**(given | {name: int(number)}))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GiB", 16 * 2**30),
        ("80GB", 80 * 10**9),
        ("0.5GB", 5 * 10**8),
        ("512MB", 512 * 10**6),
        (" 1.5 kib ", 1536),
        ("4096", 4096),
        ("123B", 123),
        (123, 123),
        (1e9, 10**9),
        ("2e9", 2 * 10**9),
        ("1_000B", 1000),
    ],
)
def test_bytes_are_read(text, size):
    assert _units.parse_bytes("budget", text) == size


@pytest.mark.parametrize("text", ["", "GB", "16G", "-1GB", "1.2.3GB", True, None, "1e999", "nan"])
def test_what_is_no_number_of_bytes(text):
    with pytest.raises(ValueError, match=r"budget is .*, expected bytes .* type 16GiB"):
        _units.parse_bytes("budget", text)


def test_a_small_number_lacks_its_unit():
    for text in ("16", "0.5", " 80 "):
        number = text.strip()
        with pytest.raises(ValueError, match=f"expected a unit.*type {number}GB, {number}GiB"):
            _units.parse_bytes("budget", text)
    with pytest.raises(ValueError, match=r"budget is 16, .*16GiB"):
        _units.parse_large("budget", 16)
    assert _units.parse_bytes("activation_per_sample", 16) == 16
    assert _units.parse_bytes("activation_per_sample", "0") == 0


def test_bytes_are_shown():
    sizes = (0, 999, 1000, 1536, 2 * 10**9, 12_345_678, 123_456_789, 5 * 10**8, 3 * 10**18)
    assert [_units.show(size) for size in sizes] == [
        "0 B",
        "999 B",
        "1 kB",
        "1.54 kB",
        "2 GB",
        "12.3 MB",
        "123 MB",
        "500 MB",
        "3000 PB",
    ]
    assert _units.show_budget(16 * 2**30) == "16 GiB (17.2 GB)"
    assert _units.show_budget(80 * 10**9) == "80 GB"
    assert _units.show_budget(2**30 + 1) == "1.07 GB"


PARAMS = {
    "a": jax.ShapeDtypeStruct((100, 10), jnp.float32),
    "b": jax.ShapeDtypeStruct((24,), jnp.float32),
}


@pytest.mark.parametrize(
    ("tx", "window", "dtype"),
    [
        (oa.accumulate(optax.adam(0.1), 8), 4096, "float32"),
        (oa.accumulate(optax.adam(0.1), 8, accumulator_dtype=jnp.bfloat16), 2048, "bfloat16"),
        (oa.accumulate(optax.adam(0.1), 1), 0, "none"),
        (None, 4096, "float32"),
    ],
)
def test_one_screen(tx, window, dtype):
    k = None if tx else 8
    found = oa.planning.explain(tx, PARAMS, k=k, micro_batch=4, examples=1000, epochs=2)
    assert (found.window, found.window_dtype) == (window, dtype)
    expected = oa.planning.batch(k=found.batch.k, micro_batch=4, examples=1000, epochs=2)
    assert found.batch == expected
    assert (found.reduction, found.reduction_bytes) == ("none: one replica", 0)
    for shown in ("global batch", "an epoch", "tail", "schedule", "window", "reduction"):
        assert shown in str(found)


def test_one_screen_of_replicas():
    alone, mapped = (oa.accumulate(optax.sgd(0.1), 8, axis_name=name) for name in (None, "data"))
    rows = {row.scheme: row for row in oa.planning.traffic(PARAMS, 8, 4)}
    for tx, scheme in ((alone, "a reduction a micro-batch"), (mapped, "one reduction a window")):
        found = oa.planning.explain(tx, PARAMS, micro_batch=4, replicas=4)
        assert (found.reduction, found.reduction_bytes) == (scheme, rows[scheme].traffic)
        assert found.batch.global_batch == 128 and found.window == 4096
    zero = "one a window, to shards (ZeRO-1)"
    found = oa.planning.explain(None, PARAMS, k=8, micro_batch=4, replicas=4, reduction=zero)
    assert (found.reduction, found.reduction_bytes) == (zero, rows[zero].traffic)


def test_a_wider_window_is_reduced_as_wide(x64):
    narrow, wide = (
        oa.accumulate(optax.sgd(0.1), 8, accumulator_dtype=dtype, axis_name="data")
        for dtype in (jnp.float32, jnp.float64)
    )
    sent = [oa.planning.explain(tx, PARAMS, micro_batch=4, replicas=4) for tx in (narrow, wide)]
    assert 2 * sent[0].reduction_bytes == sent[1].reduction_bytes == 2 * 8192 * 3 / 4


def test_one_screen_of_what_is_known():
    tx = oa.accumulate(optax.sgd(0.1), lambda update_step: 4 + update_step, loss_reduction="sum")
    found = oa.planning.explain(tx, micro_batch=2)
    assert found.batch.k == 4 and found.k_is_scheduled and found.window is None
    assert "a schedule; 4 at update 0" in str(found) and "sum(g)" in str(found)
    assert not oa.planning.explain(tx, micro_batch=2, k=6).k_is_scheduled
    chain = optax.chain(optax.clip(1.0), oa.accumulate(optax.sgd(0.1), 8))
    assert oa.planning.explain(chain, PARAMS, micro_batch=2, k=8).window == 4096
    with pytest.raises(ValueError, match=r"k is 4, but tx accumulates k=8.*accumulate\(inner, k=4"):
        oa.planning.explain(oa.accumulate(optax.sgd(0.1), 8), k=4, micro_batch=2)
    with pytest.raises(ValueError, match="expected one of: reduction='a reduction a micro-batch'"):
        oa.planning.explain(None, PARAMS, k=8, micro_batch=2, reduction="once")
