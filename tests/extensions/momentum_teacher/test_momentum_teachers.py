"""Momentum teachers: the formula, schedules, exact resuming, several processes, shards."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import MomentumTeacherCallback, SaveTrainingStateCallback
from tests.launching import CAN_SHARD
from tests.ranks import OrderedStream, check_processes, every_state, run_and_resume, world_size
from tests.sharded import fit, gathered, sharded_trainer
from tests.small_models import equal_weights, float64_data, float64_model, largest_difference, listener, weights

DATA = float64_data(26)
IN_ORDER = {"shuffle": False}


def cosine(update: int, num_updates: int) -> float:
    """The schedule of DINO, with a smaller momentum, so that the few updates of a test show."""
    return 1 - 0.4 * (1 + math.cos(math.pi * update / num_updates)) / 2


class Taught(Trainer):
    """Learns the outputs of its teacher and, with a small weight, the targets."""

    teacher: MomentumTeacherCallback

    def calculate_train_batch_loss(self, batch: Any) -> Any:
        inputs, targets = batch
        wanted = 0.7 * self.teacher(inputs) + targets
        outputs = self.model(inputs)
        return {"loss": nn.functional.mse_loss(outputs, wanted), "model_outputs": outputs}


def taught(
    teacher: MomentumTeacherCallback,
    callbacks: Any = (),
    model: nn.Module | None = None,
    kind: type[Taught] = Taught,
    **kwargs: Any,
) -> Taught:
    model = float64_model() if model is None else model
    trainer = kind(model, None, torch.optim.SGD(model.parameters(), lr=0.05), [teacher, *callbacks], **kwargs)
    trainer.teacher = teacher
    return trainer


def train(trainer: Trainer, **kwargs: Any) -> Trainer:
    trainer.train(DATA, 2, per_device_batch_size=4 // world_size(), train_dataloader_kwargs=IN_ORDER, **kwargs)
    return trainer


def by_hand(momentum: Any, every: int = 1) -> tuple[nn.Module, nn.Module]:
    """The hand-written loop."""
    model = float64_model()
    teacher = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(DATA, 4)
    for update, (inputs, targets) in enumerate(batch for _ in range(2) for batch in loader):
        with torch.no_grad():
            wanted = 0.7 * teacher(inputs) + targets
        nn.functional.mse_loss(model(inputs), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (update + 1) % every == 0:
            with torch.no_grad():
                for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
                    slow.lerp_(fast, 1 - momentum(update, 2 * len(loader)))
    return model, teacher


@pytest.mark.parametrize(
    ("arguments", "momentum", "every"),
    [
        ({"momentum": 0.9}, lambda update, num_updates: 0.9, 1),
        ({"momentum": cosine}, cosine, 1),
        ({"momentum": 0, "every_n_updates": 3}, lambda update, num_updates: 0, 3),
    ],
    ids=["momentum", "schedule", "target network"],
)
def test_a_teacher_equals_that_of_a_hand_written_loop(arguments, momentum, every):
    model, expected = by_hand(momentum, every)
    trainer = train(taught(teacher := MomentumTeacherCallback(**arguments)))
    assert equal_weights(trainer.model.state_dict(), model.state_dict())
    assert equal_weights(teacher.module.state_dict(), expected.state_dict())
    assert not equal_weights(teacher.module.state_dict(), model.state_dict())


def test_a_skipped_update_does_not_move_the_teacher():
    moved: list[dict[str, torch.Tensor]] = []
    teacher = MomentumTeacherCallback(0.9)
    skip = listener(on_optimizer_step_start=lambda t: t.skip_update() if t.progress.update == 1 else None)
    look = listener(on_optimizer_step_end=lambda t: moved.append(copy.deepcopy(teacher.module.state_dict())))
    train(taught(teacher, [skip, look]))
    assert equal_weights(moved[0], moved[1])
    assert not equal_weights(moved[1], moved[2])


def pair(trainer: Any) -> dict[str, torch.Tensor]:
    named = {"model": trainer.get_model(), "teacher": trainer.teacher.module}
    return {f"{name}.{key}": value for name, module in named.items() for key, value in weights(module).items()}


def with_states(folder: Path | None, **kwargs: Any) -> Trainer:
    return train(taught(MomentumTeacherCallback(cosine, every_n_updates=2), every_state(folder), seed=0), **kwargs)


@pytest.mark.thorough
@pytest.mark.processes
def test_processes_have_one_teacher_and_resume_to_the_same_bits(two_ranks):
    check_processes(two_ranks, with_states, pair)


def with_batch_norm(folder: Path | None, **kwargs: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)).double()
    return train(taught(MomentumTeacherCallback(0.9), every_state(folder), model, seed=0), **kwargs)


@pytest.mark.processes
def test_all_processes_have_the_buffers_of_the_teacher(two_ranks):
    """Batch norm has others on each process until the next forward pass."""
    whole, *others = [run for runs in two_ranks.run(run_and_resume, with_batch_norm, pair) for run in runs]
    assert len(others) > 3
    assert all(equal_weights(other, whole) for other in others)


def in_shards(how: str, folder: Path) -> list[dict[str, torch.Tensor]]:
    """The model and its teacher, also of a run that is resumed."""
    found = []
    for resume_from in (None, folder / how / "update-000000004"):
        saving = SaveTrainingStateCallback(folder / (how if resume_from is None else "again"), save_every_n_steps=4)
        teacher = MomentumTeacherCallback(cosine)
        trainer = sharded_trainer(how, [teacher, saving], trainer_class=Taught)
        trainer.teacher = teacher
        found.append(gathered(pair(fit(trainer, how, resume_from=resume_from))))
        trainer.barrier()
    return found


@pytest.mark.thorough
@CAN_SHARD
@pytest.mark.processes
def test_a_sharded_model_has_a_sharded_teacher(tmp_path, two_ranks):
    expected = in_shards("whole", tmp_path)[0]
    for whole, resumed in two_ranks.run(in_shards, "fsdp", tmp_path):
        assert largest_difference(whole, expected) < 1e-12
        assert equal_weights(resumed, whole)


def test_modes_and_buffers_of_the_teacher_are_its_own():
    """In training mode, its batch norm normalises by the batch, as in BYOL; its statistics still follow the model's."""

    class InTrainingMode(Taught):
        def train_epoch_start(self):
            super().train_epoch_start()
            self.teacher.module.train()

    layers = [nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)]
    model = nn.Sequential(*layers).double()
    train(taught(teacher := MomentumTeacherCallback(0), model=model, kind=InTrainingMode))
    assert teacher.module.training
    assert equal_weights(teacher.module.state_dict(), model.state_dict())
    assert not any(parameter.requires_grad for parameter in teacher.module.parameters())


