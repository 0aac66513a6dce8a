"""The memory and traffic of a rank at each stage, before anything is trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

from shardproof.doctor.config import PlanConfig
from shardproof.doctor.planning.checkpointing import Checkpointing, period_of
from shardproof.doctor.planning.nodes import groups_of, sent
from shardproof.errors import ConfigError
from shardproof.models.families.family import CAUSAL
from shardproof.models.scorers import SCORER

if TYPE_CHECKING:
    from shardproof.doctor.planning.imagine import Loss
    from shardproof.doctor.planning.profiles import Found, Profile
    from shardproof.doctor.planning.sample import Sample


# Bytes per updated weight: weight, gradient and state are read, and all but the gradient written.
UPDATE_BYTES = {"adamw": 28, "adamw_8bit": 16, "bf16": 14}


@dataclass(frozen=True)
class Candidate:
    """One way to train, and its cost on each rank.

    Attributes:
        checkpointing: of activations, as in sft: False, True, "selective", or every n-th layer.
        held: bytes at the peak of a step, by kind (see `ledger.KINDS`).
        activations: the maximum bytes of activations and temporaries at any moment.
        wire: bytes that the rank sends in a step.
        flops: operations in a step, recomputation included.
        tokens: tokens per step, on all ranks.
        seconds: time per step, at the speeds of the config: computation or communication, whichever takes longer, plus
            the update of offloaded weights.
        offload: none, optimizer, all, nvme.
        home: bytes offloaded to host memory, or to disks (nvme).
        kept: bytes of activations that the host keeps until backward.
        crossed: bytes that move between there and the device in a step.
        shard_group: the number of processes that share a copy of the model; 0 if all share one.
        between_nodes: the part of `wire` that goes to other machines, per process.
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
    tokens: int
    seconds: float
    offload: str = "none"
    home: float = 0.0
    kept: float = 0.0
    crossed: float = 0.0
    shard_group: int = 0
    between_nodes: float = 0.0

    @property
    def peak(self) -> float:
        return sum(self.held.values())

    @property
    def on_disk(self) -> float:
        """Bytes on disks."""
        return self.home if self.offload == "nvme" else 0.0

    @property
    def on_host(self) -> float:
        """Bytes in host memory, including activations."""
        return self.home - self.on_disk + self.kept

    @property
    def tokens_per_second(self) -> float:
        """Over all ranks."""
        return self.tokens / self.seconds


@dataclass
class Plan:
    """The result of `shardproof plan`.

    Attributes:
        parameters, trainable: the number of parameters, and of trained ones.
        notes: what the numbers leave out or assume about this model.
        rooms: bytes of host memory, and of disks, that a rank may use.
        whole: maximum bytes of all gathered weights.
        candidates: all that were considered; `fitting`: those that fit into `limit` bytes and into the space for
            offloaded data, the fastest first.
    """

    model: str
    parameters: int
    trainable: int
    limit: float
    notes: list[str] = field(default_factory=list)
    rooms: dict[str, float] = field(default_factory=dict)
    whole: float = 0.0
    candidates: list[Candidate] = field(default_factory=list)

    def fits(self, c: Candidate) -> bool:
        return c.peak <= self.limit and self.has_room(c)

    def has_room(self, c: Candidate) -> bool:
        """Whether there is room for offloaded data."""
        return c.on_disk <= self.rooms["disk"] and c.on_host <= self.rooms["host"]

    @property
    def fitting(self) -> list[Candidate]:
        """The fastest first. Speeds are not known to more than three digits; among equals, the candidate that sends the
        least per token comes first, since communication may not overlap completely, and then the one that holds the
        least."""

        def order(c: Candidate) -> tuple[float, ...]:
            speed = float(f"{c.tokens_per_second / c.world:.3g}")
            return -speed, c.between_nodes / c.tokens, c.wire / c.tokens, -c.micro, c.peak

        return sorted((c for c in self.candidates if self.fits(c)), key=order)

    def fastest(self, world: int, length: int | None = None) -> Candidate | None:
        """The fastest candidate on `world` processes, with rows of `length` tokens or of any length."""
        return next((c for c in self.fitting if c.world == world and length in (None, c.length)), None)


