"""`--model tiny`: a small Qwen3 with its own tokenizer, built on the spot, without a download."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardproof.errors import ConfigError
from shardproof.models.chatml import CHATML, TURN_END, TURN_START

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3Config

PAD = "<|endoftext|>"
VOCABULARY = 2048
CONTEXT = 1024  # tokens
ROLES = ("system", "user", "assistant")  # in every conversation, so one token each


def build_tiny(folder: Path, texts: Iterable[str], *, seed: int = 0) -> Path:
    """Write a small Qwen3 with random weights and a byte-level BPE tokenizer trained on `texts`.

    Args:
        folder: where to write the model, created if necessary: an ordinary Hugging Face folder, with a ChatML template.
        texts: texts to train the tokenizer on. Any text can be encoded afterwards, even with none given here.
        seed: for the initial weights. The global random state is unchanged.

    Returns:
        `folder`. The same texts and seed give the same files.

    Raises:
        ConfigError: `folder` is a file, or cannot be written.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"The folder {folder} for the tiny model cannot be created: {error.strerror}.") from error
    tokenizer = train_tokenizer(texts)
    tokenizer.save_pretrained(folder)
    _make_model(tokenizer, seed, folder)
    return folder


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a ChatML template, trained on `texts`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(chain(texts, ROLES * 1000), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=PAD,
        extra_special_tokens=[TURN_START],
        chat_template=CHATML,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def tiny_config(**more: Any) -> Qwen3Config:
    """The config of the tiny model."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        **more,
    )


def _make_model(tokenizer: PreTrainedTokenizerFast, seed: int, folder: Path) -> None:
    import torch
    from transformers import Qwen3ForCausalLM

    config = tiny_config(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config.update(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
