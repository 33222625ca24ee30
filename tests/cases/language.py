"""Language models of Hugging Face, whose loss is a mean over the labels that are not ignored."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from pytorch_accel_lite import Trainer
from tests.cases.common import IN_ORDER, Recorder

SIZES = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def causal_model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, max_position_embeddings=8, bos_token_id=1, eos_token_id=2)
    return LlamaForCausalLM(config).double()


def token_rows(size: int = 12, length: int = 6) -> list[dict[str, torch.Tensor]]:
    """Rows of which between one and all labels count."""
    ids = torch.randint(20, (size, length), generator=torch.Generator().manual_seed(0))
    rows = []
    for number, row in enumerate(ids):
        labels = row.clone()
        labels[1 + number % (length - 1) :] = -100 if number % 3 else labels[1 + number % (length - 1) :]
        rows.append({"input_ids": row, "labels": labels})
    return rows


def gradient_of_whole_batch(model: nn.Module, rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(model)
    model(**{key: torch.stack([row[key] for row in rows]) for key in rows[0]}).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


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
