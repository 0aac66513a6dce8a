"""A script written for DeepSpeed, on our engine: `import shardproof.integrations.deepspeed as deepspeed`.

Everything here has DeepSpeed's names and semantics; docs/moving-from-deepspeed.md goes through it line by line.
"""

from shardproof.integrations.deepspeed import accelerator, checkpointing, comm, ops, utils, zero
from shardproof.integrations.deepspeed import schedules as lr_schedules
from shardproof.integrations.deepspeed.accelerator import get_accelerator
from shardproof.integrations.deepspeed.begin import add_config_arguments, initialize
from shardproof.integrations.deepspeed.comm import init_distributed
from shardproof.integrations.deepspeed.engine import DeepSpeedEngine

__all__ = [
    "DeepSpeedEngine",
    "accelerator",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "lr_schedules",
    "ops",
    "utils",
    "zero",
]
