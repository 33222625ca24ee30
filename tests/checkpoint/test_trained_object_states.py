"""States of modules and optimizers beside the model: learned loss functions, and attributes of trainer subclasses."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import StepLR

from pytorch_accel_lite import NonFiniteLossError, Trainer
from pytorch_accel_lite.callbacks import SaveBestModelCallback, SaveTrainingStateCallback
from pytorch_accel_lite.extending import USER_ATTRIBUTES, UserAttributes
from tests.launching import some_of, two_are_enough
from tests.ranks import every_state, rank, run_and_resume, world_size
from tests.small_models import (
    adamw_trainer,
    equal_weights,
    float64_data,
    float64_model,
    listener,
    make_data,
    make_model,
    make_trainer,
    same_bits,
    train,
)

DATA = float64_data(24)


class Adversarial(Trainer):
    """Has a head that the trainer's optimizer trains, a critic with an optimizer of its own, and a frozen teacher."""

    def __init__(self, seed: int = 0, critic_size: int = 1, **kwargs: Any) -> None:
        model = float64_model(seed)
        torch.manual_seed(seed)
        self.head = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1)).double()
        self.critics = [nn.Sequential(nn.Linear(1, critic_size), nn.Dropout(0.2), nn.Linear(critic_size, 1)).double()]
        self.critic_optimizer = torch.optim.Adam(self.critics[0].parameters(), lr=0.05)
        self.critic_scheduler = StepLR(self.critic_optimizer, step_size=3, gamma=0.5)
        self.teacher = float64_model(1).requires_grad_(False)
        optimizer = torch.optim.SGD([*model.parameters(), *self.head.parameters()], lr=0.05, momentum=0.9)
        super().__init__(model, nn.MSELoss(), optimizer, seed=0, **{"callbacks": []} | kwargs)

    def calculate_train_batch_loss(self, batch: Any) -> Any:
        outputs = self.head(self.model(batch[0]))
        self._train_critic(outputs.detach(), self.teacher(batch[0]))
        return {"loss": self.loss_func(outputs, batch[1]) - 0.1 * self.critics[0](outputs).mean()}

    def _train_critic(self, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        (self.critics[0](ours).mean() - self.critics[0](theirs).mean()).backward()
        for parameter in self.critics[0].parameters():
            if world_size() > 1:
                dist.all_reduce(parameter.grad)
        self.critic_optimizer.step()
        self.critic_optimizer.zero_grad()

    def optimizer_step(self) -> None:
        super().optimizer_step()
        self.critic_scheduler.step()
        self.critic_scheduler.optimizer.zero_grad()

    def everything(self) -> dict[str, Any]:
        """All trained weights in a dict."""
        return {
            "model": copy.deepcopy(self.model.state_dict()),
            "head": copy.deepcopy(self.head.state_dict()),
            "critic": copy.deepcopy(self.critics[0].state_dict()),
            "critic_optimizer": copy.deepcopy(self.critic_optimizer.state_dict()),
            "critic_scheduler": copy.deepcopy(self.critic_scheduler.state_dict()),
        }


class Normed(nn.Module):
    """A loss with running statistics, a learned scale and a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1, affine=False).double()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.teacher = nn.Dropout(0.5).eval()
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.5 * self.mean + outputs.detach().mean()
        errors = self.norm(outputs - self.teacher(targets)) + outputs - targets
        return errors.square().mean() * torch.exp(-self.scale) + self.scale


def normed_trainer(callbacks: Any = (), **kwargs: Any) -> Trainer:
    model, loss_func = float64_model(), Normed()
    optimizer = torch.optim.SGD([*model.parameters(), *loss_func.parameters()], lr=0.05, momentum=0.9)
    return Trainer(model, loss_func, optimizer, callbacks, seed=0, **kwargs)


class Elsewhere:
    """A head with running statistics and a bare parameter, held only by a function."""

    def __init__(self) -> None:
        self.head = nn.Sequential(nn.BatchNorm1d(1, affine=False), nn.Linear(1, 1)).double()
        self.scale = nn.Parameter(torch.rand((), dtype=torch.float64))
        self.parameters = [*self.head.parameters(), self.scale]

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (self.head(outputs) * self.scale - targets).square().mean()


def loss_of(head: nn.Module, scale: nn.Parameter, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (head(outputs) * scale - targets).square().mean()


PLACES: dict[str, Any] = {
    "a closure": lambda parts: lambda *batch: parts.loss(*batch),
    "a partial": lambda parts: partial(loss_of, parts.head, parts.scale),
    "a bound method": lambda parts: parts.loss,
}


def train_elsewhere(folder: Path, resume_from: Path | None = None, *, place: str, callbacks: Any = ()) -> Trainer:
    torch.manual_seed(9 if resume_from else 0)
    parts, model = Elsewhere(), float64_model(9 if resume_from else 0)
    optimizer = torch.optim.SGD([*model.parameters(), *parts.parameters], lr=0.05, momentum=0.9)
    trainer = Trainer(model, PLACES[place](parts), optimizer, [*callbacks, *every_state(folder)], seed=0)
    trainer.train(DATA, 2, per_device_batch_size=4, resume_from=resume_from)
    return trainer


def everything_optimized(trainer: Trainer) -> list[torch.Tensor]:
    return [p.detach().clone() for group in trainer.optimizer.param_groups for p in group["params"]]


class Alone(Adversarial):
    """Trains its critic separately on each process."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.optimizers = [vars(self).pop("critic_optimizer")]

    def _train_critic(self, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        self.critics[0](ours + rank()).mean().backward()
        self.optimizers[0].step()


# ------------------------------------------------------------------------------------------ the loss function


def test_a_loss_function_does_not_learn_from_evaluation_data():
    trainer = normed_trainer()
    before = copy.deepcopy(trainer.loss_func.state_dict())
    first = trainer.evaluate(DATA)
    assert trainer.evaluate(DATA) == first
    assert equal_weights(trainer.loss_func.state_dict(), before)


def test_a_loss_function_is_in_eval_mode_in_evaluations_alone():
    modes: dict[str, list[tuple[bool, bool]]] = {"train": [], "eval": []}

    def note(kind: str) -> Any:
        return lambda trainer: modes[kind].append((trainer.loss_func.norm.training, trainer.loss_func.teacher.training))

    watch = listener(on_train_step_start=note("train"), on_eval_step_start=note("eval"))
    nested = listener(on_backward_start=lambda trainer, **kwargs: trainer.evaluate(DATA))
    normed_trainer([watch, nested]).train(DATA, 2, {"a": DATA, "b": DATA}, per_device_batch_size=8)
    assert set(modes["train"]) == {(True, False)}
    assert set(modes["eval"]) == {(False, False)}


def test_a_model_inside_the_loss_stays_in_evaluation_mode_too():
    trainer = normed_trainer()
    trainer.loss_func.student = trainer.model
    trainer.evaluate(DATA)
    assert not trainer.model.training


def test_the_best_model_loaded_at_the_end_has_the_best_metric(tmp_path):
    best = SaveBestModelCallback(tmp_path / "best.pt")
    trainer = normed_trainer([best])
    worsen = listener(on_train_epoch_start=lambda t: t.progress.epoch == 3 and t.loss_func.scale.data.fill_(9.0))
    trainer.callback_handler.add_callback(worsen)
    trainer.train(DATA, 3, DATA, per_device_batch_size=8)
    assert best.best_metric_epoch == 2
    assert trainer.evaluate(DATA)["evaluation_loss"] == best.best_metric


def test_checkpoints_include_a_learned_loss_function(tmp_path):
    trainer = normed_trainer()
    trainer.train(DATA, 1, per_device_batch_size=8)
    trainer.save_checkpoint(tmp_path / "model.pt")
    loaded = normed_trainer()
    assert not equal_weights(loaded.loss_func.state_dict(), trainer.loss_func.state_dict())
    loaded.load_checkpoint(tmp_path / "model.pt")
    assert equal_weights(loaded.loss_func.state_dict(), trainer.loss_func.state_dict())
    assert loaded.evaluate(DATA) == trainer.evaluate(DATA)


def test_class_weights_of_losses_are_not_in_checkpoints(tmp_path):
    model = make_model()
    trainer = adamw_trainer(model, nn.CrossEntropyLoss(weight=torch.ones(3)))
    trainer.save_checkpoint(tmp_path / "model.pt")
    other = adamw_trainer(model, nn.CrossEntropyLoss(weight=torch.full((3,), 2.0)))
    other.load_checkpoint(tmp_path / "model.pt")
    assert other.loss_func.weight.tolist() == [2, 2, 2]


def test_a_checkpoint_of_another_loss_function_loads_and_warns(tmp_path):
    trainer = normed_trainer()
    trainer.save_checkpoint(tmp_path / "model.pt")
    other = adamw_trainer(float64_model(1), nn.MSELoss())
    with pytest.warns(UserWarning, match=r"a different loss function \(mean, norm.num_batches_tracked.*scale\)"):
        other.load_checkpoint(tmp_path / "model.pt", load_optimizer=False)
    assert equal_weights(other.model.state_dict(), trainer.model.state_dict())
    without = Trainer(float64_model(1), None, None, callbacks=[])  # only predicts
    without.load_checkpoint(tmp_path / "model.pt", load_optimizer=False)


@pytest.mark.extension("common_mistakes")
def test_a_loss_function_that_no_optimizer_trains_is_warned_of(recwarn):
    model = make_model()
    loss_func = nn.ModuleDict({"head": nn.Linear(1, 1)})
    loss_func.forward = lambda outputs, targets: (loss_func["head"](outputs) - targets).square().mean()
    trainer = make_trainer(model=model, loss_func=loss_func)
    with pytest.warns(UserWarning, match=r"ModuleDict, the loss function, .*head.weight, head.bias.*requires_grad_"):
        train(trainer)
    trainer.head_optimizer = torch.optim.SGD(loss_func.parameters(), lr=0.1)
    train(trainer)
    loss_func.requires_grad_(False)
    train(make_trainer(model=model, loss_func=loss_func))
    assert not list(recwarn)


def train_normed(folder: Path, resume_from: Path | None = None) -> Trainer:
    if resume_from:
        torch.manual_seed(rank())
    trainer = normed_trainer(every_state(folder))
    accumulation = 2 if world_size() == 1 else 1
    trainer.train(DATA, 2, DATA, 4, gradient_accumulation_steps=accumulation, resume_from=resume_from)
    return trainer


def normed_state(trainer: Trainer) -> dict[str, torch.Tensor]:
    return trainer.loss_func.state_dict() | {"weights": trainer.model[0].weight.detach().clone()}


def train_adversarial(
    folder: Path, resume_from: Path | None = None, trainer_class: type[Adversarial] = Adversarial
) -> Adversarial:
    trainer = trainer_class(seed=9 if resume_from else 0, callbacks=every_state(folder))
    trainer.train(DATA, 2, per_device_batch_size=4, resume_from=resume_from)
    return trainer


BESIDE_THE_MODEL = {
    "a loss function": (train_normed, normed_state),
    "attributes": (train_adversarial, Adversarial.everything),
}


ELSEWHERE = {f"what {place} holds": (partial(train_elsewhere, place=place), everything_optimized) for place in PLACES}
BESIDE_THE_MODEL |= ELSEWHERE


@pytest.mark.sampled
@pytest.mark.soak
@pytest.mark.parametrize(("train", "result"), some_of(BESIDE_THE_MODEL.values()), ids=some_of(BESIDE_THE_MODEL))
def test_modules_beside_the_model_resume_bit_for_bit(train, result):
    whole, *resumed = run_and_resume(train, result)
    assert len(resumed) >= 2
    assert all(same_bits(whole, run) for run in resumed)


@pytest.mark.thorough
@two_are_enough
@pytest.mark.parametrize("what", some_of(BESIDE_THE_MODEL))
def test_processes_resume_training_beside_the_model_bit_for_bit(ranks, what):
    results = ranks.run(run_and_resume, *BESIDE_THE_MODEL[what])
    for runs in results:
        assert len(runs) >= 3
        assert all(same_bits(results[0][0], run) for run in runs)


# ----------------------------------------------------------------------------- modules and optimizers as attributes


MADE_LATE = ("critics", "critic_optimizer", "critic_scheduler")


@pytest.mark.soak
def test_attributes_created_at_the_start_are_restored_too():
    class Late(Adversarial):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            put_by = {name: vars(self).pop(name) for name in MADE_LATE}
            self.make = lambda: put_by

        def training_run_start(self) -> None:
            vars(self).update(self.make())

    whole, *resumed = run_and_resume(partial(train_adversarial, trainer_class=Late), Late.everything)
    assert len(resumed) >= 4
    assert all(same_bits(whole, run) for run in resumed)


INCLUDED = "include these attributes of the trainer: head, critics.0, critic_optimizer, critic_scheduler."


@pytest.mark.extension("printed_states")
def test_a_run_that_saves_states_prints_their_contents(tmp_path, capsys):
    saving = SaveTrainingStateCallback(tmp_path / "states", save_every_n_epochs=1)
    Adversarial(callbacks=[saving]).train(DATA, 1)
    said = capsys.readouterr().out
    assert INCLUDED in said
    look_at_states_in(tmp_path / "states", capsys)
    Adversarial().train(DATA, 1)
    make_trainer([SaveTrainingStateCallback(tmp_path / "others")]).train(make_data(), 1)
    assert "raining states" not in capsys.readouterr().out


def look_at_states_in(folder: Path, capsys: Any) -> None:
    from pytorch_accel_lite.checkpoint import print_contents

    state = next(folder.glob("update-*"))
    assert not any("teacher" in name for name in torch.load(state / "trainer.pt", weights_only=True)["attributes"])
    print_contents(state)
    assert "attributes: head, critics.0, critic_optimizer, critic_scheduler" in capsys.readouterr().out


def test_a_class_attribute_turns_off_saving_attributes(tmp_path, capsys):
    class Out(Adversarial):
        saves_attributes = False

    saving = SaveTrainingStateCallback(tmp_path / "states", save_every_n_epochs=1)
    Out(callbacks=[saving]).train(DATA, 1)
    assert "attributes" not in capsys.readouterr().out
    state = next((tmp_path / "states").glob("update-*"))
    assert torch.load(state / "trainer.pt", weights_only=True)["attributes"] == {}
    Adversarial().save_training_state(tmp_path / "full")
    fresh = Out(seed=3)
    before = fresh.everything()
    fresh.load_training_state(tmp_path / "full")
    assert equal_weights(before["critic"], fresh.everything()["critic"])


def test_a_class_may_leave_out_one_attribute(tmp_path):
    class Headless(Adversarial):
        unsaved_attributes = ("head",)

    trainer = Headless()
    trainer.save_training_state(tmp_path / "state")
    trainer.save_checkpoint(tmp_path / "model.pt")
    state = torch.load(tmp_path / "state/trainer.pt", weights_only=True)
    checkpoint = torch.load(tmp_path / "model.pt")
    assert list(state["attributes"]) == ["critics.0", "critic_optimizer", "critic_scheduler"]
    assert "head" not in checkpoint["attribute_state_dicts"]


class Counted(UserAttributes):
    """Keeps the attributes ``updates`` of the trainer and ``rows`` of a callback."""

    def capture(self, trainer: Trainer) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"kept": {"": {"updates": 3}, "Ledger": {"rows": [1]}}}, {}


def test_attributes_that_no_extension_restores_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(USER_ATTRIBUTES, "content", Counted)
    normed_trainer().save_training_state(tmp_path / "state")
    monkeypatch.setattr(USER_ATTRIBUTES, "content", None)
    trainer = normed_trainer()
    trainer.counts = [1]
    trainer.train(DATA, 1)
    trainer.save_training_state(tmp_path / "without")
    normed_trainer().load_training_state(tmp_path / "without")
    wanted = "Restoring Ledger.rows, updates from '.*state' belongs to the extension 'user_attributes', which is not"
    with pytest.raises(ValueError, match=wanted):
        normed_trainer().load_training_state(tmp_path / "state")
    monkeypatch.setattr(Trainer, "saves_attributes", False)
    normed_trainer().load_training_state(tmp_path / "state")


def test_registered_objects_are_not_saved_twice(tmp_path):
    trainer = Adversarial()
    trainer.register_for_checkpointing("critic", trainer.critics[0])
    trainer.register_for_checkpointing("steps", trainer.critic_optimizer)
    trainer.encoder = trainer.model[0]
    trainer.same_head = trainer.head
    trainer.again = trainer.optimizer
    trainer.train(DATA, 1)
    trainer.save_training_state(tmp_path / "state")
    shared = torch.load(tmp_path / "state/trainer.pt", weights_only=True)
    assert list(shared["attributes"]) == ["head", "critic_scheduler"]
    assert list(shared["objects"]) == ["critic", "steps"]


class TwoOptimizers(Trainer):
    """Holds the parts of its optimizer in an attribute, or others, whose states are saved as those of parts were."""

    def __init__(self, are_parts: bool = True) -> None:
        model = nn.Sequential(nn.Linear(5, 2), nn.Linear(2, 1)).double()
        optimizers, others = (
            {name: torch.optim.Adam(layer.parameters()) for name, layer in zip(("first", "last"), model, strict=True)}
            for _ in range(2)
        )
        self.held = optimizers if are_parts else others
        super().__init__(model, nn.MSELoss(), optimizers, callbacks=[], seed=0)


def test_optimizers_that_are_attributes_too_are_saved_once(tmp_path, recwarn):
    trainer, apart, resumed = TwoOptimizers(), TwoOptimizers(are_parts=False), TwoOptimizers()
    trainer.train(DATA, 1)
    trainer.save_training_state(tmp_path / "state")
    trainer.save_checkpoint(tmp_path / "checkpoint.pt")
    assert not torch.load(tmp_path / "state" / "trainer.pt")["attributes"]
    assert "attribute_state_dicts" not in torch.load(tmp_path / "checkpoint.pt")
    resumed.load_training_state(tmp_path / "state")
    assert same_bits(resumed.held["first"].state_dict(), trainer.held["first"].state_dict())
    apart.train(DATA, 1)
    apart.save_training_state(tmp_path / "apart")
    resumed.load_training_state(tmp_path / "apart")
    assert not recwarn.list


def test_missing_and_mismatched_attributes_are_named(tmp_path):
    trainer = Adversarial()
    trainer.save_training_state(tmp_path / "state")
    del trainer.critics, trainer.critic_optimizer, trainer.critic_scheduler
    trainer.another = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    with (
        pytest.warns(UserWarning, match="holds nothing for the attribute 'another'"),
        pytest.warns(UserWarning, match="state of attribute 'critics.0', which no longer exists"),
        pytest.warns(UserWarning, match="state of attribute 'critic_optimizer', which no longer exists"),
        pytest.warns(UserWarning, match="state of attribute 'critic_scheduler', which no longer exists"),
    ):
        trainer.load_training_state(tmp_path / "state")
    with pytest.raises(ValueError, match=r"The critics.0 in .* does not fit.*of a different shape: 0.bias"):
        Adversarial(critic_size=2).load_training_state(tmp_path / "state")


def test_checkpoints_hold_a_head_that_is_an_attribute(tmp_path):
    best = SaveBestModelCallback(tmp_path / "best.pt", "train_loss_epoch", load_saved_checkpoint=False)
    heads = []
    keep = listener(on_training_run_epoch_end=lambda t: heads.append(t.everything()))
    trainer = Adversarial(callbacks=[best, keep])
    trainer.train(DATA, 2, per_device_batch_size=4)
    trainer.load_checkpoint(tmp_path / "best.pt")
    assert same_bits(trainer.everything(), heads[best.best_metric_epoch - 1])
    fresh = Adversarial(seed=5)
    before = fresh.everything()
    fresh.load_checkpoint(tmp_path / "best.pt", load_optimizer=False, load_scheduler=False)
    assert equal_weights(fresh.everything()["head"], heads[best.best_metric_epoch - 1]["head"])
    assert same_bits(fresh.everything()["critic_optimizer"], before["critic_optimizer"])
    plain = adamw_trainer(float64_model(1))
    plain.load_checkpoint(tmp_path / "best.pt", load_optimizer=False)  # a portable file: the model alone is fine
    assert equal_weights(plain.model.state_dict(), trainer.model.state_dict())


def test_the_best_model_has_modules_held_by_closures(tmp_path):
    best = SaveBestModelCallback(tmp_path / "best.pt", "train_loss_epoch", load_saved_checkpoint=False)
    trainer = train_elsewhere(tmp_path / "states", place="a closure", callbacks=[best])
    assert best.best_metric_epoch == 2
    found = everything_optimized(trainer)
    with torch.no_grad():
        for parameter in trainer.optimizer.param_groups[0]["params"]:
            parameter.zero_()
    trainer.load_checkpoint(tmp_path / "best.pt")
    assert same_bits(everything_optimized(trainer), found)


def test_saving_a_model_prints_what_it_leaves_out(tmp_path, capsys):
    trainer = train_elsewhere(tmp_path / "states", place="a partial")
    assert (
        "include what the optimizer trains outside of the model: optimizer[0][4] (Sequential)"
        in capsys.readouterr().out
    )
    trainer.save_model(tmp_path / "model")
    assert "what was trained besides it: optimizer[0][4], optimizer[0][6]. save_ch" in capsys.readouterr().out


class NeedsItsState(nn.Linear):
    """Reads its own part of a state before it is loaded, as a module of gpytorch does."""

    def _load_from_state_dict(self, state: dict[str, Any], *args: Any) -> None:
        next(iter(state.values()))
        super()._load_from_state_dict(state, *args)


def test_a_loss_function_with_the_model_is_loaded_completely(tmp_path):
    def make(seed: int) -> Trainer:
        torch.manual_seed(seed)
        model = NeedsItsState(5, 1).double()
        loss_func = Normed()
        loss_func.model = model
        optimizer = torch.optim.SGD([*model.parameters(), loss_func.scale], lr=0.05)
        return Trainer(model, loss_func, optimizer, [], seed=0)

    trainer, fresh = make(0), make(1)
    trainer.train(DATA, 1, per_device_batch_size=8)
    trainer.save_training_state(tmp_path / "state")
    fresh.load_training_state(tmp_path / "state")
    assert equal_weights(fresh.loss_func.state_dict(), trainer.loss_func.state_dict())


def test_a_non_finite_critic_is_not_saved(tmp_path):
    trainer = Adversarial()
    trainer.critics[0][0].weight.data.fill_(float("nan"))
    with pytest.raises(NonFiniteLossError, match="infinite or NaN"):
        trainer.check_weights()


@pytest.mark.extension("tuning")
def test_trials_restore_attributes():
    trainer = Adversarial()
    before = trainer.everything()
    trainer.find_lr(DATA, num_steps=10)
    assert same_bits(trainer.everything(), before)


def drifting_in_a_list() -> str:
    try:
        Alone().train(DATA, 1, per_device_batch_size=4)
    except RuntimeError as error:
        return str(error)
    return ""


def test_modules_in_lists_are_compared_between_processes(two_ranks):
    for said in two_ranks(drifting_in_a_list):
        assert "'critics.0.0.weight' differs on rank 1 from rank 0" in said


def test_complex_weights_are_checked_too():
    model = nn.Linear(2, 1, dtype=torch.complex64)
    trainer = adamw_trainer(model)
    trainer.check_weights()
    with torch.no_grad():
        model.weight[0, 0] = complex(0, float("nan"))
    with pytest.raises(NonFiniteLossError, match="infinite or NaN"):
        trainer.check_weights()
