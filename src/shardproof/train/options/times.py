"""When a run evaluates and writes checkpoints, according to its options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardproof.train.options.option import SAVE_STEPS, Strategy


class Times:
    """The options that set these times."""

    if TYPE_CHECKING:  # otherwise pydantic would treat them as separate options
        save_steps: int | None
        save_strategy: Strategy | None
        save_total_limit: int | None
        keep_best: bool
        eval_steps: int | None
        eval_strategy: Strategy | None

    @property
    def checkpoint_steps(self) -> int | None:
        """The number of steps between checkpoints, if they are written every N steps."""
        return self.save_steps or (SAVE_STEPS if self.save_strategy == "steps" else None)

    @property
    def evaluation_steps(self) -> int | None:
        """The same for evaluations during training."""
        often = self.checkpoint_steps or SAVE_STEPS
        return self.eval_steps or (often if self.eval_strategy == "steps" else None)

    @property
    def evaluates(self) -> bool:
        """Whether there are evaluations during training; otherwise there is one at its end."""
        return self.eval_strategy == "epoch" or self.evaluation_steps is not None

    @property
    def writes_checkpoints(self) -> bool:
        """Whether there are checkpoints."""
        return self.save_strategy == "epoch" or self.checkpoint_steps is not None

    @property
    def kept_checkpoints(self) -> int | None:
        """How many checkpoints are kept, including that of the best evaluation; None for all."""
        return self.save_total_limit and max(self.save_total_limit, 1 + self.keep_best)
