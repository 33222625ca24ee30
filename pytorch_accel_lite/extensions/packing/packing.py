"""Packing sequences one after another in a row without padding, and keeping them apart in the model."""

from __future__ import annotations

import inspect
import itertools
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from pytorch_accel_lite.extension_tools.arguments_and_errors import check_module
from pytorch_accel_lite.extension_tools.data_and_batches import IGNORED_LABEL, Sample, first_label, tensors_in
from pytorch_accel_lite.extension_tools.modules_and_devices import evaluation_mode
from pytorch_accel_lite.extension_tools.plain_types import Tree

_ROW_KEYS = ("input_ids", "labels")


class PackSequences:
    """A ``collate_fn`` that puts the sequences of a batch one after another in a single row, without padding.

    A sample is a sequence of tokens, a pair of inputs and targets, or a dict of values for each token, as tokenizers
    return it. Tokens whose ``attention_mask`` is 0 are padding, and are left out. A batch is a dict with

    - ``input_ids``, ``labels`` and the other keys of the samples: a row of shape ``(1, tokens)`` each. Samples without
      labels get their tokens as labels if the model is causal.
    - ``position_ids`` of the same shape, which restart at each sequence
    - ``bounds``: the index at which each sequence begins, and at which the last one ends, as a list of integers; left
      out for a model that does not take it
    - any other arguments that ``model`` needs to keep the sequences apart.

    For a given ``model``, for example a model of transformers, these are found by computing two short sequences
    together and each by itself. Positions suffice for many models; others need a mask of shape ``(1, 1, tokens,
    tokens)``. A model that uses flash attention gets the arguments of flash attention, untried. A model of your own can
    make a mask from the positions with ``packed_mask()`` or ``packed_mask_function()``, or call ``packed_attention()``.

    Args:
        model: the model to train, before it is sharded or compiled
        causal: whether each label is predicted from the tokens before it, as when models of transformers shift their
            labels. The first label of each sequence then becomes -100, which losses ignore, because the token before it
            belongs to another sequence. By default as the ``model`` does, or ``True`` without a model. Pass ``False``
            if your targets are already shifted.

    Attributes:
        first_position: the position of the first token of a sequence, which is not 0 for models such as RoBERTa
        mask_dtype: the dtype of the mask that the model needs; ``None`` if it needs no mask

    Raises:
        ValueError: if ``model`` cannot keep sequences apart
    """

    def __init__(self, model: nn.Module | None = None, causal: bool | None = None) -> None:
        first = None if model is None else first_label(check_module("model", model))
        self.causal = first != 0 if causal is None else causal
        self.first_position = 0
        self.has_bounds, self.has_lengths, self.has_cache = True, False, False
        self.mask_dtype: torch.dtype | None = None
        if model is not None:
            self._adapt_to(model)

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Tree]:
        """Return the batch of some samples."""
        parts = [_columns(sample) for sample in samples]
        if other := next((part for part in parts if part.keys() != parts[0].keys()), None):
            raise ValueError(f"The samples of a batch to pack have {[*parts[0]]} and {[*other]}. Give all the same.")
        sizes = [len(part["input_ids"]) for part in parts]
        bounds = [0, *itertools.accumulate(sizes)]
        batch: dict[str, Tree] = {name: torch.cat([part[name] for part in parts])[None] for name in parts[0]}
        if self.causal:
            batch.setdefault("labels", batch["input_ids"].clone())[0, bounds[:-1]] = IGNORED_LABEL
        first = self.first_position
        batch["position_ids"] = torch.cat([torch.arange(first, first + size) for size in sizes])[None]
        if self.has_bounds:
            batch["bounds"] = bounds
        if self.mask_dtype is not None:
            batch["attention_mask"] = packed_mask(batch["position_ids"], self.causal, self.mask_dtype)
        if self.has_lengths:
            ends, longest = torch.tensor(bounds, dtype=torch.int32), max(sizes)
            batch |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
        if self.has_cache:
            batch["use_cache"] = False
        return batch

    def _adapt_to(self, model: nn.Module) -> None:
        """Find out which arguments a model needs to keep sequences apart."""
        name = type(model).__name__
        get_base_model: object = getattr(model, "get_base_model", None)  # PEFT wraps the model
        inner = get_base_model() if callable(get_base_model) else model
        taken = inspect.signature(inner.forward).parameters
        if "position_ids" not in taken:
            raise ValueError(f"{name}.forward takes no position_ids, so it cannot tell packed sequences apart.")
        self.has_bounds = "bounds" in taken
        self.has_cache = "use_cache" in taken  # with a cache, models of transformers take a row for one sequence
        weight = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
        needed = {name for name in taken if taken[name].default is inspect.Parameter.empty}
        config = getattr(model, "config", None)
        if "flash" in str(getattr(config, "_attn_implementation", "")):
            self.has_lengths = True
            return
        padding = getattr(config, "pad_token_id", None)
        failure: Exception | None = None
        can_mask = "attention_mask" in taken and not _has_windows(config)
        for self.mask_dtype in (None, weight.dtype) if can_mask else (None,):
            for self.first_position in (0, *([] if padding is None else [padding + 1])):  # where RoBERTa's begin
                try:
                    if _keeps_apart(model, self, padding, needed, weight):
                        return
                except Exception as error:  # of any kind: the model may not expect these arguments
                    failure = error
        raise ValueError(
            f"{name} does not compute packed sequences as it computes each by itself, neither with positions nor with "
            "a mask. Let it make a mask from its position_ids with pytorch_accel_lite.data.packed_mask, or pad batches."
        ) from failure


