"""Users' attributes in training states: what trainers, callbacks and modules hold, except this package's own."""

from pytorch_accel_lite.extending import USER_ATTRIBUTES
from pytorch_accel_lite.extensions.user_attributes.kept_attributes import KeptAttributes

__all__ = ["KeptAttributes"]

USER_ATTRIBUTES.fill(KeptAttributes)
