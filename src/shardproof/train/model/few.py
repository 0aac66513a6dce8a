"""A few tokens, with which a model is tried."""

from __future__ import annotations

from typing import Any

import torch

FEW = 8


def few_tokens(tokenizer: Any) -> torch.Tensor:
    """FEW tokens out of the middle of a vocabulary: no text is known to every tokenizer, and marks of pictures and the
    like stand at its ends."""
    known = sorted({*tokenizer.get_vocab().values()} - {*tokenizer.all_special_ids})
    return torch.tensor([known[(len(known) // 2 + i) % len(known)] for i in range(FEW)])
