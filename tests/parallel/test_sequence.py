"""Promise: ranks that share rows give the loss and the gradients of one process, at every stage, or refuse to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardproof
from shardproof.data.encoding.encode import IGNORE, collate
from shardproof.data.encoding.pack import LENGTHS, collate_packed
from shardproof.errors import ConfigError, DesyncError
from shardproof.models.attention.masks import tell_masks_of_positions
from shardproof.models.attention.varlen import attention_options
from shardproof.models.checkpointing import enable_checkpointing
from shardproof.parallel.sequence import SequenceParallel, check_heads
from shardproof.train.checks.contradictions import check_together
from shardproof.train.losses.shortcuts import chunked_loss
from shardproof.train.model.attention import choose_attention
from shardproof.train.model.shared_rows import (
    check_loss_of_parts,
    check_packed_in_parts,
    check_shared_rows,
    compare,
    share_rows_of,
    shared_rows_of,
)
from shardproof.train.options.config import SftConfig
from shardproof.train.rows.sampler import GlobalBatchSampler

SIZES = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}


def made(kind: str, attn: str = "sdpa") -> Any:
    """Small models: keys with as many heads as queries or fewer, fewer than ranks, a window, chunks, a convolution."""
    import transformers

    heads = {"num_attention_heads": 4, "num_key_value_heads": 1 if kind == "Llama" else 2}
    own: dict[str, Any] = {"Mistral": {"sliding_window": 5}, "Lfm2": {"layer_types": ["conv", "full_attention"]}}
    own["GptOss"] = {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 5, "initializer_range": 0.3}
    own["Llama4"] = {"attention_chunk_size": 4, "moe_layers": [], "intermediate_size_mlp": 48, "no_rope_layers": [1, 1]}
    options = {**SIZES, **heads, **own.get(kind, {})}
    if kind == "Lfm2":
        options.pop("head_dim")
        options["initializer_range"] = 0.3  # as after training: a new convolution does next to nothing
    torch.manual_seed(0)
    config_class = getattr(transformers, f"{kind}TextConfig", None) or getattr(transformers, f"{kind}Config")
    model = getattr(transformers, f"{kind}ForCausalLM")(config_class(**options, **attention_options(attn)))
    if kind == "GptOss":
        tell_masks_of_positions(model)
    return model


def rows(count: int) -> list[dict[str, list[int]]]:
    draw = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 256, (n,), generator=draw).tolist() for n in (23, 9, 30, 2)[:count]]
    return [{"input_ids": row, "labels": [IGNORE] * (i % 3) + row[i % 3 :]} for i, row in enumerate(ids)]


def packed_rows() -> dict[str, Any]:
    """The same rows, two in one."""
    one, two, three, four = rows(4)

    def both(first: dict[str, list[int]], second: dict[str, list[int]]) -> dict[str, list[int]]:
        lengths = [len(first["input_ids"]), len(second["input_ids"])]
        return {name: first[name] + second[name] for name in first} | {LENGTHS: lengths}

    return collate_packed([both(one, four), both(three, two)], 0)


def items(of: list[dict[str, list[int]]]) -> int:
    return sum(label != IGNORE for row in of for label in row["labels"][1:])


def shared(model: Any, size: int) -> SequenceParallel:
    """The ranks that share the rows of a model from now on."""
    share_rows_of(model, size, gathers=False)
    hooks = shared_rows_of(model)
    assert hooks is not None
    return hooks.sequence


def alone(kind: str, attn: str = "sdpa") -> tuple[float, dict[str, torch.Tensor]]:
    model, batch = made(kind, attn), rows(4)
    loss = model(**collate(batch, 0), num_items_in_batch=items(batch)).loss
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    return float(loss.detach()), {name: value.detach() for name, value in model.state_dict().items()}


def in_parts(kind: str, stage: int, size: int, how: str) -> tuple[float, dict[str, torch.Tensor]]:
    """One step on this rank, whose group has its share of the four rows."""
    model = made(kind)
    sequence = shared(model, size)
    if "checkpointing" in how:
        enable_checkpointing(model.train(), "reentrant" in how)
        model.enable_input_require_grads()
    copies = dist.get_world_size() // 2 if "copies" in how else None
    mesh = dist.init_device_mesh("cpu", (copies, 2)) if copies else None
    shardproof.shard(model, stage, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    groups = dist.get_world_size() // size
    group = dist.get_rank() // size
    share = 4 // groups
    part = collate(rows(4)[group * share : (group + 1) * share], 0)
    part["shift_labels"] = sequence.shifted(part["labels"])
    check_shared_rows(model, torch.arange(3, 11))
    check_loss_of_parts(model, part)
    with sequence:
        count = items(rows(4))
        if "chunked" in how:
            loss = chunked_loss(model, part, count)
        else:
            loss = model(**part, num_items_in_batch=count).loss
        (loss * dist.get_world_size()).backward()
    optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total), shardproof.full_state_dict(model, rank0_only=False)


def sent_in_a_step() -> tuple[int, int]:
    """What is counted, and what queries, keys, values and outputs of each layer take, there and back."""
    model = made("Qwen3")
    sequence = shared(model, 2)
    part = collate(rows(2), 0)
    part["shift_labels"] = sequence.shifted(part["labels"])
    before = sequence.bytes_sent  # a process has one for all of its models
    with sequence:
        model(**part, num_items_in_batch=items(rows(2))).loss.backward()
    config = model.config
    heads = 2 * config.num_attention_heads + 2 * max(config.num_key_value_heads, 2)
    elements = part["shift_labels"].numel() * heads * config.head_dim * config.num_hidden_layers
    return sequence.bytes_sent - before, 2 * 4 * elements // 2  # forward and backward, fp32, half of it to the other


@pytest.mark.slow
def test_what_is_sent_in_attention_is_counted(run2):
    for counted, expected in run2(sent_in_a_step):
        assert counted == expected


def same(got: list[Any], kind: str, attn: str = "sdpa") -> None:
    loss, weights = alone(kind, attn)
    for mine, theirs in got:
        assert mine == pytest.approx(loss, abs=1e-5)
        for name, value in weights.items():
            torch.testing.assert_close(theirs[name], value, atol=2e-6, rtol=1e-5, msg=f"{name} of {kind}")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_that_share_rows_train_as_one_process(run2, stage):
    same(run2(in_parts, "Qwen3", stage, 2, ""), "Qwen3")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "stage", "size", "how"),
    [
        ("Llama", 3, 2, "chunked"),  # one head of keys for two ranks
        ("Llama", 2, 4, ""),
        ("Mistral", 3, 2, "checkpointing"),  # a window that reaches across the cut
        ("Llama4", 3, 2, ""),  # chunks, which begin where padding on the left ends
        ("Qwen3", 3, 2, "copies"),
        ("Qwen3", 1, 4, "reentrant checkpointing"),
    ],
)
def test_so_do_groups_of_any_size(run4, kind, stage, size, how):
    same(run4(in_parts, kind, stage, size, how), kind)


def packed_in_parts(kind: str, attn: str, stage: int, how: str) -> tuple[float, dict[str, torch.Tensor]]:
    """One step on packed rows, each of which two ranks share."""
    model = made(kind, attn)
    sequence = shared(model, 2)
    if "checkpointing" in how:
        enable_checkpointing(model.train(), False)
    shardproof.shard(model, stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    here = slice(dist.get_rank() // 2, None, dist.get_world_size() // 2)
    batch = packed_rows()
    batch = {name: value[here] if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    batch["shift_labels"] = sequence.shifted(batch["labels"])
    check_packed_in_parts(model, batch)
    count = items(rows(4))
    with sequence:
        loss = chunked_loss(model, batch, count) if "chunked" in how else model(**batch, num_items_in_batch=count).loss
        (loss * dist.get_world_size()).backward()
    optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total), shardproof.full_state_dict(model, rank0_only=False)


@pytest.mark.parametrize(
    ("kind", "attn", "stage", "how"),
    [
        ("Qwen3", "sdpa", 0, ""),
        ("Qwen3", "varlen", 3, "checkpointing chunked"),
        ("Llama", "varlen", 2, ""),
        ("Mistral", "sdpa", 3, ""),
        ("Mistral", "varlen", 3, ""),  # a window
        ("Llama4", "sdpa", 3, ""),  # chunks, which begin with each row
        ("GptOss", "varlen", 3, ""),  # a sink for each head
    ],
)
def test_packed_rows_that_ranks_share_train_as_rows_in_one_process(run2, kind, attn, stage, how):
    same(run2(packed_in_parts, kind, attn, stage, how), kind, "eager" if kind == "GptOss" else attn)


@pytest.mark.slow
@pytest.mark.parametrize("attn", ["sdpa", "varlen"])
def test_so_do_those_of_several_groups(run4, attn):
    same(run4(packed_in_parts, "Qwen3", attn, 3, ""), "Qwen3")


def both_ways(length: int, padding: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What an encoder makes of two rows, one of them padded: whole, and in parts."""
    from transformers import ModernBertConfig, ModernBertModel

    torch.manual_seed(0)
    sizes = {**SIZES, "num_attention_heads": 4, "local_attention": 6, "global_attn_every_n_layers": 2}
    config = ModernBertConfig(**sizes, pad_token_id=0, initializer_range=0.3, attn_implementation="sdpa")
    model = ModernBertModel(config).eval()
    ids, mask = torch.arange(3, 3 + 2 * length).view(2, length), torch.ones(2, length, dtype=torch.int64)
    mask[1, slice(length // 3, None) if padding == "right" else slice(0, length // 3)] = 0
    alone = model(input_ids=ids, attention_mask=mask).last_hidden_state
    share_rows_of(model, 2, gathers=True)
    hooks = shared_rows_of(model)
    assert hooks is not None
    with hooks.sequence:
        shared = model(input_ids=ids, attention_mask=mask).last_hidden_state
    there = mask.bool()
    return alone[there].detach(), shared[there].detach()


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("length", [12, 13])
def test_who_looks_ahead_does_not_see_padding(run2, length, padding):
    for alone, shared in run2(both_ways, length, padding):
        torch.testing.assert_close(shared, alone, atol=2e-6, rtol=1e-5)


def scaled_by_length(kind: str, length: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 13}
    rope = {"rope_type": kind, "rope_theta": 100.0, "factor": 2.0, **(factors if kind == "longrope" else {})}
    sizes = {**SIZES, "num_attention_heads": 4, "max_position_embeddings": 13, "pad_token_id": 0}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.3, rope_parameters=rope))
    shared(model, 2)
    ids = torch.arange(3, 3 + length)[None]
    compare(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
@pytest.mark.parametrize("length", [13, 21])
def test_positions_that_are_scaled_by_the_length_of_rows_are_by_that_of_whole_ones(run2, kind, length):
    """Up to 13 tokens they are not scaled."""
    assert run2(scaled_by_length, kind, length) == [None, None]


def refused(kind: str) -> str:
    try:
        in_parts(kind, 3, 2, "")
    except ConfigError as error:
        return str(error)
    return ""


def test_a_model_that_mixes_tokens_elsewhere_is_refused(run2):
    for message in run2(refused, "Lfm2"):
        assert "something beside attention looks at other tokens" in message


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("sizes 4 and 8"), r"Linear cannot be tried on rows in parts: RuntimeError: sizes 4 and 8\nLeave"),
        (AttributeError("no such thing"), "AttributeError: no such thing"),
    ],
)
def test_an_error_in_the_trial_is_named_and_no_other_rank_waited_for(error, told):
    def differences() -> list[float]:
        raise error

    with pytest.raises(ConfigError, match=told):
        SequenceParallel.try_on(SequenceParallel.__new__(SequenceParallel), torch.nn.Linear(1, 1), differences, "cpu")


