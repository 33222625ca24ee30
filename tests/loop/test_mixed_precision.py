"""Mixed precision: autocast covers the whole step, including modules beside the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from pytorch_accel_lite import Trainer
from tests.small_models import (
    equal_weights,
    hand_written_loop,
    listener,
    make_data,
    make_model,
    make_trainer,
    train,
    weights,
)


@pytest.fixture
def bf16_accelerator(no_accelerator) -> Accelerator:
    """An accelerator in bf16 on the CPU."""
    return Accelerator(cpu=True, mixed_precision="bf16")


class Watched(nn.Linear):
    """A layer that notes in which type it computes."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.seen: set[torch.dtype] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(x)
        self.seen.add(outputs.dtype)
        return outputs


class WithCritic(Trainer):
    """Calls a head, a teacher and a critic in its steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parts = [Watched(1, 1) for _ in range(3)]

    def calculate_train_batch_loss(self, batch: Any) -> Any:
        outputs = self.model(batch[0])
        assert outputs.dtype == torch.float32
        return {"loss": sum(part(outputs).float().mean() for part in self.parts)}

    calculate_eval_batch_loss = calculate_train_batch_loss

    def calculate_predict_batch_output(self, batch: Any) -> Any:
        return self.parts[0](super().calculate_predict_batch_output(batch))


RUNS = {
    "training": lambda trainer: train(trainer),
    "guarded training": lambda trainer: train(trainer, auto_microbatch=True),
    "evaluation": lambda trainer: trainer.evaluate(make_data()),
    "prediction": lambda trainer: trainer.predict(make_data()),
    "find_lr": lambda trainer: trainer.find_lr(make_data(40), num_steps=10),
    "diagnose": lambda trainer: trainer.diagnose(make_data(40), num_steps=3),
}


OWNERS = {"find_lr": "tuning", "diagnose": "tuning", "guarded training": "failed_batches"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.extension(*filter(None, [OWNERS.get(name)]))) for name in RUNS]
)
def test_mixed_precision_covers_calls_beside_the_model(bf16_accelerator, name):
    trainer = make_trainer(trainer_class=WithCritic, accelerator=bf16_accelerator)
    seen: set[torch.dtype] = set()  # no attribute: trials restore these
    trainer.parts[0].register_forward_hook(lambda part, inputs, outputs: seen.add(outputs.dtype))
    RUNS[name](trainer)
    assert seen == {torch.bfloat16}
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_cache_enabled()


def test_a_loss_computes_in_bf16_but_weights_stay_in_float32(bf16_accelerator):
    class Distance(nn.Module):
        def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            seen.append((outputs.dtype, (outputs @ targets.T).dtype))
            return nn.functional.mse_loss(outputs, targets)

    seen: list[Any] = []
    losses: list[torch.dtype] = []
    note = listener(on_train_step_end=lambda t, batch_output, **kwargs: losses.append(batch_output["loss"].dtype))
    trainer = train(make_trainer([note], loss_func=Distance(), accelerator=bf16_accelerator), eval_dataset=True)
    assert set(seen) == {(torch.float32, torch.bfloat16)}
    assert set(losses) == {torch.float32}
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


def test_callbacks_and_backward_passes_are_outside_autocast(bf16_accelerator):
    inside = []

    def note(trainer: Trainer, **kwargs: Any) -> None:
        inside.append(torch.is_autocast_enabled("cpu"))

    events = ("on_train_step_start", "on_backward_start", "on_train_step_end", "on_eval_step_end", "on_update_end")
    train(make_trainer([listener(**dict.fromkeys(events, note))], accelerator=bf16_accelerator), eval_dataset=True)
    assert inside
    assert not any(inside)


class TrainsAndUses(Trainer):
    """Trains the model within the step, once without gradients before, and uses it again."""

    def calculate_train_batch_loss(self, batch: Any) -> Any:
        with torch.no_grad():
            self.model(batch[0])
        with self.accelerator.autocast(), torch.no_grad():
            self.head(batch[0])
        before = self.model(batch[0]).detach()
        with torch.no_grad():
            for parameter in (*self.model.parameters(), *self.head.parameters()):
                parameter.add_(1.0)
        self.changed.append(not torch.equal(before, self.model(batch[0])))
        with self.accelerator.autocast():
            loss = self.head(batch[0]).float().mean()
        return {"loss": self.model(batch[0]).mean() + loss + self.head(batch[0]).float().mean()}


def test_weights_that_a_step_has_changed_are_used_as_they_are(bf16_accelerator):
    trainer = make_trainer(trainer_class=TrainsAndUses, accelerator=bf16_accelerator)
    trainer.head = nn.Linear(4, 1)
    trainer.changed = []
    found: list[bool] = []

    def look(trainer: Trainer, **kwargs: Any) -> None:
        found.extend(p.grad is not None for p in (*trainer.model.parameters(), *trainer.head.parameters()))

    trainer.callback_handler.add_callback(listener(on_backward_end=look))
    train(trainer)
    assert found
    assert all(found)
    assert all(trainer.changed)


def test_mixed_precision_equals_a_hand_written_loop(bf16_accelerator):
    data = make_data(12)
    ours, theirs = make_model(), make_model()
    train(make_trainer(model=ours, accelerator=bf16_accelerator), epochs=2, train_dataset=data, batch_size=4)
    forward = theirs.forward
    theirs.forward = lambda x: torch.autocast("cpu", torch.bfloat16)(forward)(x).float()
    loader = torch.utils.data.DataLoader(data, 4)
    hand_written_loop(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1), loader, 2)
    assert equal_weights(weights(ours), weights(theirs))


def test_without_mixed_precision_nothing_is_cast():
    trainer = make_trainer(trainer_class=WithCritic)
    train(trainer, eval_dataset=True)
    assert trainer.parts[0].seen == {torch.float32}


# ----------------------------------------------------------------------------------- as an argument of the trainer


@pytest.mark.usefixtures("no_accelerator")
def test_the_argument_gives_the_bits_of_an_accelerator_with_it():
    ours = train(make_trainer(mixed_precision="bf16"), eval_dataset=True)
    assert ours.run_config.mixed_precision == "bf16"
    theirs = train(make_trainer(accelerator=Accelerator(mixed_precision="bf16")), eval_dataset=True)
    assert equal_weights(weights(ours.model), weights(theirs.model))
    assert ours.run_history.to_dict() == theirs.run_history.to_dict()
    assert make_trainer(mixed_precision="bf16", accelerator=theirs.accelerator).accelerator is theirs.accelerator


@pytest.mark.usefixtures("no_accelerator")
@pytest.mark.parametrize(("argument", "expected"), [(None, "bf16"), ("no", "no")])
def test_mixed_precision_defaults_to_the_launchers(monkeypatch, argument, expected):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert make_trainer(mixed_precision=argument).accelerator.mixed_precision == expected


class CreatesOwn(Trainer):
    def _create_accelerator(self) -> Accelerator:
        return Accelerator(cpu=True, mixed_precision="no")


@pytest.mark.usefixtures("no_accelerator")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mixed_precision": "fp16"}, "'fp16' needs a GPU .* Pass 'bf16', or 'no'"),
        ({"mixed_precision": "bf16-mixed"}, "='bf16-mixed' must be 'no' or 'fp16' or 'bf16' or 'fp8'"),
        ({"mixed_precision": "bf16", "trainer_class": CreatesOwn}, "that of the accelerator is 'no'. Pass only one"),
    ],
)
def test_a_refused_precision_does_not_fix_the_accelerator(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(**arguments)
    if "trainer_class" not in arguments:
        assert make_trainer(mixed_precision="bf16").accelerator.mixed_precision == "bf16"


def test_mixed_precision_cannot_contradict_the_accelerator(bf16_accelerator):
    with pytest.raises(ValueError, match=r"that of the accelerator is 'bf16'. Pass only one of them to the trainer"):
        make_trainer(mixed_precision="no", accelerator=bf16_accelerator)


def test_without_mixed_precision_the_users_accelerator_is_shared(bf16_accelerator):
    assert make_trainer().accelerator.mixed_precision == "bf16"
    assert make_trainer(mixed_precision="no").accelerator.mixed_precision == "no"
    assert bf16_accelerator.mixed_precision == "bf16"


def trained(precision: str | None, *callbacks: Any) -> tuple[Trainer, set[torch.dtype]]:
    torch.manual_seed(0)
    layer = Watched(4, 1)
    trainer = make_trainer(callbacks, model=nn.Sequential(layer, nn.Linear(1, 1)), mixed_precision=precision)
    return train(trainer, eval_dataset=True), layer.seen


@pytest.mark.usefixtures("no_accelerator")
def test_trainers_of_a_process_have_each_their_precision():
    (first, of_first), (half, of_half), (last, of_last) = (trained(precision) for precision in (None, "bf16", None))
    assert (of_first, of_half, of_last) == ({torch.float32}, {torch.bfloat16}, {torch.float32})
    assert [trainer.accelerator.mixed_precision for trainer in (first, half, last)] == ["no", "bf16", "no"]
    assert equal_weights(weights(first.model), weights(last.model))
    assert not equal_weights(weights(first.model), weights(half.model))
    before, (again, _) = weights(half.model), trained("bf16")
    assert equal_weights(before, weights(again.model))
    assert first.evaluate(make_data()) == last.evaluate(make_data())  # an earlier trainer keeps its own
    assert again.evaluate(make_data()) == half.evaluate(make_data())


@pytest.mark.usefixtures("no_accelerator")
@pytest.mark.parametrize(("outer", "inner"), [(None, "bf16"), ("bf16", None)])
def test_a_nested_run_of_another_trainer_has_its_own_precision(outer, inner):
    alone = {precision: weights(trained(precision)[0].model) for precision in (None, "bf16")}
    found: list[Any] = []

    def train_another(trainer: Trainer, **kwargs: Any) -> None:
        with torch.random.fork_rng():
            found.append(weights(trained(inner)[0].model))

    trainer, _ = trained(outer, listener(on_train_step_end=train_another))
    assert len(found) > 1
    assert all(equal_weights(each, alone[inner]) for each in found)
    assert equal_weights(weights(trainer.model), alone[outer])


def test_scaled_gradients_are_clipped_by_value_and_norm(scaled_accelerator):
    seen: list[list[Any]] = []

    def look(trainer: Trainer, **_: Any) -> None:
        seen.append([parameter.grad.clone() for parameter in trainer.get_model().parameters()])

    looking = listener(on_optimizer_step_start=look)
    train(make_trainer([looking], accelerator=scaled_accelerator), gradient_clip_value=0.1, gradient_clip_norm=0.05)
    for gradients in seen:
        assert float(torch.nn.utils.get_total_norm(gradients)) <= 0.0501
    assert seen


def test_callbacks_see_gradients_without_the_loss_scale(scaled_accelerator):
    expected: list[Any] = []

    def look(trainer: Trainer, **_: Any) -> None:
        rate = trainer.optimizer.param_groups[0]["lr"]
        expected[:] = [p.detach().add(p.grad, alpha=-rate) for p in trainer.get_model().parameters()]

    trainer = train(make_trainer([listener(on_optimizer_step_start=look)], accelerator=scaled_accelerator))
    assert all(map(torch.equal, trainer.model.parameters(), expected))
