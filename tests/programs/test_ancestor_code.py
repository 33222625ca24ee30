"""Code written for pytorch-accelerated, and subclasses with names of their own."""

from __future__ import annotations

import operator
import pathlib
import warnings
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytorch_accel_lite import (
    InMemoryRunHistory,
    LossTracker,
    RunHistory,
    Trainer,
    TrainerRunConfig,
    get_default_callbacks,
)
from pytorch_accel_lite.callbacks import (
    EarlyStoppingCallback,
    LogMetricsCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
)
from tests import ancestor
from tests.launching import run_code
from tests.shared_trainings import SPLITTING
from tests.small_models import equal_weights, listener, make_data, make_model, make_trainer, train, weights

# ------------------------------------------------------------------------------------ batches and losses


def with_indices(size: int = 6) -> TensorDataset:
    return TensorDataset(*make_data(size).tensors, torch.arange(size))


def test_the_default_step_uses_the_first_two_elements_of_a_batch():
    seen: list[int] = []
    watch = listener(on_train_step_end=lambda trainer, batch, **kwargs: seen.extend(batch[2].tolist()))
    pairs, triples = (make_trainer([*more]) for more in ((), [watch]))
    for trainer, data in ((pairs, make_data()), (triples, with_indices())):
        train(trainer, epochs=2, train_dataset=data, eval_dataset=data)
    assert equal_weights(weights(pairs.model), weights(triples.model))
    assert pairs.run_history.to_dict() == triples.run_history.to_dict()
    assert torch.equal(pairs.predict(make_data()), triples.predict(with_indices()))
    assert seen == [0, 1, 2, 3, 4, 5] * 2


class Shaped(Trainer):
    """Returns losses of several shapes."""

    in_training: Any = staticmethod(lambda loss: loss)
    in_evaluation: Any = in_training

    def calculate_train_batch_loss(self, batch):
        output = super().calculate_train_batch_loss(batch)
        return output | {"loss": self.in_training(output["loss"])}

    def calculate_eval_batch_loss(self, batch):
        output = super().calculate_eval_batch_loss(batch)
        output["loss"] = self.in_evaluation((output["model_outputs"] - batch[1]).square().squeeze(1))
        return output


def shaped(in_training: Any, in_evaluation: Any, **arguments: Any) -> Trainer:
    methods = {"in_training": staticmethod(in_training), "in_evaluation": staticmethod(in_evaluation)}
    trainer = make_trainer(trainer_class=type("Other", (Shaped,), methods))
    return train(trainer, epochs=2, eval_dataset=True, **arguments)


@pytest.mark.parametrize("reshape", [lambda loss: loss[None], lambda loss: {"fit": loss[None, None], "rest": 0 * loss}])
@pytest.mark.parametrize("arguments", [{}, SPLITTING, {"gradient_accumulation_steps": 2}])
def test_a_loss_may_have_any_shape_of_one_element(reshape, arguments):
    scalar = shaped(lambda loss: loss, torch.mean, **arguments)
    other = shaped(reshape, lambda losses: losses.mean()[None], **arguments)
    assert equal_weights(weights(scalar.model), weights(other.model))
    for name in ("train_loss_epoch", "eval_loss_epoch"):
        assert other.run_history.get_metric_values(name) == scalar.run_history.get_metric_values(name)


def test_losses_of_samples_are_averaged_in_an_evaluation():
    seen: list[torch.Tensor] = []
    trainer = shaped(lambda loss: loss, lambda losses: losses, size=7, batch_size=3)
    trainer.callback_handler.add_callback(
        listener(on_eval_step_end=lambda trainer, batch_output, **kwargs: seen.append(batch_output["loss"]))
    )
    measured = trainer.evaluate(make_data(7), per_device_batch_size=3)["evaluation_loss"]
    assert [len(losses) for losses in seen] == [3, 3, 1]
    assert measured == pytest.approx(torch.cat(seen).mean().item(), rel=1e-6)
    ordinary = make_trainer(model=trainer.model).evaluate(make_data(7), per_device_batch_size=3)
    assert measured == pytest.approx(ordinary["evaluation_loss"], rel=1e-6)


