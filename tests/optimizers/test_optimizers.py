"""Several optimizers in a trainer, schedulers by optimizer name, and optimizers with modes."""

from __future__ import annotations

import copy
import pickle
import re
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LinearLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from pytorch_accel_lite import Trainer, TrainerCallback, TrainerPlaceholderValues, callbacks
from pytorch_accel_lite.callbacks import SaveBestModelCallback, SaveTrainingStateCallback
from tests.launching import only_with_soak
from tests.ranks import check_processes, every_state, world_size
from tests.small_models import (
    adamw_trainer,
    equal_weights,
    float64_data,
    float64_model,
    largest_difference,
    listener,
    two_optimizers,
    weights,
)

DATA = float64_data(26)


SCHEDULES = {"rest": partial(LinearLR, end_factor=0.1, total_iters=TrainerPlaceholderValues.MAX_NUM_TRAIN_STEPS)}


def train_with_two(folder: Path | None = None, epochs: int = 2, **kwargs: Any) -> Trainer:
    """Train with clipping, accumulation and a schedule for one of them."""
    model = float64_model()
    trainer = Trainer(model, nn.MSELoss(), two_optimizers(model), callbacks=every_state(folder), seed=0)
    trainer.train(
        DATA,
        epochs,
        per_device_batch_size=4 // world_size(),
        gradient_accumulation_steps=2,
        gradient_clip_norm=0.5,
        create_scheduler_fn=SCHEDULES,
        **kwargs,
    )
    return trainer


# ------------------------------------------------------------------------------------------- as by hand


def by_hand(epochs: int = 2, batch_size: int = 4) -> nn.Module:
    """Windows of two batches weighed by samples, clipped over both optimizers, a schedule for one of them."""
    model = float64_model()
    optimizers = two_optimizers(model)
    batches = list(DataLoader(DATA, batch_size))
    windows = [batches[i : i + 2] for i in range(0, len(batches), 2)]
    scheduler = LinearLR(optimizers["rest"], end_factor=0.1, total_iters=epochs * len(windows))
    for window in windows * epochs:
        size = sum(len(x) for x, _ in window)
        for x, y in window:
            (nn.functional.mse_loss(model(x), y) * (len(x) / size)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in optimizers.values():
            optimizer.step()
        scheduler.step()
        model.zero_grad()
    return model


def test_two_optimizers_train_as_a_loop_that_steps_both():
    trainer = train_with_two(train_dataloader_kwargs={"shuffle": False})
    assert largest_difference(weights(trainer.model), weights(by_hand())) < 1e-12
    assert [group["lr"] for group in trainer.optimizer.param_groups] == pytest.approx([0.05, 0.002, 0.001])


def test_without_windows_the_bits_are_those_of_the_loop():
    model, expected = float64_model(), float64_model()
    adamw_trainer(model, optimizer=two_optimizers(model)).train(
        DATA, 2, per_device_batch_size=4, train_dataloader_kwargs={"shuffle": False}
    )
    optimizers = two_optimizers(expected)
    for _ in range(2):
        for x, y in DataLoader(DATA, 4):
            nn.functional.mse_loss(expected(x), y).backward()
            for optimizer in optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
    assert equal_weights(weights(model), weights(expected))


@pytest.mark.parametrize("several", [False, True])
def test_optimizer_hooks_and_profilers_see_every_update(several):
    seen: list[str] = []
    model = float64_model()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    rest = torch.optim.SGD(model[2].parameters(), lr=0.1)
    trainer = adamw_trainer(model, optimizer=[optimizer, rest] if several else optimizer)

    def train() -> list[str]:
        seen.clear()
        trainer.train(DATA, 1, per_device_batch_size=len(DATA))
        return list(seen)

    assert train() == []
    own = optimizer.register_step_post_hook(lambda *_: seen.append("own"))
    every = register_optimizer_step_pre_hook(lambda *_: seen.append("every"))
    # Several optimizers step as one, of which each is a part.
    assert train() == ["every"] * several + ["every", "own"] + ["every"] * several
    own.remove()
    every.remove()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        train()
    names = [event.name for event in profiler.events()]
    assert names.count("Optimizer.step#SGD.step") == 1 + several
    step = optimizer.step
    optimizer.step = lambda: seen.append("replaced") or step()  # type: ignore[method-assign]
    before = weights(model)
    assert train() == ["replaced"]
    assert not equal_weights(weights(model), before)


def test_a_replaced_optimizer_step_is_called():
    seen = []

    class Replaces(TrainerCallback):
        def on_training_run_start(self, trainer, **kwargs):
            step = trainer.optimizer.step  # as the scheduler has replaced it

            @wraps(step)
            def replaced(*args, **kwargs):
                seen.append("replaced")
                return step(*args, **kwargs)

            trainer.optimizer.step = replaced

    trained = []
    for others in ([], [Replaces]):
        model = float64_model()
        trainer = adamw_trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), callbacks=others, seed=1)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            trainer.train(DATA, 1, per_device_batch_size=13, create_scheduler_fn=partial(ExponentialLR, gamma=0.5))
        steps = trainer.progress.update
        assert [event.name for event in profiler.events()].count("Optimizer.step#SGD.step") == steps
        trained.append(weights(model))
    assert seen == ["replaced"] * steps
    assert equal_weights(*trained)


