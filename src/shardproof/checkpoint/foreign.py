"""What checkpoints of other engines hold, in our words: DeepSpeed's ZeRO, and torch.distributed.checkpoint (FSDP2,
Accelerate).

[Note: pickles of others]
Their files are pickles. Nothing in DeepSpeed's is run or needs DeepSpeed: what is no tensor, number, text or container
becomes an empty stand-in. `.metadata` of torch.distributed.checkpoint is read by torch, which runs what it says:
convert only what you trust.
"""

from __future__ import annotations

import math
import pickle
import re
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from shardproof.checkpoint.contents import MODEL, STATE
from shardproof.checkpoint.parts import Part
from shardproof.checkpoint.saving import told_plainly
from shardproof.errors import CheckpointError


@dataclass
class Found:
    """What a checkpoint holds.

    Attributes:
        kind: who wrote it, in a word or two.
        parts: ranges of flattened tensors; several of one name make it up.
        groups: of the optimizer, with the names of their parameters; empty if there is none.
        scalars: state of the optimizer that is one number, by parameter and name.
        values: whatever else it holds.
    """

    kind: str
    parts: list[Part] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, shape: Any, first: int, local: torch.Tensor) -> None:
        self.parts.append(Part(name, tuple(shape), first, local.detach().reshape(-1), False))

    def add_state(self, name: str, shape: Any, first: int, state: dict[str, Any], at: int, count: int) -> None:
        """The optimizer's state of a range of a parameter, which lies at `at` in flat tensors."""
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                self.add(f"{STATE}{name}.{key}", shape, first, value[at : at + count])
            else:  # one tensor for a whole group; the optimizer counts in place, for each parameter
                own = value.clone() if isinstance(value, torch.Tensor) else value
                self.scalars.setdefault(name, {})[key] = own


# --- DeepSpeed ---------------------------------------------------------------------------------------

# What DeepSpeed itself writes beside the model; the rest is the user's (`client_state`).
_DEEPSPEED = set(
    "module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments lr_scheduler "
    "data_sampler random_ltd sparse_tensor_module_names skipped_steps global_steps global_samples dp_world_size "
    "mp_world_size ds_config ds_version checkpoint_parallel_dimensions".split()
)

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


