"""Sources that report their position: a resumed run does not read samples again."""

from __future__ import annotations

import copy
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, default_collate

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import LimitBatchesCallback, StepBasedEvaluationCallback
from tests.launching import SOAK, only_with_soak
from tests.small_models import adamw_trainer, equal_weights, float64_data, float64_model, listener, same_bits, weights
from tests.streams import (
    BATCHES,
    Forgetful,
    Keeps,
    SavesEachUpdate,
    Shelf,
    Sums,
    hugging_face,
    mixed,
    require,
    rows,
    shuffled,
    train_on,
)

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # by torchdata


class Shuffled(Forgetful):
    """Gives its numbers in random order, which it draws when it is opened."""

    def __iter__(self):
        order = torch.randperm(len(self.numbers)).tolist()
        return (torch.tensor([float(self.numbers[place]), 0.0]) for place in order)


def test_a_stream_with_a_state_for_its_loader_only_is_reread(tmp_path):
    whole = train_on("for its loader", tmp_path)
    resumed = train_on("for its loader", resume_from=tmp_path / f"{BATCHES + 4}")
    assert same_bits(resumed["seen"], whole["seen"][BATCHES + 4 :])
    assert equal_weights(resumed["weights"], whole["weights"])


@pytest.mark.extension("pytorch_accelerated")
def test_a_stream_starts_again_after_an_epoch_that_a_limit_ended(tmp_path):
    limit = LimitBatchesCallback(3)
    whole = train_on("shelf", tmp_path, callbacks=[limit])
    assert len(whole["seen"]) == 6
    assert same_bits(whole["seen"][0][:, 0], whole["seen"][3][:, 0])
    for update in (2, 3, 4):
        resumed = train_on("shelf", resume_from=tmp_path / f"{update}", callbacks=[limit])
        assert same_bits(resumed["seen"], whole["seen"][update:])


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["shelf", "hugging face", "loader", pytest.param("workers", marks=pytest.mark.slow)])
def test_a_stateful_source_resumes_without_reading_again(tmp_path, kind):
    require(kind)
    whole = train_on(kind, tmp_path)
    assert len(whole["seen"]) == 2 * BATCHES
    for update in (BATCHES + 4,) if kind == "workers" else (1, BATCHES - 1, BATCHES, BATCHES + 4, 2 * BATCHES - 1):
        resumed = train_on(kind, resume_from=tmp_path / f"{update}")
        assert same_bits(resumed["seen"], whole["seen"][update:])
        assert equal_weights(resumed["weights"], whole["weights"])
        if kind != "workers":  # which read in other processes
            assert len(resumed["read"]) == sum(map(len, whole["seen"][update:]))
        assert "read again" not in resumed["printed"]


def test_a_stream_at_its_start_when_it_ends_is_not_read_twice(tmp_path):
    whole = train_on("rewinding", tmp_path)
    for update in (BATCHES - 1, BATCHES, BATCHES + 1):
        resumed = train_on("rewinding", resume_from=tmp_path / f"{update}")
        assert same_bits(resumed["seen"], whole["seen"][update:])
        assert equal_weights(resumed["weights"], whole["weights"])


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("shuffled", "the samples in its shuffle buffer are not part of its state_dict"),
        pytest.param("plain workers", "torchdata's StatefulDataLoader", marks=pytest.mark.slow),
    ],
)
def test_a_source_that_cannot_report_all_is_read_again(tmp_path, kind, reason):
    require(kind)
    whole = train_on(kind, tmp_path)
    resumed = train_on(kind, resume_from=tmp_path / "4")
    assert same_bits(resumed["seen"], whole["seen"][4:])
    assert "read again from IterableDataset" in resumed["printed"]
    assert reason in resumed["printed"]
    assert "will first read again what its epoch has seen, from IterableDataset" in resumed["printed"]
    assert "will not see the same training data" not in resumed["printed"]


class Noise:
    """Collates with noise of its own generator, which may be made in the first call."""

    def __init__(self, at_first_use: bool) -> None:
        self.generator = None if at_first_use else torch.Generator()

    def __call__(self, samples: Any) -> Any:
        if self.generator is None:
            self.generator = torch.Generator()
        inputs, targets = default_collate(samples)
        return inputs + torch.randn(inputs.shape, generator=self.generator, dtype=inputs.dtype), targets


