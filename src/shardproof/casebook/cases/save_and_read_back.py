"""A model is trained and saved with `save_pretrained`, and loaded again with `from_pretrained`.

Without the right flag ZeRO-3 writes a file of a few kilobytes, in bfloat16 silently.
"""

from __future__ import annotations

import torch

from shardproof.casebook.case import Case, Remedy
from shardproof.casebook.models import next_token, plain, qwen, texts
from shardproof.casebook.run import Run


def train(run: Run) -> None:
    import transformers

    plain(run)
    whole = {"state_dict": run.state()} if "state_dict" in run.options else {}
    with run.gathered(run.module.parameters()):
        run.module.save_pretrained(run.folder, **whole)
    run.wait()  # transformers writes on rank 0
    again = transformers.AutoModelForCausalLM.from_pretrained(run.folder, dtype=torch.float32)
    with torch.no_grad():
        run.record("logits of the model that was saved", again(torch.arange(2, 20)[None]).logits)


CASE = Case(
    users="save the model with save_pretrained, on every rank, and load it again",
    classes=(47,),
    threads=("deepspeedai/DeepSpeed#3841", "huggingface/transformers#34524"),
    model=qwen,
    train=train,
    loss=next_token,
    batches=texts,
    needs=("transformers",),
    remedies=(
        Remedy("GatheredParameters around save_pretrained", ("deepspeed-3",), {"gather": True}),
        Remedy("save_pretrained(state_dict=whole)", ("fsdp2", "deepspeed-3"), {"state_dict": True}),
    ),
)
