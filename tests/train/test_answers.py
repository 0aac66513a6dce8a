"""`shardproof infer --dataset`: the answers to the rows of a file, one by one, some at a time, and over ranks; under
ms-swift's names for all of it, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardproof.errors import ConfigError, DataError

pytestmark = pytest.mark.slow

TOOLS = [{"type": "function", "function": {"name": "weigh", "description": "weighs", "parameters": {}}}]
ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "what is a gradient"}, {"role": "assistant", "content": "a slope"}]},
    {"query": "and what is a much longer question, of many more words, asked for", "response": "one", "id": 7},
    {"prompt": "def read_rows(", "completion": "file)"},
    {"messages": [{"role": "system", "content": "be long"}, {"role": "user", "content": "你好"}]},
    {"query": "weigh it", "tools": TOOLS},
    {
        "messages": [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "two"},
            {"role": "user", "content": "three"},
        ]
    },
    {"query": "last"},
]


@pytest.fixture(scope="module")
def asked(commands, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS))
    bad = file.with_name("bad.jsonl")
    bad.write_text(json.dumps({"nothing": 1}) + "\n")
    some = file.with_name("some.jsonl")
    some.write_text(json.dumps({"query": "cut \ud83d"}) + "\n" + file.read_text() + "{}\n")
    seen = file.with_name("seen.jsonl")
    image = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "what is this"}]
    of_files = [{"query": "what"}, {"messages": [{"role": "user", "content": image}]}, {"query": "it", "audios": ["b"]}]
    seen.write_text("".join(json.dumps(row) + "\n" for row in of_files))
    rows, short = ["--dataset", str(file)], ["--max-new-tokens", "6", "--system", "be short"]
    many = file.with_name("many.jsonl")
    many.write_text(json.dumps({"query": "which of them"}) + "\n")
    drawn = [str(tiny), "--dataset", f"{many}#7", *short, "--result-path", "OUT.jsonl", "--temperature", "2"]
    drawn += ["--seed", "5"]
    skip = ["--bad-rows", "skip", "--nproc", "2"]
    swift = f"--model {tiny} --val_dataset {file} --max_batch_size 2 --infer_backend pt --stream false"
    return commands(
        [
            ("one", ["infer", str(tiny), *rows, *short, "--result-path", "OUT.jsonl"]),
            ("some", ["infer", str(tiny), *rows, *short, "--result-path", "OUT.jsonl", "--batch-size", "3"]),
            ("ranks", ["infer", *swift.split(), *short, "--result_path", "OUT.jsonl", "--nproc", "2"]),
            ("drawn", ["infer", *drawn]),
            ("drawn ranks", ["infer", *drawn, "--nproc", "2"]),
            ("drawn again", ["infer", *drawn[:-2]]),
            ("again", ["infer", str(tiny), *rows, *short, "--result-path", "RUNS/one.jsonl"]),
            ("both", ["infer", str(tiny), *rows, "--prompt", "x"]),
            ("nowhere", ["infer", str(tiny), "--prompt", "x", "--result-path", "OUT.jsonl"]),
            ("nothing", ["infer", str(tiny), "--prompt", "x", "--bad-rows", "skip"]),
            ("skip", ["infer", str(tiny), "--dataset", str(some), *short, *skip, "--result-path", "OUT.jsonl"]),
            ("bad", ["infer", str(tiny), "--dataset", str(bad), "--result-path", "OUT.jsonl"]),
            ("seen", ["infer", str(tiny), "--dataset", str(seen), "--result-path", "OUT.jsonl"]),
            ("unseen", ["infer", str(tiny), "--dataset", str(seen), *short, *skip[:2], "--result-path", "OUT.jsonl"]),
        ]
    )


def file_of(run: Any) -> Path:
    return Path(f"{run.folder}.jsonl")


def lines(run: Any) -> list[dict[str, Any]]:
    assert run.code == 0, run.output
    assert run.output.strip().splitlines()[-1] == f"answers: {file_of(run)} (7 rows)"
    return [json.loads(line) for line in file_of(run).read_text(encoding="utf-8").splitlines()]


def test_each_row_is_answered_as_it_is_alone(asked, tiny: Path) -> None:
    from shardproof.train.answers.chat import Chat, Question
    from shardproof.train.answers.sampling import Sampling

    found = lines(asked["one"])
    chat, plain = Chat(tiny), Chat(tiny, plain=True)
    assert len({line["response"] for line in found}) > 3
    for number, line in enumerate(found):
        *messages, answer = line["messages"]
        assert answer == {"role": "assistant", "content": line["response"]}
        tools = TOOLS if number == 4 else None
        asks = plain if number == 2 else chat
        assert asks.answers([Question(messages, number == 2, tools=tools)], Sampling(6)) == [line["response"]]


def test_tools_are_shown_to_a_model_that_takes_files_too(tiny_models: Any) -> None:
    from shardproof.train.answers.chat import Chat, Question

    folder = tiny_models("qwen2_5_vl")
    own = (folder / "chat_template.jinja").read_text()
    chat = Chat(folder, template="{{ tools | tojson if tools }}" + own)
    inputs = chat._inputs([Question([{"role": "user", "content": "weigh it"}], tools=TOOLS)])
    assert '"name": "weigh"' in chat.tokenizer.decode(inputs["input_ids"][0])


def test_a_plain_prompt_that_brings_the_begin_of_text_gets_no_other(tiny: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    from shardproof.train.answers.chat import Chat, Question

    chat = Chat(tiny, plain=True)
    begin = chat.tokenizer.bos_token = chat.tokenizer.eos_token
    with_begin = TemplateProcessing(f"{begin} $A", special_tokens=[(begin, chat.tokenizer.eos_token_id)])
    chat.tokenizer.backend_tokenizer.post_processor = with_begin

    def tokens(text: str) -> list[int]:
        (ids,) = chat._inputs([Question([{"role": "user", "content": text}], True)])["input_ids"].tolist()
        return ids

    assert tokens(begin + "once") == tokens("once")
    assert tokens("once").count(chat.tokenizer.eos_token_id) == 1


def test_what_is_written_is_a_dataset(asked) -> None:
    found = lines(asked["one"])
    assert [line["labels"] for line in found] == ["a slope", "one", "file)", None, None, None, None]
    assert found[1]["id"] == 7
    systems = [line["messages"][0]["content"] for line in found if line["messages"][0]["role"] == "system"]
    assert systems == ["be short", "be short", "be long", "be short", "be short", "be short"]  # none for plain text
    assert [len(line["messages"]) for line in found] == [3, 3, 2, 3, 3, 5, 3]
    from shardproof.data.rows import read_rows

    said = [line for line in found if line["response"]]
    assert 3 < len(said) == len(read_rows([file_of(asked["one"])], bad_rows="skip"))


@pytest.mark.parametrize("how", ["some", "ranks"])
def test_several_at_once_and_over_ranks_are_the_same(asked, how: str) -> None:
    assert lines(asked[how]) == lines(asked["one"])


def test_what_is_drawn_depends_on_the_row_and_on_the_seed(asked) -> None:
    """Not on the number of ranks; and of one question each answer is another."""
    found = [line["response"] for line in lines(asked["drawn"])]
    assert len(set(found)) > 3
    assert [line["response"] for line in lines(asked["drawn ranks"])] == found
    assert [line["response"] for line in lines(asked["drawn again"])] != found


def test_nothing_is_lost_or_guessed(asked) -> None:
    for name, said in (
        ("again", "already exists"),
        ("both", "--dataset and --prompt cannot be used together"),
        ("nowhere", "--result-path applies to the rows of --dataset"),
        ("nothing", "--bad-rows applies to the rows of --dataset"),
        ("bad", "bad.jsonl:1: it has none of 'messages', 'prompt' and 'query'"),
    ):
        assert asked[name].code == 2
        assert said in asked[name].output
    assert not file_of(asked["bad"]).exists()
    assert len(lines(asked["one"])) == len(ROWS)


def test_rows_with_files_for_a_model_of_text_are_named_or_left_out(asked) -> None:
    run, left = asked["seen"], asked["unseen"]
    assert run.code == 2
    assert "seen.jsonl:2: it has a file of type image, and the model takes text only" in run.output
    assert "seen.jsonl:3: it has a file of kind audio, and the model takes text only" in run.output
    assert "--bad-rows skip" in run.output
    assert not file_of(run).exists()
    assert left.code == 0, left.output
    assert "skipped: 2 bad row(s): " in left.output
    assert len(file_of(left).read_text().splitlines()) == 1


def test_bad_rows_are_left_out_and_told_at_the_end(asked) -> None:
    run = asked["skip"]
    assert run.code == 0, run.output
    answers, skipped = run.output.strip().splitlines()[-2:]
    assert answers == f"answers: {file_of(run)} (7 rows)"
    assert skipped.startswith("skipped: 2 bad row(s): ")
    assert "some.jsonl:1: 'query' has half a character" in skipped
    assert skipped.endswith("some.jsonl:9: the row is empty")
    assert file_of(run).read_text() == file_of(asked["ranks"]).read_text()


@pytest.fixture(scope="module")
def seen(commands, tiny_models, files: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of a model that sees and hears, asked about files that can be used and others."""
    run = tmp_path_factory.mktemp("seeing")
    (run / "model").symlink_to(tiny_models("qwen2_5_omni"))
    (run / "config.yaml").write_text("max_pixels: 256\nmax_seconds: 0.4\n")
    rows: list[dict[str, Any]] = [
        {"query": "<image>which digit?", "images": ["a.png"]},
        {"query": "<image>and which?", "images": ["broken.png"]},
        {"query": "what do you hear?", "audios": ["a.wav"]},
        {"query": "what is said?"},
        {"query": "<image>and this?"},
    ]
    file = run / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = ["infer", str(run), "--dataset", str(file), "--media-root", str(files), "--max-new-tokens", "2"]
    argv += ["--result-path", "OUT.jsonl"]
    return commands(
        [
            ("stop", argv),
            ("skip", [*argv, "--bad-rows", "skip", "--nproc", "2"]),
            ("longer", [*argv, "--bad-rows", "skip", "--max-seconds", "1"]),
            ("nowhere", [*argv, "--media-root", str(files / "none")]),
        ]
    )


