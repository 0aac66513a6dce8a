"""Turns what the Trainer logs into the records that a run writes to metrics.jsonl and shows while it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import has_length

from shardproof.train.log_file import LogFile
from shardproof.train.watching.recorder import Recorder
from shardproof.train.watching.view import View, Write

# Figures that are recorded under our own names, or that say nothing about the run.
_NAMED = {"loss", "grad_norm", "learning_rate", "tokens", "memory", "epoch", "num_tokens", "step_time", "total_flos"}


class Reporter(TrainerCallback):
    """Turns the Trainer's log into records, for the file and the view. Rank 0 only.

    Attributes:
        recorder: the trainer's recorder, which has each rank's figures.
    """

    def __init__(self, write: Write, view: View, answers: LogFile | None = None) -> None:
        self.write, self.view, self.answers = write, view, answers
        self.recorder = Recorder()
        self._predicted = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.view.begin(state.max_steps, state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        logs = logs or {}
        seconds = round(self.recorder.seconds()[0], 3)
        record: dict[str, Any] = {"step": state.global_step, "epoch": round(state.epoch or 0.0, 4)}
        if "loss" in logs:
            record |= {
                "loss": logs["loss"],
                "grad_norm": logs.get("grad_norm"),
                "lr": logs["learning_rate"],
                "tokens": logs["tokens"],
                "tokens_per_second": round(logs["tokens"] / max(self.recorder.ranks["seconds"]), 1),
                "seconds": seconds,
                "memory": logs["memory"],
                "steps": state.max_steps,
                "ranks": self.recorder.ranks,
            }
            record |= {name: value for name, value in logs.items() if name not in _NAMED}
        elif "eval_loss" in logs:
            record |= {"eval_loss": logs["eval_loss"], "seconds": seconds}
            record |= {name: value for name, value in logs.items() if name.startswith("eval_") and tells(name)}
        else:
            return
        self.write(record)
        self.view.logged(record)

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Trainer's own evaluations call it after each batch."""
        self._predicted += 1
        if has_length(eval_dataloader):
            self.evaluated(self._predicted, len(eval_dataloader))

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._predicted = 0

    def evaluated(self, done: int, total: int) -> None:
        """Report how many batches of an evaluation are done."""
        self.view.evaluated(done, total)

    def generated(self, logs: Mapping[str, Any]) -> None:
        """Record the completions since the last log, with steps and rewards, in the form that TRL's trainers keep."""
        if not logs["completion"]:
            return
        rewards: Mapping[str, Any] = logs["rewards"]
        records = [
            {
                "step": logs["step"][i],
                "prompt": logs["prompt"][i],
                "completion": logs["completion"][i],
                "rewards": {name: _number(values[i]) for name, values in rewards.items()},
                "advantage": _number(logs["advantages"][i]),
            }
            for i in range(len(logs["completion"]))
        ]
        self._write_down(records)

    def answered(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Record the answers to the rows of an evaluation, and their scores."""
        if records:
            self._write_down([{"step": step, **record} for record in records])

    def _write_down(self, records: Sequence[dict[str, Any]]) -> None:
        if self.answers is not None:
            self.answers.add(*records)
            self.view.generated(records[0])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.view.end()


def tells(name: str) -> bool:
    """Whether a figure of an evaluation is about the model."""
    return not name.endswith(("runtime", "per_second", "preparation_time", "num_tokens"))


def _number(value: float) -> float | None:
    """None for NaN, which JSON does not have: the reward function did not apply."""
    return round(value, 6) if value == value else None
