"""Dividing the parameters of a model into kinds, and creating the optimizer of each."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from pytorch_accel_lite.extension_tools.arguments_and_errors import check_module
from pytorch_accel_lite.extension_tools.texts_and_pages import short_repr

_EMBEDDINGS = nn.Embedding, nn.EmbeddingBag
# The methods of transformers and timm for the output layer.
_HEADS = "get_output_embeddings", "get_classifier"


@dataclass
class ParameterKinds:
    """The trainable parameters of a model by name, each in one kind; ``print`` shows a table.

    Args:
        matrices: two-dimensional weights of layers inside of the model
        embeddings: weights of embeddings, and of whatever is tied to one
        heads: two-dimensional weights of output layers
        others: norms, biases, convolutions and parameters that belong to no layer
    """

    matrices: dict[str, nn.Parameter] = field(default_factory=dict)
    embeddings: dict[str, nn.Parameter] = field(default_factory=dict)
    heads: dict[str, nn.Parameter] = field(default_factory=dict)
    others: dict[str, nn.Parameter] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = ["kind        tensors     parameters  first"]
        for kind, members in vars(self).items():
            count = sum(parameter.numel() for parameter in members.values())
            rows.append(f"{kind:<10}  {len(members):>7}  {count:>13,}  {next(iter(members), '')}".rstrip())
        return "\n".join(rows)


def split_parameters(model: nn.Module, heads: Sequence[nn.Module] | None = None) -> ParameterKinds:
    """Divide the trainable parameters of a model into matrices, embeddings, heads and others.

    Args:
        model: the model, whose frozen parameters are left out
        heads: the output layers; by default, the layer that a transformers or timm model declares, or else the last one
            with a two-dimensional weight

    Raises:
        ValueError: if a head is not a module of the model
    """
    modules = set(check_module("model", model).modules())
    if heads is not None and (isinstance(heads, nn.Module) or not isinstance(heads, Collection)):
        raise TypeError(f"heads={short_repr(heads)} must be a list of modules, such as [model.head], or None.")
    if unknown := [module for module in heads or () if module not in modules]:
        raise ValueError(f"heads has {type(unknown[0]).__name__}, which is not a module of the model.")
    embedded = {id(p) for module in modules if isinstance(module, _EMBEDDINGS) for p in module.parameters()}
    in_heads = {id(p) for head in (heads if heads is not None else _find_heads(model)) for p in head.parameters()}
    kinds = ParameterKinds()
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "weight" in name.rpartition(".")[2]
        if not parameter.requires_grad:
            continue
        if id(parameter) in embedded:
            kinds.embeddings[name] = parameter
        elif is_matrix and id(parameter) in in_heads:
            kinds.heads[name] = parameter
        elif is_matrix:
            kinds.matrices[name] = parameter
        else:
            kinds.others[name] = parameter
    return kinds


def muon_with_adamw(
    model: nn.Module,
    lr: float = 1e-3,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    heads: Sequence[nn.Module] | None = None,
    **muon: Any,
) -> dict[str, Optimizer]:
    """Return two optimizers that step together: ``torch.optim.Muon`` for matrices, AdamW for all other parameters.

    Pass the result to a trainer, or the function itself as a factory: ``optimizer=partial(muon_with_adamw, lr=2e-3)``.
    Muon's updates are scaled to the size of AdamW's (``adjust_lr_fn="match_rms_adamw"``), so that both work with one
    learning rate and one schedule.

    Args:
        lr: the learning rate of both optimizers
        weight_decay: the decoupled weight decay of matrices, embeddings and heads; norms and biases have none
        betas: the betas of AdamW
        heads: the output layers, which AdamW updates; by default as in ``split_parameters()``
        muon: other arguments of ``torch.optim.Muon``, such as ``momentum`` or ``ns_steps``

    Returns:
        the optimizers ``"muon"`` and, unless all parameters are matrices, ``"adamw"``

    Raises:
        ValueError: if the model has no matrices to train besides embeddings and heads
        RuntimeError: before torch 2.9, which has no Muon
    """
    if not hasattr(torch.optim, "Muon"):
        raise RuntimeError(f"torch {torch.__version__} has no Muon: install torch 2.9 or newer, or use AdamW.")
    kinds = split_parameters(model, heads)
    if not kinds.matrices:
        raise ValueError(f"{type(model).__name__} has no trainable matrices within it for Muon: use AdamW.\n{kinds}")
    rest = [*kinds.embeddings.values(), *kinds.heads.values(), *kinds.others.values()]
    groups = [
        {"params": [parameter for parameter in rest if parameter.ndim > 1], "weight_decay": weight_decay},
        {"params": [parameter for parameter in rest if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
    muon = {"adjust_lr_fn": "match_rms_adamw", **muon}
    optimizers: dict[str, Optimizer] = {
        "muon": torch.optim.Muon(kinds.matrices.values(), lr=lr, weight_decay=weight_decay, **muon)
    }
    if rest:
        optimizers["adamw"] = AdamW([group for group in groups if group["params"]], lr=lr, betas=betas)
    return optimizers


def _find_heads(model: nn.Module) -> Iterator[nn.Module]:
    for name in _HEADS:
        method = getattr(model, name, None)
        if callable(method) and isinstance(head := method(), nn.Module):
            yield head
            return
    weights = [module for module in model.modules() if getattr(getattr(module, "weight", None), "ndim", 0) == 2]
    layers = [module for module in weights if not isinstance(module, _EMBEDDINGS)]
    yield from layers[-1:]
