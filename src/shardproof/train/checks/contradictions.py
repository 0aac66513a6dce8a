"""Options that need another one or contradict it. The default of an option is never an error."""

from __future__ import annotations

import difflib
import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardproof.data.forms.formats import FIELDS
from shardproof.errors import ConfigError
from shardproof.models.families.anatomy import check_part_names
from shardproof.models.families.family import TALKER
from shardproof.plugins import KINDS as PLUGINS
from shardproof.train.checks.scheduler import check_scheduler
from shardproof.train.checks.tuners import check_tuner
from shardproof.train.model.changes import check_rope, tokens_of
from shardproof.train.options.config import EIGHT_BITS, GALORE, MUON, SELECTIVE, RunConfig
from shardproof.train.options.option import first_given, flag
from shardproof.train.options.tuners import FULL, LORA

OF_ANSWERS = "predict_with_generate", "answer_metrics", "max_new_tokens", "stop_words"
KEPT = {"row_cache": "only rows whose answers are learned are kept"}
LABELS = ("num_labels", "label_names", "problem_type")
# Options that do not apply to rows with labels, and why.
NOT_OF_LABELS = {
    "packing": "a row is classified by its last token, and packed rows share one",
    "streaming": "labels are counted before training",
    "chunked_loss": "a classifier has no logits over the vocabulary",
    **dict.fromkeys(("loss", "loss_type"), "what is learned from a row is its label"),
    **KEPT | dict.fromkeys(OF_ANSWERS, "no answers are generated"),
    "label_smoothing_factor": "it applies to the tokens of answers",
    "token_weights": "it weights the tokens of answers",
    "router_aux_loss_coef": "transformers has that loss only in models that generate",
    "liger_kernel": "its kernels are for models that generate",
    "model_type": "plugin models generate text",
    **dict.fromkeys(("rope_scaling", "max_model_len"), "classifiers keep the positions of their model"),
}
# The same for rows whose texts are embedded.
NOT_OF_EMBEDDINGS = {
    "agent_template": "embedded texts do not call tools",
    "packing": "each text has its own embedding",
    "streaming": "texts are counted before training",
    **dict.fromkeys(("loss_type", "label_smoothing_factor", "token_weights"), "no tokens are learned"),
    "router_aux_loss_coef": NOT_OF_LABELS["router_aux_loss_coef"],
    "rope_scaling": "embedding models keep their positions",
    "max_model_len": "embedding models keep their positions",
    "chunked_loss": "embeddings have no logits",
    "liger_kernel": NOT_OF_LABELS["liger_kernel"],
    "model_type": NOT_OF_LABELS["model_type"],
    "metrics": "plugin metrics are computed from logits",
    **KEPT | dict.fromkeys(OF_ANSWERS, "no answers are generated"),
    **dict.fromkeys(LABELS, "rows have no labels"),
}
NOT_OF_PAIRS = {
    "agent_template": "pairs do not call tools",
    **{name: why for name, why in NOT_OF_LABELS.items() if name != "loss"},
    "metrics": "plugin metrics are computed from labels",
    **dict.fromkeys(LABELS, "a pair gets one score"),
}
# The same for pairs that a generative model is asked about.
NOT_OF_ASKED = NOT_OF_PAIRS | {
    "plain": "the model is asked through its chat template",
    "rope_scaling": "the model keeps its positions",
    "max_model_len": "the model keeps its positions",
    "liger_kernel": "its loss covers all tokens",
    "router_aux_loss_coef": "only one token of each pair is learned",
    "model_type": "infer only loads transformers models",
}
NOT_OF = {
    "seq_cls": NOT_OF_LABELS,
    "embedding": NOT_OF_EMBEDDINGS,
    "reranker": NOT_OF_PAIRS,
    "generative_reranker": NOT_OF_ASKED,
}
ADAM = ("adam_beta1", "adam_beta2", "adam_epsilon")


