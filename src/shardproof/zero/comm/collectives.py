"""The only file that calls torch.distributed's collectives.

[Note: exchanging by hand on the CPU]
gloo's all-gather and reduce-scatter copy more than necessary: for 12 MB between two processes, plain sends and receives
into the slots of the flat buffer take 0.5 to 0.9 of the time of the all-gather and 0.5 of that of the reduce-scatter
(benchmarks/collectives.py), and leave the processor to the model. So on the CPU gathers and reductions are exchanges of
chunks, which are added in rank order: every stage and world size then adds in the same order. Other devices use their
backend's collectives. Messages carry a tag that identifies the operation: ranks that disagree wait, they never
compute with each other's weights. Ranks on the same machine need no socket (neighbours.py).

[Note: two groups] Beside the user's group (the default one, or that of the mesh) there is a gloo group of our own with
the same ranks. On the CPU, gathers and reductions use ours: they may start at any moment between the user's
collectives, and the short words by which ranks agree are not queued after the user's data on one connection. With an
accelerator, data uses the user's group, and ours carries the words, which never wait for the device and are on the CPU,
whatever `torch.set_default_device` says.

[Note: shards and replicas] With a two-dimensional mesh, the ranks of a row together hold one copy of the model (a shard
group), and those of a column hold the same part (a replicate group). Gathers stay in the row; a reduction sums in the
row, and then its result in the column, so that the slow links between rows carry one part of the model instead of all
of it. Words and meetings still involve all ranks as one group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from shardproof.zero.comm import tree
from shardproof.zero.comm.connections import names_lost_ranks
from shardproof.zero.comm.groups import Host, Made, group_named, hosts_of, new_gloo_group, once
from shardproof.zero.comm.leaving import Leaving
from shardproof.zero.comm.neighbours import Neighbours, neighbours_of
from shardproof.zero.comm.pending import Pending, Size, Worker
from shardproof.zero.comm.words import EXCHANGE_TAG, NEVER_TAG, NO_WORD, PROBE_TAG, Words
from shardproof.zero.device import BufferPool, imagined, side_stream

# torch 2.13 renamed the tensor collectives and deprecated the old names; torch 2.11 has only those.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

T = TypeVar("T")

# By name of a process group:
_second_groups: dict[str, Made[str]] = {}  # the name of the gloo group beside it, see [Note: two groups]
_hosts: dict[str, Made[list[Host]]] = {}  # the machine of each rank
_neighbours: dict[str, Made[Neighbours | None]] = {}  # the ranks on the machine of this one
_threads: dict[str, Made[Worker]] = {}  # that of second legs and of sums, for all models in their one order
_PIECE = 1 << 22  # elements that ranks of one machine add up at a time


def _add_in_order(parts: list[torch.Tensor], out: torch.Tensor) -> None:
    """Add up; `out` may be one of the first two."""
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out.add_(part)


def _as_real(values: torch.Tensor) -> torch.Tensor:
    """1-D values, complex ones as twice as many real ones: NCCL adds no others."""
    return torch.view_as_real(values).view(-1) if values.is_complex() else values


class Collectives:
    """The collectives of one process group. Reductions sum; the caller divides.

    Args:
        group: the ranks that share a model, or None for the default group (this process alone where there is
            none). The default group is not kept here: it must be able to end before the interpreter does.
        device: where the tensors live.
        shard_group: the ranks that hold one copy of the model between them, if not all; see
            [Note: shards and replicas].
        replicate_group: the ranks that hold the same part as this one.

    Attributes:
        pool: allocates buffers for incoming chunks, and those that an engine gathers into.
        size, rank: among all ranks that share a model; `shards`, `shard_rank`: among those that hold one copy.
        replica: the copy, of `replicas`, that this rank holds a part of.
        real: whether there are other ranks that are not imagined.
        hosts: the machine of each rank; empty if the others are imagined.
        leaving: counts the bytes that this rank sends to other machines.
        neighbours: the ranks on this machine, if they may read each other's memory; see neighbours.py.
        words: the words between ranks.
        tree: through which ranks agree, if there are many.
        lost: makes the error for a wait that ended because a connection was closed; set by the watchdog.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        shard_group: dist.ProcessGroup | None = None,
        replicate_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.group, self.device, self.pool = group, device, BufferPool(device)
        self._spare = BufferPool(device)  # of a thread
        self._replica_stream: torch.Stream | None = None
        self.shard_group = shard_group
        there = dist.is_initialized()
        self.size = dist.get_world_size(group) if there else 1
        self.rank = dist.get_rank(group) if there else 0
        self.shards, self.shard_rank = self.size, self.rank
        self.replicas, self.replica = 1, 0
        self._shard_ranks: Sequence[int] = range(self.size)
        self._replica_ranks: Sequence[int] = [self.rank]
        self.by_hand = device.type == "cpu" and self.size > 1
        self.group_name = (group or dist.group.WORLD).group_name if there else ""  # type: ignore[union-attr]
        self._own_group: Any = self.once(_second_groups, self.new_gloo_group) if self.size > 1 else ""
        self.real = self.size > 1 and not imagined(group)
        self.hosts: list[Host] = []
        self.neighbours: Neighbours | None = None
        if self.real:
            self.hosts = self.once(_hosts, lambda: hosts_of(group_named(self._own_group)))
            if self.by_hand:
                self.neighbours = self.once(_neighbours, lambda: neighbours_of(self._user_group, self._data_group))
        self.lost: Callable[[Exception], Exception] | None = None
        agreeing = (lambda: self._word_group), self.rank, self.size
        self.words = Words(*agreeing)
        self.tree = tree.Tree(*agreeing) if self.real and self.size > tree.MANY else None
        if shard_group is not None and replicate_group is not None:
            self._split(shard_group, replicate_group)
        hosts = [host.name for host in self.hosts]
        self.leaving = Leaving(hosts, self.rank, self._shard_ranks, self._replica_ranks, self.by_hand)

    def _split(self, shard_group: dist.ProcessGroup, replicate_group: dist.ProcessGroup) -> None:
        self.shards, self.shard_rank = dist.get_world_size(shard_group), dist.get_rank(shard_group)
        self.replicas, self.replica = dist.get_world_size(replicate_group), dist.get_rank(replicate_group)
        everyone = cast("dist.ProcessGroup", self.group or dist.group.WORLD)
        self._shard_ranks, self._replica_ranks = (
            [dist.get_group_rank(everyone, r) for r in dist.get_process_group_ranks(group)]
            for group in (shard_group, replicate_group)
        )
        self._replica_group: Any = str(replicate_group.group_name)
        if self.by_hand and self.replicas > 1:  # what a thread of ours calls must not meet calls of the user's
            self._replica_group = once(replicate_group, _second_groups, lambda: new_gloo_group(replicate_group))

    @property
    def _worker(self) -> Worker:
        return self.once(_threads, lambda: Worker("shardproof-legs"))

    def once(self, known: dict[str, Made[T]], make: Callable[[], T]) -> T:
        """The result of `make`, which is called once per process group."""
        return once(self._user_group if self.group_name else None, known, make)

    def new_gloo_group(self) -> str:
        """The name of a new gloo group of the same ranks, which is not kept, as the default group is not."""
        return new_gloo_group(self.group)

    @property
    def _user_group(self) -> Any:
        return self.group or dist.group.WORLD

    @property
    def _data_group(self) -> Any:
        """The group of gathers and reductions."""
        return group_named(self._own_group) if self.device.type == "cpu" else self._user_group

    @property
    def _word_group(self) -> Any:
        """The group of words."""
        return self._user_group if self.device.type == "cpu" else group_named(self._own_group)

    def forget(self) -> None:
        """Free buffers that are not in use."""
        self.pool.forget()
        self._spare.forget()

    def _send_and_receive(self, sends: list[torch.Tensor], receives: list[torch.Tensor], tag: int) -> list[Any]:
        """Send `sends[r]` to rank r and fill `receives[r]` from it, for every other rank r of the shard group."""
        works, ranks = [], self._shard_ranks
        for distance in range(1, self.shards):
            source, target = (self.shard_rank - distance) % self.shards, (self.shard_rank + distance) % self.shards
            works.append(self._carrier_to(ranks[source]).recv([receives[source]], ranks[source], tag))
            works.append(self._carrier_to(ranks[target]).send([sends[target]], ranks[target], tag))
        return works

    def _carrier_to(self, rank: int) -> Any:
        return self.neighbours if self.neighbours is not None and rank in self.neighbours else self._data_group

    def gather(self, whole: torch.Tensor, shard: torch.Tensor, tag: int) -> Pending:
        """All-gather equal 1-D shards into `whole`, in rank order. Moves bytes: any dtype, any backend."""
        if not self.by_hand:
            out, part = whole.view(torch.uint8), shard.view(torch.uint8)
            return Pending([_all_gather(out, part, group=self._gather_group, async_op=True)], whole, shard)
        slots = list(whole.view(self.shards, -1))
        if slots[self.shard_rank].data_ptr() != shard.data_ptr():
            slots[self.shard_rank].copy_(shard)
        return Pending(self._send_and_receive([shard] * self.shards, slots, tag), whole, shard)

    @property
    def _gather_group(self) -> Any:
        return self.shard_group or self._data_group

    def reduce_scatter(self, whole: torch.Tensor, tag: int) -> Pending:
        """Sum `whole` over ranks; the result is this rank's part. `whole` must not be touched until then.

        With replicas it knows no tags, as `all_reduce`.
        """
        size = whole.numel() // self.shards
        if not self.by_hand:
            shard = self.pool.take(size, whole.dtype)
            work = _reduce_scatter(_as_real(shard), _as_real(whole), group=self._gather_group, async_op=True)
            if self.replicas > 1:
                self._replica_stream = self._replica_stream or torch.Stream(self.device)
                with side_stream(self.device, self._replica_stream):  # the current stream waits for neither leg
                    work.wait()
                    work = self._over_replicas(shard)
            return Pending([work], shard, whole)
        place = self.shard_rank
        chunks = list(whole.view(self.shards, -1))
        incoming = [self.pool.take(size, whole.dtype) for _ in range(self.shards - 1)]
        parts = [*incoming[:place], chunks[place], *incoming[place:]]
        shard = incoming[0]  # one of the first two parts: the sum grows where it lies
        works = self._send_and_receive(chunks, parts, tag)
        if self.replicas == 1:
            return Pending(works, shard, (whole, incoming), lambda: _add_in_order(parts, shard))

        def both_legs() -> None:
            for work in works:
                work.wait()
            _add_in_order(parts, shard)
            Pending([self._over_replicas(shard)], shard).wait()

        # If a rank waited for the first leg before it started the second, its replicas would have to wait, too.
        return Pending([], shard, (whole, incoming), self._worker.submit(both_legs).result)

    def _over_replicas(self, shard: torch.Tensor) -> Any:
        return dist.all_reduce(shard, group=group_named(self._replica_group), async_op=True)

    def all_reduce(self, whole: torch.Tensor, tag: int) -> Pending:
        """Sum `whole` over ranks, in place. All ranks must start it in the same order. Neighbours each add one part and
        read the sums of the others; otherwise it is the backend's own, which knows no tags."""
        if self.neighbours is not None and self.neighbours.complete and self.shards == self.size:
            job = partial(self._sum_between_neighbours, whole, tag)
            return Pending([], whole, None, self._worker.submit(job).result)
        return Pending([dist.all_reduce(whole, group=self._data_group, async_op=True)], whole)

    def _sum_between_neighbours(self, whole: torch.Tensor, tag: int) -> None:
        """In a thread, one sum after the other and a piece at a time, for which a buffer of each other rank will do."""
        others = [self._spare.take(-(-_PIECE // self.size), whole.dtype) for _ in range(self.size - 1)]
        for piece in whole.split(_PIECE):
            chunks = list(piece.tensor_split(self.size))
            mine = chunks[self.rank]
            parts = [buffer[: len(mine)] for buffer in others]
            parts.insert(self.rank, mine)
            for work in self._send_and_receive(chunks, parts, tag):
                work.wait()
            _add_in_order(parts, parts[0])
            mine.copy_(parts[0])
            for work in self._send_and_receive([mine] * self.size, chunks, tag):
                work.wait()

    def contributions(self, whole: torch.Tensor, sharded: bool, tag: int) -> Pending:
        """Each rank's contribution to this rank's part of `whole` (all of it if nothing is sharded), not summed.

        The result: [ranks, elements].
        """
        sends = list(whole.view(self.size, -1)) if sharded else [whole] * self.size
        parts = self.pool.take(self.size * sends[0].numel(), whole.dtype).view(self.size, -1)
        if not self.by_hand:  # in one piece: not every gloo takes lists, which two ranks on one device depend on
            share = dist.all_to_all_single if sharded else _all_gather
            return Pending([share(parts.view(-1), whole, group=self._user_group, async_op=True)], parts, whole)
        parts[self.rank].copy_(sends[self.rank])
        return Pending(self._send_and_receive(sends, list(parts), tag), parts, whole)

    def reduction(self, whole: torch.Tensor, sharded: bool, in_order: bool, tag: int) -> Pending:
        if in_order:
            return self.contributions(whole, sharded, tag)
        return (self.reduce_scatter if sharded else self.all_reduce)(whole, tag)

    def pay(self, operation: int, size: Size, tag: int) -> None:
        """Take part in an operation of a model that is gone; the result is discarded."""
        whole = torch.zeros(size.numel, dtype=size.dtype, device=self.device)
        if operation % 2 == 0:
            self.gather(whole, whole[: size.numel // self.shards].clone(), tag).wait()
        else:
            self.reduction(whole, size.sharded, in_order=False, tag=tag).wait()

    @names_lost_ranks
    def exchange(self, sends: torch.Tensor, outgoing: list[int], incoming: list[int]) -> list[torch.Tensor]:
        """Send rank r of the shard group its `outgoing[r]` elements of `sends`, 1-D, and wait for `incoming[r]`."""
        received = sends.new_empty(sum(incoming))
        parts, pieces = list(received.split(incoming)), list(sends.split(outgoing))
        if self.by_hand:
            parts[self.shard_rank].copy_(pieces[self.shard_rank])
            for work in self._send_and_receive(pieces, parts, EXCHANGE_TAG):
                work.wait()
        else:
            dist.all_to_all_single(received, sends, incoming, outgoing, group=self._gather_group)
        return parts

    @names_lost_ranks
    def total(self, tensor: torch.Tensor, of_shards: bool = False) -> torch.Tensor:
        """Sum a small tensor over ranks, or those that hold one copy of the model (`of_shards`), in place, and wait."""
        group, size = (self.shard_group or self.group, self.shards) if of_shards else (self.group, self.size)
        if size > 1:
            dist.all_reduce(tensor, group=group)
        return tensor

    @names_lost_ranks
    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """The element-wise maximum of a small tensor over ranks, in place, and wait."""
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return tensor

    @names_lost_ranks
    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Overwrite a contiguous `tensor` with the copy of rank 0."""
        if self.size > 1:
            dist.broadcast(tensor.view(-1).view(torch.uint8), group=self.group, group_src=0)
        return tensor

    @names_lost_ranks
    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """The object that rank `source` passed, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self._word_group, group_src=source)
        return box[0]

    def leave(self, seconds: float) -> None:
        """At the end of the program: a thread that computes while the interpreter exits would abort the process. Data
        that has not arrived after this many seconds never will: its wait is ended."""
        _, thread = _threads.get(self.group_name, (None, None))
        if thread is not None and dist.is_initialized() and not thread.rests(seconds):
            self.close_connections()
            thread.rests(seconds)

    def close_connections(self) -> None:
        """End every wait in the group of words with an error, in all threads: when a receive times out, gloo closes all
        connections. The group is unusable afterwards."""
        groups = [self._user_group, group_named(self._own_group)]
        if self.by_hand and self.replicas > 1:
            groups.append(group_named(self._replica_group))
        if self.neighbours is not None:
            self.neighbours.close()
        for group in groups:
            try:
                other = (dist.get_rank(group) + 1) % dist.get_world_size(group)
                work = dist.irecv(torch.zeros(1, device="cpu"), group=group, group_src=other, tag=NEVER_TAG)
                cast("dist.Work", work).wait(timedelta(milliseconds=1))
            except RuntimeError:  # it ran out of time, or has no backend for the CPU
                continue

    def lost_ranks(self) -> list[int]:
        """The ranks whose connection is closed. Closes all others, too: only for a program that ends."""
        lost, works, message = [], {}, torch.tensor([NO_WORD], device="cpu")
        for r in range(self.size):
            if r != self.rank:
                try:
                    works[r] = self._word_group.send([message], r, PROBE_TAG)
                except RuntimeError:
                    lost.append(r)
        for r, work in works.items():
            try:
                work.wait(timedelta(milliseconds=1))
            except RuntimeError as problem:
                if "Connection" in str(problem):
                    lost.append(r)
        return lost

    def is_tagged(self, operation: int, sharded: bool) -> bool:
        """Whether the messages of an operation (see ranks/turns.py) carry a tag, so that it may start at any time. All
        others must start in the same order on all ranks."""
        return self.by_hand and (operation % 2 == 0 or (sharded and self.replicas == 1))

    @names_lost_ranks
    def agree(self, numbers: Sequence[int], flags: torch.Tensor | None = None) -> list[bool]:
        """Which of `numbers` are the same on all ranks. `flags`, a small int64 tensor on the CPU, becomes the
        element-wise maximum over ranks."""
        if self.size == 1:
            return [True] * len(numbers)
        mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        flags = mine[:0] if flags is None else flags
        message = torch.cat([flags, mine, -mine])  # the largest, and minus the smallest
        if self.tree is not None:
            self.tree.largest(message)
        else:
            dist.all_reduce(message, op=dist.ReduceOp.MAX, group=self._word_group)
        largest, smallest = message[len(flags) :].view(2, -1)
        flags.copy_(message[: len(flags)])
        return (largest == -smallest).tolist()

    def agree_on_parts(self, numbers: Sequence[int]) -> list[bool]:
        """Which of `numbers` are the same on all ranks that hold the same part, whichever part it is."""
        nothing = torch.iinfo(torch.int64).min
        message = torch.full((2, self.shards, len(numbers)), nothing, device="cpu")
        message[0, self.shard_rank] = mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        message[1, self.shard_rank] = -mine
        self.agree([], message.view(-1))
        return (message[0] == -message[1]).all(0).tolist()
