"""Masks of decoders that ignore positions when making them, so that packed rows would see each other."""

from __future__ import annotations

import inspect
from typing import Any

import torch

UNTOLD = ("GptOssModel",)  # of transformers


def tell_masks_of_positions(model: Any) -> None:
    """Make a model's decoder derive its masks from the positions it is given, as other decoders do."""
    decoder: Any = model.get_decoder() if hasattr(model, "get_decoder") else None
    if type(decoder).__name__ in UNTOLD:
        decoder.register_forward_pre_hook(_with_masks, with_kwargs=True)


def _with_masks(decoder: Any, args: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    positions = inputs.get("position_ids")
    cached = any(inputs.get(name) is not None for name in ("cache", "past_key_values"))
    if positions is None or inputs.get("attention_mask") is not None or cached:
        return None
    makers = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
    given = next((inputs[name] for name in ("inputs_embeds", "input_ids") if inputs.get(name) is not None), positions)
    like = torch.empty((*given.shape[:2], 1), dtype=decoder.dtype, device=given.device)  # its values are not used
    told = {"config": decoder.config, "inputs_embeds": like, "attention_mask": None, "position_ids": positions}
    cache = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
    return args, inputs | {"attention_mask": {kind: make(**told, **{cache: None}) for kind, make in makers.items()}}
