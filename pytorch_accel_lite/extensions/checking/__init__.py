"""Checking a training program before an expensive run: it is tried in several ways, and what looks wrong reported."""

from __future__ import annotations

from pytorch_accel_lite.extensions.checking.probing import (
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
