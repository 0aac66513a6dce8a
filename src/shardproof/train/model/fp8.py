"""--fp8: the matrix products of a model's blocks in eight bits, by torchao's linear layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardproof.errors import ConfigError
from shardproof.zero.build import find_units
from shardproof.zero.device import default_device

MULTIPLE = 16  # rows and columns of a product must be multiples of it


def check_fp8(device: torch.device) -> None:
    """Raise ConfigError if torch cannot multiply matrices in fp8 here."""
    eight = torch.ones(MULTIPLE, MULTIPLE, device=device).to(torch.float8_e4m3fn)
    scale = torch.ones((), device=device)
    try:
        torch._scaled_mm(eight, eight.t(), scale, scale, out_dtype=torch.bfloat16)
    except (RuntimeError, NotImplementedError) as problem:
        reason = str(problem).splitlines()[0]
        raise ConfigError(f"--fp8: torch cannot multiply in fp8 on this {device.type} ({reason}).") from None


def in_fp8(model: nn.Module) -> int:
    """Have the linear layers in the blocks of a model multiply in fp8, before it is sharded: forward in e4m3, gradients
    in e5m2, each tensor scaled by its current largest magnitude (arXiv 2209.05433). The parameters stay as they are, so
    nothing changes in what is sharded, trained and saved.

    Returns: the number of such layers.

    Raises:
        ConfigError: the model has none, or torch cannot do it here.
    """
    check_fp8(default_device())
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    blocks = [name for name, _ in find_units(model, None)]

    def fits(module: nn.Module, name: str) -> bool:
        inside = any(name.startswith(f"{block}.") for block in blocks)
        return inside and type(module) is nn.Linear and not any(size % MULTIPLE for size in module.weight.shape)

    found = sum(fits(module, name) for name, module in model.named_modules())
    if not found:
        raise ConfigError(
            f"--fp8: {type(model).__name__} has no blocks with linear layers whose sizes are multiples of {MULTIPLE}."
        )
    # The number of tokens varies: it is padded up to a multiple.
    config: Any = Float8LinearConfig(pad_inner_dim=True)
    convert_to_float8_training(model, config=config, module_filter_fn=fits)
    return found