class Rereads(IterableDataset[Any]):
    """A stream with a position."""

    def __init__(self) -> None:
        self.data, self.position = float64_data(20), 0

    def __iter__(self) -> Any:
        while self.position < len(self.data):
            self.position += 1
            yield self.data[self.position - 1]
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_a_collate_functions_own_generator_is_seeded_by_batch(tmp_path):
    def trained(folder: str, at_first_use: bool = False, **kwargs: Any) -> Any:
        trainer = adamw_trainer(float64_model(), callbacks=[SavesEachUpdate(tmp_path / folder)], seed=1)
        noise = Noise(at_first_use)
        trainer.train(Rereads(), 2, per_device_batch_size=4, collate_fn=noise, **kwargs)
        return weights(trainer.model)

    whole = trained("whole")
    assert equal_weights(trained("again", resume_from=tmp_path / "whole" / "7"), whole)
    with pytest.warns(UserWarning, match="Noise, the collate_fn, makes a random generator in its first call"):
        trained("first", at_first_use=True)


def test_a_stream_without_a_state_is_reread_with_its_noise(tmp_path):
    whole = train_on("forgetful", tmp_path)
    resumed = train_on("forgetful", resume_from=tmp_path / "4")
    assert same_bits(resumed["seen"], whole["seen"][4:])
    assert len(resumed["read"]) == 2 * 26


@pytest.mark.extension("mixtures")
def test_a_resumed_stream_is_complete_in_its_next_pass():
    """Hugging Face's streams return to a loaded state whenever they are read in the same epoch."""
    require("hugging face")
    stream = mixed({"rows": hugging_face(8, [])})
    reader = iter(stream)
    for _ in islice(reader, 12):
        pass
    state = copy.deepcopy(stream.state_dict())
    rest = [row["x"] for row in islice(reader, 12)]
    again = mixed({"rows": hugging_face(8, [])})
    again.load_state_dict(state)
    assert [row["x"] for row in islice(again, 12)] == rest
    again.set_epoch(2)
    assert sorted(row["x"] for row in islice(again, 8)) == [*range(8)]


def test_an_evaluation_of_the_resumed_stream_counts_all_samples(tmp_path):
    require("hugging face")
    counts = []
    for resume_from in (None, tmp_path / "3"):
        stream, model = hugging_face(16, []), nn.Linear(2, 1)
        sizes: list[int] = []
        counting = listener(on_eval_step_end=lambda trainer, batch, sizes=sizes, **_: sizes.append(len(batch)))
        trainer = Sums(model, None, torch.optim.SGD(model.parameters(), lr=1e-4), [counting, SavesEachUpdate(tmp_path)])
        trainer.calculate_eval_batch_loss = trainer.calculate_train_batch_loss
        kwargs = {f"{phase}_dataloader_kwargs": {"collate_fn": rows} for phase in ("train", "eval")}
        trainer.train(stream, 1, stream, per_device_batch_size=4, resume_from=resume_from, **kwargs)
        counts.append(sum(sizes))
    assert counts == [16, 16]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("blocks", marks=pytest.mark.extension("shuffled_streams")),
        pytest.param("mixture", marks=pytest.mark.extension("mixtures")),
    ],
)
def test_streams_that_became_shorter_are_reported(kind):
    def make(size: int) -> Any:
        stream = Forgetful(range(size))
        return shuffled(stream, 3) if kind == "blocks" else mixed({"all": stream}, repeat=False)

    whole = make(20)
    for _ in islice(whole, 14):
        pass
    shorter = make(8)
    shorter.load_state_dict(whole.state_dict())
    with pytest.raises(ValueError, match=r"ended after 8 samples of this epoch, but the resumed run had already seen"):
        list(shorter)


