"""How a run ends: why it was stopped, and what is done last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pytorch_accel_lite.run.ending.stop_errors import RunPausedError, StopTrainingError


@dataclass(slots=True, eq=False, repr=False)
class RunEnd:
    """How a run ends.

    Attributes:
        reason: why the run was stopped early
        stopped_by: the callback that stopped the run, as the call that created the callback
        pause: the request to pause that stopped the run
        has_reached_limit: whether the last epoch made the last requested update
        custom_loop_is_ending: whether the custom loop of an overridden ``_run_training`` has begun the ending events
        has_failed: whether an error has ended the run
        last_calls: functions to call when the run has ended without an error and all callbacks have handled its end
    """

    reason: str | None = None
    stopped_by: str | None = None
    pause: RunPausedError | None = None
    has_reached_limit: bool = False
    custom_loop_is_ending: bool = False
    has_failed: bool = False
    last_calls: list[Callable[[], None]] = field(default_factory=list)

    def note(self, stop: StopTrainingError) -> None:
        """Note the request that stops the run early."""
        self.reason, self.stopped_by = str(stop) or type(stop).__name__, stop.raised_by
        self.pause = stop if isinstance(stop, RunPausedError) else None

    def make_last_calls(self) -> None:
        """Make the last calls, in the order in which they were requested."""
        for call in self.last_calls:
            call()

    @property
    def is_regular(self) -> bool:
        """Whether the run ended, possibly early, without failing or being paused."""
        return self.pause is None and not self.has_failed
