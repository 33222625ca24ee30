"""The samples with the largest losses, on any number of processes, and their pictures."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import TensorDataset

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import WorstSamplesCallback
from tests.launching import CAN_SHARD, SOAK
from tests.sharded import fit, gathered, large_model, sharded_trainer, sharding_accelerator
from tests.small_models import (
    Stream,
    adamw_trainer,
    float64_data,
    float64_model,
    listener,
    make_data,
    make_trainer,
    train,
)


def classes(size: int = 40, pixels: int = 4) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 1, pixels, pixels, generator=generator)
    return TensorDataset(x, torch.randint(3, (size,), generator=generator))


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


def test_the_worst_samples_are_those_with_the_largest_losses(capsys):
    model, data = classifier(), classes()
    worst = WorstSamplesCallback(5, show=True)
    trainer = Trainer(model, nn.CrossEntropyLoss(), None, callbacks=[worst])
    trainer.evaluate(data, per_device_batch_size=7)
    x, y = data.tensors
    losses = nn.functional.cross_entropy(model(x), y, reduction="none").detach()
    expected = losses.sort(descending=True).indices[:5].tolist()
    assert [sample.index for sample in worst.samples] == expected
    assert [sample.loss for sample in worst.samples] == pytest.approx(losses[expected].tolist())
    assert [sample.prediction for sample in worst.samples] == model(x).argmax(1)[expected].tolist()
    assert [sample.target for sample in worst.samples] == y[expected].tolist()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["index", "loss", "prediction", "target"]
    assert lines[1].split()[0] == str(expected[0])
    assert len(lines) == 6


def test_worst_samples_work_for_several_outputs_and_a_nan(capsys):
    x = torch.randn(4, 5)
    y = torch.zeros(4, 2)
    y[2, 0] = math.nan
    worst = WorstSamplesCallback(10, show=True)
    trainer = Trainer(nn.Linear(5, 2), nn.MSELoss(), None, callbacks=[worst])
    trainer.evaluate(TensorDataset(x, y), per_device_batch_size=3)
    assert len(worst.samples) == 4
    assert worst.samples[0].index == 2
    assert math.isnan(worst.samples[0].loss)
    assert capsys.readouterr().out.splitlines()[1].split() == ["2", "nan", *["tensor", "(2,)"] * 2]
    by_hand = (trainer.model(x) ** 2).mean(1)
    for sample in worst.samples[1:]:
        assert sample.loss == pytest.approx(by_hand[sample.index].item())
        assert torch.equal(sample.prediction, trainer.model(x)[sample.index].detach()) or sample.prediction.shape == (
            2,
        )


def test_a_custom_loss_and_evaluations_by_name():
    worst = WorstSamplesCallback(2, loss=lambda outputs, targets: (outputs - targets).abs().squeeze(1))
    trainer = make_trainer([worst])
    train(trainer, eval_dataset={"a": make_data(6), "b": make_data(3)})
    assert {sample.dataset for sample in worst.samples} <= {"a", "b"}
    assert len(worst.samples) == 2


def test_an_evaluation_within_another_takes_none_of_its_samples():
    worst = WorstSamplesCallback(20, loss=lambda outputs, targets: (outputs - targets).abs().squeeze(1))
    found: list[Any] = []

    def interrupt(trainer, **_):
        if trainer.run.outer is None:
            trainer.evaluate({"c": make_data(4), "d": make_data(1)})
            found.append([sample.dataset for sample in worst.samples])

    trainer = make_trainer([worst, listener(on_eval_step_end=interrupt)])
    trainer.evaluate({"a": make_data(6), "b": make_data(3)}, per_device_batch_size=2)
    assert [sorted(names) for names in found] == [*[[*["a_c"] * 4, "a_d"]] * 3, *[[*["b_c"] * 4, "b_d"]] * 2]
    assert sorted((sample.dataset, sample.index) for sample in worst.samples) == [
        *(("a", index) for index in range(6)),
        *(("b", index) for index in range(3)),
    ]


@pytest.mark.extension("streams")
def test_the_worst_samples_of_a_stream_have_no_indices():
    worst = WorstSamplesCallback(2)
    make_trainer([worst]).evaluate(Stream(), per_device_batch_size=2)
    assert [sample.index for sample in worst.samples] == [None, None]


def test_predictions_in_a_dict_are_those_of_each_sample():
    class Boxes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"size": self.linear(x), "corners": x[:, :2]}

    model, data = Boxes(), make_data(10)
    worst = WorstSamplesCallback(
        3,
        transform=lambda batch, batch_output: (batch_output["model_outputs"], batch[1]),
        loss=lambda outputs, targets: (outputs["size"] - targets).abs().squeeze(1),
    )
    trainer = Trainer(model, lambda outputs, targets: (outputs["size"] - targets).mean(), None, callbacks=[worst])
    trainer.evaluate(data, per_device_batch_size=4)
    assert len(worst.samples) == 3
    for sample in worst.samples:
        x, y = data[sample.index]
        expected = model(x[None])
        assert sample.loss == pytest.approx((expected["size"] - y).abs().item(), rel=1e-5)
        assert torch.equal(sample.prediction["corners"].flatten(), x[:2])
        torch.testing.assert_close(sample.prediction["size"].flatten(), expected["size"].flatten())


@pytest.mark.parametrize("loss_func", [nn.functional.mse_loss, partial(nn.functional.mse_loss, reduction="sum")])
def test_the_functions_of_torch_give_a_loss_for_each_sample(loss_func):
    found = []
    for loss in (loss_func, nn.MSELoss()):
        worst = WorstSamplesCallback(3)
        make_trainer([worst], loss_func=loss).evaluate(make_data())
        found.append(worst.samples)
    assert found[0] == found[1] != []


@pytest.mark.parametrize(
    ("loss_func", "arguments", "message"),
    [
        (lambda outputs, targets: (outputs - targets).mean(), {}, "cannot get per-sample losses from .* Pass loss="),
        (torch.dist, {}, "cannot get per-sample losses from .*built-in"),  # Python does not know its arguments
        (nn.MSELoss(), {"loss": nn.functional.mse_loss}, "must return one value for each of 2 samples, not"),
    ],
)
def test_a_loss_without_values_for_samples_is_refused(loss_func, arguments, message):
    with pytest.raises(ValueError, match=message):
        make_trainer([WorstSamplesCallback(**arguments)], loss_func=loss_func).evaluate(
            make_data(), per_device_batch_size=2
        )


def pixels(path):
    with Image.open(path) as image:
        return np.asarray(image)


@pytest.mark.extension("plots")
def test_images_are_drawn_as_a_sheet(tmp_path):
    data = classes()
    worst = WorstSamplesCallback(7)
    Trainer(classifier(), nn.CrossEntropyLoss(), None, callbacks=[worst]).evaluate(data, per_device_batch_size=8)
    figure = worst.plot(data, tmp_path / "sheets" / "worst.png", classes=["ant", "bee", "cat"])
    first = worst.samples[0]
    named = ["ant", "bee", "cat"]
    titles = [axis.get_title() for axis in figure.axes]
    assert titles[0].startswith(f"predicted {named[first.prediction]}, true {named[first.target]}\nloss ")
    assert len(titles) == 7
    assert pixels(tmp_path / "sheets" / "worst.png").shape[1] > 500
    with pytest.raises(ValueError, match="Nothing to draw"):
        WorstSamplesCallback().plot(data)


@pytest.mark.extension("plots", "model_ema")
@pytest.mark.parametrize("averaged", [False, True])
def test_images_of_several_datasets_are_drawn_by_their_names(averaged):
    from pytorch_accel_lite.callbacks import ModelEmaCallback

    model, worst = nn.Sequential(nn.Flatten(), nn.Linear(16, 1)), WorstSamplesCallback(4)
    named = {name: TensorDataset(torch.full((2, 1, 4, 4), level), torch.ones(2, 1)) for name, level in LEVELS.items()}
    watched = "ema_model_left_eval_loss_epoch"
    callback = ModelEmaCallback(save_path=None, watch_metric=watched, callbacks=[worst]) if averaged else worst
    train(make_trainer([callback], model=model), train_dataset=named["left"], eval_dataset=named)
    figure = worst.plot(named)  # all four samples: a picture of each dataset is of one shade
    shown = sorted(float(axis.images[0].get_array().max()) for axis in figure.axes if axis.images)
    assert shown == pytest.approx([0.25, 0.25, 0.75, 0.75])
    with pytest.raises(KeyError, match="right_side"):
        worst.plot({"left": named["left"]})


LEVELS = {"left": 0.25, "right_side": 0.75}


def worst_samples() -> Any:
    """The worst samples, also with fewer samples than ranks, and those computed by hand."""
    found, expected = [], []
    for size in (23, 2):
        data, model, worst = float64_data(size), float64_model(), WorstSamplesCallback(6)
        adamw_trainer(model, callbacks=[worst]).evaluate(data, per_device_batch_size=2)
        losses = nn.functional.mse_loss(model(data.tensors[0]), data.tensors[1], reduction="none")[:, 0]
        found.append([sample.index for sample in worst.samples])
        expected.append(losses.sort(descending=True).indices[:6].tolist())
    return {"found": found, "expected": expected}


@pytest.mark.processes
def test_the_worst_samples_of_all_processes_are_found(ranks):
    for result in ranks(worst_samples):
        assert result["found"] == result["expected"]


@pytest.mark.extension("model_ema")
def test_the_model_ema_callback_learns_of_the_dataloaders():
    from pytorch_accel_lite.callbacks import ModelEmaCallback

    worst = WorstSamplesCallback(3)
    ema = ModelEmaCallback(0.5, save_path=None, callbacks=[worst])
    data = float64_data(9)
    adamw_trainer(float64_model(), callbacks=[ema]).train(float64_data(22), 1, data)
    x, y = data.tensors
    losses = (ema.ema.module(x) - y).square().squeeze(1)
    assert [sample.index for sample in worst.samples] == losses.topk(3).indices.tolist()


def worst_of_a_sharded_model(how: str) -> list[int]:
    worst = WorstSamplesCallback(3)
    fit(sharded_trainer(how, [worst]), how)
    return [sample.index for sample in worst.samples]


@CAN_SHARD
@pytest.mark.processes
@pytest.mark.soak
@pytest.mark.parametrize(("how", "processes"), [("fsdp", 2), ("tp", 2), *[("hsdp", 4), ("tp_fsdp", 4)] * SOAK])
def test_processes_with_sharded_weights_find_those_of_one(job, how, processes):
    expected = worst_of_a_sharded_model("whole")
    for found in job(processes).run(worst_of_a_sharded_model, how):
        assert found == expected


def worst_of_seven() -> tuple[dict[str, torch.Tensor], dict[int, float]]:
    """The weights and losses of a model in shards; a process takes part in a step in which it has no sample."""
    worst, model = WorstSamplesCallback(7), large_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = Trainer(model, nn.MSELoss(), optimizer, [worst], accelerator=sharding_accelerator())
    trainer.train(float64_data(12), 1, per_device_batch_size=3)
    trainer.evaluate(float64_data(7), per_device_batch_size=3)
    return gathered(trainer.model.state_dict()), {sample.index: sample.loss for sample in worst.samples}


@CAN_SHARD
@pytest.mark.processes
def test_a_filler_sample_of_sharded_ranks_is_left_out(two_ranks):
    data, model = float64_data(7), large_model().eval()
    for weights, losses in two_ranks(worst_of_seven):
        model.load_state_dict(weights)
        expected = (model(data.tensors[0]).detach() - data.tensors[1]).square()[:, 0].tolist()
        assert losses == pytest.approx(dict(enumerate(expected)))


def test_numbers_of_samples_and_functions_are_checked():
    with pytest.raises(ValueError, match="k=0 must be at least 1"):
        WorstSamplesCallback(0)
    with pytest.raises(TypeError, match="loss='mse' must be a function"):
        WorstSamplesCallback(loss="mse")
    with pytest.raises(TypeError, match="transform=1 must be a function"):
        WorstSamplesCallback(transform=1)


class Numbered(torch.utils.data.Dataset):
    """Each sample is its number, but one cannot be read. Names are read as numbers, too."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        number = int(index)
        return None if number == 2 else (torch.full((3,), float(number), dtype=torch.float64), torch.zeros(1))


