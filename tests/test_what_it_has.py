"""The page that lists what five other trainers have and how it is written here: each of its rows is tried."""

from __future__ import annotations

import gc
import logging
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import FrozenInstanceError
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import pytorch_accel_lite.callbacks as shipped
from pytorch_accel_lite import (
    CallbackHandler,
    InMemoryRunHistory,
    LossTracker,
    NonFiniteLossError,
    RunHistory,
    StopTrainingError,
    Trainer,
    TrainerCallback,
    TrainerPlaceholderValues,
    TrainerRunConfig,
    TrainerWithTimmScheduler,
)
from pytorch_accel_lite.callbacks import (
    EarlyStoppingCallback,
    LogMetricsCallback,
    MetricsFileCallback,
    MoveModulesToDeviceCallback,
    PrintProgressCallback,
    ProgressBarCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    SkipFailedBatchesCallback,
    TerminateOnNaNCallback,
    TimingCallback,
    get_default_callbacks,
)
from pytorch_accel_lite.trainer import DEFAULT_CALLBACKS, replace_trainer_placeholder_values
from tests.launching import ROOT
from tests.tasks import EVENTS, equal, listener, make_data, make_model, make_trainer, told, train, weights

PAGE = ROOT / "docs" / "what_it_has.md"
P = TrainerPlaceholderValues
Test = TypeVar("Test", bound=Callable[..., None])

# ----------------------------------------------------------------------------------------------- the page

#: The rows that the tests below try.
TRIED: list[str] = []


def row(*names: str) -> Callable[[Test], Test]:
    """Say which rows of the page a test tries, in its order."""
    TRIED.extend(names)
    return lambda test: test


