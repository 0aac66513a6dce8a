"""What the built-in rewards say of answers, and how one's own are found."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from pathlib import Path

import pytest

from shardproof.errors import ConfigError, DataError
from shardproof.train.options.batch import Batch
from shardproof.train.options.rlhf_config import RlhfConfig
from shardproof.train.rlhf import recipe as rlhf
from shardproof.train.rlhf.recipe import check
from shardproof.train.rlhf.rewards import accuracy, check_columns_for, check_rewarded, check_rewards, load_rewards

PATTERN = RlhfConfig.model_fields["format_pattern"].default


def turns(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def test_accuracy_compares_numbers_and_not_texts() -> None:
    answers = turns(
        "so 3 x 6 = 18\n#### 18", "#### 18.0", "#### $1,800", "it is 18 then", "\\boxed{18}", "no idea", "#### 17"
    )
    references = ["...\n#### 18", "#### 18", "#### 1800", "#### 18", "18", "#### 18", "#### 18"]
    assert accuracy(answers, answer=references) == [1, 1, 1, 1, 1, 0, 0]


def test_accuracy_says_nothing_of_rows_without_a_reference() -> None:
    assert accuracy(turns("#### 1", "#### 1"), solution=[None, "#### 1"]) == [None, 1]
    assert accuracy(["#### 1"]) == [None]


def test_format_wants_the_whole_answer() -> None:
    (reward,) = load_rewards(["format"], PATTERN, 10)
    assert reward(completions=turns("2 + 2 = 4\n#### 4", "#### -1,200.5\n", "#### ", "4", "#### 4 or 5")) == [
        1,
        1,
        0,
        0,
        0,
    ]
    (tagged,) = load_rewards(["format"], r"(?s)<think>.*</think>\s*<answer>.*</answer>", 10)
    assert tagged(completions=["<think>a\nb</think> <answer>4</answer>", "4"]) == [1, 0]


SOLUTION = 'Thought: so\nAction: add\nAction Input: {"a": 1, "b": 2}'


@pytest.mark.parametrize(
    ("answer", "worth"),
    [
        ('<think>x</think>\nAction: add\nAction Input: {"b": 2, "a": 1}\nObservation:', 1),
        ('Action: take\nAction Input: {}\nObservation: 3\nAction: add\nAction Input: {"a": 1, "b": 2}', 1),
        ('Action: add\nAction Input: {"a": 1}', 0),
        ('Action: take\nAction Input: {"a": 1, "b": 2}', 0),
        ("Action: add\nAction Input: a and b", 0),
        ("Action: add", 0),
        ("It is 3.", 0),
    ],
)
def test_a_call_is_worth_what_that_of_the_solution_is(answer: str, worth: int) -> None:
    (reward,) = load_rewards(["toolbench"], PATTERN, 10)
    assert reward(completions=turns(answer), solution=[SOLUTION]) == [worth]
    assert reward(completions=[answer], solution=[SOLUTION]) == [worth]


def test_calls_without_an_input_or_with_words_are_compared_as_they_stand() -> None:
    (reward,) = load_rewards(["toolbench"], PATTERN, 10)
    bare, words = "Action: list", "Action: ask\nAction Input: who is it"
    assert reward(
        completions=[bare, f"{bare}\nAction Input: {{}}", words, bare], solution=[bare, bare, words, words]
    ) == [
        *(1, 1, 1, 0),
    ]
    with pytest.raises(ConfigError, match=r"toolbench .*solution"):
        check_columns_for(["toolbench"], {"answer"})


def test_the_form_of_react_thinks_and_calls() -> None:
    (reward,) = load_rewards(["react_format"], PATTERN, 10)
    good = "<think>a\nb</think>\n\nAction: add\nAction Input: {}\nObservation:"
    bad = ["Action: add\nAction Input: {}", "<think>a</think>\nso: Action: add\nAction Input: {}", f"so {good}", ""]
    assert reward(completions=turns(good, *bad)) == [1, 0, 0, 0, 0]


def test_length_is_what_is_left() -> None:
    (reward,) = load_rewards(["length"], PATTERN, 10)
    assert reward(completions=["", "", ""], completion_ids=[[], [1] * 5, [1] * 10]) == [1, 0.5, 0]


def test_a_column_may_have_any_name_that_a_reward_wants() -> None:
    """`accuracy` without a right answer said to name one with --columns answer=NAME, and that was refused."""
    asked = {"model": "tiny", "dataset": ["stdlib"], "columns": {"answer": "ANSWER", "truth": "ANSWER"}}
    check(RlhfConfig(rlhf_type="grpo", reward_funcs=["accuracy"], **asked), 1)
    with pytest.raises(ConfigError, match="there is no field 'answer'"):
        check(RlhfConfig(rlhf_type="dpo", **asked), 1)


def test_a_function_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def brevity(completions, **columns):\n    return [-len(c) for c in completions]\n")
    check_rewards([f"{file}:brevity"], PATTERN)
    (reward,) = load_rewards([f"{file}:brevity"], PATTERN, 10)
    assert reward(completions=["abc"]) == [-3]


@pytest.mark.parametrize(
    "name, said",
    [
        ("acuracy", "there is no such reward. Did you mean accuracy"),
        ("nowhere.py:reward", "cannot be read"),
        ("FILE:brevty", "has no function 'brevty'. It has: brevity"),
        ("BAD:reward", "line 1"),
        ("FILE:number", "'number' (line 4) is not a function"),
    ],
)
def test_a_function_that_is_not_there_is_refused_before_anything_runs(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "mine.py").write_text(
        "def brevity(completions, **columns):\n    return []\nraise SystemExit\nnumber = 5\n"
    )
    (tmp_path / "bad.py").write_text("def (\n")
    name = name.replace("FILE", str(tmp_path / "mine.py")).replace("BAD", str(tmp_path / "bad.py"))
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_rewards([name], PATTERN)


OWN = """import torch

