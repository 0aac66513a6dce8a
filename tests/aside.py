"""Packages that lie beside the environment: with them in it, transformers and PEFT import them in every process."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FOLDER = str(Path(sys.prefix) / "aside")  # `make setup` fills it


def bitsandbytes() -> ModuleType | None:
    """Import it in this process; None where it is not installed."""
    if FOLDER not in sys.path:
        sys.path.append(FOLDER)
        _ask_again()
    if importlib.util.find_spec("bitsandbytes") is None:
        return None
    import bitsandbytes

    return bitsandbytes


def _ask_again() -> None:
    """Have the libraries that looked for it in this process before forget that it was not there."""
    loaded = [(name, module) for name, module in sys.modules.items() if name.startswith(("transformers.", "peft."))]
    for _, module in loaded:
        for name, value in list(vars(module).items()):
            if name.startswith(("is_bnb", "is_bitsandbytes")) and hasattr(value, "cache_clear"):
                value.cache_clear()
    for name, module in loaded:
        if "bnb" in name or "bitsandbytes" in name:  # what they define depends on the answer
            importlib.reload(module)
