"""The trainer on a GPU, in turns with a plain loop that is set up in the same way, in one process.

    python -m benchmarks --workloads gpu_resnet gpu_transformer [--rounds 3] [--contenders "bf16: ours"]

Each row is measured in a process of its own. The contender asks for batches; between two turns of some steps, that
trains a second model in a plain loop for as many steps, so whatever slows down the machine or the device slows down
both. The device is waited for at the ends of turns only, and the clock stops after that, so a turn contains all that
it has launched. The CPU time of a turn is taken before: it is what the program needs, unless the queue of the device is
full, when it also waits. Figures are medians of the turns. The control is the plain loop against itself.

After the turns, some steps are made in torch's debug modes for synchronisations: "warn" counts those of a step, and
"error" tells where the first is. These modes see operations of torch that wait for the device, such as reading a
number, but not events, nor copies from pageable memory. The row that reads each loss shows that they are seen at all.

Without a GPU, it runs on the CPU, to check that everything works: there is nothing to pin, to copy or to count, and
nothing is really compiled.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.tasks import make_task, text_task

MESSAGE = "called a synchronizing CUDA operation"  # torch's, in both debug modes
Batches = Iterable[Any]
Times = tuple[float, float]  # seconds of wall time, and of CPU time


@dataclass(frozen=True)
class Setting:
    """How both loops train.

    :param tf32: whether float32 numbers are multiplied in TF32; ``None`` to train in bf16
    :param pinned: whether batches are in pinned memory
    :param side_stream: whether a batch is copied to the device on another stream, during the step before
    :param fused: whether the optimizer is fused, or what torch chooses, which is ``foreach`` on a GPU
    :param compiled: arguments of ``torch.compile`` for the forward pass and the loss; ``None`` not to compile
    """

    tf32: bool | None = None
    pinned: bool = True
    side_stream: bool = False
    fused: bool = True
    compiled: Mapping[str, Any] | None = None


SETTINGS = {
    "bf16": Setting(),
    "bf16, pageable batches": Setting(pinned=False),
    "bf16, copies on a side stream": Setting(side_stream=True),
    "bf16, optimizer not fused": Setting(fused=False),
    "bf16, compiled": Setting(compiled={}),
    "bf16, CUDA graphs": Setting(compiled={"mode": "reduce-overhead"}),
    "float32": Setting(tf32=False),
    "float32, TF32": Setting(tf32=True),
}
CONTROL, READING, OURS = "plain loop again (control)", "plain loop, reading each loss", "ours"
#: The setting and the contender of each row.
ROWS = {
    f"{setting}: {contender}": (setting, contender)
    for setting in SETTINGS
    for contender in (CONTROL, READING, OURS)
    if contender != READING or setting == "bf16"
}


@dataclass(frozen=True)
class Sizes:
    """Numbers of turns, of steps in a turn, of steps before the first, and of steps in each debug mode."""

    turns: int = 60
    steps: int = 10
    warm_up: int = 15  # compilation, and the recording of CUDA graphs, which takes some steps more
    watched: int = 20


@dataclass
class Workload:
    """A model, batches in host memory, and how to train."""

    model: Callable[[], nn.Module]
    batches: list[Any]
    setting: Setting
    device: torch.device
    loss_func: nn.Module = field(default_factory=nn.CrossEntropyLoss)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def compiled(self) -> dict[str, Any] | None:
        """The arguments of ``torch.compile``; on a CPU, those that take no time."""
        if self.setting.compiled is None:
            return None
        return dict(self.setting.compiled) if self.on_gpu else {"backend": "eager"}

    def make(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = self.model().to(self.device).train()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=self.setting.fused or None)


def make_workload(kind: str, setting: Setting, quick: bool, device: torch.device) -> Workload:
    """Return the training of a ResNet-50 on images, or of the transformer on text."""
    model: Callable[[], nn.Module]
    if kind == "gpu_transformer":
        task = make_task("transformer", quick=True) if quick else text_task(batch_size=64, steps=50)
        model, batches = task.make_model, task.batches()
    else:
        from timm import create_model

        shape = (2, 3, 32, 32) if quick else (64, 3, 224, 224)
        model = lambda: create_model("resnet10t" if quick else "resnet50")  # noqa: E731
        batches = [(torch.randn(shape), torch.randint(1000, shape[:1])) for _ in range(2 if quick else 8)]
    if setting.pinned and device.type == "cuda":
        batches = [tuple(tensor.pin_memory() for tensor in batch) for batch in batches]
    return Workload(model, batches, setting, device)


# ------------------------------------------------------------------------------------------- plain loop


def on_device(workload: Workload, batches: Batches) -> Iterator[Any]:
    """Yield batches on the device."""
    if workload.setting.side_stream and workload.on_gpu:
        return on_side_stream(batches, workload.device)
    return (tuple(tensor.to(workload.device, non_blocking=True) for tensor in batch) for batch in batches)


def on_side_stream(batches: Batches, device: torch.device) -> Iterator[Any]:
    """Yield batches that have been copied on another stream, each during the step before it."""
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    before: tuple[Any, torch.cuda.Event] | None = None
    for batch in batches:
        with torch.cuda.stream(side):
            copies = tuple(tensor.to(device, non_blocking=True) for tensor in batch)
        after = copies, side.record_event()
        if before is not None:
            yield arrived(*before)
        before = after
    if before is not None:
        yield arrived(*before)


def arrived(copies: Any, event: torch.cuda.Event) -> Any:
    """Let what is launched from now on wait for copies, whose memory is kept until it has used them."""
    current = torch.cuda.current_stream()
    current.wait_event(event)
    for tensor in copies:
        tensor.record_stream(current)
    return copies


def step_by_hand(workload: Workload, reads: bool = False) -> Callable[[Any], None]:
    """Return a step of a plain loop on a batch that is on the device.

    :param reads: whether to read the loss, as a loop does that prints it in each step
    """
    model, optimizer = workload.make()
    loss_func, kind, in_bf16 = workload.loss_func, workload.device.type, workload.setting.tf32 is None

    def compute(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(kind, torch.bfloat16, enabled=in_bf16):
            return loss_func(model(inputs), targets)  # type: ignore[no-any-return]

    options = workload.compiled
    replays = bool(options and "mode" in options)
    loss_of = compute if options is None else torch.compile(compute, **options)

    def step(batch: Any) -> None:
        if replays:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        loss = loss_of(*batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        if reads:
            loss.item()

    return step


# -------------------------------------------------------------------------------------------- in turns


class Turns:
    """The turns of a contender and of a plain loop, taken by the batches that the contender asks for.

    :param by_hand: makes a step of the plain loop each time it is asked
    :param batches: in host memory
    """

    def __init__(self, by_hand: Iterator[None], batches: list[Any], device: torch.device, sizes: Sizes) -> None:
        self._by_hand, self._batches, self._device, self._sizes = by_hand, cycle(batches), device, sizes
        self._on_gpu = device.type == "cuda"
        self.times: dict[str, list[Times]] = {"": [], " of plain loop": []}
        self.synchronisations: float | None = None  # in a step
        self.place = ""  # of the first, if there is one

    def batches(self) -> Generator[Any, None, None]:
        """Yield batches. Where a contender reads ahead, its turns begin and end as many steps later."""
        sizes = self._sizes
        self._make_steps_by_hand(sizes.warm_up)
        yield from islice(self._batches, sizes.warm_up)
        for _ in range(sizes.turns):
            begin = self._begin()
            self._make_steps_by_hand(sizes.steps)
            self._end(" of plain loop", begin)
            begin = self._begin()
            yield from islice(self._batches, sizes.steps)
            self._end("", begin)
        if self._on_gpu:
            yield from self._watched()

    def take(self, train: Callable[[Iterator[Any]], object]) -> dict[str, Any]:
        """Return the seconds of a step of both, and what is known of synchronisations.

        :param train: trains a contender on the batches that it is given
        """
        batches = self.batches()
        try:
            train(batches)
        except Exception as error:
            self.place = place_of_synchronisation(error)
            if not self.place:
                raise
        finally:
            batches.close()  # leaves the debug modes
        if len(self.times[""]) != self._sizes.turns:
            raise RuntimeError(f"The contender ended after {len(self.times[''])} of {self._sizes.turns} turns.")
        return self._result()

    def _make_steps_by_hand(self, count: int) -> None:
        for _ in range(count):
            next(self._by_hand)

    def _begin(self) -> Times:
        self._synchronise()
        return time.perf_counter(), time.process_time()

    def _end(self, whose: str, begin: Times) -> None:
        cpu = time.process_time() - begin[1]  # waiting for the device takes CPU time, too
        self._synchronise()
        self.times[whose].append((time.perf_counter() - begin[0], cpu))

    def _synchronise(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._device)

    def _watched(self) -> Iterator[Any]:
        """Yield batches in both debug modes."""
        steps = self._sizes.watched
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with debug_mode("warn"):
                yield from islice(self._batches, steps)
        # Another warning says that these modes do not see everything.
        self.synchronisations = sum(MESSAGE in str(warning.message) for warning in caught) / steps
        with debug_mode("error"):
            yield from islice(self._batches, steps)

    def _result(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for whose, times in self.times.items():
            for quantity, seconds in zip(("wall", "cpu"), zip(*times, strict=True), strict=True):
                found[quantity + whose] = statistics.median(seconds) / self._sizes.steps
        if self._on_gpu:
            found |= {"synchronisations": self.synchronisations, "first synchronisation": self.place}
        return found


@contextlib.contextmanager
def debug_mode(mode: str) -> Iterator[None]:
    """Let torch warn of synchronisations in a block, or raise an error at the first."""
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def place_of_synchronisation(error: BaseException | None) -> str:
    """Return the line outside torch at which an error of the debug mode was raised; nothing for another error."""
    while error is not None and MESSAGE not in str(error):
        error = error.__cause__ or error.__context__
    if error is None:
        return ""
    inside = Path(torch.__file__).parent
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if inside not in Path(frame.filename).parents]
    return next((f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(own)), "torch")


# ----------------------------------------------------------------------------------------------- measures


def train_ours(workload: Workload, batches: Iterator[Any]) -> None:
    """Train with the default callbacks but the bar."""
    from accelerate import Accelerator

    from pytorch_accel_lite import Trainer, get_default_callbacks
    from pytorch_accel_lite.data import OwnShard

    setting = workload.setting
    model, optimizer = workload.make()
    precision = "bf16" if setting.tf32 is None else "no"
    accelerator = Accelerator(mixed_precision=precision, cpu=not workload.on_gpu)
    compiled: Any = workload.compiled
    options: dict[str, Any] = {} if compiled is None else {"compile_step": compiled or True}
    trainer = Trainer(
        model,
        copy.deepcopy(workload.loss_func),  # the trainer looks at the first call of its own
        optimizer,
        get_default_callbacks(progress_bar=False),
        accelerator=accelerator,
        **options,
    )
    # The trainer copies batches itself, except from a loader that does so on a stream of its own.
    given = on_device(workload, batches) if setting.side_stream else batches
    trainer.create_train_dataloader = lambda *_: OwnShard(given)  # type: ignore[method-assign]
    size = len(workload.batches[0][0])
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        trainer.train([0] * size, 1, per_device_batch_size=size)


def train_by_hand(workload: Workload, batches: Iterator[Any], reads: bool) -> None:
    step = step_by_hand(workload, reads)
    for batch in on_device(workload, batches):
        step(batch)


def set_tf32(tf32: bool) -> None:
    """Set how float32 numbers are multiplied, in matrix products and convolutions."""
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32


def measure(kind: str, row: str, quick: bool) -> dict[str, Any]:
    """Return the seconds of a step of a row's contender, and of a step of a plain loop that is set up likewise."""
    name, contender = ROWS[row]
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    workload = make_workload(kind, SETTINGS[name], quick, device)
    if workload.setting.tf32 is not None:
        set_tf32(workload.setting.tf32)
    step = step_by_hand(workload)
    by_hand = (step(batch) for batch in on_device(workload, cycle(workload.batches)))
    sizes = Sizes(turns=3, steps=1, warm_up=2, watched=2) if quick else Sizes(steps=10 if "resnet" in kind else 40)
    turns = Turns(by_hand, workload.batches, device, sizes)

    def train(batches: Iterator[Any]) -> None:
        if contender == OURS:
            train_ours(workload, batches)
        else:
            train_by_hand(workload, batches, contender == READING)

    found = turns.take(train)
    where = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}" if workload.on_gpu else "no GPU"
    return found | {"device": where, "turns": sizes.turns, "steps": sizes.steps}


