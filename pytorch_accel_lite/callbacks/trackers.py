"""Logging to TensorBoard, Weights & Biases, MLflow and the other trackers that Accelerate supports."""

from __future__ import annotations

import importlib.util
import os
import re
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from pytorch_accel_lite.base.environment import install_command
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.base.text import did_you_mean
from pytorch_accel_lite.callbacks.metrics_file import as_number_or_text
from pytorch_accel_lite.callbacks.new_metrics import NewMetrics
from pytorch_accel_lite.callbacks.step_logging import StepLogger


class TrackerCallback(StepLogger):
    """Log a run to a tracker: its configuration, metrics every n updates, every evaluation and epoch, and pictures.

    The step is always the number of updates made. A resumed run continues the same curves: TensorBoard discards what
    was logged after the resumed state, MLflow receives no step twice, and Weights & Biases drops repeated steps itself;
    the run's id is kept in the training state. Other trackers may show such steps twice. Logging happens in the
    background, except with your own tracker object; if it fails, the run ends with that error at the next row.

    During a training run, Accelerate's tracker is in ``trainer.accelerator.trackers``; outside, nothing is logged.

    :param tracker: ``"tensorboard"``, ``"wandb"``, ``"mlflow"``, ``"comet_ml"``, ``"aim"``, ``"clearml"``,
        ``"dvclive"``, ``"swanlab"``, ``"trackio"``, or your own ``GeneralTracker``
    :param project_name: name of the tracker's project or experiment; for TensorBoard, the directory in ``project_dir``
    :param project_dir: directory for trackers that write files
    :param every_n_updates: number of updates between rows with the mean loss and the ``step_metrics`` of other
        callbacks; ``None`` logs only epochs
    :param config: your own hyper-parameters, logged with the run's configuration
    :param init_kwargs: further arguments for the tracker, such as a run name or tags
    :raises ValueError: if the tracker is unknown
    :raises ImportError: if the tracker's package is not installed
    """

    def __init__(
        self,
        tracker: str | GeneralTracker = "tensorboard",
        project_name: str = "training",
        project_dir: str | os.PathLike[str] = "runs",
        every_n_updates: int | None = 50,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(every_n_updates)
        if isinstance(tracker, str):
            _check_tracker(tracker)
        elif not isinstance(tracker, GeneralTracker):
            raise TypeError(f"tracker={tracker!r} must be the name of a tracker, or an accelerate GeneralTracker.")
        self.tracker = tracker
        self.project_name = project_name
        self.project_dir = os.fspath(project_dir)
        self.config = dict(config or {})
        self.init_kwargs = dict(init_kwargs or {})
        self.run_id: str | None = None
        self._started: Any = None
        self._client: Any = None
        self._is_over = True
        self._new = NewMetrics()
        #: The metrics of the run history that were logged last, and at which update.
        self._latest: dict[str, Any] = {}
        self._evaluated = False
        self._known: dict[str, set[int]] = {}
        self._first_update = 0

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        super().on_training_run_start(trainer)
        self._started = None
        self._known = {}
        self._first_update = trainer.progress.update
        self._is_over = False
        self.run_id = None
        self._new.skip(trainer.run_history)
        self._latest = {}
        self._evaluated = False
        if self.tracker == "tensorboard":
            trainer.ranks.run_together(lambda: os.makedirs(self._folder, exist_ok=True), only_first=True)

    @property
    def _folder(self) -> str:
        return os.path.join(self.project_dir, self.project_name)

    def in_background(self, job: Callable[[], None]) -> None:
        """Run a job in the background, or immediately for a user's own tracker, which may be bound to this thread."""
        self._start()  # in this thread, to which an MLflow run is bound too
        if isinstance(self.tracker, str):
            super().in_background(job)
        else:
            job()

    # Called at first use: the resumed state is known only after on_training_run_start.
    def _start(self) -> None:
        trainer = self._trainer
        assert trainer is not None
        if self._started is not None or not trainer.accelerator.is_main_process:
            return
        tracker = self._create(trainer)
        if self.tracker == "tensorboard":
            _wait_for_a_later_second(self._folder)
        tracker.start()
        self._started = tracker
        trainer.accelerator.trackers.append(tracker)
        if not self._first_update:
            configuration = {} if trainer.run_config is None else trainer.run_config.to_dict()
            self._started.store_init_configuration(
                {name: as_number_or_text(value) for name, value in {**configuration, **self.config}.items()}
            )
        self._note_run()

    def _create(self, trainer: TrainerLike) -> Any:
        if not isinstance(self.tracker, str):
            return self.tracker
        tracker_class = LOGGER_TYPE_TO_CLASS[self.tracker]
        arguments = dict(self.init_kwargs)
        if self.tracker == "tensorboard":
            arguments.setdefault("purge_step", self._first_update)  # readers ignore older records from there on
        elif self.run_id is not None:
            arguments |= {"wandb": {"id": self.run_id, "resume": "allow"}, "mlflow": {"run_id": self.run_id}}.get(
                self.tracker, {}
            )
        if tracker_class.requires_logging_directory:
            return tracker_class(self.project_name, self.project_dir, **arguments)
        return tracker_class(self.project_name, **arguments)

    def _note_run(self) -> None:
        """Remember the run's id, and the steps it already has."""
        if self.tracker == "wandb":
            self.run_id = self._started.run.id
        elif self.tracker == "mlflow":
            from mlflow.tracking import MlflowClient

            self.run_id = self._started.active_run.info.run_id
            self._client = MlflowClient()
            for name in self._client.get_run(self.run_id).data.metrics:
                history = self._client.get_metric_history(self.run_id, name)
                self._known[name] = {metric.step for metric in history}

    def write_row(self, update: int, epoch: int, values: dict[str, float]) -> None:
        self._log({"epoch": epoch, **values}, update)

    def on_eval_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._evaluated = True

    def on_train_step_checkpoint(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if self._evaluated:  # in the middle of the epoch
            self._log_new(trainer)

    def on_epoch_checkpoint(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._log_new(trainer)

    def on_evaluation_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if not self._is_over:
            self._log_new(trainer)

    def _log_new(self, trainer: TrainerLike) -> None:
        self._average(keep=0)  # trackers do not accept rows of earlier updates afterwards
        new = self._new.take(trainer.run_history)
        self._evaluated = False
        if new:
            update = trainer.progress.update
            values = {name: as_number_or_text(value) for name, value in new.items()}
            earlier = self._latest["values"] if self._latest.get("update") == update else {}
            self._latest = {"update": update, "values": earlier | values}
            if trainer.accelerator.is_main_process:
                self.in_background(lambda: self._log(values, update))

    def _log(self, values: dict[str, Any], step: int) -> None:
        """Log values, unless the tracker has them from an earlier attempt. Runs in the background."""
        new = {name: value for name, value in values.items() if step not in self._known.setdefault(name, set())}
        if not new:
            return
        for name in new:
            self._known[name].add(step)
        if self.tracker != "mlflow":
            self._started.log(new, step=step)
            return
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        numbers = {name: value for name, value in new.items() if not isinstance(value, str)}
        metrics = [Metric(name, float(value), now, step) for name, value in numbers.items()]
        self._client.log_batch(self.run_id, metrics=metrics)

    def log_images(self, trainer: TrainerLike, images: Mapping[str, Any], step: int | None = None) -> None:
        """Log pictures. May be called on the first process only, or on all.

        :param images: arrays of shape (height, width, channels) with values from 0 to 255, by name
        :param step: step to log at; defaults to the number of updates made
        """
        if not trainer.accelerator.is_main_process or self._is_over:
            return
        at = trainer.progress.update if step is None else step
        pictures = {name: np.array(image) for name, image in images.items()}  # copies, as they are logged later
        self.in_background(lambda: self._log_images(pictures, at))

    def _log_images(self, pictures: dict[str, Any], step: int) -> None:
        for name, picture in pictures.items():
            if self.tracker == "tensorboard":
                self._started.writer.add_image(name, picture, global_step=step, dataformats="HWC")
            elif self.tracker == "mlflow":
                self._client.log_image(self.run_id, picture, artifact_file=f"{name}/{step}.png")
            elif hasattr(self._started, "log_images"):
                self._started.log_images({name: [picture]}, step=step)

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if self._is_over:
            return
        try:
            self._log_new(trainer)
            super().on_training_run_end(trainer)
        finally:
            self._finish(trainer)

    def on_exception(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if self._is_over:
            return
        try:
            super().on_exception(trainer, **kwargs)
            if trainer.ranks.world_size == 1:
                self.on_training_run_end(trainer)
        finally:
            self._finish(trainer)

    def _finish(self, trainer: TrainerLike) -> None:
        self._is_over = True
        tracker = self._started
        self._started = None
        if tracker is not None:
            trainer.accelerator.trackers.remove(tracker)
            tracker.finish()

    def state_dict(self) -> dict[str, Any]:
        """Write pending rows, and return the run's id and what was logged last."""
        trainer = None if self._is_over else self._trainer
        if trainer is not None and (self._evaluated or not trainer.progress.is_mid_epoch):
            self._log_new(trainer)  # the state may be taken before this callback's turn
        state = super().state_dict() | {"logged": dict(self._new.counts), "latest": dict(self._latest)}
        if self._started is not None and self.tracker == "tensorboard":
            self._started.writer.flush()  # buffered records would be lost if the program were killed
        run_id = self.run_id
        if self._trainer is not None:  # only the first process knows it
            run_id = self._trainer.ranks.broadcast_object(lambda: self.run_id)
        return state | {"run_id": run_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state returned by :meth:`state_dict`, and log the values of its update again.

        TensorBoard discards what was logged at that update, as well as everything after it.
        """
        super().load_state_dict(state)
        self.run_id = state["run_id"]
        trainer = self._trainer
        self._new.counts = dict(state["logged"])
        if trainer is not None:
            self._new.follow(trainer.run_history)  # which may not be saved
        self._latest = dict(state.get("latest", {}))
        row, latest = self._last_row, self._latest
        if trainer is None or self._is_over or not trainer.accelerator.is_main_process:
            return
        update = trainer.progress.update
        if row.get("update") == update:
            self.in_background(lambda: self.write_row(update, row["epoch"], row["values"]))
        if latest.get("update") == update:
            self.in_background(lambda: self._log(latest["values"], update))


def _wait_for_a_later_second(directory: str) -> None:
    """Wait until a new TensorBoard file will be read after those in the directory, for at most a few seconds.

    Files are read in the order of their names, which begin with the second in which they were made. Were two attempts
    made in the same second, the rest of the name would decide which one discards the other's rows: host and process.
    """
    names = [re.match(r"events\.out\.tfevents\.(\d+)\.", name) for name in os.listdir(directory)]
    ahead = max((int(match[1]) for match in names if match), default=0) + 1 - time.time()
    if ahead > 5:
        warnings.warn(
            f"The latest file in {directory!r} was made {ahead:.0f} s in the future, by the clock of this machine. "
            "TensorBoard may hide rows of this run: set the clocks of your machines, or use another project_dir.",
            stacklevel=2,
        )
    elif ahead > 0:
        time.sleep(ahead)


def _check_tracker(name: str) -> None:
    if name not in LOGGER_TYPE_TO_CLASS:
        known = list(LOGGER_TYPE_TO_CLASS)
        raise ValueError(f"tracker={name!r} is not known.{did_you_mean(name, known)} Choose from: {', '.join(known)}.")
    if importlib.util.find_spec(name) is None:
        install = install_command(name, name.replace("_", "-"))  # some trackers are extras
        raise ImportError(f"tracker={name!r} needs the package {name}. Install it with: {install}")
