"""Run folders as a run leaves them, written by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

EVIL = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\"></script><!-- &lt;b&gt;"


def record(step: int, steps: int = 20, ranks: int = 2, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 5 * math.exp(-step / steps),
        "grad_norm": 1.5,
        "lr": 0.001,
        "tokens": 800,
        "tokens_per_second": 4000.0,
        "seconds": 0.2 * step,
        "memory": 2_000_000,
        "steps": steps,
        "ranks": {
            "tokens_per_second": [2000.0] * ranks,
            "seconds": [0.2] * ranks,
            "memory": [2_000_000] * ranks,
            "held": [1_000_000 + 500_000 * rank for rank in range(ranks)],
            "gathered": [64_000] * ranks,
            "reduced": [32_000] * ranks,
            "waited": [0.01] * ranks,
            "met": [0.01] * ranks,
        },
        **more,
    }


def timeline(rank: int = 0) -> dict[str, Any]:
    """Communication under way for 60 ms, of which 15 were waited for."""
    return {
        "step": 10,
        "rank": rank,
        "at": 0.0,
        "seconds": 0.1,
        "computed": [["forward", "root", 0.0, 0.01], ["forward", "layers.0", 0.01, 0.04], ["update", "", 0.08, 0.1]],
        "moved": [["gather", "layers.0", 64_000, 0.0, 0.005, 0.01], ["reduce", EVIL, 32_000, 0.02, 0.06, 0.07]],
        "met": [["end", 0.07, 0.075]],
        "cut": False,
    }


def run_folder(
    folder: Path, records: Sequence[dict[str, Any]], config: dict[str, Any] | None = None, ended: bool = True
) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    (folder / "config.yaml").write_text(yaml.safe_dump(config or {"model": "tiny", "stage": 3}))
    if ended:
        (folder / "model").mkdir()
    return folder
