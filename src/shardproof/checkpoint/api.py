"""`save` and `load`: the public interface for checkpoints."""

from __future__ import annotations

import logging
import os
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim import Optimizer

from shardproof.checkpoint.contents import (
    ModelParts,
    OptimizerParts,
    adopt_model,
    adopt_optimizer,
    compare,
    model_parts,
    optimizer_parts,
    owned_state,
    plain_parts,
    prepare_optimizer,
    take_local_state,
)
from shardproof.checkpoint.folder import UNFINISHED, Aside, complete, newest, offer, open_checkpoint, remove_old
from shardproof.checkpoint.manifest import Manifest, Tensor
from shardproof.checkpoint.parts import Load, Part, Save, to_write
from shardproof.checkpoint.saving import Channel, Saving, told_plainly
from shardproof.checkpoint.storage import Reader, Writer, dtype_name, open_for_all
from shardproof.checkpoint.values import from_bytes, random_state, set_random_state, to_bytes
from shardproof.errors import CheckpointError
from shardproof.zero.checks import engine_of
from shardproof.zero.optim.step import owned_here
from shardproof.zero.state import call_load_hooks

if TYPE_CHECKING:
    from shardproof.zero.schedule.engine import Engine

__all__ = ["Saving", "complete", "load", "load_weights", "newest", "save"]

log = logging.getLogger("shardproof")

OPTIMIZER, LOCAL, RANDOM, EXTRA, USER = "optimizer", "optimizer.local", "random", "extra", "state."


def save(
    model: nn.Module,
    optimizer: Optimizer | None,
    path: str | os.PathLike[str],
    *,
    asynchronous: bool = True,
    frozen: bool = True,
    keep: int | None = None,
    spare: str | os.PathLike[str] | None = None,
    files: dict[str, bytes] | None = None,
    **state: Any,
) -> Saving:
    """Save a checkpoint that can be loaded at any stage and on any number of ranks. Call it on all ranks.

    Each rank writes only the parts it holds. The checkpoint is written to a temporary folder, read back, and renamed
    when complete; until then, and if anything fails, whatever was at `path` before stays.

    Args:
        model: a sharded model. Masters, persistent buffers and extra state (`get_extra_state`) are saved.
        optimizer: the optimizer of the model, or None.
        path: a folder; the path given on rank 0 counts. Ranks that cannot see it send their parts to rank 0.
        asynchronous: return once everything is copied to the host, and write while training continues. One checkpoint
            is written at a time, and the program does not exit before it is complete. Call `wait()` before the process
            group is destroyed. With False nothing is copied, and 32 MiB of extra memory are enough. The same happens
            where a host has no room for the copies of its ranks.
        frozen: also save parameters that are not trained. Without them (adapters on a base model), the model that
            loads the checkpoint must already have them.
        keep: once this checkpoint is complete, keep only the newest `keep` (1 or more) of those beside it whose names
            differ only in the number at the end, and remove the rest.
        spare: a checkpoint that is always kept (the best one so far).
        files: small files of other programs to store in the folder, by name; those given on rank 0 count.
        state: objects with `state_dict` and `load_state_dict` (a scheduler), or plain values: numbers, strings,
            tensors, and lists, tuples, sets and dicts of them. If ranks pass different values, each keeps its own.

    The state of the random number generators is saved for each rank.

    Returns: the save in progress; its `wait()` returns the folder, or raises the error that occurred.

    Raises:
        CheckpointError: on all ranks: a value cannot be saved, the folder cannot be used or another job is saving to
            it, or (unless asynchronous) writing failed.
    """
    engine = engine_of(model)
    engine.adopt()
    engine.meet("collect the state dict")  # first: on the channel, a rank cannot help ranks that still compute
    engine.written.compare_now()
    channel = Channel.of(engine.comm)
    channel.finish()

    # State that an optimizer keeps for whole parameters is known only to the rank that owns them.
    owned: list[dict[str, Any]] = []
    if optimizer is not None and owned_here(optimizer) is not None:
        keeper = optimizer
        owned = channel.agree(lambda: owned_state(keeper, model_parts(engine)))

    def collect() -> tuple[list[Part], set[str], dict[str, bytes]]:
        found = model_parts(engine)
        own = optimizer_parts(optimizer, found) if optimizer is not None else OptimizerParts([], {})
        for theirs in owned:
            own.shared["scalars"] |= theirs["scalars"]
        left_out = set() if frozen else found.frozen
        values: dict[str, Any] = {RANDOM: random_state()}
        if found.extra:
            values[EXTRA] = {name: module.get_extra_state() for name, module in found.extra.items()}
        if optimizer is not None:
            values |= {OPTIMIZER: own.shared, LOCAL: own.local}
        for name, value in state.items():
            values[USER + name] = value.state_dict() if _has_state(value) else value
        data = {name: to_bytes(name.removeprefix(USER), value) for name, value in values.items()}
        return [*found.parts, *own.parts], left_out, data

    contents: list[Any] = []

    def attempt() -> Any:
        if keep is not None and keep < 1:
            raise CheckpointError(f"keep={keep} must be a number of checkpoints, 1 or more; leave it out to keep all.")
        contents.extend(collect())
        return os.path.abspath(Path(path).expanduser()), {n: zlib.crc32(b) for n, b in contents[2].items()}

    with torch.no_grad():
        everyone = channel.agree(attempt)
        parts, left_out, values = contents
        target = Path(everyone[0][0])
        written = _once(values, [sums for _, sums in everyone], channel.rank)
        mine = to_write([part for part in parts if part.name not in left_out], channel.rank, channel.size)
        aside: list[Aside] = []
        channel.agree(lambda: aside.append(Aside(target)) if channel.rank == 0 else None)
        posts = channel.posts(channel.blind(target.parent))
        copies = asynchronous and channel.has_room(sum(part.local.nbytes for part in mine))
        if copies:
            for part in mine:
                part.local = part.local.detach().to("cpu", copy=True)

    manifest = Manifest(time.time(), engine.stage, channel.size)
    for part in parts:
        if part.name in left_out:
            manifest.left_out[part.name] = list(part.shape)
        else:
            manifest.tensors[part.name] = Tensor(list(part.shape), dtype_name(part.local.dtype))
    for theirs in owned:
        manifest.tensors |= {name: Tensor(*tensor) for name, tensor in theirs["tensors"].items()}
    first = aside[0] if aside else None
    writer = Writer(target.with_name(target.name + UNFINISHED), first, manifest, files, posts)

    def write() -> None:
        try:
            dcp.save(
                {},
                storage_writer=writer,
                planner=Save(mine, written),
                process_group=channel.group,
                no_dist=channel.size == 1,
            )
        except BaseException:
            if first is not None:
                first.discard()
            raise
        if first is not None and keep is not None:
            remove_old(target, keep, None if spare is None else Path(os.path.abspath(Path(spare).expanduser())))

    channel.saving = Saving(target, write, copies)
    if not asynchronous:
        saving, channel.saving = channel.saving, None
        saving.wait()
        return saving
    return channel.saving


