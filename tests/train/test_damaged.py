"""Runs and model folders that were cut off, changed by hand or copied in part are told in words that name the file."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from shardproof.cli.main import main
from shardproof.errors import ConfigError
from shardproof.train.adapters.begun import adapter_folder
from shardproof.train.answers.loaded import model_folder
from shardproof.train.model.loading import load_tokenizer
from shardproof.train.options.config import SftConfig
from shardproof.train.sft import recipe as sft

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """A run of adapters as it lies in its folder."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("run")
    get_peft_model(AutoModelForCausalLM.from_pretrained(tiny), LoraConfig(r=2)).save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder / "model")
    (folder / "config.yaml").write_text(f"model: {tiny}\ntuner: lora\n")
    return folder


def cut(name: str, size: int) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:size])

    return damage


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut("model/adapter_config.json", 40), "adapter_config.json cannot be read: "),
        (cut("model/tokenizer_config.json", 20), "tokenizer_config.json cannot be read: "),
        (
            cut("model/adapter_model.safetensors", 4),
            "adapter_model.safetensors is truncated, or not a safetensors file.",
        ),
        (
            cut("model/adapter_model.safetensors", 3000),
            r"adapter_model.safetensors is truncated: it has 3,000 bytes of ",
        ),
        (lambda folder: (folder / "model/adapter_model.safetensors").unlink(), "no adapter_model.safetensors next to"),
        (lambda folder: (folder / "config.yaml").write_text("model: ["), "config.yaml cannot be read: "),
    ],
)
def test_a_damaged_run_names_the_file(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], damage: Damage, said: str
) -> None:
    shutil.copytree(run, tmp_path / "run")
    damage(tmp_path / "run")
    for command in (["infer", str(tmp_path / "run"), "--prompt", "?"], ["export", str(tmp_path / "run"), "out"]):
        assert main(command) == 2
        assert said in capfd.readouterr().err


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut("config.json", 60), "config.json cannot be read: "),
        (
            lambda folder: (folder / "config.json").write_text("[]"),
            "config.json cannot be read: it is not a JSON object",
        ),
        (cut("model.safetensors", 9000), r"model.safetensors is truncated: it has 9,000 bytes of "),
    ],
)
def test_so_does_a_model_to_train(tiny: Path, tmp_path: Path, damage: Damage, said: str) -> None:
    shutil.copytree(tiny, tmp_path / "model")
    damage(tmp_path / "model")
    with pytest.raises(ConfigError, match=said):
        sft.check(SftConfig(model=str(tmp_path / "model"), dataset=["stdlib"]), 1)
    with pytest.raises(ConfigError, match=said):
        model_folder(str(tmp_path / "model"))


def test_adapters_that_were_cut_off_are_not_trained_on(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    cut("model/adapter_model.safetensors", 3000)(tmp_path / "run")
    with pytest.raises(ConfigError, match="is truncated: it has 3,000 bytes of "):
        adapter_folder(str(tmp_path / "run"))


def test_adapters_of_another_model_are_told(
    run: Path, tmp_path: Path, models_of_sizes: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, tmp_path / "run")
    file = tmp_path / "run/model/adapter_config.json"
    said = file.read_text().splitlines()
    base = next(i for i, line in enumerate(said) if "base_model_name_or_path" in line)
    said[base] = f'  "base_model_name_or_path": "{models_of_sizes}",'
    file.write_text("\n".join(said))
    for command in (["infer", str(tmp_path / "run"), "--prompt", "?"], ["export", str(tmp_path / "run"), "out"]):
        assert main(command) == 2
        assert f"run/model do not fit the model {models_of_sizes}: " in capfd.readouterr().err


@pytest.fixture(scope="module")
def models_of_sizes(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """The tiny model, with half of its width."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("narrow")
    config = AutoConfig.from_pretrained(tiny)
    config.hidden_size //= 2
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_a_model_without_a_tokenizer_is_told(tiny: Path, tmp_path: Path) -> None:
    """transformers makes one that knows nothing."""
    shutil.copytree(tiny, tmp_path / "model", ignore=shutil.ignore_patterns("token*", "*.jinja"))
    with pytest.raises(ConfigError, match=r"The tokenizer of \S*model has no tokens: "):
        load_tokenizer(str(tmp_path / "model"), SftConfig())


@pytest.mark.parametrize("command", [["infer", ""], ["export", "", "out"], ["export", "run", ""]])
def test_an_empty_name_is_refused(command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """As `"$UNSET"` of a script is; the current folder was taken."""
    assert main(command) == 2
    assert " is empty. Give it a value." in capfd.readouterr().err


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("optimiser_of_old: 3\n", "config.yaml has 'optimiser_of_old', which this version does not accept: "),
        ("", "config.yaml does not name the model "),
    ],
)
def test_a_checkpoint_of_a_run_that_says_something_else(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], config: str, said: str
) -> None:
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1/checkpoint.json").write_text("{}")
    (tmp_path / "config.yaml").write_text(config)
    assert main(["export", str(tmp_path / "checkpoint-1"), str(tmp_path / "out")]) == 2
    assert said in capfd.readouterr().err


def test_a_run_that_ended_before_it_saved_says_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: tiny\n")
    kept = [tmp_path / "checkpoint-1", tmp_path / "checkpoint-2"]
    with (
        mock.patch("shardproof.train.answers.loaded.complete", return_value=kept),
        pytest.raises(
            ConfigError, match=r"could save\?\nIt has a checkpoint .*: shardproof export \S*checkpoint-2 FOLDER"
        ),
    ):
        model_folder(str(tmp_path))
