"""A LoRA adapter is trained and saved with `save_pretrained`, as the model card says; the file is read back.

Under ZeRO-3 every tensor in it has the shape [0], which is found at load time, when the run is over.
"""

from __future__ import annotations

from typing import Any

from shardproof.casebook.case import Case, Remedy
from shardproof.casebook.models import next_token, plain, qwen, texts, with_lora
from shardproof.casebook.run import Run


def model() -> Any:
    return with_lora(qwen())


def train(run: Run) -> None:
    import safetensors.torch

    plain(run)
    whole = {"state_dict": run.state()} if "state_dict" in run.options else {}
    folder = run.folder / str(run.engine.rank)  # one per rank: PEFT writes on every rank that calls it
    with run.gathered(run.module.parameters()):
        run.module.save_pretrained(folder, **whole)
    for name, value in safetensors.torch.load_file(folder / "adapter_model.safetensors").items():
        run.record(f"saved {name}", value)


CASE = Case(
    users="save a LoRA adapter with save_pretrained, on every rank",
    classes=(46,),
    threads=("huggingface/peft#2500", "huggingface/peft#1328", "OpenRLHF/OpenRLHF#651"),
    model=model,
    train=train,
    loss=next_token,
    batches=texts,
    needs=("transformers", "peft", "safetensors"),
    remedies=(
        Remedy("GatheredParameters around save_pretrained", ("deepspeed-3",), {"gather": True}),
        Remedy("save_pretrained(state_dict=whole)", ("fsdp2", "deepspeed-3"), {"state_dict": True}),
    ),
)
