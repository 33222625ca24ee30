"""Runs: their length, their end, and calls that are allowed within them."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import BatchSampler

from pytorch_accel_lite import (
    InMemoryRunHistory,
    NonFiniteLossError,
    RunHistory,
    StopTrainingError,
    Trainer,
    TrainerCallback,
    callbacks,
)
from pytorch_accel_lite.callbacks import (
    EarlyStoppingCallback,
    RunPausedError,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    StepBasedEvaluationCallback,
)
from pytorch_accel_lite.extending import RUN_CHECKS, RunRequest, TrainerRunConfig
from tests.launching import some_of
from tests.ranks import world_size
from tests.shared_trainings import StopsAt
from tests.small_models import (
    equal_weights,
    listener,
    make_data,
    make_model,
    make_trainer,
    raises,
    raises_at,
    train,
    weights,
)

# -------------------------------------------------------------------------------------- how long a run is


def test_a_trainer_is_finished_only_after_a_run():
    finished = []
    trainer = make_trainer([listener(on_update_end=lambda trainer, **_: finished.append(trainer.is_finished))])
    assert not trainer.is_finished
    train(trainer, 1, batch_size=4)
    assert finished[0] is False
    assert trainer.is_finished


@pytest.mark.extension("failed_batches")
def test_a_limit_of_updates_is_kept_when_batches_were_skipped():
    class Fails(Trainer):
        def calculate_train_batch_loss(self, batch):
            if self.progress.epoch == 1 and self.progress.step in (1, 2):
                raise ValueError("bad batch")
            return super().calculate_train_batch_loss(batch)

    trainer = make_trainer([callbacks.SkipFailedBatchesCallback()], trainer_class=Fails)
    train(trainer, epochs=None, size=10, max_num_train_steps=10)
    assert trainer.progress.update == 10
    assert trainer.progress.epoch == 3


def test_a_limit_of_updates_is_kept_when_epochs_differ_in_length():
    class Shrinking:
        def __init__(self) -> None:
            self.lengths = iter([5, 3, 3, 3, 3, 3, 3])
            self.length = 5

        def __len__(self) -> int:
            return self.length

        def __iter__(self) -> Any:
            self.length = next(self.lengths)
            return iter(BatchSampler(range(self.length), 1, False))

    trainer = make_trainer()
    train(trainer, epochs=None, max_num_train_steps=16, train_dataloader_kwargs={"batch_sampler": Shrinking()})
    assert trainer.progress.update == 16


def test_a_run_resumed_with_another_batch_size_makes_all_updates(here):
    def saving(folder: str) -> Any:
        def save(trainer: Trainer) -> None:
            if trainer.progress.epochs_completed == 5:
                trainer.save_training_state(folder)

        return listener(on_epoch_checkpoint=save)

    train(make_trainer([saving("state")], seed=0), None, size=20, batch_size=10, max_num_train_steps=20)
    resumed = make_trainer(seed=0)
    train(resumed, None, size=20, batch_size=2, max_num_train_steps=20, resume_from="state")
    assert resumed.progress.update == 20


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_state_of_a_runs_last_update_resumes_without_another(here, accumulation):
    def run(callbacks: Any, **kwargs: Any) -> Trainer:
        arguments = {"eval_dataset": make_data(), "gradient_accumulation_steps": accumulation, "size": 14}
        return train(make_trainer(callbacks, seed=0), None, max_num_train_steps=7, **arguments, **kwargs)

    whole = run([])
    killed = raises_at(7, KeyboardInterrupt(), "on_eval_epoch_start")
    with pytest.raises(KeyboardInterrupt):
        run([SaveTrainingStateCallback("states", save_every_n_steps=1), killed])
    resumed = run([SaveTrainingStateCallback("states", save_every_n_steps=1)], resume_from="latest")
    assert resumed.progress == whole.progress
    assert resumed.run_history.to_dict() == whole.run_history.to_dict()
    assert equal_weights(weights(resumed.model), weights(whole.model))


@pytest.mark.filterwarnings("ignore:The training state holds the state of callback")
@pytest.mark.parametrize("asked", [{"max_num_train_steps": 2}, {"epochs": 1}])
def test_a_run_beyond_its_requested_length_trains_no_further(here, asked, capsys):
    train(make_trainer([SaveTrainingStateCallback("states", save_every_n_steps=1)], seed=0), epochs=2)
    resumed = make_trainer(seed=0)
    train(resumed, **{"epochs": None, **asked}, resume_from="states/update-000000005")
    assert resumed.progress.update == 5
    assert "Nothing left to do" in capsys.readouterr().out


# ------------------------------------------------------------------------------- what ends it, and the end

EVENTS_THAT_STOP = [
    "on_train_step_end", "on_train_epoch_end", "on_eval_epoch_end", "on_training_run_epoch_end", "on_epoch_checkpoint"
]  # fmt: skip


def check_trained_further(outcome: Any, change: str) -> None:
    again, (further, printed, reason), (whole, _, _) = outcome
    assert again.endswith(
        "Nothing left to do: the run was stopped: enough. To train it further, increase num_epochs, or pass StopsAt "
        "with other arguments or not at all."
    )
    why = "num_epochs was 3 and is 4 now" if change == "num_epochs" else "The run was stopped by StopsAt(event="
    assert why in printed
    assert reason is None
    progress, end, history, schedule = further
    assert (progress, history, schedule) == (whole[0], whole[2], whole[3])
    assert equal_weights(end, whole[1])


def trained_further(folder: Path, event: str, change: str) -> Any:
    """The results and output of a run that was stopped and trained further, and of an uninterrupted one."""

    def run(epochs: int, *callbacks: TrainerCallback) -> Any:
        trainer = make_trainer([*callbacks, SaveTrainingStateCallback(folder)], seed=3)
        how = {"create_scheduler_fn": partial(StepLR, step_size=1, gamma=0.5), "scheduler_interval": "epoch"}
        output = io.StringIO()
        with redirect_stdout(output):
            train(trainer, epochs, 6 * world_size(), eval_dataset=make_data(9), resume_from="latest", **how)
        result = trainer.progress, weights(trainer.model), trainer.run_history.to_dict(), trainer.scheduler.last_epoch
        return result, " ".join(output.getvalue().split()), trainer.stop_reason

    at = 5 if event == "on_train_step_end" else 6
    _, _, reason = run(3, StopsAt(event, at))
    assert reason == "enough"
    _, again, reason = run(3, StopsAt(event, at))
    assert reason == "enough"
    further = run(4, StopsAt(event, at)) if change == "num_epochs" else run(3, StopsAt(event, 100))
    folder = folder / "whole"
    whole = run(4 if change == "num_epochs" else 3)
    return again, further, whole


@pytest.mark.sampled
@pytest.mark.parametrize("change", ["num_epochs", "callback"])
@pytest.mark.parametrize("event", EVENTS_THAT_STOP)
def test_a_stopped_run_trains_further_if_an_argument_changed(tmp_path, event, change):
    check_trained_further(trained_further(tmp_path, event, change), change)


@pytest.mark.sampled
@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.parametrize("event", some_of(EVENTS_THAT_STOP))
def test_a_run_that_one_process_stopped_is_trained_further(tmp_path, two_ranks, event):
    first, second = two_ranks.run(trained_further, tmp_path, event, "callback")
    check_trained_further(first, "callback")
    assert second[1][2] is None
    assert second[1][0][0] == first[1][0][0]
    assert equal_weights(second[1][0][1], first[1][0][1])


@pytest.mark.parametrize("interval", ["epochs", "evaluations"])
def test_a_run_stopped_early_continues_with_more_patience(here, interval):
    metric = "eval_loss_epoch" if interval == "epochs" else "intermediate_eval_loss"

    def run(folder: str, patience: int, epochs: int = 9) -> Trainer:
        stopping = EarlyStoppingCallback(patience, 5.0, metric, patience_in=interval)
        evaluation = StepBasedEvaluationCallback(2)
        trainer = make_trainer([evaluation, stopping, SaveTrainingStateCallback(folder)], seed=1)
        return train(trainer, epochs, eval_dataset=True, resume_from="latest")

    stopped = run("states", 1)
    assert "(early_stopping_threshold), in 1 " in stopped.stop_reason
    assert run("states", 1).progress == stopped.progress
    further, whole = run("states", 3), run("whole", 3)
    assert further.stop_reason == whole.stop_reason
    assert further.progress == whole.progress
    assert further.progress.update > stopped.progress.update
    assert further.run_history.to_dict() == whole.run_history.to_dict()
    assert equal_weights(weights(further.model), weights(whole.model))
    longer = run("states", 3, epochs=12)  # its patience starts over
    assert longer.progress.update > further.progress.update
    assert all(reason.startswith(f"{metric} has improved by ") for reason in (longer.stop_reason, further.stop_reason))


def test_a_changed_callback_attribute_is_no_changed_argument(here):
    class StopsAfter(TrainerCallback):
        def __init__(self, left: int) -> None:
            self.left = left

        def on_train_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
            self.left -= 1
            if not self.left:
                raise StopTrainingError("enough")

    for _ in range(2):
        trainer = make_trainer([StopsAfter(2), SaveTrainingStateCallback("states")])
        train(trainer, epochs=2, resume_from="latest")
        assert trainer.progress.update == 2


def test_callbacks_after_the_one_that_stops_a_run_get_the_event():
    values = [1.0, 0.999, 0.998]
    measure = listener(on_eval_epoch_end=lambda t, **_: t.run_history.update_metric("m", values[t.progress.epoch - 1]))
    heard: list[int] = []
    after = listener(on_eval_epoch_end=lambda t, **_: heard.append(t.progress.epoch))
    trainer = make_trainer([measure, EarlyStoppingCallback(1, 0.01, "m", greater_is_better=False), after])
    train(trainer, epochs=3, eval_dataset=True)
    assert heard == [1, 2]
    assert trainer.stop_reason is not None


def test_an_error_after_a_request_to_stop_clears_the_request():
    trainer = make_trainer(
        [listener(on_train_step_end=raises(StopTrainingError("enough"))), listener(on_train_step_end=raises(OSError()))]
    )
    with pytest.raises(OSError, match=r"^\nIn Listener.on_train_step_end\.") as caught:
        train(trainer)
    assert str(caught.value) == ""
    trainer.callback_handler.clear_callbacks()
    assert "evaluation_loss" in trainer.evaluate(make_data())


def test_a_stop_in_an_evaluation_within_a_run_ends_the_run(here):
    once = listener(on_train_epoch_end=lambda t, **_: t.evaluate(make_data()))
    stops = listener(on_eval_epoch_end=raises(StopTrainingError("good enough")))
    trainer = train(make_trainer([once, stops]), epochs=3)
    assert trainer.progress.epoch == 1
    assert trainer.stop_reason == "good enough"


def test_values_recorded_after_a_stopped_epoch_belong_to_it():
    stop = listener(on_eval_epoch_end=lambda t, **_: raises(StopTrainingError())() if t.progress.epoch == 2 else None)
    trainer = train(make_trainer([stop]), epochs=5, eval_dataset=True)
    trainer.callback_handler.clear_callbacks()
    trainer.evaluate(make_data())
    train(trainer, epochs=1, reset_run_history=False)
    rows = trainer.run_history.rows()
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert "evaluation_loss" in rows[1]
    assert rows[1]["train_loss_epoch"] != rows[2]["train_loss_epoch"]


def test_training_within_a_run_is_refused():
    nested = listener(on_train_step_end=lambda t, **_: train(t))
    with pytest.raises(RuntimeError, match=r"train\(\) cannot be called within a run"):
        train(make_trainer([nested]))
    trainer = make_trainer()
    parts = trainer.predict_iter(make_data(), per_device_batch_size=2)
    next(parts)
    with pytest.raises(RuntimeError, match=r"nor while predict_iter\(\) is being iterated"):
        train(trainer)
    parts.close()
    train(trainer)


def test_checks_of_extensions_are_made_at_their_points(monkeypatch):
    order: list[str] = []

    def check_optimizer(trainer, optimized):
        assert optimized == {*trainer.model.parameters()}
        order.append("optimizer")

    def check_schedule(trainer, run, initial):
        assert run is trainer.run
        assert trainer.scheduler is None
        assert initial is None
        order.append("schedule")

    def check_before_training(trainer, run):
        order.append("before")
        if order.count("before") > 1:
            raise ValueError("unfit")

    def check_first_batch(trainer, batch, output):
        assert output["batch_size"] == len(batch.data[0])
        order.append("batch")

    for name, check in {
        "of_optimizer": check_optimizer,
        "of_schedule": check_schedule,
        "before_training": check_before_training,
        "of_first_batch": check_first_batch,
    }.items():
        monkeypatch.setattr(RUN_CHECKS, name, [*getattr(RUN_CHECKS, name), check])
    names = ("on_training_run_start", "on_train_epoch_start")
    trainer = make_trainer([listener(**{name: lambda t, name=name: order.append(name) for name in names})])
    train(trainer)
    assert order == ["optimizer", "schedule", names[0], "before", names[1], "batch"]
    with pytest.raises(ValueError, match="unfit"):
        train(trainer)
    assert order[6:] == ["optimizer", "schedule", names[0], "before"]


def test_the_config_has_every_requested_setting_of_its_name():
    resolved = {"num_epochs", "max_num_train_steps", "gradient_accumulation_steps"}
    names = {of.name for of in fields(RunRequest)} & {of.name for of in fields(TrainerRunConfig)}
    requested = {name: object() for name in names - resolved}
    config = make_trainer()._create_run_config(2, **requested)
    assert {name: getattr(config, name) for name in requested} == requested


def test_step_methods_have_nothing_to_do_before_any_run():
    trainer = make_trainer()
    model = trainer.model
    trainer.scheduler_step()
    trainer.rewrap_model()
    assert trainer.model is model
    with pytest.raises(RuntimeError, match=r"no run_config before train\(\) or evaluate\(\)"):
        trainer.clip_gradients()


def test_abandoning_a_prediction_is_no_error():
    told: list[Any] = []
    trainer = make_trainer(
        [
            listener(
                on_exception=lambda t, exception, **_: told.append(exception),
                on_predict_run_end=lambda t: told.append("end"),
            )
        ]
    )
    for _ in trainer.predict_iter(make_data(), per_device_batch_size=2):
        break
    assert told == ["end"]


# ------------------------------------------------------------------------------------- what is part of it


class Weighted(nn.Module):
    """A loss with a weight that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - targets).square().mean() * torch.exp(-self.scale) + self.scale


