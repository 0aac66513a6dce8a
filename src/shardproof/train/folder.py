"""The output folder of a run: config.yaml, metrics.jsonl, model/."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardproof.checkpoint.folder import UNFINISHED as ASIDE
from shardproof.checkpoint.folder import Lock, complete
from shardproof.data.encoding.template import BUILT_IN, is_template
from shardproof.errors import CheckpointError, ConfigError
from shardproof.models.loading.weight_files import sample_of
from shardproof.models.loading.whole_files import ADAPTER as ADAPTER
from shardproof.train.log_file import LogFile
from shardproof.train.options.config import RunConfig
from shardproof.train.options.places import from_anywhere
from shardproof.train.resume import AUTO, in_own_folder, passed_over

log = logging.getLogger("shardproof")

CONFIG, METRICS, MODEL, BASE, SKIPPED = "config.yaml", "metrics.jsonl", "model", "base", "skipped.txt"
COMPLETIONS, ROWS = "completions.jsonl", "rows"
ERRORS, PICTURE, UNFINISHED, RUNS = "error.txt", "loss.png", "model.unfinished", "runs"
CHECKPOINTS, LOCK = "checkpoint-*", ".lock"
TIMELINE = "timeline.rank{rank}.json"  # for one step
TRACE = "trace.rank{rank}.json.gz"  # for the steps of --profile
SAMPLE = "base-weights.json"  # a sample of the weights that adapters were trained on
BEGUN = "begun-adapters.safetensors"  # initial values of the adapters that were taken out of the weights
REPORT = "report.html"  # written by `shardproof report`


class RunFolder:
    """The paths of a run. A finished run is never overwritten unless asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.metrics, self.completions = path / CONFIG, path / METRICS, path / COMPLETIONS
        self.model, self.base, self.unfinished = path / MODEL, path / BASE, path / UNFINISHED
        self.errors, self.picture, self.rows = path / ERRORS, path / PICTURE, path / ROWS
        self.lock: Lock | None = None
        self.records, self.answers = LogFile(self.metrics), LogFile(self.completions)

    @classmethod
    def check(cls, config: RunConfig) -> None:
        """Raise ConfigError if --output-dir holds files that a run from the start would remove."""
        if config.output_dir is None or config.overwrite or in_own_folder(config):
            return
        run = cls(Path(config.output_dir).expanduser())
        there = [path.name for path in (run.model, *sorted(run.path.glob(CHECKPOINTS))) if path.exists()]
        there = [name for name in there if not name.endswith(ASIDE)]
        if config.resume == AUTO and there:
            raise ConfigError(
                f"--resume auto: {config.output_dir} has no checkpoint to resume from, but it has"
                f" {', '.join(there[:5])}, "
                f"which a run from the start would remove. {' '.join(passed_over(config)[-1:])}\n"
                "Name another --output-dir, or add --overwrite."
            )
        if config.resume != AUTO and (run.config.exists() or there):
            what = "a run already" if run.config.exists() else f"files from another program ({', '.join(there[:5])})"
            ways = ["Name another --output-dir", "add --overwrite"]
            if run.config.exists() and run.newest_checkpoint() is not None:
                ways.append("continue from its newest checkpoint with --resume auto")
            raise ConfigError(f"{config.output_dir} holds {what}.\n{', '.join(ways[:-1])}, or {ways[-1]}.")

    @classmethod
    def create(cls, config: RunConfig, goes_on: bool = False) -> RunFolder:
        """Create the folder that --output-dir names, or the next free one under runs/, and lock it.

        Args:
            goes_on: keep what the run has written so far.

        Raises:
            ConfigError: the folder cannot be created or written to, or another job is running in it.
        """
        if config.output_dir is None:
            run = cls(
                _next_free(Path(RUNS), f"{_stem(config.model)}-{_stem([*config.dataset, *config.cached_dataset][0])}")
            )
        else:
            run = cls(Path(config.output_dir).expanduser())
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            run.lock = Lock(run.path / LOCK, f"Another job is running in {run.path}")
            if not goes_on:
                run.clear()
        except CheckpointError as error:
            raise ConfigError(f"{error}.\nName another --output-dir, or wait until it has ended.") from None
        except OSError as error:
            raise ConfigError(f"The output folder {run.path} cannot be used: {error.strerror or error}.") from error
        return run

    def clear(self) -> None:
        """Remove the files of a run, and nothing else."""
        names = [CONFIG, METRICS, COMPLETIONS, SKIPPED, ERRORS, PICTURE, REPORT, SAMPLE, BEGUN]
        by_rank = [path for name in (TIMELINE, TRACE) for path in self.path.glob(name.format(rank="*"))]
        for path in [*(self.path / name for name in names), *by_rank]:
            path.unlink(missing_ok=True)
        for path in (self.model, self.base, self.unfinished, self.rows, *self.path.glob(CHECKPOINTS)):
            shutil.rmtree(path, ignore_errors=True)

    def forget_after(self, step: int) -> None:
        """Remove the records of later steps from the logs, since the run continues from `step`. Answers that were not
        yet logged when its checkpoint was written are stored in the checkpoint and logged later, so those after the
        last remaining record are removed too."""
        for log in (self.metrics, self.completions):
            if log.is_file():
                step = self.last_step() if log == self.completions and self.metrics.is_file() else step
                kept = log.with_name(log.name + ASIDE)
                with log.open("rb") as lines, kept.open("wb") as out:  # U+2028 in a text is not a line break here
                    out.writelines(line for line in lines if _step(line) <= step)
                kept.replace(log)

    def newest_checkpoint(self) -> Path | None:
        found = complete(self.path)
        return found[-1] if found else None

    def last_step(self) -> int:
        """The last step in metrics.jsonl, 0 if there is none."""
        lines = self.metrics.read_text(encoding="utf-8").splitlines() if self.metrics.is_file() else []
        known = (step for line in reversed(lines) if (step := _step(line)) != float("inf"))
        return int(next(known, 0))

    def checksum_of_steps(self) -> int:
        """A checksum of the steps in metrics.jsonl, without evaluations: it changes when steps are taken."""
        lines = self.metrics.read_text(encoding="utf-8").splitlines() if self.metrics.is_file() else []
        return zlib.crc32("\n".join(line for line in lines if '"eval_loss"' not in line).encode())

    def discard_unless_used(self) -> None:
        """Remove the files of a run that ended before its first step."""
        shutil.rmtree(self.unfinished, ignore_errors=True)
        if not self.model.exists() and not self.last_step() and self.newest_checkpoint() is None:
            self.clear()
            (self.path / LOCK).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # other files there are not ours
                self.path.rmdir()
                if self.path.parent == Path(RUNS):
                    self.path.parent.rmdir()

    @contextlib.contextmanager
    def discarded_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.discard_unless_used()
            raise

    def write_config(self, config: RunConfig) -> None:
        """Write everything needed to repeat the run, except its folder, so that the repetition gets its own."""
        import yaml

        of_this_start = {"output_dir", "overwrite", "resume", "debug"}
        values = config.model_dump(exclude=of_this_start | {"nnodes", "node_rank", "master_addr", "master_port"})
        for name in config.sources:
            values[name] = from_anywhere(name, values[name])
        if config.chat_template and not is_template(config.chat_template) and config.chat_template not in BUILT_IN:
            values["chat_template"] = from_anywhere("chat_template", config.chat_template)
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
        self.config.write_text(f"# repeat with: shardproof {config.command} {self.config}\n{text}", encoding="utf-8")

    def write_skipped(self, rows: list[str]) -> None:
        """List the bad rows that --bad-rows skip left out, if there are any."""
        if rows:
            (self.path / SKIPPED).write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")

    def write_sample(self, model: str) -> None:
        """Keep a sample of the weights that adapters are trained on, to recognise them later."""
        if not (self.path / SAMPLE).exists() and (sample := sample_of(model)):  # a resumed run has one
            (self.path / SAMPLE).write_text(json.dumps({"model": model, "sample": sample}) + "\n", encoding="utf-8")


