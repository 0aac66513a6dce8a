"""Which checkpoint a run resumes from, and whether its data is still the same."""

from __future__ import annotations

import json
import logging
import zlib
from array import array
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

from shardproof.checkpoint.folder import complete
from shardproof.checkpoint.manifest import MANIFEST, Manifest
from shardproof.data.encoding.template import template_text
from shardproof.errors import CheckpointError, ConfigError, exported
from shardproof.train.options.config import RunConfig
from shardproof.train.options.option import flag
from shardproof.train.options.places import with_real_places
from shardproof.train.options.rlhf_config import CHORD, FIPO

log = logging.getLogger("shardproof")

Config = TypeVar("Config", bound=RunConfig)

ROWS, DEALT, DAY, PARTS = "global_batch_size", "dealt", "day", "file_parts"
SIZES = ROWS, "per_device_batch_size", "gradient_accumulation_steps"
AUTO, RUN, SUMS, STATE = "auto", "run.json", "rows.crc32", "trainer_state.json"

# Options that decide the position of a row, and those that decide how it is encoded.
PLACES = (
    *("seed", "group_by_length", "drop_last", "packing", "num_generations", "num_iterations", "steps_per_generation"),
    *("streaming", "shuffle_buffer_size", "interleave_prob", "stopping_strategy"),
)
CONTENTS = (
    *("columns", "row_format", "max_length", "truncation", "system", "chat_template", "agent_template"),
    *("template_variables", "loss", "token_weights"),
    *("model_name", "model_author", "max_pixels", "max_frame_pixels", "max_frames", "fps", "plain"),
    *("max_image_tokens", "max_frame_tokens", "max_positives", "max_negatives"),
)

# Options that have shaped the state of an optimizer, adapters or a head, and those that only affect later steps.
FIXED = (
    *("rlhf_type", "learning_rate", "part_learning_rates", "lorap_lr_ratio", "weight_decay", "optimizer_arguments"),
    *(
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "tuner",
        "tuner_arguments",
        "lora_rank",
        "lora_alpha",
        "rslora",
        "dora",
    ),
    *("task", "num_labels", "label_names", "problem_type", "init_lora_weights"),
    *("new_blocks", "new_special_tokens", "rope_scaling", "max_model_len"),
)
TOLD = (
    *("model", "lora_dropout", "freeze", "train_parts", "precision", "reduce_dtype", "fp8", "quantize", "epochs"),
    *("freeze_parameters", "trainable_parameters", "neftune_noise_alpha", "label_smoothing_factor"),
    *("lisa_activated_layers", "lisa_step_interval", "max_epochs"),
    *("router_aux_loss_coef", "pooling", "loss_temperature"),
    *("max_steps", "lr_scheduler", "lr_scheduler_kwargs", "warmup_ratio", "warmup_steps", "max_grad_norm"),
    *("beta", "loss_type", "loss_weights", "label_smoothing", "trl_arguments", "simpo_gamma", "cpo_alpha"),
    *("desirable_weight", "undesirable_weight", "ref_model", "teacher_model", "reward_model", "value_model"),
    *("teacher_model_server", "adapters", "ref_adapters"),
    *("sync_ref_steps", "reward_funcs", "reward_weights", "format_pattern", "scale_rewards", "max_completion_length"),
    *("stop_words", "advantage_estimator", "kl_in_reward", "teacher_kl_coef", "sft_alpha", "gkd_logits_topk"),
    *("tools", "environments", "max_tool_calling_iterations", "dynamic_sample", "max_resample_times"),
    *("temperature", "top_p", "top_k", "repetition_penalty", "epsilon", "epsilon_high", "delta"),
    *("importance_sampling_level", "mask_truncated_completions", "lmbda", "seq_kd", "gamma", "gae_lambda"),
    *("value_weight", "value_clip", *CHORD, *FIPO),
)


