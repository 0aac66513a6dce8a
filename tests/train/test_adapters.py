"""Adapters with modules trained in full beside them, in DoRA and in rsLoRA: the same numbers on any number of
processes, resumed anywhere, and merged at the end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

KINDS = {
    "beside": ["--rslora", "--modules-to-save", "embed_tokens"],  # which is the head as well, and stays so
    "dora": ["--dora"],
}


TARGETS = ["--tuner", "lora", "--target-modules"]


@pytest.fixture(scope="module", params=["dora", pytest.param("beside", marks=pytest.mark.slow)])
def runs(request, commands, sft):
    more = ["--tuner", "lora", "--lora-rank", "4", "--learning-rate", "3e-3", *KINDS[request.param]]
    kept = ["--keep-gathered", "1"] if request.param == "beside" else []
    two = ["--nproc", "2", "--stage", "3", *kept, *more]
    return commands(
        [
            ("one", sft("--nproc", "1", "--stage", "0", *more)),
            ("two", sft(*two, "--save-steps", "3")),
            ("resumed", sft("--nproc", "1", "--stage", "1", *more, "--resume", "RUNS/two/checkpoint-3")),
            ("merged", ["export", "RUNS/two", "OUT"]),
            ("early", ["export", "RUNS/two/checkpoint-3", "OUT"]),
            ("without", sft("--max-steps", "1")),
            ("named", sft("--max-steps", "1", *TARGETS, r".*layers\.1\.(mlp\.\w+|self_attn\.q)_proj")),
            ("none", sft(*TARGETS, r"layers\.1\..*")),
            ("wrong", sft(*TARGETS, "(q_proj")),
            ("even", sft("--max-steps", "1", *TARGETS, "q_proj")),
            ("faster", sft("--max-steps", "1", *TARGETS, "q_proj", "--lorap-lr-ratio", "4", "--nproc", "2")),
        ]
    )


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(5, 25)[None]).logits.float()


def test_processes_and_stages_give_the_same_losses(runs) -> None:
    for name, run in runs.items():
        assert run.code == 2 * (name in ("none", "wrong")), run.output
    losses = runs["one"].series("loss")
    assert losses[-1] < losses[0] - 0.01
    assert losses[0] == pytest.approx(runs["without"].series("loss")[0], abs=1e-5)  # they begin as the base
    assert runs["two"].series("loss") == pytest.approx(losses, abs=1e-5)
    assert runs["resumed"].series("loss") == pytest.approx(losses[3:], abs=1e-5)


def test_the_export_computes_what_base_and_adapters_do(runs, tiny: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tiny)
    before = logits(base)
    adapted = logits(PeftModel.from_pretrained(base, runs["two"].folder / "model"))
    merged = logits(AutoModelForCausalLM.from_pretrained(runs["merged"].folder))
    early = logits(AutoModelForCausalLM.from_pretrained(runs["early"].folder))
    assert (merged - adapted).abs().max() < 1e-4
    assert (merged - before).abs().max() > 1e-2
    assert (early - merged).abs().max() > 1e-3


def test_a_regular_expression_names_whole_modules(runs) -> None:
    from safetensors.torch import load_file

    found = load_file(runs["named"].folder / "model" / "adapter_model.safetensors")
    modules = {name.rpartition(".lora_")[0].partition("layers.")[2] for name in found}
    assert modules == {"1.self_attn.q_proj", *(f"1.mlp.{kind}_proj" for kind in ("gate", "up", "down"))}
    assert "no module has that full name. Names are like model." in runs["none"].output
    assert "--target-modules (q_proj is not a regular expression: " in runs["wrong"].output


def test_second_matrices_learn_faster(runs) -> None:
    """In the first step AdamW moves each weight as far as its rate says, and nothing reaches the first matrices."""
    from safetensors.torch import load_file

    even, faster = (load_file(runs[name].folder / "model" / "adapter_model.safetensors") for name in ("even", "faster"))
    for name, value in even.items():
        ratio = 4 if "lora_B" in name else 1
        torch.testing.assert_close(faster[name], ratio * value, atol=2e-5, rtol=1e-3, msg=name)
    assert any(value.abs().max() > 1e-3 for name, value in even.items() if "lora_B" in name)
