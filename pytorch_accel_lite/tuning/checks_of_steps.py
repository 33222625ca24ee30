"""Checks of a program's steps: modes, losses, gradients, and whether it learns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from pytorch_accel_lite.base.batches import Batch, tensors_in
from pytorch_accel_lite.base.loss_shapes import LossShapeError
from pytorch_accel_lite.optimizers.freezing import stays_in_eval
from pytorch_accel_lite.optimizers.operations import parts_of
from pytorch_accel_lite.tuning.probing import (
    Finding,
    NotApplicableError,
    Pass,
    Probe,
    differences,
    distance,
    listed,
    sample_tensors,
    select,
)

#: Relative differences up to this are those of float32, computed in another order.
_TOLERANCE = 2e-4
#: By how much of itself the loss of a single batch has fallen after a number of updates, if no more are needed.
_ENOUGH = {20: 0.5, 50: 0.1, 100: 0.01, 200: 0.005}
_OF_EACH_ELEMENT = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div")


def check_runs(probe: Probe) -> Iterator[Finding]:
    """Compute a training batch with its gradients, and an evaluation batch.

    What fails on the first batch fails in the run.
    """
    try:
        if probe.has_own_step:
            with probe.training() as update:
                update(probe.batch, 0)
            return
        loss = probe.train(probe.batch, gradients=True).number
    except NotApplicableError:
        raise
    except Exception as error:
        yield Finding(f"The training step raised {describe_error(error)}", "Correct the step, the model or the data.")
        return
    if not math.isfinite(loss):
        yield Finding(
            f"The loss of the first training batch is {loss}.",
            "Look for a logarithm or a square root of 0, a division by 0, a mean over nothing, or NaN in the data.",
        )
    if probe.run.data.eval_loader is not None:
        try:
            probe.evaluate(probe.eval_batch)
        except NotApplicableError:
            pass
        except Exception as error:
            yield Finding(f"The evaluation step raised {describe_error(error)}", "Correct it, or override the method.")


def describe_error(error: Exception) -> str:
    """Return the class and the first line of an error."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1] if 'Original Traceback' in str(error) else lines[0]}"


def check_determinism(probe: Probe) -> Iterator[Finding]:
    """Evaluate a batch twice with other random numbers, and look at what is active in each mode.

    An evaluation with dropout, or with batch norm that follows the batch, is worse than the model and differs each time.
    """
    with probe.training() as update:  # restores what a broken evaluation changes
        yield from _find_wrong_modes(probe)
        before = {name: part.training for name, part in probe.modules.items()}
        try:
            update(probe.batch, 0)
        finally:
            changed = [name or "model" for name, part in probe.modules.items() if part.training != before[name]]
        if changed and any(
            isinstance(probe.modules[name], (_BatchNorm, _DropoutNd)) for name in changed if name in probe.modules
        ):
            yield Finding(
                f"A training step leaves the mode of {listed(changed)} changed.",
                "Call model.train() after an evaluation within the step, or use trainer.evaluate().",
                details={"modules": changed},
            )
    first, second = (probe.evaluate(probe.eval_batch, seed=seed) for seed in (0, 1))
    if first.watch.dropouts:
        functions = sorted(set(first.watch.dropouts))
        yield Finding(
            f"Dropout is active in evaluation ({listed(functions)}).",
            "Pass training=self.training to functional dropout, dropout_p=p if self.training else 0.0 to attention, and "
            "let eval_epoch_start() call model.eval().",
            details={"functions": functions},
        )
        return
    again = probe.evaluate(probe.eval_batch, seed=0)
    off, repeated = (_off(first, other) for other in (second, again))
    is_classifier = any(call.name == "cross_entropy" for call in first.watch.losses)
    if repeated > _TOLERANCE and not probe.has_own_step:
        raise NotApplicableError("An evaluation depends on the one before: the program keeps a state between batches.")
    if off > _TOLERANCE and is_classifier and sample_tensors(first.outputs, probe.eval_batch.num_samples or 0):
        drawn = sorted(set(first.watch.random))
        yield Finding(
            f"Two evaluations of a batch give predictions that differ by {off:.1%} of the largest; the program draws "
            f"{listed(drawn) or 'random numbers'}.",
            "Draw noise only if self.training.",
            fails=False,
            details={"difference": off, "functions": drawn},
        )
    elif off > _TOLERANCE:
        raise NotApplicableError("The evaluation draws random numbers of its own, as those of generative models do.")


