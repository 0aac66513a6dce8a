"""Steps run at a few sizes, and the extrapolation to every other size."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import chain, product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardproof.doctor.config import PlanConfig
from shardproof.doctor.planning.blocks import DEPTHS, Blocks, keep_blocks
from shardproof.doctor.planning.checkpointing import Checkpointing, checkpoint
from shardproof.doctor.planning.imagine import Columns, Key, Loss, Moved, Rank, Step
from shardproof.doctor.planning.known_results import KnownResults
from shardproof.doctor.planning.ledger import ACTIVATIONS, HELD, HOME
from shardproof.doctor.planning.stand_ins import autocast_off_on_meta, fake_group
from shardproof.errors import ConfigError, ShardproofError
from shardproof.models.forward import without_adapters
from shardproof.train.model.loading import first_line

if TYPE_CHECKING:
    from torch import nn

    from shardproof.doctor.planning.sample import Sample

# The runs to extrapolate from, see `Profile`. One row is a special case: a tensor with a dimension of one is contiguous
# where others have to be copied.
ROWS = (2, 3)
MANY = 50_000  # torch operations in a step; usual blocks take some hundreds

log = logging.getLogger("shardproof")

Terms = list[tuple[Step, float]]  # steps and their coefficients


class Profile:
    """Steps of one model, stage, length and kind of checkpointing, run at a few sizes; every other size is
    extrapolated.

    At a given moment of a step, live memory is linear in the number of blocks and in the rows, and, for the part that
    does not depend on rows, in 1 / ranks.

    Args:
        runs: steps by (blocks, ranks, rows); those with the second number of ranks for one number of rows only.
    """

    def __init__(self, runs: dict[tuple[float, int, int], Step]) -> None:
        self.runs = runs
        self.depths = sorted({k for k, _, _ in runs})
        self.worlds = list(dict.fromkeys(w for _, w, _ in runs))

    def at(self, blocks: float, world: int, micro: int) -> Found:
        """The cost of a step with these numbers of blocks, ranks and rows."""
        depths = [
            (share, self._in_rows(depth, micro), self._other_ranks(depth, world))
            for depth, share in line(self.depths, blocks)
        ]
        segments = []
        for key in next(iter(self.runs.values())).segments:
            columns = [share * _fullest(in_rows, other_ranks, key) for share, in_rows, other_ranks in depths]
            segments.append(np.maximum(np.sum(columns, axis=0), 0))
        every = [(step, factor * share) for share, *terms in depths for step, factor in chain(*terms)]
        return Found(
            held=max((column[:HOME] for column in segments), key=lambda column: float(column.sum())),
            home=max(float(column[HOME]) for column in segments),
            kept=max(float(column[HELD]) for column in segments),
            activations=max(float(column[ACTIVATIONS]) for column in segments),
            moved=Moved(*map(float, np.sum([np.multiply(step.moved, weight) for step, weight in every], axis=0))),
        )

    def _in_rows(self, depth: float, micro: int) -> Terms:
        """The combination of steps on the first number of ranks that gives a step with `micro` rows."""
        known = self.runs.get((depth, self.worlds[0], micro))
        if known is not None:
            return [(known, 1.0)]
        return [(self.runs[depth, self.worlds[0], rows], factor) for rows, factor in line(list(ROWS), micro)]

    def _other_ranks(self, depth: float, world: int) -> Terms:
        """The terms to add for `world` ranks instead of the first number of ranks."""
        if len(self.worlds) == 1:
            return []
        first, second = self.worlds
        rows = next(r for k, w, r in self.runs if (k, w) == (depth, second))
        (_, _), (_, share) = line([1 / first, 1 / second], 1 / world)
        return [(self.runs[depth, second, rows], share), (self.runs[depth, first, rows], -share)]


class Found(NamedTuple):
    """The cost of a step: bytes by kind at the peak, offloaded bytes, bytes of activations that the host keeps, the
    maximum of activations on the device, and what is computed and moved."""

    held: np.ndarray
    home: float
    kept: float
    activations: float
    moved: Moved


def line(known: Sequence[float], wanted: float) -> list[tuple[Any, float]]:
    """The coefficients of the values at one or two known points for linear interpolation at `wanted`."""
    if len(known) == 1:
        return [(known[0], 1.0)]
    share = (wanted - known[0]) / (known[1] - known[0])
    return [(known[0], 1 - share), (known[1], share)]


def _fullest(in_rows: Terms, other_ranks: Terms, key: Key) -> np.ndarray:
    """Bytes by kind at the device's peak in a segment of a sum of steps, and the maximum of offloaded bytes at any
    moment of it."""
    rows, ranks = ([(factor, step.segments[key]) for step, factor in terms] for terms in (in_rows, other_ranks))
    found = _added([*rows, *ranks])
    if len(found) > 1:
        found = [*_added(rows), *ranks]
    total: np.ndarray = np.sum([factor * _most(columns) for factor, columns in found], axis=0)
    return total


def _added(terms: list[tuple[float, Columns]]) -> list[tuple[float, Columns]]:
    """The sum moment by moment, since the peak may be at another moment with more rows or ranks; the terms themselves
    if their moments do not match, as when a buffer was reallocated in one of them."""
    if len({columns.shape for _, columns in terms}) > 1:
        return terms
    return [(1.0, np.sum([factor * columns for factor, columns in terms], axis=0))]


def _most(columns: np.ndarray) -> np.ndarray:
    here = columns[:HOME, columns[:HOME].sum(axis=0).argmax()]
    return np.concatenate([here, columns[HOME:].max(axis=1)])


def profile(
    model: nn.Module,
    config: PlanConfig,
    way: tuple[int, str],
    worlds: Sequence[int],
    length: int,
    checkpointing: Sequence[Checkpointing],
    blocks: Blocks,
    results: KnownResults,
    loss: Loss = "text",
    sample: Sample | None = None,
) -> dict[Checkpointing, Profile]:
    """Run steps at each number of ranks, at two depths, with two numbers of rows; by kind of checkpointing.

    `way`: the stage, and what is offloaded; `loss` and `sample`: see `Rank`.

    Raises:
        ConfigError: the model cannot be run without values.
    """
    groups = list(DEPTHS) if blocks.groups > DEPTHS[-1] else [blocks.groups]
    micros = config.per_device_batch_size
    rows = sorted({*micros} if len({*micros}) < 3 else {*ROWS, min(micros)})
    runs: dict[Checkpointing, dict[tuple[float, int, int], Step]] = {again: {} for again in checkpointing}
    for world, repeated in product(worlds, groups):
        with fake_group(world), _told(model, config, length), autocast_off_on_meta():
            depth = blocks.of(int(repeated)) if len(groups) > 1 else blocks.number
            part = keep_blocks(deepcopy(model), blocks.name, depth)
            rank = Rank(part, config, way[0], blocks, way[1], results, loss, sample)
            rank.step(rows[0], length, clip=False)  # creates optimizer state, and lets the engine learn its plan
            _say_if_slow(rank, config, results)
            for again in checkpointing:
                checkpoint(part, again, config)
                for micro in rows if world == worlds[0] else rows[:1]:
                    runs[again][repeated, world, micro] = rank.step(micro, length, clip=False)
    return {again: Profile(found) for again, found in runs.items()}


def _say_if_slow(rank: Rank, config: PlanConfig, results: KnownResults) -> None:
    """Warn once: state-space models without their fused kernels process a row token by token."""
    if rank.ledger.calls > MANY and not results.told:
        results.told = True
        log.warning(
            "--model %s takes %d operations per step, as if it processed rows token by token: this may take minutes. A "
            "shorter --max-length is faster.",
            config.model,
            rank.ledger.calls,
        )


@contextmanager
def _told(model: Any, config: PlanConfig, length: int) -> Iterator[None]:
    """Turn errors of a model that needs values of its tensors into an error that explains it."""
    try:
        yield
    except ShardproofError:
        raise
    except Exception as error:
        if config.debug:
            raise
        inner = without_adapters(model)
        known = getattr(inner.config.get_text_config(), "max_position_embeddings", None) or length
        adapters = (
            ", or --target-modules names modules that are not linear layers (experts)" if config.tuner != "full" else ""
        )
        if length > known:
            raise ConfigError(
                f"--max-length {length}: a {type(inner).__name__} has {known} positions. Use --max-length {known} or "
                f"less.\n({type(error).__name__}: {first_line(error)})"
            ) from error
        raise ConfigError(
            f"--model {config.model}: a step of {type(inner).__name__} cannot be run on shapes alone: "
            f"{type(error).__name__}: {first_line(error)}\nPerhaps its computation depends on values, or it takes more "
            f"than text{adapters}. 'shardproof doctor' runs two real steps; --debug shows where this one fails."
        ) from error
