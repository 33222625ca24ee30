"""The trainer on a GPU, in turns with a plain loop that is set up in the same way, in one process.

    python -m benchmarks --workloads gpu_resnet gpu_transformer [--rounds 3] [--contenders "bf16: ours"]
    python -m benchmarks.gpu all gpu_gpt full

The first measures settings, each row in a process of its own. The second, for which ``make gpu`` has few minutes,
measures contenders with one workload: the trainer bare, by default and with everything on, and other trainers that are
installed, eager and compiled, one after another in one process; it prints a line of JSON for each.
 The contender asks for batches; between two turns of some steps, that
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
import gc
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.tasks import make_mlp, make_task, random_data, text_task

MESSAGE = "called a synchronizing CUDA operation"  # torch's, in both debug modes
Batches = Iterable[Any]
Times = tuple[float, float, float]  # seconds of wall time, of CPU time, and by events of the device


@dataclass(frozen=True)
class Setting:
    """How both loops train.

    Args:
        tf32: whether float32 numbers are multiplied in TF32; ``None`` to train in bf16
        pinned: whether batches are in pinned memory
        side_stream: whether a batch is copied to the device on another stream, during the step before
        fused: whether the optimizer is fused, or what torch chooses, which is ``foreach`` on a GPU
        compiled: arguments of ``torch.compile`` for the forward pass and the loss; ``None`` not to compile
        channels_last: whether images and convolutions are in that memory format
        everything: whether gradients are clipped, rates follow a schedule, weights are averaged, a metric is updated
            and every fiftieth step is logged
    """

    tf32: bool | None = None
    pinned: bool = True
    side_stream: bool = False
    fused: bool = True
    compiled: Mapping[str, Any] | None = None
    channels_last: bool = False
    everything: bool = False


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
    """A model, batches in host memory, and how to train.

    Attributes:
        num_batches: how many a contender will be given
    """

    model: Callable[[], nn.Module]
    batches: list[Any]
    setting: Setting
    device: torch.device
    loss_func: nn.Module = field(default_factory=nn.CrossEntropyLoss)
    num_batches: int = 0

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
        if self.setting.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=self.setting.fused or None)


#: Width, layers, heads, length of the context, vocabulary: those of GPT-2, with 124 million parameters.
GPT_SIZES = (768, 12, 12, 1024, 50304)


class Layer(nn.Module):
    """A layer of a transformer, whose attention torch computes by its flash kernel in bf16."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_heads, self.from_heads = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.to_heads(self.before_attention(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.from_heads(found.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class LanguageModel(nn.Module):
    """A transformer whose weights of tokens are also those of its head."""

    def __init__(self, width: int, depth: int, heads: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.layers(self.tokens(x) + self.positions.weight[: x.shape[1]])))


class OverTokens(nn.Module):
    """The mean loss over all tokens."""

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def make_workload(kind: str, setting: Setting, quick: bool, device: torch.device) -> Workload:
    """Return the training of a ResNet-50 on images, or of the transformer on text."""
    model: Callable[[], nn.Module]
    loss_func: nn.Module = nn.CrossEntropyLoss()
    if kind == "gpu_transformer":
        task = make_task("transformer", quick=True) if quick else text_task(batch_size=64, steps=50)
        model, batches = task.make_model, task.batches()
    elif kind == "gpu_gpt":
        sizes = (32, 2, 2, 16, 64) if quick else GPT_SIZES
        model, loss_func = partial(LanguageModel, *sizes), OverTokens()
        text = torch.randint(sizes[-1], (4, 2 if quick else 16, sizes[3] + 1))
        batches = [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in text]
    elif kind == "gpu_tiny":
        columns = (tensor.split(32) for tensor in random_data(32 * 64, 64).tensors)
        model, batches = make_mlp, list(zip(*columns, strict=True))
    else:
        from timm import create_model

        shape = (2, 3, 32, 32) if quick else (64, 3, 224, 224)
        model = lambda: create_model("resnet10t" if quick else "resnet50")  # noqa: E731
        batches = [(torch.randn(shape), torch.randint(1000, shape[:1])) for _ in range(2 if quick else 8)]
    if setting.channels_last:
        batches = [(x.contiguous(memory_format=torch.channels_last), y) for x, y in batches]
    if setting.pinned and device.type == "cuda":
        batches = [tuple(tensor.pin_memory() for tensor in batch) for batch in batches]
    return Workload(model, batches, setting, device, loss_func)


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


