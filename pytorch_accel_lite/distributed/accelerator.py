"""The accelerator of a trainer, with settings of its own: Accelerate keeps one settings object per process."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedDataParallelKwargs, parse_flag_from_env

from pytorch_accel_lite.base.machine import launched_on_cpus

_OF_A_TRAINER = "_was_created_by_a_trainer"  # marks the states of accelerators that trainers created
_ARE_OF_PROCESS = type(vars(AcceleratorState)["_shared_state"]) is dict  # not per thread, as on TPUs
_num_in_effect = 0  # how many runs have their trainer's settings in effect


def _copy_of_gradient_state(held: dict[str, object]) -> GradientState:
    copied = GradientState.__new__(GradientState)
    vars(copied).update(held)
    return copied


def _reduce_gradient_state(state: GradientState) -> tuple[Callable[..., GradientState], tuple[dict[str, object]]]:
    """Leave out the loaders that a program is reading, of which Accelerate holds weak references."""
    return _copy_of_gradient_state, (
        {name: [None] if "dataloader_references" in name else value for name, value in vars(state).items()},
    )


copyreg.pickle(GradientState, _reduce_gradient_state)  # trainers can be pickled whatever the program reads


def default_accelerator(precision: str | None) -> Accelerator:
    """Return the accelerator of a trainer without a user's own. Gradients are reduced in place, without copies."""
    in_place = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    return Accelerator(mixed_precision=precision, cpu=launched_on_cpus(), kwargs_handlers=[in_place])


def create_accelerator(create: Callable[[], Accelerator], precision: str | None) -> Accelerator:
    """Create the accelerator of a trainer, whatever the settings of earlier trainers.

    Without a precision, the new accelerator shares the settings of one that the user has already created.

    Args:
        create: creates the accelerator
        precision: the requested mixed precision, if any
    """
    if not _ARE_OF_PROCESS:
        return create()
    before = AcceleratorState._shared_state
    shares = not before.get(_OF_A_TRAINER) and precision in (None, before.get("_mixed_precision"))
    created = before if shares else {}
    is_new = not created
    AcceleratorState._shared_state = created
    try:
        accelerator = create()
    except BaseException:
        AcceleratorState._shared_state = before
        raise
    state = vars(accelerator.state)
    if is_new and state is created:
        state[_OF_A_TRAINER] = True
    AcceleratorState._shared_state = before if _num_in_effect else state
    return accelerator


def find_unused_in_ddp(accelerator: Accelerator) -> None:
    """Make ``DistributedDataParallel`` find unused parameters in models that an accelerator wraps from now on."""
    options = accelerator.ddp_handler or DistributedDataParallelKwargs()
    accelerator.ddp_handler = replace(options, find_unused_parameters=True)


@contextmanager
def replacing_method(accelerator: Accelerator, name: str, method: Callable[..., object]) -> Iterator[None]:
    """Within a block, give an accelerator another method, in place of that of its class or one that it has itself."""
    attributes = vars(accelerator)
    before = attributes.get(name)
    attributes[name] = method
    try:
        yield
    finally:
        attributes[name] = before
        if before is None:
            del attributes[name]


@contextmanager
def in_effect(accelerator: Accelerator) -> Iterator[None]:
    """Make Accelerate use the settings of an accelerator within a block."""
    global _num_in_effect
    if not _ARE_OF_PROCESS:
        yield
        return
    before = AcceleratorState._shared_state
    AcceleratorState._shared_state = vars(accelerator.state)
    _num_in_effect += 1
    try:
        yield
    finally:
        _num_in_effect -= 1
        AcceleratorState._shared_state = before


def current_process() -> PartialState:
    """Return the state of this process, consistent with an ``Accelerator`` that may be created later."""
    return PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU") or launched_on_cpus())
