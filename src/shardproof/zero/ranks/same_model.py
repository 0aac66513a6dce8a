"""All ranks must shard the same model: compared before anything is cut or sent."""

from __future__ import annotations

import hashlib
from itertools import zip_longest
from typing import TYPE_CHECKING

from shardproof.errors import DesyncError
from shardproof.zero.ranks.invariants import on_any_rank

if TYPE_CHECKING:
    from shardproof.zero.build import Places
    from shardproof.zero.comm.collectives import Collectives
    from shardproof.zero.schedule.engine import Engine


def check_same_model(engine: Engine, places: Places, first: bool) -> None:
    """Refuse, on all ranks, models that differ: each rank would take parts of other parameters for its own.

    Args:
        places: the parameters to be cut.
        first: whether the model is being sharded; otherwise these parameters were attached to it later.

    Raises:
        DesyncError: with the first difference, and the rank that differs from rank 0.
    """
    lines = [*(_settings(engine) if first else ()), *_parameters(places)]
    comm = engine.comm
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=7).digest()
    if not all(comm.agree([int.from_bytes(digest, "big")])):
        _refuse(comm, lines)


def _settings(engine: Engine) -> list[str]:
    return [
        f"stage={engine.stage}",
        f"mixed_precision={engine.precision}",
        f"deterministic={engine.deterministic}",
        f"gradient_divide_factor={engine.divisor}",
        *(f"the buffer '{n}' of shape {tuple(b.shape)}, {b.dtype}" for n, b in engine.model.named_buffers()),
    ]


def _parameters(places: Places) -> list[str]:
    return [
        f"'{where[0][2]}' of shape {tuple(p.shape)}, {p.dtype}, {'trained' if p.requires_grad else 'frozen'}, in the "
        f"unit '{unit.name}'"
        for p, unit, where in places.values()
    ]


def _refuse(comm: Collectives, lines: list[str]) -> None:
    of_first = comm.broadcast_object(lines)
    differs = lines != of_first
    rank = on_any_rank(comm, [differs and rank == comm.rank for rank in range(comm.size)]).index(True)
    of_other = comm.broadcast_object(lines, rank)
    pairs = zip_longest(of_first, of_other, fillvalue="nothing more")
    here, there = next((a, b) for a, b in pairs if a != b)
    raise DesyncError(
        f"Ranks shard different models: rank 0 has {here}, and rank {rank} has {there}. Build the same model on every "
        "rank, freeze the same parameters, and call shardproof.shard with the same arguments."
    )
