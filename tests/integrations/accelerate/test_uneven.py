"""Loaders that deal rows out unevenly (`even_batches=False`): the rows of all, or a refusal on all."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from integrations.accelerate.test_loops import IMPORTS, fresh
from shardproof.errors import ConfigError


def gathered(rows: int, split: bool, objects: bool) -> list[float] | str:
    from accelerate import DataLoaderConfiguration

    from shardproof.integrations.accelerate import Accelerator

    fresh()
    dealt = DataLoaderConfiguration(even_batches=False, split_batches=split)
    accelerator = Accelerator(stage=3, dataloader_config=dealt)
    loader = torch.utils.data.DataLoader(torch.arange(float(rows)), batch_size=4 if split else 2)
    model, loader = accelerator.prepare(torch.nn.Linear(1, 1), loader)
    got: list[float] = []
    try:
        for batch in loader:
            model(batch[:, None])
            mine: Any = batch.tolist() if objects else {"row": batch, "all": batch.sum()}
            found = accelerator.gather_for_metrics(mine, use_gather_object=objects)
            got += found if objects else found["row"].tolist()
    except ConfigError as error:
        return str(error)
    finally:
        fresh()
    return got


@pytest.mark.parametrize(("split", "objects"), [(False, False), (True, False), (False, True)])
def test_the_rows_of_all_processes_are_gathered(run2, split: bool, objects: bool) -> None:
    for got in run2(gathered, 7, split, objects, timeout=IMPORTS):
        assert got == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    for got in run2(gathered, 8, split, objects, timeout=IMPORTS):
        assert got == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]


def test_a_round_that_lacks_processes_is_refused_on_all(run2) -> None:
    for told in run2(gathered, 9, False, False, timeout=IMPORTS):
        assert re.search(
            r"batch in the last round of this loader, which has 1 rows.*even_batches=True", str(told), re.S
        )


def evaluated(rows: int, even: bool, folder: str) -> float | str:
    from transformers import Trainer, TrainingArguments

    from shardproof.integrations.transformers import sharded

    class Small(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(1, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            y = self.linear(x[:, None])[:, 0]
            return {"loss": (y - labels).square().mean(), "logits": y}

    fresh()
    torch.manual_seed(0)
    args = TrainingArguments(
        folder, per_device_eval_batch_size=2, report_to=[], use_cpu=True, accelerator_config={"even_batches": even}
    )
    data = [{"x": float(row), "labels": 1.0} for row in range(rows)]
    try:
        trainer = sharded(Trainer)(
            model=Small(), args=args, eval_dataset=data, stage=3, compute_metrics=lambda p: {"sum": p.predictions.sum()}
        )
        return float(trainer.evaluate()["eval_sum"])
    except ConfigError as error:
        return str(error)
    finally:
        fresh()


def test_trainer_evaluates_the_rows_of_all(run2, tmp_path) -> None:
    expected = run2(evaluated, 7, True, str(tmp_path), timeout=IMPORTS)
    assert run2(evaluated, 7, False, str(tmp_path), timeout=IMPORTS) == pytest.approx(expected)
    assert all("batch in the last round" in told for told in run2(evaluated, 9, False, str(tmp_path)))
