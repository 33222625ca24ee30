"""Resuming with changed settings: a line says what differs and which value holds."""

from __future__ import annotations

import random
import shutil
import tempfile
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, StepLR
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import PrintProgressCallback, SaveTrainingStateCallback, TerminateOnNaNCallback
from pytorch_accel_lite.extending import SETTINGS_RECORDER
from tests.launching import SOAK
from tests.ranks import rank, shared_folder
from tests.small_models import equal_weights, make_data

DIFFERS = "The settings of this program are not those of the run that it resumes."


class Scaled(TrainerCallback):
    """A callback of a user, with an argument."""

    def __init__(self, factor: float = 1.0, save_path: str = "here") -> None:
        self.factor = factor
        self.save_path = save_path


class Observer(TrainerCallback):
    affects_training = False


def absolute(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).abs().mean()


BASE: dict[str, Any] = {
    "lr": 0.01,
    "weight_decay": 0.0,
    "amsgrad": False,
    "seed": 1,
    "loss": nn.MSELoss,
    "activation": nn.Tanh,
    "data": make_data,
    "callbacks": list,
    "train": {},
}


def run(folder: Path, epochs: int = 1, resume: bool = False, **changes: Any) -> Trainer:
    it = BASE | changes
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), it["activation"](), nn.Linear(3, 1))
    options = {name: it[name] for name in ("lr", "weight_decay", "amsgrad")}
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    callbacks = [SaveTrainingStateCallback(folder), *it["callbacks"]()]
    trainer = Trainer(model, it["loss"](), optimizer, callbacks, seed=it["seed"])
    arguments = {"per_device_batch_size": 2, "resume_from": "latest" if resume else None} | it["train"]
    trainer.train(it["data"](), epochs, **arguments)
    return trainer


def said(folder: Path, capsys: Any, first: dict[str, Any], then: dict[str, Any]) -> str:
    """The message about settings of a run that resumes another one."""
    run(folder, **first)
    capsys.readouterr()
    run(folder, 2, resume=True, **(first | then))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(DIFFERS)]
    assert len(lines) <= 1
    return lines[0].removeprefix(DIFFERS).strip() if lines else ""


def shifted(size: int = 6) -> TensorDataset:
    return TensorDataset(*(tensor + 1 for tensor in make_data(size).tensors))


def steps(size: int) -> Any:
    return {"create_scheduler_fn": partial(StepLR, step_size=size)}


