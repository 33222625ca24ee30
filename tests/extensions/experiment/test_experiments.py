"""Experiments from files: the objects they create, overrides, and errors."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from pytorch_accel_lite import Trainer, TrainerPlaceholderValues, optimizers
from pytorch_accel_lite.callbacks import EarlyStoppingCallback, SaveTrainingStateCallback, read_predictions
from tests.extensions.experiment import parts
from tests.launching import HAS_MUON, ROOT, SOAK, run_code, run_forked, run_module
from tests.pages import blocks, write_files
from tests.small_models import deep_model, equal_weights, float64_data, make_data, make_trainer

pytest.importorskip("jsonargparse", reason="needs the extra cli")

from pytorch_accel_lite.experiment import Experiment, ExperimentError
from pytorch_accel_lite.extensions.experiment.chosen_weights import find_weights, load_weights
from pytorch_accel_lite.extensions.experiment.command_line import main
from pytorch_accel_lite.extensions.experiment.schedule_expressions import parse

FILE = """
model:
  class_path: tests.extensions.experiment.parts.Net
  init_args:
    width: 5
loss_func: MSELoss
optimizer:
  class_path: AdamW
  init_args:
    lr: 1e-2
data:
  train: tests.extensions.experiment.parts.load_data
  eval:
    class_path: tests.extensions.experiment.parts.load_data
    init_args: {size: 8}
trainer: {seed: 3}
train:
  num_epochs: 2
  per_device_batch_size: 8
"""
SCHEDULE = """
scheduler:
  class_path: OneCycleLR
  init_args:
    max_lr: 0.01
    total_steps: NUM_EPOCHS * NUM_UPDATE_STEPS_PER_EPOCH
