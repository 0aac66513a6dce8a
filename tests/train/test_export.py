"""The model of a run as an ordinary model folder: merged, in another dtype, split, and computing the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="module")
def exports(commands, sft):
    """Runs with a checkpoint, and what is exported of them."""
    lora = ["--tuner", "lora", "--target-modules", "q_proj", "v_proj", "--learning-rate", "3e-2"]
    return commands(
        [
            ("full", sft("--max-steps", "2", "--save-steps", "1", "--stage", "2")),
            ("lora", sft("--max-steps", "2", "--save-steps", "1", *lora)),
            ("split", ["export", "RUNS/full", "OUT", "--max-shard-size", "1MB"]),
            ("merged", ["export", "RUNS/lora", "OUT"]),
            ("taken", ["export", "RUNS/full", "RUNS/split"]),
            ("nothing", ["export", "RUNS/nothing", "OUT"]),
        ]
    )


@pytest.fixture(scope="module")
def more(exports, commands):
    """More of the same runs."""
    full, lora = exports["full"].folder, exports["lora"].folder
    return commands(
        [
            ("half", ["export", str(lora), "OUT", "--dtype", "bf16"]),
            ("early", ["export", str(full / "checkpoint-1"), "OUT"]),
            ("late", ["export", str(lora / "checkpoint-2"), "OUT"]),
        ]
    )


def logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder).eval()(input_ids=torch.arange(5, 25)[None]).logits.float()


def test_a_full_model_is_split_by_size(exports) -> None:
    """Into several files with an index, and is the same model."""
    run = exports["split"]
    assert run.code == 0, run.output
    assert "it computes the same logits" in run.output
    assert (run.folder / "model.safetensors.index.json").is_file()
    sizes = sorted(file.stat().st_size for file in run.folder.glob("*.safetensors"))
    assert len(sizes) > 2
    assert sizes[-2] < 1.1e6  # but for the embedding, which is larger by itself
    assert torch.equal(logits(run.folder), logits(exports["full"].folder / "model"))


def test_adapters_are_merged(exports, tiny: Path) -> None:
    """No adapter is left, and the logits are those of the model with its adapters, not those of the base."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run = exports["merged"]
    assert run.code == 0, run.output
    assert not (run.folder / "adapter_config.json").exists()
    with_adapters = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny), exports["lora"].folder / "model"
    )
    with torch.no_grad():
        expected = with_adapters.eval()(input_ids=torch.arange(5, 25)[None]).logits
    got = logits(run.folder)
    assert (got - expected).abs().max() < 1e-4
    assert (got - logits(tiny)).abs().max() > 1e-2


@pytest.mark.slow
def test_in_another_dtype(more) -> None:
    from safetensors.torch import load_file

    run = more["half"]
    assert run.code == 0, run.output
    assert {w.dtype for w in load_file(run.folder / "model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.slow
def test_a_checkpoint_can_be_exported(exports, more) -> None:
    """One from the middle of a run, and one of adapters."""
    for name in ("early", "late"):
        assert more[name].code == 0, more[name].output
    assert not torch.equal(logits(more["early"].folder), logits(exports["full"].folder / "model"))
    assert torch.equal(logits(more["late"].folder), logits(exports["merged"].folder))


def test_refusals(exports) -> None:
    assert exports["taken"].code == 2
    assert "is there already" in exports["taken"].output
    assert exports["nothing"].code == 2
    assert "There is no run folder" in exports["nothing"].output
