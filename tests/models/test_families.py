"""Every record of a model family describes the class of transformers that it names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from models.tiny_configs import TEXT, TINY
from shardproof.cli.main import main
from shardproof.errors import ConfigError
from shardproof.models.families.anatomy import anatomy, guessed_part, trainable_parts
from shardproof.models.families.family import MEDIA, PARTS, UNUSED
from shardproof.models.families.known import FAMILIES, family_of
from shardproof.models.forward import without_adapters

# Models with code of their own have no class here to look at: tests/train/test_own_code.py.
BY_TYPE = {kind: family for family in FAMILIES for kind in family.model_types if not family.own_code}


def made(kind: str):
    """A tiny model of that type, without values."""
    import transformers

    config = transformers.AutoConfig.for_model(kind, **TINY[kind])
    with torch.device("meta"):
        return getattr(transformers, BY_TYPE[kind].model_class)(config)


def test_every_model_type_is_tried() -> None:
    assert set(BY_TYPE) == set(TINY)


@pytest.mark.parametrize("kind", sorted(BY_TYPE))
def test_a_record_names_what_is_there(kind: str) -> None:
    import transformers

    family, model = BY_TYPE[kind], made(kind)
    assert family_of(model.config) is family
    modules = dict(model.named_modules())
    paths = {path for found in family.parts.values() for path in found}
    named = {*paths, *family.blocks, *family.dynamic, *family.unused, *family.speech}
    assert not named - modules.keys()
    assert set(family.parts) <= set(PARTS)
    assert set(family.media) <= set(MEDIA)
    assert all(isinstance(modules[path], torch.nn.ModuleList) for path in family.blocks)
    assert family.processor is None or hasattr(transformers, family.processor)
    assert "forward" in dir(modules[family.trains])
    for name, _ in model.named_parameters():
        assert name.startswith(tuple(f"{path}." for path in (*paths, *family.unused))), f"{name} has no part"


@pytest.mark.parametrize("kind", sorted(BY_TYPE))
def test_what_inspection_finds_is_what_the_record_says(kind: str) -> None:
    """Aligners inside towers have no name in common; the rest is found without a record."""
    model = made(kind)
    known = anatomy(model)
    for name, part in known.part_of.items():
        guess = guessed_part(name)
        if part == UNUSED or (part == "aligner" and guess in ("vision", "audio")):
            continue
        assert guess == part or (guess == "aligner" and part in ("vision", "audio")), name
    units = known.units or []
    from shardproof.zero.build import find_units

    assert len(find_units(model, units)) >= 2 + len(known.dynamic)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.layerwise_projectors.0.norm.weight", "aligner"),  # Granite 4 Vision's
        ("model.visual.deepstack_merger_list.0.norm.weight", "aligner"),
        ("model.vision_tower.embeddings.patch_embeddings.projection.weight", "vision"),
        ("model.audio_tower.subsampling.projection.weight", "audio"),
        ("model.embed_vision.multimodal_embedder.embedding_projection.weight", "aligner"),
        ("model.vqmodel.encoder.conv_in.weight", "vision"),
        ("model.layers.0.mlp.vision_expert.weight", "llm"),
    ],
)
def test_parts_are_found_by_the_words_in_names(name: str, part: str) -> None:
    """The first was taken for the language model, the beginnings of towers for what stands behind them."""
    assert guessed_part(name) == part


def test_a_tower_that_its_name_does_not_tell_is_found() -> None:
    """Granite Speech's is called `encoder`: with --freeze llm it was frozen, and with --freeze audio trained."""
    import transformers

    small = {"num_layers": 1, "hidden_dim": 32, "num_heads": 2, "output_dim": 8, "dim_head": 16}
    projector = {"model_type": "blip_2_qformer", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.GraniteSpeechConfig(
        text_config={**TEXT, "model_type": "granite"},
        encoder_config=small,
        projector_config={**projector, "intermediate_size": 48, "encoder_hidden_size": 32},
        has_lora_adapter=False,
    )
    with torch.device("meta"):
        found = anatomy(transformers.GraniteSpeechForConditionalGeneration(config))
    assert found.part_of["model.encoder.input_linear.weight"] == "audio"
    assert found.part_of["model.language_model.norm.weight"] == "llm"
    assert found.parts == ["llm", "audio", "aligner"]


# Of the others a tiny configuration is no model that runs: tests/train/test_families.py has those.
RUN = sorted(set(BY_TYPE) - {"minicpmv4_6", "qwen2_5_omni", "qwen2_vl", "qwen2_5_vl", "qwen3_omni_moe"})


@pytest.mark.parametrize("kind", RUN)
def test_who_divides_its_loss_is_known(kind: str) -> None:
    """By the tokens of the whole step. Qwen2-Audio takes that number and goes by its own batch."""
    import transformers

    from shardproof.models.forward import divides_its_loss, makes_its_mean

    config = transformers.AutoConfig.for_model(kind, **TINY[kind])
    torch.manual_seed(0)
    model = getattr(transformers, BY_TYPE[kind].model_class)(config).eval()
    ids = torch.tensor([[1, 2, 3, 4]])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    with torch.no_grad():
        one, ten = (model(**given, num_items_in_batch=n).loss.item() for n in (1, 10))
    assert divides_its_loss(model) == (ten < one / 2) != makes_its_mean(model)


class Own(torch.nn.Module):
    """A loss as people write it."""

    def forward(self, ids: Any, labels: Any, **kwargs: Any) -> Any:
        return torch.nn.functional.cross_entropy(ids, labels)


class HandedOn(torch.nn.Module):
    def forward(self, ids: Any, labels: Any, **kwargs: Any) -> Any:
        return self.inner(ids, labels, **kwargs)


@pytest.mark.parametrize(
    ("name", "divides"),
    [
        ("LlamaForCausalLM", True),
        ("MixtralForCausalLM", True),
        ("LlamaForSequenceClassification", False),
        ("T5ForConditionalGeneration", False),
    ],
)
def test_who_divides_its_loss_is_read_in_its_forward(name: str, divides: bool) -> None:
    import transformers

    from shardproof.models.forward import divides_its_loss, makes_its_mean

    model = object.__new__(getattr(transformers, name))
    model.__dict__.update(_modules={}, _parameters={}, _buffers={})
    assert divides_its_loss(model) == divides
    assert not divides_its_loss(Own())
    assert divides_its_loss(HandedOn())
    assert not makes_its_mean(Own())  # whose loss may have other terms


def test_parts_are_chosen_by_name() -> None:
    here = ["llm", "vision", "audio", "aligner", "talker"]
    assert trainable_parts(here, None, []) == ["llm", "vision", "audio", "aligner"]
    assert trainable_parts(here, ["thinker", "talker"], ["vision", "audio"]) == ["llm", "aligner", "talker"]
    assert trainable_parts(here, ["talker"], []) == ["talker"]
    with pytest.raises(ConfigError, match="no such part, it has llm"):
        trainable_parts(["llm"], ["talker"], [])
    with pytest.raises(ConfigError, match="--freeze vit: the parts are llm, vision"):
        trainable_parts(here, None, ["vit"])
    with pytest.raises(ConfigError, match="--freeze llm leaves nothing to train"):
        trainable_parts(["llm"], None, ["llm"])


@pytest.mark.parametrize(
    "taken, behind", [(-2, {"1"}), (-1, set()), (0, {"0", "1"}), (1, {"1"}), ([0, -3], {"0", "1"}), ([0, -1], set())]
)
def test_layers_behind_the_features_are_never_trained(taken, behind: set[str]) -> None:
    """LLaVA takes what the last layer but one of its tower gives: no gradient reaches the last."""
    from transformers import AutoConfig, LlavaForConditionalGeneration

    with torch.device("meta"):
        config = AutoConfig.for_model("llava", **TINY["llava"], vision_feature_layer=taken)
        model = LlavaForConditionalGeneration(config)
    layers = "model.vision_tower.encoder.layers."
    found = {
        name.removeprefix(layers).split(".")[0]: part
        for name, part in anatomy(model).part_of.items()
        if name.startswith(layers)
    }
    assert {layer for layer, part in found.items() if part == UNUSED} == behind


def test_adapters_do_not_hide_the_parts() -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, LlavaForConditionalGeneration

    model = LlavaForConditionalGeneration(AutoConfig.for_model("llava", **TINY["llava"]))
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "linear_1"]))
    assert without_adapters(adapted) is without_adapters(model) is model
    found = anatomy(adapted)
    parts = {part for name, part in found.part_of.items() if "lora" in name}
    assert parts == {"llm", "vision", "aligner", UNUSED}
    assert "base_model.model.model.vision_tower" in found.dynamic


