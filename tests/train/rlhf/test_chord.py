"""Promise: rows of experts beside grpo's answers are learnt the same on any number of ranks and after a checkpoint."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from shardproof.errors import ConfigError, DataError
from shardproof.train.options.rlhf_config import RlhfConfig
from shardproof.train.rlhf.algorithms import check_algorithm
from shardproof.train.rlhf.chord import Experts, Schedule, check_chord, encoded_experts, unsure
from train.rlhf.algorithms import prepared_for
from train.rlhf.test_same_losses import ALGORITHMS, CHECKPOINTED, COMMON, LORA, check

EXPERTS = ["--chord-sft-dataset", "FILES/chats.jsonl", "--chord-mu-peak", "0.6"]
OPTIONS = [*COMMON, *ALGORITHMS["grpo"], *EXPERTS]


def test_their_weight_rises_and_falls_as_in_the_paper() -> None:
    schedule = Schedule(peak=0.9, valley=0.1, warmup=4, decay=10)
    assert [schedule.mu(step) for step in (0, 2, 4, 14, 99)] == pytest.approx([0, 0.45, 0.9, 0.1, 0.1])
    assert schedule.mu(9) == pytest.approx(0.5)
    assert [Schedule(0.5, 0.5, 0, 0).mu(step) for step in (0, 7)] == [0.5, 0.5]


def test_the_numbers_are_those_of_one_process(rlhf: Any) -> None:
    records = check(rlhf, "grpo", [{"stage": 3}], words=EXPERTS, chord_mu_valley=0.2, chord_mu_decay_steps=2)
    assert [r["chord/mu"] for r in records if "chord/mu" in r] == pytest.approx([0.6, 0.4, 0.2])
    assert records[0]["chord/sft_loss"] == pytest.approx(math.log(2048), rel=0.1), "an untrained model knows no token"


VARIANTS: dict[str, dict[str, Any]] = {
    "by uncertainty": {"chord_enable_phi_function": True, "chord_mu_warmup_steps": 2},
    "adapters": {**LORA, "loss_type": ["grpo"]},
    "learnt from again": {"num_iterations": 2, "steps_per_generation": 2},
    "alone": {"chord_mu_peak": 1.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("what", VARIANTS)
def test_so_they_are_in_variants(rlhf: Any, what: str) -> None:
    more, two = dict(VARIANTS[what]), {"chord_sft_per_device_train_batch_size": 2}
    if what == "learnt from again":  # chance deals answers out to micro-batches, so a step has one
        (one, again) = rlhf(2, [{"stage": stage, "per_device_batch_size": 2, **more} for stage in (0, 3)], *OPTIONS)
        for name in ("loss", "grad_norm"):
            mine, its = ([r[name] for r in records if name in r] for records in (one, again))
            assert mine == pytest.approx(its, rel=2e-4, abs=1e-5)
        return
    check(rlhf, "grpo", [*CHECKPOINTED, {"stage": 1}], words=EXPERTS, **more, **two)


@pytest.mark.slow
def test_alone_they_are_learnt_as_in_sft(rlhf: Any, files: dict[str, Path], tmp_path: Path) -> None:
    """With a weight of 1 and all rows in a step, its loss is their mean over learnt tokens."""
    (shape,) = [{"stage": 0, "per_device_batch_size": 2, "max_steps": 1, "chord_mu_peak": 1.0}]
    row = files["chats"].read_text().splitlines(keepends=True)[0]
    (tmp_path / "one.jsonl").write_text(row)
    experts = ["--chord-sft-dataset", str(tmp_path / "one.jsonl"), "--chord-mu-peak", "1"]
    ((one, *_),) = rlhf(1, [shape], *COMMON, *ALGORITHMS["grpo"], *experts)
    (tmp_path / "many.jsonl").write_text(row * 6)
    experts[1] = str(tmp_path / "many.jsonl")
    many = {**shape, "chord_sft_per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
    ((six, *_),) = rlhf(1, [many], *COMMON, *ALGORITHMS["grpo"], *experts)
    assert one["loss"] == pytest.approx(six["loss"], rel=1e-5)
    assert one["loss"] == pytest.approx(one["chord/sft_loss"], rel=1e-5)


@pytest.mark.slow
def test_a_model_that_caps_its_logits_learns_them_too(rlhf: Any, models: dict[str, Path], tmp_path: Path) -> None:
    from transformers import AutoTokenizer, Gemma2Config, Gemma2ForCausalLM

    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    heads = {"num_key_value_heads": 1, "head_dim": 16, "final_logit_softcapping": 5.0}
    Gemma2ForCausalLM(Gemma2Config(vocab_size=2048, **small, **heads)).save_pretrained(tmp_path / "capped")
    AutoTokenizer.from_pretrained(models["policy"]).save_pretrained(tmp_path / "capped")
    options = [str(tmp_path / "capped") if word == "MODELS/policy" else word for word in OPTIONS]
    shape = {"per_device_batch_size": 2, "max_steps": 2, "beta": 0.0}
    one, two = (rlhf(n, [{**shape, "stage": 3, "gradient_accumulation_steps": 2 // n}], *options)[0] for n in (1, 2))
    for name in ("loss", "grad_norm", "chord/sft_loss"):
        mine, its = ([r[name] for r in records if name in r] for records in (two, one))
        assert mine == pytest.approx(its, rel=2e-4, abs=1e-5)


def test_the_surest_and_the_unlikeliest_tokens_weigh_nothing() -> None:
    assert unsure(torch.tensor([0.0, math.log(0.5), -40.0])).tolist() == pytest.approx([0, 0.25, 0])


@pytest.mark.parametrize("phi", [False, True])
@pytest.mark.parametrize("capped", [False, True])
def test_a_turn_of_theirs_weighs_what_it_says(
    files: dict[str, Path], models: dict[str, Path], tmp_path: Path, phi: bool, capped: bool
) -> None:
    """As in sft: the sum of weighed losses, divided by the number of tokens; with a head of its own or not."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models["policy"])
    model = AutoModelForCausalLM.from_pretrained(models["policy"])
    rows = [json.loads(line) for line in files["chats"].read_text().splitlines()[:2]]
    sums = []
    for weights in ((1, 1), (0.25, 3)):
        for row, weight in zip(rows, weights, strict=True):
            row["messages"][1]["weight"] = weight
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = RlhfConfig(rlhf_type="grpo", chord_sft_dataset=[f"{tmp_path}/rows.jsonl"], chord_mu_peak=0.5)
        encoded = encoded_experts(config, tokenizer)
        experts = Experts(encoded, 2, Schedule(0.5, 0.5, 0, 0), phi, tokenizer.pad_token_id, 0)
        experts._plain = False if capped else None
        of_rows = [[encoded[0]], [encoded[1]], [encoded[0], encoded[1]]]
        sums.append([float(experts._summed(model, some, "cpu")) for some in of_rows])
    (first, second, both), weighed = sums
    assert weighed == pytest.approx([0.25 * first, 3 * second, 0.25 * first + 3 * second], rel=1e-5)
    assert both == pytest.approx(first + second, rel=1e-5)


