"""Checkpoints of compiled models, and prefixes of wrappers in files."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytorch_accel_lite.callbacks import SaveBestModelCallback
from tests.checkpoint.small_checkpoints import Holder, save_file
from tests.small_models import equal_weights, make_data, make_model, make_trainer, train, weights


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def partly_compiled(model: nn.Module) -> nn.Module:
    model[0] = compiled(model[0])  # type: ignore[index, operator]
    return model


@pytest.mark.parametrize("wrap", [compiled, partly_compiled])
def test_a_compiled_model_is_saved_like_a_plain_one(tmp_path, wrap):
    trainer = make_trainer(model=wrap(make_model(0)))
    trainer.save_checkpoint(tmp_path / "model.pt")
    saved = torch.load(tmp_path / "model.pt", weights_only=True)["model_state_dict"]
    assert equal_weights(saved, weights(make_model(0)))


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [compiled, partly_compiled])
def test_compiled_and_plain_models_load_each_others_checkpoints(tmp_path, wrap):
    plain, wrapped = make_trainer(model=make_model(0)), make_trainer(model=wrap(make_model(1)))
    plain.save_checkpoint(tmp_path / "plain.pt")
    wrapped.save_checkpoint(tmp_path / "compiled.pt")
    wrapped.load_checkpoint(tmp_path / "plain.pt")
    plain.load_checkpoint(tmp_path / "compiled.pt")
    data = make_data()
    assert torch.equal(wrapped.predict(data), make_trainer(model=make_model(0)).predict(data))
    assert equal_weights(weights(plain.model), weights(make_model(1)))


def test_a_name_that_ends_like_the_prefix_of_compile_stays(tmp_path):
    model = nn.Module()
    model.pre_orig_mod = compiled(nn.Linear(2, 1))
    make_trainer(model=model, optimizer=None).save_checkpoint(tmp_path / "model.pt")
    saved = torch.load(tmp_path / "model.pt", weights_only=True)["model_state_dict"]
    assert saved.keys() == {"pre_orig_mod.weight", "pre_orig_mod.bias"}


def test_a_compiled_model_can_be_trained_saved_and_loaded(tmp_path):
    model = compiled(make_model())
    trainer = make_trainer([SaveBestModelCallback(tmp_path / "best.pt", "train_loss_epoch")], model=model)
    train(trainer, epochs=2)
    plain = train(make_trainer(), epochs=2)
    assert equal_weights(torch.load(tmp_path / "best.pt")["model_state_dict"], weights(plain.model))
    assert trainer.get_model() is model
    assert trainer.get_model(keep_torch_compile=False) is model._orig_mod


PREFIXES = ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."]


@pytest.mark.parametrize(
    ("make", "prefix"), [*((make_model, prefix) for prefix in PREFIXES), (Holder, ""), (Holder, "module.")]
)
@pytest.mark.parametrize("wrap", [compiled, lambda model: model])
def test_wrapper_prefixes_in_a_file_are_ignored(tmp_path, make, prefix, wrap):
    path = save_file(tmp_path / "model.pt", make(1), prefix)
    trainer = make_trainer(model=wrap(make(0)))
    trainer.load_checkpoint(path)
    assert equal_weights(weights(trainer.get_model(keep_torch_compile=False)), weights(make(1)))
