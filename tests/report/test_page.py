"""The page in a browser: figures with the values of the file, whatever the runs are, and text that stays text."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from report.browser import Page, needs_chromium, shown
from report.folders import EVIL, record, run_folder, timeline
from shardproof.cli.main import main
from shardproof.report.html import in_script


def lines_of(page: Page, figure: str) -> dict[str, dict[str, str]]:
    return {line["data-line"]: line for line in page.having("data-line") if line["data-of"] == figure}


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    """A run whose every text tries to be more than text."""
    records = [record(step, reward=step / 20, **{EVIL: 1.0}) for step in range(1, 21)]
    records += [{"step": 20, "eval_loss": 2.5, "seconds": 4.1}]
    folder = run_folder(tmp_path / "evil", records, {"model": EVIL, EVIL: EVIL, "stage": 3})
    for rank in (0, 1):
        (folder / f"timeline.rank{rank}.json").write_text(json.dumps(timeline(rank)))
    sample = {
        "step": 20,
        "prompt": EVIL,
        "completion": EVIL + "\u2028\ud800",
        "rewards": {EVIL: 0.5, "n": float("nan")},
    }
    (folder / "completions.jsonl").write_text(json.dumps(sample) + "\n")
    return folder


@needs_chromium
def test_one_run_with_the_values_of_its_file_and_text_that_stays_text(evil: Path) -> None:
    assert main(["report", str(evil)]) == 0
    page = shown((evil / "report.html").as_uri())
    assert not [each for each in page.elements if each["tag"] == "img" or each.get("onerror")]
    assert page.text.count(EVIL) >= 5
    figures = [each["data-figure"] for each in page.having("data-figure")]
    assert figures[:4] == ["loss", "reward", "learning rate", "gradient norm"]
    assert {"throughput", "time of a step", "memory", "gathered", "reduced", "waiting", "timeline"} <= set(figures)
    lines = lines_of(page, "loss")
    assert float(lines["training"]["data-last"]) == pytest.approx(record(20)["loss"], rel=1e-5)
    assert lines["training"]["data-points"] == "20"
    assert float(lines["evaluation"]["data-last"]) == 2.5
    assert re.search(r"under way for 60 ms.*waited for them for 15 ms: 75 %", page.text)
    numbers = {each["data-number"] for each in page.having("data-number")}
    assert {"step", "last loss", "best evaluation loss", "peak memory", "gathered"} <= numbers


@pytest.mark.slow
@needs_chromium
def test_four_runs_one_long_one_killed_one_empty(tmp_path: Path) -> None:
    many = 100_000
    long = run_folder(tmp_path / "long", [], {"learning_rate": 0.1, "stage": 3})
    before, after = json.dumps(record(many, many)).split(f'"step": {many}')
    (long / "metrics.jsonl").write_text("".join(f'{before}"step": {s + 1}{after}\n' for s in range(many)))
    killed = run_folder(tmp_path / "killed", [record(1), record(2, loss=float("nan")), record(3)], ended=False)
    (killed / "error.txt").write_text("ValueError: it broke")
    run_folder(tmp_path / "ranks", [record(s, ranks=16) for s in range(1, 9)], {"learning_rate": 0.2, "stage": 3})
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.yaml").write_text("")
    names = ["long", "killed", "ranks", "empty"]
    file = tmp_path / "all.html"
    assert main(["report", *(str(tmp_path / name) for name in names), "--output", str(file)]) == 0
    assert file.stat().st_size < 2_000_000
    page = shown(file.as_uri())
    lines = lines_of(page, "loss")
    assert int(lines["long"]["data-points"]) <= 1200
    assert float(lines["long"]["data-last"]) == pytest.approx(record(many, many)["loss"], rel=1e-5)
    assert [lost["data-lost"] for lost in page.having("data-lost")] == ["2"]
    assert "ValueError: it broke" in page.text
    assert "ranks, rank 15" in lines_of(page, "memory")
    assert {row["data-option"] for row in page.having("data-option")} == {"learning_rate", "model", "stage"}


@needs_chromium
def test_many_long_runs_in_one_figure(tmp_path: Path) -> None:
    """More points than a function of JavaScript takes arguments."""
    records = [{"step": step, "loss": 1.0 + step % 7} for step in range(1, 1201)]
    runs = [str(run_folder(tmp_path / f"run{number}", records)) for number in range(60)]
    assert main(["report", *runs, "--output", str(tmp_path / "all.html")]) == 0
    assert len(lines_of(shown((tmp_path / "all.html").as_uri()), "loss")) == 60


def test_nothing_in_the_numbers_ends_the_script_they_lie_in() -> None:
    text = in_script({"a": EVIL, "b": [float("inf")], "c": "\u2028\ud800"})
    assert "<" not in text
    assert json.loads(text) == {"a": EVIL, "b": [None], "c": "\u2028?"}


def test_the_page_asks_nobody_for_anything(evil: Path) -> None:
    assert main(["report", str(evil)]) == 0
    page = (evil / "report.html").read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    assert "default-src 'none'" in policy[1]
    assert "connect-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]


@pytest.mark.parametrize(
    "argv, told",
    [
        (["report", "nowhere"], "There is no folder nowhere"),
        (["report", "."], "holds no run"),
        (["report"], "RUN_DIR"),
        (["watch", ".", "--port", "x"], "--port"),
    ],
)
def test_what_is_no_run_is_refused(
    argv: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    assert told in capsys.readouterr().err
