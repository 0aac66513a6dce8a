"""Classes derived from transformers' classes, with the same names, so that saved files are what transformers saves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def derived(derive: Callable[[Any], Any], cls: Any, own: Mapping[str, Any]) -> Any:
    """A class derived from `cls`, with the same name and the attributes `own`.

    Args:
        derive: a cached module-level function that makes it from `cls`: processes that receive an object call it again.
    """

    def reduce(self: Any) -> Any:
        return _restored, (derive, cls, self.__dict__)

    return type(cls.__name__, (cls,), {**own, "__reduce__": reduce, "__module__": cls.__module__})


def _restored(derive: Callable[[Any], Any], cls: Any, state: dict[str, Any]) -> Any:
    """Restore an object that was sent to another process."""
    made = object.__new__(derive(cls))
    made.__dict__.update(state)
    return made
