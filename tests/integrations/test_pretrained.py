"""A model folder that every rank reads its part of is the model that one process loads, and no rank holds it all."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from integrations.resident import begin_anew, status
from shardproof.integrations import pretrained
from shardproof.integrations.pretrained import without_values
from shardproof.zero.build import READER
from zero.language_models import PROMPT, tiny

Run = Callable[..., list[Any]]
MB = 1 << 20


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {f"buffer {name}": value.clone() for name, value in model.named_buffers()}


def in_one_process(kind: str, folder: str, options: dict[str, Any]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Weights, buffers and logits as `from_pretrained` gives them, and a random number drawn afterwards."""
    import transformers

    torch.manual_seed(3)
    model = getattr(transformers, kind).from_pretrained(folder, **options)
    values = {**model.state_dict(), **buffers_of(model), "random": torch.rand(3)}
    with torch.no_grad():
        return values, model(input_ids=PROMPT).logits


def sharded(kind: str, folder: str, options: dict[str, Any], stage: int) -> tuple[Any, Any, list[str]]:
    import shardproof

    heard: list[str] = []
    ear = logging.Handler()
    ear.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardproof").addHandler(ear)
    torch.manual_seed(3)
    model = shardproof.load_pretrained(folder, stage, kind=kind, **options)
    logging.getLogger("shardproof").removeHandler(ear)
    drawn = torch.rand(3)
    assert not any(p.is_meta for p in model.parameters())
    values = shardproof.full_state_dict(model, rank0_only=False)
    with torch.no_grad():
        logits = model(input_ids=PROMPT).logits
    return {**values, **buffers_of(model), "random": drawn}, logits, heard


def check_same(run2: Run, kind: str, folder: Path, stage: int, **options: Any) -> list[list[str]]:
    """Returns what each rank said."""
    expected, logits = in_one_process(kind, str(folder), options)
    ranks = run2(sharded, kind, str(folder), options, stage)
    for values, own_logits, _ in ranks:
        assert values.keys() == expected.keys()
        for name, value in expected.items():
            assert values[name].dtype == value.dtype, name
            assert torch.equal(values[name], value), name
        assert torch.equal(own_logits, logits)
    return [heard for _, _, heard in ranks]


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=53, n_embd=64, n_layer=2, n_head=2, n_positions=64, pad_token_id=0))


