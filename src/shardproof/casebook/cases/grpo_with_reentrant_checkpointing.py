"""GRPO on a policy with a part that text prompts do not use, under DDP, with reentrant checkpointing.

DDP needs find_unused_parameters=True for the unused part, and with it reentrant checkpointing is an error:
"marked as ready twice". The answer in the thread is to use ZeRO instead.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from shardproof.casebook.case import ZERO, Case, Remedy
from shardproof.casebook.models import draw, log_probabilities, plain_sgd, qwen
from shardproof.casebook.run import Run
from shardproof.models.checkpointing import enable_checkpointing

LENGTH = 5


def model() -> dict[str, nn.Module]:
    policy = qwen()
    policy.visual = nn.Linear(16, 16)
    return {"policy": policy, "reference": copy.deepcopy(policy).requires_grad_(False)}


def batches(step: int, rank: int) -> list[Any]:
    """One prompt, for which four completions are sampled."""
    return [torch.randint(2, 53, (1, 4), generator=draw(step, rank)).repeat(4, 1)]


def train(run: Run) -> None:
    policy, reference = run.models["policy"], run.models["reference"]
    reentrant = run.options.get("use_reentrant", True)
    enable_checkpointing(run.module, reentrant)
    run.module.enable_input_require_grads()
    for _ in run.steps(2):
        for prompt in run.parts():
            run.module.eval()
            with torch.no_grad(), run.gathered(run.module.parameters()):
                text = run.module.generate(
                    prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=LENGTH, do_sample=True
                )
            run.module.train()
            reward = (text[:, -LENGTH:] % 2).float().sum(1)
            advantage = (reward - reward.mean()) / (reward.std() + 1e-4)
            with torch.no_grad():
                base = log_probabilities(reference(input_ids=text).logits, text)[:, -LENGTH:]
            new = log_probabilities(policy(input_ids=text).logits, text)[:, -LENGTH:]
            kl = (base - new).exp() - (base - new) - 1
            loss = (0.1 * kl - (new - new.detach()).exp() * advantage[:, None]).mean()
            run.backward(loss)
            run.record("text", text)
            run.record("loss", loss)
        run.step()


CASE = Case(
    users="run GRPO with DDP and reentrant checkpointing on a policy with a part that no prompt uses",
    classes=(2,),
    threads=("modelscope/ms-swift#3171", "modelscope/ms-swift#2590", "huggingface/trl#835", "huggingface/peft#313"),
    model=model,
    train=train,
    batches=batches,
    optimizer=plain_sgd,
    needs=("transformers",),
    remedies=(
        Remedy("find_unused_parameters=True", ("ddp",), {"find_unused_parameters": True}),
        Remedy(
            "find_unused_parameters=True and use_reentrant=False",
            ("ddp",),
            {"find_unused_parameters": True, "use_reentrant": False},
        ),
        Remedy("use_reentrant=False", ZERO, {"use_reentrant": False}),
        Remedy("register_fsdp_forward_method(model, 'generate')", ("fsdp2",), {"forward_methods": ("generate",)}),
        Remedy("GatheredParameters around generate", ("deepspeed-3",), {"gather": True}),
    ),
)
