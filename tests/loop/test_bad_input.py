"""Invalid arguments: the error names the argument, its value and the remedy, and nothing is trained."""

from __future__ import annotations

import inspect
import io
import math
import re
import sys
import traceback
from collections import OrderedDict
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, Dataset, TensorDataset

from pytorch_accel_lite import InMemoryRunHistory, Trainer, TrainerCallback, TrainerPlaceholderValues
from pytorch_accel_lite.base.slots import Slot
from pytorch_accel_lite.callbacks import EarlyStoppingCallback, SaveBestModelCallback, get_default_callbacks
from pytorch_accel_lite.extending import DIVISIONS, INFERENCE_STEP, PLOTS, STEP_COMPILER
from pytorch_accel_lite.schedulers import CosineLrScheduler
from tests.shipped_callbacks import NEEDED, SHIPPED
from tests.small_models import (
    Broken,
    equal_weights,
    listener,
    make_data,
    make_model,
    make_trainer,
    notes_of_error,
    train,
    weights,
)


def returning(change: Any) -> type[Trainer]:
    """A trainer whose steps return ``change(output)`` in place of their output."""

    class Returning(Trainer):
        def calculate_train_batch_loss(self, batch):
            return change(super().calculate_train_batch_loss(batch))

        def calculate_eval_batch_loss(self, batch):
            return change(super().calculate_eval_batch_loss(batch))

    return Returning


def instance_of_step_lr(trainer: Trainer) -> StepLR:
    return StepLR(trainer.optimizer, 1)


class NeedsArgument(TrainerCallback):
    def __init__(self, folder: str) -> None:
        self.folder = folder


class NotConstructed(EarlyStoppingCallback):
    def __init__(self) -> None:
        self.mine = 1


WHOLE = "must be an integer"

# What the trainer is made with, the error, and what its message must match.
CONSTRUCTOR: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "model=None": ({"model": None}, TypeError, r"model=None must be a torch\.nn\.Module"),
    "model is a class": ({"model": nn.Linear}, TypeError, r"model=<class .*Linear.*must be an instance"),
    "loss_func is a name": ({"loss_func": "mse"}, TypeError, "loss_func='mse' must be callable.*Pass a loss function"),
    "loss_func is the optimizer": (
        {"loss_func": torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)},
        TypeError,
        r"loss_func=SGD.*must be callable.*comes after it: Trainer\(model, loss_func, optimizer\)",
    ),
    "model is a dataset": ({"model": make_data()}, TypeError, r"model=.*The arguments are Trainer\(model, loss_func"),
    "loss_func is a class of modules": ({"loss_func": nn.MSELoss}, TypeError, r"loss_func=.*MSELoss.*(instance|\(\))"),
    "optimizer is a number": ({"optimizer": 0.1}, TypeError, r"optimizer=0\.1 must be an instance"),
    "callbacks=None": ({"callbacks": None}, TypeError, "callbacks=None must be a list"),
    "callbacks is one callback": ({"callbacks": TrainerCallback()}, TypeError, r"callbacks=.*must be a list"),
    "callbacks is one class": ({"callbacks": TrainerCallback}, TypeError, r"callbacks=.*must be a list"),
    "callbacks is a name": ({"callbacks": "bar"}, TypeError, r"callbacks='bar' must be a list"),
    "a callback is a function": (
        {"callbacks": [print]},
        TypeError,
        r"callbacks: .*print.*is not a TrainerCallback.*Pass",
    ),
    "a callback is another class": (
        {"callbacks": [dict]},
        TypeError,
        r"callbacks: .*dict.*is not a TrainerCallback.*Pass",
    ),
    "a callback is a class that needs arguments": (
        {"callbacks": [NeedsArgument]},
        TypeError,
        r"callbacks: the class NeedsArgument needs arguments: missing.*'folder'. Pass NeedsArgument\(\.\.\.\)",
    ),
    "a callback whose constructor of ours was not called": (
        {"callbacks": [NotConstructed()]},
        TypeError,
        r"NotConstructed\.__init__ does not call super\(\)\.__init__\(\.\.\.\), the constructor of EarlyStopping",
    ),
    "run_history is a class": ({"run_history": InMemoryRunHistory}, TypeError, r"run_history=.*InMemoryRunHistory"),
    "run_history is a dict": ({"run_history": {}}, TypeError, r"run_history=\{\} must be an instance of RunHistory"),
    "accelerator is a name": (
        {"accelerator": "cpu"},
        TypeError,
        r"accelerator='cpu' must be an accelerate\.Accelerator",
    ),
    "seed is a name": ({"seed": "today"}, TypeError, f"seed='today' {WHOLE}"),
    "seed=1.5": ({"seed": 1.5}, TypeError, rf"seed=1\.5 {WHOLE}"),
    "seed=-1": ({"seed": -1}, ValueError, r"seed=-1 must be"),
    "compile_model is a name": (
        {"compile_model": "inductor"},
        TypeError,
        r"compile_model='inductor' must be True, False, or a dict.*torch\.compile",
    ),
    "compile_model=None": ({"compile_model": None}, TypeError, "compile_model=None must be True"),
    "compile_step is a name": (
        {"compile_step": "inductor"},
        TypeError,
        r"compile_step='inductor' must be True, False, or a dict.*torch\.compile",
    ),
    "channels_last=2": ({"channels_last": 2}, TypeError, "channels_last=2 must be True or False"),
    "check_replicas is a word": ({"check_replicas": "no"}, TypeError, "check_replicas='no' must be True or False, not"),
    "deterministic is a word": (
        {"deterministic": "yes"},
        TypeError,
        "deterministic='yes' must be True, False, or None",
    ),
    "seed is too large": ({"seed": 2**40}, ValueError, rf"seed={2**40} must be"),
}


