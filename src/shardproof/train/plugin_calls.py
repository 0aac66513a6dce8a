"""Calls of users' functions: how they failed, and where they are defined; losses and metrics are checked on each
call."""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from shardproof.errors import ConfigError, ShardproofError

_OURS = Path(__file__).parents[1]  # the package


def own_loss(name: str, function: Callable[..., Any] | None) -> Callable[..., torch.Tensor] | None:
    """A plugin's loss, checked whenever it is called; None stays None."""
    if function is None:
        return None
    subject = f"--loss {name}{place_of(function)}"

    def loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        found = _called(subject, function, args, kwargs)
        if not isinstance(found, torch.Tensor) or found.numel() != 1:
            raise ConfigError(f"{subject} returned {_in_words(found)}. It must return a tensor with one number.")
        if torch.is_grad_enabled() and not found.requires_grad and _has_graph(args):
            raise ConfigError(
                f"{subject} returned a number that has no gradient with respect to the model, so nothing can be"
                f" learned from it.\nCompute it from outputs.logits with torch operations only: without .item(),"
                f" .detach(),"
                " .numpy(), torch.no_grad(), argmax, or torch.tensor(...) of a result."
            )
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
                f"{subject} returned {_in_words(found)}. It must return two numbers, a sum and a count."
            ) from None

    return metric


def own_answer_metric(name: str, function: Callable[..., Any]) -> Callable[[str, str], float]:
    """A plugin's metric for answers, checked whenever it is called."""
    subject = f"--answer-metrics {name}{place_of(function)}"

    def metric(answer: str, right: str) -> float:
        found = _called(subject, function, (answer, right), {})
        try:
            value = float(found)
        except (TypeError, ValueError, RuntimeError):
            value = math.nan
        if not math.isfinite(value):
            raise ConfigError(f"{subject} returned {_in_words(found)}. It must return a number.")
        return value

    return metric


def _has_graph(args: Any) -> bool:
    """Whether the model's outputs have gradients; if they do not, the loss is not to blame."""
    logits = getattr(args[0], "logits", None) if args else None
    return isinstance(logits, torch.Tensor) and logits.requires_grad


def _called(subject: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except (ShardproofError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:  # the user's function may raise anything
        raise ConfigError(f"{subject} {failure(error, function)}") from error


def _in_words(found: Any) -> str:
    if isinstance(found, torch.Tensor):
        return f"a tensor of shape {tuple(found.shape)}"
    if isinstance(found, float) and not math.isfinite(found):
        return str(found)
    return f"a {type(found).__name__}" if found is not None else "None"


def failure(error: BaseException, function: Callable[..., Any]) -> str:
    """How a user's function failed, and in which line of its file."""
    frames, code = traceback.extract_tb(error.__traceback__), _code_of(function)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    at = (own or frames)[-1]  # a line in a library that it calls says little
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"failed with {what} ({Path(at.filename).name}, line {at.lineno})."


def _code_of(function: Callable[..., Any]) -> CodeType | None:
    """The code of a function, or of its __call__."""
    inner = inspect.unwrap(function)
    return getattr(inner if hasattr(inner, "__code__") else type(inner).__call__, "__code__", None)


def place_of(function: Callable[..., Any]) -> str:
    """` (my_rewards.py:5)` for a user's function, otherwise empty."""
    code = _code_of(function)
    if code is None or _OURS in Path(code.co_filename).parents:
        return ""
    return f" ({Path(code.co_filename).name}:{code.co_firstlineno})"