def check_together(config: RunConfig) -> None:
    """Raise ConfigError for an option that would silently do nothing, or that contradicts another."""
    check_tuner(config)
    _check_task(config)
    _check_changes(config)
    if config.optimizer not in ("adamw", EIGHT_BITS, MUON, GALORE) and (given := first_given(config, ADAM)):
        raise ConfigError(f"{given} applies to AdamW, and --optimizer is {config.optimizer}.")
    only_matrices = config.tuner == LORA and not (config.dora or config.modules_to_save)
    if config.optimizer == MUON and only_matrices and (given := first_given(config, ADAM)):
        raise ConfigError(
            f"{given} applies to AdamW, but adapters are matrices, which --optimizer muon updates with Muon."
        )
    if config.checkpointing_reentrant and not config.gradient_checkpointing:
        raise ConfigError(
            "--checkpointing-reentrant is a kind of gradient checkpointing, which is off: add --gradient-checkpointing."
        )
    if config.checkpointing_reentrant and config.gradient_checkpointing == SELECTIVE:
        raise ConfigError("--gradient-checkpointing selective is not reentrant: leave --checkpointing-reentrant out.")
    if config.warmup_steps is not None and first_given(config, ("warmup_ratio",)):
        raise ConfigError("--warmup-steps and --warmup-ratio mean the same: give one of them.")
    warms_up = config.warmup_steps or (first_given(config, ("warmup_ratio",)) and config.warmup_ratio)
    if config.lr_scheduler == "constant" and warms_up:
        raise ConfigError("--lr-scheduler constant has no warm-up: use constant_with_warmup, or leave the warm-up out.")
    _check_mixture(config)
    _check_cached(config)
    check_part_names(config.train_parts or (), config.freeze, config.part_learning_rates)
    if config.remote_media_cache and not config.allow_remote_media:
        raise ConfigError("--remote-media-cache keeps downloads, and there are none without --allow-remote-media.")
    if config.group_by_length and getattr(config, "packing", False):
        raise ConfigError(
            "--group-by-length and --packing: packed rows already have the same length. Give one of them."
        )
    _check_padding_free(config)
    _check_streaming(config)
    if config.truncation == "split" and config.recipe != "sft":
        raise ConfigError("--truncation split is for raw text in sft: use drop, right or left.")
    _check_optimizer(config)
    _check_four_bits(config)
    check_scheduler(config)
    if config.keep_gathered and 3 not in (config.stage, getattr(config, "frozen_stage", None)):
        raise ConfigError(
            f"--keep-gathered needs --stage 3: at stage {config.stage} weights stay gathered until the step anyway."
        )
    check_offload(config.offload)
    _check_sequence(config)
    _check_deterministic(config)


def _refuse_with(asked: str, config: RunConfig, against: Mapping[str, str]) -> None:
    """Raise ConfigError if one of the options in `against`, which conflict with `asked`, is given, with its reason."""
    for name, why in against.items():
        if getattr(config, name, None):
            raise ConfigError(f"{asked} and {flag(name)}: {why}. Leave one of them out.")


def _check_deterministic(config: RunConfig) -> None:
    """Options whose results depend on the number of processes."""
    if not getattr(config, "deterministic", False):
        return
    own_numbers = "each process draws its own random numbers"
    against = {
        "compile": "compiled code adds in an order that depends on the length",
        "lora_dropout": own_numbers,
        "neftune_noise_alpha": own_numbers,
        "shard_group": "replicas add gradients in another order",
    }
    _refuse_with("--deterministic", config, against)
    if config.optimizer == EIGHT_BITS:
        raise ConfigError(
            f"--deterministic and --optimizer {EIGHT_BITS}: 8-bit state is rounded in blocks of each process's"
            " part, and the blocks depend on the number of processes. Leave one of them out."
        )


