"""The page that compares features with five other trainers: each of its rows is tested."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR
from torch.utils.data import DataLoader

import pytorch_accel_lite.callbacks as shipped
from pytorch_accel_lite import (
    CallbackHandler,
    InMemoryRunHistory,
    LossTracker,
    RunHistory,
    StopTrainingError,
    Trainer,
    TrainerCallback,
    TrainerPlaceholderValues,
    TrainerRunConfig,
    TrainerWithTimmScheduler,
    callbacks,
)
from pytorch_accel_lite.callbacks import (
    EarlyStoppingCallback,
    LogMetricsCallback,
    MoveModulesToDeviceCallback,
    PrintProgressCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    TerminateOnNaNCallback,
    get_default_callbacks,
)
from pytorch_accel_lite.data import OwnShard
from pytorch_accel_lite.extension_names import OFFERED
from pytorch_accel_lite.run.events import EVENTS
from pytorch_accel_lite.trainer import DEFAULT_CALLBACKS
from tests.launching import ROOT
from tests.small_models import equal_weights, listener, make_data, make_model, make_trainer, train, weights

PAGE = ROOT / "docs" / "feature_comparison.md"
P = TrainerPlaceholderValues
Test = TypeVar("Test", bound=Callable[..., None])

# ----------------------------------------------------------------------------------------------- the page

#: The rows that the tests below try.
TRIED: list[str] = []


def row(*names: str) -> Callable[[Test], Test]:
    """Declare the rows of the page that a test tests."""
    TRIED.extend(names)
    return lambda test: test


#: Rows that another test tries: of programs, of several processes, or of a feature with a file of its own.
HELD = {
    "attributes of Accelerate's loaders": "test_dataloaders.py::"
    "test_loaders_have_the_sizes_that_those_of_accelerate_have",
    "equal batches on all processes, samples repeated": "test_dataloaders.py::"
    "test_a_sampler_may_repeat_samples_to_fill_batches",
    "saving into a buffer in memory": "test_open_files.py::test_saving_to_an_open_file_equals_saving_to_a_path",
    "loading from a buffer in memory": "test_open_files.py::test_an_open_file_is_written_and_read_from_its_position",
    "a word when their lengths differ": "test_named_datasets.py::test_training_datasets_by_name_give_batches_by_name",
    "a batch that fails is skipped in a validation": "test_skipped_evaluations.py::"
    "test_an_evaluation_leaves_out_the_failed_batch_alone",
    "a batch that fails is skipped in a test": "test_testing.py::test_a_test_may_skip_and_list_failed_batches",
    "a whole script with the import renamed": "test_docs.py::test_both_columns_of_a_page_train_the_same",
    "the same script launched on two processes": "test_processes.py::"
    "test_the_first_example_runs_unchanged_on_two_processes",
    "the script of progressive resizing": "test_examples.py::"
    "test_progressive_resizing_trains_one_model_on_growing_images",
    "the best average of weights is kept over several runs": "test_ema.py::"
    "test_the_best_average_of_an_earlier_run_stays_in_its_file",
    "an incomplete last window updates, too": "test_exactness.py::"
    "test_accumulated_gradients_are_those_of_the_whole_window",
    "no exchange of gradients within a window": "test_data_parallel_training.py::"
    "test_training_equals_one_process_with_the_whole_batch",
    "settings of a distributed run": "test_data_parallel_training.py::test_limits_count_steps_of_the_whole_job",
    "mixed precision of the launcher in the settings": "test_mixed_precision.py::"
    "test_mixed_precision_defaults_to_the_launchers",
    "a checkpoint saved once for all machines": "test_checkpoint.py::test_missing_folders_are_created",
    "checkpoints move between both libraries": "test_checkpoint.py::"
    "test_the_ancestor_loads_our_file_with_its_optimizer",
    "the same over two processes": "test_processes.py::test_gather_takes_tensors_of_unequal_length",
    "a package with tests, examples, pages and a changelog": "test_docs.py::test_the_pages_with_code_are_found",
    "few packages are needed": "test_imports.py::test_importing_costs_only_accelerate_torch_numpy_and_tqdm",
    "timm is needed only for its schedules": "test_imports.py::test_extras_are_imported_only_when_they_are_used",
    "training in a notebook": "test_notebooks.py::test_a_run_is_one_table_in_a_notebook",
    "several processes from a notebook": "test_processes.py::test_training_in_a_notebook_on_two_processes",
    "their progress is shown in the notebook": "test_notebooks.py::"
    "test_processes_that_a_notebook_launches_show_their_progress",
    "`accelerate launch --cpu --num_processes 2`": "test_processes.py::"
    "test_a_launch_that_accelerate_does_not_see_is_refused",
    "`accelerate launch --multi_gpu` on CPUs": "test_processes.py::"
    "test_a_launched_run_exits_with_0_however_it_is_closed",
    "the first example with the extra for plots": "test_extras.py::test_errors_name_what_to_install",
    "a context without exchange of gradients": "test_data_parallel_training.py::"
    "test_training_equals_one_process_with_the_whole_batch",
    "automatic mixed precision": "test_mixed_precision.py::test_the_argument_gives_the_bits_of_an_accelerator_with_it",
    "each sample once, on any number of processes": "test_shares.py::"
    "test_an_epoch_gives_every_sample_once_with_equal_updates",
    "workers are seeded": "test_worker_and_sample_seeds.py::test_random_transforms_follow_seed_epoch_and_position",
    "resuming with another batch size": "test_shares.py::test_an_epoch_can_continue_anywhere_with_other_sizes",
    "resuming with another number of samples is an error": "test_consistency.py::"
    "test_an_epoch_is_not_resumed_over_data_of_another_length",
    "an error ends all processes and names its rank": "test_processes.py::"
    "test_a_failing_rank_ends_the_job_with_its_traceback",
    "an object of any process, in a group": "test_processes.py::test_processes_gather_broadcast_and_wait",
    "objects of the processes of a group": "test_processes.py::test_processes_gather_broadcast_and_wait",
    "the precision of mixed precision": "test_mixed_precision.py::test_mixed_precision_equals_a_hand_written_loop",
    "a gradient scaler with settings": "test_exactness.py::test_clipping_sees_unscaled_gradients",
    "the scale is logged": "test_monitoring.py::test_the_loss_scale_and_its_skipped_updates_are_recorded",
    "the state of the scaler is saved": "test_monitoring.py::test_skipped_updates_are_counted_over_a_resume",
    "distributed, device and precision are set from outside": "test_processes.py::"
    "test_the_first_example_runs_unchanged_on_two_processes",
    "a switch between eager and compiled": "test_model_options.py::"
    "test_a_model_compiled_in_place_trains_like_the_plain_one",
    "one file describes a run": "test_experiments.py::test_a_run_from_a_file_ends_in_the_bits_of_the_script",
    "the command line wins over the file": "test_overrides.py::test_another_class_drops_the_arguments_it_does_not_take",
    "arguments of your own": "test_experiments.py::test_functions_without_types_may_create_parts",
    "unknown options are named": "test_experiment_errors.py::test_errors_name_the_location_and_the_remedy",
    "a folder for results, named like the file": "test_run_folders.py::test_each_new_run_has_its_own_folder",
    "commands to train and to test": "test_testing.py::test_the_test_command_follows_the_file",
    "the settings are kept beside the results": "test_experiments.py::test_the_resolved_file_is_the_same_experiment",
    "mixed precision by an option": "test_experiments.py::test_an_accelerator_is_described_by_its_arguments",
    "backend and address of the processes": "test_machines.py::test_two_machines_have_the_bits_of_two_processes_on_one",
    "the number of GPUs": "test_idle_gpus.py::test_only_gpus_that_are_visible_are_chosen",
    "idle GPUs are chosen": "test_idle_gpus.py::test_the_gpus_with_the_least_in_use_are_chosen",
    "each process draws numbers of its own": "test_worker_and_sample_seeds.py::"
    "test_random_transforms_follow_seed_epoch_and_position",
    "synchronised batch norm": "test_sync_batch_norm.py::test_conversion_to_sync_batch_norm_keeps_model_and_results",
    "progress and numbers of batches agree over processes": "test_shares.py::"
    "test_a_global_batch_is_the_same_on_any_number_of_processes",
    "stopping is agreed over processes": "test_stop_requests.py::"
    "test_a_stop_requested_by_one_rank_stops_all_at_one_update",
    "curves": "test_callback_contract.py::test_a_shipped_callback_serves_two_runs",
    "a description of how data are read": "test_callback_contract.py::test_a_shipped_callback_serves_two_runs",
    "several models, and averages of them": "test_testing.py::test_best_and_last_weights_can_be_averaged",
    "results are kept beside each model": "test_testing.py::test_each_combination_is_tested_and_listed_in_the_table",
    "the n worst samples": "test_testing.py::test_samples_are_ranked_by_a_function_of_outputs_and_targets",
    "several settings of inference": "test_testing.py::test_each_combination_is_tested_and_listed_in_the_table",
    "results by model, setting and dataset": "test_testing.py::test_each_combination_is_tested_and_listed_in_the_table",
    "an interrupted test is resumed": "test_testing.py::test_a_killed_test_leaves_the_same_files_as_one_that_was_not",
    "a history written from scratch": "test_history.py::test_a_users_history_is_used",
    "a history that extends `reset`": "test_history.py::test_a_subclass_may_reset_what_its_constructor_creates",
    "a mean of losses that weighs by samples": "test_history.py::test_a_running_mean_weighs_by_batch_size",
    "settings cannot be changed": "test_history.py::test_the_run_config_cannot_be_changed",
    "settings are made of fifteen fields": "test_ancestor_code.py::test_a_config_needs_the_fields_that_it_always_had",
    "an end when the loss is NaN": "test_ancestor_faults.py::test_a_nan_raises_an_error_rather_than_ending_the_program",
    "NaN is an error with the iteration and the losses": "test_ancestor_faults.py::"
    "test_a_nan_raises_an_error_rather_than_ending_the_program",
    "only the first two elements of a batch are used": "test_ancestor_code.py::"
    "test_the_default_step_uses_the_first_two_elements_of_a_batch",
    "clipping by a method": "test_ancestor_code.py::test_an_override_that_nothing_calls_is_reported",
    "what prepares model and loaders is overridden": "test_ancestor_code.py::"
    "test_an_override_that_nothing_calls_is_reported",
    "an overridden `_run_evaluation`": "test_ancestor_code.py::test_an_override_that_nothing_calls_is_reported",
    "an overridden `_perform_forward_and_backward_passes`": "test_ancestor_code.py::"
    "test_an_override_that_nothing_calls_is_reported",
    "number of epochs": "test_placeholders.py::test_a_placeholder_has_the_value_of_the_run",
    "number of updates in an epoch": "test_placeholders.py::test_a_placeholder_has_the_value_of_the_run",
    "number of training batches": "test_placeholders.py::test_a_placeholder_has_the_value_of_the_run",
    "number of evaluation batches": "test_placeholders.py::test_a_placeholder_has_the_value_of_the_run",
    "a placeholder times a number": "test_placeholders.py::test_every_operator_works_with_numbers_on_either_side",
    "a placeholder plus a number": "test_placeholders.py::test_every_operator_works_with_numbers_on_either_side",
    "subtracting is an error": "test_placeholders.py::test_every_operator_works_with_numbers_on_either_side",
    "placeholders are the members of an `Enum`": "test_placeholders.py::"
    "test_placeholders_are_listed_like_members_of_an_enum",
    "the name of a placeholder": "test_placeholders.py::test_placeholders_are_listed_like_members_of_an_enum",
    "the set of their names": "test_placeholders.py::test_placeholders_are_listed_like_members_of_an_enum",
    "the value of a placeholder, as an expression": "test_placeholders.py::test_a_placeholder_has_its_computed_value",
    "an expression has the name of its placeholder": "test_placeholders.py::"
    "test_expressions_have_the_name_of_their_first_placeholder",
    "placeholders in a partial are replaced": "test_placeholders.py::"
    "test_placeholders_are_found_wherever_they_are_nested",
    "what is no partial is returned as it is": "test_placeholders.py::"
    "test_values_without_placeholders_are_returned_unchanged",
    "a stand-in for the trainer": "test_placeholders.py::test_placeholders_work_with_names_of_the_ancestor",
    "settings that depend on the run are given before it": "test_placeholders.py::"
    "test_counts_of_updates_in_schedules_are_those_really_made",
    "`set_epoch` of a sampler is called": "test_consistency.py::"
    "test_set_epoch_of_every_data_source_is_called_with_0_and_1",
    "a model that is not in training mode is noticed": "test_modes.py::"
    "test_evaluation_mode_left_by_a_step_ends_with_it",
    "evaluation every n epochs": "test_evaluation.py::test_evaluation_after_every_nth_epoch_and_the_last",
}
#: Rows without a test: what is left out on purpose, and what only a GPU shows.
UNTRIED = {
    "a copy of pytorch-accelerated's own `Trainer` class",
    "a state without the model",
    "copies that do not block",
    "pinned memory",
}


def rows_of_the_page() -> list[str]:
    return [name for name, _, _ in cells()]


def cells() -> list[tuple[str, str, str]]:
    lines = [line.strip("| ").split(" | ", 2) for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [(name, here, how) for name, here, how in lines if here != "here"]


def test_each_row_of_the_page_is_tested_once():
    named = [*TRIED, *HELD, *UNTRIED]
    assert sorted(named) == sorted(rows_of_the_page())
    assert len(set(named)) == len(named)
    assert len(TRIED) > 150


def test_each_row_says_how_the_package_does_it():
    assert {here for _, here, _ in cells()} == {"yes", "another way", "no"}
    assert all(how for _, _, how in cells())


def test_the_tests_named_for_rows_exist():
    files: dict[str, str] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        files[path.name] = files.get(path.name, "") + path.read_text()
    is_whole = all((ROOT / "tests" / "extensions" / name).exists() for name in OFFERED)  # none has been deleted
    for held in HELD.values():
        file, name = held.split("::")
        if file in files or is_whole:
            assert re.search(rf"^def {name}\(", files[file], re.MULTILINE), held


def test_the_sections_that_are_linked_exist():
    for target, anchor in re.findall(r"\]\((\w+\.md)#([\w-]+)\)", PAGE.read_text()):
        headings = re.findall(r"^#+ (.*)$", (PAGE.parent / target).read_text(), re.MULTILINE)
        assert anchor in {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}, anchor


# ------------------------------------------------------------------------------------- a run that many look at


class Noted(Trainer):
    """Records the calls of its methods, and some of their arguments."""

    calls: Any = None
    seen: Any = None

    def calculate_train_batch_loss(self, batch):
        return super().calculate_train_batch_loss(batch) | {"mine": 7}

    def calculate_eval_batch_loss(self, batch):
        output = super().calculate_eval_batch_loss(batch)
        self.seen["needs gradients"] = output["loss"].requires_grad
        return output

    def train_epoch_end(self):
        self.seen["recorded before"] = "train_loss_epoch" in self.run_history.get_metric_names()


METHODS = [
    "training_run_start",
    "train_epoch_start",
    "calculate_train_batch_loss",
    "backward_step",
    "optimizer_step",
    "scheduler_step",
    "optimizer_zero_grad",
    "train_epoch_end",
    "eval_epoch_start",
    "calculate_eval_batch_loss",
    "eval_epoch_end",
    "training_run_epoch_end",
    "training_run_end",
    "evaluation_run_start",
    "evaluation_run_end",
]


def noted(name: str) -> Callable[..., Any]:
    def method(self: Trainer, *args: Any) -> Any:
        self.calls.append(name)  # type: ignore[attr-defined]
        return getattr(Noted, name)(self, *args)

    return method


Follows = type("Follows", (Noted,), {name: noted(name) for name in METHODS})


def note_event(event: str) -> Callable[..., None]:
    def note(trainer: Any, **kwargs: Any) -> None:
        if trainer.calls is None:
            trainer.calls, trainer.seen = [], {}
        trainer.calls.append(event)
        trainer.seen[event] = kwargs
        if event == "on_training_run_epoch_end":
            trainer.seen.setdefault("epochs", []).append(trainer.run_history.current_epoch)
        if event == "on_train_epoch_end":
            trainer.seen["mean"] = trainer._loss_tracker.average

    return note


def run_noted() -> Any:
    trainer = make_trainer([listener(**{event: note_event(event) for event in EVENTS})], trainer_class=Follows)
    schedule = {"create_scheduler_fn": partial(StepLR, step_size=100)}
    return train(trainer, 2, eval_dataset=True, gradient_accumulation_steps=2, **schedule)


@pytest.fixture(scope="module")
def ran() -> Any:
    """A run of two epochs of three batches, which accumulates two, with an evaluation and a schedule."""
    return run_noted()


@pytest.fixture(scope="module")
def evaluated() -> Any:
    """A run like ``ran``, evaluated afterwards: the calls, the settings before the evaluation, and its metrics."""
    trainer = run_noted()
    config, calls = trainer.run_config, len(trainer.calls)
    metrics = trainer.evaluate(make_data(), 2)
    return SimpleNamespace(trainer=trainer, calls=trainer.calls[calls:], config=config, metrics=metrics)


@contextmanager
def said(match: str) -> Iterator[None]:
    with pytest.warns(UserWarning, match=match):
        yield


# -------------------------------------------------------------------------------- pytorch-accelerated: names


@pytest.mark.extension("progress_bar")
@row(
    "imports from `callbacks`",
    "import from `run_config`",
    "imports from `tracking`",
    "imports from `trainer`",
    "placeholders from the package itself",
)
def test_names_are_imported_from_the_files_that_had_them():
    from pytorch_accel_lite import TrainerPlaceholderValues as OfPackage
    from pytorch_accel_lite import run_config, tracking
    from pytorch_accel_lite import trainer as module

    named = "CallbackHandler TrainerCallback StopTrainingError TerminateOnNaNCallback LogMetricsCallback"
    named += " PrintProgressCallback ProgressBarCallback MoveModulesToDeviceCallback"
    assert all(hasattr(shipped, name) for name in named.split())
    assert run_config.TrainerRunConfig is TrainerRunConfig
    assert (tracking.RunHistory, tracking.InMemoryRunHistory) == (RunHistory, InMemoryRunHistory)
    assert tracking.LossTracker is LossTracker
    assert (module.Trainer, module.TrainerWithTimmScheduler) == (Trainer, TrainerWithTimmScheduler)
    assert module.TrainerPlaceholderValues is OfPackage


@row("five positional arguments", "the same by keyword", "callbacks as classes or instances")
def test_a_trainer_takes_its_arguments_by_position_and_keyword():
    model, loss, history = make_model(), nn.MSELoss(), InMemoryRunHistory()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    callbacks = [TerminateOnNaNCallback, EarlyStoppingCallback(2)]
    for trainer in (
        Trainer(model, loss, optimizer, callbacks, history),
        Trainer(model, loss_func=loss, optimizer=optimizer, callbacks=callbacks, run_history=history),
    ):
        assert (trainer.model, trainer.loss_func, trainer.run_history) == (model, loss, history)
        assert [type(callback) for callback in trainer.callbacks] == [TerminateOnNaNCallback, EarlyStoppingCallback]


@row("attributes that are `None` until a run", "attributes that exist at once", "the device")
def test_a_trainer_has_its_attributes_before_a_run():
    trainer: Any = make_trainer()
    names = "run_config train_dataset eval_dataset _train_dataloader _eval_dataloader scheduler collate_fn"
    names += " _train_dl_kwargs _eval_dl_kwargs create_scheduler_fn"
    assert [getattr(trainer, name) for name in names.split()] == [None] * 10
    assert isinstance(trainer._accelerator, Accelerator)
    assert isinstance(trainer._loss_tracker, LossTracker)
    assert isinstance(trainer.callback_handler, CallbackHandler)
    assert isinstance(trainer.run_history, RunHistory)
    assert trainer.device == torch.device("cpu")


@row("an event at the end of the constructor")
def test_the_first_event_is_the_end_of_the_constructor(ran):
    assert ran.calls[0] == "on_init_end"


@row("an accelerator of your own, by a method", "the trainer wraps an accelerator, which prepares the rest")
def test_an_accelerator_may_be_created_by_a_method():
    own = Accelerator(cpu=True)
    trainer = make_trainer(trainer_class=type("Other", (Trainer,), {"_create_accelerator": lambda self: own}))
    assert trainer.accelerator is trainer._accelerator is own
    inside: list[Any] = []
    trainer.callback_handler.add_callback(listener(on_train_step_start=lambda trainer: inside.append(trainer)))
    assert train(trainer).accelerator.device == inside[0].device


@row(
    "a history whose values a callback adds to",
    "names, values and the latest value of a metric",
    "the number of the epoch, from 1",
)
def test_a_history_takes_values_and_counts_epochs_from_1():
    epochs: list[int] = []

    def add(trainer: Trainer) -> None:
        epochs.append(trainer.run_history.current_epoch)
        trainer.run_history.update_metric("mine", len(epochs) / 2)

    history = train(make_trainer([listener(on_train_epoch_end=add)]), 2).run_history
    assert history.get_metric_names() == {"train_loss_epoch", "mine"}
    assert list(history.get_metric_values("mine")) == [0.5, 1.0]
    assert history.get_latest_metric("mine") == 1.0
    assert epochs == [1, 2]


@row("the mean loss of the epoch in its last event")
def test_the_last_event_of_an_epoch_has_its_mean_loss(ran):
    assert ran.seen["mean"] == pytest.approx(ran.run_history.get_latest_metric("train_loss_epoch"))


# ---------------------------------------------------------------------------- pytorch-accelerated: callbacks


@row("five callbacks by default")
@pytest.mark.extension("advice", "progress_table")
def test_a_trainer_has_five_callbacks_by_default():
    names = [callback.__name__.removesuffix("Callback") for callback in DEFAULT_CALLBACKS]
    assert names == ["MoveModulesToDevice", "TerminateOnNaN", "ProgressTable", "ProgressBar", "Advice"]


@row("modules of the trainer are moved to the device, but not the model", "they are moved for an evaluation, too")
def test_modules_of_a_trainer_are_moved_to_the_device():
    class Wrapped(nn.Linear):
        moved = 0

        def to(self, *args, **kwargs):
            self.moved += 1
            return super().to(*args, **kwargs)

    trainer: Any = make_trainer([MoveModulesToDeviceCallback])
    trainer.teacher = Wrapped(2, 2)
    train(trainer)
    assert trainer.teacher.moved == 1
    trainer.evaluate(make_data())
    assert trainer.teacher.moved == 2


@row(
    "lines at the start and end of runs and epochs",
    "new metrics are printed",
    "your own way to log metrics",
    "printed epochs in a second run",
)
def test_runs_and_epochs_print_their_lines(capsys):
    logged: list[set[str]] = []

    class Own(LogMetricsCallback):
        def log_metrics(self, trainer, metrics):
            logged.append(set(metrics))

    trainer = train(make_trainer([PrintProgressCallback, LogMetricsCallback, Own]), 2, eval_dataset=True)
    lines = capsys.readouterr().out.split("\n")
    assert lines[:2] == ["Starting training run", "Starting epoch 1/2"]
    assert "Finishing training run" in lines
    assert any(line.strip().startswith("eval_loss_epoch: ") for line in lines)
    trainer.evaluate(make_data())
    assert "Finishing evaluation run\n  evaluation_loss: " in capsys.readouterr().out
    assert logged == [{"train_loss_epoch"}, {"eval_loss_epoch"}] * 2 + [{"evaluation_loss"}]
    train(trainer, 3, reset_run_history=False)
    assert re.findall(r"Starting epoch (\S+)", capsys.readouterr().out) == ["1/3", "2/3", "3/3"]
    assert trainer.run_history.current_epoch == 6


@pytest.mark.extension("progress_bar")
@row("a bar", "progress that can be turned off")
def test_the_progress_bar_can_be_turned_off():
    from pytorch_accel_lite.callbacks import ProgressBarCallback

    assert ProgressBarCallback in get_default_callbacks()
    assert ProgressBarCallback not in get_default_callbacks(progress_bar=False)
    assert train(make_trainer([ProgressBarCallback])).progress.update == 3


@row(
    "early stopping by position and keyword",
    "patience of early stopping",
    "an absolute threshold",
    "a threshold as a part of the best value",
    "metrics decide when to stop",
)
def test_early_stopping_takes_a_patience_and_a_threshold():
    def epochs(values: list[float], *args: Any, **kwargs: Any) -> int:
        left = iter(values)
        record = listener(on_train_epoch_end=lambda trainer: trainer.run_history.update_metric("mine", next(left)))
        stop = EarlyStoppingCallback(*args, watch_metric="mine", greater_is_better=False, **kwargs)
        return train(make_trainer([record, stop]), len(values)).progress.epoch

    assert epochs([1.0] * 5, 2) == epochs([1.0] * 5, early_stopping_patience=2) == 3
    assert epochs([9.0, 8.8, 8.0], 1, 0.3) == 2
    assert epochs([9.0, 8.8, 8.0], 1, 0.1) == 3
    assert epochs([9.0, 8.8, 8.0], 1, 0.1, threshold_mode="relative") == 2


@row("the best model by a metric that should grow", "the best n models by several metrics")
def test_the_best_models_are_kept(tmp_path):
    values = iter([1.0, 3.0, 2.0])
    seen: list[Any] = []

    def record(trainer: Trainer) -> None:
        trainer.run_history.update_metric("accuracy", next(values))
        seen.append(weights(trainer.model))

    best = SaveBestModelCallback(tmp_path / "best.pt", "accuracy", greater_is_better=True)
    other = SaveBestModelCallback(tmp_path / "other.pt", "train_loss_epoch", keep=2, load_saved_checkpoint=False)
    trainer = train(make_trainer([listener(on_train_epoch_end=record), best, other]), 3)
    assert equal_weights(weights(trainer.model), seen[1])
    assert len(other.find_saved()) == 2


@row(
    "order of the events of `train`",
    "a method for the schedule, called only if there is one",
    "every part of a step can be overridden",
    "methods at the start and end of a run",
)
def test_methods_and_events_of_a_run_are_in_order(ran):
    assert {*METHODS} - {"evaluation_run_start", "evaluation_run_end"} <= {*ran.calls}
    step = ["on_train_step_start", "calculate_train_batch_loss", "on_backward_start", "backward_step"]
    epoch = ran.calls[ran.calls.index("train_epoch_start") : ran.calls.index("training_run_epoch_end")]
    assert epoch[:3] == ["train_epoch_start", "on_train_epoch_start", "on_train_step_start"]
    assert epoch[2:6] == step
    assert epoch.index("optimizer_step") < epoch.index("scheduler_step") < epoch.index("optimizer_zero_grad")
    assert epoch.count("scheduler_step") == epoch.count("optimizer_step") == 2
    assert ran.calls.index("training_run_start") < ran.calls.index("on_training_run_start")
    assert ran.calls.index("training_run_end") < ran.calls.index("on_training_run_end")
    without = make_trainer(trainer_class=type("Plain", (Trainer,), {"scheduler_step": lambda self: 1 / 0}))
    with pytest.raises(ZeroDivisionError):
        train(without, create_scheduler_fn=partial(StepLR, step_size=1))


@row("order of the events of `evaluate`", "methods around `evaluate`", "the metric of `evaluate`")
def test_methods_and_events_of_an_evaluation_are_in_order(evaluated):
    steps = ["on_eval_step_start", "calculate_eval_batch_loss", "on_eval_step_end"] * 3
    start = ["evaluation_run_start", "on_evaluation_run_start", "eval_epoch_start", "on_eval_epoch_start"]
    end = ["eval_epoch_end", "on_eval_epoch_end", "evaluation_run_end", "on_evaluation_run_end"]
    own = [name for name in evaluated.calls if name != "on_dataloaders_created"]
    assert own == [*start, *steps, *end]
    assert evaluated.metrics.keys() == {"evaluation_loss"}


@row(
    "events carry the batch and what the step returned",
    "keys that a step adds to its result reach callbacks",
    "a hook that gets outputs, labels and loss",
    "a method that computes the loss of a batch",
)
def test_events_carry_the_batch_and_the_output_of_the_step(ran):
    carried = ran.seen["on_train_step_end"]
    inputs, targets = carried["batch"]
    output = carried["batch_output"]
    assert (inputs.shape, targets.shape, output["model_outputs"].shape) == ((2, 4), (2, 1), (2, 1))
    assert (output["mine"], output["batch_size"]) == (7, 2)


@row("callbacks see the divided loss", "a method for the backward pass gets the divided loss")
def test_a_backward_pass_gets_the_divided_loss():
    divided: list[float] = []
    whole: list[float] = []

    class Divided(Trainer):
        def backward_step(self, loss):
            divided.append(loss.item())
            super().backward_step(loss)

    note = listener(on_train_step_end=lambda trainer, batch_output, **kwargs: whole.append(batch_output["loss"].item()))
    train(make_trainer([note], trainer_class=Divided), size=4, gradient_accumulation_steps=2)
    assert divided == pytest.approx([loss / 2 for loss in whole])


@row("a callback that changes the loss before the backward pass")
def test_a_callback_may_change_the_loss_before_the_backward_pass():
    def double(trainer: Trainer, batch_output: Any, **kwargs: Any) -> None:
        batch_output["loss"] = batch_output["loss"] * 0

    trainer = make_trainer([listener(on_backward_start=double)])
    before = weights(trainer.model)
    assert equal_weights(weights(train(trainer).model), before)
    with pytest.raises(RuntimeError, match="Change it in on_backward_start"):
        train(make_trainer([listener(on_train_step_end=double)]))


@row("an event of your own", "a handler calls callbacks, also with your own events")
def test_handlers_and_trainers_call_own_events():
    heard: list[int] = []
    trainer = make_trainer([listener(on_mine=lambda trainer, **kwargs: heard.append(kwargs["x"]))])
    trainer.callback_handler.call_event("on_mine", trainer, x=1)
    trainer.call_event("on_mine", x=2)
    assert heard == [1, 2]


@row("a callback stops the run", "a callback stops an evaluation")
def test_a_callback_stops_a_run_or_an_evaluation(capsys):
    def stop(trainer: Trainer, **kwargs: Any) -> None:
        raise StopTrainingError("enough")

    heard: list[str] = []
    note = {name: partial(lambda name, trainer: heard.append(name), name) for name in ("on_stop_training_error",)}
    for event, call in (
        ("on_train_step_end", lambda trainer: train(trainer, 2)),
        ("on_eval_step_end", lambda trainer: trainer.evaluate(make_data())),
    ):
        trainer = make_trainer([listener(**{event: stop}), listener(**note)])
        call(trainer)
        assert (trainer.stop_reason, trainer.progress.update) == ("enough", int(event == "on_train_step_end"))
        assert "enough" in capsys.readouterr().out
    assert heard == ["on_stop_training_error"] * 2


@row("`on_training_run_epoch_end` sees the epoch that has ended")
def test_the_last_event_of_an_epoch_sees_the_epoch_that_ended(ran):
    assert ran.seen["epochs"] == [1, 2]
    assert ran.run_history.current_epoch == 3


# ------------------------------------------------------------------------- pytorch-accelerated: step methods


@row("a method that sets the mode for training", "a method that sets the mode for evaluation")
def test_overridden_methods_set_the_mode():
    modes: list[bool] = []
    note = listener(
        on_train_step_end=lambda trainer, **kwargs: modes.append(trainer.model.training),
        on_eval_step_end=lambda trainer, **kwargs: modes.append(trainer.model.training),
    )
    train(make_trainer([note]), size=2, eval_dataset=True)
    assert modes == [True, False]
    own = {"train_epoch_start": lambda self: self.model.eval(), "eval_epoch_start": lambda self: self.model.train()}
    train(make_trainer([note], trainer_class=type("Own", (Trainer,), own)), size=2, eval_dataset=True)
    assert modes[2:] == [False, True]


@row("the method is replaced as a whole")
def test_an_overridden_method_computes_the_loss_of_a_batch():
    class Own(Trainer):
        def calculate_train_batch_loss(self, batch):
            outputs = self.model(batch[0])
            return {"loss": (outputs - 1).square().mean(), "model_outputs": outputs, "batch_size": len(outputs)}

    assert train(make_trainer(trainer_class=Own, loss_func=None)).progress.update == 3


@row(
    "a method for the update",
    "a method that clears gradients",
    "a method before the losses of an epoch are recorded",
    "a method for evaluation batches, without gradients",
    "a method at the end of an evaluation",
    "a method at the end of an epoch",
)
def test_methods_of_an_epoch_are_called_in_their_places(ran):
    counts = {name: ran.calls.count(name) for name in METHODS}
    assert counts["optimizer_step"] == counts["optimizer_zero_grad"] == 4
    assert counts["calculate_eval_batch_loss"] == 6
    assert counts["eval_epoch_end"] == counts["training_run_epoch_end"] == counts["train_epoch_end"] == 2
    assert ran.seen["needs gradients"] is False
    assert ran.calls.index("train_epoch_end") < ran.calls.index("on_train_epoch_end")
    early: list[int] = []

    class Early(Trainer):
        def train_epoch_end(self):
            early.append(len(self.run_history.get_metric_names()))

    train(make_trainer(trainer_class=Early))
    assert early == [0]


@row("it may be empty in a timm trainer", "schedules of timm", "the number of updates of a timm trainer")
def test_a_timm_trainer_steps_the_schedules_of_timm():
    scheduler = pytest.importorskip("timm.scheduler")
    create = partial(scheduler.CosineLRScheduler, t_initial=4, lr_min=0.01)
    empty = type("Empty", (TrainerWithTimmScheduler,), {"training_run_epoch_end": lambda self: None})
    for kind in (TrainerWithTimmScheduler, empty):
        trainer: Any = train(make_trainer(trainer_class=kind), 4, create_scheduler_fn=create)
        assert trainer.num_updates == 12
        assert trainer.optimizer.param_groups[0]["lr"] == 0.01


# ------------------------------------------------------------------------------- pytorch-accelerated: loaders


@row(
    "a loader of training batches of your own",
    "a loader of evaluation batches of your own",
    "your arguments win over the defaults",
    "the arguments of the last loaders",
    "the device of the loader in the first event",
)
def test_overridden_methods_create_the_loaders():
    asked: list[tuple[int, Any]] = []
    devices: list[Any] = []

    class Own(Trainer):
        def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
            asked.append((batch_size, train_dl_kwargs))
            return DataLoader(self.train_dataset, batch_size=3)

        def create_eval_dataloader(self, batch_size, eval_dl_kwargs=None):
            asked.append((batch_size, eval_dl_kwargs))
            return DataLoader(self.eval_dataset, batch_size=1)

    note = listener(on_training_run_start=lambda trainer: devices.append(trainer._eval_dataloader.device))
    trainer = train(make_trainer([note], trainer_class=Own), eval_dataset=True)
    assert (trainer.progress.update, len(trainer.eval_dataloader)) == (2, 6)
    assert asked == [(2, {"shuffle": False}), (2, None)]
    assert devices == [torch.device("cpu")]
    trainer = train(make_trainer(), train_dataloader_kwargs={"batch_size": 3})
    assert trainer.progress.update == 2
    assert trainer._train_dl_kwargs["batch_size"] == 3


@row("the default arguments of loaders", "one worker per core")
def test_loaders_have_default_arguments():
    trainer: Any = make_trainer()
    trainer.train_dataset = trainer.eval_dataset = make_data()
    found = trainer.get_default_train_dl_kwargs(2), trainer.get_default_eval_dl_kwargs(2)
    assert [kwargs["shuffle"] for kwargs in found] == [True, False]
    assert found[0] | {"shuffle": False} == found[1]
    assert found[1].items() >= {"batch_size": 2, "shuffle": False, "pin_memory": False, "num_workers": 0}.items()


# ---------------------------------------------------------- pytorch-accelerated: train, evaluate and settings


@row("the twelve arguments of `train`, in order", "batches of 8 by default", "accumulation of gradients")
def test_train_accepts_positional_arguments():
    def create(optimizer: Any) -> Any:
        return StepLR(optimizer, 1)

    arguments = (make_data(), 2, make_data(), 2, None, 3, 1.0, create, {"shuffle": False}, {"batch_size": 3}, True)
    trainer = make_trainer()
    trainer.train(*arguments, torch.utils.data.default_collate)
    config = trainer.run_config
    assert (config.num_epochs, config.gradient_accumulation_steps, config.gradient_clip_value) == (2, 3, 1.0)
    assert (config.eval_per_device_batch_size, trainer.progress.update) == (3, 2)
    assert trainer.collate_fn is torch.utils.data.default_collate
    trainer.train(make_data(), 1)
    assert trainer.run_config.train_per_device_batch_size == 8


@row(
    "a limit of updates decides the number of epochs",
    "a limit of steps ends within an epoch",
    "clipping by value",
    "clipping by norm",
)
def test_a_limit_of_updates_ends_a_run_and_gradients_are_clipped():
    trainer = train(make_trainer(), 1, max_num_train_steps=4)
    assert (trainer.progress.update, trainer.run_config.num_epochs, trainer.progress.step) == (4, 2, 1)
    largest: list[float] = []

    def note(trainer: Trainer) -> None:
        gradients = [p.grad for p in trainer.model.parameters()]
        largest.append(max(g.abs().max().item() for g in gradients))
        largest.append(torch.cat([g.flatten() for g in gradients]).norm().item())

    for option in ({"gradient_clip_value": 1e-3}, {"gradient_clip_norm": 1e-3}):
        train(make_trainer([listener(on_optimizer_step_start=note)]), size=2, **option)
    assert largest[0] == pytest.approx(1e-3)
    assert largest[3] == pytest.approx(1e-3, rel=1e-3)


@row(
    "a collate function",
    "several runs of one trainer, with one history",
    "the four arguments of `evaluate`",
    "`evaluate` clears the history",
)
def test_runs_of_one_trainer_collate_and_share_a_history():
    sizes: list[int] = []

    def collate(samples: Any) -> Any:
        sizes.append(len(samples))
        return torch.utils.data.default_collate(samples)

    data = [make_data()[i] for i in range(6)]
    here = {"num_workers": 0}
    trainer = train(make_trainer(), train_dataset=data, train_dataloader_kwargs=here, collate_fn=collate)
    assert sizes == [2, 2, 2]
    trainer.evaluate(data, 3, here, collate)
    assert sizes[3:] == [3, 3]
    assert len(trainer.run_history.get_metric_values("train_loss_epoch")) == 1
    train(trainer, reset_run_history=False)
    assert len(trainer.run_history.get_metric_values("train_loss_epoch")) == 2
    train(trainer)
    assert len(trainer.run_history.get_metric_values("train_loss_epoch")) == 1


@row("`evaluate` keeps the settings of the training", "settings of an evaluation alone")
def test_an_evaluation_keeps_the_settings_of_the_training(evaluated):
    assert evaluated.trainer.run_config is evaluated.config
    assert evaluated.config.num_update_steps_per_epoch == 2
    trainer = make_trainer()
    trainer.evaluate(make_data(), 3)
    assert trainer.run_config.num_update_steps_per_epoch == 0
    assert trainer.run_config.eval_per_device_batch_size == 3


FIELDS = [
    "num_epochs",
    "train_per_device_batch_size",
    "train_dl_kwargs",
    "eval_per_device_batch_size",
    "eval_dl_kwargs",
    "gradient_accumulation_steps",
    "gradient_clip_value",
    "train_total_batch_size",
    "eval_total_batch_size",
    "num_update_steps_per_epoch",
    "max_num_train_steps",
    "is_local_process_zero",
    "is_world_process_zero",
    "is_distributed",
    "mixed_precision",
]


@row("the fifteen fields and their values", "batch size of evaluations")
def test_the_settings_of_a_run_have_its_values(ran):
    config = ran.run_config
    values = {name: getattr(config, name) for name in FIELDS if not name.endswith("kwargs")}
    assert list(values.values()) == [2, 2, 2, 2, None, 4, 2, 2, 4, True, True, False, "no"]
    assert config.train_dl_kwargs["batch_size"] == 2


@row("settings by a method")
def test_an_overridden_method_creates_the_settings():
    asked: list[Any] = []

    class Own(Trainer):
        def _create_run_config(self, per_device_batch_size, **asked_for):
            asked.append((per_device_batch_size, set(asked_for)))
            return super()._create_run_config(per_device_batch_size, **asked_for)

    train(make_trainer(trainer_class=Own))
    names = "num_epochs gradient_accumulation_steps max_num_train_steps gradient_clip_value"
    assert asked[0][0] == 2
    assert {*names.split()} <= asked[0][1]


@row("the metrics of a run", "losses are weighed by the size of batches")
def test_metrics_of_a_run_weigh_batches_by_their_size(ran):
    assert ran.run_history.to_dict().keys() == {"train_loss_epoch", "eval_loss_epoch"}
    losses: list[float] = []
    note = listener(on_eval_step_end=lambda trainer, batch_output, **kwargs: losses.append(batch_output["loss"].item()))
    found = make_trainer([note]).evaluate(make_data(3), 2)["evaluation_loss"]
    assert found == pytest.approx((2 * losses[0] + losses[1]) / 3)


# ----------------------------------------------------------------- pytorch-accelerated: loops and placeholders


class OwnLoop(Trainer):
    """Runs as a subclass written for pytorch-accelerated does."""

    def _run_training(self):
        for _ in range(self.run_config.num_epochs):
            self._run_train_epoch(self._train_dataloader)
            if self._eval_dataloader is not None:
                self._run_eval_epoch(self._eval_dataloader)
            self.training_run_epoch_end()
            self.callback_handler.call_event("on_training_run_epoch_end", self)
            self.run_history._increment_epoch()


class OwnEpoch(Trainer):
    """A trainer that replaces the loop over the batches of an epoch."""

    def _run_train_epoch(self, train_dl):
        self.model.train()
        for batch in train_dl:
            self.calculate_train_batch_loss(batch)["loss"].backward()
            self.optimizer_step()
            self.optimizer_zero_grad()


class OwnEvaluation(Trainer):
    """Takes no newer arguments."""

    def _run_eval_epoch(self, valid_dl, is_training=True):
        super()._run_eval_epoch(valid_dl, is_training)


@row(
    "a `_run_training` with the body from there",
    "a `_run_train_epoch` with a loop of its own",
    "a `_run_eval_epoch(valid_dl, is_training=True)`",
)
def test_overridden_loops_train_to_the_same_bits():
    plain = train(make_trainer(), 2, eval_dataset=True)
    for kind in (OwnLoop, OwnEpoch, OwnEvaluation):
        own = train(make_trainer(trainer_class=kind), 2, eval_dataset=True)
        assert equal_weights(weights(own.model), weights(plain.model))
        assert own.run_history.get_metric_values("eval_loss_epoch") == plain.run_history.get_metric_values(
            "eval_loss_epoch"
        )


@row(
    "a factory of the schedule gets the optimizer",
    "a method makes the schedule",
    "schedules are stepped per update",
    "a one-cycle schedule with placeholders",
    "a factor for fine-tuning rates",
    "schedule, metrics, saving and evaluation as parts",
)
def test_schedules_are_created_by_factories_and_methods():
    rates: list[float] = []
    note = listener(on_train_epoch_end=lambda trainer: rates.append(trainer.optimizer.param_groups[0]["lr"]))
    create = partial(StepLR, step_size=P.NUM_UPDATE_STEPS_PER_EPOCH * 2)
    train(make_trainer([note]), 4, create_scheduler_fn=create)
    assert rates == pytest.approx([0.1, 0.01, 0.01, 0.001])
    own = {"create_scheduler": lambda self: StepLR(self.optimizer, step_size=3)}
    trainer = train(make_trainer(trainer_class=type("Own", (Trainer,), own)))
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    cycle = partial(OneCycleLR, max_lr=0.1, epochs=P.NUM_EPOCHS, steps_per_epoch=P.NUM_UPDATE_STEPS_PER_EPOCH)
    assert train(make_trainer(), 2, create_scheduler_fn=cycle).scheduler.total_steps == 6
    train(make_trainer([note]), create_scheduler_fn=partial(LambdaLR, lr_lambda=lambda update: 0.1))
    assert rates[4:] == pytest.approx([0.01])


# ------------------------------------------------------------------------------- pytorch-accelerated: saving


@row(
    "a checkpoint holds weights, optimizer and what you add",
    "a checkpoint without the optimizer",
    "weights and optimizer are loaded",
    "only weights are loaded",
    "loading an optimizer that is not there is an error",
)
def test_a_checkpoint_holds_weights_optimizer_and_additions(tmp_path):
    model = make_model()
    trainer = train(make_trainer(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1)))
    trainer.save_checkpoint(tmp_path / "all.pt", {"mine": 1})
    assert {"model_state_dict", "optimizer_state_dict", "mine"} <= torch.load(tmp_path / "all.pt").keys()
    trainer.save_checkpoint(tmp_path / "weights.pt", save_optimizer=False)
    assert "optimizer_state_dict" not in torch.load(tmp_path / "weights.pt")
    other = make_model(seed=1)
    second = make_trainer(model=other, optimizer=torch.optim.AdamW(other.parameters(), lr=0.5))
    second.load_checkpoint(tmp_path / "all.pt", load_optimizer=False)
    assert equal_weights(weights(other), weights(model))
    assert second.optimizer.param_groups[0]["lr"] == 0.5
    second.load_checkpoint(tmp_path / "all.pt")
    assert second.optimizer.param_groups[0]["lr"] == 0.1
    with pytest.raises(ValueError, match=r"the trainer has no optimizer. Pass load_optimizer=False"):
        make_trainer(optimizer=None).load_checkpoint(tmp_path / "all.pt")


@row("tensors of all processes, nested", "printing once per machine")
def test_nested_tensors_are_gathered_and_text_is_printed_once(ran, capsys):
    nested = ran.gather({"a": (torch.ones(2), torch.zeros(1))})
    assert torch.equal(nested["a"][0], torch.ones(2))
    ran.print("once")
    assert capsys.readouterr().out == "once\n"


# -------------------------------------------------------------------------------------------------- fastNLP


class TakesX(nn.Module):
    """Names its input."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x)


