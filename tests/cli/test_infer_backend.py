"""Promise: what vLLM is not asked here is refused before anything is loaded."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from shardproof.cli.infer import _check
from shardproof.cli.infer_asked import InferConfig
from shardproof.errors import ConfigError
from shardproof.models.tiny import train_tokenizer
from shardproof.train.answers.by_vllm import ByVllm, WritesByVllm
from shardproof.train.answers.sampling import Sampling
from shardproof.train.folder import ADAPTER


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"vllm_max_model_len": 10}, "--vllm-max-model-len needs --backend vllm"),
        ({"backend": "vllm", "image": ["a.png"]}, "models that vLLM supports itself: leave --image out"),
        ({"backend": "vllm", "external_plugins": ["mine.py"]}, "leave --external-plugins out"),
        ({"backend": "vllm", "num_beams": 2}, "does not support beam search"),
    ],
)
def test_what_it_is_not_asked_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        _check(InferConfig(**given))


def test_it_is_no_rank_of_a_launcher(monkeypatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="leave the launcher out, and give --nproc"):
        _check(InferConfig(backend="vllm"))


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="it is installed")
def test_where_it_is_not_installed_that_is_said() -> None:
    with pytest.raises(ConfigError, match="the package vllm is not installed here: pip install vllm"):
        _check(InferConfig(backend="vllm"))


def test_adapters_are_to_be_merged_first(tmp_path: Path) -> None:
    (tmp_path / ADAPTER).write_text("{}")
    with pytest.raises(ConfigError, match="Merge them, and use the result: shardproof export"):
        ByVllm(tmp_path)


class Engine:
    """As vLLM's, of which this keeps the seeds."""

    def __init__(self) -> None:
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=100))
        self.seeds: list[int] = []
        self.writes = [5]

    def generate(self, asked: list[Any], how: list[Any], use_tqdm: bool) -> list[Any]:
        self.seeds += [each.seed for each in how]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=self.writes)]) for _ in asked]


def test_a_question_that_is_asked_again_draws_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["what is one plus two?"])
    vllm = ModuleType("vllm")
    vllm.SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    engine = Engine()
    writes = WritesByVllm(engine, tokenizer, "it", tmp_path)
    for seed, prompts in ((7, [[5], [5]]), (7, [[5]]), (20, [[5], [5]])):
        if torch.initial_seed() != seed:  # as of each batch of rows
            torch.manual_seed(seed)
        writes.write(prompts, Sampling(temperature=1.0), plain=False)
    assert engine.seeds == [7, 8, 9, 20, 21]


def test_what_its_answers_lack_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: Any) -> None:
    vllm = ModuleType("vllm")
    vllm.SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    engine = Engine()
    writes = WritesByVllm(engine, train_tokenizer(["what is one plus two?"]), "the model", tmp_path)
    assert writes.lacks_room(99) is None
    assert writes.lacks_room(100) == (
        "the question has 100 tokens, and vLLM has room for 100 of the model, with the answer: there is no room for an"
        " answer"
    )
    with pytest.raises(ConfigError, match=r"^The question has 101 tokens.* or raise --vllm-max-model-len"):
        writes.write([[5] * 101], Sampling(), plain=False)
    engine.writes = [999_999] * 3
    writes.write([[5] * 97], Sampling(), plain=False)
    assert writes.written == "tokens 999999, which its tokenizer does not have"
    assert "The model generates tokens that its tokenizer does not have" in caplog.text
    assert "An answer ends with the last of the 100 tokens that vLLM has room for" in caplog.text
