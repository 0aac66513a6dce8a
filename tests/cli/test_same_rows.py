"""Promise: a machine that does not see the rows with files as the first one does is told before training, by name."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardproof.cli.processes.same_rows import SAMPLE, Seen, difference, has_files
from shardproof.train.options.config import SftConfig
from shardproof.train.options.rlhf_config import RlhfConfig
from shardproof.train.rlhf import recipe as rlhf
from shardproof.train.sft import recipe as sft

ROWS = 3 * SAMPLE
Prepare = Callable[..., Any]


@pytest.fixture
def rows(files: Path, tmp_path: Path) -> Path:
    for name in ("a.png", "b.png"):
        shutil.copy(files / name, tmp_path)
    file = tmp_path / "rows.jsonl"
    row = {"query": "<image>which digit?", "response": "two", "rejected_response": "six", "images": ["a.png"]}
    file.write_text("".join(json.dumps(row) + "\n" for _ in range(ROWS)))
    return file


@pytest.fixture(params=["sft", "dpo"])
def prepared(request: pytest.FixtureRequest, rows: Path, tiny_models: Callable[[str], Path], tmp_path: Path) -> Any:
    """Of both commands: they keep rows with files in different ways."""
    shared = {"model": str(tiny_models("minicpmv4_6")), "output_dir": str(tmp_path / "out"), "workers": 0}
    dataset = [f"{rows}#{ROWS - 2}"]
    if request.param == "sft":
        config = SftConfig(dataset=dataset, **shared)
        return sft.prepare(config, 1, *sft.read(config))
    other = RlhfConfig(rlhf_type="dpo", dataset=dataset, **shared)
    return rlhf.prepare(other, 1, *rlhf.read(other))


def told(prepared: Any, change: Callable[[], object]) -> str:
    """What is said of a machine on which something is otherwise."""
    assert has_files(prepared)
    first = Seen.here("node0", prepared)
    assert first.sources
    assert first.files
    assert difference(first, Seen.here("node1", sent(prepared))) == ""
    change()
    return difference(first, Seen.here("node1", sent(prepared)))


def sent(prepared: Any) -> Any:
    """As another machine gets it: without the files that are open here."""
    return pickle.loads(pickle.dumps(prepared))


def test_pictures_that_are_missing(prepared: Any, rows: Path) -> None:
    said = told(prepared, rows.with_name("a.png").unlink)
    assert said == f"node1 cannot use {rows}:1: image 1 (a.png): there is no such file"


def test_pictures_that_are_others(prepared: Any, rows: Path) -> None:
    said = told(prepared, lambda: shutil.copy(rows.with_name("b.png"), rows.with_name("a.png")))
    assert said == f"a.png of {rows}:1 is not the same on node1 as on node0"


def test_rows_that_are_others(prepared: Any, rows: Path) -> None:
    said = told(prepared, lambda: rows.write_text(rows.read_text().replace("two", "ten")))
    assert said == f"{rows}#{ROWS - 2} is not the same on node1 as on node0"


def test_no_rows(prepared: Any, rows: Path) -> None:
    assert told(prepared, rows.unlink) == f"node1 has no {rows}#{ROWS - 2}"


def test_rows_of_text_are_sent(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"query": "a", "response": "b"}\n' * 8)
    config = SftConfig(model="tiny", dataset=[str(file)], output_dir=str(tmp_path / "out"), workers=0)
    assert not has_files(sft.prepare(config, 1, *sft.read(config)))
