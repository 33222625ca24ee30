"""Resuming: a run continues from each of its training states to the same bits."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset, TensorDataset

from pytorch_accel_lite import StopTrainingError, Trainer, TrainerCallback, callbacks
from pytorch_accel_lite.callbacks import SaveBestModelCallback, SaveTrainingStateCallback
from pytorch_accel_lite.extending import SETTINGS_RECORDER, SettingsRecorder
from tests.launching import CAN_SHARD, SOAK, only_with_soak, some_of
from tests.ranks import world_size
from tests.scripts.resumable import CopyStates, OrderCallback, make_model, run, saved_states
from tests.sharded import gathered, large_model, sharding_accelerator
from tests.small_models import (
    Rows,
    adamw_trainer,
    assert_same,
    equal_weights,
    float64_data,
    float64_model,
    listener,
    make_trainer,
    raises_at,
    same_bits,
    train,
    weights,
)


def run_shards(folder: Path, accelerator: Accelerator | None, resume_from: Any = None) -> Trainer:
    model = large_model()
    saving = SaveTrainingStateCallback(folder / "states", 1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    callbacks = [saving, CopyStates(folder)]
    trainer = Trainer(model, nn.MSELoss(), optimizer, callbacks, accelerator=accelerator, seed=3)
    trainer.train(float64_data(22), 2, float64_data(9), 3, resume_from=resume_from)
    return trainer


def _trained(accelerator: Accelerator, callbacks: list[Any], **kwargs: Any) -> Trainer:
    model = large_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = Trainer(model, nn.MSELoss(), optimizer, callbacks, accelerator=accelerator, seed=3)
    trainer.train(float64_data(12), 1, per_device_batch_size=3, **kwargs)
    return trainer


class Indexed(Rows):
    def __getitem__(self, index):
        return *super().__getitem__(index), torch.tensor(index)


class OfThree(Trainer):
    def calculate_train_batch_loss(self, batch):
        return super().calculate_train_batch_loss(batch[:2])


def _train(folder: Path, size: int, batch: int, accumulation: int, stop: int, resume: Path | None) -> list[int]:
    """Train one epoch, or the rest of it, and return the samples of all steps and ranks."""
    torch.manual_seed(0)
    model, order = nn.Linear(5, 1).double(), OrderCallback()
    saving = SaveTrainingStateCallback(folder, save_every_n_steps=1, save_at_end=False, max_checkpoints=1)
    callbacks = [order, *([saving] if resume is None else []), raises_at(stop, StopTrainingError("enough"))]
    trainer = OfThree(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.01), callbacks, seed=size)
    trainer.train(
        Indexed(float64_data(size)),
        1,
        per_device_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        resume_from=resume,
    )
    return [sample for step in order.order for sample in step]


def _drawn_tasks() -> Any:
    draws = random.Random(7)
    for number in range(15 if SOAK else 6):
        size, batch, other = draws.randint(9, 60), draws.randint(1, 4), draws.randint(1, 9)
        accumulation, others = draws.randint(1, 3), draws.randint(1, 3)
        updates = -(-size // (2 * batch * accumulation))
        yield number, size, (batch, accumulation, draws.randint(1, max(updates - 1, 1))), (other, others)


pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize(("accumulation", "workers", "seed"), [(3, 2, 5), *[(1, 0, 5), (2, 0, None)] * SOAK])
def test_from_every_save_point_a_run_resumes_to_the_same_bits(tmp_path, accumulation, workers, seed):
    kwargs = {"accumulation": accumulation, "workers": workers, "seed": seed, "save_every_n_epochs": 1}
    torch.manual_seed(1)
    whole = run(tmp_path, resume_from=None, extra=(CopyStates(tmp_path),), **kwargs)
    copies = sorted((tmp_path / "copies").glob("*/update-*"))
    assert len(copies) == whole["progress"]["update"] + 3
    for copy in some_of(copies):
        torch.manual_seed(99)
        resumed = run(tmp_path / f"again-{copy.parent.name}", resume_from=copy, **kwargs)
        assert_same(resumed, whole)


class Lists:
    """A loader of the user's own, the same in every epoch."""

    def __init__(self, data, size):
        self.batches = [data[i : i + size] for i in range(0, len(data), size)]

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


