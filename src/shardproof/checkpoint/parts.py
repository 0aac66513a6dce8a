"""The parts this rank holds, as named ranges of flattened tensors, and the plans for writing and reading them.

Every parameter, buffer and per-element optimizer state is one global 1-D tensor under its own name, whatever the stage
and the number of ranks. So torch.distributed.checkpoint's own resharding moves it to any other layout.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

# Elements to write and read at a time: bounds the memory that both need.
CHUNK = 1 << 23


@dataclass
class Part:
    """A range of a flattened tensor.

    Attributes:
        name: in the checkpoint.
        shape: of the unsharded tensor.
        first: the first element of the flattened tensor in this part.
        local: the values of this part, 1-D (may be empty).
        replicated: whether every rank holds it.
        copies: how many ranks hold this range, if not all; `copy`: which of these this rank is.
        of_first: the values may differ between ranks (buffers), and those of rank 0 count.
    """

    name: str
    shape: tuple[int, ...]
    first: int
    local: torch.Tensor
    replicated: bool
    copies: int = 1
    copy: int = 0
    of_first: bool = False

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


def to_write(parts: list[Part], rank: int, world: int) -> list[Part]:
    """The parts this rank writes: its slices, and its share (in bytes) of parts that several ranks hold."""
    total = sum(p.local.nbytes for p in parts if p.replicated and not p.of_first)
    mine, before = [], 0
    for number, part in enumerate(parts):
        if number % part.copies != part.copy or (part.of_first and rank):
            continue
        if part.replicated and not part.of_first:
            owner = before * world // max(total, 1)
            before += part.local.nbytes
            if owner != rank:
                continue
        if part.local.numel():
            mine.append(part)
    return mine


class Save(SavePlanner):
    """Plans the writing of parts, and of values as bytes."""

    def __init__(self, parts: Iterable[Part], values: dict[str, bytes]) -> None:
        self.parts = list(parts)
        self.values = values
        self.chunks: dict[MetadataIndex, Part] = {}  # the part of each chunk: a tensor may have several parts

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Nothing to do: the parts are known."""

    def create_local_plan(self) -> SavePlan:
        values = [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self.values]
        items = [(item, part) for part in self.parts for item in _write_items(part)]
        self.chunks = {item.index: part for item, part in items}
        return SavePlan([*values, *(item for item, _ in items)])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.tensor_data is None:
            return io.BytesIO(self.values[write_item.index.fqn])
        part, chunk = self.chunks[write_item.index], write_item.tensor_data.chunk
        return part.local.narrow(0, chunk.offsets[0] - part.first, chunk.sizes[0])


def _write_items(part: Part) -> Iterator[WriteItem]:
    for start in range(0, part.local.numel(), CHUNK):
        offsets = torch.Size([part.first + start])
        chunk = ChunkStorageMetadata(offsets, torch.Size([min(CHUNK, part.local.numel() - start)]))
        data = TensorWriteData(chunk, TensorProperties(part.local.dtype), torch.Size([part.numel]))
        yield WriteItem(MetadataIndex(part.name, offsets), WriteItemType.SHARD, tensor_data=data)


class Load(LoadPlanner):
    """Plans reading into parts, in place."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self.parts = {part.name: part for part in parts}

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, part in self.parts.items():
            saved = self.metadata.state_dict_metadata[name]  # type: ignore[union-attr]
            if part.local.numel() and isinstance(saved, TensorStorageMetadata):
                here = ChunkStorageMetadata(torch.Size([part.first]), part.local.size())
                items += create_read_items_for_chunk_list(name, saved, [here])
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise NotImplementedError("values are read before tensors")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self.parts[read_item.dest_index.fqn].local.narrow(0, read_item.dest_offsets[0], read_item.lengths[0])

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing to do: `resolve_tensor` returned the memory itself."""
