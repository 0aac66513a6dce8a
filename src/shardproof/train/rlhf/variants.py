"""Options that apply only to some variants of an algorithm: elsewhere TRL ignores them, or fails late."""

from __future__ import annotations

import logging
from collections.abc import Callable

from shardproof.errors import ConfigError, did_you_mean
from shardproof.train.options.option import flag
from shardproof.train.options.rlhf_config import CHORD, FIPO, REWARDED, RlhfConfig

log = logging.getLogger("shardproof")

LOSS = {"dpo": "sigmoid", "cpo": "sigmoid", "grpo": "dapo"}  # TRL's defaults

_CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
# The losses that use an option.
OF_LOSSES: dict[str, dict[str, tuple[str, ...]]] = {
    "dpo": {
        "label_smoothing": ("robust", "exo_pair", "aot", "aot_unpaired"),
        "discopop_tau": ("discopop",),
    },
    "cpo": {
        "label_smoothing": ("sigmoid", "simpo", "alphapo"),
        "cpo_alpha": ("sigmoid", "hinge", "ipo", "simpo"),
    },
    "grpo": {
        **dict.fromkeys(FIPO, ("fipo",)),
        "epsilon": (*_CLIPPED, "fipo", "cispo"),  # also the default of --epsilon-high
        "epsilon_high": (*_CLIPPED, "fipo", "cispo"),
        "delta": (*_CLIPPED, "fipo"),
        "importance_sampling_level": (*_CLIPPED, "cispo", "sapo"),
        **dict.fromkeys(("sapo_temperature_neg", "sapo_temperature_pos"), ("sapo",)),
        **dict.fromkeys(("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), ("vespo",)),
    },
}

_OF_PAIRS = tuple(f"{what}/{which}" for what in ("rewards", "logps", "logits") for which in ("chosen", "rejected"))
_COMPARED = (*_OF_PAIRS, "rewards/margins", "rewards/accuracies")
DISTANCES = ("kl", "teacher_kl")
OF_REWARDS = ("reward", "frac_reward_zero_std")  # prefixes of names
_OF_ANSWERS = (
    *("reward", "reward_std", "frac_reward_zero_std", "kl", "entropy", "aux_loss"),
    *(f"completions/{most}_{length}" for length in ("length", "terminated_length") for most in ("mean", "min", "max")),
    *("completions/clipped_ratio", "clip_ratio/low_mean", "clip_ratio/low_min", "clip_ratio/high_mean"),
    *("clip_ratio/high_max", "clip_ratio/region_mean"),
)
# Metrics of TRL's evaluations besides the loss, in all variants.
FIGURES: dict[str, tuple[str, ...]] = {
    "dpo": (*_COMPARED, "entropy", "mean_token_accuracy", "aux_loss"),
    "kto": (*_OF_PAIRS, "rewards/margins", "kl", "entropy", "aux_loss"),
    "orpo": (*_COMPARED, "nll_loss", "log_odds_ratio", "log_odds_chosen"),
    **dict.fromkeys(("cpo", "simpo"), (*_COMPARED, "nll_loss")),
    "rm": ("accuracy", "margin", "min_reward", "mean_reward", "max_reward"),
    "gkd": (),
    "grpo": (
        *_OF_ANSWERS,
        "teacher_kl",
        *("policy_loss", "entropy_coef", "cispo_clip_ratio", "vespo/phi_seq_mean"),
        *("tools/call_frequency", "tools/failure_frequency"),
        *(f"sampling/importance_sampling_ratio/{which}" for which in ("mean", "min", "max")),
        *(f"sampling/sampling_logp_difference/{which}" for which in ("mean", "max")),
    ),
    "rloo": _OF_ANSWERS,
    "ppo": (*_OF_ANSWERS, "value_loss"),
}

_NEEDS = Callable[[RlhfConfig], object]
_ADAPTIVE: tuple[_NEEDS, str] = (
    lambda config: config.trl_arguments.get("use_adaptive_entropy"),
    "--trl-arguments use_adaptive_entropy=yes",
)
_VLLM: tuple[_NEEDS, str] = (lambda config: config.use_vllm, "--use-vllm")
# TRL arguments that only have an effect with an option: whether it is given, and how it is written.
BESIDE: dict[str, tuple[_NEEDS, str]] = {
    "ref_model_mixup_alpha": (lambda config: config.sync_ref_steps, "--sync-ref-steps"),
    "f_alpha_divergence_coef": (
        lambda config: config.trl_arguments.get("f_divergence_type") == "alpha_divergence",
        "--trl-arguments f_divergence_type=alpha_divergence",
    ),
    "use_bias_correction_kl": (
        lambda config: refers(config) and not config.distance_in_reward,
        "--beta above 0 and a distance in the loss",
    ),
    **dict.fromkeys(("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"), _ADAPTIVE),
    **dict.fromkeys(
        ("vllm_importance_sampling_clip_max", "vllm_importance_sampling_correction", "vllm_importance_sampling_mode"),
        _VLLM,
    ),
}
# The same for our options.
OPTIONS_BESIDE: dict[str, tuple[_NEEDS, str]] = {
    "max_tool_calling_iterations": (lambda config: config.tools or config.environments, "--tools or --environments"),
    "use_vllm": (
        lambda config: config.rlhf_type != "gkd" or config.lmbda,
        "a --lmbda above 0: the student generates no answers",
    ),
    "sft_alpha": (lambda config: config.lmbda < 1, "a --lmbda below 1: all answers are the student's own"),
    "teacher_kl_coef": (lambda config: config.taught, "--teacher-model"),
    **dict.fromkeys(CHORD[1:], (lambda config: config.chord_sft_dataset, "--chord-sft-dataset")),
    "fipo_clip_high_only": (lambda config: config.fipo_clip_range, "--fipo-clip-range above 0"),
    "max_resample_times": (lambda config: config.dynamic_sample, "--dynamic-sample"),
    "kl_in_reward": (lambda config: not config.kl_in_reward or refers(config), "--beta above 0"),
}
# Losses that TRL has f-divergences for; below, those divided by --beta and those it cannot weight by likelihood.
DIVERGING = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft")
DIVIDED = ("ipo", "sppo_hard", "simpo", "alphapo")  # by --beta
UNWEIGHED = ("aot", "aot_unpaired", "hinge", "sft")
# These keep dropout; in the others, TRL turns it off in the whole model, including adapters.
WITH_DROPOUT = ("grpo", "rloo", "ppo")


def refers(config: RlhfConfig) -> bool:
    """Whether an algorithm that generates uses a reference."""
    return bool(config.beta) or (config.beta is None and config.rlhf_type != "grpo")


def check_variant(config: RlhfConfig) -> None:
    """Raise ConfigError for an option that has no effect with the loss or another option, or that one of them needs."""
    kind = config.rlhf_type
    losses = config.loss_type or [LOSS.get(kind, kind)]
    for name, known in OF_LOSSES.get(kind, {}).items():
        if (said := _said(config, name)) and not {*losses} & {*known}:
            raise ConfigError(f"{said} does not apply to --loss-type {' '.join(losses)}; it is for {', '.join(known)}.")
    for name, (there, option) in (BESIDE | OPTIONS_BESIDE).items():
        if (said := _said(config, name)) and not there(config):
            raise ConfigError(f"{said} has no effect without {option}: add that, or leave it out.")
    named = {*config.model_stages, *config.model_precisions, *config.model_offloads}
    if "ref_model" in named and kind in REWARDED and not refers(config):
        raise ConfigError(
            f"--model-stages, --model-precisions or --model-offloads ref_model: --rlhf-type {kind} has a reference"
            f" only with --beta above 0."
        )
    _check_best(config)
    if config.beta == 0 and _all_by_beta(config, losses):
        raise ConfigError(
            f"--beta 0: the loss of {kind} multiplies or divides by --beta, so nothing is learned with 0. Use a value"
            f" above 0, or leave --beta out."
        )
    if kind == "gkd" and config.beta is not None and config.beta > 1:
        raise ConfigError(
            f"--beta {config.beta:g}: in gkd it must be between 0, the forward KL divergence, and 1, the reverse one."
        )
    for name in ("loss_weights", "reward_weights"):
        weights = getattr(config, name)
        if weights and not any(weights) and not config.environments:
            raise ConfigError(f"{flag(name)} are all 0, so nothing would be learned. Give at least one another weight.")
    if kind == "dpo":
        _check_dpo(config, losses)
    if kind == "grpo":
        _check_advantages(config)


def _all_by_beta(config: RlhfConfig, losses: list[str]) -> bool:
    """Whether all of the loss is multiplied by --beta, or a part of it divided by it."""
    if config.rlhf_type == "simpo" or (config.rlhf_type in ("dpo", "cpo") and {*losses} & {*DIVIDED}):
        return True
    if config.rlhf_type == "cpo":  # the rest of its loss is the likelihood of the better answer
        return config.cpo_alpha == 0
    return config.rlhf_type == "kto" or (config.rlhf_type == "dpo" and "sft" not in losses)


def warn_of_dropout(config: RlhfConfig) -> None:
    """Warn if TRL turns off the requested dropout."""
    off = config.trl_arguments.get("disable_dropout", config.rlhf_type not in WITH_DROPOUT)
    if off and config.tuner == "lora" and config.lora_dropout:
        log.warning(
            "--lora-dropout %g has no effect: TRL turns dropout off in %s."
            " Keep it with --trl-arguments disable_dropout=no, or leave it out.",
            config.lora_dropout,
            config.rlhf_type,
        )


def _check_best(config: RlhfConfig) -> None:
    """Raise ConfigError for the name of a metric that evaluations do not have. Custom reward functions may log more,
    and TRL's names for reward models are not known yet."""
    kind, name = config.rlhf_type, config.best_metric.removeprefix("eval_")
    known = ["loss", *(figure for figure in FIGURES[kind] if figure not in DISTANCES)]
    if name in {*DISTANCES} & {*FIGURES[kind]}:
        raise ConfigError(
            f"--best-metric {config.best_metric}: metrics other than losses are maximised, so the best would be the"
            " farthest. Use loss, which is that distance if only a teacher judges, or a reward."
        )
    if config.by_teacher_alone:
        known = [figure for figure in known if not figure.startswith(OF_REWARDS)]
    elif kind in REWARDED:
        if config.external_plugins or any(":" in name for name in [*config.reward_funcs, *config.environments]):
            return
        if config.reward_model and name.startswith("rewards/"):
            return
        known += [f"rewards/{function}/{what}" for function in config.reward_funcs for what in ("mean", "std")]
    if name not in known:
        hint = did_you_mean(name, known)
        raise ConfigError(
            f"--best-metric {config.best_metric}: evaluations of {kind} have no such metric.{hint} They have"
            f" {', '.join(known)}."
        )


def _check_dpo(config: RlhfConfig, losses: list[str]) -> None:
    if config.loss_weights and len(config.loss_weights) != len(losses):
        raise ConfigError(
            f"--loss-weights has {len(config.loss_weights)} weight(s) for {len(losses)} --loss-type"
            f" ({' '.join(losses)}): give one for each, in order."
        )
    if "exo_pair" in losses and not config.label_smoothing:
        raise ConfigError("--loss-type exo_pair needs a --label-smoothing above 0; its paper uses 0.001.")
    if "robust" in losses and (config.label_smoothing or 0) >= 0.5:
        raise ConfigError(f"--loss-type robust needs a --label-smoothing below 0.5, not {config.label_smoothing}.")
    divergence = config.trl_arguments.get("f_divergence_type", "reverse_kl")
    if divergence != "reverse_kl" and (others := [loss for loss in losses if loss not in DIVERGING]):
        raise ConfigError(
            f"--trl-arguments f_divergence_type={divergence} and --loss-type {others[0]}: it is for"
            f" {', '.join(DIVERGING)}."
        )
    if config.trl_arguments.get("use_weighting") and (others := [loss for loss in losses if loss in UNWEIGHED]):
        raise ConfigError(
            f"--trl-arguments use_weighting=True and --loss-type {others[0]}: TRL does not weight this loss. Leave one"
            " of them out."
        )


def _check_advantages(config: RlhfConfig) -> None:
    apart = config.trl_arguments.get("multi_objective_aggregation") == "normalize_then_sum"
    in_reward = config.distance_in_reward and refers(config)
    if apart and (in_reward or config.advantage_estimator != "grpo" or _said(config, "scale_rewards")):
        others = ("scale_rewards", "advantage_estimator", "kl_in_reward")
        said = next(filter(None, (_said(config, name) for name in others)))
        raise ConfigError(
            f"--trl-arguments multi_objective_aggregation=normalize_then_sum and {said}: it normalises the rewards"
            f" of each function separately, and then their sum over all answers. Leave one of them out."
        )
    _check_compared(config, in_reward)
    steps, every = config.steps_per_generation, config.gradient_accumulation_steps
    if config.loss_type == ["fipo"] and config.num_iterations == 1 and (steps is None or (every and steps <= every)):
        raise ConfigError(
            "--loss-type fipo weights tokens by how the model has changed since they were generated, but each answer"
            " is learned from only once, before the model changes. Add --num-iterations 2, or more"
            " --steps-per-generation than"
            " --gradient-accumulation-steps."
        )
    if config.taught:
        of_answers = {
            f"--loss-type {' '.join(config.loss_type)}": config.loss_type in (["vespo"], ["fipo"]),
            "--trl-arguments off_policy_mask_threshold": "off_policy_mask_threshold" in config.trl_arguments,
            "--dynamic-sample": config.dynamic_sample,
        }
        if idle := [said for said, given in of_answers.items() if given]:
            raise ConfigError(
                f"{idle[0]} and --teacher-model: it uses one advantage per answer, but a teacher gives each token"
                f" its own. Leave one of them out."
            )


def _check_compared(config: RlhfConfig, in_reward: bool) -> None:
    """Raise ConfigError for options that compare answers if there is nothing to compare: all rewards are 0 except for
    the distance to the reference, or there is only one answer."""
    if not config.by_teacher_alone:
        return
    if in_reward and config.generations == 1:
        raise ConfigError(
            "--num-generations 1 and a distance to the reference in the reward: rewards are compared with those of"
            " other answers to the prompt, and there are none, so --beta would have no effect. Use --kl-in-reward"
            " no, which puts it in the loss, or 2 or more answers."
        )
    for name in ("advantage_estimator", "scale_rewards"):
        if not in_reward and (said := _said(config, name)):
            raise ConfigError(f"{said} has no effect without rewards: only a teacher judges. Leave it out.")


def _said(config: RlhfConfig, name: str) -> str:
    """An option that is not at its default, as it is written, or an empty string."""
    if name in RlhfConfig.model_fields:
        given = getattr(config, name) != RlhfConfig.model_fields[name].default
        return flag(name) if given else ""
    return f"--trl-arguments {name}={config.trl_arguments[name]}" if name in config.trl_arguments else ""
