"""Several machines in a plan: which groups of processes may hold a copy of the model, and the traffic between
machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardproof.doctor.config import PlanConfig
from shardproof.errors import ConfigError
from shardproof.train.options.option import flag
from shardproof.zero.comm.leaving import part_to_others

if TYPE_CHECKING:
    from shardproof.doctor.planning.imagine import Moved


def groups_of(config: PlanConfig) -> dict[int, list[int]]:
    """The numbers of processes to consider, and for each the sizes of groups that may hold a copy; 0 if all processes
    hold one. Without --shard-group this is the number of processes per machine, if there are several machines with
    several processes each.

    Raises:
        ConfigError: processes cannot be divided evenly over machines, copies, or groups that share rows.
    """
    worlds = sorted(set(config.gpus))
    parts = (
        ("nodes", config.nodes),
        ("shard_group", config.shard_group or 1),
        ("sequence_parallel", config.sequence_parallel),
    )
    for name, number in parts:
        left = [world for world in worlds if world % number == 0]
        if "gpus" in config.model_fields_set and left != worlds:
            world = next(world for world in worlds if world % number)
            raise ConfigError(
                f"--gpus {world} cannot be divided evenly by {flag(name)} {number}: use a multiple of it."
            )
        worlds = left
    if not worlds:
        raise ConfigError(
            "No power of two up to 1,024 can be divided this way: give the number of processes with --gpus."
        )
    if config.shard_group:
        return {world: [config.shard_group % world] for world in worlds}
    several = config.nodes > 1
    return {world: [0, world // config.nodes] if several and world > config.nodes else [0] for world in worlds}


def sent(moved: Moved, config: PlanConfig, world: int, group: int) -> tuple[float, float]:
    """The bytes that a rank sends in a step, and the part of them that goes to other machines."""
    row = group or world
    wire = (moved.gathered + moved.reduced) * (row - 1) / row + moved.exchanged
    hosts = [number * config.nodes // world for number in range(world)]
    near = hosts[: config.sequence_parallel].count(0)  # ranks that share rows with the first, on its machine
    apart = moved.exchanged * (config.sequence_parallel - near) / max(config.sequence_parallel - 1, 1)
    if group:  # then reduced gradients are all-reduced among the ranks that hold the same part
        column = hosts[::group]
        part = 2 * moved.reduced / group
        between = part * part_to_others(column, 0, direct=False)
        within = (moved.gathered + moved.reduced) * part_to_others(hosts[:group], 0, direct=config.device == "cpu")
        return wire + part * (len(column) - 1) / len(column), between + within + apart
    direct = config.device == "cpu"
    return wire, (moved.gathered + moved.reduced) * part_to_others(hosts, 0, direct=direct) + apart
