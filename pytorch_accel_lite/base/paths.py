"""Users' paths and URLs, checked before anything is computed, and file names made from users' names."""

from __future__ import annotations

import os
import re
from hashlib import sha256
from pathlib import Path
from typing import IO
from urllib.parse import quote

StrPath = str | os.PathLike[str]
#: A path, or a binary file that the user has opened, or an ``io.BytesIO``.
PathOrFile = StrPath | IO[bytes]
_PLACE = re.compile(r"(.*_)?(dir|directory|paths?|files?|folder|url|log|logger)")
_ESCAPED = re.compile(r"%[0-9A-F]{2}|\A%\Z")
_LONGEST_NAME = 255  # bytes, on all common file systems
_LONGEST_PART = 150  # maximum length of a name made of several parts


def is_place(argument: str) -> bool:
    """Return whether an argument, by its name, only says where something is read or written."""
    return _PLACE.fullmatch(argument) is not None


def parse_location(path: StrPath, argument: str = "path") -> Path | str:
    """Return a path as a ``Path``, without ``~``, and the URL of a folder in a remote store without a final slash.

    Args:
        argument: name of the argument, for the error

    Raises:
        TypeError: if the argument is neither text nor a path
        ValueError: if the path names nothing
    """
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise TypeError(f"{argument}={path!r} must be a path, as text or a Path, not {type(path).__name__}.")
    scheme, separator, rest = text.partition("://")
    is_remote = bool(separator) and scheme not in ("file", "local")
    local = rest if separator else text
    if not local or (separator and not local.strip("/")) or "\0" in local:
        raise ValueError(f"{argument}={text!r} names nothing to read or write. Pass a path, such as 'runs/first'.")
    return text.rstrip("/") if is_remote else _expand(local, argument)


def _expand(text: str, argument: str) -> Path:
    """Return a path with the home directory in place of ``~``, which only a shell would insert."""
    first, *_ = text.split("/", 1)
    if not first.startswith("~"):
        return Path(text)
    expanded = os.path.expanduser(text)
    if expanded == text or os.path.lexists(first):
        meaning = "no user has that name" if expanded == text else f"there is also a folder {first!r} here"
        raise ValueError(
            f"{argument}={text!r} begins with a home directory, but {meaning}. Write {f'./{text}'!r} for the one in "
            "the working directory, or the whole path."
        )
    return Path(expanded)


def local_path(argument: str, path: StrPath, what: str = "what is written there") -> Path:
    """Return a path on a disk, without ``~``.

    Args:
        what: a description of what is at the path, for the error

    Raises:
        ValueError: if the path is the URL of a remote store, names nothing, or lies below a file
    """
    location = parse_location(path, argument)
    if isinstance(location, str):
        raise ValueError(
            f"{argument}={os.fspath(path)!r} is a URL, but {what} is on a disk. Pass a path. save_model() and "
            "SaveTrainingStateCallback take URLs."
        )
    for part in location.parts:
        if len(os.fsencode(part)) > _LONGEST_NAME:
            raise ValueError(f"{argument}={os.fspath(path)!r} has a name of more than {_LONGEST_NAME} bytes.")
    parent = next(filter(os.path.lexists, location.parents), None)
    if parent is not None and not parent.is_dir():
        raise ValueError(f"{argument}={os.fspath(path)!r} lies below {str(parent)!r}, which is not a folder.")
    return location


def file_path(argument: str, path: StrPath, what: str = "what is written there") -> Path:
    """Return the path of a file to write.

    Raises:
        ValueError: if the path cannot be a file on a disk; names the argument
    """
    location = local_path(argument, path, what)
    text = os.fspath(path)
    if text.endswith(os.sep) or location.name in ("", ".", "..") or location.is_dir():
        raise ValueError(f"{argument}={text!r} is a folder, but should be a file. Pass the path of a file in it.")
    return location


def folder_path(argument: str, path: StrPath, what: str = "what is written there") -> Path:
    """Return the path of a folder to write to, which need not exist.

    Raises:
        ValueError: if the path cannot be a folder on a disk; names the argument
    """
    location = local_path(argument, path, what)
    if os.path.lexists(location) and not location.is_dir():
        raise ValueError(f"{argument}={os.fspath(path)!r} is not a folder. Pass another path, or move what is there.")
    return location


def check_open_file(argument: str, file: PathOrFile, *, to_write: bool) -> None:
    """Check that an argument is an open file. Paths pass.

    Raises:
        TypeError: if the argument is neither a path nor a binary file; names the argument
        ValueError: if the file is closed, or open only for the opposite direction
    """
    if isinstance(file, (str, os.PathLike)):
        return
    method, is_possible, mode = ("write", "writable", "wb") if to_write else ("read", "readable", "rb")
    if not hasattr(file, method):
        raise TypeError(f"{argument}={file!r} must be a path or an open binary file, not {type(file).__name__}.")
    if hasattr(file, "encoding"):
        raise TypeError(f"{argument}={file!r} is open as text. Open it with mode {mode!r}, or pass io.BytesIO().")
    if getattr(file, "closed", False):
        raise ValueError(f"{argument}={file!r} is closed. Pass it while it is open.")
    if not getattr(file, is_possible, lambda: True)():
        raise ValueError(f"{argument}={file!r} cannot be {'written' if to_write else 'read'}. Open it with {mode!r}.")


def name_of(file: PathOrFile) -> str:
    """Return the name of a path or an open file for messages."""
    if isinstance(file, (str, os.PathLike)):
        return os.fspath(file)
    name = getattr(file, "name", None)  # the name is a number if the file was opened by its descriptor
    return name if isinstance(name, str) and name else f"<{type(file).__name__}>"


def as_file_name(name: str) -> str:
    """Return the name of a file or folder for a user's name, unchanged if possible.

    Parts that would lead to another folder, such as ``..`` or ``a/b``, are escaped as in a URL. Long names are cut.
    """
    is_plain = name.isprintable() and "/" not in name and name.strip(".") and len(os.fsencode(name)) <= _LONGEST_PART
    if is_plain and not _ESCAPED.search(name):  # or it could be the escaped form of another name
        return name
    quoted = quote(os.fsencode(name), safe=" ()[]{}=,+@&'") or "%"
    quoted = quoted.replace(".", "%2E") if not name.strip(".") else quoted
    if len(quoted) > _LONGEST_PART:
        quoted = f"{quoted[: _LONGEST_PART - 20]}-{sha256(os.fsencode(name)).hexdigest()[:16]}"
    return quoted
