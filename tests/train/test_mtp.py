"""Promise: layers of the base that predict further tokens, which transformers does not load, go along with a model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

MTP = {
    "counted": ("model.layers.61.eh_proj.weight", "model.layers.61.mlp.gate.e_score_correction_bias"),
    "named": ("mtp.0.norm.weight", "model.mtp_block.0.mlp.up_proj.weight"),
}
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"moe_intermediate_size": 16, "tie_word_embeddings": False}


def base(folder: Path, tiny: Path, kind: str) -> Path:
    """A model with such layers in its files: of DeepSeek-V3 (one file), or of ERNIE 4.5 (several)."""
    import transformers
    from safetensors.torch import load_file, save_file

    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    shape = {**SHAPE, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    config: Any
    if kind == "counted":
        config = transformers.DeepseekV3Config(
            **shape, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
            n_routed_experts=4, num_key_value_heads=4, n_group=1, topk_group=1, num_experts_per_tok=2,
        )  # fmt: skip
    else:
        config = transformers.Ernie4_5_MoeConfig(**shape, num_key_value_heads=2, moe_num_experts=4, moe_k=2)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder, max_shard_size="5GB" if kind == "counted" else "60KB")
    tokenizer.save_pretrained(folder)
    further = {name: torch.randn(4, 3).bfloat16() for name in MTP[kind]}
    if kind == "counted":
        file = folder / "model.safetensors"
        save_file({**load_file(file), **further}, file, metadata={"format": "pt"})
    else:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        save_file(further, folder / "last.safetensors", metadata={"format": "pt"})
        index["weight_map"] |= dict.fromkeys(further, "last.safetensors")
        index["metadata"]["total_size"] += sum(value.nbytes for value in further.values())
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture(scope="module")
def bases(tmp_path_factory, tiny: Path) -> dict[str, Path]:
    return {kind: base(tmp_path_factory.mktemp(kind), tiny, kind) for kind in MTP}


@pytest.fixture(scope="module")
def runs(commands, sft, bases):
    lora = ["--tuner", "lora", "--target-modules", "o_proj"]
    counted, named = (str(bases[kind]) for kind in MTP)
    return commands(
        [
            ("counted", sft("--model", counted, "--max-steps", "1", "--save-steps", "1")),
            ("counted again", sft("--model", "RUNS/counted/model", "--max-steps", "1")),
            ("counted half", ["export", "RUNS/counted", "OUT", "--dtype", "bf16"]),
            ("counted early", ["export", "RUNS/counted/checkpoint-1", "OUT"]),
            ("counted lora", sft("--model", counted, "--max-steps", "1", *lora)),
            ("counted merged", ["export", "RUNS/counted lora", "OUT"]),
            ("named", sft("--model", named, "--max-steps", "1", "--nproc", "2", "--stage", "3")),
            ("named lora", sft("--model", named, "--max-steps", "1", *lora)),
            ("named merged", ["export", "RUNS/named lora", "OUT", "--max-shard-size", "60KB"]),
        ]
    )


def in_files(folder: Path) -> dict[str, torch.Tensor]:
    """What a reader of the index finds; of a folder without one, what is in its only file."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        files = list(folder.glob("*.safetensors"))
        assert [file.name for file in files] == ["model.safetensors"]
        with safe_open(files[0], "pt") as content:
            return {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    found, read = {}, json.loads(index.read_text())
    for name, file in read["weight_map"].items():
        with safe_open(folder / file, "pt") as content:
            found[name] = content.get_tensor(name)
    assert read["metadata"]["total_size"] == sum(value.nbytes for value in found.values())
    assert {file.name for file in folder.glob("*.safetensors")} == set(read["weight_map"].values())
    return found


@pytest.mark.parametrize(
    "name",
    ["counted", "counted again", "counted half", "counted early", "counted merged", "named", "named merged"],
)
def test_they_are_those_of_the_base(runs, bases, name: str) -> None:
    from transformers import AutoModelForCausalLM

    run, kind = runs[name], name.split()[0]
    assert run.code == 0, run.output
    folder = run.folder if name.split()[-1] in ("half", "early", "merged") else run.folder / "model"
    files, expected = in_files(folder), in_files(bases[kind])
    assert set(files) == set(expected)
    for further in MTP[kind]:
        assert torch.equal(files[further], expected[further])
    assert not torch.equal(files["lm_head.weight"], expected["lm_head.weight"]) or "lora" in name or "merged" in name
    model = AutoModelForCausalLM.from_pretrained(folder)
    own = [name for name, _ in model.named_parameters() if name.endswith("o_proj.weight")]
    assert all(torch.equal(model.get_parameter(n).detach().bfloat16(), files[n].bfloat16()) for n in own)
    assert (
        len({(folder / "config.json").stat().st_mode, *(f.stat().st_mode for f in folder.glob("*.safetensors"))}) == 1
    )


def test_an_export_says_so(runs) -> None:
    assert "MTP: 2 tensors of multi-token prediction layers, unchanged from the base" in runs["named merged"].output


def test_adapters_have_none(runs) -> None:
    assert [file.name for file in (runs["named lora"].folder / "model").glob("*.safetensors")] == [
        "adapter_model.safetensors"
    ]


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("kind", MTP)
def test_a_model_that_writes_no_tokens_has_none(tmp_path, bases, kind: str, scores: bool) -> None:
    from shardproof.models.loading.classes import load_body
    from shardproof.models.loading.mtp import carry_mtp
    from shardproof.models.scorers import load_scorer

    model = (load_scorer if scores else load_body)(str(bases[kind]))
    model.save_pretrained(tmp_path)
    assert carry_mtp(model, tmp_path) == 0
    assert not set(MTP[kind]) & set(in_files(tmp_path))


def saved_again(folder: str, target: Path) -> dict[str, torch.Tensor]:
    """What is in files of the model in a folder, or on the hub, that is loaded, saved and given its MTP layers."""
    from transformers import AutoModelForCausalLM

    from shardproof.models.loading.mtp import carry_mtp

    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(target)
    carry_mtp(model, target)
    return in_files(target)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("kind", MTP)
def test_they_are_found_in_files_of_torch(tmp_path, bases, kind: str, zipped: bool) -> None:
    """One of them, or several with an index; of today, or as torch wrote them before 1.6."""
    from safetensors.torch import load_file

    folder, renamed = shutil.copytree(bases[kind], tmp_path / "base"), {}
    for file in folder.glob("*.safetensors"):
        renamed[file.name] = file.with_suffix(".bin").name.replace("model", "pytorch_model")
        torch.save(load_file(file), folder / renamed[file.name], _use_new_zipfile_serialization=zipped)
        file.unlink()
    if (index := folder / "model.safetensors.index.json").is_file():
        read = json.loads(index.read_text())
        read["weight_map"] = {name: renamed[file] for name, file in read["weight_map"].items()}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(read))
        index.unlink()
    found, expected = saved_again(str(folder), tmp_path / "saved"), in_files(bases[kind])
    assert all(torch.equal(found[name], expected[name]) for name in MTP[kind])


