"""Promise: the page on moving from FSDP2 shows two scripts that do the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "moving-from-fsdp.md"


def scripts() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S)


def run_script(text: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of a script, and the weights that it ends with."""
    chance = torch.Generator().manual_seed(torch.distributed.get_rank())
    batches = [tuple(torch.randn(4, 16, generator=chance) for _ in range(2)) for _ in range(4)]
    names: dict[str, Any] = {"batches": batches}
    exec(compile(text, str(PAGE), "exec"), names)
    return names["losses"], names["weights"]


def test_both_scripts_give_the_same_numbers(run2):
    theirs, ours = (run2(run_script, text) for text in scripts())
    for (losses, _), (wanted, _) in zip(ours, theirs, strict=True):
        assert losses == pytest.approx(wanted, abs=1e-6)
        assert losses[-1] != pytest.approx(losses[0], abs=1e-3)  # it trained
    weights, wanted = ours[0][1], theirs[0][1]
    assert weights.keys() == wanted.keys()
    for name, value in weights.items():
        assert torch.allclose(value, wanted[name], atol=1e-6), name
