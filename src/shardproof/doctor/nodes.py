"""Several machines in a plan: which groups of processes may hold a copy of the model, and what leaves a machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardproof.doctor.config import PlanConfig
from shardproof.errors import ConfigError
from shardproof.zero.leaving import part_to_others

if TYPE_CHECKING:
    from shardproof.doctor.plan import Found


def groups_of(config: PlanConfig) -> dict[int, list[int]]:
    """The numbers of processes to look at, and for each the groups that may hold a copy: those of a machine, where
    there are several machines and several processes on each.

    Raises:
        ConfigError: processes cannot be spread evenly over the machines.
    """
    worlds = sorted(set(config.gpus))
    if "gpus" not in config.model_fields_set:
        worlds = [world for world in worlds if world % config.nodes == 0]
    for world in worlds:
        if world % config.nodes:
            raise ConfigError(
                f"--gpus {world} cannot be spread evenly over --nodes {config.nodes}: take a multiple of it."
            )
    several = config.nodes > 1
    return {world: [world // config.nodes] if several and world > config.nodes else [] for world in worlds}


def sent(found: Found, config: PlanConfig, world: int, group: int) -> tuple[float, float]:
    """Bytes that a rank sends in a step, and those of them that go to other machines."""
    row = group or world
    wire = (found.gathered + found.reduced) * (row - 1) / row
    hosts = [number * config.nodes // world for number in range(world)]
    if group:  # then what came out of a reduction is all-reduced by those that hold the same part
        column = hosts[::group]
        part = 2 * found.reduced / group
        return wire + part * (len(column) - 1) / len(column), part * part_to_others(column, 0, direct=False)
    return wire, (found.gathered + found.reduced) * part_to_others(hosts, 0, direct=config.device == "cpu")