class _StandIn:
    """Whatever a pickle names that is none of ours."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.arguments = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    KNOWN = frozenset(
        [
            *(("builtins", name) for name in ("set", "frozenset", "slice", "complex", "bytearray", "range")),
            *(("collections", name) for name in ("OrderedDict", "defaultdict", "deque")),
            *(("torch._utils", f"_rebuild_{name}") for name in ("tensor_v2", "parameter", "tensor")),
            *(("torch", name) for name in ("Size", "device", "Tensor")),
            ("torch._tensor", "_rebuild_from_type_v2"),
            ("torch.nn.parameter", "Parameter"),
            ("torch.serialization", "_get_layout"),
        ]
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self.KNOWN or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        return _StandIn


class _Pickle:
    """What `torch.load` wants of a pickle module."""

    Unpickler = _Unpickler
    load = staticmethod(pickle.load)


def read_pickle(file: Path) -> Any:
    """Tensors stay in the file until they are looked at."""
    try:
        return torch.load(file, map_location="cpu", mmap=True, weights_only=False, pickle_module=_Pickle)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{file} cannot be read: {reason_of(error)}.") from error


def reason_of(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(": .") or type(error).__name__


def deepspeed_folder(source: Path) -> Path | None:
    """The folder with the files of a DeepSpeed checkpoint: `source`, or what its `latest` names."""
    if (source / "latest").is_file():
        source = source / (source / "latest").read_text(encoding="utf-8").strip()
    return source if any(source.glob("*_optim_states.pt")) or any(source.glob("*mp_rank_*_states.pt")) else None


def read_deepspeed(folder: Path) -> Found:
    """A checkpoint of ZeRO 1, 2 or 3: masters, the optimizer's state, buffers, frozen parameters.

    Raises:
        CheckpointError: files are missing, or it is none of ZeRO.
    """
    by_number = lambda file: [int(number) for number in re.findall(r"\d+", file.name)]  # noqa: E731
    files = sorted(folder.glob("*_optim_states.pt"), key=by_number)
    optimizers = [read_pickle(file)["optimizer_state_dict"] for file in files]
    models = [read_pickle(file) for file in sorted(folder.glob("*_model_states.pt"), key=by_number)]
    # DeepSpeed's optimizer for bf16, which it takes at stage 1, leaves the stage out.
    if not optimizers or not {"zero_stage", "param_slice_mappings"} & optimizers[0].keys():
        raise CheckpointError(f"{folder} was not written by ZeRO: there is no optimizer state of stages 1 to 3 in it.")
    if not models or any("mp_rank_00" not in file.name for file in files):
        raise CheckpointError(
            f"{folder} lacks model states, or was written with tensor parallelism, which is not read."
        )
    count = optimizers[0]["partition_count"]
    ranks = max(count) if isinstance(count, list) else int(count)
    if len(optimizers) != ranks:
        raise CheckpointError(f"{folder} was written by {ranks} ranks, and there are files of {len(optimizers)}.")
    stage = 3 if "fp32_flat_groups" in optimizers[0] else 2
    found = Found(f"DeepSpeed {models[0].get('ds_version', '')}, ZeRO-{3 if stage == 3 else '1/2'}")
    shapes = [OrderedDict(group) for group in models[0]["param_shapes"]]
    if stage == 3:
        _zero3(found, optimizers, models, shapes)
    else:
        _zero2(found, optimizers, models[0], shapes)
    for name in models[0]["buffer_names"]:
        found.add(MODEL + name, models[0]["module"][name].shape, 0, models[0]["module"][name])
    found.values = {name: value for name, value in models[0].items() if name not in _DEEPSPEED}
    found.values["step"] = models[0]["global_steps"]
    found.values["counters"] = {name: models[0][name] for name in _COUNTERS if name in models[0]}
    if models[0].get("lr_scheduler") is not None:
        found.values["scheduler"] = models[0]["lr_scheduler"]
    return found


def _zero2(found: Found, optimizers: list[Any], model: Any, shapes: list[OrderedDict[str, Any]]) -> None:
    """Each rank has a run of each group's flattened parameters, and says which of them lie where in it."""
    if "param_slice_mappings" not in optimizers[0]:
        raise CheckpointError("This layout of DeepSpeed is older than what can be read (0.19): load and save it once.")
    taken: dict[str, int] = {}
    for state in optimizers:
        base = state["base_optimizer_state"]["state"]
        for number, group in enumerate(state["param_slice_mappings"]):
            flat = state["single_partition_of_fp32_groups"][number]
            for name, span in group.items():  # DeepSpeed's fragment_address
                count, at = span.state["numel"], span.state["start"]
                shape, first = shapes[number][name], taken.get(name, 0)
                found.add(MODEL + name, shape, first, flat[at : at + count])
                found.add_state(name, shape, first, base.get(number, {}), at, count)
                taken[name] = first + count
    known = {*taken, *model["buffer_names"], *model["shared_params"]}
    for name, value in model["module"].items():
        if name not in known:  # frozen
            found.add(MODEL + name, value.shape, 0, value)
    groups = optimizers[0]["base_optimizer_state"]["param_groups"]
    found.groups = [{**group, "params": list(names)} for group, names in zip(groups, shapes, strict=True)]


def _zero3(found: Found, optimizers: list[Any], models: list[Any], shapes: list[OrderedDict[str, Any]]) -> None:
    """Each rank has the same part of each parameter, one after the other in what may be several flat tensors."""
    ranks = len(optimizers)
    groups = optimizers[0]["optimizer_state_dict"]["param_groups"]
    for rank, state in enumerate(optimizers):
        flats, states = state["fp32_flat_groups"], state["optimizer_state_dict"]["state"]
        piece, at = 0, 0
        for group in shapes:
            for name, shape in group.items():
                share = math.ceil(torch.Size(shape).numel() / ranks)
                first = min(rank * share, torch.Size(shape).numel())
                count, done = min(share, torch.Size(shape).numel() - first), 0
                while done < share:
                    if at == flats[piece].numel():
                        piece, at = piece + 1, 0
                    run = min(share - done, flats[piece].numel() - at)
                    here = max(min(run, count - done), 0)
                    if here:
                        found.add(MODEL + name, shape, first + done, flats[piece][at : at + here])
                        found.add_state(name, shape, first + done, states.get(piece, {}), at, here)
                    done, at = done + run, at + run
        for name, shape in (models[rank].get("frozen_param_shapes") or {}).items():
            numel = torch.Size(shape).numel()
            share = math.ceil(numel / ranks)
            first = min(rank * share, numel)
            fragment = models[rank]["frozen_param_fragments"][name]
            found.add(MODEL + name, shape, first, fragment[: min(share, numel - first)])
    if len(groups) != len(shapes):
        raise CheckpointError(f"It has {len(groups)} groups of parameters, and names of {len(shapes)}.")
    found.groups = [{**group, "params": list(names)} for group, names in zip(groups, shapes, strict=True)]


