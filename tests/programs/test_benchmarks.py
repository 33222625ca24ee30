"""The benchmarks run and compare what they claim to compare. No time is asserted."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import time
import warnings
from dataclasses import replace

import pytest
import torch

from benchmarks import comparison, gpu, run_contender, scale, startup
from benchmarks.__main__ import main
from benchmarks.contenders import CONTENDERS
from benchmarks.paths import DOING_MORE, PATHS
from tests.launching import (
    CAN_SHARD,
    SOAK,
    TORCHRUN,
    WarmPython,
    forget,
    launch,
    only_with_soak,
    run_forked,
    run_module,
)

pytestmark = pytest.mark.programs


def printed_rows(done: subprocess.CompletedProcess[str]) -> list[list[str]]:
    """Return the cells of the tables that a program printed, without their heads."""
    assert done.returncode == 0, done.stdout + (done.stderr or "")
    output = done.stdout
    assert f"Python {platform.python_version()}" in output
    lines = [line for line in output.splitlines() if line.startswith("|")]
    bars = [number for number, line in enumerate(lines) if line.startswith("|---")]
    heads = {number - back for number in bars for back in (0, 1)}
    return [[cell.strip() for cell in line.split("|")[1:-1]] for n, line in enumerate(lines) if n not in heads]


def run_worker(module: str, *arguments: str) -> dict[str, float]:
    """Like the benchmarks' own function, but in a fork, as a fresh process matters only for the figures."""
    done = run_module(module, *arguments)
    assert done.returncode == 0, done.stdout
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.soak
@pytest.mark.parametrize(
    ("workload", "contenders"),
    [
        ("tensors", ["plain loop, indexing tensors", "ours, default without bar"]),
        ("first", ["ours, no callbacks"]),
        ("evaluation", ["plain loop", "ours"]),
        ("callbacks", ["GradientNormCallback", "all together"]),
        *[("memory", ["plain loop", "ours"])] * SOAK,
        *[("gpu_resnet", ["bf16: plain loop again (control)", "float32, TF32: ours"])] * SOAK,
        *[("gpu_transformer", ["bf16, CUDA graphs: plain loop again (control)", "bf16, compiled: ours"])] * SOAK,
    ],
)
def test_a_benchmark_writes_a_table_and_its_figures(tmp_path, monkeypatch, workload, contenders):
    monkeypatch.setenv("STARTED_AT", str(time.time()))
    options = ["--workloads", workload, "--quick", "--rounds", "1", "--output", str(tmp_path)]
    main([*options, "--contenders", *contenders], run_worker)
    figures = json.loads((tmp_path / f"{workload}.json").read_text())
    rows = (tmp_path / f"{workload}.md").read_text().splitlines()
    for name, rounds in figures["rounds"].items():
        assert len(rounds) == 1
        assert any(row.startswith(f"| {name} |") for row in rows)
    assert set(contenders) <= figures["rounds"].keys()
    assert figures["machine"]["torch"]


class StandIn:
    """A stand-in for a CUDA event."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, later):
        return 1e3 * (later.at - self.at)


def test_the_gpu_table_counts_waits_by_position(monkeypatch):
    """The contender simulates torch's debug modes for waits."""
    modes = ["default"]
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append(modes[-1]))
    monkeypatch.setattr(torch.cuda, "Event", StandIn)
    by_hand, trained, waited = iter(range(1000)), [], []
    sizes = gpu.Sizes(turns=3, steps=2, warm_up=1, watched=4)
    turns = gpu.Turns(by_hand, [1, 2, 3], torch.device("cuda"), sizes)

    def train(batches):
        for batch in batches:
            trained.append(batch)
            if modes[-1] == "warn":
                warnings.warn(gpu.MESSAGE, stacklevel=1)
                warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)
            elif modes[-1] == "error":
                raise RuntimeError(gpu.MESSAGE)

    found = turns.take(train)
    assert found["synchronisations"] == 1
    assert re.fullmatch(r"test_benchmarks\.py:\d+", found["first synchronisation"])
    assert modes == ["default", "warn", "default", "error", "default"]
    assert trained == [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3]  # one to warm up, three turns, four and one that are watched
    assert next(by_hand) == 7
    assert waited == ["default"] * 12  # at the ends of turns only
    row = gpu.table({"bf16: ours": [found | {"device": "a GPU", "turns": 3, "steps": 2}], "float32: ours": []})
    assert "| 1, first at test_benchmarks.py:" in row
    assert "| float32: ours | failed |" in row


@only_with_soak
def test_gpu_workloads_can_be_compiled_ahead():
    done = run_module("benchmarks.gpu", "all", "gpu_tiny,gpu_gpt", "compile")
    assert done.returncode == 0, done.stdout
    assert '{"workload"' not in done.stdout


