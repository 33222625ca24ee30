"""Checks of training: the loss, its gradients, learning rates, and whether the program learns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from pytorch_accel_lite.data import Batch, BatchData
from pytorch_accel_lite.extending import (
    TARGET_KEYS,
    LossShapeError,
    is_as_long,
    is_overridden,
    replaced,
    select_samples,
    tensors_in,
)
from pytorch_accel_lite.extensions.checking.probing import (
    LOSSES_OF_ELEMENTS,
    TOLERANCE,
    Finding,
    LossCall,
    NotApplicableError,
    Part,
    Pass,
    Probe,
    distance,
    doubt,
    mistake,
    parts_by_name,
    remark,
    select,
    with_parts,
)
from pytorch_accel_lite.optimizers import CombinedOptimizer
from pytorch_accel_lite.utils import listed

# ---------------------------------------------------------------------------------------------------- the loss


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


# --------------------------------------------------------------------------------------------------- gradients


def check_gradients(probe: Probe) -> Iterator[Finding]:
    """Make four updates, look at the gradient of each parameter, and look for parameters that no optimizer has.

    A parameter without a gradient, or in no optimizer, stays as it is.
    """
    largest: dict[str, float] = {}
    called: set[str] = set()
    with probe.training() as update:
        for number in range(4):
            result = update(probe.batches[number % len(probe.batches)], number)
            called |= result.watch.modes.keys()
            for name, gradient in result.gradients.items():
                value = float(gradient.abs().max()) if gradient.numel() else 0.0
                largest[name] = max(value, largest.get(name, 0.0))  # stays NaN if the value is NaN
            if not all(map(math.isfinite, largest.values())):
                break
        kept = [name for p, name in probe.optimized.items() if p.grad is not None and bool(p.grad.any())]
    infinite = [name for name, value in largest.items() if not math.isfinite(value)]
    if infinite:
        advice = "Look for a root or a norm at 0, a logarithm of 0, a division by 0, or too large a learning rate."
        yield mistake(f"Gradients of {listed(infinite)} are infinite or NaN.", advice, parameters=infinite)
        return
    if kept:
        text = f"After an update, {listed(kept)} still have gradients, to which those of the next are added."
        yield mistake(text, "Clear them: optimizer_zero_grad() must call optimizer.zero_grad().", parameters=kept)
    yield from _find_idle(probe, largest, called)
    yield from _find_forgotten(probe, largest)


def _find_idle(probe: Probe, largest: Mapping[str, float], called: set[str]) -> Iterator[Finding]:
    """Look for parameters of the optimizer that are not trained."""
    optimized = probe.optimized
    # The user's own modules may use parameters without being called, unlike the layers of torch.
    layers = {name for name, part in probe.modules.items() if type(part).__module__.startswith("torch.nn.modules")}
    layers -= {n for n, part in probe.modules.items() if isinstance(part, (nn.ParameterList, nn.ParameterDict))}
    without = [name for name in optimized.values() if name not in largest]
    unused = [name for name in without if name.rpartition(".")[0] in layers - called]
    lost = [name for name in without if name not in unused]
    is_all_zero = not any(largest.get(name, 1.0) for name in optimized.values())
    # The gradients of a bias may cancel out, and detectors leave out outputs that no target matches.
    is_plain = all(isinstance(part, torch.Tensor) for part in parts_by_name(probe.batch.data).values())
    zero = [name for p, name in optimized.items() if largest.get(name) == 0.0 and (p.ndim > 1 or is_all_zero)]
    if lost:
        advice = "Is there a detach(), .data, .item(), no_grad(), argmax or new tensor between them and the loss? "
        advice += "Was the optimizer given the parameters of this model?"
        yield mistake(f"Optimized parameters get no gradient: {listed(lost)}.", advice, parameters=lost)
    if unused:
        yield doubt(f"The forward pass does not use {listed(unused)}.", "Call or remove them.", parameters=unused)
    if zero and (is_all_zero or (is_plain and not lost)):
        text = f"The gradient of {listed(zero)} is zero in every update."
        advice = "Look for units that are never active (a ReLU on the outputs), saturated activations, weights of 0."
        yield (mistake if is_all_zero else doubt)(text, advice, parameters=zero)


def _find_forgotten(probe: Probe, largest: Mapping[str, float]) -> Iterator[Finding]:
    """Look for parameters that should be in an optimizer, and for parameters that the model does not know of."""
    loss, of_model = probe.trainer.loss_func, set(probe.trainer.get_model().parameters())
    of_loss = set(loss.parameters() if isinstance(loss, nn.Module) else ()) - of_model
    others = {p: name for p, name in probe.names.items() if p in of_model | of_loss and p not in probe.optimized}
    forgotten = {p: name for p, name in others.items() if largest.get(name)}
    if forgotten:
        text = f"No optimizer has {listed(forgotten.values())}, for which gradients are computed."
        advice = "Give them to the optimizer, or freeze them with requires_grad_(False)."
        finding = mistake if of_loss & forgotten.keys() else doubt
        yield finding(text, advice, parameters=[*forgotten.values()])
    hidden = [name for name, p in _hidden_parameters(probe) if p.requires_grad and p not in probe.names]
    if hidden:
        text = f"The model does not know of the parameters {listed(hidden)}, which are in a plain list or dict."
        yield mistake(text, "Use nn.ModuleList or nn.ModuleDict.", parameters=hidden)


def _hidden_parameters(probe: Probe) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of modules that are in plain lists and dicts."""
    for name, part in probe.modules.items():
        for attribute, value in vars(part).items():
            values = value if isinstance(value, dict) else dict(enumerate(value if isinstance(value, list) else ()))
            for key, inner in values.items() if not attribute.startswith("_") else ():
                for inner_name, parameter in inner.named_parameters() if isinstance(inner, nn.Module) else ():
                    yield f"{name}.{attribute}.{key}.{inner_name}".lstrip("."), parameter