def _next_free(parent: Path, name: str) -> Path:
    number = 1
    while True:
        path = parent / f"{name}-{number:03d}"
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            number += 1
        except OSError as error:
            raise ConfigError(f"No run folder can be created under {parent.absolute()}: {error.strerror}.") from error


def _step(line: bytes | str) -> float:
    """The step of a record; infinity if the line is cut off."""
    try:
        return int(json.loads(line)["step"])
    except ValueError:
        return float("inf")


def _stem(source: str) -> str:
    name = Path(source.partition("#")[0]).name
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name.removesuffix(Path(name).suffix)) or "run"


def options_of_resumed(resume: object, output_dir: object) -> Path | None:
    """The file with the options of the run that --resume names; None if there is no such run."""
    where = output_dir if resume == AUTO else resume
    path = Path(str(where)).expanduser()
    return next((file for file in (path / CONFIG, path.parent / CONFIG) if where and file.is_file()), None)


def recorded_in(run: Path) -> dict[str, Any]:
    """The recorded options of a run folder; empty for other folders.

    Raises:
        ConfigError: they cannot be read.
    """
    import yaml

    file = run / CONFIG
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        why = f"line {mark.line + 1} is not valid YAML" if mark is not None else f"{error}"
        raise ConfigError(f"{file} cannot be read: {why}. Repair it: it records the options of the run.") from error
    return found if isinstance(found, dict) else {}


def other_weights(run: Path, base: str) -> str:
    """A warning if the weights of a base are not those that the adapters of a run were trained on, or if that is
    unknown; otherwise empty."""
    file = run / SAMPLE
    unknown = f"which weights these adapters were trained on: those of {base} are not compared with them."
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"sample": ""}
    except OSError as error:
        return f"{file} cannot be read ({error.strerror or error}), so it is not known {unknown}"
    except ValueError:  # cut off: treated as missing
        return ""
    there = found.get("sample") if isinstance(found, dict) else None
    if not isinstance(there, str):
        return f"{file} does not say, in a form that this version knows, {unknown}"
    if not there or (sample_of(base) or there) == there:
        return ""
    return (
        f"The weights of {base} are not those that the adapters of {run} were trained on: they were changed since, "
        "cast, or saved under other names. On other weights, adapters behave differently."
    )


def tell_other_weights(run: Path, base: str) -> None:
    """Log the warning of `other_weights`, if any."""
    if told := other_weights(run, base):
        log.warning(told)


def base_of(adapter: Path) -> str:
    """The model that an adapter was trained on; a run folder that was moved has its own copy."""
    base = str(json.loads((adapter / ADAPTER).read_text(encoding="utf-8"))["base_model_name_or_path"])
    beside = adapter.parent / BASE
    return str(beside) if not Path(base).is_dir() and beside.is_dir() else base
