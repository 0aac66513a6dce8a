"""`shardproof env`: what is installed and what it runs on, to put into a bug report."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform
from collections.abc import Sequence

from shardproof import __version__
from shardproof.cli.launch import cores
from shardproof.cli.options import Parser, parse

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers", "pydantic", "deepspeed")


def parser() -> Parser:
    """The option table of the command."""
    return Parser(prog="shardproof env", description=__doc__, argument_default=argparse.SUPPRESS, allow_abbrev=False)


def run(argv: Sequence[str]) -> int:
    """Print versions and devices."""
    parse(parser(), argv)
    lines = [("shardproof", __version__), ("python", platform.python_version()), ("system", platform.platform())]
    lines += [(name, _version(name)) for name in PACKAGES]
    lines += [("cores", str(cores())), ("devices", _devices())]
    for name, text in lines:
        print(f"{name:14}{text}")
    return 0


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> str:
    if importlib.util.find_spec("torch") is None:
        return "unknown (no torch)"
    import torch

    if not torch.accelerator.is_available():
        return "CPU"
    kind = torch.accelerator.current_accelerator()
    return f"{torch.accelerator.device_count()} x {kind.type if kind else 'unknown'}"
