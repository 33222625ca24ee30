"""Checks of gradients: parameters that get none, or that no optimizer has."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from pytorch_accel_lite.extensions.checking.probe import Finding, Probe, doubt, mistake, parts_by_name
from pytorch_accel_lite.utils import listed


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
