"""Worlds that answers act in (--environments)."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

from shardproof.errors import ConfigError, DataError
from shardproof.train.rlhf.environments import factory_of
from train.conftest import last_of_each
from train.rlhf.algorithms import prepared_for, series_of, series_without_room
from train.rlhf.test_tools import FUNCTIONS, QUESTIONS, called, caller, prompts_of, told_of, tool

pytestmark = pytest.mark.slow

__all__ = ["caller"]


def acting(caller: Path, folder: Path, *names: str, rows: list[dict[str, Any]] | None = None) -> list[str]:
    """Options of a run whose answers call `add` of an environment."""
    options = called(caller, folder)
    del options[options.index("--tools") : options.index("--tools") + 2]
    if rows is not None:
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [*options, "--environments", *(f"{FUNCTIONS}:{name}" for name in names)]


def unrewarded(options: list[str]) -> list[str]:
    at = options.index("--reward-funcs")
    return options[:at] + options[at + 2 :]


@pytest.mark.parametrize("room, name", [(True, "Adding"), (False, "Waiting")])
def test_answers_act_in_an_environment(pools: Any, caller: Path, tmp_path: Path, room: bool, name: str) -> None:
    """It judges the answers that it was called by, and the numbers are those of one process."""
    series = {}
    for world in (1, 2):
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        options = [*acting(caller, tmp_path, name), "--per-device-batch-size", str(4 // world)]
        train = series_of if room else series_without_room
        series[world] = pools.run(world, train, prepared_for(options, world, [{}], folder), timeout=300.0)[0][0]
        written = [json.loads(line) for line in (folder / "0/completions.jsonl").read_text().splitlines()]
        roles = {row["prompt"][0]["content"]: [turn["role"] for turn in row["completion"]] for row in written}
        assert roles == {QUESTIONS[0]: ["assistant", "tool", "assistant"], QUESTIONS[1]: ["assistant"]}
        assert next(row["completion"] for row in written if len(row["completion"]) == 3)[1]["content"] == "3"
    for one, two in zip(series[1], series[2], strict=True):
        assert one["answers"] == two["answers"]
        assert two["loss"] == pytest.approx(one["loss"], abs=1e-5)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
        assert one[f"rewards/{name}/mean"] == two[f"rewards/{name}/mean"] == 1.0, "2 for the half that called it"
    assert series[1][0]["grad_norm"] > 0.1


def test_an_environment_is_enough_of_a_judge(pools: Any, caller: Path, tmp_path: Path) -> None:
    options = [*unrewarded(acting(caller, tmp_path, "Adding")), "--per-device-batch-size", "4"]
    (series,) = pools.run(1, series_of, prepared_for(options, 1, [{}], tmp_path / "out"), timeout=300.0)[0]
    assert series[0]["reward"] == series[0]["rewards/Adding/mean"] == 1.0


def test_half_a_character_of_an_environment_is_a_mark() -> None:
    """A tokenizer takes none."""
    assert factory_of([f"{FUNCTIONS}:Halved"])().reset() == " caf?"


def test_each_row_has_its_own(pools: Any, caller: Path, tmp_path: Path) -> None:
    """Of several, the one that it names, whose methods it is shown, and what that tells it."""
    rows = [{"query": "Sum?", "environment": "Adding", "told": " Be quick."}, {"query": "Next?", "environment": "Next"}]
    own = tmp_path / "own.py"
    own.write_text(
        "class Next:\n    def reset(self, prompt, **columns):\n        assert 'environment' not in columns\n"
        "    def step(self) -> str:\n        'Take a step.'\n        return 'done'\n"
        "    def get_reward(self):\n        return 1\n"
    )
    options = [*acting(caller, tmp_path, "Adding", rows=rows), f"{own}:Next", "--max-steps", "1"]
    prepared = prepared_for(last_of_each(["rlhf", *options])[1:], 2, [{}], Path(tempfile.mkdtemp(dir=tmp_path)))
    asked = {text for texts in pools.run(2, prompts_of, prepared, timeout=300.0) for text in texts}
    (summed,), (stepped,) = ([text for text in asked if word in text] for word in ("Sum? Be quick.", "Next?"))
    assert len(asked) == 2
    assert [f'"name": "{name}"' in summed for name in ("add", "step")] == [True, False]
    assert [f'"name": "{name}"' in stepped for name in ("add", "step")] == [False, True]


def test_calls_that_all_fail_are_told(pools: Any, caller: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    words = (
        '    def add(self, a: int, b: int) -> int:\n        """Add two numbers.\n\n        Args:\n'
        '            a: the first.\n            b: the second.\n        """\n        raise SystemExit(0)\n'
    )
    own.write_text(f"class Broken:\n    def reset(self, **columns):\n        pass\n{words}")
    options = [*acting(caller, tmp_path), f"{own}:Broken", "--per-device-batch-size", "4"]
    (told,) = pools.run(1, told_of, prepared_for(options, 1, [{}], tmp_path / "out"), timeout=300.0)
    start = "All calls of --environments since the last log, up to step 1, failed, one with {'error': 'SystemExit: 0'}"
    assert [text for text in told if text.startswith(start)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, words",
    [
        ("Failing", r"Failing, reset \(tools_for_tests.py:\d+\) failed with OSError: no server \(tools_for_tests.py, "),
        ("Listing", r"Listing, reset \(.*\) returned \['a list'\] \(list\). It must return a string or None."),
        ("Boundless", r"Boundless, get_reward \(.*\) returned inf, from which nothing can be learned."),
        (
            "Verbose",
            r"Verbose: with the text that 'reset' returned, a prompt has \d{4} tokens, and --max-length is 1024.",
        ),
    ],
)
def test_what_an_environment_does_wrong_is_said(
    pools: Any, caller: Path, tmp_path: Path, name: str, words: str
) -> None:
    options = [*acting(caller, tmp_path, name), "--per-device-batch-size", "4"]
    prepared = prepared_for(options, 1, [{}], tmp_path / "out")
    with pytest.raises(Exception, match=f"ConfigError: --environments .*:{words}"):
        pools.run(1, series_of, prepared, timeout=300.0)


