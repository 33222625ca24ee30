"""One process on NCCL, sharded, and two processes on one GPU by gloo train like the loop."""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import ranks
from tests.gpu.parts import DEVICE, ON_GPU, Program, Task, deterministic, plain_loop, sgd, sized
from tests.launching import CAN_SHARD, ROOT, TORCHRUN, environment

pytestmark = pytest.mark.xdist_group("processes")  # each job is started once
ALONE = ["plain", "fsdp2", "tensor_parallel", "evaluation_of_a_sharded_model"]
TOGETHER = ["ddp", "uneven_evaluation", "exchanged_objects", "logical_processes", "sharded_states"]
NEAR = 1e-4  # the order of sums
LIMIT = sized(100, 800)  # seconds of a job
NOT_POSSIBLE = ("Gloo", "gloo", "No backend type", "not implemented", "NotImplementedError", "unsupported")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@functools.cache
def results(processes: int) -> list[dict[str, tuple[Any, str | None]]]:
    """The results of each rank by case; for a job that hangs, those of its completed cases."""
    cases = ALONE if processes == 1 else TOGETHER
    changes = {} if ON_GPU else {"ACCELERATE_USE_CPU": "1"}
    launcher = [*TORCHRUN, str(processes), "-m"]
    if processes == 1:  # as a launcher would start it
        launcher = [sys.executable, "-m"]
        changes |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        changes |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "found"))
        command = [*launcher, "tests.gpu.ranks", file, *cases]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with Program(command, env=environment(**changes), cwd=ROOT, **pipes) as program:
            try:
                printed = "".join(program.communicate(timeout=LIMIT))
            except subprocess.TimeoutExpired as error:
                program.kill()
                printed = f"not done within {LIMIT} seconds:\n{(error.stderr or b'').decode()}"
        missing = None, f"this case was not reached:\n{printed[-3000:]}"
        found = [dict.fromkeys(cases, missing) for _ in range(processes)]
        for rank, by_case in enumerate(found):
            if os.path.exists(f"{file}.{rank}"):
                by_case.update(torch.load(f"{file}.{rank}", weights_only=False))
        return found


def each_rank(processes: int, case: str) -> list[Any]:
    found = []
    for by_case in results(processes):
        value, failure = by_case[case]
        assert failure is None, failure
        found.append(value)
    return found


@functools.cache
def by_hand() -> dict[str, torch.Tensor]:
    task = Task("transformer")
    model = task.model().to(DEVICE)
    plain_loop(model, sgd(model), task.loss, task.batches(ranks.BATCHES))
    return ranks.on_host(model.state_dict())


def far(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    assert first.keys() == second.keys()
    ours, theirs = (torch.cat([state[name].double().flatten() for name in sorted(first)]) for state in (first, second))
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("case", ["plain", "fsdp2", "tensor_parallel"])
def test_one_process_on_nccl_trains_like_the_loop(case):
    if not (ON_GPU or hasattr(torch.cpu.Stream, "record_event")):
        pytest.skip("sharding on a CPU needs a newer torch")
    (found,) = each_rank(1, case)
    assert far(found["weights"], by_hand()) < NEAR
    assert found["backend"] == ("nccl" if ON_GPU else found["backend"])


@CAN_SHARD
def test_a_sharded_model_is_evaluated_like_an_unsharded_one():
    (found,) = each_rank(1, "evaluation_of_a_sharded_model")
    task = Task("transformer")
    model = task.model().to(DEVICE)
    with torch.no_grad():
        losses = [task.loss(model(x.to(DEVICE)), y.to(DEVICE)) for x, y in task.batches(2)]
    assert found == pytest.approx(float(torch.stack(losses).mean()), rel=1e-4)


def test_two_processes_on_one_gpu_train_like_the_loop():
    first, second = each_rank(2, "ddp")
    assert far(first["weights"], second["weights"]) == 0
    assert far(first["weights"], by_hand()) < NEAR
    assert first["history"] == second["history"]


def test_two_processes_evaluate_each_sample_once():
    task = Task("transformer")
    model = task.model().to(DEVICE).eval()
    x, y = (tensor[: ranks.EVALUATED].to(DEVICE) for tensor in task.data(10).tensors)
    with torch.no_grad():
        outputs = model(x)
        loss = float(task.loss(outputs, y))
    for found, predicted in each_rank(2, "uneven_evaluation"):
        assert found == pytest.approx(loss, rel=1e-4)
        torch.testing.assert_close(predicted, outputs.cpu().float(), rtol=1e-2, atol=1e-3)


@pytest.mark.extension("logical")
def test_tensors_that_processes_exchange_arrive_on_the_cpu():
    for found in each_rank(2, "exchanged_objects"):
        assert found["equal"]
        assert found["trained"]
        assert set(found["devices"]) == {"cpu"}


def test_two_processes_give_the_bits_of_one_by_logical_processes():
    first, second = each_rank(2, "logical_processes")
    with deterministic():
        alone = ranks.case_logical_processes()
    for found in (first, second):
        assert found["history"] == alone["history"]
        assert far(found["weights"], alone["weights"]) == 0


@CAN_SHARD
def test_states_in_shards_resume_to_the_same_bits():
    failures = [by_case["sharded_states"][1] for by_case in results(2)]
    if ON_GPU and any(failure and any(word in failure for word in NOT_POSSIBLE) for failure in failures):
        pytest.skip(f"torch does not shard by gloo on a GPU: {str(failures[0] or failures[1]).splitlines()[-1]}")
    for whole, resumed in each_rank(2, "sharded_states"):
        assert far(whole["weights"], resumed["weights"]) == 0
        assert whole["history"] == resumed["history"]
