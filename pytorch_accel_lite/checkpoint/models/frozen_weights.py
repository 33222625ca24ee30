"""Frozen weights that are not saved, because the program creates them: their checksums recognise them when loading."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import islice

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pytorch_accel_lite.base.display import listed
from pytorch_accel_lite.base.modules import without_compile
from pytorch_accel_lite.base.quantised_weights import plain_parts, quantised_entries
from pytorch_accel_lite.base.sums_of_bits import is_same_sum, sums_of_bits
from pytorch_accel_lite.base.types import StateDict
from pytorch_accel_lite.checkpoint.models.weights import full_state_dict


def weight_checksums(tensors: Mapping[str, object]) -> dict[str, int]:
    """Return a number for each tensor, by name, that changes with any of its bits and with their order.

    Sparse tensors, and tensors without values, are skipped. A collective operation if tensors are sharded.
    """
    strided = {n: v for n, v in tensors.items() if isinstance(v, torch.Tensor) and v.layout is torch.strided}
    with_values = {name: value for name, value in strided.items() if not value.is_meta and not is_lazy(value)}
    counts: list[int] = []

    def parts() -> Iterator[torch.Tensor]:  # of one at a time
        for value in with_values.values():
            plain = plain_parts(full_state_dict(value, keep=True))
            counts.append(len(plain))
            yield from plain

    sums = iter(sums_of_bits(parts()))
    return {name: sum(islice(sums, count)) for name, count in zip(with_values, counts, strict=True)}


def model_checksums(model: nn.Module) -> dict[str, int]:
    """Return the checksums of all parameters of a model. A collective operation if parameters are sharded."""
    return weight_checksums(_parameters(model))


def check_has_trainable(model: nn.Module) -> None:
    """Check that a model has something to save once its frozen parameters are left out.

    Raises:
        ValueError: if all of its parameters are frozen
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"trainable_only=True would leave out all weights: no parameter of {type(model).__name__} requires a "
            "gradient. Save all weights, or unfreeze the parameters that were trained."
        )


def leave_out_frozen(
    model: nn.Module, state: StateDict, created: Mapping[str, int] | None = None, *, only_quantised: bool = False
) -> dict[str, int]:
    """Remove the frozen parameters from the full state of a model, and return their checksums by name.

    Buffers stay, because training changes them even if everything around them is frozen. Quantised weights never stay:
    they can neither be trained nor loaded into a model that has them already.

    Args:
        created: checksums of weights that the loading program creates itself, such as pretrained ones; other weights
            stay. By default, all frozen parameters are removed.
        only_quantised: whether to remove only quantised parameters
    """
    left_out = weight_checksums({name: state.pop(name) for name in sorted(quantised_entries(model, state))})
    if only_quantised:
        return left_out
    frozen = {name for name, value in _parameters(model).items() if not value.requires_grad and name in state}
    if created is not None:
        now = weight_checksums({name: state[name] for name in frozen})
        frozen = {name for name, number in now.items() if created.get(name) == number}
    others = weight_checksums({name: value for name, value in state.items() if name in frozen})
    for name in others:  # those without a checksum, such as sparse ones, stay
        del state[name]
    return left_out | others


def describe_other_weights(model: nn.Module, left_out: Mapping[str, int | None], source: str | os.PathLike[str]) -> str:
    """Describe which weights of a model differ from the weights that were left out; an empty text if none differ.

    A collective operation if they are sharded.

    Args:
        left_out: the checksums of the weights that were left out; ``None`` for unknown checksums
    """
    known = {name: number for name, number in left_out.items() if number is not None}
    current = weight_checksums(
        {name: value for name, value in without_compile(model.state_dict()).items() if name in known}
    )
    others = [name for name, number in known.items() if not is_same_sum(current.get(name, number), number)]
    if not others:
        return ""
    return (
        f"{os.fspath(source)!r} holds only what was trained, and the frozen weights of {type(model).__name__} are not "
        f"those that it was trained with. They differ in {listed(sorted(others), 10)}."
    )


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return without_compile(dict(model.named_parameters(remove_duplicate=False)))
