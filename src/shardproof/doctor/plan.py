"""What a rank holds and moves at each stage, before anything is trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardproof.doctor.checkpointing import Checkpointing, checkpoint, checkpointing_of, period_of
from shardproof.doctor.config import PlanConfig
from shardproof.doctor.nodes import groups_of, sent
from shardproof.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from shardproof.doctor.imagine import Key, Step
    from shardproof.doctor.ledger import KnownResults

# The runs from which other numbers follow, see `Profile`. One row is a case of its own: a tensor with a dimension of
# one is contiguous where others are copied.
WORLDS, ROWS = (2, 8), (2, 3)

ADAMW_BYTES = 28  # of a weight's update in fp32: weight, gradient and two states are read, all but the gradient written


@dataclass(frozen=True)
class Candidate:
    """One way to train, and what it takes of each rank.

    Attributes:
        checkpointing: of activations, by the words of sft: False, True, "selective", or every n-th layer.
        held: bytes at the peak of a step, by kind (see `ledger.KINDS`).
        activations: the most bytes of activations and temporaries at any moment.
        wire: bytes that the rank sends in a step.
        flops: operations in a step, recomputation included.
        seconds: of a step, at the speeds of the config: computing or moving, whichever takes longer; and then what is
            updated where it was offloaded to.
        offload: none, optimizer, all, nvme.
        home: bytes that lie in the host's memory, or on disks (nvme).
        crossed: bytes that move between there and the device in a step.
        shard_group: so many processes hold a copy of the model between them; 0 where all hold one.
        between_nodes: bytes of `wire` that go to other machines, by each process of one.
    """

    stage: int
    world: int
    checkpointing: Checkpointing
    micro: int
    length: int
    held: dict[str, float]
    activations: float
    wire: float
    flops: float
    seconds: float
    offload: str = "none"
    home: float = 0.0
    crossed: float = 0.0
    shard_group: int = 0
    between_nodes: float = 0.0

    @property
    def peak(self) -> float:
        return sum(self.held.values())

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks."""
        return self.micro * self.length * self.world / self.seconds


@dataclass
class Plan:
    """What `shardproof plan` found.

    Attributes:
        parameters, trainable: numbers of them.
        rooms: bytes that a rank may take of what lies elsewhere, by offload.
        candidates: all that were looked at; `fitting` those that fit into `limit` bytes, and into the room there is
            elsewhere, the fastest first.
    """

    model: str
    parameters: int
    trainable: int
    limit: float
    rooms: dict[str, float] = field(default_factory=dict)
    candidates: list[Candidate] = field(default_factory=list)

    def fits(self, c: Candidate) -> bool:
        return c.peak <= self.limit and c.home <= self.rooms.get(c.offload, 0.0)

    @property
    def fitting(self) -> list[Candidate]:
        found = [c for c in self.candidates if self.fits(c)]
        return sorted(found, key=lambda c: (-c.tokens_per_second / c.world, c.between_nodes, c.peak))

    def fastest(self, world: int) -> Candidate | None:
        """On so many processes."""
        return next((c for c in self.fitting if c.world == world), None)


Terms = list[tuple["Step", float]]  # steps, and how much each counts for


class Profile:
    """Steps of one model, stage, length and kind of checkpointing, run at a few sizes; every other size follows.

    At one moment of a step what is live is linear in the number of blocks and in the rows, and in 1 / ranks where rows
    do not matter.

    Args:
        runs: steps by (blocks, ranks, rows), those of the second number of ranks for one number of rows only.
    """

    def __init__(self, runs: dict[tuple[int, int, int], Step]) -> None:
        self.runs = runs
        self.depths = sorted({k for k, _, _ in runs})
        self.worlds = list(dict.fromkeys(w for _, w, _ in runs))
        self._fullest: dict[Any, np.ndarray] = {}  # by segment and what is added up

    def at(self, blocks: float, world: int, micro: int) -> Found:
        """What a step takes with so many blocks, ranks and rows."""
        from shardproof.doctor.ledger import ACTIVATIONS, HOME

        # Sums of steps with a name, and how much each sum counts for: at two depths, and the difference of ranks there.
        parts: list[tuple[Any, Terms, float]] = []
        for depth, share in _line(self.depths, blocks):
            parts.append(((depth, micro), self._in_rows(depth, micro), share))
            parts += [(id(step), [(step, 1.0)], factor * share) for step, factor in self._other_ranks(depth, world)]
        segments = []
        for key in next(iter(self.runs.values())).segments:
            for name, steps, _ in parts:
                if (name, key) not in self._fullest:
                    self._fullest[name, key] = _fullest(steps, key)
            columns = [factor * self._fullest[name, key] for name, _, factor in parts]
            segments.append(np.maximum(np.sum(columns, axis=0), 0))
        every = [(step, weight * factor) for _, steps, factor in parts for step, weight in steps]
        return Found(
            held=max((column[:HOME] for column in segments), key=lambda column: float(column.sum())),
            home=max(float(column[HOME]) for column in segments),
            activations=max(float(column[ACTIVATIONS]) for column in segments),
            flops=sum(weight * step.flops for step, weight in every),
            gathered=sum(weight * step.gathered for step, weight in every),
            reduced=sum(weight * step.reduced for step, weight in every),
            crossed=sum(weight * step.crossed for step, weight in every),
        )

    def _in_rows(self, depth: int, micro: int) -> Terms:
        """The steps on the first number of ranks that make up one of `micro` rows."""
        known = self.runs.get((depth, self.worlds[0], micro))
        if known is not None:
            return [(known, 1.0)]
        return [(self.runs[depth, self.worlds[0], rows], factor) for rows, factor in _line(list(ROWS), micro)]

    def _other_ranks(self, depth: int, world: int) -> Terms:
        """What is to be added on `world` ranks instead of the first number of them."""
        if len(self.worlds) == 1:
            return []
        first, second = self.worlds
        rows = next(r for k, w, r in self.runs if (k, w) == (depth, second))
        (_, _), (_, share) = _line([1 / first, 1 / second], 1 / world)
        return [(self.runs[depth, second, rows], share), (self.runs[depth, first, rows], -share)]


