"""A sum whose order depends only on the number of its terms, however they are divided among processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Node(Generic[T]):
    """The sum of ``2 ** level`` terms.

    :param start: number of its first term
    """

    level: int
    start: int
    value: T


class TreeSum(Generic[T]):
    """Adds up terms that arrive from left to right, like a binary counter.

    Two neighbours that are the halves of an aligned block of terms become one node. What is left at the end is added
    from right to left. So the terms of a contiguous range become a few nodes, at most two for each level, which become
    those of the entire tree when they are pushed in order: the order of additions never depends on how the
    terms were divided.

    :param add: adds the right value to the left one, which it may change, and returns the sum
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
