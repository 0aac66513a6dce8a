"""Every algorithm gives the losses of one process, at every stage, on two ranks, with either kind of checkpointing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from shardproof.errors import ConfigError
from train.rlhf.algorithms import batches_without_padding, bytes_in_attention, series_of, series_without_room

COMMON = "--model MODELS/policy --max-steps 3 --learning-rate 1e-3 --lr-scheduler constant --warmup-ratio 0".split()
CHANCE = f"{Path(__file__).with_name('rewards_for_tests.py')}:chance"

PAIRS = ["--dataset", "FILES/pairs.jsonl"]
# algorithms.py sees to it that another number of ranks draws the same answers.
GENERATED = ["--dataset", "FILES/prompts.jsonl", "--num-generations", "2"]
GENERATED += ["--max-completion-length", "8", "--temperature", "4"]  # an untrained model repeats one token
ALGORITHMS: dict[str, list[str]] = {
    "dpo": [*PAIRS, "--rlhf-type", "dpo"],
    "kto": ["--dataset", "FILES/judged.jsonl", "--rlhf-type", "kto"],
    "orpo": [*PAIRS, "--rlhf-type", "orpo"],
    "simpo": [*PAIRS, "--rlhf-type", "simpo"],
    "cpo": [*PAIRS, "--rlhf-type", "cpo"],
    "rm": [*PAIRS, "--rlhf-type", "rm"],
    "grpo": [*GENERATED, "--rlhf-type", "grpo", "--beta", "0.1", "--reward-funcs", CHANCE],
    "rloo": [*GENERATED, "--rlhf-type", "rloo", "--beta", "0.1", "--reward-funcs", CHANCE],
    "ppo": [*GENERATED, "--rlhf-type", "ppo", "--beta", "0.1", "--reward-funcs", CHANCE],
    "gkd": ["--dataset", "FILES/chats.jsonl", "--rlhf-type", "gkd", "--teacher-model", "MODELS/other", "--lmbda", "0"],
}
# KTO's estimate is of a micro-batch of all ranks; of the others a micro-batch is the same with any number of ranks.
TOGETHER = ("kto",)

STAGES = [{"stage": stage} for stage in range(4)]
CHECKPOINTED = [
    {"stage": 3, "gradient_checkpointing": True},
    {"stage": 3, "gradient_checkpointing": True, "checkpointing_reentrant": True},
]
PARTLY = [{"stage": 3, "gradient_checkpointing": how} for how in ("selective", 2)]
LORA = {"tuner": "lora", "lora_rank": 4}


def check(
    rlhf: Any,
    kind: str,
    variants: list[dict[str, Any]],
    ranks: int = 2,
    micro: int = 2,
    words: Sequence[str] = (),
    **more: Any,
) -> list[dict[str, Any]]:
    """Returns the records of one process."""
    options = [*COMMON, *ALGORITHMS[kind], *words]
    one = {"stage": 0, "per_device_batch_size": 2, "gradient_accumulation_steps": ranks * micro // 2, **more}
    if kind in TOGETHER:
        one |= {"per_device_batch_size": ranks * micro, "gradient_accumulation_steps": 1}
    (expected,) = rlhf(1, [one], *options)
    many = [{"per_device_batch_size": micro, **variant, **more} for variant in variants]
    for variant, got in zip(many, rlhf(ranks, many, *options), strict=True):
        for mine, one_s in zip(got, expected, strict=True):
            assert mine["answers"] == one_s["answers"], f"{variant}: other answers were drawn"
        for key in ("loss", "grad_norm", "rewards/margins", "reward"):
            if key in expected[0]:
                near = {"abs": 1e-5} if key != "grad_norm" else {"rel": 2e-4, "abs": 1e-6}
                mine, one_s = ([r[key] for r in records if key in r] for records in (got, expected))
                assert mine == pytest.approx(one_s, **near), f"{key}: {variant}"
    assert len(expected) == 3
    # RLOO's and GRPO's losses are near 0 by construction; their gradients are not.
    assert all(record["grad_norm"] > 1e-3 for record in expected), expected
    return expected


# The most used; the others run with --slow.
FEW = ("dpo", "grpo")


@pytest.mark.parametrize(
    "kind", [kind if kind in FEW else pytest.param(kind, marks=pytest.mark.slow) for kind in ALGORITHMS]
)
def test_stages_give_the_losses_of_one_process(rlhf: Any, kind: str) -> None:
    """Stage 3 under reentrant checkpointing."""
    expected = check(rlhf, kind, CHECKPOINTED[1:])
    if kind == "grpo":  # before the first step the reference is the model, at any temperature
        assert expected[0]["kl"] == pytest.approx(0, abs=1e-7)


ALL = [kind if kind == "grpo" else pytest.param(kind, marks=pytest.mark.slow) for kind in ALGORITHMS]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL)
def test_so_they_do_without_padding(rlhf: Any, kind: str) -> None:
    """One process computes padding, two do not."""
    free = {"padding_free": True}
    check(rlhf, kind, [{"stage": 3, **free}, {**CHECKPOINTED[1], **free}])
    few = [{"stage": 3, "per_device_batch_size": 2, **free}]
    assert rlhf(2, few, *COMMON, *ALGORITHMS[kind], find=batches_without_padding) > 1


@pytest.mark.parametrize("kind", ["dpo", pytest.param("grpo", marks=pytest.mark.slow)])
def test_so_they_do_with_adapters(rlhf: Any, kind: str) -> None:
    """The reference is the policy with its adapters off: no second model is held."""
    check(rlhf, kind, [{"stage": 3}, CHECKPOINTED[1]], **LORA)


OTHERS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("grpo", "kto", "rloo", "ppo", "cpo", "gkd")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", *OTHERS])
def test_so_they_do_with_adapters_that_are_trained_on(rlhf: Any, adapters: None, kind: str) -> None:
    """TRL's reference is a copy of them, so that the first loss is that of a model beside itself."""
    on = ["--adapters", "MODELS/adapters"]
    (first, *_) = check(rlhf, kind, [{"stage": 3}, CHECKPOINTED[1]], words=on)
    if kind == "dpo":
        assert first["loss"] == pytest.approx(math.log(2), abs=1e-5)
        assert first["rewards/margins"] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize(
    "reference",
    ["MODELS/more-adapters", *(pytest.param(name, marks=pytest.mark.slow) for name in ("none", "the same"))],
)
def test_the_reference_of_adapters_is_the_one_that_is_named(rlhf: Any, adapters: None, reference: str) -> None:
    named = "MODELS/adapters" if reference == "the same" else reference
    on = ["--adapters", "MODELS/adapters", "--ref-adapters", named]
    (first, *_) = check(rlhf, "dpo", [{"stage": 2 if reference == "the same" else 3}], words=on)
    if reference == "the same":
        assert first["loss"] == pytest.approx(math.log(2), abs=1e-5)
    else:
        assert abs(first["rewards/margins"]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", "grpo", "rm"])
@pytest.mark.parametrize("beside", [{"dora": True}, {"rslora": True, "modules_to_save": ["embed_tokens"]}])
def test_so_they_do_with_more_than_adapters(rlhf: Any, kind: str, beside: dict[str, Any]) -> None:
    check(rlhf, kind, [{"stage": 3}, CHECKPOINTED[1]], **LORA, **beside)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["dpo", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("grpo", "rm", "kto"))]
)
def test_so_they_do_with_adapters_that_begin_as_a_part_of_the_weights(rlhf: Any, kind: str) -> None:
    """The weights without them are another model: TRL's reference has a copy of what they begin with."""
    (first, *_) = check(rlhf, kind, [{"stage": 3}], **LORA, init_lora_weights="pissa")
    if kind == "dpo":
        assert first["loss"] == pytest.approx(math.log(2), abs=1e-5)
        assert first["rewards/margins"] == pytest.approx(0, abs=1e-5)
    if kind == "grpo":
        assert first["kl"] == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", "grpo", "rm"])
