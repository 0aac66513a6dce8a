"""The sections of a DeepSpeed JSON that have a meaning here, and the treatment of every other key.

A key is one of: a field (it is read), `unused` (it tunes a mechanism that this engine does not have; reported once),
`silent` (leaving it out loses nothing), `refused` (ignoring it would change what is trained, so it is an error).
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator, model_validator

from shardproof.errors import ConfigError

_NOT_BUILT = "is not supported, and ignoring it would change what is trained; remove it"


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True, strict=False)

    unused: ClassVar[frozenset[str]] = frozenset()
    silent: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[dict[str, str]] = {}

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_for_a_number(cls, value: Any, info: Any) -> Any:
        kind = str(cls.model_fields[info.field_name].annotation)
        if isinstance(value, bool) and "bool" not in kind and ("int" in kind or "float" in kind):
            raise ValueError("must be a number, not true or false")
        return value


class Offload(Section):
    device: Literal["none", "cpu", "nvme"] = "none"
    nvme_path: str | None = None
    silent = frozenset(
        "pin_memory buffer_count buffer_size max_in_cpu pipeline pipeline_read pipeline_write fast_init ratio"
        " super_offload cpuadam_cores_perc".split()
    )


class Zero(Section):
    stage: int = Field(default=0, ge=0, le=3)
    offload_param: Offload = Offload()
    offload_optimizer: Offload = Offload()
    cpu_offload: bool = False
    cpu_offload_param: bool = Field(
        default=False, validation_alias=AliasChoices("cpu_offload_param", "cpu_offload_params")
    )
    unused = frozenset(
        "contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions"
        " allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights elastic_checkpoint sub_group_size"
        " stage3_prefetch_bucket_size prefetch_bucket_size stage3_param_persistence_threshold"
        " param_persistence_threshold stage3_model_persistence_threshold model_persistence_threshold"
        " stage3_max_live_parameters max_live_parameters stage3_max_reuse_distance max_reuse_distance"
        " stage3_module_granularity_threshold module_granularity_threshold stage3_use_all_reduce_for_fetch_params"
        " use_all_reduce_for_fetch_params stage3_allgather_sequential allgather_sequential legacy_stage1"
        " round_robin_gradients parameter_alignment zero_hpz_partition_size zero_quantized_weights"
        " zero_quantized_nontrainable_weights zero_quantized_gradients memory_efficient_linear"
        " pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings enable_sanity_checks"
        " save_muon_momentum_buffer_in_memory mics_shard_size mics_hierarchical_params_gather zeropp_loco_param"
        " grad_hooks".split()
    )
    # Saved weights are always full; a module that only some ranks use needs no mark; unused parameters need no setting.
    silent = frozenset(
        "stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save"
        " stage3_gather_fp16_weights_on_model_save cpu_offload_use_pin_memory leaf_module"
        " ignore_unused_parameters".split()
    )
    refused: ClassVar[dict[str, str]] = {"zenflow": _NOT_BUILT}

    def offload(self) -> str | None:
        """The value for `shardproof.shard(offload=...)`.

        Raises:
            ConfigError: NVMe without a path.
        """
        for name, part in (("offload_param", self.offload_param), ("offload_optimizer", self.offload_optimizer)):
            if part.device == "nvme":
                if not part.nvme_path:
                    raise ConfigError(f"zero_optimization.{name}: device is nvme, but nvme_path is missing.")
                return f"nvme:{part.nvme_path}"
        if self.offload_param.device == "cpu" or self.cpu_offload_param:
            return "all"
        return "optimizer" if self.offload_optimizer.device == "cpu" or self.cpu_offload else None


class Fp16(Section):
    enabled: bool = False
    loss_scale: float = Field(default=0.0, ge=0)
    initial_scale_power: int = 16
    loss_scale_window: int = Field(default=1000, gt=0)
    hysteresis: int = Field(default=2, ge=1)
    consecutive_hysteresis: bool = False
    min_loss_scale: float = Field(default=1.0, gt=0)
    silent = frozenset({"auto_cast"})  # inputs of the model are cast in any case
    unused = frozenset({"fp16_master_weights_and_grads", "fp16_opt_level"})


class Bf16(Section):
    enabled: bool = False
    check_grad_overflow: bool = Field(
        default=True, validation_alias=AliasChoices("check_grad_overflow", "check_overflow")
    )
    unused = frozenset({"immediate_grad_update", "bf16_master_weights_and_grads", "bf16_optimizer_states"})


class Autocast(Section):
    enabled: bool = False
    dtype: Literal["bfloat16", "bf16", "float16", "fp16", "half", "torch.bfloat16", "torch.float16"] = "bfloat16"
    unused = frozenset({"lower_precision_safe_modules"})

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.bfloat16 if "bf" in self.dtype else torch.float16


class Named(Section):
    """An optimizer or a scheduler: a class name and its arguments."""

    type: str
    params: dict[str, Any] = {}
    silent = frozenset({"legacy_fusion"})


class Checkpoint(Section):
    silent = frozenset({"tag_validation"})  # a tag that differs between ranks is an error in any case
    unused = frozenset({"writer", "parallel_write", "use_node_local_storage", "checkpoint_serialization"})
    refused: ClassVar[dict[str, str]] = {
        "load_universal": "cannot be read here: load the weights with `torch.load` into the model before initialize"
    }


class DataTypes(Section):
    silent = frozenset({"grad_accum_dtype"})  # float32, the best possible choice
    unused = frozenset({"param_dtype", "buffer_dtype", "keep_in_fp32_modules"})


class Settings(Section):
    """The whole file, as read by `shardproof.integrations.deepspeed.config.read`."""

    train_batch_size: int | None = Field(default=None, gt=0)
    train_micro_batch_size_per_gpu: int | None = Field(default=None, gt=0)
    gradient_accumulation_steps: int | None = Field(default=None, gt=0)
    managed_gradient_accumulation: bool = True
    gradient_clipping: float = Field(default=1.0, ge=0)  # DeepSpeed's own default since 0.18
    steps_per_print: int | None = Field(default=None, gt=0)
    dataloader_drop_last: bool = False
    communication_data_type: Literal["fp16", "fp32", "bf16", "none"] | None = None
    zero_optimization: Zero = Zero()
    fp16: Fp16 = Fp16()
    bf16: Bf16 = Field(default=Bf16(), validation_alias=AliasChoices("bf16", "bfloat16"))
    torch_autocast: Autocast = Autocast()
    optimizer: Named | None = None
    scheduler: Named | None = None
    checkpoint: Checkpoint = Checkpoint()
    data_types: DataTypes = DataTypes()

    unused = frozenset(
        "prescale_gradients gradient_predivide_factor disable_allgather dump_state disable_python_gc"
        " wall_clock_breakdown memory_breakdown seq_parallel_communication_data_type"
        " use_data_before_expert_parallelism log_level timers flops_profiler comms_logger aio monitor_config"
        " tensorboard wandb csv_monitor comet compile autotuning activation_checkpointing nebula datastates"
        " sparse_gradients".split()
    )
    silent = frozenset({"zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "vocabulary_size"})
    refused: ClassVar[dict[str, str]] = {
        "amp": "(NVIDIA Apex) is not supported: use bf16 or fp16",
        "gradient_allreduce_op": "'sum' is not supported: gradients are averaged; multiply the loss by the number of"
        " ranks",
        **dict.fromkeys(
            "tensor_parallel pipeline expert_parallel sequence_parallel_size data_parallel_size hybrid_engine"
            " compression_training data_efficiency curriculum_learning progressive_layer_drop elasticity"
            " weight_quantization quantize_training eigenvalue sparse_attention".split(),
            _NOT_BUILT,
        ),
    }

    @model_validator(mode="after")
    def _one_precision(self) -> Settings:
        if self.fp16.enabled and self.bf16.enabled:
            raise ValueError("fp16 and bf16 are both enabled; choose one")
        return self
