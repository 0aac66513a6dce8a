"""Promise: what gives neither vectors nor scores is not trained for them, and what does is."""

from __future__ import annotations

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
