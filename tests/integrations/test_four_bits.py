"""A base in four bits computes what bitsandbytes' own layers compute, and each rank keeps its part of it only."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import aside

LAYERS, WORLD = 6, 2


def llama(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=67, num_key_value_heads=2, **sizes)).save_pretrained(folder)


def theirs(folder: str, **packed: Any) -> Any:
    """As transformers loads it."""
    aside.bitsandbytes()
    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    options = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, **packed)} if packed else {}
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", [(64, 128), (64, 96), (24, 32), (10, 130), (6, 7)])
def test_blocks_run_on_from_one_row_to_the_next(shape: tuple[int, int], kind: str) -> None:
    """By what each number of four bits stands for, on any processor."""
    aside.bitsandbytes()
    from bitsandbytes.functional import quantize_4bit

    from shardproof.integrations.four_bits import whole

    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    packed, state = quantize_4bit(weight, quant_type=kind, blocksize=64, compress_statistics=False)
    codes = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], 1).flatten().long()
    scales = state.absmax.repeat_interleave(64)[: len(codes)]
    expected = (state.code[codes] * scales)[: weight.numel()].view(shape)
    assert whole(packed, state).equal(expected)


NF4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.float32}
FP4 = {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False, "bnb_4bit_compute_dtype": torch.float32}


def ours(folder: str, way: str) -> Any:
    from transformers import LlamaForCausalLM

    from shardproof.integrations.four_bits import adopt, in_four_bits
    from shardproof.integrations.pretrained import without_values

    aside.bitsandbytes()
    if way == "packed":
        model = theirs(folder)
        assert adopt(model)
        return model
    model = without_values("LlamaForCausalLM", folder) if way == "lazily" else LlamaForCausalLM.from_pretrained(folder)
    assert in_four_bits(model, "nf4", lambda name: True) == 7 * LAYERS
    return model


def step(model: Any, shard: Any) -> list[Any]:
    """The loss and the gradients of adapters after a step."""
    import peft

    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    shard(model.train())  # in evaluation their layers compute in bf16 on some processors
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    ids = torch.arange(24).view(2, 12)
    for _ in range(2):  # the first step moves one half of the adapters only
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
    return [loss.item(), *(p.grad.norm().item() for p in model.parameters() if p.requires_grad)]


def sharded(folder: str, way: str, stage: int) -> list[float]:
    import shardproof
    from shardproof.integrations.prepared import shard_prepared

    held = []

    def shard(model: Any) -> None:
        shard_prepared(model, stage, None, torch.device("cpu"))
        flats = [flat for flat in model.__dict__["_shardproof"].flats if flat.dtype == torch.uint8]
        assert len(flats) == LAYERS
        held.append([flat.shard.numel() * (WORLD if stage else 1) for flat in flats])
        assert shardproof.stats(model)

    found = step(ours(folder, way), shard)
    packed = (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64) // 2  # bytes of a layer
    assert all(size == pytest.approx(packed, rel=0.02) for size in held[0])
    return found


@pytest.mark.parametrize(("way", "packed"), [("lazily", NF4), ("whole", NF4), ("packed", NF4), ("packed", FP4)])
def test_two_ranks_compute_what_their_layers_do(
    bitsandbytes: None, run2: Any, tmp_path: Path, way: str, packed: dict[str, Any]
) -> None:
    folder = tmp_path / "model"
    llama(folder)
    expected = step(theirs(str(folder), **packed), lambda model: None)
    if way == "packed":
        theirs(str(folder), **packed).save_pretrained(folder)
    for stage in (0, 3):
        for got in run2(sharded, str(folder), way, stage):
            assert got == pytest.approx(expected, rel=2e-5)


def alive_after_forward(folder: str) -> int:
    import shardproof

    model = shardproof.shard(ours(folder, "lazily"), 3)
    size = max(flat.numel for flat in model.__dict__["_shardproof"].flats if flat.dtype == torch.uint8)
    hidden = model.get_input_embeddings()(torch.arange(24).view(2, 12))
    loss = model(inputs_embeds=hidden.detach().requires_grad_()).logits.sum()
    gc.collect()
    tensors = [o for o in gc.get_objects() if isinstance(o, torch.Tensor) and type(o) is torch.Tensor]
    storages = [t.untyped_storage() for t in tensors if t.dtype == torch.uint8]
    places = {storage.data_ptr() for storage in storages if storage.nbytes() == size}
    loss.backward()
    return len(places)


def test_gathered_weights_do_not_stay_until_backward(bitsandbytes: None, run2: Any, tmp_path: Path) -> None:
    """Two units and what the pool keeps; bitsandbytes' own product would hold all of them."""
    llama(tmp_path)
    assert all(count <= 3 for count in run2(alive_after_forward, str(tmp_path)))
