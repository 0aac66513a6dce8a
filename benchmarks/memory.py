"""How many bytes does a rank hold at each stage? Measured against the stage's formula.

    python benchmarks/memory.py                       # 100 M parameters, 4 processes, stages 0-3
    python benchmarks/memory.py --model 36m --world 2 --stages 3

"Computed" uses only parameter counts, the number of ranks and the stage. "Measured" is, for the first
four lines, the memory that the objects occupy: the storages of shards, optimizer state and gradients, and
the engine's own count of gathered buffers. For the last two it is every byte that torch's CPU allocator
handed out and took back during three training steps (the profiler records each), so buffers that the engine
keeps for the next step, and autograd's temporaries, count too. The batch is one row of eight tokens:
activations are below one percent. The resident memory of the process, including libraries, is also shown.

Exits with status 1 if a line is off by more than --tolerance.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from decoder import SHAPES, build
from torch import nn

FP32 = 4


@dataclass(frozen=True)
class Sizes:
    """Bytes of the unsharded fp32 parameters: of the root unit, of its largest parameter, and of one block."""

    root: int
    largest: int
    block: int
    blocks: int

    @property
    def whole(self) -> int:
        return self.root + self.block * self.blocks

    @classmethod
    def of(cls, model: nn.Module) -> Sizes:
        blocks = [FP32 * sum(p.numel() for p in b.parameters()) for b in model.layers]
        total = FP32 * sum(p.numel() for p in model.parameters())
        largest = FP32 * max(p.numel() for p in (model.embedding.weight, model.head.weight))
        return cls(total - sum(blocks), largest, blocks[0], len(blocks))


@dataclass(frozen=True)
class Formula:
    """What a rank must hold, in bytes. Adam's state is two values per parameter.

    In a step, beyond parameters, gradients and state:
    - whole parameters: at stage 3 the root and two blocks, at 1 and 2 what others hold, at 0 nothing extra;
    - whole gradients of this rank on their way: two blocks' (a reduction under way and the one being prepared) and the
      head's, whose buffer then serves the embedding, and at stage 3 is the one that the embedding was gathered in; at
      stage 1 everything, since it reduces at the end of backward;
    - what comes in from other ranks for them: (N - 1)/N of the head's and two blocks', at stage 1 of the root's and
      two blocks'. A part of 1/N becomes the gradient; at stage 0 that is gloo's own affair;
    - the largest gradient as autograd returns it, before it is laid into the flat buffer.
    """

    sizes: Sizes
    stage: int
    world: int

    IN_FLIGHT = 2

    @property
    def sharded(self) -> bool:
        return self.stage > 0 and self.world > 1

    @property
    def parameters(self) -> float:
        return self.sizes.whole / (self.world if self.sharded else 1)

    @property
    def optimizer(self) -> float:
        return 2 * self.parameters

    @property
    def gradients(self) -> float:
        """After they have become final."""
        return self.parameters

    @property
    def gathered(self) -> float:
        """Gathered parameters beyond those held permanently, at most."""
        if not self.sharded:
            return 0
        if self.stage < 3:  # this rank's part of the gathered parameters is its permanent one
            return self.sizes.whole - self.parameters
        return self.sizes.root + 2 * self.sizes.block

    @property
    def moving(self) -> float:
        """Buffers of the reductions."""
        if not self.sharded:  # the gradient is reduced in place
            return 0
        root = self.sizes.root if self.stage == 1 else self.sizes.largest
        some = root + self.IN_FLIGHT * self.sizes.block
        own = {1: self.sizes.whole, 2: some, 3: self.IN_FLIGHT * self.sizes.block}[self.stage]
        return own + some * (self.world - 2) / self.world

    @property
    def between_steps(self) -> float:
        """On the CPU, buffers are kept for the next step, including those of gradients."""
        return self.parameters + self.optimizer + self.gradients + self.gathered + self.moving

    @property
    def peak(self) -> float:
        return self.between_steps + self.sizes.largest


class Ledger:
    """Every allocation and release of torch's CPU allocator in this thread, with named moments. What a thread of gloo's
    is the last to let go of stays in the books, so of several runs the least is right.

    Args:
        live: bytes allocated before, none of which may be released while the ledger is open.
    """

    def __init__(self, live: int) -> None:
        self.live = live
        self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)

    def __enter__(self) -> Ledger:
        self.profile.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.profile.__exit__(*exception)

    def note(self, moment: str) -> None:
        gc.collect()
        with torch.profiler.record_function(f"moment: {moment}"):
            pass

    def read(self, since: str | None = None) -> tuple[dict[str, int], int]:
        """Bytes allocated at each moment, and the maximum (after the moment `since`)."""
        events = self.profile.profiler.kineto_results.events()
        wanted = [e for e in events if e.name() == "[memory]" or e.name().startswith("moment: ")]
        live = peak = self.live
        at: dict[str, int] = {}
        for event in sorted(wanted, key=lambda e: e.start_ns()):
            if event.name() == "[memory]":
                live += event.nbytes()
                peak = max(peak, live)
                continue
            moment = event.name().removeprefix("moment: ")
            at[moment] = live
            if moment == since:
                peak = live
        return at, peak


def storages(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`; scalars (step counts) are not counted."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel() > 1}
    return sum(found.values())


def resident() -> int:
    """Bytes of physical memory of this process, including all libraries."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


