"""Packed rows for layers that carry a state from token to token (gated delta rule, Mamba, short convolutions).

A mask tells attention which tokens see each other. These layers go through a row from its first token to its last, and
transformers resets their state at the end of a document only with the kernels of other packages. So here they get the
documents of packed rows as separate rows. A layer gets documents of similar length together, so that little of the
computation is padding.
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

# The names of such layers in all families of transformers.
CARRIES = re.compile(r"(GatedDeltaNet|DeltaAttention|Mamba2?Mixer|MambaLayer|BambaMixer|FalconH1Mixer|ShortConv)$")
# Layers that do the same, but whose documents are not separated here.
OTHERS = re.compile(r"(LightningAttention|LinearAttention|ShortConvolution|RecurrentBlock|Rwkv\w+|(x|m|s)LSTM\w+)$")
DOCUMENTS = "packed_documents"
CHUNK = 64  # tokens: these layers pad their input to a multiple of this


def carries_state(model: nn.Module) -> bool:
    """Whether layers of a model carry a state from token to token, judging by their names."""
    return any(CARRIES.search(type(module).__name__) for module in model.modules())


def looks_back(model: nn.Module) -> bool:
    """Whether layers other than attention pass something from token to token, judging by their names."""
    return carries_state(model) or any(OTHERS.search(type(module).__name__) for module in model.modules())


def isolate_documents(model: nn.Module) -> None:
    """Make the layers that carry a state see each document of packed rows separately: where `position_ids` restart and
    there is no mask. The first step checks whether that covered all layers (train/losses/shortcuts.py)."""
    decoders = set()
    for name, module in list(model.named_modules()):
        if CARRIES.search(type(module).__name__):
            kind: Any = type(module)
            module.__class__ = _by_documents(kind)
            decoders.add(re.split(r"\.\w+\.\d+\.", f".{name}")[0].removeprefix("."))
    for name in decoders:
        model.get_submodule(name).register_forward_pre_hook(_tell_documents, with_kwargs=True)


def _tell_documents(decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """A pre-hook: layers get the documents along with the decoder's other arguments."""
    positions = kwargs.get("position_ids")
    if positions is None or kwargs.get("attention_mask") is not None or positions.is_meta:
        return None
    if positions.dim() == 3 and len(positions) == 4:  # preceding those in time and space
        positions = positions[0]
    found = Documents.of(positions) if positions.dim() == 2 else None
    return None if found is None else (args, {**kwargs, DOCUMENTS: found})


@functools.cache
def _by_documents(kind: Any) -> Any:
    """A class of the same name whose forward computes each document it is given separately."""

    def forward(self: Any, hidden_states: Tensor, *args: Any, packed_documents: Any = None, **kwargs: Any) -> Any:
        if packed_documents is None:
            return kind.forward(self, hidden_states, *args, **kwargs)
        return packed_documents.each(functools.partial(kind.forward, self), hidden_states)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


@dataclass(frozen=True)
class Documents:
    """Where documents are in packed rows.

    Attributes:
        groups: for each group of documents of similar length, int64 of shape (documents, tokens): the indices of their
            tokens in the concatenated rows; past the end of a document, the index of its last token.
        back: int64, for each index, its place in the concatenation of all groups.
    """

    groups: list[Tensor]
    back: Tensor

    @classmethod
    def of(cls, positions: Tensor) -> Documents | None:
        """From `position_ids` of shape (rows, length); None if each row is a single document."""
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
        """Apply `layer` to each document; the shape is that of `hidden`, (rows, length, width). The filling past the
        end of a document comes after its tokens, and is dropped."""
        flat = hidden.flatten(0, 1)
        found = torch.cat([layer(flat[places]).flatten(0, 1) for places in self.groups])
        return found[self.back].view(*hidden.shape[:2], -1)
