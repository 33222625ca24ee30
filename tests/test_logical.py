"""Logical processes: a job gives the same bits on any number of real ones."""

from __future__ import annotations

import functools
import math
import random
import re
import shutil
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accel_lite import NonFiniteLossError, Trainer
from pytorch_accel_lite.base.randomness import restore_generators
from pytorch_accel_lite.callbacks import GradientNormCallback, NaNReportCallback, TerminateOnNaNCallback
from pytorch_accel_lite.checkpoint.__main__ import main as look_at_states
from pytorch_accel_lite.data import OwnShard
from pytorch_accel_lite.data.plan import split
from pytorch_accel_lite.steps.logical_gradients import Node, TreeSum, blocks_of
from tests.cases import logical
from tests.launching import SOAK
from tests.scripts.resumable import run_to_the_end
from tests.soak import soak
from tests.tasks import (
    Stream,
    largest_difference,
    listener,
    make_data,
    make_trainer,
    quiet_trainer,
    regression_data,
    small_model,
    train,
    weights,
)


@functools.cache
def alone(case):
    """What one process gives."""
    return case()


def differences(first: Any, second: Any, path: str = "") -> list[str]:
    """The paths to what is not the same, to the last bit."""
    if isinstance(first, torch.Tensor):
        same = first.dtype == second.dtype and torch.equal(first, second)
        return [] if same else [path]
    if isinstance(first, dict):
        if first.keys() != second.keys():
            return [f"{path}: {sorted(map(str, first.keys() ^ second.keys()))}"]
        return [found for key in first for found in differences(first[key], second[key], f"{path}/{key}")]
    if isinstance(first, (list, tuple)):
        if len(first) != len(second):
            return [f"{path}: {len(first)} and {len(second)}"]
        pairs = enumerate(zip(first, second, strict=True))
        return [found for place, (a, b) in pairs for found in differences(a, b, f"{path}/{place}")]
    return [] if first == second or first != first else [f"{path}: {first} and {second}"]


# --------------------------------------------------------------------------------------------------- the sum


@pytest.mark.parametrize("terms", range(1, 10))
def test_the_order_of_a_sum_does_not_depend_on_who_adds(terms):
    def add(left: str, right: str) -> str:
        return f"({left}+{right})"

    written = set()
    for processes in range(1, terms + 1):
        whole = TreeSum(add)
        for rank in range(processes):
            own = range(*split(terms, rank, processes))
            part = TreeSum(add)
            for number in own:
                part.push(Node(0, number, str(number)))
                assert len(part.nodes) <= 2 * terms.bit_length()
            assert [(node.level, node.start) for node in part.nodes] == blocks_of(own)
            for node in part.nodes:
                whole.push(node)
        written.add(whole.total())
    assert len(written) == 1
    assert all(str(number) in str(written) for number in range(terms))


# --------------------------------------------------------------------------------------- training and the rest


@pytest.mark.parametrize("case", logical.ALL, ids=lambda case: case.__name__)
def test_any_number_of_processes_gives_the_same_bits(ranks, case):
    for result in ranks(case):
        assert differences(alone(case), result) == []


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.skipif(not SOAK, reason="many processes take long; SOAK=1 starts them")
@pytest.mark.parametrize("processes", [4, 8])
def test_eight_of_them_give_the_same_bits_on_four_and_on_eight_processes(job, processes):
    for case in (logical.images, logical.with_workers):
        for result in job(processes)(case):
            assert differences(alone(case), result) == [], case.__name__


def test_a_step_is_skipped_as_a_whole_if_a_share_of_it_fails():
    found = alone(logical.skipping)
    assert {failure["error"] for failure in found["failures"]} >= {"OSError: sample 5 cannot be read"}
    assert len(found["failures"]) == 6
    assert all(failure["rank"] < 6 for failure in found["failures"])
    assert found["progress"]["samples"] == 2 * 60