#: Rows about programs, several processes, or what takes longer, with the test that tries each.
HELD = {
    "a whole script with the import renamed": "test_docs.py::test_both_sides_of_a_page_are_the_same_training",
    "the same script launched on two processes": "test_processes.py::"
    "test_the_first_example_runs_unchanged_on_two_processes",
    "the script of progressive resizing": "test_examples.py::"
    "test_progressive_resizing_trains_one_model_on_growing_images",
    "the best average of weights is kept over several runs": "test_ema.py::"
    "test_the_best_average_of_an_earlier_run_stays_in_its_file",
    "an incomplete last window updates, too": "test_exactness.py::"
    "test_accumulated_gradients_are_those_of_the_whole_window",
    "no exchange of gradients within a window": "test_training.py::"
    "test_training_equals_one_process_with_the_whole_batch",
    "settings of a distributed run": "test_training.py::test_limits_count_steps_of_the_whole_job",
    "mixed precision of the launcher in the settings": "test_mixed_precision.py::"
    "test_without_the_argument_it_is_that_of_the_launcher",
    "a checkpoint saved once for all machines": "test_checkpoint.py::"
    "test_missing_folders_are_made_and_the_path_may_be_a_string",
    "checkpoints move between both libraries": "test_checkpoint.py::"
    "test_the_ancestor_loads_our_file_with_optimizer_and_scheduler",
    "the same over two processes": "test_processes.py::test_gather_takes_tensors_of_unequal_length",
    "a package with tests, examples, pages and a changelog": "test_docs.py::test_the_pages_have_code",
    "few packages are needed": "test_imports.py::"
    "test_importing_costs_no_package_beyond_accelerate_torch_and_tqdm",
    "timm is needed only for its schedules": "test_imports.py::test_extras_are_imported_only_when_they_are_used",
    "training in a notebook": "test_notebooks.py::test_a_run_is_one_table_in_a_notebook",
    "several processes from a notebook": "test_processes.py::test_training_in_a_notebook_on_two_processes",
    "their progress is shown in the notebook": "test_notebooks.py::"
    "test_processes_that_a_notebook_launches_show_their_progress",
    "`accelerate launch --cpu --num_processes 2`": "test_processes.py::"
    "test_a_launch_that_accelerate_does_not_see_is_refused",
    "`accelerate launch --multi_gpu` on CPUs": "test_processes.py::"
    "test_a_launched_run_exits_with_code_0_however_its_trainer_is_closed",
    "the first example with the extra for plots": "test_extras.py::test_errors_name_what_to_install",
    "a context without exchange of gradients": "test_training.py::"
    "test_training_equals_one_process_with_the_whole_batch",
    "automatic mixed precision": "test_mixed_precision.py::"
    "test_the_argument_gives_the_bits_of_an_accelerator_with_it",
    "each sample once, on any number of processes": "test_data.py::"
    "test_an_epoch_gives_every_sample_once_and_ranks_make_equal_updates",
    "workers are seeded": "test_data.py::test_randomness_in_the_dataset_follows_from_seed_epoch_and_position",
    "resuming with another batch size": "test_data.py::"
    "test_an_epoch_can_continue_from_every_position_with_other_sizes",
    "resuming with another number of samples is an error": "test_consistency.py::"
    "test_an_epoch_is_not_resumed_over_data_of_another_length",
    "an error ends all processes and names its rank": "test_processes.py::"
    "test_a_failing_rank_ends_the_job_with_its_traceback",
    "an object of any process, in a group": "test_processes.py::test_process_helpers",
    "objects of the processes of a group": "test_processes.py::test_process_helpers",
    "several hooks of one class have a state each": "test_training_states.py::"
    "test_callbacks_of_one_class_get_their_states_in_order",
    "the precision of mixed precision": "test_mixed_precision.py::"
    "test_with_torchs_losses_it_is_the_loop_that_one_would_write",
    "a gradient scaler with settings": "test_exactness.py::test_clipping_sees_unscaled_gradients",
    "the scale is logged": "test_monitoring.py::test_the_loss_scale_and_its_skipped_updates_are_recorded",
    "the state of the scaler is saved": "test_monitoring.py::test_skipped_updates_are_counted_over_a_resume",
    "distributed, device and precision are set from outside": "test_processes.py::"
    "test_the_first_example_runs_unchanged_on_two_processes",
    "a switch between eager and compiled": "test_model_options.py::"
    "test_a_model_compiled_in_place_trains_as_the_plain_one_without_new_names",
    "one file describes a run": "test_experiments.py::test_a_run_from_a_file_ends_in_the_bits_of_the_script",
    "the command line wins over the file": "test_experiments.py::"
    "test_arguments_that_another_class_does_not_take_go_with_the_class",
    "arguments of your own": "test_experiments.py::"
    "test_functions_without_types_and_with_further_arguments_make_parts",
    "unknown options are named": "test_experiments.py::"
    "test_what_is_wrong_is_named_with_its_place_and_the_remedy",
    "a folder for results, named like the file": "test_run_folders.py::"
    "test_each_run_has_a_folder_of_its_own_unless_it_resumes_or_overwrites",
    "commands to train and to test": "test_testing.py::test_the_command_tests_as_the_file_says",
    "the settings are kept beside the results": "test_experiments.py::"
    "test_the_resolved_file_is_the_same_experiment",
    "mixed precision by an option": "test_experiments.py::test_an_accelerator_is_described_by_its_arguments",
    "backend and address of the processes": "test_machines.py::"
    "test_two_machines_without_a_shared_disk_give_the_bits_of_two_processes_on_one",
    "the number of GPUs": "test_idle_gpus.py::test_only_gpus_that_are_visible_are_chosen",
    "idle GPUs are chosen": "test_idle_gpus.py::test_the_gpus_with_the_least_in_use_are_chosen",
    "each process draws numbers of its own": "test_data.py::"
    "test_randomness_in_the_dataset_follows_from_seed_epoch_and_position",
    "synchronised batch norm": "test_batch_norm.py::"
    "test_conversion_keeps_the_model_its_parameters_buffers_modes_and_results",
    "progress and numbers of batches agree over processes": "test_data.py::"
    "test_the_same_global_batch_has_the_same_samples_on_any_number_of_processes",
    "stopping is agreed over processes": "test_stopping.py::"
    "test_a_stop_requested_by_one_rank_stops_all_at_the_same_update",
    "curves": "test_callbacks.py::test_a_shipped_callback_serves_two_runs_and_evaluate_and_predict",
    "a description of how data are read": "test_callbacks.py::"
    "test_a_shipped_callback_serves_two_runs_and_evaluate_and_predict",
    "several models, and averages of them": "test_testing.py::test_averages_of_the_best_and_the_last",
    "results are kept beside each model": "test_testing.py::"
    "test_each_combination_has_its_results_and_the_tables_list_all",
    "the n worst samples": "test_testing.py::test_samples_are_ranked_by_any_function_of_outputs_and_targets",
    "several settings of inference": "test_testing.py::"
    "test_each_combination_has_its_results_and_the_tables_list_all",
    "settings that share arguments": "test_testing.py::test_the_command_tests_as_the_file_says",
    "results by model, setting and dataset": "test_testing.py::"
    "test_each_combination_has_its_results_and_the_tables_list_all",
    "an interrupted test is resumed": "test_testing.py::"
    "test_a_killed_test_leaves_the_same_files_as_one_that_was_not",
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


def test_each_row_is_tried_once():
    named = [*TRIED, *HELD, *UNTRIED]
    assert sorted(named) == sorted(rows_of_the_page())
    assert len(set(named)) == len(named)
    assert len(TRIED) > 150


def test_a_row_says_how_it_is_here():
    assert {here for _, here, _ in cells()} == {"yes", "another way", "no"}
    assert all(how for _, _, how in cells())


def test_the_tests_that_hold_rows_exist():
    for held in HELD.values():
        file, name = held.split("::")
        assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), held


def test_the_sections_that_are_linked_exist():
    for target, anchor in re.findall(r"\]\((\w+\.md)#([\w-]+)\)", PAGE.read_text()):
        headings = re.findall(r"^#+ (.*)$", (PAGE.parent / target).read_text(), re.MULTILINE)
        assert anchor in {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}, anchor
