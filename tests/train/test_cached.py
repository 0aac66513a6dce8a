"""Promise: a run on rows that were encoded before is the run that encodes them, bit for bit, whatever they are for; and
rows that it would encode in another way are refused by the option that differs."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from shardproof.cli import data, sft, training
from shardproof.data.rows import Row, read_rows
from shardproof.errors import ConfigError, DataError
from shardproof.train.options.rlhf_config import RlhfConfig
from shardproof.train.run import processing_of, recipe_of

CACHED = ["--cached-dataset", "RUNS/kept/train"]
WITH_VAL = [*CACHED, "--cached-val-dataset", "RUNS/kept/val"]


def weights(run: Any) -> bytes:
    assert run.code == 0, run.output
    return (run.folder / "model" / "model.safetensors").read_bytes()


def without_rows(argv: list[str]) -> list[str]:
    """The command without its --dataset."""
    place = argv.index("--dataset")
    return argv[:place] + argv[place + 2 :]


def kept(argv: list[str], *more: str) -> list[str]:
    """The command that encodes the rows of this one."""
    word = ["rlhf"] if argv[0] == "rlhf" else []
    return ["data", "encode", *word, *argv[1:], *more]


def check_same(done: dict[str, Any], *pairs: tuple[str, str]) -> None:
    for plain, cached in pairs:
        assert weights(done[plain]) == weights(done[cached])
        for key in ("loss", "grad_norm", "tokens", "eval_loss"):
            assert done[plain].series(key) == done[cached].series(key)


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("more") / "more.jsonl"
    rows = [{"query": f"the step {number}", "response": "holds " * (number + 1)} for number in range(9)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


# --- what is the same ------------------------------------------------------------------------------


def test_weights_are_those_of_a_run_that_encodes(commands, sft) -> None:
    """Rows that are too long are left out by the run, which says so."""
    argv = sft("--max-length", "48", "--val-split", "0.2")
    done = commands(
        [
            ("kept", kept(sft("--val-split", "0.2"))),
            ("plain", argv),
            ("cached", [*without_rows(sft("--max-length", "48")), *WITH_VAL]),
        ]
    )
    check_same(done, ("plain", "cached"))
    assert "left out as too long" in done["cached"].output
    assert (done["kept"].folder / "train" / "cached.json").is_file()


@pytest.mark.slow
def test_a_folder_stands_after_a_file_as_its_rows_would(commands, sft, more: str) -> None:
    argv = sft("--max-length", "48")
    both = ["--dataset", more, argv[argv.index("--dataset") + 1]]
    done = commands(
        [
            ("whole", kept(sft())),
            ("both", [*without_rows(argv), *both]),
            ("mixed", [*without_rows(argv), *both[:2], "--cached-dataset", "RUNS/whole/train"]),
        ]
    )
    check_same(done, ("both", "mixed"))


@pytest.mark.slow
def test_they_are_on_ranks_with_packed_rows_and_in_a_run_that_goes_on(commands, sft) -> None:
    """A run that began with a file goes on with the folder."""
    two = ["--nproc", "2", "--stage", "3", "--max-length", "96"]
    long = ["--packing", "--global-batch-size", "2"]
    done = commands(
        [
            ("kept", kept(sft("--max-length", "96"))),
            ("plain", sft(*two, "--save-steps", "2")),
            ("cached", [*without_rows(sft(*two, "--save-steps", "2")), *CACHED]),
            ("on", [*without_rows(sft(*two, "--resume", "RUNS/plain/checkpoint-2")), *CACHED]),
            ("back", sft(*two, "--resume", "RUNS/cached/checkpoint-2")),
            ("packed", sft(*two, *long)),
            ("cached packed", [*without_rows(sft(*two, *long)), *CACHED]),
            ("stage 2", sft(*two, "--stage", "2")),
            ("cached at stage 2", [*without_rows(sft(*two, "--stage", "2")), *CACHED]),
        ]
    )
    check_same(done, ("plain", "cached"), ("packed", "cached packed"), ("stage 2", "cached at stage 2"))
    assert weights(done["on"]) == weights(done["plain"]) == weights(done["back"])


@pytest.mark.slow
def test_they_are_where_parts_of_answers_weigh_more(commands, sft, tiny: Path, more: str, tmp_path: Path) -> None:
    """Also where rows of a file behind which the folder stands have turns with weights, and the others have none."""
    weighed, patterns = tmp_path / "weighed.jsonl", tmp_path / "weights.json"
    weighed.write_text(
        "".join(
            json.dumps(
                {"messages": [{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": "on", "weight": 3}]}
            )
            + "\n"
            for n in range(6)
        )
    )
    patterns.write_text(json.dumps({"holds": 2.5}))
    some, none = ["--token-weights", "react", str(patterns)], without_rows(sft())
    done = commands(
        [
            ("kept", kept([*none, "--dataset", more, *some])),
            ("plain", [*none, "--dataset", more, *some]),
            ("cached", [*none, *some, *CACHED]),
            ("unweighed", [*none, "--dataset", more]),
            ("kept plain", kept([*none, "--dataset", more])),
            ("both", [*none, "--dataset", str(weighed), more]),
            ("mixed", [*none, "--dataset", str(weighed), "--cached-dataset", "RUNS/kept plain/train"]),
        ]
    )
    check_same(done, ("plain", "cached"), ("both", "mixed"))
    assert done["plain"].series("loss") != done["unweighed"].series("loss")
    patterns.write_text(json.dumps({"holds": 2}))
    with pytest.raises(ConfigError, match=r"--token-weights react weights\.json:\w+, but this run has react weights"):
        encoded(tiny, done["kept"].folder / "train", *some)


RAW = ["--loss", "all", "--plain", "--truncation", "split", "--max-length", "20"]
OF_TASKS = {
    "raw text": (RAW, [{"text": "the shard holds a rank and " * (n + 1)} for n in range(12)]),
    "seq_cls": (
        ["--task", "seq_cls", "--num-labels", "3"],
        [{"query": "the shard " * (n % 4 + 1), "label": n % 3} for n in range(12)],
    ),
    "embedding": (
        ["--task", "embedding"],
        [{"query": f"step {n}", "positive": "rank " * (n % 3 + 1), "negative": "the memory"} for n in range(12)],
    ),
    "reranker": (
        ["--task", "reranker"],
        [{"query": f"step {n}", "positive": ["rank " * (n % 3 + 1)], "negative": ["the memory"]} for n in range(12)],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("task", OF_TASKS)
def test_they_are_for_other_tasks(commands, sft, task: str, tmp_path: Path) -> None:
    options, rows = OF_TASKS[task]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = sft(*options, "--dataset", str(file))
    done = commands([("kept", kept(argv)), ("plain", argv), ("cached", [*without_rows(sft(*options)), *CACHED])])
    check_same(done, ("plain", "cached"))


@pytest.mark.slow
@pytest.mark.parametrize("packing", [[], ["--packing", "--max-length", "400"]])
def test_they_are_of_rows_with_files(commands, tiny_models, media_files: Path, packing: list[str]) -> None:
    rows = [{"query": "<image>which?", "response": "two", "images": ["a.png"]}, {"query": "no", "response": "none"}] * 4
    file = media_files / "cached.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fixed = "--max-steps 3 --global-batch-size 2 --per-device-batch-size 1 --output-dir OUT --max-pixels 4000".split()
    argv = ["sft", "--model", str(tiny_models("qwen2_5_vl")), *fixed, *packing]
    done = commands(
        [
            ("kept", kept(argv, "--dataset", str(file))),
            ("plain", [*argv, "--dataset", str(file), "--nproc", "2"]),
            ("cached", [*argv, *CACHED, "--nproc", "2"]),
            ("larger", [*argv, *CACHED, "--max-pixels", "5000"]),
        ]
    )
    check_same(done, ("plain", "cached"))
    assert "--max-pixels 4000, but this run has 5000" in done["larger"].output


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", "kto", "rm", "grpo", "gkd"])
def test_they_are_of_preferences_and_prompts(commands, tiny: Path, kind: str, tmp_path: Path) -> None:
    rows = [
        {"query": f"the step {n}", "response": "holds " * (n % 4 + 1), "rejected_response": "one", "label": n % 2 == 0}
        for n in range(12)
    ]
    wanted = {"kto": ("query", "response", "label"), "grpo": ("query",), "gkd": ("query", "response")}
    fields = wanted.get(kind, ("query", "response", "rejected_response"))
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({name: row[name] for name in fields}) + "\n" for row in rows))
    fixed = f"--rlhf-type {kind} --max-steps 2 --global-batch-size 4 --per-device-batch-size 2 --output-dir OUT".split()
    fixed += ["--reward-funcs", "length", "--num-generations", "2", "--max-completion-length", "8"] * (kind == "grpo")
    fixed += ["--teacher-model", str(tiny), "--lmbda", "0", "--sft-alpha", "1"] * (kind == "gkd")
    argv = ["rlhf", "--model", str(tiny), *fixed]
    done = commands(
        [
            ("kept", kept(argv, "--dataset", str(file))),
            ("plain", [*argv, "--dataset", str(file), "--nproc", "2"]),
            ("cached", [*argv, *CACHED, "--nproc", "2"]),
        ]
    )
    check_same(done, ("plain", "cached"))


# --- what is refused, and what is told --------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tiny: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of up to 32 tokens, and some to evaluate on."""
    place = tmp_path_factory.mktemp("kept") / "of 32"
    argv = ["encode", "--model", str(tiny), "--dataset", str(rows), "--max-length", "32", "--val-split", "0.2"]
    assert data.run([*argv, "--output-dir", str(place)]) == 0
    return place


