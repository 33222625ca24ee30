"""Connections that are lost although no process has ended, at moments at which the supervisor is busy with a change."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from pytorch_accel_lite.extensions.takeover.job_store import Generation, JobStore, Key
from pytorch_accel_lite.extensions.takeover.surviving_ranks import SurvivingRanks
from tests.extensions.takeover.jobs import begin, end, kill

pytestmark = [pytest.mark.programs, pytest.mark.processes]
CONFIG: dict[str, Any] = {"samples": 803, "pause": 0.05}


def wait_for(mark: Path) -> None:
    while not mark.exists():
        time.sleep(0.001)


def lose_connection(monkeypatch: pytest.MonkeyPatch, name: str, mark: Path, when: Callable[[], bool]) -> None:
    """Make a function of ``torch.distributed`` fail once for lack of a connection, on rank 1."""
    original = getattr(dist, name)

    def call_or_fail(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if dist.get_rank() == 1 and not mark.exists() and when():
            mark.touch()
            raise RuntimeError("gloo: Connection closed by peer")
        return result

    monkeypatch.setattr(dist, name, call_or_fail)


def check_new_process_joins(folder: Path) -> None:
    job = begin(folder / "job", 3, "--replace", "--patience", "8", kills=kill(rank2="forward:3"), **CONFIG)
    outcome = end(job, folder / "job")
    assert outcome.code == 0, outcome.output
    assert "did nothing for 8 s" not in outcome.output
    assert [[left, came] for left, came, _ in outcome.changes] == [[[2], []], [[], [2]]]
    assert outcome.results == end(begin(folder / "whole", 1, samples=803), folder / "whole").results * 3


def test_a_newcomer_that_has_no_state_yet_is_not_waited_for(tmp_path, monkeypatch):
    """Its generation has begun when the connection is lost, and nobody is left in the one before to send the state."""

    def is_awaited() -> bool:
        return bool(SurvivingRanks.membership.store.latest().came)

    lose_connection(monkeypatch, "all_to_all_single", tmp_path / "lost", is_awaited)
    check_new_process_joins(tmp_path)


@pytest.mark.thorough
def test_a_newcomer_waits_until_lost_connections_are_made_again(tmp_path, monkeypatch):
    """It gets ready in the second for which the supervisor waits whether a process has ended."""
    put = JobStore.put

    def put_later(self: JobStore, key: Key, *args: Any) -> None:
        if key is Key.READY:
            (tmp_path / "ready").touch()
            wait_for(tmp_path / "lost")
            time.sleep(0.4)
        put(self, key, *args)

    monkeypatch.setattr(JobStore, "put", put_later)
    lose_connection(monkeypatch, "all_to_all_single", tmp_path / "lost", (tmp_path / "ready").exists)
    check_new_process_joins(tmp_path)


@pytest.mark.thorough
def test_a_failure_to_connect_is_noted_while_a_generation_begins(tmp_path, monkeypatch):
    """Both survivors fail before the supervisor has done all that belongs to the new generation."""
    publish = JobStore.publish

    def publish_slowly(self: JobStore, generation: Generation) -> None:
        publish(self, generation)
        if generation.number == 2:
            wait_for(tmp_path / "lost")
            time.sleep(1.0)

    monkeypatch.setattr(JobStore, "publish", publish_slowly)
    lose_connection(monkeypatch, "init_process_group", tmp_path / "lost", lambda: dist.get_world_size() == 2)
    outcome = end(begin(tmp_path / "job", 3, kills=kill(rank2="forward:3"), samples=203), tmp_path / "job")
    assert outcome.code == 0, outcome.output
    assert [written["changes"] for written in outcome.written] == [[[[2], [], 2]]] * 2