NAMED = {
    "rate": ({}, {"lr": 0.5}, "Kept as in the state: optimizer.lr=0.01 (not 0.5)."),
    "options": ({}, {"weight_decay": 0.1, "amsgrad": True}, "weight_decay=0.0 (not 0.1), optimizer.amsgrad=False"),
    "seed": ({}, {"seed": 2}, "Kept as in the state: seed=1 (not 2)."),
    "no seed": ({}, {"seed": None}, "Kept as in the state: seed=1 (not None)."),
    "schedule": ({"train": steps(2)}, {"train": steps(3)}, "StepLR(step_size=2) (not StepLR(step_size=3))."),
    "class of schedules": (
        {"train": steps(2)},
        {"train": {"create_scheduler_fn": partial(ExponentialLR, gamma=0.9)}},
        "Changed from here on: create_scheduler_fn=ExponentialLR(gamma=0.9) (was StepLR(step_size=2)).",
    ),
    "samples": ({}, {"data": shifted}, "Changed from here on: train_dataset: other rows in tensors[0]."),
    "length": ({}, {"data": partial(make_data, 8)}, "train_dataset: 8 samples instead of 6."),
    "loss": ({}, {"loss": nn.L1Loss}, "loss_func=L1Loss(reduction='mean') (was MSELoss(reduction='mean'))"),
    "argument of the loss": (
        {"loss": partial(nn.HuberLoss, delta=1.0)},
        {"loss": partial(nn.HuberLoss, delta=0.5)},
        "loss_func=HuberLoss(delta=0.5, reduction='mean') (was HuberLoss(delta=1.0",
    ),
    "code of the loss": (
        {"loss": lambda: lambda outputs, targets: (outputs - targets).abs().mean()},
        {"loss": lambda: lambda outputs, targets: (outputs - targets).square().mean()},
        "loss_func=<lambda> has other code.",
    ),
    "function": ({"loss": lambda: absolute}, {}, ""),
    "model": ({}, {"activation": nn.GELU}, "model.1=GELU(approximate='none') (was Tanh())"),
    "clipping": ({}, {"train": {"gradient_clip_norm": 1.0}}, "gradient_clip_norm=1.0 (was None)."),
    "accumulation": ({}, {"train": {"gradient_accumulation_steps": 2}}, "gradient_accumulation_steps=2 (was 1)."),
    "batch": ({}, {"train": {"per_device_batch_size": 3}}, "train_per_device_batch_size=3 (was 2)."),
    "order": ({}, {"train": {"train_dataloader_kwargs": {"shuffle": False}}}, "sampler=SequentialSampler() (was Ran"),
    "argument": (
        {"callbacks": lambda: [Scaled(0.5)]},
        {"callbacks": lambda: [Scaled(0.9)]},
        "Changed from here on: callbacks.Scaled.factor=0.9 (was 0.5).",
    ),
    "callback": ({}, {"callbacks": lambda: [Scaled()]}, "Changed from here on: Scaled is new."),
    "no callback": ({"callbacks": lambda: [Scaled()]}, {"callbacks": list}, "Scaled is missing."),
    "evaluation data": (
        {"train": {"eval_dataset": make_data()}},
        {"train": {"eval_dataset": shifted()}},
        "Changed from here on: eval_dataset: other rows in tensors[0]",
    ),
    "nothing": ({}, {}, ""),
    "workers": ({}, {"train": {"train_dataloader_kwargs": {"num_workers": 1}}}, ""),
    "path": ({"callbacks": lambda: [Scaled()]}, {"callbacks": lambda: [Scaled(save_path="there")]}, ""),
    "observer": ({}, {"callbacks": lambda: [TerminateOnNaNCallback(), PrintProgressCallback(), Observer()]}, ""),
    "same schedule": ({"train": {"create_scheduler_fn": "cosine"}}, {}, ""),
}


@pytest.mark.sampled
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.extension("named_schedules")) if case == "same schedule" else case
        for case in NAMED
    ],
)
def test_changed_settings_are_reported_with_their_values(case, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, then, words = NAMED[case]
    message = said(tmp_path / "states", capsys, first, then)
    assert words in message
    assert bool(words) == bool(message)


def test_restored_options_hold_until_a_callback_sets_them(tmp_path, capsys):
    class SetRate(TrainerCallback):
        def on_training_run_start(self, trainer, **kwargs):
            trainer.optimizer.param_groups[0]["lr"] = 0.5

    run(tmp_path)
    assert run(tmp_path, 2, resume=True, lr=0.5).optimizer.param_groups[0]["lr"] == 0.01
    assert "optimizer.lr=0.01 (not 0.5)" in capsys.readouterr().out
    trainer = run(tmp_path, 3, resume=True, lr=0.5, callbacks=lambda: [SetRate()])
    assert trainer.optimizer.param_groups[0]["lr"] == 0.5
    assert "optimizer.lr=0.01 (not 0.5)" in capsys.readouterr().out  # before the callback is called
    run(tmp_path, 4, resume=True, lr=0.5, callbacks=lambda: [SetRate()])
    assert DIFFERS not in capsys.readouterr().out
    run(tmp_path, 5, resume=True, callbacks=lambda: [SetRate()])
    assert "optimizer.lr=0.5 (not 0.01)" in capsys.readouterr().out


def another(folder: Path) -> Trainer:
    """A trainer with another rate, and what a first one has saved: a checkpoint and a state."""
    trainer = run(folder / "states", train={"create_scheduler_fn": "cosine"})
    trainer.save_checkpoint(folder / "checkpoint.pt")
    trainer.save_training_state(folder / "state")
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    return Trainer(model, nn.MSELoss(), torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.0), callbacks=[])


