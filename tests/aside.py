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
    if importlib.util.find_spec("bitsandbytes") is None:
        return None
    import bitsandbytes

    return bitsandbytes
