"""Checking a training program before an expensive run: ``trainer.check()``, its checks, and what they work with."""

from __future__ import annotations

from pytorch_accel_lite.extensions.checking.probe import (
    Finding,
    NotApplicableError,
    Pass,
    Probe,
    Watch,
    doubt,
    mistake,
    remark,
)
from pytorch_accel_lite.extensions.checking.program_check import CheckReport, CheckResult, ProgramError

__all__ = [
    "CheckReport", "CheckResult", "Finding", "NotApplicableError", "Pass", "Probe", "ProgramError", "Watch", "doubt",
    "mistake", "remark",
]  # fmt: skip
