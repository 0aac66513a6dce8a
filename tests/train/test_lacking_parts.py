"""--freeze and --part-learning-rates of parts that a model does not have: what is not there need not be frozen, and has
no learning rate, which is refused, but of an older run, or of ms-swift's options, which say nothing there of a model of
text."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardproof.checkpoint.manifest import Manifest
from shardproof.errors import ConfigError
from shardproof.models.loading.processors import load_processor
from shardproof.train.model.lacking import without_lacking
from shardproof.train.model.loading import load_tokenizer
from shardproof.train.options.config import SftConfig
from shardproof.train.rows.media import warn_of_limits

pytestmark = pytest.mark.slow

BOTH = {"freeze": ["vision", "audio"], "part_learning_rates": {"vision": 1e-5, "audio": 1e-5}}


@pytest.fixture(scope="module")
def runs(commands, sft, tmp_path_factory: pytest.TempPathFactory):
    swift = ["--freeze_vit", "true", "--freeze_aligner", "true", "--vit_lr", "1e-5", "--max-steps", "2"]
    file = tmp_path_factory.mktemp("files") / "swift.yaml"
    file.write_text("freeze_vit: true\n")
    pairs = file.with_name("pairs.jsonl")
    pairs.write_text('{"query": "1 + 1", "response": "2", "rejected_response": "3"}\n' * 8)
    tiny = sft()[sft().index("--model") + 1]
    freezing = ["--freeze", "vision", "--max-steps", "1", "--output-dir", "OUT"]
    found = commands(
        [
            ("freeze", sft("--freeze", "vision,audio", "--tuner", "lora", "--max-steps", "1")),
            ("typed", sft("--freeze", "vison")),
            ("rate", sft("--part-learning-rates", "aligner=1e-5")),
            ("pairs", ["rlhf", "--model", tiny, "--dataset", str(pairs), *freezing]),
            ("swift", sft(*swift, "--save-steps", "1")),
            ("file", ["sft", str(file), *sft("--max-steps", "1")[1:]]),
        ]
    )
    older = found["swift"].folder
    written = yaml.safe_load((older / "config.yaml").read_text())
    assert (written["freeze"], written["part_learning_rates"]) == ([], {})  # so that the file repeats the run
    (older / "config.yaml").write_text(yaml.safe_dump(written | BOTH))
    for said in older.glob("checkpoint-*/run.json"):
        manifest = Manifest.read(said.parent)
        recorded = json.loads(said.read_text())
        said.write_text(json.dumps(recorded | {"options": recorded["options"] | BOTH}))
        manifest.files[said.name], manifest.sums[said.name] = said.stat().st_size, zlib.crc32(said.read_bytes())
        manifest.write(said.parent)
    swift[-1] = "4"
    spelled = ["--freeze", "vision,audio", "--part-learning-rates", "vision=1e-5,audio=1e-5", "--max-steps", "5"]
    repeated = ["--part-learning-rates", "llm=1e-5", "--max-steps", "1", "--output-dir", "OUT"]
    more = commands(
        [
            ("export", ["export", str(older / "checkpoint-2"), "OUT"]),
            ("doctor", ["doctor", "--resume", str(older), "--max-steps", "3", "--plan", "no"]),
            ("alone", ["sft", "--resume", str(older), "--max-steps", "3"]),
            ("again", sft(*swift, "--resume", str(older))),
            ("spelled", sft(*spelled, "--resume", str(older))),
            ("another", sft("--part-learning-rates", "aligner=1e-5", "--resume", str(older))),
            ("repeat", ["sft", str(older / "config.yaml"), *repeated]),
        ]
    )
    return found | more


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("typed", "--freeze vison: the parts are llm, vision"),
        ("rate", "--part-learning-rates aligner=...: this model has no such part, it has llm. Leave aligner out."),
        ("another", "--part-learning-rates aligner=...: this model has no such part, it has llm."),
    ],
)
def test_a_part_that_is_not_there_is_refused_before_rows_are_encoded(runs, name: str, said: str) -> None:
    assert runs[name].code == 2
    assert said in runs[name].output
    assert "encoded" not in runs[name].output


@pytest.mark.parametrize("name", ["swift", "file", "export", "doctor", "alone", "again", "spelled"])
def test_what_swift_says_and_what_an_older_run_was_recorded_with_goes_on(runs, name: str) -> None:
    assert runs[name].code == 0, runs[name].output


@pytest.mark.parametrize("name", ["freeze", "pairs", "repeat"])
def test_to_freeze_what_is_not_there_is_told_and_goes_on(runs, name: str) -> None:
    run = runs[name]
    assert run.code == 0, run.output
    assert run.output.count("--freeze vision") == 1
    named = "vision" if name == "pairs" else "vision, audio"
    assert f"this model has no {named} to freeze. It has llm." in " ".join(run.output.split())
    assert yaml.safe_load((run.folder / "config.yaml").read_text())["freeze"] == []


@pytest.mark.parametrize(
    ("options", "here", "left"),
    [
        ({"freeze": ["vision", "audio", "aligner"]}, ["llm", "vision"], ["vision", "audio", "aligner"]),
        ({"freeze": ["audio"]}, ["llm", "vision"], []),
        ({"freeze": ["vision", "talker"]}, ["llm", "vision", "audio"], ["vision"]),
        ({"part_learning_rates": {"llm": 1e-5, "audio": 1e-5}}, ["llm"], None),
    ],
)
def test_towers_may_be_named_together(options: dict[str, Any], here: list[str], left: list[str] | None) -> None:
    config = SftConfig(**options)
    if left is not None:
        assert without_lacking(config, here).freeze == left
        return
    with pytest.raises(ConfigError, match="this model has no such part, it has llm"):
        without_lacking(config, here)


def test_swifts_freezing_of_the_language_model_says_nothing_of_a_model_of_text() -> None:
    """It is a part of models that see or hear there; by our option it leaves nothing to train."""
    config, ours = SftConfig(freeze=["llm", "vision"]), SftConfig(freeze=["llm"])
    config.model_fields_set.add("freeze_llm")
    assert without_lacking(config, ["llm"]).freeze == []
    assert without_lacking(config, ["llm", "vision"]).freeze == ["llm", "vision"]
    assert without_lacking(ours, ["llm"]).freeze == ["llm"]


def test_limits_of_files_say_that_a_model_of_text_takes_none(tiny: Path, tiny_models: Any, caplog) -> None:
    given = {"fps": 2.0, "max_frame_pixels": 99, "max_length": 9}
    for model, plugins, said in ((str(tiny), [], True), (str(tiny), ["own.py"], False), ("qwen2_5_vl", [], False)):
        model = model if "/" in model else str(tiny_models(model))
        config = SftConfig(model=model, external_plugins=plugins, **given)
        warn_of_limits(config, load_processor(model) if "qwen" in model else load_tokenizer(model, config))
        assert ("--max-frame-pixels, --fps without effect" in caplog.text) == said, caplog.text
        caplog.clear()
    warn_of_limits(SftConfig(model=str(tiny)), load_tokenizer(str(tiny), config))
    assert not caplog.text


def test_doctor_says_so_before_the_run(tiny: Path, rows: Path, capsys, caplog) -> None:
    from shardproof.cli.main import main

    common = ["doctor", "--model", str(tiny), "--dataset", str(rows), "--trial", "no", "--plan", "no"]
    assert main([*common, "--part-learning-rates", "vision=1e-5"]) == 1
    assert "--part-learning-rates vision=...: this model has no such part" in " ".join(capsys.readouterr().out.split())
    assert main([*common, "--freeze", "vision"]) == 0
    assert "--freeze vision: this model has no vision to freeze. It has llm." in caplog.text
