"""What each extension gives the facade: for errors that name it, where its folder has been deleted."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

C = TypeVar("C", bound=type)

#: Names of the package; those of its modules and of ``Trainer`` with these before them.
OFFERED = {
    "blocks": (),  # Trainer(activation_checkpointing=...), Trainer(compile_model="blocks")
    "checking": ("Trainer.check",),
    "energy": ("callbacks.EnergyCallback",),
    "experiment": ("compare_runs", "compare_seeds", "cross_validate"),
    "logical": ("Trainer.logical",),
    "memory_estimate": ("Trainer.estimate_memory",),
    "mixture_schedule": ("callbacks.MixtureScheduleCallback",),
    "optuna": ("integrations.OptunaPruningCallback",),
    "packing": (
        "data.PackSequences",
        "data.TokenBatchSampler",
        "data.packed_attention",
        "data.packed_mask",
        "data.packed_mask_function",
        "data.unpack",
    ),
    "ray": ("integrations.RayReportCallback",),
    "remote": (),  # what is at a URL
    "reports": ("callbacks.PlotMetricsCallback", "callbacks.RunLogCallback"),  # and the card of save_model()
    "slurm": (),  # SaveTrainingStateCallback(requeue=True)
    "takeover": (),  # the command launch
    "tuning": ("Trainer.find_lr", "Trainer.find_batch_size", "Trainer.diagnose"),
}
#: The extensions that have arguments of a trainer.
ARGUMENTS = {"logical_processes": "logical"}
#: The extensions with whose public names another one is written; without these, it has to be deleted, too.
NEEDED = {"takeover": ("logical",)}


def missing(name: str, prefix: str = "") -> Exception:
    """Return the error about a name that is not there, of the package, or of ``prefix`` in it.

    Of a module, it is an ``ImportError`` if an extension has the name: ``from ... import`` would replace the message of
    an ``AttributeError``.
    """
    kind = AttributeError if prefix[:1].isupper() else ImportError
    qualified = f"{prefix}.{name}" if prefix else name
    for extension, names in OFFERED.items():
        if qualified in names:
            return kind(f"{qualified} {is_not_there(extension)}")
    folder = Path(__file__).parent.name
    owner = f"{prefix!r} object" if prefix[:1].isupper() else f"module {f'{folder}.{prefix}'.rstrip('.')!r}"
    return AttributeError(f"{owner} has no attribute {name!r}")


class _Missing:
    """A method that an extension gives a class, where its folder has been deleted."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __get__(self, instance: object, owner: type) -> object:
        raise AttributeError(str(self._error))


def with_missing(cls: C) -> C:
    """Let a class say so of the methods that it lacks because an extension has been deleted.

    A ``__getattr__`` would make each attribute of each instance slower to read, and hide the errors of properties.
    """
    for name in [name for names in OFFERED.values() for name in names]:
        prefix, _, method = name.rpartition(".")
        if prefix == cls.__name__ and not hasattr(cls, method):
            setattr(cls, method, _Missing(missing(method, prefix)))
    return cls


def is_not_there(extension: str) -> str:
    """Return the end of an error that begins with what was asked for of an extension whose folder is deleted."""
    folder = Path(__file__).parent.name
    return (
        f"is of the extension {extension!r}, which is not there: somebody has deleted the folder "
        f"{folder}/extensions/{extension}. Install the package again to have it back."
    )
