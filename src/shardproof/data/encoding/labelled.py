"""From rows with labels to token ids, and from those to a padded batch.

[Note: what a classifier reads] A conversation goes through the tokenizer's chat template. If it ends with a question,
the generation prompt is added: by then a decoder has read everything, and the last token is what gets classified. A
tokenizer without a template (BERT's) gets the texts of the turns, one per line, and adds its own special tokens around
them; rows of plain `prompt` are treated the same way. A row that is too long loses text, never these special tokens.

A model takes the last token that is not padding as its last token. So batches are padded with the padding token of the
model's config, on the right, in training and in inference.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from shardproof.data.encoding.encode import Encoder, collate, walk
from shardproof.data.encoding.report import CUT, EncodeReport, Truncation, nothing_left, rows_of
from shardproof.data.encoding.seen import refusals
from shardproof.data.encoding.template import Span
from shardproof.data.forms.formats import with_system
from shardproof.data.forms.labels import LABEL, MULTI, REGRESSION, Label, Labels
from shardproof.data.forms.texts import check_texts
from shardproof.data.rows import BadRow, BadRows, Places, Row, pass_over
from shardproof.errors import DataError

if TYPE_CHECKING:
    import datasets
    import torch

LARGE = 10**9  # tokens; a tokenizer reports more than this if it knows no limit


@dataclass
class LabelReport(EncodeReport):
    """Counts of rows kept and left out. No token is learned, and a row whose text was cut keeps its label.

    Attributes:
        limit: the maximum number of tokens of a row, if any.
        labels: how many of the kept rows have each label, by name; empty for a regression.
    """

    limit: int | None = None
    labels: dict[str, int] = field(default_factory=dict)

    def plus(self, other: Self) -> Self:
        labels = {name: self.labels.get(name, 0) + count for name, count in other.labels.items()}
        return replace(super().plus(other), labels=labels)

    def __str__(self) -> str:
        parts = [f"{self.kept} rows, {self.tokens} tokens"]
        if self.labels:
            most = sorted(self.labels.items(), key=lambda pair: -pair[1])
            parts.append("labels: " + ", ".join(f"{n} {c}" for n, c in most[:8]) + (", ..." if len(most) > 8 else ""))
        if self.truncated:
            parts.append(f"{self.truncated} rows cut")
        if self.dropped:
            parts.append(f"{rows_of(self.dropped)} left out as too long (the longest: {self.longest} tokens)")
        return "; ".join(parts)


def longest_of(tokenizer: Any, max_length: int | None = None) -> int | None:
    """The maximum number of tokens of a row, from `max_length` and the tokenizer's own limit; None: no limit."""
    known = [n for n in (max_length, getattr(tokenizer, "model_max_length", None)) if n is not None and n < LARGE]
    return min(known, default=None)


class LabelledEncoder(Encoder):
    """Rows to token ids."""

    cuts = True  # rows that are too long
    shorter = CUT  # advice on how to shorten rows

    def __init__(self, tokenizer: Any, system: str | None = None) -> None:
        super().__init__(tokenizer, "answer", system)
        self._before, self._after = _marks(tokenizer)

    def ids(self, rows: Iterable[Row]) -> Iterator[tuple[Row, tuple[Sequence[int], Label | None] | str]]:
        """The tokens of each row, without the tokenizer's special tokens, and its label; or why it cannot be used."""
        for row, made in self.encode(rows):
            yield row, made if isinstance(made, str) else (array("i", made[0]), row.extra.get(LABEL))

    def fitted(self, row: Row, ids: Sequence[int], most: int | None, truncation: Truncation) -> list[int]:
        """The tokens with the tokenizer's special tokens, unless a template was used, cut to `most` tokens."""
        before, after = ([], []) if self._templated(row) else (self._before, self._after)
        room = len(ids) if most is None else max(most - len(before) - len(after), 0)
        return [*before, *cut(ids, room, truncation), *after]

    def _templated(self, row: Row) -> bool:
        return row.kind == "chat" and bool(self._tokenizer.chat_template)

    def _chat_text(self, row: Row) -> tuple[str, list[Span]]:
        if not self._templated(row):
            check_texts(row.messages, row.extra.get("tools"))
            return self._unmarked(turn["content"] for turn in with_system(row.messages, self._system)), []
        with refusals():
            messages = self.seen.turns(row.messages)
            self.seen.check(row, messages)
            asks = messages[-1]["role"] != "assistant"
            return self.template.render(messages, prompt=asks, **tools_of(row)), []

    def _plain_text(self, row: Row) -> tuple[str, list[Span]]:
        return self._unmarked((turn["content"] for turn in row.messages), ""), []

    def _unmarked(self, texts: Iterable[str], between: str = "\n") -> str:
        """The joined texts without the begin-of-text token that they may start with, which the tokenizer adds
        anyway."""
        return between.join(texts).removeprefix(self.begin_of_text)


