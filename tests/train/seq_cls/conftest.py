"""Small rows with labels of every kind, a decoder and an encoder, and runs of `sft --task seq_cls` in ranks that are
there already."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardproof.train.options.config import SftConfig
from train.rlhf.algorithms import Series, prepared_for
from train.small_models import small_models

KINDS = {"low": "shard process memory", "high": "gradient weight model", "odd": "step rank every"}
WORDS = "the a gathers holds sends adds one".split()


def conversations(count: int) -> list[tuple[list[dict[str, str]], int]]:
    """Questions of very different lengths, and which kind of words is in each."""
    chance = random.Random(0)
    found = []
    for _ in range(count):
        kind = chance.randrange(len(KINDS))
        words = chance.choices(WORDS, k=chance.randint(1, 20)) + chance.choices(list(KINDS.values())[kind].split(), k=2)
        chance.shuffle(words)
        found.append(([{"role": "user", "content": " ".join(words)}], kind))
    return found


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`named`, `numbered`, `several`, `amount` and `amounts`: 21 rows each; `held`: 13 more, with names."""
    folder = tmp_path_factory.mktemp("labelled")
    names, chats = list(KINDS), conversations(34)
    labels: dict[str, Callable[[int], Any]] = {
        "named": lambda kind: names[kind],
        "numbered": lambda kind: kind,
        "several": lambda kind: [kind, (kind + 1) % 3] if kind else [],
        "amount": lambda kind: kind * 1.5 - 1,
        "amounts": lambda kind: [kind - 0.5, 2.0],
    }
    for name, label in labels.items():
        rows = [{"messages": turns, "label": label(kind), "id": i} for i, (turns, kind) in enumerate(chats)]
        lines = [json.dumps(row) for row in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines[:21]) + "\n")
        (folder / f"{name}-held.jsonl").write_text("\n".join(lines[21:]) + "\n")
    return {name: folder / f"{name}.jsonl" for name in [*labels, *(f"{name}-held" for name in labels)]}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`decoder`, a Qwen3 with a chat template, and `encoder`, a BERT without the pooler that a classifier has."""
    texts = [turns[0]["content"] for turns, _ in conversations(34)]
    words = [*WORDS, *" ".join(KINDS.values()).split()]
    return small_models(tmp_path_factory.mktemp("models"), texts, words)


def series_of(prepared: list[Any]) -> list[Series]:
    """Train them one after the other on this rank; the records of each, on rank 0."""
    import torch

    from shardproof.cli.quiet import after_imports, before_imports
    from shardproof.report.terminal import Silent
    from shardproof.train.run import recipe_of

    before_imports(local=True, verbose=False)
    after_imports(verbose=False)
    found = []
    for run in prepared:
        recipe_of(run.config).train(run, Silent())
        first = torch.distributed.get_rank() == 0
        text = (run.folder / "metrics.jsonl").read_text() if first else ""
        found.append([json.loads(line) for line in text.splitlines()])
    return found


@pytest.fixture
def trained(pools: Any, files: dict[str, Path], models: dict[str, Path], tmp_path: Path) -> Callable[..., Any]:
    """`trained(world, variants, *options)`: the records and the folder of a run with each of `variants` added."""

    def runs(world: int, variants: list[dict[str, Any]], *options: str) -> list[tuple[Series, Path]]:
        places = {"FILES": str(files["named"].parent), "MODELS": str(models["decoder"].parent)}
        argv = [] if "--task" in options else ["--task", "seq_cls"]
        for option in options:
            for name, value in places.items():
                option = option.replace(name, value)
            argv.append(option)
        prepared = prepared_for(argv, world, variants, Path(tempfile.mkdtemp(dir=tmp_path)), SftConfig)
        series = pools.run(world, series_of, prepared, timeout=300.0)[0]
        return [(found, run.folder) for found, run in zip(series, prepared, strict=True)]

    return runs
