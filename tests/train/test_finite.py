"""Promise: a run whose loss is NaN ends, says since when and with which rows, and writes none of these weights."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

PLUGIN = str(Path(__file__).with_name("losses_for_tests.py"))
TWO = "--nproc", "2", "--per-device-batch-size", "2", "--global-batch-size", "4"


@pytest.fixture(scope="module")
def with_a_long_row(tmp_path_factory: pytest.TempPathFactory, rows: Path) -> Path:
    file = tmp_path_factory.mktemp("rows") / "long.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "gradient " * 200}]
    file.write_text(rows.read_text() + json.dumps({"messages": turns}) + "\n")
    return file


@pytest.fixture(scope="module")
def nan_model(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("models") / "nan"
    model = AutoModelForCausalLM.from_pretrained(tiny)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = float("nan")
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def runs(commands: Any, sft: Callable[..., list[str]], with_a_long_row: Path, nan_model: Path) -> dict[str, Any]:
    def losing(name: str, *more: str) -> list[str]:
        return sft("--external-plugins", PLUGIN, "--loss", name, *more)

    saving = "--save-steps", "1"
    one = "--per-device-batch-size", "4", "--global-batch-size", "4"
    row = "--dataset", str(with_a_long_row)
    return commands(
        [
            ("rate", sft("--learning-rate", "1e6", "--stage", "0", "--max-steps", "20")),
            ("row", losing("nan_of_a_long_row", *TWO, *row, *saving, "--stage", "3", "--max-steps", "12")),
            ("rare log", losing("nan_of_a_long_row", *TWO, *row, "--stage", "0", "--logging-steps", "12")),
            ("once", losing("nan_once", *one, *saving)),
            ("at the end", losing("nan_in_the_end", *TWO, *saving)),
            ("fp16", losing("too_large_once", *one, "--precision", "fp16")),
            ("model", sft("--model", str(nan_model), "--tuner", "lora", *TWO)),
        ]
    )


def check_ended(run: Any) -> None:
    assert run.code == 2, run.output
    assert not (run.folder / "model").exists()
    assert not (run.folder / "model.unfinished").exists()
    assert run.output.count("error: ") == 1
    assert "Traceback" not in run.output


def test_too_high_a_learning_rate(runs: dict[str, Any]) -> None:
    run = runs["rate"]
    check_ended(run)
    bad = [r["step"] for r in run.records if not (math.isfinite(r["loss"]) and math.isfinite(r["grad_norm"]))]
    assert len(bad) == 3
    assert run.records[-1]["step"] == bad[-1] == bad[0] + 2
    assert f"not finite (NaN or infinite) from step {bad[0]} on, 3 steps in a row" in run.output
    assert "a --learning-rate below 1e+06" in run.output
    assert "--max-grad-norm" in run.output
    assert "There is no checkpoint to go back to." in run.output
    assert "nothing learned is kept: --save-steps N would have kept it every N steps\n" in run.output


def test_rows_and_the_checkpoint_before_are_named(runs: dict[str, Any], with_a_long_row: Path) -> None:
    """On two ranks, of which one has the row."""
    run = runs["row"]
    check_ended(run)
    bad = next(record["step"] for record in run.records if not math.isfinite(record["loss"]))
    said = re.search(r"Rows of step (\d+): (.*)\.$", run.output, re.MULTILINE)
    assert said is not None, run.output
    assert int(said[1]) == bad
    named = said[2].split(", ")
    assert len(named) == 4
    assert f"{with_a_long_row}:24" in named
    there = sorted(path.name for path in run.folder.glob("checkpoint-*"))
    assert there == [f"checkpoint-{step}" for step in range(1, bad)]
    if there:
        assert f"The newest checkpoint was written before: {run.folder / there[-1]}" in run.output


def test_a_log_of_many_steps_tells_the_same_step(runs: dict[str, Any]) -> None:
    check_ended(runs["rare log"])
    steps = [re.search(r"Rows of step \d+: .*", runs[name].output)[0] for name in ("row", "rare log")]  # type: ignore[index]
    assert steps[0] == steps[1]


def test_a_single_step_is_told_and_the_run_goes_on(runs: dict[str, Any]) -> None:
    run = runs["once"]
    assert run.code == 0, run.output
    assert [math.isfinite(loss) for loss in run.series("loss")] == [True, True, False, True, True]
    assert "of 1 step(s) up to step 3 is not finite" in run.output
    assert (run.folder / "model" / "model.safetensors").is_file()
    assert "Step 3 has no checkpoint: its loss was not finite." in run.output
    assert sorted(path.name[-1] for path in run.folder.glob("checkpoint-*")) == ["1", "2", "4", "5"]


def test_weights_of_a_last_step_without_a_finite_loss_are_not_written(runs: dict[str, Any]) -> None:
    run = runs["at the end"]
    check_ended(run)
    assert "from step 5 on. The run ends here" in run.output
    checkpoint = run.folder / "checkpoint-4"
    assert f"The newest checkpoint was written before: {checkpoint}" in run.output
    assert f"its newest checkpoint is {checkpoint}: when that is fixed, add --resume" in run.output


@pytest.mark.slow
def test_a_run_begins_anew_from_a_checkpoint_as_the_error_says(
    runs: dict[str, Any], rows: Path, tmp_path: Path
) -> None:
    said = re.search(r"shardproof (export .+) FOLDER, then --model FOLDER", runs["at the end"].output)
    assert said is not None, runs["at the end"].output
    shardproof, folder = [sys.executable, "-m", "shardproof"], tmp_path / "weights"
    subprocess.run([*shardproof, *shlex.split(said[1]), str(folder)], check=True)
    again = ["--model", str(folder), "--dataset", str(rows), "--max-steps", "2", "--output-dir", str(tmp_path / "run")]
    subprocess.run([*shardproof, "sft", *again], check=True)
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


@pytest.mark.slow
def test_what_is_said_fits_a_command_that_has_resume_already(
    runs: dict[str, Any], commands: Any, sft: Callable[..., list[str]], with_a_long_row: Path, tmp_path: Path
) -> None:
    """In the folder of the run, from another one, and where checkpoints hold weights only."""
    newest = sorted(shutil.copytree(runs["row"].folder, tmp_path / "run").glob("checkpoint-*"))[-1]
    losing = ["--external-plugins", PLUGIN, "--loss", "nan_of_a_long_row", *TWO, "--dataset", str(with_a_long_row)]
    losing += ["--stage", "3", "--max-steps", "12"]
    here = ["--output-dir", str(newest.parent), "--save-steps", "1"]
    ended = commands(
        [
            ("same", sft(*losing, *here, "--resume", "auto")),
            ("other", sft(*losing, "--resume", str(newest))),
            ("weights", sft(*losing, "--save-steps", "1", "--save-only-model")),
        ]
    )
    for run in ended.values():
        assert run.code == 2, run.output
        assert "add --resume" not in run.output
        assert "--resume continues" not in run.output
    assert f"its newest checkpoint is {newest}: when that is fixed, the same command continues" in ended["same"].output
    assert f"before: {newest}\nA run that resumes from it keeps these options." in ended["other"].output
    assert f"nothing learned since {newest} is kept: --save-steps N would" in ended["other"].output
    assert "which holds weights only, so no run can resume from it: shardproof export" in ended["weights"].output
    assert "It holds weights only. To use a lower learning rate: shardproof export" in ended["weights"].output


def test_a_step_that_a_loss_scale_leaves_out_does_not_count(runs: dict[str, Any]) -> None:
    """The last one among them: the weights are those of the step before."""
    run = runs["fp16"]
    assert run.code == 0, run.output
    assert [math.isfinite(norm) for norm in run.series("grad_norm")] == [True, False, True, True, False]
    assert "not finite" not in run.output
    assert (run.folder / "model" / "model.safetensors").is_file()


def test_a_model_that_holds_nan(runs: dict[str, Any]) -> None:
    """In weights that are frozen, so that no step makes it worse."""
    run = runs["model"]
    check_ended(run)
    assert [record["step"] for record in run.records] == [1, 2, 3]
    assert "'shardproof doctor' checks whether the model itself is finite" in run.output


@pytest.mark.slow
def test_under_torchrun_one_rank_speaks_for_all(nan_model: Path, rows: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command += ["shardproof", "sft", "--model", str(nan_model), "--dataset", str(rows), "--max-steps", "8"]
    command += ["--save-strategy", "epoch", "--output-dir", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert done.stderr.count("error: ") == 1, done.stderr
    assert "nothing learned is kept: no checkpoint was complete yet" in done.stderr
    assert not (tmp_path / "out" / "model").exists()


def test_who_only_watches_a_run_sees_all_its_steps(commands: Any, nan_model: Path, rows: Path) -> None:
    """One process and two are the same, in what is NaN, too."""
    command = ["verify", "--model", str(nan_model), "--dataset", str(rows), "--nproc", "2"]
    run = commands([("verify", [*command, "--steps", "4"])])["verify"]
    assert run.code == 0, run.output
    assert "step 4  loss nan and nan" in run.output


@pytest.mark.slow
def test_preferences_and_rewards(commands: Any, tiny: Path, nan_model: Path, tmp_path: Path) -> None:
    """Where answers are drawn, a model that is not finite ends the run before it writes one."""
    pairs, prompts = tmp_path / "pairs.jsonl", tmp_path / "prompts.jsonl"
    pairs.write_text(
        "".join(json.dumps({"query": f"a {i}", "response": "b", "rejected_response": "c"}) + "\n" for i in range(8))
    )
    prompts.write_text("".join(json.dumps({"query": f"a {i}"}) + "\n" for i in range(8)))
    judged = tmp_path / "judged.jsonl"
    judged.write_text(
        "".join(json.dumps({"query": f"a {i}", "response": "b", "label": i % 2 == 0}) + "\n" for i in range(8))
    )
    kto = ["rlhf", "--rlhf-type", "kto", "--dataset", str(judged), "--output-dir", "OUT", "--max-steps", "8"]
    dpo = ["rlhf", "--rlhf-type", "dpo", "--dataset", str(pairs), "--output-dir", "OUT", "--max-steps", "8"]
    grpo = ["rlhf", "--rlhf-type", "grpo", "--dataset", str(prompts), "--output-dir", "OUT", "--max-steps", "8"]
    grpo += ["--reward-funcs", "length", "--max-completion-length", "8", "--model", str(tiny), "--learning-rate"]
    found = commands(
        [
            ("dpo", [*dpo, "--model", str(nan_model), "--nproc", "2", "--stage", "3"]),
            ("dpo-0", [*dpo, "--model", str(nan_model), "--stage", "0"]),
            ("grpo", [*grpo, "1e30", "--nproc", "2"]),
            ("kto", [*kto, "--model", str(nan_model)]),
        ]
    )
    for run in found.values():
        check_ended(run)
    for name in ("dpo", "dpo-0"):
        assert [record["step"] for record in found[name].records] == [1, 2, 3]
        assert f"Rows of step 1: {pairs}:" in found[name].output
    assert f"Rows of step 1: {judged}:" in found["kto"].output
    assert "not finite (NaN or infinite)" in found["grpo"].output
