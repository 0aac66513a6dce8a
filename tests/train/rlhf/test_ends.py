"""Promise: with --stop-words an answer ends with the first of these texts, on any number of ranks, and what stands
behind it in its batch is nowhere."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardproof.cli import training
from shardproof.errors import ConfigError
from shardproof.train.options.config import SftConfig
from shardproof.train.options.rlhf_config import RlhfConfig
from shardproof.train.rlhf.ends import Ends
from shardproof.train.run import recipe_of
from train.rlhf.algorithms import prepared_for
from train.rlhf.test_colocated import _vllm_is_installed, command  # noqa: F401
from train.rlhf.test_same_losses import ALGORITHMS, CHECKPOINTED, COMMON, check
from train.rlhf.vllm_of_transformers import given_to_vllm

WORDS = ["e", "s s"]
MORE = ["--stop-words", *WORDS]


def test_an_answer_ends_with_the_token_that_completes_the_text(models: dict[str, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(models["policy"])
    ids = tokenizer("a gradient holds the process one").input_ids
    text = tokenizer.decode(ids)
    for word in ("holds", "lds t", "one", "gradient"):
        length = Ends([word, "zq"], tokenizer).tokens(ids)
        assert word in tokenizer.decode(ids[:length])
        assert word not in tokenizer.decode(ids[: length - 1])
    ends = Ends(["holds", "grad"], tokenizer)
    assert text.startswith(tokenizer.decode(ends.cut(ids)))
    assert "holds" not in tokenizer.decode(ends.cut(ids))
    assert Ends(["zq"], tokenizer).tokens(ids) is None
    assert Ends(["zq"], tokenizer).cut(ids) == ids


def test_a_model_stops_by_what_it_writes_and_not_by_what_it_is_asked(models: dict[str, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(models["policy"])
    model = AutoModelForCausalLM.from_pretrained(models["policy"])
    asked = tokenizer(["the process holds", "one gradient sends"], return_tensors="pt", padding=True)
    plain = model.generate(**asked, do_sample=False, max_new_tokens=12, eos_token_id=None)
    length = asked["input_ids"].shape[1]
    third = tokenizer.decode(plain[0, length + 2])
    ends = Ends([tokenizer.decode(plain[0, length : length + 3]), "holds"], tokenizer)
    with ends.of(model):
        made = model.generate(**asked, do_sample=False, max_new_tokens=12, eos_token_id=None)
    assert "generate" not in vars(model)
    assert ends.cut(made[0, length:].tolist()) == plain[0, length : length + 3].tolist(), third
    assert len(ends.cut(made[1, length:].tolist())) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grpo", "rloo", "ppo"])
def test_the_losses_are_those_of_one_process(rlhf: Any, kind: str) -> None:
    expected = check(rlhf, kind, [{"stage": 3}, CHECKPOINTED[0]], words=MORE)
    plain = check(rlhf, kind, [{"stage": 3}])
    lengths, before = ([r["completions/mean_length"] for r in some] for some in (expected, plain))
    assert sum(lengths) < sum(before)
    # An answer that ends at a text was not cut.
    assert sum(r["completions/clipped_ratio"] for r in expected) < 1.5
    assert all(r["completions/max_terminated_length"] <= 8 for r in expected)


@pytest.mark.slow
def test_so_are_those_of_a_student(rlhf: Any) -> None:
    """The likeliest tokens; the mean of what is written is that of a micro-batch on all ranks."""
    options = [*COMMON, *(word for word in ALGORITHMS["gkd"] if word not in ("--lmbda", "0"))]
    options += ["--max-completion-length", "8", "--lmbda", "1", "--temperature", "1e-4"]
    one, two = {"stage": 0, "per_device_batch_size": 2}, {"stage": 3, "per_device_batch_size": 1}
    every = ["--stop-words", *string.ascii_letters, *string.digits, *"#%&=.,;!?"]
    (ended,), (plain,) = rlhf(1, [one], *options, *every), rlhf(1, [one], *options)
    (same,) = rlhf(2, [two], *options, *every)
    for name in ("loss", "grad_norm"):
        assert [r[name] for r in same] == pytest.approx([r[name] for r in ended], abs=1e-5, rel=2e-4)
    assert [r["loss"] for r in ended] != [r["loss"] for r in plain]


@pytest.mark.slow
def test_a_vllm_is_told_of_them(pools: Any, models: dict[str, Path], files: dict[str, Path], tmp_path: Path) -> None:
    argv = command(models, files, "grpo", *MORE)
    one = [{"stage": 0, "per_device_batch_size": 8}]
    two = [{"stage": 3, "per_device_batch_size": 4}]
    wanted, _, _ = pools.run(1, given_to_vllm, prepared_for(argv, 1, one, tmp_path / "one"), timeout=300.0)[0]
    mine, _, _ = pools.run(2, given_to_vllm, prepared_for(argv, 2, two, tmp_path / "two"), timeout=300.0)[0]
    for name in ("loss", "reward", "completions/mean_length", "completions/clipped_ratio"):
        assert [r[name] for r in mine[0]] == pytest.approx([r[name] for r in wanted[0]], abs=2e-4, rel=1e-4), name
    assert max(r["completions/mean_length"] for r in wanted[0]) < 6
    ratios = [r["sampling/importance_sampling_ratio/mean"] for r in mine[0]]
    assert ratios == pytest.approx([1.0] * len(ratios), abs=1e-3)


@pytest.mark.parametrize(("kind", "more"), [(SftConfig, []), (RlhfConfig, ["--rlhf-type", "grpo"])])
def test_a_line_end_is_written_as_in_shells(kind: Any, more: list[str], tmp_path: Path) -> None:
    config, _ = training.parse(
        kind, "", ["--model", "m", "--dataset", "d", *more, "--stop-words", r"\n\n", r"a\nb", "c"]
    )
    assert config.stop_words == ["\n\n", "a\nb", "c"]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"stop_words": config.stop_words}))
    again, _ = training.parse(kind, "", [str(tmp_path / "run.yaml"), "--model", "m", "--dataset", "d", *more])
    assert again.stop_words == config.stop_words, "of a run that is repeated from its file"


REWARDED = ["--rlhf-type", "grpo", "--reward-funcs", "length"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ([*REWARDED, "--mask-truncated-completions"], "--stop-words and --mask-truncated-completions: TRL treats"),
        (["--rlhf-type", "gkd", "--teacher-model", "t", "--lmbda", "0"], "with --lmbda 0 no answers are generated"),
        (["--rlhf-type", "dpo"], "--stop-words"),
    ],
)
def test_where_no_answer_can_end_so_it_is_refused(options: list[str], why: str) -> None:
    argv = ["--model", "m", "--dataset", "d", "--stop-words", "a", *options]
    config, _ = training.parse(RlhfConfig, "", argv)
    with pytest.raises(ConfigError) as error:
        recipe_of(config).check(config, 1)
    assert why in str(error.value)


def test_in_sft_they_are_of_answers_in_evaluations() -> None:
    config = SftConfig(model="m", dataset=["d"], stop_words=["a"])
    with pytest.raises(
        ConfigError, match="--stop-words applies to answers in evaluations: add --predict-with-generate"
    ):
        recipe_of(config).check(config, 1)
