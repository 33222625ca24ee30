"""Fine-tuning a small model of Hugging Face on several processes: adapters of the PEFT library, gradual unfreezing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import GradualUnfreezingCallback, ModelEmaCallback, SaveTrainingStateCallback
from tests.tasks import weights

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


def run(folder: Path | None, model: nn.Module, resume_from: Path | None = None, **kwargs: Any) -> Trainer:
    """Two epochs of two updates on one process, with a state after each update."""
    saving = [] if folder is None else [SaveTrainingStateCallback(folder, save_every_n_steps=1, **kwargs)]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    trainer = Trainer(model, None, optimizer, callbacks=saving, seed=3)
    per_process = 4 // trainer.ranks.world_size
    trainer.train(rows(), 2, per_device_batch_size=per_process, resume_from=resume_from, gradient_clip_norm=1.0)
    return trainer


def resumed_and_saved(folder: Path) -> Any:
    """Weights of an uninterrupted run and of one that was resumed, and what the adapters in its folder give."""
    from peft import PeftModel

    whole = run(folder / "states", with_lora(bert()), trainable_only=True)
    state = folder / "states" / "update-000000002"
    resumed = run(folder / "again", with_lora(bert(), seed=9), resume_from=state)
    resumed.save_model(folder / "adapters", trainable_only=True)
    loaded = PeftModel.from_pretrained(bert(), folder / "adapters")
    return weights(whole.get_model()), weights(resumed.get_model()), weights(loaded)


def unfreezing(folder: Path | None = None, resume_from: Path | None = None) -> Any:
    """Weights and their average after unfreezing all groups, one more in each epoch, and the learning rates."""
    model = bert(dropout=0)
    ema = ModelEmaCallback(decay=0.5, evaluate_during_training=False, save_path=None)
    saving = [] if folder is None else [SaveTrainingStateCallback(folder, save_every_n_epochs=1)]
    optimizer = torch.optim.AdamW(model.classifier.parameters(), lr=0.01)
    trainer = Trainer(model, None, optimizer, [GradualUnfreezingCallback(lr_decay=0.5), ema, *saving], seed=3)
    trainer.train(
        rows(),
        4,
        per_device_batch_size=4 // trainer.ranks.world_size,
        train_dataloader_kwargs={"shuffle": False},
        resume_from=resume_from,
    )
    rates = [group["lr"] for group in optimizer.param_groups]
    return weights(trainer.get_model()), weights(ema.ema.module), rates
