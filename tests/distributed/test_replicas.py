"""Replicas hold the same weights, or the run reports that they differ."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pytorch_accel_lite import Trainer, TrainerCallback
from tests.launching import two_are_enough
from tests.ranks import every_state, rank, shared_folder, world_size
from tests.small_models import adamw_trainer, equal_weights, float64_data, float64_model, weights

DATA = float64_data(48)


class BareModel(Trainer):
    """Calls the module and not its wrapper."""

    def calculate_train_batch_loss(self, batch: Any) -> Any:
        return {"loss": self.loss_func(self.get_model()(batch[0]), batch[1])}


class BareSometimes(BareModel):
    """Calls the module in every step but the first."""

    def calculate_train_batch_loss(self, batch: Any) -> Any:
        if self.progress.update:
            return super().calculate_train_batch_loss(batch)
        return Trainer.calculate_train_batch_loss(self, batch)


class Averaging(BareModel):
    """Averages the gradients itself."""

    def clip_gradients(self) -> None:
        for parameter in self.get_model().parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.ranks.world_size


class WithCritic(Trainer):
    """Trains a second module, which is not wrapped."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.critic = nn.Linear(5, 1, dtype=torch.float64)
        self.ranks.copy_from_first(self.critic.parameters())
        self.critic_optimizer = torch.optim.SGD(self.critic.parameters(), lr=0.1)

    def optimizer_step(self) -> None:
        super().optimizer_step()
        self.critic(torch.full((1, 5), 1.0 + rank(), dtype=torch.float64)).sum().backward()
        self.critic_optimizer.step()
        self.critic_optimizer.zero_grad()


class Unfreezing(TrainerCallback):
    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.progress.epoch == 2:
            trainer.get_model()[0].requires_grad_(True)


class WithSpare(nn.Module):
    """Has a layer that the loss does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.used = float64_model()
        self.spare = nn.Linear(5, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.used(inputs)


class CountsInForward(nn.Module):
    """Changes a frozen parameter by itself on each process."""

    def __init__(self) -> None:
        super().__init__()
        self.used = float64_model()
        self.mean = nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean += inputs.mean()
        return self.used(inputs)


def _frozen_model() -> nn.Module:
    model = float64_model()
    model[0].requires_grad_(False)
    return model


class Normalises(nn.Module):
    """Has an embedding of which each process looks up other rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = float64_model()
        torch.manual_seed(0)
        self.rows = nn.Embedding(world_size(), 1, max_norm=0.1, dtype=torch.float64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layers(inputs) + self.rows(torch.tensor([rank()]))
        return outputs


class UpsetAt(TrainerCallback):
    """Changes one bit of one weight on the last rank, after some updates. (It may heal in the next one.)"""

    def __init__(self, update: int) -> None:
        self.update = update

    def on_update_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.progress.update == self.update and rank() == world_size() - 1:
            bias = trainer.get_model()[2].bias.detach()
            bias.copy_(torch.nextafter(bias, bias + 1))


def _train(
    trainer_class: type[Trainer] = Trainer, model: nn.Module | None = None, auto_microbatch: bool = False, **kwargs: Any
) -> Any:
    model = float64_model() if model is None else model
    kwargs.setdefault("callbacks", [])
    trainer = trainer_class(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.05), seed=0, **kwargs)
    try:
        trainer.train(DATA, 3, per_device_batch_size=4, auto_microbatch=auto_microbatch)
    except RuntimeError as error:
        return trainer.progress.update, trainer.progress.epoch, str(error)
    return weights(model)


class Compares(TrainerCallback):
    """Compares the replicas every two updates."""

    def on_update_end(self, trainer, **kwargs):
        if trainer.progress.update % 2 == 0:
            trainer.compare_replicas()


