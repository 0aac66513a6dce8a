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

from shardproof.train.config import SftConfig
from train.rlhf.algorithms import Series, prepared_for

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
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        PreTrainedTokenizerFast,
        Qwen3Config,
        Qwen3ForCausalLM,
        set_seed,
    )

    from shardproof.models.tiny import train_tokenizer

    folder = tmp_path_factory.mktemp("models")
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokenizer = train_tokenizer([turns[0]["content"] for turns, _ in conversations(34)])
    set_seed(0)
    config = Qwen3Config(vocab_size=512, num_key_value_heads=1, head_dim=16, max_position_embeddings=256, **small)
    Qwen3ForCausalLM(config).save_pretrained(folder / "decoder")
    tokenizer.save_pretrained(folder / "decoder")

    marks = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3}
    words = [*WORDS, *" ".join(KINDS.values()).split()]
    known = marks | {word: i for i, word in enumerate(words, len(marks))}
    made = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    encoder = PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=16, **special)
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    BertForMaskedLM(
        BertConfig(vocab_size=len(known), max_position_embeddings=16, pad_token_id=0, **small, **still)
    ).save_pretrained(folder / "encoder")
    encoder.save_pretrained(folder / "encoder")
    return {name: folder / name for name in ("decoder", "encoder")}


def series_of(prepared: list[Any]) -> list[Series]:
    """Train them one after the other on this rank; the records of each, on rank 0."""
    import torch

    from shardproof.cli.quiet import after_imports, before_imports
    from shardproof.report.terminal import Silent
    from shardproof.train import seq_cls

    before_imports(local=True, verbose=False)
    after_imports(verbose=False)
    found = []
    for run in prepared:
        seq_cls.train(run, Silent())
        first = torch.distributed.get_rank() == 0
        text = (run.folder / "metrics.jsonl").read_text() if first else ""
        found.append([json.loads(line) for line in text.splitlines()])
    return found


@pytest.fixture
def trained(pools: Any, files: dict[str, Path], models: dict[str, Path], tmp_path: Path) -> Callable[..., Any]:
    """`trained(world, variants, *options)`: the records and the folder of a run with each of `variants` added."""

    def runs(world: int, variants: list[dict[str, Any]], *options: str) -> list[tuple[Series, Path]]:
        places = {"FILES": str(files["named"].parent), "MODELS": str(models["decoder"].parent)}
        argv = ["--task", "seq_cls"]
        for option in options:
            for name, value in places.items():
                option = option.replace(name, value)
            argv.append(option)
        prepared = prepared_for(argv, world, variants, Path(tempfile.mkdtemp(dir=tmp_path)), SftConfig)
        series = pools.run(world, series_of, prepared, timeout=300.0)[0]
        return [(found, run.folder) for found, run in zip(series, prepared, strict=True)]

    return runs
