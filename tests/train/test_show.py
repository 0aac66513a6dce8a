"""`shardproof data show`: what is printed is what is trained on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from shardproof.cli import data, sft
from shardproof.errors import ConfigError
from shardproof.train.show import parts_of


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A conversation, one that is too long, and plain text."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": "one [bold]two"},
                {"role": "assistant", "content": "gone", "loss": False},
                {"role": "user", "content": "and é日"},
                {"role": "assistant", "content": "the shard"},
            ]
        },
        {"query": "a " * 200, "response": "b"},
        {"prompt": "the process ", "completion": "gathers"},
    ]
    file = tmp_path_factory.mktemp("show") / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture(scope="module")
def media(files: Path) -> str:
    """A row with a picture and a sound, and one whose picture is not there."""
    rows = [
        {"query": "<audio> is <image>?", "response": "no", "images": ["b.png"], "audios": ["a.wav"]},
        {"query": "<image>?", "response": "no", "images": ["none.png"]},
    ]
    file = files / "shown.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture(scope="module")
def shown(commands, tiny: Path, tiny_models, file: str, media: str, tmp_path_factory: pytest.TempPathFactory):
    omni = ["--model", str(tiny_models("qwen2_5_omni")), "--dataset", media, "--bad-rows", "skip"]
    run_file = tmp_path_factory.mktemp("run") / "run.yaml"
    run_file.write_text(f"model: {tiny}\ndataset: {file}\nmax_length: 100\noutput_dir: {run_file.parent}\nstage: 2\n")
    weights = run_file.with_name("mine.json")
    weights.write_text('{"shard": 2}')
    show = ["data", "show", str(run_file)]
    return commands(
        [
            ("text", [*show, "-n", "9"]),
            ("cut", [*show, "--truncation", "right", "--loss", "all", "-n", "2", "--json"]),
            ("json", [*show, "--rows", "3", "--json", "--nproc", "2", "--global-batch-size", "4"]),
            ("weighed", [*show, "-n", "1", "--token-weights", str(weights)]),
            ("media", ["data", "show", *omni]),
            ("wrong", ["data", "sow"]),
            ("rlhf", [*show, "--rlhf-type", "dpo"]),
            ("missing", [*show, "--dataset", "nowhere.jsonl"]),
        ]
    )


def test_text_shows_the_template_and_brackets_around_what_is_learnt(shown, file: str) -> None:
    assert shown["text"].code == 0, shown["text"].output
    text = shown["text"].output
    assert f"--- {file}:1: " in text
    assert "<|im_start|>user\none [bold]two<|im_end|>\n<|im_start|>assistant\ngone<|im_end|>\n" in text
    assert "<|im_start|>user\nand é日<|im_end|>\n<|im_start|>assistant\n[[the shard<|im_end|>]]" in text
    assert f"{file}:2: Every row is longer than --max-length 100" in text
    assert "the process[[ gathers<|im_end|>]]" in text or "the process [[gathers<|im_end|>]]" in text
    assert "--- all rows: 2 rows, " in text
    assert "1 row left out as too long" in text


def test_what_weighs_more_is_shown_with_its_weight(shown) -> None:
    assert "[[the]][[ shard]](x 2)[[<|im_end|>]]" in shown["weighed"].output, shown["weighed"].output


def test_json_has_the_ids_and_labels_that_are_trained_on(shown) -> None:
    assert shown["json"].code == 0, shown["json"].output
    *rows, last = [json.loads(line) for line in shown["json"].output.splitlines()]
    assert len(rows) == last["report"]["rows"] == 3
    for row in rows:
        assert len(row["input_ids"]) == len(row["labels"]) == row["tokens"] == sum(p["tokens"] for p in row["parts"])
        assert row["learnt"] == sum(label != -100 for label in row["labels"])
    assert sum(row["learnt"] for row in rows) == last["report"]["learnt_tokens"]
    assert [bool(row["left_out"]) for row in rows] == [False, True, False]


def test_a_row_that_is_cut_says_so(shown) -> None:
    first, second, last = [json.loads(line) for line in shown["cut"].output.splitlines()]
    assert (first["cut"], second["cut"], second["tokens"], last["report"]["truncated"]) == (False, True, 100, 1)
    assert [part["learnt"] for part in second["parts"]] == [True]


@pytest.mark.parametrize(
    "name, said",
    [
        ("wrong", "'shardproof data show'"),
        ("rlhf", "--rlhf-type is an option of 'shardproof rlhf'"),
        ("missing", "There is no file"),
    ],
)
def test_mistakes_are_told_in_a_few_words(shown, name: str, said: str) -> None:
    assert shown[name].code == 2
    assert said in shown[name].output
    assert len(shown[name].output.splitlines()) <= 3


def test_pictures_and_sounds_stand_there_with_the_tokens_they_take(shown, media: str) -> None:
    run = shown["media"]
    assert run.code == 0, run.output
    asked = r"<\|audio_bos\|><\|AUDIO\|> x \d+ <\|audio_eos\|> is <\|vision_bos\|><\|IMAGE\|> x \d+ <\|vision_eos\|>\?"
    assert re.search(asked, run.output), run.output
    assert "[[no<|im_end|>]]" in run.output
    assert f"--- {media}:2: image 1 (none.png): there is no such file" in run.output
    left_out = f"--- bad rows, left out: 1\n{media}:2: image 1 (none.png): there is no such file"
    assert left_out in run.output


def test_pictures_and_sounds_are_grey_as_the_question_is(media: str, tiny_models, capsys, monkeypatch) -> None:
    """On a terminal: the turn with picture, sound and words up to the answer is one grey stretch."""
    from shardproof.cli.main import main

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    omni = ["--model", str(tiny_models("qwen2_5_omni")), "--dataset", media, "--bad-rows", "skip", "--workers", "0"]
    assert main(["data", "show", *omni]) == 0
    out = capsys.readouterr().out.replace("\x1b[0m\n\x1b[90m", "\n")  # each line is coloured by itself
    asked = r"<\|im_start\|>user\n[^\x1b]*<\|AUDIO\|> x \d+ [^\x1b]*<\|IMAGE\|> x \d+ [^\x1b]*assistant"
    assert re.search(asked + r"\x1b\[0m\nno<\|im_end\|>", out)


def test_a_token_that_stands_for_a_file_is_counted(tiny: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    (picture,) = tokenizer("<|im_start|>")["input_ids"]
    ids = [*tokenizer("a")["input_ids"], *[picture] * 64, *tokenizer("b")["input_ids"]]
    (part,) = parts_of(ids, [-100] * len(ids), tokenizer)
    assert (part.text, part.tokens, part.learnt) == ("a<|im_start|> x 64 b", 66, False)
    text = 'a call: {"a":{"b":{"c":{"d":{"e":{"f":1}}}}}}}}}}} yes'
    (part,) = parts_of(found := tokenizer(text)["input_ids"], [1] * len(found), tokenizer)
    assert part.text == text


def test_on_a_terminal_what_is_not_learnt_is_grey(capsys, monkeypatch) -> None:
    from shardproof.cli.data import print_rows
    from shardproof.data.encoding.report import EncodeReport
    from shardproof.train.show import Part, Shown

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    print_rows([Shown("f:1", [1, 2], [-100, 2], [Part("asked", 1, False), Part("said", 1, True)])], EncodeReport())
    assert "\x1b[90masked\x1b[0msaid" in capsys.readouterr().out


def test_variables_mean_what_they_do_in_training(tiny: Path, file: str, monkeypatch) -> None:
    """`data show` shows what `sft` trains on, and of its options there are some that are variables."""
    words = ["--model", str(tiny), "--dataset", file]
    monkeypatch.setenv("MAX_PIXELS", "500")
    assert data.parse(words)[0].max_pixels == sft.parse(words)[0].max_pixels == 500
    monkeypatch.setenv("IMAGE_FACTOR", "28")
    for command in (data, sft):
        with pytest.raises(ConfigError, match="The variable IMAGE_FACTOR=28: it is not read here"):
            command.parse(words)
