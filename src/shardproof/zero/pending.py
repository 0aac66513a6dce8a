"""A collective: what it moves, and one that is under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Size(NamedTuple):
    """What an operation moves: elements of the whole buffer, whether ranks hold parts of it, and whether a reduction
    leaves the adding to the engine."""

    numel: int
    dtype: torch.dtype
    sharded: bool
    in_order: bool


# What nobody has waited for yet. A model may go while its messages are on their way; to free a buffer that gloo is
# filling would block for ever.
_under_way: set[Pending] = set()


class Pending:
    """A collective under way. `wait()` returns its result, safe to use on the current stream."""

    __slots__ = ("_finish", "_keep", "_result", "_works")

    def __init__(
        self, works: list[Any], result: torch.Tensor, keep: Any = None, finish: Callable[[], object] | None = None
    ) -> None:
        self._works, self._result, self._keep, self._finish = works, result, keep, finish
        _under_way.add(self)

    def wait(self) -> torch.Tensor:
        _under_way.discard(self)
        for work in self._works:
            work.wait()
        if self._finish is not None:
            self._finish()
        self._works, self._keep, self._finish = [], None, None
        return self._result
