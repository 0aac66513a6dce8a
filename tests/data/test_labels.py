"""Promise: labels in any form that ms-swift knows, and names, become what a classifier learns; others are bad rows."""

from __future__ import annotations

import copy
import difflib
import json
from pathlib import Path
from typing import Any

import pytest

from shardproof.data.encoding.labelled import LabelledEncoder, collate_labelled, encode_labelled
from shardproof.data.forms.labels import MULTI, REGRESSION, SINGLE, Labels, labelled
from shardproof.data.forms.parts import Problem
from shardproof.data.forms.texts import WRITE
from shardproof.data.rows import Row, read_rows
from shardproof.errors import DataError

NAMED = Labels(("ham", "spam"), SINGLE)
STARS = Labels(("1", "2", "3"), SINGLE)
THREE, SEVERAL, AMOUNT = Labels.numbered(3), Labels.numbered(3, MULTI), Labels.numbered(1)
TOPICS = Labels(("art", "law", "sea"), MULTI)


@pytest.mark.parametrize(
    ("labels", "given", "expected"),
    [
        (THREE, 2, 2),
        (THREE, 2.0, 2),
        (THREE, "2", 2),
        (NAMED, "spam", 1),
        (NAMED, 1, 1),
        (NAMED, "1", 1),
        (NAMED, True, 1),
        (STARS, 3, 2),
        (STARS, "3", 2),
        (SEVERAL, [2, 0], [0, 2]),
        (SEVERAL, 2, [2]),
        (SEVERAL, [], []),
        (SEVERAL, "[0, 2]", [0, 2]),
        (SEVERAL, [1.0, 0.0, 1.0], [0, 2]),
        (SEVERAL, [True, False, False], [0]),
        (TOPICS, ["sea", "art"], [0, 2]),
        (TOPICS, "law", [1]),
        (AMOUNT, 1, 1.0),
        (AMOUNT, "-0.5", -0.5),
        (AMOUNT, [2.5], 2.5),
        (Labels.numbered(2, REGRESSION), [1, 2.5], [1.0, 2.5]),
    ],
)
def test_a_label_is_read(labels: Labels, given: Any, expected: Any) -> None:
    found = labels.of(given)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("labels", "given", "why"),
    [
        (THREE, 3, "is 3, but the 3 labels are numbered from 0 to 2"),
        (THREE, -1, "is -1"),
        (THREE, 1.5, "a whole number from 0 to 2 is expected"),
        (THREE, True, "a boolean"),
        (THREE, [1], "a list"),
        (THREE, "ham", "labels have no names: add --label-names"),
        (NAMED, "spma", "did you mean 'spam'"),
        (NAMED, "x", "they are ham, spam"),
        (STARS, 0, "no label has that name: they are 1, 2, 3"),
        (SEVERAL, [1, 0, 0], "names a label twice"),
        (SEVERAL, [0.5, 0.0, 1.0], "3 yes or no"),
        (SEVERAL, [1.0, 0.0], "2 yes or no, but there are 3 labels"),
        (SEVERAL, [3], "numbered from 0 to 2"),
        (AMOUNT, "much", "a finite number is expected"),
        (AMOUNT, float("nan"), "a finite number is expected"),
        (AMOUNT, True, "a finite number is expected"),
        (Labels.numbered(2, REGRESSION), [1], "holds 1 number(s), but 2 are expected"),
        (Labels.numbered(2, REGRESSION), 1, "a list of 2 numbers is expected"),
    ],
)
def test_a_label_that_there_is_not_is_told(labels: Labels, given: Any, why: str) -> None:
    with pytest.raises(Problem) as problem:
        labels.of(given)
    assert why in str(problem.value)


