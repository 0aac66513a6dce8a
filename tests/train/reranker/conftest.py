"""Small rows of queries with texts that answer them and that do not, and runs of `sft --task reranker`."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardproof.data.encoding.judged import INSTRUCTION, TASK
from shardproof.train.options.config import SftConfig
from train.embedding.conftest import NOISE, PAIRS, matches, texts_of
from train.rlhf.algorithms import Series, prepared_for
from train.seq_cls.conftest import series_of
from train.small_models import small_models


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`ranked`, 21 rows of one or two positives and one to three negatives, in ms-swift's form, and 13 more, `held`."""
    folder, chance, lines = tmp_path_factory.mktemp("ranked"), random.Random(3), []
    for row in matches(34, seed=3):
        others = [texts_of(chance, [chance.choice(list(PAIRS.values()))]) for _ in range(chance.randint(1, 3))]
        positives = [row["positive"]] + [row["positive"] + " the"] * chance.randrange(2)
        found = {
            "messages": [{"role": "user", "content": row["query"]}],
            "positive_messages": [[{"role": "assistant", "content": text}] for text in positives],
            "negative_messages": [[{"role": "assistant", "content": text}] for text in others],
        }
        lines.append(json.dumps(found))
    (folder / "ranked.jsonl").write_text("\n".join(lines[:21]) + "\n")
    (folder / "ranked-held.jsonl").write_text("\n".join(lines[21:]) + "\n")
    return {name: folder / f"{name}.jsonl" for name in ("ranked", "ranked-held")}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`decoder`, a Qwen3 with a chat template, `encoder`, a BERT, and `asked`, a decoder that knows "yes" and "no"."""
    words = [*NOISE, *PAIRS, *PAIRS.values()]
    texts = [text for row in matches(34) for text in (row["query"], row["positive"])]
    found = small_models(tmp_path_factory.mktemp("models"), texts, words)
    more = [*["yes", "no"] * 100, *[TASK, INSTRUCTION, "<Instruct>: <Query>: <Document>:"] * 50]
    asked = small_models(tmp_path_factory.mktemp("more"), texts + more, words)["decoder"]
    return found | {"asked": asked.rename(found["decoder"].with_name("asked"))}


@pytest.fixture
def trained(pools: Any, files: dict[str, Path], models: dict[str, Path], tmp_path: Path) -> Callable[..., Any]:
    """`trained(world, variants, *options)`: the records of a run with each of `variants` added."""

    def runs(world: int, variants: list[dict[str, Any]], *options: str) -> list[Series]:
        argv = ["--task", "reranker", "--dataset", str(files["ranked"]), "--val-dataset", str(files["ranked-held"])]
        argv += [option.replace("MODELS", str(models["decoder"].parent)) for option in options]
        prepared = prepared_for(argv, world, variants, Path(tempfile.mkdtemp(dir=tmp_path)), SftConfig)
        found: list[Series] = pools.run(world, series_of, prepared, timeout=300.0)[0]
        return found

    return runs
