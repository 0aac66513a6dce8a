"""Promise: rows of raw text are learnt whole, with the losses of one process at every stage, packed and streamed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from shardproof.cli import data
from train.conftest import WORDS

pytestmark = pytest.mark.slow

ONE = ["--nproc", "1", "--stage", "0"]
TWO = ["--nproc", "2", "--stage", "3"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    chance = random.Random(1)
    return [" ".join(chance.choices(WORDS, k=chance.randint(3, 60))) for _ in range(23)]


@pytest.fixture(scope="module")
def raw(texts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("raw") / "raw.jsonl"
    file.write_text("".join(json.dumps({"text": text, "source": "a book"}) + "\n" for text in texts))
    return file


@pytest.fixture(scope="module")
def runs(commands, sft, raw: Path, texts):
    answers = raw.with_name("answers.jsonl")
    answers.write_text("".join(json.dumps({"prompt": "", "completion": text}) + "\n" for text in texts))
    given = ["--dataset", str(raw)]
    packed = [*given, "--packing", "--max-length", "96", "--global-batch-size", "2"]
    streamed = [*packed, "--streaming", "--shuffle-buffer-size", "10"]
    later = ["--streaming", "--shuffle-buffer-size", "10"]
    cut = [*given, "--packing", "--max-length", "24", "--truncation", "split"]
    return commands(
        [
            ("one", sft(*given, *ONE)),
            ("two", sft(*given, *TWO)),
            ("answers", sft("--dataset", str(answers), *ONE)),
            *((f"packed {name}", sft(*packed, *how)) for name, how in (("one", ONE), ("two", TWO))),
            *((f"streamed {name}", sft(*streamed, *how)) for name, how in (("one", ONE), ("two", TWO))),
            *((f"split {name}", sft(*cut, *how)) for name, how in (("one", ONE), ("two", TWO))),
            *((f"split stream {name}", sft(*cut, *later, *how)) for name, how in (("one", ONE), ("two", TWO))),
            ("split answers", sft("--dataset", str(answers), "--task", "seq_cls", "--truncation", "split", *ONE)),
        ]
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("one", "two"),
        ("one", "answers"),
        ("packed one", "packed two"),
        ("streamed one", "streamed two"),
        ("split one", "split two"),
        ("split stream one", "split stream two"),
    ],
)
def test_losses_are_those_of_one_process(runs, first: str, second: str) -> None:
    one, other = runs[first], runs[second]
    assert one.code == other.code == 0, one.output + other.output
    assert len(one.series("loss")) == 5
    assert other.series("loss") == pytest.approx(one.series("loss"), abs=1e-5)


def test_a_first_token_counts_for_no_model_whatever_its_class_is_called(commands, sft, tiny: Path, raw: Path) -> None:
    """It is not predicted, so the loss of a step over all rows is that of an evaluation of them."""
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    folder, tokenizer = raw.with_name("gpt2"), AutoTokenizer.from_pretrained(tiny)
    drops = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"), tokenizer.eos_token_id)
    sizes = {"vocab_size": len(tokenizer), "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 256}
    GPT2LMHeadModel(GPT2Config(**sizes, **drops, **ends)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    short = raw.with_name("short.jsonl")
    short.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("one shard", "every rank holds", "step")))
    argv = sft("--model", str(folder), "--dataset", str(short), "--val-dataset", str(short), *ONE)
    whole = ["--max-steps", "1", "--global-batch-size", "3", "--learning-rate", "0"]
    (run,) = commands([("gpt2", [*argv, *whole])]).values()
    assert run.code == 0, run.output
    assert run.series("loss") == pytest.approx(run.series("eval_loss"), abs=1e-5)


def test_long_texts_are_split_where_they_are_learnt_whole(runs) -> None:
    assert "rows split into" in runs["split one"].output
    assert runs["split answers"].code == 2
    assert "--truncation split is for raw text in sft" in runs["split answers"].output


def test_rows_are_shown_with_all_of_their_text_learnt(tiny: Path, raw: Path, texts, capsys) -> None:
    assert data.run(["show", "--model", str(tiny), "--dataset", str(raw), "-n", "1"]) == 0
    assert f"[[{texts[0]}<|im_end|>]]" in capsys.readouterr().out


def test_a_row_that_holds_nothing_is_told(tiny: Path, raw: Path, tmp_path: Path, capsys) -> None:
    from shardproof.cli.main import main

    bad = tmp_path / "bad.jsonl"
    bad.write_text(raw.read_text() + '{"text": ""}\n{"txt": "a"}\n')
    assert main(["sft", "--model", str(tiny), "--dataset", str(bad), "--output-dir", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert f"{bad}:24: field 'text' is empty" in said
    assert f"{bad}:25: it has none of the known fields (it has txt)" in said
    assert "or 'text' alone." in said
