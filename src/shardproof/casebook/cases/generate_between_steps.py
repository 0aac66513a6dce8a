"""Generation in the middle of training, then training goes on.

ZeRO-3 learns the order of modules and prefetches by it; after generation, or after hooks were removed and restored, the
trace is stale: "pop from an empty deque", "expected the next 4 parameters in the parameter fetch queue".
"""

from __future__ import annotations

from typing import Any

import torch

from shardproof.casebook.case import Case, Remedy
from shardproof.casebook.models import next_token, qwen, texts
from shardproof.casebook.run import Run


def model() -> Any:
    return qwen(tie_word_embeddings=True)


def train(run: Run) -> None:
    prompt = torch.tensor([[1, 7, 9, 4], [1, 5, 8, 3]])
    every = torch.ones_like(prompt)
    for _ in run.steps(3):
        for part in run.parts():
            loss = next_token(run, part)
            run.backward(loss)
            run.record("loss", loss)
        run.step()
        run.module.eval()
        with torch.no_grad(), run.gathered(run.module.parameters()):
            text = run.module.generate(prompt, attention_mask=every, max_new_tokens=4, do_sample=False)
        run.module.train()
        run.record("text", text)


CASE = Case(
    users="generate text between training steps",
    classes=(17,),
    threads=("huggingface/trl#1543", "huggingface/transformers#23693"),
    model=model,
    train=train,
    batches=texts,
    needs=("transformers",),
    remedies=(
        Remedy("register_fsdp_forward_method(model, 'generate')", ("fsdp2",), {"forward_methods": ("generate",)}),
        Remedy("GatheredParameters around generate", ("deepspeed-3",), {"gather": True}),
    ),
)