@pytest.mark.parametrize(("arguments", "error", "match"), CONSTRUCTOR.values(), ids=CONSTRUCTOR.keys())
def test_a_trainer_refuses_invalid_arguments(arguments, error, match):
    model = make_model()
    given = {"model": model, "loss_func": nn.MSELoss(), "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with pytest.raises(error, match=match):
        Trainer(**({"callbacks": []} | given | arguments))


# What train() is given, the error, and what its message must match. A Trainer class under "trainer" is used.
OF_LOADERS = {"per_device_batch_size": 8, "train_dataloader_kwargs": None}
TRAIN: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    # counts and limits
    "neither epochs nor updates": (
        {"num_epochs": None},
        ValueError,
        r"num_epochs=None and max_num_train_steps=None.*needs",
    ),
    **{
        f"{name}={value!r}": ({name: value}, ValueError, f"{name}={value} must be at least 1")
        for name in ("num_epochs", "max_num_train_steps", "gradient_accumulation_steps", "per_device_batch_size")
        for value in (0, -2)
    },
    **{
        f"{name}={value!r}": ({name: value}, TypeError, rf"{name}={re.escape(repr(value))} {WHOLE}")
        for name in ("num_epochs", "max_num_train_steps", "gradient_accumulation_steps", "per_device_batch_size")
        for value in (1.5, "3", True, [1])
    },
    "gradient_accumulation_steps=None": (
        {"gradient_accumulation_steps": None},
        TypeError,
        f"gradient_accumulation_steps=None {WHOLE}",
    ),
    "per_device_batch_size=None": ({"per_device_batch_size": None}, TypeError, f"per_device_batch_size=None {WHOLE}"),
    **{
        f"{name}={value!r}": ({name: value}, ValueError, f"{name}={value} must be greater than 0.*Omit it")
        for name in ("gradient_clip_value", "gradient_clip_norm")
        for value in (0, 0.0, -1, -0.5, math.nan)
    },
    **{
        f"{name}={value!r}": ({name: value}, TypeError, f"{name}={value!r} must be a number")
        for name in ("gradient_clip_value", "gradient_clip_norm")
        for value in ("1", True)
    },
    # data
    "train_dataset=None": ({"train_dataset": None}, ValueError, "train_dataset=None: pass a dataset"),
    "train_dataset is empty": ({"train_dataset": []}, ValueError, "train_dataset is empty: list has length 0"),
    "eval_dataset is empty": ({"eval_dataset": make_data(0)}, ValueError, "eval_dataset is empty: TensorDataset"),
    "train_dataset is a number": ({"train_dataset": 5}, TypeError, "train_dataset=5 is not a dataset"),
    "eval_dataset is a number": ({"eval_dataset": 5}, TypeError, "eval_dataset=5 is not a dataset"),
    "train_dataset is a generator": (
        {"train_dataset": (i for i in range(3))},
        TypeError,
        "train_dataset=<generator .* is not a",
    ),
    "train_dataset is a loader of nothing": (
        OF_LOADERS | {"train_dataset": DataLoader([], 2)},
        ValueError,
        "train_dataset is empty: list has length 0",
    ),
    "train_dataset is a loader that leaves nothing": (
        OF_LOADERS | {"train_dataset": DataLoader(make_data(), 7, drop_last=True)},
        ValueError,
        r"train_dataset gives no batch.*drop_last=True.*Lower the batch size",
    ),
    "train_dataset is prepared": (
        OF_LOADERS | {"train_dataset": Accelerator(cpu=True).prepare(DataLoader(make_data()))},
        TypeError,
        r"train_dataset is a DataLoaderShard, which Accelerate has prepared.*without accelerator\.prepare",
    ),
    "train_dataset is a dict of loaders": (
        OF_LOADERS | {"train_dataset": {"a": DataLoader(make_data(), 8)}},
        ValueError,
        r"dataset 'a' \(DataLoader\) cannot be indexed.*Pass its dataset",
    ),
    **{
        f"{name} beside a loader": (
            OF_LOADERS | {"train_dataset": DataLoader(make_data(), 4), name: value},
            ValueError,
            rf"{name}=.* is for a dataset, but train_dataset is a loader \(DataLoader\), which has its own",
        )
        for name, value in {
            "per_device_batch_size": 16,
            "collate_fn": list,
            "train_dataloader_kwargs": {"shuffle": False},
        }.items()
    },
    "eval_dataloader_kwargs beside loaders": (
        {"eval_dataset": {"a": DataLoader(make_data())}, "eval_dataloader_kwargs": {"num_workers": 0}},
        ValueError,
        r"eval_dataloader_kwargs=\{'num_workers': 0\} is for a dataset, but eval_dataset\['a'\] is a loader",
    ),
    **{
        f"eval_dataset has the key {key!r}": (
            {"eval_dataset": {key: make_data(), "b": make_data()}},
            ValueError,
            rf"eval_dataset has the key {key!r}, but keys name the metrics: use non-empty strings",
        )
        for key in (0, "", None)
    },
    "drop_last leaves nothing": (
        {"per_device_batch_size": 7, "train_dataloader_kwargs": {"drop_last": True}},
        ValueError,
        r"train_dataset gives no batch.*drop_last=True.*Lower the batch size",
    ),
    "drop_last leaves nothing to evaluate": (
        {"per_device_batch_size": 3, "eval_dataset": make_data(2), "eval_dataloader_kwargs": {"drop_last": True}},
        ValueError,
        r"eval_dataset.*no batch",
    ),
    "train_dataloader_kwargs is a name": (
        {"train_dataloader_kwargs": "shuffle"},
        TypeError,
        "train_dataloader_kwargs='shuffle' must be a dict",
    ),
    "eval_dataloader_kwargs is a list": (
        {"eval_dataset": make_data(), "eval_dataloader_kwargs": ["shuffle"]},
        TypeError,
        r"eval_dataloader_kwargs=\['shuffle'\] must be a dict",
    ),
    "collate_fn is a number": ({"collate_fn": 3}, TypeError, "collate_fn=3 must be a function"),
    "an unknown dataloader argument": (
        {"train_dataloader_kwargs": {"batchsize": 3}},
        TypeError,
        "the key 'batchsize', which",
    ),
    "a batch size of 0 among the dataloader arguments": (
        {"train_dataloader_kwargs": {"batch_size": 0}},
        ValueError,
        "batch_size=0",
    ),
    "the evaluation dataset in place of the number of epochs": (
        {"num_epochs": make_data()},
        TypeError,
        "num_epochs=<torch.utils.data.dataset.TensorDataset object.*must be an integer, not TensorDataset",
    ),
    "a batch without targets": (
        {"train_dataset": TensorDataset(make_data().tensors[0])},
        ValueError,
        r"no targets for loss_func.*\(inputs, targets\)",
    ),
    "a dict batch with other keys": (
        {"train_dataset": [{"pixels": torch.ones(4), "label": torch.ones(1)}] * 4},
        ValueError,
        r"'label', 'pixels'.*Sequential\.forward.*Rename the keys",
    ),
    "a create_train_dataloader that returns nothing": (
        {"trainer": type("Own", (Trainer,), {"create_train_dataloader": lambda self, batch_size, kwargs=None: None})},
        TypeError,
        "dataloader must be an iterable of batches, not NoneType",
    ),
    # schedulers
    "create_scheduler_fn is a scheduler": (
        {"create_scheduler_fn": instance_of_step_lr},
        TypeError,
        r"create_scheduler_fn=<.*StepLR.*must be a function.*For example: functools\.partial",
    ),
    "create_scheduler_fn is a name": (
        {"create_scheduler_fn": "cosinus"},
        ValueError,
        r"create_scheduler_fn='cosinus' is not the name of a schedule\. Did you mean 'cosine'",
    ),
    "create_scheduler_fn lacks an argument": (
        {"create_scheduler_fn": StepLR},
        TypeError,
        r"create_scheduler_fn=StepLR is called with the optimizer alone: missing.*'step_size'.*functools\.partial",
    ),
    "create_scheduler_fn has an argument in place of the optimizer": (
        {"create_scheduler_fn": partial(StepLR, 3)},
        TypeError,
        r"partial\(StepLR, 3\) passes 3 as the optimizer.*partial\(StepLR, step_size=\.\.\.\)",
    ),
    "create_scheduler_fn takes nothing": (
        {"create_scheduler_fn": lambda: 3},
        TypeError,
        "create_scheduler_fn=<lambda> is called with the optimizer alone.*Let it take the optimizer",
    ),
    "create_scheduler_fn makes a scheduler of another optimizer": (
        {"create_scheduler_fn": lambda _: StepLR(torch.optim.SGD(make_model().parameters(), 0.1), 1)},
        ValueError,
        "create_scheduler_fn returned a StepLR of another optimizer, so the learning rate",
    ),
    "create_scheduler_fn returns a function": (
        {"create_scheduler_fn": CosineLrScheduler.create_scheduler_fn},
        TypeError,
        r"create_scheduler_fn returned partial\(CosineLrScheduler.*, which is not a scheduler.*Call this function, too",
    ),
    "create_scheduler_fn is a list": (
        {"create_scheduler_fn": [StepLR]},
        TypeError,
        r"must be a function that creates a scheduler from an optimizer, not list\. For example",
    ),
    "create_scheduler_fn returns a class": (
        {"create_scheduler_fn": lambda optimizer: StepLR},
        TypeError,
        "create_scheduler_fn returned StepLR, which is a class",
    ),
    "auto_microbatch is a word": ({"auto_microbatch": "yes"}, TypeError, "auto_microbatch='yes' must be True or False"),
    "reset_run_history=None": ({"reset_run_history": None}, TypeError, "reset_run_history=None must be True or False"),
    "create_scheduler_fn makes no scheduler": (
        {"create_scheduler_fn": lambda optimizer: 3},
        TypeError,
        r"create_scheduler_fn.*3.*scheduler",
    ),
    "EVAL_DATALOADER_LEN without eval_dataset": (
        {"create_scheduler_fn": partial(StepLR, step_size=TrainerPlaceholderValues.EVAL_DATALOADER_LEN)},
        ValueError,
        r"EVAL_DATALOADER_LEN.*eval_dataset",
    ),
    "scheduler_interval='step'": (
        {"scheduler_interval": "step"},
        ValueError,
        "scheduler_interval='step' must be 'update' or 'epoch'",
    ),
    "scheduler_interval=1": ({"scheduler_interval": 1}, ValueError, "scheduler_interval=1 must be"),
    "scheduler_interval without a scheduler": (
        {"scheduler_interval": "epoch"},
        ValueError,
        "scheduler_interval='epoch' needs a scheduler. Pass create_scheduler_fn",
    ),
    "scheduler_metric without a scheduler": (
        {"scheduler_interval": "epoch", "scheduler_metric": "train_loss_epoch"},
        ValueError,
        "scheduler_metric='train_loss_epoch' needs a scheduler",
    ),
    "scheduler_metric=3": ({"scheduler_metric": 3}, TypeError, "scheduler_metric=3 must be the name of a metric"),
    "scheduler_metric after updates": (
        {"create_scheduler_fn": ReduceLROnPlateau, "scheduler_metric": "train_loss_epoch"},
        ValueError,
        "scheduler_metric='train_loss_epoch'.*Pass scheduler_interval='epoch' too",
    ),
    "a plateau without scheduler_metric": (
        {"create_scheduler_fn": ReduceLROnPlateau},
        TypeError,
        "ReduceLROnPlateau.step needs.*scheduler_interval='epoch' and scheduler_metric='eval_loss_epoch'",
    ),
    "scheduler_metric for StepLR": (
        {
            "create_scheduler_fn": partial(StepLR, step_size=1),
            "scheduler_interval": "epoch",
            "scheduler_metric": "train_loss_epoch",
        },
        ValueError,
        "scheduler_metric='train_loss_epoch': StepLR.step takes no metric",
    ),
    # what a step returns
    **{
        f"a step that returns {name}": ({"trainer": returning(change)}, error, rf"calculate_train_batch_loss.*{match}")
        for name, change, error, match in [
            ("nothing", lambda output: None, TypeError, "must return a dict with 'loss', not NoneType"),
            ("the loss itself", lambda output: output["loss"], TypeError, "must return a dict with 'loss', not Tensor"),
            (
                "no loss",
                lambda output: {"los": output["loss"]},
                ValueError,
                r"must return a dict with 'loss'.*\['los'\]",
            ),
            ("a number", lambda output: {"loss": 1.5}, TypeError, r"'loss' must be a tensor, not float \(1\.5\)"),
            ("loss=None", lambda output: {"loss": None}, TypeError, r"'loss' must be a tensor, not NoneType"),
            (
                "a loss for each sample",
                lambda output: {"loss": output["loss"].expand(2)},
                ValueError,
                r"\(2,\).*mean\(\)",
            ),
            (
                "a detached loss",
                lambda output: {"loss": output["loss"].detach()},
                ValueError,
                "does not require gradients",
            ),
            ("a whole number", lambda output: {"loss": torch.tensor(3)}, ValueError, "does not require gradients"),
            ("an empty dict of losses", lambda output: {"loss": {}}, ValueError, "empty dict of losses"),
            ("a named number", lambda output: {"loss": {"fit": 1.5}}, TypeError, r"'fit' must be a tensor, not float"),
            (
                "a named loss for each sample",
                lambda output: {"loss": {"fit": output["loss"], "norm": output["loss"].expand(3)}},
                ValueError,
                r"'norm' must have one element.*\(3,\)",
            ),
            (
                "a batch_size that is a name",
                lambda output: output | {"batch_size": "2"},
                TypeError,
                "batch_size='2'; it must be",
            ),
            (
                "a negative batch_size",
                lambda output: output | {"batch_size": -2},
                ValueError,
                "batch_size=-2; it must be",
            ),
            (
                "a number of items that is a name",
                lambda output: output | {"num_items_in_batch": "3"},
                TypeError,
                "num_items_in_batch='3'; it must be a number of items",
            ),
            (
                "a negative number of items",
                lambda output: output | {"num_items_in_batch": -5},
                ValueError,
                "num_items_in_batch=-5; it must be at least 0",
            ),
            (
                "a number of items for each sample",
                lambda output: output | {"num_items_in_batch": torch.ones(2)},
                ValueError,
                r"num_items_in_batch as a tensor of shape \(2,\); it must be one",
            ),
        ]
    },
}


