"""Jobs of several processes: they give what one process gives, they stop together, they end in order."""

from __future__ import annotations

import gc
import json
import os
import pickle
import re
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import ModelEmaCallback, SaveBestModelCallback, SaveTrainingStateCallback
from pytorch_accel_lite.checkpoint import verify_state
from pytorch_accel_lite.distributed.launch import record_error
from pytorch_accel_lite.utils import local_process_zero_first, local_process_zero_only, world_process_zero_only
from tests import cases
from tests.cases.common import rank as own_rank
from tests.cases.common import shared_folder, world_size
from tests.launching import SOAK, TORCHRUN, Fork, launch, run_elastic_script, run_script, two_are_enough
from tests.shipped import SHIPPED
from tests.tasks import equal, largest_difference, quiet_trainer, regression_data, small_model, weights


class Strange(nn.Module):
    """Buffers that are views, that share their elements, or that have types which few libraries send."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sliced", torch.arange(8)[::2] + own_rank())
        self.around = torch.full((8,), -1)
        self.register_buffer("view", self.around[::2])
        self.view.copy_(torch.arange(4) + own_rank())
        self.register_buffer("turned", (torch.arange(6.0).view(2, 3) + own_rank()).T)
        self.register_buffer("expanded", torch.full((1,), float(own_rank())).expand(3))
        for dtype in (torch.int16, torch.uint16, torch.bfloat16, torch.bool, torch.complex64):
            self.register_buffer(f"of {str(dtype)[6:]}", torch.tensor([1 - own_rank(), 0]).to(dtype))


def _threads_and_descriptors() -> tuple[int, int]:
    gc.collect()  # takes long: a trainer and its callbacks refer to each other
    threads = []
    for _ in range(20):  # the system counts a thread for a moment after it was joined
        threads.append(len(os.listdir("/proc/self/task")))
        time.sleep(0.02)
    return min(threads), len(os.listdir("/proc/self/fd"))


class AddedOnOne(TrainerCallback):
    """Would be left alone in its barrier."""

    def on_training_run_start(self, trainer, **kwargs):
        trainer.barrier()


ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
ACCELERATE += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]

pytestmark = pytest.mark.processes


@cache
def alone(case):
    """What one process gives."""
    return case()


def is_same(found, expected):
    """Whether nested outputs are the same, bit for bit."""
    if isinstance(expected, torch.Tensor):
        same_kind = (found.dtype, found.shape, found.layout) == (expected.dtype, expected.shape, expected.layout)
        return same_kind and torch.equal(found.to_dense(), expected.to_dense())
    if type(found) is not type(expected):
        return False
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(is_same(found[key], expected[key]) for key in expected)
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(is_same, found, expected))
    return found == expected


def test_training_equals_one_process_with_the_whole_batch(ranks):
    for result in ranks(cases.training.uneven_batches):
        for key, run in result.items():
            one = alone(cases.training.uneven_batches)[key]
            assert run["updates"] == one["updates"]
            assert run["samples"] == one["samples"]
            assert largest_difference(run["weights"], one["weights"]) < 1e-10
            for metric, values in one["history"].items():
                assert run["history"][metric] == pytest.approx(values, abs=1e-10)
            for ours, theirs in zip(run["gradients"], one["gradients"], strict=True):
                assert largest_difference(ours, theirs) < 1e-10


def test_losses_over_items_equal_one_process(ranks):
    for result in ranks(cases.training.tokens):
        for accumulation, run in result.items():
            one = alone(cases.training.tokens)[accumulation]
            assert largest_difference(run["weights"], one["weights"]) < 1e-10
            assert largest_difference(run["gradients"][0], one["gradients"][0]) < 1e-10
            assert run["history"]["train_loss_epoch"] == pytest.approx(one["history"]["train_loss_epoch"], abs=1e-10)


def test_updates_and_learning_rates_do_not_depend_on_the_number_of_processes(ranks):
    for result in ranks(cases.training.schedule):
        assert result == alone(cases.training.schedule)


def test_evaluation_and_prediction_count_every_sample_once_for_any_size(ranks):
    for result in ranks(cases.evaluation.dataset_sizes):
        assert result.keys() == alone(cases.evaluation.dataset_sizes).keys() == set(range(1, 21))
        for size, (metrics, predictions) in result.items():
            expected_metrics, expected = alone(cases.evaluation.dataset_sizes)[size]
            assert metrics == pytest.approx(expected_metrics, abs=1e-10)
            assert predictions.shape == expected.shape == (size, 3)
            assert torch.allclose(predictions, expected, atol=1e-12, rtol=0)
            assert torch.equal(
                predictions, ranks(cases.evaluation.dataset_sizes)[0][size][1]
            )  # the same on every process


def test_predictions_keep_their_structure_and_order(ranks):
    one = alone(cases.evaluation.predict_structures)
    assert one.keys() == {"out", "pair"}  # a mean over the batch is no prediction of a sample
    assert isinstance(one["pair"], tuple)
    for result in ranks(cases.evaluation.predict_structures):
        assert torch.allclose(result["out"], one["out"], atol=1e-12, rtol=0)
        assert torch.equal(result["pair"][0], one["pair"][0])
        assert torch.equal(result["pair"][1][0], one["pair"][1][0])


def test_predictions_of_any_kind_are_those_of_one_process(ranks):
    one = alone(cases.evaluation.many_kinds_of_predictions)
    for rank, result in enumerate(ranks(cases.evaluation.many_kinds_of_predictions)):
        for key, found in result.items():
            expected = one[key]["all"]
            assert is_same(found["all"], expected)
            assert is_same(found["parts"], expected)
            assert is_same(found["first"], expected if rank == 0 else None)
            assert found["parts_of_first"] == [rank != 0] * found["num_parts"]


def test_predictions_skip_a_batch_that_fails_on_one_process_and_keep_their_order(ranks):
    failed = range(8, 10)
    for result in ranks(cases.evaluation.predictions_without_failed_batches):
        assert result == [index for index in range(30) if index not in failed]


def gather() -> Any:
    trainer = Trainer(small_model(), None, None, callbacks=[])
    mine = torch.arange(own_rank() + 1) + 10 * own_rank()
    return {
        "ragged": trainer.gather(mine),
        "padded": trainer.gather(mine, padding_value=-1),
        "nested": trainer.gather({"a": mine.float(), "b": (torch.tensor(own_rank()),)}),
        "empty": trainer.gather(torch.arange(own_rank())),
        "all empty": trainer.gather(torch.ones(0, 3)),
        "without padding": trainer.gather((torch.tensor([[own_rank(), -1], [-1, -1]]), mine - 10), padding_value=-1),
    }


def test_gather_takes_tensors_of_unequal_length(ranks):
    n = ranks.world_size
    expected = torch.cat([torch.arange(rank + 1) + 10 * rank for rank in range(n)])
    for result in ranks(gather):
        assert torch.equal(result["ragged"], expected)
        assert torch.equal(result["padded"], expected)
        assert torch.equal(result["nested"]["a"], expected.float())
        assert torch.equal(result["nested"]["b"][0], torch.arange(n))
        assert torch.equal(result["empty"], torch.cat([torch.arange(rank) for rank in range(n)]))
        assert result["all empty"].shape == (0, 3)


def gather_unlike() -> dict[str, str]:
    """What is said of tensors that differ in more than their length between the first process and the others."""
    trainer, said = Trainer(small_model(), None, None, callbacks=[]), {}
    ones, is_first = torch.ones(2, 3), own_rank() == 0
    for name, mine in {
        "shape": ones if is_first else torch.ones(2, 5),
        "dimensions": ones if is_first else torch.ones(2),
        "type": ones if is_first else ones.double(),
        "second": [ones, ones if is_first else ones.int()],
        "keys": {"a" if is_first else "b": ones},
        "number": [ones] * (1 if is_first else 2),
    }.items():
        try:
            trainer.gather(mine)
        except ValueError as error:
            said[name] = str(error)
    return said


def test_gather_refuses_tensors_that_differ_in_more_than_their_length(ranks):
    for said in ranks(gather_unlike):
        assert re.search(
            r"float32 of shape \(3,\) on rank 0, but .*float32 of shape \(5,\) on rank 1. Only", said["shape"]
        )
        assert "float32 of shape () on rank 1. Only the number of rows" in said["dimensions"]
        assert "float64 of shape (3,) on rank 1" in said["type"]
        assert "int32 of shape (3,) on rank 1" in said["second"]
        assert re.search(r"'a'.* on rank 0, but .*'b'.* on rank 1. Only", said["keys"])
        assert re.search(r"\[\*\].* on rank 0, but .*\[\*, \*\].* on rank 1. Only", said["number"])


def test_gather_leaves_out_rows_that_are_padding(ranks):
    n = ranks.world_size
    for result in ranks(gather):
        pairs, row = result["without padding"]
        assert pairs.tolist() == [[rank, -1] for rank in range(n)]
        assert row.tolist() == [i - 10 + 10 * rank for rank in range(n) for i in range(rank + 1)]


def test_losses_over_the_samples_of_all_processes_equal_one_process(ranks):
    for result in ranks(cases.training.losses_over_all_samples):
        for key, run in result.items():
            one = alone(cases.training.losses_over_all_samples)[key]
            assert largest_difference(run["weights"], one["weights"]) < 1e-10, key
            assert run["loss"] == pytest.approx(one["loss"], abs=1e-10), key
            for ours, theirs in zip(run["gradients"], one["gradients"], strict=True):
                assert largest_difference(ours, theirs) < 1e-10, key


def test_a_loss_of_what_was_gathered_without_gradients_is_an_error_that_says_so(ranks):
    for result in ranks(cases.training.losses_of_what_has_no_gradients):
        constant, guarded = result["said"]
        assert "the result of trainer.gather(), which has no gradients. Pass with_gradients=True" in constant
        assert "with_gradients=True) does not work on several processes with auto_microbatch=True" in guarded
        assert result["lengths"] == [2 * ranks.world_size] * (6 // ranks.world_size)  # as it is for metrics


def failures() -> Any:
    """The weights are written by the first process alone, where they cannot be."""
    trainer, said = quiet_trainer(small_model()), []
    with shared_folder() as folder:
        file = folder / "file"
        file.touch()
        for action in (
            lambda: trainer.save_model(file / "model.safetensors"),
            lambda: trainer.save_checkpoint(file / "model.pt"),
            lambda: trainer.broadcast_object(lambda: None),
            lambda: trainer.gather(["text"]),
        ):
            try:
                action()
            except (OSError, TypeError, AttributeError, pickle.PicklingError, RuntimeError) as error:
                said.append(f"{type(error).__name__}: {error}")
    return said


@two_are_enough
def test_what_one_rank_cannot_do_is_an_error_of_all(ranks):
    for rank, (*saving, pickling, gathering) in enumerate(ranks(failures)):
        assert len(saving) == 2
        for said in saving:
            assert said.startswith("FileExistsError: " if rank == 0 else "OSError: Rank 0 failed: FileExistsError: ")
        assert re.search("Can't (pickle|get) local object", pickling)  # as Python 3.13 has it
        assert pickling.startswith("RuntimeError: Rank 0 failed: ") == (rank > 0)
        assert gathering == "TypeError: gather() takes tensors, or nested lists, tuples and dicts of them, not 'text'."


@two_are_enough
def test_a_loss_that_is_not_finite_on_one_rank_ends_all_ranks_at_the_same_update(ranks):
    results = ranks(cases.stopping.nan_on_one_rank)
    assert len({result["update"] for result in results}) == 1
    for result in results:
        assert "epoch 1, step 3: loss=nan" in result["message"]
        assert result["events"] == [("on_exception", "NonFiniteLossError"), ("on_training_run_end",)]


def test_a_stop_asked_for_by_one_rank_stops_all_at_the_same_update(ranks):
    results = ranks(cases.stopping.stop_on_one_rank)
    assert {result["reason"] for result in results} == {"rank asked for an end"}
    assert len({result["update"] for result in results}) == 1
    assert results[0]["update"] < 2 * 2000 // ranks.world_size
    assert all(equal(result["weights"], results[0]["weights"]) for result in results)


def test_a_batch_that_fails_on_one_rank_is_skipped_by_all(ranks):
    last = ranks.world_size - 1
    for result in ranks(cases.failures.failed_batches):
        for way in ("each", "window"):
            seen = [(f["epoch"], f["step"], f["rank"], f["error"]) for f in result[way]["failures"]]
            assert seen == [(epoch, 1, last, "ValueError: cannot digest this") for epoch in (1, 2)]
            assert all(11 in failure["indices"] for failure in result[way]["failures"])
            assert equal(result[way]["found"], ranks(cases.failures.failed_batches)[0][way]["found"])
        assert largest_difference(result["each"]["found"], result["each"]["expected"]) < 1e-12
        assert result["each"]["progress"]["update"] == 6
        assert result["window"]["progress"]["update"] == 4
        assert result["each"]["progress"]["samples"] == 48


def test_a_rank_that_fails_before_items_are_counted_leaves_no_other_waiting(ranks):
    for found, expected in ranks(cases.failures.failed_first_batch_of_tokens):
        assert largest_difference(found, expected) < 1e-12


@two_are_enough
def test_the_rank_that_meets_what_is_not_finite_writes_the_report_and_all_end(ranks):
    *others, last = ranks(cases.failures.nan_report)
    rank = ranks.world_size - 1
    assert last["report"] == f"epoch-1-step-1-rank-{rank}.pt"
    assert all(last["report"] in result["error"] for result in [*others, last])


@pytest.mark.parametrize("name", [callback_class.__name__ for callback_class in SHIPPED])
@two_are_enough
def test_a_shipped_callback_serves_several_processes(ranks, name):
    results = [result[name] for result in ranks(cases.callbacks.shipped_callbacks)]
    assert len(results) == ranks.world_size
    for result in results:
        assert equal(result["weights"], results[0]["weights"])
        assert result["evaluated"] == results[0]["evaluated"]
        assert torch.equal(result["predicted"], results[0]["predicted"])
        assert result["printed"] == ""


@two_are_enough
def test_all_ranks_split_their_batches_when_one_runs_out_of_memory(ranks):
    for result in ranks(cases.failures.out_of_memory):
        split, whole = result["split"], result["whole"]
        assert (split["parts"], whole["parts"]) == (12 // ranks.world_size, 1)
        assert equal(split["weights"], ranks(cases.failures.out_of_memory)[0]["split"]["weights"])
        assert largest_difference(split["weights"], whole["weights"]) < 1e-12
        for name, values in whole["history"].items():
            assert split["history"][name] == pytest.approx(values)


@two_are_enough
def test_a_limit_of_time_pauses_all_ranks_at_the_same_update(ranks):
    for paused, whole in ranks(cases.stopping.time_limit):
        assert len(paused["updates"]) > 2
        assert paused["updates"] == ranks(cases.stopping.time_limit)[0][0]["updates"]
        assert len(whole["updates"]) == 1
        assert paused["updates"][-1] == whole["updates"][-1]
        assert equal(paused["weights"], whole["weights"])


@two_are_enough
def test_a_stop_in_an_event_leaves_no_rank_waiting_for_another(ranks):
    results = ranks(cases.stopping.stop_before_communicating_callbacks)
    assert {result["reason"] for result in results} == {"at the end of the epoch"}
    assert {result["epoch"] for result in results} == {1}
    assert len({result["run"] for result in results}) == 1


@two_are_enough
def test_rows_are_written_until_all_ranks_end_together(ranks):
    for updates, made in ranks(cases.stopping.nan_with_logger):
        assert updates == list(range(1, made + 1))


@two_are_enough
def test_rows_are_written_until_an_error_that_all_ranks_have(ranks):
    assert all(updates == [1, 2, 3] for updates in ranks(cases.stopping.error_with_logger))


@two_are_enough
def test_an_evaluation_that_was_stopped_does_not_stop_the_next(ranks):
    assert all(reasons == ["seen enough", None] for reasons in ranks(cases.stopping.stopped_evaluation))


def test_ranks_with_generators_of_their_own_agree_on_an_order(ranks):
    results = ranks(cases.data.shuffled_order)
    n = ranks.world_size
    steps = -(-23 // (2 * n))
    for key in results[0]:
        if key == "weighted":
            assert sum(len(batch) for result in results for batch in result[key]) == 23
            continue
        by_epoch = []
        for epoch in range(2):
            batches = [result[key][epoch * len(result[key]) // 2 :][: len(result[key]) // 2] for result in results]
            seen = [sample for rank in batches for batch in rank for sample in batch]
            assert sorted(seen) == list(range(23))
            by_epoch.append(batches)
        assert by_epoch[0] != by_epoch[1]
        assert max(len(rank) for rank in by_epoch[0]) == steps


@two_are_enough
def test_with_a_seed_workers_and_processes_do_not_change_the_result(ranks):
    alone = cases.data.seeded_augmentation()
    assert equal(alone[0], alone[1])
    assert equal(alone[0], alone[2])
    for result in ranks(cases.data.seeded_augmentation):
        assert equal(result[0], result[1])
        assert equal(result[0], result[2])
        assert largest_difference(result[0], alone[0]) < 1e-10


def test_a_stream_is_dealt_out_once_and_ranks_make_the_same_updates(ranks):
    results = ranks(cases.data.streams)
    for size in (1, 7, 24):
        expected = regression_data(size).tensors[0].repeat(2, 1)
        seen = torch.cat([result["stream", size] for result in results])
        assert torch.equal(seen.sort(0).values, expected.sort(0).values)
        assert len({result["updates", size] for result in results}) == 1


def test_own_shards_of_unequal_length_are_used_up_without_a_hang(ranks):
    own = [result["own"] for result in ranks(cases.data.streams)]
    first = len(range(0, 20, ranks.world_size))
    assert [len(result["inputs"]) for result in own] == [2 * first, *[2] * (ranks.world_size - 1)]
    assert {result["samples"] for result in own} == {2 * (first + ranks.world_size - 1)}
    assert {result["updates"] for result in own} == {2 * -(-first // 2)}
    assert all(equal(result["weights"], own[0]["weights"]) for result in own)


@pytest.mark.parametrize("kind", ["split", "reading", "reading from a dict", "shard", "webdataset", "pipe", "whole"])
def test_streams_that_share_themselves_out_are_read_by_each_process(ranks, kind):
    found = [result["by stream"][kind] for result in ranks(cases.data.streams_that_share_themselves_out)]
    assert_each_sample_once(found)
    assert bool(found[0]["printed"]) == (kind != "whole")
    assert all(result["printed"] == "" for result in found[1:])
    if kind != "whole":
        said = "Each process reads its own part of the {} data, as sharded by "
        assert all(said.format(which) in found[0]["printed"] for which in ("training", "evaluation"))


def assert_each_sample_once(found):
    """In each of two epochs, and in evaluation."""
    x, _ = regression_data(24).tensors
    assert torch.equal(torch.cat([result["inputs"] for result in found]).sort(0).values, x.repeat(2, 1).sort(0).values)
    model = small_model()
    for result in found:
        assert result["samples"] == 48
        assert result["losses"] == found[0]["losses"]
        assert equal(result["weights"], found[0]["weights"])
    model.load_state_dict(found[0]["weights"])
    whole = quiet_trainer(model).evaluate(regression_data(24))["evaluation_loss"]
    assert found[0]["losses"][-1] == pytest.approx(whole, abs=1e-10)


def test_a_stream_of_each_process_is_told_the_epoch(ranks):
    for result in ranks(cases.data.streams_that_share_themselves_out):
        assert set(result["epochs"]) == {0, 1}


@pytest.mark.parametrize("kind", ["by shards", "by samples", "whole"])
def test_streams_split_by_hugging_face_are_read_by_each_process(ranks, kind):
    pytest.importorskip("datasets")
    found = [result[kind] for result in ranks(cases.data.hugging_face_streams)]
    assert_each_sample_once(found)
    assert ("split_dataset_by_node" in found[0]["printed"]) == (kind != "whole")
    own = found[0]["inputs"]
    assert not torch.equal(own[: len(own) // 2], own[len(own) // 2 :])  # shuffled again


def test_a_table_that_each_process_has_a_part_of_is_refused(two_ranks):
    pytest.importorskip("datasets")
    for said in two_ranks(cases.data.hugging_face_tables):
        assert "different rows, of lengths [12, 12]. Each would read only a share" in said["split"]
        assert "different rows, of lengths [24, 24]" in said["shuffled"]
        assert said["the same"] == "trained"


def test_streams_that_are_not_shared_out_over_the_processes_are_refused(ranks):
    n = ranks.world_size
    for said in ranks(cases.data.streams_shared_out_wrongly):
        assert ", ".join([f"part 0 of {n}"] * n) in said["the same on all"]
        assert f"part 0 of {n + 1}, part 1 of {n + 1}" in said["for others"]
        assert f"all, part 1 of {n}" in said["on some"]
        assert f"each sample would be read {n} times. Add .sharding_filter()" in said["pipe"]


def test_tails_give_no_process_a_single_sample_where_the_model_has_batch_norm(ranks):
    results = ranks(cases.data.tails_with_batch_norm)
    for size in (38, 40, 43, 47):
        with_norm, without = ([result[size, which] for result in results] for which in ("norm", "none"))
        for step, (normed, plain) in enumerate(zip(in_steps(with_norm), in_steps(without), strict=True)):
            assert list(chain(*normed)) == list(chain(*plain)), step  # the same samples in the same order
            assert min(len(own) for own in normed if own) >= 2
            assert max(map(len, plain)) - min(map(len, plain)) <= 1  # as even as possible
        assert min(rows for result in with_norm for rows in result["rows"]) >= 2
        assert not any(result["error"] or result["said"] for result in with_norm)


def in_steps(results):
    return zip(*(result["indices"] for result in results), strict=True)


def test_a_tail_of_a_single_sample_in_all_is_warned_of_where_the_model_has_batch_norm(ranks):
    for rank, result in enumerate(ranks(cases.data.tails_with_batch_norm)):
        single = result[12 * ranks.world_size + 1, "norm"]
        assert ["drop_last" in text for text in single["said"]] == [True] * (rank == 0)
        assert "Expected more than 1 value per channel" in single["error"]
        assert result[12 * ranks.world_size + 1, "none"]["said"] == []


def test_a_batch_of_one_sample_is_shared_out_anew_where_the_model_has_batch_norm(ranks):
    results = ranks(cases.data.batches_of_a_sampler_with_batch_norm)
    assert sorted(i for indices, _ in results for own in indices for i in own) == list(range(12))
    assert min(rows for _, all_rows in results for rows in all_rows) >= 2


def test_a_batch_sampler_of_the_users_is_dealt_out(ranks):
    results = ranks(cases.data.batch_sampler)
    assert sum(size for result in results for size in result["sizes"]) == 22
    assert {result["samples"] for result in results} == {22}
    assert {result["updates"] for result in results} == {2 * -(-5 // ranks.world_size)}
    if ranks.world_size == 2:
        assert [result["sizes"][:3] for result in results] == [[3, 2, 1], [1, 4]] or results[1]["sizes"][0] == 1


def test_datasets_by_name_equal_one_process(ranks):
    one = alone(cases.training.named)
    assert {"train_a_epoch", "few_eval_loss_epoch", "many_eval_loss_epoch"} <= one["history"].keys()
    for result in ranks(cases.training.named):
        assert largest_difference(result["weights"], one["weights"]) < 1e-10
        for metric, values in one["history"].items():
            assert result["history"][metric] == pytest.approx(values, abs=1e-10)
        assert sum(len(part) for part in result["parts"]) == 25
        assert torch.allclose(torch.cat(result["parts"]), torch.cat(one["parts"]), atol=1e-10, rtol=0)


def test_gathering_every_evaluation_batch_gives_the_dataset_in_order(ranks):
    for result in ranks(cases.evaluation.gather_in_evaluation):
        assert result.keys() == set(range(ranks.world_size, 25))
        for size, inputs in result.items():
            assert torch.equal(inputs, regression_data(size).tensors[0])


def test_accelerates_gather_for_metrics_gives_every_sample_of_an_uneven_evaluation_once(ranks):
    x, y = regression_data(37).tensors
    loss = nn.functional.mse_loss(small_model()(x), y).item()
    results = ranks(cases.evaluation.gather_for_metrics)
    for result in results:
        assert len(result) == 6
        for found in result.values():
            assert torch.equal(found["step"], y)
            assert torch.equal(found["callback"], y)
            assert torch.equal(found["at the end"], y.sort(dim=0).values)
            assert found["names"] == [f"{value:.3f}" for value in y.flatten().tolist()]
            assert found["evaluation_loss"] == pytest.approx(loss, abs=1e-10)
    for case in results[0]:
        assert sum(result[case]["count"] for result in results) == 37


def test_accelerates_gather_for_metrics_gathers_the_batches_of_training(ranks):
    assert all(ranks(cases.evaluation.gather_for_metrics_in_training))


def test_all_ranks_evaluate_with_the_running_statistics_of_rank_0(ranks):
    first, *others = ranks(cases.training.batch_norm)
    assert all(equal(result["weights"], first["weights"]) for result in others)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)).double()
    model.load_state_dict(first["weights"])
    x, y = regression_data(9).tensors
    with torch.no_grad():
        expected = nn.functional.mse_loss(model.eval()(x), y).item()
    assert first["history"]["eval_loss_epoch"][-1] == pytest.approx(expected, abs=1e-10)


@two_are_enough
def test_batch_norm_that_cannot_be_synchronised_here_is_left_alone_with_a_warning(ranks):
    for result in ranks(cases.training.sync_batch_norm):
        warned = ["cannot synchronise batch norm on 'cpu'" in text for text in result["warnings with"]]
        assert warned == ([True] if result is ranks(cases.training.sync_batch_norm)[0] else [])
        assert result["warnings without"] == []
        assert equal(result["with"], result["without"])
        plain, converted = result["losses"]
        assert plain == converted


@two_are_enough
def test_the_layout_in_memory_does_not_change_the_result(ranks):
    for result in ranks(cases.training.channels_last):
        assert largest_difference(result[True], result[False]) < 1e-12
        assert largest_difference(result[True], alone(cases.training.channels_last)[True]) < 1e-12


def test_limits_count_steps_of_the_whole_job(ranks):
    for result in ranks(cases.training.limits):
        assert result["samples"] == alone(cases.training.limits)["samples"] == 24
        assert result["updates"] == alone(cases.training.limits)["updates"] == 4
        assert largest_difference(result["weights"], alone(cases.training.limits)["weights"]) < 1e-10


def test_evaluating_within_a_run_leaves_no_trace_in_it(ranks):
    for result in [*ranks(cases.evaluation.evaluate_inside), alone(cases.evaluation.evaluate_inside)]:
        without, within = result[0], result[1]
        assert equal(without[0], within[0])
        assert without[1] == within[1]
        assert result["metrics"].keys() == {"evaluation_loss"}
        assert result["training"]


@two_are_enough
def test_parameters_of_the_loss_function_are_the_same_on_all_ranks(ranks):
    for result in ranks(cases.training.learned_loss):
        assert torch.equal(result["scale"], ranks(cases.training.learned_loss)[0]["scale"])
        assert abs(result["scale"] - alone(cases.training.learned_loss)["scale"]) < 1e-10
        assert largest_difference(result["weights"], alone(cases.training.learned_loss)["weights"]) < 1e-10


@two_are_enough
def test_sparse_gradients_are_averaged_with_and_without_a_guard(ranks):
    for result in ranks(cases.training.sparse_gradients):
        assert largest_difference(result[True], result[False]) < 1e-12
        assert equal(result[True], ranks(cases.training.sparse_gradients)[0][True])


def test_a_gradient_that_one_rank_has_or_has_otherwise_is_averaged(ranks):
    n = ranks.world_size
    for result in ranks(cases.training.gradients_of_one_rank):
        for (_, others), centres in result.items():
            expected = torch.full((4,), 1 - 0.1 * (n - 1) / n if others else 1.0, dtype=torch.float64)
            expected[2] -= 0.1 / n
            assert torch.allclose(centres, expected)
        assert len(result) == 3


@two_are_enough
def test_what_is_found_while_a_run_ends_ends_it_and_not_the_next_evaluation(ranks):
    assert cases.stopping.nan_while_ending() == ("found while ending", True)
    assert ranks(cases.stopping.nan_while_ending) == [("found while ending", True)] * ranks.world_size


def trainers_in_turn() -> Any:
    """One trainer after another, each in a block of its own, as for folds of a cross-validation."""
    means = []
    for _ in range(2):
        model = small_model()
        with quiet_trainer(model) as trainer:
            trainer.train(regression_data(12), 1)
            means.append(trainer.gather(torch.tensor([float(model[0].weight.detach().mean())])).tolist())
    return means


@two_are_enough
def test_a_trainer_can_follow_another_that_was_closed(ranks):
    for means in ranks(trainers_in_turn):
        assert len(means) == 2
        assert all(len(set(fold)) == 1 and len(fold) == ranks.world_size for fold in means)


@two_are_enough
def test_no_state_of_weights_that_are_not_finite_is_written(ranks):
    for result in ranks(cases.stopping.states_with_nan):
        assert result["failed"] is not None
        assert len(result["finite"]) == 2
        assert all(result["finite"].values())


@two_are_enough
def test_callbacks_after_one_that_stops_the_run_hear_as_much_as_on_one_process(ranks):
    assert ranks(cases.stopping.stop_before_others) == [cases.stopping.stop_before_others()] * ranks.world_size


@two_are_enough
def test_only_the_first_process_prints(ranks):
    results = ranks(cases.callbacks.default_callbacks)
    assert len(results) == ranks.world_size
    assert results.output.count("Starting training run") == 1
    assert results.output.count("Loading the best model") == 1
    assert len(re.findall(r"^1/3 .*s$", results.output, re.MULTILINE)) == 1
    assert results.output.count("Best: epoch") == 1
    assert len({result["best"] for result in results}) == 1
    assert all(equal(result["weights"], results[0]["weights"]) for result in results)


def process_helpers() -> Any:
    trainer = quiet_trainer(small_model())
    folder = Path(trainer.broadcast_object(tempfile.mkdtemp()))

    def leave_a_file(name: str) -> list[str]:
        before = sorted(file.name for file in folder.iterdir())
        (folder / name).touch()
        return before

    results = {
        "local only": local_process_zero_only(lambda value: value)(own_rank() + 5),
        "world only": world_process_zero_only(lambda value: value)(own_rank() + 5),
        "first": local_process_zero_first(leave_a_file)(f"rank{own_rank()}"),
        "broadcast": trainer.broadcast_object({"rank": own_rank()}),
        "gathered": trainer.all_gather_object(("rank", own_rank())),
        "numbers": {
            reduce: trainer.tensor_to_numeric(torch.tensor([own_rank() + 1]), reduce)
            for reduce in (None, "sum", "mean", "max")
        },
    }
    trainer.barrier()
    results["after the barrier"] = len(list(folder.iterdir()))
    trainer.barrier()
    return results


def test_process_helpers(ranks):
    n = ranks.world_size
    everyone = [f"rank{rank}" for rank in range(n)]
    for rank, result in enumerate(ranks(process_helpers)):
        assert result["local only"] == result["world only"] == (None if rank else 5)
        assert result["first"] == [] if rank == 0 else "rank0" in result["first"]
        assert result["broadcast"] == {"rank": 0}
        assert result["gathered"] == [("rank", other) for other in range(n)]
        assert result["numbers"] == {None: rank + 1, "sum": sum(range(n + 1)), "mean": (n + 1) / 2, "max": n}
        assert result["after the barrier"] == len(everyone)


def strange_buffers() -> tuple[dict[str, list[Any]], list[int]]:
    """The buffers after those of the first process have been copied to all, and what is between two of them."""
    module = Strange()
    quiet_trainer(small_model()).sync_buffers(module)
    return {name: buffer.tolist() for name, buffer in module.named_buffers()}, module.around.tolist()


def test_buffers_of_any_kind_are_copied_from_the_first_process(ranks):
    for buffers, around in ranks(strange_buffers):
        assert buffers["sliced"] == [0, 2, 4, 6]
        assert around == [0, -1, 1, -1, 2, -1, 3, -1]
        assert buffers["turned"] == [[0, 3], [1, 4], [2, 5]]
        assert buffers["expanded"] == [0, 0, 0]
        for name in ("int16", "uint16", "bfloat16", "bool", "complex64"):
            assert buffers[f"of {name}"] == [1, 0], name


def objects_of_any_length() -> list[tuple[Any, Any]]:
    """What all processes give, and what each gets: short, long on one process or another, long on all, and neither."""
    trainer = Trainer(small_model(), None, None, callbacks=[])
    found = []
    for lengths in ((0, 1, 2), (3000, 0, 5), (0, 70_000, 0), (5000, 9000, 1012), (1010, 1011, 1013)):
        of_all = [(number, "x" * length) for number, length in enumerate(lengths[: world_size()])]
        found.append((of_all, trainer.all_gather_object(of_all[own_rank()])))
    tensors = [torch.arange(2000) + other for other in range(world_size())]
    view = trainer.broadcast_object(torch.arange(100_000)[:10])
    assert view.untyped_storage().nbytes() < 1000  # not all that it is a view of
    found.append((tensors, trainer.all_gather_object(tensors[own_rank()])))
    return found


def test_objects_of_any_length_are_gathered_in_order(ranks):
    for found in ranks(objects_of_any_length):
        *texts, (tensors, gathered) = found
        assert all(given == received for given, received in texts)
        assert all(map(torch.equal, tensors, gathered))


def many_trainers() -> Any:
    """Threads and file descriptors after 3 and after 50 trainers that were made, trained, saved and dropped."""
    saved, counts = set(), []
    with shared_folder() as folder:
        for number in range(50):
            saving = SaveTrainingStateCallback(folder / f"states {number}", asynchronous=True)
            trainer = quiet_trainer(small_model(), callbacks=[saving], seed=0)
            trainer.train(regression_data(8), 1, per_device_batch_size=2)
            saved.add(len(list((folder / f"states {number}").glob("update-*"))))
            del trainer, saving
            if number in (2, 49):
                counts.append(_threads_and_descriptors())
    return saved, counts


@two_are_enough
def test_trainers_leave_no_threads_and_no_open_files(ranks):
    for saved, (after_3, after_50) in ranks(many_trainers):
        assert saved == {1}
        # Fewer if something that an earlier function of this job has left ends meanwhile.
        assert all(now <= before for now, before in zip(after_50, after_3, strict=True)), (after_3, after_50)


def writers_side_by_side() -> Any:
    """Two savers write in the background at the same moments, and then a second trainer's."""
    found = []
    with shared_folder() as folder:
        for number in range(2):
            savers = [
                SaveTrainingStateCallback(folder / f"{number} {name}", 1, 1, max_checkpoints=None, asynchronous=True)
                for name in ("first", "second")
            ]
            trainer = quiet_trainer(small_model(), callbacks=savers, seed=0)
            trainer.train(regression_data(24), 2, per_device_batch_size=2)
            paths = [path for saver in savers for path in saver.save_dir.glob("update-*")]
            found.append([verify_state(path)["world_size"] for path in paths])
        trainer.barrier()
    return found


