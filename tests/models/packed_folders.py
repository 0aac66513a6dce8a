"""Model folders whose weights are packed, as those that are published are; the values are random."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

BLOCK = 8  # rows and columns that have one scale, 128 in what is published
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn", "router", "embed_tokens", "lm_head"]}


def pack(folder: Path, method: str) -> Path:
    """Pack the weights of a saved model in place: its products (`fp8`, in blocks), or its experts (`mxfp4`)."""
    values = load_file(folder / "model.safetensors")
    torch.manual_seed(0)
    packed: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        if method == "fp8" and "_proj" in name:
            packed |= _in_eight_bits(name, value)
        elif method == "mxfp4" and name.endswith("_proj") and "experts" in name:
            packed |= _in_four_bits(name, value)
        else:
            packed[name] = value
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": FP8 if method == "fp8" else MXFP4}))
    return folder


def _in_eight_bits(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    rows, columns = (size // BLOCK for size in value.shape)
    blocks = value.float().view(rows, BLOCK, columns, BLOCK)
    scales = blocks.abs().amax((1, 3), keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    packed = (blocks / scales).view(value.shape).to(torch.float8_e4m3fn)
    return {name: packed, f"{name}_scale_inv": scales.view(rows, columns)}


def _in_four_bits(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Any bytes are values of it, and scales are powers of two."""
    experts, size, rows = value.shape
    blocks = torch.randint(0, 256, (experts, rows, size // 32, 16), dtype=torch.uint8)
    scales = torch.randint(122, 126, (experts, rows, size // 32), dtype=torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}
