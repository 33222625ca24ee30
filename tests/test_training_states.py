"""Training states: from every one of them a run goes on to the same bits; damage is found; rotation and locks."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import safetensors.torch
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset

from pytorch_accel_lite import StopTrainingError, Trainer, TrainerCallback, callbacks
from pytorch_accel_lite.callbacks import (
    LimitBatchesCallback,
    ModelEmaCallback,
    RunPausedError,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
)
from pytorch_accel_lite.checkpoint import DamagedStateError, print_contents, verify_state
from pytorch_accel_lite.checkpoint.checksums import checksum
from pytorch_accel_lite.data import OwnShard
from pytorch_accel_lite.extending import (
    JOB_QUEUES,
    STORES,
    Ranks,
    manifest_text,
    read_state,
    read_verified,
    write_files,
)
from pytorch_accel_lite.run.events import EVENTS
from tests.launching import (
    CAN_SHARD,
    PATIENCE,
    ROOT,
    SOAK,
    TORCHRUN,
    WarmPython,
    die_at_file_operation,
    environment,
    in_forks,
    run_elastic_script,
    some_of,
)
from tests.ranks import rank as own_rank
from tests.ranks import shared_folder, world_size
from tests.scripts.resumable import CopyStates, OrderCallback, make_model, run, run_to_the_end
from tests.sharded import gathered, large_model, sharding_accelerator
from tests.soak import soak
from tests.tasks import (
    Rows,
    Stream,
    assert_same,
    changed_manifest,
    equal,
    listener,
    make_data,
    make_trainer,
    quiet_trainer,
    raises_at,
    regression_data,
    small_model,
    told,
    train,
)


def run_shards(folder: Path, accelerator: Accelerator | None, resume_from: Any = None) -> Trainer:
    model = large_model()
    saving = SaveTrainingStateCallback(folder / "states", 1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    callbacks = [saving, CopyStates(folder)]
    trainer = Trainer(model, nn.MSELoss(), optimizer, callbacks, accelerator=accelerator, seed=3)
    trainer.train(regression_data(22), 2, regression_data(9), 3, resume_from=resume_from)
    return trainer


def _trained(accelerator: Accelerator, callbacks: list[Any], **kwargs: Any) -> Trainer:
    model = large_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = Trainer(model, nn.MSELoss(), optimizer, callbacks, accelerator=accelerator, seed=3)
    trainer.train(regression_data(12), 1, per_device_batch_size=3, **kwargs)
    return trainer


class Indexed(Rows):
    def __getitem__(self, index):
        return *super().__getitem__(index), torch.tensor(index)


class OfThree(Trainer):
    def calculate_train_batch_loss(self, batch):
        return super().calculate_train_batch_loss(batch[:2])


def _train(folder: Path, size: int, batch: int, accumulation: int, stop: int, resume: Path | None) -> list[int]:
    """Train one epoch, or what is left of it, and return the samples of all steps of all ranks."""
    torch.manual_seed(0)
    model, order = nn.Linear(5, 1).double(), OrderCallback()
    saving = SaveTrainingStateCallback(folder, save_every_n_steps=1, save_at_end=False, max_checkpoints=1)
    callbacks = [order, *([saving] if resume is None else []), raises_at(stop, StopTrainingError("enough"))]
    trainer = OfThree(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.01), callbacks, seed=size)
    trainer.train(
        Indexed(regression_data(size)),
        1,
        per_device_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        resume_from=resume,
    )
    return [sample for step in order.order for sample in step]


def _drawn_tasks() -> Any:
    draws = random.Random(7)
    for number in range(15 if SOAK else 6):
        size, batch, other = draws.randint(9, 60), draws.randint(1, 4), draws.randint(1, 9)
        accumulation, others = draws.randint(1, 3), draws.randint(1, 3)
        updates = -(-size // (2 * batch * accumulation))
        yield number, size, (batch, accumulation, draws.randint(1, max(updates - 1, 1))), (other, others)


pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")


def states(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "states").iterdir() if path.name.startswith("update-"))


def hashes(folder: Path) -> dict[Path, str]:
    return {path: checksum(path) for state in states(folder) for path in sorted(state.iterdir())}


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize(("accumulation", "workers", "seed"), [(1, 0, 5), (2, 0, None), (3, 2, 5)])
def test_from_every_save_point_a_run_resumes_to_the_same_bits(tmp_path, accumulation, workers, seed):
    kwargs = {"accumulation": accumulation, "workers": workers, "seed": seed, "save_every_n_epochs": 1}
    torch.manual_seed(1)
    whole = run(tmp_path, resume_from=None, extra=(CopyStates(tmp_path),), **kwargs)
    copies = sorted((tmp_path / "copies").glob("*/update-*"))
    assert len(copies) == whole["progress"]["update"] + 3
    for copy in some_of(copies):
        torch.manual_seed(99)
        resumed = run(tmp_path / f"again-{copy.parent.name}", resume_from=copy, **kwargs)
        assert_same(resumed, whole)


class Lists:
    """A loader of the user's own, the same in every epoch."""

    def __init__(self, data, size):
        self.batches = [data[i : i + size] for i in range(0, len(data), size)]

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


class OwnBatches(Trainer):
    def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
        return Lists(self.train_dataset, batch_size)


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["in memory", "stream", "own"])
@pytest.mark.parametrize("limit", [None, 3])
def test_a_run_with_dropout_resumes_its_bits_from_any_data(tmp_path, kind, limit):
    """The generators are where they were, also after what came before was read again and dropped."""

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(data)

    data = regression_data(22)
    sets = {"in memory": data, "stream": Stream(), "own": data}

    def train(folder, resume_from=None):
        model = make_model()
        saving = SaveTrainingStateCallback(folder / "states", 1, 1)
        callbacks = [saving, CopyStates(folder), *([LimitBatchesCallback(limit)] if limit else [])]
        kind_of_trainer = OwnBatches if kind == "own" else Trainer
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        trainer = kind_of_trainer(model, torch.nn.MSELoss(), optimizer, callbacks, seed=5)
        kwargs = {"shuffle": False} if kind == "stream" else None
        trainer.train(sets[kind], 2, None, 4, train_dataloader_kwargs=kwargs, resume_from=resume_from)
        assert trainer.progress.update == 2 * (limit or 6)
        return model.state_dict(), trainer.run_history.to_dict()

    weights, history = train(tmp_path)
    for copy in some_of(sorted((tmp_path / "copies").glob("*/update-*"))):
        again = train(tmp_path / f"again-{copy.parent.name}", copy)
        assert again[1] == history
        assert equal(again[0], weights)


def test_saving_does_not_change_the_run(tmp_path):
    often = run(tmp_path / "often", resume_from=None)
    never = run(tmp_path / "never", resume_from=None, save_every_n_steps=None, save_at_end=False)
    assert_same(never, often)
    assert not list((tmp_path / "never").glob("states/update-*"))


def script(folder: Path, *arguments: object) -> list[str]:
    return ["tests/scripts/resumable.py", str(folder), *map(str, arguments)]


def final(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "final.pt", weights_only=False)


@pytest.mark.soak
@pytest.mark.programs
@pytest.mark.parametrize(
    ("workers", "asynchronous", "evaluate_every"),
    some_of([(0, False, "0.4 epochs"), (0, True, "10 samples"), (2, False, None)]),
)
@pytest.mark.timeout(7200 if SOAK else 3600)
def test_sigkill_at_random_instants_leads_to_the_same_bits(tmp_path, workers, asynchronous, evaluate_every):
    """A short version of tests/soak.py; ``make soak`` makes it long."""
    how = {"workers": workers, "asynchronous": asynchronous, "evaluate_every": evaluate_every}
    found, expected = soak(tmp_path, 100 if SOAK else 6, **how)
    assert_same(found, expected)