def test_they_train_as_one_process_does_with_the_whole_batch():
    found = []
    for count, batch in ((4, 3), (None, 12)):
        model = small_model()
        rows = logical.KeepRows()
        trainer = quiet_trainer(model, seed=1, logical_processes=count, callbacks=[GradientNormCallback(), rows])
        trainer.train(
            regression_data(41),
            2,
            regression_data(9),
            per_device_batch_size=batch,
            gradient_accumulation_steps=2,
            gradient_clip_norm=0.5,
        )
        found.append((weights(model), trainer.run_history.to_dict(), trainer.progress, rows.rows))
    (ours, history, progress, rows), (theirs, expected, of_plain, expected_rows) = found
    assert largest_difference(ours, theirs) < 1e-12
    assert progress == of_plain
    for row, expected_row in zip(rows, expected_rows, strict=True):
        assert row[:2] == expected_row[:2]
        assert row[2] == pytest.approx(expected_row[2], abs=1e-12)
    for name, values in expected.items():
        assert history[name] == pytest.approx(values, abs=1e-12)


def test_a_run_computes_with_one_thread():
    """As launchers set it for several processes, but not for one."""
    seen = []
    look = listener(on_train_step_end=lambda trainer, **kwargs: seen.append(torch.get_num_threads()))
    torch.set_num_threads(2)
    train(make_trainer([look], seed=1, logical_processes=2), size=4)
    assert seen == [1]
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)


def test_a_step_of_logical_processes_is_one_event():
    seen = []

    def look(trainer, batch, batch_output, **kwargs):
        seen.append((batch[0], batch_output["model_outputs"], batch_output["batch_size"], trainer.batch_indices))

    train(make_trainer([listener(on_train_step_end=look)], seed=1, logical_processes=3), size=7)
    (inputs, outputs, size, indices), (last, *_) = seen
    assert torch.equal(inputs, make_data(7).tensors[0][:6])
    assert (outputs.shape, size, indices) == ((6, 1), 6, [0, 1, 2, 3, 4, 5])
    assert torch.equal(last, make_data(7).tensors[0][6:])


def test_numbers_of_a_step_are_means_over_the_logical_processes_that_logged_them():
    class LogsItsNumber(Trainer):
        def calculate_train_batch_loss(self, batch):
            self.log("number", float(self.logical.current))
            return super().calculate_train_batch_loss(batch)

    rows = logical.KeepRows()
    trainer = make_trainer([rows], trainer_class=LogsItsNumber, seed=1, logical_processes=3)
    train(trainer, size=8)  # 3 x 2 samples, then 2 for the first two
    assert [values["number"] for _, _, values in rows.rows] == [1.0, 0.5]


def test_batches_that_do_not_fit_are_split_with_the_gradients_of_the_whole():
    found = []
    for limit in (2, 99):
        model = logical.Picky(limit, small_model())
        trainer = quiet_trainer(model, seed=1, logical_processes=3)
        trainer.train(regression_data(31), 2, per_device_batch_size=5, auto_microbatch=True)
        found.append((weights(model), trainer.num_microbatches))
    (split, parts), (whole, one) = found
    assert largest_difference(split, whole) < 1e-12
    assert (parts, one) == (4, 1)


class Fails(Trainer):
    """The loss of the second logical process is not finite."""

    def calculate_train_batch_loss(self, batch):
        output = super().calculate_train_batch_loss(batch)
        return output | {"loss": output["loss"] + (torch.nan if self.logical.current == 1 else 0)}


def test_a_loss_that_is_not_finite_ends_the_run_whichever_process_has_it():
    trainer = make_trainer([TerminateOnNaNCallback], trainer_class=Fails, seed=1, logical_processes=3)
    with pytest.raises(NonFiniteLossError):
        train(trainer)
    assert trainer.progress.step == 1


