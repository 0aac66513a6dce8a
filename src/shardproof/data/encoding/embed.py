"""From rows of queries and their matches to token ids, and from those to a padded batch.

[Note: what is embedded] A text is tokenised with the special tokens that the tokenizer adds by itself, and without a
chat template: this is what sentence-transformers does, so it gives the same embeddings. Each turn of a conversation
becomes a line. A prompt is put before queries, but not before documents.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from shardproof.data.encoding.encode import collate, walk
from shardproof.data.encoding.labelled import LabelledEncoder, longest_of
from shardproof.data.encoding.report import EncodeReport, Truncation, nothing_left, rows_of
from shardproof.data.forms.formats import SYSTEM
from shardproof.data.forms.matches import LABEL, NEGATIVE, POSITIVE, turns_of_found
from shardproof.data.forms.parts import Problem, has_files
from shardproof.data.forms.texts import check_texts
from shardproof.data.rows import BadRow, BadRows, Places, Row, pass_over
from shardproof.errors import DataError

if TYPE_CHECKING:
    import datasets


OF_TEXT = "it has files, but this is a text model"  # the reason that a row cannot be used


@dataclass
class MatchReport(EncodeReport):
    """Counts of rows kept and left out. Lengths are those of single texts.

    Attributes:
        limit: the maximum number of tokens of a text, if any.
        texts: how many texts the kept rows have.
        most: the maximum number of texts of a row.
    """

    limit: int | None = None
    texts: int = 0
    most: int = 0

    def plus(self, other: Self) -> Self:
        texts, most = self.texts + other.texts, max(self.most, other.most)
        return replace(super().plus(other), texts=texts, most=most)

    def __str__(self) -> str:
        parts = [f"{self.kept} rows of {self.texts} texts, {self.tokens} tokens"]
        if self.truncated:
            parts.append(f"{self.truncated} texts cut")
        if self.dropped:
            parts.append(f"{rows_of(self.dropped)} left out as too long (the longest text: {self.longest} tokens)")
        return "; ".join(parts)


def turns_of(row: Row) -> list[list[dict[str, Any]]]:
    """The turns of a row's query, of each of its positives and of each of its negatives."""
    found = (*row.extra[POSITIVE], *row.extra[NEGATIVE])
    return [row.messages, *map(turns_of_found, found)]


def names_files(row: Row) -> bool:
    """Whether any of its texts has a file."""
    return any(map(has_files, turns_of(row)))


def at_length(row: Row) -> Row:
    """The row with the turns of its documents after those of its query."""
    return replace(row, messages=[turn for turns in turns_of(row) for turn in turns])


def prompt_of(system: str | None, files: tuple[str, ...]) -> str | None:
    """The prompt for queries, from a system message: the message itself if files are read through a chat template,
    otherwise a line before the text."""
    return system if files or not system else f"{system}\n"


class MatchEncoder(LabelledEncoder):
    """Rows to the token ids of their texts: the query, its positives, its negatives."""

    def __init__(self, tokenizer: Any, prompt: str | None = None) -> None:
        super().__init__(tokenizer)
        self._prompt = prompt

    def texts(self, rows: Iterable[Row]) -> Iterator[tuple[Row, list[Sequence[int]] | str]]:
        """The texts of each row, without the tokenizer's special tokens; or why it cannot be used."""
        for row in rows:
            if names_files(row):
                yield row, OF_TEXT
                continue
            try:
                each = [self._query(row), *row.extra[POSITIVE], *row.extra[NEGATIVE]]
            except Problem as problem:
                yield row, str(problem)
                continue
            plain = [Row([{"role": "user", "content": text}], row.source, row.line, {}, "text") for text in each]
            made = [found for _, found in self.ids(plain)]
            wrong = next((found for found in made if isinstance(found, str)), None)
            yield row, wrong or [found[0] for found in made if not isinstance(found, str)]

    def marked(self, ids: Sequence[int], most: int | None, truncation: Truncation = "right") -> list[int]:
        """A text with the tokenizer's special tokens, cut to `most` tokens."""
        return self.fitted(Row([], "", 0, {}, "text"), ids, most, truncation)

    def columns(
        self, row: Row, made: Sequence[Any], most: int | None = None, truncation: Truncation = "right"
    ) -> dict[str, Any]:
        """The columns of a row besides its token ids, after its texts are cut."""
        return {"labels": 1.0 if row.extra[LABEL] is None else row.extra[LABEL]}

    def _query(self, row: Row) -> str:
        """The text of the query. Raises Problem for anything that text cannot represent."""
        check_texts(row.messages)
        prompt = "" if row.messages[0]["role"] in SYSTEM else self._prompt or ""
        return prompt + "\n".join(turn["content"] for turn in row.messages)


