"""Checks of training: gradients, and whether the program learns."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping
from contextlib import ExitStack

import torch
from torch import nn

from pytorch_accel_lite.base.batches import Batch
from pytorch_accel_lite.tuning.probing import Finding, NotApplicableError, Pass, Probe, listed, parts_by_name

#: By how much of itself the loss of a single batch has fallen after a number of updates, if no more are needed.
_ENOUGH = {20: 0.5, 50: 0.1, 100: 0.01, 200: 0.005}


def check_gradients(probe: Probe) -> Iterator[Finding]:
    """Make four updates and look at the gradient of each parameter, and for parameters that no optimizer has.

    A parameter without a gradient, or in no optimizer, stays as it is.
    """
    called: set[nn.Module] = set()
    with ExitStack() as hooks:
        for part in probe.modules.values():
            hooks.callback(part.register_forward_pre_hook(lambda part, *_: called.add(part)).remove)
        largest, left = _largest_gradients(probe)
    infinite = [name for name, value in largest.items() if not math.isfinite(value)]
    if infinite:
        yield Finding(
            f"Gradients of {listed(infinite)} are infinite or NaN.",
            "Look for a square root or a norm at 0, a logarithm of 0, a division by 0, or too large a learning rate.",
            details={"parameters": infinite},
        )
        return
    if left:
        yield Finding(
            f"After an update, {listed(left)} still have gradients, to which those of the next are added.",
            "Clear them: optimizer_zero_grad() must call optimizer.zero_grad().",
            details={"parameters": left},
        )
    yield from _find_idle(probe, largest, called)
    yield from _find_forgotten(probe, largest)


def _largest_gradients(probe: Probe) -> tuple[dict[str, float], list[str]]:
    """Return the largest element of the gradient of each parameter in a few updates, and whose gradients are left."""
    largest: dict[str, float] = {}
    left: list[str] = []
    with probe.training() as update:
        for number in range(4):
            for name, gradient in update(probe.batches[number % len(probe.batches)], number).items():
                value = float(gradient.to_dense().abs().max()) if gradient.numel() else 0.0
                largest[name] = value if math.isnan(value) else max(largest.get(name, 0.0), value)
            if not all(map(math.isfinite, largest.values())):
                break
        left += [name for p, name in probe.optimized.items() if p.grad is not None and bool(p.grad.any())]
    return largest, left


def _find_idle(probe: Probe, largest: Mapping[str, float], called: Container[nn.Module]) -> Iterator[Finding]:
    """Look for parameters of the optimizer that are not trained."""
    optimized = probe.optimized
    owners = {parameter: part for part in probe.modules.values() for parameter in part.parameters(recurse=False)}
    without = {parameter: name for parameter, name in optimized.items() if name not in largest}
    is_unused = {p: p in owners and owners[p] not in called and not _is_read(owners[p]) for p in without}
    lost, unused = ([name for p, name in without.items() if is_unused[p] is which] for which in (False, True))
    zero = [name for p, name in optimized.items() if largest.get(name) == 0.0]
    if len(zero) < len(optimized):
        zero = [name for p, name in optimized.items() if name in zero and p.ndim > 1]
    if lost:
        yield Finding(
            f"{len(lost)} of {len(optimized)} optimized parameters get no gradient: {listed(lost)}.",
            "Look for detach(), .data, .item(), torch.no_grad(), argmax or a new tensor between them and the loss, and "
            "whether the optimizer was given the parameters of this model.",
            details={"parameters": lost},
        )
    if unused:
        yield Finding(
            f"The forward pass does not use {listed(unused)}.",
            "Call the layer in forward(), or remove it.",
            fails=False,
            details={"parameters": unused},
        )
    # Gradients of a bias may cancel; detectors leave out what no target matches.
    is_plain = all(isinstance(part, torch.Tensor) for part in parts_by_name(probe.batch.data).values())
    if (zero and is_plain and not lost) or len(zero) == len(optimized):
        yield Finding(
            f"The gradient of {listed(zero)} is zero in every update.",
            "Look for units that are never active (a ReLU on the outputs), saturated activations, or a weight of 0.",
            fails=len(zero) == len(optimized),
            details={"parameters": zero},
        )


def _find_forgotten(probe: Probe, largest: Mapping[str, float]) -> Iterator[Finding]:
    """Look for parameters that should be in an optimizer."""
    model, loss = (
        set(module.parameters()) if isinstance(module, nn.Module) else set()
        for module in (probe.trainer.get_model(), probe.trainer.loss_func)
    )
    others = {p: name for p, name in probe.names.items() if p.requires_grad and p not in probe.optimized}
    for group, fails in ((loss - model, True), (model, False)):
        forgotten = [name for p, name in others.items() if p in group and largest.get(name)]
        if forgotten:
            yield Finding(
                f"No optimizer has {listed(forgotten)}, for which gradients are computed.",
                "Give them to the optimizer, or freeze them with requires_grad_(False).",
                fails=fails,
                details={"parameters": forgotten},
            )
    hidden = [name for name, p in _hidden_parameters(probe) if p.requires_grad and p not in probe.names]
    if hidden:
        yield Finding(
            f"The model does not know of the parameters {listed(hidden)}, which are in a plain list or dict.",
            "Use nn.ModuleList or nn.ModuleDict.",
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


def check_learns(probe: Probe) -> Iterator[Finding]:
    """Train on a single small batch, for up to 300 updates, with the rates of the optimizer or the schedule's highest.

    A program that cannot fit a few samples cannot fit many.
    """
    if probe.has_own_step:
        raise NotApplicableError(f"{type(probe.trainer).__name__}.train_step makes its own updates.")
    if probe.rates and not any(probe.rates):
        yield Finding("The learning rate is 0.", "Give the optimizer, or the schedule, another one.")
        return
    before, after, made = _fit(probe, 1.0)
    details = {"updates": made, "before": before.number, "after": after.number}
    text = f"After {made} updates on one batch, its loss is {after.number:.4g}, from {before.number:.4g}"
    fallen, scale = before.number - after.number, max(abs(before.number), 1e-6)
    risen = _rise_of_loss_function(before, after)
    if fallen > 0 and risen:
        yield Finding(f"{text}, but {risen}.", "Look at the sign of the loss.", details=details)
        return
    if fallen > 5e-3 * scale or abs(before.number) < 1e-4:
        return
    if made < 20:
        raise NotApplicableError(f"There was time for only {made} updates.")
    diverged = not math.isfinite(after.number) or fallen < -scale
    factor = 1e-2 if diverged else max(100.0, 1e-3 / max(probe.rates or [1.0]))
    start, end, _ = _fit(probe, factor)
    if math.isfinite(end.number) and start.number - end.number > 5e-2 * scale:
        yield Finding(
            f"{text}; with {factor:g} times the learning rate it falls to {end.number:.4g}.",
            f"{'Lower' if diverged else 'Raise'} the learning rate; find_lr() suggests one.",
            fails=diverged,
            details=details | {"factor": factor},
        )
        return
    yield Finding(
        f"{text}, and {factor:g} times the learning rate does not help.",
        "Look at the gradients, at what the optimizer has, at zero_grad(), and at what is done between them.",
        details=details,
    )


def _rise_of_loss_function(before: Pass, after: Pass) -> str:
    """Tell whether the only loss function of torch in a step gives a larger value than before."""
    calls = [before.watch.losses, after.watch.losses]
    values = [call[0].value for call in calls if len(call) == 1]
    if len(values) < 2 or any(value is None for value in values):
        return ""
    first, last = (float(value.mean()) for value in values if value is not None)
    return f"{calls[0][0].name} has risen from {first:.4g} to {last:.4g}" if last > 1.2 * first + 0.1 else ""


def _fit(probe: Probe, factor: float) -> tuple[Pass, Pass, int]:
    """Train on one batch with multiplied rates; return its loss before and after, with the same random numbers."""
    batch = probe.batch
    limit = probe.seconds_left - min(10.0, 0.4 * probe.seconds_left)
    with probe.training() as update:
        for group, rate in zip(probe.trainer.optimizer.param_groups, probe.rates, strict=False):
            group["lr"] = rate * factor
        before = _measure(probe, batch)
        made = 0
        while made < 300 and probe.seconds_left > limit:
            update(batch, made)
            made += 1
            if made in _ENOUGH:
                after = _measure(probe, batch)
                if before.number - after.number > _ENOUGH[made] * abs(before.number):
                    return before, after, made
        return before, _measure(probe, batch), made


def _measure(probe: Probe, batch: Batch) -> Pass:
    passes = [probe.train(batch, seed=seed) for seed in range(3)]
    passes[0].loss = torch.tensor(sum(found.number for found in passes) / 3)
    return passes[0]