def test_a_model_without_a_record_is_inspected() -> None:
    import transformers

    with torch.device("meta"):
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**TEXT))
    found = anatomy(model)
    assert found.units is None
    assert found.parts == ["llm"]


def test_the_command_lists_them(capsys) -> None:
    assert main(["models"]) == 0
    listed = capsys.readouterr().out
    assert all(family.name in listed for family in FAMILIES)
    assert main(["models", "qwen2_5_omni"]) == 0
    assert "thinker.model.visual.merger" in capsys.readouterr().out
    assert main(["models", "qwen9"]) == 2
    assert "no record for 'qwen9'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "saved", "cls"),
    [
        ("Qwen3_5Config", "Qwen3_5ForConditionalGeneration", "AutoModelForMultimodalLM"),
        ("Qwen3_5Config", None, "AutoModelForMultimodalLM"),
        ("Qwen3_5Config", "Qwen3_5ForCausalLM", "AutoModelForCausalLM"),
        ("MllamaConfig", "MllamaForConditionalGeneration", "AutoModelForMultimodalLM"),
        ("Llama4Config", "Llama4ForConditionalGeneration", "AutoModelForMultimodalLM"),
        ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", "AutoModelForCausalLM"),
        ("Idefics3Config", "Idefics3ForConditionalGeneration", "AutoModelForMultimodalLM"),
        ("AudioFlamingo3Config", "AudioFlamingo3ForConditionalGeneration", "AudioFlamingo3ForConditionalGeneration"),
        ("WhisperConfig", "WhisperForConditionalGeneration", "AutoModelForCausalLM"),
    ],
)
def test_a_model_is_loaded_with_its_towers(kind: str, saved: str | None, cls: str) -> None:
    """Some configs name a language model alone as well."""
    import transformers

    from shardproof.models.loading.classes import _auto_class

    config = getattr(transformers, kind)()
    config.architectures = saved and [saved]
    assert _auto_class(config).__name__ == cls


