"""Promise: a plan takes whatever sft can train, and says of anything else what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from doctor.test_plan import LENGTH, SMALL, step_at
from shardproof.cli.main import main
from shardproof.doctor.config import PlanConfig
from shardproof.doctor.planning.plan import make_plan
from shardproof.doctor.planning.subject import meta_model, notes_on

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "head_dim": 64}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "first_k_dense_replace": 2,
    "num_hidden_layers": 10,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}


def config_of(folder: Path, kind: str, **shape: object) -> Path:
    import transformers

    getattr(transformers, kind)(**SMALL | shape).save_pretrained(folder)
    return folder


def planned(folder: Path, **options: object):
    one = {
        "gpus": [2],
        "stage": "3",
        "gradient_checkpointing": ["no"],
        "per_device_batch_size": [1],
        "max_length": [64],
    }
    return make_plan(PlanConfig(model=str(folder), **one | options))


def test_operations_are_those_of_products_attention_and_the_experts_that_a_token_meets(tmp_path):
    """Forward and backward are six for each weight and token; attention looks at half of all pairs."""
    length = 256
    dense = planned(config_of(tmp_path / "dense", "Qwen2Config"), max_length=[length])
    some = planned(config_of(tmp_path / "experts", "Qwen3MoeConfig", **EXPERTS), max_length=[length])
    layers, width = SMALL["num_hidden_layers"], SMALL["hidden_size"]
    pairs = layers * 7 * length**2 * width  # two products forward and five backward, of which a kernel does half
    embedding = SMALL["vocab_size"] * width
    by_hand = 6 * length * (dense.parameters - embedding) + pairs
    assert dense.candidates[0].flops == pytest.approx(by_hand, rel=0.01)
    idle = layers * 6 * 3 * EXPERTS["moe_intermediate_size"] * width  # six experts of eight, of three matrices each
    by_hand = 6 * length * (some.parameters - embedding - idle) + pairs
    assert some.candidates[0].flops == pytest.approx(by_hand, rel=0.01)


@pytest.mark.slow
def test_experts_in_float32_are_planned(tmp_path):
    """On shapes alone torch takes their products in bfloat16 only, so there was no plan, and doctor knew no memory."""
    folder = config_of(tmp_path, "Qwen3MoeConfig", **EXPERTS)
    (half,), (whole,) = (planned(folder, precision=kind).candidates for kind in ("bf16", "fp32"))
    assert whole.flops == half.flops


def test_a_model_that_no_class_of_transformers_loads_is_one_of_the_class_that_its_config_names(tmp_path):
    import transformers

    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"model_type": "qwen2", **tower, "num_key_value_heads": 1, "vocab_size": 64}
    config = transformers.AudioFlamingo3Config(audio_config=tower, text_config=text, audio_token_id=5)
    config.architectures = ["AudioFlamingo3ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    assert planned(tmp_path).parameters > 0


def test_adapters_of_experts_are_planned(tmp_path):
    """PEFT turns autocast off around them, of which torch knows nothing on the meta device."""
    plan = planned(config_of(tmp_path, "Qwen3MoeConfig", **EXPERTS), gpus=[1], tuner="lora")
    assert plan.trainable < plan.parameters / 2
    assert plan.candidates[0].held["optimizer"] == pytest.approx(8 * plan.trainable, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
def test_first_blocks_may_differ_from_those_that_follow(tmp_path, again):
    """As of DeepSeek-V3, whose first ones have no experts. What follows from a few is what all of them take."""
    folder = config_of(tmp_path, "DeepseekV3Config", **DEEPSEEK)
    (found,) = planned(folder, gpus=[8], gradient_checkpointing=["yes" if again else "no"]).candidates
    taken = step_at(folder, DEEPSEEK["num_hidden_layers"], 8, 1, 3, again)
    assert found.peak == pytest.approx(taken, rel=0.01)


def test_towers_are_trained_though_rows_are_text(tmp_path):
    import transformers

    vision = {"model_type": "clip_vision_model", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    vision |= {"num_attention_heads": 4, "image_size": 56, "patch_size": 14, "projection_dim": 64}
    text = {"model_type": "llama", **SMALL}
    transformers.LlavaConfig(text_config=text, vision_config=vision).save_pretrained(tmp_path)
    plan = planned(tmp_path, gpus=[1])
    assert plan.trainable < plan.parameters  # the last layer of the tower works for nothing
    assert plan.candidates[0].held["optimizer"] == pytest.approx(8 * plan.trainable, rel=0.01)
    assert "vision" in plan.notes[0]
    frozen = planned(tmp_path, gpus=[1], freeze=["vision", "aligner"])
    assert frozen.candidates[0].held["optimizer"] == pytest.approx(8 * frozen.trainable, rel=0.01)
    assert frozen.trainable < plan.trainable
    assert frozen.candidates[0].held["weights"] == plan.candidates[0].held["weights"]


def test_a_mask_is_turned_into_numbers_in_each_layer_as_torch_does(tmp_path):
    """Windows shorter than the rows need one: 0 or -inf for each pair of tokens, in the dtype of the computing."""
    (whole,) = planned(config_of(tmp_path / "1", "MistralConfig", sliding_window=None), max_length=[512]).candidates
    (cut,) = planned(config_of(tmp_path / "2", "MistralConfig", sliding_window=64), max_length=[512]).candidates
    more = cut.activations - whole.activations
    assert more > 0.9 * SMALL["num_hidden_layers"] * 512 * 512 * 2


def test_weights_that_are_packed_and_positions_that_are_not_there_are_noted(tmp_path):
    folder = config_of(tmp_path, "Qwen2Config", max_position_embeddings=32)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    text = " ".join(planned(folder).notes)
    assert "fp8" in text
    assert "32 positions" in text


def test_what_peft_copies_on_a_cpu_is_said_not_to_be_counted(tmp_path):
    folder, said = config_of(tmp_path, "Qwen2Config"), "RandLoRA computes with copies in fp32, which are not counted"
    half = {"tuner": "randlora", "tuner_arguments": {"r": "4"}, "device": "cpu", "precision": "bf16"}
    for others, is_said in (
        ({}, True),
        ({"device": "gpu"}, False),
        ({"precision": "fp32"}, False),
        ({"tuner": "vera"}, False),
    ):
        config = PlanConfig(model=str(folder), **{**half, **others})
        assert any(said in note for note in notes_on(meta_model(config), config)) == is_said


def test_attention_of_all_pairs_is_noted_where_there_is_another(tmp_path):
    """gpt-oss has no sdpa."""
    sizes = {"num_local_experts": 2, "num_experts_per_tok": 1, "hidden_size": 64, "head_dim": 16, "vocab_size": 64}
    folder = config_of(tmp_path, "GptOssConfig", **sizes)
    own, ours = (planned(folder, max_length=[512], attn=attn) for attn in (None, "varlen"))
    assert "--attn varlen" in " ".join(own.notes)
    assert "--attn varlen" not in " ".join(ours.notes)
    (before,), (after,) = own.candidates, ours.candidates
    assert before.activations - after.activations > SMALL["num_hidden_layers"] * 512 * 512 * 4


OWN_CODE = {
    "configuration_own.py": """
