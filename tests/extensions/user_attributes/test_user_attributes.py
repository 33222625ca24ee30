"""Users' attributes of trainers and callbacks: saved in training states, or reported."""

from __future__ import annotations

import copy
import enum
import random
import threading
import zipfile
from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import SaveBestModelCallback, SaveTrainingStateCallback
from tests import shipped_callbacks
from tests.launching import some_of, two_are_enough
from tests.ranks import every_state, rank, run_and_resume, shared_folder
from tests.small_models import equal_weights, float64_data, float64_model, same_bits

DATA = float64_data(24)


class Transition(NamedTuple):
    state: torch.Tensor
    reward: float


class Walk:
    """An environment written in Python, with a position and a generator of its own."""

    def __init__(self, seed: int) -> None:
        self.position = 0.0
        self.noise = np.random.default_rng(seed)

    def step(self, move: float) -> float:
        self.position = 0.9 * self.position + move + 0.1 * self.noise.standard_normal()
        return -abs(self.position)


class Phase(enum.Enum):
    EXPLORING = 1
    LEARNING = 2


def plain(value: Any) -> Any:
    """Convert a value to types that ``same_bits`` compares."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [type(value).__name__, *map(plain, value)]
    return value.tolist() if isinstance(value, np.ndarray) else value


class Agent(Trainer):
    """Has an environment, a replay buffer, a target network and some numbers, and registers none of them."""

    def __init__(self, seed: int, callbacks: Any) -> None:
        model = float64_model(seed)
        super().__init__(model, None, torch.optim.Adam(model.parameters(), lr=0.02), callbacks, seed=0)
        self.environment = Walk(seed + rank())
        self.replay: deque[Transition] = deque(maxlen=12)
        self.target = float64_model(seed + 1)
        self.average = 0.0
        self.phase = Phase.EXPLORING
        self.totals = {"reward": np.zeros(2), "episodes": 0}
        self.reward = torchmetrics.MeanMetric()

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        states = batch[0]
        outputs = self.model(states)
        reward = self.environment.step(outputs.detach().mean().item())
        self.replay.extend(Transition(state, reward) for state in states[:2])
        self.phase = Phase.LEARNING if len(self.replay) > 5 else Phase.EXPLORING
        self.average = 0.9 * self.average + 0.1 * reward
        self.totals["reward"] += reward
        self.totals["episodes"] += 1
        self.reward.update(reward)
        drawn = self.replay[random.randrange(len(self.replay))]
        wanted = self.target(drawn.state[None]) + drawn.reward - self.average * self.phase.value
        return {"loss": (outputs - wanted.detach()).square().mean(), "batch_size": len(states)}

    def train_epoch_end(self) -> None:
        self.log_of_epochs = [*getattr(self, "log_of_epochs", []), self.reward.compute()]
        self.reward.reset()

    def optimizer_step(self) -> None:
        super().optimizer_step()
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.get_model().parameters(), strict=True):
                slow.data.mul_(0.7).add_(fast.data, alpha=0.3)

    def everything(self) -> dict[str, Any]:
        names = ("replay", "average", "phase", "totals", "log_of_epochs")
        held = {name: plain(getattr(self, name)) for name in names}
        generator = self.environment.noise.bit_generator.state["state"]
        weights = [module.state_dict() for module in (self.get_model(), self.target)]
        return copy.deepcopy({**held, "position": self.environment.position, "noise": generator, "weights": weights})


def train_agent(folder: Path, resume_from: Path | None = None) -> Agent:
    trainer = Agent(9 if resume_from else 0, every_state(folder))
    trainer.train(DATA, 3, per_device_batch_size=4, resume_from=resume_from)
    return trainer


class Momentum(TrainerCallback):
    """A teacher that follows the model, made when the run starts, as in DINO, BYOL or MoCo."""

    def on_training_run_start(self, trainer, **kwargs):
        self.teacher = copy.deepcopy(trainer.get_model()).requires_grad_(False)
        self.center = torch.zeros(1, dtype=torch.float64)

    def on_train_step_end(self, trainer, **kwargs):
        for slow, fast in zip(self.teacher.parameters(), trainer.get_model().parameters(), strict=True):
            slow.data = 0.8 * slow.data + 0.2 * fast.detach().data
        self.center = 0.9 * self.center + 0.1 * next(self.teacher.parameters()).mean()


class Distilled(Trainer):
    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        outputs = self.model(batch[0])
        [momentum] = [callback for callback in self.callback_handler if isinstance(callback, Momentum)]
        wanted = batch[1] + 0.5 * momentum.teacher(batch[0]) - momentum.center
        return {"loss": (outputs - wanted).square().mean(), "model_outputs": outputs}


def train_distilled(folder: Path, resume_from: Path | None = None) -> Distilled:
    model = float64_model(9 if resume_from else 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trainer = Distilled(model, None, optimizer, [Momentum(), *every_state(folder)], seed=0)
    trainer.train(DATA, 3, per_device_batch_size=4, resume_from=resume_from)
    return trainer


def weights(trainer: Trainer) -> dict[str, Any]:
    return copy.deepcopy(trainer.get_model().state_dict())


HELD = {
    "reinforcement learning": (train_agent, Agent.everything),
    "a momentum teacher of a callback": (train_distilled, weights),
}


@pytest.mark.sampled
@pytest.mark.soak
@pytest.mark.parametrize(("train", "result"), HELD.values(), ids=HELD)
def test_user_attributes_resume_bit_for_bit(train, result):
    whole, *resumed = run_and_resume(train, result)
    assert len(resumed) >= 2
    assert all(same_bits(whole, run) for run in resumed)


@pytest.mark.thorough
@two_are_enough
@pytest.mark.parametrize("held", some_of(HELD))
def test_attributes_of_each_process_resume_bit_for_bit(ranks, held):
    for whole, *resumed in ranks.run(run_and_resume, *HELD[held]):
        assert len(resumed) >= 2
        assert all(same_bits(whole, run) for run in resumed)


# ------------------------------------------------------------------------------------------------ how they are kept


class Holder(Trainer):
    def __init__(self, callbacks: Any = (), **held: Any) -> None:
        model = float64_model()
        super().__init__(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks, seed=0)
        vars(self).update(held)


def saved(folder: Path, **held: Any) -> Holder:
    """A trainer whose attributes are in ``folder / "state"``."""
    trainer = Holder(**held)
    trainer.save_training_state(folder / "state")
    return trainer


def test_attributes_are_restored_in_place(tmp_path):
    saved(tmp_path, tensor=torch.ones(3), rows=[torch.ones(2), 5], counts={"a": np.ones(2)}, walk=Walk(1))
    held = {"tensor": torch.zeros(3), "rows": [torch.zeros(2)], "counts": {"a": np.zeros(2)}, "walk": Walk(2)}
    parts = held["rows"][0], held["counts"]["a"], held["walk"].noise
    trainer = Holder(**held)
    trainer.load_training_state(tmp_path / "state")
    assert all(getattr(trainer, name) is value for name, value in held.items())
    assert trainer.rows[0] is parts[0]
    assert trainer.counts["a"] is parts[1]
    assert trainer.walk.noise is parts[2]
    assert equal_weights({"t": trainer.tensor, "r": parts[0]}, {"t": torch.ones(3), "r": torch.ones(2)})
    assert trainer.rows[1] == 5
    assert parts[1].tolist() == [1, 1]
    assert trainer.walk.noise.random() == Walk(1).noise.random()


def test_attributes_that_the_run_creates_or_retypes_are_restored(tmp_path):
    trainer = saved(tmp_path, made=[{"x": (1, 2.5, "z", None)}], was_none=deque([torch.ones(2)], maxlen=3))
    trainer.pair = [trainer.made, trainer.made]
    trainer.itself = [1]
    trainer.itself.append(trainer.itself)
    trainer.save_training_state(tmp_path / "state")
    fresh = Holder(was_none=None)
    fresh.load_training_state(tmp_path / "state")
    assert fresh.made == [{"x": (1, 2.5, "z", None)}]
    assert fresh.pair[0] is fresh.pair[1]
    assert fresh.itself[1] is fresh.itself
    assert fresh.was_none.maxlen == 3
    assert torch.equal(fresh.was_none[0], torch.ones(2))


def test_attributes_that_a_run_removes_stay_removed(tmp_path):
    def train(epochs: int) -> Holder:
        trainer = Holder([SaveTrainingStateCallback(tmp_path)], warm=1, function=len)
        trainer.train(DATA, epochs, per_device_batch_size=8, resume_from="latest")
        return trainer

    class Removing(Holder):
        def train_epoch_end(self) -> None:
            vars(self).pop("warm", None)

    removing = Removing([SaveTrainingStateCallback(tmp_path)], warm=1, function=len)
    removing.train(DATA, 1, per_device_batch_size=8)
    trainer = train(2)
    assert not hasattr(trainer, "warm")
    assert trainer.function is len


class Ledger(TrainerCallback):
    unsaved_attributes = ("lines",)

    def __init__(self) -> None:
        self.lines: list[int] = []
        self.count = 0

    def on_update_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.count += 1
        self.lines.append(self.count)


class Kept(Ledger):
    unsaved_attributes = ()


class Unsaved(Ledger):
    saves_attributes = False


class Partly(Trainer):
    """Trains a head, and notes losses, which are not saved; counts steps, which are."""

    unsaved_attributes = ("losses", "head", "generator")

    def __init__(self, seed: int, callbacks: Any = ()) -> None:
        torch.manual_seed(seed)
        model, head = float64_model(), nn.Linear(1, 1).double()
        optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.01)
        super().__init__(model, nn.MSELoss(), optimizer, callbacks, seed=0)
        self.head, self.losses, self.steps, self.generator = head, [], 0, threading.Lock()

    def calculate_train_batch_loss(self, batch: Any) -> Any:
        self.losses.append(self.steps)
        self.steps += 1
        loss = self.loss_func(self.head(self.model(batch[0])), batch[1])
        return {"loss": loss, "model_outputs": None, "batch_size": len(batch[0])}


def test_attributes_that_a_class_names_are_not_saved(tmp_path, capsys):
    def run(epochs: int, kind: type[Ledger], seed: int) -> tuple[Partly, Ledger]:
        ledger = kind()
        trainer = Partly(seed, [ledger, SaveTrainingStateCallback(tmp_path / "states", max_checkpoints=1)])
        trainer.train(DATA, epochs, per_device_batch_size=8, resume_from="latest")
        return trainer, ledger

    first, _ = run(1, Ledger, seed=1)
    trained = first.head.weight.detach().clone()
    assert "generator" not in capsys.readouterr().out  # is not said to be left out
    state = torch.load(next((tmp_path / "states").glob("update-*/trainer.pt")), weights_only=True)
    assert "head" not in state["attributes"]
    first.save_checkpoint(tmp_path / "model.pt")
    assert "attribute_state_dicts" not in torch.load(tmp_path / "model.pt")
    created = Partly(2).head.weight.detach()
    assert not torch.equal(created, trained)
    trainer, ledger = run(1, Ledger, seed=2)  # nothing is left to be trained
    assert torch.equal(trainer.head.weight, created)
    assert (trainer.losses, trainer.steps) == ([], 3)
    assert (ledger.lines, ledger.count) == ([], 3)
    trainer, ledger = run(2, Ledger, seed=3)
    assert (trainer.losses, trainer.steps) == ([3, 4, 5], 6)
    assert (ledger.lines, ledger.count) == ([4, 5, 6], 6)


def test_a_callback_may_leave_out_attributes_that_states_have(tmp_path):
    def run(epochs: int, kind: type[Ledger]) -> Ledger:
        ledger = type("Ledger", (kind,), {})()
        saving = SaveTrainingStateCallback(tmp_path / "states", max_checkpoints=1)
        Partly(1, [ledger, saving]).train(DATA, epochs, per_device_batch_size=8, resume_from="latest")
        return ledger

    assert run(1, Kept).count == 3
    assert run(2, Kept).lines == [1, 2, 3, 4, 5, 6]
    ledger = run(3, Ledger)
    assert (ledger.lines, ledger.count) == ([7, 8, 9], 9)
    ledger = run(4, Unsaved)
    assert (ledger.lines, ledger.count) == ([1, 2, 3], 3)


def test_unsaved_attributes_are_names(tmp_path):
    class Wrong(Ledger):
        unsaved_attributes = "lines"

    trainer = Partly(0, [Wrong(), SaveTrainingStateCallback(tmp_path)])
    with pytest.raises(TypeError, match=r"unsaved_attributes='lines' of Wrong must be names of attributes, such as"):
        trainer.train(DATA, 1)


def test_long_replay_buffers_are_saved_as_few_tensors(tmp_path):
    frames = [torch.full((3,), float(number)) for number in range(101)]
    steps = [Transition(frames[number], number / 2) for number in range(100)]
    dicts = [{"state": frames[n], "next": frames[n + 1], "a": np.float32(n), "done": n % 3 == 0} for n in range(100)]
    saved(tmp_path, steps=deque(steps), dicts=dicts)
    fresh = Holder(steps=deque(), dicts=[])
    fresh.load_training_state(tmp_path / "state")
    assert same_bits(plain(steps), plain([*fresh.steps]))
    assert type(fresh.steps[0]) is Transition
    assert same_bits(dicts, fresh.dicts)
    assert type(fresh.dicts[0]["a"]) is np.float32
    with zipfile.ZipFile(tmp_path / "state/trainer.pt") as file:
        assert len(file.namelist()) < 40


def test_generators_and_tensor_views_are_kept(tmp_path):
    whole = torch.arange(6.0)
    trainer = saved(
        tmp_path,
        generators=[torch.Generator().manual_seed(1), np.random.default_rng(2), random.Random(3)],
        views=[whole[:3], whole],
    )
    fresh = Holder()
    fresh.load_training_state(tmp_path / "state")
    fresh.views[1].mul_(2)
    assert fresh.views[0].tolist() == [0, 2, 4]
    drawn = [
        [torch.rand(1, generator=g[0]).item(), g[1].random(), g[2].random()]
        for g in (trainer.generators, fresh.generators)
    ]
    assert drawn[0] == drawn[1]


class Busy(TrainerCallback):
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.steps = (number for number in range(3))
        self.count = 0

    def on_train_step_end(self, trainer, **kwargs):
        self.count += 1


def test_attributes_that_cannot_be_saved_are_named_once(tmp_path, capsys):
    busy = Busy()
    saving = SaveTrainingStateCallback(tmp_path, save_every_n_epochs=1)
    with Path(__file__).open() as file:
        Holder([busy, saving], file=file).train(DATA, 2, per_device_batch_size=8)
    said = capsys.readouterr().out
    assert "Training states cannot hold file (TextIOWrapper), Busy.lock (lock), Busy.steps (generator)" in said
    assert said.count("cannot hold") == 1
    fresh = Busy()
    again = Holder([fresh, SaveTrainingStateCallback(tmp_path)])
    again.train(DATA, 2, per_device_batch_size=8, resume_from="latest")
    assert fresh.count == busy.count == 6
    assert not fresh.lock.locked()
    assert next(fresh.steps) == 0


def test_a_trainer_in_an_attribute_is_named(tmp_path, capsys):
    inner = Trainer(float64_model(), nn.MSELoss(), None, callbacks=[])
    trainer = Holder([SaveTrainingStateCallback(tmp_path)], inner=inner)
    trainer.train(DATA, 1, per_device_batch_size=8)
    assert capsys.readouterr().out.count("Training states cannot hold inner (Trainer)") == 1


def test_a_new_setting_holds_and_is_named(tmp_path, capsys):
    def train(epochs: int, **held: Any) -> Holder:
        trainer = Holder([SaveTrainingStateCallback(tmp_path)], **held)
        trainer.train(DATA, epochs, per_device_batch_size=8, resume_from="latest")
        return trainer

    train(1, alpha=0.5, name="a")
    trainer = train(2, alpha=0.25, name="a")
    assert (
        "Different from the run that saved the state: alpha is 0.25, and was 0.5. The new values hold."
        in capsys.readouterr().out
    )
    assert trainer.alpha == 0.25


class Warming(TrainerCallback):
    """Has a setting that nothing changes, one that the run changes, and places."""

    def __init__(self, factor: float, heat: float, folder: Any, notes: str) -> None:
        self.factor, self.heat, self.folder, self.notes_path = factor, heat, folder, notes

    def on_update_end(self, trainer, **kwargs):
        self.heat += 1


@pytest.mark.extension("recorded_settings")
def test_differences_are_reported_once_and_moved_folders_never(tmp_path, capsys):
    def train(epochs: int, *arguments: Any, **held: Any) -> Warming:
        warming = Warming(*arguments)
        trainer = Holder([warming, SaveTrainingStateCallback(tmp_path)], **held)
        trainer.train(DATA, epochs, per_device_batch_size=8, resume_from="latest")
        return warming

    train(1, 0.5, 1.0, Path("a"), "a/notes", output_dir="a", places=[Path("a/x"), Path("a/y")])
    capsys.readouterr()
    warming = train(2, 0.25, 2.0, Path("b"), "b/notes", output_dir="b", places=[Path("b/x"), Path("b/y")])
    said = capsys.readouterr().out
    assert "Kept as in the state: callbacks.Warming.heat=1.0 (not 2.0)" in said
    assert "Changed from here on: callbacks.Warming.factor=0.25 (was 0.5)" in said
    assert said.count("factor") == said.count("heat") == 1
    assert "Different from the run" not in said
    assert (warming.factor, warming.heat, warming.folder) == (0.25, 7.0, Path("b"))


def test_constant_random_tensors_are_those_of_the_first_run(tmp_path, capsys):
    def train(epochs: int, seed: int) -> Holder:
        noise = torch.randn(4, generator=torch.Generator().manual_seed(seed))
        trainer = Holder([SaveTrainingStateCallback(tmp_path)], noise=noise)
        trainer.train(DATA, epochs, per_device_batch_size=8, resume_from="latest")
        return trainer

    first = train(1, 1)
    assert torch.equal(train(2, 2).noise, first.noise)
    assert (
        "The program has noise unlike the run that saved the state. The saved values are restored."
        in capsys.readouterr().out
    )


def test_a_module_that_the_resumed_program_lacks_is_named(tmp_path):
    saved(tmp_path, teacher=float64_model(3))
    with pytest.warns(UserWarning, match="holds objects that only the program can create, but has not: teacher"):
        Holder(teacher=None).load_training_state(tmp_path / "state")


def own_counts() -> list[int]:
    with shared_folder() as folder:
        trainer = Holder(count=rank(), alike=[1])
        trainer.count += 10
        trainer.save_training_state(folder / "state")
        fresh = Holder(count=0, alike=[])
        fresh.load_training_state(folder / "state")
    return [fresh.count, *fresh.alike]


def test_each_process_gets_its_own_values_back(two_ranks):
    assert two_ranks(own_counts) == [[10, 1], [11, 1]]


def test_the_best_model_has_the_teacher_that_it_was_trained_with(tmp_path):
    best = SaveBestModelCallback(tmp_path / "best.pt", "train_loss_epoch", load_saved_checkpoint=False)

    class Taught(Holder):
        def optimizer_step(self) -> None:
            super().optimizer_step()
            self.teacher[0].weight.data.add_(0.1)

    trainer = Taught([best], teacher=float64_model(2))
    trainer.train(DATA, 1, per_device_batch_size=8)
    fresh = Taught(teacher=float64_model(4))
    fresh.load_checkpoint(tmp_path / "best.pt")
    assert equal_weights(fresh.teacher.state_dict(), trainer.teacher.state_dict())


@pytest.mark.sampled
@pytest.mark.parametrize("kind", shipped_callbacks.SHIPPED, ids=lambda kind: kind.__name__)
def test_a_shipped_callback_has_no_attributes_like_a_users(kind, tmp_path, monkeypatch):
    """Its constructor creates all attributes, so that those of a user's subclass can be distinguished."""
    monkeypatch.chdir(tmp_path)
    callback = shipped_callbacks.build(type(kind.__name__, (kind,), {}))
    callback.of_the_user = 1
    trainer = Holder([callback])
    options = shipped_callbacks.RUN.get(kind.__name__, {})
    trainer.train(DATA, 2, DATA, per_device_batch_size=8, **options)
    trainer.save_training_state(tmp_path / "state")
    found = torch.load(tmp_path / "state/trainer.pt", weights_only=True)["user_attributes"]
    assert [*found["kept"].get(kind.__name__, found["settings"].get(kind.__name__))] == ["of_the_user"]


