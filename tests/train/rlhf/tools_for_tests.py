"""Functions that answers call, and rewards for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


def _near(a: int) -> list[int]:
    """Numbers beside another.

    Args:
        a: the other.
    """
    return [a - 1, a + 1]


async def _later(a: int) -> list[int]:
    """Numbers beside another.

    Args:
        a: the other.
    """
    return _near(a)


def _parts(a: int) -> list[dict[str, Any]]:
    """Parts of a turn.

    Args:
        a: a number.
    """
    return [{"type": "text", "text": str(a)}]


def _places(a: int) -> list[dict[str, Any]]:
    """Places that have a type.

    Args:
        a: a number.
    """
    return [{"type": "inn", "rooms": a}]


def _picture(a: int) -> list[dict[str, Any]]:
    """A picture.

    Args:
        a: a number.
    """
    return [{"type": "text", "text": "See"}, {"type": "image", "image": a}]


def _failing(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    raise OSError("no network")


_failing.__name__ = "add"  # which the model knows
failing = _failing
near, also_near, near_later, parts, places, picture = _near, _near, _later, _parts, _places, _picture


def leaves(a: int) -> int:
    """End the process.

    Args:
        a: the exit code.
    """
    raise SystemExit(a)


async def leaves_later(a: int) -> int:
    """End the process.

    Args:
        a: the exit code.
    """
    raise SystemExit(a)


def undescribed(a, b):
    return a


def untyped(a, b):
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


def by_place(completions: list[Any], **columns: Any) -> list[float]:
    """1 for every other answer, and 2 more where a function was called."""
    called = [any(turn["role"] == "tool" for turn in turns) for turns in completions]
    return [number % 2 + 2.0 * call for number, call in enumerate(called)]


class Adding:
    """Adds, and knows how often it did so for an answer."""

    def reset(self, **columns: Any) -> str | None:
        self.calls = 0
        self.told = columns.get("told")
        return self.told

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the first.
            b: the second.
        """
        self.calls += 1
        return a + b

    def get_reward(self) -> float:
        return 2.0 * self.calls


class Unjudged(Adding):
    get_reward = None


class Waiting(Adding):
    async def get_reward(self) -> float:
        return 2.0 * self.calls


class Failing(Adding):
    def reset(self, **columns: Any) -> None:
        raise OSError("no server")


class Listing(Adding):
    def reset(self, **columns: Any) -> list[str]:
        return ["a list"]


class Boundless(Adding):
    def get_reward(self) -> float:
        return float("inf")


class Wanting(Adding):
    def reset(self, level: int, **columns: Any) -> None:
        self.level = level


class Narrow(Adding):
    def reset(self, prompt: Any) -> None:
        self.prompt = prompt


class Later(Adding):
    async def reset(self, **columns: Any) -> None:
        pass


class Sized(Adding):
    def __init__(self, size: int, depth: int = 2) -> None:
        self.size = size


class Shown(Adding):
    def get_reward(self, completion: str) -> float:
        return float(len(completion))


class Static(Adding):
    @staticmethod
    def get_reward() -> float:
        return 1.0


class Selfless(Adding):
    def get_reward() -> float:
        return 1.0


class Made(Adding):
    def __new__(cls, size: int) -> Made:
        return super().__new__(cls)


instance = Adding()


class Silent(Adding):
    def get_reward(self) -> None:
        return None


class Verbose(Adding):
    def reset(self, **columns: Any) -> str:
        super().reset(**columns)
        return " Well?" * 500


class Unfinished(Adding, ABC):
    @abstractmethod
    def move(self) -> str:
        """Move."""


class Endless:
    def add(self, a: int) -> int:
        """Add one.

        Args:
            a: a number.
        """
        return a + 1


def panics(a: int) -> int:
    """Do what a library written in Rust does.

    Args:
        a: a number.
    """
    raise BaseException("index out of bounds")


def half(a: int) -> str:
    """Say what `os.listdir` says of a name that is no UTF-8.

    Args:
        a: a number.
    """
    return "caf\udce9"


def one_by_one(a: int) -> Any:
    """Numbers from another on.

    Args:
        a: the other.
    """
    yield a


class Halved(Adding):
    def reset(self, **columns: Any) -> str:
        super().reset(**columns)
        return " caf\udce9"


class OneByOne(Adding):
    async def numbers(self, a: int) -> Any:
        """Numbers from another on.

        Args:
            a: the other.
        """
        yield a
