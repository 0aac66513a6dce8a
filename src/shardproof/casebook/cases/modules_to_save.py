"""LoRA with a head that is trained in full (`modules_to_save`), and the adapter's weights at the end.

The copy that PEFT makes of the head becomes an empty module where parameters are partitioned: saved as [0], or an
assertion on its status.
"""

from __future__ import annotations

from typing import Any

from shardproof.casebook.case import Case
from shardproof.casebook.models import next_token, plain, qwen, texts, with_lora
from shardproof.casebook.run import Run


def model() -> Any:
    return with_lora(qwen(), modules_to_save=["lm_head"])


def train(run: Run) -> None:
    import peft

    plain(run)
    adapter = peft.get_peft_model_state_dict(run.module, state_dict=run.state())
    for name, value in adapter.items():
        run.record(f"adapter {name}", value)


CASE = Case(
    users="train LoRA adapters and, with modules_to_save, the whole head",
    classes=(24,),
    threads=("huggingface/peft#2450", "huggingface/peft#2603", "deepspeedai/DeepSpeed#7669"),
    model=model,
    train=train,
    loss=next_token,
    batches=texts,
    needs=("transformers", "peft"),
)
