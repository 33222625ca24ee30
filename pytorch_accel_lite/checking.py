"""Public path of the tools for your own checks for ``trainer.check()``, and of its results."""

from pytorch_accel_lite.extensions.checking import (
    CheckReport,
    CheckResult,
    Finding,
    NotApplicableError,
    Pass,
    Probe,
    ProgramError,
    Watch,
    doubt,
    mistake,
    remark,
)

__all__ = [
    "CheckReport",
    "CheckResult",
    "Finding",
    "NotApplicableError",
    "Pass",
    "Probe",
    "ProgramError",
    "Watch",
    "doubt",
    "mistake",
    "remark",
]
