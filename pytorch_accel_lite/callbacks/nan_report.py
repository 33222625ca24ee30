"""Reporting a loss or gradient that is not finite, with all that is needed to reproduce it, and reproducing it."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import recursively_apply, send_to_device
from torch import nn

from pytorch_accel_lite.base.batches import total_loss
from pytorch_accel_lite.base.devices import mixed_precision, to_float
from pytorch_accel_lite.base.events import NonFiniteLossError, TrainerCallback
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.base.randomness import capture_generators, restore_generators
from pytorch_accel_lite.checkpoint import fit_model_state, model_state, read_checkpoint, write_checkpoint
from pytorch_accel_lite.engine.lifecycle import computing
from pytorch_accel_lite.engine.snapshot import Snapshot, replaced
from pytorch_accel_lite.engine.trial import prepared_for_trial
from pytorch_accel_lite.optimizers.gradients import total_norm


@dataclass(eq=False, repr=False)
class NonFinite:
    """Where numbers stopped being finite in a forward pass.

    :param layer: name of the first module whose output is not finite, ``None`` if all outputs are finite
    :param kind: class of that module
    :param inputs_are_finite: whether the module's inputs are finite
    :param weights_are_finite: whether the module's own parameters and buffers are finite
    """

    layer: str | None = None
    kind: str = ""
    inputs_are_finite: bool = True
    weights_are_finite: bool = True

    def __str__(self) -> str:
        if self.layer is None:
            return "The outputs of all layers are finite."
        where = f"The first layer with a non-finite output is {self.layer or 'the model itself'} ({self.kind})"
        are_finite = {"inputs": self.inputs_are_finite, "weights": self.weights_are_finite}
        causes = " and its ".join(name for name, is_finite in are_finite.items() if not is_finite)
        return f"{where}; its {causes} are not finite either." if causes else f"{where}."


@dataclass(eq=False, repr=False)
class RecordedStep:
    """A batch of the accumulation window, with the generators' states before its step."""

    generators: dict[str, Any]
    batch: Any = None
    indices: list[Any] | None = None


class NaNReportCallback(TrainerCallback):
    """Write a report if a loss or gradient is infinite or NaN, before the weights change, and end the run.

    The report contains the batches of the accumulation window with the indices of their samples, the states of the
    generators, the weights before the step and the name of the first layer with a non-finite output; :func:`replay`
    runs the step again. A human-readable summary (``.json``) is written next to it. Each process writes its own.

    This is a debugging tool: it reads the loss of every batch and the gradient norm of every update from the device,
    and keeps a copy of the buffers.

    :param directory: where reports are written
    :param check_gradients: check gradients as well as losses; ignored with a gradient scaler (fp16), which finds its
        scale by letting gradients overflow
    :ivar report: path of this process's report, ``None`` if everything was finite
    """

    def __init__(self, directory: str | os.PathLike[str] = "nan_reports", check_gradients: bool = True) -> None:
        self.directory = Path(directory)
        self.check_gradients = check_gradients
        self._clear()

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._clear()

    def _clear(self) -> None:
        self.report: Path | None = None
        self._window: list[RecordedStep] = []
        self._done = 0  # recorded steps of the window before the current one
        self._parts = 1  # parts that the current batch is split into
        self._buffers: dict[str, torch.Tensor] = {}

    def on_train_step_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if not self._window:
            self._buffers = {name: buffer.clone() for name, buffer in trainer.get_model().named_buffers()}
        self._done = len(self._window)
        self._parts = trainer.current_run.step.num_microbatches
        self._window.append(RecordedStep(capture_generators()))

    def on_backward_start(self, trainer: TrainerLike, batch: Any, batch_output: dict[str, Any], **kwargs: Any) -> None:
        if trainer.current_run.step.num_microbatches != self._parts:  # an attempt with larger parts was rolled back
            self._parts = trainer.current_run.step.num_microbatches
            del self._window[self._done + 1 :]
        step = self._window[-1]
        step.batch = batch
        step.indices = trainer.current_run.batch_indices
        if trainer.logical is not None:
            step.generators = trainer.logical.generators_of(trainer.current_run.batch)
        loss = batch_output["loss"].detach()
        if self.report is None and not math.isfinite(to_float(loss)):
            self._write(trainer, "loss")

    def on_backward_end(self, trainer: TrainerLike, *args: Any, **kwargs: Any) -> None:
        # Another part of the batch may follow, or the share of another logical process.
        if trainer.current_run.step.num_microbatches > 1 or trainer.logical is not None:
            self._window.append(RecordedStep(capture_generators()))

    def on_optimizer_step_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if self.check_gradients and trainer.accelerator.scaler is None:
            norm = total_norm(trainer).detach()
            is_finite = math.isfinite(to_float(norm))
            # The norm is the same on all processes; the cause may have been the loss of one of them.
            if not is_finite and not any(trainer.all_gather_object(self.report is not None)):
                self._write(trainer, "gradient")

    def on_optimizer_step_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._window = []

    def on_train_batch_skipped(self, trainer: TrainerLike, **kwargs: Any) -> None:
        del self._window[self._done :]

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._window = []
        self._buffers = {}

    def _write(self, trainer: TrainerLike, what: str) -> None:
        progress = trainer.progress
        rank = trainer.ranks.rank
        model = trainer.get_model()
        window = [step for step in self._window if step.batch is not None]
        gradients = non_finite_gradients(model) if what == "gradient" else []
        origin = NonFinite()
        for step in window if not trainer.is_sharded else ():
            if origin.layer is None:
                origin = find_non_finite(trainer, step)[1]
        # Gathering sharded weights takes all processes, and not all of them are here.
        weights = {} if trainer.is_sharded else model_state(trainer.get_model(keep_torch_compile=False), keep=True)
        weights |= {name.replace("_orig_mod.", ""): buffer for name, buffer in self._buffers.items() if name in weights}
        name = f"epoch-{progress.epoch}-step-{progress.step}-rank-{rank}"
        summary = {
            "not_finite": what,
            "epoch": progress.epoch,
            "step": progress.step,
            "update": progress.update,
            "rank": rank,
            "indices": [step.indices for step in window],
            "origin": asdict(origin),
            "parameters_with_such_gradients": gradients,
        }
        steps = [{"batch": step.batch, "generators": step.generators} for step in window]
        modes = {name: module.training for name, module in model.named_modules()}
        self.report = self.directory / f"{name}.pt"
        write_checkpoint({"model_state_dict": weights, "steps": steps, "modes": modes, **summary}, self.report)
        self.report.with_suffix(".json").write_text(json.dumps(summary, indent=2, default=str) + "\n")
        raise NonFiniteLossError(
            f"A {what} is not finite in epoch {progress.epoch}, step {progress.step}. {origin} Report written to "
            f"{os.fspath(self.report)!r}; replay(path, trainer) runs the step again."
        )


