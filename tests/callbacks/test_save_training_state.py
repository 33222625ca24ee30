"""Training states that a callback saves: when, how many, on full disks, and what it says of them."""

from __future__ import annotations

import contextlib
import io
import math
import os
import resource
import shutil
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import TensorDataset

from pytorch_accel_lite import NonFiniteLossError, StopTrainingError, Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import (
    PrintProgressCallback,
    RunPausedError,
    SaveTrainingStateCallback,
    TerminateOnNaNCallback,
)
from pytorch_accel_lite.extending import JOB_QUEUES, STORES
from tests.launching import two_are_enough
from tests.ranks import IN_ORDER, shared_folder, world_size
from tests.scripts.resumable import run, saved_states
from tests.small_models import (
    adamw_trainer,
    assert_same,
    changed_manifest,
    float64_data,
    float64_model,
    listener,
    make_data,
    make_trainer,
    notes_of_error,
    raises,
    raises_at,
    train,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")


# ------------------------------------------------------------------------------------------- its arguments


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"save_every_n_epochs": 0}, "save_every_n_epochs=0 must be at least 1"),
        ({"save_every_n_steps": -1}, "save_every_n_steps=-1 must be at least 1"),
        ({"max_checkpoints": 0}, "max_checkpoints=0 must be at least 1"),
        ({"save_every_n_minutes": 0}, "save_every_n_minutes=0 must be greater than 0"),
    ],
)
def test_saving_states_refuses_bad_intervals(kwargs, message):
    with pytest.raises(ValueError, match=message):
        SaveTrainingStateCallback(**kwargs)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"save_every": "auto", "overhead": 0}, "overhead=0 must be greater than 0 and at most 0.5"),
        ({"save_every": "auto", "overhead": 0.9}, "overhead=0.9 must be greater than 0 and at most 0.5"),
        ({"save_every": "often"}, "save_every='often' must be a positive number and one of updates"),
    ],
)
def test_the_saving_interval_refuses_bad_overheads(arguments, words):
    with pytest.raises(ValueError, match=words):
        SaveTrainingStateCallback(**arguments)


def test_callbacks_name_the_argument_with_an_invalid_interval():
    with pytest.raises(ValueError, match=r"^save_every='often' must be"):
        SaveTrainingStateCallback(save_every="often")


def test_a_save_dir_that_is_a_file_is_an_error_before_training(tmp_path):
    (tmp_path / "states").touch()
    trainer = make_trainer([SaveTrainingStateCallback(tmp_path / "states")])
    with pytest.raises(NotADirectoryError, match=r"save_dir='.*/states' is not a directory.* another save_dir"):
        train(trainer)
    assert trainer.progress.update == 0


def test_without_any_store_the_error_names_the_extension(monkeypatch):
    for name in [*STORES]:
        monkeypatch.delitem(STORES, name)
    with pytest.raises(ValueError, match="belongs to the extension 'remote', which is not installed"):
        SaveTrainingStateCallback("s3://bucket/run")


# ----------------------------------------------------------------------------------- when states are saved


def test_states_can_be_saved_by_the_clock(tmp_path):
    saved = run(tmp_path, save_every_n_steps=None, save_every_n_minutes=1e-9, save_at_end=False)
    assert len(saved_states(tmp_path)) == saved["progress"]["update"]


def test_a_stop_is_saved_even_if_its_moment_was_saved_already(here):
    def run(stops: bool) -> Trainer:
        saver = SaveTrainingStateCallback("states", save_every_n_steps=3)
        stop = listener(
            on_train_step_checkpoint=lambda t, **_: (
                raises(StopTrainingError("enough"))() if stops and t.progress.update == 3 else None
            )
        )
        return train(make_trainer([saver, stop], seed=0), epochs=2, size=12, resume_from="latest")

    assert run(stops=True).progress.update == 3
    again = run(stops=False)
    assert again.progress.update == 3
    assert again.stop_reason == "enough"


