"""The contents of other engines' checkpoints in our terms, and how their files are read.

[Note: foreign pickles]
DeepSpeed's files are pickles. Nothing in them is executed or needs DeepSpeed: anything but tensors, numbers, strings
and containers becomes an empty stand-in. The `.metadata` of torch.distributed.checkpoint is read by torch, which does
execute it: convert only checkpoints you trust.
"""

from __future__ import annotations

import pickle
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardproof.checkpoint.contents import STATE
from shardproof.checkpoint.parts import Part
from shardproof.errors import CheckpointError

_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.)")


def own_name(name: str) -> str:
    """A parameter's name in the model itself, without the prefixes of `torch.compile`, FSDP and checkpointing."""
    return _WRAPPERS.sub("", name).lstrip(".")


@dataclass
class Found:
    """The contents of a checkpoint.

    Attributes:
        kind: the engine that wrote it, in a word or two.
        parts: ranges of flattened tensors; a tensor may consist of several with the same name.
        groups: the optimizer's groups, with the names of their parameters; empty without an optimizer.
        scalars: scalar state of the optimizer, by parameter and name.
        values: everything else.
        lost: names of values that are not read, because reading would execute them.
        frozen_unknown: the writer left frozen parameters out, or had none; their names are not in it.
    """

    kind: str
    parts: list[Part] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    frozen_unknown: bool = False

    def add(self, name: str, shape: Any, first: int, local: torch.Tensor) -> None:
        self.parts.append(Part(name, tuple(shape), first, local.detach().reshape(-1), False))

    def add_state(self, name: str, shape: Any, first: int, state: dict[str, Any], at: int, count: int) -> None:
        """Add the optimizer's state for a range of a parameter, found at `at` in flat tensors."""
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                self.add(f"{STATE}{name}.{key}", shape, first, value[at : at + count])
            else:  # one tensor for a whole group; the optimizer updates it in place for each parameter
                own = value.clone() if isinstance(value, torch.Tensor) else value
                self.scalars.setdefault(name, {})[key] = own


class _StandIn:
    """Stands in for any class or function that a pickle names."""

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
    """The pickle module to pass to `torch.load`."""

    Unpickler = _Unpickler
    load = staticmethod(pickle.load)


def read_pickle(file: Path) -> Any:
    """Read a pickle; tensors stay in the file until they are accessed."""
    try:
        return torch.load(file, map_location="cpu", mmap=True, weights_only=False, pickle_module=_Pickle)
    except Exception as error:
        raise CheckpointError(f"{file} cannot be read: {reason_of(error)}.") from error


def reason_of(error: Exception) -> str:
    """The reason in one line. A damaged pickle may raise anything, so its class is named, too."""
    text = str(error).strip().partition("\n")[0].rstrip(": .")
    told = isinstance(error, CheckpointError | OSError | RuntimeError | EOFError | pickle.UnpicklingError)
    return f"{'' if told else f'{type(error).__name__}: '}{text}" if text else type(error).__name__
