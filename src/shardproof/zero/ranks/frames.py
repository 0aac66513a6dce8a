"""What a rank is doing, by the frames of its main thread."""

from __future__ import annotations

import os
from types import FrameType

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
# Modules that wait for other ranks; others nearby (checkpoint/) also write files.
_WAITING = "distributed_c10d.py", "_functional_collectives.py", "nn/functional.py"
_COLLECTIVES = tuple(f"{_TORCH}distributed{os.sep}{file}" for file in _WAITING)
_ENGINE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_INTEGRATIONS = os.path.join(os.path.dirname(os.path.dirname(_ENGINE)), "integrations") + os.sep
_STDLIB = os.path.dirname(os.__file__) + os.sep


def place_in_user_code(frame: FrameType | None) -> str:
    """`file:line (function)` of the innermost frame outside of torch, the standard library, the engine and our
    integrations."""
    while frame is not None:
        file = frame.f_code.co_filename
        ours = file.startswith((_TORCH, _ENGINE, _INTEGRATIONS)) or (
            file.startswith(_STDLIB) and "site-packages" not in file
        )
        if not ours and not file.startswith("<"):
            return f"{file}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return "the end of its program"


def collective_of_the_user(frame: FrameType | None) -> tuple[str, int]:
    """The function of torch.distributed that user code is in, and the identity of its frame; empty if the engine has
    called it. The engine lies in between if it was given a sharded tensor: `dist.broadcast(p.data, 0)`."""
    inside = frame is not None and frame.f_code.co_filename.startswith(_TORCH)
    call, outermost = "", 0
    while inside and frame is not None and frame.f_code.co_filename.startswith((_TORCH, _ENGINE)):
        if frame.f_code.co_filename.startswith(_ENGINE):
            call, outermost = "", 0
        elif frame.f_code.co_filename in _COLLECTIVES:
            call, outermost = frame.f_code.co_name, id(frame)
        frame = frame.f_back
    return call, outermost
