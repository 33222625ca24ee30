"""The last exchange of an update: gradients with piggybacked states, also for a process that has missed it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from pytorch_accel_lite.extensions.takeover.piggyback import Piggyback, value_of
from tests.extensions.takeover.jobs import LAUNCH, end
from tests.launching import WarmPython, environment

PROGRAM = """
import json, os, signal, sys, time
from collections import Counter
from pathlib import Path
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset
from pytorch_accel_lite import Trainer, TrainerCallback

folder, width, misses = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
counts = Counter()


def counting(name):
    original = getattr(dist, name)

    def call(*args):
        counts[name] += 1
        original(*args)
        if name == "all_gather_into_tensor" and counts[name] == misses:
            meet_with_misfortune(args[0])

    setattr(dist, name, call)


def meet_with_misfortune(gathered):
    # One process dies as soon as it has all, and another one notices that before it has anything.
    if trainer.ranks.rank == 2:
        (folder / "dead").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if trainer.ranks.rank == 1:
        gathered.zero_()
        while not (folder / "dead").exists():
            time.sleep(0.001)
        raise RuntimeError("gloo: Connection closed by peer")


class Note(TrainerCallback):
    computed = 0

    def on_backward_start(self, trainer, **kwargs):
        self.computed += trainer.logical.current == trainer.logical.shares.local[0]


for name in ("all_gather_into_tensor", "all_to_all_single"):
    counting(name)
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last), torch.nn.Flatten(), torch.nn.Linear(12, width),
    torch.nn.Linear(width, 5),
)
note = Note()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
trainer = Trainer(model, torch.nn.CrossEntropyLoss(), optimizer, [note], seed=0, logical_processes=4)
x = torch.randn(96, 2, 4, 4)
trainer.train(TensorDataset(x, x[:, 0, 0].argmax(1)), 1, per_device_batch_size=4, gradient_clip_norm=1.0)
result = {
    "history": trainer.run_history.to_dict(),
    "weights": [p.double().sum().item() for p in model.parameters()],
    "parts": [p.flatten()[:9].tolist() for p in model.parameters()],
}
own = {"counts": counts, "computed": note.computed, "takeovers": trainer.goodput.takeovers}
own["updates"] = trainer.progress.update
(folder / f"result.{trainer.ranks.rank}").write_text(json.dumps([result, own]))
"""
SMALL, LARGE = 7, 250_000  # the second has more than 16 MB of gradients


def launch(folder: Path, processes: int, width: int, misses: int = 0) -> list[Any]:
    folder.mkdir()
    program = folder / "program.py"
    program.write_text(PROGRAM)
    command = [*LAUNCH, "--processes", str(processes), str(program), str(folder), str(width), str(misses)]
    outcome = end(WarmPython(command, cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True), folder)
    assert outcome.code == 0, outcome.output
    return [json.loads(path.read_text()) for path in sorted(folder.glob("result.?"))]


def test_an_update_needs_no_exchange_beyond_its_gradients(tmp_path):
    (alone, _), *_ = launch(tmp_path / "1", 1, SMALL)
    written = launch(tmp_path / "2", 2, SMALL)
    for result, own in written:
        assert result == alone
        assert own["updates"] == 6
        assert own["counts"]["all_to_all_single"] == own["counts"]["all_gather_into_tensor"] == own["updates"]


@pytest.mark.parametrize(("width", "misses"), [(SMALL, 3), pytest.param(LARGE, 6, marks=pytest.mark.thorough)])
def test_a_process_that_misses_the_last_exchange_gets_it_later(tmp_path, width, misses):
    (alone, _), *_ = launch(tmp_path / "1", 1, width)
    written = launch(tmp_path / "3", 3, width, misses)
    assert [result for result, _ in written] == [alone] * 2
    assert written[1][1] == {**written[1][1], "computed": 6, "takeovers": 1}  # it has done its part of the third update


def test_more_room_is_reserved_for_a_long_value():
    piggyback = Piggyback()
    values = [b"a" * 3000, b"", b"bc"]

    def gather() -> torch.Tensor:
        messages = torch.full((3, 5 + piggyback.room), 7, dtype=torch.uint8)
        for message, value in zip(messages, values, strict=True):
            piggyback.attach(message, value == b"bc", value)
        assert (messages[:, :5] == 7).all()
        return messages

    assert piggyback.read_flags(piggyback.tails(gather())) is None
    assert piggyback.room == 4096
    tails = piggyback.tails(gather())
    assert piggyback.read_flags(tails) is True
    assert [value_of(tail) for tail in tails] == values