def test_so_they_do_on_a_base_in_four_bits(bitsandbytes: None, rlhf: Any, kind: str) -> None:
    check(rlhf, kind, [{"stage": 3}, CHECKPOINTED[1]], **LORA, quantize="nf4")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grpo", "rloo", "ppo"])
def test_so_they_do_where_positions_are_learnt(rlhf: Any, learnt_positions: Path, kind: str) -> None:
    """How much padding a prompt has depends on what lies beside it, which is another prompt on another rank."""
    check(rlhf, kind, [STAGES[0], STAGES[3]], model=str(learnt_positions))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALGORITHMS)
def test_so_they_do_on_four_ranks(rlhf: Any, kind: str) -> None:
    check(rlhf, kind, [STAGES[3], CHECKPOINTED[1]], ranks=4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALGORITHMS)
def test_every_stage_and_checkpointing(rlhf: Any, kind: str) -> None:
    check(rlhf, kind, [*STAGES, *CHECKPOINTED, *PARTLY])
    if kind != "ppo":
        check(rlhf, kind, [*STAGES[1:], *CHECKPOINTED], **LORA)


MODELS = {
    "ppo": {"model_stages": {"ref_model": 0, "value_model": 1}},
    "grpo": {"model_stages": {"ref_model": 1}, "model_precisions": {"ref_model": "fp32"}, "frozen_stage": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_so_they_do_with_each_model_at_a_stage_of_its_own(rlhf: Any, kind: str) -> None:
    check(rlhf, kind, [{"stage": 3, **MODELS[kind]}, {"stage": 0, "model_stages": {"ref_model": 3}}])


EXTRAS = {
    "dpo": {"trl_arguments": {"ld_alpha": 0.5, "f_divergence_type": "js_divergence"}},
    # At a ratio of 1, that of the first look at an answer, the temperature means nothing.
    "grpo": {"trl_arguments": {"sapo_temperature_pos": 3.0}, "loss_type": ["sapo"], "num_iterations": 2},
    "rloo": {"trl_arguments": {"normalize_advantages": True}},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", EXTRAS)
def test_so_they_do_in_variants_of_trl(rlhf: Any, kind: str) -> None:
    """Of those that look at a token or an answer; shares of a micro-batch are others elsewhere."""
    check(rlhf, kind, [CHECKPOINTED[1]], **EXTRAS[kind])
    without = {**EXTRAS[kind], "trl_arguments": {}}
    plain, other = rlhf(1, [{"stage": 0, **without}, {"stage": 0, **EXTRAS[kind]}], *COMMON, *ALGORITHMS[kind])
    assert [r["grad_norm"] for r in plain] != [r["grad_norm"] for r in other]


def fields_of(kind: str) -> set[str]:
    import dataclasses

    from shardproof.train.rlhf.algorithms import ALGORITHMS

    return {field.name for field in dataclasses.fields(ALGORITHMS[kind].classes()[1])}


@pytest.mark.slow
def test_what_may_be_set_of_trl_is_there(run: Any) -> None:
    from shardproof.train.rlhf.algorithms import EXTRAS

    for kind, names in EXTRAS.items():
        assert {*names} <= run(1, fields_of, kind)[0], kind


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"top_entropy_quantil": 0.2}, "Did you mean top_entropy_quantile?"),
        ({"beta": 0.2}, "use the option --beta"),
        ({"model_init_kwargs": "x"}, "no such argument here"),
        ({"entropy_coef": "x"}, "should be a number"),
        ({"use_adaptive_entropy": 1}, "should be yes or no"),
    ],
)
def test_what_trl_does_not_have_is_refused(given: dict[str, Any], text: str) -> None:
    from shardproof.errors import ConfigError
    from shardproof.train.options.rlhf_config import RlhfConfig
    from shardproof.train.rlhf.algorithms import check_algorithm

    config = RlhfConfig(rlhf_type="grpo", reward_funcs=["length"], trl_arguments=given, num_generations=2)
    with pytest.raises(ConfigError, match=text):
        check_algorithm(config, config.batch(1))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [("gkd", "teacher_model"), ("grpo", "ref_model")])
