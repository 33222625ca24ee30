"""Jobs whose processes are killed at any instant end in the bits of an undisturbed job."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed as dist

from tests.extensions.takeover.jobs import ALL, KILLED, LAUNCH, Outcome, begin, check_equal, end, kill, lives, report
from tests.launching import CAN_SHARD, PATIENCE, SOAK, WarmPython, environment, only_with_soak, run_module

pytestmark = [pytest.mark.programs, pytest.mark.processes]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Outcome]:
    """Run a job to its end."""

    def run_job(processes: int, *options: str, **config: Any) -> Outcome:
        folder = tmp_path_factory.mktemp("job")
        return end(begin(folder, processes, *options, **config), folder)

    return run_job


@pytest.fixture(scope="module")
def undisturbed(run: Callable[..., Outcome]) -> Outcome:
    """The result of an undisturbed job with all options on one process."""
    outcome = run(1, **ALL)
    assert outcome.code == 0, outcome.output
    return outcome


def test_kills_in_all_phases_leave_no_trace_down_to_one_process(run, undisturbed):
    kills = kill(rank2="forward:6", rank0="evaluation:3", rank1="state:2")
    outcome = run(4, kills=kills, shows=True, **ALL)
    check_equal(outcome, undisturbed, survivors=1)
    assert [world_size for _, _, world_size in outcome.changes] == [3, 2, 1]
    said = [line for line in outcome.output.splitlines() if line.startswith("launch:")]
    assert len(said) == 3
    assert all("was killed by SIGKILL. " in line for line in said), said
    assert "One process continued after" in said[-1]
    (written,) = outcome.written
    assert written["takeovers"] == 3
    assert written["seconds"] > 0
    assert written["time"].endswith("(3 takeovers)")
    assert "(3 takeovers)" in outcome.page


def test_kills_while_starting_and_predicting_leave_no_trace(run, undisturbed):
    kills = kill(rank2="beginning", rank1="starting:1", rank3="prediction:1")
    check_equal(run(4, kills=kills, **ALL), undisturbed, survivors=1)


def test_a_loss_that_keeps_one_from_connecting_leaves_no_trace(run, undisturbed, tmp_path, monkeypatch):
    """One of four processes dies once all others are connected, except a second one, which fails to connect."""
    connect = dist.init_process_group

    def connect_or_fail(*args: Any, **kwargs: Any) -> None:
        connect(*args, **kwargs)
        if (mark := tmp_path / str(kwargs["rank"])).exists():
            return
        mark.touch()
        while len([*tmp_path.iterdir()]) < 4:
            time.sleep(0.001)
        if mark.name == "2":
            os.kill(os.getpid(), KILLED)
        if mark.name == "1":
            raise RuntimeError("gloo: Connection closed by peer")

    monkeypatch.setattr(dist, "init_process_group", connect_or_fail)
    outcome = run(4, kills=kill(rank2="forward:3"), **ALL)
    check_equal(outcome, undisturbed, survivors=2)
    assert [written["changes"] for written in outcome.written] == [[[[2], [], 2]]] * 2


@only_with_soak
def test_losing_two_processes_in_predict_changes_no_result(run, undisturbed):
    kills = kill(rank3="prediction:1", rank1="changed:1")
    check_equal(run(4, kills=kills, **ALL), undisturbed, survivors=2)


def test_a_second_death_during_takeover_changes_no_result(run, undisturbed):
    outcome = run(4, kills=kill(rank3="gradients:2", rank1="changed:1"), **ALL)
    check_equal(outcome, undisturbed, survivors=2)


def test_a_stopped_process_and_one_that_joins_are_replaced(run, undisturbed):
    kills = {"1": {"backward:5": int(signal.SIGSTOP)}, **kill(new="starting:1")}
    outcome = run(3, "--replace", "--patience", "4", kills=kills, pause=0.1, samples=503)
    assert outcome.code == 0, outcome.output
    whole = run(1, samples=503)
    assert outcome.results == whole.results * len(outcome.results)
    assert "did nothing for 4 s while others waited for it" in outcome.output
    assert outcome.output.count("was killed by SIGKILL") == 2
    assert [[left, came] for left, came, _ in outcome.changes] == [[[1], []], [[], [2]]]


def test_a_job_with_too_few_processes_names_the_error_and_ends(run):
    outcome = run(2, "--min-processes", "2", kills=kill(rank1="forward:3"))
    assert outcome.code == 128 + KILLED
    assert outcome.results == []
    assert "rank 1 was killed by SIGKILL. The job ends: 1 processes are left (--min-processes 2)." in outcome.output


def test_sigterm_ends_the_job(tmp_path):
    job = begin(tmp_path, 2, marks=True, pause=0.05, samples=2003)
    deadline = time.monotonic() + PATIENCE
    while not list(tmp_path.glob("updates.*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    job.send_signal(signal.SIGTERM)
    outcome = end(job, tmp_path)
    assert outcome.code == 128 + signal.SIGTERM
    assert outcome.results == []


def test_without_logical_processes_a_loss_is_an_error(tmp_path):
    program = tmp_path / "plain.py"
    program.write_text(
        "import os, signal, torch\n"
        "from pytorch_accel_lite import Trainer\n"
        "model = torch.nn.Linear(1, 1)\n"
        "trainer = Trainer(model, torch.nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=())\n"
        "if trainer.ranks.rank == 1:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "trainer.barrier()\n"
    )
    command = [*LAUNCH, "--processes", "2", str(program)]
    job = WarmPython(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True)
    outcome = end(job, tmp_path)
    assert outcome.code == 1
    assert "Create it with a seed and logical_processes=" in outcome.output


@CAN_SHARD
@pytest.mark.soak
@pytest.mark.parametrize(
    ("how", "kills", "begins"),
    [
        ("fsdp", kill(rank2="forward:13", rank1="prediction:1"), ["update-000000005", "update-000000008"]),
        *[("hsdp", kill(rank0="forward:13", rank2="forward:13"), ["update-000000005"])] * SOAK,
        *[("hsdp", kill(rank0="forward:3", rank2="forward:3"), ["the beginning: no state had been saved"])] * SOAK,
        *[("hsdp", kill(rank2="beginning"), ["the beginning: no state had been saved"])] * SOAK,
        *[("fsdp", {"2": {"forward:13": KILLED}, "0": {"sharding again": KILLED}}, ["update-000000005"])] * SOAK,
    ],
)
def test_a_sharded_run_restarts_from_its_latest_state(run, undisturbed, capfd, how, kills, begins):
    outcome = run(4, kills=kills, sharded=how, **ALL)
    check_equal(outcome, undisturbed, survivors=4 - len(kills))
    said = [line for line in capfd.readouterr().out.splitlines() if "All begin again from" in line]
    assert len(said) >= len(begins)
    assert all(place in line for place, line in zip(begins, said, strict=False))


@pytest.mark.thorough
@CAN_SHARD
@pytest.mark.soak
@pytest.mark.parametrize(
    ("kills", "update"),
    [
        (kill(rank1="evaluation:3"), 3),
        *[(kill(rank0="forward:1"), 0)] * SOAK,
        *[(kill(rank1="forward:13"), 6)] * SOAK,
        *[(kill(rank2="backward:12"), 6)] * SOAK,
        *[(kill(rank0="forward:13", rank1="forward:13"), 6)] * SOAK,
        *[(kill(rank3="clipping:7"), 7)] * SOAK,
        *[(kill(rank1="gradients:7"), 7)] * SOAK,
        *[(kill(rank0="update:6"), 6)] * SOAK,
        *[(kill(rank2="step:7"), 4)] * SOAK,
        *[(kill(rank3="checkpoint:6"), 6)] * SOAK,
        *[(kill(rank0="evaluated:2"), 6)] * SOAK,
        *[(kill(rank1="epoch:1"), 4)] * SOAK,
        *[(kill(rank1="saving:1"), 4)] * SOAK,
        *[(kill(rank2="state:1"), 5)] * SOAK,
        *[(kill(rank0="state:2"), 8)] * SOAK,
        *[(kill(rank3="prediction:1"), 8)] * SOAK,
    ],
)
def test_a_sharded_run_continues_from_shard_replicas(run, undisturbed, capfd, kills, update):
    outcome = run(4, kills=kills, sharded="hsdp", marks=True, **ALL)
    check_goes_on(outcome, undisturbed, capfd.readouterr().out, kills, update)


def check_goes_on(outcome: Outcome, undisturbed: Outcome, output: str, kills: dict[str, Any], update: int) -> None:
    """Check that no survivor has lost an update, or made one twice."""
    check_equal(outcome, undisturbed, 4 - len(kills))
    assert f"others had the shards of each lost process, too. All go on from update {update}." in output
    check_marks(outcome, output)


def check_marks(outcome: Outcome, output: str) -> None:
    assert "All begin again from" not in output
    whole = [marks for marks in outcome.marks if marks[-1][0] == 8]
    assert len(whole) >= len(outcome.results)
    assert all([number for number, _ in marks] == [*range(1, 9)] for marks in whole)


@CAN_SHARD
@only_with_soak
@pytest.mark.parametrize(
    ("how", "kills", "update"),
    [
        ({"clip": 0.1}, kill(rank3="clipping:7"), 7),
        ({"train": {}}, kill(rank1="evaluation:3"), 4),
        ({"train": {}}, kill(rank0="evaluated:2"), 8),
        ({"predicts": True}, kill(rank1="exchange:3"), 3),
        ({"predicts": True}, kill(rank2="prediction:4"), 4),
        ({}, kill(rank1="step:8", rank0="state:1"), 4),
        ({}, kill(rank1="step:8", rank2="state:1"), 4),
        ({}, kill(rank0="update:6", rank3="changed:1"), 6),
        ({}, kill(rank3="evaluation:3", rank2="changed:1"), 3),
        ({}, kill(rank1="prediction:1", rank2="changed:1"), 8),
        ({}, {"1": {"forward:13": KILLED}, "0": {"sharding again": KILLED}}, 6),
    ],
)
def test_shard_replicas_suffice_wherever_processes_die(run, capfd, how, kills, update):
    config = {**ALL, **how}
    outcome = run(4, kills=kills, sharded="hsdp", marks=True, **config)
    check_goes_on(outcome, run(1, **config), capfd.readouterr().out, kills, update)


@CAN_SHARD
@only_with_soak
def test_using_a_lost_mesh_restarts_from_the_latest_state(run, undisturbed, capfd):
    outcome = run(4, kills=kill(rank1="exchange:7"), sharded="hsdp", gathers=True, **ALL)
    check_equal(outcome, undisturbed, survivors=3)
    assert re.search(r"All begin again from '.*update-000000005'", capfd.readouterr().out)


@CAN_SHARD
@only_with_soak
def test_a_second_sharded_training_cannot_restart(run):
    config = {"sharded": "hsdp", "trainings": 2, "epochs": 1, "samples": 107}
    outcome = run(4, kills=kill(rank1="evaluated:1"), **config)
    assert outcome.code == 0, outcome.output
    outcome = run(4, kills=kill(rank1="evaluated:2"), **config)
    assert outcome.code == 1
    assert "only in its first training. Start the job again with resume_from=" in outcome.output


@CAN_SHARD
@only_with_soak
@pytest.mark.parametrize(("how", "processes", "lost"), [("fsdp", 3, "rank0"), ("hsdp", 4, "rank2")])
def test_a_sharded_run_takes_a_new_process_and_loses_nothing(run, how, processes, lost):
    """The ranks of the others change, and with them their positions in the meshes."""
    config = {"samples": 803, "saves": True, "pause": 0.01}
    outcome = run(processes, "--replace", kills=kill(**{lost: "forward:9"}), sharded=how, **config)
    assert outcome.code == 0, outcome.output
    assert f"1 new process joined. {processes} processes continued" in outcome.output
    check_equal(outcome, run(1, **config), survivors=processes)


DIES_WITHIN_A_MESSAGE = """
import os, signal, sys, threading
from pathlib import Path
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset
from pytorch_accel_lite import Trainer

