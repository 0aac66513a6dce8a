"""Who watches a run, and where its records go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class View(Protocol):
    """What watches a run: `record` holds what a line of metrics.jsonl holds, or one of completions.jsonl."""

    def begin(self, steps: int, done: int = 0) -> None: ...
    def logged(self, record: dict[str, Any]) -> None: ...
    def generated(self, record: dict[str, Any]) -> None: ...
    def evaluated(self, done: int, total: int) -> None: ...
    def end(self) -> None: ...


Write = Callable[[dict[str, Any]], None]
