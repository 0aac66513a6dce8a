"""`shardproof rlhf` goes on from a checkpoint with the losses, rewards and answers of the uninterrupted run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

GENERATES = "--num-generations 4 --per-device-batch-size 4 --max-completion-length 8 --reward-funcs length".split()
# Each step gives the entropy more weight: it is below that of all tokens alike.
ADAPTS = "--trl-arguments use_adaptive_entropy=yes entropy_target=9 entropy_coef_delta=0.02".split()
# Where a checkpoint is taken, and how long the run is: in mid-log, in the second epoch, between two generations.
SAVED = {"dpo": (3, 6), "grpo": (7, 9), "rloo": (7, 9), "gkd": (3, 5)}
SLOW = ("dpo", "kto", "orpo", "cpo", "rm", "gkd", "rloo")
KINDS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("grpo", *SLOW)]


def argv_of(kind: str, models: dict[str, Path], files: dict[str, Path]) -> list[str]:
    rows = {"kto": "judged", "gkd": "chats", "grpo": "prompts", "rloo": "prompts"}.get(kind, "pairs")
    more = {
        "grpo": [*GENERATES, "--steps-per-generation", "2", "--beta", "0.04", *ADAPTS],
        "rloo": [*GENERATES, "--steps-per-generation", "2"],
        "gkd": ["--teacher-model", str(models["other"]), "--lmbda", "0.5", "--max-completion-length", "6"],
    }.get(kind, [])
    start = ["rlhf", "--rlhf-type", kind, "--model", str(models["policy"]), "--dataset", str(files[rows])]
    return [*start, "--learning-rate", "1e-3", "--nproc", "2", "--logging-steps", "2", *more]


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_as_if_nothing_had_been(
    commands: Any, models: dict[str, Path], files: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    check_that_it_goes_on(commands, argv_of(kind, models, files), *SAVED.get(kind, (3, 6)), tmp_path)


@pytest.mark.slow
def test_so_it_does_where_ranks_share_answers(
    commands: Any, models: dict[str, Path], files: dict[str, Path], tmp_path: Path
) -> None:
    argv = [*argv_of("grpo", models, files), "--sequence-parallel", "2"]
    check_that_it_goes_on(commands, argv, *SAVED["grpo"], tmp_path)


@pytest.mark.slow
def test_so_it_does_with_rows_of_experts(
    commands: Any, models: dict[str, Path], files: dict[str, Path], tmp_path: Path
) -> None:
    mu = "--chord-mu-peak 0.8 --chord-mu-valley 0.1 --chord-mu-decay-steps 9 --chord-mu-warmup-steps 2".split()
    argv = [*argv_of("grpo", models, files), "--chord-sft-dataset", str(files["chats"]), *mu]
    check_that_it_goes_on(commands, argv, *SAVED["grpo"], tmp_path)


@pytest.mark.slow
def test_so_it_does_behind_a_step_of_fewer_micro_batches(
    commands: Any, models: dict[str, Path], files: dict[str, Path], tmp_path: Path
) -> None:
    """An epoch of 6 in steps of 4: a run that went on learnt from the last third of its first answers only."""
    shape = "--steps-per-generation 3 --gradient-accumulation-steps 4 --nproc 2".split()
    argv = argv_of("rloo", models, files)
    argv = [*argv[: argv.index("--steps-per-generation")], *shape[:4]]
    check_that_it_goes_on(commands, argv, 2, 4, tmp_path)


def check_that_it_goes_on(commands: Any, argv: list[str], step: int, steps: int, tmp_path: Path) -> None:
    """Bit for bit, with sums between logs, random numbers and answers that are still to be learned from."""
    argv = [*argv, "--max-steps", str(steps), "--save-steps", str(step)]
    whole = commands([("whole", [*argv, "--output-dir", "OUT"])])["whole"]
    assert whole.code == 0, whole.output
    broken = Path(shutil.copytree(whole.folder, tmp_path / "broken"))
    for path in (broken / "model", broken / f"checkpoint-{steps}"):
        shutil.rmtree(path)
    again = commands([("again", [*argv, "--output-dir", str(broken), "--resume", "auto"])])["again"]
    assert again.code == 0, again.output
    again.folder = broken
    assert f"checkpoint-{step}" in again.output
    assert again.series("step") == whole.series("step")
    for mine, other in zip(again.records, whole.records, strict=True):
        timed = {"memory", "ranks", "seconds", "tokens_per_second", "step_time"}
        assert {k: v for k, v in mine.items() if k not in timed} == {k: v for k, v in other.items() if k not in timed}
    if (whole.folder / "completions.jsonl").exists():
        assert (broken / "completions.jsonl").read_text() == (whole.folder / "completions.jsonl").read_text()
    a, b = ((folder / "model" / "model.safetensors").read_bytes() for folder in (broken, whole.folder))
    assert a == b


def test_what_could_not_go_on_is_refused(commands: Any, models: dict[str, Path], files: dict[str, Path]) -> None:
    dpo, ppo = (argv_of(kind, models, files) for kind in ("dpo", "ppo"))
    saving = ["--output-dir", "OUT", "--save-steps", "2"]
    runs = commands(
        [
            ("trains two models", [*ppo, *saving, "--reward-funcs", "length"]),
            ("moves the reference", [*dpo, *saving, "--sync-ref-steps", "2"]),
            ("is gone when a run is resumed", [*dpo, *saving, "--precompute-ref"]),
        ]
    )
    for text, run in runs.items():
        assert run.code == 2, run.output
        assert text in run.output
