"""TrackerCallback: logged values, its thread, and trackers without an account."""

from __future__ import annotations

import re
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torchmetrics import MeanSquaredError

from pytorch_accel_lite.callbacks import TrackerCallback
from tests.launching import PATIENCE, run_code
from tests.logs import scalars
from tests.small_models import listener, make_data, make_trainer, train


def test_pictures_are_logged_with_the_tracker_of_accelerate(tmp_path):
    import numpy as np

    picture = np.zeros((1, 4, 5, 3), dtype=np.uint8)

    def draw(trainer: Any) -> None:
        (tracker,) = trainer.accelerator.trackers
        tracker.log_images({"sample": picture}, step=trainer.progress.update, dataformats="NHWC")

    train(make_trainer([TrackerCallback("tensorboard", "run", tmp_path), listener(on_epoch_checkpoint=draw)]), epochs=2)
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert [(e.step, e.width, e.height) for e in events.Images("sample")] == [(3, 5, 4), (6, 5, 4)]


def test_accelerate_knows_the_tracker_during_the_run(tmp_path):
    names: list[list[str]] = []
    look = listener(on_epoch_checkpoint=lambda t: names.append([x.name for x in t.accelerator.trackers]))
    trainer = train(make_trainer([TrackerCallback("tensorboard", "run", tmp_path), look]))
    assert names == [["tensorboard"]]
    assert trainer.accelerator.trackers == []


def test_values_logged_before_an_error_are_kept(tmp_path):
    def fail(trainer: Any) -> None:
        if trainer.progress.epoch == 3:
            raise ValueError("enough of this")

    tracker = TrackerCallback("tensorboard", "run", tmp_path, every_n_updates=2)
    with pytest.raises(ValueError, match=r"^enough of this"):
        train(make_trainer([tracker, listener(on_train_epoch_end=fail)]), epochs=4)
    logged = scalars(tmp_path / "run")
    assert [step for step, _ in logged["loss"]] == [2, 4, 6, 8]
    assert [step for step, _ in logged["train_loss_epoch"]] == [3, 6, 9]


class OfOneThread(GeneralTracker):
    """A tracker that may only be used in the thread that started it, such as a database."""

    name = "own"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[int | None, dict[str, Any]]] = []
        self.pictures: list[int] = []

    @property
    def tracker(self) -> Any:
        return self

    def start(self) -> None:
        self.thread = threading.get_ident()

    def store_init_configuration(self, values: dict[str, Any]) -> None: ...

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        assert threading.get_ident() == self.thread
        self.logged.append((step, values))

    def finish(self) -> None:
        self.logged.append((None, {}))


def test_a_custom_tracker_is_used_in_one_thread():
    own = OfOneThread()

    def evaluate(trainer: Any, **kwargs: Any) -> None:
        trainer.evaluate(make_data())
        trainer.evaluate(make_data())

    trainer = make_trainer([TrackerCallback(own, every_n_updates=1), listener(on_train_epoch_end=evaluate)])
    train(trainer).evaluate(make_data())
    assert [step for step, _ in own.logged] == [1, 2, 3, 3, 3, None]
    assert [{*values} for _, values in own.logged[3:5]] == [{"train_loss_epoch"}, {"evaluation_loss"}]


@pytest.mark.extension("metrics")
def test_values_of_an_evaluation_in_a_callback_are_not_the_runs():
    from pytorch_accel_lite.callbacks import MetricsCallback

    own = OfOneThread()
    tests = listener(on_training_run_epoch_end=lambda trainer, **_: trainer.evaluate(make_data(6)))
    trainer = make_trainer([MetricsCallback({"mse": MeanSquaredError()}), TrackerCallback(own), tests])
    train(trainer, 2, eval_dataset=make_data(4))
    assert [values["mse"] for _, values in own.logged if "mse" in values] == trainer.run_history["mse"]


LOGGED = r"""
import os, sys
from pathlib import Path

name, folder = sys.argv[1:]
os.chdir(folder)
os.environ |= {"TRACKIO_DIR": f"{folder}/trackio", "HOME": folder, "WANDB_API_KEY": ""}

from pytorch_accel_lite.callbacks import TrackerCallback
from tests.launching import forget
from tests.small_models import make_trainer, train

forget("trackio")  # which reads its folder when it is imported, as another test may have done
kwargs = {"mode": "offline"} if name == "wandb" else {}
trainer = make_trainer([TrackerCallback(name, "project", every_n_updates=2, config={"idea": 7}, init_kwargs=kwargs)])
train(trainer, epochs=2, eval_dataset=True)
assert trainer.accelerator.trackers == []
print(*trainer.run_history["train_loss_epoch"], *trainer.run_history["eval_loss_epoch"], sep="\n")
"""


@pytest.mark.programs
@pytest.mark.parametrize(
    ("name", "files"),
    [pytest.param("wandb", "wandb/**/*.wandb", marks=pytest.mark.thorough), ("trackio", "trackio/*.db")],
)
def test_trackers_without_an_account_store_the_recorded_values(tmp_path, name, files):
    if find_spec(name) is None or name not in LOGGER_TYPE_TO_CLASS:
        pytest.skip(f"needs {name}, and a version of accelerate that knows it")
    output = run_code(LOGGED, name, str(tmp_path))
    values = re.findall(r"^\d\.\d+$", output, re.MULTILINE)
    assert len(values) == 4
    texts = [text.encode() for text in (*values, "train_loss_epoch", "eval_loss_epoch", "idea")]
    deadline = time.monotonic() + PATIENCE  # W&B's file is written by a process of its own, which may still be at it
    while missing := [text for text in texts if text not in b"".join(map(Path.read_bytes, tmp_path.glob(files)))]:
        assert time.monotonic() < deadline, missing
        time.sleep(0.05)
    assert len([*tmp_path.glob(files)]) == 1


@pytest.mark.programs
def test_a_tracker_without_an_account_suggests_offline_use(tmp_path):
    if find_spec("wandb") is None:
        pytest.skip("needs wandb")
    with pytest.raises(AssertionError, match=r"could not start: .* pass init_kwargs=\{'mode': 'offline'\}\."):
        run_code(LOGGED.replace('{"mode": "offline"}', "{}"), "wandb", str(tmp_path))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: TrackerCallback("tensorbord"), ValueError, "tensorbord' is not known. Did you mean 'tensorboard'"),
        (
            lambda: TrackerCallback("aim"),
            ImportError,
            r"'aim' \(installed: .*'mlflow'.*\) needs aim. Install it with: pip install aim",
        ),
        (lambda: TrackerCallback(3), TypeError, "tracker=3 must be the name"),
        (lambda: TrackerCallback(project_name=7), TypeError, "project_name=7 must be text"),
        (lambda: TrackerCallback(config="lr"), TypeError, "config='lr' must be a dict"),
        (lambda: TrackerCallback(init_kwargs=["name"]), TypeError, r"init_kwargs=\['name'\] must be a dict"),
        (lambda: TrackerCallback(every_n_updates=0), ValueError, "every_n_updates=0 must be at least 1"),
    ],
)
def test_bad_arguments_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_an_unwritable_folder_is_an_error_before_training(tmp_path):
    (tmp_path / "file").touch()
    steps: list[int] = []
    look = listener(on_train_step_start=lambda t: steps.append(1))
    with pytest.raises((OSError, ValueError), match=r"(?i)not a (folder|directory)"):
        train(make_trainer([TrackerCallback(project_dir=tmp_path / "file"), look]))
    assert not steps