# ----------------------------------------------------------------------------------------------------- targets


def check_targets_matter(probe: Probe) -> Iterator[Finding]:
    """Compute the loss of a batch, after another batch, with its targets shuffled among the samples.

    If the loss does not depend on the targets, the model cannot learn them.

    Compare the outputs with the targets of the same batch, rather than with predictions, with inputs, or with targets
    kept from an earlier step.
    """
    batch, other = probe.batch, probe.batches[1] if len(probe.batches) > 1 else None
    shuffled = _with_other_targets(probe, batch)
    if _loss_depends(probe, batch, shuffled, other):
        if probe.run.data.eval_loader is not None:
            yield from _evaluation_depends(probe)
        return
    names = " and ".join(repr(name) for name in _targets(batch, []))
    text = f"Shuffling the targets ({names} of a batch) among the samples changes neither the loss nor its gradients"
    if other is not None and _loss_depends(probe, batch, shuffled, None):
        yield mistake(f"{text}, once another batch has been trained on: its targets are used.")
    elif predicted := _loss_of_predictions(probe, batch):
        yield mistake(f"{text}: {predicted} is given the model's own predictions as targets.")
    elif probe.trainer.loss_func is not None and not is_overridden(probe.trainer, "calculate_train_batch_loss"):
        yield doubt(f"{text}: loss_func does not use them.")
    else:
        yield remark(f"{text}: the program does not use them.")


def _with_other_targets(probe: Probe, batch: Batch) -> Batch:
    """Return a batch in which each sample has the targets of another."""
    size = probe.require_samples(batch)
    targets, others = (_targets(batch, rows) for rows in ([*range(size)], [*range(1, size), 0]))
    if not targets:
        raise NotApplicableError("It is not known which part of a batch holds the targets.")
    if all(map(torch.equal, tensors_in([targets]), tensors_in([others]))):
        raise NotApplicableError("The samples of the batch have the same targets.")
    return batch._replace(data=with_parts(batch.data, others))


def _loss_depends(probe: Probe, batch: Batch, shuffled: Batch, after: Batch | None) -> bool:
    """Whether other targets change the loss of a batch, or any bit of its gradients."""
    first, second = (probe.train(one, quiet=True, gradients=True, after=after) for one in (batch, shuffled))
    return first.loss != second.loss or distance(first.gradients, second.gradients) > 0.0


def _evaluation_depends(probe: Probe) -> Iterator[Finding]:
    """Look whether the loss of evaluations depends on their targets, as that of training does."""
    batch = probe.eval_batch
    with suppress(NotApplicableError):  # there may be no loss, or no targets
        shuffled = _with_other_targets(probe, batch)
        first, second = (probe.evaluate(one).loss for one in (batch, shuffled))
        of_training = [probe.train(one, quiet=True).loss for one in (batch, shuffled)]
        if first == second and of_training[0] != of_training[1]:
            yield doubt("Shuffling the targets of an evaluation batch among its samples does not change its loss.")


