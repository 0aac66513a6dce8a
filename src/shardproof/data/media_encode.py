"""Rows with files for a model with a processor: encoded once to be checked, and again whenever they are trained on.

[Note: twice] What a picture becomes is large, and how many tokens it takes only the processor knows. So before
training every row goes through the processor once: bad files are found, lengths and labels are kept, tensors are not.
In training the same rows are read and processed again, a batch at a time, by workers. Rows without files go the same
way, and bring no tensors of pictures or sounds: the towers are then not run at all.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from shardproof.data.encode import (
    IGNORE,
    Columns,
    Encoder,
    EncodeReport,
    Learnt,
    checked_length,
    labels_of,
    nothing_left,
)
from shardproof.data.media import Limits, files_of
from shardproof.data.parts import KINDS, Problem, parts_of, placeholders, text_of
from shardproof.data.rows import BadRow, Row, Rows, describe_bad
from shardproof.data.template import Span
from shardproof.errors import ConfigError, DataError

if TYPE_CHECKING:
    import torch

log = logging.getLogger("shardproof")

OnLost = Literal["skip", "stop"]

# What processors call the files of each kind.
_NAMES = {"image": "images", "audio": "audio", "video": "videos"}


class MediaRows(Sequence[dict[str, Any]]):
    """Rows that were encoded once. An element has `input_ids`, `labels` and the `row` itself, whose files are read when
    a batch is made.

    Attributes:
        report: what became of the rows.
    """

    def __init__(self, rows: Rows, numbers: array[int], encoded: Any, report: EncodeReport) -> None:
        self._rows, self._numbers, self._encoded, self.report = rows, numbers, encoded, report

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        return {**self._encoded[int(index)], "row": self._rows[self._numbers[int(index)]]}


class MediaEncoder:
    """Rows through a model's chat template and processor.

    Args:
        processor: of transformers, with the model's chat template on its tokenizer.
        limits: of what is read.
        loss, system, variables: as for `encode_rows`.
    """

    def __init__(
        self,
        processor: Any,
        limits: Limits,
        *,
        loss: Learnt = "answer",
        system: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.processor, self.limits = processor, limits
        self._encoder = Encoder(processor.tokenizer, loss, system, variables)
        self.takes = [kind for kind in KINDS if getattr(processor, f"{kind}_token", None) is not None]

    def text(self, row: Row) -> tuple[str, list[Span]]:
        """What the chat template makes of a row, and where in it the answers stand."""
        return self._encoder.text(row)

    def files(self, row: Row) -> dict[str, list[Any]]:
        """The files of a row, decoded.

        Raises:
            Problem: one of them cannot be used, or the model takes none of its kind.
        """
        for part in parts_of(row.messages):
            if part["type"] not in self.takes:
                raise Problem(
                    f"it has a file of kind {part['type']}, the model takes {', '.join(self.takes) or 'none'}"
                )
        files = files_of(row, self.limits)
        for message in row.messages:
            lost = [kind for kind in placeholders(_only_text(message)) if kind in self.takes and not files[kind]]
            if lost and message["role"] != "assistant":
                raise Problem(f"<{lost[0]}> stands in the text, and the row names no {lost[0]}")
        return files

    def encode(self, row: Row) -> tuple[list[int], list[int]]:
        """Token ids, with as many for each file as it takes, and labels.

        Raises:
            Problem: a file cannot be used, or the template has no place for it.
        """
        text, spans = self.text(row)
        files = self.files(row)
        out = self._process(
            [text],
            [files],
            return_text_replacement_offsets=True,
            text_kwargs={"return_offsets_mapping": True, "padding": False, "return_tensors": None},
        )
        replaced = out.get("text_replacement_offsets")
        if replaced is None:
            raise ConfigError(
                f"{type(self.processor).__name__} does not say where it puts files, so that answers cannot be found."
                " It needs a transformers with 'return_text_replacement_offsets'."
            )
        grown, moved = _after_replacement(text, spans, replaced[0])
        ids = list(out["input_ids"][0])
        return ids, labels_of(ids, out["offset_mapping"][0], moved, grown)

    def question(self, messages: Sequence[Mapping[str, Any]], where: str) -> dict[str, Any]:
        """The tensors that a model is asked with; relative paths begin beside the file `where`.

        Raises:
            DataError: a file cannot be used.
        """
        row = Row([dict(message) for message in messages], where, 0)
        text = self._encoder.template.render(messages, prompt=True)
        try:
            return dict(self._process([text], [self.files(row)], return_tensors="pt", text_kwargs={"padding": False}))
        except Problem as problem:
            raise DataError(str(problem)) from None

    def batch(self, rows: Sequence[Row], files: Sequence[dict[str, list[Any]]]) -> dict[str, Any]:
        """The tensors of some rows: `input_ids` and `attention_mask` of shape (rows, length), padded on the right, and
        what their files have become."""
        texts = [self.text(row)[0] for row in rows]
        out = self._process(texts, files, return_tensors="pt", text_kwargs={"padding": True, "padding_side": "right"})
        return dict(out)

    def _process(self, texts: list[str], files: Sequence[dict[str, list[Any]]], **options: Any) -> Any:
        flat = {_NAMES[kind]: [file for row in files for file in row[kind]] for kind in KINDS}
        given: dict[str, Any] = {name: values for name, values in flat.items() if values}
        begin = self.processor.tokenizer.bos_token
        text_options = {**options.pop("text_kwargs"), "add_special_tokens": bool(begin) and begin not in texts[0]}
        if "audio" in given:
            options["audio_kwargs"] = {"sampling_rate": self.limits.sampling_rate}
        if "images" in given:  # those of a row together: some processors tell rows apart by it
            given["images"] = [row["image"] for row in files]
        try:
            return self.processor(text=list(texts), **given, text_kwargs=text_options, **options)
        except (ValueError, IndexError, StopIteration) as error:
            reason = " ".join(str(error).split())[:300]
            raise Problem(f"{type(self.processor).__name__} refuses it: {reason}") from error


def encode_media_rows(
    rows: Rows,
    encoder: MediaEncoder,
    *,
    max_length: int | None,
    truncation: Literal["drop", "right", "left", "raise"] = "drop",
    bad_rows: Literal["stop", "skip"] = "stop",
    workers: int = 0,
) -> MediaRows:
    """Check every row and its files, and find out what is learnt. See [Note: twice].

    Args:
        rows: what `read_rows` gave. Those that cannot be used join its `skipped`.
        encoder: of the model.
        max_length: tokens, those of files among them; None for no limit.
        truncation: of longer rows. One with files is never cut, it is left out.
        bad_rows: as for `read_rows`.
        workers: processes that read and encode; 0 does it in this one.

    Raises:
        DataError: files cannot be used; a row is too long and may not be; no row is left.
    """
    checked_length(max_length)
    report, columns, numbers = EncodeReport(), Columns(), array("q")
    bad: list[BadRow] = []
    for number, (row, outcome) in enumerate(zip(rows, _walk(rows, encoder, workers), strict=True)):
        report.rows += 1
        if isinstance(outcome, str):
            bad.append(BadRow(row.source, row.line, outcome))
            continue
        has_files = next(parts_of(row.messages), None) is not None
        how = "drop" if has_files and truncation in ("left", "right") else truncation
        kept = report.take(row, outcome[0], outcome[1], max_length, how)
        if kept is not None:
            numbers.append(number)
            columns.append(*kept)
    if bad and (bad_rows == "stop" or not report.kept):
        raise DataError(describe_bad(bad, len(rows), None))
    rows.skipped.extend(bad)
    report.rows -= len(bad)
    if not report.kept:
        raise DataError(nothing_left(report, max_length))
    return MediaRows(rows, numbers, columns.dataset(), report)


def _walk(rows: Rows, encoder: MediaEncoder, workers: int) -> Iterator[Any]:
    """For each row its ids and labels, or why it cannot be used."""
    from torch.utils.data import DataLoader

    return iter(DataLoader(_Encoded(rows, encoder), batch_size=None, num_workers=workers, collate_fn=_as_it_is))  # type: ignore[arg-type]


class _Encoded:
    """What a worker makes of a row."""

    def __init__(self, rows: Rows, encoder: MediaEncoder) -> None:
        self._rows, self._encoder = rows, encoder

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        try:
            return self._encoder.encode(self._rows[index])
        except Problem as problem:
            return str(problem)


def _as_it_is(value: Any) -> Any:
    return value


class MediaCollator:
    """Batches from `MediaRows`, for a DataLoader with or without workers.

    Args:
        encoder: of the model.
        on_lost: what happens to a row whose file could be read before training and cannot be read now: `skip` leaves it
            out of the batch and says so, `stop` raises.
        speaks: whether batches hold the codes of spoken answers.
    """

    def __init__(self, encoder: MediaEncoder, on_lost: OnLost = "skip", speaks: bool = False) -> None:
        self.encoder, self.on_lost, self.speaks = encoder, on_lost, speaks

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """`input_ids`, `attention_mask`, `labels` (int64, rows x length), and the tensors of the files in the rows.

        Raises:
            DataError: a file is lost, and `on_lost` is `stop`.
        """
        there = [(feature, files) for feature in features if (files := self._files(feature["row"])) is not None]
        if not there:
            return self._nothing()
        batch = self.encoder.batch([feature["row"] for feature, _ in there], [files for _, files in there])
        kept = [f for (f, files), ids in zip(there, batch["input_ids"], strict=True) if self._same(f, files, ids)]
        if len(kept) < len(there):
            return self(kept)
        return batch | self._fitted(batch, kept) | self._codes([feature["row"] for feature in kept])

    def _codes(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        """The codes of spoken answers, where any row has one: int64 of shape (rows, longest), -100 behind the end."""
        import torch

        codes = [row.extra.get("codes", []) for row in rows]
        longest = max(map(len, codes))
        if not self.speaks or not longest:
            return {}
        return {"codes": torch.tensor([row + [IGNORE] * (longest - len(row)) for row in codes])}

    def _files(self, row: Row) -> dict[str, list[Any]] | None:
        try:
            return self.encoder.files(row)
        except Problem as problem:
            self._lost(row, str(problem))
            return None

    def _same(self, feature: Mapping[str, Any], files: Mapping[str, list[Any]], ids: torch.Tensor) -> bool:
        """Whether the files of a row still take the tokens that they took before training."""
        expected = feature["input_ids"]
        if not any(files.values()) or ids[: len(expected)].tolist() == list(expected):
            return True
        self._lost(feature["row"], "a file has changed since training began")
        return False

    def _lost(self, row: Row, reason: str) -> None:
        if self.on_lost == "stop":
            raise DataError(f"{row.where}: {reason}")
        log.warning("%s is left out of its step: %s", row.where, reason)

    def _fitted(self, batch: dict[str, Any], features: list[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Ids, mask and labels of one length. Rows of text that were cut before are cut again."""
        import torch

        length = max(len(feature["labels"]) for feature in features)
        ids = torch.full((len(features), length), self.encoder.processor.tokenizer.pad_token_id)
        mask, labels = torch.zeros_like(ids), torch.full_like(ids, IGNORE)
        for i, feature in enumerate(features):
            n = len(feature["labels"])
            ids[i, :n] = torch.as_tensor(feature["input_ids"])
            labels[i, :n] = torch.as_tensor(feature["labels"])
            mask[i, :n] = 1
        fitted = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        whole = batch["input_ids"].shape
        per_token = {k: v[:, :length] for k, v in batch.items() if k not in fitted and v.shape[:2] == whole[:2]}
        return fitted | per_token

    def _nothing(self) -> dict[str, Any]:
        """A batch of one row in which there is nothing to learn."""
        import torch

        ids = torch.full((1, 2), self.encoder.processor.tokenizer.pad_token_id)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.full_like(ids, IGNORE)}


def _after_replacement(text: str, spans: Sequence[Span], replaced: Sequence[Any]) -> tuple[str, list[Span]]:
    """The text with each placeholder grown to what the processor put in its place, and the spans in that text."""
    pieces, last = [], 0
    for change in replaced:
        start, end = change["span"]
        pieces += [text[last:start], change["replacement"]]
        last = end
    grown = "".join([*pieces, text[last:]])

    def moved(at: int) -> int:
        return at + sum(len(c["replacement"]) - (c["span"][1] - c["span"][0]) for c in replaced if c["span"][1] <= at)

    return grown, [(moved(start), moved(end)) for start, end in spans]


def _only_text(message: Mapping[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else text_of([part for part in content if part["type"] == "text"])
