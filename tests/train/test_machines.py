"""Promise: NNODES, NODE_RANK and MASTER_ADDR make several machines one run, with the numbers of one machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shardproof.cli import sft
from shardproof.cli.machines import Machines
from shardproof.errors import ConfigError

OPTIONS = ["--max-steps", "3", "--global-batch-size", "4", "--stage", "3", "--learning-rate", "1e-3"]


def start(node: int, port: int, argv: list[str], folder: Path) -> subprocess.Popen[str]:
    """The same command on each machine; here the machines are processes that share an address."""
    machines = {"NNODES": "2", "NODE_RANK": str(node), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.Popen(
        [sys.executable, "-m", "shardproof", "sft", *argv],
        env={**os.environ, **machines, "NPROC_PER_NODE": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    )


@pytest.mark.slow
def test_two_machines_give_the_losses_of_one(tiny: Path, rows: Path, tmp_path: Path) -> None:
    argv = ["--model", str(tiny), "--dataset", str(rows), *OPTIONS]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = [start(node, port, [*argv, "--output-dir", "two"], tmp_path) for node in range(2)]
    try:
        told = [node.communicate(timeout=200) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], told
    assert "stage 3 on 2 process(es)" in told[0][0]
    assert told[1][0] == ""  # the first machine speaks for all
    one = [*argv, "--output-dir", "one", "--nproc", "2"]
    subprocess.run([sys.executable, "-m", "shardproof", "sft", *one], cwd=tmp_path, check=True, timeout=200)

    def losses(name: str) -> list[float]:
        return [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()[:3]]

    assert losses("two") == pytest.approx(losses("one"), abs=1e-6)


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"NNODES": "2"}, "NNODES=2 needs MASTER_ADDR"),
        ({"NNODES": "2", "MASTER_ADDR": "a", "NODE_RANK": "2"}, "NODE_RANK=2: with NNODES=2 it goes from 0 to 1"),
        ({"NNODES": "two"}, "NNODES=two is no number"),
    ],
)
def test_variables_that_do_not_fit_are_refused(monkeypatch, variables, text):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=text):
        sft.run([])


def test_one_machine_needs_none_of_them():
    assert Machines.of({}) is None
    assert Machines.of({"NNODES": "1", "MASTER_ADDR": "here"}) is None
