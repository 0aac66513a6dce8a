"""The only file that calls torch.distributed's collectives.

[Note: exchanging by hand on the CPU]
gloo's all-gather and reduce-scatter copy more than they must: for 12 MB between two processes, plain
sends and receives into the slots of the flat buffer take 0.5 to 0.9 of the time of the all-gather and
0.5 of that of the reduce-scatter (benchmarks/collectives.py), and leave the processor to the model.
So on the CPU a gather and a reduction are exchanges of chunks, added in the order of the ranks: every
world size and stage then adds in the same order. Other devices use their backend's collectives.
The messages carry a tag that says what they are for: ranks that disagree wait, they never compute with
each other's weights.

[Note: two groups]
Beside the group of the user (the default one, or that of the mesh) there is a gloo group of ours with the same
ranks. On the CPU gathers and reductions go through ours: they may start at any moment between collectives
of the user's own, and the small words by which ranks agree do not come behind them on one connection. With an
accelerator the data goes through the user's group, and ours carries the words, which never wait for the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist

from shardproof.zero.device import BufferPool

# torch 2.13 renamed the tensor collectives and deprecated the old names; torch 2.11 has only those.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


group_named = torch._C._distributed_c10d._resolve_process_group  # type: ignore[attr-defined]

T = TypeVar("T")

# By name of a process group: its identity, and the name of the gloo group beside it. See [Note: two groups].
_second_groups: dict[str, tuple[int, str]] = {}

_WORD_TAG = 1 << 30
_NO_WORD = -1


class Size(NamedTuple):
    """What an operation moves: elements of the whole buffer, and whether ranks hold parts of it."""

    numel: int
    dtype: torch.dtype
    sharded: bool


# What nobody has waited for yet. A model may go while its messages are on their way; to free a buffer that gloo is
# filling would block for ever.
_under_way: set[Pending] = set()


class Pending:
    """A collective under way. `wait()` returns its result, safe to use on the current stream."""

    __slots__ = ("_finish", "_keep", "_result", "_works")

    def __init__(
        self, works: list[Any], result: torch.Tensor, keep: Any = None, finish: Callable[[], object] | None = None
    ) -> None:
        self._works, self._result, self._keep, self._finish = works, result, keep, finish
        _under_way.add(self)

    def wait(self) -> torch.Tensor:
        _under_way.discard(self)
        for work in self._works:
            work.wait()
        if self._finish is not None:
            self._finish()
        self._works, self._keep, self._finish = [], None, None
        return self._result


class Collectives:
    """The collectives of one process group. Reductions sum; the caller divides.

    Args:
        group: the ranks that share a model, or None for the default group (this process alone where there is
            none). The default group is not kept here: it must be able to end before the interpreter does.
        device: where the tensors live.
        pool: where buffers for incoming chunks come from.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, pool: BufferPool) -> None:
        self.group, self.device, self.pool = group, device, pool
        there = dist.is_available() and dist.is_initialized()
        self.size = dist.get_world_size(group) if there else 1
        self.rank = dist.get_rank(group) if there else 0
        self.by_hand = device.type == "cpu" and self.size > 1
        default = dist.group.WORLD if there else None
        self.group_name = (group or default).group_name if there else ""  # type: ignore[union-attr]
        self.group_identity = id(group or default)
        self._awaited: dict[int, deque[tuple[torch.Tensor, Any]]] = {}
        self._words: deque[tuple[torch.Tensor, list[Any]]] = deque()
        self._second: Any = self.once(_second_groups, self.new_gloo_group) if self.size > 1 else ""

    def once(self, known: dict[str, tuple[int, T]], make: Callable[[], T]) -> T:
        """What `make` returns, called once for each process group. `known` holds it by name of the group, with the
        group's identity: when a group has ended, another one may get its name."""
        identity, found = known.get(self.group_name, (0, None))
        if found is None or identity != self.group_identity:
            found = make()
            known[self.group_name] = self.group_identity, found
        return found

    def new_gloo_group(self) -> str:
        """The name of a new gloo group of the same ranks; it is not kept for the reason that the default group is
        not. `group_named` finds it."""
        ranks = dist.get_process_group_ranks(self.group or dist.group.WORLD)
        part = len(ranks) != dist.get_world_size()
        return str(dist.new_group(ranks, backend="gloo", use_local_synchronization=part).group_name)

    @property
    def _first(self) -> Any:
        return self.group or dist.group.WORLD

    @property
    def _bulk(self) -> Any:
        """The group of gathers and reductions."""
        return group_named(self._second) if self.device.type == "cpu" else self._first

    @property
    def _control(self) -> Any:
        """The group of words."""
        return self._first if self.device.type == "cpu" else group_named(self._second)

    def __deepcopy__(self, memo: dict[int, object]) -> Collectives:
        return self

    def _swap(self, sends: list[torch.Tensor], receives: list[torch.Tensor], tag: int) -> list[Any]:
        """Send `sends[r]` to rank r and fill `receives[r]` from it, for every other rank r."""
        works, bulk = [], self._bulk
        for distance in range(1, self.size):
            source, target = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            works.append(bulk.recv([receives[source]], source, tag))
            works.append(bulk.send([sends[target]], target, tag))
        return works

    def gather(self, whole: torch.Tensor, shard: torch.Tensor, tag: int) -> Pending:
        """All-gather equal 1-D shards into `whole`, in rank order. Moves bytes: any dtype, any backend."""
        if not self.by_hand:
            out, part = whole.view(torch.uint8), shard.view(torch.uint8)
            return Pending([_all_gather(out, part, group=self._bulk, async_op=True)], whole, shard)
        slots = list(whole.view(self.size, -1))
        slots[self.rank].copy_(shard)
        return Pending(self._swap([shard] * self.size, slots, tag), whole, shard)

    def reduce_scatter(self, whole: torch.Tensor, tag: int) -> Pending:
        """Sum `whole` over ranks; the result is this rank's part. `whole` must not be touched until then."""
        shard = self.pool.take(whole.numel() // self.size, whole.dtype)
        if not self.by_hand:
            return Pending([_reduce_scatter(shard, whole, group=self._bulk, async_op=True)], shard, whole)
        chunks = list(whole.view(self.size, -1))
        incoming = self.pool.take(shard.numel() * (self.size - 1), whole.dtype).view(self.size - 1, -1)
        parts = [*incoming[: self.rank], chunks[self.rank], *incoming[self.rank :]]
        works = self._swap(chunks, parts, tag)
        return Pending(works, shard, (whole, incoming), lambda: _add_in_order(parts, shard))

    def all_reduce(self, whole: torch.Tensor, tag: int) -> Pending:
        """Sum `whole` over ranks, in place. The backend's own, which adds while the data is in cache; it knows no
        tags, so ranks must start it in one order."""
        return Pending([dist.all_reduce(whole, group=self._bulk, async_op=True)], whole)

    def pay(self, operation: int, size: Size, tag: int) -> None:
        """Take part in an operation of a model that is gone: its result is not used by anybody."""
        whole = torch.zeros(size.numel, dtype=size.dtype, device=self.device)
        if operation % 2 == 0:
            self.gather(whole, whole[: size.numel // self.size].clone(), tag).wait()
        else:
            (self.reduce_scatter if size.sharded else self.all_reduce)(whole, tag).wait()

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a small tensor over ranks, in place, and wait."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """The element-wise maximum of a small tensor over ranks, in place, and wait."""
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return tensor

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Overwrite a contiguous `tensor` with the copy of rank `source`."""
        if self.size > 1:
            dist.broadcast(tensor.view(-1).view(torch.uint8), group=self.group, group_src=source)
        return tensor

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """The object that rank `source` passed, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self._control, group_src=source)
        return box[0]

    def send_word(self, word: int) -> None:
        """Send a number that is not negative to every other rank, without waiting.

        One is awaited from each of them at the same time: gloo sends only what the receiver has asked for.
        """
        message, control = torch.tensor([word]), self._control
        others = [r for r in range(self.size) if r != self.rank]
        for r in others:
            self._await_word(r)
        works = [control.send([message], r, _WORD_TAG) for r in others]
        self._words.append((message, works))
        if len(self._words) > 64:  # by now the oldest has long arrived: let go of it
            for work in self._words.popleft()[1]:
                work.wait()

    def forget_words(self) -> None:
        """Let go of what was sent: nothing of it must be left when the process group ends."""
        while self._words:
            for work in self._words.popleft()[1]:
                work.wait()

    def _await_word(self, rank: int) -> None:
        message = torch.tensor([_NO_WORD])
        work = self._control.recv([message], rank, _WORD_TAG)
        self._awaited.setdefault(rank, deque()).append((message, work))

    def word_is_here(self, rank: int) -> bool:
        """Whether `receive_word` would return without waiting."""
        awaited = self._awaited.get(rank)
        return awaited is not None and len(awaited) > 0 and awaited[0][0].item() != _NO_WORD

    def receive_word(self, rank: int) -> int:
        """Wait for the next number that `rank` sends."""
        if not self._awaited.get(rank):
            self._await_word(rank)
        message, work = self._awaited[rank].popleft()
        work.wait()
        return int(message)

    def close_connections(self) -> None:
        """Make every wait of the group of words end with an error, in any thread: a receive that runs out of time
        has gloo close all connections. The group is of no use afterwards."""
        for group in (self._first, group_named(self._second)):
            try:
                other = (self.rank + 1) % self.size
                work = dist.irecv(torch.zeros(1), group=group, group_src=other, tag=_WORD_TAG + 1)
                cast("dist.Work", work).wait(timedelta(milliseconds=1))
            except RuntimeError:  # it ran out of time, or has no backend for the CPU
                continue

    def lost_ranks(self) -> list[int]:
        """The ranks whose connection is closed. Closes all others, too: only for a program that ends."""
        lost, message, control = [], torch.tensor([_NO_WORD]), self._control
        works = {}
        for r in range(self.size):
            if r != self.rank:
                try:
                    works[r] = control.send([message], r, _WORD_TAG + 1)
                except RuntimeError:
                    lost.append(r)
        for r, work in works.items():
            try:
                work.wait(timedelta(milliseconds=1))
            except RuntimeError as problem:
                if "Connection" in str(problem):
                    lost.append(r)
        return lost

    def agree(self, flags: torch.Tensor, numbers: Sequence[int] = ()) -> list[bool]:
        """Element-wise maximum over ranks of `flags`, a small int64 tensor on the CPU, in place. Returns which of
        `numbers` are the same on all ranks."""
        if self.size == 1:
            return [True] * len(numbers)
        mine = torch.tensor(numbers, dtype=torch.int64)
        message = torch.cat([flags, mine, -mine])  # the largest, and minus the smallest
        dist.all_reduce(message, op=dist.ReduceOp.MAX, group=self._control)
        largest, smallest = message[len(flags) :].view(2, -1)
        flags.copy_(message[: len(flags)])
        return (largest == -smallest).tolist()


def _add_in_order(parts: list[torch.Tensor], out: torch.Tensor) -> None:
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out.add_(part)
