"""Cross entropy from hidden states and a head, a chunk of tokens at a time: the logits of all tokens are never held at
once.

[Note: gradients in forward]
The logits of a chunk give its losses, the gradient of its hidden states and its part of the head's gradient, up to a
factor. So all of these are computed in the forward pass, and backward multiplies them by the incoming factor. No
product with the head is computed twice: there are three, as with full logits. Hidden states and head are not saved, so
at stage 3 backward does not gather the head again.

In fp16 such gradients would underflow: probabilities are too small before they are multiplied by the loss scale, which
arrives in backward. So in fp16 hidden states and head are saved, and backward recomputes the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from shardproof.errors import EngineError

LEAST = 256  # tokens in a chunk: products with fewer are slow
_NONE = (False, False, False)

# Computes the loss of a chunk of logits [tokens, vocabulary], which it may overwrite, against its targets: the sum over
# tokens and, given a factor, the gradient of the logits times this factor.
Judge = Callable[[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor | None], tuple[torch.Tensor, Any]]

Weights = Callable[[torch.Tensor], torch.Tensor]


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    divisor: Any,
    dft: bool = False,
    smoothing: float = 0.0,
    weigh: Weights | None = None,
    shares: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum of the cross entropies of `hidden @ weight.T + bias`, divided by `divisor`; see `chunked`.

    Args:
        targets: [tokens], int64, each in the vocabulary.
        dft: whether each cross entropy is multiplied by the probability of its target, as a constant (DFT).
        smoothing: the share of each cross entropy that is the mean over the vocabulary instead of the target's.
        weigh: from the log-probabilities of targets, a further factor for each cross entropy, as a constant.
        shares: [tokens], float32, a factor for each cross entropy.
    """
    judge = partial(_cross_entropy, weigh=torch.exp if dft else weigh, smoothing=smoothing)
    return chunked(hidden, weight, bias, (targets,) if shares is None else (targets, shares), divisor, judge)


def chunked(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: tuple[torch.Tensor, ...],
    divisor: Any,
    judge: Judge,
) -> torch.Tensor:
    """The loss that `judge` computes from the logits `hidden @ weight.T + bias`, divided by `divisor`.

    Args:
        hidden: [tokens, width], in the dtype of `weight`.
        weight: [vocabulary, width], and `bias` [vocabulary]; they may be sharded.
        targets: the tensors that the logits of each token are compared with, [tokens, ...] each.
        divisor: a number, or a zero-dimensional tensor.

    Returns: a scalar, in at least float32.

    Raises:
        EngineError: in a backward pass with `create_graph`, and in a second backward pass unless in fp16.
    """
    tensors = (hidden, weight, bias)
    if has_torch_function(tensors):  # something is sharded: the engine gathers it and calls this again
        called: torch.Tensor = handle_torch_function(chunked, tensors, *tensors, targets, divisor, judge)
        return called
    if not torch.is_grad_enabled():
        return _run(*tensors, targets, divisor, None, _NONE, judge)[0]
    loss: torch.Tensor = _Chunked.apply(*tensors, divisor, judge, *targets)
    return loss


class _Chunked(torch.autograd.Function):
    """See [Note: gradients in forward]."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Any, weight: Any, bias: Any, divisor: Any, judge: Judge, *targets: torch.Tensor
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.judge, ctx.divisor, wanted = judge, divisor, ctx.needs_input_grad[:3]
        ctx.others = (None,) * (2 + len(targets))
        ctx.later = hidden.dtype == torch.float16
        if ctx.later:
            ctx.save_for_backward(hidden, weight, bias, *targets)
            wanted = _NONE
        loss, ctx.gradients = _run(hidden, weight, bias, targets, divisor, None, wanted, judge)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if grad is None:
            return (None, None, None, *ctx.others)
        if torch.is_grad_enabled():
            raise EngineError(
                "The chunked loss has no second derivative (create_graph=True): leave --chunked-loss out."
            )
        if ctx.later:
            hidden, weight, bias, *targets = ctx.saved_tensors
            given = (hidden, weight, bias, tuple(targets), ctx.divisor, grad)
            return *_run(*given, ctx.needs_input_grad[:3], ctx.judge)[1], *ctx.others
        if ctx.gradients is None:
            raise EngineError(
                "Second backward pass through a chunked loss: the first one has used up its gradients.\nCompute "
                "the loss again, or leave --chunked-loss out."
            )
        gradients, ctx.gradients = ctx.gradients, None
        return *(None if part is None else part.mul_(grad) for part in gradients), *ctx.others


def chunk_of(weight: torch.Tensor) -> int:
    """The tokens in a chunk: its logits and log-probabilities together take as much memory as the head's gradient in
    float32."""
    return max(LEAST, weight.shape[1] // 2)


def _run(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: tuple[torch.Tensor, ...],
    divisor: Any,
    grad: torch.Tensor | None,
    wanted: tuple[bool, ...],
    judge: Judge,
) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
    """The loss, and the gradients of `grad` (None: 1) times the loss for hidden states, head and bias, as far as
    `wanted`."""
    size = chunk_of(weight)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    total = torch.zeros((), dtype=wide, device=hidden.device)
    scale = (torch.ones_like(total) if grad is None else grad) / divisor if any(wanted) else None
    of_hidden = torch.empty_like(hidden) if wanted[0] else None
    of_weight = of_bias = None
    for start in range(0, max(1, len(hidden)), size):  # at least one: gradients of an empty input are zeros
        h = hidden[start : start + size]
        logits = torch.nn.functional.linear(h, weight, bias).to(wide)
        found, of_odds = judge(logits, tuple(each[start : start + size] for each in targets), scale)
        del logits
        total += found
        if of_odds is None:
            continue
        of_logits = of_odds.to(hidden.dtype)
        del of_odds
        if of_hidden is not None:
            torch.mm(of_logits, weight, out=of_hidden[start : start + size])
        if wanted[1]:
            of_weight = _plus(of_weight, of_logits.T, h)
        if wanted[2]:
            part = of_logits.sum(0, dtype=wide)
            of_bias = part if of_bias is None else of_bias.add_(part)
    return total / divisor, (of_hidden, of_weight, of_bias)


def _cross_entropy(
    logits: torch.Tensor,
    targets: tuple[torch.Tensor, ...],
    scale: torch.Tensor | None,
    weigh: Weights | None,
    smoothing: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    t, *shares = (each[:, None] for each in targets)
    odds = torch.log_softmax(logits, -1)
    of_target = odds.gather(1, t)
    weights = None if weigh is None else weigh(of_target)
    for share in shares:
        weights = share.to(odds.dtype) if weights is None else weights * share
    total = -(of_target if weights is None else of_target * weights).sum() * (1.0 - smoothing)
    if smoothing:
        means = odds.mean(-1, keepdim=True)
        total -= (means if weights is None else means * weights).sum() * smoothing
    if scale is None:
        return total, None
    odds.exp_()
    odds.scatter_(1, t, odds.gather(1, t) - (1.0 - smoothing))
    if smoothing:
        odds.sub_(smoothing / odds.shape[1])
    return total, odds.mul_(scale if weights is None else scale * weights)


def _plus(total: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`total + a @ b`, accumulated in at least float32."""
    if total is None:
        return a @ b
    if a.dtype.itemsize >= 4:
        return total.addmm_(a, b)
    return total.float().add_(a @ b)
