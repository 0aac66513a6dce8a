"""Which TRL trainer runs an algorithm, and our options in that trainer's terms. Imports nothing heavy."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import Any

from shardproof.data.forms.formats import SUPERVISED, Form
from shardproof.data.forms.preferences import JUDGED, PAIRS, PROMPTS
from shardproof.errors import ConfigError, did_you_mean
from shardproof.train.options.config import Batch
from shardproof.train.options.option import flag
from shardproof.train.options.rlhf_config import CHORD, FIPO, PAIRED, REFERRED, REWARDED, SAME, RlhfConfig
from shardproof.train.rlhf.others import check_others
from shardproof.train.rlhf.teachers import check_served
from shardproof.train.rlhf.variants import check_variant, refers
from shardproof.train.rlhf.vllm import COLOCATED, SERVED, check_vllm, vllm_arguments


@dataclass(frozen=True)
class Algorithm:
    """One value of --rlhf-type.

    Attributes:
        trainer: module and class, TRL's or ours.
        arguments: module and class of its configuration.
        form: the format of its rows.
        needs: options that it requires (one from each tuple).
        cuts: the ends at which its trainer truncates rows that are too long (values of --truncation).
    """

    trainer: str
    arguments: str
    form: Form
    needs: tuple[tuple[str, ...], ...] = ()
    cuts: tuple[str, ...] = ()

    @property
    def experimental(self) -> bool:
        """Whether TRL makes no promises about the trainer."""
        return ".experimental." in self.arguments

    def classes(self) -> tuple[Any, Any]:
        """Trainer and configuration."""
        return _found(self.trainer), _found(self.arguments)


_REWARD = (("reward_funcs", "reward_model"),)
_END = ("right",)

ALGORITHMS = {
    "dpo": Algorithm("trl:DPOTrainer", "trl:DPOConfig", PAIRS, cuts=("right", "left")),
    "kto": Algorithm("trl:KTOTrainer", "trl:KTOConfig", JUDGED, cuts=_END),
    "orpo": Algorithm("trl.experimental.orpo:ORPOTrainer", "trl.experimental.orpo:ORPOConfig", PAIRS, cuts=_END),
    "simpo": Algorithm("trl.experimental.cpo:CPOTrainer", "trl.experimental.cpo:CPOConfig", PAIRS, cuts=_END),
    "cpo": Algorithm("trl.experimental.cpo:CPOTrainer", "trl.experimental.cpo:CPOConfig", PAIRS, cuts=_END),
    "rm": Algorithm("trl:RewardTrainer", "trl:RewardConfig", PAIRS),
    "grpo": Algorithm(
        "shardproof.train.rlhf.advantages:GrpoTrainer",
        "shardproof.train.rlhf.advantages:GrpoConfig",
        PROMPTS,
        ((*_REWARD[0], "environments", "teacher_model", "teacher_model_server"),),
    ),
    "rloo": Algorithm("trl:RLOOTrainer", "trl:RLOOConfig", PROMPTS, _REWARD),
    "gkd": Algorithm(
        "trl.experimental.gkd:GKDTrainer",
        "trl.experimental.gkd:GKDConfig",
        SUPERVISED,
        (("teacher_model", "teacher_model_server"),),
        ("left",),
    ),
    "ppo": Algorithm("shardproof.train.rlhf.ppo:PpoTrainer", "shardproof.train.rlhf.ppo:PpoConfig", PROMPTS, _REWARD),
}

BALANCED = ("dpo", "kto", *REWARDED)  # their trainers can balance the experts of a mixture

# The algorithms that an option applies to; the others refuse it.
MEANT_FOR: dict[str, tuple[str, ...]] = {
    "group_by_length": PAIRED,
    "drop_last": (*PAIRED, "kto", "gkd"),  # algorithms that generate drop these rows anyway
    "sequence_parallel": (*PAIRED, "kto", "grpo", "rloo", "gkd"),
    "compile": (*PAIRED, "kto"),  # generation changes the length with every token
    "beta": ("dpo", "kto", "orpo", "simpo", "cpo", "grpo", "rloo", "gkd", "ppo"),
    "loss_type": ("dpo", "kto", "cpo", "grpo"),
    "loss_weights": ("dpo",),
    "label_smoothing": ("dpo", "simpo", "cpo"),
    "router_aux_loss_coef": BALANCED,
    "simpo_gamma": ("simpo",),
    "cpo_alpha": ("cpo", "simpo"),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
    "ref_model": ("dpo", "kto"),
    "ref_adapters": REFERRED,
    **dict.fromkeys(("frozen_stage", "frozen_precision"), (*REFERRED, "gkd")),
    "precompute_ref": ("dpo", "kto"),
    "sync_ref_steps": ("dpo", "kto", "grpo", "rloo"),
    **dict.fromkeys(("teacher_model", "teacher_model_server"), ("gkd", "grpo")),
    "teacher_kl_coef": ("grpo",),
    "lmbda": ("gkd",),
    **dict.fromkeys(("seq_kd", "sft_alpha", "gkd_logits_topk"), ("gkd",)),
    "reward_model": REWARDED,
    "reward_funcs": REWARDED,
    "reward_weights": REWARDED,
    "num_generations": REWARDED,
    "num_iterations": REWARDED,
    "steps_per_generation": REWARDED,
    "epsilon": REWARDED,
    "epsilon_high": REWARDED,
    "mask_truncated_completions": REWARDED,
    **dict.fromkeys(("max_completion_length", "stop_words"), (*REWARDED, "gkd")),
    "temperature": (*REWARDED, "gkd"),
    "top_p": REWARDED,
    "top_k": REWARDED,
    "repetition_penalty": REWARDED,
    **dict.fromkeys(("advantage_estimator", "scale_rewards", "kl_in_reward"), ("grpo",)),
    "delta": ("grpo",),
    **dict.fromkeys((*CHORD, *FIPO), ("grpo",)),
    **dict.fromkeys(("dynamic_sample", "max_resample_times"), ("grpo", "rloo")),
    **dict.fromkeys(("tools", "environments", "max_tool_calling_iterations"), ("grpo",)),
    "importance_sampling_level": ("grpo",),
    **dict.fromkeys(("use_vllm", "vllm_mode", *SERVED, *COLOCATED), ("grpo", "rloo", "gkd")),
    "value_model": ("ppo",),
    "gamma": ("ppo",),
    "gae_lambda": ("ppo",),
    "value_weight": ("ppo",),
    "value_clip": ("ppo",),
}


# The models that take part besides the one that is trained, under the names of their options.
OTHERS: dict[str, tuple[str, ...]] = {
    "dpo": ("ref_model",),
    "kto": ("ref_model",),
    "grpo": ("ref_model", "reward_model", "teacher_model"),
    "rloo": ("ref_model", "reward_model"),
    "ppo": ("ref_model", "reward_model", "value_model"),
    "gkd": ("teacher_model",),
}

# What --trl-arguments may set: variants in TRL that do not affect what is sharded, read or written here.
_Kinds = dict[str, type | tuple[str, ...]]  # a tuple: one of these texts, which TRL only checks in the first step
_ALL: _Kinds = {"disable_dropout": bool}
_FOLLOWS: _Kinds = {"ref_model_mixup_alpha": float}
_SAMPLED: _Kinds = {"min_p": float, **_FOLLOWS, **_ALL}
EXTRAS: dict[str, _Kinds] = {
    "dpo": {
        **dict.fromkeys(("ld_alpha", "f_alpha_divergence_coef", "discopop_tau"), float),
        "f_divergence_type": ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"),
        "use_weighting": bool,
        **_FOLLOWS,
        **_ALL,
    },
    "kto": {**_FOLLOWS, **_ALL},
    "orpo": _ALL,
    "simpo": _ALL,
    "cpo": {"alpha": float, **_ALL},
    "rm": {"center_rewards_coefficient": float, **_ALL},
    "gkd": _ALL,
    "grpo": {
        **dict.fromkeys(("top_entropy_quantile", "off_policy_mask_threshold"), float),
        **dict.fromkeys(("sapo_temperature_neg", "sapo_temperature_pos"), float),
        **dict.fromkeys(("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), float),
        **dict.fromkeys(("entropy_coef", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta"), float),
        **dict.fromkeys(("entropy_target", "vllm_importance_sampling_clip_max"), float),
        **dict.fromkeys(
            ("use_adaptive_entropy", "use_bias_correction_kl", "vllm_importance_sampling_correction"), bool
        ),
        "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
        "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
        **_SAMPLED,
    },
    "rloo": {"normalize_advantages": bool, **_SAMPLED},
    "ppo": _SAMPLED,
}

# Numbers that must be from 0 to 1: TRL ignores other values, or computes something else with them.
SHARES = ("top_entropy_quantile", "ld_alpha", "ref_model_mixup_alpha")

# TRL only checks these in the first step.
LOSSES: dict[str, tuple[str, ...]] = {
    "dpo": (
        *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired"),
        *("apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
    ),
    "kto": ("kto", "apo_zero_unpaired"),
    "cpo": ("sigmoid", "hinge", "ipo", "simpo", "alphapo"),
    "grpo": ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo", "fipo"),
}


def check_losses(config: RlhfConfig) -> None:
    """Raise ConfigError for a loss that the algorithm does not have."""
    kind = config.rlhf_type
    for loss in config.loss_type:
        if loss not in LOSSES[kind]:
            hint = did_you_mean(loss, LOSSES[kind])
            raise ConfigError(
                f"--loss-type {loss}: {kind} has no such loss.{hint} Its losses are {', '.join(LOSSES[kind])}."
            )


def check_algorithm(config: RlhfConfig, batch: Batch) -> None:
    """Raise ConfigError for options that contradict the algorithm, or if one that it needs is missing."""
    kind = config.rlhf_type
    for names in ALGORITHMS[kind].needs:
        if not any(getattr(config, name) for name in names):
            options = " or ".join(flag(name) for name in names)
            raise ConfigError(f"--rlhf-type {kind} needs {options}.")
    for name, kinds in MEANT_FOR.items():
        default = RlhfConfig.model_fields[name].default
        if kind not in kinds and getattr(config, name) != default:
            raise ConfigError(f"{flag(name)} does not apply to --rlhf-type {kind}; it is for {', '.join(kinds)}.")
    check_losses(config)
    _check_extras(config)
    check_others(config, OTHERS)
    check_variant(config)
    check_served(config)
    judges = len(config.reward_funcs) + len(config.reward_model)
    if config.reward_weights and len(config.reward_weights) != judges:
        raise ConfigError(
            f"--reward-weights has {len(config.reward_weights)} weights for {judges} rewards"
            " (--reward-funcs, then --reward-model)."
        )
    if kind in (*REWARDED, "gkd"):
        check_vllm(config, batch.world_size)
    if kind in REWARDED:
        _check_generations(config, batch)
    if kind == "kto" and batch.micro < 2:
        raise ConfigError(
            "--rlhf-type kto compares the rows of a micro-batch: --per-device-batch-size must be above 1."
        )
    if config.ref_model and config.tuner != "full":
        raise ConfigError("--ref-model and --tuner: with adapters the reference is the model without them.")
    if config.ref_adapters != SAME and not config.adapters:
        raise ConfigError(
            "--ref-adapters is for adapters whose training continues: add --adapters. The reference of new adapters"
            " is the model."
        )
    if config.sync_ref_steps and (config.tuner != "full" or config.precompute_ref):
        raise ConfigError("--sync-ref-steps needs a reference of its own: leave out --tuner and --precompute-ref.")
    if config.sync_ref_steps and kind in REWARDED and not refers(config):
        raise ConfigError(
            f"--sync-ref-steps updates the reference, and --rlhf-type {kind} has one only with --beta above 0."
        )


def check_cut(config: RlhfConfig) -> None:
    """Raise ConfigError if the algorithm's trainer does not truncate rows at the requested end."""
    cuts = ALGORITHMS[config.rlhf_type].cuts
    if config.truncation in ("drop", "raise", *cuts):
        return
    known = f"only supports --truncation {cuts[0]}: use that" if cuts else "does not truncate rows: raise --max-length"
    raise ConfigError(
        f"--truncation {config.truncation}: --rlhf-type {config.rlhf_type} {known}, or drop long rows with"
        " --truncation drop."
    )


