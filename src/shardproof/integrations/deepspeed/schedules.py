"""The learning-rate schedules that come with DeepSpeed, as torch schedulers with the same values.

[Note: which step is the first]
DeepSpeed counts steps from -1: the optimizer's first and second steps both have the value of step 0 or below, because
the count is raised only after a step. torch counts from 0, so the step here is `last_epoch - 1`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from shardproof.errors import ConfigError, did_you_mean
from shardproof.integrations.deepspeed.optimizers import check_arguments
from shardproof.integrations.deepspeed.sections import Named

PerGroup = float | list[float]


class Schedule(LRScheduler):
    """The base class: a state of one number, as in DeepSpeed's checkpoints."""

    @property
    def last_batch_iteration(self) -> int:
        return self.last_epoch - 1

    def _per_group(self, value: Any, name: str) -> list[float]:
        groups = self.optimizer.param_groups
        if not isinstance(value, (list, tuple)):
            return [value] * len(groups)
        if len(value) != len(groups):
            raise ConfigError(f"{name} has {len(value)} values for {len(groups)} parameter groups.")
        return list(value)

    def step(self, last_batch_iteration: int | None = None) -> None:  # type: ignore[override]
        """Advance by one step, or to a given one, counted as in DeepSpeed: one less than torch."""
        if last_batch_iteration is not None:
            self.last_epoch = last_batch_iteration  # torch increments it
        super().step()

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration, "last_lr": self.get_last_lr()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = state_dict["last_batch_iteration"] + 1
        self._last_lr = list(state_dict.get("last_lr", self._last_lr))


def _warmed(step: int, steps: int, kind: str) -> float:
    """The progress of the warm-up, from 0 to 1."""
    return math.log(step + 1) / math.log(steps) if kind == "log" else step / steps


def _check_warmup(steps: Any, kind: str) -> int:
    if not isinstance(steps, int) or steps <= 0:
        raise ConfigError(f"warmup_num_steps must be a whole number above 0, not {steps!r}.")
    if kind not in ("log", "linear"):
        raise ConfigError(f"warmup_type {kind!r} is not 'log' or 'linear'.")
    return max(2, steps)


