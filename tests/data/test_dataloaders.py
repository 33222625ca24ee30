"""DataLoaders passed in place of datasets."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import redirect_stdout
from itertools import cycle, islice
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from pytorch_accel_lite.data import OwnShard
from tests.launching import SOAK, some_of
from tests.own_loaders import ReadsAhead
from tests.ranks import OrderedStream, Recorder, rank, shared_folder, world_size
from tests.small_models import (
    Rows,
    adamw_trainer,
    equal_weights,
    float64_data,
    float64_model,
    hand_written_loop,
    listener,
    make_data,
    make_trainer,
    train,
    weights,
)
from tests.streams import SavesEachUpdate

DATA = float64_data(37)
OTHER = float64_data(11)


def numbers(size: int = 24) -> TensorDataset:
    x = torch.arange(float(size), dtype=torch.float64)[:, None].expand(-1, 5)
    return TensorDataset(x, x[:, :1])


def everything(loads: bool, rows: bool, seed: int | None, logical: int | None) -> Any:
    """The results of training, evaluation and prediction with datasets, or with loaders of them."""
    data, other = (Rows(DATA), Rows(OTHER)) if rows else (DATA, OTHER)
    torch.manual_seed(5)
    trainer = adamw_trainer(float64_model(), seed=seed, logical_processes=logical)
    if loads:
        evaluated = {"all": DataLoader(data, 6), "few": DataLoader(other, 6)}
        train = {"train_dataset": DataLoader(data, 6, shuffle=True), "eval_dataset": evaluated}
        others: dict[str, Any] = {}
    else:
        evaluated = {"all": data, "few": other}
        without = {"num_workers": 0}
        train = {"train_dataset": data, "eval_dataset": evaluated, "per_device_batch_size": 6}
        train |= {"train_dataloader_kwargs": without, "eval_dataloader_kwargs": without}
        others = {"per_device_batch_size": 6, "dataloader_kwargs": without}
    trainer.train(**train, num_epochs=3, gradient_accumulation_steps=3)
    sizes = trainer.run_config.train_per_device_batch_size, trainer.run_config.eval_total_batch_size
    metrics = trainer.evaluate(evaluated["few"], **others)
    outputs = trainer.predict(evaluated["few"], **others)
    parts = torch.cat(list(trainer.predict_iter(evaluated["few"], **others)))
    return (
        weights(trainer.get_model()) | {"out": outputs, "parts": parts},
        sizes,
        metrics,
        trainer.run_history.to_dict(),
    )


def with_both(*case: Any) -> Any:
    return [everything(loads, *case) for loads in (False, True)]


def check_both(found: Any) -> None:
    (tensors, *numbers_), (of_loaders, *others) = found
    assert equal_weights(tensors, of_loaders)
    assert numbers_ == others
    assert torch.equal(tensors["out"], tensors["parts"])


CASES = pytest.mark.parametrize(
    "case",
    [
        pytest.param((False, None, None), id="memory"),
        pytest.param((True, None, None), id="rows"),
        pytest.param((True, 3, None), id="seeded rows"),
        pytest.param((True, 3, 2), id="logical processes", marks=pytest.mark.extension("logical")),
    ],
)


@CASES
def test_a_loader_trains_like_its_dataset(case):
    check_both(with_both(*case))


@pytest.mark.sampled
@CASES
@pytest.mark.processes
def test_a_loader_trains_like_its_dataset_on_several_processes(two_ranks, case):
    found = two_ranks.run(with_both, *case)
    for each in found:
        check_both(each)
    assert equal_weights(found[0][1][0], found[1][1][0])


class BatchesDrawnAtOnce(Sampler[list[int]]):
    """Draws random numbers when its iteration begins, not with its first batch."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[list[int]]:
        return iter([batch.tolist() for batch in torch.randperm(37).split(4)])


class BatchesInOneList(BatchesDrawnAtOnce):
    """Gives the same list for each batch, with other indices in it."""

    def __iter__(self) -> Iterator[list[int]]:
        batch = []
        for indices in super().__iter__():
            batch[:] = indices
            yield batch


@pytest.mark.parametrize("kind", ["shuffled", "with a generator", "in batches", "weighted", "at once", "in one list"])
def test_a_loader_gives_the_bits_of_a_loop_over_it(kind):
    def make() -> Any:
        own = torch.Generator().manual_seed(3)
        torch.manual_seed(11)
        return {
            "shuffled": lambda: DataLoader(Rows(DATA), 4, shuffle=True, drop_last=True),
            "with a generator": lambda: DataLoader(Rows(DATA), 4, shuffle=True, generator=own),
            "in batches": lambda: DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 4, False)),
            "weighted": lambda: DataLoader(DATA, 4, sampler=WeightedRandomSampler([1.0] * 37, 20, generator=own)),
            "at once": lambda: DataLoader(Rows(DATA), batch_sampler=BatchesDrawnAtOnce()),
            "in one list": lambda: DataLoader(Rows(DATA), batch_sampler=BatchesInOneList()),
        }[kind]()

    ours, theirs = float64_model(), float64_model()
    hand_written_loop(theirs, torch.optim.AdamW(theirs.parameters(), lr=0.01), make(), epochs=3)
    adamw_trainer(ours).train(make(), 3)
    assert equal_weights(ours.state_dict(), theirs.state_dict())


