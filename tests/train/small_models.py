"""A small decoder and a small encoder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def small_models(folder: Path, texts: Sequence[str], words: Sequence[str]) -> dict[str, Path]:
    """`decoder`, a Qwen3 with a chat template and tokens as in `texts`, and `encoder`, a BERT without a pooler that
    knows `words`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        PreTrainedTokenizerFast,
        Qwen3Config,
        Qwen3ForCausalLM,
        set_seed,
    )

    from shardproof.models.tiny import train_tokenizer

    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokenizer = train_tokenizer(list(texts))
    set_seed(0)
    config = Qwen3Config(vocab_size=512, num_key_value_heads=1, head_dim=16, max_position_embeddings=256, **small)
    Qwen3ForCausalLM(config).save_pretrained(folder / "decoder")
    tokenizer.save_pretrained(folder / "decoder")

    marks = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3}
    known = marks | {word: i for i, word in enumerate(words, len(marks))}
    made = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    encoder = PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=16, **special)
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    BertForMaskedLM(
        BertConfig(vocab_size=len(known), max_position_embeddings=16, pad_token_id=0, **small, **still)
    ).save_pretrained(folder / "encoder")
    encoder.save_pretrained(folder / "encoder")
    return {name: folder / name for name in ("decoder", "encoder")}
