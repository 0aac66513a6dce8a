"""Rows that several processes share, where what is learnt of a row is about all of it: `--sequence-parallel` of `rlhf`.

An answer is judged by all of its tokens, and who does it expects whole rows. So a row is cut where it enters the
decoder, in which nearly all of the work is done, and what becomes of its tokens is gathered behind it. To all else the
ranks of a group are ranks that have the same rows: each has their whole loss, and means over ranks are what they were.

A gradient of what was gathered is asked for by each rank of the group, and its part takes the sum of them. So all that
is trained has, over the ranks of a group, what a rank alone would have times their number: heads and what is judged
because each rank computes it, the decoder and what is in front of it because each rank's part counts so often.
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardproof.models.family import tried, without_adapters
from shardproof.models.laid_out import in_space, is_per_token, laid_out, put_in_places
from shardproof.parallel.sequence import SequenceParallel
from shardproof.train.batch import Batch
from shardproof.train.packed_files import PLACES
from shardproof.train.recorder import Recorder, tokens_in
from shardproof.zero.device import default_device

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object


@functools.lru_cache(maxsize=1)
def _group_of(size: int, ranks: Any) -> SequenceParallel:
    """One for all models of a run, among `ranks`, a process group."""
    return SequenceParallel(size, default_device().type)


class SharedRows:
    """The hooks of a decoder: while `sequence` is entered, it runs on this rank's part of each row."""

    def __init__(self, sequence: SequenceParallel, in_space: bool) -> None:
        self.sequence, self._in_space = sequence, in_space
        self._lengths: list[int | None] = []

    def enter(self, decoder: nn.Module, args: Any, given: dict[str, Any]) -> Any:
        tokens = [*args, given.get("input_ids"), given.get("inputs_embeds")]
        found = next((value for value in tokens if isinstance(value, Tensor) and value.ndim > 1), None)
        if not self.sequence.entered or found is None:
            self._lengths.append(None)
            return None
        rows = tuple(found.shape[:2])
        more = -rows[1] % self.sequence.size
        places = torch.arange(rows[0] * rows[1], device=found.device).view(rows)
        positions = torch.arange(rows[1] + more, device=found.device).expand(rows[0], -1)
        own = given.get("position_ids")
        if own is not None and own.ndim == 2:
            positions = nn.functional.pad(own.expand(rows), (0, more))
        places, positions = self._part(nn.functional.pad(places, (0, more), value=-1)), self._part(positions)
        args = tuple(put_in_places(value, places) if is_per_token(value, rows) else value for value in args)
        packed = laid_out(given, rows, places, positions, self._in_space) | {"use_cache": False}
        mask = lengthened(given.get("attention_mask"), more)
        if isinstance(mask, Tensor) and mask.ndim == 2:
            self.sequence.seen, mask = mask.bool(), self._part(mask)
        self._lengths.append(rows[1])
        return args, packed | {"attention_mask": mask}

    def leave(self, decoder: nn.Module, args: Any, output: Any) -> Any:
        length, self.sequence.seen = self._lengths.pop(), None
        return output if length is None or output is None else self._whole(output, length)

    def _part(self, whole: Tensor) -> Tensor:
        return whole.chunk(self.sequence.size, 1)[self.sequence.rank]

    def _whole(self, value: Any, length: int) -> Any:
        """What a decoder returns of parts, of whole rows."""
        if isinstance(value, Tensor):
            part = -(-length // self.sequence.size)
            return self.sequence.gather(value)[:, :length] if value.ndim == 3 and value.shape[1] == part else value
        if isinstance(value, dict):  # as outputs of transformers are
            for name, each in value.items():
                value[name] = self._whole(each, length)
            return value
        return tuple(self._whole(each, length) for each in value) if isinstance(value, tuple) else value


class SharesRows(Base):
    """The part of a trainer that knows which ranks share the rows of this one.

    Attributes:
        sequence: these ranks, to be entered where the model computes for them; a context that does nothing, otherwise.
    """

    recorder: Recorder
    batch_plan: Batch
    sequence: contextlib.AbstractContextManager[Any]

    def share(self, sequence: SequenceParallel | None) -> None:
        self.recorder.sequence, self.sequence = sequence, sequence or contextlib.nullcontext()

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        with self.sequence:
            return super().training_step(*args, **kwargs)

    def tokens_here(self, inputs: dict[str, Any]) -> Any:
        """How many tokens of a batch this rank computes."""
        return self._share_of(tokens_in(inputs), whole="shift_labels" not in inputs)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        whole = PLACES[0] in inputs or "shift_labels" not in inputs
        return int(self._share_of(super().floating_point_ops(inputs), whole))

    def _share_of(self, number: Any, whole: bool) -> Any:
        """Of a number of whole rows, which all ranks that share them have, so much that together it is that number."""
        ranks = self.batch_plan.sequence if whole else 1
        return (number + self.args.process_index % ranks) // ranks


def lengthened(mask: Any, more: int) -> Any:
    """A mask of rows, or of pairs of their tokens, with `more` tokens behind, which no other sees."""
    if isinstance(mask, dict):
        return {name: lengthened(value, more) for name, value in mask.items()}
    if mask is None or not more:
        return mask
    if mask.ndim == 2:
        return nn.functional.pad(mask, (0, more))
    seen, unseen = (True, False) if mask.dtype == torch.bool else (0.0, torch.finfo(mask.dtype).min)
    return nn.functional.pad(nn.functional.pad(mask, (0, more), value=unseen), (0, 0, 0, more), value=seen)


def share_whole_rows(model: Any, size: int) -> None:
    """Have the decoder of a model compute its rows together with the other ranks of its group. Collective. Where there
    are no ranks yet, it is only looked at.

    Raises:
        ConfigError: it has no attention for that.
    """
    if not dist.is_initialized():
        return
    sequence, decoder = _group_of(size, dist.group.WORLD), model.get_decoder()
    sequence.attach(model)
    hooks = decoder.shared_rows = SharedRows(sequence, in_space(model))
    # Before all others, also those by which the sequence knows where its masks are made.
    decoder.register_forward_pre_hook(hooks.enter, with_kwargs=True, prepend=True)
    decoder.register_forward_hook(hooks.leave, always_call=True)


def sequence_of(model: Any) -> SequenceParallel | None:
    """The ranks that share the rows of a model."""
    return next((part.shared_rows.sequence for part in model.modules() if hasattr(part, "shared_rows")), None)


def check_shared_rows(model: Any, ids: Tensor) -> None:
    """See that tokens of shared rows are those of rows alone. Collective: every rank calls it.

    Args:
        ids: some tokens, of shape (length,).

    Raises:
        ConfigError: they are something else, or could not be computed.
    """
    decoder = without_adapters(model).get_decoder()
    sequence: SequenceParallel = decoder.shared_rows.sequence
    mask = torch.ones(3, len(ids), dtype=torch.int64, device=ids.device)
    mask[1, len(ids) // 2 :] = mask[2, :2] = 0  # padding on either side
    met: list[list[Tensor]] = []
    handle = decoder.register_forward_hook(lambda *of: met.append(_tensors(of[-1], mask.bool())))

    def differences() -> list[float]:
        with tried(model):
            for within in (contextlib.nullcontext(), sequence):
                with within:
                    model(input_ids=ids.expand(3, -1), attention_mask=mask, use_cache=False)
        return [max(_off(*pair) for pair in zip(*met, strict=True))]

    try:
        sequence.try_on(model, differences, ids.device)
    finally:
        handle.remove()


def _tensors(output: Any, there: Tensor) -> list[Tensor]:
    """What a decoder returns, of tokens that are `there`: some also return what they make of one token of a row."""
    values = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else [output]
    found = [value.detach() for value in values if isinstance(value, Tensor)]
    return [value[there] if value.shape[:2] == there.shape else value for value in found]


def _off(alone: Tensor, shared: Tensor) -> float:
    """How far one is off the other, as a multiple of what rounding may do."""
    if alone.shape != shared.shape:
        return math.inf
    most = (1e-4 if alone.dtype == torch.float32 else 2e-2) * float(alone.abs().max())
    return float((alone - shared).abs().max()) / max(most, 1e-30)
