"""What does each engine's Python cost per step on one process?

    python benchmarks/host.py                       # every weight trained
    python benchmarks/host.py --case lora
    python benchmarks/host.py --nodes 0             # as many graph nodes as with large matrices

The layers are so narrow that next to nothing is computed: a step takes the time that the host needs to issue its
operations. On an accelerator this is hidden while the device is busy, and lengthens the step when it is not; so this is
the part of an engine's overhead there that can be measured without one. Models, rows, loops and engines are those of
throughput.py (world size 1), all in one process, in a new random order in each round. Times are CPU time of the main
thread, which also runs backward; a difference to `plain` is the median of the differences within rounds.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
from qwen import SHAPES, WARM, Setting, Shape, batches
from throughput import ENGINES

NAMES = ["plain", "autocast", "fsdp2", "ours-0", "ours-3"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--case", choices=["full", "lora"], default="full")
    parser.add_argument("--engines", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument(
        "--nodes", type=int, metavar="ELEMENTS", help="parameters larger than this get their own graph node"
    )
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if options.nodes is not None:
        from shardproof.zero import autograd

        autograd.SMALL = options.nodes
    SHAPES["narrow"] = Shape(256, 64, 160, options.layers, 4, 2, True, 1, 1, False)
    setting = Setting(
        engine="",
        model="narrow",
        case=options.case,
        rows=1,
        accumulate=1,
        length=16,
        documents=1,
        attn="sdpa",
        steps=1,
        warm=0,
    )
    with tempfile.TemporaryDirectory() as folder:
        if "fsdp2" in options.engines:
            dist.init_process_group(init_method=f"file://{folder}/store", rank=0, world_size=1)
        device = torch.device("cpu")
        steps = {name: ENGINES[name](setting, device) for name in options.engines}
        micros = batches(setting)
        taken: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(WARM + options.rounds):
            for name in random.sample(options.engines, len(options.engines)):
                begin = time.thread_time()
                steps[name](micros)
                taken[name].append(time.thread_time() - begin)
        if dist.is_initialized():
            dist.destroy_process_group()
    measured = {name: seconds[WARM:] for name, seconds in taken.items()}
    first = options.engines[0]
    print(f"{options.layers} layers, {options.case}, {options.rounds} rounds\n")
    print(f"| engine | ms of processor | beside {first} | more a layer, us |\n|---|---:|---:|---:|")
    for name, seconds in measured.items():
        ratio = statistics.median(a / b for a, b in zip(seconds, measured[first], strict=True))
        more = statistics.median(a - b for a, b in zip(seconds, measured[first], strict=True))
        ms = 1e3 * statistics.median(seconds)
        print(f"| {name} | {ms:.1f} | {ratio:.2f} | {1e6 * more / options.layers:.0f} |")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
