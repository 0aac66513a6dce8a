"""deepspeed.ops: the optimizers that scripts import by name."""

from shardproof.integrations.deepspeed.ops import adam

__all__ = ["adam"]