@pytest.mark.soak
@pytest.mark.programs
@pytest.mark.timeout(7200 if SOAK else 3600)
def test_sigkill_of_a_run_that_holds_data_in_attributes(tmp_path):
    """A short version of tests/soak.py --held; ``make soak`` makes it long, also on two processes."""
    for processes in (1, 2) if SOAK else (1,):
        (tmp_path / str(processes)).mkdir()
        found, expected = soak(tmp_path / str(processes), 50 if SOAK else 3, processes, held=True)
        assert_same(found, expected)


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.timeout(7200 if SOAK else 3600)
def test_sigkill_of_two_processes_leads_to_the_same_bits(tmp_path, job):
    def run_whole(folder, **options):
        job(2).run(run_to_the_end, folder, **options)

    found, expected = soak(tmp_path, 100 if SOAK else 2, processes=2, evaluate_every="2 updates", run_whole=run_whole)
    assert found["processes"] == 2
    assert_same(found, expected)


@pytest.mark.soak
@CAN_SHARD
@pytest.mark.processes
@pytest.mark.timeout(7200 if SOAK else 3600)
def test_a_killed_sharded_run_resumes_remote_states_bit_for_bit(tmp_path, job):
    """One or both of two processes, which write their shards in the background."""

    def run_whole(folder, **options):
        job(2).run(run_to_the_end, folder, **options, timeout=3000)

    how = {"processes": 2, "asynchronous": True, "sharded_remotely": True}
    found, expected = soak(tmp_path, 50 if SOAK else 1, **how, run_whole=run_whole)
    assert found["processes"] == 2
    assert_same(found, expected)


def every_save_point(folder: Path, accumulation: int) -> Any:
    """A whole run, and one resumed from every third state that it saved; from every one with SOAK."""
    # On 3 processes no share has one sample: batch norm takes none of them.
    kwargs = {"accumulation": accumulation, "save_every_n_epochs": 1, "size": 24 if world_size() == 3 else 22}
    results = [run(folder, resume_from=None, extra=(CopyStates(folder),), **kwargs)]
    copies = sorted((folder / "copies").glob("*/update-*"))
    assert len(copies) == results[0]["progress"]["update"] + 3
    for copy in some_of(copies):  # within epochs and at their ends
        torch.manual_seed(99)
        results.append(run(folder / f"again-{copy.parent.name}", resume_from=copy, **kwargs))
    return results


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.parametrize(("processes", "accumulation"), [(3, 2), *([(2, 1), (2, 3), (3, 1)] if SOAK else [])])
def test_processes_resume_the_same_bits_from_every_save_point(tmp_path, job, processes, accumulation):
    runs = job(processes).run(every_save_point, tmp_path, accumulation)
    assert len(runs) == processes
    for whole, *resumed in runs:  # of each rank: its generators are its own
        assert len(resumed) >= 2
        for again in resumed:
            assert again["processes"] == processes
            assert_same(again, whole)


def save_in_mid_epoch(folder: Path) -> list[list[int]]:
    """The samples that each of the drawn tasks had had when it was stopped."""
    return [_train(folder / f"task{number}", size, *before, None) for number, size, before, _ in _drawn_tasks()]


def resume_in_mid_epoch(folder: Path) -> list[tuple[int, list[int]]]:
    """The size of each task, and its samples with those before, in a job of other processes and batch sizes."""
    results = []
    for number, size, _, after in _drawn_tasks():
        (state,) = folder.glob(f"task{number}/update-*")
        results.append((size, _train(folder, size, *after, -1, state)))
    return results


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:The training state holds the state of callback")
@pytest.mark.processes
def test_an_epoch_resumes_on_other_processes_and_batch_sizes(tmp_path, job):
    """Drawn sizes, batch sizes and moments: saved by 2 processes, resumed by 1, 2 and 3 with what was not yet seen."""
    saved, _ = job(2).run(save_in_mid_epoch, tmp_path)
    resume = resume_in_mid_epoch
    for resumed in (resume(tmp_path), *job(2).run(resume, tmp_path), *job(3).run(resume, tmp_path)):
        assert len(resumed) == len(saved) >= 6
        for before, (size, everything) in zip(saved, resumed, strict=True):
            assert before, "it was saved within the epoch"
            assert everything[: len(before)] == before
            assert sorted(everything) == list(range(size))


@pytest.mark.processes
def test_sigterm_to_the_launcher_saves_one_state_to_resume_from(tmp_path, job):
    job(2).run(run_to_the_end, tmp_path / "whole", workers=2)
    folder = tmp_path / "stopped"
    folder.mkdir()
    command = [*TORCHRUN, "2", *script(folder, 1, 2, 0.2)]
    process = WarmPython(
        command, env=environment(), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while process.poll() is None and not list(folder.glob("states/update-*")):
        time.sleep(0.05)
    time.sleep(0.3)
    process.terminate()
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    assert output.count("Stopping because of SIGTERM.") == 1
    assert "forcefully exiting" not in errors  # the launcher did not have to kill ranks that waited for their workers
    assert not (folder / "final.pt").exists()
    manifest = verify_state(states(folder)[-1])
    assert verify_state(str(states(folder)[-1])) == manifest
    assert manifest["world_size"] == 2, errors
    job(2).run(run_to_the_end, folder, workers=2)
    assert_same(final(folder), final(tmp_path / "whole"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR2, 140), (signal.SIGINT, None)])
def test_a_signal_ends_a_run_in_order(tmp_path, number, code):
    class SendsSignal(TrainerCallback):
        ended = False

        def on_train_step_end(self, trainer, **kwargs):
            if trainer.progress.update == 8:
                os.kill(os.getpid(), number)

        def on_training_run_end(self, trainer, **kwargs):
            self.ended = True

    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)]
    sends = SendsSignal()
    with pytest.raises(KeyboardInterrupt if code is None else SystemExit) as raised:
        run(tmp_path, extra=(sends,), save_every_n_steps=None)
    assert code is None or raised.value.code == code
    assert sends.ended
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)] == before
    assert [path.name for path in states(tmp_path)] == ["update-000000008"]
    assert_same(run(tmp_path, save_every_n_steps=None), run(tmp_path / "whole", save_every_n_steps=None))


PROGRAM = """
import os, signal, sys, time
from tests.tasks import Rows, listener, make_data, make_trainer, train
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback

def interrupt(trainer, **kwargs):
    if trainer.progress.update == 2:
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))

saver = [SaveTrainingStateCallback(sys.argv[2])] if sys.argv[2:] else []
trainer = make_trainer([listener(on_train_step_start=interrupt), *saver])
train(trainer, 9, train_dataset=Rows(make_data()), train_dataloader_kwargs={"num_workers": 0})
"""


@pytest.mark.soak
@pytest.mark.parametrize(
    ("number", "saves", "code"),
    some_of([(signal.SIGINT, False, -2), (signal.SIGINT, True, -2), (signal.SIGTERM, True, 143)]),
)
def test_a_program_ended_by_a_signal_says_last_how_to_resume(tmp_path, number, saves, code):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, number.name, *([str(tmp_path)] if saves else [])],
        env=environment(), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == code, done.stdout  # shells show 130 for -2
    assert ("Traceback" in done.stdout) == (number == signal.SIGINT)
    assert "pytorch_accel_lite/loop" not in done.stdout
    said = " ".join(done.stdout.split())
    assert f"The run is saved in '{tmp_path}/update-000000003'" in said or not saves
    assert said.endswith('arguments and resume_from="latest".' if saves else "KeyboardInterrupt")


