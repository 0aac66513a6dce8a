"""A signal ends training after a step, with the weights of that step, on all ranks alike."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from shardproof.errors import ConfigError
from shardproof.interrupts import without_terminal
from shardproof.train.report import tells
from shardproof.zero.device import may_take_long

ECHO = 1.0  # seconds: a terminal and a launcher may both hand on one Ctrl-C
NOTICE = b"\nending after this step, whose weights are saved; Ctrl-C again ends at once\n"


class JudgesEvaluations(TrainerCallback):
    """Ends training when evaluations get no better. What it goes by is in the Trainer's state, and so in checkpoints.

    Args:
        metric: the name of what an evaluation is judged by.
        patience: so many in a row that are no better end training; None: none does.
    """

    def __init__(self, metric: str, patience: int | None) -> None:
        self._metric, self._patience = metric, patience
        self._name = f"eval_{metric.removeprefix('eval_')}"

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        if self._name not in metrics:
            found = ", ".join(key.removeprefix("eval_") for key in metrics if key.startswith("eval_") and tells(key))
            raise ConfigError(f"--best-metric {self._metric}: an evaluation has none of that name. It has {found}.")
        self._judge(args, state, control)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Of a run that goes on, too: it may have come to its end."""
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
    """Asks for an evaluation and a checkpoint after each pass over the data, where the last step has none yet.

    Args:
        evaluates: whether for an evaluation; not where a signal has ended training, which is not to wait for one.
        saves: whether for a checkpoint.
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
    """Every rank listens; at the end of a step, the ranks agree.

    They do so through a group of their own on the CPU: a step of the accelerator is not waited for.

    Attributes:
        agreed: the signal that ended training, 0 as long as none has.
    """

    def __init__(self) -> None:
        self.received, self.agreed, self._since, self._pid = 0, 0, 0.0, os.getpid()
        several = dist.is_initialized() and dist.get_world_size() > 1
        self._group = dist.new_group(backend="gloo") if several else None
        if self._group is not None:
            may_take_long(self._group)
        self._first = not several or dist.get_rank() == 0

    @contextmanager
    def listening(self, signals: Sequence[int]) -> Iterator[None]:
        """Inside, the first of these signals asks to stop, and one that comes later interrupts at once."""
        before = {number: signal.signal(number, self._receive) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: Any) -> None:
        if os.getpid() != self._pid:  # forked to read rows: it ends with its rank
            return
        now = time.monotonic()
        if not self.received:
            self.received, self._since = number, now
            without_terminal()
            if self._first:
                os.write(2, NOTICE)  # print may be what was interrupted
        elif now - self._since > ECHO:
            raise KeyboardInterrupt

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        asked = torch.tensor([self.received], device="cpu")
        if self._group is not None:
            dist.all_reduce(asked, dist.ReduceOp.MAX, group=self._group)
        if (number := int(asked)) and state.global_step < state.max_steps:
            self.agreed = number
            control.should_training_stop = control.should_log = True
            control.should_evaluate = False
            control.should_save = args.save_strategy != "no"
