"""One simulated rank of many: the real engine and the real model on the meta device, in torch's fake process group.

[Note: fewer blocks]
A model of 80 equal blocks does the same 80 times. So steps are run with a few blocks, at two depths, and are cut into
segments at the borders of blocks. The live memory in a segment grows with each block by what that block leaves behind,
so it is linear in the number of blocks, for segments counted from either end; the maximum over all segments is the
peak. `tests/doctor/test_plan.py` compares with runs at full depth.
"""

from __future__ import annotations

import contextlib
import gc
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

import shardproof
from shardproof.doctor.planning.blocks import DEPTHS, Blocks
from shardproof.doctor.planning.known_results import KnownResults
from shardproof.doctor.planning.ledger import (
    ACTIVATIONS,
    GATHERED,
    GRADIENTS,
    HELD,
    HOME,
    OPTIMIZER,
    WEIGHTS,
    FlashAttention,
    Ledger,
    Trace,
)
from shardproof.doctor.planning.stand_ins import (
    ImaginedHome,
    ImaginedHost,
    Taught,
    WithExperts,
    add_fused_head,
    contrasted,
    distilled,
    optimizer_of,
    summed,
)
from shardproof.doctor.planning.values import Values
from shardproof.errors import ConfigError, ShardproofError
from shardproof.models.families.anatomy import anatomy
from shardproof.models.families.family import UNUSED
from shardproof.models.forward import makes_its_mean, without_adapters
from shardproof.parallel.sequence import SequenceParallel
from shardproof.train.losses.shortcuts import chunked_loss
from shardproof.train.losses.tokens import token_mean
from shardproof.train.model.loading import first_line
from shardproof.train.model.shared_rows import share_rows_of, shared_rows_of
from shardproof.train.optim.optimizers import made_by
from shardproof.train.reranker.scoring import last_logits_only
from shardproof.train.settings import mixed_precision
from shardproof.zero.autograd import in_backward

if TYPE_CHECKING:
    from shardproof.doctor.config import PlanConfig
    from shardproof.doctor.planning.sample import Sample

FROM_START, FROM_END = 3, 2  # segments of each pass that are distinguished: reductions are in flight for three blocks
_Named = Literal[
    "text",
    "scores",
    "vectors",
    "last",
    "fused",
    "distilled",
    "distilled and written",
    "contrasted",
    "contrasted and written",
]
Loss = _Named | Taught | WithExperts
PASSES = 3  # for more micro-batches: the first, the middle ones, which are alike, and the last

Key = tuple[str, int]
Columns = np.ndarray  # bytes of each kind, and off the device (rows), after each event of a segment


class Moved(NamedTuple):
    """What has been computed and moved so far.

    Attributes:
        flops: floating-point operations of this rank.
        gathered: payload bytes of gathers; `reduced`: of reductions, with an all-reduce counted twice.
        exchanged: bytes sent in attention to the ranks that share rows with this one.
        crossed: bytes moved between the device and the host, or wherever offloaded data is.
    """

    flops: float
    gathered: float
    reduced: float
    exchanged: float
    crossed: float


@dataclass
class Step:
    """One simulated step: live memory by segment, and what is computed and moved."""

    segments: dict[Key, Columns]
    moved: Moved


