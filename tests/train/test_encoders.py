"""An encoder is no model to learn answers with: it is refused with what it can learn, before anything takes time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.train.conftest import WORDS

from shardproof.errors import ConfigError
from shardproof.models.loading.classes import check_looks_back
from shardproof.train.model.loading import causal_lm


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT with a masked head and a tokenizer."""
    from tests.train.small_models import small_models

    return small_models(tmp_path_factory.mktemp("models"), WORDS, WORDS)["encoder"]


@pytest.mark.slow
def test_commands_refuse_it_and_name_the_tasks(commands, sft, encoder: Path, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"query": "a", "response": "step", "rejected_response": "rank"}\n' * 8)
    bert = ["--model", str(encoder), "--chat-template", "chatml"]
    runs = commands(
        [
            ("sft", sft(*bert)),
            ("raw", sft("--model", str(encoder), "--loss", "all", "--tuner", "lora")),
            ("dpo", ["rlhf", *bert, "--rlhf-type", "dpo", "--dataset", str(pairs), "--output-dir", "OUT"]),
            ("doctor", ["doctor", *bert, "--dataset", str(pairs), "--trial", "no"]),
            ("infer", ["infer", str(encoder), "--prompt", "a", "--plain"]),
        ]
    )
    for name, run in runs.items():
        said = " ".join(run.output.split())
        assert run.code == (1 if name == "doctor" else 2), run.output
        told = f"The model {encoder} (bert) is an encoder: each token sees later ones"
        assert told.replace(" ", "") in said.replace(" ", ""), run.output  # a table cuts a long path
        assert "--task embedding, --task seq_cls or --task reranker" in said
        assert "encoded" not in said
        assert not run.folder.exists()

    planned = commands([("plan", ["plan", "--model", str(encoder), "--device", "cpu", "--max-length", "16"])])["plan"]
    assert "an encoder, which sft takes with --task embedding, seq_cls or reranker" in " ".join(planned.output.split())


CONFIGS: list[tuple[str, dict[str, Any], bool]] = [
    ("BertConfig", {}, True),
    ("BertConfig", {"is_decoder": True}, False),
    ("RobertaConfig", {}, True),
    ("XLMConfig", {}, True),
    ("XLMConfig", {"causal": True}, False),
    ("ModernBertConfig", {}, True),
    ("BartConfig", {}, False),
    ("GPT2Config", {}, False),
    ("Qwen3Config", {}, False),
]


@pytest.mark.parametrize(("name", "options", "refused"), CONFIGS)
def test_only_what_sees_ahead_is_refused(tmp_path: Path, name: str, options: dict[str, Any], refused: bool) -> None:
    import transformers

    getattr(transformers, name)(**options).save_pretrained(tmp_path)
    if not refused:
        check_looks_back(str(tmp_path))
        return
    with pytest.raises(ConfigError, match="is an encoder"):
        check_looks_back(str(tmp_path))
    with pytest.raises(ConfigError, match="is an encoder"):
        causal_lm(str(tmp_path))
