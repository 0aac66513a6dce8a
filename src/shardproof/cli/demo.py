"""`shardproof demo`: two processes, stage 3, the embedded model and text, in under two minutes on two cores."""

from __future__ import annotations

from collections.abc import Sequence

from shardproof.cli import options, sft, training
from shardproof.cli.precision import accelerators
from shardproof.train.options.config import SftConfig

OPTIONS = (
    "--model tiny --dataset stdlib --val-split 0.02 --max-length 96 --stage 3 --nproc 2"
    " --per-device-batch-size 8 --max-steps 300 --learning-rate 3e-3"
).split()
HELP = f"""usage: shardproof demo [options]

Train a small model on the documentation of Python's standard library, then ask it a question. Equivalent to
  shardproof sft {" ".join(OPTIONS)}
and takes the same options: shardproof sft --help lists them."""
QUESTION = "What does os.path.join do?"


def parser() -> options.Parser:
    """The option table of the command."""
    return training.parser_of(
        SftConfig, "Train a small model on the documentation of Python's standard library.", name="demo"
    )


def run(argv: Sequence[str]) -> int:
    """`shardproof sft` with the options above, each of which can be overridden, and a question at the end. Two
    processes cannot share an accelerator."""
    if "--help" in argv or "-h" in argv:
        print(HELP)
        return 0
    given = {arg.split("=", 1)[0].replace("_", "-") for arg in argv}
    pairs = zip(OPTIONS[::2], OPTIONS[1::2], strict=True)
    unasked = [word for pair in pairs if pair[0] not in given for word in pair]
    if "--nproc" not in given and accelerators() == 1:
        unasked[unasked.index("--nproc") + 1] = "1"
    return training.start(*sft.parse([*unasked, *argv]), ask=QUESTION)