@pytest.mark.parametrize(
    "options, words",
    [
        (["Adding"], "--environments Adding: name a class in a file, FILE.py:CLASS."),
        ([f"{FUNCTIONS}:add"], "has no class 'add'. It has: Adding, "),
        ([f"{FUNCTIONS}:failing"], "'failing' is not a class."),
        ([f"{FUNCTIONS}:Adding", f"{FUNCTIONS}:Adding"], "two classes are called Adding"),
        ([f"{FUNCTIONS}:Adding", "--use-vllm"], "--environments and --use-vllm: TRL asks the server for all ranks"),
        ([f"{FUNCTIONS}:Adding", "--rlhf-type", "rloo"], "--environments does not apply to --rlhf-type rloo"),
        ([f"{FUNCTIONS}:Endless"], "the class has no method 'reset(self, **columns)', which starts a new episode."),
        ([f"{FUNCTIONS}:Later"], "'reset' is async, and TRL does not await it. Write it without 'async'."),
        ([f"{FUNCTIONS}:Sized"], "needs 'size', but it is called without arguments: add defaults."),
        ([f"{FUNCTIONS}:Shown"], "needs 'completion', but it is called without arguments"),
        ([f"{FUNCTIONS}:Static"], "'get_reward' is not an instance method: 'def get_reward(self)'."),
        ([f"{FUNCTIONS}:Selfless"], "'get_reward' is not an instance method: 'def get_reward(self)'."),
        ([f"{FUNCTIONS}:Made"], "__new__ (tools_for_tests.py:200) needs 'size', but it is called without arguments"),
        ([f"{FUNCTIONS}:instance"], f"'instance' in {FUNCTIONS} is not a class."),
        (
            [f"{FUNCTIONS}:Wanting", "--dataset", "LEVEL", "--val-dataset", "TOLD"],
            "Rows to evaluate on: --environments",
        ),
        ([f"{FUNCTIONS}:Adding", f"{FUNCTIONS}:Waiting", "--dataset", "BOTH"], "its 'environment' is ['Adding'], and"),
        ([f"{FUNCTIONS}:OneByOne"], "OneByOne, numbers: it is a generator, but a call has one result: use return."),
        ([f"{FUNCTIONS}:Unfinished"], "the class is abstract. It lacks move."),
        ([f"{FUNCTIONS}:Wanting"], "needs 'level', but the rows have no such column. They have: prompt."),
        ([f"{FUNCTIONS}:Narrow", "--dataset", "TOLD"], "does not take 'told': define it as 'def reset(self, **col"),
        ([f"{FUNCTIONS}:Adding", "--tools", f"{FUNCTIONS}:add"], "--tools also has a function add."),
        (
            [f"{FUNCTIONS}:Adding", "--dataset", "OWN"],
            "it has its own tools, which cannot be run, and --environments names",
        ),
        (
            [f"{FUNCTIONS}:Adding", "--dataset", "TEXT"],
            "it is plain text, and functions are only called in conversations",
        ),
        ([f"{FUNCTIONS}:Adding", f"{FUNCTIONS}:Waiting"], "it has no 'environment', and --environments has Adding, W"),
        ([f"{FUNCTIONS}:Adding", "--chat-template", "chatml"], "--environments: the chat template of"),
    ],
)
def test_what_is_no_environment_is_refused(caller: Path, tmp_path: Path, options: list[str], words: str) -> None:
    rows = {
        "OWN": {"query": "?", "tools": [tool("city")]},
        "TEXT": {"prompt": "Once upon"},
        "TOLD": {"query": "?", "told": "!"},
        "LEVEL": {"query": "?", "level": 1},
        "BOTH": {"query": "?", "environment": ["Adding"]},
    }
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    more = [str(tmp_path / f"{option}.jsonl") if option in rows else option for option in options]
    with pytest.raises((ConfigError, DataError), match=re.escape(words)):
        prepared_for(last_of_each(["rlhf", *acting(caller, tmp_path), *more])[1:], 1, [{}], tmp_path / "out")


