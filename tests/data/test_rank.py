"""Pairs of a query and a text, beside what a tokenizer makes of two texts."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from shardproof.data.embed import encode_matches
from shardproof.data.matches import NEGATIVE, POSITIVE
from shardproof.data.rank import PairEncoder, collate_pairs
from shardproof.data.rows import Row

MARKS = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3}


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """Like BERT's: every letter is a token."""
    made = Tokenizer(models.WordLevel(MARKS | {chr(97 + i): 4 + i for i in range(26)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", model_input_names=names)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("most", [10, 11])
def test_long_pairs_are_cut_as_the_tokenizer_cuts_them(tokenizer, side: str, most: int) -> None:
    """A query that fills all the room left nothing of its texts, which then were all alike."""
    words = "a b c d e f g h i j".split()
    lengths = range(1, 10)
    rows = [
        Row(
            [{"role": "user", "content": " ".join(words[:n])}],
            "rows.jsonl",
            n,
            {POSITIVE: [" ".join(words[:m]) for m in lengths], NEGATIVE: []},
            "text",
        )
        for n in lengths
    ]
    encoded = encode_matches(rows, tokenizer, PairEncoder(tokenizer), max_length=most, truncation=side)
    batch = collate_pairs([encoded[i] for i in range(len(encoded))], 0, typed=True)
    tokenizer.truncation_side = side
    pairs = [(row.messages[0]["content"], text) for row in rows for text in row.extra[POSITIVE]]
    theirs = tokenizer(pairs, padding=True, truncation="longest_first", max_length=most, return_tensors="pt")
    for name in tokenizer.model_input_names:
        assert batch[name].equal(theirs[name]), name
    assert encoded.report.truncated == sum(n + m + 3 > most for n in lengths for m in lengths) > 0
