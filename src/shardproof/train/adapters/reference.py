"""The adapters of a run's reference model: those that training starts from, others, or none."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from shardproof.checkpoint.manifest import Manifest
from shardproof.train.adapters.begun import adapter_folder, give_values
from shardproof.train.options.rlhf_config import SAME

REFERENCE = "ref"  # TRL's name for it


def refer_to(model: Any, ref_adapters: str | None) -> None:
    """Give TRL's reference, which has a copy of the trained adapters, the adapters of --ref-adapters, or none.

    Args:
        ref_adapters: SAME keeps the copy, and adds adapters of embeddings, which TRL does not copy.

    Raises:
        ConfigError: they do not match those of the model.
    """
    if REFERENCE not in getattr(model, "peft_config", ()):  # this TRL trainer uses no reference
        return
    _with_same_ranks(model, REFERENCE)
    if ref_adapters is None:
        model.delete_adapter(REFERENCE)  # TRL then disables all adapters instead
    elif ref_adapters == SAME:
        for name, p in model.named_parameters():
            if name.endswith(".default"):
                model.get_parameter(name.removesuffix("default") + REFERENCE).data.copy_(p.data)
    else:
        folder = adapter_folder(ref_adapters, "--ref-adapters")
        give_values(model, folder, "--ref-adapters", REFERENCE)
        _scale_as(model, folder, REFERENCE)


def _scale_as(model: Any, folder: Path, adapter: str) -> None:
    """Give an adapter that copies another one's layers the scale recorded in a folder. No weight holds it."""
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import get_pattern_key

    how = LoraConfig.from_pretrained(folder)
    for name, layer in model.get_base_model().named_modules():
        if isinstance(layer, LoraLayer) and adapter in layer.scaling:
            place = name.replace(".base_layer", "")
            alpha = how.alpha_pattern.get(get_pattern_key(how.alpha_pattern.keys(), place), how.lora_alpha)
            rank = layer.r[adapter]
            layer.lora_alpha[adapter] = alpha
            layer.scaling[adapter] = alpha / (math.sqrt(rank) if how.use_rslora else rank)


def _with_same_ranks(model: Any, adapter: str) -> None:
    """Give a model's second AdaLoRA adapter, which has the same rank in all layers, the ranks of the first one, the
    only one trained."""
    from peft.tuners.adalora.layer import AdaLoraLayer

    how = dataclasses.replace(model.peft_config[adapter], inference_mode=False)  # as in the active one
    for layer in model.modules():
        if isinstance(layer, AdaLoraLayer) and adapter in layer.lora_E:
            layer.update_layer(adapter, len(layer.lora_E["default"]), how.lora_alpha, config=how)


def load_beside_reference(model: Any, checkpoint: Path) -> None:
    """Load the weights of a checkpoint whose run may have had a reference with adapters of its own. The checkpoint does
    not hold them, but it names them, and a model without them would not match."""
    from shardproof.checkpoint.api import load_weights

    referred = any(f".{REFERENCE}." in f"{name}." for name in Manifest.read(checkpoint).left_out)
    if referred:
        model.add_adapter(REFERENCE, model.peft_config["default"])
        _with_same_ranks(model, REFERENCE)
    load_weights(model, checkpoint)
    if referred:
        model.delete_adapter(REFERENCE)
