"""The tiny model is an ordinary Hugging Face folder, the same each time it is made."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardproof.data.encoding.encode import collate, encode_rows
from shardproof.data.rows import read_rows
from shardproof.errors import ConfigError
from shardproof.models.tiny import CONTEXT, build_tiny


@pytest.fixture(scope="module")
def rows():
    return read_rows(["stdlib#400"])


@pytest.fixture(scope="module")
def folder(rows, tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("tiny") / "deep" / "model", rows.texts(), seed=3)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


@pytest.fixture(scope="module")
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_same_texts_and_seed_give_the_same_files(rows, folder, tmp_path):
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert contents(build_tiny(tmp_path / "again", rows.texts(), seed=3)) == contents(folder)
    assert torch.equal(torch.get_rng_state(), state)
    other = contents(build_tiny(tmp_path / "other", rows.texts(), seed=4))
    assert other["model.safetensors"] != contents(folder)["model.safetensors"]


def test_it_is_a_small_qwen3(model):
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert 1e6 < sum(p.numel() for p in model.parameters()) < 4e6
    assert model.config.vocab_size >= 2048


def test_special_tokens_agree_between_tokenizer_model_and_generation(tokenizer, model):
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)
    assert tokenizer.model_max_length == CONTEXT == model.config.max_position_embeddings
    for config in (model.config, model.generation_config):
        assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)


@pytest.mark.parametrize(
    "text", ["What does os.path.join do?", "Grüße, 世界 🙂", "\ttabs\r\nand  spaces ", "<|im_end|>"]
)
def test_any_text_goes_through_the_tokenizer_and_back(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_roles_and_turn_marks_are_one_token_each(tokenizer):
    text = tokenizer.apply_chat_template([{"role": "user", "content": ""}], add_generation_prompt=True, tokenize=False)
    assert len(tokenizer(text)["input_ids"]) == len(["<|im_start|>", "user", "\n", "<|im_end|>", "\n"]) + 3


def test_its_loss_falls(rows, tokenizer, model):
    dataset = encode_rows(rows, tokenizer, max_length=128)
    batch = collate([dataset[i] for i in range(8)], tokenizer.pad_token_id)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert 7 < losses[0] < 8.5, "untrained, all of the vocabulary is equally likely"
    assert losses[-1] < losses[0] - 1


def test_no_text_at_all_still_gives_a_model(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(build_tiny(tmp_path / "m", []), local_files_only=True)
    assert tokenizer.decode(tokenizer("anything")["input_ids"]) == "anything"


def test_a_file_in_the_way_is_one_clear_error(tmp_path):
    (tmp_path / "model").write_text("")
    with pytest.raises(ConfigError, match="cannot be created"):
        build_tiny(tmp_path / "model", [])
