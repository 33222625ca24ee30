"""A small byte-level language model, trained on the standard library's source code.

    python examples/language_model.py
    torchrun --standalone --nproc_per_node 2 examples/language_model.py

Lines differ in length, so batches differ in their number of tokens. The loss is a mean
over tokens: with ``num_items_in_batch``, every token has the same weight across
micro-batches, accumulation and processes.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from pytorch_accel_lite import Trainer, get_default_callbacks
from pytorch_accel_lite.schedulers import WSDLrScheduler

MODULES = (
    "argparse",
    "collections/__init__",
    "dataclasses",
    "datetime",
    "difflib",
    "enum",
    "inspect",
    "typing",
)
END, PADDING, LENGTH = 0, -100, 80


def load_lines() -> list[torch.Tensor]:
    """Return lines of source code as bytes, ending in END and at most LENGTH long."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [folder / f"{module}.py" for module in MODULES]
    lines = [
        line.encode()
        for file in files
        if file.exists()
        for line in file.read_text("utf-8").splitlines()
    ]
    return [torch.tensor([*line[: LENGTH - 1], END]) for line in lines if line.strip()]


def load_split(name: str) -> list[torch.Tensor]:
    """Return the lines to train on, or every 20th line to validate on."""
    lines = load_lines()
    if name == "valid":
        return lines[::20]
    return [line for i, line in enumerate(lines) if i % 20]


def collate(lines: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(lines, batch_first=True, padding_value=PADDING)


class LanguageModel(nn.Module):
    """A GRU that predicts each byte of a line from the preceding ones."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.rnn(self.embedding(tokens))
        return self.head(hidden)


class LanguageModelTrainer(Trainer):
    def _loss(self, lines: torch.Tensor) -> dict:
        targets = lines
        # The byte before each target.
        inputs = nn.functional.pad(lines[:, :-1], (1, 0), value=END).clamp(min=END)
        logits = self.model(inputs)
        num_tokens = (targets != PADDING).sum()
        loss = cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=PADDING
        )
        return {
            "loss": loss,
            "batch_size": len(lines),
            "num_items_in_batch": num_tokens,
            "model_outputs": logits,
        }

    def calculate_train_batch_loss(self, batch):
        return self._loss(batch)

    def calculate_eval_batch_loss(self, batch):
        return self._loss(batch)


def bits_per_byte(logits: torch.Tensor, lines: torch.Tensor) -> torch.Tensor:
    """Return a number for each line, by which language_model.yaml lists the worst."""
    losses = cross_entropy(
        logits.transpose(1, 2), lines, ignore_index=PADDING, reduction="none"
    )
    return losses.sum(1) / (lines != PADDING).sum(1) / math.log(2)


@torch.no_grad()
def complete(model: nn.Module, start: str, length: int = 40) -> str:
    """Complete a line with the model, always choosing the most likely byte."""
    written = list(start.encode())
    while len(written) < length:
        byte = model(torch.tensor([[END, *written]]))[0, -1].argmax().item()
        if byte == END:
            break
        written.append(byte)
    return bytes(written).decode(errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=150)
    args = parser.parse_args()
    valid = load_split("valid")
    torch.manual_seed(0)
    model = LanguageModel()
    trainer = LanguageModelTrainer(
        model,
        None,
        torch.optim.AdamW(model.parameters(), lr=0.01),
        callbacks=get_default_callbacks(progress_bar=False),
        seed=0,
    )
    trainer.train(
        load_split("train"),
        max_num_train_steps=args.updates,
        eval_dataset=valid,
        per_device_batch_size=32 // trainer.accelerator.num_processes,
        gradient_accumulation_steps=2,
        gradient_clip_norm=1.0,
        collate_fn=collate,
        create_scheduler_fn=WSDLrScheduler.create_scheduler_fn(
            num_warmup_epochs=0.05, decay_phase_ratio=0.3
        ),
        train_dataloader_kwargs={"num_workers": 0},
        eval_dataloader_kwargs={"num_workers": 0},
    )
    bits = trainer.run_history.get_latest_metric("eval_loss_epoch") / math.log(2)
    trainer.print(
        f"\n{bits:.2f} bits per byte on {len(valid)} lines the model has never seen, "
        f"after {trainer.progress.update} updates."
    )
    trainer.print(f"A generated line: {complete(model.cpu(), '    return ')!r}")


if __name__ == "__main__":
    main()