def test_rows_whose_files_cannot_be_used_are_named_before_any_is_answered(seen) -> None:
    run = seen["stop"]
    assert run.code == 2
    assert "3 of 5 rows cannot be used:" in run.output
    assert "rows.jsonl:2: image 1 (broken.png): not a readable image" in run.output
    assert "rows.jsonl:3: audio 1 (a.wav): it lasts 0.5 s, --max-seconds is 0.4" in run.output  # as in training
    assert "rows.jsonl:5: the text contains <image>, but the row names no image" in run.output
    assert not file_of(run).exists()
    assert "--media-root" in seen["nowhere"].output
    assert "does not exist" in seen["nowhere"].output


def test_rows_whose_files_cannot_be_used_are_left_out(seen) -> None:
    for name, left in (("skip", [2, 3, 5]), ("longer", [2, 5])):
        run = seen[name]
        assert run.code == 0, run.output
        answers, skipped = run.output.strip().splitlines()[-2:]
        assert answers == f"answers: {file_of(run)} ({5 - len(left)} rows)"
        assert skipped.startswith(f"skipped: {len(left)} bad row(s): ")
        assert all(f"rows.jsonl:{line}: " in skipped for line in left)
        assert len(file_of(run).read_text().splitlines()) == 5 - len(left)


def test_boxes_are_written_as_the_model_reads_them(tmp_path: Path) -> None:
    """In the question, and in the row's own answer, which takes what the question leaves of the row's objects."""
    from PIL import Image

    from models.tiny_folders import build
    from shardproof.cli.infer import run

    Image.new("RGB", (100, 100)).save(tmp_path / "a.png")
    objects = {"ref": ["a dog"], "bbox": [[0, 0, 50, 50], [50, 50, 100, 100]]}
    row = {"query": "<image>not <bbox>", "images": ["a.png"], "response": "<ref-object><bbox>", "objects": objects}
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(row) + "\n")
    argv = [str(build("qwen3_vl", tmp_path / "model")), "--dataset", str(rows), "--max-new-tokens", "1"]
    assert run([*argv, "--result-path", str(tmp_path / "out.jsonl")]) == 0
    line = json.loads((tmp_path / "out.jsonl").read_text())
    assert line["messages"][0]["content"][-1]["text"] == "not <|box_start|>(0,0),(500,500)<|box_end|>"
    assert line["labels"] == "<|object_ref_start|>a dog<|object_ref_end|><|box_start|>(500,500),(1000,1000)<|box_end|>"
    rows.write_text(json.dumps({**row, "objects": {**objects, "bbox": [[0, 0, 1, 1], [0, 0, 300, 300]]}}) + "\n")
    with pytest.raises(DataError, match=r"rows.jsonl:1: a box of its 'objects', .* extends beyond image 1"):
        run([*argv, "--result-path", str(tmp_path / "none.jsonl")])


