"""Promise: `shardproof verify` says that a run gives the numbers of one process, or where it first does not."""

from __future__ import annotations

import pytest
import torch

from shardproof.doctor.config import VerifyConfig
from shardproof.doctor.verify import Allowed, differences, drifts

pytestmark = pytest.mark.slow

BY_RANK = """
import os

import shardproof
from transformers import AutoModelForCausalLM


@shardproof.register_model("by_rank")
def by_rank(folder, **options):
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    block = model.model.layers[2].mlp
    inner = block.forward
    block.forward = lambda x: inner(x) * (3.0 if os.environ.get("RANK") == "1" else 1.0)
    return model
"""

A_LITTLE_MORE = """
import os

import shardproof
from transformers import AutoModelForCausalLM


@shardproof.register_model("a_little_more")
def a_little_more(folder, **options):
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    inner = model.loss_function
    if os.environ.get("WORLD_SIZE") == "2":
        model.loss_function = lambda *args, **more: inner(*args, **more) * 1.004
    return model
"""

OVERFLOWS = """
import os

import shardproof
from transformers import AutoModelForCausalLM


def large(only_first, *worlds):
    calls = []

    def make(folder, **options):
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
        inner = model.forward

        def forward(*args, **more):
            found = inner(*args, **more)
            if os.environ.get("WORLD_SIZE", "1") in worlds and found.loss.requires_grad:
                calls.append(1)
                if not only_first or len(calls) == 1:
                    found.loss.register_hook(lambda grad: grad * 1e9)
            return found

        model.forward = forward
        return model

    return make


shardproof.register_model("always")(large(False, "1", "2"))
shardproof.register_model("once")(large(True, "2"))
"""


@pytest.fixture(scope="module")
def done(tiny, rows, commands):
    fixed = ["verify", "--model", str(tiny), "--dataset", str(rows), "--learning-rate", "3e-3", "--steps", "2"]
    batch = ["--global-batch-size", "8"]
    many = ["--global-batch-size", "12", "--per-device-batch-size", "2"]
    return commands(
        [
            ("equal", [*fixed, *batch, "--stage", "3", "--nproc", "2"]),
            ("lora", [*fixed, *batch, "--stage", "2", "--nproc", "2", "--tuner", "lora", "--lora-rank", "4"]),
            ("bits", [*fixed, *many, "--stage", "3", "--nproc", "3", "--deterministic", "--chunked-loss"]),
            ("strict", [*fixed, *batch, "--stage", "2", "--nproc", "2", "--tolerance", "0"]),
        ]
    )


@pytest.mark.parametrize("name", ["equal", "lora"])
def test_a_run_that_gives_the_numbers_of_one_process_is_equal(done, name):
    run = done[name]
    assert run.code == 0, run.output
    assert "equal to 0.0001 of the largest value" in run.output
    assert " 0 parameters" not in run.output
    assert not run.folder.exists()


def test_deterministic_runs_are_equal_bit_for_bit(done):
    run = done["bits"]
    assert run.code == 0, run.output
    assert "equal bit for bit: gradients and weights of" in run.output


def test_the_first_step_and_parameter_that_differ_are_named(done):
    """With a tolerance of zero, sums that are added in another order differ."""
    run = done["strict"]
    assert run.code == 1, run.output
    assert "First at step 1: the gradient of 'model." in run.output


@pytest.mark.slow
def test_rows_in_parts_give_the_numbers_of_one_process(tiny, rows, commands):
    fixed = ["verify", "--model", str(tiny), "--dataset", str(rows), "--steps", "2", "--sequence-parallel", "2"]
    two, four = ["--nproc", "2", "--global-batch-size", "4"], ["--nproc", "4", "--global-batch-size", "8"]
    done = commands(
        [
            ("stage 3", [*fixed, *two, "--stage", "3", "--gradient-checkpointing"]),
            ("stage 2", [*fixed, *four, "--stage", "2", "--chunked-loss"]),
            ("adapters", [*fixed, *two, "--stage", "1", "--tuner", "lora", "--tolerance", "1e-3"]),
        ]
    )
    for name, run in done.items():
        assert run.code == 0, f"{name}:\n{run.output}"
        assert f"equal to {0.001 if name == 'adapters' else 0.0001} of the largest value" in run.output


