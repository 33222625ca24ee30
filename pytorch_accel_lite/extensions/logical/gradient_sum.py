"""Gradients of a window, added up over all logical processes in one fixed order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from pytorch_accel_lite.extending import Ranks
from pytorch_accel_lite.extension_tools.data_and_batches import share_bounds

#: The gradients of the parameters, in their order; ``None`` where there is none.
Gradients = list[torch.Tensor | None]
#: All-gathers bytes: returns a row for each process.
Gather = Callable[[torch.Tensor], torch.Tensor]


def add_gradients(first: Gradients, second: Gradients) -> Gradients:
    """Add gradients to others in place. Missing gradients count as zero."""
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a is not None and b is not None]
    if pairs:
        torch._foreach_add_([a for a, _ in pairs], [b for _, b in pairs])
    return [b if a is None else a for a, b in zip(first, second, strict=True)]


class GradientSum:
    """The sum of gradients over logical processes and the steps of an accumulation window.

    The shares of a step are added in a tree (``TreeSum``), the sums of the steps one after another. A process
    holds the gradients of one share and, for each level of the tree, at most one sum. Each process adds up one slice of
    the gradients over all processes: it receives that slice of the nodes of all others after each step, and sends its
    sum to all at the end of the window, as in an all-reduce. All additions are in the dtype of the gradients. Missing
    gradients are sent as negative zeros, which change no bit of a sum.

    Args:
        ranks: the processes that add up the gradients
        count: number of logical processes

    Attributes:
        room: bytes reserved at the end of each process's last message, a multiple of 8, for the caller of ``finish()``
    """

    room = 0

    def __init__(self, ranks: Ranks, count: int) -> None:
        self._ranks = ranks
        self._count = count
        self._tree = TreeSum[Gradients](add_gradients)
        self._parameters: list[nn.Parameter] = []
        self.restart()

    def restart(self) -> None:
        """Discard the sums of this window, and divide the shares among the current processes."""
        world_size = self._ranks.world_size
        self._blocks = [blocks_of(range(*share_bounds(self._count, rank, world_size))) for rank in range(world_size)]
        self._tree.nodes.clear()
        self._total: Gradients | None = None  # with one process
        self._slices: list[torch.Tensor] = []
        self._missed: set[int] = set()
        self.drop()

    def begin_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Begin a step that computes gradients of these parameters, whose earlier gradients are dropped."""
        self._tree.nodes.clear()
        self._parameters = list(parameters)
        self.drop()

    @property
    def has_slices(self) -> bool:
        """Whether ``finish()`` communicates."""
        return bool(self._slices)

    def drop(self) -> None:
        """Drop the gradients of a share that has no samples."""
        for parameter in self._parameters:
            parameter.grad = None

    def take(self, number: int) -> None:
        """Take the gradients of a share from the parameters.

        Args:
            number: number of its logical process
        """
        gradients = [parameter.grad for parameter in self._parameters]
        self.drop()
        self._add_empty_shares(number)
        self._tree.push(Node(0, number, gradients))

    def _add_empty_shares(self, number: int) -> None:
        """Add missing gradients for the preceding shares that have no samples."""
        blocks = self._tree.nodes
        blocks_of_rank = self._blocks[self._ranks.rank]
        following = blocks[-1].start + (1 << blocks[-1].level) if blocks else blocks_of_rank[0][1]
        for empty in range(following, number):
            self._tree.push(Node(0, empty, [None] * len(self._parameters)))

    def end_step(self) -> None:
        """Add the gradients of a step to those of the window. Call it on every process."""
        level, start = self._blocks[self._ranks.rank][-1]
        self._add_empty_shares(start + (1 << level))
        if self._ranks.world_size == 1:
            total = self._tree.total()
            self._total = total if self._total is None else add_gradients(self._total, total)
            return
        for gradients in (node.value for node in self._tree.nodes):
            self._missed.update(index for index, gradient in enumerate(gradients) if gradient is None)
        groups = [*self._groups()]
        summed = [self._sum_slice(*group, is_last=group is groups[-1]) for group in groups]
        self._tree.nodes.clear()
        if self._slices:
            torch._foreach_add_(self._slices, summed)
        else:
            self._slices = summed

    def finish(self, gather_last: Gather | None = None) -> None:
        """Give each parameter its gradient of the window, the same on every process. Call it on every process.

        Parameters that had a gradient in no share get none.

        Args:
            gather_last: all-gathers the last messages, and may fill their last ``room`` bytes; torch's by default
        """
        if self._ranks.world_size == 1:
            for parameter, gradient in zip(self._parameters, self._total or (), strict=True):
                parameter.grad = gradient
            self._total = None
            return
        slices, missed = self._slices, self._missed
        self._slices, self._missed = [], set()
        unused: set[int] = set()
        for (indices, with_flags), part in zip(self._groups(), slices, strict=True):
            is_last = part is slices[-1]
            gather = gather_last if is_last and gather_last is not None else self._gather
            rows = gather(view_as_bytes(part))[:, : len(part) * part.element_size() - self.room * is_last]
            parameters = [self._parameters[index] for index in indices]
            rest = _give_gradients(parameters, rows.view(part.dtype))
            if with_flags and missed:
                flags = torch.cat(rest).tolist()
                unused = {index for index in missed if not flags[index]}
        for index in unused:
            self._parameters[index].grad = None

    def _gather(self, sent: torch.Tensor) -> torch.Tensor:
        """All-gather bytes: return a row for each process."""
        gathered = sent.new_empty(self._ranks.world_size, len(sent))
        dist.all_gather_into_tensor(gathered.view(-1), sent)
        return gathered

    def _groups(self) -> Iterator[tuple[list[int], bool]]:
        """Yield the indices of the parameters of each dtype, and whether the flags of all parameters are appended."""
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, parameter in enumerate(self._parameters):
            by_dtype.setdefault(parameter.dtype, []).append(index)
        for number, indices in enumerate(by_dtype.values()):
            yield indices, number == 0

    def _sum_slice(self, indices: list[int], with_flags: bool, is_last: bool) -> torch.Tensor:
        """Return this rank's slice of the sum of some gradients over all processes, and free them."""
        world_size = self._ranks.world_size
        flat = [self._flatten(node.value, indices, with_flags) for node in self._tree.nodes]
        num_nodes = len(flat)
        length = len(flat[0]) // world_size
        slices = zip(*(vector.split(length) for vector in flat), strict=True)  # type: ignore[no-untyped-call]
        sent_slices = flat[0] if num_nodes == 1 else torch.cat(list(chain.from_iterable(slices)))
        del flat, slices
        sent_sizes = [num_nodes * length] * world_size
        received_sizes = [len(blocks) * length for blocks in self._blocks]
        received_slices = sent_slices.new_empty(sum(received_sizes))
        scale = sent_slices.element_size()
        sizes = [n * scale for n in received_sizes], [n * scale for n in sent_sizes]
        dist.all_to_all_single(view_as_bytes(received_slices), view_as_bytes(sent_slices), *sizes)
        del sent_slices
        tree = TreeSum[torch.Tensor](torch.Tensor.add_)
        blocks = (block for rank_blocks in self._blocks for block in rank_blocks)
        for (level, start), part in zip(blocks, received_slices.split(length), strict=True):  # type: ignore[no-untyped-call]
            tree.push(Node(level, start, part))
        return self._with_room(tree.total(), is_last)  # a copy, which does not keep the others in memory

    def _with_room(self, total: torch.Tensor, is_last: bool) -> torch.Tensor:
        """Return a copy, followed by the reserved room if this is the last slice."""
        room = self.room // total.element_size() if is_last else 0
        if not room:
            return total.clone()
        return torch.cat([total, total.new_zeros(room)])

    def _flatten(self, gradients: Gradients, indices: list[int], with_flags: bool) -> torch.Tensor:
        """Return some gradients as one vector that divides evenly among the ranks, and drop them.

        Args:
            with_flags: whether to append, for every parameter, whether it has a gradient
        """
        first = self._parameters[indices[0]]
        flags = [float(gradient is not None) for gradient in gradients] if with_flags else []
        parts: list[torch.Tensor] = []
        for index in indices:
            gradient = gradients[index]
            parts.append(torch.zeros_like(self._parameters[index]).neg_() if gradient is None else gradient)
            gradients[index] = None
        size = sum(part.numel() for part in parts) + len(flags)
        tail = torch.zeros(len(flags) + -size % self._ranks.world_size, dtype=first.dtype, device=first.device)
        if all(flags):
            tail[: len(flags)] = 1.0  # without a copy to the device, which would wait for it
        else:
            tail[: len(flags)] = torch.tensor(flags, dtype=first.dtype)
        return torch.cat([*(part.detach().reshape(-1) for part in parts), tail])