class OfBest(TrainerCallback):
    """Has the weights of the model at first, and then copies."""

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        self.best = trainer.get_model().state_dict()
        self.targets = trainer.train_dataset.tensors[1]

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.best = copy.deepcopy(trainer.get_model().state_dict())
        self.targets = 0.5 * self.targets


class Options(enum.Flag):
    NONE = 0
    LARGE = 1
    FAST = 2


class Pairs(TrainerCallback):
    """Has attributes that are one object at first, and others that stay one."""

    def __init__(self) -> None:
        self.before = self.now = torch.zeros(1)
        self.longest = self.latest = []
        self.queue = self.same_queue = []
        self.counts: Any = defaultdict(lambda: defaultdict(lambda: 0))
        self.range, self.slice, self.size = range(1), slice(0, 1), torch.Size([1])
        self.of_run = self.of_epoch = Walk(1)
        self.window: deque[int] | None = None
        self.distribution = torch.distributions.Normal(torch.zeros(1), torch.ones(1))
        self.options = Options.NONE
        self.by_kind: Any = None

    def on_update_end(self, trainer: Trainer, **kwargs: Any) -> None:
        update = trainer.progress.update
        self.before, self.now = self.now, next(trainer.get_model().parameters()).detach().sum().reshape(1)
        self.latest = [*self.latest, update]
        self.longest = self.latest if update % 3 == 0 else self.longest
        self.queue.append(update)
        self.counts["updates"][update] += 1
        self.range, self.slice, self.size = range(update), slice(0, update), torch.Size([update])
        if self.window is None:
            self.window = trainer.window = deque(maxlen=4)
            self.by_kind = defaultdict(deque)
        self.window.append(update)
        self.by_kind["even" if update % 2 == 0 else "odd"].append(update)
        if update == 3:
            self.of_epoch = Walk(2)
        self.of_run.step(0.1)
        self.of_epoch.step(0.2)
        self.distribution.loc += self.of_run.position
        self.options ^= Options.LARGE | Options.FAST
        with torch.no_grad():
            trainer.get_model()[0].bias += 0.01 * (self.now - self.before) + 0.01 * len(self.same_queue)
            trainer.get_model()[0].bias += 0.01 * self.distribution.loc + 0.01 * sum(trainer.window)

    def everything(self) -> Any:
        numbers = [*self.range, self.slice.stop, *self.size, *self.counts["updates"]]
        numbers += [self.of_run.position, self.of_epoch.position, *self.window, self.options, *self.by_kind["odd"]]
        return self.before, self.now, self.longest, self.latest, self.queue, self.same_queue, numbers


