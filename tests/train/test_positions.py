"""Rows longer than the positions that a model has learnt are refused with their place, and not met by an index error
in mid-training; where positions are computed, nothing is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shardproof.train.model.positions import learnt_positions, positions_for

pytestmark = pytest.mark.slow

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> dict[str, Path]:
    """A GPT-2 and an OPT with the tokenizer of `tiny`, of 24 positions."""
    import transformers

    base = tmp_path_factory.mktemp("models")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    size = {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    gpt2 = transformers.GPT2Config(n_positions=24, n_embd=32, n_layer=1, n_head=2, **size)
    opt = transformers.OPTConfig(max_position_embeddings=24, ffn_dim=48, word_embed_proj_dim=32, **SMALL, **size)
    for name, config in (("gpt2", gpt2), ("opt", opt)):
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(base / name)
        tokenizer.save_pretrained(base / name)
    return {name: base / name for name in ("gpt2", "opt")}


@pytest.fixture(scope="module")
def runs(commands, sft, models: dict[str, Path], rows: Path, tmp_path_factory: pytest.TempPathFactory):
    pairs = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    row = {"query": "the rank", "response": "a step", "rejected_response": "memory"}
    long = row | {"response": "a step " * 30}
    pairs.write_text("".join(json.dumps(one) + "\n" for one in [row, row, long, row]))
    dpo = ["rlhf", "--rlhf-type", "dpo", "--dataset", str(pairs), "--output-dir", "OUT", "--max-steps", "1"]
    grpo = ["rlhf", "--rlhf-type", "grpo", "--dataset", str(pairs), "--output-dir", "OUT", "--reward-funcs", "length"]

    def of(name: str, *more: str) -> list[str]:
        return sft("--model", str(models[name]), "--max-steps", "1", *more)

    gpt2 = ["--model", str(models["gpt2"])]
    return commands(
        [
            ("gpt2", of("gpt2")),
            ("opt", of("opt")),
            ("held out", of("gpt2", "--max-length", "512", "--dataset", str(pairs), "--val-dataset", str(rows))),
            ("packed", of("gpt2", "--packing")),
            ("streamed", of("gpt2", "--streaming")),
            ("dropped", of("gpt2", "--max-length", "24")),
            ("cut", of("opt", "--max-length", "24", "--truncation", "right")),
            ("packed short", of("gpt2", "--max-length", "24", "--packing")),
            ("pairs", [*dpo, *gpt2]),
            ("short pairs", [*dpo, *gpt2, "--max-length", "24", "--global-batch-size", "1"]),
            ("answers", [*grpo, *gpt2, "--max-completion-length", "16", "--num-generations", "2"]),
            ("doctor", ["doctor", *gpt2, "--dataset", str(rows), "--plan", "no"]),
            ("asked", ["infer", str(models["gpt2"]), "--prompt", "the rank", "--max-new-tokens", "200"]),
            ("asked long", ["infer", str(models["opt"]), "--prompt", "the rank " * 30]),
        ]
    )


@pytest.mark.parametrize("name", ["gpt2", "opt", "packed", "pairs"])
def test_the_row_and_both_numbers_are_told(runs: Any, models: dict[str, Path], rows: Path, name: str) -> None:
    run = runs[name]
    assert run.code == 2, run.output
    said = " ".join(run.output.split())
    assert f"/{name if name == 'opt' else 'gpt2'} has learned only 24 positions." in said
    assert "Give --max-length 24: --truncation drop decides what happens to longer rows." in said
    where = {"packed": f"{rows}: the row has ", "pairs": "pairs.jsonl:3: the row has "}.get(name, f"{rows}:")
    assert where in said
    assert "IndexError" not in said
    assert not run.folder.exists()


def test_so_it_is_of_a_stream_and_of_answers_to_come(runs: Any) -> None:
    for name, text in (
        ("streamed", "--max-length 1024: rows may be that long, but"),
        ("answers", "the prompt and --max-completion-length 16 take up to"),
    ):
        assert runs[name].code == 2, runs[name].output
        assert text in " ".join(runs[name].output.split())
        assert "24 positions" in runs[name].output
    assert "Lower --max-completion-length" in runs["answers"].output


@pytest.mark.parametrize("name", ["dropped", "cut", "packed short", "short pairs"])
def test_with_the_length_that_is_named_it_trains(runs: Any, name: str) -> None:
    assert runs[name].code == 0, runs[name].output


def test_rows_to_evaluate_on_count_too_and_doctor_tells(runs: Any, rows: Path) -> None:
    assert runs["held out"].code == 2, runs["held out"].output
    assert runs["doctor"].code == 1, runs["doctor"].output
    said = " ".join(runs["doctor"].output.split())
    assert "has learned only 24 positions" in said
    assert "--max-length" in said


def test_an_answer_ends_with_the_positions(runs: Any) -> None:
    assert runs["asked"].code == 0, runs["asked"].output
    assert (
        runs["asked"].output.count("An answer ends with the last of the 24 positions that the model has learned") == 1
    )
    assert runs["asked long"].code == 2, runs["asked long"].output
    assert "has learned only 24 positions" in " ".join(runs["asked long"].output.split())


def test_a_question_that_leaves_no_room_is_told_by_its_line(models: dict[str, Path], tmp_path: Path) -> None:
    """Before anything is written; or it is left out."""
    from shardproof.errors import DataError
    from shardproof.train.answers.chat import Chat
    from shardproof.train.answers.rows import answer_rows
    from shardproof.train.answers.sampling import Sampling

    file, out = tmp_path / "rows.jsonl", tmp_path / "answers.jsonl"
    rows = [{"query": "the rank"}, {"query": "the rank " * 30}, {"prompt": "the rank"}, {"prompt": "a step " * 30}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    chat = Chat(models["gpt2"])
    how: Any = ([str(file)], {}, None, out, Sampling(max_new_tokens=2), 3)
    with pytest.raises(DataError, match=r"2 of 4 rows") as refused:
        list(answer_rows(chat, *how))
    for line in (2, 4):
        told = rf"rows.jsonl:{line}: the question has \d+ tokens, and the model in \S+ has learned only 24 positions"
        assert re.search(told, str(refused.value)), refused.value
    assert not out.exists()
    *_, (done, total, bad) = answer_rows(chat, *how, bad_rows="skip")
    assert (done, total, [row.line for row in bad]) == (2, 2, [2, 4])
    assert len(out.read_text().splitlines()) == 2


TABLES: list[tuple[str, dict[str, Any], int | None]] = [
    ("GPT2Config", {"n_positions": 32, "n_embd": 32, "n_head": 2, "n_layer": 1}, 32),
    ("OPTConfig", {"max_position_embeddings": 32, "ffn_dim": 16, "word_embed_proj_dim": 32, **SMALL}, 32),
    ("BertConfig", {"max_position_embeddings": 32, "intermediate_size": 16, **SMALL}, 32),
    ("RobertaConfig", {"max_position_embeddings": 34, "intermediate_size": 16, "pad_token_id": 1, **SMALL}, 32),
    ("XGLMConfig", {"max_position_embeddings": 32, "d_model": 32, "num_layers": 1, "attention_heads": 2}, None),
    ("RoFormerConfig", {"max_position_embeddings": 32, "intermediate_size": 16, **SMALL}, None),
    ("Qwen3Config", {"max_position_embeddings": 32, "head_dim": 16, "num_key_value_heads": 1, **SMALL}, None),
    ("BloomConfig", {"hidden_size": 32, "n_layer": 1, "n_head": 2}, None),
]


@pytest.mark.parametrize(("name", "options", "limit"), TABLES)
def test_only_learnt_positions_end(tmp_path: Path, name: str, options: dict[str, Any], limit: int | None) -> None:
    """A model with such a table takes as many tokens as are named, and none more."""
    import torch
    import transformers

    config = getattr(transformers, name)(vocab_size=64, **options)
    config.save_pretrained(tmp_path)
    model = transformers.AutoModel.from_config(config).eval()
    assert learnt_positions(model) == limit
    assert positions_for(str(tmp_path), 33) == limit
    if limit is None:
        return
    assert positions_for(str(tmp_path), limit) is None
    with torch.no_grad():
        model(input_ids=torch.full((1, limit), 5))
        with pytest.raises((IndexError, RuntimeError)):
            model(input_ids=torch.full((1, limit + 1), 5))


def test_texts_that_are_embedded_count_one_by_one(commands, models: dict[str, Path], tmp_path: Path) -> None:
    short, long = {"query": "the rank", "positive": "a step"}, {"query": "the rank", "positive": "a step " * 30}
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [short, short, long, short]))
    (tmp_path / "short.jsonl").write_text((json.dumps(short | {"positive": "a step " * 3}) + "\n") * 8)
    fixed = ["sft", "--task", "embedding", "--model", str(models["gpt2"]), "--max-steps", "1", "--output-dir", "OUT"]
    runs = commands([(name, [*fixed, "--dataset", str(tmp_path / f"{name}.jsonl")]) for name in ("long", "short")])
    assert runs["long"].code == 2, runs["long"].output
    assert "long.jsonl:3: the row has" in " ".join(runs["long"].output.split())
    assert runs["short"].code == 0, runs["short"].output
