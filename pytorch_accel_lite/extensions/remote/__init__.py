"""Saving to remote stores, such as S3, and reading from them."""

from pytorch_accel_lite.extending import STORES
from pytorch_accel_lite.extensions.remote.remote_store import RemoteFolder, RemoteStore

__all__ = ["RemoteFolder", "RemoteStore"]

STORES["*"] = RemoteStore()
