"""Checks of a program's steps: modes, samples that must not depend on each other, inputs, and state."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.data import RandomSampler

from pytorch_accel_lite.base.batches import Batch, tensors_in
from pytorch_accel_lite.optimizers.freezing import stays_in_eval
from pytorch_accel_lite.tuning.probing import (
    TOLERANCE,
    Finding,
    NotApplicableError,
    Probe,
    change,
    describe_error,
    differences,
    listed,
    parts_by_name,
    sample_tensors,
    select,
    with_parts,
)


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


def check_determinism(probe: Probe) -> Iterator[Finding]:
    """Evaluate a batch twice with other random numbers, and look at what is active in each mode.

    An evaluation with dropout, or with batch norm that follows the batch, is worse than the model, and never the same.
    """
    yield from _find_wrong_modes(probe)
    with probe.training() as update:
        before = {name: part.training for name, part in probe.modules.items()}
        update(probe.batch, 0)
        changed = [name for name, part in probe.modules.items() if part.training != before[name]]
    if any(isinstance(probe.modules[name], (_BatchNorm, _DropoutNd)) for name in changed):
        yield Finding(
            f"A training step leaves another mode than it began with in {listed(changed)}.",
            "Call model.train() after an evaluation within the step, or use trainer.evaluate().",
            details={"modules": changed},
        )
    first, second, again = (probe.evaluate(probe.eval_batch, seed) for seed in (0, 1, 0))
    if first.watch.dropouts:
        functions = sorted(set(first.watch.dropouts))
        yield Finding(
            f"Dropout is active in evaluation ({listed(functions)}).",
            "Pass training=self.training to functional dropout, dropout_p=p if self.training else 0.0 to attention, "
            "and let eval_epoch_start() call model.eval().",
            details={"functions": functions},
        )
        return
    if change(first, again) > TOLERANCE:
        raise NotApplicableError("An evaluation depends on the one before: the program keeps a state between batches.")
    off = change(first, second)
    if off > TOLERANCE and not any(call.name == "cross_entropy" for call in first.watch.losses):
        raise NotApplicableError("The evaluation draws random numbers of its own, as those of generative models do.")
    if off > TOLERANCE and sample_tensors(first.outputs, probe.eval_batch.num_samples or 0):
        drawn = sorted(set(first.watch.random))
        yield Finding(
            f"Two evaluations of a batch differ by {off:.1%} of the largest output; the program draws "
            f"{listed(drawn) or 'random numbers'}.",
            "Draw noise only if self.training.",
            fails=False,
            details={"difference": off, "functions": drawn},
        )


def _find_wrong_modes(probe: Probe) -> Iterator[Finding]:
    """Look for dropout and batch norm that are in the wrong mode when they are called."""
    parts = {name: part for name, part in probe.modules.items() if isinstance(part, (_DropoutNd, _BatchNorm))}
    parts = {name: part for name, part in parts.items() if getattr(part, "p", 1) and not stays_in_eval(part)}
    used: dict[str, bool] = {}
    model = probe.trainer.get_model()

    def note(part: nn.Module, _: Any, name: str) -> None:
        used[name] = part.training or (model.training and is_training)

    is_training = True

    with ExitStack() as hooks:
        for name, part in parts.items():
            hooks.callback(part.register_forward_pre_hook(partial(note, name=name)).remove)
        if not probe.has_own_step:
            probe.train(probe.batch)
            if used and not any(used.values()):
                yield Finding(
                    f"The model trains in evaluation mode, in which {listed(used)} have no effect.",
                    "Let train_epoch_start() call super().train_epoch_start(), or model.train().",
                    fails=False,
                    details={"modules": [*used]},
                )
            used.clear()
        is_training = False
        probe.evaluate(probe.eval_batch)
    active = [name for name, training in used.items() if training]
    if active:
        yield Finding(
            f"In an evaluation, these are in training mode: {listed(active)}.",
            "Let eval_epoch_start() call super().eval_epoch_start(), and no forward() call train().",
            details={"modules": active},
        )


def check_batch_independence(probe: Probe) -> Iterator[Finding]:
    """Evaluate a batch, and each half of it alone.

    A prediction must not depend on which other samples happen to be in the batch.
    """
    batch = probe.require_samples(probe.eval_batch, 4)
    size = batch.num_samples or 0
    whole = _rows_of(probe, batch)
    halves = [range(size // 2), range(size // 2, size)]
    parts = [_rows_of(probe, select(batch, rows), whole) for rows in halves]
    alike = [
        number
        for number, rows in whole.items()
        if all(part[number].shape == (len(half), *rows.shape[1:]) for part, half in zip(parts, halves, strict=True))
    ]
    together = [torch.cat([part[number] for part in parts]) for number in alike]
    off = differences([whole[number] for number in alike], together)
    if off.max() > TOLERANCE:
        yield Finding(
            f"In a batch of half the size, outputs of sample {int(off.argmax())} differ by {float(off.max()):.1%} of "
            "the largest.",
            "Look for a softmax, norm, mean or maximum over the first dimension or over all, for batch_first=True "
            "missing in an RNN or in attention, for view() that mixes samples, and for batch norm in training mode.",
            details={"difference": float(off.max()), "samples": off.gt(TOLERANCE).nonzero().flatten().tolist()},
        )


def _rows_of(probe: Probe, batch: Batch, like: Iterable[int] | None = None) -> dict[int, torch.Tensor]:
    found = probe.evaluate(batch)
    found.refuse_randomness()
    rows = sample_tensors(found.outputs, batch.num_samples or 0, like)
    if not rows:
        raise NotApplicableError("The model's outputs do not have a row for each sample.")
    return rows


def check_permutation(probe: Probe) -> Iterator[Finding]:
    """Evaluate a batch in another order.

    Outputs must follow their samples, and the loss must not depend on their order.
    """
    batch = probe.require_samples(probe.eval_batch, 4)
    size = batch.num_samples or 0
    order = list(range(size))[::-1]
    first, second = probe.evaluate(batch), probe.evaluate(select(batch, order))
    first.refuse_randomness()
    one, other = (sample_tensors(found.outputs, size) for found in (first, second))
    off = differences([tensor[order] for tensor in one.values()], [*other.values()]) if one else torch.zeros(size)
    if off.max() > TOLERANCE:
        yield Finding(
            f"With its samples in reverse order, outputs of a batch differ by {float(off.max()):.1%} of the largest.",
            "Look for operations along the first dimension, and for batch_first=True missing in an RNN or attention.",
            details={"difference": float(off.max())},
        )
        return
    if not isinstance(getattr(probe.run.data.train_loader, "sampler", None), RandomSampler):
        return  # the order of the batch may be meant
    # Batches of pairs or triplets are the same if these are moved as a whole.
    rolled = [probe.evaluate(select(batch, [*order[by:], *order[:by]])).number for by in (2, 3, 4, size // 2)]
    moved = [abs(second.number - first.number), *(abs(number - second.number) for number in rolled)]
    if all(difference > TOLERANCE * max(abs(first.number), 1e-6) for difference in moved):
        yield Finding(
            f"The loss of a batch is {first.number:.6g}, and {second.number:.6g} with its samples in reverse order.",
            "Look for targets shifted along the first dimension: targets[1:] in place of targets[:, 1:].",
            fails=False,
            details={"losses": (first.number, second.number)},
        )
    elif not one:
        raise NotApplicableError("The model's outputs do not have a row for each sample.")


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
    if first.loss is not None and not math.isfinite(first.number):
        raise NotApplicableError("The loss is infinite or NaN.")
    given = {tensor.data_ptr() for args, kwargs, _ in first.calls for tensor in tensors_in([args, kwargs])}
    parts = {
        name: part
        for name, part in parts_by_name(batch.data).items()
        if isinstance(part, torch.Tensor) and part.ndim and len(part) == size and part.data_ptr() in given
    }
    varied = {name: part for name, part in parts.items() if bool((part != part[:1]).any())}
    if not varied:
        raise NotApplicableError("The model is not given the tensors of the batch as they are, or they are constant.")
    ignored = []
    for name, part in varied.items():
        shuffled = batch._replace(data=with_parts(batch.data, {name: part[[*range(1, size), 0]]}))
        if change(first, probe.evaluate(shuffled)) < 1e-7:
            ignored.append(str(name))
    return {name: len(ignored) == len(varied) for name in ignored}


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
    trained.refuse_randomness()
    if change(trained, again) > TOLERANCE:
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
    off = change(trained, loaded)
    if off > TOLERANCE and not probe.has_own_step:
        yield Finding(
            f"After three updates and loading the state into the model as it was, outputs or loss differ by {off:.1%}.",
            "Register tensors that training changes with register_buffer(), and modules as attributes or in an "
            "nn.ModuleList.",
            details={"difference": off},
        )
