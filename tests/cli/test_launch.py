"""When a rank fails, its own error is shown, once, whatever the others say then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WORK = """
import atexit, os, sys, threading, types
import torch, torch.distributed as dist
import shardproof
from shardproof.cli.processes import launch as launching
from shardproof.cli.processes.launch import launch
from shardproof.errors import DataError

def start():
    dist.init_process_group("gloo")
    return os.environ["RANK"] == "1"

def breaks():
    if start():
        raise ValueError("one has had enough")
    dist.all_reduce(torch.ones(2))

def killed():
    if start():
        os.kill(os.getpid(), 9)
    dist.all_reduce(torch.ones(2))

def refused():
    start()
    raise DataError("rows.jsonl:3: a bad row")

def fine():
    start()
    dist.all_reduce(torch.ones(2))
    dist.destroy_process_group()

def leave():
    print("something is written at the end of", os.environ.get("RANK", "the launcher"), file=sys.stderr, flush=True)

def fine_at_its_end():
    if start():
        atexit.register(leave)
    dist.all_reduce(torch.ones(2))
    dist.destroy_process_group()

def refused_at_its_end():
    if start():
        atexit.register(leave)
        raise DataError("rows.jsonl:3: a bad row")
    dist.all_reduce(torch.ones(2))

def refused_beside_a_logger(finish=None):
    kept = lambda: print("rank 0 writes what it has", file=sys.stderr, flush=True)
    if os.environ["RANK"] == "0":
        sys.modules["wandb"] = types.SimpleNamespace(finish=finish or kept)
    if start():
        raise DataError("rows.jsonl:3: a bad row")
    threading.Event().wait()

def refused_beside_a_logger_that_hangs():
    launching.AT_THE_END = 0.2
    refused_beside_a_logger(threading.Event().wait)

def breaks_beside_the_engine():
    model = torch.nn.Linear(4, 4)
    broken = start()
    shardproof.shard(model, 3)
    try:
        model(torch.ones(1, 4)).sum().backward()
        if broken:
            raise ValueError("one has had enough")
        model(torch.ones(1, 4)).sum().backward()
    except shardproof.DesyncError as error:
        print("rank 0:", str(error).partition(":")[0], file=sys.stderr, flush=True)
        raise

if __name__ == "__main__":
    atexit.register(leave)
    for name in sys.argv[1:]:
        print(f"== {name}", file=sys.stderr, flush=True)
        code = launch(globals()[name], (), 2)
        print(f"code {code}", file=sys.stderr, flush=True)
"""

SAID_BY = (
    *("breaks", "killed", "refused", "fine", "fine_at_its_end", "refused_at_its_end"),
    *("refused_beside_a_logger", "refused_beside_a_logger_that_hangs", "breaks_beside_the_engine"),
)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    script: Path = tmp_path_factory.mktemp("launch") / "work.py"
    script.write_text(WORK)
    quiet = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}  # as the commands have it
    done = subprocess.run(
        [sys.executable, str(script), *SAID_BY], capture_output=True, text=True, timeout=200, env=quiet
    )
    assert done.returncode == 0, done.stderr
    parts = [part.strip().splitlines() for part in done.stderr.split("== ")[1:]]
    return {lines[0]: lines[1:] for lines in parts}


@pytest.mark.parametrize(
    "name, lines",
    [
        ("breaks", ["error on rank 1: ValueError: one has had enough", "--debug shows where.", "code 1"]),
        (
            "killed",
            [
                "error: rank 1 was ended by SIGKILL.",
                "The system kills processes like this when memory runs out.",
                "code 1",
            ],
        ),
        ("refused", ["error: rows.jsonl:3: a bad row", "code 2"]),
        ("fine", ["code 0"]),
        ("fine_at_its_end", ["something is written at the end of 1", "code 0"]),
        (
            "refused_at_its_end",
            [
                "something is written at the end of 1",
                "error: rows.jsonl:3: a bad row",
                "code 2",
            ],
        ),
        (
            "refused_beside_a_logger",
            ["rank 0 writes what it has", "error: rows.jsonl:3: a bad row", "code 2"],
        ),
        ("refused_beside_a_logger_that_hangs", ["error: rows.jsonl:3: a bad row", "code 2"]),
        (
            "breaks_beside_the_engine",
            [
                "error on rank 1: ValueError: one has had enough",
                "--debug shows where.",
                "code 1",
                "something is written at the end of the launcher",
            ],
        ),
    ],
)
def test_the_first_error_is_shown_alone(said: dict[str, list[str]], name: str, lines: list[str]) -> None:
    verdict = "rank 0: Rank 1 is gone"  # and not that it has come to the end of its program; if rank 0 comes to one
    assert [line for line in said[name] if line != verdict] == lines