def test_rows_of_a_form_of_ones_own_are_answered(tiny: Path, tmp_path: Path) -> None:
    from shardproof.cli.infer import run

    (tmp_path / "talks.py").write_text(
        "import shardproof\n\n\n@shardproof.register_row_format('talks')\ndef talks(record):\n"
        "    if not record['ask']:\n        raise ValueError('nobody asks')\n"
        "    return {'query': record['ask'], 'response': record['say'], 'id': record['id']}\n"
    )
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"Q": ask, "say": "a slope", "id": 7}) + "\n" for ask in ("what is it", "")))
    argv = [str(tiny), "--dataset", str(rows), "--columns", "ask=Q", "--max-new-tokens", "2"]
    argv += ["--row-format", "talks", "--answer-metrics", "rouge_l"]
    plugin = ["--external-plugins", str(tmp_path / "talks.py")]
    assert run([*argv, *plugin, "--bad-rows", "skip", "--result-path", str(tmp_path / "out.jsonl")]) == 0
    (line,) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert line["messages"][0] == {"role": "user", "content": "what is it"}
    assert (line["labels"], line["id"], list(line["rewards"])) == ("a slope", 7, ["rouge_l"])
    with pytest.raises(DataError, match=r"rows.jsonl:2: nobody asks"):
        run([*argv, *plugin, "--result-path", str(tmp_path / "none.jsonl")])
    with pytest.raises(ConfigError, match=r"--row-format talks: .*\n@shardproof.register_row_format"):
        run([*argv, "--result-path", str(tmp_path / "none.jsonl")])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--row-format", "talks"], "--row-format applies to the rows of --dataset"),
        (["--plain", "--chat-template", "chatml"], "--chat-template needs one"),
        (["--plain", "--template-variables", "enable_thinking=false"], "--template-variables needs one"),
        (["--plain", "--system", "Be short."], "--plain and --system cannot be used together"),
        (["--top-p", "0.5"], "add a --temperature above 0"),
        (["--top-k", "5"], "--top-k 5 applies to sampling: add a --temperature above 0"),
        (["--stop-words", "a", ""], "--stop-words is empty"),
        (["--seed", "5"], "--seed 5 applies to sampling: add a --temperature above 0"),
        (["--batch-size", "3"], "--batch-size applies to the rows of --dataset"),
    ],
)
def test_what_would_say_nothing_is_refused(tiny: Path, capsys: pytest.CaptureFixture[str], given, said: str) -> None:
    from shardproof.cli.main import main

    assert main(["infer", str(tiny), "--prompt", "the", *given]) == 2
    assert said in capsys.readouterr().err


