"""Experiments from files: the objects they create, and short forms of them."""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from pytorch_accel_lite import Trainer, TrainerPlaceholderValues, optimizers
from pytorch_accel_lite.callbacks import EarlyStoppingCallback
from tests.extensions.experiment import parts
from tests.launching import HAS_MUON
from tests.small_models import deep_model, equal_weights, float64_data

pytest.importorskip("jsonargparse", reason="needs the extra cli")

from pytorch_accel_lite.experiment import Experiment, ExperimentError
from tests.extensions.experiment.small_experiment import FILE, SCHEDULE, assert_equal, read, run, weights


def test_a_run_from_a_file_ends_in_the_bits_of_the_script(file):
    file.write_text(FILE + SCHEDULE)
    trained = Experiment.from_file(file).train()

    set_seed(3)
    model = parts.Net(5)
    set_seed(3)
    train = parts.load_data()
    set_seed(3)
    valid = parts.load_data(8)
    trainer = Trainer(model, nn.MSELoss(), partial(torch.optim.AdamW, lr=1e-2), seed=3)
    total = TrainerPlaceholderValues.NUM_EPOCHS * TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH
    schedule = partial(OneCycleLR, max_lr=0.01, total_steps=total)
    trainer.train(train, 2, valid, per_device_batch_size=8, create_scheduler_fn=schedule)
    assert trainer.progress.update == trained.progress.update == 6
    assert_equal(weights(trained), weights(trainer))
    assert trained.run_history["eval_loss_epoch"] == trainer.run_history["eval_loss_epoch"]


def test_python_overrides_may_be_paths_and_numbers_of_numpy(file):
    overrides = {"output_dir": Path("x/y"), "train.num_epochs": np.int64(3), "optimizer.lr": np.float64(0.5)}
    config = Experiment.from_file(file, overrides).config
    assert (config["output_dir"], config["train"]["num_epochs"]) == ("x/y", 3)
    assert config["optimizer"]["init_args"]["lr"] == 0.5


def test_parts_are_created_when_first_needed(file):
    experiment = read(file, "--data.train", "tests.extensions.experiment.parts.fails")
    assert len(experiment.eval_dataset) == 8
    assert experiment.dataset("eval") is experiment.eval_dataset
    with pytest.raises(ExperimentError, match=r"data\.test: there is none"):
        experiment.dataset("test")
    assert len(read(file, "--data.test=tests.extensions.experiment.parts.load_data").dataset("test")) == 24
    with pytest.raises(KeyError) as caught:
        experiment.train()
    assert caught.value.__notes__ == ["This happened while command line: data.train was made."]


def test_functions_without_types_may_create_parts(file):
    arguments = [
        "--model",
        "tests.extensions.experiment.parts.create_model",
        "--model.dropout",
        "0.5",
        "--model.width=3",
    ]
    optimizer = ["--optimizer", "tests.extensions.experiment.parts.create_optimizer", "--optimizer.lr", "0.3"]
    loss = ["--loss_func", "tests.extensions.experiment.parts.weighted_mse", "--loss_func.weight", "2"]
    trainer = read(file, *arguments, *optimizer, *loss).train()
    model = trainer.get_model()
    assert (model.layers[0].out_features, model.layers[2].p) == (3, 0.5)
    assert trainer.optimizer.param_groups[0]["lr"] == 0.3
    assert trainer.loss_func(torch.ones(1), torch.zeros(1)) == 2
    plain = read(file, "--loss_func", "torch.nn.functional.l1_loss").trainer
    assert plain.loss_func is nn.functional.l1_loss


def test_an_argument_without_a_type_may_be_null_if_it_is_given(file):
    overrides = {"data.eval": "tests.extensions.experiment.parts.anything", "data.eval.x": None}
    assert Experiment.from_file(file, overrides).eval_dataset == [None]
    assert read(file, "--data.eval=tests.extensions.experiment.parts.anything", "--data.eval.x=null").eval_dataset == [
        None
    ]


def test_kwargs_leave_named_arguments_changeable_by_element(file):
    file.write_text(FILE.replace("Net\n", "create_sized\n").replace("width: 5", "sizes: [5]\n    options: {a: 1}"))
    arguments = ["--model.sizes+", "6", "--model.options.a", "2", "--model.dropout", "0.5"]
    found = read(file, *arguments).config["model"]["init_args"]
    assert (found["sizes"], found["options"], found["dropout"]) == ([5, 6], {"a": 2}, 0.5)


def test_an_argument_may_be_an_object_of_its_own(file):
    trainer = read(file, "--model.activation", "torch.nn.LeakyReLU", "--model.activation.negative_slope", "0.3").trainer
    assert trainer.model.layers[1].negative_slope == 0.3
    assert trainer.optimizer.name == "partial(AdamW, ...)"


