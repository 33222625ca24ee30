"""Ray Train: what is reported to it, and runs that it starts again."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from pytorch_accel_lite.checkpoint import verify_state
from tests import cases
from tests.cases.ray_train import EPOCHS, SIZE, StandIn, stopped_for_fewer, train
from tests.launching import ROOT, environment, run_code
from tests.tasks import equal


def test_a_run_that_is_started_again_resumes_to_the_same_bits(two_ranks):
    for (before, after), (ended, whole), states in [cases.ray_train.resumed(), *two_ranks(cases.ray_train.resumed)]:
        assert equal(ended, whole)
        assert [(report["epoch"], report["update"]) for report in (*before, *after)] == [(1, 5), (2, 10), (3, 15)]
        assert all(0 < report["train_loss_epoch"] < 5 for report in (*before, *after))
        assert len(states) == 3


def test_a_run_resumes_on_another_number_of_workers_with_every_sample_once(tmp_path, two_ranks):
    two_ranks.run(stopped_for_fewer, str(tmp_path))
    before = verify_state(max(tmp_path.glob("checkpoint_*")))
    assert (before["world_size"], before["progress"]["update"]) == (2, 6)
    trainer = train(StandIn(tmp_path, 1))
    assert trainer.progress.samples == EPOCHS * SIZE
    assert trainer.progress.update == 15


def test_a_machine_that_will_be_taken_away_makes_a_run_report_at_once_and_continue(tmp_path):
    ray = StandIn(tmp_path, 1, preempted=True)
    assert train(ray).is_finished
    assert [report["update"] for report in ray.reports] == [1, 5, 10, 15]
    verify_state(tmp_path / "checkpoint_000")


def test_states_and_metrics_are_reported_as_often_as_asked(tmp_path):
    ray = StandIn(tmp_path, 1)
    train(ray, every_n_epochs=2, every_n_steps=4, directory=tmp_path / "new")
    assert [report["update"] for report in ray.reports] == [4, 8, 10, 12, 15]
    assert not list((tmp_path / "new").iterdir())


def test_processes_that_ray_has_not_started_are_an_error_before_training(tmp_path):
    with pytest.raises(RuntimeError, match=r"it knows of no workers, and this job has 1 process\(es\)"):
        train(StandIn(tmp_path, 0))
    with pytest.raises(RuntimeError, match=r"it knows of 2 workers, and this job has 1 process\(es\)"):
        train(StandIn(tmp_path, 2))


def test_workers_that_share_no_disk_are_told_to(two_ranks):
    assert "Pass RayReportCallback(directory=...)" in two_ranks(cases.ray_train.without_shared_disk)[0]


def test_without_ray_the_error_names_what_to_install():
    code = (
        "from tests.launching import forget; from pytorch_accel_lite.integrations import RayReportCallback\n"
        "forget('ray', installed=False)\n"
        "try: RayReportCallback()\n"
        "except ImportError as error: print(error)"
    )
    assert re.match(r"RayReportCallback needs ray. Install it with: pip install '?ray", run_code(code))


@pytest.mark.programs
@pytest.mark.timeout(1500)
def test_the_example_gives_the_same_bits_if_its_workers_are_killed(tmp_path, two_ranks):
    """On a real cluster, which takes seconds to start, and minutes on a busy machine."""
    pytest.importorskip("ray", reason="ray is not installed (extra ray)")
    script = [sys.executable, "examples/ray_train.py", "--epochs", "2", "--kill-in-epoch", "2"]
    env = environment(RAY_AUTH_MODE="disabled")
    done = subprocess.run(script, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [found] = re.findall(r"^weights (\w{64})$", done.stdout, re.MULTILINE)
    assert "states reported: 2," in done.stdout  # of a run that had started over, there would be 3
    assert two_ranks.run(cases.ray_train.example_without_ray, 2) == [found] * 2
