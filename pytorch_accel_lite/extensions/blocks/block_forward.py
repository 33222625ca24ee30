"""The forward pass of a block with activation checkpointing, compilation, or both."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

#: Arguments with which layers of transformers append to a cache: recomputation would append a second time.
_CACHES = ("past_key_values", "past_key_value", "layer_past")

#: The states of the generators of python and numpy.
Generators = tuple[Any, dict[str, Any]]


class BlockForward:
    """A block's ``forward``, kept in the block's ``__dict__``, so that no name in the model's state changes.

    The block's hooks are called outside of this. The hooks of ``fully_shard`` therefore gather the weights before it,
    in the backward pass, too. A copy of the block has its own copy of this object, which compiles separately.

    Args:
        block: the block, a repeated module of the model

    Attributes:
        checkpoints: whether activations within the block are computed again in the backward pass
        compile_options: arguments of ``torch.compile``; ``None`` if the block is not compiled by itself
    """

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.checkpoints = False
        self.compile_options: dict[str, Any] | None = None
        self._own: Callable[..., Any] | None = vars(block).get("forward")  # another library's forward
        self._compiled: Callable[..., Any] | None = None

    @classmethod
    def of(cls, block: nn.Module) -> BlockForward:
        """Return the ``BlockForward`` of a block, and create it if there is none."""
        found = vars(block).get("forward")
        if not isinstance(found, cls):
            found = vars(block)["forward"] = cls(block)
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the block.

        Recomputation calls a compiled block as a whole, so that the same kernels give the same bits.
        """
        if torch.compiler.is_compiling():  # within a larger graph, torch does not promise the same bits
            return self._own(*args, **kwargs) if self._own else type(self.block).forward(self.block, *args, **kwargs)
        forward = self._own or MethodType(type(self.block).forward, self.block)
        if self.compile_options is not None:
            if self._compiled is None:
                self._compiled = torch.compile(forward, **self.compile_options)
            forward = self._compiled
        if not (self.checkpoints and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        if kwargs.get("use_cache"):
            kwargs["use_cache"] = False
        kwargs |= dict.fromkeys(name for name in _CACHES if kwargs.get(name) is not None)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=StateBefore(self.block).contexts, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_compiled": None}


class StateBefore:
    """The state that a forward pass changes: buffers, such as those of batch norm, and generators of python and numpy.

    The second pass begins with the state from before the first pass, and leaves the state from after it. ``checkpoint``
    takes care of torch's own generators.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self.buffers: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]] = []
        self.generators: Generators | None = None

    def contexts(self) -> tuple[FirstPass, SecondPass]:
        """Return the contexts of the two passes."""
        return FirstPass(self, self._block), SecondPass(self)


class FirstPass:
    """The context of the first pass, which notes the state before it and what it changes."""

    def __init__(self, before: StateBefore, block: nn.Module) -> None:
        self._before = before
        self._block = block

    def __enter__(self) -> None:
        self._found = [
            (part._buffers, name, buffer, buffer._version, buffer.clone())
            for part in self._block.modules()
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]
        self._generators = capture_own_generators()

    def __exit__(self, *_: object) -> None:
        for buffers, name, buffer, version, value in self._found:
            # F.batch_norm changes running_mean and running_var without raising their version numbers.
            if buffers[name] is not buffer or buffer._version != version or name.startswith("running_"):
                self._before.buffers.append((buffers, name, value))
        if not are_same(capture_own_generators(), self._generators):
            self._before.generators = self._generators
        del self._found, self._generators


class SecondPass:
    """The context of the second pass, which may happen more than once."""

    def __init__(self, before: StateBefore) -> None:
        self._before = before

    def __enter__(self) -> None:
        before = self._before
        self._after = [(buffers, name, buffers[name]) for buffers, name, _ in before.buffers]
        self._generators = None if before.generators is None else capture_own_generators()
        for buffers, name, value in before.buffers:
            buffers[name] = value.clone()
        if before.generators is not None:
            restore_own_generators(before.generators)

    def __exit__(self, *_: object) -> None:
        for buffers, name, buffer in self._after:
            buffers[name] = buffer
        if self._generators is not None:
            restore_own_generators(self._generators)


def capture_own_generators() -> Generators:
    """Return the states of the generators of python and numpy."""
    return random.getstate(), np.random.get_state(legacy=False)


def restore_own_generators(states: Generators) -> None:
    """Restore what ``capture_own_generators()`` returned."""
    random.setstate(states[0])
    np.random.set_state(states[1])


def are_same(first: Generators, second: Generators) -> bool:
    """Whether two states are the same."""
    ours, others = first[1]["state"], second[1]["state"]
    return first[0] == second[0] and ours["pos"] == others["pos"] and np.array_equal(ours["key"], others["key"])