@pytest.mark.parametrize(("arguments", "error", "match"), TRAIN.values(), ids=TRAIN.keys())
def test_train_refuses_bad_arguments_and_changes_nothing(arguments, error, match):
    arguments = dict(arguments)
    trainer = make_trainer(trainer_class=arguments.pop("trainer", Trainer))
    if arguments.get("create_scheduler_fn") is instance_of_step_lr:
        arguments["create_scheduler_fn"] = instance_of_step_lr(trainer)
    start = weights(trainer.model)
    alone = {"num_workers": 0}
    given = {"train_dataset": make_data(), "num_epochs": 1, "per_device_batch_size": 2} | {
        "train_dataloader_kwargs": alone,
        "eval_dataloader_kwargs": alone,
    }
    with pytest.raises(error, match=match):
        trainer.train(**(given | arguments))
    assert equal_weights(weights(trainer.model), start)
    assert trainer.progress.update == 0
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    if type(trainer) is Trainer:  # and is none the worse for it
        train(trainer)
        assert trainer.progress.update == 3


def test_training_without_an_optimizer_is_refused():
    trainer = make_trainer(optimizer=None)
    with pytest.raises(ValueError, match=r"optimizer=None: train\(\) needs"):
        train(trainer)
    assert trainer.evaluate(make_data()).keys() == {"evaluation_loss"}


