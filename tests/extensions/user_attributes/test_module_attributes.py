"""Attributes of the model, the loss function and other modules: saved in training states if the run changes them."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import ModelEmaCallback, SaveTrainingStateCallback
from tests.ranks import every_state, run_and_resume
from tests.small_models import float64_data, float64_model, same_bits

DATA = float64_data(24)


class Remembering(nn.Module):
    """Counts, remembers, draws and measures, and has none of that in its ``state_dict()``."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layers = float64_model(seed)
        self.temperature = 2.0
        self.latest: list[float] = []
        self.noise = torch.Generator().manual_seed(seed)
        self.draws = np.random.default_rng(seed)
        self.hidden: torch.Tensor | None = None
        self.error = torchmetrics.MeanMetric()
        self.register_buffer("mean", torch.zeros(1, dtype=torch.float64), persistent=False)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.dropout(self.layers(x)) / self.temperature - self.mean
        if self.training:
            self.temperature *= 0.9
            self.latest = [*self.latest[-2:], outputs.detach().mean().item()]
            outputs = outputs + 0.1 * torch.randn(1, generator=self.noise) + 0.1 * self.draws.normal()
            hidden = outputs.detach().mean(0)
            outputs = outputs + sum(self.latest) + (0 if self.hidden is None else self.hidden)
            self.hidden = hidden
            self.mean += hidden
            self.error.update(hidden)
        return outputs


