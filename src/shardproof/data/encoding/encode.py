"""From rows to token ids and labels, and from those to a padded batch."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from shardproof.data.encoding.beside import in_order, told_of
from shardproof.data.encoding.columns import Columns
from shardproof.data.encoding.dated import day_of
from shardproof.data.encoding.learnt import (
    IGNORE,
    Spans,
    all_but_unlearnt,
    answers_of,
    labels_of,
    only_last_round,
    past_empty_thoughts,
    with_weights,
)
from shardproof.data.encoding.report import EncodeReport, Labelled, Truncation, checked_length, nothing_left
from shardproof.data.encoding.seen import Seen, refusals
from shardproof.data.encoding.template import Template
from shardproof.data.encoding.weights import Weights, batch_of_weights, laid_over, parts_of_text
from shardproof.data.forms.parts import Problem, parts_of
from shardproof.data.rows import BadRow, BadRows, Places, Row, Rows, pass_over
from shardproof.errors import ConfigError, DataError

if TYPE_CHECKING:
    import datasets
    import torch

T = TypeVar("T")

Learnt = Literal["answer", "last_round", "all", "answer+ignore_empty_think", "last_round+ignore_empty_think"]

_BATCH = 512  # rows tokenised in one call
_PART = 64  # rows that a process returns at a time
_FEW = 2000  # up to this many rows (a second or two of encoding), starting processes is not worth it


def encode_rows(
    rows: Iterable[Row],
    tokenizer: Any,
    *,
    max_length: int | None,
    loss: Learnt = "answer",
    truncation: Truncation = "drop",
    system: str | None = None,
    bad_rows: BadRows = "stop",
    workers: int = 0,
    weights: Sequence[Weights] = (),
) -> datasets.Dataset:
    """Tokenise rows and label the tokens that are learned.

    Chat rows go through the tokenizer's chat template. Rows of plain prompt and completion are joined as they are,
    after the tokenizer's begin-of-text token if it uses one, and closed by its end-of-text token.

    Args:
        rows: the result of `read_rows`, or any rows.
        tokenizer: a transformers tokenizer.
        max_length: in tokens; None for no limit.
        loss: `answer` learns the answers and the tokens that end them; `last_round` learns only those to the last
            question of a conversation (several if tools are called); `all` learns every token. With
            `+ignore_empty_think`, an empty thought that a template puts at the beginning of an answer is not learned.
        truncation: what happens to a longer row: it is left out (`drop`), loses its last (`right`) or first (`left`)
            tokens, or raises an error (`raise`). A row that loses every learned token is left out. `split` turns a row
            in which every token is learned, such as raw text, into several, and leaves out others.
        system: the system message for chat rows that have none.
        bad_rows: as for `read_rows`, applied to rows that have files, or of which the template refuses or loses
            something.
        workers: number of processes that encode `Rows`, if there are many; 0 encodes in this process.
        weights: weights for parts of answers.

    Returns:
        A dataset with the columns `input_ids` and `labels` (-100 where nothing is learned), in the order of the rows,
        and `token_weights` (float32) if there are `weights` or a turn has a weight. Its `report` is an `EncodeReport`;
        `places` gives the file and line of its rows, `numbers` their numbers, and `cut` the numbers of those that lost
        tokens.

    Raises:
        ConfigError: rows have messages, but the tokenizer has no chat template, or one whose answers cannot be found.
        DataError: a row cannot be used; a row is too long and `truncation` is `raise`; no row is left.
    """
    checked_length(max_length)
    encoder = Encoder(tokenizer, loss, system, bad_rows, weights)
    report, columns, places, numbers, cut = EncodeReport(), Columns(), Places(), array("q"), array("q")
    bad: list[BadRow] = []
    for row, labelled in learnt_of(walk(rows, encoder.packed, workers), max_length, truncation, report, bad):
        columns.append(*labelled)
        places.append(row)
        numbers.append(report.rows + len(bad) - 1)
        if report.truncated > len(cut):
            cut.append(numbers[-1])
    pass_over(rows, bad, report.rows, bad_rows)
    if not report.kept:
        raise DataError(nothing_left(report, max_length, bad))
    dataset = columns.dataset()
    dataset.report, dataset.places, dataset.numbers, dataset.cut = report, places, numbers, cut
    return dataset


def learnt_of(
    encoded: Iterable[tuple[Row, Labelled | str]],
    max_length: int | None,
    truncation: Truncation,
    report: EncodeReport,
    bad: list[BadRow],
) -> Iterator[tuple[Row, Labelled]]:
    """The parts to train on from rows that `Encoder` encoded. `report` counts the rows, `bad` collects those that
    cannot be used."""
    for row, outcome in encoded:
        if isinstance(outcome, str):
            bad.append(BadRow(row.source, row.line, outcome))
            continue
        report.rows += 1
        for part in report.take(row, outcome, max_length, truncation):
            yield row, part


def walk(
    rows: Iterable[Row], make: Callable[[Iterable[Row]], Iterable[tuple[Row, T]]], workers: int
) -> Iterator[tuple[Row, T]]:
    """The results of `make` for each row, using processes if that is worth it: rows are then returned without their
    content."""
    if workers < 2 or not isinstance(rows, Rows) or len(rows) <= _FEW:
        yield from told_of(make(rows), len(rows)) if isinstance(rows, Rows) else make(rows)
        return

    def part(number: int) -> list[tuple[Row, T]]:
        done = make(map(rows.__getitem__, range(len(rows))[number * _PART : (number + 1) * _PART]))
        return [(Row([], row.source, row.line, kind=row.kind), made) for row, made in done]

    for outcomes in in_order(part, -(-len(rows) // _PART), workers):
        yield from outcomes


def collate(features: Sequence[Mapping[str, Sequence[int]]], pad_token_id: int) -> dict[str, torch.Tensor]:
    """One batch: rows padded on the right to the longest of them.

    Args:
        features: rows with `input_ids` and `labels`, and `token_weights`.
        pad_token_id: pads `input_ids`; labels are padded with -100.

    Returns:
        `input_ids`, `attention_mask` and `labels`, each int64 of shape (rows, length), and `token_weights`, see
        `batch_of_weights`.
    """
    import torch

    length = max(len(feature["input_ids"]) for feature in features)
    input_ids = torch.full((len(features), length), pad_token_id)
    attention_mask = torch.zeros((len(features), length), dtype=torch.int64)
    labels = torch.full((len(features), length), IGNORE)
    for i, feature in enumerate(features):
        n = len(feature["input_ids"])
        input_ids[i, :n] = torch.as_tensor(feature["input_ids"])
        attention_mask[i, :n] = 1
        labels[i, :n] = torch.as_tensor(feature["labels"])
    batch = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
    return batch | batch_of_weights(features, labels)


class Encoder:
    """Rows to token ids and labels. With `bad_rows="skip"`, rows whose answers cannot be found are bad rows, too."""

    def __init__(
        self,
        tokenizer: Any,
        loss: Learnt,
        system: str | None,
        bad_rows: BadRows = "stop",
        weights: Sequence[Weights] = (),
    ) -> None:
        self._tokenizer, self.day = tokenizer, day_of(tokenizer)
        learnt, _, but = loss.partition("+")
        self._all, self._last, self._skips_thoughts = learnt == "all", learnt == "last_round", bool(but)
        self._system, self._weights = system, weights
        self._fast = bool(getattr(tokenizer, "is_fast", False))
        self._skips = bad_rows == "skip"

    def encode(self, rows: Iterable[Row]) -> Iterator[tuple[Row, Labelled | str]]:
        """The token ids and labels of each row, or why it cannot be used."""
        walk = iter(rows)
        while batch := list(islice(walk, _BATCH)):
            texts = [self._text_or_problem(row) for row in batch]
            labelled = self.labelled([text for text in texts if not isinstance(text, str)])
            for row, text in zip(batch, texts, strict=True):
                yield row, text if isinstance(text, str) else next(labelled)

    def packed(self, rows: Iterable[Row]) -> Iterator[tuple[Row, Labelled | str]]:
        """Like `encode`, but with arrays, which are faster to pass between processes than lists of numbers."""
        for row, made in self.encode(rows):
            yield row, made if isinstance(made, str) else tuple(map(array, "iif", made))

    def _text_or_problem(self, row: Row) -> tuple[str, Spans] | str:
        kind = next((part["type"] for part in parts_of(row.messages)), None)
        if kind is not None:
            return f"it has a file of type {kind}, but this model takes text only"
        try:
            return self.text(row)
        except Problem as problem:
            return str(problem)

    @cached_property
    def template(self) -> Template:
        """The model's chat template."""
        return Template(self._tokenizer, self.day)

    @cached_property
    def seen(self) -> Seen:
        """Checks on what that template writes."""
        return Seen(self.template, self._system)

    def text(self, row: Row) -> tuple[str, Spans]:
        """The text of a row and the spans of it that are learned, with weights, if any.

        Raises:
            Problem: the chat template refuses it or leaves something out, or all of it has weight 0.
        """
        return self._chat_text(row) if row.kind == "chat" else self._plain_text(row)

    def _chat_text(self, row: Row) -> tuple[str, Spans]:
        messages = only_last_round(row.messages) if self._last else row.messages
        try:
            with refusals():
                messages = self.seen.turns(messages)
                self.seen.check(row, messages)
                learnt = all_but_unlearnt if self._all else answers_of
                text, spans = learnt(self.template, messages, row.extra)
                if self._skips_thoughts:
                    spans = past_empty_thoughts(text, spans)
                if self._weights or any("weight" in turn for turn in messages):
                    answers = answers_of(self.template, messages, row.extra)[1] if self._all else spans
                    return text, with_weights(self.template, self._weights, messages, text, spans, answers)
                return text, spans
        except ValueError as error:
            every = "'loss' taken out of its turns" if self._all else "--loss all"
            if self._skips:
                raise Problem(f"{error} ({every} learns every token)") from error
            raise ConfigError(
                f"{row.where}: {error}.\nLearn every token with {every}, or give a template that marks the answers"
                " with {% generation %} ... {% endgeneration %}."
            ) from error

    def _plain_text(self, row: Row) -> tuple[str, Spans]:
        prompt, completion = (message["content"] for message in row.messages)
        begin, end = self.begin_of_text, self._tokenizer.eos_token or ""
        begin = "" if (prompt + completion).startswith(begin) else begin  # rows may already contain the token
        text = begin + prompt + completion.removesuffix(end) + end
        answer = len(begin) + len(prompt), len(text)
        spans = [(0, len(text))] if self._all else [answer]
        weight = row.messages[1].get("weight")
        if self._weights or weight is not None:
            said = answer[0], len(text) - len(end)
            parts = parts_of_text(self._weights, text, said, prompt) if weight is None else [(*answer, weight)]
            return text, laid_over(spans, parts)
        return text, spans

    @cached_property
    def begin_of_text(self) -> str:
        return begin_of_text(self._tokenizer)

    def labelled(self, texts: Sequence[tuple[str, Spans]]) -> Iterator[Labelled]:
        """Token ids and labels for the results of `text`."""
        if not self._fast:
            yield from (self._tokenise_pieces(text, spans) for text, spans in texts)
            return
        batch = self._tokenizer(
            [text for text, _ in texts],
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        for ids, offsets, (text, spans) in zip(batch["input_ids"], batch["offset_mapping"], texts, strict=True):
            yield ids, *labels_of(ids, offsets, spans, text)

    def _tokenise_pieces(self, text: str, spans: Spans) -> Labelled:
        """For tokenizers without offsets: every answer is tokenised separately."""
        ids: list[int] = []
        labels: list[int] = []
        weights: list[float] = []
        borders = [0, *(place for start, end, *_ in spans for place in (start, end)), len(text)]
        for i, (start, end) in enumerate(pairwise(borders)):
            piece = self._tokenizer(text[start:end], add_special_tokens=False)["input_ids"] if end > start else []
            ids += piece
            weight = spans[i // 2][2:] if i % 2 else (0,)
            labels += [IGNORE] * len(piece) if weight == (0,) else piece
            weights += [*(weight or (1.0,))] * len(piece)
        return (ids, labels, weights) if any(len(span) > 2 for span in spans) else (ids, labels)


def begin_of_text(tokenizer: Any) -> str:
    """The text that the tokenizer puts before a text by itself: its begin-of-text token, or nothing."""
    bos = tokenizer.bos_token_id
    return tokenizer.bos_token if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else ""
