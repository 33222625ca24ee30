"""Methods of ``Trainer`` that a user overrides: which are called, how often, and what their results do."""

from __future__ import annotations

import dataclasses
import functools
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from tests.small_models import equal_weights, listener, make_data, make_model, make_trainer, same_bits, train, weights

#: The methods that users may override, which follow each other in the trainer, and the hooks of pytorch-accelerated.
METHODS = list(vars(Trainer))
METHODS = METHODS[METHODS.index("training_run_start") : METHODS.index("_create_run_config") + 1]
METHODS += ["_run_training", "_run_train_epoch", "_run_eval_epoch"]
#: Those that only the constructor, resumed runs or sharded ones call.
ELSEWHERE = {"_create_accelerator", "_create_callback_handler", "advance_scheduler", "parallelize_model"}
NEEDED = {"train_step": ("manual_optimization",)}


def noting(name: str, result: Any = None) -> tuple[type[Trainer], list[Any]]:
    """A trainer whose method also records its arguments."""
    calls: list[Any] = []

    def method(self: Trainer, *args: Any) -> Any:
        calls.append(args)
        return getattr(super(noting_class, self), name)(*args)

    noting_class = type("NotingTrainer", (Trainer,), {name: method})
    return noting_class, calls


@pytest.mark.parametrize(
    ("name", "count"),
    {
        "create_train_dataloader": 1,
        "create_eval_dataloader": 2,
        "create_scheduler": 1,
        "get_default_train_dl_kwargs": 1,
        "get_default_eval_dl_kwargs": 2,
        "training_run_start": 1,
        "train_epoch_start": 2,
        "calculate_train_batch_loss": 6,
        "backward_step": 6,
        "optimizer_step": 4,
        "scheduler_step": 4,
        "optimizer_zero_grad": 4,
        "train_epoch_end": 2,
        "eval_epoch_start": 3,
        "calculate_eval_batch_loss": 6,
        "eval_epoch_end": 3,
        "training_run_epoch_end": 2,
        "training_run_end": 1,
        "evaluation_run_start": 1,
        "evaluation_run_end": 1,
    }.items(),
)
def test_each_overridable_method_has_its_number_of_calls(name, count):
    trainer_class, calls = noting(name)
    trainer = make_trainer(trainer_class=trainer_class)
    train(
        trainer,
        epochs=2,
        size=6,
        batch_size=2,
        gradient_accumulation_steps=2,
        eval_dataset=make_data(4),
        create_scheduler_fn=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
    )
    trainer.evaluate(make_data(4), per_device_batch_size=2)
    assert len(calls) == count


@pytest.mark.parametrize("by", ["arguments", "result"])
@pytest.mark.parametrize(
    "changed",
    [{"gradient_accumulation_steps": 2}, {"max_num_train_steps": 4}, {"gradient_clip_value": 1e-3}, {"num_epochs": 1}],
    ids=lambda changed: next(iter(changed)),
)
def test_what_an_overridden_run_config_changes_is_obeyed(by, changed):
    class Own(Trainer):
        def _create_run_config(self, per_device_batch_size, **settings):
            config = super()._create_run_config(per_device_batch_size, **settings)
            whole = super()._create_run_config(per_device_batch_size, **(settings | changed))
            other = {name: getattr(whole, name) for name in (*changed, "num_epochs", "max_num_train_steps")}
            return whole if by == "arguments" else dataclasses.replace(config, **other)

    def trained(trainer_class, num_epochs=2, **arguments):
        norms: list[torch.Tensor] = []
        note = listener(on_optimizer_step_start=lambda trainer, **_: norms.append(trainer.gradient_norm.clone()))
        return train(make_trainer([note], trainer_class=trainer_class), num_epochs, **arguments), norms

    (own, norms), (usual, usual_norms) = trained(Own), trained(Trainer, **changed)
    assert equal_weights(own.model.state_dict(), usual.model.state_dict())
    assert own.progress == usual.progress
    assert same_bits(norms, usual_norms)


