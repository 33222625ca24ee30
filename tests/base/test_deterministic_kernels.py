"""Deterministic kernels: within runs, and nowhere else."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from tests.small_models import listener, make_data, make_trainer, train

cudnn = torch.backends.cudnn


def settings() -> dict[str, Any]:
    """The settings of torch, and the environment variables of GPU libraries."""
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warns only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "benchmark": cudnn.benchmark,
        "workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    }


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    before = settings()
    yield
    assert settings() == before


def test_kernels_are_deterministic_within_runs_of_all_kinds_only():
    seen: dict[str, dict[str, Any]] = {}

    def note(name: str) -> Any:
        return lambda trainer, **kwargs: seen.setdefault(name, settings())

    def nested(trainer: Any, **kwargs: Any) -> None:
        trainer.evaluate(make_data(2))
        seen["after a nested evaluation"] = settings()

    before = settings()
    look = listener(
        on_train_step_end=note("training"),
        on_eval_step_end=note("evaluation"),
        on_predict_step_end=note("prediction"),
        on_train_epoch_end=nested,
    )
    trainer = make_trainer([look], deterministic=True)
    assert settings() == before
    train(trainer)
    assert settings() == before
    trainer.predict(make_data(2))
    assert seen.keys() == {"training", "evaluation", "prediction", "after a nested evaluation"}
    for name, found in seen.items():
        assert found["deterministic"], name
        assert not found["benchmark"], name
        assert found["workspace"] is not None, name
    seen.clear()
    train(trainer)
    assert seen["training"]["deterministic"]


def test_backend_settings_are_restored_after_an_error():
    def fail(trainer: Any, **kwargs: Any) -> None:
        assert torch.are_deterministic_algorithms_enabled()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(make_trainer([listener(on_train_step_end=fail)], deterministic=True))


def test_earlier_backend_settings_are_restored():
    torch.use_deterministic_algorithms(True, warn_only=True)
    cudnn.benchmark = True
    try:
        chosen = settings()
        seen = []
        look = listener(on_train_step_end=lambda trainer, **kwargs: seen.append(settings()))
        for deterministic in (False, True, None):
            train(make_trainer([look], deterministic=deterministic), size=2)
            assert settings() == chosen
        assert [found["deterministic"] for found in seen] == [False, True, True]
        assert [found["benchmark"] for found in seen] == [True, False, True]
        assert seen[1]["warns only"]
    finally:
        torch.use_deterministic_algorithms(False)
        cudnn.benchmark = False


def test_a_missing_deterministic_kernel_fails_only_on_request():
    model = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), Unpooled(), nn.Flatten(), nn.Linear(4, 1))
    train(make_trainer(model=model))
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        train(make_trainer(model=model, deterministic=True))


class Unpooled(nn.Module):
    """Has an operation without a deterministic kernel on any device."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled, places = nn.functional.max_pool2d(x, 2, return_indices=True)
        return nn.functional.max_unpool2d(pooled, places, 2)


def test_settings_of_kernels_are_recorded_and_a_change_reported(tmp_path, capsys):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        trainer = make_trainer([SaveTrainingStateCallback(tmp_path, save_every_n_epochs=1)], deterministic=False)
        train(trainer)
    finally:
        torch.set_float32_matmul_precision(before)
    assert trainer.run_config.to_dict()["deterministic"] is False
    [state] = tmp_path.glob("update-*")
    manifest = json.loads((state / "manifest.json").read_text())
    recorded = manifest.get("metadata", manifest)
    assert recorded["run_config"]["deterministic"] is False
    assert recorded["machine"]["precision of float32 products"] == "high"
    again = make_trainer([SaveTrainingStateCallback(tmp_path, save_every_n_epochs=1)], deterministic=True)
    capsys.readouterr()
    train(again, epochs=2, resume_from="latest")
    printed = capsys.readouterr().out
    assert "precision of float32 products high (now highest), deterministic kernels False (now True)" in printed


def test_deterministic_must_be_a_boolean():
    with pytest.raises(TypeError, match="deterministic='warn' must be True, False, or None"):
        make_trainer(deterministic="warn")
