"""The pages on training schemes: their claims about several processes and resuming, with their code."""

from __future__ import annotations

import itertools
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from tests.launching import ROOT
from tests.ranks import IN_ORDER, global_batch
from tests.small_models import equal_weights, weights


def names_on(page: str, blocks: list[int], until: str = "the end of the page") -> dict[str, Any]:
    """Run blocks of code of a page, the last one only up to some code of it, and return what they define."""
    text = (ROOT / "docs" / "schemes" / f"{page}.md").read_text()
    found = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    code = "".join(found[number] for number in blocks).partition(until)[0]
    code = re.sub(r"in range\(\d+00\)", "in range(8)", code)  # less data
    namespace: dict[str, Any] = {"__name__": "docs"}
    exec(compile(code, page, "exec"), namespace)
    return namespace


def simclr() -> Any:
    """Weights and losses after two epochs, with views that are the images themselves and their mirror images."""
    warnings.filterwarnings("ignore", ".*functional.all_gather is deprecated")  # old versions have nothing else
    namespace = names_on("simclr", [0, 1, 3])
    views = itertools.cycle([lambda images: images, lambda images: images.flip(1)])
    namespace["distort"] = lambda images: next(views)(images)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    data = TensorDataset(torch.randn(16, 6, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trainer = namespace["GatheringTrainer"](model, None, optimizer, callbacks=[])
    trainer.train(data, 2, per_device_batch_size=global_batch(8), train_dataloader_kwargs=IN_ORDER)
    return {"weights": weights(model), "losses": trainer.run_history["train_loss_epoch"]}


@pytest.mark.processes
def test_simclr_on_two_processes_learns_the_same(two_ranks):
    alone = simclr()
    for found in two_ranks(simclr):
        assert found["losses"] == pytest.approx(alone["losses"], abs=1e-6)
        torch.testing.assert_close(found["weights"], alone["weights"], atol=1e-6, rtol=0)


def detection(*callbacks: Any, num_epochs: int = 2, **kwargs: Any) -> Any:
    """Weights and metrics of the page's detector after a short run on eight images."""
    from pytorch_accel_lite.callbacks import MetricsCallback

    page = names_on("detection", [0, 1, 2], until="precision = MetricsCallback(")
    images = page["train_set"]
    precision = MetricsCallback(
        page["MeanAveragePrecision"](),
        lambda batch, output: (output["model_outputs"], batch[1]),
        only=["map", "mar_10"],
    )
    model = page["model"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.004)
    trainer = page["DetectionTrainer"](model, None, optimizer, callbacks=[precision, *callbacks], seed=0)
    in_memory = {"num_workers": 0}
    options = {"collate_fn": page["collate"], "train_dataloader_kwargs": in_memory, "eval_dataloader_kwargs": in_memory}
    if num_epochs:
        trainer.train(images, num_epochs, images, global_batch(2), **options, **kwargs)
    else:
        trainer.evaluate(images, global_batch(2), in_memory, page["collate"])
    return {"weights": weights(model), "history": trainer.run_history.to_dict()}


@pytest.mark.extension("metrics")
def test_a_detector_resumes_to_the_same_bits(tmp_path):
    pytest.importorskip("torchvision")
    pytest.importorskip("pycocotools")

    def run(folder, **kwargs):
        states = SaveTrainingStateCallback(tmp_path / folder, save_every_n_steps=3, max_checkpoints=None)
        return detection(states, **kwargs)

    whole = run("whole")
    resumed = run("resumed", resume_from=tmp_path / "whole" / "update-000000003")
    assert resumed["history"] == whole["history"]
    assert equal_weights(resumed["weights"], whole["weights"])


@pytest.mark.processes
def test_a_detector_is_evaluated_on_all_images_of_two_processes(two_ranks):
    pytest.importorskip("torchvision")
    pytest.importorskip("pycocotools")
    alone = detection(num_epochs=0)["history"]
    assert alone["mar_10"][0] > 0
    for found in two_ranks.run(detection, num_epochs=0):
        assert found["history"] == alone
