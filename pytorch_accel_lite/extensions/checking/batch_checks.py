"""Checks of the samples of a batch, which must not depend on each other or on their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.utils.data import RandomSampler

from pytorch_accel_lite.data import Batch
from pytorch_accel_lite.extension_tools.data_and_batches import is_packed
from pytorch_accel_lite.extensions.checking.probe import (
    TOLERANCE,
    Finding,
    NotApplicableError,
    Probe,
    doubt,
    largest_difference,
    mistake,
    select,
)


def check_batch_independence(probe: Probe) -> Iterator[Finding]:
    """Evaluate a batch, then its second half together with other samples.

    A prediction must not depend on which other samples happen to be in the batch, or before it in a packed row.

    Look for a softmax, norm, mean or maximum over the first dimension or over all, for batch_first=True missing in an
    RNN or in attention, for view() that mixes samples, and for batch norm in training mode. Packed sequences must be
    kept apart: PackSequences(model) finds out how.
    """
    batch = probe.eval_batch
    if is_packed(batch.data):
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
