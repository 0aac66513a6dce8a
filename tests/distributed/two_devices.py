"""Two devices on a machine that has one: the processor, cut in two by names.

torch takes `cpu:1` and `cpu:2` for the CPU and forgets the index. `TwoDevices` remembers it: it sees every operation
below autograd, notes for each memory on which of the two it was made, and refuses an operation between the two, as an
accelerator would. Copies (`to`, `copy_`, indexing by what was moved) may cross. So the values are real, and code
that mixes devices fails.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE, HOST = torch.device("cpu", 1), torch.device("cpu", 2)

_CROSS = {"copy_", "_to_copy", "_copy_from"}


class Mixed(AssertionError):
    """An operation met tensors of both devices."""


class TwoDevices(TorchDispatchMode):
    """Where each memory lies, by the index of the device that was asked for; what did not say is anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.places: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
        self.crossings = 0

    def place_of(self, tensor: torch.Tensor) -> int | None:
        return None if tensor.is_sparse else self.places.get(memory_of(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        name = func.overloadpacket.__name__
        found = {self.place_of(t) for t in inputs if t.dim()} - {None}
        asked = kwargs.get("device")
        if len(found) > 1:
            if name not in _CROSS:
                raise Mixed(f"{func}: {[(tuple(t.shape), self.place_of(t)) for t in inputs]}")
            self.crossings += 1
        place = asked.index if asked is not None and asked.index else next(iter(found), None)
        if name in _CROSS and asked is not None and asked.index and found - {asked.index}:
            self.crossings += 1
        result = func(*args, **kwargs)
        if place is not None and name != "copy_":
            for t in tree_leaves(result):
                if isinstance(t, torch.Tensor) and not t.is_sparse:
                    self.places.setdefault(memory_of(t), place)
        return result


def memory_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Also inside of `torch.func.grad` and `vmap`, which wrap tensors."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.untyped_storage()


@contextlib.contextmanager
def two_devices() -> Iterator[TwoDevices]:
    """Inside, the engine computes on one device and `offload` keeps things on the other."""
    from unittest import mock

    from shardproof.zero import api
    from shardproof.zero.ranks import turns
    from shardproof.zero.schedule import home

    def home_of(offload: str | None, device: torch.device) -> home.Home | None:
        return None if offload is None else home.Home(HOST, DEVICE, frozen=offload == "all")

    with (
        mock.patch.object(api, "_device", lambda device: torch.device(device)),
        mock.patch.object(api, "home_of", home_of),
        mock.patch.object(turns, "_disable_current_modes", contextlib.nullcontext),
        TwoDevices() as mode,
    ):
        yield mode
