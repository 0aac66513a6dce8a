"""Answers that several processes share: `--sequence-parallel` with generated answers.

Rows are long because of their answers, and generating these does not need activations of full rows. So each rank
generates its own answers, and runs whatever needs no gradients on full rows: TRL distributes prompts and gathers
rewards as usual. Only then do the ranks of a group exchange their rows and learn from all of them together, each from a
part of every row.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardproof.train.rlhf.resampling import rows_of, with_rows

if TYPE_CHECKING:
    from shardproof.parallel.sequence import SequenceParallel


def as_dealt_out(args: Any, sequence: int) -> Any:
    """TRL's arguments for groups of `sequence` ranks: TRL counts the answers of a generation as if each rank learned
    from its own."""
    args = copy.copy(args)
    args.generation_batch_size //= sequence
    return args


def of_group(made: dict[str, Any], sequence: SequenceParallel, pad: int) -> tuple[dict[str, Any], int]:
    """The answers of all ranks of a group, the same on each of them, and a common random number. Collective.

    Args:
        made: the output of TRL's trainers on this rank: a row of each tensor for each answer.
        pad: the padding token, after an answer and before a question.
    """
    drawn = int(torch.randint(2**62, ()))
    everyone: list[Any] = [None] * sequence.size
    dist.all_gather_object(everyone, (rows_of(made), drawn), group=sequence.group)
    whole = with_rows(made, [row for rows, _ in everyone for row in rows], pad)
    if "num_items_in_batch" in made:  # each token is learned by all of them, and TRL divides by their sum
        whole["num_items_in_batch"] = made["num_items_in_batch"] * sequence.size
    return whole, everyone[0][1]
