"""A contract for all shipped callbacks: any run, any number of processes, no change of the training, states."""

from __future__ import annotations

import io
import math
import os
import pickle
import re
import warnings
from contextlib import redirect_stderr, redirect_stdout
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from pytorch_accel_lite import StopTrainingError, Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import DEFAULT_CALLBACKS, SaveTrainingStateCallback
from pytorch_accel_lite.run.events import EVENTS
from tests.launching import only_with_soak, run_elastic_script, some_of, two_are_enough
from tests.ranks import rank, shared_folder
from tests.scripts.all_callbacks import run_with_all
from tests.shared_trainings import StopsAt
from tests.shipped_callbacks import EVENTFUL, NEEDS_A_DEVICE, NOT_REPEATABLE, RUN, SHIPPED, STATEFUL, STATELESS, build
from tests.small_models import (
    Stream,
    adamw_trainer,
    equal_weights,
    float64_data,
    float64_model,
    listener,
    make_data,
    make_trainer,
    same_bits,
    train,
    weights,
)

OF_WHOLE_RUNS = [c for c in SHIPPED if not re.search("Limit|Unfreezing", c.__name__)]


def test_the_callbacks_that_the_contract_is_about_are_found():
    assert len(SHIPPED) >= 7
    assert set(DEFAULT_CALLBACKS) <= set(SHIPPED)


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("callback_class", SHIPPED)
def test_a_shipped_callback_serves_two_runs(callback_class, here):
    data = make_data(6)
    callback, needs = build(callback_class), RUN.get(callback_class.__name__, {})
    trainer = make_trainer([callback])
    start = weights(trainer.model)
    train(trainer, epochs=2, train_dataset=data, eval_dataset=data, **needs)
    assert trainer.progress.update == 6 or "Limit" in callback_class.__name__
    assert not equal_weights(weights(trainer.model), start)
    train(trainer, epochs=2, train_dataset=data, eval_dataset=data, **needs)
    assert trainer.progress.epochs_completed == 2 or "has not improved" in trainer.stop_reason
    assert math.isfinite(trainer.evaluate(data)["evaluation_loss"])
    assert trainer.predict(data).shape == (6, 1)
    assert trainer.callback_handler.callbacks == [callback]
    copied = train(pickle.loads(pickle.dumps(trainer)), eval_dataset=data, **needs)
    assert copied.progress.epochs_completed == 1


@pytest.mark.sampled
@pytest.mark.parametrize("callback_class", SHIPPED)
def test_a_shipped_callback_serves_inference_before_any_run(callback_class, here):
    trainer = make_trainer([build(callback_class)])
    trainer.evaluate(make_data())
    assert trainer.predict(make_data()).shape == (6, 1)


@pytest.mark.sampled
@pytest.mark.extension("streams")
@pytest.mark.parametrize("callback_class", SHIPPED)
def test_a_shipped_callback_serves_a_run_without_length(callback_class, here):
    trainer = make_trainer([build(callback_class)])
    data = {"train_dataset": Stream(6), "eval_dataset": Stream(3), "train_dataloader_kwargs": {}}
    train(trainer, epochs=2, **data, **RUN.get(callback_class.__name__, {}))
    assert trainer.progress.epochs_completed == 2 or "has not improved" in trainer.stop_reason


