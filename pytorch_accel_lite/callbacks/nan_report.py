"""Reporting where a loss or gradient that is not finite comes from."""

from __future__ import annotations

import json
import math
import os
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import recursively_apply
from torch import nn
from torch.distributed.tensor import DTensor

from pytorch_accel_lite.base.devices import to_float
from pytorch_accel_lite.base.events import NonFiniteLossError, TrainerCallback
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.optimizers.gradients import total_norm


@dataclass
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


class _Call(NamedTuple):
    """A forward pass of a module, with flags that stay on the device."""

    name: str
    module: nn.Module
    inputs_are_finite: torch.Tensor
    output_is_finite: torch.Tensor


class NaNReportCallback(TrainerCallback):
    """Report where a loss or gradient that is infinite or NaN comes from, before the weights change, and end the run.

    The error names the first layer with a non-finite output. A report (``.json``) also lists the samples of the
    accumulation window, and the parameters with non-finite gradients. Each process writes its own. To run the step
    again, resume from a training state before it, which gives the same bits.

    This is a debugging tool: it looks at the outputs of all layers, reads the loss of every batch and the gradient norm
    of every update from the device, and makes compiled models run uncompiled.

    :param directory: where reports are written
    :param check_gradients: check gradients as well as losses; ignored with a gradient scaler (fp16), which finds its
        scale by letting gradients overflow
    :ivar report: path of this process's report, ``None`` if everything was finite
    """

    def __init__(self, directory: str | os.PathLike[str] = "nan_reports", check_gradients: bool = True) -> None:
        self.directory = Path(directory)
        self.check_gradients = check_gradients
        self.report: Path | None = None
        self._hooks = ExitStack()
        self._clear()

    def _clear(self) -> None:
        self._window: list[tuple[Any, list[_Call]]] = []  # indices of the samples and calls, by batch or part of one
        self._done = 0  # of them, those before the current step
        self._parts = 1  # parts that the current batch is split into
        self._calls: list[_Call] | None = None  # of the current forward pass; None outside of steps

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self.report = None
        self._clear()
        self._hooks.enter_context(torch.compiler.set_stance("force_eager"))  # compiled code does not call hooks
        for name, module in trainer.get_model(keep_torch_compile=False).named_modules():
            self._hooks.callback(module.register_forward_hook(partial(self._look, name)).remove)

    def _look(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._calls is not None:
            self._calls.append(_Call(name, module, _are_finite(inputs), _are_finite(output)))

    def on_train_step_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._done = len(self._window)
        self._parts = trainer.current_run.step.num_microbatches
        self._calls = []

    def on_backward_start(self, trainer: TrainerLike, batch: Any, batch_output: dict[str, Any], **kwargs: Any) -> None:
        if trainer.current_run.step.num_microbatches != self._parts:  # an attempt with larger parts was rolled back
            self._parts = trainer.current_run.step.num_microbatches
            del self._window[self._done :]
        self._window.append((trainer.current_run.batch_indices, self._calls or []))
        self._calls = []
        if self.report is None and not math.isfinite(to_float(batch_output["loss"].detach())):
            self._write(trainer, "loss")

    def on_train_step_end(self, trainer: TrainerLike, *args: Any, **kwargs: Any) -> None:
        self._calls = None

    def on_optimizer_step_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if self.check_gradients and trainer.accelerator.scaler is None:
            is_finite = math.isfinite(to_float(total_norm(trainer).detach()))
            # The norm is the same on all processes; the cause may have been the loss of one of them.
            if not is_finite and not any(trainer.all_gather_object(self.report is not None)):
                self._write(trainer, "gradient")

    def on_optimizer_step_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._window = []

    def on_train_batch_skipped(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._calls = None
        del self._window[self._done :]

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._hooks.close()
        self._clear()

    on_exception = on_training_run_end

    def _write(self, trainer: TrainerLike, what: str) -> None:
        progress, rank = trainer.progress, trainer.ranks.rank
        origin = _origin([call for _, calls in self._window for call in calls])
        gradients = [
            name
            for name, parameter in trainer.get_model(keep_torch_compile=False).named_parameters()
            if parameter.grad is not None and not _are_finite(parameter.grad)
        ]
        summary = {
            "not_finite": what,
            "epoch": progress.epoch,
            "step": progress.step,
            "update": progress.update,
            "rank": rank,
            "indices": [indices for indices, _ in self._window],
            "origin": asdict(origin),
            "parameters_with_such_gradients": gradients,
        }
        self.directory.mkdir(parents=True, exist_ok=True)
        self.report = self.directory / f"epoch-{progress.epoch}-step-{progress.step}-rank-{rank}.json"
        self.report.write_text(json.dumps(summary, indent=2, default=str) + "\n")
        raise NonFiniteLossError(
            f"A {what} is not finite in epoch {progress.epoch}, step {progress.step}. {origin} Report written to "
            f"{os.fspath(self.report)!r}."
        )


def _origin(calls: list[_Call]) -> NonFinite:
    for name, module, inputs_are_finite, output_is_finite in calls:
        if not output_is_finite:
            weights = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            return NonFinite(name, type(module).__name__, bool(inputs_are_finite), bool(_are_finite(weights)))
    return NonFinite()


def _are_finite(value: Any) -> torch.Tensor:
    """Return whether all numbers in nested tensors are finite; of sharded ones, those of this process."""
    flags: list[torch.Tensor] = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.is_floating_point():
            flags.append(local.detach().isfinite().all())
        return tensor

    recursively_apply(look, value)
    return torch.stack(flags).all() if flags else torch.tensor(True)
