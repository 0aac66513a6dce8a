"""One rank of many, imagined: the real engine and the real model on the meta device, in torch's fake process group.

[Note: fewer blocks]
A model of 80 equal blocks does 80 times the same. So steps are run with a few blocks, at two depths, and are cut into
segments at the borders of blocks. What is live in a segment grows with each block by what that block leaves behind, so
it is linear in the number of blocks, for segments counted from either end; the most of all segments is the peak.
`tests/doctor/test_plan.py` compares with runs at full depth.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

import shardproof
from shardproof.doctor.ledger import (
    GATHERED,
    GRADIENTS,
    HOME,
    OPTIMIZER,
    WEIGHTS,
    FlashAttention,
    KnownResults,
    Ledger,
    Trace,
)
from shardproof.errors import ConfigError
from shardproof.zero import collectives, consensus
from shardproof.zero.autograd import in_backward
from shardproof.zero.build import find_units
from shardproof.zero.home import Home

FROM_START, FROM_END = 3, 2  # segments of each pass that are told apart: reductions are under way for three blocks
DEPTHS = (5, 6)  # blocks of the two runs

Key = tuple[str, int]
Columns = np.ndarray  # bytes of each kind, and at home (rows), after each event of a segment


@dataclass
class Step:
    """One imagined step.

    Attributes:
        segments: what is live, by segment.
        flops: floating-point operations of this rank.
        gathered: payload bytes of gathers; `reduced` of reductions, an all-reduce counted twice.
        crossed: bytes between the device and the home of what is offloaded.
    """

    segments: dict[Key, Columns]
    flops: int
    gathered: int
    reduced: int
    crossed: int


class ImaginedHome(Home):
    """A second place on the meta device: the ledger tells apart what lies there.

    Attributes:
        crossed: bytes that were brought from here or placed here.
    """

    def __init__(self, ledger: Ledger, frozen: bool) -> None:
        super().__init__(torch.device("meta"), torch.device("meta"), frozen)
        self.ledger, self.crossed, self.apart = ledger, 0, True
        self._leaving: torch.Tensor | None = None

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        here = torch.empty(numel, dtype=dtype, device="meta")
        self.ledger.note(here, HOME)
        return here

    def place(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        here = self.take(values.numel(), dtype)
        self.crossed += here.nbytes
        self._leaving = values.to(dtype)  # one copy home is under way at a time
        return here

    def bring(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        self.crossed += values.nbytes
        return torch.empty_like(values).to(dtype)  # it is cast where it arrives

    def settle(self) -> None:
        self._leaving = None


class Unfilled(TorchFunctionMode):
    """Leaves out the drawing of weights by chance: on the meta device it takes time (3 ms for each linear layer), and
    there is nothing to fill."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return args[0] if func in (torch.Tensor.uniform_, torch.Tensor.normal_) else func(*args, **(kwargs or {}))


class AdamWStates(torch.optim.Optimizer):
    """What fused AdamW keeps, without its arithmetic: its kernel takes no other memory, and refuses the meta device."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-4})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and not self.state[p]:
                    self.state[p].update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))


@contextmanager
def fake_group(world: int) -> Iterator[None]:
    """Inside, this process is rank 0 of `world`.

    Raises:
        ConfigError: the process is a rank already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ConfigError("A plan imagines its ranks: run it in one process, outside of torchrun.")
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    try:
        yield
    finally:
        dist.destroy_process_group()
        # The next group has the same name, and may lie at the same address: the engine would take it for this one.
        collectives._second_groups.pop(name, None)
        consensus._streams.pop(name, None)


def repeated_blocks(model: nn.Module) -> tuple[str, int, int]:
    """Name and length of the longest list of units of the model, and after how many blocks it repeats; ("", 0, 1) if
    there is none."""
    lists: dict[str, list[nn.Module]] = {}
    for name, module in find_units(model, None):
        parent, _, last = name.rpartition(".")
        if last.isdigit() and isinstance(model.get_submodule(parent), nn.ModuleList):
            lists.setdefault(parent, []).append(module)
    if not lists:
        return "", 0, 1
    name = max(lists, key=lambda n: len(lists[n]))
    kinds = getattr(getattr(model, "config", None), "layer_types", None) or []
    signs = [
        (type(m).__name__, [tuple(p.shape) for p in m.parameters()], kinds[i] if len(kinds) == len(lists[name]) else "")
        for i, m in enumerate(lists[name])
    ]
    period = next(p for p in range(1, len(signs) + 1) if all(a == b for a, b in zip(signs, signs[p:], strict=False)))
    return name, len(signs), period


def keep_blocks(model: nn.Module, name: str, count: int) -> nn.Module:
    """Leave the model only the first `count` blocks of the list `name`, if there is one. Returns `model`."""
    if name:
        blocks: Any = model.get_submodule(name)
        del blocks[count:]
    return model