@pytest.mark.parametrize("replaces", [False, True])
def test_an_optimizer_that_a_callback_has_replaced_stays(replaces):
    class Replaces(TrainerCallback):
        def on_train_epoch_start(self, trainer, **kwargs):
            if replaces and trainer.progress.epoch == 2:
                trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)

    model = float64_model()
    before = torch.optim.AdamW(model.parameters())
    trainer = adamw_trainer(model, optimizer=before, callbacks=[Replaces])
    trainer.train(DATA, 2, per_device_batch_size=13)
    now = trainer.optimizer
    assert (now is before) != replaces
    trainer.train(DATA, 1, per_device_batch_size=13)
    assert trainer.optimizer is now


def test_an_optimizer_that_a_callback_wraps_is_wrapped_once():
    class Wrapper:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

        def __getattr__(self, name: str) -> Any:
            return getattr(self.optimizer, name)

    class Wraps(TrainerCallback):
        def on_training_run_start(self, trainer, **kwargs):
            trainer.optimizer = Wrapper(trainer.optimizer)

    trainer = adamw_trainer(float64_model(), callbacks=[Wraps])
    before = trainer.optimizer
    for _ in range(2):
        trainer.train(DATA, 1, per_device_batch_size=13)
        assert trainer.optimizer is before


