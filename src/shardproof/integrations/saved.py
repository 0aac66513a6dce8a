"""Which weights of a model `save_pretrained` writes, and under which names: for a PEFT model, those of the adapters."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn


def adapters_of(model: nn.Module) -> list[str]:
    """The names of a PEFT model's adapters; empty for other models."""
    return list(getattr(model, "peft_config", {}))


def as_saved(model: nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """These weights under the names that `save_pretrained` gives them: PEFT leaves the adapter's name out. Adapters
    other than the first (such as TRL's reference) are in separate folders."""
    tensors = {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}
    if not (names := adapters_of(model)):
        return tensors
    first, *others = names
    elsewhere = re.compile(rf"\.({'|'.join(map(re.escape, others))})(\.|$)") if others else None
    return {
        name.replace(f".modules_to_save.{first}.", ".").replace(f".{first}.", "."): value
        for name, value in tensors.items()
        if elsewhere is None or not elsewhere.search(name)
    }


def pick_adapters(
    model: nn.Module, weights: dict[str, torch.Tensor], names: Sequence[str] | None = None
) -> list[torch.Tensor]:
    """The weights that PEFT saves, for the adapters with these names or for all."""
    names = adapters_of(model) if names is None else names
    if not names:
        return []
    from peft import get_peft_model_state_dict

    picked = [get_peft_model_state_dict(model, weights, adapter_name=name) for name in names]
    return [value for adapter in picked for value in adapter.values()]


def saved_names(model: nn.Module) -> set[str]:
    """The entries of the state dict that `save_pretrained` writes: for a PEFT model, the names that PEFT picks from
    stand-ins."""
    values = model.state_dict(keep_vars=True)
    names = set(values)
    if not adapters_of(model):
        return names
    # AdaLoRA checks the number of ranks.
    stand_ins = {name: torch.empty(getattr(value, "shape", 0), device="meta") for name, value in values.items()}
    name_of = {id(stand_in): name for name, stand_in in stand_ins.items()}
    picked = {name_of.get(id(value), "") for value in pick_adapters(model, stand_ins)}
    # A tuner that derives new tensors from the weights may need any of them.
    return picked if picked <= names else names


@contextlib.contextmanager
def state_dict_of(model: nn.Module, names: set[str]) -> Iterator[None]:
    """Inside, the state dict of `model` has these entries only, so that nothing else is gathered."""

    def drop(module: nn.Module, entries: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name in [name for name in entries if name.removeprefix(prefix) not in names]:
            del entries[name]

    hook = model.register_state_dict_post_hook(drop)
    try:
        yield
    finally:
        hook.remove()


def readable_as_the_rest(folder: Path) -> None:
    """Give weight files the permissions of the config next to them: safetensors 0.8 writes files that only their owner
    may read, so that another user's server could not load the model."""
    for config in (folder / name for name in ("config.json", "adapter_config.json") if (folder / name).is_file()):
        for file in folder.glob("*.safetensors"):
            shutil.copymode(config, file)