def test_training_a_frozen_model_is_refused():
    model = make_model().requires_grad_(False)
    with pytest.raises(ValueError, match=r"does not require gradients.*frozen"):
        train(make_trainer(model=model))


def test_a_model_that_returns_no_loss_needs_a_loss_func():
    with pytest.raises(
        ValueError, match=r"loss_func is None and Sequential returned a tensor, not a loss\. Pass a loss_"
    ):
        train(make_trainer(loss_func=None))


def test_accumulation_set_on_the_accelerator_is_refused():
    try:
        trainer = make_trainer(accelerator=Accelerator(gradient_accumulation_steps=2))
        with pytest.raises(ValueError, match=r"gradient_accumulation_steps=2.*Leave it at 1.*train\(\)"):
            train(trainer)
    finally:
        Accelerator()  # the setting belongs to the process


def test_an_evaluation_loss_needs_no_gradient_but_is_checked():
    detached = make_trainer(trainer_class=returning(lambda output: output | {"loss": output["loss"].detach()}))
    assert detached.evaluate(make_data()).keys() == {"evaluation_loss"}
    for change, error, match in [
        (lambda output: None, TypeError, "calculate_eval_batch_loss must return a dict"),
        (lambda output: {}, ValueError, "calculate_eval_batch_loss must return a dict with 'loss'"),
        (lambda output: {"loss": output["loss"].new_empty(0)}, ValueError, r"calculate_eval_batch_loss.*\(0,\)"),
        (lambda output: {"loss": 1.0}, TypeError, r"calculate_eval_batch_loss.*must be a tensor"),
    ]:
        with pytest.raises(error, match=match):
            make_trainer(trainer_class=returning(change)).evaluate(make_data())


