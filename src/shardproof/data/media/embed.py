"""Queries and their matches with images, audio and video, for a model with a processor.

[Note: what is embedded with files] A text is rendered as a conversation by the model's chat template, up to where an
answer would begin: this tells the processor where files go, and is how multimodal embedding models read it
(Qwen3-VL-Embedding, GME). A system message of the run is put before queries, but not before documents. As in
media/encode.py, rows go through the processor once before training, and again when a batch is made.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from shardproof.data.encoding.embed import MatchEncoder, key_of, turns_of
from shardproof.data.encoding.labelled import tools_of
from shardproof.data.encoding.report import Truncation
from shardproof.data.encoding.seen import refusals
from shardproof.data.encoding.template import Span
from shardproof.data.forms.formats import with_system
from shardproof.data.forms.parts import Problem, parts_of, text_of
from shardproof.data.media.batches import OnLost, nothing, together_or_alone
from shardproof.data.media.encode import MediaEncoder
from shardproof.data.media.limits import Limits
from shardproof.data.media.reading import identity
from shardproof.data.rows import Row
from shardproof.errors import DataError

log = logging.getLogger("shardproof")


class _Asked(MediaEncoder):
    """Rows as prompts: rendered by the chat template up to where an answer would begin.

    Args:
        answered: whether a row that ends with an answer is rendered with it, without a new opening.
    """

    def __init__(self, processor: Any, limits: Limits, answered: bool) -> None:
        super().__init__(processor, limits)
        self._answered = answered

    def text(self, row: Row) -> tuple[str, list[Span]]:
        asks = not self._answered or row.messages[-1]["role"] != "assistant"
        turns = [{**turn, "content": self.known(turn["content"])} for turn in self.seen.in_its_words(row.messages)]
        with refusals():
            self.seen.check(row, turns)
            return self._begun(self._encoder.template.render(turns, prompt=asks, **tools_of(row))), []


class MediaMatchEncoder(MatchEncoder):
    """Rows to the token ids of their texts, including those of files, and to batches.

    Args:
        processor, limits: as for `MediaEncoder`.
        system: the system message for queries.
    """

    cuts = False
    shorter = "make files smaller (--max-pixels, --max-frames): rows for a model that takes files are never cut"
    answered = False  # whether texts may end with an answer

    def __init__(self, processor: Any, limits: Limits, system: str | None = None) -> None:
        super().__init__(processor.tokenizer)
        self._before_queries = system
        self.media = _Asked(processor, limits, self.answered)

    def conversations(self, row: Row) -> list[Row]:
        """Each text of a row, as a row of its own."""
        query, *found = turns_of(row)
        each = [with_system(query, self._before_queries), *found]
        return [Row([*turns], row.source, row.line) for turns in each]

    def texts(self, rows: Iterable[Row]) -> Iterator[tuple[Row, list[Sequence[int]] | str]]:
        """The token ids of each row's texts; or why it cannot be used."""
        for row in rows:
            try:
                yield row, [self.media.encode(text)[0] for text in self.conversations(row)]
            except Problem as problem:
                yield row, str(problem)

    def marked(self, ids: Sequence[int], most: int | None, truncation: Truncation = "right") -> list[int]:
        """The ids, unchanged."""
        return list(ids)

    def read(self, row: Row) -> tuple[list[Row], list[dict[str, list[Any]]]]:
        """The texts of a row and their files. Raises Problem for a file that cannot be used."""
        texts = self.conversations(row)
        return texts, [self.media.files(text) for text in texts]

    def problem(self, row: Row) -> str | None:
        """Why a row cannot be used."""
        ((_, made),) = self.texts([row])
        return made if isinstance(made, str) else None

    def batch_of(self, rows: Iterable[Row]) -> tuple[dict[str, Any], list[int]] | None:
        """The tensors of all texts of rows, and the number of texts of each row; None if there are no rows.

        Raises:
            Problem: a file cannot be used.
        """
        each = [self.read(row) for row in rows]
        if not each:
            return None
        texts = [text for texts, _ in each for text in texts]
        files = [of_text for _, files in each for of_text in files]
        return self.batch(texts, files), [len(texts) for texts, _ in each]

    def key(self, text: Row) -> int:
        """A number that is the same for equal texts; files with the same location are equal, whatever their names."""
        files = [identity(part[part["type"]], text, self.media.limits) for part in parts_of(text.messages)]
        return key_of([*((turn["role"], text_of(turn["content"])) for turn in text.messages), *files])

    def batch(self, texts: Sequence[Row], files: Sequence[dict[str, list[Any]]]) -> dict[str, Any]:
        """The tensors of some texts, padded on the right. If the processor cannot take them together, it gets them one
        by one.

        Raises:
            Problem: it refuses one of them.
        """
        return together_or_alone(self.media.batch, texts, files, self.media.processor.tokenizer.pad_token_id)


Read = tuple[Row, dict[str, list[Any]]]  # a text, and its files


class MediaMatchCollator:
    """Batches of rows with files, like those of `collate_matches`, with the tensors of the files.

    Args:
        encoder: the model's encoder.
        on_lost: what happens to a row whose file could be read before training and cannot be read now: `skip` leaves it
            out of its step and logs a warning, `stop` raises.
    """

    def __init__(self, encoder: MediaMatchEncoder, on_lost: OnLost = "skip") -> None:
        self.encoder, self.on_lost = encoder, on_lost

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """If no row is left, the batch is one text of padding. Raises DataError if a file is lost and `on_lost` is
        `stop`."""
        each = [(row, read) for row in rows if (read := self._read(row["row"])) is not None]
        if not each:
            batch = nothing(self.encoder.media.processor.tokenizer.pad_token_id)
            return batch | {"labels": self.labels([], [], batch["attention_mask"])}
        kept, laid_out = [row for row, _ in each], self.laid_out([read for _, read in each])
        texts, files = zip(*laid_out, strict=True)
        try:
            batch = self.encoder.batch(texts, files)
        except Problem as problem:
            raise DataError(f"{kept[0]['row'].where} and the rows next to it: {problem}") from problem
        return batch | {"labels": self.labels(kept, laid_out, batch["attention_mask"])}

    def laid_out(self, each: Sequence[Sequence[Read]]) -> list[Read]:
        """The texts of rows in the order of a batch: queries, positives, negatives."""
        return [*(texts[0] for texts in each), *(texts[1] for texts in each), *(t for texts in each for t in texts[2:])]

    def labels(self, rows: Sequence[Mapping[str, Any]], laid_out: Sequence[Read], mask: Any) -> dict[str, Any]:
        import torch

        return {
            "rows": len(rows),
            "scores": torch.tensor([row["labels"] for row in rows], dtype=torch.float32),
            "keys": torch.tensor([self.encoder.key(text) for text, _ in laid_out[len(rows) :]], dtype=torch.int64),
            "mask": mask,
        }

    def _read(self, row: Row) -> list[Read] | None:
        try:
            return list(zip(*self.encoder.read(row), strict=True))
        except Problem as problem:
            if self.on_lost == "stop":
                raise DataError(f"{row.where}: {problem}") from problem
            log.warning("%s is left out of its step: %s", row.where, problem)
            return None