# ---------------------------------------------------------------------------------- names of attributes

FREE = {
    "running_loss": 0.0, "recorded_losses": [], "loss_trackers": {}, "gradient_norm": [], "batch_indices": "none",
    "clock": "noon", "is_finished": "maybe", "evaluation_is_due": True, "num_microbatches": 3, "stop_reason": "why",
    "gradient_window": 1, "data_seed": "x", "interruption": 5, "_config": {"lr": 1}, "_batch_size": 2,
    "_caller": "me", "_adapter": "mine", "_calculate_loss": None,
}  # fmt: skip


def test_a_subclass_may_define_most_names_itself(tmp_path):
    """Everything that reads the trainer still finds the run."""

    class Named(Trainer):
        def __init__(self, *args, **kwargs):
            for name, value in FREE.items():
                setattr(self, name, value)
            super().__init__(*args, **kwargs)

        def train_epoch_start(self):
            super().train_epoch_start()
            self.running_loss = 5.0

        def backward_step(self, loss):
            super().backward_step(loss)
            self.running_loss += loss.item()

    def run(trainer_class: type[Trainer], folder: Any) -> Trainer:
        callbacks = [SaveTrainingStateCallback(folder, save_every_n_steps=2), SaveBestModelCallback(folder / "best.pt")]
        trainer = make_trainer([*callbacks, EarlyStoppingCallback()], trainer_class=trainer_class, seed=3)
        return train(trainer, epochs=2, eval_dataset=True)

    plain, named = run(Trainer, tmp_path / "plain"), run(Named, tmp_path / "named")
    assert equal_weights(weights(plain.model), weights(named.model))
    assert plain.run_history.to_dict() == named.run_history.to_dict()
    assert {name: getattr(named, name) for name in FREE} == FREE | {"running_loss": named.running_loss}
    assert named.running_loss > 5.0
    assert isinstance(plain.running_loss, float)


def test_a_method_may_share_a_name_of_the_package():
    class Named(Trainer):
        def _calculate_loss(self, outputs, targets, weight):
            raise AssertionError

        def _adapter(self, layer):
            raise AssertionError

    assert equal_weights(weights(train(make_trainer(trainer_class=Named)).model), weights(train(make_trainer()).model))


@pytest.mark.parametrize("name", ["progress", "ranks", "is_running", "eval_dataloaders", "device"])
def test_names_that_the_trainer_needs_are_reserved(name):
    with pytest.raises(AttributeError, match=r"no setter|can't set attribute"):
        setattr(make_trainer(), name, "mine")
    with pytest.raises(TypeError, match=rf"Holding\.{name} is reserved"):
        type("Holding", (Trainer,), {name: "mine"})


