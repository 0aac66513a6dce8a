"""Offload: masters, gradients and optimizer state live elsewhere than where the model computes.

[Note: home]
The home is the host's memory, or files in a folder that are mapped into it, so that the kernel writes back and drops
what is not in use. Three places meet it: a gather sends a copy that was brought to the device, a reduced gradient is
placed at home, and the optimizer steps there, on plain CPU tensors as it would anywhere. Nothing else changes: not the
order of gathers and reductions, and so not one bit of the result.

With an accelerator, memory at home is page-locked and copies are queued: towards the device on the present stream,
home on a stream of their own. `settle` waits for them; it is called before anybody reads or writes what lies at home.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections import deque

import torch

from shardproof.errors import EngineError
from shardproof.zero.device import beside, storage_uses

OFFLOADS = "optimizer", "all"  # and nvme:FOLDER


class Home:
    """Where the parts of a model live.

    Args:
        device: of the host. `away` is where the model computes.
        frozen: whether parameters that are not trained live here too.
        folder: keep everything in files of this folder.

    Raises:
        EngineError: the folder is not there, or cannot be written to.
    """

    def __init__(self, device: torch.device, away: torch.device, frozen: bool, folder: str | None = None) -> None:
        self.device, self.away, self.frozen, self.folder = device, away, frozen, folder
        self._landing: deque[tuple[torch.Event, torch.Tensor]] = deque()
        self._left: torch.Event | None = None
        self._stream: torch.Stream | None = None
        self._files: dict[int, list[torch.UntypedStorage]] = {}
        self._addresses: set[int] = set()  # of the files, which are kept as long as this is
        if folder is not None:
            self._map(1)

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised 1-D tensor that lies here."""
        if self.folder is not None:
            kept = self._files.setdefault(max(1, numel) * dtype.itemsize, [])
            storage = next((s for s in kept if storage_uses(s) == 1), None)
            if storage is None:
                storage = self._map(max(1, numel) * dtype.itemsize)
                kept.append(storage)
                self._addresses.add(storage.data_ptr())
            return torch.empty(0, dtype=dtype, device=self.device).set_(storage, 0, (numel,), (1,))
        return torch.empty(numel, dtype=dtype, device=self.device, pin_memory=self.away.type != "cpu")

    def _map(self, size: int) -> torch.UntypedStorage:
        """Zeros in a file without a name: it goes with the process, however that ends."""
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk is told now, not in the middle of a step
                lines = mmap.mmap(file.fileno(), size)
        except OSError as problem:
            raise EngineError(
                f"offload='nvme:{self.folder}': {size / 1e9:.2f} GB cannot be kept there ({problem.strerror}). Name a "
                "folder on a disk with room for 16 bytes per trained parameter and rank's share."
            ) from None
        return torch.frombuffer(lines, dtype=torch.uint8).untyped_storage()

    def place(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A copy of `values`, 1-D, that lies here. It may be read after `settle`."""
        here = self.take(values.numel(), dtype)
        if values.device.type == "cpu":
            return here.copy_(values)
        with beside(values.device, self._stream) as self._stream:
            here.copy_(values.to(dtype), non_blocking=True)
            self._landing.append((self._stream.record_event(), values))  # its memory is not free before it was read
        while self._landing and self._landing[0][0].query():
            self._landing.popleft()
        return here

    def bring(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A copy of what lies here, for computing with, in `dtype`."""
        there = values.to(self.away, non_blocking=True).to(dtype)
        if self.away.type != "cpu":
            self._left = torch.accelerator.current_stream(self.away).record_event()
        return there

    def settle(self) -> None:
        """Wait until everything has arrived that was placed here, and left that was brought away."""
        while self._landing:
            self._landing.popleft()[0].synchronize()
        if self._left is not None:
            self._left.synchronize()
            self._left = None

    def keep_state(self, state: dict[str, object], numel: int) -> None:
        """Move what an optimizer keeps of a slice of `numel` elements into files, if that is where things are kept."""
        if self.folder is None:
            return
        for key, value in state.items():
            if not isinstance(value, torch.Tensor) or value.numel() != numel or not value.dim():
                continue
            if value.untyped_storage().data_ptr() not in self._addresses:
                state[key] = self.place(value.reshape(-1), value.dtype).view(value.shape)

    def __deepcopy__(self, memo: dict[int, object]) -> Home:
        return self


def home_of(offload: str | None, device: torch.device) -> Home | None:
    """The home that `shard(..., offload=...)` asks for; None if everything stays where it computes.

    Raises:
        EngineError: there is no such offload, or its folder cannot be used.
    """
    host = torch.device("cpu")
    if offload is None or (offload in OFFLOADS and device.type == "cpu"):
        return None
    if offload in OFFLOADS:
        return Home(host, device, frozen=offload == "all")
    kind, _, folder = offload.partition(":") if isinstance(offload, str) else ("", "", "")
    if kind != "nvme" or not folder:
        raise EngineError(f"offload={offload!r} is not one of 'optimizer', 'all', 'nvme:FOLDER'.")
    return Home(host, device, frozen=True, folder=folder)