def encode_matches(
    rows: Iterable[Row],
    tokenizer: Any,
    encoder: MatchEncoder,
    *,
    max_length: int | None,
    truncation: Truncation = "drop",
    bad_rows: BadRows = "stop",
    workers: int = 0,
) -> datasets.Dataset:
    """Tokenise rows of a `Matches` form. The arguments are those of `encode_rows`; lengths are those of single texts.

    Returns:
        A dataset with the columns `input_ids`, the texts of a row one after the other (query, positive, negatives),
        `lengths`, the length of each of them, and those of `encoder.columns`: `labels`, the score of a row (1 if it has
        none). Its attribute `report` is a `MatchReport`, `places` gives the file and line of its rows, and `numbers`
        their numbers.

    Raises:
        DataError: a row cannot be used; a text is too long and `truncation` is `raise`; no row is left.
    """
    import datasets
    import numpy as np
    import pyarrow as pa

    most = longest_of(tokenizer, max_length)
    report = MatchReport(limit=most)
    columns: dict[str, list[Any]] = {}
    bad, places, numbers = list[BadRow](), Places(), array("q")
    if not encoder.cuts and truncation != "raise":
        truncation = "drop"

    def made_of(some: Iterable[Row]) -> Iterator[tuple[Row, Any]]:
        for row, made in encoder.texts(some):
            yield row, made if isinstance(made, str) else (made, encoder.columns(row, made, most, truncation))

    for number, (row, outcome) in enumerate(walk(rows, made_of, workers)):
        if isinstance(outcome, str):
            bad.append(BadRow(row.source, row.line, outcome))
            continue
        made, beside = outcome
        lengths = [len(encoder.marked(ids, None)) for ids in made]
        if not min(lengths):
            bad.append(BadRow(row.source, row.line, "the tokenizer produces no tokens for one of its texts"))
            continue
        report.rows += 1
        report.longest = max(report.longest, *lengths)
        report.shortest = min(report.shortest or min(lengths), *lengths)
        long = sum(most is not None and length > most for length in lengths)
        if long and truncation == "raise":
            raise DataError(f"{row.where}: a text has {max(lengths)} tokens, --max-length is {most}.")
        if long and truncation == "drop":
            report.dropped += 1
            continue
        report.truncated += long
        texts = [encoder.marked(ids, most, truncation) for ids in made]
        flat = np.array([token for ids in texts for token in ids], dtype=np.int32)
        for name, value in {"input_ids": flat, "lengths": [len(ids) for ids in texts], **beside}.items():
            columns.setdefault(name, []).append(value)
        places.append(row)
        numbers.append(number)
        report.tokens, report.texts = report.tokens + len(flat), report.texts + len(texts)
        report.most = max(report.most, len(texts))
    pass_over(rows, bad, report.rows, bad_rows)
    report.kept = len(columns.get("input_ids", []))
    if not report.kept:
        raise DataError(nothing_left(report, most, shorter=encoder.shorter))
    dataset = datasets.Dataset(pa.table({name: pa.array(values) for name, values in columns.items()}))
    dataset.report, dataset.places, dataset.numbers = report, places, numbers
    return dataset


def texts_of(row: Mapping[str, Any]) -> list[Sequence[int]]:
    """The token ids of each text of an encoded row."""
    found, start = [], 0
    for length in row["lengths"]:
        found.append(row["input_ids"][start : start + length])
        start += length
    return found


def collate_matches(rows: Sequence[Mapping[str, Any]], pad_token_id: int) -> dict[str, Any]:
    """One batch: all queries, then all positives, then all negatives, padded on the right to the longest of them.

    Returns: `input_ids` and `attention_mask`, int64 of shape (texts, length), and `labels`: `rows`, how many queries
        there are; `scores`, fp32 of shape (rows,); `keys`, int64 of shape (texts - rows,), equal for equal texts; and
        `mask`, the attention mask.
    """
    import torch

    each = [texts_of(row) for row in rows]
    queries, positives = ([texts[place] for texts in each] for place in (0, 1))
    found = [*positives, *(text for texts in each for text in texts[2:])]
    batch = collate([{"input_ids": ids, "labels": ids} for ids in (*queries, *found)], pad_token_id)
    labels = {
        "rows": len(rows),
        "scores": torch.tensor([row["labels"] for row in rows], dtype=torch.float32),
        "keys": torch.tensor([key_of(list(ids)) for ids in found]),
        "mask": batch["attention_mask"],
    }
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels}


def key_of(text: list[Any]) -> int:
    """A number that is the same for equal texts, given as lists of token ids or of turns."""
    digest = hashlib.blake2b(repr(text).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)
