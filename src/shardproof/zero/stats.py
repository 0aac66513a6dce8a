"""The result of `shardproof.stats`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class UnitStats:
    """What one unit holds now, and its communication since `shard`. Bytes on the wire count payload: a gather and a
    reduce-scatter move the unit's bytes once, an all-reduce twice. With a two-dimensional mesh, gradients that were
    reduced within a row are all-reduced between rows: `bytes_between_replicas`, in addition to `bytes_reduced`.
    `bytes_between_nodes` is the part of all these that this rank sends to other machines: on the CPU, where every rank
    sends to every other, what it sends to ranks there; otherwise its share of what a ring over all ranks sends out of
    its machine."""

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
    """The result of `stats`.

    Attributes:
        total: over all units (its peak is that of the sum, not the sum of peaks).
        units: each unit by name.
        votes: how often this rank told the others what it does next, because no plan covered it; counted over all
            models on the process group, like the fields below.
        vote_seconds: time spent waiting to hear what the others do next.
        votes_apart: number of votes in which ranks differed.
        lent: planned operations that this rank took part in only for the sake of others.
        exposed_seconds: time in which this rank computed nothing because it waited for a gather or a reduction; on an
            accelerator, time on its stream.
    """

    total: UnitStats
    units: dict[str, UnitStats]
    votes: int
    vote_seconds: float
    votes_apart: int
    lent: int
    exposed_seconds: float
