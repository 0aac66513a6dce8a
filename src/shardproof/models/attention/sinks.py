"""Attention with sinks (gpt-oss): each head has a score that takes part in every softmax but belongs to no token.

[Note: a sink without a kernel that supports it] A sink only increases the sum that a softmax divides by. So the output
of a flash kernel without it, times `exp(lse - lse_with_sink)`, is the output with it. The kernel's backward computes
probabilities from scores and `lse`, and subtracts from each gradient the sum of `out * grad_out` over its row. Given
the output and the `lse` with the sink, it computes the gradient with the sink.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

Three = tuple[Tensor, Tensor, Tensor]


def has_sinks(model: Any) -> bool:
    return any("sinks" in module._parameters for module in model.modules())


class FlashWithSink(torch.autograd.Function):
    """Causal attention within concatenated documents.

    Args:
        query, key, value: (tokens, heads, width), as for the kernel.
        sinks: (heads,).
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, kernel: _Kernel) -> Tensor:
        out, lse = kernel.forward(query, key, value)
        with_sink = torch.logaddexp(lse, sinks.float()[:, None].expand_as(lse))
        out = (out * (lse - with_sink).exp().t()[..., None]).to(out.dtype)
        ctx.kernel = kernel
        ctx.save_for_backward(query, key, value, out, with_sink, sinks)
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        *given, out, with_sink, sinks = ctx.saved_tensors
        share = (sinks.float()[:, None] - with_sink).exp()  # of the softmax: (heads, tokens)
        of_sinks = -(share * (grad.float() * out.float()).sum(-1).t()).sum(1)
        grads = ctx.kernel.backward(grad.contiguous(), *given, out, with_sink)
        return *grads, of_sinks.to(sinks.dtype), None


class _Kernel:
    """A flash kernel. `forward` returns the result, (tokens, heads, width), and `lse`, (heads, tokens) in fp32;
    `backward` takes the gradient, and all inputs and outputs of `forward`."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def backward(self, grad: Tensor, *saved: Tensor) -> Three:
        raise NotImplementedError


class _OnCuda(_Kernel):
    """The kernel of `torch.nn.attention.varlen`; keys may have fewer heads."""

    def __init__(self, begins: Tensor, longest: int, scale: float, window: int | None) -> None:
        self.where = begins, begins, longest, longest, 0.0, window is None
        left = -1 if window is None else window - 1
        self.more = {"scale": scale, "window_size_left": left, "window_size_right": 0}

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        op: Any = torch.ops.aten._flash_attention_forward
        out, lse, *_ = op(query, key, value, *self.where, return_debug_mask=False, **self.more)
        return out, lse

    def backward(self, grad: Tensor, *saved: Tensor) -> Three:
        op: Any = torch.ops.aten._flash_attention_backward
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=grad.device), torch.empty(0, device=grad.device)
        found: Three = op(grad, *saved, *self.where, *no_dropout, **self.more)
        return found


class _OnCpu(_Kernel):
    """The kernel of torch's attention, document by document."""

    def __init__(self, begins: Sequence[int], scale: float, window: int | None) -> None:
        self.documents, self.scale, self.window = [slice(*ends) for ends in pairwise(begins)], scale, window

    def _told(self, document: slice, like: Tensor) -> dict[str, Any]:
        mask = near(document.stop - document.start, self.window, like)
        return {"dropout_p": 0.0, "is_causal": mask is None, "attn_mask": mask, "scale": self.scale}

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        op: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out = torch.empty_like(query)
        lse = torch.empty(query.shape[1], len(query), dtype=torch.float32)
        for at in self.documents:
            found = op(*(_alone(x[at]) for x in (query, key, value)), **self._told(at, query))
            out[at], lse[:, at] = found[0][0].transpose(0, 1), found[1][0]
        return out, lse

    def backward(self, grad: Tensor, *saved: Tensor) -> Three:
        op: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        *given, lse = saved
        query, key, value = given[:3]
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        for at in self.documents:
            found = op(*(_alone(x[at]) for x in (grad, *given)), lse[None, :, at], **self._told(at, grad))
            for whole, part in zip(grads, found, strict=True):
                whole[at] = part[0].transpose(0, 1)
        return grads


def _alone(document: Tensor) -> Tensor:
    """A batch of one: (tokens, heads, width) to (1, heads, tokens, width)."""
    return document.transpose(0, 1)[None]


def near(length: int, window: int | None, like: Tensor) -> Tensor | None:
    """The mask to add to the scores of a document whose tokens see a window; None if the window covers it."""
    if window is None or window >= length:
        return None
    seen = torch.ones(length, length, dtype=torch.bool, device=like.device).tril().triu(1 - window)
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, -torch.inf)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    begins: Tensor,
    longest: int,
    dropout: float,
    scale: float,
    window: int | None,
    kernel: bool,
) -> Tensor:
    """As `_attend` in varlen.py; the result has shape (tokens, heads, head dimension of `value`), like all three
    inputs.

    Args:
        kernel: whether torch has a kernel for documents here.
    """
    if kernel:
        return FlashWithSink.apply(query, key, value, sinks, _OnCuda(begins, longest, scale, window))  # type: ignore[no-any-return]
    ends = begins.tolist()
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    if query.device.type == "cpu" and not dropout and value.shape[-1] == query.shape[-1]:
        return FlashWithSink.apply(query, key, value, sinks, _OnCpu(ends, scale, window))  # type: ignore[no-any-return]
    outs = []
    for at in (slice(*pair) for pair in pairwise(ends)):
        q, k, v = (_alone(x[at]) for x in (query, key, value))
        outs.append(dense(q, k, v, sinks, near(q.shape[2], window, q), dropout, scale)[0].transpose(0, 1))
    return torch.cat(outs)


def dense(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, mask: Tensor | None, dropout: float, scale: float
) -> Tensor:
    """The same over all pairs of tokens.

    Args:
        query, key, value: (rows, heads, length, width); the last two may have fewer heads.
        mask: bool (True is visible), or a mask to add to scores. None: queries are the last tokens, and causal.

    Returns: (rows, heads, length, head dimension of `value`).
    """
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    scores = (query @ key.transpose(-1, -2)) * scale
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device)
        mask = mask.tril(key.shape[2] - query.shape[2])
    if mask.dtype is torch.bool:
        mask = torch.zeros(mask.shape, dtype=scores.dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
    scores = torch.cat([scores + mask, sinks.view(-1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1, torch.float32)[..., :-1].to(value.dtype)
    return F.dropout(weights, dropout) @ value
