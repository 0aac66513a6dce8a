"""Supervised fine-tuning, from top to bottom: prepare once, then train on every rank.

`prepare` finds everything a user may have got wrong and needs no process group; `train` is what each rank
does with the result.
"""

from __future__ import annotations

import difflib
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shardproof.data.formats import FIELDS
from shardproof.data.template import set_template, template_text
from shardproof.errors import ConfigError
from shardproof.train.config import Batch, SftConfig
from shardproof.train.folder import BASE, RunFolder
from shardproof.train.models import TINY, check_model_source, check_packages, load_model, load_tokenizer


@dataclass
class Prepared:
    """A run that can start: what is learned from which model, and where the result goes."""

    config: SftConfig
    batch: Batch
    folder: Path
    model: str
    tokenizer: Any
    rows: Any
    val_rows: Any
    skipped: list[str]

    @property
    def steps(self) -> int:
        per_epoch = -(-len(self.rows) // self.batch.whole)
        return self.config.max_steps or -int(-self.config.epochs * per_epoch // 1)


def check(config: SftConfig, world_size: int) -> Batch:
    """What can be known from the options alone; imports nothing heavy."""
    batch = config.batch(world_size)
    check_model_source(config.model)
    check_packages(config)
    check_columns(config.columns)
    if config.chat_template:
        template_text(config.chat_template)
    RunFolder.check(config)
    if config.val_dataset and config.val_split:
        raise ConfigError("--val-dataset and --val-split are two ways to say the same: give one of them.")
    if config.eval_steps and not (config.val_dataset or config.val_split):
        raise ConfigError("--eval-steps needs rows to evaluate on: add --val-dataset or --val-split.")
    return batch


def check_columns(columns: dict[str, str]) -> None:
    """Raise ConfigError for a field that no row can have."""
    for field in columns:
        if field not in FIELDS:
            near = difflib.get_close_matches(field, FIELDS, n=1)
            hint = f" Did you mean {near[0]}={columns[field]}?" if near else ""
            raise ConfigError(
                f"--columns {field}={columns[field]}: there is no field {field!r}.{hint}\n"
                f"The name of a field stands first: {', '.join(FIELDS)}."
            )


def read(config: SftConfig) -> tuple[Any, Any]:
    """The rows to train on and those to evaluate on (or None), checked; imports nothing heavy.

    Raises:
        DataError: a file is missing, or a row is bad.
    """
    from shardproof.data.rows import read_rows

    how: Any = {"bad_rows": config.bad_rows, "seed": config.seed, "columns": config.columns}
    rows = read_rows(config.dataset, **how)
    if config.val_dataset:
        return rows, read_rows(config.val_dataset, **how)
    return rows.split(config.val_split, config.seed) if config.val_split else (rows, None)


def prepare(config: SftConfig, world_size: int, rows: Any, val_rows: Any) -> Prepared:
    """Make the tokenizer and the output folder, encode the rows that `read` gave.

    Raises:
        ConfigError, DataError: everything a user can put right, found before any process is started.
    """
    batch = check(config, world_size)
    with tempfile.TemporaryDirectory(prefix="shardproof-") as scratch:
        source = _source(config, Path(scratch) / BASE, rows)
        tokenizer = load_tokenizer(source, config)
        set_template(tokenizer, config.chat_template)
        encoded = _encode(rows, tokenizer, config)
        val_encoded = _encode(val_rows, tokenizer, config) if val_rows is not None else None
        folder = RunFolder.create(config)
        with folder.discarded_if_it_fails():
            if config.model == TINY:
                source = shutil.move(source, str(folder.base.absolute()))
            folder.write_config(config)
            parts = [part.skipped for part in (rows, val_rows) if part is not None]
            skipped = list(dict.fromkeys(str(row) for part in parts for row in part))
            folder.write_skipped(skipped)
    return Prepared(config, batch, folder.path, str(source), tokenizer, encoded, val_encoded, skipped)


def _source(config: SftConfig, scratch: Path, rows: Any) -> str:
    """The folder of the model, or its hub id."""
    if config.model == TINY:
        from shardproof.models.tiny import build_tiny

        return str(build_tiny(scratch, rows.texts(), seed=config.seed))
    path = Path(config.model).expanduser()
    return str(path.absolute()) if path.is_dir() else config.model


def _encode(rows: Any, tokenizer: Any, config: SftConfig) -> Any:
    from shardproof.data.encode import encode_rows

    return encode_rows(
        rows,
        tokenizer,
        max_length=config.max_length,
        loss=config.loss,
        truncation=config.truncation,
        system=config.system,
    )


def train(
    prepared: Prepared, view: Any, write: Callable[[dict[str, Any]], None] | None = None, signals: Sequence[int] = ()
) -> int:
    """Train on this rank and save. Collective: every rank of the process group calls it.

    Any of `signals` ends training after the step it comes in, and the weights of that step are saved.

    Returns: the signal that ended training, or 0.
    """
    from transformers import TrainerCallback
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    from shardproof.data.encode import collate
    from shardproof.train.stop import StopAfterStep
    from shardproof.train.trainer import Reporter, SftTrainer

    config, folder = prepared.config, RunFolder(prepared.folder)
    model = load_model(prepared.model, config)
    keep_cache = model.config.use_cache
    args = training_arguments(prepared)
    stop = StopAfterStep()
    callbacks: list[TrainerCallback] = [stop]
    if args.process_index == 0:
        callbacks.append(Reporter(write or folder.append, view))
    trainer = SftTrainer(
        model=model,
        args=args,
        train_dataset=prepared.rows,
        eval_dataset=prepared.val_rows,
        data_collator=partial(collate, pad_token_id=prepared.tokenizer.pad_token_id),
        processing_class=prepared.tokenizer,
        callbacks=callbacks,
        batch=prepared.batch,
        order_seed=config.seed,
        stage=config.stage,
        mixed_precision=_mixed_precision(config),
    )
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    with stop.listening(signals):
        try:
            trainer.train()
        finally:
            view.end()
        if prepared.val_rows is not None and not config.eval_steps and not stop.agreed:
            trainer.evaluate()  # with --eval-steps, the Trainer has ended with an evaluation
        model.config.use_cache = keep_cache
        trainer.save_model(str(folder.unfinished))
        if args.process_index == 0:
            folder.unfinished.rename(folder.model)
    return stop.agreed


def _mixed_precision(config: SftConfig) -> Any:
    if config.precision == "fp32":
        return None
    import torch

    import shardproof

    return shardproof.MixedPrecision(compute=torch.bfloat16, reduce=torch.float32)


def training_arguments(prepared: Prepared) -> Any:
    """Our options in transformers' words."""
    import torch
    from transformers import TrainingArguments

    config, batch = prepared.config, prepared.batch
    return TrainingArguments(
        output_dir=str(prepared.folder),
        max_steps=prepared.steps,
        per_device_train_batch_size=batch.micro,
        per_device_eval_batch_size=batch.micro,
        gradient_accumulation_steps=batch.accumulation,
        learning_rate=config.learning_rate,
        lr_scheduler_type=config.lr_scheduler,
        warmup_steps=config.warmup_ratio,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        seed=config.seed,
        gradient_checkpointing=config.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": config.checkpointing_reentrant},
        eval_strategy="steps" if config.eval_steps else "no",
        eval_steps=config.eval_steps,
        logging_steps=config.logging_steps,
        logging_nan_inf_filter=False,  # a loss that is not a number is shown as it is
        report_to=[name for name in config.report_to if name != "none"] or "none",
        save_strategy="no",
        remove_unused_columns=False,
        average_tokens_across_devices=True,
        disable_tqdm=True,
        use_cpu=not torch.accelerator.is_available(),
    )
