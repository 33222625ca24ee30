"""Reading data that can be indexed: batch by batch or sample by sample, through wrappers, by any indices."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    StackDataset,
    Subset,
    TensorDataset,
    random_split,
)

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.data import shard
from pytorch_accel_lite.data.loader_creation import default_num_workers
from pytorch_accel_lite.data.reading import tensors_in_memory
from pytorch_accel_lite.extension_tools.data_and_batches import list_samples
from tests.datasets import Batched, Noisy, Order
from tests.loaders import numbers, rank_of
from tests.small_models import (
    Rows,
    Stream,
    adamw_trainer,
    equal_weights,
    float64_data,
    float64_model,
    listener,
    make_data,
    make_trainer,
    train,
)


@pytest.mark.parametrize("seed", [None, 1])
def test_datasets_with_getitems_are_read_batch_by_batch(seed):
    data, model, plain = Batched(float64_data(20)), float64_model(), float64_model()
    trainer = adamw_trainer(model, seed=seed)
    trainer.train(data, 2, per_device_batch_size=4)
    assert data.calls == 10
    if seed is not None:
        adamw_trainer(plain, seed=seed).train(float64_data(20), 2, per_device_batch_size=4)
        assert equal_weights(model.state_dict(), plain.state_dict())


WRAPPED = {
    "subset": lambda data: Subset(data, range(12)),
    "nested": lambda data: random_split(Subset(data, range(12)), [12, 0])[0],
    "stacked": lambda data: StackDataset(data, data),
    "concatenated": lambda data: ConcatDataset([data]),
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_torchs_wrappers_change_nothing_of_how_data_is_read(wrap):
    data = wrap(Noisy(float64_data(12)))
    assert default_num_workers(data, 1) == default_num_workers(Noisy(float64_data(12)), 1)
    assert default_num_workers(wrap(float64_data(12)), 1) == 0

    def noise(batch_size):
        source = DataLoader(data, batch_size)
        batches = list(shard(source, rank_of(0, 1), torch.device("cpu"), seed=1, training=True))
        return torch.cat(
            [batch[1] if len(batch) == 4 else torch.cat([part[1] for part in batch], 1) for batch in batches]
        )

    assert torch.equal(noise(4), noise(3))


@pytest.mark.parametrize("wrap", [WRAPPED["subset"], WRAPPED["nested"], WRAPPED["stacked"]])
def test_batched_reading_reaches_through_torchs_wrappers(wrap):
    batched = Batched(float64_data(12))
    data = wrap(batched)
    assert default_num_workers(data, 1) == 0
    list(shard(DataLoader(data, 4), rank_of(0, 1), torch.device("cpu"), seed=1, training=True))
    assert batched.calls == 3 * (2 if isinstance(data, StackDataset) else 1)


def test_a_subset_of_tensors_in_memory_equals_the_same_rows():
    data = float64_data(30)
    indices = list(range(29, 4, -2))
    nested = Subset(Subset(data, indices), range(1, 12))
    plain = Rows(TensorDataset(*(t[indices][1:12] for t in data.tensors)))
    models = [float64_model(), float64_model()]
    for model, dataset in zip(models, (nested, plain), strict=True):
        torch.manual_seed(0)
        adamw_trainer(model).train(dataset, 2, per_device_batch_size=3, train_dataloader_kwargs={"num_workers": 0})
    assert equal_weights(models[0].state_dict(), models[1].state_dict())


STACKED = {
    "dict": lambda x, y: StackDataset(x=x, y=TensorDataset(y, x)),
    "tuple": lambda x, y: StackDataset(TensorDataset(x), y[:, 0]),
    "nested": lambda x, y: Subset(StackDataset(StackDataset(x=x), y), range(8, 1, -1)),
}


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("stack", STACKED.values(), ids=STACKED)
def test_stacked_tensors_are_read_by_batch_with_equal_results(stack, seed):
    class Slow(StackDataset):
        """Not a plain TensorDataset, so it is read sample by sample."""

    data = stack(*float64_data(9).tensors)
    slow = copy.deepcopy(data)
    (slow.dataset if isinstance(slow, Subset) else slow).__class__ = Slow

    def batches(dataset):
        torch.manual_seed(0)
        source = DataLoader(dataset, 4, shuffle=True)
        return list(shard(source, rank_of(0, 1), torch.device("cpu"), seed=seed, training=True)), torch.rand(())

    (at_once, random), (one_by_one, expected) = batches(data), batches(slow)
    assert tensors_in_memory(data) is not None
    assert tensors_in_memory(slow) is None
    assert torch.equal(random, expected)
    for ours, theirs in zip(at_once, one_by_one, strict=True):
        (leaves, structure), (expected, of_them) = tree_flatten(ours), tree_flatten(theirs)
        assert structure == of_them
        assert all(map(torch.equal, leaves, expected))


def test_stacked_datasets_of_other_types_are_read_by_sample():
    x, y = float64_data(3).tensors
    for data in (StackDataset(x, [1, 2, 3]), StackDataset(list(x), y), StackDataset(x, Subset(y, range(3)))):
        assert tensors_in_memory(data) is None
        batch = next(iter(shard(DataLoader(data, 2), rank_of(0, 1), torch.device("cpu"), seed=None, training=True)))
        assert torch.equal(batch[0], x[:2])


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("sampler", [[-1, 0, -9], Order([-1, 0, -9]), BatchSampler([-1, 0, -9], 2, False)])
def test_negative_indices_are_those_of_a_dataloader(seed, sampler):
    kind = "batch_sampler" if isinstance(sampler, BatchSampler) else "sampler"
    for data in (
        numbers(9),
        Subset(numbers(12), [1, -1, 3, -2, 4, 5, 6, 7, 0]),
        Subset(Subset(numbers(9), range(9)), range(9)),
    ):
        source = DataLoader(data, **{kind: sampler} | ({} if kind == "batch_sampler" else {"batch_size": 2}))
        loader = shard(source, rank_of(0, 1), torch.device("cpu"), seed, training=True)
        assert [batch[0].tolist() for batch in loader] == [batch[0].tolist() for batch in source]


@pytest.mark.parametrize("indices", [np.argsort(np.arange(9.0))[::-1][:5], np.array([3, 1, 2], dtype=object)])
def test_indices_of_a_subset_may_be_any_array(indices):
    found = make_trainer().predict(Subset(make_data(9), indices), 2)
    assert torch.allclose(found, make_trainer().predict(make_data(9))[indices.tolist()])


@pytest.mark.extension("streams")
def test_hugging_face_datasets_train_as_tensors_do():
    datasets = pytest.importorskip("datasets")
    x, y = float64_data(10, dtype=torch.float32).tensors
    data = datasets.Dataset.from_dict({"x": x.tolist(), "y": y.tolist()})
    stream = data.to_iterable_dataset().with_format("torch")
    data = data.with_format("torch")

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = float64_model(dtype=torch.float32)

        def forward(self, x):
            return self.inner(x)

    results = []
    for dataset in (data, stream, TensorDataset(x, y)):
        model = Named() if not isinstance(dataset, TensorDataset) else float64_model(dtype=torch.float32)
        trainer = adamw_trainer(model)
        kwargs = {} if isinstance(dataset, datasets.IterableDataset) else {"shuffle": False}
        trainer.train(dataset, 1, dataset, per_device_batch_size=4, train_dataloader_kwargs=kwargs)
        results.append(trainer.run_history.to_dict())
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("wrong", [[True, False] * 5, np.arange(10) % 2 == 0, torch.ones(10) > 0, [0.0, 2.5], (0.5,)])
def test_non_integer_indices_are_refused_in_memory(seed, wrong):
    data = float64_data(10)
    trainer = adamw_trainer(float64_model(), seed=seed)
    with pytest.raises(TypeError, match=r"must be integers, not torch\.(bool|float64|float32) as in \["):
        trainer.train(Subset(data, wrong), 1)
    with pytest.raises(TypeError, match=r"Convert a mask by"):
        trainer.train(data, 1, train_dataloader_kwargs={"sampler": list(wrong)})


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("indices", [[3, -1], np.array([3, 9], np.int32), [np.int64(3), 9], list(torch.arange(3))])
def test_indices_may_be_integers_of_any_kind(seed, indices):
    data = float64_data(10)
    expected = data.tensors[0][[int(index) for index in indices]]
    for source in (DataLoader(Subset(data, indices), 4), DataLoader(data, 4, sampler=indices)):
        [(x, _)] = shard(source, rank_of(0, 1), torch.device("cpu"), seed, training=True)
        assert torch.equal(x, expected)


def test_a_subset_may_be_empty():
    assert list(shard(DataLoader(Subset(float64_data(10), []), 4), rank_of(0, 1), torch.device("cpu"), 0, True)) == []


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("kind", ["memory", "subset", "map", "batch sampler"])
def test_the_indices_of_a_batch_are_those_of_its_samples(kind, seed):
    whole = float64_data(20)
    data = {"memory": whole, "subset": Subset(whole, range(3, 12))}.get(kind, Rows(whole))
    loader = {"batch_sampler": BatchSampler(RandomSampler(range(9)), 4, False)} if kind == "batch sampler" else {}
    seen: list[int] = []

    class Check(TrainerCallback):
        def on_train_step_end(self, trainer, batch, **kwargs):
            expected = torch.stack([data[i][0] for i in trainer.batch_indices])
            assert torch.equal(batch[0], expected)
            seen.extend(trainer.batch_indices)

        on_eval_step_end = on_predict_step_end = on_train_step_end

    model = float64_model()
    trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.0), callbacks=[Check], seed=seed)
    trainer.train(data, 1, data, per_device_batch_size=4, train_dataloader_kwargs={"num_workers": 0} | loader)
    trainer.predict(data, per_device_batch_size=4)
    trained = 9 if kind == "batch sampler" else len(data)
    assert sorted(seen[:trained]) == [*range(trained)]
    assert seen[trained:] == [*range(len(data))] * 2


@pytest.mark.extension("streams")
def test_the_indices_of_a_streams_samples_are_not_known():
    known = []
    watch = listener(on_train_step_end=lambda trainer, **kwargs: known.append(trainer.batch_indices))
    train(make_trainer([watch]), train_dataset=Stream(), train_dataloader_kwargs={})
    assert known == [None] * 3


# ----------------------------------------------------------------------------------------------------- errors


class Scans(Dataset[Any]):
    """A dataset with a sample that cannot be read."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise OSError("scan 5 is damaged")
        return torch.zeros(4), torch.zeros(1)