def test_an_interrupt_shows_the_lines_of_the_user_only():
    class Interrupted(Rows):
        def __getitem__(self, index):
            raise KeyboardInterrupt

    for method in (make_trainer().evaluate, make_trainer().predict):
        with pytest.raises(KeyboardInterrupt) as caught:
            method(Interrupted(make_data()), dataloader_kwargs={"num_workers": 0})
        names = [frame.f_code.co_name for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
        assert names == [test_an_interrupt_shows_the_lines_of_the_user_only.__name__, "call", "__getitem__"]


def test_workers_shielded_from_signals_are_initialised_as_asked(tmp_path):
    class Marked(Rows):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x, torch.full_like(y, float(os.environ["MARK"]))

    def mark(worker_id: int) -> None:
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
        os.environ["MARK"] = str(worker_id)

    marks: list[float] = []
    look = listener(on_train_step_end=lambda t, batch, **_: marks.extend(batch[1].flatten().tolist()))
    trainer = make_trainer([SaveTrainingStateCallback(tmp_path), look])
    kwargs = {"num_workers": 2, "worker_init_fn": mark}
    train(trainer, train_dataset=Marked(make_data()), train_dataloader_kwargs=kwargs)
    assert marks == [0, 0, 1, 1, 0, 0]


def test_workers_of_streams_leave_signals_to_the_run_too(tmp_path):
    def look(worker_id: int) -> None:
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN

    trainer = make_trainer([SaveTrainingStateCallback(tmp_path)])
    train(trainer, train_dataset=Stream(), train_dataloader_kwargs={"num_workers": 1, "worker_init_fn": look})
    assert trainer.progress.samples == 6


@pytest.mark.programs
def test_a_second_signal_ends_the_program_at_once(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from pytorch_accel_lite import TrainerCallback\n"
        "from tests.scripts.resumable import run\n"
        "class Waits(TrainerCallback):\n"
        "    def on_train_step_start(self, trainer, **kwargs):\n"
        "        print('in a step', flush=True); time.sleep(3600)\n"
        "run(Path(sys.argv[1]), extra=(Waits(),))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with WarmPython(command, stdout=subprocess.PIPE, text=True, env=environment(), cwd=ROOT) as process:
        while "in a step" not in process.stdout.readline():
            pass
        process.terminate()
        time.sleep(0.5)
        assert process.poll() is None  # the first asks for an end after the update, which is far away
        process.terminate()
        assert process.wait(PATIENCE) == -signal.SIGTERM
    assert not list((tmp_path / "states").glob("update-*"))


def test_in_a_thread_signals_are_left_unchanged(tmp_path):
    before, results = signal.getsignal(signal.SIGTERM), []

    class Looks(TrainerCallback):
        def on_train_step_end(self, trainer, **kwargs):
            results.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=lambda: results.append(run(tmp_path, extra=(Looks(),))))
    thread.start()
    thread.join(120)
    *handlers, result = results
    assert result["progress"]["update"] == len(handlers) == 12
    assert set(handlers) == {before}


def is_running(pid: str) -> bool:
    """Whether a process is there and has not ended; it may end while it is looked at."""
    with suppress(OSError):
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    return False


@pytest.mark.processes
def test_ranks_do_not_outlive_a_launcher_that_was_killed(tmp_path):
    tmp_path.joinpath("run").mkdir()
    command = [*TORCHRUN, "2", *script(tmp_path / "run", 1, 0, 0.2)]
    with WarmPython(command, env=environment(), cwd=ROOT, stdout=subprocess.DEVNULL) as launcher:
        while not list(tmp_path.glob("run/states/update-*")):
            time.sleep(0.05)
        ranks = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        assert len(ranks) == 2
        launcher.kill()
    deadline = time.monotonic() + PATIENCE
    while any(map(is_running, ranks)):
        assert time.monotonic() < deadline, "ranks go on without their launcher"
        time.sleep(0.05)


def test_a_finished_run_does_nothing_more_and_says_so(tmp_path, capsys):
    whole = run(tmp_path)
    assert_same(run(tmp_path), whole)
    assert "Nothing left to do: the run had finished" in capsys.readouterr().out


def test_a_finished_run_removes_its_old_states_when_resumed(tmp_path):
    run(tmp_path)
    *_, newest = states(tmp_path)
    run(tmp_path, max_checkpoints=1)
    assert states(tmp_path) == [newest]


DAMAGES = {
    "emptied": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "flipped": lambda path: path.write_bytes(
        path.read_bytes()[: path.stat().st_size // 2]
        + bytes([path.read_bytes()[path.stat().st_size // 2] ^ 1])
        + path.read_bytes()[path.stat().st_size // 2 + 1 :]
    ),
    "removed": lambda path: path.unlink(),
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["model.safetensors", "trainer.pt", "rank00000.pt", "manifest.json"])
def test_damage_is_found_and_the_state_before_is_used(tmp_path, name, damage, capsys):
    whole = run(tmp_path)
    *_, before, newest = states(tmp_path)
    DAMAGES[damage](newest / name)
    with pytest.raises(DamagedStateError, match=name):
        verify_state(newest)
    assert_same(run(tmp_path), whole)
    output = capsys.readouterr().out
    assert f"{newest}" in output
    assert f"Resuming from '{before}'" in output


def test_a_state_killed_while_being_replaced_gets_its_name_back(tmp_path, capsys):
    run(tmp_path)
    newest = states(tmp_path)[-1]
    waiting = newest.with_name(f".{newest.name}.previous")
    newest.rename(waiting)
    verify_state(newest)
    newest.rename(waiting)
    capsys.readouterr()
    run(tmp_path)
    assert "Nothing left to do: the run had finished" in capsys.readouterr().out
    assert states(tmp_path)[-1] == newest


def test_a_fresh_run_keeps_a_state_killed_while_being_replaced(tmp_path):
    run(tmp_path)
    last = states(tmp_path)[-1]
    last.rename(last.with_name(f".{last.name}.previous"))
    last.with_name(".update-000000099.tmp").mkdir()
    run(tmp_path, resume_from=None, epochs=1)
    assert last in states(tmp_path)
    assert not list((tmp_path / "states").glob(".update*"))


def test_a_long_history_is_resumed_as_it_was(tmp_path):
    odd = [1.5, 2, True, False, 2**70, float("nan"), "text"]

    def record(trainer: Any) -> None:
        history, epoch = trainer.run_history, trainer.progress.epoch
        for name, value in (("float", 0.1 * epoch), ("int", epoch), ("huge", 2**62 + epoch), ("odd", odd[epoch % 7])):
            history.update_metric(name, value)

    def run(epochs: int, **kwargs: Any) -> Any:
        saving = SaveTrainingStateCallback(tmp_path, max_checkpoints=1)
        trainer = make_trainer([listener(on_train_epoch_end=record), saving])
        return train(trainer, epochs, size=2, **kwargs).run_history

    run(20)
    resumed, whole = run(21, resume_from="latest"), run(21)
    for name in whole:
        assert [*map(repr, resumed[name])] == [*map(repr, whole[name])]
    assert resumed.rows()[:-1] == resumed.rows()[:20]
    assert resumed.rows(20) == resumed.rows()[19:]


def test_states_of_which_none_is_whole_are_an_error(tmp_path):
    run(tmp_path, max_checkpoints=2)
    for state in states(tmp_path):
        DAMAGES["truncated"](state / "trainer.pt")
    with pytest.raises(DamagedStateError, match=r"All training states in .* are damaged"):
        run(tmp_path)


def test_rotation_keeps_the_newest_and_foreign_files(tmp_path):
    (tmp_path / "states" / "notes").mkdir(parents=True)
    (tmp_path / "states" / "update-final").mkdir()
    last = run(tmp_path, max_checkpoints=2, save_every_n_epochs=1)["progress"]["update"]
    kept = [path for path in states(tmp_path) if path.name != "update-final"]
    assert {int(path.name.removeprefix("update-")) for path in kept} == {last - 1, last}
    assert (tmp_path / "states" / "notes").is_dir()
    assert not list((tmp_path / "states").glob(".update*"))


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


@pytest.mark.parametrize(
    ("first", "second", "match"),
    [
        (True, False, "holds a schedule, but create_scheduler_fn was not passed to train.., so rates stay as set"),
        (False, True, "holds no schedule, so that of create_scheduler_fn starts from the beginning"),
    ],
)
def test_a_run_resumed_with_or_without_its_schedule_warns(first, second, match, tmp_path):
    def run(epochs: int, is_scheduled: bool) -> Trainer:
        decay = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9) if is_scheduled else None
        trainer = make_trainer([SaveTrainingStateCallback(tmp_path)])
        return train(trainer, epochs, create_scheduler_fn=decay, resume_from="latest")

    run(1, first)
    with pytest.warns(UserWarning, match=match):
        run(2, second)


class RefinedAdam(torch.optim.Adam):
    """A subclass of the user's own, with the state of its base."""


class OtherName(RefinedAdam):
    """The same class, as a decorator that derives another would have it."""


def train_with(make: Any, folder: Path, epochs: int, resume_from: Any = "latest", several: bool = False) -> Trainer:
    model = small_model(features=4, dtype=torch.float32)
    optimizer = make(model.parameters())
    if several:
        optimizer = {"body": torch.optim.SGD(model[0].parameters(), lr=0.1), "head": make(model[2].parameters())}
    trainer = make_trainer([SaveTrainingStateCallback(folder)], model, optimizer=optimizer)
    return train(trainer, epochs, resume_from=resume_from)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.optim.SGD, torch.optim.Adam),
        (torch.optim.AdamW, torch.optim.Adam),
        (torch.optim.Adam, torch.optim.AdamW),
        (torch.optim.Adam, torch.optim.Adamax),
        (RefinedAdam, torch.optim.AdamW),
        (torch.optim.NAdam, torch.optim.RAdam),
    ],
)
def test_the_state_of_another_class_of_optimizers_is_refused(tmp_path, first, second, several):
    train_with(first, tmp_path, 1, several=several)
    which = "that of group 'head'" if several else "it"
    message = f"The optimizer in .* does not fit the trainer's: {which} was {first.__name__} and is {second.__name__} "
    with pytest.raises(ValueError, match=message):
        train_with(second, tmp_path, 2, several=several)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.optim.Adam, RefinedAdam),
        (RefinedAdam, torch.optim.Adam),
        (RefinedAdam, OtherName),
        (torch.optim.Adam, partial(torch.optim.Adam, fused=True)),
        (partial(torch.optim.Adam, foreach=True), torch.optim.Adam),
        (torch.optim.AdamW, torch.optim.AdamW),
    ],
)
def test_a_state_fits_the_same_optimizer_however_derived(tmp_path, first, second):
    train_with(first, tmp_path, 1)
    assert train_with(second, tmp_path, 2).progress.update == 6