def test_tokens_that_the_tokenizer_does_not_have_are_told(tiny: Path, tmp_path: Path, capsys, caplog) -> None:
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    from shardproof.cli.main import main

    folder = shutil.copytree(tiny, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    known = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = known.repeat(3, 1)
    weights["lm_head.weight"] = torch.cat([0 * known, known, -known])  # the likeliest is none of the tokenizer's
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    said = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps({**said, "vocab_size": len(known) * 3}))
    assert main(["infer", str(folder), "--prompt", "the", "--max-new-tokens", "3"]) == 0
    assert "(an answer without text: the model wrote tokens" in capsys.readouterr().err
    assert "generates tokens that its tokenizer does not have, which are left out" in caplog.text


def test_an_answer_beyond_the_positions_of_a_model_is_warned_of(tiny: Path, tmp_path: Path, caplog) -> None:
    import shutil

    from shardproof.cli.main import main

    folder = shutil.copytree(tiny, tmp_path / "model")
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**said, "max_position_embeddings": 64}))
    for most in (3, 100):
        assert ("was made for" in caplog.text) is False
        assert main(["infer", str(folder), "--prompt", "the", "--max-new-tokens", str(most)]) == 0
    assert "With --max-new-tokens 100 an answer may exceed the 64 positions" in caplog.text