def dicts(**more: Any) -> list[dict[str, Any]]:
    return [{"x": x, "label": y, **more} for x, y in make_data()]


HERE = {"num_workers": 0, "shuffle": False}


@row(
    "`setup` moves the model to its device",
    "the device of the model",
    "the index of a process on its machine",
    "the model without wrappers",
    "asking whether there are several processes",
    "training, with updates",
    "validation, with its loss",
)
def test_a_trainer_tells_of_its_device_and_processes(ran):
    model = ran.get_model()
    assert {parameter.device for parameter in model.parameters()} == {ran.device}
    assert model is ran.model
    assert ran.accelerator.local_process_index == 0
    assert ran.ranks.world_size == 1
    assert ran.run_config.is_distributed is False
    assert ran.progress.update == 4
    assert len(ran.run_history.get_metric_values("eval_loss_epoch")) == 2


@row("batches on another device than the model", "batches are moved to the device, nested in any way")
def test_nested_batches_are_moved_to_the_device():
    from accelerate.utils import send_to_device

    seen: list[Any] = []

    class Placed(Trainer):
        def calculate_train_batch_loss(self, batch):
            seen.append(batch)
            inputs, targets = send_to_device((batch["in"]["x"][0], batch["y"]), torch.device("cpu"))
            return super().calculate_train_batch_loss((inputs, targets))

    nested = [{"in": {"x": [x]}, "y": y} for x, y in make_data()]
    train(make_trainer(trainer_class=Placed), train_dataset=nested, train_dataloader_kwargs=HERE)
    assert seen[0]["in"]["x"][0].device.type == "cpu"


