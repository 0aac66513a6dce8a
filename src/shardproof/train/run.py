"""What every recipe shares, from start to finish: check, read, prepare once, then train on every rank.

A recipe is a module, usually named after its command, with `check`, `read`, `prepare`, `import_libraries` and `train`,
built from these.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import importlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

from shardproof.checkpoint.folder import Lock, complete
from shardproof.data.encoding.agents import check_agent
from shardproof.data.encoding.dated import day_of, keep_day
from shardproof.data.encoding.template import set_template
from shardproof.data.encoding.template_syntax import check_template
from shardproof.errors import CheckpointError, ConfigError, DataError
from shardproof.interrupts import raise_again
from shardproof.models.families.family import CAUSAL
from shardproof.models.loading.classes import check_looks_back
from shardproof.models.loading.packed import check_can_unpack
from shardproof.models.loading.processors import file_parts
from shardproof.plugins import check_files
from shardproof.train.adapters.adding import check_named_parts
from shardproof.train.adapters.beginning import begin_adapters, check_beginning, check_begun
from shardproof.train.adapters.begun import other_bases
from shardproof.train.adapters.kinds import check_steps
from shardproof.train.checks.contradictions import check_bits, check_evaluation, check_together
from shardproof.train.checks.named import check_model, check_named
from shardproof.train.folder import BASE, RunFolder, tell_other_weights
from shardproof.train.model.changes import tokens_of
from shardproof.train.model.compiled import check_compiler
from shardproof.train.model.loading import (
    TINY,
    also_stops,
    check_attention,
    check_packages,
    load_processing,
    tokenizer_of,
)
from shardproof.train.model.made_anew import tell_made_anew
from shardproof.train.model.positions import check_positions
from shardproof.train.model.vocabulary import check_vocabulary
from shardproof.train.options.batch import Batch, steps_of
from shardproof.train.options.config import RunConfig
from shardproof.train.options.patterns import check_patterns
from shardproof.train.resume import (
    AUTO,
    DEALT,
    RUN,
    at_its_end,
    check_order,
    check_saving,
    day_of_run,
    in_own_folder,
    order_of,
    passed_over,
    starts,
    step_of,
)
from shardproof.train.rows.cached import check_folders, day_of_rows
from shardproof.train.rows.dealt import dealt, tell_other_processes
from shardproof.train.rows.media import check_media_root, tell_other_parts, warn_of_limits
from shardproof.train.rows.read import read as read
from shardproof.train.saved_model import save_model
from shardproof.train.watching.view import View, Write

log = logging.getLogger("shardproof")


class Recipe(Protocol):
    """The functions of a recipe's module."""

    def check(self, config: Any, world_size: int) -> Batch: ...
    def read(self, config: Any) -> tuple[Any, Any]: ...
    def prepare(self, config: Any, world_size: int, rows: Any, val_rows: Any) -> Prepared: ...
    def import_libraries(self, config: Any) -> None: ...
    def train(self, prepared: Prepared, view: View, write: Write | None = None, signals: Sequence[int] = ()) -> int: ...


def recipe_of(config: RunConfig) -> Recipe:
    """The recipe that these options are for."""
    found: Any = importlib.import_module(f"shardproof.train.{config.recipe}.recipe")
    return found


