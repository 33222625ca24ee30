"""Settings of torch that hold for a run: which kernels compute it, and in which precision."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from tests.tasks import listener, make_data, make_trainer, train

ALL = {"deterministic": False, "cudnn_benchmark": True, "tf32": True}
cudnn = torch.backends.cudnn
OPERATIONS: list[Any] = []
if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
    OPERATIONS = [torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn, torch.backends.mkldnn.matmul]


def settings() -> dict[str, Any]:
    """What torch's own functions say, and what programs of the GPU's libraries read."""
    found: dict[str, Any] = {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warns only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn_benchmark": cudnn.benchmark,
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "convolutions": cudnn.allow_tf32,
        "products": torch.get_float32_matmul_precision(),
        "workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    }
    return found | {"operations": precisions()}


def precisions() -> list[str]:
    return [operation.fp32_precision for operation in OPERATIONS]


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    before = settings()
    yield
    assert settings() == before


def test_settings_hold_within_runs_of_all_kinds_and_not_after_them():
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
    trainer = make_trainer([look], deterministic=True, tf32=True)
    assert settings() == before
    train(trainer)
    assert settings() == before
    trainer.predict(make_data(2))
    assert seen.keys() == {"training", "evaluation", "prediction", "after a nested evaluation"}
    for name, found in seen.items():
        assert found["deterministic"], name
        assert (found["tf32"], found["convolutions"], found["products"]) == (True, True, "high"), name
        assert not found["cudnn_benchmark"], name
        assert found["workspace"] is not None, name
    seen.clear()
    train(trainer)
    assert seen["training"]["deterministic"]
    trainer.find_lr(make_data(), num_steps=10, per_device_batch_size=2)


def test_settings_are_what_they_were_after_an_error():
    def fail(trainer: Any, **kwargs: Any) -> None:
        assert cudnn.benchmark
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(make_trainer([listener(on_train_step_end=fail)], **ALL))


@pytest.mark.parametrize(
    "choose",
    [
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        lambda: setattr(cudnn, "benchmark", True),
        lambda: torch.set_float32_matmul_precision("medium"),
        pytest.param(
            lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
            marks=pytest.mark.skipif(not OPERATIONS, reason="operations have a precision of their own since torch 2.9"),
        ),
    ],
    ids=["deterministic", "benchmark", "medium", "operations"],
)
def test_what_a_user_has_chosen_before_is_restored(choose, tmp_path):
    before = settings()
    choose()
    try:
        chosen = precisions()
        seen = []
        look = listener(on_train_step_end=lambda trainer, **kwargs: seen.append(settings()))
        train(make_trainer([look], deterministic=False, cudnn_benchmark=False, tf32=False), size=2)
        [found] = seen
        off = "deterministic", "cudnn_benchmark", "tf32", "convolutions"
        assert not any(found[name] for name in off)
        assert found["products"] == "highest"
        assert precisions() == chosen
        train(make_trainer([SaveTrainingStateCallback(tmp_path, save_every_n_epochs=1)]), size=2)
        assert precisions() == chosen
    finally:
        torch.use_deterministic_algorithms(before["deterministic"], warn_only=before["warns only"])
        cudnn.benchmark = before["cudnn_benchmark"]
        torch.set_float32_matmul_precision(before["products"])
        for operation, value in zip(OPERATIONS, before["operations"], strict=True):
            operation.fp32_precision = value


def test_what_has_no_deterministic_kernel_is_an_error_only_if_asked_for():
    model = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), Unpooled(), nn.Flatten(), nn.Linear(4, 1))
    train(make_trainer(model=model))
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        train(make_trainer(model=model, deterministic=True))


class Unpooled(nn.Module):
    """Has an operation for which torch knows no deterministic kernel, on any device."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled, places = nn.functional.max_pool2d(x, 2, return_indices=True)
        return nn.functional.max_unpool2d(pooled, places, 2)


def test_settings_are_recorded_with_the_run_and_a_change_is_said(tmp_path, capsys):
    trainer = train(make_trainer([SaveTrainingStateCallback(tmp_path, save_every_n_epochs=1)], **ALL))
    assert {name: trainer.run_config.to_dict()[name] for name in ALL} == ALL
    assert {name: trainer.run_config.notable().get(name) for name in ALL} == ALL
    [state] = tmp_path.glob("update-*")
    manifest = json.loads((state / "manifest.json").read_text())
    recorded = manifest.get("metadata", manifest)
    assert {name: recorded["run_config"][name] for name in ALL} == ALL
    assert recorded["machine"]["precision of float32 products"] == "high"
    again = make_trainer([SaveTrainingStateCallback(tmp_path, save_every_n_epochs=1)], deterministic=True)
    capsys.readouterr()
    train(again, epochs=2, resume_from="latest")
    printed = capsys.readouterr().out
    assert "precision of float32 products high (now highest), deterministic kernels False (now True)" in printed


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"deterministic": "warn"}, "deterministic='warn' must be True, False, or None"),
        ({"tf32": 1}, "tf32=1 must be True, False, or None"),
        ({"deterministic": True, "cudnn_benchmark": True}, "cudnn_benchmark=True does not work with deterministic"),
        ({"benchmark": True}, "no argument 'benchmark': it is called cudnn_benchmark"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given, error):
    with pytest.raises((TypeError, ValueError), match=error):
        make_trainer(**given)
