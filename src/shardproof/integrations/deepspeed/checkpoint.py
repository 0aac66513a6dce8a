"""Checkpoints in DeepSpeed's layout: a folder of tags, a file `latest`, a client state."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import shardproof
from shardproof.checkpoint.folder import open_checkpoint
from shardproof.errors import ConfigError
from shardproof.integrations.deepspeed.utils import logger
from shardproof.zero.comm.world import is_first

if TYPE_CHECKING:
    from shardproof.integrations.deepspeed.engine import DeepSpeedEngine

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def save(
    engine: DeepSpeedEngine, folder: str, tag: Any, client_state: dict[str, Any], latest: bool, frozen: bool
) -> None:
    """Write `folder`/`tag`, then name it in `folder`/latest."""
    if not folder:
        raise ConfigError(f"save_checkpoint({folder!r}) has an empty folder: name one, or '.' for the current one.")
    tag = str(tag) if tag is not None else f"global_step{engine.global_steps}"
    shardproof.barrier(engine.module)
    _check_tag(tag)
    state: dict[str, Any] = {
        "counters": {name: getattr(engine, name) for name in _COUNTERS},
        "client_state": dict(client_state),
        "loss_scale": engine.loss_scale_of,
    }
    if hasattr(engine.lr_scheduler, "state_dict"):
        state["lr_scheduler"] = engine.lr_scheduler
    shardproof.save(engine.module, engine.optimizer, Path(folder) / tag, asynchronous=False, frozen=frozen, **state)
    if latest and engine.global_rank == 0:
        aside = Path(folder) / "latest.new"
        aside.write_text(tag)
        os.replace(aside, Path(folder) / "latest")
    _wait()


def load(
    engine: DeepSpeedEngine, folder: str, tag: Any, *, optimizer: bool, schedule: bool, counters: bool
) -> tuple[str | None, dict[str, Any] | None]:
    """Load `folder`/`tag`; the default tag is in `folder`/latest. Returns path and client state; None and None if there
    is nothing to load."""
    shardproof.barrier(engine.module)
    tag = _from_first(str(tag) if tag is not None else _latest(folder))
    if tag is None:
        logger.warning("%s has no file 'latest': nothing is loaded. Pass tag=.", folder)
        return None, None
    path = Path(folder) / tag
    if any(path.glob("*model_states.pt")):
        raise ConfigError(
            f"{path} was written by DeepSpeed. Convert it, and load the result:\n"
            f"    shardproof convert {path} OTHER_FOLDER/{tag}"
        )
    saved = {name.partition("@")[0] for name in open_checkpoint(path)[1].values}
    objects = {"loss_scale": engine.loss_scale_of} if counters else {}
    if schedule and hasattr(engine.lr_scheduler, "load_state_dict"):
        # shardproof convert names it "scheduler", as for every other engine
        objects["lr_scheduler" if "state.lr_scheduler" in saved else "scheduler"] = engine.lr_scheduler
    objects = {name: value for name, value in objects.items() if f"state.{name}" in saved}
    values = shardproof.load(engine.module, engine.optimizer if optimizer else None, path, **objects)
    if counters:
        for name, value in values.get("counters", {}).items():
            setattr(engine, name, value)
    if "client_state" in values:
        return str(path), values["client_state"]
    return str(path), {name: value for name, value in values.items() if name not in ("counters", "step", "scheduler")}


def write_weights(weights: dict[str, Any], file: Path, dtype: torch.dtype) -> None:
    """Write full weights in `dtype` on rank 0, and wait for it."""
    if is_first():
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(in_dtype(weights, dtype), file)
    _wait()


def in_dtype(weights: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {
        name: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for name, v in weights.items()
    }


def _latest(folder: str) -> str | None:
    file = Path(folder) / "latest"
    return file.read_text().strip() if file.is_file() else None


def _check_tag(tag: str) -> None:
    tags: list[Any] = [tag]
    if dist.is_initialized():
        tags = [None] * dist.get_world_size()
        dist.all_gather_object(tags, tag)
    if any(other != tags[0] for other in tags):
        raise ConfigError(
            f"The tag of a checkpoint must be the same on all ranks; they have {', '.join(map(repr, tags))}."
        )


def _from_first(value: Any) -> Any:
    """The value of rank 0."""
    box = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(box)
    return box[0]


def _wait() -> None:
    if dist.is_initialized():
        dist.barrier()