class Rank:
    """Rank 0 with a model at a stage; steps as `shardproof sft` does.

    Args:
        model: on the meta device; sharded here.
        config: the options; for those that are lists, other arguments choose the value.
        blocks: the blocks whose borders separate segments.
        offload: what is kept off the device: "none", "optimizer" or "all".
        known: results of operations from other simulated ranks.
        loss: the kind of loss: on text, on scores, on last tokens, or one of TRL's: on pairs ("contrasted", with or
            without also learning the better answers), from a teacher, or on text without ever holding the logits.
        sample: the row that stands for all, if rows have files; otherwise rows are text.
    """

    def __init__(
        self,
        model: nn.Module,
        config: PlanConfig,
        stage: int,
        blocks: Blocks,
        offload: str = "none",
        known: KnownResults | None = None,
        loss: Loss = "text",
        sample: Sample | None = None,
    ) -> None:
        self.sample, self.values = sample, Values() if sample else None
        self.model, self.config, self.blocks, self.loss = model, config, blocks, loss
        if loss == "fused" or isinstance(loss, WithExperts):
            add_fused_head(model)
        if loss == "last":
            last_logits_only(model)
        self.ledger = Ledger(known, yes=not config.packing)
        self.sequence = self._share_rows()
        # "never": operations start at once, as they do once ranks have agreed on a plan.
        how: Any = {"units": anatomy(model).units, "device": "meta", "dynamic": "never", "inference_memory": 0}
        precision = None if config.stochastic_rounding else mixed_precision(config.precision, config.reduce_dtype)
        shardproof.shard(model, stage, mixed_precision=precision, **how)
        self.engine = model.__dict__["_shardproof"]
        by_hand = config.device == "cpu"  # the engine exchanges and keeps buffers differently there
        self.engine.comm.by_hand = by_hand and self.engine.comm.size > 1
        self.engine.pool.keeps = by_hand
        self.engine.invariants.ends = 10  # its checks need values, which do not exist here
        self.engine.told = True  # suppress its message about generation
        trained = [{"params": [p for p in model.parameters() if p.requires_grad]}]
        if trained[0]["params"]:
            self.optimizer = made_by(optimizer_of(config), trained, 1e-4, model)
            self.optimizer.__dict__.update(_shardproof_steps=10)
        self.host = ImaginedHost(self.ledger) if config.activation_offloading and not by_hand else None
        self._divides = not makes_its_mean(model)
        self._pass = 0
        part_of = anatomy(model).part_of
        used = {"llm", UNUSED, *(sample.parts if sample else ())}
        self._towers = [p for n, p in model.named_parameters() if p.requires_grad and part_of[n] not in used]
        self._see_gathers()
        self._mark_blocks()
        self.home = None if offload == "none" else ImaginedHome(self.ledger, frozen=offload == "all")
        self._move_home()
        for flat in self.engine.flats:
            self.ledger.note(flat.shard, WEIGHTS if flat.home is None else HOME)
        for buffer in model.buffers():
            self.ledger.note(buffer, WEIGHTS)

    def _share_rows(self) -> SequenceParallel | None:
        if self.config.sequence_parallel == 1:
            return None
        size, model = self.config.sequence_parallel, without_adapters(cast("Any", self.model))
        share_rows_of(model, size, gathers=self.loss != "text")
        shared = shared_rows_of(model)
        return None if shared is None else shared.sequence

    def _move_home(self) -> None:
        """What `shard(..., offload=...)` does, for a simulated home."""
        self.engine.home = self.home
        for flat in self.engine.flats:
            flat.home = flat.find_home()
            if flat.home is not None:
                flat.set_shard(flat.settled(flat.shard, flat.shard.dtype))

    def _see_gathers(self) -> None:
        """The engine hides its own operations from the user's modes; here they are needed."""
        start = self.engine._start_gather

        def seen(flat: Any) -> None:
            with self.ledger:
                start(flat)
            if flat.whole is not flat.shard and flat.kept is None:
                self.ledger.note(flat.whole, GATHERED)

        self.engine._start_gather = seen

    def _mark_blocks(self) -> None:
        """The blocks that differ are one group, before the others."""
        blocks = self.blocks
        if not blocks.name:
            return
        every: Any = self.model.get_submodule(blocks.name)
        first = [every[0]] if blocks.first else []
        for i, block in enumerate([*first, *list(every)[blocks.first :: blocks.period]]):
            block.register_forward_pre_hook(lambda *_, i=i: self._mark("forward", i))
            block.register_forward_hook(lambda *a, i=i: self._mark_backward(i, a[-1]))

    def _mark(self, word: str, i: int) -> None:
        if not in_backward():  # otherwise it is a recomputation
            self.ledger.mark(f"{word}{self._pass} {i}")

    def _mark_backward(self, i: int, output: Any) -> None:
        if in_backward():
            return
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            number = self._pass
            hidden.register_hook(lambda _: self.ledger.mark(f"backward{number} {i}"))

    def step(self, micro: int, length: int, clip: bool = True) -> Step:
        """Forward and backward of each micro-batch, clipping, update: of `micro` rows of `length` tokens without
        padding.

        Clipping takes a number for each parameter, and time here: without `clip`, gradients are finished just the same.
        """
        ledger, several = self.ledger, self.config.gradient_accumulation_steps
        passes = min(several, PASSES)
        before, moments = self._moved(), []
        gc.disable()  # it would run at random moments
        try:
            with ledger.step() as trace:
                for number in range(passes):
                    self._pass = number
                    with self._accumulating(last=number == passes - 1):
                        self._forward_and_backward(micro, length)
                    moments.append(self._moved())
                ledger.mark("clip")
                with ledger:
                    if clip:
                        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                    else:
                        self.engine.gradients.finish()
                ledger.mark("update")
                self._update()
        finally:
            gc.enable()
        moved = np.subtract(self._moved(), before)
        if several > passes:
            moved = moved + (several - passes) * np.subtract(moments[1], moments[0])
        return Step(segments_of(trace, bool(self.blocks.first)), Moved(*map(float, moved)))

    def _accumulating(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Between micro-batches stages 0 and 1 reduce nothing, as in our trainers."""
        return contextlib.nullcontext() if last or self.engine.stage >= 2 else shardproof.no_sync(self.model)

    def _forward_and_backward(self, micro: int, length: int) -> None:
        attention = FlashAttention()
        with self.ledger:  # pixels take memory, too
            inputs = self._inputs(micro, length)
        with self.ledger, self.values or contextlib.nullcontext(), attention, self.sequence or contextlib.nullcontext():
            with self.host or contextlib.nullcontext():
                seen = sum(p.sum() for p in self._towers)
                loss = self._loss(inputs) + 0.0 * seen  # towers that no row needs are trained nevertheless
            self.ledger.mark(f"loss{self._pass}")
            attention.backward(loss)

    def _inputs(self, micro: int, length: int) -> dict[str, Any]:
        if self.sample is not None and self.values is not None:
            batch = self.sample.batch(micro, length)
            if self.sequence is not None and self.loss == "text":
                batch["shift_labels"] = self.sequence.shifted(batch["labels"])
            return {**tree_map_only(torch.Tensor, self.values.on_meta, batch), "use_cache": False}
        ids = torch.zeros(micro, length, dtype=torch.long, device="meta")
        inputs: dict[str, Any] = {"input_ids": ids, "labels": ids, "use_cache": False}
        if self.sequence is not None and self.loss == "text":
            return inputs | {"shift_labels": self.sequence.shifted(ids)}
        return inputs | {"position_ids": ids} if self.config.packing else inputs

    def _loss(self, inputs: dict[str, Any]) -> torch.Tensor:
        """As `SftTrainer` computes it."""
        if self.config.chunked_loss or (self.sample is not None and "shift_labels" in inputs):
            return chunked_loss(self.model, inputs, 1)
        if self.loss == "fused":
            made: torch.Tensor = self.model(**inputs, fused_lm_head=True).log_probs.sum()
            return made
        if self._divides and self.loss == "text":
            loss: torch.Tensor = self.model(**inputs).loss
            return loss
        labels = inputs.pop("labels")
        if self.loss in ("scores", "vectors", "last"):
            return summed(self.model(**inputs))
        if isinstance(self.loss, Taught | WithExperts):
            return self.loss.of(self.model, inputs, labels)
        if self.loss in ("distilled", "distilled and written"):
            return distilled(self.model(**inputs).logits, labels, written=self.loss != "distilled")
        if self.loss in ("contrasted", "contrasted and written"):
            return contrasted(self.model(**inputs).logits, labels, written=self.loss != "contrasted")
        return token_mean(self.model(**inputs), labels, 1)

    def ask(self, micro: int, length: int, cache: bool = False) -> tuple[float, float]:
        """A forward pass without gradients. Returns its peak of live bytes on the device, and the live bytes at its
        end, with `cache` including the attention cache."""
        ids = torch.zeros(micro, length, dtype=torch.long, device="meta")
        more = {"logits_to_keep": 1} if cache else {}
        self.model.eval()
        with self.ledger.step() as trace, torch.no_grad(), self.ledger, FlashAttention():
            kept: Any = self.model(input_ids=ids, use_cache=cache, **more)
            here = self.ledger.here()
            del kept
        self.model.train()
        most = max(float(columns[:HOME].sum(axis=0).max()) for columns in segments_of(trace, False).values())
        return most, here

    def _update(self) -> None:
        ledger = self.ledger
        for flat in self.engine.flats:
            if flat.grad is not None:
                ledger.note(flat.grad, GRADIENTS if flat.home is None else HOME)
        # Updates take temporary memory; and an optimizer may scale them by values (Adafactor).
        ledger.usual, ledger.number = ACTIVATIONS if self.home is None else HOME, 1.0
        try:
            with ledger:
                self.optimizer.step()
        except Exception as error:
            if isinstance(error, ShardproofError) or self.config.debug:
                raise
            raise ConfigError(
                f"--optimizer {self.config.optimizer}: a step of {type(self.optimizer).__name__} cannot be run on "
                f"shapes alone: {type(error).__name__}: {first_line(error)}\nPlan with adamw, which keeps two values "
                "for each weight in fp32; --debug shows where it fails."
            ) from error
        ledger.usual, ledger.number = ACTIVATIONS, None
        param: Any
        for param, state in self.optimizer.state.items():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    ledger.note(value, OPTIMIZER if param.flat.home is None else HOME)
        self.optimizer.zero_grad()

    def _moved(self) -> Moved:
        total = shardproof.stats(self.model).total
        exchanged = self.sequence.bytes_sent if self.sequence else 0
        crossed = sum(place.crossed for place in (self.home, self.host) if place is not None)
        return Moved(self.ledger.flops, total.bytes_gathered, total.bytes_reduced, exchanged, crossed)


def segments_of(trace: Trace, leading: bool) -> dict[Key, Columns]:
    """Live memory after each event, cut at the marks. Blocks of a pass are counted from its start (0, 1, ...) and from
    its end (-1, -2, ...); segments outside blocks are (name, 0). `leading`: whether the very first block is not one of
    those that repeat."""
    sizes, kinds = np.array(trace.sizes, dtype=np.float64), np.array(trace.kinds, dtype=np.int64)
    live = np.zeros(HELD + 1)
    np.add.at(live, kinds[trace.live], sizes[trace.live])
    events = np.array(trace.events, dtype=np.int64)
    numbers = np.where(events >= 0, events, ~events)
    changes = np.zeros((HELD + 1, len(events) + 1))
    changes[kinds[numbers], np.arange(1, len(events) + 1)] = np.where(events >= 0, sizes[numbers], -sizes[numbers])
    series = live[:, None] + changes.cumsum(axis=1)
    marks = [("begin", 0), *trace.marks, ("end", len(events))]
    cuts = [(name, series[:, at : after + 1]) for (name, at), (_, after) in pairwise(marks)]
    found: dict[Key, Columns] = {}
    passes: dict[str, list[Columns]] = {}
    for name, columns in cuts:
        word, _, number = name.partition(" ")
        if number:
            passes.setdefault(word, []).append(columns)
        else:
            found[word, 0] = columns
    for word, columns_of in passes.items():
        backward = word.startswith("backward")
        start, end = FROM_START + (leading and not backward), FROM_END + (leading and backward)
        if backward:  # it ends before the first blocks if these and everything before them are frozen
            end = max(end - len(passes[word.replace("backward", "forward")]) + len(columns_of), 0)
        short = len(columns_of) < start + end
        for i, columns in enumerate(columns_of):
            if short or i < start:
                found[word, i] = columns
            elif i >= len(columns_of) - end:
                found[word, i - len(columns_of)] = columns
            elif len(columns_of) > DEPTHS[-1] + leading:  # at full depth nothing is left out
                found[word, i] = columns
    return found