def test_other_errors_of_a_contender_are_not_counted_as_waits():
    def train(batches):
        raise RuntimeError(f"{next(batches)} is wrong")

    turns = gpu.Turns(iter(range(9)), [1], torch.device("cpu"), gpu.Sizes(turns=1, steps=1, warm_up=1))
    with pytest.raises(RuntimeError, match="1 is wrong"):
        turns.take(train)


def test_a_contender_that_ends_before_its_turns_is_refused():
    turns = gpu.Turns(iter(range(9)), [1], torch.device("cpu"), gpu.Sizes(turns=2, steps=1, warm_up=1))
    with pytest.raises(RuntimeError, match="ended after 0 of 2 turns"):
        turns.take(next)


def test_step_times_are_split_into_the_parts_of_both_loops():
    rows = printed_rows(run_module("benchmarks.gaps", "--quick", "--rounds", "1"))
    assert [name for name, *_ in rows][:3] == ["forward pass", "forward pass to loss", "loss"]
    assert all(float(by_hand) > 0 for _, by_hand, _ in rows)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.extension("hang_watch")
@CAN_SHARD
def test_an_update_sends_as_much_as_a_hand_written_one():
    def run():
        scale.EPOCHS, scale.UPDATES = 1, 3
        scale.main()

    done = run_forked(run, "--ranks", "2")
    assert done.returncode == 0, done.stdout
    messages, kilobytes, *_ = done.stdout.split("\n\n")
    sent = dict(re.findall(r"^\| ([\w, ]+: [\w, ]+) \| ([\d.]+)", kilobytes, re.MULTILINE))
    formula = 16_641 * 4 / 1000
    for way, factor in {"plain DDP loop": 1, "ours": 1, "ours, fully_shard": 2}.items():
        # All-reduces of gradients; or two gathers of weights, and what gloo has for a reduce-scatter.
        assert factor * formula < float(sent[f"{way}: update"]) < 1.05 * factor * formula + 2
    assert "| ours: a state saved |" in messages


@only_with_soak
def test_logical_processes_are_measured_against_ddp_by_hand():
    rows = printed_rows(run_module("benchmarks.logical", "--quick", "--rounds", "1", "--updates", "3", "--batch", "2"))
    assert [len(row) for row in rows] == [2, 2, 4, 4, 4, 4]
    for _, ratio, fastest, sent in rows[2:]:
        assert float(ratio.split()[0]) > 0
        assert float(fastest) > 0
        assert sent == "0.00 MB"  # of one process


@only_with_soak
def test_ways_of_feeding_processes_are_compared_with_a_loop():
    rows = printed_rows(run_module("benchmarks.streams", "--quick"))
    assert len(rows) == 9
    assert all(float(ratio) > 0 for _, _, *ratios in rows for ratio in ratios)


@only_with_soak
def test_ways_of_agreeing_are_compared_with_no_exchange():
    done = launch([*TORCHRUN, "2", "-m", "benchmarks.collectives", "--quick"], warm=True)
    rows = {name: cells for name, *cells in printed_rows(done)}
    assert len(rows) == 10
    assert rows["none"][1:] == ["1.00", "1.00"]
    assert all(float(figure) > 0 for figures in rows.values() for figure in figures)


@only_with_soak
def test_every_path_is_measured_against_a_loop_on_its_data():
    chosen = ["--only", "list", "seed and states", "--columns", "no callbacks", "everything on"]
    rows = {
        row[0]: row[1:] for row in printed_rows(run_module("benchmarks.paths", "--quick", "--rounds", "1", *chosen))
    }
    assert rows.keys() >= {*DOING_MORE, "list of batches", "TensorDataset, seed and states"}
    for name, (by_hand, *added) in rows.items():
        assert float(by_hand) > 0
        assert [bool(cell) for cell in added] == [True, False, False, name in PATHS], name


@only_with_soak
def test_packed_texts_are_measured_against_padded_ones():
    rows = printed_rows(run_module("benchmarks.packing", "--quick", "--rounds", "1"))
    assert len(rows) == 7
    for name, *cells in rows:
        assert [float(cells[column].split()[0]) == 0 for column in (0, 3)] == [", packed" in name] * 2
        assert all(float(cells[column].split()[0]) > 0 for column in (1, 2, 4, 5))


@only_with_soak
def test_states_are_measured_against_what_torch_saves_and_loads(tmp_path):
    rows = printed_rows(run_module("benchmarks.saving", "--rounds", "1", "--millions", "1", "--folders", str(tmp_path)))
    assert len(rows) == 6
    assert all(float(own.split()[0]) >= 0 and float(ratio) > 0 for _, _, own, ratio, *_ in rows)
    assert not list(tmp_path.iterdir())


@only_with_soak
def test_costs_are_measured_for_growing_sizes():
    tables = ["--only", "steps", "epochs", "samples", "processes", "--rounds", "1"]
    sizes = ["--steps", "100", "--epochs", "100", "--samples", "1000", "--processes", "1"]
    *others, control, trainer = printed_rows(run_module("benchmarks.growth", *tables, *sizes))
    rows = {name: cells for name, *cells in others}
    assert rows.keys() >= {"1", "100", "no callbacks", "all of these", "`SaveTrainingStateCallback`", "1,000"}
    assert len(rows["all of these"]) == 3  # after 1, 10 and 100 epochs
    assert all(float(figure) > 0 for figure in rows["all of these"])
    assert [control[:2], trainer[:2]] == [["1", "plain loop again (control)"], ["1", "trainer"]]


