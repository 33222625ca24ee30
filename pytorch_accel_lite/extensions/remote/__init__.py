"""Training states and models in a remote store, such as S3, through fsspec."""

from pytorch_accel_lite.extending import STORES
from pytorch_accel_lite.extensions.remote.remote_store import RemoteFolder, RemoteStore

__all__ = ["RemoteFolder", "RemoteStore"]

STORES["*"] = RemoteStore()
