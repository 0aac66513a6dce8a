"""An environment: the model guesses a number, and is told whether it is higher or lower.

Rows have the number: {"query": "Guess my number, from 1 to 100.", "number": 42}
"""

from __future__ import annotations

from typing import Any


class Guessing:
    """One game. Another row, or another answer to the same one, begins with `reset`."""

    def reset(self, number: int, **columns: Any) -> str | None:
        self.number = number
        self.guesses: list[int] = []
        return None  # a text would be put behind the question

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: the guess, from 1 to 100.

        Returns:
            "higher", "lower" or "right".
        """
        self.guesses.append(number)
        if number == self.number:
            return "right"
        return "higher" if self.number > number else "lower"

    def get_reward(self) -> float:
        """1 for a number that is found, less for each guess; 0 for one that is not."""
        return 1.0 / len(self.guesses) ** 0.5 if self.number in self.guesses else 0.0
