"""--init-lora-weights: how adapters are initialised. PiSSA and OLoRA move a part of the weights into the adapters, so
that the base weights no longer contain it. What is saved is therefore converted to adapters for the original
weights."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from shardproof.errors import CheckpointError, ConfigError
from shardproof.models.loading.whole_files import check_whole_files
from shardproof.train.adapters.targets import Places, layers_of
from shardproof.train.folder import ADAPTER, BEGUN, CONFIG
from shardproof.train.options.config import RunConfig


def takes_from_weights(config: RunConfig) -> bool:
    """Whether adapters are initialised with a part of the weights (PiSSA, OLoRA)."""
    return (config.init_lora_weights or "").startswith(("pissa", "olora"))


def in_words_of_peft(config: RunConfig) -> str | bool:
    """`init_lora_weights` for PEFT's `LoraConfig`. PiSSA and OLoRA are applied later, once the weights are there."""
    kind = config.init_lora_weights
    return True if kind is None or takes_from_weights(config) else kind


def check_beginning(config: RunConfig) -> None:
    """Raise ConfigError for options that cannot be combined with --init-lora-weights."""
    kind = config.init_lora_weights
    if kind is None:
        return
    if config.adapters:
        raise ConfigError(f"--init-lora-weights {kind} applies to new adapters, and those of --adapters already exist.")
    if config.quantize and kind != "gaussian":
        raise ConfigError(
            f"--init-lora-weights {kind} and --quantize: PEFT needs unpacked weights for it. Leave one of them out,"
            f" or use gaussian."
        )
    if kind == "orthogonal" and config.lora_rank % 2:
        raise ConfigError(f"--init-lora-weights orthogonal needs an even rank, but --lora-rank is {config.lora_rank}.")


def check_layers_begin(model: Any, places: Places, config: RunConfig) -> None:
    """Raise ConfigError for a layer whose adapter cannot be initialised as --init-lora-weights says."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    from shardproof.integrations.four_bits import FourBitLinear

    kind = config.init_lora_weights
    if kind in (None, "gaussian"):
        return
    having = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    for name in layers_of(places, model):
        module = model.get_submodule(name)
        able: tuple[type, ...] = (nn.Linear,) if kind == "olora" else (nn.Linear, Conv1D)
        able = (*able, nn.Embedding) if kind == "orthogonal" else able
        why = "" if isinstance(module, able) else f"is of the class {type(module).__name__}"
        if isinstance(module, FourBitLinear):
            why = "has a weight in four bits"
        if not why and takes_from_weights(config):
            smaller = min(module.weight.shape)
            if config.lora_rank > smaller:
                why = f"has a weight of rank {smaller}, and --lora-rank is {config.lora_rank}"
            elif having[id(module.weight)] > 1:
                why = "shares its weight with another module, which would lose what the adapter takes out of it"
        if why:
            raise ConfigError(f"--init-lora-weights {kind}: {name} {why}. Leave it out of --target-modules.")


def check_begun(config: RunConfig, start: Path) -> None:
    """Raise ConfigError if the initial values of a checkpoint's adapters are missing or incomplete."""
    if not takes_from_weights(config):
        return
    if not (file := start.parent / BEGUN).is_file():
        raise ConfigError(
            f"There is no {file}, which records what --init-lora-weights {config.init_lora_weights} took out of the"
            f" weights: {start} cannot be used without it."
        )
    check_whole_files(start.parent)


def begin_adapters(model: Any, config: RunConfig, starts: Sequence[Path], keep: Path | None = None) -> None:
    """Initialise new adapters with a part of the weights, before the model is sharded. Collective.

    Args:
        starts: checkpoints to resume from: the initial values of their adapters are reused.
        keep: folder to which rank 0 writes the initial values; None writes nothing.

    Raises:
        ConfigError: a weight cannot be decomposed, or the checkpoints belong to another model.
        CheckpointError: the initial values cannot be written.
    """
    if not takes_from_weights(config):
        return
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save_file

    from shardproof.integrations.adapter_init import begin_as

    known = partial(load_file, starts[0].parent / BEGUN) if starts else None
    begun = begin_as(model, str(config.init_lora_weights), config.seed, known)
    if keep is not None:
        aside = keep / f"{BEGUN}.unfinished"
        try:
            save_file(begun, aside)
            shutil.copymode(keep / CONFIG, aside)  # the same permissions as other weights, see `readable_as_the_rest`
            aside.replace(keep / BEGUN)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{keep / BEGUN} cannot be written: {error}") from error


def fit_to_base(folder: Path, run: Path) -> None:
    """Convert the adapters in a folder, which fit the weights without their initial values, to adapters of twice the
    rank that fit the original weights: B A - B0 A0 as one product.

    PEFT does the same (`LoraModel.subtract_mutated_init`), but would load the initial values into the trained model, on
    all ranks, and leaves out everything that is not an adapter: DoRA magnitudes, and modules trained in full.
    """
    import torch
    from safetensors.torch import load_file, save_file

    file = next(folder.glob("adapter_model.safetensors"))
    trained, begun = load_file(file), load_file(run / BEGUN)
    for name, first in begun.items():
        dim, sign = (1, -1) if name.endswith(".lora_B.weight") else (0, 1)
        value = trained[name]
        trained[name] = torch.cat([value, sign * first.to(value.dtype)], dim).contiguous()
    save_file(trained, file, metadata={"format": "pt"})
    said = json.loads((folder / ADAPTER).read_text(encoding="utf-8"))
    said["r"] *= 2
    said["lora_alpha"] *= 2**0.5 if said["use_rslora"] else 2
    (folder / ADAPTER).write_text(json.dumps(said, indent=2, sort_keys=True), encoding="utf-8")
