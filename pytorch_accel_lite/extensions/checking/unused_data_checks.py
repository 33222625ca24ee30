"""Checks for inputs that do not change the outputs, and targets that do not change the loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress

import torch

from pytorch_accel_lite.data import Batch
from pytorch_accel_lite.extension_tools.arguments_and_errors import is_overridden
from pytorch_accel_lite.extension_tools.data_and_batches import tensors_in
from pytorch_accel_lite.extensions.checking.probe import (
    Finding,
    LossCall,
    NotApplicableError,
    Part,
    Probe,
    distance,
    doubt,
    largest_difference,
    mistake,
    remark,
    select,
    targets_of,
    tensors_by_name,
    with_parts,
)


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
    names = " and ".join(repr(name) for name in targets_of(batch, []))
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
    targets, others = (targets_of(batch, rows) for rows in ([*range(size)], [*range(1, size), 0]))
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