def test_somebody_has_to_judge(caller: Path, tmp_path: Path) -> None:
    """In each of several, too."""
    options = unrewarded(acting(caller, tmp_path, "Adding", "Unjudged"))
    for one in ([FUNCTIONS.name + ":Adding"], []):
        options = [word for word in options if not any(word.endswith(name) for name in one)]
        with pytest.raises(ConfigError, match="py:Unjudged: there is no reward: write a method 'get_"):
            prepared_for(options, 1, [{}], tmp_path / "out")


@pytest.mark.parametrize("judged", [False, True])
def test_answers_that_no_environment_judges_are_told(pools: Any, caller: Path, tmp_path: Path, judged: bool) -> None:
    """Not those that another reward judges, and not of a function that leaves them to the environment."""
    own = tmp_path / "own_rewards.py"
    own.write_text("def silent(completions, **columns):\n    return [None] * len(completions)\n")
    options = [*acting(caller, tmp_path, "Adding" if judged else "Silent"), "--reward-funcs", f"{own}:silent"]
    options = last_of_each(["rlhf", *options, "--per-device-batch-size", "2"])[1:]
    told, nothing = pools.run(2, told_of, prepared_for(options, 2, [{}], tmp_path / "out"), timeout=300.0)
    words = "Nothing judged 4 of 4 answers: each of silent, Silent gave None, and nothing is learned from them."
    assert [text for text in told if "judged" in text] == ([] if judged else [words])
    assert not nothing


def test_a_second_try_is_one(caller: Path, tmp_path: Path) -> None:
    """The example for schedulers of ms-swift."""
    example = f"{Path(__file__).parents[3]}/examples/rlhf/second_try.py:SecondTry"
    rows = [{"query": "What is 12 * 12?", "solution": "144"}] * 4
    options = [*unrewarded(acting(caller, tmp_path, rows=rows)), example, "--max-tool-calling-iterations", "2"]
    assert len(prepared_for(options, 1, [{}], tmp_path / "out")[0].rows) == 4
    question = factory_of([example])()
    assert "two tries" in question.reset(**rows[0], prompt="?")
    assert question.get_reward() == 0.0
    assert question.submit("124").startswith("That is wrong. Look")
    assert question.get_reward() == 0.0
    assert question.submit(" 144 ") == "Right."
    assert question.get_reward() == 0.8
    question.reset(solution=144)
    assert question.submit(144) == "Right.", "rows and models write numbers without quotes, too"
    assert question.get_reward() == 1.0
    assert [question.submit("1"), question.submit("144"), question.get_reward()][2] == 0.0, "a third try"


def test_the_example_is_one(caller: Path, tmp_path: Path) -> None:
    """What the model is told of it, and what it plays."""
    example = f"{Path(__file__).parents[3]}/examples/rlhf/guessing.py:Guessing"
    rows = [{"query": "Guess my number, from 1 to 100.", "number": 42}] * 4
    options = [*unrewarded(acting(caller, tmp_path, rows=rows)), example]
    prepared = prepared_for(options, 1, [{}], tmp_path / "out")
    assert len(prepared[0].rows) == 4
    game = factory_of([example])()
    assert game.reset(number=42, prompt="?") is None
    assert [game.guess(50), game.guess(25), game.guess(42)] == ["lower", "higher", "right"]
    assert game.get_reward() == pytest.approx(3**-0.5)
    game.reset(number=7, prompt="?")
    assert game.get_reward() == 0.0