def _give_gradients(parameters: Sequence[nn.Parameter], rows: torch.Tensor) -> list[torch.Tensor]:
    """Set the gradients of parameters from consecutive rows; return the parts of the remainder.

    Args:
        rows: contiguous except for gaps between them
    """
    sizes = [parameter.numel() for parameter in parameters]
    *pieces, rest = _cut(rows, [*sizes, rows.numel() - sum(sizes)])
    gradients = [torch.empty_like(parameter) for parameter in parameters]
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for gradient, parts in zip(gradients, pieces, strict=True):
        if len(parts) == 1:
            targets.append(gradient)
            sources.append(parts[0].view(gradient.shape))
        elif gradient.is_contiguous():
            targets += torch.split_with_sizes(gradient.view(-1), [part.numel() for part in parts])
            sources += parts
        else:
            targets.append(gradient)
            sources.append(torch.cat(parts).view(gradient.shape))
    torch._foreach_copy_(targets, sources)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return rest


def _cut(rows: torch.Tensor, sizes: Sequence[int]) -> list[list[torch.Tensor]]:
    """Split consecutive rows into pieces. Each piece is a list of parts, as it may span several rows."""
    if rows.is_contiguous():
        return [[piece] for piece in torch.split_with_sizes(rows.view(-1), sizes)]
    pieces: list[list[torch.Tensor]] = [[] for _ in sizes]
    for row, cuts in zip(rows.unbind(), _cuts(*rows.shape, tuple(sizes)), strict=True):
        numbers, lengths = cuts
        for number, part in zip(numbers, torch.split_with_sizes(row, lengths), strict=True):
            pieces[number].append(part)
    return pieces


