"""Methods of callbacks that are named like an event, or like one of another library, are warned of with the event."""

from __future__ import annotations

import warnings

import pytest

from pytorch_accel_lite import TrainerCallback
from tests.launching import two_are_enough
from tests.small_models import adamw_trainer, float64_data, float64_model, make_trainer, train

UNKNOWN = {
    "on_train_step_ends": "on_train_step_end",  # misspelt
    "on_optimiser_step_end": "on_optimizer_step_end",
    "on_train_batch_end": "on_train_step_end",  # of Lightning and Keras
    "on_epoch_end": "on_training_run_epoch_end",
    "on_step_end": "on_update_end",  # of transformers
    "on_save_checkpoint": "state_dict",
    "after_train_iter": "on_train_step_end",  # of mmengine
    "before_run": "on_training_run_start",
    "after_batch": "on_train_step_end",  # of fastai
    "batch_checkpoint": "on_train_step_checkpoint",  # of Composer
    "iteration_completed": "on_train_step_end",  # Ignite's
    "on_grad_computed": "on_backward_end",  # of skorch
    "on_before_optimizers_step": "on_optimizer_step_start",  # of fastNLP
}


@pytest.mark.extension("other_libraries")
def test_an_unknown_event_is_warned_of_with_a_suggestion():
    methods = {name: lambda self, trainer, **kwargs: None for name in [*UNKNOWN, "on_checkpoint_uploaded"]}
    trainer = make_trainer([type("Listens", (TrainerCallback,), {"on_gpu": False, **methods})])
    with pytest.warns(UserWarning, match="is not an event") as caught:
        train(trainer)
    said = [str(warning.message) for warning in caught]
    assert len(said) == len(UNKNOWN)
    for name, meant in UNKNOWN.items():
        (line,) = [line for line in said if f"Listens.{name} is not an event of the trainer" in line]
        assert line.endswith(f"Did you mean {meant!r}?")


@pytest.mark.extension("other_libraries")
def test_a_hook_with_two_matching_events_names_both():
    methods = {"after_step": lambda self, trainer: None, "before_train": lambda self, trainer: None, "after_all": len}
    with pytest.warns(UserWarning, match="is not an event") as caught:
        train(make_trainer([type("Hook", (TrainerCallback,), methods)]))
    said = sorted(str(warning.message) for warning in caught)
    assert len(said) == 2
    assert said[0].startswith("Hook.after_step is not an event")
    assert said[0].endswith("Did you mean 'on_train_step_end' or 'on_optimizer_step_end'?")  # detectron2's, fastai's
    assert said[1].endswith("Did you mean 'on_training_run_start' or 'on_train_epoch_start'?")


@pytest.mark.parametrize(("method", "other"), [("state_dict", "load_state_dict"), ("load_state_dict", "state_dict")])
def test_a_callback_with_half_a_state_is_warned_of(method, other):
    half = type("Half", (TrainerCallback,), {method: lambda self, *args: {}})
    with pytest.warns(UserWarning, match=rf"Half has {method}\(.*\), but no {other}\(.*\), so a resumed run does not"):
        train(make_trainer([half]))


def warnings_of_unknown_events() -> list[str]:
    """The warnings of this rank about a misspelt event."""
    misspelt = type("Misspelt", (TrainerCallback,), {"on_train_step" + "_ends": lambda self, trainer, **kwargs: None})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        adamw_trainer(float64_model(), callbacks=[misspelt]).train(float64_data(8), 1)
    return [str(warning.message) for warning in caught]


@pytest.mark.processes
@two_are_enough
def test_one_process_warns_of_unknown_events_on_behalf_of_all(ranks):
    assert list(map(len, ranks(warnings_of_unknown_events))) == [1] + [0] * (ranks.world_size - 1)
