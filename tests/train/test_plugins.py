"""Commands with a user's own model, row format, loss, metric, optimizer, callback and reward."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PLUGINS = str(Path(__file__).with_name("plugins_for_tests.py"))
OWN = f"--external_plugins {PLUGINS} --model-type scaled_qwen --row-format qa --loss smooth --metrics hits".split()
OWN += "--optimizer momentum --callbacks notes --learning-rate 0.05".split()


@pytest.fixture(scope="module")
def qa(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The rows in a form that only the plugin knows."""
    file = tmp_path_factory.mktemp("qa") / "qa.jsonl"
    turns = [json.loads(line)["messages"] for line in rows.read_text().splitlines()]
    file.write_text("".join(json.dumps({"q": q["content"], "a": a["content"].split()}) + "\n" for q, a in turns))
    return str(file)


@pytest.fixture(scope="module")
def own(qa: str) -> list[str]:
    return [*OWN, "--dataset", qa, "--val-dataset", qa, "--weight-decay", "0.1"]


@pytest.fixture(scope="module")
def runs(commands, sft, own):
    plugins = ["--external-plugins", PLUGINS]
    grpo = "rlhf --rlhf-type grpo --model tiny --dataset stdlib#10 --num-generations 2 --reward-funcs brevty".split()
    return commands(
        [
            ("one", sft(*own, "--stage", "0")),
            ("two", sft(*own, "--stage", "3", "--nproc", "2")),
            ("exported", ["export", "RUNS/two", "OUT", *plugins]),
            ("stranger", "infer RUNS/two --prompt one".split()),
            ("unknown", sft("--loss", "smoth", *plugins)),
            ("missing", sft("--loss", "smooth", "--nproc", "2")),
            ("evaluated", sft("--metrics", "hits", *plugins)),
            ("judged", [*grpo, *plugins]),
            ("empty", sft("--model-type", "forgetful_qwen", *plugins)),
        ]
    )


def test_everything_of_ones_own_gives_the_same_numbers_on_every_rank_and_stage(runs) -> None:
    one, two = runs["one"], runs["two"]
    assert (one.code, two.code) == (0, 0), one.output + two.output
    assert two.series("loss") == pytest.approx(one.series("loss"), rel=1e-5)
    assert two.series("grad_norm") == pytest.approx(one.series("grad_norm"), rel=1e-3)
    assert one.series("loss")[-1] < one.series("loss")[0] - 0.1
    assert 0 < one.series("eval_hits")[0] < 1
    assert two.series("eval_hits") == one.series("eval_hits")
    assert [file.read_text() for file in sorted(two.folder.glob("rank-*.txt"))] == ["5", "5"]


def test_a_model_of_ones_own_is_saved_and_exported(runs) -> None:
    import torch
    from safetensors import safe_open

    assert runs["exported"].code == 0, runs["exported"].output
    for folder in (runs["two"].folder / "model", runs["exported"].folder):
        (file,) = folder.glob("*.safetensors")
        with safe_open(file, "pt") as weights:
            assert not torch.equal(weights.get_tensor("scale"), torch.ones(2048))
    assert runs["two"].output.splitlines()[-1].endswith(f"--external-plugins {PLUGINS}")


@pytest.mark.parametrize(
    "name, said",
    [
        ("stranger", "is a ScaledQwen, which transformers does not know"),
        ("unknown", "Did you mean smooth"),
        ("missing", "there is no such loss"),
        ("evaluated", "--metrics needs rows to evaluate on"),
        ("judged", "Did you mean brevity"),
        ("empty", "scale of ForgetfulQwen is not in"),
    ],
)
def test_what_cannot_be_is_refused_before_it_trains(runs, name: str, said: str) -> None:
    assert runs[name].code == 2
    assert said in runs[name].output
    said_by_us = [line for line in runs[name].output.splitlines() if not line.startswith("  ")]
    assert len(said_by_us) <= 4, runs[name].output


@pytest.mark.slow
def test_with_adapters_with_rewards_and_when_it_is_asked(commands, sft, own, runs, tiny: Path, rows: Path) -> None:
    grpo = f"rlhf --rlhf-type grpo --model {tiny} --dataset {rows} --external-plugins {PLUGINS} --nproc 2".split()
    grpo += "--max-steps 1 --num-generations 2 --max-completion-length 6 --output-dir OUT --optimizer momentum".split()
    ask = f"infer {runs['two'].folder} --prompt one --max-new-tokens 4 --external-plugins {PLUGINS}".split()
    done = commands(
        [
            ("lora", sft(*own, "--nproc", "2", "--tuner", "lora")),
            ("grpo", [*grpo, "--reward-funcs", "brevity", "length"]),
            ("asked", ask),
        ]
    )
    for run in done.values():
        assert run.code == 0, run.output
    first = json.loads((done["grpo"].folder / "completions.jsonl").read_text().splitlines()[0])
    assert first["rewards"]["brevity"] < 0 <= first["rewards"]["length"]


@pytest.mark.slow
def test_so_it_is_under_torchrun(own, tiny: Path, tmp_path: Path, runs) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "shardproof", "sft"]
    command += ["--model", str(tiny), *own]
    command += "--max-steps 5 --global-batch-size 8 --lr-scheduler constant --output-dir".split()
    done = subprocess.run(
        [*command, str(tmp_path / "run")], capture_output=True, text=True, timeout=300, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert losses == pytest.approx(runs["one"].series("loss"), rel=1e-5)
