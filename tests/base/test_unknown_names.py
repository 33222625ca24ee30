"""Names of other libraries, and misspelled ones: the error suggests the name to use."""

from __future__ import annotations

import inspect
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import EarlyStoppingCallback, SaveTrainingStateCallback
from tests.small_models import make_data, make_model, make_trainer, train

INPUTS, TARGETS = make_data().tensors


def message(error: type[Exception], action: Any) -> str:
    with pytest.raises(error) as caught:
        action()
    text = str(caught.value)
    assert "\n" not in text
    return text


TRAINER: list[tuple[dict[str, Any], str]] = [
    ({"num_epochs": 8}, "pass num_epochs to train()."),
    ({"sed": 3}, "Did you mean 'seed'?"),
    ({"zzz": 3}, "it has model, loss_func, optimizer,"),
]


@pytest.mark.parametrize(("arguments", "answer"), TRAINER, ids=[next(iter(a)) for a, _ in TRAINER])
def test_unknown_arguments_of_trainers_are_explained(arguments, answer):
    assert answer in message(TypeError, lambda: make_trainer(**arguments))


TRAIN: list[tuple[dict[str, Any], str]] = [
    ({"seed": 3}, "pass seed to Trainer()."),
    ({"callbacks": []}, "pass callbacks to Trainer()."),
    ({"mixed_precision": "fp16"}, "pass mixed_precision to Trainer()."),
    ({"metrics": {}}, "pass metrics to Trainer()."),
    ({"num_epoch": 3}, "Did you mean 'num_epochs'?"),
]


@pytest.mark.parametrize(("arguments", "answer"), TRAIN, ids=["+".join(a) for a, _ in TRAIN])
def test_unknown_arguments_of_train_are_explained(arguments, answer):
    assert answer in message(TypeError, lambda: make_trainer().train(make_data(), **arguments))


CALLBACKS: list[tuple[Any, str, str]] = [(SaveTrainingStateCallback, "every", "Did you mean 'save_every'?")]


@pytest.mark.parametrize(("callback", "word", "answer"), CALLBACKS, ids=[f"{c.__name__}-{w}" for c, w, _ in CALLBACKS])
def test_unknown_arguments_of_callbacks_are_explained(callback, word, answer):
    assert answer in message(TypeError, lambda: callback(**{word: 3}))


@pytest.mark.parametrize("tool", ["find_lr", "find_batch_size", "diagnose"])
@pytest.mark.extension("tuning", "other_libraries")
def test_unknown_arguments_of_tools_are_explained(tool):
    trainer = make_trainer()
    call = partial(getattr(trainer, tool), make_data())
    assert f"{tool}() has no argument 'dataloader_kwargs': it is called train_" in message(
        TypeError, lambda: call(dataloader_kwargs={})
    )
    assert "pass resume_from to train()." in message(TypeError, lambda: call(resume_from="latest"))
    assert "pass mixed_precision to Trainer()." in message(TypeError, lambda: call(mixed_precision="bf16"))
    assert trainer.progress.update == 0


def test_arguments_of_a_subclass_are_respected():
    class Own(Trainer):
        def __init__(self, model, batch_size, **kwargs):
            super().__init__(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), **kwargs)
            self.batch_size = batch_size

        def train(self, data, epochs, **kwargs):
            super().train(data, epochs, per_device_batch_size=self.batch_size, **kwargs)

    trainer = Own(make_model(), batch_size=3, callbacks=[])
    trainer.train(make_data(), epochs=2)
    assert trainer.progress.update == 4
    assert "Did you mean 'seed'?" in message(TypeError, lambda: Own(make_model(), batch_size=3, sed=1))
    unknown = message(TypeError, lambda: trainer.train(make_data(), epochs=1, eval_dataste=()))
    assert "Did you mean 'eval_dataset'?" in unknown


def test_signatures_are_those_that_editors_and_help_show():
    assert list(inspect.signature(Trainer).parameters)[:3] == ["model", "loss_func", "optimizer"]
    assert "per_device_batch_size" in inspect.signature(Trainer.train).parameters
    assert Trainer.train.__doc__.startswith("Train the model.")
    assert "early_stopping_patience" in inspect.signature(EarlyStoppingCallback).parameters


@pytest.mark.extension("common_mistakes")
def test_warnings_of_train_point_to_the_calling_line():
    forgotten = torch.optim.SGD(make_model(1).parameters(), lr=0.1)
    trainer = make_trainer(optimizer=forgotten)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train(make_data(), 1)
    assert [Path(warning.filename).name for warning in caught] == [Path(__file__).name]


def test_a_constructor_without_super_init_is_reported():
    class Own(Trainer):
        def __init__(self, model):
            self.model = model

    for call in (Own.train, Own.evaluate, Own.predict):
        text = message(RuntimeError, partial(call, Own(make_model()), make_data()))
        assert text == "Own.__init__ does not call super().__init__(model, loss_func, optimizer)."


# -------------------------------------------------------------------------------------- values of arguments


def test_swapped_loss_and_optimizer_are_reported():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert "must be callable, or None." in message(TypeError, lambda: Trainer(model, optimizer, nn.MSELoss()))


