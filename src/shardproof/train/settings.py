"""Our options, translated into transformers' TrainingArguments and arguments of our own trainers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardproof.models.checkpointing import checkpointing_arguments
from shardproof.train.model.dtypes import saved_dtype
from shardproof.train.options.config import RunConfig, SftConfig
from shardproof.train.options.option import SWANLAB

if TYPE_CHECKING:
    from shardproof.train.run import Prepared


def warm_up(config: RunConfig) -> float:
    """The number of warm-up steps of the learning rate, or their share: transformers takes either as one number."""
    return config.warmup_ratio if config.warmup_steps is None else config.warmup_steps


def learns_nothing(prepared: Prepared) -> bool:
    """Whether there is only one step, in which schedules with a warm-up have a learning rate of 0."""
    return prepared.steps == 1 and prepared.config.lr_scheduler != "constant" and warm_up(prepared.config) > 0


def mixed_precision(name: str, reduce: str = "fp32") -> Any:
    """The engine's setting for --precision and --reduce-dtype."""
    if name == "fp32":
        return None
    import torch

    import shardproof

    compute = {"bf16": torch.bfloat16, "fp16": torch.float16}[name]
    return shardproof.MixedPrecision(compute=compute, reduce={"fp32": torch.float32, "bf16": torch.bfloat16}[reduce])


def switches(prepared: Prepared) -> dict[str, Any]:
    """Our options as arguments of our own trainers: the order of rows, how the model is sharded, and what saves time
    and memory."""
    config = prepared.config
    return {
        "batch": prepared.batch,
        "order_seed": config.seed,
        "order_files": prepared.order,
        "stage": config.stage,
        "shard_group": config.shard_group,
        "offload": config.offload,
        "keep_gathered": int(config.keep_gathered * 1e9),
        "mixed_precision": None
        if config.stochastic_rounding
        else mixed_precision(config.precision, config.reduce_dtype),
        "part_rates": config.part_learning_rates,
        "adapter_ratio": config.lorap_lr_ratio,
        "saved_dtype": saved_dtype(config, prepared.model),
        "group_by_length": config.group_by_length,
        "drop_last": config.drop_last,
        "compiled": config.compile,
        "activation_offloading": config.activation_offloading,
    }


def for_any_trainer(prepared: Prepared, callbacks: list[Any]) -> dict[str, Any]:
    """The arguments of any trainer, whatever it trains."""
    from shardproof.train.optim.optimizers import optimizer_of

    config = prepared.config
    return {
        "train_dataset": prepared.rows,
        "eval_dataset": prepared.val_rows,
        "callbacks": callbacks,
        "optimizer_of": optimizer_of(config),
        **switches(prepared),
    }


def for_sft_trainer(prepared: Prepared, callbacks: list[Any]) -> dict[str, Any]:
    """The same for `sft`, whatever its task."""
    from transformers import TrainingArguments

    config: SftConfig = prepared.config
    return {
        "args": TrainingArguments(
            **arguments(prepared), average_tokens_across_devices=True, use_liger_kernel=config.liger_kernel
        ),
        "processing_class": prepared.processing,
        "deterministic": config.deterministic,
        **for_any_trainer(prepared, callbacks),
    }


def add_in_one_order(config: SftConfig) -> None:
    """With --deterministic, make this process compute the same bits each time."""
    if config.deterministic:
        import torch

        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_num_threads(1)  # the number of threads affects the order of additions


def arguments(prepared: Prepared) -> dict[str, Any]:
    """Our options as arguments of transformers' TrainingArguments, which those of TRL's trainers take too."""
    import torch

    config, batch = prepared.config, prepared.batch
    streams = getattr(config, "streaming", False)
    return {
        "output_dir": str(prepared.folder),
        "max_steps": prepared.steps,
        "per_device_train_batch_size": batch.micro,
        "per_device_eval_batch_size": batch.micro,
        "gradient_accumulation_steps": batch.accumulation,
        "learning_rate": config.rate,
        "lr_scheduler_type": config.lr_scheduler,
        "lr_scheduler_kwargs": config.lr_scheduler_kwargs or None,
        "warmup_steps": warm_up(config),
        "weight_decay": config.weight_decay,
        "adam_beta1": config.adam_beta1,
        "adam_beta2": config.adam_beta2,
        "adam_epsilon": config.adam_epsilon,
        "max_grad_norm": config.max_grad_norm,
        "neftune_noise_alpha": getattr(config, "neftune_noise_alpha", None),
        "seed": config.seed,
        **checkpointing_arguments(bool(config.gradient_checkpointing), config.checkpointing_reentrant),
        "eval_strategy": "steps" if config.evaluates else "no",
        "eval_steps": config.evaluation_steps or prepared.steps,  # with --eval-strategy epoch, see EndOfEpoch
        "eval_on_start": config.eval_on_start and not prepared.starts,
        "load_best_model_at_end": config.keep_best,
        "metric_for_best_model": config.best_metric if config.keep_best else None,
        "logging_steps": config.logging_steps,
        "logging_nan_inf_filter": False,  # a NaN loss is shown as it is
        "report_to": [name for name in config.report_to if name not in ("none", SWANLAB)] or "none",
        "save_strategy": "steps" if config.writes_checkpoints else "no",
        "save_steps": config.checkpoint_steps or prepared.steps,  # with --save-strategy epoch, see EndOfEpoch
        # With a limit of one and the best kept, Trainer would remove the newest checkpoint in the end.
        "save_total_limit": config.kept_checkpoints,
        "save_only_model": config.save_only_model,
        "remove_unused_columns": False,
        "ignore_data_skip": streams,  # streams continue from their position
        "dataloader_num_workers": config.workers if streams or prepared.processing is not prepared.tokenizer else 0,
        "disable_tqdm": True,
        "log_level_replica": "passive",  # otherwise other ranks are set to warnings
        "use_cpu": not torch.accelerator.is_available(),
    }
