"""What `export --quantize` writes: packed as it says, read by others and here, whole where it is to be whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardproof
from models.tiny_folders import TEXTS
from shardproof.cli import export as export_command
from shardproof.errors import ConfigError
from shardproof.train.export import Exported, export
from shardproof.train.packing.calibrated import fitted
from shardproof.train.packing.files import pack_folder
from shardproof.train.packing.kinds import Packing, rounded, scales_of, scheme_of
from shardproof.train.packing.packer import Packer
from shardproof.train.packing.places import places_in
from zero.language_models import tiny

pytest.importorskip("compressed_tensors")

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "vocab_size": 512, "initializer_range": 0.05}
FAMILIES: dict[str, dict[str, Any]] = {"Qwen3": {}, "Qwen3Moe": {"moe_intermediate_size": 32}}
AWAY = {"fp8": 0.04, "int8": 0.015, "int4": 0.16, "nf4": 0.12}  # of a weight, relative to it


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from shardproof.models.tiny import train_tokenizer

    tokenizer = train_tokenizer(TEXTS)
    folders = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, folder in folders.items():
        torch.manual_seed(0)
        tiny(family, **SIZES | FAMILIES[family]).bfloat16().save_pretrained(folder, max_shard_size="200KB")
        tokenizer.save_pretrained(folder)
    return folders


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    texts = [{"query": f"what comes after {i}?", "response": f"it is {i + 1}"} for i in range(12)]
    file.write_text("\n".join(map(json.dumps, texts)))
    return file


def done(source: Path, to: Path, kind: Any, **how: Any) -> Exported:
    return export(str(source), str(to), max_shard_size="200KB", packing=Packing(kind, **{"group_size": 32, **how}))


def whole(folder: Path) -> nn.Module:
    """The model of a folder, unpacked."""
    from transformers import AutoModelForCausalLM

    from shardproof.integrations.four_bits import unpacked
    from shardproof.models.loading.classes import with_values

    return unpacked(with_values(AutoModelForCausalLM, str(folder), dtype=torch.bfloat16), torch.bfloat16)


SLOW = pytest.mark.slow
CASES = [("Qwen3", "fp8"), ("Qwen3", "int4"), ("Qwen3", "nf4"), ("Qwen3Moe", "int4")]
CASES += [pytest.param("Qwen3", "int8", marks=SLOW), pytest.param("Qwen3Moe", "fp8", marks=SLOW)]
EXPERTS_FIRST = ["Qwen3Moe", pytest.param("Qwen3", marks=SLOW)]


@pytest.mark.usefixtures("bitsandbytes")
@pytest.mark.parametrize(("family", "kind"), CASES)
def test_blocks_are_packed_and_all_else_is_as_it_was(
    models: dict[str, Path], tmp_path: Path, family: str, kind: str
) -> None:
    made = done(models[family], tmp_path / "out", kind)
    assert made.packed is not None
    assert made.size < 0.75 * made.packed.size_before
    before, after = whole(models[family]), whole(made.folder)
    for name, weight in before.named_parameters():
        away = float(((after.get_parameter(name) - weight).norm() / weight.norm()).detach())
        packed = weight.dim() > 1 and name.startswith("model.layers") and "mlp.gate." not in name
        assert 0 < away < AWAY[kind] if packed else away == 0, name


@pytest.mark.parametrize("family", EXPERTS_FIRST)
def test_each_rank_reads_what_was_packed(models: dict[str, Path], tmp_path: Path, family: str) -> None:
    """The values that `from_pretrained` makes of it."""
    made = done(models[family], tmp_path / "out", "int4")
    values = whole(made.folder).state_dict()
    read = shardproof.full_state_dict(shardproof.load_pretrained(str(made.folder), 3, dtype=torch.bfloat16))
    assert read.keys() == values.keys()
    assert all(value.equal(values[name]) for name, value in read.items())


def outputs(products: torch.Tensor, away: torch.Tensor) -> float:
    """What of the outputs is wrong, squared, where a weight is `away`."""
    return float(torch.einsum("oi,ij,oj->", away, products, away))


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_calibrated_weights_are_closer_in_what_they_compute(kind: Any) -> None:
    torch.manual_seed(0)
    args = scheme_of(Packing(kind, group_size=32)).weights
    weight, mixed = torch.randn(48, 64), torch.randn(64, 64)
    inputs = torch.randn(500, 64) @ mixed * torch.logspace(-1, 1, 64)
    inputs[:, 5] = 0  # one that is never there
    products = inputs.T @ inputs
    scales = scales_of(weight, args)
    alone = rounded(weight, scales.repeat_interleave(64 // scales.shape[1], 1), args)
    values, scales = fitted(weight, products, args)
    assert outputs(products, values - weight) < 0.5 * outputs(products, alone - weight)
    each = scales.repeat_interleave(64 // scales.shape[1], 1)
    torch.testing.assert_close(rounded(values, each, args), values)
    unseen, _ = fitted(weight, torch.zeros(64, 64), args)
    torch.testing.assert_close(unseen, alone)


@pytest.mark.parametrize("family", EXPERTS_FIRST)
def test_rows_calibrate_every_block(models: dict[str, Path], asked: Path, tmp_path: Path, family: str) -> None:
    """What is packed are the weights that were fitted, and of both its loss is told."""
    alone = done(models[family], tmp_path / "alone", "int4")
    made = done(models[family], tmp_path / "out", "int4", dataset=(str(asked),), samples=8)
    assert made.packed is not None
    assert made.packed.calibrated == 8
    assert made.packed.before is not None
    assert made.packed.after is not None
    assert made.packed.before.loss == pytest.approx(made.packed.after.loss, rel=0.02)
    before, by_itself, fit = whole(models[family]), whole(alone.folder), whole(made.folder)
    for name, weight in before.named_parameters():
        if "layers" in name and name.endswith(("_proj", "_proj.weight")):
            value = fit.get_parameter(name)
            assert not value.equal(by_itself.get_parameter(name)), name
            assert (value - weight).norm() < 0.6 * weight.norm(), name


@pytest.mark.parametrize(("task", "texts"), [("embedding", 8), ("reranker", 5)])
def test_rows_of_a_run_of_pairs_calibrate_its_model(
    models: dict[str, Path], tmp_path: Path, task: str, texts: int
) -> None:
    """Text by text or pair by pair, without padding."""
    from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

    file = tmp_path / "pairs.jsonl"
    row = {"query": "what comes after 3?", "positive": "4", "negative": "a dog"}
    file.write_text("\n".join(map(json.dumps, [row, row, {"query": "what comes?", "positive": "nothing at all"}])))
    kind, how = (AutoModel, {}) if task == "embedding" else (AutoModelForSequenceClassification, {"num_labels": 1})
    folder, pooling = models["Qwen3"], "mean" if task == "embedding" else None
    packing = Packing("int4", 32, dataset=(str(file),))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    packer = Packer(kind.from_pretrained(folder, **how), tokenizer, packing, {"task": task}, folder, pooling)
    assert packer.calibrated == 3
    assert packer.rows is not None
    masks = [batch["attention_mask"] for batch in packer.rows.on("cpu")]
    assert len(masks) == texts
    assert all(mask.all() for mask in masks)


@pytest.mark.parametrize("task", ["embedding", "reranker", "generative_reranker"])
def test_a_folder_of_no_run_is_calibrated_with_the_rows_that_its_files_ask_for(
    models: dict[str, Path], tmp_path: Path, task: str
) -> None:
    """As `infer` takes it: by files of sentence-transformers, or the one label in its config."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    from shardproof.train.embedding.pooling import Embedding
    from shardproof.train.reranker.scoring import YesNo
    from shardproof.train.seq_cls.labelling import RELEVANCE

    file, folder = tmp_path / "pairs.jsonl", tmp_path / "model"
    file.write_text(json.dumps({"query": "what comes after 3?", "positive": "4", "negative": "a dog"}))
    tokenizer = AutoTokenizer.from_pretrained(models["Qwen3"])
    kinds = {"embedding": AutoModel, "reranker": AutoModelForSequenceClassification}
    how = RELEVANCE.config if task == "reranker" else {}
    model = kinds.get(task, AutoModelForCausalLM).from_pretrained(models["Qwen3"], **how)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if task == "embedding":
        Embedding("mean", "it comes: ", longest=12).write(folder, 64)
    elif task == "generative_reranker":
        YesNo(5, 6, "what comes after").write(folder)
    packing = Packing("int4", 32, dataset=(str(file),))
    pooling = "mean" if task == "embedding" else None
    packer = Packer(model, AutoTokenizer.from_pretrained(folder), packing, {}, folder, pooling)
    assert packer.calibrated == 1
    assert packer.rows is not None
    asked, *others = (tokenizer.decode(batch["input_ids"][0]) for batch in packer.rows.on("cpu"))
    assert len(others) == {"embedding": 2}.get(task, 1)
    begun = {"embedding": "it comes: what c", "reranker": "", "generative_reranker": "what comes after\n"}
    assert begun[task] in asked
    assert task != "embedding" or max(batch["input_ids"].shape[1] for batch in packer.rows.on("cpu")) <= 12