EVALUATE: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "nothing": ({"dataset": None}, ValueError, "dataset=None: pass a dataset"),
    "an empty dataset": ({"dataset": make_data(0)}, ValueError, "dataset is empty: TensorDataset has length 0"),
    "a number": ({"dataset": 5}, TypeError, "^dataset=5 is not a dataset"),
    "arguments beside a DataLoader": (
        {"dataset": DataLoader(make_data())},
        ValueError,
        r"dataloader_kwargs=\{'num_workers': 0\} is for a dataset, but dataset is a loader",
    ),
    "batches of 0": ({"per_device_batch_size": 0}, ValueError, "per_device_batch_size=0 must be at least 1"),
    "batches of 1.5": ({"per_device_batch_size": 1.5}, TypeError, rf"per_device_batch_size=1\.5 {WHOLE}"),
}


@pytest.mark.parametrize("method", ["evaluate", "predict"])
@pytest.mark.parametrize(("arguments", "error", "match"), EVALUATE.values(), ids=EVALUATE.keys())
def test_evaluate_and_predict_refuse_bad_arguments(method, arguments, error, match):
    trainer = make_trainer()
    with pytest.raises(error, match=match):
        getattr(trainer, method)(**({"dataset": make_data(), "dataloader_kwargs": {"num_workers": 0}} | arguments))
    assert trainer.run_history.to_dict() == {}
    assert trainer.predict(make_data(3)).shape == (3, 1)


def test_evaluate_refuses_datasets_without_names():
    with pytest.raises(ValueError, match="eval_dataset has the key 0, but keys name the metrics"):
        make_trainer().evaluate(OrderedDict({"a": make_data(), 0: make_data()}))


PREDICT: dict[str, tuple[Any, type[Exception], str]] = {
    "a number": (
        lambda batch: 3,
        TypeError,
        "predict: the model returned int.*Override calculate_predict_batch_output",
    ),
    "nothing": (lambda batch: None, TypeError, "predict: the model returned NoneType"),
    "a scalar": (lambda batch: torch.tensor(1.0), ValueError, "predict: .*without a sample dimension"),
}


@pytest.mark.parametrize(("output", "error", "match"), PREDICT.values(), ids=PREDICT.keys())
def test_predict_refuses_outputs_that_cannot_be_concatenated(output, error, match):
    trainer_class = type("Own", (Trainer,), {"calculate_predict_batch_output": lambda self, batch: output(batch)})
    with pytest.raises(error, match=match):
        make_trainer(trainer_class=trainer_class).predict(make_data(4), per_device_batch_size=2)


@pytest.mark.parametrize("key", ["shuffle", "drop_last"])
def test_predict_refuses_to_reorder_or_leave_out_samples(key):
    trainer = make_trainer()
    arguments = {"dataset": make_data(5), "per_device_batch_size": 2}
    match = rf"dataloader_kwargs has {key}=True, but predict returns .* for every sample, in the order.*Omit {key}"
    with pytest.raises(ValueError, match=match):
        trainer.predict(**arguments, dataloader_kwargs={key: True})
    with pytest.raises(ValueError, match=match):
        next(trainer.predict_iter(**arguments, dataloader_kwargs={key: True}))
    with pytest.raises(ValueError, match=match.replace("loader_kwargs", "set")):
        trainer.predict(DataLoader(make_data(5), 2, **{key: True}))
    assert torch.equal(trainer.predict(**arguments, dataloader_kwargs={key: False}), trainer.predict(**arguments))


def test_predict_refuses_outputs_of_unequal_shape():
    class Ragged(Trainer):
        def calculate_predict_batch_output(self, batch):
            return torch.zeros(len(batch[0]), int(batch[0].abs().sum() * 1000) % 97)

    with pytest.raises(ValueError, match=r"predict: outputs of shapes.*Pad them.*calculate_predict_batch_output"):
        make_trainer(trainer_class=Ragged).predict(make_data(6), per_device_batch_size=2)


# --------------------------------------------------------------------------------------------- launches


IGNORES_FSDP = r"FSDP plugin.*would ignore it.*leave the plugin out"


@pytest.mark.parametrize(("name", "value", "message"), [
    ("WORLD_SIZE", "2", r"WORLD_SIZE=2.*sees 1.*PartialState.*cpu=True"),
    *(("ACCELERATE_USE_FSDP", value, IGNORES_FSDP) for value in ("true", "1", "True")),
])  # fmt: skip
def test_a_launcher_that_accelerate_did_not_notice_is_refused(monkeypatch, name, value, message):
    accelerator = Accelerator()
    monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=message):
        make_trainer(accelerator=accelerator)