@pytest.mark.parametrize(
    "changed",
    [
        {"eval_every_n_epochs": 2},
        {"evaluate_every": "2 updates"},
        {"scheduler_interval": "epoch"},
        {"gradient_clip_norm": 1e-3},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_settings_that_are_replaced_in_a_config_are_obeyed(changed):
    class Own(Trainer):
        def _create_run_config(self, **settings):
            return dataclasses.replace(super()._create_run_config(**settings), **changed)

    def trained(trainer_class, **arguments):
        schedule = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
        trainer = make_trainer(trainer_class=trainer_class)
        return train(trainer, 4, eval_dataset=make_data(4), create_scheduler_fn=schedule, **arguments)

    own, asked, usual = trained(Own), trained(Trainer, **changed), trained(Trainer)
    assert same_bits(own.model.state_dict(), asked.model.state_dict())
    assert own.run_history.to_dict() == asked.run_history.to_dict()
    assert own.run_history.to_dict() != usual.run_history.to_dict()


@pytest.mark.parametrize("num_epochs", [1, 3])
def test_epochs_that_alone_are_replaced_in_a_config_are_trained(num_epochs):
    class Own(Trainer):
        def _create_run_config(self, **settings):
            return dataclasses.replace(super()._create_run_config(**settings), num_epochs=num_epochs)

    assert train(make_trainer(trainer_class=Own), epochs=2).progress.epochs_completed == num_epochs


@pytest.mark.parametrize("phase", ["train", "eval"])
def test_an_overridden_dataloader_is_used(phase):
    def create(trainer, batch_size, kwargs=None):
        return DataLoader(getattr(trainer, f"{phase}_dataset"), batch_size=3, sampler=[5, 4, 3])

    seen, data = [], make_data(6)
    keep = listener(**{f"on_{phase}_step_end": lambda t, batch, **_: seen.append(batch[0])})
    trainer_class = type("Custom", (Trainer,), {f"create_{phase}_dataloader": create})
    train(make_trainer([keep], trainer_class=trainer_class), train_dataset=data, eval_dataset=data)
    assert len(seen) == 1
    assert torch.equal(seen[0], data.tensors[0][[5, 4, 3]])


@pytest.mark.parametrize("part", ["train", "eval"])
def test_overridden_default_dataloader_arguments_take_effect(part):
    def defaults(self: Trainer, batch_size: int) -> dict[str, Any]:
        return {"batch_size": 3, "shuffle": False, "num_workers": 0}

    trainer_class = type("Own", (Trainer,), {f"get_default_{part}_dl_kwargs": defaults})
    sizes: list[int] = []
    callback = listener(**{f"on_{part}_step_end": lambda t, batch, **_: sizes.append(len(batch[0]))})
    data = make_data(6)
    trainer = make_trainer([callback], trainer_class=trainer_class)
    trainer.train(data, 1, eval_dataset=data, per_device_batch_size=2)
    assert sizes == [3, 3]
    sizes.clear()
    trainer.train(data, 1, eval_dataset=data, **{f"{part}_dataloader_kwargs": {"batch_size": 5}})
    assert sizes == [5, 1]


def test_an_overridden_create_scheduler_replaces_the_factory():
    class Own(Trainer):
        def create_scheduler(self):
            return torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=0.5)

    trainer = train(make_trainer(trainer_class=Own), size=6)
    assert isinstance(trainer.scheduler, torch.optim.lr_scheduler.StepLR)
    assert trainer.optimizer.param_groups[0]["lr"] == 0.1 * 0.5**3


def test_an_overridden_train_loss_is_minimised_and_recorded():
    class Doubled(Trainer):
        def calculate_train_batch_loss(self, batch):
            output = super().calculate_train_batch_loss(batch)
            return output | {"loss": output["loss"] * 2, "extra": 1}

    doubled = train(make_trainer(trainer_class=Doubled), size=2)
    model = make_model()
    plain = train(make_trainer(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.2)), size=2)
    torch.testing.assert_close(weights(doubled.model), weights(plain.model), rtol=1e-6, atol=1e-7)
    losses = [t.run_history.get_latest_metric("train_loss_epoch") for t in (doubled, plain)]
    assert losses[0] == pytest.approx(2 * losses[1], rel=1e-6)


def test_an_overridden_eval_loss_is_recorded():
    class Constant(Trainer):
        def calculate_eval_batch_loss(self, batch):
            return {"loss": torch.tensor(4.0), "model_outputs": None, "batch_size": len(batch[0])}

    trainer = train(make_trainer(trainer_class=Constant), eval_dataset=True)
    assert trainer.run_history.get_latest_metric("eval_loss_epoch") == 4.0
    assert trainer.evaluate(make_data())["evaluation_loss"] == 4.0


