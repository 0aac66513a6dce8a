"""What is the cheapest way to gather and to reduce a flat buffer on the CPU: which gloo collective, or none?

    python benchmarks/collectives.py                       # 2 and 4 ranks, about two minutes
    python benchmarks/collectives.py --world 2 --mb 4 12 --rounds 5

Every candidate does the same job. A *gather* turns a shard of `size / world` into the whole buffer of `size`; a
*reduction* turns a whole buffer into the sum's shard. Ranks have one thread each. In every round each candidate runs
once, in an order that rotates, so a slow moment of the machine affects all equally. Columns: median wall milliseconds
(the slowest rank counts), the spread between the quartiles, and CPU milliseconds per rank, including kernel and gloo
threads. Where every core already computes, the last column is what a collective costs, however well it overlaps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from shardproof.zero.comm.neighbours import Neighbours, find_neighbours

# torch 2.13 renamed the two; 2.11 has only the old names.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

Candidate = Callable[[], object]


class Buffers:
    """One rank's memory for a job, reused between rounds unless a candidate opts out."""

    def __init__(self, megabytes: int, rank: int, world: int, near: Neighbours | None) -> None:
        self.near = near
        count = megabytes * 2**20 // 4
        count -= count % world
        self.rank, self.world, self.part = rank, world, count // world
        self.whole = torch.rand(count)  # (world * part,)
        self.other = torch.rand(count)
        self.shard = torch.rand(self.part)  # (part,)

    def slot(self, rank: int) -> slice:
        return slice(rank * self.part, (rank + 1) * self.part)


class Works(list):
    """Several handles that are waited for together."""

    def wait(self) -> None:
        for work in self:
            work.wait()


def pairwise(
    send: Callable[[int], torch.Tensor],
    receive: Callable[[int], torch.Tensor],
    b: Buffers,
    tag: int = 0,
    via: Neighbours | None = None,
) -> Works:
    """Start one message to and from every other rank, all in flight together, through gloo or between neighbours."""
    group = via or dist.group.WORLD
    ahead = [(b.rank + step) % b.world for step in range(1, b.world)]
    behind = [(b.rank - step) % b.world for step in range(1, b.world)]
    works = Works(group.recv([receive(r)], r, tag) for r in behind)
    works.extend(group.send([send(r)], r, tag) for r in ahead)
    return works


def reductions(b: Buffers) -> dict[str, Candidate]:
    def swap_and_add(fresh: bool = False):
        incoming = torch.empty_like(b.other) if fresh else b.other
        dist.all_to_all_single(incoming, b.whole)
        torch.sum(incoming.view(b.world, b.part), 0, out=b.shard)

    def pairs_and_add(via: Neighbours | None = None):
        pairwise(lambda r: b.whole[b.slot(r)], lambda r: b.other[b.slot(r)], b, via=via).wait()
        b.shard.copy_(b.whole[b.slot(b.rank)])
        for r in range(b.world):
            if r != b.rank:
                b.shard.add_(b.other[b.slot(r)])

    def reduce_each():
        Works(dist.reduce(b.whole[b.slot(r)], r, async_op=True) for r in range(b.world)).wait()

    return {
        "all_reduce": lambda: dist.all_reduce(b.whole),
        "reduce_scatter_single": lambda: reduce_scatter_single(b.shard, b.whole),
        "reduce_scatter_single, fresh output": lambda: reduce_scatter_single(torch.empty_like(b.shard), b.whole),
        "all_to_all_single + sum": swap_and_add,
        "all_to_all_single + sum, fresh": lambda: swap_and_add(fresh=True),
        "isend/irecv + add": pairs_and_add,
        "reduce to each rank": reduce_each,
        **({"neighbours + add": lambda: pairs_and_add(b.near)} if b.near is not None else {}),
    }


def gathers(b: Buffers) -> dict[str, Candidate]:
    slots = list(b.whole.split(b.part))
    repeated = b.shard.expand(b.world, b.part)

    def broadcast_each():
        slots[b.rank].copy_(b.shard)
        Works(dist.broadcast(slots[r], r, async_op=True) for r in range(b.world)).wait()

    def pairs(into: list[torch.Tensor], via: Neighbours | None = None):
        into[b.rank].copy_(b.shard)
        pairwise(lambda r: b.shard, lambda r: into[r], b, via=via).wait()

    return {
        "all_gather_single": lambda: all_gather_single(b.whole, b.shard),
        "all_gather_single, fresh output": lambda: all_gather_single(torch.empty_like(b.whole), b.shard),
        "all_gather(list)": lambda: dist.all_gather(slots, b.shard),
        "all_to_all_single of copies": lambda: dist.all_to_all_single(b.other, repeated.reshape(-1)),
        "broadcast from each rank": broadcast_each,
        "isend/irecv": lambda: pairs(slots),
        "isend/irecv, fresh output": lambda: pairs(list(torch.empty_like(b.whole).split(b.part))),
        **({"neighbours": lambda: pairs(slots, b.near)} if b.near is not None else {}),
        "(memcpy of the whole, for scale)": lambda: b.other.copy_(b.whole),
        "(memcpy of the whole, fresh output)": lambda: b.whole.clone(),
    }


