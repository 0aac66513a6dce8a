"""A plan in the terminal: a bar for each candidate, and a table over numbers of processes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from itertools import product

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardproof.doctor.config import PlanConfig
from shardproof.doctor.planning.checkpointing import Checkpointing
from shardproof.doctor.planning.ledger import KINDS
from shardproof.doctor.planning.plan import Candidate, Plan
from shardproof.train.options.config import EIGHT_BITS, SELECTIVE

# A glyph for each kind, so that a bar can be read without colours.
COLOURS = ("blue", "magenta", "cyan", "green", "yellow", "white")
LOOK = {kind: (glyph, colour) for kind, glyph, colour in zip(KINDS, "█▓▒◆▞░", COLOURS, strict=True)}
BAR, LEAST = 36, 10  # characters
BARS = 5  # the index of the column with the bars
LEGEND = """again: --gradient-checkpointing; rows: the most at once that fit
GB: peak per process; sent: by each in a step; tokens/s: of all"""


def as_json(plan: Plan) -> str:
    """The plan as one object."""
    candidates = [
        {
            **dataclasses.asdict(c),
            "peak": c.peak,
            "fits": plan.fits(c),
            "tokens_per_second": c.tokens_per_second,
        }
        for c in plan.candidates
    ]
    head = {key: getattr(plan, key) for key in ("model", "parameters", "trainable", "limit", "notes")}
    return json.dumps({**head, "candidates": candidates}, indent=1)


def show(plan: Plan, config: PlanConfig, console: Console) -> None:
    """Print the plan."""
    share = f", {plan.trainable / 1e6:,.1f} M of them trained" if plan.trainable != plan.parameters else ""
    console.print(
        f"{plan.model}: {_count(plan.parameters)} parameters{share}; {_ways(config)}\n"
        f"memory: {config.gpu_memory:g} GB per process, {gigabytes(plan.limit)} of it for tensors (--headroom)\n"
        f"assumed speeds: {config.tflops:g} TFLOP/s, {config.bandwidth:g} GB/s of communication (--tflops, "
        "--bandwidth); computation and communication overlap",
        highlight=False,
    )
    if config.nodes > 1:
        console.print(
            f"machines: {config.nodes}, each of which sends {config.node_bandwidth:g} GB/s to others (--nodes, "
            "--node-bandwidth)",
            highlight=False,
        )
    if set(config.offload) != {"none"} or config.activation_offloading:
        console.print(
            f"offloading: {config.host_memory:g} GB of host memory per process at {config.host_bandwidth:g} GB/s, "
            f"{config.disk:g} GB of disk at {config.disk_bandwidth:g} GB/s (--host-memory, --disk, ...)",
            highlight=False,
        )
    for length in config.max_length:
        worlds = sorted({c.world for c in plan.candidates})
        if len(worlds) > 2:
            console.print(f"\nrows of {length} tokens in the fastest way that fits, and GB per process")
            console.print(_by_world(plan, worlds, length))
            console.print(_legend(plan, config.nodes), highlight=False)
        else:
            for world in worlds:
                console.print(f"\n{world} process(es), rows of {length} tokens")
                console.print(_bars(plan, world, length, console.width))
                if any(c.home or c.kept for c in plan.candidates):
                    console.print("GB that are offloaded, and that move there and back in a step:")
                    console.print(_elsewhere(plan, world, length))
    if len({c.world for c in plan.candidates}) <= 2:
        console.print(LEGEND, highlight=False)
        console.print(Text("  ").join(Text(f"{g} {kind}", style) for kind, (g, style) in LOOK.items()))
        console.print("GB of activations and temporaries, at most, at every stage:")
        console.print(_activations(plan))
    for note in plan.notes:
        console.print(f"note: {note}", style="yellow", highlight=False)
    console.print(verdict(plan, config), highlight=False, soft_wrap=True)  # it contains a command to copy


def _ways(config: PlanConfig) -> str:
    """The settings that are the same for all candidates."""
    optimizer = {"adamw": "AdamW", EIGHT_BITS: "AdamW in eight bits"}.get(config.optimizer, config.optimizer)
    words = [config.tuner, config.precision, f"{optimizer} in bf16" if config.stochastic_rounding else optimizer]
    if config.gradient_accumulation_steps > 1:
        words.append(f"{config.gradient_accumulation_steps} micro-batches per step")
    if config.sequence_parallel > 1:
        words.append(f"each row on {config.sequence_parallel} processes")
    switches = ("packing", "chunked_loss", "activation_offloading")
    return ", ".join([*words, *(name.replace("_", " ") for name in switches if getattr(config, name))])


def verdict(plan: Plan, config: PlanConfig) -> str:
    """What to do, in one sentence."""
    if not plan.fitting:
        least = min(plan.candidates, key=lambda c: c.peak)
        return (
            f"Nothing fits. The minimum is {gigabytes(least.peak)} GB per process ({_options(least)}): use more "
            "processes "
            "(--gpus), shorter rows (--max-length), LoRA (--tuner lora), or --offload."
        )
    world = max(c.world for c in plan.candidates)
    best = plan.fastest(world) or plan.fitting[0]
    said = (
        f"Fastest that fits on {best.world}: {_options(best)}; {gigabytes(best.peak)} GB per process, about "
        f"{best.tokens_per_second:,.0f} tokens/s at the assumed speeds."
    )
    spare = int(min(plan.limit - best.peak, plan.whole) / 1e9)
    if best.stage == 3 and best.world > 1 and spare and not config.keep_gathered:
        said += f" The remaining memory can save gathers: --keep-gathered {spare}."
    if config.nodes == 1:
        return said
    machines = f" {gigabytes(best.between_nodes * best.world / config.nodes)} GB leave each machine in a step"
    others = [c for c in plan.fitting if c.world == best.world and bool(c.shard_group) != bool(best.shard_group)]
    if not others:
        return f"{said}{machines}."
    other = others[0]
    what = f"with a copy in every {other.shard_group}" if other.shard_group else "with one copy over all"
    leave = gigabytes(other.between_nodes * other.world / config.nodes)
    return f"{said}{machines}; {what} it would be {leave} GB, and {other.tokens_per_second:,.0f} tokens/s."


def gigabytes(size: float) -> str:
    """In units of 10^9 bytes, with about three digits."""
    number = size / 1e9
    return f"{number:.1f}" if number >= 10 else f"{number:.2f}" if number >= 0.1 else f"{number:.2g}"


def _options(c: Candidate) -> str:
    again = f" --gradient-checkpointing {in_words(c.checkpointing)}".removesuffix(" yes") if c.checkpointing else ""
    elsewhere = {"none": "", "nvme": " --offload nvme:FOLDER"}.get(c.offload, f" --offload {c.offload}")
    copies = f" --shard-group {c.shard_group}" if c.shard_group else ""
    return f"--stage {c.stage}{copies} --per-device-batch-size {c.micro} --max-length {c.length}{again}{elsewhere}"


def in_words(again: Checkpointing) -> str:
    """A kind of checkpointing, as a value of sft's option."""
    return {True: "yes", False: "no"}[again] if isinstance(again, bool) else str(again)


