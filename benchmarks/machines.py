"""One copy of a model over two machines, or one on each, with a slow link between them: seconds and bytes per step.

    python benchmarks/machines.py                                 # 36 M decoder, 2 x 2 ranks, stage 3, 500 Mbit/s
    python benchmarks/machines.py --megabits 200 --stage 2 --json machines.json

The machines are network namespaces (tests/machines/hosts.py: Linux, root, iproute2), the link is throttled by tc's tbf
in both directions. *Sent* is the kernel's count on the machine's interface, *counted* is the engine's count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from machines.hosts import Hosts, reason

RANKS = 2  # per machine


def train(stage: int, group: int, steps: int) -> None:
    """Runs on each rank; prints one line."""
    import torch
    import torch.distributed as dist
    from decoder import SHAPES, Decoder
    from torch.distributed.device_mesh import init_device_mesh

    import shardproof

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world // group, group), mesh_dim_names=("copy", "shard")) if group < world else None
    torch.manual_seed(0)
    model = shardproof.shard(Decoder(SHAPES["36m"]), stage, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, 8192, (1, 33), generator=torch.Generator().manual_seed(rank))
    took, counted, waited, sent, loss = [], [], [], [], 0.0
    for _ in range(steps + 2):  # ranks agree on a plan in the first two
        before, start, left = shardproof.stats(model), time.perf_counter(), leaving()
        out = model(tokens)
        out.backward()
        optimizer.step()
        optimizer.zero_grad()
        shardproof.barrier(model)
        after, loss = shardproof.stats(model), out.item()
        took.append(time.perf_counter() - start)
        sent.append(leaving() - left)
        counted.append(after.total.bytes_between_nodes - before.total.bytes_between_nodes)
        waited.append(after.exposed_seconds - before.exposed_seconds)
    middle = [statistics.median(values[2:]) for values in (took, counted, waited, sent)]
    found: list[Any] = [None] * world
    dist.all_gather_object(found, [*middle, loss])
    if rank == 0:
        here = found[:RANKS]
        line = {"seconds": max(f[0] for f in found), "counted": sum(f[1] for f in here), "sent": here[0][3]}
        print(json.dumps({**line, "waited": max(f[2] for f in found), "loss": sum(f[4] for f in found) / world}))
    dist.destroy_process_group()


def leaving() -> int:
    """Bytes that have left this machine, as counted by the kernel."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if numbers and name.strip() != "lo":
            return int(numbers.split()[8])
    return 0


def measured(stage: int, group: int, steps: int, megabits: float) -> dict[str, float]:
    """One run on two machines."""
    with tempfile.TemporaryDirectory() as folder, Hosts(2, Path(folder)) as hosts:
        for host in hosts:
            host.slow_down(megabits)
            for local in range(RANKS):
                rank = RANKS * host.number + local
                where = {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(2 * RANKS),
                    "MASTER_ADDR": "node0",
                    "MASTER_PORT": "29500",
                }
                words = [sys.executable, str(Path(__file__).absolute()), "--rank", "--stage", str(stage)]
                host.start(
                    [*words, "--group", str(group), "--steps", str(steps)], Path(folder), where | {"LOCAL_RANK": "0"}
                )
        codes = [run.wait(500) for host in hosts for run in host.runs]
        said = hosts[0].said(Path(folder))
        if any(codes):
            raise SystemExit("\n".join(host.said(Path(folder)) for host in hosts))
    return {"group": group, **json.loads(next(line for line in said.splitlines() if line.startswith("{")))}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="number of timed steps")
    parser.add_argument("--megabits", type=float, default=500.0, help="bandwidth of the link, per second")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--group", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.rank:
        train(args.stage, args.group, args.steps)
        return
    if missing := reason():
        raise SystemExit(f"no machines of namespaces here: {missing}")
    os.environ["OMP_NUM_THREADS"] = "1"
    lines = []
    for group in (2 * RANKS, RANKS):
        lines.append(measured(args.stage, group, args.steps, args.megabits))
        shown = " ".join(f"{name} {value:,.4g}" for name, value in lines[-1].items())
        print(f"stage {args.stage} at {args.megabits:g} Mbit/s: {shown}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(lines))


if __name__ == "__main__":
    main()
