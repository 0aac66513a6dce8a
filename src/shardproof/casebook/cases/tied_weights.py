"""Embedding and head are one tensor: they must stay one, be counted once, and be saved once.

A gather that clones breaks the tie; the head is then saved in addition to the embedding, or the loader misses it.
"""

from __future__ import annotations

from typing import Any

from shardproof.casebook.case import Case
from shardproof.casebook.models import next_token, plain, qwen, texts
from shardproof.casebook.run import Run


def model() -> Any:
    return qwen(tie_word_embeddings=True)


def train(run: Run) -> None:
    plain(run)
    module = run.module
    run.record("head is embedding", bool(module.lm_head.weight is module.model.embed_tokens.weight))
    run.record("parameters", sorted(name for name, _ in module.named_parameters()))
    whole = run.state()
    run.record("head", whole["lm_head.weight"])


CASE = Case(
    users="train a model whose head is its embedding",
    classes=(53,),
    threads=("hiyouga/LlamaFactory#10560", "huggingface/accelerate#3870"),
    model=model,
    train=train,
    loss=next_token,
    batches=texts,
    needs=("transformers",),
)