NORM, DECAY, LOGGED_EVERY = 1.0, 0.999, 50
SCHEDULED_STEPS = 100_000


class MoreByHand:
    """What a plain loop with everything on does beside the update, without waiting for the device."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, workload: Workload) -> None:
        self._parameters = list(model.parameters())
        self._schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, SCHEDULED_STEPS)
        self._average = [parameter.detach().clone() for parameter in self._parameters]
        self._metric = accuracy(workload)
        self._logged: list[torch.Tensor] = []
        self._steps = 0

    def before_update(self) -> None:
        nn.utils.clip_grad_norm_(self._parameters, NORM)

    def after_update(self, loss: torch.Tensor, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        self._schedule.step()
        with torch.no_grad():
            torch._foreach_lerp_(self._average, self._parameters, 1 - DECAY)
        self._metric.update(*for_accuracy(outputs.detach(), targets))
        self._steps += 1
        if self._steps % LOGGED_EVERY == 0:
            self._logged = [*self._logged[-4:], loss.detach().to("cpu", non_blocking=True)]


def accuracy(workload: Workload) -> Any:
    """A metric that does not wait: it is not averaged over classes, for which torch counts on the device."""
    from torchmetrics.classification import MulticlassAccuracy

    classes = 2**16  # more than any of the models has
    return MulticlassAccuracy(classes, average="micro", validate_args=False).to(workload.device)


def for_accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Predicted and true classes of samples, or of tokens, whose classes are the last dimension."""
    dim = 1 if outputs.ndim == 3 and outputs.shape[-1] == targets.shape[-1] else -1
    return outputs.argmax(dim).flatten(), targets.flatten()


