"""Checksums of files, to recognise files that were damaged after they were written.

A training state has the checksums of its files in its manifest. A single file carries its own: ``torch.save`` writes
the CRC-32 of each record, which ``torch.load`` ignores, and ``seal()`` puts a checksum of the whole file into the
metadata of safetensors, which their readers ignore. Files without a checksum, from other programs, pass.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import zipfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from pytorch_accel_lite.base.machine import available_cores

#: Number of bytes that are hashed at once. This is part of the format: another size gives other checksums.
PIECE = 8 << 20
_MOST_THREADS = 8  # enough to hash faster than most disks read
_CHUNK = 1 << 20
_LONGEST_HEADER = 100_000_000  # accepted by readers of safetensors
CHECKSUM = "sha256_of_pieces"
#: The metadata of a safetensors file before ``seal()``. The checksum is computed over the file with this text.
UNSEALED = {CHECKSUM: "0" * 64}


#: A file, or the content of a file that the user had opened.
Content = Path | bytes


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file's content as a hexadecimal string, used by states of format 1."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_files(paths: Iterable[Path]) -> dict[str, str]:
    """Return a checksum of each file, by name: the SHA-256 of the SHA-256 of its pieces, computed on all cores.

    Raises:
        OSError: if a file cannot be read
    """
    with _threads() as pool:
        pieces = {
            path.name: [pool.submit(_hash_piece, path, start) for start in range(0, path.stat().st_size, PIECE)]
            for path in paths
        }
        digests = {name: b"".join(piece.result() for piece in file_pieces) for name, file_pieces in pieces.items()}
    return {name: hashlib.sha256(digest).hexdigest() for name, digest in digests.items()}


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(available_cores(), _MOST_THREADS), "hashing")


def _open(content: Content) -> IO[bytes]:
    return io.BytesIO(content) if isinstance(content, bytes) else open(content, "rb")  # shares the memory of bytes


def _hash_piece(content: Content, start: int, seal: tuple[int, int] = (0, 0)) -> bytes:
    """Return the SHA-256 of a piece of a file, with any seal replaced by the unsealed text."""
    with _open(content) as file:
        file.seek(start)
        piece = file.read(PIECE)
    first, last = (min(max(position - start, 0), len(piece)) for position in seal)
    if first < last:
        piece = piece[:first] + UNSEALED[CHECKSUM].encode()[: last - first] + piece[last:]
    return hashlib.sha256(piece).digest()


def seal(path: Path) -> None:
    """Put the checksum of its content into a safetensors file that was written with ``UNSEALED``.

    The file is synced at the same time, which takes longer than the checksum on most disks.
    """
    start, _ = _find_seal(path)
    with open(path, "r+b") as file, ThreadPoolExecutor(1, "syncing") as pool:
        syncing = pool.submit(os.fsync, file.fileno())
        digest = _hash_sealed(path, start)
        syncing.result()
        file.seek(start)
        file.write(digest.encode())


def sealed(content: bytes) -> bytes:
    """Return the content of a safetensors file with its checksum, as ``seal()`` completes a file."""
    start, unsealed = _find_seal(content)
    return content[:start] + _hash_sealed(content, start).encode() + content[start + len(unsealed) :]


def _hash_sealed(content: Content, start: int) -> str:
    place = start, start + len(UNSEALED[CHECKSUM])
    with _threads() as pool:
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        pieces = pool.map(lambda start: _hash_piece(content, start, place), range(0, size, PIECE))
        return hashlib.sha256(b"".join(pieces)).hexdigest()


def _find_seal(content: Content) -> tuple[int, str]:
    """Return the position of the checksum in a safetensors file, and the checksum, which is empty if there is none."""
    with _open(content) as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length <= _LONGEST_HEADER else b""
    try:
        stored = json.loads(header)["__metadata__"][CHECKSUM]
        return 8 + header.index(f'"{CHECKSUM}":"{stored}"'.encode()) + len(f'"{CHECKSUM}":"'), stored
    except (ValueError, KeyError, TypeError):  # the file is from another program, or too damaged for any reader
        return 0, ""


def verify(path: Path) -> None:
    """Check the content of a file of tensors against its own checksums, if it has any.

    Raises:
        ValueError: if it is damaged; names the file
        OSError: if it cannot be read
    """
    verify_content(path, os.fspath(path), is_safetensors=path.suffix == ".safetensors")


def verify_content(content: Content, name: str, *, is_safetensors: bool) -> None:
    """Check the content of a file of tensors against its own checksums, if it has any.

    Args:
        name: name of the file in the error

    Raises:
        ValueError: if it is damaged; names the file
        OSError: if it cannot be read
    """
    if is_safetensors:
        start, stored = _find_seal(content)
        is_intact = not stored or _hash_sealed(content, start) == stored
    else:
        is_intact = _records_are_intact(content)
    if not is_intact:
        raise ValueError(
            f"The file {name!r} is damaged: its content does not match its checksum. It has changed since "
            "it was written: restore it from a copy, or write it again."
        )


def _records_are_intact(content: Content) -> bool:
    """Whether the records of a ``torch.save`` file match their checksums; files without records or checksums pass."""
    try:
        with _open(content) as file:
            if not zipfile.is_zipfile(file):
                return True
        with _open(content) as file, zipfile.ZipFile(file) as archive, _threads() as pool:
            records = archive.infolist()
            if any(record.CRC for record in records):  # users can turn checksums off in torch
                list(pool.map(lambda record: _read_record(archive, record), records))
    except OSError as error:
        if error.errno == errno.EINVAL:  # the position in the archive is damaged
            return False
        raise
    except Exception:  # a damaged archive makes zipfile raise almost anything
        return False
    return True


def _read_record(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> None:
    """Read a record to its end, where zipfile compares the checksum."""
    with archive.open(record) as content:
        while content.read(_CHUNK):
            pass