def test_noise_is_told_from_differences():
    """A gradient that is zero in theory, and the weight that Adam moves by it, differ between any two runs."""
    known = {"a": torch.tensor([1.0, 2.0]), "bias": torch.tensor([1e-9, -1e-9])}
    weights = {"a": torch.tensor([1.0, 1.0]), "bias": torch.tensor([1e-3, 1e-3])}
    noisy = {**known, "bias": torch.tensor([-1e-9, 1e-9])}
    moved = {**weights, "bias": torch.tensor([-1e-3, 1e-3])}
    usual, strict = Allowed.by(VerifyConfig(), 1), Allowed.by(VerifyConfig(tolerance=0), 1)
    assert differences(1, (noisy, moved), (known, weights), usual, {}) == []
    assert [d.name for d in differences(1, (noisy, moved), (known, weights), strict, {})] == ["bias", "bias"]
    wrong = {**known, "a": torch.tensor([1.0, 2.1])}
    (found,) = differences(3, (wrong, weights), (known, weights), usual, {})
    assert (found.step, found.name, found.what) == (3, "a", "gradient")
    (lost,) = differences(3, ({"bias": known["bias"]}, weights), (known, weights), usual, {})
    assert "in one process only" in str(lost)
    (bad,) = differences(1, ({**known, "a": torch.tensor([float("nan"), 2.0])}, weights), (known, weights), usual, {})
    assert bad.off == float("inf")


@pytest.mark.parametrize("no_number", [float("nan"), float("inf")])
def test_what_is_no_number_in_one_process_hides_no_difference(no_number):
    weights, usual = {"a": torch.ones(2)}, Allowed.by(VerifyConfig(), 1)
    alone, together = {"a": torch.tensor([no_number, 1.0])}, {"a": torch.tensor([5.0, 1.0])}
    (found,) = differences(1, (together, weights), (alone, weights), usual, {})
    assert (found.what, found.off) == ("gradient", float("inf"))
    assert "not finite in one of the two" in str(found)
    (found,) = differences(1, ({"a": torch.tensor([no_number, 7.0])}, weights), (alone, weights), usual, {})
    assert (found.off, found.largest) == (6.0, 1.0)
    assert differences(1, (alone, weights), (alone, weights), usual, {}) == []
    both = [d.what for d in drifts(1, (no_number, no_number), (1.0, 2.0), usual)]
    assert both == ["loss", "norm of all gradients"]
    assert drifts(1, (no_number, no_number), (no_number, no_number), usual) == []


def test_a_parameter_without_elements_differs_in_nothing():
    nothing = {"a": torch.ones(2), "empty": torch.zeros(0, 4)}
    assert differences(1, (nothing, nothing), (nothing, nothing), Allowed(), {}) == []


def test_a_factor_is_told_from_rounding_in_bf16():
    """Elements that rounding moves by a percent, here up and there down, and all of them by 0.4 % the same way."""
    draw = torch.Generator().manual_seed(0)
    known = {"a": torch.randn(4000, generator=draw)}
    rounded = {"a": known["a"] * (1 + 0.01 * torch.randn(4000, generator=draw))}
    weights = {"a": torch.ones(4000)}
    first = Allowed.by(VerifyConfig(precision="bf16"), 1)
    assert differences(1, (rounded, weights), (known, weights), first, {}) == []
    (found,) = differences(1, ({"a": rounded["a"] * 1.004}, weights), (known, weights), first, {})
    assert (found.name, found.what) == ("a", "length of the gradient")
    assert found.off / found.largest == pytest.approx(0.004, rel=0.2)


