"""Watching the operations of a step one by one, to find where numbers stop being finite."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from accelerate.utils import recursively_apply
from torch import nn
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode, resolve_name

from pytorch_accel_lite.extension_tools.modules_and_devices import local_shard
from pytorch_accel_lite.extension_tools.plain_types import Tree

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.fspath(Path(__file__).parents[2]) + os.sep


def are_finite(value: Tree) -> torch.Tensor:
    """Return whether all numbers in nested tensors are finite; in sharded ones, the numbers of this process."""
    return _hold(value, torch.isfinite)


def _hold(value: Tree, test: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return whether all numbers in nested tensors pass a test."""
    flags: list[torch.Tensor] = []

    def check(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            flags.append(test(local_shard(tensor.detach())).all())
        return tensor

    recursively_apply(check, value)
    return torch.stack(flags).all() if flags else torch.tensor(True)


class OperationWatch(TorchFunctionMode):
    """Notes the first operations of a step that give an infinite value and NaN, forward and backward.

    Reads every output from the device. Operations within an operation of torch are not seen.

    Attributes:
        found: descriptions of these operations
    """

    def __init__(self, model: nn.Module, hooks: ExitStack) -> None:
        """Watch the operations of a model.

        Args:
            model: the model
            hooks: removes the hooks of the model when it is closed
        """
        super().__init__()
        self.found: dict[str, str] = {}
        self._layers: list[str] = []  # with forward passes in progress, from the outermost
        self._places: dict[Node, str] = {}  # by node of the graph
        for name, module in model.named_modules():
            shown = f"{name or 'the model itself'} ({type(module).__name__})"
            hooks.callback(module.register_forward_pre_hook(partial(self._enter, shown)).remove)
            hooks.callback(module.register_forward_hook(self._leave, always_call=True).remove)

    def _enter(self, name: str, module: nn.Module, inputs: Tree) -> None:
        self._layers.append(name)

    def _leave(self, module: nn.Module, inputs: Tree, output: Tree) -> None:
        if self._layers:
            self._layers.pop()

    def begin(self) -> None:
        """Begin with a new step."""
        self._layers.clear()
        self._places.clear()

    def __torch_function__(
        self,
        func: Callable[..., Tree],
        types: object,
        args: Sequence[Tree] = (),
        kwargs: Mapping[str, Tree] | None = None,
    ) -> Tree:
        output = func(*args, **(kwargs or {}))
        place = f"in {self._layers[-1]}" if self._layers else "outside of the model"
        if line := _line_of_user():
            place += f", {line}"
        self._note_nodes(output, place)
        self._note(resolve_name(func) or getattr(func, "__name__", str(func)), place, [args, kwargs or {}], output)
        return output

    def _note(self, name: str, place: str, inputs: Tree, outputs: Tree) -> None:
        if not are_finite(outputs):
            kind = "infinite value" if _hold(outputs, _is_no_nan) else "NaN"
            because = "" if are_finite(inputs) else ", of inputs that are not finite either"
            self.found.setdefault(kind, f"The first {kind} comes from {name} {place}{because}.")

    def _note_nodes(self, output: Tree, place: str) -> None:
        """Note the place of each node of the graph that an operation has added."""
        nodes: list[Node | None] = []

        def add(tensor: torch.Tensor) -> torch.Tensor:
            nodes.append(tensor.grad_fn)
            return tensor

        recursively_apply(add, output)
        while nodes:
            node = nodes.pop()
            if node is not None and node not in self._places:
                self._places[node] = place
                nodes += [following for following, _ in node.next_functions]

    def watch_backward(self) -> None:
        """Watch the backward pass of the operations since the previous backward pass."""
        for node, place in self._places.items():
            node.register_hook(partial(self._note_gradient, node.name(), place))
        self._places.clear()

    def _note_gradient(self, name: str, place: str, inputs: Tree, outputs: Tree) -> None:
        if are_finite(outputs):  # the gradients that reach it
            self._note(f"the gradient of {name}", place, outputs, inputs)


def _is_no_nan(tensor: torch.Tensor) -> torch.Tensor:
    return ~tensor.isnan()


def _line_of_user() -> str:
    """Return the innermost line in progress outside torch and this package, if it led to the call."""
    frame = sys._getframe(2)  # noqa: SLF001
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if name.startswith(_OURS) and name != __file__:
            return ""
        if not name.startswith((_TORCH, _OURS, "<")):
            text = linecache.getline(name, frame.f_lineno).strip()
            return f"line {frame.f_lineno} of {os.path.basename(name)}: {text}"
        frame = frame.f_back
    return ""
