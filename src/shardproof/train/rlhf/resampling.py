"""Replaces questions whose answers all get the same reward by others: DAPO's dynamic sampling.

Advantages compare the answers to one question. If all get the same reward, nothing is learned from them, and the step
is effectively smaller. So more questions are asked, a batch over all ranks at a time, and those whose answers differ
replace such questions in order. All ranks see the answers of all, so the choice does not depend on the number of ranks.
Only rewards are compared: the distance to a reference, which may be part of advantages, is never the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

Row = dict[str, torch.Tensor]
LEFT = ("prompt_ids", "prompt_mask")  # padded on the left; all other per-token tensors on the right
WORTH = "worth"  # rewards of an answer (judges,), one for each that is compared separately, NaN for none
ROUNDING = 1e-6  # rounding errors of weights and sums, relative to a reward


def with_others(
    made: dict[str, Any],
    generations: int,
    more: Iterator[list[Any]],
    write: Callable[[list[Any]], dict[str, Any]],
    gather: Callable[[list[Row]], list[Row]],
    process: int,
    pad: int,
) -> dict[str, Any]:
    """The output of TRL's trainers for a batch, with questions that teach nothing replaced by others while there are
    any. Collective.

    Args:
        made: that output on this rank: a row of each tensor for each answer, and its rewards under `WORTH`, which are
            removed from the result.
        generations: number of answers to a question, which are consecutive over all ranks.
        more: further batches of questions for this rank.
        write: generates and scores answers. Collective.
        gather: concatenates the lists of all ranks. Collective.
        process: this rank.
        pad: the padding token, after an answer and before a question.
    """
    size = len(made["advantages"])
    worth = gather([{WORTH: one} for one in made[WORTH].cpu()])
    idle = [i for i in range(len(worth) // generations) if not _teaches(worth[i * generations : (i + 1) * generations])]
    if not idle:
        return _without_worth(made)
    groups = _groups(made, generations, gather)
    while idle and (questions := next(more, None)):
        for group in _groups(write(questions), generations, gather):
            if idle and _teaches(group):
                groups[idle.pop(0)] = group
    rows = [row for group in groups for row in group]
    batch = with_rows(made, rows[process * size : (process + 1) * size], pad)
    learnt = sum((row["completion_mask"] * row.get("tool_mask", 1)).sum() for row in rows)
    if "num_items_in_batch" in made:
        batch["num_items_in_batch"] = torch.as_tensor(learnt, device=made["advantages"].device)
    return _without_worth(batch)


def rows_of(made: dict[str, Any]) -> list[Row]:
    """The output of TRL's trainers for a batch as single answers, on the host."""
    size = len(made["advantages"])
    tensors = {name: v.cpu() for name, v in made.items() if isinstance(v, torch.Tensor) and v.dim() and len(v) == size}
    return [{name: value[i] for name, value in tensors.items()} for i in range(size)]


def with_rows(made: dict[str, Any], rows: list[Row], pad: int) -> dict[str, Any]:
    """The same output with these rows instead."""
    device = made["advantages"].device
    return {**made, **{name: _together([row[name] for row in rows], name, pad).to(device) for name in rows[0]}}


def _groups(made: dict[str, Any], generations: int, gather: Callable[[list[Row]], list[Row]]) -> list[list[Row]]:
    """The answers of all ranks, question by question."""
    rows = gather(rows_of(made))
    return [rows[i : i + generations] for i in range(0, len(rows), generations)]


def _teaches(group: list[Row]) -> bool:
    for worth in torch.stack([row[WORTH] for row in group], dim=1):
        said = worth[~worth.isnan()]
        if len(said) > 1 and said.max() - said.min() > ROUNDING * said.abs().max():
            return True
    return False


def _without_worth(made: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in made.items() if name != WORTH}


def _together(values: list[torch.Tensor], name: str, pad: int) -> torch.Tensor:
    if not values[0].dim():
        return torch.stack(values)
    longest = max(len(value) for value in values)
    filled = pad if name.endswith("_ids") else 0
    padded = []
    for value in values:
        room = value.new_full((longest - len(value),), filled)
        padded.append(torch.cat([room, value] if name in LEFT else [value, room]))
    return torch.stack(padded)
