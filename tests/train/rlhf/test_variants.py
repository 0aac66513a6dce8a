"""Options that a variant of an algorithm would ignore, or fail on once all ranks are there, are refused by name."""

from __future__ import annotations

import importlib.util
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from pydantic import ValidationError

from shardproof.errors import ConfigError
from shardproof.train.options.config import Batch
from shardproof.train.options.rlhf_config import RlhfConfig
from shardproof.train.rlhf.algorithms import ALGORITHMS, EXTRAS, LOSSES, check_algorithm
from shardproof.train.rlhf.variants import BESIDE, FIGURES, LOSS, OF_LOSSES, WITH_DROPOUT, warn_of_dropout
from shardproof.train.watching.report import tells

GRPO: dict[str, Any] = {"rlhf_type": "grpo", "reward_funcs": ["length"], "num_generations": 2}
DPO: dict[str, Any] = {"rlhf_type": "dpo"}
ONE: dict[str, int] = {"micro": 4, "accumulation": 1, "world_size": 1}
JUDGED: dict[str, Any] = {"keep_best": True, "eval_steps": 1, "val_split": 0.5}


@pytest.mark.parametrize(
    ("given", "repair", "said"),
    [
        (DPO | {"label_smoothing": 0.1}, {"loss_type": ["robust"]}, "--label-smoothing does not apply to .* sigmoid;"),
        (DPO | {"loss_type": ["exo_pair"]}, {"label_smoothing": 1e-3}, "exo_pair needs a --label-smoothing above 0"),
        (DPO | {"loss_type": ["robust"], "label_smoothing": 0.5}, {"label_smoothing": 0.4}, "below 0.5, not 0.5"),
        (DPO | {"loss_weights": [1.0, 0.1]}, {"loss_type": ["sigmoid", "sft"]}, "has 2 weight.s. for 1 --loss-type"),
        (
            DPO | {"loss_type": ["sigmoid", "sft"], "trl_arguments": {"use_weighting": True}},
            {"loss_type": ["sigmoid"]},
            "use_weighting=True and --loss-type sft",
        ),
        (
            DPO | {"loss_type": ["hinge"], "trl_arguments": {"use_weighting": True}},
            {"loss_type": ["ipo"]},
            "loss-type hing",
        ),
        (
            DPO | {"loss_type": ["nca_pair"], "trl_arguments": {"f_divergence_type": "js_divergence"}},
            {"loss_type": ["ipo"]},
            "f_divergence_type=js_divergence and --loss-type nca_pair: it is for sigmoid, ",
        ),
        (
            DPO | {"trl_arguments": {"ref_model_mixup_alpha": 0.5}},
            {"sync_ref_steps": 2},
            "no effect without --sync-ref",
        ),
        (
            {"rlhf_type": "cpo", "loss_type": ["ipo"], "label_smoothing": 0.1},
            {"loss_type": []},
            "does not apply to .* ipo;",
        ),
        (
            {"rlhf_type": "cpo", "loss_type": ["alphapo"], "cpo_alpha": 0.5},
            {"loss_type": ["simpo"]},
            "--cpo-alpha does not apply to --loss-type alphapo",
        ),
        (GRPO | {"loss_type": ["sapo"], "delta": 2.0}, {"loss_type": []}, "--delta does not apply to --loss-type sapo"),
        (
            GRPO | {"loss_type": ["vespo"], "epsilon": 0.1},
            {"loss_type": ["grpo"]},
            "--epsilon does not apply to .* vesp",
        ),
        (
            GRPO | {"trl_arguments": {"sapo_temperature_pos": 2.0}},
            {"loss_type": ["sapo"]},
            "sapo_temperature_pos=2.0 does not apply to --loss-type dapo; it is for sapo",
        ),
        (GRPO | {"trl_arguments": {"use_bias_correction_kl": True}}, {"beta": 0.1}, "no effect without --beta above 0"),
        (
            DPO | {"trl_arguments": {"f_alpha_divergence_coef": 0.5}},
            {"trl_arguments": {"f_alpha_divergence_coef": 0.5, "f_divergence_type": "alpha_divergence"}},
            "no effect without --trl-arguments f_divergence_type=alpha_divergence",
        ),
        (
            GRPO | {"trl_arguments": {"entropy_target": 0.5}},
            {"trl_arguments": {"entropy_target": 0.5, "use_adaptive_entropy": True}},
            "no effect without --trl-arguments use_adaptive_entropy=yes",
        ),
        (
            DPO | {"trl_arguments": {"f_divergence_type": "js"}},  # TRL looks at it in the first step
            {"trl_arguments": {"f_divergence_type": "js_divergence"}},
            "f_divergence_type=js: should be reverse_kl, forward_kl, js_divergence or alpha_divergence",
        ),
        (
            GRPO | {"trl_arguments": {"multi_objective_aggregation": "sum"}},
            {"trl_arguments": {"multi_objective_aggregation": "normalize_then_sum"}},
            "should be sum_then_normalize or normalize_then_sum",
        ),
        (DPO | {"beta": 0.0}, {"beta": 0.1}, "--beta 0: the loss of dpo .* nothing is learned"),
        ({"rlhf_type": "kto", "beta": 0.0}, {"beta": None}, "--beta 0: the loss of kto"),
        (
            {"rlhf_type": "gkd", "teacher_model": "t", "beta": 5.0},
            {"beta": 1.0},
            "--beta 5: in gkd it must be between 0, .* and 1",
        ),
        ({"rlhf_type": "cpo", "cpo_alpha": 0.0, "beta": 0.0}, {"beta": 0.1}, "--beta 0: the loss of cpo"),
        (
            GRPO | {"trl_arguments": {"top_entropy_quantile": 20}},  # TRL would take all tokens
            {"trl_arguments": {"top_entropy_quantile": 0.2}},
            "top_entropy_quantile=20: should be from 0 to 1",
        ),
        (
            DPO | {"trl_arguments": {"ld_alpha": -0.5}},
            {"trl_arguments": {"ld_alpha": 1}},
            "=-0.5: should be from 0 to 1",
        ),
        (GRPO | {"reward_weights": [0.0]}, {"reward_weights": [0.5]}, "--reward-weights are all 0, so nothing"),
        (
            DPO | {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.0, 0.0]},
            {"loss_weights": [0.0, 1.0]},
            "--loss-weights are all 0, so nothing",
        ),
        ({"rlhf_type": "simpo", "cpo_alpha": 1.0, "beta": 0.0}, {"beta": None}, "--beta 0: the loss of simpo"),
        (
            {"rlhf_type": "cpo", "loss_type": ["alphapo"], "beta": 0.0},
            {"beta": 0.1},
            "--beta 0: .* or divides by --beta",
        ),
        ({"rlhf_type": "orpo", "frozen_stage": 0}, {"rlhf_type": "dpo"}, "--frozen-stage does not apply to .* orpo"),
        (GRPO | {"model_stages": {"ref_model": 0}}, {"beta": 0.1}, "has a reference only with --beta above 0"),
        (
            GRPO | {"rlhf_type": "rloo", "beta": 0.0, "model_stages": {"ref_model": 0}},
            {"beta": None},  # TRL's, which is not 0
            "rloo has a reference only with --beta above 0",
        ),
        (
            {"rlhf_type": "gkd", "teacher_model": "t", "keep_best": True, "best_metric": "reward"},
            {"best_metric": "eval_loss"},
            "--best-metric reward: evaluations of gkd have no such metric. They have loss",
        ),
        (
            DPO | JUDGED | {"best_metric": "rewards/accuracy"},
            {"best_metric": "rewards/accuracies"},
            "evaluations of dpo have no such metric. Did you mean rewards/accuracies?",
        ),
        (
            GRPO | JUDGED | {"best_metric": "rewards/lenght/mean"},
            {"best_metric": "rewards/length/mean"},
            "Did you mean rewards/length/mean?",
        ),
        (
            GRPO | JUDGED | {"best_metric": "own"},
            {"reward_funcs": ["own.py:brevity"]},  # which may log it
            "evaluations of grpo have no such metric. They have loss, reward, reward_std",
        ),
    ],
)
def test_what_would_do_nothing_or_fail_late(given: dict[str, Any], repair: dict[str, Any], said: str) -> None:
    config = RlhfConfig(**given)
    with pytest.raises(ConfigError, match=said):
        check_algorithm(config, config.batch(1))
    repaired = RlhfConfig(**given | repair)
    check_algorithm(repaired, repaired.batch(1))


