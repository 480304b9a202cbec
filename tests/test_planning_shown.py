"""What a plan says of sizes that were not tried, of predictions, and of likely mistakes."""

from test_planning_fit import small

import optax_accum as oa


def test_what_was_not_tried_is_not_said_to_fit_or_not():
    plan = oa.planning.fit(*small("time"), "1MB", global_batch=8, compilations=1)
    assert [row.fits for row in plan.sizes] == [True, None, None, None]
    text = str(plan)
    assert "compiled 1 time, " in text and "?: not tried; type --compilations 5" in text
    assert [line.split()[-1] for line in text.splitlines()[-4:]] == ["yes", "?", "?", "?"]


def test_predictions_are_of_one_line():
    """Of compiled sizes only the recommended one has what had been expected of it."""
    plan = oa.planning.fit(*small("time"), 120_000, global_batch=128)
    shown = [row for row in plan.sizes if row.compiled is not None and row.predicted is not None]
    assert [row.micro_batch for row in shown] == [plan.micro_batch]
    assert shown[0].predicted == plan.predicted is not None
    uncompiled = [row.predicted or 0 for row in plan.sizes if row.compiled is None]
    assert len(uncompiled) > 1 and uncompiled == sorted(uncompiled)


def test_notes_on_donation_and_on_shapes_that_ignore_their_arguments():
    donated = oa.planning.fit(*small("space"), "1MB", global_batch=8)
    assert not donated.notes
    (note,) = oa.planning.fit(*small("space", donate=()), "1MB", global_batch=8).notes
    assert "donates nothing: donate_argnums=(0, 1) would save about 16.4 kB" in note
    make_update, shapes = small("time")
    plan = oa.planning.fit(make_update, lambda b, k: shapes(4, k), "1MB", global_batch=8)
    assert "do make_update and shapes use micro_batch and k?" in str(plan)
