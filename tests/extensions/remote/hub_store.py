"""A stand-in for the file system of the Hugging Face Hub: ``hf://owner/name/path`` is a file in a folder on disk.

As there, a repository must exist, each write and each removal is a commit, a file appears once it is closed, folders
exist only through their files, listings are cached until this process changes them, and nothing can be renamed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem


class HubFile(AbstractBufferedFile):
    """A file that is written when it is closed, and read as long as its cached size says."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self.fs.on_disk(self.path).read_bytes()[start:end]

    def _initiate_upload(self) -> None:
        self.content = b""

    def _upload_chunk(self, final: bool = False) -> bool:
        self.content += self.buffer.getvalue()
        if final:
            path = self.fs.on_disk(self.path)
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_name(f".new-{os.getpid()}")
            new.write_bytes(self.content)
            new.replace(path)
            self.fs.commit(f"write {self.path}")
        return True


class HubStore(AbstractFileSystem):
    """The file system. ``folder`` is where its repositories are."""

    protocol = "hf"
    folder: ClassVar[Path]

    def on_disk(self, path: str) -> Path:
        owner, name, *rest = path.split("/")
        repository = self.folder / owner / name
        if not repository.is_dir():
            raise FileNotFoundError(f"{owner}/{name} (repository not found). Make sure that it exists.")
        return repository.joinpath(*rest)

    def commit(self, message: str) -> None:
        with open(self.folder / "commits", "a") as commits:
            commits.write(f"{message}\n")
        self.invalidate_cache()

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.clear()

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        path = self._strip_protocol(path)
        if path not in self.dircache:
            folder = self.on_disk(path)
            if not folder.is_dir():
                raise FileNotFoundError(path)
            self.dircache[path] = [
                {
                    "name": f"{path}/{entry.name}",
                    "size": entry.stat().st_size if entry.is_file() else 0,
                    "type": "file" if entry.is_file() else "directory",
                }
                for entry in folder.iterdir()
                if entry.is_file() or any(entry.rglob("*"))
            ]
        found = self.dircache[path]
        return found if detail else [entry["name"] for entry in found]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        if path.count("/") == 1:
            self.on_disk(path)
            return {"name": path, "size": 0, "type": "directory"}
        for entry in self.ls(self._parent(path)):
            if entry["name"] == path:
                return entry
        raise FileNotFoundError(path)

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> HubFile:
        self.on_disk(path)
        return HubFile(self, path, mode, **kwargs)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        files = [found for found in self.expand_path(path, recursive=recursive) if not self.isdir(found)]
        for file in files:
            self.on_disk(file).unlink()  # an error if a cached listing names one that is gone
        for folder, *_ in os.walk(self.folder, topdown=False):
            if len(Path(folder).relative_to(self.folder).parts) > 2 and not os.listdir(folder):
                os.rmdir(folder)
        self.commit(f"remove {path}")

    def mv(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("the Hub renames nothing")

    cp_file = mv


fsspec.register_implementation("hf", HubStore, clobber=True)