def encoded(model: Path, folder: Path | str, *more: str) -> Any:
    """What a run would learn from, and its rows."""
    return encoded_from(model, "--cached-dataset", str(folder), *more)


def encoded_from(model: Path, *more: str) -> Any:
    from shardproof.train.model.loading import load_processing

    config, _ = sft.parse(["--model", str(model), *more])
    recipe: Any = recipe_of(config)
    rows, _ = recipe.read(config)
    return recipe.encode(config, rows, load_processing(str(model), config)), rows


REFUSED = {
    "--loss all": "--loss answer, but this run has all",
    "--system x": "--system none, but this run has x",
    "--max-length 33": "with --max-length 32 --truncation drop, and its longest row has",
    "--max-length 32 --truncation right": "which gives different rows",
    "--max-length 32 --new-special-tokens <|new|>": "a tokenizer other than that of this run",
    "--max-length 32 --task embedding": "--task causal_lm, but this run has embedding",
}


@pytest.mark.parametrize("options", REFUSED)
def test_rows_that_were_encoded_in_another_way_are_refused(tiny: Path, folder: Path, options: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[options]):
        encoded(tiny, folder / "train", *options.split())


def test_a_form_of_tools_is_that_of_the_run(tiny: Path, rows: Path, tmp_path: Path) -> None:
    form = ["--agent-template", "react_en"]
    argv = ["encode", "--model", str(tiny), "--dataset", str(rows), "--output-dir", str(tmp_path / "kept"), *form]
    assert data.run(argv) == 0
    config, _ = sft.parse(["--model", str(tiny), "--cached-dataset", str(tmp_path / "kept" / "train"), *form])
    recipe: Any = recipe_of(config)
    found, _ = recipe.read(config)
    assert len(recipe.encode(config, found, processing_of(str(tiny), config))) == len(found)
    with pytest.raises(ConfigError, match="a chat template other than that of this run"):
        encoded(tiny, tmp_path / "kept" / "train")