def _mark(again: Checkpointing) -> str:
    return {True: "*", False: "", SELECTIVE: "~"}.get(again, f"*{again}")


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


def best_rows(plan: Plan, found: Iterable[Candidate]) -> Candidate:
    """The candidate with the most rows that fits; the one with the fewest if none does."""
    ordered = sorted(found, key=lambda c: c.micro)
    fitting = [c for c in ordered if plan.fits(c)]
    return fitting[-1] if fitting else ordered[0]


def _elsewhere(plan: Plan, world: int, length: int) -> Table:
    """The offloaded data at each stage, which does not depend on rows and checkpointing; for activations, the
    maximum."""
    table = Table(box=None, pad_edge=False)
    activations = any(c.kept for c in plan.candidates)
    more = ["activations, at most"] if activations else []
    for name in ("stage", "offload", "there", *more, "to and fro", ""):
        table.add_column(name, justify="left" if name in ("stage", "offload") else "right")
    here = [c for c in plan.candidates if (c.world, c.length) == (world, length) and (c.home or c.kept)]
    for c in {(c.stage, c.offload): c for c in sorted(here, key=lambda c: c.kept)}.values():
        room = Text("") if plan.has_room(c) else Text("more than available", "red")
        kept = [gigabytes(c.kept)] if activations else []
        table.add_row(str(c.stage), c.offload, gigabytes(c.home), *kept, gigabytes(c.crossed), room)
    return table


