"""What runs on a device that computes on its own, as a GPU does: nothing waits for it, and results are those of a CPU.

There is no GPU where these tests run: the device is that of tests/simulated_device.py.
"""

from __future__ import annotations

import functools
import math
import re
import sys
import tempfile
from typing import Any

import pytest
import torch
from torch.utils import backend_registration

from tests.launching import launch
from tests.scripts import on_a_device
from tests.shipped_callbacks import SHIPPED
from tests.small_models import equal_weights

pytestmark = [
    pytest.mark.programs,
    pytest.mark.xdist_group("device"),  # it is made once
    pytest.mark.skipif(
        not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
        reason="the simulated device is a backend in Python, which this torch does not have",
    ),
]

#: Everything that reads numbers of an update.
MONITORS = pytest.mark.extension("advice", "metrics_file", "monitoring")
# What must know a number before the update, as documented.
READS_NUMBERS = {"GradientSpikeCallback": 1, "NaNReportCallback": 2}


@functools.cache
def _run_on_device() -> dict[str, tuple[Any, str | None]]:
    with tempfile.NamedTemporaryFile() as file:
        # In a fresh interpreter: a copy of one that has trained does not know devices that are added.
        done = launch([sys.executable, "tests/scripts/on_a_device.py", file.name], timeout=280)
        assert done.returncode == 0, done.stderr
        return torch.load(file.name, weights_only=False)


def on_device(case: str) -> Any:
    value, failure = _run_on_device()[case]
    assert failure is None, failure
    return value


@functools.cache
def on_cpu(case: str) -> Any:
    return on_a_device.run(case)


def assert_same(on_device: dict[str, Any], on_cpu: dict[str, Any]) -> None:
    assert (on_device["device"], on_cpu["device"]) == ("sim", "cpu")
    assert equal_weights(on_device["weights"], on_cpu["weights"])
    assert on_device["history"] == on_cpu["history"]


@pytest.mark.parametrize(
    "case",
    [
        "default_callbacks",
        pytest.param("monitors_and_rows", marks=MONITORS),
        "accumulated_and_clipped",
        "items_counted_on_the_device",
        pytest.param("split_batches", marks=pytest.mark.extension("failed_batches")),
        "evaluation",
        pytest.param("split_evaluation_batches", marks=pytest.mark.extension("failed_batches")),
        "data_on_the_device",
        pytest.param("bar", marks=pytest.mark.extension("progress_bar")),
    ],
)
def test_no_step_waits_for_the_device_or_changes_the_result(case):
    assert on_device(case)["waits"] == {}  # of forty steps
    assert_same(on_device(case), on_cpu(case))


def test_dataclasses_in_batches_are_put_on_the_device():
    assert_same(on_device("dataclasses"), on_cpu("dataclasses"))