def _check_changes(config: RunConfig) -> None:
    """Changes to the model that are not possible."""
    names = getattr(config, "new_special_tokens", [])
    if names:
        tokens_of(names)
    if names and config.tuner != FULL and not config.modules_to_save:
        raise ConfigError(
            f"--new-special-tokens and --tuner {config.tuner}: the embeddings of new tokens would be neither trained"
            " nor saved. Add --modules-to-save embed_tokens lm_head, which does both."
        )
    if names and config.external_plugins and config.model_type:
        raise ConfigError("--new-special-tokens: a plugin model decides itself how many tokens it embeds.")
    check_rope(getattr(config, "rope_scaling", {}), getattr(config, "max_model_len", None))


def _check_streaming(config: RunConfig) -> None:
    """Options that need all rows, and options that are only for streaming."""
    if not getattr(config, "streaming", False):
        if given := first_given(config, ("shuffle_buffer_size",)) if hasattr(config, "shuffle_buffer_size") else "":
            raise ConfigError(f"{given} needs --streaming. Without it, all rows are shuffled in each epoch.")
        if getattr(config, "max_epochs", None):
            raise ConfigError("--max-epochs needs --streaming. Without it, --epochs sets the number of passes.")
        return
    if not config.max_steps:
        raise ConfigError(
            "--streaming: the number of rows is not known, so add --max-steps, which sets the end of the run and of the"
            " learning rate schedule. --max-epochs may end the run earlier."
        )
    against = {
        "group_by_length": "the lengths of later rows are not known",
        "drop_last": "a step may hold rows of two passes over the data",
        "val_split": "a share of an unknown number of rows cannot be held out. Use --val-dataset",
    }
    _refuse_with("--streaming", config, against)


def _check_cached(config: RunConfig) -> None:
    """Options for reading rows if none are read, and options that do not work with cached rows."""
    cached = first_given(config, ("cached_dataset", "cached_val_dataset"))
    if cached and getattr(config, "streaming", False):
        raise ConfigError(
            f"{cached} has all rows before training, and --streaming reads them during it. Give one of them."
        )
    given = first_given(config, ("columns", "row_format", "model_name", "model_author"))
    if cached and given and not (config.dataset or config.val_dataset):
        raise ConfigError(
            f"{given} applies to rows read from --dataset, and those of {cached} are already encoded. Leave it out."
        )


def check_whole(config: RunConfig, command: str) -> None:
    """Raise ConfigError for --streaming with a command that needs all rows."""
    if getattr(config, "streaming", False):
        raise ConfigError(
            f"'shardproof {command}' needs all rows. Leave --streaming out, and take some of them:"
            f" --dataset {config.dataset[0].partition('#')[0]}#1000."
        )


def check_evaluation(config: RunConfig) -> None:
    """Raise ConfigError for an evaluation without rows, or for an option that needs evaluations if there are none."""
    if config.val_split and (given := first_given(config, ("val_dataset", "cached_val_dataset"))):
        raise ConfigError(f"{given} and --val-split mean the same: give one of them.")
    given = "--eval-steps" if config.eval_steps else f"--eval-strategy {config.eval_strategy}"
    if config.eval_steps and config.eval_strategy in ("epoch", "no"):
        raise ConfigError(
            f"--eval-steps {config.eval_steps} and --eval-strategy {config.eval_strategy}: leave one of them out."
        )
    if config.eval_strategy == "epoch" and getattr(config, "streaming", False):
        raise ConfigError("--eval-strategy epoch: the length of a pass over a stream is not known. Use --eval-steps N.")
    if config.eval_on_start:
        given = given if config.evaluates else "--eval-on-start"
        if config.eval_strategy == "no":
            raise ConfigError("--eval-on-start and --eval-strategy no: leave one of them out.")
    if (config.evaluates or config.eval_on_start) and not config.holds_out:
        streamed, looked_at = getattr(config, "streaming", False), config.early_stop or config.keep_best
        ways = [
            "name some with --val-dataset",
            *([] if streamed else ["hold some of --dataset out with --val-split 0.05"]),
        ]
        ways += [] if looked_at else [f"leave {given} out (ms-swift ignores it then)"]
        raise ConfigError(f"{given} needs rows to evaluate on, and there are none: {', or '.join(ways)}.")
    for name in ("early_stop", "keep_best"):
        if getattr(config, name) and not config.evaluates:
            raise ConfigError(
                f"{flag(name)} needs evaluations during training: add --eval-steps or --eval-strategy epoch."
            )
    if config.best_metric != "loss" and not (config.early_stop or config.keep_best):
        raise ConfigError("--best-metric is used by --keep-best and --early-stop: add one of them.")


