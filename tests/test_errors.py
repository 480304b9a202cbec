"""A user's mistake gets one error that says what was got, what was expected, what to type."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_accum as oa

PARAMS = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}


def message(error, call):
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(
    "k", [0, -1, 2.5, True, "4", None, np.bool_(True), 2**31, jnp.float32(2), np.array([2])]
)
def test_k(k):
    text = message(ValueError, lambda: oa.accumulate(optax.sgd(1.0), k))
    assert repr(k) in text and "expected an integer from 1" in text and "type k=8" in text


@pytest.mark.parametrize("k", [np.int32(3), np.uint8(3), jnp.int32(3), np.array(3)])
def test_k_of_numpy_and_jax(k):
    assert int(oa.accumulate(optax.sgd(1.0), k).init(PARAMS).k) == 3


def test_traced_k():
    call = jax.jit(lambda k: oa.accumulate(optax.sgd(1.0), k).init(PARAMS).k)
    text = message(TypeError, lambda: call(3))
    assert "traced" in text and "k=lambda update_step: value" in text


@pytest.mark.parametrize("returned", [2.0, jnp.float32(2), True, jnp.array([2, 3])])
def test_schedule_of_k(returned):
    tx = oa.accumulate(optax.sgd(1.0), lambda update_step: returned)
    text = message(TypeError, lambda: tx.init(PARAMS))
    assert "the schedule of k returned" in text and "expected an integer scalar" in text
    assert "jnp.int32" in text


@pytest.mark.parametrize("k", [0, -3])
def test_scheduled_k_below_one_counts_as_one(k):
    tx = oa.accumulate(optax.sgd(1.0), lambda update_step: jnp.int32(k))
    updates, state = jax.jit(tx.update)(PARAMS, tx.init(PARAMS), PARAMS)
    assert bool(oa.has_updated(state)) and float(updates["b"][0]) == -1.0


@pytest.mark.parametrize(
    ("keyword", "value", "shown"),
    [
        ("nonfinite", "drop", "nonfinite='skip_window'"),
        ("nonfinite", None, "nonfinite='propagate'"),
        ("loss_reduction", "average", "loss_reduction='sum_over_weight'"),
        ("loss_reduction", 1, "loss_reduction='mean'"),
    ],
)
def test_choices(keyword, value, shown):
    text = message(ValueError, lambda: oa.accumulate(optax.sgd(1.0), 2, **{keyword: value}))
    assert repr(value) in text and shown in text


@pytest.mark.parametrize("dtype", [jnp.int32, "float33", jnp.float16, jnp.float8_e4m3fn, 3, bool])
def test_accumulator_dtype(dtype):
    text = message(TypeError, lambda: oa.accumulate(optax.sgd(1.0), 2, accumulator_dtype=dtype))
    assert "accumulator_dtype is" in text and "jnp.bfloat16" in text


def test_accumulator_dtype_that_jax_would_narrow():
    text = message(
        TypeError, lambda: oa.accumulate(optax.sgd(1.0), 2, accumulator_dtype=np.float64)
    )
    assert "jax_enable_x64" in text


@pytest.mark.parametrize("inner", [None, 0.1, optax.sgd, optax.MultiSteps(optax.sgd(1.0), 2)])
def test_inner(inner):
    text = message(TypeError, lambda: oa.accumulate(inner, 2))
    assert "inner is" in text and "expected an optax.GradientTransformation" in text


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("k", [1, 2])
class TestUpdate:
    def call(self, jit, k, grads=PARAMS, state=None, params=PARAMS, inner=None, **keywords):
        settings = keywords.pop("settings", {})
        tx = oa.accumulate(inner or optax.sgd(1.0), k, **settings)
        state = tx.init(PARAMS) if state is None else state
        if jit:
            jax.jit(lambda g, s, p: tx.update(g, s, p, **keywords))(grads, state, params)
        else:
            tx.update(grads, state, params, **keywords)

    @pytest.mark.parametrize(
        ("weight", "error", "shown"),
        [
            (jnp.ones(3), TypeError, "expected one real number"),
            (np.ones((1, 1)), TypeError, "weight.sum()"),
            (1j, TypeError, "expected one real number"),
            ("3", TypeError, "expected one real number"),
            (-1.0, ValueError, "expected a number from 0 to 2**100"),
            (float("nan"), ValueError, "weight=0"),
            (float("inf"), ValueError, "weight=0"),
            (np.float32(-2), ValueError, "weight is -2.0"),
            (1e39, ValueError, "from 0 to 2**100"),
            (9e37, ValueError, "from 0 to 2**100"),
            (-1e-50, ValueError, "weight is -1e-50"),
        ],
    )
    def test_weight(self, jit, k, weight, error, shown):
        assert shown in message(error, lambda: self.call(jit, k, weight=weight))

    def test_weight_with_sum(self, jit, k):
        settings = {"loss_reduction": "sum"}
        text = message(ValueError, lambda: self.call(jit, k, settings=settings, weight=2.0))
        assert "weight was given with loss_reduction='sum'" in text and "drop weight=" in text
        self.call(jit, k, settings=settings, weight=0)

    def test_traced_weight_with_sum(self, jit, k):
        tx = oa.accumulate(optax.sgd(1.0), k, loss_reduction="sum")
        call = jax.jit(lambda weight: tx.update(PARAMS, tx.init(PARAMS), PARAMS, weight=weight))
        assert "drop weight=" in message(ValueError, lambda: call(0.0))

    def test_weight_missing(self, jit, k):
        settings = {"loss_reduction": "sum_over_weight"}
        text = message(ValueError, lambda: self.call(jit, k, settings=settings))
        assert "weight is missing" in text and "weight=tokens_in_this_micro_batch" in text

    @pytest.mark.parametrize("last", [1, 0.0, "yes", jnp.array([True]), None])
    def test_last(self, jit, k, last):
        text = message(TypeError, lambda: self.call(jit, k, last=last))
        assert "last is" in text and "expected a bool scalar" in text and "last=True" in text

    def test_value(self, jit, k):
        text = message(TypeError, lambda: self.call(jit, k, value=jnp.ones(4)))
        assert "value is float32[4]" in text and "value.mean()" in text

    def test_params_missing(self, jit, k):
        inner = optax.adamw(1.0, weight_decay=0.1)
        text = message(ValueError, lambda: self.call(jit, k, params=None, inner=inner))
        assert "params" in text

    def test_foreign_state(self, jit, k):
        state = optax.adam(1.0).init(PARAMS)
        text = message(TypeError, lambda: self.call(jit, k, state=state))
        assert "expected the AccumulateState" in text and "tx.init(params)" in text


@pytest.mark.parametrize("run", ["update", "apply_gradients"])
@pytest.mark.parametrize(
    ("grads", "shown"),
    [
        ({"w": jnp.ones((3, 2))}, "the gradients' structure is"),
        ([jnp.ones((3, 2)), jnp.ones(2)], "differentiate the same tree"),
        ({"w": jnp.ones((3, 2)), "b": jnp.ones(2), "c": jnp.ones(1)}, "expected that of"),
        ({"w": jnp.ones((2, 3)), "b": jnp.ones(2)}, "has shape (2, 3), expected"),
        ({"w": jnp.ones((3, 2)), "b": jnp.ones((8, 2))}, "differentially_private_aggregate"),
        (
            {"w": jnp.ones((3, 2)), "b": jnp.ones(2, jnp.complex64)},
            "take its real part",
        ),
    ],
)
def test_gradients(run, grads, shown):
    tx = oa.accumulate(optax.sgd(1.0), 2)
    state = tx.init(PARAMS)
    if run == "update":
        text = message((ValueError, TypeError), lambda: tx.update(grads, state, PARAMS))
    else:
        text = message(
            (ValueError, TypeError), lambda: oa.apply_gradients(tx, grads, state, PARAMS)
        )
    assert shown in text


def test_k_of_one_state_given_another_k():
    state = oa.accumulate(optax.sgd(1.0), 1).init(PARAMS)
    tx = oa.accumulate(optax.sgd(1.0), 4)
    text = message(ValueError, lambda: tx.update(PARAMS, state, PARAMS))
    assert "holds no window" in text and "oa.convert_state(state, tx, params)" in text


def test_inner_whose_state_grows():
    inner = optax.GradientTransformation(
        lambda params: jnp.zeros(1),
        lambda updates, state, params=None: (updates, jnp.concatenate([state, state])),
    )
    tx = oa.accumulate(inner, 2)
    text = message(ValueError, lambda: tx.update(PARAMS, tx.init(PARAMS), last=True))
    assert "from shape (1,) to (2,)" in text


def test_inner_whose_state_changes_structure():
    inner = optax.GradientTransformation(
        lambda params: (), lambda updates, state, params=None: (updates, {"new": jnp.zeros(1)})
    )
    tx = oa.accumulate(inner, 2)
    text = message(ValueError, lambda: tx.update(PARAMS, tx.init(PARAMS), last=True))
    assert "expected that of before" in text


@pytest.mark.parametrize("state", [(), {"a": jnp.ones(2)}, optax.sgd(1.0).init(PARAMS)])
def test_no_accumulate_state(state):
    for call in (
        lambda: oa.has_updated(state),
        lambda: oa.diagnostics.window(state),
        lambda: oa.flush(optax.sgd(1.0), state, PARAMS),
    ):
        assert "without an AccumulateState" in message(ValueError, call)


def test_side_by_side():
    tx = optax.multi_transform(
        {"a": oa.accumulate(optax.sgd(1.0), 2), "b": oa.accumulate(optax.sgd(1.0), 3)},
        {"w": "a", "b": "b"},
    )
    state = tx.init(PARAMS)
    for call in (oa.has_updated, oa.diagnostics.window):
        assert "side by side" in message(ValueError, lambda call=call: call(state))
    assert not oa.has_updated(state.inner_states["a"])


@pytest.mark.parametrize("start, drift", [(jnp.int32(0), 0.5), (jnp.float32(0), 1j)])
def test_inner_whose_state_would_lose_what_it_holds(start, drift):
    inner = optax.GradientTransformation(
        lambda params: start, lambda updates, state, params=None: (updates, state + drift)
    )
    tx = oa.accumulate(inner, 2)
    text = message(TypeError, lambda: tx.update(PARAMS, tx.init(PARAMS), last=True))
    assert "would lose what it holds" in text


@pytest.mark.parametrize(
    "name, meant", [("wieght", "weight"), ("weigth", "weight"), ("lst", "last")]
)
def test_a_misspelt_argument_is_not_handed_on(name, meant):
    tx = oa.accumulate(optax.sgd(1.0), k=2)
    params = jnp.zeros(2)
    with pytest.raises(TypeError, match=f"'{name}', expected '{meant}'"):
        tx.update(params, tx.init(params), params, **{name: 1})
    with pytest.raises(TypeError, match=f"'{name}', expected '{meant}'"):
        oa.apply_gradients(tx, params, tx.init(params), params, **{name: 1})
