"""Read checkpoints of DeepSpeed ZeRO. See [Note: foreign pickles] in foreign.py."""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from shardproof.checkpoint.contents import MODEL
from shardproof.checkpoint.foreign import Found, own_name, read_pickle
from shardproof.checkpoint.values import to_bytes
from shardproof.errors import CheckpointError

# The keys that DeepSpeed itself writes along with the model; the others are the user's (`client_state`).
_DEEPSPEED = set(
    "module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments lr_scheduler "
    "data_sampler random_ltd sparse_tensor_module_names skipped_steps global_steps global_samples dp_world_size "
    "mp_world_size ds_config ds_version checkpoint_parallel_dimensions".split()
)

_OURS = {"step", "counters", "scheduler", "client_state"}  # names of values that we write
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def deepspeed_folder(source: Path) -> Path | None:
    """The folder with the files of a DeepSpeed checkpoint: `source`, or the folder its `latest` names.

    Raises:
        CheckpointError: `latest` cannot be read, or names a folder that does not exist.
    """
    if (latest := source / "latest").is_file():
        try:
            name = latest.read_text(encoding="utf-8").strip()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{latest} cannot be read: {error}.") from error
        if not (source / name).is_dir():
            raise CheckpointError(f"{latest} names {name}, which does not exist. Name one of the folders that do.")
        source = source / name
    return source if any(source.glob("*_optim_states.pt")) or any(source.glob("*mp_rank_*_states.pt")) else None


def read_deepspeed(folder: Path) -> Found:
    """Read a checkpoint of ZeRO 1, 2 or 3: masters, optimizer state, buffers, frozen parameters.

    Raises:
        CheckpointError: files are missing, or it was not written by ZeRO.
    """
    try:
        return _read(folder)
    except KeyError as error:
        raise CheckpointError(
            f"{folder} lacks {error}, which DeepSpeed 0.19 writes. Load it with the release that wrote it, and save it "
            "again with 0.19."
        ) from error


def _read(folder: Path) -> Found:
    by_number = lambda file: [int(number) for number in re.findall(r"\d+", file.name)]  # noqa: E731
    files = sorted(folder.glob("*_optim_states.pt"), key=by_number)
    optimizers = [read_pickle(file)["optimizer_state_dict"] for file in files]
    models = [_named(read_pickle(file)) for file in sorted(folder.glob("*_model_states.pt"), key=by_number)]
    # DeepSpeed's bf16 optimizer, used at stage 1, does not write the stage.
    if not optimizers or not {"zero_stage", "param_slice_mappings"} & optimizers[0].keys():
        raise CheckpointError(f"{folder} was not written by ZeRO: it has no optimizer state of stages 1 to 3.")
    if not models or any("mp_rank_00" not in file.name for file in files):
        raise CheckpointError(
            f"{folder} lacks model states, or was written with tensor parallelism, which is not supported."
        )
    count = optimizers[0]["partition_count"]
    ranks = max(count) if isinstance(count, list) else int(count)
    if len(optimizers) != ranks:
        raise CheckpointError(f"{folder} was written by {ranks} ranks, but has files of only {len(optimizers)}.")
    _check_steps(folder, optimizers, models)
    stage = 3 if "fp32_flat_groups" in optimizers[0] else 2
    if stage == 3 and len(models) != ranks:
        raise CheckpointError(f"{folder} was written by {ranks} ranks, but has model states of only {len(models)}.")
    found = Found(f"DeepSpeed {models[0].get('ds_version', '')}, ZeRO-{3 if stage == 3 else '1/2'}")
    shapes = [OrderedDict(group) for group in models[0]["param_shapes"]]
    try:
        if stage == 3:
            _zero3(found, optimizers, models, shapes)
        else:
            _zero2(found, optimizers, models[0], shapes)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    for name in models[0]["buffer_names"]:
        found.add(MODEL + name, models[0]["module"][name].shape, 0, models[0]["module"][name])
    client = {name: value for name, value in models[0].items() if name not in _DEEPSPEED}
    found.values = dict(client)
    if _OURS & client.keys():  # the values below take these names; the user's are all kept under this one
        found.values["client_state"] = {name: value for name, value in client.items() if _can_be_kept(name, value)}
    found.values["step"] = models[0]["global_steps"]
    found.values["counters"] = {name: models[0][name] for name in _COUNTERS if name in models[0]}
    if models[0].get("lr_scheduler") is not None:
        found.values["scheduler"] = models[0]["lr_scheduler"]
    return found


def _named(model: Any) -> Any:
    """Model states with the model's own names, without the prefix of `torch.compile`."""
    for key in ("module", "frozen_param_shapes", "frozen_param_fragments", "shared_params"):
        if isinstance(entries := model.get(key), dict):
            model[key] = {own_name(name): value for name, value in entries.items()}
    if model.get("param_shapes"):
        model["param_shapes"] = [{own_name(name): shape for name, shape in g.items()} for g in model["param_shapes"]]
    if model.get("buffer_names"):
        model["buffer_names"] = [own_name(name) for name in model["buffer_names"]]
    return model


def _can_be_kept(name: str, value: Any) -> bool:
    try:
        to_bytes(name, value)
    except CheckpointError:
        return False
    return True