def _columns(sample: Sample) -> dict[str, torch.Tensor]:
    """Return the values of a sample for each of its tokens, by name."""
    named = sample if isinstance(sample, Mapping) else None
    if named is None:
        row = sample if isinstance(sample, tuple) else (sample,)
        if len(row) > len(_ROW_KEYS):
            raise ValueError(f"A sample to pack is a tuple of {len(row)} values: pass a dict, which names them.")
        named = dict(zip(_ROW_KEYS, row, strict=False))
    columns = {name: _as_tensor(name, values) for name, values in named.items()}
    if "input_ids" not in columns or columns["input_ids"].ndim != 1:
        shapes = {name: tuple(values.shape) for name, values in columns.items()}
        raise ValueError(
            f"A sample to pack must be a row of tokens, or have it as 'input_ids', not of shapes {shapes}."
        )
    size = len(columns["input_ids"])
    for name, values in columns.items():
        if not values.ndim or len(values) != size:
            raise ValueError(
                f"{name!r} of a sample has shape {tuple(values.shape)}, but a packed row needs a value for each of its "
                f"{size} tokens. Leave it out of the samples."
            )
    mask = columns.pop("attention_mask", None)
    if mask is not None:
        columns = {name: values[mask.bool()] for name, values in columns.items()}
    if not len(columns["input_ids"]):
        raise ValueError("A sample to pack has no tokens. Leave it out.")
    return columns


def _as_tensor(name: str, values: object) -> torch.Tensor:
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"{name!r} of a sample is {reprlib.repr(values)}, but a packed row needs a number for each token. Leave it "
            "out of the samples."
        ) from None


def _has_windows(config: object) -> bool:
    """Whether some layers limit attention to windows, a limit that a given mask would replace."""
    return any(getattr(config, name, None) for name in ("sliding_window", "local_attention")) or any(
        "full" not in kind for kind in getattr(config, "layer_types", None) or ()
    )


