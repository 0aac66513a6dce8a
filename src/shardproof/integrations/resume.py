"""Checkpoints under transformers' Trainer: saved by all ranks, resumed at any stage and number of processes.

A second mixin, before `ShardedTrainerMixin`:

    class Resumable(ResumeMixin, ShardedTrainerMixin, SFTTrainer): ...
    trainer.train(resume_from_checkpoint=...)

A checkpoint is a folder `checkpoint-STEP`, Trainer's name for it, with Trainer's own state, so that Trainer can return
to the step and the row. Everything else in it is ours.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import shardproof
from shardproof.checkpoint.folder import complete
from shardproof.checkpoint.values import random_state, set_random_state
from shardproof.zero.device import widest_float

if TYPE_CHECKING:
    from transformers import Trainer as Base

    from shardproof.checkpoint.api import Saving
else:
    Base = object

log = logging.getLogger("shardproof")

STATE = "trainer_state.json"


def _as_seen_by_rank_0(folder: str, scratch: str) -> str:
    """The folder to read Trainer's own state from; on a rank that does not see rank 0's folder, one with a copy."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return folder
    file = Path(folder, STATE)
    state = file.read_text(encoding="utf-8") if file.is_file() else ""
    found = [state if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(found)
    if state == found[0]:
        return folder
    Path(scratch, STATE).write_text(found[0], encoding="utf-8")
    return scratch


class ResumeMixin(Base):
    """Saves and loads model, optimizer, scheduler, random state, and the sums since the last log.

    If adapters are trained, frozen parameters are left out of checkpoints: they come with the model. With
    `save_only_model` the optimizer is left out, too, and training cannot be resumed.

    Attributes:
        saving: the checkpoint that is being written, or None.
        resumed: whether a checkpoint was loaded.
        begun_from: the checkpoint that training was to resume from, or None.
        evaluates_epochs: whether a callback asks for an evaluation at the end of each epoch.
    """

    saving: Saving | None = None
    begun_from: str | None = None
    _random: dict[str, Any] | None = None
    _logged: dict[str, Any] | None = None
    evaluates_epochs = False
    _owed = False  # an evaluation of the step that is resumed from

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Like Trainer's, but returns when the last checkpoint is complete."""
        start = kwargs.get("resume_from_checkpoint")
        self.begun_from = start if isinstance(start, str) else None
        with tempfile.TemporaryDirectory(prefix="shardproof-") as scratch:
            if isinstance(start, str):
                kwargs["resume_from_checkpoint"] = _as_seen_by_rank_0(start, scratch)
            try:
                trained = super().train(*args, **kwargs)
            finally:
                self.finish_saving()
        if self.args.load_best_model_at_end:
            self._go_back(self.begun_from)
        return trained

    @property
    def resumed(self) -> bool:
        return self._random is not None

    def finish_saving(self) -> None:
        """Wait for the checkpoint that is being written. If it failed, that has been reported, and training
        continues."""
        if self.saving is not None:
            self.saving.join()

    def kept_between_logs(self) -> dict[str, Any]:
        """The sums that a subclass keeps between two logs: numbers, summed over ranks when saved."""
        return {}

    def take_kept(self, kept: dict[str, Any]) -> None:
        """Restore the sums from `kept_between_logs`, on rank 0; other ranks start from zero."""

    def kept_by_rank(self) -> dict[str, Any]:
        """Further state that a subclass needs to resume: plain values, separate for each rank."""
        return {}

    def take_kept_by_rank(self, kept: dict[str, Any]) -> None:
        """Restore the state from `kept_by_rank`; a new rank gets that of rank 0."""

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self.store_flos()
        folder = self._get_output_dir(trial=trial)
        if self.args.metric_for_best_model:
            self.finish_saving()  # the last one may be the best, but is spared only if it is complete
            self.state.best_model_checkpoint = self._best_of([folder])
        for callback in [*self.callback_handler.callbacks, self.control]:
            if hasattr(callback, "state") and type(callback).__name__ in self.state.stateful_callbacks:
                self.state.stateful_callbacks[type(callback).__name__] = callback.state()
        kept = self.kept_between_logs()
        device = self.args.device
        losses = [float(self._tr_loss), *map(float, kept.values())]
        mine = torch.tensor(losses, dtype=widest_float(device), device=device)
        everyone = self.accelerator.gather(mine).view(-1, len(mine)).cpu()
        sums = dict(zip(kept, everyone[:, 1:].sum(0).tolist(), strict=True))
        progress = {
            "losses": everyone[:, 0].tolist(),
            "last_logged": self._globalstep_last_logged,
            "kept": sums,
            "scaler": self.accelerator.scaler.state_dict() if self.accelerator.scaler is not None else None,
            "evaluate": self._owes_evaluation(),
        }
        state = json.dumps(dataclasses.asdict(self.state), indent=2, sort_keys=True) + "\n"
        try:
            self.saving = shardproof.save(
                self.model,
                None if self.args.save_only_model else self.optimizer,
                os.path.join(folder, f"checkpoint-{self.state.global_step}"),
                frozen=not getattr(self.model, "peft_config", None),
                keep=self.args.save_total_limit if (self.args.save_total_limit or 0) > 0 else None,  # as Trainer's
                spare=self.state.best_model_checkpoint,
                files={STATE: state.encode(), **self.files_of_checkpoint()},
                scheduler=self.lr_scheduler,
                progress=progress,
                own=self.kept_by_rank(),
            )
        except shardproof.CheckpointError as error:  # on all ranks; training must not be lost because of it
            if self.args.process_index == 0:
                log.error("%s", error)

    def _owes_evaluation(self) -> bool:
        """Whether this step was due for an evaluation that did not happen, as a signal has ended training."""
        step, every = self.state.global_step, self.state.eval_steps
        begin = self.args.eval_delay or 0
        by_steps = self.args.eval_strategy == "steps" and bool(every) and step % every == 0 and step >= begin
        by_epochs = self.args.eval_strategy == "epoch" or self.evaluates_epochs
        if not by_steps and not (by_epochs and self.state.epoch % 1 == 0 and self.state.epoch >= begin):
            return False
        here = (entry for entry in reversed(self.state.log_history) if entry.get("step") == step)
        return not any(name.startswith("eval_") for entry in here for name in entry)

    def files_of_checkpoint(self) -> dict[str, bytes]:
        """Small files that a subclass adds to its checkpoints, by name."""
        return {}

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Nothing yet: the model is not sharded. Everything is loaded once the optimizer exists."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        values = shardproof.load(self.model, self.optimizer, checkpoint, scheduler=self.lr_scheduler)
        _take_rates_of(self.lr_scheduler)
        self._random, self._logged = random_state(), values["progress"]
        self._owed = bool(self._logged.get("evaluate")) and self.args.eval_strategy != "no"
        if self.accelerator.scaler is not None and self._logged.get("scaler"):
            self.accelerator.scaler.load_state_dict(self._logged["scaler"])
        if values.get("own"):
            self.take_kept_by_rank(values["own"])

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Nothing: it is loaded with the optimizer."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Trainer calls it after skipping the rows before the checkpoint."""
        if self._random is not None:
            set_random_state(self._random)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        logged, self._logged = self._logged, None
        if logged is not None:  # Trainer has just reset its sums
            losses, here = logged["losses"], self.args.world_size
            loss = losses[self.args.process_index] if len(losses) == here else sum(losses) / len(losses)
            self._tr_loss = torch.tensor(loss, dtype=torch.float32, device=self.args.device)
            self._globalstep_last_logged = logged["last_logged"]
            # Trainer's mean covers only the steps of this call; the restored loss is from before it.
            self._total_loss_scalar = -sum(losses) / len(losses)
            if self.args.process_index == 0:
                self.take_kept(logged["kept"])
        if self._owed and self._random is not None:  # it draws the random numbers that it would have drawn then
            self._owed = False
            set_random_state(self._random)
            self._meet()
            self._determine_best_metric(metrics=self._evaluate(None, None), trial=None)
            self._random = random_state()
        if self.control.should_training_stop or self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True  # Trainer checks it after a step only
            return
        super()._run_epoch(*args, **kwargs)

    # --- the best evaluation --------------------------------------------------------------------------

    def _evaluated(self) -> dict[int, float]:
        """The metric that ranks evaluations, by step."""
        name = f"eval_{(self.args.metric_for_best_model or 'loss').removeprefix('eval_')}"
        return {entry["step"]: entry[name] for entry in self.state.log_history if name in entry}

    def _ranked(self) -> list[int]:
        """The evaluated steps, the best first."""
        sign, values = -1 if self.args.greater_is_better else 1, self._evaluated()
        # NaN is the worst; among equals the first wins.
        return sorted(values, key=lambda step: (values[step] != values[step], sign * values[step], step))

    def _best_of(self, folders: Sequence[str]) -> str | None:
        """The checkpoint of the best evaluation that has one in these folders, or is about to get one."""
        there = {folder: {path.name for path in complete(folder)} for folder in folders}
        for step in self._ranked():
            for folder in folders:
                if step == self.state.global_step or f"checkpoint-{step}" in there[folder]:
                    return os.path.join(folder, f"checkpoint-{step}")
        return None

    def _load_best_model(self) -> None:
        """Nothing: Trainer calls this only on ranks that see the folder. It is loaded at the end of `train`, by all
        ranks."""

    def _go_back(self, start: str | None) -> None:
        """Load the weights of the best evaluation whose checkpoint still exists."""
        folders = [self.args.output_dir, *([os.path.dirname(start.rstrip("/"))] if start else [])]
        ranked, first = self._ranked(), self.args.process_index == 0
        there = [{path.name for path in complete(folder)} for folder in folders]
        found = [(i, step) for step in ranked for i, names in enumerate(there) if f"checkpoint-{step}" in names]
        told = torch.tensor(found[:1] or [(-1, -1)], device=self.args.device)
        place, step = self.accelerator.gather(told)[0].tolist()  # rank 0's, which sees its own folder
        if place < 0:
            if ranked and first:
                log.warning("No evaluation has a checkpoint: the weights are those of the last step.")
            return
        shardproof.load(self.model, None, os.path.join(folders[place], f"checkpoint-{step}"))
        if first:
            best, values = ranked[0], self._evaluated()
            as_good = step == best or values[step] == values[best]
            lost = "" if as_good else f"; that of step {best} was better, but its checkpoint is missing"
            log.warning("The weights are those of step %d, the best evaluation%s.", step, lost)


def _take_rates_of(scheduler: Any) -> None:
    """Set the learning rates that this schedule has at its current step. The loaded ones come from the schedule that
    the checkpoint was written with: 0 for a finished run that continues for more epochs."""
    scheduler = getattr(scheduler, "scheduler", scheduler)  # Accelerate's wraps torch's
    if not isinstance(scheduler, LambdaLR):  # like all step-based schedules of transformers
        return
    rates = [base * at(scheduler.last_epoch) for base, at in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates
