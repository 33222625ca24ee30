"""Checks of a step as a whole: whether it runs, its modes and random numbers in evaluation, mixed precision."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from pytorch_accel_lite.extension_tools.arguments_and_errors import describe_error
from pytorch_accel_lite.extension_tools.data_and_batches import infer_batch_size, is_single_sample
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import all_registered_objects
from pytorch_accel_lite.extension_tools.runs_and_steps import replaced
from pytorch_accel_lite.extensions.checking.probe import (
    TOLERANCE,
    Finding,
    NotApplicableError,
    Probe,
    Watch,
    distance,
    doubt,
    largest_difference,
    mistake,
    remark,
)
from pytorch_accel_lite.finetuning import stays_in_eval
from pytorch_accel_lite.utils import listed


def check_runs(probe: Probe) -> Iterator[Finding]:
    """Make an update, which calls your own callbacks, and evaluate a batch.

    An error on the first batch would end the run.

    Correct the step, the model or the data. A loss that is not finite may come from a logarithm or a square root of 0,
    a division by 0, a mean over nothing, or NaN in the data.
    """
    phase = "training"
    try:
        with probe.training() as update:
            loss = update(probe.batch).loss
        if not math.isfinite(loss):
            yield mistake(f"The loss of the first training batch is {loss}.")
        phase = "evaluation"
        if probe.run.data.eval_loader is not None:
            probe.evaluate(probe.eval_batch)
    except Exception as error:
        yield mistake(f"The {phase} step raised {describe_error(error)}")
    loader = probe.run.data.required_train_loader
    gives_items = getattr(loader, "batch_size", 1) is None and getattr(loader, "batch_sampler", 1) is None
    if gives_items and is_single_sample(probe.batch.data):
        yield doubt(
            "The DataLoader has batch_size=None: it takes each item of the dataset for a whole batch. The first looks "
            f"like a single sample, whose {infer_batch_size(probe.batch.data)} features would be counted as samples.",
            "Pass batch_size=1 or more, which puts samples together, or let each item be a batch.",
        )
    for name, text in probe.failed_callbacks.items():
        yield remark(f"{name} could not be tried outside of a run: {text}")


def check_determinism(probe: Probe) -> Iterator[Finding]:
    """Evaluate a batch twice with different random numbers, and after another batch; look at which modules are active.

    An evaluation with dropout, or with the batch statistics of batch norm, is worse than the model and never the same.
    """
    batch = probe.eval_batch
    first, second = probe.evaluate(batch), probe.evaluate(batch, seed=1)
    findings = list(_look_at_modes(probe, first.watch))
    dropouts, drawn = listed(set(first.watch.dropouts)), listed(set(first.watch.drawn_by_model))
    if dropouts and not findings:
        advice = "Pass training=self.training to dropout, dropout_p=p if self.training else 0.0 to attention."
        findings.append(mistake(f"Dropout is active in evaluation ({dropouts}).", advice))
    yield from findings
    off, off_after = largest_difference(first.numbers, second.numbers), probe.change_after_another_batch
    is_classifier = any(call.name == "cross_entropy" for call in first.watch.losses)
    if off > TOLERANCE and not (drawn and is_classifier):
        raise NotApplicableError("The evaluation draws random numbers of its own, as those of generative models do.")
    if off > TOLERANCE:
        text = f"Two evaluations of a batch differ by {off:.1%} of the largest output; the model draws {drawn}."
        yield doubt(text, "Draw noise only if self.training.", difference=off)
    elif off_after > TOLERANCE and all_registered_objects(probe.trainer):
        raise NotApplicableError("The program registers a state, which it carries from each batch to the next.")
    elif off_after > TOLERANCE and not findings:
        text = f"Evaluated after another batch, outputs differ by {off_after:.1%} of the largest: a state is kept."
        yield doubt(text, "Reset it in forward(), unless batches continue each other.", difference=off_after)


def _look_at_modes(probe: Probe, evaluation: Watch) -> Iterator[Finding]:
    """Look for dropout and batch norm in the wrong mode when they are called, and after a step."""
    parts = {n: p for n, p in probe.modules.items() if isinstance(p, (_DropoutNd, _BatchNorm)) and not stays_in_eval(p)}
    parts = {name: part for name, part in parts.items() if getattr(part, "p", 1.0)}
    with probe.training() as update:
        before = {name: part.training for name, part in parts.items()}
        modes = update(probe.batch).watch.modes
        changed = [name for name, part in parts.items() if part.training != before[name]]
    used = [name for name in parts if name in modes]
    active = [name for name in parts if evaluation.modes.get(name)]
    if used and not any(modes[name] for name in used):
        text = f"The model trains in evaluation mode, in which {listed(used)} have no effect."
        yield doubt(text, "Let train_epoch_start() call super().train_epoch_start(), or model.train().", modules=used)
    if changed:
        advice = "Call model.train() after an evaluation within the step, or use trainer.evaluate()."
        yield mistake(f"A training step leaves {listed(changed)} in another mode than before.", advice, modules=changed)
    if active:
        advice = "Let eval_epoch_start() call super().eval_epoch_start(), and no forward() call train()."
        yield mistake(f"In an evaluation, these are in training mode: {listed(active)}.", advice, modules=active)


def check_precision(probe: Probe) -> Iterator[Finding]:
    """Compare the loss and the gradients in mixed precision with those in float32, and look for float16 parameters.

    Numbers that overflow or lose their digits make training bad or impossible.

    Keep the weights in float32. Use bf16, or compute sensitive operations, such as sums, exponentials and norms, in
    float32: with torch.autocast(..., enabled=False).
    """
    accelerator, model = probe.trainer.accelerator, probe.trainer.get_model()
    halves = [name for parameter, name in probe.optimized.items() if parameter.dtype is torch.float16]
    if halves:
        yield mistake(f"{listed(halves)} are float16, in which most updates are rounded to 0.", parameters=halves)
        return
    if not accelerator.native_amp:
        raise NotApplicableError("The program does not use mixed precision.")
    mixed = probe.train(probe.batch, quiet=True, gradients=True)
    original = getattr(model, "_original_forward", model.forward)  # Accelerate has wrapped the forward pass
    with replaced(accelerator, native_amp=False), replaced(model, forward=original):
        full = probe.train(probe.batch, quiet=True, gradients=True)
    off = distance(full.gradients, mixed.gradients)
    is_infinite = not math.isfinite(mixed.loss) or not math.isfinite(off)
    if math.isfinite(full.loss) and (is_infinite or off > 0.5):
        losses = mixed.loss, full.loss
        text = f"The loss is {losses[0]:.4g}, and {losses[1]:.4g} in float32; gradients differ by {off:.0%}."
        yield (mistake if is_infinite and accelerator.scaler is None else doubt)(text, losses=losses, gradients=off)
