"""Promise: what is scored or embedded has, beside longer rows, what it has alone; or its model is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardproof.errors import ConfigError
from shardproof.train.model.right_padding import check_padding

IDS = torch.tensor([5, 9, 3, 7, 2, 8, 11, 4])
SMALL = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0}
HEADS = {"num_attention_heads": 4}
XLNET = {"vocab_size": 16, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "pad_token_id": 0}


def model_of(kind: str, config: dict[str, Any], auto: str) -> Any:
    import transformers

    torch.manual_seed(0)
    return getattr(transformers, f"AutoModel{auto}").from_config(transformers.AutoConfig.for_model(kind, **config))


@pytest.mark.parametrize("auto", ["", "ForSequenceClassification"])
@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_most_models_do_not_look_at_padding(kind: str, auto: str) -> None:
    model = model_of(kind, {**SMALL, **HEADS}, auto).train()
    check_padding(model, IDS, "")
    assert model.training


@pytest.mark.parametrize(
    ("kind", "config", "auto"),
    [
        ("xlnet", XLNET, "ForSequenceClassification"),  # by the last place, whatever stands there
        ("fnet", SMALL, "ForSequenceClassification"),
        ("fnet", SMALL, ""),
    ],
)
def test_others_are_refused(kind: str, config: dict[str, Any], auto: str) -> None:
    with pytest.raises(ConfigError, match=r"treats a row beside a longer one differently.* Take another model"):
        check_padding(model_of(kind, config, auto), IDS, "Take another model.")