def _has_state(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _once(values: dict[str, bytes], sums: list[dict[str, int]], rank: int) -> dict[str, bytes]:
    """The values that this rank writes: rank 0 writes those that are the same on all ranks."""
    result = {}
    for name, value in values.items():
        same = all(each.get(name) == sums[0].get(name) for each in sums)
        if not same:
            result[f"{name}@{rank}"] = value
        elif rank == 0:
            result[name] = value
    return result


def load(model: nn.Module, optimizer: Optimizer | None, path: str | os.PathLike[str], **state: Any) -> dict[str, Any]:
    """Load a checkpoint in place, whatever stage and number of ranks saved it. Call it on all ranks.

    Args:
        model: a sharded model with the same parameters.
        optimizer: an optimizer with the same groups; it need not have stepped yet. None ignores the saved optimizer.
        path: a complete checkpoint; `shardproof.newest_checkpoint(folder)` finds one. The path given on rank 0 counts;
            rank 0 reads for ranks on machines that cannot see it.
        state: objects that were saved under these names; each loads its state.

    The random number generators continue from the saved state of this rank.

    Returns: the plain values that were saved, by name, and the state of objects that were not passed.

    Raises:
        CheckpointError: on all ranks: there is no complete checkpoint, it belongs to another model or optimizer (names
            the first five differences), it lacks the state of an object, or a file is damaged. Damaged file contents
            are only found while values are being loaded; in that case, load another checkpoint before using the model.
    """
    engine = engine_of(model)
    engine.adopt()
    engine.meet("load a state dict")  # first: on the channel, a rank cannot help ranks that still compute
    channel = Channel.of(engine.comm)
    channel.finish()
    found: list[_Contents] = []
    with torch.no_grad():
        reader = open_for_all(channel, path)
        channel.agree(lambda: found.append(_Contents(engine, optimizer, reader, channel, state)))
        contents = found[0]
        try:
            with told_plainly():
                dcp.load(
                    {},
                    storage_reader=contents.reader,
                    planner=Load(contents.parts),
                    process_group=channel.group,
                    no_dist=channel.size == 1,
                )
        except CheckpointError as error:
            raise CheckpointError(f"{error}{offer(contents.reader.folder)}") from error.__cause__
        return contents.take_over(optimizer, state)


def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Load the weights of a checkpoint into a model that is not sharded, in this process only.

    Raises:
        CheckpointError: as `load`.
    """
    folder, manifest = open_checkpoint(path)
    found = plain_parts(model)
    compare(found, manifest, folder)
    parts = [part for part in found.parts if part.name in manifest.tensors]
    reader = Reader(folder, manifest)
    with torch.no_grad(), told_plainly():
        dcp.load({}, storage_reader=reader, planner=Load(parts), no_dist=True)
    adopt_model(found)
    own = manifest.place(EXTRA, 0)
    _give_back(found, from_bytes(reader.value(own)) if own else {})
    call_load_hooks(model)


def _give_back(model: ModelParts, extra: dict[str, Any]) -> None:
    """Restore the extra state of modules (`set_extra_state`)."""
    for name, value in extra.items():
        if name in model.extra:
            model.extra[name].set_extra_state(value)


def _check_objects(objects: dict[str, Any], saved: set[str], folder: Path) -> None:
    """Raise CheckpointError for an object that cannot load a state, or for which none was saved."""
    for name, value in objects.items():
        if value is not None and not _has_state(value):
            raise CheckpointError(
                f"'{name}' ({type(value).__name__}) has no load_state_dict, so it cannot load its saved state. Leave "
                "it out: load returns plain values."
            )
        if value is not None and USER + name not in saved:
            there = ", ".join(sorted(n.removeprefix(USER) for n in saved if n.startswith(USER)))
            raise CheckpointError(
                f"{folder} holds no state for '{name}': {there or 'nothing'} was saved along with the model."
            )


class _Contents:
    """A checkpoint that matches the model and the optimizer, and the parts of it that this rank needs.

    Raises:
        CheckpointError: it does not match, is incomplete, or is damaged.
    """

    def __init__(
        self,
        engine: Engine,
        optimizer: Optimizer | None,
        reader: Reader,
        channel: Channel,
        objects: dict[str, Any],
    ) -> None:
        self.reader = reader
        folder, manifest = reader.folder, reader.manifest
        _check_objects(objects, {name.partition("@")[0] for name in manifest.values}, folder)
        self.rank, self.strange = channel.rank, channel.rank >= manifest.world_size
        self.engine, self.model = engine, model_parts(engine)
        compare(self.model, manifest, folder)
        self.parts = [part for part in self.model.parts if part.name in manifest.tensors]
        try:
            names = dict.fromkeys(n.partition("@")[0] for n in manifest.values)
            self.values = {name: self._value(name, own) for name in names if (own := manifest.place(name, self.rank))}
        except CheckpointError as error:
            raise CheckpointError(f"{error}{offer(folder)}") from None
        for name in objects:
            if isinstance(value := self.values.get(USER + name), int | float | str):
                raise CheckpointError(
                    f"'{name}' is {value!r} in {folder}, not the state of an object. Leave it out, and take it from "
                    "the values that shardproof.load returns."
                )
        self.state: dict[str, dict[str, Any]] = {}
        if optimizer is None:
            return
        if OPTIMIZER not in self.values:
            raise CheckpointError(f"{folder} was saved without an optimizer. Load it with optimizer=None.")
        self.state, parts = prepare_optimizer(optimizer, self.model, self.values[OPTIMIZER], manifest, folder)
        self.parts += parts
        take_local_state(self.values[LOCAL], self.model, self.state, folder)

    def _value(self, name: str, own: str) -> Any:
        """This rank's value, `own`; rank 0's for a rank that did not exist when it was saved."""
        if own == f"{name}@0" and self.rank and name.startswith(USER):
            log.warning(
                "'%s' differed between the %d ranks that saved it; rank %d, which has none, takes rank 0's",
                *(name.removeprefix(USER), self.reader.manifest.world_size, self.rank),
            )
        return from_bytes(self.reader.value(own))

    def take_over(self, optimizer: Optimizer | None, objects: dict[str, Any]) -> dict[str, Any]:
        """Load all values into their objects. Returns the plain ones."""
        adopt_model(self.model)
        _give_back(self.model, self.values.get(EXTRA, {}))
        call_load_hooks(self.engine.model)
        if optimizer is not None:
            adopt_optimizer(optimizer, self.model, self.state, self.values[OPTIMIZER])
        plain = {}
        for name, value in self.values.items():
            if name.startswith(USER):
                given = objects.get(name.removeprefix(USER))
                if given is None:
                    plain[name.removeprefix(USER)] = value
                else:
                    given.load_state_dict(value)
        alone = RANDOM in self.reader.manifest.values  # all ranks had the same
        if RANDOM not in self.values:  # it was converted
            return plain
        set_random_state(self.values[RANDOM], self.rank if self.strange and not alone else None)
        return plain
