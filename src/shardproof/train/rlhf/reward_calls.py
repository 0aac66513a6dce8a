"""Calls of reward functions in training: their errors are reported with the name and location of the function.

With a reward of NaN, training would silently continue with a loss of 0 or NaN, so results are checked at every call.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from shardproof.errors import ConfigError
from shardproof.train.plugin_calls import failure, place_of

log = logging.getLogger("shardproof")

LARGEST = 1e16  # rewards are kept in fp32, which must hold the sum of a million squares for their standard deviation

NOT_ITS_OWN = (KeyboardInterrupt, asyncio.CancelledError)  # not raised by the user's function

# Arguments that TRL passes to reward functions under its own names.
TAKEN = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}

# A hint for functions written for ms-swift, which passes texts.
ONE_TURN = "For conversations, each completion is a list of one turn, as in TRL: completion[0]['content'] is its text."


class Judges:
    """The reward functions of a run, checked at every call.

    Args:
        functions: the functions, with their names in --reward-funcs.
        alone: whether there is no reward model or environment.
    """

    def __init__(self, functions: Sequence[tuple[str, Callable[..., Any]]], alone: bool = True) -> None:
        self._alone, self._warned = alone, False
        self._said: dict[int, list[float | None]] = {}
        self._names = [name for name, _ in functions]
        self.functions = [self._checked(i, name, function) for i, (name, function) in enumerate(functions)]

    def _checked(self, number: int, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        subject = f"--reward-funcs {name}{place_of(function)}"

        def begin(given: Mapping[str, Any]) -> None:
            if problem := misfit(function, given):
                raise ConfigError(f"{subject} {problem}")

        def end(result: Any, given: Mapping[str, Any]) -> list[float | None]:
            self._said[number] = found = numbers(result, len(given["completions"]), subject)
            if len(self._said) == len(self._names):
                self._warn_of_unjudged()
            return found

        def failed(error: BaseException, given: Mapping[str, Any]) -> ConfigError:
            turns = isinstance(error, (TypeError, AttributeError)) and isinstance(given["completions"][0], list)
            hint = f"\n{ONE_TURN}" if turns else ""
            return ConfigError(f"{subject} {failure(error, function)}{hint}")

        chosen: Any = guarded(function, begin, end, failed)
        chosen.__name__ = getattr(function, "__name__", type(function).__name__)
        return chosen

    def _warn_of_unjudged(self) -> None:
        """Warn once if no function gave a reward to an answer: nothing is learned from it."""
        everyone, self._said = list(self._said.values()), {}
        silent = sum(all(value is None for value in values) for values in zip(*everyone, strict=True))
        if silent and self._alone and not self._warned:
            self._warned = True
            log.warning(
                "All --reward-funcs (%s) returned None for %d of %d answers, so nothing is learned from those."
                " 'accuracy' returns None for rows without a right answer.",
                " ".join(self._names),
                silent,
                len(everyone[0]),
            )


def guarded(
    function: Callable[..., Any],
    begin: Callable[[Mapping[str, Any]], None],
    end: Callable[[Any, Mapping[str, Any]], Any],
    failed: Callable[[BaseException, Mapping[str, Any]], ConfigError],
) -> Callable[..., Any]:
    """The user's function, which may be async, called between `begin` and `end`, which returns the final result. Both
    get the keyword arguments. `failed` makes the error to raise if the function fails."""

    def call(*args: Any, **given: Any) -> Any:
        begin(given)
        try:
            result = function(*args, **given)
        except NOT_ITS_OWN:
            raise
        except BaseException as error:  # anything the user's function raises; a panic in Rust is not an Exception
            raise failed(error, given) from error
        return end(result, given)

    async def call_async(*args: Any, **given: Any) -> Any:
        begin(given)
        try:
            result = await function(*args, **given)
        except NOT_ITS_OWN:
            raise
        except BaseException as error:
            raise failed(error, given) from error
        return end(result, given)

    return call_async if _is_async(function) else call


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def wants(function: Callable[..., Any], given: Collection[str]) -> list[str]:
    """The required named arguments of `function` that are not among these."""
    named = (p for p in _parameters(function) or () if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    return [p.name for p in named if p.default is p.empty and p.name not in given]


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """None for some functions written in C, and for methods without `self`."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def misfit(function: Callable[..., Any], given: Iterable[str], begin: str = "def name(completions, **columns):") -> str:
    """Why `function` cannot be called with these arguments, or an empty string. `begin`: a signature that would
    work."""
    parameters, names = _parameters(function), set(given)
    if parameters is None:
        return ""
    columns = ", ".join(sorted(names - TAKEN)) or "none"
    if wanted := wants(function, names):
        return f"needs {wanted[0]!r}, but the rows have no such column. They have: {columns}."
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    surplus = names - {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY}
    if surplus and not takes_all:
        return f"does not take {sorted(surplus)[0]!r}: define it as '{begin}'."
    return ""


def numbers(result: Any, count: int, subject: str) -> list[float | None]:
    """The result of a reward function, as a list of `count` numbers or None.

    Raises:
        ConfigError: it is something else, or contains a number that is not finite.
    """
    wanted = f"It must return a list with a number (or None) for each of the {count} answers."
    if isinstance(result, (str, bytes, Mapping)) or not hasattr(result, "__len__") or not hasattr(result, "__iter__"):
        came = "None" if result is None else f"{result!r:.60} ({type(result).__name__})"
        raise ConfigError(f"{subject} returned {came}. {wanted}")
    values = list(result)
    if len(values) != count:
        raise ConfigError(f"{subject} returned {len(values)} value(s) for {count} answers. {wanted}")
    return [number_from(value, subject, wanted, f" for answer {i + 1}") for i, value in enumerate(values)]


def number_from(value: Any, subject: str, wanted: str, of: str = "") -> float | None:
    """The number that was returned, or None. `wanted`: the hint in the error for anything else; `of`: what the number
    is for.

    Raises:
        ConfigError: it is not a number, not finite, or too large for the standard deviation of rewards.
    """
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError  # float would accept "1.0"
        number = None if value is None else float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{subject} returned {value!r:.60} ({type(value).__name__}){of}. {wanted}") from None
    except OverflowError:  # an int that is too large for a float
        number = math.inf
    if number is not None and not math.isfinite(number):
        raise ConfigError(
            f"{subject} returned {number}{of}, from which nothing can be learned. Return a finite number, or None for"
            f" no reward."
        )
    if number is not None and abs(number) > LARGEST:
        raise ConfigError(
            f"{subject} returned {number:g}{of}. Rewards are computed in fp32, where the standard deviation of such"
            f" numbers is infinite, so nothing would be learned. Return at most {LARGEST:g}."
        )
    return number