def test_patterns_leave_weights_as_they_are(models: dict[str, Path], tmp_path: Path) -> None:
    made = done(models["Qwen3Moe"], tmp_path / "out", "fp8", keep=("experts", r"layers\.0\."))
    before, after = whole(models["Qwen3Moe"]), whole(made.folder)
    changed = {n for n, p in before.named_parameters() if not p.equal(after.get_parameter(n))}
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    assert changed == {f"model.layers.{i}.self_attn.{name}.weight" for i in (1, 2) for name in attention}
    ignored = json.loads((made.folder / "config.json").read_text())["quantization_config"]["ignore"]
    assert r"re:(.*\.)?layers\.\d+\.mlp\.experts\.\d+\.up_proj(\..*)?$" in ignored
    assert r"re:model\.layers\.0\.self_attn\.q_proj$" in ignored


@pytest.mark.parametrize(
    ("family", "kind", "how", "text"),
    [
        (
            "Qwen3",
            "int4",
            {"group_size": 128},
            "do not divide the rows of .* of 64 and 96 weights.\nTake --group-size 32",
        ),
        ("Qwen3Moe", "int8", {}, r"mlp.experts.gate_up_proj.* are experts, .*\nTake --quantize fp8 or int4"),
        (
            "Qwen3Moe",
            "int4",
            {"keep": ("experts",)},
            "does not read as they are beside layers in four bits.\nTake --quantize fp8",
        ),
        ("Qwen3Moe", "nf4", {}, "are experts"),
        ("Qwen3", "fp8", {"keep": ("expert",)}, "--keep expert: no weight to be packed has such a name"),
        ("Qwen3", "fp8", {"keep": ("(",)}, r"--keep \( is not a regular expression"),
        ("Qwen3", "fp8", {"keep": ("proj",)}, "have no linear layers to pack, but those of --keep"),
    ],
)
@pytest.mark.usefixtures("bitsandbytes")
def test_what_cannot_be_packed_is_refused(
    models: dict[str, Path], tmp_path: Path, family: str, kind: str, how: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        done(models[family], tmp_path / "out", kind, **how)
    assert not list(tmp_path.iterdir())


def test_experts_that_files_hold_in_one_tensor_are_refused() -> None:
    model = tiny("GptOss", hidden_size=32, intermediate_size=32)
    with pytest.raises(ConfigError, match=r"in a form .*\nLeave them unpacked, .* --keep 'down_proj\|gate_up_proj'"):
        places_in(model, Packing("fp8"))
    kept = places_in(model, Packing("fp8", keep=("experts",)))
    assert {name.rpartition(".")[2] for name in kept.packed} == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_another_folder_than_was_packed_is_refused(models: dict[str, Path], tmp_path: Path, monkeypatch: Any) -> None:
    from safetensors.torch import load_file, save_file

    from shardproof.train.packing import packer

    def wrongly(folder: Path, *how: Any) -> None:
        pack_folder(folder, *how)
        for file in folder.glob("*.safetensors"):
            values = {n: v * 3 if n.endswith("o_proj.weight_scale") else v for n, v in load_file(file).items()}
            save_file(values, file, metadata={"format": "pt"})

    monkeypatch.setattr(packer, "pack_folder", wrongly)
    with pytest.raises(
        ConfigError, match=r"does not reproduce the packed weights.*o_proj.weight has a relative error of 2"
    ):
        done(models["Qwen3"], tmp_path / "out", "int8")
    assert not (tmp_path / "out").exists()


def test_packed_weights_are_not_computed_with_in_32_bits() -> None:
    with pytest.raises(ConfigError, match=r"--dtype fp32 and --quantize int4: .*\. Leave --dtype out"):
        export_command.run(["RUN", "FOLDER", "--quantize", "int4", "--dtype", "fp32"])


@pytest.mark.usefixtures("bitsandbytes")
@pytest.mark.parametrize("kind", ["fp8", "nf4"])
def test_layers_that_predict_further_tokens_are_told_as_whole(
    models: dict[str, Path], tmp_path: Path, monkeypatch: Any, kind: str
) -> None:
    """Readers that draft with them would look for packed ones."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

    monkeypatch.setattr(Qwen3ForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"^mtp"])
    source = tmp_path / "source"
    AutoModelForCausalLM.from_pretrained(models["Qwen3"]).save_pretrained(source)
    for file in models["Qwen3"].glob("token*"):
        (source / file.name).write_bytes(file.read_bytes())
    mine = {"mtp.fc.weight": torch.ones(64, 64), "mtp.layers.0.mlp.up_proj.weight": torch.ones(96, 64)}
    values = load_file(source / "model.safetensors") | {name: value.bfloat16() for name, value in mine.items()}
    save_file(values, source / "model.safetensors", metadata={"format": "pt"})
    made = done(source, tmp_path / "out", kind)
    assert made.further == 2
    assert load_file(made.folder / "mtp.safetensors").keys() == mine.keys()
    said = json.loads((made.folder / "config.json").read_text())["quantization_config"]
    if kind == "nf4":
        assert {"mtp.fc", "mtp.layers.0"} < set(said["llm_int8_skip_modules"])
    else:
        assert {r"re:mtp\.fc(\..*)?$", r"re:mtp\.layers\.0(\..*)?$"} < set(said["ignore"])


def test_a_disk_that_is_full_is_told(models: dict[str, Path], tmp_path: Path, monkeypatch: Any) -> None:
    from safetensors import SafetensorError

    def full(*_: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("shardproof.train.packing.files._rewritten", full)
    with pytest.raises(ConfigError, match=r"out.unfinished cannot be written: I/O error: No space left"):
        done(models["Qwen3"], tmp_path / "out", "fp8")
    assert not list(tmp_path.iterdir())


def test_the_package_that_packs_is_named(monkeypatch: Any, models: dict[str, Path], tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"needs the package compressed-tensors.*\nInstall it: pip install 'shardproof\[packed\]'"
    ):
        done(models["Qwen3"], tmp_path / "out", "fp8")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen2_5_omni"])
def test_rows_with_files_calibrate_a_model_whose_towers_stay(
    tiny_models: Any, media_files: Path, tmp_path: Path, kind: str
) -> None:
    from safetensors.torch import load_file

    rows = media_files / f"{kind}.jsonl"
    seen = {"query": "<image>What is it?", "response": "a picture", "images": ["a.png"]}
    rows.write_text("\n".join(map(json.dumps, [seen, {"query": "And now?", "response": "nothing"}])))
    made = export(str(tiny_models(kind)), str(tmp_path / "out"), packing=Packing("int4", 16, dataset=(str(rows),)))
    assert made.packed is not None
    assert made.packed.calibrated == 2
    assert made.packed.before is not None
    assert made.packed.before.loss is not None
    values = load_file(made.folder / "model.safetensors")
    packed = {name for name in values if name.endswith("weight_packed")}
    assert len(packed) == made.packed.layers
    assert not [
        name for name in packed if any(part in name for part in ("visual", "audio", "talker", "lm_head", "gate."))
    ]
    ignored = json.loads((made.folder / "config.json").read_text())["quantization_config"]["ignore"]
    assert r"re:(.*\.)?visual(\..*)?$" in ignored


@pytest.mark.slow
def test_experts_of_a_talker_are_experts(tiny_models: Any, tmp_path: Path) -> None:
    folder = str(tiny_models("qwen3_omni_moe"))
    with pytest.raises(ConfigError, match=r"talker.* are experts, .*\nTake --quantize fp8"):
        export(folder, str(tmp_path / "out"), packing=Packing("int4", 16))
    made = export(folder, str(tmp_path / "out"), packing=Packing("fp8"))
    assert made.packed is not None
    assert made.packed.layers > 8


@pytest.mark.slow
def test_runs_are_packed_by_the_command(commands: Any, sft: Any, asked: Path) -> None:
    """Adapters are merged first, the run says how rows are read, what it costs is printed, and it is trained on."""
    labelled = asked.with_name("labelled.jsonl")
    labelled.write_text("\n".join(json.dumps({"query": f"is {i} even", "label": i % 2}) for i in range(12)))
    short = ["--max-steps", "2", "--save-steps", "1"]
    small = ["--quantize", "int4", "--group-size", "64", "--samples", "6", "--dataset"]
    runs = commands(
        [
            ("lora", sft(*short, "--tuner", "lora")),
            ("labels", sft(*short, "--task", "seq_cls", "--num-labels", "2", "--dataset", str(labelled))),
            ("packed", ["export", "RUNS/lora/checkpoint-1", "OUT", *small, str(asked)]),
            ("of labels", ["export", "RUNS/labels", "OUT", *small, str(labelled)]),
            ("alone", ["export", "RUNS/lora", "OUT", "--quantize", "fp8"]),
            ("idle", ["export", "RUNS/lora", "OUT", "--group-size", "64"]),
            ("asked", ["infer", "RUNS/packed", "--prompt", "what comes after 3?", "--max-new-tokens", "3"]),
            ("goes on", sft("--nproc", "2", "--stage", "3", *short, "--tuner", "lora", "--model", "RUNS/packed")),
        ]
    )
    assert "int4, calibrated with 6 rows); embedding, head, routers and towers are unchanged" in runs["packed"].output
    assert "cost: loss " in runs["packed"].output
    assert " of 6 rows keep their label (6 rows)" in runs["of labels"].output
    assert "cost: logits of 16 tokens moved by" in runs["alone"].output
    assert "--group-size applies to packed weights: add --quantize" in runs["idle"].output
    assert {name: run.code for name, run in runs.items()} == {name: 2 * (name == "idle") for name in runs}
