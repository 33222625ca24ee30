"""Fixtures: jobs of several processes, started once and used by many tests."""

from __future__ import annotations

import atexit
import ctypes
import gc
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.data import Dataset

from tests.launching import ROOT, SOAK, EarlyCopy, EarlyFork
from tests.networks import two_machines
from tests.rank_pool import RankPool
from tests.small_models import fake_clock

# Fixtures that take long to create.
EXPENSIVE = [
    "job",
    "ancestor_schedules",
    "exchanged_files",
    "fresh_interpreter",
    "offered_completions",
    "runs",
    "uninterrupted_logs",
    "uninterrupted_run",
]
OF_PROGRAMS = {"fresh_interpreter", "uninterrupted_logs", "uninterrupted_run"}  # fixtures that run one

EXTENSIONS = ROOT / "pytorch_accel_lite" / "extensions"
MEMORY = Path("/dev/shm")
LONGEST_ID = 80  # of a value of a parametrised test
HUGE = 1 << 21  # bytes of a huge page
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25  # of Linux
ROOM = 2 * 2**30

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # these tests fork and use CPUs only; gpu/ has its own conftest.py

with suppress(ModuleNotFoundError):  # few tests need it
    from hypothesis import HealthCheck, settings

    # A busy machine must not fail an example.
    settings.register_profile("no limits of time", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("no limits of time")


class Imported:
    """What was imported when objects were frozen last."""

    modules = 0  # their number


def _nothing_to_seed(seed: int) -> None:
    """Replaces ``manual_seed_all()`` of devices that are not there."""


def pytest_configure() -> None:
    """Put temporary files in memory if there is room, as syncing training states to a disk is slow.

    ``TMPDIR`` takes precedence. Shorten DNS timeouts, as torch looks up its own host. Disable MLflow's telemetry.
    """
    gc.disable()  # until all is imported: nothing of it is garbage
    os.environ.setdefault("RES_OPTIONS", "timeout:1")
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    logging.getLogger().addHandler(logging.NullHandler())  # otherwise, warnings of loggers would be printed
    for devices in (torch.cuda, torch.xpu, torch.mtia):
        if not devices.is_available():  # torch would keep a stack trace of each call, which takes a millisecond
            devices.manual_seed_all = _nothing_to_seed  # type: ignore[attr-defined]
    torch.set_num_threads(1)  # forks of this process cannot use more
    if "TMPDIR" in os.environ or not os.access(MEMORY, os.W_OK):
        return
    found = os.statvfs(MEMORY)
    if found.f_bavail * found.f_frsize > ROOM and not found.f_flag & os.ST_NOEXEC:
        os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Use one worker more than there are cores, as many tests wait for child processes."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group the tests that share an expensive fixture on one worker of pytest-xdist, so that it is created once."""
    for item in items:
        for name in [name for mark in item.iter_markers("extension") for name in mark.args]:
            if not (EXTENSIONS / name).exists():
                item.add_marker(pytest.mark.skip(reason=f"the extension {name!r} has been deleted"))
        if item.get_closest_marker("sampled") and _is_left_out(item):
            item.add_marker(pytest.mark.thorough)
        used = getattr(item, "fixturenames", ())
        for name in [name for name in EXPENSIVE if name in used][:1]:
            item.add_marker(pytest.mark.xdist_group(name))
        if "job" in used:
            item.add_marker(pytest.mark.processes)
            if "ranks" in used:
                item.add_marker(pytest.mark.soak)
        elif OF_PROGRAMS.intersection(used):
            item.add_marker(pytest.mark.programs)


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name a case by its value, where pytest would number it: ``[3, 2]-{'keep': 1}``, not ``script0-arguments0``."""
    match val:
        case partial():
            given = [*map(repr, val.args), *(f"{name}={value!r}" for name, value in val.keywords.items())]
            return f"{val.func.__name__}({', '.join(given) if _is_plain([val.args, val.keywords]) else '...'})"
        case list() | tuple() | dict() if _is_plain(val) and len(text := str(val)) <= LONGEST_ID:
            return text
        case dict():
            return ", ".join(map(str, val))
        case BaseException() | Dataset() | nn.Module():
            return type(val).__name__
        case torch.dtype():
            return str(val).removeprefix("torch.")
    return None


def _is_plain(value: object) -> bool:
    """Whether each process writes the value in the same words: it has no set and no address."""
    match value:
        case list() | tuple():
            return all(map(_is_plain, value))
        case dict():
            return all(map(_is_plain, (*value, *value.values())))
    return value is None or isinstance(value, str | int | float)


def _is_left_out(item: pytest.Item) -> bool:
    """Whether a case is not one of every third; by nothing but the case itself, as those that fail are tried again."""
    found: dict[str, int] = item.callspec.indices  # type: ignore[attr-defined]
    return sum({*found.values()}) % 3 != 0


def pytest_collection_finish() -> None:
    """Start autograd, freeze the garbage collector's view of imported objects, and create the fork server of jobs.

    If fake tensors, as in ``torch.compile``, precede the first backward pass, torch starts device threads for them, and
    forks of this process cannot train.
    """
    torch.zeros((), requires_grad=True).backward()
    gc.enable()
    gc.set_threshold(20_000, 10, 10)  # collect less often than by default
    gc.collect()
    gc.freeze()  # later collections skip what exists now
    Imported.modules = len(sys.modules)
    _use_huge_pages()
    EarlyFork.copy = EarlyCopy()


def pytest_runtest_logfinish() -> None:
    """Freeze what a test has imported, or each later collection, as of errors of memory, would go through it."""
    if len(sys.modules) > Imported.modules + 200:
        gc.collect()
        gc.freeze()
        Imported.modules = len(sys.modules)


def _use_huge_pages() -> None:
    """Move the memory of this process to huge pages, where Linux can: a fork then takes 20 ms less, and ends 30 sooner.

    A fork copies the page table, which for what the tests import has 200,000 entries.
    """
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    maps = Path("/proc/self/maps")
    if advise is None or not maps.exists():
        return
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for addresses, permissions, _, _, _, *path in map(str.split, maps.read_text().splitlines()):
        begin, end = (int(address, 16) for address in addresses.split("-"))
        begin, end = -(-begin // HUGE) * HUGE, end // HUGE * HUGE
        if begin < end and permissions == "rw-p" and path in ([], ["[heap]"]):
            advise(begin, end - begin, MADV_HUGEPAGE)
            advise(begin, end - begin, MADV_COLLAPSE)


def pytest_sessionfinish() -> None:
    if hasattr(EarlyFork, "copy"):
        EarlyFork.copy.close()
    # Later, as pytest collects garbage several times before it ends. A worker of pytest-xdist has reported all by then.
    atexit.register(_free_all if "PYTEST_XDIST_WORKER" not in os.environ else _exit_at_once)


def _exit_at_once() -> None:
    """End this process, as freeing one by one what the tests have imported takes seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _free_all() -> None:
    """Free what is garbage, for modules that count leaked objects at exit."""
    gc.unfreeze()
    gc.collect()


@pytest.fixture(autouse=True)
def _same_start() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def job() -> Iterator[Callable[[int], RankPool]]:
    """Return the job with a number of processes, created once; one that hung or died is replaced."""
    jobs: dict[int, RankPool] = {}

    def of(world_size: int) -> RankPool:
        if world_size not in jobs or not jobs[world_size].is_usable:
            jobs[world_size] = RankPool(world_size)
        return jobs[world_size]

    yield of
    assert [pool.close() for pool in jobs.values() if pool.is_usable].count(0) == len(jobs)


@pytest.fixture(params=[2, 3] if SOAK else [3])
def ranks(request: pytest.FixtureRequest, job: Callable[[int], RankPool]) -> RankPool:
    """A job of 3 processes (with SOAK also 2): ``ranks(case)`` returns the results of a function on each rank."""
    return job(request.param)


@pytest.fixture
def two_ranks(job: Callable[[int], RankPool]) -> RankPool:
    """A job of 2 processes."""
    return job(2)


@pytest.fixture
def pass_time() -> Iterator[Callable[[float], None]]:
    """Advance the fake clock of ``time.perf_counter``."""
    with fake_clock() as pass_time:
        yield pass_time


@pytest.fixture
def sleep_passes_time(pass_time: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``time.sleep`` advance the fake clock."""
    monkeypatch.setattr(time, "sleep", pass_time)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def network() -> Iterator[None]:
    """Two network namespaces with a cable between them, as two machines."""
    with two_machines():
        yield


@pytest.fixture
def no_accelerator() -> Iterator[None]:
    """Reset Accelerate's shared state, as the first accelerator fixes settings such as mixed precision."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def scaled_accelerator(no_accelerator: None) -> Accelerator:
    """An accelerator with a gradient scaler, which Accelerate does not create on a CPU."""
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    accelerator.native_amp = True
    accelerator.state._mixed_precision = "fp16"
    return accelerator


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    """Fail a test that leaks hooks, profilers or accelerator settings; destroy leaked process groups."""
    yield
    if torch.distributed.is_initialized():  # created by parallelize_model
        torch.distributed.destroy_process_group()
    assert not any((_global_optimizer_pre_hooks, _global_optimizer_post_hooks)), "a hook of all optimizers is left"
    assert not torch.autograd._profiler_enabled(), "a profiler is left running"
    state = AcceleratorState._shared_state  # Accelerate keeps the settings of the first accelerator
    if state:
        left = state["_mixed_precision"], state["dynamo_plugin"].backend.value
        if left != ("no", "NO"):
            AcceleratorState._reset_state(reset_partial_state=True)
        assert left == ("no", "NO"), f"settings of an accelerator are left: {left}"