def test_so_they_do_where_one_model_lies_on_a_disk(rlhf: Any, kind: str, name: str, tmp_path: Path) -> None:
    """And the other does not."""
    check(rlhf, kind, [{"stage": 3, "model_offloads": {name: f"nvme:{tmp_path}"}}])
    lies = {"stage": 3, "offload": f"nvme:{tmp_path}", "per_device_batch_size": 2, "model_offloads": {name: "none"}}
    assert rlhf(2, [lies], *COMMON, *ALGORITHMS[kind], find=homes) == {"trained": True, name: False}
    lies |= {"offload": None, "model_offloads": {name: f"nvme:{tmp_path}"}}
    assert rlhf(2, [lies], *COMMON, *ALGORITHMS[kind], find=homes) == {"trained": False, name: True}


def homes(prepared: list[Any]) -> dict[str, bool]:
    """Train on this rank; which of the models have lain elsewhere."""
    from shardproof.train.trainer import CommandMixin

    found, train = {}, CommandMixin.train

    def note(self: Any, *args: Any, **kwargs: Any) -> Any:
        done = train(self, *args, **kwargs)
        for name in ("model", "teacher_model", "ref_model"):
            if (model := getattr(self, name, None)) is not None:
                found["trained" if name == "model" else name] = model.__dict__["_shardproof"].home is not None
        return done

    with mock.patch.object(CommandMixin, "train", note):
        series_of(prepared)
    return found


