"""The same training as script.py in one plain process: the reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(self.head(x), y)


def train(steps: int = 6, accumulation: int = 2, clip: float = 0.3) -> dict[str, list[float]]:
    """Losses of the micro-batches, gradient norms of the steps, and the rate of each."""
    torch.manual_seed(0)
    model = Net()
    nn.init.ones_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    record: dict[str, list[float]] = {"losses": [], "norms": [], "rates": []}
    for step in range(steps):
        rate = 1e-3 + (1e-2 - 1e-3) * min(max(step - 1, 0) / 4, 1.0)
        optimizer.param_groups[0]["lr"] = rate
        for micro in range(accumulation):
            generator = torch.Generator().manual_seed(1000 + step * accumulation + micro)
            x, y = torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)
            loss = model(x, y)
            (loss / accumulation).backward()
            record["losses"].append(loss.item())
        record["norms"].append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        record["rates"].append(rate)
        optimizer.step()
        optimizer.zero_grad()
    return record


def configuration(stage: int) -> dict[str, Any]:
    """The file that goes with script.py."""
    return {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.3,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10_000,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,
            "reduce_bucket_size": 1_000_000,
            "stage3_param_persistence_threshold": 0,
        },
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-2, "betas": [0.9, 0.99], "weight_decay": 0.1, "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {
                "warmup_min_lr": 1e-3,
                "warmup_max_lr": 1e-2,
                "warmup_num_steps": 4,
                "warmup_type": "linear",
            },
        },
    }
