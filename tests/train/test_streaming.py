"""Promise: rows that are read while training give the same losses on any number of processes, with checkpoints that go
on at the next row, and bad ones are told by file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardproof.data.encoding.report import EncodeReport
from shardproof.data.rows import BadRow
from shardproof.data.stream import Block, Place
from shardproof.train.rows.streams import Told

pytestmark = pytest.mark.slow

STREAM = "--streaming --shuffle-buffer-size 10 --max-length 64".split()


TWO = ["--nproc", "2", "--stage", "3"]
ONE = ["--nproc", "1", "--stage", "0"]
PASSES = "--max-epochs 2 --max-steps 20 --save-steps 4".split()
EVALUATED = ["--eval-steps", "4", "--val-dataset"]
PACKED = ["--packing", "--max-length", "96", "--global-batch-size", "2"]


@pytest.fixture(scope="module")
def runs(commands, sft, rows: Path):
    go_on = ["--resume", "RUNS/two/checkpoint-2"]
    return commands(
        [
            ("one", sft(*ONE, *STREAM, "--workers", "0")),
            ("two", sft(*TWO, *STREAM, "--save-steps", "2")),
            ("on", sft(*ONE, *STREAM, *go_on)),
            ("elsewise", sft(*ONE, *STREAM, "--shuffle-buffer-size", "5", *go_on)),
            ("ended", sft(*ONE, *STREAM, *PASSES)),
            ("ended two", sft(*TWO, *STREAM, *PASSES, "--workers", "0")),
            ("ended on", sft(*ONE, *STREAM, *PASSES, *EVALUATED, str(rows), "--resume", "RUNS/two/checkpoint-2")),
            ("ended again", sft(*ONE, *STREAM, *PASSES, *EVALUATED, str(rows), "--resume", "RUNS/ended/checkpoint-6")),
            ("ended whole", sft("--max-epochs", "2")),
            ("endless", sft("--streaming", "--max-steps", "none")),
            ("by length", sft("--streaming", "--group-by-length")),
            ("held out", sft("--streaming", "--val-split", "0.1")),
            ("without the last", sft("--streaming", "--drop-last")),
            ("whole", sft("--shuffle-buffer-size", "10")),
        ]
    )


@pytest.fixture(scope="module")
def bad(commands, sft, rows: Path, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("bad")
    good = rows.read_text().splitlines(keepends=True)
    (folder / "late.jsonl").write_text("".join(good[:15]) + "{bad\n" + "".join(good[15:]))
    (folder / "first.jsonl").write_text("{bad\n" + "".join(good))

    def of(name: str, *more: str) -> list[str]:
        return sft(*STREAM, *more, "--dataset", str(folder / f"{name}.jsonl"))

    skip = ["--bad-rows", "skip"]
    return commands([("late", of("late", *TWO)), ("left out", of("late", *ONE, *skip)), ("first", of("first", *TWO))])


def same(one, two) -> None:
    assert one.code == two.code == 0, one.output + two.output
    assert len(one.series("loss")) == 5
    assert two.series("loss") == pytest.approx(one.series("loss"), abs=1e-5)
    assert two.series("tokens") == one.series("tokens")
    assert two.series("epoch") == one.series("epoch")


def test_losses_are_those_of_one_process(runs) -> None:
    same(runs["one"], runs["two"])


@pytest.mark.slow
def test_so_they_are_of_packed_rows(commands, sft) -> None:
    done = commands([("one", sft(*ONE, *STREAM, *PACKED)), ("two", sft(*TWO, *STREAM, *PACKED))])
    same(done["one"], done["two"])


def test_passes_are_counted(runs) -> None:
    """Of 23 rows, 8 make a step: the third one ends in the second pass, and the fifth in it, too."""
    assert runs["one"].series("epoch")[:5] == [0, 0, 1, 1, 1]


def test_a_run_ends_with_the_passes(runs) -> None:
    """Two of 23 rows, 8 a step: the sixth step has the last row, on any number of processes, and after a stop. What was
    asked for by steps is done at the end, too."""
    for name, begin in (("ended", 0), ("ended two", 0), ("ended on", 2)):
        run = runs[name]
        assert run.code == 0, run.output
        assert len(run.series("loss")) == 6 - begin
        assert run.series("tokens") == runs["ended"].series("tokens")[begin:]
        assert "--max-epochs 2 ends the run after step 6 of 20." in " ".join(run.output.split())
        assert (run.folder / "model" / "model.safetensors").is_file()
    assert runs["ended two"].series("loss") == pytest.approx(runs["ended"].series("loss"), abs=1e-5)
    assert (runs["ended"].folder / "checkpoint-6").is_dir()
    assert len(runs["ended on"].series("eval_loss")) == 2
    again = runs["ended again"]  # whose checkpoint is at the end
    assert again.code == 0, again.output
    weights = [(run.folder / "model" / "model.safetensors").read_bytes() for run in (again, runs["ended"])]
    assert weights[0] == weights[1]
    assert not (again.folder / "metrics.jsonl").exists()


def test_a_run_that_goes_on_meets_the_rows_that_it_would_have_met(runs) -> None:
    assert runs["on"].code == 0, runs["on"].output
    assert runs["on"].series("loss") == pytest.approx(runs["two"].series("loss")[2:], abs=1e-5)
    assert runs["on"].series("epoch") == runs["two"].series("epoch")[2:]


def test_a_bad_row_ends_the_run_where_it_is_reached(bad) -> None:
    assert bad["late"].code == 2
    assert "late.jsonl:16: not JSON" in bad["late"].output
    assert len(bad["late"].series("loss")) == 1
    assert bad["late"].output.count("not JSON") == 1
    assert bad["first"].code == 2
    assert "first.jsonl:1: not JSON" in bad["first"].output
    assert not bad["first"].folder.exists()


def test_or_it_is_left_out_and_listed_once(bad) -> None:
    assert bad["left out"].code == 0, bad["left out"].output
    (line,) = (bad["left out"].folder / "skipped.txt").read_text().splitlines()
    assert "late.jsonl:16: not JSON" in line
    assert "bad rows left out, listed in" in bad["left out"].output


def test_what_is_listed_is_not_read_for_every_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be long. A run that goes on reads it once, and lists nothing again."""
    read: list[Path] = []
    whole = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self, **how: read.append(self) or whole(self, **how))
    blocks = [Block(Place(), (), EncodeReport(), [BadRow("a.jsonl", line, "bad")]) for line in (1, 2, 3, 2)]
    file = tmp_path / "skipped.txt"
    for begin in (0, 1):
        told = Told(file)
        for block in blocks[begin:]:
            told.take(block)
    assert whole(file) == "a.jsonl:1: bad\na.jsonl:2: bad\na.jsonl:3: bad\n"
    assert len(read) <= 1


@pytest.mark.parametrize(
    "name, text",
    [
        ("endless", "so add --max-steps"),
        ("ended whole", "--max-epochs needs --streaming"),
        ("by length", "--streaming and --group-by-length"),
        ("held out", "Use --val-dataset"),
        ("without the last", "--streaming and --drop-last: a step may hold rows of two passes"),
        ("whole", "--shuffle-buffer-size needs --streaming"),
        ("elsewise", "shuffle_buffer_size 5 instead of 10"),
    ],
)
def test_what_cannot_be_is_refused(runs, name: str, text: str) -> None:
    assert runs[name].code == 2
    assert text in runs[name].output
