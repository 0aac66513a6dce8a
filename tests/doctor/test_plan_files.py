"""Promise: a plan counts what towers for pictures, sounds and videos take, and so does doctor, of the rows it reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from doctor.test_plan import compare, in_new_processes
from models.tiny_folders import build
from shardproof.cli.main import main
from shardproof.doctor.config import PlanConfig
from shardproof.doctor.planning.plan import Candidate, Plan, make_plan
from shardproof.doctor.planning.sample import described
from shardproof.doctor.planning.values import Values
from shardproof.errors import ConfigError
from shardproof.models.tiny_media import build_tiny_minicpm_v

TEXT = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 2}
QWEN = {"hidden_size": 128, "intermediate_size": 512, "depth": 4, "num_heads": 4, "out_hidden_size": 256}
CLIP = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
WHISPER = {"d_model": 128, "encoder_ffn_dim": 512, "encoder_layers": 4, "encoder_attention_heads": 4}
TOWERS = {
    "qwen3_vl": {"vision_config": QWEN},
    "llava": {"vision_config": CLIP},
    "gemma3": {"vision_config": CLIP},
    "qwen2_audio": {"audio_config": WHISPER},
}
WAYS: dict[str, tuple[str, list[str], int, list[str]]] = {
    "pictures": ("qwen3_vl", ["image=336x280", "image=84x84"], 192, ["no", "yes"]),
    "a video": ("qwen3_vl", ["video=112x112x6"], 192, ["no"]),
    "llava": ("llava", ["image=120x90"] * 2, 64, ["no", "yes"]),
    "gemma3": ("gemma3", ["image=120x90"] * 2, 64, ["no"]),
    "sounds": ("qwen2_audio", ["audio=2"], 96, ["no", "yes"]),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """`folders(kind)`: a processor, and a config in which weights outweigh the small change of an allocator."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = build(kind, tmp_path_factory.mktemp(kind))
            file = made[kind] / "config.json"
            config = json.loads(file.read_text())
            for name, more in {"text_config": TEXT, **TOWERS[kind]}.items() if kind in TOWERS else ():
                config[name] |= {key: value for key, value in more.items() if key in config[name]}
            if kind in TOWERS:
                config["text_config"]["num_hidden_layers"] = 7
                config["text_config"].pop("layer_types", None)
            file.write_text(json.dumps(config))
        return made[kind]

    return folder


def plan(folder: Path, *files: str, **options: Any) -> Plan:
    usual = {"gpus": [2], "stage": "3", "gradient_checkpointing": ["no"], "per_device_batch_size": [2]}
    return make_plan(PlanConfig(model=str(folder), files=list(files), **usual | {"max_length": [192]} | options))


def one(*args: Any, **options: Any) -> Candidate:
    (found,) = plan(*args, **options).candidates
    return found


def test_it_is_within_5_percent_of_what_is_measured(folders):
    compare(in_new_processes, folders("llava"), 1, [3], files=["image=120x90"] * 2)


@pytest.mark.slow
def test_pixels_count_where_they_are_most_of_what_there_is(folders):
    parts = ["llm", "vision", "aligner"]
    options = {"files": ["video=112x84x6"], "max_length": [768], "train_parts": parts}
    compare(in_new_processes, folders("qwen3_omni_moe"), 1, [3], **options)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_so_it_is_for_other_files_at_every_stage_on_two_processes(folders, way):
    kind, files, length, kinds = WAYS[way]
    compare(in_new_processes, folders(kind), 2, [0, 1, 2, 3], kinds, files=files, max_length=[length])


@pytest.mark.slow
def test_so_it_is_without_the_logits_of_all_tokens(folders):
    compare(in_new_processes, folders("qwen3_vl"), 2, [0, 3], files=["image=120x90"], chunked_loss=True)


@pytest.mark.slow
def test_files_take_memory_time_and_traffic(folders):
    folder = folders("qwen3_vl")
    text, small, large = one(folder), one(folder, "image=84x84"), one(folder, "image=336x280")
    assert text.activations < small.activations < large.activations
    assert text.flops < small.flops < large.flops
    assert text.tokens == small.tokens == large.tokens, "the rest of a row is text"
    assert text.wire < small.wire == large.wire, "the tower's weights are gathered for backward, too"


@pytest.mark.slow
def test_rows_with_files_need_no_logits_of_all_tokens(folders):
    folder = folders("qwen3_vl")
    whole, parts = (one(folder, "image=84x84", precision="fp32", chunked_loss=chunked) for chunked in (False, True))
    assert parts.activations < whole.activations
    assert parts.wire == whole.wire


