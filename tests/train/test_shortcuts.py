"""Promise: packing and the loss in parts are the same loss for less, and a model for which they are not is refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardproof
from shardproof.data.encoding import pack
from shardproof.data.encoding.encode import IGNORE, collate
from shardproof.data.encoding.pack import collate_packed, pack_rows, tokens_in_packed, wants_flat
from shardproof.data.rows import Places, Row
from shardproof.errors import ConfigError
from shardproof.train.losses.shortcuts import check_chunked_loss, check_packing, chunked_loss
from shardproof.train.options.config import SftConfig
from shardproof.train.sft import recipe as sft

VOCABULARY = 512


def qwen(attention: str = "sdpa", **options: Any) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        attn_implementation=attention,
        **options,
    )
    return Qwen3ForCausalLM(config)


def gemma(cap: float = 0.1) -> Any:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    return Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=VOCABULARY, num_attention_heads=4, num_key_value_heads=2, final_logit_softcapping=cap, **sizes
        )
    )


def experts(share: float) -> Any:
    """Whose loss has `share` times a second term, which balances experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_local_experts": 4, "output_router_logits": share > 0, "router_aux_loss_coef": share}
    return MixtralForCausalLM(MixtralConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **more, **sizes))


def lfm() -> Any:
    """Its short convolutions run over whatever stands before."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    torch.manual_seed(0)
    return Lfm2ForCausalLM(
        Lfm2Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            layer_types=["conv", "full_attention"],
        )
    )


def rows(count: int = 12) -> Any:
    from datasets import Dataset

    draw = torch.Generator().manual_seed(1)
    sizes = torch.randint(2, 30, (count,), generator=draw).tolist()
    ids = [torch.randint(3, VOCABULARY, (size,), generator=draw) for size in sizes]
    # Some learn every token, from the first on: behind another row it must not be learnt.
    labels = [[IGNORE] * (i % 3) + row.tolist()[i % 3 :] if len(row) > 3 else row.tolist() for i, row in enumerate(ids)]
    dataset = Dataset.from_dict({"input_ids": [row.tolist() for row in ids], "labels": labels})
    dataset.report = None  # type: ignore[attr-defined]
    return dataset


def test_packed_rows_keep_every_token_and_fit():
    encoded = rows(40)
    packed = pack_rows(encoded, 48)
    assert len(packed) < len(encoded) / 2
    assert all(sum(row["seq_lengths"]) == len(row["input_ids"]) <= 48 for row in packed)
    tokens = [sorted(token for row in rows["input_ids"] for token in row) for rows in (packed, encoded)]
    assert tokens[0] == tokens[1]
    batch = collate_packed(list(packed), 0)
    assert tokens_in_packed(batch["position_ids"]) == sum(len(row) for row in encoded["input_ids"])
    assert batch["labels"][..., 1:].ne(IGNORE).sum() == sum(
        sum(label != IGNORE for label in row[1:]) for row in encoded["labels"]
    )


def test_packed_rows_say_where_the_rows_in_them_stand():
    encoded, places = rows(40), Places()
    for line in range(40):
        places.append(Row([], "a.jsonl", line))
    encoded.places = places
    packed = pack_rows(encoded, 48)
    assert len(packed.places) == len(packed)
    for i, row in enumerate(packed):
        named = [int(place.removeprefix("a.jsonl:")) for place in packed.places.within(i)]
        assert [token for number in named for token in encoded[number]["input_ids"]] == row["input_ids"]


def test_what_lies_in_which_packed_row_is_found_a_block_at_a_time(monkeypatch):
    monkeypatch.setattr(pack, "_BLOCK", 1000)
    lengths = [7 * i % 29 + 1 for i in range(2500)]
    numbered = Dataset.from_dict({"input_ids": [[i] * length for i, length in enumerate(lengths)]})
    numbered.report = None
    packed = [list(dict.fromkeys(row)) for row in pack_rows(numbered, 48)["input_ids"]]
    assert list(pack.Packs(lengths, 48)) == packed


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_rows_have_the_loss_and_gradients_of_rows_by_themselves(attention):
    model, encoded = qwen(attention), rows()
    inputs = collate_packed(list(pack_rows(encoded, 48)), 0)
    assert len(inputs["input_ids"]) > 1, "padding is tried, too"
    model(**inputs).loss.backward()
    packed = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss = model(**collate(list(encoded), 0)).loss
    loss.backward()
    torch.testing.assert_close(model(**inputs).loss, loss, atol=1e-6, rtol=1e-6)
    for got, p in zip(packed, model.parameters(), strict=True):
        torch.testing.assert_close(got, p.grad, atol=1e-6, rtol=1e-5)


@pytest.fixture
def flash(monkeypatch):
    """FlashAttention's two functions, which need a GPU, computed as it says that it does."""
    import transformers.modeling_flash_attention_utils as attention

    def whole(q: Any, k: Any, v: Any, **_: Any) -> Any:
        heads = (x.transpose(1, 2) for x in (q, k, v))
        made = nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return made.transpose(1, 2)

    def of_rows(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, **_: Any) -> Any:
        assert cu_seqlens_q.equal(cu_seqlens_k)
        rows = pairwise(cu_seqlens_q.tolist())
        return torch.cat([whole(q[None, a:b], k[None, a:b], v[None, a:b])[0] for a, b in rows])

    found = ((whole, of_rows, None, None, None), (lambda **given: given, None))
    monkeypatch.setattr(attention, "lazy_import_flash_attention", lambda *_, **__: found)


