"""Environments that answers act in (--environments in grpo): a game, a shell, a shop.

An environment is a class written by the user. `reset(**columns)` starts a new episode for a row and may return text
that is added to the row's prompt. Its other public methods are functions that the model can call while it generates an
answer, like those of --tools. `get_reward()`, if there is one, returns the reward of the answer. TRL keeps an instance
for each answer that is generated at the same time.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Collection, Sequence
from typing import Any

from shardproof.data.forms.parts import Problem
from shardproof.errors import ConfigError
from shardproof.train.options.rlhf_config import RlhfConfig
from shardproof.train.plugin_calls import failure, place_of
from shardproof.train.rlhf.functions import function_of
from shardproof.train.rlhf.reward_calls import guarded, misfit, number_from, wants
from shardproof.train.rlhf.tools import OPTION as TOOLS
from shardproof.train.rlhf.tools import check_named, description_of, descriptions, own_name, telling, whole_text

OPTION = "--environments"
COLUMN = "environment"  # of rows: which of several environments
_NOT_CALLED = ("reset", "get_reward")


def check_environments(config: RlhfConfig) -> None:
    """Raise ConfigError for a class that does not exist, without running any code."""
    check_named(config, OPTION, "class", "two classes are called {}, and rows could not tell them apart")


def load_environments(names: Sequence[str]) -> dict[str, type]:
    """The classes by name, with methods that return texts and whose errors say where they are defined.

    Raises:
        ConfigError: a file fails when it is run or has no class of this name, or the class has no `reset`.
    """
    return {name.rpartition(":")[2]: _telling(name, _class_of(name)) for name in names}


def factory_of(names: Sequence[str]) -> Any:
    """What TRL creates environments with: the class, or a dict of classes by the names used in rows."""
    found = load_environments(names)
    return found if len(found) > 1 else next(iter(found.values()))


def _class_of(name: str) -> type:
    found: Any = function_of(OPTION, name, "class")
    if not inspect.isclass(found):
        raise ConfigError(f"{OPTION} {name}: {name.rpartition(':')[2]!r} is not a class.")
    reset = getattr(found, "reset", None)
    if not inspect.isfunction(reset):
        raise ConfigError(
            f"{OPTION} {name}: the class has no method 'reset(self, **columns)', which starts a new episode."
        )
    if inspect.iscoroutinefunction(reset):
        raise ConfigError(f"{OPTION} {name}: 'reset' is async, and TRL does not await it. Write it without 'async'.")
    _check_called_alone(name, found)
    return found


def _check_called_alone(name: str, found: type) -> None:
    """Raise ConfigError if TRL could not create an instance or call `get_reward`: it passes no arguments to either."""
    if lacking := sorted(getattr(found, "__abstractmethods__", ())):
        raise ConfigError(f"{OPTION} {name}: the class is abstract. It lacks {', '.join(lacking)}.")
    for method in ("__new__", "__init__", "get_reward"):
        function: Any = inspect.getattr_static(found, method, None)
        if method == "__new__":
            function = getattr(function, "__func__", None)
        bindable = inspect.isfunction(function) and bool(inspect.signature(function).parameters)
        if method == "get_reward" and function is not None and not bindable:
            raise ConfigError(f"{OPTION} {name}: 'get_reward' is not an instance method: 'def get_reward(self)'.")
        if bindable and (wanted := wants(_bound(function), ())):
            raise ConfigError(
                f"{OPTION} {name}, {method}{place_of(function)} needs {', '.join(map(repr, wanted))}, but it is"
                f" called without arguments: add defaults. The columns of the rows are passed to 'reset'."
            )


def _methods(found: type) -> dict[str, Callable[..., Any]]:
    """The methods of a class that TRL lets the model call."""
    functions = inspect.getmembers(found, predicate=inspect.isfunction)
    return {name: f for name, f in functions if not name.startswith("_") and name not in _NOT_CALLED}


def _telling(name: str, found: type) -> type:
    """A subclass of the same name that only returns values that TRL can use."""
    own: dict[str, Any] = {
        method: staticmethod(telling(function)) if _is_static(found, method) else telling(function)
        for method, function in _methods(found).items()
    }
    own["reset"] = _checked(name, found.reset, _observed)  # type: ignore[attr-defined]
    if _judges(found):
        own["get_reward"] = _checked(name, found.get_reward, _reward)  # type: ignore[attr-defined]
    own["__init__"] = _checked(name, found.__init__, lambda value, subject: value)  # type: ignore[misc]
    return type(found.__name__, (found,), {"__doc__": found.__doc__, "__module__": found.__module__, **own})


def _is_static(found: type, method: str) -> bool:
    return isinstance(inspect.getattr_static(found, method), staticmethod)


def _judges(found: type) -> bool:
    return inspect.isfunction(getattr(found, "get_reward", None))


def _checked(name: str, function: Callable[..., Any], read: Callable[[Any, str], Any]) -> Callable[..., Any]:
    """The method, with its return value checked and its errors reported as errors of this option."""
    subject = f"{OPTION} {name}, {function.__name__}{place_of(function)}"
    checked = guarded(
        function,
        begin=lambda given: None,
        end=lambda value, given: read(value, subject),
        failed=lambda error, given: ConfigError(f"{subject} {failure(error, function)}"),
    )
    return functools.update_wrapper(checked, function)


def check_room(
    named: Sequence[str], longest: int, prompts: Sequence[Sequence[int]], which: Sequence[str | None]
) -> None:
    """Raise ConfigError if the text from `reset` makes a prompt longer than rows may be. Rows that are too long were
    dropped before, and the memory estimate of the run assumes that none are left.

    Args:
        named: all of --environments.
        prompts: their tokens, including the text from `reset`.
        which: the class of each, or None if there is only one.
    """
    for prompt, name in zip(prompts, which, strict=True):
        if len(prompt) > longest:
            said = next(one for one in named if name in (None, one.rpartition(":")[2]))
            raise ConfigError(
                f"{OPTION} {said}: with the text that 'reset' returned, a prompt has {len(prompt)} tokens, and"
                f" --max-length is {longest}. Return less, or raise --max-length."
            )


def _observed(value: Any, subject: str) -> str | None:
    """The text from `reset`, which is added to the last turn of the prompt."""
    if value is not None and not isinstance(value, str):
        raise ConfigError(
            f"{subject} returned {value!r:.60} ({type(value).__name__}). It must return a string or None."
        )
    return value and whole_text(value)


def _reward(value: Any, subject: str) -> float | None:
    return number_from(value, subject, "It must return a number, or None for no reward.")


def check_environments_for(config: RlhfConfig, columns: Collection[str]) -> None:
    """Raise ConfigError for an environment that needs a column that the rows do not have, or that leaves answers
    without a reward."""
    columns = {*columns, "prompt"} - ({COLUMN} if len(config.environments) > 1 else set())
    judging = bool(config.reward_funcs or config.reward_model)
    for name in config.environments:
        found = _class_of(name)
        if problem := misfit(_bound(found.reset), columns, "def reset(self, **columns):"):  # type: ignore[attr-defined]
            raise ConfigError(f"{OPTION} {name}, reset{place_of(found.reset)} {problem}")  # type: ignore[attr-defined]
        if not (judging or _judges(found)):
            raise ConfigError(
                f"{OPTION} {name}: there is no reward: write a method 'get_reward(self)' that returns"
                " a number, or name --reward-funcs."
            )


def _bound(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method as if bound, without an instance."""
    return types.MethodType(method, object())