class Found(NamedTuple):
    """What a step takes: bytes by kind at the peak, those at home, the most of activations, operations, payload bytes
    of gathers and of reductions between ranks, bytes between device and home."""

    held: np.ndarray
    home: float
    activations: float
    flops: float
    gathered: float
    reduced: float
    crossed: float


def _line(known: Sequence[float], wanted: float) -> list[tuple[Any, float]]:
    """The factors with which what was seen at one or two places gives what is there at `wanted`, on a straight line."""
    if len(known) == 1:
        return [(known[0], 1.0)]
    share = (wanted - known[0]) / (known[1] - known[0])
    return [(known[0], 1 - share), (known[1], share)]


def _fullest(steps: Terms, key: Key) -> np.ndarray:
    """Bytes by kind, and at home, at the fullest moment of the device in a segment of a sum of steps."""
    from shardproof.doctor.ledger import HOME

    found = [(factor, step.segments[key]) for step, factor in steps]
    if len({columns.shape for _, columns in found}) == 1:  # else a buffer was made anew in one of them
        found = [(1.0, np.sum([factor * columns for factor, columns in found], axis=0))]
    fullest = [factor * columns[:, columns[:HOME].sum(axis=0).argmax()] for factor, columns in found]
    total: np.ndarray = np.sum(fullest, axis=0)
    return total


def make_plan(config: PlanConfig) -> Plan:
    """Look at every combination that the config names.

    Raises:
        ConfigError: the model or a number in the config cannot be used.
    """
    from shardproof.doctor.imagine import DEPTHS, keep_blocks, repeated_blocks
    from shardproof.doctor.ledger import KnownResults

    stages = stages_of(config.stage)
    for name in ("gpus", "per_device_batch_size", "max_length"):
        if min(getattr(config, name), default=0) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(config, name)}: takes numbers from 1 on.")
    if config.device == "cpu" and {"optimizer", "all"} & {*config.offload}:
        raise ConfigError("--offload optimizer and all are for accelerators: with --device cpu everything lies there.")
    model = meta_model(config)
    name, count, period = repeated_blocks(model)
    host = config.host_memory * 1e9
    plan = Plan(
        config.model,
        sum(p.numel() for p in model.parameters()),
        sum(p.numel() for p in model.parameters() if p.requires_grad),
        config.gpu_memory * 1e9 * (1 - config.headroom),
        {"optimizer": host, "all": host, "nvme": config.disk * 1e9},
    )
    kinds = checkpointing_of(config.gradient_checkpointing)
    longest = max(period_of(again, period) for again in kinds)
    if count > DEPTHS[-1] * longest:
        keep_blocks(model, name, DEPTHS[-1] * longest)
    known: dict[Any, dict[Checkpointing, Profile]] = {}
    results = KnownResults()
    groups = groups_of(config)
    ways = product(stages, config.offload, _runs(sorted(groups), groups), config.max_length)
    for stage, offload, (worlds, runs), length in ways:
        kept = "all" if offload == "nvme" else offload  # the same lies elsewhere, in another place
        # On one process stages do not differ, but that stage 1 sends gradients home at the end of backward.
        alike = worlds == [1] and (stage != 1 or kept == "none")
        key = None if alike else stage, kept, worlds[-1], length
        if key not in known:
            known[key] = {}
            for each in sorted({period_of(again, period) for again in kinds}):
                alike_kinds = [again for again in kinds if period_of(again, period) == each]
                blocks = name, count, each
                known[key] |= profile(model, config, (stage, kept), runs, length, alike_kinds, blocks, results)
        for world, again, micro in product(worlds, kinds, config.per_device_batch_size):
            for group in [0, *groups[world]] if stage else [0]:
                # With a copy in each group a rank holds and gathers what it would if the group were all there is.
                what = known[key][again].at(count / period_of(again, period), group or world, micro)
                parts = (group or world) if stage else 1
                way = (stage, world, again, micro, length)
                plan.candidates.append(_candidate(config, way, what, offload, plan.trainable / parts, group))
    return plan


