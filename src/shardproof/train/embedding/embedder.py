"""Embed texts with a trained model, and files if it takes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardproof.data.encoding.embed import MatchEncoder, prompt_of
from shardproof.data.encoding.encode import collate
from shardproof.data.encoding.labelled import longest_of
from shardproof.data.forms.matches import LABEL, NEGATIVE, POSITIVE, Matches
from shardproof.data.media.embed import MediaMatchEncoder
from shardproof.data.rows import BadRow, BadRows, Row, read_rows
from shardproof.errors import ConfigError
from shardproof.models.loading.classes import load_body
from shardproof.train.answers.loaded import Loaded, with_files
from shardproof.train.answers.rows import write_lines
from shardproof.train.embedding.pooling import Embedding, pooled
from shardproof.train.options.config import SftConfig
from shardproof.train.rows.media import files_taken, media_limits

DIGITS = 6  # of numbers that are written


class Embedder(Loaded):
    """A model that embeds texts, and its tokenizer.

    Args:
        embedding: how the model embeds texts.
        system: the prompt before queries, instead of the model's own.
        stage: as for `Loaded`.
        media: the options for files; those that are not set are as in the run.
    """

    def __init__(
        self,
        folder: Path,
        embedding: Embedding,
        system: str | None = None,
        trust_remote_code: bool = False,
        stage: int | None = None,
        media: SftConfig | None = None,
    ) -> None:
        super().__init__(folder, load_body, trust_remote_code, stage)
        self.pooling, self.takes_files = embedding.pooling, self.processing is not self.tokenizer
        prompt = embedding.prompt if system is None else prompt_of(system, files_taken(self.processing))
        if self.takes_files:
            limits = media_limits(media or SftConfig(), self.processing)
            self.encoder: Any = MediaMatchEncoder(self.processing, limits, prompt)
        else:
            self.encoder = MatchEncoder(self.tokenizer, prompt)
        self.load()
        self.place_model()
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        known = [n for n in (embedding.longest, positions) if n is not None]
        self.longest = longest_of(self.tokenizer, min(known, default=None))

    def embeddings(self, rows: Sequence[Row]) -> list[Any]:
        """For each row, the embeddings of its query, its positives and its negatives, in fp32, of shape (texts, width).
        With several ranks, all call this, with their own rows or none. Texts that are too long for the model are
        truncated.

        Raises:
            ConfigError: a row cannot be read by this model.
        """
        import torch

        from shardproof.integrations.transformers import together

        made = self._texts(rows)
        found: list[Any] = []
        with together(self.model), torch.no_grad():
            if made is not None:
                inputs = {name: value.to(self.model.device) for name, value in made[0].items()}
                hidden = self.model(**inputs).last_hidden_state
                found = list(pooled(hidden, inputs["attention_mask"], self.pooling).cpu().split(made[1]))
        return found

    def _texts(self, rows: Sequence[Row]) -> tuple[dict[str, Any], list[int]] | None:
        """The tensors of the texts of rows, and how many texts each row has; None for no rows."""
        if self.takes_files:
            return with_files(self.encoder, rows)
        texts, counts = [], []
        for row, made in self.encoder.texts(rows):
            if isinstance(made, str):
                raise ConfigError(f"{f'{row.where}: ' if row.source else ''}{made}.")
            texts += [self.encoder.marked(ids, self.longest) for ids in made]
            counts.append(len(made))
        if not texts:
            return None
        batch = collate([{"input_ids": ids, "labels": ids} for ids in texts], self.tokenizer.pad_token_id or 0)
        return {name: batch[name] for name in ("input_ids", "attention_mask")}, counts


def embed_rows(
    model: Embedder,
    dataset: Sequence[str],
    columns: Mapping[str, str],
    file: Path,
    at_once: int,
    bad_rows: BadRows = "stop",
) -> Iterator[tuple[int, int, Sequence[BadRow]]]:
    """Embed every row of `dataset` and write a line for each: the columns of the row, `messages`, the `embedding` of
    the query, and its `similarities` to positives and then to negatives, if there are any.

    Returns: the iterator of `write_lines`. All ranks call this.

    Raises:
        DataError: a row cannot be read. Then nothing is written.
    """
    rows = read_rows(
        dataset, bad_rows=bad_rows, columns=columns, form=Matches(several=True, needed=False, files=True).form
    )

    def answered(some: Sequence[Row], _: int) -> list[dict[str, Any]]:
        return [_line(row, found) for row, found in zip(some, model.embeddings(some), strict=True)]

    return write_lines(model, rows, file, at_once, answered)


def _line(row: Row, found: Any) -> dict[str, Any]:
    said: dict[str, Any] = {"embedding": rounded(found[0])}
    if len(found) > 1:
        said["similarities"] = rounded(found[1:] @ found[0])
    return {**row.extra["columns"], "messages": row.messages, **said}


def rounded(values: Any) -> list[float]:
    """The values as they are written."""
    return [round(value, DIGITS) for value in values.tolist()]


def single(content: str | list[dict[str, Any]]) -> Row:
    """A row with only a query."""
    return Row([{"role": "user", "content": content}], "", 0, {POSITIVE: [], NEGATIVE: [], LABEL: None})