@pytest.mark.parametrize("kind", ["Llama4", "Mllama"])
def test_a_language_model_without_its_towers_has_a_decoder(tmp_path, kind: str) -> None:
    """TRL, and heads for scores, ask for it as `base_model`, which transformers gives as the model itself."""
    import torch
    import transformers

    from shardproof.models.loading.classes import load_pretrained
    from shardproof.models.scorers import load_scorer

    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "cross_attention_layers": []}
    config = getattr(transformers, f"{kind}TextConfig")(**sizes, num_local_experts=2, intermediate_size_mlp=48)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(tmp_path)
    model = load_pretrained(str(tmp_path))
    assert model.base_model is model.get_decoder() is model.model
    assert type(model).__name__ == f"{kind}ForCausalLM"
    judge = load_scorer(str(tmp_path), num_labels=2)
    ids = torch.tensor([[5, 6, 7]])
    expected = judge.score(judge.model(input_ids=ids).last_hidden_state[:, -1])
    torch.testing.assert_close(judge(input_ids=ids).logits, expected)


def test_a_family_may_have_another_tower() -> None:
    import torch
    import transformers

    from shardproof.models.families.anatomy import anatomy

    text = {"model_type": "mistral", "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 99}
    vision = {"model_type": "pixtral", "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
    config = transformers.LlavaConfig(vision_config={**vision, "num_attention_heads": 2}, text_config=text)
    with torch.device("meta"):
        found = anatomy(transformers.LlavaForConditionalGeneration(config))
    assert {"llm", "vision", "aligner"} <= set(found.part_of.values())
    assert found.units


def test_a_model_that_does_not_write_on_is_refused(tmp_path) -> None:
    import json

    from shardproof.models.loading.classes import check_writes_on

    config = {"model_type": "whisper", "is_encoder_decoder": True}
    for architecture, fits in (("WhisperForConditionalGeneration", False), ("WhisperForCausalLM", True)):
        (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
        if fits:
            check_writes_on(str(tmp_path))
        else:
            with pytest.raises(ConfigError, match=r"is an encoder-decoder model(.|\n)*sharded\(Seq2SeqTrainer\)"):
                check_writes_on(str(tmp_path))


@pytest.mark.parametrize("task", ["seq_cls", "embedding", "reranker", "generative_reranker"])
def test_an_encoder_and_decoder_is_refused_in_words_about_the_task(tmp_path, task: str) -> None:
    """Before its tokenizer is loaded, of which there is none here."""
    import json

    from shardproof.train.model.loading import load_processing
    from shardproof.train.options.config import SftConfig

    said = {"model_type": "t5", "is_encoder_decoder": True, "architectures": ["T5ForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(ConfigError, match=f"an encoder-decoder model, .*\n--task {task} trains") as told:
        load_processing(str(tmp_path), SftConfig(task=task))
    assert "sft" not in str(told.value)
    assert ("BERT" in str(told.value)) == (task != "generative_reranker")


def test_a_tower_of_timm_is_refused_before_all_else_where_that_is_not_installed(tmp_path, monkeypatch) -> None:
    """Text alone is read without it."""
    import importlib.util

    import transformers

    from shardproof.models.loading.classes import check_timm
    from shardproof.train.model.loading import load_processing
    from shardproof.train.options.config import SftConfig

    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "timm" else found(name))
    for kind in ("gemma3n", "gemma3n_text"):
        transformers.AutoConfig.for_model(kind).save_pretrained(tmp_path / kind)
    check_timm(str(tmp_path / "gemma3n_text"))
    with pytest.raises(ConfigError, match="pip install timm"):
        load_processing(str(tmp_path / "gemma3n"), SftConfig())
