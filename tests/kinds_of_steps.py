"""The kinds of steps, and a check that a run with one fires the documented events."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from pytorch_accel_lite import Trainer, callbacks
from pytorch_accel_lite.run.events import keywords_of
from pytorch_accel_lite.run.run import Step
from pytorch_accel_lite.steps.plain_step import PlainStep
from tests.documented_events import Line, documented_blocks, pattern, with_step
from tests.recorded_events import recording_callback
from tests.sharded import sharded_trainer
from tests.small_models import Broken, float64_data, make_data, make_model, make_trainer, train, two_optimizers


class FitsOne(nn.Linear):
    """Has memory for a single sample in training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and len(x) > 1:
            raise torch.OutOfMemoryError("out of memory")
        return super().forward(x)


class UpdatesEach(Trainer):
    """Updates its optimizers one after another."""

    def train_step(self, batch):
        x, y = batch
        for name in self.optimizer:
            self.update(self.loss_func(self.model(x), y), name)


class UpdatesOne(Trainer):
    """Has a step of its own with one optimizer."""

    def train_step(self, batch):
        x, y = batch
        self.update(self.loss_func(self.model(x), y))


class Recomputes(Trainer):
    """Recomputes the gradients of each update."""

    def optimizer_step(self):
        self.recompute_gradients()
        super().optimizer_step()


class Kind(NamedTuple):
    """A kind of step: how a trainer and a run get it.

    Args:
        step: the class of the step; of an extension, its name
        documented: the block of the docstring that says what it fires, unless it fires what the plain step does
        make: returns a trainer with a callback
        how: arguments of ``train``
    """

    step: type[Step] | str
    documented: str = ""
    make: Callable[..., Trainer] = make_trainer
    how: Mapping[str, Any] = MappingProxyType({})


def with_lbfgs(callbacks: list[Any]) -> Trainer:
    model = make_model()
    return make_trainer(callbacks, model, optimizer=torch.optim.LBFGS(model.parameters(), max_iter=3))


def with_two_optimizers(callbacks: list[Any], trainer_class: type[Trainer] = Trainer) -> Trainer:
    model = make_model()
    return make_trainer(callbacks, model, trainer_class, optimizer=two_optimizers(model))


def updating_each(callbacks: list[Any]) -> Trainer:
    return with_two_optimizers(callbacks, UpdatesEach)


def fitting_one(callbacks: list[Any]) -> Trainer:
    return make_trainer(callbacks, FitsOne(4, 1))


def skipping(listed: list[Any]) -> Trainer:
    skip = callbacks.SkipFailedBatchesCallback(phases=["training", "evaluation", "prediction"])
    return make_trainer([*listed, skip])


def sharded(callbacks: list[Any]) -> Trainer:
    return sharded_trainer("fsdp", callbacks)


PARTS = "auto_microbatch, SkipFailedBatchesCallback, logical_processes"
AGAIN = "LBFGS, recompute_gradients()"
MANUAL = "train_step(...)"
TWO_STEPS = {"gradient_accumulation_steps": 2}
UNREADABLE = {"train_dataset": Broken(), "train_dataloader_kwargs": {"num_workers": 0, "shuffle": False}}
KINDS = {
    "plain": Kind(PlainStep),
    "accumulation": Kind(PlainStep, how=TWO_STEPS),
    "growing accumulation": Kind(PlainStep, how={"gradient_accumulation_steps": {0: 1, 2: 2}}),
    "evaluation within epochs": Kind(PlainStep, how={"evaluate_every": "2 updates"}),
    "two optimizers": Kind(PlainStep, make=with_two_optimizers),
    "compiled": Kind(PlainStep, make=partial(make_trainer, compile_step={"backend": "eager"})),
    "microbatches": Kind("GuardedStep", PARTS, fitting_one, {"auto_microbatch": True, **TWO_STEPS}),
    "skipped batches": Kind("GuardedStep", PARTS, skipping, UNREADABLE),
    "skipped batches in windows": Kind("GuardedStep", PARTS, skipping, UNREADABLE | TWO_STEPS),
    "LBFGS": Kind("ReplayingStep", AGAIN, with_lbfgs),
    "recomputed gradients": Kind("ReplayingStep", AGAIN, partial(make_trainer, trainer_class=Recomputes), TWO_STEPS),
    "manual": Kind("ManualStep", MANUAL, partial(make_trainer, trainer_class=UpdatesOne)),
    "manual, two optimizers": Kind("ManualStep", MANUAL, updating_each),
    "manual, accumulation": Kind("ManualStep", MANUAL, updating_each, TWO_STEPS),
    "sharded": Kind("ShardedStep", make=sharded, how={"train_dataset": float64_data(8), **TWO_STEPS}),
}
EXTENSION_OF = {
    "GuardedStep": "failed_batches",
    "ManualStep": "manual_optimization",
    "ReplayingStep": "closures",
    "ShardedStep": "sharding",
}
OWNERS = {name: [EXTENSION_OF[kind.step]] for name, kind in KINDS.items() if isinstance(kind.step, str)}
OWNERS["compiled"] = ["compiled_step"]
BLOCKS = documented_blocks()
OF_ALL_RUNS = BLOCKS["whenever processes are lost or join, see takeover"]
OF_A_RUN = {name: BLOCKS[name] for name in ("Trainer(...)", "train(...)", "evaluate(...)", "predict(...)")}


def declared(blocks: Iterable[Line]) -> list[Line]:
    """The lines of events in blocks and in the evaluations that they name."""
    lines = [line for block in blocks for line in block.lines()]
    if any(line.text == "evaluation" for line in lines):
        lines += BLOCKS["evaluation"].lines()
    return [line for line in lines if line.event]


def check_calls(recorder: Any, name: str, documented: str = "") -> set[str]:
    """Check the recorded calls against a block of the docstring, clear them, and return the names of the events."""
    calls, recorder.calls = recorder.calls, []
    block = with_step(BLOCKS[name], BLOCKS[documented]) if documented else BLOCKS[name]
    events = [event for event, _ in calls]
    assert re.fullmatch(pattern(block, BLOCKS), "".join(f"{event} " for event in events)), events
    for event, kwargs in calls:
        assert sorted(kwargs) == sorted(keywords_of(event)), event
    always = {line.event for line in declared([block]) if not line.is_of_some_runs}
    assert always <= set(events), always - set(events)
    return set(events)


def check_kind(kind: Kind) -> set[str]:
    """Train, evaluate and predict with a kind of step, check the events, and return their names."""
    recorder: Any = recording_callback()
    trainer = kind.make([recorder])
    fired = check_calls(recorder, "Trainer(...)")
    data = kind.how.get("train_dataset", make_data(8))
    train(trainer, 2, **{"train_dataset": data, "eval_dataset": data, "batch_size": 2} | kind.how)
    step = type(trainer.current_run.training_step)
    assert kind.step in (step, step.__name__)
    fired |= check_calls(recorder, "train(...)", kind.documented)
    trainer.evaluate(data, 2, {"num_workers": 0})
    fired |= check_calls(recorder, "evaluate(...)")
    trainer.predict(data, 2, {"num_workers": 0})
    return fired | check_calls(recorder, "predict(...)")