def in_flight(megabytes: int, rank: int, world: int, near: Neighbours | None) -> dict[str, Candidate]:
    """Eight collectives of one size: one after another, or several in flight at once."""
    many = [Buffers(megabytes, rank, world, near) for _ in range(8)]

    def run(start: Callable[[Buffers], dist.Work | Works], depth: int):
        works: list[dist.Work | Works] = []
        for b in many:
            if len(works) == depth:
                works.pop(0).wait()
            works.append(start(b))
        for work in works:
            work.wait()

    def start_gather(b: Buffers):
        return all_gather_single(b.whole, b.shard, async_op=True)

    def start_reduction(b: Buffers):
        return dist.all_reduce(b.other, async_op=True)

    def start_scatter(b: Buffers):
        return reduce_scatter_single(b.shard, b.other, async_op=True)

    def start_pairs(b: Buffers, via: Neighbours | None = None):
        b.whole[b.slot(b.rank)].copy_(b.shard)
        return pairwise(lambda r: b.shard, lambda r: b.whole[b.slot(r)], b, tag=many.index(b), via=via)

    table: dict[str, Candidate] = {}
    starts = {
        "all_gather_single": start_gather,
        "gather by isend/irecv": start_pairs,
        "all_reduce": start_reduction,
        "reduce_scatter_single": start_scatter,
        **({"gather between neighbours": lambda b: start_pairs(b, near)} if near is not None else {}),
    }
    for name, start in starts.items():
        for depth in (1, 2, 4):
            table[f"8 x {name}, {depth} in flight"] = lambda s=start, d=depth: run(s, d)
    return table


def measure(table: dict[str, Candidate], rounds: int, world: int) -> dict[str, tuple[float, float, float]]:
    """Milliseconds of each candidate: median wall time, quartile spread, CPU time per rank."""
    walls: dict[str, list[float]] = {name: [] for name in table}
    burnt: dict[str, list[float]] = {name: [] for name in table}
    names = list(table)
    for turn in range(rounds + 1):  # the first round warms up
        for at in range(len(names)):
            name = names[(at + turn) % len(names)]
            dist.barrier()
            cpu, start = time.process_time(), time.perf_counter()
            table[name]()
            took = torch.tensor([time.perf_counter() - start, time.process_time() - cpu])
            slowest = took[:1].clone()
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            dist.all_reduce(took)
            if turn:
                walls[name].append(1e3 * slowest.item())
                burnt[name].append(1e3 * took[1].item() / world)
    result = {}
    for name in names:
        low, middle, high = statistics.quantiles(walls[name], n=4, method="inclusive")
        result[name] = (middle, high - low, statistics.median(burnt[name]))
    return result


def worker(rank: int, world: int, sizes: list[int], rounds: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    near = find_neighbours(dist.group.WORLD)
    for megabytes in sizes:
        b = Buffers(megabytes, rank, world, near)
        report(f"reduction, {megabytes} MB, {world} ranks", measure(reductions(b), rounds, world), rank)
        report(f"gather, {megabytes} MB, {world} ranks", measure(gathers(b), rounds, world), rank)
        if megabytes <= 16:
            table = measure(in_flight(megabytes, rank, world, near), max(3, rounds // 2), world)
            report(f"several in flight, {megabytes} MB each, {world} ranks", table, rank)
    dist.destroy_process_group()


def report(title: str, result: dict[str, tuple[float, float, float]], rank: int) -> None:
    if rank:
        return
    print(f"\n### {title}\n\n| | wall ms | spread | cpu ms / rank |\n|---|---:|---:|---:|")
    for name, (middle, spread, cpu) in result.items():
        print(f"| {name} | {middle:.2f} | {spread:.2f} | {cpu:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--mb", type=int, nargs="+", default=[1, 4, 12, 40], help="sizes of the whole buffer")
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    for world in args.world:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(worker, args=(world, args.mb, args.rounds, f"{folder}/store"), nprocs=world)


if __name__ == "__main__":
    main()
