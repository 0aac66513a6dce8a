"""Models that are published packed, in FP8 or MXFP4: trained unpacked, and every rank reads its part of them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import GptOssForCausalLM, Qwen3ForCausalLM

import shardproof
from integrations.test_pretrained import Run, check_same
from models.packed_folders import FP8, pack
from shardproof.errors import ConfigError
from shardproof.integrations.pretrained import without_values
from shardproof.integrations.readers import Entry, Stacked, Stored
from shardproof.models.loading.classes import with_values
from shardproof.models.loading.packed import check_can_unpack, unpacking_of
from shardproof.zero.build import READER
from zero.language_models import tiny

CASES = {"Qwen3": "fp8", "Qwen3Moe": "fp8", "GptOss": "mxfp4"}
SIZES = {
    "Qwen3": {"intermediate_size": 24},
    "Qwen3Moe": {"moe_intermediate_size": 16, "intermediate_size": 24},
    "GptOss": {"hidden_size": 32, "intermediate_size": 32},
}


def packed(folder: Path, family: str) -> Path:
    torch.manual_seed(0)
    tiny(family, **SIZES[family]).save_pretrained(folder)
    return pack(folder, CASES[family])


@pytest.mark.parametrize("family", CASES)
def test_each_rank_reads_its_part(run2: Run, tmp_path: Path, family: str) -> None:
    """Bit for bit what transformers makes of it, whose CPU has no products of packed weights; nothing is said."""
    assert check_same(run2, "AutoModelForCausalLM", packed(tmp_path, family), 3) == [[], []]


@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss"])
def test_of_experts_only_those_are_unpacked_that_a_range_is_in(tmp_path: Path, monkeypatch, family: str) -> None:
    model = without_values("AutoModelForCausalLM", str(packed(tmp_path, family)))
    weight = model.model.layers[0].mlp.experts.gate_up_proj
    read, one = weight.__dict__[READER], weight[0].numel()
    assert isinstance(read, Stacked)
    names: list[str] = []

    def noted(whole: Any) -> Any:
        def noting(self: Stored) -> torch.Tensor:
            names.append(f"{self.name} {getattr(self, 'number', '')}")
            return whole(self)

        return noting

    for kind in (Stored, Entry):
        monkeypatch.setattr(kind, "whole", noted(kind.whole))
    assert not read(one + 1, 2 * one).requires_grad, "it would hold all that was unpacked before"
    assert names
    assert all(".1." in name or name.endswith(" 1") for name in names), names


@pytest.mark.parametrize("rows", [16, 12, 18])
def test_the_last_block_of_a_weight_may_be_smaller(rows: int) -> None:
    """As of DeepSeek-V3: 576 rows in blocks of 128. transformers takes blocks to be of one size: wrong scales, or an
    error."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    config = FP8 | {"weight_block_size": [8, 4]}
    told = unpacking_of(config)["quantization_config"]
    scales = torch.rand(-(-rows // 8), 2) + 0.5
    whole = scales.repeat_interleave(8, 0)[:rows].repeat_interleave(4, 1)[:, :7]
    codes = torch.randn(rows, 7).to(torch.float8_e4m3fn)
    operation = Fp8Dequantize(SimpleNamespace(quantization_config=told))
    found = operation.convert({"weight": [codes], "weight_scale_inv": [scales]}, full_layer_name=None)["weight"]
    torch.testing.assert_close(found.float(), codes.float() * whole)


@pytest.mark.parametrize("family", CASES)
def test_it_is_unpacked_where_a_device_could_compute_with_it_packed(tmp_path: Path, monkeypatch, family: str) -> None:
    """Those layers have no gradient. transformers says so of FP8 only after the first step."""
    from transformers.quantizers import quantizer_finegrained_fp8 as fp8
    from transformers.quantizers import quantizer_mxfp4 as mxfp4

    monkeypatch.setattr(fp8.FineGrainedFP8HfQuantizer, "validate_environment", lambda *args, **kwargs: None)
    monkeypatch.setattr(mxfp4.Mxfp4HfQuantizer, "validate_environment", lambda *args, **kwargs: None)
    monkeypatch.setattr(mxfp4, "get_current_accelerator", lambda: torch.device("cuda"))
    import transformers

    folder = packed(tmp_path, family)
    for how in (with_values, without_values):
        model = how(transformers.AutoModelForCausalLM, str(folder), dtype=torch.bfloat16)
        assert {type(m) for m in model.modules() if "linear" in type(m).__name__.lower()} == {nn.Linear}
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert all(p.requires_grad for p in model.parameters())
        assert not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize("said", [{"quant_method": "modelopt", "quant_algo": "FP8"}, None])
def test_codes_that_nobody_unpacks_are_no_values(tmp_path: Path, said: dict[str, str] | None) -> None:
    """transformers passes over a packing that it does not know, and over scales, with a line in its log."""
    folder = packed(tmp_path / "model", "Qwen3")
    file = folder / "config.json"
    config = json.loads(file.read_text())
    del config["quantization_config"]
    file.write_text(json.dumps(config | ({"quantization_config": said} if said else {})))
    text = r"packed as modelopt, which transformers does not support" if said else "is packed in 8 bits in .* scales"
    with pytest.raises(ConfigError, match=text):
        without_values("AutoModelForCausalLM", str(folder))
    if said:
        with pytest.raises(ConfigError, match=text):
            with_values(Qwen3ForCausalLM, str(folder))
        with pytest.raises(ConfigError, match=text):
            check_can_unpack(str(folder))


def test_values_in_eight_bits_without_scales_are_values(tmp_path: Path) -> None:
    tiny("Qwen3").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    values = {
        name: value.to(torch.float8_e4m3fn) if "down_proj" in name else value for name, value in load_file(file).items()
    }
    save_file(values, file, metadata={"format": "pt"})
    model = shardproof.load_pretrained(str(tmp_path), 3, dtype=torch.float32)
    for name, value in shardproof.full_state_dict(model).items():
        assert torch.equal(value, values[name].float()), name


def test_so_are_experts_in_one_tensor_whose_scales_nobody_reads(tmp_path: Path) -> None:
    """As transformers saves them where it computes with them. It makes values of those that files hold apart only."""
    model = tiny("GptOss", **SIZES["GptOss"])
    model.save_pretrained(tmp_path)
    values = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    values |= {name: values[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(4, 4, 4)}
    save_file(values, tmp_path / "model.safetensors", metadata={"format": "pt"})
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": FP8}))
    for how in (with_values, without_values):
        with pytest.raises(ConfigError, match=r"experts.down_proj' is packed in 8 bits in .*model.safetensors, "):
            how(GptOssForCausalLM, str(tmp_path))