from transformers import PreTrainedConfig

class OwnConfig(PreTrainedConfig):
    model_type = "own"
""",
    "modeling_own.py": """
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from .configuration_own import OwnConfig

class OwnForCausalLM(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.embedding, self.head = nn.Embedding(100, 32), nn.Linear(32, 100)
        self.post_init()

    def forward(self, input_ids=None, labels=None, **more):
        logits = self.head(self.embedding(input_ids))
        if config_asks_values:
            logits = logits * float(logits.max())
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)

config_asks_values = ASKS
""",
}


def own_code(folder: Path, asks: bool) -> Path:
    folder.mkdir()
    names = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": names}))
    for name, text in OWN_CODE.items():
        (folder / name).write_text(text.replace("ASKS", str(asks)))
    return folder


def test_a_model_with_code_of_its_own_is_planned_where_that_may_run(tmp_path, capsys):
    argv = ["plan", "--model", str(own_code(tmp_path / "own_model", asks=False)), "--gpus", "2", "--max-length", "16"]
    assert main(argv) == 2
    assert "--trust-remote-code" in capsys.readouterr().err
    assert main([*argv, "--trust-remote-code"]) == 0
    text = capsys.readouterr().out
    assert "has no gradient checkpointing" in text
    assert main([*argv, "--trust-remote-code", "--gradient-checkpointing", "yes"]) == 2
    assert "cannot recompute its activations" in capsys.readouterr().err


def test_a_model_that_looks_at_values_is_refused_with_what_to_do(tmp_path, capsys):
    folder = own_code(tmp_path / "own_asking", asks=True)
    assert main(["plan", "--model", str(folder), "--trust-remote-code", "--gpus", "2", "--max-length", "16"]) == 2
    text = capsys.readouterr().err
    assert "OwnForCausalLM cannot be run on shapes alone" in text
    assert "shardproof doctor" in text


def test_what_is_no_model_to_train_is_refused(tmp_path, capsys):
    import transformers

    transformers.T5Config().save_pretrained(tmp_path / "t5")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.json").write_text("{ no")
    (tmp_path / "other.json").write_text('{"a": 1}')
    transformers.BertConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=2).save_pretrained(
        tmp_path / "bert"
    )
    wrong = {
        "t5": "(t5) is an encoder-decoder model",
        "empty": "has no config.json",
        "broken.json": "cannot be read",
        "other.json": "names no model_type",
        "bert": "--max-length 512 or less",
        "nowhere": "There is no model folder",
    }
    for name, said in wrong.items():
        assert main(["plan", "--model", str(tmp_path / name), "--gpus", "2"]) == 2, name
        assert said in " ".join(capsys.readouterr().err.split()), name
    assert main(["plan", "--model", str(tmp_path / "bert"), "--gpus", "2", "--max-length", str(LENGTH)]) == 0


def test_an_attention_that_a_model_cannot_be_trained_with_is_refused(tmp_path, capsys):
    import transformers

    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    shape |= {"num_hidden_layers": 1, "num_key_value_heads": 2}
    transformers.DogeConfig(**shape).save_pretrained(tmp_path / "without")
    transformers.FalconConfig(vocab_size=64, hidden_size=32, num_attention_heads=2).save_pretrained(tmp_path / "listed")
    said = {"without": "DogeForCausalLM has no flash attention", "listed": "its code has a list of attentions"}
    for name, message in said.items():
        argv = ["plan", "--model", str(tmp_path / name), "--gpus", "2", "--max-length", str(LENGTH)]
        assert main([*argv, "--attn", "varlen"]) == 2
        assert message in " ".join(capsys.readouterr().err.split())


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 2
    return capsys.readouterr().err.rpartition("error: ")[2]


def test_what_no_command_trains_is_refused_in_the_words_of_sft(tmp_path, capsys) -> None:
    """A processor tells, where there is one; of a config alone, its class does."""
    import importlib.util

    from models.tiny_folders import SQUARE
    from shardproof.models.tiny_media import image_processor, media_processor, media_tokenizer

    tokenizer = media_tokenizer(["a text?"], {"image_token": "<image>"}, {"image": "<image>"})
    tokenizer.bos_token = "<|im_start|>"
    images = image_processor("SiglipImageProcessor", size=SQUARE)
    images.image_seq_length = 4
    media_processor("PaliGemmaProcessor", tokenizer, images).save_pretrained(tmp_path / "paligemma")
    rows, alone = tmp_path / "rows.jsonl", tmp_path / "alone.json"
    rows.write_text(json.dumps({"query": "a text?", "response": "yes"}) + "\n")
    configs: list[dict[str, object]] = [{"model_type": kind} for kind in ("paligemma", "gemma3n")]
    configs = [{"model_type": "bart", "is_encoder_decoder": True}, *configs]
    for said in configs[: -1 if importlib.util.find_spec("timm") else None]:
        place = tmp_path / str(said["model_type"])
        place.mkdir(exist_ok=True)
        (place / "config.json").write_text(json.dumps(said))
        (place / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")  # of no tensors
        sft = ["sft", "--model", str(place), "--dataset", str(rows), "--output-dir", str(tmp_path / "out")]
        assert refused(["plan", "--model", str(place)], capsys) == refused(sft, capsys)
    for kind, told in (
        ("paligemma", "PaliGemmaProcessor cannot be trained here"),
        ("csm", "CsmProcessor belongs to a model whose answers are audio"),
        ("kosmos-2.5", "Kosmos2_5Processor puts an image before the text"),
    ):
        alone.write_text(json.dumps({"model_type": kind}))
        assert told in refused(["plan", "--model", str(alone)], capsys)
