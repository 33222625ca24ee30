"""Slots: seams of the core that a single extension fills."""

from __future__ import annotations

from typing import Generic, TypeVar

from pytorch_accel_lite.base.missing_extensions import missing_extension_text

T = TypeVar("T")


class Slot(Generic[T]):
    """A seam that a single extension fills.

    Args:
        extension: the name of the extension, for the error if it is missing
    """

    def __init__(self, extension: str) -> None:
        self.extension = extension
        self.content: T | None = None

    def fill(self, content: T) -> None:
        """Fill the slot.

        Raises:
            RuntimeError: if it is filled already
        """
        if self.content is not None:
            raise RuntimeError(f"The extension {self.extension!r} has filled this slot already, with {self.content!r}.")
        self.content = content

    def get(self, wanted_by: str, kind: type[Exception] = ValueError) -> T:
        """Return the content; without it, raise an error of a kind, which begins with what wants it."""
        if self.content is None:
            raise kind(f"{wanted_by} {missing_extension_text(self.extension)}")
        return self.content
