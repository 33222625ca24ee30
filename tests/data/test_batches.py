"""The forms of batches and model outputs in training, evaluation and prediction."""

from __future__ import annotations

import dataclasses
import math
import warnings
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from pytorch_accel_lite import Trainer, callbacks
from tests.small_models import (
    Rows,
    adamw_trainer,
    equal_weights,
    float64_data,
    float64_model,
    listener,
    make_trainer,
    train,
    weights,
)


def bert():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
        num_labels=3,
    )
    return transformers.BertForSequenceClassification(config)


def token_rows(size=10, **extra):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(20, (size, 6), generator=generator)
    return [{"input_ids": row, "labels": row[0] % 3, **extra} for row in ids]


def test_a_hugging_face_model_returns_its_own_loss():
    model = bert()
    trainer = adamw_trainer(model)
    trainer.loss_func = None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.train(token_rows(), 2, token_rows(), per_device_batch_size=4)
    losses = trainer.run_history.get_metric_values("train_loss_epoch")
    assert losses[1] < losses[0]
    predictions = trainer.predict(token_rows(), per_device_batch_size=4)
    assert predictions["logits"].shape == (10, 3)


def test_a_hugging_face_model_with_a_loss_func_of_the_users():
    seen = []

    def loss_func(outputs, labels):
        seen.append(labels)
        return nn.functional.cross_entropy(outputs.logits, labels)

    Trainer(bert(), loss_func, None, callbacks=[]).evaluate(token_rows(4), per_device_batch_size=4)
    assert seen[0].tolist() == [int(row["labels"]) for row in token_rows(4)]


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 1).double()

    def forward(self, x, *, scale=1.0):
        return self.linear(x)


def test_other_keys_of_a_dict_batch_are_the_targets():
    seen = []

    def loss_func(outputs, targets):
        seen.append(targets)
        return outputs.mean()

    x, y = float64_data(4).tensors
    one = [{"x": a, "y": b} for a, b in zip(x, y, strict=True)]
    two = [{"x": a, "y": b, "weight": b} for a, b in zip(x, y, strict=True)]
    trainer = Trainer(Named(), loss_func, None, callbacks=[])
    trainer.evaluate(one, per_device_batch_size=4)
    assert torch.equal(seen[0], y)
    trainer.evaluate(two, per_device_batch_size=4)
    assert seen[1].keys() == {"y", "weight"}


def test_an_ignored_key_is_no_target_in_place_of_labels():
    class TakesLabels(Named):
        def forward(self, x, labels=None):
            return self.linear(x)

    class NeedsLabels(Named):
        def forward(self, x, y):  # a class that the outputs depend on, for example
            return self.linear(x)

    seen = []

    def loss_func(outputs, targets):
        seen.append(targets)
        return outputs.mean()

    def target_of(model, **more):
        x, y = float64_data(4).tensors
        rows = [{"x": a, "labels": b, "y": b, **more} for a, b in zip(x, y, strict=True)]
        for row in rows:
            del row["y" if isinstance(model, TakesLabels) else "labels"]
        Trainer(model, loss_func, None, callbacks=[]).evaluate(rows, per_device_batch_size=2)
        return seen.pop().tolist()

    labels = float64_data(4).tensors[1][2:].tolist()
    assert target_of(TakesLabels()) == labels
    with pytest.warns(UserWarning, match=r"takes no argument named 'index', 'weight': ignored") as warned:
        assert target_of(TakesLabels(), index=5, weight=6) == labels
    assert [warning.category for warning in warned].count(UserWarning) == 1
    assert target_of(TakesLabels(), target=5) == target_of(NeedsLabels(), noise=5) == [5, 5]


def test_losses_of_torch_get_the_target_and_no_other_keys():
    x, y = float64_data(4).tensors
    rows = [{"x": a, "y": b, "id": n} for n, (a, b) in enumerate(zip(x, y, strict=True))]
    model = Named()
    expected = functional.mse_loss(model(x), y).item()
    for loss_func in (nn.MSELoss(), functional.mse_loss, partial(functional.mse_loss, reduction="mean")):
        with pytest.warns(UserWarning, match="takes no argument named 'id': ignored"):
            found = Trainer(model, loss_func, None, callbacks=[]).evaluate(rows, per_device_batch_size=4)
        assert found["evaluation_loss"] == pytest.approx(expected)


