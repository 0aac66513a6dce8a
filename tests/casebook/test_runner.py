"""Promise: every end of a case is told as what it is, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import time

import pytest

from shardproof.casebook.runner import Result, run_all

pytestmark = pytest.mark.slow  # it waits for cases that hang

NAMES = [f"casebook.broken.{name}" for name in ("hangs", "raises", "differs", "dies", "slow")]


@pytest.fixture(scope="module")
def child(tmp_path_factory):
    return tmp_path_factory.mktemp("child") / "pid"


@pytest.fixture(scope="module")
def results(child) -> dict[tuple[str, str, str | None], Result]:
    """Cases that go wrong, and one that goes well after them."""
    os.environ["CHILD"] = str(child)
    seen: list[Result] = []
    found = run_all([*NAMES, "plain_loop"], ["ddp"], 2, 8.0, seen.append)
    found += run_all([NAMES[2]], ["fsdp2"], 2, 8.0, seen.append)
    assert seen == found
    return {(r.case.rpartition(".")[2], r.engine, r.setting): r for r in found}


def test_a_hang_is_told_and_where_each_rank_stands(results):
    hang = results["hangs", "ddp", None]
    assert hang.status == "hang"
    assert re.fullmatch(r"rank 0 in train \(hangs.py:\d+\); rank 1 is done", hang.text)


def test_a_hang_leaves_no_process_behind(results, child):
    pid = int(child.read_text())
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:  # until init has taken note of its end
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        with open(f"/proc/{pid}/stat") as file:
            if file.read().rpartition(")")[2].split()[0] == "Z":
                return
    pytest.fail(f"the child process {pid} of a rank that was killed is alive")


def test_an_error_shows_its_first_line(results):
    error = results["raises", "ddp", None]
    assert (error.status, error.text) == ("error", "ValueError: the first line")


def test_a_wrong_number_is_wrong_by_how_much_and_where(results):
    wrong = results["differs", "ddp", None]
    assert wrong.status == "wrong"
    assert wrong.error == pytest.approx(0.25)
    assert wrong.text == "value"


def test_a_setting_is_a_result_of_its_own(results):
    assert results["differs", "ddp", "a setting"].status == "equal"


def test_a_case_that_cannot_be_written_for_an_engine_says_why(results):
    assert (results["differs", "fsdp2", None].status, results["differs", "fsdp2", None].text) == (
        "n/a",
        "it has no word for it",
    )


def test_a_process_that_dies_is_an_error(results):
    dead = results["dies", "ddp", None]
    assert dead.status == "error"
    assert "exit code 3" in dead.text


def test_a_rank_that_computes_is_slow_and_does_not_hang(results):
    assert results["slow", "ddp", None].status == "equal"


def test_what_goes_wrong_does_not_reach_the_next_case(results):
    assert results["plain_loop", "ddp", None].status == "equal"
