"""Models that come sharded: who reads which data, gradients, and what is refused."""

from __future__ import annotations

import functools

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.cases import parallel
from tests.launching import CAN_SHARD
from tests.tasks import equal, largest_difference

pytestmark = [pytest.mark.processes, CAN_SHARD]


@functools.cache
def alone():
    """What one process gives, with the same updates."""
    return parallel.trained("whole")


def check_same_as_alone(found, tolerance=1e-12):
    expected = alone()
    assert largest_difference(found["weights"], expected["weights"]) < tolerance
    assert found["history"].keys() == expected["history"].keys()
    for name, values in expected["history"].items():
        # torchmetrics computes in single precision
        exact = 1e-6 if name.endswith("Error") else tolerance
        assert found["history"][name] == pytest.approx(values, abs=exact), name
    assert found["norms"] == pytest.approx(expected["norms"], abs=tolerance)
    assert [index for index, _ in found["worst"]] == [index for index, _ in expected["worst"]]
    assert found["config"] == expected["config"]
    torch.testing.assert_close(found["predictions"], expected["predictions"], atol=tolerance, rtol=0)


@pytest.mark.parametrize(("how", "processes"), [("fsdp", 2), ("layers", 2), ("hsdp", 4)])
def test_sharded_models_learn_what_one_process_learns(job, how, processes):
    for found in job(processes).run(parallel.trained, how):
        check_same_as_alone(found)


def test_gradients_in_shards_are_clipped_by_value(two_ranks):
    expected = parallel.clipped_by_value("whole")
    for found in two_ranks.run(parallel.clipped_by_value, "fsdp"):
        assert largest_difference(found["weights"], expected["weights"]) < 1e-12
        assert found["norms"] == pytest.approx(expected["norms"], abs=1e-12)


def test_a_source_that_fails_on_one_process_ends_the_run_on_all_that_share_its_batches(two_ranks):
    first, failed = two_ranks.run(parallel.source_that_fails, "tp")
    assert failed == ("OSError: the disk is gone", 4)
    assert first == ("OSError: Rank 1 failed: OSError: the disk is gone", 4)


def test_losses_in_single_precision_are_those_of_replicas(two_ranks):
    replicas = two_ranks.run(parallel.in_single_precision, "whole")[0]
    for found in two_ranks.run(parallel.in_single_precision, "fsdp"):
        for name, values in replicas.items():
            assert found[name] == pytest.approx(values, abs=1e-6)


def test_accelerate_shards_in_two_dimensions(tmp_path, job):
    """Its states are saved in shards and resumed, too."""
    for whole, resumed in job(4).run(parallel.by_accelerate, tmp_path):
        assert whole["dimensions"] == 2
        assert largest_difference(whole["weights"], alone()["weights"]) < 1e-12
        assert equal(resumed["weights"], whole["weights"])
        assert resumed["history"] == whole["history"]


@pytest.mark.parametrize(("how", "processes"), [("fsdp", 2), ("hsdp", 4), ("tp_fsdp", 4)])
def test_runs_of_sharded_models_resume_to_the_same_bits(tmp_path, job, how, processes):
    for uninterrupted, *resumed in job(processes).run(parallel.resumed, how, tmp_path):
        assert len(resumed) == 2
        for again in resumed:
            assert equal(again["weights"], uninterrupted["weights"])
            assert again["history"] == uninterrupted["history"]


def test_gradients_are_reduced_once_in_an_update(job):
    assert job(2).run(parallel.reductions, "fsdp")[0]["reduce_scatter"] == 3  # one for each module with parameters
    found = job(4).run(parallel.reductions, "hsdp")[0]
    assert found["reduce_scatter"] == 3 * 4  # keeps only the shards of the gradients
    assert found["allreduce"] == job(4).run(parallel.reductions, "fsdp")[0]["allreduce"] + 3


@pytest.mark.parametrize(("how", "processes"), [("fsdp", 2), ("tp_fsdp", 4)])
def test_weights_are_averaged_and_evaluated_in_shards(tmp_path, job, how, processes):
    expected = parallel.averaged("whole", tmp_path)[0]
    for whole, resumed in job(processes).run(parallel.averaged, how, tmp_path):
        assert largest_difference(whole["average"], expected["average"]) < 1e-12
        assert largest_difference(whole["weights"], expected["weights"]) < 1e-12
        assert whole["history"]["ema_model_eval_loss_epoch"] == pytest.approx(
            expected["history"]["ema_model_eval_loss_epoch"], abs=1e-12
        )
        assert equal(resumed["average"], whole["average"])
        assert resumed["history"] == whole["history"]


