"""Agreement of many ranks by way of a few others each: what one sends does not grow with their number.

[Note: many ranks]
Up to `MANY` ranks a word goes from each rank to each, ahead of time: nobody waits for it who has something to do. For
each word that is as many messages as there are ranks, and as many to look at: of 16,384 ranks 14 ms for looking alone.
More of them hold each round of words as one agreement in a binary tree. Every rank brings the head of its stream, the
least and the greatest go up and come back. Where these are one, all mean the same operation; where they differ, the
tree collects the heads of all. A rank then waits for the others in each round; but what is planned needs no rounds, so
that a step has a few.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardproof.zero.comm.words import TREE_TAG

MANY = 64  # ranks, beyond which they agree in a tree


class Tree:
    """The ranks of a group as a binary tree, with rank 0 on top.

    Args:
        group: gives the process group, which is not kept here. It must take messages from the CPU.
    """

    def __init__(self, group: Callable[[], Any], rank: int, size: int) -> None:
        self._group = group
        self.parent = (rank - 1) // 2 if rank else None
        self.children = [child for child in (2 * rank + 1, 2 * rank + 2) if child < size]

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """The element-wise maximum over ranks of a small tensor on the CPU, in place, and wait. All ranks call it in
        one order; beside the user's own collectives it may stand anywhere, for its messages have a tag."""
        group = self._group()
        below = [torch.empty_like(values) for _ in self.children]
        works = [group.recv([part], child, TREE_TAG) for part, child in zip(below, self.children, strict=True)]
        for part, work in zip(below, works, strict=True):
            work.wait()
            torch.maximum(values, part, out=values)
        if self.parent is not None:
            group.send([values], self.parent, TREE_TAG).wait()
            group.recv([values], self.parent, TREE_TAG).wait()
        for work in [group.send([values], child, TREE_TAG) for child in self.children]:
            work.wait()
        return values
