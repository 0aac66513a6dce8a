"""The options of `shardproof rlhf`."""

from __future__ import annotations

from itertools import count
from typing import Annotated, Literal

from pydantic import Field

from shardproof.train.options.config import DEFAULT_MICRO_BATCH, Batch, RunConfig
from shardproof.train.options.option import Arguments, Finite, Named, Written, option

RlhfType = Literal["dpo", "kto", "orpo", "simpo", "cpo", "rm", "grpo", "rloo", "gkd", "ppo"]

PAIRED = ("dpo", "orpo", "simpo", "cpo", "rm")
REWARDED = ("grpo", "rloo", "ppo")  # they generate answers, which rewards judge
REFERRED = ("dpo", "kto", *REWARDED)  # they compare with a reference

SAME = "same"  # --ref-adapters: those of --adapters

CHORD = (
    *("chord_sft_dataset", "chord_sft_per_device_train_batch_size", "chord_enable_phi_function"),
    *("chord_mu_peak", "chord_mu_valley", "chord_mu_warmup_steps", "chord_mu_decay_steps"),
)
FIPO = ("fipo_decay_rate", "fipo_clip_range", "fipo_clip_high_only", "fipo_safety_threshold")

LEARNING_RATE = {"rm": 1e-4, "gkd": 1e-5}  # TRL's; 1e-6 elsewhere
LORA_FACTOR = 10  # adapters need a higher rate