@pytest.mark.parametrize(("sizes", "fsdp", "message"), [
    ({"cp_size": 2}, False, r"has cp_size=2: several processes would share the samples.*not supported"),
    ({"tp_size": 2}, True, r"tp_size=2 beside FSDP, which Accelerate cannot combine.*distributed_config"),
])  # fmt: skip
def test_unsupported_parallelism_is_an_error(sizes, fsdp, message, no_accelerator):
    parallelism_config = pytest.importorskip(
        "accelerate.parallelism_config", reason="ParallelismConfig needs accelerate 1.10"
    )
    accelerator = Accelerator(cpu=True)
    accelerator.state.parallelism_config = parallelism_config.ParallelismConfig(**sizes)
    if fsdp:
        accelerator.state.distributed_type = DistributedType.FSDP
    with pytest.raises(ValueError, match=message):
        make_trainer(accelerator=accelerator)


def test_a_missing_fsdp_plugin_is_no_error(monkeypatch):
    accelerator = Accelerator()
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    monkeypatch.setenv("WORLD_SIZE", "1")
    trainer = make_trainer(accelerator=accelerator)
    train(trainer)
    assert trainer.progress.update == 3


# ----------------------------------------------------------------------------- errors of the user's code


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("seed", [None, 0])
def test_an_error_in_a_training_dataset_keeps_its_traceback(workers, seed):
    trainer = make_trainer(seed=seed)
    with pytest.raises(OSError, match="scan 4 is unreadable") as caught:
        train(trainer, train_dataset=Broken(), train_dataloader_kwargs={"num_workers": workers, "shuffle": False})
    text = "".join(traceback.format_exception(caught.value))
    assert 'raise OSError(f"scan {index} is unreadable")' in text
    assert "small_models.py" in text
    assert "__getitem__" in text
    train(trainer)
    assert trainer.progress.epochs_completed == 1


@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_an_error_in_an_evaluated_dataset_keeps_its_traceback(method):
    trainer = make_trainer()
    with pytest.raises(OSError, match="scan 4 is unreadable") as caught:
        getattr(trainer, method)(Broken(), dataloader_kwargs={"num_workers": 0})
    assert 'raise OSError(f"scan {index} is unreadable")' in "".join(traceback.format_exception(caught.value))


def broken(*args, **kwargs):
    raise LookupError("not here")


@pytest.mark.parametrize(("of_trainer", "of_train"), [
    ({}, {"collate_fn": broken, "train_dataloader_kwargs": {"num_workers": 0}}),
    ({}, {"create_scheduler_fn": broken}),
    ({"callbacks": [listener(on_optimizer_step_end=broken)]}, {}),
    ({"loss_func": broken}, {}),
])  # fmt: skip
def test_an_error_in_the_users_functions_keeps_its_traceback(of_trainer, of_train):
    with pytest.raises(LookupError, match=r"^not here") as caught:
        train(make_trainer(**of_trainer), **of_train)
    assert "in broken" in "".join(traceback.format_exception(caught.value))


def test_an_error_in_a_model_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        train(make_trainer(model=make_model(features=5)))
    assert "linear" in "".join(traceback.format_exception(caught.value))


def test_an_error_is_not_masked_by_an_output_that_nobody_reads(monkeypatch):
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    def fail(trainer, **kwargs):
        monkeypatch.setattr(sys, "stdout", Closed())
        raise ValueError("the error itself")

    def fail_too(trainer, **kwargs):
        raise RuntimeError("in the ending event")

    with pytest.raises(ValueError, match="the error itself"):
        train(make_trainer([listener(on_train_step_end=fail, on_training_run_end=fail_too)]))


# ---------------------------------------------------------------------------------- arguments of callbacks


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: EarlyStoppingCallback(0), ValueError, "early_stopping_patience=0 must be at least 1"),
        (lambda: EarlyStoppingCallback(early_stopping_threshold=-1), ValueError, "early_stopping_threshold=-1 must be"),
        (lambda: EarlyStoppingCallback(watch_metric=None), TypeError, r"\(watch_metric=None\) must be the name of a"),
        (lambda: SaveBestModelCallback("best.pt", ""), TypeError, r"\(watch_metric=''\) must be the name of a metric"),
        (
            lambda: SaveBestModelCallback("best.pt", greater_is_better="max"),
            TypeError,
            "greater_is_better='max' must be",
        ),
        (lambda: get_default_callbacks("no"), TypeError, "progress_bar='no' must be True or False"),
        (lambda: get_default_callbacks([]), TypeError, r"progress_bar=\[\] must be True or False"),
    ],
)
def test_callbacks_refuse_bad_arguments(make, error, match):
    with pytest.raises(error, match=match):
        make()


def booleans_of(function: Any) -> list[str]:
    """The arguments of a function that are declared as booleans."""
    declared = inspect.signature(function).parameters.values()
    return [p.name for p in declared if p.annotation in ("bool", "bool | None")]


