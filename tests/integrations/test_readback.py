"""Promise: what was saved reads back equal, and what does not is named at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardproof.errors import CheckpointError
from shardproof.integrations.readback import check_saved
from shardproof.integrations.saved import as_saved


def model(adapters: bool) -> torch.nn.Module:
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    plain = LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=not adapters)
    )
    if not adapters:
        return plain
    targets = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]}
    return peft.get_peft_model(plain, peft.LoraConfig(r=2, init_lora_weights=False, **targets))


def saved(folder: Path, adapters: bool) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder written by `save_pretrained`, and the weights that were to be saved."""
    trained = model(adapters)
    trained.save_pretrained(folder)
    weights = {n: t for n, t in trained.state_dict().items() if not adapters or "lora" in n or "modules_to_save" in n}
    (file,) = folder.glob("*.safetensors")
    return file, as_saved(trained, weights)


@pytest.mark.parametrize("adapters", [False, True])
def test_an_honest_save_passes(tmp_path, adapters):
    file, weights = saved(tmp_path, adapters)
    check_saved(tmp_path, weights)
    assert load_file(file).keys() <= weights.keys()  # so every tensor in the file was compared


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("damage", ["emptied", "changed", "lost", "cut"])
def test_what_went_wrong_is_named(tmp_path, adapters, damage):
    file, weights = saved(tmp_path, adapters)
    content = load_file(file)
    name = sorted(content)[1]
    if damage == "emptied":  # as ZeRO-3 leaves parameters that nobody gathered
        content[name] = torch.empty(0)
    elif damage == "changed":
        content[name].view(-1)[3] += 1e-3
    elif damage == "lost":
        del content[name]
    save_file(content, file)
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=name if damage != "cut" else f"{file}.*cannot be read back"):
        check_saved(tmp_path, weights)
