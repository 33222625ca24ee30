"""Checks of the data: values, labels, order, leaks between datasets, and what augmentation draws."""

from __future__ import annotations

import copy
import hashlib
import math
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

from pytorch_accel_lite.data import Sample, Source
from pytorch_accel_lite.extension_tools.data_and_batches import TARGET_KEYS, nested_in, parts_in, tensors_in
from pytorch_accel_lite.extensions.checking.probe import Finding, NotApplicableError, Probe, doubt, mistake
from pytorch_accel_lite.utils import listed

# ----------------------------------------------------------------------------------------------------- reading


def independent_copy(dataset: Source) -> Source:
    """Return a copy of a dataset with its own generators but the same data; the dataset itself if that fails."""
    if not isinstance(dataset, Dataset) or type(dataset) is TensorDataset:
        return dataset
    shared: dict[int, object] = {}
    for part in nested_in(dataset, lambda value: isinstance(value, Dataset)):
        for value in vars(part).values():
            for data in (value, *(value if isinstance(value, (list, tuple)) and len(value) <= 100 else ())):
                is_long = isinstance(data, (list, tuple, dict, set)) and len(data) > 100
                if is_long or isinstance(data, (torch.Tensor, np.ndarray, nn.Module)) or hasattr(data, "iloc"):
                    shared[id(data)] = data
    try:
        return copy.deepcopy(dataset, shared)
    except Exception:
        return dataset


def owners_of_generators(data: Iterable[Source]) -> list[object]:
    """Return loaders, samplers and datasets, also nested ones, and objects in their attributes, such as transforms."""
    parts = [part for one in data for part in nested_in(one, lambda v: isinstance(v, (Dataset, DataLoader, Sampler)))]
    return [*parts, *(value for part in parts for value in getattr(part, "__dict__", {}).values())]


def _datasets(probe: Probe) -> dict[str, Source]:
    """Return the training and the evaluation dataset, also if loaders were passed in place of datasets."""
    data = probe.run.data
    datasets = {"train_dataset": data.train_dataset, "eval_dataset": data.eval_dataset}
    return {name: one.dataset if isinstance(one, DataLoader) else one for name, one in datasets.items()}


def _seed_generators(seed: int) -> None:
    """Seed only the generators of the CPU, because this is done for each sample and must be fast."""
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


def _is_indexed(dataset: Source) -> bool:
    has_both = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return has_both and not isinstance(dataset, (IterableDataset, Mapping))


def _read(dataset: Source, most: int, seconds: float = math.inf, seed: int = 0) -> dict[int, Sample]:
    """Read random samples of a dataset, or the first few of a stream. Each is read with the same random numbers."""
    end = time.monotonic() + seconds
    _seed_generators(seed)
    if not _is_indexed(dataset):
        return dict(enumerate(islice(dataset, min(most, 64)))) if isinstance(dataset, IterableDataset) else {}
    size = len(dataset)
    samples: dict[int, Sample] = {}
    for index in sorted(random.Random(0).sample(range(size), min(most, size))):
        _seed_generators(seed)
        samples[index] = dataset[index]
        if time.monotonic() > end:
            break
    return samples


def _divide(sample: Sample) -> tuple[Sample, Sample]:
    """Return the inputs and the target of a sample, if they can be told apart."""
    if isinstance(sample, Mapping):
        target = next((sample[key] for key in TARGET_KEYS if key in sample), None)
        return {key: value for key, value in sample.items() if key not in TARGET_KEYS}, target
    if isinstance(sample, (tuple, list)) and sample:
        return sample[0], sample[1] if len(sample) > 1 else None
    return sample, None