def _check_extras(config: RlhfConfig) -> None:
    """Raise ConfigError for a name in --trl-arguments that the algorithm does not have, or a value of the wrong
    type."""
    known = EXTRAS[config.rlhf_type]
    for name, value in config.trl_arguments.items():
        said = f"--trl-arguments {name}={value}"
        if name not in known:
            if name in RlhfConfig.model_fields:
                raise ConfigError(f"{said}: use the option {flag(name)} for it.")
            hint = did_you_mean(name, known) or f" It has {', '.join(known)}."
            raise ConfigError(f"{said}: --rlhf-type {config.rlhf_type} has no such argument here.{hint}")
        kind = known[name]
        if isinstance(kind, tuple):
            fits, wanted = value in kind, f"{', '.join(kind[:-1])} or {kind[-1]}"
        elif kind is bool:
            fits, wanted = isinstance(value, bool), "yes or no"
        else:
            fits, wanted = isinstance(value, (int, float)) and not isinstance(value, bool), "a number"
            if name in SHARES and isinstance(value, (int, float)):
                fits, wanted = fits and 0 <= value <= 1, "from 0 to 1"
        if not fits:
            raise ConfigError(f"{said}: should be {wanted}.")


def _check_generations(config: RlhfConfig, batch: Batch) -> None:
    steps = config.steps_per_generation or batch.accumulation
    whole, readers = batch.micro * batch.readers * steps, f"{batch.readers} process(es)"
    if batch.sequence > 1:
        readers = f"{batch.readers} group(s) of {batch.sequence} processes"
    if config.generations == 1 and not config.by_teacher_alone:
        raise ConfigError(
            "--num-generations 1: the rewards of an answer are compared with those of other answers to its prompt,"
            " and there are none. Use 2 or more; 1 is for --rlhf-type grpo with a --teacher-model and no rewards."
        )
    if config.generations == batch.micro * batch.world_size * steps == 1:
        raise ConfigError(
            "Only one answer is generated at once: raise --per-device-batch-size or another batch option."
        )
    if whole % config.generations:
        raise ConfigError(
            f"{whole} answers are generated at once ({batch.micro} x {steps} micro-batch(es) x {readers}),"
            f" which --num-generations {config.generations} does not divide.\n"
            "Raise --per-device-batch-size or --gradient-accumulation-steps, or use fewer generations."
        )
    if batch.micro * steps % batch.sequence:
        raise ConfigError(
            f"--sequence-parallel {batch.sequence}: the {batch.sequence} processes of a group cannot share its"
            f" {batch.micro * steps} answers ({batch.micro} x {steps} micro-batch(es)) evenly.\n"
            "Raise --per-device-batch-size, --gradient-accumulation-steps or --steps-per-generation to a multiple of"
            f" {batch.sequence}."
        )
    judged, option = batch.micro * batch.world_size, "--val-split" if config.val_split else "--val-dataset"
    if config.evaluated and judged % config.generations:
        enough = config.generations // math.gcd(config.generations, batch.world_size)
        raise ConfigError(
            f"{option}: {judged} answers are judged at once in an evaluation ({batch.micro} x {batch.world_size}"
            f" process(es)), which --num-generations {config.generations} does not divide.\n"
            f"Use --per-device-batch-size {enough} or a multiple of it, or leave {option} out."
        )


