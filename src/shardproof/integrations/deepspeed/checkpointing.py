"""deepspeed.checkpointing: activations are recomputed in backward, by torch's own checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint as _checkpoint


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Run `function`, keep only its inputs, and run it again when backward needs its activations."""
    return _checkpoint(function, *args, use_reentrant=True)


def configure(*args: Any, **kwargs: Any) -> None:
    """Nothing to do: activations are neither partitioned nor moved."""


def is_configured() -> bool:
    """Always True: there is nothing to configure."""
    return True