@pytest.mark.parametrize("phase", ["train", "eval"])
def test_a_loader_under_a_reserved_name_is_an_error_with_advice(phase):
    class Keeping(Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            setattr(self, f"{phase}_dataloader", DataLoader(make_data()))

    with pytest.raises(AttributeError, match=rf"another name, and return it from create_{phase}_dataloader\(\)"):
        make_trainer(trainer_class=Keeping)


def test_attributes_of_the_run_are_set_after_the_constructor():
    class Early(Trainer):
        def __init__(self, *args, **kwargs):
            self.collate_fn = None
            super().__init__(*args, **kwargs)

    with pytest.raises(AttributeError, match=r"Early: call super\(\).__init__\(...\) before setting"):
        make_trainer(trainer_class=Early)


@pytest.mark.extension("streams")
def test_a_callback_may_replace_the_loader_of_the_run():
    def halve(trainer: Trainer, **kwargs: Any) -> None:
        trainer._train_dataloader = [(torch.ones(2, 4), torch.ones(2, 1))]

    assert train(make_trainer([listener(on_training_run_start=halve)]), epochs=2).progress.update == 2


def test_a_callback_may_replace_the_loss_tracker_for_a_while():
    """As pytorch-accelerated's callback for evaluations within an epoch does."""
    seen: list[float] = []

    def evaluate(trainer: Trainer, step: int, **kwargs: Any) -> None:
        kept = trainer._loss_tracker
        trainer._loss_tracker = LossTracker()
        trainer._run_eval_epoch(trainer._eval_dataloader, is_intermediate=True)
        trainer._loss_tracker = kept
        trainer.model.train()
        seen.append(trainer.running_loss)

    plain, evaluating = (make_trainer([*more]) for more in ((), [listener(on_train_step_end=evaluate)]))
    for trainer in (plain, evaluating):
        train(trainer, epochs=2, eval_dataset=True)
    assert equal_weights(weights(plain.model), weights(evaluating.model))
    losses = plain.run_history.get_metric_values("train_loss_epoch")
    assert evaluating.run_history.get_metric_values("train_loss_epoch") == losses == [seen[2], seen[5]]
    assert len(evaluating.run_history.get_metric_values("intermediate_eval_loss")) == 6


def test_the_arguments_of_a_loader_may_be_noted_as_there():
    class Own(Trainer):
        def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
            self._train_dl_kwargs = {"batch_size": 3}
            return DataLoader(self.train_dataset, **self._train_dl_kwargs)

    trainer = train(make_trainer(trainer_class=Own))
    assert trainer.run_config.train_dl_kwargs == {"batch_size": 3}
    assert trainer.run_config.train_per_device_batch_size == 3


def test_a_timm_trainers_count_may_be_set():
    pytest.importorskip("timm")
    from timm.scheduler import CosineLRScheduler

    from pytorch_accel_lite.trainer import TrainerWithTimmScheduler

    class Counting(TrainerWithTimmScheduler):
        def train_epoch_start(self):
            super().train_epoch_start()
            self.num_updates = 100 * self.run_history.current_epoch

    steps: list[int] = []

    class Noting(CosineLRScheduler):
        def step_update(self, num_updates, metric=None):
            steps.append(num_updates)

    trainer = make_trainer(trainer_class=Counting)
    train(trainer, epochs=2, create_scheduler_fn=lambda optimizer: Noting(optimizer, t_initial=6, t_in_epochs=False))
    assert steps == [100] * 3 + [200] * 3


# ------------------------------------------------------------------------------------------- overrides

IGNORED = {
    "_clip_gradients": "Override clip_gradients instead",
    "_prepare_model_optimizer_and_dataloaders": "Override _create_accelerator or training_run_start instead",
    "_perform_forward_and_backward_passes": "Override calculate_train_batch_loss or backward_step instead",
    "_run_evaluation": "Override evaluation_run_start or evaluation_run_end or evaluate instead",
    "_update_loss_tracker": "Override calculate_train_batch_loss or calculate_eval_batch_loss instead",
    "_add_epoch_loss_to_run_history": "Override train_epoch_end or eval_epoch_end instead",
    "_check_eval_batch_size": "no such method",
}


@pytest.mark.extension("other_libraries")
@pytest.mark.parametrize(("name", "advice"), IGNORED.items())
def test_an_override_that_nothing_calls_is_reported(name, advice):
    with pytest.warns(UserWarning, match=rf"Old\.{name} is never called.*{advice}") as caught:
        old = type("Old", (Trainer,), {name: lambda self, *args: None})
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        type("Below", (old,), {})  # said once
    mixin = type("Mixin", (), {name: lambda self, *args: None})
    with pytest.warns(UserWarning, match=rf"Mixed\.{name} is never called"):
        type("Mixed", (mixin, Trainer), {})


@pytest.mark.extension("other_libraries")
def test_the_warning_points_at_the_class():
    with pytest.warns(UserWarning, match="never called") as caught:

        class Old(Trainer):
            def _clip_gradients(self):
                raise AssertionError

    assert caught[0].filename == __file__


def test_a_class_for_both_libraries_is_left_unchanged():
    norms: list[float] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        class Both(Trainer):
            def _clip_gradients(self):
                norms.append(float(nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)))

            def clip_gradients(self):
                self._clip_gradients()

    train(make_trainer(trainer_class=Both))
    assert len(norms) == 3