@pytest.mark.parametrize("callback_class", SHIPPED)
def test_callbacks_refuse_words_as_booleans(callback_class, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in booleans_of(callback_class):
        with pytest.raises(TypeError, match=f"{name}='yes' must be True"):
            callback_class(**NEEDED.get(callback_class.__name__, {}) | {name: "yes"})


@pytest.mark.parametrize(
    "call",
    [
        lambda t, **word: t.evaluate(make_data(), **word),
        lambda t, **word: t.predict(make_data(), **word),
        pytest.param(lambda t, **word: t.check(make_data(), **word), marks=pytest.mark.extension("checking")),
        lambda t, **word: t.save_checkpoint("a.pt", **word),
        lambda t, **word: t.load_checkpoint("a.pt", **word),
        lambda t, **word: t.save_model("a", **word),
        lambda t, **word: t.save_training_state("a", **word),
    ],
    ids=["evaluate", "predict", "check", "save_checkpoint", "load_checkpoint", "save_model", "save_training_state"],
)
def test_methods_refuse_words_as_booleans(call, request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = make_trainer()
    names = booleans_of(getattr(trainer, request.node.callspec.id))
    assert names
    for name in names:
        with pytest.raises(TypeError, match=f"{name}='no' must be True"):
            call(trainer, **{name: "no"})
    assert not list(tmp_path.iterdir())


def test_numpy_booleans_and_0_and_1_are_accepted():
    train(make_trainer(channels_last=np.False_, check_replicas=0), auto_microbatch=np.bool_(False), reset_run_history=1)


def test_a_key_that_a_step_does_not_return_is_explained():
    reads = listener(on_train_step_end=lambda trainer, batch_output, **kwargs: batch_output["logits"])
    with pytest.raises(KeyError, match=r"^'logits'") as caught:
        train(make_trainer([reads]))
    assert "batch_output has the keys 'loss', 'model_outputs', 'batch_size'." in notes_of_error(caught.value)


def test_an_evaluation_metric_is_absent_before_the_first():
    looks = listener(on_train_epoch_end=lambda trainer: trainer.run_history.get_latest_metric("eval_loss_epoch"))
    with pytest.raises(ValueError, match="There has been no evaluation yet, which follows on_train_epoch_end"):
        train(make_trainer([looks]), eval_dataset=True)


def test_a_path_named_like_a_metric_is_reported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match="If you mean the metric, pass watch_metric='train_loss_epoch'"):
        train(make_trainer([SaveBestModelCallback("train_loss_epoch")]), eval_dataset=True)


def test_a_history_refuses_invalid_names_and_values():
    history = InMemoryRunHistory()
    with pytest.raises(TypeError, match="metric_value=None is not a value of 'a'"):
        history.update_metric("a", None)
    with pytest.raises(TypeError, match="metric_name=3 must be the name"):
        history.update_metric(3, 1.0)
    assert not list(history)


def test_numpy_integers_are_accepted():
    trainer = make_trainer(seed=np.int64(3))
    trainer.train(make_data(), np.int64(1), make_data(), np.int64(2), gradient_accumulation_steps=np.int64(2))
    assert trainer.progress.update == 2
    assert "evaluation_loss" in trainer.evaluate(make_data(), np.int64(2))


def test_a_loss_named_like_the_sum_is_refused():
    losses = {"loss": torch.tensor(1.0), "aux": torch.tensor(3.0)}
    trainer = make_trainer(trainer_class=returning(lambda output: {"loss": losses}))
    with pytest.raises(ValueError, match=r"calculate_eval_batch_loss .* one called 'loss', like"):
        trainer.evaluate(make_data())


def test_batches_that_count_no_items_are_a_clear_error():
    class Counts(Trainer):
        items = 0

        def calculate_train_batch_loss(self, batch):
            return super().calculate_train_batch_loss(batch) | {"num_items_in_batch": torch.tensor(self.items)}

        calculate_eval_batch_loss = calculate_train_batch_loss

    trainer = make_trainer(trainer_class=Counts)
    with pytest.raises(ValueError, match=r"num_items_in_batch .* is 0 in every batch"):
        train(trainer)
    with pytest.raises(ValueError, match=r"num_items_in_batch .* is 0 in every batch"):
        trainer.evaluate(make_data())
    trainer.items = 1
    assert trainer.evaluate(make_data()).keys() == {"evaluation_loss"}


# --------------------------------------------------------------------------------------- only half overridden


class OwnTraining(Trainer):
    """Computes its own loss, in training only."""

    def calculate_train_batch_loss(self, batch):
        return {"loss": (self.model(batch[0]) - batch[1]).square().mean()}


class OwnTrainStep(OwnTraining):
    def train_step(self, batch):
        self.update(self.calculate_train_batch_loss(batch)["loss"])


@pytest.mark.parametrize(
    "trainer_class", [OwnTraining, pytest.param(OwnTrainStep, marks=pytest.mark.extension("manual_optimization"))]
)
def test_a_training_loss_without_one_to_evaluate_is_refused(trainer_class):
    trainer = make_trainer(trainer_class=trainer_class, loss_func=None)
    with pytest.raises(ValueError, match=r"a tensor, not a loss.*override .*calculate_eval_batch_loss"):
        train(trainer, eval_dataset=True)
    train(trainer)


def test_a_model_with_its_own_loss_may_train_on_another():
    class Model(nn.Linear):
        def forward(self, x, labels=None):
            outputs = super().forward(x)
            return {"outputs": outputs, "loss": None if labels is None else (outputs - labels).square().mean()}

    class Smooth(Trainer):
        def calculate_train_batch_loss(self, batch):
            return {"loss": self.model(**batch)["loss"] / 2}

    x, y = make_data(6).tensors

    def run(trainer_class):
        torch.manual_seed(0)
        model = Model(4, 1)
        trainer = make_trainer(model=model, trainer_class=trainer_class, loss_func=None)
        data = [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]
        train(trainer, train_dataset=data, eval_dataset=data)
        return trainer.run_history.get_latest_metric("train_loss_epoch")

    assert run(Smooth) < run(Trainer)


def test_a_model_may_override_how_its_mode_changes():
    class Freezes(nn.Linear):
        def train(self, mode=True):
            return super().train(False)

    trainer = train(make_trainer(model=Freezes(4, 1)), eval_dataset=True)
    assert not trainer.get_model().training


class Sized(Dataset[Any]):
    """Reports any length, and has a sample that is missing."""

    def __init__(self, length: Any, missing: int = -1) -> None:
        self.length, self.missing = length, missing

    def __len__(self):
        if isinstance(self.length, Exception):
            raise self.length
        return self.length

    def __getitem__(self, index):
        return None if index == self.missing else (torch.ones(1), torch.ones(1))


@pytest.mark.parametrize("length", [-3, 8.0, 10**30, "8"])
def test_an_invalid_dataset_length_is_named(length):
    with pytest.raises((TypeError, ValueError), match=rf"train_dataset: __len__ of Sized returned {length!r}. It must"):
        make_trainer([], nn.Linear(1, 1)).train(Sized(length), 1)


def test_an_error_of_len_names_the_argument():
    with pytest.raises(RuntimeError, match=r"^no index") as caught:
        make_trainer([], nn.Linear(1, 1)).train(Sized(8), 1, eval_dataset=Sized(RuntimeError("no index")))
    assert "raised by __len__ of eval_dataset, a Sized" in caught.value.__notes__


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_of_none_is_named(workers, seed):
    trainer = make_trainer([], nn.Linear(1, 1), seed=seed)
    with pytest.raises(TypeError) as caught:
        trainer.train(Sized(8, missing=5), 1, train_dataloader_kwargs={"num_workers": workers})
    assert any("In reading Sized[5]: this sample is None" in note for note in caught.value.__notes__)


def test_an_argument_that_no_dataloader_has_is_named():
    with pytest.raises(TypeError, match=r"train_dataloader_kwargs has the key 'num_worker', which is not an argument"):
        make_trainer([], nn.Linear(1, 1)).train(Sized(8), 1, train_dataloader_kwargs={"num_worker": 1})


def test_predictions_without_a_row_for_each_sample_are_named():
    class Mean(nn.Linear):
        def forward(self, x):
            return super().forward(x).mean(0, keepdim=True)

    with pytest.warns(UserWarning, match="The model returned 1 rows for a batch of 4 samples"):
        assert len(make_trainer([], Mean(1, 1)).predict(TensorDataset(torch.ones(10, 1)), 4)) == 3


def test_an_argument_of_an_extension_that_is_not_there_names_it(monkeypatch):
    for name in [*DIVISIONS]:
        monkeypatch.delitem(DIVISIONS, name)
    with pytest.raises(ValueError, match="logical_processes=2 belongs to the extension 'logical', which is not"):
        make_trainer(logical_processes=2, seed=0)


def test_a_plot_without_its_extension_names_it(monkeypatch):
    monkeypatch.setattr(PLOTS, "content", None)
    with pytest.raises(ImportError, match=r"RunHistory.plot belongs to the extension 'plots', which is not installed"):
        make_trainer().run_history.plot()


def test_a_slot_is_filled_by_one_extension_only():
    slot = Slot[str]("plots")
    slot.fill("ours")
    with pytest.raises(RuntimeError, match="The extension 'plots' has filled this slot already, with 'ours'"):
        slot.fill("another's")
    assert slot.get("plot") == "ours"


def test_compile_step_without_its_extension_names_it(monkeypatch):
    monkeypatch.setattr(STEP_COMPILER, "content", None)
    with pytest.raises(ValueError, match="compile_step=True belongs to the extension 'compiled_step', which is not"):
        make_trainer(compile_step=True)


class Skips(TrainerCallback):
    """Requests that failing batches are skipped."""

    def __init__(self, phase: str) -> None:
        self.phase = phase

    def configure_run(self, trainer: Trainer, request: Any, **kwargs: Any) -> None:
        setattr(request, self.phase, True)


def test_failed_batches_without_their_extension_name_it(monkeypatch):
    monkeypatch.setattr(INFERENCE_STEP, "content", None)
    calls: list[tuple[str, Any]] = [
        ("skips_failed_batches", train),
        ("skips_in_evaluation", lambda trainer, **kwargs: trainer.evaluate(make_data(), **kwargs)),
        ("skips_in_prediction", lambda trainer: trainer.predict(make_data())),
    ]
    for phase, call in calls:
        with pytest.raises(ValueError, match="Skipping batches that fail belongs to the extension 'failed_batches'"):
            call(make_trainer([Skips(phase)]))
    for _, call in calls[:2]:
        with pytest.raises(ValueError, match="auto_microbatch=True belongs to the extension 'failed_batches', which"):
            call(make_trainer(), auto_microbatch=True)


@pytest.mark.parametrize("counted", [0, 1])
@pytest.mark.parametrize(
    "settings", [{}, pytest.param({"logical_processes": 2, "seed": 1}, marks=pytest.mark.extension("logical"))]
)
def test_items_are_returned_for_every_batch_or_for_none(counted, settings):
    class CountsSome(Trainer):
        def calculate_train_batch_loss(self, batch):
            output = super().calculate_train_batch_loss(batch)
            return output | {"num_items_in_batch": 100} if self.progress.step == counted else output

    with pytest.raises(ValueError, match=r"num_items_in_batch was returned for .*return it for every batch, or for"):
        train(make_trainer(trainer_class=CountsSome, **settings), gradient_accumulation_steps=2)