def own_arguments(config: RlhfConfig, batch: Batch) -> dict[str, Any]:
    """The arguments of the algorithm's configuration beyond those of every trainer, without TRL's defaults."""
    kind = config.rlhf_type
    own: dict[str, Any] = {"beta": config.beta} if kind != "rm" else {}
    if kind in BALANCED:  # TRL's default is the value in the model's config
        own["router_aux_loss_coef"] = config.router_aux_loss_coef
    if kind in (*PAIRED, "kto"):
        own["max_length"] = config.max_length
    if kind == "dpo":
        own |= {"loss_type": config.loss_type, "loss_weights": config.loss_weights}
        own |= {"label_smoothing": config.label_smoothing}
        own["truncation_mode"] = "keep_end" if config.truncation == "left" else "keep_start"
    if kind == "kto":
        own |= {"desirable_weight": config.desirable_weight, "undesirable_weight": config.undesirable_weight}
        own |= {"loss_type": _one(config), "train_sampling_strategy": "sequential"}
    if kind in ("cpo", "simpo"):
        own |= {"label_smoothing": config.label_smoothing, "loss_type": _one(config), "cpo_alpha": config.cpo_alpha}
    if kind == "simpo":
        alpha = 0.0 if config.cpo_alpha is None else config.cpo_alpha
        beta = 2.0 if config.beta is None else config.beta  # as in the paper; TRL's default is meant for cpo
        own |= {"loss_type": "simpo", "simpo_gamma": config.simpo_gamma, "cpo_alpha": alpha, "beta": beta}
    if kind in REFERRED[:2]:
        own |= {"precompute_ref_log_probs": config.precompute_ref}
    if config.sync_ref_steps:
        own |= {"sync_ref_model": True, "ref_model_sync_steps": config.sync_ref_steps}
    if kind == "gkd":
        own |= {"max_length": config.max_length, "max_new_tokens": config.max_completion_length}
        own |= {"temperature": config.temperature, "lmbda": config.lmbda, "seq_kd": config.seq_kd}
    if kind in REWARDED:
        own |= _generating(config, batch)
    if kind == "ppo":
        own |= {"gamma": config.gamma, "gae_lambda": config.gae_lambda}
        own |= {"value_weight": config.value_weight, "value_clip": config.value_clip}
    return {name: value for name, value in own.items() if value not in (None, [])} | config.trl_arguments


