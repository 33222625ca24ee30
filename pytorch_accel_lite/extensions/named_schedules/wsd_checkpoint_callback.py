"""Saving portable checkpoints around each decay of a ``WSDLrScheduler``."""

from __future__ import annotations

import os
from pathlib import Path

from pytorch_accel_lite.checkpoint import folder_path, local_path
from pytorch_accel_lite.extending import TrainerCallback, TrainerLike

_PRE = "pre_decay"
_POST = "post_decay"


class WSDCheckpointCallback(TrainerCallback):
    """Save portable checkpoints around each decay of a ``WSDLrScheduler``.

    After n updates of the schedule, ``checkpoint_n_wsd_pre_decay.pt`` is saved just before a decay, with the states of
    the optimizer and the scheduler, as a starting point for further training (WSD), and
    ``checkpoint_n_wsd_post_decay.pt`` just after it, for use or further training (WSD-S). If a run ends or is stopped
    within a decay, its last model is saved as a post-decay checkpoint, unless the run is paused.

    Args:
        save_dir: directory for the checkpoints
        save_optimizer: include the optimizer's state in post-decay checkpoints
        save_scheduler: include the scheduler's state in post-decay checkpoints
        initial_checkpoint: checkpoint, or directory with the weights of a model, to start from. Weights, optimizer
            state and base learning rates are loaded if present; the schedule and all counts start at 0. A run that
            resumes from a training state does not load it.

    Raises:
        ValueError: at the start of a run without a ``WSDLrScheduler``, or of a run that would overwrite
            ``initial_checkpoint``
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str] = "checkpoints",
        save_optimizer: bool = True,
        save_scheduler: bool = True,
        initial_checkpoint: str | os.PathLike[str] | None = None,
    ) -> None:
        self.save_dir = folder_path("save_dir", save_dir, "a checkpoint")
        self.save_optimizer = save_optimizer
        self.save_scheduler = save_scheduler
        self.initial_checkpoint = (
            None if initial_checkpoint is None else local_path("initial_checkpoint", initial_checkpoint)
        )
        self._due: set[tuple[int, str]] = set()  # updates after which to save, and kinds of checkpoints

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        if not hasattr(trainer.scheduler, "get_decay_info"):
            raise ValueError(
                f"WSDCheckpointCallback needs a WSDLrScheduler, not {trainer.scheduler!r}: pass "
                "create_scheduler_fn=WSDLrScheduler.create_scheduler_fn() to train()."
            )
        periods = trainer.scheduler.get_decay_info()
        self._due = {(period["pre_decay_step"], _PRE) for period in periods}
        self._due |= {(period["period_end"], _POST) for period in periods}
        if self.initial_checkpoint is not None and not trainer.progress.update:
            self._load(trainer, self.initial_checkpoint)
        self._save_due(trainer)  # a run may have been killed between saving its training state and this checkpoint

    def _load(self, trainer: TrainerLike, path: Path) -> None:
        if path.resolve() in {self._path(*checkpoint).resolve() for checkpoint in self._due}:
            raise ValueError(
                f"initial_checkpoint={str(path)!r} would be overwritten by this run. Choose a save_dir other than "
                f"{str(self.save_dir)!r}."
            )
        checkpoint = trainer.load_checkpoint(path, load_scheduler=False)
        trainer.scheduler.continue_from(checkpoint.get("scheduler_state_dict"))
        trainer.print(f"Starting from the weights in {os.fspath(path)!r}")

    def _save_due(self, trainer: TrainerLike, **kwargs: object) -> None:
        for kind in (_POST, _PRE):
            if (trainer.scheduler.num_updates, kind) in self._due:
                self._save(trainer, kind)

    on_train_step_checkpoint = _save_due

    def on_epoch_checkpoint(self, trainer: TrainerLike, **kwargs: object) -> None:
        if trainer.run.is_finished:
            self._save_last(trainer)

    def on_stop_training_error(self, trainer: TrainerLike, **kwargs: object) -> None:
        if trainer.run.end.pause is None:  # a paused run will be resumed
            self._save_last(trainer)

    def _save_last(self, trainer: TrainerLike) -> None:
        info = trainer.scheduler.get_current_phase_info()
        if info["phase"] == "decay" and trainer.scheduler.num_updates > info["pre_decay_step"]:
            self._save(trainer, _POST)

    def _save(self, trainer: TrainerLike, kind: str) -> None:
        trainer.save_checkpoint(
            self._path(trainer.scheduler.num_updates, kind),
            checkpoint_kwargs={"step": trainer.scheduler.num_updates, "checkpoint_type": f"wsd_{kind}"},
            save_optimizer=self.save_optimizer or kind == _PRE,
            save_scheduler=self.save_scheduler or kind == _PRE,
        )

    def _path(self, num_updates: int, kind: str) -> Path:
        return self.save_dir / f"checkpoint_{num_updates}_wsd_{kind}.pt"
