"""From rows of queries and what matches them to token ids, and from those to a padded batch.

[Note: what is embedded] A text is what the tokenizer makes of it, with the marks that it puts around a text by itself
and without a chat template: that is what sentence-transformers reads, so that it gives the same embeddings. The turns
of a conversation are a line each. A prompt stands before queries and not before what is to be found.
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


OF_TEXT = "it has files, but this is a text model"  # why a row cannot be used


@dataclass
class MatchReport(EncodeReport):
    """What became of the rows. Lengths are those of single texts.

    Attributes:
        limit: the most tokens of a text, where there is such.
        texts: how many texts the kept rows have.
        most: how many texts a row has at most.
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
    """The turns of the query of a row, of each of its positives and of each of its negatives."""
    found = (*row.extra[POSITIVE], *row.extra[NEGATIVE])
    return [row.messages, *map(turns_of_found, found)]


def names_files(row: Row) -> bool:
    """Whether any of its texts has a file."""
    return any(map(has_files, turns_of(row)))


def at_length(row: Row) -> Row:
    """The row with the turns of what is to be found behind those of its query."""
    return replace(row, messages=[turn for turns in turns_of(row) for turn in turns])


def prompt_of(system: str | None, files: tuple[str, ...]) -> str | None:
    """What stands before queries, of a system message: with a chat template the message itself, else a line in front
    of a text."""
    return system if files or not system else f"{system}\n"


class MatchEncoder(LabelledEncoder):
    """Rows to the token ids of their texts: the query, its positives, its negatives."""

    def __init__(self, tokenizer: Any, prompt: str | None = None) -> None:
        super().__init__(tokenizer)
        self._prompt = prompt

    def texts(self, rows: Iterable[Row]) -> Iterator[tuple[Row, list[Sequence[int]] | str]]:
        """Of each row its texts, without the tokenizer's marks; or why it cannot be used."""
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
        """A text with the tokenizer's marks, cut to `most` tokens."""
        return self.fitted(Row([], "", 0, {}, "text"), ids, most, truncation)

    def columns(
        self, row: Row, made: Sequence[Any], most: int | None = None, truncation: Truncation = "right"
    ) -> dict[str, Any]:
        """What a row has besides its token ids, once its texts are cut."""
        return {"labels": 1.0 if row.extra[LABEL] is None else row.extra[LABEL]}

    def _query(self, row: Row) -> str:
        """Raises Problem for what is not in its texts."""
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
    """Tokenise rows of a form of `Matches`. The arguments are those of `encode_rows`; lengths are of single texts.

    Returns:
        A dataset with the columns `input_ids`, the texts of a row one after the other (query, positive, negatives),
        `lengths`, of each of them, and those of `encoder.columns`: `labels`, the score of a row (1 where it has none).
        Its attribute `report` is a `MatchReport`, `places` says where its rows stand, and `numbers` which they are.

    Raises:
        DataError: a row cannot be used; a text is too long and may not be; no row is left.
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
        there are; `scores`, fp32 of shape (rows,); `keys`, int64 of shape (texts - rows,), the same for equal texts;
        and `mask`, the attention mask.
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
    """A number that equal texts share: lists of token ids, or of turns."""
    digest = hashlib.blake2b(repr(text).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)
