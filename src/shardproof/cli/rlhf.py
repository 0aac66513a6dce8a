"""`shardproof rlhf`: train on preferences, or on rewards for what the model writes."""

from __future__ import annotations

from collections.abc import Sequence

from shardproof.cli import options, training
from shardproof.train.options.rlhf_config import RlhfConfig

DESCRIPTION = """Train a language model on preferences (dpo, kto, orpo, simpo, cpo), make a reward model (rm), let the
model write and reward what it wrote (grpo, rloo, ppo), or let it learn from a teacher (gkd).
'shardproof rlhf run.yaml' reads options from a file; what stands on the command line wins."""


def parser() -> options.Parser:
    """The option table of the command."""
    return training.parser_of(RlhfConfig, DESCRIPTION)


def run(argv: Sequence[str]) -> int:
    """The command. Returns the exit code."""
    return training.run(RlhfConfig, DESCRIPTION, argv)