def _find_wrong_modes(probe: Probe) -> Iterator[Finding]:
    kinds = (_DropoutNd, _BatchNorm)
    trainer = probe.trainer
    parts = {name: part for name, part in probe.modules.items() if isinstance(part, kinds)}
    parts = {name: part for name, part in parts.items() if getattr(part, "p", 1) and not stays_in_eval(part)}
    if not parts:
        return
    used: dict[str, bool] = {}
    statistics = {name: part.running_mean.clone() for name, part in parts.items() if _follows(part)}
    hooks = [
        part.register_forward_pre_hook(lambda part, _, name=name: used.__setitem__(name, part.training))
        for name, part in parts.items()
    ]
    try:
        if not probe.has_own_step:
            probe.train(probe.batch)
            still = [name for name, training in used.items() if not training]
            if used and len(still) == len(used) and not trainer.get_model().training:
                yield Finding(
                    f"The model trains in evaluation mode: {listed(still)} {'does' if len(still) == 1 else 'do'} nothing.",
                    "Let train_epoch_start() call super().train_epoch_start(), or model.train().",
                    fails=False,
                    details={"modules": still},
                )
            used.clear()
        probe.evaluate(probe.eval_batch)
    finally:
        for hook in hooks:
            hook.remove()
    active = [name for name, training in used.items() if training]
    del statistics
    if active:
        yield Finding(
            f"{listed(active)} {'is' if len(active) == 1 else 'are'} in training mode in an evaluation.",
            "Let eval_epoch_start() call super().eval_epoch_start(), and no forward() call train().",
            details={"modules": active},
        )


def _follows(part: nn.Module) -> bool:
    return isinstance(part, _BatchNorm) and part.running_mean is not None


def _off(first: Pass, second: Pass) -> float:
    """Return how far two passes are apart, as a share of the largest value."""
    pairs = list(zip(tensors_in([first.outputs]), tensors_in([second.outputs]), strict=False))
    losses = [p.loss.detach().reshape(-1) for p in (first, second) if isinstance(p.loss, torch.Tensor)]
    pairs += [(losses[0], losses[1])] if len(losses) == 2 else []
    off = 0.0
    for one, other in pairs:
        if one.is_floating_point() and one.shape == other.shape and one.numel():
            one, other = one.detach().double(), other.detach().double()
            off = max(off, float(((one - other).abs().max() / one.abs().max().clamp(min=1e-12)).nan_to_num()))
    return off


def check_broadcast(probe: Probe) -> Iterator[Finding]:
    """Compute the loss of a training batch and note the shapes of what it compares.

    Outputs of shape (N, 1) and targets of shape (N,) are broadcast to (N, N): each output is compared with the targets of
    all samples, and the model learns their mean.
    """
    batch = probe.batch
    size = batch.num_samples or 0
    try:
        found = probe.train(batch)
    except LossShapeError as error:
        yield Finding(str(error), "Make the shapes equal.")
        return
    for call in found.watch.losses:
        outputs, targets = call.outputs.shape, call.targets.shape
        if call.name not in _OF_EACH_ELEMENT or outputs == targets or call.targets.numel() == 1:
            continue
        both = tuple(torch.broadcast_shapes(outputs, targets))
        yield Finding(
            f"{call.name} compares outputs of shape {tuple(outputs)} with targets of shape {tuple(targets)}, broadcast to "
            f"{both}.",
            "Make the shapes equal, for example with targets.unsqueeze(1) or outputs.squeeze(1).",
            fails=both not in (outputs, targets),
            details={"outputs": tuple(outputs), "targets": tuple(targets)},
        )
    outer = [
        shapes for shapes in found.watch.outer if {len(shape) for shape in shapes} == {1, 2} and shapes[0][0] == size
    ]
    if outer and size > 2 and probe.train(select(probe.require_samples(batch), range(size - 1))).watch.outer:
        first, second = outer[0]
        yield Finding(
            f"The step combines values of shapes {first} and {second}, which gives {size} x {size} numbers: each sample "
            "with every other.",
            "Make the shapes equal, with .squeeze(1) or .unsqueeze(1).",
            details={"shapes": outer[0]},
        )


