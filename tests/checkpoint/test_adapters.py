"""Saving trainable weights only, and adapters of PEFT."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import fully_shard

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import SaveBestModelCallback, SaveTrainingStateCallback
from tests.adapters import bert, rows, with_lora
from tests.launching import CAN_SHARD
from tests.sharded import gathered, large_model, mesh_of
from tests.small_models import equal_weights, float64_data, listener, make_trainer, train, weights


def run(folder: Path | None, model: nn.Module, resume_from: Path | None = None, **kwargs: Any) -> Trainer:
    """Two epochs of two updates on one process, with a state after each update."""
    saving = [] if folder is None else [SaveTrainingStateCallback(folder, save_every_n_steps=1, **kwargs)]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    trainer = Trainer(model, None, optimizer, callbacks=saving, seed=3)
    per_process = 4 // trainer.ranks.world_size
    trainer.train(rows(), 2, per_device_batch_size=per_process, resume_from=resume_from, gradient_clip_norm=1.0)
    return trainer


class Net(nn.Module):
    """A frozen body with a batch norm, and a head that shares a weight with a layer of its own."""

    def __init__(self, seed: int = 0, head_seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        torch.manual_seed(head_seed)
        self.first, self.second, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.second.weight = self.first.weight
        self.body.requires_grad_(False)

    def forward(self, x):
        return self.out(self.second(self.first(self.body(x))))


FROZEN = {f"body.{place}.{kind}" for place in (0, 1) for kind in ("weight", "bias")}


def trained(model: nn.Module | None = None) -> Trainer:
    return train(make_trainer(model=Net() if model is None else model))


def test_trainable_only_saves_trained_weights_and_buffers(tmp_path):
    trainer = trained()
    trainer.save_model(tmp_path / "model.safetensors", trainable_only=True)
    saved = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert saved.keys() == weights(trainer.model).keys() - FROZEN
    other = make_trainer(model=Net(head_seed=5))
    other.model.requires_grad_(True)  # what is frozen when it is loaded does not matter
    other.load_checkpoint(tmp_path / "model.safetensors")
    assert equal_weights(weights(other.model), weights(trainer.model))
    trainer.save_model(tmp_path / "full.safetensors")
    other = make_trainer(model=Net(7, 7))
    other.load_checkpoint(tmp_path / "full.safetensors")
    assert equal_weights(weights(other.model), weights(trainer.model))


def test_checkpoints_and_best_models_may_omit_frozen_weights(tmp_path):
    best = SaveBestModelCallback(tmp_path / "best.pt", "train_loss_epoch", trainable_only=True)
    trainer = train(make_trainer([best], Net()), 3)  # loads the best at the end
    state = torch.load(tmp_path / "best.pt")
    assert state["model_state_dict"].keys() == weights(trainer.model).keys() - FROZEN
    assert state["frozen_weights"].keys() == FROZEN
    other = make_trainer(model=Net(head_seed=5))
    other.load_checkpoint(tmp_path / "best.pt")
    assert equal_weights(weights(other.model), weights(trainer.model))


def test_loading_warns_which_frozen_weights_of_the_model_differ(tmp_path):
    trained().save_model(tmp_path / "model.safetensors", trainable_only=True)
    with pytest.warns(UserWarning, match=r"frozen weights of Net are not .* differ in body.0.bias, body.0.weight\. Cr"):
        make_trainer(model=Net(seed=1)).load_checkpoint(tmp_path / "model.safetensors")


def test_frozen_weights_in_another_order_are_others(tmp_path):
    trained().save_model(tmp_path / "model.safetensors", trainable_only=True)
    model = Net()
    weight = model.body[0].weight.detach()
    weight.copy_(weight.flip(0))
    with pytest.warns(UserWarning, match=r"frozen weights of Net are not .* differ in body.0.weight\. Cr"):
        make_trainer(model=model).load_checkpoint(tmp_path / "model.safetensors")


def test_sums_that_ignore_the_order_are_those_of_earlier_files(tmp_path):
    trained().save_checkpoint(tmp_path / "model.pt", trainable_only=True)
    checkpoint = torch.load(tmp_path / "model.pt")
    sums = {name: value.detach().view(torch.int32).sum().item() for name, value in Net().body.named_parameters("body")}
    torch.save(checkpoint | {"frozen_weights": sums}, tmp_path / "model.pt")
    make_trainer(model=Net()).load_checkpoint(tmp_path / "model.pt")
    with pytest.warns(UserWarning, match=r"differ in body.0.bias, body.0.weight\. Cr"):
        make_trainer(model=Net(seed=1)).load_checkpoint(tmp_path / "model.pt")


@pytest.fixture
def trainable_weights(tmp_path):
    """A file with the trainable weights of a ``Net``."""
    trained().save_model(tmp_path / "model.safetensors", trainable_only=True)
    return tmp_path / "model.safetensors"


def test_trainable_weights_missing_in_the_file_are_an_error(trainable_weights):
    model = Net()
    model.more = nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"does not fit .*: missing in the checkpoint: more.bias, more.weight\."):
        make_trainer(model=model).load_checkpoint(trainable_weights)


def test_weights_missing_in_the_model_are_an_error(trainable_weights):
    model = Net()
    del model.body[1]
    with pytest.raises(ValueError, match=r"not in the model: body.1.bias, body.1.num_batches_tracked"):
        make_trainer(model=model).load_checkpoint(trainable_weights)


def test_a_file_of_trainable_weights_that_is_cut_off_is_an_error(trainable_weights):
    trainable_weights.write_bytes(trainable_weights.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"model.safetensors' is damaged"):
        make_trainer(model=Net()).load_checkpoint(trainable_weights)


def test_saving_trainable_weights_requires_some(tmp_path):
    trainer = make_trainer(model=Net().requires_grad_(False))
    for save in (trainer.save_model, trainer.save_checkpoint):
        with pytest.raises(ValueError, match="would leave out all weights: no parameter of Net requires a gradient"):
            save(tmp_path / "model", trainable_only=True)
    best = SaveBestModelCallback(tmp_path / "best.pt", "train_loss_epoch", trainable_only=True)
    with pytest.raises(ValueError, match="no parameter of Net requires a gradient"):  # before it is trained
        train(make_trainer([best], Net().requires_grad_(False)))
    assert not list(tmp_path.iterdir())


def states_of(folder: Path, **kwargs: Any) -> SaveTrainingStateCallback:
    return SaveTrainingStateCallback(folder, save_every_n_steps=1, trainable_only=True, **kwargs)


@pytest.mark.extension("printed_states")
def test_a_state_without_frozen_weights_resumes_to_the_same_bits(tmp_path, capsys):
    from pytorch_accel_lite.checkpoint import print_contents

    whole = train(make_trainer([states_of(tmp_path / "a")], Net(), seed=1), 2)
    state = tmp_path / "a" / "update-000000002"
    assert safetensors.torch.load_file(state / "model.safetensors").keys().isdisjoint(FROZEN)
    print_contents(state)
    assert "left out: 4 frozen tensors" in capsys.readouterr().out
    resumed = train(make_trainer([states_of(tmp_path / "b")], Net(head_seed=5), seed=1), 2, resume_from=state)
    assert equal_weights(weights(resumed.model), weights(whole.model))
    with pytest.raises(ValueError, match=r"frozen weights of Net are not .* differ in body.0.bias, body.0.weight\. Cr"):
        train(make_trainer([states_of(tmp_path / "c")], Net(seed=5), seed=1), 2, resume_from=state)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_weights_frozen_later_stay_in_every_state(tmp_path, asynchronous):
    """Also in states of resumed runs, in which the layer is frozen from the start."""

    def freeze(trainer: Trainer) -> None:
        trainer.get_model().first.requires_grad_(trainer.progress.epoch < 2)

    def model() -> nn.Module:
        return Net(head_seed=5)

    freezing = listener(on_train_epoch_start=freeze)
    whole = train(make_trainer([freezing, states_of(tmp_path / "a", asynchronous=asynchronous)], model(), seed=1), 3)
    assert "body.0.weight" not in safetensors.torch.load_file(tmp_path / "a" / "update-000000007" / "model.safetensors")
    folders = [tmp_path / name for name in "abc"]
    for before, after in itertools.pairwise(folders):
        state = before / f"update-00000000{4 + folders.index(after)}"
        resumed = train(make_trainer([freezing, states_of(after)], model(), seed=1), 3, resume_from=state)
        assert equal_weights(weights(resumed.model), weights(whole.model))


def test_adapters_are_saved_like_any_trained_weights(tmp_path):
    pytest.importorskip("peft")
    trainer = make_trainer(model=nn.ModuleDict({"body": with_lora(bert()), "head": nn.Linear(2, 2)}))
    trainer.save_model(tmp_path / "model.safetensors", trainable_only=True)
    kept = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert len([name for name in kept if "lora" in name]) == 8
    assert len([name for name in kept if "modules_to_save" in name]) == 2
    assert len(kept) == 8 + 2 + 2


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("trainable_only", [False, True])
def test_with_adapters_a_run_resumes_to_the_same_bits(tmp_path, trainable_only):
    """Also if adapters and head are initialised with other random numbers."""
    pytest.importorskip("peft")
    whole = run(tmp_path / "whole", with_lora(bert()), trainable_only=trainable_only)
    states = sorted((tmp_path / "whole").glob("update-*"))
    assert len(states) == 4
    for state in (states[0], states[2]):
        resumed = run(tmp_path / state.name, with_lora(bert(), seed=7), resume_from=state)
        assert equal_weights(weights(resumed.model), weights(whole.model))
        assert str(resumed.optimizer.state_dict()) == str(whole.optimizer.state_dict())
    kept = safetensors.torch.load_file(states[0] / "model.safetensors")
    assert len(kept) == (10 if trainable_only else len(weights(whole.model)))


def resumed_and_saved(folder: Path) -> Any:
    """Weights of an uninterrupted run and of one that was resumed, and what the adapters in its folder give."""
    from peft import PeftModel

    whole = run(folder / "states", with_lora(bert()), trainable_only=True)
    state = folder / "states" / "update-000000002"
    resumed = run(folder / "again", with_lora(bert(), seed=9), resume_from=state)
    resumed.save_model(folder / "adapters")
    loaded = PeftModel.from_pretrained(bert(), folder / "adapters")
    return weights(whole.get_model()), weights(resumed.get_model()), weights(loaded)


@pytest.mark.thorough
@pytest.mark.extension("pretrained")
def test_several_processes_resume_and_peft_saves_adapters(two_ranks, tmp_path):
    pytest.importorskip("peft")
    results = two_ranks.run(resumed_and_saved, tmp_path)
    for whole, resumed, loaded in results:
        assert equal_weights(whole, results[0][0])
        assert equal_weights(resumed, whole)
        assert equal_weights(loaded, whole)


def without_what_is_frozen(folder: Path) -> Any:
    """The weights of a run, of one resumed from a state without frozen weights, and of a model that loads its files."""

    def train(name: str, head_seed: int = 0, resume_from: Path | None = None) -> Trainer:
        model = large_model()
        torch.manual_seed(head_seed)
        model[3].reset_parameters()
        model[0].requires_grad_(False)
        for layer in (model[0], model[3], model):
            fully_shard(layer, mesh=mesh_of(2))
        optimizer = torch.optim.AdamW(model[3].parameters(), lr=0.01)
        saving = SaveTrainingStateCallback(folder / name, save_every_n_steps=1, trainable_only=True)
        trainer = Trainer(model, nn.MSELoss(), optimizer, [saving], accelerator=Accelerator(cpu=True), seed=3)
        trainer.train(float64_data(12), 1, per_device_batch_size=3, resume_from=resume_from)
        return trainer

    found = [trainer := train("whole")]
    trainer.save_model(folder / "model.safetensors", trainable_only=True)
    trainer.save_checkpoint(folder / "model.pt", trainable_only=True)
    found.append(train("again", 5, folder / "whole" / "update-000000001"))
    for file in ("model.safetensors", "model.pt"):
        found.append(train(file.replace(".", "-"), 5))
        found[-1].load_checkpoint(folder / file)
    return [gathered(trainer.get_model().state_dict()) for trainer in found]


@pytest.mark.thorough
@CAN_SHARD
def test_frozen_weights_that_are_sharded_are_left_out_too(two_ranks, tmp_path):
    for found in two_ranks.run(without_what_is_frozen, tmp_path):
        assert all(equal_weights(weights, found[0]) for weights in found)
    saved = safetensors.torch.load_file(tmp_path / "model.safetensors")
    in_state = safetensors.torch.load_file(tmp_path / "whole" / "update-000000001" / "model.safetensors")
    assert saved.keys() == in_state.keys() == {"3.weight", "3.bias"}
