"""Adapters say so where the weights of their base are no longer those that they were trained on."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

from shardproof.models.loading import weight_files
from shardproof.models.loading.weight_files import sample_of
from shardproof.train.folder import SAMPLE, other_weights

TOLD = "are not those that the adapters of"


def rewrite(folder: Path, by: float = 0.0, **how) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=how.pop("dtype", "auto"))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(by)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    model.save_pretrained(folder, **how)


@pytest.mark.slow
def test_each_command_says_so_once(commands, sft, tiny: Path, tmp_path: Path) -> None:
    base = tmp_path / "model"
    shutil.copytree(tiny, base)
    words = ["--model", str(base), "--tuner", "lora", "--max-steps", "2", "--save-steps", "1"]
    run = commands([("run", sft(*words))])["run"]
    assert run.code == 0, run.output

    def told() -> list[int]:
        for name in ("merged", "early", "resumed"):
            shutil.rmtree(tmp_path / name, ignore_errors=True)
        start = ["--resume", str(run.folder / "checkpoint-1"), "--output-dir", str(tmp_path / "resumed")]
        more = ["--adapters", str(run.folder), "--model", str(base), "--max-steps", "1"]
        asked = ["--prompt", "the", "--max-new-tokens", "2"]
        found = commands(
            [
                ("merged", ["export", str(run.folder), str(tmp_path / "merged")]),
                ("early", ["export", str(run.folder / "checkpoint-1"), str(tmp_path / "early")]),
                ("asked", ["infer", str(run.folder), *asked]),
                ("by two", ["infer", str(run.folder), *asked, "--nproc", "2"]),
                ("resumed", sft(*words, *start)),
                ("further", sft(*more)),
            ]
        )
        assert not [one.output for one in found.values() if one.code]
        return [" ".join(one.output.split()).count(TOLD) for one in found.values()]

    assert told() == [0] * 6
    rewrite(base, max_shard_size="20KB")
    assert len(list(base.glob("*.safetensors"))) > 1
    assert told() == [0] * 6
    rewrite(base, by=0.01)
    assert told() == [1] * 6


def test_a_sample_knows_values_and_dtype_and_not_files(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "model")
    first = sample_of(str(tiny))
    assert first is not None
    assert sample_of(str(tmp_path / "model")) == first
    rewrite(tmp_path / "model", max_shard_size="20KB")
    assert sample_of(str(tmp_path / "model")) == first
    part = sorted((tmp_path / "model").glob("*.safetensors"))[0]
    part.rename(tmp_path / "aside")
    assert sample_of(str(tmp_path / "model")) is None
    (tmp_path / "aside").rename(part)
    rewrite(tmp_path / "model", dtype="bfloat16")
    cast = sample_of(str(tmp_path / "model"))
    assert cast not in (first, None)
    next((tmp_path / "model").glob("*.safetensors")).write_bytes(b"torn")
    assert sample_of(str(tmp_path / "model")) is None


@pytest.mark.parametrize("named", ["org/never-fetched", "/nowhere/at/all"])
def test_of_what_is_not_here_there_is_none(named: str) -> None:
    assert sample_of(named) is None


def test_pickled_weights_have_one_too(tmp_path: Path) -> None:
    values = {"a": torch.arange(24.0).view(2, 3, 4), "scale": torch.tensor(3.0), "b": torch.ones(3, 5).t()}
    torch.save(values, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text("{}")
    first = sample_of(str(tmp_path))
    values["b"] += 1e-3
    torch.save(values, tmp_path / "pytorch_model.bin")
    assert first is not None
    assert sample_of(str(tmp_path)) not in (first, None)
    (tmp_path / "pytorch_model.bin").write_bytes(b"torn")
    assert sample_of(str(tmp_path)) is None


def test_pickled_files_are_read_once(tmp_path: Path, monkeypatch) -> None:
    torch.save({f"{i}": torch.ones(2, 2) for i in range(70)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text("{}")
    opened, unpickled = Counter(), weight_files._unpickled
    monkeypatch.setattr(weight_files, "_unpickled", lambda file: opened.update([file.name]) or unpickled(file))
    assert sample_of(str(tmp_path)) is not None
    assert opened == {"pytorch_model.bin": 2}  # for its names, and for values


def test_tensors_without_values_are_no_obstacle(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    values = {"none": torch.ones(0, 4), "flat": torch.ones(0), "scale": torch.tensor(3.0), "some": torch.ones(2, 2)}
    save_file(values, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    first = sample_of(str(tmp_path))
    save_file(values | {"some": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    assert first is not None
    assert sample_of(str(tmp_path)) not in (first, None)


def test_what_is_said_holds_for_other_names_too(tiny: Path, tmp_path: Path) -> None:
    """A model of the same weights may have been saved without a head that is its embedding."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny, tmp_path / "model")
    (file,) = (tmp_path / "model").glob("*.safetensors")
    values = load_file(file)
    values["lm_head.weight"] = values["model.embed_tokens.weight"].clone()
    (tmp_path / SAMPLE).write_text(json.dumps({"model": "m", "sample": sample_of(str(tiny))}))
    save_file(values, file)
    assert "changed since, cast, or saved under other names." in other_weights(tmp_path, str(tmp_path / "model"))


def test_a_torn_sample_says_nothing(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / SAMPLE).write_text('{"model": "m')
    assert other_weights(tmp_path, str(tiny)) == ""
    (tmp_path / SAMPLE).write_text('{"model": "m", "sample": "00000000"}')
    assert "are not those that" in other_weights(tmp_path, str(tiny))


@pytest.mark.parametrize("said", ["[]", "{}", "3", "null", '["sample"]', '{"sample": null}', '{"sample": {"crc": 1}}'])
def test_a_sample_of_another_form_is_named_and_passed_over(tiny: Path, tmp_path: Path, said: str) -> None:
    (tmp_path / SAMPLE).write_text(said)
    told = other_weights(tmp_path, str(tiny))
    assert told.startswith(f"{tmp_path / SAMPLE} does not say")
    assert f"those of {tiny} are not compared" in told


def test_a_sample_that_cannot_be_read_is_named_and_passed_over(tiny: Path, tmp_path: Path, monkeypatch) -> None:
    def refused(*_, **__) -> str:
        raise PermissionError(13, "Permission denied")

    (tmp_path / SAMPLE).write_text('{"model": "m", "sample": "00000000"}')
    monkeypatch.setattr(Path, "read_text", refused)
    assert f"{tmp_path / SAMPLE} cannot be read (Permission denied)" in other_weights(tmp_path, str(tiny))
