"""Supervised fine-tuning from start to finish: prepare once, then train on every rank.

`prepare` checks everything a user may have got wrong, and needs no process group; `train` runs on each rank with its
result.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardproof.data.encoding.weights import WEIGHTS, contents, weights_named
from shardproof.data.forms.formats import SFT, SFT_FIELDS, WEIGHED
from shardproof.data.forms.plain import joined
from shardproof.errors import ConfigError
from shardproof.models.families.anatomy import anatomy
from shardproof.models.families.family import TALKER
from shardproof.plugins import KINDS, load
from shardproof.train import run
from shardproof.train.adapters.adding import with_adapters
from shardproof.train.answers.metrics import answer_metrics, check_answering, metrics_of
from shardproof.train.checks.contradictions import check_columns
from shardproof.train.losses.by_file import check_best
from shardproof.train.model.declared import check_shares_rows, declared
from shardproof.train.model.lacking import without_lacking
from shardproof.train.model.loading import load_model, tokenizer_of
from shardproof.train.model.parts import check_reached, in_bits
from shardproof.train.options.config import Batch, SftConfig
from shardproof.train.plugin_calls import own_loss, own_metric
from shardproof.train.rows.cached import encoded_once
from shardproof.train.rows.media import check_codes, check_options, check_spoken, media_limits
from shardproof.train.rows.plain import warn_of_plain
from shardproof.train.run import Prepared
from shardproof.train.settings import add_in_one_order, for_sft_trainer
from shardproof.train.sft.against import (
    check_balance,
    check_laid_out_files,
    check_smoothing,
    check_spoken_loss,
    check_weights,
    weighs,
)
from shardproof.train.watching.view import View, Write

if TYPE_CHECKING:
    from shardproof.data.media.encode import MediaEncoder


def check(config: SftConfig, world_size: int) -> Batch:
    """Check what the options alone can tell; imports nothing heavy."""
    check_columns(config.columns, SFT_FIELDS)
    if TALKER in (config.train_parts or ()) and config.enable_audio_output is False:
        raise ConfigError(
            "--train-parts talker: with --enable-audio-output no, there is no talker. Leave one of them out."
        )
    if config.metrics and not config.holds_out:
        raise ConfigError("--metrics needs rows to evaluate on: add --val-dataset or --val-split.")
    if config.fp8 and importlib.util.find_spec("torchao") is None:
        raise ConfigError("--fp8 needs torchao: pip install 'shardproof[fp8]'")
    if config.liger_kernel and importlib.util.find_spec("liger_kernel") is None:
        raise ConfigError("--liger-kernel needs Liger: pip install 'shardproof[liger]'")
    if config.liger_kernel and config.chunked_loss:
        raise ConfigError("--liger-kernel never holds all logits either: leave --chunked-loss out.")
    if config.loss_type == "dft" and config.loss not in KINDS["loss"].built_in:
        raise ConfigError(f"--loss-type dft and --loss {config.loss} are two losses: leave one of them out.")
    if config.loss_type == "dft" and config.liger_kernel:
        raise ConfigError("--liger-kernel computes the plain loss: leave it or --loss-type dft out.")
    check_smoothing(config)
    check_weights(config)
    check_balance(config)
    if config.chunked_loss and config.loss not in KINDS["loss"].built_in:
        raise ConfigError(f"--chunked-loss computes the causal loss; --loss {config.loss} needs the logits.")
    check_spoken_loss(config)
    check_answering(config)
    return run.check(config, world_size)


def read(config: SftConfig) -> tuple[Any, Any]:
    """The rows to train on and those to evaluate on (or None), checked; imports nothing heavy.

    Raises:
        DataError: a file is missing, or a row is bad.
    """
    from shardproof.data.rows import read_rows

    form = SFT if any(weighs(config).values()) else WEIGHED
    form = joined(form) if config.plain else form
    if not config.streaming:
        return run.read(config, read_rows, form)
    from shardproof.data.mixed_stream import read_stream
    from shardproof.data.stream import DEFAULT_SIZE

    trained = partial(read_stream, size=config.shuffle_buffer_size or DEFAULT_SIZE)
    return run.read(config, read_rows, form, trained)


def prepare(config: SftConfig, world_size: int, rows: Any, val_rows: Any) -> Prepared:
    """Load the tokenizer, create the output folder, and encode the rows from `read`.

    Raises:
        ConfigError, DataError: errors that a user can fix, found before any process is started.
    """
    batch = check(config, world_size)
    told = "the loss, and what --metrics " + ("and --answer-metrics name" if config.predict_with_generate else "names")
    check_best(config, ("loss", *config.metrics, *metrics_of(config)), told)
    if config.sequence_parallel > 1:
        check_shares_rows(config)
    if config.chunked_loss or config.sequence_parallel > 1:
        _check_terms(config)
    check_spoken(config, rows)
    prepared: Prepared = run.prepare(config, batch, rows, val_rows, partial(encode, config), Prepared)
    if not config.plain:
        warn_of_plain(rows, prepared.tokenizer, "query=prompt response=completion")
    if config.predict_with_generate:
        from shardproof.data.encoding.asked import check_asks

        check_asks(prepared.val_rows)
    return prepared


def _check_terms(config: SftConfig) -> None:
    """Raise ConfigError for a text model whose config adds a term to its loss; other models are tested at the first
    step. A config may also have entries that its class does not know and no model reads."""
    found = declared(config)
    weighs = getattr(found, "output_router_logits", False) and getattr(found, "router_aux_loss_coef", 0)
    if weighs and hasattr(type(found)(), "output_router_logits"):
        option = "--chunked-loss" if config.chunked_loss else "--sequence-parallel"
        raise ConfigError(
            f"{option} computes the cross entropy alone, but the loss of {config.model} has a load-balancing term"
            f" for its experts (output_router_logits in config.json).\nLeave {option} out, or set that to false."
        )


def encode(config: SftConfig, rows: Any, processing: Any) -> Any:
    """The encoded rows to train on; their `report` says what happened to them."""
    from shardproof.data.encoding.beside import as_many_as_help
    from shardproof.data.encoding.encode import encode_rows
    from shardproof.data.encoding.pack import PackedMediaRows, pack_rows

    streams = not hasattr(rows, "__len__")
    if tokenizer_of(processing) is not processing:
        from shardproof.data.media.rows import MediaRows, encode_media_rows
        from shardproof.data.row_cache import RowCache

        check_laid_out_files(config)
        if TALKER in (config.train_parts or ()):
            check_codes(config.model, rows)
        check_options(config, streams)
        encoder, speaks = media_encoder(config, processing), TALKER in (config.train_parts or ())
        of_files = partial(
            encode_media_rows,
            encoder=encoder,
            max_length=config.max_length,
            truncation=config.truncation,
            bad_rows=config.bad_rows,
            workers=as_many_as_help(config.workers),
            speaks=speaks,
            cache=RowCache(Path(config.row_cache).expanduser(), encoder) if config.row_cache else None,
        )
        found = encoded_once(
            config, rows, processing, lambda some: of_files(some).encoded, **_decided(config), train_parts=speaks
        )
        seen = MediaRows.of(rows, found)
        return PackedMediaRows(seen, config.max_length) if config.packing else seen
    if streams:
        return _encoded_later(config, rows, processing)
    to_learn = partial(
        encode_rows,
        tokenizer=processing,
        max_length=config.max_length,
        loss=_learnt(config),
        truncation=config.truncation,
        system=config.system,
        bad_rows=config.bad_rows,
        workers=as_many_as_help(config.workers),
        weights=weights_named(config.token_weights),
    )
    encoded = encoded_once(config, rows, processing, to_learn, **_decided(config))
    return pack_rows(encoded, config.max_length) if config.packing else encoded


def _decided(config: SftConfig) -> dict[str, Any]:
    """What decides which tokens of a row are trained on, by option name."""
    weights = {"token_weights": contents(config.token_weights)} if config.token_weights else {}
    return {"loss": _learnt(config), **weights}


def _encoded_later(config: SftConfig, rows: Any, tokenizer: Any) -> Any:
    from shardproof.data.stream import EncodedStream

    return EncodedStream(
        rows,
        tokenizer,
        config.max_length,
        loss=_learnt(config),
        truncation=config.truncation,
        system=config.system,
        bad_rows=config.bad_rows,
        packing=config.packing,
        shuffled=config.shuffle_buffer_size > 1,
        seed=config.seed,
        weights=weights_named(config.token_weights),
        passes=config.max_epochs,
    )


def media_encoder(config: SftConfig, processor: Any) -> MediaEncoder:
    """The encoder for rows with files."""
    from shardproof.data.media.encode import MediaEncoder

    limits, loss, weights = media_limits(config, processor), _learnt(config), weights_named(config.token_weights)
    return MediaEncoder(processor, limits, loss=loss, system=config.system, bad_rows=config.bad_rows, weights=weights)


def _learnt(config: SftConfig) -> Any:
    """What is trained on in a row; with a plugin's loss, the answers."""
    return config.loss if config.loss in KINDS["loss"].built_in else "answer"