@torch.no_grad()
def _keeps_apart(
    model: nn.Module, pack: PackSequences, padding: int | None, needed: set[str], weight: nn.Parameter
) -> bool:
    """Whether a model computes two short sequences in a row as it computes each by itself.

    Args:
        needed: the required arguments of the model
        weight: one of the model's weights, whose device and precision are used
    """
    get_embedding = getattr(model, "get_input_embeddings", None)
    size = getattr(get_embedding() if callable(get_embedding) else None, "num_embeddings", 8)
    tokens = [token for token in range(size) if token != padding][-8:]
    first, other, second = (torch.tensor(tokens * 8)[begin : begin + 3] for begin in (0, 1, 5))

    def outputs(*sequences: torch.Tensor, alone: bool = False) -> torch.Tensor:
        batch = pack(sequences)
        named = batch.keys() & {"input_ids", *needed} if alone else batch.keys() - {"labels"}
        computed = model(**send_to_device({name: batch[name] for name in named}, weight.device))
        return next(tensors_in([computed]))[0].cpu().double()

    with evaluation_mode(model):
        packed, changed = outputs(first, second), outputs(other, second)
        separate = torch.cat([outputs(first, alone=True), outputs(second, alone=True)])
    tolerance = max(torch.finfo(weight.dtype).eps ** 0.5, 1e-4)
    is_same = (packed - separate).abs().max() <= tolerance * separate.abs().max()
    return bool(is_same) and torch.equal(packed[3:], changed[3:])


def _numbers(position_ids: torch.Tensor) -> torch.Tensor:
    """Return the number of the sequence of each token."""
    return (position_ids.diff(prepend=position_ids[:, :1] - 1) != 1).cumsum(1)


def packed_mask(position_ids: torch.Tensor, causal: bool = True, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the mask with which attention keeps packed sequences apart.

    Args:
        position_ids: positions of shape ``(rows, tokens)``, which restart with each sequence
        causal: whether a token sees only itself and those before it, or all of its sequence
        dtype: the dtype of the queries, for a mask that is added to the scores: 0 for tokens that are seen, minus
            infinity for others. ``None`` for a mask that is ``True`` for tokens that are seen. Attention of torch takes
            both.

    Returns:
        a tensor of shape ``(rows, 1, tokens, tokens)``
    """
    numbers = _numbers(position_ids)[:, None]
    seen = numbers[..., None] == numbers[..., None, :]
    seen = seen.tril() if causal else seen
    if dtype is None:
        return seen
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


def packed_mask_function(position_ids: torch.Tensor, causal: bool = True) -> Callable[..., torch.Tensor]:
    """Return the function from which ``torch.nn.attention.flex_attention.create_block_mask()`` makes a mask.

    Flex attention skips the blocks of tokens that do not see each other.

    Args:
        position_ids: positions of shape ``(rows, tokens)``, which restart with each sequence
        causal: whether a token sees only itself and those before it, or all of its sequence

    Returns:
        a function of the numbers of row, head, query and key
    """
    numbers = _numbers(position_ids)

    def sees(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        same = numbers[row, query] == numbers[row, key]
        return same & (key <= query) if causal else same

    return sees


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: Sequence[int],
    causal: bool = True,
    **options: Any,
) -> torch.Tensor:
    """Return the attention of each packed sequence to itself, with torch's attention for one sequence after another.

    Time and memory grow with the square of the sequences rather than of the row. No mask is needed, so that the fast
    kernels of ``torch.nn.functional.scaled_dot_product_attention()`` may be used.

    Args:
        query: queries of shape ``(1, heads, tokens, size)``, as ``key`` and ``value``
        bounds: ``bounds`` of a batch of ``PackSequences``
        causal: whether a token sees only itself and those before it, or all of its sequence
        options: further arguments of that function, ``dropout_p``, ``scale`` or ``enable_gqa``
    """
    pieces = itertools.starmap(slice, itertools.pairwise(bounds))
    parts = ([tensor[..., piece, :] for tensor in (query, key, value)] for piece in pieces)
    return torch.cat([scaled_dot_product_attention(q, k, v, is_causal=causal, **options) for q, k, v in parts], -2)


def unpack(outputs: torch.Tensor, position_ids: torch.Tensor) -> list[torch.Tensor]:
    """Return the part of each sequence in the outputs for a packed row, for example as the outputs of a prediction.

    Args:
        outputs: outputs of shape ``(1, tokens, ...)``
        position_ids: ``position_ids`` of the batch, which are read from the device
    """
    sizes = torch.unique_consecutive(_numbers(position_ids), return_counts=True)[1].tolist()
    return list(torch.split(outputs[0], sizes))
