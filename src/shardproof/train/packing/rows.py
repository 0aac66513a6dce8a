"""Rows for calibrating or measuring a model, read as in its run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shardproof.train import run
from shardproof.train.embedding import recipe as embedding
from shardproof.train.embedding.pooling import embedding_in
from shardproof.train.model.loading import tokenizer_of
from shardproof.train.options.config import Batch, RunConfig, SftConfig
from shardproof.train.packing.kinds import Packing
from shardproof.train.reranker import recipe as reranker
from shardproof.train.reranker.recipe import GENERATIVE
from shardproof.train.reranker.scoring import scoring_in, scoring_of
from shardproof.train.rows.media import files_taken
from shardproof.train.seq_cls.labelling import RELEVANCE, labels_in, labels_of
from shardproof.train.sft import recipe as sft

LONGEST = 2048  # tokens per row for a model whose run is not known
GROUPS = ("Data", "Media")  # groups of run options that say how rows are read
OTHERWISE = (
    "dataset",
    "val_dataset",
    "cached_dataset",
    "cached_val_dataset",
    "interleave_prob",
    "val_split",
    "streaming",
    "shuffle_buffer_size",
    "row_cache",
    "packing",
)
PAIRS = {"embedding": embedding, "reranker": reranker, "generative_reranker": reranker}  # tasks with rows of pairs
OF_PAIRS = ("task", "plain", "loss", "pooling", "loss_temperature")
OF_LABELS = ("task", "plain", "num_labels", "label_names", "problem_type")


@dataclass(frozen=True)
class Batches:
    """Rows as batches of one, ready for the model; if a row has several texts and no files, each text is a batch.

    Attributes:
        drawn: how many rows they come from.
        learns: whether batches have `labels`.
    """

    rows: Sequence[Any]
    collate: Callable[[Any], dict[str, Any]]
    learns: bool
    drawn: int

    def __len__(self) -> int:
        return len(self.rows)

    def on(self, device: Any) -> _On:
        return _On(self, device)


@dataclass(frozen=True)
class _On:
    """The batches on a device; can be iterated over repeatedly."""

    batches: Batches
    device: Any

    def __iter__(self) -> Iterator[dict[str, Any]]:
        every = self.batches
        for i in range(len(every)):
            batch = every.collate([every.rows[i]])
            there = {name: value.to(self.device) if hasattr(value, "to") else value for name, value in batch.items()}
            if batch["input_ids"].numel():
                yield there if every.learns else {name: value for name, value in there.items() if name != "labels"}


def batches_of(
    files: Sequence[str],
    packing: Packing,
    recorded: dict[str, Any],
    folder: Path,
    model: Any,
    processing: Any,
    embeds: bool = False,
) -> Batches:
    """The rows of datasets, read as in the model's run: at most `packing.samples` of them, drawn at random.

    Args:
        recorded: the run's options, if any.
        folder: where the model came from, which may say what labels or vectors it outputs.
        embeds: whether it is an embedding model, without a language-model head.

    Raises:
        DataError, ConfigError: the rows cannot be used.
    """
    how, more = _options(recorded, folder, bool(files_taken(processing))), {}
    if not recorded and (made := embedding_in(folder)) is not None:
        how |= {"task": "embedding", "pooling": made.pooling, "max_length": made.longest or LONGEST}
        more = {} if "system" in packing.reading else {"prompt": made.prompt}
    config = SftConfig(**{"max_length": LONGEST, **how, **packing.reading, "dataset": list(files)})
    recipe: Any = run.recipe_of(config)
    rows, _ = recipe.read(config)
    if len(rows) > packing.samples:
        rows = rows.take(sorted(random.Random(0).sample(range(len(rows)), packing.samples)))
    encoded = recipe.encode(config, rows, processing, **more)
    if config.task in PAIRS:
        return Batches(*_texts(config, encoded, processing), False, len(encoded))
    if config.task != "seq_cls":
        prepared = run.Prepared(config, _ALONE, Path(), str(folder), processing, encoded, None, [])
        return Batches(encoded, sft.collator(prepared, model), not embeds and _writes(model), len(encoded))
    return Batches(encoded, _labelled(config, processing), False, len(encoded))


_ALONE = Batch(micro=1, accumulation=1, world_size=1)


def _options(recorded: dict[str, Any], folder: Path, takes_files: bool) -> dict[str, Any]:
    # From the options shared by all recipes: rlhf has different ones under the same names.
    about_rows = {n for n, f in RunConfig.model_fields.items() if f.json_schema_extra["group"] in GROUPS}  # type: ignore
    taken = {name: value for name, value in recorded.items() if name in about_rows.difference(OTHERWISE)}
    if recorded.get("task") == "seq_cls":
        taken |= {name: recorded[name] for name in OF_LABELS if name in recorded}
    elif recorded.get("task") in PAIRS:
        taken |= {name: recorded[name] for name in OF_PAIRS if name in recorded}
    elif (scoring := scoring_in(folder)) is not None:
        taken |= {"task": GENERATIVE, "system": scoring.system}
    elif (labels := labels_in(folder)) == RELEVANCE:
        taken["task"] = "reranker"
    elif labels is not None:
        names = list(labels.names) if labels.named else []
        taken |= {
            "task": "seq_cls",
            "label_names": names,
            "num_labels": len(labels.names),
            "problem_type": labels.problem,
        }
    elif "rlhf_type" not in recorded:
        taken |= {name: recorded[name] for name in ("plain", "loss") if name in recorded}
    return taken | {"model": str(folder), "truncation": "drop" if takes_files else "right"}


def _texts(config: SftConfig, encoded: Any, processing: Any) -> tuple[Sequence[Any], Callable[[Any], dict[str, Any]]]:
    """The texts (or pairs of texts) in rows of pairs, and the function that batches them."""
    from shardproof.data.encoding.embed import texts_of
    from shardproof.data.encoding.rank import padded

    recipe = PAIRS[config.task]
    if files_taken(processing):
        return encoded, recipe.media_collator(config, processing)
    tokenizer = tokenizer_of(processing)
    typed = recipe is reranker and scoring_of(config, processing).encoder(tokenizer, config.system).typed
    each = [one for row in encoded for one in zip(texts_of(row), row.get("seconds", row["lengths"]), strict=True)]

    def collate(texts: Sequence[tuple[Any, int]]) -> dict[str, Any]:
        return padded([ids for ids, _ in texts], [place for _, place in texts], tokenizer.pad_token_id, typed)

    return each, collate


def _labelled(config: SftConfig, processing: Any) -> Callable[[Any], dict[str, Any]]:
    from shardproof.data.encoding.labelled import collate_labelled
    from shardproof.data.media.labelled import MediaLabelledCollator
    from shardproof.train.seq_cls.recipe import media_encoder

    labels = labels_of(config)
    if files_taken(processing):
        return MediaLabelledCollator(media_encoder(config, processing), labels, config.on_lost)
    return partial(collate_labelled, pad_token_id=tokenizer_of(processing).pad_token_id, labels=labels)


def _writes(model: Any) -> bool:
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return head is not None
