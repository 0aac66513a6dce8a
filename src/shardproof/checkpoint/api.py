"""Save and load: the public face of checkpoints."""

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

    Every rank writes only what it holds. The checkpoint is written aside, read back, and takes its name when it is
    complete; until then, and if anything fails, what was at `path` before stays.

    Args:
        model: a sharded model. Masters, persistent buffers and what modules add (`get_extra_state`) are saved.
        optimizer: that of the model, or None.
        path: a folder; that of rank 0 counts. Ranks on machines that do not see it send what they hold to rank 0.
        asynchronous: return when everything is copied to the host, and write while training goes on. One checkpoint is
            written at a time, and the program does not end before it is complete. Call `wait()` before the process
            group is destroyed. With False nothing is copied: the extra memory is 32 MiB. So it is, too, where a host
            has no room for the copies of its ranks.
        frozen: save parameters that are not trained as well. Without them (adapters on a base model) the model that
            loads must have them already.
        keep: when this checkpoint is complete, remove all but the newest so many (1 or more) beside it whose names
            differ from its own in the number at the end only.
        spare: a checkpoint that is always one of those that are kept (the best one so far).
        files: small files of other programs to lie in the folder, by name; those of rank 0 count.
        state: objects with `state_dict` and `load_state_dict` (a scheduler), or plain values: numbers, texts, tensors,
            and lists, tuples, sets and dicts of them. Where ranks pass different values, each rank has its own.

    The generators of random numbers are saved for each rank.

    Returns: the save under way; its `wait()` returns the folder, or raises what went wrong.

    Raises:
        CheckpointError: on all ranks: a value that cannot be saved, a folder that cannot be used or that another job is
            saving to, or (unless asynchronous) a failure to write.
    """
    engine = engine_of(model)
    engine.adopt()
    engine.meet("collect the state dict")  # first: on its channel a rank lends nothing to those that still compute
    engine.written.compare_now()
    channel = Channel.of(engine.comm)
    channel.finish()

    # What an optimizer keeps of whole parameters each rank knows of its own only.
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
            raise CheckpointError(f"keep={keep}: name how many checkpoints are kept, or leave it out to keep all.")
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
    """What this rank writes of the values: those that are the same on all ranks are rank 0's to write."""
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
        model: a sharded model of the same parameters.
        optimizer: one with the same groups; it need not have stepped yet. None leaves the optimizer of the checkpoint.
        path: a complete checkpoint; `shardproof.newest_checkpoint(folder)` finds one. That of rank 0 counts;
            it reads for ranks on machines that do not see it.
        state: objects that were saved under these names, which take their state.

    The generators of random numbers go on where those of this rank were.

    Returns: the plain values that were saved, by name, and the state of objects that were not passed.

    Raises:
        CheckpointError: on all ranks: no complete checkpoint, one of another model or optimizer (with the first five
            names that differ), one without the state of an object, or a damaged file. Only a file whose contents are
            damaged is found while values are taken over; the model must not be used then before another checkpoint is
            loaded.
    """
    engine = engine_of(model)
    engine.adopt()
    engine.meet("load a state dict")  # first: on its channel a rank lends nothing to those that still compute
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
    """Load the weights of a checkpoint into a model that is not sharded, in this process alone.

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
    """What modules have added to a state dict."""
    for name, value in extra.items():
        if name in model.extra:
            model.extra[name].set_extra_state(value)


def _check_objects(objects: dict[str, Any], saved: set[str], folder: Path) -> None:
    """Raise CheckpointError for what could not take a state, or would be left as it is."""
    for name, value in objects.items():
        if value is not None and not _has_state(value):
            raise CheckpointError(
                f"'{name}' ({type(value).__name__}) has no load_state_dict, and cannot take what was saved. Leave it "
                "out: plain values are what load returns."
            )
        if value is not None and USER + name not in saved:
            there = ", ".join(sorted(n.removeprefix(USER) for n in saved if n.startswith(USER)))
            raise CheckpointError(
                f"{folder} holds no state of '{name}': {there or 'nothing'} was saved beside the model."
            )


class _Contents:
    """A checkpoint that fits the model and the optimizer, and the parts of it that this rank needs.

    Raises:
        CheckpointError: it does not fit, is not complete or damaged.
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
                    f"'{name}' is {value!r} in {folder}, no state of an object. Leave it out, and take it from what "
                    "shardproof.load returns."
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
        """The value of this rank, `own`; of rank 0 for a rank that was not there."""
        if own == f"{name}@0" and self.rank and name.startswith(USER):
            log.warning(
                "'%s' differed on the %d ranks that saved; rank %d, which has none, takes that of rank 0",
                *(name.removeprefix(USER), self.reader.manifest.world_size, self.rank),
            )
        return from_bytes(self.reader.value(own))

    def take_over(self, optimizer: Optimizer | None, objects: dict[str, Any]) -> dict[str, Any]:
        """Give everything its new values. Returns the plain ones."""
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
