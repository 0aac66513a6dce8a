"""Rows with files, encoded once before training: see [Note: twice] in encode.py."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from shardproof.data.encoding.beside import in_order
from shardproof.data.encoding.columns import Columns
from shardproof.data.encoding.report import CUT, EncodeReport, Truncation, checked_length, nothing_left
from shardproof.data.forms.parts import Problem, has_files
from shardproof.data.media.encode import MediaEncoder
from shardproof.data.rows import BadRow, BadRows, Places, Row, Rows, pass_over
from shardproof.errors import DataError

if TYPE_CHECKING:
    from shardproof.data.row_cache import RowCache

SMALLER = "make files smaller (--max-pixels, --max-frames): a row with files is never cut"


class MediaRows(Sequence[dict[str, Any]]):
    """Rows after their first encoding. An element has `input_ids`, `labels` and the `row` itself, whose files are read
    when a batch is made.

    Attributes:
        encoded: their token ids and labels, a dataset.
        report: counts of rows kept and left out.
        places: their files and lines.
    """

    def __init__(self, rows: Rows, numbers: array[int], encoded: Any, report: EncodeReport, places: Places) -> None:
        self._rows, self._numbers, self.encoded, self.report, self.places = rows, numbers, encoded, report, places

    @staticmethod
    def of(rows: Rows, encoded: Any) -> MediaRows:
        """The rows that were encoded to this dataset, which has their `numbers`."""
        return MediaRows(rows, encoded.numbers, encoded, encoded.report, encoded.places)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        return {**self.encoded[int(index)], "row": self._rows[self._numbers[int(index)]]}

    @property
    def rows(self) -> Iterator[Row]:
        """The rows as they were read."""
        return (self._rows[number] for number in self._numbers)

    def few(self, count: int) -> list[list[dict[str, Any]]]:
        """The `count` shortest rows, those with files first; and, if there are both kinds, `count` without files, which
        a model may pass to its decoder in another way."""
        lengths = [len(ids) for ids in self.encoded.data.column("input_ids")]
        seen = [has_files(row.messages) for row in self.rows]
        first = sorted(range(len(seen)), key=lambda number: (not seen[number], lengths[number]))
        text = [number for number in first if not seen[number]]
        chosen = [first[:count], *([text[:count]] if 0 < len(text) < len(seen) else [])]
        return [[self[number] for number in each] for each in chosen]


def encode_media_rows(
    rows: Rows,
    encoder: MediaEncoder,
    *,
    max_length: int | None,
    truncation: Truncation = "drop",
    bad_rows: BadRows = "stop",
    workers: int = 0,
    speaks: bool = False,
    cache: RowCache | None = None,
) -> MediaRows:
    """Check every row and its files, and find the labels. See [Note: twice].

    Args:
        rows: the result of `read_rows`. Rows that cannot be used are added to its `skipped`.
        encoder: the model's encoder.
        max_length: in tokens, including those of files; None for no limit.
        truncation: what happens to longer rows. A row with files is never cut, but left out.
        bad_rows: as for `read_rows`.
        workers: number of processes that read and encode; 0 uses this process.
        speaks: whether spoken answers are learned. A row whose answer was cut still has all of its speech, so it is
            left out.
        cache: the encodings of earlier runs with the same encoder; new ones are added.

    Raises:
        ConfigError: the changes of the model's processor to texts cannot be traced.
        DataError: files cannot be used; a row is too long and `truncation` is `raise`; no row is left.
    """
    checked_length(max_length)
    report, columns, numbers, cut = EncodeReport(), Columns(), array("q"), array("q")
    bad, places, text = list[BadRow](), Places(), False
    for number, (row, outcome) in enumerate(zip(rows, _walk(rows, encoder, workers, cache), strict=True)):
        if isinstance(outcome, str):
            bad.append(BadRow(row.source, row.line, outcome))
            continue
        report.rows += 1
        whole = has_files(row.messages) or (speaks and bool(row.extra.get("codes")))
        text |= not whole
        how: Truncation = "drop" if whole and truncation != "raise" else truncation
        for part in report.take(row, outcome, max_length, how):
            numbers.append(number)
            columns.append(*part)
            places.append(row)
        if report.truncated > len(cut):
            cut.append(number)
    pass_over(rows, bad, report.rows, bad_rows)
    if not report.kept:
        raise DataError(nothing_left(report, max_length, bad, CUT if text else SMALLER))
    dataset = columns.dataset()
    dataset.report, dataset.places = report, places  # type: ignore[attr-defined]
    dataset.numbers, dataset.cut = numbers, cut  # type: ignore[attr-defined]
    return MediaRows.of(rows, dataset)


def _walk(rows: Rows, encoder: MediaEncoder, workers: int, cache: RowCache | None) -> Iterator[Any]:
    """The ids and labels of each row, or why it cannot be used."""

    def encoded(number: int) -> tuple[int | None, Any]:
        row = rows[number]
        name = None if cache is None else cache.name(row)
        if cache is not None and name in cache:
            return name, None
        try:
            return name, encoder.encode(row)
        except Problem as problem:
            return None, str(problem)

    for name, outcome in in_order(encoded, len(rows), workers):
        if cache is not None and name is not None:
            if outcome is None:
                outcome = cache[name]
            else:
                cache.add(name, *outcome)
        yield outcome
    if cache is not None:
        cache.write()
