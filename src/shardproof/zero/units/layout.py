"""Layout: where parameters lie in one flat buffer, and which part of it is a rank's."""

from __future__ import annotations

import bisect
import itertools
import math

import torch

# Every parameter starts on a cache line, as it would if torch had allocated it: kernels then take the
# same path as in one process.
ALIGN_BYTES = 64


class Layout:
    """Parameters laid end to end, padded, cut evenly.

    A parameter's slice on a rank is a contiguous range of its flattened elements (maybe empty).

    Args:
        shapes: of the parameters, in their order.
        dtype: of the gathered buffer.
        parts: into how many parts it is cut; `part` is this rank's.

    Attributes:
        bounds: for each parameter, the range of the shard that belongs to it.
    """

    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype, parts: int, part: int) -> None:
        self.shapes, self.parts = shapes, parts
        self.strides = [torch.empty(s, device="meta").stride() for s in shapes]
        self.numels = [math.prod(s) for s in shapes]
        align = max(1, ALIGN_BYTES // dtype.itemsize)
        self.offsets: list[int] = []
        end = 0
        for n in self.numels:
            self.offsets.append(end)
            end += -(-n // align) * align
        self.numel = max(1, -(-end // (align * parts))) * align * parts
        self.nbytes = self.numel * dtype.itemsize
        self.shard_numel = self.numel // parts
        self.start = part * self.shard_numel
        here = [(max(at - self.start, 0), at + n - self.start) for at, n in zip(self.offsets, self.numels, strict=True)]
        self.bounds = [(min(lo, self.shard_numel), min(max(hi, 0), self.shard_numel)) for lo, hi in here]
        edges = [0, *(edge for bounds in self.bounds for edge in bounds), self.shard_numel]
        self._cuts = [last - first for first, last in itertools.pairwise(edges)]
        self._places = list(zip(self.shapes, self.strides, self.offsets, strict=True))

    def range_in_parameter(self, index: int) -> tuple[int, int]:
        """The range of the flattened parameter `index` that this rank holds."""
        lo, hi = self.bounds[index]
        first = self.start + lo - self.offsets[index] if hi > lo else 0
        return first, first + hi - lo

    def cuts(self, index: int) -> tuple[int, int, range]:
        """How parameter `index` is cut: of how many parts, which holds its first element, and where the others begin.
        It is the same on all ranks, which a range that this rank holds is not."""
        offset, each = self.offsets[index], self.shard_numel
        first = offset // each
        return self.parts, first, range((first + 1) * each - offset, self.numels[index], each)

    def slice_of(self, whole: torch.Tensor, index: int) -> torch.Tensor:
        """This rank's elements of the whole parameter `index`, 1-D."""
        first, last = self.range_in_parameter(index)
        return whole.detach().reshape(-1)[first:last]

    def local_of(self, shard: torch.Tensor, index: int) -> torch.Tensor:
        """This rank's slice of parameter `index` in a shard-sized buffer; in its own shape if it is whole."""
        lo, hi = self.bounds[index]
        part = shard.detach()[lo:hi]
        return part if self.parts > 1 else part.view(self.shapes[index])

    def locals_of(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """This rank's slices of all parameters in a shard-sized buffer."""
        buffer = shard.detach()
        return list(buffer.split_with_sizes(self._cuts)[1::2]) if self.parts > 1 else self.views(buffer)

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a buffer of the whole size. It has a version of its own."""
        return whole.data[self.start : self.start + self.shard_numel]

    def view(self, whole: torch.Tensor, index: int) -> torch.Tensor:
        """Parameter `index` in a buffer of the whole size."""
        return whole.as_strided(self.shapes[index], self.strides[index], self.offsets[index])

    def views(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """All parameters in a buffer of the whole size."""
        at = whole.storage_offset()
        # One operation for each: next to cutting and viewing it takes the host half the time.
        return [whole.as_strided(shape, stride, at + offset) for shape, stride, offset in self._places]

    def index_at(self, offset: int) -> int:
        """Which parameter the element at `offset` of the whole buffer belongs to."""
        return bisect.bisect_right(self.offsets, offset) - 1

    def zero_rest(self, whole: torch.Tensor, written: set[int]) -> None:
        """Zero what does not belong to the parameters `written`."""
        end = 0
        for index in sorted(written):
            if self.offsets[index] > end:
                whole[end : self.offsets[index]].zero_()
            end = self.offsets[index] + self.numels[index]
        if end < self.numel:
            whole[end:].zero_()
