"""Small rows of queries and what matches them, a decoder and an encoder, and runs of `sft --task embedding` in ranks
that are there already."""

from __future__ import annotations

import itertools
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardproof.train.options.config import SftConfig
from train.rlhf.algorithms import Series, prepared_for
from train.seq_cls.conftest import series_of
from train.small_models import small_models

# What a query asks for by one word, a text that matches says by the other.
PAIRS = {"cat": "meows", "dog": "barks", "cow": "moos", "owl": "hoots", "bee": "buzzes", "hen": "clucks"}
PAIRS |= {"pig": "grunts", "frog": "croaks", "duck": "quacks", "wolf": "howls", "lion": "roars", "snake": "hisses"}
NOISE = "the a with near under big small".split()


def texts_of(chance: random.Random, words: list[str]) -> str:
    found = [*words, *chance.choices(NOISE, k=chance.randint(0, 6))]
    chance.shuffle(found)
    return " ".join(found)


def matches(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Each with a query, its positive, and none to two negatives."""
    chance, found = random.Random(seed), []
    for _ in range(count):
        asked = chance.sample(list(PAIRS), 2)
        others = [chance.sample(list(PAIRS), 2) for _ in range(chance.randrange(3))]
        found.append(
            {
                "query": texts_of(chance, asked),
                "positive": texts_of(chance, [PAIRS[word] for word in asked]),
                "negative": [
                    texts_of(chance, [PAIRS[word] for word in other]) for other in others if set(other) != set(asked)
                ],
            }
        )
    return found


def combinations(seed: int = 2) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """200 rows, and 16 more, of each of which the two words were never asked for together."""
    chance = random.Random(seed)
    both = list(itertools.combinations(PAIRS, 2))
    chance.shuffle(both)

    def row(asked: tuple[str, ...]) -> dict[str, str]:
        texts = texts_of(chance, list(asked)), texts_of(chance, [PAIRS[word] for word in asked])
        return dict(zip(("anchor", "positive"), texts, strict=True))

    return [row(asked) for asked in both[16:] * 4], [row(asked) for asked in both[:16]]


def as_swift(row: dict[str, Any]) -> dict[str, Any]:
    def turns(text: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": text}]

    found = {"messages": turns(row["query"]), "positive_messages": [turns(row["positive"])]}
    return found | ({"negative_messages": [turns(text) for text in row["negative"]]} if row["negative"] else {})


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`matched` in ms-swift's form, 21 rows, and 13 more, `held`; `scored`, 21 pairs with labels, and 13 more."""
    folder = tmp_path_factory.mktemp("matches")
    rows, chance = matches(34), random.Random(1)
    lines = [json.dumps(as_swift(row)) for row in rows]
    scored = [
        json.dumps({"query": row["query"], "response": text, "label": float(text == row["positive"])})
        for row in rows
        for text in [chance.choice([row["positive"], *row["negative"]])]
    ]
    for name, some in (("matched", lines), ("scored", scored)):
        (folder / f"{name}.jsonl").write_text("\n".join(some[:21]) + "\n")
        (folder / f"{name}-held.jsonl").write_text("\n".join(some[21:]) + "\n")
    for name, more in zip(("many", "many-held"), combinations(), strict=True):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, more)) + "\n")
    names = [f"{name}{held}" for name in ("matched", "scored", "many") for held in ("", "-held")]
    return {name: folder / f"{name}.jsonl" for name in names}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`decoder`, a Qwen3, and `encoder`, a BERT."""
    words = [*NOISE, *PAIRS, *PAIRS.values()]
    texts = [text for row in matches(34) for text in (row["query"], row["positive"])]
    return small_models(tmp_path_factory.mktemp("models"), texts, words)


@pytest.fixture
def trained(pools: Any, files: dict[str, Path], models: dict[str, Path], tmp_path: Path) -> Callable[..., Any]:
    """`trained(world, variants, *options)`: the records and the folder of a run with each of `variants` added."""

    def runs(world: int, variants: list[dict[str, Any]], *options: str) -> list[tuple[Series, Path]]:
        places = {"FILES": str(files["matched"].parent), "MODELS": str(models["decoder"].parent)}
        argv = ["--task", "embedding"]
        for option in options:
            for name, value in places.items():
                option = option.replace(name, value)
            argv.append(option)
        prepared = prepared_for(argv, world, variants, Path(tempfile.mkdtemp(dir=tmp_path)), SftConfig)
        series = pools.run(world, series_of, prepared, timeout=300.0)[0]
        return [(found, run.folder) for found, run in zip(series, prepared, strict=True)]

    return runs
