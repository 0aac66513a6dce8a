"""Tokenizers of Mistral's own form, `tekken.json`, with the package mistral-common and without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.import_utils import is_mistral_common_available

from models.tekken import COUNT, TEMPLATE, write_tekken
from shardproof.data.encoding.template import Template
from shardproof.errors import ConfigError
from shardproof.models.loading.processors import load_fast_tokenizer

ASKED = [{"role": "user", "content": "hear?"}, {"role": "assistant", "content": "no"}]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers asks where mistral-common is installed."""
    from transformers.integrations.mistral import tokenizer
    from transformers.models.auto import tokenization_auto

    monkeypatch.setattr(tokenizer, "is_mistral_common_available", lambda: True)
    monkeypatch.setitem(tokenization_auto.TOKENIZER_MAPPING_NAMES, "mistral", "MistralCommonBackend")


def learnt_by(tokenizer: Any) -> list[int]:
    return list(tokenizer.apply_chat_template(ASKED)["input_ids"])


def test_a_vocabulary_alone_is_read_with_its_marks(tmp_path: Path) -> None:
    write_tekken(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    tokenizer = load_fast_tokenizer(str(tmp_path))
    assert [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id] == [1, 2, 11]
    if not is_mistral_common_available():
        with pytest.raises(
            ConfigError, match=r"Install mistral-common, which provides the template of Mistral's models\."
        ):
            Template(tokenizer)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    told = [1, 3, *(COUNT + byte for byte in b"hear?"), 4, *(COUNT + byte for byte in b"no"), 2]
    assert learnt_by(load_fast_tokenizer(str(tmp_path))) == told


@pytest.mark.usefixtures("installed")
def test_the_package_does_not_take_the_place_of_the_other_files(tmp_path: Path) -> None:
    """Its tokenizers have no chat template and no offsets: rows of messages were refused where vLLM was installed."""
    write_tekken(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    converted = load_fast_tokenizer(str(tmp_path))
    converted.save_pretrained(tmp_path)
    tokenizer = load_fast_tokenizer(str(tmp_path))
    assert tokenizer.chat_template == TEMPLATE
    assert learnt_by(tokenizer) == learnt_by(converted)
    assert tokenizer("no", return_offsets_mapping=True)["offset_mapping"] == [(0, 1), (1, 2)]