def test_rows_of_another_command_are_refused_before_anything_is_read(tiny: Path, folder: Path) -> None:
    argv = ["--rlhf-type", "dpo", "--model", str(tiny), "--cached-dataset", str(folder / "train")]
    config, _ = training.parse(RlhfConfig, "", argv)
    with pytest.raises(ConfigError, match="was encoded for 'shardproof sft', but this is 'rlhf'"):
        recipe_of(config).check(config, 1)


def prompts_or_pairs(kind: str, model: Path, *more: str) -> RlhfConfig:
    config, _ = training.parse(RlhfConfig, "", ["--rlhf-type", kind, "--model", str(model), *more])
    return config


@pytest.mark.parametrize(
    ("encoded_for", "asked", "row", "told"),
    [
        (["dpo"], ["rm"], {"response": "holds", "rejected_response": "one", "margin": 1.0}, "it has a 'margin'"),
        (
            ["grpo", "--reward-funcs", "length"],
            ["grpo", "--reward-funcs", "length", "--teacher-model", "MODEL"],
            {"teacher_prompt": "one"},
            "it has a 'teacher_prompt'",
        ),
    ],
)
def test_what_another_algorithm_would_pass_over_is_told(
    tiny: Path, tmp_path: Path, encoded_for: list[str], asked: list[str], row: dict[str, Any], told: str
) -> None:
    """One folder of pairs is for several of them."""
    from shardproof.train.encoding import encode
    from shardproof.train.model.loading import load_processing

    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"query": "the step", **row}) + "\n")
    encode(prompts_or_pairs(encoded_for[0], tiny, *encoded_for[1:], "--dataset", str(file)), tmp_path / "kept")
    more = [word.replace("MODEL", str(tiny)) for word in asked[1:]]
    config = prompts_or_pairs(asked[0], tiny, *more, "--cached-dataset", str(tmp_path / "kept" / "train"))
    recipe: Any = recipe_of(config)
    with pytest.raises(DataError, match=rf"rows.jsonl:1: {told}[^\n]*\nEncode the rows again for this run"):
        recipe.encode(config, recipe.read(config)[0], load_processing(str(tiny), config))


