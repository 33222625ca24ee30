"""Comparing two settings under the same seeds: pairing, intervals, the verdict, and continuing."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import signal
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import set_seed
from torch import nn

from pytorch_accel_lite import Trainer, compare_seeds
from pytorch_accel_lite.callbacks import RunPausedError, SaveBestModelCallback
from pytorch_accel_lite.experiment import Experiment, SeedComparison
from pytorch_accel_lite.extensions.experiment.command_line import main
from tests.extensions.experiment import parts
from tests.extensions.experiment.parts import DATA, TRAINING, make, on_gpu, saving
from tests.launching import ROOT, only_with_soak, run_forked
from tests.pages import blocks, write_files
from tests.ranks import shared_folder
from tests.small_models import raises_at

pytest.importorskip("scipy")

FILE = """
model: {class_path: tests.extensions.experiment.parts.Net, init_args: {width: 5}}
loss_func: MSELoss
optimizer: {class_path: SGD, init_args: {lr: 0.05}}
data:
  train: tests.extensions.experiment.parts.load_data
  eval: {class_path: tests.extensions.experiment.parts.load_data, init_args: {size: 8}}
train: {num_epochs: 1, per_device_batch_size: 8}
"""


slow, fast = partial(make, 0.01), partial(make, 0.05)


def values_of(*pairs: tuple[float, float], better: bool | None = None) -> SeedComparison:
    first, second = (list(column) for column in zip(*pairs, strict=True))
    return SeedComparison(("a", "b"), "score", better, [*range(len(pairs))], (first, second), 0.95, {})


@pytest.fixture(scope="module")
def seed_comparison(tmp_path_factory) -> SeedComparison:
    return compare_seeds(slow, saving, seeds=3, save_dir=tmp_path_factory.mktemp("seeds"))


# --------------------------------------------------------------------------------------------- what is trained


@pytest.mark.extension("metrics")
def test_both_settings_are_trained_under_each_seed(seed_comparison):
    assert seed_comparison.seeds == [0, 1, 2]
    for lr, values in zip((0.01, 0.05), seed_comparison.values, strict=True):
        for seed, value in zip(seed_comparison.seeds, values, strict=True):
            set_seed(seed)
            trainer, arguments = make(lr, seed, Path())
            trainer.train(**arguments)
            assert trainer.run_history["eval_loss_epoch"][-1] == value
    assert len({*seed_comparison.values[0]}) == 3


@pytest.mark.extension("metrics")
def test_the_value_of_a_run_is_that_of_its_best_model(tmp_path):
    def diverging(seed: int, folder: Path) -> tuple[Trainer, dict[str, Any]]:
        return make(0.3, seed, folder, SaveBestModelCallback(folder / "best.pt", "error"))

    found = compare_seeds(partial(make, 0.3), diverging, seeds=[0, 4], metric="error", save_dir=tmp_path)
    best = [torch.load(tmp_path / "b" / f"seed-{seed}" / "best.pt", weights_only=False) for seed in (0, 4)]
    assert found.values[1] == [checkpoint["error"] for checkpoint in best]
    assert all(last >= best for last, best in zip(*found.values, strict=True))
    assert found.values[0] != found.values[1]
    assert found.names == ("a", "diverging")


@pytest.mark.extension("metrics")
@pytest.mark.thorough
def test_the_value_of_a_best_model_may_be_one_within_an_epoch(tmp_path):
    def diverging(seed: int, folder: Path, metric: str) -> tuple[Trainer, dict[str, Any]]:
        trainer, arguments = make(0.3, seed, folder, SaveBestModelCallback(folder / "best.pt", metric))
        return trainer, {**arguments, "evaluate_every": "1 updates"}

    by_error, by_loss = (partial(diverging, metric=metric) for metric in ("error", "eval_loss_epoch"))
    found = compare_seeds(by_error, by_loss, seeds=[0, 4], metric="error", save_dir=tmp_path)
    for part, values in zip("ab", found.values, strict=True):
        for seed, value in zip((0, 4), values, strict=True):
            model = parts.Net(dropout=0.1)
            model.load_state_dict(torch.load(tmp_path / part / f"seed-{seed}" / "best.pt")["model_state_dict"])
            with torch.no_grad():
                error = (model.eval()(DATA.tensors[0]) - DATA.tensors[1]).abs().mean().item()
            assert value == pytest.approx(error, rel=1e-5)


@pytest.mark.thorough
def test_files_are_compared_on_the_command_line(tmp_path, monkeypatch, capsys):
    pytest.importorskip("jsonargparse")
    monkeypatch.chdir(tmp_path)
    Path("narrow.yaml").write_text(FILE)
    Path("wide.yaml").write_text("base: narrow.yaml\nmodel: {init_args: {width: 9}}\n")
    command = ["compare-seeds", "narrow.yaml", "wide.yaml", "--optimizer.lr", "0.01"]
    assert main([*command, "--seeds", "2"]) == 0
    shown = capsys.readouterr().out
    assert "eval_loss_epoch of narrow and wide under 2 seeds\n  model.width: 5 -> 9\n" in shown
    content = json.loads(Path("runs/narrow-and-wide/comparison.json").read_text())
    assert content["verdict"] in shown
    assert content["settings"] == {"model.width": [5, 9]}
    resolved = Path("runs/narrow-and-wide/b/seed-1")
    experiment = Experiment.from_file(resolved)
    assert experiment.config["trainer"]["init_args"]["seed"] == 1
    assert experiment.config["optimizer"]["init_args"]["lr"] == 0.01
    assert main([*command[:3]]) == 2
    assert "has runs with a.optimizer.lr=0.01, not 0.05" in capsys.readouterr().err
    assert main(["compare-seeds", "narrow.yaml", "narrow.yaml"]) == 2
    assert "error: a='narrow.yaml' and b='narrow.yaml' are the same setting" in capsys.readouterr().err


@pytest.mark.thorough
@only_with_soak  # tests/repository/test_docs.py runs the page's code
def test_the_comparison_of_the_page_gives_its_results(tmp_path, monkeypatch, capsys):
    pytest.importorskip("jsonargparse")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("experiments.md", "comparing_runs.md"):
        write_files(ROOT / "docs" / name, tmp_path)
    page = ROOT / "docs" / "comparing_runs.md"
    [command] = [line for code in blocks(page, "console") for line in code.splitlines() if "seeds 5" in line]
    assert main(shlex.split(command)[3:]) == 0
    shown, expected = capsys.readouterr().out, blocks(page, "text")[0]
    table = shown[shown.index(expected.splitlines()[0]) :]
    number = re.compile(r"-?\d+\.\d+")
    assert re.split(r"\s+", number.sub("#", table)) == re.split(r"\s+", number.sub("#", expected))
    # Other processors and versions of torch round differently, and training amplifies that.
    shown_numbers, expected_numbers = ([*map(float, number.findall(text))] for text in (table, expected))
    assert shown_numbers == pytest.approx(expected_numbers, rel=0.3, abs=0.03)


@only_with_soak
@pytest.mark.slow
@pytest.mark.processes
def test_seeds_in_processes_have_the_same_bits_after_a_kill(seed_comparison, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    compare_seeds(on_gpu, saving, seeds=2, save_dir=tmp_path)
    for run in (tmp_path / "a" / "seed-1", tmp_path / "b" / "seed-0"):  # two are enough
        shutil.rmtree(run)
    capfd.readouterr()
    in_processes = partial(compare_seeds, on_gpu, saving, seeds=2, processes=2, save_dir=tmp_path)
    monkeypatch.setenv("KILLS", "1")
    with pytest.raises(RuntimeError, match=r"on_gpu under seed 1 was killed, .*output\.txt\. Call compare_seeds again"):
        in_processes()
    monkeypatch.delenv("KILLS")
    assert in_processes().values == tuple(values[:2] for values in seed_comparison.values)
    assert sorted(re.findall(r"(.*): eval_loss_epoch [\d.]+\n", capfd.readouterr().out)) == [
        "on_gpu under seed 1",
        "saving under seed 0",
    ]
    device = (tmp_path / "a" / "seed-1" / "gpu").read_text()
    assert device in ("4", "7")
    assert (tmp_path / "a" / "seed-1" / "output.txt").read_text().endswith(f"on {device}\non_gpu under seed 1\n")


# ------------------------------------------------------------------------------------------------- the result


def test_the_paired_and_the_unpaired_interval():
    found = values_of((1.0, 1.5), (2.0, 2.4), (3.0, 3.7), (4.0, 4.4))
    assert found.difference == pytest.approx(0.5)
    half = 3.182446 * statistics.stdev([0.5, 0.4, 0.7, 0.4]) / 2  # the quantile of Student's t with 3 degrees
    assert found.paired[:2] == pytest.approx((0.5 - half, 0.5 + half), rel=1e-5)
    low, high, p_value = found.unpaired
    assert low < 0 < high
    assert 0 < found.paired.p_value < 0.05 < p_value < 1
    assert found.gain == pytest.approx((high - low) / (2 * half), rel=1e-5)
    assert found.gain > 5


@pytest.mark.parametrize(
    ("pairs", "greater_is_better", "conclusion", "better", "verdict"),
    [
        (
            [(1, 2), (2, 3.1), (3, 4)],
            True,
            "greater",
            "b",
            r"^Real: score is greater in b than in a, by 1\.03 .*; b is",
        ),
        ([(1, 2), (2, 3.1), (3, 4)], False, "greater", "a", r"\(95% interval from 0\.89 to 1\.18\); a is better\.$"),
        ([(2, 1), (3.1, 2), (4, 3)], False, "smaller", "b", "^Real: score is smaller in b than in a"),
        ([(2, 1), (3.1, 2), (4, 3)], None, "smaller", None, r"-0\.89\)\.$"),
        ([(1, 2), (2, 3), (3, 4)], True, "greater", "b", "interval from 1 to 1"),
        ([(1, 2), (2, 1)], True, "undecided", None, "^Undecided: .* may be chance .* such as 4; the runs that are fin"),
        ([(1, 1), (2, 2)], True, "identical", None, "^No difference: .* leaves score exactly as it is"),
    ],
)
def test_the_verdict_follows_from_the_interval(pairs, greater_is_better, conclusion, better, verdict):
    found = values_of(*pairs, better=greater_is_better)
    assert (found.conclusion, found.better) == (conclusion, better)
    assert re.search(verdict, found.verdict)
    assert repr(found).endswith(found.verdict)
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["conclusion"] == conclusion


@pytest.mark.extension("metrics")
def test_a_seed_comparison_has_a_table_and_rows(seed_comparison):
    assert seed_comparison.greater_is_better is False
    lines = repr(seed_comparison).splitlines()
    assert lines[0] == "eval_loss_epoch of a and saving under 3 seeds"
    assert lines[2].split() == ["seed", "a", "saving", "difference"]
    assert [line.split()[0] for line in lines[3:8]] == ["0", "1", "2", "mean", "deviation"]
    assert lines[6].split()[3] == f"{seed_comparison.difference:.4f}"
    assert seed_comparison.rows()[1] == {
        "seed": 1,
        "a": seed_comparison.values[0][1],
        "saving": seed_comparison.values[1][1],
        "difference": seed_comparison.differences[1],
    }
    assert seed_comparison.to_dataframe().index.tolist() == [0, 1, 2]


# ----------------------------------------------------------------------------------------------- continuing


@pytest.mark.thorough
@pytest.mark.extension("metrics")
def test_more_seeds_and_other_metrics_train_only_missing_runs(tmp_path, capsys):
    first = compare_seeds(slow, fast, seeds=2, save_dir=tmp_path)
    capsys.readouterr()
    other = compare_seeds(slow, fast, seeds=2, metric="error", save_dir=tmp_path)
    assert "Starting" not in capsys.readouterr().out
    assert other.values != first.values
    more = compare_seeds(slow, fast, seeds=3, save_dir=tmp_path)
    assert re.findall(r"(. under seed \d)", capsys.readouterr().out) == ["a under seed 2", "b under seed 2"]
    assert [values[:2] for values in more.values] == [*first.values]
    assert json.loads((tmp_path / "comparison.json").read_text()) == more.to_dict()
    with pytest.raises(ValueError, match=r"metric='eror' is None in a under seed 0, .* this run are .*error"):
        compare_seeds(slow, fast, seeds=3, metric="eror", save_dir=tmp_path)
    with pytest.raises(ValueError, match=r"has runs with b\.function=.*0\.05\), not .*0\.02\)\. Resume it"):
        compare_seeds(slow, partial(make, 0.02), seeds=3, save_dir=tmp_path)


@pytest.mark.slow
def test_a_killed_comparison_continues_to_the_same_bits(seed_comparison, tmp_path):
    def killed() -> None:
        def dies(seed: int, folder: Path) -> tuple[Trainer, dict[str, Any]]:
            return saving(seed, folder, *([parts.KillAt(5)] if seed == 1 else []))

        dies.__name__ = dies.__qualname__ = saving.__name__
        compare_seeds(slow, dies, seeds=3, save_dir=tmp_path)

    assert run_forked(killed).returncode == -signal.SIGKILL
    assert sorted(path.parent.parent.name for path in tmp_path.glob("*/*/result.json")) == ["a", "a", "b"]
    states = os.listdir(tmp_path / "b" / "seed-1" / "states")
    assert states
    found = compare_seeds(slow, saving, seeds=3, save_dir=tmp_path)
    assert found.values == seed_comparison.values


@pytest.mark.thorough
def test_an_interrupted_comparison_continues_when_called_again(tmp_path, monkeypatch, capsys):
    pytest.importorskip("jsonargparse")
    monkeypatch.chdir(tmp_path)
    Path("plain.yaml").write_text(FILE)
    interrupts = "{class_path: tests.extensions.experiment.parts.InterruptAt, init_args: {update: 2}}"
    Path("cut.yaml").write_text(f"base: plain.yaml\ncallbacks: [SaveTrainingStateCallback, {interrupts}]\n")
    command = ["compare-seeds", "plain.yaml", "cut.yaml", "--seeds", "2"]
    assert main(command) == 130
    assert "runs/plain-and-cut/b/seed-0" in (shown := capsys.readouterr().err)
    assert shown.endswith("On the command line, call the command again.\n")
    for done in (1, 3):
        assert main(command) == (130 if done == 1 else 0)
        assert capsys.readouterr().out.count(" is finished: skipped") == done
    content = json.loads(Path("runs/plain-and-cut/comparison.json").read_text())
    assert content["conclusion"] == "identical"


@pytest.mark.thorough
@pytest.mark.slow
def test_a_run_that_is_paused_is_not_finished(seed_comparison, tmp_path):
    def pauses(seed: int, folder: Path) -> tuple[Trainer, dict[str, Any]]:
        return saving(seed, folder, *([raises_at(3, RunPausedError("The time is up."))] if seed == 1 else []))

    pauses.__name__ = pauses.__qualname__ = saving.__name__
    with pytest.raises(RunPausedError, match=r"The time is up\. .*b/seed-1 is not finished: call compare_seeds again"):
        compare_seeds(slow, pauses, seeds=3, save_dir=tmp_path)
    assert compare_seeds(slow, saving, seeds=3, save_dir=tmp_path).values == seed_comparison.values


# ------------------------------------------------------------------------------------------- what is refused


def unseeded(seed: int, folder: Path) -> tuple[Trainer, dict[str, Any]]:
    return make(0.05, None, folder)


def trainer_alone(seed: int, folder: Path) -> Trainer:
    return make(0.05, seed, folder)[0]


def once(seed: int, folder: Path, made: list[Any] = []) -> Any:  # noqa: B006
    """A trainer whose model is made once only."""
    made = made or [*make(0.05, seed, folder)]
    return Trainer(made[0].model, nn.MSELoss(), torch.optim.SGD, seed=seed), TRAINING


@pytest.mark.extension("metrics")
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"seeds": 1}, ValueError, "seeds=1 must be a number of at least 2, or a list of at least 2 different seeds"),
        ({"seeds": [3]}, ValueError, r"seeds=\[3\] must"),
        ({"seeds": [3, 3]}, ValueError, r"seeds=\[3, 3\] must"),
        ({"seeds": [3, -1]}, ValueError, r"seeds=\[3, -1\] must"),
        ({"seeds": 2.5}, ValueError, r"seeds=2\.5 must"),
        ({"seeds": "12"}, ValueError, "seeds='12' must"),
        ({"confidence": 95}, ValueError, r"confidence=95 must be between 0 and 1, such as 0\.95"),
        ({"processes": 0}, ValueError, "processes=0 must be at least 1"),
        ({"overrides": {"optimizer.lr": 1}}, ValueError, "overrides=.* are those of files, but a and b are functions"),
        ({"b": slow}, ValueError, "a=.*make.* and b=.*make.* are the same setting, so every difference would be zero"),
        (
            {"processes": 2, "b": lambda *_: None},
            ValueError,
            "a or b cannot be sent to a new process: .*lambda.* Pass f",
        ),
        ({"b": lambda seed: None}, TypeError, r"b=.* must take two arguments: .*def b\(seed, folder\)"),
        ({"b": 3}, ValueError, "b=3 must be the path of an experiment file, or a function"),
        ({"metric": "eror"}, ValueError, "metric='eror': the run will not record it.* Did you mean 'error'"),
        ({"a": unseeded}, ValueError, r"unseeded\(0, '.*seed-0'\) returned a trainer with seed=None, .* seed=seed\)"),
        ({"a": trainer_alone}, TypeError, r"trainer_alone\(0, '.*'\) returned a Trainer, not a trainer and a dict"),
    ],
)
def test_settings_that_cannot_be_compared_are_refused_early(changes, error, message, tmp_path, capsys):
    with pytest.raises(error, match=message):
        compare_seeds(**{"a": slow, "b": fast, "save_dir": tmp_path, **changes})
    assert "Starting epoch" not in capsys.readouterr().out
    assert not [*tmp_path.glob("*/*/*")]


@pytest.mark.extension("metrics")
def test_a_model_that_has_been_trained_is_refused(tmp_path):
    model = parts.Net()

    def again(seed: int, folder: Path) -> tuple[Trainer, dict[str, Any]]:
        return Trainer(model, nn.MSELoss(), partial(torch.optim.SGD, lr=0.1), seed=seed), TRAINING

    with pytest.raises(ValueError, match=r"again\(1, '.*'\) returned the Net of an earlier run, .* Create a new one"):
        compare_seeds(again, saving, seeds=2, save_dir=tmp_path)


@pytest.mark.extension("metrics")
@pytest.mark.filterwarnings("ignore:The run has ended, after update 6, with weights that are infinite")
def test_a_non_finite_metric_of_a_comparison_is_named(tmp_path):
    exploding = partial(make, 1e30)
    with pytest.raises(ValueError, match=r"is (nan|inf) in b under seed 0, but only finite numbers can be compared"):
        compare_seeds(slow, exploding, seeds=2, save_dir=tmp_path)


def compared() -> tuple[Any, Any]:
    with shared_folder() as folder:
        first = compare_seeds(slow, fast, seeds=2, save_dir=folder / "seeds")
        again = compare_seeds(slow, fast, seeds=2, save_dir=folder / "seeds")
        with pytest.raises(ValueError, match="processes=2: a launcher has started the processes already"):
            compare_seeds(slow, fast, seeds=2, processes=2, save_dir=folder / "seeds")
    return first.values, again.values


def test_all_ranks_have_the_same_result(two_ranks):
    (first, again), other = two_ranks(compared)
    assert first == again
    assert other == (first, again)
    assert all(map(math.isfinite, first[0]))
