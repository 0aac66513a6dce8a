"""Promise: of a teacher's likeliest tokens gkd learns what TRL learns of whole vocabularies, and holds no logits."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.nn import functional as F

from distributed.pool import RemoteError
from shardproof.errors import ConfigError
from shardproof.train.losses.chunked import LEAST
from shardproof.train.losses.likeliest import distance, likeliest
from shardproof.train.options.rlhf_config import RlhfConfig
from shardproof.train.rlhf.algorithms import check_algorithm
from shardproof.train.rlhf.teachers import check_topk
from train.rlhf.test_same_losses import ALGORITHMS, CHECKPOINTED, COMMON, LORA, check

WIDTH, VOCABULARY = 16, 300


def made(tokens: int, dtype: torch.dtype, seed: int = 0) -> list[Any]:
    """Hidden states, head and bias."""
    draw = torch.Generator().manual_seed(tokens + seed)
    shapes = [(tokens, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,)]
    return [torch.randn(shape, generator=draw).mul(0.5).to(dtype).requires_grad_() for shape in shapes]


def divergence(beta: float) -> Any:
    from trl.experimental.gkd import GKDTrainer

    return functools.partial(GKDTrainer.generalized_jsd_loss, beta=beta, reduction="sum")


def gradients(loss: torch.Tensor, tensors: list[Any]) -> list[torch.Tensor]:
    for x in tensors:
        x.grad = None
    (3 * loss).backward()
    return [x.grad.double() / 3 for x in tensors]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_in_all_tokens_they_are_compared_as_trl_compares_them(dtype: torch.dtype, beta: float) -> None:
    ours, theirs = made(2 * LEAST + 77, dtype), made(2 * LEAST + 77, dtype, seed=1)
    taught = likeliest(*theirs, k=VOCABULARY, among=VOCABULARY)
    loss = distance(*ours, taught, torch.tensor(7), divergence(beta))
    whole = [F.linear(*(x.double() for x in part)) for part in (ours, theirs)]
    expected = divergence(beta)(whole[0], whole[1].detach()) / 7
    most = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 3e-3}[dtype]
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=most)
    for mine, known in zip(gradients(loss, ours), gradients(expected, ours), strict=True):
        assert float((mine - known).abs().max() / known.abs().max()) < most
    with torch.no_grad():
        assert distance(*ours, taught, torch.tensor(7), divergence(beta)) == loss


def test_in_few_tokens_both_distributions_are_those_of_the_few() -> None:
    ours, theirs = made(5, torch.float64), made(5, torch.float64, seed=1)
    values, tokens = likeliest(*theirs, k=4, among=250)
    assert int(tokens.max()) < 250, "what pads a vocabulary is no token"
    logits = F.linear(*ours).gather(1, tokens)
    p, q = values.softmax(-1), logits.softmax(-1)
    expected = (p * (p / q).log()).sum()
    loss = distance(*ours, (values, tokens), 1, divergence(0.0))
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
    for mine, known in zip(gradients(loss, ours), gradients(expected, ours), strict=True):
        assert torch.allclose(mine, known, rtol=1e-10)


FEW: dict[str, Any] = {"gkd_logits_topk": 8}


def test_the_numbers_are_those_of_one_process(rlhf: Any) -> None:
    check(rlhf, "gkd", [{"stage": 0}, {"stage": 3}], **FEW)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [{"sft_alpha": 0.5, "beta": 0.0}, {"beta": 1.0, "padding_free": True}, LORA, {"precision": "bf16"}],
    ids=["answers besides", "without padding", "adapters", "bf16"],
)
def test_so_they_are_in_variants(rlhf: Any, more: dict[str, Any]) -> None:
    if "precision" not in more:
        check(rlhf, "gkd", [*CHECKPOINTED, {"stage": 2}], **FEW, **more)
        return
    options = [*COMMON, *ALGORITHMS["gkd"]]
    ((first, *_),) = rlhf(2, [{"stage": 3, "per_device_batch_size": 2, **FEW, **more}], *options)
    ((whole, *_),) = rlhf(2, [{"stage": 3, "per_device_batch_size": 2, **FEW}], *options)
    assert first["loss"] == pytest.approx(whole["loss"], rel=0.02)


def test_all_tokens_are_the_whole_comparison(rlhf: Any) -> None:
    shape: dict[str, Any] = {"stage": 3, "per_device_batch_size": 2, "sft_alpha": 0.3, "val_split": 0.2}
    whole, every = rlhf(2, [shape, {**shape, "gkd_logits_topk": 2048}], *COMMON, *ALGORITHMS["gkd"])
    for name in ("loss", "grad_norm", "eval_loss"):
        mine, known = ([record[name] for record in records if name in record] for records in (every, whole))
        assert mine == pytest.approx(known, rel=1e-5), name
        assert known


@pytest.mark.slow
def test_a_teacher_may_pad_its_vocabulary_otherwise(rlhf: Any, models: dict[str, Path], tmp_path: Path) -> None:
    """The rows behind the last token are nobody's; TRL refuses them where all are compared."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    larger = AutoModelForCausalLM.from_pretrained(models["other"])
    larger.resize_token_embeddings(2112, mean_resizing=False)
    larger.save_pretrained(tmp_path / "larger")
    AutoTokenizer.from_pretrained(models["other"]).save_pretrained(tmp_path / "larger")
    options, shape = [*COMMON, *ALGORITHMS["gkd"]], {"stage": 3, "per_device_batch_size": 2}
    padded = {**shape, "teacher_model": str(tmp_path / "larger"), "gkd_logits_topk": 2048}
    found, known = rlhf(2, [padded, {**shape, "gkd_logits_topk": 2048}], *options)
    assert [r["loss"] for r in found if "loss" in r] == pytest.approx([r["loss"] for r in known if "loss" in r])


