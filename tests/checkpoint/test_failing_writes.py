"""Checkpoints that cannot be written: the file before stays as it was."""

from __future__ import annotations

import errno
import os
import pickle
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from pytorch_accel_lite import Trainer, callbacks
from pytorch_accel_lite.callbacks import SaveBestModelCallback
from pytorch_accel_lite.checkpoint.disk.atomic_files import naming_file
from tests.checkpoint.small_checkpoints import trained
from tests.small_models import equal_weights, listener, make_trainer, train, weights


class FileSize:
    """Limits the size of files of this process, to simulate a full disk."""

    def __init__(self) -> None:
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(self, size: int = 1000) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, self.before[1]))

    def free(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


@pytest.fixture
def file_size():
    size = FileSize()
    yield size
    size.free()


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_a_full_disk_at_any_point_keeps_the_old_file(tmp_path, file_size, name):
    """Torch reports a full disk within a file as "unexpected pos"."""
    trainer, path = trained(), tmp_path / name
    save = trainer.save_checkpoint if name == "model.pt" else trainer.save_model
    save(path)
    before = path.read_bytes()
    with torch.no_grad():
        next(trainer.model.parameters()).add_(1)
    for size in range(0, path.stat().st_size, 50):
        file_size.limit(size)
        with pytest.raises(OSError, match=r"File too large: '.*/model") as raised:
            save(path)
        file_size.free()
        assert (raised.value.errno, raised.value.filename) == (errno.EFBIG, str(path))
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize(
    "callback",
    [
        SaveBestModelCallback,
        pytest.param(
            lambda: callbacks.ModelEmaCallback(save_path="best_model.pt"), marks=pytest.mark.extension("model_ema")
        ),
    ],
)
def test_a_full_disk_is_named_if_the_best_model_does_not_fit(tmp_path, monkeypatch, file_size, callback):
    monkeypatch.chdir(tmp_path)
    train(make_trainer([callback()]), eval_dataset=True)
    size = Path("best_model.pt").stat().st_size
    limits = listener(on_eval_epoch_end=lambda t, **_: file_size.limit(size // 2))
    with pytest.raises(OSError, match=r"File too large: 'best_model\.pt'"):
        train(make_trainer([limits, callback()]), eval_dataset=True)


def test_an_entry_that_cannot_be_stored_leaves_the_old_file(tmp_path):
    trainer = trained()
    trainer.save_checkpoint(tmp_path / "model.pt")
    before = (tmp_path / "model.pt").read_bytes()
    with pytest.raises((TypeError, ValueError, AttributeError, pickle.PicklingError)):
        trainer.save_checkpoint(tmp_path / "model.pt", checkpoint_kwargs={"function": lambda: None})
    assert (tmp_path / "model.pt").read_bytes() == before
    assert os.listdir(tmp_path) == ["model.pt"]


def test_temporary_files_of_killed_processes_are_removed(tmp_path):
    left, under_way, foreign = (tmp_path / f".best.pt.{name}.tmp" for name in ("0123abcd", "89efcdab", "notes"))
    for path in (left, under_way, foreign):
        path.touch()
    for path in (left, foreign):
        os.utime(path, (0, 0))
    train(make_trainer([SaveBestModelCallback(tmp_path / "best.pt", "train_loss_epoch")]))
    assert {*tmp_path.iterdir()} == {tmp_path / "best.pt", under_way, foreign}


def test_a_best_model_that_was_not_saved_does_not_count(tmp_path, file_size):
    callback = SaveBestModelCallback(tmp_path / "best.pt", "score", greater_is_better=True)
    record = listener(on_train_epoch_end=lambda t: t.run_history.update_metric("score", t.progress.epoch))

    def fill_the_disk(trainer: Trainer, **kwargs: Any) -> None:
        if trainer.progress.epoch == 2:
            file_size.limit()

    kept: list[Any] = []
    keep = listener(on_train_epoch_end=lambda t: kept.append(weights(t.model)))
    disk = listener(on_train_epoch_end=fill_the_disk, on_exception=lambda trainer, **_: file_size.free())
    trainer = make_trainer([record, keep, disk, callback])
    with pytest.raises(OSError, match="File too large"):
        train(trainer, epochs=3)
    assert (callback.best_metric, callback.best_metric_epoch) == (1, 1)
    assert torch.load(tmp_path / "best.pt")["score"] == 1
    trainer.load_checkpoint(tmp_path / "best.pt")
    assert equal_weights(weights(trainer.model), kept[0])


def test_a_full_disk_is_named_if_a_file_is_open(tmp_path, file_size):
    trainer = trained()
    for save in (trainer.save_checkpoint, trainer.save_model):
        with open(tmp_path / "model", "wb", buffering=0) as file:
            file_size.limit(100)
            with pytest.raises(OSError, match=r"File too large: '.*/model'"):
                save(file)
            file_size.free()


def test_an_earlier_error_is_not_taken_for_the_reason(tmp_path):
    def save() -> None:
        with naming_file(tmp_path / "model.pt"):
            raise RuntimeError("device-side assert triggered")

    try:
        (tmp_path / "missing").read_bytes()
    except OSError:
        with pytest.raises(RuntimeError, match="device-side assert triggered"):
            save()  # as in on_exception
