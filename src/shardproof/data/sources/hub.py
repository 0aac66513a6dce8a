"""Datasets from a hub: fetched and cached by its client and by `datasets`, read here like any other table."""

from __future__ import annotations

import logging
import os
import re
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from shardproof.data.sources import modelscope
from shardproof.data.sources.records import KINDS, TableSource, as_called
from shardproof.errors import DataError

log = logging.getLogger("shardproof")

_NAME = re.compile(
    r"(HF::|MS::)?([\w.-]+)/([\w.-]+?)(?::([\w.-]+))?(?:@([\w.:%\[\]-]+))?(?:@([\w./-]+))?", re.IGNORECASE
)


class HubName(NamedTuple):
    """`OWNER/NAME:SUBSET@SPLIT@REVISION`; subset, split and revision (a branch, tag or commit) are optional."""

    owner: str
    name: str
    subset: str | None
    split: str
    revision: str | None = None
    modelscope: bool = False

    def fetched(self) -> str:
        """The argument for `datasets`: the name, or the folder that ModelScope's client has fetched it to."""
        whole = f"{self.owner}/{self.name}"
        return str(modelscope.fetch("dataset", whole, self.revision)) if self.modelscope else whole

    @property
    def state(self) -> str | None:
        """The revision to request through `datasets`."""
        return None if self.modelscope else self.revision


def hub_name(text: str) -> HubName | None:
    """The hub dataset that `text` names, or None if it is a file, or seems to mean a missing one: a folder with the
    owner's name exists, or it ends like a file name. The prefixes `HF::` and `MS::` (ModelScope), as in ms-swift,
    always select a hub."""
    found = _NAME.fullmatch(text)
    if found is None:
        return None
    said, owner, name, subset, split, revision = found.groups()
    path = Path(text).expanduser()
    if not said and (path.exists() or path.parent.is_dir() or Path(name).suffix.lower() in KINDS):
        return None
    return HubName(owner, name, subset, split or "train", revision, (said or "").upper() == modelscope.PREFIX)


def cache(variable: str, folder: str) -> Path:
    """A cache folder of the hub on this machine, from the environment variables that its libraries read: its own, or
    one for their home."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get(variable) or Path(home) / folder).expanduser()


def is_cached(of: HubName) -> bool:
    """Whether the cache of `datasets` has anything of this dataset."""
    return (cache("HF_DATASETS_CACHE", "datasets") / f"{of.owner}___{of.name}".lower()).exists()


def no_datasets(name: str) -> DataError:
    return DataError(f"{name}: reading from the hub needs the package datasets: pip install 'shardproof[train]'.")


def not_given(name: str, error: Exception) -> DataError:
    """The error for when the hub has no dataset to give."""
    reason = " ".join(str(error).split())[:400] or type(error).__name__
    return DataError(
        f"There is no file {name}, and no such dataset on the hub: {reason}\nName a file, or OWNER/NAME; "
        "OWNER/NAME:SUBSET if it has several subsets, OWNER/NAME@SPLIT for a split other than 'train', "
        "OWNER/NAME@SPLIT@REVISION for a revision other than the newest."
    )


class HubSource(TableSource):
    """One split of a dataset from the hub, as Arrow columns on disk. The line is the number of the row."""

    def __init__(self, name: str, of: HubName, columns: dict[str, str]) -> None:
        self.name, self.columns, self._of = name, columns, of
        try:
            import datasets
        except ImportError:
            raise no_datasets(name) from None
        if not of.modelscope and not is_cached(of):
            log.warning("fetching %s/%s from the hub", of.owner, of.name)
        try:
            read = datasets.load_dataset(of.fetched(), of.subset, split=of.split, revision=of.state)
        except Exception as error:  # from datasets, the hub's client, the network ...
            raise not_given(name, error) from None
        datasets.disable_progress_bars()  # the remaining work is short
        self._data, self._table = read.data, read.data.table

    def record(self, number: int) -> tuple[int, Any]:
        record = self._data.fast_slice(number, 1).to_pylist()[0]  # finds the right chunk fast
        return number + 1, as_called(record, self.columns)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process reads it from the cache, or, on another machine, from the hub."""
        return HubSource, (self.name, self._of, self.columns)


def silence_of(url: str, patience: float) -> str | None:
    """Why nothing answers at `url`, or None if anything does, whatever the answer. Takes at most `patience` seconds."""
    said: list[str | None] = [f"no answer in {patience:g} s"]

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=patience).close()
            said[0] = None
        except urllib.error.HTTPError:
            said[0] = None
        except (OSError, ValueError) as error:
            cause = getattr(error, "reason", error)
            # A server answers, with a certificate that the libraries may accept by other means.
            said[0] = None if isinstance(cause, ssl.SSLError) else str(getattr(cause, "strerror", None) or cause)

    thread = Thread(target=ask, daemon=True)  # a timeout does not interrupt a DNS lookup
    thread.start()
    thread.join(patience)
    return said[0]