class WarmupLR(Schedule):
    """From `warmup_min_lr` to `warmup_max_lr` (default: the optimizer's) in `warmup_num_steps`, then constant."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
    ) -> None:
        self.optimizer = optimizer
        self.warmup_num_steps, self.warmup_type = _check_warmup(warmup_num_steps, warmup_type), warmup_type
        highest = [group["lr"] for group in optimizer.param_groups] if warmup_max_lr is None else warmup_max_lr
        self.min_lrs = self._per_group(warmup_min_lr, "warmup_min_lr")
        self.max_lrs = self._per_group(highest, "warmup_max_lr")
        super().__init__(optimizer)

    def _factor(self, step: int) -> float:
        return _warmed(step, self.warmup_num_steps, self.warmup_type) if step < self.warmup_num_steps else 1.0

    def get_lr(self) -> list[Any]:
        factor = self._factor(max(self.last_batch_iteration, 0))
        return [low + (high - low) * factor for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]


class WarmupDecayLR(WarmupLR):
    """Like WarmupLR, then linearly to 0 at `total_num_steps`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type)

    def _factor(self, step: int) -> float:
        if step < self.warmup_num_steps:
            return super()._factor(step)
        return max(0.0, (self.total_num_steps - step) / max(1.0, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(Schedule):
    """From `warmup_min_ratio` of the optimizer's rate up to it, then along a cosine to `cos_min_ratio` of it."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
    ) -> None:
        self.warmup_num_steps, self.warmup_type = _check_warmup(warmup_num_steps, warmup_type), warmup_type
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self.highest = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer)

    def _ratio(self, step: int) -> float:
        if step < 0:
            return 0.0
        if step < self.warmup_num_steps:
            warmed = _warmed(step, self.warmup_num_steps, self.warmup_type)
            return self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * warmed
        past = min(1.0, (step - self.warmup_num_steps + 1) / max(1, self.total_num_steps - self.warmup_num_steps))
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * (1 + math.cos(math.pi * past)) / 2)

    def get_lr(self) -> list[Any]:
        ratio = self._ratio(self.last_batch_iteration)
        return [lr * ratio for lr in self.highest]


class LRRangeTest(Schedule):
    """Raise the rate from `lr_range_test_min_lr`, to find its upper limit."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
    ) -> None:
        self.optimizer = optimizer
        if not isinstance(lr_range_test_step_size, int) or lr_range_test_step_size <= 0:
            raise ConfigError(
                f"lr_range_test_step_size must be a whole number above 0, not {lr_range_test_step_size!r}."
            )
        self.min_lrs = self._per_group(lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size, self.step_rate = lr_range_test_step_size, lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer)

    def step(self, batch_iteration: int | None = None) -> None:  # type: ignore[override]
        super().step(batch_iteration)

    def get_lr(self) -> list[Any]:
        interval = self.last_epoch / self.step_size
        interval = math.floor(interval) if self.staircase else interval
        return [lr * (1 + self.step_rate * interval) for lr in self.min_lrs]


class OneCycle(Schedule):
    """Up to `cycle_max_lr` and back to `cycle_min_lr`, betas in the opposite direction, then a slow decay."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
    ) -> None:
        self.optimizer = optimizer
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        self.first, self.second = float(cycle_first_step_size), float(second)
        if self.first <= 0 or self.second < 0:
            raise ConfigError("cycle_first_step_size must be above 0, cycle_second_step_size 0 or above.")
        self.total = self.first + self.second
        stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.stairs = (cycle_first_stair_count, stairs)
        self.decay_step_size, self.decay_lr_rate, self.decay_mom_rate = decay_step_size, decay_lr_rate, decay_mom_rate
        self.min_lrs = self._per_group(cycle_min_lr, "cycle_min_lr")
        self.max_lrs = self._per_group(cycle_max_lr, "cycle_max_lr")
        self.min_moms = self._per_group(cycle_min_mom, "cycle_min_mom")
        self.max_moms = self._per_group(cycle_max_mom, "cycle_max_mom")
        self.cycle_momentum = cycle_momentum and "betas" in optimizer.defaults
        super().__init__(optimizer)

    def _height(self) -> float:
        """The height of the current step in the cycle, from 0 to 1."""
        step = self.last_epoch
        position = step / self.total - math.floor(step / self.total)
        rising = position <= self.first / self.total
        height = position * self.total / self.first if rising else (1 - position) * self.total / self.second
        count = self.stairs[0 if rising else 1]
        if count <= 0:
            return height
        within = step % self.total  # from the step itself: rounding down the height must not lose a whole stair
        on = within * count / self.first if within <= self.first else (self.total - within) * count / self.second
        return math.floor(on) / count

    def _decays(self) -> float:
        """Steps of decay since the end of the cycle; -1 within it."""
        step = self.last_batch_iteration
        return -1.0 if step < self.total else (step - self.total + 1) / (self.decay_step_size or math.inf)

    def get_lr(self) -> list[Any]:
        decays = self._decays()
        if decays < 0:
            height = self._height()
            return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        return [low / (1 + self.decay_lr_rate * decays) for low in self.min_lrs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of each group, or None if the optimizer has none."""
        if not self.cycle_momentum:
            return None
        decays = self._decays()
        if self.last_batch_iteration < 0:
            return [(low, 0.99) for low in self.min_moms]
        if decays < 0:
            height = self._height()
            pairs = zip(self.min_moms, self.max_moms, strict=True)
            return [(high - (high - low) * height, 0.99) for low, high in pairs]
        return [(high * (1 + self.decay_mom_rate * decays), 0.99) for high in self.max_moms]

    def step(self, batch_iteration: int | None = None) -> None:  # type: ignore[override]
        super().step(batch_iteration)
        for group, betas in zip(self.optimizer.param_groups, self.get_mom() or (), strict=False):
            group["betas"] = betas


OF_DEEPSPEED = {kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle)}


def make(section: Named, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """The schedule that the scheduler section describes: one of DeepSpeed's, or any from torch.

    Raises:
        ConfigError: it is unknown, or does not take these arguments.
    """
    torchs = {n: k for n, k in vars(torch.optim.lr_scheduler).items() if isinstance(k, type) and n[0].isupper()}
    kind = OF_DEEPSPEED.get(section.type) or torchs.get(section.type)
    if kind is None:
        raise ConfigError(
            f"scheduler.type {section.type!r} is neither a DeepSpeed nor a torch schedule."
            f"{did_you_mean(section.type, [*OF_DEEPSPEED, *torchs], 0.4)}"
        )
    open_ends = [key for key in ("warmup_num_steps", "total_num_steps") if section.params.get(key) == "auto"]
    if open_ends:
        raise ConfigError(
            f'scheduler.params.{open_ends[0]} is "auto", which a Trainer fills in. In your own loop give a number.'
        )
    settings = {key: value for key, value in section.params.items() if value != "auto"}
    if section.params.get("warmup_max_lr") == "auto" and section.type == "WarmupDecayLR":
        settings["warmup_max_lr"] = [group["lr"] for group in optimizer.param_groups]
    settings.pop("last_batch_iteration", None)
    check_arguments(kind, settings, "scheduler")
    try:
        return kind(optimizer, **settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"scheduler {section.type}: {error}.") from None