def test_a_method_that_the_trainer_reserves_cannot_be_overridden():
    with pytest.raises(TypeError, match=r"Mine\._check_scheduler is reserved"):
        type("Mine", (Trainer,), {"_check_scheduler": lambda self: None})


def test_methods_that_the_ancestors_users_override_are_called():
    heard: list[Any] = []

    class Whole(Trainer):
        def _create_callback_handler(self):
            heard.append(len(self._callbacks))
            return super()._create_callback_handler()

        def _create_run_config(
            self,
            per_device_batch_size,
            num_epochs,
            gradient_accumulation_steps,
            max_num_train_steps,
            gradient_clip_value,
        ):
            heard.append((per_device_batch_size, num_epochs, gradient_accumulation_steps, max_num_train_steps))
            return super()._create_run_config(
                per_device_batch_size=per_device_batch_size,
                num_epochs=2,
                gradient_accumulation_steps=gradient_accumulation_steps,
                max_num_train_steps=max_num_train_steps,
                gradient_clip_value=gradient_clip_value,
            )

        def _run_training(self):
            heard.append("run")
            super()._run_training()

        def _run_train_epoch(self, train_dl):
            heard.append(len(train_dl))
            return super()._run_train_epoch(train_dl)

        def _run_eval_epoch(self, valid_dl, is_training=True, is_intermediate=False):
            heard.append(is_training)
            super()._run_eval_epoch(valid_dl, is_training, is_intermediate)

    trainer = train(make_trainer([listener()], trainer_class=Whole), epochs=1, eval_dataset=True)
    assert heard == [1, (2, 1, 1, None), "run", 3, True, 3, True]
    assert trainer.run_config.num_epochs == 2
    heard.clear()
    trainer.evaluate(make_data())
    assert heard == [(8, 1, 1, None), False]


def test_a_config_needs_the_fields_that_it_always_had():
    fields = dict.fromkeys(TrainerRunConfig.__dataclass_fields__, 1)
    first = dict(list(fields.items())[:14]) | {"num_update_steps_per_epoch": 7}
    config = TrainerRunConfig(**first)
    assert (config.mixed_precision, config.num_processes, config.num_local_update_steps_per_epoch) == ("no", 1, 7)


def test_an_evaluation_after_a_run_leaves_the_config_of_the_run():
    trainer = train(make_trainer(), epochs=3)
    config = trainer.run_config
    seen: list[Any] = []
    trainer.callback_handler.add_callback(
        listener(on_evaluation_run_end=lambda trainer: seen.append(trainer.run_config))
    )
    trainer.evaluate(make_data(), per_device_batch_size=4)
    assert trainer.run_config is config
    assert (seen[0].num_epochs, seen[0].eval_per_device_batch_size, seen[0].num_update_steps_per_epoch) == (1, 4, 0)
    alone = make_trainer()
    alone.evaluate(make_data(), per_device_batch_size=4)
    assert alone.run_config.eval_per_device_batch_size == 4


# ---------------------------------------------------------------------------------------------- states


def save(tmp_path: Any) -> Trainer:
    trainer = make_trainer([SaveTrainingStateCallback(tmp_path)], seed=1)
    return train(trainer, epochs=2)


def test_loading_a_training_state_prints_its_epoch(tmp_path):
    trainer = make_trainer(seed=1)
    seen: list[Any] = []

    def note(trainer: Trainer, **kwargs: Any) -> None:
        trainer.save_training_state(output_dir=tmp_path / f"{trainer.progress.epoch}", checkpoint_kwargs={"mine": 5})

    train(make_trainer([listener(on_epoch_checkpoint=note)], seed=1), epochs=2)
    for epoch in (1, 2):
        seen.append(trainer.load_training_state(input_dir=tmp_path / f"{epoch}"))
    assert [(about["current_epoch"], about["mine"]) for about in seen] == [(2, 5), (3, 5)]