class RlhfConfig(RunConfig):
    """Every option of preference and reinforcement training. A default of None stands for TRL's."""

    command = "rlhf"
    sources = (
        *RunConfig.sources,
        *("ref_model", "ref_adapters", "teacher_model", "reward_model", "value_model"),
        *("reward_funcs", "tools", "environments"),
    )

    learning_rate: Finite | None = option(  # type: ignore[assignment]  # nobody writes to a configuration
        "Training", None, "peak learning rate of AdamW (default: 1e-6; rm 1e-4, gkd 1e-5; tenfold with lora)", ge=0
    )

    rlhf_type: RlhfType = option("Algorithm", "dpo", "training algorithm")
    beta: Finite | None = option(
        "Algorithm",
        None,
        "how strongly the model is tied to the reference (dpo, kto, ppo, ...); in gkd, from forward (0) "
        "to reverse KL (1)",
        ge=0,
    )
    loss_type: list[str] = option("Algorithm", [], "variant of the loss, as TRL names it; dpo takes several")
    loss_weights: list[Finite] = option("Algorithm", [], "weight of each --loss-type, in dpo")
    label_smoothing: float | None = option(
        "Algorithm", None, "assumed share of pairs whose answers are swapped", ge=0, lt=1
    )
    router_aux_loss_coef: Finite = option(
        "Algorithm", 0.0, "weight of the load-balancing loss of mixture-of-experts models (such as 0.001)", ge=0
    )
    trl_arguments: Arguments = option(
        "Algorithm", {}, "further arguments for TRL's configuration: top_entropy_quantile=0.2"
    )
    simpo_gamma: Finite | None = option("Algorithm", None, "target margin between the answers, in simpo", ge=0)
    cpo_alpha: Finite | None = option(
        "Algorithm", None, "weight of the log-likelihood of the chosen answer, in cpo", ge=0
    )
    desirable_weight: Finite = option("Algorithm", 1.0, "weight of good answers, in kto", gt=0)
    undesirable_weight: Finite = option("Algorithm", 1.0, "weight of bad answers, in kto", gt=0)

    ref_model: Named | None = option("Other models", None, "reference model (default: the model before training)")
    ref_adapters: Named | None = option(
        "Other models",
        SAME,
        "with --adapters: adapters of the reference; 'same': those, before training; 'none': the base model",
    )
    teacher_model: Named | None = option(
        "Other models", None, "teacher: gkd learns its distributions, grpo its judgement of each token"
    )
    teacher_model_server: Named | None = option(
        "Other models", None, "URL of a vLLM server that acts as the teacher and returns log-probabilities"
    )
    teacher_kl_coef: Finite = option(
        "Other models",
        1.0,
        "weight, in a token's advantage, of how much more probable the teacher finds it (grpo)",
        gt=0,
    )
    reward_model: list[Named] = option(
        "Other models", [], "reward models that score answers; 'rlhf --rlhf-type rm' trains one"
    )
    value_model: Named | None = option("Other models", None, "initial value model of ppo (default: --model)")
    frozen_stage: int | None = option(
        "Other models", None, "sharding stage of the models that are not trained (default: --stage)", ge=0, le=3
    )
    frozen_precision: Literal["fp32", "bf16", "fp16"] | None = option(
        "Other models", None, "dtype in which models that are not trained compute (default: --precision)"
    )
    model_stages: dict[str, Annotated[int, Field(ge=0, le=3)]] = option(
        "Other models",
        {},
        "sharding stages of individual models: ref_model=0,reward_model=3 (default: --frozen-stage; "
        "--stage for value_model)",
    )
    model_precisions: dict[str, Literal["fp32", "bf16", "fp16"]] = option(
        "Other models",
        {},
        "dtypes of individual models: reward_model=bf16 (default: --frozen-precision; --precision for value_model)",
    )
    model_offloads: dict[str, str] = option(
        "Other models",
        {},
        "offloading of individual models, as in --offload, or none: teacher_model=all (default: --offload)",
    )
    precompute_ref: bool = option(
        "Other models", False, "run the reference over all rows before training, then free its memory (dpo, kto)"
    )
    sync_ref_steps: int | None = option(
        "Other models", None, "move the reference towards the model every this many steps", ge=1
    )

    reward_funcs: list[str] = option(
        "Rewards",
        [],
        "functions that score answers: accuracy, format, length, toolbench, react_format, FILE.py:FUNCTION, a plugin's",
    )
    reward_weights: list[Finite] = option(
        "Rewards", [], "weight of each of --reward-funcs, then of each --reward-model (default: 1)"
    )
    format_pattern: str = option(
        "Rewards",
        r"(?s).*####\s*\$?-?[\d,]*\.?\d+\s*",
        "regular expression that the whole answer must match for the reward 'format'",
    )
    advantage_estimator: Literal["grpo", "rloo", "reinforce_plus_plus"] = option(
        "Rewards",
        "grpo",
        "compare an answer with the mean of all answers to its prompt, or of the others (rloo); reinforce_plus_plus is"
        " scaled by the standard deviation of these differences, not of rewards (grpo)",
    )
    scale_rewards: Literal["auto", "group", "batch", "none"] = option(
        "Rewards",
        "auto",
        "divide rewards by their standard deviation within a prompt's group, or over the batch (grpo; auto: group;"
        " none with --advantage-estimator rloo, batch with reinforce_plus_plus)",
    )
    kl_in_reward: bool | None = option(
        "Rewards",
        None,
        "subtract the KL to the reference from rewards, instead of adding it to the loss (grpo; default: no; yes with"
        " an --advantage-estimator other than grpo)",
    )

    chord_sft_dataset: list[str] = option(
        "Rewards", [], "expert rows, as for sft, learned beside the generated answers (CHORD, in grpo)"
    )
    chord_sft_per_device_train_batch_size: int = option("Rewards", 1, "expert rows per process in a micro-batch", ge=1)
    chord_enable_phi_function: bool = option(
        "Rewards", False, "weight each expert token by how unsure the model is of it: p (1 - p)"
    )
    chord_mu_peak: float | None = option(
        "Rewards", None, "largest weight of the expert loss; grpo's loss gets the rest", ge=0, le=1
    )
    chord_mu_valley: float | None = option(
        "Rewards", None, "final weight of the expert loss (default: --chord-mu-peak)", ge=0, le=1
    )
    chord_mu_warmup_steps: int = option("Rewards", 0, "steps in which that weight rises to its peak", ge=0)
    chord_mu_decay_steps: int = option("Rewards", 0, "steps in which it then falls", ge=0)

    num_generations: int | None = option("Generation", None, "answers per prompt (default: 8; rloo, ppo 2)", ge=1)
    max_completion_length: int = option("Generation", 256, "longest generated answer, in tokens", ge=1)
    stop_words: list[Written] = option("Generation", [], "strings that end an answer, besides its end token")
    temperature: Finite = option("Generation", 1.0, "sampling temperature", gt=0)
    top_p: float = option(
        "Generation", 1.0, "sample from the likeliest tokens whose probabilities sum up to this", gt=0, le=1
    )
    top_k: int = option("Generation", 0, "sample from this many of the likeliest tokens; 0: from all", ge=0)
    repetition_penalty: Finite = option(
        "Generation", 1.0, "above 1, tokens that have occurred become less likely", gt=0
    )
    num_iterations: int = option("Generation", 1, "how often each batch of answers is used", ge=1)
    steps_per_generation: int | None = option(
        "Generation", None, "micro-batches to generate answers for at once (default: those of one step)", ge=1
    )
    epsilon: Finite = option("Generation", 0.2, "clip probability ratios below 1 - epsilon", gt=0)
    epsilon_high: Finite | None = option(
        "Generation", None, "clip probability ratios above 1 + this (default: --epsilon)", gt=0
    )
    delta: Finite | None = option(
        "Generation", None, "upper bound of probability ratios in two-sided clipping (grpo)", gt=0
    )
    fipo_decay_rate: Finite = option(
        "Generation",
        32.0,
        "with --loss-type fipo: distance in tokens at which a later token counts half",
        gt=0,
    )
    fipo_clip_range: Finite = option(
        "Generation", 0.2, "with fipo: weights differ from 1 by at most this; 0: no limit", ge=0
    )
    fipo_clip_high_only: bool = option("Generation", True, "with fipo: weights are never below 1")
    fipo_safety_threshold: Finite = option(
        "Generation",
        4.0,
        "with fipo: tokens of worse answers whose probability ratio exceeds this have a weight of at most 1",
        gt=0,
    )
    importance_sampling_level: Literal["token", "sequence"] = option(
        "Generation", "token", "probability ratios of tokens, or of whole answers (grpo; sequence is GSPO)"
    )
    mask_truncated_completions: bool = option(
        "Generation", False, "learn nothing from answers that were cut off at --max-completion-length"
    )
    dynamic_sample: bool = option(
        "Generation", False, "replace questions whose answers all get the same reward by others (DAPO)"
    )
    max_resample_times: int = option(
        "Generation", 3, "with --dynamic-sample: most additional batches of answers per step", ge=1
    )
    tools: list[str] = option(
        "Generation", [], "functions that answers may call while they are generated, FILE.py:FUNCTION (grpo)"
    )
    environments: list[str] = option(
        "Generation", [], "classes whose methods answers may call, and which score them, FILE.py:CLASS (grpo)"
    )
    max_tool_calling_iterations: int | None = option(
        "Generation", None, "most rounds of function calls in an answer (default: as many as fit)", ge=1
    )
    use_vllm: bool = option("Generation", False, "generate with vLLM, to which the weights are sent (grpo, rloo, gkd)")
    vllm_mode: Literal["server", "colocate"] = option(
        "Generation", "server", "a vLLM server, or vLLM inside each training process"
    )
    vllm_server: str | None = option(
        "Generation", None, "URL of the vLLM server (default: from the host and port below)"
    )
    vllm_server_host: str = option("Generation", "localhost", "host of the vLLM server")
    vllm_server_port: int = option("Generation", 8000, "port of the vLLM server", ge=1, lt=2**16)
    vllm_server_timeout: Finite = option("Generation", 240.0, "seconds to wait until the vLLM server is up", ge=0)
    vllm_gpu_memory_utilization: float = option(
        "Generation", 0.3, "share of a GPU's memory that vLLM takes in colocate mode", gt=0, lt=1
    )
    vllm_max_model_len: int | None = option(
        "Generation",
        None,
        "longest sequence of a colocated vLLM (default: --max-length plus --max-completion-length)",
        ge=2,
    )
    vllm_tensor_parallel_size: int = option("Generation", 1, "processes that share one colocated vLLM", ge=1)
    vllm_sleep: bool = option("Generation", False, "a colocated vLLM releases its memory while nothing is generated")

    lmbda: float = option(
        "gkd and ppo", 0.5, "share of batches for which the student generates the answers, in gkd", ge=0, le=1
    )
    seq_kd: bool = option("gkd and ppo", False, "for the other batches, let the teacher generate the answers, in gkd")
    sft_alpha: Finite = option(
        "gkd and ppo",
        0.0,
        "weight of an additional sft loss on answers that the student has not generated, in gkd",
        ge=0,
    )
    gkd_logits_topk: int | None = option(
        "gkd and ppo",
        None,
        "compare only this many of the teacher's likeliest tokens, without holding logits (gkd; default: all)",
        ge=2,
    )
    gamma: float = option("gkd and ppo", 1.0, "discount factor per token, in ppo", gt=0, le=1)
    gae_lambda: float = option("gkd and ppo", 0.95, "lambda of generalized advantage estimation, in ppo", ge=0, le=1)
    value_weight: Finite = option("gkd and ppo", 0.1, "weight of the value loss, in ppo", ge=0)
    value_clip: Finite = option("gkd and ppo", 0.2, "clip range of the value, in ppo", gt=0)

    log_completions: bool = option("Output", True, "write answers and their rewards to completions.jsonl")

    @property
    def summary(self) -> str:
        return f"{self.rlhf_type}, {self.tuner}, {self.precision}"

    @property
    def talks(self) -> bool:
        return self.rlhf_type != "rm"

    @property
    def models(self) -> list[str]:
        others = (self.ref_model, self.teacher_model, self.value_model, *self.reward_model)
        return [self.model, *(model for model in others if model is not None)]

    @property
    def vllm_address(self) -> str:
        """URL of the server that generates."""
        return (self.vllm_server or f"http://{self.vllm_server_host}:{self.vllm_server_port}").rstrip("/")

    @property
    def generations(self) -> int:
        """Number of answers to each prompt in a batch."""
        return self.num_generations or (8 if self.rlhf_type == "grpo" else 2)

    @property
    def by_teacher_alone(self) -> bool:
        """Whether only a teacher judges the generated answers."""
        judges = self.reward_funcs or self.reward_model or self.environments
        return self.rlhf_type == "grpo" and self.taught and not judges

    @property
    def taught(self) -> bool:
        """Whether there is a teacher, here or on a server."""
        return bool(self.teacher_model or self.teacher_model_server)

    @property
    def scaled_by(self) -> str:
        """The scope of the standard deviation that rewards are divided by."""
        usual = {"grpo": "group", "rloo": "none", "reinforce_plus_plus": "batch"}[self.advantage_estimator]
        return usual if self.scale_rewards == "auto" else self.scale_rewards

    @property
    def distance_in_reward(self) -> bool:
        """Whether grpo subtracts the KL to the reference from rewards."""
        return self.advantage_estimator != "grpo" if self.kl_in_reward is None else self.kl_in_reward

    @property
    def evaluated(self) -> bool:
        """Whether there are rows to evaluate on, during training or at its end."""
        return self.holds_out and self.eval_strategy != "no"

    def batch(self, world_size: int) -> Batch:
        """As for every run. If answers are generated and no size is given, the number of answers to a prompt divides
        it."""
        if self.rlhf_type in REWARDED and self.per_device_batch_size is None and self.global_batch_size is None:
            steps = 1 if self.evaluated else self.steps_per_generation or self.gradient_accumulation_steps or 1
            group = self.sequence_parallel
            micro = next(
                n
                for n in count(DEFAULT_MICRO_BATCH)
                if n * steps * (world_size // group) % self.generations == 0 and n * steps % group == 0
            )
            return self.model_copy(update={"per_device_batch_size": micro}).batch(world_size)
        return super().batch(world_size)

    @property
    def rate(self) -> float:
        """The learning rate."""
        if self.learning_rate is not None:
            return self.learning_rate
        rate = LEARNING_RATE.get(self.rlhf_type, 1e-6)
        return rate * LORA_FACTOR if self.tuner != "full" else rate


def writes_all_answers(config: RlhfConfig) -> bool:
    """Whether all answers are generated during training, so that rows need none."""
    return config.rlhf_type in REWARDED or (config.rlhf_type == "gkd" and (config.seq_kd or config.lmbda == 1))


def draws_answers(config: RunConfig) -> bool:
    """Whether a run learns from answers that are sampled during training."""
    if not isinstance(config, RlhfConfig):
        return False
    return config.rlhf_type in REWARDED or (config.rlhf_type == "gkd" and (config.lmbda > 0 or config.seq_kd))
