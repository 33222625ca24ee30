"""Type aliases: states, and data that differ from program to program."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeAlias

from torch import nn

#: The result of ``state_dict()``: any values by name, which only the object that returned them understands.
StateDict: TypeAlias = dict[str, Any]
#: Nested dicts, lists and tuples of tensors and other values, such as a batch or the outputs of a model.
Tree: TypeAlias = Any
#: The keys and indices that lead to a value in nested data.
Keys: TypeAlias = tuple[Any, ...]
#: A JSON object. Its contents are checked where they are read.
JsonObject: TypeAlias = dict[str, Any]
#: A choice of modules: all repeated blocks, a share of the blocks, modules by name (with ``*``) or class, or a
#: function.
ChosenModules: TypeAlias = (
    bool | float | str | type[nn.Module] | Iterable[str | type[nn.Module]] | Callable[[str, nn.Module], bool]
)


class HasStateDict(Protocol):
    """An object with a state in training states."""

    def state_dict(self) -> StateDict: ...  # noqa: D102
    def load_state_dict(self, state_dict: StateDict, /) -> object: ...  # noqa: D102