def cut(ids: Sequence[int], most: int, truncation: Truncation) -> list[int]:
    """The first `most` ids, or the last ones if truncating on the left."""
    return list(ids[-most:] if truncation == "left" and most else ids[:most])


def tools_of(row: Row) -> dict[str, Any]:
    return {"tools": row.extra["tools"]} if "tools" in row.extra else {}


def _marks(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens that a tokenizer adds before and after a text by itself: `[CLS]` and `[SEP]`, a begin-of-text token,
    or none."""
    whole, bare = (list(tokenizer("a", add_special_tokens=added)["input_ids"]) for added in (True, False))
    starts = (i for i in range(len(whole) - len(bare) + 1) if whole[i : i + len(bare)] == bare)
    start = next(starts, None)
    return ([], []) if start is None else (whole[:start], whole[start + len(bare) :])


def encode_labelled(
    rows: Iterable[Row],
    tokenizer: Any,
    encoder: LabelledEncoder,
    labels: Labels,
    *,
    max_length: int | None,
    truncation: Truncation = "drop",
    bad_rows: BadRows = "stop",
    workers: int = 0,
) -> datasets.Dataset:
    """Tokenise rows of the form `labelled(labels)`. The arguments are those of `encode_rows`.

    Returns:
        A dataset with the columns `input_ids` and `labels` (the results of `Labels.of`), in the order of the rows. Its
        attribute `report` is a `LabelReport`, `places` gives the file and line of its rows, and `numbers` their
        numbers.

    Raises:
        DataError: a row cannot be used; a row is too long and `truncation` is `raise`; no row is left.
    """
    import datasets
    import numpy as np
    import pyarrow as pa

    most = longest_of(tokenizer, max_length)
    if not encoder.cuts and truncation != "raise":
        truncation = "drop"
    report = LabelReport(limit=most)
    counts: Counter[Any] = Counter()
    ids: list[Any] = []
    kept: list[Any] = []
    bad, places, numbers = list[BadRow](), Places(), array("q")
    for row_number, (row, made) in enumerate(walk(rows, encoder.ids, workers)):
        if isinstance(made, str):
            bad.append(BadRow(row.source, row.line, made))
            continue
        text, label = made
        length = len(encoder.fitted(row, text, None, truncation))
        report.rows += 1
        report.longest, report.shortest = max(report.longest, length), min(report.shortest or length, length)
        if most is not None and length > most:
            if truncation == "raise":
                raise DataError(f"{row.where}: the row has {length} tokens, --max-length is {most}.")
            if truncation == "drop":
                report.dropped += 1
                continue
            report.truncated += 1
        ids.append(np.array(encoder.fitted(row, text, most, truncation), dtype=np.int32))
        kept.append(label)
        places.append(row)
        numbers.append(row_number)
        report.tokens += len(ids[-1])
        counts.update(label if isinstance(label, list) else [label])
    pass_over(rows, bad, report.rows, bad_rows)
    report.kept = len(ids)
    if labels.problem != REGRESSION:
        report.labels = {name: counts[number] for number, name in enumerate(labels.names)}
    if not report.kept:
        raise DataError(nothing_left(report, most, shorter=encoder.shorter))
    dataset = datasets.Dataset(pa.table({"input_ids": pa.array(ids), "labels": pa.array(kept)}))
    dataset.report, dataset.places, dataset.numbers = report, places, numbers
    return dataset


def collate_labelled(rows: Sequence[Mapping[str, Any]], pad_token_id: int, labels: Labels) -> dict[str, torch.Tensor]:
    """One batch: rows padded on the right to the longest of them.

    Returns: `input_ids` and `attention_mask`, int64 of shape (rows, length), and `labels`, see `tensor_of`.
    """
    batch = collate([{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows], pad_token_id)
    return batch | {"labels": tensor_of([row["labels"] for row in rows], labels)}


def tensor_of(given: Sequence[Any], labels: Labels) -> torch.Tensor:
    """A tensor of labels from `Labels.of`: int64 of shape (rows,), or, if a row may have several labels or numbers are
    predicted, float32 of shape (rows, names)."""
    import torch

    if labels.problem == MULTI:
        places = torch.zeros(len(given), len(labels.names))
        for i, numbers in enumerate(given):
            places[i, numbers] = 1.0
        return places
    if labels.problem == REGRESSION:
        return torch.tensor(given, dtype=torch.float32).view(len(given), len(labels.names))
    return torch.tensor(given, dtype=torch.int64)
