"""Omni and vision models train on pictures, sounds and texts in any mixture, with the losses of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

OMNI, MINICPM_V = "qwen2_5_omni", "minicpmv4_6"
PLAN = {f"n{n}s{s}": (n, s) for n, s in [(1, 0), (2, 1), (4, 3)]}
REST = {f"n{n}s{s}": (n, s) for n in (1, 2, 4) for s in range(4)}


@pytest.fixture(scope="module")
def mixed(files: Path) -> Path:
    """Rows with a picture, with two, with a sound, with both, and with neither: no two neighbours are alike."""
    rows = [
        {"query": "<image>which digit?", "response": "two and seven", "images": ["a.png"]},
        {"query": "what is said?", "response": "nothing at all"},
        {"query": "<audio>what do you hear?", "response": "noise", "audios": ["a.wav"]},
        {"query": "<image> or <image>?", "response": "both", "images": ["b.png", "a.png"]},
        {"query": "<audio> is <image>?", "response": "no, it is not", "images": ["b.png"], "audios": ["a.wav"]},
    ]
    file = files / "mixed.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows * 4))
    seen = [row for row in rows if "audios" not in row]
    (files / "seen.jsonl").write_text("".join(json.dumps(row) + "\n" for row in seen * 5))
    return file


@pytest.fixture(scope="module")
def train(commands, tiny_models, mixed: Path):
    def run(kind: str, plan, *options: str):
        rows = mixed if kind == OMNI else mixed.with_name("seen.jsonl")
        fixed = "--max-steps 3 --global-batch-size 4 --per-device-batch-size 1 --lr-scheduler constant --workers 0"
        argv = ["sft", "--model", str(tiny_models(kind)), "--dataset", str(rows), "--output-dir", "OUT", *fixed.split()]
        argv += ["--learning-rate", "3e-3", "--val-split", "0.1"]
        return commands(
            [
                (name, [*argv, "--nproc", str(n), "--stage", str(s), *more, *options])
                for name, (n, s, *more) in plan.items()
            ]
        )

    return run


def check_equal(done) -> None:
    for name, run in done.items():
        assert run.code == 0, f"{name}:\n{run.output}"
    first, *others = done.values()
    assert first.series("loss")[-1] < first.series("loss")[0]
    for run in others:
        assert run.series("loss") == pytest.approx(first.series("loss"), abs=2e-5)
        assert run.series("eval_loss") == pytest.approx(first.series("eval_loss"), abs=2e-5)
        assert run.series("grad_norm") == pytest.approx(first.series("grad_norm"), rel=1e-4)
        assert run.series("tokens") == first.series("tokens")


@pytest.mark.parametrize("kind", [OMNI, MINICPM_V])
def test_ranks_with_different_files_have_the_losses_of_one_process(train, kind: str) -> None:
    check_equal(train(kind, PLAN))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [OMNI, MINICPM_V])
def test_at_every_stage_on_any_number_of_ranks(train, kind: str) -> None:
    check_equal(train(kind, REST))
    check_equal(train(kind, {name: (n, s) for name, (n, s) in REST.items() if n != 1}, "--gradient-checkpointing"))
    check_equal(train(kind, PLAN, "--tuner", "lora"))
