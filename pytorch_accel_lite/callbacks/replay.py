"""Replaying the step of a :class:`NaNReportCallback` report."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from accelerate.utils import send_to_device

from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.callbacks.nan_report import NonFinite, RecordedStep, find_non_finite, non_finite_gradients
from pytorch_accel_lite.checkpoint import fit_model_state, read_checkpoint
from pytorch_accel_lite.engine.lifecycle import computing
from pytorch_accel_lite.engine.trial import prepared_for_trial


@dataclass
class Replay:
    """The result of :func:`replay`.

    :param losses: the loss of each batch of the accumulation window
    :param origin: where numbers stopped being finite, in the first batch where they did
    :param gradients: names of the parameters whose gradients are not finite
    """

    losses: list[float]
    origin: NonFinite
    gradients: list[str] = field(default_factory=list)


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
        seen = Replay([], NonFinite())
        for step in report["steps"]:
            batch = send_to_device(step["batch"], trainer.device)
            loss, origin = find_non_finite(trainer, RecordedStep(step["generators"], batch), keep_buffers=False)
            seen.losses.append(float(loss.detach()))
            trainer.backward_step(loss / len(report["steps"]))
            if seen.origin.layer is None:
                seen.origin = origin
        seen.gradients = non_finite_gradients(model)
    return seen
