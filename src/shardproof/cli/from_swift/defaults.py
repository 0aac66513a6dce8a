"""Defaults of ms-swift that differ from ours, as our options."""

from __future__ import annotations

# The defaults of `swift sft` and `swift rlhf`.
DEFAULTS = {
    "tuner": "lora",
    "epochs": "3",
    "per_device_batch_size": "1",
    "weight_decay": "0.1",
    "adam_beta2": "0.95",
    "warmup_ratio": "0",
    "gradient_checkpointing": "yes",
    "lora_rank": "8",
    "lora_dropout": "0.05",
    "logging_steps": "5",
    "save_steps": "500",
    "report_to": "tensorboard",
    "bad_rows": "skip",
    "stage": "0",
    "precision": "bf16",
}
_GENERATING = {"temperature": "0.9", "max_completion_length": "512"}
OF_RLHF = {  # by algorithm
    "simpo": {"beta": "2.0", "simpo_gamma": "1.0", "cpo_alpha": "1.0"},
    "grpo": {
        **_GENERATING,
        "beta": "0.04",
        "num_generations": "8",
        "loss_type": "grpo",
        "top_p": "0.9",
        "top_k": "50",
    },
    "ppo": {**_GENERATING, "beta": "0.05", "num_iterations": "4"},
    "gkd": {**_GENERATING, "beta": "0.5"},
}
_PAIRS = {"max_positives": "1", "max_negatives": "7"}
OF_TASK = {"reranker": _PAIRS, "generative_reranker": _PAIRS}
# Defaults that do not apply if another option is given in their place.
INSTEAD_OF = {
    "warmup_ratio": "warmup_steps",
    "per_device_batch_size": "global_batch_size",
    "save_steps": "save_strategy",
}


def takes_betas(values: dict[str, list[str]]) -> bool:
    """Whether the optimizer of a command takes AdamW's betas: muon only if it leaves parameters to AdamW."""
    optimizer = values.get("optimizer", ["adamw"])[0]
    return optimizer in ("adamw", "adamw_8bit", "galore") or (optimizer == "muon" and values["tuner"] == ["full"])


def is_on(values: dict[str, list[str]], name: str) -> bool:
    return values.get(name, ["no"])[:1] not in (["no"], ["false"])


def answers(values: dict[str, list[str]]) -> bool:
    """Whether an evaluation generates answers."""
    return is_on(values, "predict_with_generate")


def holds_out(values: dict[str, list[str]]) -> bool:
    """Whether there are rows to evaluate on."""
    return bool({"val_dataset", "cached_val_dataset"} & set(values)) or any(map(float, values.get("val_split", [])))