@pytest.mark.parametrize("given", ["torch.nn.GELU", "{class_path: torch.nn.GELU}"])
def test_an_argument_may_be_a_class_by_its_path(file, given):
    file.write_text(FILE.replace("Net\n", "create_by\n").replace("width: 5", f"activation: {given}"))
    assert isinstance(read(file).trainer.get_model().layers[1], nn.GELU)


def test_an_accelerator_is_described_by_its_arguments(file):
    trainer = read(file, "--accelerator.project_dir", "here").trainer
    assert trainer.accelerator.project_dir == "here"
    file.write_text(FILE + "accelerator: {cpu: true, mixed_precision: fast}\n")
    with pytest.raises(ExperimentError, match=r"line \d+: accelerator: ValueError: .*fast"):
        read(file).train()


def test_modules_beside_the_file_are_found(file, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "beside_it.py").write_text("from torch.nn import Identity as Model\n")
    (tmp_path / "folder" / "x.yaml").write_text("model: beside_it.Model\n")
    assert isinstance(read(tmp_path / "folder" / "x.yaml").trainer.model, nn.Identity)


def test_a_custom_trainer_may_create_its_model_and_optimizer(file):
    file.write_text(
        "trainer:\n  class_path: tests.extensions.experiment.parts.OwnTrainer\n  init_args: {width: 6, seed: 1}\n"
    )
    data = ["--data.train", "tests.extensions.experiment.parts.load_data", "--train.num_epochs", "1"]
    trainer = read(file, *data).train()
    assert type(trainer) is parts.OwnTrainer
    assert (trainer.seed, trainer.model.layers[0].out_features) == (1, 6)


@pytest.mark.extension("progress_bar")
def test_callbacks_are_added_to_the_default_ones(file):
    from pytorch_accel_lite.callbacks import ProgressBarCallback

    file.write_text(FILE + "callbacks:\n  - EarlyStoppingCallback\n")
    more = [
        "--callbacks+=ProgressBarCallback",
        "--callbacks+",
        "tests.extensions.experiment.parts.StopAt",
        "--callbacks.update=4",
    ]
    experiment = read(file, *more)
    kinds = [type(callback).__name__ for callback in experiment.trainer.callbacks]
    assert kinds[:2] == ["MoveModulesToDeviceCallback", "TerminateOnNaNCallback"]
    assert [kinds.count(kind.__name__) for kind in (EarlyStoppingCallback, ProgressBarCallback, parts.StopAt)] == [
        1
    ] * 3
    assert experiment.train().progress.update == 4


def test_everything_that_a_run_writes_is_in_its_output_dir(file, tmp_path):
    stop = ["--callbacks+", "tests.extensions.experiment.parts.StopAt", "--callbacks.update=99"]
    best = ["--callbacks+", "SaveBestModelCallback", "--train.num_epochs=1"]
    experiment = read(file, *best, *stop, "--output_dir", "here")
    trainer = experiment.train()
    assert trainer.callbacks[-3].folder == Path("here/stopped")
    found = {path.name for path in (tmp_path / "here").iterdir()}
    assert found == {"directions.json", "experiment.yaml", "metrics.jsonl", "best_model.pt"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "small.yaml"]
    [row] = map(json.loads, (tmp_path / "here" / "metrics.jsonl").read_text().splitlines())
    assert row["eval_loss_epoch"] == trainer.run_history.get_latest_metric("eval_loss_epoch")
    assert read(file).output_dir == Path("runs/small")


@pytest.mark.extension("named_schedules")
def test_the_files_that_a_callback_reads_stay_where_they_are(file):
    reads = ["--callbacks+", "WSDCheckpointCallback", "--callbacks.initial_checkpoint", "runs/first/model.pt"]
    callback = read(file, *reads, "--output_dir", "here").trainer.callbacks[-3]
    assert callback.initial_checkpoint == Path("runs/first/model.pt")
    assert callback.save_dir == Path("here/checkpoints")


def test_the_resolved_file_is_the_same_experiment(file):
    file.write_text(FILE + SCHEDULE)
    experiment = read(file, "--callbacks+", "EarlyStoppingCallback", "--callbacks.early_stopping_patience", "4")
    Path("resolved.yaml").write_text(experiment.text)
    again = Experiment.from_file("resolved.yaml")
    assert again.config == experiment.config
    assert again.config["optimizer"]["init_args"]["weight_decay"] == 0.01
    assert again.config["callbacks"][0]["init_args"]["early_stopping_patience"] == 4
    assert again.config["scheduler"]["init_args"]["total_steps"] == "NUM_EPOCHS * NUM_UPDATE_STEPS_PER_EPOCH"


