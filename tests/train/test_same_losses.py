"""The same command at every stage and number of processes prints the same losses."""

from __future__ import annotations

import pytest

FULL = {f"n{n}s{s}": (n, s, []) for n, s in [(1, 0), (2, 2), (4, 3)]}
EVERY = {f"n{n}s{s}": (n, s, []) for n in (1, 2, 4) for s in range(4)}
CHECKPOINTING = {"checkpointing": (2, 3, ["--gradient-checkpointing"])}
REENTRANT = {"reentrant": (2, 3, ["--gradient-checkpointing", "--checkpointing-reentrant"])}
COPIES = {"two copies": (4, 3, ["--shard-group", "2"])}
LORA = {f"n{n}s{s}": (n, s, ["--tuner", "lora", "--lora-rank", "4"]) for n, s in [(1, 0), (2, 3)]}
ALL_TOKENS = {f"n{n}s{s}": (n, s, ["--loss", "all"]) for n, s in [(1, 0), (4, 3)]}


def check(commands, sft, plan, *options: str) -> None:
    jobs = {name: sft("--nproc", str(n), "--stage", str(s), *own, *options) for name, (n, s, own) in plan.items()}
    done = commands(list(jobs.items()))
    for name, run in done.items():
        assert run.code == 0, f"{name}:\n{run.output}"
    first, *others = done.items()
    losses = first[1].series("loss")
    assert len(losses) == 5
    assert losses[-1] < losses[0] - 0.01
    for name, run in others:
        for key in ("loss", "eval_loss", "grad_norm"):
            # torch's norm of a large fp32 tensor is itself off by 2e-5
            exact = {"abs": 1e-5} if "loss" in key else {"rel": 1e-4}
            assert run.series(key) == pytest.approx(first[1].series(key), **exact), f"{key}: {name} and {first[0]}"
        assert run.series("tokens") == first[1].series("tokens")


def test_stages_processes_and_checkpointing_give_the_same_losses(commands, sft, rows) -> None:
    check(commands, sft, FULL | REENTRANT, "--val-dataset", str(rows), "--eval-steps", "3")


@pytest.mark.slow
def test_so_they_do_with_adapters(commands, sft) -> None:
    check(commands, sft, LORA)


@pytest.mark.slow
def test_so_they_do_when_every_token_is_learnt(commands, sft) -> None:
    check(commands, sft, ALL_TOKENS, "--val-split", "0.2")


@pytest.mark.slow
def test_so_they_do_with_rows_packed_and_the_loss_in_parts(commands, sft, rows) -> None:
    plan = {f"n{n}s{s}": (n, s, []) for n, s in [(1, 0), (2, 3)]}
    check(commands, sft, plan, "--packing", "--chunked-loss", "--val-dataset", str(rows))


@pytest.mark.slow
def test_so_they_do_when_processes_share_rows(commands, sft, rows) -> None:
    parts = ["--sequence-parallel", "2"]
    plan = {"n1s0": (1, 0, []), "n2s3": (2, 3, parts), "n4s2": (4, 2, [*parts, "--shard-group", "2"])}
    check(commands, sft, plan, "--val-dataset", str(rows))


@pytest.mark.slow
def test_every_stage_with_every_number_of_processes(commands, sft, rows) -> None:
    check(commands, sft, EVERY | COPIES | CHECKPOINTING, "--val-dataset", str(rows), "--eval-steps", "3")
    check(commands, sft, EVERY, "--tuner", "lora", "--gradient-checkpointing")
