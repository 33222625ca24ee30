"""Jobs under ``launch`` whose processes kill themselves at given points, and what is left of them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.launching import PATIENCE, WarmPython, environment
from tests.small_models import same_bits

PROGRAM = Path(__file__).with_name("program.py")
LAUNCH = [sys.executable, "-m", "pytorch_accel_lite", "launch"]
KILLED = int(signal.SIGKILL)
PARTS = "optimizer", "scheduler", "history", "evaluations"  # of states


@dataclass
class Outcome:
    """The outcome of a job: exit code, output, results of the processes that ended, and files.

    Attributes:
        files: what the best model, the average and the latest states have in them
        rows: those of the file of metrics
        marks: of each process that has made an update, with ``marks``: the number of each, and that of the processes
    """

    code: int
    output: str
    written: list[dict[str, Any]]
    files: dict[str, Any]
    rows: str
    page: str
    marks: list[list[list[int]]]

    @property
    def results(self) -> list[Any]:
        return [written["result"] for written in self.written]

    @property
    def changes(self) -> list[Any]:
        """How the processes have changed, as the first one has seen it."""
        return min(self.written, key=lambda written: written["rank"])["changes"]  # type: ignore[no-any-return]


def begin(folder: Path, processes: int, *options: str, **config: Any) -> subprocess.Popen[str]:
    folder.mkdir(parents=True, exist_ok=True)
    arguments = json.dumps({"folder": str(folder), **config})
    counted = ["--processes", str(processes)] if processes else []
    command = [*LAUNCH, *counted, *options, str(PROGRAM), arguments]
    return WarmPython(command, cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True)


def end(job: subprocess.Popen[str], folder: Path) -> Outcome:
    try:
        _, output = job.communicate(timeout=PATIENCE)
    finally:
        job.kill()
    return collect(job.returncode, output, folder)


def collect(code: int, output: str, folder: Path) -> Outcome:
    written = [json.loads(path.read_text()) for path in sorted(folder.glob("result.*.json"))]
    files: dict[str, Any] = {path.name: torch.load(path) for path in sorted(folder.glob("*.pt"))}
    for state in sorted(folder.glob("states/update-*")):
        files[f"{state.name}/weights"] = load_file(state / "model.safetensors")
        files[state.name] = read_state(state)
    rows = "".join(path.read_text() for path in folder.glob("metrics.jsonl"))
    page = "".join(path.read_text() for path in folder.glob("log/*.html"))
    marks = [path.read_text().splitlines() for path in sorted(folder.glob("updates.*"))]
    numbers = [[[*map(int, line.split()[1:])] for line in lines] for lines in marks]
    return Outcome(code, output, written, files, rows, page, numbers)


def read_state(folder: Path) -> dict[str, Any]:
    """The contents of a training state that do not depend on the processes.

    The losses of an epoch that is over have been recorded, and nothing reads them any more.
    """
    content = torch.load(folder / "trainer.pt")
    progress = json.loads((folder / "manifest.json").read_text())["progress"]
    parts = {part: content[part] for part in PARTS} | {"generators": content["logical"]["generators"]}
    if progress["epochs_completed"] < progress["epoch"]:
        parts |= {"losses": content["losses"], "by_number": content["logical"]["losses"]}
    return parts | {"progress": progress}


WITHIN = {"evaluate_every": "3 updates"}
ALL = {"saves": True, "metrics": True, "accumulation": 2, "samples": 107, "two_optimizers": True, "train": WITHIN}


def kill(**points: str) -> dict[str, dict[str, int]]:
    """Which process kills itself at which point, such as ``rank1="forward:3"``."""
    return {name.removeprefix("rank"): dict.fromkeys(point.split(), KILLED) for name, point in points.items()}


def check_equal(outcome: Outcome, undisturbed: Outcome, survivors: int) -> None:
    assert outcome.code == 0, outcome.output
    assert "SIGABRT" not in outcome.output, outcome.output
    assert outcome.results == undisturbed.results * survivors
    assert outcome.rows == undisturbed.rows
    assert outcome.files.keys() == undisturbed.files.keys()
    for name, content in outcome.files.items():
        assert same_bits(content, undisturbed.files[name]), name
    for written in outcome.written:
        check_updates(written)


def check_updates(written: dict[str, Any]) -> None:
    """Check that no committed update is lost, and that each takeover repeats at most one."""
    for training in {training for training, _ in written["committed"]}:
        updates = [update for number, update in written["committed"] if number == training]
        assert updates == [*range(updates[0], updates[-1] + 1)]
    assert written["again"] <= written["takeovers"]


def report(text: str) -> None:
    """Print the progress of a long test, bypassing the capture of its output."""
    print(text, file=sys.__stderr__, flush=True)


def lives(process: str) -> bool:
    """Whether a process has not ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