@pytest.mark.parametrize("update", [2, 5, 8])
def test_attributes_that_share_memory_are_restored_apart(tmp_path, update):
    def trained(folder: str, resume_from: Path | None = None) -> Any:
        pairs, best, model = Pairs(), OfBest(), float64_model()
        data = TensorDataset(*(tensor.clone() for tensor in DATA.tensors))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        saving = SaveTrainingStateCallback(tmp_path / folder, save_every_n_steps=1)
        trainer = Trainer(model, nn.MSELoss(), optimizer, [pairs, best, saving], seed=0)
        trainer.train(data, 2, per_device_batch_size=6, resume_from=resume_from)
        return model.state_dict(), best.best, best.targets, data.tensors, pairs.everything()

    whole = trained("whole")
    assert same_bits(trained("again", tmp_path / "whole" / f"update-{update:09d}"), whole)


class RisingRate(torch.optim.SGD):
    """Raises its rate with the number of its steps, which is not in its state."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.01 * self.steps
        return super().step(closure)


@pytest.mark.parametrize("several", [False, True])
def test_attributes_of_a_users_optimizer_are_kept(tmp_path, several):
    def trained(folder: str, resume_from: Path | None = None) -> Any:
        model = float64_model()
        optimizer: Any = RisingRate(model.parameters(), lr=0.01)
        if several:
            optimizer = [torch.optim.SGD(model[0].parameters(), lr=0.01), RisingRate(model[2].parameters(), lr=0.01)]
        saving = SaveTrainingStateCallback(tmp_path / folder, save_every_n_steps=1)
        trainer = Trainer(model, nn.MSELoss(), optimizer, [saving], seed=0)
        trainer.train(DATA, 1, per_device_batch_size=6, resume_from=resume_from)
        return model.state_dict()

    whole = trained("whole")
    assert same_bits(trained("again", tmp_path / "whole" / "update-000000002"), whole)


class Recurrent(nn.Module):
    """Carries a hidden state with its graph, and a sparse tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(5, 4), nn.Linear(4, 1)
        self.hidden: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = None if self.hidden is None else self.hidden.detach()
        self.hidden = self.cell(x.float(), before)
        outputs: torch.Tensor = self.head(self.hidden)
        return outputs.double()


