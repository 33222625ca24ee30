"""Commands: training, resuming, predicting, inspecting, and the first file."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

import pytorch_accel_lite
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback, read_predictions
from tests.launching import ROOT, SOAK, run_code, run_forked, run_module
from tests.pages import blocks, write_files
from tests.small_models import make_data, make_trainer

pytest.importorskip("jsonargparse", reason="needs the extra cli")

from pytorch_accel_lite.experiment import Experiment
from pytorch_accel_lite.extensions.experiment.chosen_weights import find_weights, load_weights
from pytorch_accel_lite.extensions.experiment.command_line import main
from tests.extensions.experiment.small_experiment import FILE, STATES, assert_equal, read, run, weights


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


def test_predictions_of_several_datasets_are_refused(file, capsys):
    read(file).train().save_model("weights.safetensors")
    options = ["--data.eval=tests.extensions.experiment.parts.load_two", "--weights=weights.safetensors"]
    code, out, err = run("predict", file, *options, capsys=capsys)
    assert code != 0
    assert "data.eval has several datasets: 'near', 'far'. predict takes one" in " ".join((out + err).split())


@pytest.mark.sampled
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


def test_the_command_line_tells_its_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"pytorch_accel_lite {pytorch_accel_lite.__version__}\n"


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


@pytest.mark.extension("reports", "metrics")  # which the example uses
def test_the_command_line_exits_with_1_if_a_check_fails(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    options = ["--check.only", '["schedule", "broadcast"]']
    assert main(["check", str(ROOT / "examples/digits.yaml"), *options]) == 0
    assert "Checks: 2 passed" in capsys.readouterr().out
    assert main(["check", str(ROOT / "examples/digits.yaml"), *options, "--scheduler.init_args.total_steps", "10"]) == 1
    assert "schedule failed: The schedule raised an error: Tried to step 11 times" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


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
