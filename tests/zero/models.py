"""Small models for graphs. Sizes are odd on purpose: nothing divides evenly over 2 or 4 ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HIDDEN, CLASSES, FEATURES = 5, 7, 3, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, eps=0.1)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def inner(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.down(F.gelu(self.up(self.norm(h))))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.inner(h)


class Net(nn.Module):
    """Embed, blocks, norm, head: the shape of every transformer. (n, 6) -> (n, 3)"""

    def __init__(self, block: type[nn.Module] = Block, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH, eps=0.1)
        self.head = nn.Linear(WIDTH, CLASSES)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = self.run_block(block, h)
        return self.norm(h)

    def run_block(self, block: nn.Module, h: torch.Tensor) -> torch.Tensor:
        return block(h)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.encode(x))


class Averages(torch.optim.Optimizer):
    """As ScheduleFree: gradients are those of a point between `z`, which steps, and an average, which evaluates."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "train_mode": False})

    @torch.no_grad()
    def _change(self, training: bool) -> None:
        for group in self.param_groups:
            for p in group["params"] if group["train_mode"] != training else ():
                if "z" in self.state[p]:
                    p.lerp_(end=self.state[p]["z"], weight=0.1 if training else 1 - 1 / 0.9)
            group["train_mode"] = training

    def train(self) -> None:
        self._change(True)

    def eval(self) -> None:
        self._change(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["train_mode"]
            for p in (p for p in group["params"] if p.grad is not None):
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(end=z, weight=0.3)
                z.sub_(p.grad, alpha=0.1)
