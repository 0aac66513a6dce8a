"""Promise: adapters that begin as a part of the weights begin as PEFT's do, on weights that no rank has whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from integrations.resident import begin_anew, status
from integrations.test_pretrained import MB, Run, saved
from zero.language_models import PROMPT, tiny

KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "pissa": ("Llama", "pissa", {"target_modules": ["q_proj", "down_proj"]}),
    "pissa of bf16": ("Llama", "pissa", {"target_modules": ["v_proj"], "dtype": torch.bfloat16}),
    "pissa of transposed matrices, DoRA": ("GPT2", "pissa", {"target_modules": ["c_attn", "c_proj"], "use_dora": True}),
    "pissa by chance": ("Llama", "pissa_niter_8", {"target_modules": ["q_proj"], "rank_pattern": {"layers.1": 3}}),
    "olora, DoRA": ("Llama", "olora", {"target_modules": ["gate_proj", "o_proj"], "use_dora": True}),
    "olora beside an embedding": ("Llama", "olora", {"target_modules": ["q_proj", "embed_tokens"], "use_rslora": True}),
}


def begun(folder: str, name: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], Any]:
    """The state of a model whose adapters begin sharded, that of PEFT's, and both models' losses."""
    import peft
    import transformers

    import shardproof
    from shardproof.integrations.adapter_init import begin_as
    from shardproof.integrations.pretrained import without_values
    from shardproof.integrations.transformers import shard_prepared

    family, kind, options = KINDS[name]
    options = dict(options)
    loaded = {"dtype": options.pop("dtype")} if "dtype" in options else {}
    model_class = transformers.GPT2LMHeadModel if family == "GPT2" else transformers.LlamaForCausalLM
    how = {"r": 2, "lora_alpha": 6, **options}
    torch.manual_seed(1 + int(torch.distributed.get_rank()))
    model = peft.get_peft_model(without_values(model_class, folder, **loaded).eval(), peft.LoraConfig(**how))
    kept = begin_as(model, kind, seed=3)
    shard_prepared(model, 3, None, torch.device("cpu"))
    torch.manual_seed(1)
    config = peft.LoraConfig(init_lora_weights=kind, **how)
    theirs = peft.get_peft_model(model_class.from_pretrained(folder, **loaded).eval(), config)
    base = model_class.from_pretrained(folder, **loaded).eval()
    with torch.no_grad():
        losses = [float(each(input_ids=PROMPT, labels=PROMPT).loss) for each in (model, theirs, base)]
    ours = shardproof.full_state_dict(model, rank0_only=False)
    for key, value in kept.items():
        assert torch.equal(ours[key.replace(".weight", ".default.weight")], value)
    return ours, theirs.state_dict(), losses


@pytest.mark.sampled
@pytest.mark.parametrize("name", KINDS)
def test_adapters_begin_as_those_of_peft(run2: Run, tmp_path: Path, name: str) -> None:
    for ours, theirs, (loss, their_loss, base) in run2(begun, str(saved(tmp_path, KINDS[name][0])), name):
        near = 2e-2 if "bf16" in name else 2e-6
        assert (loss, loss) == pytest.approx((base, their_loss), abs=near)
        drawn = ("lora_", "base_layer") if "chance" in name else ("lora_embedding_B",)
        for key, value in theirs.items():
            if not any(word in key for word in drawn):
                assert torch.allclose(ours[key].float(), value.float(), rtol=0, atol=near), key
    assert name == "pissa of bf16" or ours["base_model.model.lm_head.weight"].dtype == torch.float32


def not_finite(folder: str) -> str:
    """What is said of a weight that only one rank has decomposed."""
    import peft
    import transformers

    from shardproof.errors import ConfigError
    from shardproof.integrations.adapter_init import begin_as

    model: Any = transformers.LlamaForCausalLM.from_pretrained(folder)
    model.model.layers[1].self_attn.q_proj.weight.data[0, 0] = float("inf")
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ConfigError) as caught:
        begin_as(model, "olora", seed=0)
    return str(caught.value)


def test_all_ranks_tell_of_a_weight_that_cannot_be_decomposed(run2: Run, tmp_path: Path) -> None:
    one, other = run2(not_finite, str(saved(tmp_path, "Llama")))
    assert one == other
    assert "layers.1.self_attn.q_proj: its adapter cannot be initialised by olora: the weight is not finite." in one


def peak(folder: str) -> tuple[int, int, int]:
    """By how many bytes resident memory grew at most while loading; what a rank keeps; the largest weight."""
    import peft
    import transformers

    import shardproof
    from shardproof.integrations.adapter_init import begin_as
    from shardproof.integrations.pretrained import without_values
    from shardproof.integrations.transformers import shard_prepared

    before = begin_anew()
    model = without_values(transformers.LlamaForCausalLM, folder)
    how = peft.LoraConfig(r=2, target_modules=["up_proj", "down_proj"], init_lora_weights=True)
    model = peft.get_peft_model(model, how)
    begin_as(model, "pissa", seed=0)
    shard_prepared(model, 3, None, torch.device("cpu"))
    grown, units = status("VmHWM") - before, shardproof.stats(model).units.values()
    return grown, sum(u.shard_bytes for u in units), max(p.numel() * p.itemsize for p in model.parameters())


@pytest.mark.slow
def test_no_rank_holds_more_than_its_shard_and_one_decomposition(run2: Run, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 20, "head_dim": 64}
    tiny("Llama", vocab_size=256, num_attention_heads=4, **sizes).save_pretrained(tmp_path)
    try:
        runs = [run2(peak, str(tmp_path)) for _ in range(3)]  # the first also has imports, pools, the heap
    except PermissionError:
        pytest.skip("the peak of resident memory cannot be reset here")
    for grown, kept, largest in map(min, *runs[1:]):  # tests before leave gaps in the heap, which one run may fill
        assert grown < kept + 24 * largest, f"{grown / MB:.1f} MB for {kept / MB:.1f} + {largest / MB:.1f} MB"
        assert 24 * largest < kept  # which is half of the model