def _bars(plan: Plan, world: int, length: int, width: int) -> Table:
    """A row for each stage, offload and kind of checkpointing, with the most rows that fit; `width` characters wide."""
    apart = any(c.offload != "none" for c in plan.candidates)
    spread = any(c.between_nodes for c in plan.candidates)
    here = [c for c in plan.candidates if c.world == world and c.length == length]

    def kind(c: Candidate) -> tuple[int, int, str, Checkpointing]:
        return c.stage, c.shard_group, c.offload, c.checkpointing

    shown = [best_rows(plan, [c for c in here if kind(c) == group]) for group in dict.fromkeys(map(kind, here))]
    scale = max([plan.limit, *(min(c.peak, 2 * plan.limit) for c in shown)])
    best = plan.fastest(world, length)

    def word(c: Candidate) -> Text:
        fits = plan.fits(c)
        return Text("fastest" if c == best else "fits" if fits else "too much", "green" if fits else "red")

    columns: list[tuple[str, list[str | Text]]] = [
        ("stage", [str(c.stage) for c in shown]),
        ("group", [str(c.shard_group or "all") for c in shown] if spread else []),
        ("offload", [c.offload for c in shown] if apart else []),
        ("again", [in_words(c.checkpointing) for c in shown]),
        ("rows", [str(c.micro) for c in shown]),
        (f"of {gigabytes(plan.limit)} GB", []),
        ("GB", [gigabytes(c.peak) for c in shown]),
        ("", [word(c) for c in shown]),
        ("sent", [gigabytes(c.wire) for c in shown]),
        ("away", [gigabytes(c.between_nodes) for c in shown] if spread else []),
        ("s a step", [f"{c.seconds:.3g}" for c in shown] if not (apart or spread) else []),
        ("tokens/s", [f"{c.tokens_per_second:,.0f}" for c in shown]),
    ]
    taken = [max(len(name), *map(len, values)) for name, values in columns if values]
    gap = 2 if width >= sum(taken) + 2 * len(taken) + LEAST + 1 else 1
    wide = max(LEAST, min(BAR, width - sum(taken) - gap * len(taken) - 1))
    columns[BARS] = columns[BARS][0], [bar(c, scale, plan.limit, wide) for c in shown]
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    there = [(place, name, values) for place, (name, values) in enumerate(columns) if values]
    for place, name, _ in there:
        table.add_column(name, justify="right" if place > BARS else "left", no_wrap=True)
    for row in zip(*(values for _, _, values in there), strict=True):
        table.add_row(*row)
    return table


def bar(c: Candidate, scale: float, limit: float, wide: int) -> Text:
    """The memory by kind; `|` marks the limit. `wide` characters wide."""
    text, filled, done = Text(), 0.0, 0
    for kind, size in c.held.items():
        filled += size
        end = min(wide, round(wide * filled / scale))
        glyph, style = LOOK[kind]
        text.append(glyph * (end - done), style)
        done = end
    if filled > scale:
        text.append("»", "red")
    at = round(wide * limit / scale)
    if done <= at:
        text.append(" " * (at - done) + "|", "dim")
    return text


def _activations(plan: Plan) -> Table:
    """Bytes of activations at the peak by rows and length; they are the same at every stage."""
    table = Table(box=None, pad_edge=False)
    micros = sorted({c.micro for c in plan.candidates})
    last = max(c.stage for c in plan.candidates)
    for name in ("tokens", "again", *(f"{m} row(s)" for m in micros)):
        table.add_column(name, justify="right")
    groups = dict.fromkeys((c.length, c.checkpointing) for c in plan.candidates)
    for length, again in groups:
        found = {
            c.micro: c.activations
            for c in plan.candidates
            if (c.length, c.checkpointing, c.stage, c.offload) == (length, again, last, plan.candidates[0].offload)
        }
        table.add_row(str(length), in_words(again), *(gigabytes(found[m]) for m in micros))
    return table


def _legend(plan: Plan, nodes: int) -> str:
    """The legend of the table over numbers of processes."""
    found = dict.fromkeys(c.checkpointing for c in plan.candidates if c.checkpointing)
    marks = [f"{_mark(k)}: with gradient checkpointing {in_words(k)}".removesuffix(" yes") for k in found]
    copies = ["/8: a copy in every 8 (--shard-group)"] if nodes > 1 else []
    return "; ".join([*marks, *copies, "-: nothing fits; the minimum is shown"])


def _by_world(plan: Plan, worlds: list[int], length: int) -> Table:
    """For each number of processes and stage, the fastest way that fits, or the minimum that would be needed."""
    table = Table(box=None, pad_edge=False)
    table.add_column("processes", justify="right")
    stages = sorted({c.stage for c in plan.candidates})
    offloads = list(dict.fromkeys(c.offload for c in plan.candidates))
    if len(offloads) > 1:
        table.add_column("offload")
    for stage in stages:
        table.add_column(f"stage {stage}")
    table.add_column("fastest")
    for world, offload in product(worlds, offloads):
        cells = [Text(offload)] if len(offloads) > 1 else []
        for stage in stages:
            at = (world, length, stage, offload)
            here = [c for c in plan.candidates if (c.world, c.length, c.stage, c.offload) == at]
            fitting = [c for c in plan.fitting if c in here]
            if fitting:
                c = fitting[0]
                marks = _mark(c.checkpointing) + (f"/{c.shard_group}" if c.shard_group else "")
                cells.append(Text(f"{c.micro}{marks}  {gigabytes(c.peak)}", "green"))
            else:
                cells.append(Text(f"-  {gigabytes(min(c.peak for c in here))}", "red"))
        best = plan.fastest(world, length)
        fastest = f"{best.stage}: {best.tokens_per_second:,.0f} tokens/s" if best and best.offload == offload else ""
        table.add_row(str(world), *cells, fastest)
    return table