@pytest.mark.parametrize(
    ("argument", "value", "answer"),
    [
        ("model", nn.Linear, "an instance, not a class: Linear(...)."),
        ("loss_func", nn.MSELoss, "an instance, not a class: MSELoss(...)."),
        ("accelerator", Accelerator, "an instance, not a class: Accelerator(...)."),
    ],
)
def test_a_class_passed_as_an_instance_is_named(argument, value, answer):
    model = make_model()
    given = {"model": model, "loss_func": nn.MSELoss(), "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    assert answer in message(TypeError, lambda: Trainer(**(given | {argument: value})))


class Samples(list):
    """A dataset."""


DATA: dict[str, tuple[Any, str]] = {
    "a class": (Samples, "must be an instance, not a class: Samples(...)."),
    "a generator": (((x, y) for x, y in make_data()), "whose __iter__ yields samples."),
    "a file's name": ("train.csv", "='train.csv' is not a dataset: it needs __getitem__"),
    "a plain iterable": ({1, 2}, "must be a torch.utils.data.IterableDataset"),
    "inputs and targets": ((INPUTS, TARGETS), "is a tuple: its [0] is not the first sample"),
    "arrays": ((INPUTS.numpy(), TARGETS.numpy()), "Pass a dataset of its tensors: TensorDataset(inputs, targets)."),
    "a table": (pd.DataFrame(INPUTS.numpy()), "is a DataFrame: its [0] is not the first sample"),
}


def test_inputs_and_targets_in_place_of_a_dataset():
    with pytest.raises(TypeError, match=r"(?s)num_epochs=tensor\(.*must be an integer, not Tensor"):
        make_trainer().train(INPUTS, TARGETS)


@pytest.mark.parametrize("name", ["train_dataset", "eval_dataset"])
@pytest.mark.parametrize(("data", "answer"), DATA.values(), ids=DATA.keys())
def test_arguments_that_are_not_a_dataset_are_named(name, data, answer):
    trainer = make_trainer()
    text = message(TypeError, lambda: trainer.train(**({"train_dataset": make_data(), "num_epochs": 1} | {name: data})))
    assert text.startswith(name)
    assert answer in text
    assert trainer.progress.update == 0


def test_tensors_are_data_for_those_who_need_no_targets():
    class Reconstructs(Trainer):
        def calculate_train_batch_loss(self, batch):
            return {"loss": self.loss_func(self.model(batch), batch), "model_outputs": None}

        calculate_eval_batch_loss = calculate_train_batch_loss

    model = nn.Linear(4, 4)
    trainer = make_trainer(model=model, trainer_class=Reconstructs)
    trainer.train(INPUTS, 1, list(INPUTS), per_device_batch_size=2)
    assert trainer.progress.update == 3
    pairs = lambda samples: torch.utils.data.default_collate([(sample, sample) for sample in samples])  # noqa: E731
    train(make_trainer(model=model), train_dataset=list(INPUTS), collate_fn=pairs)
    make_trainer(model=model).train(INPUTS, 1, train_dataloader_kwargs={"collate_fn": pairs, "num_workers": 0})
    assert make_trainer().predict(INPUTS).shape == (6, 1)


@pytest.mark.parametrize(
    ("value", "error", "answer"),
    [
        (
            True,
            TypeError,
            "resume_from=True must be 'latest', for the newest state, the directory or URL of a state, or",
        ),
        ("last", FileNotFoundError, "There is no training state at 'last'. Did you mean resume_from='latest'?"),
        ("Latest", FileNotFoundError, "There is no training state at 'Latest'. Did you mean resume_from='latest'?"),
        (Path("latest"), ValueError, "resume_from='latest' needs a SaveTrainingStateCallback"),
    ],
)
def test_values_that_a_run_cannot_resume_from_are_refused(value, error, answer):
    assert answer in message(error, lambda: train(make_trainer(), resume_from=value))


def test_resuming_from_a_checkpoint_is_explained(tmp_path):
    trainer = make_trainer()
    trainer.save_checkpoint(tmp_path / "model.pt")
    text = message(NotADirectoryError, lambda: train(trainer, resume_from=tmp_path / "model.pt"))
    assert "is a file, but a training state is a directory" in text
    assert "trainer.load_checkpoint(path)" in text


@pytest.mark.parametrize("name", ["last", Path("latest")])
def test_a_directory_may_have_any_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = make_trainer()
    train(trainer)
    trainer.save_training_state(name)
    resumed = make_trainer()
    train(resumed, epochs=2, resume_from=name)
    assert resumed.progress.update == 6


def test_an_overridden_create_scheduler_may_pass_arguments():
    class Own(Trainer):
        def create_scheduler(self):
            return self.create_scheduler_fn(self.optimizer, step_size=2)

    trainer = make_trainer(trainer_class=Own)
    train(trainer, create_scheduler_fn=StepLR)
    assert trainer.scheduler.step_size == 2


def test_missing_targets_are_reported_once():
    only_inputs = TensorDataset(INPUTS)
    text = message(ValueError, lambda: make_trainer(callbacks=[]).train(only_inputs, 1))
    assert "holds no targets for loss_func" in text
    assert "What to do" not in text
