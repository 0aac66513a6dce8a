"""Answers that several processes share: `--sequence-parallel` where answers are generated.

A row is long because of its answer, and to write it takes no activations of whole rows. So each rank writes answers of
its own, and asks about them whole what is asked without gradients: TRL then deals out prompts and gathers rewards as it
always does. Only then the ranks of a group exchange what they have made, and learn from all of it together, each from
a part of every row.
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
    """TRL's arguments for groups of `sequence` ranks: it counts the answers of a generation as if each rank learnt from
    answers of its own."""
    args = copy.copy(args)
    args.generation_batch_size //= sequence
    return args


def of_group(made: dict[str, Any], sequence: SequenceParallel, pad: int) -> tuple[dict[str, Any], int]:
    """What the ranks of a group have made of their answers, the same on all of them, and a number that they all drew
    together. Collective.

    Args:
        made: of this rank, by TRL's trainers: a row of each tensor for each answer.
        pad: the token behind an answer, and in front of a question.
    """
    drawn = int(torch.randint(2**62, ()))
    everyone: list[Any] = [None] * sequence.size
    dist.all_gather_object(everyone, (rows_of(made), drawn), group=sequence.group)
    whole = with_rows(made, [row for rows, _ in everyone for row in rows], pad)
    if "num_items_in_batch" in made:  # each token is learnt by all of them, and TRL divides by their sum
        whole["num_items_in_batch"] = made["num_items_in_batch"] * sequence.size
    return whole, everyone[0][1]
