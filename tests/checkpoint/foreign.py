"""Training under another engine that saves, then goes on. `python foreign.py FOLDER ENGINE...`, as one rank of several.

Engines: zero1, zero2, zero3, bf16, robin1, robin2, pieces, thin1, thin2, thin3 (DeepSpeed), fsdp2 (torch), accelerate
(FSDP2 under it). Rank 0 writes the losses after the checkpoint to FOLDER/ENGINE/losses.json.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

BATCH = 8
# DeepSpeed has an optimizer of its own for bf16 whose gradients are added up in fp32.
BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
# Flat masters that lie otherwise: in another order, with gaps, and in several tensors for a group.
ROBIN = {"round_robin_gradients": True}
GAPS = {"round_robin_gradients": True, "parameter_alignment": True}
PIECES = {"sub_group_size": 20}


class Small(nn.Module):
    """Tied and frozen weights, a buffer, a bias; sizes that two ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Linear(7, 5)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 5)) for _ in range(3)])
        self.tied = nn.Linear(7, 5, bias=False)
        self.tied.weight = self.embed.weight
        self.head = nn.Linear(5, 3)
        self.register_buffer("scale", torch.tensor([1.5, 0.5, 1.0]))
        self.blocks[1].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        return self.head(h + self.tied(x)) * self.scale


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups."""
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 3e-2, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)


def rows(step: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(BATCH, 7, generator=generator), torch.randn(BATCH, 3, generator=generator)
    mine = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    return x[mine], y[mine]


def mean(loss: torch.Tensor) -> float:
    total = loss.detach().float()
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return float(total)


def under_deepspeed(
    stage: int, zero: dict[str, Any], more: dict[str, Any], saving: dict[str, Any], folder: Path, rank: int, world: int
) -> list[float]:
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    model = Small()
    config = {
        "train_micro_batch_size_per_gpu": BATCH // world,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        **more,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config, dist_init_required=False)

    def step(number: int) -> float:
        x, y = rows(number, rank, world)
        loss = F.mse_loss(engine(x.to(model.head.weight.dtype)).float(), y)
        engine.backward(loss)
        engine.step()
        return mean(loss)

    for number in range(3):
        step(number)
    engine.save_checkpoint(str(folder), tag="global_step3", client_state={"epoch": 4}, **saving)
    return [step(number) for number in range(3, 6)]


def under_fsdp2(folder: Path, rank: int, world: int) -> list[float]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Small()
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model)

    def step(number: int) -> float:
        x, y = rows(number, rank, world)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return mean(loss)

    for number in range(3):
        step(number)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state, "step": 3}, checkpoint_id=str(folder / "dcp"))
    return [step(number) for number in range(3, 6)]


def under_accelerate(folder: Path, rank: int, world: int) -> list[float]:
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", reshard_after_forward=True
    )
    accelerator = Accelerator(cpu=True)
    # Accelerate offers FSDP on accelerators only; told otherwise, the same code runs on the CPU.
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    PartialState().distributed_type = DistributedType.FSDP
    model = Small()
    model, optimizer = accelerator.prepare(model, adamw(model))

    def step(number: int) -> float:
        x, y = rows(number, rank, world)
        loss = F.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return mean(loss)

    for number in range(3):
        step(number)
    accelerator.save_state(str(folder / "state"))
    return [step(number) for number in range(3, 6)]


def main(place: str, *kinds: str) -> None:
    """Each kind in a folder of its own."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    runs: dict[str, Any] = {"fsdp2": under_fsdp2, "accelerate": under_accelerate}
    runs |= {f"zero{stage}": partial(under_deepspeed, stage, {}, {}, {}) for stage in (1, 2, 3)}
    runs["bf16"] = partial(under_deepspeed, 1, {}, BF16, {})
    runs["robin1"] = partial(under_deepspeed, 1, ROBIN, {}, {})
    runs["robin2"] = partial(under_deepspeed, 2, GAPS, {}, {})
    runs["pieces"] = partial(under_deepspeed, 3, PIECES, {}, {})
    thin = {"exclude_frozen_parameters": True}
    runs |= {f"thin{stage}": partial(under_deepspeed, stage, {}, {}, thin) for stage in (1, 2, 3)}
    for kind in kinds:
        folder = Path(place) / kind
        folder.mkdir(exist_ok=True)
        losses = runs[kind](folder, rank, world)
        if rank == 0:
            (folder / "losses.json").write_text(json.dumps(losses))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
