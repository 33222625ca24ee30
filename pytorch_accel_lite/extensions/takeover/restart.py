"""The restart of the program of a sharded run: whether it is due, and from which state the training resumes."""

from __future__ import annotations

import shutil


class ProgramRestart(BaseException):
    """The program of this process has to restart in a new generation."""


class Restart:
    """The restart of the program in this process, for a sharded run whose processes change.

    Attributes:
        count: how often the program has restarted
        is_due: whether the program has to restart
        has_entered: whether this process is already in the generation in which the program restarts
        saves_first: whether a state is saved from the remaining shards before the restart
        is_impossible: whether shards were lost that a restart cannot restore, so that the program has to end
        is_before_training: whether the program has restarted, and its first training has not begun yet
        state: the state from which the training resumes, kept until the next update
        folder: the folder that was created for this state, if it was saved for the restart
    """

    def __init__(self) -> None:
        self.count = 0
        self.is_due = self.has_entered = self.saves_first = self.is_impossible = self.is_before_training = False
        self.state: str | None = None
        self.folder: str | None = None

    def request(self, has_entered: bool) -> None:
        """Request a restart.

        Args:
            has_entered: whether this process is already in the generation in which the program restarts
        """
        self.is_due, self.has_entered = True, has_entered

    def begin(self) -> None:
        """Note that the program starts again."""
        self.is_due = self.saves_first = False
        self.is_before_training = True
        self.count += 1

    def remove_folder(self) -> None:
        """Remove the folder that was created for the state. Every process tries, as its creator may be lost."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def drop_state(self) -> None:
        """Forget the state, once all processes have resumed from it."""
        self.remove_folder()
        self.state = self.folder = None
