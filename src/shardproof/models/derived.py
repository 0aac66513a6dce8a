"""Classes derived from ones of transformers, of the same name: what is saved is what transformers would save itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def derived(derive: Callable[[Any], Any], cls: Any, own: Mapping[str, Any]) -> Any:
    """The class of the name of `cls`, derived from it, with these attributes of its own.

    Args:
        derive: a function of a module that makes it of `cls`, cached: other processes, to which objects are sent, make
            it again.
    """

    def reduce(self: Any) -> Any:
        return _restored, (derive, cls, self.__dict__)

    return type(cls.__name__, (cls,), {**own, "__reduce__": reduce, "__module__": cls.__module__})


def _restored(derive: Callable[[Any], Any], cls: Any, state: dict[str, Any]) -> Any:
    """An object that was sent to another process."""
    made = object.__new__(derive(cls))
    made.__dict__.update(state)
    return made
