"""Invalid arguments of ``train()``: the error names the argument, its value and the remedy, and nothing is trained."""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

from pytorch_accel_lite import StopTrainingError, Trainer, TrainerPlaceholderValues
from tests.refusals import WHOLE, returning
from tests.small_models import equal_weights, listener, make_data, make_model, make_trainer, raises, train, weights


def instance_of_step_lr(trainer: Trainer) -> StepLR:
    return StepLR(trainer.optimizer, 1)


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
    "train_dataset is a tensor of one number": ({"train_dataset": torch.tensor(5)}, TypeError, "is not a dataset"),
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
    "train_dataset has an empty sampler": (
        {"train_dataloader_kwargs": {"sampler": []}},
        ValueError,
        "train_dataset gives no batch: its sampler is empty, or",
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
        {"create_scheduler_fn": partial(partial, StepLR)},
        TypeError,
        r"create_scheduler_fn returned partial\(StepLR.*, which is not a scheduler.*Call this function, too",
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


def test_accumulation_set_on_the_accelerator_is_refused():
    try:
        trainer = make_trainer(accelerator=Accelerator(gradient_accumulation_steps=2))
        with pytest.raises(ValueError, match=r"gradient_accumulation_steps=2.*Leave it at 1.*train\(\)"):
            train(trainer)
    finally:
        Accelerator()  # the setting belongs to the process


def test_numpy_integers_are_accepted():
    trainer = make_trainer(seed=np.int64(3))
    trainer.train(make_data(), np.int64(1), make_data(), np.int64(2), gradient_accumulation_steps=np.int64(2))
    assert trainer.progress.update == 2
    assert "evaluation_loss" in trainer.evaluate(make_data(), np.int64(2))
    trainer.train(make_data(), 1, train_dataloader_kwargs={"batch_size": np.int64(4)})


def test_a_run_stopped_after_numpy_integers_is_trained_further(tmp_path):
    stopping = listener(on_train_epoch_end=raises(StopTrainingError("enough")))
    train(make_trainer([stopping], seed=0), np.int64(2)).save_training_state(tmp_path)
    for epochs, updates in ((4, 12), (np.int64(5), 15)):
        assert train(make_trainer(seed=0), epochs, resume_from=tmp_path).progress.update == updates


def test_a_class_of_losses_assigned_to_a_trainer_is_refused():
    trainer = make_trainer()
    trainer.loss_func = torch.nn.MSELoss
    with pytest.raises(TypeError, match=r"loss_func=.* must be an instance, not a class: MSELoss\(...\)"):
        train(trainer)