def test_an_attribute_of_another_class_of_optimizers_is_refused(tmp_path):
    class WithCritic(Trainer):
        critic_class = torch.optim.AdamW

        def training_run_start(self):
            self.critic = torch.nn.Linear(1, 1)
            self.critic_optimizer = self.critic_class(self.critic.parameters())

    def run(epochs):
        trainer = make_trainer([SaveTrainingStateCallback(tmp_path)], trainer_class=WithCritic)
        return train(trainer, epochs, resume_from="latest")

    run(1)
    WithCritic.critic_class = torch.optim.Adam
    with pytest.raises(ValueError, match=r"The critic_optimizer in .* does not fit .*: it was AdamW and is Adam now"):
        run(2)


def test_a_state_without_its_optimizers_class_is_resumed(tmp_path):
    train_with(torch.optim.Adam, tmp_path, 1)
    (state,) = tmp_path.glob("update-*")
    shared = torch.load(state / "trainer.pt")
    assert shared.pop("optimizer_classes") == {"optimizer": [["Adam"]]}
    torch.save(shared, state / "trainer.pt")
    with changed_manifest(state, "trainer.pt"):
        pass
    assert train_with(torch.optim.Adam, tmp_path, 2).progress.update == 6


def test_runs_that_have_ended_hold_no_files_of_their_locks(tmp_path):
    trainer = make_trainer([SaveTrainingStateCallback(tmp_path)])
    for _ in range(3):
        train(trainer)

    def is_held() -> bool:
        # Neither isinstance() nor a name: one fails for a proxy of an object that is gone, one for a file of no buffer.
        files = [repr(found) for found in gc.get_objects() if type(found) is io.TextIOWrapper]
        return any(str(tmp_path / ".lock") in file for file in files)

    latest = time.monotonic() + PATIENCE
    while is_held() and time.monotonic() < latest:  # the threads that show that the runs are alive may be ending still
        time.sleep(0.01)
    assert not is_held()


