"""Models whose positions count the padding before a prompt count from its first token where answers are learnt from."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardproof.errors import ConfigError
from shardproof.train.model.left_padding import count_from_first_tokens, reads_padding

IDS = torch.tensor([[5, 9, 3, 7, 2, 8]])
SMALL = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


def gpt2(inner: str = "GPT2LMHeadModel") -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=16, n_embd=32, n_layer=2, n_head=2, n_positions=32)
    return getattr(transformers, inner)(config)


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **SMALL))


def recurrent() -> Any:
    """What its recurrence has read stays, padding or not."""
    from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    torch.manual_seed(0)
    model = RecurrentGemmaForCausalLM(
        RecurrentGemmaConfig(num_attention_heads=4, lru_width=32, block_types=["recurrent", "attention"], **SMALL)
    )
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)  # new ones hardly do anything
    return model


def off(model: Any) -> float:
    """How far the logits of a row move when it is padded on the left."""
    padding, mask = torch.zeros(1, 5, dtype=torch.long), torch.ones_like(IDS)
    with torch.no_grad():
        alone = model.eval()(input_ids=IDS).logits
        padded = model(input_ids=torch.cat([padding, IDS], 1), attention_mask=torch.cat([padding, mask], 1)).logits
    return float((padded[:, 5:] - alone).abs().max() / alone.abs().max())


@pytest.mark.parametrize("inner", ["GPT2LMHeadModel", "GPT2ForTokenClassification"])
def test_learnt_positions_begin_at_the_first_token(inner: str) -> None:
    model = gpt2(inner)
    assert off(model) > 0.05
    count_from_first_tokens(model.train(), IDS)
    assert model.training
    assert off(model) < 1e-5
    padded = torch.nn.functional.pad(IDS, (5, 0))
    given = {"attention_mask": padded.ne(0).long(), "position_ids": torch.arange(11)[None]}
    with torch.no_grad():  # what is said stays
        plain, asked = (made(input_ids=padded, **given).logits for made in (gpt2(inner).eval(), model.eval()))
    assert torch.equal(plain, asked)


def test_other_models_are_left_alone() -> None:
    model = llama()
    count_from_first_tokens(model, IDS)
    assert not model._forward_pre_hooks
    assert off(model) < 1e-5


def test_a_model_that_reads_padding_is_refused() -> None:
    model = recurrent()
    assert off(model) > 0.05
    with pytest.raises(
        ConfigError, match="RecurrentGemmaForCausalLM does not ignore the padding before the shorter prompts"
    ):
        count_from_first_tokens(model, IDS)


def test_a_model_that_is_told_of_no_padding_reads_it() -> None:
    class Blind(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor) -> None:
            raise NotImplementedError

    assert reads_padding(Blind(), IDS)
    with torch.no_grad():  # generate() says where rows begin
        assert [reads_padding(made().eval(), IDS) for made in (recurrent, gpt2, llama)] == [True, False, False]


@pytest.mark.parametrize("made", [recurrent, gpt2, llama])
def test_answers_are_the_same_whatever_is_asked_at_once(made: Any) -> None:
    """Those of a recurrence depended on the longest question beside them, and so did the room that GPT-2 has."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from shardproof.train.answers.sampling import Sampling
    from shardproof.train.answers.writing import Writer

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(16)}))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0")
    writer, sampling = Writer(made().eval(), tokenizer, "the model", False), Sampling(max_new_tokens=28)
    writer._ends = {False: [], True: []}

    def answers(*questions: list[int]) -> list[str]:
        asked = tokenizer.pad({"input_ids": [*questions]}, padding_side="left", return_tensors="pt")
        return writer.texts(writer.write(asked, sampling, plain=False), sampling)

    questions = [5, 9], [5, 9, 3, 7, 2, 8, 4, 6], [7]
    assert answers(*questions) == [answers(one)[0] for one in questions]


def test_models_are_asked_with_tokens_that_the_tokenizer_has() -> None:
    from types import SimpleNamespace

    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from shardproof.train.rlhf.mixin import OfTokens

    made = Tokenizer(models.WordLevel({"<pad>": 0, "A": 2, "C": 3, "G": 4, "T": 5}))  # of all else it makes an error
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer: Any = object.__new__(OfTokens)
    trainer.processing_class = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>")
    trainer.args, trainer._asked = SimpleNamespace(device=torch.device("cpu")), set()
    model = gpt2()
    assert not model._forward_pre_hooks
    trainer.count_from_first_tokens(model)
    assert model._forward_pre_hooks
