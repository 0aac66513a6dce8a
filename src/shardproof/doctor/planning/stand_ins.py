"""Stand-ins on the meta device for what does not exist there: other ranks, the host, kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from shardproof.doctor.planning.ledger import HELD, HOME, Ledger
from shardproof.errors import ConfigError
from shardproof.models.forward import without_adapters
from shardproof.train.losses.chunked import chunked_cross_entropy
from shardproof.train.losses.likeliest import distance
from shardproof.train.losses.shortcuts import chunked_loss, head_of, hidden_states, no_plain_head
from shardproof.train.model.activations import HeldByHost
from shardproof.train.options.config import ADAFACTOR, EIGHT_BITS, GALORE, MUON
from shardproof.zero.comm import collectives
from shardproof.zero.ranks import consensus
from shardproof.zero.schedule import home
from shardproof.zero.schedule.home import Home

if TYPE_CHECKING:
    from shardproof.doctor.config import PlanConfig

META = torch.device("meta")


class ImaginedHome(Home):
    """A second place on the meta device, which the ledger distinguishes.

    Attributes:
        crossed: bytes moved from or to this place.
    """

    def __init__(self, ledger: Ledger, frozen: bool) -> None:
        super().__init__(META, META, frozen)
        self.ledger, self.crossed, self.apart = ledger, 0, True
        self._leaving: list[torch.Tensor] = []

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        here = torch.empty(numel, dtype=dtype, device="meta")
        self.ledger.note(here, HOME)
        return here

    def place(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        here = self.take(values.numel(), dtype)
        self.crossed += here.nbytes
        self._leaving = [*self._leaving, values.to(dtype)][-home.AHEAD :]
        return here

    def bring(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        self.crossed += values.nbytes
        return torch.empty_like(values).to(dtype)  # it is cast at its destination

    def settle(self) -> None:
        self._leaving = []


class ImaginedHost(HeldByHost):
    """`--activation-offloading` between two places on the meta device.

    Attributes:
        crossed: bytes moved there or back.
    """

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(META, META)
        self.ledger, self.crossed = ledger, 0

    def _room(self, values: torch.Tensor) -> torch.Tensor:
        host = super()._room(values)
        self.ledger.note(host, HELD)
        self.crossed += host.nbytes
        return host

    def _copy_back(self, host: torch.Tensor) -> torch.Tensor:
        self.crossed += host.nbytes
        return torch.empty_like(host)


class Unfilled(TorchFunctionMode):
    """Skips random initialisation: on the meta device it takes time (3 ms for each linear layer), and there is nothing
    to fill."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return args[0] if func in (torch.Tensor.uniform_, torch.Tensor.normal_) else func(*args, **(kwargs or {}))


class AdamWStates(torch.optim.Optimizer):
    """Fused AdamW's state without its arithmetic: its kernel needs no other memory, but refuses the meta device."""

    def __init__(self, params: Any, lr: float = 1e-3, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and not self.state[p]:
                    self.state[p].update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))


