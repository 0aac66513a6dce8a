"""Fine-tuning a model that embeds texts, and files if it takes them, from top to bottom: the recipe of `shardproof sft
--task embedding`.

Comments on what is the same in `seq_cls` are not repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from shardproof.data.forms.matches import MATCH_FIELDS, Matches
from shardproof.errors import ConfigError
from shardproof.train import run
from shardproof.train.adapters.adding import with_adapters
from shardproof.train.checks.contradictions import check_columns
from shardproof.train.model.loading import load_model, tokenizer_of
from shardproof.train.model.parts import check_reached, in_bits
from shardproof.train.options.config import Batch, SftConfig
from shardproof.train.options.option import flag
from shardproof.train.options.task_losses import INFONCE, loss_of
from shardproof.train.rows.cached import encoded_once
from shardproof.train.rows.media import check_backbone, check_options, files_taken, media_limits, takes_files
from shardproof.train.run import Prepared
from shardproof.train.settings import add_in_one_order, for_sft_trainer
from shardproof.train.watching.view import View, Write

BODY, ADAPTED = "AutoModel", "FEATURE_EXTRACTION"  # the class in transformers, and PEFT's name for the task
PAIRED = ("cosine_similarity", "contrastive")
MEASURES = {INFONCE: ("accuracy", "mrr", "mean_pos"), **dict.fromkeys(PAIRED, ("pearson", "spearman"))}


def check(config: SftConfig, world_size: int) -> Batch:
    """Check what can be known from the options alone; imports nothing heavy."""
    check_columns(config.columns, MATCH_FIELDS)
    if config.dataset in ([], ["stdlib"]) and not config.cached_dataset:
        raise ConfigError("--task embedding needs rows with a 'positive': name a file of them with --dataset.")
    loss = loss_of(config)
    if loss not in MEASURES:
        raise ConfigError(f"--task embedding and --loss {loss}: the loss must be one of {', '.join(MEASURES)}.")
    if config.loss_temperature is not None and loss != INFONCE:
        raise ConfigError(f"--loss-temperature needs --loss {INFONCE}, and --loss is {loss}. Leave it out.")
    if loss == INFONCE and config.deterministic:
        raise ConfigError(
            "--deterministic and --loss infonce: rows are negatives for each other, and the order in which their"
            " gradients are added depends on the number of processes. Leave one of them out."
        )
    if loss == INFONCE and config.min_processes:
        raise ConfigError(
            "--min-processes and --loss infonce: on fewer processes a row has fewer negatives. Leave one of them out."
        )
    best = config.best_metric.removeprefix("eval_")
    if best not in ("loss", *MEASURES[loss]):
        raise ConfigError(f"--best-metric {best}: an evaluation has loss, {', '.join(MEASURES[loss])}.")
    batch = run.check(config, world_size)
    for name in ("plain",) if takes_files(config.model) else ("plain", "chat_template", "template_variables"):
        if getattr(config, name):
            option = flag(name)
            raise ConfigError(f"--task embedding and {option}: texts are embedded as they are. Leave one of them out.")
    return batch


def read(config: SftConfig) -> tuple[Any, Any]:
    """The rows to train on and those to evaluate on (or None), checked; imports nothing heavy.

    Raises:
        DataError: a file is missing, or a row is bad: it has no positive, or a label that this loss does not support.
    """
    from shardproof.data.rows import read_rows

    loss = loss_of(config)
    return run.read(config, read_rows, Matches(scored=loss != INFONCE, binary=loss == "contrastive", files=True).form)


def prepare(config: SftConfig, world_size: int, rows: Any, val_rows: Any) -> Prepared:
    """Create the tokenizer and the output folder, and encode the rows from `read`.

    Raises:
        ConfigError, DataError: for everything a user can fix, before any process is started.
    """
    batch = check(config, world_size)
    config = resolved(config)
    check_backbone(config, BODY)
    prepared: Prepared = run.prepare(config, batch, rows, val_rows, partial(_compared, config, batch), Prepared, BODY)
    return prepared


def _compared(config: SftConfig, batch: Batch, rows: Any, processing: Any) -> Any:
    """`encode`, with a check that there are texts to compare with."""
    encoded = encode(config, rows, processing)
    if config.loss == INFONCE and batch.micro * batch.readers == 1 and encoded.report.most == 2:
        raise ConfigError(
            "--loss infonce compares the positive of a row with other texts, and there are none: the rows have no"
            " negatives, and a batch has one row. Raise --per-device-batch-size."
        )
    return encoded


def resolved(config: SftConfig) -> SftConfig:
    """The options with their defaults made explicit, for config.yaml."""
    from shardproof.train.embedding.pooling import pooling_of

    loss, temperature = loss_of(config), config.loss_temperature
    pooling = config.pooling or pooling_of(config.begins_with)
    if loss == INFONCE and temperature is None:
        temperature = 0.1  # as in ms-swift
    return config.model_copy(update={"loss": loss, "loss_temperature": temperature, "pooling": pooling})


def encode(config: SftConfig, rows: Any, processing: Any, prompt: str | None = None) -> Any:
    """The token ids of the texts of rows; its `report` says how many were kept. `prompt`: the prompt before queries, if
    it is not --system."""
    from shardproof.data.encoding.embed import MatchEncoder, prompt_of

    tokenizer = tokenizer_of(processing)
    if tokenizer.pad_token_id is None:
        raise ConfigError(f"The tokenizer of {config.model} has no padding token. Set its pad_token.")
    if tokenizer is processing:
        processing.chat_template = None  # here and in the saved model
        encoder = MatchEncoder(processing, prompt or prompt_of(config.system, ()))
    else:
        check_options(config)
        encoder = media_encoder(config if prompt is None else config.model_copy(update={"system": prompt}), processing)
    return encoded_by(config, rows, processing, encoder)


def encoded_by(config: SftConfig, rows: Any, processing: Any, encoder: Any) -> Any:
    """Rows encoded with these options. For a model that takes files, they are read again in training."""
    from shardproof.data.encoding.beside import as_many_as_help
    from shardproof.data.encoding.embed import MatchReport, encode_matches
    from shardproof.data.media.rows import MediaRows

    to_learn = partial(
        encode_matches,
        tokenizer=tokenizer_of(processing),
        encoder=encoder,
        max_length=config.max_length,
        truncation=config.truncation,
        bad_rows=config.bad_rows,
        workers=as_many_as_help(config.workers),
    )
    encoded = encoded_once(config, rows, processing, to_learn, MatchReport)
    return MediaRows.of(rows, encoded) if files_taken(processing) else encoded


def media_encoder(config: SftConfig, processing: Any) -> Any:
    """The encoder for a model that takes files."""
    from shardproof.data.media.embed import MediaMatchEncoder

    return MediaMatchEncoder(processing, media_limits(config, processing), config.system)


def media_collator(config: SftConfig, processing: Any) -> Any:
    """The collator for a model that takes files."""
    from shardproof.data.media.embed import MediaMatchCollator

    return MediaMatchCollator(media_encoder(config, processing), config.lost_files)


def import_libraries(config: SftConfig) -> None:
    """Import what `train` needs, before ranks are forked."""
    import shardproof.train.embedding.trainer  # noqa: F401


def trained(model: Any, config: SftConfig) -> Any:
    """The model with its adapters, and with the parts frozen that are not trained."""
    model = in_bits(model, config)
    if config.fp8:
        from shardproof.train.model.fp8 import in_fp8

        in_fp8(model)
    return with_adapters(model, config, ADAPTED)


def build(prepared: Prepared) -> Any:
    """The model of a run, with its adapters.

    Raises:
        ConfigError: only files reach the trained parts, and no row has such files.
    """
    from shardproof.data.encoding.embed import at_length

    config: SftConfig = prepared.config
    model = trained(load_model(prepared.model, config, BODY, to_shard=True), config)
    if prepared.processing is not prepared.tokenizer:
        check_reached(model, map(at_length, prepared.rows.rows))
    return model


def train(prepared: Prepared, view: View, write: Write | None = None, signals: Sequence[int] = ()) -> int:
    """Train on this rank and save. Collective: every rank of the process group calls it.

    Any of `signals` ends training after the current step, and its weights are saved.

    Returns: the signal that ended training, or 0.
    """
    from shardproof.data.encoding.embed import collate_matches, prompt_of
    from shardproof.train.callbacks import tries_padding
    from shardproof.train.embedding.pooling import Embedding
    from shardproof.train.embedding.trainer import EmbeddingTrainer

    config: SftConfig = prepared.config
    add_in_one_order(config)
    model = build(prepared)
    if files := files_taken(prepared.processing):
        collator = media_collator(config, prepared.processing)
    else:
        collator = partial(collate_matches, pad_token_id=prepared.tokenizer.pad_token_id)

    def make_trainer(callbacks: list[Any], reporter: Any) -> EmbeddingTrainer:
        return EmbeddingTrainer(
            model=model,
            data_collator=collator,
            embedding=Embedding(str(config.pooling), prompt_of(config.system, files), files),
            kind=loss_of(config),
            temperature=config.loss_temperature or 1.0,
            **for_sft_trainer(prepared, [*callbacks, *tries_padding(prepared, "Use another model.")]),
        )

    return run.train(prepared, model, make_trainer, view, write, signals)
