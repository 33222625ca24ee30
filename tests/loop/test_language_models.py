"""Hugging Face models with a loss averaged over labels: every label that is not ignored has the same weight."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accel_lite import Trainer
from tests.ranks import IN_ORDER, Recorder
from tests.small_models import adamw_trainer, largest_difference, listener

SIZES = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def causal_model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, max_position_embeddings=8, bos_token_id=1, eos_token_id=2)
    return LlamaForCausalLM(config).double()


def token_rows(size: int = 12, length: int = 6) -> list[dict[str, torch.Tensor]]:
    """Rows in which between one and all labels are not ignored."""
    ids = torch.randint(20, (size, length), generator=torch.Generator().manual_seed(0))
    rows = []
    for number, row in enumerate(ids):
        labels = row.clone()
        labels[1 + number % (length - 1) :] = -100 if number % 3 else labels[1 + number % (length - 1) :]
        rows.append({"input_ids": row, "labels": labels})
    return rows


transformers = pytest.importorskip("transformers")
TOLERANCE = 1e-6  # the models compute their losses in single precision


def gradient_of_whole_batch(model: nn.Module, rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(model)
    model(**{key: torch.stack([row[key] for row in rows]) for key in rows[0]}).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def whole() -> dict[str, torch.Tensor]:
    return gradient_of_whole_batch(causal_model(), token_rows())


def causal() -> dict[str, Any]:
    """The gradient of one update over all rows, in micro-batches, and the losses."""
    recorder = Recorder()
    recorder.on_train_step_end = lambda *args, **kwargs: None
    rows = token_rows()
    model = causal_model()
    trainer = Trainer(model, None, torch.optim.SGD(model.parameters(), lr=0.0), callbacks=[recorder])
    trainer.train(
        rows, 1, rows, per_device_batch_size=2, gradient_accumulation_steps=100, train_dataloader_kwargs=IN_ORDER
    )
    return {
        "gradient": recorder.gradients[0],
        "losses": [trainer.run_history.get_latest_metric(f"{kind}_loss_epoch") for kind in ("train", "eval")],
    }


def test_unequal_label_counts_give_the_global_batchs_gradient():
    found = causal()
    assert largest_difference(found["gradient"], whole()) < TOLERANCE


def test_processes_record_the_mean_over_the_labels_of_all(ranks):
    rows = token_rows()
    mean = causal_model()(**{key: torch.stack([row[key] for row in rows]) for key in rows[0]}).loss.item()
    for result in [*ranks(causal), causal()]:
        assert largest_difference(result["gradient"], whole()) < TOLERANCE
        assert result["losses"] == pytest.approx([mean, mean], abs=TOLERANCE)


@pytest.mark.extension("failed_batches")
@pytest.mark.slow
def test_a_batch_that_is_split_to_fit_keeps_its_weight():
    model = causal_model()
    forward = model.forward

    def limited(*args: Any, **kwargs: Any) -> Any:
        if len(kwargs["input_ids"]) > 3:
            raise torch.OutOfMemoryError("out of memory")
        return forward(*args, **kwargs)

    gradients: dict[str, torch.Tensor] = {}

    def note(trainer: Trainer) -> None:
        gradients.update({name: p.grad.clone() for name, p in trainer.get_model().named_parameters()})

    trainer = Trainer(
        model, None, torch.optim.SGD(model.parameters(), lr=0.0), [listener(on_optimizer_step_start=note)]
    )
    model.forward = limited
    trainer.train(
        token_rows(), 1, per_device_batch_size=12, auto_microbatch=True, train_dataloader_kwargs={"shuffle": False}
    )
    assert trainer.num_microbatches == 4
    assert largest_difference(gradients, whole()) < TOLERANCE


@pytest.mark.slow
def test_batches_without_any_label_count_for_nothing():
    rows = token_rows()
    for row in rows[:6]:
        row["labels"] = torch.full_like(row["labels"], -100)
    for size, accumulation in ((2, 1), (2, 2), (3, 4)):
        model = causal_model()
        trainer = adamw_trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        trainer.loss_func = None
        trainer.train(
            rows,
            1,
            per_device_batch_size=size,
            gradient_accumulation_steps=accumulation,
            train_dataloader_kwargs={"shuffle": False},
        )
        assert all(parameter.isfinite().all() for parameter in model.parameters())
        assert math.isfinite(trainer.run_history.get_latest_metric("train_loss_epoch"))


def items_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
    """The number of items that a step returns for the loss of a batch."""
    output = Trainer(model, None, None, callbacks=[]).calculate_eval_batch_loss(batch)
    return output.get("num_items_in_batch")


SMALL = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 20}
GPT2 = {"n_layer": 1, "n_embd": 8, "n_head": 1, "vocab_size": 20, "bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize(
    ("make", "labels"),
    [
        (lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)), 4),
        (lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)), 4),
        (lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)), 6),
        (lambda: transformers.BertForTokenClassification(transformers.BertConfig(**SIZES, num_labels=20)), 6),
        (lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**SMALL, decoder_start_token_id=0)), 6),
    ],
    ids=["GPT-2", "Llama", "BERT for masked tokens", "BERT for tokens", "T5"],
)
def test_the_first_label_counts_if_labels_are_not_shifted(make, labels):
    ids = torch.randint(20, (2, 4), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids.clone()}
    batch["labels"][:, 2] = -100
    model = make().eval()
    assert int(items_of(model, batch)) == labels
    logits = model(**batch).logits
    shifted = (logits[:, :-1], batch["labels"][:, 1:]) if labels == 4 else (logits, batch["labels"])
    mean = nn.functional.cross_entropy(shifted[0].flatten(0, 1), shifted[1].flatten())  # the model agrees
    assert torch.allclose(model(**batch).loss, mean)


def test_a_loss_not_averaged_over_labels_is_weighted_by_samples():
    ids = torch.randint(20, (2, 4))
    classifier = transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES))
    assert items_of(classifier, {"input_ids": ids, "labels": torch.tensor([0, 1])}) is None
    own = causal_model()
    own.loss_function = lambda logits, labels, **kwargs: logits.square().mean()
    assert items_of(own, {"input_ids": ids, "labels": ids}) is None


def test_a_custom_loss_function_is_weighted_by_samples():
    rows = token_rows(4)
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}

    def loss_func(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
        return outputs.logits.mean()

    output = Trainer(causal_model(), loss_func, None, callbacks=[]).calculate_eval_batch_loss(batch)
    assert "num_items_in_batch" not in output
