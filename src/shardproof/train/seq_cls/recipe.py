"""Fine-tuning a classifier or regression model, from top to bottom: the recipe of `shardproof sft --task seq_cls`.

What it shares with `sft` is in `run.py`: the run, the sharding and the order of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from shardproof.data.forms.labels import LABELLED_FIELDS, MEASURES, labelled
from shardproof.errors import ConfigError
from shardproof.models.scorers import SCORER
from shardproof.plugins import load
from shardproof.train import run
from shardproof.train.adapters.adding import with_adapters
from shardproof.train.checks.contradictions import check_columns
from shardproof.train.losses.by_file import best_of, check_best
from shardproof.train.model.loading import tokenizer_of
from shardproof.train.model.parts import check_reached, in_bits
from shardproof.train.model.reward_models import pads_with
from shardproof.train.options.config import Batch, SftConfig
from shardproof.train.plugin_calls import own_metric
from shardproof.train.rows.cached import encoded_once
from shardproof.train.rows.media import check_backbone, check_options, check_templated, files_taken, media_limits
from shardproof.train.run import Prepared
from shardproof.train.seq_cls.labelling import labels_of, load_classifier, new_modules, resolved
from shardproof.train.settings import add_in_one_order, for_sft_trainer
from shardproof.train.watching.view import View, Write


def check(config: SftConfig, world_size: int) -> Batch:
    """Check what can be known from the options alone; imports nothing heavy."""
    check_columns(config.columns, LABELLED_FIELDS)
    if config.dataset in ([], ["stdlib"]) and not config.cached_dataset:
        raise ConfigError("--task seq_cls needs rows with a 'label': name a file of them with --dataset.")
    batch = run.check(config, world_size)
    _check_measured(config)
    return batch


def _check_measured(config: SftConfig) -> None:
    there = MEASURES[labels_of(config).problem]
    best = best_of(config)
    if best == "mae":
        raise ConfigError("--best-metric mae: metrics other than losses are maximised. Use loss or pearson.")
    check_best(config, ("loss", *there, *config.metrics), f"loss, {', '.join(there)} and --metrics")
    if config.metrics and not config.holds_out:
        raise ConfigError("--metrics needs rows to evaluate on: add --val-dataset or --val-split.")
    if taken := next((name for name in config.metrics if name in there), None):
        raise ConfigError(f"--metrics {taken}: evaluations already report a metric of that name. Rename yours.")


def read(config: SftConfig) -> tuple[Any, Any]:
    """The rows to train on and those to evaluate on (or None), checked; imports nothing heavy.

    Raises:
        DataError: a file is missing, or a row is bad: it has no label, or an unknown one.
    """
    from shardproof.data.rows import read_rows

    return run.read(config, read_rows, labelled(labels_of(config)))


def prepare(config: SftConfig, world_size: int, rows: Any, val_rows: Any) -> Prepared:
    """Create the tokenizer and the output folder, and encode the rows from `read`.

    Raises:
        ConfigError, DataError: for everything a user can fix, before any process is started.
    """
    batch = check(config, world_size)
    config = resolved(config, labels_of(config))
    check_backbone(config, SCORER)
    prepared: Prepared = run.prepare(config, batch, rows, val_rows, partial(encode, config), Prepared, SCORER)
    return prepared


def encode(config: SftConfig, rows: Any, processing: Any) -> Any:
    """The token ids of the rows, and their labels; its `report` says how many were kept."""
    from shardproof.data.encoding.beside import as_many_as_help
    from shardproof.data.encoding.labelled import LabelledEncoder, LabelReport, encode_labelled
    from shardproof.data.media.rows import MediaRows

    files, tokenizer = files_taken(processing), tokenizer_of(processing)
    if files:
        check_files(config)
    if config.plain:
        processing.chat_template = None  # here and in the saved model
    labels = labels_of(config)
    to_learn = partial(
        encode_labelled,
        tokenizer=tokenizer,
        encoder=media_encoder(config, processing) if files else LabelledEncoder(tokenizer, config.system),
        labels=labels,
        max_length=config.max_length,
        truncation=config.truncation,
        bad_rows=config.bad_rows,
        workers=as_many_as_help(config.workers),
    )
    known = {"label_names": labels.names, "problem_type": labels.problem}
    encoded = encoded_once(config, rows, processing, to_learn, LabelReport, **known)
    return MediaRows.of(rows, encoded) if files else encoded


def check_files(config: SftConfig) -> None:
    """Raise ConfigError for options that do not apply to models which take files."""
    check_options(config)
    check_templated(config.plain, config.model)


def media_encoder(config: SftConfig, processing: Any) -> Any:
    """The encoder for a model that takes files."""
    from shardproof.data.media.labelled import MediaLabelledEncoder

    return MediaLabelledEncoder(processing, media_limits(config, processing), config.system)


def import_libraries(config: SftConfig) -> None:
    """Import what `train` needs, before ranks are forked."""
    import shardproof.train.seq_cls.trainer  # noqa: F401


def build(config: SftConfig, source: str, processing: Any, to_shard: bool = False) -> Any:
    """The model of a run, with its adapters."""
    model, info = load_classifier(source, config, labels_of(config), to_shard=to_shard)
    pads_with(model, processing.pad_token_id)
    return trained(model, config, info)


def trained(model: Any, config: SftConfig, info: dict[str, Any] | None) -> Any:
    """The model with its adapters, and with the parts frozen that are not trained. `info`: its loading info, or None
    for a generative model, which has no new head."""
    model = in_bits(model, config)
    if config.fp8:
        from shardproof.train.model.fp8 import in_fp8

        in_fp8(model)
    new = [] if info is None else new_modules(info["missing_keys"])
    if config.tuner != "full" and new:
        whole = dict.fromkeys([*config.modules_to_save, *new])
        config = config.model_copy(update={"modules_to_save": list(whole)})
    model = with_adapters(model, config, "CAUSAL_LM" if info is None else "SEQ_CLS")
    for path in new if config.tuner == "full" else ():  # it is randomly initialised, whatever part it belongs to
        model.get_submodule(path).requires_grad_(True)
    return model


def train(prepared: Prepared, view: View, write: Write | None = None, signals: Sequence[int] = ()) -> int:
    """Train on this rank and save. Collective: every rank of the process group calls it.

    Any of `signals` ends training after the current step, and its weights are saved.

    Returns: the signal that ended training, or 0.
    """
    from shardproof.data.encoding.labelled import collate_labelled
    from shardproof.data.media.labelled import MediaLabelledCollator
    from shardproof.train.callbacks import tries_padding
    from shardproof.train.seq_cls.trainer import SeqClsTrainer

    config: SftConfig = prepared.config
    add_in_one_order(config)
    plugins, labels = load(config.external_plugins), labels_of(config)
    model = build(config, prepared.model, prepared.tokenizer, to_shard=True)
    if files_taken(prepared.processing):
        check_reached(model, prepared.rows.rows)
        collator: Any = MediaLabelledCollator(media_encoder(config, prepared.processing), labels, config.on_lost)
    else:
        collator = partial(collate_labelled, pad_token_id=prepared.tokenizer.pad_token_id, labels=labels)

    tries = tries_padding(prepared, "Add --per-device-batch-size 1.") if prepared.batch.micro > 1 else []

    def make_trainer(callbacks: list[Any], reporter: Any) -> SeqClsTrainer:
        return SeqClsTrainer(
            model=model,
            data_collator=collator,
            labels=labels,
            metrics={name: own_metric(name, plugins.find("metric", name)) for name in config.metrics},
            **for_sft_trainer(prepared, [*callbacks, *tries]),
        )

    return run.train(prepared, model, make_trainer, view, write, signals)
