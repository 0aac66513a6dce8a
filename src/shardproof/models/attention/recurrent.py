"""Packed rows for layers that carry a state from token to token (gated delta rule, Mamba, short convolutions).

Attention is told by a mask which tokens see each other. These layers go through a row from its first token to its last,
and transformers ends their state at a document's end by kernels of other packages only. So here they get the documents
of packed rows as rows of their own. A layer sees documents of similar length together, so that little of what it
computes is padding.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

# How transformers names such layers, of all families.
CARRIES = re.compile(r"(GatedDeltaNet|DeltaAttention|Mamba2?Mixer|MambaLayer|BambaMixer|FalconH1Mixer|ShortConv)$")
# Those that do the same, and whose documents are not told apart here.
OTHERS = re.compile(r"(LightningAttention|LinearAttention|ShortConvolution|RecurrentBlock|Rwkv\w+|(x|m|s)LSTM\w+)$")
DOCUMENTS = "packed_documents"
CHUNK = 64  # tokens: what these layers compute in one go is filled up to a multiple


def carries_state(model: nn.Module) -> bool:
    """Whether layers of a model carry a state from token to token, as far as their names tell."""
    return any(CARRIES.search(type(module).__name__) for module in model.modules())


def looks_back(model: nn.Module) -> bool:
    """Whether layers of a model pass something on from token to token beside attention, as far as their names tell."""
    return carries_state(model) or any(OTHERS.search(type(module).__name__) for module in model.modules())


def isolate_documents(model: nn.Module) -> None:
    """Have the layers of a model that carry a state see each document of packed rows by itself: where `position_ids`
    begin anew and there is no mask. Whether that were all layers the first step sees (train/losses/shortcuts.py)."""
    decoders = set()
    for name, module in list(model.named_modules()):
        if CARRIES.search(type(module).__name__):
            kind: Any = type(module)
            module.__class__ = _by_documents(kind)
            decoders.add(re.split(r"\.\w+\.\d+\.", f".{name}")[0].removeprefix("."))
    for name in decoders:
        model.get_submodule(name).register_forward_pre_hook(_tell_documents, with_kwargs=True)


def _tell_documents(decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """The layers get it with what else a decoder is given."""
    positions = kwargs.get("position_ids")
    if positions is None or kwargs.get("attention_mask") is not None or positions.is_meta:
        return None
    if positions.dim() == 3 and len(positions) == 4:  # before those in time and space
        positions = positions[0]
    found = Documents.of(positions) if positions.dim() == 2 else None
    return None if found is None else (args, {**kwargs, DOCUMENTS: found})


@functools.cache
def _by_documents(kind: Any) -> Any:
    """A class of the same name, whose forward computes the documents that it is told of."""

    def forward(self: Any, hidden_states: Tensor, *args: Any, packed_documents: Any = None, **kwargs: Any) -> Any:
        if packed_documents is None:
            return kind.forward(self, hidden_states, *args, **kwargs)
        return packed_documents.each(functools.partial(kind.forward, self), hidden_states)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


@dataclass(frozen=True)
class Documents:
    """Where documents lie in packed rows.

    Attributes:
        groups: for documents of similar length, int64 of shape (documents, tokens): the places of their tokens if rows
            are laid end to end; behind a document's end, that of its last token.
        back: int64, for each place, where it is in all groups one after another.
    """

    groups: list[Tensor]
    back: Tensor

    @classmethod
    def of(cls, positions: Tensor) -> Documents | None:
        """Of `position_ids` of shape (rows, length); None if each row is a document."""
        here = positions.cpu()
        begins = torch.ones(here.shape, dtype=torch.bool)
        begins[:, 1:] = here[:, 1:] != here[:, :-1] + 1
        starts = begins.view(-1).nonzero().view(-1).tolist()
        if len(starts) == len(here):
            return None
        alike: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for start, end in pairwise([*starts, here.numel()]):
            alike[((end - start - 1) // CHUNK).bit_length()].append((start, end - start))
        groups, back, before = [], torch.empty(here.numel(), dtype=torch.int64), 0
        for _, members in sorted(alike.items()):
            start, size = torch.tensor(members).unbind(1)
            offset = torch.arange(int(size.max()))
            places = start[:, None] + offset.minimum(size[:, None] - 1)
            real = offset < size[:, None]
            back[places[real]] = before + torch.arange(real.numel()).view(real.shape)[real]
            before += real.numel()
            groups.append(places.to(positions.device))
        return cls(groups, back.to(positions.device))

    def each(self, layer: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """What `layer` makes of each document, of shape (rows, length, width) as `hidden`. What stands behind a
        document's end is no part of it, and comes after all that is."""
        flat = hidden.flatten(0, 1)
        found = torch.cat([layer(flat[places]).flatten(0, 1) for places in self.groups])
        return found[self.back].view(*hidden.shape[:2], -1)
