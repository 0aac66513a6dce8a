"""Datasets of the Hugging Face hub: fetched and kept by `datasets`, read here as any other table."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from shardproof.data.sources import KINDS, TableSource
from shardproof.errors import DataError

log = logging.getLogger("shardproof")

_NAME = re.compile(r"(HF::)?([\w.-]+)/([\w.-]+?)(?::([\w.-]+))?(?:@([\w.:%\[\]-]+))?(?:@([\w./-]+))?", re.IGNORECASE)


class HubName(NamedTuple):
    """`OWNER/NAME:SUBSET@SPLIT@REVISION`; subset, split and revision (a branch, tag or commit) may be missing."""

    owner: str
    name: str
    subset: str | None
    split: str
    revision: str | None = None


def hub_name(text: str) -> HubName | None:
    """What `text` names on the hub, or None where it is a file, or means one that is missing: a folder of the owner's
    name is here, or it ends as files do. `HF::` in front, as in ms-swift, says that it is the hub's in any case.

    Raises:
        DataError: it is ModelScope's.
    """
    if text.upper().startswith("MS::"):
        raise DataError(
            f"{text}: datasets are read from the Hugging Face hub, and not from ModelScope's. Fetch it with "
            f"`modelscope download --dataset {text[4:]}` and name its files."
        )
    found = _NAME.fullmatch(text)
    if found is None:
        return None
    said, owner, name, subset, split, revision = found.groups()
    path = Path(text).expanduser()
    if not said and (path.exists() or path.parent.is_dir() or Path(name).suffix.lower() in KINDS):
        return None
    return HubName(owner, name, subset, split or "train", revision)


def cache(variable: str, folder: str) -> Path:
    """A cache of the hub on this machine, by the variables that its libraries read: one of its own, or a home."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get(variable) or Path(home) / folder).expanduser()


def is_cached(of: HubName) -> bool:
    """Whether the cache of `datasets` has something of it."""
    return (cache("HF_DATASETS_CACHE", "datasets") / f"{of.owner}___{of.name}".lower()).exists()


def no_datasets(name: str) -> DataError:
    return DataError(f"{name}: the hub needs datasets; pip install 'shardproof[train]' brings it.")


def not_given(name: str, error: Exception) -> DataError:
    """What to say where the hub gives no dataset."""
    reason = " ".join(str(error).split())[:400] or type(error).__name__
    return DataError(
        f"There is no file {name}, and the hub gives no such dataset: {reason}\n"
        "Name a file, or OWNER/NAME; OWNER/NAME:SUBSET where it has several subsets, OWNER/NAME@SPLIT for another "
        "split than 'train', OWNER/NAME@SPLIT@REVISION for another state of it than the newest."
    )


class HubSource(TableSource):
    """One split of a dataset of the hub, as Arrow's columns on the disk. The line is the number of the row."""

    def __init__(self, name: str, of: HubName, columns: dict[str, str]) -> None:
        self.name, self.columns, self._of = name, columns, of
        try:
            import datasets
        except ImportError:
            raise no_datasets(name) from None
        if not is_cached(of):
            log.warning("fetching %s/%s from the hub", of.owner, of.name)
        try:
            read = datasets.load_dataset(f"{of.owner}/{of.name}", of.subset, split=of.split, revision=of.revision)
        except Exception as error:  # of datasets, of the hub's client, of the network ...
            raise not_given(name, error) from None
        datasets.disable_progress_bars()  # what comes now is short
        self._data, self._table = read.data, read.data.table

    def record(self, number: int) -> tuple[int, Any]:
        return number + 1, self._data.fast_slice(number, 1).to_pylist()[0]  # of many pieces, it knows which

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process reads it from the cache, or on another machine from the hub."""
        return HubSource, (self.name, self._of, self.columns)
