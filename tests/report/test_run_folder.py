"""A run is read whatever is left of it."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path

import pytest

from report.folders import record, run_folder, timeline
from shardproof.report.html import data_of, names_of, page_of
from shardproof.report.run_folder import POINTS, load_run, thin


def test_names_and_files_are_those_that_a_run_writes() -> None:
    from shardproof.report import run_folder as read
    from shardproof.train import folder as written

    names = ("CONFIG", "METRICS", "COMPLETIONS", "ERRORS", "MODEL", "REPORT", "LOCK")
    assert [getattr(read, name) for name in names] == [getattr(written, name) for name in names]
    assert written.TIMELINE.format(rank="*") == read.TIMELINES


def test_lines_and_numbers_are_those_of_the_file(tmp_path: Path) -> None:
    records = [record(step) for step in range(1, 21)] + [{"step": 20, "eval_loss": 2.5, "seconds": 4.1}]
    run = load_run(run_folder(tmp_path / "a", records), "a")
    assert run["state"] == "finished"
    assert run["lines"]["loss"][0] == list(range(1, 21))
    assert run["lines"]["loss"][1] == pytest.approx([each["loss"] for each in records[:20]], rel=1e-5)
    assert run["lines"]["eval_loss"] == ([20], [2.5])
    assert run["lines"]["step_seconds"][1] == pytest.approx([0.2] * 19)
    assert run["rank_names"] == ["rank 0", "rank 1"]
    assert [line[1][0] for line in run["rank_lines"]["held"]] == [1_000_000, 1_500_000]
    assert run["rank_lines"]["waiting"][0][1][0] == pytest.approx(10)
    assert run["summary"]["tokens"] == 16_000
    assert not run["notes"]


def test_what_a_record_tells_of_several_steps_is_shown_for_one(tmp_path: Path) -> None:
    run = load_run(run_folder(tmp_path / "a", [record(step) for step in (1, 5, 9)]), "a")
    assert run["rank_lines"]["gathered"][0] == ([1, 5, 9], [64_000, 16_000, 16_000])


def test_the_first_record_of_a_run_that_goes_on_elsewhere_tells_of_its_own_steps(tmp_path: Path) -> None:
    """Not of those that another run took, whose checkpoint it began from."""
    for steps, of_one in (((51, 52, 53), 64_000), ((60, 70, 80), 6_400)):
        run = load_run(run_folder(tmp_path / str(steps), [record(step, 90) for step in steps]), "a")
        assert run["rank_lines"]["gathered"][0] == (list(steps), [of_one] * 3)


def test_a_last_loss_that_is_no_number_is_not_the_one_before(tmp_path: Path) -> None:
    run = load_run(run_folder(tmp_path / "a", [record(1), record(2, loss=float("nan"), reward=2.0)]), "a")
    assert (run["summary"]["loss"], run["summary"]["reward"]) == (None, 2.0)
    assert '"loss":null' in page_of(data_of([tmp_path / "a"]))


def test_when_the_last_step_was_is_a_moment(tmp_path: Path) -> None:
    """A page that watches a run that hangs is not made anew, and would say for hours that it was seconds ago."""
    folder = run_folder(tmp_path / "a", [record(1)], ended=False)
    os.utime(folder / "metrics.jsonl", (86400 * 365, 86400 * 365))
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(86400 * 365))
    assert load_run(folder, "a")["told"].endswith(f"; last step at {when}")


def test_a_killed_a_failed_an_empty_and_a_damaged_run(tmp_path: Path) -> None:
    killed = run_folder(tmp_path / "killed", [record(1), record(2)], ended=False)
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    found = load_run(killed, "killed")
    assert (found["state"], found["last"]) == ("open", 2)
    assert "1 line(s)" in found["notes"][0]

    failed = run_folder(tmp_path / "failed", [record(1)], ended=False)
    (failed / "error.txt").write_text("rank 0\nTraceback ...\nValueError: no")
    assert load_run(failed, "failed")["told"] == "failed: ValueError: no"

    empty = tmp_path / "empty"
    empty.mkdir()
    found = load_run(empty, "empty")
    assert found["state"] == "empty"
    assert len(found["notes"]) == 2

    damaged = run_folder(tmp_path / "damaged", [record(1)])
    (damaged / "config.yaml").write_text("a: [")
    (damaged / "timeline.rank0.json").write_text(json.dumps(timeline() | {"computed": [["forward", 1]]}))
    (damaged / "timeline.rank1.json").write_text("{")
    (damaged / "metrics.jsonl").write_bytes(
        b'\xff\xfe\n[1]\n{"step": "x"}\n{"step": 1e999}\n{"step": 1, "loss": "high", "ranks": {"memory": 3}}\n'
        b'{"step": 2, "loss": NaN, "ranks": {"memory": [1], "gathered": "x"}}\n{"step": 3, "loss": 1.5}\n'
    )
    (damaged / "completions.jsonl").write_text('{"step": 1}\nnot json\n')
    found = load_run(damaged, "damaged")
    assert found["unfinite"]["loss"] == [2]
    assert found["lines"]["loss"] == ([3], [1.5])
    assert found["samples"] == found["timelines"] == []
    assert len(found["notes"]) == 4


def test_no_number_that_cannot_be_keeps_a_run_from_being_shown(tmp_path: Path) -> None:
    wrong = [{"steps": "many"}, {"steps": math.inf}, {"ranks": {"memory": [1, 2, 3], "of": 7}}]
    odd = [record(1), *(record(step) | each for step, each in enumerate(wrong, 2))]
    folder = run_folder(tmp_path / "odd", odd)
    (folder / "completions.jsonl").write_text('{"step": 1e999, "prompt": "a", "completion": "b", "rewards": {}}\n')
    found = load_run(folder, "odd")
    assert (found["last"], found["steps"], found["samples"]) == (4, 20, [])
    assert found["notes"][0].startswith("2 line(s) of metrics.jsonl are not records")


def test_a_run_that_goes_on_where_one_failed_or_ended_goes_on(tmp_path: Path) -> None:
    """What it left before is not how it stands: an error, or weights, from before it was resumed."""
    from shardproof.checkpoint.folder import Lock
    from shardproof.report.html import version_now

    failed = run_folder(tmp_path / "failed", [record(1)], ended=False)
    (failed / "error.txt").write_text("rank 0\nValueError: no")
    ended = run_folder(tmp_path / "ended", [record(1), record(2)])
    before = version_now([failed, ended])
    locks = [Lock(folder / ".lock", "busy") for folder in (failed, ended)]
    assert version_now([failed, ended]) != before  # a page that watches is told
    for folder in (failed, ended):
        assert load_run(folder, "a")["state"] == "open"
        assert load_run(folder, "a")["told"].startswith("running; last step ")
    for lock in locks:
        lock.release()
    assert load_run(failed, "a")["state"] == "failed"
    os.utime(failed / "error.txt", (1, 1))  # it was resumed, and then killed
    assert "was killed" in load_run(failed, "a")["told"]
    assert load_run(ended, "a")["state"] == "stopped"


def test_a_run_that_went_over_steps_again_shows_them_once(tmp_path: Path) -> None:
    records = [record(1), record(2), record(3), record(2, loss=9.0), record(3, loss=8.0)]
    run = load_run(run_folder(tmp_path / "a", records), "a")
    assert run["lines"]["loss"][0] == [1, 2, 3]
    assert run["lines"]["loss"][1][1:] == [9.0, 8.0]


def test_a_line_is_thinned_to_its_extremes() -> None:
    steps = list(range(1, 100_001))
    values = [1.0] * len(steps)
    values[54_321], values[70_000] = 9.0, -3.0
    few = thin((steps, values))
    assert len(few[0]) <= POINTS
    assert (few[0][0], few[0][-1]) == (1, 100_000)
    assert (54_322, 9.0) in zip(*few, strict=True)
    assert (70_001, -3.0) in zip(*few, strict=True)
    assert few[0] == sorted(few[0])


def test_samples_come_from_all_over_the_run(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "a", [record(1)])
    turns = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
    with (folder / "completions.jsonl").open("w") as file:
        for step in range(1, 1001):
            sample = {"step": step, "prompt": turns, "completion": f"answer {step}", "rewards": {"a": 0.5, "b": None}}
            file.writelines(json.dumps(sample | {"labels": f"right {n}"} if n else sample) + "\n" for n in range(8))
    found = load_run(folder, "a")["samples"]
    steps = sorted({sample["step"] for sample in found})
    assert steps[0] == 1
    assert steps[-1] == 1000
    assert 10 <= len(steps) <= 13
    assert found[0]["prompt"] == "user: <image>what?"
    assert found[0]["rewards"] == {"a": 0.5}
    assert [sample["right"] for sample in found[:3]] == [None, "right 1", "right 2"]


def test_runs_are_named_by_what_tells_them_apart() -> None:
    assert names_of([Path("/x/runs/a"), Path("/x/runs/b")]) == ["a", "b"]
    assert names_of([Path("/x/one/run"), Path("/x/two/run")]) == ["one/run", "two/run"]