def test_hidden_states_with_a_graph_are_kept(tmp_path):
    def trained(folder: str, resume_from: Path | None = None) -> Any:
        torch.manual_seed(0)
        model = Recurrent()
        saving = SaveTrainingStateCallback(tmp_path / folder, save_every_n_steps=1)
        trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), [saving], seed=0)
        trainer.adjacency = torch.eye(3).to_sparse()
        trainer.train(DATA, 2, per_device_batch_size=6, resume_from=resume_from)
        return model.state_dict(), trainer.run_history.to_dict()

    whole = trained("whole")
    assert same_bits(trained("again", tmp_path / "whole" / "update-000000005"), whole)


class CountingSampler(Sampler[int]):
    """Draws other orders in each epoch, by a count of its own."""

    def __init__(self) -> None:
        self.epochs = 0

    def __iter__(self) -> Iterator[int]:
        self.epochs += 1
        return iter(torch.randperm(24, generator=torch.Generator().manual_seed(self.epochs)).tolist())

    def __len__(self) -> int:
        return 24


@pytest.mark.parametrize("update", [2, 4, 7])
def test_a_sampler_that_a_trainer_holds_is_restored_once(tmp_path, update):
    def trained(folder: str, resume_from: Path | None = None) -> Any:
        sampler = CountingSampler()
        saving = SaveTrainingStateCallback(tmp_path / folder, save_every_n_steps=1)
        trainer = Holder([saving], sampler=sampler)
        trainer.train(DataLoader(DATA, 6, sampler=sampler), 2, resume_from=resume_from)
        return trainer.model.state_dict(), sampler.epochs

    whole = trained("whole")
    assert same_bits(trained("again", tmp_path / "whole" / f"update-{update:09d}"), whole)
