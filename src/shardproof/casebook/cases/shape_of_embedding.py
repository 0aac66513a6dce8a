"""Code reads the size of the vocabulary off the embedding, counts parameters, reshapes logits by it.

Under ZeRO-3 the embedding has 0 rows: "shape '[-1, 0]' is invalid"; resizing "from 0" follows.
"""

from __future__ import annotations

from typing import Any

from torch.nn import functional as F

from shardproof.casebook.case import Case, Remedy
from shardproof.casebook.models import qwen, texts
from shardproof.casebook.run import Run


def model() -> Any:
    """Three tokens are added before training, as users do for chat templates."""
    found = qwen()
    found.resize_token_embeddings(56, mean_resizing=False)
    return found


def train(run: Run) -> None:
    embedding = run.module.get_input_embeddings()
    for _ in run.steps(3):
        for part in run.parts():
            with run.gathered(run.module.parameters()):
                vocabulary = embedding.weight.shape[0]
                size = sum(p.numel() for p in run.module.parameters())
            tokens = part["input_ids"]
            logits = run.model(input_ids=tokens).logits[:, :-1].reshape(-1, vocabulary)
            loss = F.cross_entropy(logits, tokens[:, 1:].flatten())
            run.backward(loss)
            run.record("size", size)
            run.record("loss", loss)
        run.step()


CASE = Case(
    users="read the size of the vocabulary off the embedding's weight",
    classes=(19,),
    threads=("huggingface/transformers#25241", "huggingface/transformers#26112", "huggingface/transformers#32196"),
    model=model,
    train=train,
    batches=texts,
    needs=("transformers",),
    remedies=(Remedy("GatheredParameters around the shapes", ("deepspeed-3",), {"gather": True}),),
)
