"""The divergence of a model from a teacher on the teacher's likeliest tokens, without holding the logits of either.

Both distributions are over these K tokens alone: the teacher's probabilities of all others are ignored, and the models
are not compared there. With K equal to the vocabulary size, the distributions are complete.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from shardproof.train.losses.chunked import chunk_of, chunked

ABSENT = -1e4  # the value of missing tokens, where the teacher has fewer: no probability, also in the model

# From the logits of the model and those of the teacher, [tokens, K] each: their divergence, a scalar.
Divergence = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@torch.no_grad()
def likeliest(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, k: int, among: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest tokens of each hidden state, a chunk of logits at a time.

    Args:
        hidden: [tokens, width], in the dtype of `weight`.
        weight: [vocabulary, width], and `bias` [vocabulary]; they may be sharded.
        k: number of tokens.
        among: number of tokens considered, from the beginning of the vocabulary; the rest is padding.

    Returns: their logits [tokens, k], in at least float32, and their ids [tokens, k].
    """
    tensors = (hidden, weight, bias)
    if has_torch_function(tensors):  # something is sharded: the engine gathers it, and calls this again
        called: tuple[torch.Tensor, torch.Tensor] = handle_torch_function(likeliest, tensors, *tensors, k, among)
        return called
    size = chunk_of(weight)
    found = [
        torch.nn.functional.linear(hidden[start : start + size], weight, bias)[:, :among].topk(k)
        for start in range(0, max(1, len(hidden)), size)
    ]
    values = torch.cat([chunk.values for chunk in found])
    return values.to(torch.promote_types(values.dtype, torch.float32)), torch.cat([chunk.indices for chunk in found])


def distance(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    taught: tuple[torch.Tensor, torch.Tensor],
    divisor: Any,
    divergence: Divergence,
) -> torch.Tensor:
    """The sum of the divergences from a teacher, divided by `divisor`; see `chunked`.

    Args:
        taught: the teacher's logits or log-probabilities of its likeliest tokens [tokens, K], and their ids, each once.
            A value of `ABSENT` stands for a missing token.
    """
    return chunked(hidden, weight, bias, taught, divisor, partial(_apart, divergence=divergence))


def _apart(
    logits: torch.Tensor, targets: tuple[torch.Tensor, ...], scale: torch.Tensor | None, divergence: Divergence
) -> tuple[torch.Tensor, torch.Tensor | None]:
    theirs, tokens = targets
    ours = logits.gather(1, tokens).masked_fill_(theirs <= ABSENT, ABSENT)
    if scale is None:
        return divergence(ours, theirs), None
    with torch.enable_grad():
        apart = divergence(ours.requires_grad_(), theirs)
        (gradient,) = torch.autograd.grad(apart, ours)
    return apart.detach(), logits.zero_().scatter_(1, tokens, gradient.mul_(scale))
