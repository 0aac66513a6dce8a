"""The tokenizer beside a model is the one that was loaded, whatever batches it was asked for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

HOW = ("padding", "truncation")
TRUNCATION = {"direction": "Right", "max_length": 700, "strategy": "LongestFirst", "stride": 0}


def fields(folder: Path) -> dict:
    said = json.loads((folder / "tokenizer.json").read_text())
    return {name: said[name] for name in HOW}


@pytest.mark.slow
@pytest.mark.parametrize("truncation", [None, TRUNCATION])
def test_padding_and_truncation_are_those_of_the_base(
    commands, tiny_models, files: Path, tmp_path: Path, truncation: dict | None
) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_models("qwen2_vl"), base)
    said = json.loads((base / "tokenizer.json").read_text())
    (base / "tokenizer.json").write_text(json.dumps({**said, "padding": None, "truncation": truncation}))
    rows = [
        {"query": "<image>which digit?", "response": "two and seven", "images": [str(files / "a.png")]},
        {"query": "what is said?", "response": "nothing"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = ["sft", "--model", str(base), "--dataset", str(tmp_path / "rows.jsonl"), "--output-dir", "OUT"]
    argv += ["--media-root", "/", "--max-steps", "1", "--global-batch-size", "2", "--workers", "0"]
    done = commands([("trained", argv)])["trained"]
    assert done.code == 0, done.output
    expected = {"padding": None, "truncation": truncation}
    assert fields(done.folder / "model") == expected
    out = tmp_path / "exported"
    exported = commands([("exported", ["export", str(done.folder), str(out)])])["exported"]
    assert exported.code == 0, exported.output
    assert fields(out) == expected
