"""Ranks that save together, and saves that continue during training."""

from __future__ import annotations

import atexit
import logging
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from shardproof.checkpoint.elsewhere import Post, blind
from shardproof.errors import CheckpointError, ShardproofError
from shardproof.zero.comm.groups import group_named
from shardproof.zero.device import host_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardproof.zero.comm.collectives import Collectives
    from shardproof.zero.comm.groups import Made

log = logging.getLogger("shardproof")


# The share of a host's free memory that copies may take; training, which continues meanwhile, needs memory, too.
SHARE = 0.75

# The channel of each process group's ranks, by the name of the group.
_channels: dict[str, Made[Channel]] = {}


class Saving:
    """A checkpoint that is being written. It is complete when `wait` returns.

    Attributes:
        path: the folder it will have.
    """

    def __init__(self, path: Path, work: Callable[[], None], background: bool) -> None:
        self.path, self._work, self._error = path, work, ""
        self._thread = Thread(target=self._run, name=f"saving {path.name}") if background else None
        if self._thread is not None:
            self._thread.start()
        else:
            self._run()

    def _run(self) -> None:
        try:
            with told_plainly():
                self._work()
        except BaseException as error:
            self._error = f"The checkpoint {self.path} could not be written and does not exist: {error}"
        finally:
            self._work = lambda: None  # releases the copies

    @property
    def done(self) -> bool:
        """Whether writing has ended."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until the checkpoint is complete on all ranks; returns its folder.

        Raises:
            CheckpointError: it could not be written. Whatever was there before is untouched.
        """
        self.join()
        if self._error:
            raise CheckpointError(self._error)
        return self.path

    def join(self) -> str:
        """Wait; returns the error message, or an empty string."""
        if self._thread is not None:
            self._thread.join()
        return self._error


@contextmanager
def told_plainly() -> Iterator[None]:
    """Turn errors of torch.distributed.checkpoint into a CheckpointError from the first rank that failed."""
    try:
        with warnings.catch_warnings():  # a single process without a group is fine
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        if isinstance(cause, ShardproofError):
            raise CheckpointError(str(cause)) from None
        if isinstance(cause, OSError):
            place = f"{cause.filename}: " if cause.filename else ""
            raise CheckpointError(f"rank {rank}: {place}{cause.strerror or cause}.") from cause
        raise CheckpointError(f"rank {rank}: {type(cause).__name__}: {cause}") from cause
    except (dist.DistError, RuntimeError, ValueError) as error:
        if not isinstance(error, dist.DistError) and "roup" not in str(error) and "gloo" not in str(error):
            raise
        raise CheckpointError(
            "the ranks lost each other: one of them is gone, or the process group was destroyed before the checkpoint "
            "was complete (call wait() first)."
        ) from error


class Channel:
    """The ranks that share a model, on a separate process group that training does not use.

    Attributes:
        several_machines: whether they are on more than one machine.
        saving: the most recent save. There is one at a time.
    """

    def __init__(self, comm: Collectives) -> None:
        self.rank, self.size = comm.rank, comm.size
        self._hosts = [host.name for host in comm.hosts]
        self.several_machines = len(set(self._hosts)) > 1
        self._told_of_room = False
        self._blind: dict[str, list[int]] = {}
        self.saving: Saving | None = None
        self._group_name: Any = ""
        if comm.size > 1:
            self._group_name = comm.new_gloo_group()
        atexit.register(self.at_exit)

    @staticmethod
    def of(comm: Collectives) -> Channel:
        return comm.once(_channels, lambda: Channel(comm))

    @property
    def group(self) -> Any:
        return group_named(self._group_name) if self.size > 1 else None

    def blind(self, folder: Path) -> list[int]:
        """The ranks, on other machines, that cannot see a folder that rank 0 has created. Collective."""
        if not self.several_machines:
            return []
        name = self.everyone(str(folder))[0]
        for known, found in self._blind.items():
            if Path(name).is_relative_to(known):
                return found
        self._blind[name] = found = blind(Path(name), self.rank, self.everyone)
        if found and self.rank == 0:
            log.warning(
                "%s is not seen by rank(s) %s: they send their parts to rank 0, which writes them.",
                *(name, ", ".join(map(str, found))),
            )
        return found

    def has_room(self, nbytes: int) -> bool:
        """Whether each host has room for the copies of its ranks (`nbytes` for this one). Logs once where one has not.
        Collective."""
        wanted: dict[str, int] = {}
        left: dict[str, int] = {}
        for host, (size, free) in zip(self._hosts or [""], self.everyone((nbytes, host_memory())), strict=True):
            wanted[host] = wanted.get(host, 0) + size
            left[host] = min(left.get(host, free), free)
        full = next((host for host, free in left.items() if free and wanted[host] > SHARE * free), None)
        if full is not None and self.rank == 0 and not self._told_of_room:
            self._told_of_room = True
            log.warning(
                "Checkpoints are written before training continues: writing in the background takes a copy of %.3g GB "
                "on %s, which has %.3g GB left.",
                *(wanted[full] / 1e9, full or "this machine", left[full] / 1e9),
            )
        return full is None

    def posts(self, blind: list[int]) -> dict[int, Post]:
        """Rank 0's posts to the blind ranks, a blind rank's post to rank 0, and none on the others."""
        others = blind if self.rank == 0 else [0] if self.rank in blind else []
        return {rank: Post(self.group, rank) for rank in others}

    def everyone(self, value: Any) -> list[Any]:
        """The values that the ranks passed, in order."""
        if self.size == 1:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def agree(self, attempt: Callable[[], Any]) -> list[Any]:
        """The (small) results of `attempt` on each rank.

        Raises:
            CheckpointError: on all ranks, if `attempt` raised on any.
        """
        problem, result = "", None
        cause: Exception | None = None
        try:
            result = attempt()
        except ShardproofError as error:
            problem = str(error)
        except Exception as error:  # the others must not wait for this rank
            problem, cause = f"rank {self.rank}: {type(error).__name__}: {error}", error
        problems, results = zip(*self.everyone((problem, result)), strict=True)
        if any(problems):
            raise CheckpointError(next(p for p in problems if p)) from cause
        return list(results)

    def finish(self) -> None:
        """Wait for the checkpoint being written. Log a failure that nobody has asked about."""
        saving, self.saving = self.saving, None
        if saving is not None and (problem := saving.join()) and self.rank == 0:
            log.error("%s", problem)

    def at_exit(self) -> None:
        """Finish writing before the program ends."""
        self.finish()
