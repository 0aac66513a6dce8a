"""Promise: the strategy for PyTorch Lightning that docs/moving-from-fsdp.md shows has the numbers of one process, and
goes on from its checkpoints."""

from __future__ import annotations

import contextlib
import os
import unittest.mock
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from integrations.test_moving_from_fsdp import scripts

pytest.importorskip("pytorch_lightning")

WIDTH, ROWS = 16, 48


def strategy(stage: int) -> Any:
    """As the page has it."""
    from pytorch_lightning.plugins.environments import TorchElasticEnvironment

    (code,) = (script for script in scripts() if "DDPStrategy" in script)
    names: dict[str, Any] = {}
    exec(code, names)
    return names["Sharded"](stage, cluster_environment=TorchElasticEnvironment())


def module() -> Any:
    import pytorch_lightning

    class Module(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)])
            self.head = nn.Linear(WIDTH, 4)

        def loss(self, batch: list[torch.Tensor], name: str) -> torch.Tensor:
            loss = nn.functional.cross_entropy(self.head(self.net(batch[0])), batch[1])
            self.log(name, loss, sync_dist=True, on_step=False, on_epoch=True)
            return loss

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            return self.loss(batch, "loss")

        def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
            self.loss(batch, "val")

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)]

    return Module()


def loader(rank: int, world: int) -> Any:
    """Of this rank, so that a step of all has the rows that it has in one process."""
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(ROWS, WIDTH, generator=draw), torch.randint(0, 4, (ROWS,), generator=draw)
    rows = torch.utils.data.TensorDataset(x[rank::world], y[rank::world])
    return torch.utils.data.DataLoader(rows, batch_size=8 // world)


@contextlib.contextmanager
def launched(stage: int | None) -> Iterator[tuple[int, int]]:
    """What torchrun says, which Lightning asks for. Yields this rank, and of how many it is one."""
    if stage is None:
        yield 0, 1
        return
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    said = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "TORCHELASTIC_RUN_ID": "here"}
    with unittest.mock.patch.dict(os.environ, said | {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}):
        yield rank, world


def fit(folder: str, stage: int | None) -> list[dict[str, float]]:
    """Two epochs, and a third of a run that goes on."""
    with launched(stage) as (rank, world):
        return [fit_once(folder, stage, rank, world, *run) for run in ((2, None), (3, f"{folder}/last.ckpt"))]


def fit_once(folder: str, stage: int | None, rank: int, world: int, epochs: int, begin: str | None) -> dict[str, float]:
    import pytorch_lightning

    keep = pytorch_lightning.callbacks.ModelCheckpoint(folder, save_last=True, monitor="val")
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu",
        devices=world,
        strategy="auto" if stage is None else strategy(stage),
        max_epochs=epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        callbacks=[keep],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module(), loader(rank, world), loader(rank, world), ckpt_path=begin)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow), 3])
def test_two_ranks_equal_one_process_and_go_on(run2, tmp_path: Path, stage: int) -> None:
    wanted = fit(str(tmp_path / "one"), None)
    assert wanted[1]["loss"] < wanted[0]["loss"]
    for found in run2(fit, str(tmp_path / "two"), stage, timeout=120):
        assert found == [pytest.approx(numbers, abs=1e-5) for numbers in wanted]
    one, two = (torch.load(tmp_path / of / "last.ckpt", weights_only=False)["state_dict"] for of in ("one", "two"))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=1e-5, rtol=0)