def test_predictions_are_copied_while_the_device_computes():
    found, expected = on_device("predictions"), on_cpu("predictions")
    assert found["waits"] == {}
    assert torch.equal(found["predicted"]["tensors"], expected["predicted"]["tensors"])
    for ours, theirs in zip(found["predicted"]["boxes"], expected["predicted"]["boxes"], strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_rows_of_data_on_the_device_are_chosen_there():
    few_steps, many_steps = on_device("data_on_the_device")["copies"]
    assert few_steps == many_steps  # the order, for many steps at once
    assert_same(on_device("data_partly_on_the_device"), on_cpu("data_partly_on_the_device"))


@pytest.mark.parametrize("name", [callback_class.__name__ for callback_class in SHIPPED])
def test_a_shipped_callback_does_not_wait_for_the_device(name):
    assert on_device("shipped_callbacks")[name] == on_a_device.STEPS_OF_SHIPPED * READS_NUMBERS.get(name, 0)


@MONITORS
def test_rows_with_asynchronous_copies_are_correct():
    rows = on_device("monitors_and_rows")["rows"]
    assert [row["update"] for row in rows] == list(range(1, 101))
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert rows == on_cpu("monitors_and_rows")["rows"]


def test_a_non_finite_loss_is_found_a_few_steps_later():
    found, at_once = on_device("a_loss_that_is_nan"), on_cpu("a_loss_that_is_nan")
    assert "step 60" in at_once["message"]
    assert found["message"] == at_once["message"]
    assert at_once["step"] <= found["step"] <= at_once["step"] + 16
    found_before = found["step"]
    for later in on_device("a_loss_that_is_nan_on_devices_that_lag_behind").values():
        assert "step 60" in later["message"]
        assert found_before < later["step"]
        found_before = later["step"]


@pytest.mark.extension("monitoring")
def test_the_peak_of_each_epoch_is_that_of_the_device():
    history = on_device("memory")
    first, second = history["memory_allocated_mib"]
    assert second == first + 1
    assert history["memory_reserved_mib"] == [2 * first, 2 * second]


@pytest.mark.extension("throughput")
def test_flops_are_compared_with_the_devices_peak():
    found = on_device("flops")
    (flops,), (utilisation,) = (found["history"][f"{name}_epoch"] for name in ("flops_per_second", "mfu"))
    assert found["waits"] == {}
    assert flops / utilisation == pytest.approx(30.3e12)  # float32 of what the device is called
    assert flops == pytest.approx(2 * (40 + 40 + 8) * found["history"]["samples_per_second_epoch"][0])


@pytest.mark.extension("throughput")
def test_a_devices_peak_follows_from_its_name_and_the_precision():
    found = on_device("peaks")
    peaks = {name: (found[name, "torch.bfloat16"], found[name, "torch.float32"]) for name, _ in found}
    assert peaks == {
        "NVIDIA H100 80GB HBM3": (989.4, 66.9),
        "NVIDIA H100 PCIe": (756, 51.2),
        "NVIDIA A100-SXM4-80GB": (312, 19.5),
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb": (0, 0),  # a slice of one
        "NVIDIA RTX A4000": (0, 0),
        "NVIDIA GB200": (2500, 80),
        "NVIDIA GeForce RTX 4090": (165.2, 82.6),
        "NVIDIA GeForce RTX 4090 Laptop GPU": (0, 0),
    }


@pytest.mark.extension("error_notes", "monitoring")
def test_an_out_of_memory_error_says_what_held_the_memory():
    (note,), snapshots = on_device("out_of_memory")
    text = note.replace("\n    ", " ")
    # Five weights, of whose gradients none is left, and two moments of each; the counts of updates are in host memory.
    held = "weights 20 B, gradients 0 B, optimizer state 40 B"
    rest, peak = r"the rest \(activations, temporary results\) [\d.]+ [KM]iB", r"peak \d+ MiB of 1 GiB"
    assert re.search(f"memory: {held}, {rest}; {peak}\n", text)
    assert "memory snapshot: out_of_memory_rank0.pickle in the working directory; open it at https" in text
    assert "What to do: pass auto_microbatch=True to train() or evaluate()" in text
    assert snapshots == ["snapshot"]


@pytest.mark.extension("metrics", "model_ema")
def test_evaluation_average_and_predictions_equal_those_of_a_cpu():
    assert_same(on_device("evaluated_and_predicted"), on_cpu("evaluated_and_predicted"))
    predictions = on_device("evaluated_and_predicted")["predictions"]
    assert torch.equal(predictions, on_cpu("evaluated_and_predicted")["predictions"])


@pytest.mark.extension("metrics")
def test_a_run_continues_from_any_state_to_the_same_bits():
    whole, resumed = on_device("resumed")["whole"], on_device("resumed")["resumed"]
    assert_same(whole, on_cpu("resumed")["whole"])
    assert len(resumed) == 4
    assert all(equal_weights(run["weights"], whole["weights"]) for run in resumed.values())
    assert all(run["history"] == whole["history"] for run in resumed.values())


def test_a_state_in_the_background_is_copied_by_the_device():
    found = on_device("saved_in_the_background")
    assert found["waits"].keys() <= {"aten::_local_scalar_dense"}  # the sums of the losses, which every state holds
    assert_same(found["whole"], on_cpu("saved_in_the_background")["whole"])
    assert len(found["resumed"]) == 5
    assert all(equal_weights(run["weights"], found["whole"]["weights"]) for run in found["resumed"])


def test_a_learned_loss_and_a_critic_resume_on_the_device():
    found = on_device("beside_the_model")
    parts, places, history = found["whole"]
    assert places == {"sim"}
    assert len(found["resumed"]) == 3
    for resumed, _, its_history in [*found["resumed"], on_cpu("beside_the_model")["whole"]]:
        assert all(equal_weights(resumed[name], part) for name, part in parts.items())
        assert its_history == history


@pytest.mark.extension("tuning")
def test_find_batch_size_and_find_lr_change_nothing():
    found = on_device("finding_settings")
    assert found["unchanged"]
    assert found["losses"] == on_cpu("finding_settings")["losses"]
    assert found["steps"] == 5
    assert found["seconds"] > 0


@pytest.mark.extension("profiling")
def test_phases_of_a_step_are_timed_on_the_device():
    totals = on_device("timing")
    assert totals["forward"] > 0
    assert totals["backward"] > 0
    assert totals["optimizer"] > 0
    # The events of the simulation count operations, as milliseconds.
    assert totals["backward"] * 1000 == pytest.approx(round(totals["backward"] * 1000))
