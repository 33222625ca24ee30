"""Watching losses and gradients, and reporting the first layer and the samples of one that is not finite."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from pytorch_accel_lite.checkpoint import folder_path, write_text
from pytorch_accel_lite.extending import BatchOutput, JsonObject, NonFiniteLossError, TrainerCallback, TrainerLike
from pytorch_accel_lite.extension_tools.data_and_batches import BatchData, Index, mean_that_counts
from pytorch_accel_lite.extension_tools.modules_and_devices import to_float
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import total_norm
from pytorch_accel_lite.extension_tools.plain_types import StrPath, Tree
from pytorch_accel_lite.extensions.nan_report.operation_watch import OperationWatch, are_finite


@dataclass
class NonFinite:
    """Where numbers stopped being finite in a forward pass.

    Args:
        layer: name of the first module whose output is not finite, ``None`` if all outputs are finite
        kind: class of that module
        inputs_are_finite: whether the module's inputs are finite
        weights_are_finite: whether the parameters and buffers of the module itself are finite
        operations: where the first infinite value and the first NaN come from, if the step was repeated
    """

    layer: str | None = None
    kind: str = ""
    inputs_are_finite: bool = True
    weights_are_finite: bool = True
    operations: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join([self._describe_layer(), *self.operations])

    def _describe_layer(self) -> str:
        if self.layer is None:
            return "The outputs of all layers are finite."
        text = f"The first layer with a non-finite output is {self.layer or 'the model itself'} ({self.kind})"
        are_finite = {"inputs": self.inputs_are_finite, "weights": self.weights_are_finite}
        causes = " and its ".join(name for name, is_finite in are_finite.items() if not is_finite)
        return f"{text}; its {causes} are not finite either." if causes else f"{text}."


class _Call(NamedTuple):
    """A forward pass of a module, with flags that stay on the device."""

    name: str
    module: nn.Module
    inputs_are_finite: torch.Tensor
    output_is_finite: torch.Tensor


class NaNReportCallback(TrainerCallback):
    """Report where a loss or gradient that is infinite or NaN comes from, before the weights change, and end the run.

    The error names the first layer with a non-finite output. A report (``.json``) also lists the samples of the
    accumulation window, the parameters with non-finite gradients, and the latest training state of the run. Each
    process writes its own. ``repeat()`` repeats the step from that state, in the same bits, and names the operation.

    This is a debugging tool: it looks at the outputs of all layers, reads the loss of every batch and the gradient norm
    of every update from the device, and makes compiled models run uncompiled.

    Args:
        directory: where reports are written
        check_gradients: check gradients as well as losses; ignored with a gradient scaler (fp16), which finds its scale
            by letting gradients overflow

    Attributes:
        report: path of this process's report, ``None`` if everything was finite
    """

    affects_training = False

    def __init__(self, directory: str | os.PathLike[str] = "nan_reports", check_gradients: bool = True) -> None:
        self.directory = folder_path("directory", directory)
        self.check_gradients = check_gradients
        self.report: Path | None = None
        self._hooks = ExitStack()
        self._repetition: _Repetition | None = None
        self._clear()

    @classmethod
    def repeat(cls, trainer: TrainerLike, report: str | os.PathLike[str], *args: Any, **kwargs: Any) -> NonFinite:
        """Repeat the step of a report, and find the operation in which the first number is not finite.

        Resumes from the latest training state before it, trains up to the step, watches all operations of its
        accumulation window, and ends the run there. The weights, the samples and the random numbers are those of the
        run, bit by bit. Without a state, trains from the start, which needs a seed and a trainer that has not trained.
        The callbacks of the trainer do everything again, such as saving. Call it on every process.

        Args:
            trainer: created as for the run, with a callback of this class
            report: path of the report
            args: the arguments of ``Trainer.train()``, as for the run

        Returns:
            where the numbers stopped being finite, on any process; also printed

        Raises:
            ValueError: if the step cannot be repeated, or if the trainer has no callback of this class
        """
        repeated = _Repetition(json.loads(Path(report).read_text()))
        callback = next((callback for callback in trainer.callback_handler if isinstance(callback, cls)), None)
        if callback is None:
            raise ValueError(f"trainer has no {cls.__name__}. Create it as for the run of {os.fspath(report)!r}.")
        if repeated.state is None and (trainer.progress.step or not repeated.has_seed):
            raise ValueError(
                f"report={os.fspath(report)!r} is of a run that saved no training states"
                + (", and the trainer has trained since. Create another" if repeated.has_seed else " and had no seed")
                + ". To repeat a step, give the run a SaveTrainingStateCallback(save_every=...)."
            )
        callback._repetition, error = repeated, None  # noqa: SLF001
        try:
            trainer.train(*args, **{**kwargs, "resume_from": repeated.state})
        except NonFiniteLossError as raised:
            error = raised
        finally:
            callback._repetition = None  # noqa: SLF001
        by_rank = [found for found in trainer.all_gather_object(repeated.found) if found is not None]
        if error is not None and not by_rank and not repeated.is_reached:
            raise error
        first = min(by_rank, key=lambda found: found.step, default=None)
        if first is not None and first.step < (repeated.epoch, repeated.first) and repeated.state is not None:
            return cls.repeat(trainer, first.report, *args, **kwargs)  # it made the weights of the report non-finite
        origin = NonFinite() if first is None else first.origin
        trainer.print(f"{repeated.name.capitalize()} was repeated. {origin}")
        return origin

    def _clear(self) -> None:
        self._window: list[
            tuple[list[Index] | None, list[_Call]]
        ] = []  # indices of the samples and calls, by batch or part of one
        self._num_before = 0  # length of the window before the current step
        self._parts = 1  # parts that the current batch is split into
        self._calls: list[_Call] | None = None  # of the current forward pass; None outside of steps

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        self.report = None
        self._clear()
        self._hooks.enter_context(torch.compiler.set_stance("force_eager"))  # compiled code does not call hooks
        model = trainer.get_model(keep_torch_compile=False)
        if self._repetition is not None:
            self._repetition.watch = OperationWatch(model, self._hooks)
        for name, module in model.named_modules():
            self._hooks.callback(module.register_forward_hook(partial(self._record, name)).remove)

    def _record(self, name: str, module: nn.Module, inputs: Tree, output: Tree) -> None:
        if self._calls is not None:
            self._calls.append(_Call(name, module, are_finite(inputs), are_finite(output)))

    def on_train_step_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._num_before = len(self._window)
        self._parts = trainer.run.training_step.num_microbatches
        self._calls = []
        if self._repetition is not None:
            self._repetition.begin_step(trainer)

    def on_backward_start(
        self, trainer: TrainerLike, batch: BatchData, batch_output: BatchOutput, **kwargs: object
    ) -> None:
        if trainer.run.training_step.num_microbatches != self._parts:  # an attempt with larger parts was rolled back
            self._parts = trainer.run.training_step.num_microbatches
            del self._window[self._num_before :]
        self._window.append((trainer.run.batch_indices, self._calls or []))
        self._calls = []
        if self._repetition is not None:
            self._repetition.begin_backward()
        loss = mean_that_counts(batch_output["loss"].detach(), batch_output.get("num_items_in_batch", 1))
        if self.report is None and not torch.isfinite(torch.as_tensor(loss)).item():
            self._write(trainer, "loss")

    def on_train_step_end(self, trainer: TrainerLike, *args: object, **kwargs: object) -> None:
        self._calls = None
        if self._repetition is not None:
            self._repetition.end_step(trainer)

    def on_optimizer_step_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        if self._repetition is not None:
            self._repetition.stop_watching()
        if self.check_gradients and trainer.accelerator.scaler is None:
            is_finite = math.isfinite(to_float(total_norm(trainer).detach()))
            # The norm is the same on all processes, but the cause may be the loss of one.
            if not is_finite and not any(trainer.all_gather_object(self.report is not None)):
                self._write(trainer, "gradient")

    def on_optimizer_step_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._window = []

    def on_train_batch_skipped(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._calls = None
        del self._window[self._num_before :]

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        if self._repetition is not None:
            self._repetition.stop_watching()
        self._hooks.close()
        self._clear()

    on_exception = on_training_run_end

    def _write(self, trainer: TrainerLike, what: str) -> None:
        progress, rank = trainer.progress, trainer.ranks.rank
        origin = _find_origin([call for _, calls in self._window for call in calls])
        self.report = self.directory / f"epoch-{progress.epoch}-step-{progress.step}-rank-{rank}.json"
        if self._repetition is not None:
            self._repetition.note(_Found((progress.epoch, progress.step), self.report, origin))
        gradients = [
            name
            for name, parameter in trainer.get_model(keep_torch_compile=False).named_parameters()
            if parameter.grad is not None and not are_finite(parameter.grad)
        ]
        summary = {
            "not_finite": what,
            "epoch": progress.epoch,
            "step": progress.step,
            "update": progress.update,
            "rank": rank,
            "indices": [indices for indices, _ in self._window],
            "origin": asdict(origin),
            "state": next((os.fspath(state) for state in _saved_states(trainer)), None),
            "has_seed": trainer.run.data.seed is not None,
            "parameters_with_such_gradients": gradients,
        }
        write_text(self.report, json.dumps(summary, indent=2, default=str) + "\n")
        raise NonFiniteLossError(
            f"A {what} is not finite in epoch {progress.epoch}, step {progress.step}. {origin} Report written to "
            f"{os.fspath(self.report)!r}. {_how_to_repeat(self.report, summary)}"
        )


def _saved_states(trainer: TrainerLike) -> Iterator[StrPath]:
    """Yield the newest training state of each callback that saves them."""
    for source in trainer.run.request.state_sources:
        if (state := getattr(source, "latest_saved", None)) is not None:
            yield state


def _how_to_repeat(report: Path, summary: JsonObject) -> str:
    if summary["state"] is None and not summary["has_seed"]:
        return (
            "The step cannot be repeated, as the run has saved no training states and has no seed. Give it a "
            "SaveTrainingStateCallback(save_every=...)."
        )
    start = "the start of the run" if summary["state"] is None else repr(summary["state"])
    return (
        f"To repeat the step and see the operation, call NaNReportCallback.repeat(trainer, {os.fspath(report)!r}, ...) "
        f"with the arguments of train(). It begins at {start}."
    )


class _StepIsOverError(NonFiniteLossError):
    """A step was repeated, and all was finite."""


class _Found(NamedTuple):
    """The result of a repeated step on a process: the epoch and step, its report, and the origin."""

    step: tuple[int, int]
    report: Path
    origin: NonFinite


class _Repetition:
    """A step that is repeated.

    Args:
        summary: the summary of the failed step, as its file has it

    Attributes:
        state: the training state from which the run resumes
        has_seed: whether the failed run had a seed
        epoch: number of the epoch
        last: number, in the epoch, of the step that failed
        first: number of the first step of the accumulation window
        name: the step that failed, as messages show it
        is_reached: whether the step, or the accumulation window that it ends, has begun
        found: the first step of this process with a number that is not finite
        watch: notes the operations of the repeated step; ``None`` before the model is known
    """

    def __init__(self, summary: JsonObject) -> None:
        self.state: str | None = summary["state"]
        self.has_seed: bool = summary["has_seed"]
        self.epoch, self.last = summary["epoch"], summary["step"]
        self.first = self.last - len(summary["indices"]) + 1
        self.name = f"step {self.last} of epoch {self.epoch}"
        self.is_reached = False
        self.found: _Found | None = None
        self.watch: OperationWatch | None = None
        self._watching = ExitStack()

    def begin_step(self, trainer: TrainerLike) -> None:
        progress = trainer.progress
        if progress.epoch == self.epoch and self.first <= progress.step <= self.last and self.watch is not None:
            self.is_reached = True
            self.stop_watching()  # an attempt that has failed
            self.watch.begin()
            self._watching.enter_context(self.watch)

    def begin_backward(self) -> None:
        if self.is_reached and self.watch is not None:
            self.watch.watch_backward()

    def end_step(self, trainer: TrainerLike) -> None:
        """End the run after the step, unless its update has done so."""
        self.stop_watching()
        if self.is_reached and (trainer.progress.epoch, trainer.progress.step) > (self.epoch, self.last):
            raise _StepIsOverError(f"All numbers in {self.name} were finite when it was repeated.")

    def stop_watching(self) -> None:
        self._watching.close()

    def note(self, found: _Found) -> None:
        if self.watch is not None:
            found.origin.operations = tuple(self.watch.found.values())
        self.found = found


def _find_origin(calls: list[_Call]) -> NonFinite:
    for name, module, inputs_are_finite, output_is_finite in calls:
        if not output_is_finite:
            weights = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            return NonFinite(name, type(module).__name__, bool(inputs_are_finite), bool(are_finite(weights)))
    return NonFinite()