"""
STATES = ["--callbacks+", "SaveTrainingStateCallback", "--callbacks.save_every_n_steps", "1"]


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small.yaml"
    path.write_text(FILE)
    return path


def read(path: Path, *arguments: str) -> Experiment:
    return Experiment.from_file(path, arguments)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return trainer.get_model().state_dict()


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


def run(*arguments: str, capsys: Any) -> tuple[int, str, str]:
    try:
        code = main([*map(str, arguments)])
    except SystemExit as end:
        code = end.code
    return code, *capsys.readouterr()


# ------------------------------------------------------------------------------------------ what is made


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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--optimizer.lr=-1"], "line 7: optimizer: ValueError: Invalid learning rate: -1.0"),
        (["--scheduler=LinearLR", "--scheduler.start_factor=2"], "command line: scheduler: ValueError: Starting"),
        (
            ["--model.activation=torch.nn.Dropout", "--model.activation.p=2"],
            "torch.nn.Dropout: ValueError: dropout probability has to be between 0 and 1, but got 2.0",
        ),
    ],
)
def test_errors_of_libraries_name_the_entry_of_the_file(file, capsys, arguments, said):
    assert main(["train", str(file), *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


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


# ----------------------------------------------------------------------------------- what overrides what


def test_overrides_may_be_a_dict(file):
    changes = {"optimizer.lr": 3e-4, "train.num_epochs": 1, "trainer.seed": None, "model": "torch.nn.Identity"}
    found = Experiment.from_file(file, changes).config
    assert found["optimizer"]["init_args"]["lr"] == 3e-4
    assert (found["train"]["num_epochs"], found["trainer"]["init_args"]["seed"]) == (1, None)
    assert found["model"]["class_path"] == "torch.nn.Identity"


def test_another_class_drops_the_arguments_it_does_not_take(file):
    file.write_text(FILE.replace("lr: 1e-2", "lr: 1e-2\n    betas: [0.8, 0.9]"))
    arguments = read(file, "--optimizer", "torch.optim.SGD").config["optimizer"]["init_args"]
    assert arguments["lr"] == 0.01
    assert "betas" not in arguments
    with pytest.raises(ExperimentError, match=r"betas is not an argument of torch.optim.SGD"):
        read(file, "--optimizer", "torch.optim.SGD", "--optimizer.betas", "[0.1,0.2]")


def test_files_build_on_others(file, tmp_path):
    (tmp_path / "adam.yaml").write_text("optimizer: {class_path: Adam, init_args: {lr: 0.5}}\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "more.yaml").write_text(
        "base: [../small.yaml, ../adam.yaml]\ntrain: {num_epochs: 9}\ncallbacks+: [EarlyStoppingCallback]\n"
    )
    experiment = read(tmp_path / "folder" / "more.yaml")
    found = experiment.config
    assert (found["train"]["num_epochs"], found["train"]["per_device_batch_size"]) == (9, 8)
    assert (found["optimizer"]["class_path"], found["optimizer"]["init_args"]["lr"]) == ("torch.optim.Adam", 0.5)
    assert [item["class_path"].rpartition(".")[2] for item in found["callbacks"]] == ["EarlyStoppingCallback"]
    assert found["output_dir"] == "runs/more"


# ---------------------------------------------------------------------------------------------- schedules


def test_the_arguments_of_a_nested_class_go_with_it(file, tmp_path):
    leaky = "activation: {class_path: torch.nn.LeakyReLU, init_args: {negative_slope: 0.3}}"
    (tmp_path / "other.yaml").write_text(FILE.replace("width: 5", leaky))
    text = "base: other.yaml\nmodel: {init_args: {activation: {class_path: torch.nn.%s}}}"
    for name, kind in (("Tanh", nn.Tanh), ("LeakyReLU", nn.LeakyReLU)):
        file.write_text(text % name)
        activation = read(file).trainer.get_model().layers[1]
        assert isinstance(activation, kind)
    assert activation.negative_slope == 0.3


def test_keys_that_are_numbers_are_merged_and_a_base_may_be_null(file, tmp_path):
    (tmp_path / "other.yaml").write_text("base: null\nmodel: {init_args: {options: {1: 3, 2: 4}}}")
    created = FILE.replace("Net\n", "create_numbered\n").replace("width: 5", "options: {2: 5}")
    file.write_text("base: other.yaml" + created)
    assert read(file).trainer.get_model().layers[0].out_features == 8


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("3 * NUM_EPOCHS", "(3 * TrainerPlaceholderValues.NUM_EPOCHS)"),
        ("min(10, -NUM_EPOCHS)", "min(10, -TrainerPlaceholderValues.NUM_EPOCHS)"),
        ("round(0.1 * MAX_NUM_TRAIN_STEPS) // 2", "(round((0.1 * TrainerPlaceholderValues.MAX_NUM_TRAIN_STEPS)) // 2)"),
        ("2 * (3 + 4)", "14"),
    ],
)
def test_expressions_become_placeholders(text, shown):
    assert repr(parse(text)) == shown


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("NUM_EPOCH + 1", "'NUM_EPOCH' is not a placeholder. Did you mean 'NUM_EPOCHS'?"),
        ("__import__('os').system('true')", "cannot be part of an expression"),
        ("NUM_EPOCHS.resolve", "cannot be part"),
        ("2 ** NUM_EPOCHS", "cannot be part"),
        ("'a' * 3", "cannot be part"),
        ("NUM_EPOCHS if 1 else 2", "cannot be part"),
        ("round(NUM_EPOCHS, ndigits=1)", "cannot be part"),
        ("3 *", "is not an expression"),
        ("1 / 0", "has no value: division by zero"),
        ("floor(1e400)", "has no value: cannot convert"),
    ],
)
def test_invalid_expressions_are_refused(text, error):
    with pytest.raises(ValueError, match=re.escape(error)):
        parse(text)


def test_a_schedule_counts_in_the_units_of_the_run(file):
    scheduler = [
        "--scheduler",
        "StepLR",
        "--scheduler.step_size",
        "NUM_UPDATE_STEPS_PER_EPOCH",
        "--scheduler.gamma=0.5",
    ]
    trainer = read(file, *scheduler).train()
    assert trainer.optimizer.param_groups[0]["lr"] == 0.01 / 4


def test_unserializable_defaults_are_left_out(file, capsys, recwarn):
    experiment = read(file, "--model=tests.extensions.experiment.parts.create_with", "--model.width=3")
    assert experiment.config["model"]["init_args"] == {"width": 3}
    Path("again.yaml").write_text(experiment.text)
    again = Experiment.from_file("again.yaml", {"model.width": 4})
    assert isinstance(again.trainer.get_model().layers[1][0], nn.Tanh)
    code, printed, _ = run("train", "again.yaml", "--print_config", capsys=capsys)
    assert (code, yaml.safe_load(printed)["model"]["init_args"]) == (0, {"width": 3})
    assert not [warning for warning in recwarn if "serialize" in str(warning.message)]


@pytest.mark.parametrize(
    ("scheduler", "arguments", "rate"),
    [
        ("MultiStepLR", {"milestones": [1, "2 * NUM_UPDATE_STEPS_PER_EPOCH - 1"]}, 0.01 / 100),
        ("LambdaLR", {"lr_lambda": "tests.extensions.experiment.parts.half"}, 0.01 / 2**6),
        ("LambdaLR", {"lr_lambda": ["tests.extensions.experiment.parts.half"]}, 0.01 / 2**6),
        ("MultiplicativeLR", {"lr_lambda": "tests.extensions.experiment.parts.half"}, 0.01 / 2**21),
    ],
)
def test_schedulers_with_type_checking_imports_work(file, scheduler, arguments, rate):
    overrides = {"scheduler": scheduler} | {f"scheduler.{name}": value for name, value in arguments.items()}
    experiment = Experiment.from_file(file, overrides)
    assert experiment.train().optimizer.param_groups[0]["lr"] == pytest.approx(rate)
    assert experiment.config["scheduler"]["init_args"].items() >= arguments.items()


# ------------------------------------------------------------------------------------------------- errors

WRONG = [
    ("modle: a.B", [], "small.yaml, line 1: modle is not an argument of an experiment. Did you mean 'model'?"),
    ("train:\n  num_epoch: 3", [], "line 2: train.num_epoch is not an argument of train. Did you mean 'num_epochs'?"),
    (
        "train:\n  batch_size: 3",
        [],
        "train.batch_size is not an argument of train. Did you mean 'per_device_batch_size'?",
    ),
    ("train:\n  num_epochs: many", [], "line 2: train.num_epochs='many' must be int or null."),
    ("train: 3", [], "line 1: train=3 must have keys and values."),
    ("callbacks: EarlyStoppingCallback", [], "line 1: callbacks='EarlyStoppingCallback' must be a list."),
    (
        "callbacks: [EarlyStopping]",
        [],
        "callbacks.0='EarlyStopping' is not in pytorch_accel_lite.callbacks. Did you mean",
    ),
    pytest.param(
        "callbacks:\n- class_path: EarlyStoppingCallback\n  init_args:\n    patience: 3",
        [],
        "line 4: callbacks.0.patience is not an argument of pytorch_accel_lite.callbacks.EarlyStoppingCallback. "
        "Did you mean 'early_stopping_patience'?",
        marks=pytest.mark.extension("other_libraries"),
    ),
    (
        "callbacks:\n- class_path: EarlyStoppingCallback\n  init_args:\n    early_stopping_patience: x",
        [],
        "line 4: callbacks.0.early_stopping_patience='x' must be int.",
    ),
    pytest.param(
        "callbacks:\n- class_path: RunLogCallback\n  init_args:\n    folder: x",
        [],
        "line 4: callbacks.0.folder is not an argument of pytorch_accel_lite.callbacks.RunLogCallback.",
        marks=pytest.mark.extension("reports"),
    ),
    ("model:\n  init_args: {x: 1}", [], "line 1: model has arguments, but no class_path."),
    (
        "model:\n  class_path: torch.nn.Linear\n  width: 3",
        [],
        "line 3: model.width is neither class_path nor init_args, under",
    ),
    ("model: [1]", [], "line 1: model=[1] must be a class path, or"),
    ("model: torch.nn.Linear", [], "line 1: model needs model.in_features and model.out_features, without a default."),
    (
        "model: tests.extensions.experiment.parts.create_model",
        [],
        "line 1: model needs model.width, without a default.",
    ),
    ("model: torch.nn.Linaer", [], "'torch.nn.Linaer': the module 'torch.nn' has no 'Linaer'. Did you mean 'Linear'?"),
    (
        "model: nowhere.Net",
        [],
        "there is no module 'nowhere'. Modules of your own are looked for beside the file, in the",
    ),
    ("model: Net", [], "line 1: model='Net' has no module."),
    ("model: tests.extensions.experiment.parts.NOT_A_CLASS", [], "must be a class or a function, not int"),
    ("optimizer: AdamV", [], "line 1: optimizer='AdamV' is not in torch.optim. Did you mean 'Adam"),
    ("model: a\nmodel: b", [], "small.yaml, line 2: model is there twice."),
    ("model: [", [], "small.yaml, line 1: "),
    ("- model", [], "must contain keys and values"),
    ("base: small.yaml", [], "builds on itself: small.yaml -> small.yaml"),
    ("base: none.yaml", [], "small.yaml, line 1: none.yaml cannot be read: No such file or directory"),
    (FILE, ["--optimizer.lr"], "--optimizer.lr needs a value"),
    (FILE, ["--lr", "3"], "command line: lr is not an argument of an experiment. Did you mean 'optimizer.lr'?"),
    (FILE, ["--optimizer.lrr", "3"], "line: optimizer.lrr is not an argument of torch.optim.AdamW. Did you mean 'lr'?"),
    (FILE, ["--optimizer.lr", "fast"], "command line: optimizer.lr='fast' must be float."),
    (FILE, ["stray"], "stray is not an option. Options begin with --"),
    (FILE, ["--callbacks+=EarlyStoppingCallbak"], "Did you mean 'EarlyStoppingCallback'?"),
    (
        FILE,
        ["--scheduler=StepLR", "--scheduler.step_size", "NUM_EPOCH"],
        "command line: scheduler.step_size: 'NUM_EPOCH' is not a placeholder. Did you mean 'NUM_EPOCHS'?",
    ),
    (FILE, ["--data", "null"], "command line: data='null' must have keys and values."),
    ("output_dir: on", [], "line 1: output_dir='True' must be str. Put it in quotes."),
    ("output_dir: 12:30:00", [], "line 1: output_dir='45000' must be str. Put it in quotes."),
    ("base: 3", [], "small.yaml, line 1: base=3 must be the path of a file, or a list of paths."),
    (
        "model: tests.extensions.experiment.parts.MADE",
        [],
        "'tests.extensions.experiment.parts.MADE' must be a class or a function, not partial",
    ),
    (FILE, ["--scheduler=MultiStepLR"], "command line: scheduler needs scheduler.milestones, without a default."),
    (FILE, ["--scheduler=LambdaLR"], "command line: scheduler needs scheduler.lr_lambda, without a default."),
    (
        FILE + SCHEDULE.replace("NUM_EPOCHS *", "4 // (NUM_EPOCHS - 2) *"),
        [],
        "error: (4 // (TrainerPlaceholderValues.NUM_EPOCHS - 2)) cannot be resolved in this run: ",
    ),
    (
        FILE,
        ["--scheduler=StepLR", "--scheduler.step_size=EVAL_DATALOADER_LEN", "--data.eval=null"],
        "error: TrainerPlaceholderValues.EVAL_DATALOADER_LEN cannot be resolved: there is",
    ),
    ("train: &all\n  num_epochs: [*all]", [], "small.yaml is nested too deeply, or has an alias (*)"),
    ("train: &all\n  ? *all\n  : 3", [], "small.yaml, line 1: found unhashable key"),
    (
        "a: &a [" + "x, " * 9 + "]\n" + "".join(f"{b}: &{b} [{f'*{a}, ' * 9}]\n" for a, b in pairwise("abcdefghi")),
        [],
        "small.yaml, line 5: aliases (*) repeat more than 10,000 values. Use fewer.",
    ),
    ("train: " + "[" * 3000 + "]" * 3000, [], "small.yaml is nested too deeply"),
    (
        FILE.replace("width: 5", "activation: {class_path: fractions.Fraction}"),
        [],
        "must be null. Import path fractions.Fraction does not correspond to a subclass of Module.",
    ),
    (
        FILE,
        ["--scheduler=MultiStepLR", "--scheduler.milestones=[2, 3 * NUM_EPOCH]"],
        "scheduler.milestones: 'NUM_EPOCH' is not a placeholder. Did you mean 'NUM_EPOCHS'?\n",
    ),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("text", "arguments", "error"), WRONG, ids=lambda value: str(value)[:40])
def test_errors_name_the_location_and_the_remedy(file, capsys, text, arguments, error):
    file.write_text(text)
    code, printed, errors = run("train", "small.yaml", *arguments, capsys=capsys)
    assert code == 2
    assert error in errors
    assert "Traceback" not in errors
    assert printed == ""


@pytest.mark.parametrize(
    ("command", "text", "error"),
    [
        ("evaluate", FILE.partition("data:")[0], "data.eval: there is none. Name a class, or a function"),
        ("predict", FILE.partition("data:")[0], "data.test: there is none. Name a class, or a function"),
        (
            "test",
            FILE + "test: {inference: {beam: {beam_widht: 4}}}",
            "the setting 'beam' sets 'beam_widht', but 'Trainer' object has no",
        ),
    ],
)
def test_commands_name_the_missing_parts_of_a_file(file, capsys, command, text, error):
    file.write_text(text)
    code, _, errors = run(command, file, capsys=capsys)
    assert code == 2
    assert error in errors


UNFIT = {"class_path": "zipfile.ZipFile", "init_args": {"file": "made", "mode": "w"}}


@pytest.mark.parametrize("key", ["model", "loss_func", "trainer", "accelerator", "callbacks"])
def test_the_class_of_a_part_is_checked_before_it_is_created(file, capsys, key):
    content = yaml.safe_load(FILE)
    content[key] = [UNFIT] if key == "callbacks" else UNFIT
    file.write_text(yaml.safe_dump(content))
    code, _, errors = run("train", file, capsys=capsys)
    assert code == 2
    assert re.search(rf"small.yaml, line \d+: {key}(\.0)? must be a kind of \w+, not the class ZipFile\.", errors)
    assert not Path("made").exists()


def test_a_string_in_place_of_a_list_is_named(file, capsys):
    assert "test.checkpoints='best' must be Sequence." in run("test", file, "--test.checkpoints=best", capsys=capsys)[2]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("inspect", "state", "--deep"), "inspect does not take --deep. See inspect --help."),
        (("compare", "runs", "--deep"), "compare does not take --deep. See compare --help."),
    ],
)
def test_commands_without_a_file_refuse_other_options(capsys, arguments, error):
    assert run(*arguments, capsys=capsys) == (2, "", f"error: {error}\n")


def test_only_errors_of_the_user_come_with_a_traceback(file, capsys):
    assert run("train", file, "--train.num_epochs=0", capsys=capsys)[::2] == (
        2,
        "error: num_epochs=0 must be at least 1.\n",
    )
    missing = run("evaluate", file, "--weights", "none.pt", capsys=capsys)
    assert missing[::2] == (2, "error: There are no weights at 'none.pt'. Pass best, last, or another path.\n")
    with pytest.raises(KeyError, match="no such split"):
        main(["train", str(file), "--data.train", "tests.extensions.experiment.parts.fails"])


def test_a_disk_without_locks_is_warned_of(file, monkeypatch):
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    with pytest.warns(UserWarning, match=r"cannot be locked, as its disk has no file locks") as caught:
        trainer = read(file, *STATES).train()
    said = "".join(str(warning.message) for warning in caught)
    assert "'runs/small/training_states/.lock'" in said
    assert trainer.progress.epoch == 2


# ---------------------------------------------------------------------------------------- the command line


def test_the_last_line_after_an_interrupt_says_how_to_resume(file, capsys):
    arguments = [*STATES, "--callbacks+", "tests.extensions.experiment.parts.InterruptAt", "--callbacks.update", "2"]
    code, printed, errors = run("train", file, *arguments, "--output_dir=run", capsys=capsys)
    assert code == 130
    assert "Traceback" not in printed + errors
    said = " ".join(f"{printed} {errors}".split())
    assert "The run is saved in 'run/training_states/update-000000002', after update 2." in said
    assert said.endswith("On the command line, add --resume latest.")


@pytest.mark.slow
def test_a_stopped_experiment_resumes_to_the_same_bits(file, capsys):
    whole = read(file, *STATES, "--output_dir=whole").train()
    crash = ["--callbacks+", "tests.extensions.experiment.parts.CrashAt", "--callbacks.update"]
    with pytest.raises(ZeroDivisionError):
        main(["train", str(file), *STATES, *crash, "5", "--output_dir=half"])
    again = ["train", file, *STATES, *crash, "99", "--output_dir=half", "--resume", "latest"]
    code, printed, _ = run(*again, capsys=capsys)
    assert code == 0
    assert "The experiment differs from the one that is resumed:\n  callbacks.CrashAt.update: 5 -> 99\n" in printed
    assert "Everything is in half\n" in printed
    both = [read(Path(name)) for name in ("whole", "half")]
    found = []
    for experiment in both:
        assert run("evaluate", experiment.output_dir, "--weights=last", capsys=capsys)[0] == 0
        found.append(json.loads((experiment.output_dir / "evaluation_eval.json").read_text()))
        assert [Path(found[-1].pop("weights"))] == find_weights(experiment.trainer, "last")
    assert found[0] == found[1]
    resumed = both[1].trainer
    load_weights(resumed, find_weights(resumed, "last"), Path("mean.pt"))
    assert_equal(weights(resumed), weights(whole))


@pytest.mark.thorough
@pytest.mark.soak
@pytest.mark.slow
def test_a_repeatedly_killed_run_ends_in_the_same_bits(file):
    epochs = 16 if SOAK else 2
    options = [*STATES, "--callbacks.max_checkpoints=2", "--trainer.seed=1", f"--train.num_epochs={epochs}"]
    whole = read(file, *options, "--output_dir=whole").train()
    folder = Path.cwd()
    killed = ["--callbacks+=tests.extensions.experiment.parts.KillAt", "--callbacks.step=4", "--output_dir=killed"]
    kills = 0

    def again() -> None:
        os.chdir(folder)
        main(["train", str(file), *options, *killed, "--resume", "latest"])

    while (done := run_forked(again)).returncode == -signal.SIGKILL:
        kills += 1
    assert done.returncode == 0, done.stdout
    assert kills >= (20 if SOAK else 2)
    last = read(Path("killed")).trainer
    load_weights(last, find_weights(last, "last"), Path("mean.pt"))
    assert_equal(weights(last), weights(whole))


def test_predictions_are_those_of_the_requested_weights(file, capsys):
    best = ["--callbacks+", "SaveBestModelCallback"]
    trainer = read(file, *best).train()
    trainer.save_model("weights.safetensors")
    for options, scale in (([], 1), (["--weights=weights.safetensors"], 1), (["--weights=zero.safetensors"], 0)):
        if scale == 0:
            for parameter in trainer.model.parameters():
                parameter.data.zero_()
            trainer.save_model("zero.safetensors")
        assert run("predict", file, *best, *options, capsys=capsys)[0] == 0
        found = read_predictions("runs/small/predictions/eval")
        assert found.shape == (8, 1)
        assert bool(found.any()) == bool(scale)


def test_predictions_follow_the_data_of_the_file(file, capsys):
    read(file).train().save_model("weights.safetensors")
    for size in (8, 5):
        file.write_text(FILE.replace("{size: 8}", f"{{size: {size}}}"))
        assert run("predict", file, "--weights=weights.safetensors", capsys=capsys)[0] == 0
        assert len(read_predictions("runs/small/predictions/eval")) == size


@pytest.mark.parametrize(
    "option",
    [
        ["--accelerator.mixed_precision=no"],
        ["--train.collate_fn=tests.extensions.experiment.parts.as_zeros"],
        ["--train.eval_dataloader_kwargs={num_workers: 0}"],
    ],
)
def test_predictions_follow_how_data_are_read_and_computed(file, capsys, option):
    read(file).train().save_model("weights.safetensors")
    command = ["predict", file, "--weights=weights.safetensors"]
    run(*command, capsys=capsys)
    again = "All samples have been predicted before. Delete runs/small/predictions/eval to predict them again."
    assert again in run(*command, capsys=capsys)[1]
    assert again not in run(*command, *option, capsys=capsys)[1]
    assert bool(read_predictions("runs/small/predictions/eval").unique().numel() > 1) == ("as_zeros" not in option[0])


def test_weights_of_another_model_are_refused(file, capsys):
    read(file, "--callbacks+", "SaveBestModelCallback").train()
    more = ["--callbacks+", "SaveBestModelCallback", "--model.width=7"]
    code, _, errors = run("evaluate", file, *more, capsys=capsys)
    assert code == 2
    assert "best_model.pt" in errors


@pytest.mark.slow
@pytest.mark.extension("tuning", "memory_estimate")
def test_tools_take_the_arguments_of_train_and_their_own(file, capsys):
    _, printed, _ = run("find_lr", file, "--find_lr.num_steps", "10", capsys=capsys)
    assert "Tried 10 learning rates" in printed or "learning rates from" in printed
    assert Path("runs/small/find_lr.png").exists()
    assert "for 8 samples" in run("diagnose", file, "--diagnose.num_steps=2", capsys=capsys)[1]
    assert (
        "8 processes, batches of 8" in run("estimate_memory", file, "--estimate_memory.world_size=8", capsys=capsys)[1]
    )
    file.write_text(FILE + "find_batch_size: {max_batch_size: 3}\n")
    assert "The largest batch size that fits is 3" in run("find_batch_size", file, capsys=capsys)[1]
    assert run("evaluate", file, "--weights=x", capsys=capsys)[0] == 2  # the section of another command is left alone


def test_a_training_state_is_inspected(file, capsys):
    read(file, *STATES).train()
    code, printed, _ = run("inspect", "runs/small/training_states/update-000000006", capsys=capsys)
    assert code == 0
    assert "callbacks: " in printed
    assert "ExperimentRecord" in printed
    assert run("inspect", "nowhere", capsys=capsys)[::2] == (2, "error: There is no training state at 'nowhere'.\n")
    code, _, errors = run("inspect", file, capsys=capsys)
    assert (code, "is a file, but a training state is a directory" in errors) == (2, True)


MARKUP = re.compile(r"init_args|Namespace|0x|:\w+:`|``|`_")


@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_help_shows_the_values_of_the_experiment(file, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    code, printed, _ = run("train", file, "--help", capsys=capsys)
    assert (code, MARKUP.findall(printed)) == (0, [])
    assert re.search(r"^  --optimizer\.lr 0\.01 +learning rate$", printed, re.MULTILINE)
    assert re.search(r"^  --train\.num_epochs \d+ +number of passes", printed, re.MULTILINE)
    assert "gradient_clip_norm" in printed
    assert len(printed.splitlines()) <= 70
    lines = printed.splitlines() + run("train", "--help", capsys=capsys)[1].splitlines()
    assert max(map(len, lines)) <= int(columns)
    assert run("train", "--help", file, capsys=capsys)[:2] == (0, printed)


def test_help_describes_a_group_of_options_or_one_in_plain_text(file, capsys):
    code, printed, _ = run("train", file, "--help", "optimizer", "--optimizer.lr", "0.5", capsys=capsys)
    assert (code, MARKUP.findall(printed)) == (0, [])
    assert "--optimizer.lr 0.5\n    learning rate" in printed
    assert "    type: float | Tensor\n" in printed
    assert "--train" not in printed
    code, printed, _ = run("train", file, "--help", "train.evaluate_every", capsys=capsys)
    assert (code, MARKUP.findall(printed)) == (0, [])
    assert printed.startswith("--train.evaluate_every null\n    instead, evaluate at an Interval")
    assert "type: str | Interval | null" in printed
    assert "EarlyStoppingCallback" in run("train", file, "-h", "callbacks", capsys=capsys)[1]
    assert "--find_lr.num_steps" in run("find_lr", file, "-h", "find_lr", capsys=capsys)[1]
    code, _, errors = run("train", file, "--help", "optimzer", capsys=capsys)
    assert (code, errors) == (
        2,
        "error: 'optimzer' is not a group of options, nor one of them. Did you mean 'optimizer'?\n",
    )
    code, _, errors = run("train", file, "--help", "xyz", capsys=capsys)
    assert (code, "There are the groups model, " in errors) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["trian", "FILE"], "'trian' is not a command. Did you mean 'train'?"),
        (["FILE"], "is not a command. Did you mean: train "),
        (["xyz"], "'xyz' is not a command. There are: train, evaluate, "),
        (["train", "FILE", "--name", "x"], "name is not an argument of an experiment. Did you mean 'output_dir'"),
        pytest.param(
            ["train", "FILE", "--epochs", "3"],
            "epochs is not an argument of an experiment. Did you mean 'train.num_epochs'",
            marks=pytest.mark.extension("other_libraries"),
        ),
        pytest.param(
            ["train", "FILE", "--batch_size", "3"],
            "Did you mean 'train.per_device_batch_size'?",
            marks=pytest.mark.extension("other_libraries"),
        ),
        (["evaluate", "FILE", "--wieghts", "best"], "evaluate does not take --wieghts. Did you mean 'weights'?"),
    ],
)
def test_a_misspelled_or_foreign_option_gets_a_suggestion(file, capsys, arguments, meant):
    code, _, errors = run(*(str(file) if word == "FILE" else word for word in arguments), capsys=capsys)
    assert code == 2
    assert meant in errors


def test_the_first_file_is_complete_and_can_be_filled_in(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, text, _ = run("train", "--print_config", capsys=capsys)
    assert code == 0
    content = yaml.safe_load(text)
    assert content.keys() == {
        "model",
        "loss_func",
        "optimizer",
        "scheduler",
        "data",
        "trainer",
        "callbacks",
        "train",
        "output_dir",
    }
    assert max(map(len, text.splitlines())) <= 90
    filled = text.replace("my_module.MyModel", "tests.extensions.experiment.parts.Net").replace(
        "split: train", "size: 9"
    )
    Path("filled.yaml").write_text(filled.replace("my_module.load_data", "tests.extensions.experiment.parts.load_data"))
    assert len(Experiment.from_file("filled.yaml").train_dataset) == 9


def test_a_file_is_completed_with_the_defaults_of_its_classes(file, capsys):
    code, text, _ = run("train", file, "--print_config", "--train.num_epochs=4", capsys=capsys)
    assert code == 0
    Path("complete.yaml").write_text(text)
    completed = Experiment.from_file("complete.yaml")
    assert completed.config == read(file, "--train.num_epochs=4").config


def test_a_command_needs_a_file(capsys):
    assert "train experiment.yaml" in run("train", capsys=capsys)[2]
    assert run("dance", capsys=capsys)[0] == 2


@pytest.mark.programs
def test_the_command_line_runs_as_a_module(file):
    done = run_module("pytorch_accel_lite", "train", str(file), "--output_dir", str(file.parent / "out"))
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith(f"Everything is in {file.parent / 'out'}\n")


@pytest.mark.programs
def test_an_experiment_without_jsonargparse_says_how_to_install(file):
    code = f"""