def test_a_stop_within_a_window_reports_that_nothing_is_saved(here, capsys):
    stop = listener(on_train_step_end=lambda t, step, **_: raises(StopTrainingError("enough"))() if step == 2 else None)
    train(make_trainer([SaveTrainingStateCallback("states"), stop]), size=20, gradient_accumulation_steps=4)
    assert list(Path("states").glob("update-*")) == []
    assert "No training state was saved: the run was stopped within an accumulation window" in capsys.readouterr().out


def test_training_continues_while_a_state_is_written(tmp_path, monkeypatch):
    """The first sync waits for a later update, so the test would hang if training waited for the sync."""
    later, sync = threading.Event(), os.fsync

    def waiting_sync(descriptor: int) -> None:
        if threading.current_thread() is not threading.main_thread():  # which syncs the best model
            assert later.wait(60)
        sync(descriptor)

    class Later(TrainerCallback):
        def on_train_step_start(self, trainer, **kwargs):
            if trainer.progress.update == 5:
                assert not list((tmp_path / "states").glob("update-*"))
                later.set()

    monkeypatch.setattr(os, "fsync", waiting_sync)
    result = run(tmp_path, extra=(Later(),), save_every_n_steps=3, asynchronous=True)
    assert later.is_set()
    assert [path.name[-2:] for path in saved_states(tmp_path)] == ["03", "06", "09", "12"]
    assert_same(result, run(tmp_path / "whole", resume_from=None))
    shutil.rmtree(saved_states(tmp_path)[-1])
    assert_same(run(tmp_path), result)


def test_a_run_resumes_from_the_newest_state_of_all_savers(here, capsys):
    def run(updates: int) -> Trainer:
        savers = [
            SaveTrainingStateCallback("epochs", save_every_n_epochs=1),
            SaveTrainingStateCallback("updates", save_every_n_steps=2),
        ]
        killed = raises_at(updates, KeyboardInterrupt(), "on_train_step_start")
        trainer = make_trainer([*savers, killed], seed=0)
        with suppress(KeyboardInterrupt):
            train(trainer, epochs=2, size=12, resume_from="latest")
        return trainer

    run(5)
    assert "No training state in 'epochs' or 'updates': starting a new run" in capsys.readouterr().out
    assert run(99).progress.update == 12
    assert "Resuming from 'updates/update-000000004'" in capsys.readouterr().out


# ----------------------------------------------------------------------------------- which states are kept


def test_a_finished_run_removes_its_old_states_when_resumed(tmp_path):
    run(tmp_path)
    *_, newest = saved_states(tmp_path)
    run(tmp_path, max_checkpoints=1)
    assert saved_states(tmp_path) == [newest]


def test_rotation_keeps_the_newest_and_foreign_files(tmp_path):
    (tmp_path / "states" / "notes").mkdir(parents=True)
    (tmp_path / "states" / "update-final").mkdir()
    last = run(tmp_path, max_checkpoints=2, save_every_n_epochs=1)["progress"]["update"]
    kept = [path for path in saved_states(tmp_path) if path.name != "update-final"]
    assert {int(path.name.removeprefix("update-")) for path in kept} == {last - 1, last}
    assert (tmp_path / "states" / "notes").is_dir()
    assert not list((tmp_path / "states").glob(".update*"))


def test_rotation_goes_on_after_a_removal_that_was_incomplete(tmp_path):
    def leave_a_part(trainer, **kwargs):
        for state in saved_states(tmp_path):
            (state.parent / f".{state.name}.removed" / "part").mkdir(parents=True, exist_ok=True)

    saver = SaveTrainingStateCallback(tmp_path / "states", max_checkpoints=1, save_every_n_epochs=1)
    train(make_trainer([listener(on_update_end=leave_a_part), saver]), epochs=3)
    assert len(saved_states(tmp_path)) == 1


def test_rotation_removes_links_to_states_but_not_their_targets(tmp_path):
    run(tmp_path, epochs=1, schedule=False)
    (tmp_path / "elsewhere").mkdir()
    for state in saved_states(tmp_path):
        state.rename(tmp_path / "elsewhere" / state.name)
        state.symlink_to(tmp_path / "elsewhere" / state.name)
    (tmp_path / "states" / ".update-000000001.removed").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "states" / "update-000000005").symlink_to(tmp_path / "nothing")  # an update to come
    (tmp_path / "states" / "update-000000006").touch()
    whole = run(tmp_path / "whole", epochs=2, schedule=False)
    assert_same(run(tmp_path, epochs=2, max_checkpoints=1, schedule=False), whole)
    assert sorted(os.listdir(tmp_path / "states")) == [".lock", "update-000000008"]
    assert len(os.listdir(tmp_path / "elsewhere")) == 4