exchange = dist.all_to_all_single
begun = []


def exchange_and_die(received, sent, *sizes):
    begun.append(None)
    if trainer.ranks.rank == 1 and len(begun) == 2:
        received.fill_(255)
        threading.Thread(target=die_when_changed, args=(received[:8],), daemon=True).start()
    return exchange(received, sent, *sizes)


def die_when_changed(start):
    while (start == 255).all():  # the other process sends 32 MB, of which some have come
        pass
    os.kill(os.getpid(), signal.SIGKILL)


dist.all_to_all_single = exchange_and_die
torch.manual_seed(0)
model = torch.nn.Linear(4000, 4000, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
trainer = Trainer(model, torch.nn.MSELoss(), optimizer, callbacks=(), seed=0, logical_processes=2)
x = torch.randn(8, 4000)
trainer.train(TensorDataset(x, x), 1, per_device_batch_size=1, train_dataloader_kwargs={"num_workers": 0})
result = [trainer.run_history.to_dict(), model.weight.sum(0).tolist()]
Path(sys.argv[1], str(trainer.ranks.world_size)).write_text(repr(result))
"""


def test_a_death_during_a_large_message_ends_no_survivor(tmp_path):
    """Otherwise, gloo would block for half an hour."""
    program = tmp_path / "program.py"
    program.write_text(DIES_WITHIN_A_MESSAGE)
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        command = [*LAUNCH, "--processes", str(processes), str(program), str(folder)]
        job = WarmPython(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True)
        outcome = end(job, folder)
        assert outcome.code == 0, outcome.output
        assert outcome.output.count("was killed by SIGKILL. One process continued") == processes - 1
    assert (tmp_path / "1" / "1").read_text() == (tmp_path / "2" / "1").read_text()


FAILS_WITHIN_A_MESSAGE = """
import torch
import torch.distributed as dist
from pytorch_accel_lite import Trainer

broadcast = dist.broadcast


def receive_and_fail(tensor, source, *arguments, **options):
    if source == 0:
        return broadcast(tensor, source, *arguments, **options)
    dist.broadcast = broadcast
    tensor.fill_(255)
    transfer = broadcast(tensor, source, *arguments, **options)
    while (tensor[:8] == 255).all():  # the other process sends 128 MB, of which some have come
        pass
    raise RuntimeError("gloo: Connection closed by peer")  # as from another message


model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
trainer = Trainer(model, torch.nn.MSELoss(), optimizer, callbacks=(), seed=0, logical_processes=2)
if trainer.ranks.rank == 0:
    dist.broadcast = receive_and_fail
_, large = trainer.ranks.all_gather_object(torch.full([trainer.ranks.rank << 27], 7, dtype=torch.uint8))
assert large.sum() == 7 << 27
"""


def test_an_error_beside_a_large_message_ends_no_process(tmp_path):
    """Otherwise, that process would wait for the rest of the message."""
    program = tmp_path / "program.py"
    program.write_text(FAILS_WITHIN_A_MESSAGE)
    command = [*LAUNCH, "--processes", "2", "--patience", "10", str(program)]
    job = WarmPython(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True)
    outcome = end(job, tmp_path)
    assert outcome.code == 0, outcome.output


def test_more_processes_than_logical_ones_are_an_error(run):
    outcome = run(3, logical=2)
    assert outcome.code == 1
    assert "logical_processes=2: there are 3 processes" in outcome.output
    assert outcome.results == []


def test_the_help_of_the_command_line_lists_the_command():
    done = run_module("pytorch_accel_lite", "--help")
    assert re.search(r"\blaunch\b", done.stdout + (done.stderr or ""))


@dataclass
class Fault:
    """Faults of one kind, for a long time of them.

    Args:
        count: how many there are, in as many runs as it takes
        draw: returns who is hit at which points, and by what
        options: of the command
    """

    count: int
    draw: Callable[[random.Random], dict[str, dict[str, int]]]
    options: tuple[str, ...] = ()


def hits(drawn: random.Random, *points: str, most: int, by: int = KILLED) -> dict[str, dict[str, int]]:
    """Which processes are hit, one after another: a point for each."""
    ranks = drawn.sample(["0", "1", "2", "3"], len(points))
    numbers = [point if point in ONCE else f"{point}:{drawn.randint(1, most)}" for point in points]
    return {rank: {number: by} for rank, number in zip(ranks, numbers, strict=True)}


ONCE = ("beginning", "starting:1", "changed:1")
STEPS = ("forward", "backward", "gradients", "update", "step")
FAULTS = {
    "saving": Fault(20, lambda drawn: hits(drawn, "state", most=3)),
    "evaluating": Fault(20, lambda drawn: hits(drawn, drawn.choice(["evaluation", "evaluated"]), most=2)),
    "predicting": Fault(20, lambda drawn: hits(drawn, "prediction", most=2)),
    "starting": Fault(20, lambda drawn: hits(drawn, drawn.choice(["beginning", "starting:1"]), most=1)),
    "joining": Fault(
        40,
        lambda drawn: (
            hits(drawn, drawn.choice(STEPS), most=3)
            | {"new": {drawn.choice(["beginning", "starting:1", "forward:1", "update:1"]): KILLED}}
        ),
        ("--replace",),
    ),
    "pairs": Fault(40, lambda drawn: hits(drawn, drawn.choice(STEPS), "changed:1", most=8)),
    "anywhere": Fault(100, lambda drawn: hits(drawn, *drawn.choices(STEPS, k=drawn.randint(1, 3)), most=8)),
    "stopped": Fault(
        10,
        lambda drawn: hits(drawn, drawn.choice(STEPS), most=8, by=int(signal.SIGSTOP)),
        ("--patience", "5", "--replace"),
    ),
}


@only_with_soak
@pytest.mark.parametrize("kind", FAULTS)
def test_faults_of_all_kinds_leave_no_trace(tmp_path, undisturbed, kind):
    """The environment variable FAULTS sets the number of faults of each kind."""
    fault = FAULTS[kind]
    faults = number = 0
    while faults < int(os.environ.get("FAULTS", fault.count)):
        folder = tmp_path / str(number)
        kills = fault.draw(random.Random(f"{kind}{number}"))
        outcome = end(begin(folder, 4, *fault.options, **ALL, kills=kills, workers=number % 2), folder)
        assert outcome.code == 0, (kills, outcome.output)
        check_equal(outcome, undisturbed, survivors=len(outcome.results))
        faults, number = faults + outcome.output.count("was killed by SIGKILL"), number + 1
        report(f"{kind}: {faults} faults in {number} runs")


@only_with_soak
@pytest.mark.parametrize("options", [(), ("--replace",)])
def test_random_kills_leave_no_trace(tmp_path, run, options):
    config = {**ALL, "samples": 803, "pause": 0.004, "marks": True}
    whole = run(1, **config)
    kills = number = 0
    while kills < int(os.environ.get("FAULTS", 50)):
        drawn = random.Random(f"{options}{number}")
        folder = tmp_path / str(number)
        job = begin(folder, 4, *options, **config, workers=number % 2)
        deadline = time.monotonic() + PATIENCE
        while len(list(folder.glob("updates.*"))) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        for _ in range(3):
            time.sleep(drawn.uniform(0.1, 1.5))
            living = [path.suffix[1:] for path in folder.glob("updates.*") if lives(path.suffix[1:])]
            if len(living) > 1:
                os.kill(int(drawn.choice(living)), signal.SIGKILL)
        outcome = end(job, folder)
        assert outcome.code == 0, outcome.output
        check_equal(outcome, whole, survivors=len(outcome.results))
        kills, number = kills + outcome.output.count("was killed by SIGKILL"), number + 1
        report(f"random kills{' with --replace' * bool(options)}: {kills} in {number} runs")


PLACES = {"forward": 14, "backward": 14, "clipping": 8, "gradients": 8, "update": 8, "step": 14, "checkpoint": 8}
PLACES |= {"exchange": 8, "epoch": 2, "evaluation": 8, "evaluated": 2, "saving": 2, "state": 2, "prediction": 3}


@CAN_SHARD
@only_with_soak
def test_faults_in_a_sharded_run_lose_no_update(tmp_path, capfd, undisturbed):
    """Of two lost processes, the second dies in the takeover, with other shards than the first."""
    faults = number = 0
    while faults < int(os.environ.get("FAULTS", 40)):
        drawn = random.Random(f"sharded{number}")
        first, place = drawn.randrange(4), drawn.choice([*PLACES])
        kills = {str(first): {f"{place}:{drawn.randint(1, PLACES[place])}": KILLED}}
        if drawn.random() < 0.5:
            kills[str((first + drawn.choice([1, 3])) % 4)] = {"changed:1": KILLED}
        folder = tmp_path / str(number)
        outcome = end(begin(folder, 4, sharded="hsdp", marks=True, kills=kills, **ALL), folder)
        assert outcome.code == 0, (kills, outcome.output)
        check_equal(outcome, undisturbed, survivors=len(outcome.results))
        check_marks(outcome, capfd.readouterr().out)
        faults, number = faults + outcome.output.count("was killed by SIGKILL"), number + 1
        report(f"sharded: {faults} faults in {number} runs")
