"""The options of `shardproof plan`, `verify` and `doctor`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from shardproof.train.config import Finite, SftConfig, option

POWERS_OF_TWO = [1 << n for n in range(11)]


class PlanConfig(BaseModel):
    """What is to be trained, on what."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str = option("Model", "tiny", "model folder, config.json or hub id; its weights are not needed")
    tuner: Literal["full", "lora"] = option("Model", "full", "train every weight, or LoRA adapters only")
    lora_rank: int = option("Model", 16, "rank of the adapters", ge=1)
    target_modules: list[str] = option("Model", ["all-linear"], "names of the modules that get adapters")
    attn: str | None = option("Model", None, "attention: eager, sdpa, ... (default: the model's)")
    trust_remote_code: bool = option("Model", False, "run Python code that comes with the model")
    precision: Literal["fp32", "bf16", "fp16"] = option(
        "Model", "bf16", "compute in this dtype; masters and optimizer stay fp32"
    )

    gpus: list[int] = option("Machine", POWERS_OF_TWO, "numbers of processes to look at")
    gpu_memory: float = option("Machine", 80.0, "memory of each, in GB (10^9 bytes)", gt=0)
    headroom: float = option(
        "Machine", 0.1, "share of it that is kept for what is no tensor: libraries, fragments", ge=0, lt=1
    )
    tflops: float = option("Machine", 400.0, "what each computes in practice, in 10^12 operations a second", gt=0)
    bandwidth: float = option("Machine", 100.0, "what each sends in practice, in GB a second", gt=0)
    device: Literal["gpu", "cpu"] = option(
        "Machine", "gpu", "the engine keeps and exchanges buffers differently on CPUs"
    )

    stage: str = option("Run", "all", "stages to look at, such as 2,3")
    gradient_checkpointing: Literal["both", "yes", "no"] = option(
        "Run", "both", "compute activations again in backward"
    )
    per_device_batch_size: list[int] = option("Run", [1, 2, 4, 8], "rows a process holds at once")
    max_length: list[int] = option("Run", [2048], "tokens of a row")
    debug: bool = option("Run", False, "show tracebacks")


class VerifyConfig(SftConfig):
    """A run, and how it is compared with one process."""

    steps: int = option("Verify", 3, "steps to compare", ge=1)
    tolerance: Finite = option(
        "Verify", 1e-4, "largest difference, relative to the largest value of the parameter", ge=0
    )


class DoctorConfig(SftConfig):
    """A run that is looked at before it begins."""

    memory: float | None = option("Doctor", None, "memory of a process in GB (default: what is free)", gt=0)
    plan: bool = option("Doctor", True, "work out whether it fits")
    trial: bool = option("Doctor", True, "run two steps of it")