def weighted_trainer(callbacks: Any = (), **kwargs: Any) -> Trainer:
    model, loss_func = make_model(), Weighted()
    optimizer = torch.optim.SGD([*model.parameters(), *loss_func.parameters()], lr=0.1, momentum=0.9)
    return make_trainer(callbacks, model, loss_func=loss_func, optimizer=optimizer, seed=0, **kwargs)


@pytest.mark.filterwarnings("ignore:The training state holds the state of callback")
def test_states_hold_the_parameters_of_the_loss_function(here):
    whole = train(weighted_trainer([SaveTrainingStateCallback("states", save_every_n_steps=1)]), epochs=2)
    resumed = train(weighted_trainer(), epochs=2, resume_from="states/update-000000002")
    assert equal_weights(weights(resumed.model), weights(whole.model))
    assert torch.equal(resumed.loss_func.scale, whole.loss_func.scale)
    assert whole.loss_func.scale != 1


@pytest.mark.extension("tuning")
def test_a_trial_restores_parameters_of_the_loss_function(here):
    trainer = weighted_trainer()
    trainer.find_lr(make_data(40), num_steps=10)
    assert trainer.loss_func.scale == 1


def test_clipping_covers_exactly_the_optimizers_parameters():
    trainer = weighted_trainer([listener(on_optimizer_step_start=lambda t: seen.append(t.loss_func.scale.grad))])
    seen: list[torch.Tensor] = []
    train(trainer, gradient_clip_value=1e-3)
    assert all(gradient.abs() <= 1e-3 for gradient in seen)

    model = make_model()
    head = torch.optim.SGD(model[2].parameters(), lr=0.0)
    norms: list[float] = []

    def note(trainer: Trainer) -> None:
        norms.append(float(nn.utils.get_total_norm([p.grad for p in model[2].parameters()])))

    train(
        make_trainer([listener(on_optimizer_step_start=note)], model, optimizer=head),
        epochs=4,
        batch_size=6,
        gradient_clip_norm=0.1,
    )
    assert norms == pytest.approx([norms[0]] * 4)  # whatever piles up in parameters that are not trained


