"""The repeated blocks of a model. Steps are run with only a few of them: see [Note: fewer blocks] in imagine.py."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from shardproof.models.families.anatomy import anatomy
from shardproof.zero.build import find_units

DEPTHS = (5, 6)  # blocks of the two runs


class Blocks(NamedTuple):
    """The longest list of units of a model: the blocks that repeat.

    Attributes:
        name: the name of the list; empty if there is none.
        number: the number of blocks.
        first: the number of leading blocks that differ from the rest.
        period: the period with which the others repeat.
    """

    name: str = ""
    number: int = 0
    first: int = 0
    period: int = 1

    @property
    def groups(self) -> float:
        """The number of repetitions of the others."""
        return (self.number - self.first) / self.period

    def of(self, groups: int) -> int:
        """The number of blocks with this many repetitions."""
        return self.first + groups * self.period


def repeated_blocks(model: nn.Module) -> Blocks:
    lists: dict[str, list[nn.Module]] = {}
    for name, module in find_units(model, anatomy(model).units):
        parent, _, last = name.rpartition(".")
        if last.isdigit() and isinstance(model.get_submodule(parent), nn.ModuleList):
            lists.setdefault(parent, []).append(module)
    if not lists:
        return Blocks()
    name = max(lists, key=lambda n: sum(p.numel() for m in lists[n] for p in m.parameters()))
    text: Any = getattr(model, "config", None)
    text = text.get_text_config() if hasattr(text, "get_text_config") else text
    kinds = getattr(text, "layer_types", None) or []
    signs = [
        (
            type(m).__name__,
            [(tuple(p.shape), p.requires_grad) for p in m.parameters()],
            kinds[i] if len(kinds) == len(lists[name]) else "",
        )
        for i, m in enumerate(lists[name])
    ]
    ways = [(first, _period(signs[first:])) for first in range(max(1, len(signs) - 1))]
    first, period = min(ways, key=lambda way: (way[0] + DEPTHS[-1] * way[1], way[0]))
    return Blocks(name, len(signs), first, period)


def _period(signs: list[Any]) -> int:
    return next(p for p in range(1, len(signs) + 1) if all(a == b for a, b in zip(signs, signs[p:], strict=False)))


def keep_blocks(model: nn.Module, name: str, count: int) -> nn.Module:
    """Keep only the first `count` blocks of the list `name`, if there is one. Returns `model`."""
    if name:
        blocks: Any = model.get_submodule(name)
        del blocks[count:]
    return model
