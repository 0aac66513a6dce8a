"""The digits example on a small slice: pictures, sounds and words in one file."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent.parent
SOUNDS = ROOT.parent / "shared" / "data" / "fsdd"


@pytest.fixture(scope="module")
def digits() -> ModuleType:
    spec = importlib.util.spec_from_file_location("digits", ROOT / "examples" / "digits" / "digits.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(digits: ModuleType, tmp_path_factory: pytest.TempPathFactory):
    """`made(kind)`: a folder with a model and a few rows for it."""

    def make(kind: str) -> Path:
        out = tmp_path_factory.mktemp(kind)
        if kind == "omni" and not SOUNDS.is_dir():
            pytest.skip("there are no recordings of digits beside the repository")
        digits.write_data(out, SOUNDS if kind == "omni" else None, 60)
        digits.write_model(out, kind)
        rows = (out / "train.jsonl").read_text().splitlines()
        (out / "few.jsonl").write_text("\n".join(rows[:40]))
        held_out = (out / "test.jsonl").read_text().splitlines()
        (out / "asked.jsonl").write_text("\n".join([*held_out[:2], *held_out[-2:]]))
        return out

    return make


def sft(folder: Path, nproc: int) -> list[str]:
    fixed = "--max-steps 2 --global-batch-size 8 --stage 3 --workers 0 --output-dir OUT --nproc".split()
    return ["sft", "--model", str(folder / "model"), "--dataset", str(folder / "few.jsonl"), *fixed, str(nproc)]


@pytest.mark.slow
def test_every_kind_of_row_is_there_and_is_answered(digits: ModuleType, made, commands) -> None:
    folder = made("omni")
    rows = [json.loads(line) for line in (folder / "few.jsonl").read_text().splitlines()]
    assert {("images" in row, "audios" in row) for row in rows} == {(True, False), (False, True), (False, False)}
    (run,) = commands([("omni", sft(folder, 2))]).values()
    assert run.code == 0, run.output
    assert len(run.series("loss")) == 2
    assert {kind: asked for kind, (_, asked) in digits.score(run.folder, folder / "asked.jsonl").items()} == {
        "image": 2,
        "audio": 2,
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["omni", "minicpm"])
def test_two_and_four_ranks_learn_the_same(digits: ModuleType, made, commands, kind: str) -> None:
    folder = made(kind)
    two, four = commands([("two", sft(folder, 2)), ("four", sft(folder, 4))]).values()
    assert (two.code, four.code) == (0, 0), two.output + four.output
    assert two.series("loss") == pytest.approx(four.series("loss"), abs=2e-5)
    if kind == "minicpm":
        assert digits.score(two.folder, folder / "asked.jsonl")["image"][1] == 4