@pytest.mark.slow
def test_a_reference_that_follows_what_generates(rlhf: Any) -> None:
    """Where it is all of the model after each step, answers are as probable to both when they are written."""
    follows = {"sync_ref_steps": 1, "trl_arguments": {"ref_model_mixup_alpha": 1.0}}
    options = [*COMMON, *ALGORITHMS["grpo"]]
    stays, *others = rlhf(2, [{"stage": 3}, {"stage": 3, **follows}, {"stage": 0, **follows}], *options)
    assert stays[-1]["kl"] > 1e-5
    for records in others:
        assert [record["kl"] for record in records] == pytest.approx([0.0] * 3, abs=1e-7)


@pytest.mark.slow
def test_micro_batches_of_written_answers_have_one_mean(rlhf: Any, files: dict[str, Path], tmp_path: Path) -> None:
    """Of a teacher's most probable tokens: micro-batches that are alike have the loss of one of them."""
    (tmp_path / "same.jsonl").write_text(files["chats"].read_text().splitlines(keepends=True)[0] * 8)
    written = (
        "--rlhf-type gkd --teacher-model MODELS/other --seq-kd --lmbda 0 --max-completion-length 6 --temperature 1e-4"
    )
    options = [*COMMON, *written.split(), "--dataset", str(tmp_path / "same.jsonl")]
    shape = {"max_steps": 1, "per_device_batch_size": 2, "stage": 0}
    ((one,), (three,)) = rlhf(1, [{**shape, "gradient_accumulation_steps": n} for n in (1, 3)], *options)
    for key in ("loss", "grad_norm"):
        assert three[key] == pytest.approx(one[key], rel=1e-4)


@pytest.mark.slow
def test_what_a_teacher_is_asked_of_may_be_learnt_besides(rlhf: Any) -> None:
    """As in sft, and nothing of what the student has written."""
    check(rlhf, "gkd", [{"stage": 3}, CHECKPOINTED[1]], sft_alpha=0.5)
    of_student = {"lmbda": 0.9999, "max_completion_length": 6}
    ways = [{"sft_alpha": alpha, **more} for more in ({}, of_student) for alpha in (0.0, 0.5, 1.0)]
    shape = {"max_steps": 1, "stage": 0, "per_device_batch_size": 12}
    found = rlhf(1, [{**shape, **way} for way in ways], *COMMON, *ALGORITHMS["gkd"])
    without, half, whole, *own = (records[0]["loss"] for records in found)
    assert whole - without == pytest.approx(2 * (half - without), rel=1e-4)
    assert whole - without == pytest.approx(math.log(1024), rel=0.1), "an untrained model knows no token"
    assert own == [own[0]] * 3


SHARED = {"sequence_parallel": 2, "gradient_accumulation_steps": 2}  # two ranks have the rows of one
OFFLINE = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("kto", "orpo", "simpo", "cpo", "rm", "gkd")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", *OFFLINE])
def test_so_they_do_where_ranks_share_rows(rlhf: Any, kind: str) -> None:
    shared = {**SHARED, "per_device_batch_size": 4, "gradient_accumulation_steps": 1} if kind in TOGETHER else SHARED
    check(rlhf, kind, [{"stage": 3, **shared}, {**CHECKPOINTED[1], **shared}])
    per_rank = [{"stage": 3, "max_steps": 1, **shared}]
    assert rlhf(2, per_rank, *COMMON[:2], *ALGORITHMS[kind], find=bytes_in_attention) > 0


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, LORA], ids=["full", "lora"])
def test_so_does_a_student_of_the_likeliest_tokens(rlhf: Any, more: dict[str, Any]) -> None:
    check(rlhf, "gkd", [{"stage": 3, **SHARED}, {"stage": 1, **SHARED}], gkd_logits_topk=16, sft_alpha=0.5, **more)


