"""Jobs of several processes: the results of one process, stopping together, clean shutdown."""

from __future__ import annotations

import gc
import os
import pickle
import re
import runpy
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
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

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import SaveBestModelCallback, SaveTrainingStateCallback
from pytorch_accel_lite.checkpoint import verify_state
from pytorch_accel_lite.data.outputs import to_cpu
from pytorch_accel_lite.distributed.ranks import timeout_of
from tests.launching import (
    SOAK,
    TORCHRUN,
    in_forks,
    launch,
    launch_together,
    only_with_soak,
    run_elastic_script,
    run_script,
    two_are_enough,
)
from tests.ranks import rank as own_rank
from tests.ranks import shared_folder, world_size
from tests.sharded import create_model, fit, shard
from tests.small_models import adamw_trainer, float64_data, float64_model, largest_difference, weights


class Strange(nn.Module):
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


def _threads_and_descriptors() -> tuple[int, int]:
    gc.collect()  # takes long: a trainer and its callbacks refer to each other
    threads = []
    for _ in range(20):  # the system counts a thread for a moment after it was joined
        threads.append(len(os.listdir("/proc/self/task")))
        time.sleep(0.02)
    return min(threads), len(os.listdir("/proc/self/fd"))


class AddedOnOne(TrainerCallback):
    """A callback added on one rank only, whose barrier would hang."""

    def on_training_run_start(self, trainer, **kwargs):
        trainer.barrier()


ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]


ACCELERATE += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]


pytestmark = pytest.mark.processes


def gather() -> Any:
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
    for result in ranks(gather):
        assert torch.equal(result["ragged"], expected)
        assert torch.equal(result["padded"], expected)
        assert torch.equal(result["nested"]["a"], expected.float())
        assert torch.equal(result["nested"]["b"][0], torch.arange(n))
        assert torch.equal(result["empty"], torch.cat([torch.arange(rank) for rank in range(n)]))
        assert result["all empty"].shape == (0, 3)


def gather_unlike() -> dict[str, str]:
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
    for said in ranks(gather_unlike):
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
    for result in ranks(gather):
        pairs, row = result["without padding"]
        assert pairs.tolist() == [[rank, -1] for rank in range(n)]
        assert row.tolist() == [i - 10 + 10 * rank for rank in range(n) for i in range(rank + 1)]


def failures() -> Any:
    """The weights are written by the first process alone, where they cannot be."""
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
def test_an_error_on_one_rank_is_an_error_on_all(ranks):
    for rank, (*saving, pickling, gathering) in enumerate(ranks(failures)):
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


def trainers_in_turn() -> Any:
    """One trainer after another, each in a block of its own, as for folds of a cross-validation."""
    means = []
    for _ in range(2):
        model = float64_model()
        with adamw_trainer(model) as trainer:
            trainer.train(float64_data(12), 1)
            means.append(trainer.gather(torch.tensor([float(model[0].weight.detach().mean())])).tolist())
    return means


@two_are_enough
def test_a_trainer_can_follow_another_that_was_closed(ranks):
    for means in ranks(trainers_in_turn):
        assert len(means) == 2
        assert all(len(set(fold)) == 1 and len(fold) == ranks.world_size for fold in means)


def process_helpers() -> Any:
    from pytorch_accel_lite.utils import local_process_zero_first, local_process_zero_only, world_process_zero_only

    trainer = adamw_trainer(float64_model())
    folder = Path(trainer.broadcast_object(tempfile.mkdtemp()))

    def leave_a_file(name: str) -> list[str]:
        before = sorted(file.name for file in folder.iterdir())
        (folder / name).touch()
        return before

    results = {
        "local only": local_process_zero_only(lambda value: value)(own_rank() + 5),
        "world only": world_process_zero_only(lambda value: value)(own_rank() + 5),
        "first": local_process_zero_first(leave_a_file)(f"rank{own_rank()}"),
        "broadcast": trainer.broadcast_object({"rank": own_rank()}),
        "gathered": trainer.all_gather_object(("rank", own_rank())),
        "numbers": {
            reduce: trainer.tensor_to_numeric(torch.tensor([own_rank() + 1]), reduce)
            for reduce in (None, "sum", "mean", "max", "min")
        },
        "of unequal lengths": [
            trainer.tensor_to_numeric(torch.arange(own_rank() + 1.0), reduce) for reduce in ("sum", "mean", "max")
        ],
        "with an empty one": [
            trainer.tensor_to_numeric(torch.arange(1.0, own_rank() + 1.0), reduce) for reduce in ("sum", "max")
        ],
        "from the last": trainer.broadcast_object(own_rank(), source=dist.get_world_size() - 1),
    }
    pair = dist.new_group([0, 1])
    if own_rank() < 2:
        results["pair"] = trainer.all_gather_object(own_rank(), pair), trainer.broadcast_object(own_rank(), 1, pair)
    trainer.barrier()
    results["after the barrier"] = len(list(folder.iterdir()))
    trainer.barrier()
    return results