class Holding(nn.Linear):
    """A model with entries that safetensors cannot store."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.register_buffer("adjacency", torch.eye(3).to_sparse())
        self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex128))


def test_states_hold_sparse_and_complex_entries(here):
    trainer = train(make_trainer(model=Holding()))
    trainer.save_training_state("state")
    again = make_trainer(model=Holding())
    again.load_training_state("state")
    assert torch.equal(again.model.weight, trainer.model.weight)
    assert torch.equal(again.model.phase, trainer.model.phase)
    assert torch.equal(again.model.adjacency.to_dense(), torch.eye(3))


def test_a_run_of_a_model_with_lazy_layers_can_be_resumed(here):
    def lazy() -> nn.Module:
        torch.manual_seed(1)
        return nn.LazyLinear(1)

    def run(**kwargs: Any) -> Trainer:
        return train(make_trainer([SaveTrainingStateCallback("s", save_every_n_steps=1)], lazy(), seed=0), **kwargs)

    whole, resumed = run(epochs=2), run(epochs=2, resume_from="s/update-000000002")
    assert equal_weights(weights(resumed.model), weights(whole.model))


class Own(RunHistory):
    """A history as users of pytorch-accelerated wrote them."""

    def __init__(self) -> None:
        self.inner = InMemoryRunHistory()

    def get_metric_names(self):
        return self.inner.get_metric_names()

    def get_metric_values(self, metric_name):
        return self.inner.get_metric_values(metric_name)

    def get_latest_metric(self, metric_name):
        return self.inner.get_latest_metric(metric_name)

    def update_metric(self, metric_name, metric_value):
        self.inner.update_metric(metric_name, metric_value)

    @property
    def current_epoch(self):
        return self.inner.current_epoch

    def _increment_epoch(self):
        self.inner._increment_epoch()

    def reset(self):
        self.inner.reset()

    def delete_metric(self, metric_name):
        self.inner.delete_metric(metric_name)

    def set_metric_name_prefix(self, prefix):
        self.inner.set_metric_name_prefix(prefix)

    @property
    def metric_name_prefix(self):
        return self.inner.metric_name_prefix


def test_histories_as_the_ancestors_users_wrote_them_can_be_used(here):
    trainer = train(make_trainer(run_history=Own()), epochs=2, eval_dataset=True)
    trainer.evaluate(make_data())
    assert len(trainer.run_history.get_metric_values("train_loss_epoch")) == 2


@pytest.mark.extension("metrics_file")
def test_a_file_of_metrics_needs_a_history_with_rows(here):
    with pytest.raises(TypeError, match=r"needs a run history with rows\(\), which Own lacks. Derive it from"):
        train(make_trainer([callbacks.MetricsFileCallback], run_history=Own()))


def test_a_run_with_an_unsaved_history_resumes_at_the_next_epoch(here):
    def run(epochs: int, *callbacks: Any, **kwargs: Any) -> Trainer:
        scores = [3.0, 2.0, 4.0, 1.0, 5.0]

        def note(trainer: Trainer, **_: Any) -> None:
            trainer.run_history.update_metric("score", scores[trainer.progress.epoch - 1])

        saver = SaveTrainingStateCallback("states", save_every_n_steps=1)
        trainer = make_trainer([listener(on_eval_epoch_end=note), saver, *callbacks], run_history=Own(), seed=1)
        with pytest.warns(UserWarning, match=r"run_history: training states do not hold the metrics of a Own"):
            return train(trainer, epochs, eval_dataset=True, **kwargs)

    def watchers() -> list[Any]:
        return [SaveBestModelCallback("best.pt", "score", False), EarlyStoppingCallback(9, 0.0, "score", False)]

    run(2, *watchers())
    best, stopping = watchers()
    resumed = run(5, best, stopping, resume_from="latest")
    assert resumed.run_history.current_epoch == 6
    assert list(resumed.run_history.get_metric_values("score")) == [4.0, 1.0, 5.0]
    assert (best.best_metric, best.best_metric_epoch) == (1.0, 4)
    assert stopping.early_stopping_patience_counter == 1


def test_states_hold_only_learned_parts_of_a_loss_function(here):
    class Distilling(nn.Module):
        def __init__(self, student: nn.Module) -> None:
            super().__init__()
            self.student = student
            self.teacher = nn.Linear(300, 300).requires_grad_(False)
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return self.scale * (outputs - targets).square().mean()

    model = make_model()
    loss_func = Distilling(model)
    optimizer = torch.optim.SGD([*model.parameters(), loss_func.scale], lr=0.1)
    trainer = train(make_trainer(model=model, loss_func=loss_func, optimizer=optimizer))
    trainer.save_training_state("state")
    assert sum(file.stat().st_size for file in Path("state").iterdir()) < 100_000
    plain = make_trainer()
    plain.optimizer = torch.optim.SGD([*plain.model.parameters(), nn.Parameter(torch.ones(()))], lr=0.1)
    with (
        pytest.warns(UserWarning, match=r"'state' holds the state of a different loss function \(scale\)"),
        pytest.warns(UserWarning, match=r"holds nothing for the attribute 'optimizer\[0\]\[4\]'"),
    ):
        plain.load_training_state("state")
    assert equal_weights(weights(plain.model), weights(model))


def test_a_non_finite_learned_loss_is_not_saved(here):
    def spoil(trainer: Trainer, **_: Any) -> None:
        if trainer.progress.update == 2:
            trainer.loss_func.scale.data.fill_(float("nan"))

    saver = SaveTrainingStateCallback("states", save_every_n_steps=1)
    with pytest.raises(NonFiniteLossError, match="after update 2, and were not saved"):
        train(weighted_trainer([listener(on_update_end=spoil), saver]))
    assert [path.name for path in Path("states").glob("update-*")] == ["update-000000001"]


def test_a_non_finite_best_model_is_not_saved(here):
    def spoil(trainer: Trainer) -> None:
        trainer.model[0].weight.data.fill_(float("nan"))

    best = SaveBestModelCallback("best.pt", "train_loss_epoch")
    with pytest.raises(NonFiniteLossError, match="not saved"):
        train(make_trainer([listener(on_train_epoch_end=spoil), best]))
    assert not Path("best.pt").exists()


def test_an_untrained_parameter_of_the_model_may_be_infinite(here):
    class Masked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 1)
            self.mask = nn.Parameter(torch.full((2,), -torch.inf))

    model = Masked()
    optimizer = torch.optim.SGD([model.weight, model.bias], lr=0.1)
    train(make_trainer([SaveTrainingStateCallback("states", save_every_n_steps=1)], model, optimizer=optimizer))
    assert len(list(Path("states").glob("update-*"))) == 3


@pytest.mark.extension("common_mistakes")
def test_gradients_are_clipped_for_an_optimizer_on_copies():
    class Master(torch.optim.SGD):
        def __init__(self, parameters: Any, lr: float) -> None:
            self.theirs = list(parameters)
            super().__init__([p.detach().clone() for p in self.theirs], lr=lr)

        def step(self, closure: Any = None) -> None:
            for mine, theirs in zip(self.param_groups[0]["params"], self.theirs, strict=True):
                mine.grad, theirs.grad = theirs.grad, None
            super().step()
            for mine, theirs in zip(self.param_groups[0]["params"], self.theirs, strict=True):
                theirs.data.copy_(mine)

    model = make_model()
    before = weights(model)
    with pytest.warns(UserWarning, match="unless the optimizer works on copies"):
        train(
            make_trainer(model=model, optimizer=Master(model.parameters(), lr=1.0)),
            batch_size=6,
            gradient_clip_norm=1e-3,
        )
    moved = nn.utils.get_total_norm([value - before[name] for name, value in weights(model).items()])
    assert 0 < moved < 1.01e-3


def test_a_config_assigned_after_training_is_the_trainers():
    trainer = train(make_trainer())
    other = replace(trainer.run_config, num_epochs=7)
    trainer.run_config = other
    assert trainer.run_config is other


@pytest.mark.parametrize("name", ["train_dataset", "eval_dataset"])
def test_a_dataset_assigned_within_a_run_is_a_warning(name):
    class Own(Trainer):
        def create_train_dataloader(self, *args):
            self.train_dataset, self.eval_dataset = make_data(), make_data()  # which the run reads
            return super().create_train_dataloader(*args)

        def create_eval_dataloader(self, *args):
            self.eval_dataset = make_data(2)
            return super().create_eval_dataloader(*args)

    trainer = make_trainer([listener(on_train_epoch_start=lambda t: setattr(t, name, make_data(4)))], None, Own)
    with pytest.warns(UserWarning, match=f"^trainer.{name} = .* which reads trainer.{name[:-3]}loader") as said:
        train(trainer, eval_dataset={"a": make_data(3), "b": make_data(3)})
    assert len(said) == 1


def test_an_evaluation_after_a_pause_is_not_paused():
    pausing = listener(on_update_end=raises(RunPausedError("The time is up.")))
    trainer = train(make_trainer([pausing]))
    assert trainer.stop_reason == "The time is up."
    trainer.evaluate(make_data())
    assert trainer.run.end.pause is None
    assert trainer.run.end.is_regular
    assert trainer.stop_reason is None
