"""Commands that cannot be meant, in few words and at once; of each kind that no other test has."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from shardproof.cli.main import main

SFT = ["sft", "--model", "tiny", "--dataset", "stdlib#8"]
GRPO = ["rlhf", "--rlhf-type", "grpo", "--model", "tiny", "--dataset", "stdlib#8"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["plan"], "--model is missing.\n--model: "),
        (["sft", "--model", "MS::one", *SFT[3:]], "names on ModelScope's hub have the form MS::OWNER/NAME"),
        (
            [*SFT, "--report-to", "wandbb"],
            "--report-to wandbb: use one of none, tensorboard, wandb, swanlab, mlflow, trackio. Did you mean wandb?",
        ),
        ([*SFT, "--save-only-model"], "--save-only-model sets the contents of checkpoints: add --save-steps"),
        ([*SFT, "--min-processes", "2"], "--min-processes sets how few processes a run may resume on"),
        (
            [*SFT, *"--min-processes 2 --max-restarts 1 --save-steps 1".split()],
            "--min-processes 2 is more than --nproc 1",
        ),
        ([*GRPO, "--reward-funcs", "format", "--reward-weights", "1", "2"], "has 2 weights for 1 rewards"),
        ([*GRPO, "--reward-funcs", "format", "--loss-type", "dapo", "grpo"], "--loss-type takes one value with"),
        (
            [*GRPO, *"--reward-funcs format --use-vllm --vllm-server http://a --vllm-server-host b".split()],
            "--vllm-server is the whole address: leave out --vllm-server-host",
        ),
    ],
)
def test_what_cannot_be_meant(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["doctor", "verify"])
def test_what_starts_processes_of_its_own_is_not_started_by_torchrun(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }.items():
        monkeypatch.setenv(name, value)
    assert main([command, *SFT[1:]]) == 2
    assert f"shardproof {command} starts its own processes: run it without torchrun" in capsys.readouterr().err


@pytest.mark.skipif(find_spec("ray") is not None, reason="it is there")
def test_ray_is_named_where_it_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SFT, "--launcher", "ray", "--nproc", "2", "--output-dir", str(tmp_path / "run")]) == 2
    assert "--launcher ray: ray is missing. pip install 'shardproof[ray]'" in capsys.readouterr().err