def test_before_its_first_run_the_teacher_is_the_model():
    model = nn.Sequential(nn.Linear(5, 1), nn.Dropout(0.5)).double()
    trainer = taught(teacher := MomentumTeacherCallback(0.9), model=model)
    trainer.find_lr(DATA, 4)  # a trial without callbacks
    outputs = teacher(DATA.tensors[0])
    assert not outputs.requires_grad
    assert model.training
    assert torch.equal(outputs, model.eval()(DATA.tensors[0]))


def test_a_teacher_is_saved_after_every_epoch(tmp_path):
    train(taught(teacher := MomentumTeacherCallback(0.9, save_path=tmp_path / "teacher.pt")))
    assert equal_weights(torch.load(tmp_path / "teacher.pt")["model_state_dict"], teacher.module.state_dict())


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"momentum": 1.5}, "momentum=1.5 must be at least 0 and at most 1"),
        ({"momentum": "0.9"}, "momentum='0.9' must be a number"),
        ({"every_n_updates": 0}, "every_n_updates=0 must be at least 1"),
    ],
)
def test_a_momentum_teacher_refuses_bad_momenta(kwargs, message):
    with pytest.raises((TypeError, ValueError), match=message):
        MomentumTeacherCallback(**kwargs)


def test_a_schedule_that_leaves_its_range_is_an_error():
    trainer = taught(MomentumTeacherCallback(lambda update, num_updates: 1 + update))
    with pytest.raises(ValueError, match=r"momentum\(1, 14\)=2 must be at least 0 and at most 1"):
        train(trainer)


@pytest.mark.extension("streams")
def test_a_schedule_needs_the_length_of_the_run():
    trainer = taught(MomentumTeacherCallback(cosine))
    with pytest.raises(ValueError, match=r"no length\. Pass max_num_train_steps to train"):
        trainer.train(OrderedStream(DATA), 1, per_device_batch_size=4)
    taught(MomentumTeacherCallback(0.9)).train(OrderedStream(DATA), 1, per_device_batch_size=4)


def test_a_teacher_without_a_trainer_is_explained():
    with pytest.raises(RuntimeError, match="Pass it to the callbacks of a trainer before you call it"):
        MomentumTeacherCallback()(DATA.tensors[0])
