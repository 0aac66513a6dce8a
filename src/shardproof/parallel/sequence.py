"""Sequence parallelism: each rank of a group has a part of each row, and the ranks communicate in attention.

Everything but attention looks at one token at a time, so a rank can do it for its part of a row. In attention each rank
instead takes some of the heads and the full row: an all-to-all before it scatters heads and gathers the row, and one
after it does the reverse (Ulysses, https://arxiv.org/abs/2309.14509). Both are registered through transformers' own
interface for attention functions; nothing is patched. Accelerate's `sp_size` does the same, but only with DeepSpeed,
whose groups and loss it uses.

Gradients of a group need no special handling: a rank's loss is that of its part, divided by the number of tokens
learned on all ranks, and the engine sums gradients over all ranks, whichever part of whichever row they come from.

Positions tell apart the rows packed into one. Masks are made for full rows, so the ranks of a group also keep the
positions of full rows.

A rank that waits in an all-to-all provides no parameters to other groups, which may use other parts of the model (a
tower). But the ranks of a group ask the engine for the same things in the same order: whatever one of them has received
from another group by the time it waits, its whole group has received, so all of them get to the all-to-all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardproof.errors import ConfigError, ShardproofError
from shardproof.zero.comm.connections import is_closed_connection
from shardproof.zero.comm.world import may_take_long
from shardproof.zero.device import widest_float

IGNORE = -100
ATTENTIONS = "sdpa", "varlen"  # both from torch: over all pairs of tokens, and over documents
NOT_OF_MODELS = (ShardproofError, torch.OutOfMemoryError, torch.AcceleratorError)


class SequenceParallel:
    """A group of `size` neighbouring ranks that share each row, and the attention across them.

    While it is entered (`with sequence:`), models passed to `attach` take parts of rows as inputs; outside they work as
    usual, so that generation sees an ordinary model. Collective: every rank creates one.

    Args:
        size: the number of ranks in a group. Divides the number of all ranks.
        device: the type of the ranks' devices.

    Attributes:
        rank: this process's rank in its group, which is also the index of its part.
        bytes_sent: bytes sent to the others of the group in attention since creation, in training steps and trials.
        inside: the number of decoders currently running on parts of rows.
        ends_padded: whether padding of the rows, if any, is on the right.
        positions: the positions of the tokens of full rows (rows, length), if rows are packed; else None.
    """

    inside = 0
    ends_padded = False
    positions: torch.Tensor | None = None

    def __init__(self, size: int, device: str) -> None:
        ranks = dist.get_world_size()
        mesh = init_device_mesh(device, (ranks // size, size), mesh_dim_names=("rows", "sequence"))
        may_take_long(*mesh.get_all_groups())
        self.size, self.group, self.rank = size, mesh.get_group("sequence"), mesh.get_local_rank("sequence")
        self.name = f"sequence_parallel_{self.group.group_name}"
        self._depth = self.bytes_sent = 0

    def __enter__(self) -> SequenceParallel:
        self._depth += 1
        return self

    def __exit__(self, *error: object) -> None:
        self._depth -= 1

    @contextmanager
    def left(self) -> Iterator[None]:
        """A context in which models take full rows, as if `sequence` was not entered: each rank has its own rows."""
        depth, self._depth = self._depth, 0
        try:
            yield
        finally:
            self._depth = depth

    @property
    def entered(self) -> bool:
        return self._depth > 0

    def attach(self, model: Any) -> None:
        """Make the decoder of a transformers model (before adapters are added) attend across the group.

        Raises:
            ConfigError: its attention implementation is not one of torch's.
        """
        from transformers import AttentionInterface, AttentionMaskInterface

        decoder = model.get_decoder()
        alone = getattr(decoder.config, "_attn_implementation", None)
        check_attention_of(type(model), alone)
        name = f"{self.name}_{alone}"
        AttentionInterface.register(name, partial(self._attention, AttentionInterface()[alone]))
        AttentionMaskInterface.register(name, partial(self._mask, AttentionMaskInterface()[alone]))
        decoder.set_attn_implementation(name)

    def part(self, whole: torch.Tensor, fill: int = 0) -> torch.Tensor:
        """This rank's part of a tensor (rows, length, ...). Rows are padded to a multiple of the group's size."""
        ends = [0, 0] * (whole.ndim - 2) + [0, -whole.shape[1] % self.size]
        return nn.functional.pad(whole, ends, value=fill).chunk(self.size, 1)[self.rank]

    def shifted(self, labels: torch.Tensor) -> torch.Tensor:
        """The next-token targets for this rank's part, also across the boundary between parts: int64 of shape (rows,
        length / size, rounded up), from `labels` of shape (rows, length)."""
        return self.part(nn.functional.pad(labels, (0, 1), value=IGNORE)[:, 1:], IGNORE).contiguous()

    def try_on(self, model: nn.Module, differences: Callable[[], Sequence[float]], device: Any) -> None:
        """Check that a model gives the same results for rows in parts. Collective: every rank calls it.

        Args:
            differences: returns the differences of the outputs for tokens and, if requested, of the loss, compared with
                full rows, as multiples of the tolerance for rounding.
            device: the model's device.

        Raises:
            ConfigError: a difference exceeds 1 on any rank, or cannot be computed on this one, which then does not wait
                for the others.
        """
        name, off = type(model).__name__, torch.zeros(2, dtype=widest_float(device), device=device)
        try:
            for i, each in enumerate(differences()):
                off[i] = each
        except Exception as error:
            if isinstance(error, NOT_OF_MODELS) or is_closed_connection(error):
                raise
            raise ConfigError(
                f"--sequence-parallel: {name} cannot be tried on rows in parts: {type(error).__name__}: "
                f"{str(error).strip()[:400]}\nLeave --sequence-parallel out if it runs without."
            ) from error
        dist.all_reduce(off, dist.ReduceOp.MAX)
        if not bool((off <= 1).all()):
            what = "the loss" if off[0] <= 1 else "what becomes of a token"
            raise ConfigError(
                f"--sequence-parallel: in {name}, {what} depends on how a row is cut into parts: "
                "something beside attention looks at other tokens.\nLeave --sequence-parallel out."
            )

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Full rows (rows, length, ...) from the parts (rows, length / size, ...) of this group. Gradients of all ranks
        count: the gradient of a part is the sum over the ranks."""
        whole: torch.Tensor = _Gather.apply(part, self)
        return whole

    def _attention(
        self,
        attend: Callable[..., Any],
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """An attention function with transformers' signature, after `attend`, which attends over full rows. Query, key
        and value: (rows, heads, part, head size)."""
        if not self._depth:
            return attend(module, query, key, value, attention_mask, **kwargs)
        kwargs.pop("position_ids", None)  # positions of this part only; attention now sees the full row
        if key.shape[1] < self.size:  # each key head goes to several ranks
            key, value = (x.repeat_interleave(self.size // x.shape[1], 1) for x in (key, value))
        query, key, value = (_AllToAll.apply(x, 1, 2, self) for x in (query, key, value))
        if (sinks := kwargs.get("s_aux")) is not None:  # one score per head
            kwargs["s_aux"] = sinks.chunk(self.size)[self.rank]
        here = _Here(module, query.shape[1] // key.shape[1])
        out, _ = attend(here, query, key, value, attention_mask, **kwargs)  # (rows, length, heads here, head size)
        return _AllToAll.apply(out, 1, 2, self), None

    def _mask(
        self, make: Callable[..., Any], *, q_length: int, kv_length: int, attention_mask: Any = None, **kwargs: Any
    ) -> Any:
        """A mask function with transformers' signature, after `make`, which makes masks of full rows. `attention_mask`
        is that of full rows, too: bool of shape (rows, length)."""
        if self.inside:
            q_length = kv_length = q_length * self.size
            if self.positions is not None:
                attention_mask = None  # packed rows have none: see SharedRows.enter
                sees = _within(self.positions, kwargs.pop("mask_function", None))
                kwargs |= {"mask_function": sees, "allow_is_causal_skip": False}
            elif self.ends_padded and kwargs.get("allow_is_causal_skip", True):
                # No learned token attends to padding after it, and attention without a full mask is cheaper.
                attention_mask = None
        return make(q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, **kwargs)


def _within(positions: torch.Tensor, sees: Callable[..., Any] | None) -> Callable[..., Any]:
    """A mask function of transformers for packed rows: within each row, `sees` decides, given positions in that row."""
    from transformers.masking_utils import causal_mask_function

    sees = sees or causal_mask_function
    number = nn.functional.pad(positions[:, 1:] != positions[:, :-1] + 1, (1, 0)).cumsum(1)

    def within(row: Any, head: Any, query: Any, key: Any) -> Any:
        here = number[row, query] == number[row, key]
        return here & sees(row, head, positions[row, query], positions[row, key])

    return within


class _Here:
    """An attention module with another number of query heads per key head, that of this rank."""

    def __init__(self, module: nn.Module, groups: int) -> None:
        self.module, self.num_key_value_groups = module, groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


class _AllToAll(torch.autograd.Function):
    """Scatter dimension `scatter` over the group and gather dimension `gather`; backward does the reverse."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scatter: int, gather: int, sequence: SequenceParallel) -> torch.Tensor:
        ctx.turned = gather, scatter, sequence
        sent = torch.stack(x.chunk(sequence.size, scatter))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=sequence.group)
        sequence.bytes_sent += sent.nbytes * (sequence.size - 1) // sequence.size
        return torch.cat(received.unbind(), gather)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _AllToAll.apply(gradients[0], *ctx.turned), None, None, None


class _Gather(torch.autograd.Function):
    """See `SequenceParallel.gather`."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, sequence: SequenceParallel) -> torch.Tensor:
        ctx.sequence = sequence
        parts = [torch.empty_like(part) for _ in range(sequence.size)]
        dist.all_gather(parts, part.contiguous(), group=sequence.group)
        sequence.bytes_sent += part.nbytes * (sequence.size - 1)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        sequence = ctx.sequence
        sent = torch.stack(gradients[0].chunk(sequence.size, 1))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=sequence.group)
        sequence.bytes_sent += sent.nbytes * (sequence.size - 1) // sequence.size
        return received.sum(0), None


def check_heads_of(config: Any, size: int) -> None:
    """`check_heads` for a model with this transformers config, if the config has the numbers of heads."""
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if heads:
        check_heads(heads, getattr(text, "num_key_value_heads", None) or heads, size)


def check_attention_of(kind: type, now: str | None) -> None:
    """Raise ConfigError unless the attention implementation of a model class is one of torch's."""
    if now not in ATTENTIONS:
        way = "Take --attn sdpa, or leave" if getattr(kind, "_supports_sdpa", False) else "Leave"
        raise ConfigError(
            f"--sequence-parallel works with torch's attention ({', '.join(ATTENTIONS)}), and {kind.__name__} has "
            f"{now or 'its own'}. {way} --sequence-parallel out."
        )


def check_heads(heads: int, key_heads: int, size: int) -> None:
    """Raise ConfigError unless a model's heads can be divided among `size` ranks."""

    def fits(n: int) -> bool:
        return heads % n == 0 and (key_heads % n == 0 or n % key_heads == 0)

    if not fits(size):
        known = [str(n) for n in range(2, heads + 1) if fits(n)]
        raise ConfigError(
            f"--sequence-parallel {size}: the model has {heads} attention heads and {key_heads} of keys and values, "
            f"which cannot be dealt out to {size} processes.\n"
            + (f"It can be {', '.join(known)}." if known else "Leave it out.")
        )
