"""Promise: queries and what matches them, in any form that ms-swift and sentence-transformers know, become texts;
other rows are told with what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardproof.data.encoding import encode
from shardproof.data.encoding.embed import MatchEncoder, collate_matches, encode_matches, texts_of
from shardproof.data.encoding.rank import PairEncoder
from shardproof.data.forms.matches import Matches
from shardproof.data.forms.parts import Problem
from shardproof.data.forms.texts import WRITE
from shardproof.data.rows import Row, read_rows

CALLING = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}


def turns(*texts: str, role: str = "user") -> list[dict[str, str]]:
    return [{"role": role, "content": text} for text in texts]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": turns("q"), "positive_messages": [turns("p")], "negative_messages": [turns("n"), turns("m")]},
        {"query": "q", "positive": "p", "negative": ["n", "m"]},
        {"query": "q", "response": "p", "rejected_response": ["n", "m"], "label": 1},
        {"query": "q", "response": "p", "rejected_response": '["n", "m"]'},
        {"anchor": "q", "positive": "p", "negative_1": "n", "negative_2": "m"},
        {"anchor": "q", "query": None, "positive": "p", "negative_1": "n", "negative_2": "m"},  # of a table
        {"messages": turns("q"), "positive_messages": turns("p"), "negative_messages": [turns("n"), turns("m")]},
    ],
)
def test_forms(record: dict[str, Any]) -> None:
    messages, extra, _ = Matches()(record)
    assert messages == turns("q")
    assert (extra["positive"], extra["negative"]) == (["p"], ["n", "m"])


def test_labels_are_those_of_pairs() -> None:
    _, extra, _ = Matches(scored=True)({"query": "q", "response": "p", "label": "0.8", "id": 3})
    assert extra["label"] == 0.8
    assert extra["columns"] == {"response": "p", "label": "0.8", "id": 3}
    _, extra, _ = Matches(needed=False)({"query": "q"})
    assert extra["positive"] == extra["negative"] == []


@pytest.mark.parametrize(
    ("kind", "record", "why"),
    [
        (Matches(), {"query": "q"}, "there is no 'positive', 'positive_messages' or 'response' (it has query)"),
        (Matches(), {"query": "q", "positive": ""}, "field 'positive' is empty"),
        (Matches(), {"query": "q", "positive_messages": []}, "field 'positive_messages' is empty"),
        (Matches(), {"positive": "p"}, "it has none of 'messages', 'prompt' and 'query'"),
        (Matches(), {"query": "q", "positive": ["a", "b"]}, "it has 2 positives, but one is expected"),
        (Matches(), {"query": "q", "positive": " "}, "positive[0] is empty"),
        (Matches(), {"query": "q", "positive": 3}, "field 'positive' is a number (3), but a text"),
        (Matches(), {"query": "q", "positive": "p", "negative": [None]}, "negative[0] is null"),
        (Matches(), {"query": "q", "positive": "p", "label": 0}, "treats every positive as a match"),
        (Matches(several=True), {"query": "q", "positive": "p", "label": 0}, "a match: make a negative of it"),
        (Matches(), {"query": "<image>q", "images": ["x.png"], "positive": "p"}, "this task takes text only"),
        (Matches(), {"query": "q", "positive": "<bbox>", "objects": {"bbox": [[1, 2]]}}, "<bbox> refers to"),
        (
            Matches(),
            {"query": "q", "positive": "p", "tools": [{"name": "f"}]},
            "it has tools, which this task does not read",
        ),
        (Matches(), {"query": "q", "positive_messages": [[*turns("p"), CALLING]]}, "positive_messages[0][1] has calls"),
        (Matches(scored=True), {"query": "q", "positive": "p"}, "field 'label' is missing"),
        (Matches(scored=True), {"query": "q", "positive": "p", "label": 4}, "between -1 and 1: scale labels"),
        (Matches(scored=True), {"query": "q", "positive": "p", "label": "x"}, "a number is expected"),
        (Matches(scored=True), {"query": "q", "positive": "p", "negative": "n", "label": 1}, "it has negatives"),
        (Matches(scored=True, binary=True), {"query": "q", "positive": "p", "label": 0.5}, "takes only 0 and 1"),
    ],
)
def test_bad_rows(kind: Matches, record: dict[str, Any], why: str) -> None:
    with pytest.raises(Problem) as problem:
        kind(record)
    assert why in str(problem.value)


def test_turns_that_are_texts_alone_hold_nothing_else(tokenizer: Any) -> None:
    """Where no template reads them, their calls and their thinking were left out."""
    from shardproof.data.encoding.judged import JudgedEncoder, take_pairs

    take_pairs(tokenizer, "m")
    thinks = {"role": "assistant", "content": "a", "reasoning_content": "b"}
    for encoder in (MatchEncoder(tokenizer), JudgedEncoder(tokenizer)):
        for turn, what in ((CALLING, "calls of tools"), (thinks, "thinking")):
            row = Row([*turns("q"), turn], "x", 1, {"positive": ["p"], "negative": [], "label": None})
            ((_, problem),) = encoder.texts([row])
            assert (
                problem
                == f"messages[1] has {what} besides its text, but there is no chat template to write it: {WRITE}"
            )


def test_a_batch_has_queries_then_positives_then_negatives() -> None:
    rows = [
        {"input_ids": [1, 2, 3, 4, 5, 6], "lengths": [1, 3, 2], "labels": 1.0},
        {"input_ids": [7, 2, 3, 4], "lengths": [1, 3], "labels": 0.5},
    ]
    assert texts_of(rows[0]) == [[1], [2, 3, 4], [5, 6]]
    batch = collate_matches(rows, 9)
    assert batch["input_ids"].tolist() == [[1, 9, 9], [7, 9, 9], [2, 3, 4], [2, 3, 4], [5, 6, 9]]
    assert batch["attention_mask"].sum(1).tolist() == [1, 1, 3, 3, 2]
    labels = batch["labels"]
    assert labels["rows"] == 2
    assert labels["scores"].tolist() == [1.0, 0.5]
    first, second, third = labels["keys"].tolist()
    assert first == second != third


@pytest.mark.parametrize("kind", [MatchEncoder, PairEncoder])
def test_processes_encode_the_same(tokenizer: Any, tmp_path: Path, monkeypatch: Any, kind: type[MatchEncoder]) -> None:
    """Where there are more rows than one process encodes soon, several do."""
    monkeypatch.setattr(encode, "_FEW", 100)
    file = tmp_path / "rows.jsonl"
    rows = ({"query": f"q{i}", "positive": f"p{i}", "negative": [f"n{i}"] * (i % 3)} for i in range(150))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = []
    for workers in (0, 2):
        read = read_rows([file], form=Matches(several=True).form)
        dataset = encode_matches(read, tokenizer, kind(tokenizer, "find:"), max_length=None, workers=workers)
        found.append((dataset[:], dataset.report))
    assert found[0] == found[1]
    assert found[0][1].kept == 150
