"""The errors that end a run: stops, pauses, interruptions, and losses that are not finite."""

from __future__ import annotations

import signal


class StopTrainingError(Exception):
    """Raise it in a callback to end the run early but in order: the ending events fire, and ``train`` returns.

    With one process, the run stops where it is raised. With several, a single rank may raise it: the request is passed
    to the others, and all ranks stop after the same update. A stopped run is over, also for
    ``train(resume_from="latest")``, unless you give it more epochs or updates, or change the arguments of the callback.
    To continue a run later, raise ``RunPausedError``.
    """

    #: The callback that raised it, as the call that created it.
    raised_by: str | None = None


class RunPausedError(StopTrainingError):
    """Raise it in a callback to pause training: the run ends after the current update, and can be resumed later.

    Use it for time limits of your own, for example.
    """


class RunInterruptedError(RunPausedError):
    """Raised if the signal with number ``signum`` has requested the end of the run."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"Stopping because of {signal.Signals(signum).name}.")
        self.signum = signum


class NonFiniteLossError(FloatingPointError):
    """A loss became infinite or NaN. Raised from ``train`` on every rank, after the ending events."""