@pytest.mark.slow
def test_more_rows_follow_from_few(folders):
    """Of eight rows, from steps with two and three of them."""
    folder, files = folders("qwen3_vl"), ["image=168x140", "image=84x84"]
    derived = plan(folder, *files, per_device_batch_size=[2, 3, 8]).candidates[-1]
    run = one(folder, *files, per_device_batch_size=[8])
    assert derived.peak == pytest.approx(run.peak, rel=0.01)
    assert derived.flops == pytest.approx(run.flops, rel=0.001)


@pytest.mark.slow
def test_a_plan_says_what_it_took_for_granted(folders):
    note = "rows are text (plan --files describes others): for its other parts (vision 1 M"
    assert any(each.startswith(note) for each in plan(folders("qwen3_vl")).notes)
    assert "it has no audio to freeze" in plan(folders("qwen3_vl"), freeze=["vision", "audio"]).notes
    (seen,) = plan(folders("qwen3_vl"), "image=84x84").notes
    assert seen.startswith("each row has image=84x84: ")
    heard = plan(folders("qwen3_omni_moe"), "audio=1").notes
    assert heard[0].startswith("each row has audio=1: ")
    assert heard[1].startswith("no row has files for them: for its other parts (vision 0 M, talker")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "files", "options", "message"),
    [
        ("qwen3_vl", ["picture=84x84"], {}, "--files picture=84x84: takes image=WIDTHxHEIGHT, audio=SECONDS, "),
        ("qwen3_vl", ["image=84"], {}, "--files image=84: takes image=WIDTHxHEIGHT"),
        ("qwen3_vl", ["image=84x0"], {}, "--files image=84x0: takes"),
        ("qwen3_vl", ["audio=long"], {}, "--files audio=long: takes"),
        ("qwen3_vl", ["audio=1"], {}, "takes image, video, and no audio"),
        ("qwen3_vl", ["image=336x280"], {"max_length": [64]}, "--max-length 64: a row with image=336x280 has "),
        ("qwen3_vl", ["image=2000x4"], {}, "image=2000x4: Qwen3VLProcessor refuses it: absolute aspect ratio"),
        ("qwen3_vl", ["image=84x84"], {"packing": True}, "--files and --packing: plans do not pack rows with files"),
        ("qwen3_vl", ["image=84x84"], {"task": "seq_cls"}, "--files: plans for --task seq_cls support text rows only"),
        ("qwen2_audio", ["audio=1", "audio=3600"], {}, "--files: audio 2 (3600 s): "),
        ("qwen3", ["image=84x84"], {}, "has no processor for files. Give the folder"),
    ],
)
def test_files_that_no_row_can_have_are_refused(folders, kind, files, options, message):
    with pytest.raises(ConfigError) as caught:
        plan(folders(kind), *files, **options)
    assert message in str(caught.value)


@pytest.mark.slow
def test_a_config_finds_the_processor_beside_it_and_alone_has_none(folders, tmp_path):
    config = folders("qwen3_vl") / "config.json"
    assert one(config, "image=84x84").activations > 0
    alone = tmp_path / "shape.json"
    alone.write_text(config.read_text())
    for model in (alone, "tiny"):
        with pytest.raises(ConfigError, match="has no processor for files"):
            plan(model, "image=84x84")


@pytest.mark.slow
def test_the_command_takes_them(folders, capsys):
    words = "--gpus 2 --stage 3 --max-length 128 --per-device-batch-size 1 --files image=84x84 image=56x56 --json"
    assert main(["plan", "--model", str(folders("qwen3_vl")), *words.split()]) == 0
    assert json.loads(capsys.readouterr().out)["notes"][0].startswith("each row has image=84x84 image=56x56: ")


@pytest.mark.slow
def test_doctor_counts_the_files_of_the_heaviest_row(tmp_path, folders):
    import transformers

    folder = folders("qwen3_vl")
    model = transformers.Qwen3VLForConditionalGeneration(transformers.AutoConfig.from_pretrained(folder))
    model.save_pretrained(folder)
    for name, size in {"small": (56, 56), "large": (336, 280)}.items():
        Image.new("RGB", size).save(tmp_path / f"{name}.png")
    rows = [{"query": f"<image>{'what ' * 40}?", "response": "a", "images": ["small.png"]}] * 2
    rows += [{"query": "<image>what?", "response": "a", "images": ["large.png"]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = memory_check(folder, tmp_path / "rows.jsonl")
    assert found.status == "ok", found
    assert "rows.jsonl:3: 71 tokens with its template" in found.evidence
    packed = memory_check(folder, tmp_path / "rows.jsonl", packing=True, max_length=200)
    assert "rows.jsonl:3: 189 tokens with its template" in packed.evidence, "of all rows that are packed into one"
    plain = [{"prompt": "what", "completion": "a"}] * 20  # as turns they would be longer than a packed row
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*plain, *rows[2:]]))
    beside = memory_check(folder, tmp_path / "rows.jsonl", packing=True, max_length=200)
    assert "rows.jsonl:21: 71 tokens with its template" in beside.evidence
    half = {"prompt": f"<image>{'what ' * 29}", "completion": "a", "images": ["large.png"]}
    (tmp_path / "rows.jsonl").write_text((json.dumps(half) + "\n") * 4)
    alone = memory_check(folder, tmp_path / "rows.jsonl", packing=True, max_length=90)
    assert "rows.jsonl:1: 90 tokens with its template" in alone.evidence
    both = memory_check(folder, tmp_path / "rows.jsonl", packing=True, max_length=2 * 90)  # in turns, too long
    assert "the files of its rows are not counted (" in both.evidence
    text = [{"query": "what " * 40, "response": "a"}] * 3
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in text))
    assert "rows are text" in memory_check(folder, tmp_path / "rows.jsonl").evidence