WRITTEN: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {}),
    "rloo": ("rloo", {}),
    "grpo without a count of tokens": ("grpo", {"loss_type": ["grpo"], "dynamic_sample": True}),
    "grpo with answers that are learnt from again": ("grpo", {"num_iterations": 2, "steps_per_generation": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", WRITTEN)
def test_so_they_do_where_ranks_share_answers_that_each_has_written_a_part_of(rlhf: Any, what: str) -> None:
    kind, more = WRITTEN[what]
    check(rlhf, kind, [{"stage": 3, **SHARED}, {**CHECKPOINTED[1], **SHARED}], **more)
    per_rank = [{"stage": 3, "max_steps": 1, **SHARED}]
    assert rlhf(2, per_rank, *COMMON[:2], *ALGORITHMS[kind], find=bytes_in_attention) > 0


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, LORA], ids=["full", "lora"])
def test_so_do_groups_of_ranks_that_share_answers(rlhf: Any, more: dict[str, Any]) -> None:
    """Where there is no room to keep weights, too: a rank whose answers ended early lends its part to the others."""
    given = [{"stage": 3, **SHARED}, {"stage": 1, **SHARED}]
    check(rlhf, "grpo", given, ranks=4, **more)
    options = [*COMMON, *ALGORITHMS["grpo"]]
    kept, gathered = (rlhf(4, given[:1], *options, find=find) for find in (series_of, series_without_room))
    assert [r["loss"] for r in gathered[0]] == pytest.approx([r["loss"] for r in kept[0]], abs=1e-6)


@pytest.mark.slow
def test_experts_are_balanced_over_whole_rows(rlhf: Any, experts: Path) -> None:
    at_once = {"per_device_batch_size": 4, "gradient_accumulation_steps": 1}  # chance deals answers out
    for kind, more in (("dpo", {}), ("grpo", at_once)):
        more = {**more, "router_aux_loss_coef": 0.5}
        (*_, last) = check(rlhf, kind, [{"stage": 3, **SHARED}], model=str(experts), **more)
        assert last["aux_loss"] > 0.1


@pytest.mark.parametrize("kind", ["dpo", "kto", "grpo"])
def test_experts_are_not_balanced_inside_of_reentrant_checkpointing(rlhf: Any, experts: Path, kind: str) -> None:
    again = {"max_steps": 1, "gradient_checkpointing": True, "model": str(experts)}
    balanced = {**again, "router_aux_loss_coef": 0.5}
    with pytest.raises(ConfigError, match=f"the loss of {kind} has a load-balancing term for the experts"):
        rlhf(1, [{**balanced, "checkpointing_reentrant": True}], *COMMON, *ALGORITHMS[kind])
    assert rlhf(1, [balanced, {**again, "checkpointing_reentrant": True}], *COMMON, *ALGORITHMS[kind])


@pytest.mark.parametrize("kind", ["dpo", pytest.param("kto", marks=pytest.mark.slow), "grpo"])
def test_experts_are_balanced_only_where_it_is_asked_for(rlhf: Any, experts: Path, kind: str) -> None:
    """The config of this model says 0.5, by which TRL would go without a word."""
    one = {"max_steps": 1, "model": str(experts)}
    ((plain, *_), (asked, *_)) = rlhf(1, [one, {**one, "router_aux_loss_coef": 0.25}], *COMMON, *ALGORITHMS[kind])
    assert "aux_loss" not in plain
    assert asked["loss"] == pytest.approx(plain["loss"] + 0.25 * asked["aux_loss"], abs=1e-5)


@pytest.mark.parametrize("kind", ["dpo", "ppo"])
def test_experts_whose_number_trl_does_not_find_are_refused(rlhf: Any, tmp_path: Path, kind: str) -> None:
    from safetensors.torch import save_file
    from transformers import Llama4TextConfig

    Llama4TextConfig().save_pretrained(tmp_path)
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(
        ConfigError,
        match=r"--router-aux-loss-coef: TRL has no .* of this kind \(llama4_text\)",
    ):
        rlhf(1, [{"model": str(tmp_path), "router_aux_loss_coef": 0.1}], *COMMON, *ALGORITHMS[kind])


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, LORA], ids=["full", "lora"])
def test_so_do_groups_of_ranks_that_share_rows(rlhf: Any, more: dict[str, Any]) -> None:
    check(rlhf, "dpo", [{"stage": 3, **SHARED}, {"stage": 2, **SHARED}], ranks=4, **more)
