"""What `save_pretrained` writes, written by all ranks: no rank ever holds the model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardproof.checkpoint.contents import MODEL, model_parts
from shardproof.checkpoint.saving import Channel
from shardproof.checkpoint.weights import can_write, write_weights

if TYPE_CHECKING:
    from shardproof.zero.schedule import Engine

MAX_BYTES = 5 * 10**9


def names_in_files(model: Any) -> dict[str, str] | None:
    """For each name in the files that `save_pretrained` writes, the entry of the state dict that it is.

    None where a file holds something else than entries: adapters, packed formats, experts that are taken apart. Tied
    weights have one name only, that which the model reads again.
    """
    if getattr(model, "peft_config", None) or getattr(model, "hf_quantizer", None) is not None:
        return None
    try:
        from transformers.core_model_loading import revert_weight_conversion
        from transformers.modeling_utils import PreTrainedModel, remove_tied_weights_from_state_dict
    except ImportError:  # another release of transformers
        return None
    if not isinstance(model, PreTrainedModel):
        return None
    ignored = set(model._keys_to_ignore_on_save or ())
    entries = model.state_dict(keep_vars=True)
    # Stand-ins without values go through what transformers does before it writes.
    stand_ins = {n: torch.empty(v.shape, device="meta") for n, v in entries.items() if n not in ignored}
    name_of = {id(stand_in): name for name, stand_in in stand_ins.items()}
    saved = revert_weight_conversion(model, remove_tied_weights_from_state_dict(dict(stand_ins), model))
    if any(id(value) not in name_of for value in saved.values()):
        return None
    return {name: name_of[id(value)] for name, value in saved.items()}


def stream_weights(model: Any, folder: Path, max_bytes: int = MAX_BYTES, dtype: torch.dtype | None = None) -> bool:
    """Write the weights of a sharded model into a folder that is there, from all ranks. Collective.

    Args:
        dtype: of the floating-point numbers in the files; None keeps that of the masters.

    Returns: whether it was done; if not, the model needs another way (see `names_in_files`).
    """
    names = names_in_files(model)
    if names is None:
        return False
    engine: Engine = model.__dict__["_shardproof"]
    engine.adopt()
    channel = Channel.of(engine.comm)
    channel.finish()
    engine.meet("collect the state dict")
    held = {part.name.removeprefix(MODEL): part for part in model_parts(engine).parts}
    by_identity = {id(p): name for name, p in model.named_parameters()}
    entries = model.state_dict(keep_vars=True)
    parts = []
    for name, entry in names.items():
        part = held.get(by_identity.get(id(entries[entry]), entry))
        if part is None:
            return False
        parts.append(replace(part, name=name))
    if not can_write([part.local.dtype for part in parts]):
        return False
    write_weights(channel, folder, parts, max_bytes, dtype)
    return True


def note_dtype(folder: Path, dtype: torch.dtype) -> None:
    """Have the config.json of a model folder name the dtype that its weights are written in."""
    file = folder / "config.json"
    if not file.is_file():
        return

    def renamed(config: dict[str, Any]) -> dict[str, Any]:
        values = {name: renamed(value) if isinstance(value, dict) else value for name, value in config.items()}
        return values | {name: str(dtype).removeprefix("torch.") for name in ("dtype",) if values.get(name)}

    content = renamed(json.loads(file.read_text(encoding="utf-8")))
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
