"""Batches by a token budget: their contents, equal weights of tokens, and exact resuming."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.data import TokenBatchSampler
from tests.ranks import shared_folder, world_size
from tests.small_models import equal_weights, largest_difference, listener, weights
from tests.streams import SavesEachUpdate

IGNORED = -100


def texts(size: int = 29) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 20, (size,), generator=generator).tolist()
    return [torch.randint(11, (length,), generator=generator) for length in lengths]


def padded(samples: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(samples, batch_first=True, padding_value=IGNORED)


class Tokens(Trainer):
    def calculate_train_batch_loss(self, batch: torch.Tensor) -> dict[str, Any]:
        logits = self.model(batch[:, :-1].clamp(min=0))
        targets = batch[:, 1:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        return {"loss": loss, "batch_size": len(batch), "num_items_in_batch": (targets != IGNORED).sum()}


def model_of_tokens(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 6), nn.Dropout(dropout), nn.Linear(6, 11)).double()


@pytest.mark.parametrize(("max_tokens", "packed"), [(8000, False), (8000, True), (400, True)])
def test_batches_are_full_and_as_many_in_each_epoch(max_tokens, packed):
    lengths = torch.randint(1, 400, (3000,), generator=torch.Generator().manual_seed(1))
    sampler = TokenBatchSampler(lengths, max_tokens, packed=packed)
    epochs = [list(sampler) for _ in range(2)]
    assert {frozenset(batch) for batch in epochs[0]} != {frozenset(batch) for batch in epochs[1]}
    for epoch in epochs:
        assert len(epoch) == len(sampler)
        assert sorted(index for batch in epoch for index in batch) == list(range(3000))
        sizes = [int(lengths[batch].sum() if packed else len(batch) * lengths[batch].max()) for batch in epoch]
        assert max(sizes) <= max_tokens
        assert lengths.sum() / sum(sizes) > 0.95  # little padding
        assert lengths.sum() / max_tokens > 0.93 * len(epoch)  # full batches
    in_order = TokenBatchSampler(lengths, max_tokens, packed=packed, shuffle=False)
    assert list(in_order) == list(in_order)


def test_packing_takes_the_fullest_batch_with_room():
    sampler = TokenBatchSampler([3, 2, 6, 7, 1], max_tokens=10, packed=True, shuffle=False)
    assert [sorted(batch) for batch in sampler] == [[0, 3], [1, 2, 4]]


def test_without_shuffling_batches_follow_the_lengths():
    sampler = TokenBatchSampler([5, 1, 3, 2, 4], max_tokens=8, shuffle=False)
    assert list(sampler) == list(sampler)
    assert [index for batch in sampler for index in batch] == [1, 3, 2, 4, 0]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_lengths_are_passed_or_measured(kind):
    samples = texts()
    given = TokenBatchSampler(kind([len(sample) for sample in samples]), 64, shuffle=False)
    assert list(given) == list(TokenBatchSampler(samples, 64, length=len, shuffle=False))
    assert repr(given) == f"TokenBatchSampler(29 samples, max_tokens=64, {len(given)} batches)"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([3, 9, 4], 8), "Sample 1 has length 9, but lengths must be from 1 to max_tokens=8"),
        (([3, 0], 8), "Sample 1 has length 0, but"),
        (([], 8), "needs the length of each sample"),
        (([1.5, 2.0], 8), "of shape (2,) and type float64"),
        (([3], 0), "max_tokens=0 must be at least 1"),
    ],
)
def test_invalid_token_batches_are_named(arguments, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        TokenBatchSampler(*arguments)


def test_the_number_of_keys_is_not_used_as_a_length():
    samples = [{"input_ids": torch.arange(5)}]
    with pytest.raises(TypeError, match="length=7 must be a function, not int"):
        TokenBatchSampler([{"input_ids": [1]}], 4, length=7)
    with pytest.raises(TypeError, match=r"length=len of a dict is the number of its keys, here 1\. Pass"):
        TokenBatchSampler(samples, max_tokens=8, length=len)
    by_tokens = TokenBatchSampler(samples, max_tokens=8, length=lambda sample: len(sample["input_ids"]))
    assert by_tokens.lengths.tolist() == [5]


def run(dropout: float = 0.0, workers: int = 0, accumulation: int = 1, epochs: int = 2, **kwargs: Any) -> Any:
    """Weights, gradients and samples of a run by budgets of tokens."""
    model, seen, gradients = model_of_tokens(dropout), [], []

    def remember(trainer: Any, **kwargs: Any) -> None:
        seen.append(trainer.all_gather_object(trainer.batch_indices))

    def keep(trainer: Any, **kwargs: Any) -> None:
        gradients.append({name: p.grad.clone() for name, p in trainer.get_model().named_parameters()})

    callbacks = [listener(on_train_step_end=remember, on_optimizer_step_start=keep), *kwargs.pop("callbacks", [])]
    samples = texts()
    sampler = TokenBatchSampler(samples, max_tokens=60, length=len)
    trainer = Tokens(model, None, torch.optim.SGD(model.parameters(), lr=0.5), callbacks=callbacks, seed=3)
    trainer.train(
        samples,
        epochs,
        collate_fn=padded,
        gradient_accumulation_steps=accumulation,
        train_dataloader_kwargs={"batch_sampler": sampler, "num_workers": workers},
        **kwargs,
    )
    return {"weights": weights(model), "gradients": gradients, "seen": seen, "batches": len(sampler)}


def weighting() -> Any:
    """The largest difference between the gradients of updates and those of all their tokens in one padded batch."""
    differences = []
    for accumulation in (1, 3):
        result = run(accumulation=accumulation, epochs=1)
        model, samples = model_of_tokens(), texts()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for number, found in enumerate(result["gradients"]):
            steps = result["seen"][number * accumulation : (number + 1) * accumulation]
            whole = padded([samples[index] for step in steps for share in step for index in share])
            optimizer.zero_grad()
            logits, targets = model(whole[:, :-1].clamp(min=0)), whole[:, 1:]
            nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED).backward()
            differences.append(largest_difference(found, {n: p.grad for n, p in model.named_parameters()}))
            optimizer.step()
    return differences


def resuming() -> Any:
    """A whole run, with dropout, and those that resume from each state within its epochs."""
    with shared_folder() as folder:
        whole = run(dropout=0.3, callbacks=[SavesEachUpdate(folder)])
        states = sorted(folder.iterdir(), key=lambda path: int(path.name))
        resumed = [run(dropout=0.3, resume_from=state) for state in states[:-1:2]]
    return {"whole": whole, "resumed": resumed}


def check_weighting(differences: list[float]) -> None:
    assert len(differences) > 2
    assert max(differences) < 1e-12


def check_resuming(result: Any) -> None:
    whole, resumed = result["whole"], result["resumed"]
    assert len(resumed) > 1
    for run in resumed:
        assert equal_weights(run["weights"], whole["weights"])
        assert run["seen"] == whole["seen"][-len(run["seen"]) :]


def order() -> Any:
    return {"seen": run()["seen"], "processes": world_size()}


def test_every_token_weighs_the_same():
    check_weighting(weighting())


def test_runs_resume_to_the_same_bits():
    check_resuming(resuming())


@pytest.mark.processes
def test_every_token_weighs_the_same_on_several_processes(ranks):
    for differences in ranks(weighting):
        check_weighting(differences)


@pytest.mark.thorough
@pytest.mark.processes
def test_several_processes_resume_to_the_same_bits(ranks):
    for result in ranks(resuming):
        check_resuming(result)


@pytest.mark.processes
def test_several_processes_take_turns_with_the_batches_of_one(ranks):
    alone = [step[0] for step in order()["seen"]]
    for result in ranks(order):
        assert result["processes"] == ranks.world_size
        shares = result["seen"]
        per_epoch = len(alone) // 2
        assert len(shares) == 2 * -(-per_epoch // ranks.world_size)
        assert [i for step in shares for share in step for i in share] == [i for batch in alone for i in batch]
        full = per_epoch // ranks.world_size * ranks.world_size
        assert [share for step in shares[: full // ranks.world_size] for share in step] == alone[:full]


def test_workers_read_the_same_batches():
    found, expected = run(workers=2), run()
    assert found["seen"] == expected["seen"]
    assert equal_weights(found["weights"], expected["weights"])


def test_evaluation_reads_every_sample_once():
    samples = texts()
    sampler = TokenBatchSampler(samples, 60, length=len, shuffle=False)
    loader = DataLoader(samples, batch_sampler=sampler, collate_fn=padded)
    seen: list[int] = []
    keep = listener(on_eval_step_end=lambda trainer, batch, **kwargs: seen.append(len(batch)))

    class Evaluated(Tokens):
        def calculate_eval_batch_loss(self, batch):
            return self.calculate_train_batch_loss(batch)

    trainer = Evaluated(model_of_tokens(), None, None, callbacks=[keep])
    trainer.evaluate(loader)
    assert sum(seen) == 29
    assert len(seen) == len(sampler)
