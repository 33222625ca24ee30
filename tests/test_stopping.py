"""Runs that are stopped, end or fail: at the same update on every process."""

from __future__ import annotations

from tests import cases
from tests.launching import two_are_enough
from tests.tasks import equal


@two_are_enough
def test_a_loss_that_is_not_finite_on_one_rank_ends_all_ranks_at_the_same_update(ranks):
    results = ranks(cases.stopping.nan_on_one_rank)
    assert len({result["update"] for result in results}) == 1
    for result in results:
        assert "epoch 1, step 3: loss=nan" in result["message"]
        assert result["events"] == [("on_exception", "NonFiniteLossError"), ("on_training_run_end",)]


def test_a_stop_asked_for_by_one_rank_stops_all_at_the_same_update(ranks):
    results = ranks(cases.stopping.stop_on_one_rank)
    assert {result["reason"] for result in results} == {"rank asked for an end"}
    assert len({result["update"] for result in results}) == 1
    assert results[0]["update"] < 2 * 2000 // ranks.world_size
    assert all(equal(result["weights"], results[0]["weights"]) for result in results)


@two_are_enough
def test_a_limit_of_time_pauses_all_ranks_at_the_same_update(ranks):
    for paused, whole in ranks(cases.stopping.time_limit):
        assert len(paused["updates"]) > 2
        assert paused["updates"] == ranks(cases.stopping.time_limit)[0][0]["updates"]
        assert len(whole["updates"]) == 1
        assert paused["updates"][-1] == whole["updates"][-1]
        assert equal(paused["weights"], whole["weights"])


@two_are_enough
def test_a_stop_in_an_event_leaves_no_rank_waiting_for_another(ranks):
    results = ranks(cases.stopping.stop_before_communicating_callbacks)
    assert {result["reason"] for result in results} == {"at the end of the epoch"}
    assert {result["epoch"] for result in results} == {1}
    assert len({result["run"] for result in results}) == 1


@two_are_enough
def test_rows_are_written_until_all_ranks_end_together(ranks):
    for updates, made in ranks(cases.stopping.nan_with_logger):
        assert updates == list(range(1, made + 1))


@two_are_enough
def test_rows_are_written_until_an_error_that_all_ranks_have(ranks):
    assert all(updates == [1, 2, 3] for updates in ranks(cases.stopping.error_with_logger))


@two_are_enough
def test_an_evaluation_that_was_stopped_does_not_stop_the_next(ranks):
    assert all(reasons == ["seen enough", None] for reasons in ranks(cases.stopping.stopped_evaluation))


@two_are_enough
def test_what_is_found_while_a_run_ends_ends_it_and_not_the_next_evaluation(ranks):
    assert cases.stopping.nan_while_ending() == ("found while ending", True)
    assert ranks(cases.stopping.nan_while_ending) == [("found while ending", True)] * ranks.world_size


@two_are_enough
def test_no_state_of_weights_that_are_not_finite_is_written(ranks):
    for result in ranks(cases.stopping.states_with_nan):
        assert result["failed"] is not None
        assert len(result["finite"]) == 2
        assert all(result["finite"].values())


@two_are_enough
def test_callbacks_after_one_that_stops_the_run_hear_as_much_as_on_one_process(ranks):
    assert ranks(cases.stopping.stop_before_others) == [cases.stopping.stop_before_others()] * ranks.world_size
