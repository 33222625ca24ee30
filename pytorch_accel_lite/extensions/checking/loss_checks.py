"""Checks of the loss: shapes that are broadcast, its first value, and whether it is a mean, also of processes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.nn import functional

from pytorch_accel_lite.data import Batch
from pytorch_accel_lite.extension_tools.data_and_batches import LossShapeError
from pytorch_accel_lite.extensions.checking.probe import (
    LOSSES_OF_ELEMENTS,
    TOLERANCE,
    Finding,
    LossCall,
    NotApplicableError,
    Pass,
    Probe,
    distance,
    doubt,
    mistake,
    select,
)


def check_broadcast(probe: Probe) -> Iterator[Finding]:
    """Make a training step and note the shapes of the tensors that it compares.

    Outputs of shape (N, 1) and targets of shape (N,) are broadcast to (N, N): each output is compared with the targets
    of all samples, and the model learns their mean.

    Make the shapes equal, for example with targets.unsqueeze(1) or outputs.squeeze(1).
    """
    size = probe.batch.num_samples or 0
    try:
        watch = probe.watch_step(probe.batch)
    except LossShapeError as error:
        yield mistake(str(error))
        return
    for call in watch.losses:
        shapes = outputs, targets = tuple(call.outputs.shape), tuple(call.targets.shape)
        if call.name in LOSSES_OF_ELEMENTS and outputs != targets and call.targets.numel() > 1:
            both = np.broadcast_shapes(outputs, targets)
            text = f"{call.name} broadcasts outputs of shape {outputs} and targets of shape {targets} to {both}."
            yield (doubt if both in shapes else mistake)(text, shapes=shapes)
    # A square of the batch size is no mistake if it comes from a layer whose width happens to be the batch size.
    if size > 2 and size in watch.squares and probe.watch_step(select(probe.batch, range(size - 1))).squares:
        shapes = (size, 1), (size,)
        text = f"The step combines values of shapes {shapes[0]} and {shapes[1]}: those of each sample with every other."
        yield mistake(text, shapes=shapes)


def check_initial_loss(probe: Probe) -> Iterator[Finding]:
    """Look at the first loss, and at the outputs that are passed to torch's loss functions.

    A new classifier knows nothing: its cross-entropy is about ln(classes). Probabilities where a loss function expects
    logits, or the reverse, slow learning down or prevent it.
    """
    calls = probe.watch_step(probe.batch).losses
    if not calls:
        raise NotApplicableError("The step calls no loss function of torch.")
    for call in calls:
        if call.outputs.numel() and call.targets.numel():
            yield from _look_at_loss(call)


#: The range of values of each function that may be the last of a model.
_RANGES = {"relu": (0.0, math.inf), "sigmoid": (0.0, 1.0), "tanh": (-1.0, 1.0), "softmax": (0.0, 1.0)}


def _look_at_loss(call: LossCall) -> Iterator[Finding]:
    name, last, outputs = call.name, call.activation, call.outputs.float()
    classes = outputs.shape[1] if outputs.ndim > 1 and name != "binary_cross_entropy_with_logits" else 1
    are_probabilities = classes > 1 and bool(((outputs.sum(1) - 1).abs() < 1e-3).all() and (outputs >= 0).all())
    are_logarithms = classes > 1 and bool(((outputs.exp().sum(1) - 1).abs() < 1e-2).all())
    takes_logits = name in ("cross_entropy", "binary_cross_entropy_with_logits")
    usual, mean = math.log(max(classes, 2)), 0.0  # the mean loss, without the program's own reduction or weights
    if name == "cross_entropy":
        mean = float(functional.cross_entropy(outputs, call.targets, ignore_index=call.ignored))
    elif takes_logits:
        mean = float(functional.binary_cross_entropy_with_logits(outputs, call.targets.float()))
    if takes_logits and (are_probabilities or (classes == 1 and last in ("sigmoid", "softmax"))):
        text = f"{name} is given probabilities, and applies a softmax or a sigmoid to them again."
        yield mistake(text, "Give it logits: remove the last function of the model.")
    elif takes_logits and mean > 4 * usual + 3:  # a small loss may be that of a trained model
        text = f"The first {name} is {mean:.4g}; that of a model that knows nothing is {usual:.3g}."
        advice = "Look at the scale of the inputs, and of the initial weights of the last layer."
        yield doubt(text, advice, loss=mean, usual=usual)
    elif (name == "kl_div" and are_probabilities) or (name == "nll_loss" and classes > 1 and not are_logarithms):
        text = f"{name} is given {'probabilities' if are_probabilities else 'values'} in place of their logarithms."
        yield mistake(text, "Give it log_softmax(outputs, 1), or use cross_entropy with the logits.")
    elif name in LOSSES_OF_ELEMENTS and last in _RANGES:
        (least, most), low, high = _RANGES[last], float(call.targets.min()), float(call.targets.max())
        margin = 1e-3 + 0.02 * (high - low)
        if low < least - margin or high > most + margin:
            text = f"Targets range from {low:.3g} to {high:.3g}, but the model's last function is a {last}."
            yield mistake(text, "Remove the last activation, or scale the targets.", targets=(low, high))


def check_mean_loss(probe: Probe) -> Iterator[Finding]:
    """Compute loss and gradients of a batch, of the batch two and three times, and of its halves, without dropout.

    The trainer takes a loss for a mean. With a sum, batch size, accumulation and processes change the training.

    Take the mean over the batch: reduction='mean', and no further division. If the loss is a mean over other items,
    such as tokens, return their number as num_items_in_batch.
    """
    batch = probe.batch
    rows = [*range(probe.require_samples(batch, 4))]
    batches = (select(batch, rows * times) for times in (1, 2, 3))
    once, twice, thrice = (probe.train(one, quiet=True, gradients=True).without_randomness() for one in batches)
    first, second, third = losses = (once.loss, twice.loss, thrice.loss)
    is_sum = abs(third - 2 * second + first) < 1e-2 * abs(second - first)
    is_divided_twice = max(abs(2 * second - first), abs(3 * third - first)) < 1e-3 * abs(first)
    if abs(second - first) > 1e-2 * abs(first) and (is_sum or is_divided_twice):
        problem = "is a sum over the batch" if is_sum else "is divided by the batch size once too often"
        text = f"The loss of a batch is {first:.6g}; with each sample twice, {second:.6g}: it {problem}."
        yield mistake(text, losses=losses)
        return
    if distance(twice.gradients, once.gradients) > 1e-2:
        raise NotApplicableError("The loss compares the samples of a batch with each other, as contrastive losses do.")
    whole, parts, off = _compare_halves(probe)
    items = [sum(int(call.targets.ne(call.ignored).sum()) for call in part.watch.losses) for part in parts]
    if off > 1e-2 and (not all(items) or distance(whole.gradients, _mean_of(parts, items)) > 1e-2):
        raise NotApplicableError("The loss is not the mean of those of its halves: it compares or weights samples.")
    if off > 1e-2:
        text = f"Gradients of a batch and its halves differ by {off:.0%}: the loss is a mean over targets not ignored, "
        yield doubt(f"{text}of which the halves have {items[0]} and {items[1]}.", items=items)


def _halves(batch: Batch) -> list[Batch]:
    """Return the two halves of a batch, and both together."""
    middle = (batch.num_samples or 0) // 2
    return [select(batch, rows) for rows in (range(middle), range(middle, 2 * middle), range(2 * middle))]


def _compare_halves(probe: Probe) -> tuple[Pass, list[Pass], float]:
    """Return the passes of a batch and of its halves, and how far the gradients of both are apart."""
    *parts, whole = (probe.train(part, quiet=True, gradients=True) for part in _halves(probe.batch))
    counts = [float(part.output.get("num_items_in_batch", 1)) for part in parts]
    return whole, parts, distance(whole.gradients, _mean_of(parts, counts))


def _mean_of(passes: list[Pass], weights: Sequence[float]) -> dict[str, torch.Tensor]:
    """Return the weighted mean of gradients."""
    mean: dict[str, torch.Tensor] = {}
    for result, weight in zip(passes, weights, strict=True):
        for name, gradient in result.gradients.items():
            mean[name] = mean.get(name, 0.0) + gradient * (weight / (sum(weights) or 1.0))
    return mean


def check_processes(probe: Probe) -> Iterator[Finding]:
    """Compare the gradients of two logical processes, with half of the batch each, with those of one process.

    If they differ, the number of processes changes the training.

    Look at overridden methods of the backward pass and the update, and at callbacks that change gradients.
    """
    probe.require_samples(probe.batch, 4)
    whole, _, off = _compare_halves(probe)
    whole.without_randomness()
    if off > 1e-2:
        raise NotApplicableError("The loss of a batch is not the mean of those of its halves.")
    *halves, both = _halves(probe.batch)
    with probe.training(quiet=True) as update:
        alone = update(both)
    with probe.training(quiet=True, logical_processes=2) as update:
        off = distance(alone.gradients, update(halves).gradients)
    if off > 1e-2:
        if probe.change_after_another_batch > TOLERANCE:
            raise NotApplicableError("The program carries a state from each batch to the next.")
        text = f"The gradients of two processes differ by {off:.0%} from those of one, though the loss is a mean."
        yield mistake(text, difference=off)
