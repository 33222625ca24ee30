"""Training on several processes gives what one process with the whole batch gives."""

from __future__ import annotations

import pytest
import torch

from tests import cases
from tests.launching import two_are_enough
from tests.tasks import alone, equal, largest_difference


def test_training_equals_one_process_with_the_whole_batch(ranks):
    for result in ranks(cases.training.uneven_batches):
        for key, run in result.items():
            one = alone(cases.training.uneven_batches)[key]
            assert run["updates"] == one["updates"]
            assert run["samples"] == one["samples"]
            assert largest_difference(run["weights"], one["weights"]) < 1e-10
            for metric, values in one["history"].items():
                assert run["history"][metric] == pytest.approx(values, abs=1e-10)
            for ours, theirs in zip(run["gradients"], one["gradients"], strict=True):
                assert largest_difference(ours, theirs) < 1e-10


def test_losses_over_items_equal_one_process(ranks):
    for result in ranks(cases.training.tokens):
        for accumulation, run in result.items():
            one = alone(cases.training.tokens)[accumulation]
            assert largest_difference(run["weights"], one["weights"]) < 1e-10
            assert largest_difference(run["gradients"][0], one["gradients"][0]) < 1e-10
            assert run["history"]["train_loss_epoch"] == pytest.approx(one["history"]["train_loss_epoch"], abs=1e-10)


def test_updates_and_learning_rates_do_not_depend_on_the_number_of_processes(ranks):
    for result in ranks(cases.training.schedule):
        assert result == alone(cases.training.schedule)


def test_losses_over_the_samples_of_all_processes_equal_one_process(ranks):
    for result in ranks(cases.training.losses_over_all_samples):
        for key, run in result.items():
            one = alone(cases.training.losses_over_all_samples)[key]
            assert largest_difference(run["weights"], one["weights"]) < 1e-10, key
            assert run["loss"] == pytest.approx(one["loss"], abs=1e-10), key
            for ours, theirs in zip(run["gradients"], one["gradients"], strict=True):
                assert largest_difference(ours, theirs) < 1e-10, key


def test_a_loss_of_what_was_gathered_without_gradients_is_an_error_that_says_so(ranks):
    for result in ranks(cases.training.losses_of_what_has_no_gradients):
        constant, guarded = result["said"]
        assert "the result of trainer.gather(), which has no gradients. Pass with_gradients=True" in constant
        assert "with_gradients=True) does not work on several processes with auto_microbatch=True" in guarded
        assert result["lengths"] == [2 * ranks.world_size] * (6 // ranks.world_size)  # as it is for metrics


def test_datasets_by_name_equal_one_process(ranks):
    one = alone(cases.training.named)
    assert {"train_a_epoch", "few_eval_loss_epoch", "many_eval_loss_epoch"} <= one["history"].keys()
    for result in ranks(cases.training.named):
        assert largest_difference(result["weights"], one["weights"]) < 1e-10
        for metric, values in one["history"].items():
            assert result["history"][metric] == pytest.approx(values, abs=1e-10)
        assert sum(len(part) for part in result["parts"]) == 25
        assert torch.allclose(torch.cat(result["parts"]), torch.cat(one["parts"]), atol=1e-10, rtol=0)


@two_are_enough
def test_the_layout_in_memory_does_not_change_the_result(ranks):
    for result in ranks(cases.training.channels_last):
        assert largest_difference(result[True], result[False]) < 1e-12
        assert largest_difference(result[True], alone(cases.training.channels_last)[True]) < 1e-12


def test_limits_count_steps_of_the_whole_job(ranks):
    for result in ranks(cases.training.limits):
        assert result["samples"] == alone(cases.training.limits)["samples"] == 24
        assert result["updates"] == alone(cases.training.limits)["updates"] == 4
        assert largest_difference(result["weights"], alone(cases.training.limits)["weights"]) < 1e-10


@two_are_enough
def test_parameters_of_the_loss_function_are_the_same_on_all_ranks(ranks):
    for result in ranks(cases.training.learned_loss):
        assert torch.equal(result["scale"], ranks(cases.training.learned_loss)[0]["scale"])
        assert abs(result["scale"] - alone(cases.training.learned_loss)["scale"]) < 1e-10
        assert largest_difference(result["weights"], alone(cases.training.learned_loss)["weights"]) < 1e-10


@two_are_enough
def test_sparse_gradients_are_averaged_with_and_without_a_guard(ranks):
    for result in ranks(cases.training.sparse_gradients):
        assert largest_difference(result[True], result[False]) < 1e-12
        assert equal(result[True], ranks(cases.training.sparse_gradients)[0][True])


def test_a_gradient_that_one_rank_has_or_has_otherwise_is_averaged(ranks):
    n = ranks.world_size
    for result in ranks(cases.training.gradients_of_one_rank):
        for (_, others), centres in result.items():
            expected = torch.full((4,), 1 - 0.1 * (n - 1) / n if others else 1.0, dtype=torch.float64)
            expected[2] -= 0.1 / n
            assert torch.allclose(centres, expected)
        assert len(result) == 3