def test_with_flash_attention_a_batch_is_one_packed_row(flash):
    """It tells rows apart only there, and takes a batch of more as rows that are whole."""
    packed, expected = list(pack_rows(rows(), 48)), qwen()(**collate(list(rows()), 0)).loss
    model = qwen()
    model.config._attn_implementation = "flash_attention_2"
    inputs = collate_packed(packed, 0, flat=wants_flat("flash_attention_2"))
    assert all(value.shape[0] == 1 for name, value in inputs.items() if name != "use_cache")
    check_packing(model, inputs)
    torch.testing.assert_close(model(**inputs).loss, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(chunked_loss(model, inputs), expected, atol=1e-6, rtol=1e-6)
    assert abs(float(model(**collate_packed(packed, 0)).loss) - float(expected)) > 1e-4


def test_a_model_whose_rows_see_each_other_is_refused():
    inputs = collate_packed(list(pack_rows(rows(), 48)), 0)
    check_packing(qwen(), inputs)
    with pytest.raises(ConfigError, match="depends on the row packed before its own"):
        check_packing(lfm(), inputs)


def test_a_first_step_of_few_tokens_finds_it_too():
    few = {"input_ids": torch.arange(3, 11)[None]}
    check_packing(qwen(), few)
    with pytest.raises(ConfigError, match="depends on the row packed before its own"):
        check_packing(lfm(), few)


def test_a_model_without_positions_is_refused():
    class Unplaced(nn.Module):
        def forward(self, input_ids: Any, use_cache: Any = None) -> None: ...

    with pytest.raises(ConfigError, match="--packing: Unplaced does not accept position_ids"):
        check_packing(Unplaced(), collate(list(rows()), 0))


def test_what_is_dropped_in_training_makes_no_model_another():
    model, inputs = qwen(attention_dropout=0.5).train(), collate(list(rows()), 0)
    check_packing(model, inputs)
    assert model.training
    check_chunked_loss(model, inputs)
    assert model.training


@pytest.mark.parametrize(
    ("attention", "flat"),
    [
        ("sdpa", False),
        ("eager", False),
        ("flex_attention", False),
        ("flash_attention_2", True),
        ("flash_attention_3", True),
        ("kernels-community/flash-attn2", True),
    ],
)
def test_any_flash_attention_wants_one_packed_row(attention: str, flat: bool):
    assert wants_flat(attention) is flat


class Largest(TorchDispatchMode):
    """The most elements that one tensor has had."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return out


@pytest.mark.parametrize("frozen", [False, True])
def test_the_loss_in_parts_is_the_loss_and_holds_no_logits(frozen):
    model = qwen(tie_word_embeddings=not frozen)
    model.lm_head.weight.requires_grad_(not frozen)
    inputs = collate(list(rows(40)), 0)
    with Largest() as whole:
        expected = model(**inputs).loss
        expected.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with Largest() as parts:
        loss = chunked_loss(model, inputs)
        loss.backward()
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-6)
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(p.grad, gradients[name], atol=1e-6, rtol=1e-5)
    assert whole.numel >= inputs["input_ids"].numel() * VOCABULARY
    assert parts.numel < whole.numel / 4


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_so_it_is_for_many_tokens_in_half_precision(dtype):
    model = qwen().to(dtype)
    inputs = collate(list(rows(800)), 0)  # 11,000 tokens: their sum is more than fp16 can hold
    expected = model(**inputs).loss
    assert float(chunked_loss(model, inputs).detach()) == pytest.approx(float(expected.detach()), rel=2e-4)


def test_a_model_whose_loss_is_another_is_refused():
    inputs = collate(list(rows()), 0)
    check_chunked_loss(qwen(), inputs)
    with pytest.raises(ConfigError, match="scales or caps its logits"):
        check_chunked_loss(gemma(), inputs)
    with pytest.raises(ConfigError, match="scales or caps its logits"):
        check_chunked_loss(gemma(cap=50.0), inputs)  # a new model, whose logits are far from it
    odd = qwen()
    odd.lm_head = nn.Sequential(odd.lm_head)
    with pytest.raises(ConfigError, match="no plain linear head"):
        check_chunked_loss(odd, inputs)
    with pytest.raises(ConfigError, match="Linear has no plain linear head"):
        check_chunked_loss(nn.Linear(2, 2), inputs)
    twice = qwen()
    twice.model.register_forward_hook(lambda *given: [twice.lm_head(given[-1][0][:, :1])].clear())
    with pytest.raises(ConfigError, match="does not call its head once, with a hidden state of each token"):
        check_chunked_loss(twice, inputs)


def test_rows_of_which_nothing_is_learnt_have_no_loss():
    model, inputs = qwen(), collate(list(rows()), 0)
    inputs["labels"].fill_(IGNORE)
    check_chunked_loss(model, inputs)
    loss = chunked_loss(model, inputs)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_models_that_name_another_decoder_than_what_their_head_takes():
    from transformers import AutoModelForCausalLM, Llama4TextConfig, ModernBertDecoderConfig

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = Llama4TextConfig(
        **sizes, num_hidden_layers=2, num_key_value_heads=2, head_dim=8, intermediate_size_mlp=48, num_local_experts=2
    )
    torch.manual_seed(0)
    model, inputs = AutoModelForCausalLM.from_config(config), collate(list(rows()), 0)
    check_chunked_loss(model, inputs)
    torch.testing.assert_close(chunked_loss(model, inputs), model(**inputs).loss, atol=1e-6, rtol=1e-6)
    # What its head calls its decoder is a matrix, and there is a layer between.
    special = dict.fromkeys(("pad_token_id", "eos_token_id", "bos_token_id", "cls_token_id", "sep_token_id"), 0)
    model = AutoModelForCausalLM.from_config(ModernBertDecoderConfig(**sizes, num_hidden_layers=2, **special))
    check_chunked_loss(model, inputs)
    torch.testing.assert_close(chunked_loss(model, inputs), model(**inputs).loss, atol=1e-6, rtol=1e-6)


def test_a_head_that_is_trained_beside_adapters():
    from peft import LoraConfig, get_peft_model

    inputs = collate(list(rows()), 0)
    model = get_peft_model(qwen(), LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    with torch.no_grad():
        model.get_output_embeddings().modules_to_save["default"].weight.mul_(1.5)  # not what it is a copy of
    check_chunked_loss(model, inputs)
    expected = model(**inputs).loss
    expected.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert any("lm_head" in name for name in gradients)
    model.zero_grad()
    loss = chunked_loss(model, inputs)
    loss.backward()
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient, atol=1e-6, rtol=1e-5)
    adapted = get_peft_model(qwen(), LoraConfig(r=4, target_modules=["lm_head"]))
    with pytest.raises(ConfigError, match="the head over the vocabulary carries an adapter"):
        check_chunked_loss(adapted, inputs)


def test_a_talker_has_a_loss_of_its_own():
    with pytest.raises(ConfigError, match="--train-parts talker also learns speech codes"):
        sft.check(SftConfig(chunked_loss=True, train_parts=["thinker", "talker"]), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_whose_loss_has_another_term_is_refused(dtype):
    inputs = collate(list(rows()), 0)
    check_chunked_loss(experts(0.0).to(dtype), inputs)
    with pytest.raises(ConfigError, match="another term, such as a load-balancing loss"):
        check_chunked_loss(experts(0.001).to(dtype), inputs)


def test_so_it_is_before_rows_are_encoded_where_its_config_says_so(tmp_path):
    from transformers import Qwen3Config, Qwen3MoeConfig

    asked = SftConfig(model=str(tmp_path), dataset=["rows.jsonl"], chunked_loss=True)
    weighing = {"output_router_logits": True, "router_aux_loss_coef": 0.001}
    for config in (Qwen3MoeConfig(**weighing | {"router_aux_loss_coef": 0.0}), Qwen3Config(**weighing)):  # no term
        config.save_pretrained(tmp_path)
        sft._check_terms(asked)
    Qwen3MoeConfig(**weighing).save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match=r"a load-balancing term for its experts \(output_router_logits"):
        sft.prepare(asked, 1, [], None)
    in_parts = asked.model_copy(update={"chunked_loss": False, "sequence_parallel": 2})
    with pytest.raises(ConfigError, match="--sequence-parallel computes the cross entropy alone"):
        sft.prepare(in_parts, 2, [], None)


def one_step(stage: int, features: list[list[Any]], packed: bool, items: int) -> tuple[float, dict[str, torch.Tensor]]:
    """A sharded model, one step on this rank's rows, tried as a run does."""
    mine = features[dist.get_rank()]
    inputs = collate_packed(mine, 0) if packed else collate(mine, 0)
    model = shardproof.shard(qwen(), stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if packed:
        check_packing(model, inputs)
        check_chunked_loss(model, inputs)
        loss = chunked_loss(model, inputs, items)
    else:
        loss = model(**inputs, num_items_in_batch=items).loss
    (loss * dist.get_world_size()).backward()
    optimizer.step()
    return float(loss.detach()), shardproof.full_state_dict(model, rank0_only=False)


@pytest.mark.parametrize("stage", [0, 3])
def test_both_on_two_ranks_train_as_without(run2, stage):
    halves = [rows(12).select(range(start, start + 6)) for start in (0, 6)]
    for half in halves:
        half.report = None
    items = sum(label != IGNORE for half in halves for row in half["labels"] for label in row[1:])
    expected = run2(one_step, 0, [list(half) for half in halves], False, items)
    got = run2(one_step, stage, [list(pack_rows(half, 48)) for half in halves], True, items)
    for (loss, weights), (plain_loss, plain) in zip(got, expected, strict=True):
        assert loss == pytest.approx(plain_loss, abs=1e-6)
        for name, value in weights.items():
            torch.testing.assert_close(value, plain[name], atol=1e-6, rtol=1e-5)
