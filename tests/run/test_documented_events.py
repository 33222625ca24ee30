"""Each kind of step fires the events that ``TrainerCallback`` documents, in that order."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from pytorch_accel_lite import StopTrainingError
from pytorch_accel_lite.run.events import EVENTS, STEP_EVENTS, keywords_of
from pytorch_accel_lite.run.run import Step
from pytorch_accel_lite.steps.step_choice import STEP_KINDS
from tests.kinds_of_steps import BLOCKS, KINDS, OF_A_RUN, OF_ALL_RUNS, OWNERS, check_calls, check_kind, declared
from tests.launching import CAN_SHARD, ROOT, two_are_enough
from tests.recorded_events import CustomError, raising, recording_callback
from tests.small_models import make_trainer, train


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.extension(*OWNERS.get(name, ()))) for name in KINDS if name != "sharded"],
)
def test_each_kind_of_step_fires_the_events_in_documented_order(name):
    check_kind(KINDS[name])


def check_kinds(*names: str) -> None:
    for name in names:
        check_kind(KINDS[name])


@pytest.mark.extension("closures", "failed_batches", "manual_optimization")
@two_are_enough
def test_kinds_of_steps_fire_every_event_on_each_process(ranks):
    ranks.run(check_kinds, "plain", "microbatches", "recomputed gradients", "manual, two optimizers")


@CAN_SHARD
@two_are_enough
def test_steps_of_sharded_models_fire_every_event(ranks):
    ranks.run(check_kinds, "sharded")


def test_no_kind_of_step_of_the_core_is_left_out():
    def kinds_of(step: type[Step]) -> set[type[Step]]:
        return {step}.union(*map(kinds_of, step.__subclasses__()))

    rooms = tuple(f"pytorch_accel_lite.{room}." for room in ("loop", "run", "steps"))
    shipped = {step for step in kinds_of(Step) if step.__module__.startswith(rooms)}
    assert shipped - {Step} == {kind.step for kind in KINDS.values() if not isinstance(kind.step, str)}


def test_each_kind_of_step_of_an_extension_fires_its_events():
    covered = {kind.step if isinstance(kind.step, str) else kind.step.__name__ for kind in KINDS.values()}
    for kind in STEP_KINDS:
        tests = (ROOT / "tests" / "extensions" / kind.__module__.split(".")[2]).glob("test_*.py")
        assert kind.__name__ in covered or any("check_kind(" in test.read_text() for test in tests), kind


@pytest.mark.extension("failed_batches")
def test_events_of_some_runs_fire_when_they_are_documented_to():
    fired = check_kind(KINDS["skipped batches"])
    for error in (StopTrainingError("enough"), CustomError("broken")):
        recorder: Any = recording_callback()
        trainer = make_trainer([recorder, raising("on_epoch_checkpoint", error)])
        recorder.calls.clear()
        with suppress(CustomError):
            train(trainer, eval_dataset=True)
        fired |= check_calls(recorder, "train(...)")
    assert {line.event for line in declared(OF_A_RUN.values()) if line.is_of_some_runs} <= fired


def test_every_event_is_documented_in_the_loop_with_its_keywords():
    lines = declared([*OF_A_RUN.values(), OF_ALL_RUNS])
    assert sorted({line.event for line in lines}) == sorted(EVENTS)
    documented = {line.event: line.keywords for line in lines if line.keywords}
    assert documented == {event: keywords_of(event) for event in EVENTS if keywords_of(event)}


def test_events_are_declared_in_the_order_of_the_loop():
    of_batches = {
        "training": BLOCKS["train(...)"], "evaluation": BLOCKS["evaluation"], "prediction": BLOCKS["predict(...)"],
    }  # fmt: skip
    for phase, block in of_batches.items():
        (batches,) = [line for line in block.lines() if line.text == "for each batch:"]
        assert (*batches.events(),) == STEP_EVENTS[phase]
