"""What each extension gives the facade: for errors that name it, where its folder has been deleted."""

from __future__ import annotations

from pathlib import Path

#: Names of the package; those of ``callbacks`` and of ``Trainer`` with these before them.
OFFERED = {"experiment": ("compare_runs", "compare_seeds", "cross_validate")}


def missing(name: str, prefix: str = "") -> AttributeError:
    """Return the error about a name that is not there, of the package, or of ``prefix`` in it."""
    folder = Path(__file__).parent.name
    qualified = f"{prefix}.{name}" if prefix else name
    for extension, names in OFFERED.items():
        if qualified in names:
            return AttributeError(
                f"{qualified} is of the extension {extension!r}, which is not there: somebody has deleted the folder "
                f"{folder}/extensions/{extension}. Install the package again to have it back."
            )
    owner = f"{prefix!r} object" if prefix[:1].isupper() else f"module {f'{folder}.{prefix}'.rstrip('.')!r}"
    return AttributeError(f"{owner} has no attribute {name!r}")