CLOSED = RuntimeError("[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), DesyncError("rank 1 is gone"), CLOSED])
def test_what_no_model_is_to_blame_for_stays_what_it_is(error):
    def differences() -> list[float]:
        raise error

    with pytest.raises(type(error)):
        SequenceParallel.try_on(SequenceParallel.__new__(SequenceParallel), torch.nn.Linear(1, 1), differences, "cpu")


def not_finite() -> None:
    model = made("Qwen3")
    shared(model, 2)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    check_shared_rows(model, torch.arange(3, 11))
    check_loss_of_parts(model, collate(rows(2), 0))


def test_a_model_that_is_not_finite_is_left_to_the_first_step(run2):
    assert run2(not_finite) == [None, None]


def test_what_is_advised_is_what_a_model_has():
    """Gemma 2 caps its scores, which torch's attention does not."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    model = Gemma2ForCausalLM(Gemma2Config(**SIZES, num_attention_heads=4, num_key_value_heads=2))
    with pytest.raises(ConfigError, match=r"has eager\. Leave --sequence-parallel out"):
        SequenceParallel.attach(SequenceParallel.__new__(SequenceParallel), model)


def generated_within(stage: int) -> tuple[list[int], list[int]]:
    """The same answer with and without a group that is not entered."""
    answers = []
    for attach in (False, True):
        model = made("Qwen3").eval()
        if attach:
            shared(model, 2)
        shardproof.shard(model, stage)
        out = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=5, do_sample=False, pad_token_id=0)
        answers.append(out[0].tolist())
    return answers[0], answers[1]


def test_outside_of_a_step_the_model_is_as_it_was(run2):
    for plain, attached in run2(generated_within, 3):
        assert plain == attached


def test_labels_are_shifted_across_the_cut():
    sequence = SequenceParallel.__new__(SequenceParallel)
    sequence.size, parts = 2, []
    for sequence.rank in range(2):
        parts.append(sequence.shifted(torch.tensor([[IGNORE, 2, 3, 4, 5]])).tolist())
    assert parts == [[[2, 3, 4]], [[5, IGNORE, IGNORE]]]


@pytest.mark.parametrize(("heads", "keys", "size"), [(4, 2, 3), (6, 2, 3), (5, 5, 2)])
def test_heads_that_cannot_be_dealt_out_are_refused(heads, keys, size):
    with pytest.raises(ConfigError, match=f"{heads} attention heads and {keys} of keys"):
        check_heads(heads, keys, size)
    check_heads(6, 2, 6)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"metrics": ["mine"], "val_split": 0.1}, "metrics need full rows"),
        ({"deterministic": True}, "are added in another order"),
        ({"fp8": True, "precision": "bf16"}, "scaled by its own maximum"),
        ({"loss": "mine"}, "needs full rows"),
        ({"attn": "eager"}, "--attn is eager"),
    ],
)
def test_what_does_not_go_with_rows_in_parts(given, text):
    with pytest.raises(ConfigError) as caught:
        check_together(SftConfig(sequence_parallel=2, **given))
    assert text in str(caught.value)


def test_ranks_of_a_group_read_the_same_rows():
    batch = SftConfig(sequence_parallel=2, global_batch_size=4, per_device_batch_size=1).batch(4)
    assert (batch.readers, batch.accumulation, batch.whole) == (2, 2, 4)
    read = [list(GlobalBatchSampler(12, batch, rank, 7)) for rank in range(4)]
    assert read[0] == read[1] != read[2] == read[3]
    alone = SftConfig(global_batch_size=4, per_device_batch_size=4).batch(1)
    steps = list(GlobalBatchSampler(12, alone, 0, 7))
    for step, whole in enumerate(steps):
        mine = [row for rank in (0, 2) for micro in read[rank][2 * step : 2 * step + 2] for row in micro]
        assert sorted(mine) == sorted(whole)
    assert batch.on(2).readers == 1
    with pytest.raises(ConfigError, match="in groups of 2"):
        batch.on(3)
    with pytest.raises(ConfigError, match="does not divide the 3 processes"):
        SftConfig(sequence_parallel=2).batch(3)


@pytest.mark.parametrize(("kind", "attn"), [("GptOss", "varlen"), ("Qwen3", "sdpa")])
def test_a_model_with_sinks_gets_attention_that_can_be_shared(kind, attn):
    model = made(kind, "eager" if kind == "GptOss" else "sdpa")
    choose_attention(model, SftConfig(sequence_parallel=2))
    assert model.config._attn_implementation == attn
