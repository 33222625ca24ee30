"""Checks of the data: values, labels, order, leaks between datasets, and what augmentation draws."""

from __future__ import annotations

import copy
import hashlib
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from pytorch_accel_lite.base.batches import TARGET_KEYS, Batch, parts_in, tensors_in
from pytorch_accel_lite.base.randomness import seed_generators
from pytorch_accel_lite.tuning.probing import Finding, NotApplicableError, Probe, Watch, listed

_Sample = tuple[int, Any]


# ------------------------------------------------------------------------------------------------ reading


def independent_copy(dataset: Any) -> Any:
    """Return a copy of a dataset whose generators are its own, but whose data are not copied; itself if that fails."""
    if not isinstance(dataset, Dataset) or type(dataset) is TensorDataset:
        return dataset
    shared: dict[int, Any] = {}
    _note_data(dataset, shared, set())
    try:
        return copy.deepcopy(dataset, shared)
    except Exception:
        return dataset


def _note_data(holder: Any, shared: dict[int, Any], seen: set[int]) -> None:
    """Note the tensors, arrays and long lists that a dataset, and those in it, hold."""
    for value in getattr(holder, "__dict__", {}).values():
        for part in (value, *(value if isinstance(value, (list, tuple)) and len(value) <= 100 else ())):
            is_long = isinstance(part, (list, tuple, dict, set)) and len(part) > 100
            if is_long or isinstance(part, (torch.Tensor, np.ndarray, nn.Module)):
                shared[id(part)] = part
            elif isinstance(part, Dataset) and id(part) not in seen:
                seen.add(id(part))
                _note_data(part, shared, seen)
            elif not isinstance(part, (list, tuple, dict, random.Random, np.random.Generator)) and hasattr(
                part, "iloc"
            ):
                shared[id(part)] = part  # a data frame


def _datasets(probe: Probe) -> tuple[Any, Any]:
    """Return the training and the evaluation dataset, or those of the loaders passed in their place."""
    data = probe.run.data
    train, evaluation = (
        one.dataset if isinstance(one, DataLoader) else one for one in (data.train_dataset, data.eval_dataset)
    )
    return train, evaluation


def _read(dataset: Any, most: int, seconds: float) -> list[_Sample]:
    """Read samples of a dataset, evenly spaced, with the same random numbers for each; a few of a stream."""
    end = time.monotonic() + seconds
    if dataset is None or isinstance(dataset, Mapping):
        return []
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        seed_generators(0)
        return list(enumerate(islice(iter(dataset), min(most, 64)))) if isinstance(dataset, IterableDataset) else []
    size = len(dataset)
    samples: list[_Sample] = []
    order = range(size) if size <= most else sorted(random.Random(0).sample(range(size), most))
    for index in order:
        seed_generators(0)
        samples.append((index, dataset[index]))
        if time.monotonic() > end:
            break
    return samples


def _divide(sample: Any) -> tuple[Any, Any]:
    """Return the inputs and the target of a sample, as far as that can be told."""
    if isinstance(sample, Mapping):
        targets = [sample[key] for key in TARGET_KEYS if key in sample]
        inputs = {key: value for key, value in sample.items() if key not in TARGET_KEYS}
        return inputs, targets[0] if targets else None
    if isinstance(sample, (tuple, list)) and sample:
        return sample[0], sample[1] if len(sample) > 1 else None
    return sample, None


def _label(target: Any) -> int | None:
    """Return a target that is a whole number."""
    if isinstance(target, (torch.Tensor, np.ndarray)) and (target.ndim or "int" not in str(target.dtype)):
        return None
    if isinstance(target, (torch.Tensor, np.ndarray, np.integer, int)) and not isinstance(target, bool):
        return int(target)
    return None