@pytest.mark.parametrize("keep", [1, None])
def test_the_newest_state_does_not_depend_on_the_clock(keep, tmp_path, capsys):
    def run(epochs: int) -> Trainer:
        saver = SaveTrainingStateCallback(tmp_path, save_every_n_epochs=1, max_checkpoints=keep)
        return train(make_trainer([saver], seed=0), epochs, resume_from="latest")

    run(2)
    for state in tmp_path.glob("update-*"):
        with changed_manifest(state) as manifest:
            manifest["saved_at"] += 300.0  # as on a machine whose clock is ahead of this one's
    run(4)
    saved = sorted(path.name for path in tmp_path.glob("update-*"))
    assert saved == [f"update-{update:09d}" for update in ([12] if keep else [3, 6, 9, 12])]
    run(5)
    assert "update-000000012': epoch 4" in capsys.readouterr().out


def test_non_finite_weights_never_replace_good_ones(here):
    x, y = make_data(20).tensors
    y[8] = float("nan")
    trainer = make_trainer([SaveTrainingStateCallback("states", save_every_n_steps=1, max_checkpoints=2)], seed=0)
    with pytest.raises(NonFiniteLossError, match="after update 5, and were not saved"):
        train(trainer, train_dataset=TensorDataset(x, y))
    states = sorted(Path("states").glob("update-*"))
    assert [state.name for state in states] == ["update-000000003", "update-000000004"]
    assert all(weight.isfinite().all() for weight in load_file(states[-1] / "model.safetensors").values())


def states_with_nan() -> Any:
    """Only one rank sees the NaN, and the ranks talk rarely; states are saved often."""
    data = float64_data(400)
    data.tensors[0][23] = math.nan
    with shared_folder() as folder:
        saver = SaveTrainingStateCallback(folder / "nan", save_every_n_steps=1, max_checkpoints=2)
        trainer = adamw_trainer(float64_model(), callbacks=[TerminateOnNaNCallback, saver], seed=0)
        failed = None
        try:
            trainer.train(data, 2, per_device_batch_size=2, train_dataloader_kwargs=IN_ORDER)
        except NonFiniteLossError as error:
            failed = str(error)
        trainer.barrier()
        kept = {path.name: load_file(path / "model.safetensors") for path in (folder / "nan").glob("update-*")}
    finite = {name: all(bool(weight.isfinite().all()) for weight in state.values()) for name, state in kept.items()}
    return {"failed": failed, "finite": finite}


@two_are_enough
def test_states_with_non_finite_weights_are_not_written(ranks):
    for result in ranks(states_with_nan):
        assert result["failed"] is not None
        assert len(result["finite"]) == 2
        assert all(result["finite"].values())


# ---------------------------------------------------------------------------------------------- full disks


class FillsDisk(TrainerCallback):
    """Limits the size of files between two updates, to simulate a full disk."""

    def __init__(self, first: int, last: int = 10**9, size: int = 1000) -> None:
        self.first, self.last, self.size = first, last, size
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def on_train_step_end(self, trainer, **kwargs):
        for thread in threading.enumerate():
            if thread.name == "training-state-writer":  # what it writes belongs to the update before
                thread.join()
        if trainer.progress.update == self.first:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.before[1]))
        if trainer.progress.update == self.last:
            self.free()

    def free(self):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