@pytest.mark.parametrize("step", [1, 2])
def test_so_it_is_told_in_the_loss(step):
    """Before clipping, that is, which takes a factor out of gradients."""
    alone, allowed = (6.7, 4.1), Allowed.by(VerifyConfig(precision="bf16"), step)
    assert drifts(step, alone, (6.7 * 1.0001, 4.1 * 1.0005), allowed) == []
    found = drifts(step, alone, (6.7 * 1.004, 4.1 * 1.004), allowed)
    assert [d.what for d in found] == ["loss", "norm of all gradients"][: 3 - step]
    assert str(found[0]) == f"step {step}: the loss differs by 2.7e-02 (4.0e-03 of it, 6.7e+00)"
    assert [d.what for d in drifts(step, alone, (float("nan"), None), allowed)] == ["loss"]
    assert drifts(step, (0.0, None), (0.0, None), allowed) == []
    assert "where it is 0" in str(drifts(step, (0.0, 1.0), (1e-3, 1.0), allowed)[0])
    anything = Allowed.by(VerifyConfig(precision="bf16", tolerance=5.0), step)
    assert drifts(step, alone, (6.7 * 1.004, 4.1 * 1.004), anything) == []


@pytest.mark.parametrize(
    ("given", "tolerance"),
    [
        ({}, 1e-4),
        ({"precision": "bf16"}, 5e-2),
        ({"precision": "bf16", "tolerance": 0}, 0.0),
        ({"tolerance": 0.5}, 0.5),
    ],
)
def test_what_is_tolerated_is_what_the_precision_rounds_to(given, tolerance):
    from shardproof.doctor.verify import tolerance_of

    assert tolerance_of(VerifyConfig(**given)) == tolerance


@pytest.mark.slow
def test_a_sound_run_in_bf16_is_equal_and_a_rank_that_differs_is_not(tiny, rows, commands, tmp_path):
    """The planted fault: on rank 1 one block gives three times what it should."""
    plugin = tmp_path / "by_rank.py"
    plugin.write_text(BY_RANK)
    fixed = ["verify", "--model", str(tiny), "--dataset", str(rows), "--learning-rate", "1e-3", "--steps", "2"]
    fixed += ["--global-batch-size", "8", "--stage", "3", "--nproc", "2"]
    faulty = ["--external-plugins", str(plugin), "--model-type", "by_rank"]
    half = ["--precision", "bf16"]
    done = commands([("half", [*fixed, *half]), ("fault", [*fixed, *faulty]), ("both", [*fixed, *half, *faulty])])
    assert done["half"].code == 0, done["half"].output
    assert "equal to 0.05 of the largest value" in done["half"].output
    for name in ("fault", "both"):
        assert done[name].code == 1, done[name].output
        assert "First at step 1: the gradient of 'model." in done[name].output


@pytest.mark.slow
def test_a_loss_that_is_off_by_four_thousandths_is_seen_in_bf16(tiny, rows, commands, tmp_path):
    """The planted fault: of two processes each has 1.004 times its loss. Clipping takes that out of the gradients."""
    plugin = tmp_path / "a_little_more.py"
    plugin.write_text(A_LITTLE_MORE)
    fixed = ["verify", "--model", str(tiny), "--dataset", str(rows), "--learning-rate", "1e-3", "--precision", "bf16"]
    fixed += ["--global-batch-size", "8", "--nproc", "2"]
    faulty = ["--external-plugins", str(plugin), "--model-type", "a_little_more"]
    done = commands(
        [
            (f"{stage}{name}", [*fixed, "--stage", stage, *more])
            for stage in "0123"
            for name, more in (("", []), (" fault", faulty))
        ]
    )
    for name, run in done.items():
        assert run.code == (1 if "fault" in name else 0), f"{name}:\n{run.output}"
        if "fault" in name:
            assert "at step 1: the loss differs by" in run.output
            assert "(4.0e-03 of it" in run.output


