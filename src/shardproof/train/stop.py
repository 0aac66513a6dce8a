"""A signal ends training after the current step, or in an evaluation, on all ranks alike, and keeps the weights."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from shardproof.errors import ConfigError
from shardproof.interrupts import without_terminal
from shardproof.train.watching.report import Reporter, tells
from shardproof.zero.comm.world import may_take_long

ECHO = 1.0  # seconds: a terminal and a launcher may both pass on the same Ctrl-C
LOOK = 2.0  # seconds between agreements in an evaluation
NOTICE = b"\nending after this step, whose weights are saved; Ctrl-C again ends at once\n"

_Batch = TypeVar("_Batch")


class EvaluationEnded(Exception):
    """All ranks have left an evaluation, because a signal asked them to stop."""


class JudgesEvaluations(TrainerCallback):
    """Ends training when evaluations no longer improve. The history is in the Trainer's state, and so in checkpoints.

    Args:
        metric: the name of the metric that evaluations are judged by.
        patience: the number of consecutive evaluations without improvement that ends training; None never ends it.
    """

    def __init__(self, metric: str, patience: int | None) -> None:
        self._metric, self._patience = metric, patience
        self._name = f"eval_{metric.removeprefix('eval_')}"

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        if self._name not in metrics:
            found = ", ".join(key.removeprefix("eval_") for key in metrics if key.startswith("eval_") and tells(key))
            raise ConfigError(f"--best-metric {self._metric}: evaluations have no such metric. They have {found}.")
        self._judge(args, state, control)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A resumed run may already have reached its end."""
        self._judge(args, state, control)

    def _judge(self, args: Any, state: Any, control: Any) -> None:
        values = [entry[self._name] for entry in state.log_history if self._name in entry]
        if not values:
            return
        lower = self._name.endswith("loss")
        order = [(value != value, value if lower else -value) for value in values]  # NaN is the worst
        if self._patience is not None and len(values) - 1 - order.index(min(order)) >= self._patience:
            control.should_training_stop = True
            control.should_save = args.save_strategy != "no"


class EndOfEpoch(TrainerCallback):
    """Requests an evaluation and a checkpoint after each pass over the data, unless the last step had them.

    Args:
        evaluates: whether to request an evaluation. A signal that has ended training does not wait for one.
        saves: whether to request a checkpoint.
    """

    def __init__(self, evaluates: bool, saves: bool) -> None:
        self._evaluates, self._saves = evaluates, saves
        self._evaluated = self._saved = 0

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._evaluated = state.global_step

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._saved = state.global_step

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._evaluates and self._evaluated != state.global_step and not control.should_training_stop:
            control.should_evaluate = True
        if self._saves and self._saved != state.global_step:
            control.should_save = True


class StopAfterStep(TrainerCallback):
    """Every rank listens for signals; at the end of a step, the ranks agree. In an evaluation they do so between
    batches, every few seconds: the sender of a signal may not wait until the evaluation is over.

    They use a process group of their own on the CPU, so as not to wait for a step on the accelerator.

    Attributes:
        agreed: the signal that ended training, otherwise 0.
        meet: makes all ranks wait for each other while they lend their slices, since a rank may lag in an evaluation.
    """

    meet: Callable[[], None] | None = None

    def __init__(self) -> None:
        self.received, self.agreed, self._since, self._pid = 0, 0, 0.0, os.getpid()
        several = dist.is_initialized() and dist.get_world_size() > 1
        self._group = dist.new_group(backend="gloo") if several else None
        if self._group is not None:
            may_take_long(self._group)
        self._first = not several or dist.get_rank() == 0
        self._batches, self._until, self._looked = 0, 1, time.monotonic()

    @contextmanager
    def listening(self, signals: Sequence[int]) -> Iterator[None]:
        """Within this context, the first of these signals asks to stop, and a later one interrupts at once."""
        before = {number: signal.signal(number, self._receive) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: Any) -> None:
        if os.getpid() != self._pid:  # a process forked to read rows ends with its rank
            return
        now = time.monotonic()
        if not self.received:
            self.received, self._since = number, now
            without_terminal()
            if self._first:
                os.write(2, NOTICE)  # print may be what the signal interrupted
        elif now - self._since > ECHO:
            raise KeyboardInterrupt

    def _largest(self, *numbers: float) -> list[float]:
        """The largest values over ranks."""
        largest = torch.tensor(numbers, device="cpu", dtype=torch.float64)
        if self._group is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        return largest.tolist()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        (number,) = self._largest(self.received)
        if number and state.global_step < state.max_steps:
            self.agreed = int(number)
            control.should_log = True
            self.end(args, control)

    def end(self, args: Any, control: Any) -> None:
        """Make Trainer save and stop."""
        control.should_training_stop = True
        control.should_evaluate = False
        control.should_save = args.save_strategy != "no"

    def each(self, batches: Iterable[_Batch]) -> Iterator[_Batch]:
        """Yield the batches of an evaluation, of which each rank has the same number.

        Raises:
            EvaluationEnded: on all ranks, after the same batch: a signal asked to stop.
        """
        for batch in batches:
            self.on_prediction_step()
            yield batch

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        """Trainer's own evaluations call it after each batch."""
        self._batches += 1
        if self._batches < self._until:
            return
        took = (time.monotonic() - self._looked) / self._batches
        if self.meet is not None:
            self.meet()
        number, took = self._largest(self.received, took)
        if number:
            self.agreed = int(number)
            raise EvaluationEnded
        self._batches, self._until, self._looked = 0, max(1, int(LOOK / max(took, 1e-3))), time.monotonic()


class StopMixin:
    """A trainer whose evaluations end when `StopAfterStep` says so."""

    args: Any
    model: Any
    control: Any
    callback_handler: Any

    def each_evaluated(self, batches: Sequence[_Batch]) -> Iterator[_Batch]:
        """The batches of an evaluation, of which each rank has the same number, until a signal asks to stop. Reporters
        are told how many are done."""
        reporters = [callback for callback in self.callback_handler.callbacks if isinstance(callback, Reporter)]
        for number, batch in enumerate(batches if self._stop is None else self._stop.each(batches), 1):
            yield batch
            for reporter in reporters:
                reporter.evaluated(number, len(batches))

    @functools.cached_property
    def _stop(self) -> StopAfterStep | None:
        callbacks = self.callback_handler.callbacks
        return next((callback for callback in callbacks if isinstance(callback, StopAfterStep)), None)

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Called by Trainer during training. An evaluation that a signal ended reports nothing."""
        try:
            found: dict[str, float] = super()._evaluate(*args, **kwargs)  # type: ignore[misc]
        except EvaluationEnded:
            self.model.train()  # TRL's trainers log training or evaluation figures by this mode
            cast("StopAfterStep", self._stop).end(self.args, self.control)
            return {}
        return found

    def _determine_best_metric(self, metrics: dict[str, float], *args: Any, **kwargs: Any) -> bool:
        return bool(metrics) and super()._determine_best_metric(metrics, *args, **kwargs)  # type: ignore[misc]