def test_an_overridden_backward_step_computes_the_gradients():
    class Nothing(Trainer):
        def backward_step(self, loss):
            (loss * 0).backward()

    trainer = make_trainer(trainer_class=Nothing)
    start = weights(trainer.model)
    train(trainer)
    assert equal_weights(weights(trainer.model), start)


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
@pytest.mark.parametrize("name", ["optimizer_step", "scheduler_step"])
def test_a_step_method_overridden_with_a_no_op_is_skipped(name):
    trainer_class = type("Without", (Trainer,), {name: lambda self: None})
    trainer = make_trainer(trainer_class=trainer_class)
    start = weights(trainer.model)
    train(trainer, create_scheduler_fn=lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (step + 1)))
    assert equal_weights(weights(trainer.model), start) == (name == "optimizer_step")
    assert (trainer.optimizer.param_groups[0]["lr"] == 0.1) == (name == "scheduler_step")


def test_an_empty_optimizer_zero_grad_keeps_gradients():
    trainer_class = type("Keeping", (Trainer,), {"optimizer_zero_grad": lambda self: None})
    trainer = train(make_trainer(trainer_class=trainer_class), size=4)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = make_data(4).tensors
    for rows in (slice(0, 2), slice(2, 4)):
        nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
        optimizer.step()
    assert equal_weights(weights(trainer.model), weights(model))


@pytest.mark.parametrize(("name", "during"), [("train_epoch_start", "train"), ("eval_epoch_start", "eval")])
def test_an_overridden_epoch_start_sets_the_mode_itself(name, during):
    modes: dict[str, bool] = {}
    callback = listener(
        on_train_step_end=lambda t, **_: modes.update(train=t.model.training),
        on_eval_step_end=lambda t, **_: modes.update(eval=t.model.training),
    )

    def opposite(self: Trainer) -> None:
        self.model.train(during == "eval")

    train(make_trainer([callback], trainer_class=type("Own", (Trainer,), {name: opposite})), eval_dataset=True)
    assert modes == ({"train": False, "eval": False} if during == "train" else {"train": True, "eval": True})


def test_metrics_recorded_in_end_methods_precede_callbacks():
    class Recording(Trainer):
        def train_epoch_end(self):
            self.run_history.update_metric("in_train_epoch_end", 1)

        def eval_epoch_end(self):
            self.run_history.update_metric("in_eval_epoch_end", 2)

        def training_run_epoch_end(self):
            self.run_history.update_metric("in_training_run_epoch_end", 3)

        def evaluation_run_end(self):
            self.run_history.update_metric("in_evaluation_run_end", 4)

    seen: dict[str, Any] = {}
    events = ["on_train_epoch_end", "on_eval_epoch_end", "on_training_run_epoch_end"]
    callback = listener(
        **{e: lambda t, _e=e, **_: seen.update({_e: t.run_history.get_latest_metric(f"in{_e[2:]}")}) for e in events}
    )
    trainer = train(make_trainer([callback], trainer_class=Recording), eval_dataset=True)
    assert list(seen.values()) == [1, 2, 3]
    metrics = trainer.evaluate(make_data())
    assert metrics.keys() == {"in_eval_epoch_end", "evaluation_loss", "in_evaluation_run_end"}


def test_predict_returns_the_result_of_an_overridden_step():
    class Signs(Trainer):
        def calculate_predict_batch_output(self, batch):
            return {"sign": super().calculate_predict_batch_output(batch).sign()}

    trainer = make_trainer(trainer_class=Signs)
    data = make_data(5)
    with torch.no_grad():
        expected = trainer.model(data.tensors[0]).sign()
    predicted = trainer.predict(data, per_device_batch_size=2)
    assert predicted.keys() == {"sign"}
    assert torch.equal(predicted["sign"], expected)


def noted(original: Any, calls: list[Any]) -> Any:
    """A function that also records its calls. Like many decorators, it has the names of what it wraps."""

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        calls.append(original)
        return original(*args, **kwargs)

    return replacement


def use_everything(trainer: Trainer) -> tuple[Any, ...]:
    """What a trainer computes when it trains with a schedule, evaluates and predicts."""
    schedule = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.9)
    train(trainer, epochs=2, eval_dataset=True, create_scheduler_fn=schedule)
    evaluated = trainer.evaluate(make_data(4))
    rates = trainer.optimizer.param_groups[0]["lr"], trainer.run_history["eval_loss_epoch"]
    return *weights(trainer.model).values(), trainer.predict(make_data(3)), evaluated, rates