@dataclasses.dataclass
class Output:
    values: torch.Tensor
    loss: torch.Tensor | None = None


class ReturnsDataclass(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = float64_model()

    def forward(self, x, y=None):
        values = self.inner(x)
        return Output(values, None if y is None else nn.functional.mse_loss(values, y))


def test_outputs_that_are_dataclasses_are_trained_and_predicted():
    model = ReturnsDataclass()
    trainer = Trainer(model, lambda out, y: nn.functional.mse_loss(out.values, y), None, callbacks=[])
    data = float64_data(9)
    assert trainer.evaluate(data, per_device_batch_size=4)["evaluation_loss"] > 0
    predictions = trainer.predict(data, per_device_batch_size=4)
    assert predictions.keys() == {"values"}
    with torch.no_grad():
        assert torch.allclose(predictions["values"], model(data.tensors[0]).values)
    own = Trainer(model, None, torch.optim.SGD(model.parameters(), lr=0.01), callbacks=[])
    own.train([{"x": x, "y": y} for x, y in data], 1)


def test_keys_that_the_model_does_not_take_are_named_once():
    trainer = Trainer(ReturnsDataclass(), None, None, callbacks=[])
    rows = [{"x": x, "y": y, "extra": 1} for x, y in float64_data(4)]
    with pytest.warns(UserWarning, match=r"ReturnsDataclass\.forward takes no argument named 'extra'") as warned:
        trainer.evaluate(rows, per_device_batch_size=2)
    assert [warning.category for warning in warned].count(UserWarning) == 1  # Python 3.12 warns of forked workers


@pytest.mark.sampled
@pytest.mark.parametrize("size", [1, 7, 8, 9])
@pytest.mark.parametrize("make", [float64_data, lambda n: Rows(float64_data(n))], ids=["memory", "rows"])
def test_predictions_come_in_the_order_of_the_dataset(size, make):
    model = float64_model()
    model.train()
    trainer = adamw_trainer(model)
    with torch.no_grad():
        expected = model(float64_data(size).tensors[0])
    predictions = trainer.predict(make(size), per_device_batch_size=3)
    assert torch.allclose(predictions, expected, atol=1e-12, rtol=0)
    assert not predictions.requires_grad
    assert model.training  # as it was before


@pytest.mark.parametrize("sampler", [{"sampler": [3, 1, 1]}, {"batch_sampler": [[3, 1], [1]]}])
def test_predictions_with_a_sampler_come_in_its_order(sampler):
    trainer = adamw_trainer(float64_model())
    expected = trainer.predict(float64_data(4), per_device_batch_size=1)[[3, 1, 1]]
    found = trainer.predict(float64_data(4), per_device_batch_size=2, dataloader_kwargs=sampler)
    assert torch.allclose(found, expected, atol=1e-12, rtol=0)


def test_prediction_needs_no_targets():
    x = float64_data(6).tensors[0]
    trainer = adamw_trainer(float64_model())
    expected = trainer.predict(float64_data(6))
    assert torch.equal(trainer.predict(TensorDataset(x)), expected)
    assert torch.equal(trainer.predict(list(x)), expected)


class OfClass(nn.Module):
    """Takes a class, which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.classes = nn.Linear(3, 3), nn.Embedding(5, 3)

    def forward(self, pixels: torch.Tensor, label: torch.Tensor | None = None) -> torch.Tensor:
        hidden: torch.Tensor = self.layer(pixels)
        return hidden if label is None else hidden + self.classes(label)


def test_predict_passes_optional_inputs_named_like_targets():
    data = [{"pixels": torch.randn(3), "label": index % 5, "target": torch.randn(3)} for index in range(6)]
    model = OfClass()
    trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), callbacks=[])
    for _ in range(2):
        batch = default_collate(data)
        with torch.no_grad():
            expected = model(batch["pixels"], batch["label"])
        assert torch.allclose(trainer.predict(data), expected)
        trainer.evaluate(data, 2)
        without_targets = [{"pixels": sample["pixels"], "label": sample["label"]} for sample in data]
        assert torch.allclose(trainer.predict(without_targets), expected)
        trainer.train(data, 1)


def test_predict_passes_what_forward_requires():
    class NeedsTargets(Named):
        def forward(self, x, y, *, target, labels=None, **others):
            assert (labels, others) == (None, {}), "targets that it does not require"
            return self.linear(x + y + target)

    x, y = float64_data(6).tensors
    rows = [{"x": a, "y": b, "target": b, "labels": b, "label": b} for a, b in zip(x, y, strict=True)]
    trainer = adamw_trainer(NeedsTargets())
    with torch.no_grad():
        expected = trainer.model.linear(x + 2 * y)
    assert torch.allclose(trainer.predict(rows), expected, atol=1e-12, rtol=0)


def test_the_output_of_predict_can_be_overridden():
    class Signs(Trainer):
        def calculate_predict_batch_output(self, batch):
            return super().calculate_predict_batch_output(batch).sign()

    predictions = Signs(float64_model(), None, None, callbacks=[]).predict(float64_data(6))
    assert set(predictions.flatten().tolist()) <= {-1.0, 1.0}


def test_evaluate_keeps_the_history_of_training():
    trainer = adamw_trainer(float64_model())
    data = float64_data(10)
    trainer.train(data, 2, data)
    before = trainer.run_history.to_dict()
    metrics = trainer.evaluate(data)
    x, y = data.tensors
    with torch.no_grad():
        assert metrics == {"evaluation_loss": pytest.approx(nn.functional.mse_loss(trainer.model(x), y).item())}
    assert trainer.run_history.to_dict() == before | {"evaluation_loss": [metrics["evaluation_loss"]]}
    assert trainer.evaluate() == metrics  # the last evaluation dataset


def test_a_loss_module_with_parameters_of_its_own_is_trained_too():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, outputs, targets):
            return nn.functional.mse_loss(self.scale * outputs, targets)

    model, loss_func = float64_model(), Scaled()
    optimizer = torch.optim.SGD([*model.parameters(), *loss_func.parameters()], lr=0.1)
    trainer = adamw_trainer(model, loss_func, optimizer)
    trainer.train(float64_data(12), 1, per_device_batch_size=2, gradient_accumulation_steps=4)
    assert loss_func.scale.item() != 1.0


RAGGED = [(torch.arange(12.0 - i) / 10, torch.tensor([float(i)])) for i in range(8)]


def collate_ragged(samples: Any) -> Any:
    """A list of sequences of unequal length, and their targets."""
    return [sequence for sequence, _ in samples], torch.stack([target for _, target in samples])


class OfSequences(nn.Module):
    def __init__(self, room: float = math.inf) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.room = nn.Linear(1, 1), room

    def forward(self, sequences: list[torch.Tensor]) -> torch.Tensor:
        if sum(map(len, sequences)) > self.room:
            raise MemoryError
        return torch.stack([self.linear(sequence[:, None]).sum(0) for sequence in sequences])


def test_losses_of_lists_of_unequal_tensors_count_by_samples():
    trainer = adamw_trainer(OfSequences(), optimizer=None)
    losses = [trainer.evaluate(RAGGED, size, {"num_workers": 0}, collate_ragged)["evaluation_loss"] for size in (8, 3)]
    assert losses[0] == pytest.approx(losses[1])


@pytest.mark.extension("failed_batches")
@pytest.mark.parametrize("collate", [collate_ragged, lambda samples: tuple(collate_ragged(samples))])
def test_batches_with_lists_of_unequal_tensors_split_by_samples(collate):
    def run(room: float) -> Any:
        model = OfSequences(room)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        trainer = adamw_trainer(model, optimizer=optimizer)
        arguments = {"collate_fn": collate, "train_dataloader_kwargs": {"shuffle": False, "num_workers": 0}}
        trainer.train(RAGGED, 2, per_device_batch_size=8, auto_microbatch=True, **arguments)
        return trainer

    whole, split = run(math.inf), run(45)
    assert (whole.num_microbatches, split.num_microbatches) == (1, 2)
    assert torch.allclose(split.model.linear.weight, whole.model.linear.weight, rtol=1e-5)
    assert split.run_history.to_dict()["train_loss_epoch"] == pytest.approx(
        whole.run_history.to_dict()["train_loss_epoch"], rel=1e-5
    )


class OwnBatch:
    """A batch whose contents only the step knows."""

    def __init__(self, samples: Any) -> None:
        self.x, self.y = map(torch.stack, zip(*samples, strict=True))


class OfOwnBatches(Trainer):
    def calculate_train_batch_loss(self, batch):
        return {"loss": self.loss_func(self.model(batch.x), batch.y)}


@pytest.mark.extension("failed_batches")
def test_batches_of_a_class_of_the_users_are_counted_and_guarded():
    def run(*listed: Any, **kwargs: Any) -> Trainer:
        trainer = make_trainer(listed, float64_model(), OfOwnBatches)
        trainer.train(float64_data(10), 1, per_device_batch_size=4, collate_fn=OwnBatch, **kwargs)
        return trainer

    torch.manual_seed(0)
    plain = run()
    torch.manual_seed(0)
    guarded = run(callbacks.SkipFailedBatchesCallback())
    assert equal_weights(weights(guarded.model), weights(plain.model))
    assert plain.run_history.to_dict() == guarded.run_history.to_dict()

    class Full(OfOwnBatches):
        def calculate_train_batch_loss(self, batch):
            raise MemoryError

    trainer = make_trainer(model=float64_model(), trainer_class=Full)
    with pytest.raises(ValueError, match="A batch of type OwnBatch cannot be split"):
        trainer.train(float64_data(8), 1, collate_fn=OwnBatch, auto_microbatch=True)


@pytest.mark.parametrize("size", [4, 3, 5, 8])
def test_predictions_that_are_a_list_of_samples_stay_one(size):
    class Detector(nn.Module):
        def forward(self, x):
            return [{"scores": row.repeat(int(row) % 3), "label": row[0]} for row in x]

    found = Trainer(Detector(), None, None, callbacks=[]).predict(TensorDataset(torch.arange(8.0)[:, None]), size)
    assert [float(sample["label"]) for sample in found] == list(range(8))
    assert [len(sample["scores"]) for sample in found] == [index % 3 for index in range(8)]


def boxes_of(index: int, number: int) -> dict[str, torch.Tensor]:
    """The boxes and labels of an image, predicted or true."""
    return {"boxes": torch.full((number, 4), float(index)), "labels": torch.full((number,), index)}


@pytest.mark.parametrize("size", [4, 5, 8])
def test_each_image_may_have_as_many_boxes_as_a_batch_has_images(size):
    class Detector(nn.Module):
        def forward(self, x):
            return [boxes_of(int(row), 4) for row in x]

    found = Trainer(Detector(), None, None, callbacks=[]).predict(TensorDataset(torch.arange(8.0)[:, None]), size)
    assert [sample["labels"].tolist() for sample in found] == [[index] * 4 for index in range(8)]


@pytest.mark.extension("failed_batches")
def test_targets_with_as_many_boxes_as_images_split_by_image():
    seen = []

    class Detecting(Trainer):
        def calculate_train_batch_loss(self, batch):
            images, targets = batch
            if len(images) > 2:
                raise MemoryError
            seen.append([target["labels"].tolist() for target in targets])
            return {"loss": self.model(torch.stack(images)).mean(), "batch_size": len(images)}

    trainer = make_trainer(model=nn.Linear(1, 1), trainer_class=Detecting, loss_func=None)
    data = [(torch.tensor([float(index)]), boxes_of(index, 4)) for index in range(4)]
    kwargs: dict[str, Any] = {"train_dataloader_kwargs": {"shuffle": False, "num_workers": 0}, "auto_microbatch": True}
    kwargs["collate_fn"] = lambda samples: tuple(zip(*samples, strict=True))
    trainer.train(data, 1, per_device_batch_size=4, **kwargs)
    assert seen == [[[0] * 4, [1] * 4], [[2] * 4, [3] * 4]]


@pytest.mark.extension("streams")
@pytest.mark.parametrize("together", [list, tuple])
def test_images_with_boxes_from_a_stream_are_counted(together):
    class Images(IterableDataset):
        def __iter__(self):
            return ((torch.zeros(3, 2 + index, 2), boxes_of(index, 4)) for index in range(5))

    class Detecting(Trainer):
        def calculate_train_batch_loss(self, batch):
            return {"loss": self.model(torch.stack([image.mean((1, 2)) for image in batch[0]])).mean()}

        def calculate_predict_batch_output(self, batch):
            return list(batch[1])

    def collate(samples):
        return together(map(together, zip(*samples, strict=True)))

    trainer = make_trainer(model=nn.Linear(3, 1), trainer_class=Detecting, loss_func=None)
    kwargs: dict[str, Any] = {"per_device_batch_size": 2, "collate_fn": collate}
    trainer.train(Images(), 1, **kwargs)
    assert trainer.progress.samples == 5
    assert [found["labels"].tolist() for found in trainer.predict(Images(), **kwargs)] == [[i] * 4 for i in range(5)]


@pytest.mark.extension("streams")
@pytest.mark.parametrize("is_nested", [False, True])
def test_two_views_in_a_stream_are_not_two_samples(is_nested):
    class Views(IterableDataset):
        def __iter__(self):
            views = {"x": torch.zeros(3)}, {"x": torch.ones(3)}
            return ((views,) if is_nested else views for _ in range(5))

    class Contrasting(Trainer):
        def calculate_train_batch_loss(self, batch):
            first, second = batch[0] if is_nested else batch
            return {"loss": self.model(first["x"] - second["x"]).mean()}

    trainer = make_trainer(model=nn.Linear(3, 1), trainer_class=Contrasting, loss_func=None)
    trainer.train(Views(), 1, per_device_batch_size=4)
    assert trainer.progress.samples == 5


def test_predict_refuses_lists_of_unequal_length():
    class Odd(nn.Module):
        def forward(self, x):
            return (x,) * len(x)

    with pytest.raises(ValueError, match=r"lists of \[2, 3\] elements"):
        Trainer(Odd(), None, None, callbacks=[]).predict(TensorDataset(torch.zeros(5, 2)), 3)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
def test_scripted_models_and_forwards_of_one_instance_are_called():
    scripted = Trainer(torch.jit.script(nn.Linear(5, 1)), None, None, callbacks=[])
    assert scripted.predict(TensorDataset(torch.zeros(4, 5))).shape == (4, 1)
    model = nn.Linear(5, 1)
    model.forward = lambda inputs, scale: scale * nn.Linear.forward(model, inputs)
    data = [{"inputs": torch.zeros(5), "scale": torch.ones(1)}] * 4
    assert Trainer(model, None, None, callbacks=[]).predict(data).shape == (4, 1)


@pytest.mark.extension("failed_batches")
def test_values_that_are_not_per_sample_are_in_every_part():
    seen: list[Any] = []

    class WithConstant(Trainer):
        def calculate_train_batch_loss(self, batch):
            inputs, constant, targets = batch
            if len(inputs) > 1:
                raise MemoryError
            seen.append(constant)
            return {"loss": self.loss_func(self.model(inputs), targets)}

    def collate(samples: Any) -> Any:
        inputs, targets = map(torch.stack, zip(*samples, strict=True))
        return inputs, torch.tensor(5.0), targets

    for size in (2, 3):
        seen.clear()
        trainer = make_trainer(model=float64_model(), trainer_class=WithConstant)
        trainer.train(float64_data(6), 1, per_device_batch_size=size, collate_fn=collate, auto_microbatch=True)
        assert {float(constant) for constant in seen} == {5.0}
        assert trainer.num_microbatches == size


def test_a_single_loss_may_have_the_name_of_the_sum():
    class One(Trainer):
        def calculate_eval_batch_loss(self, batch):
            return {"loss": {"loss": super().calculate_eval_batch_loss(batch)["loss"]}}

    model = float64_model()
    arguments = model, nn.MSELoss(), None
    assert One(*arguments, callbacks=[]).evaluate(float64_data(7), 3) == Trainer(*arguments, callbacks=[]).evaluate(
        float64_data(7), 3
    )


def test_a_wrapped_forward_gets_the_keys_of_its_class():
    class Model(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs)

    model = Model(5, 1)
    inner = model.forward
    model.forward = lambda *arguments, **keywords: inner(*arguments, **keywords)
    data = [{"inputs": torch.zeros(5), "note": torch.ones(1)}] * 4
    assert Trainer(model, nn.MSELoss(), None, callbacks=[]).evaluate(data)["evaluation_loss"] > 0


class Both(NamedTuple):
    value: torch.Tensor
    double: torch.Tensor


class ReturnsBoth(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = float64_model()

    def forward(self, x):
        return Both(self.inner(x), 2 * self.inner(x))


def test_predictions_keep_named_tuples():
    found = Trainer(ReturnsBoth(), None, None, callbacks=[]).predict(float64_data(5), per_device_batch_size=2)
    assert type(found) is Both
    assert found.value.shape == (5, 1)
    assert torch.equal(found.double, 2 * found.value)


def test_a_forward_without_a_signature_is_called():
    model, x = nn.Module(), torch.randn(5, 2)
    model.forward = torch.tanh
    assert torch.equal(Trainer(model, None, None, callbacks=[]).predict(TensorDataset(x), 2), x.tanh())


def test_samples_left_out_by_the_collate_function_do_not_count():
    def leave_out_the_first(samples: Any) -> Any:
        return default_collate(samples[1:])

    x, y = float64_data(7)[[1, 2, 3, 5, 6]]
    trainer = adamw_trainer(float64_model(), optimizer=None)
    found = trainer.evaluate(Rows(float64_data(7)), 4, {"num_workers": 0}, leave_out_the_first)
    assert found["evaluation_loss"] == pytest.approx(nn.functional.mse_loss(trainer.model(x), y).item())


def test_a_batch_without_targets_counts_only_the_samples_in_it():
    class Means(Trainer):
        def calculate_eval_batch_loss(self, batch):
            return {"loss": batch.mean()}

    def leave_out_the_first(samples: Any) -> Any:
        return torch.stack(samples[1:])

    found = Means(nn.Linear(1, 1), None, None, callbacks=[]).evaluate(
        list(torch.arange(7.0)), 4, {"num_workers": 0}, leave_out_the_first
    )
    assert found["evaluation_loss"] == pytest.approx((1 + 2 + 3 + 5 + 6) / 5)


@pytest.mark.extension("failed_batches")
def test_split_outputs_that_cannot_be_merged_become_a_list():
    class Alike(Trainer):
        def calculate_train_batch_loss(self, batch):
            if len(batch[0]) > 3:
                raise MemoryError
            output = super().calculate_train_batch_loss(batch)
            return output | {"alike": output["model_outputs"] @ output["model_outputs"].T}

    seen: list[Any] = []
    look = listener(on_train_step_end=lambda t, batch_output, **_: seen.extend(batch_output["alike"]))
    train(make_trainer([look], trainer_class=Alike), size=5, batch_size=5, auto_microbatch=True)
    assert [alike.shape for alike in seen] == [(2, 2), (3, 3)]


class Graphs:
    """A batch of another library: no mapping, whose tensors have a row for each node."""

    def __init__(self, samples):
        self.x = torch.cat(samples)
        self.nodes = [len(x) for x in samples]
        self.num_graphs = len(samples)

    def to(self, device, **kwargs):
        return self


class GraphTrainer(Trainer):
    def calculate_train_batch_loss(self, batch):
        means = torch.stack([rows.mean(0) for rows in batch.x.split(batch.nodes)])
        return {"loss": self.model(means).square().mean()}


def trained_on_graphs() -> Any:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    trainer = GraphTrainer(model, None, torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[], seed=0)
    graphs = [torch.full((2 + n % 3, 2), float(n)) for n in range(9)]
    trainer.train(graphs, 2, per_device_batch_size=4, collate_fn=Graphs, train_dataloader_kwargs={"num_workers": 0})
    return trainer.progress.samples, weights(trainer.get_model())


@pytest.mark.processes
def test_a_process_without_samples_needs_no_batch_size(two_ranks):
    (samples, first), (_, second) = two_ranks(trained_on_graphs)
    assert samples == 18
    assert equal_weights(first, second)


@pytest.mark.extension("streams")
@pytest.mark.parametrize("size", ["num_graphs", "batch_size", "attributes"])
def test_sizes_of_objects_in_a_stream_are_inferred(size):
    class Packed:
        def __init__(self, n):
            self.x = torch.ones(n, 1)
            vars(self)[size] = n

    class OfPacked(Trainer):
        def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
            return [Packed(3), Packed(2)]

        def calculate_train_batch_loss(self, batch):
            return {"loss": self.model(batch.x).mean()}

    model = nn.Linear(1, 1)
    trainer = OfPacked(model, None, torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[])
    trainer.train([0], 1)
    assert trainer.progress.samples == 5