@pytest.mark.parametrize(
    "given",
    [
        DPO | {"loss_type": ["sigmoid", "sft"], "beta": 0.0},  # the second one learns
        {"rlhf_type": "orpo", "beta": 0.0},  # learns the better answers
        DPO | {"loss_type": ["nca_pair"]},  # without a divergence of its own
        DPO | {"keep_best": True, "val_dataset": ["v"], "best_metric": "rewards/margins"},
    ],
)
def test_what_others_are_refused_for_is_taken_where_it_means_something(given: dict[str, Any]) -> None:
    config = RlhfConfig(**given)
    check_algorithm(config, config.batch(1))


def test_what_is_named_here_is_known_there() -> None:
    for kind, options in OF_LOSSES.items():
        assert LOSS[kind] in LOSSES[kind]
        for name, losses in options.items():
            assert {*losses} <= {*LOSSES[kind]}
            assert name in RlhfConfig.model_fields or name in EXTRAS[kind]
    assert {*BESIDE} <= {name for known in EXTRAS.values() for name in known}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (DPO, True),
        (DPO | {"trl_arguments": {"disable_dropout": False}}, False),
        (DPO | {"tuner": "full"}, False),
        (DPO | {"lora_dropout": 0.0}, False),
        (GRPO, False),
        (GRPO | {"trl_arguments": {"disable_dropout": True}}, True),
    ],
)
def test_dropout_that_trl_turns_off_is_told(
    caplog: pytest.LogCaptureFixture, given: dict[str, Any], told: bool
) -> None:
    warn_of_dropout(RlhfConfig(**{"tuner": "lora", "lora_dropout": 0.1} | given))
    assert ("--lora-dropout 0.1 has no effect" in caplog.text) is told