class OfTwoKinds(nn.Module):
    """Has weights of two types."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 3), nn.Linear(3, 1).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x.float()).double())


@pytest.mark.extension("monitoring")
@pytest.mark.parametrize("kind", [float64_model, OfTwoKinds])
@pytest.mark.parametrize("limit", [0.05, 50.0])
def test_gradients_are_clipped_to_the_bits_of_torchs_function(kind, limit):
    torch.manual_seed(0)
    model = kind()
    expected = copy.deepcopy(model)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    norms = []
    for x, y in DataLoader(DATA, 13):
        nn.functional.mse_loss(expected(x), y).backward()
        norms.append(nn.utils.clip_grad_norm_(expected.parameters(), limit).item())
        optimizer.step()
        optimizer.zero_grad()
    found = callbacks.GradientNormCallback()
    trainer = adamw_trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[found])
    trainer.train(
        DATA, 1, per_device_batch_size=13, gradient_clip_norm=limit, train_dataloader_kwargs={"shuffle": False}
    )
    assert equal_weights(weights(model), weights(expected))
    assert trainer.run_history.get_latest_metric("gradient_norm_max") == max(norms)


def biases_last(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    matrices, biases = ([p for p in parameters if (p.ndim > 1) == of_two] for of_two in (True, False))
    return [{"params": matrices, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]


@pytest.mark.parametrize("frozen", [0, 4])
def test_gradients_of_sorted_groups_are_clipped_to_the_same_bits(frozen):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(60)), nn.Linear(5, 1)).double()
    model[:frozen].requires_grad_(False)
    expected = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(biases_last(expected[frozen:]), lr=0.1)
    for x, y in DataLoader(DATA, 2):
        nn.functional.mse_loss(expected(x), y).backward()
        nn.utils.clip_grad_norm_(expected.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    trainer = adamw_trainer(model, optimizer=torch.optim.AdamW(biases_last(model[frozen:]), lr=0.1))
    trainer.train(DATA, 1, per_device_batch_size=2, gradient_clip_norm=0.01, train_dataloader_kwargs={"shuffle": False})
    assert equal_weights(weights(model), weights(expected))


def test_a_list_of_optimizers_is_numbered():
    model = float64_model()
    parts = list(two_optimizers(model).values())
    trainer = adamw_trainer(model, optimizer=parts)
    assert list(trainer.optimizer) == ["0", "1"]
    assert trainer.optimizer["1"] is parts[1]
    with pytest.raises(KeyError, match="no optimizer 'rest', only '0', '1'"):
        trainer.optimizer["rest"]


@pytest.mark.parametrize("is_wrapped", [False, True])  # by Accelerate
def test_several_optimizers_and_schedulers_give_their_names(is_wrapped, request):
    names, kinds = [], []
    accelerator = request.getfixturevalue("scaled_accelerator") if is_wrapped else None

    class Note(TrainerCallback):
        def on_train_step_end(self, trainer, **kwargs):
            names.extend([*trainer.optimizer, *trainer.scheduler])
            kinds.append(isinstance(trainer.optimizer, AcceleratedOptimizer))

    model = float64_model()
    trainer = adamw_trainer(model, optimizer=two_optimizers(model), callbacks=[Note()], accelerator=accelerator)
    trainer.train(DATA, 1, per_device_batch_size=26, create_scheduler_fn=SCHEDULES)
    assert (names, kinds) == (["matrix", "rest", "rest"], [is_wrapped])
    assert (len(trainer.optimizer), len(trainer.scheduler)) == (2, 1)


@only_with_soak
@pytest.mark.soak
def test_processes_train_as_one_and_resume_to_the_same_bits(two_ranks):
    check_processes(two_ranks, train_with_two)


# ------------------------------------------------------------------------------------------- one of several


def test_several_optimizers_number_their_state_as_one():
    model = float64_model()
    trainer = adamw_trainer(model, optimizer=two_optimizers(model))
    trainer.train(DATA, 1)
    state = copy.deepcopy(trainer.optimizer.state_dict())
    assert [group["params"] for group in state["param_groups"]] == [[0, 1], [2], [3]]
    assert sorted(state["state"]) == [0, 1, 2, 3]
    other = adamw_trainer(model, optimizer=two_optimizers(model)).optimizer
    other.load_state_dict(state)
    for name in ("matrix", "rest"):
        for number, kept in trainer.optimizer[name].state_dict()["state"].items():
            assert equal_weights(other[name].state_dict()["state"][number], kept)
    assert other.state.keys() == set(model.parameters())


def test_several_optimizers_can_be_copied_and_pickled():
    model = float64_model()
    optimizer = adamw_trainer(model, optimizer=two_optimizers(model)).optimizer
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert [len(group["params"]) for group in copied.param_groups] == [2, 1, 1]
        copied.step(lambda: torch.tensor(1.0))
    assert "matrix=SGD" in repr(optimizer)


def test_a_state_of_another_number_of_groups_is_refused():
    model = float64_model()
    optimizer = adamw_trainer(model, optimizer=two_optimizers(model)).optimizer
    single = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="it has 1 parameter groups, but the optimizers have 3"):
        optimizer.load_state_dict(single.state_dict())


def test_no_part_of_a_state_with_other_group_lengths_is_loaded():
    model = float64_model()
    optimizer = adamw_trainer(model, optimizer=two_optimizers(model)).optimizer
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 9.0
    state["param_groups"][-1]["params"] = []
    with pytest.raises(ValueError, match="its parameter groups have 2, 1, 0 parameters, but those of the optimizers"):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] != 9.0


def test_a_state_of_optimizers_in_another_order_is_refused():
    model = float64_model()
    optimizer = adamw_trainer(model, optimizer=two_optimizers(model)).optimizer
    reordered = adamw_trainer(model, optimizer=dict(reversed(two_optimizers(model).items()))).optimizer
    with pytest.raises(ValueError, match="it has the optimizers in the order matrix, rest"):
        reordered.load_state_dict(optimizer.state_dict())


def test_zero_grad_clears_the_gradients_of_each_optimizer():
    model = float64_model()
    optimizer = adamw_trainer(model, optimizer=two_optimizers(model)).optimizer
    model(DATA[0][0]).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    assert all(not parameter.grad.any() for parameter in model.parameters())
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.extension("progress_table", "progress_bar")
def test_the_bar_and_the_table_show_the_rate_of_each(capsys):
    from pytorch_accel_lite.callbacks import ProgressBarCallback

    model = float64_model()
    bar = ProgressBarCallback(line_every_seconds=1e-9)
    shown = [bar, callbacks.ProgressTableCallback(show_always=True)]
    trainer = adamw_trainer(model, optimizer=two_optimizers(model), callbacks=shown)
    shrinking = {"matrix": partial(ExponentialLR, gamma=0.2)}
    trainer.train(DATA, 2, per_device_batch_size=13, create_scheduler_fn=shrinking)
    out = capsys.readouterr().out
    assert re.findall(r"lr_matrix ([^,]*), lr_rest ([^,\s]*)", out)[-1] == ("0.0004", "0.02")
    head = next(line for line in out.splitlines() if line.startswith("epoch"))
    assert re.split(" {2,}", head) == ["epoch", "train loss", "lr_matrix", "lr_rest", "time"]
    assert next(line for line in out.splitlines() if line.startswith("2/2")).split()[2:4] == ["4.00e-04", "2.00e-02"]


# ------------------------------------------------------------------------------------------- schedulers


def test_one_schedule_may_drive_all_optimizers():
    model = float64_model()
    trainer = adamw_trainer(model, optimizer=two_optimizers(model))
    trainer.train(DATA, 1, per_device_batch_size=13, create_scheduler_fn=partial(ExponentialLR, gamma=0.5))
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.05 / 4, 0.02 / 4, 0.01 / 4]


def test_a_schedule_of_a_metric_works_beside_one_of_steps():
    model = float64_model()
    trainer = adamw_trainer(model, optimizer=two_optimizers(model))
    trainer.train(
        DATA,
        3,
        DATA,
        create_scheduler_fn={
            "matrix": partial(ReduceLROnPlateau, threshold=1e9, patience=0, factor=0.5),
            "rest": partial(StepLR, step_size=2),
        },
        scheduler_interval="epoch",
        scheduler_metric="eval_loss_epoch",
    )
    assert trainer.optimizer["matrix"].param_groups[0]["lr"] == 0.05 / 8
    assert trainer.optimizer["rest"].param_groups[0]["lr"] == pytest.approx(0.002)
    assert trainer.scheduler["rest"].last_epoch == 3
    assert trainer.scheduler.get_last_lr() == pytest.approx([0.05 / 8, 0.002, 0.001])


@pytest.mark.extension("monitoring")
def test_rates_are_recorded_by_the_optimizers_names():
    model = float64_model()
    monitor = callbacks.LearningRateMonitorCallback()
    trainer = adamw_trainer(model, optimizer=two_optimizers(model), callbacks=[monitor])
    trainer.train(DATA, 1)
    names = ["lr_matrix", "lr_rest_0", "lr_rest_1"]
    assert [trainer.run_history.get_latest_metric(name) for name in names] == [0.05, 0.02, 0.01]


# ------------------------------------------------------------------------------------------- bad input


def trained_by(optimizer: Any, **kwargs: Any) -> None:
    model = float64_model()
    adamw_trainer(model, optimizer=optimizer(model)).train(DATA, 1, **kwargs)


def test_a_parameter_of_two_optimizers_is_refused():
    with pytest.raises(ValueError, match=r"'a' and 'b' have the same parameter, of shape \(8, 5\)"):
        trained_by(lambda model: {name: torch.optim.SGD(model.parameters()) for name in "ab"})


def test_an_unfrozen_parameter_of_no_optimizer_is_refused():
    with pytest.raises(ValueError, match=r"None of the optimizers '0' has the model's 2\.weight, 2\.bias\. Add"):
        trained_by(lambda model: [torch.optim.SGD(model[0].parameters())])
    trained_by(lambda model: [torch.optim.SGD(model.requires_grad_(False)[0].requires_grad_().parameters())])


@pytest.mark.parametrize(
    ("optimizer", "error", "message"),
    [
        ({}, ValueError, "optimizer={} contains no optimizer"),
        ([None], TypeError, r"optimizer\['0'\]=None must be an instance of torch.optim.Optimizer"),
        ({1: torch.optim.SGD([torch.zeros(1)])}, TypeError, "names of optimizers must be strings, not 1"),
    ],
)
def test_an_invalid_optimizer_is_refused(optimizer, error, message):
    with pytest.raises(error, match=message):
        trained_by(lambda model: optimizer)


@pytest.mark.parametrize(
    ("schedulers", "error", "message"),
    [
        (
            {"other": StepLR},
            ValueError,
            r"create_scheduler_fn\['other'\]: no optimizer has that name, only 'matrix', 'r",
        ),
        ({"rest": 1}, TypeError, r"create_scheduler_fn\['rest'\]=1 must be a function"),
        ({"rest": partial(OneCycleLR, max_lr=1, total_steps=2)}, ValueError, "OneCycleLR has total_steps=2"),
        ({"rest": ReduceLROnPlateau}, TypeError, "ReduceLROnPlateau.step needs an argument"),
        (
            {"rest": lambda optimizer: None},
            TypeError,
            r"create_scheduler_fn\['rest'\].* returned None, which is not a sch",
        ),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused_before_training(schedulers, error, message):
    with pytest.raises(error, match=message):
        trained_by(two_optimizers, create_scheduler_fn=schedulers)


def test_a_dict_of_schedules_needs_several_optimizers():
    with pytest.raises(ValueError, match=r"create_scheduler_fn\['a'\]: no optimizer has that name, only one without a"):
        trained_by(lambda model: torch.optim.SGD(model.parameters()), create_scheduler_fn={"a": StepLR})


def test_adding_a_group_names_the_single_optimizers():
    model = float64_model()
    optimizer = adamw_trainer(model, optimizer=two_optimizers(model)).optimizer
    with pytest.raises(TypeError, match=r"trainer.optimizer\['matrix'\].add_param_group"):
        optimizer.add_param_group({"params": [torch.zeros(1)]})


# ------------------------------------------------------------------------------------------- modes


def schedule_free(model: nn.Module) -> torch.optim.Optimizer:
    schedulefree = pytest.importorskip("schedulefree")
    return schedulefree.AdamWScheduleFree(model.parameters(), lr=0.05, warmup_steps=3)


def schedule_free_by_hand(epochs: int) -> tuple[nn.Module, list[float]]:
    model = float64_model()
    optimizer = schedule_free(model)
    losses = []
    for _ in range(epochs):
        optimizer.train()
        for x, y in DataLoader(DATA, 13):
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.eval()
        with torch.no_grad():
            losses.append(nn.functional.mse_loss(model(DATA.tensors[0]), DATA.tensors[1]).item())
    return model, losses


def train_schedule_free(epochs: int, callbacks: Any = (), several: bool = False, **kwargs: Any) -> Trainer:
    model = float64_model()
    optimizer = schedule_free(model)
    trainer = adamw_trainer(model, optimizer=[optimizer] if several else optimizer, callbacks=callbacks, seed=0)
    order = {"shuffle": False}
    trainer.train(DATA, epochs, DATA, per_device_batch_size=13, train_dataloader_kwargs=order, **kwargs)
    return trainer


@pytest.mark.parametrize("several", [False, True])
def test_an_optimizer_with_modes_has_the_bits_of_the_plain_loop(several):
    trainer = train_schedule_free(3, several=several)
    model, losses = schedule_free_by_hand(3)
    assert equal_weights(weights(trainer.model), weights(model))
    assert trainer.run_history.get_metric_values("eval_loss_epoch") == pytest.approx(losses)
    assert trainer.evaluate(DATA)["evaluation_loss"] == pytest.approx(losses[-1])


def test_weights_saved_in_training_are_in_evaluation_mode(tmp_path):
    saved = []
    best = SaveBestModelCallback(tmp_path / "best.pt", load_saved_checkpoint=False)

    def save(trainer: Trainer, **kwargs: Any) -> None:
        trainer.save_model(tmp_path / "model.safetensors")
        saved.append(trainer.predict(DATA, len(DATA)))

    trainer = train_schedule_free(1, [best, listener(on_train_epoch_end=save)])
    model, _ = schedule_free_by_hand(1)
    assert equal_weights(torch.load(tmp_path / "best.pt")["model_state_dict"], weights(model))
    with torch.no_grad():
        assert torch.equal(saved[0], model(DATA.tensors[0]))
    assert equal_weights(weights(trainer.model), weights(model))


def test_schedule_free_optimizers_resume_to_the_same_bits(tmp_path):
    states = SaveTrainingStateCallback(tmp_path, save_every_n_steps=1, max_checkpoints=None)
    whole = train_schedule_free(2, [states])
    folders = [state for state in sorted(tmp_path.iterdir()) if state.is_dir()]
    assert len(folders) >= 4
    for folder in folders:
        again = SaveTrainingStateCallback(tmp_path / "again")
        assert equal_weights(weights(train_schedule_free(2, [again], resume_from=folder).model), weights(whole.model))


def test_the_best_weights_loaded_at_the_end_stay_unchanged(tmp_path):
    best = SaveBestModelCallback(tmp_path / "best.pt")

    def spoil(trainer: Trainer, **kwargs: Any) -> None:
        if trainer.progress.epoch == 3:
            trainer.optimizer.param_groups[0]["lr"] = 9.0

    trainer = train_schedule_free(3, [best, listener(on_train_epoch_start=spoil)])
    assert best.best_metric_epoch == 2
    assert trainer.evaluate(DATA, per_device_batch_size=13)["evaluation_loss"] == best.best_metric


@pytest.mark.extension("tuning")
def test_the_learning_rate_finder_leaves_no_trace_of_modes():
    model = float64_model()
    trainer = adamw_trainer(model, optimizer=schedule_free(model))
    before = weights(model)
    trainer.find_lr(DATA, per_device_batch_size=13, num_steps=10)
    assert equal_weights(weights(model), before)