def test_resuming_calls_an_overridden_load_training_state(tmp_path):
    class Keeping(Trainer):
        extra: Any = None

        def load_training_state(self, input_dir):
            about = super().load_training_state(input_dir)
            self.extra = about["mine"], about["current_epoch"], input_dir
            return about

    def resumed(trainer_class: type[Trainer]) -> Trainer:
        return train(make_trainer(trainer_class=trainer_class, seed=1), epochs=3, resume_from=tmp_path / "state")

    halfway = train(make_trainer(seed=1), epochs=2)
    halfway.save_training_state(tmp_path / "state", {"mine": 7})
    whole = train(make_trainer(seed=1), epochs=3)
    plain, keeping = resumed(Trainer), resumed(Keeping)
    assert keeping.extra == (7, 3, tmp_path / "state")
    for trainer in (plain, keeping):
        assert equal_weights(weights(trainer.model), weights(whole.model))
        assert trainer.run_history.to_dict() == whole.run_history.to_dict()
        assert trainer.progress == whole.progress


STATE_OF_THE_ANCESTOR = """
import sys
import torch
from pytorch_accelerated import Trainer

model = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.randn(6, 4), torch.randn(6, 1))
trainer = Trainer(model, torch.nn.MSELoss(), torch.optim.AdamW(model.parameters(), lr=0.1), callbacks=())
trainer.train(data, 1, per_device_batch_size=2, train_dataloader_kwargs={"num_workers": 0})
trainer.save_training_state(sys.argv[1])
"""


def test_a_state_of_the_ancestor_is_named_as_such(tmp_path):
    ancestor.skip_without_it()
    run_code(STATE_OF_THE_ANCESTOR, str(tmp_path / "theirs"))
    trainer = make_trainer(model=nn.Linear(4, 1), optimizer=None)
    with pytest.raises(ValueError, match="is a training state of Accelerate, as written by pytorch-acc") as caught:
        trainer.load_training_state(tmp_path / "theirs")
    assert "damaged" not in str(caught.value)
    with pytest.raises(ValueError, match="is a training state of Accelerate"):
        train(make_trainer(model=nn.Linear(4, 1)), resume_from=tmp_path / "theirs")
    trainer.model.load_state_dict(safetensors.torch.load_file(tmp_path / "theirs" / "model.safetensors"))  # as it says


def test_numbers_of_numpy_in_a_checkpoint_are_loaded(tmp_path):
    numbers = {"f": np.float64(0.25), "g": np.float32(0.5), "i": np.int64(3), "b": np.bool_(True)}
    content = {"model_state_dict": OrderedDict(make_model(seed=1).state_dict()), **numbers}
    torch.save(content, tmp_path / "theirs.pt")
    trainer = make_trainer(optimizer=None)
    loaded = trainer.load_checkpoint(tmp_path / "theirs.pt")
    assert {name: loaded[name] for name in numbers} == numbers
    assert equal_weights(weights(trainer.model), weights(make_model(seed=1)))


def test_objects_of_numpy_that_could_run_code_are_still_refused(tmp_path):
    content = {"model_state_dict": make_model().state_dict(), "mine": np.array([pathlib.Path("x")], dtype=object)}
    torch.save(content, tmp_path / "theirs.pt")
    with pytest.raises(ValueError, match="without running code"):
        make_trainer(optimizer=None).load_checkpoint(tmp_path / "theirs.pt")


# ------------------------------------------------------------------------------------------- the small ones