class Rank:
    """Rank 0 with a model at a stage; steps as `shardproof sft` does.

    Args:
        model: on the meta device; sharded here.
        blocks: name of the list whose blocks bound segments, and how many blocks are one (the period).
        by_hand: whether the engine exchanges and keeps buffers as on the CPU, or as with an accelerator.
        offload: what lives elsewhere: "none", "optimizer" or "all".
        known: results of operations that other ranks have met.
    """

    def __init__(
        self,
        model: nn.Module,
        stage: int,
        precision: Any,
        blocks: tuple[str, int],
        by_hand: bool,
        offload: str = "none",
        known: KnownResults | None = None,
    ) -> None:
        self.model, self.ledger = model, Ledger(known)
        # "never": operations start at once, as they do once ranks have agreed on a plan.
        shardproof.shard(model, stage, mixed_precision=precision, device="meta", dynamic="never")
        self.engine = model.__dict__["_shardproof"]
        self.engine.comm.by_hand = by_hand and self.engine.comm.size > 1
        self.engine.pool.keeps = by_hand
        self.engine.invariants.ends = 10  # its checks look at values, and there are none
        self.optimizer = AdamWStates([p for p in model.parameters() if p.requires_grad])
        self.optimizer.__dict__["_shardproof_steps"] = 10
        self._see_gathers()
        self._mark_blocks(*blocks)
        self.home = None if offload == "none" else ImaginedHome(self.ledger, frozen=offload == "all")
        self._move_home()
        for flat in self.engine.flats:
            self.ledger.note(flat.shard, WEIGHTS if flat.home is None else HOME)
        for buffer in model.buffers():
            self.ledger.note(buffer, WEIGHTS)

    def _move_home(self) -> None:
        """What `shard(..., offload=...)` does, for a home that is imagined."""
        self.engine.home = self.home
        for flat in self.engine.flats:
            flat.home = flat.find_home()
            if flat.home is not None:
                flat.set_shard(flat.settled(flat.shard, flat.shard.dtype))

    def _see_gathers(self) -> None:
        """The engine hides its own operations from modes of the user; here they are wanted."""
        start = self.engine._start_gather

        def seen(flat: Any) -> None:
            with self.ledger:
                start(flat)
            if flat.whole is not flat.shard:
                self.ledger.note(flat.whole, GATHERED)

        self.engine._start_gather = seen

    def _mark_blocks(self, name: str, period: int) -> None:
        blocks = list(self.model.get_submodule(name))[::period] if name else []  # type: ignore[call-overload]
        for i, block in enumerate(blocks):
            block.register_forward_pre_hook(lambda *_, i=i: self._mark(f"forward {i}"))
            block.register_forward_hook(lambda *a, i=i: self._mark_backward(i, a[-1]))

    def _mark(self, name: str) -> None:
        if not in_backward():  # else it is a recomputation
            self.ledger.mark(name)

    def _mark_backward(self, i: int, output: Any) -> None:
        if in_backward():
            return
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self.ledger.mark(f"backward {i}"))

    def step(self, micro: int, length: int, clip: bool = True) -> Step:
        """Forward, backward, clipping, update: of `micro` rows of `length` tokens without padding.

        Clipping takes a number for each parameter, and time here: without `clip` gradients become final all the same.
        """
        model, ledger = self.model, self.ledger
        ids = torch.zeros(micro, length, dtype=torch.long, device="meta")
        total, attention = self._moved(), FlashAttention()
        gc.disable()  # when it runs is chance
        try:
            with ledger.step() as trace:
                with ledger, attention:
                    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                    ledger.mark("loss")
                    attention.backward(loss)
                    ledger.mark("clip")
                    if clip:
                        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    else:
                        self.engine.gradients.finish()
                ledger.mark("update")
                for flat in self.engine.flats:
                    if flat.grad is not None:
                        ledger.note(flat.grad, GRADIENTS if flat.home is None else HOME)
                self.optimizer.step()  # what it makes are the states, which are told below
                param: Any
                for param, state in self.optimizer.state.items():
                    for value in state.values():
                        ledger.note(value, OPTIMIZER if param.flat.home is None else HOME)
                self.optimizer.zero_grad()
                del loss
        finally:
            gc.enable()
        moved = [now - before for now, before in zip(self._moved(), total, strict=True)]
        return Step(segments_of(trace), trace.flops, *moved)

    def _moved(self) -> tuple[int, int, int]:
        total = shardproof.stats(self.model).total
        return total.bytes_gathered, total.bytes_reduced, self.home.crossed if self.home else 0


def segments_of(trace: Trace) -> dict[Key, Columns]:
    """What is live after each event, cut at the marks. Blocks of a pass are counted from its start (0, 1, ...) and from
    its end (-1, -2, ...); what lies outside of blocks is (name, 0)."""
    sizes, kinds = np.array(trace.sizes, dtype=np.float64), np.array(trace.kinds, dtype=np.int64)
    live = np.zeros(HOME + 1)
    np.add.at(live, kinds[trace.live], sizes[trace.live])
    events = np.array(trace.events, dtype=np.int64)
    numbers = np.where(events >= 0, events, ~events)
    changes = np.zeros((HOME + 1, len(events) + 1))
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
        short = len(columns_of) < FROM_START + FROM_END
        for i, columns in enumerate(columns_of):
            if short or i < FROM_START:
                found[word, i] = columns
            elif i >= len(columns_of) - FROM_END:
                found[word, i - len(columns_of)] = columns
            elif len(columns_of) > DEPTHS[-1]:  # at full depth nothing is left out
                found[word, i] = columns
    return found