@dataclass
class Prepared:
    """A run that can start: what is learned from which model, and where the result goes.

    Attributes:
        starts: checkpoints to resume from, the best first; empty for a run from the start.
        order: what a checkpoint records about the rows and their order, by file name.
        processing: the model's processor if it takes images, audio or video, otherwise its tokenizer.
        logged: a checksum of the steps in the log before this start.
        lock: keeps other jobs out of the folder, in the process that prepared.
        saves: whether the weights are written at the end.
    """

    config: Any
    batch: Batch
    folder: Path
    model: str
    processing: Any
    rows: Any
    val_rows: Any
    skipped: list[str]
    starts: Sequence[Path] = dataclasses.field(default=(), init=False)
    order: dict[str, bytes] = dataclasses.field(default_factory=dict, init=False)
    logged: int = dataclasses.field(default=0, init=False)
    lock: Lock | None = dataclasses.field(default=None, init=False)
    saves: bool = dataclasses.field(default=True, init=False)

    @property
    def tokenizer(self) -> Any:
        return tokenizer_of(self.processing)

    @property
    def rows_a_step(self) -> int | Fraction:
        return self.batch.whole

    @property
    def epoch_steps(self) -> int:
        """Steps per pass over the rows."""
        return steps_of(len(self.rows), self.rows_a_step, self.config.drop_last)

    @property
    def steps(self) -> int:
        if self.config.max_steps:
            return int(self.config.max_steps)
        return -int(-self.config.epochs * self.epoch_steps // 1)


def check(config: RunConfig, world_size: int) -> Batch:
    """Check what the options alone can tell; imports nothing heavy."""
    check_named(config)
    batch = config.batch(world_size)
    check_model(config)
    check_packages(config)
    check_together(config)
    check_patterns(config)
    check_files(config.external_plugins)
    check_media_root(config)
    if config.compile:
        check_compiler()
    check_beginning(config)
    check_bits(config)
    if config.chat_template:
        check_template(config.chat_template)
    if config.agent_template:
        check_agent(config.agent_template)
    RunFolder.check(config)
    check_saving(config)
    check_evaluation(config)
    check_folders(config)
    return batch


def prepare(
    config: RunConfig,
    batch: Batch,
    rows: Any,
    val_rows: Any,
    encode: Callable[[Any, Any], Any],
    kind: type[Prepared],
    model_kind: str = CAUSAL,
) -> Any:
    """Load the tokenizer, create the output folder, and encode the rows with `encode(rows, processing)`.

    `model_kind`: the class of transformers that loads the model.

    Raises:
        ConfigError, DataError: errors that a user can fix, found before any process is started.
    """
    check_attention(config)
    if names := getattr(config, "new_special_tokens", []):  # written out, so that config.yaml lists them
        config = config.model_copy(update={"new_special_tokens": tokens_of(names)})
    begin = starts(config)
    for problem in passed_over(config):
        log.warning("%s It is skipped.", problem)
    for told in other_bases(config):
        log.warning(told)
    goes_on = in_own_folder(config, begin)
    base = RunFolder(begin[0].parent).base if begin else None
    known = str(base.absolute()) if base is not None and base.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="shardproof-") as scratch:
        source = known or model_source(config, Path(scratch) / BASE, rows)
        if model_kind == CAUSAL and not config.external_plugins:  # plugins may bring a class for it
            check_looks_back(source, config.trust_remote_code)
        if not config.external_plugins:
            check_can_unpack(source)
        processing = processing_of(source, config)
        tokenizer = tokenizer_of(processing)
        keep_day(tokenizer, day_of_run(begin[0]) if begin else day_of_rows(rows))
        config = check_named_parts(source, config, model_kind)
        warn_of_limits(config, processing)
        encoded = encode(rows, processing)
        try:
            val_encoded = encode(val_rows, processing) if val_rows is not None else None
        except DataError as error:
            raise DataError(f"Rows to evaluate on: {error}") from None
        if not config.external_plugins:  # plugins may bring another model
            check_positions(config, source, encoded, val_encoded)
            check_vocabulary(config, source, processing, encoded, val_encoded)
        many = 0 if getattr(config, "streaming", False) else len(encoded)
        if config.drop_last and many < batch.whole:
            raise ConfigError(
                f"--drop-last leaves all rows out: there are {many:,}, and a step takes {batch.whole:,}."
                " Leave it out, or use fewer rows per step."
            )
        order: dict[str, bytes] = {}
        if begin or config.writes_checkpoints:
            order = order_of(config, rows, many, batch.whole, dealt(batch), day_of(tokenizer), file_parts(processing))
        if begin:
            tell_other_processes(check_order(begin[0], order, rows), begin[0], config, batch)
            tell_other_parts(begin[0], processing)
        if begin and config.tuner != "full":
            tell_other_weights(begin[0].parent, source)
            check_begun(config, begin[0])
        folder = RunFolder.create(config, goes_on)
        with folder.discarded_if_it_fails():
            if config.model == TINY and not known:
                source = shutil.move(source, str(folder.base.absolute()))
            folder.write_config(config)
            parts = [part.skipped for part in (rows, val_rows) if part is not None]
            skipped = list(dict.fromkeys(str(row) for part in parts for row in part))
            folder.write_skipped(skipped)
            prepared = kind(config, batch, folder.path, str(source), processing, encoded, val_encoded, skipped)
            check_steps(config, prepared.steps)
    prepared.starts, prepared.order, prepared.lock = begin, order, folder.lock
    prepared.logged = folder.checksum_of_steps()
    return prepared


def processing_of(source: str, config: RunConfig) -> Any:
    """The processor or tokenizer of a run, with the chat template from its options.

    Raises:
        ConfigError: as `load_processing` and `set_template`.
    """
    found = load_processing(source, config)
    set_template(found, config.chat_template, config.template_variables, config.agent_template)
    return found


def model_source(config: RunConfig, scratch: Path, rows: Any) -> str:
    """The folder of the model, or its hub id."""
    if config.model == TINY:
        from shardproof.models.tiny import build_tiny

        return str(build_tiny(scratch, rows.texts(), seed=config.seed))
    path = Path(config.model).expanduser()
    return str(path.absolute()) if path.is_dir() else config.model