def _check_padding_free(config: RunConfig) -> None:
    """Options that do not work with concatenated rows."""
    against = {
        "packing": "packed rows have no padding",
        "compile": "the model would be recompiled for each number of tokens in a batch",
        "neftune_noise_alpha": "the strength of its noise depends on the length of the row",
    }
    if config.padding_free:
        _refuse_with("--padding-free", config, against)


def _check_sequence(config: RunConfig) -> None:
    """Options that do not work with rows that are split across processes."""
    if getattr(config, "sequence_parallel", 1) == 1:
        return
    if config.attn not in (None, "sdpa", "varlen"):
        raise ConfigError(f"--sequence-parallel works with --attn sdpa and varlen, but --attn is {config.attn}.")
    against = {
        "padding_free": "rows cannot be both concatenated and split",
        "metrics": "metrics need full rows",
        "neftune_noise_alpha": "the strength of its noise depends on the length of the row",
        "liger_kernel": "its loss needs full rows",
        "compile": "the exchange between parts of a row cannot be compiled",
        "deterministic": "gradients of the parts of a row are added in another order",
        "fp8": "each part of a row would be scaled by its own maximum",
    }
    _refuse_with("--sequence-parallel", config, against)
    if (given := getattr(config, "loss_type", "nll")) == "dft" and config.recipe == "sft":
        raise ConfigError(
            f"--sequence-parallel and --loss-type {given}: a process holds only a part of a row's tokens."
        )
    loss = getattr(config, "loss", "answer")
    if config.recipe == "sft" and loss not in PLUGINS["loss"].built_in:
        raise ConfigError(f"--sequence-parallel computes the causal loss; --loss {loss} needs full rows.")


def _check_task(config: RunConfig) -> None:
    """Options that apply only to some tasks, and options that do not apply to a task."""
    if config.recipe == "sft" and (given := first_given(config, LABELS)):
        raise ConfigError(f"{given} applies to classifiers, and this run learns answers: add --task seq_cls.")
    task = getattr(config, "task", "causal_lm")
    if config.command == "sft" and task != "embedding" and first_given(config, ("pooling",)):
        raise ConfigError("--pooling applies to embeddings: add --task embedding.")
    if config.command == "sft" and task in ("causal_lm", "seq_cls") and first_given(config, ("loss_temperature",)):
        raise ConfigError("--loss-temperature applies to embeddings and rerankers: add --task embedding or reranker.")
    of_pairs = config.command != "sft" or config.recipe == "reranker"
    if not of_pairs and (given := first_given(config, ("max_positives", "max_negatives"))):
        raise ConfigError(f"{given} applies to rerankers: add --task reranker or generative_reranker.")
    for name, why in NOT_OF.get(task, {}).items():
        if given := first_given(config, (name,)):
            raise ConfigError(f"--task {task} and {given}: {why}. Leave one of them out.")
    if task in NOT_OF and TALKER in (config.train_parts or ()):
        what = "a vector" if task == "embedding" else "scores"
        raise ConfigError(f"--train-parts {TALKER}: a {TALKER} does not produce {what}. Leave it out.")
    of_template = (
        "chat_template",
        "agent_template",
        "template_variables",
        *(("system",) if config.recipe == "sft" else ()),
    )
    if getattr(config, "plain", False) and (given := first_given(config, of_template)):
        raise ConfigError(f"--plain leaves the chat template out, and {given} needs one. Give one of them.")


