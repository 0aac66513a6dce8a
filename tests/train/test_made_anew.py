"""Weights that a model's files lack begin at random: that is told, and adapters on them are not trained, for they would
be put on others afterwards."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardproof.errors import ConfigError
from shardproof.train.model.made_anew import check_kept, note_made_anew

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
    short = sft("--max-steps", "1", "--model", str(broken))
    pairs = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    pairs.write_text(json.dumps({"prompt": "a shard", "chosen": "a rank", "rejected": "a step"}) + "\n")
    beside = ["rlhf", "--rlhf-type", "dpo", "--dataset", str(pairs), "--ref-model", str(broken), "--max-steps", "1"]
    beside += ["--model", sft()[sft().index("--model") + 1], "--global-batch-size", "1", "--output-dir", "OUT"]
    ask = ["infer", str(broken), "--prompt", "a shard", "--max-new-tokens", "2"]
    return commands(
        [
            ("full", short),
            ("lora", [*short, "--tuner", "lora"]),
            ("asked", ask),
            ("asked by two", [*ask, "--nproc", "2"]),
            ("exported", ["export", str(broken), "OUT"]),
            ("compared with", [*beside, "--nproc", "1"]),
        ]
    )


@pytest.fixture(scope="module")
def own_runs(commands, tmp_path_factory: pytest.TempPathFactory):
    spoken = tmp_path_factory.mktemp("slam")
    subprocess.run([sys.executable, str(EXAMPLE / "make.py"), str(spoken)], check=True, timeout=300)
    plugin = ["--external-plugins", str(EXAMPLE / "slam_omni.py")]
    own = ["sft", *plugin, "--model-type", "slam_omni", "--row-format", "spoken", "--model", str(spoken)]
    own += ["--dataset", f"{spoken / 'rows.jsonl'}#16", "--max-steps", "2", "--tuner", "lora", "--output-dir", "OUT"]
    adapter = ["--modules-to-save", "group_decode_adapter.linear", "--nproc", "2", "--stage", "3"]
    exported = ["export", "RUNS/kept", "OUT", *plugin]
    return commands([("own", own), ("kept", [*own, *adapter]), ("exported", exported)])


def test_a_weight_that_is_made_at_random_is_told(runs, broken: Path) -> None:
    """A folder that lacked a part trained without a word, from numbers of nobody's."""
    assert runs["full"].code == 0, runs["full"].output
    assert f"1 weight(s) are not in the files of {broken} and begin at random: {LOST}." in runs["full"].output


@pytest.mark.parametrize("name", ["asked", "asked by two", "exported", "compared with"])
def test_a_model_that_lacks_one_is_not_asked_or_exported_without_a_word(runs, broken: Path, name: str) -> None:
    assert runs[name].code == 0, runs[name].output
    told = f"1 weight(s) are not in the files of {broken} and were made at random: {LOST}."
    assert runs[name].output.count(told) == 1, runs[name].output


def test_adapters_on_it_are_refused(runs) -> None:
    """They were saved alone, and were put on other weights by whoever loaded them: another model, without a word."""
    check_refused(runs["lora"], "up_proj")


def test_a_new_one_that_is_made_alike_everywhere_is_no_loss() -> None:
    """A plugin's scale of ones; one that is drawn is other numbers wherever adapters are put on it."""
    model = torch.nn.Module()
    model.scale, model.drawn = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.randn(4))
    note_made_anew(model, ["scale"])
    check_kept(model, [])
    # One number alone may have been drawn, and what a model counts with lies in its files, too.
    model.alone, model.whole = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.tensor(1.0))
    model.register_buffer("table", torch.ones(4))
    note_made_anew(model, ["alone", "drawn", "scale", "table", "whole"])
    with pytest.raises(ConfigError, match=r"4 weight.*\(alone, drawn, table and 1 more\)") as refused:
        check_kept(model, [])
    assert "put each of the model's own into a module" in str(refused.value)


def check_refused(run, module: str) -> None:
    assert run.code == 2, run.output
    assert "not in the model's files and begin at random" in run.output
    assert module in run.output.partition("--modules-to-save ")[2].splitlines()[0]


@pytest.mark.slow
def test_saved_whole_it_is_the_same_everywhere(own_runs) -> None:
    from safetensors import safe_open

    check_refused(own_runs["own"], "group_decode_adapter.linear")
    kept, exported = own_runs["kept"], own_runs["exported"]
    assert (kept.code, exported.code) == (0, 0), kept.output + exported.output
    weight = "group_decode_adapter.linear.weight"
    with (
        safe_open(kept.folder / "model" / "adapter_model.safetensors", "pt") as adapters,
        safe_open(exported.folder / "model.safetensors", "pt") as whole,
    ):
        assert adapters.get_tensor(f"base_model.model.{weight}").equal(whole.get_tensor(weight))
    assert json.loads((kept.folder / "model" / "adapter_config.json").read_text())["modules_to_save"]