@pytest.mark.parametrize("factor", [2, 0.5])
def test_steps_may_count_anything_when_a_stream_is_read_again(tmp_path, factor):
    class Counts(Sums):
        def calculate_train_batch_loss(self, batch):
            return super().calculate_train_batch_loss(batch) | {"batch_size": int(factor * len(batch))}

    seen = []
    for resume_from in (None, tmp_path / "3"):
        keeps, model = Keeps(), nn.Linear(2, 1)
        callbacks = [keeps, SavesEachUpdate(tmp_path)] if resume_from is None else [keeps]
        trainer = Counts(model, None, torch.optim.SGD(model.parameters(), lr=1e-4), callbacks, seed=5)
        trainer.train(Forgetful(range(32)), 1, per_device_batch_size=4, resume_from=resume_from)
        seen.append(keeps.seen)
    assert same_bits(seen[1], seen[0][3:])


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("has_generator", [False, True])
def test_workers_draw_the_same_numbers_when_a_stream_is_reread(tmp_path, has_generator):
    seen = []
    for resume_from in (None, tmp_path / "8"):
        keeps, model = Keeps(), nn.Linear(2, 1)
        callbacks = [keeps, SavesEachUpdate(tmp_path)] if resume_from is None else [keeps]
        trainer = Sums(model, None, torch.optim.SGD(model.parameters(), lr=1e-4), callbacks, seed=5)
        kwargs = {"num_workers": 1} | ({"generator": torch.Generator().manual_seed(1)} if has_generator else {})
        trainer.train(
            Shuffled(range(24)), 2, per_device_batch_size=4, train_dataloader_kwargs=kwargs, resume_from=resume_from
        )
        seen.append(keeps.seen)
    assert not same_bits(seen[0][:6], seen[0][6:])
    assert same_bits(seen[1], seen[0][8:])


def test_a_stateful_stream_continues_with_another_batch_size(tmp_path):
    train_on("shelf", tmp_path)
    resumed = train_on("shelf", resume_from=tmp_path / "4", batch_size=5)
    assert [int(row[0]) for batch in resumed["seen"] for row in batch] == [*range(12, 26), *range(26)]
    assert resumed["read"] == [*range(12, 26), *range(26)]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda stream: stream,
        pytest.param(lambda stream: shuffled(stream, 4), marks=pytest.mark.extension("shuffled_streams")),
        pytest.param(lambda stream: mixed({"a": stream}), marks=pytest.mark.extension("mixtures")),
    ],
    ids=["alone", "shuffled", "mixture"],
)
def test_a_source_that_other_code_began_to_read_is_reread(tmp_path, capsys, wrap):
    """A stream that is evaluated in the middle of an epoch reports the position of the evaluation."""

    class Copies(Shelf):  # each iteration has a position of its own, the latest is reported
        def __iter__(self):
            self.next, self.first = self.first, 0
            for at in range(self.next, len(self.numbers)):
                self.next = at + 1
                yield torch.tensor([float(self.numbers[at]), 0.0])

    class Sums(Trainer):
        def calculate_train_batch_loss(self, batch):
            return {"loss": self.model(batch).square().mean(), "batch_size": len(batch)}

        calculate_eval_batch_loss = calculate_train_batch_loss

    def run(**kwargs: Any) -> list[Any]:
        stream, model, keeps = Copies(range(20)), torch.nn.Linear(2, 1), Keeps()
        callbacks = [keeps, StepBasedEvaluationCallback(2), SavesEachUpdate(tmp_path)]
        trainer = Sums(model, None, torch.optim.SGD(model.parameters(), lr=1e-4), callbacks=callbacks, seed=0)
        train = wrap(stream)
        trainer.train(train, None, stream, per_device_batch_size=4, max_num_train_steps=5, **kwargs)
        return keeps.seen

    whole = run()
    assert same_bits(run(resume_from=tmp_path / "4"), whole[4:])
    name = type(wrap(Copies(()))).__name__
    assert f"read again from {name}: the training state holds no position" in capsys.readouterr().out
    assert same_bits(run(resume_from=tmp_path / "3"), whole[3:])  # read before the evaluation
    assert "read again" not in capsys.readouterr().out


@pytest.mark.parametrize(("seed", "states"), [(0, 5), (None, 0)])
def test_states_are_taken_only_if_a_run_may_keep_them(seed, states):
    """Not in evaluations, nor in an epoch whose order no state could repeat."""
    asked = []

    class Counts(Shelf):
        def state_dict(self):
            asked.append(self)
            return super().state_dict()

    model = torch.nn.Linear(2, 1)
    train, evaluated = Counts(range(20)), Counts(range(20))
    trainer = Sums(model, None, torch.optim.SGD(model.parameters(), lr=1e-4), callbacks=[], seed=seed)
    trainer.calculate_eval_batch_loss = trainer.calculate_train_batch_loss
    trainer.train(train, 1, evaluated, per_device_batch_size=4, train_dataloader_kwargs={})
    assert asked == [train] * states


def test_a_mismatched_position_is_explained(tmp_path):
    pytest.importorskip("torchdata.stateful_dataloader")
    train_on("shelf", tmp_path)
    with pytest.raises(ValueError, match=r"does not fit the training data, a StatefulDataLoader .* as it was when"):
        train_on("loader", resume_from=tmp_path / "4")


