"""LoRA with reentrant checkpointing: no input of the checkpoint requires a gradient, unless it is made to.

Without `enable_input_require_grads` it is an error in plain torch too, or lora_B silently stays zero. With it, every
adapter must move, at any stage.
"""

from __future__ import annotations

from typing import Any

from shardproof.casebook.case import PEERS, Case, Remedy
from shardproof.casebook.models import next_token, plain, qwen, texts, with_lora
from shardproof.casebook.run import Run
from shardproof.models.checkpointing import enable_checkpointing


def model() -> Any:
    return with_lora(qwen())


def train(run: Run) -> None:
    enable_checkpointing(run.module, run.options.get("use_reentrant", True))
    run.module.enable_input_require_grads()
    run.module.train()
    plain(run)
    moved = [name for name, value in run.state().items() if "lora_B" in name and value.any()]
    run.record("adapters that moved", moved)


CASE = Case(
    users="train LoRA with reentrant checkpointing",
    classes=(16,),
    threads=("huggingface/transformers#29982", "huggingface/peft#1142", "deepspeedai/DeepSpeed#3339"),
    model=model,
    train=train,
    loss=next_token,
    batches=texts,
    needs=("transformers", "peft"),
    remedies=(
        Remedy(
            "use_reentrant=False",
            PEERS,
            {"use_reentrant": False},
        ),
    ),
)