def _generating(config: RlhfConfig, batch: Batch) -> dict[str, Any]:
    own: dict[str, Any] = {
        "num_generations": config.generations,
        "max_completion_length": config.max_completion_length,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "repetition_penalty": config.repetition_penalty,
        "num_iterations": config.num_iterations,
        "steps_per_generation": config.steps_per_generation or batch.accumulation,
        "epsilon": config.epsilon,
        "epsilon_high": config.epsilon_high,
        "reward_weights": config.reward_weights,
        "mask_truncated_completions": config.mask_truncated_completions,
        # We log the positions of images; TRL would gather images on only those ranks that have some.
        "log_multimodal": False,
    }
    if config.rlhf_type == "grpo":
        own |= {"loss_type": _one(config), "scale_rewards": config.scaled_by, "delta": config.delta}
        own |= {"advantage_estimator": config.advantage_estimator, "kl_in_reward": config.distance_in_reward}
        own["importance_sampling_level"] = config.importance_sampling_level
        own["max_tool_calling_iterations"] = config.max_tool_calling_iterations
        own["teacher_kl_coef"] = config.teacher_kl_coef
    if config.generations == 1:
        whole = batch.micro * batch.world_size * own["steps_per_generation"]
        own |= {"num_generations": whole, "num_generations_eval": 1}  # see GrpoConfig
    if config.use_vllm:
        own |= vllm_arguments(config)
        if config.loss_type == ["vespo"]:  # supports only probabilities of tokens
            own["vllm_importance_sampling_mode"] = "token_truncate"
    return own


def _one(config: RlhfConfig) -> str | None:
    if len(config.loss_type) > 1:
        raise ConfigError(f"--loss-type takes one value with --rlhf-type {config.rlhf_type}.")
    return {"fipo": "dapo"}.get(config.loss_type[0], config.loss_type[0]) if config.loss_type else None


def _found(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