@pytest.mark.sampled
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_keeps_and_names_the_last_state(tmp_path, asynchronous, capsys):
    fills = FillsDisk(9)  # where the next thing to be written is a state
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            run(tmp_path, extra=(fills,), save_every_n_steps=3, asynchronous=asynchronous)
    finally:
        fills.free()
    assert [path.name for path in saved_states(tmp_path)] == ["update-000000003", "update-000000006"]
    assert not list((tmp_path / "states").glob(".*tmp"))
    saved = f"The run is saved in '{tmp_path}/states/update-000000006', after update 6."
    assert saved in notes_of_error(caught.value, capsys.readouterr().out)
    fills.first = 7  # the resumed run can save nothing of its own
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            run(tmp_path, extra=(fills,), save_every_n_steps=3, asynchronous=asynchronous)
    finally:
        fills.free()
    assert saved in notes_of_error(caught.value, capsys.readouterr().out)
    whole = run(tmp_path / "whole", save_every_n_steps=3)
    assert_same(run(tmp_path, save_every_n_steps=3), whole)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_may_continue_when_the_disk_is_full(tmp_path, capsys, asynchronous):
    fills = FillsDisk(5, 7)
    try:
        result = run(tmp_path, extra=(fills,), save_every_n_steps=3, asynchronous=asynchronous, continue_on_error=True)
    finally:
        fills.free()
    assert "could not be saved; the run continues. OSError: [Errno 27]" in capsys.readouterr().out
    names = [path.name for path in saved_states(tmp_path)]
    assert names[0] == "update-000000003"
    assert "update-000000006" not in names
    assert names[-1] == "update-000000012"
    assert_same(result, run(tmp_path / "whole", resume_from=None))


@pytest.mark.sampled
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("size", [0, 9000])
def test_a_run_may_continue_wherever_a_state_fills_the_disk(tmp_path, capsys, size, asynchronous):
    fills = FillsDisk(6, 8, size)
    try:
        run(tmp_path, extra=(fills,), asynchronous=asynchronous, continue_on_error=True)
    finally:
        fills.free()
    report = "the run continues. OSError: [Errno 27] File too large:"
    assert f"{report} '{tmp_path}/states/update-000000006/rank00000.pt'" in " ".join(capsys.readouterr().out.split())
    assert [int(path.name[-2:]) for path in saved_states(tmp_path)] == [1, 2, 3, 4, 5, 8, 9, 10, 11, 12]


# ------------------------------------------------------------------------------------ what is said of them


def fail_while_a_state_is_written(folder: Path) -> str:
    """The notes when both processes fail while a state is being written."""
    assert world_size() == 2
    may_end, sync, output = threading.Event(), os.fsync, io.StringIO()

    def waiting_sync(descriptor: int) -> None:
        if "update-000000004" in os.readlink(f"/proc/self/fd/{descriptor}"):
            assert may_end.wait(120)
        sync(descriptor)

    saving = SaveTrainingStateCallback(folder, save_every_n_steps=2, asynchronous=True)
    trainer = make_trainer([saving, raises_at(5, RuntimeError("broken"), "on_train_step_start")])
    with patch.object(os, "fsync", waiting_sync), contextlib.redirect_stdout(output):
        try:
            with pytest.raises(RuntimeError, match="broken") as caught:
                train(trainer, size=40)
        finally:
            may_end.set()
            for thread in threading.enumerate():
                if thread.name == "training-state-writer":
                    thread.join(120)
    assert trainer.progress.update == 5
    return notes_of_error(caught.value, output.getvalue())


@pytest.mark.processes
def test_an_unfinished_state_of_a_failed_run_is_not_called_saved(tmp_path, two_ranks):
    said, _ = two_ranks.run(fail_while_a_state_is_written, tmp_path)
    assert f"The run is saved in '{tmp_path}/update-000000002', after update 2." in said


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_interrupted_run_says_where_it_is_saved(asynchronous, here, capsys):
    def interrupt(trainer: Trainer, **kwargs: Any) -> None:
        if trainer.progress.update == 2:
            os.kill(os.getpid(), signal.SIGINT)

    saver = SaveTrainingStateCallback("states", asynchronous=asynchronous)
    trainer = make_trainer([PrintProgressCallback, listener(on_train_step_end=interrupt), saver])
    with pytest.raises(KeyboardInterrupt) as caught:
        train(trainer)
    assert notes_of_error(caught.value, capsys.readouterr().out).endswith(
        " Stopping because of SIGINT. The run is saved in 'states/update-000000002', after update 2. To resume it, "
        'call train() with the same arguments and resume_from="latest".'
    )
    assert [path.name for path in Path("states").glob("update-*")] == ["update-000000002"]
    train(make_trainer([PrintProgressCallback, saver]), resume_from="latest")
    assert capsys.readouterr().out.splitlines()[-1] == "Finishing training run"


