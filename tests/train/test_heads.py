"""Promise: what gives neither vectors nor scores is not trained for them, and heads that are made here are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("kind", "frozen"),
    [
        ("AutoModel", {"pooler.dense.weight", "pooler.dense.bias"}),
        ("AutoModelForSequenceClassification", set()),  # its scores are made of what the pooler gives
    ],
)
def test_a_pooler_is_trained_where_it_is_asked(kind: str, frozen: set[str]) -> None:
    import transformers

    from shardproof.train.model.parts import freeze_head

    sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    config = transformers.BertConfig(num_hidden_layers=1, **sizes)
    model = getattr(transformers, kind).from_config(config)
    freeze_head(model)
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == frozen


@pytest.mark.parametrize(
    ("kind", "made"),
    [
        ("CohereForSequenceClassification", True),
        ("Qwen3ForSequenceClassification", False),
        ("CohereForCausalLM", False),
    ],
)
def test_a_class_that_transformers_has_not_is_told_from_others(tmp_path: Path, kind: str, made: bool) -> None:
    from shardproof.models.scorers import made_here

    (tmp_path / "config.json").write_text(json.dumps({"architectures": [kind]}))
    assert made_here(tmp_path) == (kind if made else "")
