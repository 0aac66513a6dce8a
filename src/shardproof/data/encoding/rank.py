"""From a query and candidate documents to token ids of pairs, and from those to a padded batch.

[Note: what is judged] With a chat template, a pair is a conversation of question and answer, as for classifiers. A
tokenizer without one (BERT's) adds its own special tokens around and between the two texts, and distinguishes them by
`token_type_ids` if its model has these; so the pairs are the same as in sentence-transformers' CrossEncoder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from shardproof.data.encoding.embed import OF_TEXT, MatchEncoder, names_files, prompt_of, texts_of
from shardproof.data.encoding.encode import collate
from shardproof.data.encoding.labelled import cut
from shardproof.data.encoding.report import Truncation
from shardproof.data.forms.formats import with_system
from shardproof.data.forms.matches import NEGATIVE, POSITIVE
from shardproof.data.forms.parts import Problem
from shardproof.data.rows import Row

Pair = tuple[Sequence[int], Sequence[int]]  # both texts, or everything and an empty one


def relevances(row: Row) -> list[int]:
    """The relevance of each document of a row: 1 for a positive, 0 for a negative."""
    return [1] * len(row.extra[POSITIVE]) + [0] * len(row.extra[NEGATIVE])


class PairEncoder(MatchEncoder):
    """Rows to the token ids of the query with each of its positives and negatives."""

    def __init__(self, tokenizer: Any, system: str | None = None) -> None:
        super().__init__(tokenizer, prompt_of(system, ()))
        self._before_queries = system
        self._opening, self._dividing, self._closing = _pair_marks(tokenizer)
        self.typed = "token_type_ids" in tokenizer.model_input_names

    def texts(self, rows: Iterable[Row]) -> Iterator[tuple[Row, list[Any] | str]]:
        """The pairs of each row, without the tokenizer's special tokens; or why it cannot be used."""
        for row in rows:
            if names_files(row):
                yield row, OF_TEXT
                continue
            found = [*row.extra[POSITIVE], *row.extra[NEGATIVE]]
            if self._tokenizer.chat_template or not (self._opening or self._dividing or self._closing):
                made = [ids for _, ids in self.ids(self._conversations(row, found))]
                wrong = next((one for one in made if isinstance(one, str)), None)
                yield row, wrong or [(one[0], []) for one in made]
                continue
            try:
                each = [self._query(row), *found]
            except Problem as problem:
                yield row, str(problem)
                continue
            plain = [Row([{"role": "user", "content": text}], row.source, row.line, {}, "text") for text in each]
            query, *others = [one if isinstance(one, str) else one[0] for _, one in self.ids(plain)]
            yield row, [(query, other) for other in others]

    def _conversations(self, row: Row, found: Sequence[str]) -> Iterator[Row]:
        turns = with_system(row.messages, self._before_queries)
        for text in found:
            yield Row([*turns, {"role": "assistant", "content": text}], row.source, row.line, {}, "chat")

    def marked(self, pair: Any, most: int | None, truncation: Truncation = "right") -> list[int]:
        """A pair with the tokenizer's special tokens, cut to `most` tokens: the longer text is cut, and if both are
        longer than half, both are cut to half, as tokenizers truncate pairs ("longest_first")."""
        first, second = self._cut(pair, most, truncation)
        if not pair[1]:
            return first
        return [*self._opening, *first, *self._dividing, *second, *self._closing]

    def columns(
        self, row: Row, made: Sequence[Any], most: int | None = None, truncation: Truncation = "right"
    ) -> dict[str, Any]:
        """`labels`, 1 for a positive and 0 for a negative, and `seconds`, where the second text of each pair begins."""
        return {"labels": relevances(row), "seconds": [self.second(pair, most, truncation) for pair in made]}

    def second(self, pair: Pair, most: int | None, truncation: Truncation = "right") -> int:
        """Where the second text begins in the result of `marked`."""
        first = len(self._cut(pair, most, truncation)[0])
        return len(self._opening) + first + len(self._dividing) if pair[1] else first

    def _cut(self, pair: Pair, most: int | None, truncation: Truncation) -> tuple[list[int], list[int]]:
        first, second = pair
        if most is None:
            return list(first), list(second)
        marks = len(self._opening) + len(self._dividing) + len(self._closing) if second else 0
        room = max(most - marks, 0)
        half = (room + (len(first) > len(second))) // 2
        kept = min(len(first), max(room - len(second), half))
        return cut(first, kept, truncation), cut(second, room - kept, truncation)


def _pair_marks(tokenizer: Any) -> tuple[list[int], list[int], list[int]]:
    """The tokens that a tokenizer adds before, between and after two texts."""
    whole = list(tokenizer("a", "a")["input_ids"])
    bare = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    places = [i for i in range(len(whole) - len(bare) + 1) if whole[i : i + len(bare)] == bare]
    if len(places) < 2:
        return [], [], []
    first, last = places[0], places[-1]
    return whole[:first], whole[first + len(bare) : last], whole[last + len(bare) :]


def padded(pairs: Sequence[Sequence[int]], seconds: Sequence[int], pad_token_id: int, typed: bool) -> dict[str, Any]:
    """Pairs padded on the right to the longest. Returns `input_ids`, `attention_mask` and, if `typed`,
    `token_type_ids`, int64 of shape (pairs, length)."""
    import torch

    batch = collate([{"input_ids": ids, "labels": ids} for ids in pairs], pad_token_id)
    del batch["labels"]
    if typed:
        places = torch.arange(batch["input_ids"].shape[1])
        batch["token_type_ids"] = (places >= torch.tensor(seconds)[:, None]).long() * batch["attention_mask"]
    return batch


def collate_pairs(rows: Sequence[Mapping[str, Any]], pad_token_id: int, typed: bool) -> dict[str, Any]:
    """One batch: the result of `padded` for the pairs of all rows, and `labels`: `relevant`, fp32 of shape (pairs,),
    and `counts`, how many pairs each row has."""
    import torch

    pairs = [ids for row in rows for ids in texts_of(row)]
    batch = padded(pairs, [place for row in rows for place in row["seconds"]], pad_token_id, typed)
    relevant = torch.tensor([float(label) for row in rows for label in row["labels"]])
    return batch | {"labels": {"relevant": relevant, "counts": [len(row["labels"]) for row in rows]}}