@pytest.mark.extension("pytorch_accelerated")
def test_processes_gather_broadcast_and_wait(ranks):
    n = ranks.world_size
    everyone = [f"rank{rank}" for rank in range(n)]
    for rank, result in enumerate(ranks(process_helpers)):
        assert result["local only"] == result["world only"] == (None if rank else 5)
        assert result["first"] == [] if rank == 0 else "rank0" in result["first"]
        assert result["broadcast"] == {"rank": 0}
        assert result["gathered"] == [("rank", other) for other in range(n)]
        assert result["numbers"] == {None: rank + 1, "sum": sum(range(n + 1)), "mean": (n + 1) / 2, "max": n, "min": 1}
        elements = [element for other in range(n) for element in range(other + 1)]
        assert result["of unequal lengths"] == [sum(elements), sum(elements) / len(elements), n - 1]
        positive = [element for element in elements if element]
        assert result["with an empty one"] == [sum(positive), n - 1]
        assert result["from the last"] == n - 1
        assert result.get("pair") == (([0, 1], 1) if rank < 2 else None)
        assert result["after the barrier"] == len(everyone)


def strange_buffers() -> tuple[dict[str, list[Any]], list[int]]:
    """The buffers after those of the first process have been copied to all, and what is between two of them."""
    module = Strange()
    adamw_trainer(float64_model()).sync_buffers(module)
    return {name: buffer.tolist() for name, buffer in module.named_buffers()}, module.around.tolist()


def test_buffers_of_any_kind_are_copied_from_the_first_process(ranks):
    for buffers, around in ranks(strange_buffers):
        assert buffers["sliced"] == [0, 2, 4, 6]
        assert around == [0, -1, 1, -1, 2, -1, 3, -1]
        assert buffers["turned"] == [[0, 3], [1, 4], [2, 5]]
        assert buffers["expanded"] == [0, 0, 0]
        for name in ("int16", "uint16", "bfloat16", "bool", "complex64"):
            assert buffers[f"of {name}"] == [1, 0], name


def errors_of_one() -> list[str]:
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


def test_errors_are_not_blamed_on_other_processes(ranks):
    for rank, (unsent, unsupported) in enumerate(ranks(errors_of_one)):
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


def sums_on_their_way() -> list[list[float]]:
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


def test_values_of_other_processes_are_awaited(ranks):
    for found in ranks(sums_on_their_way):
        assert found == [[ranks.world_size] * 2] * (ranks.world_size + 1)


def many_trainers() -> Any:
    """Threads and file descriptors after 3 and after 20 trainers that were made, trained, saved and dropped."""
    saved, counts = set(), []
    with shared_folder() as folder:
        for number in range(20):
            saving = SaveTrainingStateCallback(folder / f"states {number}", asynchronous=True)
            trainer = adamw_trainer(float64_model(), callbacks=[saving], seed=0)
            trainer.train(float64_data(8), 1, per_device_batch_size=2)
            saved.add(len(list((folder / f"states {number}").glob("update-*"))))
            del trainer, saving
            if number in (2, 19):
                counts.append(_threads_and_descriptors())
    return saved, counts


@pytest.mark.thorough
@two_are_enough
def test_trainers_leave_no_threads_and_no_open_files(ranks):
    for saved, (after_3, after_20) in ranks(many_trainers):
        assert saved == {1}
        # Fewer if something that an earlier function of this job has left ends meanwhile.
        assert all(now <= before for now, before in zip(after_20, after_3, strict=True)), (after_3, after_20)


def writers_side_by_side() -> Any:
    """Two savers write in the background at the same moments, and then a second trainer's."""
    found = []
    with shared_folder() as folder:
        for number in range(2):
            savers = [
                SaveTrainingStateCallback(folder / f"{number} {name}", 1, 1, max_checkpoints=None, asynchronous=True)
                for name in ("first", "second")
            ]
            trainer = adamw_trainer(float64_model(), callbacks=savers, seed=0)
            trainer.train(float64_data(24), 2, per_device_batch_size=2)
            paths = [path for saver in savers for path in saver.save_dir.glob("update-*")]
            found.append([verify_state(path)["world_size"] for path in paths])
        trainer.barrier()
    return found


