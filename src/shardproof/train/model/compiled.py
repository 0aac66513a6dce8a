"""--compile: what torch.compile needs on this machine."""

from __future__ import annotations

import shutil

from shardproof.errors import ConfigError


def check_compiler() -> None:
    """Raise ConfigError if torch.compile has no compiler for its kernels or the code that launches them."""
    if not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        raise ConfigError("--compile needs a C++ compiler: install g++ (or clang++), or leave --compile out.")
