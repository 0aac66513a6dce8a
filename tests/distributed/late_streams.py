"""An accelerator's streams on a machine that has none: what is queued beside the computing happens late.

On the two devices of `two_devices`, what is queued on a stream beside the computing is carried out when somebody waits
for it, not before: until then memory that it writes holds nan (whole numbers: the largest). Memory of the stream that
computes must be held by the engine until that has waited for whoever reads it: here, too, it is gone else. So a wait
that is missing, or a buffer that is let go too early, gives other numbers, as it would on an accelerator now and then.

`waits` has what the host would wait for the accelerator with, by what it calls.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves

from distributed.two_devices import _CROSS, DEVICE, HOST, TwoDevices

_ASKS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "unique_dim", "_unique2", "is_nonzero"}
_INDEXES = {"index", "index_put_", "index_put", "_unsafe_index"}


def _nonsense(dtype: torch.dtype) -> float | int:
    if dtype == torch.bool:
        return True
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max


class Event:
    """A place in a queue."""

    def __init__(self, stream: Stream, end: int) -> None:
        self.stream, self.end = stream, end

    def reach(self) -> None:
        stream = self.stream
        while stream.done < self.end:
            stream.done += 1
            stream.queue.popleft()()

    def synchronize(self) -> None:
        self.stream.mode.waits["synchronize"] += 1
        self.reach()


class Stream:
    """Beside the computing."""

    def __init__(self, mode: LateStreams) -> None:
        self.mode, self.done, self.queued = mode, 0, 0
        self.queue: deque[Callable[[], None]] = deque()

    def record_event(self) -> Event:
        return Event(self, self.queued)

    def add(self, work: Callable[[], None]) -> None:
        self.queue.append(work)
        self.queued += 1


class Computing:
    """The stream that computes, at once: `wait_event` is all that others ask of it."""

    def __init__(self, mode: LateStreams) -> None:
        self.mode = mode

    def wait_event(self, event: Event) -> None:
        event.reach()

    def record_event(self) -> Event:
        return self.mode.beside_it[-1].record_event()


class LateStreams(TwoDevices):
    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.beside_it: list[Stream] = []
        self.own: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()  # memory of streams beside the computing

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        self._note(func.overloadpacket.__name__, args, kwargs)
        if not self.beside_it or func.is_view:
            return super().__torch_dispatch__(func, types, args, kwargs)
        places = {self.place_of(a) for a in tree_leaves(args) if isinstance(a, torch.Tensor)}
        if places == {HOST.index} and kwargs.get("device") in (None, HOST):  # the host does it itself, now
            return super().__torch_dispatch__(func, types, args, kwargs)
        stream = self.beside_it[-1]
        copies = func.overloadpacket.__name__ == "copy_"
        out = args[0] if copies else super().__torch_dispatch__(func, types, args, kwargs)
        if not any(isinstance(a, torch.Tensor) for a in tree_leaves(args)):
            self.own.add(out.untyped_storage())
            return out  # only memory
        if not copies:
            self.own.add(out.untyped_storage())
        source = self._as_long_as_it_is_held(args[1 if copies else 0])
        rest = args[2:] if copies else args[1:]

        def work() -> None:
            with self:
                if copies:
                    super(LateStreams, self).__torch_dispatch__(func, types, (out, source(), *rest), kwargs)
                else:
                    with torch.autograd._unsafe_preserve_version_counter(out):  # it was written when it was queued
                        out.copy_(func(source(), *rest, **kwargs))

        with torch.utils._python_dispatch._disable_current_modes():
            out.fill_(_nonsense(out.dtype))
        stream.add(work)
        return out

    def _as_long_as_it_is_held(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        storage = tensor.untyped_storage()
        if storage in self.own or self.place_of(tensor) == HOST.index:  # torch holds page-locked memory
            return lambda: tensor
        known, where = weakref.ref(storage), (tensor.storage_offset(), tensor.size(), tensor.stride())
        empty = tensor.new_empty(0)

        def found() -> torch.Tensor:
            storage = known()
            assert storage is not None, "memory was let go while a stream still had to read it"
            return empty.set_(storage, *where)

        return found

    def _note(self, name: str, args: Any, kwargs: Any) -> None:
        """Count what the host waits for."""
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        places = {self.place_of(t) for t in tensors}
        here = DEVICE.index in places
        asked = kwargs.get("device")
        crosses = name in _CROSS and (
            len(places - {None}) > 1 or (asked is not None and asked.index and places - {asked.index, None})
        )
        blocking = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        masked = name in _INDEXES and any(t is not None and t.dtype == torch.bool for t in args[1])
        if (here and (name in _ASKS or masked)) or (crosses and blocking):
            self.waits[name] += 1


@contextlib.contextmanager
def late_streams() -> Iterator[LateStreams]:
    """As `two_devices`, with queues."""
    from shardproof.train.model import activations
    from shardproof.zero import api
    from shardproof.zero.comm import collectives
    from shardproof.zero.ranks import turns
    from shardproof.zero.schedule import home

    mode = LateStreams()

    def home_of(offload: str | None, device: torch.device) -> home.Home | None:
        if offload is None:
            return None
        made = home.Home(HOST, DEVICE, frozen=offload != "optimizer", folder=offload.partition(":")[2] or None)
        made.queues = True
        return made

    @contextlib.contextmanager
    def side_stream(device: torch.device, stream: Stream | None = None) -> Iterator[Stream]:
        mode.beside_it.append(stream or Stream(mode))
        try:
            yield mode.beside_it[-1]
        finally:
            mode.beside_it.pop()

    plain = collectives.Collectives.gather

    def gather(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Between processors it begins at once, and not when it is its turn on a stream."""
        streams, mode.beside_it = mode.beside_it, []
        for stream in streams:
            stream.record_event().reach()
        try:
            return plain(self, *args, **kwargs)
        finally:
            mode.beside_it = streams

    with (
        mock.patch.object(collectives.Collectives, "gather", gather),
        mock.patch.object(api, "_device", lambda device: torch.device(device)),
        mock.patch.object(api, "home_of", home_of),
        mock.patch.object(home, "side_stream", side_stream),
        mock.patch.object(activations, "side_stream", side_stream),
        mock.patch.object(torch.accelerator, "current_stream", return_value=Computing(mode)),
        mock.patch.object(turns, "_disable_current_modes", contextlib.nullcontext),
        mode,
    ):
        yield mode
