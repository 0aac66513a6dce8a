"""The methods of PEFT on a tiny Llama: what each adds to a model, and what it does with the base's weights.

Left out are those whose numbers depend on how rows are put together (Lily routes by the mean of a batch), that draw
numbers in training (PVeRA, X-LoRA, Shadow) or want to know a row's task (Poly, multitask prompts).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from distributed.harness import Case
from zero.language_models import texts, tiny, train_step

LAYERS = ["q_proj", "v_proj"]
ON_LAYERS: dict[str, dict[str, Any]] = {
    "LoraConfig": {"r": 2},
    "AdaLoraConfig": {"init_r": 3, "target_r": 2, "total_step": 10},
    "LoHaConfig": {"r": 2},
    "LoKrConfig": {"r": 2},
    "OFTConfig": {"oft_block_size": 4, "r": 0},
    "BOFTConfig": {"boft_block_size": 4},
    "VeraConfig": {"r": 2},
    "FourierFTConfig": {"n_frequency": 10},
    "HRAConfig": {"r": 2},
    "VBLoRAConfig": {"r": 2, "num_vectors": 8, "vector_length": 4, "topk": 2},
    "MissConfig": {"r": 2},
    "RandLoraConfig": {"r": 2},
    "ShiraConfig": {"r": 2},
    "C3AConfig": {"block_size": 4},
    "RoadConfig": {"group_size": 2},
    "DeloraConfig": {"r": 2},
    "GraloraConfig": {"r": 2, "gralora_k": 1},
    "WaveFTConfig": {"n_frequency": 10},
    "OSFConfig": {},
    "AdamssConfig": {"r": 4, "num_subspaces": 2},
    "BeftConfig": {},
    "DeftConfig": {"r": 2},
    "GloraConfig": {"r": 2},
    "HiraConfig": {"r": 2},
    "PeanutConfig": {"r": 2},
    "PsoftConfig": {"r": 2},
    "SupertuningConfig": {"sparsity": 0.5},
    "TinyLoraConfig": {"r": 2, "u": 4},
    "UniLoraConfig": {"r": 2, "theta_d_length": 16},
    "FrodConfig": {"progressbar": False},
}
IN_DOUBLE = ("RandLoraConfig", "DeloraConfig")  # they divide by norms: in fp32 rounding grows to 5e-5 in three steps
PROMPTS: dict[str, dict[str, Any]] = {
    "PromptTuningConfig": {"num_virtual_tokens": 3},
    "PromptEncoderConfig": {"num_virtual_tokens": 3, "encoder_hidden_size": 8},
    "PrefixTuningConfig": {"num_virtual_tokens": 3},
    "CartridgeConfig": {"num_virtual_tokens": 3},
    "CPTConfig": {"cpt_token_ids": [3, 4, 5, 6], "cpt_mask": [1] * 4, "cpt_tokens_type_mask": [1, 2, 3, 4]},
    "AdaptionPromptConfig": {"adapter_len": 2, "adapter_layers": 2},
}
OF_LORA: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "bias": {"bias": "lora_only"},
    "lora_bias": {"lora_bias": True},
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"},
    "embedding": {"target_modules": [*LAYERS, "embed_tokens"]},
    "head": {"target_modules": [*LAYERS, "lm_head"]},
    "tokens": {"trainable_token_indices": {"embed_tokens": [3, 5]}},
    "layers_again": {"layer_replication": [(0, 2), (1, 3)]},
}


def adapted(kind: str, **options: Any) -> nn.Module:
    import peft

    model = tiny("Llama", tie_word_embeddings=options.pop("tied", False))
    torch.manual_seed(0)
    model = peft.get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", **options)).train()
    return model.double() if kind in IN_DOUBLE else model


CASES = {
    kind.removesuffix("Config").lower(): functools.partial(adapted, kind, target_modules=LAYERS, **options)
    for kind, options in ON_LAYERS.items()
}
CASES |= {kind.removesuffix("Config").lower(): functools.partial(adapted, kind, **o) for kind, o in PROMPTS.items()}
CASES |= {
    f"lora_{name}": functools.partial(adapted, "LoraConfig", **{"r": 2, "target_modules": LAYERS, **options})
    for name, options in OF_LORA.items()
}
CASES |= {
    "ia3": functools.partial(
        adapted, "IA3Config", target_modules=[*LAYERS, "down_proj"], feedforward_modules=["down_proj"]
    ),
    "ln_tuning": functools.partial(adapted, "LNTuningConfig", target_modules=["input_layernorm"]),
    "trainable_tokens": functools.partial(adapted, "TrainableTokensConfig", token_indices=[3, 5, 7]),
    "trainable_tokens_tied": functools.partial(adapted, "TrainableTokensConfig", token_indices=[3, 5, 7], tied=True),
}
CASES = {name: Case(build, train_step, rows=texts, tolerance=2e-6) for name, build in CASES.items()}
