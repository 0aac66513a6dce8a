"""Count once what transformers' Trainer counts in every micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object


class CountedOnce(Base):
    """The part of a trainer that knows the number of operations per token.

    Trainer iterates over all parameters for it in each micro-batch, which takes milliseconds on the host.
    """

    _operations: tuple[Any, int] | None = None  # the model, and its operations per input element

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Like Trainer's own. A trainer with its own count is asked each time."""
        count = super().floating_point_ops
        rows = inputs if isinstance(inputs, Mapping) else {}  # GRPO passes a list, which is not counted
        main = rows.get(getattr(self.model, "main_input_name", "input_ids"))
        elements = main.numel() if isinstance(main, torch.Tensor) else 0
        if count.__module__ != "transformers.trainer" or not elements:
            return int(count(inputs))
        if self._operations is None or self._operations[0] is not self.model:
            self._operations = self.model, count(inputs) // elements
        return self._operations[1] * elements