def test_statistics_of_a_sharded_model_are_averaged_and_evaluated_like_its_weights(two_ranks):
    first, second = two_ranks(parallel.averaged_statistics)
    assert equal(first["average"], second["average"])
    start, *later = first["states"]
    assert len(later) == 8
    for name, average in first["average"].items():
        expected = start[name]
        for state in later:
            expected = 0.5 * expected + 0.5 * state[name] if average.is_floating_point() else state[name]
        torch.testing.assert_close(average, expected, atol=1e-12, rtol=0)
        assert not torch.equal(average, start[name]), name
    for found in (first, second):
        assert equal(found["weights"], first["states"][-1])  # evaluating the average leaves the model as it was
        history = found["history"]["ema_model_eval_loss_epoch"]
        assert history[-1] == pytest.approx(first["loss_of_average"], abs=1e-12)


def test_a_model_from_the_meta_device_starts_like_one_that_is_not_sharded(tmp_path, two_ranks):
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    try:
        layers = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)
    finally:
        torch.set_default_dtype(torch.float32)
    for found in two_ranks.run(parallel.placed, None):
        assert equal(found["before"], nn.Sequential(*layers).state_dict())
        assert not equal(found["before"], found["after"])
    alone = parallel.placed(None)
    assert equal(alone["before"], found["before"])
    save_file(alone["after"], tmp_path / "model.safetensors")
    for source in (tmp_path, tmp_path / "model.safetensors"):
        for found in two_ranks.run(parallel.placed, source):
            assert equal(found["before"], alone["after"])


@pytest.mark.parametrize(("how", "message"), [
    ("optimizer", "replaces the parameters that the optimizer holds. Pass a function that creates"),
    ("values", "nothing gives values to 1.scale. Give the modules that hold them a reset_parameters() method"),
    ("source", "'nowhere', which parallelize_model returned, has no weights as safetensors"),
])  # fmt: skip
def test_a_model_that_cannot_be_placed_is_refused(job, how, message):
    for said in job(2).run(parallel.placed_wrongly, how):
        assert message in said


def test_a_model_of_transformers_comes_sharded(tmp_path, two_ranks):
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "DistributedConfig"):
        pytest.skip("this version of transformers has no DistributedConfig")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=50, num_key_value_heads=2, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    expected = parallel.of_transformers(tmp_path)
    for found in two_ranks.run(parallel.of_transformers, tmp_path):
        assert found["sharded"]
        assert largest_difference(found["weights"], expected["weights"]) < 1e-5
        for name, values in expected["history"].items():
            assert found["history"][name] == pytest.approx(values, abs=1e-6)


@pytest.mark.parametrize(("how", "processes"), [("tp", 2), ("tp_ddp", 4), ("tp_fsdp", 4)])
def test_processes_of_tensor_parallelism_share_their_batches(tmp_path, job, how, processes):
    by_rank = job(processes).run(parallel.trained, how, tmp_path)
    for rank, found in enumerate(by_rank):
        check_same_as_alone(found)
        assert found["seen"] == by_rank[rank // 2 * 2]["seen"]
        assert found["gathered"].tolist() == list(range(processes // 2))
        assert found["stays"] == processes // 2
        torch.testing.assert_close(found["written"][0], found["predictions"])
        assert found["written"][1] == processes // 2
    steps = zip(*(found["seen"] for found in by_rank[::2]), strict=True)
    samples = sorted(index for step in steps for share in step for index in share)
    assert samples == sorted([*range(26)] * 2)


@pytest.mark.parametrize(("how", "processes"), [("tp", 2), ("tp_fsdp", 4)])
def test_they_also_share_what_is_random(job, how, processes):
    by_rank = job(processes).run(parallel.random_data_alike, how)
    for first, second in zip(by_rank[::2], by_rank[1::2], strict=True):
        for (batches, dropped), (others, dropped_there) in zip(first, second, strict=True):
            assert batches
            assert all(map(torch.equal, batches, others))
            assert not torch.equal(batches[0], batches[1])
            # Dropout acts on the outputs of a process's own columns, so the masks are as alike as the generators.
            assert all(map(torch.equal, dropped, dropped_there))
    if processes == 4:
        assert not torch.equal(by_rank[0][0][0][0], by_rank[2][0][0][0])


@pytest.mark.parametrize(("how", "processes", "message"), [
    ("part", 4, "sharded over 2 of 4 processes, and nothing connects these to the others. Use a mesh of all"),
    ("meta", 2, "has parameters on the meta device, which have no values. Shard it in an overridden"),
    ("accelerate_meta", 2, "cannot tell the parameters of an optimizer apart (accelerate issue 3930)"),
    ("tp_config", 2, "has tp_size=2, but 1 process(es) share the weights of Sequential by tensor parallelism"),
])  # fmt: skip
def test_what_cannot_be_trained_is_refused(job, how, processes, message):
    for said in job(processes).run(parallel.error_of, how):
        assert message in said
