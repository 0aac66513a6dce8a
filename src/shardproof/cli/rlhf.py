"""`shardproof rlhf`: train on preferences, or on rewards for generated answers."""

from __future__ import annotations

from collections.abc import Sequence

from shardproof.cli import options, training
from shardproof.train.options.rlhf_config import RlhfConfig

DESCRIPTION = """Train a language model on preferences (dpo, kto, orpo, simpo, cpo), train a reward model (rm), reward
answers that the model generates (grpo, rloo, ppo), or distil a teacher (gkd). 'shardproof rlhf run.yaml' reads options
from a file; the command line takes precedence."""


def parser() -> options.Parser:
    """The option table of the command."""
    return training.parser_of(RlhfConfig, DESCRIPTION)


def run(argv: Sequence[str]) -> int:
    """The command. Returns the exit code."""
    return training.run(RlhfConfig, DESCRIPTION, argv)
