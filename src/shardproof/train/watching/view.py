"""The interface to whatever shows a run, and to where its records go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class View(Protocol):
    """Something that shows a run: `record` is a line of metrics.jsonl or completions.jsonl."""

    def begin(self, steps: int, done: int = 0) -> None: ...
    def logged(self, record: dict[str, Any]) -> None: ...
    def generated(self, record: dict[str, Any]) -> None: ...
    def evaluated(self, done: int, total: int) -> None: ...
    def end(self) -> None: ...


Write = Callable[[dict[str, Any]], None]
