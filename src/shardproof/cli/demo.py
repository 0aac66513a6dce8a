"""`shardproof demo`: two processes, stage 3, the embedded model and text, in under two minutes."""

from __future__ import annotations

import time
from collections.abc import Sequence

from shardproof.cli import sft

OPTIONS = {
    "model": "tiny",
    "dataset": ["stdlib"],
    "stage": 3,
    "nproc": 2,
    "per_device_batch_size": 8,
    "max_steps": 300,
    "max_length": 96,
    "learning_rate": 3e-3,
    "val_split": 0.02,
}
QUESTION = "What does os.path.join do?"


def run(argv: Sequence[str]) -> int:
    """`shardproof sft` with the options above; any of them can be given another value."""
    started = time.perf_counter()
    given = [] if set(argv) & {"-h", "--help"} else [f"--{name.replace('_', '-')}={value}" for name, value in _single()]
    config, names = sft.parse([*given, *argv])
    code = sft.start(config, names, ask=QUESTION)
    if not code:
        print(f"the demo took {time.perf_counter() - started:.0f} s")
    return code


def _single() -> list[tuple[str, object]]:
    return [(name, value[0] if isinstance(value, list) else value) for name, value in OPTIONS.items()]
