"""A run whose loss or gradients stay NaN or infinite ends, and weights of such steps are not written.

[Note: when it is known] What a step came to lies on the device, and the host does not wait for it. So steps are counted
there, and the count is read with what is logged anyway, and before weights are written.
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

LIMIT = 3  # steps in a row that end a run
SHOWN = 8  # rows in the text of an error


class Counts(NamedTuple):
    """Steps whose loss or gradient norm was not finite.

    Attributes:
        in_a_row: up to the last step.
        since_log: since the last log.
        last: whether the last step was one, and the optimizer took it.
    """

    in_a_row: int = 0
    since_log: int = 0
    last: int = 0

    @classmethod
    def of_ranks(cls, rows: Iterable[Sequence[float]]) -> Counts:
        """A loss is a rank's own, and all ranks have to come to one end."""
        return cls(*(int(max(column)) for column in zip(*rows, strict=True)))


class FiniteSteps(TrainerCallback):
    """Counts such steps on this rank, and ends the run on all ranks after `LIMIT` of them in a row.

    A step that a loss scale leaves out is in good order, in fp16: its gradients do not count.

    Attributes:
        norm: of the gradients of the step, or None.
        known: what all ranks had counted at the last log.
    """

    def __init__(self, trainer: CommandMixin) -> None:
        self._trainer, self.norm, self.known = trainer, None, Counts()
        device = trainer.args.device
        self._loss = torch.zeros((), device=device)
        self._counts = torch.zeros(len(Counts._fields), device=device)

    def add(self, loss: torch.Tensor) -> None:
        """The loss of a micro-batch."""
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
        """Whether the weights of now may go into a checkpoint. Every rank asks.

        Raises:
            NonFiniteError: nor will any that follow.
        """
        counts, finite = self._now()
        if not finite or counts.in_a_row >= LIMIT:
            raise self._error(counts)
        if counts.last and self._trainer.args.process_index == 0:
            log.warning("Step %d has no checkpoint: its loss was not finite.", self._trainer.state.global_step)
        return not counts.last

    def check_end(self) -> None:
        """Raise NonFiniteError if the weights of now are not to be what a run has learnt. Every rank asks."""
        counts, finite = self._now()
        if not finite or counts.last or counts.in_a_row >= LIMIT:
            raise self._error(counts)

    def check_weights(self) -> None:
        """Raise NonFiniteError if what is about to write answers is not finite. Every rank asks."""
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
                "Take another copy of it; 'shardproof doctor' names these weights."
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
            lines.append("It began with the first step: 'shardproof doctor' says whether the model itself is finite.")
        return NonFiniteError("\n".join([*lines, self._left()]))

    def _advice(self, rows: bool) -> list[str]:
        args, scaler = self._trainer.args, self._trainer.accelerator.scaler
        clips = f"below {args.max_grad_norm:g}" if args.max_grad_norm else "1, for gradients are not clipped"
        return [
            f"a --learning-rate below {args.learning_rate:g}",
            *(["--precision bf16 in place of fp16"] if scaler is not None else []),
            f"--max-grad-norm {clips}",
            "a look at these rows" if rows else "a look at the rows",
        ]

    def _left(self) -> str:
        """Where weights are from before."""
        self._trainer.finish_saving()
        args, begun_from = self._trainer.args, self._trainer.begun_from
        found = complete(Path(args.output_dir))
        return left_by(str(found[-1]) if found else None, begun_from, args.save_only_model)