def check_saving(config: RunConfig) -> None:
    """Raise ConfigError for options about checkpoints that contradict each other."""
    if config.save_steps and config.save_strategy in ("epoch", "no"):
        raise ConfigError(
            f"--save-steps {config.save_steps} and --save-strategy {config.save_strategy}: leave one of them out."
        )
    if config.save_strategy == "epoch" and getattr(config, "streaming", False):
        raise ConfigError("--save-strategy epoch: the length of a pass over a stream is not known. Use --save-steps N.")
    if config.save_total_limit and not config.writes_checkpoints:
        raise ConfigError("--save-total-limit limits the number of checkpoints: add --save-steps to write them.")
    evaluated, saved = config.eval_strategy == "epoch", config.save_strategy == "epoch"
    if config.keep_best and (evaluated, config.evaluation_steps) != (saved, config.checkpoint_steps):
        often = "--save-strategy epoch" if evaluated else f"--save-steps {config.evaluation_steps or 'N'}"
        raise ConfigError(
            "--keep-best returns to the checkpoint of the best evaluation, so every evaluation needs one. Give"
            f" {often}, to match the evaluations (--save-total-limit 2 keeps the best and the newest)."
        )
    if config.save_only_model and not config.writes_checkpoints:
        raise ConfigError("--save-only-model sets the contents of checkpoints: add --save-steps to write them.")
    if config.max_restarts and config.save_only_model:
        raise ConfigError(
            "--max-restarts resumes from checkpoints, and those of --save-only-model cannot be resumed from."
        )
    if config.max_restarts and not config.writes_checkpoints:
        raise ConfigError("--max-restarts resumes from checkpoints: add --save-steps to write them.")
    if config.min_processes and not config.max_restarts:
        raise ConfigError(
            "--min-processes sets how few processes a run may resume on after others died: add --max-restarts."
        )
    if config.min_processes and config.min_processes > config.nproc:
        raise ConfigError(f"--min-processes {config.min_processes} is more than --nproc {config.nproc}.")
    starts(config)


def starts(config: RunConfig) -> list[Path]:
    """The checkpoints that --resume may start from, the best first; empty for a run from the start.

    Raises:
        ConfigError: --resume names no complete checkpoint, or one that no run can resume from.
    """
    resume = config.resume
    if resume is None:
        return []
    if resume == AUTO:
        if config.output_dir is None:
            raise ConfigError("--resume auto looks for checkpoints in --output-dir: name that folder.")
        return _with_optimizer(complete(Path(config.output_dir).expanduser())[::-1])
    path = Path(resume).expanduser()
    if (path / MANIFEST).is_file():
        Manifest.read(path)  # a damaged one is reported before any process is started
    found = _with_optimizer([path] if (path / MANIFEST).is_file() else complete(path)[::-1])
    if not found:
        raise ConfigError(f"--resume {resume}: this folder {_what_is_there(path)}")
    return found


def _what_is_there(path: Path) -> str:
    """What is wrong with a folder without a checkpoint of ours, and what to do."""
    from shardproof.checkpoint.from_deepspeed import deepspeed_folder
    from shardproof.checkpoint.from_distributed import distributed_folders

    if not path.is_dir():
        return "does not exist.\nA run writes checkpoints with --save-steps."
    within = [path, *sorted(path.glob("checkpoint-*"), key=lambda folder: folder.stat().st_mtime, reverse=True)]
    foreign = next((folder for folder in within if (folder / STATE).is_file()), None)
    if foreign is None:
        return "holds no complete checkpoint.\nA run writes checkpoints with --save-steps."
    said = f"holds a checkpoint of transformers' Trainer, which ms-swift uses too ({foreign}).\n"
    if deepspeed_folder(foreign) or distributed_folders(foreign):
        return f"{said}'shardproof convert {foreign} FOLDER' writes one to resume from."
    if (foreign / "adapter_config.json").is_file():
        return f"{said}Its optimizer's state cannot be read. Merge its adapters with PEFT, and start with --model."
    return f"{said}Its optimizer's state cannot be read. Start from its weights: --model {foreign}."


def passed_over(config: RunConfig) -> list[str]:
    """What is wrong with the checkpoints that --resume auto skips."""
    problems = []
    if config.resume == AUTO and config.output_dir is not None:
        for mark in sorted(Path(config.output_dir).expanduser().glob(f"*/{MANIFEST}")):
            try:
                Manifest.read(mark.parent)
            except CheckpointError as error:
                problems.append(str(error))
    return problems


def in_own_folder(config: RunConfig, begin: list[Path] | None = None) -> bool:
    """Whether the run continues in the folder of the checkpoint it resumes from. `begin`: the result of `starts`."""
    begin = starts(config) if begin is None else begin
    return bool(begin) and config.output_dir is not None and same_folder(begin[0].parent, config.output_dir)


def same_folder(one: str | Path, other: str | Path) -> bool:
    return Path(one).expanduser().resolve() == Path(other).expanduser().resolve()


def _with_optimizer(found: list[Path]) -> list[Path]:
    """Raise ConfigError if no run can resume from the first of these checkpoints."""
    found = [path for path in found if (path / STATE).is_file()] or found
    if found and not (found[0] / STATE).is_file():
        raise ConfigError(
            f"{found[0]} holds no {STATE}: it was written by a custom loop or another engine, and its step and row"
            f" are not known.\nContinue from it with shardproof.load, or name another checkpoint."
        )
    if found and not _has_optimizer(found[0]):
        raise ConfigError(
            f"{found[0]} holds weights only, as written with --save-only-model, so no run can resume from it.\nTurn"
            f" it into a model folder with 'shardproof export', and start from that with --model."
        )
    return found


