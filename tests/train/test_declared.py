"""What a model's config tells before a process is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import BloomConfig, GptOssConfig, LlamaConfig, PretrainedConfig

from shardproof.errors import ConfigError
from shardproof.train.model.declared import check_shares_rows
from shardproof.train.options.config import SftConfig


def asked(folder: Path, kind: type[PretrainedConfig], heads: int) -> None:
    kind(hidden_size=48, num_attention_heads=heads, num_key_value_heads=heads).save_pretrained(folder)
    check_shares_rows(SftConfig(model=str(folder), dataset=["rows.jsonl"], sequence_parallel=2))


def test_a_model_can_be_asked(tmp_path: Path) -> None:
    asked(tmp_path, LlamaConfig, heads=4)


def test_attention_of_its_own_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\(sdpa, varlen\), and BloomForCausalLM has eager\. Leave --seq"):
        asked(tmp_path, BloomConfig, heads=4)
    asked(tmp_path / "with sinks", GptOssConfig, heads=4)


def test_so_are_heads_that_cannot_be_dealt_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="3 attention heads"):
        asked(tmp_path, LlamaConfig, heads=3)
