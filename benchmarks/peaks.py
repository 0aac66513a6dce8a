"""How much memory does a rank need at its peak under each engine? Each engine runs in its own processes.

    python benchmarks/peaks.py                                   # 36 M parameters, 2 ranks
    python benchmarks/peaks.py --model 150m --world 4
    python benchmarks/peaks.py --case lora --engines fsdp2 deepspeed-3 ours-3

The engines, model and data are those of step_time.py. Per rank, the largest of all ranks:

- `tensors`: the most that torch's CPU allocator had handed out at any moment of the second and third step (the profiler
  records every allocation and release), including whatever the engine keeps from one step to the next. Ours keeps its
  buffers on the CPU, where fresh pages cost more than messages; on an accelerator it keeps none.
- `resident`: how far the physical memory of the process at its peak in the same steps exceeds that before the model was
  built: including buffers of gloo and of DeepSpeed's own operators, and memory that the heap keeps from building.

Each is the median of `--repeats` runs: the profiler does not see allocations and releases in other threads, and
sometimes a gloo thread is the last to hold data that it has sent (FSDP2: 410 to 474 MB in eight runs). Both are also
given as ratios to the peers at the same stage: stage 3 to FSDP2 and DeepSpeed-3, stages 1 and 2 to DeepSpeed's, stage 0
to DDP with and without views.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import tempfile
from dataclasses import replace
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from decoder import SHAPES
from memory import Ledger, no_chatter, resident
from step_time import ENGINES, USUAL, Setting, available, quiet, share

PEERS = {
    "ours-0": ["ddp", "ddp-views"],
    "ours-1": ["deepspeed-1"],
    "ours-2": ["deepspeed-2"],
    "ours-3": ["fsdp2", "deepspeed-3"],
}
WARM = "warm"  # the moment after the first step


def peak_resident() -> int:
    """Bytes: the peak physical memory of this process since `forget_peak_resident`."""
    with open("/proc/self/status") as file:
        found = re.search(r"VmHWM:\s+(\d+) kB", file.read())
    assert found is not None
    return 1024 * int(found[1])


def forget_peak_resident() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def worker(rank: int, setting: Setting, report: str) -> None:
    quiet()
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(setting.world))
    dist.init_process_group("gloo", init_method=f"file://{setting.store}", rank=rank, world_size=setting.world)
    (name,) = setting.engines
    tiny = replace(setting, model="tiny", batch=1, length=8)
    ENGINES[name](tiny)(share(tiny, 0, rank))  # imports and setup at an engine's first use are not counted
    gc.collect()
    before = resident()
    with no_chatter(), Ledger(0) as ledger:
        step = ENGINES[name](setting)
        step(share(setting, 0, rank))
        ledger.note(WARM)
        forget_peak_resident()
        for at in (1, 2):
            step(share(setting, at, rank))
        grown = peak_resident() - before
    most = torch.tensor([ledger.read(since=WARM)[1], grown])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    if rank == 0:
        with open(report, "w") as file:
            json.dump(dict(zip(("tensors", "resident"), most.tolist(), strict=True)), file)
    dist.barrier()
    dist.destroy_process_group()


def show(found: dict[str, dict[str, float]], setting: Setting) -> None:
    print(
        f"\n{setting.model}, {setting.case}, {setting.world} ranks, {setting.batch} x {setting.length} tokens per "
        "rank, fp32, AdamW; MB of the rank that needs most\n"
    )
    print("| engine | tensors | resident | to the peers at this stage: tensors, resident |\n|---|---:|---:|---|")
    for name, peak in found.items():
        peers = [(peer, found[peer]) for peer in PEERS.get(name, []) if peer in found]
        ratios = [f"{peer} {', '.join(f'{peak[k] / of[k]:.2f}' for k in peak)}" for peer, of in peers]
        print(f"| {name} | {peak['tensors'] / 1e6:.0f} | {peak['resident'] / 1e6:.0f} | {'; '.join(ratios)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, default=2, help="ranks, one thread each")
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=USUAL)
    parser.add_argument("--model", default="36m", help=f"{', '.join(SHAPES)}, or WIDTHxLAYERS")
    parser.add_argument("--case", choices=["full", "lora", "checkpointed"], default="full")
    parser.add_argument("--batch", type=int, default=2, help="rows per rank")
    parser.add_argument("--length", type=int, default=64, help="tokens per row")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each engine")
    parser.add_argument("--json", metavar="FILE", help="write every measurement here")
    args = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in available(args.engines):
            setting = Setting(
                model=args.model,
                case=args.case,
                together=1,
                world=args.world,
                batch=args.batch,
                length=args.length,
                rounds=0,
                check=0,
                warm=0,
                tolerance=0.0,
                optimizer="fused",
                clip=None,
                engines=(name,),
                store="",
            )
            runs = []
            for repeat in range(args.repeats):
                report = f"{folder}/{name}-{repeat}"
                mp.spawn(worker, args=(replace(setting, store=f"{report}.store"), report), nprocs=args.world)
                with open(report) as file:
                    runs.append(json.load(file))
            found[name] = {what: median(run[what] for run in runs) for what in runs[0]}
    show(found, setting)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
