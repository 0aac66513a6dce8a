"""Metrics of an evaluation by file, in addition to those over all rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardproof.data.cached import said_in
from shardproof.data.rows import parse_spec
from shardproof.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    import torch

    from shardproof.train.options.config import SftConfig

MOST = 32  # most files with separate metrics


def names_of(sources: Sequence[str]) -> list[str]:
    """Short, unique names of files and datasets, in their order: `data/sums.jsonl` becomes `sums`."""
    names: list[str] = []
    for source in sources:
        plain = re.sub(r"[^\w.-]+", "_", Path(source).stem).strip("_") or "rows"
        numbered = (f"{plain}.{number}" for number in count(2))
        names.append(next(name for name in chain([plain], numbered) if name not in names))
    return names


def best_of(config: SftConfig) -> str:
    """The metric that --best-metric names, without the name of its file."""
    best = config.best_metric.removeprefix("eval_")
    found = (best.removeprefix(f"{file}_") for file in _told_apart(config) if best.startswith(f"{file}_"))
    return next(found, best)


def _told_apart(config: SftConfig) -> Sequence[str]:
    """The names of the files that an evaluation reports separately; none if it only reports all rows together."""
    held_out = config.val_dataset or config.cached_val_dataset
    read, cached = (
        (config.val_dataset, config.cached_val_dataset) if held_out else (config.dataset, config.cached_dataset)
    )
    of_folders = (name for spec in cached for name in said_in(parse_spec(spec)[0])["sources"])
    sources = dict.fromkeys([*(parse_spec(name)[0] for name in read), *of_folders])
    return names_of([*sources]) if 1 < len(sources) <= MOST and not config.packing else ()


def check_best(config: SftConfig, metrics: Sequence[str], has: str) -> None:
    """Raise ConfigError if --best-metric names none of these `metrics`, for all rows or for one file. `has`: the
    metrics of an evaluation, for the message."""
    if best_of(config) in metrics:
        return
    of_files = [f"{file}_{metric}" for file in _told_apart(config) for metric in metrics]
    if of_files:
        has += f", and for each file {', '.join(of_files[: MOST // 2])}" + (" ..." if len(of_files) > MOST // 2 else "")
    hint = did_you_mean(config.best_metric.removeprefix("eval_"), [*metrics, *of_files])
    raise ConfigError(f"--best-metric {config.best_metric}: an evaluation has {has}.{hint}")


def by_file(rows: Any) -> Mapping[str, Sequence[int]]:
    """The numbers of the rows of each file; all under one name if rows are from one file, or packed."""
    of_each: dict[str, list[int]] = getattr(getattr(rows, "places", None), "by_source", dict)()
    if not 1 < len(of_each) <= MOST:
        return {"": range(len(rows))}
    return dict(zip(names_of(list(of_each)), of_each.values(), strict=True))


def in_chunks(numbers: Sequence[int], size: int) -> list[Sequence[int]]:
    """The same numbers in parts of `size`; the last has the rest."""
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]


def of_each(
    files: Mapping[str, Sequence[int]], sums: torch.Tensor, means: Callable[[list[float]], dict[str, float]]
) -> dict[str, float]:
    """The metrics over all rows and, with the names of files as prefixes, over those of each file if there are several.

    Args:
        files: the result of `by_file`.
        sums: sums over the rows of each file, of shape (files, numbers).
        means: makes metrics from such sums.
    """
    found = means(sums.sum(0).tolist())
    for name, its in zip(files, sums.tolist(), strict=True) if len(files) > 1 else ():
        found |= {f"{name}_{metric}": value for metric, value in means(its).items()}
    return found
