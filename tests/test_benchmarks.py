"""The benchmarks run, and compare what they say they compare. No time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.launching import ROOT, environment


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("workload", "contenders"),
    [
        ("tensors", ["by hand, indexing tensors", "ours, default without bar"]),
        ("evaluation", ["by hand", "ours"]),
        ("memory", ["by hand", "ours"]),
        ("callbacks", ["GradientNormCallback", "all together"]),
        ("gpu_resnet", ["by hand", "ours"]),
        ("gpu_transformer", ["by hand", "ours, compiled"]),
    ],
)
def test_a_benchmark_writes_a_table_and_its_figures(tmp_path, workload, contenders):
    options = ["--workloads", workload, "--quick", "--rounds", "1", "--output", str(tmp_path)]
    done = run("-m", "benchmarks", *options, "--contenders", *contenders)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / f"{workload}.json").read_text())
    rows = (tmp_path / f"{workload}.md").read_text().splitlines()
    for name, rounds in figures["rounds"].items():
        assert len(rounds) == 1
        assert any(row.startswith(f"| {name} |") for row in rows)
    assert {figures["reference"], *contenders} <= figures["rounds"].keys()
    assert figures["machine"]["torch"]


def test_the_parts_of_a_step_are_those_of_both_loops():
    done = run("-m", "benchmarks.gaps", "--quick", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1:3] for line in done.stdout.splitlines()[2:]]
    assert [name.strip() for name, _ in rows][:3] == ["forward pass", "forward pass to loss", "loss"]
    assert all(float(by_hand) > 0 for _, by_hand in rows)


def test_a_contender_that_makes_other_updates_is_refused():
    code = (
        "import benchmarks.worker as w; from benchmarks.contenders import CONTENDERS\n"
        "CONTENDERS['lazy'] = lambda task, folder: lambda: None\n"
        "w.measure('lazy', 'loop', True)"
    )
    done = run("-c", code)
    assert "lazy made 0 updates instead of 20" in done.stderr
