"""Packed sequences with flash and flex attention: gradients equal those of each sequence alone."""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from pytorch_accel_lite import Trainer
from tests.gpu.parts import DEVICE, ON_GPU, autocast, copied, moved, sized

packing = pytest.importorskip("pytorch_accel_lite.extensions.packing", reason="an extension, which is deleted")

VOCABULARY, HEADS, PER_HEAD = 64, 4, sized(64, 8)
LENGTHS = sized([500, 37, 128, 1, 256, 300, 77], [9, 1, 4, 7])
#: How far gradients may be from exact ones, compared with those of the sequences alone in the same precision.
FACTOR = 3


@functools.cache
def compiled_flex() -> Any:
    """Flex attention is a kernel of its own only when it is compiled."""
    return torch.compile(flex_attention)


class Packed(nn.Module):
    """A layer of attention between embeddings and logits, for packed rows or a single sequence."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = HEADS * PER_HEAD
        self.how = how
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(max(LENGTHS), width)
        self.to_heads, self.to_logits = nn.Linear(width, 3 * width), nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, bounds: list[int] | None = None) -> Any:
        x = self.tokens(input_ids) + self.positions(position_ids)
        heads = self.to_heads(x).unflatten(-1, (3, HEADS, PER_HEAD)).permute(2, 0, 3, 1, 4)
        found = self.attend(*heads, position_ids, bounds) if bounds else alone(*heads)
        return self.to_logits(x + found.transpose(1, 2).flatten(2))

    def attend(self, query: Any, key: Any, value: Any, positions: torch.Tensor, bounds: list[int]) -> torch.Tensor:
        if self.how == "mask":
            return scaled_dot_product_attention(query, key, value, attn_mask=packing.packed_mask(positions))
        if self.how == "flex":
            mask, length = packing.packed_mask_function(positions), query.shape[2]
            blocks = create_block_mask(mask, 1, None, length, length, device=DEVICE.type)
            return compiled_flex()(query, key, value, block_mask=blocks)
        if self.how == "varlen":
            return by_lengths(query, key, value, bounds)
        with flash():
            return packing.packed_attention(query, key, value, bounds)


def alone(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(query, key, value, is_causal=True)


def by_lengths(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: list[int]) -> torch.Tensor:
    """Torch's flash attention for sequences of several lengths, which takes one row without its first dimension."""
    from torch.nn.attention.varlen import varlen_attn

    ends = torch.tensor(bounds, dtype=torch.int32, device=query.device)
    longest = max(b - a for a, b in itertools.pairwise(bounds))
    rows = [tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value)]
    found: Any = varlen_attn(*rows, ends, ends, longest, longest, window_size=(-1, 0))
    return found.transpose(0, 1)[None]


def flash() -> Any:
    """Only flash attention on a GPU; it is an error there if torch cannot use it."""
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION) if ON_GPU else contextlib.nullcontext()


class PackedTrainer(Trainer):
    def calculate_train_batch_loss(self, batch: Any) -> Any:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits, targets = self.model(**inputs)[0, :-1], batch["labels"][0, 1:]
        return {"loss": cross_entropy(logits.float(), targets), "num_items_in_batch": (targets != -100).sum()}


def texts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def gradient_of_packed(how: str, precision: str) -> torch.Tensor:
    """What one update at a rate of 1 subtracts."""
    model = Packed(how)
    before = copied(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = PackedTrainer(model, None, optimizer, [], mixed_precision=precision)
    trainer.train(texts(), 1, per_device_batch_size=len(LENGTHS), collate_fn=packing.PackSequences(model))
    assert trainer.progress.update == 1
    return moved(before, model)


def gradient_of_sequences(precision: str) -> torch.Tensor:
    """The gradient of the mean loss over all tokens, one sequence after another; ``"exact"`` in double precision."""
    model = Packed("alone").to(DEVICE)
    model = model.double() if precision == "exact" else model
    tokens = sum(length - 1 for length in LENGTHS)
    for text in texts():
        if len(text) == 1:
            continue
        row = text[None].to(DEVICE)
        with autocast(precision):
            logits = model(row, torch.arange(len(text), device=DEVICE)[None])
        logits = logits if precision == "exact" else logits.float()
        cross_entropy(logits[0, :-1], row[0, 1:], reduction="sum").div(tokens).backward()
    return torch.cat([parameter.grad.flatten().double() for parameter in model.parameters()])


GPU_ONLY = pytest.mark.skipif(not ON_GPU, reason="torch has this attention, with gradients, on a GPU only")


@pytest.mark.parametrize(
    ("how", "precision"),
    [
        ("mask", "no"),
        ("mask", "bf16"),
        ("bounds", "bf16"),  # by flash attention, which knows no float32
        pytest.param("varlen", "bf16", marks=GPU_ONLY),
        pytest.param("flex", "no", marks=GPU_ONLY),
        pytest.param("flex", "bf16", marks=GPU_ONLY),
    ],
)
def test_gradients_of_packed_sequences_are_those_of_each_alone(how, precision, measured):
    exact = gradient_of_sequences("exact")
    errors = [
        float((gradient - exact).norm() / exact.norm())
        for gradient in (gradient_of_packed(how, precision), gradient_of_sequences(precision))
    ]
    measured(error=errors[0], error_of_sequences_alone=errors[1])
    assert errors[0] < FACTOR * errors[1] + 1e-6
    assert errors[1] < 0.1
    assert float(exact.norm()) > 0.01
