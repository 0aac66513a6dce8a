"""Ends a run whose loss or gradients stay NaN or infinite, and keeps weights of such steps from being written.

[Note: when it is known] The results of a step are on the device, and the host does not wait for them. So such steps are
counted on the device, and the count is read when something is logged anyway, and before weights are written.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import TrainerCallback

from shardproof.checkpoint.folder import complete
from shardproof.errors import NonFiniteError
from shardproof.train.goes_on import left_by

if TYPE_CHECKING:
    from shardproof.train.trainer import CommandMixin

log = logging.getLogger("shardproof")

LIMIT = 3  # consecutive bad steps that end a run
SHOWN = 8  # rows shown in an error


class Counts(NamedTuple):
    """Steps whose loss or gradient norm was not finite.

    Attributes:
        in_a_row: consecutive ones up to the last step.
        since_log: those since the last log.
        last: whether the last step was one, and the optimizer applied it.
    """

    in_a_row: int = 0
    since_log: int = 0
    last: int = 0

    @classmethod
    def of_ranks(cls, rows: Iterable[Sequence[float]]) -> Counts:
        """Each rank has its own loss, but all ranks must reach the same decision."""
        return cls(*(int(max(column)) for column in zip(*rows, strict=True)))


class FiniteSteps(TrainerCallback):
    """Counts such steps on this rank, and ends the run on all ranks after `LIMIT` of them in a row.

    A step that the fp16 loss scaler skips is fine: its gradients do not count.

    Attributes:
        norm: the gradient norm of the step, or None.
        known: the counts over all ranks at the last log.
    """

    def __init__(self, trainer: CommandMixin) -> None:
        self._trainer, self.norm, self.known = trainer, None, Counts()
        device = trainer.args.device
        self._loss = torch.zeros((), device=device)
        self._counts = torch.zeros(len(Counts._fields), device=device)

    def add(self, loss: torch.Tensor) -> None:
        """Add the loss of a micro-batch."""
        self._loss = self._loss + loss.detach().reshape(())

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        left_out = getattr(optimizer, "step_was_skipped", False)
        bad = ~self._loss.isfinite()
        if self.norm is not None and not left_out:
            bad |= ~torch.as_tensor(self.norm).to(bad.device, non_blocking=True).isfinite()
        in_a_row, since_log, _ = self._counts
        one = bad.to(self._counts.dtype)
        self._counts = torch.stack([(in_a_row + 1) * one, since_log + one, one * (not left_out)])
        self._loss, self.norm = torch.zeros_like(self._loss), None

    def taken(self) -> list[float]:
        """The counts of this rank, for a log."""
        found: list[float] = self._counts.tolist()
        self._counts[Counts._fields.index("since_log")] = 0
        return found

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" not in (logs or {}) or not self.known.since_log:
            return
        if self.known.in_a_row >= LIMIT:
            raise self._error(self.known)
        if args.process_index == 0:
            log.warning(
                "The loss or the gradient norm of %d step(s) up to step %d is not finite (NaN or infinite); %d in a row"
                " end the run.",
                self.known.since_log,
                state.global_step,
                LIMIT,
            )

    # --- before weights are written -------------------------------------------------------------------

    def allows_checkpoint(self) -> bool:
        """Whether the current weights may go into a checkpoint. Every rank calls it.

        Raises:
            NonFiniteError: the run must end, since no later weights may either.
        """
        counts, finite = self._now()
        if not finite or counts.in_a_row >= LIMIT:
            raise self._error(counts)
        if counts.last and self._trainer.args.process_index == 0:
            log.warning("Step %d has no checkpoint: its loss was not finite.", self._trainer.state.global_step)
        return not counts.last

    def check_end(self) -> None:
        """Raise NonFiniteError if the current weights must not be a run's result. Every rank calls it."""
        counts, finite = self._now()
        if not finite or counts.last or counts.in_a_row >= LIMIT:
            raise self._error(counts)

    def check_weights(self) -> None:
        """Raise NonFiniteError if the weights that are to generate answers are not finite. Every rank calls it."""
        counts, finite = self._now()
        if not finite:
            raise self._error(counts)

    def _now(self) -> tuple[Counts, bool]:
        """The counts of all ranks, and whether all weights are finite."""
        parts = (getattr(p, "local", p).detach() for p in self._trainer._parameters if p.requires_grad)
        finite = all(bool(torch.linalg.vector_norm(part, float("inf")).isfinite()) for part in parts if part.numel())
        everyone = self._trainer._of_all_ranks([*self._counts.tolist(), float(finite)])
        return Counts.of_ranks(row[:-1] for row in everyone), all(row[-1] for row in everyone)

    def _error(self, counts: Counts) -> NonFiniteError:
        trainer = self._trainer
        step, began = trainer.state.global_step, trainer.state.global_step - max(counts.in_a_row, 1) + 1
        if not step:
            return NonFiniteError(
                "The model holds weights that are not finite (NaN or infinite) before the first step.\n"
                "Use another copy of it; 'shardproof doctor' names these weights."
            )
        what = f"The weights are not finite (NaN or infinite) after step {step}"
        if counts.in_a_row:
            many = f", {counts.in_a_row} steps in a row" if counts.in_a_row > 1 else ""
            what = f"The loss or the gradient norm is not finite (NaN or infinite) from step {began} on{many}"
        lines = [f"{what}. The run ends here, and these weights are not written."]
        if rows := trainer.rows_of_step(began):
            more = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
            lines.append(f"Rows of step {began}: {', '.join(rows[:SHOWN])}{more}.")
        *advice, last = self._advice(bool(rows))
        lines.append(f"What may help: {', '.join(advice)}, and {last}.")
        if began == 1:
            lines.append("It began with the first step: 'shardproof doctor' checks whether the model itself is finite.")
        return NonFiniteError("\n".join([*lines, self._left()]))

    def _advice(self, rows: bool) -> list[str]:
        args, scaler = self._trainer.args, self._trainer.accelerator.scaler
        clips = f"below {args.max_grad_norm:g}" if args.max_grad_norm else "1, as gradients are not clipped"
        return [
            f"a --learning-rate below {args.learning_rate:g}",
            *(["--precision bf16 in place of fp16"] if scaler is not None else []),
            f"--max-grad-norm {clips}",
            "a look at these rows" if rows else "a look at the rows",
        ]

    def _left(self) -> str:
        """Where earlier weights are."""
        self._trainer.finish_saving()
        args, begun_from = self._trainer.args, self._trainer.begun_from
        found = complete(Path(args.output_dir))
        return left_by(str(found[-1]) if found else None, begun_from, args.save_only_model)
