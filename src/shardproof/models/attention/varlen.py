"""Attention whose cost is that of the documents, where several share a row or rows are padded: `--attn varlen`.

For such rows, transformers gives torch's attention (sdpa) a mask of all pairs of tokens, which no flash kernel takes.
Here the mask says where documents begin, for the flash attention that torch has for sequences of various lengths
(`torch.nn.attention.varlen`). No package has to be installed. Anything that documents cannot express is left to sdpa:
tokens that see later ones, gaps in a row, a cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

from shardproof.errors import ConfigError
from shardproof.models.attention.sinks import attend, dense, has_sinks

VARLEN = "varlen"
NOT_WITH = "softcap", "position_bias"  # additions to scores in some layers
HALF = torch.float16, torch.bfloat16
WIDEST = 256  # the largest head dimension torch has kernels for
# Keys may have fewer heads than queries; torch before 2.13 accepts that without this argument.
FEWER: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def attention_options(attn: str | None) -> dict[str, Any]:
    """The arguments for transformers to make a model with the attention `attn`. Registers ours."""
    if attn == VARLEN:
        from transformers import AttentionInterface, AttentionMaskInterface

        AttentionInterface.register(VARLEN, varlen_attention)
        AttentionMaskInterface.register(VARLEN, varlen_mask)
    return {"attn_implementation": attn} if attn else {}


def check_attention_of(model: Any, attn: str | None) -> None:
    """Raise ConfigError for a model whose layers do not pass on the arguments our attention needs, or change scores."""
    if attn != VARLEN:
        return
    if not getattr(model, "_supports_flash_attn", False):
        raise ConfigError(
            f"--attn {VARLEN}: {type(model).__name__} has no flash attention in transformers. Use sdpa or eager."
        )
    if not (getattr(model, "_supports_sdpa", False) or has_sinks(model)):
        raise ConfigError(
            f"--attn {VARLEN}: {type(model).__name__} changes scores in a way torch's attention does not: it has"
            " no sdpa in transformers. Use --attn eager, or flash_attention_2 where the model supports it."
        )


def knows_ours(model: Any) -> bool:
    """Whether a model with another attention supports ours."""
    plain = getattr(model, "_supports_sdpa", False) or has_sinks(model)
    return bool(plain and getattr(model, "_supports_flash_attn", False) and model._can_set_attn_implementation())


def take_for_packed(model: Any, half: bool) -> None:
    """Replace attention over all pairs of tokens with ours where packed rows are faster with it: on a CPU, and where
    torch has the kernel.

    Args:
        half: whether the model computes in half precision.
    """
    dense = "eager" if has_sinks(model) else "sdpa"
    ours = knows_ours(model) and model.config._attn_implementation == dense
    if ours and _is_faster(half):
        take(model)


def take(model: Any) -> None:
    """Switch a model to our attention."""
    attention_options(VARLEN)
    model.set_attn_implementation(VARLEN)


def _is_faster(half: bool) -> bool:
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or device.type != "cuda" or not half:  # otherwise documents are computed one by one
        return device is None
    query = torch.empty(1, 1, 8, 64, dtype=torch.bfloat16, device=device)
    asked = torch.backends.cuda.SDPAParams(query, query, query, None, 0.0, True, False)
    return torch.backends.cuda.can_use_flash_attention(asked)


def unknown_attention(error: Exception) -> str:
    """Advice if a model could not be made because its own list of attentions lacks ours; otherwise empty."""
    lacks = isinstance(error, KeyError) and error.args == (VARLEN,)
    return f"its code has a list of attentions that lacks --attn {VARLEN}. Use sdpa or eager" if lacks else ""


def varlen_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    device: Any = "cpu",
    **more: Any,
) -> Tensor | None:
    """Where documents begin, for `varlen_attention`; or sdpa's mask, if documents cannot express it.

    A document begins at a token that does not see the one before it. Padding is a separate document.

    Args:
        mask_function: of transformers: whether in row b the query at q sees the key at k, for tensors of such indices.
        attention_mask: bool, of shape (rows, keys): False is padding.

    Returns:
        int32, of shape (documents + 1,): where each begins in the concatenated rows, and the end. If tokens see only a
        window, (window, documents + 1) with equal rows in the same memory.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    sees = mask_function or causal_mask_function
    fits = q_length == kv_length and all(type(at) is int and at == 0 for at in (q_offset, kv_offset))
    special = more.get("use_vmap") or more.get("allow_is_bidirectional_skip") or torch.compiler.is_compiling()
    if fits and not special and (attention_mask is None or attention_mask.shape == (batch_size, kv_length)):
        found = _documents(batch_size, q_length, sees, attention_mask, torch.device(device), more.get("local_size"))
        if found is not None:
            return found
    more |= {"mask_function": sees, "attention_mask": attention_mask, "device": device}
    return sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, **more)


def _documents(
    rows: int, length: int, sees: Callable[..., Any], real: Tensor | None, device: torch.device, window: int | None
) -> Tensor | None:
    """The result of `varlen_mask`; None if a token sees a later one, or a row has a gap."""
    if device.type == "meta":  # for a plan: there are no values, and rows are counted
        return torch.empty(rows + 1, dtype=torch.int32, device=device)
    row = torch.arange(rows, device=device)[:, None]
    place, first = torch.arange(length, device=device), torch.zeros((), dtype=torch.int64, device=device)
    begins = torch.ones(rows, length, dtype=torch.bool, device=device)
    before, after = place[None, :-1], place[None, 1:]
    begins[:, 1:] = ~sees(row, first, after, before)
    wrong = sees(row, first, before, after).any()
    if real is not None:
        begins[:, 1:] |= real[:, 1:] != real[:, :-1]
        runs = real[:, 0].long() + (real[:, 1:] & ~real[:, :-1]).sum(1)
        wrong = wrong | runs.gt(1).any()
    first_seen = torch.where(begins, place, 0).cummax(1).values
    short_sighted = ~sees(row, first, place[None], first_seen).all()
    is_wrong, has_window = torch.stack([wrong, short_sighted]).tolist()
    if is_wrong or (has_window and window is None):
        return None
    end = torch.tensor([rows * length], dtype=torch.int32, device=device)
    found = torch.cat([begins.view(-1).nonzero().view(-1).int(), end])
    return found.expand(window, -1) if has_window and window is not None else found


def varlen_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Causal attention within the documents of `varlen_mask`; sdpa with any other mask, or none.

    Args:
        query, key, value: of shape (rows, heads, length, head dimension); the last two may have fewer heads.

    Returns:
        The result, (rows, length, heads, head dimension of `value`), and None for the weights.

    Raises:
        ConfigError: the layer changes scores in a way that torch's kernel does not support.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    for name in NOT_WITH:
        if more.get(name) is not None:
            raise ConfigError(
                f"--attn {VARLEN}: {type(module).__name__} changes scores ({name}), which torch's kernel does not"
                " support. Use --attn eager, or flash_attention_2 where the model supports it."
            )
    sinks = more.pop("s_aux", None)
    if attention_mask is None or attention_mask.dim() > 2 or query.is_meta:
        if sinks is not None and not query.is_meta:
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            return dense(query, key, value, sinks, attention_mask, dropout, scale).transpose(1, 2), None
        mask, causal = (None, True) if attention_mask is not None and query.is_meta else (attention_mask, None)
        more.setdefault("is_causal", causal)
        return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, **more)
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    rows, heads, length, _ = query.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    window = len(attention_mask) if attention_mask.dim() == 2 else None
    begins = attention_mask if window is None else attention_mask[0]
    out = _attend(q, k, v, begins, length, dropout, scaling, window, sinks)
    return out.view(rows, length, heads, value.shape[-1]), None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    begins: Tensor,
    longest: int,
    dropout: float,
    scaling: float | None,
    window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The result has shape (tokens, heads, head dimension of `value`), like all three inputs."""
    width, given = query.shape[-1], value.shape[-1]
    kernel = query.is_cuda and query.dtype in HALF and not dropout and max(width, given) <= WIDEST and width % 8 == 0
    scale = width**-0.5 if scaling is None else scaling
    if sinks is not None:
        alike = kernel and given == width
        return attend(query, key, value, sinks, begins, longest, dropout, scale, window, alike)
    if not kernel:
        return _one_by_one(query, key, value, begins.tolist(), dropout, scaling, window)
    if given < width:
        value = F.pad(value, (0, width - given))
    sides = (-1 if window is None else window - 1, 0)
    # The length of a row bounds that of its longest document, and is known without waiting for the device.
    known = query, key, value, begins, begins, longest, longest
    out: Any = varlen_attn(*known, scale=scale, window_size=sides, **FEWER)
    return out[..., :given]


def _one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    begins: list[int],
    dropout: float,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """The same without a kernel for documents: on a CPU, in fp32, with dropout."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    outs = []
    for begin, end in pairwise(begins):
        q, k, v = (x[begin:end].transpose(0, 1)[None] for x in (query, key, value))
        near = None
        if window is not None and window < end - begin:
            near = torch.ones(end - begin, end - begin, dtype=torch.bool, device=query.device).tril().triu(1 - window)
        out = F.scaled_dot_product_attention(q, k, v, near, dropout, near is None, scale=scaling)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)