@pytest.mark.slow
def test_answers_of_the_student_and_of_the_teacher_are_compared_too(rlhf: Any) -> None:
    shape = {"stage": 3, "per_device_batch_size": 2, "max_completion_length": 6, "temperature": 1e-4}
    for more in ({"lmbda": 1.0}, {"seq_kd": True}):
        whole, every = rlhf(
            2, [{**shape, **more, "gkd_logits_topk": k} for k in (None, 2048)], *COMMON, *ALGORITHMS["gkd"]
        )
        assert [r.get("loss") for r in every] == pytest.approx([r.get("loss") for r in whole], rel=1e-4)


def test_what_is_learnt_of_an_answer_is_what_sft_learns(
    rlhf: Any, commands: Any, files: dict[str, Path], models: dict[str, Path]
) -> None:
    """The line end that a template writes behind an answer is not. A teacher that is the model itself adds nothing."""
    shape = {"stage": 0, "per_device_batch_size": 12, "max_steps": 1, "sft_alpha": 1.0}
    options = [*COMMON, *ALGORITHMS["gkd"]]
    options[options.index("MODELS/other")] = "MODELS/policy"
    ((taught, *_),) = rlhf(1, [shape], *options)
    sft = ["sft", "--model", str(models["policy"]), "--dataset", str(files["chats"]), "--per-device-batch-size", "12"]
    run = commands([("sft", [*sft, "--max-steps", "1", "--precision", "fp32", "--output-dir", "OUT"])])["sft"]
    assert taught["loss"] == pytest.approx(run.records[0]["loss"], rel=1e-5)


@pytest.mark.slow
def test_a_model_that_caps_its_logits_is_refused(rlhf: Any, models: dict[str, Path], tmp_path: Path) -> None:
    from transformers import AutoTokenizer, Gemma2Config, Gemma2ForCausalLM

    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    heads = {"num_key_value_heads": 1, "head_dim": 16, "final_logit_softcapping": 5.0}
    Gemma2ForCausalLM(Gemma2Config(vocab_size=2048, **small, **heads)).save_pretrained(tmp_path / "capped")
    AutoTokenizer.from_pretrained(models["policy"]).save_pretrained(tmp_path / "capped")
    capped = {"stage": 0, "per_device_batch_size": 2, "teacher_model": str(tmp_path / "capped"), **FEW}
    with pytest.raises(RemoteError, match="--gkd-logits-topk: the logits of Gemma2ForCausalLM are not its hidden"):
        rlhf(1, [capped], *COMMON, *ALGORITHMS["gkd"])


def test_more_tokens_than_there_are_are_refused(models: dict[str, Path]) -> None:
    config = RlhfConfig(rlhf_type="gkd", model=str(models["policy"]), teacher_model="t", gkd_logits_topk=2049)
    with pytest.raises(ConfigError, match=r"--gkd-logits-topk 2049: .*policy has only 2048 tokens"):
        check_topk(config)
    with pytest.raises(ConfigError, match="--gkd-logits-topk does not apply to --rlhf-type dpo"):
        check_algorithm(RlhfConfig(rlhf_type="dpo", gkd_logits_topk=4), RlhfConfig().batch(1))


def test_in_one_token_there_is_nothing_to_compare() -> None:
    """Of one token both distributions are the same."""
    with pytest.raises(ValidationError, match="greater than or equal to 2"):
        RlhfConfig(rlhf_type="gkd", teacher_model="t", gkd_logits_topk=1)