def written(folder: Path, *rows: Any) -> str:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_thousands_of_labels_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not for each row, or for each label of each row."""
    made: list[int] = []
    numbered, near = Labels.numbered, difflib.get_close_matches
    monkeypatch.setattr(Labels, "numbered", lambda count, *more: made.append(count) or numbered(count, *more))
    monkeypatch.setattr(difflib, "get_close_matches", lambda *asked, **how: made.append(1) or near(*asked, **how))
    labels = Labels(tuple(f"name{i}" for i in range(500)), SINGLE)
    assert [labels.shown(number) for number in range(500)] == list(labels.names)
    assert [labels.of(name) for name in labels.names] == list(range(500))
    for _ in range(3):
        with pytest.raises(Problem, match="did you mean 'name499'"):
            labels.of("name_499")
    assert made == [500, 1]


def test_rows_have_answers_or_none(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    file = written(
        tmp_path,
        {"messages": turns[:1], "label": 0, "id": 7},
        {"messages": turns, "label": 1},
        {"query": "hi", "system": "be", "label": "spam"},
        {"query": "hi", "response": "ho", "label": "spam"},
        {"prompt": "hi", "label": 0},
        {"prompt": "hi", "completion": "ho", "label": 0},
        {"instruction": "say", "input": "it", "label": 0},
    )
    rows = list(read_rows([file], form=labelled(NAMED)))
    said = [[(turn["role"], turn["content"]) for turn in row.messages] for row in rows]
    asked, answered = [("user", "hi")], [("user", "hi"), ("assistant", "ho")]
    assert said == [asked, answered, [("system", "be"), *asked], answered, asked, answered, [("user", "say\n\nit")]]
    assert [row.extra["label"] for row in rows] == [0, 1, 1, 1, 0, 0, 0]
    assert [row.kind for row in rows] == ["chat"] * 4 + ["text"] * 2 + ["chat"]
    assert rows[0].extra["columns"] == {"label": 0, "id": 7}


def test_bad_rows_are_named(tmp_path: Path) -> None:
    good = {"query": "hi", "label": "ham"}
    file = written(tmp_path, good, {"query": "hi"}, {"query": "hi", "label": None}, {"query": "hi", "label": "hma"})
    with pytest.raises(DataError) as error:
        read_rows([file], form=labelled(NAMED))
    text = str(error.value)
    assert "rows.jsonl:2: field 'label' is missing (it has query)" in text
    assert "rows.jsonl:3: field 'label' is null" in text
    assert "rows.jsonl:4: field 'label' is 'hma', but no label has that name; did you mean 'ham'?" in text
    assert "with 'label': one of ham, spam." in text
    rows = read_rows([file], form=labelled(NAMED, needed=False), bad_rows="skip")
    assert [row.extra["label"] for row in rows] == [0, None, None]


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    """`chat` has a template, `bert` puts its own marks around a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    from shardproof.models.tiny import train_tokenizer

    made = Tokenizer(models.WordLevel({"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "a": 3, "b": 4, "c": 5}, unk_token="[PAD]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    marks = [("[CLS]", 1), ("[SEP]", 2)]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=marks)
    bert = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]")
    return {"chat": train_tokenizer(["a b c"]), "bert": bert}


def rows_of(*texts: str) -> list[Row]:
    return [Row([{"role": "user", "content": t}], "x", i, {"label": i % 2}) for i, t in enumerate(texts)]


def test_a_conversation_ends_where_an_answer_would_begin(tokenizers: dict[str, Any]) -> None:
    encoder, (asked,) = LabelledEncoder(tokenizers["chat"], "be"), rows_of("a")
    answered = Row([*asked.messages, {"role": "assistant", "content": "b"}], "x", 1)
    plain = Row(asked.messages, "x", 2, kind="text")
    texts = [
        tokenizers["chat"].decode(encoder.fitted(row, made[0], None, "drop"))
        for row, made in encoder.ids([asked, answered, plain])
    ]
    system = "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert texts == [system, system + "b<|im_end|>\n", "a"]


def test_a_text_that_brings_the_begin_of_text_gets_no_other() -> None:
    from tokenizers.processors import TemplateProcessing

    from shardproof.models.tiny import train_tokenizer

    tokenizer = train_tokenizer(["a b c"])
    tokenizer.bos_token, tokenizer.chat_template = tokenizer.pad_token, None
    marks = [(tokenizer.bos_token, tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"{tokenizer.bos_token} $A", special_tokens=marks)
    rows = rows_of("a b", tokenizer.bos_token + "a b")
    rows += [Row(row.messages, "x", 3, kind="text") for row in rows]
    encoder = LabelledEncoder(tokenizer)
    ids = [encoder.fitted(row, made[0], None, "drop") for row, made in encoder.ids(rows)]
    assert ids == [tokenizer("a b")["input_ids"]] * 4


@pytest.mark.parametrize(
    ("truncation", "expected"), [("right", [1, 3, 4, 2]), ("left", [1, 4, 5, 2]), ("drop", None), ("raise", None)]
)
def test_what_is_cut_keeps_its_marks(tokenizers: dict[str, Any], truncation: Any, expected: Any) -> None:
    def encoded() -> Any:
        bert = tokenizers["bert"]
        rows, encoder = rows_of("a b c", "b"), LabelledEncoder(bert)
        return encode_labelled(rows, bert, encoder, NAMED, max_length=4, truncation=truncation)

    if truncation == "raise":
        with pytest.raises(DataError, match="x:0: the row has 5 tokens, --max-length is 4"):
            encoded()
        return
    found = encoded()
    assert [row["input_ids"] for row in found] == [*([expected] if expected else []), [1, 4, 2]]
    assert found.report.labels == {"ham": 1 if expected else 0, "spam": 1}
    assert (found.report.truncated, found.report.dropped) == ((1, 0) if expected else (0, 1))


def test_what_became_of_rows_is_told(tokenizers: dict[str, Any]) -> None:
    bert, some = tokenizers["bert"], rows_of("a b c", "b")
    for row, label in zip(some, ([0, 2], []), strict=True):
        row.extra["label"] = label
    for longest in (None, 5):  # as many as the longest row has
        report = encode_labelled(some, bert, LabelledEncoder(bert), SEVERAL, max_length=longest).report
        assert (report.limit, report.rows, report.kept, report.tokens) == (longest, 2, 2, 8)
        assert (report.shortest, report.longest, report.truncated) == (3, 5, 0)
        assert list(report.labels.values()) == [1, 0, 1]
    with pytest.raises(DataError, match="longer than --max-length 2: the 2 rows have 3 to 5 tokens"):
        encode_labelled(some, bert, LabelledEncoder(bert), SEVERAL, max_length=2)
    nothing = encode_labelled(some, bert, LabelledEncoder(bert), SEVERAL, max_length=2, truncation="left")
    assert nothing["input_ids"] == [[1, 2], [1, 2]]


def test_rows_that_the_template_leaves_something_out_of(tokenizers: dict[str, Any]) -> None:
    """And what it writes has the marks that it writes, once."""
    bert = copy.deepcopy(tokenizers["bert"])
    bert.chat_template = "{% for m in messages if m.role != 'system' %}[CLS] {{ m.content }} {% endfor %}"
    some = rows_of("a", "b", "c")
    some[1].messages.insert(0, {"role": "system", "content": "a"})
    with pytest.raises(DataError, match=r"x:1: the chat template does not write messages\[0\] \(system\)"):
        encode_labelled(some, bert, LabelledEncoder(bert), NAMED, max_length=4)
    found = encode_labelled(some, bert, LabelledEncoder(bert), NAMED, max_length=4, bad_rows="skip")
    assert found["input_ids"] == [[1, 3], [1, 5]]
    assert list(found.numbers) == [0, 2]
    assert [found.places[i] for i in range(2)] == ["x:0", "x:2"]


def test_without_a_template_a_row_is_the_texts_of_its_turns_alone(tokenizers: dict[str, Any]) -> None:
    """Tools and thinking were left out."""
    tools, thinks = rows_of("a", "b")
    tools.extra["tools"] = [{"type": "function", "function": {"name": "f"}}]
    thinks.messages.append({"role": "assistant", "content": "a", "reasoning_content": "b"})
    found = [problem for _, problem in LabelledEncoder(tokenizers["bert"]).ids([tools, thinks])]
    assert found == [
        f"it has tools, but there is no chat template to write them: {WRITE}",
        f"messages[1] has thinking besides its text, but there is no chat template to write it: {WRITE}",
    ]


def test_a_row_is_no_longer_than_the_tokenizer_allows(tokenizers: dict[str, Any]) -> None:
    bert = tokenizers["bert"]
    bert.model_max_length = 4
    try:
        found = encode_labelled(rows_of("a b c", "b"), bert, LabelledEncoder(bert), NAMED, max_length=100)
    finally:
        bert.model_max_length = 10**30
    assert len(found) == 1


def test_a_batch_is_padded_on_the_right() -> None:
    rows = [{"input_ids": [3, 4, 5], "labels": [0, 2]}, {"input_ids": [3], "labels": []}]
    batch = collate_labelled(rows, 9, SEVERAL)
    assert batch["input_ids"].tolist() == [[3, 4, 5], [3, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
    amounts = [{**row, "labels": 1.5} for row in rows]
    assert collate_labelled(amounts, 9, AMOUNT)["labels"].tolist() == [[1.5], [1.5]]
    assert collate_labelled([{**row, "labels": 1} for row in rows], 9, NAMED)["labels"].tolist() == [1, 1]
