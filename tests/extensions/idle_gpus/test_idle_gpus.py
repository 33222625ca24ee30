"""Choosing idle GPUs, as a program of the name nvidia-smi reports them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pytorch_accel_lite.utils import use_idle_gpus

BUSY = "0, GPU-a, 40000, 97, A\n1, GPU-b, 3, 0, A\n2, GPU-c, 3, 40, A\n3, GPU-d, 0, [N/A], A\n"
UNLIKE = BUSY.replace("97, A", "97, B")


@pytest.fixture(autouse=True)
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of this name that shows four GPUs, of which three are idle."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat {tmp_path}/gpus\n")
    program.chmod(0o755)
    (tmp_path / "gpus").write_text(BUSY)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    return program


def test_the_gpus_with_the_least_in_use_are_chosen():
    assert use_idle_gpus(2) == ["GPU-d", "GPU-b"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-d,GPU-b"
    assert use_idle_gpus() == ["GPU-d"]


@pytest.mark.parametrize("allowed", ["0, 2", "GPU-a,GPU-c", "2,-1,3", "2,9,3", "GPU-c,,3"])
def test_only_gpus_that_are_visible_are_chosen(allowed, monkeypatch):
    """Those before the first that is none, as CUDA has it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    assert use_idle_gpus() == ["GPU-c"]


def test_numbers_of_unlike_gpus_need_the_order_of_nvidia_smi(nvidia_smi, monkeypatch):
    (nvidia_smi.parent / "gpus").write_text(UNLIKE)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-c")
    assert use_idle_gpus() == ["GPU-c"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    with pytest.raises(RuntimeError, match=r"Set CUDA_DEVICE_ORDER=PCI_BUS_ID .*, or .* UUIDs"):
        use_idle_gpus()
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert use_idle_gpus() == ["GPU-c"]


@pytest.mark.parametrize(("gpus", "allowed"), [(BUSY, "GPU-"), (BUSY[: BUSY.index("1, ")], ""), (UNLIKE, "-1")])
def test_what_is_no_name_of_a_gpu_makes_none_visible(nvidia_smi, gpus, allowed, monkeypatch):
    (nvidia_smi.parent / "gpus").write_text(gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    with pytest.raises(RuntimeError, match="0 of 0 GPUs"):
        use_idle_gpus(max_used_mib=1e6)


def test_a_gpu_named_twice_is_chosen_once(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,GPU-b")
    with pytest.raises(RuntimeError, match="1 of 1 GPUs"):
        use_idle_gpus(2)


def test_too_few_idle_gpus_are_an_error_that_says_why():
    with pytest.raises(RuntimeError, match=r"count=4, but 3 of 4 GPUs .*GPU 0: 40000 MiB, 97 % busy"):
        use_idle_gpus(4)
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    with pytest.raises(RuntimeError, match="count=1, but 0 of 4"):
        use_idle_gpus(max_used_mib=-1)


def test_gpus_are_not_chosen_in_one_of_several_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="one of several processes"):
        use_idle_gpus()


def test_without_nvidia_smi_the_error_names_it(nvidia_smi, monkeypatch):
    nvidia_smi.unlink()
    monkeypatch.setenv("PATH", str(nvidia_smi.parent))
    with pytest.raises(RuntimeError, match=r"asks nvidia-smi for the GPUs, which failed"):
        use_idle_gpus()