def test_the_report_of_a_loss_that_is_not_finite_repeats_each_share(tmp_path):
    """With the random numbers that its dropout had."""
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 1))
    seen = []
    look = listener(on_backward_start=lambda trainer, batch_output, **kwargs: seen.append(batch_output["loss"].item()))
    report = NaNReportCallback(tmp_path)
    trainer = make_trainer([look, report], model=model, trainer_class=Fails, seed=1, logical_processes=3)
    with pytest.raises(NonFiniteLossError):
        train(trainer)
    kept = torch.load(report.report, weights_only=True)
    assert kept["indices"] == [[0, 1], [2, 3]]
    model.load_state_dict(kept["model_state_dict"])
    again = []
    for step in kept["steps"]:
        restore_generators(step["generators"])
        inputs, targets = step["batch"]
        again.append(nn.functional.mse_loss(model(inputs), targets).item())
    assert again[0] == seen[0]
    assert math.isfinite(again[1])
    assert math.isnan(seen[1])


# ---------------------------------------------------------------------------------------------------- states


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A run of one process, and its states after each update and each epoch."""
    folder = tmp_path_factory.mktemp("logical")
    result = logical.saved(folder)
    return result, sorted((folder / "copies").glob("*/update-*"))


def test_a_run_resumes_on_any_number_of_processes_to_the_same_bits(uninterrupted, job):
    """In the middle of an epoch and at its end."""
    whole, states = uninterrupted
    assert len(states) == whole["progress"]["update"] + 2
    for processes, state in zip((1, 3, 2), states[1::2], strict=False):
        if processes == 1:
            assert differences(whole, logical.resumed(state)) == []
        else:
            assert [differences(whole, found) for found in job(processes).run(logical.resumed, state)] == [
                []
            ] * processes


def test_states_of_several_processes_resume_on_others(uninterrupted, job, tmp_path):
    whole, states = uninterrupted
    for found in job(3).run(logical.saved, tmp_path):
        assert differences(whole, found) == []
    saved = sorted((tmp_path / "copies").glob("*/update-*"))
    assert [state.parent.name for state in saved] == [state.parent.name for state in states]
    assert differences(whole, logical.resumed(saved[0])) == []
    for found in job(2).run(logical.resumed, saved[2]):
        assert differences(whole, found) == []


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_sigkill_and_another_number_of_processes_lead_to_the_same_bits(tmp_path):
    """A short version of tests/soak.py --logical 4; ``make soak`` makes it long."""

    def run_whole(folder, **options):
        run_to_the_end(folder, **options)

    found, expected = soak(tmp_path, 200 if SOAK else 2, logical=4, run_whole=run_whole)
    del found["processes"], expected["processes"]
    assert differences(expected, found) == []


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.filterwarnings("ignore:The last batch of an epoch has a single sample")
@pytest.mark.skipif(not SOAK, reason="200 resumed runs take long; SOAK=1 runs them")
def test_any_run_resumes_from_any_update_on_any_number_of_processes(job, tmp_path):
    """20 runs drawn at random, each resumed from 10 states drawn at random."""
    draw = random.Random(0)

    def results(case: Any, folder: Any, options: dict[str, Any]) -> list[Any]:
        processes = draw.randint(1, min(options["logical"], 4))
        return [case(folder, options)] if processes == 1 else job(processes).run(case, folder, options)

    for number in range(20):
        options = {
            "logical": draw.randint(2, 8),
            "size": draw.randint(5, 60),
            "accumulation": draw.randint(1, 3),
            "workers": int(draw.random() < 0.1),
            "weighted": draw.random() < 0.5,
        }
        folder = tmp_path / str(number)
        whole, *others = results(logical.saved, folder, options)
        states = sorted((folder / "copies").glob("*/update-*"))
        for _ in range(10):
            others += results(logical.resumed, draw.choice(states), options)
        assert [differences(whole, other) for other in others] == [[]] * len(others), options


def test_another_number_of_logical_processes_is_said_and_loses_no_sample(uninterrupted, capsys):
    whole, states = uninterrupted
    for count in (4, None):
        capsys.readouterr()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Training metrics cover only the rest of this epoch")
            found = logical.resumed(states[0], {"logical": count})
        said = f"saved with logical_processes=8 and is resumed with logical_processes={count}"
        assert said in " ".join(capsys.readouterr().out.split())
        assert found["progress"]["samples"] == whole["progress"]["samples"]


def test_two_runs_are_compared_state_by_state(uninterrupted, tmp_path, capsys, monkeypatch):
    _, states = uninterrupted

    def diff(first: Any, second: Any) -> tuple[int, str]:
        capsys.readouterr()
        monkeypatch.setattr("sys.argv", ["checkpoint", "diff", str(first), str(second)])
        code = look_at_states()
        return code, capsys.readouterr().out

    for name, other in (("one", states[1]), ("other", states[1])):
        for state in (states[0], other):
            shutil.copytree(state, tmp_path / name / state.name)
    assert diff(tmp_path / "one", tmp_path / "other") == (
        0,
        f"the same to the last bit: {states[0].name}, {states[1].name}\n",
    )
    code, said = diff(states[0], states[3])
    assert code == 1
    assert re.search(r"\n  weights/0.weight: \d+ of 72 elements differ, by at most", said)
    shutil.rmtree(tmp_path / "other" / states[1].name)
    shutil.copytree(states[3], tmp_path / "other" / states[1].name)
    code, said = diff(tmp_path / "one", tmp_path / "other")
    assert code == 1
    assert said.startswith(f"{states[1].name} differs, after {states[0].name}, which is the same:\n  weights/0.bias: ")
    with pytest.raises(SystemExit):
        diff("memory://states", states[0])
    assert "fetch the states from the remote store first" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert diff(tmp_path / "one", tmp_path / "empty")[0] == 1
    monkeypatch.setattr("sys.argv", ["checkpoint", "inspect", str(states[0])])
    assert look_at_states() == 0
    shown = capsys.readouterr().out
    assert "logical processes: 8" in shown
    assert re.search(r"machine: device cpu, torch .*threads 1", shown)


def test_a_machine_that_computes_other_bits_is_said(uninterrupted, capsys):
    _, states = uninterrupted
    torch.set_float32_matmul_precision("high")
    try:
        logical.resumed(states[-1])
    finally:
        torch.set_float32_matmul_precision("highest")
    said = "The state was saved with precision of float32 products highest (now high): the last bits of the run may"
    assert said in capsys.readouterr().out


# ------------------------------------------------------------------------------------------ what does not work


def test_arguments_that_do_not_work_are_refused():
    for count in (0, -1, 2.5, True, "8"):
        with pytest.raises((TypeError, ValueError), match=f"logical_processes={count!r} must be"):
            make_trainer(seed=1, logical_processes=count)
    with pytest.raises(ValueError, match="logical_processes=8 needs a seed"):
        make_trainer(logical_processes=8)


def test_a_step_that_gathers_is_refused():
    class Contrastive(Trainer):
        def calculate_train_batch_loss(self, batch):
            return {"loss": self.gather(self.model(batch[0]), with_gradients=True).mean()}

    with pytest.raises(RuntimeError, match=r"gather\(\) does not work in the forward and backward passes"):
        train(make_trainer(trainer_class=Contrastive, seed=1, logical_processes=2))


def test_tools_that_look_at_one_batch_are_refused():
    trainer = make_trainer(seed=1, logical_processes=2)
    for tool in (trainer.find_batch_size, trainer.diagnose):
        with pytest.raises(ValueError, match=r"does not work with logical_processes=2\. Use a trainer without them"):
            tool(make_data())


@pytest.mark.parametrize("source", [Stream(), OwnShard([(torch.ones(1, 4), torch.ones(1, 1))])])
def test_data_that_are_read_in_turn_are_refused(source):
    class Given(Trainer):
        def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
            return source if isinstance(source, OwnShard) else super().create_train_dataloader(batch_size)

    trainer = make_trainer(trainer_class=Given, seed=1, logical_processes=2)
    with pytest.raises(ValueError, match=r"logical_processes=2 needs data that can be indexed.*is read in turn"):
        trainer.train(source, max_num_train_steps=2)


def test_fewer_than_the_real_processes_are_refused(two_ranks):
    for message in two_ranks(logical.too_few):
        assert message == (
            "logical_processes=1: there are 2 processes, and each needs at least one. Launch fewer processes."
        )
