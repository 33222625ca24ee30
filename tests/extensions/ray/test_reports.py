"""Ray Train: reported metrics and states, and restarted runs."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from pytorch_accel_lite import TrainerCallback
from pytorch_accel_lite.checkpoint import verify_state
from tests.launching import ROOT, environment, run_code
from tests.ranks import rank, shared_folder, world_size
from tests.small_models import adamw_trainer, equal_weights, float64_data, float64_model, weights

SIZE, EPOCHS = 20, 3


class Checkpoint:
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)

    from_directory = classmethod(lambda cls, path: cls(path))

    @contextmanager
    def as_directory(self) -> Iterator[str]:
        yield self.path


class StandIn(ModuleType):
    """``ray.train`` in a worker, with a storage in a folder."""

    Checkpoint = Checkpoint

    def __init__(self, storage: Path, workers: int) -> None:
        super().__init__("ray.train")
        self.storage, self.workers = storage, workers
        self.reports: list[dict[str, Any]] = []

    def get_context(self) -> Any:
        return self

    def get_world_size(self) -> int:
        if not self.workers:
            raise RuntimeError("not in a worker")
        return self.workers

    def get_checkpoint(self) -> Checkpoint | None:
        found = sorted(self.storage.glob("checkpoint_*"))
        return Checkpoint(found[-1]) if found else None

    def report(self, metrics: dict[str, Any], checkpoint: Checkpoint | None = None) -> None:
        self.reports.append(metrics)
        if checkpoint is not None:
            number = len(list(self.storage.glob("checkpoint_*")))
            shutil.copytree(checkpoint.path, self.storage / f"checkpoint_{number:03d}")
        if world_size() > 1:
            torch.distributed.barrier()


class Fails(TrainerCallback):
    def on_train_step_end(self, trainer: Any, step: int, **kwargs: Any) -> None:
        if trainer.progress.epoch == 2 and step == 1:
            raise OSError("a machine is gone")


def train(ray: StandIn, *callbacks: TrainerCallback, **kwargs: Any) -> Any:
    """Train in a worker, or resume; return the trainer."""
    from pytorch_accel_lite.integrations import RayReportCallback

    sys.modules |= {"ray": ModuleType("ray"), "ray.train": ray}
    try:
        trainer = adamw_trainer(float64_model(), callbacks=[*callbacks, RayReportCallback(**kwargs)], seed=3)
        data = float64_data(SIZE)
        trainer.train(data, EPOCHS, per_device_batch_size=4 // world_size(), resume_from="latest")
        return trainer
    finally:
        del sys.modules["ray"], sys.modules["ray.train"]


def resumed() -> tuple[list[Any], list[dict[str, torch.Tensor]], list[str]]:
    """The metrics reported before and after all workers fail, the weights of this run and of another, and states."""
    with shared_folder() as folder:
        before, after = (StandIn(folder, world_size()) for _ in range(2))
        with suppress(OSError):
            train(before, Fails())
        if world_size() > 1:
            torch.distributed.barrier()
        ended = weights(train(after).get_model())
        whole = adamw_trainer(float64_model(), seed=3)
        whole.train(float64_data(SIZE), EPOCHS, per_device_batch_size=4 // world_size())
        states = sorted(path.name for path in folder.glob("checkpoint_*"))
        return [before.reports, after.reports], [ended, weights(whole.get_model())], states


def test_a_run_that_is_started_again_resumes_to_the_same_bits(two_ranks):
    for (before, after), (ended, whole), states in [resumed(), *two_ranks(resumed)]:
        assert equal_weights(ended, whole)
        assert [(report["epoch"], report["update"]) for report in (*before, *after)] == [(1, 5), (2, 10), (3, 15)]
        assert all(0 < report["train_loss_epoch"] < 5 for report in (*before, *after))
        assert len(states) == 3


def stopped_for_fewer(folder: str) -> None:
    """Train until all workers fail."""
    with suppress(OSError):
        train(StandIn(Path(folder), world_size()), Fails(), every_n_steps=1)


def test_a_run_resumes_on_other_workers_with_each_sample_once(tmp_path, two_ranks):
    two_ranks.run(stopped_for_fewer, str(tmp_path))
    before = verify_state(max(tmp_path.glob("checkpoint_*")))
    assert (before["world_size"], before["progress"]["update"]) == (2, 6)
    trainer = train(StandIn(tmp_path, 1))
    assert trainer.progress.samples == EPOCHS * SIZE
    assert trainer.progress.update == 15


def test_states_and_metrics_are_reported_as_often_as_requested(tmp_path):
    ray = StandIn(tmp_path, 1)
    train(ray, every_n_epochs=2, every_n_steps=4, directory=tmp_path / "new")
    assert [report["update"] for report in ray.reports] == [4, 8, 10, 12, 15]
    assert not list((tmp_path / "new").iterdir())


def test_processes_that_ray_has_not_started_are_an_error(tmp_path):
    with pytest.raises(RuntimeError, match=r"it knows of no workers, and this job has 1 process\(es\)"):
        train(StandIn(tmp_path, 0))
    with pytest.raises(RuntimeError, match=r"it knows of 2 workers, and this job has 1 process\(es\)"):
        train(StandIn(tmp_path, 2))


def without_shared_disk() -> str:
    """The error if the first worker's directory does not exist on the others."""
    with shared_folder() as folder:
        os.environ["TMPDIR"] = str(folder)
        is_dir = Path.is_dir
        Path.is_dir = lambda path: is_dir(path) and not (rank() and "ray_report_" in path.name)
        try:
            train(StandIn(folder, world_size()))
        except RuntimeError as error:
            return str(error)
        finally:
            Path.is_dir = is_dir
            torch.distributed.barrier()
    return ""


def test_without_a_shared_disk_the_error_names_the_argument(two_ranks):
    assert "Pass RayReportCallback(directory=...)" in two_ranks(without_shared_disk)[0]


def test_without_ray_the_error_names_what_to_install():
    code = (
        "from tests.launching import forget; from pytorch_accel_lite.integrations import RayReportCallback\n"
        "forget('ray', installed=False)\n"
        "try: RayReportCallback()\n"
        "except ImportError as error: print(error)"
    )
    assert re.match(r"RayReportCallback needs ray. Install it with: pip install '?ray", run_code(code))


def example_without_ray(epochs: int) -> str:
    """The hash of the weights that the example trains, without Ray."""
    return runpy.run_path(str(ROOT / "examples" / "ray_train.py"))["train"]([], epochs)


@pytest.mark.programs
@pytest.mark.timeout(1500)
def test_the_example_ends_in_the_same_bits_after_kills(tmp_path, two_ranks):
    """Runs on a real Ray cluster, which takes seconds to start."""
    pytest.importorskip("ray", reason="ray is not installed (extra ray)")
    script = [sys.executable, "examples/ray_train.py", "--epochs", "2", "--kill-in-epoch", "2"]
    env = environment(RAY_AUTH_MODE="disabled")
    done = subprocess.run(script, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [found] = re.findall(r"^weights (\w{64})$", done.stdout, re.MULTILINE)
    assert "states reported: 2," in done.stdout  # of a run that had started over, there would be 3
    assert two_ranks.run(example_without_ray, 2) == [found] * 2