@pytest.mark.parametrize("tied", [False, True])
def test_their_tables_of_tokens_grow_with_those_of_the_model(tmp_path, bases, tied: bool) -> None:
    """A server reads as many rows as the config says. The new ones are the model's."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    from shardproof.models.loading.mtp import carry_mtp

    folder = shutil.copytree(bases["counted"], tmp_path / "base")
    tensors = load_file(folder / "model.safetensors")
    own = {"embed_tokens": "model.embed_tokens.weight", "shared_head.head": "lm_head.weight"}
    tables = {f"model.layers.61.{name}.weight": table for name, table in own.items()}
    further = {name: tensors[table].bfloat16() + 1 for name, table in tables.items()}
    save_file({**tensors, **further}, folder / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(folder, tie_word_embeddings=tied)
    rows = model.config.vocab_size
    model.resize_token_embeddings(rows + 3)
    model.save_pretrained(tmp_path / "saved")
    assert carry_mtp(model, tmp_path / "saved") == len(MTP["counted"]) + 2
    found = in_files(tmp_path / "saved")
    for name, table in tables.items():
        assert torch.equal(found[name][:rows], further[name])
        expected = found["model.embed_tokens.weight" if tied else table]
        assert torch.equal(found[name][rows:], expected[rows:].bfloat16())


def test_an_index_beside_the_only_file_is_not_read(tmp_path, bases) -> None:
    """transformers does not read it either."""
    shutil.copytree(bases["counted"], tmp_path / "base")
    gone = dict.fromkeys([*MTP["counted"], "lm_head.weight"], "model-00001-of-00002.safetensors")
    index = {"metadata": {"total_size": 0}, "weight_map": gone}
    for folder in (tmp_path / "base", tmp_path / "saved"):  # the latter of a run that was killed while it saved
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(MTP["counted"]) <= set(saved_again(str(tmp_path / "base"), tmp_path / "saved"))


@pytest.mark.parametrize("kind", MTP)
def test_they_are_found_in_the_cache_of_the_hub(tmp_path, bases, monkeypatch, kind: str) -> None:
    """Nothing there says which files the hub does not have."""
    import huggingface_hub.constants

    cached = tmp_path / "models--some--base"
    shutil.copytree(bases[kind], cached / "snapshots" / "1")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert set(MTP[kind]) <= set(saved_again("some/base", tmp_path / "saved"))


def test_a_base_that_is_gone_has_none(tmp_path, bases) -> None:
    from transformers import AutoModelForCausalLM

    from shardproof.models.loading.mtp import carry_mtp

    shutil.copytree(bases["counted"], tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    shutil.rmtree(tmp_path / "base")
    model.save_pretrained(tmp_path / "saved")
    assert carry_mtp(model, tmp_path / "saved") == 0


@pytest.mark.parametrize("kind", MTP)
def test_a_model_is_whole_where_there_is_no_room_for_them(tmp_path, bases, monkeypatch, kind: str) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from shardproof.models.loading.mtp import carry_mtp

    model = AutoModelForCausalLM.from_pretrained(bases[kind])
    model.save_pretrained(tmp_path, max_shard_size="5GB" if kind == "counted" else "60KB")
    before = in_files(tmp_path)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)  # of the index: the layers are there already
    with pytest.raises(OSError, match="No space left"):
        carry_mtp(model, tmp_path)
    monkeypatch.undo()
    assert set(in_files(tmp_path)) == set(before)
    assert not list(tmp_path.glob("*.unfinished"))
    assert carry_mtp(model, tmp_path) == len(MTP[kind])
    assert len(load_file(tmp_path / "mtp.safetensors")) == len(MTP[kind])


def test_what_was_learnt_is_kept_where_there_is_no_room_for_them(tmp_path, bases, monkeypatch, caplog) -> None:
    """Nor is an export left half written."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    from shardproof.errors import ConfigError
    from shardproof.models.loading import mtp
    from shardproof.train import export
    from shardproof.train.folder import RunFolder
    from shardproof.train.options.config import SftConfig
    from shardproof.train.saved_model import save_model

    def full(*_: Any) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(mtp, "carry_mtp", full)
    monkeypatch.setattr(export, "carry_mtp", full)
    model = AutoModelForCausalLM.from_pretrained(bases["counted"])
    trainer: Any = SimpleNamespace(model=model, save_model=model.save_pretrained)
    save_model(trainer, SftConfig(), None, RunFolder(tmp_path / "run"), first=True)
    assert "(MTP) are left out: No space left on device" in caplog.text
    assert "lm_head.weight" in in_files(tmp_path / "run" / "model")
    with pytest.raises(ConfigError, match=r"out\.unfinished cannot be written: No space left on device"):
        export.export(str(bases["counted"]), str(tmp_path / "out"))
    assert [file.name for file in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    "asked, expected", [("auto", torch.bfloat16), ("fp32", torch.float32), ("fp16", torch.float16)]
)
def test_they_are_in_the_dtype_that_is_asked_for(tmp_path, bases, asked: Any, expected: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM

    from shardproof.train.folder import RunFolder
    from shardproof.train.options.config import SftConfig
    from shardproof.train.saved_model import save_model

    model = AutoModelForCausalLM.from_pretrained(bases["counted"])
    trainer: Any = SimpleNamespace(model=model, save_model=model.save_pretrained)
    save_model(trainer, SftConfig(dtype=asked), None, RunFolder(tmp_path), first=True)
    found = in_files(tmp_path / "model")
    assert {found[name].dtype for name in MTP["counted"]} == {expected}


def test_quantized_ones_are_left_out(tmp_path, bases) -> None:
    """What is saved is not quantized, and a server would not read them beside it."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    from shardproof.models.loading.mtp import carry_mtp

    folder = tmp_path / "quantized"
    shutil.copytree(bases["counted"], folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[MTP["counted"][0]] = tensors[MTP["counted"][0]].to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "saved")
    assert carry_mtp(model, tmp_path / "saved") == 0
    assert not set(MTP["counted"]) & set(in_files(tmp_path / "saved"))
