"""Checks of what a model computes: its modes, the samples of a batch, sequences and padding, and its state."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.data import RandomSampler

from pytorch_accel_lite.data import Batch
from pytorch_accel_lite.extending import (
    TARGET_KEYS,
    describe_error,
    infer_batch_size,
    is_single_sample,
    registered_objects,
    tensors_in,
)
from pytorch_accel_lite.extending_callbacks import plain_parts
from pytorch_accel_lite.extensions.checking.probing import (
    TOLERANCE,
    Finding,
    NotApplicableError,
    Part,
    Probe,
    Update,
    Watch,
    distance,
    doubt,
    largest_difference,
    mistake,
    remark,
    select,
    tensors_by_name,
    with_parts,
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


# ------------------------------------------------------------------------------------------------------- modes


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
    elif off_after > TOLERANCE and registered_objects(probe.trainer):
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


# --------------------------------------------------------------------------------------- samples and their order


def check_batch_independence(probe: Probe) -> Iterator[Finding]:
    """Evaluate a batch, then its second half together with other samples.

    A prediction must not depend on which other samples happen to be in the batch, or before it in a packed row.

    Look for a softmax, norm, mean or maximum over the first dimension or over all, for batch_first=True missing in an
    RNN or in attention, for view() that mixes samples, and for batch norm in training mode. Packed sequences must be
    kept apart: PackSequences(model) finds out how.
    """
    batch = probe.eval_batch
    if _is_packed(batch.data):
        yield from _depends_on_first_sequence(probe, batch)
        return
    size = probe.require_samples(batch, 4)
    kept = range(size // 2, size)
    before = probe.evaluate(batch).without_randomness().rows(size)
    after = probe.evaluate(select(batch, [*[*kept, *kept][: size // 2], *kept])).rows(size)
    off = {row: largest_difference([rows[row] for rows in before], [rows[row] for rows in after]) for row in kept}
    most = max(off.values())
    if most > TOLERANCE:
        text = f"With other samples in its batch, the outputs of a sample differ by {most:.1%} of the largest."
        yield mistake(text, difference=most, samples=[row for row, apart in off.items() if apart > TOLERANCE])


def _is_packed(data: object) -> bool:
    """Whether a batch is a single row of several sequences, with positions that restart at each sequence."""
    positions = data.get("position_ids") if isinstance(data, Mapping) else None
    return isinstance(positions, torch.Tensor) and positions.ndim == 2 and len(positions) == 1


def _depends_on_first_sequence(probe: Probe, batch: Batch) -> Iterator[Finding]:
    """Evaluate a row of packed sequences, and the same row with other tokens in its first sequence."""
    tokens, positions = batch.data.get("input_ids"), batch.data["position_ids"]
    starts = (positions[0].diff() != 1).nonzero()[:, 0].tolist()
    if not starts or not isinstance(tokens, torch.Tensor) or tokens.shape != positions.shape:
        raise NotApplicableError("The batch is a row with a single sequence.")
    begin = starts[0] + 1
    changed = torch.cat([tokens.flip(1)[:, :begin], tokens[:, begin:]], dim=1)
    batches = (batch._replace(data={**batch.data, "input_ids": ids}) for ids in (tokens, changed))
    numbers = [probe.evaluate(packed).without_randomness().numbers for packed in batches]
    later = [[out[:, begin:] for out in outputs if out.shape[:2] == tokens.shape] for outputs in numbers]
    if not later[0]:
        raise NotApplicableError("The model's outputs do not have a value for each token of the row.")
    off = largest_difference(*later)
    if off > TOLERANCE:
        yield mistake(f"The first sequence of a packed row changes outputs of the others by {off:.1%}.", difference=off)


def check_permutation(probe: Probe) -> Iterator[Finding]:
    """Evaluate a batch in another order.

    Outputs must follow their samples, and the loss must not depend on their order.

    Look for operations along the first dimension, such as targets[1:] in place of targets[:, 1:], and for
    batch_first=True missing in an RNN or in attention.
    """
    batch = probe.eval_batch
    size = probe.require_samples(batch, 4)
    order = [*range(size)][::-1]
    first, second = probe.evaluate(batch).without_randomness(), probe.evaluate(select(batch, order))
    if isinstance(getattr(probe.run.data.train_loader, "sampler", None), RandomSampler):
        # Pairs or triplets lie one after another, or in two halves of the batch. The loss is the same if they stay
        # together.
        half = size // 2
        keys: list[Callable[[int], int | tuple[int, int]]] = [lambda row: -(row // 2), lambda row: -(row // 3)]
        keys.append(lambda row: (row // half, -row))
        moved = [probe.evaluate(select(batch, sorted(range(size), key=key))).loss - first.loss for key in keys]
        if min(map(abs, [*moved, second.loss - first.loss])) > TOLERANCE * max(abs(first.loss), 1e-6):
            text = f"The loss of a batch is {first.loss:.6g}, and {second.loss:.6g} with its samples in reverse order."
            yield doubt(text, losses=(first.loss, second.loss))
            return
    off = largest_difference([rows[order] for rows in first.rows(size)], second.rows(size))
    if off > TOLERANCE:
        yield mistake(f"In reverse order, outputs of the samples differ by {off:.1%} of the largest.", difference=off)


def check_inputs_matter(probe: Probe) -> Iterator[Finding]:
    """Evaluate a batch, at first and after five updates, with each of its inputs shuffled among the samples.

    A model whose outputs do not depend on its inputs can only learn the mean of the targets.

    Look whether forward() uses the input, for units that are never active, and for inputs that are overwritten.
    """
    batch = probe.eval_batch
    size = probe.require_samples(batch, 4)
    calls = probe.evaluate(batch).watch.calls
    passed = {tensor.data_ptr() for args, kwargs, _ in calls for tensor in tensors_in([args, kwargs])}
    inputs = {n: t for n, t in tensors_by_name(batch.data).items() if len(t) == size and t.data_ptr() in passed}
    inputs = {name: tensor for name, tensor in inputs.items() if bool((tensor != tensor[:1]).any())}
    if not inputs:
        raise NotApplicableError("The model is not given the tensors of the batch as they are, or they are constant.")
    with probe.training() as update:
        ignored = _ignored(probe, inputs)
        for number in range(5 if ignored else 0):  # a last layer of zeros, or a gate closed at first, is no mistake
            update(probe.batches[number % len(probe.batches)], number)
        ignored = _ignored(probe, ignored)
    for name in ignored:
        text = f"Shuffling {name!r} among the samples of a batch changes neither outputs nor loss."
        yield (mistake if len(ignored) == len(inputs) else doubt)(text, input=name)


def _ignored(probe: Probe, inputs: Mapping[Part, torch.Tensor]) -> dict[Part, torch.Tensor]:
    """Return the inputs that change neither outputs nor loss when shuffled, in an evaluation or in training.

    Training counts because, in an evaluation, a deep network whose batch norm has seen few batches gives nearly the
    same outputs for all inputs.
    """
    batch = probe.eval_batch
    order = [*range(1, batch.num_samples or 0), 0]
    shuffled = {n: batch._replace(data=with_parts(batch.data, {n: part[order]})) for n, part in inputs.items()}
    for compute in (probe.evaluate, probe.evaluate if probe.has_own_step else probe.train):
        first = compute(batch).numbers if inputs else []
        inputs = {
            n: part for n, part in inputs.items() if largest_difference(first, compute(shuffled[n]).numbers) < 1e-7
        }
    return dict(inputs)


# --------------------------------------------------------------------------------------------------- sequences

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


# ----------------------------------------------------------------------------------------------------- padding

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
    ignored = next((call.ignored for call in first.watch.losses if call.name == "cross_entropy"), -100)
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
    fillers: set[Any] = {getattr(part, "padding_idx", None) for part in probe.modules.values()}
    for name, part in rows.items():
        for value in {*fillers, ignored, -100} - {None} if part.ndim == 2 and not part.is_floating_point() else ():
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


# ------------------------------------------------------------------------------------------------------- state


def check_reload(probe: Probe) -> Iterator[Finding]:
    """Load a training state of the second update into the program as it was before, compare the outputs, and train on.

    Anything that is not in the state is lost when a model is loaded or a run is resumed.

    Register everything that training changes: tensors with register_buffer(), modules as attributes or in an
    nn.ModuleList, and objects of the trainer with register_for_checkpointing().
    """
    before = _plain_tensors(probe)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "state")
        with probe.training() as update:
            _update(probe, update, (0, 1))
            after = _plain_tensors(probe)
            trained = _outputs(probe)
            probe.trainer.save_training_state(path)
            uninterrupted = _update(probe, update, (2, 3))
        with probe.training() as update:
            try:
                probe.trainer.load_training_state(path)
            except Exception as error:
                yield mistake(f"Loading the program's own state raised {describe_error(error)}")
                return
            off = largest_difference(trained, _outputs(probe))
            different = _differ(uninterrupted, _update(probe, update, (2, 3)))
    lost = [name for name, value in after.items() if name not in before or not torch.equal(value, before[name])]
    reason = f" Training changes {listed(lost)}, which no state contains." if lost else ""
    if off > TOLERANCE:
        text = f"After loading what two updates gave into the model as it was, outputs differ by {off:.1%}.{reason}"
        yield mistake(text, difference=off, lost=lost)
    elif different:
        with probe.training() as update:
            if _differ(uninterrupted, _update(probe, update, range(4))):
                raise NotApplicableError("Two runs from the same start have other bits.")
        text = f"A run that is resumed after two updates has other bits than one that is not, in {listed(different)}."
        yield doubt(text + reason, parameters=different, lost=lost)


def _update(probe: Probe, update: Update, numbers: Iterable[int]) -> dict[str, torch.Tensor]:
    """Make updates with the batches that have these numbers, and return copies of the parameters."""
    for number in numbers:
        update(probe.batches[number % len(probe.batches)], number)
    return {name: parameter.detach().clone() for parameter, name in probe.names.items()}


def _outputs(probe: Probe) -> list[torch.Tensor]:
    """Return the results of an evaluation; an empty list if it is not possible, or draws random numbers."""
    if probe.has_own_step:
        return []
    result = probe.evaluate(probe.eval_batch)
    return [] if result.is_random else result.numbers


def _plain_tensors(probe: Probe) -> dict[str, torch.Tensor]:
    """Return copies of the tensors, by name, that are plain attributes and therefore in no state."""
    owners = probe.modules if probe.trainer.saves_attributes else {"trainer": probe.trainer, **probe.modules}
    values = {
        f"{name}.{key}".lstrip("."): value for name, owner in owners.items() for key, value in vars(owner).items()
    }
    return {name: value.detach().clone() for name, value in values.items() if isinstance(value, torch.Tensor)}


def _differ(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> list[str]:
    return [name for name in first if not all(map(_are_equal, plain_parts(first[name]), plain_parts(second[name])))]


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.nan_to_num(), other.nan_to_num())
