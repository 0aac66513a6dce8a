"""A LoRA run is resumed from the adapter alone; the frozen base comes from the base model.

Strict loading of a whole model from an adapter's file fails: "Missing key(s) in state_dict". An engine that saved only
what its optimizer owns restores the frozen weights as random values, silently.
"""

from __future__ import annotations

from typing import Any

import torch

from shardproof.casebook.case import Case
from shardproof.casebook.models import next_token, plain, qwen, texts, with_lora
from shardproof.casebook.run import Key, Run


def model() -> Any:
    return with_lora(qwen())


def train(run: Run) -> None:
    plain(run)
    adapter = {name: value for name, value in run.state().items() if "lora_" in name}
    run.found = {Key(f"first run, {key.what}", *key[1:]): value for key, value in run.found.items()}
    torch.manual_seed(7)  # the same base
    run.prepare({"": model()})
    run.load(adapter)
    plain(run)


CASE = Case(
    users="resume a LoRA run from the adapter's weights",
    classes=(51, 52),
    threads=("huggingface/peft#746", "modelscope/ms-swift#1207", "deepspeedai/DeepSpeed#3090"),
    model=model,
    train=train,
    loss=next_token,
    batches=texts,
    needs=("transformers", "peft"),
)