def test_a_stateful_dataloader_over_rows_is_divided_as_usual(tmp_path):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    from pytorch_accel_lite.data import shard
    from tests.loaders import numbers, rank_of, samples

    found = []
    for loader_class in (stateful.StatefulDataLoader, DataLoader):
        steps = []
        for rank in range(2):
            source = loader_class(numbers(10), 2, shuffle=False)
            loader = shard(source, rank_of(rank, 2), torch.device("cpu"), seed=1, training=True)
            steps.append(list(loader.steps(1, 4)))
        found.append([samples(step) for step in steps])
    assert found[0] == found[1] == [[4, 5, 8], [6, 7, 9]]


def resumed_on(ranks: Any, kind: str, folder: Path, update: int) -> tuple[Any, Any]:
    folder.mkdir()
    whole = ranks.run(train_on, kind, folder)
    return whole, ranks.run(train_on, kind, resume_from=folder / f"{update}")


@pytest.mark.processes
@pytest.mark.soak
@pytest.mark.parametrize("kind", ["own part", *["shelf"] * SOAK])
def test_processes_continue_a_stateful_source_without_rereading(ranks, tmp_path, kind):
    check_resumed_on(ranks, tmp_path, kind)


@pytest.mark.thorough
@pytest.mark.processes
def test_processes_continue_hugging_faces_split_stream(two_ranks, tmp_path):
    require("split")
    check_resumed_on(two_ranks, tmp_path, "split")


def check_resumed_on(ranks, tmp_path, kind):
    whole, resumed = resumed_on(ranks, kind, tmp_path / "states", 2)
    for before, after in zip(whole, resumed, strict=True):
        assert same_bits(after["seen"], before["seen"][2:])
        assert equal_weights(after["weights"], before["weights"])
        assert "read again" not in after["printed"]
    read = [*chain(*(result["read"] for result in resumed))]
    seen = [int(x) for result in resumed for batch in result["seen"] for x in batch[:, 0]]
    assert sorted(read) == sorted(seen)


@pytest.mark.processes
def test_other_processes_continue_a_source_that_the_first_reads(ranks, tmp_path):
    train_on("shelf", tmp_path)
    resumed = ranks.run(train_on, "shelf", resume_from=tmp_path / "4")
    assert resumed[0]["read"] == [*range(12, 26), *range(26)]
    seen = [int(x) for result in resumed for batch in result["seen"] for x in batch[:, 0]]
    assert sorted(seen) == sorted(resumed[0]["read"])


@pytest.mark.thorough
@pytest.mark.processes
def test_other_processes_read_a_stateful_sources_parts_again(two_ranks, job, tmp_path):
    two_ranks.run(train_on, "own part", tmp_path, size=36)
    resumed = job(3).run(train_on, "own part", resume_from=tmp_path / "3", size=36)
    assert "read again from Shelf: the training state holds no position" in resumed[0]["printed"]
    assert [len(result["read"]) for result in resumed] == [len(range(r, 36 - (r > 0), 3)) * 2 for r in range(3)]


@pytest.mark.thorough
@pytest.mark.processes
def test_an_exhausted_stateful_part_repeats_its_last_batch(two_ranks, tmp_path):
    """The shares of 26 samples are 13 and 12 at a time of one: the second waits with zero weight.

    The state of update 12 is saved right after its last batch, when it does not wait yet.
    """
    check_resumed_where_a_part_ends(two_ranks, "own part", tmp_path, 26, (12, 13))


@only_with_soak
@pytest.mark.processes
def test_an_exhausted_hugging_face_part_repeats_its_last_batch(two_ranks, tmp_path):
    """The parts of 13 samples in six shards have seven and six."""
    require("split")
    check_resumed_where_a_part_ends(two_ranks, "six shards", tmp_path, 13, (6, 7))


def check_resumed_where_a_part_ends(ranks, kind, tmp_path, size, updates):
    whole = ranks.run(train_on, kind, tmp_path, batch_size=1, size=size)
    for update in updates:
        resumed = ranks.run(train_on, kind, resume_from=tmp_path / f"{update}", batch_size=1, size=size)
        counts = [len(result["seen"]) for result in (*whole, *resumed)]
        assert sum(counts[:2]) - sum(counts[2:]) == min(2 * update, counts[0] + counts[1] >> 1)
        for before, after in zip(whole, resumed, strict=True):
            assert same_bits(after["seen"], before["seen"][-len(after["seen"]) :])
            assert equal_weights(after["weights"], before["weights"])