def make_plan(config: PlanConfig, auto: str = CAUSAL, loss: Loss = "text", sample: Sample | None = None) -> Plan:
    """Consider every combination in the config. `auto`: the transformers class that loads the model; `loss`: see
    `Rank`; `sample`: the row that stands for all (default: from `config.files`).

    Raises:
        ConfigError: the model or a number in the config cannot be used.
    """
    from shardproof.doctor.planning.blocks import DEPTHS, keep_blocks, repeated_blocks
    from shardproof.doctor.planning.known_results import KnownResults
    from shardproof.doctor.planning.profiles import profile
    from shardproof.doctor.planning.sample import described
    from shardproof.doctor.planning.subject import check, check_model, kinds_of, meta_model, notes_on
    from shardproof.integrations.four_bits import count_weights

    stages = stages_of(config.stage)
    check(config)
    groups = groups_of(config)
    model = meta_model(config, auto)
    check_model(model, config)
    sample = sample or described(config)
    blocks = repeated_blocks(model)
    plan = Plan(
        config.model,
        *count_weights(model),
        config.gpu_memory * 1e9 * (1 - config.headroom),
        notes_on(model, config, sample),
        {"host": config.host_memory * 1e9, "disk": config.disk * 1e9},
    )
    plan.whole = plan.parameters * (4.0 if config.precision == "fp32" else 2.0)
    kinds = kinds_of(model, config)
    longest = blocks._replace(period=max(period_of(again, blocks.period) for again in kinds))
    if longest.groups > DEPTHS[-1]:
        keep_blocks(model, blocks.name, longest.of(DEPTHS[-1]))
    known: dict[Any, dict[Checkpointing, Profile]] = {}
    results = KnownResults()
    ways = product(stages, config.offload, _runs(config, groups), config.max_length)
    for stage, offload, (worlds, runs), length in ways:
        kept = "all" if offload == "nvme" else offload  # the same data is offloaded, to another place
        # With one process stages do not differ, except that stage 1 offloads gradients at the end of backward, and
        # stages 2 and 3 after each micro-batch.
        alike = worlds == [1] and (stage != 1 or kept == "none") and config.gradient_accumulation_steps == 1
        key = None if alike else stage, kept, worlds[-1], length
        if key not in known:
            known[key] = {}
            for each in sorted({period_of(again, blocks.period) for again in kinds}):
                alike_kinds = [again for again in kinds if period_of(again, blocks.period) == each]
                how = blocks._replace(period=each), results, loss, sample
                known[key] |= profile(model, config, (stage, kept), runs, length, alike_kinds, *how)
        for world, again, micro in product(worlds, kinds, config.per_device_batch_size):
            repeated = blocks._replace(period=period_of(again, blocks.period)).groups
            for group in groups[world] if stage else [0]:
                # With a copy in each group, a rank holds and gathers the same as if the group were the whole world.
                what = known[key][again].at(repeated, group or world, micro)
                parts = (group or world) if stage else 1
                way = (stage, world, again, micro, length)
                found = _candidate(config, way, what, offload, plan.trainable / parts, group)
                if stage == 3 and (parts > 1 or kept == "all"):
                    found.held["gathered"] += min(config.keep_gathered * 1e9, plan.whole)
                plan.candidates.append(found)
    return plan


def loss_of(config: PlanConfig) -> tuple[str, Loss]:
    """The transformers class and the loss of an sft run, as arguments of `make_plan`."""
    kinds: dict[str, tuple[str, Loss]] = {
        "seq_cls": (SCORER, "scores"),
        "reranker": (SCORER, "scores"),
        "generative_reranker": (CAUSAL, "last"),
        "embedding": ("AutoModel", "vectors"),
    }
    return kinds.get(config.task, (CAUSAL, "text"))


def stages_of(text: str) -> list[int]:
    """`all`, or numbers with commas."""
    if text == "all":
        return [0, 1, 2, 3]
    try:
        stages = sorted({int(word) for word in text.split(",")})
    except ValueError:
        stages = [-1]
    if not set(stages) <= {0, 1, 2, 3}:
        raise ConfigError(f"--stage {text}: give one or more of 0,1,2,3, or all.")
    return stages


def _runs(config: PlanConfig, groups: dict[int, list[int]]) -> Iterator[tuple[list[int], Sequence[int]]]:
    """The numbers of ranks to plan for, and the numbers to run for them: a single process differs from several. Runs
    with `groups` stand for copies in groups of ranks."""
    if 1 in groups:
        yield [1], [1]
    several = [n for n in sorted(groups) if n > 1]
    hold = sorted({group or world for world in several for group in groups[world]})  # ranks per copy
    least = max(2, config.sequence_parallel)
    if several:
        yield several, hold if len(hold) == 1 and not hold[0] % least else (least, 4 * least)


def _candidate(
    config: PlanConfig,
    way: tuple[int, int, Checkpointing, int, int],
    found: Found,
    offload: str,
    updated: float,
    group: int,
) -> Candidate:
    """`updated`: the number of weights that the rank updates; `group`: the number of ranks per copy, or 0."""
    from shardproof.doctor.planning.ledger import KINDS

    _, world, _, micro, length = way
    wire, between = sent(found.moved, config, world, group)
    links = [wire / config.bandwidth, between * (world // config.nodes) / config.node_bandwidth]
    seconds = max(found.moved.flops / (config.tflops * 1e12), *(seconds / 1e9 for seconds in links))
    if found.moved.crossed:
        slowest = [config.host_bandwidth] + ([config.disk_bandwidth] if offload == "nvme" else [])
        speed = min(slowest) * 1e9
        seconds = max(seconds, found.moved.crossed / speed)
        if offload != "none":
            kind = "bf16" if config.stochastic_rounding else config.optimizer
            seconds += UPDATE_BYTES.get(kind, UPDATE_BYTES["adamw"]) * updated / speed
    tokens = micro * length * config.gradient_accumulation_steps * world // config.sequence_parallel
    held = dict(zip(KINDS, map(float, found.held), strict=True))
    elsewhere: Any = (offload, found.home, found.kept, found.moved.crossed, group, between)
    return Candidate(*way, held, found.activations, wire, found.moved.flops, tokens, seconds, *elsewhere)
