"""Where does a step of an engine in throughput.py spend its time on an accelerator? Its kernels, by time.

    python benchmarks/kernels.py ours-3 --model 7b
    python benchmarks/kernels.py plain ours-3 --compile        # each in its own process

First, two steps are timed without a profiler, after those in which the engine looks for edits. If the host takes as
long to issue a step's kernels as the step takes, the device waits for the host; if the kernels together take as long as
the step, the host is hidden, and its Python costs nothing.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import warnings
from collections import Counter

import torch.distributed as dist
import torch.multiprocessing as mp
from card import clock, device_here, forget_peak, matrix_rate
from qwen import SHAPES, WARM, Setting, operations, steps_of
from throughput import ENGINES
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

SHOWN = 24


def work(_: int, setting: Setting, folder: str) -> None:
    warnings.filterwarnings("ignore")
    from shardproof.zero.device import peak_memory

    device = device_here()
    if setting.engine == "fsdp2":
        dist.init_process_group(init_method=f"file://{folder}/store", rank=0, world_size=1)
    rate, step = matrix_rate(device), ENGINES[setting.engine](setting, device)
    of_step = steps_of(setting, device)
    for micros in of_step[:WARM]:
        step(micros)
    forget_peak()
    begin, asked = clock(), time.perf_counter()
    for micros in of_step[WARM : WARM + 2]:
        step(micros)
    asked = (time.perf_counter() - asked) / 2
    seconds = (clock() - begin) / 2
    mfu = setting.tokens * operations(setting) / seconds / rate
    told = f"{1e3 * seconds:.1f} ms a step, asked for in {1e3 * asked:.1f}; MFU {100 * mfu:.1f} %"
    print(f"\n{setting.engine}, {setting.model}: {told}, peak {peak_memory() / 1e9:.1f} GB")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        step(of_step[-1])
        clock()
    events = [event for event in found.events() if event.device_type != DeviceType.CPU]
    taken, calls = Counter[str](), Counter[str]()
    for event in events:
        taken[event.name] += event.time_range.elapsed_us()
        calls[event.name] += 1
    print(f"{sum(taken.values()) / 1e3:.1f} ms of kernels")
    for name, microseconds in taken.most_common(SHOWN):
        print(f"{microseconds / 1e3:10.2f} ms {calls[name]:6d} x {name[:100]}")
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = device_here().type != "cpu"
    parser.add_argument("engines", nargs="+", choices=list(ENGINES))
    parser.add_argument("--model", choices=list(SHAPES), default="0.5b" if here else "tiny")
    parser.add_argument("--case", choices=["full", "lora"], default="full")
    parser.add_argument("--compile", action="store_true", help="each block, with torch.compile")
    parser.add_argument("--attn", default="varlen")
    options = parser.parse_args()
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    shape = SHAPES[options.model]
    for engine in options.engines:
        setting = Setting(
            engine=engine,
            model=options.model,
            case=options.case,
            rows=shape.rows,
            accumulate=shape.accumulate,
            length=4096 if here else 64,
            documents=4,
            checkpointing=shape.checkpointing and options.case == "full",
            compiled=options.compile,
            attn=options.attn,
            steps=3,
            warm=WARM,
        )
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(work, args=(setting, folder), nprocs=1)


if __name__ == "__main__":
    main()
