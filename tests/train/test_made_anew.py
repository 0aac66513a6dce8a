"""Weights that a model's files lack begin at random: that is told, and adapters on them are not trained, for they would
be put on others afterwards."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "slam_omni"
LOST = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def broken(sft, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model without one of its weights."""
    from safetensors.torch import load_file, save_file

    model = Path(sft()[sft().index("--model") + 1])
    folder = tmp_path_factory.mktemp("broken") / "model"
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    del weights[LOST]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def runs(commands, sft, broken: Path, tmp_path_factory: pytest.TempPathFactory):
    spoken = tmp_path_factory.mktemp("slam")
    subprocess.run([sys.executable, str(EXAMPLE / "make.py"), str(spoken)], check=True, timeout=300)
    plugin = ["--external-plugins", str(EXAMPLE / "slam_omni.py")]
    own = ["sft", *plugin, "--model-type", "slam_omni", "--row-format", "spoken", "--model", str(spoken)]
    own += ["--dataset", f"{spoken / 'rows.jsonl'}#16", "--max-steps", "2", "--tuner", "lora", "--output-dir", "OUT"]
    short = sft("--max-steps", "1", "--model", str(broken))
    adapter = ["--modules-to-save", "group_decode_adapter.linear", "--nproc", "2", "--stage", "3"]
    return commands(
        [
            ("full", short),
            ("lora", [*short, "--tuner", "lora"]),
            ("own", own),
            ("kept", [*own, *adapter]),
            ("exported", ["export", "RUNS/kept", "OUT", *plugin]),
        ]
    )


def test_a_weight_that_is_made_at_random_is_told(runs, broken: Path) -> None:
    """A folder that lacked a part trained without a word, from numbers of nobody's."""
    assert runs["full"].code == 0, runs["full"].output
    assert f"1 weight(s) are not in the files of {broken} and begin at random: {LOST}." in runs["full"].output


@pytest.mark.parametrize(("name", "module"), [("lora", "up_proj"), ("own", "group_decode_adapter.linear")])
def test_adapters_on_it_are_refused(runs, name: str, module: str) -> None:
    """They were saved alone, and were put on other weights by whoever loaded them: another model, without a word."""
    assert runs[name].code == 2, runs[name].output
    assert "not in the model's files and begin at random" in runs[name].output
    assert module in runs[name].output.partition("--modules-to-save ")[2].splitlines()[0]


def test_saved_whole_it_is_the_same_everywhere(runs) -> None:
    from safetensors import safe_open

    assert (runs["kept"].code, runs["exported"].code) == (0, 0), runs["kept"].output + runs["exported"].output
    weight = "group_decode_adapter.linear.weight"
    with (
        safe_open(runs["kept"].folder / "model" / "adapter_model.safetensors", "pt") as kept,
        safe_open(runs["exported"].folder / "model.safetensors", "pt") as exported,
    ):
        assert kept.get_tensor(f"base_model.model.{weight}").equal(exported.get_tensor(weight))
    assert json.loads((runs["kept"].folder / "model" / "adapter_config.json").read_text())["modules_to_save"]
