"""`shardproof env`: what is installed and what it runs on, for bug reports."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Sequence

from shardproof import __version__
from shardproof.cli.options import Parser, parse
from shardproof.cli.processes.launch import cores

PACKAGES = (
    *("torch", "torchvision", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers", "pydantic"),
    "deepspeed",
)
# Variables that affect a run and hold no secrets.
VARIABLES = (
    "SHARDPROOF_",
    "NCCL_",
    "GLOO_",
    "CUDA_VISIBLE",
    "OMP_NUM",
    "NNODES",
    "NODE_RANK",
    "MASTER_",
    "TORCH_NCCL_",
)


def parser() -> Parser:
    """The option table of the command."""
    return Parser(prog="shardproof env", description=__doc__, argument_default=argparse.SUPPRESS, allow_abbrev=False)


def run(argv: Sequence[str]) -> int:
    """Print versions and devices."""
    parse(parser(), argv)
    lines = [("shardproof", __version__), ("python", platform.python_version()), ("system", platform.platform())]
    lines += [(name, _version(name)) for name in PACKAGES]
    lines += [("cores", str(cores())), ("memory", _memory()), ("devices", _devices())]
    lines += [(name, os.environ[name]) for name in sorted(os.environ) if name.startswith(VARIABLES)]
    width = max(len(name) for name, _ in lines) + 2
    for name, text in lines:
        print(f"{name:{width}}{text}")
    return 0


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
    except (OSError, ValueError, AttributeError):  # not Unix
        return "unknown"


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
    kind = str(torch.accelerator.current_accelerator())
    found = f"{torch.accelerator.device_count()} x {kind}"
    about = getattr(torch.get_device_module(kind), "get_device_properties", None)
    if about is not None:
        found += f" ({about(0).name}, {about(0).total_memory / 2**30:.0f} GiB)"
    return f"{found}, CUDA {torch.version.cuda}" if torch.version.cuda else found
