"""Ranks generate different numbers of tokens, then train.

Under ZeRO-3 and FSDP each token is a set of collectives: the rank that finishes first leaves the others waiting, unless
it continues with dummy forward passes (`synced_gpus=True`).
"""

from __future__ import annotations

from typing import Any

import torch

from shardproof.casebook.case import Case, Remedy
from shardproof.casebook.models import next_token, qwen, texts
from shardproof.casebook.run import Run


def batches(step: int, rank: int) -> list[Any]:
    (part,) = texts(step, rank)
    return [{**part, "length": 1 + (step + 2 * rank) % 4}]


def train(run: Run) -> None:
    for _ in run.steps(2):
        for part in run.parts():
            prompt = part["input_ids"][:, :4]
            with torch.no_grad(), run.gathered(run.module.parameters()):
                text = run.module.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=part["length"],
                    do_sample=False,
                    synced_gpus="synced" in run.options,
                )
            loss = next_token(run, part)
            run.backward(loss)
            run.record("text", text)
            run.record("loss", loss)
        run.step()


CASE = Case(
    users="generate texts of different lengths on each rank between training steps",
    classes=(41,),
    threads=("deepspeedai/DeepSpeed#860", "huggingface/transformers#18281", "deepspeedai/DeepSpeed#8262"),
    model=qwen,
    train=train,
    batches=batches,
    diverges=True,
    needs=("transformers",),
    remedies=(
        Remedy("synced_gpus=True", ("deepspeed-3",), {"synced": True}),
        Remedy(
            "synced_gpus=True and register_fsdp_forward_method(model, 'generate')",
            ("fsdp2",),
            {"synced": True, "forward_methods": ("generate",)},
        ),
        Remedy("GatheredParameters around generate", ("deepspeed-3",), {"gather": True}),
    ),
)
