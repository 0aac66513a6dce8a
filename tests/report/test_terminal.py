"""What is said of a run while it goes on, on a terminal and elsewhere."""

from __future__ import annotations

import os
import pty
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest

from report.folders import record
from shardproof.report import terminal
from shardproof.report.terminal import Bar, Lines, Share, resources, size, view

SAMPLE = {"step": 1, "prompt": "two?", "completion": "[b]2[/b]", "rewards": {"right": 1.0, "quiet": None}}


def test_plain_lines_say_what_ranks_held_moved_and_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines()
    lines.begin(20)
    lines.logged(record(1))
    lines.generated(SAMPLE)
    lines.logged({"step": 20, "eval_loss": 2.5})
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("step 1/20  loss 4.75615  gradient norm 1.5  4,000 tokens/s  memory 1 MB + 1.5 MB  ")
    assert "gathered 64 kB  reduced 32 kB  waited 10 %" in first
    assert rest[:3] == ["  asked     two?", "  answered  [b]2[/b]", "  worth     right 1.00"]
    assert rest[3].startswith("step 20/20  evaluation loss 2.50000")


def test_time_left_is_that_of_the_steps_of_this_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was resumed at step 16 of 20 and takes a minute a step has three minutes left after the first."""
    clock = SimpleNamespace(perf_counter=lambda: 0.0)
    monkeypatch.setattr(terminal, "time", clock)
    lines = Lines()
    lines.begin(20, done=16)
    clock.perf_counter = lambda: 60.0
    lines.logged(record(17))
    assert capsys.readouterr().out.endswith("  3:00 left\n")


def test_of_many_ranks_least_and_most_are_told() -> None:
    assert resources(record(1, ranks=8))[0] == "memory 1 MB to 4.5 MB"
    assert resources({"step": 1, "loss": 2.0}) == []
    alone = record(1, ranks=1)
    alone["ranks"] |= {"gathered": [0], "reduced": [0]}
    assert resources(alone) == ["memory 1 MB"]
    apart = record(1, ranks=2)
    apart["ranks"]["away"] = [32_000, 48_000]
    assert resources(apart)[1:4] == ["gathered 64 kB", "reduced 32 kB", "to other machines 48 kB"]


@pytest.mark.parametrize(
    "value, told", [(0, "0 B"), (999, "999 B"), (999_600, "1 MB"), (1.5e12, "1.5 TB"), (2e16, "2e+04 TB")]
)
def test_bytes_are_told_in_three_digits(value: float, told: str) -> None:
    assert size(value) == told


def on_a_terminal(work: Callable[[], None]) -> str:
    """What a process writes there that does some work."""
    pid, terminal = pty.fork()
    if not pid:
        try:
            os.environ |= {"TERM": "xterm", "COLUMNS": "120"}
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")  # and not what pytest has put there
            work()
        finally:
            os._exit(0)
    said = b""
    try:
        while part := os.read(terminal, 4096):
            said += part
    except OSError:  # the other end is closed
        pass
    os.waitpid(pid, 0)
    return said.decode()


def test_on_a_terminal_a_bar_and_the_numbers_of_the_last_step() -> None:
    def work() -> None:
        bar = view()
        bar.begin(20)
        bar.logged(record(7))
        bar.generated(SAMPLE)
        bar.logged({"step": 7, "eval_loss": 2.5})
        bar.end()

    text = on_a_terminal(work)
    assert "7/20" in text
    assert "loss 3.52344  gradient norm 1.5  4,000 tokens/s" in text
    assert "memory 1 MB + 1.5 MB  gathered 64 kB  reduced 32 kB  waited 10 %" in text
    assert "[b]2[/b]" in text
    assert "evaluation loss 2.50000" in text


def test_a_loss_that_is_rounded_to_nothing_has_no_sign() -> None:
    assert terminal.describe(record(7) | {"loss": -1e-9}).startswith("loss 0.00000")


def test_long_work_says_how_much_of_it_is_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line now and then, ever more rarely; work that begins anew is timed anew."""
    clock = SimpleNamespace(perf_counter=lambda: 0.0)
    monkeypatch.setattr(terminal, "time", clock)
    with Share("encoding rows") as told, Share("answered", shown=False) as other:
        for second in range(1, 401):
            clock.perf_counter = lambda second=second: float(second)
            told(second, 400)
            other(second, 400)
        said = capsys.readouterr()
        told(1, 40)  # the rows to evaluate on
        clock.perf_counter = lambda: 429.0
        told(21, 40)
        told(1, 4, "calibrating blocks")
        clock.perf_counter = lambda: 499.0
        told(2, 4, "calibrating blocks")
    lines = said.err.splitlines()
    assert not said.out
    assert lines[:2] == ["encoding rows: 3 %  6:29 left", "encoding rows: 5 %  6:19 left"]
    assert 15 < len(lines) < 30
    assert "100 %" not in lines[-1]
    assert capsys.readouterr().err == "encoding rows: 52 %  0:28 left\ncalibrating blocks: 50 %  2:20 left\n"


def test_how_far_an_evaluation_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the last step on a terminal, in lines elsewhere; nothing of it is left behind."""
    clock = SimpleNamespace(perf_counter=lambda: 0.0)
    monkeypatch.setattr(terminal, "time", clock)
    lines, bar = Lines(), Bar()
    bar.begin(20)
    bar.logged(record(7))
    for done in range(1, 11):
        clock.perf_counter = lambda done=done: 6.0 * done
        lines.evaluated(done, 10)
        bar.evaluated(done, 10)
        shown = bar.state.plain
        assert shown.startswith("loss 3.52344")
        assert shown.endswith(f"\nevaluation: {10 * done} %  0:{6 * (10 - done):02} left") is (1 < done < 10)
    bar.end()
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if line.startswith("evaluation")] == [
        f"evaluation: {share} %  0:{left} left" for share, left in ((30, 42), (50, 30), (70, 18), (90, "06"))
    ]


def test_on_a_terminal_long_work_shows_a_bar() -> None:
    """Work that takes no time shows none."""

    def work(quiet: float) -> None:
        with Share("encoding rows", quiet=quiet) as told:
            for done in (1, 2, 3):
                told(done, 3)

    assert "encoding rows" in on_a_terminal(partial(work, 0.0))
    assert on_a_terminal(partial(work, 60.0)) == ""