@pytest.mark.slow
def test_the_time_to_a_shuffled_epochs_first_batch_is_measured():
    lines = run_module("benchmarks.order", "--samples", "100000").stdout.splitlines()
    assert [line.split(",")[2].split()[0] for line in lines] == ["from", "resumed"]
    assert all(line.startswith("100,000 samples, ") and line.endswith(" MB") for line in lines)


@only_with_soak
def test_workers_are_measured_against_the_standard_loader():
    rows = printed_rows(run_module("benchmarks.loader_workers", "--rounds", "1", "--workers", "1", "--megabytes", "4"))
    assert len(rows) == 8
    assert all(float(first) <= float(every) + 0.5 for _, first, every, _ in rows)  # both rounded, the second to 1 ms
    assert [float(memory) > 0 for *_, memory in rows] == ["in this process" not in name for name, *_ in rows]


@only_with_soak
def test_evaluations_and_predictions_are_measured_against_loops():
    done = launch([sys.executable, "-m", "benchmarks.evaluation", "--quick", "--rounds", "1"], warm=True)
    rows = {name: cells for name, *cells in printed_rows(done)}
    assert {"control", "list of batches", "DataLoader, default callbacks"} <= rows.keys()
    for name in ("evaluating in a plain loop", "evaluating", "predicting in a plain loop", "predicting"):
        assert len(rows[name]) == 6
        assert float(rows[name][2]) > 0  # the ratio of the CPU times


@only_with_soak
@pytest.mark.slow
def test_the_parts_of_the_start_are_measured():
    def run():
        forget("pytorch_accel_lite")  # its interpreters are copies, which import the package all the same
        subprocess.Popen = WarmPython
        startup.main()

    rows = {name: cells for name, *cells in printed_rows(run_forked(run, "--rounds", "1"))}
    assert {"import", "import, without compiled files", "first step, default callbacks"} <= rows.keys()
    assert float(rows["import"][0].split()[0]) > 0


def test_compiled_steps_are_measured_against_the_loop_by_hand():
    done = run_module("benchmarks.compiled", "--quick", "--workloads", "loop", "--seconds", "0", "--only", "control")
    ((name, *figures),) = printed_rows(done)
    assert name == "plain loop again (control)"
    assert all(float(figure.replace(",", "")) > 0 for figure in figures[:3])
    assert figures[-1] == "3"  # turns, the fewest of which there are quartiles
    assert done.stdout.startswith("### The MLP, SGD\n")


def test_a_contender_takes_turns_with_the_loop_by_hand():
    found = run_contender.measure("ours, default without bar", "loop", True)
    assert found.keys() == {"cpu", "wall", "cpu of plain loop", "wall of plain loop"}
    assert all(seconds > 0 for seconds in found.values())


@pytest.mark.parametrize("contenders", [["plain loop"], ["plain loop, indexing tensors"], ["absent"]])
def test_a_table_may_have_few_contenders(tmp_path, monkeypatch, contenders):
    monkeypatch.setitem(CONTENDERS, "absent", lambda task, folder: __import__("a_package_that_is_absent"))
    options = ["--workloads", "loop", "--quick", "--rounds", "1", "--output", str(tmp_path)]

    def run(_module, name, workload, _mode):
        found = run_contender.measure(name, workload, True)
        return None if "missing" in found else found

    main([*options, "--contenders", *contenders], run)
    written = [path.read_text() for path in tmp_path.glob("loop.md")]
    assert len(written) == (contenders != ["plain loop, indexing tensors"])
    assert all(("not installed" in text) == (contenders == ["absent"]) for text in written)


def test_a_contender_that_makes_other_updates_is_refused(monkeypatch):
    monkeypatch.setitem(CONTENDERS, "lazy", lambda task, folder: lambda: None)
    with pytest.raises(RuntimeError, match="lazy made 0 updates instead of 20"):
        run_contender.measure("lazy", "loop", True)


def test_a_contender_that_trains_for_too_few_steps_is_refused(monkeypatch):
    def short(task, folder):
        tasks.append(task)
        return CONTENDERS["plain loop"](task if len(tasks) == 1 else replace(task, steps=5), folder)

    tasks = []

    monkeypatch.setitem(CONTENDERS, "short", short)
    with pytest.raises(RuntimeError, match="short made 5 steps instead of 20"):
        run_contender.measure("short", "loop", True)


@pytest.mark.parametrize("question", ["resume", "window", "unequal"])
def test_the_comparison_confirms_the_exactness_in_the_readme(question):
    assert comparison.answer(question, "ours")[""] < 1e-6