@row("a model that is wrapped in `DataParallel`")
def test_a_model_in_data_parallel_trains_to_the_same_bits():
    plain, wrapped = make_model(), nn.DataParallel(make_model())
    train(make_trainer(model=wrapped))
    assert equal_weights(weights(train(make_trainer(model=plain)).model), weights(wrapped.module))


@row("one mode for the whole model")
def test_an_overridden_start_of_an_epoch_sets_one_mode():
    modes: list[bool] = []
    fixed = type("Fixed", (Trainer,), {"train_epoch_start": lambda self: self.model.eval()})
    train(
        make_trainer(
            [listener(on_train_step_end=lambda trainer, **kwargs: modes.append(trainer.model.training))],
            trainer_class=fixed,
        )
    )
    assert modes == [False] * 3


@row("arguments of `forward` by the keys of a batch", "keys that `forward` does not take", "keys for your own loss")
def test_keys_of_a_batch_are_arguments_of_forward():
    trained = [make_trainer(model=TakesX()) for _ in range(2)]
    train(trained[0], train_dataset=dicts(), train_dataloader_kwargs=HERE)
    with said("takes no argument named 'id': ignored"):
        train(trained[1], train_dataset=dicts(id=3), train_dataloader_kwargs=HERE)
    assert equal_weights(weights(trained[0].model), weights(trained[1].model))
    passed: list[set[str]] = []

    def loss(outputs: Any, targets: Any) -> Any:
        passed.append(set(targets))
        return (outputs - targets["label"]).square().mean()

    train(make_trainer(model=TakesX(), loss_func=loss), train_dataset=dicts(id=3), train_dataloader_kwargs=HERE)
    assert passed[0] == {"label", "id"}