def test_a_run_that_fails_says_where_it_was_saved_last(here, capsys):
    saving = SaveTrainingStateCallback("states", save_every_n_steps=2)
    trainer = make_trainer([saving, raises_at(3, ValueError("broken"))])
    with pytest.raises(ValueError, match="broken") as caught:
        train(trainer)
    assert "The run is saved in 'states/update-000000002', after update 2." in notes_of_error(
        caught.value, capsys.readouterr().out
    )
    assert caught.value.__notes__[-1].startswith("The run is saved in")  # below what happened


def test_a_resumed_state_is_known_by_any_spelling_of_its_path(here):
    train(make_trainer([SaveTrainingStateCallback("states")]))
    interrupts = raises_at(3, KeyboardInterrupt(), "on_train_step_start")
    again = make_trainer([SaveTrainingStateCallback("states"), interrupts])
    with pytest.raises(KeyboardInterrupt) as caught:
        train(again, epochs=2, resume_from=os.path.abspath("states/update-000000003"))
    assert caught.value.__notes__[-1].startswith("The run is saved in")


def test_a_failing_later_evaluation_is_not_reported_as_saved(here, capsys):
    trainer = train(make_trainer([SaveTrainingStateCallback("states")]))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        trainer.evaluate([(torch.zeros(3), torch.zeros(1))])
    assert capsys.readouterr().out == ""


# ---------------------------------------------------------------------------------------------- job queues


class OwnQueue:
    """A job queue of the user's own."""

    def __init__(self) -> None:
        self.asked: list[BaseException] = []

    def check(self) -> None:
        self.asked.clear()

    def was_requeued(self) -> bool:
        return False

    def requeue_after(self, interruption: Exception) -> str:
        self.asked.append(interruption)
        return "It is back in the queue."


def test_a_custom_job_queue_requeues_a_job(tmp_path, monkeypatch, capsys):
    queue = OwnQueue()
    monkeypatch.setitem(JOB_QUEUES, "Own", queue)
    interrupt = listener(on_train_step_end=lambda trainer, **_: os.kill(os.getpid(), signal.SIGUSR1))
    trainer = make_trainer([interrupt, SaveTrainingStateCallback(tmp_path, requeue=True)])
    with pytest.raises(SystemExit):
        train(trainer)
    assert [type(error).__name__ for error in queue.asked] == ["RunInterruptedError"]
    assert "It is back in the queue.\nThe run is saved in " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("event", "update"), [("on_train_step_start", 1), ("on_train_step_end", 2), ("on_stop_training_error", 2)]
)
def test_a_signal_during_a_pause_requeues_the_job_too(tmp_path, monkeypatch, capsys, event, update):
    def interrupt(trainer: Trainer, **_: Any) -> None:
        if trainer.progress.update == update:
            os.kill(os.getpid(), signal.SIGUSR1)

    queue = OwnQueue()
    monkeypatch.setitem(JOB_QUEUES, "Own", queue)
    pause = raises_at(1, RunPausedError("my own limit"), "on_train_step_start")
    callbacks = [pause, listener(**{event: interrupt})]
    with pytest.raises(SystemExit) as raised:
        train(make_trainer([*callbacks, SaveTrainingStateCallback(tmp_path, requeue=True)]))
    assert raised.value.code == 128 + signal.SIGUSR1
    assert [type(error).__name__ for error in queue.asked] == ["RunInterruptedError"]
    assert "It is back in the queue.\nThe run is saved in " in capsys.readouterr().out


def test_without_any_queue_the_error_names_the_extension(tmp_path, monkeypatch):
    for name in [*JOB_QUEUES]:
        monkeypatch.delitem(JOB_QUEUES, name)
    with pytest.raises(ValueError, match="requeue=True belongs to the extension 'slurm', which is not installed"):
        SaveTrainingStateCallback(tmp_path, requeue=True)