def stages_of(text: str) -> list[int]:
    """`all`, or numbers with commas."""
    if text == "all":
        return [0, 1, 2, 3]
    try:
        stages = sorted({int(word) for word in text.split(",")})
    except ValueError:
        stages = [-1]
    if not set(stages) <= {0, 1, 2, 3}:
        raise ConfigError(f"--stage {text}: name some of 0,1,2,3, or all.")
    return stages


def _runs(worlds: list[int], groups: dict[int, list[int]]) -> Iterator[tuple[list[int], Sequence[int]]]:
    """Which numbers of ranks are asked for, and which are run for them: a single process differs from several. Runs of
    `groups` stand for copies in groups of ranks."""
    if 1 in worlds:
        yield [1], [1]
    several = [n for n in worlds if n > 1]
    if several:
        yield several, several if len(several) == 1 and not groups[several[0]] else WORLDS


def _candidate(
    config: PlanConfig,
    way: tuple[int, int, Checkpointing, int, int],
    found: Found,
    offload: str,
    updated: float,
    group: int,
) -> Candidate:
    """`updated`: how many weights the rank updates; `group`: of how many ranks each group holds a copy, or 0."""
    from shardproof.doctor.ledger import KINDS

    world = way[1]
    wire, between = sent(found, config, world, group)
    links = [wire / config.bandwidth, between * (world // config.nodes) / config.node_bandwidth]
    seconds = max(found.flops / (config.tflops * 1e12), *(seconds / 1e9 for seconds in links))
    if offload != "none":
        slowest = [config.host_bandwidth] + ([config.disk_bandwidth] if offload == "nvme" else [])
        speed = min(slowest) * 1e9
        seconds = max(seconds, found.crossed / speed) + ADAMW_BYTES * updated / speed
    held = dict(zip(KINDS, map(float, found.held), strict=True))
    more = (offload, found.home, found.crossed, group, between)
    return Candidate(*way, held, found.activations, wire, found.flops, seconds, *more)


def meta_model(config: PlanConfig) -> nn.Module:
    """The model on the meta device, with adapters if asked for.

    Raises:
        ConfigError: there is no such config, or no causal language model of its kind.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from shardproof.doctor.imagine import Unfilled
    from shardproof.train.config import SftConfig
    from shardproof.train.models import first_line, with_adapters

    path = Path(config.model).expanduser()
    if config.model == "tiny":
        from shardproof.models.tiny import tiny_config

        shape: Any = tiny_config()
    else:
        try:
            shape = AutoConfig.from_pretrained(
                str(path) if path.exists() else config.model, trust_remote_code=config.trust_remote_code
            )
        except Exception as error:  # whatever the hub, JSON and the model's own code raise
            raise ConfigError(f"--model {config.model}: no config can be read: {first_line(error)}") from error
    options = {"attn_implementation": config.attn} if config.attn else {}
    adapters = SftConfig(tuner=config.tuner, lora_rank=config.lora_rank, target_modules=config.target_modules)
    try:
        with torch.device("meta"), Unfilled():
            model = AutoModelForCausalLM.from_config(
                shape, dtype=torch.float32, trust_remote_code=config.trust_remote_code, **options
            )
            model = with_adapters(model, adapters)
    except ValueError as error:
        raise ConfigError(f"--model {config.model}: {first_line(error)}") from error
    model.train()
    return model


def profile(
    model: nn.Module,
    config: PlanConfig,
    way: tuple[int, str],
    worlds: Sequence[int],
    length: int,
    checkpointing: Sequence[Checkpointing],
    blocks: tuple[str, int, int],
    results: KnownResults,
) -> dict[Checkpointing, Profile]:
    """Run steps at each number of ranks, at two depths, of one and two rows; by kind of checkpointing.

    `way`: the stage, and what is offloaded.
    """
    from shardproof.doctor.imagine import DEPTHS, Rank, fake_group, keep_blocks
    from shardproof.train.run import mixed_precision

    name, count, period = blocks
    depths = [n * period for n in DEPTHS] if count > DEPTHS[-1] * period else [count]
    micros = config.per_device_batch_size
    rows = sorted({*micros} if len({*micros}) < 3 else {*ROWS, min(micros)})
    runs: dict[Checkpointing, dict[tuple[int, int, int], Step]] = {again: {} for again in checkpointing}
    for world, depth in product(worlds, depths):
        with fake_group(world):
            part = keep_blocks(deepcopy(model), name, depth)
            precision = mixed_precision(config.precision)
            stage, offload = way
            rank = Rank(part, stage, precision, (name, period), config.device == "cpu", offload, results)
            rank.step(rows[0], length, clip=False)  # states of the optimizer are made, what follows what is learned
            for again in checkpointing:
                checkpoint(part, again, config.tuner == "lora")
                for micro in rows if world == worlds[0] else rows[:1]:
                    runs[again][depth // period, world, micro] = rank.step(micro, length, clip=False)
    return {again: Profile(found) for again, found in runs.items()}
