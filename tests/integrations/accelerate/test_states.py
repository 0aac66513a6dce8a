"""States of Accelerate's loops that have not one optimizer for each model: the losses go on as they were."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from integrations.accelerate.test_loops import IMPORTS, LOOPS, fresh

MUON: dict[str, Any] = {"lr": 0.01}


def prepared(accelerator: Any, layout: str) -> tuple[list[Any], list[Any]]:
    """One optimizer of two models, as where diffusers trains both; or two of one, Muon for its matrices."""
    from parts import make_model

    models = [make_model(), make_model()]
    if layout == "one optimizer of two models":
        groups = [{"params": list(models[0].parameters())}, {"params": list(models[1].parameters()), "lr": 0.02}]
        optimizers: list[Any] = [torch.optim.AdamW(groups, lr=0.01)]
    else:
        models, params = models[:1], list(models[0].parameters())
        optimizers = [
            torch.optim.Muon([p for p in params if p.ndim == 2], **MUON),
            torch.optim.AdamW([p for p in params if p.ndim != 2], lr=0.01),
        ]
    found = accelerator.prepare(*models, *optimizers)
    return list(found[: len(models)]), list(found[len(models) :])


def trained(accelerator: Any, models: list[Any], optimizers: list[Any], steps: range) -> list[float]:
    losses = []
    for k in steps:
        generator = torch.Generator().manual_seed(k)
        x = torch.randn(8, 6, generator=generator)[accelerator.process_index :: accelerator.num_processes]
        loss = sum((model(x) - number).square().mean() for number, model in enumerate(models))
        accelerator.backward(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def goes_on(layout: str, before: int, after: int, folder: str) -> tuple[list[float], list[float]]:
    from shardproof.integrations.accelerate import Accelerator

    sys.path.insert(0, str(LOOPS))
    fresh()
    accelerator = Accelerator(stage=before)
    models, optimizers = prepared(accelerator, layout)
    trained(accelerator, models, optimizers, range(3))
    accelerator.save_state(folder)
    sizes = [[len(group["params"]) for group in one.param_groups] for one in optimizers]
    expected = trained(accelerator, models, optimizers, range(3, 6))
    fresh()
    accelerator = Accelerator(stage=after)
    models, optimizers = prepared(accelerator, layout)
    accelerator.load_state(folder)
    assert [[len(group["params"]) for group in one.param_groups] for one in optimizers] == sizes
    got = trained(accelerator, models, optimizers, range(3, 6))
    for one, other in itertools.combinations(optimizers, 2):
        assert not {id(p) for p in one.state} & {id(p) for p in other.state}
    fresh()
    return got, expected


@pytest.mark.sampled
@pytest.mark.parametrize(("before", "after"), [(0, 0), (3, 3), (1, 3)])
@pytest.mark.parametrize("layout", ["one optimizer of two models", "two optimizers of one model"])
def test_a_loop_goes_on_with_other_numbers_of_optimizers(run2, tmp_path: Path, layout: str, before: int, after: int):
    for got, expected in run2(goes_on, layout, before, after, str(tmp_path), timeout=IMPORTS):
        assert got == pytest.approx(expected, abs=1e-4 if "two optimizers" in layout else 1e-6)
