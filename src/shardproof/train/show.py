"""Rows as the model will see them: with the template applied, token ids decoded to text, and the trained parts
marked."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, repeat
from pathlib import Path
from typing import Any

from shardproof.data.encoding.embed import texts_of
from shardproof.data.encoding.encode import IGNORE
from shardproof.data.encoding.template_syntax import check_template
from shardproof.data.encoding.weights import WEIGHTS
from shardproof.errors import DataError
from shardproof.train import run
from shardproof.train.folder import BASE
from shardproof.train.model.loading import tokenizer_of
from shardproof.train.options.config import SftConfig
from shardproof.train.seq_cls.labelling import labels_of

REPEATED = 4  # a token repeated at least this often is counted instead: placeholders of images and audio


@dataclass(frozen=True)
class Part:
    """A span of a row: its text, its number of tokens, whether they are trained on, and the weight of each."""

    text: str
    tokens: int
    learnt: bool
    weight: float = 1.0


@dataclass(frozen=True)
class Shown:
    """A row as it is trained on. A row that is left out has a reason instead of tokens.

    Attributes:
        where: its file and line.
        cut: whether --truncation shortened it, or this is its first piece.
        label: the label, for tasks that have one.
        learnt: how many tokens are trained on.
    """

    where: str
    input_ids: list[int]
    labels: list[int]
    parts: list[Part]
    label: Any = None
    cut: bool = False
    left_out: str | None = None

    @property
    def learnt(self) -> int:
        return len(self.labels) - self.labels.count(IGNORE)


def show(config: SftConfig, count: int) -> tuple[list[Shown], Any, list[str]]:
    """The first `count` rows that `shardproof sft` would train on with these options, the report on all rows, and the
    bad rows that it would leave out.

    Raises:
        ConfigError, DataError: errors that `shardproof sft` would report before training.
    """
    recipe: Any = run.recipe_of(config)
    if config.chat_template:
        check_template(config.chat_template)
    rows, _ = recipe.read(config)
    with tempfile.TemporaryDirectory(prefix="shardproof-") as scratch:
        source = run.model_source(config, Path(scratch) / BASE, rows)
        processing = run.processing_of(source, config)
        report = recipe.encode(config, rows, processing).report
        config = config.model_copy(update={"workers": 0, "packing": False})  # since rows are encoded one at a time
        shown = [_shown(config, rows[i : i + 1], processing) for i in range(min(count, len(rows)))]
    return shown, report, [str(row) for row in rows.skipped]


def _shown(config: SftConfig, rows: Any, processing: Any) -> Shown:
    (row,) = rows
    recipe: Any = run.recipe_of(config)
    try:
        encoded = recipe.encode(config, rows, processing)
    except DataError as error:
        said = [line.strip() for line in str(error).splitlines() if not line.endswith(":")]
        return Shown(row.where, [], [], [], left_out=said[0].removeprefix(f"{row.where}: "))
    ids, label = list(encoded[0]["input_ids"]), None
    if config.task == "seq_cls":
        labels, label = [IGNORE] * len(ids), labels_of(config).told(encoded[0]["labels"])
    elif config.recipe in ("embedding", "reranker"):
        labels, label = [IGNORE] * len(ids), encoded[0]["labels"]
    else:
        labels = list(encoded[0]["labels"])
    parts = list(parts_of(ids, labels, tokenizer_of(processing), encoded[0].get(WEIGHTS)))
    if config.recipe in ("embedding", "reranker"):
        texts = [_text(text, tokenizer_of(processing)) for text in texts_of(encoded[0])]
        parts = [Part("\n".join(texts), len(ids), False)]
    return Shown(row.where, ids, labels, parts, label, cut=bool(encoded.report.truncated) or len(encoded) > 1)


def parts_of(
    ids: Sequence[int], labels: Sequence[int], tokenizer: Any, weights: Sequence[float] | None = None
) -> Iterator[Part]:
    """Spans of tokens that are all trained on with the same weight, or all not. Their texts add up to that of the row,
    except for repeated tokens."""
    start, each = 0, weights or repeat(1.0)
    kinds = ((label != IGNORE, weight if label != IGNORE else 0.0) for label, weight in zip(labels, each, strict=False))
    for (learnt, weight), stretch in groupby(kinds):
        end = start + sum(1 for _ in stretch)
        yield Part(_text(ids[start:end], tokenizer), end - start, learnt, weight)
        start = end


def _text(ids: Sequence[int], tokenizer: Any) -> str:
    """The many tokens of a file are counted: `<|image_pad|> x 64`. Text is shown as it is."""
    pieces: list[str] = []
    plain: list[int] = []
    for token, same in groupby(ids):
        number = sum(1 for _ in same)
        if number < REPEATED or token not in tokenizer.added_tokens_decoder:
            plain += [token] * number
        else:
            pieces += [_decoded(plain, tokenizer), f"{_decoded([token], tokenizer)} x {number} "]
            plain = []
    return "".join([*pieces, _decoded(plain, tokenizer)])


def _decoded(ids: Sequence[int], tokenizer: Any) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False) if ids else ""
