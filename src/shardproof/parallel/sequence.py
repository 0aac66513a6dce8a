"""Sequence parallel: the ranks of a group hold a part of each row, and meet in attention.

Everything but attention looks at one token at a time, so a rank can do it for its part of a row. In attention each
rank takes some heads instead, and the whole row: an all-to-all before it scatters heads and gathers the row, one after
it turns back (Ulysses, https://arxiv.org/abs/2309.14509). Both hang in transformers' own register of attention
functions; nothing is patched. Accelerate's `sp_size` does the same, but only on DeepSpeed's engine, whose groups and
loss it takes.

A group's gradients need no care of their own: the loss of a rank is that of its part, divided by what all ranks learn,
and the engine adds gradients over all ranks, whatever part of whichever row they come from.

Which rows are packed into one is told by their positions. Masks are made of whole rows, so the ranks of a group keep
the positions of these, too.

A rank that waits in an all-to-all lends nothing to other groups, which may use other parts of the model (a tower). But
the ranks of a group want the same of the engine, in the same order: what one of them has of another group by the time
it waits, all of its group have, and come to it.
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
ATTENTIONS = "sdpa", "varlen"  # torch's: of all pairs of tokens, and of documents
NOT_OF_MODELS = (ShardproofError, torch.OutOfMemoryError, torch.AcceleratorError)


class SequenceParallel:
    """A group of `size` neighbouring ranks that share each row, and the attention they meet in.

    While it is entered (`with sequence:`), models given to `attach` take their inputs as parts of rows; outside they
    are as they were, so that whoever generates meanwhile finds an ordinary model. Collective: every rank makes one.

    Args:
        size: ranks of a group. Divides the number of ranks.
        device: type of the device that the ranks compute on.

    Attributes:
        rank: of this one in its group, which is also the number of its part.
        bytes_sent: to the others of its group, in attention, since it was made; of real steps and of trials.
        inside: how many decoders run on parts of rows at the moment.
        ends_padded: whether padding of their rows, if there is any, is on the right.
        positions: of the tokens of whole rows (rows, length), where rows are packed; else None.
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
        """Inside, models take whole rows, as outside of it all: each rank has rows of its own to ask about."""
        depth, self._depth = self._depth, 0
        try:
            yield
        finally:
            self._depth = depth

    @property
    def entered(self) -> bool:
        return self._depth > 0

    def attach(self, model: Any) -> None:
        """Let the decoder of a transformers model, before adapters, attend over the group.

        Raises:
            ConfigError: its attention is not torch's.
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
        """Of (rows, length, ...) this rank's part. Rows are filled up where the group's size does not divide them."""
        ends = [0, 0] * (whole.ndim - 2) + [0, -whole.shape[1] % self.size]
        return nn.functional.pad(whole, ends, value=fill).chunk(self.size, 1)[self.rank]

    def shifted(self, labels: torch.Tensor) -> torch.Tensor:
        """What each token of this rank's part is to predict, across the cut, too: int64 of shape (rows, length / size,
        rounded up), of `labels` of shape (rows, length)."""
        return self.part(nn.functional.pad(labels, (0, 1), value=IGNORE)[:, 1:], IGNORE).contiguous()

    def try_on(self, model: nn.Module, differences: Callable[[], Sequence[float]], device: Any) -> None:
        """See that rows in parts are rows to a model. Collective: every rank calls it.

        Args:
            differences: of what becomes of tokens and, if that is asked for, of the loss, to what they are in whole
                rows, as multiples of what rounding may do.
            device: of the model.

        Raises:
            ConfigError: one of them is more on any rank, or cannot be found out on this one, which then waits for none.
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
        """Whole rows (rows, length, ...) of the parts (rows, length / size, ...) of this group. Each rank's gradient of
        them counts: a part's is the sum of what all ask of it."""
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
        """transformers' signature, behind what attends in whole rows. Query, key and value: (rows, heads, part, size of
        a head)."""
        if not self._depth:
            return attend(module, query, key, value, attention_mask, **kwargs)
        kwargs.pop("position_ids", None)  # of this part; attention now sees the whole row
        if key.shape[1] < self.size:  # each head of keys goes to several ranks
            key, value = (x.repeat_interleave(self.size // x.shape[1], 1) for x in (key, value))
        query, key, value = (_AllToAll.apply(x, 1, 2, self) for x in (query, key, value))
        if (sinks := kwargs.get("s_aux")) is not None:  # a score of each head
            kwargs["s_aux"] = sinks.chunk(self.size)[self.rank]
        here = _Here(module, query.shape[1] // key.shape[1])
        out, _ = attend(here, query, key, value, attention_mask, **kwargs)  # (rows, length, heads here, size of a head)
        return _AllToAll.apply(out, 1, 2, self), None

    def _mask(
        self, make: Callable[..., Any], *, q_length: int, kv_length: int, attention_mask: Any = None, **kwargs: Any
    ) -> Any:
        """transformers' signature, behind what makes masks of whole rows, of which `attention_mask` is, too: bool of
        shape (rows, length)."""
        if self.inside:
            q_length = kv_length = q_length * self.size
            if self.positions is not None:
                attention_mask = None  # of none of them: see SharedRows.enter
                sees = _within(self.positions, kwargs.pop("mask_function", None))
                kwargs |= {"mask_function": sees, "allow_is_causal_skip": False}
            elif self.ends_padded and kwargs.get("allow_is_causal_skip", True):
                # Nobody who counts looks ahead at padding, and without a mask of all pairs attention takes less.
                attention_mask = None
        return make(q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, **kwargs)


def _within(positions: torch.Tensor, sees: Callable[..., Any] | None) -> Callable[..., Any]:
    """transformers' mask function of packed rows: what one of them sees, `sees` says, of positions in it."""
    from transformers.masking_utils import causal_mask_function

    sees = sees or causal_mask_function
    number = nn.functional.pad(positions[:, 1:] != positions[:, :-1] + 1, (1, 0)).cumsum(1)

    def within(row: Any, head: Any, query: Any, key: Any) -> Any:
        here = number[row, query] == number[row, key]
        return here & sees(row, head, positions[row, query], positions[row, key])

    return within


class _Here:
    """An attention module, but for how many heads of queries share one of keys on this rank."""

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
    """`check_heads` of a model of this config of transformers, if that says how many there are."""
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if heads:
        check_heads(heads, getattr(text, "num_key_value_heads", None) or heads, size)


def check_attention_of(kind: type, now: str | None) -> None:
    """Raise ConfigError unless the attention that models of a class have is torch's."""
    if now not in ATTENTIONS:
        way = "Take --attn sdpa, or leave" if getattr(kind, "_supports_sdpa", False) else "Leave"
        raise ConfigError(
            f"--sequence-parallel works with torch's attention ({', '.join(ATTENTIONS)}), and {kind.__name__} has "
            f"{now or 'its own'}. {way} --sequence-parallel out."
        )


def check_heads(heads: int, key_heads: int, size: int) -> None:
    """Raise ConfigError unless a model's heads can be dealt out to `size` ranks."""

    def fits(n: int) -> bool:
        return heads % n == 0 and (key_heads % n == 0 or n % key_heads == 0)

    if not fits(size):
        known = [str(n) for n in range(2, heads + 1) if fits(n)]
        raise ConfigError(
            f"--sequence-parallel {size}: the model has {heads} attention heads and {key_heads} of keys and values, "
            f"which cannot be dealt out to {size} processes.\n"
            + (f"It can be {', '.join(known)}." if known else "Leave it out.")
        )
