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
    """The model to train, the machine, and the run."""

    model_config = ConfigDict(extra="forbid")

    model: Named = option(
        "Model", "", "folder or hub id of a model, or just its config.json: weights are not needed; 'tiny' to try it"
    )
    new_blocks: int = option("Model", 0, "blocks added to the language model; only they are trained", ge=0)
    tuner: Tuner = option("Model", "full", "train every weight, or this kind of adapters", values="|".join(TUNERS))
    tuner_arguments: TunerArguments = option("Model", {}, "arguments for such a kind, such as boft_block_size=4")
    lora_rank: int = option("Model", 16, "rank of the adapters", ge=1)
    target_modules: list[str] = option("Model", ["all-linear"], "modules that get adapters, as in sft")
    target_parameters: list[str] = option("Model", [], "parameters that also get adapters, as in sft")
    dora: bool = option("Model", False, "train the magnitude of weights separately from their direction")
    quantize: Literal["nf4", "fp4"] | None = option("Model", None, "hold the frozen weights of blocks in four bits")
    modules_to_save: list[str] = option("Model", [], "modules that are fully trained besides the adapters")
    lora_dropout: float = option("Model", 0.0, "dropout on the input of the adapters", ge=0, lt=1)
    task: Task = option("Model", "causal_lm", "train to write answers, to label rows, to embed texts, or to rank them")
    num_labels: int | None = option("Model", None, "with --task seq_cls: number of labels", ge=1)
    attn: str | None = option(
        "Model", None, "attention: eager, sdpa, varlen, ... (default: the model's; varlen for packed rows)"
    )
    trust_remote_code: bool = option("Model", False, "run Python code that comes with the model")
    precision: Literal["fp32", "bf16", "fp16"] = option(
        "Model", "bf16", "dtype for computing; master weights and optimizer state stay fp32"
    )
    reduce_dtype: Literal["fp32", "bf16"] = option(
        "Model", "fp32", "dtype in which gradients are reduced across processes"
    )
    freeze: Names = option("Model", [], "parts that are not trained: llm, vision, audio, aligner, talker")
    train_parts: Names | None = option("Model", None, "parts that are trained (default: all but the talker)")
    freeze_parameters: list[str] = option("Model", [], "further parameters that are not trained, as in sft")
    trainable_parameters: list[str] = option("Model", [], "parameters that are trained nevertheless, as in sft")
    enable_audio_output: bool | None = option(
        "Model", None, "with or without the modules that produce speech (default: as the model's config says)"
    )

    gpus: list[int] = option("Machine", POWERS_OF_TWO, "numbers of processes to consider")
    nodes: int = option("Machine", 1, "machines that these are evenly spread over", ge=1)
    gpu_memory: float = option("Machine", 80.0, "memory of each, in GB (10^9 bytes)", gt=0)
    headroom: float = option(
        "Machine", 0.1, "share of it reserved for everything that is not a tensor: libraries, fragmentation", ge=0, lt=1
    )
    tflops: float = option("Machine", 400.0, "what each computes in practice, in 10^12 operations per second", gt=0)
    bandwidth: float = option("Machine", 100.0, "what each sends in practice, in GB per second", gt=0)
    node_bandwidth: float = option(
        "Machine", 25.0, "what a machine sends to others in practice, over all its processes, in GB per second", gt=0
    )
    host_memory: float = option("Machine", 128.0, "host memory per process, in GB, for --offload", gt=0)
    host_bandwidth: float = option(
        "Machine", 20.0, "transfers between each and the host, and within host memory, in GB per second", gt=0
    )
    disk: float = option("Machine", 1000.0, "space on local disks per process, in GB, for --offload nvme", gt=0)
    disk_bandwidth: float = option("Machine", 3.0, "what each reads and writes there, in GB per second", gt=0)
    device: Literal["gpu", "cpu"] = option(
        "Machine", "gpu", "kind of device; on CPUs the engine keeps and exchanges buffers differently"
    )

    stage: str = option("Run", "all", "stages to consider, such as 2,3")
    offload: list[Offload] = option("Run", ["none"], "kinds of offloading to consider, as in sft")
    keep_gathered: Finite = option("Run", 0.0, "GB of gathered weights that each process keeps between uses", ge=0)
    gradient_checkpointing: list[CheckpointingWord] = option(
        "Run",
        ["both"],
        "kinds of gradient checkpointing to consider, as in sft; both: no and yes",
        values="no|yes|both|selective|N",
    )
    checkpointing_reentrant: bool = option("Run", False, "use the reentrant variant of gradient checkpointing")
    activation_offloading: bool = option("Run", False, "keep activations in host memory between forward and backward")
    per_device_batch_size: list[int] = option("Run", [1, 2, 4, 8], "rows a process holds at once")
    gradient_accumulation_steps: int = option("Run", 1, "micro-batches per step", ge=1)
    max_length: list[int] = option("Run", [2048], "tokens per row")
    files: list[str] = option(
        "Run",
        [],
        "files in each row: image=WIDTHxHEIGHT, audio=SECONDS, video=WIDTHxHEIGHTxFRAMES (default: rows are text)",
    )
    packing: bool = option("Run", False, "pack several rows into one of --max-length")
    chunked_loss: bool = option(
        "Run", False, "compute the loss in chunks, so that the logits of all tokens are never held at once"
    )
    sequence_parallel: int = option("Run", 1, "split each row across this many processes", ge=1)
    shard_group: int | None = option(
        "Run",
        None,
        "processes that hold one copy of the model between them (default: all, or those of a machine)",
        ge=1,
    )
    optimizer: str = option("Run", "adamw", "adamw, adamw_8bit, muon, galore, adafactor, or a plugin's")
    optimizer_arguments: Arguments = option("Run", {}, "arguments for the optimizer, such as rank=64 (galore)")
    stochastic_rounding: bool = option(
        "Run", False, "no fp32 master weights: weights, gradients and AdamW's state are bf16"
    )
    external_plugins: list[str] = option("Run", [], "Python files that register --optimizer")
    debug: bool = option("Run", False, "show tracebacks")

    @field_validator("gradient_checkpointing", mode="before")
    @classmethod
    def _alone(cls, words: Any) -> Any:
        """Without a value it is on, as in sft."""
        return ["yes"] if words == [] else words


class Comparison(BaseModel):
    """How a run is compared with a single process."""

    steps: int = option("Verify", 3, "steps to compare", ge=1)
    tolerance: Finite | None = option(
        "Verify",
        None,
        "largest difference, relative to the largest value of the parameter (default: 1e-4; with --precision fp16 5e-3;"
        " with bf16, or with --optimizer muon, 5e-2)",
        ge=0,
    )


class VerifyConfig(Comparison, SftConfig):
    """An `sft` run and the options of its comparison."""


class RlhfVerifyConfig(Comparison, RlhfConfig):
    """An `rlhf` run and the options of its comparison."""


class Look(BaseModel):
    """The options of the checks before a run."""

    memory: float | None = option("Doctor", None, "memory of a process in GB (default: what is free)", gt=0)
    plan: bool = option("Doctor", True, "compute whether it fits")
    trial: bool = option("Doctor", True, "run two steps of it")


class DoctorConfig(Look, SftConfig):
    """An `sft` run to check before it starts."""


class RlhfDoctorConfig(Look, RlhfConfig):
    """An `rlhf` run to check before it starts."""
