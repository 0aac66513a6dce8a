"""An environment: the model hands in its answer, and is told if it is wrong, so that it can try again.

It replaces a multi-turn scheduler of ms-swift. Rows also contain the answer:
{"query": "What is 12 * 12?", "solution": "144"}
"""

from __future__ import annotations

from typing import Any


class SecondTry:
    """One question. Another row, or another answer to the same one, begins with `reset`."""

    def reset(self, solution: str | int, **columns: Any) -> str:
        self.solution = str(solution).strip()
        self.tries: list[str] = []
        return "\nHand your answer in with submit; you have two tries."

    def submit(self, answer: str) -> str:
        """Hand in an answer.

        Args:
            answer: the number that you have found.

        Returns:
            Whether it is right.
        """
        self.tries.append(str(answer).strip())  # models also hand in numbers, whatever they are told
        if self.right:
            return "Right."
        return "That is wrong. Look for the mistake, and try again." if len(self.tries) < 2 else "That is wrong, too."

    @property
    def right(self) -> bool:
        return bool(self.tries) and self.tries[-1] == self.solution

    def get_reward(self) -> float:
        """1 for a right answer, a little less on the second try; 0 for none, or after too many tries."""
        return 1.0 - 0.2 * (len(self.tries) - 1) if self.right and len(self.tries) <= 2 else 0.0
