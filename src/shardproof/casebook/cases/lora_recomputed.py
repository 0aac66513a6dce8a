"""LoRA with non-reentrant checkpointing: the recomputation compares the shapes of what it saves.

Under ZeRO-3 a frozen weight is partitioned again by then: "Recomputed values ... have different metadata ...
recomputed {'shape': [0]}".
"""

from __future__ import annotations

from typing import Any

from shardproof.casebook.case import Case, Remedy
from shardproof.casebook.models import next_token, plain, qwen, texts, with_lora
from shardproof.casebook.run import Run
from shardproof.models.checkpointing import enable_checkpointing


def model() -> Any:
    return with_lora(qwen())


def train(run: Run) -> None:
    reentrant = run.options.get("use_reentrant", False)
    enable_checkpointing(run.module, reentrant)
    run.module.enable_input_require_grads()
    run.module.train()
    plain(run)


CASE = Case(
    users="train LoRA with non-reentrant checkpointing",
    classes=(15,),
    threads=("huggingface/transformers#47254", "huggingface/trl#5217", "huggingface/transformers#34928"),
    model=model,
    train=train,
    loss=next_token,
    batches=texts,
    needs=("transformers", "peft"),
    remedies=(Remedy("use_reentrant=True", ("deepspeed-3",), {"use_reentrant": True}),),
)
