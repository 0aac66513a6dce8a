"""Pairs of a query and a text, beside what a tokenizer makes of two texts."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from shardproof.data.encoding.embed import encode_matches
from shardproof.data.encoding.rank import PairEncoder, collate_pairs
from shardproof.data.forms.matches import NEGATIVE, POSITIVE
from shardproof.data.rows import Row
from shardproof.errors import DataError

MARKS = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3}


def made(single: str, pair: str) -> PreTrainedTokenizerFast:
    """A tokenizer with these marks around a text and around two. Letters are tokens, and so are ends of lines."""
    letters = {chr(97 + i): 4 + i for i in range(26)}
    tokenizer = Tokenizer(models.WordLevel(MARKS | letters | {"\n": 30}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split("\n", "isolated")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", model_input_names=names)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """Like BERT's."""
    return made("[CLS] $A [SEP]", "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1")


def row_of(query: str, *texts: str, number: int = 1) -> Row:
    extra: dict[str, Any] = {POSITIVE: [*texts], NEGATIVE: []}
    return Row([{"role": "user", "content": query}], "rows.jsonl", number, extra, "text")


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("most", [10, 11])
def test_long_pairs_are_cut_as_the_tokenizer_cuts_them(tokenizer, side: str, most: int) -> None:
    """A query that fills all the room left nothing of its texts, which then were all alike."""
    words = "a b c d e f g h i j".split()
    lengths = range(1, 10)
    rows = [row_of(" ".join(words[:n]), *(" ".join(words[:m]) for m in lengths), number=n) for n in lengths]
    encoded = encode_matches(rows, tokenizer, PairEncoder(tokenizer), max_length=most, truncation=side)
    batch = collate_pairs([encoded[i] for i in range(len(encoded))], 0, typed=True)
    tokenizer.truncation_side = side
    pairs = [(row.messages[0]["content"], text) for row in rows for text in row.extra[POSITIVE]]
    theirs = tokenizer(pairs, padding=True, truncation="longest_first", max_length=most, return_tensors="pt")
    for name in tokenizer.model_input_names:
        assert batch[name].equal(theirs[name]), name
    assert encoded.report.truncated == sum(n + m + 3 > most for n in lengths for m in lengths) > 0


@pytest.mark.parametrize("pair", ["[CLS] $A $B:1", "$A [SEP] $B:1", "$A $B:1 [SEP]:1"])
def test_marks_may_stand_in_one_place_only(pair: str) -> None:
    tokenizer = made("$A", pair)
    encoded = encode_matches([row_of("a b", "c d e")], tokenizer, PairEncoder(tokenizer), max_length=None)
    batch = collate_pairs([encoded[0]], 0, typed=True)
    theirs = tokenizer([("a b", "c d e")], return_tensors="pt")
    for name in tokenizer.model_input_names:
        assert batch[name].equal(theirs[name]), name


def test_without_marks_a_line_begins_between_a_query_and_a_text() -> None:
    tokenizer = made("$A", "$A $B")
    (encoded,) = encode_matches([row_of("a b", "c d e")], tokenizer, PairEncoder(tokenizer), max_length=None)
    assert encoded["input_ids"] == tokenizer("a b\nc d e")["input_ids"]


def test_a_row_that_the_template_refuses_is_told_of(tokenizer) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    with pytest.raises(DataError, match=r"rows.jsonl:1: .*no system"):
        encode_matches([row_of("a", "b")], tokenizer, PairEncoder(tokenizer, "find"), max_length=None)
