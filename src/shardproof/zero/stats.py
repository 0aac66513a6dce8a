"""What `shardproof.stats` returns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class UnitStats:
    """What one unit holds now and has done since `shard`. Bytes on the wire count payload: a gather and a
    reduce-scatter move the unit's bytes once, an all-reduce twice. With a two-dimensional mesh what is reduced within a
    row is all-reduced between the rows: `bytes_between_replicas`, beside `bytes_reduced`. `bytes_between_nodes` is the
    part of all these that this rank sends to other machines: on the CPU, where gathers and reduce-scatters go from each
    rank to each, what it sends to theirs; else its part of what a ring of all ranks takes out of its machine."""

    shard_bytes: int
    gathered_bytes: int
    gathered_peak_bytes: int
    bytes_gathered: int
    bytes_reduced: int
    bytes_between_replicas: int
    bytes_between_nodes: int
    gathers: int
    reductions: int
    prefetch_hits: int


@dataclass(frozen=True)
class Stats:
    """What `stats` returns.

    Attributes:
        total: over all units (its peak is that of the sum, not the sum of peaks).
        units: each unit by name.
        votes: how often this rank told the others what it does next, because no plan said so; counted for all models
            on the process group, as are the rest.
        vote_seconds: time spent waiting for what the others do next.
        votes_apart: how many votes found ranks that differ.
        lent: planned operations that this rank took part in only for the others.
        exposed_seconds: time in which this rank computed nothing because a gather or a reduction was not there; on an
            accelerator, of its stream.
    """

    total: UnitStats
    units: dict[str, UnitStats]
    votes: int
    vote_seconds: float
    votes_apart: int
    lent: int
    exposed_seconds: float