def _check_optimizer(config: RunConfig) -> None:
    if config.optimizer == EIGHT_BITS and config.min_processes:
        raise ConfigError(
            f"--min-processes and --optimizer {EIGHT_BITS}: 8-bit state lies in blocks of each process's part, and"
            " cannot be redistributed to fewer processes."
        )
    if getattr(config, "fp8", False) and (config.precision != "bf16" or config.tuner != FULL):
        hint = "a frozen base gains little from it" if config.tuner != FULL else "add --precision bf16"
        raise ConfigError(f"--fp8 needs --tuner full and --precision bf16: {hint}.")
    if config.reduce_dtype == "bf16" and (config.precision != "bf16" or config.stochastic_rounding):
        hint = "gradients are already bf16" if config.stochastic_rounding else "add --precision bf16"
        raise ConfigError(f"--reduce-dtype bf16 needs bf16 computing with fp32 master weights: {hint}.")
    if not config.stochastic_rounding:
        return
    why = None
    if config.precision != "bf16":
        why = f"rounds weights to bf16, and --precision is {config.precision}: add --precision bf16"
    elif config.optimizer != "adamw":
        why = f"has its own AdamW, and --optimizer is {config.optimizer}: leave one of them out"
    elif config.tuner != FULL:
        why = "is for --tuner full, as adapters have few weights: leave it out"
    if why:
        raise ConfigError(f"--stochastic-rounding {why}.")


def _check_four_bits(config: RunConfig) -> None:
    """Options that do not work with a 4-bit base model."""
    against = {
        "dora": "it needs the norms of weights, and these are packed",
        "compile": "the kernels that unpack weights cannot be compiled",
        "use_vllm": "vLLM is sent full weights, and these are packed",
    }
    if config.quantize:
        _refuse_with("--quantize", config, against)


def check_bits(config: RunConfig) -> None:
    """Raise ConfigError if bitsandbytes is needed but not installed."""
    eight = f"--optimizer {EIGHT_BITS}" if config.optimizer == EIGHT_BITS else None
    asked = f"--quantize {config.quantize}" if config.quantize else eight
    if asked and importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(f"{asked} needs bitsandbytes: pip install 'shardproof[eightbit]'")


def check_offload(offload: str | None, option: str = "--offload ") -> None:
    """Raise ConfigError for an invalid destination. `option`: the text before it in messages."""
    if offload in (None, "optimizer", "all"):
        return
    kind, _, folder = offload.partition(":")
    if kind != "nvme" or not folder:
        raise ConfigError(f"{option}{offload} must be optimizer, all or nvme:FOLDER.")
    if not Path(folder).is_dir():
        raise ConfigError(f"{option}nvme:{folder}: there is no such folder. Create it on a fast local disk.")


def _check_mixture(config: RunConfig) -> None:
    shares, named = config.interleave_prob, len(config.dataset)
    if not shares and (given := first_given(config, ("stopping_strategy",))):
        raise ConfigError(f"{given} sets when a mixture of datasets ends: add --interleave-prob.")
    if shares and config.cached_dataset:
        raise ConfigError("--interleave-prob mixes the datasets of --dataset: leave it or --cached-dataset out.")
    if shares and len(shares) != named:
        raise ConfigError(
            f"--interleave-prob has {len(shares)} share(s) for {named} dataset(s): give one for each, in order."
        )
    if shares and not math.isclose(sum(shares), 1, abs_tol=1e-6):
        raise ConfigError(
            f"--interleave-prob {' '.join(map(str, shares))}: shares must sum to 1, and these sum to {sum(shares):g}."
        )


def check_columns(columns: dict[str, str], fields: Sequence[str] = FIELDS, others: bool = False) -> None:
    """Raise ConfigError for a field that rows do not have. `others`: any name may be a field."""
    for field, column in columns.items():
        if field not in fields and not others:
            near = difflib.get_close_matches(field, fields, n=1)
            meant = f"{column}={field}" if column in fields else f"{near[0]}={column}" if near else ""
            hint = f" Did you mean {meant}?" if meant else ""
            raise ConfigError(
                f"--columns {field}={column}: there is no field {field!r}.{hint}\n"
                f"The field comes first: {', '.join(fields)}."
            )
