"""The command for machines with a GPU, where there is none: what it runs, that no part stops another, what it writes.

`make gpu ARGS=--rehearse`, which CI runs, tries the tests and benchmarks themselves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import __main__ as command
from tests.gpu.page import NOTHING, page, summary
from tests.launching import ROOT

MACHINE = {"device": "NVIDIA H100 80GB HBM3", "cuda": "13.0", "python": "3.12.3", "torch": "2.11.0", "on_gpu": True}
ROW = {
    "workload": "gpu_tiny",
    "contender": "ours, default",
    "compiled": False,
    "ratios": [0.99, 1.0, 1.01],
    "event": 100e-6,
    "event of plain loop": 101e-6,
    "cpu": 90e-6,
    "cpu of plain loop": 90e-6,
    "synchronisations": 0.0,
    "first synchronisation": "",
}
TEST = {"name": "test_states::test_flat", "outcome": "passed", "reason": "", "seconds": 1.0, "figures": {"mib": "3"}}


def results(**changes: Any) -> dict[str, Any]:
    failed = TEST | {"name": "test_x::test_y", "outcome": "failed", "reason": "E a | b", "figures": {}}
    parts = [{"name": "tests", "outcome": "exit code 1", "seconds": 9.0}]
    rows = [ROW, ROW | {"contender": "Lightning", "ratios": [2.0, 2.0, 2.0]}]
    rows.append({"workload": "gpu_gpt", "contender": "ours, bare", "compiled": True, "failed": "OutOfMemoryError: x"})
    found = {"rehearsal": False, "date": "2026-01-02", "machine": MACHINE, "parts": parts, "seconds": 60.0}
    return found | {"tests": [TEST, failed], "benchmarks": rows} | changes


def test_the_gpu_page_lists_what_has_run():
    text = (ROOT / "docs" / "results" / "gpu.md").read_text()
    assert text == NOTHING or text.startswith("Measured on one ")


def test_the_page_and_the_last_table_show_outcomes_and_ratios():
    shown = page(results())
    assert shown.startswith(
        "Measured on one NVIDIA H100 80GB HBM3 on 2026-01-02: CUDA 13.0, Python 3.12.3, torch 2.11.0."
    )
    assert "1 passed, 1 failed, 0 skipped" in shown
    assert "| `test_x::test_y` | E a \\| b |" in shown
    assert "| `test_states::test_flat` | mib 3 |" in shown
    assert "| ours, default | 1.0000 (0.9900 to 1.0100) | -1.0 | 1.000 | 0 |" in shown
    assert "| ours, bare, compiled | failed: OutOfMemoryError: x | | | |" in shown
    last = summary(results())
    assert "FAILED test_x::test_y: E a | b" in last
    assert "gpu_tiny, Lightning: 2.0000 of the plain loop" in last
    assert command.has_failed(results())
    assert page(results(rehearsal=True)).startswith(NOTHING)


def test_missing_results_are_a_failure():
    parts = [{"name": "tests", "outcome": "passed", "seconds": 1.0}]
    assert not command.has_failed(results(tests=[TEST], benchmarks=[ROW], parts=parts))
    assert command.has_failed(results(tests=[TEST], benchmarks=[], parts=parts))


@pytest.mark.thorough
def test_a_hanging_part_is_killed_and_the_others_run(tmp_path, monkeypatch, capsys):
    hangs = (
        "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('hangs', flush=True); time.sleep(99)"
    )
    commands = {"benchmark a": hangs, "tests": "print('tried')", "benchmark b": "raise SystemExit(3)"}
    monkeypatch.setattr(command, "PATIENCE", 0.2)
    parts = [command.Part(name, [sys.executable, "-c", code], 5.0) for name, code in commands.items()]
    monkeypatch.setattr(command, "parts", lambda *_: parts)
    done = command.run_parts(True, tmp_path, time.monotonic() + 60)
    assert [part["outcome"] for part in done] == ["ended after its 5 seconds", "passed", "exit code 3"]
    assert [part["output"].strip() for part in done] == ["hangs", "tried", ""]
    assert "benchmark b: exit code 3" in capsys.readouterr().out


@pytest.mark.parametrize("rehearses", [False, True])
def test_all_parts_fit_into_eight_minutes(rehearses, tmp_path):
    parts = command.parts(rehearses, tmp_path)
    limits = [part.seconds for part in parts if not part.ahead]
    assert rehearses or sum(limits) <= 480
    assert all(Path(part.command[0]) == Path(sys.executable) for part in parts)
    variables = command.environment(rehearses, tmp_path)
    assert ("REHEARSE_GPU_TESTS" in variables) == rehearses
    assert variables.get("CUDA_VISIBLE_DEVICES") == ("" if rehearses else os.environ.get("CUDA_VISIBLE_DEVICES"))


def test_results_of_an_aborted_part_are_kept(tmp_path):
    output = "\n".join(
        [
            "[gw0] [ 10%] PASSED tests/gpu/test_states.py::test_flat ",
            "[gw1] [ 20%] FAILED tests/gpu/test_x.py::test_y[a b] ",
            "tests/gpu/test_z.py::test_not_yet ",
        ]
    )
    rows = "\n".join(["noise", json.dumps(ROW), '{"workload": "gpu_ti'])
    done = [{"name": "tests", "output": output}, {"name": "benchmark gpu_tiny", "output": rows}]
    outcomes = [(test["name"], test["outcome"]) for test in command.read_tests(tmp_path, done)]
    assert outcomes == [("test_states::test_flat", "passed"), ("test_x::test_y[a", "failed")]
    assert command.read_benchmarks(done) == [ROW]
    inner = '<properties><property name="ratio" value="1"/></properties><failure message="first&#10;second"/>'
    case = f'<testcase classname="tests.gpu.test_a" name="test_b" time="1.5">{inner}</testcase>'
    (tmp_path / "tests.xml").write_text(f"<testsuites><testsuite>{case}</testsuite></testsuites>")
    (found, *_) = command.read_tests(tmp_path, [])
    assert found["name"] == "test_a::test_b"
    assert (found["outcome"], found["reason"], found["figures"]) == ("failed", "first", {"ratio": "1"})
    command.write(tmp_path, tmp_path, results(), [part | {"outcome": "passed"} for part in done])
    assert {path.name for path in tmp_path.iterdir()} == {"gpu.json", "gpu.md", "log.txt", "tests.xml"}


@pytest.mark.thorough
@pytest.mark.programs
def test_without_a_gpu_it_says_how_to_rehearse(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu", "--output", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "torch finds no CUDA device here. make gpu ARGS=--rehearse" in done.stderr
