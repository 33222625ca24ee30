"""Padding, and the time per token of texts of different lengths: python -m benchmarks.packing [--rounds 5].

A language model is trained on the CPU, on one thread, by the trainer, with batches of about as many tokens. Every way
to make and compute batches takes part in each round. Figures are the medians of the CPU times, divided by the number of
tokens of the texts, and their ratios to the first row in the same round, with minimum and maximum.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.report import footnote, in_rounds
from pytorch_accel_lite import Trainer
from pytorch_accel_lite.data import PackSequences, TokenBatchSampler, packed_attention, packed_mask

VOCABULARY, WIDTH, HEADS, LAYERS, LONGEST = 1000, 128, 4, 4, 512
IGNORED = -100


class Sizes(NamedTuple):
    """How many texts there are, and how many tokens a batch may have."""

    texts: int = 200
    tokens: int = 2048


def texts(size: int) -> list[torch.Tensor]:
    """Return texts of random tokens with log-normal lengths: half of them up to 70, the longest 512."""
    generator = torch.Generator().manual_seed(0)
    lengths = (0.8 * torch.randn(size, generator=generator) + 4.25).exp().long().clamp(8, LONGEST)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths.tolist()]


class Block(nn.Module):
    """Attention and a network, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.to_heads, self.from_heads = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.network = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, attention: Callable[..., torch.Tensor]) -> torch.Tensor:
        heads = self.to_heads(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.from_heads(attention(*heads).transpose(1, 2).flatten(2))
        mixed: torch.Tensor = x + self.network(self.norms[1](x))
        return mixed


class LanguageModel(nn.Module):
    """A model of one's own, which keeps packed sequences apart by their bounds, or else by a mask.

    Args:
        masks: whether to use a mask
    """

    def __init__(self, masks: bool = False) -> None:
        super().__init__()
        self.masks = masks
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.to_logits = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Any, position_ids: Any = None, bounds: Any = None) -> torch.Tensor:
        positions = torch.arange(input_ids.shape[1]) if position_ids is None else position_ids
        x = self.tokens(input_ids) + self.positions(positions)
        attention: Callable[..., torch.Tensor] = partial(scaled_dot_product_attention, is_causal=True)
        if self.masks:
            attention = partial(scaled_dot_product_attention, attn_mask=packed_mask(position_ids))
        elif bounds is not None:
            attention = partial(packed_attention, bounds=bounds)
        for block in self.blocks:
            x = block(x, attention)
        logits: torch.Tensor = self.to_logits(x)
        return logits


class TokensTrainer(Trainer):
    """Computes the loss of a model of one's own as transformers does."""

    def calculate_train_batch_loss(self, batch: Any) -> Any:
        inputs = {name: batch[name] for name in ("input_ids", "position_ids", "bounds") if name in batch}
        logits, labels = self.model(**inputs)[:, :-1], batch["labels"][:, 1:]
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        return {"loss": loss, "num_items_in_batch": (labels != IGNORED).sum()}


def padded(samples: list[torch.Tensor], with_mask: bool) -> dict[str, torch.Tensor]:
    labels = pad_sequence(samples, batch_first=True, padding_value=IGNORED)
    batch = {"input_ids": labels.clamp(min=0), "labels": labels}
    return batch | {"attention_mask": (labels != IGNORED).long()} if with_mask else batch


def llama() -> nn.Module:
    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, intermediate_size=3 * WIDTH, max_position_embeddings=LONGEST, **sizes)
    )


def measure(kind: str, batches: str, sizes: Sizes) -> tuple[float, float]:
    """Return the share of padding in the batches, and the CPU seconds per token of an epoch."""
    samples = texts(sizes.texts)
    tokens = sum(map(len, samples))
    torch.manual_seed(0)
    is_own = kind == "own"
    model = LanguageModel(masks="mask" in batches) if is_own else llama()
    packs = "packed" in batches
    collate = PackSequences(None if is_own else model) if packs else partial(padded, with_mask=not is_own)
    computed = [0]

    def counted(rows: list[torch.Tensor]) -> Any:
        batch = collate(rows)
        computed[0] += batch["input_ids"].numel()
        return batch

    options: dict[str, Any] = {"num_workers": 0}
    if "random" not in batches:
        options["batch_sampler"] = TokenBatchSampler(samples, sizes.tokens, length=len, packed=packs)
    optimizer = torch.optim.AdamW(model.parameters())
    trainer = (TokensTrainer if is_own else Trainer)(model, None, optimizer, callbacks=[], seed=0)
    count = max(sizes.tokens * sizes.texts // tokens // 2, 2)  # padded, about as many tokens as those of the others
    with contextlib.redirect_stdout(io.StringIO()):
        begin = time.process_time()
        trainer.train(samples, 1, per_device_batch_size=count, collate_fn=counted, train_dataloader_kwargs=options)
    return 1 - tokens / computed[0], (time.process_time() - begin) / tokens


WAYS = {
    ("own", "padded, in random order"): "own model, padded, in random order",
    ("own", "padded, by length"): "own model, padded, by length (`TokenBatchSampler`)",
    ("own", "packed, by bounds"): "own model, packed, `packed_attention`",
    ("own", "packed, by a mask"): "own model, packed, `packed_mask`",
    ("llama", "padded, in random order"): "Llama of transformers, padded, in random order",
    ("llama", "padded, by length"): "Llama of transformers, padded, by length (`TokenBatchSampler`)",
    ("llama", "packed"): "Llama of transformers, packed, `PackSequences(model)`",
}


def rows(found: dict[tuple[str, str], list[list[tuple[float, float]]]]) -> list[str]:
    """Return the rows of the table, with columns for each budget of tokens."""
    lines = []
    for (kind, batches), budgets in found.items():
        cells = [WAYS[kind, batches]]
        for results, first in zip(budgets, found[kind, "padded, in random order"], strict=True):
            ratios = [seconds / before for (_, seconds), (_, before) in zip(results, first, strict=True)]
            cells += [
                f"{100 * results[0][0]:.0f} %",
                f"{1e6 * statistics.median(seconds for _, seconds in results):.0f}",
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packing", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048], help="the most tokens in a batch")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[tuple[str, str], list[list[tuple[float, float]]]] = {way: [] for way in WAYS}
    for tokens in arguments.tokens:
        sizes = Sizes(8 if arguments.quick else Sizes().texts, tokens)
        for results in found.values():
            results.append([])
        for _ in range(arguments.rounds):
            for kind, batches in WAYS:
                found[kind, batches][-1].append(measure(kind, batches, sizes))
    heads = [f"{head}, {tokens:,}" for tokens in arguments.tokens for head in ("padding", "microseconds", "ratio")]
    print(f"| | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}")
    print("\n".join(rows(found)))
    print(footnote(in_rounds(arguments.rounds)))


if __name__ == "__main__":
    main()
