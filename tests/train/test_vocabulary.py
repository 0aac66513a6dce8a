"""A token that the embedding has no row for is refused with its place, and not met by an index error in training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def runs(commands, sft, tiny: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`short` embeds fewer tokens than rows have, `padded` all of them but the one of its padding. `moved` has other
    numbers for two tokens."""
    import transformers

    base = tmp_path_factory.mktemp("models")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    for name, size in (("short", 200), ("padded", len(tokenizer))):
        shutil.copytree(tiny, base / name)
        config = transformers.AutoConfig.from_pretrained(tiny)
        config.vocab_size = size
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(base / name)
    shutil.copytree(tiny, base / "moved")
    said = json.loads((base / "moved" / "tokenizer.json").read_text())
    vocab = said["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (base / "moved" / "tokenizer.json").write_text(json.dumps(said))
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(base / "padded")
    pairs = base / "pairs.jsonl"
    pairs.write_text(json.dumps({"query": "a", "response": "b", "rejected_response": "c"}) + "\n")
    dpo = ["rlhf", "--rlhf-type", "dpo", "--dataset", str(pairs), "--output-dir", "OUT", "--max-steps", "1"]
    short, padded = (["--model", str(base / name)] for name in ("short", "padded"))
    return commands(
        [
            ("row", sft(*short)),
            ("packed", sft(*short, "--packing")),
            ("pad", sft(*padded)),
            ("pairs", [*dpo, *padded]),
            ("pair", [*dpo, *short]),
            ("reference", [*dpo, "--model", str(tiny), "--ref-model", str(base / "short")]),
            ("other", [*dpo, "--model", str(tiny), "--ref-model", str(base / "moved")]),
            ("grown", sft(*padded, "--new-special-tokens", "[PAD]", "--max-steps", "1")),
        ]
    )


def test_the_row_and_its_token_are_told(runs: Any, rows: Path) -> None:
    for name, where in (("row", f"{rows}:"), ("packed", f"{rows}: the row has "), ("pair", "pairs.jsonl:1: the row")):
        run = runs[name]
        assert run.code == 2, run.output
        said = " ".join(run.output.split())
        assert where in said
        assert "/short has 200 rows. Use the tokenizer that belongs to the model." in said
        assert not run.folder.exists()


def test_a_reference_is_to_read_the_tokens_of_the_model(runs: Any, tiny: Path) -> None:
    """Of fewer of them it ended in an index error on the ranks, and of others it judged other texts, without a word."""
    for name, said in (
        ("reference", "/short has 200 rows. It gets its tokens from"),
        ("other", "/moved has 'a' as token "),
    ):
        run = runs[name]
        assert run.code == 2, run.output
        told = " ".join(run.output.split())
        assert said in told
        assert f"its tokens from {tiny}: use a model with the same tokenizer" in told
        assert not run.folder.exists()


def test_so_is_what_rows_are_padded_with(runs: Any) -> None:
    for name in ("pad", "pairs"):
        assert runs[name].code == 2, runs[name].output
        assert "/padded: rows are padded with '[PAD]'" in " ".join(runs[name].output.split())
    assert "--new-special-tokens '[PAD]'" in runs["pad"].output
    assert "--new-special-tokens" not in runs["pairs"].output


def test_what_is_named_has_the_embedding_grow(runs: Any) -> None:
    assert runs["grown"].code == 0, runs["grown"].output