class Fading:
    """A loss function that is no module, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += torch.is_grad_enabled()
        return (outputs - targets).square().mean() / self.calls


class Anneals(TrainerCallback):
    """Changes what the program has set, once."""

    def on_update_end(self, trainer, **kwargs):
        if trainer.progress.update == 4:
            trainer.get_model().dropout.p = 0.05


def train(folder: Path, resume_from: Path | None = None) -> Trainer:
    model = Remembering(9 if resume_from else 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trainer = Trainer(model, Fading(), optimizer, [Anneals(), *every_state(folder)], seed=0)
    trainer.train(DATA, 3, per_device_batch_size=4, resume_from=resume_from)
    return trainer


def everything(trainer: Trainer) -> Any:
    model: Any = trainer.get_model()
    held = (model.temperature, model.latest, model.hidden, model.mean, model.error.compute(), model.dropout.p)
    return copy.deepcopy((model.state_dict(), *held, trainer.loss_func.calls, trainer.run_history.to_dict()))


def test_attributes_of_modules_resume_bit_for_bit():
    whole, *resumed = run_and_resume(train, everything)
    assert len(resumed) >= 2
    assert all(same_bits(whole, run) for run in resumed)


def resume_on_all() -> Any:
    return run_and_resume(train, everything)


@pytest.mark.thorough
def test_attributes_of_modules_of_each_process_resume_exactly(two_ranks):
    for whole, *resumed in two_ranks(resume_on_all):
        assert all(same_bits(whole, run) for run in resumed)


class Interrupts(TrainerCallback):
    saves_attributes = False

    def on_update_end(self, trainer, **kwargs):
        if trainer.progress.update == 3:
            raise RuntimeError("interrupted")


def interrupt(model: nn.Module, folder: Path, callbacks: Any = (), **kwargs: Any) -> dict[str, Any]:
    """Return what the latest state holds of attributes."""
    with pytest.raises(RuntimeError, match="interrupted"):
        resume(model, folder, [*callbacks, Interrupts()], **kwargs)
    state = torch.load(folder / "update-000000002" / "trainer.pt", weights_only=True)
    kept: dict[str, Any] = state["user_attributes"]["kept"]
    return kept


def resume(
    model: nn.Module, folder: Path, callbacks: Any = (), kind: type[Trainer] = Trainer, eval_dataset: Any = None
) -> Trainer:
    saving = SaveTrainingStateCallback(folder, save_every_n_steps=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = kind(model, nn.MSELoss(), optimizer, [saving, *callbacks], seed=0)
    trainer.train(DATA, 1, eval_dataset, per_device_batch_size=4, resume_from="latest")
    return trainer


def test_unchanged_settings_of_modules_are_those_of_the_program(tmp_path):
    interrupt(nn.Sequential(float64_model(), nn.Dropout(0.2)), tmp_path)
    model = nn.Sequential(float64_model(), nn.Dropout(0.1))
    resume(model, tmp_path)
    assert model[1].p == 0.1


class Begins(TrainerCallback):
    """Sets an attribute at each start, and sets it back within the epoch."""

    def on_train_epoch_start(self, trainer, **kwargs):
        trainer.get_model()[1].p = 0.0

    def on_update_end(self, trainer, **kwargs):
        if trainer.progress.update == 1:
            trainer.get_model()[1].p = 0.2


def test_starting_events_do_not_repeat_changes_of_modules(tmp_path):
    interrupt(nn.Sequential(float64_model(), nn.Dropout(0.2)), tmp_path, [Begins()])
    model = nn.Sequential(float64_model(), nn.Dropout(0.2))
    resume(model, tmp_path, [Begins()])
    assert model[1].p == 0.2


class Unsaved(Remembering):
    unsaved_attributes = ("latest", "hidden")


def test_a_module_may_leave_attributes_out(tmp_path):
    kept = interrupt(Unsaved(0), tmp_path)
    assert kept["model"].keys() == {"temperature", "noise", "draws", "mean"}


def test_a_trainer_may_leave_attributes_of_modules_out(tmp_path):
    class Own(Trainer):
        saves_attributes = False

    assert not interrupt(Remembering(0), tmp_path, kind=Own)


def test_weights_computed_in_each_forward_pass_are_not_kept(tmp_path):
    assert not interrupt(nn.Sequential(nn.utils.spectral_norm(nn.Linear(5, 1).double())), tmp_path)


class Fixed(nn.Module):
    """Has a table that is no part of its ``state_dict()``, and that nothing changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = float64_model()
        self.register_buffer("table", torch.ones(1, dtype=torch.float64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layers(x) * self.table
        return outputs


def test_states_leave_out_what_the_sanity_check_has_restored(tmp_path):
    assert not interrupt(Fixed(), tmp_path, eval_dataset=DATA)


def hidden_states_of_llama(folder: Path, resume_from: Path | None = None) -> Trainer:
    from transformers import LlamaConfig, LlamaForCausalLM

    class OfHiddenStates(Trainer):
        def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
            hidden = self.model(batch, output_hidden_states=True).hidden_states
            assert len(hidden) == 3  # the embeddings, and the outputs of each layer
            return {"loss": sum(state.square().mean() for state in hidden), "batch_size": len(batch)}

    torch.manual_seed(9 if resume_from else 0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=20, bos_token_id=1, eos_token_id=2, **sizes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = OfHiddenStates(model, None, optimizer, every_state(folder), seed=0)
    rows = torch.arange(64).reshape(16, 4) % 20
    trainer.train(list(rows), 1, per_device_batch_size=4, resume_from=resume_from)
    return trainer


def test_models_of_transformers_resume_with_hidden_states():
    pytest.importorskip("transformers")
    whole, *resumed = run_and_resume(hidden_states_of_llama, lambda trainer: trainer.get_model().state_dict())
    assert resumed
    assert all(same_bits(whole, run) for run in resumed)


class SavesItself(TrainerCallback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_step_checkpoint(self, trainer, **kwargs):
        if trainer.progress.update == 2:
            trainer.save_training_state(self.folder)


def test_states_that_no_callback_announced_have_them_too(tmp_path):
    model = Remembering(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = Trainer(model, nn.MSELoss(), optimizer, [SavesItself(tmp_path / "state")], seed=random.randrange(9))
    trainer.train(DATA, 1, per_device_batch_size=4)
    state = torch.load(tmp_path / "state" / "trainer.pt", weights_only=True)
    assert state["user_attributes"]["kept"]["model"]["temperature"] == 2.0 * 0.9 * 0.9


@pytest.mark.thorough
@pytest.mark.extension("model_ema")
def test_averages_of_modules_with_attributes_resume_exactly(tmp_path):
    def run(folder: Path, resume_from: Path | None = None) -> Any:
        model = Remembering(9 if resume_from else 0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        averages = ModelEmaCallback(0.5, save_path=None)
        trainer = Trainer(model, nn.MSELoss(), optimizer, [averages, *every_state(folder)], seed=0)
        trainer.train(DATA, 3, DATA, per_device_batch_size=4, resume_from=resume_from)
        return trainer

    whole, *resumed = run_and_resume(run, lambda trainer: trainer.run_history.to_dict())
    assert all(same_bits(whole, run) for run in resumed)
