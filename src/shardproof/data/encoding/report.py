"""Reports on encoded rows: how many are kept, cut or left out, and why none is left."""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from shardproof.data.encoding.learnt import IGNORE
from shardproof.data.rows import BadRow, Row, describe_bad
from shardproof.errors import ConfigError, DataError

CUT = "allow rows to be cut with --truncation"

Truncation = Literal["drop", "right", "left", "split", "raise"]
Labelled = tuple[MutableSequence[Any], ...]  # token ids, labels and, if tokens are weighted, weights


@dataclass
class EncodeReport:
    """Counts of rows. `kept + dropped + unlearnable == rows`; `truncated` rows are among the kept ones, and so are
    those that were split into several: `pieces`."""

    rows: int = 0
    kept: int = 0
    truncated: int = 0
    dropped: int = 0  # longer than max_length
    unlearnable: int = 0  # truncation cut off every token of the answer
    tokens: int = 0
    learnt_tokens: int = 0
    longest: int = 0  # tokens, before truncation
    shortest: int = 0
    split: int = 0
    pieces: int = 0

    def take(self, row: Row, labelled: Labelled, max_length: int | None, truncation: Truncation) -> list[Labelled]:
        """Count a row. Returns the parts of it to train on: usually one, several if it is split, or none.

        Raises:
            DataError: it is too long, and `truncation` is `raise`.
        """
        length = len(labelled[0])
        self.longest = max(self.longest, length)
        self.shortest = min(self.shortest or length, length)
        if max_length is not None and length > max_length:
            if truncation == "raise":
                raise DataError(f"{row.where}: the row has {length} tokens, --max-length is {max_length}.")
            if truncation == "split" and IGNORE not in labelled[1][1:]:
                return self._take_pieces(labelled, max_length)
            if truncation in ("drop", "split"):
                self.dropped += 1
                return []
            part = slice(max_length) if truncation == "right" else slice(length - max_length, length)
            labelled = tuple(column[part] for column in labelled)
        labels = labelled[1]
        learnt = len(labels) - labels.count(IGNORE)
        if learnt == 0 or (learnt == 1 and labels[0] != IGNORE):  # the first token is never predicted
            self.unlearnable += 1
            return []
        self.kept += 1
        self.truncated += len(labels) < length
        self.tokens += len(labels)
        self.learnt_tokens += learnt
        return [labelled]

    def _take_pieces(self, labelled: Labelled, size: int) -> list[Labelled]:
        """The pieces of a long text; a single leftover token is dropped, since there is nothing to predict it from."""
        parts = [slice(start, start + size) for start in range(0, len(labelled[0]) - 1, size)]
        pieces: list[Labelled] = [tuple(column[part] for column in labelled) for part in parts]
        self.kept, self.split, self.pieces = self.kept + 1, self.split + 1, self.pieces + len(pieces)
        self.tokens += sum(len(ids) for ids, *_ in pieces)
        self.learnt_tokens += sum(len(labels) - labels.count(IGNORE) for _, labels, *_ in pieces)
        return pieces

    def plus(self, other: Self) -> Self:
        """The combined report of these rows and those of `other`."""
        shortest = min((one.shortest for one in (self, other) if one.rows), default=0)
        added = ("rows", "kept", "truncated", "split", "pieces", "dropped", "unlearnable", "tokens", "learnt_tokens")
        sums = {name: getattr(self, name) + getattr(other, name) for name in added}
        return replace(self, **sums, longest=max(self.longest, other.longest), shortest=shortest)

    def __str__(self) -> str:
        parts = [f"{self.kept} rows, {self.tokens} tokens, {self.learnt_tokens} of them learned"]
        if self.truncated:
            parts.append(f"{self.truncated} rows cut")
        if self.split:
            parts.append(f"{self.split} rows split into {self.pieces}")
        if self.dropped:
            parts.append(f"{rows_of(self.dropped)} left out as too long (the longest: {self.longest} tokens)")
        if self.unlearnable:
            parts.append(f"{rows_of(self.unlearnable)} left out because truncation removed their entire answer")
        return "; ".join(parts)


def rows_of(count: int) -> str:
    """The number of rows as text."""
    return f"{count} row{'s' * (count != 1)}"


def checked_length(max_length: int | None) -> None:
    """Raise ConfigError for a maximum length too small to hold anything."""
    if max_length is not None and max_length < 2:
        raise ConfigError(f"--max-length {max_length} leaves no room for a question and an answer; use at least 2.")


def nothing_left(report: EncodeReport, max_length: int | None, bad: Sequence[BadRow] = (), shorter: str = CUT) -> str:
    """The reason that no row is left to train on; `bad`: rows left out in addition to the counted ones; `shorter`:
    advice on how to shorten rows."""
    if bad:
        told = describe_bad(bad, report.rows + len(bad), None, "")
        return f"{nothing_left(report, max_length, shorter=shorter)}\n{told}"
    if not report.rows:
        return "There are no rows to train on."
    if report.dropped == report.rows:
        return (
            f"Every row is longer than --max-length {max_length}: the {report.rows} rows have {report.shortest} to"
            f" {report.longest} tokens.\nRaise --max-length, or {shorter}."
        )
    return (
        f"No row has an answer within --max-length {max_length}: of {report.rows} rows {report.dropped} are too long"
        f" and {report.unlearnable} have no token left to learn.\nRaise --max-length."
    )
