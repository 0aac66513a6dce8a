"""What `save_pretrained` writes, written by all ranks: no rank ever holds the model."""

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
    """What a tensor in a file is of a model.

    Attributes:
        entry: of the state dict.
        first: the element of the flattened entry that the tensor begins with; it goes on without gaps.
        shape: of the tensor.
    """

    entry: str
    first: int
    shape: tuple[int, ...]

    def of(self, held: Part, name: str) -> Part:
        """What a rank that holds a range of the entry holds of the tensor."""
        begin = max(held.first, self.first)
        end = min(held.first + held.local.numel(), self.first + torch.Size(self.shape).numel())
        local = held.local[begin - held.first : end - held.first] if end > begin else held.local[:0]
        return replace(held, name=name, shape=self.shape, first=max(begin - self.first, 0), local=local)


class _NoCopies(TorchDispatchMode):
    """Inside, what is cut out of a tensor without values stays a view of it, and so shows where it lies in it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            return args[0]
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError:  # a view of what a copy would have put in order: of one, which lies nowhere in the model
            return func(torch.empty(args[0].shape, device="meta"), *args[1:], **(kwargs or {}))


def places_in_model(model: Any) -> dict[str, Place] | None:
    """For each tensor in the files that `save_pretrained` writes, where it lies in the model. Experts that the model
    holds in one tensor are ranges of it.

    None where a file holds something else: adapters, packed formats, tensors that are transposed or put together. Tied
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
    """The entries of the state dict as they are, tied ones once, under their first name. None if one is no tensor."""
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
        dtype: of the floating-point numbers in the files; None keeps that of the masters.
        find: what the files hold of the model, and under what names.

    Returns: whether it was done; if not, the model needs another way (see `find`).
    """
    places = find(model)
    if places is None:
        return False
    engine: Engine = model.__dict__["_shardproof"]
    engine.adopt()
    engine.meet("collect the state dict")  # before the channel, on which a rank lends nothing
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
    """The widest dtype of the weights that ranks hold: under mixed precision not that of computing."""
    engine: Engine = model.__dict__["_shardproof"]
    found = {flat.shard.dtype for flat in engine.flats if flat.shard.is_floating_point()}
    return max(found, key=lambda dtype: dtype.itemsize, default=torch.float32)


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