@row("`train_step` and `evaluate_step` of the model", "a model that returns its losses as a dict")
def test_a_step_of_the_model_may_return_several_losses():
    class HasSteps(nn.Linear):
        def train_step(self, batch):
            return {"fit": (self(batch[0]) - batch[1]).square().mean(), "size": self.weight.square().sum()}

    class Uses(Trainer):
        def calculate_train_batch_loss(self, batch):
            return {"loss": self.model.train_step(batch)}

    history = train(make_trainer(model=HasSteps(4, 1), trainer_class=Uses, loss_func=None)).run_history
    assert history.get_metric_names() >= {"train_loss_epoch", "train_fit_epoch", "train_size_epoch"}


@row(
    "one optimizer or several",
    "what is no optimizer is refused",
    "several optimizers with parameters of their own",
    "an optimizer with a step of its own",
)
def test_a_trainer_takes_one_optimizer_or_several():
    model: Any = make_model()
    first, last = (torch.optim.SGD(model[part].parameters(), lr=0.1) for part in (0, 2))
    assert train(make_trainer(model=model, optimizer={"body": first, "head": last})).progress.update == 3
    assert train(make_trainer(model=model, optimizer=[first, last])).progress.update == 3
    with pytest.raises(ValueError, match="the same parameter"):
        make_trainer(model=model, optimizer=[first, torch.optim.SGD(model.parameters(), lr=0.1)])
    with pytest.raises(TypeError, match="optimizer='adam' must be an instance"):
        make_trainer(optimizer="adam")

    class Own(torch.optim.SGD):
        steps = 0

        def step(self, closure=None):
            self.steps += 1
            return super().step(closure)

    own = Own(model.parameters(), lr=0.1)
    train(make_trainer(model=model, optimizer=own))
    assert own.steps == 3


