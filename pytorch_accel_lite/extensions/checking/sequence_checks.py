"""Checks of sequences: targets that are not shifted by one, later inputs that the model sees, and padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from pytorch_accel_lite.extension_tools.data_and_batches import IGNORED_LABEL, TARGET_KEYS, tensors_in
from pytorch_accel_lite.extensions.checking.probe import (
    TOLERANCE,
    Finding,
    NotApplicableError,
    Part,
    Probe,
    distance,
    doubt,
    largest_difference,
    mistake,
    tensors_by_name,
    with_parts,
)

_STEPS = {-1: "the input before", 0: "the input itself", 1: "the next input", 2: "the input after the next"}


def check_causality(probe: Probe) -> Iterator[Finding]:
    """Find out which input each output must predict, and change the later half of the sequences.

    A model that sees the tokens it must predict learns to copy them, and is useless where they are not given.

    Shift the targets once, to predict inputs[:, 1:] from inputs[:, :-1]; models of transformers shift labels. Use a
    causal mask (is_causal=True with a mask), causal padding of convolutions, and no bidirectional RNN.
    """
    batch = probe.batch
    size = probe.require_samples(batch)
    first = probe.train(batch, quiet=True).without_randomness()
    candidates: list[tuple[int, int]] = []
    for args, kwargs, _ in first.watch.calls:
        values = [value for name, value in kwargs.items() if "label" not in name and name not in TARGET_KEYS]
        for inputs in tensors_in([args, values]):
            steps = [_steps_ahead(inputs, call.targets, call.ignored, size) for call in first.watch.losses]
            candidates += [(step, inputs.shape[1]) for step in steps if step is not None]
    if not candidates:
        raise NotApplicableError("The targets are not a sequence of the inputs.")
    step, length = candidates[0]
    off = _change_of_early_outputs(probe, length) if step in (0, 1) else 0.0
    how = ""
    if step == 0 and off > TOLERANCE:
        raise NotApplicableError("The model reconstructs its inputs.")
    if step == 0:
        how = ", which each output sees, though the model is causal: it only has to copy"
    elif off > TOLERANCE:
        how = f", which the model sees: later inputs change outputs by up to {off:.1%} of the largest"
    if step != 1 or how:
        yield mistake(f"The targets are {_STEPS[step]} of each sequence{how}.", steps_ahead=step, difference=off)


def _steps_ahead(inputs: torch.Tensor, targets: torch.Tensor, ignored: int, size: int) -> int | None:
    """Return by how many steps targets are ahead of inputs; ``None`` if targets are not a sequence of the inputs."""
    if inputs.ndim < 2 or len(inputs) != size or targets.is_floating_point() != inputs.is_floating_point():
        return None
    length, width = inputs.shape[1], inputs[0, 0].numel()
    if length < 4 or targets.numel() % (size * width):
        return None
    inputs, targets = inputs.reshape(size, length, width), targets.reshape(size, -1, width).to(inputs.device)
    shares = {}
    for step in _STEPS:
        begin, end = max(0, -step), min(targets.shape[1], length - step)
        counted = targets[:, begin:end] != ignored
        if end - begin < 3 or counted.sum() < 8:
            return None
        is_same = targets[:, begin:end] == inputs[:, begin + step : end + step]
        shares[step] = float((is_same & counted).sum() / counted.sum())
    best, other = sorted(shares, key=shares.__getitem__)[:-3:-1]
    return best if shares[best] > 0.98 and shares[other] < 0.9 else None


def _change_of_early_outputs(probe: Probe, length: int) -> float:
    """Return how much the outputs for the first half of the sequences change if their second half changes."""
    batch, middle = probe.batch, length // 2
    size = batch.num_samples or 0
    parts = {n: part for n, part in tensors_by_name(batch.data).items() if part.ndim > 1 and part.shape[1] >= length}
    changed = {n: torch.cat([part[:, :middle], part.roll(-1, 0)[:, middle:]], dim=1) for n, part in parts.items()}
    passes = [probe.train(one, True) for one in (batch, batch._replace(data=with_parts(batch.data, changed)))]
    inputs = [[t for t in tensors_in(one.watch.calls[0][:2]) if t.shape[1:2] == (length,)] for one in passes]
    pairs = zip(*inputs, strict=True)
    differing = torch.stack([(a != b).transpose(0, 1).flatten(1).any(1) for a, b in pairs]).any(0)
    seen = int(differing.long().argmax()) if bool(differing.any()) else 0  # where the inputs begin to differ
    outputs = [[t for t in one.rows(size) if t.ndim > 2 and length in t.shape[1:3]] for one in passes]
    early = [[t.movedim(1 if t.shape[1] == length else 2, 1)[:, :seen] for t in tensors] for tensors in outputs]
    if not early[0] or not seen:
        raise NotApplicableError("The model's outputs do not have a row for each element of the sequences.")
    return largest_difference(*early)


_LONGER = 3  # positions of padding to add


def check_padding(probe: Probe) -> Iterator[Finding]:
    """Make the sequences of a batch longer by padding, as if a longer sample were in it.

    If padding matters, predictions depend on the other samples of the batch, and the loss on the longest of them.

    Leave padding out of means and maxima (mask them), of attention (a padding mask), of recurrent layers
    (pack_padded_sequence) and of the loss (ignore_index, or a mask).
    """
    batch = probe.batch
    size = probe.require_samples(batch)
    first = probe.train(batch, quiet=True, gradients=True).without_randomness()
    ignored = next((call.ignored for call in first.watch.losses if call.name == "cross_entropy"), IGNORED_LABEL)
    parts = tensors_by_name(batch.data)
    marker, real = _find_padding(probe, parts, ignored)
    longer = {n: _pad(str(n), part, real, ignored) for n, part in parts.items() if part.shape[:2] == real.shape}
    second = probe.train(batch._replace(data=with_parts(batch.data, longer)), quiet=True, gradients=True)
    length = real.shape[1]
    pairs = [*zip(first.rows(size), second.rows(size), strict=True)]
    pooled = [pair for pair in pairs if pair[0].shape == pair[1].shape and length not in pair[0].shape[1:]]
    pooled += [(a[real], b[:, :length][real]) for a, b in pairs if b.shape[1:2] == (length + _LONGER,)]
    off = largest_difference([one for one, _ in pooled], [other for _, other in pooled])
    off_loss = abs(first.loss - second.loss) / max(abs(first.loss), 1e-6)
    off_gradients = distance(first.gradients, second.gradients)
    if max(off, off_loss) > 1e-3 or off_gradients > 1e-2:
        yield (doubt if marker.startswith("the value") else mistake)(
            f"With {_LONGER} more positions of padding, the loss changes from {first.loss:.5g} to {second.loss:.5g}, "
            f"gradients by {off_gradients:.1%} and outputs of real positions by {off:.1%}; {marker} marks the padding.",
            losses=(first.loss, second.loss),
            gradients=off_gradients,
            outputs=off,
        )


def _find_padding(probe: Probe, parts: Mapping[Part, torch.Tensor], ignored: int) -> tuple[str, torch.Tensor]:
    """Return what marks padding in a batch, and a mask of the positions that are not padding.

    Raises:
        NotApplicableError: if nothing marks padding
    """
    rows = {name: part for name, part in parts.items() if part.ndim > 1 and part.shape[1] >= 2}
    masks = {str(name): part for name, part in rows.items() if part.ndim == 2 and "mask" in str(name).lower()}
    candidates = {name: mask.eq(mask[0, 0]) for name, mask in masks.items()}
    for name, lengths in parts.items():
        for part in rows.values() if lengths.ndim == 1 and not lengths.is_floating_point() else ():
            real = torch.arange(part.shape[1], device=lengths.device) < lengths[:, None]
            is_constant = len(part[~real]) > 0 and bool((part[~real] == part[~real][:1]).all())
            if int(lengths.max()) == part.shape[1] and (is_constant or "len" in str(name).lower()):
                candidates[f"the lengths in {name!r}"] = real
    indices: list[int | None] = [getattr(part, "padding_idx", None) for part in probe.modules.values()]
    fillers = {index for index in (*indices, ignored, IGNORED_LABEL) if index is not None}
    for name, part in rows.items():
        for value in fillers if part.ndim == 2 and not part.is_floating_point() else ():
            if bool(part.eq(value).any()):
                candidates[f"the value {value} in {name!r}"] = part.ne(value)
    for name, real in candidates.items():
        if bool(real[:, 0].all()) and not bool((real[:, 1:] & ~real[:, :-1]).any()):
            return name, real
    raise NotApplicableError("Nothing in the batch marks padding at the end: no mask, lengths, or ignored labels.")


def _pad(name: str, part: torch.Tensor, real: torch.Tensor, ignored: int) -> torch.Tensor:
    """Add padding to a part of a batch, with the values that its padding has."""
    existing = part[~real].flatten()
    value: float = 1 - int(part.flatten()[0]) if "mask" in name.lower() else 0
    if existing.numel():
        value = existing[-1].item()
    elif name in TARGET_KEYS and not part.is_floating_point():
        value = ignored
    return torch.cat([part, part.new_full((len(part), _LONGER, *part.shape[2:]), value)], dim=1)