@pytest.mark.thorough
@two_are_enough
def test_several_savers_can_write_in_the_background_at_once(ranks):
    for found in ranks(writers_side_by_side):
        states = 2 * 2 * 24 // (2 * ranks.world_size)
        assert found == [[ranks.world_size] * states] * 2


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


def test_training_in_a_notebook_on_two_processes(tmp_path):
    run_script("tests/scripts/notebook.py", str(tmp_path))
    results = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    assert [result["processes"] for result in results] == [2, 2]
    model = float64_model()
    kwargs = {"per_device_batch_size": 6, "train_dataloader_kwargs": {"shuffle": False}}
    adamw_trainer(model).train(float64_data(30), 2, **kwargs)
    assert all(largest_difference(result["weights"], weights(model)) < 1e-10 for result in results)


def test_a_failing_rank_ends_the_job_with_its_traceback():
    done = launch([*TORCHRUN, "2", "tests/scripts/failing_rank.py"], warm=True)
    assert done.returncode != 0
    assert "sample 7 cannot be read" in done.stderr
    assert "in __getitem__" in done.stderr
    assert "Root Cause" in done.stderr, done.stderr
    summary = done.stderr.split("Root Cause")[1]
    assert "sample 7 cannot be read" in summary
    assert "in __getitem__" in summary


@only_with_soak
@pytest.mark.parametrize("rank", "01")
@pytest.mark.parametrize("how", ["caught", "exits"])
def test_a_rank_that_leaves_a_run_by_sys_exit_ends_the_job(how, rank):
    """Also if it has caught its error, so that no traceback is printed."""
    done = launch([*TORCHRUN, "2", "tests/scripts/failing_rank.py", how, rank], warm="launcher")
    assert done.returncode != 0
    assert done.stdout.count("has caught: sample") >= (how == "caught")
    cause = done.stderr.split("Root Cause")[1]
    assert re.search(rf"rank +: {rank} .*\n.* exitcode +: 3 ", cause), done.stderr


def test_the_signal_that_killed_a_rank_is_the_root_cause():
    rarely = "--monitor-interval=1"  # the launcher looks at the ranks, which leaves the other the time to fail
    done = launch([*TORCHRUN, "2", rarely, "tests/scripts/failing_rank.py", "killed"], warm=True)
    assert "Signal 9 (SIGKILL)" in done.stderr.split("Root Cause")[1]


def unlike_calls() -> dict[str, str]:
    """The errors if the last rank has other datasets or callbacks, or makes another call."""
    from pytorch_accel_lite.callbacks import ModelEmaCallback

    data = float64_data(12)
    is_last = own_rank() == world_size() - 1

    def error_of(call: Callable[[Trainer], Any], callbacks: Sequence[Any] = (), seed: int | None = None) -> str:
        try:
            call(adamw_trainer(float64_model(), callbacks=callbacks, seed=seed))
        except ValueError as error:
            return str(error)
        return "no error"

    with shared_folder() as folder:
        average, best = ModelEmaCallback(save_path=None), SaveBestModelCallback(folder / "best.pt")
        states = SaveTrainingStateCallback(folder / "states")
        return {
            "eval_dataset": error_of(lambda t: t.train(data, 1, data if is_last else None)),
            "names": error_of(lambda t: t.evaluate({"a": data, "b": data} if is_last else {"a": data})),
            "states": error_of(lambda t: t.train(data, 1), [states] if is_last else []),
            "best": error_of(lambda t: t.train(data, 1, data), [] if is_last else [best]),
            "average": error_of(lambda t: t.train(data, 1, data), [] if is_last else [average]),
            "own": error_of(lambda t: t.train(data, 1), [AddedOnOne] if is_last else []),
            "order": error_of(lambda t: t.train(data, 1, data), [best, average] if is_last else [average, best]),
            "seed": error_of(lambda t: t.train(data, 1), [states], None if is_last else 0),
            "resumes": error_of(lambda t: t.train(data, 1, resume_from="latest" if is_last else None), [states]),
            "call": error_of(lambda t: t.predict(data) if is_last else t.evaluate(data)),
            "same": error_of(lambda t: t.train(data, 1, data), [average, best, AddedOnOne]),
        }