class OwnBatches(Trainer):
    def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
        return Lists(self.train_dataset, batch_size)


@pytest.mark.sampled
@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["in memory", *(pytest.param(kind, marks=pytest.mark.extension("streams")) for kind in ("stream", "own"))]
)
@pytest.mark.parametrize("limit", [None, *[pytest.param(3, marks=pytest.mark.extension("pytorch_accelerated"))] * SOAK])
def test_a_run_with_dropout_resumes_its_bits_from_any_data(tmp_path, kind, limit):
    """The generators are restored, also after earlier samples were read again and dropped."""

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(data)

    data = float64_data(22)
    sets = {"in memory": data, "stream": Stream(), "own": data}

    def train(folder, resume_from=None):
        model = make_model()
        saving = SaveTrainingStateCallback(folder / "states", 1, 1)
        limits = [callbacks.LimitBatchesCallback(limit)] if limit else []
        kind_of_trainer = OwnBatches if kind == "own" else Trainer
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        listeners = [saving, CopyStates(folder), *limits]
        trainer = kind_of_trainer(model, torch.nn.MSELoss(), optimizer, listeners, seed=5)
        kwargs = {"shuffle": False} if kind == "stream" else None
        trainer.train(sets[kind], 2, None, 4, train_dataloader_kwargs=kwargs, resume_from=resume_from)
        assert trainer.progress.update == 2 * (limit or 6)
        return model.state_dict(), trainer.run_history.to_dict()

    weights, history = train(tmp_path)
    for copy in some_of(sorted((tmp_path / "copies").glob("*/update-*"))):
        again = train(tmp_path / f"again-{copy.parent.name}", copy)
        assert again[1] == history
        assert equal_weights(again[0], weights)


def test_saving_does_not_change_the_run(tmp_path):
    often = run(tmp_path / "often", resume_from=None)
    never = run(tmp_path / "never", resume_from=None, save_every_n_steps=None, save_at_end=False)
    assert_same(never, often)
    assert not list((tmp_path / "never").glob("states/update-*"))


def every_save_point(folder: Path, accumulation: int) -> Any:
    """A whole run, and one resumed from every third state that it saved; from every one with SOAK."""
    # On 3 processes no share has one sample: batch norm takes none of them.
    kwargs = {"accumulation": accumulation, "save_every_n_epochs": 1, "size": 24 if world_size() == 3 else 22}
    results = [run(folder, resume_from=None, extra=(CopyStates(folder),), **kwargs)]
    copies = sorted((folder / "copies").glob("*/update-*"))
    assert len(copies) == results[0]["progress"]["update"] + 3
    for copy in some_of(copies):  # within epochs and at their ends
        torch.manual_seed(99)
        results.append(run(folder / f"again-{copy.parent.name}", resume_from=copy, **kwargs))
    return results


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.parametrize(("processes", "accumulation"), [(2, 3), *[(2, 1), (3, 2), (3, 1)] * SOAK])
def test_processes_resume_the_same_bits_from_every_save_point(tmp_path, job, processes, accumulation):
    runs = job(processes).run(every_save_point, tmp_path, accumulation)
    assert len(runs) == processes
    for whole, *resumed in runs:  # of each rank: its generators are its own
        assert len(resumed) >= 2
        for again in resumed:
            assert again["processes"] == processes
            assert_same(again, whole)


