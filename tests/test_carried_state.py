"""State that a trainer carries from step to step, as in truncated backpropagation through time."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from tests import cases
from tests.cases.carried import DATA, by_hand, train
from tests.tasks import equal, largest_difference, weights


def test_truncated_backpropagation_has_the_bits_of_the_loop_by_hand():
    assert equal(weights(train().model), by_hand())


def test_processes_carry_their_rows_and_resume_to_the_same_bits(job):
    alone = cases.carried.trained_and_resumed()
    for found in (alone, *job(3)(cases.carried.trained_and_resumed)):
        assert largest_difference(found["whole"], alone["whole"]) < 1e-12
        assert len(found["resumed"]) == 3
        assert all(equal(resumed, found["whole"]) for resumed in found["resumed"])


def test_one_process_resumes_with_the_rows_of_two(two_ranks, tmp_path):
    folder = next(filter(None, two_ranks(cases.carried.saved)))
    try:
        for state in sorted(Path(folder, "states").glob("update-*")):
            resumed = train(tmp_path, resume_from=state)
            assert largest_difference(weights(resumed.model), by_hand()) < 1e-12
    finally:
        shutil.rmtree(folder)


def test_finding_a_learning_rate_leaves_no_trace_in_a_registered_object():
    trainer = train()
    before = trainer.memory.hidden
    trainer.find_lr(DATA, 6, num_steps=10, train_dataloader_kwargs={"shuffle": False})
    assert torch.equal(trainer.memory.hidden, before)
