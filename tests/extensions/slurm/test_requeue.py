"""Jobs that Slurm signals and requeues."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import torch
from torch.distributed.launcher.api import LaunchConfig

from pytorch_accel_lite import TrainerCallback
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from pytorch_accel_lite.extending import STORES
from tests.launching import PATIENCE, ROOT, WarmPython, environment
from tests.ranks import rank, shared_folder, world_size
from tests.scripts.resumable import run_to_the_end
from tests.scripts.submitted import Submitted
from tests.small_models import adamw_trainer, equal_weights, float64_data, float64_model


class SendsSignals(TrainerCallback):
    """Sends signals to this process after an update, if it is on the last rank."""

    def __init__(self, *numbers: signal.Signals) -> None:
        self.numbers = numbers

    def on_train_step_end(self, trainer, **kwargs):
        if trainer.progress.update == 2 and rank() == world_size() - 1:
            for number in self.numbers:
                os.kill(os.getpid(), number)


def install_scontrol(folder: Path, code: int = 0) -> Path:
    """Put a stand-in for Slurm's command first on the PATH; it writes what it is called with to a file."""
    calls, program = folder / "calls", folder / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {calls}\necho "slurm_update error: Access denied" >&2\nexit {code}\n')
    program.chmod(0o755)
    os.environ["PATH"] = f"{program.parent}:{os.environ['PATH']}"
    return calls


@pytest.fixture(autouse=True)
def slurm(monkeypatch):
    """The variables that Slurm sets for the last task of an array, whose number is that of the array."""
    for name, value in {"JOB_ID": "17", "ARRAY_JOB_ID": "17", "ARRAY_TASK_ID": "3"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("PATH", os.environ["PATH"])  # restored when the test has changed it


def train(
    folder: Path | str, *signals: signal.Signals, resume_from: str | None = None, **saver: object
) -> SystemExit | None:
    saving = SaveTrainingStateCallback(f"{folder}/states", **saver)
    trainer = adamw_trainer(float64_model(), callbacks=[SendsSignals(*signals), saving])
    try:
        trainer.train(float64_data(20), 1, per_device_batch_size=4, resume_from=resume_from)
    except SystemExit as end:
        return end
    return None


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_warning_returns_the_task_of_an_array_to_the_queue(tmp_path, capsys, number):
    calls = install_scontrol(tmp_path)
    assert train(tmp_path, number, requeue=True).code == 128 + number
    assert calls.read_text() == "requeue 17_3\n"
    assert "\nJob 17_3 is back in Slurm's queue.\nThe run is saved in " in capsys.readouterr().out
    assert (tmp_path / "states" / "update-000000002").is_dir()


def test_a_warning_requeues_if_sigterm_follows_while_saving(tmp_path):
    calls = install_scontrol(tmp_path)

    class Ends(TrainerCallback):
        def on_stop_training_error(self, trainer, **kwargs):
            signal.raise_signal(signal.SIGTERM)

    saving = SaveTrainingStateCallback(tmp_path / "states", requeue=True)
    callbacks = [SendsSignals(signal.SIGUSR1), Ends(), saving]
    with pytest.raises(SystemExit) as end:
        adamw_trainer(float64_model(), callbacks=callbacks).train(float64_data(20), 1, per_device_batch_size=4)
    assert end.value.code == 138
    assert calls.read_text() == "requeue 17_3\n"


@pytest.mark.parametrize(("numbers", "requeue"), [([signal.SIGTERM], True), ([signal.SIGUSR1], False), ([], True)])
def test_other_runs_are_left_out_of_the_queue(tmp_path, numbers, requeue):
    calls = install_scontrol(tmp_path)
    train(tmp_path, *numbers, requeue=requeue)
    assert not calls.exists()


def warned_on_the_last_rank() -> tuple[str, list[str]]:
    """The calls of scontrol, and the saved states."""
    with shared_folder() as folder:
        if rank() == 0:
            install_scontrol(folder)
        os.environ |= {"SLURM_JOB_ID": "17", "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGUSR1"}
        os.environ.pop("SLURM_ARRAY_JOB_ID", None)
        saving = SaveTrainingStateCallback(folder / "states", requeue=True)
        trainer = adamw_trainer(float64_model(), callbacks=[SendsSignals(signal.SIGUSR1), saving])
        with suppress(SystemExit):
            trainer.train(float64_data(400), 1, per_device_batch_size=2)
        trainer.barrier()
        return (folder / "calls").read_text(), [path.name for path in (folder / "states").glob("update-*")]


def test_one_process_requeues_after_all_have_saved(two_ranks):
    for calls, states in two_ranks(warned_on_the_last_rank):
        assert calls == "requeue 17\n"
        assert len(states) == 1


def test_the_error_message_of_slurm_is_shown(tmp_path, capsys):
    install_scontrol(tmp_path, code=1)
    assert train(tmp_path, signal.SIGUSR1, requeue=True).code == 138
    assert "Job 17_3 could not be returned to Slurm's queue: slurm_update error: Access" in capsys.readouterr().out


def test_settings_that_make_a_job_start_over_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="requeue=True needs Slurm's command scontrol, which is not on the PATH"):
        train(tmp_path, requeue=True)
    with pytest.raises(ValueError, match="requeue=True resumes what save_on_signal=True saves"):
        train(tmp_path, requeue=True, save_on_signal=False)
    install_scontrol(tmp_path)
    train(tmp_path, signal.SIGUSR1, requeue=True)
    folders = [tmp_path, *["memory:/"] * ("*" in STORES)]  # which another extension reads
    for folder in folders[1:]:
        train(folder, signal.SIGUSR1, requeue=True)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    for folder in folders:
        with pytest.raises(RuntimeError, match="Pass resume_from='latest'"):
            train(folder, requeue=True)
        assert train(folder, requeue=True, resume_from="latest") is None