def check_gradients(probe: Probe) -> Iterator[Finding]:
    """Make four updates and look at the gradient of each parameter, and for parameters that no optimizer has.

    A parameter without a gradient, or in no optimizer, stays as it is.
    """
    trainer = probe.trainer
    optimized, names = probe.optimized, probe.names
    calls: set[nn.Module] = set()
    hooks = [part.register_forward_pre_hook(lambda part, *_: calls.add(part)) for part in probe.modules.values()]
    largest: dict[str, float] = {}
    try:
        with probe.training() as update:
            for number in range(4):
                for name, gradient in update(probe.batches[number % len(probe.batches)], number).items():
                    value = float(gradient.to_dense().abs().max()) if gradient.numel() else 0.0
                    largest[name] = math.nan if math.isnan(value) else max(largest.get(name, 0.0), value)
                if any(not math.isfinite(value) for value in largest.values()):
                    break
    finally:
        for hook in hooks:
            hook.remove()
    infinite = [name for name, value in largest.items() if not math.isfinite(value)]
    if infinite:
        yield Finding(
            f"Gradients of {listed(infinite)} are infinite or NaN.",
            "Look for a square root or a norm at 0, a logarithm of 0, a division by 0, or too large a learning rate.",
            details={"parameters": infinite},
        )
        return
    parts = list(probe.modules.values())
    owners = {parameter: part for part in parts for parameter in part.parameters(recurse=False)}
    without = [p for p, name in optimized.items() if name not in largest]
    unused = {p for p in without if p in owners and owners[p] not in calls and not _is_read(owners[p])}
    lost = [names[p] for p in without if p not in unused]
    zero = [name for p, name in optimized.items() if largest.get(name) == 0.0 and p.numel()]
    if lost:
        yield Finding(
            f"{len(lost)} of {len(optimized)} optimized parameters get no gradient: {listed(lost)}.",
            "Look for detach(), .data, .item(), torch.no_grad(), argmax or a new tensor between them and the loss, and "
            "whether the optimizer was given the parameters of this model.",
            details={"parameters": lost},
        )
    if unused:
        found = [names[p] for p in unused]
        yield Finding(
            f"{listed(found)}: the forward pass does not use {'it' if len(found) == 1 else 'them'}.",
            "Call the layer in forward(), or remove it.",
            fails=False,
            details={"parameters": found},
        )
    if zero and not lost:
        yield Finding(
            f"The gradient of {listed(zero)} is zero in every update.",
            "Look for units that are never active (a ReLU on the outputs), saturated activations, or a weight of 0.",
            fails=len(zero) == len(optimized),
            details={"parameters": zero},
        )
    in_loss = set(trainer.loss_func.parameters()) if isinstance(trainer.loss_func, nn.Module) else set()
    for group, fails in ((in_loss, True), (set(trainer.get_model().parameters()) - in_loss, False)):
        forgotten = [
            names[p] for p in names if p in group and p not in optimized and p.requires_grad and largest.get(names[p])
        ]
        if forgotten:
            yield Finding(
                f"{listed(forgotten)} {'gets a gradient' if len(forgotten) == 1 else 'get gradients'}, but no optimizer "
                "has them.",
                "Give them to the optimizer, or freeze them with requires_grad_(False).",
                fails=fails,
                details={"parameters": forgotten},
            )
    hidden = [name for name, p in _hidden_parameters(probe) if p not in names and p.requires_grad]
    if hidden:
        yield Finding(
            f"{listed(hidden)}: the model does not know of these parameters, which are in a plain list or dict.",
            "Use nn.ModuleList, nn.ModuleDict or nn.ParameterList.",
            details={"parameters": hidden},
        )