@pytest.mark.parametrize(
    ("data", "note"),
    [(Scans(), "In reading Scans[5]."), (Subset(Scans(), [3, 1, 5]), "In reading Subset[2], which is Scans[5].")],
)
def test_an_error_in_reading_names_the_sample(data, note):
    with pytest.raises(OSError, match="is damaged") as caught:
        make_trainer().predict(data, per_device_batch_size=2, dataloader_kwargs={"num_workers": 0})
    assert caught.value.__notes__[0] == note


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        ([*range(3, 15)], "samples [3 to 14]"),
        ([*range(3, 11)], "samples [3, 4, 5, 6, 7, 8, 9, 10]"),
        ([*range(8), 9], "samples [0, 1, 2, 3, 4, 5, 6, 7, 9]"),
        (["a", ("b", 1)], "samples ['a', ('b', 1)]"),
        ([*range(0, 200, 2)], f"samples {[*range(0, 128, 2)]}"[:-1] + ", ...]"),
    ],
)
def test_ranges_of_samples_are_named_by_their_ends(indices, text):
    assert list_samples(indices) == text


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize(
    ("data", "index", "named"),
    [
        (float64_data(6), 9, "no sample 9 among the 6 samples"),
        (float64_data(6), -7, "no sample -7 among the 6 samples"),
        (Subset(float64_data(6), [0, 1]), 2, "no sample 2 among the 2 samples"),
        (Subset(float64_data(6), [0, 1]), -3, "no sample -3 among the 2 samples"),
        (Subset(float64_data(6), [0, 8]), 1, "no sample 8 among the 6 samples"),
    ],
)
def test_a_wrong_index_into_memory_is_named(data, index, named, seed):
    trainer = adamw_trainer(float64_model(), seed=seed)
    with pytest.raises(IndexError, match=named) as caught:
        trainer.train(data, 1, per_device_batch_size=2, train_dataloader_kwargs={"sampler": [0, index]})
    assert "num_embeddings" not in str(getattr(caught.value, "__notes__", ""))


def test_a_wrong_index_into_a_subset_is_noted():
    data = Subset(Rows(float64_data(6)), [1, 2, 3, 4])
    trainer = adamw_trainer(float64_model())
    kwargs = {"sampler": [0, 7], "num_workers": 0}
    with pytest.raises(IndexError, match="out of range") as caught:
        trainer.train(data, 1, per_device_batch_size=2, train_dataloader_kwargs=kwargs)
    assert any("Subset[7]" in note for note in caught.value.__notes__)
    assert caught.value.__context__ is None