def test_rows_of_files_and_folders_are_put_together_as_those_of_files_are(tiny: Path, tmp_path: Path) -> None:
    """A column of whole numbers in one and of others in the next, for rewards; and not texts with conversations."""
    from shardproof.train.encoding import encode
    from shardproof.train.model.loading import load_processing

    rows = {"whole": {"query": "the step", "n": 1}, "real": {"query": "a step", "n": 1.5}, "text": {"prompt": "a"}}
    for name, row in rows.items():
        (tmp_path / name).with_suffix(".jsonl").write_text(json.dumps(row) + "\n")

    def asked(*more: str) -> RlhfConfig:
        words = [str(tmp_path / word) if word[0] != "-" else word for word in more]
        return prompts_or_pairs("grpo", tiny, "--reward-funcs", "length", *words)

    def found(*more: str) -> Any:
        config = asked(*more)
        recipe: Any = recipe_of(config)
        return recipe.encode(config, recipe.read(config)[0], load_processing(str(tiny), config))

    encode(asked("--dataset", "whole.jsonl"), tmp_path)
    plain = found("--dataset", "real.jsonl", "whole.jsonl")
    assert found("--dataset", "real.jsonl", "--cached-dataset", "train")[:] == plain[:]
    with pytest.raises(DataError, match=r"is plain text and .* is a conversation, and a run cannot mix the two"):
        found("--dataset", "text.jsonl", "--cached-dataset", "train")