def dropout_of_trl() -> set[str]:
    """The algorithms in which TRL leaves it on."""
    import dataclasses

    fields = {kind: dataclasses.fields(known.classes()[1]) for kind, known in ALGORITHMS.items()}
    return {kind for kind, of in fields.items() if not next(f.default for f in of if f.name == "disable_dropout")}


@pytest.mark.slow
def test_trl_leaves_dropout_on_in_those(run: Any) -> None:
    assert run(1, dropout_of_trl)[0] == {*WITH_DROPOUT}


@pytest.mark.parametrize("kind", sorted(FIGURES))
def test_what_trl_logs_may_be_what_an_evaluation_is_judged_by(kind: str) -> None:
    trainer = "GRPOTrainer" if kind == "grpo" else ALGORITHMS[kind].trainer.partition(":")[2]  # ours is made of it
    (folder,) = importlib.util.find_spec("trl").submodule_search_locations  # type: ignore[union-attr,misc]
    found = [file for file in Path(folder).rglob("*_trainer.py") if f"class {trainer}(" in file.read_text()]
    assert found or kind == "ppo", "which is ours"
    written = r'(?:_metrics\[\w+\]|\bmetrics)\[f?"(?:\{prefix\})?([^"{]+)"\]'
    logged = {name for file in found for name in re.findall(written, file.read_text())}
    assert {name.removeprefix("eval_") for name in logged if tells(name)} <= {*FIGURES[kind]}
    assert len(logged) > 4 or kind in ("gkd", "ppo")


