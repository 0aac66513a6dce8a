"""Parts of answers weigh what patterns say, and turns what rows say; all that is not weighed is as it was."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from shardproof.data.encoding.encode import IGNORE, collate, encode_rows
from shardproof.data.encoding.pack import collate_packed, pack_rows
from shardproof.data.encoding.weights import BUILT_IN, WEIGHTS, laid_over, weighed, weights_named
from shardproof.data.forms.formats import SFT, WEIGHED
from shardproof.data.rows import read_rows
from shardproof.errors import ConfigError, DataError
from shardproof.models.chatml import CHATML

ACTS = "Thought: a tool.\nAction: look\nAction Input: {}\nObservation: 3\nFinal Answer: 3"
CALLS = 'I look.\n<tool_call>\n{"name": "look"}\n</tool_call> And so.'
PLAIN_CHATML = CHATML.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")


def parts(names: list[str], text: str, question: str = "") -> list[tuple[str, float]]:
    return [(text[start:end], weight) for start, end, weight in weighed(weights_named(names), text, question)]


def test_a_key_weighs_itself_and_what_is_behind_it():
    assert parts(["react"], f"Well. {ACTS}") == [
        ("Well. ", 1.0),
        *(("Thought:", 1.0), (" a tool.\n", 1.0), ("Action:", 2.0), (" look\n", 2.0)),
        *(("Action Input:", 2.0), (" {}\n", 2.0), ("Observation:", 2.0), (" 3\n", 0.0)),
        *(("Final Answer:", 1.0), (" 3", 1.0)),
    ]


def test_an_expression_weighs_what_it_matches_over_lines():
    before, call, behind = CALLS.partition("</tool_call>")
    said, _, call = f"{before}{call}".partition("\n")
    assert parts(["hermes"], CALLS) == [(f"{said}\n", 1.0), (call, 2.0), (behind, 1.0)]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ({"x": 1, r"(b)\1": 3}, [("a B c", 1.0), ("bb", 3.0)]),
        ({"a": 2, "(?i)b": 3}, [("a", 2.0), (" ", 1.0), ("B", 3.0), (" c", 1.0), ("b", 3.0), ("b", 3.0)]),
        ({"(?P<n>a)": 2, "(?P<n>c)": 3}, [("a", 2.0), (" B ", 1.0), ("c", 3.0), ("bb", 1.0)]),
        ({"a*": 2, "a .": 3}, [("a", 2.0), (" B cbb", 1.0)]),
    ],
)
def test_an_expression_means_the_same_beside_others(write, patterns, expected):
    assert parts([write("mine.json", json.dumps(patterns))], "a B cbb") == expected


def test_a_question_may_say_what_its_answer_weighs():
    asked = "What is the value of x?"
    assert parts(["agentflan"], "Action: look", asked) == [("Action: look", 3.0)]
    assert parts(["agentflan"], "Action: look", "and y?") == [("Action:", 1.0), (" look", 3.0)]


def test_sets_are_taken_one_after_the_other_and_multiplied(write):
    mine = write("mine.json", json.dumps({"a+": 0.5, "look": [3]}))
    assert parts(["react", mine], "Action: look aa") == [
        *(("Action:", 2.0), (" ", 2.0), ("look", 6.0)),
        *((" ", 2.0), ("aa", 1.0)),
    ]
    thinks = "<think>\nso\n</think>\nAction: x"
    assert parts(["ignore_think_prefix", "react"], thinks)[0] == ("<think>\n", 0.0)


@pytest.mark.parametrize("name", BUILT_IN)
def test_those_of_ms_swift_are_read(name):
    assert weights_named([name])


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "cannot be read: it is not JSON"),
        ("[]", "has to be an object of regular expressions and weights"),
        ('{"a": -1}', "For 'a' it has [-1]; weights must be 0 or more"),
        ('{"a": [1, 2, 3]}', "For 'a' it has [1, 2, 3]"),
        ('{"a": [1, 2], "b": 1}', "This one mixes them. To have both, name two files"),
        ('{"(": 2}', "'(' is not a regular expression"),
    ],
)
def test_a_file_that_does_not_say_what_weighs_how_much_is_refused(write, content, why):
    with pytest.raises(ConfigError, match=re.escape(why)):
        weights_named([write("mine.json", content)])


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("hermess", "Did you mean hermes?"),
        ("none.json", "No such file"),
        ("ignore_empty_think", "use --loss answer+ignore_empty_think"),
    ],
)
def test_a_name_of_nothing_is_refused(name, why):
    with pytest.raises(ConfigError, match=re.escape(why)):
        weights_named([name])


def test_what_is_learnt_is_cut_where_weights_change():
    assert laid_over([(0, 4), (6, 9)], [(1, 3, 2.0), (3, 7, 0.0)]) == [
        *((0, 1, 1.0), (1, 3, 2.0), (3, 4, 0.0)),
        *((6, 7, 0.0), (7, 9, 1.0)),
    ]


def encoded(rows: list[Any], tokenizer: Any, tmp_path: Path, names: list[str] = [], **how: Any) -> Any:  # noqa: B006
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return encode_rows(
        read_rows([str(file)], form=WEIGHED), tokenizer, max_length=None, weights=weights_named(names), **how
    )


def told(dataset: Any, tokenizer: Any, row: int = 0) -> list[tuple[str, float]]:
    """What is learnt, with its weights, in stretches."""
    found: list[tuple[str, float]] = []
    each = dataset[row]
    for token, label, weight in zip(each["input_ids"], each["labels"], each[WEIGHTS], strict=True):
        if label == IGNORE:
            continue
        text = tokenizer.decode([token])
        if found and found[-1][1] == weight:
            found[-1] = found[-1][0] + text, weight
        else:
            found.append((text, weight))
    return found


QUESTION = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize("template", [CHATML, PLAIN_CHATML], ids=["marked", "unmarked"])
def test_tokens_weigh_what_their_text_weighs_and_the_end_of_a_turn_one(tokenizer, tmp_path, template):
    tokenizer.chat_template = template
    turns = [QUESTION, {"role": "assistant", "content": ACTS}, QUESTION, {"role": "assistant", "content": "Action: x"}]
    plain = encoded([{"messages": turns}], tokenizer, tmp_path)
    assert WEIGHTS not in plain.column_names
    dataset = encoded([{"messages": turns}], tokenizer, tmp_path, ["react"])
    assert dataset[0]["input_ids"] == plain[0]["input_ids"]
    weights = {part.strip(): weight for part, weight in told(dataset, tokenizer)}
    assert weights["Action: look\nAction Input: {}\nObservation:"] == 2.0
    assert weights["Final Answer: 3<|im_end|>"] == 1.0
    assert told(dataset, tokenizer)[-2:] == [("Action: x", 2.0), ("<|im_end|>", 1.0)]
    kept = [i for i, label in enumerate(dataset[0]["labels"]) if label != IGNORE]
    assert [dataset[0]["labels"][i] for i in kept] == [plain[0]["labels"][i] for i in kept]


@pytest.mark.parametrize("names", [[], ["hermes"]])
@pytest.mark.parametrize("loss", ["answer", "all"])
def test_a_turn_weighs_what_its_row_says(tokenizer, tmp_path, names, loss):
    turns = [QUESTION, {"role": "assistant", "content": CALLS, "loss_scale": 0.5}]
    turns += [QUESTION, {"role": "assistant", "content": "yes", "weight": 3}]
    turns += [QUESTION, {"role": "assistant", "content": "no", "loss": False}]
    dataset = encoded([{"messages": turns}], tokenizer, tmp_path, names, loss=loss)
    learnt = told(dataset, tokenizer)
    assert (f"{CALLS}<|im_end|>", 0.5) in learnt
    assert ("yes<|im_end|>", 3.0) in learnt
    assert ("no" in "".join(text for text, _ in learnt)) is False
    if loss == "answer":
        assert len(learnt) == 2


@pytest.mark.parametrize("weight", [1, 0.5])
def test_a_turn_with_a_weight_is_learnt_beside_the_last(tokenizer, tmp_path, weight):
    turns = [QUESTION, {"role": "assistant", "content": "yes", "weight": weight}]
    for last in ({}, {"loss": False}):
        row = {"messages": [*turns, QUESTION, {"role": "assistant", "content": "no", **last}]}
        dataset = encoded([row], tokenizer, tmp_path, ["hermes"], loss="last_round")
        assert ("yes<|im_end|>", weight) in told(dataset, tokenizer) or weight == 1
        learnt = "".join(text for text, _ in told(dataset, tokenizer))
        assert learnt == "yes<|im_end|>" + "no<|im_end|>" * (not last)


def test_a_turn_has_one_weight(write):
    row = {"messages": [QUESTION, {"role": "assistant", "content": "a", "weight": 2, "loss_scale": 3}]}
    with pytest.raises(DataError, match=re.escape("messages[1] has both 'weight' and 'loss_scale'")):
        read_rows([write("rows.jsonl", [row])], form=WEIGHED)


def test_weights_of_turns_are_refused_where_nothing_weighs(tokenizer, write):
    file = write("rows.jsonl", [{"messages": [QUESTION, {"role": "assistant", "content": "a", "weight": 0.5}]}])
    with pytest.raises(DataError, match=r"'weight' of messages\[1\] must be 0 or 1"):
        read_rows([file], form=SFT)
    for wrong in (-1, "2", True):
        row = {"messages": [QUESTION, {"role": "assistant", "content": "a", "weight": wrong, "loss": True}]}
        with pytest.raises(DataError, match=r"'weight' of messages\[1\] must be a number, 0 or more"):
            read_rows([write("rows.jsonl", [row])], form=WEIGHED)


def test_plain_text_is_weighed_too(tokenizer, tmp_path):
    row = {"prompt": "Action: a ", "completion": "Action: b"}
    assert told(encoded([row], tokenizer, tmp_path, ["react"]), tokenizer)[-1] == (tokenizer.eos_token, 1.0)
    whole = told(encoded([row], tokenizer, tmp_path, ["react"], loss="all"), tokenizer)
    assert whole[0][1] == 1.0
    assert "Action: b" in whole[1][0]
    assert whole[1][1] == 2.0


def test_a_token_is_of_the_part_of_its_first_letter_whatever_that_weighs(tokenizer, tmp_path, write):
    """Of `a process and`, ` process` begins with a space of the part before."""
    turns = {"messages": [QUESTION, {"role": "assistant", "content": "a process and so"}]}
    for row in (turns, {"prompt": "b ", "completion": "a process and so"}):
        found = {}
        for weight in (0, 0.5):
            mine = write("mine.json", json.dumps({r"\bprocess\b": weight}))
            found[weight] = told(encoded([row], tokenizer, tmp_path, [mine]), tokenizer)
        assert (" process", 0.5) in found[0.5], found
        assert "".join(text for text, weight in found[0.5] if weight == 1) == "".join(text for text, _ in found[0])


def test_of_an_answer_that_weighs_nothing_its_end_is_learnt(tokenizer, tmp_path, write):
    nothing = write("nothing.json", '{".+": 0}')
    row = {"prompt": "a", "completion": "b"}
    assert told(encoded([row], tokenizer, tmp_path, [nothing]), tokenizer) == [(tokenizer.eos_token, 1.0)]
    turns = {"messages": [QUESTION, {"role": "assistant", "content": "b"}]}
    assert told(encoded([turns], tokenizer, tmp_path, [nothing]), tokenizer) == [("<|im_end|>", 1.0)]


def test_rows_with_weights_and_without_become_one_dataset(tokenizer, tmp_path):
    rows = [
        {"messages": [QUESTION, {"role": "assistant", "content": "a " * n, **more}]}
        for n, more in ((3, {}), (5, {"weight": 2}), (4, {}))
    ]
    dataset = encoded(rows, tokenizer, tmp_path)
    assert [{*row[WEIGHTS]} for row in dataset] == [{1.0}, {1.0, 2.0}, {1.0}]
    batch = collate([dataset[i] for i in range(3)], 0)
    assert batch[WEIGHTS].shape == batch["labels"].shape
    assert batch[WEIGHTS].dtype == torch.float32
    assert WEIGHTS not in collate([{k: v for k, v in dataset[0].items() if k != WEIGHTS}], 0)
    packed = pack_rows(dataset, 64)
    whole = collate_packed([packed[i] for i in range(len(packed))], 0)
    assert whole[WEIGHTS].eq(2).sum() == batch[WEIGHTS].eq(2).sum()
    assert whole["labels"][whole[WEIGHTS].eq(2)].ne(IGNORE).all()


def test_a_row_that_is_cut_keeps_the_weights_of_its_tokens(tokenizer, tmp_path):
    rows = [{"messages": [QUESTION, {"role": "assistant", "content": f"one two three {CALLS}"}]}]
    whole = encoded(rows, tokenizer, tmp_path, ["hermes"])[0]
    file = tmp_path / "rows.jsonl"
    weights = weights_named(["hermes"])
    for side, part in (("right", slice(20)), ("left", slice(-20, None))):
        kept = read_rows([str(file)], form=WEIGHED)
        cut = encode_rows(kept, tokenizer, max_length=20, truncation=side, weights=weights)[0]
        assert [cut[name] for name in ("labels", WEIGHTS)] == [whole[name][part] for name in ("labels", WEIGHTS)]


class Slow:
    """A tokenizer that does not say where tokens stood."""

    def __init__(self, fast: Any) -> None:
        self._fast = fast

    is_fast = False

    def __call__(self, text: Any, **given: Any) -> Any:
        return self._fast(text, **given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fast, name)


def test_a_tokenizer_that_does_not_say_where_tokens_stood_gives_the_same_weights(tokenizer, tmp_path):
    rows = [{"messages": [QUESTION, {"role": "assistant", "content": CALLS}]}]
    slow = encoded(rows, Slow(tokenizer), tmp_path, ["hermes"])
    fast = encoded(rows, tokenizer, tmp_path, ["hermes"])
    assert [text for text, _ in told(slow, tokenizer)] == [text for text, _ in told(fast, tokenizer)]
    assert {weight for _, weight in told(slow, tokenizer)} == {1.0, 2.0}