def _numbers(value: object) -> NDArray[Any] | None:
    """Return the numbers in an input as a one-dimensional array."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.float().numpy() if value.dtype is torch.bfloat16 else value.numpy()
    elif isinstance(value, (int, float, np.number)):
        value = np.asarray([value])
    elif isinstance(value, (list, tuple)) and value and all(isinstance(part, (int, float)) for part in value):
        value = np.asarray(value)
    return value.reshape(-1) if isinstance(value, np.ndarray) and value.dtype.kind in "fiub" else None


def _tensor(value: object) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.empty(0)


# -------------------------------------------------------------------------------------------------------- data


def check_data(probe: Probe) -> Iterator[Finding]:
    """Read samples of both datasets and look at their values, labels and order, and at the input of the first layer.

    A single NaN ends a run, and a model cannot learn from information that its inputs lack.
    """
    try:
        watch = probe.watch_step(probe.batch)
    except Exception:  # the first check reports it, such as wrong labels
        watch = probe.latest_watch
    inputs = torch.empty(0) if watch.first_input is None else watch.first_input.float()
    if inputs.numel() > 1 and float(inputs.abs().max()) >= 100 and float(inputs.std()) > 20:
        text = f"The first layer is given values from {float(inputs.min()):.4g} to {float(inputs.max()):.4g}."
        yield doubt(text, "Scale the inputs to about -1 to 1, such as images / 255, or standardise them.")
    losses = {call.name: call for call in watch.losses}
    binary = losses.get("binary_cross_entropy_with_logits")
    if binary is not None and bool(((binary.targets < 0) | (binary.targets > 1)).any()):
        low, high = float(binary.targets.min()), float(binary.targets.max())
        text = f"Targets of binary_cross_entropy_with_logits range from {low:g} to {high:g}."
        yield mistake(text, "They must lie between 0 and 1.", range=(low, high))
    call = losses.get("cross_entropy") or losses.get("nll_loss")
    classes = call.outputs.shape[1] if call is not None and call.outputs.ndim > 1 else 0
    if call is not None and not call.targets.is_floating_point():
        kept = call.targets[call.targets != call.ignored]
        yield from _look_at_labels("a batch", dict(enumerate(kept.flatten().tolist())), classes, False)
    are_of_data = call is not None and call.targets.equal(_tensor(_divide(probe.batch.data)[1]))  # not of the step
    for name, dataset in _datasets(probe).items():
        samples = _read(dataset, 5000, min(5.0, 0.2 * probe.seconds_left))
        yield from _look_for_nan(probe, name, samples)
        targets = {index: _numbers(_divide(sample)[1]) for index, sample in samples.items()}
        labels = {i: int(t[0]) for i, t in targets.items() if t is not None and t.size == 1 and t.dtype.kind in "iu"}
        labels = {index: label for index, label in labels.items() if call is None or label != call.ignored}
        if are_of_data:
            yield from _look_at_labels(name, labels, classes, _is_indexed(dataset) and len(labels) == len(dataset))
        if name == "train_dataset":
            yield from _look_at_order(probe, [*labels.values()])
            yield from _look_at_inputs([_divide(sample) for sample in samples.values()])
    yield from _compare_ranges(probe)


def _look_for_nan(probe: Probe, name: str, samples: Mapping[int, Sample]) -> Iterator[Finding]:
    bad = {}
    for index, sample in samples.items():
        if any(n is not None and not np.isfinite(n).all() for n in map(_numbers, parts_in([sample]))):
            bad[index] = sample
    few = [*islice(bad.values(), 2), *islice(samples.values(), 6)]
    is_finite = False
    with suppress(Exception):  # the loss may leave out NaN as missing targets
        data = probe.run.data.required_train_loader.source.collate_fn(few)
        is_finite = math.isfinite(probe.train(probe.batch._replace(data=data, num_samples=len(few)), quiet=True).loss)
    if bad and not is_finite:
        text = f"{len(bad)} of {len(samples)} samples of {name} contain infinities or NaN: {listed(bad)}."
        yield mistake(text, "Remove them, or replace the values.", samples=[*bad])


def _look_at_labels(name: str, labels: Mapping[int, int], classes: int, are_all: bool) -> Iterator[Finding]:
    """Look for labels outside of the classes, for missing classes, and for a class that most samples have."""
    counts = Counter(labels.values())
    wrong = {index: label for index, label in labels.items() if not 0 <= label < classes}
    missing = [label for label in range(min(classes, 1000)) if label not in counts]
    ((most, count),) = counts.most_common(1) or [(0, 0)]
    if wrong:
        values = listed(sorted(set(wrong.values())))
        text = f"{len(wrong)} samples of {name} have the labels {values}, but there are outputs for 0 to {classes - 1}."
        advice = "Number the classes from 0, and give the model an output for each."
        yield mistake(text, advice, samples=[*wrong], labels=sorted(set(wrong.values())))
    elif name == "train_dataset" and len(labels) >= 50 and count > 0.95 * len(labels):
        text = f"{count} of {len(labels)} samples have the label {most}: always predicting it is as accurate."
        yield doubt(text, "Weight the loss or the samples, and use other metrics.", label=most, count=count)
    elif name == "train_dataset" and missing and are_all and len(labels) >= 20 * classes:
        text = f"{len(missing)} of {classes} classes never occur: {listed(missing)}."
        yield doubt(text, "Give the model as many outputs as there are classes.", classes=missing)


def _look_at_order(probe: Probe, labels: list[int]) -> Iterator[Finding]:
    """Look whether the first batches of an epoch are in the order of the labels."""
    targets = [_tensor(_divide(batch.data)[1]) for batch in probe.batches]
    if any(target.ndim != 1 or target.is_floating_point() for target in targets) or len(set(labels)) < 2:
        return
    read = torch.cat(targets).tolist()
    share = Counter(labels).most_common(1)[0][1] / len(labels)
    if len(read) >= 16 and read in (sorted(read), sorted(read, reverse=True)) and share ** len(read) < 1e-3:
        text = f"The first {len(read)} samples of an epoch are sorted by label."
        yield doubt(text, "Shuffle the training data: train_dataloader_kwargs={'shuffle': True}, the default.")


def _look_at_inputs(pairs: list[tuple[Sample, Sample]]) -> Iterator[Finding]:
    """Look for inputs that are the same in all samples, and for a target that is among the inputs."""
    digests = {_digest(inputs) for inputs, _ in pairs}
    if len(pairs) >= 8 and len(digests) == 1 and None not in digests:
        yield mistake(f"All {len(pairs)} training samples that were read have the same inputs.", "Look at __getitem__.")
        return
    rows = [(_numbers(inputs), _numbers(target)) for inputs, target in pairs]
    numeric = [(row, target) for row, target in rows if row is not None and target is not None and target.size == 1]
    sizes = {row.size for row, _ in numeric}
    if len(numeric) < max(20, len(pairs)) or len(sizes) != 1 or not 2 <= sizes.pop() <= 10_000:
        return
    inputs, targets = (np.stack(column).astype(np.float64) for column in zip(*numeric, strict=True))
    equal = np.flatnonzero((inputs == targets).all(0)).tolist()
    if equal and len(np.unique(targets)) > 1:
        text = f"The targets equal column {listed(equal)} of the inputs, in all {len(pairs)} samples read."
        yield mistake(text, "Remove it from the inputs.", columns=equal)
    elif columns := _encoding_columns(inputs, targets[:, 0]):
        text = f"The values of columns {listed(columns)} of the inputs are the same in all samples of a label."
        yield doubt(text, "Remove them from the inputs if they encode the label.", columns=columns)


def _encoding_columns(inputs: NDArray[np.float64], labels: NDArray[np.float64]) -> list[int]:
    """Return the columns that have a single value for each label, but not the same value for all labels."""
    kinds, counts = np.unique(labels, return_counts=True)
    if not 2 <= len(kinds) <= 100 or counts.min() < 5:
        return []
    groups = [inputs[labels == kind] for kind in kinds]
    is_constant = np.stack([(group == group[0]).all(0) for group in groups]).all(0)
    return list(np.flatnonzero(is_constant & (inputs != inputs[0]).any(0)))


def _compare_ranges(probe: Probe) -> Iterator[Finding]:
    """Compare the inputs of evaluation with those of training, which should be scaled alike."""
    values = []
    for batches in (probe.batches, probe.eval_batches):
        first = [tensor for batch in batches for tensor in islice(tensors_in([_divide(batch.data)[0]]), 1)]
        floats = [tensor.flatten().float().cpu() for tensor in first if tensor.is_floating_point()]
        values.append(torch.cat([torch.empty(0), *floats]))
    (train_mean, train_std), (mean, std) = ((float(v.mean()), float(v.std())) for v in values)
    is_far = not 0.2 < (std + 1e-9) / (train_std + 1e-9) < 5 or abs(mean - train_mean) > 3 * max(std, train_std)
    if is_far and min(map(len, values)) >= 64:
        both = f"{train_mean:.3g} ± {train_std:.3g} in training, but {mean:.3g} ± {std:.3g} in evaluation"
        yield doubt(f"Inputs are {both}.", "Scale both datasets alike, with the statistics of the training data.")


# ----------------------------------------------------------------------------------------------------- leakage


def check_leakage(probe: Probe) -> Iterator[Finding]:
    """Look for samples with the same inputs, within the training data and between training and evaluation data.

    A model that has seen the evaluation data looks better than it is.
    """
    datasets = [dataset for dataset in _datasets(probe).values() if dataset is not None]
    if not all(map(_is_indexed, datasets)):
        raise NotApplicableError("The samples of streams, and of several datasets, are not compared.")
    digests = [_digests(dataset, min(8.0, 0.3 * probe.seconds_left)) for dataset in datasets]
    if not all(digests):
        raise NotApplicableError("Samples have too few values, or no tensors, to tell whether they are the same.")
    first = [_numbers(part) for part in parts_in([_divide(datasets[0][0])[0]])]
    are_tokens = all(numbers is None or numbers.dtype.kind != "f" for numbers in first)  # short texts may repeat
    train = set(digests[0].values())
    repeated = len(digests[0]) - len(train)
    if repeated > 0.3 * len(digests[0]) and not are_tokens:
        advice = "Look whether data were read twice. To give some samples more weight, use a WeightedRandomSampler."
        yield doubt(f"{repeated} of {len(digests[0])} training samples repeat others.", advice, repeated=repeated)
    both = [index for index, digest in digests[-1].items() if digest in train] if len(digests) > 1 else []
    share = len(both) / len(digests[-1])
    if len(both) >= 2 and share >= (0.2 if are_tokens else 0.01):
        text = f"{len(both)} of {len(digests[-1])} evaluation samples are training samples, too: {listed(both)}."
        advice = "Split the data before they are augmented, repeated or cut into pieces."
        yield (mistake if share >= 0.05 else doubt)(text, advice, samples=both)


def _digests(dataset: Source, seconds: float) -> dict[int, str]:
    """Return a digest of the inputs of each sample, by index, if inputs are too long to be the same by chance."""
    digests = {}
    for index, sample in _read(dataset, 50_000, seconds).items():
        inputs, _ = _divide(sample)
        numbers = [n.astype(np.float64) for part in parts_in([inputs]) if (n := _numbers(part)) is not None]
        values = np.concatenate([np.empty(0), *numbers])
        least = (8, 64) if bool((values == np.round(values)).all()) else (6, 6)
        is_rich = len(np.unique(values)) >= least[0] and values.size >= least[1]
        digest = _digest(inputs)
        if digest is not None and (is_rich or (isinstance(inputs, str) and len(inputs) > 100)):
            digests[index] = digest
    return digests


def _digest(inputs: object) -> str | None:
    """Return a digest of inputs; ``None`` if they hold something that cannot be compared."""
    digest = hashlib.sha1(usedforsecurity=False)
    for part in parts_in([inputs]):
        numbers = _numbers(part)
        if numbers is None and not isinstance(part, (str, bytes, list, tuple, Mapping)):
            return None
        if not isinstance(part, (list, tuple, Mapping)):
            digest.update(str(part).encode() if numbers is None else numbers.tobytes())
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------ augmentation


def check_augmentation(probe: Probe) -> Iterator[Finding]:
    """Read samples twice with different random numbers, and from two copies of the dataset, as two workers have them.

    Evaluation data must stay as they are. Augmentation that draws the same numbers in each worker, or in each epoch,
    augments less than it seems.
    """
    dataset, evaluation = _datasets(probe).values()
    if _digest_of_first(evaluation, 2) != _digest_of_first(evaluation, 4):
        yield mistake("An evaluation sample that is read twice differs.", "Leave random transforms out of its dataset.")
    if not isinstance(dataset, Dataset) or isinstance(dataset, IterableDataset) or type(dataset) is TensorDataset:
        return
    copies = [independent_copy(dataset) for _ in range(2)]
    if any(copied is dataset for copied in copies):
        raise NotApplicableError("The dataset cannot be copied.")
    digests, drawn = [], []
    for seed in (2, 4):
        digests.append(_digest_of_first(copies[0], seed))
        drawn.append([random.random(), float(np.random.rand()), float(torch.rand(()))])
    (one, again), other = digests, _digest_of_first(copies[1], 6)
    if one == other != again:
        text = "The dataset draws random numbers from a generator of its own, which is the same in all workers."
        advice = "Draw from the generators of torch, numpy or random, which the trainer seeds for each sample."
        yield (mistake if getattr(probe.run.data.train_loader, "num_workers", 0) else doubt)(text, advice)
    elif one == again != other:
        yield doubt("A training sample is augmented only once.", "Keep the sample as it was before the augmentation.")
    fixed = [name for name, a, b in zip(("random", "numpy", "torch"), *drawn, strict=True) if a == b]
    if fixed:
        advice = "Do not seed in __getitem__; use a generator of your own for what must be fixed."
        yield mistake(f"Reading a sample seeds the generator of {listed(fixed)}.", advice, generators=fixed)


def _digest_of_first(dataset: Source, seed: int) -> str | None:
    """Return a digest of a few samples, read after the generators were seeded with ``seed``."""
    return _digest([*_read(dataset, 3, seed=seed).values()])