def losses_of_trl() -> dict[str, Any]:
    import dataclasses

    found = {}
    for kind in LOSS:
        (field,) = (field for field in dataclasses.fields(ALGORITHMS[kind].classes()[1]) if field.name == "loss_type")
        default = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore
        found[kind] = default[0] if isinstance(default, list) else default
    return found


@pytest.mark.slow
def test_trl_s_default_losses_are_those(run: Any) -> None:
    assert run(1, losses_of_trl)[0] == LOSS


@pytest.mark.parametrize("name", ["reward_weights", "loss_weights"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_are_finite(name: str, value: float) -> None:
    """TRL adds up what is a number of weighted rewards: with such a weight all were worth 0, and nothing was learnt."""
    with pytest.raises(ValidationError, match="must be a finite number"):
        RlhfConfig(**{name: [1.0, value]})


@pytest.mark.parametrize(
    ("generations", "more"),
    [(4, {}), (8, {}), (8, {"num_iterations": 2}), (16, {"steps_per_generation": 2}), (4, {"num_iterations": 3})],
)
def test_an_epoch_has_answers_to_every_row(generations: int, more: dict[str, int]) -> None:
    """Where a step learns from a part of the answers to a row, a run ended when half of the rows had been asked."""
    from trl.trainer.utils import RepeatSampler

    from shardproof.train.rlhf.recipe import RlhfPrepared

    config, batch = RlhfConfig(**GRPO | more | {"num_generations": generations}), Batch(**ONE | {"micro": 8})
    prepared = RlhfPrepared(config, batch, Path(), "", None, range(16), None, [])
    at_once = batch.micro * (config.steps_per_generation or 1)
    often = config.num_iterations * (config.steps_per_generation or 1)
    theirs = RepeatSampler(range(16), generations, at_once // generations, often)
    assert prepared.steps == len(theirs) // at_once


@pytest.mark.parametrize("iterations", [1, 2])
def test_the_same_other_questions_are_asked_on_any_number_of_ranks(iterations: int) -> None:
    """In each step: of several micro-batches, of which ranks have more or fewer, others were asked behind the first."""
    from shardproof.train.rlhf.generating import Generating

    def asked(ranks: int, step: int) -> list[Any]:
        micro_batches = 4 // ranks  # of 2 answers each
        args = SimpleNamespace(seed=1, steps_per_generation=micro_batches)
        found = []
        for rank in range(ranks):
            where = SimpleNamespace(process_index=rank)
            of = {"train_dataset": range(9), "num_generations": 2, "resamples": 2, "_step": step * micro_batches}
            found.append(list(Generating._more(SimpleNamespace(args=args, accelerator=where, **of), 2 * micro_batches)))
        return [[row for of_rank in batches for row in of_rank] for batches in zip(*found, strict=True)]

    for step in (0, iterations, 2 * iterations):
        assert asked(1, step) == asked(2, step) == asked(4, step)
    assert asked(1, 0) != asked(1, iterations)


def test_a_value_model_decays_as_the_policy_does() -> None:
    """It did by 0.01, AdamW's own, whatever --weight-decay said, and in its norms and biases, too."""
    import torch
    from trl import GRPOTrainer

    from shardproof.train.rlhf.ppo import PpoTrainer

    trainer = PpoTrainer.__new__(PpoTrainer)
    trainer.args = SimpleNamespace(weight_decay=0.0)
    trainer.value_model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    for weight_decay in (0.0, 0.5):
        trainer.args.weight_decay = weight_decay
        policy = torch.optim.AdamW([{"params": [torch.nn.Parameter(torch.ones(1))], "weight_decay": weight_decay}])
        with mock.patch.object(GRPOTrainer, "create_optimizer", lambda self, made=policy: made):
            groups = trainer.create_optimizer().param_groups
        of_value = {id(p): group["weight_decay"] for group in groups[1:] for p in group["params"]}
        assert [of_value[id(p)] for p in trainer.value_model.parameters()] == [weight_decay, 0.0, 0.0, 0.0]
