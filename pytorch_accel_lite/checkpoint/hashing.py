"""Checksums of files, computed in pieces by several threads."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from pytorch_accel_lite.base.environment import available_cores

#: Bytes of a file that are hashed at once. Part of the format: another size gives other checksums.
PIECE = 8 << 20
_BLOCK = 1 << 20  # stays in a core's cache between being read and being hashed
_MOST_THREADS = 8  # hash faster than most disks read


class FileHashes:
    """Computes SHA-256 of files in the background of a block. hashlib releases the interpreter's lock meanwhile.

    The checksum of a file is the SHA-256 of those of its pieces, so that all cores share the work on one large file.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(min(available_cores(), _MOST_THREADS), "hashing")
        self._found: dict[Path, list[Future[bytes]]] = {}

    def __enter__(self) -> FileHashes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def add(self, path: Path) -> None:
        """Start to compute the checksum of a file, which is complete."""
        starts = range(0, path.stat().st_size, PIECE)
        self._found[path] = [self._pool.submit(_hash_piece, path, start) for start in starts]

    def of(self, path: Path) -> str:
        """Return the checksum of a file as a hexadecimal string, once it is computed.

        :raises OSError: if the file cannot be read
        """
        return hashlib.sha256(b"".join(piece.result() for piece in self._found[path])).hexdigest()


def _hash_piece(path: Path, start: int) -> bytes:
    digest = hashlib.sha256()
    block = memoryview(bytearray(_BLOCK))
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        for _ in range(PIECE // _BLOCK):
            filled = 0
            while filled < _BLOCK and (count := file.readinto(block[filled:])):
                filled += count
            digest.update(block[:filled])
    return digest.digest()