def identity() -> nn.Module:
    model = nn.Linear(3, 1, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 0, 0]]))
        model.bias.zero_()
    return model


def test_no_sample_is_named_where_some_were_left_out():
    def collate_fn(samples):
        return torch.utils.data.default_collate([sample for sample in samples if sample is not None])

    worst = WorstSamplesCallback(5)
    adamw_trainer(identity(), callbacks=[worst]).evaluate(Numbered(), 4, collate_fn=collate_fn)
    assert [(sample.index, sample.prediction) for sample in worst.samples] == [
        (7, 7.0),
        (6, 6.0),
        (5, 5.0),
        (4, 4.0),
        (None, 3.0),
    ]


def test_samples_may_have_names():
    worst = WorstSamplesCallback(2)
    loader = torch.utils.data.DataLoader(Numbered(), sampler=["5", "7", "6"], batch_size=2)
    adamw_trainer(identity(), callbacks=[worst]).evaluate(loader)
    assert [sample.index for sample in worst.samples] == ["7", "6"]


@pytest.mark.parametrize("order", [np.array([5, 7, 6]), torch.tensor([5, 7, 6])], ids=["numpy", "torch"])
def test_numbers_of_numpy_and_torch_become_plain(order):
    worst = WorstSamplesCallback(2)
    loader = torch.utils.data.DataLoader(Numbered(), sampler=order, batch_size=2)
    adamw_trainer(identity(), callbacks=[worst]).evaluate(loader)
    assert [(sample.index, type(sample.index)) for sample in worst.samples] == [(7, int), (6, int)]