@pytest.mark.parametrize("passed_on", ["SIGTERM,SIGUSR1", "SIGTERM"])
def test_torchrun_must_forward_the_signal(tmp_path, monkeypatch, passed_on):
    install_scontrol(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "17")
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", passed_on)
    expected = pytest.warns(UserWarning, match="would end torchrun") if passed_on == "SIGTERM" else nullcontext()
    with expected:
        train(tmp_path, requeue=True)


def test_earlier_handlers_are_called_once_the_state_is_saved(tmp_path):
    seen = []

    def handler(number, frame):
        seen.append((number, [path.name for path in (tmp_path / "states").glob("update-*")]))
        raise SystemExit(7)

    before = signal.signal(signal.SIGUSR2, handler)
    try:
        assert train(tmp_path, signal.SIGUSR2).code == 7
        assert signal.getsignal(signal.SIGUSR2) is handler
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert seen == [(signal.SIGUSR2, ["update-000000002"])]


def test_a_signal_followed_by_termination_still_saves(tmp_path):
    assert train(tmp_path, signal.SIGUSR1, signal.SIGTERM).code == 138
    assert (tmp_path / "states" / "update-000000002").is_dir()


@pytest.mark.programs
def test_a_job_of_submitit_resumes_to_the_same_bits(tmp_path, monkeypatch):
    submitit = pytest.importorskip("submitit", reason="submitit is not installed")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(subprocess, "Popen", WarmPython)
    folder = tmp_path / "submitted"
    folder.mkdir()
    job = submitit.LocalExecutor(tmp_path / "logs").submit(Submitted(), folder)
    process = wait_until_it_trains(folder, lambda: not job.done())
    os.kill(process, signal.SIGUSR2)  # as submitit does before the time is over
    job.wait()
    log = job.stdout() + job.stderr()
    assert job.exception() is None, log
    assert "Stopping because of SIGUSR2." in log
    assert "Resuming from" in log
    run_to_the_end(tmp_path / "whole")
    assert_same_end(folder, tmp_path / "whole")


def wait_until_it_trains(folder: Path, is_running: Callable[[], bool]) -> int:
    """Return the number of the first process of the run."""
    while not (folder / "trains").exists():
        assert is_running()
        time.sleep(0.05)
    return int((folder / "trains").read_text())


def assert_same_end(*folders: Path) -> None:
    ended, whole = (torch.load(folder / "final.pt", weights_only=False) for folder in folders)
    assert equal_weights(ended["weights"], whole["weights"])
    assert ended["order"] == whole["order"]
    assert ended["progress"] == whole["progress"]


TRAIN = "from pathlib import Path; from tests.scripts.submitted import train; train(Path('.'), requeue=True)"
STAND_INS = {
    "srun": 'exec "$@"',
    "scontrol": '[ "$1" = show ] && echo localhost || echo "$@" >> calls',
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
}


def job_with_a_free_port() -> int:
    """Return the number of a job for which the script takes a port that nothing else uses or is given by the system."""
    lowest_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        job = secrets.randbelow(lowest_given - 10_000)
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("", 10_000 + job))
            return job


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(LaunchConfig, "signals_to_handle"), reason="before 2.10, torchrun ends at SIGUSR1")
@pytest.mark.programs
def test_the_script_of_the_documentation_saves_when_warned(tmp_path):
    """On one node with one process, by stand-ins for the commands of a cluster."""
    page = (ROOT / "docs" / "clusters.md").read_text()
    [script] = re.findall(r"^```bash\n(#!/bin/bash\n#SBATCH.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "job.sh").write_text(script)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "bin").mkdir()
    for name, command in STAND_INS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{command}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    variables = {"JOB_ID": str(job_with_a_free_port()), "NNODES": "1", "GPUS_ON_NODE": "1", "JOB_NODELIST": "one"}
    env = environment(
        PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}", **{f"SLURM_{name}": it for name, it in variables.items()}
    )
    kwargs = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(["bash", "job.sh"], cwd=tmp_path, env=env, **kwargs) as job:
        wait_until_it_trains(tmp_path, lambda: job.poll() is None)
        [launcher] = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        os.kill(int(launcher), signal.SIGUSR1)  # as Slurm does: the tasks of the step, not the script
        output, _ = job.communicate(timeout=PATIENCE)
    assert output.count("Stopping because of SIGUSR1.") == 1, output
    assert "would end torchrun" not in output
    assert (tmp_path / "calls").read_text() == "requeue 17_3\n"
    run_to_the_end(tmp_path)
    run_to_the_end(tmp_path / "whole")
    assert_same_end(tmp_path, tmp_path / "whole")
