"""`shardproof demo`: two processes, stage 3, the embedded model and text, in under two minutes on two cores."""

from __future__ import annotations

from collections.abc import Sequence

from shardproof.cli import sft

OPTIONS = (
    "--model tiny --dataset stdlib --val-split 0.02 --max-length 96 --stage 3 --nproc 2"
    " --per-device-batch-size 8 --max-steps 300 --learning-rate 3e-3"
).split()
QUESTION = "What does os.path.join do?"


def run(argv: Sequence[str]) -> int:
    """`shardproof sft` with the options above, each of which can be given another value, and a question at the end."""
    return sft.start(*sft.parse([*OPTIONS, *argv]), ask=QUESTION)