@pytest.mark.extension("finetuning", "model_ema", "progress_bar", "pytorch_accelerated")
def test_names_that_the_ancestors_users_import():
    from pytorch_accel_lite.callbacks import CallbackMethodNotImplementedError, ModelEma
    from pytorch_accel_lite.finetuning import BN_MODULES
    from pytorch_accel_lite.trainer import LogMetricsCallback as Logged
    from pytorch_accel_lite.trainer import ProgressBarCallback, StopTrainingError, TerminateOnNaNCallback
    from pytorch_accel_lite.trainer import RunHistory as History
    from pytorch_accel_lite.utils import LIMIT_BATCHES_ENV_VAR, worker_init_fn
    from pytorch_accel_lite.utils import ModelEma as Ema

    assert issubclass(CallbackMethodNotImplementedError, Exception)
    assert ModelEma is Ema
    assert nn.BatchNorm2d in BN_MODULES
    assert (Logged, History) == (LogMetricsCallback, RunHistory)
    assert issubclass(StopTrainingError, Exception)
    assert {ProgressBarCallback, TerminateOnNaNCallback} <= set(get_default_callbacks())
    assert LIMIT_BATCHES_ENV_VAR == "PT_ACC_LIMIT_BATCHES"
    kwargs = {"num_workers": 2, "worker_init_fn": worker_init_fn}
    loaders = [{"num_workers": 2}, kwargs, kwargs]
    runs = [train(make_trainer(seed=2), train_dataloader_kwargs=kwargs) for kwargs in loaders]
    assert all(equal_weights(weights(run.model), weights(runs[0].model)) for run in runs)


def test_a_run_config_accepts_the_ancestors_arguments():
    numbers = "num_epochs train_per_device_batch_size eval_per_device_batch_size gradient_accumulation_steps"
    numbers += " train_total_batch_size eval_total_batch_size num_update_steps_per_epoch max_num_train_steps"
    numbers += " num_local_update_steps_per_epoch num_processes"
    given: dict[str, Any] = dict.fromkeys(numbers.split(), 1)
    given |= {"train_dl_kwargs": {}, "eval_dl_kwargs": {}, "gradient_clip_value": None, "mixed_precision": "no"}
    given |= {"is_local_process_zero": True, "is_world_process_zero": True, "is_distributed": False}
    config = TrainerRunConfig(**given)
    assert given.items() <= config.to_dict().items()
    assert config.gradient_clip_norm is None


def test_names_of_metrics_can_be_subtracted_in_a_logger():
    seen: list[set[str]] = []

    class Others(LogMetricsCallback):
        def log_metrics(self, trainer, metrics):
            seen.append(trainer.run_history.get_metric_names() - {"train_loss_epoch"})

    train(make_trainer([Others]), eval_dataset=True)
    assert seen == [set(), {"eval_loss_epoch"}]


@pytest.mark.parametrize(
    "value",
    [torch.tensor(1 / 3), np.float32(1 / 3), np.float64(1 / 3), 1 / 3, torch.tensor(1 / 3, requires_grad=True)],
    ids=["tensor", "float32", "float64", "float", "tensor with gradients"],
)
def test_any_metric_is_shown_with_six_digits(value, capsys):
    def record(trainer: Trainer, **kwargs: Any) -> None:
        trainer.run_history.update_metric("accuracy", value)
        trainer.run_history.update_metric("samples", torch.tensor(12))
        trainer.run_history.update_metric("each", torch.tensor([1, 2]))
        trainer.run_history.update_metric("note", "good")

    train(make_trainer([listener(on_train_epoch_end=record), LogMetricsCallback]))
    assert "accuracy: 0.333333, samples: 12, each: tensor([1, 2]), note: good" in capsys.readouterr().out


@pytest.mark.parametrize("callback_class", [SaveBestModelCallback, EarlyStoppingCallback])
def test_watching_callbacks_have_the_operator_of_the_ancestor(callback_class):
    assert callback_class(greater_is_better=True).operator is operator.gt
    assert callback_class(greater_is_better=False).operator is operator.lt


def test_a_loss_tracker_takes_the_losses_of_the_samples():
    tracker = LossTracker()
    tracker.update(torch.tensor([1.0, 3.0]), 2)
    tracker.update(torch.tensor([[5.0]]), 1)
    assert tracker.average == 3.0
    assert InMemoryRunHistory().get_metric_names() == set()
