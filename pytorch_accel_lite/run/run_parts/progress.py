"""How far a run has got: its epochs, steps, updates and samples."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import IntEnum


class EpochPhase(IntEnum):
    """How far an epoch has got: steps running, steps done, evaluation done, ending events done."""

    TRAINING = 0
    TRAINED = 1
    EVALUATED = 2
    ENDED = 3  # all but the final checkpoint


@dataclass
class Progress:
    """The progress of a training run. Written by the trainer; treat it as read-only.

    Args:
        epoch: the epoch being trained, counted from 1; 0 before the first
        epochs_completed: number of epochs completed, including their evaluation
        step: number of batches that each process has completed in this epoch
        update: number of optimizer updates in the run, including those skipped by a gradient scaler
        samples_in_epoch: number of samples consumed in this epoch by all processes together
        samples: number of samples consumed in the run by all processes together
    """

    epoch: int = 0
    epochs_completed: int = 0
    step: int = 0
    update: int = 0
    samples_in_epoch: int = 0
    samples: int = 0

    @property
    def is_mid_epoch(self) -> bool:
        """Whether the current epoch has been started, but not completed."""
        return self.step > 0 and self.epochs_completed < self.epoch

    def start_epoch(self) -> None:
        """Enter the next epoch."""
        self.epoch = self.epochs_completed + 1
        self.step = 0
        self.samples_in_epoch = 0

    def add_samples(self, count: int) -> None:
        """Add to the number of samples consumed by all processes together."""
        self.samples_in_epoch += count
        self.samples += count

    def state_dict(self) -> dict[str, int]:
        """Return the counts as a dict."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Load counts returned by ``state_dict()``."""
        wrong = sorted(state.keys() ^ asdict(self).keys())
        if wrong:
            raise KeyError(f"The counts {wrong} are missing or unknown; progress has {', '.join(asdict(self))}.")
        for name, value in state.items():
            setattr(self, name, int(value))
