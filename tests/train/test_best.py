"""--keep-best and --early-stop: which weights a run leaves, and when it ends."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from shardproof.checkpoint.api import load_weights
from shardproof.errors import ConfigError
from shardproof.train.options.config import SftConfig
from shardproof.train.sft import recipe
from shardproof.train.stop import JudgesEvaluations

pytestmark = pytest.mark.slow

EACH = ["--val-split", "0.2", "--eval-steps", "1", "--save-steps", "1", "--max-steps", "9"]
PASSES = (
    "--val-split 0.2 --max-steps none --epochs 2.5 --eval-strategy epoch --save-strategy epoch --keep-best"
).split()
START = "--val-split 0.2 --eval-on-start --max-steps 2".split()
WORSE = ["--learning-rate", "0.3", "--lr-scheduler", "constant", "--warmup-ratio", "0"]


@pytest.fixture(scope="module")
def runs(commands, sft):
    """Each step makes it worse; the first is the best."""
    best = sft(*EACH, *WORSE, "--keep-best", "--early-stop", "2", "--save-total-limit", "2")
    return commands(
        [
            ("full", [*best, "--nproc", "2", "--stage", "3"]),
            ("lora", [*best, "--nproc", "2", "--stage", "2", "--tuner", "lora", "--learning-rate", "10"]),
            ("on", [*best, "--nproc", "2", "--resume", "RUNS/full"]),
            (
                "auto",
                [
                    *best,
                    "--nproc",
                    "1",
                    "--per-device-batch-size",
                    "8",
                    "--resume",
                    "auto",
                    "--output-dir",
                    "RUNS/full",
                ],
            ),
            ("passes", sft(*PASSES)),
            ("stage3", sft(*PASSES, "--nproc", "2", "--stage", "3")),
            ("second", sft(*PASSES, "--resume", "RUNS/passes/checkpoint-3")),
            ("steps", sft(*"--val-split 0.2 --eval-steps 3 --max-steps 8".split())),
            ("start", sft(*START)),
            ("started", sft(*START, "--nproc", "2", "--stage", "3", "--save-steps", "1")),
            ("after", sft(*START, "--resume", "RUNS/started/checkpoint-1")),
            ("never", sft(*"--val-split 0.2 --eval-strategy no --max-steps 1".split())),
            ("worse", sft(*START, *EACH[2:6], "--max-steps", "1", *WORSE, "--learning-rate", "9", "--keep-best")),
            ("equal", sft(*START, *EACH[2:6], "--max-steps", "1", *WORSE, "--learning-rate", "0", "--keep-best")),
            ("odd", sft(*EACH, *WORSE, "--keep-best", "--best-metric", "accuracy")),
        ]
    )


def test_an_evaluation_before_the_first_step_has_no_checkpoint(runs) -> None:
    """Which is said where that one was better."""
    told = {name: "that of step 0 was better, but its checkpoint" in runs[name].output for name in ("worse", "equal")}
    assert told == {"worse": True, "equal": False}


@pytest.mark.parametrize("name", ["full", "lora"])
def test_the_weights_are_those_of_the_best_evaluation(runs, name: str) -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    run = runs[name]
    assert run.code == 0, run.output
    losses = run.series("eval_loss")
    best = 1 + losses.index(min(losses))
    assert best + 2 == len(losses) < 9
    assert f"ended after step {best + 2} of 9: loss was no better in 2 evaluation(s)" in run.output
    assert f"The weights are those of step {best}, the best evaluation" in run.output
    kept = {path.name for path in run.folder.glob("checkpoint-*")}
    assert kept == {f"checkpoint-{best}", f"checkpoint-{best + 2}"}
    kind = AutoPeftModelForCausalLM if name == "lora" else AutoModelForCausalLM
    model = kind.from_pretrained(run.folder / "model")
    left = {key: value.clone() for key, value in model.state_dict().items()}
    load_weights(model, run.folder / f"checkpoint-{best}")
    for key, value in model.state_dict().items():
        assert left[key].equal(value), key


@pytest.mark.parametrize("name", ["on", "auto"])
def test_a_run_that_goes_on_remembers_what_was_best(runs, name: str) -> None:
    """It has come to its end: nothing is trained, and the weights are the same, also from another folder."""
    run, full = runs[name], runs["full"]
    assert run.code == 0, run.output
    losses = full.series("eval_loss")
    assert len(losses) == losses.index(min(losses)) + 3
    assert f"The weights are those of step {1 + losses.index(min(losses))}, the best evaluation" in run.output
    if name == "on":
        assert not (run.folder / "metrics.jsonl").exists()
        files = [folder / "model" / "model.safetensors" for folder in (run.folder, full.folder)]
        assert files[0].read_bytes() == files[1].read_bytes()


def evaluations(run) -> dict[int, float]:
    return {record["step"]: record["eval_loss"] for record in run.records if "eval_loss" in record}


def test_each_pass_over_the_rows_is_evaluated_and_saved(runs) -> None:
    """19 rows are three steps of eight: the third is one of a pass that is not whole."""
    run = runs["passes"]
    assert run.code == 0, run.output
    found = evaluations(run)
    assert list(found) == [3, 6, 8]
    assert found == pytest.approx({3: 0, 6: 0} | evaluations(runs["steps"]), abs=1e-6)
    assert {path.name for path in run.folder.glob("checkpoint-*")} == {f"checkpoint-{step}" for step in found}
    best = min(found, key=found.get)
    assert f"The weights are those of step {best}, the best evaluation" in run.output
    assert evaluations(runs["stage3"]) == pytest.approx(found, abs=2e-5)


def test_so_it_is_when_the_run_goes_on(runs) -> None:
    assert runs["second"].code == 0, runs["second"].output
    assert evaluations(runs["second"]) == {step: loss for step, loss in evaluations(runs["passes"]).items() if step > 3}


def test_none_is_evaluated(runs) -> None:
    assert runs["never"].code == 0, runs["never"].output
    assert not evaluations(runs["never"])


def test_a_metric_that_no_evaluation_has(runs) -> None:
    assert runs["odd"].code == 2
    assert "--best-metric accuracy: an evaluation has the loss, and what --metrics names" in runs["odd"].output


def judged(metric: str, values: list[float], patience: int) -> bool:
    history = [{"loss": 9.0}, *({f"eval_{metric}": value} for value in values)]
    control = SimpleNamespace(should_training_stop=False, should_save=False)
    args, state = SimpleNamespace(save_strategy="no"), SimpleNamespace(log_history=history)
    JudgesEvaluations(metric, patience).on_evaluate(args, state, control, metrics=history[-1])
    return control.should_training_stop


@pytest.mark.parametrize(
    "metric, values, ends",
    [
        ("loss", [3, 2, 2, 2.5], True),
        ("loss", [3, 2, 2, 1.5], False),
        ("reward", [1, 2, 2, 1.5], True),
        ("reward", [3, 2, 2, 3.5], False),
        ("loss", [1, float("nan"), float("nan")], True),
        ("loss", [float("nan"), 2, 1], False),
    ],
)
def test_when_it_ends(metric: str, values: list[float], ends: bool) -> None:
    assert judged(metric, values, 2) is ends


@pytest.mark.parametrize(
    "options, said",
    [
        ({"keep_best": True}, "--keep-best needs evaluations during training"),
        ({"early_stop": 1}, "--early-stop needs evaluations during training"),
        ({"best_metric": "accuracy"}, "add one of them"),
        ({"keep_best": True, "eval_steps": 2, "val_split": 0.5}, "Give --save-steps 2"),
        ({"keep_best": True, "eval_steps": 2, "val_split": 0.5, "save_steps": 4}, "Give --save-steps 2"),
        (
            {"keep_best": True, "eval_strategy": "epoch", "val_split": 0.5, "save_steps": 4},
            "Give --save-strategy epoch",
        ),
        ({"eval_strategy": "epoch"}, "--eval-strategy epoch needs rows to evaluate on"),
        ({"eval_steps": 2}, r"--val-dataset, or hold some .* --val-split 0.05, or leave --eval-steps out \(ms-swift"),
        ({"eval_steps": 2, "early_stop": 1}, r"--val-dataset, or hold some .* with --val-split 0.05\.$"),
        ({"eval_steps": 2, "streaming": True, "max_steps": 2}, "--val-dataset, or leave --eval-steps out"),
        ({"eval_on_start": True}, "--eval-on-start needs rows to evaluate on"),
        ({"eval_on_start": True, "eval_strategy": "no", "val_split": 0.1}, "--eval-on-start and --eval-strategy no"),
        ({"eval_strategy": "epoch", "eval_steps": 2, "val_split": 0.5}, "leave one of them out"),
        (
            {"eval_strategy": "epoch", "streaming": True, "max_steps": 2, "val_dataset": ["stdlib"]},
            "Use --eval-steps N",
        ),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        recipe.check(SftConfig(model="tiny", dataset=["stdlib"], **options), 1)


def test_json(runs) -> None:
    """What it goes by is in the checkpoint."""
    newest = max(runs["full"].folder.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    state = json.loads((newest / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"].endswith(f"checkpoint-{state['best_global_step']}")


def test_an_evaluation_before_the_first_step(runs) -> None:
    """Of what training begins with: not in a run that goes on; and training is what it is without."""

    def evaluations(name: str) -> list[tuple[int, float]]:
        assert runs[name].code == 0, runs[name].output
        return [(record["step"], record["eval_loss"]) for record in runs[name].records if "eval_loss" in record]

    (first, before), (last, after) = evaluations("start")
    assert (first, last) == (0, 2)
    assert after < before - 0.01
    assert [step for step, _ in evaluations("started")] == [0, 2]
    assert [loss for _, loss in evaluations("started")] == pytest.approx([before, after], abs=1e-5)
    assert [step for step, _ in evaluations("after")] == [2]
    assert runs["start"].series("loss") == pytest.approx(runs["steps"].series("loss")[:2], abs=1e-6)
    shown = next(line for line in runs["start"].output.splitlines() if line.startswith("step 0/2"))
    assert shown == f"step 0/2  evaluation loss {before:.5f}", "how long it takes is not known yet"
