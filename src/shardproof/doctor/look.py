"""Rows and model of a run, read, encoded and loaded as by its recipe, for the checks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardproof.doctor.checks.check import Check
from shardproof.doctor.config import DoctorConfig, RlhfDoctorConfig
from shardproof.errors import ConfigError, DataError
from shardproof.models.families.family import CAUSAL
from shardproof.models.scorers import SCORER
from shardproof.train.embedding.recipe import ADAPTED, BODY
from shardproof.train.options.rlhf_config import REWARDED
from shardproof.train.rlhf.recipe import check_scorer
from shardproof.train.rlhf.rewards import check_columns_of
from shardproof.train.run import recipe_of

if TYPE_CHECKING:
    from shardproof.train.options.config import Batch

Config = DoctorConfig | RlhfDoctorConfig


def read_rows(config: Config, checks: list[Check]) -> tuple[Any, Any]:
    """The rows to train on and those to evaluate on (or None), without bad ones; None if there are none."""
    from shardproof.doctor.checks import data_checks

    recipe, leave_out = recipe_of(config), config.bad_rows == "skip"
    asked = config.model_copy(
        update={"bad_rows": "skip", "val_dataset": [], "cached_val_dataset": [], "val_split": 0.0}
    )
    try:
        rows, _ = recipe.read(asked)
    except DataError as error:
        checks.append(data_checks.unread(error, data_checks.ROWS, "--dataset"))
        return None, None
    checks += data_checks.rows(rows, leave_out)
    held_out = None
    try:
        if config.val_dataset or config.cached_val_dataset:
            only = {"dataset": config.val_dataset, "cached_dataset": config.cached_val_dataset, "interleave_prob": []}
            held_out, _ = recipe.read(asked.model_copy(update=only))
            checks += data_checks.rows(held_out, leave_out, data_checks.HELD_OUT)
        elif config.val_split:
            rows, held_out = rows.split(config.val_split, config.seed)
    except DataError as error:
        option = "--val-split" if config.val_split else "--val-dataset"
        checks.append(data_checks.unread(error, data_checks.HELD_OUT, option))
    return rows, held_out


def _encoded(config: Config, rows: Any, processing: Any) -> Any:
    from shardproof.data.encoding.beside import telling
    from shardproof.report.terminal import Share

    recipe: Any = recipe_of(config)
    with Share("encoding rows") as told, telling(told):
        return recipe.encode(config.model_copy(update={"bad_rows": "skip"}), rows, processing)


def encoded_rows(config: Config, batch: Batch, rows: Any, processing: Any, checks: list[Check]) -> Any:
    """The encoded rows, or None."""
    from shardproof.data.encoding.dated import keep_day
    from shardproof.data.encoding.template import set_template
    from shardproof.doctor.checks import data_checks, resume_checks
    from shardproof.train.model.loading import tokenizer_of
    from shardproof.train.rows.cached import day_of_rows
    from shardproof.train.rows.media import check_spoken, media_limits

    tokenizer, leave_out, known = tokenizer_of(processing), config.bad_rows == "skip", len(rows.skipped)
    checks += data_checks.special_tokens(tokenizer)
    count, lost = data_checks.lost_files(data_checks.with_all_files(rows, config), media_limits(config, processing))
    checks += data_checks.files(count, lost, leave_out)
    keep_day(tokenizer, day_of_rows(rows))
    try:
        set_template(processing, config.chat_template, config.template_variables, config.agent_template)
        if not isinstance(config, RlhfDoctorConfig):
            check_spoken(config, rows)
        encoded = _encoded(config, rows, processing)
    except (ConfigError, DataError) as error:
        checks += data_checks.not_encoded(error)
        return None
    checks += data_checks.refused(rows.skipped[known:], lost, len(rows), leave_out)
    checks += resume_checks.rows(config, batch, rows, encoded, processing)
    if isinstance(config, RlhfDoctorConfig):
        from shardproof.doctor.checks import rlhf_checks

        checks += rlhf_checks.lengths(encoded.report, config, rows)
        checks += rlhf_checks.answers(config, rows, tokenizer)
        checks += rlhf_checks.labels(config, rows)
        checks += rlhf_checks.rewarded(config, batch, rows)
        return encoded
    if hasattr(encoded.report, "learnt_tokens"):
        checks += data_checks.lengths(encoded.report, config, rows)
    checks += data_checks.padding(config, batch, encoded)
    if processing is tokenizer:
        checks += data_checks.repeated(tokenizer, encoded)
    return encoded


def held_out_rows(config: Config, source: str, rows: Any, processing: Any) -> list[Check]:
    """Checks for evaluation rows that would stop the run."""
    from shardproof.doctor.checks import data_checks
    from shardproof.train.rows.media import media_limits

    leave_out, known = config.bad_rows == "skip", len(rows.skipped)
    count, lost = data_checks.lost_files(data_checks.with_all_files(rows, config), media_limits(config, processing))
    try:
        if isinstance(config, RlhfDoctorConfig) and config.rlhf_type in REWARDED:
            check_columns_of(config, rows)
        encoded = _encoded(config, rows, processing)
    except (ConfigError, DataError) as error:
        return data_checks.not_encoded(error, data_checks.HELD_OUT)
    found = [*data_checks.files(count, lost, leave_out)]
    found += data_checks.refused(rows.skipped[known:], lost, len(rows), leave_out)
    found += data_checks.positions(config, source, encoded)
    return [dataclasses.replace(check, name=data_checks.HELD_OUT) for check in found if check.status != "ok"]


def steps_of(config: Config, batch: Batch, rows: Any) -> tuple[int, int]:
    """The number of steps of the run, and of a pass over the rows."""
    from shardproof.train.rlhf.recipe import RlhfPrepared
    from shardproof.train.run import Prepared

    kind = RlhfPrepared if isinstance(config, RlhfDoctorConfig) else Prepared
    run = kind(config, batch, Path(), "", None, rows, None, [])
    return run.steps, run.epoch_steps


def loaded_model(config: Config, source: str, tokens: int, checks: list[Check]) -> tuple[int, int]:
    """The numbers of parameters and of trained ones; 0 if the model cannot be loaded."""
    from shardproof.doctor.checks import data_checks, model_checks, resume_checks
    from shardproof.integrations.four_bits import count_weights
    from shardproof.train.adapters.adding import check_named_parts, with_adapters
    from shardproof.train.model.loading import load_model
    from shardproof.train.model.parts import in_bits
    from shardproof.train.seq_cls.labelling import labels_of
    from shardproof.zero.device import default_device

    scores = isinstance(config, RlhfDoctorConfig) and config.rlhf_type == "rm"
    how: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # reported as findings
    how |= {"num_labels": 1} if scores else {}
    labelled, embeds = getattr(config, "task", "") in ("seq_cls", "reranker"), config.recipe == "embedding"
    auto = BODY if embeds else SCORER if scores or labelled else CAUSAL
    task = ADAPTED if embeds else "SEQ_CLS" if scores or labelled else "CAUSAL_LM"
    try:
        if isinstance(config, RlhfDoctorConfig):
            check_scorer(config)
        how |= labels_of(config).config if isinstance(config, DoctorConfig) and labelled else {}
        loaded = load_model(source, config, auto, config.model_type, **how)
        model, info = loaded if isinstance(loaded, tuple) else (loaded, {})
        if labelled or scores:
            info = model_checks.without_heads(model, info)
        if embeds:
            info = model_checks.body_only(info)
        checks += model_checks.loading(info)
        embedding = model_checks.embedding_of(model)
        if embedding is not None:
            checks += data_checks.vocabulary(tokens, embedding.weight.shape[0])
        where = default_device(), config.nproc, config.stochastic_rounding
        checks += [*model_checks.places(model, *where), *model_checks.finite(model), *model_checks.tied(model)]
        config = check_named_parts(source, config, auto)
        model = with_adapters(in_bits(model, config), config, task)
    except ConfigError as error:
        checks.append(model_checks.not_loaded(error))
        return 0, 0
    checks += model_checks.adapted(config)
    checks += [*model_checks.trained(model, config, auto == CAUSAL), *resume_checks.weights(config, model)]
    return count_weights(model)
