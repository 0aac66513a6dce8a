"""`shardproof sft`: fine-tune on conversations, questions and answers, or raw text."""

from __future__ import annotations

from collections.abc import Sequence

from shardproof.cli import options, training
from shardproof.train.options.config import SftConfig

DESCRIPTION = """Fine-tune a model on conversations, questions and answers, or raw text (with images, audio, video
where it takes them), on one or several processes and machines.
'shardproof sft run.yaml' reads options from a file; what stands on the command line wins."""


def parser() -> options.Parser:
    """The option table of the command."""
    return training.parser_of(SftConfig, DESCRIPTION)


def run(argv: Sequence[str]) -> int:
    """The command. Returns the exit code."""
    return training.run(SftConfig, DESCRIPTION, argv)


def parse(argv: Sequence[str]) -> tuple[SftConfig, set[str]]:
    """The options, and the names of those that were given."""
    return training.parse(SftConfig, DESCRIPTION, argv)
