"""What each extension gives the facade: for errors that name it, where its folder has been deleted."""

from __future__ import annotations

from pathlib import Path

#: Names of the package; those of its modules and of ``Trainer`` with these before them.
OFFERED = {
    "experiment": ("compare_runs", "compare_seeds", "cross_validate"),
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
    "slurm": (),  # SaveTrainingStateCallback(requeue=True)
}


def missing(name: str, prefix: str = "") -> AttributeError:
    """Return the error about a name that is not there, of the package, or of ``prefix`` in it."""
    qualified = f"{prefix}.{name}" if prefix else name
    for extension, names in OFFERED.items():
        if qualified in names:
            return AttributeError(f"{qualified} {is_not_there(extension)}")
    folder = Path(__file__).parent.name
    owner = f"{prefix!r} object" if prefix[:1].isupper() else f"module {f'{folder}.{prefix}'.rstrip('.')!r}"
    return AttributeError(f"{owner} has no attribute {name!r}")


def is_not_there(extension: str) -> str:
    """Return the end of an error that begins with what was asked for of an extension whose folder is deleted."""
    folder = Path(__file__).parent.name
    return (
        f"is of the extension {extension!r}, which is not there: somebody has deleted the folder "
        f"{folder}/extensions/{extension}. Install the package again to have it back."
    )