class Transposed(torch.nn.Module):
    """Has a weight that is another one transposed, in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = torch.nn.Linear(4, 3, bias=False)
        self.decode = torch.nn.Linear(3, 4, bias=False)
        self.decode.weight = torch.nn.Parameter(self.encode.weight.data.t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x)).sum(1, keepdim=True)


def test_weights_that_share_memory_in_another_order_are_saved(tmp_path):
    def new() -> Trainer:
        return make_trainer([SaveTrainingStateCallback(tmp_path / "states")], Transposed())

    trainer = train(new())
    trainer.save_model(tmp_path / "model.safetensors")
    trained = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    other = new()
    other.load_checkpoint(tmp_path / "model.safetensors")
    assert equal(other.model.state_dict(), trained)
    assert equal(train(new(), resume_from="latest").model.state_dict(), trained)


def test_a_second_run_in_the_same_directory_is_refused(tmp_path):
    code = (
        "import fcntl, sys, time\n"
        "file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); file.write('4711'); file.flush()\n"
        "print('locked', flush=True); time.sleep(3600)"
    )
    (tmp_path / "states").mkdir()
    command = [sys.executable, "-c", code, str(tmp_path / "states" / ".lock")]
    with WarmPython(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(RuntimeError, match=r"Another run \(process 4711\) .* another save_dir"):
            run(tmp_path)
        other.kill()
    run(tmp_path)


@pytest.mark.parametrize("resume_from", [None, "latest"])
def test_a_run_that_fails_before_it_begins_frees_the_directory(tmp_path, resume_from):
    """A notebook keeps the error, and with it the trainer and its callbacks."""

    def fail(optimizer: torch.optim.Optimizer) -> None:
        raise RuntimeError("no schedule")

    def begin(**kwargs: Any) -> None:
        train(make_trainer([SaveTrainingStateCallback(tmp_path / "states")]), resume_from=resume_from, **kwargs)

    with pytest.raises(RuntimeError, match="no schedule") as kept:
        begin(create_scheduler_fn=fail)
    begin()
    assert kept.value.__traceback__ is not None


@pytest.mark.parametrize("is_other_first", [True, False])
def test_a_run_whose_directory_is_removed_locks_it_again(tmp_path, is_other_first):
    """Otherwise a second run gets in, and both save in one directory."""
    code = (
        "import sys; from pathlib import Path; from pytorch_accel_lite.checkpoint.state_store import DirectoryStore\n"
        "store = DirectoryStore(sys.argv[1]); store.lock(); print('locked', flush=True); sys.stdin.readline()"
    )
    command, pipe = [sys.executable, "-c", code, str(tmp_path / "states")], subprocess.PIPE
    starts = 5 if is_other_first else 6

    def interfere(trainer: Trainer, **kwargs: Any) -> None:
        if trainer.progress.update == 5:
            shutil.rmtree(tmp_path / "states")
        if trainer.progress.update == starts:
            others.append(WarmPython(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
            answers.append(others[0].stdout.readline())

    others: list[Any] = []
    answers: list[str] = []
    interferes = listener(on_train_step_end=interfere)
    try:
        if is_other_first:
            with pytest.raises(RuntimeError, match=r"Another run \(process \d+\) .* another save_dir"):
                run(tmp_path, extra=(interferes,))
            assert answers == ["locked\n"]
            assert not states(tmp_path)
        else:
            run(tmp_path, extra=(interferes,))
            assert answers == [""]
            assert "Another run (process" in others[0].stderr.read()
            assert [int(path.name[-2:]) for path in states(tmp_path)] == [5, 6, 7, 8, 9, 10, 11, 12]
    finally:
        for other in others:
            other.kill()
            other.communicate()


def test_a_save_dir_that_is_a_file_is_an_error_before_training(tmp_path):
    (tmp_path / "states").touch()
    trainer = make_trainer([SaveTrainingStateCallback(tmp_path / "states")])
    with pytest.raises(NotADirectoryError, match=r"save_dir='.*/states' is not a directory.* another save_dir"):
        train(trainer)
    assert trainer.progress.update == 0


def test_a_state_whose_manifest_is_a_directory_is_damaged(tmp_path, capsys):
    whole = run(tmp_path)
    *_, before, newest = states(tmp_path)
    (newest / "manifest.json").unlink()
    (newest / "manifest.json").mkdir()
    assert_same(run(tmp_path), whole)
    output = capsys.readouterr().out
    assert f"Skipping a damaged training state. '{newest}/manifest.json' is damaged: " in output
    assert f"Resuming from '{before}'" in output


def test_rotation_removes_links_to_states_but_not_their_targets(tmp_path):
    run(tmp_path, epochs=1, schedule=False)
    (tmp_path / "elsewhere").mkdir()
    for state in states(tmp_path):
        state.rename(tmp_path / "elsewhere" / state.name)
        state.symlink_to(tmp_path / "elsewhere" / state.name)
    (tmp_path / "states" / ".update-000000001.removed").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "states" / "update-000000005").symlink_to(tmp_path / "nothing")  # an update to come
    (tmp_path / "states" / "update-000000006").touch()
    whole = run(tmp_path / "whole", epochs=2, schedule=False)
    assert_same(run(tmp_path, epochs=2, max_checkpoints=1, schedule=False), whole)
    assert sorted(os.listdir(tmp_path / "states")) == [".lock", "update-000000008"]
    assert len(os.listdir(tmp_path / "elsewhere")) == 4


def test_a_run_that_could_not_begin_leaves_its_directory_free(tmp_path):
    run(tmp_path, max_checkpoints=1)
    (state,) = states(tmp_path)
    DAMAGES["truncated"](state / "trainer.pt")
    saving = SaveTrainingStateCallback(tmp_path / "states")
    trainer = make_trainer([saving], seed=0)
    with pytest.raises(DamagedStateError):
        train(trainer, resume_from="latest")
    code = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "states" / ".lock")], check=False).returncode == 0


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_loading_runs_no_code(tmp_path):
    run(tmp_path, max_checkpoints=1)
    (state,) = states(tmp_path)
    marker = tmp_path / "executed"

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(marker),)

    (state / "trainer.pt").write_bytes(pickle.dumps(Evil()))
    with changed_manifest(state, "trainer.pt"):
        pass
    verify_state(state)  # whole, but not to be trusted
    with pytest.raises(ValueError, match="cannot be loaded as plain tensors"):
        run(tmp_path)
    assert not marker.exists()


def on_two_processes(folder: Path) -> Any:
    """The final weights, gathered, and the losses; each run that is resumed from a state ends with the same."""
    accelerator = sharding_accelerator()
    trainer = run_shards(folder / "whole", accelerator)
    assert trainer.accelerator.distributed_type == DistributedType.FSDP
    assert any(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
    expected = gathered(trainer.model.state_dict())
    losses = trainer.run_history.to_dict()
    trainer.save_model(folder / "model.safetensors")
    trainer.save_checkpoint(folder / "model.pt")
    for copy in sorted((folder / "whole" / "copies").glob("*/update-*")):
        again = run_shards(folder / f"again-{copy.parent.name}", accelerator, copy)
        assert equal(gathered(again.model.state_dict()), expected), copy
        assert again.run_history.to_dict() == losses
    return expected, losses


@CAN_SHARD
@pytest.mark.processes
def test_sharded_weights_are_saved_whole_and_resumed(tmp_path, job):
    expected, history = job(2).run(on_two_processes, tmp_path)[0]
    assert equal(safetensors.torch.load_file(tmp_path / "model.safetensors"), expected)
    model = large_model()
    trainer = quiet_trainer(model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01))
    trainer.load_checkpoint(tmp_path / "model.pt")  # the optimizer's state too
    assert equal(model.state_dict(), expected)
    run_shards(tmp_path / "unsharded", None, tmp_path / "whole/copies/004-step/update-000000004")
    resumed = run_shards(tmp_path / "finished", None, states(tmp_path / "whole")[-1])
    assert equal(resumed.model.state_dict(), expected)
    assert resumed.run_history.to_dict() == history


def of_seven_samples() -> Any:
    """A process takes part in a step in which it has no sample."""
    accelerator, data = sharding_accelerator(), regression_data(7)
    trainer = _trained(accelerator, [])
    weights = gathered(trainer.model.state_dict())
    loss = trainer.evaluate(data, per_device_batch_size=3)["evaluation_loss"]
    return weights, loss, trainer.predict(data, per_device_batch_size=3)


@CAN_SHARD
@pytest.mark.processes
def test_a_sample_that_keeps_sharded_ranks_in_step_counts_zero(two_ranks):
    data, model = regression_data(7), large_model().eval()
    for weights, loss, predictions in two_ranks.run(of_seven_samples):
        model.load_state_dict(weights)
        outputs = model(data.tensors[0]).detach()
        torch.testing.assert_close(predictions, outputs)
        expected = (outputs - data.tensors[1]).square()[:, 0].tolist()
        assert loss == pytest.approx(sum(expected) / 7)


def refusals() -> dict[str, str]:
    """What cannot be done with sharded weights, and what is said of it."""
    accelerator, said = sharding_accelerator(), {}
    for name, callback in {
        "rewrap": listener(on_train_epoch_start=Trainer.rewrap_model),
        "skip": callbacks.SkipFailedBatchesCallback(),
    }.items():
        try:
            _trained(accelerator, [callback])
        except (ValueError, RuntimeError) as error:
            said[name] = str(error)
    return said


def state_of_fsdp1(folder: Path) -> str | None:
    model = large_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = Trainer(model, nn.MSELoss(), optimizer, [], accelerator=sharding_accelerator(version=1))
    try:
        trainer.save_training_state(folder / "state")
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.extension("failed_batches")
@CAN_SHARD
@pytest.mark.processes
def test_what_cannot_be_done_with_sharded_weights_is_refused(tmp_path, two_ranks):
    for said in two_ranks(refusals):
        assert "cannot change in the middle of this run: the model is sharded (FSDP)" in said["rewrap"]
        assert "SkipFailedBatchesCallback does not work with sharded weights" in said["skip"]
    for message in two_ranks.run(state_of_fsdp1, tmp_path):
        assert message.startswith("Training states are not supported with FSDP: ")
        assert "Use FSDP with fsdp_version=2" in message


def saving_in_local_folders() -> list[str]:
    """What is said of relative folders for states, where each process works in a folder of its own."""
    with shared_folder() as folder, contextlib.chdir(folder):
        os.mkdir(str(own_rank()))
        with contextlib.chdir(str(own_rank())):
            trainer = make_trainer([SaveTrainingStateCallback("states", save_every_n_epochs=1)])
            try:
                train(trainer)
            except OSError as error:
                said = [f"{error} {trainer.progress.update} updates, {os.listdir()}"]
            try:
                trainer.save_training_state("state")
            except OSError as error:
                said.append(str(error))
    return said


@pytest.mark.processes
def test_a_folder_not_shared_by_the_processes_is_an_error(two_ranks):
    for rank, said in enumerate(two_ranks(saving_in_local_folders)):
        for message, name in zip(said, ("save_dir='states'", "'.'"), strict=True):
            assert message.startswith("Rank 1 failed: FileNotFoundError: ") == (rank == 0)
            assert f"{name} is not the directory of the first process on " in message
            assert "Pass the absolute path of a directory that all processes share" in message
        assert said[0].endswith(f"0 updates, {['states'] if rank == 0 else []}")


def test_what_cannot_be_stored_is_named(tmp_path):
    class Keeps(TrainerCallback):
        def state_dict(self):
            return {"nested": [1, {"path": tmp_path}]}

    with pytest.raises(TypeError, match=r"state\['callbacks'\]\['Keeps'\]\['nested'\]\[1\]\['path'\] is \w*PosixPath"):
        run(tmp_path, extra=(Keeps(),))
    assert not list(tmp_path.glob("states/*update*"))


class Counter:
    """An object with a state."""

    value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def test_objects_registered_with_the_accelerator_are_kept(tmp_path):
    def run(epochs: int) -> tuple[int, int]:
        accelerator, first, second = Accelerator(cpu=True), Counter(), Counter()
        trainer = make_trainer([SaveTrainingStateCallback(tmp_path), counts], accelerator=accelerator)
        accelerator.register_for_checkpointing(trainer.model, first, second)
        trainer.register_for_checkpointing("second", second)
        train(trainer, epochs, resume_from="latest")
        return first.value, second.value

    def count(trainer: Trainer, step: int, **kwargs: Any) -> None:
        trainer.accelerator._custom_objects[1].value += 1
        trainer.registered_objects["second"].value += 10

    counts = listener(on_train_step_end=count)
    assert run(1) == (3, 30)
    shared = torch.load(next(tmp_path.glob("update-*/trainer.pt")))
    assert shared["objects"] == {"second": {"value": 30}, "accelerator.Counter.1": {"value": 3}}
    assert run(2) == (6, 60)


def test_objects_of_the_users_are_kept(tmp_path):
    trainer = quiet_trainer(small_model())
    counter = Counter()
    counter.value = 3
    trainer.register_for_checkpointing("counter", counter)
    trainer.train(regression_data(8), 1)
    trainer.save_training_state(tmp_path / "state", {"note": "kept"})
    fresh, again = quiet_trainer(small_model(1)), Counter()
    fresh.register_for_checkpointing("counter", again)
    metadata = fresh.load_training_state(tmp_path / "state")
    assert metadata["note"] == "kept"
    assert metadata["progress"]["update"] == 1
    assert again.value == 3
    assert equal(fresh.model.state_dict(), trainer.model.state_dict())
    other = quiet_trainer(small_model())
    other.register_for_checkpointing("other", again)
    with (
        pytest.warns(UserWarning, match="holds nothing for the registered object 'other'"),
        pytest.warns(UserWarning, match="state of registered object 'counter', which no longer exists"),
    ):
        other.load_training_state(tmp_path / "state")
    with pytest.raises(ValueError, match="already registered as 'counter'"):
        fresh.register_for_checkpointing("counter", again)
    with pytest.raises(TypeError, match=r"must have state_dict\(\)"):
        fresh.register_for_checkpointing("other", object())


def test_a_state_that_does_not_fit_is_explained(tmp_path):
    trainer = quiet_trainer(small_model())
    trainer.train(regression_data(8), 1)
    trainer.save_training_state(tmp_path / "state")
    with pytest.raises(ValueError, match=r"does not fit the model Linear: missing in the checkpoint: bias, weight"):
        quiet_trainer(torch.nn.Linear(5, 1)).load_training_state(tmp_path / "state")
    model = small_model()
    other = torch.optim.AdamW([model[0].weight], lr=0.1)
    with pytest.raises(ValueError, match=r"The optimizer in '.*' does not fit the trainer's AdamW"):
        quiet_trainer(model, optimizer=other).load_training_state(tmp_path / "state")
    with pytest.raises(FileNotFoundError, match="There is no training state at"):
        trainer.load_training_state(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DamagedStateError, match=r"is not a training state: it has no manifest\.json"):
        trainer.load_training_state(tmp_path / "empty")
    with pytest.raises(ValueError, match="resume_from='latest' needs a SaveTrainingStateCallback"):
        trainer.train(regression_data(8), 1, resume_from="latest")
    with changed_manifest(tmp_path / "state") as manifest:
        manifest["format_version"] = 99
    with pytest.raises(ValueError, match=r"has format 99; this version .* Upgrade pytorch_accel_lite"):
        trainer.load_training_state(tmp_path / "state")


def test_saving_at_the_wrong_moment_is_refused(tmp_path):
    class SavesEarly(TrainerCallback):
        def on_backward_end(self, trainer, **kwargs):
            trainer.save_training_state(tmp_path / "state")

    with pytest.raises(RuntimeError, match="only be saved between updates"):
        quiet_trainer(small_model(), callbacks=[SavesEarly], seed=1).train(regression_data(8), 1)

    class SavesUnseeded(TrainerCallback):
        def on_train_step_checkpoint(self, trainer, **kwargs):
            trainer.save_training_state(tmp_path / "state")

    with pytest.raises(RuntimeError, match="Give the trainer a seed"):
        quiet_trainer(small_model(), callbacks=[SavesUnseeded]).train(regression_data(8), 1)


class StepsItself(Trainer):
    def train_step(self, batch):
        return super().train_step(batch)


@pytest.mark.parametrize("trainer_class", [Trainer, StepsItself])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_interrupted_run_is_saved_only_between_its_steps(tmp_path, trainer_class, accumulation):
    class Interrupted(torch.optim.SGD):
        steps_left = -1

        def step(self, closure=None):
            self.steps_left -= 1
            if not self.steps_left:
                raise KeyboardInterrupt
            return super().step(closure)

    def interrupt(trainer, **kwargs):
        if trainer.progress.update == 3:
            raise KeyboardInterrupt

    def make(event=None):
        model = small_model()
        optimizer = Interrupted(model.parameters(), lr=0.05)
        callbacks = [listener(**{event: interrupt})] if event in EVENTS else []
        trainer = make_trainer(callbacks, model, trainer_class, optimizer=optimizer, seed=1)
        if event == "forward":
            model.register_forward_pre_hook(lambda *_: interrupt(trainer))
        if event == "step":
            optimizer.steps_left = 3
        return trainer

    def training(trainer, **kwargs):
        trainer.train(regression_data(), 2, gradient_accumulation_steps=accumulation, per_device_batch_size=4, **kwargs)
        return trainer

    whole = training(make())
    for event in ("forward", "step", "on_optimizer_step_end", "on_update_end"):
        trainer = make(event)
        with pytest.raises(KeyboardInterrupt):
            training(trainer)
        if event != "on_update_end":
            with pytest.raises(RuntimeError, match="only be saved between updates"):
                trainer.save_training_state(tmp_path / "state")
            continue
        trainer.save_training_state(tmp_path / "state")
        again = training(make(), resume_from=tmp_path / "state")
        assert again.progress == whole.progress
        assert equal(again.model.state_dict(), whole.model.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("event", ["on_training_run_start", "on_train_epoch_start"])
@pytest.mark.parametrize("update", [4, 6])
def test_a_run_stopped_by_a_starting_event_resumes_its_bits(tmp_path, capsys, event, update):
    def stop(trainer, **kwargs):
        raise StopTrainingError("no time left")

    def average():
        return ModelEmaCallback(0.9, save_path=None)

    kept, whole = average(), average()
    uninterrupted = run(tmp_path / "whole", extra=(whole,))
    run(tmp_path, extra=(average(), raises_at(update, RunPausedError("paused"), "on_train_step_checkpoint")))
    before = hashes(tmp_path)
    stopped = run(tmp_path, extra=(kept, listener(**{event: stop})))
    assert stopped["progress"]["update"] == kept.ema.num_updates == update
    assert hashes(tmp_path) == before
    said = capsys.readouterr().out
    assert "the run was stopped before it had taken a step of its own" in said
    assert "No best model was saved" not in said
    assert_same(run(tmp_path, extra=(kept,)), uninterrupted)
    assert equal(kept.ema.module.state_dict(), whole.ema.module.state_dict())


def test_callbacks_that_are_gone_or_new_are_named(tmp_path):
    run(tmp_path, max_checkpoints=1)

    class Other(TrainerCallback):
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            raise AssertionError

    (state,) = states(tmp_path)
    trainer = quiet_trainer(make_model(), callbacks=[Other])
    with (
        pytest.warns(UserWarning, match="no longer exists"),
        pytest.warns(UserWarning, match="nothing for the callback 'Other'"),
        pytest.warns(UserWarning, match="state of callback 'EarlyStoppingCallback', which no longer exists"),
    ):
        trainer.load_training_state(state)


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


def test_states_can_be_saved_by_the_clock(tmp_path):
    saved = run(tmp_path, save_every_n_steps=None, save_every_n_minutes=1e-9, save_at_end=False)
    assert len(states(tmp_path)) == saved["progress"]["update"]


class DiesAtFileOperation(TrainerCallback):
    """Once the ranks have met: before that, it is the launcher that ends a rank whose peer does not come."""

    def __init__(self, number: int) -> None:
        self.number = number

    def on_init_end(self, trainer, **kwargs):
        die_at_file_operation(self.number)


@pytest.mark.soak
@pytest.mark.programs
@pytest.mark.parametrize("asynchronous", [False, True])
def test_sigkill_at_any_file_operation_leads_to_the_same_bits(tmp_path, asynchronous):
    """Half-written files, syncs, renames, removals: from the first file to the end of the second rotation.

    At every seventeenth; ``make soak`` kills at each.
    """
    kwargs: dict[str, Any] = {"max_checkpoints": 1, "save_every_n_steps": 3, "asynchronous": asynchronous}
    whole = run(tmp_path / "whole", **kwargs)
    for number in range(1, 200, 1 if SOAK else 17):
        folder = tmp_path / f"killed{number}"

        def killed(rank, folder=folder, number=number):
            die_at_file_operation(number)
            run(folder, **kwargs)

        (status,) = in_forks(killed, tmp_path / "output")
        assert status in (0, -signal.SIGKILL)
        assert_same(run(folder, **kwargs), whole)
        if status == 0:  # the run had fewer operations
            break
    assert number > 100


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.timeout(7200 if SOAK else 1800)
def test_sigkill_of_rank_0_at_any_file_operation_changes_no_bits(tmp_path):
    """At every nineteenth; ``make soak`` kills at each."""
    kwargs: dict[str, Any] = {"max_checkpoints": 1, "save_every_n_steps": 3, "epochs": 2}

    def complete(folder: Path) -> dict[str, Any]:
        def finish(rank):
            result = run(folder, **kwargs)
            torch.save(result, folder / f"rank{rank}.pt")

        assert in_forks(finish, tmp_path / "output", 2) == [0, 0], (tmp_path / "output").read_text()
        return torch.load(folder / "rank0.pt", weights_only=False)

    whole = complete(tmp_path / "whole")
    assert whole["processes"] == 2
    kills = 0
    for number in range(1, 300, 1 if SOAK else 19):
        folder = tmp_path / f"killed{number}"

        def killed(rank, folder=folder, number=number):
            run(folder, extra=(DiesAtFileOperation(number if rank == 0 else sys.maxsize),), **kwargs)

        status, of_peer = in_forks(killed, tmp_path / "output", 2)
        assert_same(complete(folder), whole)
        if status == 0:
            break
        assert (status, of_peer) == (-signal.SIGKILL, 1)
        kills += 1
    assert kills >= 5


class FillsDisk(TrainerCallback):
    """No file may grow beyond a limit, as on a disk that is full, between two updates."""

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


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_leaves_the_last_state_whole_and_names_it(tmp_path, asynchronous, capsys):
    fills = FillsDisk(9)  # where the next thing to be written is a state
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            run(tmp_path, extra=(fills,), save_every_n_steps=3, asynchronous=asynchronous)
    finally:
        fills.free()
    assert [path.name for path in states(tmp_path)] == ["update-000000003", "update-000000006"]
    assert not list((tmp_path / "states").glob(".*tmp"))
    saved = f"The run is saved in '{tmp_path}/states/update-000000006', after update 6."
    assert saved in told(caught.value, capsys.readouterr().out)
    fills.first = 7  # the resumed run can save nothing of its own
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            run(tmp_path, extra=(fills,), save_every_n_steps=3, asynchronous=asynchronous)
    finally:
        fills.free()
    assert saved in told(caught.value, capsys.readouterr().out)
    whole = run(tmp_path / "whole", save_every_n_steps=3)
    assert_same(run(tmp_path, save_every_n_steps=3), whole)


def fail_while_a_state_is_written(folder: Path) -> str:
    """What is told when both processes fail in the update after a state that is not yet complete."""
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
    return told(caught.value, output.getvalue())


@pytest.mark.processes
def test_an_unfinished_state_of_a_failed_run_is_not_called_saved(tmp_path, two_ranks):
    said, _ = two_ranks.run(fail_while_a_state_is_written, tmp_path)
    assert f"The run is saved in '{tmp_path}/update-000000002', after update 2." in said


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_may_continue_when_the_disk_is_full(tmp_path, capsys, asynchronous):
    fills = FillsDisk(5, 7)
    try:
        result = run(tmp_path, extra=(fills,), save_every_n_steps=3, asynchronous=asynchronous, continue_on_error=True)
    finally:
        fills.free()
    assert "could not be saved; the run continues. OSError: [Errno 27]" in capsys.readouterr().out
    names = [path.name for path in states(tmp_path)]
    assert names[0] == "update-000000003"
    assert "update-000000006" not in names
    assert names[-1] == "update-000000012"
    assert_same(result, run(tmp_path / "whole", resume_from=None))


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
    assert [int(path.name[-2:]) for path in states(tmp_path)] == [1, 2, 3, 4, 5, 8, 9, 10, 11, 12]


def test_training_continues_while_a_state_is_written(tmp_path, monkeypatch):
    """The first sync to the disk waits for a later update: were training to wait for it, neither would come."""
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
    assert [path.name[-2:] for path in states(tmp_path)] == ["03", "06", "09", "12"]
    assert_same(result, run(tmp_path / "whole", resume_from=None))
    shutil.rmtree(states(tmp_path)[-1])
    assert_same(run(tmp_path), result)


def test_a_restart_with_addresses_of_dead_ranks_is_warned_of(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.warns(UserWarning, match="Launch it with the environment variable TORCH_DISABLE_SHARE_RDZV_TCP"):
        quiet_trainer(small_model())


@pytest.mark.processes
def test_a_job_continues_by_itself_after_a_rank_was_killed(tmp_path, two_ranks, monkeypatch):
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    done = run_elastic_script(2, "tests/scripts/killed_ranks.py", str(tmp_path), max_restarts=3)
    assert done.returncode == 0, done.stdout
    assert "Resuming from" in done.stdout
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in done.stdout
    assert len(list(tmp_path.glob("killed*"))) == 2
    two_ranks.run(run_to_the_end, tmp_path / "whole")
    assert_same(final(tmp_path), final(tmp_path / "whole"))


def test_save_model_writes_weights_that_others_load(tmp_path):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(5, 5)
            self.second = torch.nn.Linear(5, 5)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(self.first(x))

    model = Tied()
    trainer = quiet_trainer(model)
    trainer.save_model(tmp_path / "new" / "model.safetensors")
    loaded = safetensors.torch.load_file(tmp_path / "new" / "model.safetensors")
    assert equal(loaded, dict(model.state_dict()))
    trainer.save_training_state(tmp_path / "state")  # a training state has tied weights once
    other = Tied()
    quiet_trainer(other).load_training_state(tmp_path / "state")
    assert equal(other.state_dict(), model.state_dict())


@pytest.mark.parametrize(("first", "second"), [("pt", "other"), ("other", "format")])
def test_tied_weights_may_have_any_names(tmp_path, first, second):
    def make() -> torch.nn.Module:
        module = torch.nn.Linear(5, 1).double()
        module.register_parameter(first, torch.nn.Parameter(torch.rand(3)))
        module.register_parameter(second, getattr(module, first))
        return module

    saved, loaded = make(), make()
    quiet_trainer(saved).save_training_state(tmp_path / "state")
    quiet_trainer(loaded).load_training_state(tmp_path / "state")
    assert equal(loaded.state_dict(), saved.state_dict())
    assert len({path.stat().st_mode for path in (tmp_path / "state").iterdir()}) == 1


def test_a_checkpoint_may_be_loaded_in_part(tmp_path):
    quiet_trainer(small_model(1)).save_checkpoint(tmp_path / "model.pt")
    model = small_model(2)
    model[2] = torch.nn.Linear(8, 3).double()
    kept = model[2].weight.clone()
    with pytest.warns(UserWarning, match=r"of a different shape: 2\.bias .*, 2\.weight .* The rest is loaded"):
        quiet_trainer(model).load_checkpoint(tmp_path / "model.pt", load_optimizer=False, strict=False)
    assert torch.equal(model[0].weight, small_model(1)[0].weight)
    assert torch.equal(model[2].weight, kept)


@pytest.mark.parametrize("greater", [False, True])
def test_a_resumed_run_keeps_the_best_k_models_too(tmp_path, greater):
    class Scores(TrainerCallback):
        values = (3.0, 1.0, 5.0, float("nan"), 2.0, 4.0)

        def on_eval_epoch_end(self, trainer, **kwargs):
            trainer.run_history.update_metric("score", self.values[trainer.progress.epoch - 1])

    for epochs in (3, 6):
        model = small_model()
        best = SaveBestModelCallback(tmp_path / "best.pt", "score", greater, keep=2, load_saved_checkpoint=False)
        saving = SaveTrainingStateCallback(tmp_path / "states")
        trainer = quiet_trainer(model, callbacks=[Scores(), best, saving], seed=0)
        trainer.train(regression_data(8), epochs, regression_data(4), resume_from="latest")
    expected = {"best-epoch0003.pt", "best-epoch0006.pt"} if greater else {"best-epoch0002.pt", "best-epoch0005.pt"}
    assert {path.name for path in tmp_path.glob("best*")} == expected | {"best.pt"}
    scores = {name: torch.load(tmp_path / name)["score"] for name in expected | {"best.pt"}}
    assert scores["best.pt"] == (5.0 if greater else 1.0)
    with pytest.raises(ValueError, match="keep=0 must be at least 1"):
        SaveBestModelCallback(keep=0)


class OwnQueue:
    """A queue of a cluster that is unlike others."""

    def __init__(self) -> None:
        self.asked: list[BaseException] = []

    def check(self) -> None:
        self.asked.clear()

    def was_requeued(self) -> bool:
        return False

    def requeue_after(self, interruption: Exception) -> str:
        self.asked.append(interruption)
        return "It is back in the queue."


def test_a_job_can_return_to_a_queue_of_the_users_own(tmp_path, monkeypatch, capsys):
    queue = OwnQueue()
    monkeypatch.setitem(JOB_QUEUES, "Own", queue)
    interrupt = listener(on_train_step_end=lambda trainer, **_: os.kill(os.getpid(), signal.SIGUSR1))
    trainer = make_trainer([interrupt, SaveTrainingStateCallback(tmp_path, requeue=True)])
    with pytest.raises(SystemExit):
        train(trainer)
    assert [type(error).__name__ for error in queue.asked] == ["RunInterruptedError"]
    assert "It is back in the queue.\nThe run is saved in " in capsys.readouterr().out


def test_without_any_queue_the_error_names_the_extension(tmp_path, monkeypatch):
    for name in [*JOB_QUEUES]:
        monkeypatch.delitem(JOB_QUEUES, name)
    with pytest.raises(ValueError, match="requeue=True belongs to the extension 'slurm', which is not installed"):
        SaveTrainingStateCallback(tmp_path, requeue=True)


class Cupboard:
    """A store of a user's own: ``own://name`` is a folder on this machine. It has no states of runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def at(self, url: str) -> Path:
        path = self.folder / url.removeprefix("own://")
        path.mkdir(parents=True, exist_ok=True)
        return path

    def write_state(self, url: str, ranks: Ranks, captured: Any) -> None:
        entries = ranks.run_together(lambda: write_files(self.at(url), ranks.rank, captured))
        (self.at(url) / "manifest.json").write_text(manifest_text(entries, captured.metadata))

    def read_state(self, url: str, ranks: Ranks) -> Any:
        return read_verified(self.at(url), verify_state(self.at(url)), ranks)

    def fetch_state(self, url: str) -> Any:
        return contextlib.nullcontext(self.at(url))

    collect = fetch_weights = fetch_state