def step_by_hand(workload: Workload, reads: bool = False) -> Callable[[Any], None]:
    """Return a step of a plain loop on a batch that is on the device.

    Args:
        reads: whether to read the loss, as a loop does that prints it in each step
    """
    model, optimizer = workload.make()
    loss_func, kind, in_bf16 = workload.loss_func, workload.device.type, workload.setting.tf32 is None

    def compute(inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(kind, torch.bfloat16, enabled=in_bf16):
            outputs = model(inputs)
            return loss_func(outputs, targets), outputs

    options = workload.compiled
    replays = bool(options and "mode" in options)
    loss_of = compute if options is None else torch.compile(compute, **options)
    more = MoreByHand(model, optimizer, workload) if workload.setting.everything else None

    def step(batch: Any) -> None:
        if replays:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        loss, outputs = loss_of(*batch)
        loss.backward()
        if more is not None:
            more.before_update()
        optimizer.step()
        if more is not None:
            more.after_update(loss, outputs, batch[1])
        optimizer.zero_grad()
        if reads:
            loss.item()

    return step


# -------------------------------------------------------------------------------------------- in turns


class Turns:
    """The turns of a contender and of a plain loop, taken by the batches that the contender asks for.

    Args:
        by_hand: makes a step of the plain loop each time it is asked
        batches: in host memory
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

        Args:
            train: trains a contender on the batches that it is given
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

    def _begin(self) -> tuple[float, float, Any]:
        self._synchronise()
        return time.perf_counter(), time.process_time(), self._event()

    def _end(self, whose: str, begin: tuple[float, float, Any]) -> None:
        cpu = time.process_time() - begin[1]  # waiting for the device takes CPU time, too
        end = self._event()
        self._synchronise()
        wall = time.perf_counter() - begin[0]
        # By the device's own clock, from the first kernel of a turn to the end of its last.
        on_device = wall if end is None else begin[2].elapsed_time(end) / 1e3
        self.times[whose].append((wall, cpu, on_device))

    def _event(self) -> Any:
        if not self._on_gpu:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

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
            for quantity, seconds in zip(("wall", "cpu", "event"), zip(*times, strict=True), strict=True):
                found[quantity + whose] = statistics.median(seconds) / self._sizes.steps
        pairs = zip(self.times[""], self.times[" of plain loop"], strict=True)
        found["ratios"] = [own[2] / by_hand[2] for own, by_hand in pairs]
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


def callbacks_of(workload: Workload, column: str, folder: Path) -> list[Any]:
    """The callbacks of the trainer, without the bar."""
    from pytorch_accel_lite import callbacks

    if column == "bare":
        return []
    default: list[Any] = list(callbacks.get_default_callbacks(progress_bar=False))
    if not workload.setting.everything:
        return default
    return [
        *default,
        callbacks.ModelEmaCallback(DECAY, evaluate_during_training=False, save_path=None),
        callbacks.MetricsCallback(
            accuracy(workload), lambda batch, output: for_accuracy(output["model_outputs"], batch[1]), train=True
        ),
        callbacks.MetricsFileCallback(folder / "rows.jsonl", every_n_updates=LOGGED_EVERY),
    ]


def train_ours(workload: Workload, batches: Iterator[Any], column: str = "default") -> None:
    """Train with the default callbacks but the bar, with none, or with everything on."""
    from accelerate import Accelerator

    from pytorch_accel_lite import Trainer
    from pytorch_accel_lite.data import OwnShard

    setting = workload.setting
    model, optimizer = workload.make()
    precision = "bf16" if setting.tf32 is None else "no"
    accelerator = Accelerator(mixed_precision=precision, cpu=not workload.on_gpu)
    compiled: Any = workload.compiled
    options: dict[str, Any] = {} if compiled is None else {"compile_step": compiled or True}
    folder = tempfile.TemporaryDirectory()
    trainer = Trainer(
        model,
        copy.deepcopy(workload.loss_func),  # the trainer looks at the first call of its own
        optimizer,
        callbacks_of(workload, column, Path(folder.name)),
        accelerator=accelerator,
        channels_last=setting.channels_last,
        **options,
    )
    more: dict[str, Any] = {}
    if setting.everything:
        schedule = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=SCHEDULED_STEPS)
        more = {"gradient_clip_norm": NORM, "create_scheduler_fn": schedule}
    # The trainer copies batches itself, except from a loader that does so on a stream of its own.
    given = on_device(workload, batches) if setting.side_stream else batches
    trainer.create_train_dataloader = lambda *_: OwnShard(given)  # type: ignore[method-assign]
    size = len(workload.batches[0][0])
    with folder, open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        trainer.train([0] * size, 1, per_device_batch_size=size, **more)


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

    return turns.take(train) | {"device": name_of(device), "turns": sizes.turns, "steps": sizes.steps}


def name_of(device: torch.device) -> str:
    return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}" if device.type == "cuda" else "no GPU"


# -------------------------------------------------------------------------------- many contenders in a process


class Fed(torch.utils.data.IterableDataset[Any]):
    """The batches of a contender that is given a ``DataLoader``."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def loader_of(batches: Iterable[Any]) -> torch.utils.data.DataLoader[Any]:
    """A loader that passes batches on as they are."""
    return torch.utils.data.DataLoader(Fed(batches), batch_size=None, collate_fn=as_it_is)


def as_it_is(batch: Any) -> Any:
    return batch


def train_by_accelerate(workload: Workload, batches: Iterator[Any]) -> None:
    """The loop that Accelerate's documentation shows."""
    from accelerate import Accelerator

    model, optimizer = workload.make()
    accelerator = Accelerator(mixed_precision="bf16", cpu=not workload.on_gpu)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader_of(batches))
    for inputs, targets in loader:
        loss = workload.loss_func(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def train_by_lightning(workload: Workload, batches: Iterator[Any]) -> None:
    """Lightning without logger, bar and checkpoints."""
    try:
        import lightning.pytorch as pl
    except ModuleNotFoundError:
        import pytorch_lightning as pl  # type: ignore[no-redef]

    network, optimizer = workload.make()

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.network, self.loss_func = network, workload.loss_func

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.loss_func(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    kind = "gpu" if workload.on_gpu else "cpu"
    trainer = pl.Trainer(max_epochs=1, accelerator=kind, devices=1, precision="bf16-mixed", barebones=True)
    trainer.fit(Module(), loader_of(batches))


def train_by_transformers(workload: Workload, batches: Iterator[Any]) -> None:
    """The trainer of transformers, without clipping, reports and checkpoints."""
    from transformers import Trainer, TrainingArguments

    network, optimizer = workload.make()

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.loss_func = network, workload.loss_func

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            return {"loss": self.loss_func(self.network(x), labels)}

    class Given(Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return loader_of({"x": x, "labels": labels} for x, labels in batches)

    size = len(workload.batches[0][0])
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=size,
            max_steps=workload.num_batches + 1,  # it asks once more than there are batches
            num_train_epochs=1,
            bf16=True,
            use_cpu=not workload.on_gpu,
            report_to="none",
            save_strategy="no",
            max_grad_norm=0.0,
            logging_strategy="no",
            disable_tqdm=True,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        trainer = Given(Module(), arguments, train_dataset=Fed([]), optimizers=(optimizer, schedule))
        trainer.train()


BARE, EVERYTHING = "ours, bare", "ours, everything on"
OURS_BY_COLUMN = {BARE: "bare", "ours, default": "default", EVERYTHING: "everything on"}
OTHER_TRAINERS = {
    "Accelerate's loop": ("accelerate", train_by_accelerate),
    "Lightning": ("lightning", train_by_lightning),
    "transformers.Trainer": ("transformers", train_by_transformers),
}
ALL_KINDS = ("gpu_tiny", "gpu_gpt", "gpu_resnet")


def contenders_of(compiled: bool) -> list[str]:
    return [CONTROL, *OURS_BY_COLUMN, *([] if compiled else OTHER_TRAINERS)]


def sizes_of(kind: str, quick: bool) -> Sizes:
    """How many turns and steps fit into the time that a GPU is lent for."""
    if quick:
        return Sizes(turns=3, steps=1, warm_up=2, watched=2)
    return Sizes(turns=40, steps=100, watched=50) if kind == "gpu_tiny" else Sizes(turns=14, steps=5, watched=5)


def setting_of(kind: str, compiled: bool, everything: bool) -> Setting:
    return Setting(channels_last=kind == "gpu_resnet", compiled={} if compiled else None, everything=everything)


def measure_all(kind: str, quick: bool, show: Callable[[dict[str, Any]], None]) -> None:
    """Measure all contenders one after another, and show each as soon as it is known, or why it failed."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    # A rehearsal tries all contenders with the tiny model, which takes least time.
    repeats = quick and kind != "gpu_tiny"
    for compiled in (False,) if repeats else (False, True):
        for contender in [CONTROL, EVERYTHING] if repeats else contenders_of(compiled):
            row = {"workload": kind, "contender": contender, "compiled": compiled}
            try:
                found = measure_one(kind, contender, compiled, quick, device)
            except ModuleNotFoundError as error:
                found = {"missing": str(error)}
            except Exception as error:  # the others say something all the same
                traceback.print_exc()
                found = {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
            show(row | found)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


def measure_one(kind: str, contender: str, compiled: bool, quick: bool, device: torch.device) -> dict[str, Any]:
    workload = make_workload(kind, setting_of(kind, compiled, contender == EVERYTHING), quick, device)
    sizes = sizes_of(kind, quick)
    workload.num_batches = sizes.warm_up + sizes.turns * sizes.steps + (2 * sizes.watched if workload.on_gpu else 0)
    step = step_by_hand(workload)
    by_hand = (step(batch) for batch in on_device(workload, cycle(workload.batches)))
    turns = Turns(by_hand, workload.batches, device, sizes)

    def train(batches: Iterator[Any]) -> None:
        if contender in OURS_BY_COLUMN:
            train_ours(workload, batches, OURS_BY_COLUMN[contender])
        elif contender in OTHER_TRAINERS:
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                OTHER_TRAINERS[contender][1](workload, batches)
        else:
            train_by_hand(workload, batches, reads=False)

    started = time.perf_counter()
    found = turns.take(train)
    taken = time.perf_counter() - started
    return found | {"device": name_of(device), "turns": sizes.turns, "steps": sizes.steps, "seconds": taken}


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


def compile_ahead(kind: str) -> None:
    """Compile what will be measured, so that torch's cache has it then."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    for everything in (False, True):
        workload = make_workload(kind, setting_of(kind, True, everything), device.type == "cpu", device)
        train_by_hand(workload, iter(workload.batches[:2]), reads=False)
        train_ours(workload, iter(workload.batches[:2]))


def main(which: str, kind: str, mode: str) -> None:
    torch.set_num_threads(1)
    if which == "all":
        for each in kind.split(","):
            if mode == "compile":
                compile_ahead(each)
            else:
                measure_all(each, mode == "quick", lambda row: print(json.dumps(row), flush=True))
    else:  # the kind of workload, and the name of a row
        print("\n" + json.dumps(measure(which, kind, mode == "quick")))


if __name__ == "__main__":
    main(*sys.argv[1:])
