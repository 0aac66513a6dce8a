"""How far a model is from a teacher in the teacher's likeliest tokens, without the logits of either.

Both distributions are those of the K tokens alone: what the teacher gives all others is left out, and neither model is
compared there. With as many as the vocabulary has they are whole.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from shardproof.train.losses.chunked import chunk_of, chunked

ABSENT = -1e4  # what a teacher gives where it has fewer tokens than others: nothing, and so does the model

# Of logits of both [tokens, K], those of the model and those of the teacher: how far they are apart, a scalar.
Divergence = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@torch.no_grad()
def likeliest(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, k: int, among: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest tokens of each hidden state, a chunk of logits at a time.

    Args:
        hidden: [tokens, width], in the dtype of `weight`.
        weight: [vocabulary, width], and `bias` [vocabulary]; they may be sharded.
        k: how many tokens.
        among: how many of the vocabulary are looked at, from its beginning; the rest pads it.

    Returns: their logits [tokens, k], in float32 at least, and their numbers [tokens, k].
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
        taught: what the teacher gives its likeliest tokens, logits or log-probabilities [tokens, K], and their numbers,
            each once. Where a value is `ABSENT`, there is no token.
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
