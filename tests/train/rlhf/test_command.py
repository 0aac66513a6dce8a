"""`shardproof rlhf` as a user runs it: what it says, what it leaves behind, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

OWN = Path(__file__).with_name("rewards_for_tests.py")
SHORT = "--max-steps 4 --learning-rate 1e-3 --nproc 2 --stage 3 --output-dir OUT".split()
SAMPLED = "--num-generations 4 --per-device-batch-size 4 --max-completion-length 12".split()


@pytest.fixture(scope="module")
def runs(commands: Any, models: dict[str, Path], files: dict[str, Path]) -> Any:
    model, judge = str(models["policy"]), str(models["judge"])
    dpo = ["rlhf", "--model", model, "--dataset", str(files["pairs"])]
    grpo = ["rlhf", "--rlhf-type", "grpo", "--model", model, "--dataset", str(files["prompts"])]
    reentrant = ["--gradient-checkpointing", "--checkpointing-reentrant"]
    rewards = [
        "--reward-funcs",
        "format",
        "accuracy",
        "length",
        f"{OWN}:chance",
        "--reward-weights",
        "1",
        "1",
        "0.5",
        "2",
    ]
    return commands(
        [
            ("dpo", [*dpo, *SHORT, *reentrant, "--val-split", "0.2"]),
            ("lora", [*dpo, *SHORT, "--tuner", "lora", "--precision", "bf16", "--frozen-stage", "2"]),
            ("plain", [*dpo, *SHORT]),
            ("once", [*dpo, *SHORT, "--precompute-ref"]),
            ("sync", [*dpo, *SHORT, "--sync-ref-steps", "2"]),
            ("again", ["rlhf", "RUNS/dpo/config.yaml", "--output-dir", "OUT"]),
            ("grpo", [*grpo, *SHORT, *reentrant, *SAMPLED, *rewards, "--beta", "0.04"]),
            ("judge", [*grpo, *SHORT, *SAMPLED, "--reward-model", judge, "--loss-type", "dr_grpo"]),
            ("gkd", _gkd(model, models, files)),
            ("no_reward", [*grpo, *SHORT]),
            ("odd", [*grpo, *SHORT, "--reward-funcs", "format", "--num-generations", "3"]),
            ("meant", [*dpo, *SHORT, "--num-generations", "3"]),
            ("loss", [*dpo, *SHORT, "--loss-type", "sigmoyd"]),
            ("rows", ["rlhf", "--model", model, "--dataset", str(files["prompts"]), *SHORT]),
            ("none", ["rlhf", "--model", model, *SHORT]),
        ]
    )


def _gkd(model: str, models: dict[str, Path], files: dict[str, Path]) -> list[str]:
    more = ["--teacher-model", str(models["other"]), "--lmbda", "1", "--max-completion-length", "6"]
    return ["rlhf", "--rlhf-type", "gkd", "--model", model, "--dataset", str(files["chats"]), *more, *SHORT]


@pytest.mark.parametrize("name", ["dpo", "lora", "once", "sync", "grpo", "judge", "gkd"])
def test_a_run_ends_with_weights_and_says_where(runs: Any, name: str) -> None:
    run = runs[name]
    assert run.code == 0, run.output
    assert run.series("step")[:4] == [1, 2, 3, 4]
    lines = run.output.strip().splitlines()
    assert lines[-1] == f"talk to it: shardproof infer {run.folder}"
    assert next(i for i, line in enumerate(lines) if line.startswith("step 1/")) <= 15, run.output
    weights = "adapter_model.safetensors" if name == "lora" else "model.safetensors"
    assert (run.folder / "model" / weights).is_file()
    assert not (run.folder / "README.md").exists()


def test_margins_and_evaluation_are_in_the_metrics(runs: Any) -> None:
    run = runs["dpo"]
    assert run.series("loss")[0] == pytest.approx(0.6931, abs=1e-3)  # the reference is the model as it began
    assert run.series("rewards/margins")[-1] > run.series("rewards/margins")[0]
    assert len(run.series("eval_loss")) == 1
    assert "margin" in run.output


def test_a_reference_asked_once_gives_the_same_losses(runs: Any) -> None:
    assert runs["once"].series("loss") == pytest.approx(runs["plain"].series("loss"), abs=1e-5)
    assert not (runs["once"].folder / "rows").exists()


def test_a_reference_that_follows_gives_other_losses(runs: Any) -> None:
    assert runs["sync"].series("loss")[:2] == pytest.approx(runs["plain"].series("loss")[:2], abs=1e-5)
    assert abs(runs["sync"].series("loss")[-1] - runs["plain"].series("loss")[-1]) > 1e-3


def test_the_config_repeats_the_run(runs: Any) -> None:
    assert runs["again"].code == 0, runs["again"].output
    assert runs["again"].series("loss") == pytest.approx(runs["dpo"].series("loss"), abs=1e-6)


def test_answers_and_their_rewards_are_written_down_and_shown(runs: Any) -> None:
    run = runs["grpo"]
    lines = (run.folder / "completions.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert len(records) == 4 * 8
    assert records[0].keys() == {"step", "prompt", "completion", "rewards", "advantage"}
    assert records[0]["rewards"].keys() == {"format", "accuracy", "length", "chance"}
    mean = sum(record["rewards"]["chance"] for record in records[:8]) / 8
    assert run.records[0]["rewards/chance/mean"] == pytest.approx(mean, abs=1e-5)
    weighted = [
        r["format"] + r["accuracy"] + 0.5 * r["length"] + 2 * r["chance"] for r in (r["rewards"] for r in records)
    ]
    assert run.records[0]["reward"] == pytest.approx(sum(weighted[:8]) / 8, abs=1e-5)
    assert run.output.count("answered") >= 2
    assert "kl" in run.records[0]


@pytest.mark.parametrize(
    "name, said",
    [
        ("no_reward", "--rlhf-type grpo needs --reward-funcs or --reward-model"),
        ("odd", "--num-generations 3 does not divide"),
        ("meant", "--num-generations means nothing to --rlhf-type dpo"),
        ("loss", "Did you mean sigmoid?"),
        ("rows", "prompts.jsonl:1: there is no 'rejected_response'"),
        ("none", "--dataset is missing"),
    ],
)
def test_what_cannot_work_is_refused_in_a_few_words(runs: Any, name: str, said: str) -> None:
    run = runs[name]
    assert run.code == 2, run.output
    assert said in run.output
    assert "Traceback" not in run.output
    assert run.output.count("error: ") == 1
    assert not run.folder.exists()
