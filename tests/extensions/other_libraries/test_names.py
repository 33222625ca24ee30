"""Names of other libraries: the error suggests the name to use."""

from __future__ import annotations

import pydoc
import warnings
from typing import Any

import pytest

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import EarlyStoppingCallback, SaveBestModelCallback
from pytorch_accel_lite.extensions.other_libraries import HOOKS
from pytorch_accel_lite.run.events import EVENTS
from tests.small_models import make_data, make_trainer


def message(error: type[Exception], action: Any) -> str:
    with pytest.raises(error) as caught:
        action()
    text = str(caught.value)
    assert "\n" not in text
    return text


TRAINER: list[tuple[dict[str, Any], str]] = [
    ({"precision": "bf16"}, "Trainer() has no argument 'precision': it is called mixed_precision."),
    ({"bf16": True}, "pass mixed_precision='bf16', or 'fp16', to Trainer()."),
    ({"logger": "wandb"}, "add TrackerCallback('wandb') to the callbacks."),
    ({"report_to": ["mlflow"]}, "add TrackerCallback('wandb') to the callbacks."),
    ({"device": "cuda"}, "'device': Accelerate finds the devices."),
    ({"compute_metrics": len}, "it is called metrics."),
    ({"batch_size": 8}, "'batch_size': pass per_device_batch_size to train()."),
    ({"epochs": 8}, "pass num_epochs to train()."),
    ({"lr_scheduler": None}, "pass create_scheduler_fn to train()."),
    ({"gradient_clip_val": 1.0}, "pass gradient_clip_norm to train()."),
    ({"patience": 3}, "add EarlyStoppingCallback(early_stopping_patience=...)"),
    ({"monitor": "val_loss"}, "pass watch_metric to a SaveBestModelCallback"),
    ({"loss_fn": None}, "it is called loss_func."),
    ({"tf32": True}, "call torch.set_float32_matmul_precision('high') before training."),
    ({"benchmark": True}, "set torch.backends.cudnn.benchmark = True before training."),
    ({"num_sanity_val_steps": 2}, "train() tries one batch of each eval_dataset, unless sanity_check=False"),
]


@pytest.mark.parametrize(("arguments", "answer"), TRAINER, ids=[next(iter(a)) for a, _ in TRAINER])
def test_renamed_arguments_of_trainers_are_suggested(arguments, answer):
    assert answer in message(TypeError, lambda: make_trainer(**arguments))


TRAIN: list[tuple[dict[str, Any], str]] = [
    ({"batch_size": 8}, "train() has no argument 'batch_size': it is called per_device_batch_size."),
    ({"epochs": 8}, "it is called num_epochs."),
    ({"max_epochs": 8}, "it is called num_epochs."),
    ({"lr_scheduler": None}, "it is called create_scheduler_fn."),
    ({"validation_data": None}, "it is called eval_dataset."),
    ({"resume_from_checkpoint": True}, "it is called resume_from."),
    ({"lr_scheduler_type": "cosine"}, "it is called create_scheduler_fn."),
    ({"warmup_ratio": 0.1}, "it is called warmup_steps."),
    ({"num_workers": 3}, "'num_workers': pass it in train_dataloader_kwargs or "),
    ({"patience": 3}, "add EarlyStoppingCallback("),
    ({"monitor": "loss"}, "pass watch_metric to"),
    ({"lr": 0.1}, "pass it to the optimizer"),
    ({"epochs": 1, "batch_size": 2}, "called per_device_batch_size. train() has no argument 'epochs': it is"),
]


@pytest.mark.parametrize(("arguments", "answer"), TRAIN, ids=["+".join(a) for a, _ in TRAIN])
def test_renamed_arguments_of_train_are_suggested(arguments, answer):
    assert answer in message(TypeError, lambda: make_trainer().train(make_data(), **arguments))


@pytest.mark.parametrize("method", ["evaluate", "predict", "predict_iter"])
def test_unknown_arguments_of_evaluate_are_explained(method):
    call = getattr(make_trainer(), method)
    assert "it is called per_device_batch_size." in message(TypeError, lambda: call(make_data(), batch_size=3))
    assert "it is called dataset." in message(TypeError, lambda: call(test_data=make_data()))


CALLBACKS: list[tuple[Any, str, str]] = [
    (EarlyStoppingCallback, "patience", "EarlyStoppingCallback() has no argument 'patience': it is called early_"),
    (EarlyStoppingCallback, "monitor", "it is called watch_metric."),
    (EarlyStoppingCallback, "min_delta", "it is called early_stopping_threshold."),
    (SaveBestModelCallback, "monitor", "it is called watch_metric."),
    (SaveBestModelCallback, "filepath", "it is called save_path."),
    (SaveBestModelCallback, "save_top_k", "it is called keep."),
]