def collator(prepared: Prepared, model: Any) -> Any:
    """The function that collates rows; if ranks share rows, it adds what each token of this rank's part is to
    predict."""
    from shardproof.train.losses.packed_files import packed_labels
    from shardproof.train.model.shared_rows import shared_rows_of

    collate, shared = _collate_whole(prepared, model), shared_rows_of(model)
    if shared is None:
        return collate

    def in_parts(rows: Any) -> dict[str, Any]:
        batch = collate(rows)
        shifted = {"labels": "shift_labels", WEIGHTS: WEIGHTS}
        told = {
            to: shared.sequence.shifted(packed_labels(batch, name)) for name, to in shifted.items() if name in batch
        }
        return batch | told

    return in_parts


def _collate_whole(prepared: Prepared, model: Any) -> Any:
    from shardproof.data.encoding.pack import wants_flat
    from shardproof.train.losses.shortcuts import attention_of

    config, flat = prepared.config, wants_flat(attention_of(model))
    if prepared.processing is prepared.tokenizer:
        from shardproof.data.encoding.encode import collate
        from shardproof.data.encoding.pack import collate_packed

        pad = prepared.tokenizer.pad_token_id
        if config.packing:
            return partial(collate_packed, pad_token_id=pad, flat=flat)
        return partial(collate, pad_token_id=pad)
    from shardproof.data.media.batches import MediaCollator, check_together
    from shardproof.data.media.rows import MediaRows

    speaks = TALKER in (config.train_parts or ())
    collator = MediaCollator(media_encoder(config, prepared.processing), config.on_lost, speaks, flat)
    for rows in (prepared.rows, prepared.val_rows) if prepared.batch.micro > 1 else ():
        if isinstance(rows, MediaRows):
            check_together(rows, collator)
    return collator


