"""Losses of answers, divided by the tokens that are learnt in a step on all ranks."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from shardproof.errors import ConfigError


def refuse_parts(model: Any) -> NoReturn:
    """Raise ConfigError for a model whose loss is a mean, where ranks hold parts of rows."""
    raise ConfigError(
        f"--sequence-parallel: {type(model).__name__} does not divide its loss by num_items_in_batch, so that it is one"
        " of whole rows. Leave --sequence-parallel out."
    )


def token_mean(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """The causal loss for models whose forward does not take the number of tokens."""
    return _by_token(outputs, labels).sum() / _learnt(labels, num_items_in_batch)


def weighed(found: Any, share: torch.Tensor) -> Any:
    """The loss of a batch, alone or with the model's outputs, times the share that the batch has in its step: so the
    means that a model makes of batches add up to the mean over the tokens of the step."""
    return (found[0] * share, found[1]) if isinstance(found, tuple) else found * share


def dft_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Dynamic fine-tuning: each token's cross entropy times its probability, a constant, so that tokens that the model
    finds unlikely pull less (https://huggingface.co/papers/2508.05629; TRL's `loss_type="dft"`)."""
    losses = _by_token(outputs, labels)
    return (losses * losses.detach().neg().exp()).sum() / _learnt(labels, num_items_in_batch)


def smoothed_loss(
    outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None, smoothing: float = 0.0
) -> torch.Tensor:
    """The causal loss, of which a share is the mean cross entropy over the vocabulary (transformers' LabelSmoother)."""
    return _by_token(outputs, labels, smoothing).sum() / _learnt(labels, num_items_in_batch)


def _by_token(outputs: Any, labels: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
    """The cross entropy of each token [rows * (length - 1)], 0 of those that are not learnt."""
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
    logits, targets = logits[..., :-1, :].float(), labels[..., 1:].to(logits.device)
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), reduction="none", label_smoothing=smoothing
    )


def _learnt(labels: torch.Tensor, num_items_in_batch: Any) -> Any:
    return labels[..., 1:].ne(-100).sum() if num_items_in_batch is None else num_items_in_batch
