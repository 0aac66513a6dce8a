"""Rows shared by several processes: `--sequence-parallel`.

A row is split where it enters the decoder, which does nearly all of the work. Everything before the decoder sees full
rows: embeddings of files have their place among the tokens, and so have three-dimensional positions and pairwise masks.

The causal loss of `sft` is a sum over tokens, and each rank can compute its own: after the decoder there are only
parts, and `shift_labels` in a batch says what each of their tokens is to predict. All other losses (pairs, scores,
labels) need full rows, which are gathered after the decoder. To everything else, the ranks of a group are then ranks
that have the same rows: each has the full loss, and means over ranks do not change. Each rank of the group asks for the
gradient of what was gathered, and its part receives their sum. So summed over the ranks of a group, every trained
parameter has the gradient that a single rank would have, times the size of the group: heads because each rank computes
them, the decoder and everything before it because each rank's part counts that many times.
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardproof.models.attention.laid_out import change_tensors, in_space, laid_out
from shardproof.models.forward import tried, without_adapters
from shardproof.parallel.sequence import SequenceParallel
from shardproof.train.options.batch import Batch
from shardproof.train.watching.recorder import Recorder, tokens_in
from shardproof.zero.device import default_device

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object

FEW = 16  # tokens


@functools.lru_cache(maxsize=1)
def _group_of(size: int, ranks: Any) -> SequenceParallel:
    """The one group for all models of a run, among `ranks`, a process group."""
    return SequenceParallel(size, default_device().type)


class SharedRows:
    """The hooks of a decoder: while `sequence` is entered, it runs on this rank's part of each row. `gathers`: its
    outputs are gathered to full rows."""

    def __init__(self, sequence: SequenceParallel, in_space: bool, gathers: bool) -> None:
        self.sequence, self.gathers, self._in_space = sequence, gathers, in_space
        self._entered: list[tuple[int, ...] | None] = []
        self._last: Tensor | None = None

    def enter(self, decoder: nn.Module, args: Any, given: dict[str, Any]) -> Any:
        tokens = [*args, given.get("input_ids"), given.get("inputs_embeds")]
        found = next((value for value in tokens if isinstance(value, Tensor) and value.ndim > 1), None)
        if not self.sequence.entered or found is None:
            self._entered.append(None)
            return None
        rows = tuple(found.shape[:2])
        more = -rows[1] % self.sequence.size
        places = torch.arange(rows[0] * rows[1], device=found.device).view(rows)
        positions = torch.arange(rows[1] + more, device=found.device).expand(rows[0], -1)
        own, mask = given.get("position_ids"), given.get("attention_mask")
        self._last = positions[0, rows[1] - 1] if own is None else own.max()
        if (told := _by_rows(own)) is not None:
            behind = told[:, -1:] + torch.arange(1, more + 1, device=told.device)
            positions = torch.cat([told, behind], 1).expand(rows[0], -1)
            begins_anew = positions.is_meta or bool((positions.diff() != 1).any())  # packed rows: positions restart
            if mask is None and begins_anew:
                self.sequence.positions = positions
                mask = torch.ones(rows, dtype=torch.int64, device=positions.device)  # else the decoder uses its part
        places, positions = self.sequence.part(places, -1), self.sequence.part(positions)
        args, packed = laid_out(args, given, rows, places, positions, self._in_space)
        mask = lengthened(mask, more)
        if isinstance(mask, Tensor) and mask.ndim == 2:
            self.sequence.ends_padded = mask.is_meta or bool((mask[:, 1:] <= mask[:, :-1]).all())
        self.sequence.inside += 1
        self._entered.append(rows)
        return args, packed | {"use_cache": False, "attention_mask": mask}

    def leave(self, decoder: nn.Module, args: Any, output: Any) -> Any:
        rows = self._entered.pop()
        if rows is None:
            return output
        self.sequence.inside -= 1
        self.sequence.ends_padded, self.sequence.positions = False, None
        return change_tensors(output, lambda value: self._whole(value, rows)) if self.gathers else output

    def with_last(self, rotary: nn.Module, args: Any, given: dict[str, Any]) -> Any:
        """Some rotary embeddings scale by the last position: here the last one of the full rows is appended to each
        part."""
        if not self.sequence.inside:
            return None

        def added(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.is_floating_point():
                return value
            last = cast("Tensor", self._last).to(value)
            return torch.cat([value.clamp(max=last), last.expand(*value.shape[:-1], 1)], -1)

        return tuple(map(added, args)), {name: added(value) for name, value in given.items()}

    def without_last(self, rotary: nn.Module, args: Any, output: Any) -> Any:
        return change_tensors(output, lambda value: value[..., :-1, :]) if self.sequence.inside else output

    def _whole(self, value: Tensor, rows: tuple[int, ...]) -> Tensor:
        """A decoder's output for parts, gathered to full rows; also for router scores of shape (tokens, experts)."""
        part = -(-rows[1] // self.sequence.size)
        if value.ndim == 3 and value.shape[1] == part:
            return self.sequence.gather(value)[:, : rows[1]]
        if value.ndim == 2 and len(value) == rows[0] * part:
            return self.sequence.gather(value.unflatten(0, (rows[0], part)))[:, : rows[1]].flatten(0, 1)
        return value


def _by_rows(positions: Tensor | None) -> Tensor | None:
    """The positions, among those given to a decoder, that tell where rows end: they come first if there are also
    positions in time and space."""
    if positions is None or positions.ndim == 2:
        return positions
    return positions[0] if len(positions) == 4 else None


class SharesRows(Base):
    """The part of a trainer that knows which ranks share the rows of this one.

    Attributes:
        sequence: these ranks, a context to enter while the model computes shared rows; otherwise a context that does
            nothing.
        in_parts: whether it computes parts of rows.
    """

    recorder: Recorder
    batch_plan: Batch
    sequence: contextlib.AbstractContextManager[Any]
    in_parts: bool

    def share(self, shared: SharedRows | None) -> None:
        self.in_parts = shared is not None and not shared.gathers
        self.recorder.sequence = sequence = None if shared is None else shared.sequence
        self.sequence = sequence or contextlib.nullcontext()

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        with self.sequence:
            return super().training_step(*args, **kwargs)

    def tokens_here(self, inputs: dict[str, Any]) -> Any:
        """How many tokens of a batch this rank computes."""
        return self._share_of(tokens_in(inputs))

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        return int(self._share_of(super().floating_point_ops(inputs)))

    def _share_of(self, number: Any) -> Any:
        """This rank's share of a number counted over full rows; the shares of the ranks in a group add up to it."""
        ranks = self.batch_plan.sequence
        return (number + self.args.process_index % ranks) // ranks


def lengthened(mask: Any, more: int) -> Any:
    """A mask of rows, or of pairs of their tokens, extended by `more` tokens that no other token sees."""
    if isinstance(mask, dict):
        return {name: lengthened(value, more) for name, value in mask.items()}
    if mask is None or not more:
        return mask
    if mask.ndim == 2:
        return nn.functional.pad(mask, (0, more))
    seen, unseen = (True, False) if mask.dtype == torch.bool else (0.0, torch.finfo(mask.dtype).min)
    return nn.functional.pad(nn.functional.pad(mask, (0, more), value=unseen), (0, 0, 0, more), value=seen)


def share_rows_of(model: Any, size: int, gathers: bool) -> None:
    """Make the decoder of a model, before adapters, compute its rows together with the other ranks of its group.
    Collective. Does nothing if torch.distributed is not initialised yet.

    Args:
        gathers: whether its outputs are gathered to full rows.

    Raises:
        ConfigError: its attention does not support that.
    """
    if not dist.is_initialized():
        return
    sequence, decoder = _group_of(size, dist.group.WORLD), model.get_decoder()
    sequence.attach(model)
    hooks = decoder.shared_rows = SharedRows(sequence, in_space(model), gathers)
    decoder.register_forward_pre_hook(hooks.enter, with_kwargs=True, prepend=True)
    decoder.register_forward_hook(hooks.leave, always_call=True)
    for part in decoder.modules():
        if _scales_by_length(part):
            part.register_forward_pre_hook(hooks.with_last, with_kwargs=True)
            part.register_forward_hook(hooks.without_last)


def _scales_by_length(part: nn.Module) -> bool:
    """Whether it computes rotary frequencies that depend on the length of rows, judged by the names in transformers."""
    kinds = getattr(part, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds)


def shared_rows_of(model: Any) -> SharedRows | None:
    """The hooks of a model that shares rows."""
    return next((part.shared_rows for part in model.modules() if hasattr(part, "shared_rows")), None)


def check_shared_rows(model: Any, ids: Tensor) -> None:
    """Check that shared rows give the same results as rows on one rank. Collective: every rank calls it.

    Args:
        ids: some tokens, of shape (length,), the same on all ranks.

    Raises:
        ConfigError: they differ, or could not be computed.
    """
    mask = torch.ones(3, len(ids), dtype=torch.int64, device=ids.device)
    mask[1, len(ids) // 2 :] = mask[2, :2] = 0
    for padded in (mask[:2], mask):  # on the right, and on both sides
        compare(model, {"input_ids": ids.expand(len(padded), -1), "attention_mask": padded})


def check_packed_in_parts(model: Any, inputs: dict[str, Any]) -> None:
    """Check that shared packed rows give the same results as packed rows on one rank. Collective: every rank calls it.

    Args:
        inputs: a batch, of which the first tokens are used.

    Raises:
        ConfigError: they differ, or could not be computed.
    """
    ids = _first_tokens(inputs)
    lengths = [3, FEW // 2, FEW - FEW // 2 - 3]
    positions = torch.cat([torch.arange(length, device=ids.device) for length in lengths])
    compare(model, {"input_ids": ids, "position_ids": positions[None]})


def compare(model: Any, inputs: dict[str, Any], real: Tensor | None = None) -> None:
    """Check that a decoder's outputs for shared rows match those for rows on one rank. Collective: every rank calls it.

    Args:
        inputs: for the model, the same on the ranks of a group.
        real: bool, of shape (rows, length) as the decoder has them: which tokens are not padding. By default, the mask
            of the inputs.

    Raises:
        ConfigError: they differ, or could not be computed.
    """
    decoder = without_adapters(model).get_decoder()
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool() if real is None else real
    hooks: SharedRows = decoder.shared_rows
    met: list[list[Tensor]] = []
    handle = decoder.register_forward_hook(lambda *of: met.append(_tensors(of[-1])))

    def differences() -> list[float]:
        with tried(model):
            for within in (contextlib.nullcontext(), hooks.sequence):
                with within:
                    model(**inputs, use_cache=False)
        return [max(_off(alone, shared) for alone, shared in zip(*met, strict=True))]

    def _off(alone: Tensor, shared: Tensor) -> float:
        """How far one is from the other, as a multiple of the error allowed for rounding. Padding is ignored."""
        there = mask if alone.shape[:2] == mask.shape else None
        if there is not None and not hooks.gathers:
            alone, there = hooks.sequence.part(alone), hooks.sequence.part(there)
        if alone.shape != shared.shape:
            return math.inf
        alone, shared = finite(alone), finite(shared)
        most = (1e-4 if alone.dtype == torch.float32 else 2e-2) * float(alone.abs().max())
        off = (alone - shared).abs() if there is None else (alone - shared)[there].abs()
        return float(off.max()) / max(most, 1e-30) if off.numel() else 0.0

    try:
        hooks.sequence.try_on(model, differences, mask.device)
    finally:
        handle.remove()


def check_loss_of_parts(model: Any, inputs: dict[str, Any]) -> None:
    """Check that the causal losses of parts add up to that of full rows. Collective: every rank calls it.

    Args:
        inputs: a batch, of which the first tokens are used.

    Raises:
        ConfigError: they do not, because the loss looks at other tokens or does not use `shift_labels`.
    """
    sequence = without_adapters(model).get_decoder().shared_rows.sequence
    ids = _first_tokens(inputs)
    whole = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

    def differences() -> list[float]:
        with tried(model):
            known = model(**whole, num_items_in_batch=1, use_cache=False).loss.detach().double()
            with sequence:
                mine = model(**whole, shift_labels=sequence.shifted(ids), num_items_in_batch=1, use_cache=False).loss
        total = mine.detach().double()
        dist.all_reduce(total, group=sequence.group)
        rounding = 1e-4 if mine.dtype == torch.float32 else 5e-2
        total, known = finite(total), finite(known)
        return [0.0, float((total - known).abs() / known.abs().clamp(min=1e-6)) / rounding]

    sequence.try_on(model, differences, ids.device)


def _first_tokens(inputs: dict[str, Any]) -> Tensor:
    """The first tokens of a batch, of shape (1, FEW)."""
    ids = inputs["input_ids"].flatten()
    return cast("Tensor", ids.repeat(-(-FEW // len(ids)))[None, :FEW])


def finite(value: Tensor) -> Tensor:
    """With zeros in place of values that are not finite: the first step reports those."""
    return value.nan_to_num(0.0, 0.0, 0.0)


def _tensors(output: Any) -> list[Tensor]:
    """The tensors that a decoder returns, including those not per token: some compute one result per row."""
    values = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else [output]
    return [value.detach() for value in values if isinstance(value, Tensor)]