def test_a_seeded_run_reads_all_batches_given_in_one_list():
    recorder = Recorder()
    loader = DataLoader(numbers(37), batch_sampler=BatchesInOneList())
    adamw_trainer(float64_model(), seed=1, callbacks=[recorder]).train(loader, 1)
    assert sorted(torch.cat(recorder.inputs)[:, 0].tolist()) == list(range(37))


class DatasetOf(TrainerCallback):
    """Keeps what callbacks see of the data."""

    def on_training_run_start(self, trainer, **kwargs):
        self.seen = trainer.train_dataset, trainer.eval_dataset, trainer.train_dataloader.batch_size


def test_callbacks_see_the_dataset_of_a_loader():
    seen = DatasetOf()
    data = Rows(DATA)
    trainer = adamw_trainer(float64_model(), callbacks=[seen])
    loader = DataLoader(data, 5)
    trainer.train(loader, 1, eval_dataset={"a": loader, "b": OTHER})
    assert seen.seen == (data, {"a": data, "b": OTHER}, 5)
    assert trainer.run_config.train_dl_kwargs["batch_size"] == 5
    assert trainer.eval_dataloaders[1].batch_size == 8
    assert trainer.evaluate().keys() == {"a_evaluation_loss", "b_evaluation_loss"}


@pytest.mark.extension("streams")
def test_a_loader_may_be_replaced_within_an_epoch(tmp_path):
    """For the epochs that follow. States saved until then have what all states have."""

    def replace(trainer: Trainer, **kwargs: Any) -> None:
        if trainer.progress.step == 1:
            trainer.train_dataloader = DataLoader(make_data(12), 4)

    saving = SaveTrainingStateCallback(tmp_path, save_every_n_steps=1, max_checkpoints=None)
    trainer = make_trainer([listener(on_train_step_start=replace), saving], seed=0)
    train(trainer, 2, evaluate_every="0.5 epochs", eval_dataset=True)
    assert trainer.progress.update == 6
    resumed, states = make_trainer(seed=0), sorted(tmp_path.glob("update-*"))
    train(resumed, 2, resume_from=states[1], evaluate_every="0.5 epochs", eval_dataset=True)
    assert resumed.progress.update == 6


@pytest.mark.extension("pytorch_accelerated", "streams")
def test_an_overridden_method_wraps_the_loader():
    from pytorch_accel_lite.utils import DataLoaderSlice

    class Short(Trainer):
        def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
            return DataLoaderSlice(super().create_train_dataloader(batch_size, train_dl_kwargs), 1)

    trainer = make_trainer(model=float64_model(), trainer_class=Short)
    trainer.train(DataLoader(DATA, 4, sampler=SubsetRandomSampler(range(5))), 2)
    assert trainer.progress.samples == 8


@pytest.mark.extension("memory_estimate")
def test_memory_is_estimated_from_a_loader():
    trainer = adamw_trainer(float64_model(), seed=2)
    assert trainer.estimate_memory(DataLoader(DATA, 6)).per_device_batch_size == 6


@pytest.mark.extension("tuning")
def test_trials_read_a_loader():
    def trainer() -> Trainer:
        return adamw_trainer(float64_model(), seed=2)

    loader = DataLoader(Rows(DATA), 8, shuffle=True)
    kwargs = {"train_dataloader_kwargs": {"num_workers": 0}}
    assert (
        trainer().find_lr(loader, num_steps=10).losses == trainer().find_lr(Rows(DATA), num_steps=10, **kwargs).losses
    )
    assert trainer().diagnose(DataLoader(DATA, 37), num_steps=2).samples == 37
    assert trainer().find_batch_size(loader, max_batch_size=11) == 11
    for fixed in (DataLoader(DATA, batch_sampler=[[1, 2]]), OwnShard([])):
        with pytest.raises(ValueError, match=r"find_batch_size\(\) cannot change the batches of .*Pass its dataset"):
            trainer().find_batch_size(fixed)


