"""A check of states: whether they hold all that training changes."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from pytorch_accel_lite.extending import USER_ATTRIBUTES
from pytorch_accel_lite.extension_tools.arguments_and_errors import describe_error
from pytorch_accel_lite.extension_tools.modules_and_devices import plain_parts
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import other_modules
from pytorch_accel_lite.extensions.checking.probe import (
    TOLERANCE,
    Finding,
    NotApplicableError,
    Probe,
    Update,
    doubt,
    largest_difference,
    mistake,
)
from pytorch_accel_lite.utils import listed


def check_reload(probe: Probe) -> Iterator[Finding]:
    """Load the weights and a training state of the second update into the program as it was; compare outputs and bits.

    Anything that is not in them is lost when a model is loaded or a run is resumed.

    Register everything that training changes: tensors with register_buffer(), modules as attributes or in an
    nn.ModuleList, and objects of the trainer with register_for_checkpointing().
    """
    before = _plain_tensors(probe)
    probe.trainer.current_run.user_attributes.note_modules(probe.trainer)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "state")
        with probe.training() as update:
            _update(probe, update, (0, 1))
            after = _plain_tensors(probe)
            trained = _outputs(probe)
            weights = [(module, copy.deepcopy(module.state_dict())) for module in _roots(probe)]
            probe.trainer.save_training_state(path)
            uninterrupted = _update(probe, update, (2, 3))
        with probe.training():
            for module, state in weights:
                module.load_state_dict(state)
            off = largest_difference(trained, _outputs(probe))
        with probe.training() as update:
            try:
                probe.trainer.load_training_state(path)
            except Exception as error:
                yield mistake(f"Loading the program's own state raised {describe_error(error)}")
                return
            different = _differ(uninterrupted, _update(probe, update, (2, 3)))
    lost = [name for name, value in after.items() if name not in before or not _are_equal(value, before[name])]
    reason = f" Training changes {listed(lost)}, which no saved model contains." if lost else ""
    if off > TOLERANCE:
        text = (
            f"After loading the weights of two updates into the model as it was, outputs differ by {off:.1%}.{reason}"
        )
        yield mistake(text, difference=off, lost=lost)
    elif different:
        with probe.training() as update:
            if _differ(uninterrupted, _update(probe, update, range(4))):
                raise NotApplicableError("Two runs from the same start have other bits.")
        text = f"A run that is resumed after two updates has other bits than one that is not, in {listed(different)}."
        yield doubt(text + reason, parameters=different, lost=lost)


def _roots(probe: Probe) -> list[nn.Module]:
    """Return the model and the trainer's other modules, such as the loss function."""
    return [probe.trainer.get_model(), *other_modules(probe.trainer).values()]


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
    """Return copies of the tensors, by name, that are plain attributes and therefore in no saved model."""
    keeps_attributes = probe.trainer.saves_attributes and USER_ATTRIBUTES.content is not None
    owners = probe.modules if keeps_attributes else {"trainer": probe.trainer, **probe.modules}
    values = {
        f"{name}.{key}".lstrip("."): value for name, owner in owners.items() for key, value in vars(owner).items()
    }
    return {name: value.detach().clone() for name, value in values.items() if isinstance(value, torch.Tensor)}


def _differ(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> list[str]:
    return [name for name in first if not all(map(_are_equal, plain_parts(first[name]), plain_parts(second[name])))]


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.nan_to_num(), other.nan_to_num())