def _loss_of_predictions(probe: Probe, batch: Batch) -> str:
    """Return the name of a loss function of torch that is given the model's predictions as targets, if any."""
    rows = [*range(1, batch.num_samples or 0), 0]
    first, second = (probe.train(one, quiet=True).watch.losses for one in (batch, select(batch, rows)))
    with probe.training(quiet=True) as update:
        for number in range(5):  # a teacher may begin as a copy of the model
            third = update(batch, number).watch.losses
    for calls in zip(first, second, third, strict=False):
        follow_samples = not torch.equal(calls[0].targets, calls[1].targets)  # row numbers do not
        if follow_samples and all(map(_are_predictions, calls)):
            return calls[0].name
    return ""


def _are_predictions(call: LossCall) -> bool:
    """Whether the targets of a loss function are its own outputs, or the most likely classes of these."""
    outputs, targets = call.outputs, call.targets
    candidates = [outputs, outputs > 0, outputs > 0.5, outputs.round()]
    if outputs.ndim > 1:
        candidates += [outputs.argmax(1), outputs.softmax(1), outputs.exp()]
    return targets.numel() > 1 and any(
        one.shape == targets.shape and bool(torch.isclose(one.float(), targets.float()).all()) for one in candidates
    )


# ---------------------------------------------------------------------------------------------- learning rates


