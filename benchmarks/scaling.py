"""What grows with the number of ranks, and what does not.

    python benchmarks/scaling.py                        # all parts; about eight minutes on two cores
    python benchmarks/scaling.py --only imagined --worlds 64 16384 --sizes 7e9 1e12
    python benchmarks/scaling.py --json scaling.json
    python benchmarks/scaling.py --figures scaling.json --picture docs/pictures/scaling.svg    # only draw

*Here*: 1, 2, 4, 8 ranks on this machine, over gloo. A step of a small decoder at stage 3 once ranks have agreed on a
plan (wall-clock and CPU time of a rank: ranks share the cores), a gather and a reduction of 4 MB, a meeting of all
ranks, words sent per step, and the memory that a rank holds.

*Imagined*: one rank of up to 16,384 with models of up to 10^12 weights, on the meta device in torch's fake process
group. Nothing is computed or sent, so only Python's cost remains: the CPU time of a step with the engine, minus that of
the same model without it, and the memory of the Python objects that `shard` and two steps leave behind. Communication
about what to do next is not included, since a simulated rank has nobody to talk to. *Words* measures it: the CPU time
of a rank for one word and its round, by the number of ranks, with messages that have already arrived: where every rank
tells every other, and where they agree in a tree (`shardproof/zero/comm/tree.py`), as more than 64 ranks do.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from decoder import SHAPES, Decoder, Shape
from torch import nn

import shardproof
from shardproof.doctor.planning.stand_ins import AdamWStates, fake_group
from shardproof.zero.comm.collectives import Collectives
from shardproof.zero.comm.tree import Tree
from shardproof.zero.ranks.consensus import Streams

MEGABYTES = 4  # size of a gather or a reduction
# hidden size and layers
LAYERS = {1e9: (2048, 16), 7e9: (4096, 32), 70e9: (8192, 80), 400e9: (16384, 126), 1e12: (24576, 132)}


def shape_of(size: float) -> Shape:
    """A decoder with about this many weights: 4 h^2 for attention and 8 h^2 for the rest in each layer."""
    hidden, layers = LAYERS[size]
    inner = round((size / layers - 4 * hidden**2) / (3 * hidden) / 256) * 256
    return Shape(vocabulary=32768, hidden=hidden, inner=inner, layers=layers, heads=hidden // 128)


# --- here ---------------------------------------------------------------------------------------------------


def timed(times: int, do: Any) -> tuple[float, float]:
    """Median milliseconds, wall-clock and CPU time of this rank."""
    wall, cpu = [], []
    for _ in range(times):
        start, busy = time.perf_counter(), time.process_time()
        do()
        wall.append(1e3 * (time.perf_counter() - start))
        cpu.append(1e3 * (time.process_time() - busy))
    return statistics.median(wall), statistics.median(cpu)


def rank_here(rank: int, world: int, store: str, steps: int, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    torch.manual_seed(0)
    model = shardproof.shard(Decoder(SHAPES["36m"]), 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, 8192, (1, 33), generator=torch.Generator().manual_seed(rank))

    def step() -> None:
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):  # ranks agree on a plan
        step()
    before = shardproof.stats(model).votes
    wall, cpu = timed(steps, step)
    words = (shardproof.stats(model).votes - before) / steps
    comm: Any = model.__dict__["_shardproof"].comm
    whole = torch.zeros(MEGABYTES * 2**18 // world * world)
    part = torch.zeros(len(whole) // world)
    tag = iter(range(1 << 30, 1 << 31))
    gather = timed(steps, lambda: comm.gather(whole, part, next(tag)).wait()) if world > 1 else (0.0, 0.0)
    reduce = timed(steps, lambda: comm.reduce_scatter(whole, next(tag)).wait()) if world > 1 else (0.0, 0.0)
    meet = timed(20 * steps, lambda: shardproof.barrier(model))
    stats = shardproof.stats(model).total
    held = stats.shard_bytes * 4, stats.gathered_peak_bytes  # weights, gradients and AdamW's two
    line = {"ranks": world, "step": wall, "step_cpu": cpu, "gather": gather[0], "reduce": reduce[0]}
    line |= {"meeting": meet[0], "meeting_cpu": meet[1], "words": words, "state": held[0], "whole": held[1]}
    if rank == 0:
        results.put(line)
    shardproof.barrier(model)
    dist.destroy_process_group()


def here(worlds: list[int], steps: int) -> list[dict[str, float]]:
    lines = []
    for world in worlds:
        with tempfile.TemporaryDirectory() as folder:
            queue = mp.get_context("spawn").SimpleQueue()
            mp.spawn(rank_here, (world, f"{folder}/store", steps, queue), nprocs=world)
            lines.append(queue.get())
        print_line("here", lines[-1])
    return lines


# --- imagined -----------------------------------------------------------------------------------------------


class Lean(nn.Module):
    """The parameters of a block, used by as few operations as possible."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden = shape.hidden
        self.norms = nn.ParameterList(nn.Parameter(torch.empty(hidden)) for _ in range(2))
        self.attention = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(hidden, shape.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, hidden)
        query, key, value, out = self.attention
        h = x * self.norms[0]
        x = x + out(query(h) * key(h) + value(h))
        h = x * self.norms[1]
        return x + self.down(self.gate(h) * self.up(h))


class LeanDecoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Lean(shape) for _ in range(shape.layers))
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).sum()


class Stepper:
    """Steps of a model on the meta device, and their CPU time."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.optimizer = model, AdamWStates(list(model.parameters()), lr=1e-4)
        self.optimizer.__dict__["_shardproof_steps"] = 10  # the check of the first update needs values
        self.took: list[float] = []

    def step(self) -> None:
        start = time.process_time()
        self.model(torch.zeros(1, dtype=torch.long, device="meta")).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.took.append(1e3 * (time.process_time() - start))


def imagined(size: float, world: int, stage: int, steps: int) -> dict[str, float]:
    """One rank of `world` with a model of `size` weights."""
    with torch.device("meta"):
        plain, model = LeanDecoder(shape_of(size)), LeanDecoder(shape_of(size))
    weights = sum(p.numel() for p in model.parameters())
    with fake_group(world):
        gc.collect()
        tracemalloc.start()
        start = time.process_time()
        shardproof.shard(model, stage, device="meta", dynamic="never")
        took = time.process_time() - start
        engine: Any = model.__dict__["_shardproof"]
        engine.invariants.ends = 10  # its checks need values too
        alone, sharded = Stepper(plain), Stepper(model)
        sharded.step()
        gc.collect()
        kept = tracemalloc.take_snapshot()
        tracemalloc.stop()
        gc.disable()
        for _ in range(steps):  # alternately, so that a busy moment of the machine affects both
            alone.step()
            sharded.step()
        gc.enable()
        # The fastest is the least disturbed.
        without, with_engine = min(alone.took), min(sharded.took[1:])
        shard = sum(flat.shard.numel() for flat in engine.flats)
        units = len(engine.units)
    ours = kept.filter_traces([tracemalloc.Filter(True, f"{Path(shardproof.__file__).parent}/*")])
    return {
        "weights": weights,
        "ranks": world,
        "stage": stage,
        "units": units,
        "without": without,
        "engine": with_engine - without,
        "shard_ms": 1e3 * took,
        "kept": sum(s.size for s in ours.statistics("filename")),
        "all": sum(s.size for s in kept.statistics("filename")),
        "slice": shard,
    }


class Arrived:
    """A process group whose messages arrive at once."""

    def send(self, tensors: list[torch.Tensor], *_: Any) -> Arrived:
        return self

    def recv(self, tensors: list[torch.Tensor], *_: Any) -> Arrived:
        tensors[0].fill_(torch.iinfo(torch.int64).min)  # nothing greater than the local value
        return self

    def wait(self) -> None:
        return None


class Wire:
    """The only part of its group that Streams needs here: words, which have always arrived; all ranks do the same."""

    group = lost = None
    real = True
    rank, group_name = 0, "wire"
    agree = Collectives.agree

    def __init__(self, ranks: int, in_tree: bool) -> None:
        self.size, self.words, self.last = ranks, self, 0
        self.tree = Tree(Arrived, 0, ranks) if in_tree else None

    def send(self, word: int) -> None:
        self.last = word

    def receive(self, rank: int) -> int:
        return self.last


def words(worlds: list[int], rounds: int) -> list[dict[str, float]]:
    """CPU microseconds of a meeting's bookkeeping, without the messages."""
    lines = []
    for world in worlds:
        line: dict[str, float] = {"ranks": world}
        for name, in_tree in (("each to each", False), ("in a tree", True)):
            streams = Streams.__new__(Streams)
            streams.comm = Wire(world, in_tree)  # type: ignore[assignment]
            prepare(streams, world)
            took = []
            for _ in range(rounds):
                start = time.process_time()
                streams._post(1 << 48)
                streams.settle(streams.posted - 1)
                took.append(1e6 * (time.process_time() - start))
            line[name] = statistics.median(took)
        lines.append(line)
        print_line("words", lines[-1])
    return lines


