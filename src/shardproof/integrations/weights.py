"""Write the files of `save_pretrained` from all ranks: no rank ever holds the full model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardproof.checkpoint.contents import MODEL, model_parts
from shardproof.checkpoint.parts import Part
from shardproof.checkpoint.saving import Channel
from shardproof.checkpoint.weights import can_write, write_weights

if TYPE_CHECKING:
    from shardproof.zero.schedule.engine import Engine

MAX_BYTES = 5 * 10**9


@dataclass(frozen=True)
class Place:
    """Where a tensor in a file lies in a model.

    Attributes:
        entry: the entry of the state dict.
        first: the element of the flattened entry at which the tensor begins; it continues without gaps.
        shape: the shape of the tensor.
    """

    entry: str
    first: int
    shape: tuple[int, ...]

    def of(self, held: Part, name: str) -> Part:
        """The part of the tensor on a rank that holds a range of the entry."""
        begin = max(held.first, self.first)
        end = min(held.first + held.local.numel(), self.first + torch.Size(self.shape).numel())
        local = held.local[begin - held.first : end - held.first] if end > begin else held.local[:0]
        return replace(held, name=name, shape=self.shape, first=max(begin - self.first, 0), local=local)


class _NoCopies(TorchDispatchMode):
    """Inside, slices of a tensor without values stay views of it, and so reveal their position in it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            return args[0]
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError:  # a view that needs a contiguous copy: such a tensor is not part of the model
            return func(torch.empty(args[0].shape, device="meta"), *args[1:], **(kwargs or {}))


def places_in_model(model: Any) -> dict[str, Place] | None:
    """The place in the model of each tensor in the files that `save_pretrained` writes. Experts that the model holds in
    one tensor are ranges of it.

    None if a file holds something else: adapters, packed formats, transposed or concatenated tensors. Tied weights have
    one name only, the one that the model reads again.
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
    # Pass stand-ins without values through transformers' conversions before writing.
    stand_ins = {n: torch.empty(v.shape, device="meta") for n, v in entries.items() if n not in ignored}
    entry_of = {stand_in.untyped_storage()._cdata: name for name, stand_in in stand_ins.items()}
    with _NoCopies():
        saved = revert_weight_conversion(model, remove_tied_weights_from_state_dict(dict(stand_ins), model))
    found = {}
    for name, value in saved.items():
        entry = entry_of.get(value.untyped_storage()._cdata)
        if entry is None or not value.is_contiguous():
            return None
        found[name] = Place(entry, value.storage_offset(), tuple(value.shape))
    return found


def places_of_entries(model: torch.nn.Module) -> dict[str, Place] | None:
    """The entries of the state dict unchanged, tied ones once, under their first name. None if one is not a tensor."""
    entries = model.state_dict(keep_vars=True)
    if not all(isinstance(value, torch.Tensor) for value in entries.values()):
        return None
    first = {id(value): name for name, value in reversed(entries.items())}
    return {name: Place(name, 0, tuple(value.shape)) for name, value in entries.items() if first[id(value)] == name}


def stream_weights(
    model: Any,
    folder: Path,
    max_bytes: int = MAX_BYTES,
    dtype: torch.dtype | None = None,
    find: Callable[[Any], dict[str, Place] | None] = places_in_model,
) -> bool:
    """Write the weights of a sharded model into a folder, from all ranks. Collective.

    Args:
        dtype: the dtype of floating-point numbers in the files; None keeps that of the masters.
        find: returns which parts of the model the files hold, and under which names.

    Returns: whether it was done; if not, the model needs another way (see `find`).
    """
    places = find(model)
    if places is None:
        return False
    engine: Engine = model.__dict__["_shardproof"]
    engine.adopt()
    engine.meet("collect the state dict")  # before the channel, during which a rank does not lend
    engine.written.compare_now()
    channel = Channel.of(engine.comm)
    channel.finish()
    held = {part.name.removeprefix(MODEL): part for part in model_parts(engine).parts}
    by_identity = {id(p): name for name, p in model.named_parameters()}
    entries = model.state_dict(keep_vars=True)
    parts = []
    for name, place in places.items():
        part = held.get(by_identity.get(id(entries[place.entry]), place.entry))
        if part is None:
            return False
        parts.append(place.of(part, name))
    if not can_write([part.local.dtype for part in parts]):
        return False
    write_weights(channel, folder, parts, max_bytes, dtype)
    return True


def dtype_of_masters(model: Any) -> torch.dtype:
    """The widest dtype of the weights that ranks hold: under mixed precision not the compute dtype."""
    engine: Engine = model.__dict__["_shardproof"]
    found = {flat.shard.dtype for flat in engine.flats if flat.shard.is_floating_point()}
    return max(found, key=lambda dtype: dtype.itemsize, default=torch.float32)


def note_dtype(folder: Path, dtype: torch.dtype) -> None:
    """Set the dtype in a model folder's config.json to the one its weights are written in."""
    file = folder / "config.json"
    if not file.is_file():
        return

    def renamed(config: dict[str, Any]) -> dict[str, Any]:
        values = {name: renamed(value) if isinstance(value, dict) else value for name, value in config.items()}
        return values | {name: str(dtype).removeprefix("torch.") for name in ("dtype",) if values.get(name)}

    content = renamed(json.loads(file.read_text(encoding="utf-8")))
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
