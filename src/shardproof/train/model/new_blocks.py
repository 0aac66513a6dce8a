"""LLaMA-Pro (arXiv 2401.02415): new blocks between those of a language model. Only the new blocks are trained.

Each is a copy of the block before it whose attention and MLP output zeros at first, so that the model starts out
unchanged. The result is an ordinary model with more layers.
"""

from __future__ import annotations

import copy
from typing import Any

from shardproof.errors import ConfigError
from shardproof.models.families.anatomy import language_layers

WRITE = {"o_proj", "down_proj"}  # layers of attention and MLP that write to the residual stream
_NEW = "new_blocks"  # where a model keeps the names of its new blocks


class Zeros:
    """Reads a range of a weight that is initialised with zeros."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype

    def __call__(self, first: int, last: int) -> Any:
        import torch

        return torch.zeros(last - first, dtype=self.dtype)


def add_blocks(model: Any, count: int) -> None:
    """Give a model `count` more blocks, evenly spread. If weights are still to be read, new blocks read the same as the
    blocks before them.

    Raises:
        ConfigError: its number of blocks is not a multiple of `count`, its blocks lack the known output layers, or its
            config cannot describe the result.
    """
    if not count:
        return
    from torch import nn

    layers = language_layers(model)
    said = f"--new-blocks {count}: the language model of {type(model).__name__}"
    if not layers or len(layers) % count:
        raise ConfigError(f"{said} has {len(layers)} blocks, which is not a multiple of {count}.")
    each = len(layers) // count
    order = [at for at in range(len(layers)) for _ in range(2 if (at + 1) % each == 0 else 1)]
    new = [place for place in range(1, len(order)) if order[place] == order[place - 1]]
    blocks = [_copy(layers[at][1]) if place in new else layers[at][1] for place, at in enumerate(order)]
    for place in new:
        if not _writes_nothing(blocks[place]):
            raise ConfigError(
                f"{said} has blocks without {' and '.join(sorted(WRITE))}, the layers that write their output."
            )
    path, text = layers[0][0].rpartition(".")[0], model.config.get_text_config()
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == len(layers):
            setattr(text, name, [value[at] for at in order])
    text.num_hidden_layers = len(order)
    for place, block in enumerate(blocks):
        for module in block.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = place
    outer, _, last = path.rpartition(".")
    setattr(model.get_submodule(outer), last, nn.ModuleList(blocks))
    if _shape(model, path) != _shape(_as_configured(model), path):
        raise ConfigError(f"{said} has blocks of several kinds, and its config cannot say which kind the new ones are.")
    model.__dict__[_NEW] = [f"{path}.{place}." for place in new]


def train_new_alone(model: Any) -> None:
    """Freeze everything except the new blocks."""
    for name, p in model.named_parameters():
        p.requires_grad_(p.requires_grad and name.startswith(tuple(model.__dict__[_NEW])))


def _copy(block: Any) -> Any:
    """A copy of the block; weights that are still to be read keep their reader, and take no memory."""
    import torch
    from torch import nn

    from shardproof.zero.build import READER

    # All blocks share one config: what is chosen later (how attention is computed) applies to new ones too.
    memo: dict[int, Any] = {id(m.config): m.config for m in block.modules() if hasattr(m, "config")}
    for p in block.parameters():
        value = p.detach()
        if READER in p.__dict__:
            value = torch.full((), float("nan"), dtype=p.dtype, device=p.device).expand(p.shape)
        memo[id(p)] = made = nn.Parameter(value if READER in p.__dict__ else value.clone(), p.requires_grad)
        made.__dict__.update(p.__dict__)
    return copy.deepcopy(block, memo)


def _writes_nothing(block: Any) -> bool:
    """Make a block add nothing to the residual stream. Returns whether all of its output layers were found."""
    import torch

    from shardproof.zero.build import READER

    found = set()
    for name, p in block.named_parameters():
        if writer := WRITE & {*name.split(".")}:
            found |= writer
            if READER in p.__dict__:
                setattr(p, READER, Zeros(p.dtype))
            else:
                with torch.no_grad():
                    p.zero_()
    return found == WRITE


def _as_configured(model: Any) -> Any:
    """The model that transformers builds from the config, without values."""
    import torch

    with torch.device("meta"):
        return type(model)(copy.deepcopy(model.config))


def _shape(model: Any, path: str) -> dict[str, Any]:
    """Classes, parameter shapes and plain attributes of the blocks at `path`."""
    blocks = model.get_submodule(path)
    plain = (int, float, str, type(None))
    found: dict[str, Any] = {name: tuple(p.shape) for name, p in blocks.named_parameters()}
    for name, module in blocks.named_modules():
        own = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, plain) and key[0] != "_" and key != "training"
        }
        found[f"{name}:"] = type(module).__name__, own
    return found