def _has_optimizer(checkpoint: Path) -> bool:
    """Whether a checkpoint has an optimizer; True for a damaged one, since another may take its place."""
    try:
        names = Manifest.read(checkpoint).values
    except CheckpointError:
        return True
    return any(name.partition("@")[0] == "optimizer" for name in names)


def with_folder(config: Config) -> Config:
    """--resume PATH without --output-dir continues in the folder of that run."""
    if config.resume in (None, AUTO) or config.output_dir is not None:
        return config
    return config.model_copy(update={"output_dir": str(starts(config)[0].parent)})


def with_rows_a_step(config: Config, world_size: int) -> Config:
    """For a resumed run, keep the number of rows per step unless a given option sets it. Sizes that only come from the
    options of that run do not count as given: its micro-batch size is kept as far as the processes can share the rows.

    Raises:
        ConfigError: the processes cannot share the rows evenly.
    """
    begin = starts(config)
    file = begin[0] / RUN if begin else None
    sizes = [name for name in SIZES if getattr(config, name) is not None]
    if file is None or not file.is_file() or any(name in config.model_fields_set for name in sizes):
        return config
    rows = json.loads(file.read_text(encoding="utf-8"))[ROWS]
    try:
        if config.batch(world_size).whole == rows:
            return config
        changed = config.model_copy(update=dict.fromkeys(SIZES) | {ROWS: rows})
        micro = changed.batch(world_size).on(world_size, config.per_device_batch_size).micro
    except ConfigError as error:
        raise ConfigError(
            f"{begin[0]} was written with --global-batch-size {rows}, which a resumed run keeps, and {world_size}"
            f" processes cannot share it evenly.\nResume on a number of processes that divides {rows}."
        ) from error
    if config.per_device_batch_size is not None:
        changed = changed.model_copy(update={"per_device_batch_size": micro})
    log.warning("The run resumes with --global-batch-size %d, as in %s: %s.", rows, begin[0], changed.batch(world_size))
    return changed


def order_of(
    config: RunConfig,
    rows: Any,
    encoded: int,
    batch: int,
    dealt: dict[str, int] | None = None,
    day: date | None = None,
    parts: dict[str, str] | None = None,
) -> dict[str, bytes]:
    """What decides which rows a step sees and how they are encoded, as files for a checkpoint.

    Args:
        rows: the rows as read, with `checksums`.
        encoded: how many rows there are to train on, counting a packed row once.
        batch: rows per step.
        dealt: see dealt.py
        day: the day that chat templates write, see dated.py
        parts: the processor's classes that prepare files
    """
    said = {
        "rows": encoded,
        ROWS: batch,
        DEALT: dealt,
        DAY: day and str(day),
        PARTS: parts,
        **{name: getattr(config, name) for name in (*PLACES, *CONTENTS) if name in type(config).model_fields},
        "optimizer": config.optimizer + (" --stochastic-rounding" if config.stochastic_rounding else ""),
    }
    named = {name: getattr(config, name) for name in type(config).model_fields if name in (*FIXED, *TOLD)}
    named = with_real_places(named)
    recipe = "rlhf" if "rlhf_type" in named else "sft"
    said["options"] = json.loads(json.dumps({"recipe": recipe, **named, "learning_rate": config.rate}))
    if config.chat_template:  # the file may be edited
        said["chat_template"] = f"{zlib.crc32(template_text(config.chat_template).encode()):08x}"
    return {RUN: json.dumps(said).encode(), SUMS: rows.checksums().tobytes()}


