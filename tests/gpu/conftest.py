"""Fixtures of the GPU tests, which run without those of the other tests, as these fork the process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.parts import ON_GPU, REHEARSES, forget_accelerators, free_memory

HERE = Path(__file__).parent
RUNS = ON_GPU or REHEARSES
if not ON_GPU:  # forks of this process train, too
    torch.set_num_threads(1)
    torch.zeros((), requires_grad=True).backward()


@pytest.hookimpl(tryfirst=True)  # before pytest looks for the mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests in this folder; skip them where there is neither a GPU nor a rehearsal.

    A rehearsal runs the last case of each test; all with SOAK.
    """
    own = [item for item in items if HERE in item.path.parents]
    cases: dict[str, list[pytest.Item]] = {}
    for item in own:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
        item.add_marker(pytest.mark.gpu)
        if not RUNS:
            item.add_marker(pytest.mark.skip(reason="needs a GPU: make gpu (ARGS=--rehearse on a CPU)"))
    if REHEARSES and not ON_GPU and not os.environ.get("SOAK"):
        left_out = {item for of_test in cases.values() for item in of_test if item is not of_test[-1]}
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def _on_its_own(request: pytest.FixtureRequest) -> Iterator[None]:
    """Reset settings, process groups and memory after each test."""
    if not RUNS:
        yield
        return
    forget_accelerators()
    torch.manual_seed(0)
    yield
    if ON_GPU:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.set_per_process_memory_fraction(1.0)
    torch.use_deterministic_algorithms(False)
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # torch counts what it compiles of a function for all tests together
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    forget_accelerators()
    free_memory()


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Note figures, which the table of all results shows."""

    def note(**figures: float) -> None:
        for name, value in figures.items():
            record_property(name, f"{value:.4g}")

    return note
