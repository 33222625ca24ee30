"""Checks of losses: shapes, means, what loss functions are given, and precision."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from pytorch_accel_lite.base.batches import Batch, tensors_in
from pytorch_accel_lite.base.loss_shapes import LossShapeError
from pytorch_accel_lite.tuning.probing import (
    Finding,
    LossCall,
    NotApplicableError,
    Pass,
    Probe,
    distance,
    listed,
    select,
)

_OF_EACH_ELEMENT = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div")


def check_broadcast(probe: Probe) -> Iterator[Finding]:
    """Compute the loss of a training batch and note the shapes of what it compares.

    Outputs of shape (N, 1) and targets of shape (N,) are broadcast to (N, N): each output is compared with the targets
    of all samples, and the model learns their mean.
    """
    batch = probe.batch
    size = batch.num_samples or 0
    try:
        found = probe.train(batch)
    except LossShapeError as error:
        yield Finding(str(error), "Make the shapes equal.")
        return
    for call in found.watch.losses:
        outputs, targets = tuple(call.outputs.shape), tuple(call.targets.shape)
        if call.name not in _OF_EACH_ELEMENT or outputs == targets or call.targets.numel() == 1:
            continue
        both = np.broadcast_shapes(outputs, targets)
        yield Finding(
            f"{call.name} broadcasts outputs of shape {outputs} and targets of shape {targets} to {both}.",
            "Make the shapes equal, for example with targets.unsqueeze(1) or outputs.squeeze(1).",
            fails=both not in (outputs, targets),
            details={"outputs": outputs, "targets": targets},
        )
    outer = [shapes for shapes in found.watch.outer if shapes[0][0] == size]
    # A layer that is as wide as the batch is large is no mistake.
    if outer and size > 2 and probe.train(select(probe.require_samples(batch), range(size - 1))).watch.outer:
        first, second = outer[0]
        yield Finding(
            f"The step combines values of shapes {first} and {second}, which gives {size} x {size} numbers: those of "
            "each sample with every other.",
            "Make the shapes equal, with .squeeze(1) or .unsqueeze(1).",
            details={"shapes": outer[0]},
        )


def check_mean_loss(probe: Probe) -> Iterator[Finding]:
    """Compute loss and gradients of a batch, of the batch two and three times, and of its halves, without dropout.

    The trainer takes a loss for a mean. With a sum, batch size, accumulation and processes change the training.
    """
    batch = probe.require_samples(probe.batch, 4)
    rows = range(batch.num_samples or 0)
    once, twice, thrice = (probe.train(select(batch, [*rows] * times), "quiet", gradients=True) for times in (1, 2, 3))
    if abs(probe.train(batch, "quiet", seed=1).number - once.number) > 1e-6 * abs(once.number):
        raise NotApplicableError("The loss draws random numbers.")
    grown = twice.number - once.number
    if abs(grown) > 1e-2 * abs(once.number):
        message = ""
        if abs(thrice.number - twice.number - grown) < 1e-2 * abs(grown):
            message = "is a sum over the batch"
        elif max(abs(2 * twice.number - once.number), abs(3 * thrice.number - once.number)) < 1e-3 * abs(once.number):
            message = "is divided by the batch size once too often"
        if message:
            yield Finding(
                f"The loss of a batch is {once.number:.6g}; with each sample twice, {twice.number:.6g}: it {message}.",
                "Take the mean over the batch: reduction='mean', and no further division.",
                details={"losses": (once.number, twice.number, thrice.number)},
            )
            return
    if distance(twice.gradients, once.gradients) > 1e-2:
        raise NotApplicableError("The loss compares the samples of a batch with each other, as contrastive losses do.")
    yield from _compare_halves(probe, batch, once)


def _compare_halves(probe: Probe, batch: Batch, whole: Pass) -> Iterator[Finding]:
    size = batch.num_samples or 0
    parts = [select(batch, range(size // 2)), select(batch, range(size // 2, size))]
    passes = [probe.train(part, "quiet", gradients=True) for part in parts]
    off = distance(whole.gradients, _mean_of(passes, _weights(parts, passes)))
    if off < 1e-2:
        return
    counts = {
        "targets that are not ignored": [_count_targets(found) for found in passes],
        "elements that are not 0": [_count_elements(part) for part in parts],
    }
    for what, items in counts.items():
        if all(items) and distance(whole.gradients, _mean_of(passes, items)) < 1e-2:
            yield Finding(
                f"The gradients of a batch differ by {off:.0%} from those of its halves: the loss is a mean over "
                f"{what}, of which the halves have {items[0]} and {items[1]}.",
                "Return their number as num_items_in_batch, so that accumulation and several processes give each the "
                "same weight.",
                fails=False,
                details={"difference": off, "items": items},
            )
            return
    raise NotApplicableError(
        "The loss of a batch is not the mean of those of its halves: it compares samples, or gives them weights."
    )


def _count_targets(found: Pass) -> int:
    calls = [call for call in found.watch.losses if call.name == "cross_entropy"]
    return sum(int(call.targets.ne(call.ignored).sum()) for call in calls)


def _count_elements(part: Batch) -> int:
    tensors = [tensor for tensor in tensors_in([part.data]) if not tensor.is_floating_point() and tensor.ndim > 1]
    return min((int(tensor.ne(0).sum()) for tensor in tensors), default=0)


def _weights(parts: Sequence[Batch], passes: Sequence[Pass]) -> list[float]:
    """Return the weights that the trainer gives to micro-batches, and to the batches of processes."""
    counts = [found.output.get("num_items_in_batch") for found in passes]
    return [float(p.num_samples or 0 if n is None else n) for p, n in zip(parts, counts, strict=True)]


def _mean_of(passes: Sequence[Pass], weights: Sequence[float]) -> dict[str, torch.Tensor]:
    """Return the weighted mean of gradients."""
    mean: dict[str, torch.Tensor] = {}
    for found, weight in zip(passes, weights, strict=True):
        for name, gradient in found.gradients.items():
            weighted = gradient * (weight / (sum(weights) or 1.0))
            mean[name] = mean[name] + weighted if name in mean else weighted
    return mean


def check_processes(probe: Probe) -> Iterator[Finding]:
    """Compare the gradients of a batch with those of its shares on two processes, weighted as the trainer does.

    Otherwise the number of processes changes the training.
    """
    batch = probe.require_samples(probe.batch, 4)
    size = batch.num_samples or 0
    whole = probe.train(batch, "quiet", gradients=True)
    whole.refuse_randomness()
    parts = [select(batch, range(first, size, 2)) for first in (0, 1)]
    passes = [probe.train(part, "quiet", gradients=True) for part in parts]
    off = distance(whole.gradients, _mean_of(passes, _weights(parts, passes)))
    if off > 1e-2:
        raise NotApplicableError(
            f"The gradients of two processes differ by {off:.0%} from those of one: the loss is no mean over samples."
        )
    yield from ()


def check_initial_loss(probe: Probe) -> Iterator[Finding]:
    """Look at the first loss, and at the outputs that torch's loss functions are given.

    A new classifier knows nothing: its cross-entropy is about ln(classes). Probabilities where a loss function expects
    logits, or the reverse, slow learning down or prevent it.
    """
    found = probe.train(probe.batch)
    if not found.watch.losses:
        raise NotApplicableError("The step calls no loss function of torch.")
    for call in found.watch.losses:
        yield from _look_at_loss(call)


def _look_at_loss(call: LossCall) -> Iterator[Finding]:
    outputs = call.outputs.float()
    if not outputs.numel():
        return
    has_classes = outputs.ndim > 1 and outputs.shape[1] > 1
    sums = outputs.sum(1) if has_classes else outputs
    are_probabilities = has_classes and bool((outputs >= 0).all()) and bool((sums - 1).abs().max() < 1e-3)
    if call.name == "cross_entropy" and are_probabilities:
        yield Finding(
            "cross_entropy is given probabilities, which sum to 1, and applies a softmax to them again.",
            "Give it logits: remove the softmax from the model.",
        )
    elif call.name == "kl_div" and are_probabilities:
        yield Finding("kl_div is given probabilities in place of their logarithms.", "Give it log_softmax(outputs, 1).")
    elif call.name == "nll_loss" and has_classes and bool((outputs.exp().sum(1) - 1).abs().max() > 1e-2):
        yield Finding(
            f"nll_loss is given {'probabilities' if are_probabilities else 'values'} in place of their logarithms.",
            "Give it log_softmax(outputs, 1), or use cross_entropy with the logits.",
        )
    elif call.name == "binary_cross_entropy_with_logits" and call.made_by.startswith(("Sigmoid", "Softmax")):
        yield Finding(
            f"binary_cross_entropy_with_logits is given the results of a {call.made_by[:7].lower()}, and applies a "
            "sigmoid to them again.",
            "Give it logits: remove it from the model.",
        )
    elif call.name in ("cross_entropy", "binary_cross_entropy_with_logits"):
        yield from _look_at_size(call, outputs)
    elif call.name in _OF_EACH_ELEMENT:
        yield from _look_at_range(call)


def _look_at_size(call: LossCall, outputs: torch.Tensor) -> Iterator[Finding]:
    """Compare a cross-entropy with that of a model that knows nothing. A smaller one is that of a trained model."""
    classes = outputs.shape[1] if call.name == "cross_entropy" and outputs.ndim > 1 else 2
    try:
        if call.name == "cross_entropy":
            loss = float(cross_entropy(outputs, call.targets, ignore_index=call.ignored))
        else:
            loss = float(binary_cross_entropy_with_logits(outputs, call.targets.float()))
    except (RuntimeError, IndexError, ValueError):  # the check of the data tells
        return
    usual = math.log(max(classes, 2))
    if loss > 1.5 * usual + 1:
        yield Finding(
            f"The first {call.name} is {loss:.4g}; that of a model that knows nothing is ln({max(classes, 2)}) = "
            f"{usual:.3g}.",
            "Look at the scale of the inputs, and of the initial weights of the last layer.",
            fails=False,
            details={"loss": loss, "usual": usual},
        )


def _look_at_range(call: LossCall) -> Iterator[Finding]:
    """Look for targets that the last activation cannot reach."""
    ranges = {"Relu": (0.0, math.inf), "Sigmoid": (0.0, 1.0), "Tanh": (-1.0, 1.0), "Softmax": (0.0, 1.0)}
    limits = next((limits for name, limits in ranges.items() if call.made_by.startswith(name)), None)
    if limits is None or not call.targets.numel():
        return
    low, high = float(call.targets.min()), float(call.targets.max())
    margin = 1e-3 + 0.02 * (high - low)
    if low < limits[0] - margin or high > limits[1] + margin:
        yield Finding(
            f"Targets range from {low:.3g} to {high:.3g}, but the model's last function is a "
            f"{call.made_by.partition('Backward')[0].lower()}, whose values lie in {list(limits)}.",
            "Remove the last activation, or scale the targets.",
            details={"targets": (low, high), "outputs": limits},
        )


def check_precision(probe: Probe) -> Iterator[Finding]:
    """Compare the loss and the gradients in mixed precision with those in float32, and look for float16 parameters.

    What overflows or loses its digits trains badly or not at all.
    """
    trainer = probe.trainer
    halves = [name for parameter, name in probe.optimized.items() if parameter.dtype is torch.float16]
    if halves:
        yield Finding(
            f"{listed(halves)} are float16, in which most updates are rounded to 0.",
            "Keep the weights in float32, and use Accelerator(mixed_precision='bf16') or 'fp16'.",
            details={"parameters": halves},
        )
        return
    if not trainer.accelerator.native_amp:
        raise NotApplicableError("The program does not use mixed precision.")
    mixed = probe.train(probe.batch, "quiet", gradients=True)
    with probe.without_mixed_precision():
        full = probe.train(probe.batch, "quiet", gradients=True)
    infinite = [name for name, gradient in mixed.gradients.items() if not bool(gradient.isfinite().all())]
    if (infinite or not math.isfinite(mixed.number)) and math.isfinite(full.number):
        yield Finding(
            f"The loss is {mixed.number:.4g} in mixed precision and {full.number:.4g} in float32; {len(infinite)} "
            "gradients overflow.",
            "Use bf16, or compute what overflows in float32: with torch.autocast(..., enabled=False).",
            fails=trainer.accelerator.scaler is None,
            details={"parameters": infinite},
        )
        return
    off = abs(mixed.number - full.number) / max(abs(full.number), 1e-3)
    off_gradients = distance(full.gradients, mixed.gradients)
    if off > 0.1 or off_gradients > 0.5:
        yield Finding(
            f"In mixed precision the loss is {mixed.number:.4g}, in float32 {full.number:.4g}; gradients differ by "
            f"{off_gradients:.0%}.",
            "Compute what is sensitive, such as sums, exponentials and norms, in float32: with torch.autocast(..., "
            "enabled=False).",
            fails=False,
            details={"losses": (mixed.number, full.number), "gradients": off_gradients},
        )