def resumed(kind: str, workers: int) -> Any:
    """The weights after a run, and after it was resumed at one of its updates: within and after the first epoch."""

    def run(resume_from: Any = None, callbacks: Any = ()) -> Any:
        loader: Any = DataLoader(Rows(DATA), 3, shuffle=True, num_workers=workers)
        if kind == "stateful":
            stateful = pytest.importorskip("torchdata.stateful_dataloader")
            loader = stateful.StatefulDataLoader(OrderedStream(list(DATA)), 3, num_workers=workers)
        elif kind == "distributed":
            loader = DataLoader(DATA, 3, sampler=DistributedSampler(DATA, world_size(), rank()))
        trainer = adamw_trainer(float64_model(), seed=4, callbacks=callbacks)
        trainer.train(loader, 2, eval_dataset=DataLoader(OTHER, 3), resume_from=resume_from)
        return weights(trainer.get_model())

    with shared_folder() as folder:
        whole = run(callbacks=[SavesEachUpdate(folder)])
        return [whole] + [run(folder / str(update)) for update in (2, 5, 9)]


TORCHDATA = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
KINDS = [
    ("shuffled", 0),
    ("distributed", 0),
    pytest.param("stateful", 0, marks=(TORCHDATA, pytest.mark.extension("streams"))),
    pytest.param("shuffled", 2, marks=pytest.mark.slow),
]


@pytest.mark.sampled
@pytest.mark.soak
@pytest.mark.parametrize(("kind", "workers"), some_of(KINDS))
def test_a_run_on_a_loader_resumes_to_the_same_bits(kind, workers):
    whole, *others = resumed(kind, workers)
    assert all(equal_weights(whole, other) for other in others)


@pytest.mark.thorough
@pytest.mark.processes
@pytest.mark.soak
@pytest.mark.parametrize(("kind", "workers"), KINDS[: 2 if SOAK else 1])
def test_processes_on_a_loader_resume_to_the_same_bits(two_ranks, kind, workers):
    for whole, *others in two_ranks.run(resumed, kind, workers):
        assert all(equal_weights(whole, other) for other in others)


def sizes_of_loaders() -> Any:
    """The sizes of the loaders of a run and of Accelerate, for the same data."""
    data = numbers(23)
    loaders = {
        "shuffled": DataLoader(data, 3, shuffle=True),
        "drop_last": DataLoader(data, 4, drop_last=True),
        "batches": DataLoader(data, batch_sampler=BatchSampler(range(20), 2, False)),
    }
    found = {}
    for name, loader in loaders.items():
        trainer = adamw_trainer(float64_model())
        prepared = trainer.accelerator.prepare_data_loader(loader)
        trainer.train(loader, 1, loader)
        of_run = [trainer.train_dataloader, trainer.eval_dataloader]
        for attribute in ("total_batch_size", "total_dataset_length"):
            found[name, attribute] = {getattr(each, attribute) for each in [prepared, *of_run]}
        config = trainer.run_config
        found[name, "total_batch_size"] |= {config.train_total_batch_size, config.eval_total_batch_size}
        assert (
            config.train_per_device_batch_size
            == config.eval_per_device_batch_size
            == config.train_total_batch_size // (trainer.accelerator.num_processes)
        )
    trainer = adamw_trainer(float64_model())
    trainer.train(data, 1, per_device_batch_size=5)
    found["dataset"] = {trainer.train_dataloader.total_batch_size, trainer.run_config.train_total_batch_size}
    assert trainer.train_dataloader.total_dataset_length == 23
    return found


def check_sizes(found: Any, processes: int) -> None:
    expected: dict[Any, set[int]] = {
        (name, "total_dataset_length"): {23} for name in ("shuffled", "drop_last", "batches")
    }
    for name, size in {"shuffled": 3, "drop_last": 4, "batches": 2}.items():
        expected[name, "total_batch_size"] = {size * processes}
    assert found == expected | {"dataset": {5 * processes}}


def test_loaders_have_the_sizes_that_those_of_accelerate_have():
    check_sizes(sizes_of_loaders(), 1)


class Created(Trainer):
    def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
        return DataLoader(Rows(DATA), 2 * batch_size)


class Fitting(Sampler[list[int]]):
    batch_size = "as many as fit"

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2, 3, 4]])


def test_the_config_has_the_batch_size_of_the_loader_if_known():
    model = float64_model()
    trainer = Created(model, nn.MSELoss(), torch.optim.AdamW(model.parameters()), callbacks=[])
    trainer.train(Rows(DATA), 1, per_device_batch_size=3)
    assert trainer.run_config.train_per_device_batch_size == 6
    batches = BatchSampler(range(20), 5, False)
    trainer = adamw_trainer(float64_model())
    trainer.train(numbers(), 1, train_dataloader_kwargs={"batch_sampler": batches})
    assert trainer.run_config.train_per_device_batch_size == 5
    trainer.train(DataLoader(numbers(), batch_sampler=Fitting()), 1, per_device_batch_size=8)
    assert trainer.run_config.train_per_device_batch_size == 8