@row(
    "backward pass, update and clearing by methods",
    "gradients that are set to zero, not to `None`",
    "gradients are cleared before the forward pass",
    "a run without updates",
)
def test_overridden_methods_clear_gradients_and_skip_updates(ran):
    assert {"backward_step", "optimizer_step", "optimizer_zero_grad"} <= {*ran.calls}
    zero = {"optimizer_zero_grad": lambda self: self.optimizer.zero_grad(set_to_none=False)}
    trainer = train(make_trainer(trainer_class=type("Zero", (Trainer,), zero)))
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in trainer.model.parameters())

    class ClearsFirst(Trainer):
        def optimizer_zero_grad(self):
            pass

        def calculate_train_batch_loss(self, batch):
            super().optimizer_zero_grad()
            return super().calculate_train_batch_loss(batch)

    trainer = make_trainer(trainer_class=ClearsFirst)
    assert equal_weights(weights(train(trainer).model), weights(train(make_trainer()).model))
    assert all(p.grad is not None for p in trainer.model.parameters())
    trainer = make_trainer([listener(on_optimizer_step_start=lambda trainer: trainer.skip_update())])
    before = weights(trainer.model)
    assert equal_weights(weights(train(trainer).model), before)


@pytest.mark.extension("tuning")
@row("a dry run that only reads data")
def test_diagnose_replaces_a_dry_run():
    trainer = make_trainer()
    before = weights(trainer.model)
    assert "data" in str(trainer.diagnose(make_data(), 2, num_steps=3))
    assert equal_weights(weights(trainer.model), before)


