"""Helpers for several processes, and what trainers leave behind."""

from __future__ import annotations

import gc
import os
import pickle
import runpy
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import ModelEmaCallback, SaveBestModelCallback, SaveTrainingStateCallback
from pytorch_accel_lite.checkpoint import verify_state
from pytorch_accel_lite.utils import local_process_zero_first, local_process_zero_only, world_process_zero_only
from tests.cases.common import rank, shared_folder, world_size
from tests.tasks import quiet_trainer, regression_data, small_model


def gather() -> Any:
    trainer = Trainer(small_model(), None, None, callbacks=[])
    mine = torch.arange(rank() + 1) + 10 * rank()
    return {
        "ragged": trainer.gather(mine),
        "padded": trainer.gather(mine, padding_value=-1),
        "nested": trainer.gather({"a": mine.float(), "b": (torch.tensor(rank()),)}),
        "empty": trainer.gather(torch.arange(rank())),
        "all empty": trainer.gather(torch.ones(0, 3)),
        "without padding": trainer.gather((torch.tensor([[rank(), -1], [-1, -1]]), mine - 10), padding_value=-1),
    }


def gather_unlike() -> dict[str, str]:
    """What is said of tensors that differ in more than their length between the first process and the others."""
    trainer, said = Trainer(small_model(), None, None, callbacks=[]), {}
    ones, is_first = torch.ones(2, 3), rank() == 0
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


def failures() -> Any:
    """The weights are written by the first process alone, where they cannot be."""
    trainer, said = quiet_trainer(small_model()), []
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
            except (OSError, TypeError, AttributeError, pickle.PicklingError, RuntimeError) as error:
                said.append(f"{type(error).__name__}: {error}")
    return said


class Strange(nn.Module):
    """Buffers that are views, that share their elements, or that have types which few libraries send."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sliced", torch.arange(8)[::2] + rank())
        self.around = torch.full((8,), -1)
        self.register_buffer("view", self.around[::2])
        self.view.copy_(torch.arange(4) + rank())
        self.register_buffer("turned", (torch.arange(6.0).view(2, 3) + rank()).T)
        self.register_buffer("expanded", torch.full((1,), float(rank())).expand(3))
        for dtype in (torch.int16, torch.uint16, torch.bfloat16, torch.bool, torch.complex64):
            self.register_buffer(f"of {str(dtype)[6:]}", torch.tensor([1 - rank(), 0]).to(dtype))


def strange_buffers() -> tuple[dict[str, list[Any]], list[int]]:
    """The buffers after those of the first process have been copied to all, and what is between two of them."""
    module = Strange()
    quiet_trainer(small_model()).sync_buffers(module)
    return {name: buffer.tolist() for name, buffer in module.named_buffers()}, module.around.tolist()


def process_helpers() -> Any:
    trainer = quiet_trainer(small_model())
    folder = Path(trainer.broadcast_object(tempfile.mkdtemp()))

    def leave_a_file(name: str) -> list[str]:
        before = sorted(file.name for file in folder.iterdir())
        (folder / name).touch()
        return before

    results = {
        "local only": local_process_zero_only(lambda value: value)(rank() + 5),
        "world only": world_process_zero_only(lambda value: value)(rank() + 5),
        "first": local_process_zero_first(leave_a_file)(f"rank{rank()}"),
        "broadcast": trainer.broadcast_object({"rank": rank()}),
        "gathered": trainer.all_gather_object(("rank", rank())),
        "numbers": {
            reduce: trainer.tensor_to_numeric(torch.tensor([rank() + 1]), reduce)
            for reduce in (None, "sum", "mean", "max")
        },
    }
    trainer.barrier()
    results["after the barrier"] = len(list(folder.iterdir()))
    trainer.barrier()
    return results


def objects_of_any_length() -> list[tuple[Any, Any]]:
    """What all processes give, and what each gets: short, long on one process or another, long on all, and neither."""
    trainer = Trainer(small_model(), None, None, callbacks=[])
    found = []
    for lengths in ((0, 1, 2), (3000, 0, 5), (0, 70_000, 0), (5000, 9000, 1012), (1010, 1011, 1013)):
        of_all = [(number, "x" * length) for number, length in enumerate(lengths[: world_size()])]
        found.append((of_all, trainer.all_gather_object(of_all[rank()])))
    tensors = [torch.arange(2000) + other for other in range(world_size())]
    view = trainer.broadcast_object(torch.arange(100_000)[:10])
    assert view.untyped_storage().nbytes() < 1000  # not all that it is a view of
    found.append((tensors, trainer.all_gather_object(tensors[rank()])))
    return found


def trainers_in_turn() -> Any:
    """One trainer after another, each in a block of its own, as for folds of a cross-validation."""
    means = []
    for _ in range(2):
        model = small_model()
        with quiet_trainer(model) as trainer:
            trainer.train(regression_data(12), 1)
            means.append(trainer.gather(torch.tensor([float(model[0].weight.detach().mean())])).tolist())
    return means


def _threads_and_descriptors() -> tuple[int, int]:
    gc.collect()  # takes long: a trainer and its callbacks refer to each other
    threads = []
    for _ in range(20):  # the system counts a thread for a moment after it was joined
        threads.append(len(os.listdir("/proc/self/task")))
        time.sleep(0.02)
    return min(threads), len(os.listdir("/proc/self/fd"))


def many_trainers() -> Any:
    """Threads and file descriptors after 3 and after 50 trainers that were made, trained, saved and dropped."""
    saved, counts = set(), []
    with shared_folder() as folder:
        for number in range(50):
            saving = SaveTrainingStateCallback(folder / f"states {number}", asynchronous=True)
            trainer = quiet_trainer(small_model(), callbacks=[saving], seed=0)
            trainer.train(regression_data(8), 1, per_device_batch_size=2)
            saved.add(len(list((folder / f"states {number}").glob("update-*"))))
            del trainer, saving
            if number in (2, 49):
                counts.append(_threads_and_descriptors())
    return saved, counts


def writers_side_by_side() -> Any:
    """Two savers write in the background at the same moments, and then a second trainer's."""
    found = []
    with shared_folder() as folder:
        for number in range(2):
            savers = [
                SaveTrainingStateCallback(folder / f"{number} {name}", 1, 1, max_checkpoints=None, asynchronous=True)
                for name in ("first", "second")
            ]
            trainer = quiet_trainer(small_model(), callbacks=savers, seed=0)
            trainer.train(regression_data(24), 2, per_device_batch_size=2)
            paths = [path for saver in savers for path in saver.save_dir.glob("update-*")]
            found.append([verify_state(path)["world_size"] for path in paths])
        trainer.barrier()
    return found


class AddedOnOne(TrainerCallback):
    """Would be left alone in its barrier."""

    def on_training_run_start(self, trainer, **kwargs):
        trainer.barrier()


def unlike_calls() -> dict[str, str]:
    """What is said if the last rank has other datasets or callbacks than the others, or makes another call."""
    data = regression_data(12)
    is_last = rank() == world_size() - 1

    def error_of(call: Callable[[Trainer], Any], callbacks: Sequence[Any] = (), seed: int | None = None) -> str:
        try:
            call(quiet_trainer(small_model(), callbacks=callbacks, seed=seed))
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


def run_script(path: str, *arguments: str) -> None:
    """As ``torchrun path arguments`` does."""
    before = sys.argv
    sys.argv = [path, *arguments]
    try:
        runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv = before
