"""What a model's forward does, as far as it can be known from outside."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def without_adapters(model: Any) -> Any:
    """The model inside a PEFT model, or the model itself."""
    # PEFT hangs a peft_config on the model inside, too.
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def divides_its_loss(model: Any) -> bool:
    """Whether the loss of a model's forward is a sum divided by `num_items_in_batch`. Trainer believes that of whatever
    takes **kwargs; some of these (Qwen2-Audio, T5, BERT, most classifiers) return the mean of the batch all the same:
    they make it themselves, or do not hand on what they were given."""
    kind: Any = type(without_adapters(model))
    return _divides(kind)


def makes_its_mean(model: Any) -> bool:
    """Whether a model's forward makes the mean cross entropy of its batch by torch's own class, as Qwen2-Audio's does:
    then it is computed of the logits, and divided by the tokens of all ranks. What else a forward makes of labels may
    have other terms, and stays the loss."""
    text = _forward_of(type(without_adapters(model)))
    return "CrossEntropyLoss(" in text and "num_items_in_batch" not in text


def _forward_of(kind: Any) -> str:
    """The code of a model's forward; nothing where there is none to read."""
    try:
        return inspect.getsource(kind.forward)
    except (OSError, TypeError):
        return ""


@functools.cache  # a trainer asks for each micro-batch
def _divides(kind: Any) -> bool:
    text = _forward_of(kind)
    calls = re.findall(r"(?:[lL]oss|cross_entropy)\w*\(((?:[^()]|\([^()]*\))*)\)", text)
    given = any("kwargs" in call for call in calls) and "CrossEntropyLoss(" not in text
    return given or not calls or "num_items_in_batch" in text


@contextmanager
def tried(model: Any) -> Iterator[None]:
    """Inside, a model may be asked what it makes of a few tokens: in eval mode, and with gradients on. Without, the
    engine would take it for the beginning of a generation."""
    import torch

    training = model.training
    try:
        model.eval()
        with torch.enable_grad():
            yield
    finally:
        model.train(training)