def raises(completions, **columns):
    return columns["solutionn"]
def leaves(completions, **columns): raise SystemExit(3)
def nothing(completions, **columns): return None
def one(completions, **columns): return [1.0]
def text(completions, **columns): return ["good"] * len(completions)
def digits(completions, **columns): return ["1.0"] * len(completions)
def nan(completions, **columns): return [None, float("nan")]
def inf(completions, **columns): return [1, float("inf")]
def large(completions, **columns): return [-1e38, 1.0]
def silent(completions, **columns): return [None] * len(completions)
def half(completions, **columns): return [None, True]
def tensor(completions, **columns): return torch.ones(len(completions))
def needs(completions, nothere, **columns): return [0.0] * len(completions)
def greedy(completions, solution): return [0.0] * len(completions)
async def later(completions, **columns): return [1.0] * len(completions)
class Judge:
    def __call__(self, completions, **columns): return [2.0] * len(completions)
judge = Judge()
def googol(completions, **columns): return [1, 10**400]
def panics(completions, **columns): raise BaseException("in Rust")
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("own") / "rw.py"
    file.write_text(OWN)
    return file


def called(own: Path, *names: str, alone: bool = True) -> list[list[float | None]]:
    """What the functions say of two answers, called as TRL calls them."""
    rewards = load_rewards([f"{own}:{name}" for name in names], PATTERN, 10, alone=alone)
    given = {"prompts": ["p", "p"], "completions": ["a", "b"], "completion_ids": [[1], [2]], "solution": ["a", "a"]}
    found = [reward(**given) for reward in rewards]
    return [asyncio.run(said) if asyncio.iscoroutine(said) else said for said in found]