@two_are_enough
def test_several_savers_can_write_in_the_background_at_once(ranks):
    for found in ranks(writers_side_by_side):
        states = 2 * 2 * 24 // (2 * ranks.world_size)
        assert found == [[ranks.world_size] * states] * 2


def test_training_in_a_notebook_on_two_processes(tmp_path):
    run_script("tests/scripts/notebook.py", str(tmp_path))
    results = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    assert [result["processes"] for result in results] == [2, 2]
    model = small_model()
    kwargs = {"per_device_batch_size": 6, "train_dataloader_kwargs": {"shuffle": False}}
    quiet_trainer(model).train(regression_data(30), 2, **kwargs)
    assert all(largest_difference(result["weights"], weights(model)) < 1e-10 for result in results)


def test_a_failing_rank_ends_the_job_with_its_traceback():
    done = launch([*TORCHRUN, "2", "tests/scripts/failing_rank.py"], warm=True)
    assert done.returncode != 0
    assert "sample 7 cannot be read" in done.stderr
    assert "in __getitem__" in done.stderr
    assert "Root Cause" in done.stderr, done.stderr
    summary = done.stderr.split("Root Cause")[1]
    assert "sample 7 cannot be read" in summary
    assert "in __getitem__" in summary


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("how", ["caught", "exits"])
def test_a_rank_that_leaves_a_run_by_sys_exit_ends_the_job(how, rank):
    """Also if it has caught the error before, so that the interpreter prints none."""
    done = launch([*TORCHRUN, "2", "tests/scripts/failing_rank.py", how, rank], warm="launcher")
    assert done.returncode != 0
    assert done.stdout.count("has caught: sample") >= (how == "caught")
    cause = done.stderr.split("Root Cause")[1]
    assert re.search(rf"rank +: {rank} .*\n.* exitcode +: 3 ", cause), done.stderr