@contextmanager
def autocast_off_on_meta() -> Iterator[None]:
    """PEFT disables autocast around adapters on experts, TRL asks whether it is on, and torch does not support it on
    the meta device. This is the only place where torch is patched temporarily: there is no other way, and nothing is
    trained in this process."""
    real, is_on = torch.autocast, torch.is_autocast_enabled

    def off(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return contextlib.nullcontext() if device_type == "meta" else real(device_type, *args, **kwargs)

    with mock.patch.multiple(torch, autocast=off, is_autocast_enabled=lambda *a: a != ("meta",) and is_on(*a)):
        yield


def distilled(logits: torch.Tensor, ids: torch.Tensor, written: bool) -> torch.Tensor:
    """GKD's loss, with a teacher's logits as well; every token is learned. `written`: plus the loss of sft."""
    from trl.experimental.gkd import GKDTrainer

    teacher, learnt = torch.empty_like(logits.detach()), torch.ones_like(logits[:, 1:, :1], dtype=torch.bool)
    apart = GKDTrainer.generalized_jsd_loss(logits[:, :-1], teacher[:, :-1], beta=0.5, reduction="none")
    loss: torch.Tensor = torch.where(learnt, apart, 0.0).sum()  # a copy, like the selection of learned tokens
    if written:
        loss = loss + torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    return loss


class Taught(NamedTuple):
    """GKD's loss over this many of the teacher's likeliest tokens, optionally plus the loss of sft."""

    topk: int
    written: bool

    def of(self, model: Any, inputs: dict[str, Any], ids: torch.Tensor) -> torch.Tensor:
        """The loss; the teacher's output exists before the model runs.

        Raises:
            ConfigError: the model has no head that can be applied to a few tokens at a time.
        """
        from trl.experimental.gkd import GKDTrainer

        if why := no_plain_head(model):
            raise ConfigError(f"--gkd-logits-topk: {why}. Leave --gkd-logits-topk out.")
        learnt = ids[:, 1:].ne(-100)
        tokens = ids[:, 1:][learnt][:, None].expand(-1, self.topk).contiguous()
        taught = tokens.float(), tokens
        hidden, head = hidden_states(model, inputs)[:, :-1][learnt], head_of(model)
        apart = partial(GKDTrainer.generalized_jsd_loss, beta=0.5, reduction="sum")
        loss = distance(hidden, head.weight, head.bias, taught, 1, apart)
        if self.written:
            loss = loss + chunked_cross_entropy(hidden, head.weight, head.bias, ids[:, 1:][learnt], 1)
        return loss


class WithExperts(NamedTuple):
    """GRPO's loss plus that of this many expert rows with this many tokens; both are kept for backward."""

    rows: int
    tokens: int

    def of(self, model: Any, inputs: dict[str, Any], ids: torch.Tensor) -> torch.Tensor:
        experts = ids.new_zeros(self.rows, self.tokens)
        answers: torch.Tensor = model(**inputs, labels=ids, fused_lm_head=True).log_probs.sum()
        return answers + chunked_loss(model, {"input_ids": experts, "labels": experts}, 1)


def contrasted(logits: torch.Tensor, ids: torch.Tensor, written: bool) -> torch.Tensor:
    """The loss of ORPO, CPO and SimPO: log-probabilities of both answers, the better ones in the first half of rows.
    `written`: whether these also have the loss of sft."""
    from trl.experimental.orpo import ORPOTrainer

    better = max(1, len(logits) // 2)
    learnt = torch.zeros((), device=logits.device)
    if written:
        learnt = torch.nn.functional.cross_entropy(logits[:better, :-1].flatten(0, 1), ids[:better, 1:].flatten())
    loss: torch.Tensor = ORPOTrainer.get_batch_logps(logits, ids).sum() + learnt
    return loss


def summed(outputs: Any) -> torch.Tensor:
    """A loss on the scores of rows, or on the hidden states of their last tokens."""
    found: torch.Tensor = outputs.logits if "logits" in outputs else outputs.last_hidden_state[:, -1]
    return found.float().sum()


def add_fused_head(model: Any) -> None:
    """What TRL's trainers that compare log-probabilities (dpo, kto, grpo, rloo) do to a model: it projects onto the
    vocabulary a few tokens at a time; here in plain operations, which take more memory than TRL's GPU kernels."""
    from trl.trainer.utils import add_fused_lm_head

    inner = without_adapters(model)
    add_fused_lm_head(inner, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))


def _eight_bits(params: Any, lr: float) -> torch.optim.Optimizer:
    """bitsandbytes' state without its arithmetic: its kernel needs no other memory."""
    from shardproof.train.optim.optimizers import adamw_8bit

    made: Any = adamw_8bit(params, lr=lr)
    made.update_step = lambda *_: None
    return made  # type: ignore[no-any-return]


def _by_chance(params: Any, lr: float, device: str) -> torch.optim.Optimizer:
    """The AdamW of --stochastic-rounding, limited to its first chunk, which takes as much as each."""
    from shardproof.train.optim.optimizers import AdamWBf16

    class OneChunk(AdamWBf16):
        def chunk(self, _: str) -> int:
            return super().chunk(device)

        def starts(self, count: int, size: int) -> range:
            return super().starts(min(count, size), size)

    return OneChunk(params, lr=lr)


def optimizer_of(config: PlanConfig) -> Callable[..., torch.optim.Optimizer]:
    """The factory of the optimizer in the options, see `optimizers.made_by`.

    Raises:
        ConfigError: no plugin has registered that name, or it does not take these arguments.
    """
    from shardproof.plugins import load
    from shardproof.train.optim.matrices import GaLoreAndAdamW, MuonAndAdamW, for_matrices
    from shardproof.train.optim.optimizers import adafactor, check_arguments

    check_arguments(config)
    given: Any = config.optimizer_arguments
    registered = load(config.external_plugins).find("optimizer", config.optimizer)
    if registered is not None or config.optimizer == ADAFACTOR:
        return partial(registered or adafactor, **given)
    if config.optimizer == EIGHT_BITS:
        return _eight_bits
    if config.optimizer in (MUON, GALORE):
        kind = MuonAndAdamW if config.optimizer == MUON else GaLoreAndAdamW
        states: Any = type(kind.__name__, (kind,), {"makers": kind.makers | {True: AdamWStates}})
        return partial(for_matrices, kind=states, **given)
    return partial(_by_chance, device=config.device) if config.stochastic_rounding else AdamWStates


@contextmanager
def fake_group(world: int) -> Iterator[None]:
    """Inside, this process is rank 0 of `world`.

    Raises:
        ConfigError: the process is already a rank.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ConfigError("A plan simulates its ranks: run it in a single process, without torchrun.")
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    try:
        yield
    finally:
        dist.destroy_process_group()
        # The next group has the same name, and may get the same address: the engine would mistake it for this one.
        collectives._second_groups.pop(name, None)
        consensus._streams.pop(name, None)
