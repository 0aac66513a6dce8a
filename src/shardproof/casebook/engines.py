"""The reference (one process), our engine, and the table of all engines. The peers' adapters are in `peers.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from shardproof.casebook.case import Case

Optimizers = Callable[[nn.Module], torch.optim.Optimizer]
FAMILIES = ("ours", "ddp", "fsdp2", "deepspeed")


def names_of(families: list[str], stages: list[int]) -> list[str]:
    """The engines to run: `ours-0` to `ours-3`, `ddp`, `fsdp2`, `deepspeed-1` to `deepspeed-3`."""
    names: list[str] = []
    for family in families:
        if family == "ours":
            names += [f"ours-{stage}" for stage in stages]
        elif family == "deepspeed":
            names += [f"deepspeed-{stage}" for stage in stages if stage > 0]
        else:
            names.append(family)
    return names


def make_engine(name: str, case: Case, options: Mapping[str, Any]) -> Engine:
    """The engine with this name; `one` is a single plain process."""
    from shardproof.casebook import peers

    family, _, stage = name.partition("-")
    kinds = {"one": One, "ours": Ours, "ddp": peers.DDP, "fsdp2": peers.FSDP2, "deepspeed": peers.DeepSpeed}
    return kinds[family](int(stage or 0), case, options)


class Engine:
    """Plain torch. An engine overrides what it does differently."""

    casts_inputs = False  # whether inputs must be in bfloat16, too

    def __init__(self, stage: int, case: Case, options: Mapping[str, Any]) -> None:
        self.stage, self.case, self.options = stage, case, options
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def prepare(self, model: nn.Module, make: Optimizers | None) -> tuple[Any, torch.optim.Optimizer | None]:
        """The object that the user calls from now on, and its optimizer; `make` is None for a model without trainable
        parameters."""
        return model, make(model) if make else None

    def bare(self, prepared: Any) -> nn.Module:
        return prepared

    def backward(self, prepared: Any, loss: Tensor, retain_graph: bool) -> None:
        loss.backward(retain_graph=retain_graph)

    def next_part(self, prepared: Any) -> None:
        """Called between two micro-batches of a step."""

    def step(self, prepared: Any, optimizer: torch.optim.Optimizer) -> Tensor | None:
        limit = float("inf") if self.case.clip is None else self.case.clip
        norm = nn.utils.clip_grad_norm_(prepared.parameters(), limit)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    def no_sync(self, prepared: Any) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16) if self.case.bf16 else contextlib.nullcontext()

    def join(self, prepared: list[Any]) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def gathered(self, parameters: list[nn.Parameter], edit: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def read(self, parameter: nn.Parameter) -> Tensor:
        return parameter

    def wait(self) -> None:
        if self.world > 1:
            dist.barrier()

    def next_stage(self) -> None:
        """Prepare further models at another stage, if the engine has stages."""

    def state(self, prepared: Any) -> dict[str, Tensor]:
        named = self.bare(prepared).named_parameters(remove_duplicate=False)
        return {name: p.detach().clone() for name, p in named}

    def load(self, prepared: Any, state: dict[str, Tensor]) -> None:
        self.bare(prepared).load_state_dict(state, strict=False)


class One(Engine):
    """One plain process: the reference."""

    def __init__(self, stage: int, case: Case, options: Mapping[str, Any]) -> None:
        self.stage, self.case, self.options = stage, case, options
        self.rank, self.world = 0, 1


class Ours(Engine):
    """`shardproof.shard` at one stage, with its defaults."""

    def prepare(self, model: nn.Module, make: Optimizers | None) -> tuple[Any, torch.optim.Optimizer | None]:
        import shardproof

        shardproof.shard(model, self.stage, mixed_precision=torch.bfloat16 if self.case.bf16 else None)
        return super().prepare(model, make)

    def next_stage(self) -> None:
        self.stage = (self.stage + 1) % 4

    def no_sync(self, prepared: Any) -> contextlib.AbstractContextManager[Any]:
        import shardproof

        return shardproof.no_sync(prepared)

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def state(self, prepared: Any) -> dict[str, Tensor]:
        import shardproof

        whole = shardproof.full_state_dict(prepared, rank0_only=False)
        return {name: whole[name] for name, _ in prepared.named_parameters(remove_duplicate=False)}

    def load(self, prepared: Any, state: dict[str, Tensor]) -> None:
        import shardproof

        shardproof.load_full_state_dict(prepared, state, strict=False)
