"""Processes that train one model hold the same weights, or the run says that they do not."""

from __future__ import annotations

import pytest

from tests import cases
from tests.tasks import equal


@pytest.fixture
def found(ranks):
    return ranks(cases.replicas.drifting)


def test_a_step_that_calls_the_bare_model_is_found_after_the_first_update(ranks, found):
    others = ", ".join(map(str, range(1, ranks.world_size)))
    for update, _, said in (result["bare model"] for result in found):
        assert update == 1
        assert f"'0.weight' differs on rank {others} from rank 0" in said
        assert "trainer.model was never called" in said
        assert "Call self.model(...)" in said


def test_a_step_that_calls_the_bare_model_at_times_is_found_at_the_end_of_the_epoch(found):
    for update, epoch, said in (result["bare sometimes"] for result in found):
        assert (update > 1, epoch) == (True, 1)
        assert "never called" not in said
        assert "a step that calls the bare module" in said


def test_a_module_trained_beside_the_model_is_found_by_its_name(found):
    for update, _, said in (result["critic"] for result in found):
        assert update == 1
        assert "'critic.weight'" in said
        assert "self.accelerator.prepare(module)" in said


def test_parameters_unfrozen_without_rewrap_model_are_found_at_the_end_of_the_epoch(found):
    for _, epoch, said in (result["unfrozen"] for result in found):
        assert epoch == 2
        assert "rewrap_model()" in said


def test_parameters_that_the_loss_does_not_depend_on_are_named(found):
    for update, _, said in (result["unused"] for result in found):
        assert update == 1
        assert "The loss does not depend on 'spare.weight', 'spare.bias'," in said
        assert "find_unused_parameters=True" in said
        assert "bare module" not in said


def test_a_single_bit_is_found_at_the_end_of_the_epoch_and_sooner_when_checked_more_often(ranks, found):
    last = ranks.world_size - 1
    for result in found:
        update, epoch, said = result["one bit"]
        assert (update, epoch) == (48 // (4 * ranks.world_size), 1)
        assert f"'2.bias' differs on rank {last} from rank 0" in said
        assert result["one bit, checked often"][0] == 2


def test_weights_may_differ_on_purpose(found):
    first, *others = (result["on purpose"] for result in found)
    assert not any(equal(first, other) for other in others)


def test_weights_that_agree_are_left_alone(ranks):
    results = ranks(cases.replicas.agreeing)
    for weights in zip(*results, strict=True):
        assert all(equal(weights[0], of_rank) for of_rank in weights)


def test_processes_that_are_given_different_arguments_say_which(ranks):
    for seed, batch_size, epochs in ranks(cases.replicas.asked_for_other_things):
        assert "seed=1 on rank 1, but seed=0 on rank 0" in seed
        assert "train_per_device_batch_size=3 on rank 1" in batch_size
        assert "num_epochs=2 on rank 1" in epochs
