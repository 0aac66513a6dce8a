"""A few tokens to test a model with."""

from __future__ import annotations

from typing import Any

import torch

FEW = 8


def few_tokens(tokenizer: Any) -> torch.Tensor:
    """FEW tokens from the middle of a vocabulary: no text suits every tokenizer, and image placeholders and the like
    are at the ends."""
    known = sorted({*tokenizer.get_vocab().values()} - {*tokenizer.all_special_ids})
    return torch.tensor([known[(len(known) // 2 + i) % len(known)] for i in range(FEW)])
