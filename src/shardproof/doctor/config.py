"""The options of `shardproof plan`, `verify` and `doctor`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from shardproof.train.options.config import SftConfig
from shardproof.train.options.option import Arguments, Finite, Named, Names, Task, option
from shardproof.train.options.rlhf_config import RlhfConfig
from shardproof.train.options.tuners import TUNERS, Tuner, TunerArguments

POWERS_OF_TWO = [1 << n for n in range(11)]
Offload = Literal["none", "optimizer", "all", "nvme"]
CheckpointingWord = Literal["both", "yes", "no", "selective"] | Annotated[int, Field(ge=0)]


class PlanConfig(BaseModel):
    """What is to be trained, on what."""

    model_config = ConfigDict(extra="forbid")

    model: Named = option(
        "Model", "", "folder or hub id of a model, or its config.json alone: weights are not needed; 'tiny' to try"
    )
    new_blocks: int = option("Model", 0, "more blocks in the language model, which alone are trained", ge=0)
    tuner: Tuner = option("Model", "full", "train every weight, or which adapters", values="|".join(TUNERS))
    tuner_arguments: TunerArguments = option("Model", {}, "what such a kind takes, such as boft_block_size=4")
    lora_rank: int = option("Model", 16, "rank of the adapters", ge=1)
    target_modules: list[str] = option("Model", ["all-linear"], "modules that get adapters, by the words of sft")
    target_parameters: list[str] = option("Model", [], "matrices that get adapters, too, by the words of sft")
    dora: bool = option("Model", False, "train the length of each row of a weight apart from its direction")
    quantize: Literal["nf4", "fp4"] | None = option("Model", None, "keep the frozen weights of blocks in four bits")
    modules_to_save: list[str] = option("Model", [], "names of modules that are trained in full beside the adapters")
    lora_dropout: float = option("Model", 0.0, "dropout in front of the adapters", ge=0, lt=1)
    task: Task = option("Model", "causal_lm", "learn to write answers, labels of rows, to embed texts, to rank")
    num_labels: int | None = option("Model", None, "with --task seq_cls: how many labels there are", ge=1)
    attn: str | None = option(
        "Model", None, "attention: eager, sdpa, varlen, ... (default: the model's; of packed rows, varlen)"
    )
    trust_remote_code: bool = option("Model", False, "run Python code that comes with the model")
    precision: Literal["fp32", "bf16", "fp16"] = option(
        "Model", "bf16", "compute in this dtype; masters and optimizer stay fp32"
    )
    reduce_dtype: Literal["fp32", "bf16"] = option("Model", "fp32", "add gradients over processes in this dtype")
    freeze: Names = option("Model", [], "parts that are not trained: llm, vision, audio, aligner, talker")
    train_parts: Names | None = option("Model", None, "parts that are trained (default: all but the talker)")
    freeze_parameters: list[str] = option("Model", [], "parameters that are not trained either, by their names")
    trainable_parameters: list[str] = option("Model", [], "parameters that are trained all the same, by their names")
    enable_audio_output: bool | None = option(
        "Model", None, "with the modules that speak, or without (default: as the model's config says)"
    )

    gpus: list[int] = option("Machine", POWERS_OF_TWO, "numbers of processes to look at")
    nodes: int = option("Machine", 1, "machines that these are spread over evenly", ge=1)
    gpu_memory: float = option("Machine", 80.0, "memory of each, in GB (10^9 bytes)", gt=0)
    headroom: float = option(
        "Machine", 0.1, "share of it that is kept for what is no tensor: libraries, fragments", ge=0, lt=1
    )
    tflops: float = option("Machine", 400.0, "what each computes in practice, in 10^12 operations a second", gt=0)
    bandwidth: float = option("Machine", 100.0, "what each sends in practice, in GB a second", gt=0)
    node_bandwidth: float = option(
        "Machine", 25.0, "what a machine sends to others in practice, for all of its processes, in GB a second", gt=0
    )
    host_memory: float = option("Machine", 128.0, "memory of the host for each process, in GB, for --offload", gt=0)
    host_bandwidth: float = option(
        "Machine", 20.0, "what moves between each and the host, and in the host's memory, in GB a second", gt=0
    )
    disk: float = option("Machine", 1000.0, "room on local disks for each process, in GB, for --offload nvme", gt=0)
    disk_bandwidth: float = option("Machine", 3.0, "what each reads and writes there, in GB a second", gt=0)
    device: Literal["gpu", "cpu"] = option(
        "Machine", "gpu", "the engine keeps and exchanges buffers differently on CPUs"
    )

    stage: str = option("Run", "all", "stages to look at, such as 2,3")
    offload: list[Offload] = option("Run", ["none"], "what lives elsewhere, by the words of sft: some of these")
    keep_gathered: Finite = option("Run", 0.0, "GB of gathered weights that stay from one use to the next", ge=0)
    gradient_checkpointing: list[CheckpointingWord] = option(
        "Run",
        ["both"],
        "compute activations again in backward, by the words of sft: some of these; both: no and yes",
        values="no|yes|both|selective|N",
    )
    checkpointing_reentrant: bool = option("Run", False, "the reentrant kind of it")
    activation_offloading: bool = option("Run", False, "the host holds activations between forward and backward")
    per_device_batch_size: list[int] = option("Run", [1, 2, 4, 8], "rows a process holds at once")
    gradient_accumulation_steps: int = option("Run", 1, "micro-batches a step", ge=1)
    max_length: list[int] = option("Run", [2048], "tokens of a row")
    files: list[str] = option(
        "Run",
        [],
        "files in each row: image=WIDTHxHEIGHT, audio=SECONDS, video=WIDTHxHEIGHTxFRAMES (default: rows are text)",
    )
    packing: bool = option("Run", False, "rows are filled up with others, none of which sees another")
    chunked_loss: bool = option("Run", False, "never hold the logits of all tokens")
    sequence_parallel: int = option("Run", 1, "so many processes share each row and hold a part of it", ge=1)
    shard_group: int | None = option(
        "Run",
        None,
        "so many processes hold a copy of the model between them (default: all, or those of a machine)",
        ge=1,
    )
    optimizer: str = option("Run", "adamw", "adamw, adamw_8bit, muon, galore, adafactor, or a plugin's")
    optimizer_arguments: Arguments = option("Run", {}, "what such an optimizer takes, such as rank=64 (galore)")
    stochastic_rounding: bool = option("Run", False, "no fp32 masters: weights, gradients and AdamW's state are bf16")
    external_plugins: list[str] = option("Run", [], "Python files that register --optimizer")
    debug: bool = option("Run", False, "show tracebacks")

    @field_validator("gradient_checkpointing", mode="before")
    @classmethod
    def _alone(cls, words: Any) -> Any:
        """Without a word it is on, as in sft."""
        return ["yes"] if words == [] else words


class Comparison(BaseModel):
    """How a run is compared with one process."""

    steps: int = option("Verify", 3, "steps to compare", ge=1)
    tolerance: Finite | None = option(
        "Verify",
        None,
        "largest difference, relative to the largest value of the parameter (default: 1e-4; with --precision fp16 5e-3;"
        " with bf16, or with --optimizer muon, 5e-2)",
        ge=0,
    )


class VerifyConfig(Comparison, SftConfig):
    """A run of `sft`, and how it is compared."""


class RlhfVerifyConfig(Comparison, RlhfConfig):
    """A run of `rlhf`, and how it is compared."""


class Look(BaseModel):
    """What is looked at before a run begins."""

    memory: float | None = option("Doctor", None, "memory of a process in GB (default: what is free)", gt=0)
    plan: bool = option("Doctor", True, "work out whether it fits")
    trial: bool = option("Doctor", True, "run two steps of it")


class DoctorConfig(Look, SftConfig):
    """A run of `sft` that is looked at before it begins."""


class RlhfDoctorConfig(Look, RlhfConfig):
    """A run of `rlhf` that is looked at before it begins."""