def test_the_signal_that_killed_a_rank_is_the_root_cause_and_not_the_lost_connection():
    rarely = "--monitor-interval=1"  # the launcher looks at the ranks, which leaves the other the time to fail
    done = launch([*TORCHRUN, "2", rarely, "tests/scripts/failing_rank.py", "killed"], warm=True)
    assert "Signal 9 (SIGKILL)" in done.stderr.split("Root Cause")[1]


def test_of_an_error_report_that_was_interrupted_nothing_is_left_for_the_launcher(tmp_path, monkeypatch):
    """The launcher itself would fail, and name no error at all, if it found a part of one."""
    report = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))

    def fail(ends: bool) -> None:
        if not ends:
            monkeypatch.setattr(json, "dump", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        try:
            raise OSError("sample 7 cannot be read")
        except OSError as error:
            record_error(error)

    process = Fork(partial(fail, False), tmp_path / "output")
    assert process.wait() == -signal.SIGTERM
    assert not report.exists()
    fail(True)
    assert json.loads(report.read_text())["message"]["message"] == "OSError: sample 7 cannot be read"
    assert os.environ["TORCHELASTIC_ERROR_FILE"] == str(report)


def unlike_calls() -> dict[str, str]:
    """What is said if the last rank has other datasets or callbacks than the others, or makes another call."""
    data = regression_data(12)
    is_last = own_rank() == world_size() - 1

    def error_of(call: Callable[[Trainer], Any], callbacks: Sequence[Any] = (), seed: int | None = None) -> str:
        try:
            call(quiet_trainer(small_model(), callbacks=callbacks, seed=seed))
        except ValueError as error:
            return str(error)
        return "no error"

    with shared_folder() as folder:
        average, best = ModelEmaCallback(save_path=None), SaveBestModelCallback(folder / "best.pt")
        states = SaveTrainingStateCallback(folder / "states")
        return {
            "eval_dataset": error_of(lambda t: t.train(data, 1, data if is_last else None)),
            "names": error_of(lambda t: t.evaluate({"a": data, "b": data} if is_last else {"a": data})),
            "states": error_of(lambda t: t.train(data, 1), [states] if is_last else []),
            "best": error_of(lambda t: t.train(data, 1, data), [] if is_last else [best]),
            "average": error_of(lambda t: t.train(data, 1, data), [] if is_last else [average]),
            "own": error_of(lambda t: t.train(data, 1), [AddedOnOne] if is_last else []),
            "order": error_of(lambda t: t.train(data, 1, data), [best, average] if is_last else [average, best]),
            "seed": error_of(lambda t: t.train(data, 1), [states], None if is_last else 0),
            "resumes": error_of(lambda t: t.train(data, 1, resume_from="latest" if is_last else None), [states]),
            "call": error_of(lambda t: t.predict(data) if is_last else t.evaluate(data)),
            "same": error_of(lambda t: t.train(data, 1, data), [average, best, AddedOnOne]),
        }


def test_datasets_callbacks_and_calls_that_differ_between_ranks_are_refused_on_all(ranks):
    last = ranks.world_size - 1
    differences = {
        "eval_dataset": f"eval_dataset='a dataset' on rank {last}, but eval_dataset=None on rank 0.",
        "names": f"eval_dataset=['a', 'b'] on rank {last}, but eval_dataset=['a'] on rank 0.",
        "states": f"callbacks=['SaveTrainingStateCallback'] on rank {last}, but callbacks=[] on rank 0.",
        "best": f"callbacks=[] on rank {last}, but callbacks=['SaveBestModelCallback'] on rank 0.",
        "average": f"callbacks=[] on rank {last}, but callbacks=['ModelEmaCallback'] on rank 0.",
        "own": f"callbacks=['AddedOnOne'] on rank {last}, but callbacks=[] on rank 0.",
        "order": f"callbacks=['SaveBestModelCallback', 'ModelEmaCallback'] on rank {last}, but callbacks=['Model",
        "seed": f"seed=None on rank {last}, but seed=0 on rank 0.",
        "resumes": f"call='train(resume_from=...)' on rank {last}, but call='train()' on rank 0.",
        "call": f"call='predict()' on rank {last}, but call='evaluate()' on rank 0.",
    }
    for result in ranks(unlike_calls):
        assert result.pop("same") == "no error"
        assert result.keys() == differences.keys()
        for name, said in result.items():
            assert said.startswith(differences[name]), said
            assert "Make the same calls on every process, with the same arguments and callbacks" in said


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (["evaluates"], "evaluate() on rank 0 waits for the other ranks, but one of them has not called it"),
        (["predicts"], "predict() on rank 1 waits for the other ranks, but one of them has not called it"),
        (["evaluates in a callback"], "evaluate() on rank 0 waits for the other ranks"),
        (["gathers"], "gather_for_metrics() waits for all processes in each step of an evaluation, but some have no"),
        (["updates", "2"], "RuntimeError: The processes are at different updates: train_step must call update()"),
        pytest.param(
            ["updates", "3"],
            "another process did not take part until the time limit of the process group.",
            marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="notes are not shown with tracebacks"),
        ),
    ],
)
def test_a_call_on_one_rank_alone_is_named_at_the_latest_by_the_time_limit(case, said):
    done = launch([*TORCHRUN, "2", "tests/scripts/unlike_ranks.py", *case], warm=True)
    assert done.returncode != 0
    assert said in done.stderr, done.stderr


