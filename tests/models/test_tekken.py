"""Tokenizers of Mistral's own form, `tekken.json`, with the package mistral-common and without."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from shardproof.data.encoding.template import Template
from shardproof.errors import ConfigError
from shardproof.models.loading.processors import load_fast_tokenizer

NAMED = {"<unk>": 0, "<s>": 1, "</s>": 2, "[INST]": 3, "[/INST]": 4, "<pad>": 11}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
ASKED = [{"role": "user", "content": "hear?"}, {"role": "assistant", "content": "no"}]


def write_tekken(folder: Path, names: dict[str, int]) -> int:
    """A vocabulary of single bytes, behind these tokens. Returns its size."""
    count = max(names.values()) + 1
    marks = {rank: mark for mark, rank in names.items()}
    special = [{"rank": i, "token_str": marks.get(i, f"<SPECIAL_{i}>"), "is_control": True} for i in range(count)]
    vocab = [{"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode(), "token_str": None} for i in range(256)]
    config = {"pattern": r"\S+|\s+", "default_vocab_size": 256 + count, "default_num_special_tokens": count}
    said = {"config": {**config, "version": "v11"}, "vocab": vocab, "special_tokens": special}
    (folder / "tekken.json").write_text(json.dumps(said))
    (folder / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    return 256 + count


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
    write_tekken(tmp_path, NAMED)
    tokenizer = load_fast_tokenizer(str(tmp_path))
    assert [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id] == [1, 2, 11]
    with pytest.raises(ConfigError, match=r"Install mistral-common, which writes that of Mistral's models\."):
        Template(tokenizer)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    told = [1, 3, *(12 + byte for byte in b"hear?"), 4, *(12 + byte for byte in b"no"), 2]
    assert learnt_by(load_fast_tokenizer(str(tmp_path))) == told


@pytest.mark.usefixtures("installed")
def test_the_package_does_not_take_the_place_of_the_other_files(tmp_path: Path) -> None:
    """Its tokenizers have no chat template and no offsets: rows of messages were refused where vLLM was installed."""
    write_tekken(tmp_path, NAMED)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    converted = load_fast_tokenizer(str(tmp_path))
    converted.save_pretrained(tmp_path)
    tokenizer = load_fast_tokenizer(str(tmp_path))
    assert tokenizer.chat_template == TEMPLATE
    assert learnt_by(tokenizer) == learnt_by(converted)
    assert tokenizer("no", return_offsets_mapping=True)["offset_mapping"] == [(0, 1), (1, 2)]