def test_some_rows_of_texts_in_pieces_are_counted(tiny: Path, tmp_path: Path) -> None:
    file, argv = tmp_path / "raw.jsonl", [*RAW, "--model", str(tiny)]
    file.write_text("".join(json.dumps({"text": "the shard holds a rank " * (n + 1)}) + "\n" for n in range(6)))
    assert data.run(["encode", *argv, "--dataset", str(file), "--output-dir", str(tmp_path / "kept")]) == 0
    some, rows = encoded(tiny, f"{tmp_path / 'kept' / 'train'}#3", *RAW)
    counts = [list(some.numbers).count(number) for number in range(len(rows))]
    assert some.report.split == sum(many > 1 for many in counts) > 0
    assert some.report.pieces == sum(many for many in counts if many > 1)


def test_rows_that_were_cut_are_counted_among_some(tiny: Path, tmp_path: Path) -> None:
    """One of just the most tokens lost none."""
    file, kept = tmp_path / "rows.jsonl", str(tmp_path / "kept")
    file.write_text("".join(json.dumps({"query": "x", "response": "holds " * n}) + "\n" for n in range(1, 21)))
    lengths = [len(row["input_ids"]) for row in encoded_from(tiny, "--dataset", str(file))[0]]
    most = ["--max-length", str(lengths[9]), "--truncation", "right"]
    assert data.run(["encode", "--model", str(tiny), "--dataset", str(file), "--output-dir", kept, *most]) == 0
    for count in (3, 7, 30):
        some, rows = encoded(tiny, f"{kept}/train#{count}", *most)
        assert len(some) == count
        assert some.report.truncated == sum(row.line > 10 for row in rows) < count
    beside, rows = encoded(tiny, f"{kept}/train#7", *most, "--dataset", str(file))
    assert beside.report.truncated == len(beside.cut) == sum(row.line > 10 for row in rows)
    assert all(rows[number].line > 10 for number in beside.cut)


def test_another_template_is_refused(tiny: Path, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny, other)
    template = other / "chat_template.jinja"
    template.write_text(f"{template.read_text()} ")
    with pytest.raises(ConfigError, match="a chat template other than that of this run"):
        encoded(other, folder / "train", "--max-length", "32")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("", "It contains train and val: name one"),
        ("none", "does not exist"),
        ("train/rows", "is not a folder of encoded"),
    ],
)
def test_what_is_no_such_folder_is_told(tiny: Path, folder: Path, name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        encoded(tiny, folder / name)


@pytest.mark.parametrize("damage", ["cut", "missing", "of others", "no object"])
def test_a_folder_that_is_not_whole_is_told(tiny: Path, folder: Path, tmp_path: Path, damage: str) -> None:
    place = tmp_path / "copy"
    shutil.copytree(folder / "train", place)
    file = next((place / "encoded").glob("*.arrow"))
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:1500])
    elif damage == "missing":
        shutil.rmtree(place / "rows")
    elif damage == "of others":
        shutil.copytree(folder / "val" / "encoded", place / "encoded", dirs_exist_ok=True)
    else:
        (place / "cached.json").write_text("[1]")
    told = {"cut": r"data-\S+ has 1,500 of", "missing": r"rows/data-\S+ is missing", "of others": r"has [\d,]+ of"}
    with pytest.raises(ConfigError, match=told.get(damage, "is not a folder of encoded rows")):
        encoded(tiny, place)


def test_rows_that_were_held_out_before_go_when_all_are_encoded_anew(tiny: Path, rows: Path, tmp_path: Path) -> None:
    argv = ["encode", "--model", str(tiny), "--dataset", str(rows), "--output-dir", str(tmp_path / "kept")]
    assert data.run([*argv, "--val-split", "0.2"]) == 0
    assert data.run([*argv, "--overwrite"]) == 0
    assert [place.name for place in (tmp_path / "kept").iterdir()] == ["train"]


