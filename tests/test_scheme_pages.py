"""What the pages on training schemes say about several processes and about resuming, with the code of these pages."""

from __future__ import annotations

import pytest
import torch

from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from tests import cases
from tests.tasks import equal


@pytest.mark.processes
def test_simclr_on_two_processes_compares_all_images_and_learns_the_same(two_ranks):
    alone = cases.schemes.simclr()
    for found in two_ranks(cases.schemes.simclr):
        assert found["losses"] == pytest.approx(alone["losses"], abs=1e-6)
        torch.testing.assert_close(found["weights"], alone["weights"], atol=1e-6, rtol=0)


def test_a_detector_resumes_to_the_same_bits(tmp_path):
    pytest.importorskip("torchvision")
    pytest.importorskip("pycocotools")

    def run(folder, **kwargs):
        states = SaveTrainingStateCallback(tmp_path / folder, save_every_n_steps=3, max_checkpoints=None)
        return cases.schemes.detection(states, **kwargs)

    whole = run("whole")
    resumed = run("resumed", resume_from=tmp_path / "whole" / "update-000000003")
    assert resumed["history"] == whole["history"]
    assert equal(resumed["weights"], whole["weights"])


@pytest.mark.processes
def test_a_detector_is_evaluated_on_all_images_of_two_processes(two_ranks):
    pytest.importorskip("torchvision")
    pytest.importorskip("pycocotools")
    alone = cases.schemes.detection(num_epochs=0)["history"]
    assert alone["mar_10"][0] > 0
    for found in two_ranks.run(cases.schemes.detection, num_epochs=0):
        assert found["history"] == alone
