"""Offload: masters, gradients and optimizer state live away from the device that computes.

[Note: home] Their home is host memory, or files in a folder that are mapped into it, so that the kernel writes back and
drops unused pages. It concerns three places: a gather sends a copy that was brought to the device, a reduced gradient
is stored at home, and the optimizer steps there, on plain CPU tensors. Nothing else changes: not the order of gathers
and reductions, and so not a single bit of the result.

With an accelerator, memory at home is page-locked, and copies overlap with computing: those to the device on one
stream, those home on another. The computing stream waits for data brought to it; a few copies home may lag behind it,
so only these keep memory on the device. The host adds to a gradient at home as data arrives, lagging by as many copies.
`settle` has the host wait for all copies; it is called before anything reads or writes data at home.

A page of a file that is not in memory is read when it is touched, one by one, while the code that touches it waits. So
a thread touches the pages that are expected to be needed next. Only copies to and from page-locked memory overlap with
computing, and mapped files are not page-locked: the host makes an extra copy through memory that is.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch

from shardproof.errors import EngineError
from shardproof.zero.device import BufferPool, side_stream

OFFLOADS = "optimizer", "all"  # and nvme:FOLDER
AHEAD = 2  # copies home that computing may be ahead of
EXPECTED = 8  # parts of files that wait to be read: a disk that lags behind is not asked for more

_POPULATE_READ, _WILL_NEED = 22, 3  # of madvise; the first is known to Linux since 5.14, the second asks for less


class Arrival:
    """A copy in flight, with the interface of a collective: `wait` has the current stream wait for it."""

    def __init__(self, event: torch.Event | None, device: torch.device) -> None:
        self.event, self.device = event, device

    def wait(self) -> None:
        if self.event is not None:
            torch.accelerator.current_stream(self.device).wait_event(self.event)


class Home:
    """Where offloaded parts of a model live.

    Args:
        device: of the host. `away`: the device that computes.
        frozen: whether frozen parameters live here too.
        folder: keep everything in files of this folder.

    Attributes:
        apart: whether it is other memory than that of the computing device; `queues`: whether copies between the two
            are queued.

    Raises:
        EngineError: the folder is not there, or cannot be written to.
    """

    def __init__(self, device: torch.device, away: torch.device, frozen: bool, folder: str | None = None) -> None:
        self.device, self.away, self.frozen, self.folder = device, away, frozen, folder
        self.apart, self.queues = device != away, away.type not in ("cpu", "meta")
        self._landing: deque[tuple[torch.Event, torch.Tensor]] = deque()
        self._arriving: deque[tuple[torch.Event | None, Callable[[torch.Tensor], object], torch.Tensor]] = deque()
        self._landed: torch.Event | None = None
        self._left: torch.Event | None = None
        self._incoming: torch.Stream | None = None
        self._outgoing: torch.Stream | None = None
        self._reader: ThreadPoolExecutor | None = None
        self._expected: list[Future[None]] = []
        self._files = BufferPool(device, self._map)
        self._addresses: set[int] = set()  # of the files, which are kept as long as this is
        if folder is not None:
            self.take(1, torch.uint8)

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised 1-D tensor that lies here."""
        return self._locked(numel, dtype) if self.folder is None else self._files.take(numel, dtype)

    def _map(self, size: int) -> torch.Tensor:
        """Zeros in a file without a name: it goes with the process, however that ends."""
        size = max(size, 16)  # there is no file of nothing, and torch.save wants a whole number of elements
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk is told now, not in the middle of a step
                lines = mmap.mmap(file.fileno(), size)
        except OSError as problem:
            raise EngineError(
                f"offload='nvme:{self.folder}': {size / 1e9:.2f} GB cannot be kept there ({problem.strerror}). Name a "
                "folder on a disk with room for 18 bytes per trained parameter and rank's share."
            ) from None
        file_bytes = torch.frombuffer(lines, dtype=torch.uint8)
        self._addresses.add(file_bytes.data_ptr())
        return file_bytes

    def place(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A copy of `values`, 1-D, that lies here. It may be read after `settle`."""
        here = self.take(values.numel(), dtype)
        if self.folder is None or not self.queues:
            return self._land(values, here)
        self._hand_over(values, here, here.copy_)
        return here

    def add(self, total: torch.Tensor, values: torch.Tensor) -> None:
        """Add `values` to `total`, which lies here, when they have arrived. It may be read after `settle`."""
        self._hand_over(values, total, total.add_)

    def _hand_over(self, values: torch.Tensor, total: torch.Tensor, take_in: Callable[[torch.Tensor], object]) -> None:
        """Have `take_in` called with what arrives, by the host: at `settle`, or when more than a few wait for it."""
        arriving = self._locked(values.numel(), total.dtype)
        self._land(values, arriving)
        self._arriving.append((self._landed, take_in, arriving))
        while len(self._arriving) > (AHEAD if self.queues else 0):
            self._take_in_oldest()

    def _locked(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self.device, pin_memory=self.queues)

    def _take_in_oldest(self) -> None:
        landed, take_in, arrived = self._arriving.popleft()
        if landed is not None:
            landed.synchronize()
        take_in(arrived)

    def _land(self, values: torch.Tensor, here: torch.Tensor) -> torch.Tensor:
        """Copy `values` to `here`, beside the computing."""
        if not self.queues or values.device == self.device:
            return here.copy_(values)
        with side_stream(values.device, self._outgoing) as self._outgoing:
            here.copy_(values.to(here.dtype), non_blocking=True)
            self._landed = self._outgoing.record_event()
            self._landing.append((self._landed, values))
        while len(self._landing) > AHEAD:  # memory is free for computing once that waits for the copy
            Arrival(self._landing.popleft()[0], values.device).wait()
        return here

    def cast(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What lies here in `dtype`, here: itself, or a copy. It rounds as the device would, and is half of what has to
        be brought. The host computes it while the device does what was queued before."""
        return values if values.dtype == dtype else self.take(values.numel(), dtype).copy_(values)

    @contextmanager
    def incoming(self) -> Iterator[None]:
        """What is brought inside, and queued behind it, does not hold up the computing. See `arrival`."""
        if not self.queues:
            yield
            return
        with side_stream(self.away, self._incoming) as self._incoming:
            yield

    def bring(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A copy of what lies here, for computing with, in `dtype`; inside of `incoming`."""
        if self.folder is not None and self.queues:
            values = self._locked(values.numel(), values.dtype).copy_(values)
        there = values.to(self.away, non_blocking=True).to(dtype)
        if self.queues:
            self._left = torch.accelerator.current_stream(self.away).record_event()
        return there

    def expect(self, values: torch.Tensor) -> None:
        """`values`, which lie here, are about to be read: have them in memory by then."""
        if self.folder is None or not values.numel():
            return
        self._expected = [part for part in self._expected if not part.done()]
        if len(self._expected) < EXPECTED:
            self._reader = self._reader or ThreadPoolExecutor(1, "shardproof reads ahead")
            self._expected.append(self._reader.submit(_read_pages, values.data_ptr(), values.nbytes))

    def arrival(self) -> Arrival:
        """To be waited for before what was last brought is used."""
        return Arrival(self._left, self.away)

    def settle(self) -> None:
        """Wait until everything has arrived that was placed here, and left that was brought away."""
        for event in (self._landed, self._left):
            if event is not None:
                event.synchronize()
        self._landing.clear()
        self._landed = self._left = None
        while self._arriving:
            self._take_in_oldest()

    def keep_state(self, state: dict[str, object], numel: int) -> None:
        """Move what an optimizer keeps of a slice of `numel` elements into files, if that is where things are kept."""
        if self.folder is None:
            return
        for key, value in state.items():
            if not isinstance(value, torch.Tensor) or value.numel() != numel or not value.dim():
                continue
            if value.untyped_storage().data_ptr() not in self._addresses:
                state[key] = self.place(value.reshape(-1), value.dtype).view(value.shape)


def _read_pages(address: int, nbytes: int) -> None:
    start = address - address % mmap.PAGESIZE
    part = ctypes.c_void_p(start), ctypes.c_size_t(address + nbytes - start)
    madvise = ctypes.CDLL(None).madvise  # that of mmap objects keeps Python from going on meanwhile
    if madvise(*part, _POPULATE_READ):
        madvise(*part, _WILL_NEED)


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