def train(
    prepared: Prepared,
    model: Any,
    make_trainer: Callable[[list[Any], Any], Any],
    view: View,
    write: Write | None = None,
    signals: Sequence[int] = (),
) -> int:
    """Train on this rank and save. Collective: every rank of the process group calls it.

    `make_trainer(callbacks, reporter)` returns the trainer for `model`; the reporter, None on all ranks but the first,
    is one of the callbacks. Any of `signals` ends training after the current step, whose weights are saved.

    Returns: the signal that ended training, or 0.
    """
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    from shardproof.train.callbacks import callbacks_of
    from shardproof.train.stop import EvaluationEnded, StopAfterStep
    from shardproof.train.watching.profile import Profiler
    from shardproof.train.watching.report import Reporter
    from shardproof.zero.comm.world import is_first

    config, folder = prepared.config, RunFolder(prepared.folder)
    first = is_first()
    stop = StopAfterStep()
    also_stops(model, prepared.tokenizer)
    keep_cache = getattr(model.config, "use_cache", None)
    reporter = Reporter(write or folder.records.add, view, folder.answers) if first else None
    if first and prepared.saves and config.tuner != "full":
        folder.write_sample(prepared.model)
    if not prepared.starts:
        tell_made_anew(model, prepared.model)
    begin_adapters(model, config, prepared.starts, folder.path if first and prepared.saves else None)
    trainer = make_trainer([stop, *callbacks_of(config), *([reporter] if reporter else [])], reporter)
    stop.meet = trainer._meet
    trainer.evaluates_epochs = config.eval_strategy == "epoch"
    trainer.recorder.folder = None if write else folder.path
    if reporter:
        reporter.recorder = trainer.recorder
    if not prepared.saves:  # a run that is only watched shall show where it becomes NaN
        trainer.remove_callback(trainer.finite)
    if config.profile:
        trainer.add_callback(Profiler(folder.path, config.profile))
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    raise_again()
    with stop.listening(signals):
        try:
            _train_from_the_best(trainer, prepared, folder, first)
        finally:
            view.end()
            gc.unfreeze()
        if prepared.saves:
            trainer.finite.check_end()
            during = getattr(model.config, "use_cache", None)
            if keep_cache is not None:
                model.config.use_cache = keep_cache
            save_model(trainer, config, prepared.processing, folder, first)
            if keep_cache is not None:
                model.config.use_cache = during
        at_the_end = not config.evaluates and config.eval_strategy != "no"  # otherwise Trainer has just evaluated
        if prepared.val_rows is not None and at_the_end and not stop.agreed:
            with contextlib.suppress(EvaluationEnded):
                trainer.evaluate()
    return stop.agreed


def _train_from_the_best(trainer: Any, prepared: Prepared, folder: RunFolder, first: bool) -> None:
    """Train, from the newest intact checkpoint if there is one."""
    for number, start in enumerate(prepared.starts, 1):
        if first:  # logged since by ranks that died, perhaps after starting from another run's checkpoint
            folder.forget_after(step_of(start))
        try:
            trainer.train(resume_from_checkpoint=str(start))
            if first and (told := at_its_end(start, prepared.steps, prepared.config)):
                log.warning(told)
            return
        except CheckpointError as error:
            if trainer.resumed or number == len(prepared.starts) or prepared.config.resume != AUTO:
                raise
            if first:
                log.warning("%s Resuming from the one before it.", error)
    if first:
        # Logged by ranks that died before the first checkpoint. An evaluation before the first step is kept.
        folder.forget_after(0 if prepared.starts else -1)
    trainer.train()


def again(prepared: Prepared, world_size: int) -> Prepared:
    """The same run after ranks were lost: from its newest checkpoint, on `world_size` ranks, with the same rows per
    step. Differences that this causes are reported, and recorded in the following checkpoints."""
    config = prepared.config.model_copy(update={"nproc": world_size, "resume": AUTO})
    changed = copy.copy(prepared)
    changed.config, changed.batch = config, prepared.batch.on(world_size)
    changed.starts = list(dict.fromkeys([*complete(prepared.folder)[::-1], *prepared.starts]))
    if prepared.order and changed.batch != prepared.batch:
        for start in changed.starts[:1]:
            tell_other_processes(dealt(prepared.batch), start, config, changed.batch)
        said = json.loads(prepared.order[RUN]) | {DEALT: dealt(changed.batch)}
        changed.order = prepared.order | {RUN: json.dumps(said).encode()}
    return changed
