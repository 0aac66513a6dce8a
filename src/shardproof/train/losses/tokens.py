"""Losses of answers, divided by the number of tokens learned in a step on all ranks."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from shardproof.data.encoding.encode import IGNORE
from shardproof.data.encoding.weights import WEIGHTS
from shardproof.errors import ConfigError


def refuse_parts(model: Any) -> NoReturn:
    """Raise ConfigError for a model whose loss is a mean, when ranks hold parts of rows."""
    raise ConfigError(
        f"--sequence-parallel: {type(model).__name__} does not divide its loss by num_items_in_batch, so it needs"
        f" full rows. Leave --sequence-parallel out."
    )


def token_mean(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """The causal loss for models whose forward does not accept the number of tokens."""
    return _by_token(outputs, labels).sum() / _learnt(labels, num_items_in_batch)


def with_share(found: Any, share: torch.Tensor) -> Any:
    """The loss of a batch, alone or with the model's outputs, times the share of the batch in its step, so that a
    model's means over batches add up to the mean over the tokens of the step."""
    return (found[0] * share, found[1]) if isinstance(found, tuple) else found * share


def dft_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Dynamic fine-tuning: each token's cross entropy times its probability, as a constant, so that tokens that the
    model finds unlikely have less influence (https://huggingface.co/papers/2508.05629; TRL's `loss_type="dft"`)."""
    losses = _by_token(outputs, labels)
    return (losses * losses.detach().neg().exp()).sum() / _learnt(labels, num_items_in_batch)


def smoothed_loss(
    outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None, smoothing: float = 0.0
) -> torch.Tensor:
    """The causal loss, a share of which is the mean cross entropy over the vocabulary (as in transformers'
    LabelSmoother)."""
    return _by_token(outputs, labels, smoothing).sum() / _learnt(labels, num_items_in_batch)


def weighed_loss(
    outputs: Any, inputs: dict[str, Any], num_items_in_batch: Any = None, dft: bool = False, smoothing: float = 0.0
) -> torch.Tensor:
    """The causal loss with each token's loss times its weight, divided by the number of tokens rather than the sum of
    weights, as in ms-swift. For parts of rows (`shift_labels`), labels and weights are those of the token to
    predict."""
    logits, weights = _logits(outputs), inputs[WEIGHTS]
    if "shift_labels" in inputs:
        targets = inputs["shift_labels"]
    else:
        logits, targets, weights = logits[..., :-1, :], inputs["labels"][..., 1:], weights[..., 1:]
    losses = _of_targets(logits, targets, smoothing)
    if dft:
        losses = losses * losses.detach().neg().exp()
    divisor = targets.ne(IGNORE).sum() if num_items_in_batch is None else num_items_in_batch
    return (losses * weights.flatten().to(losses)).sum() / divisor


def _by_token(outputs: Any, labels: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
    """The cross entropy of each token [rows * (length - 1)], 0 for those that are not learned."""
    return _of_targets(_logits(outputs)[..., :-1, :], labels[..., 1:], smoothing)


def _logits(outputs: Any) -> torch.Tensor:
    found: torch.Tensor = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
    return found


def _of_targets(logits: torch.Tensor, targets: torch.Tensor, smoothing: float) -> torch.Tensor:
    """The cross entropy of each target, flattened."""
    logits, targets = logits.float().flatten(0, -2), targets.to(logits.device).flatten()
    return torch.nn.functional.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)


def _learnt(labels: torch.Tensor, num_items_in_batch: Any) -> Any:
    return labels[..., 1:].ne(-100).sum() if num_items_in_batch is None else num_items_in_batch
