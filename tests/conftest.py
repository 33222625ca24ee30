"""Fixtures: jobs of several processes, started once and used by many tests."""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from tests.launching import ROOT, SOAK, EarlyCopy, EarlyFork
from tests.rank_pool import RankPool
from tests.tasks import own_clock

COSTLY = ["job", "ancestors", "exchange", "fresh", "uninterrupted"]  # fixtures; the first that a test uses counts

EXTENSIONS = ROOT / "pytorch_accel_lite" / "extensions"
MEMORY = Path("/dev/shm")
ROOM = 2 * 2**30

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # these tests fork, and are about CPUs; those in gpu/ run without this file

with suppress(ModuleNotFoundError):  # few tests need it
    from hypothesis import HealthCheck, settings

    # No example fails because the machine was busy for a moment.
    settings.register_profile("no limits of time", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("no limits of time")


def pytest_configure() -> None:
    """Have temporary files in memory, if there is room: states are flushed to the disk file by file, which takes long.

    A ``TMPDIR`` of the environment is respected. Nor is time lost on names: torch asks for those of its own
    connections, and where questions are lost, each costs five seconds by default. Nor does MLflow tell anyone.
    """
    os.environ.setdefault("RES_OPTIONS", "timeout:1")
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    torch.set_num_threads(1)  # copies of this process could not use more
    if "TMPDIR" in os.environ or not os.access(MEMORY, os.W_OK):
        return
    found = os.statvfs(MEMORY)
    if found.f_bavail * found.f_frsize > ROOM and not found.f_flag & os.ST_NOEXEC:
        os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Take one worker more than there are cores, as many tests wait for processes that they have started."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let one worker of pytest-xdist have all that uses something that takes long to make: it is made once then."""
    for item in items:
        for name in [name for mark in item.iter_markers("extension") for name in mark.args]:
            if not (EXTENSIONS / name).exists():
                item.add_marker(pytest.mark.skip(reason=f"the extension {name!r} has been deleted"))
        used = getattr(item, "fixturenames", ())
        for name in [name for name in COSTLY if name in used][:1]:
            item.add_marker(pytest.mark.xdist_group(name))
        if "job" in used:
            item.add_marker(pytest.mark.processes)
            if "ranks" in used:
                item.add_marker(pytest.mark.soak)
        elif "fresh" in used or "uninterrupted" in used:
            item.add_marker(pytest.mark.programs)


def pytest_collection_finish() -> None:
    """Start autograd before a test does, leave what is imported to itself, and make the copy that forks jobs of ranks.

    If fake tensors, as ``torch.compile`` makes them, come before the first backward, torch takes them for a device and
    starts threads for it. Copies of this process could not train then.
    """
    torch.zeros((), requires_grad=True).backward()
    gc.collect()
    gc.freeze()  # no collection looks at it again
    EarlyFork.copy = EarlyCopy()


def pytest_sessionfinish() -> None:
    if hasattr(EarlyFork, "copy"):
        EarlyFork.copy.close()
    gc.unfreeze()  # modules that count what is left at the end complain otherwise


@pytest.fixture(autouse=True)
def _same_start() -> None:
    torch.set_num_threads(1)
    # torch.manual_seed notes the stack for each kind of device that is not in use, which takes three milliseconds here.
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)


@pytest.fixture(scope="session")
def job() -> Iterator[Callable[[int], RankPool]]:
    """Give the job with a number of processes; one that hung or died is replaced. All end in order."""
    jobs: dict[int, RankPool] = {}

    def of(world_size: int) -> RankPool:
        if world_size not in jobs or not jobs[world_size].is_usable:
            jobs[world_size] = RankPool(world_size)
        return jobs[world_size]

    yield of
    assert [pool.close() for pool in jobs.values() if pool.is_usable].count(0) == len(jobs)


@pytest.fixture(params=[2, 3] if SOAK else [3])
def ranks(request: pytest.FixtureRequest, job: Callable[[int], RankPool]) -> RankPool:
    """3 processes, which divide little evenly, and 2 with SOAK: ``ranks(case)`` is what a function gave on each."""
    return job(request.param)


@pytest.fixture
def two_ranks(job: Callable[[int], RankPool]) -> RankPool:
    """2 processes only."""
    return job(2)


@pytest.fixture
def spend() -> Iterator[Callable[[float], None]]:
    """Let seconds pass on a clock that stands still otherwise."""
    with own_clock() as spend:
        yield spend


@pytest.fixture
def naps(spend: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sleeping only moves that clock."""
    monkeypatch.setattr(time, "sleep", spend)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def no_accelerator() -> Iterator[None]:
    """A process without an accelerator: the first one fixes the settings of all others, such as mixed precision."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def scaled_accelerator(no_accelerator: None) -> Accelerator:
    """An accelerator with a real gradient scaler, which on a CPU Accelerate would not make by itself."""
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    accelerator.native_amp = True
    accelerator.state._mixed_precision = "fp16"
    return accelerator


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    """What is left would change later tests: hooks, settings of accelerators; copies of this process inherit groups."""
    yield
    if torch.distributed.is_initialized():  # parallelize_model makes a group of a single process
        torch.distributed.destroy_process_group()
    assert not any((_global_optimizer_pre_hooks, _global_optimizer_post_hooks)), "a hook of all optimizers is left"
    assert not torch.autograd._profiler_enabled(), "a profiler is left running"
    state = AcceleratorState._shared_state  # Accelerate keeps the settings of the first accelerator
    if state:
        left = state["_mixed_precision"], state["dynamo_plugin"].backend.value
        if left != ("no", "NO"):
            AcceleratorState._reset_state(reset_partial_state=True)
        assert left == ("no", "NO"), f"settings of an accelerator are left: {left}"