# ------------------------------------------------------------------------------------------------ table


def table(results: Mapping[str, list[dict[str, Any]]]) -> str:
    """Return a Markdown table of the rows' rounds."""
    heads = ["plain loop, microseconds per step", "more", "wall time", "CPU time", "synchronisations per step"]
    lines = [f"| | {' | '.join(heads)} |", "|---|" + "---|" * len(heads)]
    measured = {name: rounds for name, rounds in results.items() if rounds}
    lines += [f"| {name} |" + " failed |" * len(heads) for name in results.keys() - measured.keys()]
    for name, rounds in measured.items():
        hand = 1e6 * statistics.median(each["wall of plain loop"] for each in rounds)
        more = 1e6 * statistics.median(each["wall"] - each["wall of plain loop"] for each in rounds)
        ratios = [spread([each[q] / each[f"{q} of plain loop"] for each in rounds]) for q in ("wall", "cpu")]
        lines.append(f"| {name} | {hand:,.0f} | {more:+,.1f} | {' | '.join(ratios)} | {synchronising(rounds)} |")
    note = "Ratios to the plain loop of the same setting."
    for first, *_ in islice(measured.values(), 1):
        note += f" {first['turns']} turns of {first['steps']} steps in each round, on {first['device']}."
    return "\n".join([*lines, "", note])


def spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def synchronising(rounds: list[dict[str, Any]]) -> str:
    """Return how often a step waits for the device, and where the first does."""
    if any("synchronisations" not in each for each in rounds):
        return "not counted"
    counted = f"{max(each['synchronisations'] for each in rounds):.3g}"
    places = dict.fromkeys(each["first synchronisation"] for each in rounds if each["first synchronisation"])
    return f"{counted}, first at {', '.join(places)}" if places else counted


if __name__ == "__main__":
    kind, row, mode = sys.argv[1:]
    torch.set_num_threads(1)
    print("\n" + json.dumps(measure(kind, row, mode == "quick")))