@row("a context for evaluations")
def test_evaluations_record_no_gradients(evaluated):
    assert evaluated.trainer.seen["needs gradients"] is False


class CountsSteps(TrainerCallback):
    """A callback with a state of its own."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def on_train_step_end(self, trainer, **kwargs):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def saving_run(folder: Any, epochs: int, *callbacks: Any, **kwargs: Any) -> Trainer:
    """A shuffled run that saves after every epoch, and keeps the last two states."""
    saver = SaveTrainingStateCallback(folder, save_every_n_epochs=1, max_checkpoints=2)
    return train(make_trainer([*callbacks, saver], seed=0), epochs, train_dataloader_kwargs={}, **kwargs)


@row(
    "the position in the data is saved",
    "a state after every epoch",
    "the last n states",
    "resuming",
    "a run is resumed",
    "resuming when there is no state",
)
def test_a_run_resumes_from_its_last_state_to_the_same_bits(tmp_path, capsys):
    whole = saving_run(tmp_path / "whole", 4)
    saving_run(tmp_path / "states", 3, resume_from="latest")
    assert "No training state" in capsys.readouterr().out
    names = [path.name for path in (tmp_path / "states").glob("update-*")]
    assert sorted(names) == ["update-000000006", "update-000000009"]
    resumed = saving_run(tmp_path / "states", 4, resume_from="latest")
    assert resumed.progress.update == 12
    assert equal_weights(weights(resumed.model), weights(whole.model))


@row(
    "states of hooks are saved and loaded",
    "several hooks of one class have a state each",
    "a state whose hook is missing is warned of",
)
def test_each_callback_resumes_its_own_state(tmp_path):
    saving_run(tmp_path, 1, CountsSteps(), CountsSteps(9))
    resumed = CountsSteps(), CountsSteps()
    saving_run(tmp_path, 2, *resumed, resume_from="latest")
    assert [each.count for each in resumed] == [6, 15]
    with said("state of callback 'CountsSteps', which"), said("state of callback 'CountsSteps#2', which"):
        saving_run(tmp_path, 3, resume_from="latest")


@row("your own states come back when loaded")
def test_own_entries_of_a_state_are_restored(tmp_path):
    train(make_trainer(seed=0)).save_training_state(tmp_path, {"mine": 7})
    assert make_trainer(seed=0).load_training_state(tmp_path)["mine"] == 7


@row("the weights alone", "the whole model as an object", "models are saved and loaded", "a first epoch of your choice")
def test_saved_weights_and_models_are_loaded(tmp_path):
    trainer = train(make_trainer())
    trainer.save_model(tmp_path / "model")
    other = make_trainer(model=make_model(seed=1))
    other.load_checkpoint(tmp_path / "model", load_optimizer=False)
    assert equal_weights(weights(other.model), weights(trainer.model))
    assert train(other, 2).progress.epochs_completed == 2
    torch.save(trainer.get_model(), tmp_path / "module.pt")
    loaded = torch.load(tmp_path / "module.pt", weights_only=False)
    assert equal_weights(weights(loaded), weights(trainer.model))


@row(
    "a tensor as a number",
    "reduced over its elements and processes",
    "the smallest, the largest, the sum",
    "waiting for each other",
    "an object of one process for all",
    "objects of all processes",
)
def test_values_are_exchanged_between_processes(ran):
    pair = torch.tensor([1.0, 3.0])
    assert ran.tensor_to_numeric(pair) == [1.0, 3.0]
    assert ran.tensor_to_numeric(torch.tensor(2.0)) == 2.0
    assert ran.tensor_to_numeric({"a": pair}, reduce="mean") == {"a": 2.0}
    assert [ran.tensor_to_numeric(pair, reduce=kind) for kind in ("min", "max", "sum")] == [1.0, 3.0, 4.0]
    ran.barrier()
    assert ran.broadcast_object({"a": 1}, source=0) == {"a": 1}
    assert ran.all_gather_object("it") == ["it"]


# ---------------------------------------------------------------------------------------- detectron2, LiBai


@pytest.mark.extension("other_libraries")
@row("`build_train_loader`")
def test_a_method_of_detectron2_is_warned_of():
    with said(r"build_train_loader is never called.*create_train_dataloader"):
        type("Other", (Trainer,), {"build_train_loader": lambda self: None})


@row(
    "`before_train` and `after_train`",
    "`before_step` and `after_step`",
    "`after_backward`",
    "the trainer of a hook",
    "hooks run in the order of the list",
)
def test_hooks_run_in_the_order_of_their_list():
    heard: list[str] = []
    names = [
        "on_training_run_start",
        "on_train_step_start",
        "on_backward_end",
        "on_train_step_end",
        "on_training_run_end",
    ]

    def hook(label: str) -> TrainerCallback:
        return listener(**{name: lambda trainer, name=name, **kwargs: heard.append(label + name) for name in names})

    train(make_trainer([hook("a "), hook("b ")]), size=2)
    assert heard == [label + name for name in names for label in ("a ", "b ")]


@pytest.mark.extension("other_libraries")
@row("hooks with names of detectron2 are noticed", "`None` in the list is dropped", "what is no hook is refused")
def test_invalid_callbacks_and_unknown_hooks_are_reported():
    class Hook(TrainerCallback):
        def after_step(self):
            pass

    with said("after_step is not an event.*on_train_step_end"):
        train(make_trainer([None, Hook()]))
    with pytest.raises(TypeError, match="is not a TrainerCallback"):
        make_trainer([object()])


@row("no cycle of references keeps a trainer alive")
def test_a_trainer_is_garbage_collected():
    gc.collect()
    gc.disable()
    try:
        trainer = train(make_trainer([listener(on_train_step_end=lambda trainer, **kwargs: None)]))
        left = weakref.ref(trainer)
        del trainer
        assert left() is None
    finally:
        gc.enable()


@row("the last hooks run after an error, too", "telling a finished run from a failed one")
def test_the_last_event_tells_a_failed_run_from_a_finished_one():
    finished: list[bool] = []
    note = listener(on_training_run_end=lambda trainer: finished.append(trainer.is_finished))
    fail = listener(on_train_step_end=lambda trainer, **kwargs: 1 / 0)
    train(make_trainer([note]))
    with pytest.raises(ZeroDivisionError):
        train(make_trainer([note, fail]))
    assert finished == [True, False]


class Endless(torch.utils.data.IterableDataset[Any]):
    """A dataset that repeats one sample for ever."""

    def __iter__(self):
        while True:
            yield make_data()[0]


@pytest.mark.extension("streams")
@row("training by iterations on an endless stream", "a first iteration other than 0")
def test_an_endless_stream_is_trained_on_by_updates():
    rates: list[float] = []
    note = listener(on_train_step_end=lambda trainer, **kwargs: rates.append(trainer.optimizer.param_groups[0]["lr"]))
    create = partial(LambdaLR, lr_lambda=lambda update: 1.0 if 60 + update < 62 else 0.5)
    trainer = make_trainer([note])
    trainer.train(Endless(), max_num_train_steps=4, per_device_batch_size=2, create_scheduler_fn=create)
    assert trainer.progress.update == 4
    assert rates[-1] == 0.05


@row("`run_step` of your own", "a dict of losses is summed, each is recorded")
@pytest.mark.extension("manual_optimization")
def test_an_overridden_step_records_each_of_its_losses():
    class Twice(Trainer):
        def train_step(self, batch):
            for _ in range(2):
                loss = (self.model(batch[0]) - batch[1]).square().mean()
                self.update(loss)
            return {"loss": {"fit": loss, "more": loss}}

    history = train(make_trainer(trainer_class=Twice, loss_func=None)).run_history
    fit, more, both = (history.get_latest_metric(f"train_{name}_epoch") for name in ("fit", "more", "loss"))
    assert fit == more == pytest.approx(both / 2)


@pytest.mark.extension("streams")
@row("a loader is replaced in mid-run", "a loader that wraps another")
def test_a_loader_is_replaced_in_mid_run_or_wrapped():
    class Wraps:
        def __init__(self, loader: Any) -> None:
            self.loader = loader

        def __len__(self) -> int:
            return len(self.loader)

        def __iter__(self) -> Any:
            return ((x * 2, y) for x, y in self.loader)

    def replace(trainer: Any) -> None:
        if trainer.progress.epochs_completed == 1:
            trainer.train_dataloader = DataLoader(make_data(2), batch_size=2)

    assert train(make_trainer([listener(on_train_epoch_start=replace)]), 2).progress.update == 4
    trainer = make_trainer()
    trainer.train(OwnShard(Wraps(DataLoader(make_data(), batch_size=2))), 1)
    assert trainer.progress.update == 3


@row(
    "`storage.put_scalar`",
    "metrics are gathered every n iterations",
    "metrics are written without keeping the loop",
    "numbers are written to files",
    "a report every n steps",
    "n reports per epoch",
)
@pytest.mark.extension("metrics_file")
def test_logged_numbers_are_written_to_files_at_intervals(tmp_path):
    class Logs(Trainer):
        def calculate_train_batch_loss(self, batch):
            self.log("mean", batch[0].mean())
            self.step_metrics["step"] = self.progress.step
            return super().calculate_train_batch_loss(batch)

    files = [
        callbacks.MetricsFileCallback(tmp_path / "epochs.csv"),
        callbacks.MetricsFileCallback(tmp_path / "two.csv", every="2 updates"),
        callbacks.MetricsFileCallback(tmp_path / "half.csv", every="0.5 epochs"),
    ]
    trainer = train(make_trainer(files, trainer_class=Logs), 2, size=8)
    assert "train_mean_epoch" in trainer.run_history.get_metric_names()
    lines = {path.name: path.read_text().splitlines() for path in tmp_path.glob("*.csv")}
    counts = {"epochs.csv": 3, "two_updates.csv": 5, "half_updates.csv": 5}
    assert {name: len(lines[name]) for name in counts} == counts
    assert "step" in lines["two_updates.csv"][0].split(",")


@row("the time for data, the largest of all processes", "timers for steps and epochs")
@pytest.mark.extension("profiling")
def test_times_of_parts_are_recorded():
    names = train(make_trainer([callbacks.TimingCallback(show=False)])).run_history.get_metric_names()
    assert {"time_data", "time_data_max", "time_forward", "time_optimizer", "time_epoch"} <= set(names)


@row("prediction")
def test_a_prediction_is_the_output_of_the_model():
    trainer = make_trainer()
    with torch.no_grad():
        assert torch.equal(trainer.predict(make_data(), 2), trainer.model.eval()(make_data().tensors[0]))


# ------------------------------------------------------------------------------------------------ SpeeChain


@row("a seed", "deterministic kernels", "seeds are set again for each epoch")
def test_a_seed_determines_the_bits_and_the_order():
    def run(**kwargs: Any) -> Any:
        noisy = nn.Sequential(make_model(), nn.Dropout())
        with torch.random.fork_rng():
            torch.rand(1)
            return train(make_trainer(model=noisy, **kwargs), 2, train_dataloader_kwargs={})

    first, second, other = run(seed=0), run(seed=0, deterministic=True), run(seed=1)
    assert equal_weights(weights(first.model), weights(second.model))
    assert not equal_weights(weights(first.model), weights(other.model))
    assert not torch.are_deterministic_algorithms_enabled()
    orders: list[Any] = []
    note = listener(on_train_step_start=lambda trainer: orders.append(trainer.batch_indices))
    train(make_trainer([note], seed=0), 2, batch_size=6, train_dataloader_kwargs={})
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]


@row("cuDNN on or off, and its benchmark", "workers for training, validation and test", "the number of epochs")
def test_flags_of_cudnn_hold_during_a_run():
    seen: list[Any] = []

    def note(trainer: Any) -> None:
        workers = trainer._train_dl_kwargs["num_workers"], trainer._eval_dl_kwargs["num_workers"]
        seen.append((torch.backends.cudnn.benchmark, workers))

    options = {"train_dataloader_kwargs": {"num_workers": 1}, "eval_dataloader_kwargs": {"num_workers": 0}}
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        trainer = train(make_trainer([listener(on_training_run_start=note)]), 2, eval_dataset=True, **options)
    assert seen == [(True, (1, 0))]
    assert torch.backends.cudnn.benchmark is False
    assert trainer.progress.epochs_completed == 2


@row("all processes draw the same numbers")
def test_a_seed_set_at_the_start_of_a_run_decides_its_numbers():
    class Same(Trainer):
        def training_run_start(self):
            torch.manual_seed(1234)

    def run(seed: int) -> Any:
        model = nn.Sequential(make_model(), nn.Dropout())
        return weights(train(make_trainer(model=model, trainer_class=Same, seed=seed)).model)

    assert equal_weights(run(0), run(1))


@row("the kind of norm", "gradients of several batches in an update")
def test_an_overridden_method_clips_by_another_norm():
    largest: list[float] = []

    class Largest(Trainer):
        def clip_gradients(self):
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1e-3, norm_type=torch.inf)
            largest.append(max(p.grad.abs().max().item() for p in self.model.parameters()))

    train(make_trainer(trainer_class=Largest), gradient_accumulation_steps=3)
    assert largest == [pytest.approx(1e-3, rel=1e-2)]


@row("a batch from each of several datasets, until the shortest ends")
def test_a_step_reads_a_batch_of_each_dataset():
    read: list[tuple[int, int]] = []

    class Both(Trainer):
        def calculate_train_batch_loss(self, batch):
            read.append((len(batch["a"][0]), len(batch["b"][0])))
            return super().calculate_train_batch_loss(batch["a"])

    train(make_trainer(trainer_class=Both), train_dataset={"a": make_data(4), "b": make_data(6)})
    assert read == [(2, 2), (2, 2)]


class Unreadable(torch.utils.data.Dataset[Any]):
    """One of its samples cannot be read."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        if index == 4:
            raise OSError("unreadable")
        return make_data()[index]


