"""Readers of tensors in safetensors files: each reads only a range of a parameter's values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
CODES = torch.float8_e4m3fn, torch.float8_e5m2  # usually packed weights


@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file. The file is open only while it is read, so that its pages are released."""

    file: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def whole(self) -> torch.Tensor:
        from safetensors import safe_open

        with safe_open(self.file, framework="pt") as content:
            return content.get_tensor(self.name)

    def __call__(self, first: int, last: int) -> torch.Tensor:
        """Elements `first` to `last` (exclusive) of the flattened tensor; only the rows that contain them are read from
        the file."""
        from safetensors import safe_open

        if not self.shape:
            return self.whole().reshape(-1)
        row = torch.Size(self.shape[1:]).numel()
        begin, end = first // row, -(-last // row)
        with safe_open(self.file, framework="pt") as content:
            rows = content.get_slice(self.name)[begin:end]
        return rows.reshape(-1)[first - begin * row : last - begin * row]


@dataclass(frozen=True)
class Entry(Stored):
    """One entry of a tensor along its first dimension, which has length 1 here."""

    number: int

    @classmethod
    def of(cls, stored: Stored, number: int) -> Entry:
        return cls(stored.file, stored.name, stored.shape, stored.dtype, number)

    def whole(self) -> torch.Tensor:
        numel = torch.Size(self.shape[1:]).numel()
        return self(self.number * numel, (self.number + 1) * numel).view(1, *self.shape[1:])


Sources = Sequence[tuple[str, Stored]]  # tensors in the files, each with the pattern that its name matches
Convert = Callable[[Sources], torch.Tensor]


@dataclass(frozen=True)
class Converted:
    """A tensor that transformers makes from others: converted in full, then sliced."""

    convert: Convert
    sources: Sources

    def __call__(self, first: int, last: int) -> torch.Tensor:
        return self.convert(self.sources).reshape(-1)[first:last]


@dataclass(frozen=True)
class Stacked:
    """Experts that are separate in the files but one tensor in the model, along its first dimension: they are converted
    one after the other, and only those in the range.

    Attributes:
        experts: the sources of each.
        numel: elements per expert.
    """

    convert: Convert
    experts: Sequence[Sources]
    numel: int
    dtype: torch.dtype

    def __call__(self, first: int, last: int) -> torch.Tensor:
        out = torch.empty(last - first, dtype=self.dtype)
        for number in range(first // self.numel, -(-last // self.numel)):
            at = number * self.numel
            begin, end = max(first, at), min(last, at + self.numel)
            out[begin - first : end - first] = self.convert(self.experts[number]).reshape(-1)[begin - at : end - at]
        return out


UNPACKS = "Fp8Dequantize"  # the operation of transformers that unpacks each tensor by itself


def by_expert(operations: Sequence[Any], sources: Sources, shape: Sequence[int]) -> list[Sources] | None:
    """The sources of each expert, if the operations of a converter stack tensors, or unpack a stack of them, without
    combining values across experts.

    Args:
        operations: the operations of transformers' `WeightConverter`.
        shape: the shape of the result.

    Returns: None if a part of the result may depend on all sources.
    """
    from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose

    kinds = [type(operation).__name__ for operation in operations]
    if kinds == ["Mxfp4Dequantize"]:
        return [[(pattern, Entry.of(source, number)) for pattern, source in sources] for number in range(shape[0])]
    rest = operations[1:] if kinds[0] == UNPACKS else operations
    if not rest or type(rest[0]) is not MergeModulelist or rest[0].dim != 0:
        return None
    for operation in rest[1:]:
        inside = type(operation) is Concatenate and operation.dim > 0
        turned = type(operation) is Transpose and not operation.check_dims and min(operation.dim0, operation.dim1) > 0
        if not (inside or turned):
            return None
    lists: dict[str, list[Stored]] = {}
    for pattern, source in sources:
        lists.setdefault(pattern, []).append(source)
    if any(len(each) != shape[0] for each in lists.values()):
        return None
    return [[(pattern, each[number]) for pattern, each in lists.items()] for number in range(shape[0])]


def stored(files: Iterable[str]) -> dict[str, Stored]:
    """The tensors in safetensors files, by name; only headers are read.

    Raises:
        KeyError: a tensor has a dtype that is not in DTYPES; its args are name and dtype.
    """
    from safetensors import safe_open

    found = {}
    for file in files:
        with safe_open(file, framework="pt") as content:
            for name in content.keys():  # noqa: SIM118  (not a dict)
                part = content.get_slice(name)
                dtype = DTYPES.get(part.get_dtype())
                if dtype is None:
                    raise KeyError(name, part.get_dtype())
                found[name] = Stored(str(file), name, tuple(part.get_shape()), dtype)
    return found
