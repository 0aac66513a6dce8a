"""Rows of an evaluation are answered by the model as it is then: what `infer` gives of the weights that it saves."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.train.test_families import MEDIA, ROWS

from shardproof.data.encoding.asked import last_answer
from shardproof.errors import ConfigError
from shardproof.models.families.known import family_of
from shardproof.train.answers.metrics import accuracy, bleu, check_answering, chrf, exact_match, rouge_l
from shardproof.train.options.config import SftConfig
from shardproof.train.plugin_calls import own_answer_metric

pytestmark = pytest.mark.slow

OMNI = "qwen2_5_omni"
PLUGIN = """
import shardproof

@shardproof.register_answer_metric("ends")
def ends(answer, right):
    return answer.endswith(right[-1:])

@shardproof.register_answer_metric("odd")
def odd(answer, right):
    return "much"
"""

# Whether a signal has asked to end is told between all batches then, at which ranks are when they come to it.
ALWAYS = """
import shardproof.train.stop, transformers
shardproof.train.stop.LOOK = 0.0
shardproof.register_callback("none")(type("Nothing", (transformers.TrainerCallback,), {}))
"""


def records_of(run: Any) -> list[dict[str, Any]]:
    assert run.code == 0, run.output
    return [json.loads(line) for line in (run.folder / "completions.jsonl").read_text(encoding="utf-8").splitlines()]


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def media(commands, tiny_models, files: Path):
    """Of each kind of model a run that answers rows with files, on two ranks, and what `infer` answers then."""

    (files / "always.py").write_text(ALWAYS)

    def run(kinds):
        jobs = []
        for kind in kinds:
            rows = [row for medium in ("text", *family_of({"model_type": kind}).media) for row in ROWS[medium]]
            file = files / f"asked-{kind}.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
            fixed = "--max-steps 2 --global-batch-size 4 --per-device-batch-size 2 --learning-rate 3e-3 --workers 0"
            argv = ["sft", "--model", str(tiny_models(kind)), "--dataset", str(file), "--val-dataset", str(file)]
            asked = "--predict-with-generate --max-new-tokens 6 --eval-strategy epoch --stage 3 --nproc 2"
            asked += f" --external-plugins {files / 'always.py'}"
            jobs.append((kind, [*argv, "--output-dir", "OUT", *fixed.split(), *asked.split()]))
            infer = ["infer", f"RUNS/{kind}", "--dataset", str(file), "--max-new-tokens", "6"]
            jobs.append((f"{kind}-infer", [*infer, "--result-path", "OUT.jsonl"]))
        return commands(jobs)

    return run


def check_media(done: Any, kind: str) -> None:
    records = records_of(done[kind])
    assert done[f"{kind}-infer"].code == 0, done[f"{kind}-infer"].output
    inferred = lines(Path(f"{done[f'{kind}-infer'].folder}.jsonl"))
    last = [record for record in records if record["step"] == records[-1]["step"]]
    numbers = [int(record["row"].rpartition(":")[2]) - 1 for record in last]
    assert len(numbers) >= 3
    assert [record["completion"] for record in last] == [inferred[number]["response"] for number in numbers]
    assert [record["labels"] for record in last] == [inferred[number]["labels"] for number in numbers]


@pytest.fixture(scope="module")
def every_family(media):
    return media([*MEDIA, "minicpmv4_6", OMNI])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*MEDIA, "minicpmv4_6", OMNI])
def test_rows_with_files_are_answered_by_every_family(every_family, kind: str) -> None:
    check_media(every_family, kind)


def test_rows_with_files_are_answered(media) -> None:
    check_media(media(["llava"]), "llava")


# The first eight are learnt.
TEXTS = [{"query": f"add {a} and {b}", "response": f"it is {a + b}"} for a in range(3) for b in range(4)]


@pytest.fixture(scope="module")
def asked(commands, tmp_path_factory: pytest.TempPathFactory):
    from shardproof.data.rows import read_rows
    from shardproof.models.tiny import build_tiny

    folder = tmp_path_factory.mktemp("asked")
    names = "a.jsonl", "b.jsonl", "last.jsonl", "raw.jsonl", "mine.py"
    first, second, last, plain, plugin = (str(folder / name) for name in names)
    Path(first).write_text("".join(json.dumps(row) + "\n" for row in TEXTS[:8]))
    Path(second).write_text("".join(json.dumps(row) + "\n" for row in [*TEXTS[8:], {"text": "nothing is asked here"}]))
    Path(last).write_text("".join(json.dumps(row) + "\n" for row in TEXTS[8:]))
    Path(plain).write_text(json.dumps({"text": "nothing is asked"}) + "\n")
    Path(plugin).write_text(PLUGIN)
    build_tiny(folder / "tiny", read_rows([first, last]).texts())
    base = ["sft", "--model", str(folder / "tiny"), "--dataset", first, "--output-dir", "OUT"]
    fixed = "--max-steps 12 --eval-steps 6 --global-batch-size 4 --per-device-batch-size 2 --learning-rate 3e-3"
    own = ["--answer-metrics", "exact_match", "ends", "--external-plugins", plugin]
    asks = ["--predict-with-generate", "--max-new-tokens", "6"]
    run = [*base, *fixed.split(), "--val-dataset", first, second]
    two = ["--stage", "3", "--nproc", "2"]
    infer = ["infer", "RUNS/one", "--dataset", first, last, "--max-new-tokens", "6"]
    best = ["--keep-best", "--best-metric", "a_ends", "--save-steps", "6"]
    return commands(
        [
            ("one", [*run, *asks, *own]),
            ("infer", [*infer, *own, "--result-path", "OUT.jsonl", "--batch-size", "2"]),
            ("two", [*run, *asks, *own, *two, *best]),
            ("resumed", [*run, *asks, *own, "--output-dir", "RUNS/two", "--resume", "RUNS/two/checkpoint-6"]),
            ("packed", [*run, *asks, *own, *two, "--packing", "--max-length", "64", "--eval-on-start"]),
            ("free", [*run, *asks, *two, "--padding-free", "--gradient-checkpointing", "--chunked-loss"]),
            ("without", [*run, *two]),
            ("odd", [*run, *asks, *two, "--answer-metrics", "odd", "--external-plugins", plugin]),
            ("unknown", [*run, *asks, "--answer-metrics", "exakt_match"]),
            ("raw", [*base, *fixed.split(), "--val-dataset", plain, *asks]),
            ("all", [*run, *asks, "--loss", "all"]),
            ("nobody", [*base, *asks]),
            ("alone", [*run, "--max-new-tokens", "5"]),
            ("labels", [*run, "--task", "seq_cls", "--answer-metrics", "bleu"]),
        ]
    )


def test_the_answers_are_those_of_the_weights_that_are_saved(asked) -> None:
    assert asked["infer"].code == 0, asked["infer"].output
    inferred = lines(Path(f"{asked['infer'].folder}.jsonl"))
    last = [record for record in records_of(asked["one"]) if record["step"] == 12]
    assert [record["completion"] for record in last] == [line["response"] for line in inferred]
    assert [record["labels"] for record in last] == [row["response"] for row in TEXTS]
    assert [record["prompt"].split("\n")[1] for record in last] == [row["query"] for row in TEXTS]
    assert len({record["completion"] for record in last}) > 1
    worth = [record["rewards"] for record in last]
    assert [line["rewards"] for line in inferred] == worth
    means = [sum(each[name] for each in worth) / 12 for name in ("exact_match", "ends")]
    assert [asked["one"].series(f"eval_{name}")[-1] for name in ("exact_match", "ends")] == pytest.approx(means)
    assert f"exact match {means[0]:.4f}" in asked["one"].output
    told = f"worth: exact_match {means[0]:.4g}  ends {means[1]:.4g} (12 rows with an answer of their own)"
    assert asked["infer"].output.strip().splitlines()[-1] == told
    assert f"  right     {last[0]['labels']}\n" in asked["one"].output


def test_any_number_of_processes_gives_the_same_answers(asked) -> None:
    assert records_of(asked["two"]) == records_of(asked["one"])
    assert [record["step"] for record in records_of(asked["one"])] == [6] * 12 + [12] * 12
    for name in ("exact_match", "ends", "a_exact_match", "a_ends", "b_ends"):
        assert asked["two"].series(f"eval_{name}") == asked["one"].series(f"eval_{name}")
    assert asked["two"].series("eval_loss") == pytest.approx(asked["without"].series("eval_loss"), abs=2e-5)
    assert not (asked["without"].folder / "completions.jsonl").exists()


def test_a_run_that_goes_on_writes_each_answer_once(asked) -> None:
    assert asked["resumed"].code == 0, asked["resumed"].output
    assert "step 7/12" in asked["resumed"].output
    assert "step 6/12" not in asked["resumed"].output
    assert [record["step"] for record in records_of(asked["two"])] == [6] * 12 + [12] * 12


def test_packed_rows_are_answered_one_by_one(asked) -> None:
    records = records_of(asked["packed"])
    assert [record["step"] for record in records] == [0] * 12 + [6] * 12 + [12] * 12
    by_row = {record["row"]: record["labels"] for record in records}
    assert by_row == {record["row"]: record["labels"] for record in records_of(asked["one"])}
    worth = [record["rewards"]["ends"] for record in records if record["step"] == 12]
    assert asked["packed"].series("eval_ends")[-1] == pytest.approx(sum(worth) / 12)


def test_what_makes_batches_lean_changes_no_answer(asked) -> None:
    alike = [{**record, "rewards": record["rewards"]["exact_match"]} for record in records_of(asked["one"])]
    assert [{**r, "rewards": r["rewards"]["exact_match"]} for r in records_of(asked["free"])] == alike
    assert asked["free"].series("eval_exact_match") == asked["one"].series("eval_exact_match")
    assert not asked["free"].series("eval_ends")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("odd", "--answer-metrics odd .*mine.py:8.* returned a str. It must return a number"),
        ("unknown", "--answer-metrics exakt_match: there is no such answer metric. Did you mean exact_match"),
        ("raw", "no evaluation row asks anything"),
        ("all", "--predict-with-generate and --loss all: answers are identified by the tokens that are learned"),
        ("nobody", "--predict-with-generate needs rows to evaluate on: add --val-dataset or --val-split"),
        ("alone", "--max-new-tokens applies to answers in evaluations: add --predict-with-generate"),
        ("labels", "--task seq_cls and --answer-metrics: no answers are generated"),
    ],
)
def test_what_cannot_be_is_told(asked, name: str, said: str) -> None:
    assert asked[name].code != 0
    assert re.search(said, " ".join(asked[name].output.split())), asked[name].output
    assert "step 1/" not in asked[name].output


def test_where_an_answer_begins() -> None:
    assert last_answer([-100, -100, 5, 6, -100, -100, 7, 8, -100]) == (6, 8)
    assert last_answer([-100, -100, 5]) == (2, 3)
    assert last_answer([1, 2, 3]) is None
    assert last_answer([-100, 2, 3]) is None
    assert last_answer([-100, -100]) is None
    assert last_answer([]) is None


def test_what_answers_are_worth() -> None:
    assert (exact_match(" a b", "a b "), exact_match("a", "b")) == (1.0, 0.0)
    assert (accuracy("so it is 1,200.0", "#### 1200"), accuracy("none", "3"), accuracy("3", "none")) == (1.0, 0.0, 0.0)
    same = "the cat sat on it"
    assert (chrf(same, same), bleu(same, same)) == pytest.approx((100, 100))
    assert rouge_l("The cat sat.", "the cat sat") == 1.0
    assert rouge_l("a b c d", "b d x y") == pytest.approx(2 * 2 / 8)
    assert rouge_l("我爱学习 abc", "我学习abc") == pytest.approx(2 * 4 / 9)
    assert (rouge_l("", "a"), rouge_l("", "")) == (0.0, 0.0)
    assert 0 < chrf("the hat", "the cat") < 100
    assert bleu("我们在这里学习", "我们在那里学习") > 10 > bleu("天气很好", "我们在那里学习")


def test_a_metric_of_ones_own_gives_a_number() -> None:
    assert own_answer_metric("mine", lambda answer, right: len(answer) == len(right))("ab", "cd") == 1.0
    for wrong, said in ((None, "None"), (float("nan"), "nan"), ([1, 2], "a list")):
        with pytest.raises(ConfigError, match=rf"returned {said}\. It must return a number"):
            own_answer_metric("mine", lambda answer, right, wrong=wrong: wrong)("a", "b")
    with pytest.raises(ConfigError, match=r"--answer-metrics mine .* KeyError"):
        own_answer_metric("mine", lambda answer, right: {}[answer])("a", "b")


def test_a_metric_that_is_not_there_is_told_before_a_model_is_loaded(tiny: Path, monkeypatch) -> None:
    from shardproof.cli.infer import _talk
    from shardproof.cli.infer_asked import InferConfig

    monkeypatch.setattr("shardproof.train.answers.chat.Chat", None)
    with pytest.raises(ConfigError, match="--answer-metrics exakt: there is no such answer metric"):
        _talk(tiny, InferConfig(dataset=["a.jsonl"], answer_metrics=["exakt"]), None, None)


def test_a_metric_whose_package_is_missing_is_told(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = SftConfig(val_dataset=["a.jsonl"], predict_with_generate=True, answer_metrics=["chrf"])
    with pytest.raises(ConfigError, match=r"chrf needs sacrebleu: pip install 'shardproof\[answers\]'"):
        check_answering(config)


def test_answers_end_at_texts(commands, sft, rows: Path) -> None:
    asked = ["--val-dataset", str(rows), "--predict-with-generate", "--max-new-tokens", "12", "--nproc", "2"]
    run = commands([("ended", sft(*asked, "--stop-words", "e", "s"))])["ended"]
    answers = [record["completion"] for record in records_of(run)]
    assert len(answers) == 23
    assert not [answer for answer in answers if "e" in answer or "s" in answer]