@row("a batch that fails is skipped in training", "callbacks are told what has failed", "an empty batch")
@pytest.mark.extension("failed_batches")
def test_a_failing_batch_is_skipped_on_request():
    heard: list[Any] = []
    note = listener(on_train_batch_skipped=lambda trainer, failures, error, **kwargs: heard.append((failures, error)))
    skips = [callbacks.SkipFailedBatchesCallback(), note]
    trainer = train(make_trainer(skips), train_dataset=Unreadable(), train_dataloader_kwargs=HERE)
    assert trainer.progress.update == 2
    assert len(heard) == 1
    assert "unreadable" in str(heard[0][1])
    with pytest.raises(OSError, match=r"^unreadable"):
        train(make_trainer(), train_dataset=Unreadable(), train_dataloader_kwargs=HERE)

    def collate(samples: Any) -> Any:
        return None if heard.append(0) or len(heard) == 2 else torch.utils.data.default_collate(samples)

    with pytest.raises(TypeError, match="must be Tensor, not NoneType"):
        train(make_trainer(), collate_fn=collate, train_dataset=[*make_data()], train_dataloader_kwargs=HERE)


@row("processes that write snapshots", "snapshots of outputs, every so often")
@pytest.mark.extension("reports")
def test_states_and_outputs_are_kept_at_intervals(tmp_path, capsys):
    saver = SaveTrainingStateCallback(tmp_path, save_every_n_epochs=1, asynchronous=True)
    shown = shipped.ShowOutputsCallback(lambda model: f"of a {type(model).__name__}", every="2 updates")
    train(make_trainer([shown, saver]), 2)
    assert len([*tmp_path.glob("update-*")]) == 2
    assert "of a Sequential" in capsys.readouterr().out


@pytest.mark.extension("model_summary")
@row("a summary of the model")
def test_the_summary_of_a_model_names_its_layers(ran):
    pytest.importorskip("torchinfo")
    assert "Linear" in str(ran.summary(make_data(), 2))


@row("settings that share arguments")
def test_yaml_settings_share_arguments():
    pytest.importorskip("jsonargparse")
    load_yaml = pytest.importorskip("pytorch_accel_lite.extensions.experiment").load_yaml

    found: Any = load_yaml("greedy: &shared {max_length: 200}\nbeam: {<<: *shared, beam_width: 8}")
    assert found["beam"] == {"max_length": 200, "beam_width": 8}