def _check_steps(folder: Path, optimizers: list[Any], models: list[Any]) -> None:
    """Raise CheckpointError if the files of the ranks are from different steps."""
    counts = []
    for state in optimizers:
        base = state.get("optimizer_state_dict") or state.get("base_optimizer_state")
        own = base.get("state", {}) if isinstance(base, dict) else {}
        counts.append(sorted({int(values["step"]) for values in own.values() if "step" in values}))
    for what, steps in (("optimizer", counts), ("model", [model.get("global_steps") for model in models])):
        known = {rank: step for rank, step in enumerate(steps) if step not in (None, [])}
        first = next(iter(known), 0)
        other = next((rank for rank, step in known.items() if step != known[first]), None)
        if other is not None:
            raise CheckpointError(
                f"{folder} holds files of two checkpoints: the {what} states of rank {other} are from another step "
                f"than those of rank {first}. Copy all files again from where they were written."
            )


def _zero2(found: Found, optimizers: list[Any], model: Any, shapes: list[OrderedDict[str, Any]]) -> None:
    """Each rank has a contiguous range of each group's flattened parameters, in the order of `param_shapes`.

    (`param_slice_mappings` also gives positions, but in the order before `round_robin_gradients` changed it.)
    """
    first = optimizers[0]
    if "param_slice_mappings" not in first or "state" not in first["base_optimizer_state"]:
        raise CheckpointError(
            "it was written with elastic_checkpoint, or by a DeepSpeed older than 0.19, which cannot be read. Load it "
            "with the DeepSpeed that wrote it, and save it again without elastic_checkpoint."
        )
    paddings = first.get("param_alignment_paddings") or [[0] * len(group) for group in shapes]
    for number, (group, gaps) in enumerate(zip(shapes, paddings, strict=True)):
        low = start = 0  # where the range of a rank, and a parameter, begin
        for state in optimizers:
            flat = state["single_partition_of_fp32_groups"][number]
            own = state["base_optimizer_state"]["state"].get(number, {})
            start = 0
            for (name, shape), gap in zip(group.items(), gaps, strict=True):
                numel = torch.Size(shape).numel()
                begin, end = max(low - start, 0), min(low + flat.numel() - start, numel)
                if begin < end:
                    at, count = start + begin - low, end - begin
                    _check(name, flat[at : at + count], begin, model["module"].get(name))
                    found.add(MODEL + name, shape, begin, flat[at : at + count])
                    found.add_state(name, shape, begin, own, at, count)
                start += numel + gap
            low += flat.numel()
        if low < start:
            raise CheckpointError(f"its parameter group {number} has {start:,} elements, but masters for {low:,}.")
    trained = {name for group in shapes for name in group}
    known = {*trained, *model["buffer_names"], *model["shared_params"]}
    frozen = {name: value for name, value in model["module"].items() if name not in known}
    for name, value in frozen.items():
        found.add(MODEL + name, value.shape, 0, value)
    # Stage 1 always writes None, and stage 2 does where they are left out.
    found.frozen_unknown = model.get("frozen_param_shapes") is None and not frozen
    groups = first["base_optimizer_state"]["param_groups"]
    found.groups = [{**group, "params": list(names)} for group, names in zip(groups, shapes, strict=True)]


def _check(name: str, masters: torch.Tensor, first: int, weights: torch.Tensor | None) -> None:
    """Raise CheckpointError unless the rounded masters equal the model's weights, which are stored as well."""
    if weights is None or not weights.is_floating_point():
        return
    there = weights.detach().reshape(-1)[first : first + masters.numel()]
    kind = torch.finfo(there.dtype)
    if there.shape != masters.shape or not torch.allclose(
        masters.detach().to(there.dtype), there, rtol=kind.eps, atol=kind.tiny, equal_nan=True
    ):
        raise CheckpointError(
            f"the masters of '{name}' differ from its weights in the model's file. Either these are files of two "
            "checkpoints, or the masters are in an unknown order: load it with DeepSpeed and save it again."
        )


def _zero3(found: Found, optimizers: list[Any], models: list[Any], shapes: list[OrderedDict[str, Any]]) -> None:
    """Each rank has an equal part of each parameter, one after the other in a flat tensor per sub-group.

    `shapes` are those of sub-groups (of `sub_group_size` elements); an optimizer group has one or more of them.
    """
    ranks = len(optimizers)
    groups = optimizers[0]["optimizer_state_dict"]["param_groups"]
    if [piece for group in groups for piece in group["params"]] != list(range(len(shapes))):
        raise CheckpointError(f"its optimizer's groups differ from the {len(shapes)} that the model's file names.")
    for rank, state in enumerate(optimizers):
        states = state["optimizer_state_dict"]["state"]
        for number, (names, flat) in enumerate(zip(shapes, state["fp32_flat_groups"], strict=True)):
            at = 0
            for name, shape in names.items():
                share, first, count = _share(shape, rank, ranks)
                if count and at + count <= flat.numel():
                    found.add(MODEL + name, shape, first, flat[at : at + count])
                    found.add_state(name, shape, first, states.get(number, {}), at, count)
                at += share
            if at != flat.numel():
                raise CheckpointError(
                    f"the masters from '{next(iter(names))}' on are not in the file of rank {rank}, as happens when "
                    "DeepSpeed keeps them on NVMe. Load it with the optimizer on the CPU, and save it again."
                )
        for name, shape in (models[rank].get("frozen_param_shapes") or {}).items():
            _, first, count = _share(shape, rank, ranks)
            found.add(MODEL + name, shape, first, models[rank]["frozen_param_fragments"][name][:count])
    found.frozen_unknown = models[0].get("frozen_param_shapes") is None
    found.groups = [{**group, "params": [name for n in group["params"] for name in shapes[n]]} for group in groups]


def _share(shape: Any, rank: int, ranks: int) -> tuple[int, int, int]:
    """Elements per rank of a parameter at stage 3, with padding; where this rank's range begins, and its size."""
    numel = torch.Size(shape).numel()
    share = math.ceil(numel / ranks)
    first = min(rank * share, numel)
    return share, first, min(share, numel - first)
