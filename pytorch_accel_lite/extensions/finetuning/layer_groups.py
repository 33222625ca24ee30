"""Dividing a model into groups of layers by depth: embeddings, each block, head."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from pytorch_accel_lite.extension_tools.texts_and_pages import short_repr

#: A group as users pass it: a module, or several modules.
ModuleGroup = nn.Module | Sequence[nn.Module]

# A list with a smaller share of layers than this, relative to the largest list, has no blocks: it may have heads.
_LEAST_SHARE = 0.25


def has_adapters(model: nn.Module) -> bool:
    """Whether a model is PEFT's, or a transformers model with adapters added by ``model.add_adapter``."""
    peft = sys.modules.get("peft")
    is_peft = peft is not None and isinstance(model, peft.PeftModel)
    return is_peft or getattr(model, "_hf_peft_config_loaded", False) is True


@dataclass(eq=False, repr=False)
class Group:
    """Parts of a model that are frozen, unfrozen and scheduled together.

    Args:
        modules: modules, none of which is in another group
        parameters: the parameters of the modules, and of modules around several groups; each parameter is in one group
            only
    """

    modules: list[nn.Module]
    parameters: list[nn.Parameter] = field(default_factory=list)

    @property
    def module(self) -> nn.Module:
        """The module of the group, or a ``ModuleList`` of several modules."""
        return self.modules[0] if len(self.modules) == 1 else nn.ModuleList(self.modules)


def find_groups(model: nn.Module, groups: Sequence[ModuleGroup] | None = None) -> list[Group]:
    """Divide a model into groups, from the input to the head.

    Parameters outside all groups, such as a class token, belong to the first group. A shared parameter belongs to the
    first group that has it.

    Args:
        groups: the groups; by default, those of ``ModelFreezer``

    Raises:
        ValueError: if a module in ``groups`` is not in the model, or is in two groups
    """
    if groups is not None:
        return _with_parameters(model, _check_groups(model, groups))
    root = _skip_wrappers(model)
    blocks = _blocks_in_lists(root)
    if not blocks:
        return _with_parameters(model, [[child] for child in model.children()])
    return [group for group in _with_parameters(model, _group_around(root, blocks)) if group.parameters]


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model, in order: layers of a transformer, stages of a ResNet, or else its children."""
    root = _skip_wrappers(model)
    blocks = _blocks_in_lists(root) or list(root.children())
    return [block for block in blocks if next(block.parameters(), None) is not None]


def _with_parameters(model: nn.Module, modules_by_group: list[list[nn.Module]]) -> list[Group]:
    groups = [Group(modules) for modules in modules_by_group]
    owners: dict[nn.Parameter, Group] = {}
    for group in groups:
        for module in group.modules:
            for parameter in module.parameters():
                owners.setdefault(parameter, group)
    for parameter in model.parameters() if groups else ():
        owners.get(parameter, groups[0]).parameters.append(parameter)
    return groups


def _check_groups(model: nn.Module, groups: Sequence[ModuleGroup]) -> list[list[nn.Module]]:
    if not isinstance(groups, Iterable):
        raise TypeError(f"groups={groups!r} must be a list of modules, from the input to the head.")
    parts = set(model.modules())
    modules_by_group = [_modules_of(group, parts) for group in groups]
    if not any(modules_by_group):
        raise ValueError(f"groups={groups!r} has no modules. Pass modules of the model, from the input to the head.")
    seen: dict[nn.Module, int] = {}
    for index, modules in enumerate(modules_by_group):
        for module in modules:
            if module not in parts:
                raise ValueError(f"groups[{index}] has {short_repr(module)}, which is not a module of the model.")
            for part in module.modules():
                if seen.setdefault(part, index) != index:
                    raise ValueError(
                        f"groups[{index}] and groups[{seen[part]}] both have {type(part).__name__}. Pass each module "
                        "in one group."
                    )
    return modules_by_group


def _modules_of(group: Any, parts: set[nn.Module]) -> list[nn.Module]:
    """Return the modules of a group, which may be a slice of a list of blocks: a new list that is not in the model."""
    is_slice = isinstance(group, nn.Module) and _is_list(group) and group not in parts
    is_sequence = isinstance(group, Sequence) and not isinstance(group, str)
    return list(group) if is_slice or is_sequence else [group]


def _skip_wrappers(model: nn.Module) -> nn.Module:
    """Return the outermost module that has more than one child, parameters of its own, or blocks."""
    children = list(model.children())
    owns_parameters = next(model.parameters(recurse=False), None) is not None
    if len(children) != 1 or owns_parameters or _block_class(children[0]) is not None:
        return model
    return _skip_wrappers(children[0])


def _num_layers(module: nn.Module) -> int:
    """Return the number of modules with parameters. Their sizes would show the vocabulary rather than the depth."""
    return sum(next(part.parameters(recurse=False), None) is not None for part in module.modules())


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.Sequential))


def _block_class(module: nn.Module) -> type | None:
    """Return the class of the blocks in a list of blocks of one class; ``None`` for other modules."""
    children = [child for child in module.children() if _num_layers(child)] if _is_list(module) else []
    kinds = {type(child) for child in children}
    is_composite = all(next(child.children(), None) is not None for child in children)
    return kinds.pop() if len(children) > 1 and len(kinds) == 1 and is_composite else None


def _blocks_in_lists(root: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model in order; an empty list if its children are layers, or most are not in lists."""
    lists = [] if _block_class(root) is not None or _has_stages(root) else list(_lists_in(root))
    sizes = {module: _num_layers(module) for module in lists}
    trunk = [module for module, size in sizes.items() if size >= _LEAST_SHARE * max(sizes.values())]
    if 2 * sum(sizes[module] for module in trunk) < _num_layers(root):
        return []
    return [block for module in trunk for block in module.children()]


def _has_stages(module: nn.Module) -> bool:
    """Whether several children are lists of blocks of one class, as in a ResNet: then the children are the blocks."""
    kinds = [kind for child in module.children() if (kind := _block_class(child)) is not None]
    return len(kinds) > len(set(kinds))


def _lists_in(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules whose children are blocks."""
    for child in module.children():
        if _block_class(child) is not None or _has_stages(child):
            yield child
        else:
            yield from _lists_in(child)


def _group_around(root: nn.Module, blocks: list[nn.Module]) -> list[list[nn.Module]]:
    """Return the modules before the blocks, each block with the modules that follow it, and the head."""
    groups: list[list[nn.Module]] = [[]]
    head: list[nn.Module] = []
    is_block = set(blocks)
    ancestors = {module for module in root.modules() if not is_block.isdisjoint(module.modules())} - is_block

    def assign(module: nn.Module, is_outermost: bool) -> None:
        if module in is_block:
            groups.append([module])
        elif module in ancestors:
            for child in module.children():
                assign(child, is_outermost=False)
        elif any(isinstance(part, nn.Embedding) for part in module.modules()):
            groups[0].append(module)
        elif is_outermost and len(groups) > len(blocks) and (head or not _is_norm(module)):
            head.append(module)
        else:
            groups[-1].append(module)

    for child in root.children():
        assign(child, is_outermost=True)
    return [list(dict.fromkeys(group)) for group in (*groups, head) if group]


def _is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm, or an identity in place of one."""
    is_leaf = next(module.children(), None) is None
    return isinstance(module, nn.Identity) or (is_leaf and "norm" in type(module).__name__.lower())