def check_schedule(probe: Probe) -> Iterator[Finding]:
    """Compute the learning rate of every update of the run.

    A schedule whose length is in epochs, but which is stepped after every update, ends long before the run. A schedule
    that is too long never reaches its end.

    Give the length of the schedule in updates, with TrainerPlaceholderValues, or pass scheduler_interval='epoch'.
    """
    try:
        curve = max(probe.curves, key=max)
    except TypeError as error:
        raise NotApplicableError(f"The schedule cannot be computed without the run: {error}") from error
    except ValueError as error:
        yield mistake(f"The schedule raised an error: {error}.")
        return
    if len(curve) == 1 and curve[0]:
        raise NotApplicableError("The run has no schedule, or one whose rates cannot be known before it.")
    create = getattr(probe.create_scheduler_fn, "func", probe.create_scheduler_fn)
    name, peak, updates = getattr(create, "__name__", str(create)).lower(), max(curve), len(curve)
    chosen = max(float(group.get("initial_lr", group.get("lr", 0.0))) for group in probe.trainer.optimizer.param_groups)
    small = next((number for number in range(curve.index(peak), updates) if curve[number] < 0.01 * peak), updates)
    lowest = min(curve[updates // 2 :])
    is_cyclic = any(kind in name for kind in ("cyclic", "restart", "lambda"))
    fallen = next((number for number in range(curve.index(peak), updates) if curve[number] < 0.1 * peak), updates)
    highest = max(curve[fallen:], default=0.0)
    rises = not is_cyclic and (curve[-1] > max(2 * lowest, 0.02 * peak) or highest > 0.5 * peak)
    is_fixed = len(set(curve)) == 1 and not any(kind in name for kind in ("constant", "lambda"))
    problems = {
        "is negative at times": min(curve) < 0,
        "is 0 in every update": peak == 0,
        f"is at most {peak:.3g}, that of the optimizer {chosen:.3g}": 0 < peak < 0.01 * chosen,
        "still rises at the end of the run: the warm-up never ends": updates >= 10 and curve.index(peak) == updates - 1,
        f"falls to {lowest:.3g} and rises again to {max(highest, curve[-1]):.3g}": updates >= 10 and rises,
        f"is below a hundredth of its peak, {peak:.3g}, from update {small}": updates >= 10 and small < 0.5 * updates,
        f"is {peak:.3g} in every update: the schedule never changes it": updates >= 10 and is_fixed,
    }
    problem = next((text for text, applies in problems.items() if applies), "")
    if problem:
        finding = mistake if min(curve) < 0 or peak == 0 else doubt
        text = f"The learning rate {problem}. The run has {updates} updates."
        yield finding(text, first=curve[0], highest=peak, last=curve[-1], updates=updates)


# ---------------------------------------------------------------------------------------------------- learning

#: After each of these numbers of updates, the share of its first value by which the loss of a single batch must have
#: fallen for the check to end early.
_ENOUGH = {20: 0.5, 50: 0.1, 100: 0.01, 200: 0.005}
#: The functions that distributions call to draw samples.
_SAMPLING = {"multinomial", "bernoulli", "normal"}


def check_learns(probe: Probe) -> Iterator[Finding]:
    """Train on a single small batch for up to 300 updates, with the highest learning rates of the run.

    A program that cannot fit a few samples cannot fit many.
    """
    optimizer = getattr(probe.trainer.optimizer, "optimizer", probe.trainer.optimizer)  # without Accelerate's wrapper
    if probe.run.stepper.updates_one_by_one and isinstance(optimizer, CombinedOptimizer) and len(optimizer.parts) > 1:
        raise NotApplicableError("The program has several optimizers, whose losses need not fall.")
    losses, of_torch = _fit(probe)
    before, after = _ends(losses)
    details = {"updates": len(losses), "before": before, "after": after}
    text = f"After {len(losses)} updates on one batch, its loss is {after:.4g}, from {before:.4g}"
    first, last = _ends(of_torch)
    scale = max(abs(before), 1e-6)
    if after < before and last > 1.2 * first + 0.1:
        text = f"{text}, but torch's loss functions give {last:.4g}, from {first:.4g}."
        yield mistake(text, "Look at the sign of the loss.", **details)
    elif before - after > 5e-3 * scale or abs(before) < 1e-4:
        # Targets that are shuffled in each update cannot be learnt. If the loss falls anyway, the program does not use
        # them.
        shuffled, _ = _fit(probe, len(losses), order=torch.Generator().manual_seed(0))
        is_told = shuffled != losses[: len(shuffled)]
        more = f", and {_ends(shuffled)[1]:.4g} with targets that are shuffled in each" if is_told else ""
        yield remark(f"{text}{more}.", **details, shuffled=_ends(shuffled)[1])
    elif len(losses) < 20:
        raise NotApplicableError(f"There was time for only {len(losses)} updates.")
    elif _SAMPLING & set(probe.watch_step(probe.batch).drawn):
        raise NotApplicableError("The step samples, as from a policy, whose loss need not fall.")
    else:
        yield from _try_other_rates(probe, text, not math.isfinite(after) or after - before > scale, details)


def _try_other_rates(probe: Probe, text: str, diverged: bool, details: Mapping[str, float]) -> Iterator[Finding]:
    factor = 1e-2 if diverged else max(100.0, 1e-3 / max([*probe.rates, 1e-12]))
    before, after = _ends(_fit(probe, factor=factor)[0])
    if math.isfinite(after) and before - after > 5e-2 * abs(before):
        advice = f"{'Lower' if diverged else 'Raise'} the learning rate; find_lr() suggests one."
        text = f"{text}; with {factor:g} times the learning rate it falls to {after:.4g}."
        yield (mistake if diverged else doubt)(text, advice, **details, factor=factor)
    else:
        advice = "Look at the gradients, at what the optimizer has, at zero_grad(), and at what is done between them."
        yield mistake(f"{text}, and {factor:g} times the learning rate does not help.", advice, **details)


def _ends(losses: list[float]) -> tuple[float, float]:
    """Return the mean losses of the first and of the last updates: a single loss may depend on random numbers."""
    first, before, after = losses[0], sum(losses[:3]) / len(losses[:3]), sum(losses[-5:]) / len(losses[-5:])
    return first if before > 3 * abs(first) else before, after  # the first update may have made the loss large


def _fit(
    probe: Probe, most: int = 300, factor: float = 1.0, order: torch.Generator | None = None
) -> tuple[list[float], list[float]]:
    """Train on one batch; return the losses of the updates, and the results of torch's loss functions in them.

    Args:
        factor: the factor for the learning rates
        order: a generator with which the targets are shuffled before each update
    """
    limit = probe.seconds_left - min(10.0, 0.3 * probe.seconds_left)
    losses: list[float] = []
    of_torch: list[float] = []
    with probe.training() as update:
        for group, rate in zip(probe.trainer.optimizer.param_groups, probe.rates, strict=False):
            group["lr"] = rate * factor
        while len(losses) < most and (probe.seconds_left > limit or not losses):
            result = update(probe.batch if order is None else _shuffled(probe.batch, order), len(losses))
            losses.append(result.loss)
            of_torch.append(sum(call.mean for call in result.watch.losses))
            before, after = _ends(losses)
            if order is None and before - after > _ENOUGH.get(len(losses), math.inf) * abs(before):
                break
    return losses, of_torch


def _shuffled(batch: Batch, order: torch.Generator) -> Batch:
    """Return a batch with its targets shuffled among the samples, if it is known which parts are targets."""
    rows = torch.randperm(batch.num_samples or 0, generator=order)
    return batch._replace(data=with_parts(batch.data, _targets(batch, rows.tolist())))


def _targets(batch: Batch, rows: list[int]) -> dict[Part, BatchData]:
    """Return the targets of some samples of a batch, by name; an empty dict if targets cannot be told apart."""
    size = batch.num_samples or 0
    targets = {name: part for name, part in parts_by_name(batch.data).items() if name in (*TARGET_KEYS, 1)}
    return {name: select_samples(part, rows, size) for name, part in targets.items() if is_as_long(part, size)}
