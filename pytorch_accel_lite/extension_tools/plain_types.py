"""Types of states, nested data, JSON and paths."""

from pytorch_accel_lite.base.paths import StrPath
from pytorch_accel_lite.base.types import JsonObject, StateDict, Tree

__all__ = ["JsonObject", "StateDict", "StrPath", "Tree"]