def test_text_that_looks_like_a_number_stays_text(file):
    texts = ["1e-3", "1E3", "1.5e3", ".5e3", "1_0e2", "007", "1:30", "null"]
    quoted = ", ".join(f"'{text}'" for text in texts)
    file.write_text(f"{FILE}output_dir: '1e-3'\n".replace("{size: 8}", f"{{names: [{quoted}]}}"))
    named = ["--data.eval.class_path=tests.extensions.experiment.parts.load_named"]
    for number in ("1e-3", "1E-3", "1.0e-3", '"1e-3"'):
        experiment = read(file, *named, f"--optimizer={{class_path: AdamW, init_args: {{lr: {number}}}}}")
        assert experiment.config["optimizer"]["init_args"]["lr"] == 0.001
    assert experiment.eval_dataset == texts
    assert experiment.config["output_dir"] == "1e-3"
    Path("resolved.yaml").write_text(experiment.text)
    assert read(Path("resolved.yaml")).config == experiment.config
    assert read(file, *named, "--output_dir", "007").config["output_dir"] == "007"


def test_unserializable_defaults_are_left_out(file, capsys, recwarn):
    experiment = read(file, "--model=tests.extensions.experiment.parts.create_with", "--model.width=3")
    assert experiment.config["model"]["init_args"] == {"width": 3}
    Path("again.yaml").write_text(experiment.text)
    again = Experiment.from_file("again.yaml", {"model.width": 4})
    assert isinstance(again.trainer.get_model().layers[1][0], nn.Tanh)
    code, printed, _ = run("train", "again.yaml", "--print_config", capsys=capsys)
    assert (code, yaml.safe_load(printed)["model"]["init_args"]) == (0, {"width": 3})
    assert not [warning for warning in recwarn if "serialize" in str(warning.message)]


@pytest.mark.extension("named_schedules", "metrics")
def test_named_parts_equal_the_objects_of_a_script(file):
    file.write_text(
        FILE.replace(
            "trainer: {seed: 3}",
            """
scheduler: cosine
trainer:
  seed: 3
  mixed_precision: "no"
  metrics:
    error: {class_path: torchmetrics.MeanAbsoluteError}
callbacks:
- class_path: MetricsCallback
  init_args: {metrics: mean_squared_error}
""",
        )
    )
    experiment = read(file, "--train.warmup_steps", "2", "--output_dir", "named")
    trainer = experiment.train()
    assert {"error", "mean_squared_error"} <= set(trainer.run_history)
    assert trainer.scheduler.num_warmup_steps == 2
    spelt = read(file, "--scheduler", "null", "--train.create_scheduler_fn", "cosine", "--train.warmup_steps", "2")
    assert_equal(weights(spelt.train()), weights(trainer))
    assert_equal(weights(read(Path("named/experiment.yaml")).train()), weights(trainer))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--scheduler", "cosine", "--train.create_scheduler_fn", "wsd"], "there is a scheduler, too. Leave one out."),
        (
            ["--train.create_scheduler_fn", "cosin"],
            "='cosin' must be 'constant' or 'linear' or 'cosine' or 'wsd' or null",
        ),
        (
            ["--scheduler", "cosine", "--scheduler.warmup", "3"],
            "warmup: cosine takes only a warm-up, which is train.warmup_steps.",
        ),
        (["--trainer.mixed_precision", "fp16"], "trainer: mixed_precision='fp16'"),
    ],
)
def test_invalid_short_forms_are_named(file, arguments, error):
    with pytest.raises(ExperimentError, match=re.escape(error)):
        read(file, *arguments).trainer  # noqa: B018


@pytest.mark.extension("muon")
@HAS_MUON
def test_a_file_can_name_muon_with_adamw(tmp_path):
    data = float64_data(24)
    arguments = {"per_device_batch_size": 8, "train_dataloader_kwargs": {"shuffle": False}}
    path = tmp_path / "muon.yaml"
    path.write_text(
        "model: tests.small_models.deep_model\nloss_func: MSELoss\n"
        "optimizer: {class_path: pytorch_accel_lite.optimizers.muon_with_adamw, init_args: {lr: 0.02}}\n"
    )
    trainer = Experiment.from_file(path).trainer
    trainer.train(data, 2, **arguments)
    model = deep_model()
    Trainer(model, nn.MSELoss(), optimizers.muon_with_adamw(model, lr=0.02), []).train(data, 2, **arguments)
    assert equal_weights(model.state_dict(), trainer.model.state_dict())
