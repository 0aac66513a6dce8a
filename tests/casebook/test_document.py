"""Promise: the page and the summary say what the results say, and the page in docs/ is the one of casebook.json."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from shardproof.casebook.case import all_cases
from shardproof.casebook.document import as_json, kept, ordered, page, read_json, results_of, write_json
from shardproof.casebook.runner import Result, failures
from shardproof.casebook.table import cell, line, summary
from shardproof.errors import ConfigError

ROOT = Path(__file__).parents[2]
CASE = "dummy_loss_over_unused_adapter"
RESULTS = [
    Result(CASE, "ours-3", None, "equal", 2e-7, "loss, step 0", 0.1),
    Result(CASE, "ddp", None, "error", text="RuntimeError: a|b"),
    Result(CASE, "ddp", "find_unused_parameters=True", "equal", 0.0),
    Result(CASE, "deepspeed-2", None, "wrong", math.inf, "loss, step 1"),
    Result("plain_loop", "ours-3", None, "wrong", 0.25, "weights of head.bias"),
    Result("plain_loop", "ddp", None, "hang", text="rank 0 in train (x.py:1)"),
    Result("plain_loop", "deepspeed-2", None, "n/a", text="a reason"),
]


def test_results_survive_json():
    content = json.loads(json.dumps(as_json(RESULTS, 2, 20.0), allow_nan=False))
    assert results_of(content) == RESULTS
    assert content["versions"]["torch"]
    assert content["cases"][0]["threads"][0] == "modelscope/ms-swift#3262"


def test_an_update_keeps_what_it_does_not_run(tmp_path):
    file = tmp_path / "casebook.json"
    write_json(file, RESULTS, 2, 20.0)
    assert kept(file, [CASE], ["ddp", "deepspeed-2"], 2, 20.0) == [RESULTS[0], *RESULTS[4:]]
    with pytest.raises(ConfigError, match="world 2, not 4"):
        kept(file, [CASE], ["ddp"], 4, 20.0)


def test_results_stand_in_the_order_of_the_book():
    assert ordered(RESULTS[::-1]) == [RESULTS[0], RESULTS[2], RESULTS[1], *RESULTS[3:]]


def test_the_summary_counts_a_case_as_it_is_and_at_its_best():
    assert summary(RESULTS) == [
        "ours 3: 1 equal, 1 wrong, 0 error, 0 hang",
        "DDP: 0 equal, 0 wrong, 1 error, 1 hang; with the best documented setting 1 equal, 0 wrong, 0 error, 1 hang",
        "ZeRO-2: 0 equal, 1 wrong, 0 error, 0 hang, 1 not run",
    ]


def test_only_ours_can_fail():
    assert [r.case for r in failures(RESULTS)] == ["plain_loop"]


def test_a_cell_shows_the_case_as_it_is_and_with_a_setting():
    assert cell(RESULTS[1:3]) == "error > equal"
    assert cell(RESULTS[4:5]) == "wrong 2e-01"


def test_a_line_tells_the_reason():
    assert "error (RuntimeError: a|b)" in line(RESULTS[1])


def test_the_page_holds_the_table_and_what_was_seen():
    text = page(as_json(RESULTS, 2, 20.0))
    assert f"| {CASE} | add a zero-weighted" in text
    assert "| equal | error > equal | wrong |" in text
    assert "- DDP error: RuntimeError: a\\|b" in text
    assert "- DDP with find_unused_parameters=True: equal" in text
    assert "- ours 3 wrong 2e-01, in weights of head.bias" in text


def test_a_missing_file_is_one_message(tmp_path):
    with pytest.raises(ConfigError, match="is not a casebook"):
        read_json(tmp_path / "none.json")


def test_the_page_in_the_documents_is_generated():
    assert (ROOT / "docs/casebook.md").read_text() == page(read_json(ROOT / "casebook.json"))


def test_every_failure_class_is_shown_by_something_that_is_there():
    """docs/failure-classes.md: each case knows its classes, each test stands in its file."""
    shown: dict[int, str] = {}
    for row in re.findall(r"^\| (\d+) \| (.*) \|$", (ROOT / "docs/failure-classes.md").read_text(), re.MULTILINE):
        shown[int(row[0])] = row[1].split(" | ")[-1]
    assert list(shown) == list(range(1, 61))
    for number, text in shown.items():
        cases, tests = re.findall(r"case `(\w+)`", text), re.findall(r"`([\w/]+\.py)::(\w+)`", text)
        assert len(cases) + len(tests) == text.count(", ") + 1, text
        for name in cases:
            assert name in all_cases(), name
        for file, name in tests:
            assert f"def {name}(" in (ROOT / "tests" / file).read_text(), f"{number}: {file}::{name}"
    for name, case in all_cases().items():
        for number in case.classes:
            assert f"case `{name}`" in shown[number], f"{name} is of class {number}"