@pytest.mark.extension("logical")
def test_a_full_batch_of_logical_processes_counts_all_of_them():
    trainer = adamw_trainer(float64_model(), logical_processes=4, seed=0)
    trainer.train(Rows(DATA), 1, per_device_batch_size=3)
    assert trainer.train_dataloader.total_batch_size == trainer.run_config.train_total_batch_size == 12


@pytest.mark.processes
def test_loaders_of_processes_have_the_sizes_of_accelerates(two_ranks):
    for found in two_ranks(sizes_of_loaders):
        check_sizes(found, 2)


class Repeating(Sampler[int]):
    """The sampler of ``docs/coming_from_fastnlp.md``: repeats the beginning of an order until all steps are full."""

    def __init__(self, data: Any, multiple: int) -> None:
        self.samples, self.multiple = len(data), multiple

    def __len__(self) -> int:
        return -(-self.samples // self.multiple) * self.multiple

    def __iter__(self) -> Iterator[int]:
        return islice(cycle(torch.randperm(self.samples).tolist()), len(self))


def read_with_repeats() -> list[list[list[int]]]:
    """The samples of each batch of this process, in two epochs."""
    data, epochs = numbers(23), []
    recorder = Recorder()
    trainer = adamw_trainer(float64_model(), seed=1, callbacks=[recorder])
    sampler = Repeating(data, 4 * trainer.ranks.world_size)
    trainer.train(data, 2, per_device_batch_size=4, train_dataloader_kwargs={"sampler": sampler})
    batches = [batch[:, 0].int().tolist() for batch in recorder.inputs]
    steps = len(batches) // 2
    epochs = [batches[:steps], batches[steps:]]
    assert trainer.progress.samples == 2 * len(sampler)
    return epochs


@pytest.mark.processes
def test_a_sampler_may_repeat_samples_to_fill_batches(ranks):
    found = ranks(read_with_repeats)
    total = -(-23 // (4 * ranks.world_size)) * 4 * ranks.world_size
    repeated = []
    for epoch in range(2):
        assert all(len(batch) == 4 for of_rank in found for batch in of_rank[epoch])
        samples = [sample for of_rank in found for batch in of_rank[epoch] for sample in batch]
        assert len(samples) == total
        assert set(samples) == set(range(23))
        repeated.append({sample for sample in samples if samples.count(sample) > 1})
    assert total == 23 or repeated[0] != repeated[1]


def seen(kind: str) -> Any:
    """The samples of this process in an epoch, the loss of an evaluation, what is printed, or the error."""
    data = numbers()
    loader: Any = {
        "shuffled": lambda: DataLoader(data, 4, shuffle=True),
        "batches": lambda: DataLoader(data, batch_sampler=BatchSampler(range(24), 4, False)),
        "distributed": lambda: DataLoader(data, 4, sampler=DistributedSampler(data, world_size(), rank())),
        "stream": lambda: DataLoader(OrderedStream(list(data)), 4),
        "reads ahead": lambda: ReadsAhead(data, 4),
        "own": lambda: OwnShard([tuple(part[rank() :: world_size()] for part in data.tensors)]),
    }[kind]()
    recorder, printed = Recorder(), io.StringIO()
    trainer = adamw_trainer(float64_model(), seed=1, callbacks=[recorder])
    try:
        with redirect_stdout(printed):
            trainer.train(loader, 1, eval_dataset=loader)
    except ValueError as error:
        return str(error)
    samples = torch.cat(recorder.inputs)[:, 0].int().tolist()
    error = ((trainer.get_model()(data.tensors[0]) - data.tensors[1]) ** 2).mean().item()
    assert trainer.run_history.get_latest_metric("eval_loss_epoch") == pytest.approx(error)
    return samples, printed.getvalue()


INDEXED = ["shuffled", "batches", "distributed"]
READ_IN_TURN = [pytest.param(kind, marks=pytest.mark.extension("streams")) for kind in ("stream", "own", "reads ahead")]


@pytest.mark.parametrize("kind", [*INDEXED, *READ_IN_TURN])
def test_a_loader_gives_each_sample_once(kind):
    samples, printed = seen(kind)
    assert sorted(samples) == list(range(24))
    assert printed == ""


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.parametrize("kind", [*INDEXED, *READ_IN_TURN[:2]])
def test_several_processes_read_each_sample_of_a_loader_once(ranks, kind):
    found = ranks.run(seen, kind)
    assert sorted(sample for samples, _ in found for sample in samples) == list(range(24))
    assert {printed for _, printed in found} == {""}


@pytest.mark.extension("streams")
@pytest.mark.processes
def test_a_loader_that_each_process_reads_in_full_is_named(two_ranks):
    first, second = two_ranks.run(seen, "reads ahead")
    assert sorted(first[0]) == sorted(second[0]) == list(range(24))
    assert "Each process reads all training batches of its own ReadsAhead: they are not divided" in first[1]
