"""Gathering, broadcasting and waiting: what processes send each other, and errors in it."""

from __future__ import annotations

import pickle
import re
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch import nn
from torch.distributed._functional_collectives import all_reduce

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from pytorch_accel_lite.data.collected_outputs import to_cpu
from pytorch_accel_lite.distributed.ranks import timeout_of
from tests.launching import in_forks, two_are_enough
from tests.ranks import rank as own_rank
from tests.ranks import shared_folder, world_size
from tests.sharded import create_model, fit, shard
from tests.small_models import adamw_trainer, float64_model

pytestmark = pytest.mark.processes


class BuffersOfAllKinds(nn.Module):
    """Buffers that are views, that share their elements, or that have types which few libraries send."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sliced", torch.arange(8)[::2] + own_rank())
        self.around = torch.full((8,), -1)
        self.register_buffer("view", self.around[::2])
        self.view.copy_(torch.arange(4) + own_rank())
        self.register_buffer("turned", (torch.arange(6.0).view(2, 3) + own_rank()).T)
        self.register_buffer("expanded", torch.full((1,), float(own_rank())).expand(3))
        for dtype in (torch.int16, torch.uint16, torch.bfloat16, torch.bool, torch.complex64):
            self.register_buffer(f"of {str(dtype)[6:]}", torch.tensor([1 - own_rank(), 0]).to(dtype))
        self.register_buffer("large", torch.full((20_000,), float(own_rank())))
        with torch.inference_mode():
            self.register_buffer("of inference", torch.full((2,), own_rank()))


def gather_rows() -> Any:
    trainer = Trainer(float64_model(), None, None, callbacks=[])
    mine = torch.arange(own_rank() + 1) + 10 * own_rank()
    return {
        "ragged": trainer.gather(mine),
        "padded": trainer.gather(mine, padding_value=-1),
        "nested": trainer.gather({"a": mine.float(), "b": (torch.tensor(own_rank()),)}),
        "empty": trainer.gather(torch.arange(own_rank())),
        "all empty": trainer.gather(torch.ones(0, 3)),
        "without padding": trainer.gather((torch.tensor([[own_rank(), -1], [-1, -1]]), mine - 10), padding_value=-1),
    }


def test_gather_takes_tensors_of_unequal_length(ranks):
    n = ranks.world_size
    expected = torch.cat([torch.arange(rank + 1) + 10 * rank for rank in range(n)])
    for result in ranks(gather_rows):
        assert torch.equal(result["ragged"], expected)
        assert torch.equal(result["padded"], expected)
        assert torch.equal(result["nested"]["a"], expected.float())
        assert torch.equal(result["nested"]["b"][0], torch.arange(n))
        assert torch.equal(result["empty"], torch.cat([torch.arange(rank) for rank in range(n)]))
        assert result["all empty"].shape == (0, 3)


def errors_of_gathering_unlike_tensors() -> dict[str, str]:
    """The errors for tensors that differ between processes in more than their length."""
    trainer, said = Trainer(float64_model(), None, None, callbacks=[]), {}
    ones, is_first = torch.ones(2, 3), own_rank() == 0
    for name, mine in {
        "shape": ones if is_first else torch.ones(2, 5),
        "dimensions": ones if is_first else torch.ones(2),
        "type": ones if is_first else ones.double(),
        "second": [ones, ones if is_first else ones.int()],
        "keys": {"a" if is_first else "b": ones},
        "number": [ones] * (1 if is_first else 2),
    }.items():
        try:
            trainer.gather(mine)
        except ValueError as error:
            said[name] = str(error)
    return said


def test_gather_refuses_tensors_that_differ_beyond_their_length(ranks):
    for said in ranks(errors_of_gathering_unlike_tensors):
        assert re.search(
            r"float32 of shape \(3,\) on rank 0, but .*float32 of shape \(5,\) on rank 1. Only", said["shape"]
        )
        assert "float32 of shape () on rank 1. Only the number of rows" in said["dimensions"]
        assert "float64 of shape (3,) on rank 1" in said["type"]
        assert "int32 of shape (3,) on rank 1" in said["second"]
        assert re.search(r"'a'.* on rank 0, but .*'b'.* on rank 1. Only", said["keys"])
        assert re.search(r"\[\*\].* on rank 0, but .*\[\*, \*\].* on rank 1. Only", said["number"])


def test_gather_leaves_out_rows_that_are_padding(ranks):
    n = ranks.world_size
    for result in ranks(gather_rows):
        pairs, row = result["without padding"]
        assert pairs.tolist() == [[rank, -1] for rank in range(n)]
        assert row.tolist() == [i - 10 + 10 * rank for rank in range(n) for i in range(rank + 1)]


def errors_of_calls_that_fail_on_rank_0() -> list[str]:
    """The errors of saving where nothing can be saved, which rank 0 does alone, and of what cannot be sent."""
    trainer, said = adamw_trainer(float64_model()), []
    with shared_folder() as folder:
        file = folder / "file"
        file.touch()
        for action in (
            lambda: trainer.save_model(file / "model.safetensors"),
            lambda: trainer.save_checkpoint(file / "model.pt"),
            lambda: trainer.broadcast_object(lambda: None),
            lambda: trainer.gather(["text"]),
        ):
            try:
                action()
            except (OSError, TypeError, ValueError, AttributeError, pickle.PicklingError, RuntimeError) as error:
                said.append(f"{type(error).__name__}: {error}")
    return said


@two_are_enough
def test_an_error_of_rank_0_is_an_error_on_all(ranks):
    for rank, (*saving, pickling, gathering) in enumerate(ranks(errors_of_calls_that_fail_on_rank_0)):
        model, checkpoint = saving
        assert model.startswith("FileExistsError: " if rank == 0 else "OSError: Rank 0 failed: FileExistsError: ")
        assert checkpoint.startswith("ValueError: ")
        assert "which is not a folder" in checkpoint
        assert re.search("Can't (pickle|get) local object", pickling)  # as Python 3.13 has it
        assert pickling.startswith("RuntimeError: Rank 0 failed: ") == (rank > 0)
        assert gathering == "TypeError: gather() takes tensors, or nested lists, tuples and dicts of them, not 'text'."


def sparse_tensors_left() -> list[bool]:
    """Whether sparse tensors that were exchanged are still in memory after they have been dropped."""
    trainer = adamw_trainer(float64_model())
    references = []
    for layout in (torch.sparse_coo, torch.sparse_csr):
        gathered = trainer.all_gather_object(torch.eye(3).to_sparse(layout=layout))
        references += [weakref.ref(tensor) for tensor in gathered]
        assert all(torch.equal(tensor.to_dense(), torch.eye(3)) for tensor in gathered)
        del gathered
    return [reference() is not None for reference in references]


@two_are_enough
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_sparse_tensors_that_were_exchanged_are_freed(ranks):
    assert ranks(sparse_tensors_left) == [[False] * 4] * 2


def calls_of_the_first_process() -> Any:
    """What the decorators of pytorch-accelerated return, and the files that a function found when it was called."""
    from pytorch_accel_lite.utils import local_process_zero_first, local_process_zero_only, world_process_zero_only

    with shared_folder() as folder:

        def leave_a_file(name: str) -> list[str]:
            before = [file.name for file in folder.iterdir()]
            (folder / name).touch()
            return before

        return {
            "local only": local_process_zero_only(lambda value: value)(own_rank() + 5),
            "world only": world_process_zero_only(lambda value: value)(own_rank() + 5),
            "first": local_process_zero_first(leave_a_file)(f"rank{own_rank()}"),
        }


@pytest.mark.extension("pytorch_accelerated")
def test_a_function_runs_on_the_first_process_alone_or_first(ranks):
    for rank, result in enumerate(ranks(calls_of_the_first_process)):
        assert result["local only"] == result["world only"] == (None if rank else 5)
        assert result["first"] == [] if rank == 0 else "rank0" in result["first"]


def exchanged_objects() -> Any:
    trainer = adamw_trainer(float64_model())
    results = {
        "broadcast": trainer.broadcast_object({"rank": own_rank()}),
        "gathered": trainer.all_gather_object(("rank", own_rank())),
        "from the last": trainer.broadcast_object(own_rank(), source=world_size() - 1),
    }
    pair = dist.new_group([0, 1])
    if own_rank() < 2:
        results["pair"] = trainer.all_gather_object(own_rank(), pair), trainer.broadcast_object(own_rank(), 1, pair)
    return results


def test_objects_are_gathered_and_broadcast_in_any_group(ranks):
    n = ranks.world_size
    for rank, result in enumerate(ranks(exchanged_objects)):
        assert result["broadcast"] == {"rank": 0}
        assert result["gathered"] == [("rank", other) for other in range(n)]
        assert result["from the last"] == n - 1
        assert result.get("pair") == (([0, 1], 1) if rank < 2 else None)


def reduced_numbers() -> Any:
    trainer, n = adamw_trainer(float64_model()), own_rank() + 1
    return {
        "one each": {
            how: trainer.tensor_to_numeric(torch.tensor([n]), how) for how in (None, "sum", "mean", "max", "min")
        },
        "of unequal lengths": [trainer.tensor_to_numeric(torch.arange(1.0 * n), how) for how in ("sum", "mean", "max")],
        "with an empty one": [trainer.tensor_to_numeric(torch.arange(1.0, n), how) for how in ("sum", "max")],
    }


def test_numbers_are_reduced_over_the_elements_of_all_processes(ranks):
    n = ranks.world_size
    elements = [element for other in range(n) for element in range(other + 1)]
    for rank, result in enumerate(ranks(reduced_numbers)):
        assert result["one each"] == {None: rank + 1, "sum": sum(range(n + 1)), "mean": (n + 1) / 2, "max": n, "min": 1}
        assert result["of unequal lengths"] == [sum(elements), sum(elements) / len(elements), n - 1]
        assert result["with an empty one"] == [sum(elements), n - 1]


def files_after_a_barrier() -> int:
    trainer = adamw_trainer(float64_model())
    with shared_folder() as folder:
        if own_rank() == world_size() - 1:
            time.sleep(0.1)
        (folder / f"rank{own_rank()}").touch()
        trainer.barrier()
        return len(list(folder.iterdir()))


def test_a_barrier_waits_for_all_processes(ranks):
    assert ranks(files_after_a_barrier) == [ranks.world_size] * ranks.world_size


def buffers_after_sync() -> tuple[dict[str, list[Any]], list[int]]:
    """The buffers after those of the first process have been copied to all, and what is between two of them."""
    module = BuffersOfAllKinds()
    adamw_trainer(float64_model()).sync_buffers(module)
    return {name: buffer.tolist() for name, buffer in module.named_buffers()}, module.around.tolist()


def test_buffers_of_any_kind_are_copied_from_the_first_process(ranks):
    for buffers, around in ranks(buffers_after_sync):
        assert buffers["sliced"] == [0, 2, 4, 6]
        assert around == [0, -1, 1, -1, 2, -1, 3, -1]
        assert buffers["turned"] == [[0, 3], [1, 4], [2, 5]]
        assert buffers["expanded"] == [0, 0, 0]
        assert set(buffers["large"]) == set(buffers["of inference"]) == {0}
        for name in ("int16", "uint16", "bfloat16", "bool", "complex64"):
            assert buffers[f"of {name}"] == [1, 0], name


def errors_of_what_cannot_be_sent() -> list[str]:
    """What each process is told of an object that one cannot send, and of a buffer that none can."""
    trainer = Trainer(float64_model(), None, None, callbacks=[])
    module = nn.Module()
    module.register_buffer("sparse", torch.eye(2).to_sparse())
    calls = [
        lambda: trainer.all_gather_object(print if own_rank() else lambda: 0),
        lambda: trainer.sync_buffers(module),
    ]
    told = []
    for call in calls:
        try:
            call()
        except Exception as error:
            told.append(str(error))
        trainer.barrier()
    return told


def test_an_error_is_blamed_only_on_the_rank_that_made_it(ranks):
    for rank, (unsent, unsupported) in enumerate(ranks(errors_of_what_cannot_be_sent)):
        assert ("Rank 0 failed" in unsent) == (rank > 0)
        assert "pickle" in unsent
        assert "Sparse" in unsupported
        assert "has not called it" not in unsupported


def objects_of_any_length() -> list[tuple[Any, Any]]:
    """The objects sent and received: short, long on some or all processes, or missing."""
    trainer = Trainer(float64_model(), None, None, callbacks=[])
    found = []
    for lengths in ((0, 1, 2), (3000, 0, 5), (0, 70_000, 0), (5000, 9000, 1012), (1010, 1011, 1013)):
        of_all = [(number, "x" * length) for number, length in enumerate(lengths[: world_size()])]
        found.append((of_all, trainer.all_gather_object(of_all[own_rank()])))
    tensors = [torch.arange(2000) + other for other in range(world_size())]
    view = trainer.broadcast_object(torch.arange(100_000)[:10])
    assert view.untyped_storage().nbytes() < 1000  # not all that it is a view of
    found.append((tensors, trainer.all_gather_object(tensors[own_rank()])))
    return found


def test_objects_of_any_length_are_gathered_in_order(ranks):
    for found in ranks(objects_of_any_length):
        *texts, (tensors, gathered) = found
        assert all(given == received for given, received in texts)
        assert all(map(torch.equal, tensors, gathered))


def sums_used_before_the_last_rank_adds() -> list[list[float]]:
    """Sums of a value of each rank, sent and copied while the last rank has yet to contribute to them."""
    trainer = Trainer(float64_model(), None, None, callbacks=[])
    found: list[Any] = []
    for use in (trainer.all_gather_object, to_cpu):
        trainer.barrier()
        if own_rank() == world_size() - 1:
            time.sleep(0.3)
        found.append(use(all_reduce(torch.ones(2), "sum", dist.group.WORLD)))
    assert type(found[1]) is torch.Tensor
    return [tensor.tolist() for tensor in (*found[0], found[1])]


def test_sums_under_way_are_awaited_before_they_are_used(ranks):
    for found in ranks(sums_used_before_the_last_rank_adds):
        assert found == [[ranks.world_size] * 2] * (ranks.world_size + 1)


class CountsConversions:
    count = 0

    def __str__(self) -> str:
        self.count += 1
        return "text"


def conversions_to_print() -> int:
    value = CountsConversions()
    adamw_trainer(float64_model()).print(value)
    return value.count


@two_are_enough
def test_only_the_process_that_prints_converts_to_text(ranks):
    assert ranks(conversions_to_print) == [1] + [0] * (ranks.world_size - 1)


def timeouts_of_own_groups(folder: Path, timeout: timedelta) -> list[timedelta]:
    """How long a collective may take in each group that a trainer has made, in a job with such a timeout."""
    given = InitProcessGroupKwargs(backend="gloo", timeout=timeout)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[given])
    model = shard(create_model(), "tp")  # which makes groups of its own
    before = [*dist.distributed_c10d._world.pg_map]
    saving = SaveTrainingStateCallback(folder, asynchronous=True)
    fit(adamw_trainer(model, callbacks=[saving], accelerator=accelerator), "tp", epochs=1)
    return [timeout_of(group) for group in dist.distributed_c10d._world.pg_map if group not in before]


@pytest.mark.thorough
@pytest.mark.extension("sharding")
@pytest.mark.processes
def test_custom_process_groups_take_the_timeout_of_the_job(tmp_path):
    def fork(rank):
        found = timeouts_of_own_groups(tmp_path / "states", timedelta(seconds=77))
        # For control and in the background; of those that share batches, and two of those that do not.
        assert found == [timedelta(seconds=77)] * 5, found

    assert in_forks(fork, tmp_path / "output", 2) == [0, 0], (tmp_path / "output").read_text()