# --- torch.distributed.checkpoint --------------------------------------------------------------------

_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.)")


class _Reading(DefaultLoadPlanner):
    """Reads values without running what they say."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        try:
            self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)
        except pickle.UnpicklingError:
            self.state_dict[read_item.dest_index.fqn] = None


def distributed_folders(source: Path) -> list[Path]:
    """The folders of torch.distributed.checkpoint in `source`: itself, or those Accelerate keeps there."""
    if (source / ".metadata").is_file():
        return [source]
    return sorted(file.parent for file in source.glob("*/.metadata"))


def read_distributed(folders: list[Path], scratch: Path) -> Found:
    """Checkpoints of FSDP2 and of whatever else saves state dicts with torch.distributed.checkpoint.

    Args:
        scratch: a folder for tensors on their way; they need not fit into memory.

    Raises:
        CheckpointError: there is no model in them.
    """
    found, entries = Found("torch.distributed.checkpoint"), {}
    for number, folder in enumerate(folders):
        entries.update(_entries(folder, scratch / str(number)))
    optimizer = {name.partition(".param_groups.")[0] for name in entries if ".param_groups." in name}
    prefix = next(iter(optimizer), "")
    candidates = (f"{prefix.rpartition('.')[0]}.model.".lstrip("."), "model.")
    model = next((start for start in candidates if any(name.startswith(start) for name in entries)), None)
    if model is None or len(optimizer) > 1:
        raise CheckpointError(
            f"{folders[0]} holds no state dict under 'model', or more than one optimizer. It begins with "
            f"{', '.join(list(entries)[:5])}."
        )
    groups: dict[str, dict[str, Any]] = {}
    for name, value in entries.items():
        if name.startswith(model):
            own = _WRAPPERS.sub("", name.removeprefix(model)).lstrip(".")
            found.add(MODEL + own, value.shape, 0, value)
        elif prefix and name.startswith(f"{prefix}.state."):
            own, _, key = name.removeprefix(f"{prefix}.state.").rpartition(".")
            own = _WRAPPERS.sub("", own).lstrip(".")
            if isinstance(value, torch.Tensor) and value.dim():
                found.add(f"{STATE}{own}.{key}", value.shape, 0, value)
            else:
                found.scalars.setdefault(own, {})[key] = value
        elif prefix and name.startswith(f"{prefix}.param_groups."):
            group, _, key = name.removeprefix(f"{prefix}.param_groups.").partition(".")
            groups.setdefault(group, {})[key] = value
        else:
            found.values[name] = value
    found.groups = [groups[group] for group in sorted(groups, key=int)]
    for own_group in found.groups:
        own_group["params"] = [_WRAPPERS.sub("", name).lstrip(".") for name in own_group["params"]]
    return found


def _entries(folder: Path, scratch: Path) -> dict[str, Any]:
    scratch.mkdir(parents=True)
    entries: dict[str, Any] = {}
    reader = dcp.FileSystemReader(folder)
    try:
        for place, (name, meta) in enumerate(reader.read_metadata().state_dict_metadata.items()):
            entries[name] = None
            if isinstance(meta, TensorStorageMetadata):
                entries[name] = _on_disk(scratch / str(place), meta.size, meta.properties.dtype)
        planner = _Reading(flatten_state_dict=False, flatten_sharded_tensors=False)
        with told_plainly():
            dcp.load(entries, storage_reader=reader, planner=planner, no_dist=True)
    except (CheckpointError, OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{folder} cannot be read: {reason_of(error)}.") from error
    return entries


def _on_disk(file: Path, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor that lives in a file."""
    if not shape.numel() or not shape:
        return torch.empty(shape, dtype=dtype)
    return torch.from_file(str(file), shared=True, size=shape.numel(), dtype=dtype).view(shape)
