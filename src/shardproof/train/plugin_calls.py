"""Losses and metrics of the user's: what they raise or return that cannot be used is told with their name and line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardproof.errors import ConfigError, ShardproofError
from shardproof.train.reward_calls import failure, place_of


def own_loss(name: str, function: Callable[..., Any] | None) -> Callable[..., torch.Tensor] | None:
    """A plugin's loss, checked whenever it is called; None stays None."""
    if function is None:
        return None
    subject = f"--loss {name}{place_of(function)}"

    def loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        found = _called(subject, function, args, kwargs)
        if not isinstance(found, torch.Tensor) or found.numel() != 1:
            raise ConfigError(f"{subject} returned {_in_words(found)}. A tensor with one number is expected.")
        return found

    return loss


def own_metric(name: str, function: Callable[..., Any]) -> Callable[..., tuple[float, float]]:
    """A plugin's metric, checked whenever it is called."""
    subject = f"--metrics {name}{place_of(function)}"

    def metric(*args: Any, **kwargs: Any) -> tuple[float, float]:
        found = _called(subject, function, args, kwargs)
        try:
            whole, count = found
            return float(whole), float(count)
        except (TypeError, ValueError, RuntimeError):
            raise ConfigError(
                f"{subject} returned {_in_words(found)}. A sum and a count, two numbers, are expected."
            ) from None

    return metric


def _called(subject: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except (ShardproofError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever the user's function raises
        raise ConfigError(f"{subject} {failure(error, function)}") from error


def _in_words(found: Any) -> str:
    if isinstance(found, torch.Tensor):
        return f"a tensor of shape {tuple(found.shape)}"
    return f"a {type(found).__name__}" if found is not None else "None"
