"""--new-blocks: a model begins as it was, its new blocks alone are trained, and what is saved is an ordinary model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from shardproof.errors import ConfigError
from shardproof.train.model.new_blocks import add_blocks
from train.stages_for_tests import PLAN

PRO = ["--new-blocks", "2"]


@pytest.fixture(scope="module")
def runs(commands, sft):
    done = commands([(name, sft(*PRO, *more)) for name, more in PLAN.items()] + [("before", sft("--max-steps", "1"))])
    last = done["stage 3"].folder
    ask = ["--prompt", "the process", "--max-new-tokens", "4", "--temperature", "0"]
    resumed = sft(*PRO, *PLAN["stage 3"], "--resume", str(last / "checkpoint-3"))
    return done | commands(
        [
            ("resumed", resumed),
            ("early", ["export", str(last / "checkpoint-5"), "OUT"]),
            ("asked", ["infer", str(last), *ask, "--nproc", "2"]),
            ("on", sft("--model", str(last / "model"), "--tuner", "lora", "--max-steps", "1")),
        ]
    )


@pytest.mark.slow
def test_the_numbers_of_one_process_at_every_stage_from_the_model_as_it_was(runs) -> None:
    for name, run in runs.items():
        assert run.code == 0, f"{name}:\n{run.output}"
    one = runs["one"]
    for name in PLAN:
        for key in ("loss", "grad_norm"):
            assert runs[name].series(key) == pytest.approx(one.series(key), rel=1e-4), f"{key}: {name}"
    assert one.series("loss")[0] == pytest.approx(runs["before"].series("loss")[0], rel=1e-6)
    assert one.series("loss")[-1] < one.series("loss")[0]
    assert runs["resumed"].series("loss") == runs["stage 3"].series("loss")[3:]
    assert runs["on"].series("loss")[0] < one.series("loss")[-1] + 0.05


@pytest.mark.slow
def test_only_new_blocks_are_changed_and_transformers_loads_them(runs, tiny: Path) -> None:
    folder = runs["stage 3"].folder / "model"
    layers = json.loads((tiny / "config.json").read_text())["num_hidden_layers"]
    said = json.loads((folder / "config.json").read_text())
    assert said["num_hidden_layers"] == layers + 2
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert len(model.model.layers) == layers + 2
    before, after = load_file(tiny / "model.safetensors"), load_file(folder / "model.safetensors")
    early = load_file(runs["early"].folder / "model.safetensors")
    assert all(value.equal(early[name]) for name, value in after.items())
    new = {f"model.layers.{place}." for place in (layers // 2, layers + 1)}
    old = [name for name in after if not name.startswith(tuple(new))]
    assert len(old) == len(before)
    values = [value for name, value in before.items()]
    assert all(any(after[name].equal(value) for value in values) for name in old)
    assert all(after[f"{block}self_attn.o_proj.weight"].any() for block in new)


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 64}
KINDS = {
    "llama": {},
    "qwen3": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "glm4": {"head_dim": 8},
}


def built(kind: str, **more):
    config = transformers.AutoConfig.for_model(kind, **SIZES, num_key_value_heads=2, pad_token_id=0, **more)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_what_it_was_with_blocks_that_write_nothing(tmp_path: Path, kind: str) -> None:
    model, ids = built(kind, **KINDS[kind]), torch.arange(3, 20)[None]
    with torch.no_grad():
        before = model(ids).logits
        add_blocks(model, 2)
        torch.testing.assert_close(model(ids).logits, before, rtol=0, atol=0)
        model.save_pretrained(tmp_path)
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        torch.testing.assert_close(again(ids).logits, before, rtol=1e-5, atol=1e-6)
        assert again.config.num_hidden_layers == 6
    model.set_attn_implementation("eager")  # as --packing chooses it, once the blocks are there
    blocks = [module.config for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "config")]
    assert {config._attn_implementation for config in blocks} == {"eager"}


@pytest.mark.parametrize(
    ("kind", "count", "more", "said"),
    [
        ("llama", 3, {}, "has 4 blocks, which is not a multiple of 3"),
        ("gpt_neox", 2, {}, "blocks without down_proj and o_proj"),
        ("qwen3_moe", 2, {**KINDS["qwen3_moe"], "mlp_only_layers": [1]}, "its config cannot say which kind"),
    ],
)
def test_what_cannot_be_is_refused(kind, count, more, said) -> None:
    with pytest.raises(ConfigError, match=said):
        add_blocks(built(kind, **more), count)
