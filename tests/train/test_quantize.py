"""A base in four bits: the same numbers on any number of processes, resumed anywhere, and merged at the end."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # tests/integrations/test_four_bits.py has the layers


@pytest.fixture(scope="module")
def packed(bitsandbytes, tiny, tmp_path_factory) -> Path:
    """The model as transformers saves it in four bits, the rest of it in bf16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    folder = tmp_path_factory.mktemp("packed") / "model"
    kind = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16, quantization_config=kind)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def runs(packed, commands, sft):
    lora = ["--tuner", "lora", "--lora-rank", "4"]
    more = [*lora, "--quantize", "nf4"]
    two = ["--nproc", "2", "--stage", "3", *more, "--gradient-checkpointing", "yes", "--save-steps", "3"]
    return commands(
        [
            ("one", sft("--nproc", "1", "--stage", "0", *more)),
            ("two", sft(*two)),
            ("resumed", sft("--nproc", "1", "--stage", "1", *more, "--resume", "RUNS/two/checkpoint-3")),
            ("bf16", sft("--nproc", "2", "--stage", "3", *more, "--precision", "bf16", "--offload", "all")),
            ("whole", sft("--nproc", "1", "--stage", "0", *lora)),
            ("merged", ["export", "RUNS/two", "OUT"]),
            ("early", ["export", "RUNS/two/checkpoint-3", "OUT"]),
            ("late", ["export", "RUNS/two/checkpoint-5", "OUT"]),
            ("without", sft("--nproc", "1", *lora, "--resume", "RUNS/two/checkpoint-3")),
            ("module", sft(*more, "--modules-to-save", "q_proj", "--max-steps", "1")),
            ("packed", sft("--model", str(packed), *lora)),
            ("packed two", sft("--model", str(packed), *lora, "--nproc", "2", "--stage", "3", "--save-steps", "5")),
            ("unpacked", ["export", "RUNS/packed two", "OUT"]),
            ("unpacked early", ["export", "RUNS/packed two/checkpoint-5", "OUT"]),
            ("asked packed", ["infer", "RUNS/packed two", "--prompt", "a process", "--max-new-tokens", "3"]),
            ("asked", ["infer", "RUNS/two", "--prompt", "a process", "--max-new-tokens", "3"]),
        ]
    )


def test_processes_and_stages_give_the_same_losses(runs) -> None:
    for run in runs.values():
        assert run.code == 0, run.output
    losses = runs["one"].series("loss")
    assert losses[-1] < losses[0] - 0.01
    assert runs["two"].series("loss") == pytest.approx(losses, abs=1e-5)
    assert runs["resumed"].series("loss") == pytest.approx(losses[3:], abs=1e-5)
    assert runs["bf16"].series("loss") == pytest.approx(losses, abs=2e-2)
    whole = runs["whole"].series("loss")
    assert whole == pytest.approx(losses, abs=0.2)
    assert abs(whole[0] - losses[0]) > 1e-5, "four bits are four bits"


def test_a_folder_that_is_packed_computes_in_the_precision_that_is_asked_for(runs) -> None:
    losses = runs["packed"].series("loss")
    assert losses[-1] < losses[0] - 0.01
    assert runs["packed two"].series("loss") == pytest.approx(losses, abs=1e-5)


def test_what_is_exported_is_an_ordinary_model_merged_of_runs_and_checkpoints(runs, tiny: Path) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    before = load_file(tiny / "model.safetensors")
    for run, checkpoint, rounded in (("merged", "late", False), ("unpacked", "unpacked early", True)):
        one, other = (load_file(runs[name].folder / "model.safetensors") for name in (run, checkpoint))
        assert one.keys() == before.keys()
        for name, value in one.items():
            assert torch.allclose(value.float(), other[name].float(), rtol=2e-2 if rounded else 1e-6, atol=1e-3), name
        AutoModelForCausalLM.from_pretrained(runs[run].folder)
    early = load_file(runs["early"].folder / "model.safetensors")
    assert any(not torch.equal(early[name], value) for name, value in before.items())
