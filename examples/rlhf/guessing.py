"""An environment: the model guesses a number, and is told whether the right one is higher or lower.

Rows have the number: {"query": "Guess my number, from 1 to 100.", "number": 42}
"""

from __future__ import annotations

from typing import Any


class Guessing:
    """One game. Another row, or another answer to the same one, begins with `reset`."""

    def reset(self, number: int, **columns: Any) -> str | None:
        self.number = number
        self.guesses: list[int] = []
        return None  # returned text would be appended to the question

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
        """1 if the number is found, less for each guess; 0 if it is not."""
        return 1.0 / len(self.guesses) ** 0.5 if self.number in self.guesses else 0.0
