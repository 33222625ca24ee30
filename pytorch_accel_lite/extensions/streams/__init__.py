"""Data that are read in turn rather than by index: streams, and batches that are ready."""

from pytorch_accel_lite.extension_tools.data_and_batches import SEQUENTIAL_READER
from pytorch_accel_lite.extensions.streams.stream_positions import can_return, open_stream
from pytorch_accel_lite.extensions.streams.stream_shards import part_of
from pytorch_accel_lite.extensions.streams.who_reads import read_in_turn

__all__ = ["can_return", "open_stream", "part_of"]

SEQUENTIAL_READER.fill(read_in_turn)
