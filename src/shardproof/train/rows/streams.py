"""A stream of rows as the Trainer reads it: each rank reads its part, from the position of a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from shardproof.data.encoding.report import EncodeReport
from shardproof.data.rows import BadRow
from shardproof.data.stream import Block, EncodedStream, Place, Position, batches
from shardproof.errors import DataError
from shardproof.interrupts import left_to_rank
from shardproof.train.folder import SKIPPED
from shardproof.train.options.config import Batch

if TYPE_CHECKING:
    from shardproof.train.trainer import CommandMixin as Base
else:
    Base = object


log = logging.getLogger("shardproof")

AHEAD = 32  # micro-batches to prefetch


class Told:
    """What happened to the rows read so far, and where bad ones are listed.

    Attributes:
        file: lists bad rows, each once; None on all ranks but the first.
    """

    def __init__(self, file: Path | None = None) -> None:
        self.file, self.report, self.bad = file, EncodeReport(), 0
        self._listed: set[int] | None = None  # hashes of lines, since the file may be large

    def take(self, block: Block) -> None:
        self.report = self.report.plus(block.report)
        self.bad += len(block.bad)
        if block.bad and self.file is not None:
            self._list(block.bad, self.file)

    def _list(self, bad: list[BadRow], where: Path) -> None:
        if self._listed is None:  # a resumed run reads what it has listed before
            lines = where.read_text(encoding="utf-8").split("\n") if where.is_file() else []
            self._listed = set(map(hash, lines))
        with where.open("a", encoding="utf-8") as file:
            file.writelines(f"{row}\n" for row in bad if hash(str(row)) not in self._listed)
        self._listed.update(hash(str(row)) for row in bad)

    def __str__(self) -> str:
        skipped = f"; {self.bad} bad rows left out, listed in {self.file}" if self.bad else ""
        return f"{self.report}{skipped}"


class StreamLoader:
    """Micro-batches of this rank, until the run or the stream ends. A separate process encodes the next ones.

    Attributes:
        position: position in the stream after the last micro-batch; set it to start there.
        told: what happened to the rows so far.
    """

    def __init__(
        self, rows: EncodedStream, batch: Batch, rank: int, steps: int, collate: Callable[..., Any], beside: bool
    ) -> None:
        self.dataset, self._batch, self._beside = rows, batch, beside
        self._reader, self._length, self._collate = rank // batch.sequence, steps * batch.accumulation, collate
        self.position, self.told = Position(), Told()

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        plan = self._batch
        shares = plan.micro, self._reader, plan.readers, plan.accumulation
        dealt = _Dealt(self.dataset, self.position, self._collate, *shares)
        loader = DataLoader(
            dealt,
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=int(self._beside),
            prefetch_factor=AHEAD if self._beside else None,  # while a block is encoded
            generator=torch.Generator(),  # otherwise it would draw from training's
            worker_init_fn=left_to_rank,
        )
        for found in loader:
            if isinstance(found, DataError):
                raise found
            inputs, self.position, new = found
            for block in new:
                self.told.take(block)
            yield inputs

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs for resuming."""
        place = list(self.position.place)
        return {"place": place, "taken": self.position.taken, "report": asdict(self.told.report), "bad": self.told.bad}

    def go_on(self, state: dict[str, Any]) -> None:
        """Continue from the position at which `state` was taken."""
        self.position = Position(Place(*state["place"]), state["taken"])
        self.told.report, self.told.bad = EncodeReport(**state["report"]), state["bad"]


class _Dealt(IterableDataset[Any]):
    def __init__(self, *how: Any) -> None:
        self._how = how

    def __iter__(self) -> Iterator[Any]:
        return batches(*self._how)


def _as_it_is(value: Any) -> Any:
    return value


class StreamMixin(Base):
    """For trainers of commands: rows may be a stream, and checkpoints record the position in it."""

    stream: StreamLoader | None = None

    def get_train_dataloader(self) -> DataLoader[Any]:
        rows, batch, args = self.train_dataset, self.batch_plan, self.args
        if not isinstance(rows, EncodedStream):
            return super().get_train_dataloader()
        beside = args.dataloader_num_workers > 0
        self.stream = StreamLoader(rows, batch, args.process_index, args.max_steps, self.data_collator, beside)
        if args.process_index == 0:
            self.stream.told.file = Path(args.output_dir) / SKIPPED
        loader: Any = self.stream
        return loader

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        found = super().get_batch_samples(*args, **kwargs)
        if self.stream is not None and not found[0]:  # the stream has ended
            self.control.should_epoch_stop = True
        return found

    def train(self, *args: Any, **kwargs: Any) -> Any:
        trained = super().train(*args, **kwargs)
        told = self.stream.told if self.stream is not None else Told()
        if told.file is not None and self.control.should_epoch_stop:
            passes, step = self.train_dataset.passes, self.state.global_step
            log.warning("--max-epochs %s ends the run after step %s of %s.", passes, step, self.args.max_steps)
        if told.file is not None and (told.bad or told.report.dropped or told.report.unlearnable):
            log.warning("Rows read from the stream: %s.", told)
        return trained

    def kept_by_rank(self) -> dict[str, Any]:
        kept = super().kept_by_rank()
        return kept | {"stream": self.stream.state()} if self.stream is not None else kept

    def take_kept_by_rank(self, kept: dict[str, Any]) -> None:
        super().take_kept_by_rank(kept)
        if self.stream is not None and "stream" in kept:
            self.stream.go_on(kept["stream"])

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.stream is not None:  # for Trainer, the whole run is one pass
            self.state.epoch = float(self.stream.position.place.passes)
        super().log(logs, start_time)
