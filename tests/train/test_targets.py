"""Promise: adapters go to the layers and the tensors of experts that were asked for, and to no others."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from models import shrunk
from shardproof.errors import ConfigError
from shardproof.models.families.anatomy import anatomy
from shardproof.train.adapters.adding import check_named_parts, with_adapters
from shardproof.train.options.config import SftConfig
from shardproof.train.options.rlhf_config import RlhfConfig
from train.test_export import experts

pytestmark = pytest.mark.slow

SIZES = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}
SMALL = {**SIZES, "intermediate_size": 24, "num_hidden_layers": 3, "num_experts_per_tok": 2}
RANKS = {"q_lora_rank": 4, "kv_lora_rank": 4, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
GROUPS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
MIXTURES: dict[str, dict[str, Any]] = {
    # The first layer is dense, and others have an expert for every token.
    "DeepseekV3": {**SMALL, **RANKS, **GROUPS, "moe_intermediate_size": 12},
    "Qwen2Moe": {**SMALL, "num_experts": 4, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 12},
    "Qwen3Moe": {**SMALL, "num_experts": 4, "moe_intermediate_size": 12, "head_dim": 8},
    "Mixtral": {**SMALL, "num_local_experts": 4},
    "GptOss": {**SMALL, "num_local_experts": 4, "head_dim": 8},
    "Llama4Text": {**SMALL, "num_local_experts": 4, "head_dim": 8, "intermediate_size_mlp": 24},
    "Phimoe": {**SMALL, "num_local_experts": 4},
}
PROJECTIONS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def mixture(kind: str) -> Any:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**MIXTURES[kind], pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return transformers.AutoModelForCausalLM.from_config(config)


def adapted(model: Any, **options: Any) -> set[str]:
    """The weights that get adapters: those that merging changes where all adapters have values."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    peft = with_adapters(model, SftConfig(model="x", dataset=["x"], tuner="lora", lora_rank=2, **options))
    for name, parameter in peft.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    merged = peft.merge_and_unload()
    return {name for name, p in merged.named_parameters() if not torch.equal(p, before[name])}


def linear(model: Any) -> set[str]:
    head = model.get_output_embeddings()
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}
    return {f"{name}.weight" for name, m in layers.items() if not type(m).__name__.endswith("Router")}


@pytest.mark.parametrize("kind", MIXTURES)
def test_all_linear_layers_are_all_of_them(kind: str) -> None:
    """Also those whose names PEFT reads as those of experts; not routers, which give scores and choices, too."""
    model = mixture(kind)
    asked = linear(model)
    found = adapted(model)
    assert asked <= found
    others = {re.sub(r".*\.\d+\.", "", name) for name in found - asked}
    assert others == ({"mlp.gate.weight", *PROJECTIONS} if kind in ("DeepseekV3", "Qwen3Moe", "Mixtral") else set())