@pytest.mark.sampled
@pytest.mark.parametrize("callback_class", SHIPPED)
def test_events_that_a_subclass_overrides_are_fired(callback_class, here):
    """A callback may stop listening to an event that it does not need, but not on behalf of a user's subclass."""
    fired, heard = set[str](), set[str]()

    def noting(event: str, names: set[str]) -> Any:
        def note(self: TrainerCallback, trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
            names.add(event)
            return getattr(super(type(self), self), event)(trainer, *args, **kwargs)

        return note

    events = [event for event in EVENTS if getattr(callback_class, event) is not getattr(TrainerCallback, event)]
    callback = build(callback_class)
    callback.__class__ = type("Mine", (callback_class,), {event: noting(event, heard) for event in events})
    everything = type("Everything", (TrainerCallback,), {event: noting(event, fired) for event in EVENTS})
    trainers = [make_trainer([everything, callback]), make_trainer([build(callback_class)])]
    for trainer in trainers:
        train(trainer, epochs=2, eval_dataset=make_data(), **RUN.get(callback_class.__name__, {}))
    assert heard == fired & {*events}
    mine, plain = trainers
    assert equal_weights(weights(mine.model), weights(plain.model))
    if callback_class.__name__ not in NOT_REPEATABLE:
        assert same_bits(mine.run_history.to_dict(), plain.run_history.to_dict())


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("callback_class", SHIPPED)
def test_a_shipped_callback_survives_a_run_that_fails_or_stops(callback_class, here):
    arguments = {"eval_dataset": True, **RUN.get(callback_class.__name__, {})}
    pending: list[BaseException] = [KeyboardInterrupt(), StopTrainingError("enough"), ValueError("broken")]

    def fail(trainer: Trainer, **kwargs: Any) -> None:
        if pending:
            raise pending.pop()

    for event in ("on_training_run_start", "on_train_step_end", "on_eval_step_end"):
        errors = list(pending)
        trainer = make_trainer([listener(**{event: fail}), build(callback_class)])
        for error in reversed(errors):
            if isinstance(error, StopTrainingError):
                train(trainer, **arguments)
                assert trainer.stop_reason == "enough"
            else:
                with pytest.raises(type(error)):
                    train(trainer, **arguments)
        train(trainer, **arguments)
        assert trainer.progress.epochs_completed == 1
        pending.extend(errors)


@pytest.mark.parametrize(
    "callback_class", [c for c in SHIPPED if hasattr(c, "state_dict") and c.__name__ not in STATELESS | NEEDS_A_DEVICE]
)
def test_states_of_shipped_callbacks_survive_a_round_trip(callback_class, here):
    callback = callback_class(**STATEFUL.get(callback_class.__name__, {}))
    before = callback.state_dict()
    train(make_trainer([callback]), epochs=2, eval_dataset=make_data(), **EVENTFUL.get(callback_class.__name__, {}))
    state = callback.state_dict()
    assert not same_bits(state, before), "the run has left no trace in the state: the test tells nothing"
    torch.save(state, here / "state.pt")
    restored = callback_class(**STATEFUL.get(callback_class.__name__, {}))
    restored.load_state_dict(torch.load(here / "state.pt", weights_only=True))
    assert same_bits(restored.state_dict(), state)


@pytest.mark.parametrize("callback_class", SHIPPED)
def test_a_shipped_callback_has_both_halves_of_a_state_or_none(callback_class):
    assert hasattr(callback_class, "state_dict") == hasattr(callback_class, "load_state_dict")


@pytest.mark.sampled
@pytest.mark.soak
@pytest.mark.parametrize(
    ("callback_class", "seed"), [*product(OF_WHOLE_RUNS, [0]), *product(some_of(OF_WHOLE_RUNS), [None])]
)
def test_a_shipped_callback_changes_no_bit_of_the_training(callback_class, seed, here):
    if seed is None and callback_class is SaveTrainingStateCallback:
        pytest.skip("the order of the data follows from a seed then, as documented")
    seen: list[Any] = []
    keep = listener(on_train_step_end=lambda t, **_: seen.append(weights(t.model)))
    arguments = {"train_dataloader_kwargs": {"shuffle": True}, **RUN.get(callback_class.__name__, {})}
    torch.manual_seed(0)
    train(make_trainer([keep, build(callback_class)], seed=seed), eval_dataset=True, **arguments)
    with_callback, seen[:] = list(seen), []
    torch.manual_seed(0)
    train(make_trainer([keep], seed=seed), eval_dataset=True, **arguments)
    assert len(seen) == 3
    assert all(map(equal_weights, with_callback, seen))


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("callback_class", SHIPPED)
def test_a_run_with_a_shipped_callback_resumes_from_its_middle(callback_class, here):
    def run(folder: str, **kwargs: Any) -> tuple[Trainer, TrainerCallback]:
        callback = build(callback_class)
        trainer = make_trainer([callback, SaveTrainingStateCallback(here / folder, save_every_n_steps=1)], seed=1)
        arguments = {"train_dataloader_kwargs": {"shuffle": True}, **RUN.get(callback_class.__name__, {}), **kwargs}
        return train(trainer, epochs=2, eval_dataset=make_data(), **arguments), callback

    whole, callback = run("whole")
    middle = max(here.glob("whole/update-*")).parent / "update-000000002"
    resumed, again = run("resumed", resume_from=middle)
    assert equal_weights(weights(resumed.model), weights(whole.model))
    if callback_class.__name__ not in NOT_REPEATABLE:
        assert resumed.run_history.to_dict() == whole.run_history.to_dict()
    assert resumed.progress == whole.progress
    if hasattr(callback, "state_dict") and callback_class is not SaveTrainingStateCallback:
        assert same_bits(again.state_dict(), callback.state_dict())


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("callback_class", some_of(some_of(SHIPPED)))
def test_a_stopped_run_with_a_shipped_callback_trains_further(callback_class, here, monkeypatch):
    def run(event: str, stops_at: int) -> Trainer:
        (here / event).mkdir(exist_ok=True)
        monkeypatch.chdir(here / event)
        callbacks = [build(callback_class), SaveTrainingStateCallback("states"), StopsAt(event, stops_at)]
        arguments = RUN.get(callback_class.__name__, {})
        return train(make_trainer(callbacks, seed=1), 3, eval_dataset=make_data(), resume_from="latest", **arguments)

    whole = run("on_training_run_end", 100)
    for event in ("on_train_epoch_end", "on_training_run_epoch_end"):
        assert run(event, 6).stop_reason == "enough"
        further = run(event, 100)
        assert equal_weights(weights(further.model), weights(whole.model))
        if callback_class.__name__ not in NOT_REPEATABLE:
            assert further.run_history.to_dict() == whole.run_history.to_dict()
        assert further.progress == whole.progress


@pytest.mark.thorough
@pytest.mark.slow
def test_all_shipped_callbacks_can_be_combined(here):
    trainer = make_trainer([build(c) for c in SHIPPED])
    needs = {name: value for arguments in RUN.values() for name, value in arguments.items()}
    train(trainer, epochs=2, eval_dataset=True, **needs)
    trainer.evaluate()
    assert trainer.progress.epochs_completed >= 1


def shipped_callbacks() -> Any:
    """Each shipped callback in a run of its own: the weights, and what ranks but the first print."""
    warnings.filterwarnings("ignore", ".*cannot synchronise batch norm on 'cpu'")  # with several processes
    results, home = {}, Path.cwd()
    with shared_folder() as folder:
        for callback_class in some_of(SHIPPED):
            name = callback_class.__name__
            work = folder / f"shipped {name}"
            work.mkdir(exist_ok=True)
            model = float64_model()
            output = io.StringIO()
            os.chdir(work)  # where callbacks write by default
            with redirect_stdout(output), redirect_stderr(output):
                trainer = adamw_trainer(model, callbacks=[build(callback_class)])
                data = float64_data(20)
                trainer.train(data, 2, float64_data(7), per_device_batch_size=3, **RUN.get(name, {}))
                evaluated = trainer.evaluate(float64_data(5), per_device_batch_size=2)
                predicted = trainer.predict(float64_data(5), per_device_batch_size=2)
            results[name] = {
                "weights": weights(model),
                "evaluated": evaluated,
                "predicted": predicted,
                "printed": output.getvalue() if rank() else "",
            }
            os.chdir(home)
    return results


@pytest.mark.sampled
@pytest.mark.soak
@pytest.mark.parametrize("name", some_of(callback_class.__name__ for callback_class in SHIPPED))
@two_are_enough
def test_a_shipped_callback_serves_several_processes(ranks, name):
    results = [result[name] for result in ranks(shipped_callbacks)]
    assert len(results) == ranks.world_size
    for result in results:
        assert equal_weights(result["weights"], results[0]["weights"])
        assert result["evaluated"] == results[0]["evaluated"]
        assert torch.equal(result["predicted"], results[0]["predicted"])
        assert result["printed"] == ""


@only_with_soak
@pytest.mark.processes
@pytest.mark.extension(
    "failed_batches", "gradient_spikes", "metrics", "model_ema", "nan_report", "pytorch_accelerated", "unfreezing"
)
def test_all_callbacks_resume_the_same_bits_on_two_processes(tmp_path, job):
    for folder in ("whole", "killed"):
        (tmp_path / folder).mkdir()
    killed = run_elastic_script(2, "tests/scripts/all_callbacks.py", str(tmp_path / "killed"), "5")
    assert killed.returncode != 0
    assert (tmp_path / "killed" / "killed").exists()
    whole = job(2).run(run_with_all, tmp_path / "whole")
    again = job(2).run(run_with_all, tmp_path / "killed", 5)
    results = [whole[0], again[0]]
    assert "Resuming from" in again.output
    assert results[0]["processes"] == 2
    assert results[0]["progress"]["update"] == 9
    assert len(results[0]["history"]["intermediate_mae"]) == 4
    for name in ("history", "order", "progress"):
        assert results[0][name] == results[1][name]
    for name in ("weights", "ema"):
        assert equal_weights(results[0][name], results[1][name])
    # Only the first process of a machine prints.
    assert whole.output.count("Starting epoch 1/3") == 1