from tests.launching import forget
forget("jsonargparse", installed=False)
from pytorch_accel_lite.extensions.experiment.command_line import main
print(main(["train", {str(file)!r}]))
"""
    assert "An experiment file needs jsonargparse. Install it with: pip install" in run_code(code)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.programs
def test_the_commands_of_the_page_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    page = ROOT / "docs" / "experiments.md"
    write_files(page, tmp_path)
    prefix = "python -m pytorch_accel_lite "
    commands = [line for code in blocks(page, "console") for line in code.splitlines() if line.startswith(prefix)]
    assert len(commands) >= 12
    for command in commands:
        arguments, *_ = command.removeprefix(prefix).split(" > ")
        assert (command, run(*shlex.split(arguments), capsys=capsys)[0]) == (command, 0)
    assert {"best_model.pt", "experiment.yaml", "metrics.jsonl", "training_states"} < set(os.listdir("runs/sine"))


# ------------------------------------------------------------------------------------------------ short forms


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


@pytest.mark.extension("reports", "metrics")  # which the example uses
def test_the_command_line_exits_with_1_if_a_check_fails(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    options = ["--check.only", '["schedule", "broadcast"]']
    assert main(["check", str(ROOT / "examples/digits.yaml"), *options]) == 0
    assert "Checks: 2 passed" in capsys.readouterr().out
    assert main(["check", str(ROOT / "examples/digits.yaml"), *options, "--scheduler.init_args.total_steps", "10"]) == 1
    assert "schedule failed: The schedule raised an error: Tried to step 11 times" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


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


@pytest.mark.parametrize("value", ["[1", "{", "{a: b: c}"])
def test_an_invalid_yaml_argument_is_named(value):
    with pytest.raises(ExperimentError, match=r"command line: --train.train_dataloader_kwargs .* is not YAML: "):
        Experiment.from_file(None, ["--train.train_dataloader_kwargs", value])


def test_the_command_line_inspects_and_verifies(tmp_path):
    trainer = make_trainer([SaveTrainingStateCallback(tmp_path, max_checkpoints=1)])
    trainer.train(make_data(), 3, per_device_batch_size=2)
    (state,) = tmp_path.glob("update-*")

    def inspect() -> subprocess.CompletedProcess[str]:
        return run_module("pytorch_accel_lite", "inspect", str(state))

    shown = inspect()
    assert shown.returncode == 0
    for part in ("epoch 3", "update 9", "train_loss_epoch", "model.safetensors", "optimizer"):
        assert part in shown.stdout
    weights_file = state / "model.safetensors"
    weights_file.write_bytes(weights_file.read_bytes()[:-1] + b"!")
    refused = inspect()
    assert refused.returncode == 2
    assert "model.safetensors" in refused.stdout