@contextlib.contextmanager
def no_chatter() -> Iterator[None]:
    """The profiler announces itself on standard output, below Python."""
    saved = os.dup(1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        try:
            yield
        finally:
            os.dup2(saved, 1)
            os.close(saved)


def worker(rank: int, world: int, stage: int, model_name: str, folder: str) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store-{stage}", rank=rank, world_size=world)
    import shardproof

    before = resident()
    model = shardproof.shard(build(model_name), stage)
    gc.collect()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(SHAPES[model_name].vocabulary, (1, 9), generator=torch.Generator().manual_seed(rank))
    with no_chatter(), Ledger(storages(p.detach().local for p in model.parameters())) as ledger:
        for _ in range(3):
            model(tokens).backward()
            gradients = storages(p.grad.local for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        ledger.note("between steps")
    at, peak = ledger.read()
    total = shardproof.stats(model).total
    measured = {
        "parameters": total.shard_bytes,
        "optimizer": storages(t for state in optimizer.state.values() for t in state.values()),
        "gradients": gradients,
        "gathered": total.gathered_peak_bytes,
        "between_steps": at["between steps"],
        "peak": peak,
    }
    if rank == 0:
        with open(f"{folder}/{stage}.json", "w") as file:
            json.dump({"measured": measured, "resident": resident() - before}, file)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


LINES = {
    "parameters": "parameters held",
    "optimizer": "optimizer state",
    "gradients": "gradients",
    "gathered": "gathered, at most",
    "between_steps": "all, between steps, with buffers kept for the next",
    "peak": "all, peak in a step",
}


def show(formula: Formula, measured: dict[str, int], grown: int, tolerance: float) -> bool:
    """Print one stage's table. Returns whether every line is within the tolerance."""
    print(f"\n### stage {formula.stage}, {formula.world} processes; MB of one process\n")
    print("| | computed | measured | off by |\n|---|---:|---:|---:|")
    good = True
    for key, text in LINES.items():
        wanted, found = getattr(formula, key), measured[key]
        off = (found - wanted) / wanted if wanted else float(found > 0)
        good = good and abs(off) <= tolerance
        mark = "" if abs(off) <= tolerance else " **"
        print(f"| {text} | {wanted / 1e6:.1f} | {found / 1e6:.1f} | {100 * off:+.1f} %{mark} |")
    print(f"| (resident memory, grown by) | | {grown / 1e6:.0f} | |", flush=True)
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(SHAPES), default="100m")
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--stages", type=int, nargs="+", choices=[0, 1, 2, 3], default=[0, 1, 2, 3])
    parser.add_argument("--tolerance", type=float, default=0.05)
    args = parser.parse_args()
    sizes = Sizes.of(build(args.model))
    print(f"{args.model}: {sizes.whole / FP32 / 1e6:.1f} M parameters, fp32, AdamW")
    good = True
    with tempfile.TemporaryDirectory() as folder:
        for stage in args.stages:
            mp.spawn(worker, args=(args.world, stage, args.model, folder), nprocs=args.world)
            with open(f"{folder}/{stage}.json") as file:
                result = json.load(file)
            formula = Formula(sizes, stage, args.world)
            good = show(formula, result["measured"], result["resident"], args.tolerance) and good
    if not good:
        sys.exit("** off by more than the tolerance")


if __name__ == "__main__":
    main()