@lru_cache(maxsize=100)
def _cuts(num_rows: int, length: int, sizes: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Return how rows are cut into pieces of these sizes: for each row, the numbers of pieces, and the lengths there.

    The same in each update, and counting takes as long as the cuts themselves.
    """
    ends = [*accumulate(sizes)]
    cuts = []
    for start in range(0, num_rows * length, length):
        parts = [
            (number, min(end, start + length) - max(end - size, start))
            for number, (size, end) in enumerate(zip(sizes, ends, strict=True))
        ]
        present = [(number, part) for number, part in parts if part > 0]
        cuts.append(([number for number, _ in present], [part for _, part in present]))
    return cuts


def view_as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view that any backend can send, whatever the dtype."""
    return tensor.view(torch.uint8)


T = TypeVar("T")


@dataclass(eq=False, repr=False, slots=True)
class Node(Generic[T]):
    """The sum of ``2 ** level`` terms.

    Args:
        level: the level of the node in the tree; a single term has level 0
        start: the number of the node's first term
        value: the sum
    """

    level: int
    start: int
    value: T


class TreeSum(Generic[T]):
    """Adds up terms that arrive from left to right, like a binary counter.

    Two neighbours that are the halves of an aligned block of terms become one node. The remaining nodes are added from
    right to left. The terms of a contiguous range become a few nodes, at most two for each level, and pushing the nodes
    of all ranges in order gives the same tree, so the order of additions does not depend on how the terms were divided.

    Args:
        add: adds the right value to the left one, which it may change, and returns the sum

    Attributes:
        nodes: the sums that have not been added to a neighbour yet, from left to right
    """

    def __init__(self, add: Callable[[T, T], T]) -> None:
        self._add = add
        self.nodes: list[Node[T]] = []

    def push(self, node: Node[T]) -> None:
        """Add the next node."""
        while self.nodes and self.nodes[-1].level == node.level and not self.nodes[-1].start % (2 << node.level):
            left = self.nodes.pop()
            node = Node(node.level + 1, left.start, self._add(left.value, node.value))
        self.nodes.append(node)

    def total(self) -> T:
        """Return the sum of all terms, the first of which must be number 0."""
        total = self.nodes.pop().value
        while self.nodes:
            total = self._add(self.nodes.pop().value, total)
        return total


def blocks_of(terms: range) -> list[tuple[int, int]]:
    """Return the level and the start of each node that a contiguous range of terms becomes."""
    tree = TreeSum[None](lambda left, right: None)
    for number in terms:
        tree.push(Node(0, number, None))
    return [(node.level, node.start) for node in tree.nodes]
