"""--compile: torch.compile of what is gathered together, the blocks of a model."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

from shardproof.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn


def check_compiler() -> None:
    """Raise ConfigError where torch.compile has nothing to compile its kernels, or what starts them, with."""
    if not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        raise ConfigError("--compile needs a C++ compiler: install g++ (or clang++), or leave --compile out.")


def compile_units(model: nn.Module, **options: Any) -> int:
    """Compile the blocks of a sharded model, each by itself, in place. Gathering stays outside of what is compiled.

    What lies outside of blocks (embedding, head, loss) runs as it is. `options` are those of `torch.compile`.

    Returns: how many blocks there are.

    Raises:
        ConfigError: the model has no blocks.
    """
    engine = model.__dict__["_shardproof"]
    blocks = [module for unit in engine.units if not unit.is_root for module in unit.entries]
    if not blocks:
        raise ConfigError(f"--compile: {type(model).__name__} has no repeated blocks to compile. Leave --compile out.")
    for block in blocks:
        block.compile(**options)
    return len(blocks)