def test_bad_rows_of_experts_are_told_as_theirs(tmp_path: Path, models: dict[str, Path]) -> None:
    from transformers import AutoTokenizer

    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "and?"}]}) + "\n")
    config = RlhfConfig(rlhf_type="grpo", chord_sft_dataset=[str(file)], chord_mu_peak=0.5)
    with pytest.raises(
        DataError, match=r"--chord-sft-dataset: 1 of 1 row cannot be used:\n.*rows.jsonl:1: no turn of role"
    ):
        encoded_experts(config, AutoTokenizer.from_pretrained(models["policy"]))


def test_those_that_are_too_long_are_counted(files: dict[str, Path], models: dict[str, Path]) -> None:
    """They have the room of a prompt and its answer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models["policy"])
    given: dict[str, Any] = {"chord_sft_dataset": [str(files["chats"])], "chord_mu_peak": 0.5, "max_length": 12}
    config = RlhfConfig(rlhf_type="grpo", model=str(models["policy"]), **given)
    assert len(encoded_experts(config, tokenizer)) == 12
    few = encoded_experts(config.model_copy(update={"max_completion_length": 8}), tokenizer)
    assert max(map(len, few["input_ids"])) <= 20
    assert few.report.dropped == 12 - len(few) > 0


def test_those_that_a_model_has_no_positions_for_are_refused(
    files: dict[str, Path], models: dict[str, Path], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer, GPT2Config

    GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=16, vocab_size=2048).save_pretrained(tmp_path)
    config = RlhfConfig(rlhf_type="grpo", model=str(tmp_path), chord_sft_dataset=[str(files["chats"])])
    with pytest.raises(ConfigError, match=r"--chord-sft-dataset: a row has \d+ tokens, and .* only 16 positions"):
        encoded_experts(config, AutoTokenizer.from_pretrained(models["policy"]))


def test_an_earlier_run_is_not_lost_to_rows_that_are_missing(
    files: dict[str, Path], models: dict[str, Path], tmp_path: Path
) -> None:
    """Of --overwrite: what cannot start deletes nothing."""
    (tmp_path / "0").mkdir()
    for name in ("config.yaml", "metrics.jsonl"):
        (tmp_path / "0" / name).touch()
    experts = ["--chord-sft-dataset", "away.jsonl", "--chord-mu-peak", "0.5", "--overwrite"]
    words = " ".join([*COMMON, *ALGORITHMS["grpo"], *experts])
    words = words.replace("MODELS", str(models["policy"].parent)).replace("FILES", str(files["chats"].parent))
    with pytest.raises(DataError, match=r"--chord-sft-dataset: There is no file away.jsonl"):
        prepared_for(words.split(), 1, [{"per_device_batch_size": 2}], tmp_path)
    assert (tmp_path / "0" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "--chord-sft-dataset needs --chord-mu-peak"),
        ({"chord_mu_peak": 0.0}, "--chord-mu-peak 0: nothing would be learned"),
        ({"chord_mu_peak": 0.0, "chord_mu_valley": 0.0}, "--chord-mu-peak 0: nothing would be learned"),
        ({"chord_mu_peak": 0.1, "chord_mu_valley": 0.9}, "--chord-mu-valley 0.9 is above --chord-mu-peak 0.1"),
        ({"chord_mu_peak": 0.9, "chord_mu_decay_steps": 5}, "falls to --chord-mu-valley. Give one below 0.9"),
        ({"chord_mu_peak": 0.9, "chord_mu_valley": 0.1}, "falls to it over --chord-mu-decay-steps, which is 0"),
        ({"chord_mu_peak": 0.5, "sequence_parallel": 2}, "--chord-sft-dataset and --sequence-parallel"),
    ],
)
def test_what_they_lack_is_told(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_chord(RlhfConfig(rlhf_type="grpo", chord_sft_dataset=["rows.jsonl"], **options))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rlhf_type": "grpo", "chord_mu_peak": 0.5}, "--chord-mu-peak has no effect without --chord-sft-dataset"),
        ({"rlhf_type": "rloo", "chord_sft_dataset": ["rows"]}, "does not apply to --rlhf-type rloo; it is for grpo"),
    ],
)
def test_where_they_mean_nothing_they_are_refused(options: dict[str, Any], text: str) -> None:
    config = RlhfConfig(reward_funcs=["length"], **options)
    with pytest.raises(ConfigError, match=text):
        check_algorithm(config, config.batch(1))
