"""The page that compares features with five other trainers: each of its rows is tested."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from pytorch_accel_lite.extension_names import OFFERED
from tests.launching import ROOT
from tests.repository.feature_comparison.rows import TRIED

PAGE = ROOT / "docs" / "feature_comparison.md"
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
    "the same script launched on two processes": "test_launched_jobs.py::"
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
    "the same over two processes": "test_communication.py::test_gather_takes_tensors_of_unequal_length",
    "a package with tests, examples, pages and a changelog": "test_docs.py::test_the_pages_with_code_are_found",
    "few packages are needed": "test_imports.py::test_importing_costs_only_accelerate_torch_numpy_and_tqdm",
    "timm is needed only for its schedules": "test_imports.py::test_extras_are_imported_only_when_they_are_used",
    "training in a notebook": "test_notebooks.py::test_a_run_is_one_table_in_a_notebook",
    "several processes from a notebook": "test_launched_jobs.py::"
    "test_two_processes_of_a_notebook_train_as_one_process_does",
    "their progress is shown in the notebook": "test_notebooks.py::"
    "test_processes_that_a_notebook_launches_show_their_progress",
    "`accelerate launch --cpu --num_processes 2`": "test_refused_launches.py::"
    "test_a_launch_that_accelerate_does_not_see_is_refused",
    "`accelerate launch --multi_gpu` on CPUs": "test_launched_jobs.py::"
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
    "an error ends all processes and names its rank": "test_launched_jobs.py::"
    "test_a_failing_rank_ends_the_job_with_its_traceback",
    "an object of any process, in a group": "test_communication.py::"
    "test_objects_are_gathered_and_broadcast_in_any_group",
    "objects of the processes of a group": "test_communication.py::"
    "test_objects_are_gathered_and_broadcast_in_any_group",
    "the precision of mixed precision": "test_mixed_precision.py::test_mixed_precision_equals_a_hand_written_loop",
    "a gradient scaler with settings": "test_exactness.py::test_clipping_sees_unscaled_gradients",
    "the scale is logged": "test_monitoring.py::test_the_loss_scale_and_its_skipped_updates_are_recorded",
    "the state of the scaler is saved": "test_monitoring.py::test_skipped_updates_are_counted_over_a_resume",
    "distributed, device and precision are set from outside": "test_launched_jobs.py::"
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


def tried() -> list[str]:
    """The rows that the tests of this folder try: they are declared when these are imported."""
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        importlib.import_module(f"{__package__}.{path.stem}")
    return TRIED


def rows_of_the_page() -> list[str]:
    return [name for name, _, _ in cells()]


def cells() -> list[tuple[str, str, str]]:
    lines = [line.strip("| ").split(" | ", 2) for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [(name, here, how) for name, here, how in lines if here != "here"]


def test_each_row_of_the_page_is_tested_once():
    named = [*tried(), *HELD, *UNTRIED]
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
