"""Which checkpoint a run begins from, and whether its data is still the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

from shardproof.checkpoint.folder import complete
from shardproof.checkpoint.manifest import MANIFEST, Manifest
from shardproof.errors import CheckpointError, ConfigError
from shardproof.train.config import RunConfig

Config = TypeVar("Config", bound=RunConfig)

AUTO, RUN, STATE = "auto", "run.json", "trainer_state.json"


def check_saving(config: RunConfig) -> None:
    """Raise ConfigError for options about checkpoints that cannot be what was meant."""
    if config.save_total_limit and not config.save_steps:
        raise ConfigError("--save-total-limit says how many checkpoints are kept: add --save-steps, which writes some.")
    if config.save_only_model and not config.save_steps:
        raise ConfigError("--save-only-model says what checkpoints hold: add --save-steps, which writes some.")
    if config.max_restarts and config.save_only_model:
        raise ConfigError(
            "--max-restarts goes on from checkpoints, and no run can go on from those of --save-only-model."
        )
    if config.max_restarts and not config.save_steps:
        raise ConfigError("--max-restarts goes on from checkpoints: add --save-steps, which writes some.")
    if config.min_processes and not config.max_restarts:
        raise ConfigError("--min-processes says on how many a run goes on when others died: add --max-restarts.")
    if config.min_processes and config.min_processes > config.nproc:
        raise ConfigError(f"--min-processes {config.min_processes} is more than the {config.nproc} that there are.")
    starts(config)


def starts(config: RunConfig) -> list[Path]:
    """The checkpoints that --resume may begin from, the best first; none for a run that begins anew.

    Raises:
        ConfigError: --resume names nothing that is complete, or what no run can go on from.
    """
    resume = config.resume
    if resume is None:
        return []
    if resume == AUTO:
        if config.output_dir is None:
            raise ConfigError("--resume auto looks for checkpoints in --output-dir: name that folder.")
        return _with_optimizer(complete(Path(config.output_dir).expanduser())[::-1])
    path = Path(resume).expanduser()
    found = _with_optimizer([path] if (path / MANIFEST).is_file() else complete(path)[::-1])
    if not found:
        what = "holds no complete checkpoint" if path.is_dir() else "does not exist"
        raise ConfigError(f"--resume {resume}: this folder {what}.\nA run writes some with --save-steps.")
    return found


def passed_over(config: RunConfig) -> list[str]:
    """What is wrong with the checkpoints that --resume auto does not begin from."""
    problems = []
    if config.resume == AUTO and config.output_dir is not None:
        for mark in sorted(Path(config.output_dir).expanduser().glob(f"*/{MANIFEST}")):
            try:
                Manifest.read(mark.parent)
            except CheckpointError as error:
                problems.append(str(error))
    return problems


def in_own_folder(config: RunConfig, begin: list[Path] | None = None) -> bool:
    """Whether the run goes on in the folder that the checkpoint it begins from lies in. `begin`: what `starts` says."""
    begin = starts(config) if begin is None else begin
    return bool(begin) and config.output_dir is not None and same_folder(begin[0].parent, config.output_dir)


def same_folder(one: str | Path, other: str | Path) -> bool:
    return Path(one).expanduser().resolve() == Path(other).expanduser().resolve()


def _with_optimizer(found: list[Path]) -> list[Path]:
    """Raise ConfigError if no run can go on from the first of these checkpoints."""
    found = [path for path in found if (path / STATE).is_file()] or found
    if found and not (found[0] / STATE).is_file():
        raise ConfigError(
            f"{found[0]} holds no {STATE}: a loop of your own or another engine wrote it, and nothing says at which "
            "step and row.\nGo on from it with shardproof.load, or name another checkpoint."
        )
    if found and not _has_optimizer(found[0]):
        raise ConfigError(
            f"{found[0]} holds weights only, as --save-only-model writes it: no run can go on from it.\n"
            "'shardproof export' makes a model folder of it, which --model can begin from."
        )
    return found


def _has_optimizer(checkpoint: Path) -> bool:
    """Of a damaged one nothing is said here: another may take its place."""
    try:
        names = Manifest.read(checkpoint).values
    except CheckpointError:
        return True
    return any(name.partition("@")[0] == "optimizer" for name in names)


def with_folder(config: Config) -> Config:
    """--resume PATH without --output-dir goes on in the folder of that run."""
    if config.resume in (None, AUTO) or config.output_dir is not None:
        return config
    return config.model_copy(update={"output_dir": str(starts(config)[0].parent)})


def order_of(rows: int, batch: int, seed: int | None, group_by_length: bool) -> str:
    """What decides which rows a step sees, as it stands in a checkpoint."""
    return json.dumps({"rows": rows, "global_batch_size": batch, "seed": seed, "group_by_length": group_by_length})


def check_order(start: Path, rows: int, batch: int, seed: int, group_by_length: bool) -> None:
    """Raise ConfigError if a step would see other rows than in the run that wrote the checkpoint."""
    file = start / RUN
    if not file.is_file():
        return
    saved = {"group_by_length": False} | json.loads(file.read_text(encoding="utf-8"))  # the first releases wrote none
    here = json.loads(order_of(rows, batch, seed, group_by_length))
    odd = [f"{name} {here[name]} instead of {saved[name]}" for name in here if here[name] != saved.get(name)]
    if odd:
        raise ConfigError(
            f"{start} was written by a run with other data: {', '.join(odd)}.\nResume with the same rows, "
            "--global-batch-size, --seed and --group-by-length, so that no row is seen twice or passed over."
        )


def step_of(start: Path) -> int:
    """After which step a checkpoint was written."""
    return int(json.loads((start / STATE).read_text(encoding="utf-8"))["global_step"])