def qwen3_vl_moe() -> Any:
    """Files hold its experts transposed."""
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    text = {"num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 2, "vocab_size": 53, "pad_token_id": 0}
    experts = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6], "mrope_interleaved": True}
    seen = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "depth": 1, "out_hidden_size": 32}
    config = Qwen3VLMoeConfig(
        text_config={**sizes, **text, **experts, "rope_parameters": rope},
        vision_config={**seen, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    )
    return Qwen3VLMoeForConditionalGeneration(config)


def saved(folder: Path, family: str, **changes: Any) -> Path:
    """In several files."""
    torch.manual_seed(0)
    own = {"GPT2": gpt2, "Qwen3VLMoe": qwen3_vl_moe}
    model = own[family]() if family in own else tiny(family, **changes)
    model.save_pretrained(folder, max_shard_size="4KB")
    return folder


CASES = [
    ("Qwen3", 3, {"tie_word_embeddings": True}, {}),
    ("Qwen3", 0, {"tie_word_embeddings": True}, {}),
    ("Llama", 2, {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, {}),
    ("Llama", 3, {}, {"dtype": torch.bfloat16}),
    ("Qwen3Moe", 3, {}, {}),
]


@pytest.mark.parametrize(("family", "stage", "changes", "options"), CASES)
def test_it_is_the_model_of_one_process(
    run2: Run, tmp_path: Path, family: str, stage: int, changes: Any, options: Any
) -> None:
    """Tied weights, buffers that no file holds, another dtype, experts that files hold apart: bit for bit."""
    said = check_same(run2, "AutoModelForCausalLM", saved(tmp_path, family, **changes), stage, **options)
    assert said == [[], []]


def test_what_the_files_lack_is_initialised_as_in_one_process(run2: Run, tmp_path: Path) -> None:
    """From the same random numbers, which go on where they would; names get the prefix that files lack."""
    torch.manual_seed(0)
    tiny("Llama").model.save_pretrained(tmp_path / "base")  # no head
    check_same(run2, "AutoModelForCausalLM", tmp_path / "base", 3)
    saved(tmp_path / "whole", "Qwen3")
    check_same(run2, "AutoModelForSequenceClassification", tmp_path / "whole", 3, num_labels=1)


def with_little(model: Any, folder: Path) -> Path:
    """A model folder whose files hold nothing but one norm."""
    from safetensors.torch import save_file

    model.config.save_pretrained(folder)
    name, value = next((name, value) for name, value in model.state_dict().items() if "norm" in name or ".ln_" in name)
    save_file({name: value.clone()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_model_that_is_hardly_in_the_files_is_initialised_as_in_one_process(run2: Run, tmp_path: Path) -> None:
    """Module by module, also where a module writes into those inside it (GPT-2); larger than a page, and smaller."""
    for number, model in enumerate((tiny("Qwen3Moe", hidden_size=64), tiny("Qwen3", tie_word_embeddings=True), gpt2())):
        folder = with_little(model, tmp_path / str(number))
        assert check_same(run2, "AutoModelForCausalLM", folder, 3) == [[], []]


def started_apart(folder: str, stage: int) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Weights, and random numbers drawn before and after, where each rank was seeded with another number."""
    import shardproof

    torch.manual_seed(torch.distributed.get_rank())
    model = shardproof.load_pretrained(folder, stage)
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    drawn = torch.rand(3)
    torch.manual_seed(torch.distributed.get_rank())
    return values, drawn, torch.rand(3)


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_that_were_seeded_otherwise_begin_alike(run2: Run, tmp_path: Path, stage: int) -> None:
    """With the numbers of the first; the others keep theirs."""
    (first, _, _), (second, drawn, fresh) = run2(started_apart, str(with_little(tiny("Llama"), tmp_path)), stage)
    assert all(torch.equal(first[name], value) for name, value in second.items())
    assert torch.equal(drawn, fresh)


def test_a_module_that_needs_others_is_left_to_transformers(tmp_path: Path) -> None:
    """One that computes with values which are not there: nothing has changed, and the random numbers neither."""
    from shardproof.integrations.initial import initialise

    class Strange(type(tiny("Llama"))):  # type: ignore[misc]
        def _init_weights(self, module: nn.Module) -> None:
            super()._init_weights(module)
            if module is self:
                self.lm_head.weight.mul_(2.0)

    with torch.device("meta"):
        model = Strange(tiny("Llama").config)
    for module in model.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    state = torch.get_rng_state()
    assert not initialise(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any("read_range" in p.__dict__ for p in model.parameters())
    assert not any("_is_hf_initialized" in module.__dict__ for module in model.modules())


def test_of_experts_only_those_in_the_range_are_read(tmp_path: Path) -> None:
    """Files hold them apart; a rank makes one after the other."""
    from dataclasses import replace

    from transformers import Qwen3MoeForCausalLM

    from shardproof.integrations.pretrained import without_values

    model = without_values(Qwen3MoeForCausalLM, str(saved(tmp_path, "Qwen3Moe")))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    whole = Qwen3MoeForCausalLM.from_pretrained(tmp_path).get_parameter(name).detach().flatten()
    reader, seen = model.get_parameter(name).read_range, []

    def convert(sources: Any) -> torch.Tensor:
        seen.append([source.name for _, source in sources])
        return reader.convert(sources)

    one = whole.numel() // 4
    values = replace(reader, convert=convert)(one + 3, 2 * one + 5)
    assert torch.equal(values, whole[one + 3 : 2 * one + 5])
    assert seen == [[f"model.layers.1.mlp.experts.{i}.{part}_proj.weight" for part in ("gate", "up")] for i in (1, 2)]


@pytest.mark.parametrize("equal", [True, False])
def test_weights_that_are_tied_and_in_the_files_twice(run2: Run, tmp_path: Path, equal: bool) -> None:
    """Equal ones are tied, others are not: as transformers does."""
    from safetensors.torch import load_file, save_file

    saved(tmp_path, "Qwen3", tie_word_embeddings=True)
    name = next(file for file in tmp_path.glob("*.safetensors") if "model.embed_tokens.weight" in load_file(file))
    tensors = load_file(name)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + (0.0 if equal else 1.0)
    save_file(tensors, name, {"format": "pt"})
    (said, _) = check_same(run2, "AutoModelForCausalLM", tmp_path, 3)
    assert bool(said) is not equal


def test_another_format_is_loaded_whole_and_said(run2: Run, tmp_path: Path) -> None:
    """Pickled weights."""
    model = tiny("Llama")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    for (line,) in check_same(run2, "AutoModelForCausalLM", tmp_path, 3):
        assert "is loaded in full on every rank: it is not in safetensors files" in line


def test_a_release_that_loads_in_another_way_loads_whole(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    """What reads by ranges stands on what transformers does not promise."""
    folder = str(saved(tmp_path, "Llama"))
    expected = without_values("AutoModelForCausalLM", folder)
    assert any(READER in p.__dict__ for p in expected.parameters())

    def plan(*args: Any) -> Any:
        raise TypeError("an argument less")

    monkeypatch.setattr(pretrained, "plan", plan)
    model = without_values("AutoModelForCausalLM", folder)
    assert (
        "loaded in full on every rank: this release of transformers loads models differently (an argument"
        in caplog.text
    )
    assert not any(READER in p.__dict__ or p.isnan().any() for p in model.parameters())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in expected.named_parameters()]
    with pytest.raises(TypeError, match="no_such_option"):  # a mistake stays one
        without_values("AutoModelForCausalLM", folder, no_such_option=1)


def test_weights_of_another_shape_are_refused_as_by_transformers(tmp_path: Path) -> None:
    import shardproof

    saved(tmp_path, "Llama")
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        shardproof.load_pretrained(str(tmp_path), vocab_size=60)


ADAPTERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a head that PEFT copies": (
        "Llama",
        "modules_to_save.default",
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "init_lora_weights": False},
    ),
    "DoRA, an embedding too": (
        "Llama",
        "lora_magnitude_vector",
        {"target_modules": ["q_proj", "down_proj", "embed_tokens"], "use_dora": True},
    ),
    "DoRA of transposed matrices": (
        "GPT2",
        "lora_magnitude_vector",
        {"target_modules": ["c_attn", "c_proj"], "use_dora": True},
    ),
    "experts that files hold transposed": (
        "Qwen3VLMoe",
        "lora_B",
        {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    ),
}


def adapters(folder: str, kind: str) -> Any:
    """LoRA on a model without values, and on one with values."""
    import peft
    import transformers

    import shardproof
    from shardproof.integrations.pretrained import without_values
    from shardproof.integrations.transformers import shard_prepared

    family, beside, options = ADAPTERS[kind]
    own = {"GPT2": "GPT2LMHeadModel", "Qwen3VLMoe": "Qwen3VLMoeForConditionalGeneration"}
    model_class = getattr(transformers, own.get(family, f"{family}ForCausalLM"))
    results = []
    for later in (True, False):
        torch.manual_seed(1)
        base = without_values(model_class, folder) if later else model_class.from_pretrained(folder)
        model = peft.get_peft_model(base.eval(), peft.LoraConfig(r=2, **options))
        shard_prepared(model, 3, None, torch.device("cpu"))
        loss = model(input_ids=PROMPT, labels=PROMPT).loss
        loss.backward()
        norms = {name: p.grad.norm() for name, p in model.named_parameters() if beside in name}
        results.append((shardproof.full_state_dict(model, rank0_only=False), loss.detach(), norms))
    return results


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_on_a_model_without_values(run2: Run, tmp_path: Path, kind: str) -> None:
    folder = str(saved(tmp_path, ADAPTERS[kind][0]))
    for (one, loss, norms), (other, other_loss, other_norms) in run2(adapters, folder, kind):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
        assert torch.equal(loss, other_loss)
        assert norms
        assert norms == other_norms


def peak(folder: str, whole: bool) -> tuple[int, int, int]:
    """By how many bytes resident memory grew at most while loading; what a rank keeps; the largest unit."""
    import transformers

    import shardproof

    before = begin_anew()
    if whole:
        model = shardproof.shard(transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32), 3)
    else:
        model = shardproof.load_pretrained(folder, 3, kind="LlamaForCausalLM", dtype=torch.float32)
    grown = status("VmHWM") - before
    units = shardproof.stats(model).units.values()
    return grown, sum(u.shard_bytes for u in units), max(u.shard_bytes for u in units) * 2


@pytest.mark.parametrize("there", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_no_rank_holds_more_than_its_shard_and_one_unit(run2: Run, tmp_path: Path, there: bool) -> None:
    """Measured as resident memory, while fp32 weights are made of bf16 files, where `from_pretrained` takes more; or
    initialised, where the files lack them."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 14, "head_dim": 64}
    model = tiny("Llama", vocab_size=2048, num_attention_heads=4, **sizes).bfloat16()
    model.save_pretrained(tmp_path) if there else with_little(model, tmp_path)
    try:
        run2(peak, str(tmp_path), False)  # imports, pools, the heap
        measured = run2(peak, str(tmp_path), False)
        eager = run2(peak, str(tmp_path), True)
    except PermissionError:
        pytest.skip("the peak of resident memory cannot be reset here")
    for (grown, kept, unit), (grown_whole, _, _) in zip(measured, eager, strict=True):
        assert grown < kept + unit + 8 * MB, f"{grown / MB:.1f} MB for {kept / MB:.1f} + {unit / MB:.1f} MB"
        assert grown_whole > 2 * kept or not there