@pytest.mark.extension("named_schedules")
def test_loading_a_checkpoint_prints_what_it_restores(tmp_path, capsys):
    trainer, path = another(tmp_path), tmp_path / "checkpoint.pt"
    capsys.readouterr()
    trainer.load_checkpoint(path)
    shown = capsys.readouterr().out
    assert f"'{path}' has set options of the optimizer: optimizer.lr=0.01 (not 0.5). To keep" in shown
    trainer.load_checkpoint(path, load_scheduler=False)  # it has the rate by now
    another(tmp_path)
    capsys.readouterr()
    trainer.load_checkpoint(path, load_optimizer=False, load_scheduler=False)
    assert capsys.readouterr().out == ""


@pytest.mark.extension("named_schedules")
@pytest.mark.filterwarnings("ignore:The training state holds the state of callback")
def test_loading_a_state_prints_changed_options(tmp_path, capsys):
    another(tmp_path).load_training_state(tmp_path / "state")
    assert (
        f"'{tmp_path}/state' has set options of the optimizer: optimizer.lr=0.01 (not 0.5)." in capsys.readouterr().out
    )


def test_states_without_settings_are_resumed_silently(tmp_path, capsys, monkeypatch):
    folder, recorder = tmp_path / "states", SETTINGS_RECORDER.content
    monkeypatch.setattr(SETTINGS_RECORDER, "content", None)
    run(folder)
    monkeypatch.setattr(SETTINGS_RECORDER, "content", recorder)
    run(folder, 2, resume=True, weight_decay=0.5)
    assert DIFFERS not in capsys.readouterr().out
    run(folder, 3, resume=True, weight_decay=0.5, lr=0.2)
    assert "Kept as in the state: optimizer.lr=0.01 (not 0.2)" in capsys.readouterr().out


class Augmented(Dataset):
    """Samples with noise from all generators, its own, and one that cannot be seeded.

    It counts what is read, and opens its file when it is first read.
    """

    def __init__(self) -> None:
        self.own = np.random.default_rng(3)
        self.reads: list[int] = []
        self.file: object | None = None

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index):
        self.reads.append(index)
        self.file = self.file or object()
        noise = random.random() + np.random.rand() + torch.rand(()).item() + self.own.random()
        unseeded = float(np.random.default_rng().random() < 0.5)
        return torch.full((4,), index + noise), torch.tensor([unseeded])


def test_random_augmentation_does_not_count_as_a_difference(tmp_path, capsys):
    assert said(tmp_path, capsys, {"data": Augmented}, {}) == ""


def test_reading_samples_for_comparison_leaves_no_trace(tmp_path):
    class Looks(TrainerCallback):
        def on_training_run_start(self, trainer, **kwargs):
            data = trainer.train_dataset
            seen.append((data.reads == [], data.file is None, data.own.random(), torch.get_rng_state()))

    seen: list[Any] = []
    run(tmp_path, data=Augmented, callbacks=lambda: [Looks()])
    assert seen[0][:2] == (True, True)
    assert seen[0][2] == np.random.default_rng(3).random()
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    expected = run(whole, 2).model.state_dict()
    run(rest)
    assert equal_weights(run(rest, 2, resume=True).model.state_dict(), expected)


