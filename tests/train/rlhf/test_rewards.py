"""What the built-in rewards say of answers, and how one's own are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardproof.errors import ConfigError
from shardproof.train.rewards import accuracy, check_rewards, load_rewards
from shardproof.train.rlhf_config import RlhfConfig

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


def test_length_is_what_is_left() -> None:
    (reward,) = load_rewards(["length"], PATTERN, 10)
    assert reward(completions=["", "", ""], completion_ids=[[], [1] * 5, [1] * 10]) == [1, 0.5, 0]


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
    ],
)
def test_a_function_that_is_not_there_is_refused_before_anything_runs(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "mine.py").write_text("def brevity(completions, **columns):\n    return []\nraise SystemExit\n")
    (tmp_path / "bad.py").write_text("def (\n")
    name = name.replace("FILE", str(tmp_path / "mine.py")).replace("BAD", str(tmp_path / "bad.py"))
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        check_rewards([name], PATTERN)