def check_order(start: Path, order: dict[str, bytes], rows: Any) -> dict[str, int] | None:
    """Compare the result of `order_of` with that of the run that wrote the checkpoint. It only warns about rows that
    have changed but kept their positions: a user who corrects a row wants to continue.

    Returns: how rows were distributed in that run, in the form of dealt.py; None if it was not recorded.

    Raises:
        ConfigError: a step would see other rows, or the optimizer differs.
    """
    if not (said := said_by_run(start)):
        return None
    saved = {"group_by_length": False, "drop_last": False} | said  # earlier releases did not write these
    here = json.loads(order[RUN])
    _check_options(start, here.pop("options"), saved.get("options", {}))
    for name in (DEALT, DAY, PARTS):  # see dealt.py; taken over by the run; see media.py
        here.pop(name)
    odd = [name for name in here if here[name] != saved.get(name, here[name])]
    if "optimizer" in odd:
        raise ConfigError(
            f"{start} was written with --optimizer {saved['optimizer']}, but --optimizer {here['optimizer']} keeps"
            f" different state.\nResume with the same one, or start from the weights: {exported(start)}."
        )
    if odd == [ROWS]:
        raise ConfigError(
            f"{start} was written with {saved[ROWS]} rows per step, but these options give {here[ROWS]}.\nResume with"
            f" --global-batch-size {saved[ROWS]} and without --gradient-accumulation-steps, on any number of processes"
            " that divides it."
        )
    told = ", ".join(f"{name} {_short(here[name])} instead of {_short(saved[name])}" for name in odd)
    if any(name not in CONTENTS for name in odd):
        raise _other_data(start, told)
    rows_differ = _compare_rows(start, order[SUMS], rows)
    # Lengths decide the position of a row.
    by_length = [name for name in ("packing", "group_by_length") if here.get(name)]
    if by_length and (odd or rows_differ):
        what = told or rows_differ
        raise _other_data(start, f"{what}; with --{by_length[0].replace('_', '-')} this moves rows to other places")
    if told:
        log.warning(
            "%s was written with other options: %s. Rows are read with the current options from here on.", start, told
        )
    if rows_differ:
        log.warning("Since %s was written, %s. The run continues with them as they are now.", start, rows_differ)
    return saved.get(DEALT)  # type: ignore[no-any-return]


def day_of_run(start: Path) -> date | None:
    """The day recorded by the run that wrote a checkpoint; None for an earlier release."""
    saved = said_by_run(start).get(DAY)
    return date.fromisoformat(saved) if saved else None


def said_by_run(start: Path) -> dict[str, Any]:
    """What the run that wrote a checkpoint recorded about its rows and options, if it did."""
    file = start / RUN
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def _check_options(start: Path, here: dict[str, Any], saved: dict[str, Any]) -> None:
    """Compare the current options with those that the checkpoint was written with; earlier releases recorded none.

    Raises:
        ConfigError: an option would have no effect, or would contradict what is in the checkpoint.
    """
    saved = with_real_places(saved)  # earlier releases wrote paths as given
    odd = [name for name in here if name in saved and here[name] != saved[name]]
    told = {name: f"{flag(name)} {_short(here[name])} instead of {_short(saved[name])}" for name in odd}
    if fixed := [told[name] for name in odd if name not in TOLD]:
        raise ConfigError(
            f"{start} was written with other options, which a resumed run must keep: {', '.join(fixed)}.\n"
            f"Resume with the same ones, or start from the weights: {exported(start)}."
        )
    if odd:
        log.warning("The run resumes with options other than those of %s: %s.", start, ", ".join(told.values()))


def _compare_rows(start: Path, sums: bytes, rows: Any) -> str:
    """How rows that kept their positions differ; empty if they do not.

    Raises:
        ConfigError: rows have moved, or are other data.
    """
    file = start / SUMS
    if not file.is_file():  # an earlier release wrote it
        return ""
    there, here = array("I", file.read_bytes()), array("I", sums)
    if len(there) != len(here):  # rows that are too long count here, and are not learned from
        raise _other_data(start, f"{len(here):,} rows in the files instead of {len(there):,}")
    changed = [i for i, (a, b) in enumerate(zip(there, here, strict=True)) if a != b]
    if not changed:
        return ""
    moved = Counter(there[i] for i in changed) & Counter(here[i] for i in changed)
    first = rows[changed[0]].where
    if moved:
        raise _other_data(start, f"{moved.total():,} rows have moved, the first at {first}")
    if len(changed) == len(here):
        raise _other_data(start, "all rows have changed")
    were = f"{len(changed):,} rows were" if len(changed) > 1 else "1 row was"
    return f"{were} changed, the first at {first}"


def _other_data(start: Path, what: str) -> ConfigError:
    return ConfigError(
        f"{start} was written by a run with other data: {what}.\nResume with the same rows in the same order and the "
        f"same options, so that no row is seen twice or skipped. To train on other rows, start from the weights: "
        f"{exported(start)}."
    )


def _short(value: Any) -> str:
    text = ",".join(f"{name}={one}" for name, one in value.items()) if isinstance(value, dict) else str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def step_of(start: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(json.loads((start / STATE).read_text(encoding="utf-8"))["global_step"])


def at_its_end(start: Path, steps: int, config: RunConfig) -> str:
    """A warning for a checkpoint at or beyond the last step of the run that resumes from it; otherwise empty."""
    if not (start / STATE).is_file() or (done := step_of(start)) < steps:
        return ""
    option, value = ("--max-steps", steps) if config.max_steps else ("--epochs", f"{config.epochs:g}")
    return (
        f"{start} is at step {done}, and {option} {value} ends the run after step {steps}: nothing is left to train. To"
        f" train further, raise {option}."
    )
