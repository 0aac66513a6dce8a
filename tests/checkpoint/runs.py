"""Runs that are saved, and go on elsewhere."""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardproof
from distributed.two_devices import DEVICE, two_devices
from shardproof.train.optim.matrices import MuonAndAdamW
from zero.models import Averages, Net

BATCH = 24  # for 1, 2, 3, 4 and 8 ranks


class Mixed(Net):
    """Tied and frozen weights, buffers, a scalar, an empty parameter and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Linear(6, 5)
        self.tied.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.unused = nn.Parameter(torch.randn(4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(3, 2).t())
        self.register_buffer("rebuilt", torch.zeros(2), persistent=False)
        self.blocks[1].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps += 1
            self.seen += 1
        return super().forward(x) * self.scale + self.tied(x).sum(-1, keepdim=True)


class Noisy(Mixed):
    """Its forward draws random numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(x), 0.2, self.training) * (1 + 0.1 * random.random())


def lora() -> nn.Module:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["up", "down"], modules_to_save=["head"])
    return peft.get_peft_model(Net(), config)  # type: ignore[arg-type]


def adamw(params: Any) -> torch.optim.Optimizer:
    """Two groups."""
    params = list(params)
    return torch.optim.AdamW(
        [{"params": params[::2]}, {"params": params[1::2], "lr": 3e-2, "weight_decay": 0.0}], lr=1e-2, eps=1e-4
    )


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9)


def fused(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-4, fused=True)


class Job:
    """A model, its optimizer and its scheduler under one stage."""

    def __init__(
        self, stage: int, build: Callable[[], nn.Module], optimizer: Any = adamw, seed: int = 7, **options: Any
    ) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        self.model = shardproof.shard(build(), stage, **options)
        self.optimizer = optimizer(p for p in self.model.parameters() if p.requires_grad)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, total_iters=9)
        fp16 = options.get("mixed_precision") is torch.float16
        self.scaler = torch.amp.GradScaler("cpu", 2.0**8, growth_interval=2, enabled=fp16)
        self.optimizer._step_supports_amp_scaling = False  # as under Trainer
        self.objects = {"scheduler": self.scheduler, **({"scaler": self.scaler} if fp16 else {})}
        self.has_modes = hasattr(self.optimizer, "eval")
        self.step = 0
        there = dist.is_initialized()
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if there else (0, 1)

    def train(self, steps: int) -> list[float]:
        """The mean loss of all ranks in each step."""
        return [self._step() for _ in range(steps)]

    def _step(self) -> float:
        if self.has_modes:
            self.optimizer.train()
        generator = torch.Generator().manual_seed(self.step)
        x, y = torch.randn(BATCH, 6, generator=generator), torch.randn(BATCH, 3, generator=generator)
        share = BATCH // self.world
        mine = slice(self.rank * share, (self.rank + 1) * share)
        loss = F.mse_loss(self.model(x[mine]), y[mine])
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.model.zero_grad()
        self.scheduler.step()
        self.step += 1
        total = loss.detach().double()
        if self.world > 1:
            dist.all_reduce(total)
        return float(total / self.world)

    def save(self, path: Any, **options: Any) -> Any:
        if self.has_modes:
            self.optimizer.eval()
        return shardproof.save(self.model, self.optimizer, path, step=self.step, **self.objects, **options)

    def load(self, path: Any) -> None:
        self.step = shardproof.load(self.model, self.optimizer, path, **self.objects)["step"]

    def result(self) -> dict[str, torch.Tensor]:
        """The weights, and the scale of the loss."""
        weights = shardproof.full_state_dict(self.model, rank0_only=False)
        return weights | {"scale of the loss": torch.tensor(self.scaler.get_scale())}


BUILDS = {"mixed": Mixed, "noisy": Noisy, "lora": lora}


def adafactor(params: Any) -> torch.optim.Optimizer:
    """Its state has shapes of its own, and each parameter is updated whole by one rank."""
    return torch.optim.Adafactor(params, lr=3e-2)


def muon(params: Any) -> torch.optim.Optimizer:
    """It takes matrices only; the rest is not trained."""
    return torch.optim.Muon([p for p in params if p.dim() == 2], lr=1e-2, ns_steps=2)  # bf16 is slow on a CPU


def muon_and_adamw(params: Any) -> torch.optim.Optimizer:
    """One optimizer of both kinds: matrices are updated whole by their owners, the rest in slices on every rank."""
    params = list(params)
    whole, rest = ([p for p in params if (p.dim() == 2) is wanted] for wanted in (True, False))
    return MuonAndAdamW([{"params": whole}, {"params": rest, "elementwise": True}], lr=1e-2)


OPTIMIZERS = {
    "adamw": adamw,
    "momentum": momentum,
    "fused": fused,
    "adafactor": adafactor,
    "muon": muon,
    "muon and adamw": muon_and_adamw,
    "modes": Averages,
}
BF16, FP16 = {"mixed_precision": torch.bfloat16}, {"mixed_precision": torch.float16}
FILES = {"offload": f"nvme:{tempfile.gettempdir()}"}
HOST = {"offload": "all", "device": DEVICE}


def devices(options: dict[str, Any]) -> Any:
    """Two of them for an offload from one to the other."""
    return two_devices() if "device" in options else contextlib.nullcontext()


def before_and_after(stage: int, build: str, optimizer: str, options: dict[str, Any], path: Any) -> Any:
    """Three steps, a checkpoint, three more."""
    with devices(options):
        job = Job(stage, BUILDS[build], OPTIMIZERS[optimizer], **options)
        job.train(3)
        saving = job.save(path)
        losses = job.train(3)  # while it is being written
        saving.wait()
        return losses, job.result()


def after(stage: int, build: str, optimizer: str, options: dict[str, Any], path: Any) -> Any:
    """The three steps after the checkpoint, by a job that began otherwise."""
    with devices(options):
        job = Job(stage, BUILDS[build], OPTIMIZERS[optimizer], seed=99, **options)
        job.load(path)
        return job.train(3), job.result()


def leg(stage: int, build: str, optimizer: str, options: dict[str, Any], begin: Any, end: Any, steps: int) -> Any:
    """Some steps from the checkpoint `begin`, if any, and a checkpoint `end` after them."""
    with devices(options):
        job = Job(stage, BUILDS[build], OPTIMIZERS[optimizer], seed=7 if begin is None else 99, **options)
        if begin is not None:
            job.load(begin)
        losses = job.train(steps)
        job.save(end, asynchronous=False)
        return losses, job.result()


def check_equal(got: Any, expected: Any, tolerance: float) -> None:
    """Losses and weights are the same; bit for bit if `tolerance` is 0."""
    assert len(got[0]) == len(expected[0])
    for a, b in zip(got[0], expected[0], strict=True):
        assert abs(a - b) <= tolerance * max(1.0, abs(b)), f"loss {a} instead of {b}"
    assert got[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        error = (got[1][name].double() - value.double()).abs().max().item() if value.numel() else 0.0
        scale = max(1.0, value.abs().max().item()) if value.numel() else 1.0
        assert error <= tolerance * scale, f"{name} is off by {error:.3g}"
