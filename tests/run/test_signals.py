"""Signals and interrupts: a run ends in order, saves a state, and says how to resume."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from pytorch_accel_lite import StopTrainingError, Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from pytorch_accel_lite.checkpoint import verify_state
from pytorch_accel_lite.run.events import EVENTS
from tests.launching import PATIENCE, ROOT, TORCHRUN, WarmPython, environment, some_of
from tests.scripts.resumable import final_state, run, run_to_the_end, saved_states, script
from tests.small_models import (
    Rows,
    Stream,
    assert_same,
    equal_weights,
    float64_data,
    float64_model,
    listener,
    make_data,
    make_trainer,
    train,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")


@pytest.mark.thorough
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
    manifest = verify_state(saved_states(folder)[-1])
    assert verify_state(str(saved_states(folder)[-1])) == manifest
    assert manifest["world_size"] == 2, errors
    job(2).run(run_to_the_end, folder, workers=2)
    assert_same(final_state(folder), final_state(tmp_path / "whole"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR2, 140), (signal.SIGINT, None)])
def test_a_signal_ends_a_run_cleanly(tmp_path, number, code):
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
    assert [path.name for path in saved_states(tmp_path)] == ["update-000000008"]
    assert_same(run(tmp_path, save_every_n_steps=None), run(tmp_path / "whole", save_every_n_steps=None))


def stop_at_a_signal(trainer: Trainer, **_: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    raise StopTrainingError("enough")


@pytest.mark.parametrize(
    "events",
    [
        {"on_training_run_end": lambda trainer, **_: os.kill(os.getpid(), signal.SIGTERM)},
        {"on_train_step_end": stop_at_a_signal},
        {"on_epoch_checkpoint": stop_at_a_signal},
    ],
    ids=["after the last step", "beside a stop", "beside a stop at the end"],
)
def test_a_signal_that_nothing_waits_for_ends_the_program_too(tmp_path, events):
    trainer = make_trainer([listener(**events), SaveTrainingStateCallback(tmp_path / "states")])
    with pytest.raises(SystemExit) as raised:
        train(trainer)
    assert raised.value.code == 143
    assert len(saved_states(tmp_path)) == 1


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_while_saving_changes_nothing(tmp_path, capsys, first):
    second = signal.SIGTERM if first == signal.SIGINT else signal.SIGINT
    events = {"on_train_step_end": lambda *_, **__: signal.raise_signal(first)}
    events["on_stop_training_error"] = lambda *_, **__: signal.raise_signal(second)
    trainer = make_trainer([listener(**events), SaveTrainingStateCallback(tmp_path / "states")])
    with pytest.raises(KeyboardInterrupt if first == signal.SIGINT else SystemExit) as raised:
        train(trainer)
    notes = "".join(getattr(raised.value, "__notes__", []))
    assert "The run is saved in" in (notes if first == signal.SIGINT else capsys.readouterr().out)
    assert getattr(raised.value, "code", 143) == 143


PROGRAM = """
import os, signal, sys, time
from tests.small_models import Rows, listener, make_data, make_trainer, train
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
def test_the_last_line_after_a_signal_says_how_to_resume(tmp_path, number, saves, code):
    command = [sys.executable, "-c", PROGRAM, number.name, *([str(tmp_path)] if saves else [])]
    kind = subprocess.Popen if number == signal.SIGINT else WarmPython  # a fork does not end by its signal
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with kind(command, env=environment(), cwd=ROOT, **pipes) as program:
        output, _ = program.communicate(timeout=PATIENCE)
    assert program.returncode == code, output  # shells show 130 for -2
    assert ("Traceback" in output) == (number == signal.SIGINT)
    assert "pytorch_accel_lite/loop" not in output
    said = " ".join(output.split())
    assert f"The run is saved in '{tmp_path}/update-000000003'" in said or not saves
    assert said.endswith('arguments and resume_from="latest".' if saves else "KeyboardInterrupt")


def test_an_interrupt_shows_only_the_users_lines():
    class Interrupted(Rows):
        def __getitem__(self, index):
            raise KeyboardInterrupt

    for method in (make_trainer().evaluate, make_trainer().predict):
        with pytest.raises(KeyboardInterrupt) as caught:
            method(Interrupted(make_data()), dataloader_kwargs={"num_workers": 0})
        names = [frame.f_code.co_name for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
        assert names == [test_an_interrupt_shows_only_the_users_lines.__name__, "call", "__getitem__"]


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


@pytest.mark.extension("streams")
def test_workers_of_streams_leave_signals_to_the_run_too(tmp_path):
    def look(worker_id: int) -> None:
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN

    trainer = make_trainer([SaveTrainingStateCallback(tmp_path)])
    train(trainer, train_dataset=Stream(), train_dataloader_kwargs={"num_workers": 1, "worker_init_fn": look})
    assert trainer.progress.samples == 6


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_that_the_program_ignores_stays_ignored(number, tmp_path):
    def send(trainer: Trainer, **kwargs: Any) -> None:
        signal.raise_signal(number)

    before = signal.signal(number, signal.SIG_IGN)  # as a shell does with SIGINT for what a script starts with "&"
    try:
        trainer = make_trainer([SaveTrainingStateCallback(tmp_path), listener(on_train_step_end=send)])
        train(trainer, epochs=2)
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
    assert trainer.progress.epochs_completed == 2


@pytest.mark.programs
def test_a_second_signal_ends_the_program_immediately(tmp_path):
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


class StepsItself(Trainer):
    def train_step(self, batch):
        return super().train_step(batch)


class ThirdStepInterrupted(torch.optim.SGD):
    steps = 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps == 3:
            raise KeyboardInterrupt
        return super().step(closure)


def interrupt_at_3(trainer: Trainer, **kwargs: Any) -> None:
    if trainer.progress.update == 3:
        raise KeyboardInterrupt


def interrupted_in(place: str, trainer_class: type[Trainer]) -> Trainer:
    """A trainer that is interrupted in the model, in a step of the optimizer, in an event, or not at all."""
    model = float64_model()
    optimizer_class = ThirdStepInterrupted if place == "step" else torch.optim.SGD
    callbacks = [listener(**{place: interrupt_at_3})] if place in EVENTS else []
    optimizer = optimizer_class(model.parameters(), lr=0.05)
    trainer = make_trainer(callbacks, model, trainer_class, optimizer=optimizer, seed=1)
    if place == "forward":
        model.register_forward_pre_hook(lambda *_: interrupt_at_3(trainer))
    return trainer


@pytest.mark.parametrize(
    "trainer_class", [Trainer, pytest.param(StepsItself, marks=pytest.mark.extension("manual_optimization"))]
)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_interrupted_run_is_saved_only_between_its_steps(tmp_path, trainer_class, accumulation):
    def run_to_the_interrupt(place, **kwargs):
        trainer = interrupted_in(place, trainer_class)
        with pytest.raises(KeyboardInterrupt) if place != "nowhere" else nullcontext():
            trainer.train(float64_data(), 2, None, 4, gradient_accumulation_steps=accumulation, **kwargs)
        return trainer

    for place in ("forward", "step", "on_optimizer_step_end"):
        trainer = run_to_the_interrupt(place)
        with pytest.raises(RuntimeError, match="only be saved between updates"):
            trainer.save_training_state(tmp_path / "state")
    run_to_the_interrupt("on_update_end").save_training_state(tmp_path / "state")
    whole, again = run_to_the_interrupt("nowhere"), run_to_the_interrupt("nowhere", resume_from=tmp_path / "state")
    assert again.progress == whole.progress
    assert equal_weights(again.model.state_dict(), whole.model.state_dict())
