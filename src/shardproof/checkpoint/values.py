"""Values other than the model's tensors: numbers, strings, random generators, the state of schedulers.

[Note: no pickle]
A value is written by `torch.save` and read by `torch.load(weights_only=True)`, which accepts numbers, strings, lists,
tuples, dicts, sets and tensors, and never executes code from a file. A value that cannot be read back is refused when
it is saved, not when it is needed.
"""

from __future__ import annotations

import io
import pickle
import random
import sys
import zlib
from typing import Any

import torch

from shardproof.errors import CheckpointError


def to_bytes(name: str, value: Any) -> bytes:
    """Raises CheckpointError for a value that cannot be read back safely."""
    buffer = io.BytesIO()
    try:
        torch.save(_plain(value), buffer)
        from_bytes(buffer.getvalue())
    except Exception as error:  # pickle passes on whatever the value raises
        read = isinstance(error, pickle.UnpicklingError)  # torch's message is about reading files
        reason = "" if read else " " + str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"'{name}' ({type(value).__name__}) cannot be saved: a checkpoint holds numbers, strings, tensors, and "
            "lists, tuples, sets and dicts of them, or objects whose state_dict() consists of these. For a NumPy array "
            f"save torch.as_tensor(array), for a path str(path).{reason}"
        ) from error
    return buffer.getvalue()


def _plain(value: Any) -> Any:
    """Python numbers for NumPy ones, such as the mean of a list of losses."""
    if type(value) is dict:
        return {_plain(key): _plain(one) for key, one in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(map(_plain, value))
    numpy = sys.modules.get("numpy")
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value


def from_bytes(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def random_state() -> dict[str, Any]:
    """The random states of this process: torch's, the accelerator's, Python's and NumPy's."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.accelerator.is_available():
        device = torch.get_device_module(torch.accelerator.current_accelerator())
        state["accelerator"] = device.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, keys.tolist(), *rest)
    return state


def set_random_state(state: dict[str, Any], stranger: int | None = None) -> None:
    """Continue from `state`. A rank that did not exist when it was saved passes its number as `stranger`, and gets its
    own stream, derived from `state`."""
    if stranger is not None:
        seed = zlib.crc32(state["torch"].numpy().tobytes(), stranger)
        torch.manual_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)
        return
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "accelerator" in state and torch.accelerator.is_available():
        torch.get_device_module(torch.accelerator.current_accelerator()).set_rng_state(state["accelerator"])
    if "numpy" in state and "numpy" in sys.modules:
        kind, keys, *rest = state["numpy"]
        sys.modules["numpy"].random.set_state((kind, keys, *rest))
