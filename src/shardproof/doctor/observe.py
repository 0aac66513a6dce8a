"""A few steps of a real run, observed after each update, without changing its recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

import shardproof.zero.optim.step  # noqa: F401  (its hooks come first, so that parameters are whole again in ours)
from shardproof.errors import EngineError
from shardproof.train.model.lacking import tolerant
from shardproof.train.run import Prepared, recipe_of
from shardproof.zero.tensors.parameter import ShardedParameter

Each = Callable[[int, dict[str, ShardedParameter]], None]


class Nobody:
    """A progress view that shows nothing."""

    def begin(self, steps: int, done: int = 0) -> None: ...
    def logged(self, record: dict[str, Any]) -> None: ...
    def generated(self, record: dict[str, Any]) -> None: ...
    def evaluated(self, done: int, total: int) -> None: ...
    def end(self) -> None: ...


def observe(prepared: Prepared, each: Each, records: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    """Train on this rank without saving; after each update call `each(step, parameters)`, on every rank. Names in a
    second trained model (ppo's value model) are prefixed with its number.

    `each` is called by torch's own optimizer hook, so the recipe runs unchanged. The engine's hook runs before it, so
    parameters are whole again, and gradients still exist.

    Args:
        records: collects the records as they are made.

    Returns: the records of the run, on rank 0.

    Raises:
        EngineError: the recipe has not updated any sharded parameter, and no loss scale has skipped the updates.
    """
    records = [] if records is None else records
    count = 0

    def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal count
        params = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, ShardedParameter)]
        if params:
            count += 1
            with torch.no_grad():
                each(count, _named(params))

    prepared.saves, prepared.val_rows = False, None
    handle = register_optimizer_step_post_hook(after_step)
    try:
        recipe_of(prepared.config).train(prepared, Nobody(), records.append)
    finally:
        handle.remove()
    if not count and prepared.config.precision != "fp16":
        raise EngineError("No update of a sharded parameter was observed: this run cannot be checked.")
    return records


def _named(params: list[ShardedParameter]) -> dict[str, ShardedParameter]:
    engines = list({id(p.flat.engine): None for p in params})
    numbers = {key: f"{number}: " if number > 1 else "" for number, key in enumerate(engines, 1)}
    return {numbers[id(p.flat.engine)] + p.qualified_name: p for p in params}


def short_run(config: Any, batch: Any, world: int, steps: int, folder: str, **more: Any) -> Any:
    """The options for `steps` steps with the same rows per step on `world` processes, at the peak learning rate from
    the first step, writing only into `folder`."""
    only = {
        "nproc": world,
        "global_batch_size": batch.whole,
        "per_device_batch_size": batch.micro,
        "gradient_accumulation_steps": None,
        "max_steps": steps,
        "lr_scheduler": "constant",
        "lr_scheduler_kwargs": {},
        "warmup_ratio": 0.0,
        "warmup_steps": None,
        "output_dir": folder,
        "overwrite": False,
        "val_dataset": [],
        "cached_val_dataset": [],
        "val_split": 0.0,
        "eval_steps": None,
        "eval_strategy": None,
        "eval_on_start": False,
        "keep_best": False,
        "early_stop": None,
        "best_metric": "loss",
        "metrics": [],
        "predict_with_generate": False,
        "answer_metrics": [],
        "max_new_tokens": 128,
        "save_steps": None,
        "save_strategy": None,
        "save_total_limit": None,
        "save_only_model": False,
        "max_restarts": 0,
        "min_processes": None,
        "resume": None,
        "profile": None,
        "report_to": ["none"],
        "logging_steps": 1,
    }
    fields = type(config).model_fields
    short = config.model_copy(update={key: value for key, value in {**only, **more}.items() if key in fields})
    return tolerant(short) if config.resume else short