@pytest.mark.sampled
@pytest.mark.parametrize("place", ["object", "class"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.extension(*NEEDED.get(name, ())))
        for name in METHODS
        if name not in ELSEWHERE
    ],
)
def test_a_method_replaced_on_an_object_or_class_is_called(name, place, monkeypatch):
    expected, calls = use_everything(make_trainer()), []
    trainer = make_trainer()
    owner = trainer if place == "object" else Trainer
    monkeypatch.setattr(owner, name, noted(getattr(owner, name), calls))
    assert same_bits(expected, use_everything(trainer))
    assert calls
    assert trainer.run.overridden == {name}


def test_a_step_replaced_on_an_object_steps_any_scheduler():
    def scheduler_step(trainer: Trainer) -> None:
        trainer.scheduler.step(1.0)  # needs an argument

    trainer = make_trainer()
    trainer.scheduler_step = MethodType(scheduler_step, trainer)
    plateau = functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.5)
    train(trainer, create_scheduler_fn=plateau)
    assert trainer.optimizer.param_groups[0]["lr"] == 0.1 * 0.5**2


def test_a_loader_that_an_object_creates_needs_no_dataset():
    trainer = make_trainer()
    trainer.create_train_dataloader = lambda batch_size, kwargs=None: DataLoader(make_data(6), batch_size)
    trainer.create_eval_dataloader = lambda batch_size, kwargs=None: DataLoader(make_data(6), batch_size)
    trainer.train(None, 1, per_device_batch_size=2)
    assert trainer.progress.update == 3
    assert trainer.evaluate().keys() == {"evaluation_loss"}


@pytest.mark.parametrize("place", ["object", "class"])
def test_a_replaced_method_loads_the_state_to_resume(place, tmp_path, monkeypatch):
    callbacks = [SaveTrainingStateCallback(tmp_path)]
    train(make_trainer(callbacks))
    expected, calls = train(make_trainer(callbacks), epochs=2, resume_from="latest"), []
    train(make_trainer(callbacks))
    trainer = make_trainer(callbacks)
    owner = trainer if place == "object" else Trainer
    monkeypatch.setattr(owner, "load_training_state", noted(owner.load_training_state, calls))
    train(trainer, epochs=2, resume_from="latest")
    assert len(calls) == 1
    assert equal_weights(weights(expected.model), weights(trainer.model))


@pytest.mark.extension("elastic_schedules")
def test_a_resumed_schedule_is_advanced_by_a_replaced_method(tmp_path):
    calls: list[int] = []

    def advance(trainer: Trainer, num_updates: int) -> None:
        calls.append(num_updates)
        Trainer.advance_scheduler(trainer, num_updates)

    schedule = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=100, gamma=0.5)
    callbacks = [SaveTrainingStateCallback(tmp_path)]
    train(make_trainer(callbacks), create_scheduler_fn=schedule)
    trainer = make_trainer(callbacks)
    trainer.advance_scheduler = MethodType(advance, trainer)
    train(trainer, epochs=2, batch_size=1, create_scheduler_fn=schedule, resume_from="latest")
    assert calls == [6]  # and not several around it, as the default does


@pytest.mark.parametrize("name", ["_create_accelerator", "_create_callback_handler"])
def test_a_replaced_method_of_the_constructor_is_called(name, monkeypatch):
    calls: list[Any] = []
    monkeypatch.setattr(Trainer, name, noted(getattr(Trainer, name), calls))
    make_trainer()
    assert calls


@pytest.mark.parametrize("hook", ["_run_train_epoch", "_run_eval_epoch"])
def test_a_hook_that_a_callback_replaces_is_called(hook):
    calls: list[str] = []

    def replace(trainer: Trainer, **_: Any) -> None:
        original = getattr(trainer, hook)

        def replacement(*args: Any, **kwargs: Any) -> Any:
            calls.append(hook)
            return original(*args, **kwargs)

        setattr(trainer, hook, replacement)

    train(make_trainer([listener(on_training_run_start=replace)]), epochs=3, eval_dataset=True)
    assert len(calls) == 3