@pytest.mark.extension("model_ema")
def test_calls_that_differ_between_ranks_are_refused_on_all(ranks):
    last = ranks.world_size - 1
    differences = {
        "eval_dataset": f"eval_dataset='a dataset' on rank {last}, but eval_dataset=None on rank 0.",
        "names": f"eval_dataset=['a', 'b'] on rank {last}, but eval_dataset=['a'] on rank 0.",
        "states": f"callbacks=['SaveTrainingStateCallback'] on rank {last}, but callbacks=[] on rank 0.",
        "best": f"callbacks=[] on rank {last}, but callbacks=['SaveBestModelCallback'] on rank 0.",
        "average": f"callbacks=[] on rank {last}, but callbacks=['ModelEmaCallback'] on rank 0.",
        "own": f"callbacks=['AddedOnOne'] on rank {last}, but callbacks=[] on rank 0.",
        "order": f"callbacks=['SaveBestModelCallback', 'ModelEmaCallback'] on rank {last}, but callbacks=['Model",
        "seed": f"seed=None on rank {last}, but seed=0 on rank 0.",
        "resumes": f"call='train(resume_from=...)' on rank {last}, but call='train()' on rank 0.",
        "call": f"call='predict()' on rank {last}, but call='evaluate()' on rank 0.",
    }
    for result in ranks(unlike_calls):
        assert result.pop("same") == "no error"
        assert result.keys() == differences.keys()
        for name, said in result.items():
            assert said.startswith(differences[name]), said
            assert "Make the same calls on every process, with the same arguments and callbacks" in said


ALONE = {
    "evaluates": "rank 0: in evaluate(), called by",
    "predicts": "rank 1: in predict(), called by",
    "saves": "rank 0: in save_checkpoint(), called by",
    "gathers rows": "rank 1: in gather(), called by",
    "evaluates in a callback": "rank 0: in evaluate(), called by on_train_epoch_end of unlike_ranks.py",
    "gathers": "gather_for_metrics() waits for all processes in each step of an evaluation, but some have no",
    "updates, not in step 2": "Where a process has nothing to learn from, pass a loss of zero",
    "updates, not in step 3": "different calls|another process did not take part until the time limit",
}


# Those of a group wait for the limit together; every fourth case without SOAK.
@pytest.mark.soak
@pytest.mark.parametrize("cases", [[*ALONE][:4], [*ALONE][4:]] if SOAK else [[*ALONE][::4]])
def test_a_call_on_only_one_rank_is_named(cases):
    commands = [[*TORCHRUN, "2", "tests/scripts/unlike_ranks.py", case] for case in cases]
    for case, done in zip(cases, launch_together(commands, warm=True), strict=True):
        assert done.returncode != 0, case
        text = re.sub(r"\[rank\d\]:", " ", done.stderr)  # what notes wrap
        assert any(said in " ".join(text.split()) for said in ALONE[case].split("|")), done.stderr


def test_a_launch_that_accelerate_does_not_see_is_refused():
    done = run_elastic_script(2, "tests/scripts/refused.py")
    assert done.returncode == 0, done.stdout
    if done.stdout.count("made on 2 processes") == 2:
        pytest.skip("old versions of accelerate see the processes all the same")
    assert done.stdout.count("RuntimeError: The launcher started WORLD_SIZE=2 processes, but Accelerate sees 1") == 2
    assert "created before the trainer, by an Accelerator or a PartialState" in done.stdout


LAUNCHERS = {"torchrun": [*TORCHRUN, "2"], "accelerate": ACCELERATE}


@pytest.mark.extension("pytorch_accelerated")
@only_with_soak
@pytest.mark.parametrize("how", ["closed", "by itself"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launched_run_exits_with_0_however_it_is_closed(launcher, how):
    for _ in range(20):
        done = launch([*LAUNCHERS[launcher], "tests/scripts/short_run.py", how])
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("two processes: True") == (4 if how == "closed" else 2)
        assert sorted(re.findall(r"the first: (True|False)", done.stdout)) == ["False", "True"]


def run_as_script(path: str, *arguments: str) -> None:
    """As ``torchrun path arguments`` does."""
    before = sys.argv
    sys.argv = [path, *arguments]
    try:
        runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv = before


@pytest.mark.thorough
def test_the_first_example_runs_unchanged_on_two_processes(tmp_path, job):
    done = job(2).run(run_as_script, "examples/digits.py", "--epochs", "1", "--output", str(tmp_path))
    assert done.output.count("Test accuracy") == 1
    assert {file.name for file in tmp_path.iterdir()} == {"best_model.pt", "curves.png"}


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
