"""Logging to TensorBoard, Weights & Biases, MLflow and the other trackers that Accelerate supports."""

from __future__ import annotations

import os
import posixpath
import re
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, TensorBoardTracker

from pytorch_accel_lite.extending import TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import check_dict, did_you_mean, parse_location
from pytorch_accel_lite.extension_tools.metrics_and_callbacks import Interval, MetricValue, NewMetrics, Picture
from pytorch_accel_lite.extension_tools.plain_types import StateDict
from pytorch_accel_lite.extension_tools.texts_and_pages import as_number_or_text
from pytorch_accel_lite.extensions.step_logging import StepLogger
from pytorch_accel_lite.utils import import_extra

_NO_PICTURES: Mapping[str, Picture] = MappingProxyType({})
_LONGEST_KEY = 240  # characters; MLflow allows 250
#: Settings for trackers that need an account, to write only to this machine.
_OFFLINE = {
    "wandb": "init_kwargs={'mode': 'offline'}",
    "swanlab": "init_kwargs={'mode': 'offline'}",
    "comet_ml": "init_kwargs={'online': False}",
    "clearml": "the environment variable CLEARML_OFFLINE_MODE=1",
}


class TrackerCallback(StepLogger):
    """Log a run to a tracker: its configuration, metrics every n updates, every evaluation and epoch.

    The step is always the number of updates. A resumed run continues the same curves: TensorBoard discards rows from
    after the resumed state, MLflow receives no step twice, and Weights & Biases drops repeated steps itself. The
    training state has the run's id. Other trackers may show repeated steps twice. Logging happens in the background,
    except with your own tracker object; if it fails, the run ends with that error at the next row.

    During a training run, Accelerate's tracker is in ``trainer.accelerator.trackers``; outside, nothing is logged.

    Args:
        tracker: ``"tensorboard"``, ``"wandb"``, ``"mlflow"``, ``"comet_ml"``, ``"aim"``, ``"clearml"``, ``"dvclive"``,
            ``"swanlab"``, ``"trackio"``, or your own ``GeneralTracker``
        project_name: name of the tracker's project or experiment; for TensorBoard, the directory in ``project_dir``
        project_dir: directory for trackers that write files
        every_n_updates: number of updates between rows with the mean loss and the ``step_metrics`` of other callbacks;
            ``None`` logs only epochs
        every: instead, log these rows at an ``Interval``, such as ``"10_000 samples"``
        config: your own hyper-parameters, logged with the run's configuration
        init_kwargs: further arguments for the tracker, such as a run name or tags; ``{"mode": "offline"}`` lets Weights
            & Biases and SwanLab write to this machine only, without an account

    Attributes:
        run_id: the tracker's id of the run; ``None`` before the run begins, or if the tracker has no ids

    Raises:
        ValueError: if the tracker is unknown
        ImportError: if the tracker's package is not installed; lists the installed ones
    """

    def __init__(
        self,
        tracker: str | GeneralTracker = "tensorboard",
        project_name: str = "training",
        project_dir: str | os.PathLike[str] = "runs",
        every_n_updates: int | None = 50,
        config: Mapping[str, object] | None = None,
        init_kwargs: Mapping[str, object] | None = None,
        *,
        every: str | Interval | None = None,
    ) -> None:
        super().__init__(every_n_updates, every)
        if isinstance(tracker, str):
            _check_tracker(tracker)
        elif not isinstance(tracker, GeneralTracker):
            raise TypeError(f"tracker={tracker!r} must be the name of a tracker, or an accelerate GeneralTracker.")
        self.tracker = tracker
        if not isinstance(project_name, (str, os.PathLike)):
            raise TypeError(f"project_name={project_name!r} must be text, not {type(project_name).__name__}.")
        self.project_name = project_name
        self.project_dir = os.fspath(parse_location(project_dir, "project_dir"))
        self.config = check_dict("config", config)
        self.init_kwargs = check_dict("init_kwargs", init_kwargs)
        self.run_id: str | None = None
        self._active: Any = None
        self._client: Any = None
        self._is_finished = True
        self._new = NewMetrics()
        self._evaluated = False
        self._logged_steps: dict[str, set[int]] = {}  # the logged steps by key
        self._keys: dict[str, str] = {}  # names of metrics by key
        self._first_update = 0

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        super().on_training_run_start(trainer)
        self._active = None
        self._logged_steps = {}
        self._first_update = trainer.progress.update
        self._is_finished = False
        self.run_id = None
        self._new.skip(trainer.run_history)
        self._evaluated = False
        if self.tracker == "tensorboard":
            folder = os.path.join(self.project_dir, self.project_name)
            if "://" not in folder:
                trainer.ranks.run_together(lambda: os.makedirs(folder, exist_ok=True), only_first=True)

    def in_background(self, job: Callable[[], None]) -> None:
        """Run a job in the background; for a user's own tracker, which may be bound to this thread, immediately."""
        self._start()  # in this thread, as an MLflow run is bound to its thread
        if isinstance(self.tracker, str):
            super().in_background(job)
        else:
            job()

    # Called at the first use, because the state of a resumed run is loaded after on_training_run_start.
    def _start(self) -> None:
        trainer = self._trainer
        assert trainer is not None
        if self._active is not None or not trainer.accelerator.is_main_process:
            return
        if self.tracker == "tensorboard" and self._first_update:
            time.sleep(1)  # TensorBoard reads the files of attempts in the order of the seconds of their creation
        try:
            tracker = self._create(trainer)
            tracker.start()
        except Exception as error:
            if self.tracker not in _OFFLINE:
                raise
            raise RuntimeError(
                f"TrackerCallback({self.tracker!r}) could not start: {str(error).rstrip('.')}. To log to this machine "
                f"only, without an account, pass {_OFFLINE[self.tracker]}."
            ) from error
        self._active = tracker
        trainer.accelerator.trackers.append(tracker)
        if not self._first_update:
            configuration = {} if trainer.run_config is None else trainer.run_config.to_dict()
            self._active.store_init_configuration(
                {self._key(name): as_number_or_text(value) for name, value in {**configuration, **self.config}.items()}
            )
        self._note_run()

    def _create(self, trainer: TrainerLike) -> GeneralTracker:
        if not isinstance(self.tracker, str):
            return self.tracker
        tracker_class = LOGGER_TYPE_TO_CLASS[self.tracker]
        arguments = dict(self.init_kwargs)
        if self.tracker == "tensorboard":
            # Readers then ignore rows that an earlier attempt has logged after the state.
            arguments.setdefault("purge_step", self._first_update + 1 if self._first_update else 0)
        elif self.tracker == "wandb" and self.run_id is not None:
            arguments |= {"id": self.run_id, "resume": "allow"}
        elif self.tracker == "mlflow" and self.run_id is not None:
            arguments["run_id"] = self.run_id
        directory = [self.project_dir] if tracker_class.requires_logging_directory else []
        return tracker_class(self.project_name, *directory, **arguments)

    def _note_run(self) -> None:
        """Note the run's id, and the steps that have been logged for it."""
        if self.tracker == "wandb":
            self.run_id = self._active.run.id
        elif self.tracker == "mlflow":
            from mlflow.tracking import MlflowClient

            self.run_id = self._active.active_run.info.run_id
            self._client = MlflowClient()
            for name in self._client.get_run(self.run_id).data.metrics:
                history = self._client.get_metric_history(self.run_id, name)
                self._logged_steps[name] = {metric.step for metric in history}

    def _key(self, name: str) -> str:
        """Return the tracker's name for a metric or a setting; MLflow refuses some characters."""
        if self.tracker != "mlflow":
            return name
        key = re.sub(r"[^\w. :/-]", "_", name)
        key = key if posixpath.normpath(key) == key and not key.startswith((".", "/")) else re.sub("[./]", "_", key)
        key = key[:_LONGEST_KEY]
        while self._keys.setdefault(key, name) != name:  # the key is taken by another name
            key += "_"
        return key

    def write_row(self, update: int, epoch: int, values: dict[str, float]) -> None:
        self._log({"epoch": epoch, **values}, update)

    def on_eval_epoch_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._evaluated = True

    def on_train_step_checkpoint(self, trainer: TrainerLike, **kwargs: object) -> None:
        if self._evaluated:  # an evaluation within the epoch
            self._log_new(trainer)

    def on_evaluation_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        if not self._is_finished and trainer.run.outer is not None:
            self._log_new(trainer)

    def on_evaluation_run_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        if not self._is_finished:
            passing = trainer.run.passing_metrics
            new = self._new.take(trainer.run_history, passing)
            self._log_values(trainer, {name: value for name, value in new.items() if name not in passing})

    def on_outputs(
        self, trainer: TrainerLike, *, outputs: Mapping[str, str], pictures: Mapping[str, Picture], **kwargs: object
    ) -> None:
        """Log the outputs of a ``ShowOutputsCallback``. The text of a picture is the path of its file."""
        self._log_after_rows(trainer, dict(outputs), dict(pictures))

    def _log_new(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._log_values(trainer, self._new.take(trainer.run_history))

    def _log_values(self, trainer: TrainerLike, new: Mapping[str, MetricValue]) -> None:
        self._evaluated = False
        self._log_after_rows(trainer, {name: as_number_or_text(value) for name, value in new.items()})

    on_epoch_checkpoint = _log_new

    def _log_after_rows(
        self, trainer: TrainerLike, values: dict[str, MetricValue], pictures: Mapping[str, Picture] = _NO_PICTURES
    ) -> None:
        self._average(keep=0)  # trackers do not accept rows of earlier updates afterwards
        update = trainer.progress.update
        if values and trainer.accelerator.is_main_process:
            self.in_background(lambda: self._log(values, update, pictures))

    def _log(self, values: dict[str, MetricValue], step: int, pictures: Mapping[str, Picture] = _NO_PICTURES) -> None:
        """Log values that the tracker does not have yet, also not from an earlier attempt. Runs in the background.

        Args:
            pictures: the values that are paths of pictures, by name
        """
        values = {self._key(name): value for name, value in values.items()}
        images = {self._key(name): picture for name, picture in pictures.items()}
        new = {name: value for name, value in values.items() if step not in self._logged_steps.setdefault(name, set())}
        for name in new:
            self._logged_steps[name].add(step)
        if self.tracker != "mlflow":
            taken = self._log_images({name: picture for name, picture in images.items() if name in new}, step)
            rest = {name: value for name, value in new.items() if name not in taken}
            if rest:
                self._active.log(rest, step=step)
            return
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(name, float(value), now, step) for name, value in new.items() if not isinstance(value, str)]
        self._client.log_batch(self.run_id, metrics=metrics)
        for name, text in new.items():
            if name in images:
                self._client.log_artifact(self.run_id, text, "outputs")
            elif isinstance(text, str):
                self._client.log_text(
                    self.run_id, text, f"{re.sub(r'[^A-Za-z0-9._-]+', '_', name)[:60]}-{step:09d}.txt"
                )

    def _log_images(self, pictures: Mapping[str, Picture], step: int) -> Mapping[str, Picture]:
        """Log pictures to a tracker that takes images, and return the logged ones."""
        log_images = getattr(self._active, "log_images", None)
        if not pictures or log_images is None or not find_spec("PIL"):  # all these trackers use PIL
            return _NO_PICTURES
        if self.tracker == "aim":
            log_images({name: picture.pixels for name, picture in pictures.items()}, step=step)
            return pictures
        layout = {"dataformats": "NHWC"} if isinstance(self._active, TensorBoardTracker) else {}
        log_images({name: picture.pixels[None] for name, picture in pictures.items()}, step=step, **layout)
        return pictures

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        if self._is_finished:
            return
        try:
            self._log_new(trainer)
            super().on_training_run_end(trainer)
        finally:
            self._finish(trainer)

    def on_exception(self, trainer: TrainerLike, *, exception: BaseException, **kwargs: object) -> None:
        if self._is_finished:
            return
        try:
            super().on_exception(trainer, exception=exception)
            if trainer.ranks.world_size == 1:
                self.on_training_run_end(trainer)
        finally:
            self._finish(trainer)

    def _finish(self, trainer: TrainerLike) -> None:
        self._is_finished = True
        tracker = self._active
        self._active = None
        if tracker is not None:
            trainer.accelerator.trackers.remove(tracker)
            tracker.finish()

    def state_dict(self) -> StateDict:
        """Write pending rows, and return the run's id and the last logged values."""
        trainer = None if self._is_finished else self._trainer
        if trainer is not None and (self._evaluated or not trainer.progress.is_mid_epoch):
            self._log_new(trainer)  # the state may be saved before this callback handles the event
        state = super().state_dict() | {"logged": dict(self._new.counts)}
        if self._active is not None and self.tracker == "tensorboard":
            self._active.writer.flush()  # buffered records would be lost if the program were killed
        run_id = self.run_id
        if self._trainer is not None:  # only the first process has a tracker
            run_id = self._trainer.ranks.result_of_first(lambda: self.run_id)
        return state | {"run_id": run_id}

    def load_state_dict(self, state: StateDict) -> None:
        """Load the state returned by ``state_dict()``."""
        super().load_state_dict(state)
        self.run_id = state["run_id"]
        self._new.counts = dict(state["logged"])
        if self._trainer is not None:
            self._new.follow(self._trainer.run_history)  # the state may lack the history


def _check_tracker(name: str) -> None:
    names = list(LOGGER_TYPE_TO_CLASS)
    if name not in names:
        raise ValueError(f"tracker={name!r} is not known.{did_you_mean(name, names)} Choose from: {', '.join(names)}.")
    installed = ", ".join(repr(other) for other in names if find_spec(other)) or "none"
    import_extra(name, name.replace("_", "-"), f"tracker={name!r} (installed: {installed})")  # some have an extra
