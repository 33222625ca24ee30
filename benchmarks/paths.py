"""The overhead of a step for common set-ups: python -m benchmarks.paths [--rounds 15] [--only seed].

The trainer and a hand-written loop that does the same take turns every 20 steps, in one process. Each turn of the
trainer is compared with that of the loop before it, as the speed of a machine varies. Results are the medians of these
differences of the CPU times, in microseconds per step, with what a repetition may differ by (the notches of box plots,
McGill et al. 1978). The control compares the hand-written loop with itself.

Where states are saved within an epoch, a turn has 100 steps, with the save in the middle of it, such that what is still
written in the background takes time from the trainer's own turn. There, the times are those that pass.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from benchmarks.report import footnote, in_rounds
from benchmarks.tasks import Task, make_task
from pytorch_accel_lite import Trainer, callbacks, get_default_callbacks
from pytorch_accel_lite.data import OwnShard

DECAY = 0.99
COLUMNS = ["no callbacks", "default", "with a bar", "everything on"]
Clock = Callable[[], float]
Blocks = tuple[list[float], list[float]]  # seconds of the hand-written loop, and of the other


@dataclass(frozen=True)
class SetUp:
    """What the trainer and the hand-written loop do, besides training.

    Args:
        reads: ``"list"`` of batches, ``"getitem"`` or ``"getitems"`` for the method of a dataset, or ``"tensors"``
        states: save training states, every this many updates; 0 to save them only between epochs, which is not
            measured, ``None`` for never
        in_background: write them in the background
        column: the callbacks of the trainer, and with ``"everything on"`` also of the hand-written loop
    """

    reads: str
    seed: int | None = None
    states: int | None = None
    in_background: bool = False
    workers: int = 0
    accumulation: int = 1
    clips: bool = False
    follows_schedule: bool = False
    averages: bool = False
    has_metrics: bool = False
    column: str = COLUMNS[0]
    steps_in_turn: int = 20

    @property
    def clock(self) -> Clock:
        """Tells the CPU time of training, or the time that passes where it may wait for a disk and other threads."""
        return time.perf_counter if self.states else time.thread_time

    def in_column(self, column: str) -> SetUp:
        if column != COLUMNS[-1]:
            return replace(self, column=column)
        return replace(self, column=column, clips=True, follows_schedule=True, averages=True, has_metrics=True)

    def callbacks(self, folder: Path) -> list[Any]:
        found = [] if self.column == COLUMNS[0] else list(get_default_callbacks(progress_bar=False))
        if self.column in COLUMNS[2:]:
            found.append(callbacks.ProgressBarCallback(show_always=True))
        if self.averages:
            found.append(callbacks.ModelEmaCallback(DECAY, evaluate_during_training=False, save_path=None))
        if self.has_metrics:
            found.append(callbacks.MetricsCallback(accuracy(), train=True))
        if self.states is not None:
            how = {"save_every_n_steps": self.states or None, "max_checkpoints": 1, "asynchronous": self.in_background}
            found.append(callbacks.SaveTrainingStateCallback(folder, save_at_end=False, **how))
        return found


def _on_every_path() -> Iterator[tuple[str, SetUp]]:
    yield "list of batches", SetUp("list")
    yield "list of batches, seed", SetUp("list", seed=1)
    for name, reads in (
        ("DataLoader, `__getitem__`", "getitem"),
        ("DataLoader, `__getitems__`", "getitems"),
        ("TensorDataset", "tensors"),
    ):
        setup = SetUp(reads)
        seeded = replace(setup, seed=1)
        yield name, setup
        yield f"{name}, seed", seeded
        yield f"{name}, seed and states", replace(seeded, states=0)
        often = replace(seeded, states=100, steps_in_turn=100)
        yield f"{name}, seed, states every 100 updates", often
        yield f"{name}, seed, states every 100 updates in the background", replace(often, in_background=True)
        yield f"{name}, 2 workers", replace(setup, workers=2)
        yield f"{name}, 2 workers, seed", replace(seeded, workers=2)


def _doing_more() -> Iterator[tuple[str, SetUp]]:
    for name, setup in (
        ("list, accumulation of 4", SetUp("list", accumulation=4)),
        ("list, clipping", SetUp("list", clips=True)),
        ("list, schedule", SetUp("list", follows_schedule=True)),
        ("list, EMA", SetUp("list", averages=True)),
        ("list, metrics", SetUp("list", has_metrics=True)),
        ("list, states every 100 updates", SetUp("list", states=100, steps_in_turn=100)),
        (
            "list, states every 100 updates in the background",
            SetUp("list", states=100, in_background=True, steps_in_turn=100),
        ),
    ):
        yield name, setup
        yield f"{name}, seed", replace(setup, seed=1)


PATHS = dict(_on_every_path())
#: What does more in a step, where a column with everything on would repeat that of the list.
DOING_MORE = dict(_doing_more())


class Reads(Dataset[Any]):
    """A dataset that reads samples."""

    def __init__(self, task: Task) -> None:
        self.x, self.y = task.dataset.tensors  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


class ReadsBatches(Reads):
    """A dataset that reads a batch of samples at once."""

    def __getitems__(self, indices: list[int]) -> Any:
        return self.x[indices], self.y[indices]


def collated(batch: Any) -> Any:
    return batch


def accuracy() -> MulticlassAccuracy:
    return MulticlassAccuracy(10, validate_args=False)


def data_of(task: Task, setup: SetUp) -> tuple[Any, dict[str, Any]]:
    """Return a source of data, and the arguments with which a ``DataLoader`` reads it."""
    options: dict[str, Any] = {"num_workers": setup.workers, "persistent_workers": bool(setup.workers)}
    if setup.reads == "list":
        return task.batches(), {}
    if setup.reads == "getitems":
        return ReadsBatches(task), options | {"collate_fn": collated}
    return (task.dataset if setup.reads == "tensors" else Reads(task)), options


def by_hand(
    task: Task,
    setup: SetUp,
    folder: Path,
    batches: Iterable[Any] | None = None,
    clock: Clock = time.thread_time,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> Iterator[float]:
    """Train endlessly, yielding the seconds of each turn.

    Args:
        clock: tells the time, by default that of the CPU
        wrap: wraps the model
    """
    data, options = data_of(task, setup)
    if batches is None:
        batches = DataLoader(data, task.batch_size, shuffle=True, **options) if options else data
    model = wrap(task.make_model())
    optimizer, loss_func = task.make_optimizer(model), task.loss_func
    endless = chain.from_iterable(repeat(batches))
    parameters = list(model.parameters())
    schedule = CosineAnnealingLR(optimizer, 100_000) if setup.follows_schedule else None
    average = [parameter.detach().clone() for parameter in parameters] if setup.averages else None
    metric = accuracy() if setup.has_metrics else None
    model.train()
    while True:
        begin = clock()
        for step, (inputs, targets) in enumerate(islice(endless, setup.steps_in_turn), 1):
            outputs = model(inputs)
            loss = loss_func(outputs, targets)
            (loss if setup.accumulation == 1 else loss / setup.accumulation).backward()
            if metric is not None:
                metric.update(outputs.detach(), targets)
            if step % setup.accumulation:
                continue
            if setup.clips:
                torch.nn.utils.clip_grad_norm_(parameters, 10.0)
            optimizer.step()
            if schedule is not None:
                schedule.step()
            optimizer.zero_grad()
            if average is not None:
                with torch.no_grad():
                    torch._foreach_lerp_(average, parameters, 1 - DECAY)
        if setup.states:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "by_hand.pt")
        yield clock() - begin


class Indexed:
    """The batches of tensors in memory, shuffled once and picked by one operation per tensor: the fastest loop."""

    def __init__(self, task: Task) -> None:
        self.tensors, self.batch_size = task.dataset.tensors, task.batch_size  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[Any]:
        for indices in torch.randperm(len(self.tensors[0])).split(self.batch_size):  # type: ignore[no-untyped-call]
            yield [tensor.index_select(0, indices) for tensor in self.tensors]


class TakesTurns(Trainer):
    """Alternates with a hand-written loop, a number of steps at a time, and times both."""

    clock: Clock = staticmethod(time.thread_time)
    is_list = False

    def take_turns(self, by_hand: Iterator[float], steps: int, first_step: int = 0) -> None:
        """Start again, in turns of this many steps."""
        self.by_hand, self.steps_in_turn, self.first_step = by_hand, steps, first_step
        self.steps = 0
        self.times: Blocks = [], []

    def create_train_dataloader(self, batch_size: int, train_dl_kwargs: Any = None) -> Any:
        if self.is_list:
            return OwnShard(self.train_dataset)
        return super().create_train_dataloader(batch_size, train_dl_kwargs)

    def create_eval_dataloader(self, batch_size: int, eval_dl_kwargs: Any = None) -> Any:
        if self.is_list:
            return OwnShard(self.eval_dataset)
        return super().create_eval_dataloader(batch_size, eval_dl_kwargs)

    def calculate_train_batch_loss(self, batch: Any) -> Any:
        self._step()
        return super().calculate_train_batch_loss(batch)

    def calculate_eval_batch_loss(self, batch: Any) -> Any:
        self._step()
        return super().calculate_eval_batch_loss(batch)

    def _step(self) -> None:
        if self.steps % self.steps_in_turn == self.first_step:
            now = self.clock()
            one = next(self.by_hand)
            if self.steps > self.steps_in_turn + self.first_step:  # not the first turn, which warms up
                self.times[0].append(one)
                self.times[1].append(now - self.begin)
            self.begin = self.clock()
        self.steps += 1


def taking_turns(one: Iterator[float], other: Iterator[float], turns: int) -> Blocks:
    pairs = [(next(one), next(other)) for _ in range(turns)]
    first, second = zip(*pairs[1:], strict=True)
    return list(first), list(second)


def compare(task: Task, setup: SetUp, folder: Path, more: Iterable[Any] = ()) -> Blocks:
    """Return the times of the turns of a hand-written loop and of a trainer with the same set-up.

    Args:
        more: further callbacks
    """
    data, options = data_of(task, setup)
    model = task.make_model()
    found = [*setup.callbacks(folder), *more]
    trainer = TakesTurns(model, task.loss_func, task.make_optimizer(model), found, seed=setup.seed)
    trainer.is_list, trainer.clock = setup.reads == "list", setup.clock
    saves_at = setup.steps_in_turn // 2 if setup.states else 0  # in the middle of a turn
    trainer.take_turns(by_hand(task, setup, folder, clock=setup.clock), setup.steps_in_turn, saves_at)
    how: dict[str, Any] = {"gradient_accumulation_steps": setup.accumulation}
    if setup.clips:
        how["gradient_clip_norm"] = 10.0
    if setup.follows_schedule:
        how["create_scheduler_fn"] = partial(CosineAnnealingLR, T_max=100_000)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        trainer.train(data, 1, per_device_batch_size=task.batch_size, train_dataloader_kwargs=options, **how)
    return trainer.times


def set_ups(task: Task, folder: Path, quick: bool) -> dict[tuple[str, str], Callable[[], Blocks]]:
    """Return, by name and column, what compares something with the hand-written loop over the same data."""
    found: dict[tuple[str, str], Callable[[], Blocks]] = {}
    shorter = {"steps_in_turn": 5} if quick else {}
    listed, tensors = (replace(PATHS[name], **shorter) for name in ("list of batches", "TensorDataset"))
    turns = task.steps // listed.steps_in_turn

    def hand(setup: SetUp, batches: Any = None) -> Iterator[float]:
        return by_hand(task, setup, folder, batches)

    found["control: the loop over the list again", COLUMNS[0]] = lambda: taking_turns(hand(listed), hand(listed), turns)
    found["TensorDataset, indexed in a plain loop", COLUMNS[0]] = lambda: taking_turns(
        hand(tensors), hand(tensors, Indexed(task)), turns
    )
    for paths, columns in ((PATHS, COLUMNS), (DOING_MORE, COLUMNS[:3])):
        for name, setup in paths.items():
            for column in columns:
                found[name, column] = partial(compare, task, replace(setup.in_column(column), **shorter), folder)
    return found


def summarise(blocks: Blocks, steps: int) -> tuple[float, float, float]:
    """Return microseconds per step: of the loop, the median of what the other adds to it, and how sure that is."""
    by_hand, own = ([1e6 * seconds / steps for seconds in times] for times in blocks)
    first, median, third = statistics.quantiles((b - a for a, b in zip(by_hand, own, strict=True)), n=4)
    return statistics.median(by_hand), median, 1.57 * (third - first) / len(own) ** 0.5


def rows(found: dict[tuple[str, str], Blocks], quick: bool) -> Iterator[str]:
    """Yield the rows of the table: the time of the hand-written loop, and what others add to it in each column."""
    steps = {name: setup.steps_in_turn for name, setup in (PATHS | DOING_MORE).items()}
    for name in dict.fromkeys(name for name, _ in found):
        in_turn = 5 if quick else steps.get(name, SetUp("list").steps_in_turn)
        cells = {column: summarise(found[name, column], in_turn) for column in COLUMNS if (name, column) in found}
        texts = [f"{added:+.0f} ± {unsure:.0f} ({1 + added / hand:.2f})" for hand, added, unsure in cells.values()]
        shown = dict.fromkeys(COLUMNS, "") | dict(zip(cells, texts, strict=True))
        yield f"| {name} | {next(iter(cells.values()))[0]:.0f} | {' | '.join(shown.values())} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paths", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="+", default=[""], help="only paths whose name contains one of these")
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=COLUMNS)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    task = make_task("loop")
    steps = 20 if arguments.quick else 1000
    few = TensorDataset(*task.dataset[: steps * task.batch_size])
    task = Task(task.make_model, task.make_optimizer, few, task.batch_size, steps, task.ready)
    with tempfile.TemporaryDirectory() as folder:
        chosen = {
            (name, column): run
            for (name, column), run in set_ups(task, Path(folder), arguments.quick).items()
            if any(part in name for part in arguments.only) and column in arguments.columns
        }
        found: dict[tuple[str, str], Blocks] = {key: ([], []) for key in chosen}
        for _ in range(arguments.rounds):
            for key, run in chosen.items():
                for times, new in zip(found[key], run(), strict=True):
                    times += new
    print(f"| path | plain loop, microseconds per step | {' | '.join(COLUMNS)} |\n|---|---|{'---|' * len(COLUMNS)}")
    for row in rows(found, arguments.quick):
        print(row)
    print(footnote(in_rounds(arguments.rounds)))


if __name__ == "__main__":
    main()
