"""Promise: under srun a command's tasks are its ranks or, with --nproc, its machines."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from shardproof.cli.processes.slurm import join_tasks, tasks_of_nodes
from shardproof.errors import ConfigError
from train.conftest import rows, tiny  # noqa: F401

STEP = {"SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "2(x3)", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1"}
STEP |= {"SLURM_STEP_NODELIST": "gpu[03-05,9],login", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
ONE_EACH = STEP | {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "1(x3)", "SLURM_PROCID": "1"}


def joined(environment: dict[str, str], nproc: int = 1, nodes: str | None = None) -> dict[str, str]:
    """What is added."""
    after = dict(environment)
    join_tasks(after, nproc, nodes)
    return {name: value for name, value in after.items() if name not in environment}


def test_tasks_are_ranks() -> None:
    where = {"MASTER_ADDR": "gpu03", "MASTER_PORT": "20108"}
    assert joined(STEP) == {"RANK": "3", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"} | where


def test_tasks_that_start_processes_are_machines() -> None:
    where = {"MASTER_ADDR": "gpu03", "MASTER_PORT": "20108"}
    assert joined(ONE_EACH, nproc=8) == {"NNODES": "3", "NODE_RANK": "1"} | where
    with pytest.raises(ConfigError, match="2 tasks on a node, and each would start 8 processes"):
        join_tasks(dict(STEP), 8, None)


@pytest.mark.parametrize(
    "environment",
    [
        {name: value for name, value in STEP.items() if "STEP" not in name},  # a shell in an allocation
        STEP | {"SLURM_STEP_NUM_TASKS": "1"},
        STEP | {"WORLD_SIZE": "4"},  # of an inner torchrun
        STEP | {"NNODES": "2"},  # of our batch script
    ],
)
def test_who_is_no_task_is_left_alone(environment) -> None:
    assert joined(environment) == {}
    assert joined(STEP, nodes="2") == {}


@pytest.mark.parametrize(
    ("nodes", "first"), [("a", "a"), ("a,b", "a"), ("n[1,3-4]", "n1"), ("r[1-2]n[08-09]x,a", "r1n08x")]
)
def test_the_first_node_of_a_list(nodes, first) -> None:
    assert joined(STEP | {"SLURM_STEP_NODELIST": nodes})["MASTER_ADDR"] == first


def test_tasks_of_nodes() -> None:
    assert tasks_of_nodes("2(x3),1") == [2, 2, 2, 1]
    assert tasks_of_nodes("4") == [4]


SRUN = """#!/bin/bash
# What stands in for srun: two tasks, one after the other on one node or each on its own.
per_node=$1; shift
export SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=127.0.0.1 SLURM_JOB_ID=$$
[ "$per_node" = 1 ] && export SLURM_STEP_TASKS_PER_NODE='1(x2)' || export SLURM_STEP_TASKS_PER_NODE=2
for task in 0 1; do
    [ "$per_node" = 1 ] && node=$task || node=0
    SLURM_PROCID=$task SLURM_NODEID=$node SLURM_LOCALID=$((task - node)) "$@" &
done
failed=0; for job in $(jobs -p); do wait "$job" || failed=$?; done; exit $failed
"""


@pytest.mark.slow
@pytest.mark.parametrize(("per_node", "more"), [("2", []), ("1", []), ("1", ["--nproc", "2"])])
def test_a_run_under_srun_has_the_losses_of_one_without(tmp_path: Path, tiny: Path, rows: Path, per_node, more) -> None:  # noqa: F811
    srun = tmp_path / "srun"
    srun.write_text(SRUN)
    srun.chmod(srun.stat().st_mode | stat.S_IXUSR)
    sft = [sys.executable, "-m", "shardproof", "sft", "--model", str(tiny), "--dataset", str(rows), "--stage", "2"]
    sft += ["--max-steps", "3", "--global-batch-size", "4"]
    processes = 2 * int((more or ["", "1"])[1])
    losses = []
    for out, command in (("tasks", [str(srun), per_node, *sft, *more]), ("here", [*sft, "--nproc", str(processes)])):
        done = subprocess.run(
            [*command, "--output-dir", out],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"stage 2 on {processes} process(es)" in done.stdout
        lines = (tmp_path / out / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert len(losses[0]) == 3