def test_dropout_is_told_where_it_stands_in_the_config_only():
    """Attention of most models drops by a function, and no module says so."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from shardproof.doctor.verify import dropping

    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    config = Qwen2Config(**sizes, num_hidden_layers=1, num_key_value_heads=2, attention_dropout=0.1)
    assert dropping(Qwen2ForCausalLM(config)) == ["attention_dropout of config.json"]
    config.attention_dropout = 0.0
    assert dropping(Qwen2ForCausalLM(config)) == []
    assert dropping(torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Dropout(0.0))) == ["0"]


def test_noise_of_neftune_is_told_as_dropout_is():
    """That two runs differ by it was said to be a difference between stages."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.integrations.neftune import activate_neftune

    from shardproof.doctor.verify import dropping

    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_hidden_layers=1, num_key_value_heads=2))
    activate_neftune(model, 5)
    assert dropping(model) == ["NEFTune's noise on model.embed_tokens"]


@pytest.mark.slow
def test_steps_that_a_loss_scale_leaves_out_are_not_taken_for_differences(tiny, rows, commands, tmp_path):
    """The scale of two processes overflows sooner than that of one: a rank's share of the loss counts twice."""
    plugin = tmp_path / "overflows.py"
    plugin.write_text(OVERFLOWS)
    fixed = ["verify", "--model", str(tiny), "--dataset", str(rows), "--precision", "fp16", "--steps", "2"]
    fixed += ["--global-batch-size", "4", "--nproc", "2", "--external-plugins", str(plugin), "--model-type"]
    done = commands([(name, [*fixed, name]) for name in ("always", "once")])
    for name, told in {
        "always": ("skipped step 1, 2 in both", "Compare with more steps, --steps 18"),
        "once": ("skipped step 1 in only one of the two runs", "Compare with --precision bf16 or fp32"),
    }.items():
        assert done[name].code == 2, done[name].output
        assert all(text in done[name].output for text in told), done[name].output
        assert "differ" not in done[name].output


def test_what_comes_behind_a_step_that_one_run_left_out_is_not_compared(tmp_path):
    from shardproof.doctor.verify import Difference, judged

    for step in (2, 3, 4):  # of one process, which has left out the first
        (tmp_path / f"{step}.pt").touch()
    found = [Difference(step, "a", "weight", 1.0, 1.0) for step in (3, 4)]
    losses = [(1.0, 1.0)] * 4
    verdict = judged(losses, 1, found, [], {2, 4}, str(tmp_path))
    assert (verdict.steps, verdict.left_out, verdict.parted, verdict.differences) == (1, [1], 3, [])
    verdict = judged(losses, 1, found, [], {2, 3, 4}, str(tmp_path))
    assert (verdict.steps, verdict.left_out, verdict.parted, verdict.differences) == (3, [1], None, found)


def test_steps_of_muon_are_compared_as_a_whole():
    """Newton-Schulz takes the rounding of a gradient of low rank for as much as what it is of."""
    draw = torch.Generator().manual_seed(0)
    known = {"b": torch.linalg.qr(torch.randn(64, 4, generator=draw)).Q}
    rounded = {"b": known["b"] + 0.01 * torch.randn(64, 4, generator=draw)}
    gradients = {"b": torch.ones(64, 4)}
    muon, adam = (Allowed.by(VerifyConfig(precision="bf16", optimizer=name), 2) for name in ("muon", "adamw"))
    assert [d.what for d in differences(2, (gradients, rounded), (gradients, known), adam, {})] == ["weight"]
    assert differences(2, (gradients, rounded), (gradients, known), muon, {}) == []
    lost = {"b": torch.zeros(64, 4)}
    assert [d.what for d in differences(2, (gradients, lost), (gradients, known), muon, {})] == ["weight as a whole"]
