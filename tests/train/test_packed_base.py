"""A base that is published in FP8: it trains as what it is unpacked to, and what is saved of it is not packed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from models.packed_folders import pack

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tiny: Path, commands, sft, tmp_path_factory: pytest.TempPathFactory):
    folder = pack(Path(shutil.copytree(tiny, tmp_path_factory.mktemp("packed") / "model")), "fp8")
    short = ["--max-steps", "2", "--model"]
    return commands(
        [
            ("unpacked", ["export", str(folder), "OUT"]),
            ("one", sft("--nproc", "1", *short, "RUNS/unpacked")),
            ("two", sft("--nproc", "2", "--stage", "3", *short, str(folder))),
            ("adapters", sft("--nproc", "2", "--stage", "3", *short, str(folder), "--tuner", "lora")),
            ("merged", ["export", "RUNS/adapters", "OUT"]),
        ]
    )


def test_it_trains_as_what_it_is_unpacked_to(runs) -> None:
    for name, run in runs.items():
        assert run.code == 0, run.output
        assert "loaded in full" not in run.output, name
    assert "weights that are packed in the model's files (fp8)" in runs["two"].output
    assert runs["two"].series("loss") == pytest.approx(runs["one"].series("loss"), abs=1e-5)
    assert runs["adapters"].series("loss")[0] == pytest.approx(runs["one"].series("loss")[0], abs=1e-5)


def test_what_is_saved_of_it_is_an_ordinary_model(runs, tiny: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    names = load_file(tiny / "model.safetensors").keys()
    for folder in (runs["two"].folder / "model", runs["merged"].folder):
        assert load_file(folder / "model.safetensors").keys() == names
        assert not hasattr(AutoModelForCausalLM.from_pretrained(folder).config, "quantization_config")