def test_any_decoder_gets_adapters() -> None:
    """Without a word about where, also where PEFT refuses some of the layers."""
    without = {}
    for kind in shrunk.kinds():
        model = shrunk.build(kind)
        every = linear(model)
        if left := every - adapted(model):
            without[kind] = {name.split(".")[-2] for name in left}
    refused = {kind: {"out_proj"} for kind in ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h")}
    unreached = {"gemma3": {"fc1", "fc2", "out_proj"}}  # what pools its tower's vectors
    shared = {kind: without.pop(kind) for kind in ("zamba", "zamba2")}  # layers that stand in several blocks
    assert without == {**refused, **unreached, "deepseek_v4": {"o_a_proj"}}
    assert all("out_proj" not in left for left in shared.values())


def test_those_of_one_part_leave_the_experts_of_others_alone(tiny_models) -> None:
    """Layers of a tower have the names that projections of experts have."""
    from shardproof.models.loading.classes import load_pretrained

    model = load_pretrained(str(tiny_models("qwen3_omni_moe")))
    part_of, asked = anatomy(model).part_of, linear(model)
    for part in ("audio", "vision", "llm"):
        model = load_pretrained(str(tiny_models("qwen3_omni_moe")))
        found = adapted(model, train_parts=[part])
        assert {part_of[name] for name in found} == {part}
        assert {name for name in asked if part_of[name] == part and "lm_head" not in name} <= found
    assert any("experts" in name for name in found)


def test_names_and_expressions_reach_the_parts_that_are_trained(tiny_models) -> None:
    """Towers have layers of the same names as the language model, and so has a talker."""
    from shardproof.models.loading.classes import load_pretrained

    def of(kind: str, **options: Any) -> tuple[set[str], set[str]]:
        model = load_pretrained(str(tiny_models(kind)))
        part_of = anatomy(model).part_of
        found = adapted(model, **options)
        return {part_of[name] for name in found}, {name.split(".")[-2] for name in found}

    named = {"target_modules": ["q_proj", "fc1"]}
    assert of("llava", **named) == ({"llm", "vision"}, {"q_proj", "fc1"})
    assert of("llava", **named, freeze=["vision"]) == ({"llm"}, {"q_proj"})
    assert of("llava", target_modules=[r".*\.(q_proj|linear_1)"], train_parts=["aligner"]) == (
        {"aligner"},
        {"linear_1"},
    )
    experts = {"target_modules": ["q_proj", "gate_proj", "up_proj"]}
    assert of("qwen3_omni_moe", **experts) == ({"llm", "audio"}, {"q_proj", "experts"})
    stacks = {"target_parameters": ["mlp.experts.down_proj"], "target_modules": ["o_proj"]}
    assert of("qwen3_omni_moe", **stacks) == ({"llm"}, {"o_proj", "experts"})
    with pytest.raises(
        ConfigError, match="--target-modules fc1: all of these are in parts that are not trained, vision"
    ):
        of("llava", target_modules=["fc1"], freeze=["vision", "aligner"])


def test_names_and_expressions_reach_what_they_say() -> None:
    every = adapted(mixture("Qwen3Moe"), target_modules=["q_proj", "gate_proj", "up_proj"])
    assert {re.sub(r".*\.\d+\.", "", name) for name in every} == {"self_attn.q_proj.weight", PROJECTIONS[0]}
    assert len(every) == 6
    first = adapted(mixture("Qwen3Moe"), target_modules=[r".*layers\.0\..*\.(q_proj|gate_proj|up_proj)"])
    assert first == {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.experts.gate_up_proj"}
    shared = adapted(mixture("DeepseekV3"), target_modules=[r".*\.shared_experts\.down_proj"])
    by_name = adapted(mixture("DeepseekV3"), target_modules=["shared_experts.down_proj"])
    assert shared == by_name == {f"model.layers.{layer}.mlp.shared_experts.down_proj.weight" for layer in (1, 2)}
    dense = adapted(mixture("DeepseekV3"), target_modules=["layers.0.mlp.down_proj"])
    assert dense == {"model.layers.0.mlp.down_proj.weight"}
    own = adapted(mixture("DeepseekV3"), target_modules=["1.mlp.experts.down_proj"])
    assert own == {"model.layers.1.mlp.experts.down_proj"}


@pytest.mark.parametrize("whole, inside", [("gate", ["mlp.gate.weight"]), ("experts", PROJECTIONS), ("q_proj", [])])
def test_what_is_trained_whole_gets_no_adapters(whole: str, inside: list[str]) -> None:
    """Routers and experts, too, as PEFT has it with layers."""
    every, found = adapted(mixture("Qwen3Moe")), adapted(mixture("Qwen3Moe"), modules_to_save=[whole])
    left = {re.sub(r".*\.\d+\.", "", name) for name in every - found}
    assert left == set(inside or [f"self_attn.{whole}.weight"])


def test_what_ends_in_the_name_of_what_is_trained_whole_gets_no_adapters() -> None:
    """PEFT trains `shared_expert_gate` whole, too, where `gate` is asked for."""
    every, found = adapted(mixture("Qwen2Moe")), adapted(mixture("Qwen2Moe"), modules_to_save=["gate"])
    assert every - found == {f"model.layers.{layer}.mlp.shared_expert_gate.weight" for layer in range(3)}


def test_experts_without_adapters_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for kind, options, told in (
        ("GptOss", {}, ["gate_up_proj", "down_proj"]),
        ("GptOss", {"target_parameters": ["experts.down_proj"]}, ["gate_up_proj"]),
        ("GptOss", {"target_modules": ["q_proj"]}, []),
        ("GptOss", {"target_parameters": PROJECTIONS}, []),
        ("GptOss", {"modules_to_save": ["experts"]}, []),
        ("Qwen3Moe", {}, []),
    ):
        caplog.clear()
        mixture(kind).save_pretrained(tmp_path / kind)
        check_named_parts(str(tmp_path / kind), SftConfig(model=str(tmp_path), dataset=["x"], tuner="lora", **options))
        expected = f"--target-parameters {' '.join(f'mlp.experts.{name}' for name in told)};"
        assert expected in caplog.text if told else "adapters" not in caplog.text, caplog.text


def test_tensors_are_named_by_the_ends_of_their_names() -> None:
    model = mixture("GptOss")
    found = adapted(model, target_parameters=["experts.down_proj", "layers.1.mlp.experts.gate_up_proj"])
    downs = {f"model.layers.{layer}.mlp.experts.down_proj" for layer in range(3)}
    assert found - linear(mixture("GptOss")) == downs | {"model.layers.1.mlp.experts.gate_up_proj"}


@pytest.mark.parametrize(
    "kind, options, words",
    [
        ("Qwen3Moe", {"lora_dropout": 0.05}, "--lora-dropout 0.05: PEFT cannot do this with adapters on tensors (mlp."),
        (
            "Qwen3Moe",
            {"dora": True},
            "Leave it out, or name layers only: --target-modules q_proj k_proj v_",
        ),
        ("GptOss", {"dora": True, "lora_dropout": 0.1, "target_parameters": PROJECTIONS}, "Leave both out."),
        ("Qwen3Moe", {"init_lora_weights": "pissa"}, "--init-lora-weights pissa: PEFT cannot do this with adapters on"),
        ("DeepseekV3", {"quantize": "nf4"}, "takes gate_proj, up_proj, down_proj of this model to be its experts'"),
        ("Qwen3Moe", {"target_modules": ["gate_proj"]}, "--target-modules gate_proj: Cannot convert PEFT target(s)"),
        (
            "GptOss",
            {"target_modules": ["up_proj"]},
            "Its experts are tensors: --target-parameters mlp.experts.",
        ),
        ("GptOss", {"target_parameters": ["experts.down"]}, "Did you mean mlp.experts.down_proj? Its experts are"),
        ("GptOss", {"target_parameters": ["self_attn.sinks"]}, "layers.0.self_attn.sinks has 1 dimension(s), and"),
        ("Qwen3Moe", {"target_parameters": ["q_proj.weight"]}, "q_proj.weight is in a module that has adapters."),
        (
            "GptOss",
            {"target_parameters": PROJECTIONS, "modules_to_save": ["experts"]},
            "is in a module that is trained in full (--modules-to-save experts). Leave one of them out.",
        ),
        ("Qwen3Moe", {"target_modules": ["mlp.up_proj", "mlp.gate_proj"]}, "the model has no module of that name."),
        ("Qwen3Moe", {"target_modules": ["all-linear", "embed_tokens"]}, "'all-linear' stands alone"),
        (
            "GptOss",
            {"target_modules": ["q_proj", "experts"]},
            "layers.0.mlp.experts is a GptOssExperts, and adapters go to layers. Name linear layers. Its experts are"
            " tensors: --target-parameters mlp.experts.gate_up_proj mlp.experts.down_proj.",
        ),
        ("Llama4Text", {"target_modules": ["router"]}, "layers.0.feed_forward.router is a Llama4Router, and"),
        ("Qwen3Moe", {"target_modules": ["self_attn"]}, "those in it are q_proj, k_proj, v_proj, o_proj."),
    ],
)
def test_what_cannot_be_is_refused_before_the_run(tmp_path: Path, kind: str, options: Any, words: str) -> None:
    mixture(kind).save_pretrained(tmp_path)
    config = SftConfig(model=str(tmp_path), dataset=["x"], tuner="lora", **options)
    with pytest.raises(ConfigError, match=re.escape(words)):
        check_named_parts(str(tmp_path), config)


def test_a_head_that_trl_multiplies_by_itself_gets_none(tmp_path: Path) -> None:
    mixture("Qwen3Moe").save_pretrained(tmp_path)
    config = RlhfConfig(
        model=str(tmp_path), dataset=["x"], tuner="lora", rlhf_type="dpo", target_parameters=["lm_head.weight"]
    )
    with pytest.raises(ConfigError, match=r"--target-parameters lm_head.weight: TRL uses the weight of the head"):
        check_named_parts(str(tmp_path), config)


@pytest.fixture(scope="module")
def runs(commands, sft, tiny: Path, tmp_path_factory):
    folder = experts(tiny, tmp_path_factory.mktemp("experts") / "model")
    lora = functools.partial(sft, "--model", str(folder), "--tuner", "lora", "--target-modules", "q_proj")
    tensors = ["--target-parameters", *PROJECTIONS]
    return commands(
        [
            ("one", lora(*tensors)),
            ("two", lora(*tensors, "--nproc", "2", "--stage", "3")),
            ("on", sft("--model", str(folder), "--adapters", "RUNS/two", "--max-steps", "1")),
        ]
    )


def test_adapters_on_tensors_are_trained_as_in_one_process(runs) -> None:
    from safetensors.torch import load_file

    assert all(run.code == 0 for run in runs.values()), runs["two"].output
    one, two = (load_file(runs[name].folder / "model" / "adapter_model.safetensors") for name in ("one", "two"))
    assert any("experts" in name for name in one)
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=1e-5, rtol=1e-4, msg=name)
    assert load_file(runs["on"].folder / "model" / "adapter_model.safetensors").keys() == two.keys()