def _numbers(value: Any) -> np.ndarray[Any, Any] | None:
    """Return the numbers in an input, in a row."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().float().numpy() if value.dtype is torch.bfloat16 else value.detach().cpu().numpy()
    if isinstance(value, (int, float, np.number)):
        value = np.asarray([value])
    if isinstance(value, (list, tuple)) and value and all(isinstance(part, (int, float)) for part in value):
        value = np.asarray(value)
    return value.reshape(-1) if isinstance(value, np.ndarray) and value.dtype.kind in "fiub" else None


# ---------------------------------------------------------------------------------------------------- data


def check_data(probe: Probe) -> Iterator[Finding]:
    """Read samples of both datasets and look at their values, labels and order, and at what the first layer is given.

    A single NaN ends a run, and what the model cannot see it cannot learn.
    """
    yield from _look_at_first_layer(probe)
    calls = [call for call in probe.watch.losses if call.name in ("cross_entropy", "nll_loss")]
    has_classes = len(calls) == 1 and calls[0].outputs.ndim > 1 and _is_of_batch(calls[0].targets, probe)
    classes = calls[0].outputs.shape[1] if has_classes else None
    ignored = calls[0].ignored if calls else -100
    for call in probe.watch.losses:
        if call.name == "binary_cross_entropy_with_logits" and bool(((call.targets < 0) | (call.targets > 1)).any()):
            low, high = float(call.targets.min()), float(call.targets.max())
            yield Finding(f"Targets of {call.name} range from {low:g} to {high:g}.", "They must lie between 0 and 1.")
    if has_classes and calls[0].targets.ndim == calls[0].outputs.ndim - 1:
        yield from _look_at_targets(calls[0], classes or 0)
    for name, dataset in zip(("train_dataset", "eval_dataset"), _datasets(probe), strict=True):
        samples = _read(dataset, 5000, min(5.0, 0.2 * probe.seconds_left))
        yield from _look_for_nan(probe, name, samples)
        labels = [(index, label) for index, s in samples if (label := _label(_divide(s)[1])) is not None]
        if classes and labels:
            yield from _look_at_labels(name, labels, classes, ignored, len(samples) == _length(dataset))
        if name == "train_dataset":
            yield from _look_at_order(probe, [label for _, label in labels])
            yield from _look_at_inputs(samples)
    yield from _compare_ranges(probe)


def _is_of_batch(targets: torch.Tensor, probe: Probe) -> bool:
    """Whether a loss is given the targets of the batch, rather than some that the step makes."""
    own = _divide(probe.batch.data)[1]
    return isinstance(own, torch.Tensor) and own.shape == targets.shape and bool((own == targets).all())


def _length(dataset: Any) -> int:
    return len(dataset) if hasattr(dataset, "__len__") else -1


def _look_at_first_layer(probe: Probe) -> Iterator[Finding]:
    """Look at the values that the first layer with weights is given, wherever they are scaled."""
    given: list[torch.Tensor] = []
    probe.watch = Watch()
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase)
    parts = [part for part in probe.trainer.get_model().modules() if isinstance(part, kinds)]
    hooks = [part.register_forward_pre_hook(lambda _, args: given.extend(args[:1])) for part in parts]
    try:
        probe.train(probe.batch)
    except Exception:  # the first check tells
        pass
    finally:
        for hook in hooks:
            hook.remove()
    if given and isinstance(given[0], torch.Tensor) and given[0].numel() > 1:
        values = given[0].detach().float()
        largest, spread = float(values.abs().max()), float(values.std())
        if largest >= 100 and spread > 20:
            yield Finding(
                f"The first layer is given values from {float(values.min()):.4g} to {float(values.max()):.4g}, with a "
                f"standard deviation of {spread:.3g}.",
                "Scale the inputs to about -1 to 1, such as images / 255, or standardise them.",
                fails=False,
                details={"largest": largest, "deviation": spread},
            )


def _look_at_targets(call: Any, classes: int) -> Iterator[Finding]:
    """Look for labels outside of the classes in a batch, such as those of tokens."""
    targets = call.targets
    wrong = (
        targets[(targets != call.ignored) & ((targets < 0) | (targets >= classes))]
        if not targets.is_floating_point()
        else targets[:0]
    )
    if wrong.numel():
        yield Finding(
            f"A batch has the labels {listed(sorted(set(wrong.tolist())))}, but the model's {classes} outputs are for "
            f"the labels 0 to {classes - 1}.",
            "Number the classes from 0, and give the model an output for each.",
            details={"labels": sorted(set(wrong.tolist()))},
        )


def _look_for_nan(probe: Probe, name: str, samples: list[_Sample]) -> Iterator[Finding]:
    bad = []
    for index, sample in samples:
        tensors = [part for part in parts_in([sample]) if isinstance(part, (torch.Tensor, np.ndarray, float))]
        if any(not np.isfinite(n).all() for n in map(_numbers, tensors) if n is not None and n.dtype.kind == "f"):
            bad.append((index, sample))
    if not bad:
        return
    collate = getattr(getattr(probe.run.data.train_loader, "source", None), "collate_fn", None)
    try:  # NaN may stand for targets that are missing, which the loss leaves out
        data = collate([sample for _, sample in bad[:4]])  # type: ignore[misc]
        moved = [part for part in tensors_in([data]) if part.device != probe.trainer.device]
        loss = float("nan") if moved else probe.train(Batch(data, len(bad[:4]), len(bad[:4]), True), "quiet").number
    except Exception:
        loss = float("nan")
    if not np.isfinite(loss):
        indices = [index for index, _ in bad]
        yield Finding(
            f"{len(bad)} of {len(samples)} samples of {name} contain infinities or NaN: {listed(indices)}.",
            "Remove them, or replace the values.",
            details={"samples": indices},
        )


def _look_at_labels(
    name: str, labels: list[tuple[int, int]], classes: int, ignored: int, is_all: bool
) -> Iterator[Finding]:
    wrong = [index for index, label in labels if label != ignored and not 0 <= label < classes]
    if wrong:
        values = sorted({label for index, label in labels if index in set(wrong)})
        yield Finding(
            f"{len(wrong)} samples of {name} have the labels {listed(values)}, but the model's {classes} outputs are "
            f"for the labels 0 to {classes - 1}.",
            "Number the classes from 0, and give the model an output for each.",
            details={"samples": wrong, "labels": values},
        )
        return
    if name != "train_dataset":
        return
    counts = Counter(label for _, label in labels if label != ignored)
    most, count = counts.most_common(1)[0]
    missing = [label for label in range(classes) if label not in counts]
    if len(labels) >= 50 and count > 0.95 * len(labels):
        yield Finding(
            f"{count} of {len(labels)} samples have the label {most}.",
            "A model that always predicts it is as accurate. Weight the loss or the samples, and use other metrics.",
            fails=False,
            details={"label": most, "count": count},
        )
    elif missing and is_all and len(labels) >= 20 * classes and classes <= 1000:
        yield Finding(
            f"{len(missing)} of {classes} classes never occur: {listed(missing)}.",
            "Give the model as many outputs as there are classes.",
            fails=False,
            details={"classes": missing},
        )


def _look_at_order(probe: Probe, labels: list[int]) -> Iterator[Finding]:
    """Look whether the first batches of an epoch are in the order of the labels."""
    read = []
    for batch in probe.batches:
        target = _divide(batch.data)[1]
        if isinstance(target, torch.Tensor) and target.ndim == 1 and not target.is_floating_point():
            read += target.tolist()
    if len(read) < 16 or len(set(labels)) < 2:
        return
    share = Counter(labels).most_common(1)[0][1] / len(labels)
    if read in (sorted(read), sorted(read, reverse=True)) and share ** len(read) < 1e-3:
        yield Finding(
            f"The first {len(read)} samples of an epoch are sorted by label.",
            "Shuffle the training data: train_dataloader_kwargs={'shuffle': True}, the default.",
            fails=False,
            details={"labels": read},
        )


def _look_at_inputs(samples: list[_Sample]) -> Iterator[Finding]:
    pairs = [_divide(sample) for _, sample in samples]
    digests = [_digest(inputs) for inputs, _ in pairs]
    if len(digests) >= 8 and len(set(digests)) == 1 and digests[0] is not None:
        yield Finding(
            f"All {len(digests)} training samples that were read have the same inputs.", "Look at __getitem__."
        )
        return
    rows = []
    for inputs, target in pairs:
        numbers, value = _numbers(inputs), _numbers(target)
        if isinstance(inputs, Mapping):
            parts = [part for part in map(_numbers, inputs.values()) if part is not None and part.size == 1]
            numbers = np.concatenate(parts) if parts else None
        if numbers is None or value is None or value.size != 1 or not 2 <= numbers.size <= 10_000:
            return
        rows.append((numbers, value))
    if len(rows) < 20 or len({numbers.size for numbers, _ in rows}) > 1:
        return
    inputs, targets = (np.stack(column).astype(np.float64) for column in zip(*rows, strict=True))
    equal = np.flatnonzero((inputs == targets).all(0))
    if equal.size and len(np.unique(targets)) > 1:
        yield Finding(
            f"The targets equal column {listed(equal.tolist())} of the inputs, in all {len(rows)} samples read.",
            "Remove it from the inputs.",
            details={"columns": equal.tolist()},
        )


def _compare_ranges(probe: Probe) -> Iterator[Finding]:
    """Compare the inputs of evaluation with those of training, which should be scaled alike."""
    loader = probe.run.data.eval_loader
    if loader is None:
        return
    batches = list(islice(loader.steps(1), 4))
    values = []
    for read in (probe.batches, batches):
        first = [next((t for t in tensors_in([_divide(b.data)[0]]) if t.is_floating_point()), None) for b in read]
        if any(t is None for t in first) or sum(t.numel() for t in first if t is not None) < 64:
            return
        values.append(torch.cat([t.float().flatten() for t in first if t is not None]))
    (train_mean, train_std), (mean, std) = ((float(v.mean()), float(v.std())) for v in values)
    ratio = (std + 1e-9) / (train_std + 1e-9)
    if not 0.2 < ratio < 5 or abs(mean - train_mean) > 3 * max(std, train_std):
        yield Finding(
            f"Inputs have mean {train_mean:.3g} and standard deviation {train_std:.3g} in training, but {mean:.3g} and "
            f"{std:.3g} in evaluation.",
            "Scale both datasets alike, with the statistics of the training data.",
            fails=False,
            details={"training": (train_mean, train_std), "evaluation": (mean, std)},
        )


# ------------------------------------------------------------------------------------------------- leakage


def check_leakage(probe: Probe) -> Iterator[Finding]:
    """Compare the inputs of samples by their content, within the training data and with the evaluation data.

    A model that has seen the evaluation data looks better than it is.
    """
    datasets = [one for one in _datasets(probe) if one is not None]
    if any(isinstance(one, (IterableDataset, Mapping)) or not hasattr(one, "__getitem__") for one in datasets):
        raise NotApplicableError("The samples of streams, and of several datasets, are not compared.")
    found = [_digests(dataset, min(8.0, 0.3 * probe.seconds_left)) for dataset in datasets]
    if not all(found):
        raise NotApplicableError("Samples have too few values, or no tensors, to tell whether they are the same.")
    are_tokens = _are_tokens(datasets[0])
    train = {digest for _, digest in found[0]}
    repeated = len(found[0]) - len(train)
    if repeated > 0.3 * len(found[0]) and not are_tokens:
        yield Finding(
            f"{repeated} of {len(found[0])} training samples repeat others.",
            "Look whether data were read twice. To give some samples more weight, use a WeightedRandomSampler.",
            fails=False,
            details={"repeated": repeated},
        )
    both = [index for index, digest in found[-1] if digest in train] if len(found) > 1 else []
    share = len(both) / len(found[-1])
    if len(both) >= 2 and share >= (0.2 if are_tokens else 0.01):
        yield Finding(
            f"{len(both)} of {len(found[-1])} evaluation samples are training samples, too: {listed(both)}.",
            "Split the data before they are augmented, repeated or cut into pieces.",
            fails=share >= 0.05,
            details={"samples": both},
        )


def _digests(dataset: Any, seconds: float) -> list[tuple[int, str]]:
    """Return the indices of samples that hold enough to tell them apart, with what identifies their inputs."""
    pairs = ((index, _divide(sample)[0]) for index, sample in _read(dataset, 50_000, seconds))
    found = ((index, _digest(inputs)) for index, inputs in pairs if _is_rich(inputs))
    return [(index, digest) for index, digest in found if digest is not None]


def _are_tokens(dataset: Any) -> bool:
    """Whether samples are texts or tokens, some of which are the same by nature."""
    inputs, _ = _divide(dataset[0])
    parts = [part for part in parts_in([inputs]) if not isinstance(part, (list, tuple, Mapping))]
    return all(isinstance(part, str) or (n := _numbers(part)) is None or n.dtype.kind != "f" for part in parts)


def _is_rich(inputs: Any) -> bool:
    """Whether inputs hold so much that two samples are hardly the same by chance."""
    numbers = [
        n for part in parts_in([inputs]) if not isinstance(part, (list, tuple)) and (n := _numbers(part)) is not None
    ]
    if not numbers:
        return isinstance(inputs, str) and len(inputs) > 100
    values = np.concatenate([n.astype(np.float64) for n in numbers])
    distinct = len(np.unique(values))
    whole = bool((values == np.round(values)).all())
    return distinct >= 8 and values.size >= 64 if whole else distinct >= 6


def _digest(inputs: Any) -> str | None:
    """Return what identifies inputs; ``None`` if they hold something that cannot be compared."""
    found = hashlib.sha1(usedforsecurity=False)
    for part in parts_in([inputs]):
        if isinstance(part, (list, tuple, Mapping)):
            continue
        numbers = _numbers(part)
        if numbers is None and not isinstance(part, (str, bytes)):
            return None
        found.update(str(part).encode() if numbers is None else numbers.tobytes())
    return found.hexdigest()


# -------------------------------------------------------------------------------------------- augmentation


def check_augmentation(probe: Probe) -> Iterator[Finding]:
    """Read samples twice with other random numbers, and from two copies of the dataset, as workers have.

    Evaluation data must stay as they are. Augmentation that draws the same numbers in each worker, or in each epoch,
    augments less than it seems.
    """
    dataset, evaluation = _datasets(probe)
    if evaluation is not None and not isinstance(evaluation, Mapping):
        first, second = (_sample_of(evaluation, seed) for seed in (1, 2))
        if first != second:
            yield Finding(
                "An evaluation sample that is read twice differs.",
                "Create the evaluation dataset without random transforms.",
            )
    if (
        isinstance(dataset, (IterableDataset, Mapping))
        or type(dataset) is TensorDataset
        or not isinstance(dataset, Dataset)
    ):
        return
    copies = [independent_copy(dataset) for _ in range(2)]
    read = [[_sample_of(one, seed), _sample_of(one, seed + 10)] for seed, one in zip((1, 2), copies, strict=True)]
    (one, again), (other, _) = read
    if any(copy is dataset for copy in copies):
        raise NotApplicableError("The dataset cannot be copied.")
    if one != again and one == other:
        workers = getattr(probe.run.data.train_loader, "num_workers", 0)
        yield Finding(
            "The dataset draws random numbers from a generator of its own, of which each worker has a copy: all "
            "workers draw the same, and in each epoch again.",
            "Draw from the generators of torch, numpy or random, which the trainer seeds for each sample.",
            fails=workers > 0,
            details={"workers": workers},
        )
    elif one == again and one != other:
        yield Finding(
            "The dataset augments a sample when it is first read, and then returns the same in every epoch.",
            "Cache the sample as it was before the augmentation.",
            fails=False,
        )
    states = []
    for seed in (1, 2):
        _sample_of(copies[0], seed)
        states.append([random.random(), float(np.random.rand()), float(torch.rand(()))])
    fixed = [name for name, a, b in zip(("random", "numpy", "torch"), *states, strict=True) if a == b]
    if fixed:
        yield Finding(
            f"Reading a sample seeds the generator of {listed(fixed)}: all that follows draws the same numbers.",
            "Do not seed in __getitem__; use a generator of your own for what must be fixed.",
            details={"generators": fixed},
        )


def _sample_of(dataset: Any, seed: int) -> str | None:
    """Return what identifies the first samples, read with these random numbers."""
    seed_generators(seed)
    if isinstance(dataset, IterableDataset):
        return _digest(list(islice(iter(dataset), 3)))
    return _digest([dataset[index] for index in range(min(3, len(dataset)))])