def _few(prepared: Prepared) -> Any:
    """Rows to test a model on, if rows with files are packed or split; otherwise None."""
    from shardproof.data.encoding.pack import PackedMediaRows
    from shardproof.data.media.rows import MediaRows

    if isinstance(prepared.rows, PackedMediaRows):
        return [[packed] for packed in prepared.rows.few()]
    parts = prepared.config.sequence_parallel > 1 and isinstance(prepared.rows, MediaRows)
    return prepared.rows.few(1) if parts else None


def _has_weights(prepared: Prepared) -> bool:
    """Whether any turn in the rows has a weight; not known in advance for a stream."""
    rows = getattr(prepared.rows, "unpacked", prepared.rows)
    return WEIGHTS in getattr(getattr(rows, "encoded", rows), "column_names", ())


def import_libraries(config: SftConfig) -> None:
    """Import what `train` needs, before ranks are forked."""
    import shardproof.train.trainer  # noqa: F401
    from shardproof.models.loading.classes import import_class

    import_class(config.model)


def train(prepared: Prepared, view: View, write: Write | None = None, signals: Sequence[int] = ()) -> int:
    """Train on this rank and save. Collective: every rank of the process group calls it.

    Any of `signals` ends training after the current step, whose weights are saved.

    Returns: the signal that ended training, or 0.
    """
    import torch

    from shardproof.train.answers.predicting import PredictingTrainer
    from shardproof.train.answers.sampling import Sampling
    from shardproof.train.model.fp8 import in_fp8
    from shardproof.train.trainer import SftTrainer

    config = prepared.config
    add_in_one_order(config)
    if config.liger_kernel and not torch.accelerator.is_available():
        raise ConfigError("--liger-kernel: its kernels need a GPU, and there is none. --chunked-loss runs anywhere.")
    plugins = load(config.external_plugins)
    model = load_model(prepared.model, config, model_type=config.model_type, to_shard=True)
    model = in_bits(model, config)
    if config.fp8:
        in_fp8(model)
    model = with_adapters(model, without_lacking(config, anatomy(model).parts))  # a plugin's model is checked here
    if prepared.processing is not prepared.tokenizer:
        check_reached(model, prepared.rows.rows)

    def make_trainer(callbacks: list[Any], reporter: Any) -> SftTrainer:
        kind: Callable[..., SftTrainer] = SftTrainer
        if config.predict_with_generate:
            worth, told = answer_metrics(metrics_of(config), plugins), reporter and reporter.answered
            sampling = Sampling(max_new_tokens=config.max_new_tokens, stop_words=config.stop_words)
            kind = partial(PredictingTrainer, worth=worth, sampling=sampling, told=told)
        return kind(
            model=model,
            data_collator=collator(prepared, model),
            loss=own_loss(config.loss, plugins.find("loss", config.loss)),
            metrics={name: own_metric(name, plugins.find("metric", name)) for name in config.metrics},
            packed=config.packing,
            few=_few(prepared),
            chunked=config.chunked_loss,
            dft=config.loss_type == "dft",
            smoothing=config.label_smoothing_factor,
            balance=config.router_aux_loss_coef,
            weighed=bool(config.token_weights) or _has_weights(prepared) or (None if config.streaming else False),
            **for_sft_trainer(prepared, callbacks),
        )

    return run.train(prepared, model, make_trainer, view, write, signals)
