"""Score with a trained reranker how well texts answer queries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardproof.data.encoding.rank import padded
from shardproof.data.forms.matches import NEGATIVE, POSITIVE, Matches
from shardproof.data.forms.parts import Problem
from shardproof.data.rows import BadRow, BadRows, Row, read_rows
from shardproof.errors import ConfigError
from shardproof.train.answers.loaded import with_files
from shardproof.train.answers.rows import usable, write_lines
from shardproof.train.embedding.embedder import rounded
from shardproof.train.model.loading import causal_lm
from shardproof.train.reranker.scoring import Scoring, last_logits_only, take_files_in_pairs
from shardproof.train.seq_cls.classifier import Classifier
from shardproof.train.seq_cls.labelling import RELEVANCE


class Ranker(Classifier):
    """A model that scores pairs of a query and a text, and its tokenizer. The arguments are those of `Classifier`, and
    `scoring`: how it scores pairs. `system` is the text before queries."""

    def __init__(self, folder: Path, scoring: Scoring, system: str | None, *how: Any) -> None:
        self.scoring = scoring
        super().__init__(folder, RELEVANCE, system, *how)

    def _encoder(self, system: str | None) -> Any:
        if self.limits is None:
            return self.scoring.encoder(self.tokenizer, system)
        return self.scoring.media_encoder(self.processing, self.limits, system)

    def scores(self, rows: Sequence[Row]) -> list[Any]:
        """For each row, the scores of its positives and negatives, from 0 to 1, in fp32. With several ranks, all call
        this, with their own rows or none. Texts that are too long for the model are truncated.

        Raises:
            ConfigError: a row cannot be read by this model.
        """
        import torch

        from shardproof.integrations.transformers import together

        made = self._pairs(rows)
        found: list[Any] = []
        with together(self.model), torch.no_grad():
            if made is not None:
                inputs = {name: value.to(self.model.device) for name, value in made[0].items()}
                found = list(self.scoring.scores(self.model(**inputs)).sigmoid().cpu().split(made[1]))
        return found

    def _pairs(self, rows: Sequence[Row]) -> tuple[dict[str, Any], list[int]] | None:
        """The tensors of the pairs of rows, and how many pairs each row has; None for no rows."""
        if self.takes_files:
            return with_files(self.encoder, rows)
        pairs: list[Any] = []
        counts = []
        for row, made in self.encoder.texts(rows):
            if isinstance(made, str):
                raise ConfigError(f"{row.where}: {made}.")
            pairs += made
            counts.append(len(made))
        if not pairs:
            return None
        ids = [self.encoder.marked(pair, self.longest) for pair in pairs]
        seconds = [self.encoder.second(pair, self.longest) for pair in pairs]
        return padded(ids, seconds, self.tokenizer.pad_token_id, self.encoder.typed), counts


class AskedRanker(Ranker):
    """The same for a model that answers yes or no."""

    def _encoder(self, system: str | None) -> Any:
        take_files_in_pairs(self.processing, str(self.folder))
        return super()._encoder(system)

    def load(self) -> None:
        super().load()
        last_logits_only(self.model)

    def _with_head(self, source: str, **options: Any) -> Any:
        return causal_lm(source, **options)


def rank_rows(
    model: Ranker,
    dataset: Sequence[str],
    columns: Mapping[str, str],
    file: Path,
    at_once: int,
    bad_rows: BadRows = "stop",
) -> Iterator[tuple[int, int, Sequence[BadRow]]]:
    """Score every row of `dataset` and write a line for each: the columns of the row, `messages`, and the `scores` of
    its positives and then of its negatives.

    Returns: the iterator of `write_lines`. All ranks call this.

    Raises:
        DataError: a row cannot be read. Then nothing is written.
    """
    form = Matches(several=True, needed=False, files=model.takes_files).form

    def with_texts(record: Any, names: Mapping[str, str] | None) -> Any:
        messages, extra, kind = form.normalise(record, names)
        if not extra[POSITIVE] and not extra[NEGATIVE]:
            raise Problem("it has no text to score: 'positive', 'negative', or their messages")
        return messages, extra, kind

    rows = read_rows(dataset, bad_rows=bad_rows, columns=columns, form=type(form)(with_texts, form.expected))
    if model.takes_files:
        rows = usable(model, rows, model.encoder.problem, bad_rows)

    def answered(some: Sequence[Row], _: int) -> list[dict[str, Any]]:
        return [
            {**row.extra["columns"], "messages": row.messages, "scores": rounded(found)}
            for row, found in zip(some, model.scores(some), strict=True)
        ]

    return write_lines(model, rows, file, at_once, answered)
