"""Fine-tuning a model that scores how well a text answers a query: the recipe of `shardproof sft --task reranker` and
`generative_reranker`.

The model is a `seq_cls` model with one label, or a generative one that answers "yes" or "no" (`scoring.py`). It learns
from rows with queries, texts that answer them and texts that do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from shardproof.data.encoding.judged import check_variables
from shardproof.data.forms.formats import Form
from shardproof.data.forms.matches import MATCH_FIELDS, RANKING_MEASURES, Matches
from shardproof.errors import ConfigError
from shardproof.models.scorers import SCORER
from shardproof.train import run
from shardproof.train.checks.contradictions import check_columns
from shardproof.train.embedding.recipe import encoded_by
from shardproof.train.losses.by_file import check_best
from shardproof.train.model.loading import tokenizer_of
from shardproof.train.model.parts import check_reached
from shardproof.train.options.config import Batch, SftConfig
from shardproof.train.options.task_losses import POINTWISE, loss_of
from shardproof.train.rows.media import check_backbone, files_taken, media_limits
from shardproof.train.run import Prepared
from shardproof.train.seq_cls.recipe import check_files
from shardproof.train.settings import add_in_one_order, for_sft_trainer
from shardproof.train.watching.view import View, Write

LISTWISE = "listwise"
GENERATIVE = "generative_reranker"  # value of --task: an answer instead of a head


def check(config: SftConfig, world_size: int) -> Batch:
    """Check what can be known from the options alone; imports nothing heavy."""
    check_columns(config.columns, MATCH_FIELDS)
    if config.dataset in ([], ["stdlib"]) and not config.cached_dataset:
        raise ConfigError(f"--task {config.task} needs rows with a 'positive': name a file of them with --dataset.")
    if config.task == GENERATIVE:
        check_variables(config.template_variables)
    loss = loss_of(config)
    if loss not in (POINTWISE, LISTWISE):
        raise ConfigError(f"--task {config.task} and --loss {loss}: the loss must be {POINTWISE} or {LISTWISE}.")
    if config.loss_temperature is not None and loss != LISTWISE:
        raise ConfigError(f"--loss-temperature needs --loss {LISTWISE}, and --loss is {loss}. Leave it out.")
    check_best(config, ("loss", *RANKING_MEASURES), f"loss, {', '.join(RANKING_MEASURES)}")
    return run.check(config, world_size)


def read(config: SftConfig) -> tuple[Any, Any]:
    """The rows to train on and those to evaluate on (or None), checked; imports nothing heavy.

    Raises:
        DataError: a file is missing, or a row is bad: it has no positive, or no negative to rank it above.
    """
    from shardproof.data.rows import read_rows

    return run.read(config, read_rows, _form(config))


def _form(config: SftConfig) -> Form:
    return Matches(several=True, ranked=loss_of(config) == LISTWISE, files=True).form


def prepare(config: SftConfig, world_size: int, rows: Any, val_rows: Any) -> Prepared:
    """Create the tokenizer and the output folder, and encode the rows from `read`.

    Raises:
        ConfigError, DataError: for everything a user can fix, before any process is started.
    """
    batch = check(config, world_size)
    config = config.model_copy(update={"loss": loss_of(config)})
    kind = run.CAUSAL if config.task == GENERATIVE else SCORER
    if kind == SCORER:
        check_backbone(config, kind)
    prepared: Prepared = run.prepare(config, batch, rows, val_rows, partial(_told_apart, config), Prepared, kind)
    return prepared


def _told_apart(config: SftConfig, rows: Any, processing: Any) -> Any:
    """`encode`, with a check that some rows have a text that does not answer the query."""
    encoded = encode(config, rows, processing)
    labels = getattr(encoded, "encoded", encoded)["labels"]
    if all(label for of_row in labels for label in of_row):
        raise ConfigError(
            f"--task {config.task} compares texts that answer a query with others, and no row has a 'negative' or"
            f" 'negative_messages'. If the column has another name, add --columns negative=..."
        )
    return encoded


def encode(config: SftConfig, rows: Any, processing: Any) -> Any:
    """The token ids of the pairs of rows; its `report` says how many were kept."""
    from shardproof.train.reranker.scoring import scoring_of

    tokenizer, files = tokenizer_of(processing), files_taken(processing)
    if tokenizer.pad_token_id is None:
        raise ConfigError(f"The tokenizer of {config.model} has no padding token. Set its pad_token.")
    if files:
        check_files(config)
        return encoded_by(config, rows, processing, media_encoder(config, processing))
    if config.plain:
        processing.chat_template = None  # here and in the saved model
    return encoded_by(config, rows, processing, scoring_of(config, processing).encoder(tokenizer, config.system))


def media_encoder(config: SftConfig, processing: Any) -> Any:
    """The encoder for a model that takes files."""
    from shardproof.train.reranker.scoring import scoring_of

    return scoring_of(config, processing).media_encoder(processing, media_limits(config, processing), config.system)


def media_collator(config: SftConfig, processing: Any) -> Any:
    """The collator for a model that takes files."""
    from shardproof.data.media.judged import MediaPairCollator

    return MediaPairCollator(media_encoder(config, processing), config.on_lost)


def import_libraries(config: SftConfig) -> None:
    """Import what `train` needs, before ranks are forked."""
    import shardproof.train.reranker.trainer  # noqa: F401


def train(prepared: Prepared, view: View, write: Write | None = None, signals: Sequence[int] = ()) -> int:
    """Train on this rank and save. Collective: every rank of the process group calls it.

    Any of `signals` ends training after the current step, and its weights are saved.

    Returns: the signal that ended training, or 0.
    """
    from shardproof.data.encoding.embed import at_length
    from shardproof.data.encoding.rank import collate_pairs
    from shardproof.train.callbacks import tries_padding
    from shardproof.train.reranker.scoring import scoring_of
    from shardproof.train.reranker.trainer import RerankerTrainer

    config: SftConfig = prepared.config
    add_in_one_order(config)
    tokenizer = prepared.tokenizer
    scoring = scoring_of(config, prepared.processing)
    model = scoring.build(config, prepared.model, tokenizer)
    if files_taken(prepared.processing):
        check_reached(model, map(at_length, prepared.rows.rows))
        collator = media_collator(config, prepared.processing)
    else:
        typed = scoring.encoder(tokenizer, config.system).typed
        collator = partial(collate_pairs, pad_token_id=tokenizer.pad_token_id, typed=typed)

    def make_trainer(callbacks: list[Any], reporter: Any) -> RerankerTrainer:
        return RerankerTrainer(
            model=model,
            data_collator=collator,
            scoring=scoring,
            kind=loss_of(config),
            temperature=config.loss_temperature or 1.0,
            most=(config.max_positives, config.max_negatives),
            **for_sft_trainer(prepared, [*callbacks, *tries_padding(prepared, "Use another model.")]),
        )

    return run.train(prepared, model, make_trainer, view, write, signals)