def test_states_and_models_lie_in_a_store_of_the_users_own(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(STORES, "own", Cupboard(tmp_path))
    trainer = train(make_trainer())
    trainer.save_training_state("own://state")
    trainer.save_model("own://model")
    expected = trainer.model.state_dict()
    for load in (Trainer.load_training_state, Trainer.load_checkpoint):
        url = "own://state" if load is Trainer.load_training_state else "own://model"
        other = make_trainer()
        load(other, url)
        assert equal(other.model.state_dict(), expected)
    print_contents("own://state")
    assert "training state own://state" in capsys.readouterr().out


def test_without_any_store_the_error_names_the_extension(monkeypatch):
    for name in [*STORES]:
        monkeypatch.delitem(STORES, name)
    with pytest.raises(ValueError, match="belongs to the extension 'remote', which is not installed"):
        SaveTrainingStateCallback("s3://bucket/run")


class OwnSteps(Trainer):
    """Makes its updates itself."""

    def train_step(self, batch):
        self.update((self.model(batch[0]) - batch[1]).square().mean())
        return {}


@pytest.mark.extension("failed_batches", "logical")
def test_the_table_of_the_keys_of_a_state_is_complete(tmp_path):
    found: tuple[set[str], set[str]] = set(), set()
    for number, (kind, data, of_trainer, of_train) in enumerate(
        (
            (Trainer, make_data(), {}, {"auto_microbatch": True, "per_device_batch_size": 2}),
            (OwnSteps, make_data(), {}, {"per_device_batch_size": 2}),
            (Trainer, make_data(), {"logical_processes": 2, "seed": 0}, {"per_device_batch_size": 1}),
            (Trainer, OwnShard(list(zip(*(part.split(2) for part in make_data().tensors), strict=True))), {}, {}),
        )
    ):
        saver = SaveTrainingStateCallback(tmp_path / str(number), save_every_n_steps=2, trainable_only=True)
        trainer = make_trainer([saver], trainer_class=kind, **of_trainer)
        trainer.train(data, 1, **of_train)
        state = read_state(tmp_path / str(number) / "update-000000002", trainer.ranks)
        for keys, part in zip(found, (state.shared, state.local), strict=True):
            keys.update(part)
    text = (ROOT / "pytorch_accel_lite/checkpoint/capture_and_restore.py").read_text()
    tables = [re.findall(r"^# \| (\w+) +\|", table, re.MULTILINE) for table in re.split("# .*\n# .-----", text)[1:]]
    assert [set(keys) for keys in tables] == [*found]
    assert all(len(set(keys)) == len(keys) for keys in tables)