def drifting() -> dict[str, Any]:
    """The number of updates and the error of each run, or its final weights."""
    return {
        "bare model": _train(BareModel),
        "bare sometimes": _train(BareSometimes),
        "critic": _train(WithCritic),
        "unfrozen": _train(model=_frozen_model(), callbacks=[Unfreezing()]),
        "unused": _train(model=WithSpare()),
        "frozen": _train(model=CountsInForward()),
        "max_norm": _train(model=Normalises()),
        "one bit": _train(callbacks=[UpsetAt(len(DATA) // (4 * world_size()))]),
        "one bit, checked often": _train(callbacks=[UpsetAt(2), Compares()]),
        "on purpose": _train(BareModel, check_replicas=False),
        "unused, as said": _train(model=WithSpare(), find_unused_parameters=True),
    }


@pytest.fixture
def drifted(ranks):
    """What each rank returns from trainings whose replicas drift apart."""
    return ranks(drifting)


def test_bypassing_ddp_is_found_after_one_update(ranks, drifted):
    others = ", ".join(map(str, range(1, ranks.world_size)))
    for update, _, said in (result["bare model"] for result in drifted):
        assert update == 1
        assert f"'0.weight' differs on rank {others} from rank 0" in said
        assert "trainer.model was never called" in said
        assert "Call self.model(...)" in said


def test_bypassing_ddp_in_some_steps_is_found_after_the_epoch(drifted):
    for update, epoch, said in (result["bare sometimes"] for result in drifted):
        assert (update > 1, epoch) == (True, 1)
        assert "never called" not in said
        assert "a step that calls the bare module" in said


@pytest.mark.sampled
@pytest.mark.parametrize(("case", "expected_update", "expected_epoch", "words"), [
    ("critic", 1, 1, ["'critic.weight'", "self.accelerator.prepare(module)"]),
    ("unfrozen", None, 2, ["rewrap_model()"]),  # at the end of the epoch
    ("frozen", 1, 1, ["no longer have", "'mean' differs", "It is frozen", "register it as a buffer"]),
    ("max_norm", 1, 1, ["'rows.weight' differs", "an embedding with max_norm", "weight.data.renorm_(2, 0, maxnorm="]),
    ("unused", 1, 1, ["did not depend on", "'spare.weight', 'spare.bias' on rank 0", "find_unused_parameters=True"]),
])  # fmt: skip
def test_parameters_whose_gradients_are_not_averaged_are_found(drifted, case, expected_update, expected_epoch, words):
    for update, epoch, text in (result[case] for result in drifted):
        assert update == expected_update or expected_update is None
        assert epoch == expected_epoch
        assert all(word in text for word in words)


def test_a_single_differing_bit_is_found_at_the_epochs_end(ranks, drifted):
    last = ranks.world_size - 1
    for result in drifted:
        update, epoch, said = result["one bit"]
        assert (update, epoch) == (48 // (4 * ranks.world_size), 1)
        assert f"'2.bias' differs on rank {last} from rank 0" in said
        assert result["one bit, checked often"][0] == 2


def upset_in_parts() -> Any:
    return _train(callbacks=[UpsetAt(2), Compares()], auto_microbatch=True)


@pytest.mark.extension("failed_batches")
def test_steps_that_average_all_gradients_are_not_blamed(ranks):
    for update, _, said in ranks(upset_in_parts):
        assert update == 2
        assert "something else changes it on each process by itself, such as a callback" in said
        assert "never called" not in said


@pytest.mark.thorough
@two_are_enough
def test_weights_may_differ_between_processes_on_purpose(drifted):
    first, *others = (result["on purpose"] for result in drifted)
    assert not any(equal_weights(first, other) for other in others)


def test_find_unused_parameters_may_be_requested(drifted):
    first, *others = (result["unused, as said"] for result in drifted)
    assert all(equal_weights(first, other) for other in others)


class CountsComparisons(Trainer):
    """Notes the number of updates at each comparison."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.compared: list[int] = []

    def compare_replicas(self) -> None:
        self.compared.append(self.progress.update)
        super().compare_replicas()


def compared_in_resumed_run() -> list[int]:
    with shared_folder() as folder:
        for resumes in (False, True):
            resume_from = min(folder.glob("update-*")) if resumes else None
            model = float64_model()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            trainer = CountsComparisons(model, nn.MSELoss(), optimizer, every_state(folder))
            trainer.unsaved_attributes = ("compared",)
            arguments = {"per_device_batch_size": 4, "gradient_accumulation_steps": 2, "resume_from": resume_from}
            trainer.train(float64_data(24 * world_size()), 1, **arguments)
        return trainer.compared


def test_the_first_update_of_a_resumed_run_is_compared(two_ranks):
    assert two_ranks(compared_in_resumed_run) == [[2, 3]] * 2


def agreeing() -> list[dict[str, torch.Tensor]]:
    return [_train(Averaging), _train()]


def test_weights_that_agree_are_left_unchanged(ranks):
    results = ranks(agreeing)
    for by_rank in zip(*results, strict=True):
        assert all(equal_weights(by_rank[0], other) for other in by_rank)


def asked_for_other_things() -> list[str]:
    """The errors if ranks get different arguments."""
    said = []
    for seed, arguments in ((rank(), {}), (0, {"per_device_batch_size": 2 + rank()}), (0, {"num_epochs": 1 + rank()})):
        trainer = adamw_trainer(copy.deepcopy(float64_model()), seed=seed)
        try:
            trainer.train(DATA, **{"num_epochs": 1} | arguments)
        except ValueError as error:
            said.append(str(error))
    return said


def test_processes_that_are_given_different_arguments_say_which(ranks):
    for seed, batch_size, epochs in ranks(asked_for_other_things):
        assert "seed=1 on rank 1, but seed=0 on rank 0" in seed
        assert "train_per_device_batch_size=3 on rank 1" in batch_size
        assert "num_epochs=2 on rank 1" in epochs
