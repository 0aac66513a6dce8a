"""What a model's forward does, as far as that can be determined from outside."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def without_adapters(model: Any) -> Any:
    """The model inside a PEFT model, or the model itself."""
    # PEFT also sets a peft_config on the model inside.
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def divides_its_loss(model: Any, labels: Any = None) -> bool:
    """Whether the loss of a model's forward is a sum divided by `num_items_in_batch`. Trainer assumes so for any
    forward that takes **kwargs, but some of these (Qwen2-Audio, T5, BERT, most classifiers) still return the mean of
    the batch: they compute it themselves, do not pass the number on, or pass it to a loss that ignores it. Which loss
    is used may depend on the `labels` of the first batch."""
    inner = without_adapters(model)
    kind: Any = type(inner)
    return _divides(kind) and not _passes_over(inner, labels)


def makes_its_mean(model: Any) -> bool:
    """Whether a model's forward computes the mean cross entropy of its batch with torch's own class, as Qwen2-Audio
    does: then we compute it from the logits, and divide by the tokens of all ranks. Any other loss of a forward may
    have more terms, and is used as it is."""
    text = _forward_of(type(without_adapters(model)))
    return "CrossEntropyLoss(" in text and "num_items_in_batch" not in text


def _forward_of(kind: Any) -> str:
    """The source of a model's forward; empty if there is none to read."""
    try:
        return inspect.getsource(kind.forward)
    except (OSError, TypeError):
        return ""


@functools.cache  # a trainer asks for every micro-batch
def _divides(kind: Any) -> bool:
    text = _forward_of(kind)
    if "CrossEntropyLoss(" in text and "reduction" not in text:
        return False  # a mean, even if the number is passed to another (the decoder of an EncoderDecoderModel)
    calls = re.findall(r"(?:[lL]oss|cross_entropy)\w*\(((?:[^()]|\([^()]*\))*)\)", text)
    return any("kwargs" in call for call in calls) or not calls or "num_items_in_batch" in text


def _passes_over(model: Any, labels: Any) -> bool:
    """Whether transformers' loss function for a model computes a mean whatever number it is given: CTC, and squared
    error or binary cross entropy where labels are not classes."""
    name = getattr(getattr(model, "loss_function", None), "__name__", "")
    config = getattr(model, "config", None)
    if name == "ForCTCLoss":
        return str(getattr(config, "ctc_loss_reduction", "mean")) == "mean"  # a sum already grows with the ranks
    if name != "ForSequenceClassificationLoss":
        return False
    problem = getattr(config, "problem_type", None)
    if problem is None:  # the loss is about to set it, in the same way
        numbers = getattr(getattr(labels, "dtype", None), "is_floating_point", False)
        return numbers or getattr(config, "num_labels", 2) == 1
    return problem != "single_label_classification"


@contextmanager
def tried(model: Any) -> Iterator[None]:
    """A context for trying a model on a few tokens: in eval mode, and with gradients enabled. Without gradients, the
    engine would take it for the start of a generation."""
    import torch

    training = model.training
    try:
        model.eval()
        with torch.enable_grad():
            yield
    finally:
        model.train(training)