def test_a_launch_that_accelerate_does_not_see_is_refused():
    done = run_elastic_script(2, "tests/scripts/refused.py")
    assert done.returncode == 0, done.stdout
    if done.stdout.count("made on 2 processes") == 2:
        pytest.skip("old versions of accelerate see the processes all the same")
    assert done.stdout.count("RuntimeError: The launcher started WORLD_SIZE=2 processes, but Accelerate sees 1") == 2
    assert "created before the trainer, by an Accelerator or a PartialState" in done.stdout


LAUNCHERS = {"torchrun": [*TORCHRUN, "2"], "accelerate": ACCELERATE}
LAUNCHES = [("torchrun", "closed"), ("accelerate", "by itself")]  # each launcher, and each way; all with SOAK


@pytest.mark.soak
@pytest.mark.parametrize(
    ("launcher", "how"), [(a, b) for a in LAUNCHERS for b in ("closed", "by itself")] if SOAK else LAUNCHES
)
def test_a_launched_run_exits_with_code_0_however_its_trainer_is_closed(launcher, how):
    for _ in range(20 if SOAK else 1):
        warm = "launcher" if launcher == "accelerate" else True  # ranks that are interpreters of their own really end
        command = [*LAUNCHERS[launcher], "tests/scripts/short_run.py", how]
        done = launch(command, warm=warm if not SOAK else False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("two processes: True") == (4 if how == "closed" else 2)
        assert sorted(re.findall(r"the first: (True|False)", done.stdout)) == ["False", "True"]


def run_as_script(path: str, *arguments: str) -> None:
    """As ``torchrun path arguments`` does."""
    before = sys.argv
    sys.argv = [path, *arguments]
    try:
        runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv = before


def test_the_first_example_runs_unchanged_on_two_processes(tmp_path, job):
    done = job(2).run(run_as_script, "examples/digits.py", "--epochs", "1", "--output", str(tmp_path))
    assert done.output.count("Test accuracy") == 1
    assert {file.name for file in tmp_path.iterdir()} == {"best_model.pt", "curves.png"}
