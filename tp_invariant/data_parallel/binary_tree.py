"""The binary tree by which gradients of micro-batches are added.

It depends on the number of micro-batches alone: its node (level, index) is the sum of the micro-batches
[index * 2^level, (index + 1) * 2^level), as far as they exist, computed as the sum of its two halves. This is pairwise
summation, organised like a binary counter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor


class BinaryTree:
    """A sum over `leaves` summands in the tree's order; nodes are pushed from left to right.

    `nodes` holds the (level, index, value) of the sums so far, each at the highest possible level. The tree owns the
    values that are pushed: it adds into a left one in place.
    """

    def __init__(self, leaves: int, add: Callable[[Any, Any], Any] = Tensor.add_) -> None:
        self._leaves, self._add = leaves, add
        self.nodes: list[tuple[int, int, Any]] = []

    def push(self, level: int, index: int, value: Any) -> None:
        while True:
            if index % 2:  # a right half: added to its left half if that is here
                if not self.nodes or self.nodes[-1][:2] != (level, index - 1):
                    break
                value = self._add(self.nodes.pop()[2], value)
            elif index == 0 or (index + 1) << level < self._leaves:
                break  # the root, or a left half that waits for its right half; without one it moves up unchanged
            level, index = level + 1, index // 2
        self.nodes.append((level, index, value))

    def root(self) -> Any:
        """The sum of all leaves."""
        ((_, _, value),) = self.nodes
        return value


def nodes_of(pushed: Iterable[int], leaves: int) -> list[tuple[int, int]]:
    """(level, index) of the nodes that a tree has after the leaves `pushed`, in ascending order."""
    tree = BinaryTree(leaves, lambda left, right: None)
    for leaf in pushed:
        tree.push(0, leaf, None)
    return [(level, index) for level, index, _ in tree.nodes]