def find_non_finite(
    trainer: TrainerLike, step: RecordedStep, keep_buffers: bool = True
) -> tuple[torch.Tensor, NonFinite]:
    """Repeat the forward pass of a step, on this process alone, and find where numbers stop being finite."""
    model = trainer.get_model()
    origin = NonFinite()
    names = {module: name for name, module in model.named_modules()}

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        if origin.layer is None and not _is_finite(output):
            tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            origin.layer = names[module]
            origin.kind = type(module).__name__
            origin.inputs_are_finite = _is_finite(inputs)
            origin.weights_are_finite = _is_finite(tensors)

    with Snapshot() as before:
        if keep_buffers:
            before.keep_buffers([model])
            before.keep_generators()
        for module in names:
            before.callback(module.register_forward_hook(look).remove)
        before.enter_context(replaced(trainer, model=model))
        restore_generators(step.generators)
        # Compiled code does not call hooks.
        with torch.compiler.set_stance("force_eager"), mixed_precision(trainer.accelerator):
            loss = total_loss(trainer.calculate_train_batch_loss(step.batch)["loss"])
    return loss, origin


def _is_finite(value: Any) -> bool:
    tensors: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    recursively_apply(collect, value)
    return all(bool(tensor.isfinite().all()) for tensor in tensors if tensor.is_floating_point())


def non_finite_gradients(model: nn.Module) -> list[str]:
    """Return the names of the parameters whose gradients are not finite."""
    return [name for name, p in model.named_parameters() if p.grad is not None and not _is_finite(p.grad)]


@dataclass(eq=False, repr=False)
class Replay:
    """The result of :func:`replay`.

    :param losses: the loss of each batch of the accumulation window
    :param origin: where numbers stopped being finite, in the first batch where they did
    :param gradients: names of the parameters whose gradients are not finite
    """

    losses: list[float]
    origin: NonFinite
    gradients: list[str]


def replay(path: str | os.PathLike[str], trainer: TrainerLike) -> Replay:
    """Reproduce the step of a report, forward and backward, and restore the trainer afterwards.

    To look closer, set a breakpoint in the model, or wrap the call in ``torch.autograd.detect_anomaly()``.

    :param path: a report written by :class:`NaNReportCallback`
    :param trainer: a trainer created as in the run that failed, outside a run
    :raises ValueError: if the file is not a report, or does not fit the trainer's model
    :raises RuntimeError: if the trainer is within a run
    """
    report = read_checkpoint(path)
    if "steps" not in report:
        raise ValueError(f"The file {os.fspath(path)!r} is not a NaNReportCallback report: it has no 'steps'.")
    if trainer.is_running:
        raise RuntimeError("replay() cannot be called within a run.")
    with computing(trainer), prepared_for_trial(trainer):
        model = trainer.get_model()
        model.load_state_dict(fit_model_state(model, report["model_state_dict"], path))
        for name, module in model.named_modules():
            module.training = report["modes"].get(name, module.training)
        seen = Replay([], NonFinite(), [])
        for step in report["steps"]:
            batch = send_to_device(step["batch"], trainer.device)
            loss, origin = find_non_finite(trainer, RecordedStep(step["generators"], batch), keep_buffers=False)
            seen.losses.append(float(loss.detach()))
            trainer.backward_step(loss / len(report["steps"]))
            if seen.origin.layer is None:
                seen.origin = origin
        seen.gradients = non_finite_gradients(model)
    return seen
