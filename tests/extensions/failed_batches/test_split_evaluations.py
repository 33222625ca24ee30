"""A batch out of memory is split in evaluations and predictions, too."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics import MeanSquaredError

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import StepBasedEvaluationCallback
from tests.extensions.failed_batches.fussy import FullInEvaluation
from tests.ranks import IN_ORDER, OrderedStream, global_batch, rank
from tests.small_models import adamw_trainer, float64_data, listener, make_data, make_trainer


class EvaluatesTokens(Trainer):
    """Losses over items, nested outputs with a loss of their own, lists of samples, and values that are logged."""

    def calculate_eval_batch_loss(self, batch):
        x, y = batch
        self.log("before", x[:, 0].mean())
        self.log("weighted", x[:, 0].mean(), weight=len(x))
        outputs = self.model(x)
        mask = x[:, 1:2] > 0
        count = mask.sum()
        loss = ((outputs - y) ** 2 * mask).sum() / count.clamp(min=1)
        self.log("after", outputs.mean())
        return {
            "loss": {"error": loss, "size": (outputs.abs() * mask).sum() / count.clamp(min=1)},
            "model_outputs": OrderedDict(loss=outputs.mean(), logits=(outputs, outputs.abs()), cache=None),
            "num_items_in_batch": count,
            "found": [{"box": row} for row in outputs],
        }


def evaluated(limit: int | None, method: str = "evaluate", data: Any = None) -> Any:
    """Return the metrics of an evaluation, the outputs of its batches, the model and the generators' state."""
    from pytorch_accel_lite.callbacks import MetricsCallback

    seen: list[Any] = []

    def keep(trainer: Trainer, batch: Any, batch_output: Any, **kwargs: Any) -> None:
        trainer.log("from_callback", batch[0].mean())
        trainer.accelerator.gather_for_metrics(batch[0])  # with it, processes have filler batches
        seen.append((len(batch[0]), batch_output))

    def logits(batch: Any, batch_output: Any) -> Any:
        return batch_output["model_outputs"]["logits"][0].flatten(), batch[1].flatten()

    mean = MetricsCallback(MeanSquaredError(), logits)
    model = FullInEvaluation(limit)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = EvaluatesTokens(model, nn.MSELoss(), optimizer, callbacks=[listener(on_eval_step_end=keep), mean])
    data = data or float64_data(27)
    arguments = {"per_device_batch_size": global_batch(12), "auto_microbatch": True}
    torch.manual_seed(5)
    if method == "evaluate":
        trainer.evaluate(data, **arguments)
    else:
        trainer.train(data, 2, data, train_dataloader_kwargs=IN_ORDER, **arguments)
    return trainer.run_history.to_dict(), seen, model, torch.get_rng_state()


@pytest.mark.extension("metrics")
@pytest.mark.parametrize("method", ["evaluate", "train"])
def test_a_split_evaluation_batch_has_the_same_metrics(method, capsys):
    history, seen, model, generators = evaluated(3, method)
    expected, whole, _, expected_generators = evaluated(None, method)
    assert history.keys() == expected.keys()
    assert len(history) > 6
    for name, values in expected.items():
        assert history[name] == pytest.approx(values)
    for (size, output), (full_size, full) in zip(seen, whole, strict=True):
        assert size == full_size == output["batch_size"]
        assert type(output["model_outputs"]) is OrderedDict
        assert len(output["found"]) == size
        close(output, full)
    if method == "evaluate":
        assert model.sizes == [3] * 8 + [1, 1, 1]
        assert torch.equal(generators, expected_generators)
    lines = [line for line in capsys.readouterr().out.splitlines() if "Out of memory" in line]
    assert lines == [
        f"Out of memory with {samples} samples in evaluation: from now on each evaluation batch is split into {parts} "
        "parts. Losses and metrics are still those of the whole batch."
        for samples, parts in ((12, 2), (6, 4))
    ]


def close(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            close(found[name], value)
    elif isinstance(expected, (list, tuple)):
        assert type(found) is type(expected)
        for one, other in zip(found, expected, strict=True):
            close(one, other)
    else:
        assert found == expected


def test_a_micro_batch_without_items_has_no_weight():
    class MeanOfItems(Trainer):
        def calculate_eval_batch_loss(self, batch):
            outputs = self.model(batch[0])
            items = batch[1] > 0
            return {"loss": outputs[items].mean(), "num_items_in_batch": items.sum()}

    x, _ = float64_data(6).tensors
    data = TensorDataset(x, torch.tensor([1.0, 0, 1, 0, 0, 0])[:, None])
    losses = [
        MeanOfItems(FullInEvaluation(limit), None, None).evaluate(data, auto_microbatch=True)["evaluation_loss"]
        for limit in (3, None)
    ]
    assert losses[0] == pytest.approx(losses[1])


@pytest.mark.extension("metrics")
def test_an_evaluation_without_a_loss_is_split(capsys):
    from pytorch_accel_lite.callbacks import MetricsCallback

    class OnlyOutputs(Trainer):
        def calculate_eval_batch_loss(self, batch):
            return {"loss": None, "model_outputs": self.model(batch[0])}

    mean = MetricsCallback(MeanSquaredError())
    trainer = adamw_trainer(FullInEvaluation(), callbacks=[mean])
    trainer.__class__ = OnlyOutputs
    trainer.evaluate(float64_data(), per_device_batch_size=8, auto_microbatch=True)
    found = trainer.run_history.to_dict()
    trainer.evaluate(float64_data(), per_device_batch_size=3)
    assert trainer.run_history.to_dict() == {name: pytest.approx(values * 2) for name, values in found.items()}
    assert "split into 4 parts" in capsys.readouterr().out


def test_an_evaluation_batch_is_split_only_on_request():
    trainer = adamw_trainer(FullInEvaluation())
    with pytest.raises(torch.OutOfMemoryError):
        trainer.evaluate(float64_data(), per_device_batch_size=4)
    trainer.evaluate(float64_data(), per_device_batch_size=3)
    with pytest.raises(torch.OutOfMemoryError):
        adamw_trainer(FullInEvaluation(0)).evaluate(float64_data(), auto_microbatch=True)


@pytest.mark.extension("logical")
def test_an_evaluation_of_logical_processes_is_not_split():
    with pytest.raises(ValueError, match="does not work with logical_processes"):
        make_trainer(logical_processes=2, seed=0).evaluate(make_data(), auto_microbatch=True)


def test_an_evaluation_in_a_run_is_split_too():
    model = FullInEvaluation()
    ask = listener(on_train_epoch_end=lambda t: t.evaluate(float64_data(), per_device_batch_size=8))
    trainer = adamw_trainer(model, callbacks=[ask, StepBasedEvaluationCallback(1)])
    trainer.train(float64_data(), 1, float64_data(), auto_microbatch=True)
    assert trainer.num_microbatches == 1
    assert len(trainer.run_history.get_metric_values("evaluation_loss")) == 1


def evaluated_on_processes() -> Any:
    history, seen, *_ = evaluated(3 if rank() else None, data=OrderedStream(float64_data(13)))
    expected, whole, *_ = evaluated(None, data=OrderedStream(float64_data(13)))
    assert [output["batch_size"] for _, output in seen] == [6, 1 - rank()]
    assert [size for size, _ in seen] == [size for size, _ in whole]
    return history, expected


@pytest.mark.extension("streams")
def test_one_process_splits_its_evaluation_batches_by_itself(two_ranks):
    for history, expected in two_ranks(evaluated_on_processes):
        for name, values in expected.items():
            assert history[name] == pytest.approx(values)
