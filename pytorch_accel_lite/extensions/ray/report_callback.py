"""Ray Train: reporting metrics and training states to it, and resuming runs from its checkpoints."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pytorch_accel_lite.checkpoint import folder_path
from pytorch_accel_lite.extending import RunRequest, TrainerCallback, TrainerLike, TrainingState, read_state
from pytorch_accel_lite.extension_tools.arguments_and_errors import check_positive_int
from pytorch_accel_lite.utils import import_extra


class RayReportCallback(TrainerCallback):
    """Report metrics and training states to Ray Train, in the function that is given to its ``TorchTrainer``.

    With ``train(..., resume_from="latest")``, a run that Ray restarts resumes from ``ray.train.get_checkpoint()``. The
    number of workers may change; if it does not, the result is bitwise the same. The data order is seeded even if the
    trainer has no seed.

    Args:
        every_n_epochs: report the latest metrics and a state after every n epochs, and at the end of the run
        every_n_steps: report a state, and the metrics known by then, also after every n optimizer updates
        directory: where states are written before Ray copies them to its storage; by default the system's directory for
            temporary files. It must be on a disk that the machines of all workers share.

    Raises:
        ImportError: if Ray is not installed (extra ``ray``)
        RuntimeError: at the start of a run in a process that is no worker of Ray Train, or if workers do not share the
            directory
    """

    affects_training = False
    #: The location of states in messages.
    save_dir = "ray.train.get_checkpoint()"

    def __init__(
        self, every_n_epochs: int = 1, every_n_steps: int | None = None, directory: str | os.PathLike[str] | None = None
    ) -> None:
        self._ray: Any = import_extra("ray.train", "ray", "RayReportCallback")
        self.every_n_epochs = check_positive_int("every_n_epochs", every_n_epochs)
        self.every_n_steps = None if every_n_steps is None else check_positive_int("every_n_steps", every_n_steps)
        self.directory = None if directory is None else folder_path("directory", directory)
        self._resumed = ExitStack()
        self._reported: dict[str, Any] | None = None

    def configure_run(self, trainer: TrainerLike, request: RunRequest, **kwargs: Any) -> None:
        """Offer Ray's checkpoint to resume from."""
        if request.kind != "training":
            return
        try:
            workers = self._ray.get_context().get_world_size()
        except Exception:  # the class depends on Ray's version
            workers = None
        if workers != trainer.ranks.world_size:
            raise RuntimeError(
                f"RayReportCallback reports to Ray Train, but it knows of {workers or 'no'} workers, and this job has "
                f"{trainer.ranks.world_size} process(es). Call train() in the function that is given to "
                "ray.train.torch.TorchTrainer, or use SaveTrainingStateCallback without Ray."
            )
        request.saves_training_states = True
        request.state_sources.append(self)

    def find_latest(self, trainer: TrainerLike) -> TrainingState | None:
        """Return the state that Ray Train reported last, or ``None`` if there is none."""
        checkpoint = self._ray.get_checkpoint()
        if checkpoint is None:
            return None
        directory = self._resumed.enter_context(checkpoint.as_directory())  # a copy if storage is remote
        return read_state(Path(directory), trainer.ranks)

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Release the state that the run was resumed from."""
        self._resumed.close()
        self._reported = None

    def on_train_step_checkpoint(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Report a state if it is due."""
        if self.every_n_steps is not None and trainer.progress.update % self.every_n_steps == 0:
            self._report(trainer)

    def on_epoch_checkpoint(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Report the metrics of the epoch, and a state."""
        every = self.every_n_epochs
        is_due = every is not None and trainer.progress.epochs_completed % every == 0
        if is_due or trainer.run.is_finished:
            self._report(trainer)

    def on_stop_training_error(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Report the end of a run that was stopped early."""
        if trainer.train_dataloader is not None and trainer.run.window.is_between_updates:
            self._report(trainer)

    def _report(self, trainer: TrainerLike) -> None:
        progress = trainer.progress.state_dict()
        if progress == self._reported:
            return
        self._reported = progress
        trainer.check_weights()
        history = trainer.run_history
        metrics = {name: history.get_latest_metric(name) for name in history.get_metric_names()}
        metrics |= {name: progress[name] for name in ("epoch", "update", "samples")}
        folder = Path(trainer.ranks.result_of_first(self._new_folder))
        trainer.ranks.run_together(lambda: _check_shared(folder))
        try:
            state = folder / f"update-{trainer.progress.update:09d}"
            trainer.save_training_state(state)
            checkpoint = self._ray.Checkpoint.from_directory(state) if trainer.ranks.rank == 0 else None
            self._ray.report(metrics, checkpoint=checkpoint)
        finally:
            if trainer.ranks.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)

    def _new_folder(self) -> str:
        if self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)
        return tempfile.mkdtemp(prefix="ray_report_", dir=self.directory)


def _check_shared(folder: Path) -> None:
    if not folder.is_dir():
        raise RuntimeError(
            f"The directory {str(folder)!r}, made by the first worker, is not there on all machines. Pass "
            "RayReportCallback(directory=...) one on a disk that they share."
        )