class Shown:
    """The functions that are shown in prompts.

    Raises:
        ConfigError: a function has no description, or two have the same name, by which the model calls them.
    """

    def __init__(self, config: RlhfConfig) -> None:
        everywhere = descriptions(config.tools) or []
        taken = {own_name(shown) for shown in everywhere}
        self._of = {name.rpartition(":")[2]: [*everywhere, *_described(name, taken)] for name in config.environments}
        self._everywhere = everywhere
        self._options = " and ".join(
            option for option, named in ((TOOLS, config.tools), (OPTION, config.environments)) if named
        )

    def of(self, row: Any) -> list[Any] | None:
        """The functions of the row, or those of --tools and its environment; raises Problem if there are both."""
        own: list[Any] | None = row.extra.get("tools")
        if not self._options:
            return own
        if own:
            raise Problem(f"it has its own tools, which cannot be run, and {self._options} names others")
        if row.kind != "chat":
            raise Problem(f"it is plain text, and functions are only called in conversations ({self._options})")
        return self._of_environment(row) or None

    def _of_environment(self, row: Any) -> list[Any]:
        if len(self._of) < 2:
            return next(iter(self._of.values()), self._everywhere)
        name = row.extra["columns"].get(COLUMN)
        if not isinstance(name, str) or name not in self._of:
            said = f"its {COLUMN!r} is {name!r}" if name is not None else f"it has no {COLUMN!r}"
            raise Problem(f"{said}, and {OPTION} has {', '.join(self._of)}")
        return self._of[name]


def _described(name: str, taken: Collection[str]) -> list[Any]:
    """The descriptions of the methods of this class, as chat templates show them to the model."""
    cls, found = _class_of(name), []
    for method, function in _methods(cls).items():
        called = function if _is_static(cls, method) else _bound(function)
        found.append(description_of(OPTION, f"{name}, {method}", called))
        if own_name(found[-1]) in taken:
            raise ConfigError(f"{OPTION} {name}: {TOOLS} also has a function {method}. Rename one of them.")
    return found