def several_buckets(folder: Path) -> bool:
    """Whether a resumed run ends with the weights of the whole one, if DDP has several buckets of gradients."""

    def train_large(resume_from: Path | None) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(300, 300) for _ in range(6)], nn.Linear(300, 1))  # more than 1 MiB
        saving = SaveTrainingStateCallback(folder, save_every_n_epochs=None, save_every_n_steps=2, save_at_end=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        trainer = Trainer(model, nn.MSELoss(), optimizer, [saving] if resume_from is None else [])
        data = TensorDataset(torch.randn(36, 300), torch.randn(36, 1))
        trainer.train(data, 1, per_device_batch_size=3, resume_from=resume_from)
        return trainer.get_model().state_dict()

    return equal_weights(train_large(None), train_large(folder / "update-000000002"))


@pytest.mark.processes
def test_three_processes_resume_ddp_in_the_same_bits(tmp_path, job):
    """The wrapper rearranges its buckets after its first backward pass, and so the order of the sums."""
    assert job(3).run(several_buckets, tmp_path) == [True] * 3


class CountsCalls(nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


class Calls:
    """A loss function that counts its calls."""

    number = 0

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.number += 1
        return nn.functional.mse_loss(outputs, targets)


class MeasuresLosses(Trainer):
    """Divides its losses by their running mean."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mean = torch.ones(())
        self.losses: list[float] = []

    def calculate_train_batch_loss(self, batch):
        output = super().calculate_train_batch_loss(batch)
        self.mean.mul_(0.5).add_(output["loss"].detach(), alpha=0.5)
        self.losses.append(output["loss"].item())
        self.run_history.update_metric("step", self.progress.step)
        return {**output, "loss": output["loss"] / self.mean}


def attributes_that_steps_change(folder: Path) -> bool:
    """Whether attributes that each step changes are the same after a run, and after resuming it."""
    results = []
    for resume_from in (None, folder / "update-000000002"):
        model, loss_func = nn.Sequential(CountsCalls(4, 1)), Calls()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        saving = SaveTrainingStateCallback(folder, save_every_n_steps=1, save_at_end=False, max_checkpoints=None)
        trainer = MeasuresLosses(model, loss_func, optimizer, [saving] if resume_from is None else [])
        train(trainer, size=24, resume_from=resume_from)
        found = trainer.mean, trainer.losses, model[0].calls, loss_func.number, trainer.run_history.to_dict()
        results.append((found, weights(model)))
    return same_bits(*results)


@pytest.mark.processes
def test_three_processes_resume_what_each_step_changes(tmp_path, job):
    assert job(3).run(attributes_that_steps_change, tmp_path) == [True] * 3


def save_in_mid_epoch(folder: Path) -> list[list[int]]:
    """The samples that each of the drawn tasks had had when it was stopped."""
    return [_train(folder / f"task{number}", size, *before, None) for number, size, before, _ in _drawn_tasks()]


def resume_in_mid_epoch(folder: Path) -> list[tuple[int, list[int]]]:
    """The size of each task, and its samples with those before, in a job of other processes and batch sizes."""
    results = []
    for number, size, _, after in _drawn_tasks():
        (state,) = folder.glob(f"task{number}/update-*")
        results.append((size, _train(folder, size, *after, -1, state)))
    return results


@pytest.mark.thorough
@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:The training state holds the state of callback")
@pytest.mark.processes
def test_an_epoch_resumes_on_other_processes_and_batch_sizes(tmp_path, job):
    """Drawn sizes, batch sizes and moments: saved by 2 processes, resumed by 1 and 3 with what was not yet seen."""
    saved, _ = job(2).run(save_in_mid_epoch, tmp_path)
    resume = resume_in_mid_epoch
    others = (3, 2) if SOAK else (3,)
    for resumed in (resume(tmp_path), *(found for count in others for found in job(count).run(resume, tmp_path))):
        assert len(resumed) == len(saved) >= 6
        for before, (size, everything) in zip(saved, resumed, strict=True):
            assert before, "it was saved within the epoch"
            assert everything[: len(before)] == before
            assert sorted(everything) == list(range(size))


def test_resuming_a_finished_run_says_that_nothing_is_left(tmp_path, capsys):
    whole = run(tmp_path)
    assert_same(run(tmp_path), whole)
    assert "Nothing left to do: the run had finished. Increase num_epochs to" in capsys.readouterr().out


def test_a_finished_run_names_the_limit_that_has_ended_it(tmp_path, capsys):
    for _ in range(2):
        saving = SaveTrainingStateCallback(tmp_path)
        train(make_trainer([saving], seed=0), epochs=2, max_num_train_steps=2, resume_from="latest")
    assert "Nothing left to do: the run had finished. Increase max_num_train_steps to" in capsys.readouterr().out


class SeedRecorder(SettingsRecorder):
    """Records and compares the seed, and the rates before and after loading."""

    def record(self, trainer: Any, reads_data: bool = True) -> dict[str, Any]:
        return {"seed": trainer.seed}

    def compare(self, trainer: Any, state: Any, now: dict[str, Any], attributes: Any) -> str:
        before = json.loads(state.shared["settings"] or "{}").get("seed", "not recorded")
        return f"The seed was {before}, and is {now['seed']}."

    def optimizer_options(self, trainer: Any) -> dict[str, str]:
        return {"lr": f"{trainer.optimizer.param_groups[0]['lr']}"}

    def describe_loaded(self, trainer: Any, before: Any, source: str) -> str:
        return f"The rate was {before['lr']}, and {source} has {self.optimizer_options(trainer)['lr']}."


def test_a_recorder_of_settings_is_asked_what_has_changed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(SETTINGS_RECORDER, "content", SeedRecorder())
    train(make_trainer([SaveTrainingStateCallback(tmp_path / "run")], seed=1)).save_training_state(tmp_path / "state")
    assert torch.load(tmp_path / "state/trainer.pt", weights_only=True)["settings"] == '{"seed": 1}'
    train(make_trainer(seed=2), 2, resume_from=tmp_path / "run/update-000000003")
    assert "The seed was 1, and is 2." in capsys.readouterr().out.splitlines()
    model = float64_model(1, 4, torch.float32)
    other = make_trainer(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5))
    other.load_training_state(tmp_path / "state")
    assert f"The rate was 0.5, and {tmp_path / 'state'} has 0.1." in capsys.readouterr().out


def test_states_resume_with_and_without_a_recorder(tmp_path, capsys, monkeypatch):
    for number, (first, then) in enumerate([(None, None), (None, SeedRecorder()), (SeedRecorder(), None)]):
        monkeypatch.setattr(SETTINGS_RECORDER, "content", first)
        train(make_trainer([SaveTrainingStateCallback(tmp_path / f"{number}")], seed=1))
        capsys.readouterr()
        monkeypatch.setattr(SETTINGS_RECORDER, "content", then)
        resumed = train(make_trainer(seed=2), 2, resume_from=tmp_path / f"{number}/update-000000003")
        assert resumed.progress.epochs_completed == 2
        said = "The seed was not recorded, and is 2." if then else ""
        assert [line for line in capsys.readouterr().out.splitlines() if "seed" in line] == [said] * bool(said)


def test_a_long_history_is_resumed_unchanged(tmp_path):
    odd = [1.5, 2, True, False, 2**70, float("nan"), "text"]

    def record(trainer: Any) -> None:
        history, epoch = trainer.run_history, trainer.progress.epoch
        for name, value in (("float", 0.1 * epoch), ("int", epoch), ("huge", 2**62 + epoch), ("odd", odd[epoch % 7])):
            history.update_metric(name, value)

    def run(epochs: int, **kwargs: Any) -> Any:
        saving = SaveTrainingStateCallback(tmp_path, max_checkpoints=1)
        trainer = make_trainer([listener(on_train_epoch_end=record), saving])
        return train(trainer, epochs, size=2, **kwargs).run_history

    run(20)
    resumed, whole = run(21, resume_from="latest"), run(21)
    for name in whole:
        assert [*map(repr, resumed[name])] == [*map(repr, whole[name])]
    assert resumed.rows()[:-1] == resumed.rows()[:20]
    assert resumed.rows(20) == resumed.rows()[19:]


def on_two_processes(folder: Path) -> Any:
    """The final weights, gathered, and the losses; each run that is resumed from a state ends with the same."""
    accelerator = sharding_accelerator()
    trainer = run_shards(folder / "whole", accelerator)
    assert trainer.accelerator.distributed_type == DistributedType.FSDP
    assert any(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
    expected = gathered(trainer.model.state_dict())
    losses = trainer.run_history.to_dict()
    trainer.save_model(folder / "model.safetensors")
    trainer.save_checkpoint(folder / "model.pt")
    for copy in sorted((folder / "whole" / "copies").glob("*/update-*")):
        again = run_shards(folder / f"again-{copy.parent.name}", accelerator, copy)
        assert equal_weights(gathered(again.model.state_dict()), expected), copy
        assert again.run_history.to_dict() == losses
    return expected, losses


@only_with_soak
@CAN_SHARD
@pytest.mark.processes
def test_sharded_weights_are_saved_unsharded_and_resumed(tmp_path, job):
    expected, history = job(2).run(on_two_processes, tmp_path)[0]
    assert equal_weights(safetensors.torch.load_file(tmp_path / "model.safetensors"), expected)
    model = large_model()
    trainer = adamw_trainer(model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01))
    trainer.load_checkpoint(tmp_path / "model.pt")  # the optimizer's state too
    assert equal_weights(model.state_dict(), expected)
    run_shards(tmp_path / "unsharded", None, tmp_path / "whole/copies/004-step/update-000000004")
    resumed = run_shards(tmp_path / "finished", None, saved_states(tmp_path / "whole")[-1])
    assert equal_weights(resumed.model.state_dict(), expected)
    assert resumed.run_history.to_dict() == history


def of_seven_samples() -> Any:
    """A process takes part in a step in which it has no sample."""
    accelerator, data = sharding_accelerator(), float64_data(7)
    trainer = _trained(accelerator, [])
    weights = gathered(trainer.model.state_dict())
    loss = trainer.evaluate(data, per_device_batch_size=3)["evaluation_loss"]
    return weights, loss, trainer.predict(data, per_device_batch_size=3)


@CAN_SHARD
@pytest.mark.processes
def test_a_filler_sample_of_sharded_ranks_counts_zero(two_ranks):
    data, model = float64_data(7), large_model().eval()
    for loaded, loss, predictions in two_ranks.run(of_seven_samples):
        model.load_state_dict(loaded)
        outputs = model(data.tensors[0]).detach()
        torch.testing.assert_close(predictions, outputs)
        expected = (outputs - data.tensors[1]).square()[:, 0].tolist()
        assert loss == pytest.approx(sum(expected) / 7)


def refusals() -> dict[str, str]:
    """The errors for features that sharded weights do not support."""
    accelerator, said = sharding_accelerator(), {}
    for name, callback in {
        "rewrap": listener(on_train_epoch_start=Trainer.rewrap_model),
        "skip": callbacks.SkipFailedBatchesCallback(),
    }.items():
        try:
            _trained(accelerator, [callback])
        except (ValueError, RuntimeError) as error:
            said[name] = str(error)
    return said


def state_of_fsdp1(folder: Path) -> str | None:
    model = large_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = Trainer(model, nn.MSELoss(), optimizer, [], accelerator=sharding_accelerator(version=1))
    try:
        trainer.save_training_state(folder / "state")
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.extension("failed_batches")
@CAN_SHARD
@pytest.mark.processes
def test_features_unsupported_by_sharded_weights_are_refused(tmp_path, two_ranks):
    for said in two_ranks(refusals):
        assert "cannot change in the middle of this run: the model is sharded (FSDP)" in said["rewrap"]
        assert "SkipFailedBatchesCallback does not work with sharded weights" in said["skip"]
    for message in two_ranks.run(state_of_fsdp1, tmp_path):
        assert message.startswith("Training states are not supported with FSDP: ")
        assert "Use FSDP with fsdp_version=2" in message


class Counter:
    """An object with a state."""

    value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def test_objects_registered_with_the_accelerator_are_kept(tmp_path):
    def run(epochs: int) -> tuple[int, int]:
        accelerator, first, second = Accelerator(cpu=True), Counter(), Counter()
        trainer = make_trainer([SaveTrainingStateCallback(tmp_path), counts], accelerator=accelerator)
        accelerator.register_for_checkpointing(trainer.model, first, second)
        trainer.register_for_checkpointing("second", second)
        train(trainer, epochs, resume_from="latest")
        return first.value, second.value

    def count(trainer: Trainer, step: int, **kwargs: Any) -> None:
        trainer.accelerator._custom_objects[1].value += 1
        trainer.registered_objects["second"].value += 10

    counts = listener(on_train_step_end=count)
    assert run(1) == (3, 30)
    shared = torch.load(next(tmp_path.glob("update-*/trainer.pt")))
    assert shared["objects"] == {"second": {"value": 30}, "accelerator.Counter.1": {"value": 3}}
    assert run(2) == (6, 60)


def test_user_objects_are_saved(tmp_path):
    trainer = adamw_trainer(float64_model())
    counter = Counter()
    counter.value = 3
    trainer.register_for_checkpointing("counter", counter)
    trainer.train(float64_data(8), 1)
    trainer.save_training_state(tmp_path / "state", {"note": "kept"})
    fresh, again = adamw_trainer(float64_model(1)), Counter()
    fresh.register_for_checkpointing("counter", again)
    metadata = fresh.load_training_state(tmp_path / "state")
    assert metadata["note"] == "kept"
    assert metadata["progress"]["update"] == 1
    assert again.value == 3
    assert equal_weights(fresh.model.state_dict(), trainer.model.state_dict())
    other = adamw_trainer(float64_model())
    other.register_for_checkpointing("other", again)
    with (
        pytest.warns(UserWarning, match="holds nothing for the registered object 'other'"),
        pytest.warns(UserWarning, match="state of registered object 'counter', which no longer exists"),
    ):
        other.load_training_state(tmp_path / "state")
    with pytest.raises(ValueError, match="already registered as 'counter'"):
        fresh.register_for_checkpointing("counter", again)
    with pytest.raises(TypeError, match=r"must have state_dict\(\)"):
        fresh.register_for_checkpointing("other", object())


@pytest.mark.parametrize(("first", "second"), [("pt", "other"), ("other", "format")])
def test_tied_weights_may_have_any_names(tmp_path, first, second):
    def make() -> torch.nn.Module:
        module = torch.nn.Linear(5, 1).double()
        module.register_parameter(first, torch.nn.Parameter(torch.rand(3)))
        module.register_parameter(second, getattr(module, first))
        return module

    saved, loaded = make(), make()
    adamw_trainer(saved).save_training_state(tmp_path / "state")
    adamw_trainer(loaded).load_training_state(tmp_path / "state")
    assert equal_weights(loaded.state_dict(), saved.state_dict())
    assert len({path.stat().st_mode for path in (tmp_path / "state").iterdir()}) == 1


def test_a_checkpoint_may_be_loaded_in_part(tmp_path):
    adamw_trainer(float64_model(1)).save_checkpoint(tmp_path / "model.pt")
    model = float64_model(2)
    model[2] = torch.nn.Linear(8, 3).double()
    kept = model[2].weight.clone()
    with pytest.warns(UserWarning, match=r"of a different shape: 2\.bias .*, 2\.weight .* The rest is loaded"):
        adamw_trainer(model).load_checkpoint(tmp_path / "model.pt", load_optimizer=False, strict=False)
    assert torch.equal(model[0].weight, float64_model(1)[0].weight)
    assert torch.equal(model[2].weight, kept)


@pytest.mark.parametrize("greater", [False, True])
def test_a_resumed_run_keeps_the_best_k_models_too(tmp_path, greater):
    class Scores(TrainerCallback):
        values = (3.0, 1.0, 5.0, float("nan"), 2.0, 4.0)

        def on_eval_epoch_end(self, trainer, **kwargs):
            trainer.run_history.update_metric("score", self.values[trainer.progress.epoch - 1])

    for epochs in (3, 6):
        model = float64_model()
        best = SaveBestModelCallback(tmp_path / "best.pt", "score", greater, keep=2, load_saved_checkpoint=False)
        saving = SaveTrainingStateCallback(tmp_path / "states")
        trainer = adamw_trainer(model, callbacks=[Scores(), best, saving], seed=0)
        trainer.train(float64_data(8), epochs, float64_data(4), resume_from="latest")
    expected = {"best-epoch0003.pt", "best-epoch0006.pt"} if greater else {"best-epoch0002.pt", "best-epoch0005.pt"}
    assert {path.name for path in tmp_path.glob("best*")} == expected | {"best.pt"}
    scores = {name: torch.load(tmp_path / name)["score"] for name in expected | {"best.pt"}}
    assert scores["best.pt"] == (5.0 if greater else 1.0)
    with pytest.raises(ValueError, match="keep=0 must be at least 1"):
        SaveBestModelCallback(keep=0)
