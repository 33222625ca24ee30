"""A run killed by SIGKILL resumes to the same bits: workers, pinned memory, augmentation, fp16, compiled."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.parts import ON_GPU, Program, sized
from tests.gpu.resumable import DIES_AFTER
from tests.launching import ROOT, environment
from tests.small_models import same_bits


def start(kind: str, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.gpu.resumable", kind, str(folder), *arguments]
    pipe = subprocess.PIPE
    return Program(command, env=environment(), cwd=ROOT, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def end(process: subprocess.Popen[str], expected: int) -> None:
    try:
        printed, _ = process.communicate(timeout=sized(100, 800))
    finally:
        process.kill()
    assert process.returncode == expected, printed[-3000:]


@pytest.mark.parametrize("kind", ["fp16", "compiled"] if ON_GPU else ["fp16"])
def test_a_killed_run_resumes_to_the_same_bits(kind, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    processes = start(kind, whole), start(kind, killed, str(DIES_AFTER))
    for process, expected in zip(processes, (0, -signal.SIGKILL), strict=True):
        end(process, expected)
    assert not (killed / "final.pt").exists()
    assert len(list((killed / "states").glob("update-*"))) >= 2
    end(start(kind, killed), 0)
    expected, found = (torch.load(folder / "final.pt", weights_only=False) for folder in (whole, killed))
    for name in expected:
        assert same_bits(found[name], expected[name]), name
    changes: dict[str, Any] = expected["scale"] or {}
    assert kind != "fp16" or changes["scale"] != 2.0**10  # the scale is not that of the start