@pytest.mark.slow
def test_doctor_counts_the_files_of_what_is_to_be_found(tmp_path, folders):
    """Of rows of embeddings each text passes through the model, and the query may have no file."""
    folder = folders("qwen3_vl")
    Image.new("RGB", (336, 280)).save(tmp_path / "large.png")
    row = {"query": "what " * 9, "positive": "<image>", "positive_images": ["large.png"]}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [row] * 2))
    found = memory_check(folder, tmp_path / "rows.jsonl", task="embedding")
    assert "rows.jsonl:1: 66 tokens with its template" in found.evidence, found
    frozen = memory_check(folder, tmp_path / "rows.jsonl", task="embedding", freeze=["vision", "aligner"])
    assert float(frozen.evidence.split(" GB")[0]) < float(found.evidence.split(" GB")[0]), "it knows the parts"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", "grpo"])
def test_doctor_counts_the_files_of_pairs_and_prompts(tmp_path, folders, kind: str):
    """Of pairs both answers stand behind the files."""
    folder = folders("qwen3_vl")
    Image.new("RGB", (336, 280)).save(tmp_path / "large.png")
    row = {"query": "<image>what?", "response": "a", "rejected_response": "b", "images": ["large.png"]}
    text = {**row, "query": "what " * 9, "images": []}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in (text, row)))
    more = {"rlhf_type": kind} | ({"reward_funcs": ["length"]} if kind == "grpo" else {})
    found = memory_check(folder, tmp_path / "rows.jsonl", **more)
    assert found.status == "ok", found
    assert "each row has the files of" in found.evidence
    assert "rows.jsonl:2: 71 tokens" in found.evidence
    (tmp_path / "rows.jsonl").write_text(json.dumps(text) + "\n")
    assert "rows are text" in memory_check(folder, tmp_path / "rows.jsonl", **more).evidence


@pytest.mark.slow
def test_doctor_counts_experts_beside_prompts_with_files(tmp_path, folders):
    """They are texts of another length, and take their part."""
    folder = folders("qwen3_vl")
    Image.new("RGB", (336, 280)).save(tmp_path / "large.png")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"query": "<image>what?", "images": ["large.png"]}) + "\n")
    peaks = []
    for words in (1, 90):
        expert = {"query": "what?", "response": "what " * words}
        (tmp_path / "experts.jsonl").write_text(json.dumps(expert) + "\n")
        chord = {"chord_sft_dataset": [f"{tmp_path}/experts.jsonl"], "chord_mu_peak": 0.5}
        chord |= {"chord_sft_per_device_train_batch_size": 256}
        more = {"rlhf_type": "grpo", "reward_funcs": ["length"], "max_length": 1024, **chord}
        found = memory_check(folder, tmp_path / "rows.jsonl", **more)
        assert "each row has the files of" in found.evidence, found
        peaks.append(float(found.evidence.split(" GB")[0]))
    assert peaks[1] > 1.5 * peaks[0]


def memory_check(folder: Path, rows: Path, **more: Any) -> Any:
    from shardproof.doctor.checks import plan_checks
    from shardproof.doctor.config import DoctorConfig, RlhfDoctorConfig
    from shardproof.train.model.loading import load_processing
    from shardproof.train.run import recipe_of

    kind = RlhfDoctorConfig if "rlhf_type" in more else DoctorConfig
    config = kind(model=str(folder), dataset=[str(rows)], stage=3, memory=8.0, **more)
    recipe: Any = recipe_of(config)
    batch, processing = recipe.check(config, 1), load_processing(str(folder), config)
    encoded = recipe.encode(config, recipe.read(config)[0], processing)
    (check,) = plan_checks.memory(config, batch, str(folder), encoded, processing)
    return check


