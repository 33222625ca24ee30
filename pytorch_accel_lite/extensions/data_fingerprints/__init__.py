"""Fingerprints of data, which processes compare with each other, and ``recorded_settings`` with those in states."""

from __future__ import annotations

from pytorch_accel_lite.extending import SHARED_DATA_CHECKS
from pytorch_accel_lite.extensions.data_fingerprints.fingerprints import compare_fingerprints, fingerprint_of
from pytorch_accel_lite.extensions.data_fingerprints.same_data import check_same_data

__all__ = ["compare_fingerprints", "fingerprint_of"]

SHARED_DATA_CHECKS.append(check_same_data)
