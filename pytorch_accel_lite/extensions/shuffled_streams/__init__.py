"""Streams whose samples are shuffled block by block."""

from pytorch_accel_lite.extensions.shuffled_streams.shuffled_stream import ShuffledStream

__all__ = ["ShuffledStream"]
