"""Whether every machine of a run sees the rows with files as the first one does, which has checked them.

Text rows are encoded on machine 0 and sent to the others. Rows with images, audio or video are read by each rank
whenever it trains on them: a machine that lacks the files, or has other rows, would leave its rows out of every step,
and the run would finish without them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from shardproof.cli.processes.alike import checksum
from shardproof.cli.processes.machines import everyone, names
from shardproof.data.forms.parts import Problem, parts_of
from shardproof.data.media.limits import Limits
from shardproof.data.media.reading import files_of, located, spread
from shardproof.data.rows import Row
from shardproof.data.sources.hub import hub_name
from shardproof.errors import ConfigError
from shardproof.train.rows.media import media_limits
from shardproof.train.run import Prepared

SAMPLE = 16  # rows whose files are read, of those to train on and of those to evaluate on


class Seen(NamedTuple):
    """The rows as one machine sees them.

    Attributes:
        sources: a checksum of each dataset file that exists.
        files: a checksum of each row's files on disk, by row and file.
        problem: the first row that cannot be read, and the reason.
    """

    host: str
    sources: dict[str, int]
    files: dict[str, int]
    problem: str = ""

    @staticmethod
    def here(host: str, prepared: Prepared) -> Seen:
        seen = Seen(host, {}, {})
        config = prepared.config
        experts = getattr(config, "chord_sft_dataset", ())
        for name in (*config.dataset, *(config.val_dataset or ()), *experts):
            file = Path(name).expanduser()
            file = file if file.exists() else file.with_name(file.name.partition("#")[0])
            if file.is_file():
                seen.sources[name] = checksum(file)
            elif _streams(prepared) and not _elsewhere(name):
                return seen._replace(problem=name)
        if _streams(prepared):
            return seen
        limits = media_limits(prepared.config, prepared.processing)
        for rows in (getattr(rows, "unpacked", rows) for rows in (prepared.rows, prepared.val_rows)):
            for number in spread(len(rows), SAMPLE) if rows is not None else ():
                where = f"row {number + 1}"
                try:
                    row = _row(rows, number)
                    where = row.where
                    files_of(row, limits)
                    seen.files.update(_checksums(row, limits))
                except Exception as error:  # rows of a different file may raise anything, and others wait for this rank
                    return seen._replace(problem=f"{where}: {error}")
        return seen


def _row(rows: Any, number: int) -> Row:
    """A row of `MediaRows`, or of a dataset of images."""
    if (kwargs := getattr(rows, "format", {}).get("format_kwargs")) is None:
        found: Row = rows[number]["row"]
        return found
    examples = kwargs["transform"]
    return examples.rows[examples.numbers[number]]  # type: ignore[no-any-return]


def _checksums(row: Row, limits: Limits) -> Iterator[tuple[str, int]]:
    for part in parts_of(row.messages):
        named = part[part["type"]]
        for file in named if isinstance(named, list) else [named]:
            if isinstance(file, str) and not file.startswith("data:"):
                try:
                    yield f"{file} of {row.where}", checksum(located(file, row, limits))
                except Problem:  # a remote file
                    continue


def difference(first: Seen, other: Seen) -> str:
    """How a machine's view differs from the first one's; empty if it does not."""
    both = f"is not the same on {other.host} as on {first.host}"
    for name, value in first.sources.items():
        if name in other.sources and other.sources[name] != value:
            return f"{name} {both}"
    if other.problem:
        missing = [name for name in first.sources if name not in other.sources]
        return f"{other.host} has no {missing[0]}" if missing else f"{other.host} cannot use {other.problem}"
    return next((f"{name} {both}" for name, value in first.files.items() if other.files.get(name) != value), "")


def _streams(prepared: Prepared) -> bool:
    """Whether each rank reads the rows to train on from their files."""
    return bool(getattr(prepared.config, "streaming", False))


def _elsewhere(name: str) -> bool:
    """Whether a dataset is embedded, or from the hub."""
    name = name.partition("#")[0]
    return name == "stdlib" or hub_name(name) is not None


def has_files(prepared: Prepared) -> bool:
    """Whether ranks read rows again while training."""
    from shardproof.data.media.rows import MediaRows
    from shardproof.train.rlhf.pictures import are_pictured

    if isinstance(getattr(prepared.rows, "unpacked", prepared.rows), MediaRows) or _streams(prepared):
        return True
    return hasattr(prepared.rows, "column_names") and are_pictured(prepared.rows)


def check_rows(prepared: Prepared) -> None:
    """Refuse machines that do not see the rows as the first does; called by all ranks before training. Collective.

    Raises:
        ConfigError: on all ranks; names the machine and the file.
    """
    import torch.distributed as dist

    if not has_files(prepared):
        return
    host = names()[dist.get_rank()]
    mine = Seen.here(host, prepared) if os.environ.get("LOCAL_RANK", "0") == "0" else None  # one rank per machine
    machines = [seen for seen in everyone(mine) if seen is not None]
    if found := next(filter(None, (difference(machines[0], other) for other in machines)), ""):
        dist.destroy_process_group()
        raise ConfigError(
            f"{found}.\nRows with images, audio or video, and those of --streaming, are read on each machine whenever "
            "they are trained on: the dataset and its files must be at the same paths on all of them."
        )
