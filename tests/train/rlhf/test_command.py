"""`shardproof rlhf` as a user runs it: what it says, what it leaves behind, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardproof.errors import ConfigError
from shardproof.train.rlhf.generating import Generating

OWN = Path(__file__).with_name("rewards_for_tests.py")
SHORT = "--max-steps 4 --learning-rate 1e-3 --nproc 2 --stage 3 --output-dir OUT".split()
VLLM = importlib.util.find_spec("vllm") is not None
SAMPLED = "--num-generations 4 --per-device-batch-size 4 --max-completion-length 12".split()


@pytest.fixture(scope="module")
def argv(models: dict[str, Path], files: dict[str, Path]) -> dict[str, list[str]]:
    """The beginnings of commands."""
    model = ["--model", str(models["policy"])]
    chats, teacher = str(files["chats"]), str(models["other"])
    return {
        "dpo": ["rlhf", *model, "--dataset", str(files["pairs"])],
        "grpo": ["rlhf", "--rlhf-type", "grpo", *model, "--dataset", str(files["prompts"])],
        "gkd": ["rlhf", "--rlhf-type", "gkd", *model, "--dataset", chats, "--teacher-model", teacher],
        "any": ["rlhf", *model],
    }


@pytest.fixture(scope="module")
def runs(commands: Any, argv: dict[str, list[str]], files: dict[str, Path]) -> Any:
    reentrant = ["--gradient-checkpointing", "--checkpointing-reentrant"]
    rewards = ["--reward-funcs", "format", "accuracy", "length", f"{OWN}:chance"]
    weights = ["--reward-weights", "1", "1", "0.5", "2"]
    return commands(
        [
            ("dpo", [*argv["dpo"], *SHORT, *reentrant, "--val-split", "0.2"]),
            ("lora", [*argv["dpo"], *SHORT, "--tuner", "lora", "--precision", "bf16", "--frozen-stage", "2"]),
            ("grpo", [*argv["grpo"], *SHORT, *reentrant, *SAMPLED, *rewards, *weights, "--beta", "0.04"]),
            (
                "cut",
                [
                    *argv["grpo"],
                    *SHORT,
                    *SAMPLED[:-1],
                    "1",
                    "--temperature",
                    "50",
                    *rewards[:2],
                    "--mask-truncated-completions",
                ],
            ),
            ("no_reward", [*argv["grpo"], *SHORT]),
            (
                "odd",
                [
                    *argv["grpo"],
                    *SHORT,
                    "--reward-funcs",
                    "format",
                    "--num-generations",
                    "3",
                    "--global-batch-size",
                    "4",
                ],
            ),
            ("meant", [*argv["dpo"], *SHORT, "--num-generations", "3"]),
            ("loss", [*argv["dpo"], *SHORT, "--loss-type", "sigmoyd"]),
            ("rows", [*argv["any"], "--dataset", str(files["prompts"]), *SHORT]),
            ("none", [*argv["any"], *SHORT]),
            ("server", [*argv["grpo"], *SHORT, "--reward-funcs", "format", "--use-vllm"]),
            ("no_server", [*argv["grpo"], *SHORT, "--reward-funcs", "format", "--vllm-server-port", "9"]),
            ("part", [*argv["dpo"], *SHORT, "--freeze", "llm"]),
            ("targets", [*argv["dpo"], *SHORT, "--tuner", "lora", "--target-modules", "nonesuch"]),
        ]
    )


@pytest.fixture(scope="module")
def more_runs(commands: Any, argv: dict[str, list[str]], models: dict[str, Path]) -> Any:
    """What takes longer than a commit should wait for."""
    judge = ["--reward-model", str(models["judge"]), "--loss-type", "dr_grpo"]
    return commands(
        [
            ("plain", [*argv["dpo"], *SHORT]),
            ("again", ["rlhf", "RUNS/plain/config.yaml", "--output-dir", "OUT"]),
            ("once", [*argv["dpo"], *SHORT, "--precompute-ref"]),
            ("sync", [*argv["dpo"], *SHORT, "--sync-ref-steps", "2"]),
            ("judge", [*argv["grpo"], *SHORT, *SAMPLED, *judge]),
            ("gkd", [*argv["gkd"], *SHORT, "--lmbda", "1", "--max-completion-length", "6"]),
            ("alike", [*argv["grpo"], *SHORT, "--max-steps", "12", *SAMPLED, "--reward-funcs", "format"]),
        ]
    )


@pytest.mark.parametrize("name", ["dpo", "lora", "grpo"])
def test_a_run_ends_with_weights_and_says_where(runs: Any, name: str) -> None:
    check_run(runs[name], "adapter_model.safetensors" if name == "lora" else "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["once", "sync", "judge", "gkd"])
def test_so_do_the_others(more_runs: Any, name: str) -> None:
    check_run(more_runs[name], "model.safetensors")


def check_run(run: Any, weights: str) -> None:
    assert run.code == 0, run.output
    assert run.series("step")[:4] == [1, 2, 3, 4]
    lines = run.output.strip().splitlines()
    assert lines[-1] == f"talk to it: shardproof infer {run.folder}"
    assert next(i for i, line in enumerate(lines) if line.startswith("step 1/")) <= 15, run.output
    assert (run.folder / "model" / weights).is_file()
    assert not (run.folder / "README.md").exists()


def test_margins_and_evaluation_are_in_the_metrics(runs: Any) -> None:
    run = runs["dpo"]
    assert run.series("loss")[0] == pytest.approx(0.6931, abs=1e-3)  # the reference is the model as it began
    assert run.series("rewards/margins")[-1] > run.series("rewards/margins")[0]
    assert len(run.series("eval_loss")) == 1
    assert "margin" in run.output


@pytest.mark.slow
def test_a_reference_asked_once_gives_the_same_losses(more_runs: Any) -> None:
    assert more_runs["once"].series("loss") == pytest.approx(more_runs["plain"].series("loss"), abs=1e-5)
    assert not (more_runs["once"].folder / "rows").exists()


@pytest.mark.slow
def test_a_reference_that_follows_gives_other_losses(more_runs: Any) -> None:
    plain, sync = more_runs["plain"].series("loss"), more_runs["sync"].series("loss")
    assert sync[:2] == pytest.approx(plain[:2], abs=1e-5)
    assert abs(sync[-1] - plain[-1]) > 1e-3


@pytest.mark.slow
def test_the_config_repeats_the_run(more_runs: Any) -> None:
    assert more_runs["again"].code == 0, more_runs["again"].output
    assert more_runs["again"].series("loss") == pytest.approx(more_runs["plain"].series("loss"), abs=1e-6)


@pytest.mark.parametrize("kind, beta", [("grpo", None), ("grpo", 0.0), ("rloo", 0.0)])
def test_a_reference_that_is_not_there_cannot_follow(kind: str, beta: float | None) -> None:
    from shardproof.train.options.rlhf_config import RlhfConfig
    from shardproof.train.rlhf.algorithms import check_algorithm

    config = RlhfConfig(rlhf_type=kind, beta=beta, reward_funcs=["format"], sync_ref_steps=2, per_device_batch_size=8)
    with pytest.raises(ConfigError, match="only with --beta above 0"):
        check_algorithm(config, config.batch(1))


def test_that_nothing_is_learnt_where_all_answers_are_cut_is_told_once(runs: Any) -> None:
    run = runs["cut"]
    assert run.code == 0, run.output
    said = " ".join(run.output.split())
    assert 1.0 in [record["completions/clipped_ratio"] for record in run.records]  # on the CPU in several of them
    assert said.count("were cut at --max-completion-length 1, and with --mask-truncated-completions nothing") == 1
    assert "were cut at" not in runs["grpo"].output


@pytest.mark.slow
def test_that_all_answers_are_worth_the_same_for_long_is_told_once(more_runs: Any) -> None:
    run = more_runs["alike"]
    assert run.code == 0, run.output
    assert run.series("frac_reward_zero_std") == [1.0] * 12  # a tiny model keeps no format
    said = " ".join(run.output.split())
    assert said.count("In the last 10 batches, up to step") == 1
    assert (
        "all answers to each question had the same reward (0 on average in the last one): nothing was learned" in said
    )


@pytest.mark.parametrize(
    "logs, told",
    [
        ([[1.0] * 6, [1.0] * 4], True),
        ([[1.0] * 9], False),
        ([[1.0] * 9, [0.5, 1.0], [1.0] * 8], False),
        ([[0.5] + [1.0] * 9, [1.0]], True),
        ([[1.0] * 9, [], []], False),
    ],
)
def test_batches_whose_answers_are_alike_are_counted_from_log_to_log(
    caplog: Any, logs: list[list[float]], told: bool
) -> None:
    trainer: Any = object.__new__(Generating)
    trainer._warned, trainer._alike, trainer.also_trained, trainer.beta = set(), 0, (), 0.0
    trainer.model, trainer.state = SimpleNamespace(training=True), SimpleNamespace(global_step=7)
    trainer.accelerator = SimpleNamespace(is_main_process=True)
    for shares in logs:
        trainer._metrics = {"train": {"frac_reward_zero_std": shares, "reward": shares}}
        trainer._warn_of_alike()
    assert [record.levelname for record in caplog.records] == ["WARNING"] * told


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
        ("meant", "--num-generations does not apply to --rlhf-type dpo"),
        ("loss", "Did you mean sigmoid?"),
        ("rows", "prompts.jsonl:1: there is no 'rejected_response'"),
        ("none", "--dataset is missing"),
        pytest.param("server", "the package vllm, with which", marks=pytest.mark.skipif(VLLM, reason="it is")),
        ("no_server", "--vllm-server-port applies to a vLLM server, which is not used: add --use-vllm"),
        ("part", "--freeze llm"),
        ("targets", "nonesuch"),
    ],
)
def test_what_cannot_work_is_refused_in_a_few_words(runs: Any, name: str, said: str) -> None:
    run = runs[name]
    assert run.code == 2, run.output
    assert said in run.output
    assert "Traceback" not in run.output
    assert run.output.count("error: ") == 1
    assert not run.folder.exists()


def test_a_talker_learns_nothing_of_words_that_are_compared() -> None:
    from shardproof.train.options.rlhf_config import RlhfConfig
    from shardproof.train.rlhf.recipe import check

    config = RlhfConfig(model="x", dataset=["y"], rlhf_type="dpo", train_parts=["thinker", "talker"])
    with pytest.raises(ConfigError, match="--train-parts talker: rlhf compares or rewards text"):
        check(config, 1)
