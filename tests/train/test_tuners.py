"""Adapters of every kind that --tuner names: the numbers of one process, resumed, merged, asked and trained on."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from shardproof.train.options.tuners import KINDS

AGAIN = ["--gradient-checkpointing"]
REENTRANT = [*AGAIN, "--checkpointing-reentrant"]
# As small as the layers of a tiny model want them.
ARGUMENTS = {
    "adamss": ["r=4", "num_subspaces=2"],
    "c3a": ["block_size=8"],
    "fourierft": ["n_frequency=40"],
    "gralora": ["r=4"],
    "hira": ["r=4"],
    "miss": ["r=4"],
    "oft": ["oft_block_size=8"],
    "peanut": ["r=4"],
    "psoft": ["r=4"],
    "randlora": ["r=4"],
    "road": ["group_size=8"],
    "shira": ["r=4"],
    "tinylora": ["u=4"],
    "unilora": ["theta_d_length=16"],
    "vblora": ["num_vectors=8", "vector_length=8"],
    "vera": ["r=4"],
    "waveft": ["n_frequency=40"],
}
FAST = ("adalora", "boft")
RATES = {"osf": "1e-3"}


def adapted(sft, kind: str, *more: str) -> list[str]:
    own = ["--tuner-arguments", *ARGUMENTS[kind]] if kind in ARGUMENTS else []
    rate = ["--learning-rate", RATES[kind]] if kind in RATES else []
    return sft("--tuner", kind, *own, *rate, *more)


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in FAST else pytest.mark.slow) for k in KINDS])
def test_the_numbers_of_one_process_from_the_first_step_to_the_merged_model(commands, sft, kind) -> None:
    two, save = ["--nproc", "2"], ["--save-steps", "2", "--max-steps", "4"]
    jobs = {
        "one": adapted(sft, kind, "--max-steps", "4"),
        "stage2": adapted(
            sft, kind, *two, "--stage", "2", *REENTRANT, "--per-device-batch-size", "2", "--max-steps", "4"
        ),
        "stage3": adapted(sft, kind, *two, "--stage", "3", *AGAIN, *save),
    }
    done = commands(list(jobs.items()))
    for name, run in done.items():
        assert run.code == 0, f"{name}:\n{run.output}"
    one, last = done["one"], done["stage3"]
    assert one.series("loss")[-1] < one.series("loss")[0]
    for name, run in done.items():
        for key in ("loss", "grad_norm"):
            assert run.series(key) == pytest.approx(one.series(key), rel=2e-4), f"{key}: {name}"
    ask = ["--prompt", "the process", "--max-new-tokens", "4", "--temperature", "0"]
    on = [] if kind == "adalora" else [("on", sft(*two, "--adapters", str(last.folder), "--max-steps", "1"))]
    later = commands(
        [
            ("again", [*jobs["stage3"], "--resume", str(last.folder / "checkpoint-2")]),
            ("merged", ["export", str(last.folder), "OUT"]),
            ("checkpoint", ["export", str(last.folder / "checkpoint-4"), "OUT"]),
            ("asked", ["infer", str(last.folder), *ask, "--nproc", "2"]),
            ("asked merged", ["infer", "RUNS/merged", *ask]),
            *on,
        ]
    )
    for name, run in later.items():
        if kind == "beft" and ("merged" in name or name == "checkpoint"):
            assert "Base layer has no bias" in run.output or name == "asked merged"
            continue
        assert run.code == 0, f"{name}:\n{run.output}"
    assert later["again"].series("loss") == last.series("loss")[2:]
    if on:
        assert later["on"].series("loss")[0] < one.series("loss")[0]
    if kind == "beft":  # it learns biases, which these layers do not have
        return
    merged, early = (load_file(later[name].folder / "model.safetensors") for name in ("merged", "checkpoint"))
    for name, value in merged.items():
        torch.testing.assert_close(value, early[name], rtol=1e-5, atol=1e-6)
    said = [later[name].output.splitlines()[-1] for name in ("asked", "asked merged")]
    assert said[0] == said[1]
