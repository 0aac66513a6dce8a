"""A command under srun: its tasks are the ranks or, if each starts several processes, the machines."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping

from shardproof.errors import ConfigError

TASKS = "SLURM_STEP_NUM_TASKS"  # set by srun only, so a shell in an allocation is not a task


def join_tasks(environment: MutableMapping[str, str], nproc: int, nodes: str | None) -> None:
    """Translate srun's variables to torchrun's, or to NNODES and its companions.

    Args:
        nproc: processes that each task is to start.
        nodes: the value of --nnodes.

    Raises:
        ConfigError: several tasks on one node would start several processes each.
    """
    tasks = int(environment.get(TASKS) or 1)
    told = environment.get("WORLD_SIZE") or environment.get("NNODES") or nodes
    if tasks == 1 or told or "SLURM_PROCID" not in environment:
        return
    each = tasks_of_nodes(environment.get("SLURM_STEP_TASKS_PER_NODE") or str(tasks))
    node = int(environment.get("SLURM_NODEID") or 0)
    if nproc == 1:
        found = {"RANK": environment["SLURM_PROCID"], "WORLD_SIZE": str(tasks)}
        found |= {"LOCAL_RANK": environment.get("SLURM_LOCALID") or "0", "LOCAL_WORLD_SIZE": str(each[node])}
    elif max(each) == 1:
        found = {"NNODES": str(tasks), "NODE_RANK": str(node)}
    else:
        raise ConfigError(
            f"srun has started {max(each)} tasks on a node, and each would start {nproc} processes (--nproc).\n"
            "Leave --nproc out, so that the tasks are the processes, or start one task per node: srun "
            "--ntasks-per-node=1."
        )
    environment.update(found)
    environment.setdefault("MASTER_ADDR", _first_node(environment))
    job, step = (int(environment.get(name) or 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    environment.setdefault("MASTER_PORT", str(20000 + (job + 101 * step) % 20000))


def tasks_of_nodes(text: str) -> list[int]:
    """`2(x3),1` is 2, 2, 2, 1."""
    found: list[int] = []
    for part in text.split(","):
        count, _, times = part.partition("(x")
        found += [int(count)] * int(times.rstrip(")") or 1)
    return found


def _first_node(environment: Mapping[str, str]) -> str:
    """The first of a list of nodes in Slurm's format: gpu03 for `gpu[03-05,9],login`."""
    listed = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    first = re.split(r",(?![^\[]*\])", listed)[0]
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first)