CALLS = {
    "views": lambda ids, weights: ids.view(-1)[2:5].tolist(),
    "edits": lambda ids, weights: ids.clone().masked_fill_(ids == 3, 7)[0].fill_(1).sum().item(),
    "an edit of a view": lambda ids, weights: [copy := ids.clone(), copy[0].zero_(), copy.tolist()][-1],
    "masks": lambda ids, weights: ids[ids > 2].tolist(),
    "places": lambda ids, weights: (ids == 3).nonzero().tolist(),
    "weights by a mask": lambda ids, weights: tuple(weights[ids > 2].shape),
    "weights put by a mask": lambda ids, weights: tuple(weights.index_put((ids > 2,), weights[ids > 2] * 2).shape),
    "literals": lambda ids, weights: torch.tensor([ids[0, 1], 5], device=ids.device).cumsum(0).tolist(),
    "repeated": lambda ids, weights: torch.arange(3, device=ids.device).repeat_interleave(ids[1]).tolist(),
    "unique": lambda ids, weights: [part.tolist() for part in ids.unique(return_counts=True)],
    "shapes alone": lambda ids, weights: torch.zeros_like(weights, dtype=torch.bool).any().item(),
    "floats": lambda ids, weights: torch.linspace(0, 4, 3, device=ids.device).int().tolist(),
    "equal": lambda ids, weights: torch.equal(ids, ids + 0),
    "to the host": lambda ids, weights: ids.cpu().numpy().tolist(),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_follows_from_known_values_is_known(call):
    ids, weights = torch.tensor([[1, 3, 2], [3, 0, 4]]), torch.randn(2, 3, 4)
    values = Values()
    with values:
        found = CALLS[call](values.on_meta(ids), weights.to("meta"))
    assert found == CALLS[call](ids, weights)


def test_what_depends_on_weights_is_not_and_an_edit_by_them_forgets():
    values = Values()
    ids, weights = values.on_meta(torch.tensor([1, 2])), torch.empty(2, device="meta")
    with values:
        assert values.known(weights) is None
        assert values.known(ids * weights) is None
        view = ids[:1]
        assert values.known(view).tolist() == [1]
        ids.copy_(weights)
        assert values.known(ids) is None
        assert values.known(view) is None


def test_masks_of_all_pairs_are_not_followed(monkeypatch):
    monkeypatch.setattr("shardproof.doctor.planning.values.MOST", 100)
    values = Values()
    places = values.on_meta(torch.arange(11))
    with values:
        assert values.known(places + 1) is not None
        assert values.known(places[:, None] >= places[None]) is None


def test_pixels_are_followed_however_many_there_are(monkeypatch):
    """Idefics3 asks which of its pictures are nothing but padding."""
    monkeypatch.setattr("shardproof.doctor.planning.values.MOST", 100)
    values, pictures = Values(), torch.stack([torch.zeros(3, 8, 8), torch.ones(3, 8, 8)])
    with values:
        pixels = values.on_meta(pictures).to(torch.bfloat16)
        assert ((pixels == 0).sum((1, 2, 3)) == 192).tolist() == [True, False]


@pytest.mark.slow
def test_rows_stand_as_the_processor_lays_them(folders, tmp_path):
    """Patches of MiniCPM-V stand side by side in one long picture."""
    folder = build_tiny_minicpm_v(tmp_path, ["what?"])
    sample = described(PlanConfig(model=str(folder), files=["image=84x84"] * 2))
    alone, both = sample.batch(1, 64), sample.batch(2, 64)
    assert both["pixel_values"].shape == (*alone["pixel_values"].shape[:3], 2 * alone["pixel_values"].shape[3])
    assert both["target_sizes"].tolist() == [*alone["target_sizes"].tolist()] * 2
    assert one(folder, "image=84x84", max_length=[64]).activations > one(folder, max_length=[64]).activations


@pytest.mark.slow
def test_a_video_of_which_the_seconds_are_asked(folders):
    assert one(folders("qwen3_omni_moe"), "video=56x56x2", max_length=[256]).activations > 0


def test_a_row_is_filled_up_with_text(folders):
    sample = described(PlanConfig(model=str(folders("qwen3_vl")), files=["image=84x84"]))
    batch = sample.batch(3, 64)
    ids = batch["input_ids"]
    assert ids.shape == batch["attention_mask"].shape == batch["mm_token_type_ids"].shape == (3, 64)
    assert batch["attention_mask"].all()
    assert (batch["mm_token_type_ids"] == 1).sum(1).tolist() == [9] * 3, "84 x 84 pixels are 3 x 3 tokens"
    assert batch["image_grid_thw"].tolist() == [[1, 6, 6]] * 3
    assert not batch["mm_token_type_ids"][:, sample.tokens :].any()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3"])
def test_so_it_is_where_processes_share_rows(folders, kind):
    compare(in_new_processes, folders(kind), 2, [0, 3], files=["image=120x90"], sequence_parallel=2)
