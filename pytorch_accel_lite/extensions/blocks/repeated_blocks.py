"""Finding the repeated blocks of a model, and choosing modules of it."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterable, Iterator

from torch import nn

from pytorch_accel_lite.extension_tools.arguments_and_errors import did_you_mean
from pytorch_accel_lite.extension_tools.modules_and_devices import ChosenModules
from pytorch_accel_lite.extension_tools.texts_and_pages import listed


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks that a model repeats, by name: the layers of a transformer, the residual blocks of a ResNet.

    Blocks are modules of one class in a list, with modules inside. If the modules of a list are stages of different
    sizes, the blocks are inside these.
    """
    found = set(_blocks_in(model))
    return {name: module for name, module in model.named_modules() if module in found}


def _blocks_in(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
        composite = [child for child in module.children() if _is_composite(child)]
        counts = Counter(map(_kind, composite))
        alike = [child for child in composite if counts[_kind(child)] > 1]
        inside = [block for child in alike for block in _blocks_in(child)]
        if alike and not (inside and _all_differ(alike)):
            yield from alike
            return
    for child in module.children():
        yield from _blocks_in(child)


def _is_composite(module: nn.Module) -> bool:
    return next(module.children(), None) is not None and next(module.parameters(), None) is not None


def _kind(module: nn.Module) -> tuple[type, ...]:
    """Return the class of a module; for a container, also the classes of its modules, which tell containers apart."""
    is_container = type(module) in (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    return (type(module), *map(type, module.children())) if is_container else (type(module),)


def _all_differ(modules: list[nn.Module]) -> bool:
    """Whether no two modules have parameters of the same shapes."""
    shapes = [tuple(parameter.shape for parameter in module.parameters()) for module in modules]
    return len(set(shapes)) == len(shapes)


def choose(argument: str, chosen: ChosenModules, model: nn.Module) -> dict[str, nn.Module]:
    """Return modules of a model by name, none of which is in another.

    Args:
        argument: name of the argument, for errors

    Raises:
        TypeError: if the choice is none, such as ``None``
        ValueError: if no module is chosen, or a chosen module is never called
    """
    if isinstance(chosen, (bool, float)):
        found = _share_of_blocks(argument, float(chosen), model)
    else:
        found = _outermost(_matching(argument, chosen, model))
    for name, module in found.items():
        if type(module).forward is nn.Module.forward:
            raise ValueError(
                f"{argument}={chosen!r} includes {name!r}, a {type(module).__name__}, which the model does not call. "
                f"Name the modules in it: {name + '.*'!r}."
            )
    return found


def _share_of_blocks(argument: str, share: float, model: nn.Module) -> dict[str, nn.Module]:
    """Return a share of the repeated blocks, spread evenly over the model."""
    if not 0 < share <= 1:
        raise ValueError(f"{argument}={share} must be a fraction of the model's repeated blocks: above 0, at most 1.")
    blocks = repeated_blocks(model)
    if not blocks:
        raise ValueError(
            f"{argument}: {type(model).__name__} has no repeated blocks, such as layers of one class in a ModuleList. "
            f"Name modules or classes instead: {argument}=['encoder', 'decoder']."
        )
    count = max(round(share * len(blocks)), 1)
    ends = [number * count // len(blocks) for number in range(len(blocks) + 1)]
    return {
        name: block for (name, block), begin, end in zip(blocks.items(), ends, ends[1:], strict=False) if end > begin
    }


def _matching(argument: str, chosen: ChosenModules, model: nn.Module) -> dict[str, nn.Module]:
    parts = {name: module for name, module in model.named_modules() if name}
    if callable(chosen) and not isinstance(chosen, type):
        found = {name: module for name, module in parts.items() if chosen(name, module)}
        if not found:
            raise ValueError(f"{argument}={chosen!r} chooses no module of {type(model).__name__}.")
        return found
    if not isinstance(chosen, (str, type, Iterable)) or not getattr(chosen, "ndim", 1):
        raise TypeError(
            f"{argument}={chosen!r} must be True, False, a fraction of the repeated blocks, names or classes of "
            "modules, or a function of a module's name and the module."
        )
    found = {}
    for choice in [chosen] if isinstance(chosen, (str, type)) else chosen:
        matching = {name: module for name, module in parts.items() if _matches(choice, name, module)}
        if not matching:
            names = [*parts, *{type(module).__name__ for module in parts.values()}]
            hint = did_you_mean(choice, names) if isinstance(choice, str) else ""
            raise ValueError(
                f"{argument} has {choice!r}, which is neither a module of {type(model).__name__} nor the class of one."
                f"{hint or (f' It has {listed(list(parts), 10)}.' if parts else ' It has no modules in it.')}"
            )
        found |= matching
    if not found:
        raise ValueError(f"{argument}={chosen!r} chooses no module of {type(model).__name__}.")
    return {name: module for name, module in parts.items() if name in found}


def _matches(choice: str | type[nn.Module], name: str, module: nn.Module) -> bool:
    if isinstance(choice, type):
        return isinstance(module, choice)
    return fnmatch.fnmatchcase(name, choice) or type(module).__name__ == choice


def _outermost(found: dict[str, nn.Module]) -> dict[str, nn.Module]:
    return {name: module for name, module in found.items() if not any(name.startswith(f"{other}.") for other in found)}


def describe_blocks(modules: dict[str, nn.Module]) -> str:
    """Return how many modules there are of each class, and the names of the first and the last one."""
    counts = Counter(type(module).__name__ for module in modules.values())
    names = list(modules)
    ends = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    return f"{', '.join(f'{count} {kind}' for kind, count in counts.items())} ({ends})"
