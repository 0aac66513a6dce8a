"""Promise: a mixture of datasets is learnt with the losses of one process, and a run goes on at its next row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ONE = ["--nproc", "1", "--stage", "0"]
TWO = ["--nproc", "2", "--stage", "3"]
STREAM = "--streaming --shuffle-buffer-size 5 --max-length 64".split()


@pytest.fixture(scope="module")
def runs(commands, sft, rows: Path):
    lines = rows.read_text().splitlines(keepends=True)
    files = [rows.with_name("long.jsonl"), rows.with_name("short.jsonl")]
    for file, part in zip(files, (lines[:17], lines[17:]), strict=True):
        file.write_text("".join(part))
    mixed = ["--dataset", *map(str, files), "--interleave-prob", "0.6", "0.4", "--stopping-strategy", "all_exhausted"]
    other = [*mixed[:4], "0.5", "0.5", *mixed[6:]]
    jobs = {}
    for name, how in (("whole", []), ("stream", STREAM)):
        jobs[f"{name} one"] = sft(*mixed, *how, *ONE)
        jobs[f"{name} two"] = sft(*mixed, *how, *TWO, "--save-steps", "2")
        go_on = ["--resume", f"RUNS/{name} two/checkpoint-2"]
        jobs[f"{name} on"] = sft(*mixed, *how, *ONE, *go_on)
        jobs[f"{name} other"] = sft(*other, *how, *ONE, *go_on)
    return commands(list(jobs.items()))


@pytest.mark.parametrize("how", ["whole", "stream"])
def test_losses_are_those_of_one_process(runs, how: str) -> None:
    one, two = runs[f"{how} one"], runs[f"{how} two"]
    assert one.code == two.code == 0, one.output + two.output
    assert len(one.series("loss")) == 5
    assert two.series("loss") == pytest.approx(one.series("loss"), abs=1e-5)


def test_how_often_the_rows_of_each_file_are_seen_is_told(runs) -> None:
    said = re.search(
        r"mixed +\S+long\.jsonl (\d+) \(17 different\), \S+short\.jsonl (\d+) \(6 different\)", runs["whole one"].output
    )
    assert said is not None, runs["whole one"].output
    assert f": {int(said[1]) + int(said[2])} rows" in runs["whole one"].output


@pytest.mark.parametrize("how", ["whole", "stream"])
def test_a_run_goes_on_at_the_next_row(runs, how: str) -> None:
    on = runs[f"{how} on"]
    assert on.code == 0, on.output
    assert on.series("loss") == pytest.approx(runs[f"{how} one"].series("loss")[2:], abs=1e-5)
    assert on.series("tokens") == runs[f"{how} one"].series("tokens")[2:]


@pytest.mark.parametrize("how", ["whole", "stream"])
def test_not_with_other_shares(runs, how: str) -> None:
    other = runs[f"{how} other"]
    assert other.code == 2
    assert "interleave_prob [0.5, 0.5] instead of [0.6, 0.4]" in other.output
