"""Errors in experiment files: they name the line, the entry and the remedy."""

from __future__ import annotations

import errno
import fcntl
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("jsonargparse", reason="needs the extra cli")

from pytorch_accel_lite.experiment import Experiment, ExperimentError
from pytorch_accel_lite.extensions.experiment.command_line import main
from tests.extensions.experiment.small_experiment import FILE, SCHEDULE, STATES, read, run


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
    errors = run("test", file, "--test.checkpoints=best", capsys=capsys)[2]
    assert "test.checkpoints='best' must be a list, as in [a, b]." in errors


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


@pytest.mark.parametrize("value", ["[1", "{", "{a: b: c}"])
def test_an_invalid_yaml_argument_is_named(value):
    with pytest.raises(ExperimentError, match=r"command line: --train.train_dataloader_kwargs .* is not YAML: "):
        Experiment.from_file(None, ["--train.train_dataloader_kwargs", value])
