"""What is asked of the runs of every kind of reranker."""

from __future__ import annotations

import json
from typing import Any

import pytest


def lines(done: Any, name: str) -> list[dict[str, Any]]:
    file = done[name].folder.with_name(f"{name}.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def goes_on(done: Any) -> None:
    """`went on` is `lora` from its third step."""
    for key in ("loss", "grad_norm"):
        assert done["went on"].series(key) == done["lora"].series(key)[3:]


def ranks_as_it_was_evaluated(done: Any) -> None:
    """The scores of `infer` rank as the evaluation says, and those of the merged model are the same."""
    for run, name in (("lora", "scored"), ("full", "by ranks")):
        ranks = []
        for line in lines(done, name):
            positives = len(line["positive_messages"])
            best = max(line["scores"][:positives])
            ranks.append(1 + sum(score >= best for score in line["scores"][positives:]))
        mrr = sum(1 / rank for rank in ranks) / len(ranks)
        assert mrr == pytest.approx(done[run].records[-1]["eval_mrr"], abs=1e-6)
    for line, other in zip(lines(done, "scored"), lines(done, "of merged"), strict=True):
        assert other["scores"] == pytest.approx(line["scores"], abs=1e-4)
