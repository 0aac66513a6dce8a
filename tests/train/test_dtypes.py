"""Promise: what a run writes has the dtype that the model came in, unless it is asked for another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardproof.train.model.dtypes import own_dtype

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(commands, sft, tiny, tmp_path_factory):
    """Of a model in bf16."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    half = str(tmp_path_factory.mktemp("half"))
    AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16).save_pretrained(half)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(half)
    two_steps = ["--model", half, "--max-steps", "2", "--precision", "bf16"]
    return commands(
        [
            ("auto", sft(*two_steps, "--save-steps", "2", "--nproc", "2", "--stage", "3")),
            ("adapters", sft(*two_steps, "--tuner", "lora")),
            ("exported", ["export", "RUNS/auto/checkpoint-2", "OUT"]),
            ("asked", sft(*two_steps, "--dtype", "fp32")),
        ]
    )


def written(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def test_weights_are_written_as_the_model_came(runs) -> None:
    """And config.json says so; the values are those of the masters, rounded, of which a checkpoint keeps all digits."""
    run, exported = runs["auto"], runs["exported"]
    assert (run.code, exported.code) == (0, 0), (run.output, exported.output)
    half, masters = written(run.folder / "model"), written(exported.folder)
    assert half.keys() == masters.keys()
    assert all(value.dtype == torch.bfloat16 and value.equal(masters[name].bfloat16()) for name, value in half.items())
    assert any(not value.equal(value.bfloat16().float()) for value in masters.values())
    assert json.loads((run.folder / "model" / "config.json").read_text())["dtype"] == "bfloat16"


def test_fp32_may_be_asked_for(runs) -> None:
    run = runs["asked"]
    assert run.code == 0, run.output
    assert {value.dtype for value in written(run.folder / "model").values()} == {torch.float32}


def test_adapters_keep_all_digits(runs) -> None:
    run = runs["adapters"]
    assert run.code == 0, run.output
    assert {value.dtype for value in written(run.folder / "model").values()} == {torch.float32}


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": None, "text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"thinker_config": {"text_config": {"torch_dtype": "bfloat16"}}}, "bfloat16"),
        ({"hidden_size": 8}, "float32"),
    ],
)
def test_a_config_names_the_dtype(tmp_path, config, dtype) -> None:
    """Of itself, as transformers wrote it before and since version 5, or of its parts."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    assert own_dtype(str(tmp_path)) == dtype
