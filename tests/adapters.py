"""A small language model with and without adapters (PEFT)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

SIZES = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}


def bert(seed: int = 0, dropout: float = 0.1) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(seed)
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return BertForSequenceClassification(BertConfig(**SIZES, **rates, max_position_embeddings=8))


def with_lora(base: nn.Module, seed: int = 1) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"], lora_dropout=0.1)
    return get_peft_model(base, config)


def rows(size: int = 8) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(20, (size, 6), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row[0] % 2} for row in ids]
