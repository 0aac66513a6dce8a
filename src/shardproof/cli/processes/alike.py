"""What must be the same on all machines of a run, compared before anything begins.

Rank 0 reads rows and options for all, and each rank reads its part of the weights: if one machine had other packages,
options or weights, a run could continue for a while, or to its end, with something that nobody asked for.
"""

from __future__ import annotations

import importlib.metadata
import platform
import socket
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import shardproof
from shardproof.train.options.config import RunConfig
from shardproof.train.options.option import flag

# torchvision: if it is installed, transformers prepares files with other classes.
PACKAGES = "torch", "transformers", "tokenizers", "trl", "peft", "accelerate", "torchvision"
OF_ONE_MACHINE = {"nnodes", "node_rank", "master_addr", "master_port", "nproc", "debug", "verbose"}
FILES = "*.safetensors", "*.bin", "*.json", "*.jinja", "*.model", "*.py"
SAMPLE = 1 << 16  # bytes at the beginning, in the middle and at the end of a file


class Machine(NamedTuple):
    """What one machine reports about itself.

    Attributes:
        files: for each source that consists of files, a checksum per file name.
    """

    host: str
    versions: dict[str, str]
    options: dict[str, Any]
    files: dict[str, dict[str, int]]

    @staticmethod
    def here(config: RunConfig, sources: Iterable[str]) -> Machine:
        versions = {"Python": ".".join(platform.python_version_tuple()[:2])}
        code = sum(_sums(Path(shardproof.__file__).parent, ("**/*.py",)).values()) % (1 << 32)
        versions["shardproof"] = f"{shardproof.__version__} (code {code:08x})"
        for name in PACKAGES:
            try:
                versions[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                versions[name] = "none"
        options = config.model_dump(exclude=OF_ONE_MACHINE)
        paths = {source: Path(source).expanduser() for source in sources}
        files = {source: _sums(path) for source, path in paths.items() if path.exists()}
        return Machine(socket.gethostname(), versions, options, files)


def difference(first: Machine, other: Machine) -> str:
    """How `other` differs from the first; empty if it does not."""
    for name, version in first.versions.items():
        if (theirs := other.versions[name]) != version:
            what = f"{other.host} has {name} {theirs}, {first.host} has {version}"
            return f"{what}. Install the same packages on all machines."
    for name, value in first.options.items():
        if (given := other.options.get(name)) != value:
            option = flag(name)
            return (
                f"{other.host} was given {option} {_shown(given)}, {first.host} {_shown(value)}. Give all machines the "
                "same command and the same file of options."
            )
    for source, sums in first.files.items():
        theirs_of = other.files.get(source)
        if theirs_of is None:
            return f"{other.host} has no {source}, but {first.host} does. Every machine reads its own copy."
        for name in sorted({*sums, *theirs_of}):
            if sums.get(name) != theirs_of.get(name):
                where = f"{source} on {other.host} is not the same as on {first.host}"
                return f"{where}: {name or 'the file'} differs, or one of them lacks it."
    return ""


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _sums(path: Path, patterns: Sequence[str] = FILES) -> dict[str, int]:
    """A checksum of samples of each file: copies that differ do so in more than a few bytes."""
    if path.is_file():
        return {"": checksum(path)}
    found = {file for pattern in patterns for file in path.glob(pattern) if file.is_file()}
    return {str(file.relative_to(path)): checksum(file) for file in sorted(found)}


def checksum(path: Path) -> int:
    """A checksum of a file's size, beginning, middle and end."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        found = zlib.crc32(str(size).encode())
        for at in (0, size // 2, size - SAMPLE):
            file.seek(max(at, 0))
            found = zlib.crc32(file.read(SAMPLE), found)
    return found