@pytest.mark.parametrize(
    "name, said",
    [
        ("raises", "(rw.py:3) failed with KeyError: 'solutionn' (rw.py, line 4)"),
        ("leaves", "(rw.py:5) failed with SystemExit: 3"),
        ("nothing", "(rw.py:6) returned None. It must return a list with a number (or None) for each of the 2 answers"),
        ("one", "returned 1 value(s) for 2 answers"),
        ("text", "returned 'good' (str) for answer 1"),
        ("digits", "returned '1.0' (str) for answer 1"),
        ("nan", "returned nan for answer 2"),
        ("inf", "returned inf for answer 2"),
        ("googol", "returned inf for answer 2"),
        ("panics", "failed with BaseException: in Rust"),
        ("large", "returned -1e+38 for answer 1. Rewards are computed in fp32"),
        ("needs", "needs 'nothere', but the rows have no such column. They have: solution"),
        ("greedy", "does not take 'completion_ids'"),
    ],
)
def test_what_a_function_does_wrong_is_said_with_its_place(own: Path, name: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        called(own, name)
    assert f"--reward-funcs {own}:{name}" in str(caught.value)
    assert said in str(caught.value)


def test_a_function_that_takes_turns_for_texts_is_told_what_they_are(tmp_path: Path) -> None:
    """As those of ms-swift do. The line is the user's, not that of the library it calls."""
    file = tmp_path / "texts.py"
    file.write_text(
        "import re\n\ndef found(completions, **columns):\n    return [bool(re.search('4', c)) for c in completions]\n"
    )
    reward = load_rewards([f"{file}:found"], PATTERN, 10)[0]
    turns = [[{"role": "assistant", "content": "4"}]]
    with pytest.raises(ConfigError) as caught:
        reward(prompts=["p"], completions=turns, completion_ids=[[1]])
    assert "(texts.py, line 4)" in str(caught.value)
    assert "completion[0]['content'] is its text" in str(caught.value)


def test_what_may_be_returned(own: Path) -> None:
    assert called(own, "tensor", "half", "later", "judge") == [[1, 1], [None, 1], [1, 1], [2, 2]]


def test_answers_that_nobody_judged_are_told_of_once(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    called(own, "silent", "half")
    assert "None for 1 of 2 answers" in caplog.text
    caplog.clear()
    called(own, "half", "judge")
    called(own, "silent", alone=False)
    assert not caplog.text


@pytest.mark.parametrize(
    "name, said", [("needs", "They have: query, solution."), ("accuracy", "The rows have: query.")]
)
def test_a_column_that_is_missing_is_told_before_anything_is_loaded(own: Path, name: str, said: str) -> None:
    columns = ["query"] if name == "accuracy" else ["query", "solution"]
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_columns_for([name if name == "accuracy" else f"{own}:{name}"], columns)


def test_too_few_rows_say_what_makes_a_generation_smaller() -> None:
    config = RlhfConfig(rlhf_type="grpo", model="m", dataset=["d"], reward_funcs=["length"], num_generations=2)
    with pytest.raises(DataError, match="Lower --per-device-batch-size"):
        check_rewarded(config, Batch(micro=8, accumulation=1, world_size=1), [None] * 3)


@pytest.mark.parametrize("gold", ["gold", "response"])
def test_columns_name_what_rewards_want(tmp_path: Path, gold: str) -> None:
    """As the message about a missing right answer says; elsewhere a field that no row can have is refused."""
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"question": "2+2?", gold: "4"}) + 8 * "\n" + json.dumps({"question": "?", gold: "5"}))
    options = {"rlhf_type": "grpo", "reward_funcs": ["accuracy"], "num_generations": 2, "global_batch_size": 4}
    config = RlhfConfig(model="tiny", dataset=[str(file)], **options)
    named = config.model_copy(update={"columns": {"query": "question", "answer": gold}})
    rows, _ = rlhf.read(named)
    check_rewarded(named, rlhf.check(named, 1), rows)
    assert rows[0].extra["columns"]["answer"] == "4"
    swapped = {"columns": {"question": "query"}, "rlhf_type": "dpo", "reward_funcs": []}
    with pytest.raises(ConfigError, match=r"there is no field 'question'. Did you mean query=question\?"):
        rlhf.check(config.model_copy(update=swapped), 1)
