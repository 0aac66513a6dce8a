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


def divides_its_loss(model: Any, labels: Any = None) -> bool:
    """Whether the loss of a model's forward is a sum divided by `num_items_in_batch`. Trainer believes that of whatever
    takes **kwargs; some of these (Qwen2-Audio, T5, BERT, most classifiers) return the mean of the batch all the same:
    they make it themselves, do not hand on what they were given, or hand it to a loss that passes it over. Which loss
    that is may depend on the `labels` of the first batch."""
    inner = without_adapters(model)
    kind: Any = type(inner)
    return _divides(kind) and not _passes_over(inner, labels)


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
    if "CrossEntropyLoss(" in text and "reduction" not in text:
        return False  # a mean, whoever else is given the number (the decoder of an EncoderDecoderModel)
    calls = re.findall(r"(?:[lL]oss|cross_entropy)\w*\(((?:[^()]|\([^()]*\))*)\)", text)
    return any("kwargs" in call for call in calls) or not calls or "num_items_in_batch" in text


def _passes_over(model: Any, labels: Any) -> bool:
    """Whether transformers' loss function of a model makes a mean whatever number it is given: CTC, and squares or
    binary cross entropy where labels are no classes."""
    name = getattr(getattr(model, "loss_function", None), "__name__", "")
    config = getattr(model, "config", None)
    if name == "ForCTCLoss":
        return str(getattr(config, "ctc_loss_reduction", "mean")) == "mean"  # a sum grows with the ranks by itself
    if name != "ForSequenceClassificationLoss":
        return False
    problem = getattr(config, "problem_type", None)
    if problem is None:  # the loss is about to say it, in this way
        numbers = getattr(getattr(labels, "dtype", None), "is_floating_point", False)
        return numbers or getattr(config, "num_labels", 2) == 1
    return problem != "single_label_classification"


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
