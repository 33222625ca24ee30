"""Checks of programs whose samples are sequences: what is predicted from what, and padding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from pytorch_accel_lite.base.batches import TARGET_KEYS, Batch, tensors_in
from pytorch_accel_lite.tuning.probing import (
    TOLERANCE,
    Finding,
    NotApplicableError,
    Probe,
    differences,
    distance,
    parts_by_name,
    with_parts,
)

_LONGER = 3  # positions of padding to add
_STEPS = {-1: "the input before", 0: "the input itself", 1: "the next input", 2: "the input after the next"}


def check_causality(probe: Probe) -> Iterator[Finding]:
    """Find out which input each output must predict, and change the later half of the inputs.

    A model that sees what it must predict learns to copy it, and is worth nothing where that is missing.
    """
    batch = probe.require_samples(probe.batch)
    size = batch.num_samples or 0
    found = probe.train(batch, "quiet")
    if found.watch.random:
        raise NotApplicableError("The step draws random numbers.")
    for args, kwargs, output in found.calls:
        inputs = [value for name, value in kwargs.items() if "label" not in name and name not in TARGET_KEYS]
        given = [t for t in tensors_in([args, inputs]) if t.ndim > 1 and len(t) == size and t.shape[1] >= 4]
        matches = [
            (t, step)
            for t in given
            for c in found.watch.losses
            if (step := _predicted(t, c.targets, c.ignored)) is not None
        ]
        if matches:
            yield from _judge(probe, batch, args, kwargs, output, *matches[0])
            return
    raise NotApplicableError("The targets are not a sequence of the inputs.")


def _predicted(inputs: torch.Tensor, targets: torch.Tensor, ignored: int) -> int | None:
    """Return by how many steps targets are ahead of inputs; ``None`` if they are no such sequence."""
    size, length, width = len(inputs), inputs.shape[1], inputs[0, 0].numel()
    if targets.numel() % (size * width) or targets.is_floating_point() != inputs.is_floating_point():
        return None
    inputs, targets = inputs.reshape(size, length, width), targets.reshape(size, -1, width).to(inputs.device)
    shares = {}
    for step in _STEPS:
        begin, end = max(0, -step), min(targets.shape[1], length - step)
        if end - begin < 3:
            return None
        wanted, given = targets[:, begin:end], inputs[:, begin + step : end + step]
        counted = wanted != ignored
        if counted.sum() < 8:
            return None
        shares[step] = float(((wanted == given) & counted).sum() / counted.sum())
    best = max(shares, key=shares.__getitem__)
    others = max(share for step, share in shares.items() if step != best)
    return best if shares[best] > 0.98 and others < 0.9 else None


def _judge(
    probe: Probe, batch: Batch, args: Any, kwargs: Any, output: Any, inputs: torch.Tensor, step: int
) -> Iterator[Finding]:
    size, length = inputs.shape[:2]
    middle = length // 2
    changed = inputs.clone()
    changed[:, middle:] = inputs[[*range(1, size), 0], middle:]

    def replace(part: Any) -> Any:
        return changed if part is inputs else part

    other = probe.call_model(batch, [*map(replace, args)], {name: replace(part) for name, part in kwargs.items()})
    before, after = (_early(outputs, size, length, middle) for outputs in (output, other))
    if not before:
        raise NotApplicableError("The model's outputs do not have a row for each element of the sequences.")
    off = float(differences(before, after).max())
    details = {"difference": off, "steps_ahead": step}
    text = f"The targets are {_STEPS[step]} of each sequence"
    if step in (2, -1):
        yield Finding(
            f"{text}.",
            "Shift once: targets[:, t] = inputs[:, t + 1]. Models of transformers shift the labels themselves.",
            details=details,
        )
    elif step == 1 and off > TOLERANCE:
        yield Finding(
            f"{text}, which the model sees: inputs from position {middle} on change the outputs before it by up to "
            f"{off:.1%} of the largest.",
            "Use a causal mask (is_causal=True with a mask), causal padding of convolutions, and no bidirectional RNN.",
            details=details,
        )
    elif step == 0 and off <= TOLERANCE:
        yield Finding(
            f"{text}, which each output sees, though the model is causal: it only has to copy.",
            "Shift the targets: predict inputs[:, 1:] from inputs[:, :-1].",
            details=details,
        )
    elif step == 0:
        raise NotApplicableError("The model reconstructs its inputs.")


def _early(outputs: Any, size: int, length: int, middle: int) -> list[torch.Tensor]:
    """Return the outputs at the positions before the middle."""
    found = []
    for tensor in tensors_in([outputs]):
        if tensor.is_floating_point() and len(tensor) == size and tensor.ndim > 2:
            axes = [axis for axis in (1, 2) if tensor.shape[axis] == length]
            if len(axes) == 1:
                found.append(tensor.detach().float().movedim(axes[0], 1)[:, :middle])
    return found


# -------------------------------------------------------------------------------------------------- padding


class _Padded(NamedTuple):
    """Sequences of a batch.

    :param length: length of the sequences with their padding
    :param real: which positions are no padding, for each sample
    :param by: what tells
    :param is_sure: whether that is made to tell padding
    """

    length: int
    real: torch.Tensor
    by: str
    is_sure: bool


def check_padding(probe: Probe) -> Iterator[Finding]:
    """Make the sequences of a batch longer by padding, as if a longer sample were in it.

    Otherwise predictions depend on the other samples of the batch, and longer padding means another loss.
    """
    batch = probe.require_samples(probe.batch)
    size = batch.num_samples or 0
    parts = parts_by_name(batch.data)
    found = probe.train(batch, "quiet", gradients=True)
    if found.watch.random:
        raise NotApplicableError("The step draws random numbers.")
    ignored = [call.ignored for call in found.watch.losses if call.name == "cross_entropy"]
    padded = _find_padding(probe, parts, size, ignored)
    longer = {name: _pad(name, part, padded, ignored) for name, part in parts.items()}
    changed = batch._replace(data=with_parts(batch.data, longer))
    other = probe.train(changed, "quiet", gradients=True)
    off_loss = abs(found.number - other.number) / max(abs(found.number), 1e-6)
    off_gradients = distance(found.gradients, other.gradients)
    off = _off_at_real_positions(found.outputs, other.outputs, padded, size)
    if max(off, off_loss) > 1e-3 or off_gradients > 1e-2:
        yield Finding(
            f"With {_LONGER} more positions of padding, the loss changes from {found.number:.5g} to "
            f"{other.number:.5g}, gradients by {off_gradients:.1%} and outputs of real positions by {off:.1%}; "
            f"{padded.by} told what is padding.",
            "Leave padding out of means and maxima (mask them), of attention (a padding mask), of recurrent layers "
            "(pack_padded_sequence) and of the loss (ignore_index, or a mask).",
            fails=padded.is_sure,
            details={"losses": (found.number, other.number), "gradients": off_gradients, "outputs": off},
        )


def _find_padding(probe: Probe, parts: dict[Any, Any], size: int, ignored: list[int]) -> _Padded:
    """Find out where a batch is padded.

    :raises NotApplicableError: if nothing tells
    """
    tensors = {
        str(name): part for name, part in parts.items() if isinstance(part, torch.Tensor) and len(part) == size > 0
    }
    rows = {name: part for name, part in tensors.items() if part.ndim > 1 and part.shape[1] >= 2}
    integers = {name: part for name, part in rows.items() if part.ndim == 2 and not part.is_floating_point()}
    embeddings = [part for part in probe.trainer.get_model().modules() if isinstance(part, nn.Embedding)]
    fillers = {part.padding_idx for part in embeddings if part.padding_idx is not None}
    found = _by_mask(rows) or _by_lengths(tensors, rows) or _by_value(integers, {*ignored, -100}, len(rows) == 1)
    found = found or _by_value(integers, fillers, False)
    if found is None:
        raise NotApplicableError("Nothing in the batch tells padding: no mask, lengths, or ignored labels.")
    return found


def _by_mask(rows: Mapping[str, torch.Tensor]) -> _Padded | None:
    for name, part in rows.items():
        if part.ndim == 2 and "mask" in name.lower() and bool(((part == 0) | (part == 1)).all()):
            is_inverted = "padding" in name.lower() and bool((part[:, 0] == 0).all())
            real = part == (0 if is_inverted else 1)
            if not _is_at_the_end(real):
                raise NotApplicableError(f"{name!r} does not tell padding at the end of sequences.")
            return _Padded(part.shape[1], real, name, True)
    return None


def _by_lengths(tensors: Mapping[str, torch.Tensor], rows: Mapping[str, torch.Tensor]) -> _Padded | None:
    for name, lengths in tensors.items():
        if lengths.ndim != 1 or lengths.is_floating_point() or int(lengths.min()) < 1:
            continue
        for part in rows.values():
            real = torch.arange(part.shape[1], device=lengths.device) < lengths[:, None]
            rest = part[~real.to(part.device)]
            is_constant = len(rest) > 0 and bool((rest == rest[:1]).all())
            if int(lengths.max()) == part.shape[1] and (is_constant or "len" in name.lower()):
                return _Padded(part.shape[1], real, f"the lengths in {name!r}", True)
    return None


def _by_value(rows: Mapping[str, torch.Tensor], values: Iterable[int], is_sure: bool) -> _Padded | None:
    for name, part in rows.items():
        for value in values:
            real = part != value
            if not bool(real.all()) and _is_at_the_end(real):
                return _Padded(part.shape[1], real, f"the value {value} in {name!r}", is_sure)
    return None


def _is_at_the_end(real: torch.Tensor) -> bool:
    """Whether all sequences begin with a real position, and none has one after padding."""
    return bool(real[:, 0].all()) and not bool((real[:, 1:] & ~real[:, :-1]).any())


def _pad(name: Any, part: Any, padded: _Padded, ignored: list[int]) -> Any:
    """Add padding to a part of a batch, of the kind that it has."""
    real = padded.real
    if not isinstance(part, torch.Tensor) or part.ndim < 2 or part.shape[:2] != real.shape:
        return part
    value: Any = 0
    existing = part[~real.to(part.device)]
    if existing.numel():
        value = existing.flatten()[-1].item()
    elif "mask" in str(name).lower():
        value = 1 - int(part[0, 0])
    elif str(name) in TARGET_KEYS and not part.is_floating_point():
        value = ignored[0] if ignored else -100
    more = part.new_full((len(part), _LONGER, *part.shape[2:]), value)
    return torch.cat([part, more], dim=1)


def _off_at_real_positions(first: Any, second: Any, padded: _Padded, size: int) -> float:
    """Return how much outputs differ, at positions that are no padding where they have such."""
    off = 0.0
    for one, other in zip(tensors_in([first]), tensors_in([second]), strict=False):
        if not one.is_floating_point() or len(one) != size or one.ndim < 2 or len(other) != size:
            continue
        one, other = one.detach().float(), other.detach().float()
        if one.shape[1] == padded.length and other.shape[1] == padded.length + _LONGER:
            other = other[:, : padded.length]
            if one.shape == other.shape:
                real = padded.real.to(one.device)
                off = max(off, float((one - other)[real].abs().max() / one[real].abs().max().clamp(min=1e-12)))
        elif one.shape == other.shape and padded.length not in one.shape[1:]:
            off = max(off, float(differences([one], [other]).max()))
    return off