def test_two_processes_that_write_one_folder_do_not_mix_their_rows(tiny: Path, folder: Path, tmp_path: Path) -> None:
    """The second begins and ends while the first writes."""
    from shardproof.data.cached import write
    from shardproof.train.rows.cached import to_be_kept

    with to_be_kept():
        some, those = encoded(tiny, folder / "val", "--max-length", "32")
        other, others = encoded(tiny, folder / "train", "--max-length", "32")
    place = tmp_path / "kept"

    class Between:
        report, numbers = other.report, other.numbers

        def add_column(self, *args: Any) -> Any:
            write(place, those, some, some.said, date.today())
            return other.add_column(*args)

    write(place, others, Between(), other.said, date.today())
    found, _ = encoded(tiny, place, "--max-length", "32")
    assert found["input_ids"][:] == other["input_ids"][:]
    assert [one.name for one in tmp_path.iterdir()] == ["kept"]


def test_a_folder_among_files_is_told(folder: Path) -> None:
    with pytest.raises(DataError, match="is a folder of encoded rows; give it to --cached-dataset"):
        read_rows([folder / "train"])


def test_shorter_rows_are_taken_and_counted(tiny: Path, folder: Path) -> None:
    whole, rows = encoded(tiny, folder / "train", "--max-length", "32")
    short, _ = encoded(tiny, folder / "train", "--max-length", "20")
    assert 0 < len(short) < len(whole) < len(rows)
    assert max(map(len, short["input_ids"])) <= 20
    assert short.report.kept + short.report.dropped == len(rows)
    assert short.report.tokens == sum(map(len, short["input_ids"]))
    assert short.report.learnt_tokens == sum(label != -100 for row in short["labels"] for label in row)
    assert whole.cache_files  # of a disk, not of memory


def test_some_of_the_rows_are_taken(tiny: Path, folder: Path) -> None:
    some, rows = encoded(tiny, f"{folder / 'train'}#5", "--max-length", "32")
    more, twice = encoded(tiny, f"{folder / 'train'}#40", "--max-length", "32")
    assert len(rows) == 5
    assert len(twice) == 40
    assert [rows[number].where for number in some.numbers] == [some.places[n] for n in range(len(some))]
    assert len(more) > len(some)


@pytest.mark.parametrize("where", ["file", "folder"])
def test_no_copy_of_a_row_that_is_held_out_is_learnt(
    tiny: Path, rows: Path, folder: Path, where: str, tmp_path: Path, monkeypatch
) -> None:
    """A file beside a folder of its rows is held out as a file that is named twice, under another path, too."""
    place = tmp_path / rows.name
    shutil.copy(rows, place)
    monkeypatch.chdir(tmp_path)
    if where == "file":
        words = ["--dataset", rows.name, "--cached-dataset", str(folder / "train")]
    else:
        words = ["--cached-dataset", str(folder / "train"), str(folder / "train") + "#20"]
    config, _ = sft.parse(["--model", str(tiny), *words, "--val-split", "0.2"])
    learnt, held_out = (Counter(json.dumps(row.messages) for row in some) for some in recipe_of(config).read(config))
    assert held_out
    assert not set(learnt) & set(held_out)
    assert max(learnt.values()) > 1


def test_rows_beside_a_folder_are_held_out_as_those_of_files_are(tiny: Path, tmp_path: Path) -> None:
    """Also those that have the words of another file's."""
    for name in ("a", "b"):
        lines = [json.dumps({"query": f"the step {n}", "response": name * (n % 2) + "holds"}) for n in range(10)]
        (tmp_path / name).with_suffix(".jsonl").write_text("\n".join(lines))
    a, b = str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")
    assert data.run(["encode", "--model", str(tiny), "--dataset", b, "--output-dir", str(tmp_path / "kept")]) == 0

    def found(*words: str) -> list[list[str]]:
        config, _ = sft.parse(["--model", str(tiny), "--val-split", "0.2", *words])
        return [[row.where for row in some] for some in recipe_of(config).read(config)]

    cached = ["--cached-dataset", str(tmp_path / "kept" / "train")]
    assert found("--dataset", a, *cached) == found("--dataset", a, b)
    assert found("--dataset", a, b, *cached) == found("--dataset", a, b, b)


