"""Which hub a command of ms-swift means, by name, option and variable."""

import re
import shlex

import pytest

from shardproof.cli import export, sft, swift
from shardproof.cli.from_swift.hubs import TOLD
from shardproof.errors import ConfigError

SAID = "swift sft --model org/m --dataset a.jsonl org/d:sub#500 --val_dataset HF::org/v"
DPO = "swift rlhf --rlhf_type dpo --model org/m --ref_model org/r --dataset MS::org/d --adapters out/checkpoint-9"


def words(command: str) -> list[str]:
    return shlex.split(command.replace("\\\n", " "))


def test_names_are_of_the_hub_that_is_asked_there(tmp_path, monkeypatch) -> None:
    """Names of files and folders stay as they are."""
    command, notes, missing = swift.translate(SAID)
    assert not missing
    assert {"MS::org/m", "a.jsonl", "MS::org/d:sub#500", "HF::org/v"} <= {*words(command)}
    assert TOLD in notes
    command, *_ = swift.translate(DPO)
    assert {"MS::org/m", "MS::org/r", "MS::org/d", "out/checkpoint-9"} <= {*words(command)}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    command, notes, _ = swift.translate(SAID)
    assert "MS::" not in command
    assert TOLD not in notes


@pytest.mark.parametrize("how", ["USE_HF=1 {}", "export USE_HF=true\n{}", "{} --use_hf true", "{} --use_hf"])
def test_a_command_that_asks_hugging_face_does_so_here(how: str) -> None:
    command, notes, missing = swift.translate(how.format(SAID))
    assert not missing
    assert "MS::" not in command
    assert TOLD not in notes
    assert any(note.startswith("--use-hf is left out: names refer to the Hugging Face hub") for note in notes)


def test_finished_models_and_encoded_rows_are_of_that_hub_too() -> None:
    for theirs, ours in (
        ("infer --model org/m --val_dataset org/d#9", "infer MS::org/m --dataset MS::org/d#9"),
        ("export --model org/m --quant_method fp8", "export MS::org/m org/m-fp8 --quantize fp8"),
        ("infer --adapters out/run", "infer out/run"),
    ):
        assert words(swift.translate(f"swift {theirs}")[0]) == ["shardproof", *ours.split()]
    command, *_ = swift.translate("swift export --to_cached_dataset true --model org/m --dataset org/d --output_dir o")
    assert {"MS::org/m", "MS::org/d"} <= {*words(command)}


def test_adapters_that_may_be_of_a_hub_are_told(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for there in (False, True):
        _, notes, _ = swift.translate("swift infer --adapters swift/test_lora")
        assert any(note.startswith("--adapters swift/test_lora: there is no such folder") for note in notes) != there
        (tmp_path / "swift").mkdir(exist_ok=True)


def test_a_model_is_put_on_the_hub_that_is_meant() -> None:
    said = "swift export --adapters run --push_to_hub --hub_model_id me/mine"
    assert swift.translate(said)[0].endswith("--push-to-hub MS::me/mine")
    assert swift.translate(f"{said} --use_hf true")[0].endswith("--push-to-hub me/mine")
    assert swift.translate(f"USE_HF=1 {said}")[0].endswith("--push-to-hub me/mine")
    assert swift.translate(said.replace("me/mine", "mine"))[0].endswith("--push-to-hub MS::mine")


def test_a_push_that_might_go_to_either_hub_is_refused() -> None:
    """Here names without a hub are Hugging Face's, and there ModelScope's."""
    said = "run out --push_to_hub true --hub_model_id me/mine".split()
    with pytest.raises(ConfigError, match=r"Choose one: --push-to-hub MS::me/mine, or me/mine for Hugging"):
        export.run(said)


def test_a_token_is_not_printed() -> None:
    for theirs in (SAID, DPO, "swift infer --model m", "swift export --model m"):
        command, notes, missing = swift.translate(f"{theirs} --hub_token hf_secret")
        assert not missing
        assert "hf_secret" not in "".join([command, *notes])
        assert any(re.match("--hub-token is left out: set HF_TOKEN", note) for note in notes)
    with pytest.raises(ConfigError, match=r"^--hub-token: an ms-swift option .*; set HF_TOKEN in the environment"):
        sft.parse(["--hub_token", "hf_secret"])
