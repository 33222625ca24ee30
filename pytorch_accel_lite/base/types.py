"""Names for types that are no classes: states, and what differs from program to program."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeAlias

from torch import nn

#: What ``state_dict()`` returns: values of all kinds by name, which only the object that they came from understands.
StateDict: TypeAlias = dict[str, Any]
#: Nested dicts, lists and tuples with tensors and other values in them, such as a batch or the outputs of a model.
Tree: TypeAlias = Any
#: The keys and indices that lead to a value in nested data.
Keys: TypeAlias = tuple[Any, ...]
#: An object in JSON. What it holds is checked where it is read.
JsonObject: TypeAlias = dict[str, Any]
#: Modules of a model: all that it repeats, a share of them, some by name (with ``*``) or class, or by a function.
ChosenModules: TypeAlias = (
    bool | float | str | type[nn.Module] | Iterable[str | type[nn.Module]] | Callable[[str, nn.Module], bool]
)


class HasStateDict(Protocol):
    """What keeps its state in training states."""

    def state_dict(self) -> StateDict: ...  # noqa: D102
    def load_state_dict(self, state_dict: StateDict, /) -> object: ...  # noqa: D102