def prepare(streams: Any, world: int) -> None:
    """The local work of Streams, without its watchdog, which needs a real group."""
    from collections import deque

    streams.engines, streams.mine, streams.ranks = {}, deque(), range(world)
    streams.theirs = {}
    streams.posted = streams.words = streams.rounds_apart = 0
    streams.seconds = 0.0
    streams._waiting = lambda *_: contextlib.nullcontext()


# --- said and drawn -----------------------------------------------------------------------------------------


def print_line(part: str, line: dict[str, float]) -> None:
    shown = " ".join(f"{name} {value:,.4g}" for name, value in line.items())
    print(f"{part}: {shown}", flush=True)


def draw(found: dict[str, list[dict[str, float]]], file: Path) -> None:
    """One chart per part; the file has nothing that changes from one drawing to the next."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams |= {"svg.hashsalt": "scaling", "svg.fonttype": "none", "font.family": "sans-serif"}
    figure, rows = pyplot.subplots(2, 2, figsize=(9, 6), layout="constrained")
    (step, kept), (words, here) = rows
    lines = found.get("imagined", [])
    for size in sorted({line["weights"] for line in lines}):
        of_size = [line for line in lines if line["weights"] == size]
        ranks = [line["ranks"] for line in of_size]
        name = f"{size / 1e9:,.0f} G, {of_size[0]['units']:.0f} units"
        step.plot(ranks, [line["engine"] for line in of_size], marker="o", ms=3, label=name)
        kept.plot(ranks, [line["kept"] / 2**20 for line in of_size], marker="o", ms=3, label=name)
    said = found.get("words", [])
    for name in ("each to each", "in a tree"):
        words.plot([w["ranks"] for w in said], [w[name] / 1e3 for w in said], marker="o", ms=3, label=name)
    real = found.get("here", [])
    for name, label in (("step_cpu", "a step"), ("meeting_cpu", "a meeting")):
        here.plot([r["ranks"] for r in real], [r[name] for r in real], marker="o", ms=3, label=label)
    titles = {
        step: "simulated ranks: the engine's part of a step, ms",
        kept: "simulated ranks: memory of its objects, MB",
        words: "a meeting's words without the messages, ms",
        here: "real ranks, 36 M: processor time of one, ms",
    }
    for axes, title in titles.items():
        axes.set_xscale("log", base=2)
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("ranks", fontsize=8)
        if axes is words:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.3)
    step.legend(fontsize=7, title="weights", title_fontsize=7)
    here.legend(fontsize=7)
    words.legend(fontsize=7)
    figure.savefig(file, dpi=80, metadata={"Date": None} if file.suffix == ".svg" else None)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=["here", "imagined", "words"], help="one part")
    parser.add_argument("--here", type=int, nargs="+", default=[1, 2, 4, 8], help="ranks on this machine")
    parser.add_argument("--worlds", type=int, nargs="+", default=[64, 512, 4096, 16384], help="simulated ranks")
    parser.add_argument("--sizes", type=float, nargs="+", default=list(LAYERS), choices=list(LAYERS), help="weights")
    parser.add_argument("--stage", type=int, default=3, help="stage of the simulated ranks")
    parser.add_argument("--steps", type=int, default=10, help="number of timed steps")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--figures", type=Path, nargs="+", help="do not run, but use these files")
    parser.add_argument("--picture", type=Path, help="draw the results here")
    args = parser.parse_args(argv)
    found: dict[str, list[dict[str, float]]] = {}
    for file in args.figures or []:
        found |= json.loads(file.read_text())
    if args.figures:
        draw(found, args.picture)
        return
    if args.only in (None, "here"):
        found["here"] = here(args.here, args.steps)
    if args.only in (None, "imagined"):
        found["imagined"] = []
        for size in args.sizes:
            for world in args.worlds:
                found["imagined"].append(imagined(size, world, args.stage, args.steps))
                print_line("imagined", found["imagined"][-1])
    if args.only in (None, "words"):
        found["words"] = words(args.worlds, 3 * args.steps)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    if args.picture:
        draw(found, args.picture)


if __name__ == "__main__":
    sys.exit(main())