class Faulty(Dataset):
    """Fails where its last sample is read by the main process."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index):
        if index == 5:
            raise OSError("not now")
        return make_data()[index]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(make_data())


@pytest.mark.parametrize(
    ("data", "updates"), [pytest.param(Stream, 3, marks=pytest.mark.extension("streams")), (Faulty, 2)]
)
def test_data_without_random_access_are_not_compared(data, updates, tmp_path, capsys):
    train = {"max_num_train_steps": updates, "train_dataloader_kwargs": {"shuffle": False} if data is Faulty else None}
    run(tmp_path, None, data=data, train=train)
    run(tmp_path, None, data=data, train=train, resume=True)
    assert DIFFERS not in capsys.readouterr().out


def on_several(folder: Path) -> list[str]:
    shown = StringIO()
    run(folder / "states")
    with redirect_stdout(shown):
        run(folder / "states", 2, resume=True)
        run(folder / "states", 3, resume=True, lr=0.5)
    return [line for line in shown.getvalue().splitlines() if line.startswith(DIFFERS)]


def resumed_on_several() -> list[str]:
    with shared_folder() as folder:
        return on_several(folder)


def test_only_the_main_process_reports_differences(two_ranks, tmp_path, capsys):
    first, second = two_ranks(resumed_on_several)
    assert len(first) == 1
    assert "optimizer.lr=0.01 (not 0.5)" in first[0]
    assert second == []


def saved_on_several() -> str | None:
    with shared_folder() as folder:
        run(folder / "states", train={"per_device_batch_size": 1})
        return shutil.copytree(folder / "states", tempfile.mkdtemp(), dirs_exist_ok=True) if rank() == 0 else None


def test_the_number_of_processes_does_not_count_as_a_difference(two_ranks, capsys):
    folder = Path(next(filter(None, two_ranks(saved_on_several))))
    run(folder, 2, resume=True)
    shutil.rmtree(folder)
    assert DIFFERS not in capsys.readouterr().out


PERTURBED: dict[str, Any] = {
    "lr": [0.01, 0.5],
    "weight_decay": [0.0, 0.1],
    "amsgrad": [False, True],
    "seed": [1, 2, None],
    "loss": [nn.MSELoss, nn.L1Loss, partial(nn.HuberLoss, delta=0.5), lambda: absolute],
    "activation": [nn.Tanh, nn.GELU, partial(nn.Dropout, 0.1), partial(nn.Dropout, 0.2)],
    "data": [make_data, shifted, partial(make_data, 8)],
    "callbacks": [list, lambda: [Scaled(0.5)], lambda: [Scaled(0.9)]],
    "train": [
        {},
        {"gradient_clip_norm": 1.0},
        {"gradient_clip_value": 1.0},
        {"gradient_accumulation_steps": 2},
        {"per_device_batch_size": 3},
        {"train_dataloader_kwargs": {"drop_last": True}},
    ],
}
DO_NOT_MATTER: list[dict[str, Any]] = [
    {"callbacks": lambda: [PrintProgressCallback()]},
    {"train": {"train_dataloader_kwargs": {"num_workers": 1}}},
    {"train": {"train_dataloader_kwargs": {"pin_memory": False}}},
]


@pytest.mark.soak
def test_a_random_change_is_named_or_does_not_matter(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draws = random.Random(5)
    for number in range(300 if SOAK else 4):
        setting = draws.choice([*PERTURBED])
        first, then = draws.sample(PERTURBED[setting], 2)
        assert said(tmp_path / f"{number}", capsys, {setting: first}, {setting: then}), (setting, first, then)
        other = {} if setting in ("callbacks", "train") else draws.choice(DO_NOT_MATTER)
        assert said(tmp_path / f"{number}-same", capsys, {setting: first}, other) == "", (setting, first, other)


@pytest.mark.parametrize(
    ("rates", "expected"),
    [((2.0, 3.0), "optimizer.param_groups[1].lr=3.0 (not 2.0)."), ((3.0, 3.0), "optimizer.lr=3.0")],
)
def test_the_group_whose_options_were_loaded_is_named(tmp_path, capsys, rates, expected):
    def create(*rates: float) -> Trainer:
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
        groups = [{"params": layer.parameters(), "lr": rate} for layer, rate in zip(model, rates, strict=True)]
        return Trainer(model, nn.MSELoss(), torch.optim.SGD(groups), [], seed=0)

    create(*rates).save_checkpoint(tmp_path / "checkpoint.pt")
    create(2.0, 2.0).load_checkpoint(tmp_path / "checkpoint.pt")
    assert f"has set options of the optimizer: {expected}" in capsys.readouterr().out