def _is_read(part: nn.Module) -> bool:
    """Whether parameters of a part may be used without calling it: its own, rather than those of a layer of torch."""
    return not type(part).__module__.startswith("torch.nn") or isinstance(part, (nn.ParameterList, nn.ParameterDict))


def _hidden_parameters(probe: Probe) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of modules in plain lists and dicts of modules."""
    for name, part in probe.modules.items():
        for attribute, value in vars(part).items():
            if attribute.startswith("_") or not isinstance(value, (list, tuple, dict)):
                continue
            for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
                if isinstance(inner, nn.Module):
                    for own, parameter in inner.named_parameters():
                        yield ".".join(filter(None, (name, attribute, str(key), own))), parameter


def check_batch_independence(probe: Probe) -> Iterator[Finding]:
    """Evaluate a batch, and each half of it alone.

    A prediction must not depend on which other samples happen to be in the batch.
    """
    batch = probe.require_samples(probe.eval_batch, 4)
    size = batch.num_samples or 0
    whole = _rows_of(probe, batch)
    half = size // 2
    parts = [_rows_of(probe, select(batch, rows), whole) for rows in (range(half), range(half, size))]
    if any(len(part) != len(whole) for part in parts):
        raise NotApplicableError("The model's outputs relate samples to each other.")
    together = [
        torch.cat([parts[0][number], parts[1][number]]) for number in whole if _fit_together(number, whole, parts)
    ]
    off = differences([tensor for number, tensor in whole.items() if _fit_together(number, whole, parts)], together)
    if off.max() > _TOLERANCE:
        worst = int(off.argmax())
        yield Finding(
            f"In a batch of half the size, outputs differ by up to {float(off.max()):.1%} of the largest (sample {worst}).",
            "Look for a softmax, norm, mean or maximum over the first dimension or over all, for batch_first=True missing "
            "in an RNN or in attention, for view() that mixes samples, and for batch norm in training mode.",
            details={"difference": float(off.max()), "samples": off.gt(_TOLERANCE).nonzero().flatten().tolist()},
        )


def check_permutation(probe: Probe) -> Iterator[Finding]:
    """Evaluate a batch in another order.

    Outputs must follow their samples, and the loss must not depend on their order.
    """
    batch = probe.require_samples(probe.eval_batch, 4)
    size = batch.num_samples or 0
    order = list(range(size))[::-1]
    first, second = probe.evaluate(batch), probe.evaluate(select(batch, order))
    _refuse_randomness(probe, first)
    one, other = sample_tensors(first.outputs, size), sample_tensors(second.outputs, size)
    off = differences([t[order] for t in one.values()], [*other.values()]) if one else torch.zeros(size)
    if off.max() > _TOLERANCE:
        yield Finding(
            f"With its samples in reverse order, outputs of a batch differ by up to {float(off.max()):.1%} of the largest.",
            "Look for operations along the first dimension, and for batch_first=True missing in an RNN or in attention.",
            details={"difference": float(off.max())},
        )
        return
    moved = [abs(second.number - first.number)]
    moved += [
        abs(probe.evaluate(select(batch, [*order[k:], *order[:k]])).number - second.number)
        for k in (2, 3, 4, size // 2)
    ]
    if all(difference > _TOLERANCE * max(abs(first.number), 1e-6) for difference in moved):
        yield Finding(
            f"The loss of a batch is {first.number:.6g}, and {second.number:.6g} with its samples in reverse order.",
            "Look for targets shifted along the first dimension (targets[1:] in place of targets[:, 1:]). If the batch is "
            "ordered on purpose, skip this check.",
            fails=False,
            details={"losses": (first.number, second.number)},
        )
    elif not one:
        raise NotApplicableError("The model's outputs do not have a row for each sample.")


def _rows_of(probe: Probe, batch: Batch, like: Iterable[int] | None = None) -> dict[int, torch.Tensor]:
    found = probe.evaluate(batch)
    _refuse_randomness(probe, found)
    rows = sample_tensors(found.outputs, batch.num_samples or 0, like)
    if not rows:
        raise NotApplicableError("The model's outputs do not have a row for each sample.")
    return rows


def _fit_together(number: int, whole: dict[int, torch.Tensor], parts: list[dict[int, torch.Tensor]]) -> bool:
    """Whether the outputs of parts of a batch are as many as those of all of it."""
    shapes = [part[number].shape for part in parts]
    return shapes[0][1:] == shapes[1][1:] and shapes[0][0] + shapes[1][0] == len(whole[number])


def _refuse_randomness(probe: Probe, found: Pass) -> None:
    if found.watch.random or found.watch.dropouts:
        raise NotApplicableError("The evaluation draws random numbers.")


def _mean_of_parts(
    probe: Probe, parts: list[Batch], weights: list[float] | None = None
) -> tuple[Pass, list[Pass], list[float]]:
    """Return the gradients of the mean loss of parts of a batch; weighted as the trainer weights micro-batches."""
    passes = [probe.train(part, "quiet", gradients=True) for part in parts]
    counts = [p.output.get("num_items_in_batch") for p in passes]
    if weights is None:
        weights = [
            float(part.num_samples or 0) if n is None else float(n) for part, n in zip(parts, counts, strict=True)
        ]
    total = sum(weights) or 1.0
    names = {name for p in passes for name in p.gradients}
    mean = {
        name: sum(w / total * p.gradients[name] for w, p in zip(weights, passes, strict=True) if name in p.gradients)
        for name in names
    }
    loss = torch.tensor(sum(w / total * p.number for w, p in zip(weights, passes, strict=True)))
    return Pass(loss, {}, [], passes[0].watch, mean), passes, weights


def check_mean_loss(probe: Probe) -> Iterator[Finding]:
    """Compute loss and gradients of a batch, of the batch two and three times, and of its halves, without dropout.

    The trainer takes a loss for a mean. Otherwise learning rate, accumulation and several processes change the training.
    """
    batch = probe.require_samples(probe.batch, 4)
    size = batch.num_samples or 0
    once, twice, thrice = (
        probe.train(select(batch, [*range(size)] * times), "quiet", gradients=True) for times in (1, 2, 3)
    )
    if abs(probe.train(batch, "quiet", seed=1).number - once.number) > 1e-6 * abs(once.number):
        raise NotApplicableError("The loss draws random numbers.")
    for factor, message in ((2.0, "is a sum over the batch"), (0.5, "is divided by the batch size once too often")):
        expected = factor * once.number, 1.0 if factor == 0.5 else 3.0
        grows = abs((thrice.number - twice.number) - (twice.number - once.number)) < 1e-2 * abs(
            twice.number - once.number
        )
        is_it = (
            (grows and factor == 2.0) or (factor == 0.5 and abs(3 * thrice.number - once.number) < 1e-3 * abs(once.number))
        )
        gradients = distance(twice.gradients, once.gradients, factor)
        if is_it and abs(twice.number - once.number) > 1e-2 * abs(once.number) and (gradients < 1e-2 or factor == 2.0):
            yield Finding(
                f"The loss of a batch is {once.number:.6g}, and {twice.number:.6g} with each sample twice: it {message}.",
                "Take the mean over the batch: reduction='mean', and no further division.",
                details={
                    "losses": (once.number, twice.number),
                    "ratio": twice.number / once.number,
                    "expected": expected,
                },
            )
            return
    if distance(twice.gradients, once.gradients) > 1e-2:
        raise NotApplicableError("The loss compares the samples of a batch with each other, as contrastive losses do.")
    yield from _compare_parts(probe, batch, once)


def _compare_parts(probe: Probe, batch: Batch, whole: Pass) -> Iterator[Finding]:
    size = batch.num_samples or 0
    parts = [select(batch, range(size // 2)), select(batch, range(size // 2, size))]
    mean, passes, _ = _mean_of_parts(probe, parts)
    off = distance(whole.gradients, mean.gradients)
    if off < 1e-2:
        return
    counts = {
        "targets that are not ignored": [
            sum(int(c.targets.ne(c.ignored).sum()) for c in p.watch.losses if c.name == "cross_entropy") for p in passes
        ],
        "elements that are not 0": [
            sum(int(t.ne(0).sum()) for t in tensors_in([part.data]) if not t.is_floating_point()) for part in parts
        ],
    }
    for what, weights in counts.items():
        if (
            all(weights)
            and distance(whole.gradients, _mean_of_parts(probe, parts, [float(w) for w in weights])[0].gradients) < 1e-2
        ):
            yield Finding(
                f"The gradients of a batch differ by {off:.0%} from those of its halves: the loss is a mean over {what}, of "
                f"which the halves have {weights[0]} and {weights[1]}.",
                "Return their number as num_items_in_batch, so that accumulation and several processes weight them equally.",
                fails=False,
                details={"difference": off, "items": weights},
            )
            return
    raise NotApplicableError(
        "The loss of a batch is not the mean of those of its halves: it compares samples with each other, or weights them."
    )


def check_processes(probe: Probe) -> Iterator[Finding]:
    """Compare the gradients of a batch with those of its shares on two processes, weighted as the trainer does.

    Otherwise the number of processes changes the training.
    """
    batch = probe.require_samples(probe.batch, 4)
    size = batch.num_samples or 0
    whole = probe.train(batch, "quiet", gradients=True)
    if whole.watch.random:
        raise NotApplicableError("The loss draws random numbers.")
    mean, _, _ = _mean_of_parts(probe, [select(batch, range(0, size, 2)), select(batch, range(1, size, 2))])
    off = distance(whole.gradients, mean.gradients)
    if off > 1e-2:
        raise NotApplicableError(
            f"The gradients of two processes differ by {off:.0%} from those of one, as the loss is no mean over samples."
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


def _look_at_loss(call: Any) -> Iterator[Finding]:
    outputs, targets = call.outputs.float(), call.targets
    if not outputs.numel():
        return
    over_classes = outputs.ndim > 1 and outputs.shape[1] > 1
    sums_to_one = over_classes and bool((outputs >= 0).all()) and bool((outputs.sum(1) - 1).abs().max() < 1e-3)
    if call.name == "cross_entropy" and over_classes:
        if sums_to_one:
            yield Finding(
                "cross_entropy is given probabilities, which sum to 1, and applies a softmax to them again.",
                "Give it logits: remove the softmax from the model.",
            )
            return
        valid = (
            not targets.is_floating_point()
            and (targets.ne(call.ignored) & ((targets < 0) | (targets >= outputs.shape[1]))).sum() == 0
        )
        if valid and call.value is not None:
            loss = float(nn.functional.cross_entropy(outputs, targets, ignore_index=call.ignored))
            usual = math.log(outputs.shape[1])
            if loss > 1.5 * usual + 1:
                yield _too_large("cross_entropy", loss, f"ln({outputs.shape[1]}) = {usual:.3g}")
    elif call.name == "nll_loss" and over_classes and bool((outputs.exp().sum(1) - 1).abs().max() > 1e-2):
        what = "probabilities" if sums_to_one else "values that are no logarithms of probabilities"
        yield Finding(
            f"nll_loss is given {what}.", "Give it log_softmax(outputs, 1), or use cross_entropy with the logits."
        )
    elif call.name == "kl_div" and sums_to_one:
        yield Finding("kl_div is given probabilities in place of their logarithms.", "Give it log_softmax(outputs, 1).")
    elif call.name == "binary_cross_entropy_with_logits":
        if call.made_by.startswith(("Sigmoid", "Softmax")):
            yield Finding(
                f"binary_cross_entropy_with_logits is given the results of a {call.made_by[:7].lower()}, and applies a "
                "sigmoid to them again.",
                "Give it logits: remove it from the model.",
            )
        elif call.value is not None and not call.value.ndim and float(nn.functional.softplus(outputs.abs()).mean()) > 3:
            loss = float(nn.functional.binary_cross_entropy_with_logits(outputs, targets.float()))
            if loss > 2:
                yield _too_large(call.name, loss, "ln(2) = 0.69")
    elif call.name in _OF_EACH_ELEMENT:
        yield from _look_at_range(call)


def _too_large(name: str, loss: float, usual: str) -> Finding:
    return Finding(
        f"The first {name} is {loss:.4g}, that of a model that knows nothing {usual}.",
        "Look at the scale of the inputs and of the initial weights of the last layer.",
        fails=False,
        details={"loss": loss},
    )


def _look_at_range(call: Any) -> Iterator[Finding]:
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


def check_inputs_matter(probe: Probe) -> Iterator[Finding]:
    """Evaluate a batch, at first and after five updates, with each of its inputs shuffled among the samples.

    A model whose outputs do not depend on its inputs can only learn the mean of the targets.
    """
    batch = probe.require_samples(probe.eval_batch, 4)
    size = batch.num_samples or 0
    if probe.has_own_step:
        raise NotApplicableError("The model's inputs may not come from the batch, as train_step is the program's own.")
    ignored = _ignored_inputs(probe, batch)
    if not ignored:
        return
    with probe.training() as update:  # a last layer of zeros, or a gate that is closed at first, is no mistake
        for number in range(5):
            update(probe.batches[number % len(probe.batches)], number)
        ignored = {name: all_of_them for name, all_of_them in _ignored_inputs(probe, batch).items() if name in ignored}
    for name, is_all in ignored.items():
        what = "the inputs" if is_all else f"{name!r}"
        yield Finding(
            f"Shuffling {what} among {size} samples changes neither outputs nor loss.",
            "Look whether forward() uses it, for units that are never active, and for inputs that are overwritten.",
            fails=is_all,
            details={"input": name},
        )


def _ignored_inputs(probe: Probe, batch: Batch) -> dict[str, bool]:
    """Return the inputs that change neither outputs nor loss when shuffled, and whether the model has no others."""
    size = batch.num_samples or 0
    first = probe.evaluate(batch)
    if not first.calls:
        raise NotApplicableError("The step does not call the model itself.")
    given = [tensor.data_ptr() for args, kwargs, _ in first.calls for tensor in tensors_in([args, kwargs])]
    data = batch.data
    entries = (
        data.items()
        if hasattr(data, "items")
        else enumerate(data)
        if isinstance(data, (list, tuple))
        else [("inputs", data)]
    )
    parts = {
        str(name): value
        for name, value in entries
        if isinstance(value, torch.Tensor) and value.ndim and len(value) == size and value.data_ptr() in given
    }
    varied = {name: value for name, value in parts.items() if bool((value != value[:1]).any())}
    if not varied:
        raise NotApplicableError("The model is not given the tensors of the batch as they are, or they are constant.")
    ignored = []
    for name, value in varied.items():
        shuffled = value[[*range(1, size), 0]]
        changed: Any = shuffled
        if hasattr(data, "items"):
            changed = {key: shuffled if str(key) == name else other for key, other in data.items()}
        elif isinstance(data, (list, tuple)):
            changed = type(data)(shuffled if str(key) == name else other for key, other in enumerate(data))  # type: ignore[call-arg]
        second = probe.evaluate(batch._replace(data=changed))
        if _off(first, second) < 1e-7:
            ignored.append(name)
    return {name: len(ignored) == len(varied) for name in ignored}


def check_learns(probe: Probe) -> Iterator[Finding]:
    """Train on a single small batch, for up to 300 updates, with the rates of the optimizer or the schedule's highest.

    A program that cannot fit a few samples cannot fit many.
    """
    if len(parts_of(probe.trainer.optimizer)) > 1 and probe.has_own_step:
        raise NotApplicableError("The losses of several optimizers need not fall together.")
    rates = probe.rates
    if rates and not any(rates):
        yield Finding("The learning rate is 0.", "Give the optimizer, or the schedule, another one.")
        return
    before, after, made = _fit(probe, 1.0)
    told = {"updates": made, "before": before.number, "after": after.number}
    text = f"After {made} updates on one batch, its loss is {after.number:.4g}, from {before.number:.4g}"
    calls = [p.watch.losses for p in (before, after)]
    if all(len(of_pass) == 1 and of_pass[0].value is not None for of_pass in calls):
        first, last = (float(of_pass[0].value.mean()) for of_pass in calls)
        if last > 1.2 * first and last - first > 0.1 and after.number < before.number:
            yield Finding(
                f"{text}, but {calls[0][0].name} has risen from {first:.4g} to {last:.4g}.",
                "Look at the sign of the loss.",
                details=told,
            )
            return
    fallen = before.number - after.number
    scale = max(abs(before.number), 1e-6)
    if math.isfinite(after.number) and (fallen > 5e-3 * scale or abs(before.number) < 1e-4):
        return
    if made < 20:
        raise NotApplicableError(f"There was time for only {made} updates.")
    diverged = not math.isfinite(after.number) or fallen < -scale
    other = 1e-2 if diverged else max(100.0, 1e-3 / max(rates or [1.0]))
    start, end, _ = _fit(probe, other)
    helps = math.isfinite(end.number) and start.number - end.number > 5e-2 * scale
    if helps:
        yield Finding(
            f"{text}; with {other:g} times the learning rate it falls to {end.number:.4g}.",
            f"{'Lower' if diverged else 'Raise'} the learning rate; find_lr() suggests one.",
            fails=diverged,
            details=told | {"factor": other},
        )
    else:
        yield Finding(
            f"{text}, and no other rate helps.",
            "Look at the gradients, at what the optimizer has, at zero_grad() and at what is done between them.",
            details=told,
        )


def _fit(probe: Probe, factor: float) -> tuple[Pass, Pass, int]:
    """Train on one batch with multiplied rates; return its loss before and after, with the same random numbers."""
    batch = probe.batch
    limit = probe.seconds_left - min(10.0, 0.4 * probe.seconds_left)
    groups = probe.trainer.optimizer.param_groups
    with probe.training() as update:
        for group, rate in zip(groups, probe.rates, strict=False):
            group["lr"] = rate * factor
        before = _measure(probe, batch, update)
        after, made = before, 0
        while made < 300 and probe.seconds_left > limit:
            update(batch, made)
            made += 1
            if made in _ENOUGH:
                after = _measure(probe, batch, update)
                if before.number - after.number > _ENOUGH[made] * abs(before.number):
                    return before, after, made
        return before, _measure(probe, batch, update), made


def _measure(probe: Probe, batch: Batch, update: Any) -> Pass:
    if probe.has_own_step:
        raise NotApplicableError("train_step makes its own updates.")
    passes = [probe.train(batch, seed=seed) for seed in range(3)]
    passes[0].loss = torch.tensor(sum(p.number for p in passes) / 3)
    return passes[0]


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
    if infinite and trainer.accelerator.scaler is None:
        yield Finding(
            f"Gradients of {listed(infinite)} overflow in mixed precision.", "Use bf16, or lower the loss's scale."
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


def check_reload(probe: Probe) -> Iterator[Finding]:
    """Make three updates, load the resulting state into the model as it was, and compare the outputs.

    What is not in the state is lost when the model is loaded.
    """
    batch = probe.eval_batch
    model = probe.trainer.get_model()
    with probe.training() as update:
        for number in range(3):
            update(probe.batches[number % len(probe.batches)], number)
        state = {
            name: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for name, value in model.state_dict().items()
        }
        trained = probe.evaluate(batch)
        again = probe.evaluate(batch)
    _refuse_randomness(probe, trained)
    if _off(trained, again) > _TOLERANCE:
        raise NotApplicableError("An evaluation depends on the one before.")
    with probe.training():
        try:
            model.load_state_dict(state)
        except Exception as error:
            yield Finding(
                f"Loading the model's own state raised {describe_error(error)}",
                "Correct state_dict() or load_state_dict().",
            )
            return
        loaded = probe.evaluate(batch)
    off = _off(trained, loaded)
    if off > _TOLERANCE and not probe.has_own_step:
        yield Finding(
            f"After three updates and loading the state into the model as it was, outputs or loss differ by {off:.1%}.",
            "Register tensors that training changes with register_buffer(), and modules as attributes or in an "
            "nn.ModuleList.",
            details={"difference": off},
        )