def test_a_folder_that_is_only_read_is_read_into_memory(tiny: Path, folder: Path, monkeypatch) -> None:
    monkeypatch.setattr("shardproof.data.cached.os.access", lambda *_: False)
    found, _ = encoded(tiny, folder / "train", "--max-length", "32", "--packing")
    assert not found.cache_files


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--streaming", "--max-steps", "2"], "--streaming reads them during it"),
        (["--interleave-prob", "1.0"], "--interleave-prob"),
        (["--columns", "query=question"], "--columns applies to rows read"),
        (["--val-split", "0.1", "--cached-val-dataset", "x"], "--cached-val-dataset and --val-split"),
    ],
)
def test_options_that_mean_nothing_to_them_are_refused(tiny: Path, options: list[str], told: str) -> None:
    config, _ = sft.parse(["--model", str(tiny), "--cached-dataset", "kept", *options])
    with pytest.raises(ConfigError, match=told):
        recipe_of(config).check(config, 1)


def test_bytes_come_back_and_other_values_are_told(tmp_path: Path) -> None:
    from shardproof.data import cached

    def turned(value: Any) -> Any:
        text = cached._text(Row([{"role": "user", "content": "x"}], "a.parquet", 1, {"columns": {"seen": value}}))
        return json.loads(text, object_hook=cached._with_bytes)[1]["columns"]["seen"]

    assert turned(b"\x00\xff") == b"\x00\xff"
    with pytest.raises(DataError, match=r"a.parquet:1: the row cannot be stored: it contains a value of type set"):
        turned({1})


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        *[(kind, {"query": "the step"}) for kind in ("grpo", "rloo", "ppo")],
        ("gkd", {"query": "the step", "response": "holds"}),
        ("kto", {"query": "the step", "response": "holds", "label": True}),
    ],
)
def test_encoding_asks_for_nothing_that_rows_do_not_need(
    tiny: Path, tmp_path: Path, kind: str, row: dict[str, Any]
) -> None:
    """Neither rewards nor a teacher, nor a batch that answers fit into."""
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    argv = ["encode", "rlhf", "--rlhf-type", kind, "--model", str(tiny), "--dataset", str(file)]
    assert data.run([*argv, "--per-device-batch-size", "1", "--output-dir", str(tmp_path / "kept")]) == 0
    if kind != "gkd":
        told = "only supports --truncation right" if kind == "kto" else "does not truncate rows"
        with pytest.raises(ConfigError, match=f"--truncation left: --rlhf-type {kind} {told}"):
            data.run([*argv, "--output-dir", str(tmp_path / "x"), "--truncation", "left", "--max-length", "50"])


def test_encoding_asks_where_to_write(tiny: Path, rows: Path, folder: Path) -> None:
    argv = ["encode", "--model", str(tiny), "--dataset", str(rows)]
    with pytest.raises(ConfigError, match="--output-dir is missing"):
        data.run(argv)
    with pytest.raises(ConfigError, match=r"holds train, val. Name another --output-dir, or add --overwrite"):
        data.run([*argv, "--output-dir", str(folder)])
    with pytest.raises(ConfigError, match="--truncation right needs --max-length"):
        data.run([*argv, "--output-dir", str(folder), "--overwrite", "--truncation", "right"])


@pytest.mark.slow
def test_doctor_and_show_look_at_them(commands, sft) -> None:
    argv = without_rows(sft("--nproc", "2"))
    done = commands(
        [
            ("kept", kept(sft("--val-split", "0.2"))),
            ("doctor", ["doctor", *argv[1:], *WITH_VAL]),
            ("show", ["data", "show", *argv[1:], *CACHED, "-n", "2"]),
            ("verify", ["verify", *argv[1:], *CACHED]),
            ("other", ["doctor", *argv[1:], *CACHED, "--loss", "all"]),
        ]
    )
    for name in ("doctor", "show", "verify"):
        assert done[name].code == 0, done[name].output
    assert "18 rows" in done["show"].output
    assert "--loss answer, but this run has all" in " ".join(done["other"].output.split())