@pytest.mark.parametrize(("callback", "word", "answer"), CALLBACKS, ids=[f"{c.__name__}-{w}" for c, w, _ in CALLBACKS])
def test_renamed_arguments_of_callbacks_are_suggested(callback, word, answer):
    assert answer in message(TypeError, lambda: callback(**{word: 3}))


@pytest.mark.parametrize("name", ["test", "validate"])
def test_other_names_for_evaluate_are_suggested(name):
    assert f"Trainer has no {name}(). Call evaluate(dataset)." in message(
        AttributeError, lambda: getattr(make_trainer(), name)
    )


def test_counts_named_as_in_other_libraries_point_to_progress():
    trainer = make_trainer()
    advice = message(AttributeError, lambda: trainer.global_step)
    assert advice == "Trainer has no global_step. Read progress.update, the number of updates."
    assert "progress.epoch" in message(AttributeError, lambda: trainer.current_epoch)
    trainer.global_step = 3  # of a program's own
    assert trainer.global_step == 3


def test_fit_suggests_train():
    trainer = make_trainer()
    assert "Trainer has no fit(). Call train(" in message(AttributeError, lambda: trainer.fit(make_data(), 3))
    assert not hasattr(trainer, "fit")
    hidden = {name for name in object.__dir__(trainer) if not name.startswith("_")} - {*dir(trainer)}
    assert hidden == {"add_callback", "current_epoch", "fit", "global_step", "test", "validate"}
    assert " |  fit = <not there: Call train(" in pydoc.plain(pydoc.render_doc(Trainer))

    class Fits(Trainer):
        def fit(self):
            return "mine"

    assert make_trainer(trainer_class=Fits).fit() == "mine"


@pytest.mark.parametrize(
    ("name", "advice"),
    {
        "training_step": "Override calculate_train_batch_loss or train_step instead",
        "compute_loss": "Override calculate_train_batch_loss or train_step instead",
        "validation_step": "Override calculate_eval_batch_loss instead",
        "prediction_step": "Override calculate_eval_batch_loss or calculate_predict_batch_output instead",
        "get_train_dataloader": "Override create_train_dataloader instead",
        "configure_optimizers": "Pass the optimizer, or a function that creates it",
    }.items(),
)
def test_a_method_that_only_another_library_calls_is_warned_of(name, advice):
    with pytest.warns(UserWarning, match=rf"Theirs\.{name} is never called.*{advice}"):
        type("Theirs", (Trainer,), {name: lambda self, *args: None})


def test_a_method_that_a_custom_step_may_call_is_not_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        type("Ours", (Trainer,), {name: lambda self, *args: None for name in ("compute_loss", "train_step")})


@pytest.mark.parametrize(
    ("name", "advice"),
    {
        "before_train": "Override training_run_start or train_epoch_start, or define on_training_run_start or on_",
        "after_train_iter": "Define on_train_step_end in a TrainerCallback",
        "run_step": "Override calculate_train_batch_loss or train_step instead",
    }.items(),
)
def test_a_hook_that_a_trainer_defines_is_warned_of(name, advice):
    with pytest.warns(UserWarning, match=rf"Theirs\.{name} is never called.*{advice}") as caught:
        type("Theirs", (Trainer,), {name: lambda self, *args: None})
    assert len(caught) == 1


def test_hooks_of_other_libraries_map_to_existing_events():
    assert set(HOOKS) <= {*EVENTS, "state_dict", "load_state_dict"}


def test_a_trainer_that_is_a_callback_too_has_events():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        type("Both", (Trainer, TrainerCallback), {"on_train_epoch_end": lambda self, trainer, **kwargs: None})
        type("Ours", (Trainer,), {name: lambda self, *args: None for name in ("on_train_epoch_end", "train_epoch_end")})


@pytest.mark.parametrize(
    ("name", "advice"),
    {
        "on_train_epoch_end": "Override train_epoch_end, or define on_train_epoch_end in a TrainerCallback",
        "on_train_step_end": "Define on_train_step_end in a TrainerCallback",
    }.items(),
)
def test_an_event_that_a_trainer_defines_is_warned_of(name, advice):
    with pytest.warns(UserWarning, match=rf"Theirs\.{name} is never called.*{advice}") as caught:
        type("Theirs", (Trainer,), {name: lambda self, *args: None})
    assert len(caught) == 1
